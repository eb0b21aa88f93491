"""The view `pending`: all that waits, as a table for Spark SQL.

    near     in the wheel                                                  from the broker, over bulk
    far      in the log, not yet taken by the pipeline                     likewise
    table    taken, due behind the horizon                                 files of the table, read by Spark itself

It is of the moment when it is made; the pipeline goes on. What is in the wheel by then is told by the wheel alone, what
is cancelled is left out.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf

from postdate.spark.executor.bulk_client import Gate
from postdate.spark.executor.selecting import HIDDEN
from postdate.spark.executor.waiting import COLUMNS, IS_NEAR, NAME, WaitingSource, body, properties
from postdate.table.format import CANCEL, DROP, MESSAGE, MESSAGES, File, list_files
from postdate.table.living import HAS_ARRIVED, IS_CANCELLED, IS_DROPPED, IS_UNPROMOTED

VIEW = "pending"
SHOWN = ("due", "topic", "tag", "key", "size", "properties", "body", "queue", "level", "arrival")
_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
_udf: Any = arrow_udf  # its types know functions of one kind only

State = dict[str, Any]


def pending(spark: SparkSession, bulk: str) -> DataFrame:
    """All that waits, by the broker whose bulk address that is. Raises pyarrow's FlightError where it is away."""
    with Gate(bulk) as gate:
        state = gate.state()
    outside = _outside(spark, bulk, max(state["taken"], state["far_first"]), state["far_length"])
    near, rest = outside.filter(f.col(IS_NEAR)), outside.filter(~f.col(IS_NEAR)).select(*COLUMNS)
    base, files = _listed(state)
    taken = [file for file in files if file.due_high > state["horizon"] and not file.is_untaken(state["taken"])]
    if taken:
        is_taken = f.expr(HAS_ARRIVED.format(before=state["arrival_of_taken"]))
        table = _read(spark, base, taken).alias("m").filter((f.col("due") > state["horizon"]) & is_taken)
        rest = rest.unionByName(table)
    return _shown(_waiting(near, rest, state))


@contextmanager
def selectable(
    spark: SparkSession, bulk: str, state: State, base: str, files: Iterable[File], before: int
) -> Iterator[DataFrame]:
    """What waits at the place of a command that arrived there, when the table has everything up to it: as `pending`
    shows it, and the table's own columns under hidden names. The wheel is read once: what a rescue moves there
    meanwhile must not be missed in both places.
    """
    near = _outside(spark, bulk, 0, 0).persist(StorageLevel.DISK_ONLY)
    try:
        near.count()
        untaken = [file for file in files if file.is_untaken(state["taken"])]
        taken = [file for file in files if not file.is_untaken(state["taken"])]
        unpromoted = IS_UNPROMOTED.format(horizon=state["horizon"], late_from=state["arrival_of_taken"])
        rest = _read(spark, base, untaken)
        rest = rest.unionByName(_read(spark, base, taken).alias("m").filter(f.expr(unpromoted)))
        waiting = _waiting(near, rest, state).alias("m").filter(f.expr(HAS_ARRIVED.format(before=before)))
        yield _shown(waiting, hidden=True)
    finally:
        near.unpersist()


def chosen(rows: DataFrame, where: str) -> DataFrame:
    """Rows by a predicate that knows their columns and no others. Without a name of its own Spark would look for a
    column where the rows come from.
    """
    return rows.alias(VIEW).where(where)


def _outside(spark: SparkSession, bulk: str, start: int, stop: int) -> DataFrame:
    """The wheel, and far rows start..stop-1."""
    spark.dataSource.register(WaitingSource)
    reader = spark.read.format(NAME).option("bulk", bulk)
    return reader.option("start", start).option("stop", stop).load()


def _listed(state: State) -> tuple[str, list[File]]:
    """Where the table's files are, and which there are; none where there is no table yet."""
    if not state["table"]:
        return "", []
    try:
        delta = DeltaTable(f"{state['table'].rstrip('/')}/{MESSAGES}")
    except TableNotFoundError:
        return "", []
    return delta.table_uri.rstrip("/"), list_files(delta)


def _read(spark: SparkSession, base: str, files: list[File]) -> DataFrame:
    if not files:
        return spark.createDataFrame([], _SCHEMA)
    return spark.read.schema(_SCHEMA).parquet(*(f"{base}/{file.path}" for file in files))


def _waiting(near: DataFrame, rest: DataFrame, state: State) -> DataFrame:
    """Messages in the wheel, and those elsewhere that nothing takes away, for topics that are there."""
    waiting = near.unionByName(living_rows(rest, near).withColumn(IS_NEAR, f.lit(False)))
    return waiting.filter(~f.col("queue").isin(state["gone"])) if state["gone"] else waiting


def living_rows(rest: DataFrame, near: DataFrame) -> DataFrame:
    """The messages that no cancel and no drop takes away (table/living.py), and that are not in the wheel by now."""
    messages = rest.filter(f.col("kind") == MESSAGE).alias("m")
    cancels = f.broadcast(rest.filter(f.col("kind") == CANCEL)).alias("c")
    messages = messages.join(cancels, f.expr(IS_CANCELLED), "left_anti")
    drops = rest.filter(f.col("kind") == DROP).alias("d")
    messages = messages.join(drops, f.expr(IS_DROPPED), "left_anti")
    return messages.join(f.broadcast(near.select("arrival")), "arrival", "left_anti").select(*COLUMNS)


def _shown(waiting: DataFrame, *, hidden: bool = False) -> DataFrame:
    """As it is documented. What a query does not ask for is not read."""
    body_of = _udf(body, "binary")
    properties_of = _udf(properties, "map<string, string>")
    own = [f.col(name).alias(f"{HIDDEN}{name}") for name in (*COLUMNS, IS_NEAR)] if hidden else []
    return waiting.select(
        f.timestamp_millis("due").alias("due"), "topic", "tag", "key", "size",
        properties_of("record").alias("properties"), body_of("record").alias("body"), "queue", "level", "arrival",
        *own,
    )  # fmt: skip

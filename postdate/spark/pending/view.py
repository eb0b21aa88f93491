"""The view `pending`: all that waits, as a table for Spark SQL.

    near     in the wheel                                                  from the broker, over bulk
    far      in the log, not yet taken by the pipeline                     likewise
    table    taken, due after the horizon                                  files of the table, read by Spark itself

It shows the moment when it is made; the pipeline goes on. A message that has come into the wheel meanwhile is shown
from there alone, a cancelled one is left out.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from deltalake.exceptions import TableNotFoundError
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf

from postdate.arrival import JOB_SHIFT, OWN
from postdate.contract import JobOrder, State
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.executor.selecting import HIDDEN
from postdate.spark.executor.waiting import COLUMNS, IS_NEAR, NAME, WaitingSource, body, properties
from postdate.table.files import Window, touches
from postdate.table.format import CANCEL, MESSAGE, File, list_files
from postdate.table.identity import open_table
from postdate.table.living import CAME_BEFORE, DROPS, HAS_ARRIVED, IS_CANCELLED, IS_DROPPED, IS_UNPROMOTED

VIEW = "pending"
SHOWN = ("due", "topic", "tag", "key", "size", "properties", "body", "queue", "level", "arrival")
_SCHEMA = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
_udf: Any = arrow_udf  # its types know functions of one kind only
_Hint = Callable[[DataFrame], DataFrame]


def _unchanged(rows: DataFrame) -> DataFrame:
    return rows


def pending(spark: SparkSession, broker: BrokerClient) -> DataFrame:
    """All that waits at a broker. Raises Unreachable or TimedOut where that is away, ForeignTable where the table is
    another broker's.
    """
    state = broker.state()
    base, files = _listed(state)
    outside = _outside(spark, broker.bulk_of(state), max(state.taken, state.far_first), state.far_length)
    near, rest = outside.filter(f.col(IS_NEAR)), outside.filter(~f.col(IS_NEAR)).select(*COLUMNS)
    taken = [file for file in files if file.due_high > state.horizon and not file.is_untaken(state.taken)]
    if taken:
        is_taken = f.expr(HAS_ARRIVED.format(before=state.arrival_of_taken))
        table = _read(spark, base, taken).alias("m").filter((f.col("due") > state.horizon) & is_taken)
        rest = rest.unionByName(table)
    return _user_columns(_waiting(near, rest, state))


@contextmanager
def read_wheel(spark: SparkSession, bulk: str) -> Iterator[DataFrame]:
    """The wheel as it is now, read once."""
    near = _outside(spark, bulk, 0, 0).persist(StorageLevel.DISK_ONLY)
    try:
        near.count()
        yield near
    finally:
        near.unpersist()


def selectable(
    spark: SparkSession, near: DataFrame, state: State, base: str, files: Iterable[File], job: JobOrder, window: Window
) -> DataFrame:
    """What waits in a window of due and came before a job's command. `state` and `files` are of one moment at which the
    table had all of that; the wheel was read after it, so that a message that moves there meanwhile is not missed in
    both places. The columns are those of `pending`, and the table's own under hidden names.
    """
    files = [file for file in files if touches(file, window)]
    untaken = [file for file in files if file.is_untaken(state.taken)]
    taken = [file for file in files if not file.is_untaken(state.taken)]
    unpromoted = IS_UNPROMOTED.format(horizon=state.horizon, late_from=state.arrival_of_taken)
    rest = _read(spark, base, untaken)
    rest = rest.unionByName(_read(spark, base, taken).alias("m").filter(f.expr(unpromoted)))
    is_within = (f.col("due") > window.due_low) & (f.col("due") <= window.due_high)
    waiting = _waiting(near.filter(is_within), rest.filter(is_within), state, f.broadcast).alias("m")
    came_before = CAME_BEFORE.format(arrival=job.arrival, number=job.number)
    brought_by = f.expr(f"(m.arrival - {OWN}) >> {JOB_SHIFT}")
    waiting = waiting.filter(f.expr(came_before))
    if job.loading:
        waiting = waiting.filter((f.col("m.arrival") < OWN) | ~brought_by.isin(list(job.loading)))
    return _user_columns(waiting, hidden=True)


def matching(rows: DataFrame, where: str) -> DataFrame:
    """The rows that a predicate over their columns lets pass. The alias keeps Spark from looking for further columns
    where the rows come from.
    """
    return rows.alias(VIEW).where(where)


def _outside(spark: SparkSession, bulk: str, start: int, stop: int) -> DataFrame:
    """The wheel, and far rows start..stop-1."""
    spark.dataSource.register(WaitingSource)
    reader = spark.read.format(NAME).option("bulk", bulk)
    return reader.option("start", start).option("stop", stop).load()


def _listed(state: State) -> tuple[str, list[File]]:
    """The folder of the table's files, and the files; none where there is no table yet. Raises ForeignTable."""
    if not state.table:
        return "", []
    try:
        delta = open_table(state.table, state.identity)
    except TableNotFoundError:
        return "", []
    return delta.table_uri.rstrip("/"), list_files(delta)


def _read(spark: SparkSession, base: str, files: list[File]) -> DataFrame:
    if not files:
        return spark.createDataFrame([], _SCHEMA)
    return spark.read.schema(_SCHEMA).parquet(*(f"{base}/{file.path}" for file in files))


def _waiting(near: DataFrame, rest: DataFrame, state: State, hint: _Hint = _unchanged) -> DataFrame:
    """The messages of existing topics: those in the wheel, and the living ones elsewhere."""
    waiting = near.unionByName(living_rows(rest, near, hint).withColumn(IS_NEAR, f.lit(False)))
    return waiting.filter(~f.col("queue").isin(list(state.gone))) if state.gone else waiting


def living_rows(rest: DataFrame, near: DataFrame, hint: _Hint = _unchanged) -> DataFrame:
    """The messages that no cancel, drop or move takes away (table/living.py), and that are not in the wheel by now.
    `hint` says how to join drops: where they are few, messages need not be sorted for them.
    """
    messages = rest.filter(f.col("kind") == MESSAGE).alias("m")
    cancels = f.broadcast(rest.filter(f.col("kind") == CANCEL)).alias("c")
    messages = messages.join(cancels, f.expr(IS_CANCELLED), "left_anti")
    drops = hint(rest.filter(f"kind in {DROPS}")).alias("d")
    messages = messages.join(drops, f.expr(IS_DROPPED), "left_anti")
    return messages.join(f.broadcast(near.select("arrival")), "arrival", "left_anti").select(*COLUMNS)


def _user_columns(waiting: DataFrame, *, hidden: bool = False) -> DataFrame:
    """The columns that users see. Spark does not read those that a query does not name."""
    body_of = _udf(body, "binary")
    properties_of = _udf(properties, "map<string, string>")
    own = [f.col(name).alias(f"{HIDDEN}{name}") for name in (*COLUMNS, IS_NEAR)] if hidden else []
    return waiting.select(
        f.timestamp_millis("due").alias("due"), "topic", "tag", "key", "size",
        properties_of("record").alias("properties"), body_of("record").alias("body"), "queue", "level", "arrival",
        *own,
    )  # fmt: skip

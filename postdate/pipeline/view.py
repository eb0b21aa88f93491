"""The view `pending`: all that waits, as a table for Spark SQL.

    near     in the wheel                                                  from the broker, over bulk
    far      in the log, not yet taken by the pipeline                     likewise
    table    taken, due behind the horizon                                 files of the table, read by Spark itself

It is of the moment when it is made; the pipeline goes on. What is in the wheel by then is told by the wheel alone, what
is cancelled is left out.
"""

from typing import Any

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf

from postdate.pipeline.gate import Gate
from postdate.pipeline.waiting import COLUMNS, IS_NEAR, NAME, WaitingSource, body, properties
from postdate.table_format import CANCEL, MESSAGE, MESSAGES, files_of

VIEW = "pending"
_udf: Any = arrow_udf  # its types know functions of one kind only


def pending(spark: SparkSession, bulk: str) -> DataFrame:
    """All that waits, by the broker whose bulk address that is. Raises pyarrow's FlightError where it is away."""
    with Gate(bulk) as gate:
        state = gate.state()
    spark.dataSource.register(WaitingSource)
    outside = (
        spark.read.format(NAME).option("bulk", bulk).option("start", max(state["taken"], state["far_first"]))
        .option("stop", state["far_length"]).load()
    )  # fmt: skip
    near = outside.filter(f.col(IS_NEAR)).select(*COLUMNS)
    rest = outside.filter(~f.col(IS_NEAR)).select(*COLUMNS)
    in_table = _in_table(spark, state)
    if in_table is not None:
        rest = rest.unionByName(in_table)
    waiting = near.unionByName(_living(rest, near))
    if state["gone"]:
        waiting = waiting.filter(~f.col("queue").isin(state["gone"]))
    return _shown(waiting)


def _in_table(spark: SparkSession, state: dict[str, Any]) -> DataFrame | None:
    """Rows that were taken and are due behind the horizon."""
    if not state["table"]:
        return None
    try:
        delta = DeltaTable(f"{state['table'].rstrip('/')}/{MESSAGES}")
    except TableNotFoundError:
        return None
    base = delta.table_uri.rstrip("/")
    paths = [f"{base}/{file.path}" for file in files_of(delta) if file.due_high > state["horizon"]]
    if not paths:
        return None
    rows = spark.read.parquet(*paths).select(*COLUMNS)
    return rows.filter((f.col("due") > state["horizon"]) & (f.col("arrival") < state["arrival_of_taken"]))


def _living(rest: DataFrame, near: DataFrame) -> DataFrame:
    """The messages that no cancel is for, and that are not in the wheel by now."""
    messages = rest.filter(f.col("kind") == MESSAGE).alias("m")
    cancels = f.broadcast(rest.filter(f.col("kind") == CANCEL)).alias("c")
    same_key = ((f.col("c.unique_hash") != 0) & (f.col("c.unique_hash") == f.col("m.unique_hash"))) | (
        (f.col("c.key_hash") != 0) & (f.col("c.key_hash") == f.col("m.key_hash"))
    )
    is_for = (f.col("c.topic") == f.col("m.topic")) & (f.col("c.due") == f.col("m.due"))
    is_for &= (f.col("m.arrival") < f.col("c.arrival")) & same_key
    messages = messages.join(cancels, is_for, "left_anti")
    return messages.join(f.broadcast(near.select("arrival")), "arrival", "left_anti").select(*COLUMNS)


def _shown(waiting: DataFrame) -> DataFrame:
    """As it is documented. What a query does not ask for is not read."""
    body_of = _udf(body, "binary")
    properties_of = _udf(properties, "map<string, string>")
    return waiting.select(
        f.timestamp_millis("due").alias("due"), "topic", "tag", "key", "size",
        properties_of("record").alias("properties"), body_of("record").alias("body"), "queue", "level", "arrival",
    )  # fmt: skip

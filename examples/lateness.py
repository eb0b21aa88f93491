"""How late are the messages of a topic? A stream into a Delta table, one row per minute of due time and batch.

    python examples/lateness.py orders --table lateness [--addr 127.0.0.1:9876] [--follow]

It takes what is visible and ends; the next run goes on where this one ended. With --follow it runs until Ctrl-C. A
batch that a crash has Spark run again is in the table once: each commit carries the number of its batch.
"""

import argparse
import os
import sys
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import postdate.spark

APP = "lateness"
SCHEMA = pa.schema(
    [("minute", pa.string()), ("messages", pa.int64()), ("mean_ms", pa.float64()), ("max_ms", pa.int64())]
)


def by_minute(messages: DataFrame) -> DataFrame:
    late_ms = f.unix_millis("visible") - f.unix_millis("due")
    minute = f.date_format(f.date_trunc("minute", "due"), "yyyy-MM-dd HH:mm")
    delayed = messages.filter("due is not null").groupBy(minute.alias("minute"))
    return delayed.agg(f.count("*").alias("messages"), f.avg(late_ms).alias("mean_ms"), f.max(late_ms).alias("max_ms"))


def append(table: str, messages: DataFrame, batch: int) -> None:
    done = DeltaTable(table).transaction_version(APP)
    if done is None or done < batch:
        once = CommitProperties(app_transactions=[Transaction(APP, batch)])
        write_deltalake(table, by_minute(messages).toArrow().cast(SCHEMA), mode="append", commit_properties=once)


def show(table: str) -> None:
    print(f"{'minute, UTC':18}{'messages':>10}{'mean ms':>10}{'max ms':>8}")
    rows = DeltaTable(table).to_pyarrow_table().sort_by("minute")
    for row in rows.to_pylist():
        print(f"{row['minute']:18}{row['messages']:>10,}{row['mean_ms']:>10.1f}{row['max_ms']:>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Lateness of a topic's messages, by minute, in a Delta table.")
    parser.add_argument("topic")
    parser.add_argument("--table", default="lateness", help="its folder; default lateness")
    parser.add_argument("--addr", default="127.0.0.1:9876", help="the broker's address")
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    options = parser.parse_args()

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master("local[2]").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    postdate.spark.register(spark)
    DeltaTable.create(options.table, SCHEMA, mode="ignore")
    source = spark.readStream.format("postdate").option("addr", options.addr).option("topic", options.topic)
    query = (
        source.option("columns", "due,visible").load()
        .writeStream.foreachBatch(lambda messages, batch: append(options.table, messages, batch))
        .option("checkpointLocation", str(Path(options.table) / "_checkpoint"))
        .trigger(**({"processingTime": "1 minute"} if options.follow else {"availableNow": True}))
        .start()
    )  # fmt: skip
    try:
        query.awaitTermination()
    except KeyboardInterrupt:
        query.stop()
    show(options.table)
    spark.stop()


if __name__ == "__main__":
    main()

"""A campaign: 100,000 reminders, each due tomorrow at nine in the morning where its customer lives.

    postdate up                          in another terminal: broker and pipeline
    postdate topic create reminders
    python examples/campaign.py          or: python examples/campaign.py 127.0.0.1:9878 --customers 1000000

Run twice, it schedules nothing twice: the import has an id. `postdate forecast --topic reminders` shows the waves.
"""

import argparse
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import postdate.spark

ZONES = ["Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Sydney", "America/Sao_Paulo"]


def customers(spark: SparkSession, count: int) -> DataFrame:
    """Yours would be read from somewhere."""
    zones = f.array(*map(f.lit, ZONES))
    return spark.range(count).select(
        f.concat(f.lit("customer-"), "id").alias("customer"),
        f.element_at(zones, (f.col("id") % len(ZONES) + 1).cast("int")).alias("zone"),
    )


def reminders(who: DataFrame, day: str) -> DataFrame:
    nine = f.to_utc_timestamp(f.lit(f"{day} 09:00:00"), f.col("zone"))  # what the clock shows there, as an instant
    body = f.to_json(f.struct("customer", f.lit("your trial ends today").alias("text")))
    return who.select("customer", "zone", nine.alias("send_at"), body.alias("body"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Schedules reminders at 09:00 local time.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:9876", help="the broker's address")
    parser.add_argument("--customers", type=int, default=100_000)
    parser.add_argument("--day", default=f"{datetime.now(UTC) + timedelta(days=1):%Y-%m-%d}")
    arguments = parser.parse_args()

    builder = SparkSession.builder.master("local[*]").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    postdate.spark.register(spark)
    campaign = reminders(customers(spark, arguments.customers), arguments.day)
    (
        campaign.write.format("postdate").mode("append")
        .option("addr", arguments.address).option("topic", "reminders").option("id", f"campaign-{arguments.day}")
        .option("due", "send_at").option("key", "customer").option("property", "zone=zone")
        .save()
    )  # fmt: skip
    for row in campaign.groupBy("zone", "send_at").count().orderBy("send_at").collect():
        print(f"{row.send_at:%Y-%m-%d %H:%M} UTC  {row['count']:>7,}  {row.zone}")
    print(f"{campaign.count():,} reminders are scheduled")
    spark.stop()


if __name__ == "__main__":
    main()

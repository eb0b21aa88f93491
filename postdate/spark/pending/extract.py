"""Writes what waits to a folder, as Parquet, on a Spark of its own: the process that `postdate.pending()` starts."""

import json
import os
import sys
from typing import Any

from postdate.errors import PostdateError
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.pending.pending import Request
from postdate.spark.pending.query import embedded_spark, spark_errors
from postdate.spark.pending.view import pending


def extract(spark: Any, broker: BrokerClient, request: Request) -> None:
    """Writes the rows. None goes through the driver, whose heap need not grow with them. Raises what `spark_errors`
    raises.
    """
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    with spark_errors():
        rows = pending(spark, broker)
        if request.where:
            rows = rows.where(request.where)
        if request.limit:
            rows = rows.orderBy("due", "arrival").limit(request.limit)
        rows.select(*request.columns or rows.columns).write.parquet(request.target, compression="lz4")


def main() -> int:
    """Argument: a request, as JSON. Where it fails, the last line on stderr is the error's name and sentence."""
    request = Request(*json.loads(sys.argv[1]))
    try:
        broker = BrokerClient(request.address, request.bulk)
        broker.bulk()  # before Spark starts, which takes some seconds
        with embedded_spark(request.memory, os.environ) as spark:
            extract(spark, broker, request)
    except PostdateError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

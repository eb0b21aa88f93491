"""Writes what waits to a folder, as Parquet, on a Spark of its own: the process behind `postdate.pending()`."""

import json
import os
import sys
from typing import Any

from postdate.errors import PostdateError
from postdate.spark.executor.bulk_client import Gate
from postdate.spark.pending.pending import Wish
from postdate.spark.pending.query import embedded, told
from postdate.spark.pending.view import pending


def extract(spark: Any, wish: Wish) -> None:
    """No row goes through the driver, so that its heap need not grow with them. Raises what `told` raises."""
    spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    with told(wish.bulk):
        rows = pending(spark, wish.bulk)
        if wish.where:
            rows = rows.where(wish.where)
        if wish.limit:
            rows = rows.orderBy("due", "arrival").limit(wish.limit)
        rows.select(*wish.columns or rows.columns).write.parquet(wish.target, compression="lz4")


def main() -> int:
    """Argument: a wish, as JSON. Where it fails, the last line on stderr is the error's name and sentence."""
    wish = Wish(*json.loads(sys.argv[1]))
    try:
        with told(wish.bulk), Gate(wish.bulk) as gate:
            gate.state()  # before Spark starts, which takes some seconds
        with embedded(wish.memory, os.environ) as spark:
            extract(spark, wish)
    except PostdateError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

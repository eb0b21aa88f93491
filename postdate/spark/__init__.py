"""Postdate for a Spark session of yours:

import postdate.spark

postdate.spark.register(spark)
spark.read.format("postdate").option("topic", "orders").load()
"""

from typing import Any

from postdate.pipeline.public import PostdateSource

__all__ = ["PostdateSource", "register"]


def register(spark: Any) -> None:
    """Makes a session know the format "postdate"; docs/streams.md says what it gives."""
    spark.dataSource.register(PostdateSource)

"""Postdate for your Spark session:

    import postdate.spark

    postdate.spark.register(spark)
    spark.read.format("postdate").option("topic", "orders").load()

    pipeline/   the driver, its batches and its jobs          executor/   what runs on executors, and the two clients
    formats/    format("postdate"): a topic, and the sink     imports/    rows of files as messages
    pending/    all that waits, as a view and as a table      session/    Spark itself, and Java

Everything that imports pyspark is in this package. This file does not import it: executors load this file before they
know whether they need Spark.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postdate.spark.formats.topic import PostdateSource

__all__ = ["PostdateSource", "register"]


def register(spark: Any) -> None:
    """Makes the format "postdate" known to a session; docs/streams.md describes it."""
    from postdate.extras import require_extra

    require_extra("spark", "postdate.spark")
    from postdate.spark.formats.topic import PostdateSource

    spark.dataSource.register(PostdateSource)


if not TYPE_CHECKING:  # or a type checker would believe that there is every name

    def __getattr__(name: str) -> object:
        if name != "PostdateSource":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from postdate.spark.formats.topic import PostdateSource

        return PostdateSource

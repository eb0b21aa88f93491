"""Postdate for a Spark session of yours:

    import postdate.spark

    postdate.spark.register(spark)
    spark.read.format("postdate").option("topic", "orders").load()

Everything that imports pyspark is in this package. The package itself does not: executors import it before they know
whether they need it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postdate.spark.formats.public import PostdateSource

__all__ = ["PostdateSource", "register"]


def register(spark: Any) -> None:
    """Makes a session know the format "postdate"; docs/streams.md says what it gives."""
    from postdate.extras import require_extra

    require_extra("spark", "postdate.spark")
    from postdate.spark.formats.public import PostdateSource

    spark.dataSource.register(PostdateSource)


if not TYPE_CHECKING:  # or a type checker would believe that there is every name

    def __getattr__(name: str) -> object:
        if name != "PostdateSource":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from postdate.spark.formats.public import PostdateSource

        return PostdateSource

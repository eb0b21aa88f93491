"""What users of Spark know of Postdate: the format "postdate". docs/streams.md and docs/import.md are the contract.

Spark makes these objects in processes of its own, on the driver and on executors; each of them imports this module.
"""

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource

from postdate.spark.formats.topic import COLUMNS, TopicReader, TopicStreamReader, asked_of

if TYPE_CHECKING:
    from postdate.spark.formats import sink

NAME = "postdate"


class PostdateSource(DataSource):
    """A topic as a table and as a stream, and frames as messages. Options are checked when it is loaded, the broker is
    asked to read.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        """Of what is read. Raises UsageError."""
        return ", ".join(f"{name} {COLUMNS[name]}" for name in asked_of(self.options).columns)

    def reader(self, schema: Any) -> TopicReader:  # noqa: ARG002 - Spark's names
        return TopicReader(asked_of(self.options))

    def streamReader(self, schema: Any) -> TopicStreamReader:  # noqa: ARG002, N802
        return TopicStreamReader(asked_of(self.options))

    def writer(self, schema: Any, overwrite: bool) -> "sink.Writer":
        from postdate.spark.formats import sink  # needs more than readers, which travel to executors

        return sink.writer(self.options, schema, overwrite=overwrite)

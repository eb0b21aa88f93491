"""What users of Spark know of Postdate: the format "postdate".

Spark makes these objects in processes of its own, on the driver and on executors; each of them imports this module.
"""

from typing import Any

from pyspark.sql.datasource import DataSource

from postdate.pipeline import sink

NAME = "postdate"


class PostdateSource(DataSource):
    """Frames as messages; docs/import.md is the contract."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def writer(self, schema: Any, overwrite: bool) -> sink.Writer:
        return sink.writer(self.options, schema, overwrite=overwrite)

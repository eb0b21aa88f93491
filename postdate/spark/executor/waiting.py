"""What waits outside the table, as rows for Spark: the wheel, and the rest of the far queue. And what records hold.

Executors import this: the standard library, pyarrow and pyspark are all it may need.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from postdate.message import decode_properties
from postdate.spark.executor.bulk_client import BulkClient
from postdate.storage import record as records
from postdate.table.files import constant_column

NAME = "postdate-waiting"
_RANGE_ROWS = 250_000

# Spark's types of the columns that this has in common with the table; `is_near` is ours.
COLUMNS = {
    "due": "bigint", "arrival": "bigint", "kind": "tinyint", "topic": "string", "queue": "int", "level": "tinyint",
    "tag_hash": "int", "unique_hash": "bigint", "key_hash": "bigint", "key": "string", "tag": "string", "size": "int",
    "record": "binary",
}  # fmt: skip
IS_NEAR = "is_near"


class WaitingSource(DataSource):
    """Options: bulk (host:port), start, stop (of the far rows)."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return ", ".join(f"{name} {kind}" for name, kind in {**COLUMNS, IS_NEAR: "boolean"}.items())

    def reader(self, schema: Any) -> "WaitingReader":  # noqa: ARG002 - Spark's names
        return WaitingReader(self.options["bulk"], int(self.options["start"]), int(self.options["stop"]))


class WaitingReader(DataSourceReader):
    """Reads the wheel, and a range of far rows."""

    def __init__(self, bulk: str, start: int, stop: int) -> None:
        self._bulk = bulk
        self._start, self._stop = start, stop

    def partitions(self) -> Sequence[InputPartition]:
        """One partition for the wheel, which is None, and one for each range of far rows."""
        ranges = [(at, min(at + _RANGE_ROWS, self._stop)) for at in range(self._start, max(self._stop, 0), _RANGE_ROWS)]
        return [InputPartition(each) for each in (None, *ranges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with BulkClient(self._bulk) as bulk:
            batches = bulk.near() if partition.value is None else bulk.far(*partition.value)
            for batch in batches:
                size = pc.binary_length(batch.column("record"))
                arrays = [size if name == "size" else batch.column(name) for name in COLUMNS]
                is_near = constant_column(partition.value is None, pa.bool_(), batch.num_rows)
                yield pa.RecordBatch.from_arrays([*arrays, is_near], names=[*COLUMNS, IS_NEAR])


# -- what records hold ------------------------------------------------------------------------------------------


def body(record: pa.Array) -> pa.Array:
    return pa.array([records.decode(each).body for each in record.to_pylist()], pa.binary())


def properties(record: pa.Array) -> pa.Array:
    kind = pa.map_(pa.string(), pa.string())
    return pa.array(
        [list(decode_properties(records.decode(each).properties).items()) for each in record.to_pylist()], kind
    )

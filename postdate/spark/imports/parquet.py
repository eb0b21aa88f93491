"""Local Parquet files as parts of an import: tasks read row groups themselves, so that no row goes through Java.

Spark determines the types of the columns, and values come as it would give them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from postdate.errors import PipelineFailed
from postdate.spark.imports.loading import BLOCK, FILE
from postdate.table.files import constant_column

PART_ROWS, _PART_BYTES = 1_000_000, 512 << 20  # of one task: small enough to keep every core busy to the end
_BATCH_ROWS = 32_768


class Group(NamedTuple):
    path: str
    number: int


Part = list[Group]


def parts_of(paths: Sequence[str], columns: Sequence[str], part_rows: int = PART_ROWS) -> list[Part] | None:
    """Splits row groups into parts, one for each task. Returns None where no file is local, or where a file lacks a
    column: the name of a folder may hold it, which Spark knows.
    """
    if not paths:
        return None
    parts: list[Part] = []
    rows = size = 0
    for path in paths:
        with _named_errors(path):
            metadata = pq.read_metadata(path)
        if not set(columns) <= set(metadata.schema.to_arrow_schema().names):
            return None
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if not parts or rows >= part_rows or size >= _PART_BYTES:
                parts.append([])
                rows = size = 0
            parts[-1].append(Group(path, number))
            rows, size = rows + group.num_rows, size + group.total_byte_size
    return parts


def batches_of(part: Part, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a part with these columns, and with where each comes from."""
    for path, number in part:
        with _named_errors(path), pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, [number], schema.names, use_threads=False):
                arrays: list[Any] = []
                for field in schema:
                    column = batch.column(field.name)
                    if column.type != field.type:  # Spark has microseconds, and drops what is finer
                        column = column.cast(field.type, safe=not pa.types.is_timestamp(field.type))
                    arrays.append(column)
                rows = batch.num_rows
                places = [constant_column(path, pa.string(), rows), constant_column(number, pa.int64(), rows)]
                yield pa.RecordBatch.from_arrays([*arrays, *places], names=[*schema.names, FILE, BLOCK])


@contextmanager
def _named_errors(path: str) -> Iterator[None]:
    """Names the file that cannot be read."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise PipelineFailed(f"{path} cannot be read: {error}") from error

"""Reads one column of a Parquet file of a user's, as texts, a batch at a time."""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postdate.errors import UsageError


def read(path: str, choose: Callable[[Sequence[str]], str]) -> Iterator[str]:
    """The values of the column that `choose` takes of those there are, without nulls. Raises UsageError for a file that
    is not Parquet, and for a column that holds neither texts nor whole numbers.
    """
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UsageError(f"{path} is not a Parquet file: {error}") from error
    name = choose(file.schema_arrow.names)
    kind = file.schema_arrow.field(name).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise UsageError(f"{path}: column {name} is {kind}, expected text or whole numbers")
    return (
        text
        for batch in file.iter_batches(columns=[name])
        for text in pc.drop_null(batch.column(0).cast(pa.string())).to_pylist()
    )

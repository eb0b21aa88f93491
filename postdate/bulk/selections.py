"""Rows that jobs have selected, on their way into files of the broker, and out again for whoever follows a decision."""

from collections.abc import Iterator, Sequence

import numpy as np
import orjson
import pyarrow as pa

from postdate.errors import Refused, UsageError
from postdate.storage import layout, selection
from postdate.storage.disk import Disk
from postdate.table.format import SELECTED

ROWS_MAX = 4_000_000  # of one file: 160 MB
_PIECE_ROWS = 65_536


def selection_name(wish: bytes) -> str:
    """The selection that a ticket or a command means; empty where it means none. Raises UsageError."""
    try:
        said = orjson.loads(wish)
    except ValueError:
        return ""  # whoever reads it next says so
    name = said.get("selection", "") if isinstance(said, dict) else ""
    if name and not (isinstance(name, str) and selection.is_name(name)):
        raise UsageError(
            f"the name of a selection is {name!r:.100}, expected eight digits of the job, -, then a-z A-Z 0-9 -"
        )
    return str(name)


class Selections:
    """Of one data folder. The one who writes them."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        selection.remove_unfinished(disk)

    def write(self, name: str, batches: Sequence[pa.RecordBatch]) -> int:
        """Durable on return; says how many rows. Raises Refused, UsageError."""
        if selection.is_there(self._disk, name):
            raise Refused(f"selection {name} is there already: give each one a name of its own")
        rows = np.concatenate([np.empty(0, layout.SELECTED), *(_rows(batch) for batch in batches)])
        if len(rows) > ROWS_MAX:
            raise UsageError(f"selection {name} has {len(rows)} rows, the limit is {ROWS_MAX}")
        if not selection.is_sorted(rows):
            raise UsageError(f"selection {name} is not in (due, arrival) order, or has a row twice")
        selection.write(self._disk, name, rows)
        return len(rows)

    def read(self, name: str) -> Iterator[pa.RecordBatch]:
        """Raises CorruptSelection."""
        rows = selection.rows_of(self._disk, name)
        for start in range(0, len(rows), _PIECE_ROWS):
            piece = rows[start : start + _PIECE_ROWS]
            columns = [
                pa.array(np.ascontiguousarray(piece[field.name]).view(field.type.to_pandas_dtype()))
                for field in SELECTED
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=SELECTED)


def _rows(batch: pa.RecordBatch) -> np.ndarray:
    if batch.schema.names != SELECTED.names or batch.schema.types != SELECTED.types:
        raise UsageError(f"the columns of a selection are {batch.schema.names}, expected {SELECTED.names}")
    rows = np.empty(batch.num_rows, layout.SELECTED)
    for name in SELECTED.names:
        rows[name] = batch.column(name).to_numpy().view(layout.SELECTED[name])
    return rows

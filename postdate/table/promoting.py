"""Reading a promotion: the rows of a slice that still wait, as a chunk holds them. slices.py plans it.

Spark's executors promote a slice each; bulk promotes one after the other where no pipeline does. Both read by this
code. Executors import this module: it needs the standard library and pyarrow.
"""

import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack

import pyarrow as pa
import pyarrow.compute as pc

from postdate.table.files import Slice, SortedRows, TableFolder, arrived_within
from postdate.table.format import CANCEL, CHUNK_COLUMNS, MESSAGE
from postdate.table.living import Removals, drops_of, names_key


def name_chunk(epoch: int) -> str:
    """Returns a name that no other chunk has."""
    return f"{epoch:06d}-{uuid.uuid4().hex}"


class DueRows:
    """The messages of a slice that still wait, in (due, arrival) order, without those of some arrivals. Raises
    CorruptTable.
    """

    def __init__(self, folder: TableFolder, part: Slice, left_out: Collection[int] = ()) -> None:
        self.read = self.cancelled = self.rows = 0  # complete when all pieces are read
        self._window = part.window
        self._left_out = pa.array(sorted(left_out), pa.int64())
        with ExitStack() as opened:
            rows = opened.enter_context(SortedRows(folder, part.files, part.window, part.untaken))
            columns = [*CHUNK_COLUMNS, "kind", "topic"] if rows.has_cancels else [*CHUNK_COLUMNS, "kind"]
            pieces = (self._without_cancelled(piece).select(CHUNK_COLUMNS) for piece in rows.pieces(columns))
            # A chunk is announced with its count of rows. Where some are left out, it is known when all is read.
            is_thinned = rows.has_cancels or bool(left_out)
            self._pieces: Iterable[pa.Table] = list(pieces) if is_thinned else pieces
            self.count = self.rows if is_thinned else rows.count()
            self._open = opened.pop_all()

    def __enter__(self) -> "DueRows":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def pieces(self) -> Iterator[pa.Table]:
        """Yields CHUNK_COLUMNS of the messages, once."""
        yield from self._pieces

    def _without_cancelled(self, rows: pa.Table) -> pa.Table:
        """The messages among sorted rows that no cancel is for."""
        if len(self._left_out):
            rows = rows.filter(pc.invert(pc.is_in(rows.column("arrival"), self._left_out)))
        kind = rows.column("kind")
        if pc.all(pc.equal(kind, MESSAGE)).as_py():
            messages = rows
            self.read += rows.num_rows
        else:
            messages, cancels = (rows.filter(pc.equal(kind, each)) for each in (MESSAGE, CANCEL))
            # Every slice of one instant sees all its cancels and moves; each counts those that arrived in its own part.
            self.read += arrived_within(rows, self._window)
            before = messages.num_rows
            record, cancel_record = messages.column("record"), cancels.column("record")
            living = Removals(cancels, drops_of(rows)).living(
                messages, lambda message, cancel: names_key(cancel_record[cancel].as_py(), record[message].as_py())
            )
            messages = messages.filter(living)
            self.cancelled += before - messages.num_rows
        self.rows += messages.num_rows
        return messages

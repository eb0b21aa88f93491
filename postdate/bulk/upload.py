"""Files that the pipeline uploads: chunks of rows that fall due soon, and selections of the rows that a job is for.

A chunk comes batch by batch. Each batch is checked when it comes, the whole is durable before the answer, and a chunk
that fails leaves no file.
"""

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from postdate.bulk.arrow import Bytes, check_records
from postdate.bulk.schema import IN
from postdate.errors import CorruptLog, Refused, UsageError
from postdate.faultpoint import reach
from postdate.process import Pacer
from postdate.storage import chunk as chunks
from postdate.storage import layout, selection
from postdate.storage.disk import Disk
from postdate.storage.layout import CHUNK_ROW
from postdate.table.format import SELECTED

_FIXED_COLUMNS = ("due", "arrival", "queue", "tag_hash", "flags", "unique_hash", "key_hash")
SELECTION_ROWS_MAX = 4_000_000  # 160 MB
BATCH_BYTES_MAX = 1 << 30  # of a chunk: 16,384 rows with records of 64 KB
_SELECTION_BATCH_ROWS = 65_536


# -- chunks -----------------------------------------------------------------------------------------------------


class Announced(NamedTuple):
    """What an uploader will send."""

    name: str
    rows: int
    bytes: int | None = None  # of all records; None where the uploader does not know it yet


def parse_announcement(text: bytes) -> Announced:
    """Raises UsageError."""
    try:
        fields: dict[str, Any] = orjson.loads(text)
        size = fields.get("bytes")
        found = Announced(str(fields["name"]), int(fields["rows"]), None if size is None else int(size))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"a chunk is announced by {text[:200]!r}, expected JSON with name and rows") from error
    if chunks.epoch_of(found.name) is None:
        raise UsageError(f"chunk name {found.name[:64]!r}, expected six digits of the epoch, -, then a-z A-Z 0-9 . _ -")
    if found.rows < 0 or (found.bytes or 0) < 0:
        raise UsageError(f"chunk {found.name} is announced with {found.rows} rows and {found.bytes} bytes")
    return found


class Uploads:
    """Receives chunks into one data folder."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._names: set[str] = set()
        self._lock = threading.Lock()
        chunks.remove_unfinished(disk)

    def remove_older(self, epoch: int, staged: set[str]) -> None:
        """Removes the chunks of older epochs that are not staged: no stage will name them any more."""
        for name in self._disk.list(chunks.FOLDER):
            if name not in staged and (chunks.epoch_of(name) or epoch) < epoch:
                reach("chunk.remove")
                self._disk.remove(chunks.path_of(name))

    def count(self, epoch: int, without: Collection[str] = ()) -> int:
        """How many chunks of an epoch lie in the folder, but for some."""
        return sum(chunks.epoch_of(name) == epoch and name not in without for name in self._disk.list(chunks.FOLDER))

    def remove(self, names: Iterable[str]) -> None:
        """Removes chunks whose stage was refused. A new pipeline may have removed them before."""
        for name in names:
            with suppress(FileNotFoundError):
                self._disk.remove(chunks.path_of(name))

    @contextmanager
    def receive(self, wanted: Announced) -> Iterator["Upload"]:
        """Yields a chunk to add batches to and to finish. Leaves no file unless it is finished. Raises Refused."""
        with self._lock:
            if wanted.name in self._names or self._disk.size(chunks.path_of(wanted.name)) >= 0:
                raise Refused(f"chunk {wanted.name} exists already: give each chunk a name of its own")
            self._names.add(wanted.name)
        try:
            upload = Upload(self._disk, wanted)
            try:
                yield upload
            finally:
                upload.end()
        finally:
            self._names.remove(wanted.name)


class Upload:
    """One chunk that is being uploaded."""

    def __init__(self, disk: Disk, wanted: Announced) -> None:
        self._wanted = wanted
        self._writer = chunks.Writer(disk, wanted.name, wanted.rows)
        self._pacer = Pacer(self._writer.sync)
        self._last: tuple[int, int] | None = None  # due and arrival of the last row
        self._is_finished = False

    def add(self, batch: pa.RecordBatch) -> None:
        """Writes the next rows. Raises UsageError where they are too many, out of order or no records."""
        if not batch.num_rows:
            return
        if batch.nbytes > BATCH_BYTES_MAX:
            raise UsageError(
                f"chunk {self._wanted.name}: a batch has {batch.nbytes} bytes, the limit is {BATCH_BYTES_MAX}: send "
                "smaller ones"
            )
        rows, data = _read_chunk_rows(batch)
        self._check_counts(len(rows), len(data))
        self._check_order(rows)
        try:
            check_records(data, rows["position"], rows["size"].astype(np.int64))
        except CorruptLog as error:
            raise UsageError(f"chunk {self._wanted.name}, after row {self._writer.row_count}: {error}") from error
        rows["position"] += self._writer.records_bytes
        self._writer.add(rows, data.array.data)
        self._pacer.wrote(rows.nbytes + len(data))
        self._last = (int(rows["due"][-1]), int(rows["arrival"][-1]))

    def _check_counts(self, row_count: int, byte_count: int) -> None:
        rows, size = self._writer.row_count + row_count, self._writer.records_bytes + byte_count
        limit = size if self._wanted.bytes is None else self._wanted.bytes
        if rows > self._wanted.rows or size > limit:
            raise UsageError(
                f"chunk {self._wanted.name}: {rows} rows and {size} bytes came, "
                f"{self._wanted.rows} and {limit} were announced"
            )

    def _check_order(self, rows: np.ndarray) -> None:
        due, arrival = rows["due"], rows["arrival"]
        later = (due[1:] > due[:-1]) | ((due[1:] == due[:-1]) & (arrival[1:] >= arrival[:-1]))
        follows = self._last is None or (int(due[0]), int(arrival[0])) >= self._last
        if not (follows and later.all()):
            row = self._writer.row_count + (int(np.flatnonzero(~later)[0]) + 1 if follows else 0)
            raise UsageError(f"chunk {self._wanted.name}: row {row} is not in (due, arrival) order")

    def finish(self) -> Announced:
        """Makes the chunk durable; returns its rows and bytes. Raises UsageError where some are missing."""
        found = Announced(self._wanted.name, self._writer.row_count, self._writer.records_bytes)
        wanted = self._wanted if self._wanted.bytes is not None else self._wanted._replace(bytes=found.bytes)
        if found != wanted:
            raise UsageError(
                f"chunk {found.name}: {found.rows} rows and {found.bytes} bytes came, "
                f"{wanted.rows} and {wanted.bytes} were announced"
            )
        self._pacer.close()
        self._writer.finish()
        self._is_finished = True
        return found

    def end(self) -> None:
        if self._is_finished:
            return
        try:
            self._pacer.close()
        finally:
            self._writer.abandon()


def _read_chunk_rows(batch: pa.RecordBatch) -> tuple[np.ndarray, Bytes]:
    """Returns the rows, with positions relative to the first record, and the records one after the other. Raises
    UsageError.
    """
    if _describe(batch.schema) != _describe(IN):
        raise UsageError(f"the columns are {_describe(batch.schema)}, expected {_describe(IN)}")
    missing = [name for name in IN.names if batch.column(name).null_count]
    if missing:
        raise UsageError(f"column {missing[0]} has a null")
    rows = np.zeros(batch.num_rows, CHUNK_ROW)
    for name in _FIXED_COLUMNS:
        rows[name] = batch.column(name).to_numpy().view(CHUNK_ROW[name])
    column = batch.column("record")
    ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
    ends = ends.astype(np.int64)
    rows["position"], rows["size"] = ends[:-1] - ends[0], np.diff(ends)
    data = np.frombuffer(column.buffers()[2] or b"", np.uint8)
    return rows, Bytes(data[ends[0] : ends[-1]])


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


# -- selections -------------------------------------------------------------------------------------------------


def selection_name(request: bytes) -> str:
    """Returns the selection that a ticket or a command names; empty where it names none. Raises UsageError."""
    try:
        fields = orjson.loads(request)
    except ValueError:
        return ""  # the caller parses the request as something else, and says what is wrong with it
    name = fields.get("selection", "") if isinstance(fields, dict) else ""
    if name and not (isinstance(name, str) and selection.is_name(name)):
        raise UsageError(
            f"the name of a selection is {name!r:.100}, expected eight digits of the job, -, then a-z A-Z 0-9 -"
        )
    return str(name)


class Selections:
    """Writes and reads the selections of one data folder. No other process writes them."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        selection.remove_unfinished(disk)

    def write(self, name: str, batches: Iterable[pa.RecordBatch]) -> int:
        """Writes a selection, durable on return; returns its rows. Raises Refused, UsageError. A selection that is too
        long is refused while it is read: no more of it than the limit is ever in memory.
        """
        if selection.is_there(self._disk, name):
            raise Refused(f"selection {name} exists already: give each selection a name of its own")
        pieces, count = [np.empty(0, layout.SELECTED)], 0
        for batch in batches:
            count += batch.num_rows
            if count > SELECTION_ROWS_MAX:
                raise UsageError(f"selection {name} has {count} rows or more, the limit is {SELECTION_ROWS_MAX}")
            pieces.append(_read_selected_rows(batch))
        rows = np.concatenate(pieces)
        if not selection.is_sorted(rows):
            raise UsageError(f"selection {name} is not in (due, arrival) order, or has a row twice")
        selection.write(self._disk, name, rows)
        return len(rows)

    def read(self, name: str) -> Iterator[pa.RecordBatch]:
        """Raises CorruptSelection."""
        rows = selection.rows_of(self._disk, name)
        for start in range(0, len(rows), _SELECTION_BATCH_ROWS):
            piece = rows[start : start + _SELECTION_BATCH_ROWS]
            columns = [
                pa.array(np.ascontiguousarray(piece[field.name]).view(field.type.to_pandas_dtype()))
                for field in SELECTED
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=SELECTED)


def _read_selected_rows(batch: pa.RecordBatch) -> np.ndarray:
    if batch.schema.names != SELECTED.names or batch.schema.types != SELECTED.types:
        raise UsageError(f"the columns of a selection are {batch.schema.names}, expected {SELECTED.names}")
    rows = np.empty(batch.num_rows, layout.SELECTED)
    for name in SELECTED.names:
        rows[name] = batch.column(name).to_numpy().view(layout.SELECTED[name])
    return rows

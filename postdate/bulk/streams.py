"""Queues as record batches: the far queue, a topic's queue, and the messages that wait in the wheel.

A stream reads rows, finds their records in segments and chunks, and makes columns of them. Its memory is bounded: a
block of rows, one batch, and the maps that all streams share. When the reader stops, the stream stops.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.arrow import (
    Bytes,
    Dues,
    Properties,
    RecordColumns,
    Records,
    compute_dues,
    name_cancelled,
    read_columns,
)
from postdate.bulk.broker_link import Link
from postdate.bulk.maps import Maps, RecordFiles
from postdate.bulk.rows import QueueRows
from postdate.bulk.schema import OF_TOPIC, OUT
from postdate.keys import key_hash
from postdate.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY, DelayLevels, first_key
from postdate.storage import chunk as chunks
from postdate.storage import segment
from postdate.storage.batch import CANCEL, JOB, MESSAGE, MOVE
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.layout import TIME


class BatchBounds(NamedTuple):
    """How large a batch may be."""

    rows_max: int = 16_384
    bytes_max: int = 8 * 1024 * 1024  # of records; a larger record has a batch to itself


BATCH_BOUNDS = BatchBounds()


def _split_batches(size: np.ndarray, bounds: BatchBounds) -> Iterator[slice]:
    """Splits records of these sizes into batches."""
    ends = np.cumsum(size, dtype=np.int64)
    start = 0
    while start < len(size):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + bounds.bytes_max, "right"))
        stop = max(min(stop, start + bounds.rows_max), start + 1)
        yield slice(start, stop)
        start = stop


def _signed(rows: np.ndarray, name: str, kind: type) -> pa.Array:
    """A column by its bits: Spark has no unsigned numbers."""
    return pa.array(np.ascontiguousarray(rows[name]).view(kind))


def _make_batch(
    offset: pa.Array, kind: pa.Array, level: pa.Array, rows: np.ndarray, found: RecordColumns
) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            offset, kind, found.topic, _signed(rows, "queue", np.int32), level, _signed(rows, "due", np.int64),
            _signed(rows, "arrival", np.int64), _signed(rows, "tag_hash", np.int32),
            _signed(rows, "unique_hash", np.int64), _signed(rows, "key_hash", np.int64), found.key, found.tag,
            found.record,
        ],
        schema=OUT,
    )  # fmt: skip


# -- the far queue ----------------------------------------------------------------------------------------------


class DueRange(NamedTuple):
    """Far rows with low < due <= high."""

    low: int = -(1 << 63)
    high: int = (1 << 63) - 1


def far_batches(
    queue: QueueRows, maps: Maps, segment_bytes: int, bounds: BatchBounds, wanted: DueRange
) -> Iterator[pa.RecordBatch]:
    """Yields the far rows whose records are in the log. Raises CorruptLog for a record that contradicts its row."""
    for block in queue.blocks():
        is_wanted = (block.rows["due"] > wanted.low) & (block.rows["due"] <= wanted.high)
        chosen = np.flatnonzero(is_wanted & (block.rows["kind"] != JOB))  # the pipeline learns of jobs from the state
        rows = block.rows if len(chosen) == len(block.rows) else block.rows[chosen]
        for piece in _split_batches(rows["size"], bounds):
            batch = _far_batch(block.start + chosen[piece], rows[piece], maps, segment_bytes)
            if batch.num_rows:
                yield batch


def _far_batch(numbers: np.ndarray, rows: np.ndarray, maps: Maps, segment_bytes: int) -> pa.RecordBatch:
    """Reads each segment in turn: arrivals ascend, and so do segments."""
    bases = rows["arrival"] // segment_bytes * segment_bytes
    edges = [0, *(np.flatnonzero(bases[1:] != bases[:-1]) + 1).tolist(), len(rows)]
    parts = [_read_segment(numbers[low:high], rows[low:high], int(bases[low]), maps) for low, high in pairwise(edges)]
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _read_segment(numbers: np.ndarray, rows: np.ndarray, base: int, maps: Maps) -> pa.RecordBatch:
    data = maps.get(segment.path_of(base))
    if data is None:
        return pa.RecordBatch.from_pylist([], OUT)
    at = rows["arrival"] - base - (rows["kind"] == MOVE)  # a move's row comes after that of its message
    found = read_columns(data, at, rows["size"].astype(np.int64))
    found = name_cancelled(found, rows["kind"] == CANCEL)
    kind, level = _signed(rows, "kind", np.int8), _signed(rows, "level", np.int8)
    return _make_batch(pa.array(numbers), kind, level, rows, found)


# -- the wheel --------------------------------------------------------------------------------------------------


def near_batches(link: Link, maps: Maps, segment_bytes: int, bounds: BatchBounds) -> Iterator[pa.RecordBatch]:
    """Yields the messages that wait in the wheel, in (due, arrival) order. The broker tells page by page where their
    records lie, each page at its own moment: a message that falls due between two pages may be missed. Raises
    CorruptLog.
    """
    files = RecordFiles(segment_bytes, link)
    for rows in link.near():
        for piece in _split_batches(rows["size"], bounds):
            batch = _near_batch(rows[piece], files, maps)
            if batch.num_rows:
                yield batch


def _near_batch(rows: np.ndarray, files: RecordFiles, maps: Maps) -> pa.RecordBatch:
    parts, order = [], []
    for file, index in files.find(rows["offset"]):
        data = maps.get(file.path)
        if data is not None:
            own = rows[index]
            found = read_columns(data, own["offset"] - file.base, own["size"].astype(np.int64))
            offset, level = (pa.array(np.zeros(len(own), kind)) for kind in (np.int64, np.int8))
            kind = pa.array(np.full(len(own), MESSAGE, np.int8))
            parts.append(_make_batch(offset, kind, level, own, found))
            order.append(index)
    if not parts:
        return pa.RecordBatch.from_pylist([], OUT)
    return pa.concat_batches(parts).take(pa.array(np.argsort(np.concatenate(order))))


# -- a topic's queue --------------------------------------------------------------------------------------------


def topic_batches(
    rows: QueueRows, maps: Maps, segment_bytes: int, bounds: BatchBounds, link: Link, wanted: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yields the entries of a queue whose records still exist, in the order of consuming, with the wanted columns.
    Entries lead to records of the log and of staged chunks; only columns that are wanted are read out of them. Raises
    CorruptLog, CorruptChunk.
    """
    reader = _TopicReader(rows.number, maps, RecordFiles(segment_bytes, link), link, wanted)
    visible = _VisibleTimes(rows) if "visible" in wanted else None
    for block in rows.blocks():
        for piece in _split_batches(block.rows["size"], bounds):
            start, entries = block.start + piece.start, block.rows[piece]
            at_ms = visible.read(start, start + len(entries)) if visible else np.zeros(len(entries), np.int64)
            batch = reader.read(_Piece(start + np.arange(len(entries)), entries, at_ms))
            if batch.num_rows:
                yield batch


class _VisibleTimes:
    """When the entries of a queue became visible; asked in their order."""

    def __init__(self, rows: QueueRows) -> None:
        self._blocks = rows.times().blocks()
        self._known = np.empty(0, TIME)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the instants of the entries start..stop-1."""
        while not len(self._known) or self._known["offset"][-1] < stop:
            block = next(self._blocks, None)
            if block is None:
                break
            self._known = np.concatenate([self._known, block.rows])
        # An entry before the first row is one that retention has just removed; its record is gone, too.
        row = np.maximum(np.searchsorted(self._known["offset"], np.arange(start, stop), "right") - 1, 0)
        found: np.ndarray = self._known["at_ms"][row]
        self._known = self._known[row[-1] :]
        return found


class _Piece(NamedTuple):
    """Some entries of a queue, their offsets in it, and when they became visible."""

    offset: np.ndarray
    entries: np.ndarray
    visible: np.ndarray

    def take(self, index: np.ndarray) -> "_Piece":
        return self if len(index) == len(self.offset) else _Piece(*(column[index] for column in self))


class _Part(NamedTuple):
    """The entries of a piece whose records lie in one file: which entries, in the order of the file; their records;
    and, where the file is a chunk, their rows in its index.
    """

    which: np.ndarray
    found: Records
    staged: np.ndarray | None


class _TopicReader:
    def __init__(self, number: int, maps: Maps, files: RecordFiles, link: Link, wanted: Sequence[str]) -> None:
        self._number = number
        self._maps = maps
        self._files = files
        self._wanted = wanted
        self._schema = pa.schema([OF_TOPIC.field(name) for name in wanted])
        self._levels = DelayLevels.parse(link.delay_levels())

    def read(self, piece: _Piece) -> pa.RecordBatch:
        """Keeps the order of the entries; leaves out those whose records are gone."""
        parts: list[_Part] = []
        for file, which in self._files.find(piece.entries["offset"]):
            data = self._maps.get(file.path)
            if data is not None:
                at = piece.entries["offset"][which] - file.base
                found = Records(data, at, piece.entries["size"][which].astype(np.int64))
                parts.append(_Part(which, found, _find_staged(data, at) if file.base >= CHUNK_BIT else None))
        if not parts:
            return pa.RecordBatch.from_pylist([], self._schema)
        source = _ColumnSource(piece, parts, self._number, self._levels)
        return pa.RecordBatch.from_arrays([_COLUMNS[name](source) for name in self._wanted], schema=self._schema)


def _find_staged(data: Bytes, at: np.ndarray) -> np.ndarray:
    """Returns the rows of a chunk's index for the records at these places."""
    index = chunks.index_of(data.array)
    position = index["position"]
    if (position[1:] > position[:-1]).all():  # as the pipeline writes them
        return index[np.searchsorted(position, at)]
    order = np.argsort(position, kind="stable")
    return index[order[np.searchsorted(position, at, sorter=order)]]


class _ColumnSource:
    """Makes the columns of one batch. Joins the parts first, in the order of the queue, and decodes after: a few large
    columns cost less than many small ones.
    """

    def __init__(self, piece: _Piece, parts: Sequence[_Part], number: int, levels: DelayLevels) -> None:
        which = np.concatenate([part.which for part in parts])
        self._order = None if (which[1:] > which[:-1]).all() else np.argsort(which, kind="stable")
        self._parts = parts
        self._levels = levels
        self.number = number
        self.piece = piece.take(which if self._order is None else which[self._order])

    def column(self, of: Callable[[Records], pa.Array]) -> pa.Array:
        pieces = [of(part.found) for part in self._parts]
        whole = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
        return whole if self._order is None else whole.take(pa.array(self._order))

    def constant(self, value: int, kind: type) -> pa.Array:
        return pa.array(np.full(len(self.piece.offset), value, kind))

    @cached_property
    def properties(self) -> Properties:
        return Properties(self.column(Records.encoded_properties))

    @cached_property
    def dues(self) -> Dues:
        stored_at_ms = self._join([part.found.stored_at_ms() for part in self._parts])
        return compute_dues(self.properties, stored_at_ms, self._levels)

    # The index of a chunk knows due and arrival. They may differ from the record's: imported, postponed.

    def due(self) -> np.ndarray:
        staged = self._staged("due")
        return staged if self._is_staged.all() else np.where(self._is_staged, staged, self.dues.due)

    def arrival(self) -> np.ndarray:
        return np.where(self._is_staged, self._staged("arrival"), self.piece.entries["offset"])

    @cached_property
    def _is_staged(self) -> np.ndarray:
        return self._join([np.full(len(part.which), part.staged is not None) for part in self._parts])

    def _staged(self, name: str) -> np.ndarray:
        """A column of the chunks' indexes; 0 for entries that lie in the log."""
        return self._join(
            [np.zeros(len(part.which), np.int64) if part.staged is None else part.staged[name] for part in self._parts]
        )

    def _join(self, pieces: list[np.ndarray]) -> np.ndarray:
        whole = np.concatenate(pieces)
        return whole if self._order is None else whole[self._order]


def _hash_keys(text: pa.Array, key_of: Callable[[str], str] = str) -> pa.Array:
    """Hashes are unsigned; the column holds their bits."""
    found = np.array([key_hash(key_of(value or "")) for value in text.to_pylist()], np.uint64)
    return pa.array(found.view(np.int64))


_COLUMNS: dict[str, Callable[[_ColumnSource], pa.Array]] = {
    "offset": lambda of: pa.array(of.piece.offset),
    "kind": lambda of: of.constant(MESSAGE, np.int8),
    "topic": lambda of: of.column(Records.topic),
    "queue": lambda of: of.constant(of.number, np.int32),
    "level": lambda of: pa.array(of.dues.level.view(np.int8)),
    "due": lambda of: pa.array(of.due()),
    "arrival": lambda of: pa.array(of.arrival()),
    "tag_hash": lambda of: pa.array(of.piece.entries["tag"].astype(np.int32)),
    "unique_hash": lambda of: _hash_keys(of.properties.values(PROPERTY_UNIQ_KEY)),
    "key_hash": lambda of: _hash_keys(of.properties.values(PROPERTY_KEYS), first_key),
    "key": lambda of: of.properties.values(PROPERTY_KEYS),
    "tag": lambda of: of.properties.values(PROPERTY_TAGS),
    "record": lambda of: of.column(Records.record),
    "visible": lambda of: pa.array(of.piece.visible),
    "properties": lambda of: of.properties.maps(),
    "body": lambda of: of.column(Records.body),
}
assert set(_COLUMNS) == set(OF_TOPIC.names)

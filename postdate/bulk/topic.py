"""A topic's queue as record batches. Its entries lead to records of the log and of staged chunks, in the order of
consuming; what an entry does not say is read out of the records, by columns, and only what is asked for is read.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.columns import Records
from postdate.bulk.dues import Dues, dues
from postdate.bulk.link import Link
from postdate.bulk.maps import Maps
from postdate.bulk.places import Place, Places
from postdate.bulk.rows import QueueRows
from postdate.bulk.schema import OF_TOPIC
from postdate.bulk.stream import pieces
from postdate.bulk.texts import Bytes
from postdate.keys import key_hash
from postdate.log import chunk as chunks
from postdate.log.batch import MESSAGE
from postdate.log.chunk import CHUNK_BIT
from postdate.log.queue import TIME
from postdate.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY, DelayLevels, first_key


def topic_batches(
    rows: QueueRows, maps: Maps, segment_bytes: int, link: Link, wanted: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The entries of a queue whose records are there, with these columns. Raises CorruptLog, CorruptChunk."""
    reader = _Reader(rows.number, maps, Places(segment_bytes, link), link, wanted)
    visible = _Visible(rows) if "visible" in wanted else None
    for block in rows.blocks():
        for piece in pieces(block.rows["size"]):
            start, entries = block.start + piece.start, block.rows[piece]
            at = visible.of(start, start + len(entries)) if visible else np.zeros(len(entries), np.int64)
            batch = reader.batch(_Piece(start + np.arange(len(entries)), entries, at))
            if batch.num_rows:
                yield batch


class _Visible:
    """When the entries of a queue became visible; asked in their order."""

    def __init__(self, rows: QueueRows) -> None:
        self._blocks = rows.times().blocks()
        self._known = np.empty(0, TIME)

    def of(self, start: int, stop: int) -> np.ndarray:
        """Of the entries start..stop-1."""
        while not len(self._known) or self._known["offset"][-1] < stop:
            block = next(self._blocks, None)
            if block is None:
                break
            self._known = np.concatenate([self._known, block.rows])
        # One that retention has just taken is before the first row; so is its record.
        row = np.maximum(np.searchsorted(self._known["offset"], np.arange(start, stop), "right") - 1, 0)
        found: np.ndarray = self._known["at_ms"][row]
        self._known = self._known[row[-1] :]
        return found


class _Piece(NamedTuple):
    """Some entries: their offsets in the queue, and when they became visible."""

    offset: np.ndarray
    entries: np.ndarray
    visible: np.ndarray

    def part(self, index: np.ndarray) -> "_Piece":
        return _Piece(self.offset[index], self.entries[index], self.visible[index])


class _Reader:
    """Of one stream."""

    def __init__(self, number: int, maps: Maps, places: Places, link: Link, wanted: Sequence[str]) -> None:
        self._number = number
        self._maps = maps
        self._places = places
        self._wanted = wanted
        self._schema = pa.schema([OF_TOPIC.field(name) for name in wanted])
        self._levels = DelayLevels.parse(link.delay_levels())

    def batch(self, piece: _Piece) -> pa.RecordBatch:
        """In the order of the entries, of which those are left out whose records are gone."""
        batches, order = [], []
        for place, index in self._places.of(piece.entries["offset"]):
            data = self._maps.get(place.path)
            if data is not None:
                batches.append(self._part(place, data, piece.part(index)))
                order.append(index)
        if not batches:
            return pa.RecordBatch.from_pylist([], self._schema)
        batch, index = pa.concat_batches(batches), np.concatenate(order)
        return batch if (index[1:] > index[:-1]).all() else batch.take(pa.array(np.argsort(index)))

    def _part(self, place: Place, data: Bytes, part: _Piece) -> pa.RecordBatch:
        """Entries whose records lie in one file, ascending there."""
        at = part.entries["offset"] - place.base
        found = Records(data, at, part.entries["size"].astype(np.int64))
        staged = _staged(data, at) if place.base >= CHUNK_BIT else None
        source = _Source(part, found, staged, self._number, self._levels)
        return pa.RecordBatch.from_arrays([_COLUMNS[name](source) for name in self._wanted], schema=self._schema)


def _staged(data: Bytes, at: np.ndarray) -> np.ndarray:
    """The rows of a chunk's own index for records at these places."""
    index = chunks.index_of(data.array)
    position = index["position"]
    if (position[1:] > position[:-1]).all():  # as the pipeline writes them
        return index[np.searchsorted(position, at)]
    order = np.argsort(position, kind="stable")
    return index[order[np.searchsorted(position, at, sorter=order)]]


class _Source:
    """What the columns of one part are made of."""

    def __init__(
        self, part: _Piece, found: Records, staged: np.ndarray | None, number: int, levels: DelayLevels
    ) -> None:
        self.part, self.found, self.staged, self.number = part, found, staged, number
        self._levels = levels
        self._dues: Dues | None = None

    @property
    def dues(self) -> Dues:
        if self._dues is None:
            self._dues = dues(self.found, self._levels)
        return self._dues

    def due(self) -> np.ndarray:
        """A chunk's own index knows due and arrival: they may be others than the record's (imported, postponed)."""
        return self.dues.due if self.staged is None else np.ascontiguousarray(self.staged["due"])

    def arrival(self) -> np.ndarray:
        return np.ascontiguousarray(self.part.entries["offset"] if self.staged is None else self.staged["arrival"])

    def full(self, value: int, kind: type) -> pa.Array:
        return pa.array(np.full(len(self.part.offset), value, kind))

    def text(self, name: str) -> pa.Array:
        return self.found.properties.value(name)


def _hashes(text: pa.Array, key_of: Callable[[str], str] = str) -> pa.Array:
    """By the bits of an unsigned number."""
    found = np.array([key_hash(key_of(value or "")) for value in text.to_pylist()], np.uint64)
    return pa.array(found.view(np.int64))


_COLUMNS: dict[str, Callable[[_Source], pa.Array]] = {
    "offset": lambda of: pa.array(of.part.offset),
    "kind": lambda of: of.full(MESSAGE, np.int8),
    "topic": lambda of: of.found.topic(),
    "queue": lambda of: of.full(of.number, np.int32),
    "level": lambda of: pa.array(of.dues.level.view(np.int8)),
    "due": lambda of: pa.array(of.due()),
    "arrival": lambda of: pa.array(of.arrival()),
    "tag_hash": lambda of: pa.array(of.part.entries["tag"].astype(np.int32)),
    "unique_hash": lambda of: _hashes(of.text(PROPERTY_UNIQ_KEY)),
    "key_hash": lambda of: _hashes(of.text(PROPERTY_KEYS), first_key),
    "key": lambda of: of.text(PROPERTY_KEYS),
    "tag": lambda of: of.text(PROPERTY_TAGS),
    "record": lambda of: of.found.record(),
    "visible": lambda of: pa.array(of.part.visible),
    "properties": lambda of: of.found.properties.maps(),
    "body": lambda of: of.found.body(),
}
assert set(_COLUMNS) == set(OF_TOPIC.names)

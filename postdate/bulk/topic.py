"""A topic's queue as record batches. Its entries lead to records of the log and of staged chunks, in the order of
consuming; what an entry does not say is read out of the records, by columns, and only what is asked for is read.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.broker_link import Link
from postdate.bulk.arrow import Records
from postdate.bulk.dues import Dues, dues
from postdate.bulk.maps import Maps
from postdate.bulk.places import Place, Places
from postdate.bulk.properties import Properties
from postdate.bulk.rows import QueueRows
from postdate.bulk.schema import OF_TOPIC
from postdate.bulk.streams import pieces
from postdate.bulk.texts import Bytes
from postdate.keys import key_hash
from postdate.message import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY, DelayLevels, first_key
from postdate.storage import chunk as chunks
from postdate.storage.batch import MESSAGE
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.queue import TIME


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

    def some(self, index: np.ndarray) -> "_Piece":
        return self if len(index) == len(self.offset) else _Piece(*(column[index] for column in self))


class _Part(NamedTuple):
    """Entries whose records lie in one file: which of the piece they are, by their places in it; where that is a chunk,
    what its own index says of them.
    """

    which: np.ndarray
    found: Records
    staged: np.ndarray | None


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
        parts = [
            part
            for place, which in self._places.of(piece.entries["offset"])
            if (part := self._part(place, piece, which))
        ]
        if not parts:
            return pa.RecordBatch.from_pylist([], self._schema)
        source = _Source(piece, parts, self._number, self._levels)
        return pa.RecordBatch.from_arrays([_COLUMNS[name](source) for name in self._wanted], schema=self._schema)

    def _part(self, place: Place, piece: _Piece, which: np.ndarray) -> _Part | None:
        data = self._maps.get(place.path)
        if data is None:
            return None
        at = piece.entries["offset"][which] - place.base
        found = Records(data, at, piece.entries["size"][which].astype(np.int64))
        return _Part(which, found, _staged(data, at) if place.base >= CHUNK_BIT else None)


def _staged(data: Bytes, at: np.ndarray) -> np.ndarray:
    """The rows of a chunk's own index for records at these places."""
    index = chunks.index_of(data.array)
    position = index["position"]
    if (position[1:] > position[:-1]).all():  # as the pipeline writes them
        return index[np.searchsorted(position, at)]
    order = np.argsort(position, kind="stable")
    return index[order[np.searchsorted(position, at, sorter=order)]]


class _Source:
    """What the columns of one batch are made of. Parts are put together first, in the order of the queue, and looked
    into then: a few large columns cost less than many small ones.
    """

    def __init__(self, piece: _Piece, parts: Sequence[_Part], number: int, levels: DelayLevels) -> None:
        which = np.concatenate([part.which for part in parts])
        self._order = None if (which[1:] > which[:-1]).all() else np.argsort(which, kind="stable")
        self._parts = parts
        self._levels = levels
        self.number = number
        self.piece = piece.some(which if self._order is None else which[self._order])

    def column(self, of: Callable[[Records], pa.Array]) -> pa.Array:
        pieces = [of(part.found) for part in self._parts]
        whole = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)
        return whole if self._order is None else whole.take(pa.array(self._order))

    def full(self, value: int, kind: type) -> pa.Array:
        return pa.array(np.full(len(self.piece.offset), value, kind))

    @cached_property
    def properties(self) -> Properties:
        return Properties(self.column(Records.encoded_properties))

    @cached_property
    def dues(self) -> Dues:
        stored_at = self._ordered([part.found.stored_at_ms() for part in self._parts])
        return dues(self.properties, stored_at, self._levels)

    def due(self) -> np.ndarray:
        return self._as_staged("due") if self._is_staged.all() else self._mixed(self.dues.due, "due")

    def arrival(self) -> np.ndarray:
        return self._mixed(self.piece.entries["offset"], "arrival")

    @cached_property
    def _is_staged(self) -> np.ndarray:
        return self._ordered([np.full(len(part.which), part.staged is not None) for part in self._parts])

    def _mixed(self, by_record: np.ndarray, name: str) -> np.ndarray:
        """A chunk's own index knows due and arrival: they may be others than the record's (imported, postponed)."""
        return np.where(self._is_staged, self._as_staged(name), by_record)

    def _as_staged(self, name: str) -> np.ndarray:
        """0 where it is not."""
        return self._ordered(
            [np.zeros(len(part.which), np.int64) if part.staged is None else part.staged[name] for part in self._parts]
        )

    def _ordered(self, pieces: list[np.ndarray]) -> np.ndarray:
        whole = np.concatenate(pieces)
        return whole if self._order is None else whole[self._order]


def _hashes(text: pa.Array, key_of: Callable[[str], str] = str) -> pa.Array:
    """By the bits of an unsigned number."""
    found = np.array([key_hash(key_of(value or "")) for value in text.to_pylist()], np.uint64)
    return pa.array(found.view(np.int64))


_COLUMNS: dict[str, Callable[[_Source], pa.Array]] = {
    "offset": lambda of: pa.array(of.piece.offset),
    "kind": lambda of: of.full(MESSAGE, np.int8),
    "topic": lambda of: of.column(Records.topic),
    "queue": lambda of: of.full(of.number, np.int32),
    "level": lambda of: pa.array(of.dues.level.view(np.int8)),
    "due": lambda of: pa.array(of.due()),
    "arrival": lambda of: pa.array(of.arrival()),
    "tag_hash": lambda of: pa.array(of.piece.entries["tag"].astype(np.int32)),
    "unique_hash": lambda of: _hashes(of.properties.value(PROPERTY_UNIQ_KEY)),
    "key_hash": lambda of: _hashes(of.properties.value(PROPERTY_KEYS), first_key),
    "key": lambda of: of.properties.value(PROPERTY_KEYS),
    "tag": lambda of: of.properties.value(PROPERTY_TAGS),
    "record": lambda of: of.column(Records.record),
    "visible": lambda of: pa.array(of.piece.visible),
    "properties": lambda of: of.properties.maps(),
    "body": lambda of: of.column(Records.body),
}
assert set(_COLUMNS) == set(OF_TOPIC.names)

"""A topic's queue as record batches. Its entries lead to records of the log and of staged chunks, in the order of
consuming; what an entry does not say is read out of the record, one by one: this path is for readers of single topics.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.columns import Bytes, Columns, columns
from postdate.bulk.link import Link
from postdate.bulk.maps import Maps
from postdate.bulk.places import Place, Places
from postdate.bulk.rows import QueueRows
from postdate.bulk.schema import OUT
from postdate.bulk.stream import pieces
from postdate.keys import key_hash
from postdate.log import chunk as chunks
from postdate.log import record as records
from postdate.log.batch import MESSAGE
from postdate.log.chunk import CHUNK_BIT
from postdate.message import (
    INT64_MAX,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    DelayLevels,
    decode_properties,
    due_and_level,
    first_key,
    tag_hash,
)

SAID = np.dtype(
    [("level", "u1"), ("due", "<i8"), ("tag_hash", "<i4"), ("unique_hash", "<u8"), ("key_hash", "<u8"),
     ("arrival", "<i8")]
)  # fmt: skip


class _Part(NamedTuple):
    """Entries whose records lie in one file: which of the piece they are, and what is known of them."""

    which: np.ndarray
    found: Columns
    said: np.ndarray


def topic_batches(rows: QueueRows, maps: Maps, segment_bytes: int, link: Link) -> Iterator[pa.RecordBatch]:
    """The entries of a queue whose records are there. Raises CorruptLog, CorruptChunk."""
    reader = _Reader(maps, segment_bytes, link)
    for block in rows.blocks():
        for piece in pieces(block.rows["size"]):
            batch = reader.batch(block.start + piece.start, block.rows[piece], rows.number)
            if batch.num_rows:
                yield batch


class _Reader:
    """Of one stream."""

    def __init__(self, maps: Maps, segment_bytes: int, link: Link) -> None:
        self._maps = maps
        self._places = Places(segment_bytes, link)
        self._levels = DelayLevels.parse(link.delay_levels())

    def batch(self, start: int, entries: np.ndarray, number: int) -> pa.RecordBatch:
        parts = [
            part for place, index in self._places.of(entries["offset"]) if (part := self._part(place, entries, index))
        ]
        if not parts:
            return pa.RecordBatch.from_pylist([], OUT)
        index = np.concatenate([part.which for part in parts])
        batch = pa.concat_batches([_batch(part, start, number) for part in parts])
        return batch.take(pa.array(np.argsort(index)))

    def _part(self, place: Place, entries: np.ndarray, index: np.ndarray) -> _Part | None:
        data = self._maps.get(place.path)
        if data is None:
            return None
        at = entries["offset"][index] - place.base
        found = columns(data, at, entries["size"][index].astype(np.int64))
        said = np.array([self._said(record) for record in found.record.to_pylist()], SAID)
        said["arrival"] = entries["offset"][index]
        if place.base >= CHUNK_BIT:
            _say_as_staged(said, data, at)
        return _Part(index, found, said)

    def _said(self, data: bytes) -> tuple[int, ...]:
        """What a record says of itself; its due is what its properties meant when it was stored."""
        record = records.decode(data)
        properties = decode_properties(record.properties)
        due, level = due_and_level(properties, record.stored_at_ms, self._levels, INT64_MAX)
        return (
            level,
            due,
            tag_hash(properties.get(PROPERTY_TAGS, "")),
            key_hash(properties.get(PROPERTY_UNIQ_KEY, "")),
            key_hash(first_key(properties.get(PROPERTY_KEYS, ""))),
            0,
        )


def _say_as_staged(said: np.ndarray, data: Bytes, at: np.ndarray) -> None:
    """A chunk's own index knows due and arrival: they may be others than the record's (imported, postponed)."""
    index = chunks.index_of(data.array)
    order = np.argsort(index["position"], kind="stable")
    rows = index[order[np.searchsorted(index["position"], at, sorter=order)]]
    for name in ("due", "arrival"):
        said[name] = rows[name]


def _batch(part: _Part, start: int, number: int) -> pa.RecordBatch:
    which, found, said = part
    count = len(which)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(start + which), pa.array(np.full(count, MESSAGE, np.int8)), found.topic,
            pa.array(np.full(count, number, np.int32)), pa.array(said["level"].view(np.int8)),
            pa.array(said["due"]), pa.array(said["arrival"]), pa.array(said["tag_hash"]),
            pa.array(said["unique_hash"].view(np.int64)), pa.array(said["key_hash"].view(np.int64)),
            found.key, found.tag, found.record,
        ],
        schema=OUT,
    )  # fmt: skip

"""Records as columns: the bytes, the topic, the body, the properties, for many records at once, without a loop.

The parts of a record are found as `postdate.storage.record` draws them; a record whose parts do not fill it exactly is
damage and is never passed over in silence.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.bulk.properties import Properties
from postdate.bulk.texts import Bytes, as_text, big_endian, gather
from postdate.errors import CorruptLog
from postdate.message import PROPERTY_KEYS, PROPERTY_TAGS
from postdate.storage import record as records

_BODY_BYTES, _PROPERTIES_BYTES = 4, 2  # the lengths of these parts are written in so many bytes


class Columns(NamedTuple):
    """One value per record; no key or no tag is null."""

    record: pa.Array
    topic: pa.Array
    properties: pa.Array
    key: pa.Array
    tag: pa.Array


def columns(data: Bytes, at: np.ndarray, size: np.ndarray) -> Columns:
    """What far rows say of records; see Records. Raises CorruptLog."""
    found = Records(data, at, size)
    properties = Properties(found.encoded_properties())
    key, tag = properties.value(PROPERTY_KEYS), properties.value(PROPERTY_TAGS)
    return Columns(found.record(), found.topic(), properties.encoded, key, tag)


def check_records(data: Bytes, at: np.ndarray, size: np.ndarray) -> None:
    """Raises CorruptLog unless a whole record stands at each of these places."""
    _parts(data, at, size)


class Records:
    """The records that stand at these places and have these sizes, ascending and not overlapping. A column is made when
    it is asked for. Raises CorruptLog.
    """

    def __init__(self, data: Bytes, at: np.ndarray, size: np.ndarray) -> None:
        self._data, self._at, self._end = data, at, at + size
        self._parts = _parts(data, at, size)

    def record(self) -> pa.Array:
        return gather(self._data, self._at, self._end)

    def body(self) -> pa.Array:
        return gather(self._data, self._parts.body_at, self._parts.body_end)

    def topic(self) -> pa.Array:
        return as_text(gather(self._data, self._parts.topic_at, self._parts.topic_end))

    def stored_at_ms(self) -> np.ndarray:
        hosts = self._data.array[self._at + records.HOST_BITS_POSITION]
        more = records.HOST_V6_MORE_BYTES * ((hosts & records.BORN_HOST_V6) != 0)
        return big_endian(self._data, self._at + records.STORED_AT_POSITION + more, 8)

    def encoded_properties(self) -> pa.Array:
        return gather(self._data, self._parts.topic_end + _PROPERTIES_BYTES, self._end)


class _Parts(NamedTuple):
    """Where the parts of each record begin and end."""

    body_at: np.ndarray
    body_end: np.ndarray
    topic_at: np.ndarray
    topic_end: np.ndarray


def _parts(data: Bytes, at: np.ndarray, size: np.ndarray) -> _Parts:
    end = at + size
    _check(data, at, size, (size >= records.RECORD_BYTES_MIN) & (end <= len(data)))
    _check(data, at, size, big_endian(data, at, 4) == size)
    magic = big_endian(data, at + records.MAGIC_POSITION, 4)
    is_long = magic == records.MAGIC_V2
    _check(data, at, size, is_long | (magic == records.MAGIC_V1))
    hosts = data.array[at + records.HOST_BITS_POSITION]
    more = ((hosts & records.BORN_HOST_V6) != 0).astype(np.int64) + ((hosts & records.STORE_HOST_V6) != 0)
    body_at = at + records.HEAD_BYTES + records.HOST_V6_MORE_BYTES * more
    _check(data, at, size, body_at <= end)
    body_end = body_at + big_endian(data, body_at - _BODY_BYTES, _BODY_BYTES)
    topic_at = body_end + 1 + is_long
    _check(data, at, size, (body_end >= body_at) & (topic_at <= end))
    short = data.array[body_end].astype(np.int64)
    topic_end = topic_at + np.where(is_long, short << 8 | data.array[topic_at - 1], short)
    _check(data, at, size, topic_end + _PROPERTIES_BYTES <= end)
    _check(data, at, size, topic_end + _PROPERTIES_BYTES + big_endian(data, topic_end, _PROPERTIES_BYTES) == end)
    return _Parts(body_at, body_end, topic_at, topic_end)


def _check(data: Bytes, at: np.ndarray, size: np.ndarray, is_good: np.ndarray) -> None:
    if not is_good.all():
        bad = int(np.flatnonzero(~is_good)[0])
        raise CorruptLog(
            f"no record of {int(size[bad])} bytes stands at byte {int(at[bad])} of a file of {len(data)} bytes"
        )

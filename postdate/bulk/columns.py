"""Records as columns: the bytes, the topic, the value of KEYS and of TAGS, for many records at once.

Nothing here loops over records. A column of texts that lie scattered in a file is made by one trick:

    data      ....[record 0]..[record 1].......[record 2]
    offsets       s0       e0 s1       e1      s2       e2        an Arrow array: record, gap, record, gap, record
    take 0, 2, 4, ...                                             one copy in C++ per record, no gap

The parts of a record are found as `postdate.log.record` draws them; a record whose parts do not fill it exactly is
damage and is never passed over in silence.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from postdate.errors import CorruptLog
from postdate.log import record as records

_BODY_BYTES, _PROPERTIES_BYTES = 4, 2  # the lengths of these parts are written in so many bytes
_KEYS, _TAGS = (int.from_bytes(name, "little") for name in (b"KEYS", b"TAGS"))
_NAME_BYTES = 4  # of both names
_VALUE_BEGINS, _VALUE_ENDS = 1, 2


class Bytes:
    """A file's bytes, as numpy and as Arrow see them; no copy."""

    def __init__(self, data: np.ndarray) -> None:
        self.array = data
        self.buffer = pa.py_buffer(data)

    def __len__(self) -> int:
        return len(self.array)


class Columns(NamedTuple):
    """One value per record; no key or no tag is null."""

    record: pa.Array
    topic: pa.Array
    properties: pa.Array
    key: pa.Array
    tag: pa.Array


def columns(data: Bytes, at: np.ndarray, size: np.ndarray) -> Columns:
    """The records that stand at these places and have these sizes, ascending and not overlapping. Raises CorruptLog."""
    topic_at, topic_end = _topic_places(data, at, size)
    properties = gather(data, topic_end + _PROPERTIES_BYTES, at + size)
    key, tag = _values(properties)
    return Columns(gather(data, at, at + size), as_text(gather(data, topic_at, topic_end)), properties, key, tag)


def check_records(data: Bytes, at: np.ndarray, size: np.ndarray) -> None:
    """Raises CorruptLog unless a whole record stands at each of these places."""
    _topic_places(data, at, size)


def gather(data: Bytes, start: np.ndarray, stop: np.ndarray) -> pa.Array:
    """The bytes from each start to its stop, as an array of binary. Places ascend and do not overlap."""
    offsets = np.empty(2 * len(start), np.int64)
    offsets[0::2], offsets[1::2] = start, stop
    if not len(start):
        return pa.array([], pa.binary())
    alternating = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data.buffer])
    return alternating.take(pa.array(np.arange(0, len(offsets), 2, dtype=np.int64))).cast(pa.binary())


def as_text(column: pa.Array) -> pa.Array:
    """Binary as text; what is no UTF-8 is null."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([_text(value) for value in column.to_pylist()], pa.string())


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


# -- parts of a record ------------------------------------------------------------------------------------------


def _topic_places(data: Bytes, at: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each record's topic begins and ends."""
    end = at + size
    _check(data, at, size, (size >= records.RECORD_BYTES_MIN) & (end <= len(data)))
    _check(data, at, size, _big_endian(data, at, 4) == size)
    magic = _big_endian(data, at + records.MAGIC_POSITION, 4)
    is_long = magic == records.MAGIC_V2
    _check(data, at, size, is_long | (magic == records.MAGIC_V1))
    hosts = data.array[at + records.HOST_BITS_POSITION]
    more = ((hosts & records.BORN_HOST_V6) != 0).astype(np.int64) + ((hosts & records.STORE_HOST_V6) != 0)
    body_at = at + records.HEAD_BYTES + records.HOST_V6_MORE_BYTES * more
    _check(data, at, size, body_at <= end)
    topic_word = body_at + _big_endian(data, body_at - _BODY_BYTES, _BODY_BYTES)
    topic_at = topic_word + 1 + is_long
    _check(data, at, size, (topic_word >= body_at) & (topic_at <= end))
    short = data.array[topic_word].astype(np.int64)
    topic_end = topic_at + np.where(is_long, short << 8 | data.array[topic_at - 1], short)
    _check(data, at, size, topic_end + _PROPERTIES_BYTES <= end)
    _check(data, at, size, topic_end + _PROPERTIES_BYTES + _big_endian(data, topic_end, _PROPERTIES_BYTES) == end)
    return topic_at, topic_end


def _big_endian(data: Bytes, at: np.ndarray, size: int) -> np.ndarray:
    numbers: np.ndarray = _numbers(data.array, f">u{size}")[at].astype(np.int64)
    return numbers


def _numbers(data: np.ndarray, kind: str) -> np.ndarray:
    """The number that begins at each byte; no copy."""
    size = np.dtype(kind).itemsize
    return np.ndarray(max(len(data) - size + 1, 0), kind, data, strides=(1,))


def _check(data: Bytes, at: np.ndarray, size: np.ndarray, is_good: np.ndarray) -> None:
    if not is_good.all():
        bad = int(np.flatnonzero(~is_good)[0])
        raise CorruptLog(
            f"no record of {int(size[bad])} bytes stands at byte {int(at[bad])} of a file of {len(data)} bytes"
        )


# -- properties -------------------------------------------------------------------------------------------------


def _values(properties: pa.Array) -> tuple[pa.Array, pa.Array]:
    """The values of KEYS and TAGS in each of these properties, as `message.decode_properties` would find them: a name
    begins where an entry does, of two entries with one name the later counts, an empty value is none.
    """
    data = Bytes(np.frombuffer(properties.buffers()[2] or b"", np.uint8))
    bounds = np.frombuffer(properties.buffers()[1], np.int32)[: len(properties) + 1].astype(np.int64)
    begins, ends = np.flatnonzero(data.array == _VALUE_BEGINS), np.flatnonzero(data.array == _VALUE_ENDS)
    begins = begins[begins >= _NAME_BYTES]
    names = _numbers(data.array, "<u4")[begins - _NAME_BYTES]
    return _value(data, bounds, begins[names == _KEYS], ends), _value(data, bounds, begins[names == _TAGS], ends)


def _value(data: Bytes, bounds: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> pa.Array:
    """The value behind each of `begins`, a 0x01 with the right letters before it, by row."""
    row, name = _row_of(bounds, begins), begins - _NAME_BYTES
    is_name = (name == bounds[row]) | ((name > bounds[row]) & (data.array[name - 1] == _VALUE_ENDS))
    start = begins + 1
    stop = np.minimum(np.append(ends, len(data))[np.searchsorted(ends, start)], bounds[row + 1])
    is_value = is_name & (stop > start)
    if is_value.all() and len(row) == len(bounds) - 1 and (np.diff(row) == 1).all():
        return as_text(gather(data, start, stop))  # each row has one: the usual case
    row, start, stop = row[is_value], start[is_value], stop[is_value]
    index = np.full(len(bounds) - 1, -1, np.int64)
    index[row] = np.arange(len(row))  # the last one of a row stays
    return as_text(gather(data, start, stop)).take(pa.array(index, mask=index < 0))


def _row_of(bounds: np.ndarray, places: np.ndarray) -> np.ndarray:
    """In which of the rows that have these bounds each place lies."""
    if len(places) == len(bounds) - 1 and ((places >= bounds[:-1]) & (places < bounds[1:])).all():
        return np.arange(len(places))  # one in each: the usual case, at a tenth of the price
    return np.searchsorted(bounds, places, "right") - 1

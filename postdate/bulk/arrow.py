"""Records in a file, read as Arrow columns: record, topic, body, properties and due of many records, without a loop.

Every column of text or bytes is made by one trick, which copies each value once, in C++:

    data      ....[record 0]..[record 1].......[record 2]
    offsets       s0       e0 s1       e1      s2       e2        an Arrow array: record, gap, record, gap, record
    take 0, 2, 4, ...                                             the records alone

`postdate.storage.record` draws the parts of a record. A record whose parts do not fill it exactly is damage and raises
CorruptLog. Properties are read as `message.decode_properties` reads those of one message: a name begins where an entry
begins, the last entry may lack its end, the later of two entries with one name counts, and an entry with an empty name
or value does not.

    UNIQ_KEY 1 7F00... 2 KEYS 1 a 2 TAGS 1 red 2 | KEYS 1 b 2 TAGS 1 blue | ...       one row after the other

Text that is not UTF-8 is null, or left out of a map.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from postdate.errors import CorruptLog
from postdate.message import (
    INT64_MAX,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_START_DELIVER_TIME,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    DelayLevels,
    decode_properties,
    due_and_level,
)
from postdate.storage import record as records

_BODY_LENGTH_BYTES, _PROPERTIES_LENGTH_BYTES = 4, 2  # width of the fields that hold these lengths
_VALUE_BEGINS, _VALUE_ENDS = 1, 2
_LETTER_WIDTHS = ((8, "<u8"), (4, "<u4"), (1, "u1"))  # this many letters of a name are compared as one number
PAIRS_MAX = 1 << 22  # rows times names that one array may number: 32 MB; senders use a dozen names, or invent more
_PLAIN_MAX = 1 << 52  # a number up to this one, times 1,000, still fits 64 bits


# -- bytes ------------------------------------------------------------------------------------------------------


class Bytes:
    """The bytes of a file, as a numpy array and as an Arrow buffer over the same memory."""

    def __init__(self, data: np.ndarray) -> None:
        self.array = data
        self.buffer = pa.py_buffer(data)

    def __len__(self) -> int:
        return len(self.array)


def gather(data: Bytes, start: np.ndarray, stop: np.ndarray) -> pa.Array:
    """Returns the bytes from each start to its stop as a binary array. Places ascend and do not overlap; two may be
    the same.
    """
    if not len(start):
        return pa.array([], pa.binary())
    offsets = np.empty(2 * len(start), np.int64)
    offsets[0::2], offsets[1::2] = start, stop
    alternating = pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), data.buffer])
    return alternating.take(pa.array(np.arange(0, len(offsets), 2, dtype=np.int64))).cast(pa.binary())


def decode_text(column: pa.Array) -> pa.Array:
    """Turns binary into text; a value that is not UTF-8 becomes null."""

    def decode_or_none(value: bytes | None) -> str | None:
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            return None

    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([decode_or_none(value) for value in column.to_pylist()], pa.string())


def _read_big_endian(data: Bytes, at: np.ndarray, size: int) -> np.ndarray:
    found: np.ndarray = _view_numbers(data.array, f">u{size}")[at].astype(np.int64)
    return found


def _view_numbers(data: np.ndarray, kind: str) -> np.ndarray:
    """Views the number that begins at each byte; no copy."""
    size = np.dtype(kind).itemsize
    return np.ndarray(max(len(data) - size + 1, 0), kind, data, strides=(1,))


# -- records ----------------------------------------------------------------------------------------------------


class RecordColumns(NamedTuple):
    """One value per record. Key and tag are null where a record has none."""

    record: pa.Array
    topic: pa.Array
    properties: pa.Array
    key: pa.Array
    tag: pa.Array


def read_columns(data: Bytes, at: np.ndarray, size: np.ndarray) -> RecordColumns:
    """Reads the columns of a far row out of its record. Places ascend; see Records. Raises CorruptLog."""
    found = Records(data, at, size)
    properties = Properties(found.encoded_properties())
    key, tag = properties.values(PROPERTY_KEYS), properties.values(PROPERTY_TAGS)
    return RecordColumns(found.record(), found.topic(), properties.encoded, key, tag)


def name_cancelled(found: RecordColumns, is_cancel: np.ndarray) -> RecordColumns:
    """Gives the rows of cancels the topic and key of the message that they cancel: the body of their record names it.
    Reads them one by one, because cancels are few.
    """
    if not is_cancel.any():
        return found
    mask = pa.array(is_cancel)
    bodies = [orjson.loads(records.decode(record).body) for record in found.record.filter(mask).to_pylist()]
    topics, keys = (pa.array([body[name] for body in bodies], pa.string()) for name in ("topic", "key"))
    return found._replace(
        topic=pc.replace_with_mask(found.topic, mask, topics), key=pc.replace_with_mask(found.key, mask, keys)
    )


def check_records(data: Bytes, at: np.ndarray, size: np.ndarray) -> None:
    """Raises CorruptLog unless a whole record stands at each of these places."""
    _find_parts(data, at, size)


class Records:
    """The records at these places, which ascend; a move and the message that it brings have one record. Each method
    makes one column. Raises CorruptLog.
    """

    def __init__(self, data: Bytes, at: np.ndarray, size: np.ndarray) -> None:
        self._data, self._at, self._end = data, at, at + size
        self._parts = _find_parts(data, at, size)

    def record(self) -> pa.Array:
        return gather(self._data, self._at, self._end)

    def body(self) -> pa.Array:
        return gather(self._data, self._parts.body_at, self._parts.body_end)

    def topic(self) -> pa.Array:
        return decode_text(gather(self._data, self._parts.topic_at, self._parts.topic_end))

    def stored_at_ms(self) -> np.ndarray:
        hosts = self._data.array[self._at + records.HOST_BITS_POSITION]
        more = records.HOST_V6_MORE_BYTES * ((hosts & records.BORN_HOST_V6) != 0)
        return _read_big_endian(self._data, self._at + records.STORED_AT_POSITION + more, 8)

    def encoded_properties(self) -> pa.Array:
        return gather(self._data, self._parts.topic_end + _PROPERTIES_LENGTH_BYTES, self._end)


class _Parts(NamedTuple):
    """Where the parts of each record begin and end."""

    body_at: np.ndarray
    body_end: np.ndarray
    topic_at: np.ndarray
    topic_end: np.ndarray


def _find_parts(data: Bytes, at: np.ndarray, size: np.ndarray) -> _Parts:
    """Each check guards the reads that follow it."""
    end = at + size
    _check(data, at, size, (size >= records.RECORD_BYTES_MIN) & (end <= len(data)))
    _check(data, at, size, _read_big_endian(data, at, 4) == size)
    magic = _read_big_endian(data, at + records.MAGIC_POSITION, 4)
    is_v2 = magic == records.MAGIC_V2  # its topic has a length of two bytes
    _check(data, at, size, is_v2 | (magic == records.MAGIC_V1))
    hosts = data.array[at + records.HOST_BITS_POSITION]
    more = ((hosts & records.BORN_HOST_V6) != 0).astype(np.int64) + ((hosts & records.STORE_HOST_V6) != 0)
    body_at = at + records.HEAD_BYTES + records.HOST_V6_MORE_BYTES * more
    _check(data, at, size, body_at <= end)
    body_end = body_at + _read_big_endian(data, body_at - _BODY_LENGTH_BYTES, _BODY_LENGTH_BYTES)
    topic_at = body_end + 1 + is_v2
    _check(data, at, size, (body_end >= body_at) & (topic_at <= end))
    first_byte = data.array[body_end].astype(np.int64)
    topic_end = topic_at + np.where(is_v2, first_byte << 8 | data.array[topic_at - 1], first_byte)
    properties_at = topic_end + _PROPERTIES_LENGTH_BYTES
    _check(data, at, size, properties_at <= end)
    _check(data, at, size, properties_at + _read_big_endian(data, topic_end, _PROPERTIES_LENGTH_BYTES) == end)
    return _Parts(body_at, body_end, topic_at, topic_end)


def _check(data: Bytes, at: np.ndarray, size: np.ndarray, is_good: np.ndarray) -> None:
    if not is_good.all():
        bad = int(np.flatnonzero(~is_good)[0])
        raise CorruptLog(
            f"no record of {int(size[bad])} bytes stands at byte {int(at[bad])} of a file of {len(data)} bytes"
        )


# -- properties -------------------------------------------------------------------------------------------------


class _Entries(NamedTuple):
    """Entries whose name and value are not empty: where the name begins, where the separator stands, where the value
    ends. The entries of row n begin at offsets[n].
    """

    start: np.ndarray
    middle: np.ndarray
    stop: np.ndarray
    offsets: np.ndarray

    @property
    def row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


class Properties:
    """A binary column of encoded properties, read by name."""

    def __init__(self, encoded: pa.Array) -> None:
        self.encoded = encoded
        self._data = Bytes(np.frombuffer(encoded.buffers()[2] or b"", np.uint8))
        bounds = np.frombuffer(encoded.buffers()[1], np.int32)[encoded.offset : encoded.offset + len(encoded) + 1]
        self._bounds = bounds.astype(np.int64)

    def decode_each(self) -> list[dict[str, str]]:
        """Decodes row by row: slow, for rare cases. Raises IllegalMessage."""
        return [decode_properties(each) for each in self.encoded.to_pylist()]

    def values(self, name: str) -> pa.Array:
        """The value of a name in each row, null where the row does not have it."""
        _, middle, stop, offsets = self._entries
        which = self._find_name(name.encode())
        found = decode_text(gather(self._data, middle[which] + 1, stop[which]))
        row_count = len(offsets) - 1
        if len(which) == row_count and ((which >= offsets[:-1]) & (which < offsets[1:])).all():
            return found  # each row has one: the usual case
        index = np.full(row_count, -1, np.int64)
        index[np.searchsorted(offsets, which, "right") - 1] = np.arange(len(which))  # the last one of a row stays
        return found.take(pa.array(index, mask=index < 0))

    def _find_name(self, name: bytes) -> np.ndarray:
        """Returns which of the entries have this name."""
        start, middle, _, _ = self._entries
        which = np.flatnonzero(middle - start == len(name))
        at = 0
        for width, kind in _LETTER_WIDTHS:
            while at + width <= len(name):
                letters = _view_numbers(self._data.array, kind)[start[which] + at]
                which = which[letters == int.from_bytes(name[at : at + width], "little")]
                at += width
        return which

    def maps(self, pairs_max: int = PAIRS_MAX) -> pa.Array:
        """All properties of each row."""
        start, middle, stop, offsets = self._entries
        names, values = (decode_text(gather(self._data, *each)) for each in ((start, middle), (middle + 1, stop)))
        counts = _find_last(self._entries.row, names, values, pairs_max)
        if not counts.all():
            names, values = names.filter(pa.array(counts)), values.filter(pa.array(counts))
            offsets = np.append(0, np.cumsum(counts))[offsets]
        return pa.MapArray.from_arrays(pa.array(offsets.astype(np.int32)), names, values)

    @cached_property
    def _entries(self) -> _Entries:
        start, stop = self._split()
        # The first separator at or after each start; it lies after the stop where the entry has none.
        middle = np.flatnonzero(self._data.array == _VALUE_BEGINS)
        if len(middle) != len(start) or not ((middle >= start) & (middle < stop)).all():  # usually one in each
            middle = np.append(middle, len(self._data))[np.searchsorted(middle, start)]
        is_whole = (middle > start) & (middle + 1 < stop)
        if not is_whole.all():
            start, middle, stop = start[is_whole], middle[is_whole], stop[is_whole]
        return _Entries(start, middle, stop, np.searchsorted(start, self._bounds))

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns where each entry begins and ends. The end of a row ends its last entry, too."""
        data, bounds = self._data.array, self._bounds
        stop = np.flatnonzero(data == _VALUE_ENDS)
        stop = stop[(stop >= bounds[0]) & (stop < bounds[-1])]
        row_ends = bounds[1:][bounds[1:] > bounds[:-1]]
        row_ends = row_ends[data[row_ends - 1] != _VALUE_ENDS]
        step = np.ones(len(stop), np.int64)
        if len(row_ends):
            both = np.concatenate([row_ends, stop])
            order = np.argsort(both, kind="stable")
            stop, step = both[order], (order >= len(row_ends)).astype(np.int64)
        return np.append(bounds[0], (stop + step)[:-1])[: len(stop)], stop


def _find_last(row: np.ndarray, names: pa.Array, values: pa.Array, pairs_max: int) -> np.ndarray:
    """Returns which entries count: the last one of its row and name, if name and value are text."""
    encoded = names.dictionary_encode()
    name_count = len(encoded.dictionary) + 1
    pair = row * name_count + encoded.indices.fill_null(name_count - 1).to_numpy()
    number = np.arange(len(pair))
    if len(pair) and (int(row[-1]) + 1) * name_count > pairs_max:
        pair = np.unique(pair, return_inverse=True)[1]
    last = np.empty(int(pair.max()) + 1 if len(pair) else 0, np.int64)
    last[pair] = number  # of several the last one stays
    counts: np.ndarray = last[pair] == number
    if names.null_count or values.null_count:
        counts &= names.is_valid().to_numpy(False) & values.is_valid().to_numpy(False)
    return counts


# -- dues -------------------------------------------------------------------------------------------------------


class Dues(NamedTuple):
    due: np.ndarray  # 0: at once
    level: np.ndarray


class _NotPlain(Exception):
    """A number has signs or letters, or is so large that a sum might not fit 64 bits."""


def compute_dues(properties: Properties, stored_at_ms: np.ndarray, levels: DelayLevels) -> Dues:
    """Computes when messages were due when they were stored: `message.due_and_level` for many at once. Leaves numbers
    that are not plain to that function, row by row. Raises IllegalMessage for properties that no message can have been
    stored with.
    """
    try:
        return _compute_plain_dues(properties, stored_at_ms, levels)
    except _NotPlain:
        rows = zip(properties.decode_each(), stored_at_ms.tolist(), strict=True)
        each = [due_and_level(named, at_ms, levels, INT64_MAX) for named, at_ms in rows]
        both = np.array(each, np.int64).reshape(-1, 2)
        return Dues(both[:, 0].copy(), both[:, 1].astype(np.uint8))


def _compute_plain_dues(properties: Properties, stored_at_ms: np.ndarray, levels: DelayLevels) -> Dues:
    """The properties overwrite each other: the one with the highest precedence comes last."""
    at_ms = np.zeros(len(stored_at_ms), np.int64)
    for name, unit_ms, is_span in (
        (PROPERTY_START_DELIVER_TIME, 1, False),
        (PROPERTY_TIMER_DELIVER_MS, 1, False),
        (PROPERTY_TIMER_DELAY_MS, 1, True),
        (PROPERTY_TIMER_DELAY_SEC, 1_000, True),
    ):
        number, is_present = _parse_numbers(properties.values(name))
        if is_present.any():
            at_ms = np.where(is_present, number * unit_ms + (stored_at_ms if is_span else 0), at_ms)
    number, is_present = _parse_numbers(properties.values(PROPERTY_DELAY))
    level = np.where(is_present, np.clip(number, 0, levels.count), 0)
    if level.any():
        at_ms = np.where(level > 0, stored_at_ms + np.array([0, *levels.delays_ms])[level], at_ms)
    return Dues(np.where(at_ms > stored_at_ms, at_ms, 0), level.astype(np.uint8))


def _parse_numbers(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers, 0 where there is no text, and where there is text. Raises _NotPlain."""
    if text.null_count == len(text):
        return np.zeros(len(text), np.int64), np.zeros(len(text), bool)
    try:
        number: np.ndarray = text.cast(pa.int64()).fill_null(0).to_numpy()
    except pa.ArrowInvalid as error:
        raise _NotPlain from error
    if ((number > _PLAIN_MAX) | (number < -_PLAIN_MAX)).any():
        raise _NotPlain
    return number, text.is_valid().to_numpy(False)

"""Turns columns of a frame into rows of the table, all rows of a batch at once.

A record is made of its head (numpy), its body, its topic and its properties (Arrow); only checksums and hashes are
computed row by row. The rules of a send say what a row may hold. Executors that load need numpy and xxhash: the package
is installed there.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from postdate.arrival import PART_ROWS_MAX, PARTS_MAX, own_arrival
from postdate.errors import UsageError
from postdate.keys import key_hash
from postdate.message import (
    BODY_BYTES_MAX_DEFAULT,
    DELAY_PROPERTIES,
    INTERNAL_PROPERTIES,
    LOOPBACK,
    ONCE_PROPERTIES,
    PROPERTIES_BYTES_MAX,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQ_KEY,
    first_key,
    tag_hash,
)
from postdate.storage.chunk import FLAG_OWN_ARRIVAL
from postdate.storage.record import HEAD_BYTES, shape
from postdate.table.format import MESSAGE, SCHEMA

# A record's head, as postdate/storage/record.py draws it for two IPv4 hosts.
_HEAD = np.dtype(
    [
        ("size", ">i4"), ("magic", ">u4"), ("body_crc", ">u4"), ("queue_id", ">i4"), ("flag", ">i4"),
        ("queue_offset", ">i8"), ("offset", ">i8"), ("sys_flag", ">i4"), ("born_at_ms", ">i8"),
        ("born_address", ">u4"), ("born_port", ">i4"), ("stored_at_ms", ">i8"), ("store_address", ">u4"),
        ("store_port", ">i4"), ("reconsume_times", ">i4"), ("prepared_offset", ">i8"), ("body_bytes", ">i4"),
    ]
)  # fmt: skip
assert _HEAD.itemsize == HEAD_BYTES
_CRC_MASK = 0x7FFFFFFF
_LOOPBACK = int.from_bytes(LOOPBACK.address)
_UNIQUE_BYTES = 32
_DIGITS = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SEPARATORS = "[\x01\x02]"
_SHOWN_CHARACTERS_MAX = 64

# Properties that have an argument of their own, that the import sets itself, or that only a broker may set.
RESERVED_PROPERTIES = (
    INTERNAL_PROPERTIES | DELAY_PROPERTIES | ONCE_PROPERTIES
    | {PROPERTY_UNIQ_KEY, PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_TIMER_DEL_UNIQKEY, PROPERTY_TRANSACTION}
)  # fmt: skip
PROPERTIES = pa.map_(pa.string(), pa.string())

TIMESTAMP, MILLISECONDS, SECONDS = "timestamp", "ms", "s"  # forms of a due time
ROUND_ROBIN, BY_KEY = "round-robin", "key"  # how queues are chosen


class Wanted(NamedTuple):
    """The columns of an import, by what they hold; "" for none."""

    due: str
    body: str
    key: str = ""
    tag: str = ""
    properties: str = ""  # one column of maps, or of JSON objects as text
    named: tuple[tuple[str, str], ...] = ()  # or properties, each with the column of its values
    unit: str = TIMESTAMP
    zone: str = ""  # of timestamps that have none
    queue: str = ROUND_ROBIN

    @property
    def columns(self) -> list[str]:
        """All columns, each once."""
        single = [self.due, self.body, self.key, self.tag, self.properties]
        return list(dict.fromkeys(name for name in [*single, *(column for _, column in self.named)] if name))


class Job(NamedTuple):
    """An import, as the broker described it when it began."""

    id: str
    number: int
    topic: str
    queues: tuple[tuple[int, int], ...]  # id and number of those that may be written
    now_ms: int
    delay_ms_max: int
    body_bytes_max: int = BODY_BYTES_MAX_DEFAULT


Faults = dict[int, str]  # why a row of a batch is bad


class Converter:
    """Makes rows of one part of an import. Counts rows from batch to batch, bad ones too: the same input gives the same
    arrivals in every attempt.
    """

    def __init__(self, wanted: Wanted, job: Job, part: int) -> None:
        """Raises UsageError where there are too many parts."""
        if part >= PARTS_MAX:
            raise UsageError(f"the frame has more than {PARTS_MAX:,} partitions: coalesce it")
        self._wanted, self._job, self._part = wanted, job, part
        self._row = 0
        self._shape = shape(LOOPBACK, LOOPBACK, job.topic.encode())
        self._id_digits = pa.scalar(f"{xxh3_64_intdigest(job.id.encode()):016X}".encode(), pa.binary())
        self._queues = np.array(job.queues, np.int32)

    def rows(self, batch: pa.RecordBatch, faults: Faults) -> pa.Table:
        """The good rows of a batch, in its order. Adds to `faults` why others are bad. Raises UsageError where the part
        has too many rows.
        """
        count = batch.num_rows
        if self._row + count > PART_ROWS_MAX:
            raise UsageError(
                f"a partition has more than {PART_ROWS_MAX:,} rows: repartition the frame, or cut the file"
            )
        first, self._row = self._row, self._row + count
        columns = self._check(batch, faults)
        index = np.arange(count)
        if faults:
            index = np.array([row for row in range(count) if row not in faults], np.int64)
            columns = {name: column.take(pa.array(index)) for name, column in columns.items()}
        return self._make(columns, index, first, faults)

    # -- checking ------------------------------------------------------------------------------------------------

    def _check(self, batch: pa.RecordBatch, faults: Faults) -> dict[str, pa.Array]:
        """The columns that records are made of: due, body, key, tag, properties (of users, encoded)."""
        wanted = self._wanted
        due = self._due(batch.column(wanted.due), faults)
        body = batch.column(wanted.body).cast(pa.binary())
        _mark(faults, pc.is_null(body), lambda _: f"column {wanted.body} (the body) is null")
        length, limit = pc.binary_length(body), self._job.body_bytes_max
        is_long = pc.greater(length, limit)
        _mark(faults, is_long, lambda row: f"the body has {length[row].as_py()} bytes, the limit is {limit}")
        key, tag = (_key_texts(batch, name, faults) for name in (wanted.key, wanted.tag))
        properties = pa.repeat(pa.scalar(b"", pa.binary()), batch.num_rows)
        if wanted.properties:
            maps = batch.column(wanted.properties)
            if _is_text(maps.type):  # JSON objects
                texts, name = enumerate(maps.to_pylist()), wanted.properties
                maps = pa.array([properties_of(text, name, row, faults) for row, text in texts], PROPERTIES)
            properties = _encode_maps(maps.cast(PROPERTIES), faults)
        elif wanted.named:
            properties = _join(*(_encode_column(batch, name, column, faults) for name, column in wanted.named))
        return {"due": due, "body": body, "key": key, "tag": tag, "properties": properties}

    def _due(self, column: pa.Array, faults: Faults) -> pa.Array:
        name, job = self._wanted.due, self._job
        _mark(faults, pc.is_null(column), lambda _: f"column {name} (the due time) is null")
        due = due_ms(column, self._wanted, faults)
        latest = job.now_ms + job.delay_ms_max
        _mark(
            faults,
            pc.greater(due, latest),
            lambda row: f"due {_moment(due[row].as_py())} is later than {_moment(latest)}, the longest delay from now",
        )
        return pc.max_element_wise(due, 1)  # 0 would mean "not delayed"; the past is due at once

    # -- making -------------------------------------------------------------------------------------------------

    def _make(self, columns: dict[str, pa.Array], index: np.ndarray, first: int, faults: Faults) -> pa.Table:
        arrival = own_arrival(self._job.number, self._part, first) + index
        unique, unique_hash = self._unique(arrival)
        due = columns["due"]
        properties = _join(
            _encode_named(PROPERTY_UNIQ_KEY, unique), _encode_named(PROPERTY_KEYS, columns["key"]),
            _encode_named(PROPERTY_TAGS, columns["tag"]), columns["properties"],
            _encode_named(PROPERTY_TIMER_DELIVER_MS, due.cast(pa.string())),
        )  # fmt: skip
        length = pc.binary_length(properties)
        if len(length) and pc.max(length).as_py() > PROPERTIES_BYTES_MAX:
            for place, size in zip(index.tolist(), length.to_pylist(), strict=True):
                if size > PROPERTIES_BYTES_MAX:
                    faults[place] = f"properties have {size} bytes, the limit is {PROPERTIES_BYTES_MAX}"
            good = pc.less_equal(length, PROPERTIES_BYTES_MAX)
            kept = {name: column.filter(good) for name, column in columns.items()}
            return self._make(kept, index[good.to_numpy(zero_copy_only=False)], first, faults)
        key_hashes = _key_hashes(columns["key"])
        queue = (arrival + self._part) % len(self._queues)  # one after the other, also where a row has no key
        if self._wanted.queue == BY_KEY:
            by_key = (key_hashes % np.uint64(len(self._queues))).astype(np.int64)
            queue = np.where(key_hashes == 0, queue, by_key)
        tags = columns["tag"].dictionary_encode()  # few are different
        tag_hashes = pa.array([tag_hash(each) for each in tags.dictionary.to_pylist()], pa.int32()).take(tags.indices)
        record = self._records(columns["body"], properties, self._queues[queue, 0])
        many = len(index)
        made = {
            "due": due, "arrival": pa.array(arrival), "kind": pa.repeat(pa.scalar(MESSAGE, pa.int8()), many),
            "topic": pa.repeat(pa.scalar(self._job.topic), many), "queue": pa.array(self._queues[queue, 1]),
            "level": pa.repeat(pa.scalar(0, pa.int8()), many), "tag_hash": pc.fill_null(tag_hashes, 0),
            "unique_hash": pa.array(unique_hash.view(np.int64)), "key_hash": pa.array(key_hashes.view(np.int64)),
            "flags": pa.repeat(pa.scalar(FLAG_OWN_ARRIVAL, pa.int32()), many), "key": columns["key"],
            "tag": columns["tag"], "size": pc.binary_length(record), "record": record,
        }  # fmt: skip
        return pa.Table.from_arrays([made[name] for name in SCHEMA.names], schema=SCHEMA)

    def _unique(self, arrival: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        """Unique keys, made of the import's id and the arrival, and their hashes."""
        nibbles = np.empty((len(arrival), 16), np.uint8)
        octets = arrival.astype(">i8").view(np.uint8).reshape(-1, 8)
        nibbles[:, 0::2], nibbles[:, 1::2] = octets >> 4, octets & 15
        keys = np.empty((len(arrival), _UNIQUE_BYTES), np.uint8)
        keys[:, :16] = np.frombuffer(self._id_digits.as_py(), np.uint8)
        keys[:, 16:] = _DIGITS[nibbles]
        data = keys.tobytes()
        hashes = [xxh3_64_intdigest(data[at : at + _UNIQUE_BYTES]) or 1 for at in range(0, len(data), _UNIQUE_BYTES)]
        return _fixed_width(data, _UNIQUE_BYTES, pa.string()), np.array(hashes, np.uint64)

    def _records(self, body: pa.Array, properties: pa.Array, queue_ids: np.ndarray) -> pa.Array:
        body_bytes, properties_bytes = (
            pc.binary_length(part).to_numpy(zero_copy_only=False) for part in (body, properties)
        )
        head = np.zeros(len(body), _HEAD)
        head["size"] = self._shape.fixed_bytes + body_bytes + properties_bytes
        head["magic"] = self._shape.magic
        head["body_crc"] = [crc32(each) & _CRC_MASK for each in body.to_pylist()]
        head["queue_id"] = queue_ids
        head["born_at_ms"] = head["stored_at_ms"] = self._job.now_ms
        head["born_address"] = head["store_address"] = _LOOPBACK
        head["body_bytes"] = body_bytes
        lengths = _fixed_width(properties_bytes.astype(">i2").tobytes(), 2, pa.binary())
        return _join(
            _fixed_width(head.tobytes(), HEAD_BYTES, pa.binary()), body, self._shape.topic, lengths, properties
        )


# -- due times --------------------------------------------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INSTANT = pa.timestamp("us", "UTC")
_MS_MAX = 1 << 61  # far beyond every limit, and no sum of two overflows


def due_ms(column: pa.Array, wanted: Wanted, faults: Faults) -> pa.Array:
    """Epoch milliseconds. A fraction is rounded up: nothing is delivered before its time. Null where it is bad."""
    if _is_text(column.type):
        read = _numbers_of if wanted.unit != TIMESTAMP else _instants_of
        return read(column, wanted, faults)
    if pa.types.is_timestamp(column.type):
        return _round_up(in_zone(column, wanted.zone))
    return _in_unit(column.cast(pa.int64()), wanted, faults)


def in_zone(column: pa.Array, zone: str) -> pa.Array:
    """Timestamps with a zone. A time that clocks show twice means the first; one that they skip means the moment at
    which they skip it.
    """
    if column.type.tz is None:
        column = pc.assume_timezone(column, zone, ambiguous="earliest", nonexistent="latest")
    return column.cast(_INSTANT)


def check_zone(zone: str) -> None:
    """Raises UsageError for an unknown zone."""
    try:
        in_zone(pa.array([datetime(2000, 1, 1)], pa.timestamp("us")), zone)
    except pa.ArrowInvalid:
        raise UsageError(f"zone {zone!r} is not known, expected a name such as Europe/Berlin") from None


def _round_up(instants: pa.Array) -> pa.Array:
    micros = pc.fill_null(instants.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return pa.array(-(-micros // 1_000), mask=pc.is_null(instants).to_numpy(zero_copy_only=False))


def _in_unit(number: pa.Array, wanted: Wanted, faults: Faults) -> pa.Array:
    factor = 1 if wanted.unit == MILLISECONDS else 1_000
    limit = _MS_MAX // factor
    is_wide = pc.or_(pc.greater(number, limit), pc.less(number, -limit))
    _mark(faults, is_wide, lambda row: f"column {wanted.due} is {number[row].as_py()}, which is out of range")
    return pc.multiply(pc.if_else(is_wide, None, number), factor)


def _numbers_of(column: pa.Array, wanted: Wanted, faults: Faults) -> pa.Array:
    try:
        numbers = column.cast(pa.int64())
    except pa.ArrowInvalid:
        numbers = pa.array(_each(column, lambda text: pa.scalar(text.strip()).cast(pa.int64()).as_py()), pa.int64())
        is_bad = pc.and_(pc.is_null(numbers), pc.is_valid(column))
        _mark(faults, is_bad, lambda row: f"column {wanted.due} is {_show(column, row)}, expected a whole number")
    return _in_unit(numbers, wanted, faults)


def _instants_of(column: pa.Array, wanted: Wanted, faults: Faults) -> pa.Array:
    """Instants in ISO 8601. Arrow reads a column of one form at once; others are read row by row."""
    try:
        return _round_up(column.cast(_INSTANT))
    except pa.ArrowInvalid:
        times = _each(column, lambda text: datetime.fromisoformat(text.strip()))
    is_bad = pa.array([time is None for time in times])
    _mark(
        faults,
        pc.and_(is_bad, pc.is_valid(column)),
        lambda row: f"column {wanted.due} is {_show(column, row)}, expected a time such as 2027-01-01T08:00:00+01:00",
    )
    is_local = pa.array([time is not None and time.tzinfo is None for time in times])
    if not wanted.zone:
        _mark(
            faults,
            is_local,
            lambda row: f"column {wanted.due} is {_show(column, row)}, which has no zone: say it (zone, --zone)",
        )
    local = pa.array([None if time is None else time.replace(tzinfo=None) for time in times], pa.timestamp("us"))
    placed = pa.array([None if time is None or time.tzinfo is None else time for time in times], _INSTANT)
    return _round_up(pc.if_else(is_local, in_zone(local, wanted.zone or "UTC"), placed))


def _each(column: pa.Array, read: Callable[[Any], Any]) -> list[Any]:
    """What a function reads of each value; None where it cannot, or there is none."""

    def read_one(value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except (ValueError, OverflowError):
            return None

    return [read_one(value) for value in column.to_pylist()]


# -- texts and properties ---------------------------------------------------------------------------------------


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _key_texts(batch: pa.RecordBatch, name: str, faults: Faults) -> pa.Array:
    """A column of keys or tags. Null and empty mean none."""
    if not name:
        return pa.nulls(batch.num_rows, pa.string())
    texts = _check_texts(batch.column(name), name, faults)
    return pc.if_else(pc.equal(pc.binary_length(texts), 0), None, texts)


def _check_texts(column: pa.Array, name: str, faults: Faults) -> pa.Array:
    """As values of properties. What is no UTF-8 is null."""
    texts = column.cast(pa.string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        raw = texts.cast(pa.binary())
        known = pa.array(_each(raw, bytes.decode), pa.string())
        is_bad = pc.and_(pc.is_null(known), pc.is_valid(raw))
        _mark(faults, is_bad, lambda _: f"column {name} is not UTF-8")
        texts = known
    is_cut = pc.match_substring_regex(texts, _SEPARATORS)
    _mark(faults, is_cut, lambda row: f"column {name} contains a separator, 0x01 or 0x02: {_show(texts, row)}")
    return texts


def properties_of(value: Any, name: str, row: int, faults: Faults) -> list[tuple[str, str]]:
    """Of an object, or of the text of one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError:
            value = 0
    if value is None:
        return []
    if not isinstance(value, dict) or not all(each is None or isinstance(each, str) for each in value.values()):
        faults.setdefault(row, f"column {name} (the properties), expected an object with values that are text")
        return []
    return list(value.items())


def _encode_column(batch: pa.RecordBatch, name: str, column: str, faults: Faults) -> pa.Array:
    """A property whose values have a column of their own, encoded."""
    values = _check_texts(batch.column(column), column, faults)
    _mark(faults, pc.equal(pc.binary_length(values), 0), lambda _: _empty(name))
    return _encode_named(name, values)


def _encode_maps(maps: pa.Array, faults: Faults) -> pa.Array:
    """All entries are encoded at once; those of a row stand together, so that its properties are a slice."""
    offsets = maps.offsets.to_numpy()
    low, high = int(offsets[0]), int(offsets[-1])
    rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
    own: Faults = {}
    # `keys` and `items` are those of the whole buffer, `offsets` those of this piece of it.
    names = _check_texts(maps.keys[low:high], "of the properties", own)
    values = _check_texts(maps.items[low:high], "of the properties", own)
    _mark(own, pc.equal(pc.binary_length(names), 0), lambda _: "a property has an empty name")
    _mark(own, pc.equal(pc.binary_length(values), 0), lambda at: _empty(names[at].as_py()))
    reserved = pa.array(sorted(RESERVED_PROPERTIES))
    _mark(own, pc.is_in(names, reserved), lambda at: f"property {names[at].as_py()} is not for a user to set")
    for at, reason in own.items():
        faults.setdefault(int(rows[at]), reason)
    entries = pc.fill_null(_join(names, b"\x01", values, b"\x02"), b"")
    ends = np.frombuffer(entries.buffers()[1], np.int32, len(entries) + 1)
    return pa.Array.from_buffers(
        pa.binary(), len(maps), [None, pa.py_buffer(ends[offsets - low].tobytes()), entries.buffers()[2]]
    )


def _empty(name: str) -> str:
    return f"property {name} has an empty value, which readers would drop"


# -- bytes ------------------------------------------------------------------------------------------------------


def _encode_named(name: str, values: pa.Array) -> pa.Array:
    """An encoded property; nothing where the value is null."""
    return pc.fill_null(_join(f"{name}\x01".encode(), values, b"\x02"), b"")


def _join(*parts: pa.Array | bytes) -> pa.Array:
    """Side by side; null where one part is."""
    whole = [pa.scalar(each, pa.binary()) if isinstance(each, bytes) else each.cast(pa.binary()) for each in parts]
    return pc.binary_join_element_wise(*whole, pa.scalar(b"", pa.binary()))


def _fixed_width(data: bytes, width: int, kind: pa.DataType) -> pa.Array:
    """Values that are equally long."""
    count = len(data) // width
    offsets = np.arange(0, len(data) + 1, width, dtype=np.int32)
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


# -- hashes -----------------------------------------------------------------------------------------------------


def _key_hashes(keys: pa.Array) -> np.ndarray:
    """Of the first of each row's keys."""
    if keys.null_count == len(keys):
        return np.zeros(len(keys), np.uint64)
    if pc.any(pc.match_substring(keys, " ")).as_py():
        return np.array([key_hash(first_key(each)) if each else 0 for each in keys.to_pylist()], np.uint64)
    # The usual case: a key is hashed as it lies there.
    raw = keys.cast(pa.binary()).to_pylist()
    return np.array([xxh3_64_intdigest(each) or 1 if each else 0 for each in raw], np.uint64)


# -- faults -----------------------------------------------------------------------------------------------------


def _mark(faults: Faults, is_bad: pa.Array, reason: Callable[[int], str]) -> None:
    """Marks rows as bad; the first reason stays."""
    if pc.any(is_bad).as_py():
        for row in pc.indices_nonzero(is_bad).to_pylist():
            if row not in faults:
                faults[row] = reason(row)


def _show(column: pa.Array, row: int) -> str:
    text = str(column[row].as_py())
    return repr(text) if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]!r}..."


def _moment(at_ms: int) -> str:
    try:
        return datetime.fromtimestamp(at_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError):
        return f"{at_ms} ms"

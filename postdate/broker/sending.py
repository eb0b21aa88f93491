"""The intake: what a producer hands in becomes the rows and records of a batch.

Preparing validates one message and finds out everything about it that the fold will want to know; nothing is written
yet, so a message that is refused changes nothing. Packing gives the bytes, when the place of the batch in the log is
known. This is the hot path of sending: a prepared message is a plain tuple, and a topic is looked up once.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NoReturn

from postdate.broker.settings import CurrentSettings
from postdate.errors import IllegalMessage, NoPermission, UsageError
from postdate.keys import key_hash
from postdate.message import (
    INTERNAL_PROPERTIES,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQ_KEY,
    DelayLevels,
    Host,
    Message,
    check_message,
    decode_properties,
    due_and_level,
    first_key,
    has_other_keys,
    refuse_internal,
    tag_hash,
)
from postdate.state.fold import Fold
from postdate.state.topics import PERM_WRITE, RESERVED_TOPICS, Topic
from postdate.storage import record as records
from postdate.storage.batch import ALIGNMENT, KIND_NAMES, MESSAGE, MORE_KEYS, batch_bytes, records_position
from postdate.storage.layout import ROW_STRUCT

SYSTEM_TOPIC_PREFIX = "postdate_sys_"
_NOT_FROM_PRODUCERS = INTERNAL_PROPERTIES | {PROPERTY_TIMER_DEL_UNIQKEY, PROPERTY_TRANSACTION}

# (message, shape, record size, level, queue number, due, unique hash, key hash, tag hash, unique key, flags)
Prepared = tuple[Message, records.Shape, int, int, int, int, int, int, int, str | None, int]
MESSAGE_SENT: Final = 0  # places in it that others look at
SIZE: Final = 2
DUE: Final = 5
UNIQUE_KEY: Final = 9


class _Known(NamedTuple):
    """A topic that was looked up, and the shape of its records by length of the born host's address."""

    topic: Topic
    shapes: dict[int, records.Shape]


class Packed(NamedTuple):
    """The body of a batch, and the offset of each record in the log."""

    body: bytes
    offsets: list[int]


class _Parts(NamedTuple):
    """The messages of a batch, not put together yet."""

    rows: list[bytes]
    records: list[bytes]
    offsets: list[int]
    end: int  # position behind the last record


class Intake:
    """Prepares and packs. Knows the fold's topics, changes nothing."""

    def __init__(self, fold: Fold, settings: CurrentSettings, batch_bytes_max: int, store_host: Host) -> None:
        self._fold = fold
        self._settings = settings
        self._properties_bytes_max = settings.limits.properties_bytes_max
        self._batch_bytes_max = batch_bytes_max
        self._store_host = store_host
        self.levels = DelayLevels.parse(settings.now.message_delay_level)
        self._known: dict[str, _Known] = {}

    def forget_topics(self) -> None:
        """A topic was put or deleted."""
        self._known.clear()

    def prepare(self, message: Message, at_ms: int) -> Prepared:
        """Raises IllegalMessage, TopicNotFound and NoPermission."""
        # Unpacked once: this runs for every send, and reading attributes costs more than the checks.
        name, body, encoded_properties, queue_id, _, _, _, born_host, _, _ = message
        known = self._known.get(name)
        topic, shapes = known if known is not None else self._look_up(name)
        shape = shapes.get(len(born_host.address))
        settings = self._settings.now
        if (
            len(body) > settings.body_bytes_max
            or len(encoded_properties) > self._properties_bytes_max
            or not 0 <= queue_id < topic.write_queue_count
            or shape is None
        ):
            self._refuse_fields(message, topic)
        properties = decode_properties(encoded_properties)
        if not _NOT_FROM_PRODUCERS.isdisjoint(properties):
            _refuse(properties)
        due_at_ms, level = due_and_level(properties, at_ms, self.levels, settings.delay_ms_max)
        get = properties.get
        unique, keys, tags = get(PROPERTY_UNIQ_KEY), get(PROPERTY_KEYS), get(PROPERTY_TAGS)
        return (
            message,
            shape,
            shape.fixed_bytes + len(body) + len(encoded_properties),
            level,
            topic.numbers[queue_id],
            due_at_ms,
            key_hash(unique) if unique else 0,
            key_hash(first_key(keys)) if keys else 0,
            tag_hash(tags) if tags else 0,
            unique,
            MORE_KEYS if keys and has_other_keys(keys) else 0,
        )

    def _refuse_fields(self, message: Message, topic: Topic) -> NoReturn:
        self._check(message)
        raise IllegalMessage(
            f"queue {message.queue_id} of topic {topic.name!r} does not exist: it has {topic.write_queue_count}"
        )

    def _check(self, message: Message) -> None:
        settings = self._settings.now
        check_message(message, settings.body_bytes_max, self._properties_bytes_max)

    def _look_up(self, name: str) -> "_Known":
        refuse_system_topic(name)
        topic = self._fold.topics.get(name)
        if not topic.perm & PERM_WRITE:
            raise NoPermission(f"topic {name!r} may not be written: its perm is {topic.perm}")
        shapes = {length: records.shape(Host(bytes(length), 0), self._store_host, name.encode()) for length in (4, 16)}
        known = self._known[name] = _Known(topic, shapes)
        return known

    def batch_length(self, prepared: list[Prepared]) -> int:
        """The length of the batch. Raises UsageError where it is too long."""
        return self._checked(batch_bytes(len(prepared), sum([entry[SIZE] for entry in prepared])))

    def _checked(self, length: int) -> int:
        if length > self._batch_bytes_max:
            raise UsageError(f"the batch would have {length} bytes, batch_bytes_max is {self._batch_bytes_max}")
        return length

    def pack(self, prepared: list[Prepared], start: int, at_ms: int) -> Packed:
        """The body of a batch that stands at `start`. Raises IllegalMessage for a number that does not fit its field:
        it shows here without a check of its own.
        """
        try:
            return self._packed(prepared, start, at_ms)
        except struct.error:
            for entry in prepared:
                self._check(entry[MESSAGE_SENT])
            raise

    def _packed(self, prepared: list[Prepared], start: int, at_ms: int) -> Packed:
        first = records_position(len(prepared))
        rows, bodies, offsets, end = self._rows_and_records(prepared, start, first, at_ms)
        rows += bodies
        if end % ALIGNMENT:
            rows.append(bytes(-end % ALIGNMENT))
        return Packed(b"".join(rows), offsets)

    def _rows_and_records(self, prepared: list[Prepared], start: int, position: int, at_ms: int) -> "_Parts":
        rows, bodies, offsets = [], [], []
        pack_row, encode, store_host = ROW_STRUCT.pack, records.encode_shaped, self._store_host
        for message, shape, size, level, queue, due_at_ms, unique_hash, first_hash, tagged, _, flags in prepared:
            rows.append(
                pack_row(MESSAGE, level, flags, queue, due_at_ms, unique_hash, first_hash, tagged, size, position, 0)
            )
            offset = start + position
            bodies.append(encode(message, shape, offset, at_ms, store_host))
            offsets.append(offset)
            position += size
        return _Parts(rows, bodies, offsets, position)

    def mixed_length(self, prepared: list[Prepared], body: bytes, kind: int) -> int:
        """The length of a batch of messages with one record of a system topic behind them."""
        size = sum([entry[SIZE] for entry in prepared]) + self._system_size(body, kind)
        return self._checked(batch_bytes(len(prepared) + 1, size))

    def pack_mixed(self, prepared: list[Prepared], kind: int, body: bytes, start: int, at_ms: int) -> Packed:
        """Messages and a system record that count together or not at all."""
        messages = self._rows_and_records(prepared, start, records_position(len(prepared) + 1), at_ms)
        row, record = self._system_parts(kind, body, start, messages.end, at_ms)
        padding = bytes(-(messages.end + len(record)) % ALIGNMENT)
        return Packed(b"".join([*messages.rows, row, *messages.records, record, padding]), messages.offsets)

    def system_length(self, body: bytes, kind: int) -> int:
        """The length of a batch with one record of a system topic. Raises UsageError where it is too long."""
        return self._checked(batch_bytes(1, self._system_size(body, kind)))

    def _system_size(self, body: bytes, kind: int) -> int:
        return records.record_bytes(Message("", body), _system_topic(kind), self._store_host)

    def pack_system(self, kind: int, body: bytes, start: int, at_ms: int) -> Packed:
        position = records_position(1)
        row, record = self._system_parts(kind, body, start, position, at_ms)
        return Packed(row + record + bytes(-(position + len(record)) % ALIGNMENT), [start + position])

    def _system_parts(self, kind: int, body: bytes, start: int, position: int, at_ms: int) -> tuple[bytes, bytes]:
        """Row and record of a system topic."""
        message = Message("", body, born_at_ms=at_ms)
        record = records.encode(message, _system_topic(kind), start + position, at_ms, self._store_host)
        return ROW_STRUCT.pack(kind, 0, 0, -1, 0, 0, 0, 0, len(record), position, 0), record


def system_body(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def refuse_system_topic(name: str) -> None:
    if name in RESERVED_TOPICS or name.startswith(SYSTEM_TOPIC_PREFIX):
        raise NoPermission(f"topic {name!r} belongs to the broker")


def _system_topic(kind: int) -> bytes:
    return (SYSTEM_TOPIC_PREFIX + KIND_NAMES[kind]).encode()


def _refuse(properties: Mapping[str, str]) -> None:
    refuse_internal(properties)
    if PROPERTY_TIMER_DEL_UNIQKEY in properties:
        raise IllegalMessage(f"{PROPERTY_TIMER_DEL_UNIQKEY} marks a cancel, not a message: use cancel")
    if properties[PROPERTY_TRANSACTION].lower() == "true":
        raise NoPermission("transactions are not supported: the half message was not stored")

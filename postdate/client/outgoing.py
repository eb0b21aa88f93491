"""Messages on their way out: what a caller asks for as properties, and the receipt for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from postdate.errors import IllegalMessage, ProtocolError, UsageError
from postdate.message import (
    PROPERTIES_BYTES_MAX,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_ONCE,
    PROPERTY_START_DELIVER_TIME,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    check_topic,
    encode_properties,
)
from postdate.spans import Delay, delay_ms, instant_ms
from postdate.wire.bodies import Inner
from postdate.wire.frame import FRAME_BYTES_MAX_DEFAULT, Fields
from postdate.wire.ids import parse_recall_handle

Text = str | int | UUID  # numbers and UUIDs are sent as str() writes them
Key = Text | list[Text] | tuple[Text, ...]

PROPERTY_WAIT = "WAIT"  # whether the broker answers only when the message is safe
# These have arguments of their own. A second way would only make it unclear which of two values counts.
_PROPERTIES_BY_ARGUMENT = {
    PROPERTY_DELAY: "level", PROPERTY_TIMER_DELAY_SEC: "delay", PROPERTY_TIMER_DELAY_MS: "delay",
    PROPERTY_TIMER_DELIVER_MS: "at", PROPERTY_START_DELIVER_TIME: "at", PROPERTY_KEYS: "key", PROPERTY_TAGS: "tag",
    PROPERTY_ONCE: "once",
}  # fmt: skip
_PROPERTIES_OF_CLIENT = (PROPERTY_UNIQ_KEY, PROPERTY_WAIT)

# A frame of a batch: large enough to share its cost, far below the largest frame and body that a broker takes.
BATCH_BYTES_MAX = 1_000_000
BATCH_MESSAGES_MAX = 1_000
_INNER_BYTES = 22  # what a batch adds to each message: five numbers, and the length of its properties
_HEADER_BYTES = 4_096  # of a request's header besides the properties, at most


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send, as the arguments of `send` describe it."""

    body: bytes | str
    _: KW_ONLY
    delay: Delay | None = None
    at: datetime | None = None
    level: int | None = None
    key: Key | None = None
    tag: str | None = None
    properties: Mapping[str, Text] | None = None
    once: Text | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known about a message that a broker has taken.

    `str(receipt)` is what to store for a later cancel: the recall handle, or the id where the broker gave no handle.
    """

    topic: str
    id: str  # the unique key; the consumer sees the same one
    offset_id: str  # where the broker keeps it
    queue_id: int
    queue_offset: int | None  # None if a delay was asked for: it has none while it waits
    due_at_ms: int | None  # by the broker's clock; None unless the broker gave a handle
    handle: str | None  # what a cancel needs

    def __str__(self) -> str:
        return self.handle or self.id


class Sealed(NamedTuple):
    """A message ready for the wire."""

    unique_key: str
    body: bytes
    properties: bytes
    is_delayed: bool
    is_once: bool = False


def seal(message: Outgoing, unique_key: str) -> Sealed:
    """Raises UsageError for arguments that contradict each other, IllegalMessage for what no broker would take."""
    if not isinstance(message, Outgoing):
        raise UsageError(f"a message of a batch is of type {type(message).__name__}, expected postdate.Outgoing")
    body = message.body.encode() if isinstance(message.body, str) else message.body
    if not isinstance(body, bytes):
        raise UsageError(f"the body is of type {type(body).__name__}, expected bytes or str, such as json.dumps(...)")
    timing = _timing(message)
    properties = encode_properties(_properties(message, unique_key) | timing)
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise IllegalMessage(f"properties have {len(properties)} bytes, the limit is {PROPERTIES_BYTES_MAX}")
    check_size(body)
    return Sealed(unique_key, body, properties, bool(timing), message.once is not None)


def check_size(body: bytes) -> None:
    """A broker closes the connection on a frame that is too long, and that would look like a failure of its own."""
    body_bytes_max = FRAME_BYTES_MAX_DEFAULT - PROPERTIES_BYTES_MAX - _HEADER_BYTES
    if len(body) > body_bytes_max:
        raise IllegalMessage(f"the body has {len(body)} bytes, a frame has room for {body_bytes_max}")


def _properties(message: Outgoing, unique_key: str) -> dict[str, str]:
    properties: dict[str, str] = {}
    for name, value in (message.properties or {}).items():
        if name in _PROPERTIES_BY_ARGUMENT:
            raise UsageError(f"property {name}: use the argument {_PROPERTIES_BY_ARGUMENT[name]}")
        if name in _PROPERTIES_OF_CLIENT:
            raise UsageError(f"property {name} is set by the client itself")
        if not isinstance(name, str):
            raise UsageError(f"the name of property {name!r} is of type {type(name).__name__}, expected str")
        properties[name] = value if type(value) is str else text_of(f"property {name!r}", value)
    properties |= {PROPERTY_UNIQ_KEY: unique_key, PROPERTY_WAIT: "true"}
    if message.key is not None:
        properties[PROPERTY_KEYS] = keys_text(message.key)
    if message.tag is not None:
        if not isinstance(message.tag, str):
            raise UsageError(f"the tag is {message.tag!r} of type {type(message.tag).__name__}, expected str")
        properties[PROPERTY_TAGS] = message.tag
    if message.once is not None:
        properties[PROPERTY_ONCE] = once_text(message.once)
    return properties


def keys_text(key: Key) -> str:
    """The property KEYS of a key, or of several. Raises UsageError for one that nobody would find."""
    if not isinstance(key, (list, tuple)):
        return key_text(key)
    if not key:
        raise UsageError("the list of keys is empty; leave key out for a message without one")
    return " ".join(key_text(each) for each in key)


def once_text(once: Text) -> str:
    """The id of a message that is stored once, as text."""
    text = text_of("once", once)
    if not text:
        raise UsageError("once is empty, expected an id such as 'order-42'; leave once out for a message without one")
    return text


def key_text(key: Text) -> str:
    """One key as text."""
    text = key if type(key) is str else text_of("the key", key)
    if " " in text:
        raise UsageError(
            f"the key {text[:64]!r} has a space, and RocketMQ separates keys by spaces, so that nobody would find it; "
            f"write for example {text[:64].replace(' ', '-')!r}, or for several keys key={text[:64].split()}"
        )
    return text


def text_of(what: str, value: object) -> str:
    """A value that has one obvious form as text. Raises UsageError for others."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (int, UUID)) and not isinstance(value, bool):
        return str(value)
    raise UsageError(
        f"{what} is {value!r:.64} of type {type(value).__name__}, expected str, int or UUID; convert others to str"
    )


def check_topic_name(topic: object) -> None:
    """Raises UsageError for what is no text, and IllegalMessage for what is no name of a topic."""
    if not isinstance(topic, str):
        raise UsageError(f"the topic is {topic!r:.64} of type {type(topic).__name__}, expected str")
    check_topic(topic)


def _timing(message: Outgoing) -> dict[str, str]:
    delay, at, level = message.delay, message.at, message.level
    if delay is None and at is None and level is None:  # the usual case
        return {}
    if sum(wish is not None for wish in (delay, at, level)) > 1:
        raise UsageError(f"delay={delay!r}, at={at!r}, level={level!r}: expected at most one of them")
    if delay is not None:
        span_ms = delay_ms(delay)
        return {PROPERTY_TIMER_DELAY_MS: str(span_ms)} if span_ms else {}
    if at is not None:
        return {PROPERTY_TIMER_DELIVER_MS: str(instant_ms(at))}
    if isinstance(level, bool) or not isinstance(level, int) or level < 1:
        raise UsageError(f"level is {level!r}, expected a whole number from 1 on")
    return {PROPERTY_DELAY: str(level)}


# -- batches


def frames_of(messages: Sequence[Sealed]) -> Iterator[Sequence[Sealed]]:
    """Cuts messages into runs that fit one frame each."""
    start, size = 0, 0
    for index, message in enumerate(messages):
        message_bytes = len(message.body) + len(message.properties) + _INNER_BYTES
        if index > start and (size + message_bytes > BATCH_BYTES_MAX or index - start == BATCH_MESSAGES_MAX):
            yield messages[start:index]
            start, size = index, 0
        size += message_bytes
    if start < len(messages):
        yield messages[start:]


def inner(message: Sealed) -> Inner:
    return Inner(0, message.body, message.properties)


# -- receipts


def receipt(topic: str, message: Sealed, answer: Fields) -> Receipt:
    """The receipt for one message, by the fields of the answer to its send. For a message that is stored once they may
    speak of an earlier one, of another delay.
    """
    handle = answer.get("recallHandle") or None
    if message.is_once:
        unique_key = str(answer.get("transactionId") or message.unique_key)
        message = message._replace(unique_key=unique_key, is_delayed=handle is not None)
    queue_id, queue_offset = _number(answer, "queueId"), _number(answer, "queueOffset")
    return _receipt(topic, message, queue_id, str(answer.get("msgId", "")), handle, queue_offset)


def receipts(topic: str, messages: Sequence[Sealed], answer: Fields) -> list[Receipt]:
    """The receipts for the messages of one frame.

    The broker gives the offset of the first alone. Those that do not wait follow it one by one; if the first itself
    waits, theirs are unknown.
    """
    if len(messages) == 1:
        return [receipt(topic, messages[0], answer)]
    offset_ids = _as_many(str(answer.get("msgId", "")).split(","), messages)
    handles = _as_many(str(answer.get("recallHandles", "")).split(" "), messages)
    queue_id = _number(answer, "queueId")
    queue_offset = None if messages[0].is_delayed else _number(answer, "queueOffset")
    found: list[Receipt] = []
    for message, offset_id, handle in zip(messages, offset_ids, handles, strict=True):
        known = None if handle in ("", "-") else handle
        found.append(_receipt(topic, message, queue_id, offset_id, known, queue_offset))
        if queue_offset is not None and not message.is_delayed:
            queue_offset += 1
    return found


def _receipt(
    topic: str, message: Sealed, queue_id: int, offset_id: str, handle: str | None, queue_offset: int | None
) -> Receipt:
    try:
        due_at_ms = parse_recall_handle(handle).due_at_ms if handle else None
    except ProtocolError:  # a handle that cannot be read is the broker's own affair
        due_at_ms = None
    offset = None if message.is_delayed else queue_offset
    return Receipt(topic, message.unique_key, offset_id, queue_id, offset, due_at_ms, handle)


def _as_many(parts: list[str], messages: Sequence[Sealed]) -> list[str]:
    """One part for each message; nothing for any where the broker told something else."""
    return parts if len(parts) == len(messages) else [""] * len(messages)


def _number(answer: Fields, name: str) -> int:
    try:
        return int(answer.get(name) or 0)
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"the answer to a send has {name} = {answer[name]!r}, expected a number") from error

"""A message as RocketMQ 5's clients send and receive it, and as the older protocol and the log have it.

What is a field there is a property here, by RocketMQ's names, so that consumers of either protocol read what producers
of the other have sent. Bodies reach consumers as their producers gave them: what older clients have compressed is
unfolded.
"""

import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from postdate.errors import IllegalMessage, ProtocolError
from postdate.message import (
    DELAY_PROPERTIES,
    DLQ_TOPIC_PREFIX,
    INT64_MAX,
    INTERNAL_PROPERTIES,
    PROPERTIES_BYTES_MAX,
    PROPERTY_CHECK_IMMUNITY,
    PROPERTY_CHECK_TIMES,
    PROPERTY_KEYS,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_START_DELIVER_TIME,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_UNIQ_KEY,
    RETRY_TOPIC_PREFIX,
    SYS_HALF,
    TRIES_MAX,
    decode_properties,
    encode_properties,
)
from postdate.storage.record import Record
from postdate.wire import codes, messaging
from postdate.wire.ids import host_text, message_id
from postdate.wire.messaging import DELAY, FIFO, GZIP, IDENTITY, MESSAGE_TYPES, MESSAGES, NORMAL, TRANSACTION, CallError

PROPERTY_GROUP = "__SHARDINGKEY"  # messages of one such group keep their order
PROPERTY_TRACE = "TRACE_CONTEXT"

# RocketMQ's own names, which no user's property may have, and which consumers find in fields, or not at all.
_RESERVED = frozenset(
    {PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQ_KEY, PROPERTY_RETRY_TOPIC, PROPERTY_ORIGIN_MESSAGE_ID, PROPERTY_GROUP,
     PROPERTY_PRODUCER_GROUP, PROPERTY_CHECK_IMMUNITY, PROPERTY_TRACE, PROPERTY_TRANSACTION, PROPERTY_TRANSACTION_ID,
     PROPERTY_TIMER_DEL_UNIQKEY, "WAIT", "BUYER_ID", "CLUSTER", "CONSUME_START_TIME", "CORRECTION_FLAG",
     "CORRELATION_ID", "DLQ_ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_TOPIC", "EXTEND_UNIQ_INFO", "INSTANCE_ID",
     "MAX_OFFSET", "MAX_RECONSUME_TIMES", "MIN_OFFSET", "MQ2_FLAG", "MSG_REGION", "MSG_TYPE", "POP_CK",
     "1ST_POP_TIME", "RECONSUME_TIME", "REPLY_TO_CLIENT", "TRACE_ON", PROPERTY_CHECK_TIMES, "TRANSFER_FLAG",
     "TRAN_PREPARED_QUEUE_OFFSET", "TTL", "BORN_TIMESTAMP", "__BORNHOST"}
    | DELAY_PROPERTIES
    | INTERNAL_PROPERTIES
)  # fmt: skip
_PROPERTY_COUNT_MAX = 128
_USER_BYTES_MAX = 16 << 10  # of user properties, tag and keys, as RocketMQ's proxy counts
_GROUP_BYTES_MAX = 63
_IMMUNITY_SECONDS_MAX = 3_600
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NANOS_PER_MS = 1_000_000
_GZIP_WINDOW = zlib.MAX_WBITS | 32  # zlib finds out whether it is gzip or zlib

Unfold = Callable[[bytes, int], bytes]  # from a body and its sys flag to the body as its producer gave it


class Send(NamedTuple):
    """A message that a client sends, in the terms of the older protocol."""

    properties: str
    body: bytes
    sys_flag: int
    born_at_ms: int
    kind: int  # one of messaging.MESSAGE_TYPES
    message_group: str


# -- times ----------------------------------------------------------------------------------------------------------


def to_ms(found: Any) -> int:
    """Returns the milliseconds of a Timestamp or a Duration."""
    return int(found.seconds) * 1_000 + int(found.nanos) // _NANOS_PER_MS


def of_ms(ms: int) -> dict[str, int]:
    """Returns a Timestamp or a Duration."""
    return {"seconds": ms // 1_000, "nanos": ms % 1_000 * _NANOS_PER_MS}


# -- what a client sends ----------------------------------------------------------------------------------------------


def read_message(message: Any, body_bytes_max: int, due_at_ms_max: int) -> Send:
    """Returns a message as a send of the older protocol. Raises CallError."""
    system = message.system_properties
    body, sys_flag = _read_body(message, body_bytes_max), 0
    properties = _read_user_properties(message)
    properties[PROPERTY_UNIQ_KEY] = _checked(system.message_id, messaging.ILLEGAL_MESSAGE_ID, "message_id")
    kind = NORMAL
    if system.HasField("delivery_timestamp"):
        kind, due_at_ms = DELAY, to_ms(system.delivery_timestamp)
        if not 0 <= due_at_ms <= due_at_ms_max:
            raise CallError(
                messaging.ILLEGAL_DELIVERY_TIME,
                f"the delivery time {due_at_ms} (epoch ms) is beyond delay_ms_max: the latest is {due_at_ms_max} now",
            )
        properties[PROPERTY_TIMER_DELIVER_MS] = str(due_at_ms)
    if system.message_group:
        group = _checked(system.message_group, messaging.ILLEGAL_MESSAGE_GROUP, "message_group")
        size = len(group.encode())
        if size > _GROUP_BYTES_MAX:
            raise CallError(
                messaging.ILLEGAL_MESSAGE_GROUP, f"the message group has {size} bytes, the limit is {_GROUP_BYTES_MAX}"
            )
        properties[PROPERTY_GROUP] = group
        kind = kind if kind == DELAY else FIFO
    if system.message_type == TRANSACTION:
        kind, sys_flag = TRANSACTION, SYS_HALF
        properties |= _transaction_properties(message)
    if system.trace_context:
        properties[PROPERTY_TRACE] = system.trace_context
    try:
        encoded = encode_properties({name: value for name, value in properties.items() if value})
    except IllegalMessage as error:
        raise CallError(messaging.ILLEGAL_PROPERTY, str(error)) from error
    if len(encoded) > PROPERTIES_BYTES_MAX:
        raise CallError(
            messaging.PROPERTIES_TOO_LARGE,
            f"the properties have {len(encoded)} bytes, the limit is {PROPERTIES_BYTES_MAX}",
        )
    born_at_ms = to_ms(system.born_timestamp)
    if not 0 <= born_at_ms <= INT64_MAX:
        raise CallError(messaging.BAD_REQUEST, f"the message was born at {born_at_ms} (epoch ms), which no clock shows")
    return Send(encoded.decode(), body, sys_flag, born_at_ms, kind, system.message_group)


def _read_body(message: Any, body_bytes_max: int) -> bytes:
    """Returns the body as its producer made it."""
    body: bytes = message.body
    if not body:  # 41302 is RocketMQ's code, and Rust's client does not know it
        raise CallError(messaging.BAD_REQUEST, "the body is empty: RocketMQ's clients expect one byte at least")
    if message.system_properties.body_encoding == GZIP:
        unfolding = zlib.decompressobj(_GZIP_WINDOW)
        try:
            body = unfolding.decompress(body, body_bytes_max + 1)
        except zlib.error as error:
            raise CallError(messaging.CORRUPTED, f"the body is called GZIP and cannot be read: {error}") from error
        if not unfolding.eof and len(body) <= body_bytes_max:
            raise CallError(messaging.CORRUPTED, "the body is called GZIP and is cut off")
    if len(body) > body_bytes_max:
        raise CallError(
            messaging.BODY_TOO_LARGE, f"the body has {len(body)} bytes or more, body_bytes_max is {body_bytes_max}"
        )
    return body


def _read_user_properties(message: Any) -> dict[str, str]:
    """Returns the properties of the user, with tag and keys."""
    system, properties = message.system_properties, dict(message.user_properties)
    if len(properties) > _PROPERTY_COUNT_MAX:
        raise CallError(
            messaging.PROPERTIES_TOO_LARGE,
            f"the message has {len(properties)} properties, the limit is {_PROPERTY_COUNT_MAX}",
        )
    for name, value in properties.items():
        if name in _RESERVED:
            raise CallError(
                messaging.ILLEGAL_PROPERTY, f"property {name!r} is a name of RocketMQ's own: choose another"
            )
        for text in (name, value):
            if _CONTROL.search(text):
                raise CallError(messaging.ILLEGAL_PROPERTY, f"property {name[:64]!r} has a control character")
    if system.tag:
        tag = _checked(system.tag, messaging.ILLEGAL_TAG, "tag")
        if "|" in tag:
            raise CallError(messaging.ILLEGAL_TAG, f"the tag {tag[:64]!r} has a |, which separates tags in filters")
        properties[PROPERTY_TAGS] = tag
    if system.keys:
        properties[PROPERTY_KEYS] = " ".join([_checked(key, messaging.ILLEGAL_KEY, "key") for key in system.keys])
    size = sum(len(name.encode()) + len(value.encode()) for name, value in properties.items())
    if size > _USER_BYTES_MAX:
        raise CallError(
            messaging.PROPERTIES_TOO_LARGE,
            f"properties, tag and keys have {size} bytes, the limit is {_USER_BYTES_MAX}",
        )
    return properties


def _transaction_properties(message: Any) -> dict[str, str]:
    """Returns what makes a message the first half of a transaction. Its producer group is its topic."""
    properties = {PROPERTY_TRANSACTION: "true", PROPERTY_PRODUCER_GROUP: message.topic.name}
    system = message.system_properties
    if system.HasField("orphaned_transaction_recovery_duration"):
        seconds = int(system.orphaned_transaction_recovery_duration.seconds)
        if not 0 <= seconds <= _IMMUNITY_SECONDS_MAX:
            raise CallError(
                messaging.BAD_REQUEST,
                f"the recovery duration is {seconds} s, expected 0 to {_IMMUNITY_SECONDS_MAX}",
            )
        if seconds:
            properties[PROPERTY_CHECK_IMMUNITY] = str(seconds)
    return properties


def _checked(text: str, code: int, what: str) -> str:
    if not text.strip() or _CONTROL.search(text):
        raise CallError(code, f"{what} {text[:64]!r} is blank or has a control character")
    return text


# -- what a client receives -------------------------------------------------------------------------------------------


def make_message(record: Record, *, unfold: Unfold, handle: str = "", invisible_ms: int = 0) -> Any:
    """Returns a record as a consumer receives it, with the handle that acknowledges it. `unfold` makes a body plain,
    and raises ProtocolError where it cannot: then it is delivered as it is, and called compressed.
    """
    properties = decode_properties(record.properties)
    encoding, body = IDENTITY, record.body
    if record.sys_flag & codes.SYS_COMPRESSED:
        try:
            body = unfold(record.body, record.sys_flag)
        except ProtocolError:
            encoding = GZIP
    due_text = properties.get(PROPERTY_TIMER_DELIVER_MS) or properties.get(PROPERTY_START_DELIVER_TIME) or ""
    due_at_ms = int(due_text) if due_text.isascii() and due_text.isdecimal() and len(due_text) < 16 else 0
    group = properties.get(PROPERTY_GROUP, "")
    topic = record.topic
    if topic.startswith(RETRY_TOPIC_PREFIX):
        topic = properties.get(PROPERTY_RETRY_TOPIC, topic)
    system: dict[str, Any] = {
        "message_id": properties.get(PROPERTY_UNIQ_KEY) or message_id(record.store_host, record.offset),
        "body_digest": {"type": messaging.DIGEST_MD5, "checksum": _md5(body)},
        "body_encoding": encoding,
        "message_type": _kind_of(properties, due_at_ms, group),
        "born_timestamp": of_ms(record.born_at_ms),
        "born_host": host_text(record.born_host),
        "store_timestamp": of_ms(record.stored_at_ms),
        "store_host": host_text(record.store_host),
        "queue_id": record.queue_id,
        "queue_offset": record.queue_offset,
        "delivery_attempt": min(max(record.reconsume_times, 0), TRIES_MAX) + 1,  # a producer may have made it up
        "receipt_handle": handle,
    }
    optional = {
        "tag": properties.get(PROPERTY_TAGS),
        "message_group": group,
        "trace_context": properties.get(PROPERTY_TRACE),
        "keys": properties.get(PROPERTY_KEYS, "").split(),
        "delivery_timestamp": of_ms(due_at_ms) if due_at_ms else None,
        "invisible_duration": of_ms(invisible_ms) if invisible_ms else None,
        "dead_letter_queue": _origin(record.topic, properties),
    }
    system |= {name: value for name, value in optional.items() if value}
    user = {name: value for name, value in properties.items() if name not in _RESERVED}
    return MESSAGES["Message"](topic={"name": topic}, user_properties=user, system_properties=system, body=body)


def _md5(body: bytes) -> str:
    return hashlib.md5(body, usedforsecurity=False).hexdigest().upper()


def _kind_of(properties: Mapping[str, str], due_at_ms: int, group: str) -> int:
    if properties.get(PROPERTY_TRANSACTION) == "true" or PROPERTY_TRANSACTION_ID in properties:
        return TRANSACTION
    if due_at_ms or not DELAY_PROPERTIES.isdisjoint(properties):
        return DELAY
    return FIFO if group else NORMAL


def _origin(topic: str, properties: Mapping[str, str]) -> dict[str, str] | None:
    """Returns where a dead letter came from."""
    if not topic.startswith(DLQ_TOPIC_PREFIX):
        return None
    origin = properties.get(PROPERTY_RETRY_TOPIC, "")
    return {"topic": origin, "message_id": properties.get(PROPERTY_ORIGIN_MESSAGE_ID, "")} if origin else None


# -- types of messages that a topic takes ---------------------------------------------------------------------------

MESSAGE_TYPE_ATTRIBUTE = "message.type"  # of a topic, RocketMQ's
_BY_NAME = {"NORMAL": (NORMAL,), "FIFO": (FIFO,), "DELAY": (DELAY,), "TRANSACTION": (TRANSACTION,)}


def types_of(attributes: Mapping[str, str]) -> tuple[int, ...]:
    """Returns the types of messages that a topic takes: all where its attributes do not say."""
    return _BY_NAME.get(attributes.get(MESSAGE_TYPE_ATTRIBUTE, ""), MESSAGE_TYPES)

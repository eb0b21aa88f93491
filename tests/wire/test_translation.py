"""Messages of RocketMQ 5's clients and those of the log: what is refused, and what comes back as it was sent."""

import gzip
import hashlib
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.client.received import decompress
from postdate.message import (
    INT32_MAX,
    INTERNAL_PROPERTIES,
    PROPERTIES_BYTES_MAX,
    TRIES_MAX,
    Host,
    Message,
    decode_properties,
    encode_properties,
)
from postdate.storage.record import Record, decode, encode
from postdate.wire import codes, messaging
from postdate.wire.ids import message_id
from postdate.wire.messaging import DELAY, FIFO, MESSAGES, NORMAL, TRANSACTION, CallError
from postdate.wire.translation import Send, make_message, of_ms, read_message, to_ms, types_of
from tests.support.core import T0
from tests.support.grpc_client import message

BODY_MAX, DUE_MAX = 1_000, T0 + 1_000_000
HERE, THERE = Host(b"\x7f\x00\x00\x01", 10911), Host(b"\x0a\x00\x00\x07", 4000)


def read(body: str | bytes = "hello", **system: Any) -> Send:
    return read_message(message("orders", body, **system), BODY_MAX, DUE_MAX)


def refused(body: str | bytes = "hello", **system: Any) -> int:
    """Returns the code of the refusal."""
    with pytest.raises(CallError) as caught:
        read(body, **system)
    return caught.value.code


def properties_of(send: Send) -> dict[str, str]:
    return decode_properties(send.properties.encode())


def record(
    properties: dict[str, str], body: bytes = b"hello", *, sys_flag: int = 0, topic: str = "orders", times: int = 0
) -> Record:
    """A record as a consumer of the older protocol reads it."""
    sent = Message(topic, body, encode_properties(properties), 3, 0, sys_flag, T0, THERE, times)
    return decode(encode(sent, topic.encode(), 77, T0 + 5, HERE))._replace(queue_offset=9)


def delivered(found: Record, **how: Any) -> Any:
    return make_message(found, unfold=decompress, **how)


# -- times ----------------------------------------------------------------------------------------------------------


@given(st.integers(-(2**52), 2**52))
def test_milliseconds_come_back_from_a_timestamp(at_ms: int) -> None:
    found = MESSAGES["Timestamp"](**of_ms(at_ms))
    assert 0 <= found.nanos < 1_000_000_000
    assert to_ms(found) == at_ms


def test_less_than_a_millisecond_is_cut_off() -> None:
    assert to_ms(MESSAGES["Duration"](seconds=2, nanos=1_999_999)) == 2_001


# -- what a client sends ----------------------------------------------------------------------------------------------


def test_fields_become_the_properties_of_rocketmq() -> None:
    send = read(
        tag="paid", keys=["k1", "k2"], message_id="01AB", message_group="g7", trace_context="00-af",
        delivery_timestamp=of_ms(T0 + 1_234), user_properties={"color": "grün"},
    )  # fmt: skip
    assert properties_of(send) == {
        "color": "grün", "TAGS": "paid", "KEYS": "k1 k2", "UNIQ_KEY": "01AB", "__SHARDINGKEY": "g7",
        "TIMER_DELIVER_MS": str(T0 + 1_234), "TRACE_CONTEXT": "00-af",
    }  # fmt: skip
    assert (send.body, send.sys_flag, send.born_at_ms, send.message_group) == (b"hello", 0, T0, "g7")


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ({}, NORMAL),
        ({"message_group": "g"}, FIFO),
        ({"delivery_timestamp": of_ms(T0)}, DELAY),
        ({"delivery_timestamp": of_ms(0)}, DELAY),
        ({"delivery_timestamp": of_ms(T0), "message_group": "g"}, DELAY),
        ({"message_type": TRANSACTION}, TRANSACTION),
        ({"message_type": FIFO}, NORMAL),
    ],
)
def test_the_kind_of_a_message_is_what_its_fields_say(system: dict[str, Any], kind: int) -> None:
    assert read(**system).kind == kind


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_compressed_body_is_stored_as_it_was_before(pack: Any) -> None:
    assert read(pack(b"plain" * 100), body_encoding=messaging.GZIP).body == b"plain" * 100


@pytest.mark.parametrize(
    ("body", "system", "code"),
    [
        (b"", {}, messaging.BAD_REQUEST),
        (bytes(BODY_MAX + 1), {}, messaging.BODY_TOO_LARGE),
        (gzip.compress(bytes(BODY_MAX + 1), mtime=0), {"body_encoding": messaging.GZIP}, messaging.BODY_TOO_LARGE),
        (gzip.compress(b"whole" * 20, mtime=0)[:-12], {"body_encoding": messaging.GZIP}, messaging.CORRUPTED),
        (b"no gzip", {"body_encoding": messaging.GZIP}, messaging.CORRUPTED),
        (b"x", {"message_id": ""}, messaging.ILLEGAL_MESSAGE_ID),
        (b"x", {"message_id": " \t"}, messaging.ILLEGAL_MESSAGE_ID),
        (b"x", {"tag": " "}, messaging.ILLEGAL_TAG),
        (b"x", {"tag": "a|b"}, messaging.ILLEGAL_TAG),
        (b"x", {"tag": "a\x01"}, messaging.ILLEGAL_TAG),
        (b"x", {"keys": ["k", " "]}, messaging.ILLEGAL_KEY),
        (b"x", {"keys": ["k\x7f"]}, messaging.ILLEGAL_KEY),
        (b"x", {"message_group": " "}, messaging.ILLEGAL_MESSAGE_GROUP),
        (b"x", {"message_group": "g" * 64}, messaging.ILLEGAL_MESSAGE_GROUP),
        (b"x", {"message_group": "ü" * 32}, messaging.ILLEGAL_MESSAGE_GROUP),
        (b"x", {"message_group": "g\n"}, messaging.ILLEGAL_MESSAGE_GROUP),
        (b"x", {"delivery_timestamp": of_ms(DUE_MAX + 1)}, messaging.ILLEGAL_DELIVERY_TIME),
        (b"x", {"delivery_timestamp": of_ms(-1)}, messaging.ILLEGAL_DELIVERY_TIME),
        (b"x", {"user_properties": {"a": "\x02"}}, messaging.ILLEGAL_PROPERTY),
        (b"x", {"user_properties": {"a\x1f": "b"}}, messaging.ILLEGAL_PROPERTY),
        (b"x", {"user_properties": {"": "b"}}, messaging.ILLEGAL_PROPERTY),
        (b"x", {"user_properties": {"UNIQ_KEY": "b"}}, messaging.ILLEGAL_PROPERTY),
        (b"x", {"user_properties": {"TIMER_DELAY_MS": "1"}}, messaging.ILLEGAL_PROPERTY),
        (b"x", {"user_properties": {str(n): "v" for n in range(129)}}, messaging.PROPERTIES_TOO_LARGE),
        (b"x", {"user_properties": {"a": "b" * (16 << 10)}}, messaging.PROPERTIES_TOO_LARGE),
        (b"x", {"message_id": "i" * PROPERTIES_BYTES_MAX}, messaging.PROPERTIES_TOO_LARGE),
        (b"x", {"trace_context": "a\x01b"}, messaging.ILLEGAL_PROPERTY),
        (
            b"x", {"message_type": TRANSACTION, "orphaned_transaction_recovery_duration": {"seconds": 3_601}},
            messaging.BAD_REQUEST,
        ),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_is_refused_with_its_code(
    body: bytes, system: dict[str, Any], code: int
) -> None:  # fmt: skip
    assert refused(body, **system) == code


@pytest.mark.parametrize("name", sorted(INTERNAL_PROPERTIES))
def test_what_only_a_broker_may_set_is_refused(name: str) -> None:
    assert refused(user_properties={name: "1"}) == messaging.ILLEGAL_PROPERTY


def test_the_largest_and_the_latest_are_taken() -> None:
    assert len(read(bytes(BODY_MAX)).body) == BODY_MAX
    assert len(read(gzip.compress(bytes(BODY_MAX)), body_encoding=messaging.GZIP).body) == BODY_MAX
    assert read(message_group="g" * 63).message_group == "g" * 63
    assert read(delivery_timestamp=of_ms(DUE_MAX)).kind == DELAY
    assert len(properties_of(read(user_properties={str(n): "v" for n in range(128)}))) == 129


@pytest.mark.parametrize("seconds", [2**62, -(2**62), -1])
def test_a_time_of_birth_that_no_clock_shows_is_refused(seconds: int) -> None:
    assert refused(born_timestamp={"seconds": seconds}) == messaging.BAD_REQUEST


def test_a_property_without_a_value_is_left_out_as_readers_would() -> None:
    assert properties_of(read(user_properties={"a": "", "b": "1"}, message_id="01")) == {"b": "1", "UNIQ_KEY": "01"}


# -- what a client receives -------------------------------------------------------------------------------------------


def test_a_record_becomes_a_message_with_all_that_clients_need() -> None:
    found = delivered(
        record({"UNIQ_KEY": "01AB", "TAGS": "paid", "KEYS": "k1 k2", "__SHARDINGKEY": "g7", "color": "red",
                "WAIT": "true", "TRACE_CONTEXT": "00-af"}, times=2),
        handle="a-handle", invisible_ms=60_000,
    )  # fmt: skip
    assert (found.topic.name, found.body, dict(found.user_properties)) == ("orders", b"hello", {"color": "red"})
    system = found.system_properties
    assert (system.message_id, system.tag, list(system.keys), system.message_group) == (
        "01AB", "paid", ["k1", "k2"], "g7",
    )  # fmt: skip
    assert (system.message_type, system.body_encoding, system.delivery_attempt) == (FIFO, messaging.IDENTITY, 3)
    assert system.body_digest.type == messaging.DIGEST_MD5
    assert system.body_digest.checksum == hashlib.md5(b"hello").hexdigest().upper()
    assert (to_ms(system.born_timestamp), to_ms(system.store_timestamp)) == (T0, T0 + 5)
    assert (system.born_host, system.store_host) == ("10.0.0.7:4000", "127.0.0.1:10911")
    assert (system.queue_id, system.queue_offset) == (3, 9)
    assert (system.receipt_handle, to_ms(system.invisible_duration)) == ("a-handle", 60_000)
    assert (system.trace_context, system.HasField("delivery_timestamp")) == ("00-af", False)


def test_a_message_without_a_key_of_its_own_has_the_id_of_its_place() -> None:
    assert delivered(record({})).system_properties.message_id == message_id(HERE, 77)


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "__STARTDELIVERTIME"])
def test_a_delayed_message_says_when_it_was_due(name: str) -> None:
    system = delivered(record({name: str(T0 + 77)})).system_properties
    assert (system.message_type, to_ms(system.delivery_timestamp)) == (DELAY, T0 + 77)


@pytest.mark.parametrize("due", ["soon", "-5", "9" * 16, "٣"])
def test_a_due_time_that_is_none_is_not_shown(due: str) -> None:
    system = delivered(record({"TIMER_DELIVER_MS": due})).system_properties
    assert (system.message_type, system.HasField("delivery_timestamp")) == (DELAY, False)


def test_a_message_with_a_delay_level_is_a_delayed_one() -> None:
    assert delivered(record({"DELAY": "3"})).system_properties.message_type == DELAY


def test_what_a_producer_of_the_older_protocol_has_compressed_is_unfolded() -> None:
    found = delivered(record({}, zlib.compress(b"plain" * 100), sys_flag=codes.SYS_COMPRESSED | 3 << 8))
    assert (found.body, found.system_properties.body_encoding) == (b"plain" * 100, messaging.IDENTITY)
    assert found.system_properties.body_digest.checksum == hashlib.md5(b"plain" * 100).hexdigest().upper()


def test_what_cannot_be_unfolded_is_delivered_as_it_is_and_called_compressed() -> None:
    found = delivered(record({}, b"no zlib", sys_flag=codes.SYS_COMPRESSED | 3 << 8))
    assert (found.body, found.system_properties.body_encoding) == (b"no zlib", messaging.GZIP)
    assert found.system_properties.body_digest.checksum == hashlib.md5(b"no zlib").hexdigest().upper()


def test_a_message_of_a_retry_topic_has_the_topic_it_was_sent_to() -> None:
    assert delivered(record({"RETRY_TOPIC": "orders"}, topic="%RETRY%workers")).topic.name == "orders"
    assert delivered(record({}, topic="%RETRY%workers")).topic.name == "%RETRY%workers"


def test_a_dead_letter_says_where_it_came_from() -> None:
    named = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "7F0001"}
    letter = delivered(record(named, topic="%DLQ%workers"))
    assert letter.topic.name == "%DLQ%workers"
    origin = letter.system_properties.dead_letter_queue
    assert (origin.topic, origin.message_id) == ("orders", "7F0001")
    assert not delivered(record(named)).system_properties.HasField("dead_letter_queue")


@pytest.mark.parametrize("times", [TRIES_MAX, INT32_MAX, -5])
def test_a_number_of_tries_that_a_producer_made_up_still_makes_a_message(times: int) -> None:
    assert 1 <= delivered(record({}, times=times)).system_properties.delivery_attempt <= INT32_MAX


# -- there and back ---------------------------------------------------------------------------------------------------

plain = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(str.strip)
words = plain.filter(lambda text: len(text.split()) == 1 and text.split()[0] == text)
sent_fields = st.fixed_dictionaries(
    {"message_id": plain, "born_timestamp": st.integers(0, T0).map(of_ms)},
    optional={
        "tag": plain.filter(lambda text: "|" not in text),
        "keys": st.lists(words, max_size=4),
        "message_group": plain.filter(lambda text: len(text.encode()) < 64),
        "trace_context": plain,
        "delivery_timestamp": st.integers(1, DUE_MAX).map(of_ms),
        "user_properties": st.dictionaries(plain.map(lambda name: f"u-{name}"), plain, max_size=5),
    },
)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), sent_fields)
def test_what_a_producer_has_sent_a_consumer_receives(body: bytes, fields: dict[str, Any]) -> None:
    sent = message("orders", body, **fields)
    send = read_message(sent, BODY_MAX, DUE_MAX)
    stored = Message("orders", send.body, send.properties.encode(), 0, 0, send.sys_flag, send.born_at_ms, THERE)
    found = delivered(decode(encode(stored, b"orders", 0, T0, HERE)))
    assert (found.body, found.topic, found.user_properties) == (sent.body, sent.topic, sent.user_properties)
    before, after = sent.system_properties, found.system_properties
    for name in (
        "tag", "keys", "message_id", "message_group", "trace_context", "delivery_timestamp", "born_timestamp",
        "body_encoding",
    ):  # fmt: skip
        assert getattr(after, name) == getattr(before, name), name
    assert after.message_type == send.kind


@settings(deadline=None)
@given(st.dictionaries(plain, plain, max_size=8), st.integers(0, 2**16), st.integers(-(2**63), 2**63 - 1))
def test_any_record_of_the_older_protocol_makes_a_message(
    properties: dict[str, str], sys_flag: int, born_at_ms: int
) -> None:
    found = delivered(record(properties, sys_flag=sys_flag)._replace(born_at_ms=born_at_ms))
    assert to_ms(found.system_properties.born_timestamp) == born_at_ms
    assert MESSAGES["Message"].FromString(found.SerializeToString()) == found


# -- types that a topic takes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "types"),
    [
        ("NORMAL", (NORMAL,)), ("FIFO", (FIFO,)), ("DELAY", (DELAY,)), ("TRANSACTION", (TRANSACTION,)),
        ("MIXED", (NORMAL, FIFO, DELAY, TRANSACTION)), ("", (NORMAL, FIFO, DELAY, TRANSACTION)),
        ("LITE", (NORMAL, FIFO, DELAY, TRANSACTION)),
    ],
)  # fmt: skip
def test_a_topic_takes_the_type_that_its_attribute_names(attribute: str, types: tuple[int, ...]) -> None:
    assert types_of({"message.type": attribute} if attribute else {}) == types

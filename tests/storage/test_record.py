"""The bytes of a record, against vectors worked out by hand from the layout."""

from contextlib import suppress
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import CorruptLog, IllegalMessage, UsageError
from postdate.message import LOOPBACK, TRIES_MAX, Host, Message, decode_properties, encode_properties
from postdate.storage import delivery
from postdate.storage.record import (
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    Record,
    decode,
    deliver,
    encode,
    has_key,
    is_of_key,
    moved,
    properties_of,
    record_bytes,
    split,
    topic_of,
    with_due,
)

IPV6_ONE = bytes(15) + b"\x01"
STORE_HOST = Host(b"\x0a\x00\x00\x02", 10911)

MESSAGE = Message(
    topic="orders",
    body=b"123456789",
    properties=b"TAGS\x01TagA\x02",
    queue_id=3,
    flag=-2,
    sys_flag=1,
    born_at_ms=1_700_000_000_000,
    born_host=Host(b"\x7f\x00\x00\x01", 40000),
    reconsume_times=2,
    prepared_offset=5,
)

V1_IPV4 = b"".join(
    [
        bytes.fromhex("00000074"),  # size: 91 + 9 + 6 + 10 = 116
        bytes.fromhex("DAA320A7"),  # magic of version 1
        bytes.fromhex("4BF43926"),  # crc of "123456789" is CBF43926; without its top bit
        bytes.fromhex("00000003"),  # queue id
        bytes.fromhex("FFFFFFFE"),  # flag: -2
        bytes.fromhex("0000000000000000"),  # queue offset
        bytes.fromhex("0000000000001000"),  # offset: 4096
        bytes.fromhex("00000001"),  # sys flag: compressed
        bytes.fromhex("0000018BCFE56800"),  # born at: 1,700,000,000,000
        bytes.fromhex("7F000001 00009C40"),  # born host: 127.0.0.1:40000
        bytes.fromhex("0000018BCFE56BE8"),  # stored at: 1,700,000,001,000
        bytes.fromhex("0A000002 00002A9F"),  # store host: 10.0.0.2:10911
        bytes.fromhex("00000002"),  # reconsume times
        bytes.fromhex("0000000000000005"),  # prepared offset
        bytes.fromhex("00000009") + b"123456789",  # body
        bytes.fromhex("06") + b"orders",  # topic
        bytes.fromhex("000A") + b"TAGS\x01TagA\x02",  # properties
    ]
)

V1_IPV6 = b"".join(
    [
        bytes.fromhex("00000075"),  # size: 91 + 12 + 12 + 1 + 1 = 117
        bytes.fromhex("DAA320A7"),
        bytes.fromhex("68B7BE43"),  # crc of "a" is E8B7BE43
        bytes.fromhex("00000000"),
        bytes.fromhex("00000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("00000030"),  # sys flag: both hosts IPv6
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("00000000000000000000000000000001 00000007"),  # born host: [::1]:7
        bytes.fromhex("0000000000000009"),
        bytes.fromhex("00000000000000000000000000000001 00000008"),  # store host: [::1]:8
        bytes.fromhex("00000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("00000001") + b"a",
        bytes.fromhex("01") + b"t",
        bytes.fromhex("0000"),
    ]
)

V2_LONG_TOPIC = b"".join(
    [
        bytes.fromhex("000000DC"),  # size: 91 + 1 for the longer topic length + 128 = 220
        bytes.fromhex("DAA320AB"),  # magic of version 2
        bytes.fromhex("00000000"),  # crc of nothing
        bytes.fromhex("00000000"),
        bytes.fromhex("00000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("00000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("7F000001 00000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("0A000002 00002A9F"),
        bytes.fromhex("00000000"),
        bytes.fromhex("0000000000000000"),
        bytes.fromhex("00000000"),
        bytes.fromhex("0080") + b"%RETRY%" + b"g" * 121,
        bytes.fromhex("0000"),
    ]
)

ALL_VECTORS = [V1_IPV4, V1_IPV6, V2_LONG_TOPIC]


def changed(vector: bytes = V1_IPV4, **changes: bytes) -> bytearray:
    """A copy of a vector with bytes put in at positions given as `at_20=...`."""
    data = bytearray(vector)
    for place, replacement in changes.items():
        position = int(place.removeprefix("at_"))
        data[position : position + len(replacement)] = replacement
    return data


# -------------------------------------------------------------------------------------------------------- vectors


def test_record_with_ipv4_hosts_is_spelled_field_by_field() -> None:
    assert encode(MESSAGE, b"orders", 4096, 1_700_000_001_000, STORE_HOST) == V1_IPV4


def test_record_with_ipv6_hosts_has_longer_hosts_and_their_flags() -> None:
    message = Message("t", b"a", born_host=Host(IPV6_ONE, 7))
    assert encode(message, b"t", 0, 9, Host(IPV6_ONE, 8)) == V1_IPV6


def test_record_of_a_long_topic_is_version_2() -> None:
    topic = "%RETRY%" + "g" * 121
    assert encode(Message(topic, b""), topic.encode(), 0, 0, STORE_HOST) == V2_LONG_TOPIC


def test_a_topic_of_127_bytes_is_still_version_1() -> None:
    record = encode(Message("t" * 127, b""), b"t" * 127, 0, 0, STORE_HOST)
    assert record[4:8] == bytes.fromhex("DAA320A7")
    assert topic_of(record) == decode(record).topic == "t" * 127


def test_one_ipv6_host_sets_its_own_flag_alone() -> None:
    born_v6 = encode(MESSAGE._replace(born_host=Host(IPV6_ONE, 7)), b"orders", 0, 0, STORE_HOST)
    store_v6 = encode(MESSAGE, b"orders", 0, 0, Host(IPV6_ONE, 8))
    assert len(born_v6) == len(store_v6) == len(V1_IPV4) + 12
    assert (born_v6[39], store_v6[39]) == (16 | 1, 32 | 1)


def test_host_flags_of_the_producer_are_not_believed() -> None:
    lying = MESSAGE._replace(sys_flag=1 | 16 | 32)
    assert encode(lying, b"orders", 4096, 1_700_000_001_000, STORE_HOST) == V1_IPV4


def test_a_negative_sys_flag_keeps_its_other_bits() -> None:
    record = encode(MESSAGE._replace(sys_flag=-1), b"orders", 0, 0, STORE_HOST)
    assert decode(record).sys_flag == -1 & ~48


def test_decoding_the_vector_gives_every_field() -> None:
    assert decode(V1_IPV4) == Record(
        size=116,
        body_crc=0x4BF43926,
        queue_id=3,
        flag=-2,
        queue_offset=0,
        offset=4096,
        sys_flag=1,
        born_at_ms=1_700_000_000_000,
        born_host=Host(b"\x7f\x00\x00\x01", 40000),
        stored_at_ms=1_700_000_001_000,
        store_host=STORE_HOST,
        reconsume_times=2,
        prepared_offset=5,
        body=b"123456789",
        topic="orders",
        properties=b"TAGS\x01TagA\x02",
    )


def test_the_smallest_record_has_91_bytes() -> None:
    assert RECORD_BYTES_MIN == 91
    assert record_bytes(Message("", b""), b"", STORE_HOST) == len(encode(Message("", b""), b"", 0, 0, STORE_HOST)) == 91


@pytest.mark.parametrize("address", [b"", bytes(3), bytes(5), bytes(17)])
def test_an_address_of_another_length_is_a_usage_error(address: bytes) -> None:
    with pytest.raises(UsageError, match="expected 4 or 16 bytes"):
        encode(MESSAGE, b"orders", 0, 0, Host(address, 1))
    with pytest.raises(UsageError, match="expected 4 or 16 bytes"):
        record_bytes(MESSAGE._replace(born_host=Host(address, 1)), b"orders", STORE_HOST)


# ------------------------------------------------------------------------------------------------- round trips

int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
hosts = st.builds(Host, st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16), st.integers(0, 65535))
topics = st.text("%|aZ0_-", min_size=1, max_size=255)
messages = st.builds(
    Message,
    topic=topics,
    body=st.binary(max_size=300),
    properties=st.binary(max_size=300),
    queue_id=st.integers(0, 2**31 - 1),
    flag=int32s,
    sys_flag=int32s,
    born_at_ms=int64s,
    born_host=hosts,
    reconsume_times=st.integers(0, TRIES_MAX),
    prepared_offset=int64s,
)
encoded_records = st.builds(
    lambda message, offset, at_ms, host: encode(message, message.topic.encode(), offset, at_ms, host),
    messages,
    int64s,
    int64s,
    hosts,
)


@settings(deadline=None)
@given(messages, int64s, int64s, hosts)
def test_a_message_comes_back_as_it_was(message: Message, offset: int, stored_at_ms: int, store_host: Host) -> None:
    topic = message.topic.encode()
    data = encode(message, topic, offset, stored_at_ms, store_host)
    record = decode(data)

    assert len(data) == record.size == record_bytes(message, topic, store_host)
    assert (record.offset, record.stored_at_ms, record.store_host) == (offset, stored_at_ms, store_host)
    assert record.queue_offset == 0
    assert record.body_crc == crc32(message.body) & 0x7FFFFFFF
    assert record.sys_flag & ~48 == message.sys_flag & ~48
    for field in set(Message._fields) - {"sys_flag"}:
        assert getattr(record, field) == getattr(message, field)
    assert topic_of(data) == message.topic


def delivered(data: bytes, queue_offset: int, offset: int, stored_at_ms: int) -> bytes:
    """A record with another before and one behind it, delivered in place."""
    body = bytearray(V1_IPV6 + data + V1_IPV4)
    deliver(body, [(len(V1_IPV6), queue_offset, offset, stored_at_ms)])
    before, found, behind = split(bytes(body))
    assert (before, behind) == (V1_IPV6, V1_IPV4)
    return found


@settings(deadline=None)
@given(encoded_records, int64s, int64s, int64s)
def test_delivered_changes_three_fields_alone(data: bytes, queue_offset: int, offset: int, stored_at_ms: int) -> None:
    expected = decode(data)._replace(queue_offset=queue_offset, offset=offset, stored_at_ms=stored_at_ms)
    assert decode(delivered(data, queue_offset, offset, stored_at_ms)) == expected


def test_delivered_is_spelled_byte_by_byte() -> None:
    expected = changed(
        at_20=bytes.fromhex("0000000000000007 0000000000002000"), at_56=bytes.fromhex("0000018BCFE58F10")
    )
    assert delivered(V1_IPV4, 7, 0x2000, 1_700_000_010_000) == expected
    expected = changed(V1_IPV6, at_20=bytes.fromhex("0000000000000007 0000000000002000"), at_68=bytes(7) + b"\x0b")
    assert delivered(V1_IPV6, 7, 0x2000, 11) == expected


def test_many_are_delivered_as_one_by_one() -> None:
    host, queue_id, positions = Host(b"\4\3\2\1", 10911), decode(V1_IPV4).queue_id, [0, len(V1_IPV4)]
    many, single = bytearray(V1_IPV4 * 2), bytearray(V1_IPV4 * 2)
    deliver(single, [(positions[0], 7, 1 << 62, 11), (positions[1], 8, 0x2000, 12)], host)
    places, instants = np.array([1 << 62, 0x2000]), np.array([11, 12])
    assert delivery.deliver(many, np.array(positions), queue_id, 7, places, instants, host)
    assert many == single


@pytest.mark.parametrize(
    ("odd", "host"),
    [(V1_IPV6, LOOPBACK), (moved(V1_IPV4, 77), LOOPBACK), (V1_IPV4, Host(bytes(16), 1))],
    ids=["producer with ipv6", "sent to another queue", "broker with ipv6"],
)
def test_many_that_are_not_alike_are_left_as_they_are(odd: bytes, host: Host) -> None:
    body, positions = bytearray(V1_IPV4 + odd), np.array([0, len(V1_IPV4)])
    assert not delivery.deliver(body, positions, decode(V1_IPV4).queue_id, 7, positions, positions, host)
    assert body == V1_IPV4 + odd


@pytest.mark.parametrize("vector", ALL_VECTORS, ids=["v1 ipv4", "v1 ipv6", "v2"])
def test_moved_changes_the_queue_alone(vector: bytes) -> None:
    assert decode(moved(vector, 77)) == decode(vector)._replace(queue_id=77)


@pytest.mark.parametrize("vector", ALL_VECTORS, ids=["v1 ipv4", "v1 ipv6", "v2"])
def test_properties_and_topic_are_found_in_every_layout(vector: bytes) -> None:
    record = decode(vector)
    assert topic_of(vector) == record.topic
    assert properties_of(vector) == decode_properties(record.properties)


def test_properties_of_a_record() -> None:
    assert properties_of(V1_IPV4) == {"TAGS": "TagA"}


def test_a_producers_bad_properties_are_not_a_corrupt_log() -> None:
    record = encode(MESSAGE._replace(properties=b"a\x01\xff\x02"), b"orders", 0, 0, STORE_HOST)
    assert decode(record).properties == b"a\x01\xff\x02"
    with pytest.raises(IllegalMessage):
        properties_of(record)


# --------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "record of 0 bytes, the smallest has 91"),
        (V1_IPV4[:90], "record of 90 bytes, the smallest has 91"),
        (V1_IPV4[:-1], "record of 115 bytes says that its size is 116"),
        (V1_IPV4 + b"\x00", "record of 117 bytes says that its size is 116"),
        (changed(at_0=b"\xff"), "says that its size is -16777100"),
        (changed(at_4=b"\x00"), "magic 0x00A320A7, expected 0xDAA320A7 or 0xDAA320AB"),
        (changed(at_4=bytes.fromhex("CBD43194")), "magic 0xCBD43194"),
        (changed(at_8=b"\x00"), "body has crc 0x4BF43926, the record says 0x00F43926"),
        (changed(at_8=b"\xcb"), "the record says 0xCBF43926"),
        (changed(at_88=b"x"), "the record says 0x4BF43926"),
        (changed(at_84=b"\xff"), "says -16777207 bytes of body"),
        (changed(at_84=b"\x01"), "says 16777225 bytes of body, 28 are left"),
        (changed(at_87=b"\x1c"), "ends before the length of topic at 116"),
        (changed(at_97=b"\xff"), "says -1 bytes of topic"),
        (changed(at_97=b"\x13"), "says 19 bytes of topic, 18 are left"),
        (changed(at_97=b"\x12"), "ends before the length of properties at 116"),
        (changed(at_98=b"\xff"), "topic is not UTF-8"),
        (changed(at_104=b"\xff"), "says -246 bytes of properties"),
        (changed(at_105=b"\x0b"), "says 11 bytes of properties, 10 are left"),
        (changed(at_105=b"\x09"), "record of 116 bytes, but its parts end at 115"),
        (changed(V2_LONG_TOPIC, at_88=b"\x80"), "says -32640 bytes of topic"),
    ],
)
def test_damage_is_named(data: bytes, said: str) -> None:
    with pytest.raises(CorruptLog, match=said):
        decode(bytes(data))


def test_a_record_too_short_for_its_ipv6_hosts_is_corrupt() -> None:
    data = bytearray(encode(Message("", b""), b"", 0, 0, STORE_HOST))
    data[39] = 48
    with pytest.raises(CorruptLog, match="ends before the length of body at 108"):
        decode(bytes(data))


@settings(deadline=None)
@given(encoded_records, st.data())
def test_a_truncated_record_is_corrupt(data: bytes, draw: st.DataObject) -> None:
    kept = draw.draw(st.integers(0, len(data) - 1))
    with pytest.raises(CorruptLog):
        decode(data[:kept])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptLog):
        decode(data)


@settings(deadline=None)
@given(st.binary(min_size=83, max_size=300), st.sampled_from([MAGIC_V1, MAGIC_V2]))
def test_garbage_behind_a_good_size_and_magic_is_corrupt_or_a_record(rest: bytes, magic: int) -> None:
    data = (len(rest) + 8).to_bytes(4) + magic.to_bytes(4) + rest
    with suppress(CorruptLog):
        assert decode(data).size == len(data)


@settings(deadline=None)
@given(encoded_records, st.data())
def test_a_flipped_byte_is_corrupt_or_another_record(data: bytes, draw: st.DataObject) -> None:
    position = draw.draw(st.integers(0, len(data) - 1))
    flipped = bytearray(data)
    flipped[position] ^= draw.draw(st.integers(1, 255))
    with suppress(CorruptLog):
        assert decode(bytes(flipped)) != decode(data)


# ----------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("key", "by", "is_cancelled", "is_found"),
    [
        ("u", "unique", True, True),
        ("a", "unique", False, False),
        ("a", "key", True, True),
        ("b", "key", False, True),
        ("u", "key", False, False),
        ("c", "key", False, False),
    ],
)
def test_a_cancel_means_the_first_key_and_a_lookup_any(key: str, by: str, is_cancelled: bool, is_found: bool) -> None:
    properties = {"UNIQ_KEY": "u", "KEYS": "a b"}
    data = encode(Message("t", b"", encode_properties(properties)), b"t", 0, 0, LOOPBACK)
    assert is_of_key(data, "t", key, by) == is_cancelled
    assert not is_of_key(data, "other", key, by)
    assert has_key(properties, key, by) == is_found
    assert has_key(properties, key, "any") == (key != "c")


def test_a_record_whose_properties_are_no_text_has_no_key() -> None:
    data = encode(Message("t", b"", b"KEYS\x01\xff\x02"), b"t", 0, 0, LOOPBACK)
    assert not is_of_key(data, "t", "", "key")


# -- another due ------------------------------------------------------------------------------------------------

NEW_DUE_MS = 1_700_000_000_123
SAID = b"TIMER_DELIVER_MS\x011700000000123\x02"


def encoded(properties: bytes, topic: str = "orders") -> bytes:
    return encode(Message(topic, b"body", properties), topic.encode(), 70, 80, LOOPBACK)


@pytest.mark.parametrize("topic", ["orders", "t" * 130])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"TIMER_DELIVER_MS\x011600000000000\x02", SAID),
        (b"TIMER_DELIVER_MS\x011600000000000", SAID[:-1]),
        (b"A\x011\x02TIMER_DELIVER_MS\x011600000000000\x02B\x012\x02", b"A\x011\x02" + SAID + b"B\x012\x02"),
        (b"TIMER_DELIVER_MS\x01160000000000\x02B\x012\x02", b"B\x012\x02" + SAID),
        (b"TIMER_DELIVER_MS\x01160000000000a\x02", SAID),
        (b"DELAY\x013\x02A\x011\x02", b"A\x011\x02" + SAID),
        (b"A\x011\x02DELAY\x013", b"A\x011\x02" + SAID),
        (b"__STARTDELIVERTIME\x011600000000000\x02TIMER_DELIVER_MS\x011600000000000\x02", SAID),
        (b"TIMER_DELIVER_MS\x011600000000000\x02TIMER_DELAY_SEC\x015\x02", SAID),
        (b"TIMER_DELIVER_MS\x011600000000000\x02TIMER_DELIVER_MS\x011600000000001\x02", SAID),
        (b"MY_TIMER_DELIVER_MS\x011600000000000\x02", b"MY_TIMER_DELIVER_MS\x011600000000000\x02" + SAID),
        (b"NOTE\x01DELAY\x02TIMER_DELAY_MS\x015\x02", b"NOTE\x01DELAY\x02" + SAID),
        (b"A\x01\xff", b"A\x01\xff\x02" + SAID),
        (b"", SAID),
    ],
)
def test_a_record_says_its_new_due_alone(before: bytes, after: bytes, topic: str) -> None:
    changed = decode(with_due(encoded(before, topic), NEW_DUE_MS, 32_767))
    assert changed.properties == after
    assert changed == decode(encoded(after, topic))


def test_a_record_without_room_for_its_due_stays_as_it_is() -> None:
    full = encoded(b"A\x01" + b"x" * 32_700 + b"\x02DELAY\x013\x02")
    assert with_due(full, NEW_DUE_MS, 32_767) != full
    assert with_due(full, NEW_DUE_MS, 32_720) == full

"""Records, properties and dues as columns: the same as reading each record by itself."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from postdate.bulk.arrow import Bytes, Properties, compute_dues, read_columns
from postdate.errors import CorruptLog, IllegalMessage
from postdate.message import INT64_MAX, DelayLevels, Host, Message, decode_properties, due_and_level
from postdate.storage import record as records
from tests.support.core import T0

HOSTS = some.builds(Host, some.sampled_from([b"\x7f\x00\x00\x01", bytes(range(16))]), some.integers(0, 65_535))
TOPICS = some.sampled_from(["t", "orders", "%RETRY%" + "g" * 120, "x" * 127, "y" * 128, "z" * 255])
# What is hard to read apart: names that stand in values, in other names, twice, empty, without their end.
PIECES = some.sampled_from(
    [b"KEYS\x01", b"TAGS\x01", b"\x01", b"\x02", b"a", b"key 1", b"XKEYS\x01", b"KEYSX\x01", b"\xc3\xa4", b"KEYS",
     b"\x02KEYS\x01"]
)  # fmt: skip
TEXTS = some.lists(PIECES, max_size=12).map(b"".join)
WELL_FORMED = some.dictionaries(
    some.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "MYKEYS", "a"]), some.text("abcäö -", min_size=1, max_size=20)
).map(lambda named: b"".join(f"{name}\x01{value}\x02".encode() for name, value in named.items()))
BODIES = some.one_of(some.binary(max_size=40), some.just(b"KEYS\x01no\x02"), some.just(b""))
PROPERTIES = some.one_of(TEXTS, WELL_FORMED, WELL_FORMED.map(lambda encoded: encoded[:-1]))
MESSAGES = some.tuples(TOPICS, BODIES, PROPERTIES, HOSTS).map(lambda m: Message(m[0], m[1], m[2], born_host=m[3]))


def encoded(message: Message, store_host: Host) -> bytes:
    return records.encode(message, message.topic.encode(), 7, 8, store_host)


def placed(pieces: list[tuple[bytes, int]]) -> tuple[Bytes, np.ndarray, np.ndarray]:
    """Records in one file, each after a gap."""
    data, at = b"", []
    for record, gap in pieces:
        data += b"\xff" * gap
        at.append(len(data))
        data += record
    sizes = np.array([len(record) for record, _ in pieces], np.int64)
    return Bytes(np.frombuffer(data + b"\xff", np.uint8)), np.array(at, np.int64), sizes


@settings(max_examples=400, deadline=None)
@given(some.lists(some.tuples(MESSAGES, HOSTS, some.integers(0, 9)), max_size=12))
def test_columns_say_what_each_record_says(chosen: list[tuple[Message, Host, int]]) -> None:
    found = read_columns(*placed([(encoded(message, host), gap) for message, host, gap in chosen]))
    messages = [message for message, _, _ in chosen]
    properties = [decode_properties(message.properties) for message in messages]
    assert found.record.to_pylist() == [encoded(message, host) for message, host, _ in chosen]
    assert found.topic.to_pylist() == [message.topic for message in messages]
    assert found.properties.to_pylist() == [message.properties for message in messages]
    assert found.key.to_pylist() == [each.get("KEYS") for each in properties]
    assert found.tag.to_pylist() == [each.get("TAGS") for each in properties]


def test_text_that_is_no_utf_8_is_null_and_its_neighbours_are_not() -> None:
    properties = [b"KEYS\x01a\x02TAGS\x01\xff\x02", b"KEYS\x01\xff\x02TAGS\x01b\x02"]
    pieces = [(encoded(Message("t", b"", each), Host(bytes(4), 1)), 0) for each in properties]
    found = read_columns(*placed(pieces))
    assert (found.key.to_pylist(), found.tag.to_pylist()) == (["a", None], [None, "b"])


GOOD = encoded(Message("orders", b"body", b"KEYS\x01a\x02"), Host(bytes(4), 1))


@pytest.mark.parametrize("position", [0, 3, 4, 7, 39, 84, 87, 92, 99, 100])
def test_a_record_that_is_not_whole_is_named(position: int) -> None:
    """Of every field that says where another one lies."""
    hurt = bytearray(GOOD)
    hurt[position] ^= 0x30
    with pytest.raises(CorruptLog, match=f"no record of {len(GOOD)} bytes stands at byte {len(GOOD)} of a file of"):
        read_columns(*placed([(GOOD, 0), (bytes(hurt), 0)]))


def test_a_record_that_ends_after_the_file_is_named() -> None:
    data, at, size = placed([(GOOD, 0)])
    with pytest.raises(CorruptLog):
        read_columns(data, at, size + 2)


# -- properties and dues -----------------------------------------------------------------------------------------

LEVELS = DelayLevels.parse("1s 5s 2h")
NUMBERS = some.one_of(
    some.integers(-3, 12).map(str),
    some.integers(T0 - 5, T0 + 5).map(str),
    some.sampled_from(["+7", "007", "-0", "-9223372036854775807", "-9223372036854775808", "9007199254740993", "x"]),
)
NAMES = some.sampled_from(
    ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME", "XDELAY", "KEYS"]
)
TIMED = some.lists(some.tuples(NAMES, NUMBERS), max_size=5).map(
    lambda named: b"".join(f"{name}\x01{value}\x02".encode() for name, value in named)
)


@settings(max_examples=400, deadline=None)
@given(some.lists(PROPERTIES, max_size=12), some.sampled_from([0, 1 << 22]))
def test_maps_hold_what_each_message_has(encoded: list[bytes], pairs_max: int) -> None:
    found = Properties(pa.array(encoded, pa.binary())).maps(pairs_max)
    assert [dict(row) for row in found.to_pylist()] == [decode_properties(each) for each in encoded]
    assert all(len(dict(row)) == len(row) for row in found.to_pylist())


def test_what_is_no_text_is_left_out_of_a_map() -> None:
    encoded = [b"a\x01\xff\x02b\x01c\x02", b"\xff\x01d\x02b\x01e\x02"]
    found = Properties(pa.array(encoded, pa.binary())).maps()
    assert found.to_pylist() == [[("b", "c")], [("b", "e")]]


@settings(max_examples=400, deadline=None)
@given(some.lists(TIMED, max_size=8))
def test_dues_are_those_of_each_message(encoded: list[bytes]) -> None:
    stored_at = np.full(len(encoded), T0)
    try:
        wanted = [due_and_level(decode_properties(each), T0, LEVELS, INT64_MAX) for each in encoded]
    except IllegalMessage:
        with pytest.raises(IllegalMessage):  # nobody can have sent it
            compute_dues(Properties(pa.array(encoded, pa.binary())), stored_at, LEVELS)
        return
    found = compute_dues(Properties(pa.array(encoded, pa.binary())), stored_at, LEVELS)
    assert list(zip(found.due.tolist(), found.level.tolist(), strict=True)) == wanted

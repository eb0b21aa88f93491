"""Sends read in one step: the same as read in the general way, or left to it."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import ProtocolError
from postdate.wire import codes
from postdate.wire.frame import BINARY, Command, decode, encode, framed
from postdate.wire.requests import REQUESTS, values
from postdate.wire.sends import decode_send

PROPERTIES = "UNIQ_KEY\x010A0B\x02TIMER_DELAY_MS\x01500\x02"
JAVA: dict[str, Any] = {
    "a": "shop", "b": "orders", "c": "TBW102", "d": "4", "e": "3", "f": "0", "g": "1700000000000", "h": "7",
    "i": PROPERTIES, "j": "2", "k": "false", "m": "false", "n": "postdate",
}  # fmt: skip

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
numbers = st.integers(-(2**31), 2**31 - 1).map(str)
values_of_fields = texts | numbers | st.sampled_from(["", "0", "1_0", " 5 ", "1.5", "true", "1e3"])


def frame_of(fields: dict[str, Any], body: bytes = b"body", **more: Any) -> bytes:
    """As it comes out of a stream: without its length."""
    return encode(Command(codes.SEND_MESSAGE_V2, fields, body, 77, language="JAVA", **more))[4:]


def test_a_send_of_the_java_client_is_read() -> None:
    found = decode_send(frame_of(JAVA))
    assert found is not None
    header, body = found
    fields = header.fields
    assert (body, header.opaque, header.flag) == (b"body", 77, 0)
    assert (fields.topic, fields.queue_id, fields.sys_flag, fields.flag) == ("orders", 3, 0, 7)
    assert (fields.born_at_ms, fields.properties, fields.reconsume_times) == (1_700_000_000_000, PROPERTIES, 2)
    assert fields.batch == "false"


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcefghijn"), values_of_fields), st.binary(max_size=20))
def test_what_is_read_in_one_step_is_what_the_general_way_reads(changed: dict[str, str], body: bytes) -> None:
    frame = frame_of(JAVA | changed, body)
    found = decode_send(frame)
    if found is None:
        return
    header, rest = found
    command = decode(frame)
    try:
        asked = values(REQUESTS[command.code], command.fields)
    except ProtocolError:
        # It takes whole numbers that are written as 1.0 or 1e3 too, which no client does.
        assert any(re.fullmatch(r"-?[0-9]+(\.0+)?([eE][+-]?[0-9]+)?", text) for text in changed.values())
        return
    fields = header.fields
    assert (rest, header.opaque, header.flag) == (command.body, command.opaque, command.flag)
    assert (fields.topic, fields.properties, fields.queue_id) == (asked["topic"], asked["properties"], asked["queueId"])
    assert (fields.sys_flag, fields.flag, fields.born_at_ms, fields.reconsume_times) == (
        asked["sysFlag"], asked["flag"], asked["bornTimestamp"], asked["reconsumeTimes"],
    )  # fmt: skip


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_left_to_the_general_way(garbage: bytes) -> None:
    assert decode_send(garbage) is None
    assert decode_send(framed(b'{"code":310,' + garbage)[4:]) is None


@pytest.mark.parametrize("letter", "befghij")
def test_a_send_without_a_field_is_left_to_the_general_way(letter: str) -> None:
    assert decode_send(frame_of({name: value for name, value in JAVA.items() if name != letter})) is None


def test_other_serializations_codes_and_deep_nests_are_left_to_the_general_way() -> None:
    assert decode_send(frame_of(JAVA, serialization=BINARY)) is None
    assert decode_send(encode(Command(codes.SEND_MESSAGE, JAVA))[4:]) is None
    assert decode_send(b"\x02" + frame_of(JAVA)[1:]) is None, "no serialization that there is"
    assert decode_send(framed(b'{"code":310,"x":' + b"[" * 100_000)[4:]) is None

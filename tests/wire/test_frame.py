"""Frames cut from a stream, and headers in both serializations."""

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import ProtocolError
from postdate.wire.frame import BINARY, JSON, LANGUAGES, Command, Frames, decode, encode, encode_frame, reply

INT16, INT32 = 2**15, 2**31
REQUEST = Command(10, {"topic": "orders"}, b"body", opaque=7)

texts = st.text(st.characters(exclude_categories=["Cs"]))  # no lone surrogates: UTF-8 cannot carry them
int32s = st.integers(-INT32, INT32 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
commands = st.builds(
    Command,
    code=st.integers(-INT16, INT16 - 1),
    fields=st.dictionaries(texts, texts, max_size=4),
    body=st.binary(max_size=16),
    opaque=int32s,
    flag=int32s,
    remark=st.none() | texts.filter(bool),
    serialization=st.sampled_from([JSON, BINARY]),
    language=st.sampled_from(LANGUAGES),
    version=st.integers(-INT16, INT16 - 1),
)


def frame_of(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def json_frame(text: str | bytes, body: bytes = b"") -> bytes:
    """A frame without its length, as `decode` takes it."""
    header = text.encode() if isinstance(text, str) else text
    return len(header).to_bytes(4, "big") + header + body


def binary_frame(header: bytes, body: bytes = b"") -> bytes:
    return (1 << 24 | len(header)).to_bytes(4, "big") + header + body


def command_or_protocol_error(frame: bytes) -> None:
    try:
        command = decode(frame)
    except ProtocolError:
        return
    numbers = (command.code, command.opaque, command.flag, command.version)
    assert all(type(number) is int and -INT32 <= number < INT32 for number in numbers)
    assert type(command.fields) is dict
    assert type(command.language) is str
    assert command.remark is None or type(command.remark) is str
    reply(command, 0, {"offset": 1})  # whatever could be read can be answered


# --------------------------------------------------------------------------------------------------------- frames


@settings(deadline=None)
@given(st.data())
def test_a_stream_split_anywhere_gives_the_same_frames(data: st.DataObject) -> None:
    payloads = data.draw(st.lists(st.binary(min_size=4, max_size=24), max_size=6))
    stream = b"".join(map(frame_of, payloads))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12).map(sorted))
    frames = Frames()
    found = [frame for start, stop in pairwise([0, *cuts, len(stream)]) for frame in frames.feed(stream[start:stop])]
    assert found == payloads
    assert frames.error is None
    assert not frames.rest_bytes


def test_a_stream_dripped_byte_by_byte_gives_each_frame_with_its_last_byte() -> None:
    frames = Frames()
    stream = frame_of(b"first") + frame_of(b"second")
    found = {position: frames.feed(stream[position : position + 1]) for position in range(len(stream))}
    assert {position: given for position, given in found.items() if given} == {8: [b"first"], 18: [b"second"]}


def test_frames_that_come_at_once_are_given_at_once() -> None:
    assert Frames().feed(frame_of(b"first") + frame_of(b"second") + b"\0\0") == [b"first", b"second"]


def test_nothing_is_kept_between_two_frames() -> None:
    frames = Frames()
    assert not frames.rest_bytes
    assert frames.feed(b"") == []
    assert not frames.rest_bytes
    for piece in (b"\0", b"\0\0\4", b"abc"):
        assert frames.feed(piece) == []
        assert frames.rest_bytes
    assert frames.feed(b"d") == [b"abcd"]
    assert not frames.rest_bytes


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 3, 101, 2**31 - 1])
def test_a_length_out_of_bounds_ends_the_stream_behind_the_frames_before_it(length: int) -> None:
    frames = Frames(frame_bytes_max=100)
    assert frames.feed(frame_of(b"good") + length.to_bytes(4, "big", signed=True)) == [b"good"]
    assert isinstance(frames.error, ProtocolError)
    assert str(frames.error) == f"a frame of {length} bytes, expected 4 to 100"
    assert frames.feed(frame_of(b"late")) == []


@settings(deadline=None)
@given(st.lists(st.binary(min_size=4, max_size=20), max_size=4), st.sampled_from([-1, 0, 3, 21, 2**31 - 1]), st.data())
def test_a_bad_length_split_anywhere_loses_no_frame_before_it(
    payloads: list[bytes], length: int, data: st.DataObject
) -> None:
    stream = b"".join(map(frame_of, payloads)) + length.to_bytes(4, "big", signed=True) + b"rest"
    cut = data.draw(st.integers(0, len(stream)))
    frames = Frames(frame_bytes_max=20)
    assert frames.feed(stream[:cut]) + frames.feed(stream[cut:]) == payloads
    assert frames.error is not None


def test_the_shortest_and_the_longest_frame_pass() -> None:
    frames = Frames(frame_bytes_max=100)
    assert frames.feed(frame_of(b"mark") + frame_of(bytes(100))) == [b"mark", bytes(100)]
    assert frames.error is None


def test_a_frame_has_16_mib_unless_told() -> None:
    frames = Frames()
    frames.feed((16 * 1024 * 1024).to_bytes(4, "big"))
    assert frames.error is None
    frames = Frames()
    frames.feed((16 * 1024 * 1024 + 1).to_bytes(4, "big"))
    assert frames.error is not None


# ----------------------------------------------------------------------------------------------------- round trips


@settings(deadline=None)
@given(commands)
def test_a_command_comes_back_as_it_was(command: Command) -> None:
    (frame,) = Frames().feed(encode(command))
    assert decode(frame) == command


@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_text_of_any_alphabet_comes_back(serialization: int) -> None:
    command = REQUEST._replace(
        fields={"тема": "données", "😀": "\x01\x02\0"}, remark="не найдено 😀", serialization=serialization
    )
    assert decode(encode(command)[4:]) == command


@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_an_answer_is_written_as_its_request_was_and_carries_its_opaque(serialization: int) -> None:
    request = REQUEST._replace(serialization=serialization, opaque=-5, flag=2, language="CPP", version=121)
    answer = decode(reply(request, 17, remark="no such topic")[4:])
    assert answer == Command(17, {}, b"", -5, 1, "no such topic", serialization, "PYTHON", 493)
    assert answer.is_response
    assert not answer.is_oneway


def test_the_second_bit_of_the_flag_says_that_nobody_waits() -> None:
    assert REQUEST._replace(flag=2).is_oneway
    assert not REQUEST._replace(flag=2).is_response
    assert not REQUEST.is_oneway


# --------------------------------------------------------------------------------------------------- exact writing


def test_a_json_answer_is_written_byte_for_byte() -> None:
    header = (
        b'{"code":0,"extFields":{"offset":"5"},"flag":1,"language":"PYTHON","opaque":7,'
        b'"serializeTypeCurrentRPC":"JSON","version":493}'
    )
    assert len(header) == 124
    expected = b"\x00\x00\x00\x82" + b"\x00\x00\x00\x7c" + header + b"ok"
    assert reply(REQUEST, 0, {"offset": 5}, body=b"ok") == expected


def test_a_json_answer_without_fields_still_has_them() -> None:
    frame = reply(REQUEST, 3, remark="é")
    assert (
        frame[8:]
        == (
            '{"code":3,"extFields":{},"flag":1,"language":"PYTHON","opaque":7,"remark":"é",'
            '"serializeTypeCurrentRPC":"JSON","version":493}'
        ).encode()
    )


def test_a_binary_answer_is_written_byte_for_byte() -> None:
    expected = bytes.fromhex(
        "0000002b"  # length: 4 + 37 + 2
        "01000025"  # binary, a header of 37 bytes
        "0000"  # code 0
        "03"  # PYTHON
        "01ed"  # 493
        "00000007"  # opaque
        "00000001"  # flag: an answer
        "00000003 6ec3a9"  # remark "né"
        "0000000d"  # fields of 13 bytes
        "0006 6f6666736574"  # "offset"
        "00000001 35"  # "5"
        "6f6b"  # body "ok"
    )
    request = REQUEST._replace(serialization=BINARY)
    assert reply(request, 0, {"offset": 5}, remark="né", body=b"ok") == expected


@pytest.mark.parametrize("serialization", [JSON, BINARY])
def test_fields_are_written_as_java_writes_them(serialization: int) -> None:
    fields = {"queueId": 3, "TRACE_ON": True, "order": False, "transactionId": None, "msgId": "A0"}
    frame = reply(REQUEST._replace(serialization=serialization), 0, fields)
    assert decode(frame[4:]).fields == {"queueId": "3", "TRACE_ON": "true", "order": "false", "msgId": "A0"}


def test_a_header_written_beforehand_is_framed_with_either_mark() -> None:
    assert encode_frame(b"head", b"body") == b"\x00\x00\x00\x0c\x00\x00\x00\x04headbody"
    assert encode_frame(b"head", serialization=BINARY) == b"\x00\x00\x00\x08\x01\x00\x00\x04head"


def test_languages_have_rocketmqs_numbers() -> None:
    numbered = {"JAVA": 0, "CPP": 1, "PYTHON": 3, "OTHER": 7, "GO": 9, "PHP": 10, "RUST": 12, "NODE_JS": 13}
    for language, number in numbered.items():
        frame = encode(REQUEST._replace(language=language, serialization=BINARY))
        assert frame[10] == number
        assert decode(frame[4:]).language == language


def test_a_language_without_a_number_is_written_as_other() -> None:
    assert encode(REQUEST._replace(language="COBOL", serialization=BINARY))[10] == 7


@pytest.mark.parametrize("code", [INT16, -INT16 - 1, 200_050])
def test_a_code_beyond_16_bits_cannot_be_written_in_binary(code: int) -> None:
    assert decode(encode(REQUEST._replace(code=code))[4:]).code == code
    with pytest.raises(ProtocolError, match=rf"code {code} .* does not fit a binary header"):
        encode(REQUEST._replace(code=code, serialization=BINARY))


@pytest.mark.parametrize("serialization", [JSON, BINARY])
@pytest.mark.parametrize(
    "command",
    [
        REQUEST._replace(remark="\ud800"),
        REQUEST._replace(fields={"topic": "\udfff"}),
        REQUEST._replace(fields={"\ud800": "orders"}),
        REQUEST._replace(fields={"topic": "t" * 2**24}),
        REQUEST._replace(opaque=2**64),
    ],
    ids=["remark", "value", "name", "too long", "opaque"],
)
def test_a_header_that_the_format_cannot_hold_is_refused(command: Command, serialization: int) -> None:
    with pytest.raises(ProtocolError):
        encode(command._replace(serialization=serialization))


def test_a_field_with_a_name_beyond_16_bits_cannot_be_written_in_binary() -> None:
    with pytest.raises(ProtocolError):
        encode(REQUEST._replace(fields={"n" * INT16: "1"}, serialization=BINARY))


# ------------------------------------------------------------------------------------------------- lenient reading


def test_a_header_of_the_cpp_client_is_read() -> None:
    frame = json_frame(
        '{"code":11,"language":"CPP","version":121,"opaque":3,"flag":0,"remark":"",'
        '"extFields":{"topic":"orders","queueId":0,"sysFlag":6,"unitMode":"0"}}',
        b"body",
    )
    fields = {"topic": "orders", "queueId": 0, "sysFlag": 6, "unitMode": "0"}
    assert decode(frame) == Command(11, fields, b"body", 3, 0, None, JSON, "CPP", 121)


def test_a_header_of_the_java_client_is_read() -> None:
    frame = json_frame(
        '{"code":105,"extFields":{"topic":"orders"},"flag":0,"language":"JAVA","opaque":0,'
        '"serializeTypeCurrentRPC":"JSON","version":479}'
    )
    assert decode(frame) == Command(105, {"topic": "orders"}, b"", 0, 0, None, JSON, "JAVA", 479)


def test_a_header_needs_a_code_alone() -> None:
    assert decode(json_frame('{"code":34}')) == Command(34, {}, b"", 0, 0, None, JSON, "OTHER", 0)
    nulls = '{"code":34,"extFields":null,"flag":null,"language":null,"opaque":null,"remark":null,"version":null}'
    assert decode(json_frame(nulls)) == decode(json_frame('{"code":34}'))


def test_keys_of_a_header_that_nobody_knows_are_left_alone() -> None:
    assert decode(json_frame('{"code":34,"later":{"a":[1]}}')).code == 34


def test_numbers_of_a_header_may_come_as_text() -> None:
    command = decode(json_frame('{"code":"34","opaque":"-1","flag":"+2","version":"479"}'))
    assert (command.code, command.opaque, command.flag, command.version) == (34, -1, 2, 479)


@pytest.mark.parametrize("number", [14, 127, 128, 255])
def test_a_binary_language_without_a_name_is_another(number: int) -> None:
    frame = bytearray(encode(REQUEST._replace(serialization=BINARY))[4:])
    frame[6] = number
    assert decode(bytes(frame)) == REQUEST._replace(serialization=BINARY, language="OTHER")


# --------------------------------------------------------------------------------------------------------- garbage


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_a_command_or_a_protocol_error(data: bytes) -> None:
    command_or_protocol_error(data)
    command_or_protocol_error(json_frame(data))
    command_or_protocol_error(binary_frame(data))


@settings(deadline=None)
@given(commands, st.data())
def test_a_damaged_frame_is_a_command_or_a_protocol_error(command: Command, data: st.DataObject) -> None:
    frame = bytearray(encode(command)[4:])
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] = data.draw(st.integers(0, 255))
    command_or_protocol_error(bytes(frame))
    command_or_protocol_error(bytes(frame[:position]))


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {"code": st.integers(0, 400) | json_values},
        optional=dict.fromkeys(("extFields", "flag", "language", "opaque", "remark", "version"), json_values),
    )
    | json_values
)
def test_any_json_header_is_a_command_or_a_protocol_error(header: Any) -> None:
    command_or_protocol_error(json_frame(orjson.dumps(header)))


@pytest.mark.parametrize("frame", [b"", b"\0", b"\0\0\0", b"\1\0\0"])
def test_a_frame_shorter_than_its_mark_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {len(frame)} bytes, expected 4 or more"):
        decode(frame)


def test_a_header_longer_than_its_frame_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a header of 9 bytes in a frame of 6"):
        decode(b"\0\0\0\x09{}")


@pytest.mark.parametrize("serialization", [2, 255])
def test_a_serialization_that_nobody_knows_is_refused(serialization: int) -> None:
    with pytest.raises(ProtocolError, match=f"serialization {serialization}"):
        decode(bytes([serialization, 0, 0, 0]))


@pytest.mark.parametrize(
    "code",
    ["true", "null", "1.0", "1e400", "1e20", "[]", "{}", '""', '"ten"', '"1_0"', '" 5 "', '"٣"', "2147483648",
     "-2147483649", "18446744073709551615", "123456789012345678901234567890", '"2147483648"',
     '"9223372036854775808"'],
)  # fmt: skip
def test_a_code_that_is_no_number_of_32_bits_is_refused(code: str) -> None:
    with pytest.raises(ProtocolError, match="a header that cannot be read"):
        decode(json_frame(f'{{"code":{code}}}'))


@pytest.mark.parametrize("name", ["opaque", "flag", "version"])
@pytest.mark.parametrize("value", ["true", "1.5", '"x"', "[1]", "2147483648"])
def test_another_number_of_a_header_has_32_bits_too(name: str, value: str) -> None:
    with pytest.raises(ProtocolError, match="a header that cannot be read"):
        decode(json_frame(f'{{"code":1,"{name}":{value}}}'))


@pytest.mark.parametrize("name", ["remark", "language"])
@pytest.mark.parametrize("value", ["true", "1.5", "[1]", '{"a":1}', '"\\ud800"'])
def test_a_text_of_a_header_that_is_none_is_refused(name: str, value: str) -> None:
    with pytest.raises(ProtocolError, match="a header that cannot be read"):
        decode(json_frame(f'{{"code":1,"{name}":{value}}}'))


@pytest.mark.parametrize("header", ["", "[]", "1", "null", '"code"', "{}", '{"code":1', '{"code":1}x'])
def test_a_json_header_that_is_no_object_with_a_code_is_refused(header: str) -> None:
    with pytest.raises(ProtocolError, match="a header that cannot be read"):
        decode(json_frame(header))


@pytest.mark.parametrize("fields", ["[1]", '"topic"', "5", "true"])
def test_fields_that_are_no_object_are_refused(fields: str) -> None:
    with pytest.raises(ProtocolError, match="extFields of type"):
        decode(json_frame(f'{{"code":1,"extFields":{fields}}}'))


@pytest.mark.parametrize("name", ["code", "remark", "extFields", "language"])
@pytest.mark.parametrize("depth", [900, 100_000])
def test_a_header_nested_deep_is_refused(name: str, depth: int) -> None:
    with pytest.raises(ProtocolError):
        decode(json_frame(f'{{"code":1,"{name}":{"[" * depth}{"]" * depth}}}'))


BINARY_HEAD = "000a 03 01ed 00000007 00000000"


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "00000001",
        "ffffffff 00000000",
        "7fffffff 00000000",
        "00000001 ff 00000000",
        "00000000",
        "00000000 ffffffff",
        "00000000 00000001",
        "00000000 00000001 00",
        "00000000 00000007 0001 61 00000001",
        "00000000 00000007 ffff 61 00000000",
        "00000000 00000007 0001 61 ffffffff",
        "00000000 00000007 0001 ff 00000000",
        "00000000 00000007 0001 61 00000001 62",
    ],
    ids=[
        "no remark length", "remark cut", "negative remark", "long remark", "remark not UTF-8", "no fields length",
        "negative fields", "fields cut", "name length cut", "value cut", "negative name", "negative value",
        "name not UTF-8", "value beyond the fields",
    ],
)  # fmt: skip
def test_a_binary_header_with_lengths_that_do_not_meet_is_refused(rest: str) -> None:
    with pytest.raises(ProtocolError):
        decode(binary_frame(bytes.fromhex(BINARY_HEAD + rest), b"a long body, into which no length may reach"))


def test_a_binary_header_without_remark_and_fields_is_read() -> None:
    frame = binary_frame(bytes.fromhex(BINARY_HEAD + "00000000 00000000"), b"body")
    assert decode(frame) == Command(10, {}, b"body", 7, 0, None, BINARY, "PYTHON", 493)

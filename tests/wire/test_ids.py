"""Message ids, recall handles and ids of transactions."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import ProtocolError
from postdate.message import Host
from postdate.wire.ids import (
    RecallHandle,
    encode_receipt_handle,
    encode_transaction_id,
    host_of,
    host_text,
    message_id,
    parse_message_id,
    parse_recall_handle,
    parse_receipt_handle,
    parse_transaction_id,
)
from tests.support.handles import recall_handle

IPV4 = Host(bytes([192, 168, 1, 7]), 10911)
IPV6 = Host(bytes.fromhex("20010db8000000000000000000000001"), 10911)
IPV4_ID = "C0A80107" + "00002A9F" + "00000000000004D2"
IPV6_ID = "20010DB8000000000000000000000001" + "00002A9F" + "00000000000004D2"

addresses = st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16)
hosts = st.builds(Host, addresses, st.integers(0, 65535))
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=" "), min_size=1)


def coded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


# ---------------------------------------------------------------------------------------------------- message ids


def test_a_message_id_is_spelled_address_port_offset() -> None:
    assert message_id(IPV4, 1234) == IPV4_ID
    assert message_id(IPV6, 1234) == IPV6_ID


@pytest.mark.parametrize(("text", "host"), [(IPV4_ID, IPV4), (IPV6_ID, IPV6), (IPV4_ID.lower(), IPV4)])
def test_a_message_id_is_read_in_either_case(text: str, host: Host) -> None:
    assert parse_message_id(text) == (host, 1234)


@settings(deadline=None)
@given(hosts, st.integers(0, 2**63 - 1))
def test_a_message_id_comes_back_as_it_was(host: Host, offset: int) -> None:
    text = message_id(host, offset)
    assert len(text) == 2 * (len(host.address) + 12)
    assert parse_message_id(text) == (host, offset)


@settings(deadline=None)
@given(st.text() | st.text("0123456789ABCDEFabcdef ", min_size=30, max_size=60))
def test_any_text_is_a_message_id_or_a_protocol_error(text: str) -> None:
    try:
        host, offset = parse_message_id(text)
    except ProtocolError:
        return
    assert message_id(host, offset) == text.upper()


@pytest.mark.parametrize(
    "text",
    [
        "",
        IPV4_ID[:-1],
        IPV4_ID[:-2],
        IPV4_ID + "00",
        "0x" + IPV4_ID[2:],
        "C0 A8 01 07 00 00 2A 9F 00 00 00 00 00 00 04 D2 " + " " * 8,  # 56 characters, 16 bytes
        " " + IPV4_ID + " ",
        "٣" * 32,
    ],
)
def test_what_has_not_32_or_56_hex_digits_is_no_message_id(text: str) -> None:
    with pytest.raises(ProtocolError, match="expected 32 or 56 hex digits"):
        parse_message_id(text)


@pytest.mark.parametrize("text", ["C0A80107" + "00010000" + "0" * 16, "C0A80107" + "00002A9F" + "8" + "0" * 15])
def test_a_port_or_an_offset_that_cannot_be_is_no_message_id(text: str) -> None:
    with pytest.raises(ProtocolError, match="which no broker has"):
        parse_message_id(text)


def test_a_long_text_is_cut_in_the_refusal() -> None:
    with pytest.raises(ProtocolError) as refusal:
        parse_message_id("F" * 100_000)
    assert len(str(refusal.value)) < 200


# ------------------------------------------------------------------------------------------------- recall handles


def test_a_recall_handle_is_rocketmqs() -> None:
    handle = "djEgb3JkZXJzIGJyb2tlci1hIDE3MDAwMDAwMDAwMDEgN0YwMDAwMDE="  # v1 orders broker-a 1700000000001 7F000001
    assert recall_handle("orders", "broker-a", 1_700_000_000_001, "7F000001") == handle
    assert parse_recall_handle(handle) == RecallHandle("orders", "broker-a", 1_700_000_000_001, "7F000001")


def test_a_recall_handle_has_the_alphabet_of_urls() -> None:
    assert recall_handle("t", "b", 1, "k>~?") == "djEgdCBiIDEgaz5-Pw=="
    assert parse_recall_handle("djEgdCBiIDEgaz5-Pw==").unique_key == "k>~?"


@settings(deadline=None)
@given(words, words, st.integers(0, 10**18 - 1), words)
def test_a_recall_handle_comes_back_as_it_was(topic: str, broker_name: str, due_at_ms: int, key: str) -> None:
    handle = recall_handle(topic, broker_name, due_at_ms, key)
    assert parse_recall_handle(handle) == (topic, broker_name, due_at_ms, key)


@pytest.mark.parametrize("key", ["order 5", " 5", "5 ", " ", "a  b 7"])
def test_a_key_may_have_spaces(key: str) -> None:
    assert parse_recall_handle(recall_handle("orders", "b", 5, key)).unique_key == key


@settings(deadline=None)
@given(st.text() | st.text().map(lambda rest: coded("v1 " + rest.encode(errors="replace").decode())))
def test_any_text_is_a_recall_handle_or_a_protocol_error(text: str) -> None:
    try:
        handle = parse_recall_handle(text)
    except ProtocolError:
        return
    assert parse_recall_handle(recall_handle(*handle)) == handle


@settings(deadline=None)
@given(st.binary())
def test_bytes_that_are_not_utf8_are_no_recall_handle(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_recall_handle(base64.urlsafe_b64encode(b"\xff" + data).decode())


@pytest.mark.parametrize(
    "handle",
    ["djEgdCBiIDEga", "djEg dCBi", "дескриптор", "djEgdCBiIDEgaz5\n-Pw==", "////", "====", "djEgdCBiIDEgaz5-Pw==x"],
)
def test_what_is_not_base64_text_is_no_recall_handle(handle: str) -> None:
    with pytest.raises(ProtocolError, match="is not base64 text"):
        parse_recall_handle(handle)


@pytest.mark.parametrize(
    "plain", ["", "v1", "v1 orders b 5", "v2 orders b 5 key", "V1 orders b 5 key", "v1  b 5 key", "v1 orders b 5 "]
)
def test_what_does_not_say_five_things_is_no_recall_handle(plain: str) -> None:
    with pytest.raises(ProtocolError, match="expected 'v1 topic broker time key'"):
        parse_recall_handle(coded(plain))


@pytest.mark.parametrize("time", ["-5", "+5", "5.0", "1_0", "٣", "soon", "9" * 19, "9" * 500])
def test_a_recall_handle_has_a_time_in_milliseconds(time: str) -> None:
    with pytest.raises(ProtocolError, match="expected epoch milliseconds"):
        parse_recall_handle(coded(f"v1 orders b {time} key"))


def test_a_recall_handle_longer_than_any_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="a recall handle of 65537 characters, the longest has 65536"):
        parse_recall_handle("!" * 65_537)


# ------------------------------------------------------------------------------------------------------------ hosts


@pytest.mark.parametrize(
    ("address", "host", "text"),
    [
        ("192.168.1.7", IPV4, "192.168.1.7:10911"),
        ("2001:db8::1", IPV6, "[2001:db8::1]:10911"),
        ("fe80::1%eth0", Host(b"\xfe\x80" + bytes(13) + b"\x01", 10911), "[fe80::1]:10911"),
    ],
)
def test_a_host_is_read_from_a_sockets_address_and_shown(address: str, host: Host, text: str) -> None:
    assert host_of(address, 10911) == host
    assert host_text(host) == text


@pytest.mark.parametrize("address", ["", "localhost", "1.2.3", "1.2.3.4:5", "::g"])
def test_a_name_is_no_host(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        host_of(address, 1)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_a_transaction_id_gives_place_and_number_back(offset: int, number: int) -> None:
    text = encode_transaction_id(offset, number)
    assert parse_transaction_id(text) == parse_transaction_id(text.lower()) == (offset, number)


def test_how_a_transaction_id_looks() -> None:
    assert encode_transaction_id(1_234, 5) == "00000000000004D20000000000000005"


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "8" + "0" * 31, "0" * 16 + "F" * 16, "G" + "0" * 31, " " * 32]
)
def test_other_texts_are_no_transaction_ids(text: str) -> None:
    with pytest.raises(ProtocolError, match="expected 32 hex digits"):
        parse_transaction_id(text)


# ------------------------------------------------------------------------------------------------- receipt handles


def test_a_receipt_handle_says_version_queue_offset_time_topic() -> None:
    text = encode_receipt_handle("orders", 3, 99, 1_700_000_000_123)
    assert base64.urlsafe_b64decode(text).decode() == "v1 3 99 1700000000123 orders"
    assert parse_receipt_handle(text) == ("orders", 3, 99, 1_700_000_000_123)


topics = st.from_regex(r"[%|a-zA-Z0-9_-]{1,127}", fullmatch=True)


@settings(deadline=None)
@given(topics, st.integers(0, 65_535), st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
def test_a_receipt_handle_comes_back_as_it_was(topic: str, queue_id: int, offset: int, popped_at_ms: int) -> None:
    text = encode_receipt_handle(topic, queue_id, offset, popped_at_ms)
    assert text.isascii()
    assert parse_receipt_handle(text) == (topic, queue_id, offset, popped_at_ms)


@pytest.mark.parametrize(
    "text",
    ["", "no base64!", "dj\u00e4", coded("v2 0 0 0 orders"), coded("v1 0 0 orders"), coded("v1 -1 0 0 orders"),
     coded("v1 0 -1 0 orders"), coded("v1 0 0 0 "), coded("v1 0 0 0 two words"), coded("v1 0 0 0 orders\n"),
     coded("v1 \u0663 0 0 orders"), coded("v1 0 " + "9" * 19 + " 0 orders"), coded("v1 0 0 0 orders")[:-1],
     base64.urlsafe_b64encode(b"v1 0 0 0 \xff\xfe").decode(), "A" * 65_540],
)  # fmt: skip
def test_a_text_that_no_broker_has_handed_out_is_no_receipt_handle(text: str) -> None:
    with pytest.raises(ProtocolError, match="receipt handle"):
        parse_receipt_handle(text)


@settings(deadline=None)
@given(st.text() | st.text("v1 0123456789-x").map(coded))
def test_any_text_is_a_receipt_handle_or_a_protocol_error(text: str) -> None:
    try:
        topic, queue_id, offset, _ = parse_receipt_handle(text)
    except ProtocolError:
        return
    assert (bool(topic), queue_id >= 0, offset >= 0) == (True, True, True)

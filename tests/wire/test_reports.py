"""What RocketMQ's tools are told: settings as Java's Properties reads them, and members that want different things."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import ProtocolError
from postdate.wire.bodies import Consumer, parse_subscription
from postdate.wire.reports import (
    Peer,
    decode_properties_text,
    encode_consumers,
    encode_no_replicas,
    encode_properties_text,
)

names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
values = st.text(max_size=12).map(str.strip)


@settings(deadline=None)
@given(st.dictionaries(names, values, max_size=4))
def test_properties_come_back_as_they_were_and_are_ascii(table: dict[str, str]) -> None:
    text = encode_properties_text(table)
    assert text.isascii()
    assert decode_properties_text(text) == table


def test_properties_are_escaped_as_java_reads_them() -> None:
    text = encode_properties_text({"data": "C:\\data", "name": "ü\U0001f600", "level": "1s 5s"})
    assert text == b"data=C:\\\\data\nname=\\u00fc\\ud83d\\ude00\nlevel=1s 5s\n"


def test_properties_are_read_as_java_writes_them() -> None:
    text = b"#a remark\n! another\n\n topics_max = 5 \r\nretention_ms:7d\ndata=a=b\\u00fc\nempty=\n"
    assert decode_properties_text(text) == {"topics_max": "5", "retention_ms": "7d", "data": "a=bü", "empty": ""}


@pytest.mark.parametrize("text", [b"topics_max", b"=5", b"two words = 5", b"\xff\xfe"])
def test_what_is_no_property_is_refused(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="settings"):
        decode_properties_text(text)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_properties_or_a_protocol_error(data: bytes) -> None:
    try:
        decode_properties_text(data)
    except ProtocolError:
        return


def test_of_members_that_want_different_things_the_last_one_counts() -> None:
    wanted = [
        Consumer("g", "CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET", (parse_subscription("t", tag),))
        for tag in ("a", "b")
    ]
    told = orjson.loads(encode_consumers([Peer("c1", "h:1", "JAVA", 1), Peer("c2", "h:2", "GO", 2)], wanted))
    assert [each["clientId"] for each in told["connectionSet"]] == ["c1", "c2"]
    assert told["subscriptionTable"]["t"]["subString"] == "b"


def test_a_broker_without_replicas_is_a_master_and_nobodys_replica() -> None:
    told = orjson.loads(encode_no_replicas(4_096))
    assert told.pop("haClientRuntimeInfo")["maxOffset"] == 0
    assert told == {
        "master": True, "masterCommitLogMaxOffset": 4_096, "inSyncSlaveNums": 0, "haConnectionInfo": [],
    }  # fmt: skip

"""Messages by key and by id over the wire: what operators' tools ask for, and how a waiting message shows in them."""

from pathlib import Path
from typing import Any

import pytest

from postdate.clock import ManualClock
from postdate.storage.record import Record
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.ids import parse_message_id
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from tests.support.core import FAR_MS, HOUR_MS, T0
from tests.support.peer import (
    Peer,
    ask_json,
    connected,
    make_topic,
    properties_of,
    read_all,
    send,
    sent,
    texts,
)
from tests.support.server import Served, serving

LONG_MAX = (1 << 63) - 1


def query(peer: Peer, key: str, topic: str = "orders", **fields: Any) -> Command:
    """As the Java client asks."""
    asked = {"topic": topic, "key": key, "maxNum": 64, "beginTimestamp": 0, "endTimestamp": LONG_MAX, **fields}
    return peer.ask(Request.QUERY_MESSAGE, b"", **texts(asked))


def found(peer: Peer, key: str, **fields: Any) -> list[Record]:
    answer = query(peer, key, **fields)
    assert answer.code == codes.SUCCESS, answer.remark
    return decode_records(answer.body)


def said(record: Record) -> tuple[str, str | None, int]:
    """What an operator reads in the answer: the state, when it is due, its place in the queue."""
    properties = properties_of(record)
    return properties["POSTDATE_STATE"], properties.get("POSTDATE_DUE_MS"), record.queue_offset


def test_a_message_is_found_by_key_and_by_unique_key(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "before")
        sent(peer, "orders", "hello", KEYS="k1 k2", UNIQ_KEY="ABC", colour="red")
        (pulled,) = read_all(peer, "orders")[1:]
        for records in (
            found(peer, "k2"),
            found(peer, "ABC", _UNIQUE_KEY_QUERY="true"),
            found(peer, "ABC", indexType="U"),
        ):
            (record,) = records
            assert said(record) == ("visible", None, 1)
            assert properties_of(record).items() >= properties_of(pulled).items()
            assert record._replace(size=0, properties=b"") == pulled._replace(size=0, properties=b"")
        answer = query(peer, "k1")
        position = served.call(lambda: served.broker.fold.position)
        assert answer.fields == {"indexLastUpdateTimestamp": str(T0), "indexLastUpdatePhyoffset": str(position)}


def test_a_message_that_waits_is_found_and_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        near = sent(peer, "orders", "near", KEYS="K", TIMER_DELAY_SEC=5)
        far = sent(peer, "orders", "far", KEYS="K", UNIQ_KEY="F", TIMER_DELAY_MS=FAR_MS)
        assert [said(record) for record in found(peer, "K")] == [
            ("waiting", str(T0 + FAR_MS), -1), ("waiting", str(T0 + 5_000), -1),
        ]  # fmt: skip
        for answer in (near, far):
            _, offset = parse_message_id(answer.fields["msgId"])
            (record,) = decode_records(peer.ask(Request.VIEW_MESSAGE_BY_ID, offset=offset).body)
            assert (record.offset, record.queue_offset, record.stored_at_ms) == (offset, -1, T0)
            assert said(record)[0] == "waiting"
        peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=far.fields["recallHandle"])
        served.pass_ms(5_000)
        served.settle()
        assert [said(record)[0] for record in found(peer, "K")] == ["cancelled", "visible"]
        assert [record.stored_at_ms for record in found(peer, "K")] == [T0, T0 + 5_000]


def test_a_waiting_message_is_in_the_range_that_the_java_client_asks_for(tmp_path: Path) -> None:
    """For a unique key it asks from three days ago on; what has waited for longer is there all the same."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "far", UNIQ_KEY="F", TIMER_DELAY_MS=100 * HOUR_MS)
        sent(peer, "orders", "now", UNIQ_KEY="N")
        served.pass_ms(90 * HOUR_MS)
        begin = T0 + 18 * HOUR_MS
        assert len(found(peer, "F", beginTimestamp=begin, _UNIQUE_KEY_QUERY="true")) == 1
        assert query(peer, "N", beginTimestamp=begin).code == codes.QUERY_NOT_FOUND


def test_what_is_not_there_is_answered_so(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = query(peer, "nobody")
        assert (answer.code, answer.body) == (codes.QUERY_NOT_FOUND, b"")
        assert answer.remark == "no message of topic 'orders' has the key 'nobody' in that range of time"
        assert query(peer, "K", topic="nowhere").code == codes.TOPIC_NOT_EXIST
        assert query(peer, "").code == codes.INVALID_PARAMETER
        assert query(peer, "tag", indexType="T").code == codes.INVALID_PARAMETER


def test_an_answer_has_a_bound_and_the_newest_come_first(tmp_path: Path) -> None:
    with serving(tmp_path, lookup_count_max=5) as served, connected(served) as peer:
        for n in range(8):
            sent(peer, "orders", str(n), KEYS="K", UNIQ_KEY="U")
        assert [record.body for record in found(peer, "K", maxNum=3)] == [b"7", b"6", b"5"]
        for many in (64, 2**31 - 1):
            assert [record.body for record in found(peer, "K", maxNum=many)] == [b"7", b"6", b"5", b"4", b"3"]
        assert len(found(peer, "U", maxNum=1, _UNIQUE_KEY_QUERY="true")) == 5
        assert len(found(peer, "K", maxNum=-1)) == 1


def test_an_answer_fits_into_a_frame(tmp_path: Path) -> None:
    with serving(tmp_path, frame_bytes_max=1 << 17) as served, connected(served) as peer:
        for n in range(5):
            sent(peer, "orders", str(n) * 50_000, KEYS="K")
        assert [record.body[:1] for record in found(peer, "K")] == [b"4", b"3"]


def test_lookups_at_the_same_time_have_a_bound(tmp_path: Path) -> None:
    with serving(tmp_path, lookups_max=2) as served, connected(served) as peer:
        sent(peer, "orders", "x", KEYS="K")
        asked = [peer.command(Request.QUERY_MESSAGE, topic="orders", key="K") for _ in range(4)]
        peer.write(*asked)
        answers = [peer.answer_to(command.opaque) for command in asked]
        assert [answer.code for answer in answers] == [codes.SUCCESS] * 2 + [codes.SYSTEM_BUSY] * 2
        assert "lookups_max" in (answers[-1].remark or "")
        assert query(peer, "K").code == codes.SUCCESS


def test_a_oneway_lookup_is_not_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders", "x", KEYS="K")
        peer.say(Request.QUERY_MESSAGE, oneway=True, topic="orders", key="K")
        peer.say(Request.VIEW_MESSAGE_BY_ID, oneway=True, offset=100)
        peer.expect_no_more()


def test_a_producer_cannot_say_where_its_message_is(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "x", KEYS="K", POSTDATE_STATE="visible", TIMER_DELAY_SEC=5)
        (record,) = found(peer, "K")
        assert said(record)[0] == "waiting"


def test_properties_without_room_for_more_are_left_as_they_are(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        assert send(peer, "orders", "x", KEYS="K", TIMER_DELAY_SEC=5, long="x" * 32_700).code == codes.SUCCESS
        (record,) = found(peer, "K")
        assert record.queue_offset == -1
        assert "POSTDATE_STATE" not in properties_of(record)


def test_a_send_back_and_its_retry_are_found_by_the_same_key(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        _, offset = parse_message_id(sent(peer, "orders", "x", KEYS="K").fields["msgId"])
        assert peer.ask(Request.CONSUMER_SEND_MSG_BACK, group="g", offset=offset).code == codes.SUCCESS
        (record,) = found(peer, "K", topic="%RETRY%g")
        assert said(record) == ("waiting", str(T0 + 10_000), -1)
        assert [said(record)[0] for record in found(peer, "K")] == ["visible"]


@pytest.mark.parametrize("end", [Served.stop, Served.kill], ids=["stopped", "killed"])
def test_lookups_hold_through_a_restart(tmp_path: Path, end: Any) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for n in range(300):
            sent(peer, "orders", str(n), KEYS=f"k{n} all", UNIQ_KEY=f"U{n}", TIMER_DELAY_SEC=n % 3)
        before = [found(peer, key) for key in ("k7", "U8", "all")]
        end(served)
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for records, key in zip(before, ("k7", "U8", "all"), strict=True):
            again = found(peer, key)
            assert [(r.body, r.offset, said(r)) for r in again] == [(r.body, r.offset, said(r)) for r in records]


def test_entries_of_a_queue_are_shown(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for tag in ("a", "b", "c"):
            sent(peer, "orders", TAGS=tag)
        asked: dict[str, Any] = {"topic": "orders", "queueId": 0}
        told = ask_json(peer, Request.QUERY_CONSUME_QUEUE, index=1, count=10, **asked)
        assert (told["minQueueIndex"], told["maxQueueIndex"]) == (0, 3)
        assert [entry["tagsCode"] for entry in told["queueData"]] == [ord("b"), ord("c")]
        (record,) = decode_records(
            peer.ask(Request.VIEW_MESSAGE_BY_ID, offset=told["queueData"][0]["physicOffset"]).body
        )
        assert properties_of(record)["TAGS"] == "b"
        assert told["queueData"][0]["physicSize"] > 0
        assert ask_json(peer, Request.QUERY_CONSUME_QUEUE, index=9, count=1, **asked)["queueData"] == []
        for index, count in ((-1, 1), (0, 0), (0, 1_025)):
            answer = peer.ask(Request.QUERY_CONSUME_QUEUE, index=index, count=count, **asked)
            assert answer.code == codes.INVALID_PARAMETER
        assert peer.ask(Request.QUERY_CONSUME_QUEUE, index=0, count=1, topic="x", queueId=0).code == 17

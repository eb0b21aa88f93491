"""Cancelling over the wire: by handle, by key and due, by RocketMQ's delete marker. The answer is the truth."""

import base64
from pathlib import Path
from typing import Any

import pytest

from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from tests.support.core import FAR_MS, HOUR_MS, T0
from tests.support.handles import recall_handle
from tests.support.peer import Peer, connected, make_topic, read_bodies, send, send_batch, send_command, sent
from tests.support.server import Served, serving

WAITS_MS = pytest.mark.parametrize("delay_ms", [5_000, FAR_MS, 100 * HOUR_MS], ids=["near", "far", "very far"])


def recall(peer: Peer, handle: str, topic: str = "orders") -> Command:
    return peer.ask(Request.RECALL_MESSAGE, producerGroup="p", topic=topic, recallHandle=handle, bname="postdate")


def pass_and_settle(served: Served, span_ms: int) -> None:
    served.pass_ms(span_ms)
    served.settle()


# ---------------------------------------------------------------------------------------------------- by handle


@WAITS_MS
def test_a_recalled_message_never_arrives(tmp_path: Path, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = sent(peer, "orders", "recalled", UNIQ_KEY="K1", TIMER_DELAY_MS=delay_ms).fields["recallHandle"]
        sent(peer, "orders", "stays", UNIQ_KEY="K2", TIMER_DELAY_MS=delay_ms)
        answer = recall(peer, handle)
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"msgId": "K1", "outcome": "cancelled"})
        pass_and_settle(served, delay_ms)
        assert read_bodies(peer, "orders") == ["stays"]


@WAITS_MS
def test_a_recall_that_is_repeated_is_answered_as_before(tmp_path: Path, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = sent(peer, "orders", UNIQ_KEY="K1", TIMER_DELAY_MS=delay_ms).fields["recallHandle"]
        for _ in range(2):
            answer = recall(peer, handle)
            assert (answer.code, answer.fields["outcome"]) == (codes.SUCCESS, "cancelled")


def test_a_level_message_is_recalled_like_any_other(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for level in (1, 18):
            handle = sent(peer, "orders", UNIQ_KEY=f"K{level}", DELAY=level).fields["recallHandle"]
            assert recall(peer, handle).code == codes.SUCCESS
        pass_and_settle(served, 3 * HOUR_MS)
        assert read_bodies(peer, "orders") == []


def test_a_message_of_a_batch_is_recalled_by_its_own_handle(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        inner = [(f"m{n}", {"UNIQ_KEY": f"K{n}", "TIMER_DELAY_SEC": 5}) for n in range(3)]
        handles = send_batch(peer, "orders", inner).fields["recallHandles"].split(" ")
        assert recall(peer, handles[1]).fields["outcome"] == "cancelled"
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == ["m0", "m2"]


@WAITS_MS
def test_the_recall_of_a_delivered_message_says_so(tmp_path: Path, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = sent(peer, "orders", "came", UNIQ_KEY="K1", TIMER_DELAY_MS=delay_ms).fields["recallHandle"]
        pass_and_settle(served, delay_ms)
        answer = recall(peer, handle)
        assert answer.code == codes.ILLEGAL_OPERATION
        assert answer.fields["outcome"] == "delivered"
        assert answer.remark == "message K1 is delivered already"
        assert read_bodies(peer, "orders") == ["came"]


def test_the_recall_of_an_unknown_message_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", UNIQ_KEY="K1", TIMER_DELAY_MS=5_000)
        for key, due in (("K2", T0 + 5_000), ("K1", T0 + 5_001), ("K1", T0 + FAR_MS), ("K1", T0 - 1)):
            answer = recall(peer, recall_handle("orders", "postdate", due, key))
            assert answer.code == codes.ILLEGAL_OPERATION
            assert answer.fields["outcome"] == "unknown"
            assert f"no message {key} waits for that time" in (answer.remark or "")
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == ["hello"]


@pytest.mark.parametrize(
    ("handle", "said"),
    [
        (recall_handle("orders", "another", T0 + 5_000, "K1"), "of broker 'another', this is 'postdate'"),
        (recall_handle("others", "postdate", T0 + 5_000, "K1"), "of topic 'others', not of 'orders'"),
        ("?!", "not base64"),
        ("djEg", "expected 'v1 topic broker time key'"),
        ("", "expected 'v1 topic broker time key'"),
        ("Ünïcode", "not base64"),
        (base64.urlsafe_b64encode(b"v2 orders postdate 5 K1").decode(), "expected 'v1 topic broker time key'"),
        (base64.urlsafe_b64encode(b"v1 orders postdate soon K1").decode(), "time 'soon'"),
        (base64.urlsafe_b64encode(b"\xff\xfe\xfd").decode(), "not base64"),
        ("A" * 70_000, "70000 characters"),
        (recall_handle("orders", "postdate", T0 + 20 * 366 * 24 * HOUR_MS, "K1"), "delay_ms_max"),
        (recall_handle("orders", "postdate", 0, "K1"), "expected epoch milliseconds"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_handle_that_cannot_be_ours_is_refused_with_a_sentence(tmp_path: Path, handle: str, said: str) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "others")
        sent(peer, "orders", UNIQ_KEY="K1", TIMER_DELAY_MS=5_000)
        answer = recall(peer, handle)
        assert answer.code == codes.ILLEGAL_OPERATION
        assert said in (answer.remark or "")
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == ["hello"], "nothing was cancelled by it"


def test_a_recall_of_an_unknown_topic_is_answered_so(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        answer = recall(peer, recall_handle("nowhere", "postdate", T0 + 1, "K1"), topic="nowhere")
        assert answer.code == codes.TOPIC_NOT_EXIST


def test_a_oneway_recall_cancels_and_is_not_answered(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = sent(peer, "orders", UNIQ_KEY="K1", TIMER_DELAY_MS=5_000).fields["recallHandle"]
        peer.say(Request.RECALL_MESSAGE, oneway=True, topic="orders", recallHandle=handle)
        peer.round_trip()
        served.settle()
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == []
        peer.expect_no_more()


@WAITS_MS
@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "__STARTDELIVERTIME"])
def test_a_recall_tells_the_truth_whatever_property_named_the_instant(tmp_path: Path, name: str, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        first, second = (
            sent(peer, "orders", key, UNIQ_KEY=key, **{name: T0 + delay_ms}).fields["recallHandle"]
            for key in ("K1", "K2")
        )
        answer = peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=first)
        assert (answer.code, answer.fields["outcome"]) == (codes.SUCCESS, "cancelled")
        pass_and_settle(served, delay_ms)
        assert read_bodies(peer, "orders") == ["K2"]
        late = peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=second)
        assert (late.code, late.fields["outcome"]) == (codes.ILLEGAL_OPERATION, "delivered")


# ------------------------------------------------------------------------------------------------ by key and due


@WAITS_MS
def test_a_message_is_cancelled_by_its_key_and_due(tmp_path: Path, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "one", KEYS="order-7 customer-3", TIMER_DELAY_MS=delay_ms)
        sent(peer, "orders", "two", KEYS="order-8", TIMER_DELAY_MS=delay_ms)
        asked: dict[str, Any] = {"topic": "orders", "due": T0 + delay_ms}
        missing = peer.ask(Request.RECALL_MESSAGE, **asked, key="order-9")
        assert (missing.code, missing.fields["outcome"]) == (codes.ILLEGAL_OPERATION, "unknown")
        answer = peer.ask(Request.RECALL_MESSAGE, **asked, key="order-7")
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"msgId": "order-7", "outcome": "cancelled"})
        pass_and_settle(served, delay_ms)
        assert read_bodies(peer, "orders") == ["two"]
        late = peer.ask(Request.RECALL_MESSAGE, **asked, key="order-8")
        assert (late.code, late.fields["outcome"]) == (codes.ILLEGAL_OPERATION, "delivered")


def test_a_cancel_by_key_needs_a_due_time(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = peer.ask(Request.RECALL_MESSAGE, topic="orders", key="order-7")
        assert answer.code == codes.ILLEGAL_OPERATION
        assert "due time of a cancel is 0" in (answer.remark or "")


# ---------------------------------------------------------------------------------------------- by delete marker


@WAITS_MS
@pytest.mark.parametrize("form", ["K1", "orders+K1"])
def test_a_delete_marker_cancels_by_both_forms_of_its_key(tmp_path: Path, form: str, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "deleted", UNIQ_KEY="K1", TIMER_DELAY_MS=delay_ms)
        marker = sent(peer, "orders", "0", UNIQ_KEY="M1", TIMER_DELIVER_MS=T0 + delay_ms, TIMER_DEL_UNIQKEY=form)
        assert marker.fields["outcome"] == "cancelled"
        assert marker.fields["transactionId"] == "M1"
        assert {"msgId", "queueId", "queueOffset", "MSG_REGION", "TRACE_ON"} <= marker.fields.keys()
        pass_and_settle(served, delay_ms)
        assert read_bodies(peer, "orders") == [], "the marker itself is no message either"


def test_a_delete_marker_tells_the_truth(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = send(peer, "orders", TIMER_DELIVER_MS=T0 + 5_000, TIMER_DEL_UNIQKEY="K1")
        assert (answer.code, answer.fields["outcome"]) == (codes.ILLEGAL_OPERATION, "unknown")


@pytest.mark.parametrize("delay", [{}, {"TIMER_DELIVER_MS": T0}, {"TIMER_DELAY_SEC": -1}], ids=str)
def test_a_delete_marker_whose_due_has_passed_is_refused(tmp_path: Path, delay: dict[str, Any]) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = send(peer, "orders", TIMER_DEL_UNIQKEY="K1", **delay)
        assert answer.code == codes.MESSAGE_ILLEGAL
        assert "TIMER_DEL_UNIQKEY" in (answer.remark or "")
        assert read_bodies(peer, "orders") == []


@pytest.mark.parametrize("place", [0, 1])
def test_a_delete_marker_within_a_batch_is_refused(tmp_path: Path, place: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "stays", UNIQ_KEY="K1", TIMER_DELAY_MS=5_000)
        inner: list[tuple[str, dict[str, Any]]] = [("other", {})]
        inner.insert(place, ("0", {"TIMER_DEL_UNIQKEY": "K1", "TIMER_DELIVER_MS": T0 + 5_000}))
        answer = send_batch(peer, "orders", inner)
        assert answer.code == codes.MESSAGE_ILLEGAL
        assert "TIMER_DEL_UNIQKEY" in (answer.remark or "")
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == ["stays"]


def test_a_delete_marker_among_messages_of_one_write_cancels_what_came_before_it(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        commands = [
            send_command(peer, "orders", "deleted", UNIQ_KEY="K1", TIMER_DELIVER_MS=T0 + 5_000),
            send_command(peer, "orders", "0", TIMER_DEL_UNIQKEY="K1", TIMER_DELIVER_MS=T0 + 5_000),
            send_command(peer, "orders", "anew", UNIQ_KEY="K1", TIMER_DELIVER_MS=T0 + 5_000),
        ]
        peer.write(*commands)
        assert [peer.answer_to(command.opaque).code for command in commands] == [codes.SUCCESS] * 3
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == ["anew"], "a key may be used again"


def test_a_oneway_delete_marker_cancels_and_is_not_answered(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", UNIQ_KEY="K1", TIMER_DELAY_MS=5_000)
        peer.write(send_command(peer, "orders", oneway=True, TIMER_DEL_UNIQKEY="K1", TIMER_DELAY_MS=5_000))
        peer.round_trip()
        served.settle()
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == []
        peer.expect_no_more()

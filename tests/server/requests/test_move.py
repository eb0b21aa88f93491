"""Giving messages another due, by handle and by key: where they come, and what the answer says."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.storage import record as records
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from tests.server.requests.test_recall import WAITS_MS, pass_and_settle, recall
from tests.support.core import FAR_MS, HOUR_MS, T0
from tests.support.handles import recall_handle
from tests.support.peer import Peer, connected, make_topic, properties_of, read_all, read_bodies, sent
from tests.support.server import serving


def move(peer: Peer, **fields: Any) -> Command:
    return peer.ask(Request.MOVE_MESSAGE, topic="orders", **fields)


def moved(peer: Peer, **fields: Any) -> list[dict[str, Any]]:
    """Moves, and returns what the answer says of each message."""
    answer = move(peer, **fields)
    assert answer.code == codes.SUCCESS, answer.remark
    messages: list[dict[str, Any]] = orjson.loads(answer.body)["messages"]
    return messages


def cancelled(peer: Peer, key: str, **fields: Any) -> dict[str, str]:
    answer = peer.ask(Request.CANCEL_KEY, topic="orders", key=key, **fields)
    assert answer.code == codes.SUCCESS, answer.remark
    return {message["id"]: message["outcome"] for message in orjson.loads(answer.body)["messages"]}


def send(peer: Peer, body: str, delay_ms: int, **properties: Any) -> str:
    handle: str = sent(peer, "orders", body, UNIQ_KEY=f"U-{body}", TIMER_DELAY_MS=delay_ms, **properties).fields[
        "recallHandle"
    ]
    return handle


SPANS = [5_000, FAR_MS, 100 * HOUR_MS]
FROM_TO = pytest.mark.parametrize(("before_ms", "after_ms"), [(a, b + 1_000) for a in SPANS for b in SPANS])


@FROM_TO
def test_a_moved_message_comes_once_at_its_last_due(tmp_path: Path, before_ms: int, after_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = send(peer, "moved", before_ms)
        (answer,) = moved(peer, recallHandle=handle, due=T0 + after_ms)
        assert (answer["id"], answer["outcome"], answer["was"]) == ("U-moved", "moved", T0 + before_ms)
        assert answer["due"] == T0 + after_ms
        pass_and_settle(served, after_ms - 1)
        assert read_bodies(peer, "orders") == []
        pass_and_settle(served, 1)
        assert read_bodies(peer, "orders") == ["moved"]
        pass_and_settle(served, max(SPANS) + 2_000)
        assert read_bodies(peer, "orders") == ["moved"]


@WAITS_MS
def test_a_message_is_delivered_now(tmp_path: Path, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = send(peer, "now", delay_ms)
        (answer,) = moved(peer, recallHandle=handle, delay=0)
        assert (answer["outcome"], answer["due"]) == ("moved", T0)
        assert "recallHandle" not in answer
        assert read_bodies(peer, "orders") == ["now"]
        pass_and_settle(served, delay_ms)
        assert read_bodies(peer, "orders") == ["now"]
        assert recall(peer, handle).fields["outcome"] == "delivered"
        assert moved(peer, recallHandle=handle, delay=5_000)[0]["outcome"] == "delivered"


@FROM_TO
def test_every_handle_cancels_a_moved_message(tmp_path: Path, before_ms: int, after_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for body, which in (("first", 0), ("second", 1), ("third", 2)):
            handles = [send(peer, body, before_ms)]
            for due in (T0 + after_ms, T0 + before_ms + 7):
                handles.append(moved(peer, recallHandle=handles[-1], due=due)[0]["recallHandle"])
            for _ in range(2):
                answer = recall(peer, handles[which])
                assert (answer.code, answer.fields["outcome"]) == (codes.SUCCESS, "cancelled")
        pass_and_settle(served, max(SPANS) + 2_000)
        assert read_bodies(peer, "orders") == []


@WAITS_MS
def test_a_handle_cancels_after_its_first_due_has_passed(tmp_path: Path, delay_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = send(peer, "late", 5_000)
        moved(peer, recallHandle=handle, by=delay_ms)
        pass_and_settle(served, 5_001)
        assert read_bodies(peer, "orders") == []
        assert recall(peer, handle).fields["outcome"] == "cancelled"
        pass_and_settle(served, delay_ms)
        assert read_bodies(peer, "orders") == []


def test_the_properties_of_a_moved_message_tell_its_new_due(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = sent(peer, "orders", "level", UNIQ_KEY="U1", DELAY=5, KEYS="a b", TAGS="t").fields["recallHandle"]
        moved(peer, recallHandle=handle, due=T0 + 90_000)
        pass_and_settle(served, 90_000)
        (found,) = read_all(peer, "orders")
        properties = properties_of(found)
        assert properties["TIMER_DELIVER_MS"] == str(T0 + 90_000)
        assert (properties["KEYS"], properties["TAGS"], properties["UNIQ_KEY"]) == ("a b", "t", "U1")
        assert "DELAY" not in properties


def test_a_key_moves_all_that_wait(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        send(peer, "gone", 1_000, KEYS="order-1")
        pass_and_settle(served, 1_000)
        send(peer, "near", 5_000, KEYS="order-1 other")
        send(peer, "far", FAR_MS, KEYS="other order-1")
        send(peer, "else", 5_000, KEYS="order-2")
        outcomes = {answer["id"]: answer["outcome"] for answer in moved(peer, key="order-1", by=-4_000)}
        assert outcomes == {"U-gone": "delivered", "U-near": "moved", "U-far": "moved"}
        pass_and_settle(served, 1_000)
        assert read_bodies(peer, "orders") == ["gone", "near"]
        pass_and_settle(served, FAR_MS - 5_000)
        assert sorted(read_bodies(peer, "orders")) == ["else", "far", "gone", "near"]


def test_only_refuses_several_and_changes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for body in ("a", "b"):
            send(peer, body, 5_000, KEYS="order-1")
        answer = move(peer, key="order-1", delay=0, only=True)
        assert answer.code == codes.ILLEGAL_OPERATION
        assert answer.remark == "2 messages with this key wait, and only one was expected; nothing was changed"
        answer = peer.ask(Request.CANCEL_KEY, topic="orders", key="order-1", only=True)
        assert answer.code == codes.ILLEGAL_OPERATION
        assert read_bodies(peer, "orders") == []
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == ["a", "b"]


def test_what_is_unknown_is_not_moved(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = send(peer, "one", 5_000)
        assert moved(peer, key="nobody", delay=0) == []
        assert moved(peer, recallHandle=recall_handle("orders", "postdate", T0 + 5_001, "U-one"), delay=0) == []
        recall(peer, handle)
        assert moved(peer, recallHandle=handle, delay=0) == []
        pass_and_settle(served, 10_000)
        assert read_bodies(peer, "orders") == []


BAD_MOVES: list[dict[str, Any]] = [
    {"key": "K"}, {"delay": 0}, {"key": "K", "delay": 0, "by": 1}, {"key": "K", "recallHandle": "x", "delay": 0},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_MOVES, ids=str)
def test_a_move_that_makes_no_sense_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = move(peer, **fields)
        assert answer.code == codes.INVALID_PARAMETER
        assert "a move needs" in (answer.remark or "") or "the request needs" in (answer.remark or "")


def test_a_due_beyond_the_longest_delay_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = send(peer, "one", 5_000)
        answer = move(peer, recallHandle=handle, delay=100 * 365 * 24 * HOUR_MS)
        assert answer.code == codes.INVALID_PARAMETER
        assert "the message cannot be moved" in (answer.remark or "")
        pass_and_settle(served, 5_000)
        assert read_bodies(peer, "orders") == ["one"]


def test_a_key_with_one_message_that_cannot_be_moved_moves_none(tmp_path: Path) -> None:
    """They are moved in several batches."""
    with serving(tmp_path, ManualClock(T0), delay_ms_max=HOUR_MS) as served, connected(served) as peer:
        send(peer, "last", HOUR_MS - 1, KEYS="order-1")
        for n in range(70):
            send(peer, f"m{n}", 5_000, KEYS="order-1")
        answer = move(peer, key="order-1", by=10_000)
        assert answer.code == codes.INVALID_PARAMETER
        assert "the message cannot be moved" in (answer.remark or "")
        pass_and_settle(served, 5_000)
        assert len(read_bodies(peer, "orders")) == 70


def test_a_key_with_one_message_that_has_no_id_cancels_none(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "no id", TIMER_DELAY_MS=5_000, KEYS="order-1")
        send(peer, "with id", 5_000, KEYS="order-1")
        answer = peer.ask(Request.CANCEL_KEY, topic="orders", key="order-1")
        assert answer.code == codes.ILLEGAL_OPERATION
        assert (answer.remark or "").startswith("nothing was cancelled: a message of that key has no id")
        pass_and_settle(served, 5_000)
        assert sorted(read_bodies(peer, "orders")) == ["no id", "with id"]


def test_a_key_cancels_all_that_wait_and_says_what_was(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        send(peer, "gone", 1_000, KEYS="order-1")
        pass_and_settle(served, 1_000)
        send(peer, "near", 5_000, KEYS="order-1")
        send(peer, "far", FAR_MS, KEYS="other order-1")
        moved(peer, key="U-far", by=1_000)
        expected = {"U-gone": "delivered", "U-near": "cancelled", "U-far": "cancelled"}
        for _ in range(2):
            assert cancelled(peer, "order-1") == expected
        assert cancelled(peer, "nobody") == {}
        pass_and_settle(served, FAR_MS + 1_000)
        assert read_bodies(peer, "orders") == ["gone"]


def test_moves_and_cancels_by_key_at_the_same_time_have_a_bound(tmp_path: Path) -> None:
    with serving(tmp_path, key_acts_max=2) as served, connected(served) as peer:
        send(peer, "one", FAR_MS, KEYS="order-1")
        ways: dict[Request, dict[str, Any]] = {Request.CANCEL_KEY: {}, Request.MOVE_MESSAGE: {"delay": 1_000_000}}
        for request, fields in ways.items():
            asked = [peer.command(request, topic="orders", key="nobody", **fields) for _ in range(4)]
            peer.write(*asked)
            answers = [peer.answer_to(command.opaque) for command in asked]
            assert [answer.code for answer in answers] == [codes.SUCCESS] * 2 + [codes.SYSTEM_BUSY] * 2
            assert "key_acts_max" in (answers[-1].remark or "")


def test_moves_and_cancels_hold_through_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        handles = {body: send(peer, body, FAR_MS) for body in ("later", "sooner", "never")}
        moved(peer, recallHandle=handles["later"], by=HOUR_MS)
        moved(peer, recallHandle=handles["sooner"], delay=2_000)
        moved(peer, recallHandle=handles["never"], by=5_000)
        recall(peer, handles["never"])
    with serving(tmp_path, clock) as served, connected(served) as peer:
        pass_and_settle(served, 2_000)
        assert read_bodies(peer, "orders") == ["sooner"]
        pass_and_settle(served, FAR_MS)
        assert read_bodies(peer, "orders") == ["sooner"]
        pass_and_settle(served, HOUR_MS)
        assert sorted(read_bodies(peer, "orders")) == ["later", "sooner"]


def find_places(peer: Peer, key: str) -> list[tuple[str, str]]:
    answer = peer.ask(Request.QUERY_MESSAGE, topic="orders", key=key)
    properties = [records.properties_of(record) for record in records.split(answer.body)]
    return [(found["POSTDATE_STATE"], found.get("POSTDATE_PLACE", "")) for found in properties]


def test_a_lookup_finds_a_moved_message_once_and_says_where(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        handle = send(peer, "one", FAR_MS, KEYS="order-1")
        assert find_places(peer, "order-1") == [("waiting", "log")]
        moved(peer, recallHandle=handle, delay=5_000)
        assert find_places(peer, "order-1") == [("waiting", "wheel")]
        moved(peer, recallHandle=handle, delay=0)
        assert find_places(peer, "order-1") == [("visible", "")]

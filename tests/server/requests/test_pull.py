"""Pulling over the wire: what is found, what is waited for, what wakes whoever waits."""

from pathlib import Path
from typing import Any

import pytest

from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    TINY,
    begun_later,
    connected,
    got,
    heartbeat,
    make_topic,
    pull,
    pull_command,
    read_bodies,
    send_command,
    sent,
)
from tests.support.server import Served, serving

FOUND, NOT_FOUND, NO_MATCH, MOVED = 0, 19, 20, 21
SHORT_POLL_MS = 50


def held_count(served: Served) -> int:
    return served.call(lambda: served.dispatcher.pulls.held_count)


# ------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("code", [Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE])
def test_a_pull_reads_what_is_visible_from_its_offset_on(tmp_path: Path, code: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for n in range(5):
            sent(peer, "orders", str(n))
        found = pull(peer, "orders", 2, code=code)
        assert found.bodies == ["2", "3", "4"]
        assert found[:4] == (FOUND, 5, 0, 5)
        assert [record.queue_offset for record in found.records] == [2, 3, 4]


@pytest.mark.parametrize(
    ("count", "offset", "code", "next_offset"),
    [(0, 0, NOT_FOUND, 0), (0, 1, MOVED, 0), (0, -1, MOVED, 0), (3, 3, NOT_FOUND, 3), (3, 4, MOVED, 3),
     (3, 2**62, MOVED, 3), (3, -1, MOVED, 0), (3, 0, FOUND, 3)],
)  # fmt: skip
def test_a_pull_beside_the_queue_is_told_where_to_go_on(
    tmp_path: Path, count: int, offset: int, code: int, next_offset: int
) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for _ in range(count):
            sent(peer, "orders")
        assert pull(peer, "orders", offset)[:4] == (code, next_offset, 0, count)


def test_a_pull_of_what_retention_has_taken_is_told_where_the_queue_begins_now(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), retention_ms=0, **TINY) as served, connected(served) as peer:
        first = begun_later(served, peer, "orders")
        moved = pull(peer, "orders", first - 1)
        assert (moved.code, moved.next_offset, moved.min_offset) == (MOVED, first, first)
        assert pull(peer, "orders", first).code == FOUND


def test_a_pull_gives_no_more_messages_than_asked_for(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for n in range(5):
            sent(peer, "orders", str(n))
        found = pull(peer, "orders", maxMsgNums=2)
        assert (found.bodies, found.next_offset) == (["0", "1"], 2)


def test_a_pull_gives_no_more_bytes_than_asked_for_but_one_message_at_least(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for n in range(5):
            sent(peer, "orders", str(n) * 1_000)
        assert len(pull(peer, "orders", maxMsgBytes=3_500).records) == 3
        assert len(pull(peer, "orders", maxMsgBytes=1).records) == 1
        assert len(pull(peer, "orders", maxMsgBytes=1_000_000).records) == 5


def test_a_pull_gives_no_more_than_the_settings_allow_whatever_is_asked_for(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"pull_count_max": 3, "pull_bytes_max": 4_096}
    with serving(tmp_path, **limits) as served, connected(served) as peer:
        for n in range(5):
            sent(peer, "small", str(n))
            sent(peer, "large", str(n) * 2_000)
        for count in (1_000, 2**31 - 1):
            assert len(pull(peer, "small", maxMsgNums=count, maxMsgBytes=2**31 - 1).records) == 3
            assert len(pull(peer, "large", maxMsgNums=count, maxMsgBytes=2**31 - 1).records) == 1


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"topic": "nowhere"}, codes.TOPIC_NOT_EXIST),
        ({"queue_id": 7}, codes.INVALID_PARAMETER),
        ({"queue_id": -1}, codes.INVALID_PARAMETER),
        ({"maxMsgNums": 0}, codes.INVALID_PARAMETER),
        ({"group": "two words"}, codes.MESSAGE_ILLEGAL),
    ],
    ids=str,
)
def test_a_pull_of_what_is_not_there_is_refused(tmp_path: Path, how: dict[str, Any], code: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert pull(peer, **{"topic": "orders", **how}).code == code


def test_a_topic_that_may_not_be_read_refuses_pulls(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", perm=2)
        sent(peer, "orders")
        answer = pull(peer, "orders")
        assert answer.code == codes.NO_PERMISSION
        assert answer.remark == "topic 'orders' may not be read: its perm is 2"


def test_a_pull_of_its_own_retry_topic_makes_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert pull(peer, f"%RETRY%{GROUP}").code == NOT_FOUND
        assert pull(peer, "%RETRY%others").code == codes.TOPIC_NOT_EXIST


# ------------------------------------------------------------------------------------------------- subscriptions


def test_a_pull_without_a_subscription_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = pull(peer, "orders", tags=None)
        assert answer.code == codes.SUBSCRIPTION_NOT_EXIST
        assert answer.remark == f"group {GROUP!r} has no subscription to topic 'orders'"
        heartbeat(peer, "c1", {"others": "*"})
        assert pull(peer, "orders", tags=None).code == codes.SUBSCRIPTION_NOT_EXIST


def test_a_subscription_comes_from_the_heartbeat_or_with_the_pull(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer, connected(served) as other:
        for tag in ("a", "b", "c"):
            sent(peer, "orders", tag, TAGS=tag)
        sent(peer, "orders", "none")
        heartbeat(peer, "c1", {"orders": "a || c"})
        assert pull(peer, "orders", tags=None).bodies == ["a", "c"]
        assert pull(peer, "orders", tags="b").bodies == ["b"]
        assert pull(peer, "orders", tags="*").bodies == ["a", "b", "c", "none"]
        assert pull(peer, "orders", tags="").bodies == ["a", "b", "c", "none"]
        assert pull(other, "orders", tags=None).bodies == ["a", "c"], "what its group wants, where it has not said"


@pytest.mark.parametrize("by_heartbeat", [False, True])
def test_another_filter_than_by_tag_is_refused(tmp_path: Path, by_heartbeat: bool) -> None:
    body = (
        b'{"clientID":"c1","consumerDataSet":[{"groupName":"workers","subscriptionDataSet":'
        b'[{"topic":"orders","subString":"a > 5","expressionType":"SQL92"}]}]}'
    )
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders", TAGS="a")
        peer.ask(Request.HEART_BEAT, body)
        how: dict[str, Any] = {"tags": None} if by_heartbeat else {"tags": "a > 5", "expressionType": "SQL92"}
        answer = pull(peer, "orders", **how)
        assert answer.code == codes.INVALID_PARAMETER
        assert answer.remark == "the broker filters by tag, not by SQL92"


def test_a_pull_that_finds_only_other_tags_goes_on_behind_them(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        peer.write(*[send_command(peer, "orders", str(n), TAGS="other") for n in range(3_000)])
        for _ in range(3_000):
            assert peer.next_answer().code == codes.SUCCESS
        sent(peer, "orders", "wanted", TAGS="mine")
        offset, steps = 0, 0
        while (answer := pull(peer, "orders", offset, tags="mine", wait_ms=LONG_POLL_MS)).code == NO_MATCH:
            assert answer.next_offset > offset, "it must get on"
            offset, steps = answer.next_offset, steps + 1
        assert steps >= 1
        assert (answer.bodies, answer.next_offset) == (["wanted"], 3_001)


# ------------------------------------------------------------------------------------------------------ held pulls


def test_a_held_pull_is_answered_by_what_arrives(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders", 2)
        held = [pull_command(reader, "orders", queue_id=n, wait_ms=LONG_POLL_MS) for n in (0, 1)]
        reader.write(*held)
        reader.expect_no_more()
        assert held_count(served) == 2
        sent(peer, "orders", "one", queue_id=1)
        assert got(reader.answer_to(held[1].opaque)).bodies == ["one"]
        reader.expect_no_more()
        sent(peer, "orders", "zero", queue_id=0)
        assert got(reader.answer_to(held[0].opaque)).bodies == ["zero"]
        assert held_count(served) == 0


def test_a_held_pull_is_answered_by_what_fires(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "due", TIMER_DELAY_MS=1_000)
        held = pull_command(peer, "orders", wait_ms=LONG_POLL_MS)
        peer.write(held)
        served.pass_ms(999)
        peer.expect_no_more()
        served.pass_ms(1)
        assert got(peer.answer_to(held.opaque)).bodies == ["due"]


def test_every_consumer_that_waits_at_a_queue_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        held = [pull_command(peer, "orders", group=f"g{n}", wait_ms=LONG_POLL_MS) for n in range(20)]
        peer.write(*held)
        peer.expect_no_more()
        sent(peer, "orders", "to all")
        assert [got(peer.answer_to(command.opaque)).bodies for command in held] == [["to all"]] * 20


def test_a_held_pull_whose_time_is_over_is_told_that_there_is_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders")
        assert pull(peer, "orders", 1, wait_ms=SHORT_POLL_MS)[:4] == (NOT_FOUND, 1, 0, 1)
        assert held_count(served) == 0


def test_a_held_pull_is_not_woken_by_other_tags_and_moves_over_them(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders")
        held = pull_command(reader, "orders", tags="mine", wait_ms=LONG_POLL_MS)
        reader.write(held)
        reader.round_trip()
        for _ in range(3):
            sent(peer, "orders", TAGS="other")
        reader.expect_no_more()
        sent(peer, "orders", "wanted", TAGS="mine")
        answer = got(reader.answer_to(held.opaque))
        assert (answer.bodies, answer.next_offset) == (["wanted"], 4)


def test_a_held_pull_that_gives_up_goes_on_behind_other_tags(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders")
        held = pull_command(reader, "orders", tags="mine", wait_ms=500)
        reader.write(held)
        reader.round_trip()
        sent(peer, "orders", TAGS="other")
        assert got(reader.answer_to(held.opaque))[:4] == (NOT_FOUND, 1, 0, 1)


def test_a_pull_is_not_held_where_it_may_not_wait(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert pull(peer, "orders", suspendTimeoutMillis=LONG_POLL_MS).code == NOT_FOUND, "without the flag"
        assert pull(peer, "orders", 5, wait_ms=LONG_POLL_MS).code == MOVED
        sent(peer, "orders", TAGS="other")
        assert pull(peer, "orders", tags="mine", wait_ms=LONG_POLL_MS).code == NO_MATCH
        assert held_count(served) == 0


@pytest.mark.parametrize("limit", ["held_pulls_max", "held_pulls_per_connection_max"])
def test_one_held_pull_too_many_is_refused_for_now(tmp_path: Path, limit: str) -> None:
    settings: dict[str, Any] = {limit: 2}
    with serving(tmp_path, **settings) as served, connected(served) as peer, connected(served) as other:
        make_topic(peer, "orders")
        held = [pull_command(peer, "orders", wait_ms=LONG_POLL_MS) for _ in range(3)]
        peer.write(*held)
        answer = peer.next_answer()
        # Answered with "nothing new" it would ask again at once, and again: a client waits seconds after a refusal.
        assert (answer.code, answer.opaque) == (codes.SYSTEM_BUSY, held[2].opaque)
        assert (answer.remark or "").startswith(limit)
        peer.expect_no_more()
        assert held_count(served) == 2
        if limit == "held_pulls_per_connection_max":
            other.write(pull_command(other, "orders", wait_ms=LONG_POLL_MS))
            other.expect_no_more()
            assert held_count(served) == 3, "others may still wait"
        sent(peer, "orders")
        assert {peer.next_answer().opaque for _ in range(2)} == {held[0].opaque, held[1].opaque}


def test_a_client_that_goes_while_it_waits_leaves_nothing_behind(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        with connected(served) as leaving:
            leaving.write(*[pull_command(leaving, "orders", queue_id=n, wait_ms=LONG_POLL_MS) for n in range(4)])
            leaving.round_trip()
            assert held_count(served) == 4
        while served.call(lambda: len(served.dispatcher.connections)) > 1:
            peer.round_trip()
        assert held_count(served) == 0
        assert served.call(lambda: (served.dispatcher.pulls._held, served.dispatcher.pulls._held_of)) == ({}, {})
        sent(peer, "orders", "nobody waits")


def test_a_pull_held_at_a_topic_that_is_deleted_is_told_so(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        held = pull_command(peer, "orders", wait_ms=500)
        peer.write(held)
        peer.round_trip()
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders").code == codes.SUCCESS
        assert peer.answer_to(held.opaque).code == codes.TOPIC_NOT_EXIST
        assert held_count(served) == 0


def test_messages_of_a_queue_that_is_gone_come_in_another(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        sent(peer, "orders", "was for 3", queue_id=3, TIMER_DELAY_SEC=5)
        make_topic(peer, "orders", 2)
        held = pull_command(peer, "orders", queue_id=1, wait_ms=LONG_POLL_MS)
        peer.write(held)
        peer.round_trip()
        served.pass_ms(5_000)
        (record,) = got(peer.answer_to(held.opaque)).records
        assert (record.body, record.queue_id) == (b"was for 3", 1)


def test_what_a_consumer_has_read_reads_the_same_after_a_crash(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        for n in range(10):
            sent(peer, "orders", str(n), TIMER_DELAY_MS=10 - n)
        served.pass_ms(10)
        served.settle()
        seen = pull(peer, "orders").records
        assert len(seen) == 10
        port = served.port  # it is part of what a consumer reads: the address of the broker
        served.kill()
    with serving(tmp_path, clock, broker_port=port) as served, connected(served) as peer:
        assert pull(peer, "orders").records == seen
        assert read_bodies(peer, "orders") == [str(n) for n in range(9, -1, -1)]

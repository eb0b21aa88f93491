"""How far groups are, and how an operator moves them: also under a consumer that runs."""

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

import postdate
from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.bodies import QueueName, decode_by_queue
from postdate.wire.frame import Command
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    Peer,
    connected,
    got,
    heartbeat,
    make_topic,
    pull,
    pull_command,
    sent,
)
from tests.support.server import Served, serving

PLACE: dict[str, Any] = {"consumerGroup": GROUP, "topic": "orders", "queueId": 0}


def move(peer: Peer, **fields: Any) -> dict[int, int]:
    asked: dict[str, Any] = {"group": GROUP, "topic": "orders", "timestamp": 0, "isForce": "true", **fields}
    answer = peer.ask(Request.INVOKE_BROKER_TO_RESET_OFFSET, **asked)
    assert answer.code == codes.SUCCESS, answer
    return {
        int(queue_id): int(offset) for queue_id, offset in re.findall(rb'"queueId":(\d+)[^}]*\}:(\d+)', answer.body)
    }


def committed(peer: Peer, queue_id: int = 0, group: str = GROUP) -> int:
    asked = {**PLACE, "consumerGroup": group, "queueId": queue_id, "setZeroIfNotFound": "false"}
    return int(peer.ask(Request.QUERY_CONSUMER_OFFSET, **asked).fields["offset"])


def commit(peer: Peer, offset: int, queue_id: int = 0) -> Command:
    asked = {**PLACE, "queueId": queue_id, "commitOffset": offset}
    return peer.ask(Request.UPDATE_CONSUMER_OFFSET, **asked)


def filled(served: Served, peer: Peer) -> None:
    """Five messages in queue 0, one a second from T0 on, one in queue 1; all read by the group."""
    make_topic(peer, "orders", 2)
    for number in range(5):
        sent(peer, "orders", f"m{number}")
        served.pass_ms(1_000)
    sent(peer, "orders", "other", queue_id=1)
    commit(peer, 5)
    commit(peer, 1, 1)


# -- how far groups are ---------------------------------------------------------------------------------------------


def stats(peer: Peer, **fields: Any) -> tuple[dict[QueueName, dict[str, Any]], float]:
    answer = peer.ask(Request.GET_CONSUME_STATS, **{"consumerGroup": GROUP, **fields})
    assert answer.code == codes.SUCCESS, answer
    tps = answer.body.partition(b'"consumeTps":')[2].partition(b",")[0]
    return decode_by_queue(answer.body, "offsetTable"), float(tps)


def test_a_group_is_told_with_what_it_has_in_work_and_how_fast_it_reads(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        filled(served, peer)
        commit(peer, 2)
        pull(peer, "orders", 2, maxMsgNums=2)
        table, tps = stats(peer)
        assert table[QueueName("orders", "postdate", 0)] == {
            "brokerOffset": 5, "consumerOffset": 2, "pullOffset": 4, "lastTimestamp": T0 + 1_000, "leased": 0,
        }  # fmt: skip
        assert table[QueueName("orders", "postdate", 1)]["pullOffset"] == 1
        assert tps == pytest.approx(2 / 5)
        assert stats(peer, topic="bills") == ({}, 0.0)
        commit(peer, 0)
        assert stats(peer)[0][QueueName("orders", "postdate", 0)]["lastTimestamp"] == 0, "it has read nothing"


def test_queues_that_a_group_has_never_committed_count(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        sent(peer, "orders", "a")
        sent(peer, "orders", "b", queue_id=1)
        commit(peer, 1)
        table, _ = stats(peer)
        assert {queue.queue_id: row["brokerOffset"] - row["consumerOffset"] for queue, row in table.items()} == {
            0: 0, 1: 1,
        }  # fmt: skip
        make_topic(peer, "mails", 1)
        sent(peer, "mails", "c")
        heartbeat(peer, "c", {"mails": "*", f"%RETRY%{GROUP}": "*"})
        table, _ = stats(peer)
        assert sorted(queue[::2] for queue in table) == [("mails", 0), ("orders", 0), ("orders", 1)]
        assert table[QueueName("mails", "postdate", 0)]["consumerOffset"] == 0
        peer.ask(
            Request.POP_MESSAGE, consumerGroup=GROUP, topic="mails", queueId=-1, maxMsgNums=1, invisibleTime=60_000
        )
        row = stats(peer)[0][QueueName("mails", "postdate", 0)]
        assert (row["consumerOffset"], row["leased"]) == (1, 1)


def test_all_groups_are_told_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        filled(served, peer)
        commit(peer, 2)
        pull(peer, "orders", 2, maxMsgNums=2)
        pull(peer, "orders", group="others", commit=0, maxMsgNums=1)
        body = peer.ask(Request.GET_BROKER_CONSUME_STATS).body
        assert b'"totalDiff":9,"totalInflightDiff":3' in body, body
        assert body.count(b'"brokerOffset":5') == 2
        assert f'"brokerAddr":"{served.server.broker_address}"'.encode() in body
        empty = orjson.loads(peer.ask(Request.GET_BROKER_CONSUME_STATS, isOrder="true").body)
        assert (empty["consumeStatsList"], empty["totalDiff"]) == ([], 0)


# -- moving a group -------------------------------------------------------------------------------------------------


def test_a_group_is_moved_to_an_instant_durably(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        filled(served, peer)
        assert move(peer, timestamp=T0 + 2_000) == {0: 2, 1: 0}
        assert (committed(peer), committed(peer, 1)) == (2, 0)
        served.kill()
    with serving(tmp_path, clock) as served, connected(served) as peer:
        assert (committed(peer), committed(peer, 1)) == (2, 0)
        assert move(peer, timestamp=-1) == {0: 5, 1: 1}, "to the end"
        assert committed(peer) == 5
        assert move(peer, queueId=0, offset=3) == {0: 3}, "one queue alone"
        assert (committed(peer), committed(peer, 1)) == (3, 1)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "nowhere"}, codes.TOPIC_NOT_EXIST),
        ({"group": "nobody"}, codes.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"queueId": 7, "offset": 0}, codes.INVALID_PARAMETER),
        ({"queueId": 0, "offset": 6}, codes.INVALID_PARAMETER),
        ({"timestamp": "then"}, codes.INVALID_PARAMETER),
    ],
    ids=str,
)
def test_a_move_that_cannot_be_is_refused_and_moves_nothing(tmp_path: Path, fields: dict[str, Any], code: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        filled(served, peer)
        asked: dict[str, Any] = {"group": GROUP, "topic": "orders", "timestamp": 0, **fields}
        assert peer.ask(Request.INVOKE_BROKER_TO_RESET_OFFSET, **asked).code == code
        assert (committed(peer), committed(peer, 1)) == (5, 1)


def test_a_member_is_told_with_its_next_pull_and_until_then_commits_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as operator:
        filled(served, peer)
        heartbeat(peer, "c1", {"orders": "*"})
        move(operator)
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **PLACE, commitOffset=5)
        answer = commit(peer, 5)
        assert (answer.code, answer.remark) == (codes.SUCCESS, "not written: an operator has moved the group meanwhile")
        assert committed(peer) == 0
        told = pull(peer, "orders", 5, commit=5)
        assert (told.code, told.next_offset) == (codes.PULL_OFFSET_MOVED, 0)
        assert committed(peer) == 0, "what came with that pull is from before"
        assert pull(peer, "orders", 0, commit=0).bodies == ["m0", "m1", "m2", "m3", "m4"]
        commit(peer, 4)
        assert committed(peer) == 4


def test_a_pull_that_is_held_is_told_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as operator:
        filled(served, peer)
        heartbeat(peer, "c1", {"orders": "*"})
        others = pull_command(peer, "orders", 5, group="others", wait_ms=LONG_POLL_MS)
        held = pull_command(peer, "orders", 5, wait_ms=LONG_POLL_MS)
        peer.write(others, held)
        peer.round_trip()
        move(operator, timestamp=T0 + 3_000)
        told = got(peer.answer_to(held.opaque))
        assert (told.code, told.next_offset) == (codes.PULL_OFFSET_MOVED, 3)
        peer.expect_no_more()
        assert pull(peer, "orders", 3, commit=3).bodies == ["m3", "m4"], "it is told once"


def test_a_member_that_is_there_already_is_not_told(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        filled(served, peer)
        heartbeat(peer, "c1", {"orders": "*"})
        move(peer)
        assert pull(peer, "orders", 0).bodies == ["m0", "m1", "m2", "m3", "m4"]


def test_who_comes_after_the_last_member_has_gone_may_commit(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        filled(served, peer)
        heartbeat(peer, "c1", {"orders": "*"})
        move(peer)
        peer.ask(Request.UNREGISTER_CLIENT, clientID="c1", consumerGroup=GROUP)
        commit(peer, 4)
        assert committed(peer) == 4


def test_a_group_that_nobody_reads_with_is_moved_and_commits(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        filled(served, peer)
        heartbeat(peer, "c1", {"bills": "*"})
        move(peer)
        commit(peer, 3)
        assert committed(peer) == 3
        assert pull(peer, "orders", 5).code == codes.PULL_NOT_FOUND


def test_a_move_is_forgotten_with_its_topic(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        filled(served, peer)
        heartbeat(peer, "c1", {"orders": "*"})
        move(peer)
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        make_topic(peer, "orders")
        sent(peer, "orders", "new")
        assert pull(peer, "orders", 1).code == codes.PULL_NOT_FOUND


def pop_command(peer: Peer, wait_ms: int = 0) -> Command:
    asked: dict[str, Any] = {
        "consumerGroup": GROUP, "topic": "orders", "queueId": -1, "maxMsgNums": 32, "invisibleTime": 60_000,
        "pollTime": wait_ms, "bornTime": T0, "initMode": 0, "expType": "TAG", "exp": "*", "order": False,
    }  # fmt: skip
    return peer.command(Request.POP_MESSAGE, **asked)


def test_a_group_that_pops_goes_on_where_it_was_moved_to(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as operator:
        filled(served, peer)
        held = pop_command(peer, LONG_POLL_MS)
        peer.write(held)
        peer.round_trip()
        move(operator, queueId=0, offset=3)
        given = peer.answer_to(held.opaque)
        assert [record.body for record in decode_records(given.body)] == [b"m3", b"m4"], (
            "it waited, and is told at once"
        )
        assert stats(operator)[0][QueueName("orders", "postdate", 0)]["consumerOffset"] == 5, "what is given counts"


def test_our_own_consumer_reads_again_after_a_move(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as operator, postdate.connect(served.address) as client:
        make_topic(operator, "orders")
        for number in range(3):
            sent(operator, "orders", f"m{number}")
        seen: list[str] = []
        for message in client.consume("orders", group=GROUP, from_="first"):
            seen.append(message.body.decode())
            message.acknowledge()
            if len(seen) == 3:
                move(operator)
            if len(seen) == 6:
                break
        assert seen == ["m0", "m1", "m2"] * 2


def test_how_far_a_group_is_behind_is_told_by_queue(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=60_000) as served, connected(served) as peer:
        for topic in ("orders", "bills"):
            make_topic(peer, topic)
            for _ in range(5):
                sent(peer, topic)
        pull(peer, "orders", 2, commit=2)
        commit = {"consumerGroup": GROUP, "topic": "bills", "queueId": "0", "commitOffset": "4"}
        assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, b"", **commit).code == codes.SUCCESS
        rows = decode_by_queue(peer.ask(Request.GET_CONSUME_STATS, consumerGroup=GROUP).body, "offsetTable")
        behind = {queue.topic: (row["brokerOffset"], row["consumerOffset"]) for queue, row in rows.items()}
        assert behind == {"orders": (5, 2), "bills": (5, 4)}
        one = peer.ask(Request.GET_CONSUME_STATS, consumerGroup=GROUP, topic="bills")
        assert [queue.topic for queue in decode_by_queue(one.body, "offsetTable")] == ["bills"]
        unknown = peer.ask(Request.GET_CONSUME_STATS, consumerGroup="strangers")
        assert unknown.code == codes.SUBSCRIPTION_GROUP_NOT_EXIST

"""Pops and pulls of one group: nobody is given what another member has."""

import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from postdate.clock import ManualClock
from postdate.server.sessions.pullers import IDLE_MS, SILENT_MS, UNCOMMITTED_MAX
from postdate.wire import codes
from postdate.wire.frame import Command
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    Gate,
    Peer,
    connected,
    got,
    heartbeat,
    make_topic,
    properties_of,
    pull,
    pull_command,
    read_all,
    sent,
)
from tests.support.server import Served, serving

RETRY = f"%RETRY%{GROUP}"
MINUTE_MS = 60_000


def pop_command(peer: Peer, **fields: Any) -> Command:
    asked: dict[str, Any] = {
        "consumerGroup": GROUP, "topic": "orders", "queueId": -1, "maxMsgNums": 32, "invisibleTime": MINUTE_MS,
    }  # fmt: skip
    return peer.command(Request.POP_MESSAGE, **(asked | fields))


def bodies_of(answer: Command) -> list[str]:
    assert answer.code in (codes.SUCCESS, codes.PULL_NOT_FOUND), answer
    return [record.body.decode() for record in decode_records(answer.body)]


def pop(peer: Peer, **fields: Any) -> list[str]:
    command = pop_command(peer, **fields)
    peer.write(command)
    return bodies_of(peer.answer_to(command.opaque))


def offset_command(peer: Peer, queue_id: int = 0) -> Command:
    return peer.command(Request.QUERY_CONSUMER_OFFSET, consumerGroup=GROUP, topic="orders", queueId=queue_id)


def offset(peer: Peer, queue_id: int = 0) -> int:
    command = offset_command(peer, queue_id)
    peer.write(command)
    return int(peer.answer_to(command.opaque).fields["offset"])


def commit(peer: Peer, offset: int, queue_id: int = 0, *, oneway: bool = False) -> None:
    fields: dict[str, Any] = {"consumerGroup": GROUP, "topic": "orders", "queueId": queue_id, "commitOffset": offset}
    if oneway:
        peer.write(peer.command(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **fields))
        peer.round_trip()
    else:
        assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, **fields).code == codes.SUCCESS


def pass_and_expire(served: Served, span_ms: int) -> None:
    served.pass_ms(span_ms)
    served.call(served.dispatcher.groups.expire)
    served.settle()


def join_puller(peer: Peer) -> None:
    """As an official client that pulls."""
    heartbeat(peer, "puller", {"orders": "*", RETRY: "*"})


def join_popper(peer: Peer) -> None:
    heartbeat(peer, "popper", {"orders": "*", RETRY: "*"}, sharesByTopic=True, consumeType="CONSUME_POP")


# ---------------------------------------------------------------------------------------------------- new messages


@pytest.mark.parametrize("how", ["query", "pull"])
def test_a_pop_takes_nothing_new_of_a_queue_that_a_member_pulls(tmp_path: Path, how: str) -> None:
    with (
        serving(tmp_path, ManualClock(T0)) as served,
        connected(served) as puller,
        connected(served) as popper,
    ):
        make_topic(popper, "orders", 2)
        join_puller(puller)
        if how == "query":
            assert offset(puller) == 0
        else:
            assert pull(puller, "orders").code == codes.PULL_NOT_FOUND
        for queue_id in range(2):
            sent(popper, "orders", f"q{queue_id}", queue_id=queue_id)
        assert pop(popper) == ["q1"]
        assert pop(popper, queueId=0) == []
        assert pull(puller, "orders", 0).bodies == ["q0"]


def test_a_pull_of_somebody_who_is_no_member_takes_no_queue(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "one")
        assert pull(peer, "orders").bodies == ["one"]
        assert offset(peer) == 0
        assert pop(peer) == ["one"]


def test_a_pop_that_waits_is_served_when_the_puller_leaves(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as popper:
        make_topic(popper, "orders")
        with connected(served) as puller:
            join_puller(puller)
            offset(puller)
            sent(popper, "orders", "one")
            command = pop_command(popper, pollTime=LONG_POLL_MS)
            popper.write(command)
            popper.expect_no_more()
        assert bodies_of(popper.answer_to(command.opaque)) == ["one"]


def test_a_puller_goes_on_behind_what_pops_have_taken_even_if_that_is_on_its_way(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with (
        serving(tmp_path, ManualClock(T0), disk=gate.disk) as served,
        connected(served) as puller,
        connected(served) as popper,
    ):
        for number in range(4):
            sent(popper, "orders", f"m{number}")
        join_puller(puller)
        gate.hold()
        popping = pop_command(popper, maxMsgNums=3)
        popper.write(popping)
        gate.wait_for_flush()
        query = offset_command(puller)
        puller.write(query)
        puller.expect_no_more()
        gate.open()
        assert puller.answer_to(query.opaque).fields["offset"] == "3"
        assert bodies_of(popper.answer_to(popping.opaque)) == ["m0", "m1", "m2"]
        assert pop(popper) == []
        assert pull(puller, "orders", 3).bodies == ["m3"]


@pytest.mark.parametrize("oneway", [False, True])
def test_pops_go_on_behind_what_a_puller_has_committed(tmp_path: Path, oneway: bool) -> None:
    clock, never_ms = ManualClock(T0), 10_000_000  # what is noted is not written meanwhile
    with serving(tmp_path, clock, offsets_interval_ms=never_ms) as served, connected(served) as popper:
        for number in range(4):
            sent(popper, "orders", f"m{number}")
        with connected(served) as puller:
            join_puller(puller)
            assert len(pull(puller, "orders", offset(puller)).bodies) == 4
            commit(puller, 2, oneway=oneway)
        command = pop_command(popper, maxMsgNums=1, pollTime=LONG_POLL_MS)
        popper.write(command)
        assert bodies_of(popper.answer_to(command.opaque)) == ["m2"]
        assert pop(popper) == ["m3"]
        served.call(served.dispatcher.groups.write_offsets)
        served.settle()
        assert served.broker.fold.groups.offset(GROUP, "orders", 0) == 4, "nothing old is written afterwards"
        with connected(served) as puller:
            join_puller(puller)
            assert offset(puller) == 4


# --------------------------------------------------------------------------------------------- the end of pulling


def test_a_queue_is_free_when_its_puller_has_committed_all_and_stopped_asking(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller, connected(served) as popper:
        sent(popper, "orders", "m0")
        join_puller(puller)
        assert pull(puller, "orders", offset(puller)).bodies == ["m0"]
        commit(puller, 1)
        sent(popper, "orders", "m1")
        pass_and_expire(served, IDLE_MS - 1)
        assert pop(popper) == []
        pass_and_expire(served, 1)
        assert pop(popper) == ["m1"]


def test_a_puller_that_lost_its_queue_keeps_the_last_pull_from_others_for_as_long(tmp_path: Path) -> None:
    """Official clients drop what a pull brings them for a queue that went to another member, and commit nothing."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller, connected(served) as popper:
        bodies = [f"m{number}" for number in range(UNCOMMITTED_MAX)]
        for body in bodies:
            sent(popper, "orders", body)
        join_puller(puller)
        assert pull(puller, "orders", offset(puller)).bodies == bodies
        pass_and_expire(served, IDLE_MS - 1)
        assert pop(popper) == []
        pass_and_expire(served, 1)
        assert pop(popper) == bodies


def test_a_puller_that_has_much_in_hand_has_more_time(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller, connected(served) as popper:
        bodies = [f"m{number}" for number in range(UNCOMMITTED_MAX + 1)]
        for body in bodies:
            sent(popper, "orders", body)
        join_puller(puller)
        assert pull(puller, "orders", offset(puller)).bodies == bodies[:UNCOMMITTED_MAX]
        assert pull(puller, "orders", UNCOMMITTED_MAX).bodies == bodies[UNCOMMITTED_MAX:]
        pass_and_expire(served, SILENT_MS - 1)
        join_puller(puller)
        assert pop(popper) == []
        pass_and_expire(served, 1)
        assert pop(popper) == bodies[:UNCOMMITTED_MAX], "they were given to nobody who said that they are done"


def test_a_held_pull_asks_all_the_time(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller, connected(served) as popper:
        make_topic(popper, "orders")
        join_puller(puller)
        command = pull_command(puller, "orders", 0, wait_ms=LONG_POLL_MS)
        puller.write(command)
        puller.round_trip()
        pass_and_expire(served, IDLE_MS + LONG_POLL_MS - 1)
        sent(popper, "orders", "m0")
        assert pop(popper) == []
        assert got(puller.answer_to(command.opaque)).bodies == ["m0"]


def test_a_puller_that_comes_back_learns_what_was_popped_meanwhile(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller, connected(served) as popper:
        make_topic(popper, "orders")
        join_puller(puller)
        assert pull(puller, "orders", offset(puller)).code == codes.PULL_NOT_FOUND
        pass_and_expire(served, IDLE_MS)
        sent(popper, "orders", "m0")
        assert pop(popper) == ["m0"]
        commit(puller, 0)
        sent(popper, "orders", "m1")
        moved = pull(puller, "orders", 0)
        assert (moved.code, moved.next_offset) == (codes.PULL_OFFSET_MOVED, 1)
        assert pull(puller, "orders", 1).bodies == ["m1"]
        assert pop(popper) == []
        assert served.broker.fold.groups.offset(GROUP, "orders", 0) == 1, "its old offset has moved nobody back"


def test_an_operator_may_move_a_group_that_pops_and_pulls_back(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller, connected(served) as operator:
        sent(operator, "orders", "m0")
        join_puller(puller)
        assert pop(operator) == ["m0"]
        commit(operator, 0)
        assert pull(puller, "orders", offset(puller)).bodies == ["m0"]


def test_a_narrower_member_that_pulls_does_not_keep_a_wider_one_from_popping(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as old, connected(served) as new:
        make_topic(new, "orders")
        heartbeat(old, "old", {"orders": "paid"}, sharesByTopic=True)
        command = pull_command(old, "orders", offset(old), tags="paid", wait_ms=LONG_POLL_MS)
        old.write(command)
        old.round_trip()
        heartbeat(new, "new", {"orders": "*"}, sharesByTopic=True, consumeType="CONSUME_POP")
        sent(new, "orders", "back", TAGS="refunded")
        assert pop(new) == ["back"]
        old.expect_no_more()


# ----------------------------------------------------------------------------------------- messages that came back


def test_what_came_back_goes_to_the_retry_topic_where_no_member_pops(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller:
        with connected(served) as popper:
            join_popper(popper)
            for number in range(3):
                sent(popper, "orders", f"m{number}")
            assert len(pop(popper)) == 3
            join_puller(puller)
            served.pass_ms(MINUTE_MS)
            served.settle()
            assert read_all(puller, RETRY) == [], "a member pops"
        wait_for_members(puller, 1)
        served.settle()
        retried = read_all(puller, RETRY)
        assert sorted(record.body.decode() for record in retried) == ["m0", "m1", "m2"]
        assert {record.reconsume_times for record in retried} == {1}
        assert properties_of(retried[0])["RETRY_TOPIC"] == "orders"
        assert not served.broker.fold.leases.by_key


def test_a_lease_that_ends_when_only_pullers_are_left_goes_to_the_retry_topic(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as puller:
        join_puller(puller)
        with connected(served) as popper:
            join_popper(popper)
            for number in range(100):
                sent(popper, "orders", f"m{number}")
            assert len(pop(popper, maxMsgNums=100)) == 100
        wait_for_members(puller, 1)
        served.settle()
        assert read_all(puller, RETRY) == [], "it may still be at work"
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert len(read_all(puller, RETRY)) == 100, "more than one step"


def test_what_came_back_waits_while_nobody_reads_the_topic(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as other:
        with connected(served) as popper:
            join_popper(popper)
            sent(popper, "orders", "m0")
            assert pop(popper) == ["m0"]
        heartbeat(other, "other", {"mails": "*"})
        wait_for_members(other, 1)
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert read_all(other, RETRY) == []
        with connected(served) as popper:
            join_popper(popper)
            assert pop(popper) == ["m0"]


def wait_for_members(peer: Peer, count: int) -> None:
    """Returns when a group has this many members: the end of a connection is noticed a little later."""
    while True:
        answer = peer.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=GROUP)
        if answer.body.count(b",") == count - 1:
            return


# ------------------------------------------------------------------------------------------------ random histories


def beat(pullers: list[Peer]) -> None:
    for number, peer in enumerate(pullers):
        heartbeat(peer, f"puller{number}", {"orders": "*"})


@pytest.mark.parametrize("seed", range(8))
def test_no_message_is_given_twice_by_pops_and_pulls_of_one_group(tmp_path: Path, seed: int) -> None:
    """Two members pop and two pull, and do as they like. Who pulls a queue asks for its offset first, goes on where the
    broker says, and commits what it was given. Nothing is lost, and nothing comes twice.
    """
    dice, seen, sent_count = random.Random(seed), Counter[str](), 0
    reading: dict[int, tuple[Peer, int]] = {}  # by queue id: who pulls it, and its offset
    with ExitStack() as stack:
        served = stack.enter_context(serving(tmp_path, ManualClock(T0)))
        poppers, pullers = ([stack.enter_context(connected(served)) for _ in range(2)] for _ in range(2))
        make_topic(poppers[0], "orders", 3)
        beat(pullers)
        for _ in range(150):
            act, queue_id = dice.randrange(10), dice.randrange(3)
            if act < 3:
                sent(poppers[0], "orders", f"m{sent_count}", queue_id=queue_id)
                sent_count += 1
            elif act < 6:
                wanted = {"queueId": dice.choice([-1, queue_id]), "maxMsgNums": dice.choice([1, 2, 8])}
                seen.update(pop(dice.choice(poppers), invisibleTime=60 * MINUTE_MS, **wanted))
            elif act < 7:
                puller = dice.choice(pullers)
                reading[queue_id] = (puller, offset(puller, queue_id))
            elif act < 9 and queue_id in reading:
                puller, at = reading[queue_id]
                answer = pull(puller, "orders", at, queue_id=queue_id)
                seen.update(answer.bodies)
                reading[queue_id] = (puller, answer.next_offset)
                if answer.bodies:
                    commit(puller, answer.next_offset, queue_id, oneway=dice.random() < 0.5)
            elif act == 9:
                pass_and_expire(served, dice.choice([1_000, IDLE_MS]))
                beat(pullers)
        for number in range(2):
            pullers[0].ask(Request.UNREGISTER_CLIENT, clientID=f"puller{number}", consumerGroup=GROUP)
        while found := pop(poppers[0], invisibleTime=60 * MINUTE_MS):
            seen.update(found)
        assert seen == Counter({f"m{number}": 1 for number in range(sent_count)})

"""Pops: messages given for a while, acknowledged, given again, and at last dead letters."""

import base64
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.message import TRIES_MAX
from postdate.storage.record import Record
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
    heartbeat,
    make_topic,
    properties_of,
    pull,
    read_all,
    read_bodies,
    send,
    sent,
)
from tests.support.server import serving

MINUTE_MS = 60_000
DEAD = f"%DLQ%{GROUP}"


class Taken(NamedTuple):
    """An answer to a pop."""

    code: int
    fields: dict[str, Any]
    records: list[Record]
    remark: str | None

    @property
    def bodies(self) -> list[str]:
        return [record.body.decode() for record in self.records]


def pop_command(peer: Peer, topic: str = "orders", *, queue_id: int = -1, wait_ms: int = 0, **fields: Any) -> Command:
    """A pop as the Java client writes it."""
    asked = {
        "consumerGroup": GROUP, "topic": topic, "queueId": queue_id, "maxMsgNums": 32, "invisibleTime": MINUTE_MS,
        "pollTime": wait_ms, "bornTime": T0, "initMode": 0, "expType": "TAG", "exp": "*", "order": False, **fields,
    }  # fmt: skip
    return peer.command(Request.POP_MESSAGE, **asked)


def taken(answer: Command) -> Taken:
    return Taken(answer.code, dict(answer.fields), decode_records(answer.body), answer.remark)


def pop(peer: Peer, topic: str = "orders", **how: Any) -> Taken:
    command = pop_command(peer, topic, **how)
    peer.write(command)
    return taken(peer.answer_to(command.opaque))


def handle_of(answer: Taken, record: Record) -> str:
    """POP_CK, as the Java client puts it together."""
    starts = dict(part.split(" ")[1:] for part in answer.fields["startOffsetInfo"].split(";"))
    start, queue_id = starts[str(record.queue_id)], record.queue_id
    popped, invisible, mark = (answer.fields[name] for name in ("popTime", "invisibleTime", "reviveQid"))
    return f"{start} {popped} {invisible} {mark} 0 postdate {queue_id} {record.queue_offset}"


def of_handle(answer: Taken, record: Record) -> dict[str, Any]:
    return {
        "consumerGroup": GROUP, "topic": record.topic, "queueId": record.queue_id, "offset": record.queue_offset,
        "extraInfo": handle_of(answer, record),
    }  # fmt: skip


def acknowledge(peer: Peer, answer: Taken, record: Record) -> int:
    return peer.ask(Request.ACK_MESSAGE, **of_handle(answer, record)).code


def change(peer: Peer, answer: Taken, record: Record, invisible_ms: int, **fields: Any) -> Command:
    return peer.ask(
        Request.CHANGE_MESSAGE_INVISIBLETIME, **(of_handle(answer, record) | {"invisibleTime": invisible_ms} | fields)
    )


# --------------------------------------------------------------------------------------------- given, acknowledged


def test_a_pop_gives_what_is_there_with_places_and_times(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        for number in range(3):
            sent(peer, "orders", f"m{number}", queue_id=number % 2)
        answer = pop(peer)
        assert answer.code == codes.SUCCESS
        assert sorted(answer.bodies) == ["m0", "m1", "m2"]
        fields = answer.fields
        assert (fields["popTime"], fields["invisibleTime"]) == (str(T0), str(MINUTE_MS))
        assert (fields["reviveQid"], fields["restNum"]) == ("0", "0")
        assert sorted(fields["startOffsetInfo"].split(";")) == ["0 0 0", "0 1 0"]
        assert sorted(fields["msgOffsetInfo"].split(";")) == ["0 0 0,1", "0 1 0"]
        assert {record.reconsume_times for record in answer.records} == {0}
        assert pop(peer).code == codes.PULL_NOT_FOUND


def test_a_held_pop_of_a_member_that_leaves_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 1)
        heartbeat(peer, "c1", {"orders": "*"})
        held = pop_command(peer, wait_ms=MINUTE_MS)
        peer.write(held)
        peer.ask(Request.UNREGISTER_CLIENT, clientID="c1", consumerGroup=GROUP)
        assert peer.answer_to(held.opaque).code == codes.POLLING_TIMEOUT


def test_what_is_acknowledged_is_never_given_again(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "done")
        answer = pop(peer)
        assert acknowledge(peer, answer, answer.records[0]) == codes.SUCCESS
        assert acknowledge(peer, answer, answer.records[0]) == codes.NO_MESSAGE
        served.pass_ms(2 * MINUTE_MS)
        served.settle()
        assert pop(peer).code == codes.PULL_NOT_FOUND


def test_the_acknowledgements_of_a_read_are_one_record_and_are_answered_each(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for number in range(4):
            sent(peer, "orders", f"m{number}", queue_id=0)
        answer = pop(peer, queue_id=0)
        fields = [of_handle(answer, record) for record in answer.records]
        fields[1]["offset"] = 99
        commands = [peer.command(Request.ACK_MESSAGE, **each) for each in fields]
        again = pop_command(peer)
        before = served.broker.fold.position
        peer.write(*commands, again)
        found = [peer.answer_to(command.opaque).code for command in commands]
        assert found == [codes.SUCCESS, codes.NO_MESSAGE, codes.SUCCESS, codes.SUCCESS]
        assert peer.answer_to(again.opaque).code == codes.PULL_NOT_FOUND
        written = served.broker.fold.position - before
        assert written < 700, f"one record of four acknowledgements, {written} bytes"
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert pop(peer).bodies == ["m1"]


def test_what_is_not_acknowledged_is_given_again_when_its_time_is_over_and_not_before(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        first = pop(peer)
        served.pass_ms(MINUTE_MS - 1)
        served.settle()
        assert pop(peer).code == codes.PULL_NOT_FOUND
        served.pass_ms(1)
        served.settle()
        again = pop(peer)
        (record,) = again.records
        assert (record.body, record.topic, record.reconsume_times) == (b"work", "orders", 1)
        assert (record.queue_id, record.queue_offset) == (0, first.records[0].queue_offset)
        assert acknowledge(peer, first, first.records[0]) == codes.NO_MESSAGE, "its first handle is not good any more"
        assert acknowledge(peer, again, record) == codes.SUCCESS


def test_a_late_acknowledgement_counts_while_nobody_else_was_given_the_message(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "slow")
        answer = pop(peer)
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert acknowledge(peer, answer, answer.records[0]) == codes.SUCCESS
        assert pop(peer).code == codes.PULL_NOT_FOUND


def test_two_groups_are_given_everything_each(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "for all")
        assert pop(peer).bodies == ["for all"]
        assert pop(peer, consumerGroup="others").bodies == ["for all"]
        assert pop(peer).code == codes.PULL_NOT_FOUND


def test_two_pops_in_one_read_are_given_different_messages(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, ManualClock(T0), disk=gate.disk) as served, connected(served) as peer:
        for number in range(4):
            sent(peer, "orders", f"m{number}")
        commands = [pop_command(peer, maxMsgNums=2, queue_id=0) for _ in range(3)]
        gate.hold()
        peer.write(*commands)
        gate.wait_for_flush()
        gate.open()
        answers = [taken(peer.answer_to(command.opaque)) for command in commands]
        assert [answer.bodies for answer in answers] == [["m0", "m1"], ["m2", "m3"], []]
        assert [answer.code for answer in answers] == [codes.SUCCESS, codes.SUCCESS, codes.PULL_NOT_FOUND]


def test_pops_look_at_the_queues_in_turn(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        for queue_id in range(4):
            for number in range(4):
                sent(peer, "orders", f"q{queue_id}m{number}", queue_id=queue_id)
        firsts = {pop(peer, maxMsgNums=1).records[0].queue_id for _ in range(4)}
        assert firsts == {0, 1, 2, 3}


def test_tags_that_nobody_wants_are_passed_over(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for number in range(3):
            sent(peer, "orders", f"red{number}", TAGS="red")
        assert pop(peer, exp="blue").code == codes.PULL_NOT_FOUND
        sent(peer, "orders", "blue", TAGS="blue")
        sent(peer, "orders", "red3", TAGS="red")
        assert pop(peer, exp="blue || green").bodies == ["blue"]
        assert served.broker.fold.groups.offset(GROUP, "orders", 0) == 5
        assert pop(peer, exp="blue").code == codes.PULL_NOT_FOUND


def test_a_new_group_begins_where_it_asks_to(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "old")
        assert pop(peer, initMode=1).code == codes.PULL_NOT_FOUND
        assert pop(peer, initMode=0).bodies == ["old"]


def test_a_group_that_has_pulled_goes_on_popping_behind_its_offset(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for number in range(3):
            sent(peer, "orders", f"m{number}")
        fields: dict[str, Any] = {"consumerGroup": GROUP, "topic": "orders", "queueId": 0, "commitOffset": 2}
        assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, **fields).code == codes.SUCCESS
        assert pop(peer).bodies == ["m2"]


def test_an_offset_that_was_set_back_is_where_the_next_pop_begins(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for number in range(2):
            sent(peer, "orders", f"m{number}")
        answer = pop(peer)
        for record in answer.records:
            assert acknowledge(peer, answer, record) == codes.SUCCESS
        fields: dict[str, Any] = {"consumerGroup": GROUP, "topic": "orders", "queueId": 0, "commitOffset": 1}
        assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, **fields).code == codes.SUCCESS
        assert pop(peer).bodies == ["m1"]


# ------------------------------------------------------------------------------------------------------- waiting


def test_a_pop_waits_for_a_message_and_is_given_it(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as producer:
        make_topic(peer, "orders")
        command = pop_command(peer, wait_ms=LONG_POLL_MS)
        peer.write(command)
        peer.expect_no_more()
        sent(producer, "orders", "at last")
        assert taken(peer.answer_to(command.opaque)).bodies == ["at last"]


def test_a_pop_waits_for_a_timed_message_until_it_is_due(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "later", TIMER_DELAY_MS=1_000)
        command = pop_command(peer, wait_ms=LONG_POLL_MS)
        peer.write(command)
        served.pass_ms(999)
        served.settle()
        peer.expect_no_more()
        served.pass_ms(1)
        assert taken(peer.answer_to(command.opaque)).bodies == ["later"]


def test_a_pop_waits_for_a_lease_to_end(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        pop(peer, invisibleTime=5_000)
        command = pop_command(peer, wait_ms=LONG_POLL_MS)
        peer.write(command)
        served.pass_ms(4_999)
        served.settle()
        peer.expect_no_more()
        served.pass_ms(1)
        assert taken(peer.answer_to(command.opaque)).records[0].reconsume_times == 1


def test_of_several_pops_that_wait_the_first_is_given_the_message(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        commands = [pop_command(peer, wait_ms=LONG_POLL_MS) for _ in range(3)]
        peer.write(*commands)
        sent(peer, "orders", "one")
        assert taken(peer.answer_to(commands[0].opaque)).bodies == ["one"]
        peer.expect_no_more()
        assert served.call(lambda: served.dispatcher.pulls.held_count) == 2


def test_a_pop_whose_time_is_over_is_told_so(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = pop(peer, wait_ms=20)
        assert answer.code == codes.POLLING_TIMEOUT
        assert answer.fields["restNum"] == "0", "the Java client insists on the fields"
        assert served.call(lambda: served.dispatcher.pulls.held_count) == 0


def test_pops_that_wait_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), held_pulls_max=1) as served, connected(served) as peer:
        make_topic(peer, "orders")
        peer.write(pop_command(peer, wait_ms=LONG_POLL_MS))
        answer = pop(peer, wait_ms=LONG_POLL_MS)
        assert answer.code == codes.POLLING_FULL
        assert "held_pulls_max" in str(answer.remark)


def test_a_connection_that_ends_leaves_no_pop_behind(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        with connected(served) as other:
            other.write(pop_command(other, wait_ms=LONG_POLL_MS))
            other.round_trip()
            assert served.call(lambda: served.dispatcher.pulls.held_count) == 1
            other.socket.shutdown(2)
            other.expect_closed()
        peer.round_trip()
        assert served.call(lambda: served.dispatcher.pulls.held_count) == 0
        sent(peer, "orders", "for the living")
        assert pop(peer).bodies == ["for the living"]


def test_in_async_mode_a_pop_is_answered_without_waiting_for_the_disk(tmp_path: Path) -> None:
    how: dict[str, Any] = {"flush": "async", "flush_interval_ms": 60_000}
    with serving(tmp_path, ManualClock(T0), **how) as served, connected(served) as peer:
        make_topic(peer, "orders")
        command = pop_command(peer, wait_ms=LONG_POLL_MS)
        peer.write(command)
        sent(peer, "orders", "soon")
        answer = taken(peer.answer_to(command.opaque))
        assert answer.bodies == ["soon"]
        assert acknowledge(peer, answer, answer.records[0]) == codes.SUCCESS


# ----------------------------------------------------------------------------------------------- invisible times


def test_a_message_comes_again_when_its_changed_time_is_over(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "retry me")
        answer = pop(peer)
        served.pass_ms(10)
        changed = change(peer, answer, answer.records[0], 2_000)
        assert (changed.code, changed.fields["popTime"]) == (codes.SUCCESS, str(T0 + 10))
        assert (changed.fields["invisibleTime"], changed.fields["reviveQid"]) == ("2000", "0")
        served.pass_ms(1_999)
        served.settle()
        assert pop(peer).code == codes.PULL_NOT_FOUND
        served.pass_ms(1)
        served.settle()
        assert pop(peer).records[0].reconsume_times == 1
        assert change(peer, answer, answer.records[0], 2_000).code == codes.NO_MESSAGE


def test_a_longer_time_keeps_a_message_with_who_has_it(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), lead_ms=1_000) as served, connected(served) as peer:
        sent(peer, "orders", "long work")
        answer = pop(peer, invisibleTime=5_000)
        changed = change(peer, answer, answer.records[0], 3_600_000)
        served.pass_ms(3_599_999)
        served.settle()
        assert pop(peer).code == codes.PULL_NOT_FOUND
        fields = of_handle(answer, answer.records[0])
        fields["extraInfo"] = fields["extraInfo"].replace(answer.fields["popTime"], changed.fields["popTime"])
        assert peer.ask(Request.ACK_MESSAGE, **fields).code == codes.SUCCESS


@pytest.mark.parametrize("invisible_ms", [0, -1, 10**12])
def test_an_invisible_time_out_of_bounds_is_refused(tmp_path: Path, invisible_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "here")
        refused = pop(peer, invisibleTime=invisible_ms)
        assert refused.code == codes.INVALID_PARAMETER
        assert "invisible_ms_max" in str(refused.remark)
        answer = pop(peer)
        assert change(peer, answer, answer.records[0], invisible_ms).code == codes.INVALID_PARAMETER


# ------------------------------------------------------------------------------------------ failed, or not begun


def failed(peer: Peer, answer: Taken, reason: str, delay_ms: int) -> tuple[str, str]:
    """The consumer of the only message has failed; returns what becomes of it, and after how long."""
    said = change(peer, answer, answer.records[0], delay_ms, reason=reason)
    assert said.code == codes.SUCCESS, said
    return said.fields["outcome"], said.fields["invisibleTime"]


def test_a_pop_names_how_often_its_messages_may_come_again(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        for times in range(3):
            answer = pop(peer, maxReconsumeTimes=2)
            assert answer.records[0].reconsume_times == times
            served.pass_ms(MINUTE_MS)
            served.settle()
        assert pop(peer).code == codes.PULL_NOT_FOUND
        (letter,) = read_all(peer, DEAD)
        assert (letter.body, letter.reconsume_times) == (b"work", 3)


def test_a_failed_message_comes_again_after_the_delay_of_its_try_and_is_a_dead_letter_at_once_at_last(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        assert failed(peer, pop(peer, maxReconsumeTimes=2), "ValueError: first", -1) == ("again", "10000")
        served.pass_ms(9_999)
        served.settle()
        assert pop(peer).code == codes.PULL_NOT_FOUND
        served.pass_ms(1)
        served.settle()
        assert failed(peer, pop(peer, maxReconsumeTimes=2), "ValueError: second", -1) == ("again", "30000")
        served.pass_ms(30_000)
        served.settle()
        assert failed(peer, pop(peer, maxReconsumeTimes=2), "ValueError: \x01third\x02", 5_000) == ("dead", "0")
        served.settle()
        (letter,) = read_all(peer, DEAD)
        properties = properties_of(letter)
        assert letter.reconsume_times == 3
        assert properties["POSTDATE_REASON"] == "ValueError:  third"
        assert properties["POSTDATE_ORIGIN"] == "orders/0/0"
        assert properties["RETRY_TOPIC"] == "orders"
        assert "ORIGIN_MESSAGE_ID" in properties


def test_a_failed_message_may_come_again_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        answer = pop(peer)
        waiting = pop_command(peer, wait_ms=LONG_POLL_MS)
        peer.write(waiting)
        assert failed(peer, answer, "x" * 2_000, 0) == ("again", "0")
        assert taken(peer.answer_to(waiting.opaque)).records[0].reconsume_times == 1, "without a tick of the clock"
        assert served.broker.fold.leases.by_key[GROUP, 18, 0].reason == "x" * 1_000


def test_more_time_keeps_the_reason_and_a_restart_does_too(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        failed(peer, pop(peer, maxReconsumeTimes=1), "why", 0)
        answer = pop(peer, maxReconsumeTimes=1)
        assert change(peer, answer, answer.records[0], 2 * MINUTE_MS).code == codes.SUCCESS
    with serving(tmp_path, clock) as served, connected(served) as peer:
        served.pass_ms(2 * MINUTE_MS)
        served.settle()
        (letter,) = read_all(peer, DEAD)
        assert properties_of(letter)["POSTDATE_REASON"] == "why"


def test_a_message_that_was_not_begun_is_given_to_another_and_does_not_count(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        for _ in range(3):
            answer = pop(peer, maxReconsumeTimes=0)
            assert answer.records[0].reconsume_times == 0
            assert change(peer, answer, answer.records[0], 0, notBegun=True).code == codes.SUCCESS
            assert change(peer, answer, answer.records[0], 0, notBegun=True).code == codes.NO_MESSAGE
        answer = pop(peer, maxReconsumeTimes=0)
        assert failed(peer, answer, "now it was tried", -1) == ("dead", "0")
        served.settle()
        assert [letter.reconsume_times for letter in read_all(peer, DEAD)] == [1]


def test_a_pop_of_what_came_back_takes_nothing_new(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "old")
        answer = pop(peer)
        sent(peer, "orders", "new")
        assert pop(peer, readyOnly=True).code == codes.PULL_NOT_FOUND
        failed(peer, answer, "why", 0)
        served.settle()
        assert pop(peer, readyOnly=True).bodies == ["old"]
        assert pop(peer).bodies == ["new"]


def test_tries_before_a_message_was_stored_count(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, f"%RETRY%{GROUP}", "sent back", fields={"j": 2})
        answer = pop(peer, f"%RETRY%{GROUP}", maxReconsumeTimes=3)
        assert failed(peer, answer, "third", 0) == ("again", "0")
        served.settle()
        answer = pop(peer, f"%RETRY%{GROUP}", maxReconsumeTimes=3)
        assert answer.records[0].reconsume_times == 3
        assert failed(peer, answer, "fourth", 0) == ("dead", "0")
        served.settle()
        assert [letter.reconsume_times for letter in read_all(peer, DEAD)] == [4]


def test_no_number_of_tries_that_a_client_names_keeps_a_message_from_its_readers(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for times in (2**31 - 1, -1):
            assert send(peer, "orders", "no", fields={"j": times}).code == codes.MESSAGE_ILLEGAL
        sent(peer, "orders", "work", fields={"j": TRIES_MAX})
        for _ in range(2):
            assert [record.reconsume_times for record in pop(peer, maxReconsumeTimes=2**30).records] == [TRIES_MAX]
            served.pass_ms(MINUTE_MS)
            served.settle()
        assert pop(peer, consumerGroup="strict", maxReconsumeTimes=1).bodies == ["work"]
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert [letter.reconsume_times for letter in read_all(peer, "%DLQ%strict")] == [TRIES_MAX]


# -------------------------------------------------------------------------------------- pulled messages that fail


def test_a_pulled_message_may_have_been_tried_as_often_as_a_client_says(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        (record,) = pull(peer, "orders").records
        assert outcome(retry(peer, record, reconsumeTimes=2**40, maxReconsumeTimes=2**60)) == ("again", "7200000")
        served.pass_ms(7_200_000)
        served.settle()
        assert [again.reconsume_times for again in pop(peer, readyOnly=True).records] == [TRIES_MAX]


def retry(peer: Peer, record: Record, **fields: Any) -> Command:
    asked = {
        "consumerGroup": GROUP, "topic": record.topic, "queueId": record.queue_id, "offset": record.queue_offset,
        "reconsumeTimes": record.reconsume_times, "reason": "why", **fields,
    }  # fmt: skip
    return peer.ask(Request.RETRY_MESSAGE, **asked)


def outcome(answer: Command) -> tuple[str, str]:
    assert answer.code == codes.SUCCESS, answer
    return answer.fields["outcome"], answer.fields["delay"]


def test_a_pulled_message_that_failed_comes_again_in_place_by_a_pop(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        sent(peer, "orders", "other")
        record, _ = pull(peer, "orders").records
        end = served.broker.log.end
        assert outcome(retry(peer, record, maxReconsumeTimes=1)) == ("again", "10000")
        assert served.broker.log.end - end < 1_000, "no copy is made"
        assert served.broker.fold.groups.offset(GROUP, "orders", 0) is None, "the consumer commits on its own"
        assert pop(peer, readyOnly=True).code == codes.PULL_NOT_FOUND
        served.pass_ms(10_000)
        served.settle()
        answer = pop(peer, readyOnly=True, maxReconsumeTimes=1)
        assert [(again.queue_offset, again.reconsume_times) for again in answer.records] == [(0, 1)]
        assert failed(peer, answer, "twice", -1) == ("dead", "0")
        served.settle()
        (letter,) = read_all(peer, DEAD)
        assert (letter.body, letter.reconsume_times, properties_of(letter)["POSTDATE_REASON"]) == (b"work", 2, "twice")


def test_pops_and_retries_take_the_delays_of_their_group(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        body = orjson.dumps({"groupName": GROUP, "retryDelaysMs": [2_000, 60_000], "retryMaxTimes": 2})
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body).code == codes.SUCCESS
        sent(peer, "orders", "work")
        (record,) = pull(peer, "orders").records
        assert outcome(retry(peer, record)) == ("again", "2000")
        served.pass_ms(2_000)
        served.settle()
        assert failed(peer, pop(peer), "second", -1) == ("again", "60000")
        served.pass_ms(60_000)
        served.settle()
        assert failed(peer, pop(peer), "third", -1) == ("dead", "0")


def test_a_pulled_message_that_may_not_come_again_is_a_dead_letter_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        (record,) = pull(peer, "orders").records
        assert outcome(retry(peer, record, maxReconsumeTimes=0, delay=5_000)) == ("dead", "0")
        served.settle()
        (letter,) = read_all(peer, DEAD)
        assert (letter.reconsume_times, properties_of(letter)["POSTDATE_ORIGIN"]) == (1, "orders/0/0")
        assert not served.broker.fold.leases.by_key


def test_a_retry_that_is_asked_for_twice_counts_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        (record,) = pull(peer, "orders").records
        for _ in range(2):
            assert outcome(retry(peer, record, delay=1_000)) == ("again", "1000")
        served.pass_ms(1_000)
        served.settle()
        assert [again.reconsume_times for again in pop(peer).records] == [1]


@pytest.mark.parametrize("changes", [{"offset": 1}, {"offset": -1}, {"queueId": 9}, {"delay": 10**12}])
def test_a_retry_of_nothing_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work")
        (record,) = pull(peer, "orders").records
        assert retry(peer, record, **changes).code == codes.INVALID_PARAMETER
        assert not served.broker.fold.leases.by_key


def test_retries_are_bounded_as_pops_are(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), group_popped_max=1) as served, connected(served) as peer:
        sent(peer, "orders", "a")
        sent(peer, "orders", "b")
        first, second = pull(peer, "orders").records
        assert outcome(retry(peer, first)) == ("again", "10000")
        assert outcome(retry(peer, first)) == ("again", "10000")
        refused = retry(peer, second)
        assert (refused.code, "group_popped_max" in str(refused.remark)) == (codes.POLLING_FULL, True)


# ----------------------------------------------------------------------------------------------- batches of acks


def batch_ack(peer: Peer, acks: list[dict[str, Any]]) -> Command:
    return peer.ask(Request.BATCH_ACK_MESSAGE, orjson.dumps({"brokerName": "postdate", "acks": acks}))


def ack_entry(answer: Taken, bits: int, *, queue_id: int = 0, start: int = 0) -> dict[str, Any]:
    return {
        "c": GROUP, "t": "orders", "r": "0", "so": start, "q": queue_id, "rq": 0, "pt": int(answer.fields["popTime"]),
        "it": MINUTE_MS, "b": base64.b64encode(bits.to_bytes(4, "little")).decode(),
    }  # fmt: skip


def test_a_batch_acknowledges_the_messages_whose_bits_are_set(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for number in range(12):
            sent(peer, "orders", f"m{number}")
        answer = pop(peer)
        assert batch_ack(peer, [ack_entry(answer, 0b1011_1111_1101)]).code == codes.SUCCESS
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert pop(peer).bodies == ["m1", "m10"]


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[]", b'{"acks":[{}]}', b'{"acks":[{"c":"g","t":"orders","q":0,"so":0,"pt":1,"b":"?"}]}', b"{}"],
)
def test_a_batch_that_cannot_be_read_is_refused(tmp_path: Path, body: bytes) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert peer.ask(Request.BATCH_ACK_MESSAGE, body).code == codes.INVALID_PARAMETER


# ---------------------------------------------------------------------------------------------------- dead letters


def test_past_the_limit_a_message_is_a_dead_letter(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), retry_times_max=2) as served, connected(served) as peer:
        sent(peer, "orders", "poison", KEYS="k1", TIMER_DELAY_MS=1)
        served.pass_ms(1)
        served.settle()
        for times in range(3):
            (record,) = pop(peer).records
            assert record.reconsume_times == times
            served.pass_ms(MINUTE_MS)
            served.settle()
        assert pop(peer).code == codes.PULL_NOT_FOUND
        (letter,) = read_all(peer, DEAD)
        assert (letter.body, letter.topic, letter.reconsume_times) == (b"poison", DEAD, 3)
        properties = properties_of(letter)
        assert (properties["RETRY_TOPIC"], properties["KEYS"]) == ("orders", "k1")
        assert "TIMER_DELAY_MS" not in properties
        assert not served.broker.fold.leases.by_key


def test_the_limit_of_the_group_counts(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        body = orjson.dumps({"groupName": GROUP, "retryMaxTimes": 0})
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body).code == codes.SUCCESS
        sent(peer, "orders", "once")
        pop(peer, invisibleTime=1_000)
        served.pass_ms(1_000)
        served.settle()
        assert read_bodies(peer, DEAD) == ["once"]


def test_an_acknowledgement_that_comes_before_the_burial_counts(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, ManualClock(T0), disk=gate.disk, retry_times_max=0) as served, connected(served) as peer:
        sent(peer, "orders", "just in time")
        answer = pop(peer)
        assert acknowledge(peer, answer, answer.records[0]) == codes.SUCCESS
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert served.broker.fold.topics.by_name.get(DEAD) is None


def test_a_crash_before_the_burial_buries_it_after_the_restart(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock, retry_times_max=0) as served, connected(served) as peer:
        sent(peer, "orders", "poison")
        pop(peer)
        served.kill()
    clock.pass_ms(MINUTE_MS)
    with serving(tmp_path, clock, retry_times_max=0) as served, connected(served) as peer:
        served.settle()
        assert read_bodies(peer, DEAD) == ["poison"]


@pytest.mark.parametrize("is_new_group_first", [True, False])
def test_a_group_without_room_for_its_dead_letters_stops_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_new_group_first: bool
) -> None:
    """Before, the limit of topics was an error in the middle of the pulse: nobody got the answers of that flush."""
    with serving(tmp_path, ManualClock(T0), retry_times_max=0, topics_max=5) as served, connected(served) as peer:

        def fail(*groups: str) -> None:
            for group in groups:
                assert pop(peer, consumerGroup=group).records
            served.pass_ms(MINUTE_MS)
            served.settle()

        sent(peer, "orders", "poison")
        fail("known")
        made = [name for name in "abcdef" if ask_for_topic(peer, name) == codes.SUCCESS]
        sent(peer, "orders", "venom")
        fail(*(("new", "known") if is_new_group_first else ("known", "new")))
        served.call(served.dispatcher.pops.tick)
        served.settle()
        assert read_bodies(peer, "%DLQ%known") == ["poison", "venom"]
        sent(peer, "orders", "others are served")
        assert pop(peer).bodies == ["poison", "venom", "others are served"]
        assert served.call(lambda: {key[0] for key in served.broker.fold.leases.spent}) == {"new"}
        assert [each.getMessage() for each in caplog.records if each.levelname != "INFO"] == [
            "group new: messages cannot leave their queue: topics_max: there are 5 topics, the limit; delete some first"
        ]
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic=made[0]).code == codes.SUCCESS
        served.call(served.dispatcher.pops.tick)
        served.settle()
        assert read_bodies(peer, "%DLQ%new") == ["poison", "venom"]


def ask_for_topic(peer: Peer, name: str) -> int:
    return peer.ask(Request.UPDATE_AND_CREATE_TOPIC, topic=name, readQueueNums=1, writeQueueNums=1, perm=6).code


# ------------------------------------------------------------------------------------------------------ in order


def test_in_order_a_queue_gives_nothing_while_a_message_of_it_is_away(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        for number in range(3):
            sent(peer, "orders", f"a{number}", queue_id=0)
        sent(peer, "orders", "b0", queue_id=1)
        first = pop(peer, queue_id=0, maxMsgNums=2, order=True)
        assert first.bodies == ["a0", "a1"]
        assert first.fields["reviveQid"] == "999"
        assert pop(peer, maxMsgNums=2, order=True).bodies == ["b0"]
        assert pop(peer, order=True).code == codes.PULL_NOT_FOUND
        assert acknowledge(peer, first, first.records[0]) == codes.SUCCESS
        assert pop(peer, queue_id=0, order=True).code == codes.PULL_NOT_FOUND
        served.pass_ms(MINUTE_MS)
        served.settle()
        again = pop(peer, queue_id=0, order=True)
        assert again.bodies == ["a1", "a2"], "by offset: what came back, then what is new"
        assert again.fields["orderCountInfo"] == "0 qo0%1 1;0 qo0%2 0"


# -------------------------------------------------------------------------------------------------------- limits


def test_a_group_that_acknowledges_nothing_is_stopped(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), group_popped_max=3) as served, connected(served) as peer:
        for number in range(5):
            sent(peer, "orders", f"m{number}")
        first = pop(peer)
        assert first.bodies == ["m0", "m1", "m2"]
        refused = pop(peer, wait_ms=LONG_POLL_MS)
        assert refused.code == codes.POLLING_FULL
        assert "group_popped_max" in str(refused.remark)
        assert pop(peer, consumerGroup="others").bodies == ["m0", "m1", "m2"], "it is not theirs"
        assert acknowledge(peer, first, first.records[1]) == codes.SUCCESS
        assert pop(peer).bodies == ["m3"]
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert pop(peer).bodies == ["m0", "m2", "m3"], "what comes back is counted already"


def test_leases_and_the_wheel_share_one_bound(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), wheel_entries_max=2) as served, connected(served) as peer:
        sent(peer, "orders", "later", TIMER_DELAY_MS=1_000)
        for number in range(2):
            sent(peer, "orders", f"m{number}")
        assert pop(peer).bodies == ["m0"]
        assert "wheel_entries_max" in str(pop(peer).remark)


# ------------------------------------------------------------------------------------------------- bad requests


def test_bad_handles_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "here")
        answer = pop(peer)
        good = of_handle(answer, answer.records[0])
        for wrong, code in (
            ({"extraInfo": "nonsense"}, codes.INVALID_PARAMETER),
            ({"extraInfo": "0 x 1 0 0 postdate 0 0"}, codes.INVALID_PARAMETER),
            ({"extraInfo": f"0 {T0 - 1} 1 0 0 postdate 0 0"}, codes.NO_MESSAGE),
            ({"offset": 17}, codes.NO_MESSAGE),
            ({"queueId": 99}, codes.INVALID_PARAMETER),
            ({"topic": "unknown"}, codes.TOPIC_NOT_EXIST),
            ({"consumerGroup": "strangers"}, codes.NO_MESSAGE),
        ):
            assert peer.ask(Request.ACK_MESSAGE, **(good | wrong)).code == code, wrong
        assert acknowledge(peer, answer, answer.records[0]) == codes.SUCCESS


def test_bad_pops_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert pop(peer, topic="unknown").code == codes.TOPIC_NOT_EXIST
        assert pop(peer, queue_id=7).code == codes.INVALID_PARAMETER
        assert pop(peer, maxMsgNums=0).code == codes.INVALID_PARAMETER
        assert pop(peer, expType="SQL92", exp="a > 1").code == codes.INVALID_PARAMETER
        make_topic(peer, "orders", perm=2)
        assert pop(peer).code == codes.NO_PERMISSION


# ------------------------------------------------------------------------------------- restarts, deleted things


def test_leases_survive_a_crash(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        for number in range(3):
            sent(peer, "orders", f"m{number}")
        before = pop(peer)
        assert acknowledge(peer, before, before.records[0]) == codes.SUCCESS
        served.kill()
    with serving(tmp_path, clock) as served, connected(served) as peer:
        assert pop(peer).code == codes.PULL_NOT_FOUND
        assert acknowledge(peer, before, before.records[1]) == codes.SUCCESS
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert [(r.body, r.reconsume_times) for r in pop(peer).records] == [(b"m2", 1)]


def test_leases_survive_a_polite_stop(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        for number in range(2):
            sent(peer, "orders", f"m{number}")
        pop(peer, maxMsgNums=1, invisibleTime=1_000)
        served.pass_ms(1_000)
        served.settle()
        pop(peer, maxMsgNums=1, queue_id=0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        assert pop(peer).bodies == ["m1"]
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert sorted((r.body, r.reconsume_times) for r in pop(peer).records) == [(b"m0", 2), (b"m1", 1)]


def test_deleting_a_topic_or_a_group_forgets_its_leases(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for topic in ("orders", "letters"):
            sent(peer, topic, topic)
            pop(peer, topic)
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders").code == codes.SUCCESS
        assert len(served.broker.fold.leases.by_key) == 1
        assert peer.ask(Request.DELETE_SUBSCRIPTIONGROUP, groupName=GROUP).code == codes.SUCCESS
        leases = served.broker.fold.leases
        assert not any((leases.by_key, leases.ready, leases.spent, leases.counts, leases.leased))
        served.pass_ms(MINUTE_MS)
        served.settle()
        assert pop(peer, "letters").bodies == ["letters"], "a new group of that name begins anew"


def test_a_topic_deleted_while_a_pop_is_on_its_way_gives_nothing(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, ManualClock(T0), disk=gate.disk) as served, connected(served) as peer:
        sent(peer, "orders", "gone")
        command = pop_command(peer)
        peer.write(command, peer.command(Request.DELETE_TOPIC_IN_BROKER, topic="orders"))
        answer = taken(peer.answer_to(command.opaque))
        assert answer.code in (codes.SUCCESS, codes.PULL_NOT_FOUND)
        peer.round_trip()
        assert not served.broker.fold.leases.by_key


# ----------------------------------------------------------------------------------------------------- assignments


def assignment(peer: Peer, topic: str, client_id: str = "c1", **fields: Any) -> Command:
    asked = {
        "topic": topic, "consumerGroup": GROUP, "clientId": client_id, "messageModel": "CLUSTERING",
        "strategyName": "AVG", **fields,
    }  # fmt: skip
    return peer.ask(Request.QUERY_ASSIGNMENT, orjson.dumps(asked))


def assigned(answer: Command) -> list[tuple[int, str]]:
    assert answer.code == codes.SUCCESS, answer
    rows = orjson.loads(answer.body)["messageQueueAssignments"]
    return [(row["messageQueue"]["queueId"], row["mode"]) for row in rows]


def test_consumers_are_told_to_pop_from_all_queues(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        heartbeat(peer, "c1", {"orders": "*"})
        answer = assignment(peer, "orders")
        assert assigned(answer) == [(-1, "POP")]
        row = orjson.loads(answer.body)["messageQueueAssignments"][0]
        assert row["messageQueue"] == {"brokerName": "postdate", "queueId": -1, "topic": "orders"}


def test_retry_topics_and_broadcasting_are_pulled(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        heartbeat(peer, "c1", {"orders": "*"})
        assert assigned(assignment(peer, f"%RETRY%{GROUP}")) == [(0, "PULL")]
        assert assigned(assignment(peer, "orders", messageModel="BROADCASTING")) == [(0, "PULL"), (1, "PULL")]


def test_an_operator_sets_a_group_to_pulling_and_back(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        for client_id in ("c1", "c2"):
            heartbeat(peer, client_id, {"orders": "*"})
        body = {"topic": "orders", "consumerGroup": GROUP, "mode": "PULL", "popShareQueueNum": 0}
        assert peer.ask(Request.SET_MESSAGE_REQUEST_MODE, orjson.dumps(body)).code == codes.SUCCESS
        group = orjson.dumps({"groupName": GROUP, "retryMaxTimes": 3})
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, group).code == codes.SUCCESS
        assert assigned(assignment(peer, "orders", "c1")) == [(0, "PULL"), (1, "PULL")]
        assert assigned(assignment(peer, "orders", "c2")) == [(2, "PULL"), (3, "PULL")]
        circle = assignment(peer, "orders", "c2", strategyName="AVG_BY_CIRCLE")
        assert assigned(circle) == [(1, "PULL"), (3, "PULL")]
        assert assigned(assignment(peer, "orders", "stranger")) == []
    with serving(tmp_path, clock) as served, connected(served) as peer:
        heartbeat(peer, "c1", {"orders": "*"})
        assert len(assigned(assignment(peer, "orders"))) == 4
        body = {"topic": "orders", "consumerGroup": GROUP, "mode": "POP", "popShareQueueNum": 0}
        assert peer.ask(Request.SET_MESSAGE_REQUEST_MODE, orjson.dumps(body)).code == codes.SUCCESS
        assert assigned(assignment(peer, "orders")) == [(-1, "POP")]


def test_bad_requests_for_assignments_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), auto_create_topics=False) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert peer.ask(Request.QUERY_ASSIGNMENT, b"{}").code == codes.INVALID_PARAMETER
        assert peer.ask(Request.SET_MESSAGE_REQUEST_MODE, b"[]").code == codes.INVALID_PARAMETER
        for body, code in (
            ({"topic": "orders", "consumerGroup": GROUP, "mode": "PUSH"}, codes.INVALID_PARAMETER),
            ({"topic": f"%RETRY%{GROUP}", "consumerGroup": GROUP, "mode": "POP"}, codes.NO_PERMISSION),
        ):
            assert peer.ask(Request.SET_MESSAGE_REQUEST_MODE, orjson.dumps(body)).code == code
        pulled = {"topic": "orders", "consumerGroup": GROUP, "mode": "PULL"}
        assert peer.ask(Request.SET_MESSAGE_REQUEST_MODE, orjson.dumps(pulled)).code == codes.SUCCESS
        assert assignment(peer, "orders", strategyName="MACHINE_ROOM").code == codes.INVALID_PARAMETER


def test_pulls_beside_pops_see_everything(tmp_path: Path) -> None:
    """A pull reads the queue whoever has popped from it: offsets are its own business."""
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "seen by both")
        assert pop(peer).bodies == pull(peer, "orders", group="pullers").bodies == ["seen by both"]
        assert send(peer, "orders", "more").code == codes.SUCCESS

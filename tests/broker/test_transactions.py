"""Transactions: a half is seen by nobody, its commit brings its message once, and every answer is the truth."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.broker.lookup import State
from postdate.broker.transactions import HalfTicket
from postdate.config import Limits
from postdate.errors import FlowControl, IllegalMessage, NoPermission, TopicNotFound, UsageError
from postdate.message import Cancelled, Ended, Message, decode_properties
from postdate.state import saved
from postdate.storage.batch import COMMIT, HALF, TRANSACTION
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    KEEP_DAY,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    bodies,
    cancel,
    message,
    no_new_segments,
    pulled,
    segment_of_messages,
    send,
    snapshot,
    waiting_count,
)

GROUP = "billing"
ENDS = pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "roll back"])


def half_message(body: str = "paid", unique: str = "k", **more: Any) -> Message:
    return message(body, unique=unique, **{"TRAN_MSG": "true", "PGROUP": GROUP} | more)


def write(broker: Broker, at_ms: int, half: Message) -> HalfTicket:
    return broker.transactions.write_half(broker.transactions.prepare_half(half, at_ms), at_ms)


def opened(broker: Broker, at_ms: int = T0, body: str = "paid", unique: str = "k", **more: Any) -> int:
    """Stores a half; returns the offset by which it is ended."""
    ticket = write(broker, at_ms, half_message(body, unique, **more))
    broker.flush()
    assert ticket.answers is not None
    return ticket.offsets[0]


def ended(broker: Broker, offset: int, at_ms: int = T0, *, is_commit: bool = True, **more: Any) -> Ended:
    ticket = broker.transactions.end(offset, at_ms, is_commit=is_commit, **more)
    broker.flush()
    answer: Ended = ticket.answer
    return answer


# -- halves and ends --------------------------------------------------------------------------------------------


def test_a_half_is_in_no_queue_and_waits_for_nothing(data: Data) -> None:
    broker = data.open()
    opened(broker, TIMER_DELAY_MS="1000")
    advance_to(broker, T0, T0 + FAR_MS)
    assert (bodies(broker), waiting_count(broker), broker.transactions.open_count) == ([], 0, 1)
    assert cancel(broker, "k", T0 + 1_000, T0 + FAR_MS) is Cancelled.UNKNOWN


def test_a_commit_brings_its_message_once(data: Data) -> None:
    broker = data.open()
    offset = opened(broker)
    assert ended(broker, offset) is Ended.COMMITTED
    assert ended(broker, offset) is Ended.ALREADY_COMMITTED
    assert ended(broker, offset, is_commit=False) is Ended.ALREADY_COMMITTED
    assert (bodies(broker), broker.transactions.open_count) == (["paid"], 0)


def test_what_is_rolled_back_is_never_seen(data: Data) -> None:
    broker = data.open()
    offset = opened(broker)
    assert ended(broker, offset, is_commit=False) is Ended.ROLLED_BACK
    assert ended(broker, offset) is Ended.ALREADY_ROLLED_BACK
    advance_to(broker, T0, T0 + DAY_MS)
    assert bodies(broker) == []


@ENDS
def test_of_two_ends_that_are_written_together_the_first_counts(data: Data, is_commit: bool) -> None:
    broker = data.open()
    offset = opened(broker)
    tickets = [broker.transactions.end(offset, T0, is_commit=each) for each in (is_commit, not is_commit, True)]
    assert [ticket.answers for ticket in tickets] == [None, None, None]
    broker.flush()
    first, later = (
        (Ended.COMMITTED, Ended.ALREADY_COMMITTED) if is_commit else (Ended.ROLLED_BACK, Ended.ALREADY_ROLLED_BACK)
    )
    assert [ticket.answer for ticket in tickets] == [first, later, later]
    assert bodies(broker) == (["paid"] if is_commit else [])


def test_an_end_of_nothing_is_unknown_and_writes_nothing(data: Data) -> None:
    broker = data.open()
    place = send(broker, T0, message("plain", unique="p")).offsets[0]
    end = broker.log.end
    for offset in (place, 0, -1, 1 << 62):
        assert ended(broker, offset) is Ended.UNKNOWN
    assert broker.log.end == end


def test_a_committed_message_looks_as_rocketmqs_do(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("before"))
    half = half_message(keys="a b", tag="t", colour="red")._replace(sys_flag=4, flag=9, born_at_ms=5)
    offset = write(broker, T0, half)
    broker.flush()
    place = offset.offsets[0]
    due_checks(broker, T0 + 6_000)
    assert ended(broker, place, T0 + 9_000) is Ended.COMMITTED
    record = pulled(broker)[1]
    assert decode_properties(record.properties) == {
        "UNIQ_KEY": "k", "KEYS": "a b", "TAGS": "t", "PGROUP": GROUP, "colour": "red", "__transactionId__": "k",
        "TRANSACTION_CHECK_TIMES": "1",
    }  # fmt: skip
    assert (record.sys_flag, record.prepared_offset, record.flag, record.born_at_ms) == (8, place, 9, 5)
    assert (record.stored_at_ms, record.offset > place) == (T0 + 9_000, True)


@pytest.mark.parametrize("delay_ms", [2_000, FAR_MS])
@pytest.mark.parametrize(("name", "is_relative"), [("TIMER_DELAY_MS", True), ("TIMER_DELIVER_MS", False)])
def test_a_relative_delay_counts_from_the_commit_and_an_instant_stays(
    data: Data, delay_ms: int, name: str, *, is_relative: bool
) -> None:
    broker = data.open()
    more: dict[str, Any] = {name: str(delay_ms if is_relative else T0 + delay_ms)}
    offset = opened(broker, **more)
    assert ended(broker, offset, T0 + 1_000) is Ended.COMMITTED
    due = T0 + delay_ms + (1_000 if is_relative else 0)
    advance_to(broker, T0 + 1_000, due - 1)
    assert bodies(broker) == []
    (found,) = [each for each in broker.find(TOPIC, "k") if each is not None]
    assert (found.state, found.due_at_ms) == (State.WAITING, due)
    advance_to(broker, due - 1, due)
    assert bodies(broker) == ["paid"]


def test_a_level_counts_from_the_commit_and_an_instant_that_has_passed_means_at_once(data: Data) -> None:
    broker = data.open()
    level, passed = opened(broker, body="level", DELAY="2"), opened(broker, body="passed", due=T0 + 1_000, unique="p")
    for offset in (level, passed):
        assert ended(broker, offset, T0 + 2_000) is Ended.COMMITTED
    assert bodies(broker) == ["passed"]
    advance_to(broker, T0 + 2_000, T0 + 7_000)
    assert bodies(broker) == ["passed", "level"]


def test_a_committed_message_that_waits_can_be_cancelled(data: Data) -> None:
    broker = data.open()
    offset = opened(broker, TIMER_DELIVER_MS=str(T0 + FAR_MS))
    assert cancel(broker, "k", T0 + FAR_MS, T0) is Cancelled.UNKNOWN, "that one came before it"
    ended(broker, offset)
    assert cancel(broker, "k", T0 + FAR_MS, T0) is Cancelled.CANCELLED
    advance_to(broker, T0, T0 + DAY_MS)
    assert bodies(broker) == []


def test_lookups_say_that_a_half_is_one_and_find_its_message_later(data: Data) -> None:
    broker = data.open()
    offset = opened(broker, keys="user")
    states = [each.state for each in broker.find(TOPIC, "k") if each is not None]
    states += [each.state for each in broker.find_at(offset) if each is not None]
    assert states == [State.HALF, State.HALF]
    assert [each for each in broker.find(TOPIC, "other") if each is not None] == []
    assert broker.read_record(offset) == b"", "nobody reads it as a message"
    ended(broker, offset)
    for key in ("k", "user"):
        assert [each.state for each in broker.find(TOPIC, key) if each is not None] == [State.VISIBLE]
    assert list(broker.find_at(offset)) == []


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "error", "said"),
    [
        (message("x", unique="k", PGROUP=GROUP), IllegalMessage, "TRAN_MSG=true"),
        (message("x", unique="k", PGROUP=GROUP, TRAN_MSG="false"), IllegalMessage, "TRAN_MSG=true"),
        (message("x", unique="k", TRAN_MSG="true"), IllegalMessage, "needs the property PGROUP"),
        (message("x", TRAN_MSG="true", PGROUP=GROUP), IllegalMessage, "needs the property UNIQ_KEY"),
        (half_message(POSTDATE_ONCE="id"), IllegalMessage, "POSTDATE_ONCE"),
        (half_message(TIMER_DEL_UNIQKEY="k"), IllegalMessage, "TIMER_DEL_UNIQKEY"),
        (half_message(REAL_TOPIC="other"), IllegalMessage, "REAL_TOPIC"),
        (half_message(TIMER_DELAY_MS="soon"), IllegalMessage, "TIMER_DELAY_MS"),
        (half_message(topic="%RETRY%g"), IllegalMessage, "belongs to a group"),
        (half_message(topic="nowhere"), TopicNotFound, "nowhere"),
        (half_message(topic="TBW102"), NoPermission, "belongs to the broker"),
        (half_message(queue_id=7), IllegalMessage, "queue 7"),
        (half_message(x="y" * 32_700), IllegalMessage, "properties have"),
    ],
    ids=itertools.count(),
)
def test_a_half_whose_message_could_not_be_stored_is_refused(
    data: Data, half: Message, error: type[Exception], said: str
) -> None:
    broker = data.open()
    end = broker.log.end
    with pytest.raises(error, match=said):
        broker.transactions.prepare_half(half, T0)
    assert broker.log.end == end


@pytest.mark.parametrize(
    "half", [half_message(), message("x")._replace(sys_flag=4), message("x")._replace(sys_flag=12)]
)
def test_a_half_is_no_plain_message(data: Data, half: Message) -> None:
    with pytest.raises(IllegalMessage, match="half of a transaction"):
        data.open().send([half], T0)


@pytest.mark.parametrize(
    "more", [{"number": 5}, {"group": "other"}, {"topic": "other"}, {"unique_key": "other"}], ids=str
)
def test_an_end_of_another_half_is_refused(data: Data, more: dict[str, Any]) -> None:
    broker = data.open()
    offset = opened(broker)
    with pytest.raises(UsageError, match=next(iter(more)).removeprefix("unique_key") or "id"):
        broker.transactions.end(offset, T0, is_commit=True, **more)
    assert ended(broker, offset, number=0, group=GROUP, topic=TOPIC, unique_key="k") is Ended.COMMITTED


def test_open_halves_are_bounded_by_number_and_bytes(data: Data) -> None:
    broker = data.open(limits=replace(SMALL_LIMITS, halves_max=2))
    first = opened(broker)
    write(broker, T0, half_message(unique="l"))
    with pytest.raises(FlowControl, match="halves_max: 2 transactions are open"):
        write(broker, T0, half_message(unique="m"))
    broker.flush()
    ended(broker, first, is_commit=False)
    opened(broker, unique="m")
    data.close(broker)
    broker = data.open(limits=replace(SMALL_LIMITS, halves_bytes_max=1_024))
    with pytest.raises(FlowControl, match="halves_bytes_max"):
        write(broker, T0, half_message("x" * 800, "n"))


def test_a_refused_commit_leaves_its_half_open(data: Data) -> None:
    broker = data.open(replace(SMALL, wheel_entries_max=1))
    offset = opened(broker, TIMER_DELAY_MS="1000")
    send(broker, T0, message("other", due=T0 + 500))
    with pytest.raises(FlowControl, match="wheel_entries_max"):
        broker.transactions.end(offset, T0, is_commit=True)
    advance(broker, T0 + 500)
    assert ended(broker, offset, T0 + 500) is Ended.COMMITTED


def test_a_deleted_topic_takes_its_halves_along(data: Data) -> None:
    broker = data.open()
    offset = opened(broker)
    broker.delete_topic(TOPIC, T0)
    broker.put_topic(TOPIC, T0)
    broker.flush()
    assert ended(broker, offset) is Ended.UNKNOWN
    assert (bodies(broker), broker.transactions.open_count) == ([], 0)


def test_a_commit_goes_to_a_queue_that_is_there(data: Data) -> None:
    broker = data.open(queue_count=4)
    offset = opened(broker, queue_id=3)
    broker.put_topic(TOPIC, T0, read_queue_count=2, write_queue_count=2)
    assert ended(broker, offset) is Ended.COMMITTED
    assert bodies(broker, TOPIC, 1) == ["paid"]


# -- checks -----------------------------------------------------------------------------------------------------


def due_checks(broker: Broker, at_ms: int) -> list[str]:
    """Asks all whose turn it is; returns the unique keys."""
    due = broker.transactions.take_due_checks(at_ms)
    if due:
        broker.transactions.note_checked(due, at_ms)
    broker.flush()
    return [each.unique_key for each in due]


def test_producers_are_asked_after_the_timeout_and_then_at_intervals(data: Data) -> None:
    broker = data.open(replace(SMALL, transaction_check_times_max=2))
    opened(broker)
    opened(broker, T0 + 1_000, unique="l")
    assert broker.transactions.next_check_at_ms == T0 + 6_000
    asked = {at: due_checks(broker, T0 + at * 1_000) for at in range(120)}
    assert {at: keys for at, keys in asked.items() if keys} == {6: ["k"], 7: ["l"], 36: ["k"], 37: ["l"]}
    assert (broker.transactions.open_count, broker.transactions.given_up_count) == (2, 2)
    assert broker.transactions.next_check_at_ms == NEVER


def test_a_producer_may_ask_for_more_time(data: Data) -> None:
    broker = data.open()
    opened(broker, CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    opened(broker, unique="less", CHECK_IMMUNITY_TIME_IN_SECONDS="1")
    opened(broker, unique="none", CHECK_IMMUNITY_TIME_IN_SECONDS="soon")
    assert due_checks(broker, T0 + 6_000) == ["less", "none"]
    assert due_checks(broker, T0 + 59_999) == ["less", "none"]
    assert due_checks(broker, T0 + 60_000) == ["k"]


def test_where_nobody_is_there_the_check_does_not_count(data: Data) -> None:
    broker = data.open(replace(SMALL, transaction_check_times_max=1, retention_ms=DAY_MS))
    offset, end = opened(broker), broker.log.end
    for number in range(100):
        at_ms = T0 + 6_000 + number * 30_000
        (due,) = broker.transactions.take_due_checks(at_ms)
        broker.transactions.postpone([due], at_ms)
    assert broker.log.end == end
    assert broker.transactions.take_due_checks(T0 + DAY_MS) == [], "it is too old now"
    broker.flush()
    found = broker.transactions.find_open(offset)
    assert found is not None
    assert found.half.given_up_at_ms == T0 + DAY_MS


@ENDS
def test_a_half_that_was_given_up_is_kept_shown_and_can_be_ended(data: Data, is_commit: bool) -> None:
    broker = data.open(replace(SMALL, transaction_check_times_max=0))
    offset = opened(broker)
    assert due_checks(broker, T0 + 6_000) == []
    data.crash(broker)
    broker = data.open()
    assert broker.transactions.next_check_at_ms == NEVER
    advance_to(broker, T0 + 6_000, T0 + DAY_MS)
    assert [(each.half.offset, each.half.given_up_at_ms) for each in broker.transactions.list_open()] == [
        (offset, T0 + 6_000)
    ]
    assert ended(broker, offset, T0 + DAY_MS, is_commit=is_commit) is (
        Ended.COMMITTED if is_commit else Ended.ROLLED_BACK
    )
    assert bodies(broker) == (["paid"] if is_commit else [])


def test_what_was_ended_is_not_asked_about(data: Data) -> None:
    broker = data.open()
    for unique, is_commit in (("k", True), ("l", False)):
        ended(broker, opened(broker, unique=unique), is_commit=is_commit)
    assert due_checks(broker, T0 + DAY_MS) == []
    assert broker.transactions.next_check_at_ms == NEVER


def test_a_check_that_cannot_be_written_is_tried_again(data: Data) -> None:
    broker = data.open()
    opened(broker)
    (due,) = broker.transactions.take_due_checks(T0 + 6_000)
    broker.log.fail(OSError("gone"))
    with pytest.raises(Exception, match="gone"):
        broker.transactions.note_checked([due], T0 + 6_000)
    assert broker.transactions.next_check_at_ms == T0 + 36_000


# -- restarts and retention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["killed", "closed", "snapshot"])
def test_transactions_survive_a_restart(data: Data, way: str) -> None:
    broker = data.open()
    open_half, committed, rolled_back = (opened(broker, body=unique, unique=unique) for unique in "abc")
    ended(broker, committed)
    ended(broker, rolled_back, is_commit=False)
    due_checks(broker, T0 + 6_000)
    if way == "snapshot":
        snapshot(broker)
    data.close(broker) if way == "closed" else data.crash(broker)
    broker = data.open()
    (found,) = broker.transactions.list_open()
    assert (found.half.offset, found.half.check_count, found.half.number) == (open_half, 1, 0)
    assert broker.transactions.next_check_at_ms == T0 + 36_000
    assert ended(broker, committed) is Ended.ALREADY_COMMITTED
    assert ended(broker, rolled_back) is Ended.ALREADY_ROLLED_BACK
    assert ended(broker, open_half) is Ended.COMMITTED
    assert bodies(broker) == ["b", "a"]


def test_an_end_that_a_crash_has_lost_leaves_the_half_open(data: Data) -> None:
    broker = data.open()
    offset = opened(broker)
    broker.transactions.end(offset, T0, is_commit=True)
    data.crash(broker)
    broker = data.open()
    first = ended(broker, offset)
    assert first in (Ended.COMMITTED, Ended.ALREADY_COMMITTED), "it was written, and may have reached the disk"
    assert bodies(broker) == ["paid"]


def test_the_log_is_kept_while_a_half_is_open(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    offset = opened(broker)
    for label in ("a", "b", "c"):
        segment_of_messages(broker, T0, label)
        snapshot(broker)
    broker.retain(T0 + 3 * DAY_MS)
    assert broker.log.segment_numbers()[0] == offset >> broker.log.segment_shift
    assert ended(broker, offset, T0 + 3 * DAY_MS) is Ended.COMMITTED
    for label in ("d", "e"):
        segment_of_messages(broker, T0 + 3 * DAY_MS, label)
        snapshot(broker)
    assert broker.retain(T0 + 5 * DAY_MS)
    assert 0 not in broker.log.segment_numbers()


def test_rolling_back_has_room_when_sends_have_none(data: Data) -> None:
    broker = data.open()
    offset = opened(broker)
    no_new_segments(data)
    assert ended(broker, offset, is_commit=False) is Ended.ROLLED_BACK


def test_halves_are_listed_in_order_by_topic_and_by_page(data: Data) -> None:
    broker = data.open()
    broker.put_topic("other", T0)
    broker.flush()
    places = [opened(broker, unique=f"k{n}", topic=TOPIC if n % 2 else "other") for n in range(6)]
    calls = broker.transactions
    assert [each.half.offset for each in calls.list_open()] == places
    assert [each.unique_key for each in calls.list_open(places[1], 2)] == ["k2", "k3"]
    assert [each.unique_key for each in calls.list_open(topic="other")] == ["k0", "k2", "k4"]
    (found,) = calls.find_by_key(TOPIC, "k3")
    assert (found.topic, found.group, found.queue_id, found.half.number) == (TOPIC, GROUP, 0, 3)
    assert calls.find_by_key("other", "k3") == []
    with pytest.raises(TopicNotFound):
        calls.list_open(topic="nowhere")


def test_in_flush_mode_async_all_is_answered_at_once(data: Data) -> None:
    broker = data.open(replace(SMALL, flush="async"), Limits())
    ticket = write(broker, T0, half_message())
    assert ticket.answers == [0]
    end = broker.transactions.end(ticket.offsets[0], T0, is_commit=True)
    assert end.answer is Ended.COMMITTED
    assert bodies(broker) == ["paid"]


def test_what_stands_in_the_log(data: Data) -> None:
    broker = data.open()
    start = broker.log.end
    offset = opened(broker)
    due_checks(broker, T0 + 6_000)
    ended(broker, offset)
    assert [int(row["kind"]) for batch in broker.log.scan(start, 0) for row in batch.array()] == [
        HALF, TRANSACTION, COMMIT,
    ]  # fmt: skip


def test_a_snapshot_of_an_earlier_version_knows_no_transactions(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = data.open()
    send(broker, T0, message("before"))
    take_state = saved._state
    parts = ("halves", "halves_opened", "halves_ended")
    with monkeypatch.context() as earlier:
        earlier.setattr(
            saved,
            "_state",
            lambda fold: {name: value for name, value in take_state(fold).items() if name not in parts},
        )
        snapshot(broker)
    data.crash(broker)
    broker = data.open()
    assert broker.transactions.list_open() == []
    assert ended(broker, opened(broker)) is Ended.COMMITTED
    assert bodies(broker) == ["before", "paid"]

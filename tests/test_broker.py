"""The broker's calls, one story each: what a caller gets, what a consumer sees, what a restart finds."""

import dataclasses
import errno
import json
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    SMALL,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    bodies,
    contents,
    message,
    pulled,
    registered,
    send,
    send_each,
    snapshot,
    stage,
    write_chunk,
)

from postdate import recovery
from postdate.broker import Broker, Cancelled, PullStatus
from postdate.errors import (
    CorruptChunk,
    CorruptLog,
    DiskFull,
    FlowControl,
    FolderInUse,
    ForeignFolder,
    IllegalMessage,
    LogFailed,
    Refused,
    TopicNotFound,
    UsageError,
)
from postdate.fold import WAITS
from postdate.log.disk import RealDisk
from postdate.message import Message, tag_hash
from postdate.wheel import NEVER

LEAD_MS = 60_000
FAR_MS = 10 * MINUTE_MS  # beyond the lead


def cancel(broker: Broker, key: str, due: int, at_ms: int, by: str = "unique") -> Cancelled:
    ticket = broker.cancel(TOPIC, key, due, at_ms, by=by)
    broker.flush()
    answer = ticket.answer
    assert isinstance(answer, Cancelled)
    return answer


def waiting_count(broker: Broker) -> int:
    return sum(broker.fold.near) + sum(broker.fold.untaken)


def no_new_segments(data: Data) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    data.disk.fault = lambda call, path: full if call == "write" and path.startswith("log/") else None


def fill_all(broker: Broker, at_ms: int = T0) -> None:
    """Sends, and then commits offsets, until the disk has no more room."""
    with suppress(DiskFull):
        while True:
            send(broker, at_ms, message(bytes(4_000)))
    with suppress(DiskFull):
        while True:
            broker.commit_offsets("g", [(TOPIC, 0, 1)], at_ms)
            broker.flush()


# ---------------------------------------------------------------------------------------------------------- sending


def test_a_message_without_delay_is_visible_when_its_batch_is_durable(data: Data) -> None:
    broker = data.open()
    ticket = broker.send([message("now")], T0)
    assert ticket.answers is None
    assert bodies(broker) == []
    broker.log.flush()
    assert bodies(broker) == [], "durable, but not settled"
    assert broker.settle() == 1
    assert ticket.answer == 0
    assert bodies(broker) == ["now"]


def test_one_flush_acknowledges_every_batch_that_waited(data: Data) -> None:
    broker = data.open()
    tickets = [broker.send([message(str(n))], T0) for n in range(5)]
    broker.flush()
    assert [ticket.answer for ticket in tickets] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("properties", "due"),
    [
        ({"DELAY": "1"}, T0 + 1_000),
        ({"DELAY": "3"}, T0 + 10_000),
        ({"DELAY": "99"}, T0 + 2 * HOUR_MS),
        ({"TIMER_DELAY_SEC": "7"}, T0 + 7_000),
        ({"TIMER_DELAY_MS": "1234"}, T0 + 1_234),
        ({"TIMER_DELIVER_MS": str(T0 + 4_321)}, T0 + 4_321),
        ({"DELAY": "2", "TIMER_DELAY_SEC": "7"}, T0 + 5_000),
    ],
)
def test_a_delayed_message_is_visible_at_its_due_instant_and_not_before(
    data: Data, properties: dict[str, str], due: int
) -> None:
    broker = data.open()
    later = message("later", **properties)  # type: ignore[arg-type]
    assert send(broker, T0, later).answer == WAITS
    advance_to(broker, T0, due - 1)
    assert bodies(broker) == []
    assert broker.wake_at_ms == due
    advance(broker, due)
    assert bodies(broker) == ["later"]


def test_a_delay_that_has_passed_is_no_delay(data: Data) -> None:
    broker = data.open()
    assert send(broker, T0, message("late", due=T0)).answer == 0
    assert bodies(broker) == ["late"]


def test_messages_become_visible_by_due_then_arrival(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("c", due=T0 + 20), message("a", due=T0 + 10))
    send(broker, T0 + 1, message("b", due=T0 + 10), message("d", due=T0 + 20))
    advance(broker, T0 + 30)
    assert bodies(broker) == ["a", "b", "c", "d"]


def test_a_send_of_a_later_instant_fires_what_was_due_before_it(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("first", due=T0 + 10))
    send(broker, T0 + 10, message("second"))
    assert bodies(broker) == ["first", "second"]


def test_nothing_fires_early_when_the_clock_steps_back(data: Data) -> None:
    broker = data.open()
    send(broker, T0 + 5_000, message("ahead"))
    send(broker, T0, message("due", due=T0 + 1_000))
    advance(broker, T0 + 999)
    assert bodies(broker) == ["ahead"]
    advance(broker, T0 + 1_000)
    assert bodies(broker) == ["ahead", "due"]


@pytest.mark.parametrize(
    ("bad", "error", "said"),
    [
        (message(topic="nowhere"), TopicNotFound, "topic 'nowhere' does not exist"),
        (message(queue_id=1), IllegalMessage, "queue 1 of topic 'orders' does not exist: it has 1"),
        (message(queue_id=-1), IllegalMessage, "queue_id is -1"),
        (message(topic="SCHEDULE_TOPIC_XXXX"), IllegalMessage, "belongs to the broker"),
        (message(REAL_TOPIC="x"), IllegalMessage, "REAL_TOPIC.*internal"),
        (message(TIMER_DEL_UNIQKEY="k"), IllegalMessage, "TIMER_DEL_UNIQKEY marks a cancel"),
        (message(TIMER_DELAY_SEC="soon"), IllegalMessage, "TIMER_DELAY_SEC = 'soon'"),
        (message(TIMER_DELAY_MS=str(40 * 365 * DAY_MS)), IllegalMessage, "the limit is 315576000000 ms"),
        (message(bytes(20_000)), UsageError, "batch_bytes_max is 16384"),
        (Message(TOPIC, b"", b"a\x01\xff\x02"), IllegalMessage, "not UTF-8"),
    ],
)
def test_a_refused_batch_changes_nothing_and_writes_nothing(
    data: Data, bad: Message, error: type[Exception], said: str
) -> None:
    broker = data.open()
    before, end, files = recovery.state_json(broker.fold), broker.log.end, contents(data.folder)
    with pytest.raises(error, match=said):
        broker.send([message("good"), bad], T0)
    broker.flush()
    assert (recovery.state_json(broker.fold), broker.log.end) == (before, end)
    assert contents(data.folder) == files


def test_an_empty_batch_is_refused(data: Data) -> None:
    with pytest.raises(UsageError, match="at least one message"):
        data.open().send([], T0)


def test_a_body_over_the_limit_is_refused(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, body_bytes_max=10))
    with pytest.raises(IllegalMessage, match="body has 11 bytes, the limit is 10"):
        broker.send([message(bytes(11))], T0)


def test_a_large_batch_and_single_sends_give_the_same(data: Data, tmp_path: Path) -> None:
    many = [message(str(n), due=T0 + n % 7 * 100 if n % 3 else None, queue_id=n % 2) for n in range(150)]
    broker = data.open(queue_count=2)
    send(broker, T0, *many[:75])
    send(broker, T0, *many[75:])
    other = Data(tmp_path / "other")
    single = other.open(queue_count=2)
    send_each(single, T0, many)
    for each in (broker, single):
        advance(each, T0 + 1_000)
    for queue_id in (0, 1):
        assert bodies(broker, TOPIC, queue_id) == bodies(single, TOPIC, queue_id)
    assert len(bodies(broker, TOPIC, 0)) == 75
    other.close_all()


# ---------------------------------------------------------------------------------------------------------- pulling


def test_a_pull_says_what_it_found_and_where_to_go_on(data: Data) -> None:
    broker = data.open()
    assert broker.pull(TOPIC, 0, 0).status == PullStatus.NO_NEW
    send_each(broker, T0, [message(str(n)) for n in range(5)])

    some = broker.pull(TOPIC, 0, 1, count_max=3)
    assert (some.status, some.next_offset, some.min_offset, some.max_offset) == (PullStatus.FOUND, 4, 0, 5)
    assert len(some.records) == 3
    assert broker.pull(TOPIC, 0, 5).status == PullStatus.NO_NEW
    beyond = broker.pull(TOPIC, 0, 6)
    assert (beyond.status, beyond.next_offset) == (PullStatus.ILLEGAL_OFFSET, 5)
    before = broker.pull(TOPIC, 0, -1)
    assert (before.status, before.next_offset) == (PullStatus.ILLEGAL_OFFSET, 0)


def test_a_pull_of_what_does_not_exist_is_the_callers_fault(data: Data) -> None:
    broker = data.open()
    with pytest.raises(TopicNotFound):
        broker.pull("nowhere", 0, 0)
    with pytest.raises(UsageError, match="queue 1 of topic 'orders' does not exist"):
        broker.pull(TOPIC, 1, 0)
    with pytest.raises(UsageError, match="count_max is 0"):
        broker.pull(TOPIC, 0, 0, count_max=0)


def test_a_pull_filters_by_tag_and_passes_over_the_others(data: Data) -> None:
    broker = data.open()
    send_each(broker, T0, [message(str(n), tag="even" if n % 2 == 0 else "odd") for n in range(10)])
    odd = frozenset({tag_hash("odd")})

    found = broker.pull(TOPIC, 0, 0, count_max=3, tag_hashes=odd)
    assert [data[88:89] for data in found.records] == [b"1", b"3", b"5"]
    rest = broker.pull(TOPIC, 0, found.next_offset, count_max=3, tag_hashes=odd)
    assert [data[88:89] for data in rest.records] == [b"7", b"9"]
    assert rest.next_offset == 10
    none = broker.pull(TOPIC, 0, 0, tag_hashes=frozenset({tag_hash("other")}))
    assert (none.status, none.next_offset, none.records) == (PullStatus.NO_MATCH, 10, [])


def test_a_pull_stops_at_its_bytes_but_gives_at_least_one(data: Data) -> None:
    broker = data.open()
    send_each(broker, T0, [message(bytes(1_000)) for _ in range(5)])
    size = len(broker.pull(TOPIC, 0, 0, count_max=1).records[0])
    one = broker.pull(TOPIC, 0, 0, bytes_max=1)
    assert (len(one.records), one.next_offset) == (1, 1)
    two = broker.pull(TOPIC, 0, 0, bytes_max=2 * size)
    assert (len(two.records), two.next_offset) == (2, 2)
    assert len(broker.pull(TOPIC, 0, 0, bytes_max=2 * size - 1).records) == 1


def test_a_pulled_record_has_its_place_and_the_instant_it_became_visible(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("waits", due=T0 + 500, tag="a"))
    ticket = send(broker, T0 + 10, message("now"))
    advance(broker, T0 + 503)
    now, waited = pulled(broker)
    assert (now.body, now.queue_offset, now.stored_at_ms, now.offset) == (b"now", 0, T0 + 10, ticket.offsets[0])
    assert (waited.body, waited.queue_offset, waited.stored_at_ms) == (b"waits", 1, T0 + 503)
    assert (waited.queue_id, waited.topic) == (0, TOPIC)


def test_a_message_of_a_queue_that_is_gone_comes_up_in_another_with_its_number(data: Data) -> None:
    broker = data.open(queue_count=4)
    send(broker, T0, *[message(f"q{n}", queue_id=n, due=T0 + 100) for n in range(4)])
    broker.put_topic(TOPIC, T0 + 1, read_queue_count=3, write_queue_count=2)
    advance(broker, T0 + 100)
    assert [bodies(broker, TOPIC, n) for n in range(3)] == [["q0", "q3"], ["q1"], ["q2"]]
    assert [record.queue_id for record in pulled(broker)] == [0, 0]


def test_search_by_time_finds_the_first_that_became_visible_then_or_later(data: Data) -> None:
    broker = data.open()
    for n in range(5):
        send(broker, T0 + n * 100, message(str(n)), message(str(n)))
    assert broker.search(TOPIC, 0, T0 - 1) == 0
    assert broker.search(TOPIC, 0, T0 + 100) == 2
    assert broker.search(TOPIC, 0, T0 + 101) == 4
    assert broker.search(TOPIC, 0, T0 + 400) == 8
    assert broker.search(TOPIC, 0, T0 + 401) == 10


# ------------------------------------------------------------------------------------------------------- cancelling


def test_a_cancel_of_a_near_message_is_the_truth_and_it_never_comes(data: Data) -> None:
    broker = data.open()
    due = T0 + 1_000
    send(broker, T0, message("cancelled", unique="k", due=due), message("kept", unique="l", due=due))
    assert cancel(broker, "k", due, T0 + 1) == Cancelled.CANCELLED
    assert cancel(broker, "k", due, T0 + 2) == Cancelled.CANCELLED, "a second cancel finds the same"
    advance_to(broker, T0 + 2, T0 + HOUR_MS)
    assert bodies(broker) == ["kept"]


def test_a_cancel_of_a_far_message_is_the_truth_and_it_never_comes(data: Data) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    send(broker, T0, message("cancelled", unique="k", due=due), message("kept", unique="l", due=due))
    assert cancel(broker, "k", due, T0 + 1) == Cancelled.CANCELLED
    assert cancel(broker, "k", due, T0 + 2) == Cancelled.CANCELLED
    advance_to(broker, T0 + 2, due + HOUR_MS)
    assert bodies(broker) == ["kept"]


def test_a_cancel_of_a_rescued_message_is_the_truth_and_it_never_comes(data: Data) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    send(broker, T0, message("cancelled", unique="k", due=due))
    advance_to(broker, T0, due - 1)
    assert broker.fold.wheel.count == 1
    assert cancel(broker, "k", due, due - 1) == Cancelled.CANCELLED
    advance_to(broker, due - 1, due + HOUR_MS)
    assert bodies(broker) == []


@pytest.mark.parametrize("delay_ms", [1_000, FAR_MS])
def test_a_cancel_after_delivery_says_delivered(data: Data, delay_ms: int) -> None:
    broker = data.open()
    due = T0 + delay_ms
    send(broker, T0, message("gone out", unique="k", due=due))
    advance_to(broker, T0, due)
    assert cancel(broker, "k", due, due) == Cancelled.DELIVERED
    assert bodies(broker) == ["gone out"]


def test_a_cancel_at_the_due_instant_comes_too_late(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("gone out", unique="k", due=T0 + 10))
    assert cancel(broker, "k", T0 + 10, T0 + 10) == Cancelled.DELIVERED
    assert bodies(broker) == ["gone out"]


@pytest.mark.parametrize("delay_ms", [1_000, FAR_MS])
def test_a_cancel_of_nothing_is_unknown(data: Data, delay_ms: int) -> None:
    broker = data.open()
    due = T0 + delay_ms
    send(broker, T0, message("other due", unique="k", due=due + 1), message("other key", unique="l", due=due))
    assert cancel(broker, "k", due, T0 + 1) == Cancelled.UNKNOWN
    assert cancel(broker, "l", due - 1, T0 + 1) == Cancelled.UNKNOWN
    advance_to(broker, T0, due + 1)
    assert bodies(broker) == ["other key", "other due"]


@pytest.mark.parametrize("delay_ms", [1_000, FAR_MS])
def test_a_cancel_does_not_meet_a_message_that_comes_after_it(data: Data, delay_ms: int) -> None:
    broker = data.open()
    due = T0 + delay_ms
    send(broker, T0, message("first life", unique="k", due=due))
    assert cancel(broker, "k", due, T0 + 1) == Cancelled.CANCELLED
    send(broker, T0 + 2, message("second life", unique="k", due=due))
    advance_to(broker, T0 + 2, due)
    assert bodies(broker) == ["second life"]


@pytest.mark.parametrize("delay_ms", [1_000, FAR_MS])
def test_a_cancel_by_user_key_meets_the_first_key_alone(data: Data, delay_ms: int) -> None:
    broker = data.open()
    due = T0 + delay_ms
    send(broker, T0, message("first", keys="a b", due=due), message("second", keys="b a", due=due))
    send(broker, T0, message("unique", unique="a", due=due))
    assert cancel(broker, "a", due, T0 + 1, by="key") == Cancelled.CANCELLED
    advance_to(broker, T0 + 1, due)
    assert bodies(broker) == ["second", "unique"]


def test_a_cancel_removes_every_copy_that_a_resend_left(data: Data) -> None:
    broker = data.open()
    for due in (T0 + 1_000, T0 + FAR_MS):
        send(broker, T0, message("one", unique="k", due=due), message("two", unique="k", due=due))
        assert cancel(broker, "k", due, T0 + 1) == Cancelled.CANCELLED
    advance_to(broker, T0 + 1, T0 + FAR_MS)
    assert bodies(broker) == []


def test_a_cancel_meets_its_own_topic_alone(data: Data) -> None:
    broker = data.open()
    broker.put_topic("others", T0)
    send(broker, T0, message("kept", topic="others", unique="k", due=T0 + 100))
    assert cancel(broker, "k", T0 + 100, T0 + 1) == Cancelled.UNKNOWN
    advance(broker, T0 + 100)
    assert bodies(broker, "others") == ["kept"]


def test_a_cancel_in_the_same_flush_as_its_message_is_the_truth(data: Data) -> None:
    broker = data.open()
    for due in (T0 + 100, T0 + FAR_MS):
        broker.send([message("cancelled", unique="k", due=due)], T0)
        ticket = broker.cancel(TOPIC, "k", due, T0)
        broker.flush()
        assert ticket.answer == Cancelled.CANCELLED
    advance_to(broker, T0, T0 + FAR_MS)
    assert bodies(broker) == []


def test_a_cancel_that_makes_no_sense_is_refused(data: Data) -> None:
    broker = data.open()
    end = broker.log.end
    with pytest.raises(TopicNotFound):
        broker.cancel("nowhere", "k", T0, T0)
    with pytest.raises(UsageError, match="needs a key"):
        broker.cancel(TOPIC, "", T0, T0)
    with pytest.raises(UsageError, match="by='tag'"):
        broker.cancel(TOPIC, "k", T0, T0, by="tag")
    with pytest.raises(UsageError, match="the due time of a cancel is 0"):
        broker.cancel(TOPIC, "k", 0, T0)
    assert broker.log.end == end


def test_a_cancel_by_any_key_survives_a_snapshot(data: Data) -> None:
    broker = data.open()
    for key in ("schlüssel", "键", "\U0001f511", "\ud800"):
        assert cancel(broker, key, T0 + FAR_MS, T0) == Cancelled.UNKNOWN
    before = recovery.state_json(broker.fold)
    data.close(broker)
    assert recovery.state_json(data.open().fold) == before


def test_tombstones_are_forgotten_when_their_work_is_done(data: Data) -> None:
    broker = data.open()
    for n, due in enumerate((T0 + 100, T0 + FAR_MS)):
        send(broker, T0, message("cancelled", unique=f"k{n}", due=due))
        cancel(broker, f"k{n}", due, T0 + 1)
    assert broker.fold.tombstones.count == 2
    advance_to(broker, T0 + 1, T0 + DAY_MS)
    send(broker, T0 + DAY_MS, message("time passes with the batches alone"))
    assert broker.fold.tombstones.count == 0
    assert broker.fold.held == {}, "nothing waits any more, so no segment is held"
    assert waiting_count(broker) == 0


# ----------------------------------------------------------------------------------------------------- flow control


def test_too_many_near_messages_are_refused_with_the_limits_name(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, wheel_entries_max=3))
    send(broker, T0, message(due=T0 + 10), message(due=T0 + 20))
    broker.send([message(due=T0 + 30)], T0)
    with pytest.raises(FlowControl, match=r"wheel_entries_max.*the limit is 3"):
        broker.send([message(due=T0 + 30)], T0)
    send(broker, T0, message("at once"))
    advance(broker, T0 + 10)
    send(broker, T0 + 10, message(due=T0 + 40))
    assert broker.fold.wheel.count == 3


def test_the_limit_of_the_wheel_counts_no_message_twice_under_steady_load(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, wheel_entries_max=20))
    for n in range(100):
        at_ms = T0 + n * 10
        broker.send([message(str(n), due=at_ms + 5)], at_ms)
        # As in a busy server: the next batch is written before the last one is settled, so some batch always waits.
        durable = broker.log.flush()
        broker.send([message()], at_ms + 1)
        assert broker.settle() >= 1
        assert broker.log.end > durable
    assert broker.fold.wheel.count <= 2


def test_too_many_messages_of_a_topic_due_in_one_second_are_refused(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, due_second_messages_max=2))
    second = T0 // 1_000 * 1_000 + 5_000
    broker.put_topic("others", T0)
    send(broker, T0, message(due=second), message(due=second + 999))
    with pytest.raises(FlowControl, match="due_second_messages_max: topic 'orders'"):
        broker.send([message(due=second + 500)], T0)
    send(broker, T0, message(due=second + 1_000), message(topic="others", due=second))
    data.crash(broker)
    broker = data.open(dataclasses.replace(SMALL, due_second_messages_max=2))
    with pytest.raises(FlowControl):
        broker.send([message(due=second)], T0)


def test_the_limit_per_second_counts_what_is_written_but_not_durable(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, due_second_messages_max=2))
    broker.send([message(due=T0 + 5_000), message(due=T0 + 5_000)], T0)
    with pytest.raises(FlowControl):
        broker.send([message(due=T0 + 5_000)], T0)


def test_too_many_cancels_that_wait_are_refused(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, tombstones_max=2))
    for n in range(2):
        cancel(broker, f"k{n}", T0 + FAR_MS, T0)
    with pytest.raises(FlowControl, match="tombstones_max: 2 cancels wait"):
        broker.cancel(TOPIC, "k", T0 + FAR_MS, T0)


# ---------------------------------------------------------------------------------------- far messages, no pipeline


def test_without_a_pipeline_a_message_of_ten_years_is_delivered_on_time(data: Data) -> None:
    broker = data.open()
    due = T0 + 87_660 * HOUR_MS
    send(broker, T0, message("ten years", due=due), message("a day", due=T0 + DAY_MS))
    advance_to(broker, T0, T0 + DAY_MS - 1)
    assert bodies(broker) == []
    advance_to(broker, T0 + DAY_MS - 1, due - 1)
    assert bodies(broker) == ["a day"]
    advance(broker, due)
    assert bodies(broker) == ["a day", "ten years"]
    assert broker.wake_at_ms == NEVER
    assert broker.fold.held == {}


def test_ram_holds_only_what_is_due_within_the_lead(data: Data) -> None:
    broker = data.open()
    for n in range(100):
        send(broker, T0, message(str(n), due=T0 + (n + 1) * 30 * SECOND_MS))
    assert broker.fold.wheel.count == 2
    for n in range(100):
        advance_to(broker, T0 + n * 30 * SECOND_MS, T0 + (n + 1) * 30 * SECOND_MS)
        assert broker.fold.wheel.count <= 3
        assert len(bodies(broker)) == n + 1
    assert bodies(broker) == [str(n) for n in range(100)]


def test_a_rescue_takes_what_fits_earliest_first(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, wheel_entries_max=3))
    due = T0 + FAR_MS
    for n in (5, 3, 1, 4, 0, 2):
        send(broker, T0, message(str(n), due=due + n))
    broker.advance(due - LEAD_MS)
    broker.flush()
    assert broker.fold.wheel.count <= 3
    for n in range(6):
        for _ in range(5):
            broker.advance(due + n)
            broker.flush()
        assert broker.fold.wheel.count <= 3
        assert bodies(broker) == [str(m) for m in range(n + 1)]


def test_a_full_wheel_does_not_make_the_broker_spin(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, wheel_entries_max=2))
    due = T0 + FAR_MS
    for n in range(5):
        send(broker, T0, message(str(n), due=due))
    for _ in range(5):
        broker.advance(due - 1_000)
        broker.flush()
    assert broker.fold.wheel.count == 2
    end = broker.log.end
    assert broker.advance(due - 1_000) > due - 1_000, "nothing can be done before a message is due"
    assert broker.log.end == end


def test_rescues_go_on_while_sends_never_pause(data: Data) -> None:
    broker = data.open()
    due = T0 + 2 * MINUTE_MS
    send(broker, T0, message("far", due=due))
    for n in range(130):
        at_ms = T0 + n * SECOND_MS
        broker.log.flush()
        broker.send([message(f"{n}")], at_ms)  # written, never durable when the broker advances
        broker.advance(at_ms)
    broker.flush()
    found = [record for record in pulled(broker) if record.body == b"far"]
    assert [record.stored_at_ms for record in found] == [due]


def test_a_restart_between_rescue_and_due_delivers_once(data: Data) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    send(broker, T0, message("far", due=due))
    advance(broker, due - LEAD_MS)
    assert broker.fold.wheel.count == 1
    data.crash(broker)
    broker = data.open()
    assert broker.fold.wheel.count == 1
    advance(broker, due)
    assert bodies(broker) == ["far"]


# ---------------------------------------------------------------------------------------------------------- staging


def far_pair(data: Data) -> tuple[Broker, int, list[Message]]:
    """A broker with two far messages, of which the pipeline has taken none, and the pipeline's epoch."""
    broker = data.open()
    messages = [message(str(n), unique=f"k{n}", due=T0 + FAR_MS + n) for n in range(2)]
    send(broker, T0, *messages)
    epoch = registered(broker)
    broker.pipeline_alive = True
    return broker, epoch, messages


def upload(broker: Broker, data: Data, name: str, messages: list[Message], numbers: list[int]) -> None:
    """A chunk of far messages by their row numbers in the far queue."""
    rows = broker.read_far(0, broker.fold.far.length)
    write_chunk(
        data.disk,
        name,
        [
            (int(rows[n]["due"]), int(rows[n]["arrival"]), int(rows[n]["queue"]), entry)
            for n, entry in zip(numbers, messages, strict=True)
        ],
    )


def test_a_staged_message_is_delivered_on_time_once(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    stage(broker, epoch, 2, T0)
    advance_to(broker, T0, T0 + 5 * MINUTE_MS)
    assert broker.fold.wheel.count == 0, "what the pipeline has taken is not rescued while it lives"
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, T0 + FAR_MS + 1, ["c1"], T0 + 5 * MINUTE_MS)
    advance_to(broker, T0 + 5 * MINUTE_MS, T0 + FAR_MS)
    assert bodies(broker) == ["0"]
    advance_to(broker, T0 + FAR_MS, T0 + DAY_MS)
    assert bodies(broker) == ["0", "1"]
    assert [record.stored_at_ms for record in pulled(broker)] == [T0 + FAR_MS, T0 + FAR_MS + 1]
    assert (broker.fold.held, waiting_count(broker)) == ({}, 0)


def test_the_far_queue_shows_the_pipeline_durable_rows_alone(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    broker.send([message(due=T0 + FAR_MS)], T0)
    assert broker.fold.far.length == 1
    assert len(broker.read_far(0, 10)) == 0
    broker.flush()
    assert broker.read_far(0, 10)["due"].tolist() == [T0 + FAR_MS]
    assert len(broker.read_far(1, 10)) == 0
    with pytest.raises(UsageError, match="neither may be negative"):
        broker.read_far(-1, 10)


def test_stages_that_are_stale_repeated_or_overtaken_are_refused_by_name(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    stage(broker, epoch, 1, T0 + 100)
    end, state = broker.log.end, recovery.state_json(broker.fold)
    for far, horizon, said in [
        ((0, 1), (0, T0 + 100), "it starts at far 0 and horizon 0, the broker is at far 1"),
        ((1, 2), (0, T0 + 200), "it starts at far 1 and horizon 0"),
        ((1, 3), (T0 + 100, T0 + 200), "it ends at far 3.*the far queue has 2 rows"),
        ((1, 0), (T0 + 100, T0 + 200), "it ends at far 0"),
        ((1, 2), (T0 + 100, T0 + 99), "it ends at far 2 and horizon"),
    ]:
        with pytest.raises(Refused, match=said):
            broker.stage(epoch, far, horizon, [], T0)
    with pytest.raises(Refused, match="epoch 0 is not the current one"):
        broker.stage(0, (1, 2), (T0 + 100, T0 + 200), [], T0)
    assert (broker.log.end, recovery.state_json(broker.fold)) == (end, state)
    assert registered(broker) == epoch + 1
    with pytest.raises(Refused, match="another pipeline has registered"):
        stage(broker, epoch, 2, T0 + 200)
    stage(broker, epoch + 1, 2, T0 + 200)
    assert (broker.fold.far.taken, broker.fold.far.horizon_at_ms) == (2, T0 + 200)


def test_a_chunk_that_is_not_whole_is_refused(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    upload(broker, data, "good", messages, [0, 1])
    whole = (data.folder / "chunks" / "good").read_bytes()
    end = broker.log.end
    for position in (0, 8, 60, 64, 100, len(whole) - 1):
        (data.folder / "chunks" / "bad").write_bytes(
            whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        )
        with pytest.raises(CorruptChunk, match="chunks/bad"):
            stage(broker, epoch, 2, T0 + HOUR_MS, ["bad"])
    (data.folder / "chunks" / "bad").write_bytes(whole[:-1])
    for name in ("bad", "missing"):
        with pytest.raises(CorruptChunk, match=f"chunks/{name}"):
            stage(broker, epoch, 2, T0 + HOUR_MS, [name])
    with pytest.raises(CorruptChunk, match="behind the horizon"):
        stage(broker, epoch, 2, T0 + FAR_MS, ["good"])
    for name in ("", "../FORMAT", ".hidden"):
        with pytest.raises(UsageError, match="no file name"):
            stage(broker, epoch, 2, T0 + HOUR_MS, [name])
    write_chunk(data.disk, "strange", [(T0 + FAR_MS, 1, 99, messages[0])])
    with pytest.raises(CorruptChunk, match="queue number 99"):
        stage(broker, epoch, 2, T0 + HOUR_MS, ["strange"])
    assert broker.log.end == end
    stage(broker, epoch, 2, T0 + HOUR_MS, ["good"])


def test_a_chunk_that_is_named_twice_or_was_staged_before_is_refused(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    upload(broker, data, "c1", messages[:1], [0])
    upload(broker, data, "c2", messages[1:], [1])
    end = broker.log.end
    with pytest.raises(Refused, match="chunk c1 is staged already, or named twice"):
        stage(broker, epoch, 2, T0 + HOUR_MS, ["c1", "c2", "c1"])
    assert (broker.log.end, broker.fold.far.taken) == (end, 0)
    stage(broker, epoch, 1, T0 + FAR_MS, ["c1"])
    for again in (["c1"], ["c2", "c1"]):
        with pytest.raises(Refused, match="chunk c1 is staged already, or named twice"):
            stage(broker, epoch, 2, T0 + HOUR_MS, again)
    data.crash(broker)
    broker = data.open()
    with pytest.raises(Refused, match="chunk c1 is staged already"):
        stage(broker, epoch, 2, T0 + HOUR_MS, ["c1"])
    stage(broker, epoch, 2, T0 + HOUR_MS, ["c2"])
    advance_to(broker, T0, T0 + HOUR_MS)
    assert bodies(broker) == ["0", "1"]


def test_a_cancelled_message_that_a_chunk_brings_never_comes(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    assert cancel(broker, "k0", T0 + FAR_MS, T0 + 1) == Cancelled.CANCELLED
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, T0 + HOUR_MS, ["c1"])
    assert cancel(broker, "k1", T0 + FAR_MS + 1, T0 + 2) == Cancelled.CANCELLED
    assert cancel(broker, "k1", T0 + FAR_MS + 1, T0 + 2) == Cancelled.CANCELLED
    advance_to(broker, T0 + 2, T0 + DAY_MS)
    assert bodies(broker) == []
    assert waiting_count(broker) == 0


def test_a_cancel_of_what_only_the_table_knows_is_unknown_and_still_works(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    stage(broker, epoch, 2, T0)
    assert cancel(broker, "k0", T0 + FAR_MS, T0 + 1) == Cancelled.UNKNOWN
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, T0 + HOUR_MS, ["c1"])
    advance_to(broker, T0 + 1, T0 + HOUR_MS)
    assert bodies(broker) == ["1"]


def test_a_cancelled_message_never_comes_even_if_the_pipeline_takes_it_late(data: Data) -> None:
    """The pipeline lags: it has taken the message, not yet the cancel, when the due instant passes."""
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    assert cancel(broker, "k0", due, T0 + 1) == Cancelled.CANCELLED
    stage(broker, epoch, 2, T0 + 1)
    advance_to(broker, T0 + 1, due + MINUTE_MS)
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, epoch, 2, due + 1, ["c1"], due + MINUTE_MS)
    advance_to(broker, due + MINUTE_MS, due + HOUR_MS)
    assert bodies(broker) == ["1"]


def test_what_a_rescue_fired_is_not_fired_again_by_a_stage(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    upload(broker, data, "c1", messages, [0, 1])
    advance_to(broker, T0, due)
    assert bodies(broker) == ["0"], "untaken messages are rescued while the pipeline lives"
    stage(broker, epoch, 2, due + 1, ["c1"], due)
    advance_to(broker, due, due + HOUR_MS)
    assert bodies(broker) == ["0", "1"]
    assert (broker.fold.held, waiting_count(broker)) == ({}, 0)


def test_a_cancel_between_rescue_and_stage_removes_both(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    upload(broker, data, "c1", messages, [0, 1])
    advance_to(broker, T0, due - 100)
    stage(broker, epoch, 2, due + 1, ["c1"], due - 100)
    assert cancel(broker, "k0", due, due - 50) == Cancelled.CANCELLED
    advance_to(broker, due - 50, due + HOUR_MS)
    assert bodies(broker) == ["1"]


def test_a_dead_pipelines_messages_are_rescued_from_the_log_and_fire_once(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    stage(broker, epoch, 2, T0)
    broker.pipeline_alive = False
    advance_to(broker, T0, due + 1)
    assert bodies(broker) == ["0", "1"]

    broker.pipeline_alive = True
    upload(broker, data, "c1", messages, [0, 1])
    stage(broker, registered(broker, due + 1), 2, due + 1, ["c1"], due + 1)
    advance_to(broker, due + 1, due + HOUR_MS)
    assert bodies(broker) == ["0", "1"]
    assert (broker.fold.held, waiting_count(broker)) == ({}, 0)


def test_a_cancel_that_the_pipeline_took_along_holds_when_the_pipeline_dies(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    due = T0 + FAR_MS
    assert cancel(broker, "k0", due, T0 + 1) == Cancelled.CANCELLED
    stage(broker, epoch, 3, T0 + 1)
    broker.pipeline_alive = False
    advance_to(broker, T0 + 1, due + DAY_MS)
    assert bodies(broker) == ["1"]


@pytest.mark.parametrize("by", ["unique", "key"])
def test_a_rescue_honours_the_taken_cancel_of_its_own_topic_key_and_due_alone(data: Data, by: str) -> None:
    broker = data.open()
    broker.put_topic("second", T0)
    due = T0 + FAR_MS
    unique, keys = ("k", "") if by == "unique" else ("", "k other")
    send(
        broker,
        T0,
        message("cancelled", due=due, unique=unique, keys=keys),
        message("other due", due=due + 1, unique=unique, keys=keys),
    )
    send(
        broker,
        T0,
        message("other topic", topic="second", due=due, unique=unique, keys=keys),
        message("other key", due=due, unique="x"),
    )
    assert cancel(broker, "k", due, T0 + 1, by) == Cancelled.CANCELLED
    send(broker, T0 + 2, message("key used again", due=due, unique=unique, keys=keys))
    epoch = registered(broker)
    stage(broker, epoch, broker.fold.far.length, T0 + 3)
    assert broker.fold.tombstones.count == 0, "the table carries the cancel from now on"
    data.crash(broker)
    broker = data.open()
    advance_to(broker, T0 + 3, due + DAY_MS)
    assert bodies(broker) == ["other key", "key used again", "other due"]
    assert bodies(broker, "second") == ["other topic"]
    assert (broker.fold.held, waiting_count(broker)) == ({}, 0)


def test_a_restart_after_a_rescue_of_taken_messages_finds_the_same(data: Data) -> None:
    broker, epoch, _ = far_pair(data)
    stage(broker, epoch, 2, T0)
    broker.pipeline_alive = False
    advance(broker, T0 + FAR_MS - LEAD_MS)
    assert broker.fold.wheel.count == 2
    state = recovery.state_json(broker.fold)
    data.crash(broker)
    broker = data.open()
    assert recovery.state_json(broker.fold) == state
    advance_to(broker, T0 + FAR_MS - LEAD_MS, T0 + HOUR_MS)
    assert bodies(broker) == ["0", "1"]


def test_imported_rows_fire_though_a_rescue_covers_their_arrival(data: Data) -> None:
    broker, epoch, messages = far_pair(data)
    due = T0 + FAR_MS
    advance_to(broker, T0, due - 1)
    arrival = int(broker.read_far(0, 1)["arrival"][0])
    write_chunk(data.disk, "imported", [(due, arrival, int(broker.read_far(0, 1)["queue"][0]), messages[0])], flags=1)
    stage(broker, epoch, 2, due + 1, ["imported"], due - 1)
    advance(broker, due)
    assert bodies(broker) == ["0", "0"]


def test_a_burst_in_several_chunks_comes_in_order_of_arrival(data: Data) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    messages = [message(f"{n:02d}", due=due) for n in range(30)]
    send(broker, T0, *messages)
    epoch = registered(broker)
    broker.pipeline_alive = True
    upload(broker, data, "odd", messages[1::2], list(range(1, 30, 2)))
    upload(broker, data, "even", messages[::2], list(range(0, 30, 2)))
    stage(broker, epoch, 30, due, ["odd", "even"])
    send(broker, T0 + 1, message("single", due=due))
    advance(broker, due)
    assert bodies(broker) == [f"{n:02d}" for n in range(30)] + ["single"]


# ----------------------------------------------------------------------------------------- topics, groups, offsets


def test_a_topic_is_made_changed_and_deleted(data: Data) -> None:
    broker = data.open(topic=None)
    with pytest.raises(TopicNotFound):
        broker.send([message()], T0)
    broker.put_topic(TOPIC, T0, read_queue_count=2, write_queue_count=2, perm=4, attributes={"a": "b"})
    topic = broker.fold.topics.get(TOPIC)
    assert (topic.read_queue_count, topic.perm, topic.attributes) == (2, 4, {"a": "b"})
    broker.put_topic(TOPIC, T0, read_queue_count=3, write_queue_count=3)
    assert broker.fold.topics.get(TOPIC).read_queue_count == 3
    assert broker.delete_topic(TOPIC, T0) == 0
    with pytest.raises(TopicNotFound):
        broker.delete_topic(TOPIC, T0)


def test_deleting_a_topic_cancels_what_waits_for_it_and_says_how_many(data: Data) -> None:
    broker = data.open()
    for n, due in enumerate((T0 + 100, T0 + FAR_MS, T0 + FAR_MS)):
        send(broker, T0, message(str(n), unique=f"k{n}", due=due), message(str(n), unique=f"l{n}", due=due))
        assert cancel(broker, f"k{n}", due, T0 + 1) == Cancelled.CANCELLED
    assert broker.delete_topic(TOPIC, T0 + 2) == 3
    broker.put_topic(TOPIC, T0 + 3, read_queue_count=1, write_queue_count=1)
    advance_to(broker, T0 + 3, T0 + DAY_MS)
    assert bodies(broker) == [], "a topic of the same name gets nothing that waited for the old one"
    assert (broker.fold.held, waiting_count(broker)) == ({}, 0)


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("no spaces", {}, IllegalMessage, "topic 'no spaces'"),
        ("SCHEDULE_TOPIC_XXXX", {}, IllegalMessage, "belongs to the broker"),
        ("postdate_sys_cancel", {}, IllegalMessage, "belongs to the broker"),
        ("t", {"read_queue_count": 0}, UsageError, "read_queue_count of topic 't' is 0, expected 1 to 1024"),
        ("t", {"write_queue_count": 1_025}, UsageError, "write_queue_count of topic 't' is 1025"),
        ("t", {"perm": 8}, UsageError, "perm of topic 't' is 8"),
    ],
)
def test_a_topic_that_cannot_be_is_refused(
    data: Data, name: str, options: dict[str, int], error: type[Exception], said: str
) -> None:
    broker = data.open()
    end = broker.log.end
    with pytest.raises(error, match=said):
        broker.put_topic(name, T0, **options)  # type: ignore[arg-type]
    assert broker.log.end == end


def test_topics_have_a_limit(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, topics_max=2))
    broker.put_topic("second", T0)
    with pytest.raises(FlowControl, match="topics_max: there are 2"):
        broker.put_topic("third", T0)
    broker.put_topic("second", T0, perm=4)


def test_groups_and_offsets_are_kept_over_a_restart(data: Data) -> None:
    broker = data.open(queue_count=2)
    broker.put_group("g", {"retries": 16}, T0)
    broker.commit_offsets("g", [(TOPIC, 0, 5), (TOPIC, 1, 6)], T0)
    broker.commit_offsets("h", [(TOPIC, 0, 1)], T0)
    ticket = broker.commit_offsets("g", [(TOPIC, 0, 7)], T0)
    assert broker.fold.groups.offset("g", TOPIC, 0) is None
    broker.flush()
    assert ticket.answers == [None]
    data.crash(broker)
    broker = data.open()
    groups = broker.fold.groups
    assert (groups.offset("g", TOPIC, 0), groups.offset("g", TOPIC, 1), groups.offset("h", TOPIC, 0)) == (7, 6, 1)
    assert groups.settings == {"g": {"retries": 16}}
    broker.delete_group("g", T0)
    assert (groups.offset("g", TOPIC, 0), groups.settings) == (None, {})
    broker.delete_topic(TOPIC, T0)
    assert groups.offset("h", TOPIC, 0) is None


def test_offsets_that_make_no_sense_are_refused(data: Data) -> None:
    broker = data.open()
    with pytest.raises(UsageError, match="offset -1 of group 'g'"):
        broker.commit_offsets("g", [(TOPIC, 0, -1)], T0)
    with pytest.raises(UsageError, match="queue 5"):
        broker.commit_offsets("g", [(TOPIC, 5, 1)], T0)
    with pytest.raises(IllegalMessage, match="group"):
        broker.commit_offsets("a b", [], T0)
    assert broker.offsets(TOPIC, 0) == (0, 0)


# --------------------------------------------------------------------------------------------- snapshots, restarts


def busy(data: Data, broker: Broker) -> None:
    """Something of every kind: visible, near, far, cancelled, levels, staged, rescued, tables."""
    broker.put_topic("second", T0, read_queue_count=3, write_queue_count=3)
    broker.put_group("g", {"a": 1}, T0)
    broker.put_group("brief", {}, T0)
    broker.delete_group("brief", T0)
    broker.commit_offsets("g", [(TOPIC, 0, 1)], T0)
    due = T0 + FAR_MS
    send(broker, T0, *[message(f"now{n}", tag="t") for n in range(10)])
    send(broker, T0, *[message(f"near{n}", unique=f"n{n}", due=T0 + 1_000 + n % 3) for n in range(10)])
    far = [message(f"far{n}", unique=f"f{n}", due=due + n % 3) for n in range(10)]
    send(broker, T0, *far)
    send(broker, T0, *[message(f"level{n}", topic="second", queue_id=n, DELAY=str(n + 1)) for n in range(3)])
    cancel(broker, "n4", T0 + 1_001, T0 + 1)
    cancel(broker, "f4", due + 1, T0 + 2)
    epoch = registered(broker, T0 + 3)
    upload(broker, data, "c1", far[:6], list(range(6)))
    stage(broker, epoch, 6, due + 2, ["c1"], T0 + 4)
    cancel(broker, "f3", due, T0 + 5)
    advance(broker, T0 + 1_001)
    advance(broker, due - LEAD_MS)


@pytest.mark.parametrize("ending", ["crash", "close", "snapshot and crash"])
def test_a_restart_finds_the_same_state(data: Data, ending: str) -> None:
    broker = data.open()
    busy(data, broker)
    if ending == "snapshot and crash":
        snapshot(broker)
        send(broker, T0 + FAR_MS - LEAD_MS, message("after", due=T0 + FAR_MS + 7))
    state = recovery.state_json(broker.fold)
    (data.close if ending == "close" else data.crash)(broker)

    broker = data.open()
    assert recovery.state_json(broker.fold) == state
    advance_to(broker, T0 + FAR_MS - LEAD_MS, T0 + FAR_MS + 10)
    expected = {f"now{n}" for n in range(10)} | {f"near{n}" for n in range(10) if n != 4}
    expected |= {f"far{n}" for n in range(10) if n not in (3, 4)}
    found = [body for body in bodies(broker) if body != "after"]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_restart_after_every_flush_finds_the_same_state(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = data.open()
    copies: list[tuple[Path, str]] = []
    flush = Broker.flush

    def flush_and_copy(self: Broker) -> None:
        flush(self)
        folder = tmp_path / f"copy{len(copies)}"
        shutil.copytree(data.folder, folder)
        copies.append((folder, recovery.state_json(self.fold)))

    monkeypatch.setattr(Broker, "flush", flush_and_copy)
    busy(data, broker)
    monkeypatch.undo()
    assert len(copies) >= 15
    for folder, state in copies:
        again = Broker(RealDisk(folder), SMALL)
        assert recovery.state_json(again.fold) == state, "from the log alone"
        snapshot(again)
        again.abandon()
        again = Broker(RealDisk(folder), SMALL)
        assert recovery.state_json(again.fold) == state, "from a snapshot"
        again.abandon()


def test_a_snapshot_in_steps_holds_the_state_of_its_first_step(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, due_second_messages_max=1_000))
    due = T0 + 5_000
    for n in range(20):
        send(broker, T0, message(f"near{n}", unique=f"k{n}", due=due + n))
    send(broker, T0, message("far", unique="far", due=T0 + FAR_MS))

    steps = broker.snapshot()
    at_ms = T0 + 1
    for number, step in enumerate(steps):
        if step is not None:
            step()
        if number == 0:
            broker.put_topic("new", at_ms, read_queue_count=2, write_queue_count=2)
            send(broker, at_ms, message("new", topic="new", queue_id=1, due=due + 3))
            assert cancel(broker, "k5", due + 5, at_ms) == Cancelled.CANCELLED
            assert cancel(broker, "far", T0 + FAR_MS, at_ms) == Cancelled.CANCELLED
            broker.put_group("g", {}, at_ms)
            broker.commit_offsets("g", [(TOPIC, 0, 3)], at_ms)
            advance(broker, due + 2)
        send(broker, due + 2, message(f"step{number}", due=due + 7))
    state = recovery.state_json(broker.fold)
    data.crash(broker)

    broker = data.open(dataclasses.replace(SMALL, due_second_messages_max=1_000))
    assert json.loads(recovery.state_json(broker.fold)) == json.loads(state)
    assert broker.fold.wheel.count > 0
    advance_to(broker, due + 2, T0 + HOUR_MS)
    assert bodies(broker, "new", 1) == ["new"]
    assert "near5" not in bodies(broker)
    assert "far" not in bodies(broker)


def test_only_one_snapshot_is_taken_at_a_time_and_none_for_nothing(data: Data) -> None:
    broker = data.open()
    steps = broker.snapshot()
    next(steps)
    with pytest.raises(UsageError, match="being taken already"):
        next(broker.snapshot())
    steps.close()  # type: ignore[attr-defined]
    snapshot(broker)
    assert len(data.disk.list("snapshots")) == 1
    snapshot(broker)
    assert len(data.disk.list("snapshots")) == 1, "nothing has happened since"
    for n in range(3):
        send(broker, T0, message(str(n)))
        snapshot(broker)
    assert len(data.disk.list("snapshots")) == 2


def test_a_snapshot_is_due_by_bytes_or_by_batches(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, snapshot_bytes=4_096, snapshot_batches=5))
    snapshot(broker)
    due = []
    for _ in range(5):
        send(broker, T0, message())
        due.append(broker.snapshot_is_due)
    assert due == [False, False, False, False, True]
    snapshot(broker)
    due = [broker.snapshot_is_due]
    send(broker, T0, message(bytes(4_000)))
    due.append(broker.snapshot_is_due)
    assert due == [False, True]


def test_a_snapshot_that_fails_leaves_nothing_behind_and_the_next_one_works(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("kept", due=T0 + 100))
    for call in ("write", "sync", "rename"):
        data.disk.fault = lambda name, path, call=call: (  # type: ignore[misc]
            OSError(errno.ENOSPC, "No space left") if name == call and path.startswith("snapshots/") else None
        )
        with pytest.raises(OSError, match="No space left"):
            snapshot(broker)
        data.disk.fault = lambda _call, _path: None
        assert data.disk.list("snapshots") == [], f"a failed {call} costs no room"
    snapshot(broker)
    assert len(data.disk.list("snapshots")) == 1
    advance(broker, T0 + 100)
    assert bodies(broker) == ["kept"]


def test_a_damaged_snapshot_is_replaced_by_the_older_one_and_the_log(data: Data) -> None:
    broker = data.open()
    for n in range(3):
        send(broker, T0 + n, message(str(n)))
        snapshot(broker)
    send(broker, T0 + 9, message("last"))
    state = recovery.state_json(broker.fold)
    data.crash(broker)
    newest = data.folder / "snapshots" / data.disk.list("snapshots")[-1]
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)

    broker = data.open()
    assert recovery.state_json(broker.fold) == state
    good = data.disk.list("snapshots")[0]
    send(broker, T0 + 10, message("more"))
    snapshot(broker)
    assert good in data.disk.list("snapshots"), "a damaged one is not one of the two that are kept"
    newest.unlink(missing_ok=True)


def test_without_any_snapshot_the_log_alone_is_enough(data: Data) -> None:
    broker = data.open()
    busy(data, broker)
    snapshot(broker)
    state = recovery.state_json(broker.fold)
    data.crash(broker)
    for name in data.disk.list("snapshots"):
        data.disk.remove(f"snapshots/{name}")
    assert recovery.state_json(data.open().fold) == state


def test_a_damaged_queue_file_is_made_again_from_the_log(data: Data) -> None:
    broker = data.open()
    snapshot(broker)
    send_each(broker, T0, [message(str(n)) for n in range(100)])
    snapshot(broker)
    number = broker.fold.topics.get(TOPIC).numbers[0]
    data.crash(broker)
    path = data.folder / "queues" / str(number) / "entries" / f"{64:020d}"
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    broker = data.open()
    assert bodies(broker) == [str(n) for n in range(100)]


# -------------------------------------------------------------------------------------------------------- retention


def segment_of_messages(broker: Broker, at_ms: int, label: str) -> None:
    """Fills the rest of a segment with visible messages."""
    first = broker.log.end >> 16
    count = 0
    while broker.log.end >> 16 == first:
        send(broker, at_ms, *[message(f"{label}{count + n}".ljust(500)) for n in range(16)])
        count += 16


KEEP_DAY = dataclasses.replace(SMALL, retention_ms=DAY_MS)


def test_segments_go_when_nothing_needs_them_and_the_queue_begins_later(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    for n in range(4):
        segment_of_messages(broker, T0 + n, f"{n}.")
    later = T0 + 10 + DAY_MS
    assert broker.retain(later) == 0, "without two snapshots nothing goes"
    snapshot(broker)
    send(broker, T0 + 10, message("x"))
    snapshot(broker)
    assert broker.retain(T0 + 10) == 0, "nothing goes before its time"
    assert broker.retain(later) == 4
    low, high = broker.offsets(TOPIC, 0)
    assert 0 < low < high
    assert bodies(broker)[-1] == "x"
    gone = broker.pull(TOPIC, 0, 0)
    assert (gone.status, gone.next_offset) == (PullStatus.ILLEGAL_OFFSET, low)


@pytest.mark.parametrize("ending", ["crash", "close"])
def test_a_restart_after_retention_finds_what_is_left(data: Data, ending: str) -> None:
    broker = data.open(KEEP_DAY)
    for n in range(4):
        segment_of_messages(broker, T0 + n, f"{n}.")
    snapshot(broker)
    send(broker, T0 + 10, message("x"))
    snapshot(broker)
    assert broker.retain(T0 + 10 + DAY_MS) == 4
    left, offsets = bodies(broker), broker.offsets(TOPIC, 0)
    (data.close if ending == "close" else data.crash)(broker)
    broker = data.open(KEEP_DAY)
    assert bodies(broker) == left
    assert broker.offsets(TOPIC, 0) == offsets


def test_a_segment_stays_while_a_message_in_it_waits(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    send(broker, T0, message("waits", due=T0 + 100 * DAY_MS))
    for n in range(3):
        segment_of_messages(broker, T0 + n, f"{n}.")
    for _ in range(2):
        send(broker, T0 + 10, message("x"))
        snapshot(broker)
    broker.retain(T0 + 50 * DAY_MS)
    assert broker.log.segment_numbers()[0] == 0
    advance_to(broker, T0 + 10, T0 + 100 * DAY_MS)
    found = pulled(broker)
    assert found[-1].body == b"waits"
    assert found[-1].stored_at_ms == T0 + 100 * DAY_MS
    for _ in range(2):
        send(broker, T0 + 100 * DAY_MS, message("x"))
        snapshot(broker)
    broker.retain(T0 + 101 * DAY_MS - 1)
    assert broker.log.segment_numbers()[0] == 0, "a consumer has a day from when it became visible"
    broker.retain(T0 + 101 * DAY_MS)
    assert broker.log.segment_numbers()[0] > 0


def test_a_pull_passes_over_records_that_are_gone(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    send(broker, T0, message("waits", due=T0 + 100 * DAY_MS), message("first"))
    for n in range(4):
        segment_of_messages(broker, T0 + n, f"{n}.")
    for _ in range(2):
        send(broker, T0 + 10, message("last"))
        snapshot(broker)
    assert broker.retain(T0 + 50 * DAY_MS) > 0
    found = bodies(broker)
    assert found[0] == "first"
    assert found[-1] == "last"
    assert len(found) < broker.offsets(TOPIC, 0)[1]


def test_what_the_pipeline_has_taken_is_not_held_and_its_chunk_goes_after_its_time(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    due = T0 + FAR_MS
    far = [message(str(n), due=due) for n in range(3)]
    send(broker, T0, *far)
    epoch = registered(broker)
    broker.pipeline_alive = True
    assert broker.fold.held == {0: 3}
    upload(broker, data, "c1", far, [0, 1, 2])
    stage(broker, epoch, 3, due, ["c1"])
    assert broker.fold.held == {}
    for _ in range(2):
        segment_of_messages(broker, T0 + 1, "x")
        snapshot(broker)
    broker.retain(T0 + 2 * DAY_MS)
    assert data.disk.list("chunks") == ["c1"], "its messages wait"
    advance(broker, due)
    for _ in range(2):
        segment_of_messages(broker, due, "y")
        snapshot(broker)
    broker.retain(due + DAY_MS - 1)
    assert [record.body for record in pulled(broker)].count(b"1") == 1
    broker.retain(due + DAY_MS)
    assert data.disk.list("chunks") == []
    assert [record.body for record in pulled(broker)].count(b"1") == 0
    data.crash(broker)
    data.open(KEEP_DAY)


def test_a_rescue_of_taken_messages_leaves_those_whose_record_is_gone_to_the_pipeline(data: Data) -> None:
    """Retention may take a segment from the middle: what lay there only the pipeline can bring."""
    broker = data.open(KEEP_DAY)
    due = T0 + 5 * DAY_MS
    send(broker, T0, message("first segment", due=T0 + HOUR_MS))
    segment_of_messages(broker, T0, "x")
    far = message("in the table", due=due)
    send(broker, T0, far)
    segment_of_messages(broker, T0, "y")
    epoch = registered(broker)
    upload(broker, data, "c1", [far], [1])
    stage(broker, epoch, 2, T0 + 1)
    advance_to(broker, T0, T0 + HOUR_MS)
    assert "first segment" in bodies(broker), "the pipeline is dead, so the broker rescues"
    for _ in range(2):
        send(broker, T0 + HOUR_MS, message("z"))
        snapshot(broker)
    at_ms = T0 + HOUR_MS + DAY_MS - 1
    assert broker.retain(at_ms) == 1
    assert broker.log.segment_numbers()[:2] == [0, 2], "what became visible an hour later keeps its segment"
    advance_to(broker, at_ms, due)
    assert bodies(broker).count("in the table") == 0
    broker.pipeline_alive = True
    stage(broker, epoch, broker.fold.far.length, due, ["c1"], due)
    advance_to(broker, due, due + HOUR_MS)
    assert bodies(broker).count("in the table") == 1


def test_without_a_pipeline_a_gap_in_the_log_makes_nothing_come_twice(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    due = T0 + 5 * DAY_MS
    send(broker, T0, message("before the gap", due=due))
    segment_of_messages(broker, T0, "x")
    segment_of_messages(broker, T0, "y")
    send(broker, T0, message("behind the gap", due=due))
    for _ in range(2):
        send(broker, T0, message("z"))
        snapshot(broker)
    assert broker.retain(T0 + 2 * DAY_MS) == 1
    assert broker.log.segment_numbers() == [0, 2]
    advance_to(broker, T0, due + DAY_MS)
    assert [body for body in bodies(broker) if "gap" in body] == ["before the gap", "behind the gap"]
    assert (broker.fold.held, waiting_count(broker)) == ({}, 0)


def test_a_first_pipeline_after_retention_takes_what_was_rescued_long_ago(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    for n in range(2):
        send(broker, T0 + n * DAY_MS, message(f"far{n}", due=T0 + n * DAY_MS + HOUR_MS))
        advance_to(broker, T0 + n * DAY_MS, T0 + n * DAY_MS + HOUR_MS)
        segment_of_messages(broker, T0 + n * DAY_MS + HOUR_MS, f"{n}.")
        snapshot(broker)
    at_ms = T0 + 2 * DAY_MS + HOUR_MS
    assert broker.retain(at_ms - 1) > 0
    send(broker, at_ms, message("far2", due=at_ms + HOUR_MS))
    advance_to(broker, at_ms, at_ms + HOUR_MS)
    stage(broker, registered(broker, at_ms + HOUR_MS), broker.fold.far.length, at_ms + HOUR_MS, [], at_ms + HOUR_MS)
    assert broker.fold.held == {}
    data.crash(broker)
    assert data.open(KEEP_DAY).fold.held == {}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("count", [6, 140])
def test_the_broker_does_not_spin_over_taken_messages_whose_record_is_gone(
    data: Data, count: int, restarts: bool
) -> None:
    """With 140 of them whole files of the far queue go too, and the snapshots that are kept know nothing of that."""
    settings = dataclasses.replace(KEEP_DAY, far_block_rows=4)
    broker = data.open(settings)
    send_each(broker, T0, [message(str(n), due=T0 + 10 * DAY_MS) for n in range(count)])
    epoch = registered(broker)
    stage(broker, epoch, count, T0 + 1)
    for n in range(3):
        segment_of_messages(broker, T0 + 1, f"{n}.")
        snapshot(broker)
    assert broker.retain(T0 + 2 * DAY_MS) > 0
    assert len(data.disk.list("far")) == 1
    if restarts:
        data.crash(broker)
        broker = data.open(settings)
    at_ms = T0 + 10 * DAY_MS
    assert advance(broker, at_ms) > at_ms, "no pipeline, no record: there is nothing to do"


def test_a_rescue_works_after_retention_has_dropped_the_beginning_of_the_far_queue(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    for n in range(10):
        send(broker, T0, *[message(f"{n}", due=T0 + FAR_MS) for _ in range(15)])
    epoch = registered(broker)
    stage(broker, epoch, 150, T0 + FAR_MS)
    for n in range(3):
        segment_of_messages(broker, T0 + 1, f"{n}.")
        snapshot(broker)
    assert broker.retain(T0 + 2 * DAY_MS) > 0
    at_ms = T0 + 2 * DAY_MS
    send(broker, at_ms, message("rescued", due=at_ms + FAR_MS))
    advance_to(broker, at_ms, at_ms + FAR_MS)
    assert bodies(broker)[-1] == "rescued"
    data.crash(broker)
    assert bodies(data.open(KEEP_DAY))[-1] == "rescued"


# ---------------------------------------------------------------------------------------------------- failing disks


def test_a_fire_that_fails_pauses_longer_each_time_and_recovers(data: Data) -> None:
    broker = data.open()
    for n in range(50):
        send(broker, T0, message(f"due{n}", due=T0 + 1 + n))
    no_new_segments(data)
    fill_all(broker)
    at_ms = T0
    with suppress(DiskFull):
        while at_ms < T0 + 50:
            at_ms += 1
            broker.advance(at_ms)  # a fire is smaller than any other batch
            broker.flush()
    assert broker.fire_failures == 1
    visible = len(bodies(broker))
    pauses = [broker.advance(at_ms) - at_ms]
    for _ in range(11):
        at_ms += pauses[-1]
        assert broker.advance(at_ms - 1) == at_ms, "until then a call does nothing"
        with pytest.raises(DiskFull):
            broker.advance(at_ms)
        assert isinstance(broker.fire_error, DiskFull)
        pauses.append(broker.advance(at_ms) - at_ms)
    assert pauses == [10, 20, 40, 80, 160, 320, 640, 1_280, 2_560, 5_000, 5_000, 5_000]
    assert broker.fire_failures == 12
    assert len(bodies(broker)) == visible < broker.offsets(TOPIC, 0)[1] + 50
    at_ms += pauses[-1]

    data.disk.fault = lambda _call, _path: None
    advance(broker, at_ms)
    assert (broker.fire_failures, broker.fire_error) == (0, None)
    assert [body for body in bodies(broker) if body.startswith("due")] == [f"due{n}" for n in range(50)]


def test_after_a_failed_fsync_the_broker_takes_nothing_until_it_is_opened_again(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("acknowledged"))
    ticket = broker.send([message("lost or found")], T0)
    data.disk.fault = lambda call, _: OSError(errno.EIO, "Input/output error") if call == "file.sync" else None
    with pytest.raises(LogFailed):
        broker.flush()
    data.disk.fault = lambda _call, _path: None
    for _ in range(2):
        with pytest.raises(LogFailed):
            broker.send([message()], T0)
        with pytest.raises(LogFailed):
            broker.flush()
    assert ticket.answers is None
    assert bodies(broker) == ["acknowledged"], "what was not durable was never visible"
    data.crash(broker)
    broker = data.open()
    assert bodies(broker) == ["acknowledged", "lost or found"]
    send(broker, T0, message("goes on"))


def test_queues_that_cannot_be_written_lose_nothing(data: Data) -> None:
    broker = data.open()
    full = OSError(errno.ENOSPC, "No space left on device")
    data.disk.fault = lambda call, path: full if call == "write" and path.startswith(("queues/", "far/")) else None
    send_each(broker, T0, [message(str(n), due=T0 + FAR_MS if n % 2 else None) for n in range(100)])
    assert bodies(broker) == [str(n) for n in range(0, 100, 2)]
    with pytest.raises(OSError, match="No space left"):
        snapshot(broker)
    data.disk.fault = lambda _call, _path: None
    snapshot(broker)
    advance_to(broker, T0, T0 + FAR_MS)
    expected = [str(n) for n in range(0, 100, 2)] + [str(n) for n in range(1, 100, 2)]
    assert bodies(broker) == expected
    data.crash(broker)
    assert bodies(data.open()) == expected


# ---------------------------------------------------------------------------------------------------- odd folders


def test_a_folder_that_is_not_ours_is_refused_and_left_alone(data: Data) -> None:
    data.folder.mkdir()
    (data.folder / "thesis.txt").write_text("mine")
    with pytest.raises(ForeignFolder, match=r"holds 'thesis.txt' but no file FORMAT.*give the broker an empty one"):
        data.open()
    assert [path.name for path in data.folder.iterdir()] == ["thesis.txt"], "not even a lock is left in it"
    assert (data.folder / "thesis.txt").read_text() == "mine"


def test_a_folder_of_a_future_version_is_refused(data: Data) -> None:
    data.close(data.open())
    fixed = json.loads((data.folder / "FORMAT").read_text())
    (data.folder / "FORMAT").write_text(json.dumps({**fixed, "format": 2}))
    data.damaged = True
    with pytest.raises(ForeignFolder, match=r"format 2, this program knows up to 1.*newer Postdate"):
        data.open()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "x"}'])
def test_a_damaged_format_file_is_named(data: Data, text: str) -> None:
    data.folder.mkdir()
    (data.folder / "FORMAT").write_text(text)
    data.damaged = True
    with pytest.raises(ForeignFolder, match="FORMAT is not readable"):
        data.open()


def test_a_folder_in_use_is_refused_and_free_after_closing(data: Data) -> None:
    broker = data.open()
    with pytest.raises(FolderInUse, match="is in use by process"):
        Broker(RealDisk(data.folder), SMALL)
    data.close(broker)
    data.open()


def test_a_broker_that_could_not_open_lets_the_folder_go(data: Data) -> None:
    data.folder.mkdir()
    (data.folder / "thesis.txt").write_text("mine")
    with pytest.raises(ForeignFolder):
        data.open()
    (data.folder / "thesis.txt").unlink()
    data.open()


def test_a_corrupt_log_is_named_and_the_log_is_left_as_it_is(data: Data) -> None:
    broker = data.open()
    ticket = send(broker, T0, message("hurt"))
    send(broker, T0, message("witness"))
    data.crash(broker)
    segment = data.folder / "log" / f"{0:020d}"
    damaged = bytearray(segment.read_bytes())
    damaged[ticket.offsets[0] + 88] ^= 1
    segment.write_bytes(damaged)
    before = contents(data.folder, "log")
    data.damaged = True
    with pytest.raises(CorruptLog, match=r"segment log/00000000000000000000, offset .*checksum"):
        data.open()
    assert contents(data.folder, "log") == before


def test_a_folder_keeps_its_fixed_sizes_whatever_the_settings_say(data: Data) -> None:
    data.close(data.open())
    broker = data.open(dataclasses.replace(SMALL, segment_bytes=1 << 20, queue_file_rows=128))
    assert broker.log.segment_end(0) == 1 << 16
    send_each(broker, T0, [message(str(n)) for n in range(100)])
    number = broker.fold.topics.get(TOPIC).numbers[0]
    assert data.disk.list(f"queues/{number}/entries") == [f"{0:020d}", f"{64:020d}"]


def test_a_changed_lead_is_written_to_the_log_and_counts(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, lead_ms=1_000))
    send(broker, T0, message("near", due=T0 + 1_000), message("far", due=T0 + 1_001))
    assert (broker.fold.wheel.count, broker.fold.far.length) == (1, 1)
    data.crash(broker)
    broker = data.open(dataclasses.replace(SMALL, lead_ms=2_000))
    assert (broker.fold.wheel.count, broker.fold.far.length) == (1, 1), "what was decided stays so"
    send(broker, T0, message("near", due=T0 + 2_000))
    assert broker.fold.wheel.count == 2
    advance_to(broker, T0, T0 + 2_000)
    assert len(bodies(broker)) == 3


def test_a_keeper_zeroes_segments_ahead_until_the_broker_is_closed(data: Data) -> None:
    broker = data.open()
    zeroed = threading.Semaphore(0)

    def fault(call: str, path: str) -> None:
        if call == "rename" and path.startswith("log/"):
            zeroed.release()

    data.disk.fault = fault
    missing = 2 - broker.log.spare_count
    broker.start_keeper()
    for _ in range(missing):
        assert zeroed.acquire(timeout=10)
    before = threading.active_count()
    assert before >= 2
    segment_of_messages(broker, T0, "x")
    assert zeroed.acquire(timeout=10), "a spare was used, so the next one is made"
    data.close(broker)
    assert threading.active_count() == before - 1
    assert data.disk.list("log") == [f"{n << 16:020d}" for n in range(4)], "two with messages, two ahead"
    assert data.disk.read(f"log/{3 << 16:020d}", 0, 1 << 17) == bytes(1 << 16)
    assert bodies(data.open())[0].startswith("x0")


# ------------------------------------------------------------------------------------------------------------ async


def test_in_async_mode_a_message_is_visible_before_it_is_durable(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    ticket = broker.send([message("fast")], T0)
    assert ticket.answer == 0
    assert bodies(broker) == ["fast"]
    assert broker.log.durable < broker.log.end
    broker.send([message("later", due=T0 + 10)], T0)
    broker.advance(T0 + 10)
    assert bodies(broker) == ["fast", "later"]


def test_in_async_mode_a_stage_is_durable_when_it_is_answered(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    broker.send([message(due=T0 + FAR_MS)], T0)
    epoch = registered(broker)
    broker.send([message()], T0)
    stage(broker, epoch, 1, T0 + 1)
    assert broker.log.durable == broker.log.end


def test_in_async_mode_a_snapshot_makes_the_log_durable_first(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    broker.send([message("fast")], T0)
    position = broker.fold.position
    snapshot(broker)
    assert broker.log.durable >= position
    points = data.disk.points
    assert points.index("log.flushed") < points.index("snapshot.synced")


def test_a_batch_is_synced_before_it_is_answered(data: Data) -> None:
    broker = data.open()
    broker.log.prepare_segment()
    data.disk.points.clear()
    send(broker, T0, message())
    assert data.disk.points[:4] == ["log.append", "log.append.written", "log.flush", "log.flushed"]

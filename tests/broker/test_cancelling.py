"""Cancelling: the answer is the truth, and a cancelled message never comes."""

import pytest

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.config import Settings
from postdate.contract import Stage
from postdate.errors import TopicNotFound, UsageError
from postdate.message import Cancelled
from postdate.state import saved
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    KEEP_DAY,
    LEAD_MS,
    SMALL,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    bodies,
    cancel,
    message,
    registered,
    segment_of_messages,
    send,
    snapshot,
    waiting_count,
)


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
        assert ticket.answer.outcome == Cancelled.CANCELLED
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
    before = saved.state_json(broker.fold)
    data.close(broker)
    assert saved.state_json(data.open().fold) == before


def test_tombstones_are_forgotten_when_their_work_is_done(data: Data) -> None:
    broker = data.open()
    for n, due in enumerate((T0 + 100, T0 + FAR_MS)):
        send(broker, T0, message("cancelled", unique=f"k{n}", due=due))
        cancel(broker, f"k{n}", due, T0 + 1)
    assert broker.fold.cancels.count == 2
    advance_to(broker, T0 + 1, T0 + DAY_MS)
    send(broker, T0 + DAY_MS, message("time passes with the batches alone"))
    assert broker.fold.cancels.count == 0
    assert broker.fold.references.held == {}, "nothing waits any more, so no segment is held"
    assert waiting_count(broker) == 0


def test_a_cancel_while_a_snapshot_runs_hits_nobody_else_after_a_clock_step_back(data: Data) -> None:
    """The slot of a due was fired, and the same due has a new slot: two slots, of which the snapshot holds one."""
    broker = data.open(queue_count=2)
    due = T0 + 1_000
    send(broker, T0, message("fired", unique="a", due=due))
    steps = broker.snapshot()
    next(steps)
    advance(broker, due)
    send(broker, T0 + 500, message("cancelled", unique="b", due=due, queue_id=1))
    assert cancel(broker, "b", due, T0 + 500) == Cancelled.CANCELLED
    for step in steps:
        if step is not None:
            step()
    assert (bodies(broker), bodies(broker, TOPIC, 1)) == (["fired"], [])
    data.crash(broker)
    broker = data.open()
    advance(broker, due)
    assert (bodies(broker), bodies(broker, TOPIC, 1)) == (["fired"], [])


def test_a_cancel_long_after_delivery_and_retention_is_unknown(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    send(broker, T0, message("long ago", unique="k", due=T0 + 5))
    for _ in range(8):
        segment_of_messages(broker, T0 + 10, "x")  # one instant: its first row stands for all of them
    for _ in range(2):
        send(broker, T0 + 20, message("y"))
        snapshot(broker)
    at_ms = T0 + 2 * DAY_MS
    assert broker.retain(at_ms) > 0
    number = broker.fold.topics.get(TOPIC).numbers[0]
    assert data.disk.list(f"queues/{number}/entries")[0] > f"{0:020d}", "not even the file of its entry is there"
    assert cancel(broker, "k", T0 + 5, at_ms) == Cancelled.UNKNOWN


@pytest.mark.parametrize("due", [NEVER - 1, NEVER, T0 + SMALL.delay_ms_max + 1, 0, -1])
def test_a_cancel_of_an_absurd_due_is_refused(data: Data, due: int) -> None:
    broker = data.open()
    end = broker.log.end
    with pytest.raises(UsageError, match=f"the due time of a cancel is {due}, expected epoch milliseconds"):
        broker.cancel(TOPIC, "k", due, T0)
    assert broker.log.end == end


def test_the_latest_due_that_a_message_may_have_can_be_cancelled(data: Data) -> None:
    broker = data.open()
    due = T0 + SMALL.delay_ms_max
    send(broker, T0, message("ten years", unique="k", due=due), message("kept", due=T0 + FAR_MS))
    assert cancel(broker, "k", due, T0) == Cancelled.CANCELLED
    advance_to(broker, T0, due + HOUR_MS)
    assert (bodies(broker), broker.wake_at_ms) == (["kept"], NEVER)


BRIEF = Settings(segment_bytes=16_384, batch_bytes_max=16_384, retention_ms=1_000, tombstones_max=5)


def cancelled_again_and_again(broker: Broker, rounds: int) -> None:
    """Each round sends a near and a far message, cancels the near one, and lets time and retention pass."""
    at_ms = T0
    for n in range(rounds):
        far = message(f"far{n}", due=at_ms + 2 * LEAD_MS)
        send(broker, at_ms, message(f"near{n}", unique=f"n{n}", due=at_ms + 1_000), far)
        assert cancel(broker, f"n{n}", at_ms + 1_000, at_ms) == Cancelled.CANCELLED
        advance_to(broker, at_ms, at_ms + 2 * LEAD_MS)
        at_ms += 2 * LEAD_MS
        assert bodies(broker)[-1] == f"far{n}"
        send(broker, at_ms, message(bytes(12_000)))
        snapshot(broker)
        at_ms += 2_000
        broker.retain(at_ms)
    assert broker.log.start > 0


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_tombstone_is_forgotten_though_no_pipeline_ever_takes_anything(data: Data, pipeline: bool) -> None:
    broker = data.open(BRIEF)
    if pipeline:
        registered(broker)
    cancelled_again_and_again(broker, 20)
    assert broker.fold.cancels.count == 0


def test_a_tombstone_of_nothing_is_forgotten_after_its_due(data: Data) -> None:
    broker = data.open()
    registered(broker)
    send(broker, T0, message("far", due=T0 + DAY_MS))
    for due in (T0 + 1_000, T0 + FAR_MS):
        assert cancel(broker, "nobody", due, T0) == Cancelled.UNKNOWN
    advance_to(broker, T0, T0 + HOUR_MS)
    send(broker, T0 + HOUR_MS, message("time passes"))
    assert broker.fold.cancels.count == 0


@pytest.mark.parametrize("delay_ms", [1_000, FAR_MS])
def test_a_repeated_cancel_is_answered_as_before_until_the_message_was_due_and_after(data: Data, delay_ms: int) -> None:
    """A rescue leaves a cancelled message out: it is in the log alone."""
    broker = data.open()
    due = T0 + delay_ms
    send(broker, T0, message("cancelled", unique="k", due=due))
    assert cancel(broker, "k", due, T0 + 1) == Cancelled.CANCELLED
    for at_ms in (due - 500, due, due + 1, due + HOUR_MS):
        advance_to(broker, broker.fold.at_ms, at_ms)
        assert cancel(broker, "k", due, at_ms) == Cancelled.CANCELLED
    assert bodies(broker) == []


def test_a_repeated_cancel_is_answered_as_before_when_the_pipeline_has_left_its_message_out(data: Data) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    send(broker, T0, message("cancelled", unique="k", due=due))
    epoch = registered(broker)
    assert cancel(broker, "k", due, T0 + 1) == Cancelled.CANCELLED
    broker.stage(Stage(epoch, (0, 2), (0, T0), (), 2, 0), T0 + 2)  # it takes the message and its cancel ...
    broker.stage(Stage(epoch, (2, 2), (T0, due + FAR_MS), (), 2, 2), T0 + 2)  # ... and has nothing to promote
    for at_ms in (T0 + 3, due - 1, due, due + HOUR_MS):
        advance_to(broker, broker.fold.at_ms, at_ms)
        assert cancel(broker, "k", due, at_ms) == Cancelled.CANCELLED
    assert bodies(broker) == []

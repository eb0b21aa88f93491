"""Orders of calls that nobody plans: what comes between a write and its flush, or long after its time."""

import dataclasses

import pytest

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.config import Limits, Settings
from postdate.errors import UsageError
from postdate.message import Cancelled
from tests.support.helpers import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    KEEP_DAY,
    LEAD_MS,
    MINUTE_MS,
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
    registered,
    segment_of_messages,
    send,
    send_each,
    snapshot,
    stage,
    upload,
    waiting_count,
    write_chunk,
)

# ---------------------------------------------------------------------------------------- retention, clocks, pending


def two_snapshots(broker: Broker, at_ms: int) -> None:
    """Ends two segments with a snapshot each, so that retention may look at what came before."""
    for n in range(2):
        segment_of_messages(broker, at_ms, f"{n}.")
        snapshot(broker)


def test_retention_waits_for_a_rescue_that_is_written_and_not_durable(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    due = T0 + 5 * DAY_MS
    far = message("far", due=due)
    send(broker, T0, far)
    epoch = registered(broker)
    upload(broker, data, "c1", [far], [0])
    stage(broker, epoch, 1, T0 + 1)
    two_snapshots(broker, T0 + 1)
    at_ms = due - LEAD_MS
    broker.advance(at_ms)
    assert broker.retain(at_ms) == 0, "the rescue was planned with the record that would go"
    broker.flush()
    advance_to(broker, at_ms, due)
    assert bodies(broker)[-1] == "far"
    stage(broker, epoch, broker.fold.far.length, due, ["c1"], due)
    advance_to(broker, due, due + HOUR_MS)
    assert bodies(broker).count("far") == 1, "the table brings it again and it is known"


def test_a_fire_does_not_wait_for_a_batch_whose_instant_the_clock_has_left(data: Data) -> None:
    broker = data.open()
    broker.send([message("ahead")], T0 + 10_000)
    broker.log.flush()
    broker.send([message("due", due=T0 + 100)], T0)  # the clock stepped back
    broker.settle()
    broker.log.flush()
    broker.send([message("pending")], T0 + 50)
    broker.settle()
    broker.advance(T0 + 100)
    broker.flush()
    assert bodies(broker) == ["ahead", "pending", "due"]


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


# ---------------------------------------------------------------------------------------------------------- cancels


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


# --------------------------------------------------------------------------------------------------- deleting topics


def test_deleting_a_topic_counts_no_cancelled_message_that_a_pending_rescue_moves(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("cancelled", unique="k", due=T0 + FAR_MS), message("kept", due=T0 + FAR_MS))
    cancel(broker, "k", T0 + FAR_MS, T0)
    broker.advance(T0 + FAR_MS - LEAD_MS)
    assert broker.delete_topic(TOPIC, T0 + FAR_MS - LEAD_MS) == 1


@pytest.mark.parametrize("delay_ms", [1_000, FAR_MS])
def test_deleting_a_topic_counts_no_message_whose_cancel_is_pending(data: Data, delay_ms: int) -> None:
    broker = data.open()
    send(broker, T0, message("cancelled", unique="k", due=T0 + delay_ms))
    broker.send([message("kept", due=T0 + delay_ms)], T0)
    ticket = broker.cancel(TOPIC, "k", T0 + delay_ms, T0)
    assert broker.delete_topic(TOPIC, T0) == 1
    assert ticket.answer.outcome == Cancelled.CANCELLED


# ---------------------------------------------------------------------------------------------- what must not pile up


def test_a_taken_row_in_the_first_block_does_not_starve_the_blocks_behind_it(data: Data) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, rescue_blocks_max=2, far_block_rows=8))
    due = T0 + FAR_MS
    send(broker, T0, message("taken", due=due))
    send_each(broker, T0, [message(str(n), due=due + n) for n in range(30)])
    stage(broker, registered(broker), 1, due + HOUR_MS)
    assert broker.rescuer.is_served(due), "so that only untaken rows are rescued"
    advance_to(broker, T0, due + MINUTE_MS)
    assert bodies(broker) == [str(n) for n in range(30)]


def test_a_rescue_needs_two_blocks_because_the_first_may_hold_nothing_for_it() -> None:
    with pytest.raises(UsageError, match="rescue_blocks_max is 1, expected at least 2"):
        Limits(rescue_blocks_max=1)


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


def forgotten_rows(data: Data) -> tuple[Broker, int]:
    """A broker without a pipeline whose first far rows are gone by retention, and the instant."""
    broker = data.open(KEEP_DAY, dataclasses.replace(SMALL_LIMITS, far_block_rows=8))
    at_ms = T0
    for n in range(4):
        send(broker, at_ms, *[message(f"{n}.{m}", due=at_ms + FAR_MS) for m in range(50)])
        advance_to(broker, at_ms, at_ms + FAR_MS)
        segment_of_messages(broker, at_ms + FAR_MS, "x")
        snapshot(broker)
        at_ms += DAY_MS
    assert broker.retain(at_ms) > 0
    return broker, at_ms


def test_without_a_pipeline_far_rows_are_forgotten_with_their_segments(data: Data) -> None:
    broker, _ = forgotten_rows(data)
    assert broker.view.far.first >= 64
    assert data.disk.list("far")[0] > f"{0:020d}", "whole files are gone"
    with pytest.raises(UsageError, match=f"the first that is there is {broker.view.far.first}"):
        broker.view.read_far(0, 10)
    first, offsets = broker.view.far.first, broker.offsets(TOPIC, 0)
    data.crash(broker)
    broker = data.open(broker.settings, broker.limits)
    assert broker.offsets(TOPIC, 0) == offsets
    assert 64 <= broker.view.far.first <= first


@pytest.mark.parametrize("restarts", [False, True])
def test_a_first_pipeline_begins_at_the_first_far_row_that_is_there(data: Data, restarts: bool) -> None:
    broker, at_ms = forgotten_rows(data)
    if restarts:
        data.crash(broker)
        broker = data.open(broker.settings, broker.limits)
    send(broker, at_ms, message("far", unique="k", due=at_ms + FAR_MS))
    epoch = registered(broker, at_ms)
    rows = broker.view.read_far(broker.view.far.first, 1_000)
    assert broker.view.far.first + len(rows) == broker.fold.far.length == 201
    upload_last(broker, data, "c1")
    stage(broker, epoch, 201, at_ms + FAR_MS, ["c1"], at_ms)
    assert cancel(broker, "k", at_ms + FAR_MS + 1, at_ms) == Cancelled.UNKNOWN
    advance_to(broker, at_ms, at_ms + DAY_MS)
    assert bodies(broker)[-1] == "far"
    assert waiting_count(broker) == 0
    assert broker.fold.references.held.keys() <= {broker.log.end >> 16}, (
        "nothing but the last cancel may hold a segment"
    )


def upload_last(broker: Broker, data: Data, name: str) -> None:
    """A chunk of the last far row."""
    row = broker.view.read_far(broker.fold.far.length - 1, 1)[0]
    far = message("far", unique="k", due=int(row["due"]))
    write_chunk(data.disk, name, [(int(row["due"]), int(row["arrival"]), int(row["queue"]), far)])

"""Retention: what leaves the disk, when, and what is left."""

import dataclasses

import pytest

from postdate.broker.broker import Broker
from postdate.broker.view import PullStatus
from postdate.errors import UsageError
from postdate.message import Cancelled
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    KEEP_DAY,
    LEAD_MS,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    bodies,
    cancel,
    message,
    pulled,
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
    assert broker.fold.references.held == {0: 3}
    upload(broker, data, "c1", far, [0, 1, 2])
    stage(broker, epoch, 3, due, ["c1"])
    assert broker.fold.references.held == {}
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
    assert (broker.fold.references.held, waiting_count(broker)) == ({}, 0)


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
    assert broker.fold.references.held == {}
    data.crash(broker)
    assert data.open(KEEP_DAY).fold.references.held == {}


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("count", [6, 140])
def test_the_broker_does_not_spin_over_taken_messages_whose_record_is_gone(
    data: Data, count: int, restarts: bool
) -> None:
    """With 140 of them whole files of the far queue go too, and the snapshots that are kept know nothing of that."""
    limits = dataclasses.replace(SMALL_LIMITS, far_block_rows=4)
    broker = data.open(KEEP_DAY, limits)
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
        broker = data.open(KEEP_DAY, limits)
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

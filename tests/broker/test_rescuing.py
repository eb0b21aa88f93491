"""Rescues and time: far messages come on time without a pipeline, and RAM holds only what is near."""

import dataclasses

import pytest

from postdate.arrival import NEVER
from postdate.config import Limits
from postdate.errors import UsageError
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    LEAD_MS,
    MINUTE_MS,
    SECOND_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    Data,
    advance,
    advance_to,
    bodies,
    message,
    pulled,
    registered,
    send,
    send_each,
    stage,
)


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
    assert broker.fold.references.held == {}


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
    broker.advance(due - 1_000)
    assert broker.wake_at_ms > due - 1_000, "nothing can be done before a message is due"
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


@pytest.mark.parametrize(
    ("block_count", "step_s", "why"),
    [
        (15, 5, "rescue_step_ms"),
        (47, 10, "twice the blocks, twice the step"),
        (480, 150, "and so on"),
        (1_000, 300, "but not longer than five leads"),
    ],
)
def test_rescues_look_further_where_more_blocks_must_be_looked_through(
    data: Data, block_count: int, step_s: int, why: str
) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, far_block_rows=2, rescue_blocks_max=256))
    due = T0 + FAR_MS
    for start in range(0, 2 * block_count, 2):
        send(broker, T0, *[message("x", due=due + (start + n) * SECOND_MS) for n in range(2)])
    advance(broker, due - LEAD_MS)
    assert broker.fold.wheel.count == min(step_s + 1, 2 * block_count), why


def test_rescues_look_no_further_than_they_must_while_a_pipeline_serves(data: Data) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, far_block_rows=2, rescue_blocks_max=256))
    due = T0 + FAR_MS
    for start in range(0, 200, 2):
        send(broker, T0, *[message("x", due=due + (start + n) * SECOND_MS) for n in range(2)])
    stage(broker, registered(broker), 0, due + HOUR_MS)
    advance(broker, due - LEAD_MS // 2)
    assert broker.fold.wheel.count == 6, "what is due within half a lead and rescue_step_ms"


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

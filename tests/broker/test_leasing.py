"""Pops of a broker: leases, what they hold on disk, what a restart finds."""

import dataclasses
from typing import Any

import pytest

from postdate.broker.broker import Broker
from postdate.broker.leasing import LeaseHandle, PopRequest, PopResult
from postdate.errors import PopsFull, UsageError
from postdate.message import DLQ_TOPIC_PREFIX, Message
from postdate.state import saved
from postdate.storage import record as records
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    KEEP_DAY,
    MINUTE_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    message,
    registered,
    segment_of_messages,
    send,
    settled,
    snapshot,
    stage,
    upload,
)

GROUP = "workers"
DEAD = DLQ_TOPIC_PREFIX + GROUP
ASK = PopRequest(GROUP, TOPIC, [0], 32, 1 << 20, MINUTE_MS, 16)


def pop(broker: Broker, at_ms: int, **changes: Any) -> PopResult:
    popped = settled(broker, broker.leases.pop(ASK._replace(**changes), at_ms))
    assert isinstance(popped, PopResult)
    return popped


def texts(popped: PopResult) -> list[str]:
    return [records.decode(data).body.decode() for data in records.split(popped.body)]


def handles(popped: PopResult) -> list[LeaseHandle]:
    return [LeaseHandle(TOPIC, given.queue_id, given.offset, popped.popped_at_ms) for given in popped.messages]


def acknowledge(broker: Broker, popped: PopResult, at_ms: int) -> list[bool]:
    good: list[bool] = settled(broker, broker.leases.acknowledge(GROUP, handles(popped), at_ms))
    return good


# -------------------------------------------------------------------------------------------------------- giving


def test_the_broker_asks_to_be_called_when_a_lease_ends(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("one"))
    pop(broker, T0)
    others = pop(broker, T0 + 1, group="others", invisible_ms=5_000)
    assert broker.wake_at_ms == T0 + 5_001
    assert acknowledge(broker, others, T0) == [False], "the handle of another group"
    assert settled(broker, broker.leases.acknowledge("others", handles(others), T0)) == [True]
    assert broker.wake_at_ms == T0 + MINUTE_MS
    assert advance(broker, T0 + MINUTE_MS) > T0 + MINUTE_MS
    assert broker.leases.pop(ASK, T0 + MINUTE_MS) is not None


def test_leases_of_one_instant_end_in_the_order_of_giving(data: Data) -> None:
    broker = data.open()
    for name in "abc":
        send(broker, T0, message(name))
    for _ in "abc":
        pop(broker, T0, count_max=1)
    advance(broker, T0 + MINUTE_MS)
    assert texts(pop(broker, T0 + MINUTE_MS)) == ["a", "b", "c"]


def test_what_came_back_is_given_before_what_is_new(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("old"))
    pop(broker, T0)
    advance(broker, T0 + MINUTE_MS)
    send(broker, T0 + MINUTE_MS, message("new"))
    popped = pop(broker, T0 + MINUTE_MS)
    assert (texts(popped), [given.times for given in popped.messages]) == (["old", "new"], [1, 0])


def test_a_pop_gives_no_more_bytes_than_asked_for_but_always_one_message(data: Data) -> None:
    broker = data.open()
    send(broker, T0, *[message(name.ljust(1_000, name)) for name in "abc"])
    assert [text[0] for text in texts(pop(broker, T0, bytes_max=10))] == ["a"]
    assert [text[0] for text in texts(pop(broker, T0, bytes_max=3_000))] == ["b", "c"]


def test_a_pop_whose_bytes_are_used_up_ends_before_the_next_queue(data: Data) -> None:
    """It looked for room in the second queue without end."""
    broker = data.open()
    broker.put_topic(TOPIC, T0, read_queue_count=2, write_queue_count=2)
    send(broker, T0, *[message("x" * 1_000, queue_id=queue_id) for queue_id in (0, 1)])
    popped = pop(broker, T0, queue_ids=[0, 1], bytes_max=1_500)
    assert [given.queue_id for given in popped.messages] == [0]
    assert [given.queue_id for given in pop(broker, T0, queue_ids=[0, 1]).messages] == [1]


def test_an_offset_that_is_set_back_does_not_give_what_somebody_has(data: Data) -> None:
    broker = data.open()
    send(broker, T0, *map(message, "abc"))
    popped = pop(broker, T0)
    settled(broker, broker.leases.acknowledge(GROUP, handles(popped)[:1], T0))
    settled(broker, broker.commit_offsets(GROUP, [(TOPIC, 0, 0)], T0))
    assert texts(pop(broker, T0)) == ["a"], "the others are with a consumer"
    assert broker.leases.pop(ASK, T0) is None


def test_a_message_whose_acknowledgement_is_on_its_way_is_given_to_nobody(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("one"))
    popped = pop(broker, T0)
    later = T0 + MINUTE_MS
    advance(broker, later)
    ticket = broker.leases.acknowledge(GROUP, handles(popped), later)
    assert broker.leases.pop(ASK, later) is None
    assert settled(broker, ticket) == [True]
    assert broker.leases.pop(ASK, later) is None


def test_a_message_whose_time_is_changed_meanwhile_is_given_to_nobody(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("one"))
    popped = pop(broker, T0)
    later = T0 + MINUTE_MS
    advance(broker, later)
    ticket = broker.leases.change_invisible(GROUP, handles(popped)[0], 1_000, later)
    assert broker.leases.pop(ASK, later) is None
    assert settled(broker, ticket) is True
    assert broker.leases.pop(ASK, later) is None
    advance(broker, later + 1_000)
    assert texts(pop(broker, later + 1_000)) == ["one"]


def test_a_refused_pop_has_promised_nothing(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, group_popped_max=1))
    send(broker, T0, *map(message, "ab"))
    for wrong in ({"count_max": 0}, {"invisible_ms": 0}, {"queue_ids": [99]}):
        with pytest.raises(UsageError):
            broker.leases.pop(ASK._replace(**wrong), T0)
    assert texts(pop(broker, T0)) == ["a"]
    with pytest.raises(PopsFull, match="group_popped_max: 1"):
        broker.leases.pop(ASK, T0)


def test_limits_that_change_count_at_once(data: Data) -> None:
    broker = data.open()
    send(broker, T0, *map(message, "abc"))
    broker.change_settings({"group_popped_max": "1"})
    assert texts(pop(broker, T0)) == ["a"]
    broker.change_settings({"group_popped_max": "9", "wheel_entries_max": "2", "invisible_ms_max": "1s"})
    assert texts(pop(broker, T0, invisible_ms=1_000)) == ["b"]
    with pytest.raises(PopsFull, match="wheel_entries_max: 2"):
        broker.leases.pop(ASK._replace(invisible_ms=1_000), T0)
    with pytest.raises(UsageError, match="1 to invisible_ms_max"):
        broker.leases.pop(ASK, T0)


# ---------------------------------------------------------------------------------------------------- dead letters


def spent_message(broker: Broker) -> None:
    broker.put_topic(DEAD, T0, read_queue_count=1, write_queue_count=1)
    send(broker, T0, message("poison"))
    pop(broker, T0, times_max=0)
    advance(broker, T0 + MINUTE_MS)


def bury(broker: Broker, at_ms: int) -> None:
    ((key, data),) = broker.leases.spent_messages(10)
    broker.leases.move(key, Message(DEAD, records.decode(data).body), at_ms)


def test_a_burial_is_one_batch_and_is_done_once(data: Data) -> None:
    broker = data.open()
    spent_message(broker)
    assert broker.leases.pop(ASK, T0 + MINUTE_MS) is None
    bury(broker, T0 + MINUTE_MS)
    assert broker.leases.spent_messages(10) == [], "it is on its way"
    broker.flush()
    assert broker.offsets(DEAD, 0) == (0, 1)
    assert not broker.fold.leases.by_key
    data.crash(broker)
    broker = data.open()
    assert broker.offsets(DEAD, 0) == (0, 1)
    assert broker.leases.spent_messages(10) == []


def test_a_burial_that_is_lost_in_a_crash_is_done_again(data: Data) -> None:
    broker = data.open()
    spent_message(broker)
    data.crash(broker)
    broker = data.open()
    bury(broker, T0 + MINUTE_MS)
    broker.flush()
    assert broker.offsets(DEAD, 0) == (0, 1)


def test_a_spent_message_with_an_acknowledgement_on_its_way_is_not_buried(data: Data) -> None:
    broker = data.open()
    spent_message(broker)
    ticket = broker.leases.acknowledge(GROUP, [LeaseHandle(TOPIC, 0, 0, T0)], T0 + MINUTE_MS)
    assert broker.leases.spent_messages(10) == []
    assert settled(broker, ticket) == [True]
    assert broker.leases.spent_messages(10) == []


# ---------------------------------------------------------------------------------------------- what a lease holds


def test_a_record_stays_while_somebody_has_its_message(data: Data) -> None:
    broker = data.open(dataclasses.replace(KEEP_DAY, invisible_ms_max=100 * DAY_MS))
    send(broker, T0, message("long work"))
    popped = pop(broker, T0, invisible_ms=10 * DAY_MS)
    for n in range(3):
        segment_of_messages(broker, T0 + n, f"{n}.")
    for _ in range(2):
        send(broker, T0 + 10, message("x"))
        snapshot(broker)
    broker.retain(T0 + 5 * DAY_MS)
    assert broker.log.segment_numbers()[0] == 0
    assert acknowledge(broker, popped, T0 + 5 * DAY_MS) == [True]
    for _ in range(2):
        send(broker, T0 + 5 * DAY_MS, message("x"))
        snapshot(broker)
    broker.retain(T0 + 7 * DAY_MS)
    assert broker.log.segment_numbers()[0] > 0
    data.crash(broker)
    data.open(KEEP_DAY)


def test_a_change_of_what_came_back_and_is_gone_is_refused_and_forgets_it(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    send(broker, T0, message("gone"))
    popped = pop(broker, T0, count_max=1)
    for _ in range(2):
        segment_of_messages(broker, T0, "y")
        snapshot(broker)
    advance_to(broker, T0, T0 + MINUTE_MS)
    for _ in range(2):
        segment_of_messages(broker, T0 + MINUTE_MS, "z")
        snapshot(broker)
    at_ms = T0 + MINUTE_MS + DAY_MS
    ticket = broker.leases.change_invisible(GROUP, handles(popped)[0], HOUR_MS, at_ms)
    broker.retain(at_ms)
    assert settled(broker, ticket), "what is written about it keeps it"
    again = LeaseHandle(TOPIC, 0, 0, at_ms)
    advance_to(broker, at_ms, at_ms + HOUR_MS)
    for _ in range(2):
        segment_of_messages(broker, at_ms + HOUR_MS, "x")
        snapshot(broker)
    broker.retain(at_ms + 3 * DAY_MS)
    assert broker.offsets(TOPIC, 0)[0] > 0
    assert not settled(broker, broker.leases.change_invisible(GROUP, again, HOUR_MS, at_ms + 3 * DAY_MS))
    assert broker.fold.leases.by_key == {}
    assert 0 not in broker.fold.references.held


@pytest.mark.parametrize("in_chunk", [False, True])
def test_what_a_pop_will_give_stays_though_its_record_is_not_durable_yet(data: Data, in_chunk: bool) -> None:
    broker = data.open(KEEP_DAY)
    due = T0 + FAR_MS
    far = [message("far", due=due)]
    send(broker, T0, *far)
    if in_chunk:
        upload(broker, data, "c1", far, [0])
        stage(broker, registered(broker), 1, due, ["c1"])
    advance_to(broker, T0, due)
    for _ in range(2):
        segment_of_messages(broker, due, "y")
        snapshot(broker)
    at_ms = due + DAY_MS
    ticket = broker.leases.pop(ASK._replace(count_max=1), at_ms)
    assert ticket is not None
    broker.retain(at_ms)
    broker.flush()
    assert records.decode(ticket.answer.body).body == b"far"
    assert broker.read_record(broker.view.place(TOPIC, 0, 0)), "its record is there, to be given again"


def test_a_chunk_stays_while_somebody_has_a_message_of_it(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    due = T0 + FAR_MS
    far = [message("far", due=due)]
    send(broker, T0, *far)
    epoch = registered(broker)
    upload(broker, data, "c1", far, [0])
    stage(broker, epoch, 1, due, ["c1"])
    advance(broker, due)
    popped = pop(broker, due, invisible_ms=2 * DAY_MS)
    assert texts(popped) == ["far"]
    for _ in range(2):
        segment_of_messages(broker, due, "y")
        snapshot(broker)
    broker.retain(due + DAY_MS)
    assert data.disk.list("chunks") == ["c1"], "somebody has its message"
    data.crash(broker)
    broker = data.open(KEEP_DAY)
    assert acknowledge(broker, popped, due + DAY_MS) == [True]
    for _ in range(2):
        segment_of_messages(broker, due + DAY_MS, "z")
        snapshot(broker)
    broker.retain(due + 2 * DAY_MS)
    assert data.disk.list("chunks") == []
    data.crash(broker)
    data.open(KEEP_DAY)


def test_what_came_back_and_has_no_record_any_more_is_forgotten(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    send(broker, T0, message("gone"))
    pop(broker, T0)
    advance(broker, T0 + MINUTE_MS)
    for n in range(3):
        segment_of_messages(broker, T0 + MINUTE_MS + n, f"{n}.")
    for _ in range(2):
        send(broker, T0 + HOUR_MS, message("x"))
        snapshot(broker)
    assert broker.retain(T0 + 3 * DAY_MS) > 0
    popped = pop(broker, T0 + 3 * DAY_MS)
    assert "gone" not in texts(popped)
    assert (GROUP, broker.fold.topics.get(TOPIC).numbers[0], 0) not in broker.fold.leases.by_key


# ------------------------------------------------------------------------------------------------------- restarts


def test_a_snapshot_with_many_leases_is_loaded_as_it_was(data: Data) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, rows_by_column=64))
    send(broker, T0, *[message(str(n)) for n in range(100)])
    for n in range(30):
        popped = pop(broker, T0 + n, count_max=3, invisible_ms=1 + n * 100)
        if n % 3 == 0:
            acknowledge(broker, popped, T0 + n)
    advance(broker, T0 + 1_000)
    snapshot(broker)
    before = saved.state_json(broker.fold)
    data.close(broker)
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, rows_by_column=64))
    assert saved.state_json(broker.fold) == before
    assert broker.fold.leases.leased == {
        (GROUP, broker.fold.topics.get(TOPIC).numbers[0]): sum(
            lease.until_ms != 0 for lease in broker.fold.leases.by_key.values()
        )
    }
    advance(broker, T0 + 10_000)
    assert len(broker.fold.leases.ready[GROUP, broker.fold.topics.get(TOPIC).numbers[0]]) == 60


def test_after_a_restart_leases_of_one_instant_still_end_in_the_order_of_giving(data: Data) -> None:
    broker = data.open()
    send(broker, T0, *map(message, "ab"))
    first = pop(broker, T0, count_max=1)
    pop(broker, T0 + 5, count_max=1, invisible_ms=MINUTE_MS)
    settled(broker, broker.leases.change_invisible(GROUP, handles(first)[0], MINUTE_MS - 5, T0 + 10))
    data.close(broker)
    broker = data.open()
    advance(broker, T0 + MINUTE_MS + 5)
    assert texts(pop(broker, T0 + MINUTE_MS + 5)) == ["b", "a"]


def test_a_snapshot_of_an_earlier_version_has_no_leases(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("one"))
    state = saved._state(broker.fold)
    for part in ("leases", "ready", "spent", "chunk_held"):
        del state[part]
    fold = broker._fresh_fold({"queue_file_rows": 64, "far_block_rows": 8})
    saved._load_tables(fold, state)
    assert not fold.leases.by_key

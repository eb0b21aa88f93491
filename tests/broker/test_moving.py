"""Moving: a message that waits gets another due, comes once, and the answer is the truth."""

from dataclasses import replace

import pytest

from postdate.broker.broker import Broker
from postdate.broker.lookup import Found, State
from postdate.broker.moving import Source
from postdate.errors import FlowControl, UsageError
from postdate.message import Cancelled, MovedFrom
from postdate.storage.batch import MOVE
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
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
    send,
    stage,
    upload,
    waiting_count,
)

SPANS = pytest.mark.parametrize("before_ms", [1_000, FAR_MS])
TO = pytest.mark.parametrize("after_ms", [0, 2_000, 2 * FAR_MS])


def find(broker: Broker, key: str) -> Found:
    """The one message of a key that waits."""
    (found,) = [each for each in broker.find(TOPIC, key) if each is not None and each.state is State.WAITING]
    return found


def source_of(found: Found, due_at_ms: int) -> Source:
    return Source(found.record, MovedFrom(found.due_at_ms, found.arrival, found.is_near), due_at_ms)


def move(broker: Broker, sources: list[Source], at_ms: int) -> list[bool]:
    ticket = broker.moves.move(sources, at_ms)
    broker.flush()
    assert ticket.answers is not None
    return ticket.answers


@SPANS
@TO
def test_a_moved_message_comes_once_at_its_new_due(data: Data, before_ms: int, after_ms: int) -> None:
    broker = data.open()
    send(broker, T0, message("moved", unique="k", keys="a b", due=T0 + before_ms), message("next", due=T0 + before_ms))
    assert move(broker, [source_of(find(broker, "k"), T0 + after_ms)], T0) == [True]
    if after_ms:
        advance_to(broker, T0, T0 + after_ms - 1)
        assert "moved" not in bodies(broker)
        assert find(broker, "b").due_at_ms == T0 + after_ms
    advance_to(broker, T0 + max(after_ms - 1, 0), T0 + after_ms)
    assert bodies(broker).count("moved") == 1
    advance_to(broker, T0 + after_ms, T0 + DAY_MS)
    assert sorted(bodies(broker)) == ["moved", "next"]


@SPANS
@pytest.mark.parametrize("after_ms", [2_000, 2 * FAR_MS])
def test_a_lookup_finds_a_message_that_is_moved_meanwhile(data: Data, before_ms: int, after_ms: int) -> None:
    broker = data.open()
    send(broker, T0, message("moved", unique="k", due=T0 + before_ms))
    source = source_of(find(broker, "k"), T0 + after_ms)
    steps = broker.find(TOPIC, "k")
    assert [next(steps), next(steps)] == [None, None]  # it has the offsets that are known by now
    assert move(broker, [source], T0) == [True]
    found = [each for each in steps if each is not None]
    assert [(each.state, each.due_at_ms) for each in found] == [(State.WAITING, T0 + after_ms)]


def test_a_message_is_moved_back_and_forth(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("moved", unique="k", due=T0 + FAR_MS))
    for due in (T0 + 2_000, T0 + FAR_MS, T0 + 3_000, T0 + FAR_MS, T0 + 2 * FAR_MS, T0 + FAR_MS):
        assert move(broker, [source_of(find(broker, "k"), due)], T0) == [True]
    advance_to(broker, T0, T0 + FAR_MS - 1)
    assert bodies(broker) == []
    advance_to(broker, T0 + FAR_MS - 1, T0 + DAY_MS)
    assert bodies(broker) == ["moved"]


@SPANS
def test_two_moves_of_one_place_move_it_once(data: Data, before_ms: int) -> None:
    broker = data.open()
    send(broker, T0, message("moved", unique="k", due=T0 + before_ms))
    found = find(broker, "k")
    assert move(broker, [source_of(found, T0 + 2_000), source_of(found, T0 + 3_000)], T0) == [True, False]
    advance_to(broker, T0, T0 + DAY_MS)
    assert bodies(broker) == ["moved"]


@SPANS
def test_what_was_cancelled_or_delivered_is_not_moved(data: Data, before_ms: int) -> None:
    broker = data.open()
    send(broker, T0, message("cancelled", unique="k", due=T0 + before_ms), message("gone", unique="l", due=T0 + 500))
    killed, gone = find(broker, "k"), find(broker, "l")
    cancel(broker, "k", T0 + before_ms, T0)
    advance_to(broker, T0, T0 + 500)
    assert move(broker, [source_of(killed, T0 + 9_000), source_of(gone, T0 + 9_000)], T0 + 500) == [False, False]
    advance_to(broker, T0 + 500, T0 + DAY_MS)
    assert bodies(broker) == ["gone"]


def test_a_message_of_a_deleted_topic_is_not_moved(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("gone", unique="k", due=T0 + FAR_MS))
    ticket = broker.moves.move([source_of(find(broker, "k"), T0 + 2_000)], T0)
    broker.delete_topic(TOPIC, T0)
    assert ticket.answers == [True], "the move came first"
    broker.put_topic(TOPIC, T0)
    advance_to(broker, T0, T0 + DAY_MS)
    assert bodies(broker) == []


@pytest.mark.parametrize("delay_ms", [1_000, FAR_MS])
def test_a_message_of_a_deleted_topic_does_not_move_into_the_new_topic_of_that_name(data: Data, delay_ms: int) -> None:
    """It was looked up before."""
    broker = data.open()
    send(broker, T0, message("gone", unique="k", due=T0 + delay_ms))
    source = source_of(find(broker, "k"), T0 + 2_000)
    broker.delete_topic(TOPIC, T0)
    broker.put_topic(TOPIC, T0)
    broker.flush()
    assert not broker.moves.is_waiting(source.record, source.found)
    assert move(broker, [source], T0) == [False]
    advance_to(broker, T0, T0 + DAY_MS)
    assert bodies(broker) == []


def test_a_cancel_of_the_new_due_takes_a_moved_message(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("moved", unique="k", due=T0 + 1_000))
    move(broker, [source_of(find(broker, "k"), T0 + FAR_MS)], T0)
    assert cancel(broker, "k", T0 + 1_000, T0) == Cancelled.UNKNOWN, "it waits there no more"
    assert cancel(broker, "k", T0 + FAR_MS, T0) == Cancelled.CANCELLED
    advance_to(broker, T0, T0 + DAY_MS)
    assert bodies(broker) == []


def test_a_move_is_one_record_with_a_row_for_the_table(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("moved", unique="k", due=T0 + FAR_MS))
    found = find(broker, "k")
    move(broker, [source_of(found, T0 + HOUR_MS)], T0)
    rows = broker.view.read_far(0, 10)
    assert rows["kind"].tolist() == [1, 1, MOVE]
    assert rows["due"].tolist() == [T0 + FAR_MS, T0 + HOUR_MS, T0 + FAR_MS]
    assert rows["unique_hash"][2] == found.arrival, "the row says which message it takes away"
    assert (rows["arrival"][1:] > rows["arrival"][:-1]).all()


def test_a_stage_brings_no_message_that_was_moved(data: Data) -> None:
    """Spark has taken the message, and not the move."""
    broker = data.open()
    messages = [message(body, unique=body, due=T0 + FAR_MS) for body in ("moved", "other")]
    send(broker, T0, *messages)
    epoch = registered(broker)
    stage(broker, epoch, 2, 0)
    (found,) = [each for each in broker.find(TOPIC, "moved") if each is not None]
    assert move(broker, [source_of(found, T0 + HOUR_MS)], T0) == [True]
    upload(broker, data, "both", messages, [0, 1])
    stage(broker, epoch, 2, T0 + FAR_MS, ["both"])
    advance_to(broker, T0, T0 + FAR_MS)
    assert bodies(broker) == ["other"]


def test_a_staged_message_is_moved_and_the_table_is_not_asked_again(data: Data) -> None:
    broker = data.open()
    messages = [message(body, unique=body, due=T0 + FAR_MS) for body in ("moved", "other")]
    send(broker, T0, *messages)
    epoch = registered(broker)
    upload(broker, data, "both", messages, [0, 1])
    stage(broker, epoch, 2, T0 + FAR_MS, ["both"])
    found = find(broker, "moved")
    assert found.is_near
    assert move(broker, [source_of(found, T0 + 5_000)], T0) == [True]
    assert len(broker.view.read_far(0, 10)) == 2, "its old due is not beyond the horizon"
    advance_to(broker, T0, T0 + 5_000)
    assert bodies(broker) == ["moved"]
    advance_to(broker, T0 + 5_000, T0 + DAY_MS)
    assert bodies(broker) == ["moved", "other"]


@pytest.mark.parametrize("is_closed", [False, True], ids=["killed", "closed"])
def test_moves_survive_a_restart(data: Data, is_closed: bool) -> None:
    broker = data.open()
    send(broker, T0, message("sooner", unique="k", due=T0 + FAR_MS), message("later", unique="l", due=T0 + 1_000))
    sources = [source_of(find(broker, "k"), T0 + 2_000), source_of(find(broker, "l"), T0 + FAR_MS)]
    assert move(broker, sources, T0) == [True, True]
    data.close(broker) if is_closed else data.crash(broker)
    broker = data.open()
    assert broker.fold.moves.count == 2
    advance_to(broker, T0, T0 + FAR_MS - 1)
    assert bodies(broker) == ["sooner"]
    advance_to(broker, T0 + FAR_MS - 1, T0 + DAY_MS)
    assert bodies(broker) == ["sooner", "later"]


def test_a_message_without_an_id_cannot_be_moved(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("nobody", keys="a", due=T0 + 1_000))
    with pytest.raises(UsageError, match="no unique key"):
        broker.moves.move([source_of(find(broker, "a"), T0 + 2_000)], T0)
    advance(broker, T0 + 1_000)
    assert bodies(broker) == ["nobody"]


def test_moves_that_wait_for_their_messages_are_bounded(data: Data) -> None:
    broker = data.open(replace(SMALL, tombstones_max=1))
    send(broker, T0, message("one", unique="k", due=T0 + FAR_MS), message("two", unique="l", due=T0 + FAR_MS))
    sources = [source_of(find(broker, key), T0 + HOUR_MS) for key in ("k", "l")]
    with pytest.raises(FlowControl, match="tombstones_max"):
        broker.moves.move(sources, T0)
    assert waiting_count(broker) == 2

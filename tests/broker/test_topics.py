"""Topics, groups and offsets: small tables that a restart finds again."""

import dataclasses

import pytest

from postdate.errors import FlowControl, IllegalMessage, NoPermission, TopicNotFound, UsageError
from postdate.message import Cancelled
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    LEAD_MS,
    SMALL,
    T0,
    TOPIC,
    Data,
    advance_to,
    bodies,
    cancel,
    message,
    send,
    waiting_count,
)


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
    assert (broker.fold.references.held, waiting_count(broker)) == ({}, 0)


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("no spaces", {}, IllegalMessage, "topic 'no spaces'"),
        ("SCHEDULE_TOPIC_XXXX", {}, NoPermission, "belongs to the broker"),
        ("postdate_sys_cancel", {}, NoPermission, "belongs to the broker"),
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


def test_groups_have_a_limit_however_they_come(data: Data) -> None:
    settings = dataclasses.replace(SMALL, groups_max=2)
    broker = data.open(settings)
    broker.put_group("made", {}, T0)
    broker.commit_offsets("came", [(TOPIC, 0, 0)], T0)
    broker.flush()
    end = broker.log.end
    for call in (
        lambda: broker.put_group("third", {}, T0),
        lambda: broker.commit_offsets("third", [(TOPIC, 0, 0)], T0),
    ):
        with pytest.raises(FlowControl, match="groups_max: there are 2 groups"):
            call()
    assert broker.log.end == end
    broker.put_group("came", {"a": 1}, T0)
    broker.commit_offsets("made", [(TOPIC, 0, 1)], T0)
    broker.delete_group("came", T0)
    data.crash(broker)
    broker = data.open(settings)
    broker.put_group("third", {}, T0)
    with pytest.raises(FlowControl, match="groups_max"):
        broker.put_group("fourth", {}, T0)


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

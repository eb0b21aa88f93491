"""The view: questions about the state, answered without a way to change it."""

import pytest

from postdate.arrival import NEVER
from postdate.broker.view import SCHEDULE_TOPIC, WaitingCounts
from postdate.errors import TopicNotFound, UsageError
from tests.support.core import FAR_MS, T0, TOPIC, Data, cancel, message, registered, send, settled, stage


def test_topics_are_found_by_name_and_their_queues_by_number(data: Data) -> None:
    broker = data.open()
    view = broker.view
    assert view.topic_names() == [TOPIC], f"{SCHEDULE_TOPIC} is the broker's own"
    assert view.has_topic(TOPIC)
    number = view.queue_number(TOPIC, 0)
    assert view.topic(TOPIC).numbers[0] == number
    assert view.topic_of_queue(number) == view.topics_by_queue()[number] == TOPIC
    assert len(view.topics_by_queue()) == len(view.queue_lengths()) == view.queue_count


def test_what_is_not_there_is_refused_or_absent(data: Data) -> None:
    view = data.open().view
    assert view.find_topic("nowhere") is None
    assert not view.has_topic("nowhere")
    with pytest.raises(TopicNotFound):
        view.topic("nowhere")
    with pytest.raises(UsageError, match="queue 99 of topic 'orders' does not exist"):
        view.queue_number(TOPIC, 99)
    assert (view.find_job("nobody"), view.job(7), view.next_due_at_ms) == (None, None, NEVER)


def test_the_queues_of_a_deleted_topic_are_known_and_not_counted(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message(due=T0 + 1_000), message(due=T0 + FAR_MS))
    numbers = list(broker.view.topic(TOPIC).numbers)
    assert broker.view.waiting_counts() == WaitingCounts(near=1, far=1)
    broker.delete_topic(TOPIC, T0)
    assert broker.view.waiting_counts() == WaitingCounts(0, 0)
    assert broker.view.deleted_queues() == numbers
    rows, _ = broker.view.wheel_page((0, 0), 10)
    assert len(rows) == 0


def test_groups_are_known_by_their_settings_or_their_offsets(data: Data) -> None:
    broker = data.open()
    broker.put_group("set-up", {"retryMaxTimes": 3}, T0)
    settled(broker, broker.commit_offsets("reading", [(TOPIC, 0, 5)], T0))
    view = broker.view
    assert view.all_group_settings() == {"reading": {}, "set-up": {"retryMaxTimes": 3}}
    assert (view.group_count, view.committed_offset_count) == (2, 1)
    assert view.has_group("reading")
    assert view.group_settings("set-up")["retryMaxTimes"] == 3
    assert (view.committed_offset("reading", TOPIC, 0), view.committed_offset("reading", TOPIC, 1)) == (5, None)
    offsets = view.committed_offsets("reading")
    offsets[TOPIC, 0] = 7
    assert view.committed_offset("reading", TOPIC, 0) == 5, "what is given away is a copy"


def test_the_far_state_follows_registrations_and_stages(data: Data) -> None:
    broker = data.open()
    assert broker.view.far[:5] == (0, 0, 0, 0, 0)
    send(broker, T0, message(due=T0 + FAR_MS))
    epoch = registered(broker)
    before = broker.view.far
    stage(broker, epoch, 1, T0 + 1)
    assert (before.epoch, before.taken, before.length) == (epoch, 0, 1), "what was given away does not change"
    assert (broker.view.far.taken, broker.view.far.horizon_at_ms) == (1, T0 + 1)


def test_cancels_that_wait_are_counted_and_listed_by_due(data: Data) -> None:
    broker = data.open()
    cancel(broker, "K", T0 + FAR_MS, T0)
    assert broker.view.tombstone_count == 1
    assert [each.key for each in broker.view.tombstones_after(T0 + FAR_MS - 1)] == ["K"]
    assert list(broker.view.tombstones_after(T0 + FAR_MS)) == []

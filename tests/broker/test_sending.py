"""Sending and pulling: what a caller gets, what a consumer sees, what is refused."""

import dataclasses
from pathlib import Path

import pytest

from postdate.broker.view import PullStatus
from postdate.broker.writing import NO_CHANGES
from postdate.errors import FlowControl, IllegalMessage, NoPermission, TopicNotFound, UsageError
from postdate.message import Host, Message, tag_hash
from postdate.state import saved
from postdate.state.fold import WAITS
from postdate.storage.delivery import MANY
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
    contents,
    message,
    pulled,
    send,
    send_each,
)

# ---------------------------------------------------------------------------------------------------------- sending


def test_a_message_without_delay_is_visible_when_its_batch_is_durable(data: Data) -> None:
    broker = data.open()
    ticket = broker.send([message("now")], T0)
    assert ticket.answers is None
    assert bodies(broker) == []
    broker.log.flush()
    assert bodies(broker) == [], "durable, but not settled"
    assert broker.settle().grown_queues == {broker.view.queue_number(TOPIC, 0)}
    assert broker.settle() == NO_CHANGES, "what has changed is returned once"
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
        (message(topic="SCHEDULE_TOPIC_XXXX"), NoPermission, "belongs to the broker"),
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
    before, end, files = saved.state_json(broker.fold), broker.log.end, contents(data.folder)
    with pytest.raises(error, match=said):
        broker.send([message("good"), bad], T0)
    broker.flush()
    assert (saved.state_json(broker.fold), broker.log.end) == (before, end)
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


@pytest.mark.parametrize("store_address", [b"\1\2\3\4", bytes(16)])
@pytest.mark.parametrize("born_address", [bytes(4), bytes(16)])
def test_a_pull_of_many_gives_what_pulls_of_one_give(data: Data, born_address: bytes, store_address: bytes) -> None:
    broker = data.open()
    many = [message(bytes(n), due=T0 + n // 10) for n in range(3 * MANY)]
    many[MANY + 5] = many[MANY + 5]._replace(born_host=Host(born_address, 7))
    send_each(broker, T0, many)
    for at_ms in range(T0, T0 + len(many) // 10 + 1):
        advance(broker, at_ms)
    host = Host(store_address, 10911)
    single = [broker.pull(TOPIC, 0, n, count_max=1, store_host=host).records[0] for n in range(len(many))]
    found = broker.pull(TOPIC, 0, 0, count_max=len(many), store_host=host)
    assert (found.records, found.next_offset, found.record_count) == (single, len(many), len(many))
    size = sum(map(len, single[5 : 5 + MANY]))
    some = broker.pull(TOPIC, 0, 5, count_max=len(many), bytes_max=size, store_host=host)
    assert (some.records, some.next_offset) == (single[5 : 5 + MANY], 5 + MANY)
    fewer = broker.pull(TOPIC, 0, 5, count_max=len(many), bytes_max=size - 1, store_host=host)
    assert (fewer.records, fewer.next_offset) == (single[5 : 4 + MANY], 4 + MANY)
    one = broker.pull(TOPIC, 0, 5, count_max=len(many), bytes_max=1, store_host=host)
    assert (one.records, one.next_offset) == (single[5:6], 6)


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
        ticket = broker.send([message(str(n), due=at_ms + 5)], at_ms)
        # As in a busy server: the next batch is written before the last one is settled, so some batch always waits.
        durable = broker.log.flush()
        broker.send([message()], at_ms + 1)
        broker.settle()
        assert ticket.answers is not None
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

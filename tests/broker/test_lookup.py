"""Lookups by key: every message is found while its record is there, and told to be what it is."""

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.broker.lookup import Found, State
from postdate.errors import TopicNotFound, UsageError
from postdate.keys import key_hash
from postdate.message import Cancelled, Host
from postdate.state.far import Far
from postdate.state.index import Index
from postdate.storage import record as records
from postdate.storage.batch import MESSAGE
from postdate.storage.chunk import CHUNK_BIT, FLAG_OWN_ARRIVAL
from tests.support.core import (
    DAY_MS,
    FAR_MS,
    HOUR_MS,
    KEEP_DAY,
    MINUTE_MS,
    SECOND_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    cancel,
    message,
    registered,
    segment_of_messages,
    send,
    send_each,
    snapshot,
    stage,
    upload,
    write_chunk,
)

Told = tuple[str, State]


def found(
    broker: Broker, key: str, topic: str = TOPIC, by: str = "any", begin_ms: int = 0, end_ms: int = NEVER
) -> list[Found]:
    return [each for each in broker.find(topic, key, by=by, begin_ms=begin_ms, end_ms=end_ms) if each is not None]


def told(broker: Broker, key: str, topic: str = TOPIC, by: str = "any", **range_: int) -> list[Told]:
    return [(records.decode(each.record).body.decode(), each.state) for each in found(broker, key, topic, by, **range_)]


def only(broker: Broker, key: str) -> Found:
    (single,) = found(broker, key)
    return single


# -------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("rows_by_column", [2, 64])
def test_a_message_is_found_by_each_of_its_keys(data: Data, rows_by_column: int) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, rows_by_column=rows_by_column))
    send(broker, T0, message("a", unique="U1", keys="k1 k2  k3"), message("b", keys=" k2"), message("c", unique="U2"))
    visible = State.VISIBLE
    assert told(broker, "U1") == told(broker, "k1") == told(broker, "k3") == [("a", visible)]
    assert told(broker, "k2") == [("b", visible), ("a", visible)], "the newest stand first"
    assert told(broker, "U2") == [("c", visible)]
    assert told(broker, "k") == told(broker, "k1 k2") == told(broker, "nobody") == []


def test_the_kind_of_key_can_be_said(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("a", unique="same"), message("b", keys="same"))
    assert told(broker, "same", by="unique") == [("a", State.VISIBLE)]
    assert told(broker, "same", by="key") == [("b", State.VISIBLE)]
    assert [body for body, _ in told(broker, "same")] == ["b", "a"]


def test_a_message_whose_keys_are_all_the_same_is_found_once(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("a", unique="K", keys="K K"))
    assert told(broker, "K") == [("a", State.VISIBLE)]


def test_every_copy_of_a_resent_message_is_found(data: Data) -> None:
    broker = data.open()
    send_each(broker, T0, [message(n, unique="U1", due=T0 + HOUR_MS) for n in "abc"])
    assert [body for body, _ in told(broker, "U1")] == ["c", "b", "a"]


def test_only_the_topic_that_is_asked_for_is_found(data: Data) -> None:
    broker = data.open()
    broker.put_topic("other", T0, write_queue_count=1, read_queue_count=1)
    send(broker, T0, message("a", keys="K"), message("b", topic="other", keys="K"))
    assert told(broker, "K", "other") == [("b", State.VISIBLE)]
    with pytest.raises(TopicNotFound):
        broker.find("nowhere", "K")


def test_a_hash_alone_does_not_decide(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.broker.sending.key_hash", lambda key: key_hash(key) % 2 + 1)
    monkeypatch.setattr("postdate.broker.lookup.key_hash", lambda key: key_hash(key) % 2 + 1)
    broker = data.open()
    send(broker, T0, *[message(str(n), unique=f"U{n}") for n in range(20)])
    assert [told(broker, f"U{n}") for n in range(20)] == [[(str(n), State.VISIBLE)] for n in range(20)]
    data.damaged = True  # its hashes are not those of its keys


@pytest.mark.parametrize(("key", "by"), [("", "any"), ("K", "tag")])
def test_a_lookup_of_nothing_is_refused(data: Data, key: str, by: str) -> None:
    with pytest.raises(UsageError, match="a lookup needs a key"):
        data.open().find(TOPIC, key, by=by)


def test_more_keys_than_are_indexed_do_no_harm(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("a", unique="U", keys=" ".join(f"k{n}" for n in range(200))))
    assert [bool(told(broker, f"k{n}")) for n in (0, 1, 63, 64, 199)] == [True, True, True, False, False]


def test_system_records_are_never_found(data: Data) -> None:
    broker = data.open()
    cancel(broker, "K", T0 + HOUR_MS, T0)
    assert told(broker, "K") == []


# ------------------------------------------------------------------------------------------------------ states


def test_a_visible_message_is_told_as_its_consumer_reads_it(data: Data) -> None:
    broker = data.open(queue_count=3)
    send(broker, T0, message("before", queue_id=2), message("a", queue_id=2, keys="K", due=T0 + 5_000))
    advance(broker, T0 + 5_003)
    seen = only(broker, "K")
    (read,) = broker.pull(TOPIC, 2, 1).records
    assert seen.record == read
    assert (seen.state, seen.queue_id, seen.queue_offset) == (State.VISIBLE, 2, 1)
    assert (seen.due_at_ms, seen.visible_at_ms, seen.stored_at_ms) == (T0 + 5_000, T0 + 5_003, T0)


def test_the_address_of_the_broker_is_filled_in(data: Data) -> None:
    broker, here = data.open(), Host(b"\x0a\x00\x00\x01", 77)
    send(broker, T0, message("a", keys="K"), message("b", keys="K", due=T0 + HOUR_MS))
    for each in broker.find(TOPIC, "K", store_host=here):
        assert each is None or records.decode(each.record).store_host == here


@pytest.mark.parametrize("delay_ms", [SECOND_MS, FAR_MS])
def test_a_message_that_waits_is_found_and_said_to_wait(data: Data, delay_ms: int) -> None:
    broker = data.open()
    send(broker, T0, message("a", keys="K", due=T0 + delay_ms))
    seen = only(broker, "K")
    assert (seen.state, seen.due_at_ms, seen.queue_offset) == (State.WAITING, T0 + delay_ms, -1)
    assert records.decode(seen.record).queue_offset == -1
    advance_to(broker, T0, T0 + delay_ms)
    assert only(broker, "K").state is State.VISIBLE


@pytest.mark.parametrize("delay_ms", [SECOND_MS, FAR_MS])
@pytest.mark.parametrize("by", ["unique", "key"])
def test_a_cancelled_message_is_said_to_be_cancelled_before_and_after_its_due(
    data: Data, delay_ms: int, by: str
) -> None:
    broker = data.open()
    due = T0 + delay_ms
    send(broker, T0, message("a", unique="K", keys="K", due=due), message("b", keys="other", due=due))
    assert cancel(broker, "K", due, T0, by) is Cancelled.CANCELLED
    assert told(broker, "K") == [("a", State.CANCELLED)]
    advance_to(broker, T0, due)
    assert told(broker, "K") == [("a", State.CANCELLED)]
    assert told(broker, "other") == [("b", State.VISIBLE)]
    send(broker, due, message("again", unique="K", due=due + delay_ms))
    assert told(broker, "K") == [("again", State.WAITING), ("a", State.CANCELLED)], "the key may be used again"


def test_a_message_of_a_deleted_topic_is_told_from_one_of_the_new_topic_of_that_name(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("old", keys="K"), message("old waits", keys="K", due=T0 + HOUR_MS))
    broker.delete_topic(TOPIC, T0)
    with pytest.raises(TopicNotFound):
        told(broker, "K")
    broker.put_topic(TOPIC, T0)
    send(broker, T0, message("new", keys="K"), message("new waits", keys="K", due=T0 + HOUR_MS))
    expected = [
        ("new waits", State.WAITING), ("new", State.VISIBLE), ("old waits", State.DELETED), ("old", State.DELETED),
    ]  # fmt: skip
    assert told(broker, "K") == expected
    data.close(broker)
    assert told(data.open(), "K") == expected


def test_a_message_is_found_in_the_queue_that_took_it_over(data: Data) -> None:
    broker = data.open(queue_count=4)
    send(broker, T0, message("a", queue_id=3, keys="K", due=T0 + SECOND_MS))
    broker.put_topic(TOPIC, T0, read_queue_count=2, write_queue_count=2)
    advance(broker, T0 + SECOND_MS)
    broker.put_topic(TOPIC, T0 + SECOND_MS, read_queue_count=8, write_queue_count=8)
    seen = only(broker, "K")
    assert (seen.state, seen.queue_id, seen.queue_offset) == (State.VISIBLE, 1, 0)
    assert records.decode(seen.record).queue_id == 1


def test_the_due_of_a_level_is_the_one_it_had_when_it_was_sent(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, message_delay_level="1s 5s 10s"))
    send(broker, T0, message("a", keys="K", DELAY="3"), message("b", keys="L", DELAY="9"))
    data.close(broker)
    broker = data.open(dataclasses.replace(SMALL, message_delay_level="1h 2h 3h 4h 5h"))
    for key in "KL":
        assert (only(broker, key).state, only(broker, key).due_at_ms) == (State.WAITING, T0 + 10_000)
    advance(broker, T0 + 10_000)
    assert only(broker, "K").state is only(broker, "L").state is State.VISIBLE


def test_a_message_that_moves_during_a_lookup_is_not_missed(data: Data) -> None:
    """Whatever happens between two steps: it waits or is visible, never cancelled or gone."""
    for step in range(8):
        broker = data.open()
        due = broker.fold.at_ms + FAR_MS if broker.fold.at_ms else T0 + FAR_MS
        send(broker, due - FAR_MS, message("a", keys=f"K{step}", due=due))
        steps = iter(broker.find(TOPIC, f"K{step}"))
        seen = [next(steps, None) for _ in range(step)]
        advance_to(broker, due - FAR_MS, due)
        states = [each.state for each in (*seen, *steps) if each is not None]
        assert states in ([State.WAITING], [State.VISIBLE]), step
        data.close(broker)


@pytest.mark.parametrize("clock_back_ms", [0, 30_000])
def test_a_message_is_found_after_the_clock_went_back(data: Data, clock_back_ms: int) -> None:
    broker = data.open()
    send(broker, T0 + MINUTE_MS, message("before", keys="B"))
    now = T0 + MINUTE_MS - clock_back_ms
    send(broker, now, message("a", keys="K", due=now + 10_000), message("c", keys="K"))
    advance(broker, now + 10_000)
    advance(broker, T0 + 2 * MINUTE_MS)
    assert told(broker, "K") == [("c", State.VISIBLE), ("a", State.VISIBLE)]


def test_only_messages_of_the_range_of_time_are_given(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("early", keys="K"), message("late", keys="K", due=T0 + 10_000))
    assert told(broker, "K", end_ms=T0 - 1) == []
    assert [body for body, _ in told(broker, "K", begin_ms=T0 + 1)] == ["late"], "it waits in that range"
    advance(broker, T0 + 10_000)
    assert [body for body, _ in told(broker, "K", begin_ms=T0 + 10_000)] == ["late"]
    assert told(broker, "K", begin_ms=T0 + 10_001) == []
    assert [body for body, _ in told(broker, "K", begin_ms=T0, end_ms=T0)] == ["late", "early"]


# ------------------------------------------------------------------------------------------------- the pipeline


LEAD_HALF = 30_000


def staged_story(data: Data) -> tuple[Broker, int]:
    """Four far messages, the third of them cancelled, and a pipeline that has taken nothing yet."""
    broker = data.open()
    send(broker, T0, *[message(f"f{n}", unique=f"U{n}", keys=f"k{n} more", due=T0 + FAR_MS + n) for n in range(4)])
    cancel(broker, "U2", T0 + FAR_MS + 2, T0)
    return broker, registered(broker)


def test_a_message_is_followed_through_the_pipelines_table_and_chunks(data: Data) -> None:
    broker, epoch = staged_story(data)
    stage(broker, epoch, broker.fold.far.length, T0 + MINUTE_MS)
    states = [only(broker, f"U{n}").state for n in range(4)]
    assert states == [State.WAITING, State.WAITING, State.CANCELLED, State.WAITING], "in the table"
    chosen = [message(f"f{n}", unique=f"U{n}", keys=f"k{n} more", due=T0 + FAR_MS + n) for n in (0, 1, 3)]
    upload(broker, data, "c1", chosen, [0, 1, 3])
    stage(broker, epoch, broker.fold.far.length, T0 + HOUR_MS, ["c1"])
    cancel(broker, "U3", T0 + FAR_MS + 3, T0)
    states = [only(broker, f"U{n}").state for n in range(4)]
    assert states == [State.WAITING, State.WAITING, State.CANCELLED, State.CANCELLED], "staged"
    advance(broker, T0 + FAR_MS)
    assert [only(broker, f"U{n}").state for n in (0, 1)] == [State.VISIBLE, State.WAITING]
    advance(broker, T0 + HOUR_MS)
    states = [only(broker, f"U{n}").state for n in range(4)]
    assert states == [State.VISIBLE, State.VISIBLE, State.CANCELLED, State.CANCELLED]
    assert only(broker, "k0").queue_offset == 0
    data.close(broker)
    assert [only(data.open(), "U1").state] == [State.VISIBLE]


def test_a_message_that_was_rescued_before_it_was_staged_is_found_once(data: Data) -> None:
    broker, epoch = staged_story(data)
    advance_to(broker, T0, T0 + FAR_MS - LEAD_HALF)
    assert only(broker, "U0").state is State.WAITING
    upload(broker, data, "c1", [message("f0", unique="U0", due=T0 + FAR_MS)], [0])
    at_ms = T0 + FAR_MS - LEAD_HALF
    stage(broker, epoch, broker.fold.far.length, T0 + HOUR_MS, ["c1"], at_ms)
    assert told(broker, "U0") == [("f0", State.WAITING)]
    advance(broker, T0 + HOUR_MS)
    assert told(broker, "U0") == [("f0", State.VISIBLE)]


def test_a_record_that_is_only_in_a_chunk_is_found_there(data: Data) -> None:
    broker = data.open()
    imported = message("imported", unique="I", keys="K", due=T0 + HOUR_MS)
    number = broker.fold.topics.get(TOPIC).numbers[0]
    write_chunk(data.disk, "c1", [(T0 + HOUR_MS, 5, number, imported)], flags=FLAG_OWN_ARRIVAL)
    stage(broker, registered(broker), 0, T0 + 2 * HOUR_MS, ["c1"])
    seen = only(broker, "K")
    assert (seen.state, seen.due_at_ms, seen.offset >= CHUNK_BIT) == (State.WAITING, T0 + HOUR_MS, True)
    assert [each.state for each in broker.find_at(seen.offset) if each] == [State.WAITING]
    advance(broker, T0 + HOUR_MS)
    for fired in (only(broker, "I"), *[each for each in broker.find_at(seen.offset) if each]):
        assert (fired.state, fired.queue_offset) == (State.VISIBLE, 0)
        assert records.decode(fired.record).offset == seen.offset
    cancel(broker, "I", T0 + HOUR_MS, T0 + HOUR_MS)
    broker.delete_topic(TOPIC, T0 + HOUR_MS)
    assert [each.state for each in broker.find_at(seen.offset) if each] == [State.DELETED]


# ------------------------------------------------------------------------------------- restarts and retention


@pytest.mark.parametrize("end", [Data.close, Data.crash], ids=["closed", "crashed"])
def test_lookups_are_the_same_after_a_restart(data: Data, end: Callable[[Data, Broker], None]) -> None:
    broker = data.open()
    for n in range(90):
        due = T0 + [0, SECOND_MS, FAR_MS][n % 3]
        send(broker, T0, message(str(n), unique=f"U{n}", keys=f"k{n % 7} all", due=due))
        if n == 40:
            snapshot(broker)
    cancel(broker, "U31", T0 + SECOND_MS, T0)
    advance(broker, T0 + SECOND_MS)
    keys = ["all", *[f"k{n}" for n in range(7)], *[f"U{n}" for n in range(90)]]
    before = {key: found(broker, key) for key in keys}
    assert len(before["all"]) == 90
    index = broker.fold.index
    assert index.rows.length >= 256, "several blocks"
    end(data, broker)
    after = data.open()
    assert {key: found(after, key) for key in keys} == before
    assert after.fold.index.tail() == index.tail()
    assert np.array_equal(after.fold.index.rows.read(0, 999), index.rows.read(0, 999))


def test_keys_go_with_their_segments_and_what_waits_is_found_all_the_same(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    due = T0 + 10 * DAY_MS
    send(broker, T0, message("waits", unique="W", keys="w other", due=due), message("gone", unique="G", keys="g"))
    for day in range(1, 5):
        at_ms = T0 + day * DAY_MS
        send(broker, at_ms, *[message("x", unique=f"X{day}-{n}", keys="x") for n in range(40)])
        segment_of_messages(broker, at_ms, "filler")
        snapshot(broker)
        send(broker, at_ms, message("y"))
        snapshot(broker)
        broker.retain(at_ms)
    assert broker.log.read(64, 4), "the segment of the message that waits is held"
    assert broker.fold.index.begin > 0
    assert broker.fold.index.rows.first > 0
    assert told(broker, "W") == told(broker, "w") == [("waits", State.WAITING)]
    assert told(broker, "other") == [], "far rows have the first key alone"
    assert told(broker, "X1-3") == []
    assert told(broker, "X4-3") == [("x", State.VISIBLE)]
    data.close(broker)
    broker = data.open(KEEP_DAY)
    assert told(broker, "W") == told(broker, "w") == [("waits", State.WAITING)]
    advance_to(broker, due - MINUTE_MS, due)
    assert told(broker, "W") == [("waits", State.VISIBLE)]


# ---------------------------------------------------------------------------------------------------- cancels


def test_a_cancel_finds_what_was_delivered_among_many(data: Data) -> None:
    broker = data.open()
    due = T0 + SECOND_MS
    for start in range(0, 3_000, 100):
        batch = [message("x", unique=f"U{start + n}", keys=f"k{start + n}", due=due) for n in range(100)]
        for part in range(0, 100, 50):
            send(broker, T0, *batch[part : part + 50])
    cancel(broker, "U7", due, T0)
    advance(broker, due)
    assert cancel(broker, "U2999", due, due) is Cancelled.DELIVERED
    assert cancel(broker, "k1", due, due, "key") is Cancelled.DELIVERED
    assert cancel(broker, "U7", due, due) is Cancelled.CANCELLED, "as before"
    assert cancel(broker, "U8", due + 1, due) is Cancelled.UNKNOWN, "another due"


def test_a_cancel_looks_no_further_than_it_may(data: Data) -> None:
    broker = data.open(limits=dataclasses.replace(SMALL_LIMITS, delivered_search_steps=0))
    send(broker, T0, message("x", unique="U", due=T0 + SECOND_MS))
    advance(broker, T0 + SECOND_MS)
    assert cancel(broker, "U", T0 + SECOND_MS, T0 + SECOND_MS) is Cancelled.UNKNOWN


def untaken_in_both_ways(broker: Broker, dues: list[int], keys: list[str]) -> int:
    """Compares what a cancel is told with a look through every row; returns how many were found."""
    far, count = broker.fold.far, 0
    for due in dues:
        for key in keys:
            for column in ("unique_hash", "key_hash"):
                for before in (far.length // 2, far.length):
                    asked = (due, column, key_hash(key), before)
                    every = far.find_untaken(*asked)
                    every = every[every["kind"] == MESSAGE]
                    for sought in ([], [key_hash(each) for each in keys]):
                        broker._lookup.seek(sought)
                        told = broker._lookup.untaken(*asked)
                        told = told[told["kind"] == MESSAGE]
                        assert told["arrival"].tolist() == every["arrival"].tolist(), (asked, sought)
                    count += len(every)
    return count


@pytest.mark.parametrize("seed", range(5))
def test_a_cancel_finds_what_is_untaken_through_the_index_as_by_looking_at_every_row(data: Data, seed: int) -> None:
    dice = random.Random(seed)
    broker = data.open()
    dues = [T0 + FAR_MS + step * MINUTE_MS for step in range(4)]
    keys = [f"k{number}" for number in range(12)]
    for _ in range(12):
        some = [
            message("x", unique=dice.choice(keys), keys=dice.choice(keys), due=dice.choice([*dues, T0 + SECOND_MS]))
            for _ in range(dice.randrange(1, 80))
        ]
        send(broker, T0, *some)
        cancel(broker, dice.choice(keys), dice.choice(dues), T0)
    assert untaken_in_both_ways(broker, dues, keys) > 100
    index = broker.fold.index
    index.forget(int(broker.fold.far.rows.read(0, broker.fold.far.length)["arrival"][100]))
    assert index.begin > 0, "some messages are older than the index"
    assert untaken_in_both_ways(broker, dues, keys) > 100
    stage(broker, registered(broker), broker.fold.far.length // 3, T0 + FAR_MS)
    assert untaken_in_both_ways(broker, dues, keys) > 50
    advance_to(broker, T0, dues[1])
    untaken_in_both_ways(broker, dues, keys)


def test_a_cancel_does_not_look_through_what_waits(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    for start in range(0, 1_000, 50):
        send(broker, T0, *[message("x", unique=f"U{start + n}", due=due + start + n) for n in range(50)])
    looked: list[int] = []
    scan = Far.find_untaken

    def counted(far: Far, due: int, column: str, hashed: int, before: int, start: int = 0) -> np.ndarray:
        looked.append(max(before - max(start, far.taken), 0))
        return scan(far, due, column, hashed, before, start)

    monkeypatch.setattr(Far, "find_untaken", counted)
    assert cancel(broker, "U7", due + 7, T0) is Cancelled.CANCELLED
    assert cancel(broker, "U999", due + 999, T0) is Cancelled.CANCELLED
    assert cancel(broker, "U999", due + 7, T0) is Cancelled.UNKNOWN
    assert set(looked) == {0}, "only rows older than the index are looked through, and there is none"


def test_cancels_that_come_at_once_share_one_way_through_the_index(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    for start in range(0, 200, 50):
        send(broker, T0, *[message("x", unique=f"U{start + n}", due=due) for n in range(50)])
    ways: list[int] = []
    find_many = Index.find_many

    def counted(index: Index, hashes: Sequence[int]) -> dict[int, list[int]]:
        ways.append(len(hashes))
        return find_many(index, hashes)

    monkeypatch.setattr(Index, "find_many", counted)
    # One of them is of a message that is written between two cancels, and in the index only after the first was traced.
    tickets = [broker.cancel(TOPIC, f"U{n}", due, T0) for n in range(100)]
    broker.send([message("x", unique="late", due=due)], T0)
    tickets += [broker.cancel(TOPIC, key, due, T0) for key in ("late", "U100", "U3", "nobody")]
    broker.flush()
    outcomes = [ticket.answer.outcome for ticket in tickets]
    assert outcomes == [Cancelled.CANCELLED] * 103 + [Cancelled.UNKNOWN]
    assert ways == [103], "U3 twice is one key"
    assert (broker.cancels._unsought, broker._lookup._sought) == ({}, {})


def test_a_key_that_very_many_share_is_cancelled_by_looking_at_every_row(data: Data) -> None:
    broker = data.open()
    due = T0 + FAR_MS
    for _ in range(4):
        send(broker, T0, *[message("x", keys="shared", due=due) for _ in range(50)])
    assert broker._lookup._arrivals(key_hash("shared")) is None
    assert untaken_in_both_ways(broker, [due], ["shared"]) == 100 + 200
    assert cancel(broker, "shared", due, T0, "key") is Cancelled.CANCELLED

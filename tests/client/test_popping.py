"""Members that pop: workers and members share a topic message by message, and what fails comes again in place."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import AsyncReceivedMessage, Client, ReceivedMessage
from postdate.client import consumer, leases, popping
from postdate.client.connection import Address
from postdate.client.leases import LeasedDelivery, Leases, Source
from postdate.client.options import Wanted
from postdate.client.popping import Stock, StockTurn
from postdate.clock import ManualClock
from postdate.message import LOOPBACK, Message, encode_properties
from postdate.storage import record as records
from postdate.wire.records import Pieces, split_records
from tests.client.test_blocking import limited, receive, run, until
from tests.support.server import WAIT_S, Served, serving

TOPIC, GROUP = "orders", "billing"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", message_delay_level="1s 1s 1s 1s") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with postdate.connect(served.address, timeout=WAIT_S) as connected:
        yield connected


@contextmanager
def listening(
    client: Client, handler: Callable[[ReceivedMessage], None], topic: str = TOPIC, **options: object
) -> Iterator[None]:
    listener = run(lambda: client.listen(topic, GROUP, handler, **options))  # type: ignore[arg-type]
    try:
        yield
    finally:
        assert client.stop(WAIT_S)
        listener.join(WAIT_S)


def lease_count(served: Served) -> int:
    return served.call(lambda: len(served.broker.fold.leases.by_key))


# -- sharing


def test_as_many_tasks_as_one_likes_work_at_once(served: Served) -> None:
    async def story() -> None:
        together, done = asyncio.Barrier(50), Counter[bytes]()

        async def handle(message: AsyncReceivedMessage) -> None:
            await together.wait()  # passes only if fifty are at work; the topic has four queues
            done[message.body] += 1

        async with asyncio.timeout(WAIT_S), postdate.connect_async(served.address) as client:
            await client.send_batch(TOPIC, [postdate.Outgoing(str(n)) for n in range(50)])
            task = asyncio.create_task(client.listen(TOPIC, GROUP, handle, tasks=50))
            while done.total() < 50:
                await asyncio.sleep(0.01)
            assert await client.stop()
            await task
        assert set(done.values()) == {1}

    asyncio.run(story())
    assert lease_count(served) == 0


def test_members_share_one_queue_message_by_message(client: Client, served: Served) -> None:
    together = threading.Barrier(3)

    def handle(_message: ReceivedMessage) -> None:
        together.wait(WAIT_S)  # passes only if all three have a message of the same queue

    with postdate.connect(served.address) as other, listening(client, handle, threads=2), listening(other, handle):
        for n in range(3):
            client.send(TOPIC, str(n), queue=0)
        until(lambda: served.call(lambda: served.broker.fold.groups.offset(GROUP, TOPIC, 0)) == 3)
    assert lease_count(served) == 0


@pytest.mark.parametrize("how", ["listen", "consume"])
def test_one_group_reads_several_topics_and_loses_nothing(client: Client, how: str) -> None:
    """Each topic has a member of its own: queues or messages of a topic must not go to the member of the other."""
    seen: Counter[tuple[str, bytes]] = Counter()
    topics = ("orders", "invoices")

    def note(message: ReceivedMessage) -> None:
        seen[message.topic, message.body] += 1

    def read(topic: str) -> None:
        if how == "listen":
            client.listen(topic, GROUP, note)
        else:
            for message in client.consume(topic, GROUP):
                note(message)

    for topic in topics:
        client.send(topic, "first")
    threads = [run(lambda topic=topic: read(topic)) for topic in topics]  # type: ignore[misc]
    for topic in topics:
        for n in range(20):
            client.send(topic, str(n))
    until(lambda: len(seen) == 42)
    assert client.stop(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
    assert set(seen.values()) == {1}


def test_members_whose_tags_contradict_are_refused_with_the_brokers_sentence(client: Client, served: Served) -> None:
    client.send(TOPIC, "x", tag="paid")
    seen = threading.Event()
    with listening(client, lambda _message: seen.set(), tag="paid"), postdate.connect(served.address) as other:
        assert seen.wait(WAIT_S)
        with pytest.raises(postdate.PostdateError, match=r"group 'billing': this member wants 'refunded' of topic"):
            other.listen(TOPIC, GROUP, lambda _message: None, tag="refunded")
        with pytest.raises(postdate.PostdateError, match=r"none of them wants all of that"):
            next(other.consume(TOPIC, GROUP, tag="refunded"))


def test_a_member_with_more_tags_takes_over_and_nothing_is_lost(client: Client, served: Served) -> None:
    """A rolling deployment that widens the tags."""
    seen: Counter[str] = Counter()

    def note(message: ReceivedMessage) -> None:
        seen[message.body.decode()] += 1

    client.send(TOPIC, "before", tag="paid")
    with listening(client, note, tag="paid"), postdate.connect(served.address) as other:
        until(lambda: seen["before"])
        with listening(other, note, tag="paid || refunded"):
            client.send(TOPIC, "a", tag="paid")
            client.send(TOPIC, "b", tag="refunded")
            until(lambda: seen["a"] and seen["b"])
    assert set(seen.values()) == {1}


# -- failures


def test_a_message_is_tried_as_often_and_as_late_as_its_listener_says(
    client: Client, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    def refuse(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        raise RuntimeError("no money")

    receipt = client.send(TOPIC, "x", queue=0)
    with (
        listening(client, refuse, retry=["10ms", "20ms"], attempts=3),
        postdate.connect(served.address) as other,
    ):
        (letter,) = receive(other, 1, topic=f"%DLQ%{GROUP}", group="undertaker")
    assert attempts == [1, 2, 3]
    assert (letter.body, letter.topic) == (b"x", TOPIC)
    assert letter.properties["POSTDATE_REASON"] == "RuntimeError: no money"
    assert letter.properties["POSTDATE_ORIGIN"] == f"{TOPIC}/0/{receipt.queue_offset}"
    failures = [each for each in caplog.records if "the handler failed" in each.getMessage()]
    assert [each.levelno for each in failures] == [logging.WARNING, logging.WARNING, logging.ERROR]
    sentences = [each.getMessage() for each in failures]
    assert "attempt 1), it comes again in 0.01 s: RuntimeError: no money" in sentences[0]
    assert "attempt 2), it comes again in 0.02 s" in sentences[1]
    assert "attempt 3), this was its last attempt: it is now a dead letter in %DLQ%billing" in sentences[2]
    assert all(each.exc_info for each in failures)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failed_message_comes_again_in_place(client: Client, served: Served, ordered: bool) -> None:
    places: list[tuple[str, int, int, int]] = []

    def handle(message: ReceivedMessage) -> None:
        places.append((message.topic, message.queue_id, message.queue_offset, message.attempt))
        if message.attempt == 1:
            raise RuntimeError("no money")

    client.send(TOPIC, "x", queue=2)
    with listening(client, handle, ordered=ordered, retry=["1ms"]):
        until(lambda: len(places) == 2)
    assert places == [(TOPIC, 2, 0, 1), (TOPIC, 2, 0, 2)]
    assert lease_count(served) == 0
    assert served.call(lambda: served.broker.offsets(f"%RETRY%{GROUP}", 0)) == (0, 0)


def test_what_one_consumer_retries_comes_to_a_member_of_the_same_topic(client: Client, served: Served) -> None:
    client.send(TOPIC, "x")
    with limited(client):
        for message in client.consume(TOPIC, GROUP):
            if message.attempt == 2:
                message.acknowledge()
                break
            message.retry(delay="1ms")
    assert lease_count(served) == 0


def test_delays_that_are_none_are_refused(client: Client) -> None:
    wrongs: list[Any] = ["1s", []]
    for wrong in wrongs:
        with pytest.raises(postdate.UsageError, match="expected a list of delays"):
            client.listen(TOPIC, GROUP, print, retry=wrong)
    with pytest.raises(postdate.UsageError, match="attempts is 0"):
        client.listen(TOPIC, GROUP, print, attempts=0)


@pytest.mark.parametrize("how", ["listen", "consume"])
def test_a_retried_message_of_another_topic_of_the_group_is_passed_on(
    client: Client, served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """An official client sent it back to the group's retry topic, which members of all its topics read."""
    monkeypatch.setattr(consumer, "FOREIGN_MS", 50)
    seen: list[tuple[str, int]] = []

    def note(message: ReceivedMessage) -> None:
        seen.append((message.topic, message.attempt))

    def read() -> None:
        if how == "listen":
            client.listen(TOPIC, GROUP, note)
        else:
            for message in client.consume(TOPIC, GROUP):
                note(message)

    client.send(TOPIC, "x")
    client.send("invoices", "y")
    reader = run(read)
    until(lambda: seen)
    properties = encode_properties({"RETRY_TOPIC": "invoices", "UNIQ_KEY": "u1"})
    sent_back = Message(f"%RETRY%{GROUP}", b"retried", properties, reconsume_times=3)
    served.call(lambda: served.broker.send([sent_back], served.clock.now_ms()))
    served.settle()
    until(lambda: "belongs to topic invoices, which this member does not read: it is passed on" in caplog.text)
    with postdate.connect(served.address) as other, limited(other):
        found = {}
        for message in other.consume("invoices", GROUP):
            found[message.body] = message.attempt
            if b"retried" in found:
                break
    assert found[b"retried"] == 4
    assert client.stop(WAIT_S)
    reader.join(WAIT_S)
    assert seen == [(TOPIC, 1)]


# -- leases


def test_the_lease_of_a_message_is_renewed_while_its_handler_works(
    client: Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.0)
    monkeypatch.setattr(consumer, "TICK_SECONDS", 0.02)
    begun, go = threading.Event(), threading.Event()
    seen: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.attempt)
        begun.set()
        assert go.wait(WAIT_S)

    def lease_end() -> int:
        return served.call(lambda: max(each.until_ms for each in served.broker.fold.leases.by_key.values()))

    client.send(TOPIC, "x")
    with listening(client, handle):
        assert begun.wait(WAIT_S)
        first = lease_end()
        until(lambda: lease_end() > first)
        go.set()
    assert (seen, lease_count(served)) == ([1], 0)


def test_what_no_worker_begins_with_goes_to_another_member_and_was_no_attempt(
    client: Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(popping, "STALE_SECONDS", 0.05)
    monkeypatch.setattr(Stock, "count_to_pop", lambda _self: 4)  # one that hoards
    stuck, go = threading.Event(), threading.Event()
    seen: list[int] = []

    def block(_message: ReceivedMessage) -> None:
        stuck.set()
        assert go.wait(WAIT_S)

    for n in range(3):
        client.send(TOPIC, str(n), queue=0)
    with postdate.connect(served.address) as other, listening(client, block):
        assert stuck.wait(WAIT_S)
        with listening(other, lambda message: seen.append(message.attempt)):
            until(lambda: len(seen) == 2)
        go.set()
    assert (seen, lease_count(served)) == ([1, 1], 0)


# -- the stock

SOURCE = Source(TOPIC, "broker", Address("h", 1))


def deliveries(count: int) -> list[LeasedDelivery]:
    async def make() -> list[LeasedDelivery]:
        wanted = Wanted(TOPIC, GROUP)
        owner = Leases(wanted, None)  # type: ignore[arg-type]
        return [LeasedDelivery(owner, SOURCE, 0, 1, float(n), one_record()) for n in range(count)]

    return asyncio.run(make())


def one_record() -> Pieces:
    data = records.encode(Message(TOPIC, b"x"), TOPIC.encode(), 0, 0, LOOPBACK)
    return next(zip(*split_records(data), strict=True))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    manual = ManualClock(0)
    monkeypatch.setattr(popping, "elapsed_ns", manual.elapsed_ns)
    return manual


def work(stock: Stock, clock: ManualClock, span_ms: int, done: StockTurn | None = None) -> StockTurn:
    """A turn of one message that takes a worker this long."""
    turn = stock.take(done)
    assert isinstance(turn, StockTurn)
    for _ in turn:
        clock.pass_ms(span_ms)
    return turn


def test_a_stock_asks_for_one_message_for_each_free_worker_at_first() -> None:
    stock = Stock(3, 1_000, lambda: None)
    assert stock.count_to_pop() == 3
    stock.put(deliveries(2), 100)
    assert stock.count_to_pop() == 1
    assert stock.take() is not None
    assert stock.count_to_pop() == 0


def test_a_stock_of_fast_workers_asks_for_what_they_handle_in_a_tenth_of_a_second(clock: ManualClock) -> None:
    stock = Stock(2, 1_000, lambda: None)
    stock.put(deliveries(3), 100)
    turn = work(stock, clock, 4)
    turn = work(stock, clock, 4, turn)
    assert stock.take(turn) is not None  # a message takes 4 ms: two workers handle 50 in 100 ms, and one waits
    assert stock.count_to_pop() == 49


def test_a_stock_of_slow_workers_keeps_nothing_in_store(clock: ManualClock) -> None:
    stock = Stock(1, 1_000, lambda: None)
    stock.put(deliveries(2), 100)
    turn = work(stock, clock, 300)
    stock.put([], 0)
    assert isinstance(stock.take(turn), StockTurn)
    assert stock.count_to_pop() == 0


def test_a_fast_worker_that_gets_stuck_is_given_no_more(clock: ManualClock) -> None:
    stock = Stock(1, 1_000, lambda: None)
    stock.put(deliveries(2), 100)
    turn = stock.take(work(stock, clock, 1))
    assert turn is not None
    next(iter(turn))
    assert stock.count_to_pop() == 100
    clock.pass_ms(101)
    assert stock.count_to_pop() == 0


def test_a_worker_that_comes_back_makes_room(clock: ManualClock) -> None:
    rooms: list[None] = []
    stock = Stock(1, 1_000, lambda: rooms.append(None))
    stock.put(deliveries(1), 100)
    turn = work(stock, clock, 200)
    assert (stock.count_to_pop(), rooms) == (0, [])
    assert stock.take(turn) is None
    assert (len(rooms), stock.count_to_pop()) == (1, 1)


def test_what_waits_too_long_is_taken_out_of_a_stock() -> None:
    stock = Stock(1, 1_000, lambda: None)
    stock.put(deliveries(4), 100)
    assert [each.leased_at for each in stock.take_stale(1.5)] == [0.0, 1.0]
    assert [each.leased_at for each in stock.take_stale(9.0)] == [2.0, 3.0]
    assert stock.take_stale(9.0) == []


# -- beside others


def test_members_that_pop_and_members_that_pull_share_a_group_and_nothing_comes_twice(
    client: Client, served: Served
) -> None:
    seen: Counter[bytes] = Counter()

    def note(message: ReceivedMessage) -> None:
        seen[message.body] += 1

    def consume(own: Client) -> None:
        for message in own.consume(TOPIC, GROUP):
            note(message)

    with postdate.connect(served.address) as other, listening(client, note, threads=2):
        for n in range(100):
            client.send(TOPIC, f"before {n}")
        consumer = run(lambda: consume(other))
        for n in range(200):
            client.send(TOPIC, f"beside {n}")
        assert other.stop(WAIT_S)
        consumer.join(WAIT_S)
        for n in range(100):
            client.send(TOPIC, f"after {n}")
        until(lambda: len(seen) == 400)
    assert set(seen.values()) == {1}


def test_a_member_that_dies_loses_nothing(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    seen: list[int] = []
    with serving(tmp_path / "data", clock) as served, postdate.connect(served.address, timeout=WAIT_S) as client:
        client.send(TOPIC, "x")
        program = (
            "import postdate, sys, time\n"
            "def handle(message):\n"
            "    print('begun', flush=True)\n"
            "    time.sleep(600)\n"
            "postdate.connect(sys.argv[1]).listen('orders', 'billing', handle)\n"
        )
        command = [sys.executable, "-c", program, served.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            process.kill()
        with listening(client, lambda message: seen.append(message.attempt)):
            served.pass_ms(leases.LEASE_MS)
            until(lambda: seen)
    assert seen == [2]

"""The in-process broker: what users' tests rely on."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import postdate
from postdate.testing import InProcessBroker, ManualClock

TOPIC, GROUP = "reminders", "mail"
START_MS = 1_800_000_000_000


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker(clock=ManualClock(START_MS)) as broker:
        yield broker


@pytest.fixture
def client(broker: InProcessBroker) -> Iterator[postdate.Client]:
    with postdate.connect(broker.address) as client:
        yield client


def received(client: postdate.Client, idle: str = "200ms") -> list[str]:
    return [message.body.decode() for message in client.consume(TOPIC, GROUP, idle=idle)]


@pytest.mark.parametrize("delay", ["1s", "10m", "1d", "400d"])  # near, and far ones that are rescued
def test_a_message_comes_when_its_delay_has_passed_and_not_before(
    broker: InProcessBroker, client: postdate.Client, delay: str
) -> None:
    client.send(TOPIC, delay, delay=delay)
    broker.advance(_span(delay) - timedelta(milliseconds=1))
    assert received(client) == []
    broker.advance("1ms")
    assert received(client) == [delay]


def _span(text: str) -> timedelta:
    return timedelta(**{{"s": "seconds", "m": "minutes", "d": "days"}[text[-1]]: int(text[:-1])})


def test_a_consumer_that_waits_is_woken(broker: InProcessBroker, client: postdate.Client) -> None:
    client.send(TOPIC, "tomorrow", delay="1d")
    messages = client.consume(TOPIC, GROUP)
    timer = threading.Timer(0.2, lambda: broker.advance("1d"))
    timer.start()
    assert next(messages).body == b"tomorrow"
    timer.join()
    messages.close()


def test_connections_and_groups_outlive_a_year(broker: InProcessBroker, client: postdate.Client) -> None:
    client.send(TOPIC, "first")
    messages = client.consume(TOPIC, GROUP)
    assert next(messages).body == b"first"
    broker.advance("365d")
    client.send(TOPIC, "second", delay="1d")
    broker.advance("1d")
    assert next(messages).body == b"second"
    messages.close()


def test_a_message_that_was_cancelled_does_not_come(broker: InProcessBroker, client: postdate.Client) -> None:
    receipt = client.send(TOPIC, "never", delay="1d")
    assert client.cancel(receipt) is postdate.Cancelled.CANCELLED
    broker.advance("2d")
    assert received(client) == []


def test_a_retry_comes_after_its_delay(broker: InProcessBroker, client: postdate.Client) -> None:
    client.send(TOPIC, "again")
    messages = client.consume(TOPIC, GROUP)
    next(messages).retry("1h")
    broker.advance("1h")
    message = next(messages)
    assert (message.body, message.attempt) == (b"again", 2)
    messages.close()


# -- handlers -----------------------------------------------------------------------------------------------------


class Handler:
    """Fails as often as it is told to; remembers each message with its attempt."""

    def __init__(self, failures: int = 0) -> None:
        self.seen: list[tuple[str, int]] = []
        self._failures = failures

    def __call__(self, message: postdate.ReceivedMessage) -> None:
        self.seen.append((message.body.decode(), message.attempt))
        if len(self.seen) <= self._failures:
            raise RuntimeError("not yet")


@contextmanager
def listening(address: str, handler: Handler, **options: Any) -> Iterator[None]:
    """A client of its own listens in a thread."""
    with postdate.connect(address) as client:
        thread = threading.Thread(target=client.listen, args=(TOPIC, GROUP, handler), kwargs=options)
        thread.start()
        yield
    thread.join()


def test_a_handler_gets_what_is_due_after_each_move(broker: InProcessBroker, client: postdate.Client) -> None:
    handler = Handler()
    client.send(TOPIC, "tomorrow", delay="1d")
    client.send(TOPIC, "in a week", delay="7d")
    with listening(broker.address, handler):
        broker.wait_until_handled(GROUP)
        assert handler.seen == []
        broker.advance("1d")
        broker.wait_until_handled(GROUP)
        assert handler.seen == [("tomorrow", 1)]
        broker.advance("6d")
        broker.wait_until_handled(GROUP)
    assert handler.seen == [("tomorrow", 1), ("in a week", 1)]


def test_a_handler_that_fails_is_asked_again_by_the_calendar(broker: InProcessBroker, client: postdate.Client) -> None:
    handler = Handler(failures=2)
    client.send(TOPIC, "hello")
    with listening(broker.address, handler):
        for delay in ("10s", "30s"):  # the broker's growing delays
            broker.wait_until_handled(GROUP)
            broker.advance(delay)
        broker.wait_until_handled(GROUP)
    assert handler.seen == [("hello", 1), ("hello", 2), ("hello", 3)]


def test_after_its_attempts_a_message_is_a_dead_letter(broker: InProcessBroker, client: postdate.Client) -> None:
    handler = Handler(failures=100)
    client.send(TOPIC, "hello", key="k")
    with listening(broker.address, handler, attempts=2):
        broker.wait_until_handled(GROUP)
        broker.advance("10s")
        broker.wait_until_handled(GROUP)
        broker.advance("1d")
        broker.wait_until_handled(GROUP)
    assert len(handler.seen) == 2
    (letter,) = client.consume(f"%DLQ%{GROUP}", "undertaker", idle="200ms")
    assert (letter.body, letter.key) == (b"hello", "k")


def test_members_of_a_group_share_the_work(broker: InProcessBroker, client: postdate.Client) -> None:
    one, other = Handler(), Handler()
    for queue in range(4):
        client.send(TOPIC, f"in queue {queue}", delay="1h", queue=queue)
    with listening(broker.address, one), listening(broker.address, other):
        broker.wait_until_handled(GROUP)
        broker.advance("1h")
        broker.wait_until_handled(GROUP)
    # A message may come twice while a member joins.
    assert {body for body, _ in one.seen + other.seen} == {f"in queue {queue}" for queue in range(4)}


def test_messages_of_other_tags_are_not_waited_for(broker: InProcessBroker, client: postdate.Client) -> None:
    handler = Handler()
    client.send(TOPIC, "paid", tag="paid")
    client.send(TOPIC, "refunded", tag="refunded")
    with listening(broker.address, handler, tag="paid"):
        broker.wait_until_handled(GROUP)
    assert handler.seen == [("paid", 1)]


def test_asyncio_listens_too(broker: InProcessBroker) -> None:
    seen: list[bytes] = []

    async def handle(message: postdate.AsyncReceivedMessage) -> None:
        seen.append(message.body)

    async def main() -> None:
        async with postdate.connect_async(broker.address) as worker:
            listener = asyncio.create_task(worker.listen(TOPIC, GROUP, handle))
            await worker.send(TOPIC, "tomorrow", delay="1d")
            await asyncio.to_thread(broker.wait_until_handled, GROUP)
            broker.advance("1d")
            await asyncio.to_thread(broker.wait_until_handled, GROUP)
            listener.cancel()
            await asyncio.wait([listener])

    asyncio.run(main())
    assert seen == [b"tomorrow"]


def test_waiting_says_what_is_left(broker: InProcessBroker, client: postdate.Client) -> None:
    with pytest.raises(
        postdate.TimedOut, match=r"group 'mail' has not handled everything within 0 s: it has no member"
    ):
        broker.wait_until_handled(GROUP, timeout=0)
    client.send(TOPIC, "hello")
    messages = client.consume(TOPIC, GROUP)
    next(messages)
    with pytest.raises(postdate.TimedOut, match="topic reminders has 1 messages for it"):
        broker.wait_until_handled(GROUP, timeout=0.05)
    messages.close()
    broker.close()
    with pytest.raises(postdate.UsageError, match="the broker is closed"):
        broker.wait_until_handled(GROUP)


# -- time and life ------------------------------------------------------------------------------------------------


def test_the_brokers_time_is_its_own(broker: InProcessBroker, client: postdate.Client) -> None:
    began = broker.now
    assert began == datetime.fromtimestamp(START_MS / 1_000, UTC)
    client.send(TOPIC, "noon", at=began + timedelta(hours=4))
    broker.advance("4h")
    assert broker.now == began + timedelta(hours=4)
    assert received(client) == ["noon"]


def test_it_begins_at_the_machines_time() -> None:
    with InProcessBroker() as broker:
        assert abs(broker.now - datetime.now(UTC)) < timedelta(minutes=1)


def test_another_broker_opens_the_disk_of_one_that_was_closed(broker: InProcessBroker, client: postdate.Client) -> None:
    client.send(TOPIC, "later", delay="1d")
    broker.close()
    with (
        InProcessBroker(disk=broker.disk, clock=broker.clock) as second,
        postdate.connect(second.address) as client_of_second,
    ):
        second.advance("1d")
        assert received(client_of_second) == ["later"]


def test_settings_are_taken_and_checked() -> None:
    with (
        InProcessBroker(auto_create_topics=False) as broker,
        postdate.connect(broker.address) as client,
        pytest.raises(postdate.TopicNotFound),
    ):
        client.send(TOPIC, "x")
    with pytest.raises(postdate.UsageError, match="lead_ms"):
        InProcessBroker(lead_ms=-1)


def test_two_brokers_run_side_by_side() -> None:
    with InProcessBroker() as one, InProcessBroker() as other:
        assert one.address != other.address


def test_asyncio_reaches_it(broker: InProcessBroker) -> None:
    async def remind() -> bytes:
        async with postdate.connect_async(broker.address) as client:
            await client.send(TOPIC, "tomorrow", delay="1d")
            broker.advance("1d")
            async for message in client.consume(TOPIC, GROUP):
                return message.body
        raise AssertionError("no message came")

    assert asyncio.run(remind()) == b"tomorrow"


def test_closing_ends_its_threads_and_may_be_repeated() -> None:
    before = threading.active_count()
    broker = InProcessBroker()
    broker.close()
    broker.close()
    with pytest.raises(postdate.UsageError, match="the broker is closed"):
        broker.advance("1s")
    assert threading.active_count() == before


def test_a_start_that_fails_leaves_no_thread_and_no_lock(broker: InProcessBroker) -> None:
    before = threading.active_count()
    port = int(broker.address.rpartition(":")[2])
    with pytest.raises(postdate.UsageError, match="in use"):
        InProcessBroker(route_port=port)
    assert threading.active_count() == before

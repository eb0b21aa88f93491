"""The in-process broker: what users' tests rely on."""

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import postdate
from postdate.testing import InProcessBroker, ManualClock

TOPIC, GROUP = "reminders", "mail"
START_MS = 1_800_000_000_000
PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


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


def test_the_pytest_example_of_the_page_passes(tmp_path: Path) -> None:
    (source,) = (text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "pytest" in text)
    (tmp_path / "test_timeouts.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_timeouts.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr

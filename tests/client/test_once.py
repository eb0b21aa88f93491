"""Sent once through both clients: one message, one receipt, whoever sends it and however often."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import Cancelled, Client, IllegalMessage, Outgoing, UsageError
from postdate.client.outgoing import receipt, seal
from postdate.client.routes import Routes
from postdate.testing import InProcessBroker, ManualClock
from tests.support.server import WAIT_S, Served, serving

TOPIC = "orders"
START_MS = 1_800_000_000_000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with postdate.connect(served.address, timeout=WAIT_S) as connected:
        yield connected


def bodies(client: Client, group: str = "billing") -> list[bytes]:
    return sorted(message.body for message in client.consume(TOPIC, group, idle="300ms"))


HOWS: dict[str, dict[str, Any]] = {
    "at once": {}, "near": {"delay": "1m"}, "far": {"delay": "30d"}, "no delay": {"delay": 0}, "a level": {"level": 5},
    "at": {"at": datetime.now(UTC) + timedelta(days=1)}, "at a past instant": {"at": datetime(2001, 1, 1, tzinfo=UTC)},
    "keys": {"key": ["a", "b"], "tag": "paid", "properties": {"n": 1}},
}  # fmt: skip


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_the_second_send_gets_the_first_ones_receipt(client: Client, how: dict[str, Any]) -> None:
    first = client.send(TOPIC, "x", once="order-42", **how)
    assert client.send(TOPIC, "x", once="order-42", **how) == first
    assert client.send(TOPIC, "x", once="order-42") == first
    assert client.send(TOPIC, "x", once="order-42", delay="2h", queue=3) == first
    assert client.send(TOPIC, "x", once="order-43", **how).offset_id != first.offset_id


def test_a_cancelled_message_is_not_sent_again(client: Client) -> None:
    first = client.send(TOPIC, "x", once="order-42", delay="1h")
    assert client.cancel(first) is Cancelled.CANCELLED
    again = client.send(TOPIC, "x", once="order-42")
    assert again == first
    assert client.cancel(again) is Cancelled.CANCELLED
    assert bodies(client) == []


def test_a_delivered_message_is_not_sent_again(client: Client) -> None:
    first = client.send(TOPIC, "x", once="order-42", delay="1ms")
    assert bodies(client) == [b"x"]
    assert client.send(TOPIC, "x", once="order-42", delay="1h") == first
    assert client.cancel(first) is Cancelled.DELIVERED
    at_once = client.send(TOPIC, "y", once="order-43")
    assert bodies(client) == [b"y"]
    assert client.send(TOPIC, "y", once="order-43", delay="1h") == at_once
    assert client.cancel(at_once) is Cancelled.DELIVERED


def test_another_body_under_an_id_is_refused(client: Client) -> None:
    client.send(TOPIC, "x", once="order-42")
    with pytest.raises(IllegalMessage, match="once 'order-42': topic 'orders' has another body under this id since"):
        client.send(TOPIC, "y", once="order-42")
    assert bodies(client) == [b"x"]


def test_many_clients_at_once_send_one_message(served: Served) -> None:
    async def send_all() -> set[postdate.Receipt]:
        clients = [postdate.connect_async(served.address, timeout=WAIT_S) for _ in range(4)]
        sends = [client.send(TOPIC, "x", once=n % 5, delay="1s") for n in range(50) for client in clients]
        receipts = await asyncio.gather(*sends)
        for client in clients:
            await client.close()
        return set(receipts)

    assert len(asyncio.run(send_all())) == 5


@pytest.mark.parametrize(("once", "said"), [("", "once is empty"), (1.5, "once is 1.5 of type float"), (True, "bool")])
def test_an_id_that_is_none_is_refused(client: Client, once: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        client.send(TOPIC, "x", once=once)


def test_an_id_has_one_way_in(client: Client) -> None:
    with pytest.raises(UsageError, match="property POSTDATE_ONCE: use the argument once"):
        client.send(TOPIC, "x", properties={"POSTDATE_ONCE": "order-42"})
    with pytest.raises(UsageError, match="a batch cannot send a message once: send those with an id by themselves"):
        client.send_batch(TOPIC, [Outgoing("x"), Outgoing("y", once="order-42")])
    with pytest.raises(IllegalMessage, match="key_characters_max"):
        client.send(TOPIC, "x", once="i" * 1_025)
    assert bodies(client) == []


def test_a_broker_that_would_store_it_twice_is_not_sent_to(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocketMQ passes over the property."""
    monkeypatch.setattr(Routes, "is_postdate", property(lambda _: False, lambda *_: None), raising=False)
    with pytest.raises(UsageError, match="only Postdate stores a message once"):
        client.send(TOPIC, "x", once="order-42")


def test_the_receipt_is_made_of_the_answer_alone() -> None:
    sealed = seal(Outgoing("x", once="order-42", delay="1h"), "OWN")
    answer = {"msgId": "AB", "queueId": "3", "queueOffset": "7", "transactionId": "FIRST"}
    found = receipt(TOPIC, sealed, answer)
    assert (found.id, found.queue_id, found.queue_offset, found.handle) == ("FIRST", 3, 7, None)


def test_the_in_process_broker_stores_once_within_the_window() -> None:
    with InProcessBroker(clock=ManualClock(START_MS)) as broker, postdate.connect(broker.address) as client:
        first = client.send(TOPIC, "x", once="order-42")
        broker.advance(timedelta(hours=72) - timedelta(milliseconds=1))
        assert client.send(TOPIC, "x", once="order-42") == first
        broker.advance(timedelta(milliseconds=1))
        assert client.send(TOPIC, "x", once="order-42") != first
        assert bodies(client) == [b"x", b"x"]


def test_a_dead_letter_that_is_resent_is_a_send_of_its_own(client: Client) -> None:
    first = client.send(TOPIC, "x", once="order-42")

    has_failed = threading.Event()

    def fail(_: postdate.ReceivedMessage) -> None:
        has_failed.set()
        raise ValueError("no")

    listening = threading.Thread(target=client.listen, args=(TOPIC, "billing", fail), kwargs={"attempts": 1})
    listening.start()
    assert has_failed.wait(WAIT_S)
    client.stop(WAIT_S)
    listening.join(WAIT_S)
    while not (letters := client.dead_letters("billing")):  # the broker makes it a moment later
        pass
    (resent,) = client.resend_dead_letters(letters)
    assert resent.offset_id != first.offset_id
    assert bodies(client, "others") == [b"x", b"x"]
    assert client.send(TOPIC, "x", once="order-42") == first


def test_an_id_survives_a_restart(tmp_path: Path) -> None:
    def send() -> postdate.Receipt:
        with serving(tmp_path / "data") as served, postdate.connect(served.address, timeout=WAIT_S) as client:
            found = client.send(TOPIC, "x", once="order-42", delay="1h")
            served.kill()
        return found

    first = send()
    assert dataclasses.replace(send(), offset_id="") == dataclasses.replace(first, offset_id=""), "another port"

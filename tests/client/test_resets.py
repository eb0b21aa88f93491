"""Moving a group: what is delivered again or skipped, and what it has in work."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import Client, QueueReset
from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import Peer, connected, make_topic, sent
from tests.support.server import Served, serving

GROUP = "billing"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, ManualClock(T0)) as running, connected(running) as peer:
        for topic, queues in (("orders", 2), ("bills", 1)):
            make_topic(peer, topic, queues)
            for number in range(10):
                sent(peer, topic, f"{topic} {number}", queue_id=number % queues)
                running.pass_ms(1_000)
        commit(peer, "orders", 0, 4)
        commit(peer, "bills", 0, 10)
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with postdate.connect(served.address) as connected:
        yield connected


def commit(peer: Peer, topic: str, queue_id: int, offset: int) -> None:
    fields: dict[str, Any] = {"consumerGroup": GROUP, "topic": topic, "queueId": queue_id, "commitOffset": offset}
    assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, **fields).code == codes.SUCCESS


def committed(served: Served, topic: str, queue_id: int) -> int | None:
    return served.call(lambda: served.dispatcher.sessions.offsets.get(GROUP, topic, queue_id))


def pop(peer: Peer, count: int) -> list[str]:
    fields: dict[str, Any] = {
        "consumerGroup": GROUP,
        "topic": "orders",
        "queueId": 0,
        "maxMsgNums": count,
        "invisibleTime": 5_000,
    }
    return [record.body.decode() for record in decode_records(peer.ask(Request.POP_MESSAGE, **fields).body)]


def test_a_preview_says_what_would_be_delivered_again_or_skipped_and_moves_nothing(
    served: Served, client: Client
) -> None:
    plan = client.reset_group(GROUP, "earliest", dry_run=True)
    assert plan == [
        QueueReset("bills", 0, 10, 0, 0), QueueReset("orders", 0, 4, 0, 0), QueueReset("orders", 1, None, 0, 0),
    ]  # fmt: skip
    assert [(each.again, each.skipped) for each in plan] == [(10, 0), (4, 0), (0, 0)]
    at = datetime.fromtimestamp(T0 / 1_000 + 2, UTC)
    assert client.reset_group(GROUP, at, topic="orders", dry_run=True) == [
        QueueReset("orders", 0, 4, 1, 0), QueueReset("orders", 1, None, 1, 0),
    ]  # fmt: skip
    ahead = client.reset_group(GROUP, "latest", topic="orders", dry_run=True)
    assert [(each.again, each.skipped) for each in ahead] == [(0, 1), (0, 0)]
    assert (committed(served, "orders", 0), committed(served, "orders", 1)) == (4, None)


def test_a_reset_moves_the_group_and_its_next_consumer(served: Served, client: Client) -> None:
    moved = client.reset_group(GROUP, T0 + 6_000, topic="orders")
    assert [(each.before, each.after) for each in moved] == [(4, 3), (None, 3)]
    found = {message.body.decode() for message in client.consume("orders", GROUP, idle="500ms")}
    assert found == {f"orders {number}" for number in range(6, 10)}
    assert committed(served, "bills", 0) == 10


def test_what_the_group_has_in_work_is_neither_skipped_nor_given_twice(served: Served, client: Client) -> None:
    with connected(served) as peer:
        client.reset_group(GROUP, "earliest")
        assert pop(peer, 2) == ["orders 0", "orders 2"]
        back = client.reset_group(GROUP, "earliest", topic="orders")
        assert [each.in_work for each in back] == [2, 0]
        assert pop(peer, 5) == ["orders 4", "orders 6", "orders 8"], "those in work are not given a second time"
        ahead = client.reset_group(GROUP, "latest", topic="orders")
        assert [each.in_work for each in ahead] == [5, 0]
        assert pop(peer, 5) == []
        served.pass_ms(5_000)
        served.settle()
        assert sorted(pop(peer, 5)) == [f"orders {number}" for number in range(0, 10, 2)], "nor are they skipped"


def test_a_reset_of_what_is_not_there_is_refused(client: Client) -> None:
    with pytest.raises(postdate.GroupNotFound):
        client.reset_group("nobody", "earliest")
    with pytest.raises(postdate.TopicNotFound):
        client.reset_group(GROUP, "earliest", topic="nothing")
    for to in ("yesterday", -5, True, None, datetime(2033, 1, 1)):
        with pytest.raises(postdate.UsageError):
            client.reset_group(GROUP, to)  # type: ignore[arg-type]


def test_the_asyncio_client_does_the_same(served: Served) -> None:
    async def reset() -> list[QueueReset]:
        async with postdate.connect_async(served.address) as client:
            return await client.reset_group(GROUP, "latest", topic="bills")

    assert asyncio.run(reset()) == [QueueReset("bills", 0, 10, 10, 0)]

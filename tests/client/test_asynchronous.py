"""The asyncio client against a real server: what differs from the blocking one, which runs it inside."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

import postdate
from postdate import AsyncClient, AsyncReceivedMessage, Cancelled, Outgoing
from tests.support.server import WAIT_S, Served, serving

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data", message_delay_level="1s 1s 1s 1s") as server:
        yield server


def within_limit(story: Callable[[AsyncClient], Coroutine[Any, Any, None]], served: Served) -> None:
    """Runs a story with a client, and not for ever."""

    async def told() -> None:
        async with asyncio.timeout(WAIT_S), postdate.connect_async(served.address) as client:
            await story(client)

    asyncio.run(told())


async def receive(client: AsyncClient, count: int) -> list[bytes]:
    found = []
    async for message in client.consume(TOPIC, GROUP):
        found.append(message.body)
        if len(found) == count:
            break
    return found


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_sends_under_way_at_once_share_a_connection(served: Served) -> None:
    service = served.server._dispatcher
    assert service is not None

    async def story(client: AsyncClient) -> None:
        receipts = await asyncio.gather(*[client.send(TOPIC, str(n)) for n in range(500)])
        assert len({receipt.id for receipt in receipts}) == 500
        assert served.call(lambda: len(service.connections)) == 2  # the route's and the broker's
        assert sorted(await receive(client, 500)) == sorted(str(n).encode() for n in range(500))

    within_limit(story, served)


def test_it_sends_batches_cancels_and_delays(served: Served) -> None:
    async def story(client: AsyncClient) -> None:
        soon, never = await client.send_batch(TOPIC, [Outgoing("soon", delay="100ms"), Outgoing("x", delay="1h")])
        assert await client.cancel(never) is Cancelled.CANCELLED
        assert await receive(client, 1) == [b"soon"]
        assert await client.cancel(str(soon)) is Cancelled.DELIVERED
        assert soon.due_at_ms is not None
        assert await client.cancel_key(TOPIC, "nobody", soon.due_at_ms) is Cancelled.UNKNOWN

    within_limit(story, served)


def test_it_runs_on_uvloop_too(served: Served) -> None:
    async def story() -> None:
        async with asyncio.timeout(WAIT_S), postdate.connect_async(served.address) as client:
            await client.send(TOPIC, "x")
            assert await receive(client, 1) == [b"x"]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


def test_breaking_off_leaves_the_current_message_and_commits_the_others(served: Served) -> None:
    async def story(client: AsyncClient) -> None:
        for body in ("a", "b", "c"):
            await client.send(TOPIC, body, queue=0)
        assert await receive(client, 2) == [b"a", b"b"]
        # asyncio closes a loop that was left on its own: the next member may join before that, and get "c" before "b"
        # is given back, or "b" twice.
        found: list[bytes] = []
        async for message in client.consume(TOPIC, GROUP):
            found.append(message.body)
            if {b"b", b"c"} <= set(found):
                break
        assert b"a" not in found

    within_limit(story, served)


def test_a_message_is_retried(served: Served) -> None:
    async def story(client: AsyncClient) -> None:
        await client.send(TOPIC, "x")
        messages: AsyncIterator[AsyncReceivedMessage] = client.consume(TOPIC, GROUP)
        first = await anext(messages)
        await first.retry(delay="100ms")
        second = await anext(messages)
        assert (first.attempt, second.attempt, second.topic, second.id) == (1, 2, TOPIC, first.id)

    within_limit(story, served)


def test_an_acknowledged_message_does_not_come_again(served: Served) -> None:
    async def story(client: AsyncClient) -> None:
        await client.send(TOPIC, "a", queue=0)
        async for message in client.consume(TOPIC, GROUP):
            await message.acknowledge()
            assert served.call(lambda: _committed(served)) == 1
            break
        await client.send(TOPIC, "b", queue=0)
        assert await receive(client, 1) == [b"b"]

    within_limit(story, served)


def test_a_loop_ends_when_nothing_has_come_for_a_while(served: Served) -> None:
    async def story(client: AsyncClient) -> None:
        await client.send(TOPIC, "a", queue=0)
        assert [message.body async for message in client.consume(TOPIC, GROUP, idle="1s")] == [b"a"]
        assert served.call(lambda: _committed(served)) == 1

    within_limit(story, served)


def test_a_handler_that_raises_gets_the_message_again(served: Served) -> None:
    seen: list[int] = []

    async def handle(message: AsyncReceivedMessage) -> None:
        seen.append(message.attempt)
        if message.attempt == 1:
            raise RuntimeError("no money")

    async def story(client: AsyncClient) -> None:
        await client.send(TOPIC, "x")
        listening = asyncio.create_task(client.listen(TOPIC, GROUP, handle))
        await until(lambda: seen == [1, 2])
        await client.close()
        await listening

    within_limit(story, served)


def test_tasks_work_on_several_queues_at_once(served: Served) -> None:
    together = asyncio.Barrier(2)

    async def handle(_message: AsyncReceivedMessage) -> None:
        await together.wait()

    async def story(client: AsyncClient) -> None:
        listening = asyncio.create_task(client.listen(TOPIC, GROUP, handle, tasks=2))
        await asyncio.gather(client.send(TOPIC, "x", queue=0), client.send(TOPIC, "x", queue=1))
        await until(lambda: served.call(lambda: _committed(served) == 2))
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening

    within_limit(story, served)


def _committed(served: Served) -> int:
    return sum(served.broker.fold.groups.offset(GROUP, TOPIC, queue) or 0 for queue in range(4))


def test_closing_ends_loops_and_later_calls_are_refused(served: Served) -> None:
    async def story(client: AsyncClient) -> None:
        await client.send(TOPIC, "x")
        looping = asyncio.create_task(_count(client))
        await until(lambda: served.call(lambda: _committed(served) == 1))
        await client.close()
        assert await looping == 1
        with pytest.raises(postdate.UsageError, match="closed"):
            await client.send(TOPIC, "x")
        with pytest.raises(postdate.UsageError, match="closed"):
            await anext(client.consume(TOPIC, GROUP))

    within_limit(story, served)


async def _count(client: AsyncClient) -> int:
    return len([message async for message in client.consume(TOPIC, GROUP)])

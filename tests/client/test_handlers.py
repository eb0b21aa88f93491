"""Which functions `listen` takes. The comments for mypy are tests, too: strict mode refuses one without need."""

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate import AsyncReceivedMessage, ReceivedMessage
from tests.support.server import WAIT_S, Served, serving

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data") as server:
        yield server


async def await_it(_message: ReceivedMessage) -> None: ...


def return_at_once(_message: AsyncReceivedMessage) -> None: ...


class Awaited:
    async def __call__(self, _message: ReceivedMessage) -> None: ...


def test_a_coroutine_function_is_refused_by_the_blocking_listen_at_once() -> None:
    with postdate.connect("127.0.0.1:1") as client:
        with pytest.raises(postdate.UsageError, match="a coroutine function, which the blocking client cannot await"):
            client.listen(TOPIC, GROUP, await_it)  # type: ignore[arg-type]
        with pytest.raises(postdate.UsageError, match="a coroutine function"):
            client.listen(TOPIC, GROUP, Awaited())  # type: ignore[arg-type]
        with pytest.raises(postdate.UsageError, match="a coroutine function"):
            client.listen(TOPIC, GROUP, functools.partial(await_it))  # type: ignore[arg-type]


def test_a_plain_function_is_refused_by_the_asyncio_listen_at_once() -> None:
    async def story() -> None:
        async with postdate.connect_async("127.0.0.1:1") as client:
            with pytest.raises(postdate.UsageError, match=r"a plain function, expected .* async def"):
                await client.listen(TOPIC, GROUP, return_at_once)  # type: ignore[arg-type]

    asyncio.run(story())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_coroutine_that_a_plain_function_returns_is_refused_and_its_message_stays(
    served: Served, threads: int
) -> None:
    def disguise(message: ReceivedMessage) -> Any:
        return await_it(message)

    with postdate.connect(served.address, timeout=WAIT_S) as client:
        client.send(TOPIC, "x")
        with pytest.raises(postdate.UsageError, match=r"did not look like one; message .* comes again"):
            client.listen(TOPIC, GROUP, disguise, threads=threads)
        assert [message.body for message in client.consume(TOPIC, GROUP, idle="1s")] == [b"x"]


def test_a_decorated_coroutine_function_is_taken(served: Served) -> None:
    async def story() -> None:
        done = asyncio.Event()

        async def handle(_message: AsyncReceivedMessage) -> None:
            done.set()

        @functools.wraps(handle)
        def decorated(message: AsyncReceivedMessage) -> Any:
            return handle(message)

        async with asyncio.timeout(WAIT_S), postdate.connect_async(served.address) as client:
            await client.send(TOPIC, "x")
            listening = asyncio.create_task(client.listen(TOPIC, GROUP, decorated))
            await done.wait()
            await client.stop()
            await listening

    asyncio.run(story())

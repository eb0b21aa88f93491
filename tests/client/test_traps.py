"""What a newcomer does wrong, and how the client says so: a mistyped topic, a second event loop, a fork."""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postdate
from postdate.client import consumer
from tests.client.test_blocking import run, until
from tests.support.server import WAIT_S, Served, serving

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data") as server:
        yield server


# -- topics that do not exist


@pytest.mark.parametrize("creates", [True, False])
def test_a_topic_that_does_not_exist_is_waited_for_and_the_log_says_so_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, creates: bool
) -> None:
    monkeypatch.setattr(consumer, "MISSING_SECONDS", 0.01)
    with (
        serving(tmp_path / "data", auto_create_topics=creates) as served,
        postdate.connect(served.address, timeout=WAIT_S) as client,
    ):
        waiting = run(lambda: list(client.consume("ordres", GROUP)))
        until(lambda: "nothing has come from it" in caplog.text)
        assert client.stop(WAIT_S)
        waiting.join(WAIT_S)
    first, second = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert first == (
        "group billing waits for messages of topic ordres, which does not exist; is the name right? create it with: "
        "postdate topic create ordres"
    )
    assert "did not exist 0.01 s ago, and nothing has come from it; is the name right?" in second


def test_a_topic_that_exists_is_no_cause_for_warnings(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with postdate.connect(served.address, timeout=WAIT_S) as client:
        client.send(TOPIC, "x")
        next(client.consume(TOPIC, GROUP))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# -- loops and processes


def test_an_asyncio_client_in_a_second_loop_is_refused(served: Served) -> None:
    client = postdate.connect_async(served.address)

    async def send() -> None:
        await client.send(TOPIC, "x")

    async def use_again() -> None:
        async with client:
            with pytest.raises(postdate.UsageError, match="belongs to another event loop; make one for each loop"):
                await client.send(TOPIC, "x")
            with pytest.raises(postdate.UsageError, match="another event loop"):
                await anext(client.consume(TOPIC, GROUP))

    with asyncio.Runner() as first:
        first.run(send())
        with asyncio.Runner() as second:
            second.run(use_again())
        first.run(client.close())


def in_child(pipe: tuple[int, int], client: postdate.Client) -> None:
    """Runs in a forked process, which ends here whatever happens."""
    answer = "no error"
    try:
        with client:
            client.send(TOPIC, "x")
    except postdate.UsageError as error:
        answer = str(error)
    finally:
        os.write(pipe[1], answer.encode())
        os._exit(0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 warns of forks in processes with threads
def test_a_client_after_a_fork_is_refused(served: Served) -> None:
    with postdate.connect(served.address) as client:
        client.send(TOPIC, "x")
        pipe = os.pipe()
        child = os.fork()
        if not child:
            in_child(pipe, client)
        os.close(pipe[1])
        with os.fdopen(pipe[0]) as answer:
            sentence = answer.read()
        os.waitpid(child, 0)
        assert client.send(TOPIC, "the parent goes on").id
    assert sentence == (
        f"process {os.getpid()} made the client, and this is process {child}, which was forked from it; "
        "make a client in each process"
    )


def test_an_asyncio_client_after_a_fork_is_refused(served: Served) -> None:
    async def story() -> None:
        async with postdate.connect_async(served.address) as client:
            await client.send(TOPIC, "x")
            connections = client._connections
            owner = connections._owner
            connections._owner = os.getpid() + 1, asyncio.get_running_loop()
            with pytest.raises(postdate.UsageError, match="make a client in each process"):
                await client.send(TOPIC, "x")
            connections._owner = owner

    asyncio.run(story())


# -- brokers that are not there


def test_a_task_that_listens_outlives_a_broker_that_is_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        seen = asyncio.Event()

        async def handle(_message: postdate.AsyncReceivedMessage) -> None:
            seen.set()

        with serving(tmp_path / "data") as before:
            ports: dict[str, Any] = {"route_port": int(before.address.rpartition(":")[2]), "broker_port": before.port}
        async with asyncio.timeout(WAIT_S), postdate.connect_async(before.address) as client:
            listening = asyncio.create_task(client.listen(TOPIC, GROUP, handle))
            while "joining failed and is tried again: no broker at" not in caplog.text:
                await asyncio.sleep(0.01)
            with serving(tmp_path / "data", **ports):
                await client.send(TOPIC, "x")
                await seen.wait()
                assert await client.stop()
            await listening

    asyncio.run(story())

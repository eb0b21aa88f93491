"""Ending in peace: `stop`, signals to real processes, cancelled tasks. What finished is never repeated."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import postdate
from postdate import AsyncReceivedMessage, Client, ReceivedMessage
from tests.client.test_blocking import run, until
from tests.support.server import WAIT_S, Served, serving

TOPIC, GROUP = "orders", "billing"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with postdate.connect(served.address, timeout=WAIT_S) as connected:
        yield connected


def send(client: Client, *bodies: str) -> None:
    for body in bodies:
        client.send(TOPIC, body, queue=0)


def left_over(served: Served) -> list[bytes]:
    """What a group that begins again is given."""
    with postdate.connect(served.address, timeout=WAIT_S) as client:
        return [message.body for message in client.consume(TOPIC, GROUP, idle="1s")]


# -- by another thread


class Slow:
    """A handler that waits until the test lets it go."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.go = threading.Event()

    def __call__(self, message: ReceivedMessage) -> None:
        self.begun.append(message.body)
        assert self.go.wait(WAIT_S)


@pytest.mark.parametrize("threads", [1, 3])
def test_stopping_finishes_what_is_in_hand_and_gives_the_rest_to_others(
    client: Client, served: Served, threads: int
) -> None:
    slow = Slow()
    send(client, "a", "b")
    listener = run(lambda: client.listen(TOPIC, GROUP, slow, threads=threads))
    until(lambda: slow.begun)
    assert not client.stop(timeout=0.01)  # in time is not what it is
    slow.go.set()
    assert client.stop(timeout=WAIT_S)
    listener.join(WAIT_S)
    assert not listener.is_alive()
    assert sorted(slow.begun + left_over(served)) == [b"a", b"b"]
    send(client, "c")  # a client that has stopped still sends
    assert left_over(served) == [b"c"]


def test_stopping_ends_a_loop_when_its_body_is_done(client: Client, served: Served) -> None:
    seen: list[bytes] = []
    may_go_on = threading.Event()

    def loop() -> None:
        for message in client.consume(TOPIC, GROUP):
            seen.append(message.body)
            assert may_go_on.wait(WAIT_S)

    send(client, "a", "b")
    consumer = run(loop)
    until(lambda: seen)
    stopped = run(lambda: client.stop(WAIT_S))
    assert not client.stop(timeout=0.01)
    may_go_on.set()
    stopped.join(WAIT_S)
    consumer.join(WAIT_S)
    assert not consumer.is_alive()
    assert (seen, left_over(served)) == ([b"a"], [b"b"])


def test_a_handler_that_fails_while_it_is_stopped_is_tried_again(client: Client, served: Served) -> None:
    begun, go = threading.Event(), threading.Event()

    def fail(_message: ReceivedMessage) -> None:
        begun.set()
        assert go.wait(WAIT_S)
        raise RuntimeError("no money")

    send(client, "a")
    listener = run(lambda: client.listen(TOPIC, GROUP, fail))
    assert begun.wait(WAIT_S)
    assert not client.stop(timeout=0.01)
    go.set()
    assert client.stop(WAIT_S)
    listener.join(WAIT_S)
    assert served.call(lambda: served.broker.view.has_topic(f"%RETRY%{GROUP}"))


def test_a_handler_that_stops_its_own_client_does_not_wait_for_itself(client: Client, served: Served) -> None:
    answers: list[bool] = []
    send(client, "a")
    client.listen(TOPIC, GROUP, lambda _message: answers.append(client.stop()))
    assert (answers, left_over(served)) == ([False], [])
    send(client, "b")
    for _ in client.consume(TOPIC, GROUP):
        assert not client.stop()
    assert left_over(served) == []


def test_stopping_ends_a_listener_that_waits_for_its_broker(caplog: pytest.LogCaptureFixture) -> None:
    with postdate.connect("127.0.0.1:1") as client:
        listener = run(lambda: client.listen(TOPIC, GROUP, print))
        until(lambda: "group billing: joining failed and is tried again: no broker at 127.0.0.1:1" in caplog.text)
        assert client.stop(WAIT_S)
        listener.join(WAIT_S)
        assert not listener.is_alive()
        assert client.stop()  # there is nothing to stop


def test_a_client_that_is_closed_has_stopped(client: Client) -> None:
    client.close()
    assert client.stop()


# -- asyncio


def test_an_asyncio_client_stops_in_peace(served: Served) -> None:
    async def story() -> list[str]:
        events: list[str] = []
        begun, go = asyncio.Event(), asyncio.Event()

        async def handle(message: AsyncReceivedMessage) -> None:
            begun.set()
            await go.wait()
            events.append(message.body.decode())

        async with asyncio.timeout(WAIT_S), postdate.connect_async(served.address) as client:
            for body in ("a", "b"):
                await client.send(TOPIC, body, queue=0)
            listening = asyncio.create_task(client.listen(TOPIC, GROUP, handle))
            await begun.wait()
            assert not await client.stop(timeout=0.01)
            go.set()
            assert await client.stop()
            await listening
        return events

    assert asyncio.run(story()) == ["a"]
    assert left_over(served) == [b"b"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_listener_finishes_what_is_in_hand_unless_it_is_cancelled_again(served: Served, times: int) -> None:
    async def story() -> list[str]:
        events: list[str] = []
        begun, go = asyncio.Event(), asyncio.Event()

        async def handle(message: AsyncReceivedMessage) -> None:
            begun.set()
            await go.wait()
            events.append(message.body.decode())

        async with asyncio.timeout(WAIT_S), postdate.connect_async(served.address) as client:
            for body in ("a", "b"):
                await client.send(TOPIC, body, queue=0)
            listening = asyncio.create_task(client.listen(TOPIC, GROUP, handle))
            await begun.wait()
            listening.cancel()
            await asyncio.sleep(0)
            if times == 2:
                listening.cancel()
            else:
                go.set()
            with pytest.raises(asyncio.CancelledError):
                await listening
        return events

    finished = asyncio.run(story())
    assert finished == (["a"] if times == 1 else [])
    assert sorted(left_over(served)) == ([b"b"] if times == 1 else [b"a", b"b"])


def test_a_handler_that_awaits_something_cancelled_has_failed_and_does_not_end_its_worker(served: Served) -> None:
    async def story() -> None:
        seen: list[bytes] = []
        done = asyncio.Event()

        async def handle(message: AsyncReceivedMessage) -> None:
            seen.append(message.body)
            if message.body == b"b":
                done.set()
                return
            cancelled = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            await cancelled

        async with asyncio.timeout(WAIT_S), postdate.connect_async(served.address) as client:
            for body in ("a", "b"):
                await client.send(TOPIC, body, queue=0)
            listening = asyncio.create_task(client.listen(TOPIC, GROUP, handle))
            await done.wait()
            assert await client.stop()
            await listening

    asyncio.run(story())


# -- signals

BLOCKING = """
import logging, signal, sys
import postdate

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

def handle(message):
    print("begun", message.body.decode(), flush=True)
    sys.stdin.readline()
    print("done", message.body.decode(), flush=True)

with postdate.connect(sys.argv[1]) as client:
    client.listen("orders", "billing", handle, threads=int(sys.argv[2]))
defaults = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
assert defaults == (signal.SIG_DFL, signal.default_int_handler), defaults
print("returned", flush=True)
"""

ASYNCIO = """
import asyncio, logging, signal, sys
import postdate

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

async def handle(message):
    print("begun", message.body.decode(), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("done", message.body.decode(), flush=True)

async def main():
    async with postdate.connect_async(sys.argv[1]) as client:
        await client.listen("orders", "billing", handle, tasks=int(sys.argv[2]))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print("returned", flush=True)

asyncio.run(main())
"""

OWN_HANDLERS = """
import signal, sys
import postdate

def note(number, frame):
    print("own handler", number, flush=True)

signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)

def handle(message):
    print("begun", message.body.decode(), flush=True)
    sys.stdin.readline()
    if message.body == b"b":
        client.stop()

with postdate.connect(sys.argv[1]) as client:
    client.listen("orders", "billing", handle)
assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == note
print("returned", flush=True)
"""


class Child:
    """A process that listens."""

    def __init__(self, program: str, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout

    def read_until(self, text: str) -> None:
        for line in self._stdout:
            if text in line:
                return
        raise AssertionError(f"{text!r} did not come: {self.process.stderr and self.process.stderr.read()}")

    def go_on(self) -> None:
        self._stdin.write("\n")
        self._stdin.flush()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """The exit code, and what it printed last."""
        output, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, output


@contextmanager
def child(program: str, served: Served, *words: str) -> Iterator[Child]:
    started = Child(program, served.address, *words)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


@pytest.mark.parametrize(
    ("program", "number", "workers", "exit_code"),
    [
        (BLOCKING, signal.SIGTERM, "1", 0),
        (BLOCKING, signal.SIGINT, "2", 0),
        (ASYNCIO, signal.SIGTERM, "2", 0),
        # asyncio.run has a handler of its own for Ctrl-C: it cancels the task, and raises KeyboardInterrupt after it.
        (ASYNCIO, signal.SIGINT, "1", -signal.SIGINT),
    ],
)
def test_a_signal_ends_a_process_after_what_is_in_hand(
    client: Client, served: Served, program: str, number: int, workers: str, exit_code: int
) -> None:
    send(client, "a", "b")
    with child(program, served, workers) as process:
        process.read_until("begun")
        process.send_signal(number)
        process.read_until("takes no more messages")
        process.go_on()
        process.go_on()
        code, output = process.end()
    assert code == exit_code
    assert "done a" in output
    assert ("returned" in output) == (exit_code == 0)
    finished = [body for body in (b"a", b"b") if f"done {body.decode()}" in output]
    assert sorted(finished + left_over(served)) == [b"a", b"b"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_at_once(client: Client, served: Served, number: int) -> None:
    send(client, "a")
    with child(BLOCKING, served, "1") as process:
        process.read_until("begun")
        process.send_signal(number)
        process.read_until("takes no more messages")
        process.send_signal(number)
        code, output = process.end()
    assert (code, "done" in output) == (-number, False)
    if number == signal.SIGINT:  # Python still ran, and gave the message back
        assert left_over(served) == [b"a"]
    else:  # it comes again when its lease ends, half a minute later
        assert served.call(lambda: len(served.broker.fold.leases.by_key)) == 1


def test_handlers_of_the_callers_own_are_left_alone(client: Client, served: Served) -> None:
    send(client, "a", "b")
    with child(OWN_HANDLERS, served) as process:
        process.read_until("begun a")
        process.send_signal(signal.SIGTERM)
        process.read_until(f"own handler {int(signal.SIGTERM)}")
        process.send_signal(signal.SIGINT)
        process.read_until(f"own handler {int(signal.SIGINT)}")
        process.go_on()
        process.read_until("begun b")
        process.go_on()
        code, output = process.end()
    assert (code, "returned" in output) == (0, True)
    assert left_over(served) == []

"""Sends and cancels while the broker is killed and started again: nothing is lost, nothing is there twice."""

import asyncio
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import postdate
from benchmarks.process import Running
from postdate import Cancelled, Outgoing
from postdate.check import check_folder
from postdate.storage.disk import RealDisk
from tests.support.server import WAIT_S

TOPIC = "orders"
# Below those of outgoing connections, one of which may otherwise take the port of a broker that is away.
PORTS = range(20_000, 30_000)
KILLS = 3
SENDS_BETWEEN = 150  # before each kill, so that it comes under load


def free_port() -> int:
    while True:
        port = random.choice(PORTS)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Restarted:
    """A broker process that comes back on its ports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flags = ["--route-port", str(free_port()), "--broker-port", str(free_port())]
        self._running = Running(folder, self._flags)
        self.address = self._running.route_address

    def restart(self) -> None:
        """As by kill -9, and up again."""
        self._running.kill()
        self._running = Running(self._folder, self._flags)

    def stop(self) -> None:
        self._running.stop()
        report = check_folder(RealDisk(self._running.data))
        assert report.ok, report.findings


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Restarted]:
    started = Restarted(tmp_path)
    yield started
    started.stop()


class Load:
    """Calls that run in threads until they are told to end; the first failure ends all."""

    def __init__(self) -> None:
        self.bodies: list[str] = []  # of messages that the broker has taken, by its answers
        self.is_over = threading.Event()
        self._failures: list[BaseException] = []
        self._grew = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failures.append(error)
                self.is_over.set()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def add(self, *bodies: str) -> None:
        with self._grew:
            self.bodies += bodies
            self._grew.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._grew:
            wanted = len(self.bodies) + count
            assert self._grew.wait_for(lambda: len(self.bodies) >= wanted or bool(self._failures), WAIT_S)
        assert not self._failures, self._failures

    def end(self) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert not self._failures, self._failures


def test_sends_survive_a_broker_that_is_killed_under_load(broker: Restarted) -> None:
    load = Load()
    cancelled: list[str] = []

    def send(name: str) -> None:
        number = 0
        while not load.is_over.is_set():
            client.send(TOPIC, f"{name} {number}")
            load.add(f"{name} {number}")
            number += 1

    def send_batches() -> None:
        number = 0
        while not load.is_over.is_set():
            bodies = [f"batch {number} {place}" for place in range(20)]
            receipts = client.send_batch(TOPIC, [Outgoing(body) for body in bodies])
            assert len({receipt.offset_id for receipt in receipts}) == 20
            load.add(*bodies)
            number += 1

    def send_and_cancel() -> None:
        number = 0
        while not load.is_over.is_set():
            receipt = client.send(TOPIC, f"cancelled {number}", delay="1h")
            assert client.cancel(receipt) is Cancelled.CANCELLED
            cancelled.append(receipt.id)
            number += 1

    async def send_many(end: threading.Event) -> None:
        async def send(client: postdate.AsyncClient, body: str) -> None:
            await client.send(TOPIC, body)
            load.add(body)

        async with postdate.connect_async(broker.address, timeout=WAIT_S) as client:
            number = 0
            while not end.is_set():
                await asyncio.gather(*[send(client, f"async {number} {place}") for place in range(20)])
                number += 1

    with postdate.connect(broker.address, timeout=WAIT_S) as client:
        for name in ("a", "b"):
            load.start(lambda name=name: send(name))  # type: ignore[misc]
        load.start(send_batches)
        load.start(send_and_cancel)
        load.start(lambda: asyncio.run(send_many(load.is_over)))
        for _ in range(KILLS):
            load.wait_for_more(SENDS_BETWEEN)
            broker.restart()
        load.wait_for_more(SENDS_BETWEEN)
        load.end()
        assert len(cancelled) > KILLS
        found = Counter(read_all(client, len(load.bodies)))
    assert found == Counter(load.bodies)


def read_all(client: postdate.Client, count: int) -> Iterator[str]:
    """Everything in the topic: as many messages as there should be, and what else comes in a moment after."""
    found: set[str] = set()
    for message in client.consume(TOPIC, "readers", idle="500ms"):
        yield message.body.decode()
        found.add(message.id)
    assert len(found) >= count, f"{len(found)} of {count} messages came"

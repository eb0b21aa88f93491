"""Postdate alone, with raw connections: what a send costs it, and what a thousand consumers cost that wait."""

import asyncio
import itertools
import resource
import time
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

from benchmarks import process
from benchmarks.grpc.caller import SENDS, Caller, receives
from benchmarks.grpc.measures import IN_FLIGHT
from benchmarks.grpc.topics import group_of
from benchmarks.rocketmq.systems import Postdate
from benchmarks.server import BODY
from postdate.wire import messaging
from postdate.wire.translation import of_ms

WARM_COUNT = 2_000
LATER_MS = 6 * 3_600_000  # long after everything has ended
LEASE_MS = 60_000
PERIODS = 2  # of waiting, over which the CPU is measured
FILES = 1_000  # besides the connections


class Sending(NamedTuple):
    """Messages in a second, and the server's CPU for each."""

    rate: float
    cpu_us: float


class Idling(NamedTuple):
    """Memory that the server grew by, and its share of a core."""

    grown_mb: float
    cpu_percent: float


# -- sends ------------------------------------------------------------------------------------------------------


def send(server: Postdate, topic: str, count: int) -> Sending:
    """Delayed sends over one connection. Raises Failed."""
    return asyncio.run(_send(server, topic, count))


async def _send(server: Postdate, topic: str, count: int) -> Sending:
    due_at_ms = time.time_ns() // 1_000_000 + LATER_MS
    contents = [_message(topic, number, due_at_ms + number).SerializeToString() for number in range(WARM_COUNT + count)]
    await _send_all(server, contents[:WARM_COUNT])
    before_s, start = process.cpu_s(server.pid), time.perf_counter()
    await _send_all(server, contents[WARM_COUNT:])
    return Sending(count / (time.perf_counter() - start), (process.cpu_s(server.pid) - before_s) / count * 1e6)


async def _send_all(server: Postdate, contents: Sequence[bytes]) -> None:
    answers = Answers()

    def go_on(caller: Caller) -> None:
        answers.add()
        caller.call()

    problem = asyncio.get_running_loop().create_future()
    caller = await _connect(server, Caller(SENDS, "raw-producer", contents, go_on, problem))
    try:
        caller.call(IN_FLIGHT)
        await _until(answers.more(len(contents)), problem)
    finally:
        caller.close()


def _message(topic: str, number: int, due_at_ms: int) -> Any:
    properties = {
        "message_id": f"01{number:032X}", "message_type": messaging.DELAY, "body_encoding": messaging.IDENTITY,
        "delivery_timestamp": of_ms(due_at_ms), "born_timestamp": of_ms(due_at_ms - LATER_MS),
    }  # fmt: skip
    message = {"topic": {"name": topic}, "system_properties": properties, "body": BODY}
    return messaging.requests_of(SENDS.method)[0](messages=[message])


# -- waiting ----------------------------------------------------------------------------------------------------


def idle(server: Postdate, topic: str, count: int, polling_s: float) -> Idling:
    """Connections that wait for messages, none of which comes. Raises Failed."""
    _allow_files(count + FILES)
    return asyncio.run(_idle(server, topic, count, polling_s))


async def _idle(server: Postdate, topic: str, count: int, polling_s: float) -> Idling:
    """They begin one after the other within the time that each waits, so that their ends are spread evenly."""
    kind, content = receives(polling_s), _receive(topic, polling_s).SerializeToString()
    problem = asyncio.get_running_loop().create_future()
    callers: list[Caller] = []
    answers = Answers()

    def go_on(caller: Caller) -> None:
        answers.add()
        caller.call()

    async def begin() -> None:
        caller = Caller(kind, f"raw-{len(callers)}", itertools.repeat(content), go_on, problem)
        callers.append(await _connect(server, caller))
        caller.call()

    try:
        await begin()
        await _until(answers.more(1), problem)  # a server that has answered one has made what it makes only once
        before_mb = process.memory_mb(server.pid)
        while len(callers) <= count:
            await begin()
            await _until(asyncio.sleep(polling_s / count), problem)
        await _until(answers.more(count), problem)
        before_s, start = process.cpu_s(server.pid), time.perf_counter()
        await _until(answers.more(PERIODS * count), problem)
        cpu_percent = (process.cpu_s(server.pid) - before_s) / (time.perf_counter() - start) * 100
        return Idling(process.memory_mb(server.pid) - before_mb, cpu_percent)
    finally:
        for caller in callers:
            caller.close()


def _receive(topic: str, polling_s: float) -> Any:
    """As a push consumer asks, but for the lease: its own would need nothing here, either."""
    request, _ = messaging.requests_of("ReceiveMessage")
    return request(
        group={"name": group_of(topic)}, message_queue={"topic": {"name": topic}, "id": -1},
        filter_expression={"type": messaging.FILTER_TAG, "expression": "*"}, batch_size=32,
        invisible_duration=of_ms(LEASE_MS), long_polling_timeout=of_ms(int(polling_s * 1_000)),
    )  # fmt: skip


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


# -- both -------------------------------------------------------------------------------------------------------


class Answers:
    """Counts answers, and wakes who waits for a number of them."""

    def __init__(self) -> None:
        self._count, self._wanted, self._reached = 0, 0, asyncio.Event()

    def add(self) -> None:
        self._count += 1
        if self._count == self._wanted:
            self._reached.set()

    def more(self, count: int) -> Awaitable[object]:
        """Waits for that many more than there are now."""
        self._wanted = self._count + count
        self._reached.clear()
        return self._reached.wait()


async def _connect(server: Postdate, caller: Caller) -> Caller:
    host, _, port = server.grpc_address.rpartition(":")
    await asyncio.get_running_loop().create_connection(lambda: caller, host, int(port))
    return caller


async def _until(work: Awaitable[Any], problem: "asyncio.Future[None]") -> None:
    """Waits for the work. Raises Failed as soon as a connection has a problem."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({task, problem}, return_when=asyncio.FIRST_COMPLETED)
    if problem.done():
        task.cancel()
        problem.result()

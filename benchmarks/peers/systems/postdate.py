"""Postdate with its Python client: `postdate up` without a pipeline, and the public calls of `postdate.connect`."""

import asyncio
import contextlib
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import uvloop

import postdate
from benchmarks.peers.system import CANCELLED, TOO_LATE, UNKNOWN, Received, System, body, index_of
from benchmarks.peers.systems.handle import other_key
from benchmarks.peers.systems.postdate_server import DURABLE, SETTINGS, TOPIC, VOLATILE, Server

GROUP = "peers"
PIECE = 1_000  # messages of a batch: what fits one request
SENDING_TASKS, CANCELLING_TASKS = 4, 256
TIMEOUT_S = 60.0  # a slow answer is to be measured
ANSWERS = {
    postdate.Cancelled.CANCELLED: CANCELLED,
    postdate.Cancelled.DELIVERED: TOO_LATE,
    postdate.Cancelled.UNKNOWN: UNKNOWN,
}


class Postdate(System):
    name = "Postdate, Python client"
    slug = "postdate"
    settings = (
        f"{SETTINGS}; sends in batches of {PIECE:,}, {SENDING_TASKS} at a time, cancels {CANCELLING_TASKS} at a time, "
        "one consumer; all by the asyncio client on uvloop, with its defaults"
    )
    durable = DURABLE
    volatile = VOLATILE

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._server = Server(folder, is_durable)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"Postdate": postdate.__version__, "Python": platform.python_version()}

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def stop(self) -> None:
        self._server.stop()

    def pids(self) -> list[int]:
        return self._server.pids()

    def visible(self) -> int:
        return self._server.visible()

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        handles: list[bytes | str] = [""] * len(dues_ms)

        async def send(client: postdate.AsyncClient, start: int) -> None:
            dues = dues_ms[start : start + PIECE]
            messages = [
                postdate.Outgoing(body(first_index + start + place), at=_instant(due)) for place, due in enumerate(dues)
            ]
            handles[start : start + PIECE] = map(str, await client.send_batch(TOPIC, messages))

        uvloop.run(self._shared_out(SENDING_TASKS, range(0, len(dues_ms), PIECE), send))
        return handles

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        answers = [""] * len(handles)

        async def cancel(client: postdate.AsyncClient, place: int) -> None:
            answers[place] = ANSWERS[await client.cancel(str(handles[place]))]

        uvloop.run(self._shared_out(CANCELLING_TASKS, range(len(handles)), cancel))
        return answers

    async def _shared_out(
        self, tasks: int, places: range, work: Callable[[postdate.AsyncClient, int], Awaitable[None]]
    ) -> None:
        """A fixed number of tasks, each taking every so-manieth place."""

        async def some(first: int) -> None:
            for place in places[first::tasks]:
                await work(client, place)

        async with postdate.connect_async(self._server.route_address, timeout=TIMEOUT_S) as client:
            await asyncio.gather(*map(some, range(tasks)))

    def receive(self, count: int, limit_s: float) -> Received:
        return uvloop.run(self._received(count, limit_s))

    async def _received(self, count: int, limit_s: float) -> Received:
        bodies: list[bytes] = []
        at_ns: list[int] = []
        async with postdate.connect_async(self._server.route_address) as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    async for message in client.consume(TOPIC, GROUP):
                        bodies.append(message.body)
                        at_ns.append(time.time_ns())
                        if len(bodies) == count:
                            await message.acknowledge()
                            break
        return Received(np.array([index_of(each) for each in bodies], np.int64), np.array(at_ns, np.float64) / 1e6)

    def stranger(self, handle: bytes | str) -> str:
        return other_key(str(handle))


def _instant(due_ms: int) -> datetime:
    return datetime.fromtimestamp(due_ms / 1_000, UTC)

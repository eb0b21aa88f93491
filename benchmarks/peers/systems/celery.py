"""Celery with Redis: tasks with an eta, which a worker holds until they are due.

What a killed worker held comes again only when the visibility timeout is over, so that a restart is not compared. The
task is the consumer: it writes what it got, and when, to a file that `receive` reads. This module is the worker,
too: `python -m benchmarks.peers.systems.celery PORT FOLDER`.
"""

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.system import Received, System, body, index_of
from benchmarks.peers.systems.inbox import POLL_S
from benchmarks.peers.systems.redis import Redis, serve_redis
from benchmarks.peers.systems.server import HOST, Server, library_version

ROOT = Path(__file__).parents[3]
TASK = "take"
RECORD = np.dtype([("index", np.int64), ("at_ns", np.int64)])
RECORDS, READY = "received", "ready"
VISIBILITY_S = 7_200
WORKER_FLAGS = (
    "--pool=threads", "--concurrency=1", "--loglevel=WARNING", "--without-gossip", "--without-mingle",
    "--without-heartbeat",
)  # fmt: skip


class Celery(System):
    name = "Celery, eta"
    slug = "celery"
    works = frozenset("ad")
    settings = (
        "Redis as its broker; one worker with one thread, the quickest of its pools for a task this small, without a "
        f"limit of prefetch; visibility timeout {VISIBILITY_S // 3_600} h: what waits longer is delivered again; one "
        "send after the other."
    )
    durable = "synced by Redis before the answer (appendfsync always)"
    volatile = "written by Redis, synced every second (appendfsync everysec)"

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._servers: list[Server] = []
        self._task: Any = None
        self._taken = 0  # records of the file that an earlier call has given

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"celery": library_version("celery"), "kombu": library_version("kombu"), **Redis.versions()}

    def start(self) -> None:
        self.stop()
        redis, port = serve_redis(self.folder / "redis", self.is_durable)
        self._servers.append(redis)
        ready = self.folder / READY
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", __spec__.name, str(port), str(self.folder)]
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        worker = Server(command, self.folder, {"PYTHONPATH": path})
        self._servers.append(worker)
        worker.await_answer(ready.read_bytes)
        self._task = task(port, self.folder)

    def kill(self) -> None:
        for server in self._servers:
            server.kill()

    def stop(self) -> None:
        if self._task is not None:
            self._task.app.close()
        for server in reversed(self._servers):
            server.end()
        self._servers, self._task = [], None

    def pids(self) -> list[int]:
        return [pid for server in self._servers for pid in server.pids]

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        with self._task.app.producer_pool.acquire(block=True) as producer:
            return [
                self._task.apply_async((body(index).decode(),), eta=eta(due_ms), producer=producer).id
                for index, due_ms in enumerate(dues_ms, first_index)
            ]

    def receive(self, count: int, limit_s: float) -> Received:
        until = time.monotonic() + limit_s
        while (found := self._records()).size < count and time.monotonic() < until:
            time.sleep(POLL_S)
        self._taken += found.size
        return Received(found["index"], found["at_ns"] / 1e6)

    def _records(self) -> np.ndarray:
        file = self.folder / RECORDS
        size = file.stat().st_size // RECORD.itemsize - self._taken if file.exists() else 0
        return np.fromfile(file, RECORD, size, offset=self._taken * RECORD.itemsize) if size else np.empty(0, RECORD)


def task(port: int, folder: Path) -> Any:
    """The same for who sends it and who runs it."""
    import celery

    app = celery.Celery("peers", broker=f"redis://{HOST}:{port}/0")
    app.conf.task_ignore_result = True
    app.conf.worker_prefetch_multiplier = 0
    app.conf.broker_transport_options = {"visibility_timeout": VISIBILITY_S}
    app.conf.broker_connection_retry_on_startup = True

    def take(data: str) -> None:
        os.write(_records_of(folder), np.array((index_of(data.encode()), time.time_ns()), RECORD).tobytes())

    return app.task(name=TASK)(take)


@cache
def _records_of(folder: Path) -> int:
    return os.open(folder / RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def eta(due_ms: int) -> datetime:
    return datetime.fromtimestamp(due_ms / 1e3, UTC)


def work(port: int, folder: Path) -> None:
    """Until it is ended."""
    from celery import signals

    def tell_ready(**_: object) -> None:
        (folder / READY).touch()

    signals.worker_ready.connect(tell_ready)
    task(port, folder).app.worker_main(["worker", *WORKER_FLAGS])


SYSTEM = Celery

if __name__ == "__main__":
    work(int(sys.argv[1]), Path(sys.argv[2]))

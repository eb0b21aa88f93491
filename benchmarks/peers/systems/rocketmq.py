"""RocketMQ, a name server and a broker, with its own Java client; its timer wheel by seconds and by its finest tick."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from benchmarks.peers.system import NotRun
from benchmarks.peers.systems import java
from benchmarks.peers.systems.java import JavaSystem
from benchmarks.rocketmq import libraries, systems

SETTINGS = (
    "its start script's collector with a heap of 4 GB, touched at start, recall and timer wheel on, no fast failure, "
    f"8 queues; {java.SETTINGS}"
)


class RocketMQ(JavaSystem):
    name = "RocketMQ, timer of 1 s"
    slug = "rocketmq"
    settings = f"timerPrecisionMs=1000, its default; {SETTINGS}"
    durable = "written and synced (SYNC_FLUSH)"
    volatile = "written, not synced: a power loss may take it, a killed process not (ASYNC_FLUSH)"
    precision_ms: ClassVar[int] = 1_000

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._stack = ExitStack()
        self._running: systems.RocketMQ | None = None

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"RocketMQ": libraries.version(), **java.versions()}

    def start_server(self) -> str:
        flush = "sync" if self.is_durable else "async"
        started = systems.rocketmq(
            self.folder, flush, self._client.class_paths.servers, {"timerPrecisionMs": self.precision_ms}
        )
        try:
            self._running = self._stack.enter_context(started)
        except systems.NotStarted as error:
            raise NotRun(str(error)) from error
        return self._running.route_address

    def kill_server(self) -> None:
        assert self._running is not None
        self._running.signal(signal.SIGKILL)
        self.stop_server()

    def stop_server(self) -> None:
        self._running = None
        self._stack.close()

    def pids(self) -> list[int]:
        return self._running.pids if self._running is not None else []


class RocketMQFine(RocketMQ):
    name = "RocketMQ, timer of 100 ms"
    slug = "rocketmq-100ms"
    settings = f"timerPrecisionMs=100, the finest it takes; {SETTINGS}"
    precision_ms = 100

"""A system of one server process, which it starts, and one client of it, which it closes."""

import signal
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from benchmarks.peers.system import System
from benchmarks.peers.systems.server import Server


class Closable(Protocol):
    def close(self) -> object: ...


Client = TypeVar("Client", bound=Closable)


class Served(System, Generic[Client]):
    """`start` makes both."""

    ended_by: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._server: Server | None = None
        self._client: Client | None = None

    def kill(self) -> None:
        assert self._server is not None, "not started"
        self._server.kill()

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.end(self.ended_by)
        self._server = self._client = None

    def pids(self) -> list[int]:
        return self._server.pids if self._server is not None else []

    @property
    def _connected(self) -> Client:
        assert self._client is not None, "not started"
        return self._client

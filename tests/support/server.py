"""A real server on loopback for tests, on an event loop of its own in a thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from postdate.broker.broker import Broker
from postdate.check import check_folder
from postdate.clock import Clock, ManualClock, SystemClock
from postdate.config import LIMITS, MIB, Limits, Settings
from postdate.process import new_event_loop
from postdate.server import Server
from postdate.server.connection import Connection
from postdate.server.dispatch import Dispatcher
from postdate.storage.disk import Disk, RealDisk
from tests.support.certificates import Pair

WAIT_S = 30.0
Result = TypeVar("Result")

# Small files, free ports, no waiting for slow clients at the end.
SERVED: dict[str, Any] = {
    "segment_bytes": MIB,
    "batch_bytes_max": MIB,
    "queue_file_rows": 4_096,
    "route_port": 0,
    "broker_port": 0,
    "vip_port": 0,
    "grpc_port": -1,
    "offsets_interval_ms": 50,
    "shutdown_ms": 500,
}


def configured(values: Mapping[str, Any]) -> tuple[Settings, Limits]:
    """Settings and limits, each from the values with its names."""
    limits = {name: value for name, value in values.items() if name in LIMITS}
    return Settings(**{name: value for name, value in values.items() if name not in LIMITS}), Limits(**limits)


class Served:
    """A running server. `call` runs something on its loop, `kill` ends it like a crash."""

    def __init__(
        self, disk: Disk, configuration: tuple[Settings, Limits], clock: Clock, token: str = "",
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.disk = disk
        self.clock = clock
        self._is_ended = False
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="serving", daemon=True)
        self._thread.start()
        settings, limits = configuration
        self.broker = Broker(disk, settings, limits=limits)
        self.broker.start_keeper()
        self.server = Server(self.broker, clock, token, folder)
        try:
            self._run(self.server.start())
        except BaseException:
            self.broker.abandon()
            self._end_loop()
            raise

    @property
    def address(self) -> str:
        """Of the route port, as clients are told it."""
        return self.server.route_address

    @property
    def port(self) -> int:
        return int(self.server.broker_address.rpartition(":")[2])

    @property
    def dispatcher(self) -> Dispatcher:
        dispatcher = self.server._dispatcher
        assert dispatcher is not None
        return dispatcher

    def connections(self) -> list[Connection]:
        """The connections of clients that speak the older protocol. Called on the server's loop."""
        return [each for each in self.dispatcher.connections if isinstance(each, Connection)]

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begins something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs a function on the server's loop and gives its result."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(WAIT_S)

    def pass_ms(self, span_ms: int) -> None:
        """Moves a manual clock and fires what has become due."""
        clock = self.clock
        assert isinstance(clock, ManualClock)

        def move() -> None:
            clock.pass_ms(span_ms)
            self.server.ring()

        self.call(move)

    def settle(self) -> None:
        """Makes everything written durable and visible, and fires and rescues until nothing more is due."""
        self.call(self.server.catch_up)

    def stop(self) -> None:
        """Ends it politely. Does nothing where it has ended already."""
        if self._is_ended:
            return
        self._is_ended = True
        try:
            self._run(self.server.stop())
        finally:
            self.broker.close()
            self._end_loop()

    def kill(self) -> None:
        """Ends it like a crash: connections are reset, nothing in flight is answered, nothing more is written."""
        self._is_ended = True
        self._run(self._cut())
        self._end_loop()
        self.dispatcher.pulse._flushes.put(False)
        self.broker.abandon()

    async def _cut(self) -> None:
        for listener in self.server._listeners:
            listener.close()
        for connection in list(self.dispatcher.connections):
            connection.abort()
        pulse = self.dispatcher.pulse
        pulse._is_stopped = True
        pulse._alarm.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


@contextmanager
def serving(
    folder: Path, clock: Clock | None = None, disk: Disk | None = None, *, token: str = "", has_access: bool = False,
    **settings: Any,
) -> Iterator[Served]:  # fmt: skip
    """A server on a data folder, checked when it has stopped or was killed. `settings` may be limits, too. With
    `has_access` it keeps users and an audit log in the folder, and its settings say where the table is.
    """
    own = folder if has_access else None
    served = Served(disk or RealDisk(folder), configured(SERVED | settings), clock or SystemClock(), token, own)
    try:
        yield served
    finally:
        served.stop()
    report = check_folder(RealDisk(folder))
    assert report.ok, report.findings


@contextmanager
def secured(folder: Path, pair: Pair, tls: str = "enforcing", **settings: Any) -> Iterator[Served]:
    """The same with TLS."""
    with serving(folder, tls=tls, tls_cert=pair.certificate, tls_key=pair.key, **settings) as served:
        yield served

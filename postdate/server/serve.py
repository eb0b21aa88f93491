"""The server: listening sockets around one broker, from start to stop."""

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from postdate.broker.broker import Broker
from postdate.clock import Clock, SystemClock
from postdate.config import Limits, Settings
from postdate.errors import UsageError
from postdate.extras import has_extra, install
from postdate.process import give_freed_memory_back, new_event_loop
from postdate.server.address import Address
from postdate.server.children import Parts
from postdate.server.connection import Connection
from postdate.server.connections import SWEEP_MS
from postdate.server.dispatch import Dispatcher
from postdate.server.sessions.meter import TICK_MS
from postdate.storage.disk import RealDisk
from postdate.wire.ids import address_text

logger = logging.getLogger("postdate.server")

_EXPIRE_EVERY_MS = 5_000  # how often silent clients and expired locks are removed
_FILES_BESIDE = 512  # open files beside the connections: segments, chunks, snapshots, ports
_DRAIN_MS_MIN = 500  # clients have at least this long to read their answers, however long the parts took to stop
_BACKLOG = 1_024  # connections that wait to be accepted
_SWITCH_S = 0.0005  # how long a thread that checks chunks or counts rows may delay the thread that fires


class Server:
    """Serves one broker, which it neither opens nor closes. `start` and `stop` are called on one event loop.

    The clock is the machine's, by which the alarm rings, or a ManualClock, whose owner calls `ring`.
    """

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self.broker, self._clock = broker, clock
        self._listeners: list[asyncio.Server] = []
        self._timers: list[asyncio.Task[None]] = []
        self._dispatcher: Dispatcher | None = None
        self.route_address = self.broker_address = ""
        self.vip_address: str | None = None

    async def start(self) -> None:
        """Starts to listen. Raises UsageError where a port is in use or the host is not ours."""
        settings = self.broker.settings
        address = Address(settings)
        await address.resolve()
        self._dispatcher = dispatcher = Dispatcher(self.broker, self._clock, address)
        dispatcher.pulse.start()
        try:
            self.broker_address = await self._listen("broker_port", settings.broker_port)
            address.broker_port = int(self.broker_address.rpartition(":")[2])
            if settings.vip_port >= 0:
                self.vip_address = await self._listen("vip_port", settings.vip_port)
            # Last: a client that finds the route finds the broker.
            self.route_address = await self._listen("route_port", settings.route_port)
        except BaseException:
            await self.stop()
            raise
        self._timers.append(asyncio.get_running_loop().create_task(self._sweep(dispatcher)))
        self._every(_EXPIRE_EVERY_MS, dispatcher.groups.expire)
        self._every(_EXPIRE_EVERY_MS, dispatcher.pops.tick)
        self._every(TICK_MS, dispatcher.status.tick)
        self._every(self.broker.limits.offsets_interval_ms, dispatcher.groups.write_offsets)

    async def _listen(self, name: str, port: int) -> str:
        assert self._dispatcher is not None
        settings = self.broker.settings
        make = partial(Connection, self._dispatcher)
        try:
            listener = await asyncio.get_running_loop().create_server(make, settings.host, port, backlog=_BACKLOG)
        except OSError as error:
            problem = f"cannot listen on port {port} of {settings.host} ({name}): {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                flag = f"--{name.replace('_', '-')}"
                problem = (
                    f"port {port} of {settings.host} is in use by another program: choose another with {flag} ({name})"
                )
            raise UsageError(problem) from error
        self._listeners.append(listener)
        host, bound = listener.sockets[0].getsockname()[:2]
        return address_text(host, bound)

    async def _sweep(self, dispatcher: Dispatcher) -> None:
        while True:
            await asyncio.sleep(SWEEP_MS / 1_000)
            for _ in dispatcher.connections.sweep():
                await asyncio.sleep(0)

    def _every(self, interval_ms: int, work: Callable[[], None]) -> None:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_ms / 1_000)
                try:
                    work()
                except Exception:  # our mistake; log it and go on with the next round
                    logger.exception("%s failed", work.__qualname__)

        self._timers.append(asyncio.get_running_loop().create_task(repeat()))

    @property
    def dispatcher(self) -> Dispatcher:
        """What answers the requests, from `start` on."""
        assert self._dispatcher is not None, "the server has not started"
        return self._dispatcher

    def show_parts(self, parts: Mapping[str, str]) -> None:
        """Shows operators the state of the parts: by name a sentence, read whenever an operator asks."""
        self.dispatcher.status.parts = parts

    def ring(self) -> None:
        """Fires what is due, for a clock that is moved by hand."""
        self.dispatcher.pulse.ring()

    def catch_up(self) -> None:
        """Fires what is due, for a clock that is moved by hand. When it returns, consumers see all of it."""
        self.dispatcher.pulse.catch_up()

    async def stop(self, spent_ms: int = 0) -> None:
        """Stops listening, answers all writes, and ends the connections. The time that stopping has taken before,
        `spent_ms`, counts towards the time that clients have to read their answers.
        """
        for listener in self._listeners:
            listener.close()
        for timer in self._timers:
            timer.cancel()
        if self._dispatcher is None:
            return
        dispatcher = self._dispatcher
        for connection in dispatcher.connections:
            connection.stop_reading()
        dispatcher.pulls.release_all()
        dispatcher.pops.release_all()
        dispatcher.groups.write_offsets()
        await dispatcher.pulse.stop()
        dispatcher.sessions.questions.release_all()
        for connection in list(dispatcher.connections):
            connection.close()  # its pending answers are still sent
        limit_ms = self.broker.settings.shutdown_ms
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(limit_ms - spent_ms, min(limit_ms, _DRAIN_MS_MIN)) / 1_000):
                while dispatcher.connections:
                    await asyncio.sleep(0.005)
        for connection in list(dispatcher.connections):
            connection.abort()


def run(
    settings: Settings, ready: Callable[[Server], None], parts: Parts | None = None, *, limits: Limits | None = None
) -> None:
    """Opens the data folder and serves it until SIGINT or SIGTERM, with the parts beside it. Calls `ready` when it
    listens.

    Raises what opening the folder raises, and UsageError where it cannot listen.
    """
    if sys.platform != "linux":
        raise UsageError(f"a broker needs Linux, and this is {sys.platform}; the client and its commands work here too")
    Path(settings.data).mkdir(parents=True, exist_ok=True)
    broker = Broker(RealDisk(Path(settings.data)), settings, limits=limits)
    try:
        _refuse_stranded_rows(broker)
        broker.start_keeper()
        allow_files(settings.connections_max)
        # The collector runs rarely, and never over the objects that exist by now, which stay. Requests make no cycles,
        # and the default thresholds cost a tenth of a send.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 50, 100)
        sys.setswitchinterval(_SWITCH_S)
        give_freed_memory_back()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(broker, SystemClock(), ready, parts))
    finally:
        broker.close()


def _refuse_stranded_rows(broker: Broker) -> None:
    """Raises UsageError where messages wait in the table and the extra that would bring them back is not installed.
    An operator who starts the broker without bulk, or without a pipeline of its own, has decided that.
    """
    settings, count = broker.settings, broker.view.far.in_table
    if not count or settings.bulk_port < 0:
        return
    waiting = f"{count:,} messages wait in the table of {settings.data}: to deliver them, a broker"
    if not has_extra("table"):
        otherwise = "or give --bulk-port -1 to leave them there"
        raise UsageError(f"{waiting} needs postdate[table] ({install('table')}), {otherwise}")
    if settings.pipeline == "embedded" and not has_extra("spark"):
        otherwise = "or give --pipeline none and run postdate pipeline elsewhere"
        raise UsageError(f"{waiting} needs postdate[spark] ({install('spark')}), {otherwise}")


def allow_files(connections_max: int) -> None:
    """Raises the limit of open files as far as needed and allowed; logs a warning where that is not enough."""
    import resource  # here, as Windows has none and this module is imported there for postdate.testing

    wanted = connections_max + _FILES_BESIDE
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < min(wanted, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), limits[1]))
    if hard < wanted:
        logger.warning(
            "connections_max is %d, but this process may open %d files, which is enough for about %d connections: "
            "raise the system's limit (ulimit -Hn), or lower connections_max",
            connections_max, hard, max(hard - _FILES_BESIDE, 0),
        )  # fmt: skip


async def serve(broker: Broker, clock: Clock, ready: Callable[[Server], None], parts: Parts | None = None) -> None:
    """Serves until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    server = Server(broker, clock)
    await server.start()
    try:
        if parts is not None:
            server.show_parts(parts)
            await parts.start(server.broker_address)
        ready(server)
        await stopping.wait()
    finally:
        with contextlib.suppress(NotImplementedError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        began_ns = clock.elapsed_ns()
        if parts is not None:
            await parts.stop()
        await server.stop((clock.elapsed_ns() - began_ns) // 1_000_000)

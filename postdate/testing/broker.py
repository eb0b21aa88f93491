"""A broker inside the process of a test: a real server on loopback, with a disk in memory and a clock moved by hand."""

from datetime import datetime
from types import TracebackType
from typing import Any

from postdate.broker import Broker
from postdate.client.loop import LoopThread
from postdate.clock import ManualClock, SystemClock
from postdate.config import MIB, Limits, Settings
from postdate.errors import UsageError
from postdate.server import Server
from postdate.spans import Delay, delay_ms, instant
from postdate.testing.disk import VirtualDisk

# Free ports, small files, and a quick end even if a client is slow to read.
_SETTINGS: dict[str, Any] = {
    "route_port": 0,
    "broker_port": 0,
    "vip_port": -1,
    "segment_bytes": MIB,
    "batch_bytes_max": MIB,
    "shutdown_ms": 500,
}
_LIMITS = Limits(queue_file_rows=4_096)


class InProcessBroker:
    """A running broker for tests of your own code. Close it, or use `with`.

        with InProcessBroker() as broker, postdate.connect(broker.address) as client:
            client.send("reminders", "renew the passport", delay="1d")
            broker.advance("1d")

    Every client reaches it, those of other processes and languages too. It has a thread of its own and writes no file.
    Its calendar begins at the machine's time, unless `clock` is given, and stands still until `advance` moves it. Only
    the calendar moves: connections do not time out by it, and timeouts of clients pass in real time.

    `settings` are the broker's, by name (docs/settings.md). Give the `disk` of a broker that was closed to open another
    one on the same messages. It starts neither bulk nor a pipeline; far messages wait in its log and come on time.
    """

    def __init__(self, *, clock: ManualClock | None = None, disk: VirtualDisk | None = None, **settings: Any) -> None:
        """Raises UsageError for settings that are refused, and where it cannot listen."""
        self.clock = clock or ManualClock(SystemClock().now_ms())
        self.disk = disk or VirtualDisk()
        self._broker = Broker(self.disk, Settings(**(_SETTINGS | settings)), limits=_LIMITS)
        self._server = Server(self._broker, self.clock)
        self._loop = LoopThread()
        self._is_closed = False
        try:
            self._loop.run(self._server.start())
        except BaseException:
            self._is_closed = True
            self._end()
            raise

    def __enter__(self) -> "InProcessBroker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address for `postdate.connect` and for RocketMQ clients, as "127.0.0.1:port"."""
        return self._server.route_address

    @property
    def now(self) -> datetime:
        """The broker's time, in UTC."""
        return instant(self.clock.now_ms())

    def advance(self, span: Delay) -> None:
        """Moves the calendar forward by a span as `delay` of `send`: "1d", "1h30m", a number of seconds, a timedelta.

        When it returns, consumers see every message that has become due. Raises UsageError if the broker is closed.
        """
        if self._is_closed:
            raise UsageError("the broker is closed")
        span_ms = delay_ms(span)

        async def advance() -> None:
            self.clock.step_ms(span_ms)
            self._server.catch_up()

        self._loop.run(advance())

    def close(self) -> None:
        """Stops the server and closes its folder; what waits stays on `disk`. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._loop.run(self._server.stop())
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.stop()
        self._broker.close()

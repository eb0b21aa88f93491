"""A broker inside the process of a test: a real server on loopback, with a disk in memory and a clock moved by hand."""

import asyncio
from datetime import datetime
from itertools import chain
from types import TracebackType
from typing import Any

from postdate.broker import Broker
from postdate.client.errors import TimedOut
from postdate.client.loop import LoopThread
from postdate.clock import ManualClock, SystemClock
from postdate.config import MIB, Limits, Settings
from postdate.errors import UsageError
from postdate.message import tag_hash
from postdate.server import Server
from postdate.spans import Delay, delay_ms, instant
from postdate.state.leases import OVER
from postdate.testing.disk import VirtualDisk
from postdate.testing.leases import INVISIBLE_MS_MAX, KeptLeases

# Free ports, small files, and a quick end even if a client is slow to read.
_SETTINGS: dict[str, Any] = {
    "route_port": 0,
    "broker_port": 0,
    "vip_port": -1,
    "grpc_port": -1,
    "segment_bytes": MIB,
    "batch_bytes_max": MIB,
    "shutdown_ms": 500,
    "invisible_ms_max": INVISIBLE_MS_MAX,
}
_LIMITS = Limits(queue_file_rows=4_096)
_LOOK_AGAIN_SECONDS = 0.002
_TURNS = 5  # of the event loop: enough to hear what clients have sent, or that they are gone


class InProcessBroker:
    """A running broker for tests of your own code. Close it, or use `with`.

        with InProcessBroker() as broker, postdate.connect(broker.address) as client:
            client.send("reminders", "renew the passport", delay="1d")
            broker.advance("1d")

    Every client reaches it, those of other processes and languages too. It has a thread of its own and writes no file.
    Its calendar begins at the machine's time, unless `clock` is given, and stands still until `advance` moves it. Only
    the calendar moves: connections do not time out by it, timeouts of clients pass in real time, and a message that a
    connected client has in hand stays in its hand. Delays, retries and dead letters go by the calendar.

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
        self._leases = KeptLeases(self._broker)
        self._server.dispatcher.amend = self._leases.amend

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
        self._check_open()
        span_ms = delay_ms(span)

        async def advance() -> None:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            self._leases.end_abandoned(set(self._server.dispatcher.connections), self.clock.now_ms())
            self._server.catch_up()
            self.clock.step_ms(span_ms)
            self._server.catch_up()

        self._loop.run(advance())

    def wait_until_handled(self, group: str, timeout: float = 10.0) -> None:
        """Waits until a group has a member and has dealt with everything that is due: acknowledged it, or sent it back
        for later. A loop over `consume` does so when it asks for the next message, and the broker hears of it within a
        second; from `listen` it hears at once.

        Raises TimedOut, with what is left, after `timeout` seconds of real time; UsageError if the broker is closed.
        """
        self._check_open()
        self._loop.run(self._wait_until_handled(group, timeout))

    async def _wait_until_handled(self, group: str, timeout: float) -> None:
        left = ""
        try:
            async with asyncio.timeout(timeout):
                while left := self._name_unhandled(group):
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        except TimeoutError:
            raise TimedOut(f"group {group!r} has not handled everything within {timeout:g} s: {left}") from None

    def _name_unhandled(self, group: str) -> str:
        """Says what a group has still to do; empty if nothing."""
        view, dispatcher = self._broker.view, self._server.dispatcher
        if view.position < self._broker.log.end:
            return "something is being written"  # by a pop perhaps, which gives a message when it is durable
        members = dispatcher.sessions.members.of(group)
        if not members:
            return "it has no member"
        in_hand = len(self._leases.in_hand(group))
        if in_hand:
            return f"its members have {in_hand} messages in hand"
        subscriptions = [each for member in members for each in member.consumer.subscriptions]
        for topic in {each.topic for each in subscriptions if view.has_topic(each.topic)}:
            tags = [each.tags for each in subscriptions if each.topic == topic]
            wanted = frozenset(tag_hash(tag) for tag in chain(*tags)) if all(tags) else None  # no tags mean all
            behind = self._count_behind(group, topic, wanted)
            if behind:
                return f"topic {topic} has {behind} messages for it"
        return ""

    def _count_behind(self, group: str, topic: str, wanted: frozenset[int] | None) -> int:
        """Counts the messages of a topic that a group wants, by their tags, and was not given yet, and those that have
        come back to it.
        """
        view, offsets = self._broker.view, self._server.dispatcher.sessions.offsets
        info, behind = view.topic(topic), 0
        for queue_id in range(info.read_queue_count):
            low, high = view.offsets(topic, queue_id)
            entries = view.entries(topic, queue_id, max(low, offsets.get(group, topic, queue_id) or low), high)
            behind += sum(wanted is None or tag in wanted for _, _, tag in entries)
        numbers = set(info.numbers)
        return behind + sum(
            name == group and number in numbers and lease.until_ms == OVER for (name, number, _), lease in view.leases()
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the broker is closed")

    def close(self) -> None:
        """Stops the server and closes its folder; what waits stays on `disk`. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._loop.run(self._stop())
        finally:
            self._end()

    async def _stop(self) -> None:
        await self._server.stop()
        self._leases.end_abandoned((), self.clock.now_ms())  # nobody is connected any more
        self._broker.flush()

    def _end(self) -> None:
        self._loop.stop()
        self._broker.close()

"""Who is connected, by socket: how many may be, who has been silent or deaf for too long, who holds too much memory.

Nobody has a timer of his own. A sweep once a second looks at everyone, some hundred at a time so that nothing that is
due waits for it; what happens on every read is a flag. A connection is ended by `abort`: `close` would wait for a peer
that does not read.
"""

import logging
from collections import Counter
from collections.abc import Iterator

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.server.connection import Connection
from postdate.wire.ids import host_text

logger = logging.getLogger("postdate.server")

SWEEP_MS = 1_000
_AT_ONCE = 128  # connections that a sweep looks at in one go: some 0.1 ms
_LOOK_SHARE = 8  # so much of the bound may come in unfinished frames before the sum is taken again


class Connections:
    """All connections of one server. Called on the loop's thread."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        settings, limits = broker.settings, broker.limits
        self._idle_ns, self._stalled_ns = settings.idle_ms_max * 1_000_000, limits.stalled_ms_max * 1_000_000
        self._all: set[Connection] = set()
        self._count_of: Counter[bytes] = Counter()  # by address
        self._unfinished_bytes = 0  # came in reads that ended no frame, since the last look
        self._said_count = 0  # lines since the last sweep

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._all)

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(self, connection: Connection) -> bool:
        """Whether there is room for one more."""
        settings, address = self._broker.settings, connection.host.address
        if len(self._all) >= settings.connections_max:
            self._turn_away(connection, "connections_max", len(self._all))
            return False
        if self._count_of[address] >= settings.connections_per_address_max:
            self._turn_away(connection, "connections_per_address_max", self._count_of[address])
            return False
        self._all.add(connection)
        self._count_of[address] += 1
        connection.heard_at_ns = self._clock.elapsed_ns()
        return True

    def _turn_away(self, connection: Connection, limit: str, count: int) -> None:
        self.complain("%s: %s is turned away, %d are connected", limit, host_text(connection.host), count)

    def remove(self, connection: Connection) -> bool:
        """Whether it was one of ours."""
        if connection not in self._all:
            return False
        self._all.remove(connection)
        address = connection.host.address
        self._count_of[address] -= 1
        if not self._count_of[address]:
            del self._count_of[address]
        return True

    # -- the sweep ----------------------------------------------------------------------------------------------

    def sweep(self) -> Iterator[None]:
        """Looks at all connections, and ends those that must end. Called every SWEEP_MS; others may have their turn
        wherever it yields.
        """
        connections, holding = list(self._all), []
        for start in range(0, len(connections), _AT_ONCE):
            now_ns = self._clock.elapsed_ns()
            for connection in connections[start : start + _AT_ONCE]:
                self._look_at(connection, now_ns)
                if size := connection.buffered_bytes:
                    holding.append((size, connection))
            yield
        self._relieve(holding)
        self._count_lines()

    def _look_at(self, connection: Connection, now_ns: int) -> None:
        if connection.is_paused:
            if connection.paused_at_ns is None:
                connection.paused_at_ns = now_ns
            elif now_ns - connection.paused_at_ns >= self._stalled_ns:
                self._end(connection, f"stalled_ms_max: it has not read its answers for {self._stalled_ns // 10**6} ms")
        elif connection.is_heard or connection.in_flight or connection.held_count:
            connection.is_heard = False
            connection.heard_at_ns = now_ns
        elif now_ns - connection.heard_at_ns >= self._idle_ns:
            logger.info(
                "idle_ms_max: %s has asked nothing for %d ms", host_text(connection.host), self._idle_ns // 10**6
            )
            connection.abort()

    def _end(self, connection: Connection, reason: str) -> None:
        self.complain("ending the connection of %s: %s", host_text(connection.host), reason)
        connection.abort()

    # -- memory -------------------------------------------------------------------------------------------------

    def note_unfinished(self, size: int) -> None:
        """A read ended no frame. Between two sweeps, unfinished frames are what can grow fastest."""
        self._unfinished_bytes += size
        if self._unfinished_bytes * _LOOK_SHARE >= self._broker.settings.buffered_bytes_max:
            self._relieve([(each.buffered_bytes, each) for each in self._all])

    def _relieve(self, holding: list[tuple[int, Connection]]) -> None:
        """Ends the connections that hold most, until all together hold what they may."""
        self._unfinished_bytes = 0
        excess = sum(size for size, _ in holding) - self._broker.settings.buffered_bytes_max
        for size, connection in sorted(holding, key=lambda entry: -entry[0]) if excess > 0 else ():
            self._end(connection, f"buffered_bytes_max: it holds {size} bytes, the most of all")
            excess -= size
            if excess <= 0:
                return

    # -- the log ------------------------------------------------------------------------------------------------

    def complain(self, text: str, *details: object) -> None:
        """A line in the log about a peer, if there were not too many: nobody may fill our disk with them."""
        self._said_count += 1
        if self._said_count <= self._broker.limits.complaints_max:
            logger.warning(text, *details)

    def _count_lines(self) -> None:
        unsaid = self._said_count - self._broker.limits.complaints_max
        if unsaid > 0:
            logger.warning("complaints_max: %d more lines like these within a second are left out", unsaid)
        self._said_count = 0

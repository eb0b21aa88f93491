"""All connections: how many there may be, which are silent or do not read for too long, which hold too much memory.

No connection has a timer. A sweep once a second examines all of them, some hundred at a time so that firing does not
wait for it; a read only sets a flag. The sweep ends a connection by `abort`: `close` would wait for a peer that does
not read.
"""

import logging
from collections import Counter
from collections.abc import Iterator

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.message import Host
from postdate.server.lines import Lines
from postdate.server.peer import Peer
from postdate.wire.ids import host_text

logger = logging.getLogger("postdate.server")

SWEEP_MS = 1_000
_AT_ONCE = 128  # connections that a sweep examines in one go: some 0.1 ms
_CHECK_SHARE = 8  # after this share of the bound has come in unfinished frames, all memory is summed up again


class Connections:
    """All connections of one server. Its methods are called on the loop's thread."""

    def __init__(self, broker: Broker, clock: Clock, lines: Lines) -> None:
        self._broker, self._clock, self._lines = broker, clock, lines
        self._idle_ns = broker.settings.idle_ms_max * 1_000_000
        self._stalled_ns = broker.limits.stalled_ms_max * 1_000_000
        self._all: set[Peer] = set()
        self._count_of: Counter[bytes] = Counter()  # by address; with those that have a place and no connection yet
        self._reserved_count = 0
        self._unfinished_bytes = 0  # of reads that completed no frame, since memory was last summed up

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._all)

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(self, connection: Peer) -> bool:
        """Adds a connection; returns False where there are too many."""
        if not (connection.has_place or self._has_room(connection.host)):
            return False
        self._all.add(connection)
        self._count_of[connection.host.address] += 1
        connection.heard_at_ns = self._clock.elapsed_ns()
        return True

    def reserve(self, host: Host) -> bool:
        """Keeps a place, until `release`, for a peer that is no connection yet; returns False where there is none."""
        if not self._has_room(host):
            return False
        self._reserved_count += 1
        self._count_of[host.address] += 1
        return True

    def release(self, host: Host) -> None:
        self._reserved_count -= 1
        self._uncount(host.address)

    def _has_room(self, host: Host) -> bool:
        settings, address = self._broker.settings, host.address
        counts = {
            "connections_max": len(self._all) + self._reserved_count,
            "connections_per_address_max": self._count_of[address],
        }
        for limit, count in counts.items():
            if count >= getattr(settings, limit):
                self.complain("%s: %s is turned away, %d are connected", limit, host_text(host), count)
                return False
        return True

    def remove(self, connection: Peer) -> bool:
        """Removes a connection; returns False for one that was never added."""
        if connection not in self._all:
            return False
        self._all.remove(connection)
        self._uncount(connection.host.address)
        return True

    def _uncount(self, address: bytes) -> None:
        self._count_of[address] -= 1
        if not self._count_of[address]:
            del self._count_of[address]

    # -- the sweep ----------------------------------------------------------------------------------------------

    def sweep(self) -> Iterator[None]:
        """Examines all connections and ends those that must end. Called every SWEEP_MS; the caller lets the event loop
        go round wherever it yields.
        """
        connections, holding = list(self._all), []
        for start in range(0, len(connections), _AT_ONCE):
            now_ns = self._clock.elapsed_ns()
            for connection in connections[start : start + _AT_ONCE]:
                self._examine(connection, now_ns)
                if size := connection.buffered_bytes:
                    holding.append((size, connection))
            yield
        self._free_memory(holding)
        self._lines.sweep()

    def _examine(self, connection: Peer, now_ns: int) -> None:
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

    def _end(self, connection: Peer, reason: str) -> None:
        self.complain("ending the connection of %s: %s", host_text(connection.host), reason)
        connection.abort()

    # -- memory -------------------------------------------------------------------------------------------------

    def note_unfinished(self, size: int) -> None:
        """Counts the bytes of a read that completed no frame: these can grow fastest between two sweeps."""
        self._unfinished_bytes += size
        if self._unfinished_bytes * _CHECK_SHARE >= self._broker.settings.buffered_bytes_max:
            self._free_memory([(each.buffered_bytes, each) for each in self._all])

    def _free_memory(self, holding: list[tuple[int, Peer]]) -> None:
        """Ends the connections that hold most memory, until the rest keeps to the limit."""
        self._unfinished_bytes = 0
        excess = sum(size for size, _ in holding) - self._broker.settings.buffered_bytes_max
        for size, connection in sorted(holding, key=lambda entry: -entry[0]) if excess > 0 else ():
            self._end(connection, f"buffered_bytes_max: it holds {size} bytes, the most of all")
            excess -= size
            if excess <= 0:
                return

    # -- the log ------------------------------------------------------------------------------------------------

    def complain(self, text: str, *details: object) -> None:
        """Logs a warning about a peer."""
        self._lines.write(logging.WARNING, text, *details)

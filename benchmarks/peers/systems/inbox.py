"""What a consumer has in hand so far, and whether it goes on."""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.peers.system import Received, index_of

POLL_S = 0.005


class Inbox:
    """Full when `count` messages are in it; closed then, or when the time is over."""

    def __init__(self, count: int, limit_s: float) -> None:
        self._count, self._until = count, time.monotonic() + limit_s
        self._indexes: list[int] = []
        self._at_ms: list[float] = []

    def take(self, bodies: Sequence[bytes]) -> None:
        """Bodies that came together, just now."""
        at_ms = now_ms()
        self._indexes.extend(map(index_of, bodies))
        self._at_ms.extend([at_ms] * len(bodies))

    @property
    def missing(self) -> int:
        return self._count - len(self._indexes)

    @property
    def left_s(self) -> float:
        return max(self._until - time.monotonic(), 0.0)

    @property
    def is_open(self) -> bool:
        return self.missing > 0 and self.left_s > 0

    @property
    def received(self) -> Received:
        return Received(np.array(self._indexes, np.int64), np.array(self._at_ms, np.float64))


def now_ms() -> float:
    return time.time_ns() / 1e6


def pause_s(next_due_ms: float | None) -> float:
    """For a consumer that must ask: until the next is due, but not longer than POLL_S, for the sake of those that
    somebody sends meanwhile."""
    left_s = POLL_S if next_due_ms is None else (next_due_ms - now_ms()) / 1e3
    return min(max(left_s, 0.0), POLL_S)

"""What can be said of messages that were received: how late, how early, in which order, how many are missing."""

from typing import NamedTuple

import numpy as np

from benchmarks.peers.system import Received


class Spread(NamedTuple):
    p50_ms: float
    p99_ms: float
    max_ms: float
    early: int
    inversions: int


def of_range(received: Received, first_index: int, count: int) -> Received:
    """What belongs to one work, each message once: the first time that it came."""
    wanted = (received.indexes >= first_index) & (received.indexes < first_index + count)
    indexes, at_ms = received.indexes[wanted], received.at_ms[wanted]
    firsts = np.sort(np.unique(indexes, return_index=True)[1])
    return Received(indexes[firsts], at_ms[firsts])


def joined(parts: list[Received]) -> Received:
    if not parts:
        return Received(np.empty(0, np.int64), np.empty(0, np.float64))
    return Received(np.concatenate([part.indexes for part in parts]), np.concatenate([part.at_ms for part in parts]))


def spread(received: Received, dues_ms: np.ndarray) -> Spread:
    """`dues_ms` by index, from 0 on; so are the indexes here."""
    dues = dues_ms[received.indexes]
    late_ms = received.at_ms - dues
    return Spread(
        float(np.percentile(late_ms, 50)),
        float(np.percentile(late_ms, 99)),
        float(late_ms.max()),
        int((late_ms < 0).sum()),
        inversions(dues),
    )


def inversions(dues_ms: np.ndarray) -> int:
    """How many came after one that was due later."""
    return int((dues_ms < np.maximum.accumulate(dues_ms)).sum()) if len(dues_ms) else 0

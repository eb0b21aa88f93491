"""How much of each work, and how long it may take. One plan for all systems."""

from typing import NamedTuple

WORKS = {
    "a": "spread over time: how late",
    "b": "due at one instant",
    "c": "timed sends",
    "d": "RAM and disk of what waits",
    "e": "restart after kill -9",
    "f": "cancels",
    "g": "CPU per message",
}
LOADED = frozenset("cdef")  # works that share one load of waiting messages
HOUR_MS = 3_600_000


class Plan(NamedTuple):
    warm_count: int = 10_000
    spread_count: int = 10_000
    spread_ms: int = 20_000
    burst_count: int = 100_000
    million: int = 1_000_000
    volatile_count: int = 100_000
    cancel_count: int = 10_000
    truth_count: int = 200  # of each kind: cancelled, delivered, never sent
    send_limit_s: float = 45.0  # what is not sent by then is not part of the load
    receive_limit_s: float = 45.0  # after the due time
    restart_limit_s: float = 60.0
    turn_limit_s: float = 600.0  # of one system in one round; then it is ended


FULL = Plan()
QUICK = Plan(
    warm_count=500, spread_count=500, spread_ms=1_000, burst_count=2_000, million=10_000, volatile_count=2_000,
    cancel_count=500, truth_count=20, send_limit_s=20.0, receive_limit_s=15.0, restart_limit_s=40.0, turn_limit_s=180.0,
)  # fmt: skip

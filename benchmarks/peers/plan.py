"""How much of each work, and how long it may take. One plan for all systems."""

from typing import NamedTuple

WORKS = {
    "a": "spread over time: how late",
    "b": "due at one instant",
    "c": "timed sends",
    "d": "RAM and disk of waiting messages",
    "e": "restart after kill -9",
    "f": "cancels",
    "g": "CPU per message",
}
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
    send_limit_s: float = 40.0  # what is not sent by then is not part of the load
    patient_limit_s: float = 150.0  # of the million due at one instant, in the first round
    receive_limit_s: float = 45.0  # after the due time
    cancel_limit_s: float = 12.0
    restart_limit_s: float = 60.0
    turn_limit_s: float = 600.0  # of one system in one round; then it is ended
    ahead_s: float = 3.0  # from the last send, as expected, to the first due time ...
    quiet_s: float = 1.5  # ... and at least: for a consumer to join
    warm_due_s: float = 1.0
    settle_s: float = 2.0  # before memory is looked at
    truth_due_s: float = 4.0  # for cancelling some messages before they are due
    is_synced: bool = True  # whether all is on disk before a work begins
    leak_wait_s: float = 3.0  # so long after its due time a cancelled message might still come


FULL = Plan()
QUICK = Plan(
    warm_count=500, spread_count=500, spread_ms=1_000, burst_count=2_000, million=10_000, volatile_count=2_000,
    cancel_count=500, truth_count=20, send_limit_s=20.0, receive_limit_s=15.0, cancel_limit_s=5.0, restart_limit_s=40.0,
    turn_limit_s=180.0, ahead_s=0.8, quiet_s=0.4, warm_due_s=0.2, settle_s=0.2, truth_due_s=2.0, leak_wait_s=0.3,
    is_synced=False,
)  # fmt: skip

"""The only module that reads a clock.

Calendar time says when a message is due; elapsed time says how long we waited. They are never mixed: calendar time
may step back, elapsed time never does.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """What a program needs to know about time. The core takes instants as arguments and never holds a clock."""

    def now_ms(self) -> int:
        """Calendar time, milliseconds since the epoch. May jump either way."""

    def elapsed_ns(self) -> int:
        """Elapsed time from an arbitrary start. Never goes back."""


# The system clock's, for those who ask at every message: a method of ours would double its price.
elapsed_ns = time.monotonic_ns


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def elapsed_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """A clock that stands still until it is moved; for tests, simulation and dry runs."""

    def __init__(self, now_ms: int = 0) -> None:
        self._now_ms = now_ms
        self._elapsed_ns = 0

    def now_ms(self) -> int:
        return self._now_ms

    def elapsed_ns(self) -> int:
        return self._elapsed_ns

    def pass_ms(self, span_ms: int) -> int:
        """Lets time pass on both clocks; returns the new calendar time."""
        assert span_ms >= 0, f"time passes forward only, got {span_ms} ms (use step_ms for a clock that jumps)"
        self._now_ms += span_ms
        self._elapsed_ns += span_ms * 1_000_000
        return self._now_ms

    def step_ms(self, span_ms: int) -> int:
        """Steps the calendar either way, as an administrator or NTP does; elapsed time stands still."""
        self._now_ms += span_ms
        return self._now_ms

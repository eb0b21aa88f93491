"""An alarm at an instant of the calendar: a timerfd that the event loop watches.

The loop's own timers count whole milliseconds of elapsed time. This one is exact to some microseconds and follows the
calendar: it rings at once where the clock is set forward past its instant, and later where the clock is set back.
"""

import ctypes
import os
from asyncio import AbstractEventLoop
from collections.abc import Callable

from postdate.arrival import NEVER

_CLOCK_REALTIME = 0
_TIMER_ABSTIME = 1


class _Times(ctypes.Structure):
    """struct itimerspec: repeat after, ring at."""

    _fields_ = (
        ("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long), ("value_ns", ctypes.c_long),
    )  # fmt: skip


class Alarm:
    """Calls back when the machine's clock reaches the instant that was set last."""

    def __init__(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._times = _Times()
        self._libc = ctypes.CDLL(None, use_errno=True)  # here, as only Linux has timerfd
        self._fd = self._libc.timerfd_create(_CLOCK_REALTIME, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self.at_ms = NEVER
        loop.add_reader(self._fd, self._take_ring)

    def set(self, at_ms: int) -> None:
        """Rings at `at_ms`: at once where it has passed, not at all for NEVER."""
        if at_ms == self.at_ms:
            return
        self.at_ms = at_ms
        # A value of zero switches the timer off; instants before 1970 have passed anyway.
        seconds, rest_ms = divmod(max(at_ms, 1), 1_000) if at_ms != NEVER else (0, 0)
        self._times.value_s, self._times.value_ns = seconds, rest_ms * 1_000_000
        if self._libc.timerfd_settime(self._fd, _TIMER_ABSTIME, ctypes.byref(self._times), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _take_ring(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set again before the loop came round
        self.at_ms = NEVER
        self._ring()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class SilentAlarm:
    """For a clock that tests move by hand: they call `ring` themselves."""

    at_ms = NEVER

    def set(self, at_ms: int) -> None:
        self.at_ms = at_ms

    def close(self) -> None:
        """Nothing is open."""

"""Fault points: named moments at which a crash is most likely to do harm.

Code calls `reach("log.flush")` between two steps whose order matters. Nothing happens there, unless somebody listens:

    tests and the simulation   postdate.testing.FaultPoints counts the points and kills at one of them
    the fault suite            verify.faults.inside ends the process with SIGKILL at a point chosen by another process
    one process of a test      POSTDATE_KILL_AT=name, or name:n for the n-th time, ends it in the same way

A process has one listener, which hears every thread. Spark's workers import this module: it needs the standard library
alone.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

KILL_AT = "POSTDATE_KILL_AT"

Listener = Callable[[str], None]

_listener: Listener | None = None


def reach(name: str) -> None:
    """Tells the listener, if there is one, that this point is reached. What the listener raises, the caller raises."""
    listener = _listener  # read once: another thread may replace it
    if listener is not None:
        listener(name)


def listen(listener: Listener | None) -> Listener | None:
    """Replaces the listener of this process, for good; returns the one before."""
    global _listener
    _listener, before = listener, _listener
    return before


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Replaces the listener until the block ends. None: nobody listens."""
    before = listen(listener)
    try:
        yield
    finally:
        listen(before)


def killer(wanted: str) -> Listener:
    """Returns a listener that ends the process at "name", or at "name:n" the n-th time."""
    point, _, times = wanted.partition(":")
    left = int(times or 1)

    def kill(name: str) -> None:
        nonlocal left
        if name == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return kill


if os.environ.get(KILL_AT):
    listen(killer(os.environ[KILL_AT]))

"""SIGTERM and SIGINT while something listens in the main thread: the first ends it in peace, the second at once.

Handlers of signals belong to the whole process, and so does this module's state. A handler that is not Python's own is
left alone: a server around us (uvicorn, gunicorn) or the caller decides then what a signal means.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_DEFAULTS: dict[signal.Signals, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}

# What a signal ends. Called in the middle of anything that the main thread does, so it must take no lock.
Stop = Callable[[], object]

_stops: dict[object, Stop] = {}
_taken: list[signal.Signals] = []  # the signals whose handler is ours at the moment
_was_asked = False  # whether a first signal has come


@contextmanager
def stop_on_signals(stop: Stop) -> Iterator[None]:
    """Has the first SIGTERM or SIGINT call `stop`. In a thread other than the main one it does nothing: Python does not
    allow it there. Any number may be open at once; when the last one ends, the default handlers are back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    key = object()
    if not _stops:
        _take_signals()
    _stops[key] = stop
    try:
        yield
    finally:
        del _stops[key]
        if not _stops:
            _restore_signals()


def _take_signals() -> None:
    global _was_asked
    _was_asked = False
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) == default:
            signal.signal(number, _on_signal)
            _taken.append(number)


def _restore_signals() -> None:
    for number in _taken:
        if signal.getsignal(number) == _on_signal:  # and nobody has set another one since
            signal.signal(number, _DEFAULTS[number])
    _taken.clear()


def _on_signal(number: int, _frame: FrameType | None) -> None:
    global _was_asked
    if _was_asked:
        _restore_signals()
        signal.raise_signal(number)  # SIGTERM ends the process, SIGINT is a KeyboardInterrupt
        return
    _was_asked = True
    for stop in list(_stops.values()):
        stop()

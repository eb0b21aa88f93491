"""Records which functions of the package run, and in which order: for the walks of docs/architecture.md.

Threads are followed from their start on, so a trace is made before the server that it follows.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import postdate

ROOT = Path(postdate.__file__).parent.parent
_PACKAGE = str(ROOT / "postdate") + "/"


Call = tuple[str, str]  # "postdate/broker/broker.py" and "Broker.send"


class Trace:
    """What was called while it was recording: the modules that took part, and every call of the watched functions."""

    def __init__(self, watched: Iterable[Call]) -> None:
        self._watched = set(watched)
        self.calls: list[Call] = []
        self.modules: set[str] = set()
        self.is_recording = False

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.is_recording and frame.f_code.co_filename.startswith(_PACKAGE):
            call = (frame.f_code.co_filename[len(str(ROOT)) + 1 :], frame.f_code.co_qualname)
            if call[1] != "<module>":  # a module that is loaded on the way takes no part yet
                self.modules.add(call[0])
            if call in self._watched:
                self.calls.append(call)

    @contextmanager
    def following(self) -> Iterator["Trace"]:
        """Follows this thread, and every thread that starts meanwhile."""
        threading.setprofile(self._follow)
        sys.setprofile(self._follow)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

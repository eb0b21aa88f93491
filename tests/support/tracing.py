"""Records which functions of the package run, in the order of their first call: for the walks of docs/architecture.md.

Threads are followed from their start on, so a trace is made before the server that it follows.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import postdate

ROOT = Path(postdate.__file__).parent.parent
_PACKAGE = str(ROOT / "postdate") + "/"


class Trace:
    """What was called while it was recording: `postdate/broker/broker.py` and `Broker.send`, each pair once."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        self.is_recording = False

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self.is_recording and frame.f_code.co_filename.startswith(_PACKAGE):
            code = frame.f_code
            self.calls.setdefault((code.co_filename[len(str(ROOT)) + 1 :], code.co_qualname))

    @contextmanager
    def following(self) -> Iterator["Trace"]:
        """Follows this thread, and every thread that starts meanwhile."""
        threading.setprofile(self._follow)
        sys.setprofile(self._follow)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    @property
    def modules(self) -> list[str]:
        """Files in the order in which they were entered."""
        return list(dict.fromkeys(path for path, _ in self.calls))

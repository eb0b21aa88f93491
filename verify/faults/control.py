"""How the suite commands the processes under the layer: through a page of memory that all of them share.

Spark's executors import this module, so it may need the standard library only.
"""

import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

BROKER, BULK, PIPELINE = "broker", "bulk", "pipeline"  # the processes; Spark's workers belong to the pipeline

_BYTES = 4_096
_OFFSET, _SPACE, _SYNCS, _TIMES = 0, 8, 16, 24  # numbers of 8 bytes
_NAME_BYTES = 128
_HIT, _HIT_PROCESS = 256, 384  # names
_ARMED = 512  # lines of process and name, to the end of the page
_NUMBER = struct.Struct("<q")
_NO_LIMIT = -1


class Control:
    """The shared page. Creates its file if it is missing."""

    def __init__(self, path: Path) -> None:
        is_new = not path.exists()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if is_new:
            os.ftruncate(self._descriptor, _BYTES)
        self._page = mmap.mmap(self._descriptor, _BYTES)
        self._lock = threading.Lock()
        if is_new:
            self.space_left = None

    # -- the clock --------------------------------------------------------------------------------------------------

    @property
    def offset_ms(self) -> int:
        return self._number(_OFFSET)

    @offset_ms.setter
    def offset_ms(self, value: int) -> None:
        self._set_number(_OFFSET, value)

    # -- fault points -----------------------------------------------------------------------------------------------

    def arm(self, points: Iterable[tuple[str, str]], times: int) -> None:
        """Kills the process that reaches one of these points as the n-th from now. Points are (name, process); an empty
        process means any.
        """
        lines = "\n" + "".join(f"{process} {name}\n" for name, process in points)
        with self._locked():
            self._set_number(_TIMES, 0)
            self._set_text(_HIT, "")
            self._set_text(_HIT_PROCESS, "")
            self._set_text(_ARMED, lines, _BYTES - _ARMED)
            self._set_number(_TIMES, times)

    def disarm(self) -> None:
        with self._locked():
            self._set_number(_TIMES, 0)

    def must_die(self, point: str, process: str) -> bool:
        """Whether the process that has reached a point has to die there; if so, notes it as the hit."""
        if not self._number(_TIMES) or not self._is_armed(point, process):
            return False
        with self._locked():
            left = self._number(_TIMES) - 1
            if left < 0:
                return False
            self._set_number(_TIMES, left)
            if left == 0:
                self._set_text(_HIT, point)
                self._set_text(_HIT_PROCESS, process)
            return left == 0

    def _is_armed(self, point: str, process: str) -> bool:
        return any(self._page.find(f"\n{each} {point}\n".encode(), _ARMED) >= 0 for each in (process, ""))

    @property
    def hit(self) -> tuple[str, str] | None:
        """The point that ended a process, and the process."""
        point = self._text(_HIT)
        return (point, self._text(_HIT_PROCESS)) if point else None

    # -- the disk ---------------------------------------------------------------------------------------------------

    @property
    def failing_syncs(self) -> int:
        return self._number(_SYNCS)

    @failing_syncs.setter
    def failing_syncs(self, count: int) -> None:
        self._set_number(_SYNCS, count)

    def take_failing_sync(self) -> bool:
        """Whether the next sync has to fail; counts it."""
        if not self._number(_SYNCS):
            return False
        with self._locked():
            count = self._number(_SYNCS)
            self._set_number(_SYNCS, max(count - 1, 0))
            return count > 0

    @property
    def space_left(self) -> int | None:
        """The bytes that may still be added; None if there is no limit."""
        left = self._number(_SPACE)
        return None if left == _NO_LIMIT else left

    @space_left.setter
    def space_left(self, value: int | None) -> None:
        self._set_number(_SPACE, _NO_LIMIT if value is None else value)

    def take_space(self, growth: int) -> bool:
        """Takes room for this many more bytes; False if there is not enough. A negative growth gives room back."""
        if growth == 0 or self._number(_SPACE) == _NO_LIMIT:
            return True
        with self._locked():
            left = self._number(_SPACE)
            if left == _NO_LIMIT:
                return True
            if growth > left:
                return False
            self._set_number(_SPACE, left - growth)
            return True

    # -- the page ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps out other threads and other processes."""
        with self._lock:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _number(self, position: int) -> int:
        return int(_NUMBER.unpack_from(self._page, position)[0])

    def _set_number(self, position: int, value: int) -> None:
        _NUMBER.pack_into(self._page, position, value)

    def _text(self, position: int) -> str:
        return self._page[position : position + _NAME_BYTES].rstrip(b"\0").decode()

    def _set_text(self, position: int, text: str, size: int = _NAME_BYTES) -> None:
        assert len(text) <= size, f"{text} is too long"
        self._page[position : position + size] = text.encode().ljust(size, b"\0")

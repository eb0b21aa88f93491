"""Manners: how processes that work in bulk behave beside a broker, which must fire on its millisecond.

    cores    they let others go first
    disk     a large file is synced while it is written
    memory   what is freed is kept for the next piece; the broker gives back what it took to open its folder

docs/architecture.md, "Beside the broker", tells what each is worth. Executors import this: the standard library is all
it may need.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

# -- cores ------------------------------------------------------------------------------------------------------

_SLICE_NS = 100_000_000  # the longest that Linux gives
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of the system call


class _Attributes(ctypes.Structure):
    """struct sched_attr of Linux, as it was at first."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def let_others_go_first(niceness: int) -> None:
    """For this process and all that it starts from now on.

    Niceness tells how a core is shared over time, not who waits when a message falls due: whoever runs may end his
    slice, some milliseconds, unless the one who wakes has the shorter slice (Linux 6.12 and newer). So we ask for long
    ones, and lose nothing by it.
    """
    nice = os.nice(niceness)
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None and platform.system() == "Linux":
        wanted = _Attributes(size=ctypes.sizeof(_Attributes), nice=nice, runtime=_SLICE_NS)
        ctypes.CDLL(None).syscall(call, 0, ctypes.byref(wanted), 0)  # where it is not known, niceness must do


# -- disk -------------------------------------------------------------------------------------------------------

PACE_BYTES = 2 << 20  # written before they are synced


class Pacer:
    """Has one file synced on another thread, every few bytes. Never two syncs at once: the writer waits.

    One large sync at the file's end would keep the disk busy for so long that the broker's small ones, for which sends
    and fires wait, would take some ten milliseconds; and the writer would wait, too, and leave its core idle.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None
        self._unsynced = 0

    def wrote(self, size: int) -> None:
        """So many bytes more are written. Raises what a sync before has raised."""
        self._unsynced += size
        if self._unsynced >= PACE_BYTES:
            self._unsynced = 0
            self._wait()
            self._under_way = self._thread.submit(self._sync)

    def close(self) -> None:
        """Returns when no sync is under way. Raises what the last has raised."""
        self._thread.shutdown()
        self._wait()

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()


# -- memory -----------------------------------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """For the rest of this process. Nothing happens where the C library is another one.

    By default glibc gives each large block back to the system at once, and every page of the next one must be made and
    zeroed again: a third of the time that a task takes.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, _KEPT_BYTES)
        set_option(_MMAP_THRESHOLD, _KEPT_BYTES)


def give_freed_memory_back() -> None:
    """Once, behind work that will not come again: opening a folder takes 8 MB that a broker does not need later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""What a process sets for itself, so that bulk work does not delay a broker that must fire on its millisecond.

    cores      bulk work yields to others
    disk       a large file is synced while it is written
    files      nobody but their owner can read them
    memory     bulk work keeps freed memory for its next piece; the broker returns what it took to open its folder
    events     the fastest event loop that is installed
    life       a process ends with the one that has started it; a thread that blocks keeps nobody from ending

docs/architecture.md, "Beside the broker", says what each is worth. Spark's executors import this module, so it needs
the standard library alone.
"""

import contextlib
import ctypes
import os
import platform
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import asyncio

Result = TypeVar("Result")

# -- cores ------------------------------------------------------------------------------------------------------

_SLICE_NS = 100_000_000  # the longest slice that Linux grants
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of the system call


class _Attributes(ctypes.Structure):
    """struct sched_attr of Linux, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def let_others_go_first(niceness: int) -> None:
    """Lowers the priority of this process and of all processes that it starts from now on.

    Niceness decides how processes share a core over time, not who waits when a message falls due: the running process
    may finish its slice of some milliseconds, unless the waking process asks for a shorter one (Linux 6.12 and newer).
    So we ask for long slices, which costs nothing.
    """
    nice = os.nice(niceness)
    call = _SCHED_SETATTR.get(platform.machine())
    if call is not None and platform.system() == "Linux":
        attributes = _Attributes(size=ctypes.sizeof(_Attributes), nice=nice, runtime=_SLICE_NS)
        # An older kernel refuses the call; niceness alone must do there.
        ctypes.CDLL(None).syscall(call, 0, ctypes.byref(attributes), 0)


# -- disk -------------------------------------------------------------------------------------------------------

PACE_BYTES = 2 << 20  # written between two syncs


class Pacer:
    """Syncs one file on another thread, every few bytes. The writer waits for the sync before, so only one runs.

    One large sync at the end of the file would occupy the disk for so long that the broker's small syncs, for which
    sends and fires wait, would take some ten milliseconds. The writer would wait, too, and leave its core idle.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[None] | None = None
        self._unsynced_bytes = 0

    def wrote(self, size: int) -> None:
        """Counts written bytes, and starts a sync after enough of them. Raises what the sync before raised."""
        self._unsynced_bytes += size
        if self._unsynced_bytes >= PACE_BYTES:
            self._unsynced_bytes = 0
            self._wait()
            self._running = self._thread.submit(self._sync)

    def close(self) -> None:
        """Waits for the sync that is running. Raises what it raised."""
        self._thread.shutdown()
        self._wait()

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()


# -- files ------------------------------------------------------------------------------------------------------

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
_OF_OTHERS = 0o077  # what group and others may do


def keep_files_private() -> None:
    """Makes new files and folders of this process, and of all that it starts from now on, its owner's alone."""
    os.umask(_OF_OTHERS)


def make_private_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder, and those above it that are missing, for the owner alone. One that is there stays as it is."""
    folder = os.path.abspath(path)
    if os.path.isdir(folder):
        return
    make_private_folder(os.path.dirname(folder))
    with contextlib.suppress(FileExistsError):  # another thread was quicker
        os.mkdir(folder, PRIVATE_FOLDER)


def take_from_others(folder: str | os.PathLike[str]) -> tuple[int, int]:
    """Takes the rights of group and others from a folder and all in it; returns from how many files and folders, and
    how many keep them, as they belong to another user. Symbolic links are not followed.
    """
    changed = kept = 0
    for path in _walk(os.path.realpath(folder)):
        try:
            mode = stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)
            if mode & _OF_OTHERS:
                os.chmod(path, mode & ~_OF_OTHERS)
                changed += 1
        except FileNotFoundError:
            continue  # a merge of the table has removed it meanwhile
        except PermissionError:
            kept += 1
    return changed, kept


def _walk(folder: str) -> Iterator[str]:
    yield folder
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif not entry.is_symlink():
                yield entry.path


# -- memory -----------------------------------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_UNUSED_BYTES_MAX = 1 << 30


def keep_freed_memory() -> None:
    """Makes malloc keep freed memory for the rest of this process. Does nothing where the C library is not glibc.

    By default glibc returns each large block to the system at once, which must then map and zero every page of the next
    block again: a third of a task's time.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_TRIM_THRESHOLD, _UNUSED_BYTES_MAX)
        set_option(_MMAP_THRESHOLD, _UNUSED_BYTES_MAX)


def give_freed_memory_back() -> None:
    """Returns freed memory to the system. Call it after work that happens once, such as opening a folder, which takes
    8 MB that a broker does not need later.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# -- events -----------------------------------------------------------------------------------------------------


def new_event_loop() -> "asyncio.AbstractEventLoop":
    """Returns an event loop of uvloop, or of asyncio where uvloop is not installed: there is none for Windows."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# -- life -------------------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> Callable[[], None]:
    """Returns what a new process calls first, so that the system kills it when the thread that has started it ends,
    however that comes. Does nothing where the system is not Linux.
    """
    control = getattr(ctypes.CDLL(None), "prctl", None)  # loaded before the fork, after which a lock may be taken

    def ask() -> None:
        if control is not None:
            control(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return ask


def run_on_thread(work: Callable[[], Result]) -> "Future[Result]":
    """Starts a call that may block for long. Its thread is a daemon, unlike those of a pool: the process may end
    before it.
    """
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()  # from now on it takes a result, even if nobody waits for it

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=work.__qualname__, daemon=True).start()
    return done

"""Runs inside a process under the layer: patches its files, its clock and its fault points.

The environment alone puts a process under the layer: the `sitecustomize` of verify.faults.layer calls `begin` before
anything of ours is imported. From then on

    files     writes, renames, removals and syncs under the watched folders are recorded in the journal first
    faults    syncs fail, the disk is full, the process ends at a fault point, as the control says
    clock     calendar time is the machine's plus an offset; elapsed time is unchanged

Only calls through Python's `os` and `open` are seen. Files that others write (Parquet, Delta's log, Spark's checkpoint)
are judged by their size and by later syncs (verify.faults.power).

Spark's workers run this too, so it may need the standard library only.
"""

import builtins
import errno
import fcntl
import io
import os
import signal
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from postdate import faultpoint
from postdate.clock import SystemClock
from verify.faults.control import BROKER, BULK, PIPELINE, Control
from verify.faults.journal import Failed, Journal, Listed, Made, Removed, Renamed, Synced, Void, thread

LAYER = "FAULTS_LAYER"  # the variable that names the layer's folder
JOURNAL, CONTROL, PINNED, WATCHED = "journal", "control", "pinned", "watched"  # what that folder holds
OTHER = "other"
_STEP_NOTICED_MS = 100  # a step of the clock is noticed within this span
_ROLES = {"up": BROKER, "bulk": BULK, "pipeline": PIPELINE}

_real: dict[str, Any] = {
    name: getattr(os, name)
    for name in (
        "open", "close", "pread", "pwrite", "fsync", "fdatasync", "truncate", "ftruncate", "rename", "replace",
        "remove", "unlink", "statvfs",
    )
}  # fmt: skip
_real_open = io.open


def begin() -> None:
    """Puts this process under the layer, if it is one of ours. `sitecustomize` calls it."""
    role = role_of(sys.orig_argv)
    if role is not None:
        install(Path(os.environ[LAYER]), role)


def role_of(command: Sequence[str]) -> str | None:
    """Which of our processes a command line starts; None if it is another program."""
    words = iter(command[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-c":
            return None
        elif word == "-m":
            return _role(next(words, ""), next(words, ""))
        elif not word.startswith("-"):
            return _role(os.path.basename(word), next(words, ""))
    return None


def _role(program: str, verb: str) -> str | None:
    if program.startswith(("pyspark.", "postdate.spark.")):
        return PIPELINE
    return _ROLES.get(verb, OTHER) if program in ("postdate", "verify.faults.postdate") else None


def install(folder: Path, role: str) -> None:
    """Puts this process, and those that it forks, under the layer in a folder."""
    control = Control(folder / CONTROL)
    Files(folder, control).patch()
    _patch_clock(control)
    faultpoint.listen(_kill_on_command(control, role))
    if role == BROKER:
        _patch_alarm(control)


def _patch_clock(control: Control) -> None:
    now_ms = SystemClock.now_ms
    # By setattr here and below: mypy refuses to assign to a method.
    setattr(SystemClock, "now_ms", lambda clock: now_ms(clock) + control.offset_ms)  # noqa: B010


def _patch_alarm(control: Control) -> None:
    """The broker's alarm is a timer of the kernel, whose clock does not step. Makes it ring by our clock, and often
    enough to notice a step.
    """
    from postdate.server.alarm import Alarm

    set_alarm = Alarm.set

    def set_(alarm: Alarm, at_ms: int) -> None:
        offset_ms = control.offset_ms
        set_alarm(alarm, min(at_ms, SystemClock().now_ms() + _STEP_NOTICED_MS) - offset_ms)

    setattr(Alarm, "set", set_)  # noqa: B010


def _kill_on_command(control: Control, role: str) -> faultpoint.Listener:
    def kill(point: str) -> None:
        if control.must_die(point, role):
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


class Files:
    """Patches the calls by which this process uses watched files."""

    def __init__(self, folder: Path, control: Control) -> None:
        self._control = control
        self._journal = Journal(folder / JOURNAL)
        self._pins = _real["open"](folder / PINNED, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._roots = tuple((folder / WATCHED).read_text(encoding="utf-8").splitlines())
        self._prefixes = tuple(f"{root}/" for root in self._roots)
        self._open: dict[int, str] = {}  # paths of watched files, by descriptors that os.open gave
        self._pinned: set[int] = set()  # inodes

    def patch(self) -> None:
        for name in _real:
            if name != "pread":
                setattr(os, name, getattr(self, f"_{name}" if name != "open" else "_os_open"))
        builtins.open = io.open = self._python_open

    # -- paths and descriptors --------------------------------------------------------------------------------------

    def watched_path(self, path: Any) -> str | None:
        """The absolute path of a watched folder or of something in one; None for anything else."""
        text = os.fspath(path) if not isinstance(path, int) else ""
        if not isinstance(text, str) or not text:
            return None
        if not text.startswith("/") or "/." in text or "//" in text or text.endswith("/"):
            text = os.path.abspath(text)
        return text if text.startswith(self._prefixes) or text in self._roots else None

    def _path_of(self, descriptor: int) -> str | None:
        """The watched path behind a descriptor, also one that Python's `open` made; None if it is not watched."""
        path = self._open.get(descriptor)
        if path is not None:
            return path
        try:
            return self.watched_path(os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)"))
        except OSError:
            return None  # not a file, or closed: the call itself will fail

    def _pin(self, inode: int, path: str) -> bool:
        """Links a file outside of the watched folders, so that a removal loses nothing and its inode is not used again.
        True if it was not linked before.
        """
        if inode in self._pinned:
            return False
        self._pinned.add(inode)
        try:
            os.link(path, str(inode), dst_dir_fd=self._pins)  # by a folder, or Python does not follow links of /proc
        except FileExistsError:  # by another process
            return False
        except FileNotFoundError:  # removed meanwhile
            return False
        return True

    # -- opening ----------------------------------------------------------------------------------------------------

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
        name = None if dir_fd is not None else self.watched_path(path)
        if name is None:
            self._open.pop(descriptor, None)
            return descriptor
        self._open[descriptor] = name
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._note_made(descriptor, name)
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        _real["close"](descriptor)

    def _note_made(self, descriptor: int, path: str) -> None:
        inode = os.fstat(descriptor).st_ino
        if self._pin(inode, f"/proc/self/fd/{descriptor}"):
            self._journal.add(Made, thread(), *os.path.split(path), inode)

    def _python_open(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        """Replaces `open`. Limits the growth of such files; what a power loss takes is judged by their syncs."""
        path = self.watched_path(file) if set(mode) & set("wax+") else None
        if path is None:
            return _real_open(file, mode, *arguments, **named)
        if named.get("buffering", arguments[0] if arguments else -1) == 0:
            opened: Any = _Counted(path, mode.replace("b", ""), self.take_space)
        else:
            opened = _real_open(file, mode, *arguments, **named)
        self._note_made(opened.fileno(), path)
        return opened

    # -- writing ----------------------------------------------------------------------------------------------------

    def take_space(self, growth: int) -> None:
        if not self._control.take_space(growth):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _pwrite(self, descriptor: int, data: Any, position: int) -> int:
        if descriptor in self._open:
            found = os.fstat(descriptor)
            new = data if isinstance(data, bytes) else memoryview(data).tobytes()
            self.take_space(max(position + len(new) - found.st_size, 0))
            old_size = max(min(len(new), found.st_size - position), 0)
            old = _real["pread"](descriptor, old_size, position) if old_size else b""
            self._journal.write(found.st_ino, position, found.st_size, old, new)
        written: int = _real["pwrite"](descriptor, data, position)
        return written

    def _truncate(self, path: Any, size: int) -> None:
        if isinstance(path, int):
            self._ftruncate(path, size)
        elif self.watched_path(path) is None:
            _real["truncate"](path, size)
        else:
            descriptor = self._os_open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._ftruncate(descriptor, size)
            finally:
                self._close(descriptor)

    def _ftruncate(self, descriptor: int, size: int) -> None:
        if descriptor in self._open:
            found = os.fstat(descriptor)
            self.take_space(size - found.st_size)
            tail = _real["pread"](descriptor, max(found.st_size - size, 0), size)
            self._journal.cut(found.st_ino, found.st_size, size, tail)
        _real["ftruncate"](descriptor, size)

    # -- syncing ----------------------------------------------------------------------------------------------------

    def _fsync(self, file: Any) -> None:
        self._sync(file, _real["fsync"])

    def _fdatasync(self, file: Any) -> None:
        self._sync(file, _real["fdatasync"])

    def _sync(self, file: Any, sync: Callable[[int], None]) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = self._path_of(descriptor)
        if path is None:
            sync(descriptor)
            return
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            # One process or thread at a time: the last listing in the journal must be the last that was made.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                began = self._journal.size()
                names = self._names(path)
                sync(descriptor)
                self._journal.add(Listed, path, began, names)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            return
        # In this order: what another thread writes during the sync may be on disk or not.
        began = self._journal.size()
        self._pin(found.st_ino, f"/proc/self/fd/{descriptor}")
        if self._control.take_failing_sync():
            self._journal.add(Failed, found.st_ino, began)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)
        self._journal.add(Synced, found.st_ino, began, found.st_size)

    def _names(self, folder: str) -> dict[str, int]:
        names = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                names[entry.name] = entry.inode()
                if entry.is_file(follow_symlinks=False):
                    self._pin(entry.inode(), entry.path)
        return names

    # -- names ------------------------------------------------------------------------------------------------------

    def _rename(self, source: Any, target: Any, **folders: int | None) -> None:
        self._note_and_rename("rename", source, target, folders)

    def _replace(self, source: Any, target: Any, **folders: int | None) -> None:
        self._note_and_rename("replace", source, target, folders)

    def _note_and_rename(self, call: str, source: Any, target: Any, folders: dict[str, int | None]) -> None:
        path = None if folders else self.watched_path(source)
        target_path = None if folders else self.watched_path(target)
        inode = self._file_at(path)
        if path is None or target_path is None or inode is None:
            _real[call](source, target, **folders)
            return
        self._file_at(target_path)
        (folder, name), (target_folder, target_name) = os.path.split(path), os.path.split(target_path)
        if folder == target_folder:
            self._journal.add(Renamed, thread(), folder, name, target_name, inode)
        else:
            self._journal.add(Made, thread(), target_folder, target_name, inode)
            self._journal.add(Removed, thread(), folder, name, inode)
        self._try(lambda: _real[call](source, target))

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        name = None if dir_fd is not None else self.watched_path(path)
        inode = self._file_at(name)
        if name is None or inode is None:
            _real["remove"](path, dir_fd=dir_fd)
            return
        size = os.stat(name).st_size
        self._journal.add(Removed, thread(), *os.path.split(name), inode)
        self._try(lambda: _real["remove"](path))
        self._control.take_space(-size)

    _unlink = _remove

    def _file_at(self, path: str | None) -> int | None:
        """The inode of a file, pinned; None for a folder or a missing file."""
        if path is None:
            return None
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        self._pin(found.st_ino, path)
        return found.st_ino

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError:
            self._journal.add(Void, thread())
            raise

    # -- room -------------------------------------------------------------------------------------------------------

    def _statvfs(self, path: Any) -> os.statvfs_result:
        found: os.statvfs_result = _real["statvfs"](path)
        left = self._control.space_left
        if left is None or self.watched_path(path) is None:
            return found
        fields = list(found)
        blocks = left // found.f_frsize
        fields[3], fields[4] = min(found.f_bfree, blocks), min(found.f_bavail, blocks)
        return os.statvfs_result(fields)


class _Counted(io.FileIO):
    """A file opened by Python whose growth takes space."""

    def __init__(self, path: str, mode: str, take_space: Callable[[int], None]) -> None:
        super().__init__(path, mode)
        self._take_space = take_space

    def write(self, data: Any) -> int:
        self._take_space(max(self.tell() + memoryview(data).nbytes - os.fstat(self.fileno()).st_size, 0))
        return super().write(data)

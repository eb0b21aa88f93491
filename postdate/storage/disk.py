"""The files of a data folder, as one small interface.

Everything that is stored goes through a Disk: the real one here, or the virtual one of postdate.testing that loses
unsynced writes, tears them and fails. Paths are relative to the data folder and use "/". A write is not on disk before
`sync` of that file returned; a new, renamed or removed name not before `sync_folder`.
"""

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from postdate.errors import FolderInUse
from postdate.process import PRIVATE_FILE, make_private_folder

Data = bytes | bytearray | memoryview


class View(Protocol):
    """A file's bytes, mapped for reading: slices are copies. Shows later writes to the file."""

    def __getitem__(self, key: slice) -> bytes: ...

    def __len__(self) -> int: ...


class File(Protocol):
    """An open file that is written at given positions, for the one file that is written all the time."""

    def write(self, position: int, *parts: Data) -> None:
        """Writes all parts, one after the other. Raises OSError; what was written then is unknown."""

    def sync(self) -> None:
        """Returns when all earlier writes are on disk. May run on another thread than write."""

    def close(self) -> None: ...


class Disk(Protocol):
    """A data folder. Every call may raise OSError."""

    def open(self, path: str) -> File: ...
    def map(self, path: str) -> View: ...
    def array(self, path: str) -> "np.ndarray":
        """The same map as an array of bytes: slices are no copies."""

    def read(self, path: str, position: int, size: int) -> bytes: ...
    def write(self, path: str, position: int, *parts: Data) -> None:
        """Writes into a file; makes it and its folder if they do not exist."""

    def truncate(self, path: str, size: int) -> None: ...
    def sync(self, path: str) -> None: ...
    def size(self, path: str) -> int:
        """The file's size; -1 where there is none."""

    def list(self, folder: str) -> "list[str]":
        """Names in a folder, sorted; empty where there is no such folder."""

    def rename(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def sync_folder(self, folder: str) -> None: ...
    def space(self) -> tuple[int, int]:
        """Bytes in all, and bytes that are free."""

    def lock(self) -> "LockedFolder":
        """Raises FolderInUse while another process (or another broker of this one) holds the folder."""


class LockedFolder(Protocol):
    """A folder that no other process can open until it is released."""

    def release(self) -> None: ...


class RealFile:
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)

    def write(self, position: int, *parts: Data) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)  # copying is quicker than gathering in the kernel
        written = os.pwrite(self._descriptor, data, position)
        # A short write is legal (a signal, or a disk that is just full); the next call tells which.
        while written < len(data):
            more = os.pwrite(self._descriptor, memoryview(data)[written:], position + written)
            if not more:
                raise OSError(errno.EIO, f"the disk took 0 of {len(data) - written} bytes")
            written += more

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class RealDisk:
    """A folder of the file system."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.root = Path(folder)
        self._prefix = f"{self.root}/"  # joining text is ten times quicker than joining paths

    def open(self, path: str) -> RealFile:
        return RealFile(self._prepare_path(path))

    def map(self, path: str) -> View:
        return self._map(path)

    def array(self, path: str) -> np.ndarray:
        return np.frombuffer(self._map(path), np.uint8)

    def _map(self, path: str) -> mmap.mmap:
        with open(self.root / path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, path: str, position: int, size: int) -> bytes:
        with self._descriptor(path, os.O_RDONLY) as descriptor:
            return os.pread(descriptor, size, position)

    def write(self, path: str, position: int, *parts: Data) -> None:
        file = RealFile(self._prepare_path(path))
        try:
            file.write(position, *parts)
        finally:
            file.close()

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self.root / path, size)

    def sync(self, path: str) -> None:
        # Any descriptor will do: the kernel syncs the file's pages, not the descriptor's.
        with self._descriptor(path, os.O_RDONLY) as descriptor:
            os.fdatasync(descriptor)

    def size(self, path: str) -> int:
        try:
            return os.stat(self.root / path).st_size
        except FileNotFoundError:
            return -1

    def list(self, folder: str) -> "list[str]":
        try:
            return sorted(os.listdir(self.root / folder))
        except FileNotFoundError:
            return []

    def rename(self, source: str, target: str) -> None:
        os.rename(self.root / source, self.root / target)

    def remove(self, path: str) -> None:
        os.remove(self.root / path)

    def sync_folder(self, folder: str) -> None:
        """Makes the names in a folder durable, and its own and its parents' names."""
        parts = folder.split("/") if folder else []
        for depth in range(len(parts), -1, -1):
            with self._descriptor("/".join(parts[:depth]), os.O_RDONLY | os.O_DIRECTORY) as descriptor:
                os.fsync(descriptor)

    def space(self) -> tuple[int, int]:
        found = os.statvfs(self.root)
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def lock(self) -> "FolderLock":
        return FolderLock(self._prepare_path("LOCK"), self.root)

    def _prepare_path(self, path: str) -> str:
        """Makes the folder of a file, where it does not exist; returns the path for the system."""
        target = self._prefix + path
        parent = os.path.dirname(target)
        if not os.path.exists(parent):
            make_private_folder(parent)
        return target

    @contextmanager
    def _descriptor(self, path: str, flags: int) -> Iterator[int]:
        descriptor = os.open(self._prefix + path, flags | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


class FolderLock:
    """An advisory lock that the kernel drops when its process ends, however it ends."""

    def __init__(self, path: str, folder: Path) -> None:
        import fcntl  # here, as Windows has none and this module is imported there for postdate.testing

        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise FolderInUse(
                f"{folder} is in use by process {holder or 'unknown'}: stop that broker, or use another folder"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)

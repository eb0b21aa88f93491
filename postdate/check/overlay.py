"""The second fold's disk: reads come from the folder, writes stay in memory, everything else is refused."""

import numpy as np

from postdate.storage.disk import Data, Disk, File, LockedFolder, View


class Overlay:
    """A disk for the second fold: what it writes is kept in memory, and only where it differs from what is there."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._own: dict[str, bytearray] = {}

    def map(self, path: str) -> View:
        return self._disk.map(path)

    def array(self, path: str) -> np.ndarray:
        return self._disk.array(path)

    def list(self, folder: str) -> list[str]:
        return self._disk.list(folder)

    def size(self, path: str) -> int:
        return len(self._own[path]) if path in self._own else self._disk.size(path)

    def read(self, path: str, position: int, size: int) -> bytes:
        if path in self._own:
            return bytes(self._own[path][position : position + size])
        return self._disk.read(path, position, size)

    def write(self, path: str, position: int, *parts: Data) -> None:
        data = b"".join(parts)
        if path not in self._own:
            there = max(self._disk.size(path), 0)
            if there >= position + len(data) and self._disk.read(path, position, len(data)) == data:
                return
            self._own[path] = bytearray(self._disk.read(path, 0, position) if there else b"")
        self._own[path][position : position + len(data)] = data

    def space(self) -> tuple[int, int]:
        return self._disk.space()

    def reach(self, point: str) -> None:
        """No fault point: nothing is written here that could be lost."""

    def open(self, path: str) -> File:
        raise _changes(path)

    def truncate(self, path: str, size: int) -> None:
        raise _changes(path, size)

    def sync(self, path: str) -> None:
        raise _changes(path)

    def rename(self, source: str, target: str) -> None:
        raise _changes(source, target)

    def remove(self, path: str) -> None:
        raise _changes(path)

    def sync_folder(self, folder: str) -> None:
        raise _changes(folder)

    def lock(self) -> LockedFolder:
        raise _changes("LOCK")


def _changes(*what: object) -> AssertionError:
    return AssertionError(f"applying a batch only writes rows, it does not touch {what}")

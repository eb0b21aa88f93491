"""A disk in memory that keeps the promises of a real one and no more.

A write is visible at once, but on disk only after a sync of its file; a name only after a sync of its folder.
`lose_power` keeps what was synced and lets dice decide about the rest, by the rules of postdate.testing.power.
`kill` ends the process alone, so that all writes stay. On demand a sync fails (and drops its writes, as Linux does), a
bit flips, or the disk is full. To end the process at a fault point, see FaultPoints.
"""

import errno
import random
from collections.abc import Callable, Sequence

import numpy as np

from postdate.errors import FolderInUse
from postdate.storage.disk import Data
from postdate.testing import power
from postdate.testing.power import Fate

SECTOR_BYTES = 64  # small, and counted from where a write begins, so that small writes tear too


class Content:
    """The bytes of a file: as programs see them, as they are on disk, and the writes between the two."""

    __slots__ = ("on_disk", "seen", "unsynced")

    def __init__(self) -> None:
        self.seen = bytearray()
        self.on_disk = bytearray()
        self.unsynced: list[tuple[int, bytes]] = []  # (position, data); at position -1, truncate to int(data)

    def write(self, position: int, data: bytes) -> None:
        self.unsynced.append((position, data))
        _put(self.seen, position, data)

    def truncate(self, size: int) -> None:
        self.unsynced.append((-1, str(size).encode()))
        del self.seen[size:]

    def sync(self) -> None:
        unsynced, self.unsynced = self.unsynced, []  # a server writes on another thread meanwhile
        for position, data in unsynced:
            self._keep(position, data)

    def _keep(self, position: int, data: bytes) -> None:
        if position < 0:
            del self.on_disk[int(data) :]
        else:
            _put(self.on_disk, position, data)

    def lose_power(self, dice: random.Random) -> None:
        for position, data in self.unsynced:
            fate = power.choose_fate(dice)
            if fate is Fate.KEPT or (fate is Fate.TORN and position < 0):
                self._keep(position, data)
            elif fate is Fate.TORN:
                for start, sector in power.surviving_sectors(dice, data, SECTOR_BYTES, SECTOR_BYTES):
                    _put(self.on_disk, position + start, sector)
        self.unsynced.clear()
        self.seen = bytearray(self.on_disk)


def _put(target: bytearray, position: int, data: bytes) -> None:
    if len(target) < position:
        target.extend(bytes(position - len(target)))
    target[position : position + len(data)] = data


class VirtualView:
    def __init__(self, content: Content) -> None:
        self._content = content

    def __getitem__(self, key: slice) -> bytes:
        return bytes(self._content.seen[key])

    def __len__(self) -> int:
        return len(self._content.seen)


class VirtualFile:
    def __init__(self, disk: "VirtualDisk", path: str) -> None:
        self._disk, self._path = disk, path
        self._content = disk.create(path)

    def write(self, position: int, *parts: Data) -> None:
        self._disk.write_content(self._content, position, parts)

    def sync(self) -> None:
        self._disk.sync_content(self._content)

    def close(self) -> None:
        """Does nothing: no descriptor is open."""


class VirtualLock:
    def __init__(self, release: Callable[[], None]) -> None:
        self.release = release


class VirtualDisk:
    """A data folder in memory, for `Broker` and `InProcessBroker`. Implements postdate.storage.disk.Disk."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self._seen: dict[str, Content] = {}
        self._on_disk: dict[str, Content] = {}
        self._changes: list[tuple[str, Callable[[dict[str, Content]], object]]] = []  # unsynced: (folder, change)
        self._locked = False
        self.capacity_bytes = capacity_bytes
        self.failing_syncs = 0  # how many of the next syncs fail

    # -- faults -------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Ends the process, which lets go of the lock. The machine runs on, and every write stays."""
        self._locked = False
        self.failing_syncs = 0

    def lose_power(self, dice: random.Random) -> None:
        """Ends the machine: the process is gone, and so is a part of what was not synced."""
        self.kill()
        for folder in sorted({place for place, _ in self._changes}):
            changes = [change for place, change in self._changes if place == folder]
            for change in changes[: power.surviving_names(dice, len(changes))]:
                change(self._on_disk)
        self._changes.clear()
        for content in self._on_disk.values():
            content.lose_power(dice)
        self._seen = dict(self._on_disk)

    def flip(self, path: str, bit: int) -> None:
        """Inverts one bit of a file, on the disk and in memory."""
        content = self._seen[path]
        for data in (content.seen, content.on_disk):
            if bit // 8 < len(data):
                data[bit // 8] ^= 1 << bit % 8

    # -- Disk ---------------------------------------------------------------------------------------------------

    def create(self, path: str) -> Content:
        """Returns the content of a file, which is made where there is none."""
        content = self._seen.get(path)
        if content is None:
            content = new = self._seen[path] = Content()
            self._changes.append((_folder(path), lambda names: names.__setitem__(path, new)))
        return content

    def write_content(self, content: Content, position: int, parts: tuple[Data, ...]) -> None:
        data = b"".join(parts)
        growth = position + len(data) - len(content.seen)
        if growth > 0 and self.used_bytes() + growth > self.capacity_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        content.write(position, data)

    def space(self) -> tuple[int, int]:
        return self.capacity_bytes, self.capacity_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        return sum(len(content.seen) for content in self._seen.values())

    def sync_content(self, content: Content) -> None:
        if self.failing_syncs:
            self.failing_syncs -= 1
            content.unsynced.clear()
            raise OSError(errno.EIO, "Input/output error")
        content.sync()

    def open(self, path: str) -> VirtualFile:
        return VirtualFile(self, path)

    def map(self, path: str) -> VirtualView:
        return VirtualView(self._existing(path))

    def array(self, path: str) -> np.ndarray:
        return np.frombuffer(bytes(self._existing(path).seen), np.uint8)

    def read(self, path: str, position: int, size: int) -> bytes:
        return bytes(self._existing(path).seen[position : position + size])

    def write(self, path: str, position: int, *parts: Data) -> None:
        self.write_content(self.create(path), position, parts)

    def truncate(self, path: str, size: int) -> None:
        self._existing(path).truncate(size)

    def sync(self, path: str) -> None:
        self.sync_content(self._existing(path))

    def size(self, path: str) -> int:
        return len(self._seen[path].seen) if path in self._seen else -1

    def list(self, folder: str) -> "list[str]":
        prefix = f"{folder}/" if folder else ""
        return sorted({path[len(prefix) :].split("/")[0] for path in self._seen if path.startswith(prefix)})

    def rename(self, source: str, target: str) -> None:
        self._existing(source)

        def change(names: dict[str, Content]) -> None:
            if source in names:
                names[target] = names.pop(source)

        self._change(_folder(target), change)

    def remove(self, path: str) -> None:
        self._existing(path)
        self._change(_folder(path), lambda names: names.pop(path, None))

    def _change(self, folder: str, change: Callable[[dict[str, Content]], object]) -> None:
        change(self._seen)
        self._changes.append((folder, change))

    def sync_folder(self, folder: str) -> None:
        for place, change in self._changes:
            if place == folder:
                change(self._on_disk)
        self._changes = [(place, change) for place, change in self._changes if place != folder]

    def lock(self) -> VirtualLock:
        if self._locked:
            raise FolderInUse("the virtual folder is in use by another broker")
        self._locked = True
        return VirtualLock(self._unlock)

    def _unlock(self) -> None:
        self._locked = False

    def _existing(self, path: str) -> Content:
        content = self._seen.get(path)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return content

    def paths(self) -> Sequence[str]:
        return sorted(self._seen)

    def copy(self) -> "VirtualDisk":
        """Returns a disk with room and the same files as programs see them now, all of them synced."""
        twin = VirtualDisk()
        for path, content in self._seen.items():
            twin.write(path, 0, bytes(content.seen))
            twin.sync(path)
        for path in twin.paths():
            twin.sync_folder(_folder(path))
        return twin


def _folder(path: str) -> str:
    return path.rpartition("/")[0]

"""Segments of the log and staged chunks, mapped for reading.

A map holds a file, gone or not, so only a few are kept, and one whose file is gone is dropped when the next one is
opened. Any number of threads may ask at once.
"""

import mmap
import os
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from postdate.bulk.texts import Bytes

MAPS_MAX = 32  # 2 GB of address space at the default size of a segment; pages are the kernel's to take back


class _Mapped(NamedTuple):
    inode: int  # a restart may put another file in the place of one that held nothing durable
    data: Bytes


class Maps:
    """The files of one data folder, by path in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, _Mapped] = {}  # the one used last comes last
        self._lock = threading.Lock()

    def get(self, path: str) -> Bytes | None:
        """A file's bytes; None where it is gone."""
        with self._lock:
            mapped = self._held.pop(path, None)
            if mapped is None or mapped.inode != _inode(self._folder / path):
                mapped = self._opened(path)
            if mapped is None:
                return None
            self._held[path] = mapped
            return mapped.data

    def _opened(self, path: str) -> _Mapped | None:
        self.drop_gone()
        while len(self._held) >= MAPS_MAX:
            del self._held[next(iter(self._held))]
        try:
            with open(self._folder / path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return _Mapped(os.fstat(file.fileno()).st_ino, Bytes(np.frombuffer(data, np.uint8)))
        except FileNotFoundError:
            return None

    def drop_gone(self) -> None:
        for path in [path for path, mapped in self._held.items() if mapped.inode != _inode(self._folder / path)]:
            del self._held[path]

    @property
    def count(self) -> int:
        return len(self._held)


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return -1

"""Segments of the log and staged chunks, mapped for reading, and which of them holds a record.

A map keeps its file on the disk even after the broker has removed it. So only a few stay open, and opening one drops
those whose file is gone. Any number of threads may use the maps at once.
"""

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from postdate.bulk.arrow import Bytes
from postdate.bulk.broker_link import Link, StagedChunk
from postdate.storage import chunk as chunks
from postdate.storage import segment
from postdate.storage.chunk import CHUNK_BIT

MAPS_MAX = 32  # 2 GB of address space at the default size of a segment; the kernel may take pages back at any time


class _Mapped(NamedTuple):
    inode: int  # a restarted broker may put a new file in the place of one that held nothing durable
    data: Bytes


class Maps:
    """The mapped files of one data folder, by path in it."""

    def __init__(self, folder: Path, maps_max: int = MAPS_MAX) -> None:
        self._folder = folder
        self._maps_max = maps_max
        self._open: dict[str, _Mapped] = {}  # the one used last comes last
        self._lock = threading.Lock()

    def get(self, path: str) -> Bytes | None:
        """Returns a file's bytes, or None where it is gone."""
        with self._lock:
            mapped = self._open.pop(path, None)
            if mapped is None or mapped.inode != _read_inode(self._folder / path):
                mapped = self._map(path)
            if mapped is None:
                return None
            self._open[path] = mapped
            return mapped.data

    def _map(self, path: str) -> _Mapped | None:
        for known in [each for each, mapped in self._open.items() if mapped.inode != _read_inode(self._folder / each)]:
            del self._open[known]  # its file is gone
        while len(self._open) >= self._maps_max:
            del self._open[next(iter(self._open))]
        try:
            with open(self._folder / path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return _Mapped(os.fstat(file.fileno()).st_ino, Bytes(np.frombuffer(data, np.uint8)))
        except FileNotFoundError:
            return None

    @property
    def count(self) -> int:
        return len(self._open)


def _read_inode(path: Path) -> int:
    """Returns -1 where there is no such file."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return -1


class RecordFile(NamedTuple):
    """A file that holds records, and the offset of its first byte."""

    path: str
    base: int


class RecordFiles:
    """Finds the files that hold records, by their offsets. Each stream has its own: it asks the broker for the list of
    chunks again when an offset lies in none that it knows.
    """

    def __init__(self, segment_bytes: int, link: Link) -> None:
        self._segment_bytes = segment_bytes
        self._link = link
        self._chunks: list[StagedChunk] = []

    def find(self, offset: np.ndarray) -> Iterator[tuple[RecordFile, np.ndarray]]:
        """Yields each file and which of the offsets lie in it, in ascending order. Skips offsets of chunks that are
        gone.
        """
        bases = offset // self._segment_bytes * self._segment_bytes
        in_chunks = np.flatnonzero(offset >= CHUNK_BIT)
        if len(in_chunks):
            found = self._find_chunks(offset[in_chunks])
            if (found < 0).any():
                self._chunks = self._link.chunks()
                found = self._find_chunks(offset[in_chunks])
            bases[in_chunks] = found
        for base in np.unique(bases[bases >= 0]).tolist():
            index = np.flatnonzero(bases == base)
            path = segment.path_of(base)
            if base >= CHUNK_BIT:
                staged = self._chunks[bisect_right(self._chunks, base, key=lambda each: each.base) - 1]
                path = chunks.path_of(staged.name)
            yield RecordFile(path, base), index[np.argsort(offset[index], kind="stable")]

    def _find_chunks(self, offset: np.ndarray) -> np.ndarray:
        """Returns where the known chunks begin that hold these offsets; -1 where there is none."""
        if not self._chunks:
            return np.full(len(offset), -1, np.int64)
        base, size = (np.array([getattr(each, name) for each in self._chunks]) for name in ("base", "size"))
        index = np.searchsorted(base, offset, "right") - 1
        is_inside = (index >= 0) & (offset < base[index] + size[index])
        return np.where(is_inside, base[index], -1)

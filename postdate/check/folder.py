"""The folder under check: what every part of the check works on, and what retention has let go of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from postdate.check import saved as saves
from postdate.check.report import Report
from postdate.check.saved import Saved
from postdate.errors import CorruptSnapshot
from postdate.state import index
from postdate.state.far import FAR
from postdate.storage import chunk as chunks
from postdate.storage import segment, snapshot
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.disk import Disk
from postdate.storage.queue import ENTRY, TIME
from postdate.storage.rows import Rows
from postdate.storage.segment import Segments

_DTYPES = {"far": FAR, index.FOLDER: index.INDEX}


@dataclass(frozen=True)
class Folder:
    disk: Disk
    fixed: dict[str, int]
    segments: Segments
    report: Report
    saved: list[Saved]  # the snapshots that can be read, newest first

    @property
    def newest(self) -> Saved | None:
        return self.saved[0] if self.saved else None

    # -- rows ---------------------------------------------------------------------------------------------------

    def rows(self, saved: Saved, name: str) -> Rows:
        """The rows of a folder that a snapshot speaks of, without those that retention has let go."""
        rows = self._rows(name, saved.lengths.get(name, 0))
        rows.first = saved.firsts.get(name, 0)
        if self.is_shortened:
            rows.find_first()  # else every file must be there
        return rows

    def _rows(self, name: str, length: int) -> Rows:
        return Rows(self.disk, name, dtype_of(name), self.file_rows(name), 1, length)

    def file_rows(self, name: str) -> int:
        """How many rows a file of this folder of rows holds."""
        rows = self.fixed["queue_file_rows"]
        return index.index_file_rows(rows) if name == index.FOLDER else rows

    def file_of(self, name: str, row: int) -> tuple[str, int]:
        """The file in which a row stands, and its byte there."""
        (path,) = self._rows(name, 0).paths(row, row + 1)
        return path, row % self.file_rows(name) * dtype_of(name).itemsize

    # -- what is gone -------------------------------------------------------------------------------------------

    @cached_property
    def is_shortened(self) -> bool:
        """Whether retention has been at work: a segment or a chunk is gone, or a snapshot knows of rows that are."""
        return self._misses_segments() or self._misses_chunks() or any(any(s.firsts.values()) for s in self.saved)

    def _misses_segments(self) -> bool:
        segments = self.segments
        return segments.bases != list(range(0, len(segments.bases) << segments.shift, segments.segment_bytes))

    def _misses_chunks(self) -> bool:
        if self.newest is None:
            return False
        base = CHUNK_BIT
        for own_base, name in self.newest.chunk_names().items():
            if own_base != base or not self.has_chunk(name):
                return True
            base += (self.disk.size(chunks.path_of(name)) + 7) & -8
        return base != int(self.newest.state["chunk_end"])

    def has_chunk(self, name: str) -> bool:
        return self.disk.size(chunks.path_of(name)) >= 0


def opened(disk: Disk, fixed: dict[str, int], report: Report) -> Folder:
    """The folder with its snapshots and segments; those that cannot be used are told and left out."""
    saved = list(_readable_snapshots(disk, report))
    report.count("snapshots read", len(saved))
    segments = Segments(disk, fixed["segment_bytes"])
    _drop_misshapen(disk, segments, report)
    return Folder(disk, fixed, segments, report, saved)


def _readable_snapshots(disk: Disk, report: Report) -> Iterator[Saved]:
    for position in snapshot.positions(disk):
        try:
            yield saves.read(disk, position)
        except CorruptSnapshot as error:
            report.find(str(error))


def _drop_misshapen(disk: Disk, segments: Segments, report: Report) -> None:
    """Tells which segments have not their size, and passes over those that hold nothing: they cannot be mapped."""
    expected = segments.segment_bytes
    for base in list(segments.bases):
        size = disk.size(segment.path_of(base))
        if size != expected:
            report.find(f"{segment.path_of(base)} has {size} bytes, a segment has {expected}")
        if base % expected:
            report.find(f"{segment.path_of(base)}: no segment begins at {base}")
        if size == 0 or base % expected:
            segments.bases.remove(base)


def dtype_of(name: str) -> np.dtype:
    """What the rows of a folder of rows are."""
    if name in _DTYPES:
        return _DTYPES[name]
    return ENTRY if name.endswith("entries") else TIME


def named(row: np.void) -> str:
    names = row.dtype.names or ()
    return ", ".join(f"{name} {value}" for name, value in zip(names, row.item(), strict=True) if name != "reserved")

"""The folder under check: its segments, its readable snapshots, and its rows against the checksums in them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from postdate.check.report import Report
from postdate.errors import CorruptQueue, CorruptSnapshot
from postdate.state import index, once
from postdate.state.saved import read_state, read_sums
from postdate.storage import chunk as chunks
from postdate.storage import segment, snapshot
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.disk import Disk
from postdate.storage.layout import ENTRY, FAR, INDEX, ONCE_ROW, TIME
from postdate.storage.rows import BLOCK_ROWS, Rows
from postdate.storage.segment import Segments


@dataclass(frozen=True)
class Saved:
    position: int
    sections: list[snapshot.Section]
    state: dict[str, Any]

    @property
    def path(self) -> str:
        return snapshot.path_of(self.position)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """How many rows each folder of rows must have."""
        lengths = {name: self.state[name]["length"] for name in ("far", "index", once.FOLDER) if name in self.state}
        for number, (length, times_length, _) in enumerate(self.state["queues"]):
            lengths[entries_folder(number)], lengths[times_folder(number)] = length, times_length
        return lengths

    @cached_property
    def firsts(self) -> dict[str, int]:
        """Which rows retention had let go, by folder: those before this one. Of times it is not written down."""
        firsts = {name: self.state[name]["first"] for name in ("far", "index")}
        if once.FOLDER in self.state:  # a snapshot of an earlier version has no ids
            firsts[once.FOLDER] = self.state[once.FOLDER]["gone"]
        for number, (_, _, first) in enumerate(self.state["queues"]):
            firsts[entries_folder(number)] = first
        return firsts

    def sums(self) -> dict[str, list[int]]:
        """The checksums of the blocks of rows, by folder."""
        return dict(read_sums(section) for section in self.sections if section.kind == snapshot.SUMS)

    def slots(self) -> list[bytes]:
        return [section.data for section in self.sections if section.kind == snapshot.SLOTS]

    def chunk_names(self) -> dict[int, str]:
        return dict(self.state["chunks"])


def entries_folder(number: int) -> str:
    return f"queues/{number}/entries"


def times_folder(number: int) -> str:
    return f"queues/{number}/times"


_DTYPES = {"far": FAR, index.FOLDER: INDEX, once.FOLDER: ONCE_ROW}


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
        """Returns the rows of a folder that a snapshot describes, without those that retention has removed."""
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
        segments = self.segments
        whole = list(range(0, len(segments.bases) << segments.shift, segments.segment_bytes))
        return segments.bases != whole or self._misses_chunks() or any(any(s.firsts.values()) for s in self.saved)

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
    """Opens the folder with its snapshots and segments; reports those that cannot be used, and leaves them out."""
    saved: list[Saved] = []
    for position in snapshot.positions(disk):
        try:
            sections = snapshot.read(disk, position)
            saved.append(Saved(position, sections, read_state(sections)))
        except CorruptSnapshot as error:
            report.find(str(error))
    report.count("snapshots read", len(saved))
    segments = Segments(disk, fixed["segment_bytes"])
    expected = segments.segment_bytes
    # Segments of a wrong size are reported, and empty ones left out: they cannot be mapped.
    for base in list(segments.bases):
        size = disk.size(segment.path_of(base))
        if size != expected:
            report.find(f"{segment.path_of(base)} has {size} bytes, a segment has {expected}")
        if base % expected:
            report.find(f"{segment.path_of(base)}: no segment begins at {base}")
        if size == 0 or base % expected:
            segments.bases.remove(base)
    return Folder(disk, fixed, segments, report, saved)


def dtype_of(name: str) -> np.dtype:
    """What the rows of a folder of rows are."""
    if name in _DTYPES:
        return _DTYPES[name]
    return ENTRY if name.endswith("entries") else TIME


def named(row: np.void) -> str:
    names = row.dtype.names or ()
    return ", ".join(f"{name} {value}" for name, value in zip(names, row.item(), strict=True) if name != "reserved")


def check_sums(folder: Folder) -> None:
    for saved in folder.saved:
        for name, sums in saved.sums().items():
            rows = folder.rows(saved, name)
            try:
                rows.check_files()
                for block, expected in enumerate(sums):
                    found = rows.block_sum(block, rows.length) if expected else 0
                    if not found:
                        continue  # retention has let go of rows in it, or there is no such block
                    folder.report.count("blocks of rows equal to their checksum", 1)
                    if found != expected:
                        start, stop = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, rows.length)
                        first, *_, last = [*rows.paths(start, start + 1), *rows.paths(stop - 1, stop)]
                        paths = first if first == last else f"{first} and {last}"
                        folder.report.find(
                            f"{paths}: rows {start} to {stop - 1} are not as {saved.path} knew them (checksum)"
                        )
            except CorruptQueue as error:
                folder.report.find(str(error))

"""Reads the row files that a broker would trust, and follows each row to the record that it points at."""

from collections.abc import Callable

import numpy as np

from postdate.check.folder import Folder, dtype_of
from postdate.check.log import LogCheck
from postdate.check.records import Index
from postdate.check.report import Report
from postdate.state.fold import Fold
from postdate.storage import chunk as chunks
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.rows import Rows


class Tables:
    """The files up to the newest snapshot's lengths, then what the second fold made."""

    def __init__(self, folder: Folder, fold: Fold | None) -> None:
        self._folder, self._fold = folder, fold
        newest = folder.newest
        # A fold that had to stop may know fewer queues than the snapshot.
        saved = [(name, queue_id) for name, queue_id in newest.state["topics"]["places"]] if newest else []
        self.places = max(saved, fold.topics.places if fold else [], key=len)
        self.chunk_end = max(newest.state["chunk_end"] if newest else CHUNK_BIT, fold.chunk_end if fold else 0)

    def chunks(self) -> list[tuple[int, str]]:
        """The staged chunks that are needed or still there, by base."""
        names, newest = {}, self._folder.newest
        if newest is not None:
            waiting = {base for base, _, _ in newest.state["runs"]}
            saved = newest.chunk_names().items()
            names = {base: name for base, name in saved if base in waiting or self._folder.has_chunk(name)}
        if self._fold is not None:
            names |= {base: self._fold.chunks.name_of(base) for base in self._fold.chunks.bases()}
        return sorted(names.items())

    def rows(self, name: str) -> tuple[int, np.ndarray]:
        """The number of the first row and the rows. Raises CorruptQueue where a file misses some."""
        newest, folded = self._folder.newest, self._folded(name)
        stored = self._folder.rows(newest, name) if newest else None
        first, length = (stored.first, stored.length) if stored else (0, 0)
        rows = stored.read(first, length) if stored else np.empty(0, dtype_of(name))
        return first, np.concatenate([rows, folded.read(length, folded.length)]) if folded else rows

    def _folded(self, name: str) -> Rows | None:
        if self._fold is None or name == "far":
            return self._fold.far.rows if self._fold else None
        number, kind = name.split("/")[1:]
        queue = self._fold.queues[int(number)] if int(number) < len(self._fold.queues) else None
        return (queue.entries if kind == "entries" else queue.times) if queue else None


Place = Callable[[int], str]  # a row, by its index in a column, in people's words


class Pointers:
    """Follows offsets of the log and of chunks."""

    def __init__(self, folder: Folder, tables: Tables, index: Index, log: LogCheck) -> None:
        self._report, self._index = folder.report, index
        self._shift = folder.segments.shift
        self._numbers = np.array([base >> self._shift for base in folder.segments.bases], np.int64)
        self._log_end, self._holes = log.end, log.holes
        self._chunk_end = tables.chunk_end
        self._chunks = [(base, folder.disk.size(chunks.path_of(name))) for base, name in tables.chunks()]

    def follow(self, place: Place, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds records as `Index.find` does; reports missing ones, counts those that retention has removed."""
        found, known = self._index.find(offset)
        there = np.isin(offset >> self._shift, self._numbers)
        for hole in self._holes:
            there &= (offset < hole.offset) | (offset >= hole.end)
        for base, size in self._chunks:
            there |= (offset >= base) & (offset < base + size)
        never = (offset < 0) | ((offset >= self._log_end) & (offset < CHUNK_BIT)) | (offset >= self._chunk_end)
        needed = there | never
        self._report.count("rows whose record is gone", int((~found & ~needed).sum()))
        self._report.find_each(
            ~found & needed, lambda hit: f"{place(hit)}: it points at {offset[hit]}, where no record begins"
        )
        return found, known


def check_ascending(report: Report, place: Place, column: np.ndarray, name: str) -> bool:
    falls = np.concatenate([[False], column[1:] <= column[:-1]])
    report.find_each(
        falls, lambda hit: f"{place(hit)}: {name} {column[hit]} is not behind {column[hit - 1]}, the one before it"
    )
    return not falls.any()

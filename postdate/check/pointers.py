"""From a row to its record: whether one begins where the row points, and whether one must."""

from collections.abc import Callable

import numpy as np

from postdate.check.folder import Folder
from postdate.check.known import Index
from postdate.check.log import LogCheck
from postdate.check.report import Report
from postdate.check.tables import Tables
from postdate.storage import chunk as chunks
from postdate.storage.chunk import CHUNK_BIT

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
        """As `Index.find`; tells of missing records, counts those that retention let go."""
        found, known = self._index.find(offset)
        needed = self._must_be_there(offset)
        self._report.count("rows whose record is gone", int((~found & ~needed).sum()))
        self._report.find_each(
            ~found & needed, lambda hit: f"{place(hit)}: it points at {offset[hit]}, where no record begins"
        )
        return found, known

    def _must_be_there(self, offset: np.ndarray) -> np.ndarray:
        there = np.isin(offset >> self._shift, self._numbers)
        for hole in self._holes:
            there &= (offset < hole.offset) | (offset >= hole.end)
        for base, size in self._chunks:
            there |= (offset >= base) & (offset < base + size)
        never = (offset < 0) | ((offset >= self._log_end) & (offset < CHUNK_BIT)) | (offset >= self._chunk_end)
        result: np.ndarray = there | never
        return result


def check_ascending(report: Report, place: Place, column: np.ndarray, name: str) -> bool:
    falls = np.concatenate([[False], column[1:] <= column[:-1]])
    report.find_each(
        falls, lambda hit: f"{place(hit)}: {name} {column[hit]} is not behind {column[hit - 1]}, the one before it"
    )
    return not falls.any()

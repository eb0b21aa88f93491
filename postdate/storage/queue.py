"""A queue: the index of one topic's queue, and when each of its entries became visible.

    entries   | log offset int64 | size int32 | tag int64 |     20 bytes, one per message, in the order of consuming
    times     | visible at int64 | offset int64 |               16 bytes, one per instant at which the queue grew

A row of `times` says: the entries from `offset` on became visible at that instant, up to the next row. So `times` is
sparse where many come at once, and exact everywhere. Its instants never go back, even if the broker's clock does,
because searching needs order.
"""

import numpy as np

from postdate.storage.disk import Disk
from postdate.storage.layout import ENTRY, TIME, TIME_STRUCT
from postdate.storage.rows import Rows

FILTER_ROWS = 2_048  # entries that a pull or a pop with a filter looks at in one step


class Queue:
    """Entries come in by `push` and `extend`, each with the instant at which they become visible."""

    __slots__ = ("entries", "grown_at_ms", "number", "times")

    def __init__(
        self, disk: Disk, number: int, file_rows: int, tail_rows: int, length: int = 0, times_length: int = 0
    ) -> None:
        self.number = number
        folder = f"queues/{number}"
        self.entries = Rows(disk, f"{folder}/entries", ENTRY, file_rows, tail_rows, length)
        self.times = Rows(disk, f"{folder}/times", TIME, file_rows, tail_rows, times_length)
        self.grown_at_ms = int(self.times.read(times_length - 1, times_length)["at_ms"][0]) if times_length else -1

    @property
    def length(self) -> int:
        return self.entries.length

    @property
    def first(self) -> int:
        """The smallest offset that is not gone."""
        return self.entries.first

    def push(self, entry: bytes, at_ms: int) -> None:
        if at_ms > self.grown_at_ms:
            self._grow(at_ms)
        self.entries.push(entry)

    def extend(self, entries: np.ndarray, at_ms: int) -> None:
        if at_ms > self.grown_at_ms:
            self._grow(at_ms)
        self.entries.extend(entries)

    def _grow(self, at_ms: int) -> None:
        self.times.push(TIME_STRUCT.pack(at_ms, self.entries.length))
        self.grown_at_ms = at_ms

    def visible_at_ms(self, start: int, stop: int) -> np.ndarray:
        """When each of the entries start..stop-1 became visible."""
        low = self.time_row(start)
        rows = self.times.read(low, low + stop - start + 1)  # a row of `times` covers at least one entry
        index = np.searchsorted(rows["offset"], np.arange(start, stop), "right") - 1
        instants: np.ndarray = rows["at_ms"][index]
        return instants

    def time_row(self, offset: int) -> int:
        """The row of `times` that says when an entry became visible."""
        return max(self.times.search("offset", offset, "right") - 1, 0)

    def search(self, at_ms: int) -> int:
        """The first entry that became visible at or after an instant; the queue's length where none did."""
        row = self.times.search("at_ms", at_ms, "left")
        if row >= self.times.length:
            return self.length
        return int(self.times.read(row, row + 1)["offset"][0])

    def forget(self, before: int) -> None:
        """Forgets entries before this offset, and the times that only they need."""
        self.entries.forget(before)
        self.times.forget(self.time_row(before))

    def rows(self) -> tuple[Rows, Rows]:
        return self.entries, self.times


def tagged(entries: np.ndarray, tag_hashes: frozenset[int]) -> list[int]:
    """Indexes of the entries with one of these tags. By column: a held pull may have to pass over a million of them."""
    found: list[int] = np.flatnonzero(np.isin(entries["tag"], np.array(list(tag_hashes), np.int64))).tolist()
    return found

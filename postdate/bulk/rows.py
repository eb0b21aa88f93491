"""Rows of a topic's queue or of the far queue: read from files, the newest ones from the broker's memory.

Yields only rows that the broker called durable, and skips those that retention has removed.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from postdate.bulk.broker_link import Link, QueueRange
from postdate.errors import PostdateError
from postdate.storage.layout import ENTRY, FAR, TIME

BLOCK_ROWS = 65_536  # read at once: 3 MB of far rows
_TRIES = 3
_NO_END = 1 << 62


class RowsMissing(PostdateError):
    """A broker that has just started is still rewriting rows that its crash took. A later try finds them."""


class Queue(NamedTuple):
    """Names a queue: a topic's, or the far queue where the topic is empty; its entries, or the times when they became
    visible.
    """

    topic: str = ""
    id: int = 0
    times: bool = False

    @property
    def dtype(self) -> np.dtype:
        if not self.topic:
            return FAR
        return TIME if self.times else ENTRY

    def folder(self, number: int) -> str:
        return f"queues/{number}/{'times' if self.times else 'entries'}" if self.topic else "far"

    def __str__(self) -> str:
        return f"queue {self.id} of topic {self.topic!r}" if self.topic else "the far queue"


class Block(NamedTuple):
    """Consecutive rows, and the number of the first."""

    start: int
    rows: np.ndarray


class QueueRows:
    """Reads the rows start..stop-1 of one queue. Raises RowsMissing, and the error that the broker refuses with."""

    def __init__(self, folder: Path, link: Link, queue: Queue, start: int, stop: int) -> None:
        self._folder = folder
        self._link = link
        self._queue = queue
        self._at = start
        self._range = link.range(*queue, start)
        self._stop = min(stop, self._range.length)

    @property
    def number(self) -> int:
        """The queue's number."""
        return self._range.number

    def times(self) -> "QueueRows":
        """Returns when the rows became visible. Asked for later than the rows, it covers all of them."""
        return QueueRows(self._folder, self._link, self._queue._replace(times=True), self._range.time_row, _NO_END)

    def blocks(self) -> Iterator[Block]:
        """Yields blocks in order; rows between two blocks are gone."""
        missed = 0
        while (at := max(self._at, self._range.first)) < self._stop:
            self._at = at
            rows = self._read(min(self._stop, self._at + BLOCK_ROWS))
            if len(rows):
                missed = 0
                yield Block(self._at, rows)
                self._at += len(rows)
            else:
                # The rows are not where the broker said: it has removed them since, or is rewriting them.
                missed += 1
                if missed > _TRIES:
                    raise RowsMissing(f"row {self._at} of {self._queue} is not in its file now: try again in a moment")
                self._range = self._link.range(*self._queue, self._at)

    def _read(self, stop: int) -> np.ndarray:
        """Returns the next rows up to `stop`; none where they are missing."""
        known = self._range
        if self._at < known.stored:
            return self._read_file(min(stop, known.stored, (self._at // known.file_rows + 1) * known.file_rows), known)
        tail = np.frombuffer(known.tail, self._queue.dtype)
        return tail[self._at - known.tail_start : stop - known.tail_start]

    def _read_file(self, stop: int, known: QueueRange) -> np.ndarray:
        file_start = self._at // known.file_rows * known.file_rows
        width = self._queue.dtype.itemsize
        path = self._folder / self._queue.folder(known.number) / f"{file_start:020d}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return np.empty(0, self._queue.dtype)
        try:
            data = os.pread(descriptor, (stop - self._at) * width, (self._at - file_start) * width)
        finally:
            os.close(descriptor)
        return np.frombuffer(data[: len(data) // width * width], self._queue.dtype)

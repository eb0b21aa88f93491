"""The log: the append-only sequence of batches, the only source of truth.

Appending, making durable and reading are three calls. `append` writes and returns; `flush` makes durable all that was
appended before it, and may run on another thread; what has been appended is acknowledged when `durable` has passed it.
After a write or a sync has failed, nothing more is written until the log is opened again (LogFailed): what the failed
call left on disk is unknown, and a second sync may claim success for pages that the first one dropped.
"""

import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from postdate.errors import CorruptLog, LogFailed, UsageError
from postdate.faultpoint import reach
from postdate.storage import batch as batches
from postdate.storage.batch import KIND_BATCH, KIND_FILLER, Batch
from postdate.storage.disk import Data, Disk
from postdate.storage.layout import BATCH_HEADER_BYTES, ROW_BYTES
from postdate.storage.segment import Segment, Segments, path_of

OFFSET_MAX = (1 << 63) - 1
NO_BATCH = -1


class Keeper(Protocol):
    """A helper that zeroes segments ahead of use."""

    def wake(self) -> None: ...
    def stop(self) -> None: ...


class Log:
    """Opened by `recover`, then appended to by one thread and flushed by at most one other."""

    def __init__(self, disk: Disk, segments: Segments, unflushed_bytes_max: int) -> None:
        self._disk, self._segments, self._unflushed_bytes_max = disk, segments, unflushed_bytes_max
        self._mask, self.segment_shift = segments.segment_bytes - 1, segments.shift
        self._current: Segment | None = None
        self._full: list[Segment] = []  # full, not yet synced
        self._flushing = threading.Lock()  # the append thread flushes too, where too much is unflushed
        self.keeper: Keeper | None = None
        self.end = 0
        self.durable = 0
        self.failure: Exception | None = None

    # -- appending ----------------------------------------------------------------------------------------------

    def place(self, length: int, at_ms: int, *, urgent: bool) -> int:
        """Returns where a batch of this length will stand if it is appended next; opens a new segment where needed.

        Raises DiskFull (urgent appends may use the reserve, see segment.py) and LogFailed.
        """
        if self.failure is not None:
            raise self._failed_error()
        if length > self._segments.segment_bytes:
            raise UsageError(f"a batch of {length} bytes does not fit into a segment of {self._segments.segment_bytes}")
        if self.end - self.durable + length > self._unflushed_bytes_max:
            self.flush()
        if self._current is None or not self._fits(length):
            self._roll(at_ms, urgent=urgent)
        elif not urgent:
            self._segments.keep_reserve()  # the segment being written may be the reserve, opened by an urgent append
        return self.end

    def _fits(self, length: int) -> bool:
        # A filler needs a header's room, so a batch ends its segment exactly or leaves at least that.
        assert self._current is not None
        rest = self._current.base + self._segments.segment_bytes - self.end
        return length == rest or length + BATCH_HEADER_BYTES <= rest

    def _roll(self, at_ms: int, *, urgent: bool) -> None:
        following = self._segments.open_next(urgent=urgent)
        if self._current is not None:
            if self.end < following.base:
                length = following.base - self.end
                body = bytes(length - BATCH_HEADER_BYTES)
                head = batches.header(KIND_FILLER, self.end, at_ms, self.durable, 0, body)
                self._write("log.filler", head)  # the rest is zero already
                self.end += length
            self._full.append(self._current)
        self._current = following
        if self.keeper is not None:
            self.keeper.wake()

    def append(self, start: int, at_ms: int, count: int, body: bytes) -> Batch:
        """Writes a batch at the place that `place` gave. `body` is rows, records and padding."""
        assert start == self.end, f"batch made for {start}, the log ends at {self.end}"
        durable = self.durable
        head = batches.header(KIND_BATCH, start, at_ms, durable, count, body)
        self._write("log.append", head + body)
        self.end = start + BATCH_HEADER_BYTES + len(body)
        return Batch(start, self.end, at_ms, durable, count, body[: count * ROW_BYTES])

    def _write(self, point: str, *parts: Data) -> None:
        assert self._current is not None
        segment = self._current
        reach(point)
        try:
            segment.file.write(self.end - segment.base, *parts)
        except OSError as error:
            # Into a zeroed segment the disk never has to find room, so this is no full disk: it is a broken one.
            self.failure = error
            raise self._failed_error() from error
        reach(point + ".written")

    def flush(self) -> int:
        """Makes durable everything appended before the call; returns the position. Raises LogFailed."""
        with self._flushing:
            return self._flush()

    def _flush(self) -> int:
        if self.failure is not None:
            raise self._failed_error()
        # Read in this order: an append on the other thread may open a new segment between any two of these lines, and
        # then the old one is found as the current one or among the full ones.
        end = self.end
        current = self._current
        full = list(self._full)
        if end == self.durable or current is None:
            return end
        try:
            reach("log.flush")
            for segment in (*full, current):
                segment.file.sync()
        except OSError as error:
            self.failure = error
            raise self._failed_error() from error
        reach("log.flushed")
        self.durable = end
        del self._full[: len(full)]
        for segment in full:
            segment.close()
        return end

    def fail(self, error: Exception) -> LogFailed:
        """Ends writing until the log is opened again: the disk may no longer agree with what is in memory."""
        self.failure = error
        return self._failed_error()

    def _failed_error(self) -> LogFailed:
        return LogFailed(
            f"the log takes no more writes since an error ({self.failure}); restart the broker, it reads the tail anew"
        )

    def close(self) -> None:
        if self.keeper is not None:
            self.keeper.stop()
        with self._flushing:
            for segment in (*self._full, self._current):
                if segment is not None:
                    segment.close()
            self._current = None
            self._segments.views.clear()  # each holds a descriptor

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, offset: int, size: int) -> bytes:
        """The bytes of a record; empty where its segment is gone."""
        view = self._segments.views.get(offset >> self._segments.shift)
        if view is None:
            view = self._segments.view(offset & ~self._mask)
            if view is None:
                return b""
        position = offset & self._mask
        return view[position : position + size]

    def mark_at(self, offset: int) -> int | None:
        """The checksum of the batch that begins at an offset, without its highest bit; NO_BATCH where none begins
        there, None where its segment is gone.
        """
        if not 0 <= offset < self.end:
            return NO_BATCH
        head = self.read(offset, BATCH_HEADER_BYTES)
        checksum = batches.checksum_at(head, offset) if head else None
        return None if not head else NO_BATCH if checksum is None else checksum & OFFSET_MAX

    def segment_numbers(self) -> list[int]:
        return [base >> self._segments.shift for base in self._segments.bases]

    def segment_end(self, number: int) -> int:
        return (number + 1) << self._segments.shift

    @property
    def start(self) -> int:
        """The first offset that is still there."""
        return self._segments.bases[0] if self._segments.bases else self.end

    def ranges(self) -> list[tuple[int, int]]:
        """The contiguous ranges of offsets that exist: retention may have removed segments from the middle. The last
        range has no end.
        """
        ranges: list[tuple[int, int]] = []
        for base in self._segments.bases or [0]:
            joins = ranges and ranges[-1][1] == base
            start = ranges.pop()[0] if joins else base
            ranges.append((start, base + self._segments.segment_bytes))
        return [*ranges[:-1], (ranges[-1][0], OFFSET_MAX)]

    @property
    def begins_at_ms(self) -> int | None:
        """When the first batch that is not gone was written; None where there is none."""
        return batches.written_at_ms(self.read(self.start, BATCH_HEADER_BYTES)) if self.start < self.end else None

    @property
    def is_whole(self) -> bool:
        """Whether no segment of it is gone."""
        return self.ranges() == [(0, OFFSET_MAX)]

    @property
    def spare_count(self) -> int:
        return self._segments.spare_count

    def prepare_segment(self) -> None:
        """Zeroes a segment ahead of use, where no keeper does it. Raises DiskFull."""
        self._segments.prepare()

    def remove_segment(self, number: int) -> None:
        """For retention: the caller has made sure that nothing needs it."""
        assert self.segment_end(number) <= self.durable, f"segment {number} is still being written"
        self._segments.remove(number << self._segments.shift)

    def sync_folder(self) -> None:
        self._disk.sync_folder("log")

    # -- opening ------------------------------------------------------------------------------------------------

    def recover(self, start: int, known_durable: int) -> Iterator[Batch]:
        """Yields every batch from `start` to the end of the log, then makes that end firm; must be read to its end.

        `known_durable` is what the snapshots know to be on disk. A torn tail is cut, zeroed and synced. Raises
        CorruptLog for damage below what is known to be durable.
        """
        self._segments.check_sizes()
        scan = Scan(self._segments, start, known_durable)
        yield from scan.batches()
        try:
            self._cut(scan.end)
            self.end = self.durable = scan.end
            # A batch may have ended its segment exactly: then the next one is opened by the next append.
            self._segments.keep_as_spares([base for base in self._segments.bases if base >= scan.end])
            if self._segments.bases:
                self._current = self._segments.open_last()
            self._confirm(min(scan.known_durable, scan.end), scan.end)
        except OSError as error:
            self.failure = error
            raise self._failed_error() from error

    def scan(self, start: int, known_durable: int) -> Iterator[Batch]:
        """Yields the same batches as `recover` and changes nothing: for checking a closed folder."""
        scan = Scan(self._segments, start, known_durable)
        yield from scan.batches()
        self.end = self.durable = scan.end

    def _cut(self, end: int) -> None:
        """Zeroes what a crash left after the last whole batch."""
        for base in self._segments.bases:
            written = self._written_from(base, max(end, base))
            if written:
                reach("log.cut")
                self._disk.write(path_of(base), max(end, base) - base, bytes(written))
                self._disk.sync(path_of(base))

    def _written_from(self, base: int, offset: int) -> int:
        """How many bytes from `offset` on this segment may hold something."""
        if offset >= base + self._segments.segment_bytes:
            return 0
        rest = self._segments.array(base)[offset - base :]
        used = np.flatnonzero(rest) if rest.any() else rest[:0]
        return int(used[-1]) + 1 if len(used) else 0

    def _confirm(self, known_durable: int, end: int) -> None:
        """Writes the tail once more and syncs it.

        What we just read may come from memory alone: after a failed sync the kernel holds pages as clean that never
        reached the disk. Only a write makes them dirty again.
        """
        for base in self._segments.bases:
            low, high = max(known_durable, base), min(end, base + self._segments.segment_bytes)
            view = self._segments.view(base)
            if low < high and view is not None:
                reach("log.confirm")
                self._disk.write(path_of(base), low - base, view[low - base : high - base])
                self._disk.sync(path_of(base))


class Scan:
    """A walk over the log's batches that tells the end of the log from damage."""

    def __init__(self, segments: Segments, start: int, known_durable: int) -> None:
        self._segments, self.end = segments, start
        self.known_durable = max(start, known_durable)

    def batches(self) -> Iterator[Batch]:
        while True:
            base = self.end & -self._segments.segment_bytes
            view = self._segments.view(base)
            if view is None:
                return self._stop("its segment is missing")
            found = batches.parse(view, self.end - base, self.end)
            if found.batch is None:
                return self._stop(found.problem)
            self.known_durable = max(self.known_durable, found.batch.durable)
            self.end = found.batch.end
            if found.batch.kind == KIND_BATCH:
                yield found.batch

    def _stop(self, problem: str) -> None:
        """The walk ends here: by right, or because of damage to something that was on disk."""
        later = max((batch.durable for batch in self._later_batches()), default=0)
        self.known_durable = max(self.known_durable, later)
        if self.end < self.known_durable:
            base = self.end & -self._segments.segment_bytes
            raise CorruptLog(
                f"segment {path_of(base)}, offset {self.end} (byte {self.end - base} of the file): {problem}, "
                f"though everything before {self.known_durable} was on disk; "
                "restore the file from a copy, the log was not changed"
            )

    def _later_batches(self) -> Iterator[Batch]:
        """Whole batches after the place where the walk stopped: pages may reach the disk out of order."""
        for base in self._segments.bases:
            if base + self._segments.segment_bytes <= self.end:
                continue
            view = self._segments.view(base)
            if view is None:
                continue
            low = max(self.end - base, 0)
            words = self._segments.array(base)[low:].view(np.uint32)[:: batches.ALIGNMENT // 4]
            for index in np.flatnonzero(words == batches.MAGIC).tolist():
                position = low + index * batches.ALIGNMENT
                found = batches.parse(view, position, base + position)
                if found.batch is not None:
                    yield found.batch

"""Fixed-width rows in files, appended only: the shape of queues, time indexes, the far queue and the index of keys.

    queues/17/entries/00000000000000000000      rows 0 .. file_rows-1
    queues/17/entries/00000000000001048576      the next ones

The dtype is the format; a file is nothing but rows. The newest rows stay in memory until there are enough of them to be
worth a write, or a snapshot wants them. Rows can always be made again from the log, so nothing here is synced but for a
snapshot, and a write that fails (a full disk) only means that they stay in memory until it works.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from xxhash import xxh3_64_intdigest

from postdate.errors import CorruptQueue
from postdate.faultpoint import reach
from postdate.storage.disk import Disk

BLOCK_ROWS = 4_096  # rows under one checksum of a snapshot
_READ_ROWS = 512  # rows read at once for a reader that comes back for the next ones


class Rows:
    """One sequence of rows. `length` counts all of them, in files or in memory."""

    __slots__ = (
        "_cache", "_cache_start", "_disk", "_dtype", "_file_rows", "_item", "_spill_at", "_tail",
        "_tail_bytes", "first", "folder", "length", "stored", "sums", "synced", "unsure", "write_error",
    )  # fmt: skip

    def __init__(
        self, disk: Disk, folder: str, dtype: np.dtype, file_rows: int, tail_rows: int, length: int = 0
    ) -> None:
        self._disk, self.folder, self._dtype = disk, folder, dtype
        self._item = dtype.itemsize
        self._file_rows = file_rows
        self._tail = bytearray()
        self._tail_bytes = tail_rows * dtype.itemsize
        self._spill_at = self._tail_bytes
        self._cache = np.empty(0, dtype)
        self._cache_start = 0
        self.length = length
        self.stored = length  # rows that are in files
        self.first = 0  # rows before this one are gone (retention)
        self.synced = length  # rows that the last snapshot made durable
        # A sync has failed: rows after `synced` may never reach the disk, unless they are written again.
        self.unsure = False
        self.sums: list[int] = []  # checksums of full blocks, from the first block on
        self.write_error: OSError | None = None

    def resume(self, length: int) -> None:
        """Continues an empty sequence after this many rows that are in files already, and durable."""
        assert not self.length, f"{self.folder} has {self.length} rows already"
        self.length = self.stored = self.synced = length

    def push(self, row: bytes) -> None:
        self._tail += row
        self.length += 1
        if len(self._tail) >= self._spill_at:
            self.spill()

    def extend(self, rows: np.ndarray) -> None:
        self.length += len(rows)
        if rows.nbytes < self._tail_bytes:
            self._tail += rows.tobytes()
        else:
            self.spill()
            # Rows that the disk did not take stay in front: order matters more than memory.
            if self._tail or not self._store(np.ascontiguousarray(rows).view(np.uint8).data):
                self._tail += rows.tobytes()
        if len(self._tail) >= self._spill_at:
            self.spill()

    def spill(self) -> None:
        """Writes the rows in memory to their files. Where that fails they stay, and the next try comes when there are
        twice as many.
        """
        if not self._tail:
            return
        if self._store(memoryview(bytes(self._tail))):
            self._tail = bytearray()
            self._spill_at = self._tail_bytes
        else:
            self._spill_at = 2 * len(self._tail)

    def _store(self, data: memoryview) -> bool:
        try:
            row = self.stored
            while data:
                size = min(len(data), (self._file_rows - row % self._file_rows) * self._item)
                reach("rows.write")
                self._disk.write(self._path(row), row % self._file_rows * self._item, data[:size])
                data = data[size:]
                row += size // self._item
        except OSError as error:
            self.write_error = error
            return False
        self.write_error = None
        self.stored = row
        return True

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1, fewer where the sequence ends. Raises CorruptQueue where a file is missing rows."""
        stop = min(stop, self.length)
        if start >= stop:
            return np.empty(0, self._dtype)
        if start >= self.stored:
            low = (start - self.stored) * self._item
            return np.frombuffer(bytes(self._tail[low : (stop - self.stored) * self._item]), self._dtype)
        if stop <= self.stored:
            return self._cached(start, stop)
        return np.concatenate([self._cached(start, self.stored), self.read(self.stored, stop)])

    def read_one(self, row: int) -> np.ndarray:
        """As `read` for one row, without those after it: for rows in no order."""
        return self.read(row, row + 1) if row >= self.stored else self._read_stored(row, row + 1)

    def _cached(self, start: int, stop: int) -> np.ndarray:
        low, high = start - self._cache_start, stop - self._cache_start
        if low >= 0 and high <= len(self._cache):
            return self._cache[low:high]
        if stop - start > _READ_ROWS:
            return self._read_stored(start, stop)
        self._cache = self._read_stored(start, min(start + _READ_ROWS, self.stored))
        self._cache_start = start
        return self._cache[: stop - start]

    def _read_stored(self, start: int, stop: int) -> np.ndarray:
        pieces = []
        while start < stop:
            until = min(stop, (start // self._file_rows + 1) * self._file_rows)
            pieces.append(self._read_file(start, until))
            start = until
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read_file(self, start: int, stop: int) -> np.ndarray:
        path, size = self._path(start), (stop - start) * self._item
        try:
            data = self._disk.read(path, start % self._file_rows * self._item, size)
        except FileNotFoundError as error:
            raise CorruptQueue(f"{path} is missing, it should hold rows {start} to {stop - 1}") from error
        if len(data) != size:
            raise CorruptQueue(f"{path} ends early: rows {start} to {stop - 1} need {size} bytes, it has {len(data)}")
        return np.frombuffer(data, self._dtype)

    def map(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop-1, fewer where a file ends, mapped instead of read: for a look at few of many rows, or at a
        column or two. Raises CorruptQueue where the file is missing rows.
        """
        if stop > self.stored:
            return self.read(start, stop)
        stop = min(stop, (start // self._file_rows + 1) * self._file_rows)
        path = self._path(start)
        position, size = start % self._file_rows * self._item, (stop - start) * self._item
        if self._disk.size(path) < position + size:
            return self._read_file(start, stop)  # says what is missing
        return self._disk.array(path)[position : position + size].view(self._dtype)

    def search(self, field: str, value: int, side: Literal["left", "right"]) -> int:
        """As numpy.searchsorted over a column that ascends, reading only what it must."""
        found = self._search_memory(field, value, side)
        # What was read last may lie before `first` by now.
        return self._search_stored(field, value, side) if found is None else max(found, self.first)

    def _search_memory(self, field: str, value: int, side: Literal["left", "right"]) -> int | None:
        """The answer where it lies in the newest rows or in those read last: a consumer asks for what comes next."""
        tail = self.read(self.stored, self.length)[field]
        if len(tail) and tail[0] < value:
            return self.stored + int(np.searchsorted(tail, value, side))
        column = self._cache[field]
        if len(column) and column[0] < value < column[-1]:
            return self._cache_start + int(np.searchsorted(column, value, side))
        return None

    def _search_stored(self, field: str, value: int, side: Literal["left", "right"]) -> int:
        low, high = self.first, self.stored
        rows, start = np.empty(0, self._dtype), 0  # of a file, from when it is known that the answer lies there
        while high - low > _READ_ROWS:
            middle = (low + high) // 2
            if not len(rows) and low // self._file_rows == (high - 1) // self._file_rows:
                rows, start = self.map(low, high), low
            at = int(rows[field][middle - start] if len(rows) else self._read_stored(middle, middle + 1)[field][0])
            if at < value or (side == "right" and at == value):
                low = middle + 1
            else:
                high = middle
        column = self.read(low, self.length if high == self.stored else high)[field]
        return low + int(np.searchsorted(column, value, side))

    # -- snapshots and retention --------------------------------------------------------------------------------

    def sum_blocks(self, length: int) -> Iterator[None]:
        """Computes the checksums of the full blocks of the first `length` rows that have none yet, one at a step."""
        for block in range(len(self.sums), length // BLOCK_ROWS):
            self.sums.append(self.block_sum(block, length))
            yield

    def block_sum(self, block: int, length: int) -> int:
        """The checksum of a block of the first `length` rows (the last block may be short); 0 where it is gone."""
        start, stop = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, length)
        return xxh3_64_intdigest(self.read(start, stop).tobytes()) if start >= self.first else 0

    def write_again(self) -> None:
        """After a failed sync the kernel holds pages as clean that never reached the disk; only a write helps."""
        start = self.synced
        while start < self.stored:
            stop = min(start + BLOCK_ROWS, self.stored, (start // self._file_rows + 1) * self._file_rows)
            self._disk.write(self._path(start), start % self._file_rows * self._item, self.read(start, stop).tobytes())
            start = stop
        self.unsure = False

    def paths(self, start: int, stop: int) -> list[str]:
        """The files that hold rows start..stop-1."""
        step = self._file_rows
        return [self._path(row) for row in range(start // step * step, stop, step)]

    def check_files(self) -> None:
        """Raises CorruptQueue where a file is missing or shorter than it must be."""
        for start in range(self.first // self._file_rows * self._file_rows, self.stored, self._file_rows):
            need = min(self.stored - start, self._file_rows) * self._item
            size = self._disk.size(self._path(start))
            if size < need:
                raise CorruptQueue(f"{self._path(start)} has {max(size, 0)} bytes, {need} are needed")

    def cut(self) -> None:
        """Removes the rows after `length` from the files: a replay will make them again."""
        for name in self._disk.list(self.folder):
            start = int(name)
            keep = min(max(self.length - start, 0), self._file_rows) * self._item
            path = f"{self.folder}/{name}"
            if keep == 0:
                self._disk.remove(path)
            elif self._disk.size(path) > keep:
                self._disk.truncate(path, keep)

    def forget(self, before: int) -> None:
        """Forgets rows before this one; their files stay until `remove_files`."""
        self.first = max(self.first, before)

    def remove_files(self, kept_length: int) -> None:
        """Removes files whose rows are all forgotten, up to the file of the last of the first `kept_length` rows: a
        snapshot of that length must be loadable.
        """
        if self.first < self._file_rows:
            return  # not even the first file
        for name in self._disk.list(self.folder):
            if int(name) + self._file_rows <= min(self.first, kept_length - 1):
                self._disk.remove(f"{self.folder}/{name}")

    def find_first(self) -> None:
        """Finds the first row after loading: retention may have removed files at the front since the snapshot."""
        names = self._disk.list(self.folder)
        if names and self.length:
            self.first = max(self.first, min(int(names[0]), self.length - 1))

    def _path(self, row: int) -> str:
        return f"{self.folder}/{row // self._file_rows * self._file_rows:020d}"

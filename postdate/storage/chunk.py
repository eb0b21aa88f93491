"""A chunk: the records of a promoted window with their sorted index, uploaded once and read where they lie.

    0       4      8        16            24           32          40        48       56         64
    +-------+------+--------+-------------+------------+-----------+---------+--------+----------+
    | magic | ver. | count  | index sum   | record sum | bytes     | due low | due hi | head sum |
    +-------+------+--------+-------------+------------+-----------+---------+--------+----------+
    | count rows of 56 bytes (CHUNK_ROW), ascending by (due, arrival)                            |
    | the records                                                                                |
    +--------------------------------------------------------------------------------------------+

Little-endian; sums are xxh3. A staged chunk gets a range of offsets of its own, above every offset of the log
(CHUNK_BIT), so that a queue entry resolves to a record the same way wherever the record lies.
"""

import re
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from postdate.arrival import OWN_ARRIVAL
from postdate.errors import CorruptChunk
from postdate.faultpoint import reach
from postdate.storage.disk import Data, Disk
from postdate.storage.layout import CHECKSUM, CHUNK_HEAD, CHUNK_HEADER_BYTES, CHUNK_ROW

FOLDER = "chunks"
CHUNK_BIT = 1 << 62
MAGIC = 0x31434450  # "PDC1"
VERSION = 1
NEW = ".new"  # ends the name of a chunk that is being written
_UPLOADED = re.compile(r"([0-9]{6})-[A-Za-z0-9_.-]{1,120}")
OPEN_MAX = 64  # chunks kept open for reading
FLAG_OWN_ARRIVAL = OWN_ARRIVAL  # not a message of the far queue: a rescue never had it


class Head(NamedTuple):
    row_count: int
    index_sum: int
    records_sum: int
    file_bytes: int
    due_low_ms: int
    due_high_ms: int


def write(disk: Disk, name: str, index: np.ndarray, records: bytes) -> None:
    """Writes and syncs a whole chunk; see `Writer`."""
    writer = Writer(disk, name, len(index))
    writer.add(index, records)
    writer.finish()


class Writer:
    """Writes a chunk piece by piece. The number of rows is known from the start, so that rows and records grow side by
    side, each at its place, and nothing is kept in memory.

    The file has a name that ends in `.new` until it is whole and synced. The content is not checked here: bulk checks
    order and counts of what it receives, and the broker calls `verify`.
    """

    def __init__(self, disk: Disk, name: str, row_count: int) -> None:
        self._disk = disk
        self._path = path_of(name)
        self._row_count = row_count
        self._records_at = CHUNK_HEADER_BYTES + row_count * CHUNK_ROW.itemsize
        self._index_sum, self._records_sum = xxh3_64(), xxh3_64()
        self._due_low_ms = self._due_high_ms = 0
        self.row_count = 0  # rows and record bytes written so far
        self.records_bytes = 0
        reach("chunk.write")
        disk.write(self._path + NEW, 0, bytes(CHUNK_HEADER_BYTES))

    def add(self, index: np.ndarray, records: Data) -> None:
        """Appends rows and records. Positions count from the chunk's first record; the file has them from its start."""
        rows = index.astype(CHUNK_ROW)
        if not len(rows):
            return
        rows["position"] += self._records_at
        if not self.row_count:
            self._due_low_ms = int(rows["due"][0])
        self._due_high_ms = int(rows["due"][-1])
        body = rows.tobytes()
        reach("chunk.add")
        self._disk.write(self._path + NEW, CHUNK_HEADER_BYTES + self.row_count * CHUNK_ROW.itemsize, body)
        self._disk.write(self._path + NEW, self._records_at + self.records_bytes, records)
        self._index_sum.update(body)
        self._records_sum.update(records)
        self.row_count += len(rows)
        self.records_bytes += len(records)

    def sync(self) -> None:
        """Makes durable what was written so far. May run on another thread than `add`."""
        self._disk.sync(self._path + NEW)

    def finish(self) -> None:
        """Makes the chunk whole and durable, under its name."""
        assert self.row_count == self._row_count, f"{self.row_count} rows were written, {self._row_count} announced"
        head = CHUNK_HEAD.pack(
            MAGIC, VERSION, self.row_count, self._index_sum.intdigest(), self._records_sum.intdigest(),
            self._records_at + self.records_bytes, self._due_low_ms, self._due_high_ms,
        )  # fmt: skip
        self._disk.write(self._path + NEW, 0, head, CHECKSUM.pack(xxh3_64_intdigest(head)))
        self.sync()
        reach("chunk.synced")
        self._disk.rename(self._path + NEW, self._path)
        self._disk.sync_folder(FOLDER)
        reach("chunk.written")

    def abandon(self) -> None:
        self._disk.remove(self._path + NEW)


def remove_unfinished(disk: Disk) -> None:
    """Removes unfinished files of writers that died. For the one process that writes chunks, before it writes any."""
    for name in disk.list(FOLDER):
        if name.endswith(NEW):
            disk.remove(path_of(name))


def epoch_of(name: str) -> int | None:
    """Returns the epoch in the name of an uploaded chunk; None for any other file."""
    match = _UPLOADED.fullmatch(name)
    return int(match[1]) if match and not name.endswith(NEW) else None


def path_of(name: str) -> str:
    return f"{FOLDER}/{name}"


def index_of(data: np.ndarray) -> np.ndarray:
    """The rows in the bytes of a chunk whose header has been checked. In place: they cost no memory of ours."""
    row_count = Head(*CHUNK_HEAD.unpack_from(data.data)[2:]).row_count
    return data[CHUNK_HEADER_BYTES : CHUNK_HEADER_BYTES + row_count * CHUNK_ROW.itemsize].view(CHUNK_ROW)


class Chunk:
    """An open chunk. Opening reads the header only; `verify` reads all of it."""

    def __init__(self, disk: Disk, name: str) -> None:
        self.name = name
        size = disk.size(path_of(name))
        if size < CHUNK_HEADER_BYTES:
            raise CorruptChunk(f"{path_of(name)} is missing or cut short ({size} bytes)")
        self._bytes = disk.array(path_of(name))
        data = self._bytes[:CHUNK_HEADER_BYTES].tobytes()
        magic, version, *fields = CHUNK_HEAD.unpack_from(data)
        (head_sum,) = CHECKSUM.unpack_from(data, CHUNK_HEAD.size)
        if magic != MAGIC or head_sum != xxh3_64_intdigest(data[: CHUNK_HEAD.size]):
            raise CorruptChunk(f"{path_of(self.name)}: the header is damaged")
        if version != VERSION:
            raise CorruptChunk(f"{path_of(self.name)}: version {version}, this program knows {VERSION}")
        head = Head(*fields)
        if not 0 <= head.row_count <= (size - CHUNK_HEADER_BYTES) // CHUNK_ROW.itemsize:
            raise CorruptChunk(f"{path_of(self.name)}: {head.row_count} rows do not fit into {size} bytes")
        if head.file_bytes != size:
            raise CorruptChunk(f"{path_of(self.name)}: {size} bytes, its header says {head.file_bytes}")
        self.head = head
        self.index = index_of(self._bytes)

    def read(self, position: int, size: int) -> bytes:
        return self._bytes[position : position + size].tobytes()

    def verify(self) -> None:
        """Reads everything. Raises CorruptChunk for sums that do not match, rows out of order or out of bounds."""
        index, place = self.index, path_of(self.name)
        records_at = CHUNK_HEADER_BYTES + self.head.row_count * CHUNK_ROW.itemsize
        if xxh3_64_intdigest(self._bytes[CHUNK_HEADER_BYTES:records_at].data) != self.head.index_sum:
            raise CorruptChunk(f"{place}: the checksum of the index does not match")
        if xxh3_64_intdigest(self._bytes[records_at:].data) != self.head.records_sum:
            raise CorruptChunk(f"{place}: the checksum of the records does not match")
        due, arrival = index["due"], index["arrival"]
        dues = (int(due[0]), int(due[-1])) if len(due) else (0, 0)
        if dues != (self.head.due_low_ms, self.head.due_high_ms):
            raise CorruptChunk(f"{place}: the rows are due from {dues[0]} to {dues[1]}, the header says otherwise")
        later = (due[1:] > due[:-1]) | ((due[1:] == due[:-1]) & (arrival[1:] >= arrival[:-1]))
        if not later.all():
            raise CorruptChunk(f"{place}: row {int(np.flatnonzero(~later)[0]) + 1} is not in (due, arrival) order")
        ends = index["position"] + index["size"].astype(np.int64)
        if len(index) and (index["position"].min() < records_at or ends.max() > self.head.file_bytes):
            raise CorruptChunk(f"{place}: a row points outside the records")


class Records:
    """Reads a record by its offset, wherever it lies: in the log or in a staged chunk."""

    def __init__(self, read_log: Callable[[int, int], bytes], chunks: "Chunks") -> None:
        self._read_log, self._chunks = read_log, chunks

    def read(self, offset: int, size: int) -> bytes:
        """The bytes of a record; empty where its segment or chunk is gone."""
        return self._read_log(offset, size) if offset < CHUNK_BIT else self._chunks.read(offset, size)


class Chunks:
    """The staged chunks, by the offset range that staging gave each. An open chunk holds a file descriptor: it stays
    open while its rows wait, because its run refers to it; others are opened again when they are read.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._bases: list[int] = []
        self._names: dict[int, str] = {}
        self._bytes: dict[int, int] = {}
        self._open: dict[int, Chunk] = {}  # those read last
        self._has_removed = False  # names whose removal is not durable yet

    def open(self, name: str) -> Chunk:
        return Chunk(self._disk, name)

    def add(self, base: int, chunk: Chunk) -> None:
        self._bases.append(base)
        self._names[base] = chunk.name
        self._bytes[base] = chunk.head.file_bytes
        self._keep_open(base, chunk)

    def _keep_open(self, base: int, chunk: Chunk) -> None:
        while len(self._open) >= OPEN_MAX:
            del self._open[next(iter(self._open))]
        self._open[base] = chunk

    def read(self, offset: int, size: int) -> bytes:
        """The bytes of a record; empty where its chunk is gone."""
        base = self.base_of(offset)
        chunk = self.get(base) if base is not None else None
        return chunk.read(offset - base, size) if chunk is not None and base is not None else b""

    def get(self, base: int) -> Chunk | None:
        """A staged chunk by where its offsets begin; None where it is gone."""
        chunk = self._open.get(base)
        if chunk is None and base in self._names:
            chunk = self.open(self._names[base])
            self._keep_open(base, chunk)
        return chunk

    def holds(self, offset: int) -> bool:
        return self.base_of(offset) is not None

    def base_of(self, offset: int) -> int | None:
        index = bisect_right(self._bases, offset) - 1
        if index < 0 or offset - self._bases[index] >= self._bytes[self._bases[index]]:
            return None
        return self._bases[index]

    def names(self) -> set[str]:
        return set(self._names.values())

    def name_of(self, base: int) -> str:
        return self._names[base]

    def bases(self) -> list[int]:
        return list(self._bases)

    def all(self) -> list[tuple[int, str, int]]:
        """(where its offsets begin, name, bytes) of each, ascending."""
        return [(base, self._names[base], self._bytes[base]) for base in self._bases]

    def close(self) -> None:
        self._open.clear()

    def sync_folder(self) -> None:
        """Makes removals durable, also that of the last chunk. There may never have been a folder."""
        if self._has_removed or self._disk.list(FOLDER):
            self._disk.sync_folder(FOLDER)
            self._has_removed = False

    def remove(self, base: int) -> None:
        """For retention: the caller has made sure that nothing needs it."""
        reach("chunk.remove")
        self._disk.remove(path_of(self._names[base]))
        self._has_removed = True
        del self._names[base], self._bytes[base]
        self._open.pop(base, None)
        self._bases.remove(base)

"""The index: where the messages of a key lie in the log.

    row    layout.INDEX: hash and offset         one per key of a message
    block  16,384 rows, sorted by hash           blocks stand in the order of arrival

Every message that is applied gives a row for its unique key and one for each of its user keys. The newest rows gather
in memory, as they come; a full block of them is sorted and appended to the files. So memory is bounded, nothing is ever
rewritten, and applying a message costs some bytes.

Hashes are uniform: in a sorted block a hash stands near (hash / 2^64 * rows), and a lookup reads a page or two of each
block. All blocks of a file are looked into at once, by columns. A hash only points at a record: the caller
compares the key in the record itself.
"""

from collections.abc import Iterator, Sequence
from math import isqrt
from typing import Any

import numpy as np

from postdate.storage.disk import Disk
from postdate.storage.layout import INDEX, INDEX_STRUCT, INDEX_TWO_STRUCT
from postdate.storage.rows import Rows

FOLDER = "index"
BLOCK_ROWS_MAX = 16_384  # sorting them takes half a millisecond, which a fire may have to wait
KEYS_MAX = 64  # user keys of one message that are indexed: reading 16,000 of one letter each would hold up a fire


def block_rows(file_rows: int) -> int:
    """Rows of a block in a folder whose other files hold `file_rows` rows; like those, fixed for a folder's life."""
    return min(BLOCK_ROWS_MAX, file_rows)


def index_file_rows(file_rows: int) -> int:
    """Rows of a file of the index: whole blocks."""
    return file_rows // block_rows(file_rows) * block_rows(file_rows)


class Index:
    """Rows come in by `add` and `extend`, in the order of arrival; `find` gives the offsets of a hash."""

    def __init__(self, disk: Disk, file_rows: int, length: int = 0) -> None:
        self._block_rows = block_rows(file_rows)
        self._block_bytes = self._block_rows * INDEX.itemsize
        self._file_rows = index_file_rows(file_rows)
        self.rows = Rows(disk, FOLDER, INDEX, self._file_rows, 1, length)
        self._tail = bytearray()  # fewer rows than a block has, as they came
        self._maps: dict[int, np.ndarray] = {}  # of full files, by the row after their last one

    # -- in -----------------------------------------------------------------------------------------------------

    def add(self, unique_hash: int, first_hash: int, offset: int) -> None:
        """Adds the keys of one message; 0 is none. The hot path of applying."""
        if unique_hash and first_hash:
            self._tail += INDEX_TWO_STRUCT.pack(unique_hash, offset, first_hash, offset)
        else:
            self._tail += INDEX_STRUCT.pack(unique_hash or first_hash, offset)
        if len(self._tail) >= self._block_bytes:
            self._store_blocks()

    def add_others(self, hashes: Sequence[int], offset: int) -> None:
        """Adds the keys of a message after its first one."""
        for hashed in hashes:
            self._tail += INDEX_STRUCT.pack(hashed, offset)
        self._store_blocks()

    def extend(self, hashes: np.ndarray, offsets: np.ndarray) -> None:
        """Adds many rows, in the order in which `add` would have made them."""
        rows = np.empty(len(hashes), INDEX)
        rows["hash"], rows["offset"] = hashes, offsets
        self._tail += rows.tobytes()
        self._store_blocks()

    def _store_blocks(self) -> None:
        while len(self._tail) >= self._block_bytes:
            self.rows.extend(_sorted(bytes(self._tail[: self._block_bytes])))
            del self._tail[: self._block_bytes]

    # -- out ----------------------------------------------------------------------------------------------------

    def find(self, hashed: int, begin: int = 0) -> Iterator[np.ndarray]:
        """The offsets of a hash, newest first, in steps: what is in memory, then file by file. A step may give none.
        Blocks that know only of records before offset `begin` are not searched.

        What is added between two steps is not searched. Raises CorruptQueue where a file is missing rows.
        """
        wanted, stop = np.uint64(hashed), self.rows.length
        tail = np.frombuffer(bytes(self._tail), INDEX)
        yield tail["offset"][tail["hash"] == wanted][::-1]
        while stop > self._first():
            start = (stop - 1) // self._file_rows * self._file_rows
            # The blocks of these rows lie in one file.
            rows = self._map(max(start, self._first()), stop)
            # Whichever row of a block is read, it came after all rows of the block before.
            passed = max(int(np.searchsorted(rows["offset"][:: self._block_rows], begin)) - 1, 0)
            rows = rows[passed * self._block_rows :]
            hashes = rows["hash"]
            found = [np.empty(0, np.int64)]
            for first in reversed(_find_firsts(hashes, wanted, self._block_rows)):
                block_end = (first // self._block_rows + 1) * self._block_rows
                last = int(np.searchsorted(hashes[first:block_end], wanted, "right"))
                found.append(rows["offset"][first : first + last][::-1])
            yield np.concatenate(found)
            if passed:
                return
            stop = start

    def _map(self, start: int, stop: int) -> np.ndarray:
        """Rows of one file. A file that is full stays mapped, as mapping costs more than looking into it."""
        is_full = stop % self._file_rows == 0 and stop <= self.rows.stored
        found = self._maps.get(stop) if is_full else None
        if found is None or len(found) != stop - start:
            found = self.rows.map(start, stop)
            if is_full:
                self._maps[stop] = found
        return found

    def find_many(self, hashes: Sequence[int]) -> dict[int, list[int]]:
        """The offsets of many hashes, in one pass over all blocks: each is searched once for all hashes.
        Raises CorruptQueue where a file is missing rows.
        """
        wanted = np.array(sorted(set(hashes)), np.uint64)
        found: dict[int, list[int]] = {hashed: [] for hashed in wanted.tolist()}
        for rows in self._pieces():
            block_hashes = np.ascontiguousarray(rows["hash"])
            lows, highs = (np.searchsorted(block_hashes, wanted, side) for side in ("left", "right"))
            for place in np.flatnonzero(highs > lows).tolist():
                found[int(wanted[place])] += rows["offset"][lows[place] : highs[place]].tolist()
        return found

    def _pieces(self) -> Iterator[np.ndarray]:
        """All rows, in pieces that are sorted by hash."""
        for start in range(self._first(), self.rows.length, self._block_rows):
            yield self.rows.map(start, start + self._block_rows)
        yield _sorted(bytes(self._tail))

    def _first(self) -> int:
        """The first row of the first whole block that is there."""
        return -(-self.rows.first // self._block_rows) * self._block_rows

    @property
    def row_count(self) -> int:
        """Rows that `find` searches."""
        return self.rows.length - self.rows.first + len(self._tail) // INDEX.itemsize

    @property
    def begin(self) -> int:
        """The index has every key of every message from this offset of the log on; retention removed older ones."""
        if self.rows.first == 0:
            return 0
        first = self._first()
        rows = self.rows.read(first, first + self._block_rows)
        # The message at the edge may have had a row in the block before.
        offsets = rows["offset"] if len(rows) else np.frombuffer(bytes(self._tail), INDEX)["offset"]
        return int(offsets.min()) + 1 if len(offsets) else 0

    # -- snapshots and retention --------------------------------------------------------------------------------

    def tail(self) -> bytes:
        """The rows in memory, as they came."""
        return bytes(self._tail)

    def load(self, state: dict[str, Any], tail: bytes) -> None:
        self.rows.first = state["first"]
        self._tail = bytearray(tail)

    def state(self) -> dict[str, int]:
        return {"length": self.rows.length, "first": self.rows.first}

    def forget(self, before: int) -> None:
        """Forgets the blocks at the beginning that only know of records before this offset of the log."""
        first = self._first()
        while first < self.rows.length:
            if self.rows.read(first, first + self._block_rows)["offset"].max() >= before:
                break
            first += self._block_rows
        self.rows.forget(min(first, self.rows.length))
        self._maps = {stop: rows for stop, rows in self._maps.items() if stop > self.rows.first}


def _sorted(data: bytes) -> np.ndarray:
    """A block by hash, rows of one hash as they came: the same bytes on every machine."""
    rows = np.frombuffer(data, INDEX)
    order = _order(np.ascontiguousarray(rows["hash"]))
    block = np.empty(len(rows), INDEX)
    block["hash"], block["offset"] = rows["hash"][order], rows["offset"][order]
    return block


def _order(hashes: np.ndarray) -> np.ndarray:
    """The places of the hashes in ascending order, equal ones as they came.

    numpy sorts 16 bits by radix, so the upper 32 in two passes: for nearly every block that is all, in a third of the
    time.
    """
    upper = (hashes >> np.uint64(32)).astype(np.uint32)
    order = np.argsort(upper.astype(np.uint16), kind="stable")
    order = order[np.argsort((upper >> np.uint32(16)).astype(np.uint16)[order], kind="stable")]
    in_order = hashes[order]
    return order if (in_order[1:] >= in_order[:-1]).all() else np.argsort(hashes, kind="stable")


def _find_firsts(hashes: np.ndarray, wanted: np.uint64, size: int) -> list[int]:
    """The places of the first hashes that equal the wanted one, in each sorted block of `size` that has it.

    A uniform hash stands near a place that is the same in all blocks. The rows around it are compared in all of them at
    once, which takes a tenth of a millisecond for 64 blocks; in blocks where it may stand elsewhere it is searched for.
    """
    blocks = hashes.reshape(-1, size)
    near, spread = int(wanted) * size >> 64, 2 * isqrt(size)  # four standard deviations, at most
    low, high = max(near - spread, 0), min(near + spread, size)
    window = blocks[:, low:high]
    may_be_before = (window[:, 0] >= wanted) & (low > 0)
    is_elsewhere = may_be_before | ((window[:, -1] < wanted) & (high < size))
    equal = window == wanted
    found = []
    for block in np.flatnonzero(equal.any(axis=1) | is_elsewhere).tolist():
        if is_elsewhere[block]:
            place = int(np.searchsorted(blocks[block], wanted))
            if place < size and blocks[block, place] == wanted:
                found.append(block * size + place)
        else:
            found.append(block * size + low + int(equal[block].argmax()))
    return found

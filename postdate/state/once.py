"""Once: under which ids messages are stored, until the window of each id is over. A table of the fold.

    row    layout.ONCE_ROW: hash, window, place     one per message that was sent with an id, on disk, as they came
    slot   32 bits of hash, 32 of the row's number  finds the row of a hash, in RAM: 8 bytes, and as many free ones

A message that is applied with an id gives a row, and its record is held in the log as long as the row is kept: the
answer to a second send is made of the row and the record. Rows leave from the front when their window is over, some
with each batch, so that no fire waits for many. Behind a row with a longer window others may be over, too: `until_ms`
decides, not whether a row is kept. Equal hashes are only a hint: the record decides.

The slots follow from the rows, and are made again when a snapshot is loaded.
"""

from typing import Any, NamedTuple

import numpy as np

from postdate.arrival import NEVER
from postdate.storage.disk import Disk
from postdate.storage.layout import ONCE_ROW
from postdate.storage.rows import Rows

FOLDER = "once"
FORGOTTEN_PER_BATCH = 32  # rows that leave with a batch, at most, and two for each row of it
NO_IDS = {"length": 0, "first": 0, "gone": 0}  # the state without any
_LOW = 0xFFFF_FFFF
_SLOTS_MIN = 1 << 10


class StoredOnce(NamedTuple):
    """A row."""

    hashed: int
    size: int
    until_ms: int
    offset: int
    due_at_ms: int
    queue_offset: int


class Once:
    """Rows come in by `add`; `find` gives those of a hash. Memory is set apart for `ids_max` rows, and used as they
    come; with more rows than that it grows.
    """

    def __init__(self, disk: Disk, file_rows: int, tail_rows: int, ids_max: int) -> None:
        self.rows = Rows(disk, FOLDER, ONCE_ROW, file_rows, tail_rows)
        self.first = 0  # rows before it have left
        self.next_until_ms = NEVER  # when the window of the first row is over
        self._slots = _Slots(ids_max)

    @property
    def count(self) -> int:
        """How many rows are kept."""
        return self.rows.length - self.first

    # -- in and out ---------------------------------------------------------------------------------------------

    def add(self, hashed: int, until_ms: int, row: bytes) -> None:
        """Adds a row of this hash and window."""
        self._make_room(1, until_ms)
        self._slots.add(hashed, self.rows.length)
        self.rows.push(row)

    def extend(self, rows: np.ndarray) -> None:
        """Adds many rows."""
        self._make_room(len(rows), int(rows["until_ms"][0]))
        self._slots.extend(rows["hash"].tolist(), self.rows.length)
        self.rows.extend(rows)

    def _make_room(self, count: int, until_ms: int) -> None:
        """Before rows are added, the first of them with this window."""
        if self.first == self.rows.length:
            self.next_until_ms = until_ms
        if self.rows.length - self.first + count > self._slots.rows_max:
            self._index(2 * (self.count + count))

    def forget_passed(self, at_ms: int, row_count: int) -> list[int]:
        """Lets rows leave whose window is over; `row_count` rows are in the batch that is applied. Returns the offsets
        of their records.
        """
        rows = self.rows.read(self.first, self.first + FORGOTTEN_PER_BATCH + 2 * row_count)
        is_left = rows["until_ms"] > at_ms
        rows = rows[: int(is_left.argmax())] if is_left.any() else rows
        for hashed in rows["hash"].tolist():
            self._slots.drop(hashed, self.first)
            self.first += 1
        self._note_first()
        offsets: list[int] = rows["offset"].tolist()
        return offsets

    def find(self, hashed: int) -> list[StoredOnce]:
        """Returns the rows of a hash that are kept."""
        lows = self._slots.find(hashed)
        if not lows:  # nearly always
            return []
        numbers = [self.first + ((low - self.first) & _LOW) for low in lows]
        return [StoredOnce(*self.rows.read_one(number)[0].item()) for number in numbers]

    def is_passed(self, count: int, at_ms: int) -> bool:
        """Whether there are `count` rows and the windows of the first ones, as many, are over."""
        return count <= self.count and bool((self.rows.read(self.first, self.first + count)["until_ms"] <= at_ms).all())

    def _note_first(self) -> None:
        until_ms = self.rows.read(self.first, self.first + 1)["until_ms"].tolist()
        self.next_until_ms = until_ms[0] if until_ms else NEVER

    # -- snapshots ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """`gone` is what retention has let go; the others follow from the log."""
        return {"length": self.rows.length, "first": self.first, "gone": self.rows.first}

    def load(self, state: dict[str, Any]) -> None:
        """Takes the state of a snapshot; `index` follows when the files are checked."""
        self.rows.resume(state["length"])
        self.first, self.rows.first = state["first"], state["gone"]

    def index(self) -> None:
        self._index(self._slots.rows_max)
        self._note_first()

    def _index(self, rows_max: int) -> None:
        self._slots = _Slots(max(rows_max, self.count))
        self._slots.fill(self.rows.read(self.first, self.rows.length)["hash"], self.first)


class _Slots:
    """Row numbers by hash: open addressing with linear probing, half of it free. A slot of 0 is free. numpy has the
    memory zeroed by the system, which gives a page when it is first written; a memoryview reads one slot in a third of
    the time that numpy takes.
    """

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        size = _SLOTS_MIN
        while size < 2 * rows_max:
            size *= 2
        self._array, self._mask = np.zeros(size, np.uint64), size - 1
        self._slots = self._array.data

    def add(self, hashed: int, row: int) -> None:
        slots, mask = self._slots, self._mask
        place = hashed & mask
        while slots[place]:
            place = place + 1 & mask
        slots[place] = hashed << 32 | row & _LOW

    def extend(self, hashes: list[int], first: int) -> None:
        """Adds many rows, numbered from `first` on."""
        slots, mask, row = self._slots, self._mask, first
        for hashed in hashes:
            place = hashed & mask
            while slots[place]:
                place = place + 1 & mask
            slots[place] = hashed << 32 | row & _LOW
            row += 1

    def find(self, hashed: int) -> list[int]:
        """Returns the lower 32 bits of the numbers of the rows of a hash."""
        slots, mask = self._slots, self._mask
        place, found = hashed & mask, []
        while slot := slots[place]:
            if slot >> 32 == hashed:
                found.append(slot & _LOW)
            place = place + 1 & mask
        return found

    def drop(self, hashed: int, row: int) -> None:
        slots, mask = self._slots, self._mask
        wanted = hashed << 32 | row & _LOW
        hole = hashed & mask
        while slots[hole] != wanted:
            assert slots[hole], f"row {row} of hash {hashed:08x} has no slot"
            hole = hole + 1 & mask
        # What follows moves up, unless it would come before the place where its search begins.
        place = hole + 1 & mask
        while slot := slots[place]:
            if place - (slot >> 32) & mask >= place - hole & mask:
                slots[hole], hole = slot, place
            place = place + 1 & mask
        slots[hole] = 0

    def fill(self, hashes: np.ndarray, first: int) -> None:
        """Adds many rows, numbered from `first` on, to slots that are all free."""
        rows = np.arange(first, first + len(hashes), dtype=np.uint64) & np.uint64(_LOW)
        home = hashes.astype(np.int64) & self._mask
        order = np.argsort(home, kind="stable")
        slots = (hashes.astype(np.uint64) << np.uint64(32) | rows)[order]
        # Each goes to the place where its search begins, or behind the one before it.
        count = np.arange(len(slots))
        places = np.maximum.accumulate(home[order] - count) + count if len(slots) else count
        is_inside = places <= self._mask
        self._array[places[is_inside]] = slots[is_inside]
        for slot in slots[~is_inside].tolist():
            self.add(slot >> 32, slot & _LOW)

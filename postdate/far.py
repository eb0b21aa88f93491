"""The far queue: what is due later than the lead, in the order in which it came, and what Spark has of it.

    row  | arrival int64 | due int64 | key hashes 2 x uint64 | size | queue | tag hash | kind | level |     48 bytes

A row holds all that a rescue or Spark's index needs, so that neither reads a record to find out. Rows before `taken` are
Spark's: those due at or before the horizon have been staged, the others wait in the table. A rescue is remembered as
(low, high, until): messages that arrived in [low, high) and are due at or before `until` went into the wheel from here,
and a stage that brings one of them again must drop it. It can be forgotten when the horizon has passed `until` and Spark
has taken every row before `high`: only then can no stage bring one.

The smallest due of each block of rows is kept, so that asking what is due soon costs nothing.
"""

import struct
from typing import Any, NamedTuple

import numpy as np

from postdate.log.batch import CANCEL
from postdate.log.disk import Disk
from postdate.log.rows import Rows

FAR = np.dtype(
    [
        ("arrival", "<i8"),  # log offset of the record
        ("due", "<i8"),
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
        ("size", "<u4"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
        ("kind", "u1"),
        ("level", "u1"),
        ("reserved", "<u2"),
    ]
)
FAR_STRUCT = struct.Struct("<qqQQIiiBBH")
assert FAR_STRUCT.size == FAR.itemsize == 48
BLOCK_ROWS_DEFAULT = 65_536
# A cancel is rescued only to let its segment go, so it waits for the company of others.
CANCEL_GRACE_MS = 600_000
NEVER = (1 << 63) - 1


class Range(NamedTuple):
    """Offsets of the log, from start to before stop."""

    start: int
    stop: int


class Rescue(NamedTuple):
    low: int
    high: int
    until: int

    def covers(self, arrival: np.ndarray, due: np.ndarray) -> np.ndarray:
        mask: np.ndarray = (arrival >= self.low) & (arrival < self.high) & (due <= self.until)
        return mask


class Far:
    """The rows, Spark's place in them, the rescues that are remembered."""

    def __init__(
        self, disk: Disk, file_rows: int, tail_rows: int, length: int = 0, block_rows: int = BLOCK_ROWS_DEFAULT
    ) -> None:
        self.rows = Rows(disk, "far", FAR, file_rows, tail_rows, length)
        self._block_rows = block_rows
        self.taken = 0
        self.horizon_at_ms = 0
        self.epoch = 0  # of the pipeline that may stage; 0 = there never was one
        self.rescues: list[Rescue] = []
        self._minima: list[int] = []  # per block, a lower bound of the dues that wait in it
        self._edge_minimum = NEVER  # of the untaken rows in the block where `taken` lies
        self._cancel_dues: dict[int, tuple[int, int]] = {}  # per block that holds cancels, their smallest and largest due

    @property
    def length(self) -> int:
        return self.rows.length

    # -- in -----------------------------------------------------------------------------------------------------

    def push(self, row: bytes, due: int) -> None:
        """A message."""
        self._note(self.rows.length, due)
        self.rows.push(row)

    def push_cancel(self, row: bytes, due: int) -> None:
        self._note(self.rows.length, due + CANCEL_GRACE_MS)
        block = self.rows.length // self._block_rows
        low, high = self._cancel_dues.get(block, (due, due))
        self._cancel_dues[block] = (min(low, due), max(high, due))
        self.rows.push(row)

    def taken_cancels(self, due_low: int, due_high: int) -> np.ndarray:
        """Cancels among the taken rows, with low <= due <= high."""
        found = [np.empty(0, FAR)]
        for block, (low, high) in self._cancel_dues.items():
            first = block * self._block_rows
            if low <= due_high and high >= due_low and first < self.taken:
                rows = self.rows.read(max(first, self.rows.first), min(first + self._block_rows, self.taken))
                found.append(rows[(rows["kind"] == CANCEL) & (rows["due"] >= due_low) & (rows["due"] <= due_high)])
        return np.concatenate(found)

    def extend(self, rows: np.ndarray) -> None:
        for start in range(0, len(rows), self._block_rows):
            self._extend_block(rows[start : start + self._block_rows])

    def _extend_block(self, rows: np.ndarray) -> None:
        first = self.rows.length
        room = self._block_rows - first % self._block_rows
        self._note(first, int(rows["due"][:room].min()))
        if len(rows) > room:
            self._note(first + room, int(rows["due"][room:].min()))
        self.rows.extend(rows)

    def _note(self, offset: int, due: int) -> None:
        block = offset // self._block_rows
        if block == len(self._minima):
            self._minima.append(NEVER)
        self._minima[block] = min(self._minima[block], due)
        if block == self.taken // self._block_rows:
            self._edge_minimum = min(self._edge_minimum, due)

    # -- what waits ---------------------------------------------------------------------------------------------

    def earliest(self, *, untaken_only: bool) -> int:
        """The smallest due that a rescue would find, or less; NEVER where nothing waits."""
        if not untaken_only:
            return min(self._minima, default=NEVER)
        edge = self.taken // self._block_rows
        return min(self._edge_minimum, min(self._minima[edge + 1 :], default=NEVER))

    def waits(self, rows: np.ndarray, first: int) -> np.ndarray:
        """Which of the rows, the first of which is number `first`, are neither staged nor rescued."""
        numbers = np.arange(first, first + len(rows))
        unstaged = (numbers >= self.taken) | (rows["due"] > self.horizon_at_ms)
        waiting: np.ndarray = unstaged & ~self.rescued(rows["arrival"], rows["due"])
        return waiting

    def rescued(self, arrival: np.ndarray, due: np.ndarray) -> np.ndarray:
        mask = np.zeros(len(due), np.bool_)
        for rescue in self.rescues:
            mask |= rescue.covers(arrival, due)
        return mask

    def plan_rescue(self, low: int, present: list[Range], until: int, blocks_max: int, room: int) -> list[Rescue]:
        """Which rescues to ask for now: at most so many blocks, at most `room` rows, the earliest first.

        `present` are the ranges of the log that are there: a row outside them has no record any more. Rows that arrived
        before `low` are not wanted. Where the answer is none, `earliest` is later than before or there is no room.
        """
        first = self.rows.search("arrival", max(low, present[0].start), "left")
        blocks = [b for b in range(first // self._block_rows, len(self._minima)) if self._minima[b] <= until][
            :blocks_max
        ]
        if not blocks:
            return []
        high = self._block_end_arrival(blocks[-1])
        ranges = [Range(max(r.start, low), min(r.stop, high)) for r in present if r.stop > low and r.start < high]
        rows = np.concatenate([self._waiting_in(block, 0, until) for block in blocks])
        candidates = rows[_within(rows["arrival"], ranges)]
        if not len(candidates):
            self._refresh(blocks, present)
            return []
        return _rescues(candidates, ranges, until, room)

    def _waiting_in(self, block: int, low: int, until: int) -> np.ndarray:
        first = block * self._block_rows
        rows = self.rows.read(first, first + self._block_rows)
        return rows[self.waits(rows, first) & (rows["arrival"] >= low) & (rows["due"] <= until)]

    def _block_end_arrival(self, block: int) -> int:
        """An arrival behind every row of the block and at or before every row after it."""
        end = min((block + 1) * self._block_rows, self.rows.length)
        return int(self.rows.read(end - 1, end)["arrival"][0]) + 1

    def rescue(self, rescue: Rescue) -> np.ndarray:
        """Gives the rows of a rescue that still wait and remembers it."""
        first = self.rows.search("arrival", rescue.low, "left")
        stop = self.rows.search("arrival", rescue.high, "left")
        blocks = [
            b for b in range(first // self._block_rows, -(-stop // self._block_rows)) if self._minima[b] <= rescue.until
        ]
        rows = [self._waiting_in(block, rescue.low, rescue.until) for block in blocks]
        chosen = np.concatenate(rows) if rows else np.empty(0, FAR)
        chosen = chosen[chosen["arrival"] < rescue.high]
        self._remember(rescue)
        self._refresh(blocks, [Range(0, NEVER)])
        return chosen

    def _remember(self, rescue: Rescue) -> None:
        kept = [r for r in self.rescues if r.low < rescue.low or r.high > rescue.high or r.until > rescue.until]
        if self.epoch == 0:
            # Nothing was ever taken, and what arrived before `low` has no record left: no stage can bring it.
            kept = [r for r in kept if r.high > rescue.low and (r.high > rescue.high or r.until > rescue.until)]
        self.rescues = [*kept, rescue]

    def _refresh(self, blocks: list[int], present: list[Range]) -> None:
        """Looks again for the smallest due that waits in these blocks."""
        edge = self.taken // self._block_rows
        for block in blocks:
            first = block * self._block_rows
            rows = self.rows.read(first, first + self._block_rows)
            waiting = self.waits(rows, first) & _within(rows["arrival"], present)
            self._minima[block] = _smallest(rows[waiting])
            if block == edge:
                self._edge_minimum = _smallest(rows[waiting & (np.arange(first, first + len(rows)) >= self.taken)])

    def find_untaken(self, due: int, column: str, key_hash: int, before: int) -> np.ndarray:
        """Untaken rows before number `before` of that due and key hash that are not in the wheel."""
        found = []
        for block in range(self.taken // self._block_rows, -(-before // self._block_rows)):
            if self._minima[block] <= due:
                first = max(block * self._block_rows, self.taken)
                rows = self.rows.read(first, min((block + 1) * self._block_rows, before))
                found.append(
                    rows[(rows["due"] == due) & (rows[column] == np.uint64(key_hash)) & self.waits(rows, first)]
                )
        return np.concatenate(found) if found else np.empty(0, FAR)

    # -- Spark's place ------------------------------------------------------------------------------------------

    def take(self, taken: int, horizon_at_ms: int) -> None:
        """Moves Spark's place and forgets the rescues that no later stage can meet."""
        self.taken, self.horizon_at_ms = taken, horizon_at_ms
        first_untaken = self.arrival_of(taken)
        self.rescues = [r for r in self.rescues if r.until > horizon_at_ms or r.high > first_untaken]
        block = taken // self._block_rows
        self._edge_minimum = NEVER
        if block < len(self._minima):
            rows = self.rows.read(taken, (block + 1) * self._block_rows)
            self._edge_minimum = _smallest(rows[self.waits(rows, taken)])

    def arrival_of(self, number: int) -> int:
        """The arrival of a row; NEVER where the queue ends before it."""
        rows = self.rows.read(number, number + 1)
        return int(rows["arrival"][0]) if len(rows) else NEVER

    def state(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "first": self.rows.first,
            "taken": self.taken,
            "horizon": self.horizon_at_ms,
            "epoch": self.epoch,
            "rescues": list(self.rescues),
            "minima": list(self._minima),
            "edge": self._edge_minimum,
            "cancels": [[block, low, high] for block, (low, high) in self._cancel_dues.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.rows.first = state["first"]
        self.taken, self.horizon_at_ms, self.epoch = state["taken"], state["horizon"], state["epoch"]
        self.rescues = [Rescue(*rescue) for rescue in state["rescues"]]
        self._minima, self._edge_minimum = list(state["minima"]), state["edge"]
        self._cancel_dues = {block: (low, high) for block, low, high in state["cancels"]}

    def drop(self, before: int) -> None:
        """Forgets rows before this one."""
        self.rows.drop(before)
        gone = [block for block in self._cancel_dues if (block + 1) * self._block_rows <= before]
        for block in gone:
            del self._cancel_dues[block]


def _smallest(rows: np.ndarray) -> int:
    """When the first of the rows is to be rescued."""
    return int((rows["due"] + CANCEL_GRACE_MS * (rows["kind"] == CANCEL)).min()) if len(rows) else NEVER


def _within(arrival: np.ndarray, ranges: list[Range]) -> np.ndarray:
    mask = np.zeros(len(arrival), np.bool_)
    for start, stop in ranges:
        mask |= (arrival >= start) & (arrival < stop)
    return mask


def _rescues(candidates: np.ndarray, ranges: list[Range], until: int, room: int) -> list[Rescue]:
    """Rescues for the `room` earliest candidates: all of the dues that fit wholly, and the first of the next one."""
    if room <= 0:
        return []
    if len(candidates) <= room:
        return _rescues_in(candidates, ranges, until)
    order = np.lexsort((candidates["arrival"], candidates["due"]))
    due, arrival = (int(candidates[name][order[room]]) for name in ("due", "arrival"))  # the first that does not fit
    before = [Range(start, min(stop, arrival)) for start, stop in ranges if start < arrival]
    return [
        *_rescues_in(candidates[candidates["due"] < due], ranges, due - 1),
        *_rescues_in(candidates[candidates["due"] == due], before, due),
    ]


def _rescues_in(candidates: np.ndarray, ranges: list[Range], until: int) -> list[Rescue]:
    return [Rescue(r.start, r.stop, until) for r in ranges if _within(candidates["arrival"], [r]).any()]

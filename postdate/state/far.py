"""The far queue: what is due later than the lead, in the order in which it came, and what Spark has of it.

    rows    0 ...            taken ...                  length
            |  Spark's         |  untaken                 |
            staged up to the horizon,
            then in the table

A row (layout.FAR) holds all that a rescue or Spark's index needs, so that neither reads a record to find out. Rows
before `taken` are Spark's: those due at or before the horizon have been staged, the others wait in the table.

A rescue is remembered as (low, high, until): messages that arrived in [low, high) and are due at or before `until` went
into the wheel from here, and a stage that brings one of them again must drop it. It can be forgotten when the horizon
has passed `until` and Spark has taken every row before `high`: only then can no stage bring one.

The smallest due of each block of rows is kept, so that asking what is due soon costs nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from postdate.arrival import NEVER
from postdate.storage.batch import CANCEL, MOVE
from postdate.storage.disk import Disk
from postdate.storage.layout import FAR
from postdate.storage.rows import Rows

_NONE = np.empty(0, FAR)
BLOCK_ROWS_DEFAULT = 65_536
# A cancel is rescued only to let its segment go, so it waits for the company of others.
CANCEL_GRACE_MS = 600_000
_PIECE_ROWS = 16_384  # 0.8 MB


class Range(NamedTuple):
    """Offsets of the log, from start to before stop."""

    start: int
    stop: int


class Rescue(NamedTuple):
    """Messages that arrived in [low, high) and are due at or before `until` went into the wheel from the far queue."""

    low: int
    high: int
    until: int


class Far:
    """The rows, Spark's place among them, and the rescues that are remembered."""

    def __init__(self, disk: Disk, file_rows: int, tail_rows: int, block_rows: int = BLOCK_ROWS_DEFAULT) -> None:
        self.rows = Rows(disk, "far", FAR, file_rows, tail_rows)
        self._block_rows = block_rows
        self.taken = 0
        self.horizon_at_ms = 0
        self.epoch = 0  # of the pipeline that may stage; 0 = there never was one
        self.table = ""  # where that pipeline keeps its table
        # Rows that came into the table, and those that a stage has taken out again: the table must hold the rest.
        self.rows_in = self.rows_out = 0
        self.rescues: list[Rescue] = []
        # Per block, lower bounds over the rows that wait in it: of their dues, and of when they want to be rescued.
        self._lows: list[int] = []
        self._wakes: list[int] = []
        self._wake: int | None = NEVER  # the smallest of the wakes; None where it must be looked for
        self._edge_wake = NEVER  # the same over the untaken rows of the block where `taken` lies
        self._cancel_dues: dict[int, tuple[int, int]] = {}  # per block with cancels, their smallest and largest due

    @property
    def in_table(self) -> int:
        """Rows, messages and cancels, that wait in Spark's table."""
        return max(0, self.rows_in - self.rows_out)

    @property
    def length(self) -> int:
        return self.rows.length

    @property
    def block_count(self) -> int:
        """Blocks of rows that are not gone."""
        return len(self._lows) - self.rows.first // self._block_rows

    # -- in -----------------------------------------------------------------------------------------------------

    def push(self, row: bytes, due: int) -> None:
        """Appends a message or the command of a job."""
        self._note(self.rows.length, due, due)
        self.rows.push(row)

    def push_cancel(self, row: bytes, due: int) -> None:
        """Appends a cancel, or a move, which takes one message away."""
        self._note(self.rows.length, due, due + CANCEL_GRACE_MS)
        block = self.rows.length // self._block_rows
        low, high = self._cancel_dues.get(block, (due, due))
        self._cancel_dues[block] = (min(low, due), max(high, due))
        self.rows.push(row)

    def find_cancels(self, due_low: int, due_high: int, stop: int) -> np.ndarray:
        """Cancels and moves among the rows before a number, with low <= due <= high."""
        found = [np.empty(0, FAR)]
        for block, (low, high) in self._cancel_dues.items():
            first = block * self._block_rows
            if low <= due_high and high >= due_low and first < stop:
                rows = self.rows.read(max(first, self.rows.first), min(first + self._block_rows, stop))
                found.append(rows[_takes_away(rows) & (rows["due"] >= due_low) & (rows["due"] <= due_high)])
        return np.concatenate(found)

    def extend(self, rows: np.ndarray) -> None:
        for start in range(0, len(rows), self._block_rows):
            self._extend_block(rows[start : start + self._block_rows])

    def _extend_block(self, rows: np.ndarray) -> None:
        first = self.rows.length
        room = self._block_rows - first % self._block_rows
        for start, part in ((first, rows[:room]), (first + room, rows[room:])):
            if len(part):
                low = int(part["due"].min())
                self._note(start, low, low)
        self.rows.extend(rows)

    def _note(self, number: int, due: int, wake: int) -> None:
        block = number // self._block_rows
        if block == len(self._lows):
            self._lows.append(NEVER)
            self._wakes.append(NEVER)
        self._lows[block] = min(self._lows[block], due)
        self._wakes[block] = min(self._wakes[block], wake)
        if self._wake is not None:
            self._wake = min(self._wake, wake)
        if block == self.taken // self._block_rows:
            self._edge_wake = min(self._edge_wake, wake)

    # -- what waits ---------------------------------------------------------------------------------------------

    def earliest(self, *, untaken_only: bool) -> int:
        """The smallest due that a rescue would find, or less; NEVER where nothing waits."""
        if not untaken_only:
            if self._wake is None:
                self._wake = min(self._wakes, default=NEVER)
            return self._wake
        edge = self.taken // self._block_rows
        return min(self._edge_wake, min(self._wakes[edge + 1 :], default=NEVER))

    def waits(self, rows: np.ndarray, first: int) -> np.ndarray:
        """Which of the rows, the first of which is number `first`, are neither staged nor rescued."""
        return self._wait(rows, np.arange(first, first + len(rows)))

    def _wait(self, rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        unstaged = (numbers >= self.taken) | (rows["due"] > self.horizon_at_ms)
        waiting: np.ndarray = unstaged & ~self.rescued(rows["arrival"], rows["due"])
        return waiting

    def untaken_pieces(self) -> Iterator[np.ndarray]:
        """The untaken rows that wait, block by block."""
        first = max(self.taken, self.rows.first)
        for block in range(first // self._block_rows, -(-self.rows.length // self._block_rows)):
            start, rows = self._block(block)
            waiting = self.waits(rows, start) & (np.arange(start, start + len(rows)) >= self.taken)
            yield rows[waiting]

    def pieces(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows start..stop-1 that are not gone, where they lie, in pieces that fit a processor's cache: of a million
        rows, three columns are wanted.
        """
        start = max(start, self.rows.first)
        while start < stop:
            end = min(stop, (start // _PIECE_ROWS + 1) * _PIECE_ROWS)
            rows = self.rows.map(start, end)
            yield rows
            start += len(rows)

    def rescued(self, arrival: np.ndarray, due: np.ndarray) -> np.ndarray:
        """Which of these a rescue has brought into the wheel."""
        return rescued_by(self.rescues, arrival, due)

    def plan_rescue(
        self, present: list[Range], until: int, blocks_max: int, room: int, *, untaken_only: bool
    ) -> list[Rescue]:
        """Which rescues to ask for now: at most `blocks_max` blocks, at most `room` rows, the earliest first.

        `present` are the ranges of the log that exist: a row outside them has no record any more. Where the answer is
        empty, `earliest` is later than before or there is no room.
        """
        low = self.arrival_of(self.taken) if untaken_only else 0
        first = (self.taken if untaken_only else self.rows.first) // self._block_rows
        blocks = [block for block in range(first, len(self._lows)) if self._lows[block] <= until][:blocks_max]
        if not blocks:
            return []
        # An arrival after every row of the last block and at or before every row of the next one.
        end = min((blocks[-1] + 1) * self._block_rows, self.rows.length)
        high = int(self.rows.read(end - 1, end)["arrival"][0]) + 1
        ranges = [Range(max(r.start, low), min(r.stop, high)) for r in present if r.stop > low and r.start < high]
        rows = np.concatenate([self._waiting_in(block, until) for block in blocks])
        candidates = rows[_within(rows["arrival"], ranges)]
        if not len(candidates):
            self._refresh(blocks, present)
            return []
        return _rescues(candidates, ranges, until, room)

    def _waiting_in(self, block: int, until: int) -> np.ndarray:
        first, rows = self._block(block)
        return rows[self.waits(rows, first) & (rows["due"] <= until)]

    def _block(self, block: int) -> tuple[int, np.ndarray]:
        """The rows of a block that are not gone, and the number of the first of them."""
        first = max(block * self._block_rows, self.rows.first)
        return first, self.rows.read(first, (block + 1) * self._block_rows)

    def rescue(self, rescue: Rescue, log_start: int) -> np.ndarray:
        """Returns the rows of a rescue that still wait, and remembers it. `log_start` is where the log began then."""
        first = self.rows.search("arrival", rescue.low, "left") // self._block_rows
        stop = -(-self.rows.search("arrival", rescue.high, "left") // self._block_rows)
        blocks = [block for block in range(first, stop) if self._lows[block] <= rescue.until]
        rows = [self._waiting_in(block, rescue.until) for block in blocks]
        waiting = np.concatenate([np.empty(0, FAR), *rows])
        chosen: np.ndarray = waiting[_within(waiting["arrival"], [Range(rescue.low, rescue.high)])]
        self.rescues = _overlaid(self.rescues, rescue)
        if self.epoch == 0 and log_start > 0:
            # Nothing was ever taken, so what has no record left was rescued: its segment would have been held.
            self.rescues = _overlaid(self.rescues, Rescue(0, log_start, NEVER))
        self._refresh(blocks, [Range(0, NEVER)])
        return chosen

    def _refresh(self, blocks: list[int], present: list[Range]) -> None:
        """Looks again for the smallest due that waits in these blocks."""
        self._wake = None
        for block in blocks:
            first, rows = self._block(block)
            waiting = self.waits(rows, first) & _within(rows["arrival"], present)
            self._lows[block] = int(rows["due"][waiting].min()) if waiting.any() else NEVER
            self._wakes[block] = _wake(rows, waiting)
            if block == self.taken // self._block_rows:
                self._edge_wake = _wake(rows, waiting & (np.arange(first, first + len(rows)) >= self.taken))

    def find_untaken(self, due: int, column: str, key_hash: int, before: int, start: int = 0) -> np.ndarray:
        """Untaken rows of that due and key hash that are not in the wheel, from number `start` to `before`."""
        start = max(start, self.taken, self.rows.first)
        if start >= before:
            return _NONE
        found = [_NONE]
        for block in range(start // self._block_rows, -(-before // self._block_rows)):
            first, stop = max(block * self._block_rows, start), min((block + 1) * self._block_rows, before)
            if self._lows[block] <= due and first < stop:
                rows = self.rows.read(first, stop)
                hits = np.flatnonzero((rows[column] == np.uint64(key_hash)) & (rows["due"] == due))
                found.append(rows[hits][self._wait(rows[hits], first + hits)])
        return np.concatenate(found)

    def untaken_at(self, arrivals: Iterable[int], due: int, column: str, key_hash: int, before: int) -> np.ndarray:
        """As `find_untaken`, of the rows of these arrivals alone. An arrival need not have a row."""
        found: list[np.ndarray] = []
        for arrival in arrivals:
            number = self.rows.search("arrival", arrival, "left")
            if self.taken <= number < before:
                row = self.rows.read(number, number + 1)
                is_meant = (row["arrival"] == arrival) & (row["due"] == due) & (row[column] == np.uint64(key_hash))
                found.append(row[is_meant & self.waits(row, number)])
        return np.concatenate(found) if len(found) > 1 else found[0] if found else _NONE

    # -- Spark's place ------------------------------------------------------------------------------------------

    def take(self, taken: int, horizon_at_ms: int) -> None:
        """Moves Spark's place and forgets the rescues that no later stage can meet."""
        self.taken, self.horizon_at_ms = taken, horizon_at_ms
        first_untaken = self.arrival_of(taken)
        self.rescues = [r for r in self.rescues if r.high > first_untaken or horizon_at_ms < r.until < NEVER]
        taken = max(taken, self.rows.first)
        rows = self.rows.read(taken, (taken // self._block_rows + 1) * self._block_rows)
        self._edge_wake = _wake(rows, self.waits(rows, taken))

    def arrival_of(self, number: int) -> int:
        """The arrival of a row, or of the first one that is not gone; NEVER where the queue ends before it."""
        number = max(number, self.rows.first)
        rows = self.rows.read(number, number + 1)
        return int(rows["arrival"][0]) if len(rows) else NEVER

    def state(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "first": self.rows.first,
            "taken": self.taken,
            "horizon": self.horizon_at_ms,
            "epoch": self.epoch,
            "table": self.table,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "rescues": list(self.rescues),
            "lows": list(self._lows),
            "wakes": list(self._wakes),
            "edge": self._edge_wake,
            "cancels": [[block, low, high] for block, (low, high) in self._cancel_dues.items()],
        }

    def load(self, state: dict[str, Any]) -> None:
        self.rows.first = state["first"]
        self.taken, self.horizon_at_ms, self.epoch = state["taken"], state["horizon"], state["epoch"]
        # A snapshot of an earlier version has none of these.
        self.table, self.rows_in, self.rows_out = (
            state.get(name, default) for name, default in (("table", ""), ("rows_in", 0), ("rows_out", 0))
        )
        self.rescues = [Rescue(*rescue) for rescue in state["rescues"]]
        self._lows, self._wakes, self._edge_wake = list(state["lows"]), list(state["wakes"]), state["edge"]
        self._wake = None
        self._cancel_dues = {block: (low, high) for block, low, high in state["cancels"]}

    def forget(self, before: int) -> None:
        """Forgets rows before this one."""
        self.rows.forget(before)
        self._wake = None
        for block in range(min(self.rows.first // self._block_rows, len(self._lows))):
            self._lows[block] = self._wakes[block] = NEVER
        gone = [block for block in self._cancel_dues if (block + 1) * self._block_rows <= before]
        for block in gone:
            del self._cancel_dues[block]


def rescued_by(rescues: Sequence[Rescue], arrival: np.ndarray, due: np.ndarray) -> np.ndarray:
    """Which of these one of the rescues, ascending and without overlap, has brought into the wheel."""
    if not rescues:
        return np.zeros(len(due), np.bool_)
    lows, highs, untils = np.array(rescues, np.int64).T
    place = np.searchsorted(lows, arrival, "right") - 1
    mask: np.ndarray = (place >= 0) & (arrival < highs[place]) & (due <= untils[place])
    return mask


def _takes_away(rows: np.ndarray) -> np.ndarray:
    """Which rows are no messages, but take some away."""
    mask: np.ndarray = (rows["kind"] == CANCEL) | (rows["kind"] == MOVE)
    return mask


def _wake(rows: np.ndarray, waiting: np.ndarray) -> int:
    """When the first of the rows that wait wants to be rescued, as far as its due goes."""
    due, is_cancel = rows["due"][waiting], _takes_away(rows)[waiting]
    messages, cancels = due[~is_cancel], due[is_cancel]
    wake = int(messages.min()) if len(messages) else NEVER
    return min(wake, int(cancels.min()) + CANCEL_GRACE_MS) if len(cancels) else wake


def _overlaid(rescues: list[Rescue], new: Rescue) -> list[Rescue]:
    """Adds a rescue to ranges that do not overlap and ascend; where an old one and the new one meet, the later `until`
    counts.
    """
    met = [r for r in rescues if r.high >= new.low and r.low <= new.high]
    bounds = sorted({new.low, new.high, *(bound for r in met for bound in (r.low, r.high))})
    pieces: list[Rescue] = []
    for low, high in pairwise(bounds):
        until = max(r.until for r in (*met, new) if r.low <= low and high <= r.high)
        start = pieces.pop().low if pieces and pieces[-1].until == until else low
        pieces.append(Rescue(start, high, until))
    before, after = [r for r in rescues if r.high < new.low], [r for r in rescues if r.low > new.high]
    return [*before, *pieces, *after]


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

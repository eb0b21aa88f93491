"""The wheel: the near tier, slots of 1 ms that hold what is due soon.

    slots   08:00:00.000  | e e e |            single entries: 36 packed bytes each (layout.SINGLE), one bytearray a
            08:00:00.001  | e |                slot, no Python object per waiting message
            08:00:00.250  | e e e e e e e |
    runs    sorted rows of a staged chunk, read where they lie, with a cursor

A slot exists while something is due in its millisecond. The next due instant is the smallest slot or the smallest
cursor: a look, no search. Taking gives everything due at or before an instant in (due, arrival) order; the arrival of
a single entry is its log offset, a staged row carries its own.

A cancelled entry stays where it is with its queue set to DEAD, and is left out when its slot is taken: a second
cancel still finds it and can tell the truth. One that was moved to another due has MOVED there, and is found no more.
Instants come in as arguments; this file reads no clock and touches no disk.
"""

import heapq
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from postdate.arrival import NEVER
from postdate.storage.layout import NEAR, SINGLE, SINGLE_BYTES, SINGLE_STRUCT, SLOT_COUNT, SLOT_HEAD

DEAD, MOVED = -1, -2  # in the place of a queue; living entries have a queue number, 0 or more
# Fates of a staged row; ELSEWHERE: it was brought into the wheel before, or was moved to another due.
LIVING, CANCELLED, ELSEWHERE = range(3)
_QUEUE_POSITION = SINGLE.fields["queue"][1] if SINGLE.fields else 0
_DEAD_BYTES, _MOVED_BYTES = struct.pack("<i", DEAD), struct.pack("<i", MOVED)
_SLOTS_PER_PIECE = 100  # of a snapshot: about 0.1 ms of work
_BYTES_PER_PIECE = 1 << 16


class Waiting(NamedTuple):
    """Columns of what waits: when it is due, for which queue, and how many bytes its record has."""

    due: np.ndarray
    queue: np.ndarray
    size: np.ndarray


_SHARED = ("unique_hash", "key_hash", "size", "queue", "tag_hash")
Place = tuple[int, int]  # due and arrival


class Due(NamedTuple):
    """Columns of what was taken, in (due, arrival) order."""

    due: np.ndarray
    arrival: np.ndarray
    queue: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    tag_hash: np.ndarray


class Found(NamedTuple):
    """An entry that a search by key hash hit; the caller verifies it in its record."""

    due: int
    arrival: int
    queue: int  # DEAD where it was cancelled before
    offset: int
    size: int
    run: "Run | None"
    row: int


class Killed(NamedTuple):
    """Which entries of some places were cancelled just now, and which of those were single ones."""

    all: np.ndarray
    singles: np.ndarray


class Run:
    """The waiting rows of one staged chunk, from `position` on. `index` has the columns of a chunk's rows."""

    __slots__ = ("base", "dead", "index", "next_due", "position")

    def __init__(self, base: int, index: np.ndarray, position: int = 0, dead: np.ndarray | None = None) -> None:
        self.base, self.index, self.position = base, index, position
        # Rows that are not to be fired: CANCELLED, or ELSEWHERE. A byte a row, and only where there are any.
        self.dead = dead if dead is not None and dead.any() else None
        self.next_due = self._next_due()

    def _next_due(self) -> int:
        return int(self.index["due"][self.position]) if self.position < len(self.index) else NEVER

    @property
    def waiting_count(self) -> int:
        dead_count = 0 if self.dead is None else int(np.count_nonzero(self.dead[self.position :]))
        return len(self.index) - self.position - dead_count

    def kill(self, row: int, fate: int = CANCELLED) -> None:
        if self.dead is None:
            self.dead = np.zeros(len(self.index), np.uint8)
        self.dead[row] = fate

    def fate(self, row: int) -> int:
        return LIVING if self.dead is None else int(self.dead[row])

    def take(self, at_ms: int) -> "Due | None":
        """Moves the cursor over everything due at or before `at_ms`."""
        start, stop = self.position, int(np.searchsorted(self.index["due"], at_ms, "right"))
        if stop <= start:
            return None
        self.position = stop
        self.next_due = self._next_due()
        rows = self.index[start:stop]
        if self.dead is not None:
            rows = rows[self.dead[start:stop] == LIVING]
        queue = np.ascontiguousarray(rows["queue"])  # it is counted and sorted: worth bringing together once
        return Due(rows["due"], rows["arrival"], queue, rows["position"] + self.base, rows["size"], rows["tag_hash"])

    def kill_many(self, due: int, arrival: np.ndarray) -> np.ndarray:
        """Cancels the living rows of a due that have one of these arrivals, which ascend. Returns which."""
        killed = np.zeros(len(arrival), np.bool_)
        start = max(int(np.searchsorted(self.index["due"], due, "left")), self.position)
        stop = int(np.searchsorted(self.index["due"], due, "right"))
        if stop <= start:
            return killed
        own = np.ascontiguousarray(self.index["arrival"][start:stop])
        rows = np.searchsorted(own, arrival)
        found = np.flatnonzero(own[np.minimum(rows, len(own) - 1)] == arrival)
        if self.dead is None:
            self.dead = np.zeros(len(self.index), np.uint8)
        living = found[self.dead[start + rows[found]] == LIVING]
        self.dead[start + rows[living]] = CANCELLED
        killed[living] = True
        return killed

    def find(self, due: int, column: str, key_hash: int) -> Iterator[Found]:
        start = max(int(np.searchsorted(self.index["due"], due, "left")), self.position)
        stop = int(np.searchsorted(self.index["due"], due, "right"))
        for hit in np.flatnonzero(self.index[column][start:stop] == np.uint64(key_hash)).tolist():
            row = self.index[start + hit]
            fate = self.fate(start + hit)
            if fate == ELSEWHERE:
                continue
            queue = DEAD if fate == CANCELLED else int(row["queue"])
            yield Found(
                due, int(row["arrival"]), queue, self.base + int(row["position"]), int(row["size"]), self, start + hit
            )


class Wheel:
    """Slots and runs. `count` is the number of living single entries, the part that costs RAM."""

    def __init__(self) -> None:
        self._slots: dict[int, bytearray] = {}
        self._dues: list[int] = []  # a heap of the slots' dues
        self.runs: list[Run] = []
        self.count = 0
        self._frozen: _Frozen | None = None

    # -- in -----------------------------------------------------------------------------------------------------

    def add(self, due: int, entry: bytes) -> None:
        """Adds one packed SINGLE."""
        self._slot_to_grow(due).extend(entry)
        self.count += 1

    def add_many(self, due: np.ndarray, entries: np.ndarray) -> None:
        """Adds many SINGLEs with their dues, in arrival order."""
        if not len(due):
            return
        order = np.argsort(due, kind="stable")
        due = due[order]
        packed = entries[order].tobytes()
        starts = np.flatnonzero(np.concatenate([[True], due[1:] != due[:-1]]))
        stops = np.append(starts[1:], len(due))
        bounds = zip(
            due[starts].tolist(), (starts * SINGLE_BYTES).tolist(), (stops * SINGLE_BYTES).tolist(), strict=True
        )
        get = self._slots.get
        for at, start, stop in bounds:
            slot = get(at)
            if slot is None or self._frozen is not None:
                slot = self._slot_to_grow(at)
            slot += packed[start:stop]
        self.count += len(due)

    def _slot_to_grow(self, due: int) -> bytearray:
        slot = self._slots.get(due)
        if slot is None:
            slot = self._slots[due] = bytearray()
            heapq.heappush(self._dues, due)
        if self._frozen is not None:
            self._frozen.touch(due, slot)
        return slot

    def stage(self, run: Run) -> None:
        if run.next_due != NEVER:
            self.runs.append(run)

    # -- out ----------------------------------------------------------------------------------------------------

    @property
    def next_due_at_ms(self) -> int:
        """When the next entry is due; NEVER where none waits."""
        due = self._dues[0] if self._dues else NEVER
        for run in self.runs:
            if run.next_due < due:
                due = run.next_due
        return due

    def take_few(self, at_ms: int, count_max: int) -> list[tuple[int, int, int, int, int]] | None:
        """The earliest slot, where it holds a handful of singles: (due, queue, offset, size, tag hash) of the living
        ones.

        None where it holds more, or staged rows are due: then `take` is the way.
        """
        due = self._dues[0] if self._dues else NEVER
        if due > at_ms or len(self._slots[due]) > count_max * SINGLE_BYTES:
            return None
        if self.runs and any(run.next_due <= at_ms for run in self.runs):
            return None
        entries = sorted(SINGLE_STRUCT.iter_unpack(self._pop_slot()))
        taken = [(due, queue, offset, size, tag) for offset, size, queue, tag, _, _ in entries if queue >= 0]
        self.count -= len(taken)
        return taken

    def take(self, at_ms: int) -> list[Due]:
        """Everything due at or before `at_ms`, without what was cancelled: in pieces, one after the other in order."""
        pieces = self._take_slots(at_ms)
        pieces += [due for run in self.runs if (due := run.take(at_ms)) is not None]
        self.runs = [run for run in self.runs if run.next_due != NEVER]
        return _in_order([piece for piece in pieces if len(piece.due)])

    def _take_slots(self, at_ms: int) -> list[Due]:
        dues, slots = [], []
        while self._dues and self._dues[0] <= at_ms:
            dues.append(self._dues[0])
            slots.append(self._pop_slot())
        if not dues:
            return []
        entries = np.frombuffer(slots[0] if len(slots) == 1 else b"".join(slots), SINGLE)
        due = np.repeat(np.array(dues, np.int64), [len(slot) // SINGLE_BYTES for slot in slots])
        living = entries["queue"] >= 0
        if not living.all():
            entries, due = entries[living], due[living]
        self.count -= len(entries)
        offset = np.ascontiguousarray(entries["offset"])
        queue = np.ascontiguousarray(entries["queue"])
        return [Due(due, offset, queue, offset, entries["size"], entries["tag_hash"])]

    def _pop_slot(self) -> bytearray:
        due = heapq.heappop(self._dues)
        slot = self._slots.pop(due)
        if self._frozen is not None:
            self._frozen.touch(due, slot)
        return slot

    # -- cancelling ---------------------------------------------------------------------------------------------

    def find(self, due: int, column: str, key_hash: int) -> list[Found]:
        """Entries of that due and key hash (`column` is unique_hash or key_hash), cancelled ones too, without those
        that were moved.
        """
        found = []
        singles = np.frombuffer(self._slots.get(due, b""), SINGLE)
        is_hit = (singles[column] == np.uint64(key_hash)) & (singles["queue"] != MOVED)
        for index in np.flatnonzero(is_hit).tolist():
            offset, size, queue, *_ = singles[index].tolist()
            found.append(Found(due, offset, queue, offset, size, None, index))
        for run in self.runs:
            found += run.find(due, column, key_hash)
        return found

    def kill(self, found: Found, *, is_moved: bool = False) -> None:
        """Cancels a living entry that `find` just gave, or takes it away because it was moved."""
        assert found.queue >= 0, f"entry {found.offset} is cancelled already"
        if found.run is not None:
            found.run.kill(found.row, ELSEWHERE if is_moved else CANCELLED)
            return
        if self._frozen is not None:
            self._frozen.note_kill(found, self._slots[found.due])
        at = found.row * SINGLE_BYTES + _QUEUE_POSITION
        self._slots[found.due][at : at + 4] = _MOVED_BYTES if is_moved else _DEAD_BYTES
        self.count -= 1

    def kill_many(self, due: np.ndarray, arrival: np.ndarray) -> "Killed":
        """Cancels the living entries of these places, which ascend by (due, arrival)."""
        killed, single = np.zeros(len(due), np.bool_), np.zeros(len(due), np.bool_)
        starts = np.flatnonzero(np.concatenate([[True], due[1:] != due[:-1]])) if len(due) else np.empty(0, np.int64)
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(due)], strict=False):
            at, wanted = int(due[start]), arrival[start:stop]
            if at in self._slots:
                single[start:stop] = self._kill_singles(at, wanted)
            killed[start:stop] = single[start:stop]
            for run in self.runs:
                killed[start:stop] |= run.kill_many(at, wanted)
        return Killed(killed, single)

    def _kill_singles(self, due: int, arrival: np.ndarray) -> np.ndarray:
        """The view of the slot must not outlive this call: a bytearray that has a view cannot grow."""
        slot = self._slots[due]
        singles = np.frombuffer(slot, SINGLE)
        hits = np.flatnonzero(np.isin(singles["offset"], arrival) & (singles["queue"] >= 0))
        if self._frozen is not None:
            for row in hits.tolist():
                offset, size, queue, *_ = singles[row].tolist()
                self._frozen.note_kill(Found(due, offset, queue, offset, size, None, row), slot)
        singles["queue"][hits] = DEAD
        self.count -= len(hits)
        return np.isin(arrival, singles["offset"][hits])

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def last_due(self) -> int:
        """Nothing that waits here is due later; -1 where nothing waits."""
        return max([*self._slots, *(int(run.index["due"][-1]) for run in self.runs)], default=-1)

    def singles(self, due: int, start: int, stop: int) -> np.ndarray:
        """Some of the singles of a due, cancelled ones too; a copy, since a slot may grow."""
        slot = self._slots.get(due, b"")
        return np.frombuffer(bytes(slot[start * SINGLE_BYTES : stop * SINGLE_BYTES]), SINGLE)

    def waiting(self) -> Iterator[Waiting]:
        """Columns of everything that waits, in bounded pieces. The wheel may turn between two pieces."""
        dues = list(self._slots)
        for start in range(0, len(dues), _SLOTS_PER_PIECE):
            slots = [(due, self._slots[due]) for due in dues[start : start + _SLOTS_PER_PIECE] if due in self._slots]
            singles = np.frombuffer(b"".join([slot for _, slot in slots]), SINGLE)
            counts = [len(slot) // SINGLE_BYTES for _, slot in slots]
            due = np.repeat(np.array([due for due, _ in slots], np.int64), counts)
            living = singles["queue"] >= 0
            yield Waiting(due[living], singles["queue"][living], singles["size"][living])
        for run in list(self.runs):
            rows = run.index[run.position :]
            if run.dead is not None:
                rows = rows[run.dead[run.position :] == LIVING]
            yield Waiting(rows["due"], rows["queue"], rows["size"])

    def page(self, after: Place, limit: int) -> tuple[np.ndarray, Place | None]:
        """Returns about `limit` rows (NEAR) of what waits after a place in the order of (due, arrival), and the place
        to go on from; None at the end.
        """
        parts = [self._slots_after(after, limit), *(_run_after(run, after, limit) for run in self.runs)]
        edge = min((edge for _, edge in parts if edge is not None), default=None)
        rows: np.ndarray = np.concatenate([rows for rows, _ in parts])
        if edge is not None:  # a part that was cut says nothing about what comes after its last row
            rows = rows[(rows["due"] < edge[0]) | ((rows["due"] == edge[0]) & (rows["arrival"] <= edge[1]))]
        return rows[np.lexsort((rows["arrival"], rows["due"]))], edge

    def _slots_after(self, after: Place, limit: int) -> tuple[np.ndarray, Place | None]:
        found, left = [np.empty(0, NEAR)], limit
        dues = np.fromiter(self._slots, np.int64, len(self._slots))
        for due in np.sort(dues[dues >= after[0]]).tolist():
            # The view must not outlive this call: a bytearray that has a view cannot grow.
            singles = _by_arrival(np.frombuffer(self._slots[due], SINGLE))
            start = int(np.searchsorted(singles["offset"], after[1], "right")) if due == after[0] else 0
            singles = singles[start : start + left]
            rows = _near(singles, due, singles["offset"], singles["offset"])
            found.append(rows[rows["queue"] >= 0])
            left -= len(rows)
            if not left:
                return np.concatenate(found), (due, int(rows["arrival"][-1]))
        return np.concatenate(found), None

    # -- snapshots ----------------------------------------------------------------------------------------------

    def freeze(self) -> "_Frozen":
        """Keeps the singles as they are now, for `pieces` to be taken while the wheel goes on. One at a time."""
        assert self._frozen is None, "a snapshot is under way"
        self._frozen = _Frozen(self._slots, self._dues.copy())
        return self._frozen

    def thaw(self) -> None:
        self._frozen = None

    def load(self, piece: bytes) -> None:
        """Takes in one piece of a snapshot."""
        (slot_count,) = SLOT_COUNT.unpack_from(piece)
        heads = np.frombuffer(piece, SLOT_HEAD, slot_count, SLOT_COUNT.size)
        at = SLOT_COUNT.size + heads.nbytes
        for due, count in heads.tolist():
            slot = piece[at : at + count * SINGLE_BYTES]
            at += len(slot)
            self._slot_to_grow(due).extend(slot)
            self.count += int(np.count_nonzero(np.frombuffer(slot, SINGLE)["queue"] >= 0))


class _Frozen:
    """The slots at one moment. The wheel says which slots it is about to change; their length at that time counts."""

    def __init__(self, slots: dict[int, bytearray], dues: list[int]) -> None:
        self._slots, self._dues = slots, dues
        self._touched: dict[int, tuple[bytearray, int]] = {}
        self._killed: dict[int, list[tuple[int, int]]] = {}  # by due: (row, queue) of entries that lived at that moment

    def touch(self, due: int, slot: bytearray) -> None:
        """Before a slot grows or is taken. A slot only grows at its end, so its length is enough to remember."""
        if due not in self._touched:
            self._touched[due] = (slot, len(slot))

    def note_kill(self, found: Found, slot: bytearray) -> None:
        """Before an entry is cancelled. After a clock stepped back its due may have a new slot, which is none of
        ours.
        """
        touched = self._touched.get(found.due)
        if touched is None or touched[0] is slot:
            self._killed.setdefault(found.due, []).append((found.row, found.queue))

    def pieces(self) -> Iterator[bytes]:
        """The slots as they were, in bounded pieces."""
        heads: list[tuple[int, int]] = []
        bodies: list[bytes] = []
        size = 0
        for due in self._dues:
            for part in self._parts(due):
                heads.append((due, len(part) // SINGLE_BYTES))
                bodies.append(part)
                size += len(part)
                if len(heads) >= _SLOTS_PER_PIECE or size >= _BYTES_PER_PIECE:
                    yield _piece(heads, bodies)
                    heads, bodies, size = [], [], 0
        if heads:
            yield _piece(heads, bodies)

    def _parts(self, due: int) -> Iterator[bytes]:
        """A slot in parts of bounded size: one slot may hold a burst of millions."""
        slot, length = self._touched.get(due) or (self._slots[due], len(self._slots[due]))
        step = _BYTES_PER_PIECE // SINGLE_BYTES * SINGLE_BYTES
        for start in range(0, length, step):
            part = slot[start : min(start + step, length)]
            for row, queue in self._killed.get(due, ()):
                at = row * SINGLE_BYTES - start
                if 0 <= at < len(part):
                    struct.pack_into("<i", part, at + _QUEUE_POSITION, queue)
            yield bytes(part)


def _piece(heads: list[tuple[int, int]], bodies: list[bytes]) -> bytes:
    return SLOT_COUNT.pack(len(heads)) + np.array(heads, SLOT_HEAD).tobytes() + b"".join(bodies)


def _in_order(pieces: list[Due]) -> list[Due]:
    """The pieces in (due, arrival) order: as they are where they do not overlap, merged where they do."""
    pieces = [_sorted(piece) for piece in pieces]
    pieces.sort(key=lambda piece: (int(piece.due[0]), int(piece.arrival[0])))
    ends = [(int(piece.due[-1]), int(piece.arrival[-1])) for piece in pieces]
    starts = [(int(piece.due[0]), int(piece.arrival[0])) for piece in pieces]
    if all(end <= start for end, start in zip(ends, starts[1:], strict=False)):
        return pieces
    return [_sorted(Due(*(np.concatenate(columns) for columns in zip(*pieces, strict=True))))]


def _sorted(piece: Due) -> Due:
    """Sorts a piece, if it is not sorted: a rescued message comes into its slot after younger ones."""
    due, arrival = piece.due, piece.arrival
    if ((due[1:] > due[:-1]) | ((due[1:] == due[:-1]) & (arrival[1:] >= arrival[:-1]))).all():
        return piece
    order = np.lexsort((arrival, due))
    return Due(*(column[order] for column in piece))


def _by_arrival(singles: np.ndarray) -> np.ndarray:
    """They are in that order but for what a rescue has added."""
    offset = singles["offset"]
    return singles if (offset[1:] >= offset[:-1]).all() else singles[np.argsort(offset, kind="stable")]


def _near(source: np.ndarray, due: np.ndarray | int, arrival: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Singles, or rows of a chunk, as NEAR."""
    rows = np.empty(len(source), NEAR)
    rows["due"], rows["arrival"], rows["offset"] = due, arrival, offset
    for name in _SHARED:
        rows[name] = source[name]
    return rows


def _run_after(run: Run, after: Place, limit: int) -> tuple[np.ndarray, Place | None]:
    dues = run.index["due"]
    low, high = (int(np.searchsorted(dues, after[0], side)) for side in ("left", "right"))
    start = max(run.position, low + int(np.searchsorted(run.index["arrival"][low:high], after[1], "right")))
    index = run.index[start : start + limit]
    rows = _near(index, index["due"], index["arrival"], run.base + index["position"])
    is_cut = start + limit < len(run.index)
    edge = (int(rows["due"][-1]), int(rows["arrival"][-1])) if is_cut else None
    return rows if run.dead is None else rows[run.dead[start : start + limit] == LIVING], edge

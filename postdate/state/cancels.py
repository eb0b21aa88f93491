"""Cancels: what applying a cancel does, which rows it cancels, and how long it is remembered. A table of the fold.

    cancel of (topic, key, due)
      |-- its message is in the wheel          the entry dies there
      |-- the message waits somewhere else     the tombstone stays and meets it on its way into the wheel
      '-- the due is beyond the horizon        the cancel also gets a row in the far queue, so that the table learns it

A tombstone matches messages of its topic, key and due that arrived before it; a key may be used again afterwards. One
that a move leaves (moves.py) matches a single message, by its arrival, too. A tombstone is kept until no such message
can come into the wheel any more:

- Spark has taken its row of the far queue while its due was beyond the horizon: from then on the table carries it;
- or its due has been fired, and every older far message has been taken, or moved into the wheel by a rescue.

Rows come from three places, and each place knows them by different things:

    far queue    hashes, due and the record itself, which is in the log as long as the row waits
    chunk        the same; the record is in the chunk
    selection    hashes, due and topic alone: the record may be in the table

Equal hashes are only a hint: where a record exists, it decides.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from postdate.arrival import OWN, came_before
from postdate.keys import key_hash
from postdate.state.columns import among, places_of
from postdate.state.far import Far
from postdate.state.jobs import Jobs
from postdate.state.references import References
from postdate.state.topics import GONE, Topics
from postdate.state.wheel import DEAD, Found, Wheel
from postdate.storage import record as records
from postdate.storage.batch import CANCEL, MOVE
from postdate.storage.chunk import Records
from postdate.storage.layout import FAR_STRUCT

TABLE_KEEP_MS = 60_000  # a row stays in the table for this long after it was due
BY_COLUMN = {"unique": "unique_hash", "key": "key_hash"}


class Tombstone(NamedTuple):
    """A cancel that is remembered because its message may still come into the wheel."""

    topic: str
    key: str
    by: str  # "unique" (RocketMQ's UNIQ_KEY) or "key" (the first of KEYS)
    due: int
    arrival: int  # its own place in the log: it matches messages before it
    key_hash: int
    far_offset: int  # its row in the far queue, -1 where it has none
    far_before: int  # the far queue's length when it came
    jobs: int = 0  # how many jobs there had been: it matches what those have brought
    only: int = -1  # of a move: the arrival of the one message that it matches

    @property
    def column(self) -> str:
        return BY_COLUMN[self.by]

    def is_after(self, arrival: int) -> bool:
        return came_before(arrival, self.arrival, self.jobs)

    def has_hashes(self, arrival: int, unique_hash: int, first_hash: int) -> bool:
        """Whether a row of these hashes may be the one that it cancels."""
        hashed = unique_hash if self.by == "unique" else first_hash
        return hashed == self.key_hash and self.is_after(arrival) and self.only in (-1, arrival)


class CancelAnswer(NamedTuple):
    """What applying a cancel did: its tombstone, and how many messages it found in the wheel, living or cancelled
    before.
    """

    tombstone: Tombstone
    wheel_count: int


class CancelledKeys(NamedTuple):
    """Dues and key hashes of some tombstones, ascending, to search columns for."""

    dues: np.ndarray
    hashes: dict[str, np.ndarray]  # by column; none that is empty

    @classmethod
    def of(cls, tombstones: Iterable[Tombstone]) -> "CancelledKeys":
        dues: set[int] = set()
        hashes: dict[str, set[int]] = {}
        for tombstone in tombstones:
            dues.add(tombstone.due)
            hashes.setdefault(tombstone.column, set()).add(tombstone.key_hash)
        columns = {column: np.array(sorted(found), np.uint64) for column, found in hashes.items()}
        return cls(np.array(sorted(dues), np.int64), columns)


_IsMeant = Callable[[Tombstone, int], bool]  # whether a tombstone is for the row of that number


class Cancels:
    """All tombstones by due, and the one rule of which rows they cancel.

    `near` counts the messages in the wheel by queue number; a cancel that kills one counts it off.
    """

    def __init__(
        self, wheel: Wheel, far: Far, topics: Topics, jobs: Jobs, references: References, stored: Records,
        near: list[int],
    ) -> None:  # fmt: skip
        self._wheel, self._far, self._topics, self._jobs = wheel, far, topics, jobs
        self._references, self._stored, self._near = references, stored, near
        self._by_due: dict[int, list[Tombstone]] = {}
        self._dues: list[int] = []  # a heap of the dues that are not fired
        self._fired: set[int] = set()  # dues that are fired and whose tombstones still wait for Spark
        self._fired_at_ms = 0
        self.count = 0

    # -- applying a cancel --------------------------------------------------------------------------------------

    def apply(self, body: dict[str, Any], arrival: int, size: int, at_ms: int) -> CancelAnswer:
        """Applies the record of a cancel, which stands in the log at `arrival` and has `size` bytes."""
        tombstone = self.bury(body["topic"], body["key"], body["by"], body["due"], arrival, size)
        wheel_count = 0
        for found in self._wheel.find(tombstone.due, tombstone.column, tombstone.key_hash):
            if found.queue == DEAD:
                is_gone = self.has_moved(found.due, found.arrival) or self._jobs.has_moved(found.due, found.arrival)
            else:  # a deleted topic of that name had other queues
                is_gone = self._topics.target[found.queue] == GONE
            is_meant = not is_gone and tombstone.is_after(found.arrival)
            if is_meant and self.matches(tombstone, found.offset, found.size):
                wheel_count += 1
                if found.queue != DEAD:
                    self.kill(found, at_ms)
        self.forget_if_fired(tombstone)
        return CancelAnswer(tombstone, wheel_count)

    def kill(self, found: Found, at_ms: int, *, is_moved: bool = False) -> None:
        """Takes a living entry out of the wheel: nothing waits there for it any more."""
        self._wheel.kill(found, is_moved=is_moved)
        self._near[found.queue] -= 1
        if found.run is None:
            self._references.release(found.offset, at_ms)

    def bury(self, topic: str, key: str, by: str, due: int, arrival: int, size: int, *, only: int = -1) -> Tombstone:
        """Remembers the tombstone of a cancel or a move and, beyond the horizon, gives its record a row in the far
        queue.
        """
        hashed, far_offset, far_before, jobs = key_hash(key), -1, self._far.length, self._jobs.next_number
        if due > self._far.horizon_at_ms:
            far_offset = far_before
            # The row carries its topic's first queue and, in the tag's place, the number of jobs: it tells all even
            # when its record is gone. That of a move has, in the place of the unique hash, the arrival that it is for.
            unique, first = (hashed, 0) if by == "unique" else (0, hashed)
            kind, unique = (CANCEL, unique) if only < 0 else (MOVE, only)
            queue = self._topics.get(topic).numbers[0]
            self._far.push_cancel(FAR_STRUCT.pack(arrival, due, unique, first, size, queue, jobs, kind, 0, 0), due)
            self._references.hold(arrival)
        tombstone = Tombstone(topic, key, by, due, arrival, hashed, far_offset, far_before, jobs, only)
        self.add(tombstone)
        return tombstone

    # -- which rows are cancelled -------------------------------------------------------------------------------

    def matches(self, tombstone: Tombstone, offset: int, size: int) -> bool:
        """Whether the record at an offset has the tombstone's topic and key: equal hashes are only a hint."""
        data = self._stored.read(offset, size)
        return bool(data) and records.is_of_key(data, tombstone.topic, tombstone.key, tombstone.by)

    def find_untaken(self, rows: np.ndarray) -> np.ndarray:
        """Which far rows a tombstone cancels; of those that Spark has taken, `find_far` knows all."""
        arrival, size = rows["arrival"], rows["size"]
        return self._find(rows, lambda t, hit: self.matches(t, int(arrival[hit]), int(size[hit])))

    def find_far(self, rows: np.ndarray) -> np.ndarray:
        """Which far rows are cancelled, taken or not."""
        cancelled: np.ndarray = self.find_untaken(rows) | self.find_carried(rows)
        return cancelled

    def find_selected(self, rows: np.ndarray) -> np.ndarray:
        """Which selected rows a tombstone cancels. Their records may be in the table alone: two hashes of 64 bits, due
        and topic must do.
        """
        places, queue = self._topics.places, rows["queue"]
        return self._find(rows, lambda t, hit: places[int(queue[hit])][0] == t.topic)

    def keys_between(self, low: int, high: int) -> CancelledKeys:
        """For `find_staged`, computed once for all chunks: there may be many cancels, and many chunks."""
        return CancelledKeys.of(self.between(low, high))

    def find_staged(self, index: np.ndarray, base: int, keys: CancelledKeys) -> np.ndarray:
        """Which rows of a chunk a tombstone cancels."""
        position, size = index["position"], index["size"]
        candidates = places_of(index["due"], keys.dues)
        return self._find_among(
            candidates, index, keys, lambda t, hit: self.matches(t, base + int(position[hit]), int(size[hit]))
        )

    def find_carried(self, rows: np.ndarray) -> np.ndarray:
        """Which rows, of the far queue or selected, a cancel or a move has taken whose own row Spark has taken since:
        its tombstone is forgotten, the table carries it.
        """
        cancelled = np.zeros(len(rows), np.bool_)
        arrival, due = rows["arrival"], rows["due"]
        may_be = (arrival < self._far.arrival_of(self._far.taken)) | (arrival >= OWN)
        if not may_be.any():
            return cancelled
        places = self._topics.places
        for cancel in self._far.find_cancels(int(due[may_be].min()), int(due[may_be].max()), self._far.taken):
            alike = may_be & (due == cancel["due"])
            if cancel["kind"] == MOVE:
                cancelled |= alike & (arrival.astype(np.uint64) == cancel["unique_hash"])
                continue
            column = "unique_hash" if cancel["unique_hash"] else "key_hash"
            for hit in np.flatnonzero(alike & (rows[column] == cancel[column])).tolist():
                if came_before(int(arrival[hit]), int(cancel["arrival"]), int(cancel["tag_hash"])):
                    cancelled[hit] |= places[int(rows["queue"][hit])][0] == places[int(cancel["queue"])][0]
        return cancelled

    def has_moved(self, due: int, arrival: int) -> bool:
        """Whether a move has taken the message of this due and arrival away. It is known while somebody could still
        bring it.
        """
        if any(tombstone.only == arrival for tombstone in self.at(due)):
            return True
        carried = self._far.find_cancels(due, due, self._far.length)
        return bool(((carried["kind"] == MOVE) & (carried["unique_hash"] == np.uint64(arrival))).any())

    def may_have_moved_from(self, tombstone: Tombstone) -> bool:
        """Whether a move may have taken a message of a cancel's key and due away, while that due is not fired."""
        if any(each.only >= 0 and each.key_hash == tombstone.key_hash for each in self.at(tombstone.due)):
            return True
        if tombstone.due <= self._far.horizon_at_ms:
            return False  # its tombstone is there
        carried = self._far.find_cancels(tombstone.due, tombstone.due, self._far.length)
        return bool((carried["kind"] == MOVE).any())

    def _find(self, rows: np.ndarray, is_meant: _IsMeant) -> np.ndarray:
        if not len(rows) or not self.count:
            return np.zeros(len(rows), np.bool_)
        keys = self.keys_between(int(rows["due"].min()), int(rows["due"].max()))
        return self._find_among(np.flatnonzero(among(rows["due"], keys.dues)), rows, keys, is_meant)

    def _find_among(
        self, candidates: np.ndarray, rows: np.ndarray, keys: CancelledKeys, is_meant: _IsMeant
    ) -> np.ndarray:
        """Which of the rows with these numbers a tombstone cancels; `is_meant` verifies what equal hashes hint at."""
        cancelled = np.zeros(len(rows), np.bool_)
        hits = np.zeros(len(candidates), np.bool_)
        for column, hashes in keys.hashes.items():
            hits |= among(rows[column][candidates], hashes)
        for hit in candidates[hits].tolist():
            found = (int(rows["arrival"][hit]), int(rows["unique_hash"][hit]), int(rows["key_hash"][hit]))
            tombstones = self.at(int(rows["due"][hit]))
            cancelled[hit] = any(t.has_hashes(*found) and is_meant(t, hit) for t in tombstones)
        return cancelled

    # -- remembering and forgetting -----------------------------------------------------------------------------

    def add(self, tombstone: Tombstone) -> None:
        if tombstone.due not in self._by_due:
            self._by_due[tombstone.due] = []
            heapq.heappush(self._dues, tombstone.due)
        self._by_due[tombstone.due].append(tombstone)
        self.count += 1

    def at(self, due: int) -> list[Tombstone]:
        return self._by_due.get(due, [])

    def between(self, low: int, high: int) -> Iterator[Tombstone]:
        """The tombstones with low <= due <= high."""
        for due, tombstones in self._by_due.items():
            if low <= due <= high:
                yield from tombstones

    def is_needed(self, tombstone: Tombstone) -> bool:
        """Whether a fired tombstone may still meet a message that comes into the wheel."""
        far = self._far
        if tombstone.arrival >= self._jobs.remembered_from:
            return True
        if tombstone.only >= 0 and far.taken and tombstone.due > self._fired_at_ms - TABLE_KEEP_MS:
            return True  # the table may still have the message, and nothing there says that it was moved
        if far.taken >= tombstone.far_before and far.taken > tombstone.far_offset:
            return False
        if far.taken and tombstone.due > far.horizon_at_ms:
            return True  # the table may have its message, and has not read the cancel
        if self._jobs.brought_from < tombstone.far_before:
            return True  # a job may bring its message, imported or postponed: that has no row in the far queue
        # What was rescued has met it, and a stage that brings it again drops it: only untaken rows that wait are left.
        return bool(len(far.find_untaken(tombstone.due, tombstone.column, tombstone.key_hash, tombstone.far_before)))

    def forget_fired(self, at_ms: int) -> None:
        """Dues up to `at_ms` are fired: forgets the tombstones among them that are not needed any more."""
        self._fired_at_ms = at_ms
        while self._dues and self._dues[0] <= at_ms:
            due = heapq.heappop(self._dues)
            if due in self._by_due:
                self._fired.add(due)
                self._forget_unneeded(due)

    def forget_if_fired(self, tombstone: Tombstone) -> None:
        """Forgets a new tombstone that is not needed, as a clock that went back brings some whose due is fired. From
        here on a fold that a snapshot brings back and one that goes on keep the same ones.
        """
        if tombstone.due <= self._fired_at_ms:
            self.forget_fired(self._fired_at_ms)

    def sweep(self) -> None:
        """Looks again at every fired tombstone: Spark, or a rescue, has moved on."""
        for due in list(self._fired):
            self._forget_unneeded(due)

    def forget_taken(self, taken: int, horizon_at_ms: int) -> None:
        """Forgets the tombstones that the table carries from now on."""
        remembered_from = self._jobs.remembered_from
        for due in [due for due in self._by_due if due > horizon_at_ms]:
            kept = [t for t in self._by_due[due] if not 0 <= t.far_offset < taken or t.arrival >= remembered_from]
            if len(kept) != len(self._by_due[due]):
                self._keep(due, kept)

    def _forget_unneeded(self, due: int) -> None:
        self._keep(due, [tombstone for tombstone in self._by_due.get(due, []) if self.is_needed(tombstone)])

    def _keep(self, due: int, kept: list[Tombstone]) -> None:
        self.count -= len(self._by_due.get(due, [])) - len(kept)
        if kept:
            self._by_due[due] = kept
            return
        self._by_due.pop(due, None)
        self._fired.discard(due)  # its place in the heap is passed over when it comes up
        if len(self._dues) > 2 * len(self._by_due) + 1_000:
            self._dues = sorted(self._by_due.keys() - self._fired)

    # -- snapshots ----------------------------------------------------------------------------------------------

    def state(self) -> list[Any]:
        return [tombstone for tombstones in self._by_due.values() for tombstone in tombstones]

    def load(self, state: list[Any], fired_at_ms: int) -> None:
        self._fired_at_ms = fired_at_ms
        for entry in state:
            self.add(Tombstone(*entry))
        self._fired = {due for due in self._by_due if due <= fired_at_ms}  # all of them were still needed
        self._dues = sorted(self._by_due.keys() - self._fired)

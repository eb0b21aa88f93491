"""Verdicts on rows: which of them a tombstone, or a cancel that the table carries, has cancelled.

Rows come from three sides, and are known by different things:

    far queue    hashes, due and the record itself, which is in the log as long as the row waits
    chunk        the same; the record is in the chunk
    selection    hashes, due and topic alone: the record may be in the table

Equal hashes only hint: where there is a record it decides. Nothing is changed here; the fold does what follows.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from postdate.errors import IllegalMessage
from postdate.message import PROPERTY_KEYS, PROPERTY_UNIQ_KEY, first_key
from postdate.state.arrays import among, places_of
from postdate.state.far import Far
from postdate.state.jobs import Jobs
from postdate.state.cancels import Tombstone, Tombstones
from postdate.state.topics import Topics
from postdate.storage import record as records

_IsMeant = Callable[[Tombstone, int], bool]  # whether a tombstone is for the row of that number


class Wanted(NamedTuple):
    """What the messages of some tombstones are known by: dues and hashes, ascending."""

    dues: np.ndarray
    hashes: dict[str, np.ndarray]  # by column; none that is empty

    @classmethod
    def of(cls, tombstones: Iterable[Tombstone]) -> "Wanted":
        dues: set[int] = set()
        hashes: dict[str, set[int]] = {}
        for tombstone in tombstones:
            dues.add(tombstone.due)
            hashes.setdefault(tombstone.column, set()).add(tombstone.key_hash)
        columns = {column: np.array(sorted(found), np.uint64) for column, found in hashes.items()}
        return cls(np.array(sorted(dues), np.int64), columns)


class Verdicts:
    """Of one fold. `read` gives the bytes of a record, of the log or a chunk, empty where it is gone."""

    def __init__(
        self, tombstones: Tombstones, far: Far, jobs: Jobs, topics: Topics, read: Callable[[int, int], bytes]
    ) -> None:
        self._tombstones = tombstones
        self._far = far
        self._jobs = jobs
        self._topics = topics
        self._read = read

    def matches(self, tombstone: Tombstone, offset: int, size: int) -> bool:
        """Whether the record is of the tombstone's topic and key: equal hashes are only a hint."""
        data = self._read(offset, size)
        if not data or records.topic_of(data) != tombstone.topic:
            return False
        try:
            properties = records.properties_of(data)
        except IllegalMessage:
            return False  # a producer's bytes that are no text: they have no key either
        if tombstone.by == "unique":
            return properties.get(PROPERTY_UNIQ_KEY) == tombstone.key
        return first_key(properties.get(PROPERTY_KEYS, "")) == tombstone.key

    def is_needed(self, tombstone: Tombstone) -> bool:
        """Whether a fired tombstone may still meet a message that comes into the wheel."""
        far = self._far
        if far.taken >= tombstone.far_before and far.taken > tombstone.far_offset:
            return False
        if far.taken and tombstone.due > far.horizon_at_ms:
            return True  # the table may have its message, and has not read the cancel
        if self._jobs.brought_from < tombstone.far_before:
            return True  # a job may bring its message, imported or postponed: that has no row in the far queue
        # What was rescued has met it, and a stage that brings it again drops it: only untaken rows that wait are left.
        return bool(len(far.find_untaken(tombstone.due, tombstone.column, tombstone.key_hash, tombstone.far_before)))

    # -- which rows are cancelled -------------------------------------------------------------------------------

    def dead_untaken(self, rows: np.ndarray) -> np.ndarray:
        """Which far rows a tombstone cancels; of those that Spark has taken, `dead_far` knows all."""
        arrival, size = rows["arrival"], rows["size"]
        return self._dead(rows, lambda t, hit: self.matches(t, int(arrival[hit]), int(size[hit])))

    def dead_far(self, rows: np.ndarray) -> np.ndarray:
        """Which far rows are cancelled, taken or not."""
        dead: np.ndarray = self.dead_untaken(rows) | self._dead_by_taken(rows)
        return dead

    def dead_selected(self, rows: np.ndarray) -> np.ndarray:
        """Which selected rows a tombstone cancels. Their records may be in the table alone: two hashes of 64 bits, due
        and topic must do.
        """
        places, queue = self._topics.places, rows["queue"]
        return self._dead(rows, lambda t, hit: places[int(queue[hit])][0] == t.topic)

    def wanted(self, low: int, high: int) -> Wanted:
        """For `dead_staged`, asked for once: there may be many cancels, and many chunks."""
        return Wanted.of(self._tombstones.between(low, high))

    def dead_staged(self, index: np.ndarray, base: int, wanted: Wanted) -> np.ndarray:
        """Which rows of a chunk a tombstone cancels."""
        position, size = index["position"], index["size"]
        near = places_of(index["due"], wanted.dues)
        return self._dead_at(
            near, index, wanted, lambda t, hit: self.matches(t, base + int(position[hit]), int(size[hit]))
        )

    def _dead_by_taken(self, rows: np.ndarray) -> np.ndarray:
        """Which far rows a cancel took that Spark has taken too: its tombstone is forgotten, the table carries it."""
        dead = np.zeros(len(rows), np.bool_)
        taken = rows["arrival"] < self._far.arrival_of(self._far.taken)
        if not taken.any():
            return dead
        places = self._topics.places
        for cancel in self._far.taken_cancels(int(rows["due"][taken].min()), int(rows["due"][taken].max())):
            column = "unique_hash" if cancel["unique_hash"] else "key_hash"
            hits = taken & (rows["due"] == cancel["due"]) & (rows[column] == cancel[column])
            for hit in np.flatnonzero(hits & (rows["arrival"] < cancel["arrival"])).tolist():
                dead[hit] |= places[int(rows["queue"][hit])][0] == places[int(cancel["queue"])][0]
        return dead

    def _dead(self, rows: np.ndarray, is_meant: _IsMeant) -> np.ndarray:
        if not len(rows) or not self._tombstones.count:
            return np.zeros(len(rows), np.bool_)
        wanted = self.wanted(int(rows["due"].min()), int(rows["due"].max()))
        return self._dead_at(np.flatnonzero(among(rows["due"], wanted.dues)), rows, wanted, is_meant)

    def _dead_at(self, near: np.ndarray, rows: np.ndarray, wanted: Wanted, is_meant: _IsMeant) -> np.ndarray:
        """Which of the rows at the places `near` a tombstone cancels; `is_meant` verifies what equal hashes hint at."""
        dead = np.zeros(len(rows), np.bool_)
        hits = np.zeros(len(near), np.bool_)
        for column, hashes in wanted.hashes.items():
            hits |= among(rows[column][near], hashes)
        for hit in near[hits].tolist():
            found = (int(rows["arrival"][hit]), int(rows["unique_hash"][hit]), int(rows["key_hash"][hit]))
            tombstones = self._tombstones.at(int(rows["due"][hit]))
            dead[hit] = any(_is_alike(t, *found) and is_meant(t, hit) for t in tombstones)
        return dead


def _is_alike(tombstone: Tombstone, arrival: int, unique_hash: int, first_hash: int) -> bool:
    hashed = unique_hash if tombstone.by == "unique" else first_hash
    return hashed == tombstone.key_hash and tombstone.is_after(arrival)

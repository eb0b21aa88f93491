"""Tombstones: cancels that wait for their message, wherever it still is.

A tombstone matches messages of its topic, key and due that arrived before it; a key may be used again after. It is kept
until no such message can come into the wheel any more:

- Spark has taken its entry of the far queue while its due was still beyond the horizon: from then on the table
  carries it;
- or its due has been fired, and every far message older than it has been taken, or moved into the wheel by a rescue.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from postdate.table.format import came_before

BY_COLUMN = {"unique": "unique_hash", "key": "key_hash"}


class Tombstone(NamedTuple):
    topic: str
    key: str
    by: str  # "unique" (RocketMQ's UNIQ_KEY) or "key" (the first of KEYS)
    due: int
    arrival: int  # its own place in the log: it matches messages before it
    key_hash: int
    far_offset: int  # its entry in the far queue, -1 where it has none
    far_before: int  # the far queue's length when it came
    jobs: int = 0  # how many jobs there had been: it matches what those have brought

    @property
    def column(self) -> str:
        return BY_COLUMN[self.by]

    def is_after(self, arrival: int) -> bool:
        """Whether it came after a message."""
        return came_before(arrival, self.arrival, self.jobs)


class Tombstones:
    """All tombstones, by due."""

    def __init__(self) -> None:
        self._by_due: dict[int, list[Tombstone]] = {}
        self._dues: list[int] = []  # a heap, of those that are not fired
        self._fired: set[int] = set()  # dues that are fired and whose tombstones still wait for Spark
        self.count = 0

    def add(self, tombstone: Tombstone) -> None:
        if tombstone.due not in self._by_due:
            self._by_due[tombstone.due] = []
            heapq.heappush(self._dues, tombstone.due)
        self._by_due[tombstone.due].append(tombstone)
        self.count += 1

    def at(self, due: int) -> list[Tombstone]:
        return self._by_due.get(due, [])

    def between(self, low: int, high: int) -> Iterator[Tombstone]:
        """Those with low <= due <= high."""
        for due, tombstones in self._by_due.items():
            if low <= due <= high:
                yield from tombstones

    def fire(self, at_ms: int, is_needed: Callable[[Tombstone], bool]) -> None:
        """Dues up to `at_ms` are fired: forgets the tombstones among them that are not needed any more."""
        while self._dues and self._dues[0] <= at_ms:
            due = heapq.heappop(self._dues)
            if due in self._by_due:
                self._fired.add(due)
                self._sweep_due(due, is_needed)

    def sweep(self, is_needed: Callable[[Tombstone], bool]) -> None:
        """Looks again at every fired tombstone: Spark, or a rescue, has moved on."""
        for due in list(self._fired):
            self._sweep_due(due, is_needed)

    def _sweep_due(self, due: int, is_needed: Callable[[Tombstone], bool]) -> None:
        self._keep(due, [tombstone for tombstone in self._by_due.get(due, []) if is_needed(tombstone)])

    def forget_taken(self, taken: int, horizon: int) -> None:
        """Forgets those that the table carries from now on."""
        for due in [due for due in self._by_due if due > horizon]:
            kept = [t for t in self._by_due[due] if not 0 <= t.far_offset < taken]
            if len(kept) != len(self._by_due[due]):
                self._keep(due, kept)

    def _keep(self, due: int, kept: list[Tombstone]) -> None:
        self.count -= len(self._by_due.get(due, [])) - len(kept)
        if kept:
            self._by_due[due] = kept
            return
        self._by_due.pop(due, None)
        self._fired.discard(due)  # its place in the heap is passed over when it comes up
        if len(self._dues) > 2 * len(self._by_due) + 1_000:
            self._dues = sorted(self._by_due.keys() - self._fired)

    def state(self) -> list[Any]:
        return [tombstone for tombstones in self._by_due.values() for tombstone in tombstones]

    def load(self, state: list[Any], fired_at_ms: int) -> None:
        for entry in state:
            self.add(Tombstone(*entry))
        self.fire(fired_at_ms, lambda _: True)

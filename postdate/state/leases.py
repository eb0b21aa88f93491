"""Leases: messages that a pop has given to a consumer and that are not acknowledged yet. A table of the fold.

    queue of T    0  1  2  3  4  5  6  7            offsets.commit: the group wants 6 next
                  acked |  |  |     |
                        |  |  |     leased until 12:00:07 (given once before)
                        |  |  spent: given as often as it may be, waits to become a dead letter
                        |  ready: its lease is over, the next pop gives it
                        leased until 12:00:05

A pop gives messages away for a while: each gets a lease. An acknowledgement ends it for good; a change of the invisible
time replaces it by another. When a lease is over, the message is ready to be given again, in place: no copy is made,
and its offset stays what it was. One that was given as often as its group allows is spent: the broker moves it to the
dead letter queue.

A record is held (references.py) while a consumer has its message: a lease may last longer than the log is kept.

The ends of leases stand in slots of one millisecond, as messages do in the wheel, however long they last. The broker
decides which messages a pop gives and writes them into its record, so that applying it reads no file.
"""

import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple

from postdate.arrival import NEVER
from postdate.state.references import References

Key = tuple[str, int, int]  # group, queue number, offset in the queue
OVER = 0  # `until_ms` of a lease that has ended
NOT_GIVEN = -1  # instead of how often a message was given before
NO_HANDLE = -1  # `popped_at_ms` of a lease that nobody can name


class Lease(NamedTuple):
    """One message that a group has, or had: the table keeps it until it is acknowledged."""

    popped_at_ms: int  # tells this lease from others of the same message: it is in the consumer's handle
    until_ms: int  # when it ends; OVER where it has
    times: int  # how often the message was given before
    times_max: int  # beyond this it is a dead letter
    place: int  # of the record, in the log or a chunk
    size: int
    reason: str = ""  # why its consumer failed last, in the consumer's words


class Leases:
    """All leases by message, what is ready to be given again, and what has become a dead letter."""

    def __init__(self, references: References) -> None:
        self._references = references
        self.by_key: dict[Key, Lease] = {}
        self.ready: dict[tuple[str, int], dict[int, None]] = {}  # (group, queue number): offsets, first over first
        self.spent: dict[Key, None] = {}
        self.counts: dict[str, int] = {}  # by group: messages given and not acknowledged
        self.leased: dict[tuple[str, int], int] = {}  # (group, queue number): messages that are away now
        self.next_at_ms = NEVER  # when the next lease ends
        self._slots: dict[int, dict[Key, None]] = {}  # by the end of the lease
        self._ends: list[int] = []  # a heap of the slots' instants, and of some that are empty by now

    def is_leased(self, key: Key) -> bool:
        """Whether a consumer has the message."""
        lease = self.by_key.get(key)
        return lease is not None and lease.until_ms != OVER

    # -- giving and taking back ---------------------------------------------------------------------------------

    def give(
        self, key: Key, popped_at_ms: int, until_ms: int, times_max: int, place: int, size: int, *,
        times: int = 0, reason: str = "",
    ) -> Lease:  # fmt: skip
        """Gives a message to a consumer, for the first time or again. A message that was given by pulls before has
        the number of `times` and the reason why its consumer failed.
        """
        before = self.by_key.get(key)
        if before is None:
            self.counts[key[0]] = self.counts.get(key[0], 0) + 1
        else:
            assert before.until_ms == OVER, f"message {key} is given while a consumer has it until {before.until_ms}"
            self._forget_over(key)
        if before is not None:
            times, reason = max(times, before.times + 1), reason or before.reason
        lease = Lease(popped_at_ms, until_ms, times, times_max, place, size, reason)
        self._lease(key, lease)
        self._references.hold(place)
        return lease

    def acknowledge(self, key: Key, popped_at_ms: int, at_ms: int) -> bool:
        """Ends a lease for good. False where the handle is not, or no longer, good: the message was given again since,
        or is acknowledged already.
        """
        lease = self.by_key.get(key)
        if lease is None or lease.popped_at_ms != popped_at_ms:
            return False
        self._forget(key, lease, at_ms)
        return True

    def lose(self, key: Key, at_ms: int) -> None:
        """Forgets a message whose record is gone: no consumer can be given it any more."""
        lease = self.by_key.get(key)
        if lease is not None:
            self._forget(key, lease, at_ms)

    def change(
        self, key: Key, popped_at_ms: int, at_ms: int, until_ms: int, *, reason: str = "", is_begun: bool = True
    ) -> bool:
        """Replaces a lease by one that begins now. False as with `acknowledge`. The last reason is kept.

        A message that its consumer has not begun with does not count as given, and no handle is good for it until it
        is given again.
        """
        lease = self.by_key.get(key)
        if lease is None or lease.popped_at_ms != popped_at_ms:
            return False
        self._take(key, lease)
        times = lease.times if is_begun else lease.times - 1
        self._lease(
            key,
            lease._replace(
                popped_at_ms=at_ms if is_begun else NO_HANDLE, until_ms=until_ms, times=times,
                reason=reason or lease.reason,
            ),
        )  # fmt: skip
        if lease.until_ms == OVER:
            self._references.hold(lease.place)
        return True

    def renew(self, key: Key, popped_at_ms: int, until_ms: int) -> bool:
        """Lets a lease end later, for a consumer that is still at work: its handle stays good. False as with
        `acknowledge`, and where the lease is over.
        """
        lease = self.by_key.get(key)
        if lease is None or lease.popped_at_ms != popped_at_ms or lease.until_ms == OVER:
            return False
        self._take(key, lease)
        self._lease(key, lease._replace(until_ms=until_ms))
        return True

    def end_due(self, at_ms: int) -> set[tuple[str, int]]:
        """Ends every lease that is over by now, in the order in which they end. Returns the (group, queue number) that
        have messages ready again.
        """
        ready: set[tuple[str, int]] = set()
        while self._ends and self._ends[0] <= at_ms:
            for key in self._slots.pop(heapq.heappop(self._ends), ()):
                if self._end(key, self.by_key[key], at_ms):
                    ready.add(key[:2])
        self._find_next()
        return ready

    def _end(self, key: Key, lease: Lease, at_ms: int) -> bool:
        """Ends a lease; returns whether the message is ready again: it may be spent."""
        group, number, offset = key
        self.by_key[key] = lease._replace(until_ms=OVER)
        self._references.release(lease.place, at_ms)
        self._count_leased(group, number, -1)
        if lease.times >= lease.times_max:
            self.spent[key] = None
            return False
        self.ready.setdefault((group, number), {})[offset] = None
        return True

    def _lease(self, key: Key, lease: Lease) -> None:
        # After all others: leases of one instant end in the order in which they were made, and a snapshot knows that
        # order by this table alone.
        self.by_key.pop(key, None)
        self.by_key[key] = lease
        self._count_leased(key[0], key[1], 1)
        slot = self._slots.get(lease.until_ms)
        if slot is None:
            slot = self._slots[lease.until_ms] = {}
            heapq.heappush(self._ends, lease.until_ms)
            self.next_at_ms = self._ends[0]
        slot[key] = None

    def _take(self, key: Key, lease: Lease) -> None:
        """Takes a lease out of its slot or, where it is over, out of `ready` or `spent`."""
        if lease.until_ms == OVER:
            self._forget_over(key)
            return
        self._count_leased(key[0], key[1], -1)
        slot = self._slots[lease.until_ms]
        del slot[key]
        if not slot:
            del self._slots[lease.until_ms]
            self._find_next()

    def _forget_over(self, key: Key) -> None:
        group, number, offset = key
        if key in self.spent:
            del self.spent[key]
            return
        ready = self.ready[group, number]
        del ready[offset]
        if not ready:
            del self.ready[group, number]

    def _forget(self, key: Key, lease: Lease, at_ms: int) -> None:
        self._take(key, lease)
        del self.by_key[key]
        self.counts[key[0]] -= 1
        if not self.counts[key[0]]:
            del self.counts[key[0]]
        if lease.until_ms != OVER:
            self._references.release(lease.place, at_ms)

    def _count_leased(self, group: str, number: int, change: int) -> None:
        count = self.leased.get((group, number), 0) + change
        if count:
            self.leased[group, number] = count
        else:
            del self.leased[group, number]

    def _find_next(self) -> None:
        """Finds when the next lease ends. Slots empty out of order: their instants leave the heap when they come up, or
        when they are too many.
        """
        if len(self._ends) > 2 * len(self._slots) + 1_000:
            self._ends = sorted(self._slots)
        while self._ends and self._ends[0] not in self._slots:
            heapq.heappop(self._ends)
        self.next_at_ms = self._ends[0] if self._ends else NEVER

    # -- deleted topics and groups ------------------------------------------------------------------------------

    def forget_queues(self, numbers: Iterable[int], at_ms: int) -> None:
        """Forgets every lease of these queues."""
        gone = set(numbers)
        self._forget_all([key for key in self.by_key if key[1] in gone], at_ms)

    def forget_group(self, group: str, at_ms: int) -> None:
        self._forget_all([key for key in self.by_key if key[0] == group], at_ms)

    def _forget_all(self, keys: list[Key], at_ms: int) -> None:
        for key in keys:
            self._forget(key, self.by_key[key], at_ms)

    # -- snapshots ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[Any]]:
        """The tables as lists, which are copied quickly: a snapshot writes them in slices."""
        return {
            "leases": list(self.by_key.items()),
            "ready": [[*place, offset] for place, offsets in self.ready.items() for offset in offsets],
            "spent": list(self.spent),
        }

    def load(self, leases: list[Any], ready: list[Any], spent: list[Any]) -> None:
        for (group, number, offset), fields in leases:
            key, lease = (group, number, offset), Lease(*fields)
            self.counts[group] = self.counts.get(group, 0) + 1
            if lease.until_ms == OVER:
                self.by_key[key] = lease
            else:
                self._lease(key, lease)
        for group, number, offset in ready:
            self.ready.setdefault((group, number), {})[offset] = None
        for group, number, offset in spent:
            self.spent[group, number, offset] = None

"""Cancels: how one is asked for, and the truth about what became of it.

A cancel is written like every call, and leaves a tombstone when it is applied. Then its message is looked for, in the
direction in which messages move: the wheel, the untaken far queue, the queues. What only the pipeline's table holds is
not known here: whoever can read it is asked by the server, and `is_cancelled_by` judges what it says.

What a cancel changes and when its tombstone is forgotten is in state/cancels.py.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from postdate.broker.lookup import Lookup, State
from postdate.broker.writing import Ticket, Writer
from postdate.config import Limits, Settings
from postdate.errors import FlowControl, UsageError
from postdate.keys import key_hash
from postdate.message import Cancelled
from postdate.state.cancels import BY_COLUMN, CancelAnswer, Tombstone
from postdate.state.far import Rescue, rescued_by
from postdate.state.fold import Fold
from postdate.state.wheel import DEAD, NEVER
from postdate.storage.batch import CANCEL, MESSAGE


class Traced(NamedTuple):
    """What became of a cancel when it was applied."""

    outcome: Cancelled
    tombstone: Tombstone
    may_be_in_table: bool = False  # nothing is known here, so that whoever can read the table must be asked
    rescued: tuple[Rescue, ...] = ()  # the rescues that may have delivered its message by then


class Cancels:
    """Of one broker. `settings` gives those that hold now; `is_deciding` says whether a job's decision is written that
    is not applied yet.
    """

    def __init__(
        self,
        fold: Fold,
        writer: Writer,
        lookup: Lookup,
        *,
        settings: Callable[[], Settings],
        limits: Limits,
        is_deciding: Callable[[], bool],
    ) -> None:
        self._fold = fold
        self._writer = writer
        self._lookup = lookup
        self._settings = settings
        self._limits = limits
        self._is_deciding = is_deciding
        self._unsought: dict[int, None] = {}  # hashes of keys of cancels whose messages are to be looked for

    # -- asking -------------------------------------------------------------------------------------------------

    def cancel(self, topic: str, key: str, due_at_ms: int, at_ms: int, *, by: str = "unique") -> Ticket:
        """Cancels every message of that topic, key and due that arrived before. The answer is a Traced.

        `by` says which key is meant: "unique" (RocketMQ's UNIQ_KEY) or "key" (the first of KEYS). Raises TopicNotFound,
        UsageError, FlowControl, DiskFull, LogFailed.
        """
        self._fold.topics.get(topic)
        self._admit(key, by, due_at_ms, at_ms)
        if self._is_deciding():
            self._writer.flush()  # what is decided comes before this cancel: it may have moved the message
        body = {"topic": topic, "key": key, "by": by, "due": due_at_ms}
        self._unsought[key_hash(key)] = None
        ticket = self._writer.write_system(CANCEL, body, at_ms, self._traced)
        # A job may have postponed it, and a handle knows its first due alone. Of a user's key others may be due there,
        # which nobody has named.
        for moved_to in self._fold.jobs.moved_dues(topic, key, due_at_ms) if by == "unique" else ():
            ticket = self._writer.write_system(CANCEL, body | {"due": moved_to}, at_ms, self._or_traced(ticket))
        return ticket

    def _admit(self, key: str, by: str, due_at_ms: int, at_ms: int) -> None:
        settings, limits = self._settings(), self._limits
        if not key or by not in BY_COLUMN:
            raise UsageError(f"a cancel needs a key and by='unique' or 'key', got key {key!r} and by={by!r}")
        if len(key) > limits.key_characters_max:  # tombstones are kept in RAM
            raise UsageError(
                f"key_characters_max: the key of a cancel has {len(key)} characters, the limit is "
                f"{limits.key_characters_max}"
            )
        if not 0 < due_at_ms <= at_ms + settings.delay_ms_max:
            raise UsageError(
                f"the due time of a cancel is {due_at_ms}, expected epoch milliseconds, "
                f"at most delay_ms_max ({settings.delay_ms_max}) from now"
            )
        if self._fold.cancels.count >= settings.tombstones_max:
            raise FlowControl(
                f"tombstones_max: {self._fold.cancels.count} cancels wait for their messages, the limit; try later"
            )

    # -- what became of it --------------------------------------------------------------------------------------

    def _traced(self, answer: CancelAnswer) -> Traced:
        """Looks where a message may be, in the direction in which it moves."""
        tombstone, far = answer.tombstone, self._fold.far
        if self._is_waiting(answer):
            return Traced(Cancelled.CANCELLED, tombstone)
        is_fired = tombstone.due <= self._fold.fired_at_ms
        if is_fired and self._found_delivered(tombstone):
            return Traced(Cancelled.DELIVERED, tombstone)
        # Up to the horizon the table has given everything away; it has nothing of what was never taken.
        may_be_in_table = far.taken > 0 and tombstone.due > far.horizon_at_ms
        return Traced(Cancelled.UNKNOWN, tombstone, may_be_in_table, tuple(far.rescues) if is_fired else ())

    def _or_traced(self, before: Ticket) -> Callable[[CancelAnswer], Traced]:
        """What became of a cancel that has two dues: the one written before is applied before."""

        def traced(answer: CancelAnswer) -> Traced:
            first: Traced = before.answer
            return first if first.outcome is Cancelled.CANCELLED else self._traced(answer)

        return traced

    def _is_waiting(self, answer: CancelAnswer) -> bool:
        """Whether a cancel has found its message in the wheel or among the untaken far ones. Of several cancels that
        wait to know that, the first one looks for all: they share one way through the index.
        """
        if not answer.wheel_count and len(self._unsought) > 1:
            self._lookup.seek(list(self._unsought))
            self._unsought.clear()
        is_waiting = bool(answer.wheel_count) or any(True for _ in self._untaken_matches(answer.tombstone))
        self._unsought.pop(answer.tombstone.key_hash, None)
        self._lookup.unseek(answer.tombstone.key_hash)
        return is_waiting

    def _found_delivered(self, tombstone: Tombstone) -> bool:
        """Looks the message up among those that are visible; gives up (unknown) at a bound."""
        steps = self._lookup.find(tombstone.topic, tombstone.key, tombstone.by, 0, NEVER, None)
        return any(
            found.state is State.VISIBLE
            and found.due_at_ms == tombstone.due
            and tombstone.is_after(found.arrival)
            and self._fold.cancels.matches(tombstone, found.offset, len(found.record))
            for found in islice(steps, self._limits.delivered_search_steps)
            if found is not None
        )

    def _untaken_matches(self, tombstone: Tombstone) -> Iterator[tuple[int, int]]:
        """(queue number, arrival) of the untaken far messages that a tombstone has cancelled."""
        rows = self._lookup.untaken(tombstone.due, tombstone.column, tombstone.key_hash, tombstone.far_before)
        for row in rows[rows["kind"] == MESSAGE]:
            arrival = int(row["arrival"])
            if self._fold.cancels.matches(tombstone, arrival, int(row["size"])) and not self._fold.jobs.has_moved(
                tombstone.due, arrival
            ):
                yield int(row["queue"]), arrival

    # -- what others ask ----------------------------------------------------------------------------------------

    def is_cancelled_by(self, traced: Traced, arrivals: Sequence[int]) -> bool:
        """Whether a cancel of which nothing was known has cancelled a message: one of those that the table is said to
        have, of the cancel's topic, key and due, or one that has come into the wheel meanwhile.

        What a rescue had brought into the wheel and was fired when the cancel came is in the table as well, until the
        horizon passes it: that one was delivered, or cancelled by another.
        """
        tombstone = traced.tombstone
        found = np.array([arrival for arrival in arrivals if tombstone.is_after(arrival)], np.int64)
        if not rescued_by(traced.rescued, found, np.full(len(found), tombstone.due)).all():
            return True
        entries = self._fold.wheel.find(tombstone.due, tombstone.column, tombstone.key_hash)
        return any(
            entry.queue == DEAD
            and not self._fold.jobs.has_moved(entry.due, entry.arrival)
            and tombstone.is_after(entry.arrival)
            and self._fold.cancels.matches(tombstone, entry.offset, entry.size)
            for entry in entries
        )

    def cancelled_far_count(self, topic: str) -> int:
        """Messages of a topic in the far queue that a tombstone has cancelled but that nobody has met yet."""
        numbers = set(self._fold.topics.get(topic).numbers)  # not those of an earlier topic of that name
        arrivals = {
            arrival
            for tombstone in self._fold.cancels.between(0, NEVER)
            if tombstone.topic == topic
            for queue, arrival in self._untaken_matches(tombstone)
            if queue in numbers
        }
        return len(arrivals)

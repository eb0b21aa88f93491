"""Cancels, from the call to the answer.

    cancel             checks the call and writes a record; applying it leaves a tombstone (state/cancels.py)
    CancelTicket       when the record is applied, asks what became of the message
    trace              looks for it in the direction in which messages move: wheel, far queue, log and queues
    is_cancelled_by    judges what the pipeline's table is said to hold, which the broker cannot know

The fold decides when a tombstone is forgotten.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from postdate.arrival import NEVER
from postdate.broker.jobs import JobCalls
from postdate.broker.lookup import Lookup, State
from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Ticket, Writer
from postdate.errors import FlowControl, PostdateError, UsageError
from postdate.keys import key_hash
from postdate.message import Cancelled
from postdate.state.cancels import BY_COLUMN, TABLE_KEEP_MS, CancelAnswer, Tombstone
from postdate.state.far import Rescue, rescued_by
from postdate.state.fold import Fold
from postdate.state.jobs import POSTPONE
from postdate.state.topics import GONE
from postdate.state.wheel import DEAD
from postdate.storage.batch import CANCEL, MESSAGE


class CancelResult(NamedTuple):
    """What became of a cancel when it was applied."""

    outcome: Cancelled
    tombstone: Tombstone
    may_be_in_table: bool = False  # the broker does not know the message: a process that reads the table must be asked
    rescues: tuple[Rescue, ...] = ()  # those that may have delivered the message by then
    queues: tuple[int, ...] = ()  # numbers of the topic's queues: a deleted topic of that name had others
    may_be_moved: bool = False  # a move may have given it another due: then it is looked up by its unique key
    may_be_several: bool = False  # of messages of one unique key and due, one may have been moved and another one not

    def must_follow(self, outcome: Cancelled) -> bool:
        """Whether a message that was moved must be looked for, given what became of the cancel here and in the
        table.
        """
        return self.may_be_moved and (self.may_be_several or outcome is Cancelled.UNKNOWN)


class CancelTicket(Ticket):
    """The receipt of a cancel; its answer is a CancelResult."""

    __slots__ = ("_before", "_cancels")

    def __init__(self, cancels: "CancelCalls", before: "CancelTicket | None" = None) -> None:
        super().__init__()
        self._cancels = cancels
        self._before = before  # the cancel of the same message for the due that its handle names

    def settle(self, answers: list[CancelAnswer]) -> None:
        """The writer calls it when the cancel is applied, before it applies another batch: a later one may move the
        message on.
        """
        try:
            self.answers = [self._cancels.trace(answers[0], self._before)]
        except (PostdateError, OSError) as error:
            self.answers, self.error = [], error  # the cancel stands; only what became of it could not be read


class CancelCalls:
    """Cancels messages and says what became of each cancel."""

    def __init__(self, fold: Fold, writer: Writer, lookup: Lookup, jobs: JobCalls, settings: CurrentSettings) -> None:
        self._fold = fold
        self._writer = writer
        self._lookup = lookup
        self._jobs = jobs
        self._settings = settings
        self._unsought: dict[int, None] = {}  # hashes of the keys of cancels whose messages are still to be looked for

    # -- the call -----------------------------------------------------------------------------------------------

    def cancel(self, topic: str, key: str, due_at_ms: int, at_ms: int, *, by: str = "unique") -> Ticket:
        """Cancels every message of that topic, key and due that arrived before. The answer is a CancelResult.

        `by` says which key is meant: "unique" (RocketMQ's UNIQ_KEY) or "key" (the first of KEYS). Raises TopicNotFound,
        UsageError, FlowControl, DiskFull, LogFailed.
        """
        self._fold.topics.get(topic)
        self._check(key, by, due_at_ms, at_ms)
        if self._jobs.is_deciding or self._writer.has_pending_move:
            self._writer.flush()  # what comes before this cancel may move the message
        body = {"topic": topic, "key": key, "by": by, "due": due_at_ms}
        self._unsought[key_hash(key)] = None
        ticket = CancelTicket(self)
        self._writer.write_system(CANCEL, body, at_ms, ticket)
        # A job may have postponed the message, and a handle knows its first due alone. For a user's key nothing is
        # added: other messages of that key may be due then, and nobody has named them.
        for moved_to in self._fold.jobs.moved_dues(topic, key, due_at_ms) if by == "unique" else ():
            ticket = CancelTicket(self, before=ticket)
            self._writer.write_system(CANCEL, body | {"due": moved_to}, at_ms, ticket)
        return ticket

    def _check(self, key: str, by: str, due_at_ms: int, at_ms: int) -> None:
        settings, limits = self._settings.now, self._settings.limits
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

    # -- the answer ---------------------------------------------------------------------------------------------

    def trace(self, answer: CancelAnswer, before: Ticket | None) -> CancelResult:
        """Says what became of a cancel that was just applied. A postponed message has two cancels, and the one for its
        first due, applied before, may have found it.
        """
        if before is not None:
            first: CancelResult = before.answer
            if first.outcome is Cancelled.CANCELLED:
                return first
        tombstone, far = answer.tombstone, self._fold.far
        may_be_moved = tombstone.by == "unique" and self._fold.moves.count > 0
        is_fired = tombstone.due <= self._fold.fired_at_ms
        may_be_several = may_be_moved and (is_fired or self._fold.cancels.may_have_moved_from(tombstone))
        if self._has_found_it_waiting(answer):
            return CancelResult(
                Cancelled.CANCELLED, tombstone, may_be_moved=may_be_moved, may_be_several=may_be_several
            )
        may_wait_in_table = far.taken > 0 and tombstone.due > far.horizon_at_ms
        outcome, is_certain = Cancelled.UNKNOWN, True
        if is_fired or not may_wait_in_table or far.rescues:  # a rescue leaves cancelled messages out
            outcome, is_certain = self._find_in_log(tombstone, is_fired=is_fired)
        if outcome is not Cancelled.UNKNOWN:
            return CancelResult(outcome, tombstone, may_be_moved=may_be_moved, may_be_several=may_be_several)
        # What is due up to the horizon was promoted, or the table has left it out because another cancel has taken it:
        # its row stays for a while. The table has nothing where no row was ever taken.
        kept_ms = min(TABLE_KEEP_MS, self._settings.now.retention_ms)
        is_left_there = far.taken > 0 and is_certain and tombstone.due > self._fold.fired_at_ms - kept_ms
        rescues = tuple(far.rescues) if is_fired else ()
        topic = self._fold.topics.by_name.get(tombstone.topic)
        queues = tuple(topic.numbers) if topic else ()
        return CancelResult(
            Cancelled.UNKNOWN, tombstone, may_wait_in_table or is_left_there, rescues, queues, may_be_moved,
            may_be_several,
        )  # fmt: skip

    def _has_found_it_waiting(self, answer: CancelAnswer) -> bool:
        """Whether a cancel has found its message in the wheel or among the untaken far ones. Where several cancels wait
        for this answer, the first one looks for the messages of all: they share one way through the index.
        """
        if not answer.wheel_count and len(self._unsought) > 1:
            self._lookup.seek(list(self._unsought))
            self._unsought.clear()
        is_found = bool(answer.wheel_count) or any(True for _ in self._untaken_matches(answer.tombstone))
        self._unsought.pop(answer.tombstone.key_hash, None)
        self._lookup.unseek(answer.tombstone.key_hash)
        return is_found

    def _untaken_matches(self, tombstone: Tombstone) -> Iterator[tuple[int, int]]:
        """Yields (queue number, arrival) of the untaken far messages that a tombstone has cancelled, or moved."""
        rows = self._lookup.untaken(tombstone.due, tombstone.column, tombstone.key_hash, tombstone.far_before)
        for row in rows[rows["kind"] == MESSAGE]:
            arrival = int(row["arrival"])
            if self._fold.topics.target[int(row["queue"])] == GONE:
                continue  # of a deleted topic of that name
            is_there = arrival == tombstone.only or not self._fold.has_moved(tombstone.due, arrival)
            if is_there and self._fold.cancels.matches(tombstone, arrival, int(row["size"])):
                yield int(row["queue"]), arrival

    def _find_in_log(self, tombstone: Tombstone, *, is_fired: bool) -> tuple[Cancelled, bool]:
        """Says what became of a message that does not wait, by its record in the log or a chunk, and whether that is
        all there is: it looks for a bounded number of steps. A message that another cancel has taken is cancelled.
        """
        steps = self._lookup.find(tombstone.topic, tombstone.key, tombstone.by, 0, NEVER, None)
        messages = [
            found
            for found in islice(steps, self._settings.limits.delivered_search_steps)
            if found is not None
            and found.due_at_ms == tombstone.due
            and tombstone.is_after(found.arrival)
            and self._fold.cancels.matches(tombstone, found.offset, len(found.record))
            and not self._fold.has_moved(found.due_at_ms, found.arrival)
        ]
        is_certain = next(steps, self) is self
        if is_fired and any(found.state is State.VISIBLE for found in messages):
            return Cancelled.DELIVERED, True
        cancelled = [found.arrival for found in messages if found.state is State.CANCELLED]
        # What is not due yet this cancel takes indeed.
        if cancelled and (not is_fired or (is_certain and self._was_cancelled(tombstone, cancelled))):
            return Cancelled.CANCELLED, True
        return Cancelled.UNKNOWN, is_certain

    def _was_cancelled(self, tombstone: Tombstone, arrivals: Sequence[int]) -> bool:
        """Whether one of some messages that are due and in no queue was surely cancelled. A job may have moved one,
        which is forgotten after its due. A taken one, whose chunk may be gone, looks cancelled by this very cancel
        while that is remembered.
        """
        jobs = self._fold.jobs
        if len(jobs.all()) < jobs.next_number or any(job.op == POSTPONE for job in jobs.all()):
            return False
        is_remembered = tombstone in self._fold.cancels.at(tombstone.due)
        return any(not (is_remembered and self._lookup.is_taken(arrival)) for arrival in arrivals)

    def is_cancelled_by(self, result: CancelResult, arrivals: Sequence[int]) -> bool:
        """Whether a cancel that did not find its message has cancelled it all the same: one of the messages that the
        table is said to have, of the cancel's queues, key and due, or one that has come into the wheel since.

        A message that a rescue had brought into the wheel, and that was fired before the cancel came, stays in the
        table until the horizon passes it: it was delivered, or another cancel has taken it.
        """
        tombstone = result.tombstone
        meant = [each for each in arrivals if tombstone.is_after(each)]
        found = np.array([each for each in meant if not self._fold.has_moved(tombstone.due, each)], np.int64)
        if not rescued_by(result.rescues, found, np.full(len(found), tombstone.due)).all():
            return True
        entries = self._fold.wheel.find(tombstone.due, tombstone.column, tombstone.key_hash)
        return any(
            entry.queue == DEAD
            and not self._fold.has_moved(entry.due, entry.arrival)
            and tombstone.is_after(entry.arrival)
            and self._fold.cancels.matches(tombstone, entry.offset, entry.size)
            for entry in entries
        )

    # -- for deleting a topic -----------------------------------------------------------------------------------

    def count_cancelled_far(self, topic: str) -> int:
        """Counts the messages of a topic in the far queue that a tombstone has cancelled and that are still counted as
        waiting there.
        """
        numbers = set(self._fold.topics.get(topic).numbers)  # not those of an earlier topic of that name
        arrivals = {
            arrival
            for tombstone in self._fold.cancels.between(0, NEVER)
            if tombstone.topic == topic
            for queue, arrival in self._untaken_matches(tombstone)
            if queue in numbers
        }
        return len(arrivals)

"""The writer: batches on their way from a call to the fold.

    write, write_system, ...   append a batch to the log, give a ticket
    flush                      makes all that was written durable
    apply_durable              applies what is durable, in order; its tickets get their answers
    settle                     does that and returns what has changed, for the caller who wakes consumers

In flush mode "async" a batch is applied as soon as it is written.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from postdate.errors import LogFailed, PostdateError, UsageError
from postdate.message import SendIdentity
from postdate.state.fold import NO_PLACES, NO_QUEUES, Fold
from postdate.storage.batch import MESSAGE, MOVE, Batch, Packed, Packer, Prepared, system_body
from postdate.storage.layout import BATCH_HEADER_BYTES
from postdate.storage.log import Log

Seconds = dict[tuple[int, str], int]  # (second of due time, topic) -> messages
NO_SECONDS: Seconds = {}
Names = dict[str, int]  # by what a message that is stored once is known by: its place in its batch
NO_NAMES: Names = {}
_NEW = tuple.__new__  # past the constructor of a named tuple: changes are taken after every flush
_NO_OFFSETS: list[int] = []


class Changes(NamedTuple):
    """What has changed since changes were last returned, for the caller who wakes consumers. Calls that wait for the
    disk themselves, as making a topic does, leave their changes to the next one.
    """

    grown_queues: AbstractSet[int]  # numbers of the queues that got messages
    ready_again: AbstractSet[tuple[str, int]]  # (group, queue number) where leases have ended


NO_CHANGES = Changes(NO_QUEUES, NO_PLACES)


class Ticket:
    """The receipt of a written batch. `answers` is None until the batch is durable and applied. A call whose answer is
    more than what the fold answers has a ticket of its own, with another `settle`.
    """

    __slots__ = ("answers", "end", "error", "offsets", "once", "prepared", "seconds", "timed")

    def __init__(self, end: int = 0, offsets: list[int] = _NO_OFFSETS) -> None:
        self.end = end  # durable when the log is durable up to here
        self.offsets = offsets  # of its records in the log
        self.prepared: list[Prepared] = []  # its messages
        self.answers: list[Any] | None = None
        self.error: PostdateError | OSError | None = None
        self.timed = 0  # messages in it that will wait
        self.seconds = NO_SECONDS  # the same by (second of due time, topic), where that is limited
        self.once = NO_NAMES  # messages in it that are stored once

    def settle(self, answers: list[Any]) -> None:
        """Takes in what the fold has answered, before another batch is applied."""
        self.answers = answers

    @property
    def answer(self) -> Any:
        """The answer of a batch of one. The broker must have settled it. Raises what kept it from being found out."""
        assert self.answers is not None, "the batch is not durable yet: flush and settle first"
        if self.error is not None:
            raise self.error
        return self.answers[0]


class Writer:
    """Writes batches to the log and applies them to the fold."""

    def __init__(self, log: Log, fold: Fold, packer: Packer, *, is_async: bool) -> None:
        self._log, self._fold, self._packer, self._is_async = log, fold, packer, is_async
        self._pending: deque[tuple[Batch, Ticket]] = deque()
        self.broken: LogFailed | None = None  # why the fold must not go on
        self.applied_count = 0  # batches
        # Since changes were last returned.
        self._grown, self._ready = NO_QUEUES, NO_PLACES
        self._last_move: Ticket | None = None
        # Messages that will wait, in batches that are not applied yet: they count for flow control already.
        self.pending_timed = 0
        self.pending_seconds: Seconds = {}
        # Those of them that are stored once: they have no row in the fold yet. The ticket has their places.
        self.pending_once: dict[str, Ticket] = {}

    # -- writing ------------------------------------------------------------------------------------------------

    def write(
        self, prepared: list[Prepared], at_ms: int, timed: int = 0, seconds: Seconds = NO_SECONDS, kind: int = MESSAGE,
        ticket: Ticket | None = None, once: Names = NO_NAMES,
    ) -> Ticket:  # fmt: skip
        """Writes messages, new or moved ones, as one batch, for the given ticket or a plain one; `timed` of them will
        wait, those of `once` are stored once. Raises IllegalMessage, DiskFull, LogFailed.
        """
        if not prepared:
            raise UsageError("a batch needs at least one message")
        length = self._packer.length_of(prepared)
        start = self._log.place(length, at_ms, urgent=False)
        packed = self._packer.pack(prepared, start, at_ms, kind)
        ticket = self._append(start, length, at_ms, len(prepared), packed, ticket)
        ticket.prepared = prepared
        if kind == MOVE:
            self._last_move = ticket
        if timed:
            ticket.timed, ticket.seconds = timed, seconds
            self.pending_timed += timed
            for place, count in seconds.items():
                self.pending_seconds[place] = self.pending_seconds.get(place, 0) + count
        if once:
            ticket.once = once
            self.pending_once.update(dict.fromkeys(once, ticket))
        self._settle_async()
        return ticket

    @property
    def has_pending_move(self) -> bool:
        """Whether a move is written that is not applied yet."""
        return self._last_move is not None and self._last_move.answers is None

    def write_system(self, kind: int, values: Mapping[str, Any], at_ms: int, ticket: Ticket | None = None) -> Ticket:
        """Writes one record of a system topic, for the given ticket or a plain one. It may use the log's reserve."""
        text = system_body(values)
        length = self._packer.system_length_of(kind, text)
        start = self._log.place(length, at_ms, urgent=True)
        ticket = self._append(start, length, at_ms, 1, self._packer.pack_system(kind, text, start, at_ms), ticket)
        self._settle_async()
        return ticket

    def write_mixed(
        self, prepared: list[Prepared], kind: int, values: Mapping[str, Any], at_ms: int, ticket: Ticket
    ) -> Ticket:
        """Writes messages and, after them, one record of a system topic: together, or not at all."""
        text = system_body(values)
        length = self._packer.mixed_length_of(prepared, kind, text)
        start = self._log.place(length, at_ms, urgent=False)
        packed = self._packer.pack_mixed(prepared, kind, text, start, at_ms)
        self._append(start, length, at_ms, len(prepared) + 1, packed, ticket)
        ticket.prepared = prepared
        self._settle_async()
        return ticket

    def write_fire(self, at_ms: int) -> None:
        """Writes an empty batch: applying it fires what is due."""
        start = self._log.place(BATCH_HEADER_BYTES, at_ms, urgent=True)
        self._append(start, BATCH_HEADER_BYTES, at_ms, 0, Packed(b"", []))
        self._settle_async()

    def will_fire(self, due_at_ms: int) -> bool:
        """Whether a batch that is not applied yet will fire what is due then."""
        return any(batch.at_ms >= due_at_ms for batch, _ in self._pending)

    def find_pending(self, sent: SendIdentity) -> tuple[Ticket, int] | None:
        """Returns the ticket of a send that is written and not applied yet, and which of its messages is meant."""
        for _, ticket in reversed(self._pending):
            if type(ticket) is not Ticket:  # another call's: its answers are not about its messages
                continue
            for index, entry in enumerate(ticket.prepared):
                if entry.unique_key == sent.unique_key:
                    message = entry.message
                    if (message.topic, message.born_at_ms, message.reconsume_times) == (
                        sent.topic, sent.born_at_ms, sent.reconsume_times,
                    ):  # fmt: skip
                        return ticket, index
        return None

    def _append(
        self, start: int, length: int, at_ms: int, row_count: int, packed: Packed, ticket: Ticket | None = None
    ) -> Ticket:
        body, offsets = packed
        if ticket is None:
            ticket = Ticket(start + length, offsets)
        else:
            ticket.end, ticket.offsets = start + length, offsets
        batch = self._log.append(start, at_ms, row_count, body)
        assert batch.end == ticket.end, f"a batch that ends at {batch.end} was planned to end at {ticket.end}"
        self._pending.append((batch, ticket))
        return ticket

    # -- durable and applied ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Makes everything written durable and applies it. Raises LogFailed."""
        self._log.flush()
        self.apply_durable()

    def settle(self) -> Changes:
        """Applies the batches that are durable. Returns what has changed since changes were last returned. Raises
        LogFailed.
        """
        if self._pending:
            self.apply_durable()
        return self.take_changes()

    def take_changes(self) -> Changes:
        """Returns what has changed since changes were last returned."""
        if not self._grown and not self._ready:
            return NO_CHANGES
        changes = _NEW(Changes, (self._grown, self._ready))
        self._grown, self._ready = NO_QUEUES, NO_PLACES
        return changes

    @property
    def has_changes(self) -> bool:
        """Whether consumers could be woken by what the next `settle` returns."""
        return bool(self._grown or self._ready)

    def apply_durable(self) -> None:
        """Applies the batches that are durable, in order; their tickets get their answers. Raises LogFailed."""
        limit = self._log.end if self._is_async else self._log.durable
        pending = self._pending
        while pending and pending[0][0].end <= limit:
            batch, ticket = pending[0]
            if self.broken is not None:
                raise self.broken
            try:
                answers, grown, ready = self._fold.apply(batch)
            except Exception as error:  # a file cannot be read: the fold may be half changed, and is used no more
                self.broken = self._log.fail(error)
                raise self.broken from error
            pending.popleft()
            if grown and not grown <= self._grown:
                self._grown = self._grown | grown if self._grown else grown
            if ready:
                self._ready = self._ready | ready if self._ready else ready
            self.applied_count += 1
            ticket.settle(answers)
            if ticket.timed or ticket.once:
                self._forget(ticket)

    def _settle_async(self) -> None:
        if self._is_async:
            self.apply_durable()

    def _forget(self, ticket: Ticket) -> None:
        """Counts its messages off those that will wait, and forgets their ids: the fold knows them now."""
        self.pending_timed -= ticket.timed
        for place, count in ticket.seconds.items():
            left = self.pending_seconds[place] - count
            if left:
                self.pending_seconds[place] = left
            else:
                del self.pending_seconds[place]
        for name in ticket.once:
            del self.pending_once[name]

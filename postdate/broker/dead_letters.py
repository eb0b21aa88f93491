"""Dead letters: which of them nobody has dealt with yet, and how one is marked as dealt with.

A dead letter is a message of the topic %DLQ%<group>. What an operator has resent or deleted is written down as the
progress of a group of its own, `DONE_GROUP`, so that it is part of the state like every other progress:

    queue 0 of %DLQ%billing    0  1  2  3  4  5  6         the offset of DONE_GROUP is 2: 0 and 1 are done
                               done |     |
                                    |     a lease of DONE_GROUP, long over: done
                                    open, as are 3, 5 and 6

Where all letters before some place are done, the offset moves there and the leases go. One record does all of it.
Nobody may pop as that group. The letters stay in their topic until retention removes them; groups that consume the
topic see them whatever was done here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from postdate.broker.settings import CurrentSettings
from postdate.broker.topics import TopicCalls
from postdate.broker.view import View
from postdate.broker.writing import Ticket, Writer
from postdate.errors import FlowControl
from postdate.message import DLQ_TOPIC_PREFIX
from postdate.state.fold import Fold
from postdate.storage.batch import POP
from postdate.storage.queue import Queue

DONE_GROUP = "POSTDATE_DEAD_LETTERS_DONE"
_LEASE_MS = 1  # a lease holds its record in the log; one that is over does not
_NEVER_SPENT = 2**31 - 1  # times that a message may be given


class Letter(NamedTuple):
    """Where an open letter is."""

    queue_id: int
    offset: int
    place: int
    size: int


class DeadLetterCalls:
    """Lists the open letters of groups, and marks letters as done."""

    def __init__(self, fold: Fold, writer: Writer, view: View, topics: TopicCalls, settings: CurrentSettings) -> None:
        self._fold, self._writer, self._view = fold, writer, view
        self._topics, self._settings = topics, settings
        self._last: Ticket | None = None

    def open_letters(self, group: str, queue_id: int, start: int, count: int) -> tuple[list[Letter], int]:
        """Returns the open letters among the next `count` places of a queue, from an offset on, and where to go on.
        Raises TopicNotFound where the group has no dead letters, UsageError.
        """
        topic = DLQ_TOPIC_PREFIX + group
        queue = self._view.queue(topic, queue_id)
        start = max(start, self._done_before(topic, queue_id, queue))
        stop = min(start + count, queue.length)
        entries = self._view.entries(topic, queue_id, start, stop) if start < stop else []
        letters = [
            Letter(queue_id, offset, place, size)
            for offset, (place, size, _) in enumerate(entries, start)
            if not self._is_leased(queue, offset)
        ]
        return letters, stop

    def finish(self, group: str, places: Sequence[tuple[int, int]], at_ms: int) -> tuple[int, Ticket | None]:
        """Marks letters, by queue id and offset, as done. Returns how many of them were open, and a ticket where there
        is something to write. Raises TopicNotFound, UsageError, FlowControl.
        """
        if self._last is not None and self._last.answers is None:
            self._writer.flush()  # what is done so far must be known: an offset would be moved back otherwise
        topic = DLQ_TOPIC_PREFIX + group
        by_queue: dict[int, set[int]] = {}
        for queue_id, offset in places:
            by_queue.setdefault(queue_id, set()).add(offset)
        messages: list[list[int]] = []
        lost: list[tuple[int, int]] = []
        offsets: list[tuple[str, int, int]] = []
        count = 0
        for queue_id, asked in by_queue.items():
            queue = self._view.queue(topic, queue_id)
            begin = self._done_before(topic, queue_id, queue)
            wanted = {
                offset for offset in asked if begin <= offset < queue.length and not self._is_leased(queue, offset)
            }
            count += len(wanted)
            end = begin
            while end in wanted or (end < queue.length and self._is_leased(queue, end)):
                end += 1
            if end > begin:
                offsets.append((topic, queue_id, end))
            # A lease of this millisecond is missed here, and goes the next time.
            leased = self._fold.leases.ready.get((DONE_GROUP, queue.number), ())
            lost += [(queue.number, offset) for offset in leased if offset < end]
            messages += self._rows(queue, sorted(offset for offset in wanted if offset >= end))
        if not count:
            return 0, None
        limit, known = self._settings.now.group_popped_max, self._fold.leases.counts.get(DONE_GROUP, 0)
        if known + len(messages) > limit:
            raise FlowControl(
                f"group_popped_max: {known} dead letters are done while older ones are open, the limit is {limit}; "
                "resend or delete the oldest first"
            )
        fresh = [row for row in offsets if self._fold.groups.offset(DONE_GROUP, row[0], row[1]) is None]
        self._topics.admit_popper(DONE_GROUP, len(fresh))
        record = {
            "group": DONE_GROUP, "invisible_ms": _LEASE_MS, "times_max": _NEVER_SPENT, "messages": messages,
            "lost": lost, "offsets": offsets,
        }  # fmt: skip
        self._last = self._writer.write_system(POP, record, at_ms)
        return count, self._last

    def _done_before(self, topic: str, queue_id: int, queue: Queue) -> int:
        return max(self._fold.groups.offset(DONE_GROUP, topic, queue_id) or 0, queue.first)

    def _is_leased(self, queue: Queue, offset: int) -> bool:
        return (DONE_GROUP, queue.number, offset) in self._fold.leases.by_key

    def _rows(self, queue: Queue, offsets: list[int]) -> list[list[int]]:
        rows: list[list[int]] = []
        for offset in offsets:
            place, size, _ = queue.entries.read(offset, offset + 1)[0].item()
            rows.append([queue.number, offset, place, size])
        return rows

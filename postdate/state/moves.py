"""Moves: a message that waits is taken from where it waits, and comes with another due. A table of the fold.

A move is one record: the message as its consumer will read it, with its new due, and where it waited before (the
property POSTDATE_MOVED). It counts only if the message still waits when the record is applied. Then the place of the
record in the log is the message's arrival, and it goes where a new message of that due goes.

    it waits in the wheel          its entry is marked MOVED there: no cancel takes it for a cancelled one
    it waits in the far queue,     a tombstone for that one arrival meets it on its way into the wheel
    or in the table
    its old due is beyond the      the move also gets a row in the far queue: the table drops the message of that due
    horizon                        and arrival

What was found in the wheel can only be there, or be fired: a message never goes back. What was found elsewhere may have
come into the wheel since.
"""

import numpy as np

from postdate.message import MovedFrom
from postdate.state.cancels import Cancels
from postdate.state.jobs import Jobs
from postdate.state.wheel import Found, Wheel
from postdate.storage.layout import SELECTED


class Moves:
    """Takes messages away that were moved. `count` is how many ever were."""

    def __init__(self, wheel: Wheel, jobs: Jobs, cancels: Cancels) -> None:
        self._wheel, self._jobs, self._cancels = wheel, jobs, cancels
        self.count = 0

    def take(self, source: MovedFrom, queue: int, unique_hash: int, first_hash: int, at_ms: int) -> bool:
        """Takes a message away from where it waits. Returns whether it waited: if not, nothing has changed. `remember`
        must follow when the message has come with its new due.
        """
        entry = self._find_in_wheel(source, unique_hash)
        if entry is not None:
            self._cancels.kill(entry, at_ms, is_moved=True)
            return True
        return not source.is_near and self._waits_elsewhere(source, queue, unique_hash, first_hash)

    def remember(self, source: MovedFrom, topic: str, unique_key: str, place: int, size: int) -> None:
        """Keeps the message from coming where it waited before. `place` and `size` are those of the move's record: the
        message's own row of the far queue has that arrival, and the move's row the next one.
        """
        self._cancels.forget_if_fired(
            self._cancels.bury(topic, unique_key, "unique", source.due_at_ms, place + 1, size, only=source.arrival)
        )
        self.count += 1

    def waits(self, source: MovedFrom, queue: int, unique_hash: int, first_hash: int) -> bool:
        """Whether a message still waits where it was found, or has come into the wheel since."""
        if self.is_in_wheel(source, unique_hash):
            return True
        return not source.is_near and self._waits_elsewhere(source, queue, unique_hash, first_hash)

    def is_cancelled(self, source: MovedFrom, queue: int, unique_hash: int, first_hash: int, *, in_table: bool) -> bool:
        """Whether a message that is not due, and was found in the table, was cancelled there. `in_table`: the table has
        the cancel.
        """
        row = _row_of(source, queue, unique_hash, first_hash)
        is_cancelled = in_table | self._cancels.find_selected(row) | self._cancels.find_carried(row)
        is_elsewhere = self._jobs.find_taken(row)[0] or self._cancels.has_moved(source.due_at_ms, source.arrival)
        return bool(is_cancelled[0]) and not is_elsewhere

    def is_in_wheel(self, source: MovedFrom, unique_hash: int) -> bool:
        return self._find_in_wheel(source, unique_hash) is not None

    def _find_in_wheel(self, source: MovedFrom, unique_hash: int) -> Found | None:
        entries = self._wheel.find(source.due_at_ms, "unique_hash", unique_hash)
        return next((each for each in entries if each.arrival == source.arrival and each.queue >= 0), None)

    def _waits_elsewhere(self, source: MovedFrom, queue: int, unique_hash: int, first_hash: int) -> bool:
        """Whether a message that was in the far queue or in the table is still there."""
        row = _row_of(source, queue, unique_hash, first_hash)
        is_gone = self._cancels.find_selected(row) | self._cancels.find_carried(row) | self._jobs.find_taken(row)
        return bool((self._jobs.waits_in_table(row) & ~is_gone)[0])


def _row_of(source: MovedFrom, queue: int, unique_hash: int, first_hash: int) -> np.ndarray:
    row = np.zeros(1, SELECTED)
    row["due"], row["arrival"], row["queue"] = source.due_at_ms, source.arrival, queue
    row["unique_hash"], row["key_hash"] = unique_hash, first_hash
    return row

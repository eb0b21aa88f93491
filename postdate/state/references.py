"""References: which segments and chunks hold records that are still needed, and when each was last of use. A table of
the fold.

    held     segment: how many of its records wait in the wheel or, untaken, in the far queue, or are leased,
             or are stored once under an id whose window is not over
    seen     segment: when one of its records last became visible or was written
    touched  segment: up to where the log was applied when one of its records last began or ceased to wait

A record in a chunk is counted only while a consumer has it: a chunk whose rows wait is a run of the wheel. Retention
(broker/retention.py) asks here what may leave the disk.
"""

import numpy as np

from postdate.state.columns import counts
from postdate.storage.chunk import CHUNK_BIT, Chunks


class References:
    """Counts the records that are needed, by segment. `batch_end` is the end of the batch that is being applied: the
    fold sets it.
    """

    def __init__(self, chunks: Chunks, segment_shift: int) -> None:
        self._chunks, self._shift = chunks, segment_shift
        self.batch_end = 0
        self.held: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.touched: dict[int, int] = {}
        self.chunk_held: dict[int, int] = {}  # by offset, of records in chunks: how many groups have them leased
        self.chunk_seen: dict[int, int] = {}  # by base: when one of its messages last became visible

    def hold(self, place: int) -> None:
        """One record must stay where it is, in the log or a chunk."""
        held, unit = (self.held, place >> self._shift) if place < CHUNK_BIT else (self.chunk_held, place)
        held[unit] = held.get(unit, 0) + 1

    def release(self, place: int, at_ms: int) -> None:
        """One record is needed no more."""
        if place < CHUNK_BIT:
            self.release_segment(place >> self._shift, 1, at_ms)
            return
        self.chunk_held[place] -= 1
        if not self.chunk_held[place]:
            del self.chunk_held[place]
        base = self._chunks.base_of(place)
        if base is not None:  # on a replay, retention may have removed the chunk already
            self.chunk_seen[base] = max(at_ms, self.chunk_seen.get(base, 0))

    def hold_many(self, offset: np.ndarray) -> None:
        """Records in the log begin to wait."""
        for segment, count in counts(offset >> self._shift):
            self.held[segment] = self.held.get(segment, 0) + count

    def release_many(self, offset: np.ndarray, at_ms: int) -> None:
        for segment, count in counts(offset >> self._shift):
            self.release_segment(segment, count, at_ms)

    def forget(self, offset: int) -> None:
        """A record in the log is needed no more, and has not been of use since it was last seen."""
        self.release_segment(offset >> self._shift, 1, 0)

    def release_segment(self, segment: int, count: int, seen_at_ms: int) -> None:
        """Some records of a segment wait no more."""
        left = self.held[segment] - count
        if left:
            self.held[segment] = left
        else:
            del self.held[segment]
        self.seen[segment] = max(seen_at_ms, self.seen.get(segment, 0))
        self.touched[segment] = self.batch_end

    def touch_many(self, offset: np.ndarray) -> None:
        """The batch reads these records of the log, and a replay will read them again."""
        for segment, _ in counts(offset >> self._shift):
            self.touched[segment] = self.batch_end

    def first_since(self, position: int, at_ms: int) -> int:
        """The offset of the log from which on everything was written that came at `at_ms` or later, and some before it;
        the log is applied up to `position`.
        """
        segment = position >> self._shift
        while segment > 0 and self.seen.get(segment - 1, 0) >= at_ms:
            segment -= 1
        return segment << self._shift

    def held_chunks(self) -> set[int]:
        """Bases of the chunks that hold leased records."""
        return {base for place in self.chunk_held if (base := self._chunks.base_of(place)) is not None}

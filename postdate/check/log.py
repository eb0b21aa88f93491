"""Checks the log: every batch, every record in it, every byte after its end."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from postdate.check.folder import Folder
from postdate.check.records import Collected, Places, half_problem, message_problem, system_problem
from postdate.check.refold import Refold
from postdate.check.walk import Hole, place_of, walk
from postdate.errors import CorruptLog
from postdate.storage import batch as batches
from postdate.storage import record as records
from postdate.storage import snapshot
from postdate.storage.batch import HALF, KIND_FILLER, PRODUCED, Batch
from postdate.storage.layout import ROW_STRUCT


class LogCheck:
    """Walks all segments once, and hands each batch to the second fold."""

    def __init__(self, folder: Folder, refold: Refold) -> None:
        self._folder, self._report, self._segments = folder, folder.report, folder.segments
        self._refold = refold
        self._known_durable = max(snapshot.positions(folder.disk), default=0)
        self._looked_ahead = False
        self.collected = Collected()
        self.places = Places()
        self.holes: list[Hole] = []
        self.end = 0

    def run(self) -> None:
        for index, base in enumerate(self._segments.bases):
            self._report.count("segments", 1)
            for item in walk(self._segments, base):
                if isinstance(item, Hole) and self._is_end(item, index):
                    self._count_tail(item.offset, index)
                    return
                self._take(item)
                self.end = item.end

    def _take(self, item: Batch | Hole) -> None:
        if isinstance(item, Hole):
            self._report.find(
                f"{place_of(self._segments, item.offset)}: {item.problem}, though everything before "
                f"{self._known_durable} was on disk; {item.end - item.offset} bytes are lost"
            )
            self.holes.append(item)
            self._refold.stop()
            return
        self._known_durable = max(self._known_durable, item.durable)
        self._check_batch(item)
        self.collected.add(item, self._refold.near_until(item))
        self._refold.apply(item)

    def _is_end(self, hole: Hole, index: int) -> bool:
        """Whether the log may end here: nothing at or after this place is known to have been on disk."""
        if not self._looked_ahead:
            self._looked_ahead = True
            self._known_durable = max([self._known_durable, *self._durables_behind(hole, index)])
        return hole.offset >= self._known_durable

    def _durables_behind(self, hole: Hole, index: int) -> Iterator[int]:
        starts = [hole.end] if hole.end & (self._segments.segment_bytes - 1) else []
        for start in (*starts, *self._segments.bases[index + 1 :]):
            yield from (item.durable for item in walk(self._segments, start) if isinstance(item, Batch))

    def _count_tail(self, end: int, index: int) -> None:
        """Counts what a crash left after the end; the next start zeroes it."""
        self.end, torn = end, 0
        for base in self._segments.bases[index:]:
            used = np.flatnonzero(self._segments.array(base)[max(end - base, 0) :])
            torn += int(used[-1]) + 1 if len(used) else 0
        self._report.count("bytes of torn tail", torn)

    # -- one batch ----------------------------------------------------------------------------------------------

    def _check_batch(self, batch: Batch) -> None:
        base = batch.offset & -self._segments.segment_bytes
        view = self._segments.view(base)
        assert view is not None
        position = batch.offset - base
        expected = batches.records_position(batch.row_count)
        for row in ROW_STRUCT.iter_unpack(batch.rows):
            at = position + row[9]
            problem = self._record_problem(view[at : at + row[8]], row, batch)
            if row[9] != expected:
                problem = f"the row says position {row[9]} in its batch, expected {expected}"
            if problem:
                self._report.find(f"{place_of(self._segments, batch.offset + row[9])}: {problem}")
            expected = row[9] + row[8]
        if any(view[position + expected : position + batch.length]):
            self._report.find(f"{place_of(self._segments, batch.offset + expected)}: bytes that must be zero are not")
        self._report.count("fillers" if batch.kind == KIND_FILLER else "batches", 1)

    def _record_problem(self, data: bytes, row: tuple[int, ...], batch: Batch) -> str:
        try:
            record = records.decode(data)
        except CorruptLog as error:
            return str(error)
        if (record.offset, record.stored_at_ms) != (batch.offset + row[9], batch.at_ms):
            return f"the record says offset {record.offset}, stored at {record.stored_at_ms}; its batch {batch.at_ms}"
        if row[0] not in PRODUCED:
            return system_problem(record, row)
        self.places.note(row[3], record.topic, record.queue_id, partial(place_of, self._segments, record.offset))
        return half_problem(record, row) if row[0] == HALF else message_problem(record, row, batch.at_ms)

"""Snapshots and retention: what is saved, what may leave the disk, and when.

A segment or chunk may go when nothing in it waits, nothing in it waited when the older of the two snapshots was taken
(a replay from there reads it), and enough time has passed since the last of its messages became visible. Segments may
go from the middle of the log: one message that waits a year holds its own segment, not the log after it.
"""

from collections.abc import Iterator

import numpy as np

from postdate.broker.leasing import LeaseCalls
from postdate.broker.rescuing import Rescuer
from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Writer
from postdate.errors import UsageError
from postdate.state import saved
from postdate.state.fold import Fold
from postdate.state.jobs import DONE, POSTPONE
from postdate.state.saved import Kept
from postdate.storage import selection, snapshot
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.disk import Disk
from postdate.storage.log import Log
from postdate.storage.queue import Queue

_ENTRIES_PER_LOOK = 2_048


class Retention:
    """Takes snapshots, and removes files that neither the fold nor a replay from a snapshot needs. `loaded` is the
    snapshot that the fold began with, `replayed_count` the number of batches applied since.
    """

    def __init__(
        self, disk: Disk, log: Log, fold: Fold, writer: Writer, leases: LeaseCalls, rescuer: Rescuer,
        settings: CurrentSettings, *, loaded: Kept | None, replayed_count: int,
    ) -> None:  # fmt: skip
        self._disk, self._log, self._fold, self._writer = disk, log, fold, writer
        self._leases, self._rescuer, self._settings = leases, rescuer, settings
        self._snapshots = [] if loaded is None else [loaded]  # newest last
        self._replayed_count = replayed_count
        self._saved_count = 0  # of the batches that were replayed or applied, those that the last snapshot has
        self.is_taking_snapshot = False

    # -- snapshots ----------------------------------------------------------------------------------------------

    @property
    def is_snapshot_due(self) -> bool:
        """Whether a crash now would have to replay more than the settings want."""
        return (
            self.bytes_since_snapshot >= self._settings.now.snapshot_bytes
            or self.batches_since_snapshot >= self._settings.limits.snapshot_batches
        )

    @property
    def bytes_since_snapshot(self) -> int:
        return self._fold.position - (self._snapshots[-1].position if self._snapshots else 0)

    @property
    def batches_since_snapshot(self) -> int:
        return self._batch_count - self._saved_count

    @property
    def _batch_count(self) -> int:
        return self._replayed_count + self._writer.applied_count

    def take_snapshot(self) -> Iterator[saved.Step]:
        """Takes a snapshot in small steps, see saved.take. The caller goes on working between the steps."""
        if self.is_taking_snapshot:
            raise UsageError("a snapshot is being taken already")
        if self._writer.broken is not None:
            raise self._writer.broken
        taken, batch_count = saved.kept_of(self._fold), self._batch_count
        if self._snapshots and self._snapshots[-1].position == taken.position:
            return
        self.is_taking_snapshot = True
        try:
            yield from saved.take(self._disk, self._fold, self._log.flush)
            self._snapshots = [*self._snapshots, taken][-snapshot.KEPT :]
            self._saved_count = batch_count
        finally:
            self.is_taking_snapshot = False

    # -- removing -----------------------------------------------------------------------------------------------

    def retain(self, at_ms: int) -> int:
        """Removes segments and chunks that nobody needs any more; returns how many files."""
        if self._writer.broken is not None:
            raise self._writer.broken
        if len(self._snapshots) < snapshot.KEPT or self._rescuer.is_under_way:
            return 0
        promised, seen_before_ms = self._leases.promised_places(), at_ms - self._settings.now.retention_ms
        return _remove(self._log, self._fold, self._snapshots[0], seen_before_ms, promised)


def _remove(log: Log, fold: Fold, older: Kept, seen_before_ms: int, promised: set[int]) -> int:
    """Removes what may go and was last seen before that instant; returns how many files. `promised` are offsets of
    records that the fold will reference when everything written is applied.
    """
    kept = {offset >> log.segment_shift for offset in promised if offset < CHUNK_BIT}
    segments = [
        number
        for number in log.segment_numbers()
        if number not in kept and _segment_may_go(number, log, fold, older, seen_before_ms)
    ]
    for number in segments:
        log.remove_segment(number)
        fold.references.seen.pop(number, None)
        fold.references.touched.pop(number, None)
    waiting = {run.base for run in fold.wheel.runs} | fold.references.held_chunks() | older.waiting_chunks
    waiting |= {base for offset in promised if (base := fold.chunks.base_of(offset)) is not None}
    chunks = [
        base
        for base in fold.chunks.bases()
        if base not in waiting and base < older.chunk_end and fold.references.chunk_seen.get(base, 0) <= seen_before_ms
    ]
    for base in chunks:
        fold.chunks.remove(base)
        fold.references.chunk_seen.pop(base, None)
    if segments or chunks:
        _shorten_rows(log, fold, older, seen_before_ms)
    # A log that is whole can be replayed from its beginning, and what jobs decided with it.
    return len(segments) + len(chunks) + (0 if log.is_whole else _remove_selections(fold, older))


def _remove_selections(fold: Fold, older: Kept) -> int:
    """Removes the selections of jobs that no replay reads again and no rescue, cancel or stage asks for; and those that
    no job has named, because their pipeline has died, unless a job is at work now.
    """
    first = fold.far.arrival_of(fold.far.rows.first)  # no rescue, now or in a replay, comes by rows before it
    needed = {
        part.name
        for job in fold.jobs.all()
        for part in job.parts
        if job.state != DONE or job.op == POSTPONE or part.arrival_high >= first
    }
    needed |= {name for name, arrival in older.selections.items() if arrival >= first}
    at_work = {job.number for job in fold.jobs.open()}
    gone = [
        name
        for name in fold.selections.names()
        if name not in needed and (number := selection.job_of(name)) not in at_work and not older.may_decide(number)
    ]
    for name in gone:
        fold.selections.remove(name)
    return len(gone)


def _segment_may_go(number: int, log: Log, fold: Fold, older: Kept, seen_before_ms: int) -> bool:
    return (
        log.segment_end(number) <= older.position
        and number not in fold.references.held
        and fold.references.touched.get(number, 0) <= older.position
        and fold.references.seen.get(number, 0) <= seen_before_ms
    )


def _shorten_rows(log: Log, fold: Fold, older: Kept, seen_before_ms: int) -> None:
    """Forgets rows whose records are gone, when it is certain that no power loss brings the records back."""
    log.sync_folder()
    fold.chunks.sync_folder()
    forget_dead_entries(log, fold)
    gone = fold.far.rows.search("arrival", log.start, "left")
    # Without a pipeline nothing is ever taken; then what has no record was rescued.
    fold.far.forget(min(gone, older.taken) if fold.far.epoch else gone)
    # The young segments that reach the end of the log without a gap begin at `first`. The index does not reach
    # further back: one message that waits a year, or became visible yesterday after one, would keep the keys of
    # everything that came since. A message that waits that long is a row of the far queue, and found there.
    first = log.end >> log.segment_shift
    for number in reversed(log.segment_numbers()):
        if number < first - 1 or (number < first and fold.references.seen.get(number, 0) <= seen_before_ms):
            break
        first = min(first, number)
    fold.index.forget(first << log.segment_shift)
    fold.once.rows.forget(older.once_first)
    for rows in fold.all_rows():
        rows.remove_files(older.lengths.get(rows.folder, 0))


def forget_dead_entries(log: Log, fold: Fold) -> None:
    """Moves the beginning of each queue to its first entry whose record is there."""
    present = np.array(log.segment_numbers(), np.int64)
    for queue in fold.queues:
        first = _first_live(queue, fold, present, log.segment_shift)
        if first > queue.first:
            queue.forget(first)


def _first_live(queue: Queue, fold: Fold, present: np.ndarray, shift: int) -> int:
    first = queue.first
    while first < queue.length:
        offsets = queue.entries.read(first, first + _ENTRIES_PER_LOOK)["offset"]
        live = np.isin(offsets >> shift, present)
        live |= [offset >= CHUNK_BIT and fold.chunks.holds(offset) for offset in offsets.tolist()]
        if live.any():
            return first + int(live.argmax())
        first += len(offsets)
    return first

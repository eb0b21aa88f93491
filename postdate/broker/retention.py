"""Retention: what may leave the disk, and when.

A segment or chunk may go when nothing in it waits, nothing in it waited when the older of the two snapshots was taken
(a replay from there reads it), and enough time has passed since the last of its messages became visible. Segments may
go from the middle of the log: one message that waits a year holds its own segment, not the log behind it.
"""

import numpy as np

from postdate.state.fold import Fold
from postdate.state.jobs import DONE, POSTPONE, Job, Part
from postdate.state.saved import Kept
from postdate.storage import selection
from postdate.storage.chunk import CHUNK_BIT
from postdate.storage.log import Log
from postdate.storage.queue import Queue

_ENTRIES_PER_LOOK = 2_048


def retain(log: Log, fold: Fold, older: Kept, seen_before_ms: int, promised: set[int]) -> int:
    """Removes what may go and was last seen before that instant; returns how many files. `promised` are offsets of
    records that the fold will hold when what is written has been applied.
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
    # A log that is whole can be replayed from its beginning, and whatever jobs decided with it.
    return len(segments) + len(chunks) + (0 if log.is_whole else _remove_selections(fold, older))


def _remove_selections(fold: Fold, older: Kept) -> int:
    """Lets the selections of jobs go that no replay reads again and no rescue, cancel or stage asks for; and those that
    no job has named: of jobs whose pipeline has died, unless one is at work now.
    """
    first = fold.far.arrival_of(fold.far.rows.first)  # no rescue, now or in a replay, comes by rows before it
    needed = {part.name for job in fold.jobs.all() for part in job.parts if _is_needed(job, part, first)}
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


def _is_needed(job: Job, part: Part, first: int) -> bool:
    return job.state != DONE or job.op == POSTPONE or part.arrival_high >= first


def _segment_may_go(number: int, log: Log, fold: Fold, older: Kept, seen_before_ms: int) -> bool:
    return (
        log.segment_end(number) <= older.position
        and number not in fold.references.held
        and fold.references.touched.get(number, 0) <= older.position
        and fold.references.seen.get(number, 0) <= seen_before_ms
    )


def _shorten_rows(log: Log, fold: Fold, older: Kept, seen_before_ms: int) -> None:
    """Lets rows go whose records are gone: when it is certain that the records do not come back after a power loss."""
    log.sync_folder()
    fold.chunks.sync_folder()
    forget_dead_entries(log, fold)
    gone = fold.far.rows.search("arrival", log.start, "left")
    # Without a pipeline nothing is ever taken; then what has no record was rescued.
    fold.far.forget(min(gone, older.taken) if fold.far.epoch else gone)
    fold.index.forget(_first_young(log, fold, seen_before_ms))
    for rows in fold.all_rows():
        rows.remove_files(older.lengths.get(rows.folder, 0))


def _first_young(log: Log, fold: Fold, seen_before_ms: int) -> int:
    """Where the segments begin that are young, up to the end of the log without a gap.

    The index does not reach further back: one message that waits a year, or became visible yesterday after one, would
    hold the keys of all that came since. What waits that long is a row of the far queue, and found there.
    """
    first = log.end >> log.segment_shift
    for number in reversed(log.segment_numbers()):
        if number < first - 1 or (number < first and fold.references.seen.get(number, 0) <= seen_before_ms):
            break
        first = min(first, number)
    return first << log.segment_shift


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

"""Staging: brings the chunks of a pipeline into the wheel without keeping anybody waiting.

    check     is it the turn of this stage? a look at the fold
    doubt     can a pipeline of this broker know what it claims? a look at the clock, and at names
    verify    reads and checks the files of the chunks and counts the rows taken: as long as it takes, on any thread
    believe   do the rows and the chunks show what it claims?
    write     writes the record; the fold compares and sets when it is applied

A horizon never goes back, and a far row that was taken is the table's for ever, so nothing repairs a stage that claims
more than was done. `doubt` and `believe` are for stages that come from outside.

The fold refuses by itself whatever `check` and `write` refuse early, except a chunk that is named twice: whether one is
there already depends on what retention has removed, so that is asked before the record is written. One stage at a time,
or two could name the same chunk.
"""

from typing import NamedTuple

import numpy as np

from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Ticket, Writer
from postdate.contract import Stage, horizon_of
from postdate.errors import CorruptChunk, CorruptQueue, Refused, UsageError
from postdate.state.fold import Fold, StageAnswer, Tally
from postdate.storage.batch import JOB, MESSAGE, STAGE
from postdate.storage.chunk import Chunk, epoch_of
from postdate.storage.disk import Disk
from postdate.storage.layout import FAR
from postdate.storage.log import Log


class VerifiedChunk(NamedTuple):
    """A chunk whose file is whole."""

    name: str
    row_count: int
    queue_low: int  # numbers of the queues that its rows are for
    queue_high: int


class TakenRows(NamedTuple):
    """Far rows that a stage takes and whose records are there, without those that were rescued."""

    stop: int  # the rows from here on are in memory, and not looked at
    row_count: int  # without those that only say where a job stands
    absent: np.ndarray  # messages due by the horizon that are in none of the chunks

    def plus(self, other: "TakenRows") -> "TakenRows":
        absent = np.concatenate([self.absent, other.absent])
        return TakenRows(other.stop, self.row_count + other.row_count, absent)


class VerifiedStage(NamedTuple):
    """What `verify` has found out about a stage, so that little is left to do where others wait."""

    chunks: list[VerifiedChunk]
    tally: Tally | None  # of the rows that it takes
    taken: TakenRows | None
    arrivals: np.ndarray  # of all rows of the chunks, where the stage takes far rows


class Staging:
    """Takes in the stages of pipelines. All but `verify` is called on the thread that writes to the log."""

    def __init__(self, disk: Disk, log: Log, fold: Fold, writer: Writer, settings: CurrentSettings) -> None:
        self._disk = disk
        self._log = log
        self._fold = fold
        self._writer = writer
        self._settings = settings

    def check(self, stage: Stage) -> None:
        """Raises Refused for a stage that is stale, repeated or overtaken, UsageError for one that has too many chunks
        or names no files.
        """
        limit = self._settings.limits.stage_chunks_max
        if len(stage.chunks) > limit:
            raise UsageError(f"stage_chunks_max: the stage has {len(stage.chunks)} chunks, the limit is {limit}")
        for name in stage.chunks:
            if not name or "/" in name or name.startswith("."):
                raise UsageError(f"chunk name {name!r} is no file name")
        reason = self._find_problem(stage)
        raise_if_refused(StageAnswer(not reason, reason))

    def _find_problem(self, stage: Stage) -> str:
        staged, seen = self._fold.chunks.names(), set[str]()
        for name in stage.chunks:
            if name in staged or name in seen:
                return f"chunk {name} is staged already, or named twice"
            seen.add(name)
        return self._fold.stage_problem(stage.plain())

    def doubt(self, stage: Stage, now_ms: int) -> None:
        """Raises Refused for a stage that claims a horizon that no pipeline of this broker reaches, chunks of another
        epoch, or more rows out of the table than ever came in.
        """
        settings, far = self._settings, self._fold.far
        # The log never goes back in time, so it knows of a clock that has stepped back since the stage was planned.
        reach_ms = horizon_of(max(now_ms, self._fold.at_ms), settings.now.lead_ms) + settings.limits.stage_ahead_ms_max
        horizon_from, horizon_to = stage.horizon
        if horizon_to > max(reach_ms, horizon_from):
            raise Refused(
                f"stage_ahead_ms_max: the stage claims that everything due up to {horizon_to} is promoted, but by the "
                f"broker's clock and its lead no pipeline can be further than {reach_ms}"
            )
        for name in stage.chunks:
            if epoch_of(name) != stage.epoch:
                raise Refused(f"chunk {name} is not of epoch {stage.epoch}: no upload of this pipeline has that name")
        if stage.rows_in and far.rows_out + stage.rows_out > stage.rows_in:  # 0: the log of an earlier version
            raise Refused(
                f"the stage takes {stage.rows_out} rows out of the table, but of {stage.rows_in} that ever came in "
                f"{far.rows_out} are out"
            )

    def verify(self, stage: Stage) -> VerifiedStage:
        """Reads every chunk from its first byte to its last, and the rows that are taken. Raises CorruptChunk, OSError.
        May run on another thread: hashing and comparing columns let others run.
        """
        arrivals = [np.empty(0, np.int64)]
        chunks = [self._verify_chunk(name, stage, arrivals) for name in stage.chunks]
        known = np.concatenate(arrivals)
        tally = self._count_taken(stage)
        return VerifiedStage(chunks, tally, tally and self._look_at_taken(stage, tally, known), known)

    def _count_taken(self, stage: Stage) -> Tally | None:
        """Returns None where retention was quicker: then the fold counts what is left."""
        try:
            return self._fold.count_far(*stage.far)
        except (CorruptQueue, FileNotFoundError):
            return None

    def _look_at_taken(self, stage: Stage, tally: Tally, arrivals: np.ndarray) -> TakenRows | None:
        """Looks at the rows in files; None where retention was quicker."""
        try:
            return self._look_at_rows(tally.start, tally.stop, stage.horizon[1], arrivals)
        except (CorruptQueue, FileNotFoundError):
            return None

    def _look_at_rows(self, start: int, stop: int, horizon_to: int, arrivals: np.ndarray) -> TakenRows:
        far, row_count, absent = self._fold.far, 0, [np.empty(0, FAR)]
        present = self._log.ranges()
        for rows in far.pieces(start, stop):
            arrival = rows["arrival"]
            counts = (rows["kind"] != JOB) & ~far.rescued(arrival, rows["due"]) & _within(arrival, present)
            row_count += int(np.count_nonzero(counts))
            late = rows[counts & (rows["kind"] == MESSAGE) & (rows["due"] <= horizon_to)]
            absent.append(late[~np.isin(late["arrival"], arrivals)])
        return TakenRows(stop, row_count, np.concatenate(absent))

    def _verify_chunk(self, name: str, stage: Stage, arrivals: list[np.ndarray]) -> VerifiedChunk:
        chunk = Chunk(self._disk, name)
        chunk.verify()
        if chunk.head.due_high_ms > stage.horizon[1]:
            raise CorruptChunk(
                f"chunk {name} has a row due at {chunk.head.due_high_ms}, after the horizon {stage.horizon[1]}"
            )
        if stage.far[1] > stage.far[0]:
            arrivals.append(np.ascontiguousarray(chunk.index["arrival"]))
        numbers = np.ascontiguousarray(chunk.index["queue"])
        low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        return VerifiedChunk(name, chunk.head.row_count, low, high)

    def believe(self, stage: Stage, verified: VerifiedStage) -> None:
        """Raises Refused for a stage that takes far rows which its counts and chunks do not show."""
        taken, fold, far_to = verified.taken, self._fold, stage.far[1]
        if taken is None:
            return
        if taken.stop < far_to:
            taken = taken.plus(self._look_at_rows(taken.stop, far_to, stage.horizon[1], verified.arrivals))
        grown = stage.rows_in - fold.far.rows_in
        if grown < taken.row_count:
            raise Refused(
                f"the stage takes {taken.row_count} far rows, but by its rows_in only {grown} came into the table"
            )
        absent = taken.absent[taken.absent["due"] > fold.fired_at_ms]  # of the past, a cancel may be forgotten
        absent = absent[~fold.far.rescued(absent["arrival"], absent["due"])]
        absent = absent[~fold.cancels.find_untaken(absent)]
        absent = absent[~fold.jobs.find_taken(absent)]
        if len(absent):
            raise Refused(
                f"the stage takes {len(absent)} messages that are due by its horizon, the first at "
                f"{int(absent['due'].min())}, and has them in none of its chunks"
            )

    def write(self, stage: Stage, verified: VerifiedStage, at_ms: int) -> Ticket:
        """Writes a stage; the answer is a StageAnswer. Raises as `check` does, or CorruptChunk, DiskFull, LogFailed."""
        self.check(stage)  # another stage may have come while its chunks were read
        for chunk in verified.chunks:
            if not 0 <= chunk.queue_low <= chunk.queue_high < len(self._fold.queues):
                number = chunk.queue_low if chunk.queue_low < 0 else chunk.queue_high
                raise CorruptChunk(f"chunk {chunk.name} has a row for queue number {number}, which never existed")
        named = [{"name": chunk.name, "count": chunk.row_count} for chunk in verified.chunks]
        self._fold.tally = verified.tally
        return self._writer.write_system(STAGE, stage.plain() | {"chunks": named}, at_ms)


def _within(arrival: np.ndarray, ranges: list[tuple[int, int]]) -> np.ndarray:
    mask = np.zeros(len(arrival), np.bool_)
    for start, stop in ranges:
        mask |= (arrival >= start) & (arrival < stop)
    return mask


def raise_if_refused(answer: StageAnswer) -> None:
    """Raises Refused for a stage that was not accepted."""
    if not answer.accepted:
        raise Refused(f"the stage is refused: {answer.reason}")

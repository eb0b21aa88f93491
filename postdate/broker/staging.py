"""Staging: brings the chunks of a pipeline into the wheel without keeping anybody waiting.

    check     is it the turn of this stage? a look at the fold
    verify    reads and checks the files of the chunks and counts the rows taken: as long as it takes, on any thread
    write     writes the record; the fold compares and sets when it is applied

The fold refuses by itself whatever `check` and `write` refuse early, except a chunk that is named twice: whether one is
there already depends on what retention has removed, so that is asked before the record is written. One stage at a time,
or two could name the same chunk.
"""

from typing import NamedTuple

import numpy as np

from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Ticket, Writer
from postdate.contract import Stage
from postdate.errors import CorruptChunk, CorruptQueue, Refused, UsageError
from postdate.state.fold import Fold, StageAnswer, Tally
from postdate.storage.batch import STAGE
from postdate.storage.chunk import Chunk
from postdate.storage.disk import Disk


class VerifiedChunk(NamedTuple):
    """A chunk whose file is whole."""

    name: str
    row_count: int
    queue_low: int  # numbers of the queues that its rows are for
    queue_high: int


class VerifiedStage(NamedTuple):
    """What `verify` has found out about a stage, so that little is left to do where others wait."""

    chunks: list[VerifiedChunk]
    tally: Tally | None  # of the rows that it takes


class Staging:
    """Takes in the stages of pipelines. All but `verify` is called on the thread that writes to the log."""

    def __init__(self, disk: Disk, fold: Fold, writer: Writer, settings: CurrentSettings) -> None:
        self._disk = disk
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

    def verify(self, stage: Stage) -> VerifiedStage:
        """Reads every chunk from its first byte to its last, and the rows that are taken. Raises CorruptChunk, OSError.
        May run on another thread: hashing and comparing columns let others run.
        """
        chunks = [self._verify_chunk(name, stage.horizon[1]) for name in stage.chunks]
        return VerifiedStage(chunks, self._count_taken(stage))

    def _count_taken(self, stage: Stage) -> Tally | None:
        """Returns None where retention was quicker: then the fold counts what is left."""
        try:
            return self._fold.count_far(*stage.far)
        except (CorruptQueue, FileNotFoundError):
            return None

    def _verify_chunk(self, name: str, horizon_to: int) -> VerifiedChunk:
        chunk = Chunk(self._disk, name)
        chunk.verify()
        if chunk.head.due_high_ms > horizon_to:
            raise CorruptChunk(
                f"chunk {name} has a row due at {chunk.head.due_high_ms}, after the horizon {horizon_to}"
            )
        numbers = np.ascontiguousarray(chunk.index["queue"])
        low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        return VerifiedChunk(name, chunk.head.row_count, low, high)

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


def raise_if_refused(answer: StageAnswer) -> None:
    """Raises Refused for a stage that was not accepted."""
    if not answer.accepted:
        raise Refused(f"the stage is refused: {answer.reason}")

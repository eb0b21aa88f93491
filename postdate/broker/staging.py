"""Staging: how the chunks of a pipeline come into the wheel without keeping anybody waiting.

    check      is it the turn of this stage? a look at the fold
    verified   reads and checks the chunks' files and counts the rows taken: as long as it takes, on any thread
    write      the record of the log; the fold compares and sets when it is applied

What `check` and `write` refuse early, the fold would refuse as well, but for chunks that are named twice: whether one
is there already depends on what retention has removed, so that is asked before the record is written. One stage at a
time, or two could name the same chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from postdate.broker.writing import Ticket, Writer
from postdate.config import Settings
from postdate.contract import Stage
from postdate.errors import CorruptChunk, CorruptQueue, Refused, UsageError
from postdate.state.fold import Fold, StageAnswer, Tally
from postdate.storage.batch import STAGE
from postdate.storage.chunk import Chunk
from postdate.storage.disk import Disk


class Whole(NamedTuple):
    """A chunk whose file is whole."""

    name: str
    row_count: int
    queue_low: int  # numbers of the queues that its rows are for
    queue_high: int


class Verified(NamedTuple):
    """What was found out about a stage aside, so that little is left to do where others wait."""

    chunks: list[Whole]
    tally: Tally | None  # of the rows that it takes


class Staging:
    """Of one broker. All but `verified` is called on the thread that writes to the log."""

    def __init__(self, disk: Disk, fold: Fold, writer: Writer, settings: Callable[[], Settings]) -> None:
        self._disk = disk
        self._fold = fold
        self._writer = writer
        self._settings = settings

    def check(self, stage: Stage) -> None:
        """Raises Refused for a stage that is stale, repeated or overtaken, UsageError for one that has too many chunks
        or names no files.
        """
        limit = self._settings().stage_chunks_max
        if len(stage.chunks) > limit:
            raise UsageError(f"stage_chunks_max: the stage has {len(stage.chunks)} chunks, the limit is {limit}")
        for name in stage.chunks:
            if not name or "/" in name or name.startswith("."):
                raise UsageError(f"chunk name {name!r} is no file name")
        refuse(StageAnswer(False, reason) if (reason := self._problem(stage)) else StageAnswer(True, ""))

    def _problem(self, stage: Stage) -> str:
        staged, seen = self._fold.chunks.names(), set[str]()
        for name in stage.chunks:
            if name in staged or name in seen:
                return f"chunk {name} is staged already, or named twice"
            seen.add(name)
        return self._fold.stage_problem(stage._asdict())

    def verified(self, stage: Stage) -> Verified:
        """Reads every chunk from its first byte to its last, and the rows that are taken. Raises CorruptChunk, OSError.
        May run on another thread: hashing and comparing columns let others run.
        """
        return Verified([self._whole(name, stage.horizon[1]) for name in stage.chunks], self._tally(stage))

    def _tally(self, stage: Stage) -> Tally | None:
        """None where retention was quicker: the fold counts what is left."""
        try:
            return self._fold.counted(*stage.far)
        except (CorruptQueue, FileNotFoundError):
            return None

    def _whole(self, name: str, horizon_to: int) -> Whole:
        chunk = Chunk(self._disk, name)
        chunk.verify()
        if chunk.head.due_high_ms > horizon_to:
            raise CorruptChunk(
                f"chunk {name} has a row due at {chunk.head.due_high_ms}, behind the horizon {horizon_to}"
            )
        numbers = np.ascontiguousarray(chunk.index["queue"])
        low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
        return Whole(name, chunk.head.row_count, low, high)

    def write(self, stage: Stage, verified: Verified, at_ms: int) -> Ticket:
        """Writes a stage; the answer is a StageAnswer. Raises as `check` does, or CorruptChunk, DiskFull, LogFailed."""
        self.check(stage)  # much may have happened while its chunks were read
        for chunk in verified.chunks:
            if not 0 <= chunk.queue_low <= chunk.queue_high < len(self._fold.queues):
                number = chunk.queue_low if chunk.queue_low < 0 else chunk.queue_high
                raise CorruptChunk(f"chunk {chunk.name} has a row for queue number {number}, which never existed")
        named = [{"name": chunk.name, "count": chunk.row_count} for chunk in verified.chunks]
        self._fold.tally = verified.tally
        return self._writer.write_system(STAGE, stage._asdict() | {"chunks": named}, at_ms)


def refuse(answer: StageAnswer) -> None:
    """Raises Refused for a stage that was not accepted."""
    if not answer.accepted:
        raise Refused(f"the stage is refused: {answer.reason}")

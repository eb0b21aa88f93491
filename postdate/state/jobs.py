"""Jobs: work in bulk that people have asked for, and where it is.

    loading    an import: its files are being written beside the table
    waiting    its command is in the far queue, which gives it one place in the order of everything
    running    what it changes is decided; the table follows
    done       the table has followed
    failed     nothing was changed

A job is known by the id that its owner chose, so that asking again answers with the first result, and by a number,
which is part of the arrival of every row that it brings. The log decides: what a job changes is settled when the record
of its decision is applied (fold.py), and stays so whatever crashes behind that.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from postdate.contract import CANCEL as CANCEL
from postdate.contract import DONE as DONE
from postdate.contract import ENDED
from postdate.contract import FAILED as FAILED
from postdate.contract import IMPORT as IMPORT
from postdate.contract import LOADING as LOADING
from postdate.contract import POSTPONE as POSTPONE
from postdate.contract import RUNNING as RUNNING
from postdate.contract import WAITING as WAITING
from postdate.state.wheel import NEVER

ENDED_KEPT = 1_000  # jobs that have ended; older ones are forgotten, and so are their ids


@dataclass
class Part:
    """Some of the rows that a job has selected: a file, and what became of them."""

    name: str
    rows: int
    due_low: int
    due_high: int
    arrival_high: int  # of those whose arrival is a place in the log
    own: int  # arrival of its first row when that is brought again, where the job postpones
    late: list[int] = field(default_factory=list)  # rows of it that came too late


@dataclass
class Job:
    number: int
    id: str
    op: str
    at_ms: int
    state: str
    topic: str = ""  # of an import
    where: str = ""  # of the others
    by_ms: int = 0
    far: int = -1  # its command's place in the far queue
    arrival: int = -1  # and in the log
    files: list[list[Any]] = field(default_factory=list)  # of an import, as table_format.File
    rows: int = 0
    bad: int = 0
    changed: int = 0
    late: int = 0
    parts: list[Part] = field(default_factory=list)
    decided_at: int = -1  # the end of the batch in the log that decided it
    ended_at_ms: int = 0
    reason: str = ""  # why it failed

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def is_decided(self) -> bool:
        return self.decided_at >= 0


class Jobs:
    """Of one fold."""

    def __init__(self) -> None:
        self.next_number = 0
        self._by_number: dict[int, Job] = {}
        self._by_id: dict[str, Job] = {}
        self._taking: list[Job] = []  # those that have parts: every cancel asks for them
        self._brought_from: int | None = NEVER  # None where it must be looked for

    def begin(self, op: str, job_id: str, at_ms: int, state: str) -> Job:
        """A new one; one of the same id that has failed is forgotten."""
        known = self._by_id.get(job_id)
        if known is not None:
            assert known.state == FAILED, f"job {job_id} is {known.state}"
            self._forget(known)
        job = Job(self.next_number, job_id, op, at_ms, state)
        self.next_number += 1
        self._by_number[job.number] = self._by_id[job_id] = job
        return job

    def find(self, job_id: str) -> Job | None:
        return self._by_id.get(job_id)

    def get(self, number: int) -> Job | None:
        return self._by_number.get(number)

    def all(self) -> list[Job]:
        """In the order in which they were asked for."""
        return list(self._by_number.values())

    def open(self) -> list[Job]:
        """Those whose commands wait or run, in the order of the far queue."""
        return sorted((job for job in self.all() if job.far >= 0 and not job.is_over), key=lambda job: job.far)

    def enqueue(self, job: Job, far: int, arrival: int) -> None:
        """Its command gets a place in the far queue and in the log."""
        job.far, job.arrival = far, arrival
        self._brought_from = None

    @property
    def brought_from(self) -> int:
        """The first far row behind which there may come rows that only a job brings; NEVER where none do."""
        if self._brought_from is None:
            self._brought_from = min((job.far for job in self.open() if job.op != CANCEL), default=NEVER)
        return self._brought_from

    def decide(self, job: Job, at: int, parts: list[Part]) -> None:
        """What it changes is settled by the batch that ends there."""
        job.state, job.decided_at, job.parts = RUNNING, at, parts
        if parts:
            self._taking.append(job)

    def decided(self) -> list[Job]:
        """Those that have taken messages from where they were, in the order in which they did."""
        return self._taking

    def forget_parts(self, job: Job) -> None:
        """Nobody asks any more what it has taken."""
        job.parts = []
        self._taking = [each for each in self._taking if each is not job]

    def taken(self, before: int, at_ms: int) -> None:
        """Spark has taken every far row before this one: the table has followed."""
        for job in self.open():
            if job.far < before:
                self.end(job, DONE, at_ms)

    def end(self, job: Job, state: str, at_ms: int, reason: str = "") -> None:
        job.state, job.ended_at_ms, job.reason = state, at_ms, reason
        self._brought_from = None
        job.files = []
        ended = [each for each in self._by_number.values() if each.is_over and not each.parts]
        for each in ended[: max(len(ended) - ENDED_KEPT, 0)]:
            self._forget(each)

    def _forget(self, job: Job) -> None:
        del self._by_number[job.number]
        if self._by_id.get(job.id) is job:
            del self._by_id[job.id]

    # -- snapshots ----------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        return [asdict(job) for job in self._by_number.values()]

    def load(self, next_number: int, state: list[dict[str, Any]]) -> None:
        self.next_number, self._brought_from = next_number, None
        known = {each.name for each in fields(Job)}
        for plain in state:
            job = Job(**{name: value for name, value in plain.items() if name in known})
            job.parts = [Part(**part) for part in plain["parts"]]
            self._by_number[job.number] = self._by_id[job.id] = job
        self._taking = sorted((job for job in self.all() if job.parts), key=lambda job: job.decided_at)

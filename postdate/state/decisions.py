"""Decisions: what the records of jobs change when they are applied.

    begin, ask    a job is there: it loads its files, or waits for a pipeline
    adopt         its files are written: it waits
    fail          it is over, and nothing was changed
    decide        what it has selected is taken from where it waits, or came too late

Whatever was written, only a call that fits where the job is by now changes anything. Jobs and their states are in
jobs.py; what they have taken is asked of takings.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from postdate.state.far import FAR_STRUCT, NEVER, Far
from postdate.state.jobs import FAILED, IMPORT, LOADING, WAITING, Job, Jobs, Part
from postdate.storage.batch import JOB
from postdate.storage.selection import Selections
from postdate.table.format import NEAR, OWN, job_of

_Judge = Callable[[np.ndarray], np.ndarray]  # rows in, which of them


class JobAnswer(NamedTuple):
    """Where a job is now; without one, why not."""

    job: Job | None
    reason: str = ""


class Command(NamedTuple):
    """A job's record in the log."""

    arrival: int
    size: int
    batch_end: int
    at_ms: int


class Decisions:
    """Of one fold. `is_cancelled` says which selected rows a cancel has taken; `kill` cancels those of them that live
    in the wheel, and says which; `hold` keeps a record in the log.
    """

    def __init__(
        self, jobs: Jobs, far: Far, selections: Selections, *, is_cancelled: _Judge, kill: _Judge,
        hold: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._jobs = jobs
        self._far = far
        self._selections = selections
        self._is_cancelled = is_cancelled
        self._kill = kill
        self._hold = hold

    def apply(self, body: dict[str, Any], command: Command) -> JobAnswer:
        call = body["call"]
        if call == "decide":
            return self._decide(body, command.batch_end)
        job = self._jobs.find(body["id"])
        if call in ("begin", "ask") and (job is None or job.state == FAILED):
            job = self._jobs.begin(body["op"], body["id"], command.at_ms, LOADING if call == "begin" else WAITING)
            job.topic, job.where, job.by_ms = body["topic"], body["where"], body["by_ms"]
            if call == "ask":
                self._enqueue(job, command)
        elif call == "adopt" and job is not None and job.state == LOADING:
            job.files, job.rows, job.bad, job.state = body["files"], body["rows"], body["bad"], WAITING
            self._enqueue(job, command)
        elif call == "fail" and job is not None and job.state in (LOADING, WAITING):
            self._jobs.end(job, FAILED, command.at_ms, body["reason"])
        return JobAnswer(job, "" if job is not None else f"there is no job {body['id']!r}")

    def _enqueue(self, job: Job, command: Command) -> None:
        """A job's command gets its place among far messages and cancels. It is never due, so that nobody rescues it."""
        self._jobs.enqueue(job, self._far.length, command.arrival)
        self._far.push(FAR_STRUCT.pack(job.arrival, NEVER, 0, 0, command.size, 0, 0, JOB, 0, 0), NEVER)
        self._hold(job.arrival)

    def problem(self, body: dict[str, Any]) -> str:
        """Why a decision is refused; empty where it is accepted."""
        job, epoch = self._jobs.get(body["number"]), self._far.epoch
        if body["epoch"] != epoch:
            return f"epoch {body['epoch']} is not the current one ({epoch}): another pipeline has registered"
        if job is None or job.state != WAITING:
            return f"job {body['number']} does not wait for a decision" + (f": it is {job.state}" if job else "")
        if job.op == IMPORT and (body["parts"] or body["files"]):
            return f"job {body['number']} is an import: it has its files, and selects nothing"
        return ""

    def _decide(self, body: dict[str, Any], batch_end: int) -> JobAnswer:
        """What a job has selected changes where it still waits: from here on it is not there any more. Of an import it
        is noted that it cannot be withdrawn any more.
        """
        reason, job = self.problem(body), self._jobs.get(body["number"])
        if reason or job is None:
            return JobAnswer(None, reason)
        self._jobs.decide(job, batch_end, [Part(**part) for part in body["parts"]])
        if job.op == IMPORT:
            return JobAnswer(job)
        job.files = body["files"]
        for part in job.parts:
            part.late = np.flatnonzero(~self._taken_away(part)).tolist()
        job.rows = sum(part.rows for part in job.parts)
        job.late = sum(len(part.late) for part in job.parts)
        job.changed = job.rows - job.late
        return JobAnswer(job)

    def _taken_away(self, part: Part) -> np.ndarray:
        """Which rows of a part still waited. Those in the wheel are cancelled there; of the others the table is told,
        and until it has followed no rescue and no stage brings them.
        """
        rows = self._selections.rows(part.name)
        waits = self._waits_in_table(rows)
        waits &= ~self._is_cancelled(rows)
        waits |= self._kill(rows)
        return waits

    def _waits_in_table(self, rows: np.ndarray) -> np.ndarray:
        """Which selected rows wait in the table, or are on their way there: not in the wheel."""
        far, arrival = self._far, rows["arrival"]
        is_own = arrival >= OWN
        untaken = ~is_own & (arrival >= far.arrival_of(far.taken))
        if is_own.any():
            fresh = [job.number for job in self._jobs.all() if job.far >= far.taken]
            untaken |= is_own & np.isin(job_of(arrival), fresh)
        rescued = ~is_own & far.rescued(arrival, rows["due"])
        waits: np.ndarray = ((rows["due"] > far.horizon_at_ms) | untaken) & ~rescued & (rows["flags"] & NEAR == 0)
        return waits

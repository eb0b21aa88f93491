"""Takings: the messages that decided jobs have taken from where they waited, and where they have moved them to.

A job that cancels takes away; one that postpones takes away and brings again later. What it has taken are the rows of
its selections that did not come too late. The table follows a decision only with time: until then no rescue and no
stage may bring back what a job has taken, and for longer a handle may ask for what it has moved. Nothing is decided
here, only remembered and forgotten; decisions.py decides.
"""

from collections.abc import Iterable

import numpy as np

from postdate.keys import key_hash
from postdate.state.jobs import DONE, POSTPONE, RUNNING, Job, Jobs, Part
from postdate.state.topics import Topics
from postdate.storage.selection import Selections


class Takings:
    """Of one fold."""

    def __init__(self, jobs: Jobs, selections: Selections, topics: Topics) -> None:
        self._jobs = jobs
        self._selections = selections
        self._topics = topics

    # -- what is taken away -------------------------------------------------------------------------------------

    def dead(self, rows: np.ndarray) -> np.ndarray:
        """Which rows, of the far queue or of a chunk, a job has taken away."""
        return self.dead_by(rows, self._jobs.decided())

    def dead_by(self, rows: np.ndarray, jobs: Iterable[Job]) -> np.ndarray:
        """Which of them one of these jobs has taken away."""
        dead = np.zeros(len(rows), np.bool_)
        if not len(rows):
            return dead
        low, high = int(rows["due"].min()), int(rows["due"].max())
        for part in [part for job in jobs for part in job.parts if part.due_low <= high and part.due_high >= low]:
            taken = self._between(part, low, high)
            if len(taken):
                dead |= np.isin(rows["arrival"], taken["arrival"])
        return dead

    def ahead_of(self, far: int) -> list[Job]:
        """Jobs that are decided and that a table at this far row has not followed yet: it may still promote what they
        have taken away.
        """
        return [job for job in self._jobs.decided() if job.state == RUNNING and job.far >= far]

    def _between(self, part: Part, low: int, high: int) -> np.ndarray:
        """The rows of a part with low <= due <= high that did not come too late."""
        rows = self._selections.rows_left(part.name)
        start, stop = int(np.searchsorted(rows["due"], low, "left")), int(np.searchsorted(rows["due"], high, "right"))
        late = [row - start for row in part.late if start <= row < stop]
        return np.delete(rows[start:stop], late) if late else rows[start:stop]

    # -- what is moved ------------------------------------------------------------------------------------------

    def moved_dues(self, topic: str, unique_key: str, due: int) -> list[int]:
        """Where jobs have moved messages of a topic, unique key and due to."""
        hashed, found = np.uint64(key_hash(unique_key)), {due}
        for job in self._jobs.decided():
            if job.op == POSTPONE:
                found |= {each + job.by_ms for each in found if self._has_moved(job, topic, hashed, each)}
        return sorted(found - {due})

    def _has_moved(self, job: Job, topic: str, hashed: np.uint64, due: int) -> bool:
        for part in [part for part in job.parts if part.due_low <= due <= part.due_high]:
            rows = self._between(part, due, due)
            queues = rows["queue"][rows["unique_hash"] == hashed].tolist()
            if any(self._topics.places[queue][0] == topic for queue in queues):
                return True
        return False

    def is_moved(self, due: int, arrival: int) -> bool:
        """Whether a job has postponed the message of this place: a cancel finds it here no more."""
        for part in [part for job in self._jobs.decided() if job.op == POSTPONE for part in job.parts]:
            if part.due_low <= due <= part.due_high:
                arrivals = self._between(part, due, due)["arrival"]
                place = int(np.searchsorted(arrivals, arrival))
                if place < len(arrivals) and arrivals[place] == arrival:
                    return True
        return False

    # -- what is forgotten --------------------------------------------------------------------------------------

    def forget(self, until_ms: int) -> None:
        """Of what a job has taken away nothing can come back when the horizon has passed it; where it moved something,
        a handle may ask for that until it has been fired, and until what later jobs have made of it has been.
        `until_ms` is passed by the horizon, and fired.
        """
        later: list[Part] = []  # of jobs behind it that move something
        for job in reversed(self._jobs.decided()):
            is_followed = any(_moves_into(job, part, later) for part in job.parts)
            if job.state == DONE and _due_last(job) <= until_ms and not is_followed:
                self._jobs.forget_parts(job)
            elif job.op == POSTPONE:
                later += job.parts


def _due_last(job: Job) -> int:
    """Of what a job has taken and, where it moves something, of what it has made of that."""
    return max(part.due_high for part in job.parts) + job.by_ms


def _moves_into(job: Job, part: Part, later: Iterable[Part]) -> bool:
    """Whether what a job has moved may be among the rows of parts."""
    low, high = part.due_low + job.by_ms, part.due_high + job.by_ms
    return job.op == POSTPONE and any(each.due_low <= high and each.due_high >= low for each in later)

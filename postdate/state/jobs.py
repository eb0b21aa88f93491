"""Jobs: work in bulk that people ask for, where each job stands, and what it has taken. A table of the fold.

    loading    an import: its files are being written beside the table
    waiting    an import: the table takes its files in; another job: a pipeline selects what it is for
    running    what it changes is decided; the table follows
    done       the table has followed
    failed     nothing was changed

What the table has to do has a row in the far queue, and so one place in the order of everything: an import gets it when
its files are written, another job when it is decided. A selection may take long, and nothing waits for it.

A pipeline notes each try in the log before it begins, so that one that kills it counts, too. A job that has used its
tries before it is decided has failed. A decided one never fails: where the table cannot follow, the job is set aside
with all that it has taken, until a pipeline that starts anew tries again.

A job is known by the id that its owner chose, so that asking again answers with the first result, and by a number,
which is part of the arrival of every row that it brings. The log decides: what a job changes is settled when the record
of its decision is applied, and stays so whatever crashes later.

A job that cancels takes messages away; one that postpones takes them away and brings them again later. What it has
taken are the rows of its selections that did not come too late. The table follows a decision only with time: until then
no rescue and no stage may bring back what a job has taken, and for longer a handle may ask where a job has moved its
message.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from postdate.arrival import NEAR, NEVER, OWN, job_of, own_arrival
from postdate.contract import CANCEL as CANCEL
from postdate.contract import DONE as DONE
from postdate.contract import ENDED
from postdate.contract import FAILED as FAILED
from postdate.contract import IMPORT as IMPORT
from postdate.contract import LOADING as LOADING
from postdate.contract import POSTPONE as POSTPONE
from postdate.contract import RUNNING as RUNNING
from postdate.contract import WAITING as WAITING
from postdate.keys import key_hash
from postdate.state.columns import subtract
from postdate.state.far import Far
from postdate.state.references import References
from postdate.state.topics import Topics
from postdate.state.wheel import Wheel
from postdate.storage.batch import JOB
from postdate.storage.layout import FAR_STRUCT
from postdate.storage.selection import Selections

ENDED_KEPT = 1_000  # jobs that have ended; older ones are forgotten, and so are their ids
TRIES_MAX = 3  # of a selection, and of the table to follow a decision: what fails thrice fails always

_NEW = ""  # the state of a job that does not exist yet
# The calls that its records hold: of people and imports, and of the pipeline that carries it out.
BEGIN, ASK, ADOPT, FAIL = "begin", "ask", "adopt", "fail"
TRY, STUMBLE, LEAVE, AGAIN, DECIDE = "try", "stumble", "leave", "again", "decide"
ATTEMPTS = (TRY, STUMBLE, LEAVE, AGAIN)
_FOLLOW = "follow"  # the table has taken its row

# (state, event): next state. An event that is not listed for a state changes nothing.
TRANSITIONS = {
    (_NEW, BEGIN): LOADING,
    (_NEW, ASK): WAITING,
    (FAILED, BEGIN): LOADING,
    (FAILED, ASK): WAITING,
    (LOADING, ADOPT): WAITING,
    (LOADING, FAIL): FAILED,
    (WAITING, FAIL): FAILED,
    (WAITING, DECIDE): RUNNING,
    (WAITING, _FOLLOW): DONE,  # an import
    (RUNNING, _FOLLOW): DONE,
}


@dataclass
class Part:
    """A file of rows that a job has selected, and what became of them."""

    name: str
    rows: int
    due_low: int
    due_high: int
    arrival_high: int  # of those whose arrival is a place in the log
    own: int  # arrival of its first row when that is brought again, where the job postpones
    late: list[int] = field(default_factory=list)  # rows of it that came too late


@dataclass
class Job:
    """One job, as a snapshot holds it and as the pipeline reads it."""

    number: int
    id: str
    op: str  # IMPORT, CANCEL or POSTPONE
    at_ms: int  # when it was asked for
    state: str
    topic: str = ""  # of an import
    where: str = ""  # the predicate of the others
    by_ms: int = 0  # how far it postpones
    far: int = -1  # its row in the far queue
    arrival: int = -1  # its command's place in the log: it is for what came before
    loading: list[int] = field(default_factory=list)  # earlier imports that had not come yet when it was asked for
    files: list[list[Any]] = field(default_factory=list)  # of an import, as table_format.File
    rows: int = 0
    bad: int = 0
    changed: int = 0
    late: int = 0
    parts: list[Part] = field(default_factory=list)
    decided_at: int = -1  # the end of the batch in the log that decided it
    ended_at_ms: int = 0
    reason: str = ""  # why it, or its last try, failed
    tries: int = 0  # that have begun; they count anew when it is decided
    tried_at: int = -1  # where in the log its selection began that is under way
    aside: bool = False  # it is decided, and the table could not follow
    brought_until_ms: int = -1  # rows of its files due until then came into the wheel before the table took them

    @property
    def is_over(self) -> bool:
        return self.state in ENDED

    @property
    def is_decided(self) -> bool:
        return self.decided_at >= 0


class JobAnswer(NamedTuple):
    """The job as it is now; where there is none, the reason."""

    job: Job | None
    reason: str = ""


class Jobs:
    """All jobs by number and by id.

    `near` counts the messages in the wheel by queue number; a decision that takes one counts it off.
    """

    def __init__(
        self,
        wheel: Wheel,
        far: Far,
        topics: Topics,
        selections: Selections,
        references: References,
        near: list[int],
    ) -> None:
        self._wheel = wheel
        self._far = far
        self._topics = topics
        self._selections = selections
        self._references = references
        self._near = near
        self._by_number: dict[int, Job] = {}
        self._by_id: dict[str, Job] = {}
        self._decided: list[Job] = []  # those that have parts: every cancel asks for them
        self._brought_from: int | None = NEVER  # None where it must be computed
        self._remembered_from: int | None = NEVER  # likewise
        self.next_number = 0

    # -- looking ------------------------------------------------------------------------------------------------

    def find(self, job_id: str) -> Job | None:
        return self._by_id.get(job_id)

    def get(self, number: int) -> Job | None:
        return self._by_number.get(number)

    def all(self) -> list[Job]:
        """Every job, in the order in which they were asked for."""
        return list(self._by_number.values())

    def open(self) -> list[Job]:
        """The jobs that wait or run, in the order of their commands."""
        return sorted((job for job in self.all() if job.state in (WAITING, RUNNING)), key=lambda job: job.arrival)

    def next_to_select(self) -> Job | None:
        """The job that a pipeline may select for now: the first that waits, if the table has all that came before it
        and has followed what was decided.
        """
        selecting = [job for job in self.open() if job.op != IMPORT]
        waiting = next((job for job in selecting if job.state == WAITING), None)
        if waiting is None or any(job.state == RUNNING and not job.aside for job in selecting):
            return None
        return waiting if self._far.arrival_of(self._far.taken) > waiting.arrival else None

    def wanted_far(self) -> int:
        """The far row up to which somebody waits for the table: it takes in an import, follows a decision, or gets all
        that came before a job.
        """
        open_jobs = self.open()
        placed = [job.far + 1 for job in open_jobs if not job.aside and (job.state == RUNNING or job.op == IMPORT)]
        asked = [job.arrival for job in open_jobs if job.state == WAITING and job.op != IMPORT]
        before = [self._far.rows.search("arrival", asked[-1], "left")] if asked else []
        return max((*placed, *before), default=0)

    def beside(self) -> list[Job]:
        """The jobs whose files lie beside the table: no batch has taken them in."""
        open_jobs = [job for job in self.open() if job.op != CANCEL and job.files]
        return [job for job in open_jobs if job.state == RUNNING or job.op == IMPORT]

    def first_due_beside(self) -> int:
        """A lower bound of what is due in these files and is not in the wheel; NEVER where there is nothing."""
        left = [
            max(due_low, job.brought_until_ms + 1)
            for job in self.beside()
            for _, _, _, due_low, due_high, *_ in job.files
            if due_high > job.brought_until_ms
        ]
        return min(left, default=NEVER)

    def decided(self) -> list[Job]:
        """The jobs that have taken messages from where they were, in the order in which they did."""
        return self._decided

    @property
    def brought_from(self) -> int:
        """The first far row after which rows may come that only a job brings; NEVER where no job brings any."""
        if self._brought_from is None:
            placed = [job.far for job in self.open() if job.op != CANCEL and job.far >= 0]
            self._brought_from = min(placed, default=NEVER)
        return self._brought_from

    @property
    def remembered_from(self) -> int:
        """From this place of the log on every cancel is remembered; NEVER where none need be. A selection that is under
        way may hold its message, and so may what was set aside.
        """
        if self._remembered_from is None:
            tried = [job.tried_at for job in self.open() if job.state == WAITING and job.tried_at >= 0]
            aside = [job.arrival for job in self.open() if job.aside and job.op != CANCEL]
            self._remembered_from = min((*tried, *aside), default=NEVER)
        return self._remembered_from

    # -- applying records ---------------------------------------------------------------------------------------

    def apply(self, body: dict[str, Any], arrival: int, size: int, at_ms: int) -> JobAnswer:
        """Applies the record of any call but a decision; it stands in the log at `arrival` and has `size` bytes."""
        event, job = body["call"], self.find(body["id"])
        state = TRANSITIONS.get((job.state if job else _NEW, event))
        if state is None:
            return JobAnswer(job, "" if job is not None else f"there is no job {body['id']!r}")
        if event in (BEGIN, ASK):
            job = self.begin(body["op"], body["id"], at_ms, state)
            job.topic, job.where, job.by_ms = body["topic"], body["where"], body["by_ms"]
        assert job is not None, f"{event} changes no job that does not exist"
        if event == ADOPT:
            job.files, job.rows, job.bad, job.state = body["files"], body["rows"], body["bad"], state
        if event == FAIL:
            self.end(job, state, at_ms, body["reason"])
        if state == WAITING:
            job.arrival = arrival
            job.loading = [each.number for each in self.all() if each.state == LOADING]
            if body.get("place", True):  # a record of an earlier version has its row here
                self._place(job, arrival, size)
        return JobAnswer(job)

    def _place(self, job: Job, arrival: int, size: int) -> None:
        """Gives a job its row in the far queue, for a record that stands in the log at `arrival`. It is never due, so
        no rescue takes it.
        """
        self.enqueue(job, self._far.length)
        self._far.push(FAR_STRUCT.pack(arrival, NEVER, 0, 0, size, 0, 0, JOB, 0, 0), NEVER)
        self._references.hold(arrival)

    def begin(self, op: str, job_id: str, at_ms: int, state: str) -> Job:
        """Makes a job; one of the same id that has failed is forgotten."""
        known = self._by_id.get(job_id)
        if known is not None:
            assert known.state == FAILED, f"job {job_id} is {known.state}"
            self._forget(known)
        job = Job(self.next_number, job_id, op, at_ms, state)
        self.next_number += 1
        self._by_number[job.number] = self._by_id[job_id] = job
        return job

    def enqueue(self, job: Job, far: int) -> None:
        """Notes the row of a job in the far queue."""
        job.far = far
        self._changed()

    def _changed(self) -> None:
        self._brought_from = self._remembered_from = None

    def follow_table(self, taken: int, at_ms: int) -> None:
        """Spark has taken every far row before `taken`: the table has followed the jobs there."""
        for job in self.open():
            is_there = 0 <= job.far < taken and not job.aside
            if is_there and (job.state == RUNNING or job.op == IMPORT):
                self.end(job, TRANSITIONS[job.state, _FOLLOW], at_ms)

    def end(self, job: Job, state: str, at_ms: int, reason: str = "") -> None:
        job.state, job.ended_at_ms, job.reason = state, at_ms, reason
        self._changed()
        job.files = []
        ended = [each for each in self._by_number.values() if each.is_over and not each.parts]
        for each in ended[: max(len(ended) - ENDED_KEPT, 0)]:
            self._forget(each)

    def _forget(self, job: Job) -> None:
        del self._by_number[job.number]
        if self._by_id.get(job.id) is job:
            del self._by_id[job.id]

    # -- bringing before the table has followed -----------------------------------------------------------------

    def bring_problem(self, number: int, from_ms: int, until_ms: int, horizon_ms: int) -> str:
        """Why rows of a job's files cannot be brought into the wheel; empty where they can. Compare and set on how far
        they were brought before.
        """
        job = self.get(number)
        is_due = job is not None and (job.state == RUNNING or (job.state == WAITING and job.op == IMPORT))
        if job is None or not is_due or job.op == CANCEL:
            return f"job {number} brings no messages" + (f": it is {job.state}" if job else "")
        if from_ms != job.brought_until_ms or not from_ms <= until_ms <= horizon_ms:
            return (
                f"it brings what job {number} has from {from_ms} to {until_ms}: that was brought up to "
                f"{job.brought_until_ms}, the horizon is {horizon_ms}"
            )
        return ""

    def bring(self, number: int, until_ms: int, batch_end: int) -> None:
        """Notes how far the rows of a job's files are in the wheel. An import can be withdrawn no more."""
        job = self._by_number[number]
        job.brought_until_ms = until_ms
        if job.state == WAITING:
            self.run(job, batch_end, [])

    def brought(self) -> list[Job]:
        """The jobs whose rows may come again from the table. Where a job is over, the horizon has passed them all."""
        return [job for job in self._by_number.values() if job.brought_until_ms >= 0 and not job.is_over]

    def find_brought(self, rows: np.ndarray) -> np.ndarray:
        """Which rows, of a chunk or selected, came into the wheel in that way."""
        found, arrival = np.zeros(len(rows), np.bool_), rows["arrival"]
        for job in self.brought():
            is_own = (arrival >= own_arrival(job.number)) & (arrival < own_arrival(job.number + 1))
            found |= is_own & (rows["due"] <= job.brought_until_ms)
        return found

    # -- trying -------------------------------------------------------------------------------------------------

    def attempt(self, body: dict[str, Any], arrival: int, size: int, at_ms: int) -> JobAnswer:
        """Applies what a pipeline says of its tries. With a job and a reason: there is nothing to try any more."""
        job, epoch = self.get(body["number"]), self._far.epoch
        if body["epoch"] != epoch:
            return JobAnswer(None, _overtaken(body["epoch"], epoch))
        if job is None or job.state not in (WAITING, RUNNING):
            return JobAnswer(job, f"job {body['number']} is {job.state if job else 'unknown'}")
        self._changed()
        job.tried_at = -1
        call, is_last = body["call"], job.tries >= TRIES_MAX
        if call == TRY and is_last:
            self._give_up(job, job.reason or f"the pipeline ended during each of its {TRIES_MAX} tries", at_ms)
            return JobAnswer(job, f"job {job.number} has used its {TRIES_MAX} tries")
        if call == TRY:
            job.tries, job.tried_at = job.tries + 1, arrival
        elif call == STUMBLE:
            job.reason = body["reason"]
            if is_last:
                self._give_up(job, f"given up after {TRIES_MAX} tries: {job.reason}", at_ms)
        elif call == LEAVE:
            job.tries = max(job.tries - 1, 0)
        elif job.aside:
            job.aside, job.tries = False, 0
            self._place(job, arrival, size)
        return JobAnswer(job)

    def _give_up(self, job: Job, reason: str, at_ms: int) -> None:
        """Ends a job that has changed nothing, and sets one aside that is decided."""
        job.reason = reason
        if job.state == WAITING:
            self.end(job, FAILED, at_ms, reason)
        else:
            job.aside = True

    # -- deciding -----------------------------------------------------------------------------------------------

    def decision_problem(self, body: dict[str, Any]) -> str:
        """Why a decision is refused; empty where it is accepted."""
        job, epoch = self.get(body["number"]), self._far.epoch
        if body["epoch"] != epoch:
            return _overtaken(body["epoch"], epoch)
        if job is None or (job.state, DECIDE) not in TRANSITIONS:
            return f"job {body['number']} does not wait for a decision" + (f": it is {job.state}" if job else "")
        if job.op == IMPORT and (body["parts"] or body["files"]):
            return f"job {body['number']} is an import: it has its files, and selects nothing"
        return ""

    def decide(self, body: dict[str, Any], arrival: int, size: int, batch_end: int) -> JobAnswer:
        """Applies a decision: from here on the job cannot be withdrawn. `take_selected` follows for each part. The
        table follows where the decision's row stands in the far queue.
        """
        reason, job = self.decision_problem(body), self.get(body["number"])
        if reason or job is None:
            return JobAnswer(None, reason)
        if body.get("place", False):
            self._place(job, arrival, size)
        self.run(job, batch_end, [Part(**part) for part in body["parts"]])
        if job.op != IMPORT:
            job.files = body["files"]
        return JobAnswer(job)

    def run(self, job: Job, decided_at: int, parts: list[Part]) -> None:
        """What the job changes is settled by the batch that ends at `decided_at`."""
        job.state, job.decided_at, job.parts = TRANSITIONS[job.state, DECIDE], decided_at, parts
        job.tries, job.tried_at, job.reason = 0, -1, ""
        self._changed()
        if parts:
            self._decided.append(job)

    def take_selected(self, job: Job, part: Part, is_cancelled: np.ndarray, at_ms: int) -> None:
        """Takes the rows of a part from where they still wait; the others came too late. `is_cancelled` says which of
        the rows a cancel took before.

        Rows in the wheel die there. The others are the table's to remove, and until it has followed no rescue and no
        stage brings them.
        """
        rows = self._selections.rows(part.name)
        aside = [each for each in self._decided if each.aside]  # the table still has what they have taken
        waits = self.waits_in_table(rows) & ~is_cancelled & ~self.find_taken_by(rows, aside)
        waits |= self._kill_in_wheel(rows, at_ms)
        part.late = np.flatnonzero(~waits).tolist()
        job.rows += part.rows
        job.late += len(part.late)
        job.changed = job.rows - job.late

    def waits_in_table(self, rows: np.ndarray) -> np.ndarray:
        """Which selected rows wait in the table, or are on their way there: not in the wheel."""
        far, arrival = self._far, rows["arrival"]
        is_own = arrival >= OWN
        untaken = ~is_own & (arrival >= far.arrival_of(far.taken))
        if is_own.any():
            fresh = [job.number for job in self.all() if job.far >= far.taken]
            untaken |= is_own & np.isin(job_of(arrival), fresh)
        rescued = (~is_own & far.rescued(arrival, rows["due"])) | self.find_brought(rows)
        waits: np.ndarray = ((rows["due"] > far.horizon_at_ms) | untaken) & ~rescued & (rows["flags"] & NEAR == 0)
        return waits

    def _kill_in_wheel(self, rows: np.ndarray, at_ms: int) -> np.ndarray:
        """Kills the living wheel entries of selected rows; returns which rows had one."""
        soon = np.flatnonzero(rows["due"] <= self._wheel.last_due)
        killed = self._wheel.kill_many(rows["due"][soon], rows["arrival"][soon])
        subtract(self._near, rows["queue"][soon[killed.all]])
        self._references.release_many(rows["arrival"][soon[killed.singles]], at_ms)
        is_killed = np.zeros(len(rows), np.bool_)
        is_killed[soon[killed.all]] = True
        return is_killed

    # -- what jobs have taken -----------------------------------------------------------------------------------

    def find_taken(self, rows: np.ndarray) -> np.ndarray:
        """Which rows, of the far queue or of a chunk, a job has taken away."""
        return self.find_taken_by(rows, self._decided)

    def find_taken_by(self, rows: np.ndarray, jobs: Iterable[Job]) -> np.ndarray:
        """Which rows one of these jobs has taken away."""
        taken = np.zeros(len(rows), np.bool_)
        if not len(rows):
            return taken
        low, high = int(rows["due"].min()), int(rows["due"].max())
        for part in [part for job in jobs for part in job.parts if part.due_low <= high and part.due_high >= low]:
            selected = self._rows_between(part, low, high)
            if len(selected):
                taken |= np.isin(rows["arrival"], selected["arrival"])
        return taken

    def ahead_of(self, far: int) -> list[Job]:
        """Jobs that are decided and that a table at this far row has not followed yet: it may still promote what they
        have taken away.
        """
        return [job for job in self._decided if job.state == RUNNING and (job.far >= far or job.aside)]

    def _rows_between(self, part: Part, low: int, high: int) -> np.ndarray:
        """The rows of a part with low <= due <= high that did not come too late."""
        rows = self._selections.rows_left(part.name)
        start, stop = int(np.searchsorted(rows["due"], low, "left")), int(np.searchsorted(rows["due"], high, "right"))
        late = [row - start for row in part.late if start <= row < stop]
        return np.delete(rows[start:stop], late) if late else rows[start:stop]

    # -- where they have moved it -------------------------------------------------------------------------------

    def moved_dues(self, topic: str, unique_key: str, due: int) -> list[int]:
        """The dues to which jobs have moved messages of a topic, unique key and due."""
        hashed, found = np.uint64(key_hash(unique_key)), {due}
        for job in self._decided:
            if job.op == POSTPONE:
                found |= {each + job.by_ms for each in found if self._has_moved_key(job, topic, hashed, each)}
        return sorted(found - {due})

    def _has_moved_key(self, job: Job, topic: str, hashed: np.uint64, due: int) -> bool:
        for part in [part for part in job.parts if part.due_low <= due <= part.due_high]:
            rows = self._rows_between(part, due, due)
            queues = rows["queue"][rows["unique_hash"] == hashed].tolist()
            if any(self._topics.places[queue][0] == topic for queue in queues):
                return True
        return False

    def has_moved(self, due: int, arrival: int) -> bool:
        """Whether a job has postponed the message of this due and arrival: a cancel finds it here no more."""
        for part in [part for job in self._decided if job.op == POSTPONE for part in job.parts]:
            if part.due_low <= due <= part.due_high:
                arrivals = self._rows_between(part, due, due)["arrival"]
                place = int(np.searchsorted(arrivals, arrival))
                if place < len(arrivals) and arrivals[place] == arrival:
                    return True
        return False

    def forget_passed(self, until_ms: int) -> None:
        """Forgets what jobs have taken and no call can ask for any more. The horizon has passed `until_ms`, and
        everything due by then is fired.

        What a job has taken away cannot come back when the horizon has passed it. Where it moved something, a handle
        may ask for that until it has been fired, and until what later jobs have made of it has been.
        """
        later: list[Part] = []  # of later jobs that move something
        for job in reversed(self._decided):
            is_followed = any(_moves_into(job, part, later) for part in job.parts)
            # The dues are those of what it has taken and, where it moves something, of what it has made of that.
            is_fired = job.state == DONE and max(part.due_high for part in job.parts) + job.by_ms <= until_ms
            if is_fired and not is_followed:
                job.parts = []
                self._decided = [each for each in self._decided if each is not job]
            elif job.op == POSTPONE:
                later += job.parts

    # -- snapshots ----------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        return [asdict(job) for job in self._by_number.values()]

    def load(self, next_number: int, state: list[dict[str, Any]]) -> None:
        self.next_number = next_number
        self._changed()
        known = {each.name for each in fields(Job)}
        for plain in state:
            job = Job(**{name: value for name, value in plain.items() if name in known})
            job.parts = [Part(**part) for part in plain["parts"]]
            self._by_number[job.number] = self._by_id[job.id] = job
        self._decided = sorted((job for job in self.all() if job.parts), key=lambda job: job.decided_at)


def _overtaken(epoch: int, current: int) -> str:
    return f"epoch {epoch} is not the current one ({current}): another pipeline has registered"


def _moves_into(job: Job, part: Part, later: Iterable[Part]) -> bool:
    """Whether what a job has moved may be among the rows of later parts."""
    low, high = part.due_low + job.by_ms, part.due_high + job.by_ms
    return job.op == POSTPONE and any(each.due_low <= high and each.due_high >= low for each in later)

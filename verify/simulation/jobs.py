"""Clients that ask for jobs (cancel, postpone, import), and what must follow from the answers.

- An id names one job, however often it is asked for; only a job that has failed starts again.
- A job selects exactly the messages that match its predicate, waited, and came before its command.
- Each selected row is changed, or the job was too late for it; once decided, that does not change.
- A changed message is not seen at its old due: a cancelled one never, a postponed one once, at its new due or later.
- A message for which the job was too late was delivered or cancelled before. Other messages are untouched.
- An imported message is seen once if its import was adopted, and never if that has failed.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from postdate.arrival import own_arrival
from postdate.broker.writing import Ticket
from postdate.errors import DiskFull, FlowControl, Refused
from postdate.keys import key_hash
from postdate.message import Message
from postdate.state.jobs import CANCEL, DONE, FAILED, IMPORT, LOADING, POSTPONE, RUNNING, WAITING, Job, JobAnswer
from postdate.state.topics import GONE
from postdate.storage import record as records
from postdate.storage.batch import MESSAGE
from postdate.storage.layout import FAR
from verify.simulation.model import Broken, Sent
from verify.simulation.pipeline import TableRow, selects
from verify.simulation.producers import Producers
from verify.simulation.site import TOPICS, Site, Watch, topic_at

_PROGRESS = {LOADING: 0, WAITING: 1, RUNNING: 2, DONE: 3, FAILED: 3}


class Seen(NamedTuple):
    """The state of a job at the last look."""

    id: str
    state: str
    counts: tuple[int, int, int]  # rows, changed, late


class Jobs:
    """All jobs of a run."""

    def __init__(self, site: Site, watch: Watch, producers: Producers) -> None:
        self._site = site
        self._watch = watch
        self._producers = producers  # makes the messages of imports
        self._known: dict[int, Seen] = {}  # by number
        self._files: dict[int, list[object]] = {}  # of imports, by number: the file as the broker gets it
        self._names: dict[int, list[str]] = {}  # of imports, by number: the messages in the file
        self._asked: list[tuple[Ticket, str]] = []
        self._commands: dict[str, int] = {}  # of imported messages: the log position of the job's command
        # Since the last look: jobs that were decided, with the names of messages that they changed or could not see.
        self._decided: list[tuple[Job, set[str]]] = []

    # -- asking -------------------------------------------------------------------------------------------------

    def ask(self, name: int, where: int, by_ms: int) -> None:
        """Asks to cancel (by 0 ms) or to postpone what a predicate selects; the id may be known already."""
        job_id, op = f"job-{name}", POSTPONE if by_ms else CANCEL
        predicate = f"topic={topic_at(where)}" if where < len(TOPICS) else f"key=k{where - len(TOPICS)}"
        with self._site.digest.suppress(DiskFull, FlowControl, Refused):
            ticket = self._site.broker.jobs.ask(job_id, op, predicate, by_ms, self._site.now_ms())
            self._asked.append((ticket, job_id))

    def load(self, name: int, amount: int, key: int, place: int, count: int) -> None:
        """Begins an import and writes its messages to a file beside the table."""
        topic = topic_at(place)
        self._watch.flush()
        number = self._begin_import(f"import-{name}", topic)
        if number is not None:
            batch = [self._producers.make_message(4, amount + index, key, topic, 0) for index in range(count)]
            self._fill(number, [self._row(message, own_arrival(number, 0, n)) for n, message in enumerate(batch)])

    def _begin_import(self, job_id: str, topic: str) -> int | None:
        """Begins an import; returns its number if its file is to be written now, else None."""
        broker = self._site.broker
        with self._site.digest.suppress(DiskFull, FlowControl, Refused):
            ticket = broker.jobs.begin(job_id, topic, self._site.now_ms())
            broker.flush()
            job: Job = ticket.answer.job
            self._note_job(job)
            if job.state == LOADING and job.number not in self._files:
                return job.number
        return None

    def _row(self, message: Message, own: int) -> TableRow:
        """The row of an imported message; adds it to the model as a message that is not adopted yet."""
        sent = replace(self._producers.describe(message), arrival=own, own=own, exists=False, is_near=False)
        self._site.model.add(sent)
        record = records.encode(message, message.topic.encode(), 0, self._site.now_ms(), message.born_host)
        row = np.zeros(1, FAR)[0]
        row["unique_hash"], row["key_hash"] = key_hash(sent.unique_key), key_hash(sent.user_key)
        row["due"], row["arrival"], row["size"], row["kind"] = sent.due, own, len(record), MESSAGE
        row["queue"] = self._site.broker.fold.topics.get(message.topic).numbers[0]
        return TableRow(-1, row, record)

    def _fill(self, number: int, rows: list[TableRow]) -> None:
        """Writes the file of an import beside the table."""
        path = f"_import-{number:08d}-soon.parquet"
        self._site.table.aside[path] = rows
        dues, arrivals = ([int(row.row[name]) for row in rows] for name in ("due", "arrival"))
        self._files[number] = [path, 0, len(rows), min(dues), max(dues), min(arrivals), max(arrivals)]
        self._names[number] = [row.name for row in rows]

    def adopt(self, pick: int) -> None:
        """Completes an import: from here on its messages are safe, and a pipeline adds them to the table."""
        if not self._files:
            return
        number = sorted(self._files)[pick % len(self._files)]
        job = self._site.broker.fold.jobs.get(number)
        if job is not None:
            with self._site.digest.suppress(DiskFull, Refused):
                ticket = self._site.broker.jobs.adopt(job.id, [self._files[number]], 0, self._site.now_ms())
                self._asked.append((ticket, job.id))

    def fail(self, pick: int) -> None:
        """Withdraws a job; the broker refuses if it is decided."""
        jobs = self._site.broker.fold.jobs.all()
        if jobs:
            job = jobs[pick % len(jobs)]
            with self._site.digest.suppress(DiskFull, Refused):
                ticket = self._site.broker.jobs.fail(job.id, "given up", self._site.now_ms())
                self._asked.append((ticket, job.id))

    def doubt(self) -> None:
        """After a crash: forgets calls without an answer."""
        self._asked.clear()

    # -- looking ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Takes in answers and decisions. Call it before reading queues: a decision changes what may be seen there."""
        for ticket, job_id in self._asked:
            if ticket.answers is not None:
                self._take_in(ticket.answer, job_id)
        self._asked = [(ticket, job_id) for ticket, job_id in self._asked if ticket.answers is None]
        jobs = self._site.broker.fold.jobs.all()
        fresh = sorted((job for job in jobs if self._is_fresh(job)), key=lambda job: job.decided_at)
        hidden = self._names_set_aside()
        self._decided += [(job, hidden | set(self._note_changes(job))) for job in fresh]
        there = {job.number for job in jobs}
        for job in jobs:
            self._check_progress(job, there)
            if job.op == IMPORT:
                self._note_import(job)

    def _take_in(self, answer: JobAnswer, job_id: str) -> None:
        self._site.digest.note("job", job_id, bool(answer.reason))
        if answer.job is None or answer.job.id != job_id:
            raise Broken(f"a call about job {job_id} was answered with {answer}")
        self._note_job(answer.job)

    def _note_job(self, job: Job) -> None:
        counts = (job.rows, job.bad, job.changed, job.late)
        places = (job.far, job.arrival, job.decided_at, job.ended_at_ms)
        self._site.digest.note("job", job.number, job.id, job.op, job.state, counts, places, job.reason)

    def _is_fresh(self, job: Job) -> bool:
        known = self._known.get(job.number)
        return job.op != IMPORT and job.is_decided and (known is None or known.state not in (RUNNING, DONE))

    def _check_progress(self, job: Job, there: set[int]) -> None:
        known, seen = self._known.get(job.number), Seen(job.id, job.state, (job.rows, job.changed, job.late))
        if known is None:
            self._check_new(job, there)
        elif known != seen:
            if _PROGRESS[known.state] > _PROGRESS[job.state] or known.id != job.id:
                raise Broken(f"job {job.number} was {known}, is {seen} now")
            if known.state == RUNNING and known.counts != seen.counts:
                raise Broken(f"job {job.number} is decided and was {known}, is {seen} now")
        if job.op != IMPORT and job.changed + job.late != job.rows:
            raise Broken(f"job {job.number} has {job.rows} rows, {job.changed} changed and {job.late} late")
        if known != seen:
            self._note_job(job)
        self._known[job.number] = seen

    def _check_new(self, job: Job, there: set[int]) -> None:
        """An older job of the same id must have failed; a forgotten one may have failed since the last look."""
        for number, seen in self._known.items():
            is_forgotten = number not in there and seen.state not in (RUNNING, DONE)
            if seen.id == job.id and seen.state != FAILED and not is_forgotten:
                raise Broken(f"job {job.number} is of the id {job.id}, as job {number} is, which has not failed")

    def _note_import(self, job: Job) -> None:
        is_adopted = job.far >= 0 and job.state != FAILED
        for message in (self._site.model.messages[name] for name in self._names.get(job.number, ())):
            if is_adopted != message.exists:
                self._commands[message.name] = job.arrival
                self._site.model.note_adopted(message, is_adopted)

    # -- decisions ----------------------------------------------------------------------------------------------

    def _names_set_aside(self) -> set[str]:
        """Messages that jobs brought which are set aside: the table does not have them."""
        aside = {job.number for job in self._site.broker.fold.jobs.open() if job.aside}
        brought = [m for m in self._site.model.messages.values() if any(m.was_brought_by(number) for number in aside)]
        return {message.name for message in brought}

    def _note_changes(self, job: Job) -> Iterator[str]:
        """Tells the model which messages a job has changed; yields their names."""
        fold, model = self._site.broker.fold, self._site.model
        known = {message.known_as: message for message in model.messages.values() if message.exists}
        moved = {place for message in model.messages.values() for place in message.moved_from}
        for part in job.parts:
            for index, row in enumerate(fold.selections.rows(part.name)):
                if index in part.late and (int(row["due"]), int(row["arrival"])) in moved:
                    continue  # it waited there when the job selected it, and not when the job was decided
                message = known.get(int(row["arrival"]))
                if message is None or not self._is_selected_by(job, message) or message.due != int(row["due"]):
                    raise Broken(f"job {job.number} ({job.where}) has selected {row}, which is {message}")
                if index not in part.late:
                    if fold.topics.target[int(row["queue"])] != GONE:
                        model.note_change(message, job.op == CANCEL, job.by_ms, part.own + index)
                    yield message.name

    def judge(self) -> None:
        """Call it after reading queues: a message that a job has not changed is not selected, or does not wait."""
        model = self._site.model
        for job, changed in self._decided:
            for message in model.messages.values():
                if message.name not in changed and self._is_selected_by(job, message) and model.waits(message):
                    raise Broken(f"job {job.number} ({job.where}) has not changed {message.name}, which waits")
        self._decided = []

    def _is_selected_by(self, job: Job, message: Sent) -> bool:
        """Whether a job selects a message: it came before the job's command, and matches the predicate."""
        arrival = message.arrival if message.moved else self._commands.get(message.name, message.arrival)
        return arrival < job.arrival and selects(job.where, message.topic, message.user_key)

    def messages_on_the_way(self) -> frozenset[str]:
        """Messages of open jobs that no stage has taken yet: only a promotion can deliver them."""
        paths = [file[0] for job in self._site.broker.fold.jobs.open() for file in job.files]
        return frozenset(row.name for path in paths for row in self._site.table.aside[path])

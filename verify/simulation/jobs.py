"""Those who ask for work in bulk, and what must follow from what they were told.

- A job of an id is one job, however often it is asked for; only one that has failed is begun anew.
- What a job selects is what its predicate means, and all of it that waited and came before its command.
- Its rows are those that it has changed and those that came too late; that never changes again.
- What it has changed is not seen where it was: cancelled, never; postponed, once, at or after its new due.
- What came too late was delivered or cancelled before. What it has not selected is untouched.
- What is imported is seen once, when it was adopted, or never where that has failed.
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


class Told(NamedTuple):
    """Where a job was when somebody looked."""

    id: str
    state: str
    counts: tuple[int, int, int]  # rows, changed, late


class Jobs:
    """All of them, over one table."""

    def __init__(self, site: Site, watch: Watch, producers: Producers) -> None:
        self._site = site
        self._watch = watch
        self._producers = producers  # the messages of imports are made as others are
        self._told: dict[int, Told] = {}  # by number
        self._files: dict[int, list[object]] = {}  # of imports, by number: a file as the broker is told of it
        self._names: dict[int, list[str]] = {}  # of imports, by number: the messages in it
        self._asked: list[tuple[Ticket, str]] = []
        self._commands: dict[str, int] = {}  # of messages that were imported: where the log has the command
        self._decided: list[tuple[Job, set[str]]] = []  # since the last look, and the names of what they have changed

    # -- asking -------------------------------------------------------------------------------------------------

    def ask(self, name: int, where: int, by_ms: int) -> None:
        """Somebody asks to cancel (by 0 ms), or to postpone, what a predicate selects; the id may be known already."""
        job_id, op = f"job-{name}", POSTPONE if by_ms else CANCEL
        predicate = f"topic={topic_at(where)}" if where < len(TOPICS) else f"key=k{where - len(TOPICS)}"
        with self._site.digest.suppress(DiskFull, FlowControl, Refused):
            ticket = self._site.broker.jobs.ask(job_id, op, predicate, by_ms, self._site.now_ms())
            self._asked.append((ticket, job_id))

    def load(self, name: int, amount: int, key: int, place: int, count: int) -> None:
        """Somebody begins an import and writes its messages beside the table."""
        topic = topic_at(place)
        self._watch.flush()
        number = self._begun(f"import-{name}", topic)
        if number is not None:
            batch = [self._producers.message(4, amount + index, key, topic, 0) for index in range(count)]
            self._fill(number, [self._row(message, own_arrival(number, 0, n)) for n, message in enumerate(batch)])

    def _begun(self, job_id: str, topic: str) -> int | None:
        """The number of an import that is to be filled; none where the id is known, or no import is taken."""
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
        """A message as an import brings it; the model knows it from here on, as one that nobody has adopted."""
        sent = replace(self._producers.sent(message), arrival=own, own=own, exists=False, is_near=False)
        self._site.model.sent(sent)
        record = records.encode(message, message.topic.encode(), 0, self._site.now_ms(), message.born_host)
        row = np.zeros(1, FAR)[0]
        row["unique_hash"], row["key_hash"] = key_hash(sent.unique_key), key_hash(sent.user_key)
        row["due"], row["arrival"], row["size"], row["kind"] = sent.due, own, len(record), MESSAGE
        row["queue"] = self._site.broker.fold.topics.get(message.topic).numbers[0]
        return TableRow(-1, row, record)

    def _fill(self, number: int, rows: list[TableRow]) -> None:
        """The file of an import is written beside the table."""
        path = f"_import-{number:08d}-soon.parquet"
        self._site.table.aside[path] = rows
        dues, arrivals = ([int(row.row[name]) for row in rows] for name in ("due", "arrival"))
        self._files[number] = [path, 0, len(rows), min(dues), max(dues), min(arrivals), max(arrivals)]
        self._names[number] = [row.name for row in rows]

    def adopt(self, pick: int) -> None:
        """An import is complete: it is safe from here on, if it was not before, and is to come into the table."""
        if not self._files:
            return
        number = sorted(self._files)[pick % len(self._files)]
        job = self._site.broker.fold.jobs.get(number)
        if job is not None:
            with self._site.digest.suppress(DiskFull, Refused):
                ticket = self._site.broker.jobs.adopt(job.id, [self._files[number]], 0, self._site.now_ms())
                self._asked.append((ticket, job.id))

    def fail(self, pick: int) -> None:
        """Somebody withdraws a job, if nothing is decided yet."""
        jobs = self._site.broker.fold.jobs.all()
        if jobs:
            job = jobs[pick % len(jobs)]
            with self._site.digest.suppress(DiskFull, Refused):
                ticket = self._site.broker.jobs.fail(job.id, "given up", self._site.now_ms())
                self._asked.append((ticket, job.id))

    def doubt(self) -> None:
        """A crash: nobody is answered."""
        self._asked.clear()

    # -- looking ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Before the queues are looked at: what jobs have decided changes what may be seen there."""
        for ticket, job_id in self._asked:
            if ticket.answers is not None:
                self._take_in(ticket.answer, job_id)
        self._asked = [(ticket, job_id) for ticket, job_id in self._asked if ticket.answers is None]
        jobs = self._site.broker.fold.jobs.all()
        fresh = sorted((job for job in jobs if self._is_fresh(job)), key=lambda job: job.decided_at)
        self._decided += [(job, set(self._note(job))) for job in fresh]
        there = {job.number for job in jobs}
        for job in jobs:
            self._check_told(job, there)
            if job.op == IMPORT:
                self._note_import(job)

    def _take_in(self, answer: JobAnswer, job_id: str) -> None:
        self._site.digest.note("job", job_id, bool(answer.reason))
        if answer.job is None or answer.job.id != job_id:
            raise Broken(f"somebody who asked about job {job_id} was told of {answer}")
        self._note_job(answer.job)

    def _note_job(self, job: Job) -> None:
        counts = (job.rows, job.bad, job.changed, job.late)
        places = (job.far, job.arrival, job.decided_at, job.ended_at_ms)
        self._site.digest.note("job", job.number, job.id, job.op, job.state, counts, places, job.reason)

    def _is_fresh(self, job: Job) -> bool:
        known = self._told.get(job.number)
        return job.op != IMPORT and job.is_decided and (known is None or known.state not in (RUNNING, DONE))

    def _check_told(self, job: Job, there: set[int]) -> None:
        known, told = self._told.get(job.number), Told(job.id, job.state, (job.rows, job.changed, job.late))
        if known is None:
            self._check_new(job, there)
        elif known != told:
            if _PROGRESS[known.state] > _PROGRESS[job.state] or known.id != job.id:
                raise Broken(f"job {job.number} was {known}, is {told} now")
            if known.state == RUNNING and known.counts != told.counts:
                raise Broken(f"job {job.number} is decided and was {known}, is {told} now")
        if job.op != IMPORT and job.changed + job.late != job.rows:
            raise Broken(f"job {job.number} has {job.rows} rows, {job.changed} changed and {job.late} late")
        if known != told:
            self._note_job(job)
        self._told[job.number] = told

    def _check_new(self, job: Job, there: set[int]) -> None:
        """One of its id that is forgotten has failed since it was last seen, if it could."""
        for number, told in self._told.items():
            is_forgotten = number not in there and told.state not in (RUNNING, DONE)
            if told.id == job.id and told.state != FAILED and not is_forgotten:
                raise Broken(f"job {job.number} is of the id {job.id}, as job {number} is, which has not failed")

    def _note_import(self, job: Job) -> None:
        is_adopted = job.far >= 0 and job.state != FAILED
        for message in (self._site.model.messages[name] for name in self._names.get(job.number, ())):
            if is_adopted != message.exists:
                self._commands[message.name] = job.arrival
                self._site.model.adopted(message, is_adopted)

    # -- decisions ----------------------------------------------------------------------------------------------

    def _note(self, job: Job) -> Iterator[str]:
        """Tells the model what a job has changed; gives the names."""
        fold, model = self._site.broker.fold, self._site.model
        known = {message.known_as: message for message in model.messages.values() if message.exists}
        for part in job.parts:
            for index, row in enumerate(fold.selections.rows(part.name)):
                message = known.get(int(row["arrival"]))
                if message is None or not self._is_meant(job, message) or message.due != int(row["due"]):
                    raise Broken(f"job {job.number} ({job.where}) has selected {row}, which is {message}")
                if index not in part.late:
                    if fold.topics.target[int(row["queue"])] != GONE:
                        model.changed(message, job.op == CANCEL, job.by_ms, part.own + index)
                    yield message.name

    def judge(self) -> None:
        """After the queues were looked at: what jobs have not changed was delivered or cancelled, or is not theirs."""
        model = self._site.model
        for job, changed in self._decided:
            for message in model.messages.values():
                if message.name not in changed and self._is_meant(job, message) and model.waits(message):
                    raise Broken(f"job {job.number} ({job.where}) has not changed {message.name}, which waits")
        self._decided = []

    def _is_meant(self, job: Job, message: Sent) -> bool:
        """Whether a job is about a message: it came before its command, and the predicate lets it pass."""
        arrival = self._commands.get(message.name, message.arrival)
        return arrival < job.arrival and selects(job.where, message.topic, message.user_key)

    def on_way(self) -> frozenset[str]:
        """Messages that jobs bring, and that no stage has taken yet: only a pipeline can deliver them."""
        paths = [file[0] for job in self._site.broker.fold.jobs.open() for file in job.files]
        return frozenset(row.name for path in paths for row in self._site.table.aside[path])

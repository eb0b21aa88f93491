"""Answers requests about jobs: of people, of imports, and of the pipeline that carries jobs out.

begin, ask, adopt, fail, decide     write to the log: postdate/broker/jobs.py
try, stumble, leave, again          likewise
find, list, command                 look
progress                            is shown to people, and kept in memory alone
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, NamedTuple

from postdate.broker.broker import Broker
from postdate.broker.jobs import ATTEMPTS, require_job
from postdate.broker.view import Job
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.contract import (
    CANCEL,
    FAILED,
    Fields,
    ImportOrder,
    JobOrder,
    JobStatus,
    OrderPart,
    Plain,
    Selection,
    TableFile,
    dump,
    load,
)
from postdate.errors import FlowControl, ProtocolError, Refused, UsageError
from postdate.server.connection import Connection
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import Command, reply

_STEP_MAX = 100  # characters of the sentence about a job's progress

Settled = Callable[[Connection, Ticket], Awaitable[None]]


class _Caller(NamedTuple):
    """Who asks, and where the answer goes."""

    connection: Connection
    name: str  # of the user; of anybody the address


_Call = Callable[[_Caller, Fields, Plain], Awaitable[Plain]]


class Progress(NamedTuple):
    """How far a job is."""

    step: str = ""
    done: int = 0
    total: int = 0


class _Noted(NamedTuple):
    """Progress, and where the job was when it was noted: it says nothing of a later state or try."""

    progress: Progress
    state: str
    tried_at: int


class Jobs:
    """Answers one request, JOB, by its `call`. `settled` returns when a ticket is durable and has its answer."""

    def __init__(self, broker: Broker, clock: Clock, tasks: Tasks, settled: Settled) -> None:
        self._broker = broker
        self._clock = clock
        self._tasks = tasks
        self._settled = settled
        self._deciding = asyncio.Lock()
        self._progress: dict[str, _Noted] = {}
        self._askers: dict[str, str] = {}  # by job that may not be over, who asked for it
        self._asking: set[str] = set()  # jobs that are being written
        self._calls: dict[str, _Call] = {
            "begin": self._begin, "ask": self._ask, "adopt": self._adopt, "fail": self._fail, "decide": self._decide,
            **dict.fromkeys(ATTEMPTS, self._attempt),
            "find": self._find, "list": self._list, "command": self._order, "progress": self._note_progress,
        }  # fmt: skip

    def answer(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        plain = load(command.body, "a request about jobs")
        fields = Fields(plain, "a request about jobs")
        call = self._calls.get(fields.text("call"))
        if call is None:
            raise ProtocolError(f"call is {plain.get('call')!r:.64}, expected one of {', '.join(self._calls)}")
        request = command.without_content()
        caller = _Caller(connection, connection.asker.name or str(ip_address(connection.host.address)))

        async def answer() -> bytes:
            return reply(request, codes.SUCCESS, body=dump(await call(caller, fields, plain)))

        self._tasks.answer(connection, request, answer())

    @contextmanager
    def _counted(self, caller: _Caller, job_id: str) -> Iterator[None]:
        """Counts a job for the user who asks for it, or for the address where there are no users, and raises
        FlowControl for one too many; one that is known may be asked for again. A start forgets who has asked for what.
        """
        open_ids = {job.id for job in self._broker.view.jobs() if not job.is_over} | self._asking
        self._askers = {known: asker for known, asker in self._askers.items() if known in open_ids}
        limit = self._broker.limits.jobs_per_user_max
        if job_id not in open_ids:
            if sum(asker == caller.name for asker in self._askers.values()) >= limit:
                raise FlowControl(f"jobs_per_user_max: {limit} jobs of {caller.name} are not over yet; try later")
            self._askers[job_id] = caller.name
        self._asking.add(job_id)
        try:
            yield
        finally:
            self._asking.discard(job_id)

    # -- asking -------------------------------------------------------------------------------------------------

    async def _begin(self, caller: _Caller, fields: Fields, _: Plain) -> Plain:
        job_id, name = fields.text("id"), fields.text("topic")
        table = self._broker.view.far.table
        if not table:
            raise Refused("there is no table to import into: no pipeline has registered yet")
        known = self._broker.view.find_job(job_id)
        is_new = known is None or known.state == FAILED
        with self._counted(caller, job_id):
            job = await self._write(caller, self._broker.jobs.begin(job_id, name, self._clock.now_ms()))
        topic = self._broker.view.topic(job.topic)
        queues = tuple((queue_id, topic.numbers[queue_id]) for queue_id in range(topic.write_queue_count))
        now_ms, delay_ms_max = self._clock.now_ms(), self._broker.settings.delay_ms_max
        identity = self._broker.identity
        return ImportOrder(self._status(job), is_new, table, now_ms, delay_ms_max, queues, identity).plain()

    async def _ask(self, caller: _Caller, fields: Fields, _: Plain) -> Plain:
        op, by_ms = fields.text("op") or CANCEL, fields.number("by_ms", 0)
        job_id, where = fields.text("id"), fields.text("where")
        with self._counted(caller, job_id):
            ticket = self._broker.jobs.ask(job_id, op, where, by_ms, self._clock.now_ms())
            return self._status(await self._write(caller, ticket))._asdict()

    async def _adopt(self, caller: _Caller, fields: Fields, _: Plain) -> Plain:
        job_id, files, bad = fields.text("id"), fields.files("files"), fields.number("bad")
        ticket = self._broker.jobs.adopt(job_id, files, bad, self._clock.now_ms())
        return self._status(await self._write(caller, ticket))._asdict()

    async def _fail(self, caller: _Caller, fields: Fields, _: Plain) -> Plain:
        ticket = self._broker.jobs.fail(fields.text("id"), fields.text("reason"), self._clock.now_ms())
        return self._status(await self._write(caller, ticket))._asdict()

    async def _write(self, caller: _Caller, ticket: Ticket) -> Job:
        await self._settled(caller.connection, ticket)
        return require_job(ticket.answer)

    # -- carrying out -------------------------------------------------------------------------------------------

    async def _attempt(self, caller: _Caller, fields: Fields, _: Plain) -> Plain:
        """Notes a try, or what became of it. The answer says where the job is, and why there is none to try."""
        call, epoch, number = fields.text("call"), fields.number("epoch"), fields.number("number")
        ticket = self._broker.jobs.attempt(call, epoch, number, fields.text("reason"), self._clock.now_ms())
        job = await self._write(caller, ticket)
        return _order_for(job)._replace(refusal=ticket.answer.reason).plain()

    async def _decide(self, caller: _Caller, _: Fields, plain: Plain) -> Plain:
        """Decides about what was selected. Reading that takes long, so it happens on another thread."""
        jobs, selection = self._broker.jobs, Selection.read(plain)
        async with self._deciding:
            jobs.check(selection)
            parts = await asyncio.to_thread(jobs.verify, selection)
            ticket = jobs.decide(selection, parts, self._clock.now_ms())
            return _order_for(await self._write(caller, ticket)).plain()

    async def _order(self, _: _Caller, fields: Fields, _plain: Plain) -> Plain:
        number = fields.number("number")
        job = self._broker.view.job(number)
        if job is None:
            raise UsageError(f"there is no job of number {number}")
        return _order_for(job).plain()

    # -- looking ------------------------------------------------------------------------------------------------

    async def _find(self, _: _Caller, fields: Fields, _plain: Plain) -> Plain:
        return self._status(self._broker.jobs.find(fields.text("id")))._asdict()

    async def _list(self, _: _Caller, _fields: Fields, _plain: Plain) -> Plain:
        jobs = [self._status(job)._asdict() for job in self._broker.view.jobs()]
        return {"now_ms": self._clock.now_ms(), "jobs": jobs}

    async def _note_progress(self, _: _Caller, fields: Fields, _plain: Plain) -> Plain:
        job = self._broker.jobs.find(fields.text("id"))
        if not job.is_over:
            step, done, total = fields.text("step")[:_STEP_MAX], fields.number("done"), fields.number("total")
            self._progress[job.id] = _Noted(Progress(step, done, total), job.state, job.tried_at)
        return {}

    def _status(self, job: Job) -> JobStatus:
        noted = self._progress.get(job.id)
        if noted is not None and (noted.state, noted.tried_at) != (job.state, job.tried_at):
            del self._progress[job.id]
            noted = None
        progress = Progress() if noted is None else noted.progress
        return JobStatus(
            job.id, job.number, job.op, job.state, job.topic, job.where, job.by_ms, job.rows, job.changed, job.late,
            job.bad, job.at_ms, job.ended_at_ms, job.reason, *progress, job.tries, job.aside,
        )  # fmt: skip


def _order_for(job: Job) -> JobOrder:
    files = tuple(TableFile(*file) for file in job.files)
    parts = tuple(OrderPart(part.name, part.own, tuple(part.late)) for part in job.parts)
    return JobOrder(
        job.number, job.id, job.op, job.state, job.where, job.by_ms, job.arrival, job.changed, files, parts,
        job.brought_until_ms, tuple(job.loading), job.aside,
    )  # fmt: skip

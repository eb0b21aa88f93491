"""What is asked about jobs: by people, by whoever imports, by the pipeline that carries them out.

begin, ask, adopt, fail, decide     write to the log, see commands.py
find, list, command                 look
progress                            is told to whoever looks, and kept in memory alone
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.jobs import Selected, require_job
from postdate.broker.view import CANCEL, FAILED, Job, TopicInfo
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import ProtocolError, Refused, UsageError
from postdate.server.connection import Connection
from postdate.server.requests.fields import number, text
from postdate.server.tasks import Tasks
from postdate.wire import bodies, codes
from postdate.wire.frame import Command, reply

Settled = Callable[[Connection, Ticket], Awaitable[None]]
Said = Mapping[str, Any]
_Call = Callable[[Connection, Said], Awaitable[dict[str, Any]]]


class Jobs:
    """Of one service. `settled` returns when a ticket is durable and has its answer."""

    def __init__(self, broker: Broker, clock: Clock, tasks: Tasks, settled: Settled) -> None:
        self._broker = broker
        self._clock = clock
        self._tasks = tasks
        self._settled = settled
        self._deciding = asyncio.Lock()
        self._progress: dict[str, dict[str, Any]] = {}
        self._calls: dict[str, _Call] = {
            "begin": self._begin, "ask": self._ask, "adopt": self._adopt, "fail": self._fail, "decide": self._decide,
            "find": self._find, "list": self._list, "command": self._command, "progress": self._note_progress,
        }  # fmt: skip

    def answer(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        said = bodies.load(command.body, "a question about jobs")
        call = self._calls.get(text(said, "call"))
        if call is None:
            raise ProtocolError(f"call is {said.get('call')!r:.64}, expected one of {', '.join(self._calls)}")
        asked_by = command.without_content()
        self._tasks.answer(connection, asked_by, self._answered(connection, asked_by, call, said))

    async def _answered(self, connection: Connection, command: Command, call: _Call, said: Said) -> bytes:
        return reply(command, codes.SUCCESS, body=orjson.dumps(await call(connection, said)))

    # -- asking -------------------------------------------------------------------------------------------------

    async def _begin(self, connection: Connection, said: Said) -> dict[str, Any]:
        job_id, name = text(said, "id"), text(said, "topic")
        table = self._broker.view.far.table
        if not table:
            raise Refused("there is no table to import into: no pipeline has registered yet")
        known = self._broker.view.find_job(job_id)
        is_new = known is None or known.state == FAILED
        job = await self._written(connection, self._broker.jobs.begin(job_id, name, self._clock.now_ms()))
        return {
            "job": self._told(job), "is_new": is_new, "table": table, "now_ms": self._clock.now_ms(),
            "delay_ms_max": self._broker.settings.delay_ms_max,
            "queues": _write_queues(self._broker.view.topic(job.topic)),
        }  # fmt: skip

    async def _ask(self, connection: Connection, said: Said) -> dict[str, Any]:
        op, by_ms = text(said, "op") or CANCEL, number(said, "by_ms") if "by_ms" in said else 0
        job_id, where = text(said, "id"), text(said, "where")
        ticket = self._broker.jobs.ask(job_id, op, where, by_ms, self._clock.now_ms())
        return self._told(await self._written(connection, ticket))

    async def _adopt(self, connection: Connection, said: Said) -> dict[str, Any]:
        files = said.get("files")
        if not isinstance(files, list):
            raise ProtocolError("an import needs files, a list")
        job_id, bad = text(said, "id"), number(said, "bad")
        ticket = self._broker.jobs.adopt(job_id, files, bad, self._clock.now_ms())
        return self._told(await self._written(connection, ticket))

    async def _fail(self, connection: Connection, said: Said) -> dict[str, Any]:
        job_id, reason = text(said, "id"), text(said, "reason")
        return self._told(await self._written(connection, self._broker.jobs.fail(job_id, reason, self._clock.now_ms())))

    async def _written(self, connection: Connection, ticket: Ticket) -> Job:
        await self._settled(connection, ticket)
        return require_job(ticket.answer)

    # -- deciding -----------------------------------------------------------------------------------------------

    async def _decide(self, connection: Connection, said: Said) -> dict[str, Any]:
        """Reading what was selected takes long, so that happens on another thread."""
        jobs, selected = self._broker.jobs, _selected(said)
        async with self._deciding:
            jobs.check(selected)
            parts = await asyncio.to_thread(jobs.verify, selected)
            ticket = jobs.decide(selected, parts, self._clock.now_ms())
            return (await self._written(connection, ticket)).command()

    async def _command(self, _: Connection, said: Said) -> dict[str, Any]:
        job = self._broker.view.job(number(said, "number"))
        if job is None:
            raise UsageError(f"there is no job of number {said['number']}")
        return job.command()

    # -- looking ------------------------------------------------------------------------------------------------

    async def _find(self, _: Connection, said: Said) -> dict[str, Any]:
        return self._told(self._broker.jobs.find(text(said, "id")))

    async def _list(self, _: Connection, _said: Said) -> dict[str, Any]:
        return {"now_ms": self._clock.now_ms(), "jobs": [self._told(job) for job in self._broker.view.jobs()]}

    async def _note_progress(self, _: Connection, said: Said) -> dict[str, Any]:
        job = self._broker.jobs.find(text(said, "id"))
        if not job.is_over:
            names = ("done", "total")
            self._progress[job.id] = {"step": text(said, "step")[:100]} | {name: number(said, name) for name in names}
        return {}

    def _told(self, job: Job) -> dict[str, Any]:
        if job.is_over:
            self._progress.pop(job.id, None)
        return job.told() | self._progress.get(job.id, {"step": "", "done": 0, "total": 0})


def _write_queues(topic: TopicInfo) -> list[list[int]]:
    """The queues that messages may be sent to: id in the topic, and number."""
    return [[queue_id, topic.numbers[queue_id]] for queue_id in range(topic.write_queue_count)]


def _selected(said: Said) -> Selected:
    parts = said.get("parts")
    if not isinstance(parts, list) or not all(_is_part(part) for part in parts):
        raise ProtocolError("a decision needs parts, a list of names and arrivals")
    files = said.get("files", [])
    if not isinstance(files, list):
        raise ProtocolError("the files of a decision are no list")
    named = tuple((name, own) for name, own in parts)
    return Selected(number(said, "epoch"), number(said, "number"), named, tuple(files))


def _is_part(part: object) -> bool:
    return isinstance(part, list) and len(part) == 2 and isinstance(part[0], str) and type(part[1]) is int

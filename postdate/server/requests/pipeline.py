"""What a pipeline asks for, through bulk: where it is, rows of queues, an epoch, a stage; and what it reports.

Nothing that is told here can be taken back by a crash: in flush mode async, where a batch is applied before it is
durable, an answer waits until the log is durable up to what it speaks of.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.staging import Stage, raise_if_refused
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import LogFailed, ProtocolError, UsageError
from postdate.server.answers import refusal
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.requests.fields import number, pair, text
from postdate.server.tasks import Tasks
from postdate.wire import bodies, codes
from postdate.wire.frame import Command, reply

RANGE_ROWS_MAX = 65_536  # in one answer: 3 MB of far rows
REPORTS_KEPT = 100
REPORT_BYTES_MAX = 16 * 1024  # figures of one batch; there are a hundred in RAM
NO_QUEUE = -1  # the number of the far queue

NEAR_ROWS = 32_768  # of a page: 1.7 MB, some milliseconds


class Pipelines:
    """Serves one broker."""

    def __init__(self, broker: Broker, clock: Clock, pulse: Pulse, tasks: Tasks) -> None:
        self._broker = broker
        self._clock = clock
        self._pulse = pulse
        self._tasks = tasks
        self._stage_lock = asyncio.Lock()
        self._reports: deque[dict[str, Any]] = deque(maxlen=REPORTS_KEPT)

    # -- where it is --------------------------------------------------------------------------------------------

    def state(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        self._answer(connection, command, reply(command, codes.SUCCESS, body=orjson.dumps(self._state())))

    def _state(self) -> dict[str, Any]:
        far = self._broker.view.far
        return {
            "now_ms": self._clock.now_ms(),
            "lead_ms": self._broker.settings.lead_ms,
            "delay_ms_max": self._broker.settings.delay_ms_max,
            "epoch": far.epoch,
            "taken": far.taken,
            "horizon": far.horizon_at_ms,
            "far_first": far.first,
            "far_length": far.length,
            "arrival_of_taken": far.arrival_of_taken,
            "rows_in": far.rows_in,
            "rows_out": far.rows_out,
            "rescued": self._broker.rescuer.rescued_count,
            "table": far.table,
            "commands": [[job.number, job.far] for job in self._broker.view.open_jobs()],
            "gone": self._broker.view.deleted_queues(),
        }

    def rows(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Rows in files are read there by whoever asks; a row counts as stored when its write has returned."""
        topic, queue_id, start = asked["topic"], asked["queueId"], asked["start"]
        if start < 0:
            raise UsageError(f"rows from {start}: there is none before 0")
        rows = (self._broker.view.times_of if asked["times"] else self._broker.view.rows_of)(topic, queue_id)
        begin = max(start, rows.stored)
        fields = {
            "number": self._broker.view.queue_number(topic, queue_id) if topic else NO_QUEUE,
            "first": rows.first, "length": rows.length, "stored": rows.stored, "fileRows": self._broker.view.file_rows,
        }  # fmt: skip
        if topic and not asked["times"]:
            fields["timeRow"] = self._broker.view.time_row(topic, queue_id, start)
        body = rows.read(begin, begin + RANGE_ROWS_MAX).tobytes()
        self._answer(connection, command, reply(command, codes.SUCCESS, fields, body=body))

    def topic(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """How far each queue goes: [id, number, first offset, next offset, first one visible since an instant]."""
        name, broker = asked["topic"], self._broker
        queues = [
            (queue_id, number, *broker.offsets(name, queue_id), broker.search(name, queue_id, asked["at"]))
            for queue_id, number in enumerate(broker.view.topic(name).numbers)
        ]
        self._answer(connection, command, reply(command, codes.SUCCESS, body=orjson.dumps({"queues": queues})))

    def chunks(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        """The staged chunks that are there, for whoever reads queues whose entries point into them."""
        told = orjson.dumps(self._broker.view.chunks())
        self._answer(connection, command, reply(command, codes.SUCCESS, body=told))

    def near(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """A page of what waits in the wheel, and where the next begins."""
        rows, place = self._broker.view.wheel_page((asked["due"], asked["arrival"]), NEAR_ROWS)
        fields = {} if place is None else {"due": place[0], "arrival": place[1]}
        self._answer(connection, command, reply(command, codes.SUCCESS, fields, body=rows.tobytes()))

    def _answer(self, connection: Connection, command: Command, frame: bytes) -> None:
        """Answers with what is true now, when it is durable."""
        self._tell(connection, command, self._broker.view.position, lambda: frame)

    def _tell(self, connection: Connection, command: Command, position: int, frame: Callable[[], bytes]) -> None:
        asked_by = command.without_content()

        def tell(error: LogFailed | None) -> None:
            if not asked_by.is_oneway:
                connection.write(frame() if error is None else refusal(asked_by, error))

        self._pulse.when_durable(connection, position, tell)

    # -- registering --------------------------------------------------------------------------------------------

    def register(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        said = bodies.load(command.body, "what a pipeline says of itself")
        table, master = (text(said, name) for name in ("table", "master"))
        ticket = self._broker.register_pipeline(self._clock.now_ms(), table=table, master=master)
        asked_by = command.without_content()
        self._pulse.expect(connection, ticket, lambda ticket: self._registered(connection, asked_by, ticket))

    def _registered(self, connection: Connection, command: Command, ticket: Ticket) -> None:
        if ticket.error is not None:
            connection.write(refusal(command, ticket.error))
            return
        told = self._state() | {"epoch": ticket.answer, "staged": sorted(self._broker.view.chunk_names())}
        self._tell(connection, command, ticket.end, lambda: reply(command, codes.SUCCESS, body=orjson.dumps(told)))

    # -- staging ------------------------------------------------------------------------------------------------

    def stage(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        """Reading the chunks takes long, so that happens on another thread."""
        stage = _stage_of(bodies.load(command.body, "a stage"))
        self._tasks.answer(connection, command, self._staged(connection, command.without_content(), stage))

    async def _staged(self, connection: Connection, command: Command, stage: Stage) -> bytes:
        staging = self._broker.staging
        async with self._stage_lock:
            staging.check(stage)
            verified = await asyncio.to_thread(staging.verify, stage)
            ticket = staging.write(stage, verified, self._clock.now_ms())
            await self.settled(connection, ticket)
        raise_if_refused(ticket.answer)
        return reply(command, codes.SUCCESS)

    async def settled(self, connection: Connection, ticket: Ticket) -> None:
        """Returns when a ticket has its answer and is durable. Raises LogFailed where it will not be."""
        done: asyncio.Future[LogFailed | None] = asyncio.get_running_loop().create_future()

        def tell(error: LogFailed | None) -> None:
            if not done.done():  # the server may have stopped
                done.set_result(error)

        self._pulse.expect(connection, ticket, lambda ticket: self._pulse.when_durable(connection, ticket.end, tell))
        self._pulse.nudge()
        error = await done
        if error is not None:
            raise error

    # -- what it reports ----------------------------------------------------------------------------------------

    def report(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        if len(command.body) > REPORT_BYTES_MAX:
            raise UsageError(f"the report of a batch has {len(command.body)} bytes, the limit is {REPORT_BYTES_MAX}")
        said = bodies.load(command.body, "the report of a batch")
        for name, value in said.items():
            if isinstance(value, dict | list):
                raise ProtocolError(f"the report of a batch has {name} = {value!r:.64}, expected a text or a number")
        if said not in self._reports:  # a pipeline that is started again tells what those before it did
            self._reports.append(said)
        return reply(command, codes.SUCCESS)

    def last_reports(self, count: int) -> list[dict[str, Any]]:
        """The newest last."""
        return list(self._reports)[-count:]


def _stage_of(said: Mapping[str, Any]) -> Stage:
    """Raises ProtocolError that names what cannot be read."""
    chunks = said.get("chunks")
    if not isinstance(chunks, list) or not all(isinstance(name, str) for name in chunks):
        raise ProtocolError("a stage needs chunks, a list of names")
    epoch, rows_in, rows_out = (number(said, name) for name in ("epoch", "rows_in", "rows_out"))
    far, horizon = (pair(said, name) for name in ("far", "horizon"))
    return Stage(epoch, far, horizon, tuple(chunks), rows_in, rows_out)

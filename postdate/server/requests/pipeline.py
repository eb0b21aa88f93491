"""Answers what a pipeline asks (its state, an epoch, a stage) and what bulk asks (rows, chunks, the wheel).

A crash takes nothing back that is answered here: in flush mode async, where a batch is applied before it is durable, an
answer waits until the log is durable up to what it speaks of.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from postdate.access.permits import READER, make_permit
from postdate.access.rules import Action
from postdate.broker.broker import Broker
from postdate.broker.staging import raise_if_refused
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.contract import (
    BULK,
    BatchSize,
    Figures,
    OpenJob,
    Registration,
    Report,
    Stage,
    State,
    dump,
    load,
    read_report,
)
from postdate.errors import LogFailed, UsageError
from postdate.server.answers import refusal
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.sessions.table import Table
from postdate.server.table_place import refuse_elsewhere
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.rights import ask_cluster

REPORTS_KEPT = 100
REPORT_BYTES_MAX = 16 * 1024  # figures of one batch; there are a hundred in RAM
NO_QUEUE = -1  # the number of the far queue
_NOTE_MAX = 300  # characters
_NOTE_MS = 20_000  # a pipeline that waits repeats its note; one that is gone does not


class Heard(NamedTuple):
    """The last that was heard of any pipeline."""

    at_ms: int  # 0: nothing since the broker was started
    note: str


class Pipelines:
    """Answers the requests of pipelines and of bulk. `table` knows where bulk listens."""

    def __init__(
        self, broker: Broker, clock: Clock, pulse: Pulse, tasks: Tasks, table: Table, token: str = "",
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._broker = broker
        self._folder = folder  # by which settings say where the table is; None: a table may be anywhere
        self._token = token  # of the data folder, with which permits for bulk are signed
        self._clock = clock
        self._pulse = pulse
        self._tasks = tasks
        self._table = table
        self._stage_lock = asyncio.Lock()
        self._heard = Heard(0, "")
        self._said_ms = 0  # the latest instant that a pipeline was told, by which it plans
        self._reports: deque[Figures] = deque(maxlen=REPORTS_KEPT)
        self.stand_in: Figures | None = None  # a report about bulk, while that promotes in place of a pipeline

    # -- state --------------------------------------------------------------------------------------------------

    def state(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Answers where broker and pipeline are; to a pipeline that plans a batch also how far that goes."""
        state = self._state()
        if asked["note"] is not None:
            self._hear(asked["note"])
        if asked["rowsMax"]:
            self._hear()
            state = state._replace(stop=self._stop(BatchSize(asked["start"], asked["rowsMax"], asked["bytesMax"])))
        self._answer(connection, command, reply(command, codes.SUCCESS, body=dump(state.plain())))

    def _hear(self, note: str = "") -> None:
        self._heard = Heard(self._clock.now_ms(), note[:_NOTE_MAX])

    @property
    def heard(self) -> Heard:
        """When a pipeline was last heard of, and what it waits for by its own words."""
        if self._clock.now_ms() - self._heard.at_ms > _NOTE_MS:
            return self._heard._replace(note="")
        return self._heard

    def _state(self) -> State:
        view, settings = self._broker.view, self._broker.settings
        far, now_ms = view.far, self._clock.now_ms()
        self._said_ms = max(self._said_ms, now_ms)
        position, mark = view.log_mark or (None, None)
        return State(
            now_ms=now_ms,
            lead_ms=settings.lead_ms,
            delay_ms_max=settings.delay_ms_max,
            epoch=far.epoch,
            taken=far.taken,
            horizon=far.horizon_at_ms,
            far_first=far.first,
            far_length=far.length,
            arrival_of_taken=far.arrival_of_taken,
            rows_in=far.rows_in,
            rows_out=far.rows_out,
            rescued=self._broker.rescuer.rescued_count,
            table=far.table,
            bulk=self._table.bulk_address,
            commands=tuple(OpenJob(job.number, job.far) for job in view.open_jobs()),
            gone=tuple(view.deleted_queues()),
            identity=self._broker.identity,
            position=position,
            mark=mark,
            rescue_lead_ms=self._broker.rescuer.rescue_lead_ms,
            queues=view.queue_count,
            wanted=view.wanted_far(),
            select=view.next_to_select(),
            job_ms_max=settings.job_ms_max,
            permit=make_permit(self._token, READER, now_ms) or None,
        )

    def _stop(self, size: BatchSize) -> int:
        """Returns where a batch ends. It has as many far rows as its size allows, and one at least."""
        far, arrival_of = self._broker.view.far, self._broker.view.far_arrival
        start = max(size.start, far.taken, far.first)
        stop = min(far.length, start + size.rows_max)
        if stop - start <= 1:
            return max(start, stop)
        first = arrival_of(start)
        while stop - start > 1 and arrival_of(stop - 1) - first > size.bytes_max:
            stop = start + (stop - start) // 2
        return stop

    def rows(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Answers which rows a queue has, with those that are in no file yet. The caller reads the others in files; a
        row counts as stored when its write has returned.
        """
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
        body = rows.read(begin, begin + self._broker.limits.range_rows_max).tobytes()
        self._answer(connection, command, reply(command, codes.SUCCESS, fields, body=body))

    def topic(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Answers how far each queue of a topic goes, as QueueSpan lists it, and where and with which permit bulk gives
        what is in them; without a topic, which queue number is which topic and queue.
        """
        name, broker = asked["topic"], self._broker
        if name is None:
            connection.asker.require(ask_cluster(Action.GET))
            body = dump(broker.view.named_queues()._asdict())
            self._answer(connection, command, reply(command, codes.SUCCESS, body=body))
            return
        queues = [
            (queue_id, number, *broker.offsets(name, queue_id), broker.search(name, queue_id, asked["at"]))
            for queue_id, number in enumerate(broker.view.topic(name).numbers)
        ]
        permit = make_permit(self._token, READER, self._clock.now_ms(), name)
        body = orjson.dumps({"queues": queues, "bulk": self._table.bulk_address, "permit": permit})
        self._answer(connection, command, reply(command, codes.SUCCESS, body=body))

    def chunks(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        """Answers which staged chunks there are, to a reader of queues whose entries point into them."""
        body = orjson.dumps(self._broker.view.chunks())
        self._answer(connection, command, reply(command, codes.SUCCESS, body=body))

    def near(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Answers a page of what waits in the wheel, and where the next page begins."""
        rows_max = self._broker.limits.near_rows_max
        rows, place = self._broker.view.wheel_page((asked["due"], asked["arrival"]), rows_max)
        fields = {} if place is None else {"due": place[0], "arrival": place[1]}
        self._answer(connection, command, reply(command, codes.SUCCESS, fields, body=rows.tobytes()))

    def _answer(self, connection: Connection, command: Command, frame: bytes, position: int | None = None) -> None:
        """Answers when the log is durable up to a position; without one, up to all that is true now."""
        request = command.without_content()

        def answer(error: LogFailed | None) -> None:
            if not request.is_oneway:
                connection.write(frame if error is None else refusal(request, error))

        self._pulse.when_durable(connection, self._broker.view.position if position is None else position, answer)

    # -- registering --------------------------------------------------------------------------------------------

    def register(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        asked = Registration.read(load(command.body, "the registration of a pipeline"))
        self._hear()
        if self._folder is not None:
            refuse_elsewhere(asked.table, self._broker.settings.table, self._folder)
        ticket = self._broker.register_pipeline(
            self._clock.now_ms(), table=asked.table, master=asked.master, marks=asked.marks
        )
        request = command.without_content()

        def answer(ticket: Ticket) -> None:
            if ticket.error is not None:
                connection.write(refusal(request, ticket.error))
                return
            self._broker.view.trusts_table = True
            state = self._state()._replace(epoch=ticket.answer, staged=tuple(sorted(self._broker.view.chunk_names())))
            frame = reply(request, codes.SUCCESS, body=dump(state.plain()))
            self._answer(connection, request, frame, ticket.end)

        self._pulse.expect(connection, ticket, answer)

    # -- staging ------------------------------------------------------------------------------------------------

    def stage(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> None:
        """Takes a stage. Reading its chunks takes long, so that happens on another thread."""
        stage = Stage.read(load(command.body, "a stage"))
        if not self._table.is_attached(connection):  # bulk stages, too, in place of a pipeline
            self._hear()
        self._tasks.answer(connection, command, self._stage(connection, command.without_content(), stage))

    async def _stage(self, connection: Connection, command: Command, stage: Stage) -> bytes:
        staging = self._broker.staging
        async with self._stage_lock:
            staging.check(stage)
            staging.doubt(stage, max(self._clock.now_ms(), self._said_ms))
            verified = await asyncio.to_thread(staging.verify, stage)
            staging.believe(stage, verified)
            ticket = staging.write(stage, verified, self._clock.now_ms())
            await self.settled(connection, ticket)
        raise_if_refused(ticket.answer)
        has_moved = stage.horizon[1] > stage.horizon[0]
        self._table.note_stage(connection, ticket.answer.message_count, has_moved, self._clock.now_ms())
        if self._table.is_attached(connection):
            self._note_stand_in(stage, ticket.answer.message_count)
        elif has_moved and self.stand_in is not None:
            self._reports.append(self.stand_in)
            self.stand_in = None
        return reply(command, codes.SUCCESS)

    async def settled(self, connection: Connection, ticket: Ticket) -> None:
        """Returns when a ticket has its answer and is durable. Raises LogFailed where it cannot become so."""
        done: asyncio.Future[LogFailed | None] = asyncio.get_running_loop().create_future()

        def finish(error: LogFailed | None) -> None:
            if not done.done():  # the server may have stopped
                done.set_result(error)

        self._pulse.expect(connection, ticket, lambda ticket: self._pulse.when_durable(connection, ticket.end, finish))
        self._pulse.nudge()
        error = await done
        if error is not None:
            raise error

    # -- reports ------------------------------------------------------------------------------------------------

    def _note_stand_in(self, stage: Stage, message_count: int) -> None:
        """Adds a stage of bulk to the report about the time for which it stands in."""
        now_ms, far = self._clock.now_ms(), self._broker.view.far
        before = self.stand_in or {"at_ms": now_ms, "promoted": 0, "chunks": 0}
        report = dict.fromkeys(Report._fields, 0) | {
            "at_ms": before["at_ms"], "epoch": stage.epoch, "far_from": far.taken, "far_to": far.taken,
            "horizon": far.horizon_at_ms, "promoted": before["promoted"] + message_count,
            "chunks": before["chunks"] + len(stage.chunks), "rescued": self._broker.rescuer.rescued_count,
            "backlog": far.length - far.taken, "total_s": (now_ms - before["at_ms"]) / 1_000,
        }  # fmt: skip
        seconds = {name: float(value) for name, value in report.items() if name.endswith("_s")}
        self.stand_in = {**report, **seconds, "master": BULK}

    def report(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        if len(command.body) > REPORT_BYTES_MAX:
            raise UsageError(f"the report of a batch has {len(command.body)} bytes, the limit is {REPORT_BYTES_MAX}")
        figures = read_report(load(command.body, "the report of a batch"))
        if figures not in self._reports:  # a pipeline that starts again repeats the reports of those before it
            self._reports.append(figures)
        return reply(command, codes.SUCCESS)

    def last_reports(self, count: int) -> list[Figures]:
        """The last reports, the newest at the end."""
        return list(self._reports)[-count:]

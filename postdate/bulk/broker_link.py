"""The connection from bulk to the broker: one, kept alive, made again with pauses when it breaks; and its requests.

The event loop has a thread of its own; everything else is called from Flight's threads and waits, never longer than the
times below. Where the broker is away a call raises Unreachable, Disconnected or TimedOut; it does not wait.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import orjson

from postdate.access.token import TOKEN_USER
from postdate.client.connection import Address, Answer, Connection, Connections
from postdate.client.errors import Pause, expect_success
from postdate.client.loop import LoopThread
from postdate.client.security import Security
from postdate.contract import JobOrder, Stage, State, dump, load
from postdate.errors import PostdateError, ProtocolError
from postdate.storage.layout import NEAR
from postdate.wire import codes
from postdate.wire.frame import NO_FIELDS, Command
from postdate.wire.reports import decode_properties_text
from postdate.wire.requests import Request
from postdate.wire.signature import Credentials

logger = logging.getLogger("postdate.bulk")

_ASK_SECONDS = 10.0  # most requests are answered from memory
_STAGE_SECONDS = 300.0  # the broker reads every byte of the chunks
_STATE_PAUSE_SECONDS = 5.0  # a sign of life: the broker drops a connection that says nothing for long


class QueueRange(NamedTuple):
    """Which rows of a queue are durable, and which of them lie in files."""

    number: int
    first: int
    length: int
    stored: int
    file_rows: int
    tail_start: int  # the number of the first row in `tail`
    tail: bytes  # rows that are in the broker's memory alone
    time_row: int  # in a topic's queue: which of its times holds for the first row that was asked about


class StagedChunk(NamedTuple):
    """Where the offsets of a chunk begin, the name of its file, how many bytes it has."""

    base: int
    name: str
    size: int


class Link:
    """Asks the broker for bulk, and answers its questions."""

    def __init__(self, address: Address, answers: Mapping[int, Answer], token: str = "") -> None:
        """`answers` answers the broker's questions, by their code. The token, if there is one, signs ours."""
        self._address = address
        self._bulk = ""  # where bulk listens
        self._problem = ""  # why it cannot promote
        self._loop = LoopThread()
        credentials = Credentials(TOKEN_USER, token) if token else None
        self._connections = Connections(greet=self._attach, answers=answers, security=Security(credentials))
        self._keeping: Future[None] | None = None

    def attach(self, bulk: str) -> None:
        """Tells the broker, on this connection and every later one, where bulk listens: it answers questions."""
        self._bulk = bulk
        self._keeping = self._loop.start(self._keep())

    async def _keep(self) -> None:
        """Holds the connection, so that the broker can ask at any time."""
        pause = Pause()
        is_attached = False  # a Flight call may have made the first connection before bulk knew its own address
        while True:
            try:
                connection = await self._connections.to(self._address, _ASK_SECONDS)
                if not is_attached:
                    await self._attach(connection)
                    is_attached = True
                await connection.request(Request.GET_BULK_STATE, timeout=_ASK_SECONDS)
                pause.reset()
                await asyncio.sleep(_STATE_PAUSE_SECONDS)
            except PostdateError:
                # Callers get the error themselves; here the connection is only tried again.
                await asyncio.sleep(pause.next())

    async def _attach(self, connection: Connection) -> None:
        """Tells where bulk listens. A broker that refuses is served all the same."""
        if not self._bulk:
            return
        fields = {"bulk": self._bulk, "problem": self._problem}
        answer = await connection.request(Request.ATTACH_TABLE, fields, timeout=_ASK_SECONDS)
        if answer.code != codes.SUCCESS:
            logger.warning("the broker asks nothing about the table: %s", answer.remark)

    def tell_problem(self, problem: str) -> None:
        """Tells the broker why bulk cannot promote, "" where it can; on this connection and every later one."""
        if problem != self._problem:
            self._problem = problem
            self._ask(Request.ATTACH_TABLE, {"bulk": self._bulk, "problem": problem})

    def _ask(
        self, code: int, fields: Mapping[str, Any] = NO_FIELDS, body: bytes = b"", timeout: float = _ASK_SECONDS
    ) -> Command:
        async def request() -> Command:
            connection = await self._connections.to(self._address, _ASK_SECONDS)
            return expect_success(await connection.request(code, fields, body, timeout=timeout))

        return self._loop.run(request())

    # -- requests; all raise what the broker's refusal means, Unreachable, Disconnected or TimedOut ---------------

    def state(self) -> State:
        return State.read(load(self._ask(Request.GET_BULK_STATE).body, "the state of the broker"))

    def range(self, topic: str, queue_id: int, times: bool, start: int) -> QueueRange:
        """The rows of a topic's queue or their times, or of the far queue where the topic is empty."""
        asked = {"topic": topic, "queueId": queue_id, "start": start, "times": str(times).lower()}
        answer = self._ask(Request.GET_BULK_RANGE, asked)
        try:
            number, first, length, stored, file_rows = (
                int(answer.fields[name]) for name in ("number", "first", "length", "stored", "fileRows")
            )
            time_row = int(answer.fields.get("timeRow", 0))
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"the broker's answer to GET_BULK_RANGE lacks a number: {answer.fields}") from error
        return QueueRange(number, first, length, stored, file_rows, max(start, stored), answer.body, time_row)

    def chunks(self) -> list[StagedChunk]:
        """All staged chunks that are there, ascending by base."""
        return [StagedChunk(*each) for each in orjson.loads(self._ask(Request.GET_CHUNKS).body)]

    def near(self) -> Iterator[np.ndarray]:
        """What waits in the wheel (wheel.NEAR), page by page, in the order of (due, arrival)."""
        place = ("-1", "-1")
        while True:
            answer = self._ask(Request.GET_NEAR, {"due": place[0], "arrival": place[1]})
            yield np.frombuffer(answer.body, NEAR)
            if "due" not in answer.fields:
                return
            place = (str(answer.fields["due"]), str(answer.fields["arrival"]))

    def order(self, number: int) -> JobOrder:
        """A job, as the pipeline gets it that carries it out."""
        answer = self._ask(Request.JOB, body=dump({"call": "command", "number": number}))
        return JobOrder.read(load(answer.body, "the order for a job"))

    def stage(self, stage: Stage) -> None:
        """Stages chunks. Raises Refused where the broker is elsewhere."""
        self._ask(Request.STAGE, body=dump(stage.plain()), timeout=_STAGE_SECONDS)

    def delay_levels(self) -> str:
        """The broker's delay levels, as it is set."""
        settings = decode_properties_text(self._ask(Request.GET_BROKER_CONFIG).body)
        return settings["message_delay_level"]

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._loop.run(self._connections.close())
        self._loop.stop()

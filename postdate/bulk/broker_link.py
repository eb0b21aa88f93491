"""The connection to the broker: one, kept alive, made again with pauses when it breaks; and the requests on it.

The event loop has a thread of its own; everything else is called from Flight's threads and waits, never longer than the
times below. A broker that is away is an Unreachable, Disconnected or TimedOut, never a wait.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from postdate.client.connection import Address, Answer, Connection, Connections
from postdate.client.errors import Pause, expect_success
from postdate.client.loop import LoopThread
from postdate.errors import PostdateError, ProtocolError
from postdate.storage.layout import NEAR
from postdate.wire import codes
from postdate.wire.frame import NO_FIELDS, Command
from postdate.wire.reports import decode_properties_text
from postdate.wire.requests import Request

logger = logging.getLogger("postdate.bulk")

_ASK_SECONDS = 10.0  # most requests are answered from memory
_WRITE_SECONDS = 30.0  # a sync of the broker's disk is in it
_STAGE_SECONDS = 300.0  # the broker reads and sums up every byte of the chunks
_STATE_PAUSE_SECONDS = 5.0  # a sign of life: the broker drops a connection that says nothing for long


class QueueRange(NamedTuple):
    """What the broker says of a queue's rows: which are durable, which of them lie in files."""

    number: int
    first: int
    length: int
    stored: int
    file_rows: int
    tail_start: int  # the number of the first row in `tail`
    tail: bytes  # rows that are in the broker's memory alone
    time_row: int  # of a topic's queue: which of its times holds for the row that was asked about


class StagedChunk(NamedTuple):
    """Where the offsets of a chunk begin, the name of its file, how many bytes it has."""

    base: int
    name: str
    size: int


class Link:
    def __init__(self, address: Address, answers: Mapping[int, Answer]) -> None:
        """`answers` says, by code, what the broker's questions are answered."""
        self._address = address
        self.table = ""  # where the pipeline that registered last keeps its table, as far as the broker has told
        self._loop = LoopThread()
        self._connections = Connections(greet=_greet, answers=answers)
        self._keeping = self._loop.start(self._keep())

    async def _keep(self) -> None:
        """Holds the connection, so that the broker can ask at any time."""
        pause = Pause()
        while True:
            try:
                self._note(await self._asked(Request.GET_BULK_STATE, NO_FIELDS, b"", _ASK_SECONDS))
                pause.reset()
                await asyncio.sleep(_STATE_PAUSE_SECONDS)
            except PostdateError:
                # Whoever asks meanwhile is told; here it is only tried again.
                await asyncio.sleep(pause.next())

    def _note(self, answer: Command) -> dict[str, Any]:
        state: dict[str, Any] = orjson.loads(answer.body)
        self.table = str(state.get("table") or self.table)
        return state

    async def _asked(self, code: int, fields: Mapping[str, Any], body: bytes, timeout: float) -> Command:
        connection = await self._connections.to(self._address, min(timeout, _ASK_SECONDS))
        return expect_success(await connection.request(code, fields, body, timeout=timeout))

    def _ask(
        self, code: int, fields: Mapping[str, Any] = NO_FIELDS, body: bytes = b"", timeout: float = _ASK_SECONDS
    ) -> Command:
        return self._loop.run(self._asked(code, fields, body, timeout))

    # -- requests; all of them raise what the broker's refusal means, Unreachable, Disconnected or TimedOut

    def state(self) -> dict[str, Any]:
        return self._note(self._ask(Request.GET_BULK_STATE))

    def register(self, wish: bytes) -> dict[str, Any]:
        return self._note(self._ask(Request.REGISTER_PIPELINE, body=wish, timeout=_WRITE_SECONDS))

    def stage(self, wish: bytes) -> None:
        self._ask(Request.STAGE, body=wish, timeout=_STAGE_SECONDS)

    def job(self, wish: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads(self._ask(Request.JOB, body=wish, timeout=_STAGE_SECONDS).body)
        return answer

    def report(self, report: bytes) -> None:
        self._ask(Request.REPORT_BATCH, body=report)

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

    def topic(self, name: str, at_ms: int) -> list[list[int]]:
        """How far each queue goes: [id, number, first offset, next offset, first one visible since an instant]."""
        found: list[list[int]] = orjson.loads(self._ask(Request.GET_BULK_TOPIC, {"topic": name, "at": at_ms}).body)[
            "queues"
        ]
        return found

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

    def delay_levels(self) -> str:
        """The broker's delay levels, as it is set."""
        settings = decode_properties_text(self._ask(Request.GET_BROKER_CONFIG).body)
        return settings["message_delay_level"]

    def close(self) -> None:
        self._keeping.cancel()
        self._loop.run(self._connections.close())
        self._loop.stop()


async def _greet(connection: Connection) -> None:
    """Says that questions about the table are answered here. A broker that wants none is served all the same."""
    answer = await connection.request(Request.ATTACH_TABLE, timeout=_ASK_SECONDS)
    if answer.code != codes.SUCCESS:
        logger.warning("the broker will ask nothing about the table: %s", answer.remark)

"""Asks bulk about the pipeline's table, over the connection that bulk has attached.

    client --370---> broker --9809--> bulk, which reads the table
    client --9801--> broker --9811--> bulk

A cancel whose message the broker does not know, due after the horizon, may have its message in the table. Only the
client that cancels waits for the answer; without one in time the outcome is "unknown", and the cancel stands.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from postdate.broker.broker import Broker
from postdate.broker.cancelling import CancelResult
from postdate.message import Cancelled
from postdate.server.connection import Connection
from postdate.server.sessions.questions import Questions
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.requests import ClientRequest

_NOBODY = "no process is attached that can read the table"
_ADDRESS_MAX = 300  # characters: a name has 255 at most
_COUNT_S = 60.0  # ten million rows take a second or two; a busy machine may need more


class Truth(NamedTuple):
    """The answer to a cancel. `unread` says why the table was not asked, or has not answered."""

    outcome: Cancelled
    unread: str = ""


Tell = Callable[[Truth], None]


class Table:
    """Asks the process that attached last, which is bulk, and knows where that listens."""

    def __init__(self, broker: Broker, questions: Questions) -> None:
        self._broker, self._questions = broker, questions
        self._reader: Connection | None = None
        self.bulk_address = ""  # of the one that is attached
        self._count = 0  # questions on their way

    def attach(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        if self._reader is not connection:
            self._detach()
            self._reader = connection
            connection.held_count += 1  # it may be silent for long: it waits for questions
        self.bulk_address = asked["bulk"][:_ADDRESS_MAX]
        return reply(command, codes.SUCCESS)

    def drop(self, connection: Connection) -> None:
        if self._reader is connection:
            self._detach()

    def _detach(self) -> None:
        if self._reader is not None:
            self._reader.held_count -= 1
            self._reader = None
            self.bulk_address = ""

    def find(self, result: CancelResult, tell: Tell) -> None:
        """Tells the truth about a cancel, at once where the table need not or cannot be asked."""
        if not result.may_be_in_table:
            tell(Truth(result.outcome))
            return
        limit = self._broker.limits.table_reads_max
        if self._reader is None:
            tell(Truth(Cancelled.UNKNOWN, _NOBODY))
            return
        if self._count >= limit:
            tell(Truth(Cancelled.UNKNOWN, f"table_reads_max: {limit} questions about the table wait, the limit"))
            return
        self._count += 1
        tombstone = result.tombstone
        fields = {
            "topic": tombstone.topic, "key": tombstone.key, "by": tombstone.by, "keyHash": tombstone.key_hash,
            "due": tombstone.due, "before": tombstone.arrival,
        } | self._named_table()  # fmt: skip
        wait_s, on_answer = self._broker.limits.table_read_ms_max / 1_000, partial(self._take_answer, result, tell)
        self._questions.ask(self._reader, ClientRequest.FIND_IN_TABLE, fields, b"", wait_s, on_answer)

    async def count(self, wish: bytes) -> Command | str:
        """How much waits in the table, as JSON of `counts.Counts`, or in a sentence why that is not known."""
        if self._reader is None:
            return _NOBODY
        done: asyncio.Future[Command | str] = asyncio.get_running_loop().create_future()

        def tell(answer: Command | str) -> None:
            if not done.done():  # the client may be gone
                done.set_result(answer)

        self._questions.ask(self._reader, ClientRequest.COUNT_TABLE, self._named_table(), wish, _COUNT_S, tell)
        return await done

    def _named_table(self) -> dict[str, object]:
        """Where the table is, and whose it must be."""
        return {"table": self._broker.view.far.table, "identity": self._broker.identity}

    def _take_answer(self, result: CancelResult, tell: Tell, answer: Command | str) -> None:
        self._count -= 1
        arrivals = answer if isinstance(answer, str) else _arrivals(answer)
        if isinstance(arrivals, str):
            # The message may have come into the wheel meanwhile, where the broker sees it.
            found = self._broker.cancels.is_cancelled_by(result, [])
            tell(Truth(Cancelled.CANCELLED) if found else Truth(Cancelled.UNKNOWN, arrivals))
        else:
            found = self._broker.cancels.is_cancelled_by(result, arrivals)
            tell(Truth(Cancelled.CANCELLED if found else Cancelled.UNKNOWN))


def _arrivals(answer: Command) -> list[int] | str:
    """The arrivals in an answer, or what is wrong with it."""
    if answer.code != codes.SUCCESS:
        return f"the table cannot be read: {answer.remark or f'code {answer.code}'}"
    try:
        found = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        return f"the answer about the table cannot be read: {answer.body[:64]!r}"
    return found

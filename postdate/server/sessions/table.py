"""Asks bulk about the pipeline's table, over the connection that bulk has attached, and notes what bulk promotes.

    client --370---> broker --9809--> bulk, which reads the table
    client --9801--> broker --9811--> bulk
    a lookup of a key               broker --9826--> bulk

A cancel whose message the broker does not know, due after the horizon, may have its message in the table. Only the
client that cancels waits for the answer; without one in time the outcome is "unknown", and the cancel stands.

Where no pipeline promotes in time, bulk stages what the table has, and says so where it cannot.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import orjson

from postdate.broker.broker import Broker
from postdate.broker.cancelling import CancelResult
from postdate.clock import Clock
from postdate.message import Cancelled
from postdate.server.connection import Connection
from postdate.server.sessions.questions import Questions
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.requests import ClientRequest

_NOBODY = "no process is attached that can read the table"
logger = logging.getLogger("postdate.server")
_PROBLEM_MAX = 1_000  # characters
_ADDRESS_MAX = 300  # characters: a name has 255 at most
_COUNT_S = 60.0  # ten million rows take a second or two; a busy machine may need more


class Truth(NamedTuple):
    """The answer to a cancel. `unread` says why the table was not asked, or has not answered."""

    outcome: Cancelled
    unread: str = ""


class TableMessage(NamedTuple):
    """A message in the table, or in a file of a job beside it."""

    due_at_ms: int
    arrival: int
    queue: int  # number
    record: bytes
    is_cancelled: bool = False


class TableFound(NamedTuple):
    """The messages of a key, those that are due first; cut where there are, or may be, more than were asked for.
    Cancelled ones do not count.
    """

    messages: list[TableMessage]
    is_cut: bool


Tell = Callable[[Truth], None]


class Table:
    """Asks the process that attached last, which is bulk, and knows where that listens."""

    def __init__(self, broker: Broker, clock: Clock, questions: Questions) -> None:
        self._broker, self._clock, self._questions = broker, clock, questions
        self._reader: Connection | None = None
        self.bulk_address = ""  # of the one that is attached
        self._count = 0  # questions on their way
        self._promoted_count = 0  # messages that bulk promoted
        self._serves_since_ms = 0  # since when bulk has moved the horizon, and no pipeline; 0 = a pipeline does
        self._problem, self._problem_since_ms = "", 0  # why bulk cannot promote

    def attach(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        if self._reader is not connection:
            self._detach()
            self._reader = connection
            connection.held_count += 1  # it may be silent for long: it waits for questions
        self.bulk_address = asked["bulk"][:_ADDRESS_MAX]
        self._note_problem(asked["problem"][:_PROBLEM_MAX] if self._broker.view.far.table else "")
        return reply(command, codes.SUCCESS)

    def is_attached(self, connection: Connection) -> bool:
        """Whether this is the connection of bulk."""
        return self._reader is connection

    # -- promotions by bulk -------------------------------------------------------------------------------------

    def _note_problem(self, problem: str) -> None:
        if problem and not self._problem:
            self._problem_since_ms = self._clock.now_ms()
            logger.error(
                "nobody promotes what falls due in the table: no pipeline does, and bulk cannot: %s. What the log has "
                "is on time; what only the table has comes as soon as bulk can read it: it tries again every second",
                problem,
            )
        elif self._problem and not problem:
            logger.warning("what falls due in the table can be promoted again")
        self._problem = problem

    def note_stage(self, connection: Connection, message_count: int, has_moved: bool, at_ms: int) -> None:
        """Notes an accepted stage of a pipeline or of bulk; `has_moved` says whether it has moved the horizon."""
        if self.is_attached(connection):
            self._promoted_count += message_count
            if has_moved and not self._serves_since_ms:
                self._serves_since_ms = at_ms
                logger.warning("no pipeline promotes in time: bulk promotes in its place")
        elif has_moved and self._serves_since_ms:
            self._serves_since_ms = 0
            logger.info("a pipeline promotes again")

    def promotions(self) -> dict[str, Any]:
        """Whether bulk is there, what it has promoted since the broker was started, since when it stands in for a
        pipeline (0 = it does not), and since when and why it cannot.
        """
        return {
            "bulk_attached": self._reader is not None,
            "bulk_promoted": self._promoted_count,
            "bulk_since_ms": self._serves_since_ms,
            "bulk_problem": self._problem,
            "bulk_problem_since_ms": self._problem_since_ms if self._problem else 0,
        }

    # -- questions ----------------------------------------------------------------------------------------------

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
        if self._reader is None or self._is_full:
            tell(Truth(Cancelled.UNKNOWN, self._refusal()))
            return
        self._count += 1
        tombstone = result.tombstone
        fields = {
            "topic": tombstone.topic, "key": tombstone.key, "by": tombstone.by, "keyHash": tombstone.key_hash,
            "due": tombstone.due, "before": tombstone.arrival, "queues": ",".join(map(str, result.queues)),
        } | self._named_table()  # fmt: skip
        wait_s, on_answer = self._broker.limits.table_read_ms_max / 1_000, partial(self._take_answer, result, tell)
        self._questions.ask(self._reader, ClientRequest.FIND_IN_TABLE, fields, b"", wait_s, on_answer)

    async def find_key(
        self, topic: str, key: str, by: str, queues: Sequence[int], limit: int
    ) -> TableFound | str:  # fmt: skip
        """Returns the messages of a key that the table and the files of jobs beside it hold, due before the horizon or
        after it, at most `limit` and some cancelled ones; or in a sentence why that is not known. `by` is "unique",
        "key" (any of KEYS) or "any"; `queues` are the numbers of the topic's queues. Asks several times where one
        answer has no room.
        """
        fields = {"topic": topic, "key": key, "by": by, "queues": ",".join(map(str, queues))}
        messages: list[TableMessage] = []
        left = limit
        is_cut = False  # of an answer that is cut, the rest is not all there is
        while True:
            answer = await self._find_some(fields | {"limit": left})
            if isinstance(answer, str):
                return answer
            found, has_rest = answer
            messages += found.messages
            left -= sum(not each.is_cancelled for each in found.messages)
            is_cut |= found.is_cut
            if not has_rest or not found.messages or left <= 0:
                return TableFound(messages, is_cut or has_rest)
            fields["after"] = f"{messages[-1].due_at_ms},{messages[-1].arrival}"

    async def _find_some(self, fields: Mapping[str, Any]) -> tuple[TableFound, bool] | str:
        """Returns the messages of one answer and whether it had no room for more, or a sentence."""
        if self._reader is None or self._is_full:
            return self._refusal()
        jobs = [(job.number, job.far) for job in self._broker.view.unfollowed_jobs()]
        self._count += 1
        try:
            answer = await self._ask(
                self._reader, ClientRequest.FIND_KEY_IN_TABLE, {**fields, **self._named_table()},
                orjson.dumps({"jobs": jobs}), self._broker.limits.table_read_ms_max / 1_000,
            )  # fmt: skip
        finally:
            self._count -= 1
        if isinstance(answer, str):
            return answer
        found = _read_found(answer)
        return found if isinstance(found, str) else (found, answer.fields.get("rest") == "true")

    @property
    def _is_full(self) -> bool:
        return self._count >= self._broker.limits.table_reads_max

    def _refusal(self) -> str:
        """Says why nobody is asked."""
        if self._reader is None:
            return _NOBODY
        return f"table_reads_max: {self._broker.limits.table_reads_max} questions about the table wait, the limit"

    async def count(self, wish: bytes) -> Command | str:
        """How much waits in the table, as JSON of `counts.Counts`, or in a sentence why that is not known."""
        if self._reader is None:
            return _NOBODY
        return await self._ask(self._reader, ClientRequest.COUNT_TABLE, self._named_table(), wish, _COUNT_S)

    async def _ask(
        self, reader: Connection, code: int, fields: Mapping[str, Any], body: bytes, wait_s: float
    ) -> Command | str:  # fmt: skip
        """Asks bulk; returns its answer, or in a sentence why there is none."""
        done: asyncio.Future[Command | str] = asyncio.get_running_loop().create_future()

        def tell(answer: Command | str) -> None:
            if not done.done():  # the client may be gone
                done.set_result(answer)

        self._questions.ask(reader, code, fields, body, wait_s, tell)
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


def _read_found(answer: Command) -> TableFound | str:
    """The messages in an answer, or what is wrong with it."""
    if answer.code != codes.SUCCESS:
        return f"the table cannot be read: {answer.remark or f'code {answer.code}'}"
    text, _, data = answer.body.partition(b"\n")
    messages: list[TableMessage] = []
    at = 0
    try:
        for due_at_ms, arrival, queue, size, is_cancelled in _read_list(text):
            numbers = (due_at_ms, arrival, queue, size, is_cancelled)
            if any(type(number) is not int or number < 0 for number in numbers) or at + size > len(data):
                raise ValueError
            messages.append(TableMessage(due_at_ms, arrival, queue, data[at : at + size], bool(is_cancelled)))
            at += size
        if at < len(data):
            raise ValueError
    except (TypeError, ValueError):
        return f"the answer about the table cannot be read: {answer.body[:64]!r}"
    return TableFound(messages, answer.fields.get("cut") == "true")


def _read_list(text: bytes) -> list[Any]:
    """Raises ValueError for what is no list in JSON."""
    found = orjson.loads(text)
    if not isinstance(found, list):
        raise ValueError
    return found


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

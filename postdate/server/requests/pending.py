"""Counts of waiting messages: by topic and by time, and how many are due in the time ahead.

They wait in the wheel, in the far queue and in the pipeline's table. Broker and pipeline go on while they are counted.
A stage moves messages from one of these to the next, so all are counted again where one came in between.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson

from postdate.broker.broker import Broker
from postdate.broker.view import Waiting
from postdate.clock import Clock
from postdate.counts import NOTHING, UNITS_MS, Counts, Seconds
from postdate.errors import ProtocolError
from postdate.server.asker import Asker
from postdate.server.connection import Connection
from postdate.server.sessions.table import Table
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.rights import GET

T = TypeVar("T")

_ROWS_MAX = 10_000  # of an answer
_SECONDS_MAX = 31 * 86_400  # of a forecast
_COUNT_ROWS = 16_384  # counted in one go: about a millisecond
_TRIES = 5


class _Queues(NamedTuple):
    """The topics to count, and for each queue number the index of its topic, or -1 if it does not count."""

    names: list[str]
    codes: np.ndarray


class _Counted(NamedTuple):
    near: Counts
    far: Counts
    table: Counts
    unread: str  # why the table is not counted


class Pending:
    """Answers how many messages wait. It counts step by step, so that firing does not wait for it."""

    def __init__(self, broker: Broker, clock: Clock, table: Table, tasks: Tasks) -> None:
        self._broker = broker
        self._clock = clock
        self._table = table
        self._tasks = tasks

    def count(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        self._check(asked)
        self._tasks.answer(connection, command, self._count(command, asked, connection.asker))

    def forecast(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        self._check(asked)
        limit = _SECONDS_MAX * 1_000 // UNITS_MS[asked["unit"]]
        if not 1 <= asked["bars"] <= limit:
            raise ProtocolError(f"bars {asked['bars']}, expected 1 to {limit} of unit {asked['unit']}")
        self._tasks.answer(connection, command, self._forecast(command, asked, connection.asker))

    def _check(self, asked: Mapping[str, Any]) -> None:
        if asked["unit"] not in UNITS_MS:
            raise ProtocolError(f"unit {asked['unit']!r}, expected one of {', '.join(UNITS_MS)}")
        if asked["topic"]:
            self._broker.view.topic(asked["topic"])

    # -- what waits ---------------------------------------------------------------------------------------------

    async def _count(self, command: Command, asked: Mapping[str, Any], asker: Asker) -> bytes:
        by = {"unit_ms": UNITS_MS[asked["unit"]], "limit": max(1, min(asked["limit"], _ROWS_MAX))}

        async def count_once() -> _Counted:
            queues = self._queues(asked["topic"], asker)
            table, near, far = (Counts(**by) for _ in range(3))
            unread = await self._count_table(queues, by, lambda body: table.merge(Counts.of(orjson.loads(body), **by)))
            await _count_rows(self._broker.view.waiting_near(), queues, near)
            await _count_rows(self._broker.view.waiting_far(), queues, far)
            return _Counted(near, far, table, unread)

        counted = await self._count_steadily(count_once)
        return reply(command, codes.SUCCESS, body=orjson.dumps(_body_of(counted, asked["unit"])))

    # -- what is ahead ------------------------------------------------------------------------------------------

    async def _forecast(self, command: Command, asked: Mapping[str, Any], asker: Asker) -> bytes:
        unit_ms = UNITS_MS[asked["unit"]]
        from_ms = self._clock.now_ms() // unit_ms * unit_ms
        by = {"from_ms": from_ms, "seconds": asked["bars"] * unit_ms // 1_000}

        async def count_once() -> tuple[Seconds, str]:
            queues = self._queues(asked["topic"], asker)
            seconds = Seconds(by["from_ms"], by["seconds"])
            unread = await self._count_table(queues, by, seconds.merge)
            await _count_rows(self._broker.view.waiting_near(), queues, seconds)
            await _count_rows(self._broker.view.waiting_far(), queues, seconds)
            return seconds, unread

        seconds, unread = await self._count_steadily(count_once)
        bars = [bar._asdict() for bar in seconds.bars(unit_ms // 1_000)]
        body = {"unit": asked["unit"], "topic": asked["topic"], "unread": unread, "bars": bars}
        return reply(command, codes.SUCCESS, body=orjson.dumps(body))

    # -- counting -----------------------------------------------------------------------------------------------

    async def _count_steadily(self, count_once: Callable[[], Awaitable[T]]) -> T:
        """Counts until no stage came in between, at most _TRIES times."""
        for _ in range(_TRIES):
            far = self._broker.view.far
            counted = await count_once()
            if self._broker.view.far[:3] == far[:3]:  # epoch, taken and horizon
                break
        return counted

    def _queues(self, topic: str, asker: Asker) -> _Queues:
        """Returns a topic, or all that somebody may look at."""
        by_queue = self._broker.view.topics_by_queue()
        names = [topic] if topic else sorted(name for name in set(by_queue) if asker.may_topic(name, GET))
        number_of = {name: number for number, name in enumerate(names)}
        codes_of = np.array([number_of.get(name, -1) for name in by_queue], np.int64)
        codes_of[self._broker.view.deleted_queues()] = -1
        return _Queues(names, codes_of)

    async def _count_table(self, queues: _Queues, by: Mapping[str, int], merge: Callable[[bytes], None]) -> str:
        """Asks for the counts of the table and merges them; returns why where that is not possible."""
        far = self._broker.view.far
        unfollowed = self._broker.view.unfollowed_jobs()
        if not far.in_table and not unfollowed:
            return ""
        wish = {
            **by, "horizon": far.horizon_at_ms, "before": far.arrival_of_taken, "names": queues.names,
            "codes": queues.codes.tolist(), "cancels": self._cancels(queues), "drops": self._drops(),
            "untaken_jobs": [job.number for job in self._broker.view.jobs() if job.far >= far.taken],
            "jobs": [(job.number, job.far) for job in unfollowed],
        }  # fmt: skip
        answer = await self._table.count(orjson.dumps(wish))
        known = f"; it has {far.in_table:,} rows of all topics: messages, and cancels"
        if isinstance(answer, str):
            return answer + known
        if answer.code != codes.SUCCESS:
            return (answer.remark or f"code {answer.code}") + known
        try:
            merge(answer.body)
        except (KeyError, TypeError, ValueError):
            return f"the table's answer cannot be read: {answer.body[:64]!r}{known}"
        return ""

    def _cancels(self, queues: _Queues) -> list[tuple[int, ...]]:
        """Returns the cancels that the table does not have yet, and that may be for one of its rows."""
        view = self._broker.view
        number_of = {name: number for number, name in enumerate(queues.names)}
        found: list[tuple[int, ...]] = []
        for tombstone in view.tombstones_after(view.far.horizon_at_ms):
            if tombstone.only >= 0:
                continue
            signed = int(np.uint64(tombstone.key_hash).view(np.int64))
            hashes = (signed, 0) if tombstone.by == "unique" else (0, signed)
            place = (tombstone.due, tombstone.arrival, number_of.get(tombstone.topic, -1))
            found.append((*place, *hashes, tombstone.jobs))
        return found

    def _drops(self) -> list[tuple[int, int]]:
        """Returns due and arrival of the messages that moves have taken away, and whose moves the table may lack."""
        view = self._broker.view
        return [(each.due, each.only) for each in view.tombstones_after(view.far.horizon_at_ms) if each.only >= 0]


async def _count_rows(pieces: Iterable[Waiting], queues: _Queues, counts: Counts | Seconds) -> None:
    for piece in pieces:
        for start in range(0, len(piece.due), _COUNT_ROWS):
            part = slice(start, start + _COUNT_ROWS)
            code = queues.codes[piece.queue[part]]
            wanted = code >= 0
            counts.add(piece.due[part][wanted], code[wanted], piece.size[part][wanted], queues.names)
            await asyncio.sleep(0)


def _body_of(counted: _Counted, unit: str) -> dict[str, Any]:
    """Returns the body of an answer. `near`, `far` and `table` are numbers of messages."""
    tiers = {"near": counted.near, "far": counted.far, "table": counted.table}
    topics = [
        {"topic": name}
        | {tier: counts.topics.get(name, NOTHING).rows for tier, counts in tiers.items()}
        | {"bytes": sum(counts.topics.get(name, NOTHING).bytes for counts in tiers.values())}
        for name in sorted({name for counts in tiers.values() for name in counts.topics})
    ]
    by_tier = {tier: counts.total.rows for tier, counts in tiers.items()}
    whole = counted.near
    whole.merge(counted.far)
    whole.merge(counted.table)
    return {
        "total": whole.total.rows, "bytes": whole.total.bytes, **by_tier, "unread": counted.unread,
        "topics": topics, "unit": unit,
        "times": [
            {"from_ms": at_ms, "topic": name, "count": amount.rows, "bytes": amount.bytes}
            for (at_ms, name), amount in whole.earliest()
        ],
        "truncated": whole.is_truncated,
    }  # fmt: skip

"""What waits, by topic and by time: in the wheel, in the far queue, and in the pipeline's table.

Broker and pipeline go on meanwhile. A stage moves messages from one place to the next, so where one has come in between
all is counted again.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from postdate.broker import Broker
from postdate.counts import NOTHING, UNITS_MS, Counts
from postdate.errors import ProtocolError
from postdate.server.connection import Connection
from postdate.server.table import Table
from postdate.server.tasks import Tasks
from postdate.topics import GONE
from postdate.wheel import Waiting
from postdate.wire import codes
from postdate.wire.frame import Command, reply

_ROWS_MAX = 10_000  # of an answer about what waits
_COUNT_ROWS = 16_384  # counted in one go: about a millisecond
_TRIES = 5


class _Queues(NamedTuple):
    """The topics that are counted, and by queue number which of them it belongs to; -1 is not counted."""

    names: list[str]
    codes: np.ndarray


class _Counted(NamedTuple):
    near: Counts
    far: Counts
    table: Counts
    unread: str  # why the table is not counted


class Pending:
    """Of one service."""

    def __init__(self, broker: Broker, table: Table, tasks: Tasks) -> None:
        self._broker = broker
        self._table = table
        self._tasks = tasks

    def answer(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Counted step by step, so that nothing that is due waits for it."""
        if asked["unit"] not in UNITS_MS:
            raise ProtocolError(f"unit {asked['unit']!r}, expected one of {', '.join(UNITS_MS)}")
        if asked["topic"]:
            self._broker.fold.topics.get(asked["topic"])
        self._tasks.answer(connection, command, self._answered(command, asked))

    async def _answered(self, command: Command, asked: Mapping[str, Any]) -> bytes:
        limit = max(1, min(asked["limit"], _ROWS_MAX))
        counted = await self._counted(asked["topic"], UNITS_MS[asked["unit"]], limit)
        return reply(command, codes.SUCCESS, body=orjson.dumps(_told(counted, asked["unit"])))

    async def _counted(self, topic: str, unit_ms: int, limit: int) -> _Counted:
        far = self._broker.fold.far
        for _ in range(_TRIES):
            place = (far.taken, far.horizon_at_ms)
            counted = await self._counted_once(self._queues(topic), unit_ms, limit)
            if (far.taken, far.horizon_at_ms) == place:
                break
        return counted

    async def _counted_once(self, queues: _Queues, unit_ms: int, limit: int) -> _Counted:
        table, unread = await self._count_table(queues, unit_ms, limit)
        near, far = Counts(unit_ms, limit), Counts(unit_ms, limit)
        await _count(self._broker.fold.waiting_near(), queues, near)
        await _count(self._broker.fold.waiting_far(), queues, far)
        return _Counted(near, far, table, unread)

    def _queues(self, topic: str) -> _Queues:
        topics = self._broker.fold.topics
        names = sorted({name for name, _ in topics.places}) if not topic else [topic]
        number_of = {name: number for number, name in enumerate(names)}
        codes_of = np.array([number_of.get(name, -1) for name, _ in topics.places], np.int64)
        codes_of[topics.target_array == GONE] = -1
        return _Queues(names, codes_of)

    async def _count_table(self, queues: _Queues, unit_ms: int, limit: int) -> tuple[Counts, str]:
        fold = self._broker.fold
        far = fold.far
        nothing = Counts(unit_ms, limit)
        if not far.in_table:
            return nothing, ""
        wish = {
            "unit_ms": unit_ms, "limit": limit, "horizon": far.horizon_at_ms, "before": far.arrival_of(far.taken),
            "names": queues.names, "codes": queues.codes.tolist(), "cancels": self._cancels(queues),
        }  # fmt: skip
        answer = await self._table.count(orjson.dumps(wish))
        if isinstance(answer, str):
            return nothing, answer
        if answer.code != codes.SUCCESS:
            return nothing, answer.remark or f"code {answer.code}"
        try:
            return Counts.of(orjson.loads(answer.body), unit_ms, limit), ""
        except (KeyError, TypeError, ValueError):
            return nothing, f"what the table is said to hold cannot be read: {answer.body[:64]!r}"

    def _cancels(self, queues: _Queues) -> list[tuple[int, ...]]:
        """Those that the table does not have yet, and that may be for one of its rows."""
        fold = self._broker.fold
        number_of = {name: number for number, name in enumerate(queues.names)}
        found: list[tuple[int, ...]] = []
        for tombstone in fold.tombstones.between(fold.far.horizon_at_ms + 1, 1 << 62):
            code = number_of.get(tombstone.topic, -1)
            signed = int(np.uint64(tombstone.key_hash).view(np.int64))
            hashes = (signed, 0) if tombstone.by == "unique" else (0, signed)
            found.append((tombstone.due, tombstone.arrival, code, *hashes))
        return found


async def _count(pieces: Iterable[Waiting], queues: _Queues, counts: Counts) -> None:
    for piece in pieces:
        for start in range(0, len(piece.due), _COUNT_ROWS):
            part = slice(start, start + _COUNT_ROWS)
            code = queues.codes[piece.queue[part]]
            wanted = code >= 0
            counts.add(piece.due[part][wanted], code[wanted], piece.size[part][wanted], queues.names)
            await asyncio.sleep(0)


def _told(counted: _Counted, unit: str) -> dict[str, Any]:
    """As the answer has it. `near`, `far` and `table` are messages."""
    tiers = {"near": counted.near, "far": counted.far, "table": counted.table}
    topics = [
        {"topic": name}
        | {tier: counts.topics.get(name, NOTHING).rows for tier, counts in tiers.items()}
        | {"bytes": sum(counts.topics.get(name, NOTHING).bytes for counts in tiers.values())}
        for name in sorted({name for counts in tiers.values() for name in counts.topics})
    ]
    whole = counted.near
    by_tier = {tier: counts.total.rows for tier, counts in tiers.items()}
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

"""Messages by key or id, for operators: found whether they wait or not, and said to be what they are.

A lookup runs step by step beside everything else, so that nothing that is due waits for it. The record of an answer is
the message's own, with two properties behind the producer's: POSTDATE_STATE (lookup.State) and, of a message with a due
time, POSTDATE_DUE_MS. One that is in no queue has the queue offset -1.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from postdate.broker.broker import Broker
from postdate.broker.lookup import BY_ANY, BY_UNIQUE, Found
from postdate.broker.view import NEVER
from postdate.errors import UsageError
from postdate.message import PROPERTIES_BYTES_MAX, PROPERTY_DUE_MS, PROPERTY_STATE, encode_properties
from postdate.server.connection import Connection
from postdate.server.tasks import Tasks
from postdate.storage import record as records
from postdate.wire import codes
from postdate.wire.frame import Command, reply

_HEADER_BYTES_MAX = 1 << 12  # of an answer: what a frame holds besides its body
_TYPES = ("", "K", "U")  # of an index, as new clients name it: user keys, unique keys


class Lookups:
    """Serves one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._tasks = Tasks(broker, "lookups_max")

    def query(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        if asked["indexType"] not in _TYPES:
            raise UsageError(f"an index of type {asked['indexType']!r} does not exist: keys are indexed, K and U")
        is_unique = asked["_UNIQUE_KEY_QUERY"] or asked["indexType"] == "U"
        steps = self._broker.find(
            asked["topic"],
            asked["key"],
            by=BY_UNIQUE if is_unique else BY_ANY,
            begin_ms=asked["beginTimestamp"],
            end_ms=NEVER if asked["endTimestamp"] is None else asked["endTimestamp"],
            store_host=connection.broker_host,
        )
        limit = self._broker.limits.lookup_count_max if is_unique else asked["maxNum"]
        count_max = max(1, min(limit, self._broker.limits.lookup_count_max))
        self._tasks.answer(connection, command, self._answer_query(command, asked, steps, count_max))

    def view(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        steps = self._broker.find_at(asked["offset"], store_host=connection.broker_host)
        self._tasks.answer(connection, command, self._answer_view(command, asked["offset"], steps))

    # -- step by step -------------------------------------------------------------------------------------------

    async def _answer_query(
        self, command: Command, asked: Mapping[str, Any], steps: Iterator[Found | None], count_max: int
    ) -> bytes:
        found: list[bytes] = []
        room = self._broker.settings.frame_bytes_max - _HEADER_BYTES_MAX
        async for message in _slowly(steps):
            record = _told(message)
            if found and sum(map(len, found)) + len(record) > room:
                break
            found.append(record)
            if len(found) == count_max:
                break
        if not found:
            remark = f"no message of topic {asked['topic']!r} has the key {asked['key']!r} in that range of time"
            return reply(command, codes.QUERY_NOT_FOUND, remark=remark)
        view = self._broker.view
        fields = {"indexLastUpdateTimestamp": view.applied_at_ms, "indexLastUpdatePhyoffset": view.position}
        return reply(command, codes.SUCCESS, fields, body=b"".join(found))

    async def _answer_view(self, command: Command, offset: int, steps: Iterator[Found | None]) -> bytes:
        async for found in _slowly(steps):
            return reply(command, codes.SUCCESS, body=_told(found))
        return reply(command, codes.SYSTEM_ERROR, remark=f"there is no message at offset {offset}")


async def _slowly(steps: Iterator[Found | None]) -> AsyncIterator[Found]:
    """What the steps find; everything else has its turn between two of them."""
    for found in steps:
        if found is not None:
            yield found
        await asyncio.sleep(0)


def _told(found: Found) -> bytes:
    """The record of a message, and behind its properties what is said about it, if there is room for it."""
    said = {PROPERTY_STATE: found.state.value}
    if found.due_at_ms:
        said[PROPERTY_DUE_MS] = str(found.due_at_ms)
    return records.extended(found.record, encode_properties(said), PROPERTIES_BYTES_MAX)

"""Messages by key, by id and by their place in a queue, for operators. Waiting messages are found too.

A lookup runs step by step, so that firing does not wait for it. The record of an answer is the message's own, with
properties after the producer's: POSTDATE_STATE (lookup.State), POSTDATE_PLACE and, for a message with a due time,
POSTDATE_DUE_MS. A message that is in no queue has the queue offset -1.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.broker.lookup import BY_ANY, BY_UNIQUE, Found, State
from postdate.errors import UsageError
from postdate.message import (
    PROPERTIES_BYTES_MAX,
    PROPERTY_DUE_MS,
    PROPERTY_PLACE,
    PROPERTY_STATE,
    Host,
    encode_properties,
)
from postdate.server.asker import Asker
from postdate.server.connection import Connection
from postdate.server.sessions.keys import Keys, pace
from postdate.server.tasks import Tasks
from postdate.storage import record as records
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.rights import SUB, ask_topic

_HEADER_BYTES_MAX = 1 << 12  # of an answer: what a frame holds besides its body
_INDEX_TYPES = ("", "K", "U")  # as new clients name them: user keys, unique keys
_ENTRIES_MAX = 1_024  # of a queue in one answer


class Lookups:
    """Answers requests for single messages."""

    def __init__(self, broker: Broker, keys: Keys) -> None:
        self._broker, self._keys = broker, keys
        self._tasks = Tasks(broker, "lookups_max")

    def query_messages(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        if asked["indexType"] not in _INDEX_TYPES:
            raise UsageError(f"an index of type {asked['indexType']!r} does not exist: keys are indexed, K and U")
        is_unique = asked["_UNIQUE_KEY_QUERY"] or asked["indexType"] == "U"
        limit = self._broker.limits.lookup_count_max if is_unique else asked["maxNum"]
        count_max = max(1, min(limit, self._broker.limits.lookup_count_max))
        by = BY_UNIQUE if is_unique else BY_ANY
        self._tasks.answer(
            connection, command, self._answer_query(connection.broker_host, command, asked, by, count_max)
        )

    async def _answer_query(
        self, store_host: Host, command: Command, asked: Mapping[str, Any], by: str, count_max: int
    ) -> bytes:
        end_ms = NEVER if asked["endTimestamp"] is None else asked["endTimestamp"]
        messages, _, unread = await self._keys.find(
            asked["topic"], asked["key"], count_max, by, asked["beginTimestamp"], end_ms, store_host
        )
        found: list[bytes] = []
        room = self._broker.settings.frame_bytes_max - _HEADER_BYTES_MAX
        for record in map(_with_state, messages):
            if found and sum(map(len, found)) + len(record) > room:
                break
            found.append(record)
        if not found:
            remark = f"no message of topic {asked['topic']!r} has the key {asked['key']!r} in that range of time"
            remark += f", as far as the log tells; the table cannot be asked: {unread}" if unread else ""
            return reply(command, codes.QUERY_NOT_FOUND, {"unread": unread} if unread else {}, remark=remark)
        view = self._broker.view
        fields: dict[str, Any] = {
            "indexLastUpdateTimestamp": view.applied_at_ms,
            "indexLastUpdatePhyoffset": view.position,
        }
        if unread:
            fields["unread"] = unread
        return reply(command, codes.SUCCESS, fields, body=b"".join(found))

    def view_message(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        steps = self._broker.find_at(asked["offset"], store_host=connection.broker_host)
        self._tasks.answer(connection, command, self._answer_view(command, asked["offset"], steps, connection.asker))

    async def _answer_view(
        self, command: Command, offset: int, steps: Iterator[Found | None], asker: Asker
    ) -> bytes:  # fmt: skip
        async for found in pace(steps):
            asker.require(ask_topic(records.decode(found.record).topic, SUB))
            return reply(command, codes.SUCCESS, body=_with_state(found))
        return reply(command, codes.SYSTEM_ERROR, remark=f"there is no message at offset {offset}")

    def list_entries(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the entries of a queue from an index on."""
        low, high = self._broker.offsets(asked["topic"], asked["queueId"])
        index, count = asked["index"], asked["count"]
        if not index >= 0 or not 1 <= count <= _ENTRIES_MAX:
            raise UsageError(f"index {index} and count {count}, expected 0 or more and 1 to {_ENTRIES_MAX}")
        found = self._broker.view.entries(asked["topic"], asked["queueId"], max(index, low), min(index + count, high))
        rows = [{"physicOffset": place, "physicSize": size, "tagsCode": tag} for place, size, tag in found]
        body = {"maxQueueIndex": high, "minQueueIndex": low, "queueData": rows}
        return reply(command, codes.SUCCESS, body=orjson.dumps(body))


def _with_state(found: Found) -> bytes:
    """Returns the record of a message with its state after its properties, if there is room for it."""
    state = {PROPERTY_STATE: found.state.value}
    if found.state is State.WAITING:
        state[PROPERTY_PLACE] = "wheel" if found.is_near else "table" if found.is_in_table_alone else "log"
    if found.due_at_ms:
        state[PROPERTY_DUE_MS] = str(found.due_at_ms)
    return records.extended(found.record, encode_properties(state), PROPERTIES_BYTES_MAX)


def delivered_record(broker: Broker, offset: int, store_host: Host) -> bytes:
    """Returns the record at an offset of the log as a client reads it, visible or not; empty where there is none."""
    data = broker.read_record(offset)
    if not data:
        return b""
    record, body = records.decode(data), bytearray(data)
    records.deliver(body, [(0, record.queue_offset, offset, record.stored_at_ms)], store_host)
    return bytes(body)

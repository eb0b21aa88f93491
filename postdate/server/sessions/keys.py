"""Finds the messages of a key wherever they are: in the log, in a chunk, or in the pipeline's table alone.

A message moves from the log into the table and from there into the wheel, never back. So the table is asked first: what
leaves it meanwhile is found where it went. Bulk reads the table; without an answer in time, `unread` says why.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.broker.lookup import BY_ANY, BY_UNIQUE, Found, State, found_in_table
from postdate.errors import ProtocolError, Refused, TableUnread, UsageError
from postdate.message import PROPERTY_UNIQ_KEY, Host, MovedFrom
from postdate.server.sessions.table import Table, TableFound, TableMessage
from postdate.storage import record as records
from postdate.wire.ids import RecallHandle, parse_recall_handle

_NOTHING = TableFound([], is_cut=False)
_TRIES = 3  # of a lookup during which messages are moved


class Located(NamedTuple):
    """The messages of a key, newest first, and what is not known of it."""

    messages: list[Found]
    is_cut: bool = False  # there may be more
    unread: str = ""  # why the table was not asked, or has not answered; empty where all is known

    @property
    def waiting(self) -> list[Found]:
        return [found for found in self.messages if found.state is State.WAITING]


class Named(NamedTuple):
    """The messages that a request is about: one by its handle, or all of a topic and key."""

    topic: str
    key: str
    handle: RecallHandle | None


class Keys:
    """Looks keys up, some steps at a time."""

    def __init__(self, broker: Broker, table: Table) -> None:
        self._broker, self._table = broker, table

    async def find(
        self, topic: str, key: str, count_max: int, by: str = BY_ANY, begin_ms: int = 0, end_ms: int = NEVER,
        store_host: Host | None = None,
    ) -> Located:  # fmt: skip
        """Finds at most `count_max` messages that were stored, waited or became visible between two instants. Raises
        TopicNotFound, UsageError.
        """
        for _ in range(_TRIES):
            moved_count = self._broker.moves.count
            steps = self._broker.find(topic, key, by, begin_ms, end_ms, store_host)
            answer = await self._find_in_table(topic, key, by, count_max)
            in_table, unread = (_NOTHING, answer) if isinstance(answer, str) else (answer, "")
            messages: list[Found] = []
            async for found in pace(steps):
                messages.append(found)
                if len(messages) == count_max:
                    return Located(messages, is_cut=True, unread=unread)
            known = {found.arrival for found in messages}
            rows = [row for row in in_table.messages if row.arrival not in known]
            uncancelled = [row for row in rows if not row.is_cancelled]
            waiting = [row for row in uncancelled if self._broker.moves.is_waiting(row.record, _place_of(row))]
            if len(waiting) == len(uncancelled) or self._broker.moves.count == moved_count:
                break  # else the log may have one of them by now, as it was moved meanwhile

        def describe(row: TableMessage, state: State, *, is_near: bool = False) -> None:
            found = found_in_table(row.record, row.due_at_ms, row.arrival, store_host, state, is_near=is_near)
            if found.stored_at_ms <= end_ms and found.until_ms >= begin_ms:
                messages.append(found)

        for row in waiting:
            describe(row, State.WAITING, is_near=self._broker.moves.is_in_wheel(row.record, _place_of(row)))
        is_cut = in_table.is_cut or len(messages) > count_max
        for row in rows:
            if self._broker.moves.is_cancelled(row.record, _place_of(row), in_table=row.is_cancelled):
                describe(row, State.CANCELLED)
        return Located(messages[:count_max], is_cut, unread)

    async def find_named(self, named: Named) -> Located:
        """Finds what a request may change. Raises Refused where that is too much, Unavailable where something may be in
        the table and that cannot be asked: then nothing was changed.
        """
        topic, key, handle = named
        limit = self._broker.limits.key_messages_max
        located = await self.find(topic, key, limit, BY_ANY if handle is None else BY_UNIQUE)
        if any(found.state is State.HALF for found in located.messages):  # only its producer decides about one
            whole = [found for found in located.messages if found.state is not State.HALF]
            located = located._replace(messages=whole)
        if handle is not None:
            is_named = self._broker.moves.is_named_by
            meant = [found for found in located.messages if is_named(found, key, handle.due_at_ms)]
            located = located._replace(messages=meant, is_cut=False)
        if located.is_cut:
            raise Refused(
                f"key_messages_max: more than {limit} messages of topic {topic!r} have the key {key!r}: change them "
                "by a predicate (cancel or postpone --where)"
            )
        if located.unread and (handle is None or not located.messages):
            raise TableUnread(f"nothing was changed, as the table cannot be asked: {located.unread}")
        return located

    async def _find_in_table(self, topic: str, key: str, by: str, count_max: int) -> TableFound | str:
        view = self._broker.view
        far = view.far
        # What the table has brought into the wheel is found there by its id and its first key. The table has all keys,
        # and keeps the row until the message is due; also that of one that it has left out because it is cancelled.
        has_left_out = far.taken > 0 and far.horizon_at_ms > view.applied_at_ms
        if not far.in_table and not far.has_staged and not has_left_out and not view.unfollowed_jobs():
            return _NOTHING
        return await self._table.find_key(topic, key, by, view.topic(topic).numbers, count_max)


def _place_of(row: TableMessage) -> MovedFrom:
    return MovedFrom(row.due_at_ms, row.arrival, is_near=False)


async def pace(steps: Iterator[Found | None]) -> AsyncIterator[Found]:
    """Yields what the steps of a lookup find; the event loop goes round between two of them."""
    for found in steps:
        if found is not None:
            yield found
        await asyncio.sleep(0)


def read_named(broker: Broker, asked: Mapping[str, Any]) -> Named:
    """Returns which messages a request names. Raises TopicNotFound, UsageError, Refused."""
    topic, key, text = asked["topic"], asked["key"], asked["recallHandle"]
    broker.view.topic(topic)
    if bool(key) == bool(text):
        raise UsageError("the request needs either a key or a recallHandle")
    if key:
        return Named(topic, key, None)
    handle = parse_own_handle(text, topic, broker.settings.broker_name)
    return Named(topic, handle.unique_key, handle)


def parse_own_handle(text: str, topic: str, broker_name: str) -> RecallHandle:
    """Reads a recall handle that this broker gave for a message of the topic. Raises Refused."""
    try:
        handle = parse_recall_handle(text)
    except ProtocolError as error:
        raise Refused(str(error)) from error
    if handle.topic != topic:
        raise Refused(f"the recall handle is of topic {handle.topic!r}, not of {topic!r}")
    if handle.broker_name != broker_name:
        raise Refused(f"the recall handle is of broker {handle.broker_name!r}, this is {broker_name!r}")
    return handle


def refuse_several(located: Located, only: bool) -> None:
    """Raises Refused where several messages wait, and the caller wants only one to be changed."""
    count = len({id_of(found) for found in located.waiting})
    if only and count > 1:
        raise Refused(f"{count} messages with this key wait, and only one was expected; nothing was changed")


def id_of(found: Found) -> str:
    """Returns the id that the message got from its producer; empty where it has none."""
    return records.properties_of(found.record).get(PROPERTY_UNIQ_KEY, "")

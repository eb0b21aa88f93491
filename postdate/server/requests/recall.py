"""Cancelling: by the recall handle of a send's answer, by key, or by RocketMQ's delete marker.

    RECALL_MESSAGE            names a handle or, our addition, a key and a due time
    CANCEL_KEY                ours: cancels everything of a key that waits
    a send with the property  is no message: it names the one to cancel (TIMER_DEL_UNIQKEY)

A cancel is answered when it is durable, and later where only the table can say whether the message waits. A handle may
name a due that its message no longer has; then the message is looked up by its unique key and cancelled where it waits.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.cancelling import CancelResult
from postdate.broker.lookup import BY_UNIQUE, Found, State
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import IllegalMessage, Refused, UsageError
from postdate.message import PROPERTY_TIMER_DEL_UNIQKEY, PROPERTY_UNIQ_KEY, Cancelled, Message, decode_properties, due
from postdate.server.answers import REGION_FIELDS, refusal
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.requests.jobs import Settled
from postdate.server.sessions.keys import Keys, Named, id_of, parse_own_handle, refuse_several
from postdate.server.sessions.table import Table, Truth
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.ids import message_id


class Recalls:
    """Answers requests that cancel a message."""

    def __init__(
        self, broker: Broker, clock: Clock, pulse: Pulse, table: Table, keys: Keys, settled: Settled
    ) -> None:  # fmt: skip
        self._broker, self._clock, self._pulse, self._table = broker, clock, pulse, table
        self._keys, self._settled = keys, settled
        self._name = broker.settings.broker_name
        self._tasks = Tasks(broker, "key_acts_max")

    def recall(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        topic, now_ms = asked["topic"], self._clock.now_ms()
        self._broker.view.topic(topic)
        try:
            if asked["recallHandle"] or not asked["key"]:
                handle = parse_own_handle(asked["recallHandle"], topic, self._name)
                name = handle.unique_key
                ticket = self._broker.cancel(topic, name, handle.due_at_ms, now_ms)
            else:
                name = asked["key"]
                ticket = self._broker.cancel(topic, name, asked["due"], now_ms, by="key")
        except UsageError as error:
            raise Refused(str(error)) from error
        self._expect(connection, command.without_content(), ticket, name, {"msgId": name})

    def take_marker(self, connection: Connection, command: Command, message: Message, now_ms: int) -> bool:
        """Cancels what a delete marker names: the message of the same topic and due time with that unique key, written
        alone or as "topic+key". Returns False for a message that is no delete marker.
        """
        properties = decode_properties(message.properties)
        marked = properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
        if marked is None:
            return False
        due_at_ms, _ = due(properties, now_ms, self._broker.levels, self._broker.settings.delay_ms_max)
        if not due_at_ms:
            raise IllegalMessage(
                f"a message with {PROPERTY_TIMER_DEL_UNIQKEY} = {marked!r} needs the due time of the message that it "
                "cancels, later than now"
            )
        ticket = self._broker.cancel(message.topic, marked.removeprefix(f"{message.topic}+"), due_at_ms, now_ms)
        fields = {
            "msgId": message_id(connection.broker_host, ticket.offsets[0]),
            "queueId": message.queue_id,
            "queueOffset": 0,
            "transactionId": properties.get(PROPERTY_UNIQ_KEY, ""),
            **REGION_FIELDS,
        }
        self._expect(connection, command.without_content(), ticket, marked, fields)
        return True

    def _expect(
        self, connection: Connection, command: Command, ticket: Ticket, name: str, fields: Mapping[str, Any]
    ) -> None:
        """Answers when the cancel is durable and it is known whether the message waited."""

        def settle(ticket: Ticket) -> None:
            if command.is_oneway:
                return
            if ticket.error is not None:
                connection.write(refusal(command, ticket.error))
                return
            self._table.find(ticket.answer, partial(tell, ticket.answer))

        def tell(result: CancelResult, truth: Truth) -> None:
            if result.must_follow(truth.outcome):
                self._tasks.answer(connection, command, follow(result, truth))
            else:
                connection.write(_answer(command, name, fields, truth))

        async def follow(result: CancelResult, truth: Truth) -> bytes:
            return _answer(command, name, fields, await self._follow(connection, result, truth))

        self._pulse.expect(connection, ticket, settle)

    async def _follow(self, connection: Connection, result: CancelResult, truth: Truth) -> Truth:
        """Cancels the message of a handle where it was moved to. `truth` is what became of it, or of another message of
        its unique key, at the handle's due.
        """
        topic, key, due_at_ms = result.tombstone.topic, result.tombstone.key, result.tombstone.due
        for _ in range(_TRIES):
            located = await self._keys.find(topic, key, self._broker.limits.lookup_count_max, BY_UNIQUE)
            moved = [found for found in located.messages if self._broker.moves.is_named_by(found, key, due_at_ms)]
            waiting = [found for found in moved if found.state is State.WAITING]
            outcomes = await self._cancel_found(connection, topic, waiting)
            if Cancelled.CANCELLED in outcomes.values():
                return Truth(Cancelled.CANCELLED)
            if truth.outcome is not Cancelled.UNKNOWN and Cancelled.UNKNOWN not in outcomes.values():
                return truth
            if Cancelled.DELIVERED in outcomes.values() or any(found.state is State.VISIBLE for found in moved):
                return Truth(Cancelled.DELIVERED)
            if not waiting:  # else it was moved on meanwhile
                break
        if truth.outcome is not Cancelled.UNKNOWN:
            return truth
        was_cancelled = any(found.state is State.CANCELLED for found in moved)
        return Truth(Cancelled.CANCELLED) if was_cancelled else truth._replace(unread=truth.unread or located.unread)

    # -- by key -------------------------------------------------------------------------------------------------

    def cancel_key(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Cancels every message of a topic and key that waits; says of each message of the key what became of it."""
        named = Named(asked["topic"], asked["key"], None)
        self._broker.view.topic(named.topic)
        if not named.key:
            raise UsageError("a cancel by key needs a key")
        request = command.without_content()

        async def work() -> bytes:
            located = await self._keys.find_named(named)
            refuse_several(located, asked["only"])
            outcomes = await self._cancel_found(connection, named.topic, located.waiting)
            for _ in range(_TRIES - 1):
                if Cancelled.UNKNOWN not in outcomes.values():
                    break
                located = await self._keys.find_named(named)  # some were moved on meanwhile
                outcomes |= await self._cancel_found(connection, named.topic, located.waiting)
            answers = {
                id_of(found): {"id": id_of(found), "due": found.due_at_ms, "outcome": outcome.value}
                for found in reversed(located.messages)
                if (outcome := outcomes.get(found.arrival, _OUTCOMES.get(found.state))) is not None
            }
            return reply(request, codes.SUCCESS, body=orjson.dumps({"messages": list(answers.values())}))

        self._tasks.answer(connection, request, work())

    async def _cancel_found(self, connection: Connection, topic: str, waiting: Sequence[Found]) -> dict[int, Cancelled]:
        """Cancels messages where they were found; returns what became of each by its arrival."""
        now_ms, tickets = self._clock.now_ms(), dict[tuple[str, int], Ticket]()
        if not all(map(id_of, waiting)):
            raise Refused(
                "nothing was cancelled: a message of that key has no id (UNIQ_KEY); cancel it by its key and due time"
            )
        for found in waiting:
            place = (id_of(found), found.due_at_ms)
            if place not in tickets:
                tickets[place] = self._broker.cancel(topic, *place, now_ms)
        for ticket in tickets.values():
            await self._settled(connection, ticket)
        outcomes = {}
        for found in waiting:
            result: CancelResult = tickets[id_of(found), found.due_at_ms].answer
            outcome = result.outcome
            if outcome is Cancelled.UNKNOWN:
                # What was found in the table is cancelled there, unless it has gone on and was delivered.
                if await self._is_delivered(topic, found):
                    outcome = Cancelled.DELIVERED
                elif self._broker.cancels.is_cancelled_by(result, [found.arrival]):
                    outcome = Cancelled.CANCELLED
            outcomes[found.arrival] = outcome
        return outcomes

    async def _is_delivered(self, topic: str, waited: Found) -> bool:
        """Whether a message that waited when it was found is visible now. The cancel's own search is bounded."""
        if waited.due_at_ms > self._broker.view.applied_at_ms:
            return False
        limit = self._broker.limits.key_messages_max
        located = await self._keys.find(topic, id_of(waited), limit, BY_UNIQUE)
        return any(found.arrival == waited.arrival and found.state is State.VISIBLE for found in located.messages)


_TRIES = 3  # of a message that is moved on while it is cancelled
_OUTCOMES = {State.VISIBLE: Cancelled.DELIVERED, State.CANCELLED: Cancelled.CANCELLED}  # of what does not wait


def _answer(command: Command, name: str, fields: Mapping[str, Any], truth: Truth) -> bytes:
    """Returns the answer to a cancel: 0 only where the message is cancelled, as a Java client sees no remark on 0."""
    fields = {**fields, "outcome": truth.outcome.value}
    if truth.outcome is Cancelled.CANCELLED:
        return reply(command, codes.SUCCESS, fields)
    remark = f"message {name} is delivered already"
    if truth.unread:
        remark = f"it is not known whether message {name} waits; if it does, it is cancelled: {truth.unread}"
    elif truth.outcome is Cancelled.UNKNOWN:
        remark = f"no message {name} waits for that time: it is unknown, or was delivered long ago"
    return reply(command, codes.ILLEGAL_OPERATION, fields, remark=remark)

"""Cancelling: by the recall handle of a send's answer, by key and due time, or by RocketMQ's delete marker.

    RECALL_MESSAGE            names a handle or, our addition, a key and a due time
    a send with the property  is no message: it names the one to cancel (TIMER_DEL_UNIQKEY)

A cancel is answered when it is durable, and later where only the table can say whether the message waits.
"""

from collections.abc import Mapping
from typing import Any

from postdate.broker.broker import Broker
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import IllegalMessage, ProtocolError, Refused, UsageError
from postdate.message import PROPERTY_TIMER_DEL_UNIQKEY, PROPERTY_UNIQ_KEY, Cancelled, Message, decode_properties, due
from postdate.server.answers import REGION_FIELDS, refusal
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.sessions.table import Table, Truth
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.ids import message_id, parse_recall_handle


class Recalls:
    """Answers requests that cancel a message."""

    def __init__(self, broker: Broker, clock: Clock, pulse: Pulse, table: Table) -> None:
        self._broker = broker
        self._clock = clock
        self._pulse = pulse
        self._table = table
        self._name = broker.settings.broker_name

    def recall(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        topic, now_ms = asked["topic"], self._clock.now_ms()
        self._broker.view.topic(topic)
        try:
            if asked["recallHandle"] or not asked["key"]:
                handle = parse_recall_handle(asked["recallHandle"])
                if handle.topic != topic:
                    raise Refused(f"the recall handle is of topic {handle.topic!r}, not of {topic!r}")
                if handle.broker_name != self._name:
                    raise Refused(f"the recall handle is of broker {handle.broker_name!r}, this is {self._name!r}")
                name = handle.unique_key
                ticket = self._broker.cancel(topic, name, handle.due_at_ms, now_ms)
            else:
                name = asked["key"]
                ticket = self._broker.cancel(topic, name, asked["due"], now_ms, by="key")
        except (ProtocolError, UsageError) as error:
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
            self._table.find(ticket.answer, lambda truth: connection.write(_answer(command, name, fields, truth)))

        self._pulse.expect(connection, ticket, settle)


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

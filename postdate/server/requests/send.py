"""What producers ask for: send, send in batches, recall, cancel by delete marker.

The sends of one read become one batch of the log; each is answered when that batch is durable and applied. Where a
batch is refused, its sends are tried one by one, so that a bad message fails alone.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.sending import DUE, MESSAGE_SENT, UNIQUE_KEY, Prepared
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import (
    IllegalMessage,
    NoPermission,
    PostdateError,
    ProtocolError,
    Refused,
    TopicNotFound,
    UsageError,
)
from postdate.message import (
    DELAY_PROPERTIES,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_UNIQ_KEY,
    RETRY_TOPIC_PREFIX,
    Cancelled,
    Message,
    decode_properties,
    due,
    encode_properties,
)
from postdate.server.answers import refusal
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.requests.auto_creation import Birth
from postdate.server.sessions.table import Table, Truth
from postdate.wire import bodies, codes
from postdate.wire.frame import JSON, Command, framed, reply
from postdate.wire.ids import RecallHandle, encode_recall_handle, message_id, parse_recall_handle
from postdate.wire.schema import REQUESTS, values
from postdate.wire.sends import decode_send

SEND_CODES = frozenset({codes.SEND_MESSAGE, codes.SEND_MESSAGE_V2, codes.SEND_BATCH_MESSAGE})
_REGION = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
# msgId, queueId, queueOffset, transactionId, for a timed one its recall handle, opaque
_SENT_TIMED = (
    b'{"code":0,"extFields":{"msgId":"%%b%%016X","queueId":"%%d","queueOffset":"%%d","transactionId":"%%b",'
    b'"recallHandle":"%%b","MSG_REGION":"DefaultRegion","TRACE_ON":"true"},"flag":1,"language":"%b","opaque":%%d,'
    b'"serializeTypeCurrentRPC":"JSON","version":%d}'
) % (codes.LANGUAGE.encode(), codes.PROTOCOL_VERSION)
_SENT = _SENT_TIMED.replace(b'"recallHandle":"%b",', b"")
_NEW = tuple.__new__


class Producers:
    """Serves one broker. `collect_usual`, `write` and `_answer` are the hot path."""

    def __init__(self, broker: Broker, clock: Clock, pulse: Pulse, birth: Birth, table: Table) -> None:
        self._broker = broker
        self._clock = clock
        self._pulse = pulse
        self._birth = birth
        self._table = table
        self._name = broker.settings.broker_name
        self._key_characters_max = broker.limits.key_characters_max
        self._next_queue = 0
        # Collected sends: what to answer each by (a usual one by its opaque alone), and its message.
        self._asks: list[int | Command] = []
        self._prepared: list[Prepared] = []

    # -- sending ------------------------------------------------------------------------------------------------

    def collect_usual(self, connection: Connection, frame: bytes, now_ms: int) -> bool:
        """Takes a send in as `collect` does, if it is what nearly all are; returns whether it was."""
        found = decode_send(frame)
        if found is None:
            return False
        header, body = found
        fields = header.fields
        topic, queue_id, sys_flag = fields.topic, fields.queue_id, fields.sys_flag
        if (
            header.flag
            or queue_id < 0
            or sys_flag & codes.SYS_TRANSACTION
            or fields.batch != "false"
            or topic.startswith("%")
        ):
            return False
        # Past the constructor, which is a Python function and costs as much as all of the checks.
        message = _NEW(
            Message,
            (
                topic,
                body,
                fields.properties.encode(),
                queue_id,
                fields.flag,
                sys_flag,
                fields.born_at_ms,
                connection.host,
                fields.reconsume_times,
                0,
            ),
        )
        try:
            self._prepared.append(self._broker.prepare(message, now_ms))
        except PostdateError:
            return False  # `collect` finds out what to do about it
        self._asks.append(header.opaque)
        return True

    def collect(self, connection: Connection, command: Command, now_ms: int) -> None:
        """Takes a send in; it is written by the next `write`, which must be called with the same arguments."""
        if command.flag & codes.FLAG_RESPONSE:
            return  # an answer to something that we never asked
        if _is_batch(command):
            self._write_batch(connection, command, now_ms)
            return
        try:
            message = self._message(connection, command)
            self._prepared.append(self._broker.prepare(message, now_ms))
        except PostdateError as error:
            self._second_try(connection, command, error, now_ms)
            return
        is_usual = command.serialization == JSON and not command.flag
        self._asks.append(command.opaque if is_usual else command.without_content())

    def _second_try(self, connection: Connection, command: Command, error: PostdateError, now_ms: int) -> None:
        """A send that could not be prepared: perhaps its topic must be made first, its queue was promised and never
        made, or it is a delete marker.
        """
        self.write(connection, now_ms)  # what came before it, comes before it
        try:
            message = self._message(connection, command)
            cancelled = self._cancelled_by_marker(message, now_ms)
            if cancelled is not None:
                self._expect_marker(connection, command.without_content(), message._replace(body=b""), cancelled)
                return
            if isinstance(error, TopicNotFound):
                self._make_topic(command, message)
            fitting = self._within_queues(message)
            if isinstance(error, TopicNotFound) or fitting is not message:
                self._prepared.append(self._broker.prepare(fitting, now_ms))
                self._asks.append(command.without_content())
                return
        except PostdateError as problem:
            error = problem
        self._refuse(connection, command, error)

    def _within_queues(self, message: Message) -> Message:
        """A route that was promised before anybody made the topic may have named more queues than it then got."""
        topic = self._broker.view.find_topic(message.topic)
        if topic is None or not topic.write_queue_count <= message.queue_id < self._birth.new_queue_count:
            return message
        return message._replace(queue_id=message.queue_id % topic.write_queue_count)

    def _make_topic(self, command: Command, message: Message) -> None:
        asked = values(REQUESTS[command.code], command.fields)["defaultTopicQueueNums"]
        self._birth.topic(message.topic, asked)

    def _message(self, connection: Connection, command: Command) -> Message:
        """The message of a send, read leniently. Raises ProtocolError that names the field that cannot be read."""
        asked = values(REQUESTS[command.code], command.fields)
        message = Message(
            asked["topic"],
            command.body,
            asked["properties"].encode(),
            asked["queueId"],
            asked["flag"],
            asked["sysFlag"],
            asked["bornTimestamp"],
            connection.host,
            asked["reconsumeTimes"],
        )
        return self._unusual(message, command)

    def _unusual(self, message: Message, command: Command) -> Message:
        if message.sys_flag & codes.SYS_TRANSACTION:
            raise NoPermission("transactions are not supported: the half message was not stored")
        if message.topic.startswith(RETRY_TOPIC_PREFIX):
            message = self._retried(message, command)
        return self._with_queue(message) if message.queue_id < 0 else message

    def _with_queue(self, message: Message) -> Message:
        """The broker picks: one queue after the other."""
        topic = self._broker.view.find_topic(message.topic)
        self._next_queue += 1
        return message._replace(queue_id=self._next_queue % topic.write_queue_count if topic else 0)

    def _retried(self, message: Message, command: Command) -> Message:
        """A consumer sends its message back as a plain one, because its send-back failed or it wants its own delay.
        Past the limit it is a dead letter.
        """
        group = message.topic.removeprefix(RETRY_TOPIC_PREFIX)
        asked = values(REQUESTS[command.code], command.fields)["maxReconsumeTimes"]
        if message.reconsume_times <= retry_times_max(self._broker, group, asked):
            return message
        topic = self._birth.dead_letter_topic(group)
        return message._replace(
            topic=topic.name, queue_id=0, properties=encode_properties(without_delay(message.properties))
        )

    def _write_batch(self, connection: Connection, command: Command, now_ms: int) -> None:
        """A batch of a client is a batch of the log: all of it or nothing."""
        self.write(connection, now_ms)
        try:
            ticket = self._sent(command, self._batch(connection, command), now_ms)
        except PostdateError as error:
            self._refuse(connection, command, error)
            return
        asked = command.without_content()
        self._pulse.expect(connection, ticket, lambda ticket: self._answer_batch(connection, asked, ticket))

    def _batch(self, connection: Connection, command: Command) -> list[Message]:
        """The messages of a batch: topic, queue and times are the frame's, the rest is each message's own."""
        settings, limits = self._broker.settings, self._broker.limits
        if len(command.body) > settings.body_bytes_max:
            raise IllegalMessage(f"the batch has {len(command.body)} bytes, the limit is {settings.body_bytes_max}")
        outer = self._message(connection, command)
        inner = bodies.decode_batch(command.body, limits.batch_messages_max + 1)
        if not inner:
            raise IllegalMessage("the batch holds no message")
        if len(inner) > limits.batch_messages_max:
            raise IllegalMessage(f"batch_messages_max: the batch holds more than {limits.batch_messages_max} messages")
        return [outer._replace(body=each.body, properties=each.properties, flag=each.flag) for each in inner]

    def _sent(self, command: Command, messages: list[Message], now_ms: int) -> Ticket:
        """Sends, and makes the topic where that is why it failed."""
        try:
            return self._broker.send(messages, now_ms)
        except TopicNotFound:
            self._make_topic(command, messages[0])
            return self._broker.send(messages, now_ms)

    def write(self, connection: Connection, now_ms: int) -> None:
        """Writes what was collected as one batch. Where that is refused, one by one: what fits is taken."""
        asks, prepared = self._asks, self._prepared
        if not asks:
            return
        self._asks, self._prepared = [], []
        try:
            self._expect(connection, asks, self._broker.write(prepared, now_ms))
        except PostdateError as error:
            if len(asks) == 1:
                self._refuse_ask(connection, asks[0], error)
                return
            for ask, entry in zip(asks, prepared, strict=True):
                self._asks, self._prepared = [ask], [entry]
                self.write(connection, now_ms)

    def _expect(self, connection: Connection, asks: list[int | Command], ticket: Ticket) -> None:
        self._pulse.expect(connection, ticket, lambda ticket: self._answer(connection, asks, ticket), len(asks))

    def _refuse_ask(self, connection: Connection, ask: int | Command, error: Exception) -> None:
        self._refuse(connection, Command(0, {}, opaque=ask) if isinstance(ask, int) else ask, error)

    def _refuse(self, connection: Connection, command: Command, error: Exception) -> None:
        if not command.is_oneway:
            connection.write(refusal(command, error))

    # -- answering a send ---------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, asks: list[int | Command], ticket: Ticket) -> None:
        """One write answers every send of a batch.

        The usual answers are written out: making them by the general way costs as much as the rest of a send.
        """
        if ticket.error is not None:
            for ask in asks:
                self._refuse_ask(connection, ask, ticket.error)
            return
        assert ticket.answers is not None
        frames: list[bytes] = []
        prefix, handle_of, key_characters_max = connection.id_prefix, self._handle, self._key_characters_max
        for ask, entry, offset, answer in zip(asks, ticket.prepared, ticket.offsets, ticket.answers, strict=True):
            if type(ask) is not int:
                frames += self._unusual_answer(connection, ask, entry, offset, answer)
                continue
            key = entry[UNIQUE_KEY] or ""
            has_handle = entry[DUE] and 0 < len(key) <= key_characters_max
            unique = key.encode()
            if not unique.isalnum():
                unique = orjson.dumps(unique.decode())[1:-1]
            queue_id, shown = entry[MESSAGE_SENT][3], answer if answer > 0 else 0
            if has_handle:
                header = _SENT_TIMED % (prefix, offset, queue_id, shown, unique, handle_of(entry), ask)
            else:
                header = _SENT % (prefix, offset, queue_id, shown, unique, ask)
            frames.append(framed(header))
        if frames:
            connection.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _unusual_answer(
        self, connection: Connection, command: int | Command, entry: Prepared, offset: int, answer: int
    ) -> list[bytes]:
        assert isinstance(command, Command)
        if command.is_oneway:
            return []
        return [reply(command, codes.SUCCESS, self._fields(connection, [entry], [offset], answer))]

    def _answer_batch(self, connection: Connection, command: Command, ticket: Ticket) -> None:
        if ticket.error is not None:
            self._refuse(connection, command, ticket.error)
        elif not command.is_oneway:
            assert ticket.answers is not None
            entries, offsets, answer = ticket.prepared, ticket.offsets, ticket.answers[0]
            try:
                frame = reply(command, codes.SUCCESS, self._fields(connection, entries, offsets, answer))
            except ProtocolError:  # ids and handles of so many messages do not fit a header; those of the first do
                frame = reply(command, codes.SUCCESS, self._fields(connection, entries[:1], offsets[:1], answer))
            connection.write(frame)

    def _has_handle(self, entry: Prepared) -> bool:
        """Whether it can be recalled: it waits, and its unique key is one that a cancel may have."""
        return bool(entry[DUE]) and 0 < len(entry[UNIQUE_KEY] or "") <= self._key_characters_max

    def _handle(self, entry: Prepared) -> bytes:
        return encode_recall_handle(entry[MESSAGE_SENT][0], self._name, entry[DUE], entry[UNIQUE_KEY] or "")

    def _fields(
        self, connection: Connection, entries: list[Prepared], offsets: list[int], answer: int
    ) -> Mapping[str, Any]:
        """The fields of an answer: ids of all, the place of the first, a handle for each that has one."""
        handles = [self._handle(entry).decode() if self._has_handle(entry) else "-" for entry in entries]
        fields: dict[str, Any] = {
            "msgId": ",".join(message_id(connection.broker_host, offset) for offset in offsets),
            "queueId": entries[0][MESSAGE_SENT].queue_id,
            "queueOffset": max(answer, 0),
            "transactionId": entries[0][UNIQUE_KEY] or "",
            **_REGION,
        }
        if len(entries) > 1:
            return fields | {"recallHandles": " ".join(handles)}
        return fields | ({"recallHandle": handles[0]} if handles[0] != "-" else {})

    # -- cancelling ---------------------------------------------------------------------------------------------

    def recall(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """370: by the handle of the send's answer or, our addition, by key and due."""
        topic, now_ms = asked["topic"], self._clock.now_ms()
        self._broker.view.topic(topic)
        try:
            if asked["recallHandle"] or not asked["key"]:
                handle = self._checked_handle(topic, asked["recallHandle"])
                name = handle.unique_key
                ticket = self._broker.cancel(topic, name, handle.due_at_ms, now_ms)
            else:
                name = asked["key"]
                ticket = self._broker.cancel(topic, name, asked["due"], now_ms, by="key")
        except (ProtocolError, UsageError) as error:
            raise Refused(str(error)) from error
        asked_by = command.without_content()
        self._pulse.expect(connection, ticket, lambda ticket: self._answer_recall(connection, asked_by, name, ticket))

    def _checked_handle(self, topic: str, text: str) -> RecallHandle:
        handle = parse_recall_handle(text)
        if handle.topic != topic:
            raise Refused(f"the recall handle is of topic {handle.topic!r}, not of {topic!r}")
        if handle.broker_name != self._name:
            raise Refused(f"the recall handle is of broker {handle.broker_name!r}, this is {self._name!r}")
        return handle

    def _answer_recall(self, connection: Connection, command: Command, name: str, ticket: Ticket) -> None:
        self._answer_cancel(connection, command, name, ticket, {"msgId": name})

    def _answer_cancel(
        self, connection: Connection, command: Command, name: str, ticket: Ticket, fields: Mapping[str, Any]
    ) -> None:
        """Answers a cancel, later than others where the table must be asked first."""
        if command.is_oneway:
            return
        if ticket.error is not None:
            connection.write(refusal(command, ticket.error))
            return
        self._table.find(ticket.answer, lambda truth: connection.write(_truth(command, name, fields, truth)))

    def _cancelled_by_marker(self, message: Message, now_ms: int) -> Ticket | None:
        """RocketMQ's delete marker: a message of the same topic and due whose property names the one to cancel, by its
        unique key or by "topic+key". None where it is no such message.
        """
        properties = decode_properties(message.properties)
        marked = properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
        if marked is None:
            return None
        due_at_ms, _ = due(properties, now_ms, self._broker.levels, self._broker.settings.delay_ms_max)
        if not due_at_ms:
            raise IllegalMessage(
                f"a message with {PROPERTY_TIMER_DEL_UNIQKEY} = {marked!r} needs the due time of the message that it "
                "cancels, later than now"
            )
        return self._broker.cancel(message.topic, marked.removeprefix(f"{message.topic}+"), due_at_ms, now_ms)

    def _expect_marker(self, connection: Connection, command: Command, marker: Message, ticket: Ticket) -> None:
        self._pulse.expect(connection, ticket, lambda ticket: self._answer_marker(connection, command, marker, ticket))

    def _answer_marker(self, connection: Connection, command: Command, message: Message, ticket: Ticket) -> None:
        properties = decode_properties(message.properties)
        fields = {
            "msgId": message_id(connection.broker_host, ticket.offsets[0]),
            "queueId": message.queue_id,
            "queueOffset": 0,
            "transactionId": properties.get(PROPERTY_UNIQ_KEY, ""),
            **_REGION,
        }
        self._answer_cancel(connection, command, properties[PROPERTY_TIMER_DEL_UNIQKEY], ticket, fields)


def _truth(command: Command, name: str, fields: Mapping[str, Any], truth: Truth) -> bytes:
    """0 only where the message is cancelled: a Java client sees no remark on success."""
    fields = {**fields, "outcome": truth.outcome.value}
    if truth.outcome is Cancelled.CANCELLED:
        return reply(command, codes.SUCCESS, fields)
    remark = f"message {name} is delivered already"
    if truth.unread:
        remark = f"it is not known whether message {name} waits; if it does, it is cancelled: {truth.unread}"
    elif truth.outcome is Cancelled.UNKNOWN:
        remark = f"no message {name} waits for that time: it is unknown, or was delivered long ago"
    return reply(command, codes.ILLEGAL_OPERATION, fields, remark=remark)


def _is_batch(command: Command) -> bool:
    """By its code or, as the C++ client has it, by a flag of the others."""
    fields = command.fields
    said = fields.get("batch", fields.get("m"))
    return command.code == codes.SEND_BATCH_MESSAGE or said not in (None, "", "false", "0", 0)


def without_delay(properties: bytes) -> dict[str, str]:
    """Properties without what asks for a delay: whatever is sent on must not wait a second time."""
    return {name: value for name, value in decode_properties(properties).items() if name not in DELAY_PROPERTIES}


def retry_times_max(broker: Broker, group: str, asked: int | None) -> int:
    """How often a group's message is tried again before it is a dead letter: as its consumer asks, else as the group is
    set, else as the broker is.
    """
    if asked is None or asked < 0:
        asked = broker.view.group_settings(group).get("retryMaxTimes")
    return asked if isinstance(asked, int) and asked >= 0 else broker.settings.retry_times_max

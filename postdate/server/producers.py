"""What producers ask for: send, send in batches, recall, cancel by delete marker.

The sends of one read become one batch of the log; each is answered when that batch is durable and applied. Where a
batch is refused, its sends are tried one by one, so that a bad message fails alone.
"""

import binascii
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from postdate.broker import Broker, Ticket
from postdate.clock import Clock
from postdate.errors import (
    IllegalMessage,
    NoPermission,
    PostdateError,
    ProtocolError,
    Refused,
    TopicNotFound,
    UsageError,
)  # fmt: skip
from postdate.intake import DUE, MESSAGE_SENT, UNIQUE_KEY, Prepared
from postdate.message import (
    DELAY_PROPERTIES,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_UNIQ_KEY,
    RETRY_TOPIC_PREFIX,
    Cancelled,
    DelayLevels,
    Host,
    Message,
    decode_properties,
    due,
    encode_properties,
)  # fmt: skip
from postdate.server.answers import code_of
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.topics import Birth
from postdate.wire import bodies, codes
from postdate.wire.frame import JSON, Command, framed, reply
from postdate.wire.ids import RecallHandle, parse_recall_handle
from postdate.wire.schema import REQUESTS, values

SEND_CODES = frozenset({codes.SEND_MESSAGE, codes.SEND_MESSAGE_V2, codes.SEND_BATCH_MESSAGE})
_REGION = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


class _Names(NamedTuple):
    """The fields of a send that every message needs, as a client writes them."""

    topic: str
    properties: str
    queue_id: str
    flag: str
    sys_flag: str
    born_at_ms: str
    reconsume_times: str


_LETTERS = _Names("b", "i", "e", "h", "f", "g", "j")
_WORDS = _Names("topic", "properties", "queueId", "flag", "sysFlag", "bornTimestamp", "reconsumeTimes")


class _Request(NamedTuple):
    """A send that waits to be written."""

    command: Command
    messages: list[Message]


class Producers:
    """Serves one broker. `collect` and `write` are the hot path."""

    def __init__(self, broker: Broker, clock: Clock, pulse: Pulse, birth: Birth, store_host: Host) -> None:
        self._broker = broker
        self._clock = clock
        self._pulse = pulse
        self._birth = birth
        self._name = broker.settings.broker_name
        self._levels = DelayLevels.parse(broker.settings.message_delay_level)
        self._id_prefix = f"{store_host.address.hex()}{store_host.port:08x}".upper()
        self._next_queue = 0
        self._requests: list[_Request] = []

    # -- sending ------------------------------------------------------------------------------------------------

    def collect(self, connection: Connection, command: Command) -> None:
        """Takes a send in; it is written by the next `write`, which must be called with the same connection."""
        try:
            messages = (
                self._batch(connection, command)
                if command.code == codes.SEND_BATCH_MESSAGE
                else [self._message(connection, command)]
            )
        except PostdateError as error:
            self._refuse(connection, command, error)
            return
        self._requests.append(_Request(command, messages))

    def _message(self, connection: Connection, command: Command) -> Message:
        """The message of a send. The usual fields are read directly: reading by the table costs as much as storing."""
        fields = command.fields
        names = _LETTERS if "b" in fields else _WORDS
        try:
            get = fields.get
            message = Message(
                fields[names.topic],
                command.body,
                get(names.properties, "").encode(),
                int(fields[names.queue_id]),
                int(get(names.flag, 0)),
                int(get(names.sys_flag, 0)),
                int(get(names.born_at_ms, 0)),
                connection.host,
                int(get(names.reconsume_times) or 0),
            )
        except (KeyError, ValueError, TypeError, AttributeError):
            message = _message_by_table(connection, command)
        if message.queue_id < 0 or message.sys_flag & codes.SYS_TRANSACTION or message.topic[:1] == "%":
            return self._unusual(message, command)
        return message

    def _unusual(self, message: Message, command: Command) -> Message:
        if message.sys_flag & codes.SYS_TRANSACTION:
            raise NoPermission("transactions are not supported: the half message was not stored")
        if message.topic.startswith(RETRY_TOPIC_PREFIX):
            message = self._retried(message, command)
        return self._with_queue(message) if message.queue_id < 0 else message

    def _with_queue(self, message: Message) -> Message:
        """The broker picks: one queue after the other."""
        topic = self._broker.fold.topics.by_name.get(message.topic)
        self._next_queue += 1
        return message._replace(queue_id=self._next_queue % topic.write_queue_count if topic else 0)

    def _retried(self, message: Message, command: Command) -> Message:
        """A consumer sends its message back as a plain one, because its send-back failed or it wants its own delay.
        Past the limit it is a dead letter.
        """
        group = message.topic.removeprefix(RETRY_TOPIC_PREFIX)
        asked = values(REQUESTS[command.code], command.fields)["maxReconsumeTimes"]
        limit = asked if asked is not None and asked >= 0 else retry_times_max(self._broker, group)
        if message.reconsume_times <= limit:
            return message
        topic = self._birth.dead_letter_topic(group)
        return message._replace(topic=topic.name, queue_id=0, properties=without_delay(message.properties))

    def _batch(self, connection: Connection, command: Command) -> list[Message]:
        """The messages of a batch: topic, queue and times are the frame's, the rest is each message's own."""
        settings = self._broker.settings
        if len(command.body) > settings.body_bytes_max:
            raise IllegalMessage(f"the batch has {len(command.body)} bytes, the limit is {settings.body_bytes_max}")
        outer = self._message(connection, command)
        inner = bodies.decode_batch(command.body)
        if not inner:
            raise IllegalMessage("the batch holds no message")
        return [outer._replace(body=each.body, properties=each.properties, flag=each.flag) for each in inner]

    def write(self, connection: Connection) -> None:
        """Writes what was collected as one batch."""
        requests = self._requests
        if not requests:
            return
        self._requests = []
        try:
            messages = [message for request in requests for message in request.messages]
            ticket = self._broker.send(messages, self._clock.now_ms())
        except PostdateError:
            for request in requests:
                self._write_alone(connection, request)
            return
        self._pulse.expect(ticket, lambda ticket: self._answer(connection, requests, ticket))

    def _write_alone(self, connection: Connection, request: _Request) -> None:
        try:
            ticket = self._sent(request)
        except PostdateError as error:
            self._refuse_or_cancel(connection, request, error)
            return
        self._pulse.expect(ticket, lambda ticket: self._answer(connection, [request], ticket))

    def _sent(self, request: _Request) -> Ticket:
        """Sends, and makes the topic where that is why it failed."""
        try:
            return self._broker.send(request.messages, self._clock.now_ms())
        except TopicNotFound:
            topic = request.messages[0].topic
            asked = values(REQUESTS[request.command.code], request.command.fields)["defaultTopicQueueNums"]
            self._birth.topic(topic, asked)
            return self._broker.send(request.messages, self._clock.now_ms())

    def _refuse_or_cancel(self, connection: Connection, request: _Request, error: PostdateError) -> None:
        """A message with a delete marker is no message: it cancels one."""
        try:
            cancelled = self._cancelled_by_marker(request)
        except PostdateError as problem:
            self._refuse(connection, request.command, problem)
            return
        if cancelled is None:
            self._refuse(connection, request.command, error)
            return
        self._pulse.expect(cancelled, lambda ticket: self._answer_marker(connection, request, ticket))

    def _refuse(self, connection: Connection, command: Command, error: Exception) -> None:
        if not command.is_oneway:
            connection.write(reply(command, code_of(error), remark=str(error)))

    # -- answering a send ---------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, requests: list[_Request], ticket: Ticket) -> None:
        """One write answers every send of the batch."""
        if ticket.error is not None:
            for request in requests:
                self._refuse(connection, request.command, ticket.error)
            return
        assert ticket.answers is not None
        frames: list[bytes] = []
        first = 0
        for command, messages in requests:
            last = first + len(messages)
            if not command.is_oneway:
                if last - first == 1 and command.serialization == JSON:
                    frames.append(self._sent_one(command.opaque, ticket, first))
                else:
                    frames.append(reply(command, codes.SUCCESS, self._sent_fields(ticket, first, last)))
            first = last
        connection.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _sent_one(self, opaque: int, ticket: Ticket, index: int) -> bytes:
        """The answer to one send, written out: building it by the general way costs as much as the rest of a send."""
        assert ticket.answers is not None
        entry = ticket.prepared[index]
        unique = entry[UNIQUE_KEY] or ""
        if not (unique.isalnum() and unique.isascii()):
            unique = orjson.dumps(unique).decode()[1:-1]
        handle = f'"recallHandle":"{self._handle(entry)}",' if entry[DUE] and unique else ""
        offset = ticket.answers[index]
        return framed(
            f'{{"code":0,"extFields":{{"msgId":"{self._id_prefix}{ticket.offsets[index]:016X}",'
            f'"queueId":"{entry[MESSAGE_SENT][3]}","queueOffset":"{offset if offset > 0 else 0}",'
            f'"transactionId":"{unique}",{handle}"MSG_REGION":"DefaultRegion","TRACE_ON":"true"}},'
            f'"flag":1,"language":"PYTHON","opaque":{opaque},"serializeTypeCurrentRPC":"JSON",'
            f'"version":{codes.PROTOCOL_VERSION}}}'.encode()
        )

    def _handle(self, entry: Prepared) -> str:
        """As ids.recall_handle, with the library's detours left out."""
        text = f"v1 {entry[MESSAGE_SENT][0]} {self._name} {entry[DUE]} {entry[UNIQUE_KEY]}"
        return binascii.b2a_base64(text.encode(), newline=False).translate(_URL_SAFE).decode()

    def _sent_fields(self, ticket: Ticket, first: int, last: int) -> Mapping[str, Any]:
        """The answer to a batch: ids of all, the place of the first, a handle for each that has one."""
        assert ticket.answers is not None
        entries = ticket.prepared[first:last]
        handles = [self._handle(entry) if entry[DUE] and entry[UNIQUE_KEY] else "-" for entry in entries]
        fields: dict[str, Any] = {
            "msgId": ",".join(f"{self._id_prefix}{offset:016X}" for offset in ticket.offsets[first:last]),
            "queueId": entries[0][MESSAGE_SENT].queue_id,
            "queueOffset": max(ticket.answers[first], 0),
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
        self._broker.fold.topics.get(topic)
        try:
            if asked["recallHandle"] or not asked["key"]:
                handle = self._checked_handle(topic, asked["recallHandle"])
                name, ticket = (
                    handle.unique_key,
                    self._broker.cancel(topic, handle.unique_key, handle.due_at_ms, now_ms),
                )
            else:
                name = asked["key"]
                ticket = self._broker.cancel(topic, name, asked["due"], now_ms, by="key")
        except (ProtocolError, UsageError) as error:
            raise Refused(str(error)) from error
        self._pulse.expect(ticket, lambda ticket: self._answer_recall(connection, command, name, ticket))

    def _checked_handle(self, topic: str, text: str) -> RecallHandle:
        handle = parse_recall_handle(text)
        if handle.topic != topic:
            raise Refused(f"the recall handle is of topic {handle.topic!r}, not of {topic!r}")
        if handle.broker_name != self._name:
            raise Refused(f"the recall handle is of broker {handle.broker_name!r}, this is {self._name!r}")
        return handle

    def _answer_recall(self, connection: Connection, command: Command, name: str, ticket: Ticket) -> None:
        connection.write(self._truth(command, name, ticket, {"msgId": name}))

    def _truth(self, command: Command, name: str, ticket: Ticket, fields: Mapping[str, Any]) -> bytes:
        """0 only where the message is cancelled: a Java client sees no remark on success."""
        if ticket.error is not None:
            return reply(command, code_of(ticket.error), remark=str(ticket.error))
        outcome: Cancelled = ticket.answer
        fields = {**fields, "outcome": outcome.value}
        if outcome is Cancelled.CANCELLED:
            return reply(command, codes.SUCCESS, fields)
        return reply(command, codes.ILLEGAL_OPERATION, fields, remark=_OUTCOMES[outcome].format(name=name))

    def _cancelled_by_marker(self, request: _Request) -> Ticket | None:
        """RocketMQ's delete marker: a message of the same topic and due whose property names the one to cancel, by its
        unique key or by "topic+key". None where it is no such message.
        """
        message = request.messages[0]
        properties = decode_properties(message.properties)
        marked = properties.get(PROPERTY_TIMER_DEL_UNIQKEY)
        if marked is None:
            return None
        if len(request.messages) > 1:
            raise IllegalMessage(f"{PROPERTY_TIMER_DEL_UNIQKEY} marks a cancel, which cannot be part of a batch")
        now_ms = self._clock.now_ms()
        due_at_ms, _ = due(properties, now_ms, self._levels, self._broker.settings.delay_ms_max)
        if not due_at_ms:
            raise IllegalMessage(
                f"a message with {PROPERTY_TIMER_DEL_UNIQKEY} = {marked!r} needs the due time of the message that it "
                "cancels, later than now"
            )
        return self._broker.cancel(message.topic, marked.removeprefix(f"{message.topic}+"), due_at_ms, now_ms)

    def _answer_marker(self, connection: Connection, request: _Request, ticket: Ticket) -> None:
        message, command = request.messages[0], request.command
        if command.is_oneway:
            return
        properties = decode_properties(message.properties)
        fields = {
            "msgId": f"{self._id_prefix}{ticket.offsets[0]:016X}", "queueId": message.queue_id, "queueOffset": 0,
            "transactionId": properties.get(PROPERTY_UNIQ_KEY, ""), **_REGION,
        }  # fmt: skip
        connection.write(self._truth(command, properties[PROPERTY_TIMER_DEL_UNIQKEY], ticket, fields))


_OUTCOMES = {
    Cancelled.DELIVERED: "message {name} is delivered already",
    Cancelled.UNKNOWN: "no message {name} waits for that time: it is unknown, or was delivered long ago",
}


def _message_by_table(connection: Connection, command: Command) -> Message:
    """The slow way, which reads leniently and names the field that cannot be read."""
    asked = values(REQUESTS[command.code], command.fields)
    return Message(
        asked["topic"], command.body, asked["properties"].encode(), asked["queueId"], asked["flag"], asked["sysFlag"],
        asked["bornTimestamp"], connection.host, asked["reconsumeTimes"],
    )  # fmt: skip


def without_delay(properties: bytes) -> bytes:
    """Properties without what asks for a delay: whatever is sent on must not wait a second time."""
    kept = {name: value for name, value in decode_properties(properties).items() if name not in DELAY_PROPERTIES}
    return encode_properties(kept)


def retry_times_max(broker: Broker, group: str) -> int:
    """How often a group's message is tried again before it is a dead letter."""
    asked = broker.fold.groups.settings.get(group, {}).get("retryMaxTimes")
    return asked if isinstance(asked, int) and asked >= 0 else broker.settings.retry_times_max

"""Sends, single and in batches.

The sends of one read become one batch of the log; each is answered when that batch is durable and applied. Where a
batch is refused, its sends are tried one by one, so that a bad message fails alone.

A resend is a send that its client has sent before, without learning what became of it; it says so. The broker looks for
the first one, in what is written and then in what is applied, and answers a resend as that; otherwise it stores it.
Resends are looked up one after the other, beside everything else.

A send with an id (POSTDATE_ONCE) that is stored before is answered as the first one, when that is durable.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson

from postdate.broker.broker import Broker
from postdate.broker.lookup import Found
from postdate.broker.once import SentBefore
from postdate.broker.writing import Ticket
from postdate.errors import (
    FlowControl,
    IllegalMessage,
    PostdateError,
    ProtocolError,
    TopicNotFound,
)
from postdate.message import (
    DLQ_TOPIC_PREFIX,
    NOT_OF_COPIES,
    PROPERTY_ONCE,
    PROPERTY_TRANSACTION,
    PROPERTY_UNIQ_KEY,
    RETRY_TOPIC_PREFIX,
    Message,
    SendIdentity,
    decode_properties,
    encode_properties,
)
from postdate.server.answers import REGION_FIELDS, refusal
from postdate.server.connection import Connection
from postdate.server.lines import Lines
from postdate.server.pulse import Pulse
from postdate.server.requests.recall import Recalls
from postdate.server.requests.retries import retry_times_max, sent_on
from postdate.server.requests.topic import AutoCreation
from postdate.storage import record as records
from postdate.storage.batch import Prepared
from postdate.wire import bodies, codes
from postdate.wire.frame import HEADER_AT, JSON, MARKS, Command, reply
from postdate.wire.ids import encode_recall_handle, message_id
from postdate.wire.requests import REQUESTS, Request, SendHeader, decode_send

# With msgId, queueId, queueOffset, transactionId, for a timed message its recall handle, and opaque.
_SENT_TIMED = (
    b'{"code":0,"extFields":{"msgId":"%%b%%016X","queueId":"%%d","queueOffset":"%%d","transactionId":"%%b",'
    b'"recallHandle":"%%b","MSG_REGION":"DefaultRegion","TRACE_ON":"true"},"flag":1,"language":"%b","opaque":%%d,'
    b'"serializeTypeCurrentRPC":"JSON","version":%d}'
) % (codes.LANGUAGE.encode(), codes.PROTOCOL_VERSION)
_SENT = _SENT_TIMED.replace(b'"recallHandle":"%b",', b"")
_NEW = tuple.__new__
_TRANSACTION = PROPERTY_TRANSACTION.encode()
_RESENDS_KNOWN_MAX = 10_000  # whose first sends may still come, from a connection that the broker reads late
_RECORDS_PER_STEP = 50  # read in one go: about a millisecond


class _Resend(NamedTuple):
    """A send that may be stored already: one message, or those of a batch."""

    connection: Connection
    command: Command  # without its content
    sent: SendIdentity  # of the first message: a batch is stored whole or not at all
    messages: list[Message]
    size: int


class _Stored(NamedTuple):
    """A stored message, as an answer names it."""

    topic: str
    queue_id: int
    unique_key: str
    due_at_ms: int  # 0 where it did not wait
    offset: int


class Sends:
    """Takes sends in, writes them and answers them. `collect_usual`, `write` and `_answer` are the hot path."""

    def __init__(self, broker: Broker, pulse: Pulse, creation: AutoCreation, recalls: Recalls, lines: Lines) -> None:
        self._broker, self._pulse, self._creation, self._recalls = broker, pulse, creation, recalls
        self._lines = lines
        self._name = broker.settings.broker_name
        self._key_characters_max = broker.limits.key_characters_max
        self._next_queue = 0
        # The sends collected since the last write: what to answer each by (a usual one by its opaque alone), and its
        # message.
        self._asks: list[int | Command] = []
        self._prepared: list[Prepared] = []
        self._once: set[str] = set()  # of those of them that are stored once
        self._resends: deque[_Resend] = deque()
        self._resends_bytes, self._resends_bytes_max = 0, broker.limits.resends_bytes_max
        self._resent_keys: dict[str, None] = {}  # unique keys of the last resends, the oldest first
        self._resending: asyncio.Task[None] | None = None  # the loop itself holds a task weakly

    # -- sending ------------------------------------------------------------------------------------------------

    def collect_usual(
        self, connection: Connection, frame: bytes, now_ms: int, found: tuple[SendHeader, bytes] | None = None
    ) -> bool:
        """Takes in a send as `collect` does, if it is like nearly all others; returns whether it was. `found` are its
        header and body, where they were read already.
        """
        found = found or decode_send(frame)
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
            or fields.resend != "false"
            or topic.startswith("%")
        ):
            return False
        # Not by the constructor, which is a Python function and costs as much as all of the checks.
        message = _NEW(
            Message,
            (topic, body, fields.properties.encode(), queue_id, fields.flag, sys_flag, fields.born_at_ms,
             connection.host, fields.reconsume_times, 0),
        )  # fmt: skip
        try:
            entry = self._broker.prepare(message, now_ms)
        except PostdateError:
            return False  # `collect` tries again, and answers the error
        if self._resent_keys and entry.unique_key in self._resent_keys:
            return False
        if entry.once:
            if entry.once in self._once:
                return False
            self._once.add(entry.once)
        self._prepared.append(entry)
        self._asks.append(header.opaque)
        return True

    def collect(self, connection: Connection, command: Command, now_ms: int) -> None:
        """Takes in a send; the next `write`, which must be called with the same arguments, writes it."""
        if command.flag & codes.FLAG_RESPONSE:
            return  # an answer to a question that we never asked
        if _is_batch(command):
            self._write_batch(connection, command, now_ms)
            return
        try:
            message = self._message(connection, command)
            if _is_half(message):
                self._send_half(connection, command, message, now_ms)
                return
            entry = self._prepare(connection, message, now_ms)
        except SentBefore as before:
            self._answer_as_first(connection, command, before)
            return
        except PostdateError as error:
            self._try_again(connection, command, error, now_ms)
            return
        if self._hold_resend(connection, command, [message], now_ms):
            return
        is_usual = command.serialization == JSON and not command.flag
        self._keep(entry, command.opaque if is_usual else command.without_content())

    def _send_half(self, connection: Connection, command: Command, message: Message, now_ms: int) -> None:
        """Stores the half of a transaction. Its answer names the half: by that its producer ends it."""
        self.write(connection, now_ms)  # keeps the order of the sends
        calls = self._broker.transactions
        try:
            try:
                entry = calls.prepare_half(self._fit_queues(message), now_ms)
            except TopicNotFound:
                self._create_topic(command, message)
                entry = calls.prepare_half(self._fit_queues(message), now_ms)
            ticket = calls.write_half(entry, now_ms)
        except PostdateError as error:
            self._refuse(connection, command, error)
            return
        asked = command.without_content()
        self._pulse.expect(connection, ticket, partial(self._answer_half, connection, asked))

    def _answer_half(self, connection: Connection, command: Command, ticket: Ticket) -> None:
        if ticket.error is not None:
            self._refuse(connection, command, ticket.error)
        elif not command.is_oneway:
            entry = ticket.prepared[0]
            stored = _Stored(entry.message.topic, entry.message.queue_id, entry.unique_key or "", 0, ticket.offsets[0])
            connection.write(reply(command, codes.SUCCESS, self._fields(connection, [stored], ticket.answer)))

    def _prepare(self, connection: Connection, message: Message, now_ms: int) -> Prepared:
        """Prepares a message; writes those collected before it where one of them has its id."""
        entry = self._broker.prepare(message, now_ms)
        if entry.once not in self._once:
            return entry
        self.write(connection, now_ms)
        return self._broker.prepare(message, now_ms)

    def _keep(self, entry: Prepared, ask: int | Command) -> None:
        """Collects a send that is prepared."""
        if entry.once:
            self._once.add(entry.once)
        self._prepared.append(entry)
        self._asks.append(ask)

    def _try_again(self, connection: Connection, command: Command, error: PostdateError, now_ms: int) -> None:
        """Tries a send that could not be prepared once more: perhaps its topic must be created first, its queue was
        promised and never created, or it is a delete marker.
        """
        self.write(connection, now_ms)  # keeps the order of the sends
        try:
            message = self._message(connection, command)
            if self._recalls.take_marker(connection, command, message, now_ms):
                return
            if isinstance(error, TopicNotFound):
                self._create_topic(command, message)
            fitting = self._fit_queues(message)
            if isinstance(error, TopicNotFound) or fitting is not message:
                entry = self._broker.prepare(fitting, now_ms)
                if not self._hold_resend(connection, command, [fitting], now_ms):
                    self._keep(entry, command.without_content())
                return
        except SentBefore as before:
            self._answer_as_first(connection, command, before)
            return
        except PostdateError as problem:
            error = problem
        self._refuse(connection, command, error)

    def _fit_queues(self, message: Message) -> Message:
        """Moves a message to a queue that exists. A route that was promised before the topic was created may have named
        more queues than the topic then got.
        """
        topic = self._broker.view.find_topic(message.topic)
        if topic is None or not topic.write_queue_count <= message.queue_id < self._creation.new_queue_count:
            return message
        return message._replace(queue_id=message.queue_id % topic.write_queue_count)

    def _create_topic(self, command: Command, message: Message) -> None:
        asked = REQUESTS[command.code].read_fields(command.fields)["defaultTopicQueueNums"]
        self._creation.use_topic(message.topic, asked)

    def _message(self, connection: Connection, command: Command) -> Message:
        """Returns the message of a send. Raises ProtocolError that names the field that cannot be read."""
        asked = REQUESTS[command.code].read_fields(command.fields)
        message = Message(
            asked["topic"], command.body, asked["properties"].encode(), asked["queueId"], asked["flag"],
            asked["sysFlag"], asked["bornTimestamp"], connection.host, asked["reconsumeTimes"],
        )  # fmt: skip
        if message.sys_flag & codes.SYS_TRANSACTION and not _is_half(message):
            raise IllegalMessage(
                f"sysFlag {message.sys_flag} marks a transaction, and the message is no half: those have the property "
                f"{PROPERTY_TRANSACTION}=true"
            )
        if message.topic.startswith(RETRY_TOPIC_PREFIX):
            message = self._retry_or_dead_letter(message, asked["maxReconsumeTimes"])
        return message if message.queue_id >= 0 else message._replace(queue_id=self._pick_queue(message.topic))

    def _pick_queue(self, name: str) -> int:
        """Picks one queue after the other, for a producer that leaves the choice to the broker."""
        topic = self._broker.view.find_topic(name)
        self._next_queue += 1
        return self._next_queue % topic.write_queue_count if topic else 0

    def _retry_or_dead_letter(self, message: Message, times_max: int | None) -> Message:
        """Returns a message that a consumer sends back as a plain send, because its send-back failed or it wants its
        own delay. Beyond the limit the message is a dead letter.
        """
        group = message.topic.removeprefix(RETRY_TOPIC_PREFIX)
        if message.reconsume_times <= retry_times_max(self._broker, group, times_max):
            return _as_copy(message)
        topic = self._creation.use_dead_letter_topic(group)
        return message._replace(topic=topic.name, queue_id=0, properties=encode_properties(sent_on(message.properties)))

    def _write_batch(self, connection: Connection, command: Command, now_ms: int) -> None:
        """Writes a batch of a client as a batch of the log: all of it or nothing."""
        self.write(connection, now_ms)
        try:
            messages = self._messages(connection, command)
            if self._hold_resend(connection, command, messages, now_ms):
                return
            ticket = self._send(command, messages, now_ms)
        except PostdateError as error:
            self._refuse(connection, command, error)
            return
        asked = command.without_content()
        self._pulse.expect(connection, ticket, lambda ticket: self._answer_batch(connection, asked, ticket))

    def _messages(self, connection: Connection, command: Command) -> list[Message]:
        """Returns the messages of a batch. Topic, queue and times are the frame's, the rest is each message's own."""
        settings, limits = self._broker.settings, self._broker.limits
        if len(command.body) > settings.body_bytes_max:
            raise IllegalMessage(f"the batch has {len(command.body)} bytes, the limit is {settings.body_bytes_max}")
        outer = self._message(connection, command)
        inner = bodies.decode_batch(command.body, limits.batch_messages_max + 1)
        if not inner:
            raise IllegalMessage("the batch holds no message")
        if len(inner) > limits.batch_messages_max:
            raise IllegalMessage(f"batch_messages_max: the batch holds more than {limits.batch_messages_max} messages")
        if any(PROPERTY_ONCE.encode() in each.properties for each in inner) and any(
            PROPERTY_ONCE in decode_properties(each.properties) for each in inner
        ):
            raise IllegalMessage(f"a message of the batch has {PROPERTY_ONCE}: send it by itself")
        return [outer._replace(body=each.body, properties=each.properties, flag=each.flag) for each in inner]

    def _send(self, command: Command, messages: list[Message], now_ms: int) -> Ticket:
        """Sends a batch; creates the topic where it does not exist."""
        try:
            return self._broker.send(messages, now_ms)
        except TopicNotFound:
            self._create_topic(command, messages[0])
            return self._broker.send(messages, now_ms)

    def write(self, connection: Connection, now_ms: int) -> None:
        """Writes the collected sends as one batch; where that is refused, one by one, so that some may succeed."""
        asks, prepared = self._asks, self._prepared
        if not asks:
            return
        self._asks, self._prepared, self._once = [], [], set()
        try:
            ticket = self._broker.write(prepared, now_ms)
            self._pulse.expect(connection, ticket, lambda ticket: self._answer(connection, asks, ticket), len(asks))
        except PostdateError as error:
            if len(asks) == 1:
                self._refuse_ask(connection, asks[0], error)
                return
            for ask, entry in zip(asks, prepared, strict=True):
                self._asks, self._prepared = [ask], [entry]
                self.write(connection, now_ms)

    # -- resends ------------------------------------------------------------------------------------------------

    def _hold_resend(self, connection: Connection, command: Command, messages: list[Message], now_ms: int) -> bool:
        """Keeps a send back that may be stored already, until that is known; returns whether it does.

        The first send may come after its resend, from an older connection; it counts as a resend, too.
        """
        is_resend = command.fields.get("resend") not in (None, "", "false", "0", False)
        if not is_resend and not self._resent_keys:  # nearly always
            return False
        unique_key = decode_properties(messages[0].properties).get(PROPERTY_UNIQ_KEY)
        if not unique_key or not (is_resend or unique_key in self._resent_keys):
            return False
        if not self._broker.view.has_topic(messages[0].topic):
            return False
        self.write(connection, now_ms)  # the first send may be among those
        size, limit = sum(len(message.body) + len(message.properties) for message in messages), self._resends_bytes_max
        if self._resends_bytes and self._resends_bytes + size > limit:
            waiting = f"{self._resends_bytes} bytes of resends wait to be looked up"
            self._refuse(connection, command, FlowControl(f"resends_bytes_max: {waiting}, the limit is {limit}"))
            return True
        self._resends_bytes += size
        self._resent_keys[unique_key] = None
        if len(self._resent_keys) > _RESENDS_KNOWN_MAX:
            del self._resent_keys[next(iter(self._resent_keys))]
        first = messages[0]
        sent = SendIdentity(first.topic, unique_key, first.born_at_ms, first.reconsume_times)
        self._resends.append(_Resend(connection, command.without_content(), sent, messages, size))
        connection.expect(1)
        if self._resending is None:
            self._resending = asyncio.get_running_loop().create_task(self._take_resends())
        return True

    async def _take_resends(self) -> None:
        try:
            while self._resends:
                resend = self._resends.popleft()
                try:
                    await self._take_resend(resend)
                except (PostdateError, OSError) as error:
                    self._refuse(resend.connection, resend.command, error)
                finally:
                    self._resends_bytes -= resend.size
                    resend.connection.count_answered(1)
        finally:
            self._resending = None

    async def _take_resend(self, resend: _Resend) -> None:
        """Answers a resend as its first send, or stores it. Between the last look and the write nothing else runs."""
        connection, command = resend.connection, resend.command
        pending = self._broker.find_pending_send(resend.sent)
        if pending is not None:
            ticket, index = pending
            self._pulse.expect(connection, ticket, partial(self._answer_resend, resend, index))
            return
        since_ms = self._pulse.clock.now_ms() - self._broker.limits.resend_ms_max
        for found in self._broker.find_send(resend.sent, since_ms):
            if found is not None:
                stored = await self._stored(resend, found)
                self._answer_stored(connection, command, stored, 0 if found.due_at_ms else found.queue_offset)
                return
            await asyncio.sleep(0)
        try:
            ticket = self._broker.send(resend.messages, self._pulse.clock.now_ms())
        except SentBefore as before:
            self._answer_as_first(connection, command, before)
            return
        self._pulse.expect(connection, ticket, partial(self._answer_resend, resend, 0))
        self._pulse.nudge()

    def _answer_as_first(self, connection: Connection, command: Command, before: SentBefore) -> None:
        """Answers a send whose id is taken as the first one of that id, when that is durable."""
        asked = command.without_content()

        def answer(ticket: Ticket | None) -> None:
            if ticket is not None and ticket.error is not None:
                self._refuse(connection, asked, ticket.error)
            else:
                first = before.first
                self._answer_stored(connection, asked, [_Stored(*first[:-1])], first.queue_offset)

        if before.ticket is None:
            answer(None)
        else:
            self._pulse.expect(connection, before.ticket, answer)

    def _answer_resend(self, resend: _Resend, index: int, ticket: Ticket) -> None:
        """Answers a resend by the ticket that has its messages from an index on."""
        if ticket.error is not None:
            self._refuse(resend.connection, resend.command, ticket.error)
            return
        assert ticket.answers is not None
        end = index + len(resend.messages)
        stored = _stored(ticket.prepared[index:end], ticket.offsets[index:end])
        self._answer_stored(resend.connection, resend.command, stored, ticket.answers[index])

    async def _stored(self, resend: _Resend, found: Found) -> list[_Stored]:
        """Returns where the messages of a resend are, by the first one: the records of a batch follow each other. It is
        the first one alone where the log has given away the others.
        """
        topic, queue_id = resend.sent.topic, found.queue_id
        stored = [_Stored(topic, queue_id, resend.sent.unique_key, found.due_at_ms, found.arrival)]
        offset = found.arrival
        for index, message in enumerate(resend.messages[1:], 1):
            offset += len(self._broker.read_record(offset))
            data = self._broker.read_record(offset)
            unique_key = decode_properties(message.properties).get(PROPERTY_UNIQ_KEY, "")
            record = records.decode(data) if data else None
            if record is None or decode_properties(record.properties).get(PROPERTY_UNIQ_KEY, "") != unique_key:
                return stored[:1]
            stored.append(_Stored(topic, queue_id, unique_key, self._broker.due_of(record).at_ms, offset))
            if not index % _RECORDS_PER_STEP:
                await asyncio.sleep(0)
        return stored

    def _refuse_ask(self, connection: Connection, ask: int | Command, error: Exception) -> None:
        self._refuse(connection, Command(0, {}, opaque=ask) if isinstance(ask, int) else ask, error)

    def _refuse(self, connection: Connection, command: Command, error: Exception) -> None:
        line = f"a send from {connection} is refused: {type(error).__name__}: {error}"
        self._lines.write_seldom((connection.host.address, type(error)), line)
        if not command.is_oneway:
            connection.write(refusal(command, error))

    # -- answering a send ---------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, asks: list[int | Command], ticket: Ticket) -> None:
        """Answers every send of a batch by one write.

        The usual answers are formatted here: `frame.reply` would cost as much as the rest of a send.
        """
        if ticket.error is not None:
            for ask in asks:
                self._refuse_ask(connection, ask, ticket.error)
            return
        assert ticket.answers is not None
        frames: list[bytes] = []
        prefix, name, key_characters_max = connection.id_prefix, self._name, self._key_characters_max
        for ask, entry, offset, answer in zip(asks, ticket.prepared, ticket.offsets, ticket.answers, strict=True):
            if type(ask) is not int:
                frames += self._unusual_answer(connection, ask, entry, offset, answer)
                continue
            key = entry.unique_key or ""
            has_handle = entry.due_at_ms and 0 < len(key) <= key_characters_max
            unique = key.encode()
            if not unique.isalnum():
                unique = orjson.dumps(unique.decode())[1:-1]
            message, queue_offset = entry.message, answer if answer > 0 else 0
            if has_handle:
                handle = encode_recall_handle(message.topic, name, entry.due_at_ms, key)
                header = _SENT_TIMED % (prefix, offset, message.queue_id, queue_offset, unique, handle, ask)
            else:
                header = _SENT % (prefix, offset, message.queue_id, queue_offset, unique, ask)
            frames.append(MARKS.pack(HEADER_AT + len(header), len(header)))
            frames.append(header)
        if frames:
            connection.write(b"".join(frames))

    def _unusual_answer(
        self, connection: Connection, command: int | Command, entry: Prepared, offset: int, answer: int
    ) -> list[bytes]:
        assert isinstance(command, Command)
        if command.is_oneway:
            return []
        return [reply(command, codes.SUCCESS, self._fields(connection, _stored([entry], [offset]), answer))]

    def _answer_batch(self, connection: Connection, command: Command, ticket: Ticket) -> None:
        if ticket.error is not None:
            self._refuse(connection, command, ticket.error)
        else:
            assert ticket.answers is not None
            self._answer_stored(connection, command, _stored(ticket.prepared, ticket.offsets), ticket.answers[0])

    def _answer_stored(self, connection: Connection, command: Command, stored: list[_Stored], answer: int) -> None:
        if command.is_oneway:
            return
        try:
            frame = reply(command, codes.SUCCESS, self._fields(connection, stored, answer))
        except ProtocolError:  # ids and handles of all messages do not fit a header; those of the first do
            frame = reply(command, codes.SUCCESS, self._fields(connection, stored[:1], answer))
        connection.write(frame)

    def _handle(self, stored: _Stored) -> str:
        """Returns the handle of a message that can be recalled (it waits, and its unique key is one that a cancel may
        name), else a dash.
        """
        if not stored.due_at_ms or not 0 < len(stored.unique_key) <= self._key_characters_max:
            return "-"
        return encode_recall_handle(stored.topic, self._name, stored.due_at_ms, stored.unique_key).decode()

    def _fields(self, connection: Connection, stored: list[_Stored], answer: int) -> Mapping[str, Any]:
        """Returns the fields of an answer: all ids, the place of the first message, a handle for each that has one."""
        handles = [self._handle(each) for each in stored]
        fields: dict[str, Any] = {
            "msgId": ",".join(message_id(connection.broker_host, each.offset) for each in stored),
            "queueId": stored[0].queue_id,
            "queueOffset": max(answer, 0),
            "transactionId": stored[0].unique_key,
            **REGION_FIELDS,
        }
        if len(stored) > 1:
            return fields | {"recallHandles": " ".join(handles)}
        return fields | ({"recallHandle": handles[0]} if handles[0] != "-" else {})


def _is_half(message: Message) -> bool:
    """Returns whether a message is the half of a transaction. A message that its consumer sends back is none."""
    if _TRANSACTION not in message.properties or message.topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)):
        return False
    return decode_properties(message.properties).get(PROPERTY_TRANSACTION, "").lower() == "true"


def _as_copy(message: Message) -> Message:
    """Returns what a consumer sends on without what the first message alone may have: its id, its transaction."""
    properties = decode_properties(message.properties)
    if NOT_OF_COPIES.isdisjoint(properties):
        return message
    kept = {name: value for name, value in properties.items() if name not in NOT_OF_COPIES}
    return message._replace(properties=encode_properties(kept))


def _stored(entries: list[Prepared], offsets: list[int]) -> list[_Stored]:
    return [
        _Stored(entry.message.topic, entry.message.queue_id, entry.unique_key or "", entry.due_at_ms, offset)
        for entry, offset in zip(entries, offsets, strict=True)
    ]


def _is_batch(command: Command) -> bool:
    """Returns whether a send is a batch, by its code or, as the C++ client sends batches, by a flag."""
    flag = command.fields.get("batch", command.fields.get("m"))
    return command.code == Request.SEND_BATCH_MESSAGE or flag not in (None, "", "false", "0", 0)

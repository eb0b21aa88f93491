"""Sending and recalling: each becomes a request of the older protocol."""

from functools import partial
from typing import Any
from zlib import crc32

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.message import check_topic
from postdate.server.dispatch import Dispatcher
from postdate.server.grpc.call import Call
from postdate.server.grpc.requests import CallRequests, name_of
from postdate.server.grpc.statuses import OK_STATUS, common_status, make_status, status_of
from postdate.wire import codes, messaging
from postdate.wire.frame import Command
from postdate.wire.ids import encode_transaction_id, parse_message_id
from postdate.wire.messaging import CallError
from postdate.wire.requests import Request
from postdate.wire.translation import MESSAGE_TYPE_ATTRIBUTE, Send, read_message, types_of

_ANY_QUEUE = -1
_MESSAGES_MAX = 1_024  # of one call: each costs some 50 us, and others wait for all of them
_TYPE_NAMES = {messaging.NORMAL: "NORMAL", messaging.FIFO: "FIFO", messaging.DELAY: "DELAY",
               messaging.TRANSACTION: "TRANSACTION"}  # fmt: skip


class Producing:
    """Answers calls of producers."""

    def __init__(self, requests: CallRequests, dispatcher: Dispatcher, broker: Broker, clock: Clock) -> None:
        self._requests, self._dispatcher, self._broker, self._clock = requests, dispatcher, broker, clock

    def send(self, call: Call, request: Any) -> None:
        """Stores the messages of a call, which are of one topic. Each has a status of its own."""
        if not request.messages:
            raise CallError(messaging.CORRUPTED, "the call has no message")
        if len(request.messages) > _MESSAGES_MAX:
            raise CallError(
                messaging.BAD_REQUEST, f"the call has {len(request.messages)} messages, the limit is {_MESSAGES_MAX}"
            )
        topic = name_of(request.messages[0].topic, check_topic, messaging.ILLEGAL_TOPIC)
        if any(message.topic.name != topic for message in request.messages):
            raise CallError(messaging.CORRUPTED, "the messages of the call are of several topics")
        settings = self._broker.settings
        due_at_ms_max = self._clock.now_ms() + settings.delay_ms_max
        sends = [read_message(message, settings.body_bytes_max, due_at_ms_max) for message in request.messages]
        for send in sends:
            self._check_kind(topic, send)
        results: list[Any] = [None] * len(sends)

        def note(index: int, message_id: str, answer: Command) -> None:
            results[index] = _entry(message_id, answer, is_half=sends[index].kind == messaging.TRANSACTION)
            if None not in results:
                call.answer(status=common_status([each["status"] for each in results]), entries=results)

        for index, (message, send) in enumerate(zip(request.messages, sends, strict=True)):
            fields = {
                "topic": topic, "queueId": self._choose_queue(topic, send.message_group), "sysFlag": send.sys_flag,
                "bornTimestamp": send.born_at_ms, "flag": 0, "properties": send.properties, "reconsumeTimes": 0,
                "producerGroup": topic,
            }  # fmt: skip
            done = partial(note, index, message.system_properties.message_id)
            self._requests.ask(call, Request.SEND_MESSAGE, fields, done, send.body)

    def _check_kind(self, topic: str, send: Send) -> None:
        """Raises CallError for a message of a type that its topic does not take."""
        known = self._broker.view.find_topic(topic)
        if known is None or send.kind in types_of(known.attributes):
            return
        raise CallError(
            messaging.TYPE_MISMATCH,
            f"the message is of type {_TYPE_NAMES[send.kind]}, and topic {topic!r} takes "
            f"{known.attributes[MESSAGE_TYPE_ATTRIBUTE]} ({MESSAGE_TYPE_ATTRIBUTE})",
        )

    def _choose_queue(self, topic: str, message_group: str) -> int:
        """Returns the one queue in which the messages of a group keep their order; any for one that has no group.
        Raises TopicNotFound.
        """
        if not message_group:
            return _ANY_QUEUE
        known, _ = self._dispatcher.routes.find_route(topic)  # as it will be, where this message makes it
        return crc32(message_group.encode()) % known.write_queue_count if known.write_queue_count else _ANY_QUEUE

    def recall(self, call: Call, request: Any) -> None:
        topic = name_of(request.topic, check_topic, messaging.ILLEGAL_TOPIC)
        fields = {"topic": topic, "recallHandle": request.recall_handle or " "}

        def answer(reply: Command) -> None:
            call.answer(status=status_of(reply), message_id=str(reply.fields.get("msgId", "")))

        self._requests.ask(call, Request.RECALL_MESSAGE, fields, answer)


def _entry(message_id: str, answer: Command, *, is_half: bool) -> dict[str, Any]:
    """Returns the result of one message. The half of a transaction is known by its place in the log."""
    if answer.code == codes.SYSTEM_BUSY:
        return {"status": make_status(messaging.TOO_MANY_REQUESTS, answer.remark or ""), "message_id": message_id}
    if answer.code != codes.SUCCESS:
        return {"status": status_of(answer), "message_id": message_id}
    queue_offset = int(answer.fields["queueOffset"])
    transaction_id = answer.fields.get("transactionId", "")
    if is_half:
        _, place = parse_message_id(answer.fields["msgId"])
        transaction_id = encode_transaction_id(place, queue_offset)
    return {
        "status": OK_STATUS, "message_id": message_id, "transaction_id": transaction_id,
        "offset": queue_offset, "recall_handle": answer.fields.get("recallHandle", ""),
    }  # fmt: skip

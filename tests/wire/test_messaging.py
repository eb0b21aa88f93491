"""The schema of RocketMQ 5's messages: field numbers, types, and what is not known."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from postdate.wire import messaging
from postdate.wire.messaging import MESSAGES, CallError, requests_of

Table = dict[str, dict[str, int]]

# The numbers again, by hand: what a client of RocketMQ 5.x sends.
NUMBERS: Table = {
    "Resource": {"resource_namespace": 1, "name": 2},
    "Endpoints": {"scheme": 1, "addresses": 2},
    "Broker": {"name": 1, "id": 2, "endpoints": 3},
    "MessageQueue": {"topic": 1, "id": 2, "permission": 3, "broker": 4, "accept_message_types": 5},
    "Status": {"code": 1, "message": 2},
    "FilterExpression": {"type": 1, "expression": 2},
    "Digest": {"type": 1, "checksum": 2},
    "SubscriptionEntry": {"topic": 1, "expression": 2},
    "SystemProperties": {
        "tag": 1, "keys": 2, "message_id": 3, "body_digest": 4, "body_encoding": 5, "message_type": 6,
        "born_timestamp": 7, "born_host": 8, "store_timestamp": 9, "store_host": 10, "delivery_timestamp": 11,
        "receipt_handle": 12, "queue_id": 13, "queue_offset": 14, "invisible_duration": 15, "delivery_attempt": 16,
        "message_group": 17, "trace_context": 18, "orphaned_transaction_recovery_duration": 19,
        "dead_letter_queue": 20,
    },
    "Message": {"topic": 1, "user_properties": 2, "system_properties": 3, "body": 4},
    "RetryPolicy": {"max_attempts": 1, "exponential_backoff": 2, "customized_backoff": 3},
    "ExponentialBackoff": {"initial": 1, "max": 2, "multiplier": 3},
    "Settings": {
        "client_type": 1, "access_point": 2, "backoff_policy": 3, "request_timeout": 4, "publishing": 5,
        "subscription": 6, "user_agent": 7, "metric": 8, "client_properties": 9,
    },
    "Publishing": {"topics": 1, "max_body_size": 2, "validate_message_type": 3},
    "Subscription": {
        "group": 1, "subscriptions": 2, "fifo": 3, "receive_batch_size": 4, "long_polling_timeout": 5,
    },
    "QueryRouteRequest": {"topic": 1, "endpoints": 2},
    "QueryRouteResponse": {"status": 1, "message_queues": 2},
    "SendMessageRequest": {"messages": 1},
    "SendResultEntry": {"status": 1, "message_id": 2, "transaction_id": 3, "offset": 4, "recall_handle": 5},
    "QueryAssignmentRequest": {"topic": 1, "group": 2, "endpoints": 3},
    "QueryAssignmentResponse": {"status": 1, "assignments": 2},
    "HeartbeatRequest": {"group": 1, "client_type": 2},
    "ReceiveMessageRequest": {
        "group": 1, "message_queue": 2, "filter_expression": 3, "batch_size": 4, "invisible_duration": 5,
        "auto_renew": 6, "long_polling_timeout": 7, "attempt_id": 8,
    },
    "ReceiveMessageResponse": {"status": 1, "message": 2, "delivery_timestamp": 3},
    "AckMessageRequest": {"group": 1, "topic": 2, "entries": 3},
    "AckMessageEntry": {"message_id": 1, "receipt_handle": 2},
    "AckMessageResultEntry": {"message_id": 1, "receipt_handle": 2, "status": 3},
    "ChangeInvisibleDurationRequest": {
        "group": 1, "topic": 2, "receipt_handle": 3, "invisible_duration": 4, "message_id": 5, "lite_topic": 6,
        "suspend": 7,
    },
    "ForwardMessageToDeadLetterQueueRequest": {
        "group": 1, "topic": 2, "receipt_handle": 3, "message_id": 4, "delivery_attempt": 5, "max_delivery_attempts": 6,
    },
    "RecallMessageRequest": {"topic": 1, "recall_handle": 2},
    "RecallMessageResponse": {"status": 1, "message_id": 2},
    "EndTransactionRequest": {
        "topic": 1, "message_id": 2, "transaction_id": 3, "resolution": 4, "source": 5, "trace_context": 6,
    },
    "TelemetryCommand": {
        "status": 1, "settings": 2, "thread_stack_trace": 3, "verify_message_result": 4,
        "recover_orphaned_transaction_command": 5, "print_thread_stack_trace_command": 6, "verify_message_command": 7,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_fields_have_the_numbers_of_rocketmq(name: str) -> None:
    found = {field.name: field.number for field in MESSAGES[name].DESCRIPTOR.fields}
    assert found == NUMBERS[name]


def of(number: int, kind: int, content: bytes) -> bytes:
    """A field as it travels: varint (0), fixed 32 bits (5), or a length and so many bytes (2)."""
    tag = bytes([number << 3 | kind]) if number < 16 else bytes([number << 3 & 0x7F | kind | 0x80, number >> 4])
    return tag + (bytes([len(content)]) if kind == 2 else b"") + content


def test_a_message_is_read_from_bytes_that_were_written_by_hand() -> None:
    system = (
        of(1, 2, b"paid") + of(2, 2, b"k1") + of(2, 2, b"k2") + of(3, 2, b"01AB") + of(5, 0, b"\x01")
        + of(6, 0, b"\x03") + of(11, 2, of(1, 0, b"\xac\x02") + of(2, 0, b"\xc0\x84\x3d")) + of(17, 2, b"g7")
    )  # fmt: skip
    data = (
        of(1, 2, of(2, 2, b"orders"))
        + of(2, 2, of(1, 2, b"name") + of(2, 2, "wert ü".encode()))
        + of(3, 2, system)
        + of(4, 2, b"\x00\xff")
    )
    message = MESSAGES["Message"].FromString(data)
    assert (message.topic.name, message.body) == ("orders", b"\x00\xff")
    assert dict(message.user_properties) == {"name": "wert ü"}
    found = message.system_properties
    assert (found.tag, list(found.keys), found.message_id, found.message_group) == ("paid", ["k1", "k2"], "01AB", "g7")
    assert (found.body_encoding, found.message_type) == (messaging.IDENTITY, messaging.DELAY)
    assert (found.delivery_timestamp.seconds, found.delivery_timestamp.nanos) == (300, 1_000_000)
    assert not found.HasField("born_timestamp")
    assert MESSAGES["Message"].FromString(message.SerializeToString()) == message


def test_numbers_below_zero_and_large_ones_fit_their_types() -> None:
    entry = MESSAGES["SendResultEntry"].FromString(of(4, 0, b"\xff" * 8 + b"\x7f"))
    assert entry.offset == 2**63 - 1
    queue = MESSAGES["MessageQueue"](id=-1)
    assert queue.SerializeToString() == of(2, 0, b"\xff" * 9 + b"\x01")
    backoff = MESSAGES["ExponentialBackoff"](multiplier=2.0)
    assert backoff.SerializeToString() == of(3, 5, b"\x00\x00\x00\x40")


def test_types_of_messages_are_packed_like_every_list_of_numbers() -> None:
    queue = MESSAGES["MessageQueue"](accept_message_types=messaging.MESSAGE_TYPES)
    assert queue.SerializeToString() == of(5, 2, b"\x01\x02\x03\x04")


def test_a_map_has_texts_by_text() -> None:
    settings = MESSAGES["Settings"](client_properties={"b": "2", "a": "1"})
    again = MESSAGES["Settings"].FromString(settings.SerializeToString())
    assert dict(again.client_properties) == {"a": "1", "b": "2"}


def test_fields_that_are_not_known_survive() -> None:
    lite = of(6, 2, b"a field of a later version")
    data = of(1, 2, of(2, 2, b"workers")) + lite
    found = MESSAGES["Subscription"].FromString(data)
    assert found.group.name == "workers"
    assert found.SerializeToString() == data
    copy = MESSAGES["Subscription"]()
    copy.CopyFrom(found)
    assert copy.SerializeToString() == data, "settings are echoed as a client has sent them"


def test_text_that_is_not_utf8_is_no_message() -> None:
    with pytest.raises(DecodeError):
        MESSAGES["Resource"].FromString(of(2, 2, b"\xff\xfe"))


@pytest.mark.parametrize(
    "method",
    ["QueryRoute", "Heartbeat", "SendMessage", "QueryAssignment", "ReceiveMessage", "AckMessage", "EndTransaction",
     "ForwardMessageToDeadLetterQueue", "NotifyClientTermination", "ChangeInvisibleDuration", "RecallMessage"],
)  # fmt: skip
def test_every_method_has_a_request_and_an_answer_with_a_status(method: str) -> None:
    request, answer = requests_of(method)
    assert request.DESCRIPTOR.full_name == f"apache.rocketmq.v2.{method}Request"
    assert answer.DESCRIPTOR.fields_by_name["status"].number == 1


def test_a_refusal_has_its_code_and_a_sentence() -> None:
    error: Any = CallError(messaging.ILLEGAL_TAG, "the tag is blank")
    assert (error.code, str(error)) == (40_004, "the tag is blank")

"""The messages of `apache.rocketmq.v2.MessagingService`, which RocketMQ 5's clients speak over gRPC.

The table below is the schema: one line for each message, with the number, the name and the type of its fields; `*`
repeats a field, and a field of type `map` has texts by text. Enums travel like numbers, so they are numbers here, with
their names below. Classes are made of it when this module is imported: no generated code belongs to us, and none of its
checks of versions.

    message = Message(topic=Resource(name="orders"), body=b"...")
    message.SerializeToString()
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from postdate.errors import PostdateError

SERVICE_PATH = "/apache.rocketmq.v2.MessagingService/"
_PACKAGE = "apache.rocketmq.v2"

_SCHEMA = """
Timestamp: 1 seconds i64, 2 nanos i32
Duration: 1 seconds i64, 2 nanos i32
Resource: 1 resource_namespace string, 2 name string
Address: 1 host string, 2 port i32
Endpoints: 1 scheme i32, 2 addresses* Address
Broker: 1 name string, 2 id i32, 3 endpoints Endpoints
MessageQueue: 1 topic Resource, 2 id i32, 3 permission i32, 4 broker Broker, 5 accept_message_types* i32
Status: 1 code i32, 2 message string
FilterExpression: 1 type i32, 2 expression string
Digest: 1 type i32, 2 checksum string
SubscriptionEntry: 1 topic Resource, 2 expression FilterExpression
Assignment: 1 message_queue MessageQueue
DeadLetterQueue: 1 topic string, 2 message_id string
SystemProperties: 1 tag string, 2 keys* string, 3 message_id string, 4 body_digest Digest, 5 body_encoding i32, \
6 message_type i32, 7 born_timestamp Timestamp, 8 born_host string, 9 store_timestamp Timestamp, 10 store_host string, \
11 delivery_timestamp Timestamp, 12 receipt_handle string, 13 queue_id i32, 14 queue_offset i64, \
15 invisible_duration Duration, 16 delivery_attempt i32, 17 message_group string, 18 trace_context string, \
19 orphaned_transaction_recovery_duration Duration, 20 dead_letter_queue DeadLetterQueue
Message: 1 topic Resource, 2 user_properties map, 3 system_properties SystemProperties, 4 body bytes
ExponentialBackoff: 1 initial Duration, 2 max Duration, 3 multiplier float
CustomizedBackoff: 1 next* Duration
RetryPolicy: 1 max_attempts i32, 2 exponential_backoff ExponentialBackoff, 3 customized_backoff CustomizedBackoff
Publishing: 1 topics* Resource, 2 max_body_size i32, 3 validate_message_type bool
Subscription: 1 group Resource, 2 subscriptions* SubscriptionEntry, 3 fifo bool, 4 receive_batch_size i32, \
5 long_polling_timeout Duration
UserAgent: 1 language i32, 2 version string, 3 platform string, 4 hostname string
Metric: 1 on bool, 2 endpoints Endpoints
Settings: 1 client_type i32, 2 access_point Endpoints, 3 backoff_policy RetryPolicy, 4 request_timeout Duration, \
5 publishing Publishing, 6 subscription Subscription, 7 user_agent UserAgent, 8 metric Metric, 9 client_properties map
QueryRouteRequest: 1 topic Resource, 2 endpoints Endpoints
QueryRouteResponse: 1 status Status, 2 message_queues* MessageQueue
SendMessageRequest: 1 messages* Message
SendResultEntry: 1 status Status, 2 message_id string, 3 transaction_id string, 4 offset i64, 5 recall_handle string
SendMessageResponse: 1 status Status, 2 entries* SendResultEntry
QueryAssignmentRequest: 1 topic Resource, 2 group Resource, 3 endpoints Endpoints
QueryAssignmentResponse: 1 status Status, 2 assignments* Assignment
ReceiveMessageRequest: 1 group Resource, 2 message_queue MessageQueue, 3 filter_expression FilterExpression, \
4 batch_size i32, 5 invisible_duration Duration, 6 auto_renew bool, 7 long_polling_timeout Duration, 8 attempt_id string
ReceiveMessageResponse: 1 status Status, 2 message Message, 3 delivery_timestamp Timestamp
AckMessageEntry: 1 message_id string, 2 receipt_handle string
AckMessageRequest: 1 group Resource, 2 topic Resource, 3 entries* AckMessageEntry
AckMessageResultEntry: 1 message_id string, 2 receipt_handle string, 3 status Status
AckMessageResponse: 1 status Status, 2 entries* AckMessageResultEntry
ForwardMessageToDeadLetterQueueRequest: 1 group Resource, 2 topic Resource, 3 receipt_handle string, \
4 message_id string, 5 delivery_attempt i32, 6 max_delivery_attempts i32
ForwardMessageToDeadLetterQueueResponse: 1 status Status
HeartbeatRequest: 1 group Resource, 2 client_type i32
HeartbeatResponse: 1 status Status
EndTransactionRequest: 1 topic Resource, 2 message_id string, 3 transaction_id string, 4 resolution i32, 5 source i32, \
6 trace_context string
EndTransactionResponse: 1 status Status
NotifyClientTerminationRequest: 1 group Resource
NotifyClientTerminationResponse: 1 status Status
ChangeInvisibleDurationRequest: 1 group Resource, 2 topic Resource, 3 receipt_handle string, \
4 invisible_duration Duration, 5 message_id string, 6 lite_topic string, 7 suspend bool
ChangeInvisibleDurationResponse: 1 status Status, 2 receipt_handle string
RecallMessageRequest: 1 topic Resource, 2 recall_handle string
RecallMessageResponse: 1 status Status, 2 message_id string
RecoverOrphanedTransactionCommand: 1 message Message, 2 transaction_id string
PrintThreadStackTraceCommand: 1 nonce string
ThreadStackTrace: 1 nonce string, 2 thread_stack_trace string
VerifyMessageCommand: 1 nonce string, 2 message Message
VerifyMessageResult: 1 nonce string
TelemetryCommand: 1 status Status, 2 settings Settings, 3 thread_stack_trace ThreadStackTrace, \
4 verify_message_result VerifyMessageResult, 5 recover_orphaned_transaction_command RecoverOrphanedTransactionCommand, \
6 print_thread_stack_trace_command PrintThreadStackTraceCommand, 7 verify_message_command VerifyMessageCommand
"""

# -- numbers of enums -----------------------------------------------------------------------------------------------

SCHEME_IPV4, SCHEME_IPV6, SCHEME_NAME = 1, 2, 3
PERMISSION_NONE, PERMISSION_READ, PERMISSION_WRITE, PERMISSION_BOTH = 1, 2, 3, 4
NORMAL, FIFO, DELAY, TRANSACTION = MESSAGE_TYPES = (1, 2, 3, 4)
FILTER_TAG, FILTER_SQL = 1, 2
DIGEST_MD5 = 2
IDENTITY, GZIP = 1, 2  # encodings of a body
PRODUCER, PUSH_CONSUMER, SIMPLE_CONSUMER = 1, 2, 3  # types of clients
COMMIT, ROLLBACK = 1, 2  # resolutions of a transaction
BY_CLIENT, BY_CHECK = 1, 2  # sources of a resolution

# -- status codes ---------------------------------------------------------------------------------------------------

OK = 20_000
MULTIPLE_RESULTS = 30_000
BAD_REQUEST = 40_000
ILLEGAL_TOPIC = 40_002
ILLEGAL_GROUP = 40_003
ILLEGAL_TAG = 40_004
ILLEGAL_KEY = 40_005
ILLEGAL_MESSAGE_GROUP = 40_006
ILLEGAL_PROPERTY = 40_007
INVALID_TRANSACTION_ID = 40_008
ILLEGAL_MESSAGE_ID = 40_009
ILLEGAL_FILTER = 40_010
ILLEGAL_INVISIBLE_TIME = 40_011
ILLEGAL_DELIVERY_TIME = 40_012
INVALID_HANDLE = 40_013
TYPE_MISMATCH = 40_014
CORRUPTED = 40_016
NO_CLIENT_ID = 40_017
UNAUTHORIZED = 40_100
FORBIDDEN = 40_300
NO_MESSAGE = 40_401
TOPIC_NOT_FOUND = 40_402
GROUP_NOT_FOUND = 40_403
BODY_TOO_LARGE = 41_301
TOO_MANY_REQUESTS = 42_900
PROPERTIES_TOO_LARGE = 43_101
INTERNAL_ERROR = 50_001
NOT_IMPLEMENTED = 50_100


class CallError(PostdateError):
    """Why a call is refused: the code of its status, and a sentence."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


# -- classes of messages ----------------------------------------------------------------------------------------------

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "string": _Field.TYPE_STRING, "bytes": _Field.TYPE_BYTES, "bool": _Field.TYPE_BOOL, "i32": _Field.TYPE_INT32,
    "i64": _Field.TYPE_INT64, "float": _Field.TYPE_FLOAT,
}  # fmt: skip


def _make_classes(schema: str) -> dict[str, Any]:
    """Returns a class for each line of the schema, by its name."""
    file = descriptor_pb2.FileDescriptorProto(name="messaging", package=_PACKAGE, syntax="proto3")
    for line in schema.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            _add_field(message, *text.split(" "))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        each.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{each.name}"))
        for each in file.message_type
    }


def _add_field(message: descriptor_pb2.DescriptorProto, number: str, name: str, kind: str) -> None:
    label = _Field.LABEL_REPEATED if name.endswith("*") or kind == "map" else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name.rstrip("*"), number=int(number), label=label)
    if kind in _TYPES:
        field.type = _TYPES[kind]
        return
    field.type = _Field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{kind}"
    if kind == "map":
        entry = message.nested_type.add(name="".join(word.title() for word in name.split("_")) + "Entry")
        entry.options.map_entry = True
        for at, part in enumerate(("key", "value"), 1):
            entry.field.add(name=part, number=at, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


MESSAGES = _make_classes(_SCHEMA)


def requests_of(method: str) -> tuple[Any, Any]:
    """Returns the classes of a method's request and of its answer."""
    return MESSAGES[f"{method}Request"], MESSAGES[f"{method}Response"]

"""Requests and their answers as a table: one row per code.

A field is text, a whole number of 64 bits or a flag; a row says which must be there. Fields that no row names are left
alone: every client adds some of its own (namespace, access key, zone). `values` reads the fields of a request by its
row, leniently: C++ writes bare numbers and "1" for true, Java writes everything as text.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from postdate.errors import ProtocolError
from postdate.wire import codes
from postdate.wire.frame import plain_text, shown, whole_number


class Kind(enum.Enum):
    TEXT = "text"
    NUMBER = "number"
    FLAG = "flag"


class Field(NamedTuple):
    """A field of a request. `letter` is its name in SEND_MESSAGE_V2, and in batches of some clients."""

    name: str
    kind: Kind
    required: bool
    default: Any
    letter: str = ""


class Request(NamedTuple):
    """A row of the table."""

    code: int
    name: str
    fields: tuple[Field, ...]
    reply: tuple[str, ...] = ()
    body: str = ""  # what its body is
    reply_body: str = ""


def _must(name: str, kind: Kind = Kind.TEXT, letter: str = "") -> Field:
    return Field(name, kind, True, None, letter)


def _may(name: str, default: Any = "", kind: Kind = Kind.TEXT, letter: str = "") -> Field:
    return Field(name, kind, False, default, letter)


NUMBER, FLAG = Kind.NUMBER, Kind.FLAG

_SEND = (
    _may("producerGroup", letter="a"), _must("topic", letter="b"), _may("defaultTopic", letter="c"),
    _may("defaultTopicQueueNums", 4, NUMBER, "d"), _must("queueId", NUMBER, "e"), _may("sysFlag", 0, NUMBER, "f"),
    _may("bornTimestamp", 0, NUMBER, "g"), _may("flag", 0, NUMBER, "h"), _may("properties", letter="i"),
    _may("reconsumeTimes", 0, NUMBER, "j"), _may("unitMode", False, FLAG, "k"),
    _may("maxReconsumeTimes", None, NUMBER, "l"), _may("batch", False, FLAG, "m"), _may("brokerName", letter="n"),
)  # fmt: skip
_SENT = (
    "msgId", "queueId", "queueOffset", "transactionId", "recallHandle", "recallHandles", "outcome", "MSG_REGION",
    "TRACE_ON",
)  # fmt: skip
_PULL = (
    _must("consumerGroup"), _must("topic"), _must("queueId", NUMBER), _must("queueOffset", NUMBER),
    _must("maxMsgNums", NUMBER), _may("sysFlag", 0, NUMBER), _may("commitOffset", 0, NUMBER),
    _may("suspendTimeoutMillis", 0, NUMBER), _may("subscription"), _may("subVersion", 0, NUMBER),
    _may("expressionType", "TAG"), _may("maxMsgBytes", 0, NUMBER),
)  # fmt: skip
_PULLED = ("suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset")
_QUEUE = (_must("topic"), _must("queueId", NUMBER))
_GROUP_QUEUE = (_must("consumerGroup"), *_QUEUE)
_POPPED = (*_GROUP_QUEUE, _must("extraInfo"), _must("offset", NUMBER))

_ROWS = (
    Request(codes.SEND_MESSAGE, "SEND_MESSAGE", _SEND, _SENT, "the message's body"),
    Request(codes.SEND_MESSAGE_V2, "SEND_MESSAGE_V2", _SEND, _SENT, "the message's body"),
    Request(codes.SEND_BATCH_MESSAGE, "SEND_BATCH_MESSAGE", _SEND, _SENT, "messages, see bodies.decode_batch"),
    Request(codes.PULL_MESSAGE, "PULL_MESSAGE", _PULL, _PULLED, reply_body="records"),
    Request(codes.LITE_PULL_MESSAGE, "LITE_PULL_MESSAGE", _PULL, _PULLED, reply_body="records"),
    Request(
        codes.QUERY_CONSUMER_OFFSET, "QUERY_CONSUMER_OFFSET",
        (*_GROUP_QUEUE, _may("setZeroIfNotFound", True, FLAG)), ("offset",),
    ),
    Request(
        codes.UPDATE_CONSUMER_OFFSET, "UPDATE_CONSUMER_OFFSET", (*_GROUP_QUEUE, _must("commitOffset", NUMBER)),
    ),
    Request(
        codes.SEARCH_OFFSET_BY_TIMESTAMP, "SEARCH_OFFSET_BY_TIMESTAMP",
        (*_QUEUE, _must("timestamp", NUMBER), _may("boundaryType", "LOWER")), ("offset",),
    ),
    Request(codes.GET_MAX_OFFSET, "GET_MAX_OFFSET", _QUEUE, ("offset",)),
    Request(codes.GET_MIN_OFFSET, "GET_MIN_OFFSET", _QUEUE, ("offset",)),
    Request(codes.GET_EARLIEST_MSG_STORETIME, "GET_EARLIEST_MSG_STORETIME", _QUEUE, ("timestamp",)),
    Request(codes.VIEW_MESSAGE_BY_ID, "VIEW_MESSAGE_BY_ID", (_must("offset", NUMBER),), reply_body="one record"),
    Request(
        codes.QUERY_MESSAGE, "QUERY_MESSAGE",
        (_must("topic"), _must("key"), _may("maxNum", 32, NUMBER), _may("beginTimestamp", 0, NUMBER),
         _may("endTimestamp", None, NUMBER), _may("_UNIQUE_KEY_QUERY", False, FLAG), _may("indexType")),
        ("indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"), reply_body="records",
    ),
    Request(
        codes.HEART_BEAT, "HEART_BEAT", (), ("IS_SUPPORT_HEART_BEAT_V2", "IS_SUB_CHANGE"),
        "JSON: client, its groups and subscriptions",
    ),
    Request(
        codes.UNREGISTER_CLIENT, "UNREGISTER_CLIENT",
        (_must("clientID"), _may("producerGroup"), _may("consumerGroup")),
    ),
    Request(
        codes.CONSUMER_SEND_MSG_BACK, "CONSUMER_SEND_MSG_BACK",
        (_must("group"), _must("offset", NUMBER), _may("delayLevel", 0, NUMBER), _may("originMsgId"),
         _may("originTopic"), _may("maxReconsumeTimes", None, NUMBER)),
    ),
    Request(
        codes.GET_CONSUMER_LIST_BY_GROUP, "GET_CONSUMER_LIST_BY_GROUP", (_must("consumerGroup"),),
        reply_body="JSON: client ids",
    ),
    Request(codes.LOCK_BATCH_MQ, "LOCK_BATCH_MQ", (), body="JSON: group, client, queues", reply_body="JSON: queues"),
    Request(codes.UNLOCK_BATCH_MQ, "UNLOCK_BATCH_MQ", (), body="JSON: group, client, queues"),
    Request(codes.CHECK_CLIENT_CONFIG, "CHECK_CLIENT_CONFIG", (), body="JSON: a subscription"),
    Request(
        codes.RECALL_MESSAGE, "RECALL_MESSAGE",
        (_must("topic"), _may("producerGroup"), _may("recallHandle"), _may("key"), _may("due", 0, NUMBER)),
        ("msgId", "outcome"),
    ),
    Request(
        codes.QUERY_ASSIGNMENT, "QUERY_ASSIGNMENT", (), body="JSON: topic, group, client, strategy",
        reply_body="JSON: queues and how to consume them",
    ),
    Request(
        codes.SET_MESSAGE_REQUEST_MODE, "SET_MESSAGE_REQUEST_MODE", (), body="JSON: topic, group, PULL or POP",
    ),
    Request(
        codes.POP_MESSAGE, "POP_MESSAGE",
        (_must("consumerGroup"), _must("topic"), _must("queueId", NUMBER), _must("maxMsgNums", NUMBER),
         _must("invisibleTime", NUMBER), _may("pollTime", 0, NUMBER), _may("bornTime", 0, NUMBER),
         _may("initMode", 0, NUMBER), _may("expType", "TAG"), _may("exp"), _may("order", False, FLAG),
         _may("attemptId")),
        ("popTime", "invisibleTime", "reviveQid", "restNum", "startOffsetInfo", "msgOffsetInfo", "orderCountInfo"),
        reply_body="records",
    ),
    Request(codes.ACK_MESSAGE, "ACK_MESSAGE", _POPPED),
    Request(codes.BATCH_ACK_MESSAGE, "BATCH_ACK_MESSAGE", (), body="JSON: groups, queues, offsets, pop times"),
    Request(
        codes.CHANGE_MESSAGE_INVISIBLETIME, "CHANGE_MESSAGE_INVISIBLETIME",
        (*_POPPED, _must("invisibleTime", NUMBER)), ("popTime", "invisibleTime", "reviveQid"),
    ),
    Request(codes.GET_ROUTEINFO_BY_TOPIC, "GET_ROUTEINFO_BY_TOPIC", (_must("topic"),), reply_body="JSON: a route"),
    Request(
        codes.UPDATE_AND_CREATE_TOPIC, "UPDATE_AND_CREATE_TOPIC",
        (_must("topic"), _may("readQueueNums", 8, NUMBER), _may("writeQueueNums", 8, NUMBER),
         _may("perm", 6, NUMBER), _may("attributes")),
    ),
    Request(codes.DELETE_TOPIC_IN_BROKER, "DELETE_TOPIC_IN_BROKER", (_must("topic"),), ("cancelled",)),
    Request(codes.GET_TOPIC_STATS_INFO, "GET_TOPIC_STATS_INFO", (_must("topic"),), reply_body="JSON: offsets by queue"),
    Request(
        codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, "GET_ALL_TOPIC_LIST_FROM_NAMESERVER", (),
        reply_body="JSON: names of topics",
    ),
    Request(
        codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", (),
        body="JSON: settings of a group",
    ),
    Request(
        codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "GET_ALL_SUBSCRIPTIONGROUP_CONFIG", (),
        reply_body="JSON: settings of all groups",
    ),
    Request(codes.DELETE_SUBSCRIPTIONGROUP, "DELETE_SUBSCRIPTIONGROUP", (_must("groupName"),)),
    Request(
        codes.GET_CONSUME_STATS, "GET_CONSUME_STATS", (_must("consumerGroup"), _may("topic")),
        reply_body="JSON: offsets by queue",
    ),
    Request(codes.GET_TOPIC_CONFIG, "GET_TOPIC_CONFIG", (_must("topic"),), reply_body="JSON: a topic"),
    Request(
        codes.DELETE_TOPIC_IN_NAMESRV, "DELETE_TOPIC_IN_NAMESRV", (_must("topic"),),
    ),
    Request(
        codes.GET_BROKER_CLUSTER_INFO, "GET_BROKER_CLUSTER_INFO", (), reply_body="JSON: clusters and their brokers",
    ),
    Request(
        codes.WIPE_WRITE_PERM_OF_BROKER, "WIPE_WRITE_PERM_OF_BROKER", (_must("brokerName"),), ("wipeTopicCount",),
    ),
    Request(
        codes.ADD_WRITE_PERM_OF_BROKER, "ADD_WRITE_PERM_OF_BROKER", (_must("brokerName"),), ("addTopicCount",),
    ),
    Request(codes.GET_KV_CONFIG, "GET_KV_CONFIG", (_must("namespace"), _must("key"))),
    Request(codes.DELETE_KV_CONFIG, "DELETE_KV_CONFIG", (_must("namespace"), _must("key"))),
    Request(codes.GET_NAMESRV_CONFIG, "GET_NAMESRV_CONFIG", (), reply_body="lines of name=value"),
    Request(codes.UPDATE_BROKER_CONFIG, "UPDATE_BROKER_CONFIG", (), body="lines of name=value"),
    Request(codes.GET_BROKER_CONFIG, "GET_BROKER_CONFIG", (), ("version",), reply_body="lines of name=value"),
    Request(codes.GET_BROKER_RUNTIME_INFO, "GET_BROKER_RUNTIME_INFO", (), reply_body="JSON: names and values"),
    Request(
        codes.VIEW_BROKER_STATS_DATA, "VIEW_BROKER_STATS_DATA", (_must("statsName"), _must("statsKey")),
        reply_body="JSON: counts of a minute, an hour and a day",
    ),
    Request(
        codes.GET_CONSUMER_CONNECTION_LIST, "GET_CONSUMER_CONNECTION_LIST", (_must("consumerGroup"),),
        reply_body="JSON: members and subscriptions",
    ),
    Request(
        codes.GET_PRODUCER_CONNECTION_LIST, "GET_PRODUCER_CONNECTION_LIST", (_must("producerGroup"),),
        reply_body="JSON: producers",
    ),
    Request(codes.GET_ALL_PRODUCER_INFO, "GET_ALL_PRODUCER_INFO", (), reply_body="JSON: producers by group"),
    Request(
        codes.QUERY_TOPIC_CONSUME_BY_WHO, "QUERY_TOPIC_CONSUME_BY_WHO", (_must("topic"),),
        reply_body="JSON: names of groups",
    ),
    Request(
        codes.GET_CONSUMER_RUNNING_INFO, "GET_CONSUMER_RUNNING_INFO",
        (_must("consumerGroup"), _must("clientId"), _may("jstackEnable", False, FLAG)),
        reply_body="what the client answers",
    ),
    Request(
        codes.CONSUME_MESSAGE_DIRECTLY, "CONSUME_MESSAGE_DIRECTLY",
        (_must("consumerGroup"), _must("clientId"), _must("msgId")), reply_body="what the client answers",
    ),
    Request(
        codes.GET_BROKER_CONSUME_STATS, "GET_BROKER_CONSUME_STATS", (_may("isOrder", False, FLAG),),
        reply_body="JSON: offsets by queue, of all groups",
    ),
    Request(
        codes.INVOKE_BROKER_TO_RESET_OFFSET, "INVOKE_BROKER_TO_RESET_OFFSET",
        (_must("group"), _must("topic"), _must("timestamp", NUMBER), _may("queueId", -1, NUMBER),
         _may("offset", None, NUMBER)),
        reply_body="JSON: offsets by queue",
    ),
    Request(
        codes.QUERY_CONSUME_QUEUE, "QUERY_CONSUME_QUEUE",
        (*_QUEUE, _must("index", NUMBER), _must("count", NUMBER), _may("consumerGroup")),
        reply_body="JSON: entries of a queue",
    ),
    Request(
        codes.GET_PENDING, "GET_PENDING", (_may("topic"), _may("unit", "minute"), _may("limit", 100, NUMBER)),
        reply_body="JSON: what waits, by topic and by time",
    ),
    Request(
        codes.GET_BULK_STATE, "GET_BULK_STATE",
        (_may("start", 0, NUMBER), _may("rowsMax", 0, NUMBER), _may("bytesMax", 0, NUMBER)),
        reply_body="JSON: where the pipeline is",
    ),
    Request(
        codes.GET_BULK_RANGE, "GET_BULK_RANGE",
        (_may("topic"), _may("queueId", 0, NUMBER), _may("start", 0, NUMBER), _may("times", False, FLAG)),
        ("number", "first", "length", "stored", "fileRows", "timeRow"), reply_body="rows that are in no file yet",
    ),
    Request(
        codes.REGISTER_PIPELINE, "REGISTER_PIPELINE", (), body="JSON: table and master",
        reply_body="JSON: where the pipeline is, and names of chunks",
    ),
    Request(codes.STAGE, "STAGE", (), body="JSON: epoch, far, horizon, chunks, rows in and out"),
    Request(codes.REPORT_BATCH, "REPORT_BATCH", (), body="JSON: names and values, as the pipeline likes"),
    Request(codes.GET_STATUS, "GET_STATUS", (), reply_body="JSON: broker, far queue, pipeline and parts"),
    Request(codes.ATTACH_TABLE, "ATTACH_TABLE", (_may("bulk"),)),
    Request(codes.GET_CHUNKS, "GET_CHUNKS", (), reply_body="JSON: staged chunks"),
    Request(
        codes.GET_FORECAST, "GET_FORECAST", (_may("topic"), _may("unit", "minute"), _may("bars", 60, NUMBER)),
        reply_body="JSON: what is due ahead, by time",
    ),
    Request(
        codes.GET_NEAR, "GET_NEAR", (_may("due", -1, NUMBER), _may("arrival", -1, NUMBER)), ("due", "arrival"),
        reply_body="rows of what waits in the wheel",
    ),
    Request(codes.JOB, "JOB", (), body="JSON: call, and what it needs", reply_body="JSON: where the job is"),
    Request(
        codes.GET_BULK_TOPIC, "GET_BULK_TOPIC", (_must("topic"), _may("at", -1, NUMBER)),
        reply_body="JSON: how far each queue of a topic goes",
    ),
)  # fmt: skip
REQUESTS = {row.code: row for row in _ROWS}


def values(row: Request, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request by their long names, as values. Raises ProtocolError that names the field."""
    return {field.name: _value(row, field, fields) for field in row.fields}


def _value(row: Request, field: Field, fields: Mapping[str, Any]) -> Any:
    found = fields.get(field.name)
    if found is None and field.letter:
        found = fields.get(field.letter)
    if found is None:
        if field.required:
            raise ProtocolError(f"{row.name} lacks the field {field.name}")
        return field.default
    if field.kind is Kind.NUMBER and found == "" and not field.required:
        return field.default
    try:
        return _READ[field.kind](found)
    except ValueError as error:
        said = f"{row.name} has {field.name} = {shown(found)}, expected a {field.kind.value}"
        raise ProtocolError(said) from error


def _flag(found: Any) -> bool:
    if type(found) is bool:
        return found
    text = plain_text(found).lower()
    if text not in ("true", "false", "1", "0", ""):
        raise ValueError
    return text in ("true", "1")


_READ = {Kind.TEXT: plain_text, Kind.NUMBER: whole_number, Kind.FLAG: _flag}

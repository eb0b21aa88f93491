"""The requests of the protocol, one row each: code, handler, right, fields, and what answers it.

This is the only list of requests. The server's dispatch finds the method that answers a request by its handler's name
("topic.put" is the method `put` of the object that server/requests/topic.py gives), clients write the codes, and the
pages of docs are compared with the rows. What its right is made of stands in rights.py.

A field is text, a whole number of 64 bits or a flag, and may be required. Fields that no row names are ignored: every
client adds some of its own (namespace, access key, zone). `read_fields` reads leniently: C++ writes bare numbers and
"1" for true, Java writes everything as text.
"""

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from postdate import contract
from postdate.errors import ProtocolError
from postdate.wire import rights
from postdate.wire.frame import HEADER_AT, JSON, header_end, plain_text, show_value, whole_number
from postdate.wire.rights import Right


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


class _Row(NamedTuple):
    code: int
    handler: str
    right: Right
    fields: tuple[Field, ...] = ()
    answer: tuple[str, ...] = ()
    body: str = ""
    answer_body: str = ""


def _must(name: str, kind: Kind = Kind.TEXT, letter: str = "") -> Field:
    return Field(name, kind, True, None, letter)


def _may(name: str, default: Any = "", kind: Kind = Kind.TEXT, letter: str = "") -> Field:
    return Field(name, kind, False, default, letter)


_NUMBER, _FLAG = Kind.NUMBER, Kind.FLAG

_SEND = (
    _may("producerGroup", letter="a"), _must("topic", letter="b"), _may("defaultTopic", letter="c"),
    _may("defaultTopicQueueNums", 4, _NUMBER, "d"), _must("queueId", _NUMBER, "e"), _may("sysFlag", 0, _NUMBER, "f"),
    _may("bornTimestamp", 0, _NUMBER, "g"), _may("flag", 0, _NUMBER, "h"), _may("properties", letter="i"),
    _may("reconsumeTimes", 0, _NUMBER, "j"), _may("unitMode", False, _FLAG, "k"),
    _may("maxReconsumeTimes", None, _NUMBER, "l"), _may("batch", False, _FLAG, "m"), _may("brokerName", letter="n"),
    _may("resend", False, _FLAG, "resend"),
)  # fmt: skip
_SENT = (
    "msgId", "queueId", "queueOffset", "transactionId", "recallHandle", "recallHandles", "outcome", "MSG_REGION",
    "TRACE_ON",
)  # fmt: skip
_PULL = (
    _must("consumerGroup"), _must("topic"), _must("queueId", _NUMBER), _must("queueOffset", _NUMBER),
    _must("maxMsgNums", _NUMBER), _may("sysFlag", 0, _NUMBER), _may("commitOffset", 0, _NUMBER),
    _may("suspendTimeoutMillis", 0, _NUMBER), _may("subscription"), _may("subVersion", 0, _NUMBER),
    _may("expressionType", "TAG"), _may("maxMsgBytes", 0, _NUMBER),
)  # fmt: skip
_PULLED = ("suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset")
_QUEUE = (_must("topic"), _must("queueId", _NUMBER))
_GROUP_QUEUE = (_must("consumerGroup"), *_QUEUE)
_POPPED = (*_GROUP_QUEUE, _must("extraInfo"), _must("offset", _NUMBER))


class Request(enum.IntEnum):
    """A request that the server answers. Its number is its code, so a member stands wherever a code is asked for."""

    handler: str  # who answers it: an object of server/requests and its method
    right: Right  # what it needs, where the broker has users
    fields: tuple[Field, ...]
    answer: tuple[str, ...]  # the fields of its answer
    body: str  # what its body is, in words
    answer_body: str

    def __new__(
        cls, code: int, handler: str, right: Right, fields: tuple[Field, ...], answer: tuple[str, ...], body: str,
        answer_body: str,
    ) -> "Request":  # fmt: skip
        self = int.__new__(cls, code)
        self._value_ = code
        self.handler, self.right, self.fields, self.answer = handler, right, fields, answer
        self.body, self.answer_body = body, answer_body
        return self

    # fmt: off
    SEND_MESSAGE = _Row(10, "send.collect", rights.PUBLISH, _SEND, _SENT, "the message's body")
    SEND_MESSAGE_V2 = _Row(310, "send.collect", rights.PUBLISH, _SEND, _SENT, "the message's body")
    SEND_BATCH_MESSAGE = _Row(320, "send.collect", rights.PUBLISH, _SEND, _SENT, "messages, see bodies.decode_batch")
    PULL_MESSAGE = _Row(11, "pull.pull", rights.READ_QUEUE, _PULL, _PULLED, answer_body="records")
    LITE_PULL_MESSAGE = _Row(361, "pull.pull", rights.READ_QUEUE, _PULL, _PULLED, answer_body="records")
    QUERY_CONSUMER_OFFSET = _Row(
        14, "group.query_offset", rights.READ_OFFSET,
        (*_GROUP_QUEUE, _may("setZeroIfNotFound", True, _FLAG)), ("offset",),
    )
    UPDATE_CONSUMER_OFFSET = _Row(
        15, "group.commit_offset", rights.WRITE_OFFSET, (*_GROUP_QUEUE, _must("commitOffset", _NUMBER)),
    )
    SEARCH_OFFSET_BY_TIMESTAMP = _Row(
        29, "topic.search_offset", rights.LOOK_AT_TOPIC,
        (*_QUEUE, _must("timestamp", _NUMBER), _may("boundaryType", "LOWER")),
        ("offset",),
    )
    GET_MAX_OFFSET = _Row(30, "topic.get_max_offset", rights.LOOK_AT_TOPIC, _QUEUE, ("offset",))
    GET_MIN_OFFSET = _Row(31, "topic.get_min_offset", rights.LOOK_AT_TOPIC, _QUEUE, ("offset",))
    GET_EARLIEST_MSG_STORETIME = _Row(32, "topic.get_earliest_time", rights.LOOK_AT_TOPIC, _QUEUE, ("timestamp",))
    VIEW_MESSAGE_BY_ID = _Row(
        33, "find.view_message", rights.VIEW_MESSAGE, (_must("offset", _NUMBER),), answer_body="one record",
    )
    QUERY_MESSAGE = _Row(
        12, "find.query_messages", rights.SUBSCRIBE,
        (_must("topic"), _must("key"), _may("maxNum", 32, _NUMBER), _may("beginTimestamp", 0, _NUMBER),
         _may("endTimestamp", None, _NUMBER), _may("_UNIQUE_KEY_QUERY", False, _FLAG), _may("indexType")),
        ("indexLastUpdateTimestamp", "indexLastUpdatePhyoffset", "unread"), answer_body="records",
    )
    HEART_BEAT = _Row(
        34, "group.take_heartbeat", rights.HEARTBEAT, (), ("IS_SUPPORT_HEART_BEAT_V2", "IS_SUB_CHANGE"),
        "JSON: client, its groups and subscriptions",
    )
    UNREGISTER_CLIENT = _Row(
        35, "group.unregister", rights.JOIN_GROUP, (_must("clientID"), _may("producerGroup"), _may("consumerGroup")),
    )
    CONSUMER_SEND_MSG_BACK = _Row(
        36, "group.send_back", rights.SEND_BACK,
        (_must("group"), _must("offset", _NUMBER), _may("delayLevel", 0, _NUMBER), _may("originMsgId"),
         _may("originTopic"), _may("maxReconsumeTimes", None, _NUMBER)),
    )
    END_TRANSACTION = _Row(
        37, "transactions.end", rights.END_TRANSACTION,
        (_may("topic"), _may("producerGroup"), _may("tranStateTableOffset", None, _NUMBER),
         _must("commitLogOffset", _NUMBER), _must("commitOrRollback", _NUMBER),
         _may("fromTransactionCheck", False, _FLAG), _may("msgId"), _may("transactionId")),
        ("outcome",),
    )
    GET_CONSUMER_LIST_BY_GROUP = _Row(
        38, "group.list_members", rights.LIST_MEMBERS,
        (_must("consumerGroup"), _may("topic")), answer_body="JSON: client ids",
    )
    LOCK_BATCH_MQ = _Row(41, "group.lock", rights.LOCK, body="JSON: group, client, queues", answer_body="JSON: queues")
    UNLOCK_BATCH_MQ = _Row(42, "group.unlock", rights.LOCK, body="JSON: group, client, queues")
    CHECK_CLIENT_CONFIG = _Row(46, "group.check_subscription", rights.SIGNED_IN, body="JSON: a subscription")
    RECALL_MESSAGE = _Row(
        370, "recall.recall", rights.PUBLISH,
        (_must("topic"), _may("producerGroup"), _may("recallHandle"), _may("key"), _may("due", 0, _NUMBER)),
        ("msgId", "outcome"),
    )
    QUERY_ASSIGNMENT = _Row(
        400, "group.assign_queues", rights.ASSIGN, body="JSON: topic, group, client, strategy",
        answer_body="JSON: queues and how to consume them",
    )
    SET_MESSAGE_REQUEST_MODE = _Row(401, "group.set_mode", rights.SET_MODE, body="JSON: topic, group, PULL or POP")
    POP_MESSAGE = _Row(
        200_050, "pop.pop", rights.READ_QUEUE,
        (_must("consumerGroup"), _must("topic"), _must("queueId", _NUMBER), _must("maxMsgNums", _NUMBER),
         _must("invisibleTime", _NUMBER), _may("pollTime", 0, _NUMBER), _may("bornTime", 0, _NUMBER),
         _may("initMode", 0, _NUMBER), _may("expType", "TAG"), _may("exp"), _may("order", False, _FLAG),
         _may("attemptId"), _may("maxReconsumeTimes", None, _NUMBER), _may("readyOnly", False, _FLAG)),
        ("popTime", "invisibleTime", "reviveQid", "restNum", "startOffsetInfo", "msgOffsetInfo", "orderCountInfo"),
        answer_body="records",
    )
    ACK_MESSAGE = _Row(200_051, "pop.acknowledge", rights.READ_QUEUE, _POPPED)
    BATCH_ACK_MESSAGE = _Row(
        200_151, "pop.acknowledge_batch", rights.ACKNOWLEDGE_BATCH, body="JSON: groups, queues, offsets, pop times",
    )
    CHANGE_MESSAGE_INVISIBLETIME = _Row(
        200_053, "pop.change_invisible_time", rights.READ_QUEUE,
        (*_POPPED, _must("invisibleTime", _NUMBER), _may("reason"), _may("notBegun", False, _FLAG)),
        ("popTime", "invisibleTime", "reviveQid", "outcome"),
    )
    GET_ROUTEINFO_BY_TOPIC = _Row(105, "route.get_route", rights.OPEN, (_must("topic"),), answer_body="JSON: a route")
    UPDATE_AND_CREATE_TOPIC = _Row(
        17, "topic.put", rights.PUT_TOPIC,
        (_must("topic"), _may("readQueueNums", 8, _NUMBER), _may("writeQueueNums", 8, _NUMBER),
         _may("perm", 6, _NUMBER), _may("attributes")),
    )
    DELETE_TOPIC_IN_BROKER = _Row(215, "topic.delete", rights.DELETE_TOPIC, (_must("topic"),), ("cancelled",))
    GET_TOPIC_STATS_INFO = _Row(
        202, "topic.get_stats", rights.GET_TOPIC, (_must("topic"),), answer_body="JSON: offsets by queue",
    )
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = _Row(
        206, "route.list_topics", rights.LIST_TOPICS, answer_body="JSON: names of topics",
    )
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = _Row(200, "group.put", rights.PUT_GROUP, body="JSON: settings of a group")
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = _Row(
        201, "group.list_settings", rights.LIST_GROUPS, answer_body="JSON: settings of all groups",
    )
    DELETE_SUBSCRIPTIONGROUP = _Row(207, "group.delete", rights.DELETE_GROUP, (_must("groupName"),))
    GET_CONSUME_STATS = _Row(
        208, "tools.get_progress", rights.GET_GROUP,
        (_must("consumerGroup"), _may("topic")), answer_body="JSON: offsets by queue",
    )
    GET_TOPIC_CONFIG = _Row(
        351, "topic.get_settings", rights.KNOW_TOPIC, (_must("topic"),), answer_body="JSON: a topic",
    )
    DELETE_TOPIC_IN_NAMESRV = _Row(216, "route.forget_topic", rights.FORGET_TOPIC, (_must("topic"),))
    GET_BROKER_CLUSTER_INFO = _Row(
        106, "route.get_cluster", rights.OPEN, answer_body="JSON: clusters and their brokers",
    )
    WIPE_WRITE_PERM_OF_BROKER = _Row(
        205, "route.wipe_write", rights.CHANGE_CLUSTER, (_must("brokerName"),), ("wipeTopicCount",),
    )
    ADD_WRITE_PERM_OF_BROKER = _Row(
        327, "route.add_write", rights.CHANGE_CLUSTER, (_must("brokerName"),), ("addTopicCount",),
    )
    PUT_KV_CONFIG = _Row(
        100, "values.put", rights.CHANGE_CLUSTER, (_must("namespace"), _must("key"), _must("value")),
    )
    GET_KV_CONFIG = _Row(101, "values.get", rights.LOOK_AT_CLUSTER, (_must("namespace"), _must("key")), ("value",))
    DELETE_KV_CONFIG = _Row(102, "values.delete", rights.DELETE_VALUE, (_must("namespace"), _must("key")))
    GET_KVLIST_BY_NAMESPACE = _Row(
        219, "values.list_all", rights.LOOK_AT_CLUSTER, (_must("namespace"),), answer_body="JSON: values by key",
    )
    UPDATE_NAMESRV_CONFIG = _Row(318, "status.change_settings", rights.CHANGE_CLUSTER, body="lines of name=value")
    GET_NAMESRV_CONFIG = _Row(319, "status.get_settings", rights.LOOK_AT_CLUSTER, answer_body="lines of name=value")
    UPDATE_BROKER_CONFIG = _Row(25, "status.change_settings", rights.CHANGE_CLUSTER, body="lines of name=value")
    GET_BROKER_CONFIG = _Row(
        26, "status.get_settings", rights.LOOK_AT_CLUSTER, (), ("version",), answer_body="lines of name=value",
    )
    GET_BROKER_RUNTIME_INFO = _Row(
        28, "status.get_figures", rights.LOOK_AT_CLUSTER, answer_body="JSON: names and values",
    )
    GET_BROKER_HA_STATUS = _Row(
        907, "status.get_replicas", rights.LOOK_AT_CLUSTER, answer_body="JSON: how far replicas are: there are none",
    )
    CLEAN_EXPIRED_CONSUMEQUEUE = _Row(306, "status.remove_expired", rights.CHANGE_CLUSTER, (), ("removed",))
    CLEAN_UNUSED_TOPIC = _Row(316, "status.remove_expired", rights.CHANGE_CLUSTER, (), ("removed",))
    DELETE_EXPIRED_COMMITLOG = _Row(329, "status.remove_expired", rights.CHANGE_CLUSTER, (), ("removed",))
    VIEW_BROKER_STATS_DATA = _Row(
        315, "status.get_rates", rights.LOOK_AT_CLUSTER, (_must("statsName"), _must("statsKey")),
        answer_body="JSON: counts of a minute, an hour and a day",
    )
    GET_CONSUMER_CONNECTION_LIST = _Row(
        203, "tools.list_consumers", rights.GET_GROUP,
        (_must("consumerGroup"),), answer_body="JSON: members and subscriptions",
    )
    GET_PRODUCER_CONNECTION_LIST = _Row(
        204, "tools.list_producers", rights.LOOK_AT_CLUSTER, (_must("producerGroup"),), answer_body="JSON: producers",
    )
    GET_ALL_PRODUCER_INFO = _Row(
        328, "tools.list_all_producers", rights.LOOK_AT_CLUSTER, answer_body="JSON: producers by group",
    )
    QUERY_TOPIC_CONSUME_BY_WHO = _Row(
        300, "tools.list_readers", rights.LIST_READERS, (_must("topic"),), answer_body="JSON: names of groups",
    )
    GET_CONSUMER_RUNNING_INFO = _Row(
        307, "tools.relay_running_info", rights.GET_GROUP,
        (_must("consumerGroup"), _must("clientId"), _may("jstackEnable", False, _FLAG)),
        answer_body="what the client answers",
    )
    CONSUME_MESSAGE_DIRECTLY = _Row(
        309, "tools.relay_message", rights.CONSUME_DIRECTLY,
        (_must("consumerGroup"), _must("clientId"), _must("msgId")),
        answer_body="what the client answers",
    )
    GET_BROKER_CONSUME_STATS = _Row(
        317, "tools.get_all_progress", rights.LOOK_AT_CLUSTER, (_may("isOrder", False, _FLAG),),
        answer_body="JSON: offsets by queue, of all groups",
    )
    INVOKE_BROKER_TO_RESET_OFFSET = _Row(
        222, "tools.reset_offsets", rights.RESET_OFFSETS,
        (_must("group"), _must("topic"), _must("timestamp", _NUMBER), _may("queueId", -1, _NUMBER),
         _may("offset", None, _NUMBER), _may("dryRun", False, _FLAG)),
        answer_body="JSON: offsets by queue",
    )
    QUERY_CONSUME_QUEUE = _Row(
        321, "find.list_entries", rights.LOOK_AT_TOPIC,
        (*_QUEUE, _must("index", _NUMBER), _must("count", _NUMBER), _may("consumerGroup")),
        answer_body="JSON: entries of a queue",
    )
    GET_PENDING = _Row(
        9_801, "pending.count", rights.COUNT_TOPICS,
        (_may("topic"), _may("unit", "minute"), _may("limit", 100, _NUMBER)),
        answer_body="JSON: what waits, by topic and by time",
    )
    GET_BULK_STATE = _Row(
        contract.GET_BULK_STATE, "pipeline.state", rights.LOOK_AT_CLUSTER,
        (_may("start", 0, _NUMBER), _may("rowsMax", 0, _NUMBER), _may("bytesMax", 0, _NUMBER), _may("note", None)),
        answer_body="JSON: where the pipeline is",
    )
    GET_BULK_RANGE = _Row(
        9_803, "pipeline.rows", rights.LOOK_AT_CLUSTER,
        (_may("topic"), _may("queueId", 0, _NUMBER), _may("start", 0, _NUMBER), _may("times", False, _FLAG)),
        ("number", "first", "length", "stored", "fileRows", "timeRow"), answer_body="rows that are in no file yet",
    )
    REGISTER_PIPELINE = _Row(
        contract.REGISTER_PIPELINE, "pipeline.register", rights.INTERNAL, body="JSON: table and master",
        answer_body="JSON: where the pipeline is, and names of chunks",
    )
    STAGE = _Row(
        contract.STAGE, "pipeline.stage", rights.INTERNAL,
        body="JSON: epoch, far, horizon, chunks, rows in and out, brought",
    )
    REPORT_BATCH = _Row(
        contract.REPORT_BATCH, "pipeline.report", rights.INTERNAL, body="JSON: names and values, as the pipeline likes",
    )
    GET_STATUS = _Row(
        contract.GET_STATUS, "status.get_overview", rights.LOOK_AT_CLUSTER,
        answer_body="JSON: broker, far queue, pipeline and parts"
    )  # fmt: skip
    ATTACH_TABLE = _Row(9_808, "table.attach", rights.INTERNAL, (_may("bulk"), _may("problem")))
    GET_CHUNKS = _Row(9_810, "pipeline.chunks", rights.INTERNAL, answer_body="JSON: staged chunks")
    GET_FORECAST = _Row(
        9_812, "pending.forecast", rights.COUNT_TOPICS,
        (_may("topic"), _may("unit", "minute"), _may("bars", 60, _NUMBER)),
        answer_body="JSON: what is due ahead, by time",
    )
    GET_NEAR = _Row(
        9_813, "pipeline.near", rights.INTERNAL,
        (_may("due", -1, _NUMBER), _may("arrival", -1, _NUMBER)), ("due", "arrival"),
        answer_body="rows of what waits in the wheel",
    )
    JOB = _Row(
        contract.JOB, "jobs.answer", rights.JOB,
        body="JSON: call, and what it needs", answer_body="JSON: where the job is",
    )
    GET_BULK_TOPIC = _Row(
        contract.GET_BULK_TOPIC, "pipeline.topic", rights.READ_BULK_TOPIC,
        (_may("topic", None), _may("at", -1, _NUMBER)),
        answer_body="JSON: how far each queue of a topic goes, or which queue number is which queue",
    )
    RETRY_MESSAGE = _Row(
        9_821, "pop.retry", rights.READ_QUEUE,
        (*_GROUP_QUEUE, _must("offset", _NUMBER), _may("delay", -1, _NUMBER), _may("maxReconsumeTimes", None, _NUMBER),
         _may("reason"), _may("reconsumeTimes", 0, _NUMBER)),
        ("delay", "outcome"),
    )
    GET_DEAD_LETTERS = _Row(
        9_822, "dead_letters.list_open", rights.JOIN_GROUP,
        (_must("consumerGroup"), _must("queueId", _NUMBER), _must("offset", _NUMBER)),
        ("nextQueueId", "nextOffset"), answer_body="records",
    )
    FINISH_DEAD_LETTERS = _Row(
        9_823, "dead_letters.finish", rights.FINISH_LETTERS,
        body="JSON: group, and letters by queue and offset", answer_body="JSON: how many",
    )
    CANCEL_KEY = _Row(
        9_824, "recall.cancel_key", rights.PUBLISH, (_must("topic"), _must("key"), _may("only", False, _FLAG)),
        answer_body="JSON: what became of each message",
    )
    MOVE_MESSAGE = _Row(
        9_825, "move.move", rights.PUBLISH,
        (_must("topic"), _may("key"), _may("recallHandle"), _may("due", None, _NUMBER), _may("delay", None, _NUMBER),
         _may("by", None, _NUMBER), _may("only", False, _FLAG)),
        answer_body="JSON: what became of each message",
    )
    GET_TRANSACTIONS = _Row(
        9_830, "transactions.list_open", rights.LOOK_AT_CLUSTER,
        (_may("id"), _may("topic"), _may("after", -1, _NUMBER), _may("limit", 100, _NUMBER)),
        answer_body="JSON: transactions that are open",
    )
    RESOLVE_TRANSACTION = _Row(
        9_831, "transactions.end_by_operator", rights.CHANGE_CLUSTER, (_must("id"), _must("commit", _FLAG)),
        ("outcome",),
    )
    AUTH_CREATE_USER = _Row(
        3_001, "access.create_user", rights.CHANGE_CLUSTER, (_must("username"),), body="JSON: a user with its password",
    )
    AUTH_UPDATE_USER = _Row(
        3_002, "access.update_user", rights.CHANGE_CLUSTER, (_must("username"),), body="JSON: what changes of a user",
    )
    AUTH_DELETE_USER = _Row(3_003, "access.delete_user", rights.CHANGE_CLUSTER, (_must("username"),))
    AUTH_GET_USER = _Row(
        3_004, "access.get_user", rights.LOOK_AT_CLUSTER, (_must("username"),), answer_body="JSON: a user, no password",
    )
    AUTH_LIST_USERS = _Row(
        3_005, "access.list_users", rights.LOOK_AT_CLUSTER, (_may("filter"),), answer_body="JSON: users, no passwords",
    )
    AUTH_CREATE_ACL = _Row(
        3_006, "access.put_rules", rights.CHANGE_CLUSTER, (_must("subject"),), body="JSON: rules of a user",
    )
    AUTH_UPDATE_ACL = _Row(
        3_007, "access.put_rules", rights.CHANGE_CLUSTER, (_must("subject"),), body="JSON: rules of a user",
    )
    AUTH_DELETE_ACL = _Row(
        3_008, "access.delete_rules", rights.CHANGE_CLUSTER, (_must("subject"), _may("policyType"), _may("resource")),
    )
    AUTH_GET_ACL = _Row(
        3_009, "access.get_rules", rights.LOOK_AT_CLUSTER, (_must("subject"),), answer_body="JSON: rules of a user",
    )
    AUTH_LIST_ACL = _Row(
        3_010, "access.list_rules", rights.LOOK_AT_CLUSTER, (_may("subjectFilter"), _may("resourceFilter")),
        answer_body="JSON: rules by user",
    )
    # fmt: on

    @property
    def code(self) -> int:
        return int(self)

    def read_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a request's fields by their long names. Raises ProtocolError that names the field."""
        return {field.name: _read_field(self, field, fields) for field in self.fields}

    def read_name(self, name: str, fields: Mapping[str, Any]) -> str:
        """Returns the value of a field that names something, as `read_fields` does; empty where it is missing and may
        be.
        """
        field = next(field for field in self.fields if field.name == name)
        return _read_field(self, field, fields) or ""


REQUESTS = {int(request): request for request in Request}


class ClientRequest(enum.IntEnum):
    """A request that the broker sends to a client. Beside these it hands on 307 and 309, which operators ask it."""

    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    # Ours, to the process that has attached as the reader of the table.
    FIND_IN_TABLE = 9_809
    COUNT_TABLE = 9_811
    FIND_KEY_IN_TABLE = 9_826


def _read_field(request: Request, field: Field, fields: Mapping[str, Any]) -> Any:
    found = fields.get(field.name)
    if found is None and field.letter:
        found = fields.get(field.letter)
    if found is None:
        if field.required:
            raise ProtocolError(f"{request.name} lacks the field {field.name}")
        return field.default
    if field.kind is Kind.NUMBER and found == "" and not field.required:
        return field.default
    try:
        return _READ[field.kind](found)
    except ValueError as error:
        raise ProtocolError(
            f"{request.name} has {field.name} = {show_value(found)}, expected a {field.kind.value}"
        ) from error


def _read_flag(found: Any) -> bool:
    if type(found) is bool:
        return found
    text = plain_text(found).lower()
    if text not in ("true", "false", "1", "0", ""):
        raise ValueError
    return text in ("true", "1")


_READ = {Kind.TEXT: plain_text, Kind.NUMBER: whole_number, Kind.FLAG: _read_flag}

# -- sends, read in one step ------------------------------------------------------------------------------------

# Sends are what a broker reads most, and reading a header into a dictionary to take eight fields out of it costs a
# tenth of a send. Here msgspec reads the fields straight into their types. A header that does not fit (another client,
# another code, a field missing) is no error: `frame.decode` reads it, and `Request.read_fields` its fields.

_OPENING = f'{{"code":{Request.SEND_MESSAGE_V2.code},'.encode()
_LETTERS = {field.name: field.letter for field in _SEND}


_NAMES = {
    "queue_id": "queueId",
    "sys_flag": "sysFlag",
    "born_at_ms": "bornTimestamp",
    "reconsume_times": "reconsumeTimes",
}


class SendFields(msgspec.Struct, gc=False, rename=lambda name: _LETTERS[_NAMES.get(name, name)]):
    """The fields of SEND_MESSAGE_V2 that every message needs."""

    topic: str
    queue_id: int
    sys_flag: int
    born_at_ms: int
    flag: int
    properties: str
    reconsume_times: int
    batch: str = "false"
    resend: str = "false"


class SendHeader(msgspec.Struct, gc=False, rename={"fields": "extFields"}):
    """The part of a send's header that the server needs."""

    fields: SendFields
    opaque: int
    flag: int = 0


# Not strict: numbers come as text.
_decode_header = msgspec.json.Decoder(SendHeader, strict=False).decode


def decode_send(frame: bytes) -> tuple[SendHeader, bytes] | None:
    """Returns the header and the body of a send; None for a frame that must be read in the general way."""
    if not frame.startswith(_OPENING, HEADER_AT) or frame[0] != JSON:
        return None
    stop = header_end(frame)
    try:
        return _decode_header(frame[HEADER_AT:stop]), frame[stop:]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class SignedSend(NamedTuple):
    """A send whose fields are there for its signature, too."""

    header: SendHeader
    fields: Mapping[str, Any]
    body: bytes


def decode_signed_send(frame: bytes) -> SignedSend | None:
    """Returns a send as `decode_send` does, with all of its fields; None for a frame that must be read in the general
    way. What is sent is taken from the very fields that the signature is about.
    """
    if not frame.startswith(_OPENING, HEADER_AT) or frame[0] != JSON:
        return None
    stop = header_end(frame)
    try:
        values = orjson.loads(frame[HEADER_AT:stop])
        header = msgspec.convert(values, SendHeader, strict=False)
        return SignedSend(header, values["extFields"], frame[stop:])
    except (msgspec.MsgspecError, ValueError):
        return None

"""What `pending`, `find`, `topic` and `group` ask a broker, as values: one function per request of the protocol.

All take the route address and raise PostdateError where no broker is reached or it refuses.
"""

from typing import Any, NamedTuple

import orjson

from postdate.client import BrokerError
from postdate.client.ask import ask
from postdate.client.received import decompress
from postdate.errors import ProtocolError
from postdate.message import (
    PROPERTY_DUE_MS,
    PROPERTY_KEYS,
    PROPERTY_STATE,
    PROPERTY_TAGS,
    PROPERTY_UNIQ_KEY,
    decode_properties,
)
from postdate.wire import bodies, codes
from postdate.wire.ids import message_id
from postdate.wire.records import Record, decode_records
from postdate.wire.requests import Request


class Topic(NamedTuple):
    """How many queues a topic has, and what may be done with them."""

    name: str
    read_queue_count: int
    write_queue_count: int
    perm: int


class QueueRange(NamedTuple):
    """The offsets of a queue: the first that is there, and the one that the next message gets."""

    queue_id: int
    min_offset: int
    max_offset: int


class Progress(NamedTuple):
    """How far a group has read a queue."""

    topic: str
    queue_id: int
    committed: int
    max_offset: int

    @property
    def lag(self) -> int:
        return self.max_offset - self.committed


class FoundMessage(NamedTuple):
    """A message that was looked up. `at_ms` is when it became visible, or was stored where it is not."""

    topic: str
    id: str
    keys: str
    tag: str
    state: str
    due_at_ms: int | None
    at_ms: int
    queue_id: int
    queue_offset: int
    body: bytes


# -- what waits -------------------------------------------------------------------------------------------------


def job(address: str | None, wish: dict[str, Any]) -> dict[str, Any]:
    """A question about jobs, see the broker's JOB."""
    return bodies.load(ask(address, Request.JOB, body=orjson.dumps(wish)).body, "what is said of a job")


def pending(address: str | None, topic: str = "", unit: str = "minute", limit: int = 100) -> dict[str, Any]:
    """{"total", "bytes", "near", "far", "table", "unread", "topics": [...], "unit", "times": [...], "truncated"}"""
    fields = {"topic": topic, "unit": unit, "limit": limit}
    return bodies.load(ask(address, Request.GET_PENDING, fields).body, "what waits")


def forecast(address: str | None, topic: str, unit: str, bars: int) -> dict[str, Any]:
    """{"unit", "topic", "unread", "bars": [{"from_ms", "rows", "busiest_ms", "busiest_rows"}]}"""
    fields = {"topic": topic, "unit": unit, "bars": bars}
    return bodies.load(ask(address, Request.GET_FORECAST, fields).body, "what is ahead")


def status(address: str | None) -> dict[str, Any]:
    """{"broker": {...}, "far": {...}, "table", "reports": [...], "parts": {...}}"""
    return bodies.load(ask(address, Request.GET_STATUS).body, "the state of a broker")


def find(address: str | None, topic: str, key: str, limit: int) -> list[FoundMessage]:
    """The messages of a key, newest first."""
    try:
        answer = ask(address, Request.QUERY_MESSAGE, {"topic": topic, "key": key, "maxNum": limit})
    except BrokerError as error:
        if error.code != codes.QUERY_NOT_FOUND:
            raise
        return []
    return [_found(record) for record in decode_records(answer.body)]


def _found(record: Record) -> FoundMessage:
    properties = decode_properties(record.properties)
    due_at_ms = properties.get(PROPERTY_DUE_MS)
    return FoundMessage(
        record.topic, properties.get(PROPERTY_UNIQ_KEY) or message_id(record.store_host, record.offset),
        properties.get(PROPERTY_KEYS, ""), properties.get(PROPERTY_TAGS, ""),
        properties.get(PROPERTY_STATE, "waiting" if record.queue_offset < 0 else "visible"),
        int(due_at_ms) if due_at_ms else None, record.stored_at_ms, record.queue_id, record.queue_offset,
        _body(record),
    )  # fmt: skip


def _body(record: Record) -> bytes:
    """As its producer gave it; as it lies there where it is compressed in a way that we cannot read."""
    try:
        return decompress(record.body, record.sys_flag)
    except ProtocolError:
        return record.body


# -- topics -----------------------------------------------------------------------------------------------------


def topic_names(address: str | None) -> list[str]:
    body = ask(address, Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body
    return sorted(bodies.load(body, "a list of topics").get("topicList") or ())


def topic(address: str | None, name: str) -> Topic:
    """Raises TopicNotFound, also for one that only has the route that it would have, as TBW102."""
    queue_ranges(address, name)
    route = bodies.decode_route(ask(address, Request.GET_ROUTEINFO_BY_TOPIC, {"topic": name}).body)
    _, read_queue_count, write_queue_count, perm = route.queues[0]
    return Topic(name, read_queue_count, write_queue_count, perm)


def queue_ranges(address: str | None, name: str) -> list[QueueRange]:
    """Raises TopicNotFound."""
    body = ask(address, Request.GET_TOPIC_STATS_INFO, {"topic": name}).body
    table = bodies.decode_by_queue(body, "offsetTable")
    return sorted(QueueRange(queue.queue_id, row["minOffset"], row["maxOffset"]) for queue, row in table.items())


def put_topic(address: str | None, wanted: Topic) -> None:
    """Creates a topic or changes it."""
    fields = {
        "topic": wanted.name, "defaultTopic": "TBW102", "readQueueNums": wanted.read_queue_count,
        "writeQueueNums": wanted.write_queue_count, "perm": wanted.perm, "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0, "order": "false",
    }  # fmt: skip
    ask(address, Request.UPDATE_AND_CREATE_TOPIC, fields)


def delete_topic(address: str | None, name: str) -> int:
    """Returns how many waiting messages were cancelled with it."""
    return int(ask(address, Request.DELETE_TOPIC_IN_BROKER, {"topic": name}).fields.get("cancelled") or 0)


# -- groups -----------------------------------------------------------------------------------------------------


def group_names(address: str | None) -> list[str]:
    body = ask(address, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body
    return sorted(bodies.load(body, "a list of groups").get("subscriptionGroupTable") or ())


def put_group(address: str | None, name: str) -> None:
    ask(address, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=orjson.dumps({"groupName": name}))


def delete_group(address: str | None, name: str) -> None:
    ask(address, Request.DELETE_SUBSCRIPTIONGROUP, {"groupName": name})


def members(address: str | None, group: str) -> list[str]:
    """The ids of the clients that read for a group at this moment."""
    try:
        answer = ask(address, Request.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    except BrokerError as error:
        if error.code != codes.SYSTEM_ERROR:
            raise
        return []  # RocketMQ's way to say that nobody is there
    return sorted(bodies.decode_consumer_ids(answer.body))


def progress(address: str | None, group: str) -> list[Progress]:
    body = ask(address, Request.GET_CONSUME_STATS, {"consumerGroup": group}).body
    table = bodies.decode_by_queue(body, "offsetTable")
    return sorted(
        Progress(queue.topic, queue.queue_id, row["consumerOffset"], row["brokerOffset"])
        for queue, row in table.items()
    )

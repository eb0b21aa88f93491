"""Topics: operators define them, clients ask how far their queues go, and some are created on first use."""

import logging
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from postdate.broker.broker import Broker
from postdate.broker.sending import refuse_system_topic
from postdate.broker.view import PERM_INHERIT, PERM_READ, PERM_WRITE, TopicInfo
from postdate.clock import Clock
from postdate.config import Settings
from postdate.errors import GroupNotFound, IllegalMessage, NoPermission, TopicNotFound
from postdate.message import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX, TOPIC_CHARACTERS_MAX, check_group, check_topic
from postdate.server.connection import Connection
from postdate.server.sessions import Sessions
from postdate.server.sessions.meter import Came, Span
from postdate.wire import bodies, codes
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, reply

logger = logging.getLogger("postdate.server")

DEFAULT_TOPIC = "TBW102"  # clients ask for its route to learn how a new topic would look
_GROUP_TOPIC_QUEUES = 1
_NEW_TOPIC_QUEUES = 4  # as many as RocketMQ's clients ask for
_ATTRIBUTE = re.compile(r"\+([^=,]+)=([^,]*)|-([^,]+)")  # changes such as "+message.type=DELAY,-other"


class Topics:
    """Answers requests about topics and their queues."""

    def __init__(self, broker: Broker, clock: Clock, sessions: Sessions) -> None:
        self._broker, self._clock = broker, clock
        self._offsets = sessions.offsets
        self._pullers = sessions.pullers
        self._meter = sessions.meter

    # -- definitions --------------------------------------------------------------------------------------------

    def put(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        known = self._broker.view.find_topic(asked["topic"])
        attributes = dict(known.attributes if known else {})
        for added, value, removed in _ATTRIBUTE.findall(asked["attributes"]):
            if added:
                attributes[added] = value
            else:
                attributes.pop(removed, None)
        self._broker.put_topic(
            asked["topic"], self._clock.now_ms(), read_queue_count=asked["readQueueNums"],
            write_queue_count=asked["writeQueueNums"], perm=asked["perm"], attributes=attributes,
        )  # fmt: skip
        text = "topic %s is changed by %s: %d queues" if known else "topic %s is made by %s: %d queues"
        logger.info(text, asked["topic"], connection, asked["readQueueNums"])
        return reply(command, codes.SUCCESS)

    def delete(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers how many messages waited for the topic: they are cancelled. Tools also ask to delete the topics of a
        group, which are deleted with the group or were never created.
        """
        name = asked["topic"]
        if name.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX)) and not self._broker.view.has_topic(name):
            return reply(command, codes.SUCCESS, {"cancelled": 0})
        return reply(command, codes.SUCCESS, {"cancelled": self.remove(name)})

    def remove(self, name: str) -> int:
        """Deletes a topic; returns how many messages it cancels."""
        count = self._broker.delete_topic(name, self._clock.now_ms())
        self._offsets.forget_topic(name)
        self._pullers.forget_topic(name)
        logger.info("topic %s is deleted, and %d messages that waited for it are cancelled", name, count)
        return count

    def get_settings(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._broker.view.topic(asked["topic"])
        settings = {
            "attributes": topic.attributes, "order": False, "perm": topic.perm, "readQueueNums": topic.read_queue_count,
            "topicFilterType": "SINGLE_TAG", "topicName": topic.name, "topicSysFlag": 0,
            "writeQueueNums": topic.write_queue_count,
        }  # fmt: skip
        return reply(command, codes.SUCCESS, body=orjson.dumps(settings))

    # -- how far queues go --------------------------------------------------------------------------------------

    def get_stats(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._broker.view.topic(asked["topic"])
        table = {}
        for queue_id in range(max(topic.read_queue_count, topic.write_queue_count)):
            low, high = self._broker.offsets(topic.name, queue_id)
            last_at_ms = self._broker.view.visible_at_ms(topic.name, queue_id, high - 1) if low < high else 0
            table[QueueName(topic.name, self._broker.settings.broker_name, queue_id)] = {
                "lastUpdateTimestamp": last_at_ms, "maxOffset": high, "minOffset": low,
            }  # fmt: skip
        now_ns = self._clock.elapsed_ns()
        self._meter.tick(now_ns)
        rate = self._meter.rate(Came(topic.name), Span.MINUTE, now_ns)
        body = bodies.encode_by_queue("offsetTable", table, {"topicPutTps": rate.per_second})
        return reply(command, codes.SUCCESS, body=body)

    def get_max_offset(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"offset": self._bounds(asked)[1]})

    def get_min_offset(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"offset": self._bounds(asked)[0]})

    def _bounds(self, asked: Mapping[str, Any]) -> tuple[int, int]:
        return self._broker.offsets(asked["topic"], asked["queueId"])

    def search_offset(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the first offset visible at or after an instant; for boundary UPPER the last one at or before it."""
        topic, queue_id, at_ms = asked["topic"], asked["queueId"], asked["timestamp"]
        offset = self._broker.search(topic, queue_id, at_ms)
        if asked["boundaryType"].upper() == "UPPER":
            offset = max(self._broker.search(topic, queue_id, at_ms + 1) - 1, self._bounds(asked)[0])
        return reply(command, codes.SUCCESS, {"offset": offset})

    def get_earliest_time(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers when the first message of a queue became visible; -1 for an empty queue."""
        low, high = self._bounds(asked)
        at_ms = self._broker.view.visible_at_ms(asked["topic"], asked["queueId"], low) if low < high else -1
        return reply(command, codes.SUCCESS, {"timestamp": at_ms})


class PromisedTopic(NamedTuple):
    """A topic that does not exist yet, as it will be when it is first used."""

    name: str
    read_queue_count: int
    write_queue_count: int
    perm: int = PERM_READ | PERM_WRITE
    attributes: Mapping[str, str] = MappingProxyType({})
    numbers: Sequence[int] = ()


class AutoCreation:
    """Creates topics and groups on first use, as RocketMQ does. Every call that creates one waits for the disk."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker, self._clock = broker, clock

    @property
    def _settings(self) -> Settings:
        return self._broker.settings

    @property
    def new_queue_count(self) -> int:
        """How many queues a new topic gets where nobody asks for a number."""
        return min(_NEW_TOPIC_QUEUES, self._settings.default_queue_count)

    def use_topic(self, name: str, queue_count: int = _NEW_TOPIC_QUEUES) -> TopicInfo:
        """Returns a topic, created if need be. Raises TopicNotFound where it may not be created."""
        known = self._broker.view.find_topic(name)
        if known is not None:
            return known
        check_topic(name)
        if name.startswith(RETRY_TOPIC_PREFIX):
            return self.use_retry_topic(name.removeprefix(RETRY_TOPIC_PREFIX))
        if not self._settings.auto_create_topics:
            raise TopicNotFound(f"topic {name!r} does not exist, and auto_create_topics is off: create it first")
        return self._put_topic(name, max(1, min(queue_count, self._settings.default_queue_count)))

    def promise_topic(self, name: str) -> TopicInfo:
        """Returns a topic, or how it will look when it is first used. Creates nothing. Raises TopicNotFound.

        A client that hears "unknown" asks again half a minute later. A consumer that starts before the first message
        of its topic would be late by that, and so would the first retry of a new group.
        """
        known = self._broker.view.find_topic(name)
        if known is not None:
            return known
        if name == DEFAULT_TOPIC and self._settings.auto_create_topics:
            count = self._settings.default_queue_count
            return PromisedTopic(name, count, count, PERM_READ | PERM_WRITE | PERM_INHERIT)
        if name.startswith(RETRY_TOPIC_PREFIX):
            if self._may_have_group(name.removeprefix(RETRY_TOPIC_PREFIX)):
                return PromisedTopic(name, _GROUP_TOPIC_QUEUES, _GROUP_TOPIC_QUEUES)
        elif self._settings.auto_create_topics and _may_be_created(name):
            return PromisedTopic(name, self.new_queue_count, self.new_queue_count)
        raise TopicNotFound(f"there is no route for topic {name[:TOPIC_CHARACTERS_MAX]!r}: it does not exist")

    def subscribe(self, name: str) -> None:
        """Creates a topic that a consumer subscribes to, as its route has promised it. Where it may not be created,
        the first request that uses it is refused instead.
        """
        if self._settings.auto_create_topics and _may_be_created(name):
            self.use_topic(name)

    def _may_have_group(self, name: str) -> bool:
        try:
            check_group(name)
        except IllegalMessage:
            return False
        return self._settings.auto_create_groups or self._broker.view.has_group(name)

    def use_retry_topic(self, group: str) -> TopicInfo:
        """Returns the topic for what a group sends back. Raises GroupNotFound where the group may not be created."""
        self.use_group(group)
        return self._use_group_topic(RETRY_TOPIC_PREFIX + group)

    def use_dead_letter_topic(self, group: str) -> TopicInfo:
        self.use_group(group)
        return self._use_group_topic(DLQ_TOPIC_PREFIX + group)

    def _use_group_topic(self, name: str) -> TopicInfo:
        known = self._broker.view.find_topic(name)
        return known if known is not None else self._put_topic(name, _GROUP_TOPIC_QUEUES)

    def _put_topic(self, name: str, queue_count: int) -> TopicInfo:
        self._broker.put_topic(name, self._clock.now_ms(), read_queue_count=queue_count, write_queue_count=queue_count)
        logger.info("topic %s is made, on its first use: %d queues", name, queue_count)
        return self._broker.view.topic(name)

    def use_group(self, name: str) -> None:
        """Creates a consumer group unless it exists. Raises GroupNotFound where it may not be created."""
        if self._broker.view.has_group(name):
            return
        check_group(name)
        if not self._settings.auto_create_groups:
            raise GroupNotFound(f"group {name!r} does not exist, and auto_create_groups is off: create it first")
        self._broker.put_group(name, {}, self._clock.now_ms())


def _may_be_created(name: str) -> bool:
    """Returns whether clients may create a topic of that name by using it."""
    try:
        check_topic(name)
        refuse_system_topic(name)
    except (IllegalMessage, NoPermission):
        return False
    return not name.startswith(DLQ_TOPIC_PREFIX)

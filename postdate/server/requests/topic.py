"""What clients and operators ask about the broker itself: routes, topics, groups."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.errors import GroupNotFound, ProtocolError
from postdate.message import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX
from postdate.server.connection import Connection
from postdate.server.requests.assignments import MODES_SETTING
from postdate.server.requests.auto_creation import Birth
from postdate.server.sessions.meter import Came, Meter, Span
from postdate.server.sessions.offsets import Offsets
from postdate.server.tasks import Tasks
from postdate.wire import bodies, codes
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, reply

_ATTRIBUTE = re.compile(r"\+([^=,]+)=([^,]*)|-([^,]+)")


class Admin:
    """Serves one broker."""

    def __init__(
        self, broker: Broker, clock: Clock, offsets: Offsets, birth: Birth, meter: Meter, tasks: Tasks
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._offsets = offsets
        self._birth = birth
        self._meter = meter
        self._tasks = tasks

    # -- topics -------------------------------------------------------------------------------------------------

    def put_topic(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        known = self._broker.view.find_topic(asked["topic"])
        attributes = _changed_attributes(known.attributes if known else {}, asked["attributes"])
        self._broker.put_topic(
            asked["topic"],
            self._clock.now_ms(),
            read_queue_count=asked["readQueueNums"],
            write_queue_count=asked["writeQueueNums"],
            perm=asked["perm"],
            attributes=attributes,
        )
        return reply(command, codes.SUCCESS)

    def delete_topic(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Says how many messages waited for it: they are cancelled. The topics of a group go with it, or were never
        made, and tools ask to delete them all the same.
        """
        name = asked["topic"]
        if _is_of_group(name) and not self._broker.view.has_topic(name):
            return reply(command, codes.SUCCESS, {"cancelled": 0})
        return reply(command, codes.SUCCESS, {"cancelled": self._delete_topic(asked["topic"])})

    def _delete_topic(self, name: str) -> int:
        count = self._broker.delete_topic(name, self._clock.now_ms())
        self._offsets.forget_topic(name)
        return count

    def topic_settings(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._broker.view.topic(asked["topic"])
        shown = {
            "attributes": topic.attributes, "order": False, "perm": topic.perm, "readQueueNums": topic.read_queue_count,
            "topicFilterType": "SINGLE_TAG", "topicName": topic.name, "topicSysFlag": 0,
            "writeQueueNums": topic.write_queue_count,
        }  # fmt: skip
        return reply(command, codes.SUCCESS, body=orjson.dumps(shown))

    def topic_stats(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
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

    # -- groups -------------------------------------------------------------------------------------------------

    def put_group(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        settings = bodies.load(command.body, "a group's settings")
        name = settings.pop("groupName", None)
        if not isinstance(name, str):
            raise ProtocolError("a group's settings need the field groupName")
        # How the group reads its topics is set by another request, and stays.
        kept = self._broker.view.group_settings(name).get(MODES_SETTING)
        settings |= {MODES_SETTING: kept} if kept else {}
        self._broker.put_group(name, settings, self._clock.now_ms())
        return reply(command, codes.SUCCESS)

    def delete_group(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Forgets a group with its offsets and its retry and dead letter topics."""
        name = asked["groupName"]
        if not self._broker.view.has_group(name):
            raise GroupNotFound(f"group {name!r} does not exist")
        for topic in (RETRY_TOPIC_PREFIX + name, DLQ_TOPIC_PREFIX + name):
            if self._broker.view.has_topic(topic):
                self._delete_topic(topic)
        self._broker.delete_group(name, self._clock.now_ms())
        self._offsets.forget_group(name)
        return reply(command, codes.SUCCESS)

    def group_list(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        table = {
            name: {
                "groupName": name,
                "retryMaxTimes": self._broker.settings.retry_times_max,
                "retryQueueNums": 1,
                **settings,
            }
            for name, settings in self._broker.view.all_group_settings().items()
        }
        return reply(command, codes.SUCCESS, body=orjson.dumps({"subscriptionGroupTable": table}))


def _is_of_group(topic: str) -> bool:
    return topic.startswith((RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX))


def _changed_attributes(known: Mapping[str, str], text: str) -> dict[str, str]:
    """Attributes after changes such as "+message.type=DELAY,-other"."""
    attributes = dict(known)
    for added, value, removed in _ATTRIBUTE.findall(text):
        if added:
            attributes[added] = value
        else:
            attributes.pop(removed, None)
    return attributes

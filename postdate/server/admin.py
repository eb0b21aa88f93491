"""What clients and operators ask about the broker itself: routes, topics, groups, what waits."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from postdate.broker import Broker
from postdate.clock import Clock
from postdate.errors import GroupNotFound, PostdateError, ProtocolError
from postdate.message import (
    DLQ_TOPIC_PREFIX,
    RETRY_TOPIC_PREFIX,
)  # fmt: skip
from postdate.server.answers import code_of
from postdate.server.connection import Connection
from postdate.server.offsets import Offsets
from postdate.server.topics import Birth
from postdate.topics import SCHEDULE_TOPIC
from postdate.wire import bodies, codes
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, reply

_UNITS_MS = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_ROWS_MAX = 10_000  # of an answer about what waits
_ATTRIBUTE = re.compile(r"\+([^=,]+)=([^,]*)|-([^,]+)")


class Admin:
    """Serves one broker."""

    def __init__(self, broker: Broker, clock: Clock, offsets: Offsets, birth: Birth) -> None:
        self._broker = broker
        self._clock = clock
        self._offsets = offsets
        self._birth = birth
        self._settings = broker.settings
        self._tasks: set[asyncio.Task[None]] = set()

    # -- routes -------------------------------------------------------------------------------------------------

    def route(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._birth.promised(asked["topic"])
        broker = bodies.Broker(self._settings.broker_name, self._settings.cluster_name, connection.broker_address)
        body = bodies.encode_route(broker, topic.read_queue_count, topic.write_queue_count, topic.perm)
        return reply(command, codes.SUCCESS, body=body)

    # -- topics -------------------------------------------------------------------------------------------------

    def put_topic(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        known = self._broker.fold.topics.by_name.get(asked["topic"])
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
        """Says how many messages waited for it: they are cancelled."""
        return reply(command, codes.SUCCESS, {"cancelled": self._delete_topic(asked["topic"])})

    def _delete_topic(self, name: str) -> int:
        count = self._broker.delete_topic(name, self._clock.now_ms())
        self._offsets.forget_topic(name)
        return count

    def topic_list(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        names = sorted(name for name in self._broker.fold.topics.by_name if name != SCHEDULE_TOPIC)
        return reply(command, codes.SUCCESS, body=orjson.dumps({"brokerAddr": None, "topicList": names}))

    def topic_stats(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._broker.fold.topics.get(asked["topic"])
        table = {}
        for queue_id in range(max(topic.read_queue_count, topic.write_queue_count)):
            low, high = self._broker.offsets(topic.name, queue_id)
            last_at_ms = self._broker.visible_at_ms(topic.name, queue_id, high - 1) if low < high else 0
            table[QueueName(topic.name, self._settings.broker_name, queue_id)] = {
                "lastUpdateTimestamp": last_at_ms, "maxOffset": high, "minOffset": low,
            }  # fmt: skip
        return reply(command, codes.SUCCESS, body=bodies.encode_by_queue("offsetTable", table))

    # -- groups -------------------------------------------------------------------------------------------------

    def put_group(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        settings = bodies.load(command.body, "a group's settings")
        name = settings.pop("groupName", None)
        if not isinstance(name, str):
            raise ProtocolError("a group's settings need the field groupName")
        self._broker.put_group(name, settings, self._clock.now_ms())
        return reply(command, codes.SUCCESS)

    def delete_group(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Forgets a group with its offsets and its retry and dead letter topics."""
        name = asked["groupName"]
        if name not in self._broker.fold.groups:
            raise GroupNotFound(f"group {name!r} does not exist")
        for topic in (RETRY_TOPIC_PREFIX + name, DLQ_TOPIC_PREFIX + name):
            if topic in self._broker.fold.topics.by_name:
                self._delete_topic(topic)
        self._broker.delete_group(name, self._clock.now_ms())
        self._offsets.forget_group(name)
        return reply(command, codes.SUCCESS)

    def group_list(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        table = {
            name: {"groupName": name, "retryMaxTimes": self._settings.retry_times_max, "retryQueueNums": 1, **settings}
            for name, settings in self._broker.fold.groups.all_settings().items()
        }
        return reply(command, codes.SUCCESS, body=orjson.dumps({"subscriptionGroupTable": table}))

    def consume_stats(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """What a group has committed, and how far that is from the end."""
        group = asked["consumerGroup"]
        if group not in self._broker.fold.groups:
            raise GroupNotFound(f"group {group!r} does not exist")
        table = {}
        for (topic, queue_id), offset in sorted(self._offsets.of(group).items()):
            if topic not in self._broker.fold.topics.by_name or asked["topic"] not in ("", topic):
                continue
            high = self._broker.offsets(topic, queue_id)[1]
            table[QueueName(topic, self._settings.broker_name, queue_id)] = {
                "brokerOffset": high, "consumerOffset": offset, "pullOffset": offset, "lastTimestamp": 0,
            }  # fmt: skip
        body = bodies.encode_by_queue("offsetTable", table, {"consumeTps": 0})
        return reply(command, codes.SUCCESS, body=body)

    # -- what waits ---------------------------------------------------------------------------------------------

    def pending(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Counted step by step, so that nothing that is due waits for it."""
        if asked["unit"] not in _UNITS_MS:
            raise ProtocolError(f"unit {asked['unit']!r}, expected one of {', '.join(_UNITS_MS)}")
        if asked["topic"]:
            self._broker.fold.topics.get(asked["topic"])
        task = asyncio.get_running_loop().create_task(self._answer_pending(connection, command, asked))
        self._tasks.add(task)  # the loop itself holds a task weakly
        task.add_done_callback(self._tasks.discard)

    async def _answer_pending(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        try:
            body = await self._pending_body(asked)
        except (PostdateError, OSError) as error:
            connection.write(reply(command, code_of(error), remark=str(error)))
            return
        connection.write(reply(command, codes.SUCCESS, body=orjson.dumps(body)))

    async def _pending_body(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        unit_ms, wanted = _UNITS_MS[asked["unit"]], asked["topic"]
        near_until_ms = self._clock.now_ms() + self._settings.lead_ms
        times: Counter[tuple[int, int]] = Counter()  # (start of the unit, queue number)
        near: Counter[int] = Counter()  # by queue number
        for due, queue in self._broker.fold.waiting():
            _count(times, due // unit_ms * unit_ms, queue)
            near.update(queue[due <= near_until_ms].tolist())
            await asyncio.sleep(0)
        places = self._broker.fold.topics.places
        by_time: Counter[tuple[int, str]] = Counter()
        by_topic: Counter[str] = Counter()
        near_by_topic: Counter[str] = Counter()
        for (at_ms, number), count in times.items():
            name = places[number][0]
            if wanted in ("", name):
                by_time[at_ms, name] += count
                by_topic[name] += count
        for number, count in near.items():
            near_by_topic[places[number][0]] += count
        limit = max(1, min(asked["limit"], _ROWS_MAX))
        rows = sorted(by_time.items())
        return {
            "total": by_topic.total(),
            "near": sum(near_by_topic[name] for name in by_topic),
            "far": by_topic.total() - sum(near_by_topic[name] for name in by_topic),
            "topics": [
                {"topic": name, "near": near_by_topic[name], "far": count - near_by_topic[name]}
                for name, count in sorted(by_topic.items())
            ],
            "unit": asked["unit"],
            "times": [{"from_ms": at_ms, "topic": name, "count": count} for (at_ms, name), count in rows[:limit]],
            "truncated": len(rows) > limit,
        }


def _count(times: "Counter[tuple[int, int]]", start: np.ndarray, queue: np.ndarray) -> None:
    pairs, counts = np.unique(np.stack([start, queue.astype(np.int64)]), axis=1, return_counts=True)
    for at_ms, number, count in zip(*pairs.tolist(), counts.tolist(), strict=True):
        times[at_ms, number] += count


def _changed_attributes(known: Mapping[str, str], text: str) -> dict[str, str]:
    """Attributes after changes such as "+message.type=DELAY,-other"."""
    attributes = dict(known)
    for added, value, removed in _ATTRIBUTE.findall(text):
        if added:
            attributes[added] = value
        else:
            attributes.pop(removed, None)
    return attributes

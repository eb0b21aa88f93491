"""What clients and operators ask about the broker itself: routes, topics, groups, what waits."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from postdate.broker import Broker
from postdate.clock import Clock
from postdate.errors import GroupNotFound, ProtocolError
from postdate.message import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX
from postdate.server.assignments import MODES_SETTING
from postdate.server.connection import Connection
from postdate.server.meter import Came, Meter, Span
from postdate.server.offsets import Offsets
from postdate.server.tasks import Tasks
from postdate.server.topics import Birth
from postdate.wheel import NEVER
from postdate.wire import bodies, codes
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, reply

_UNITS_MS = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_ROWS_MAX = 10_000  # of an answer about what waits
_COUNT_ROWS = 2_048  # counted in one go: about a millisecond
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
        """Says how many messages waited for it: they are cancelled. The topics of a group go with it, or were never
        made, and tools ask to delete them all the same.
        """
        name = asked["topic"]
        if _is_of_group(name) and name not in self._broker.fold.topics.by_name:
            return reply(command, codes.SUCCESS, {"cancelled": 0})
        return reply(command, codes.SUCCESS, {"cancelled": self._delete_topic(asked["topic"])})

    def _delete_topic(self, name: str) -> int:
        count = self._broker.delete_topic(name, self._clock.now_ms())
        self._offsets.forget_topic(name)
        return count

    def topic_settings(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._broker.fold.topics.get(asked["topic"])
        shown = {
            "attributes": topic.attributes, "order": False, "perm": topic.perm, "readQueueNums": topic.read_queue_count,
            "topicFilterType": "SINGLE_TAG", "topicName": topic.name, "topicSysFlag": 0,
            "writeQueueNums": topic.write_queue_count,
        }  # fmt: skip
        return reply(command, codes.SUCCESS, body=orjson.dumps(shown))

    def topic_stats(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._broker.fold.topics.get(asked["topic"])
        table = {}
        for queue_id in range(max(topic.read_queue_count, topic.write_queue_count)):
            low, high = self._broker.offsets(topic.name, queue_id)
            last_at_ms = self._broker.visible_at_ms(topic.name, queue_id, high - 1) if low < high else 0
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
        kept = self._broker.fold.groups.settings.get(name, {}).get(MODES_SETTING)
        settings |= {MODES_SETTING: kept} if kept else {}
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
            name: {
                "groupName": name,
                "retryMaxTimes": self._broker.settings.retry_times_max,
                "retryQueueNums": 1,
                **settings,
            }
            for name, settings in self._broker.fold.groups.all_settings().items()
        }
        return reply(command, codes.SUCCESS, body=orjson.dumps({"subscriptionGroupTable": table}))

    # -- what waits ---------------------------------------------------------------------------------------------

    def pending(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Counted step by step, so that nothing that is due waits for it."""
        if asked["unit"] not in _UNITS_MS:
            raise ProtocolError(f"unit {asked['unit']!r}, expected one of {', '.join(_UNITS_MS)}")
        if asked["topic"]:
            self._broker.fold.topics.get(asked["topic"])
        self._tasks.answer(connection, command, self._answer_pending(command, asked))

    async def _answer_pending(self, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, body=orjson.dumps(await self._pending_body(asked)))

    async def _pending_body(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        near_until_ms = self._clock.now_ms() + self._broker.settings.lead_ms
        limit = max(1, min(asked["limit"], _ROWS_MAX))
        counts = _Waiting(self._broker.fold.topics.places, asked["topic"], _UNITS_MS[asked["unit"]], limit)
        for due, queue in self._broker.fold.waiting():
            for start in range(0, len(due), _COUNT_ROWS):
                part = slice(start, start + _COUNT_ROWS)
                counts.add(due[part].tolist(), queue[part].tolist(), near_until_ms)
                await asyncio.sleep(0)
        times = counts.earliest()
        return {
            "total": counts.all.total(),
            "in_table": self._broker.fold.far.in_table,
            "near": counts.near.total(),
            "far": counts.all.total() - counts.near.total(),
            "topics": [
                {"topic": name, "near": counts.near[name], "far": count - counts.near[name]}
                for name, count in sorted(counts.all.items())
            ],
            "unit": asked["unit"],
            "times": [{"from_ms": at_ms, "topic": name, "count": count} for (at_ms, name), count in times],
            "truncated": counts.is_truncated,
        }


class _Waiting:
    """Counts what waits, of one topic or of all: by topic and, for the earliest rows, by time. The rows behind those
    that are shown are forgotten on the way, so that a million due times cost no more than the limit.
    """

    def __init__(self, places: Sequence[tuple[str, int]], topic: str, unit_ms: int, limit: int) -> None:
        self._places = places
        self._topic = topic
        self._unit_ms = unit_ms
        self._limit = limit
        self.all: Counter[str] = Counter()
        self.near: Counter[str] = Counter()
        self._times: Counter[tuple[int, str]] = Counter()  # by start of the unit and topic
        self._last_ms = NEVER  # rows after it are not shown
        self.is_truncated = False

    def add(self, dues: list[int], numbers: list[int], near_until_ms: int) -> None:
        """Due times, and the numbers of their queues."""
        unit_ms, last_ms = self._unit_ms, self._last_ms
        pairs = [(due, self._places[number][0]) for due, number in zip(dues, numbers, strict=True)]
        if self._topic:
            pairs = [pair for pair in pairs if pair[1] == self._topic]
        self.all.update([name for _, name in pairs])
        self.near.update([name for due, name in pairs if due <= near_until_ms])
        rows = [(due // unit_ms * unit_ms, name) for due, name in pairs]
        shown = [row for row in rows if row[0] <= last_ms]
        self.is_truncated |= len(shown) < len(rows)
        self._times.update(shown)
        if len(self._times) > 2 * self._limit:
            self._forget_late()

    def _forget_late(self) -> None:
        self._last_ms = sorted(self._times)[self._limit - 1][0]
        self._times = Counter({row: count for row, count in self._times.items() if row[0] <= self._last_ms})
        self.is_truncated = True

    def earliest(self) -> list[tuple[tuple[int, str], int]]:
        """((start of the unit, topic), count), not more than the limit."""
        self.is_truncated |= len(self._times) > self._limit
        return sorted(self._times.items())[: self._limit]


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

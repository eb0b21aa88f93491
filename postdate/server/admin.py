"""What clients and operators ask about the broker itself: routes, topics, groups, what waits."""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from postdate.broker import Broker
from postdate.clock import Clock
from postdate.errors import FlowControl, GroupNotFound, PostdateError, ProtocolError
from postdate.message import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX
from postdate.server.answers import refusal
from postdate.server.assignments import MODES_SETTING
from postdate.server.connection import Connection
from postdate.server.offsets import Offsets
from postdate.server.topics import Birth
from postdate.topics import SCHEDULE_TOPIC
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
        if command.is_oneway:
            return
        if len(self._tasks) >= self._settings.counts_max:
            raise FlowControl(f"counts_max: {len(self._tasks)} clients have what waits counted, the limit; try later")
        task = asyncio.get_running_loop().create_task(self._answer_pending(connection, command, asked))
        self._tasks.add(task)  # the loop itself holds a task weakly
        task.add_done_callback(self._tasks.discard)

    async def _answer_pending(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        try:
            answer = reply(command, codes.SUCCESS, body=orjson.dumps(await self._pending_body(asked)))
        except (PostdateError, OSError) as error:
            answer = refusal(command, error)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.discard(task)  # before the answer: its client may ask again at once
        connection.write(answer)

    async def _pending_body(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        near_until_ms = self._clock.now_ms() + self._settings.lead_ms
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


def _changed_attributes(known: Mapping[str, str], text: str) -> dict[str, str]:
    """Attributes after changes such as "+message.type=DELAY,-other"."""
    attributes = dict(known)
    for added, value, removed in _ATTRIBUTE.findall(text):
        if added:
            attributes[added] = value
        else:
            attributes.pop(removed, None)
    return attributes

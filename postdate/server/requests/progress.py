"""How far groups are, and how an operator moves them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from postdate.broker.broker import Broker
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import GroupNotFound, UsageError
from postdate.server.answers import when_settled
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.requests.pop import Pops
from postdate.server.requests.pull import Pulls
from postdate.server.sessions.members import Members
from postdate.server.sessions.meter import Meter, Span, Went
from postdate.server.sessions.offsets import Offsets, Place
from postdate.server.tasks import Tasks, paced
from postdate.wire import bodies, codes
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, reply

_TO_THE_END = -1  # as a timestamp
_QUEUES_PER_STEP = 50  # looked at in one go: about a millisecond
_GROUPS_PER_STEP = 100


class _Stats(NamedTuple):
    """How far a group is in some queues."""

    table: dict[QueueName, dict[str, int]]
    per_second: float

    @property
    def shown(self) -> dict[str, Any]:
        return {"consumeTps": self.per_second, "offsetTable": bodies.by_queue(self.table)}

    @property
    def behind(self) -> int:
        return sum(row["brokerOffset"] - row["consumerOffset"] for row in self.table.values())

    @property
    def in_work(self) -> int:
        return sum(row["pullOffset"] - row["consumerOffset"] for row in self.table.values())


class Progress:
    """Serves one broker."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        pulse: Pulse,
        pulls: Pulls,
        pops: Pops,
        members: Members[Connection],
        offsets: Offsets,
        meter: Meter,
        tasks: Tasks,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._pulse = pulse
        self._pulls = pulls
        self._pops = pops
        self._members = members
        self._offsets = offsets
        self._meter = meter
        self._tasks = tasks

    # -- how far groups are -------------------------------------------------------------------------------------

    def of_group(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """What a group has committed, and how far that is from the end."""
        group = asked["consumerGroup"]
        self._check_group(group)
        self._tasks.answer(connection, command, self._of_group(command, group, asked["topic"]))

    def _check_group(self, group: str) -> None:
        if not self._broker.view.has_group(group):
            raise GroupNotFound(f"group {group!r} does not exist")

    async def _of_group(self, command: Command, group: str, topic: str) -> bytes:
        now_ns = self._clock.elapsed_ns()
        self._meter.tick(now_ns)
        return reply(command, codes.SUCCESS, body=orjson.dumps((await self._stats(group, topic, now_ns)).shown))

    async def _stats(self, group: str, topic: str, now_ns: int) -> _Stats:
        """Of one topic, or of all that the group has read."""
        table = {}
        async for place, offset in paced(sorted(self._offsets.of(group).items()), _QUEUES_PER_STEP):
            if topic in ("", place[0]) and self._is_there(*place):
                name = QueueName(*_named(place, self._broker.settings.broker_name))
                table[name] = self._row(group, place, offset)
        rates = [self._meter.rate(Went(name, group), Span.MINUTE, now_ns) for name in {queue.topic for queue in table}]
        return _Stats(table, sum(rate.per_second for rate in rates))

    def _is_there(self, topic: str, queue_id: int) -> bool:
        found = self._broker.view.find_topic(topic)
        return found is not None and queue_id < len(found.numbers)

    def _row(self, group: str, place: Place, offset: int) -> dict[str, int]:
        low, high = self._broker.offsets(*place)
        # When what the group read last became visible: how old its work is.
        read_at_ms = self._broker.view.visible_at_ms(*place, offset - 1) if low < offset <= high else 0
        pulled = max(self._pulls.reached(group, *place), offset)
        return {"brokerOffset": high, "consumerOffset": offset, "lastTimestamp": read_at_ms, "pullOffset": pulled}

    def of_all(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """The same of all groups. Where only ordered topics are asked for there are none: no topic is marked so."""
        groups = [] if asked["isOrder"] else list(self._broker.view.all_group_settings())
        self._tasks.answer(connection, command, self._of_all(connection, command, groups))

    async def _of_all(self, connection: Connection, command: Command, groups: list[str]) -> bytes:
        now_ns = self._clock.elapsed_ns()
        self._meter.tick(now_ns)
        rows, behind, in_work = [], 0, 0
        async for group in paced(groups, _GROUPS_PER_STEP):
            topics = sorted({topic for topic, _ in self._offsets.of(group) if self._broker.view.has_topic(topic)})
            stats = [await self._stats(group, topic, now_ns) for topic in topics]
            rows.append({group: [each.shown for each in stats]})
            behind += sum(each.behind for each in stats)
            in_work += sum(each.in_work for each in stats)
        body = {
            "brokerAddr": connection.broker_address, "consumeStatsList": rows, "totalDiff": behind,
            "totalInflightDiff": in_work,
        }  # fmt: skip
        return reply(command, codes.SUCCESS, body=orjson.dumps(body))

    # -- moving groups ------------------------------------------------------------------------------------------

    def reset(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Moves a group in a topic: to what became visible at an instant, to the end, or one queue to an offset.

        A member that is connected is told with its next pull, one that is held at once; until then what it commits is
        from before, and does not count.
        """
        group, topic = asked["group"], asked["topic"]
        count = self._broker.view.topic(topic).read_queue_count
        self._check_group(group)
        queue_ids = range(count) if asked["queueId"] < 0 else [asked["queueId"]]
        moved = {(topic, queue_id): self._target(topic, queue_id, asked) for queue_id in queue_ids}
        is_read = self._members.subscribes(group, topic)
        ticket = self._offsets.move(group, moved, self._clock.now_ms(), is_read=is_read)
        self._pulls.move(group, moved)
        name = self._broker.settings.broker_name
        body = bodies.encode_by_queue("offsetTable", {QueueName(*_named(place, name)): moved[place] for place in moved})

        asked_by = command.without_content()
        answer = when_settled(connection, asked_by, lambda _: reply(asked_by, codes.SUCCESS, body=body))

        def written(ticket: Ticket) -> None:
            if ticket.error is None:
                self._offsets.written(group, moved)
                self._pops.moved(group, topic)
            answer(ticket)

        self._pulse.expect(connection, ticket, written)

    def _target(self, topic: str, queue_id: int, asked: Mapping[str, Any]) -> int:
        low, high = self._broker.offsets(topic, queue_id)
        if asked["offset"] is not None and asked["offset"] >= 0:
            if not low <= asked["offset"] <= high:
                raise UsageError(f"offset {asked['offset']} of queue {queue_id} of {topic!r}, expected {low} to {high}")
            return int(asked["offset"])
        return high if asked["timestamp"] == _TO_THE_END else self._broker.search(topic, queue_id, asked["timestamp"])


def _named(place: Place, broker_name: str) -> tuple[str, str, int]:
    return place[0], broker_name, place[1]

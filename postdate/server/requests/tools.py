"""What RocketMQ's tools ask: who is connected, how far groups are, and that a group moves to other offsets."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from postdate.broker.broker import Broker
from postdate.broker.writing import Ticket
from postdate.clock import Clock
from postdate.errors import GroupNotFound, UsageError
from postdate.message import RETRY_TOPIC_PREFIX
from postdate.server.answers import when_settled
from postdate.server.asker import Asker
from postdate.server.connection import Connection
from postdate.server.pulse import Pulse
from postdate.server.requests.find import delivered_record
from postdate.server.requests.pop import Pops
from postdate.server.requests.pull import Pulls
from postdate.server.sessions import Sessions
from postdate.server.sessions.members import Member, Sender
from postdate.server.sessions.meter import Span, Went
from postdate.server.sessions.offsets import Place
from postdate.server.tasks import Tasks, paced
from postdate.storage import record as records
from postdate.wire import bodies, codes, reports
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, reply
from postdate.wire.ids import host_text, parse_message_id
from postdate.wire.rights import GET, SUB, ask_topic

_TO_THE_END = -1  # as a timestamp
# In one go, about a millisecond each:
_NAMES_PER_STEP = 1_000
_GROUPS_PER_STEP = 100
_QUEUES_PER_STEP = 50


class _Progress(NamedTuple):
    """How far a group is in some queues."""

    table: dict[QueueName, dict[str, int]]
    per_second: float

    @property
    def body(self) -> dict[str, Any]:
        return {"consumeTps": self.per_second, "offsetTable": bodies.by_queue(self.table)}

    @property
    def behind_count(self) -> int:
        return sum(row["brokerOffset"] - row["consumerOffset"] for row in self.table.values())

    @property
    def in_work_count(self) -> int:
        return sum(row["pullOffset"] - row["consumerOffset"] for row in self.table.values())


class Tools:
    """Answers the questions of operators about clients and about the progress of groups."""

    def __init__(
        self, broker: Broker, clock: Clock, pulse: Pulse, sessions: Sessions, pulls: Pulls, pops: Pops, tasks: Tasks
    ) -> None:
        self._broker, self._clock, self._pulse = broker, clock, pulse
        self._members = sessions.members
        self._senders = sessions.senders
        self._offsets = sessions.offsets
        self._pullers = sessions.pullers
        self._meter = sessions.meter
        self._relays = sessions.relays
        self._pulls, self._pops, self._tasks = pulls, pops, tasks

    # -- who is connected ---------------------------------------------------------------------------------------

    def list_consumers(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        members = self._members.of(asked["consumerGroup"])
        if not members:
            remark = f"no consumer of group {asked['consumerGroup'][:255]!r} is connected"
            return reply(command, codes.CONSUMER_NOT_ONLINE, remark=remark)
        warnings = (conflict.warning for conflict in self._members.conflicts(asked["consumerGroup"]))
        body = reports.encode_consumers(map(_peer, members), (member.consumer for member in members), warnings)
        return reply(command, codes.SUCCESS, body=body)

    def list_producers(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        producers = self._senders.of(asked["producerGroup"])
        if not producers:
            remark = f"no producer of group {asked['producerGroup'][:255]!r} is connected"
            return reply(command, codes.SYSTEM_ERROR, remark=remark)
        return reply(command, codes.SUCCESS, body=reports.encode_producers(map(_peer, producers)))

    def list_all_producers(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        now_ms, now_ns = self._clock.now_ms(), self._clock.elapsed_ns()
        table = {
            group: [(_peer(each), now_ms - (now_ns - each.seen_at_ns) // 1_000_000) for each in self._senders.of(group)]
            for group in self._senders.names()
        }
        return reply(command, codes.SUCCESS, body=reports.encode_producer_table(table))

    def list_readers(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Answers the groups that subscribe to a topic at this moment, or have committed an offset of it."""
        self._tasks.answer(connection, command, self._list_readers(command, asked["topic"], connection.asker))

    async def _list_readers(self, command: Command, topic: str, asker: Asker) -> bytes:
        groups = self._broker.view.all_group_settings()
        names = sorted(groups.keys() | set(self._members.names()))
        found = [
            group
            async for group in paced(names, _NAMES_PER_STEP)
            if (self._members.subscribes(group, topic) or any(name == topic for name, _ in self._offsets.of(group)))
            and asker.may_group(group, GET)
        ]
        return reply(command, codes.SUCCESS, body=orjson.dumps({"groupList": found}))

    # -- questions to a consumer --------------------------------------------------------------------------------

    def relay_running_info(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Asks a consumer what it is doing."""
        fields = {
            "consumerGroup": asked["consumerGroup"], "clientId": asked["clientId"],
            "jstackEnable": "true" if asked["jstackEnable"] else "false",
        }  # fmt: skip
        self._relays.ask(connection, command, self._client(asked).link, fields)

    def relay_message(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Makes a consumer consume one message at once, however far its group is."""
        client = self._client(asked).link
        _, offset = parse_message_id(asked["msgId"])
        body = delivered_record(self._broker, offset, client.broker_host)
        if not body:
            raise UsageError(f"there is no message {asked['msgId']}")
        connection.asker.require(ask_topic(records.decode(body).topic, SUB))
        fields = {
            "consumerGroup": asked["consumerGroup"], "clientId": asked["clientId"], "msgId": asked["msgId"],
            "brokerName": self._broker.settings.broker_name,
        }  # fmt: skip
        self._relays.ask(connection, command, client, fields, body)

    def _client(self, asked: Mapping[str, Any]) -> Member[Connection]:
        group, client_id = asked["consumerGroup"], asked["clientId"]
        for member in self._members.of(group):
            if member.client_id == client_id:
                return member
        raise UsageError(f"no consumer {client_id[:255]!r} of group {group[:255]!r} is connected")

    # -- how far groups are -------------------------------------------------------------------------------------

    def get_progress(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Answers what a group has committed, and how far that is from the end."""
        group = asked["consumerGroup"]
        self._check_group(group)
        self._tasks.answer(connection, command, self._get_progress(command, group, asked["topic"]))

    def _check_group(self, group: str) -> None:
        if not self._broker.view.has_group(group):
            raise GroupNotFound(f"group {group!r} does not exist")

    async def _get_progress(self, command: Command, group: str, topic: str) -> bytes:
        now_ns = self._clock.elapsed_ns()
        self._meter.tick(now_ns)
        return reply(command, codes.SUCCESS, body=orjson.dumps((await self._progress(group, topic, now_ns)).body))

    def get_all_progress(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Answers the same for all groups. No topic counts as ordered, so for ordered topics there is nothing."""
        groups = [] if asked["isOrder"] else list(self._broker.view.all_group_settings())
        self._tasks.answer(connection, command, self._get_all_progress(connection, command, groups))

    async def _get_all_progress(self, connection: Connection, command: Command, groups: list[str]) -> bytes:
        now_ns = self._clock.elapsed_ns()
        self._meter.tick(now_ns)
        rows, behind_count, in_work_count = [], 0, 0
        async for group in paced(groups, _GROUPS_PER_STEP):
            topics = sorted({topic for topic, _ in self._offsets.of(group) if self._broker.view.has_topic(topic)})
            progress = [await self._progress(group, topic, now_ns) for topic in topics]
            rows.append({group: [each.body for each in progress]})
            behind_count += sum(each.behind_count for each in progress)
            in_work_count += sum(each.in_work_count for each in progress)
        body = {
            "brokerAddr": connection.broker_address, "consumeStatsList": rows, "totalDiff": behind_count,
            "totalInflightDiff": in_work_count,
        }  # fmt: skip
        return reply(command, codes.SUCCESS, body=orjson.dumps(body))

    async def _progress(self, group: str, topic: str, now_ns: int) -> _Progress:
        """Returns how far a group is in one topic, or in all that it reads or has read."""
        table, view = {}, self._broker.view
        committed = self._offsets.of(group)
        async for place in paced(sorted(self._places(group, topic, committed)), _QUEUES_PER_STEP):
            found = view.find_topic(place[0])
            if found is None or place[1] >= len(found.numbers):
                continue
            low, high = self._broker.offsets(*place)
            offset = committed.get(place, low)
            if place not in committed and low == high and place[0].startswith(RETRY_TOPIC_PREFIX):
                continue  # nobody sent anything back yet
            # When the message that the group read last became visible: how old its work is.
            read_at_ms = view.visible_at_ms(*place, offset - 1) if low < offset <= high else 0
            table[self._queue_name(place)] = {
                "brokerOffset": high, "consumerOffset": offset, "lastTimestamp": read_at_ms,
                "pullOffset": max(self._pulls.reached(group, *place), offset),
                "leased": view.leased_count(group, found.numbers[place[1]]),
            }  # fmt: skip
        rates = [self._meter.rate(Went(name, group), Span.MINUTE, now_ns) for name in {queue.topic for queue in table}]
        return _Progress(table, sum(rate.per_second for rate in rates))

    def _places(self, group: str, topic: str, committed: Mapping[Place, int]) -> set[Place]:
        """Returns the queues that a group reads: those that it has committed, and all others of the same topics and of
        those that its members subscribe to. Nobody has read a queue without an offset yet.
        """
        names = {name for name, _ in committed} | self._members.topics(group)
        chosen = names if not topic else names & {topic}
        read = {
            (name, queue_id)
            for name in chosen
            if (found := self._broker.view.find_topic(name)) is not None
            for queue_id in range(found.read_queue_count)
        }
        return read | {place for place in committed if place[0] in chosen}

    def _queue_name(self, place: Place) -> QueueName:
        return QueueName(place[0], self._broker.settings.broker_name, place[1])

    # -- moving groups ------------------------------------------------------------------------------------------

    def reset_offsets(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes | None:
        """Moves a group in a topic: to what became visible at an instant, to the end, or one queue to an offset. With
        `dryRun` nothing moves. The answer says where the group was, where it goes, and how many messages it has in
        work or waits to try again; those stay with it.

        A connected member learns it with its next pull, one whose pull is held at once. Until then its commits are
        from before the move, and do not count.
        """
        group, topic = asked["group"], asked["topic"]
        count = self._broker.view.topic(topic).read_queue_count
        self._check_group(group)
        queue_ids = range(count) if asked["queueId"] < 0 else [asked["queueId"]]
        targets = {(topic, queue_id): self._target(topic, queue_id, asked) for queue_id in queue_ids}
        table = {self._queue_name(place): target for place, target in targets.items()}
        more: dict[str, Any] = {}
        if "dryRun" in command.fields:  # RocketMQ's own tools do not know this
            more["moves"] = [
                {"queueId": place[1], "before": self._offsets.get(group, *place), "after": target,
                 "leased": self._broker.view.leased_count(group, self._broker.view.queue_number(*place))}
                for place, target in targets.items()
            ]  # fmt: skip
        body = bodies.encode_by_queue("offsetTable", table, more)
        if asked["dryRun"]:
            return reply(command, codes.SUCCESS, body=body)
        is_read = self._members.subscribes(group, topic)
        ticket = self._offsets.move(group, targets, self._clock.now_ms(), is_read=is_read)
        self._pulls.move(group, targets)
        for place in targets:
            self._pullers.forget_popped(group, place)
        asked_by = command.without_content()
        answer = when_settled(connection, asked_by, lambda _: reply(asked_by, codes.SUCCESS, body=body))

        def settle(ticket: Ticket) -> None:
            if ticket.error is None:
                self._offsets.mark_written(group, targets)
                self._pops.serve(group, topic)
            answer(ticket)

        self._pulse.expect(connection, ticket, settle)
        return None

    def _target(self, topic: str, queue_id: int, asked: Mapping[str, Any]) -> int:
        low, high = self._broker.offsets(topic, queue_id)
        if asked["offset"] is not None and asked["offset"] >= 0:
            if not low <= asked["offset"] <= high:
                raise UsageError(f"offset {asked['offset']} of queue {queue_id} of {topic!r}, expected {low} to {high}")
            return int(asked["offset"])
        return high if asked["timestamp"] == _TO_THE_END else self._broker.search(topic, queue_id, asked["timestamp"])


def _peer(client: Member[Connection] | Sender[Connection]) -> reports.Peer:
    return reports.Peer(client.client_id, host_text(client.link.host), client.language, client.version)

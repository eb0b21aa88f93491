"""What operators ask about clients: who is connected, who reads a topic, and what a consumer is doing."""

from collections.abc import Mapping
from typing import Any

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.errors import UsageError
from postdate.server.connection import Connection
from postdate.server.requests.messages import delivered
from postdate.server.sessions.members import Member, Members
from postdate.server.sessions.offsets import Offsets
from postdate.server.sessions.relays import Relays
from postdate.server.sessions.senders import Sender, Senders
from postdate.server.tasks import Tasks, paced
from postdate.wire import codes, reports
from postdate.wire.frame import Command, reply
from postdate.wire.ids import host_text, parse_message_id

_GROUPS_PER_STEP = 1_000  # looked through in one go: about a millisecond


class Clients:
    """Serves one broker."""

    def __init__(
        self,
        broker: Broker,
        clock: Clock,
        members: Members[Connection],
        senders: Senders[Connection],
        offsets: Offsets,
        relays: Relays,
        tasks: Tasks,
    ) -> None:
        self._broker = broker
        self._clock = clock
        self._members = members
        self._senders = senders
        self._offsets = offsets
        self._relays = relays
        self._tasks = tasks

    # -- who is connected ---------------------------------------------------------------------------------------

    def consumers(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        members = self._members.of(asked["consumerGroup"])
        if not members:
            remark = f"no consumer of group {asked['consumerGroup'][:255]!r} is connected"
            return reply(command, codes.CONSUMER_NOT_ONLINE, remark=remark)
        body = reports.encode_consumers(map(_peer, members), (member.consumer for member in members))
        return reply(command, codes.SUCCESS, body=body)

    def producers(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        producers = self._senders.of(asked["producerGroup"])
        if not producers:
            remark = f"no producer of group {asked['producerGroup'][:255]!r} is connected"
            return reply(command, codes.SYSTEM_ERROR, remark=remark)
        return reply(command, codes.SUCCESS, body=reports.encode_producers(map(_peer, producers)))

    def all_producers(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        now_ms, now_ns = self._clock.now_ms(), self._clock.elapsed_ns()
        table = {
            group: [(_peer(each), now_ms - (now_ns - each.seen_at_ns) // 1_000_000) for each in self._senders.of(group)]
            for group in self._senders.names()
        }
        return reply(command, codes.SUCCESS, body=reports.encode_producer_table(table))

    # -- who reads a topic --------------------------------------------------------------------------------------

    def readers(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """The groups that subscribe to a topic at this moment, or have committed an offset of it."""
        self._tasks.answer(connection, command, self._readers(command, asked["topic"]))

    async def _readers(self, command: Command, topic: str) -> bytes:
        groups = self._broker.view.all_group_settings()
        names = sorted(groups.keys() | set(self._members.names()))
        found = [group async for group in paced(names, _GROUPS_PER_STEP) if self._reads(group, topic)]
        return reply(command, codes.SUCCESS, body=reports.encode_groups(found))

    def _reads(self, group: str, topic: str) -> bool:
        return self._members.subscribes(group, topic) or any(name == topic for name, _ in self._offsets.of(group))

    # -- questions to a consumer --------------------------------------------------------------------------------

    def running_info(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """What a consumer is doing, as it says itself."""
        fields = {
            "consumerGroup": asked["consumerGroup"], "clientId": asked["clientId"],
            "jstackEnable": "true" if asked["jstackEnable"] else "false",
        }  # fmt: skip
        self._relays.ask(connection, command, self._client(asked).link, fields)

    def consume_directly(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        """Has a consumer consume one message at once, wherever its group is."""
        client = self._client(asked).link
        _, offset = parse_message_id(asked["msgId"])
        body = delivered(self._broker, offset, client.broker_host)
        if not body:
            raise UsageError(f"there is no message {asked['msgId']}")
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


def _peer(present: Member[Connection] | Sender[Connection]) -> reports.Peer:
    return reports.Peer(present.client_id, host_text(present.link.host), present.language, present.version)

"""What a name server is asked: where topics are, which brokers there are, and whether they may be written to.

There is one node, so the answers come from the broker itself, and there is nothing to register. What an operator takes
from the routes (the permission to write) is taken until it is given back or the broker stops, as with RocketMQ's name
server, which keeps it in memory too. The broker itself goes on to take what it is sent.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.view import PERM_WRITE
from postdate.errors import Refused, UsageError
from postdate.server.connection import Connection
from postdate.server.requests.auto_creation import Birth
from postdate.wire import bodies, codes, reports
from postdate.wire.frame import Command, reply


class Routes:
    """Serves one broker."""

    def __init__(self, broker: Broker, birth: Birth) -> None:
        self._broker = broker
        self._birth = birth
        self._is_writable = True

    def route(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic = self._birth.promised(asked["topic"])
        perm = topic.perm if self._is_writable else topic.perm & ~PERM_WRITE
        body = bodies.encode_route(self._told(connection), topic.read_queue_count, topic.write_queue_count, perm)
        return reply(command, codes.SUCCESS, body=body)

    def _told(self, connection: Connection) -> bodies.Broker:
        """The broker, as this client reaches it."""
        settings = self._broker.settings
        return bodies.Broker(settings.broker_name, settings.cluster_name, connection.broker_address)

    def cluster(self, connection: Connection, command: Command, _: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, body=reports.encode_cluster(self._told(connection)))

    # -- topics -------------------------------------------------------------------------------------------------

    def topic_list(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        names = sorted(self._names())
        return reply(command, codes.SUCCESS, body=orjson.dumps({"brokerAddr": None, "topicList": names}))

    def _names(self) -> list[str]:
        return self._broker.view.topic_names()

    def forget_topic(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Asked after the topic was deleted from all brokers: there is no route any more that could be forgotten."""
        if self._broker.view.has_topic(asked["topic"]):
            raise Refused(f"topic {asked['topic']!r} exists: delete it from the broker, and its route is gone")
        return reply(command, codes.SUCCESS)

    # -- permission to write ------------------------------------------------------------------------------------

    def wipe_write(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"wipeTopicCount": self._set_writable(asked["brokerName"], False)})

    def add_write(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"addTopicCount": self._set_writable(asked["brokerName"], True)})

    def _set_writable(self, broker_name: str, is_writable: bool) -> int:
        """Returns how many routes are others by it."""
        own_name = self._broker.settings.broker_name
        if broker_name != own_name:
            raise UsageError(f"there is no broker {broker_name[:64]!r}, this is {own_name!r}")
        if is_writable == self._is_writable:
            return 0
        self._is_writable = is_writable
        view = self._broker.view
        return len([name for name in view.topic_names() if view.topic(name).perm & PERM_WRITE])

    # -- key-value settings: there are none ---------------------------------------------------------------------

    def get_value(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        remark = f"nothing is kept under {asked['key'][:64]!r}: there are no key-value settings"
        return reply(command, codes.QUERY_NOT_FOUND, remark=remark)

    def delete_value(self, _: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        """Nothing is there afterwards, as nothing was before: tools ask this after they have deleted a topic."""
        return reply(command, codes.SUCCESS)

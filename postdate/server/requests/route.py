"""Requests to a name server: where topics are, which brokers there are, and whether clients may write to them.

There is one node, so the broker itself answers, and nothing registers. An operator can take the permission to write out
of all routes, until it is given back or the broker stops: RocketMQ's name server has it in memory too. The broker still
accepts what clients send.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.broker.view import PERM_WRITE, TopicInfo
from postdate.errors import Refused, UsageError
from postdate.server.connection import Connection
from postdate.server.requests.topic import AutoCreation
from postdate.wire import bodies, codes, reports
from postdate.wire.frame import Command, reply
from postdate.wire.rights import GET


class Routes:
    """Answers as a name server."""

    def __init__(self, broker: Broker, creation: AutoCreation) -> None:
        self._broker, self._creation = broker, creation
        self._is_writable = True

    def find_route(self, name: str) -> tuple[TopicInfo, int]:
        """Returns a topic, or how it will look, and whether clients may read and write it now. Raises TopicNotFound."""
        topic = self._creation.promise_topic(name)
        return topic, topic.perm if self._is_writable else topic.perm & ~PERM_WRITE

    def get_route(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        topic, perm = self.find_route(asked["topic"])
        body = bodies.encode_route(self._broker_data(connection), topic.read_queue_count, topic.write_queue_count, perm)
        return reply(command, codes.SUCCESS, body=body)

    def _broker_data(self, connection: Connection) -> bodies.Broker:
        """Returns the broker as this client reaches it."""
        settings = self._broker.settings
        return bodies.Broker(settings.broker_name, settings.cluster_name, connection.broker_address)

    def get_cluster(self, connection: Connection, command: Command, _: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, body=reports.encode_cluster(self._broker_data(connection)))

    # -- topics -------------------------------------------------------------------------------------------------

    def list_topics(self, connection: Connection, command: Command, _asked: Mapping[str, Any]) -> bytes:
        asker = connection.asker
        names = sorted(name for name in self._broker.view.topic_names() if asker.may_topic(name, GET))
        return reply(command, codes.SUCCESS, body=orjson.dumps({"brokerAddr": None, "topicList": names}))

    def forget_topic(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Tools ask this after they have deleted a topic from all brokers. Its route is gone with it."""
        if self._broker.view.has_topic(asked["topic"]):
            raise Refused(f"topic {asked['topic']!r} exists: delete it from the broker, and its route goes with it")
        return reply(command, codes.SUCCESS)

    # -- permission to write ------------------------------------------------------------------------------------

    def wipe_write(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"wipeTopicCount": self._set_writable(asked["brokerName"], False)})

    def add_write(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        return reply(command, codes.SUCCESS, {"addTopicCount": self._set_writable(asked["brokerName"], True)})

    def _set_writable(self, broker_name: str, is_writable: bool) -> int:
        """Returns how many routes change."""
        own_name = self._broker.settings.broker_name
        if broker_name != own_name:
            raise UsageError(f"there is no broker {broker_name[:64]!r}, this is {own_name!r}")
        if is_writable == self._is_writable:
            return 0
        self._is_writable = is_writable
        view = self._broker.view
        return len([name for name in view.topic_names() if view.topic(name).perm & PERM_WRITE])

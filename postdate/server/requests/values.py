"""Key-value settings of a name server: operators store texts by namespace and key, and read them again.

Nothing here reads them. RocketMQ's own name server looks at one namespace, `ORDER_TOPIC_CONFIG`, and only where it is
told to, which it is not by default.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from postdate.broker.broker import Broker
from postdate.clock import Clock
from postdate.server.connection import Connection
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.rights import UPDATE, ask_cluster


class Values:
    """Answers requests about key-value settings."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker, self._clock = broker, clock

    def put(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        self._broker.values.put(asked["namespace"], asked["key"], asked["value"], self._clock.now_ms())
        return reply(command, codes.SUCCESS)

    def get(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        namespace, key = asked["namespace"], asked["key"]
        value = self._broker.view.find_value(namespace, key)
        if value is None:
            remark = f"namespace {namespace[:64]!r} has no value under {key[:64]!r}"
            return reply(command, codes.QUERY_NOT_FOUND, remark=remark)
        return reply(command, codes.SUCCESS, {"value": value})

    def list_all(self, _: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Answers the values of a namespace."""
        values = self._broker.view.values_of(asked["namespace"])
        if not values:
            remark = f"namespace {asked['namespace'][:64]!r} has no values"
            return reply(command, codes.QUERY_NOT_FOUND, remark=remark)
        return reply(command, codes.SUCCESS, body=orjson.dumps({"table": values}))

    def delete(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> bytes:
        """Deletes a value. Where there is none everybody may ask: RocketMQ's tools do when they have deleted a topic or
        a group, which takes no right to the cluster.
        """
        namespace, key = asked["namespace"], asked["key"]
        if self._broker.view.find_value(namespace, key) is not None:
            connection.asker.require(ask_cluster(UPDATE))
            self._broker.values.delete(namespace, key, self._clock.now_ms())
        return reply(command, codes.SUCCESS)

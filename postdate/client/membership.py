"""Our place in a consumer group: who belongs to it, and that we do.

A broker knows a member by its connection, so a membership has connections and a client id of its own.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from postdate.client.connection import Address, Connection, Connections
from postdate.client.errors import TimedOut, Unreachable, expect_success
from postdate.client.identity import new_client_id
from postdate.client.options import Wanted
from postdate.client.security import Security
from postdate.errors import PostdateError
from postdate.wire import bodies, codes
from postdate.wire.frame import Command
from postdate.wire.requests import ClientRequest, Request

log = logging.getLogger("postdate.client")


class Membership:
    """One member of one group, at every broker that it is connected to."""

    def __init__(self, wanted: Wanted, consume_type: str, timeout: float, security: Security) -> None:
        self.client_id = new_client_id()
        self.changed = asyncio.Event()  # the members may be others than when they were last asked for
        self._wanted, self._consume_type, self._timeout = wanted, consume_type, timeout
        self._connections = Connections(
            on_request=self._note_change, on_lost=self.changed.set, greet=self._greet, security=security
        )

    def _note_change(self, command: Command) -> None:
        if command.code == ClientRequest.NOTIFY_CONSUMER_IDS_CHANGED:
            self.changed.set()

    async def _greet(self, connection: Connection) -> None:
        """The first thing that a broker hears on a connection is a heartbeat, so that we are a member at once."""
        await self._beat(connection)
        self.changed.set()

    async def _beat(self, connection: Connection) -> None:
        consumer = bodies.Consumer(
            self._wanted.group, self._consume_type, "CLUSTERING",
            "CONSUME_FROM_FIRST_OFFSET" if self._wanted.from_ == "first" else "CONSUME_FROM_LAST_OFFSET",
            tuple(self._wanted.subscriptions().values()), shares_by_topic=True,
        )  # fmt: skip
        body = bodies.encode_heartbeat(bodies.Heartbeat(self.client_id, (), (consumer,)))
        expect_success(await connection.request(Request.HEART_BEAT, body=body, timeout=self._timeout))

    async def beat(self) -> None:
        """Tells every broker that we are alive. Those that are not connected hear it first thing when they are."""
        for connection in self._connections.alive:
            await self._beat(connection)

    async def connection(self, address: Address) -> Connection:
        """Raises Unreachable, TimedOut, or what the broker answers to a heartbeat."""
        return await self._connections.to(address, self._timeout)

    async def ask(self, address: Address, code: int, fields: Mapping[str, Any], body: bytes = b"") -> Command:
        connection = await self.connection(address)
        return await connection.request(code, fields, body, timeout=self._timeout)

    async def members(self, addresses: Iterable[Address], topic: str) -> list[str]:
        """The client ids of those that share a topic with us, as the first broker that answers knows them. RocketMQ
        answers with the whole group, and so does Postdate where an official client is a member.

        Connects to all, because each tells its own consumers who the others are. Raises the last failure if none
        can be reached.
        """
        reached: list[Connection] = []
        failure: PostdateError | None = None
        for address in addresses:
            try:
                reached.append(await self.connection(address))
            except (Unreachable, TimedOut) as error:
                log.debug("group %s: %s", self._wanted.group, error)
                failure = error
        if not reached:
            if failure is not None:
                raise failure
            return []
        members = await self._ask_members(reached[0], topic)
        if self.client_id not in members:  # we were silent for too long, or others want more tags than we do
            await self._beat(reached[0])
            members = await self._ask_members(reached[0], topic)
        return members

    async def _ask_members(self, connection: Connection, topic: str) -> list[str]:
        fields = {"consumerGroup": self._wanted.group, "topic": topic}
        answer = await connection.request(Request.GET_CONSUMER_LIST_BY_GROUP, fields, timeout=self._timeout)
        if answer.code == codes.SYSTEM_ERROR:
            return []  # the broker knows no member
        return bodies.decode_consumer_ids(expect_success(answer).body)

    async def say_goodbye(self) -> None:
        await asyncio.gather(*map(self._say_goodbye, self._connections.alive))

    async def _say_goodbye(self, connection: Connection) -> None:
        fields = {"clientID": self.client_id, "consumerGroup": self._wanted.group}
        try:
            await connection.request(Request.UNREGISTER_CLIENT, fields, timeout=self._timeout)
        except PostdateError as error:
            log.debug("goodbye was not heard: %s", error)  # the end of the connection says the same

    async def close(self) -> None:
        await self._connections.close()

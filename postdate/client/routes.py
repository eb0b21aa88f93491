"""Where topics live: asks the route addresses, and remembers the answers for a while."""

import asyncio
import random
from collections.abc import Mapping
from typing import NamedTuple

from postdate.client.address import Address, attempts, parse_address
from postdate.client.connection import Connections, within
from postdate.client.errors import Disconnected, TimedOut, Unreachable, expect_success
from postdate.errors import NoPermission, ProtocolError, TopicNotFound, UsageError
from postdate.wire import codes
from postdate.wire.bodies import QueueName, Route, decode_route
from postdate.wire.frame import Command
from postdate.wire.requests import Request

# The topic whose route and settings a new topic inherits, and how many queues a producer asks for at most: RocketMQ's.
DEFAULT_TOPIC = "TBW102"
DEFAULT_TOPIC_QUEUES_MAX = 4

ROUTE_SECONDS = 30.0  # as often as RocketMQ's clients ask
# For what is soon better known: a topic is there as soon as its first message is, a route address may be back.
SHORT_SECONDS = 1.0

_READABLE, _WRITABLE = 4, 2


class Target(NamedTuple):
    """A queue that can be written to."""

    broker_name: str
    address: Address
    queue_id: int


class _Known(NamedTuple):
    route: Route
    targets: list[Target]
    until: float  # by the loop's clock
    is_promise: bool = False  # of a topic that is not there yet


class Routes:
    """The routes of a client. Those who ask for one topic at once share one request."""

    def __init__(self, connections: Connections, addresses: tuple[Address, ...]) -> None:
        self._connections, self._addresses = connections, addresses
        self._known: dict[str, _Known] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._turns: dict[str, int] = {}
        self.is_postdate = False  # whether who answered last is a Postdate; RocketMQ's answers name Java
        self._first_turn = random.getrandbits(16)  # clients that send one message each must not all take the same queue

    async def of(self, topic: str, timeout: float) -> Route:
        """Raises TopicNotFound, Unreachable or TimedOut. An old route serves on while no route address answers."""
        return (await self._known_of(topic, timeout, creating=False)).route

    async def target(self, topic: str, queue_id: int | None, timeout: float, broker_name: str | None = None) -> Target:
        """The queue for the next message: the one asked for, else one after the other, over all brokers or that one.

        A topic that does not exist gets the route of TBW102: sending to it creates the topic. Raises what `of` raises,
        NoPermission if nothing can be written to, and UsageError for a queue that is not there.
        """
        targets = (await self._known_of(topic, timeout, creating=True)).targets
        if broker_name is not None:
            targets = [target for target in targets if target.broker_name == broker_name]
            if not targets:
                raise Unreachable(f"topic {topic} has no broker {broker_name!r} now")
        if not targets:
            raise NoPermission(f"topic {topic} has no queue that can be written to")
        if queue_id is not None:
            for target in targets:
                if target.queue_id == queue_id:
                    return target
            raise UsageError(f"topic {topic} has no queue {queue_id}, its last one is {targets[-1].queue_id}")
        turn = self._turns[topic] = self._turns.get(topic, self._first_turn) + 1
        return targets[turn % len(targets)]

    async def has_topic(self, topic: str, timeout: float) -> bool:
        """Whether a topic exists; True also where nobody says. A route does not tell: a broker that creates topics
        promises one for every name.
        """
        try:
            answer = await self._ask_any(Request.GET_TOPIC_CONFIG, {"topic": topic}, timeout)
        except Disconnected:
            return True  # a name server that does not know the question, perhaps
        return answer.code != codes.TOPIC_NOT_EXIST

    def forget(self, topic: str) -> None:
        """Asks anew the next time: what was known led nowhere."""
        self._known.pop(topic, None)

    def _fresh(self, topic: str, *, creating: bool) -> _Known | None:
        """What need not be asked for. A promise is good for creating a topic, and for nothing else."""
        known = self._known.get(topic)
        if known is None or (known.is_promise and not creating) or known.until <= asyncio.get_running_loop().time():
            return None
        return known

    async def _known_of(self, topic: str, timeout: float, *, creating: bool) -> _Known:
        known = self._fresh(topic, creating=creating)
        if known is not None:
            return known
        return await within(timeout, self._ask(topic, timeout, creating=creating), f"no route for topic {topic}")

    async def _ask(self, topic: str, timeout: float, *, creating: bool) -> _Known:
        async with self._locks.setdefault(topic, asyncio.Lock()):
            return self._fresh(topic, creating=creating) or await self._renew(topic, timeout, creating=creating)

    async def _renew(self, topic: str, timeout: float, *, creating: bool) -> _Known:
        try:
            return self._keep(topic, await self._query(topic, timeout), ROUTE_SECONDS)
        except TopicNotFound:
            self.forget(topic)
            if not creating:
                raise
            try:
                route = await self._query(DEFAULT_TOPIC, timeout)
            except TopicNotFound as error:
                raise TopicNotFound(f"topic {topic} does not exist, and the broker does not create topics") from error
            # What the route of the topic will be when its first message has made it from this one.
            limit = DEFAULT_TOPIC_QUEUES_MAX
            queues = [data._replace(write_queue_count=min(data.write_queue_count, limit)) for data in route.queues]
            return self._keep(topic, Route(route.brokers, queues), SHORT_SECONDS, is_promise=True)
        except (Unreachable, TimedOut):
            known = self._known.get(topic)
            if known is None or known.is_promise:
                raise
            return self._keep(topic, known.route, SHORT_SECONDS)

    def _keep(self, topic: str, route: Route, seconds: float, *, is_promise: bool = False) -> _Known:
        until = asyncio.get_running_loop().time() + seconds
        known = self._known[topic] = _Known(route, targets_of(route), until, is_promise)
        return known

    async def _query(self, topic: str, timeout: float) -> Route:
        fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
        answer = await self._ask_any(Request.GET_ROUTEINFO_BY_TOPIC, fields, timeout)
        return decode_route(expect_success(answer).body)

    async def _ask_any(self, code: int, fields: Mapping[str, str], timeout: float) -> Command:
        """Asks one route address after the other until one answers; that one is asked first the next time."""
        share = timeout / len(self._addresses)
        for attempt in attempts(self._addresses):
            with attempt as address:
                asking = self._ask_at(address, code, fields, share)
                answer = await within(share, asking, f"no answer from {address}")
                self._addresses = (address, *[other for other in self._addresses if other != address])
                self.is_postdate = answer.language == codes.LANGUAGE
                return answer
        raise AssertionError("an attempt has answered, or the last one has raised")

    async def _ask_at(self, address: Address, code: int, fields: Mapping[str, str], timeout: float) -> Command:
        connection = await self._connections.to(address, timeout)
        return await connection.request(code, fields, timeout=timeout)


def targets_of(route: Route) -> list[Target]:
    """The queues that can be written to. Neighbours are on different brokers, so that a resend tries another one."""
    addresses = addresses_of(route)
    targets = [
        Target(data.broker_name, addresses[data.broker_name], queue_id)
        for data in route.queues
        if data.perm & _WRITABLE and data.broker_name in addresses
        for queue_id in range(data.write_queue_count)
    ]
    return sorted(targets, key=lambda target: (target.queue_id, target.broker_name))


def readable_queues(topic: str, route: Route) -> list[QueueName]:
    """All queues that can be read, sorted as every member of a group sorts them."""
    return sorted(
        QueueName(topic, data.broker_name, queue_id)
        for data in route.queues
        if data.perm & _READABLE
        for queue_id in range(data.read_queue_count)
    )


def addresses_of(route: Route) -> dict[str, Address]:
    """The brokers' addresses by their names. Raises ProtocolError for what is no address."""
    try:
        return {broker.name: parse_address(broker.address) for broker in route.brokers}
    except UsageError as error:
        raise ProtocolError(f"a route with a broker that cannot be reached: {error}") from error

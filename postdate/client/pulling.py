"""A member of a consumer group that shares the queues out and pulls those that it owns.

```
  join --> rebalance --> one pull per owned queue --> backlog --> next() --> turn: work on each --> next(turn)
              ^ every 20 s, and when the                            ^                  |
              | members have changed                                |   commit, every second and on leaving
```
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from postdate.client.backlog import Backlog, OwnedQueue, Progress, Pull, PulledDelivery, readable_properties
from postdate.client.connection import Address
from postdate.client.consumer import Consumer, cancel, set_within
from postdate.client.errors import PAUSE_SECONDS_MIN, Pause, expect_success, refusal
from postdate.client.leases import LeasedDelivery, Source
from postdate.client.options import Wanted
from postdate.client.producer import Producer
from postdate.client.routes import DEFAULT_TOPIC, Routes, addresses_of, readable_queues
from postdate.client.security import Security
from postdate.errors import PostdateError, ProtocolError, TopicNotFound
from postdate.message import PROPERTY_TAGS
from postdate.wire import codes
from postdate.wire.allocation import allocate
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, Fields
from postdate.wire.records import Columns, Pieces, join_pieces, split_records
from postdate.wire.requests import Request

log = logging.getLogger("postdate.client")

REBALANCE_SECONDS = 20.0  # RocketMQ's
# How soon to look again for a topic that is not there yet, or a queue whose offset could not be asked.
REBALANCE_SOON_SECONDS = 1.0
COMMIT_SECONDS = 1.0
RETURNED_MAX = 32  # messages that come again which we ask for at once: they are few, and wait with their leases renewed
HOLD_SECONDS = 15.0  # how long a broker may hold a pull that finds nothing
# An answer that brings nothing new and comes sooner than this was not held: asking again at once would be a busy loop.
HELD_SECONDS_MIN = 0.5


class PullConsumer(Consumer):
    """A member that owns queues, and hands out the messages of each in their order."""

    def __init__(self, wanted: Wanted, routes: Routes, producer: Producer, timeout: float, security: Security) -> None:
        self._queues = Backlog(wanted.prefetch, self._queue_has_room, self._room_was_made)
        super().__init__(wanted, routes, producer, timeout, security, self._queues, "CONSUME_PASSIVELY")
        self._owned: dict[QueueName, OwnedQueue] = {}

    async def _begin(self) -> list[Coroutine[None, None, None]]:
        seconds = await self._rebalance()
        popping = await self._begin_popping() if self._routes.is_postdate else []
        return [
            *popping, self._repeat("commit", self._commit_changed, COMMIT_SECONDS), self._rebalance_forever(seconds)
        ]  # fmt: skip

    async def _acknowledge_pulled(self, delivery: PulledDelivery) -> None:
        """Commits. If that fails, a later commit tells the broker. A queue that another member has by now is left to
        that one.
        """
        queue = delivery.origin.queue
        if self._leaving is None and self._owned.get(queue.name) is queue:
            await self._commit(queue)

    async def _finish(self) -> None:
        await cancel(*[queue.pulling for queue in self._owned.values() if queue.pulling is not None])
        await asyncio.gather(*map(self._commit_or_complain, self._owned.values()))
        await self._leases.give_back(
            [each for each in self._queues.take_returned() if isinstance(each, LeasedDelivery)]
        )
        await self._leases.flush()

    async def _rebalance_forever(self, seconds: float) -> None:
        pause = Pause()
        while True:
            await set_within(self._membership.changed, seconds)
            try:
                seconds = await self._rebalance()
                self._recover("rebalance", pause)
                await asyncio.sleep(PAUSE_SECONDS_MIN)  # a group that restarts changes many times in a moment
            except PostdateError as error:
                await asyncio.sleep(self._complain("rebalance", error, pause))
                seconds = 0

    # -- queues

    @property
    def _pulled_topics(self) -> Sequence[str]:
        """The topics whose queues we share. Of Postdate we pop the retry topic instead: it has one queue, and that has
        messages for members of all the group's topics.
        """
        return (self._wanted.topic,) if self._routes.is_postdate else tuple(self._subscriptions)

    async def _rebalance(self) -> float:
        """Takes our share of the queues; returns in how many seconds to look again."""
        self._membership.changed.clear()  # before anybody is asked: a change from here on means another rebalance
        complete = True
        try:
            for topic in self._pulled_topics:
                complete &= await self._share_out(topic)
        finally:
            # Not before all of it is known: how much may wait depends on how many share it.
            self._queues.share_among(len(self._owned))
            for queue in self._owned.values():
                if queue.pulling is None and not self._stopped.is_set():
                    queue.pulling = self._spawn(self._pull_forever(queue))
        return REBALANCE_SECONDS if complete else REBALANCE_SOON_SECONDS

    async def _share_out(self, topic: str) -> bool:
        """Takes our share of one topic; returns whether all of it could be taken."""
        try:
            route = await self._routes.of(topic, self._timeout)
        except TopicNotFound:
            # RocketMQ makes the retry topic of a group on its first heartbeat, so one must come before any route.
            with contextlib.suppress(TopicNotFound):
                route = await self._routes.of(DEFAULT_TOPIC, self._timeout)
                await self._membership.members(addresses_of(route).values(), topic)
            await self._own_queues(topic, (), {})
            return False
        addresses = addresses_of(route)
        members = await self._membership.members(addresses.values(), topic)
        share = allocate(self._membership.client_id, members, readable_queues(topic, route))
        return await self._own_queues(topic, share, addresses)

    async def _own_queues(self, topic: str, share: Sequence[QueueName], addresses: Mapping[str, Address]) -> bool:
        """Owns exactly these queues of a topic; returns whether that was possible for all."""
        for name, queue in list(self._owned.items()):
            if name.topic == topic and name not in share:
                await self._lose(queue)
        complete = True
        for name in share:
            if name in self._owned:
                self._owned[name].address = addresses.get(name.broker_name, self._owned[name].address)
            elif name.broker_name in addresses:
                complete &= await self._gain(name, addresses[name.broker_name])
        return complete

    async def _gain(self, name: QueueName, address: Address) -> bool:
        """Begins where the group has committed, else where it wants to begin. Of its retries it wants all."""
        try:
            fields = self._queue_fields(name) | {"setZeroIfNotFound": "false"}
            answer = await self._membership.ask(address, Request.QUERY_CONSUMER_OFFSET, fields)
            committed = None
            if answer.code != codes.QUERY_NOT_FOUND:
                committed = start = _number(expect_success(answer).fields, "offset")
            elif name.topic == self._wanted.retry_topic:
                start = 0
            else:
                code = Request.GET_MIN_OFFSET if self._wanted.from_ == "first" else Request.GET_MAX_OFFSET
                answer = await self._membership.ask(address, code, {"topic": name.topic, "queueId": name.queue_id})
                start = _number(expect_success(answer).fields, "offset")
        except PostdateError as error:
            log.warning("group %s: no place to begin %s: %s", self._wanted.group, _name_of(name), error)
            return False
        self._owned[name] = OwnedQueue(name, address, Progress(start), committed)
        return True

    async def _lose(self, queue: OwnedQueue) -> None:
        """Another member has it now: what is not handed out is dropped, for the other one to read."""
        if queue.pulling is not None:
            await cancel(queue.pulling)
        self._queues.drop(queue)
        await self._commit_or_complain(queue)
        del self._owned[queue.name]  # and not before: who leaves meanwhile commits what we own

    def _queue_fields(self, name: QueueName) -> dict[str, Any]:
        return {"consumerGroup": self._wanted.group, "topic": name.topic, "queueId": name.queue_id}

    # -- messages that come again

    async def _pop_messages(self, source: Source) -> bool:
        """Pops what failed before and is ready for another attempt: it stays in its queue, which has moved on. What
        official members of the group have sent back is in the retry topic.
        """
        if self._queues.has_returned:
            self._room.clear()
            if self._queues.has_returned:  # and none was taken before the event was cleared
                await self._room.wait()
            return True
        popped = await self._pop(source, RETURNED_MAX, is_ready_only=source.topic in self._pulled_topics)
        if popped.deliveries:
            self._queues.put_returned(popped.deliveries)
            self._arrived.set()
        return popped.was_held or bool(popped.size)

    # -- pulling

    async def _pull_forever(self, queue: OwnedQueue) -> None:
        pause = Pause()
        while True:
            while queue.is_full:  # and not only until `room` is set: it may be, from the time before
                queue.room.clear()
                await queue.room.wait()
            try:
                if await self._pull(queue):
                    pause.reset()
                else:
                    await asyncio.sleep(pause.next())
            except PostdateError as error:
                await asyncio.sleep(self._complain(f"pull of {_name_of(queue.name)}", error, pause))

    async def _pull(self, queue: OwnedQueue) -> bool:
        """One pull; returns whether the next may follow at once: something came, or the broker held it for a while."""
        began = asyncio.get_running_loop().time()
        connection = await self._membership.connection(queue.address)
        position = queue.progress.position
        commit_offset = queue.progress.commit_offset
        flags = codes.PULL_SUSPEND | codes.PULL_SUBSCRIPTION | (codes.PULL_COMMIT_OFFSET if commit_offset else 0)
        fields = self._queue_fields(queue.name) | {
            "queueOffset": position,
            "maxMsgNums": self._queues.count_to_pull(queue, self._wanted.batch), "sysFlag": flags,
            "commitOffset": commit_offset, "suspendTimeoutMillis": int(HOLD_SECONDS * 1_000),
            "subscription": self._subscriptions[queue.name.topic].expression, "subVersion": 0,
            "expressionType": "TAG", "bname": queue.name.broker_name,
        }  # fmt: skip
        answer = await connection.request(Request.PULL_MESSAGE, fields, timeout=HOLD_SECONDS + self._timeout)
        self._take_in(queue, answer)
        was_held = asyncio.get_running_loop().time() - began >= HELD_SECONDS_MIN
        return was_held or queue.progress.position != position

    def _take_in(self, queue: OwnedQueue, answer: Command) -> None:
        if answer.code not in _PULLED:
            raise refusal(answer)
        position = _number(answer.fields, "nextBeginOffset")
        if answer.code == codes.SUCCESS:
            tags, found = self._subscriptions[queue.name.topic].tags, split_records(answer.body)
            if tags:  # a broker filters by the hash of a tag, and two tags may share one
                found = Columns.of([pieces for pieces in zip(*found, strict=True) if _tag(pieces) in tags])
            self._queues.put(Pull(queue, found, len(answer.body)), position)
            self._has_received = True
            self._arrived.set()
        elif not self._queues.move(queue, position):
            log.warning("group %s: %s begins anew at offset %d", self._wanted.group, _name_of(queue.name), position)

    def _queue_has_room(self, queue: OwnedQueue) -> None:
        """Called by the thread that takes messages, which may be any."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all pulling
            self._loop.call_soon_threadsafe(queue.room.set)

    # -- committing

    async def _commit_changed(self) -> None:
        """Commits without an answer: the next pull commits what gets lost."""
        for queue in list(self._owned.values()):
            offset = queue.progress.commit_offset
            if offset != queue.committed:
                connection = await self._membership.connection(queue.address)
                connection.tell(
                    Request.UPDATE_CONSUMER_OFFSET, self._queue_fields(queue.name) | {"commitOffset": offset}
                )
                queue.committed = offset

    async def _commit(self, queue: OwnedQueue) -> None:
        """Tells the broker how far we are, and waits until it knows."""
        offset = queue.progress.commit_offset
        fields = self._queue_fields(queue.name) | {"commitOffset": offset}
        expect_success(await self._membership.ask(queue.address, Request.UPDATE_CONSUMER_OFFSET, fields))
        queue.committed = offset

    async def _commit_or_complain(self, queue: OwnedQueue) -> None:
        """The last commit of a queue: it does not fail."""
        try:
            await self._commit(queue)
        except PostdateError as error:
            log.warning("group %s: offset of %s not committed: %s", self._wanted.group, _name_of(queue.name), error)


_PULLED = (codes.SUCCESS, codes.PULL_NOT_FOUND, codes.PULL_RETRY_IMMEDIATELY, codes.PULL_OFFSET_MOVED)


def _tag(pieces: Pieces) -> str | None:
    return readable_properties(join_pieces(pieces).properties).get(PROPERTY_TAGS)


def _name_of(name: QueueName) -> str:
    return f"{name.topic}/{name.queue_id}"


def _number(fields: Fields, name: str) -> int:
    try:
        return int(fields[name])
    except (KeyError, ValueError, TypeError) as error:
        raise ProtocolError(f"an answer has {name} = {fields.get(name)!r}, expected a number") from error

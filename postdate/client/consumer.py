"""A member of a consumer group at work: shares the queues out, pulls, hands out, commits.

```
  join --> rebalance --> one pull per owned queue --> backlog --> next() --> turn: work on each --> next(turn)
              ^ every 20 s, and when the                            ^                  |
              | members have changed                                |   commit, every second and on leaving
```

Everything runs on one event loop. Background work that fails is tried again after a growing pause.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from postdate.client.backlog import Backlog, Delivery, OwnedQueue, Progress, Pull, Turn, readable_properties
from postdate.client.connection import Address
from postdate.client.errors import PAUSE_SECONDS_MIN, Pause, expect_success, refusal
from postdate.client.membership import Membership
from postdate.client.options import Wanted
from postdate.client.producer import Producer
from postdate.client.returns import Returns
from postdate.client.routes import DEFAULT_TOPIC, Routes, addresses_of, readable_queues
from postdate.errors import PostdateError, ProtocolError, TopicNotFound, UsageError
from postdate.message import PROPERTY_TAGS
from postdate.spans import Delay
from postdate.wire import codes
from postdate.wire.allocation import allocate
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Command, Fields
from postdate.wire.records import Columns, Pieces, join_pieces, split_records
from postdate.wire.requests import Request

log = logging.getLogger("postdate.client")

# RocketMQ's intervals: brokers forget a silent member after 120 s.
HEARTBEAT_SECONDS = 30.0
REBALANCE_SECONDS = 20.0
# How soon to look again for a topic that is not there yet, or a queue whose offset could not be asked.
REBALANCE_SOON_SECONDS = 1.0
COMMIT_SECONDS = 1.0
HOLD_SECONDS = 15.0  # how long a broker may hold a pull that finds nothing
# An answer that brings nothing new and comes sooner than this was not held: asking again at once would be a busy loop.
HELD_SECONDS_MIN = 0.5
LEAVE_SECONDS = 0.8  # what is not committed by then is delivered again; leaving must not hang on a dead broker


class Consumer:
    """One member of one group, for one topic and the group's retry topic. Joins once, leaves once."""

    def __init__(self, wanted: Wanted, routes: Routes, producer: Producer, timeout: float) -> None:
        self._wanted, self._subscriptions, self.idle_seconds = wanted, wanted.subscriptions(), wanted.idle_seconds
        self._routes, self._timeout = routes, timeout
        self._membership = Membership(wanted, timeout)
        self._returns = Returns(wanted, self._membership, producer)
        self._owned: dict[QueueName, OwnedQueue] = {}
        self._loop = asyncio.get_running_loop()
        self._backlog = Backlog(wanted.prefetch, self._room_was_made)
        self._arrived = asyncio.Event()  # something for `next` to look at
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: asyncio.Task[None] | None = None

    # -- what the clients call

    async def join(self) -> None:
        """Becomes a member and takes its share of the queues. A topic that does not exist yet is waited for.

        Raises Unreachable, TimedOut or what the broker answers. A broker that goes away later is waited for.
        """
        try:
            seconds = await self._rebalance()
            if self._stopped.is_set():
                raise UsageError("the client was closed")
        except BaseException:
            await self.leave()
            raise
        self._tasks += [
            self._spawn(self._repeat("heartbeat", self._membership.beat, HEARTBEAT_SECONDS)),
            self._spawn(self._repeat("commit", self._commit_changed, COMMIT_SECONDS)),
            self._spawn(self._rebalance_forever(seconds)),
        ]

    async def next(self, done: Turn | None = None) -> Turn | None:
        """Takes a finished turn back; returns the next one, when there is a message. The caller settles each message.

        Returns None after `stop`, or when no message has come for `idle_seconds`.
        """
        if done is not None:
            await asyncio.sleep(0)  # what is pulled comes in by the same loop
        turn = self._backlog.take(done)
        if turn is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.idle_seconds):
                    while turn is None and not self._backlog.has_ended:
                        self._arrived.clear()
                        await self._arrived.wait()
                        turn = self._backlog.take()
        if self._backlog.is_ready:  # for another task
            self._arrived.set()
        return turn

    def next_within(self, seconds: float, done: Turn | None = None) -> Turn | None:
        """As `next`, for threads other than the loop's, and for all of them at once. None also when time is over."""
        return self._backlog.take_within(seconds, done)

    @property
    def has_ended(self) -> bool:
        """Whether no message will come any more; for any thread."""
        return self._backlog.has_ended

    async def acknowledge(self, delivery: Delivery) -> None:
        """Commits a message that is still worked on. Raises what the broker answers; then a later commit tells it.

        A queue that another member has by now is left to that one. Raises UsageError when the group was left.
        """
        if self._leaving is not None and not delivery.is_settled:
            raise UsageError(f"message {delivery.id} cannot be acknowledged: the loop that it came from has ended")
        delivery.settle()
        queue = delivery.origin.queue
        if self._leaving is None and self._owned.get(queue.name) is queue:
            await self._commit(queue)

    async def retry(self, delivery: Delivery, delay: Delay | None) -> None:
        """Sends a message back. It then counts as acknowledged. Raises what the broker answers."""
        await self._returns.retry(delivery, delay)
        delivery.settle()

    async def give_back(self, delivery: Delivery, error: Exception) -> bool:
        """Its handler failed: the message is sent back, and never dropped, unless the handler has settled it itself.

        Tries until the broker has taken it, or until `stop`; then it is False, and stays unacknowledged.
        """
        record = delivery.record
        log.warning(
            "the handler failed on message %s of %s (queue %d, offset %d, attempt %d), %s: %s: %s",
            delivery.id, record.topic, record.queue_id, record.queue_offset, record.reconsume_times + 1,
            "which it had settled before" if delivery.is_settled else "it is sent back", type(error).__name__, error,
        )  # fmt: skip
        if delivery.is_settled:
            return True
        pause = Pause()
        while not self._stopped.is_set():
            try:
                await self._returns.give_back(delivery)
                return True
            except PostdateError as problem:
                seconds = pause.next()
                log.warning("message %s cannot be sent back, again in %.1f s: %s", delivery.id, seconds, problem)
                await _set_within(self._stopped, seconds)
        return False

    def stop(self, failure: BaseException | None = None) -> None:
        """Hands out nothing more; `next` raises the failure. Until `leave`, messages may still be acknowledged."""
        self._backlog.end(failure)
        self._stopped.set()
        self._arrived.set()

    async def leave(self) -> None:
        """Commits what is acknowledged and says goodbye; at most about a second. May be repeated."""
        self.stop()
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._leave())
        await asyncio.shield(self._leaving)

    async def _leave(self) -> None:
        pulls = [queue.pulling for queue in self._owned.values() if queue.pulling is not None]
        await _cancel(*self._tasks, *pulls)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*map(self._commit_or_complain, self._owned.values()))
                await self._membership.say_goodbye()
        except TimeoutError:
            log.warning("group %s: the broker did not take the last offsets in time", self._wanted.group)
        finally:
            await self._membership.close()

    # -- in the background

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._stop_if_failed)
        return task

    def _stop_if_failed(self, task: "asyncio.Task[None]") -> None:
        """Background work only ends by being cancelled. If it fails, that is a mistake of ours: `next` raises it."""
        if not task.cancelled() and task.exception() is not None:
            self.stop(task.exception())

    async def _repeat(self, name: str, action: Callable[[], Awaitable[None]], every_seconds: float) -> None:
        pause, seconds = Pause(), every_seconds
        while True:
            await asyncio.sleep(seconds)
            try:
                await action()
            except PostdateError as error:
                seconds = self._complain(name, error, pause)
            else:
                pause.reset()
                seconds = every_seconds

    def _complain(self, name: str, error: PostdateError, pause: Pause) -> float:
        """One line when trouble begins; the tries that follow are for the curious. Returns how long to wait."""
        level = logging.WARNING if pause.is_fresh else logging.DEBUG
        log.log(level, "group %s: %s failed and is tried again: %s", self._wanted.group, name, error)
        return pause.next()

    async def _rebalance_forever(self, seconds: float) -> None:
        pause = Pause()
        while True:
            await _set_within(self._membership.changed, seconds)
            try:
                seconds = await self._rebalance()
                pause.reset()
                await asyncio.sleep(PAUSE_SECONDS_MIN)  # a group that restarts changes many times in a moment
            except PostdateError as error:
                await asyncio.sleep(self._complain("rebalance", error, pause))
                seconds = 0

    # -- queues

    async def _rebalance(self) -> float:
        """Takes our share of the queues of both topics; returns in how many seconds to look again."""
        self._membership.changed.clear()  # before anybody is asked: a change from here on means another rebalance
        complete = True
        try:
            for topic in self._subscriptions:
                complete &= await self._share_out(topic)
        finally:
            # Not before all of it is known: how much may wait depends on how many share it.
            self._backlog.share_among(len(self._owned))
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
                await self._membership.members(addresses_of(route).values())
            await self._own_queues(topic, (), {})
            return False
        addresses = addresses_of(route)
        members = await self._membership.members(addresses.values())
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
            await _cancel(queue.pulling)
        self._backlog.drop(queue)
        await self._commit_or_complain(queue)
        del self._owned[queue.name]  # and not before: who leaves meanwhile commits what we own

    def _queue_fields(self, name: QueueName) -> dict[str, Any]:
        return {"consumerGroup": self._wanted.group, "topic": name.topic, "queueId": name.queue_id}

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
            "maxMsgNums": self._backlog.count_to_pull(queue, self._wanted.batch), "sysFlag": flags,
            "commitOffset": commit_offset, "suspendTimeoutMillis": int(HOLD_SECONDS * 1_000),
            "subscription": self._subscriptions[queue.name.topic].expression, "subVersion": 0,
            "expressionType": "TAG", "bname": queue.name.broker_name,
        }  # fmt: skip
        self._take_in(
            queue, await connection.request(Request.PULL_MESSAGE, fields, timeout=HOLD_SECONDS + self._timeout)
        )
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
            self._backlog.put(Pull(queue, found, len(answer.body)), position)
            self._arrived.set()
        elif not self._backlog.move(queue, position):
            log.warning("group %s: %s begins anew at offset %d", self._wanted.group, _name_of(queue.name), position)

    def _room_was_made(self, queue: OwnedQueue) -> None:
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


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Waits until an event is set, but not longer than that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

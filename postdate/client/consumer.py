"""A member of a consumer group, from joining to leaving, whatever way it gets its messages.

```
  join --> (background work brings messages) --> next() --> turn: work on each --> next(turn) --> ... --> stop --> leave
```

Everything runs on one event loop. Background work that fails is tried again after a growing pause.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from postdate.client.backlog import Delivery, HandOut, PulledDelivery, Turn
from postdate.client.errors import PASSING, Pause
from postdate.client.leases import TICK_SECONDS, LeasedDelivery, Leases, Popped, Source
from postdate.client.membership import Membership
from postdate.client.options import Wanted
from postdate.client.producer import Producer
from postdate.client.returns import Returns
from postdate.client.routes import Routes, addresses_of, readable_queues
from postdate.client.security import Security
from postdate.errors import PostdateError, TopicNotFound, UsageError
from postdate.message import DLQ_TOPIC_PREFIX, PROPERTY_RETRY_TOPIC, PROPERTY_TAGS, REASON_CHARACTERS_MAX
from postdate.spans import Delay, delay_ms

log = logging.getLogger("postdate.client")

HEARTBEAT_SECONDS = 30.0  # RocketMQ's: brokers forget a silent member after 120 s
LEAVE_SECONDS = 0.8  # what is not committed by then is delivered again; leaving must not hang on a dead broker
LOOK_SECONDS = 20.0  # how often to look for brokers that are new
LOOK_SOON_SECONDS = 1.0  # the same, while one of our topics does not exist
MISSING_SECONDS = 60.0  # when to warn a second time of a topic that did not exist

FOREIGN_MS = 1_000  # after which a message of another topic of the group comes again, to whoever reads that topic


class Consumer(ABC):
    """One member of one group, for one topic and the group's retry topic. Joins once, leaves once."""

    def __init__(
        self, wanted: Wanted, routes: Routes, producer: Producer, timeout: float, security: Security, backlog: HandOut,
        consume_type: str,
    ) -> None:  # fmt: skip
        self._wanted, self._subscriptions, self.idle_seconds = wanted, wanted.subscriptions(), wanted.idle_seconds
        self._routes, self._timeout, self._backlog = routes, timeout, backlog
        self._membership = Membership(wanted, consume_type, timeout, security)
        self._leases = Leases(wanted, self._membership)
        self._returns = Returns(wanted, self._membership, self._leases, producer, routes)
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()  # something for `next` to look at
        self._has_received = False  # anything at all
        self._foreign_topics: set[str] = set()  # of messages that we passed on: one warning for each is enough
        self._stopped = asyncio.Event()
        self._room = asyncio.Event()  # for what is popped
        self._popping: dict[Source, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: asyncio.Task[None] | None = None
        self._abandoned: Delivery | None = None  # what a loop had at hand when it was left
        # Threads or tasks that take messages: one of them must not wait until it has left.
        self.callers: set[object] = set()

    # -- what differs

    @abstractmethod
    async def _begin(self) -> list[Coroutine[None, None, None]]:
        """Becomes a member; returns the background work that brings messages. May be repeated after a failure."""

    @abstractmethod
    async def _finish(self) -> None:
        """Tells the broker what is not told yet, before the member says goodbye."""

    @abstractmethod
    async def _pop_messages(self, source: Source) -> bool:
        """Pops once, when there is room; returns whether the next pop may follow at once."""

    @abstractmethod
    async def _acknowledge_pulled(self, delivery: PulledDelivery) -> None:
        """Tells the broker at once that a message is acknowledged. Raises what it answers."""

    # -- what the clients call

    async def join(self, *, is_patient: bool) -> None:
        """Becomes a member. A topic that does not exist yet is waited for, and so is a broker that goes away later.

        A broker that is not there at the beginning is waited for if `is_patient`. Raises Unreachable, TimedOut or what
        the broker answers, unless it is stopped meanwhile: then it has left, and hands out nothing.
        """
        try:
            work = await self._begin_in_time(is_patient)
        except BaseException as error:
            was_stopped = self._stopped.is_set()
            await self.leave()
            if was_stopped and isinstance(error, PostdateError):
                return
            raise
        if self._stopped.is_set():
            for each in work:
                each.close()
            await self.leave()
            return
        self._tasks += map(self._spawn, work)
        self._tasks.append(self._spawn(self._repeat("heartbeat", self._membership.beat, HEARTBEAT_SECONDS)))

    async def _begin_in_time(self, is_patient: bool) -> list[Coroutine[None, None, None]]:
        pause = Pause()
        while True:
            try:
                is_missing = not await self._routes.has_topic(self._wanted.topic, self._timeout)
                if is_missing and pause.is_fresh:
                    self._warn_of_missing_topic("does not exist")
                work = await self._begin()
            except PASSING as error:
                if not is_patient or self._stopped.is_set():
                    raise
                seconds = self._complain("joining", error, pause)
                await set_within(self._stopped, seconds)
                if self._stopped.is_set():
                    return []
            else:
                if not pause.is_fresh:
                    log.info("group %s: the broker answers, joined", self._wanted.group)
                return [*work, self._warn_later()] if is_missing else work

    async def _warn_later(self) -> None:
        """Warns once more of a topic that did not exist when we joined: whoever mistyped its name may look only now."""
        await asyncio.sleep(MISSING_SECONDS)
        if not self._has_received:
            self._warn_of_missing_topic(f"did not exist {MISSING_SECONDS:g} s ago, and nothing has come from it")

    def _warn_of_missing_topic(self, what: str) -> None:
        log.warning(
            "group %s waits for messages of topic %s, which %s; is the name right? create it with: "
            "postdate topic create %s", self._wanted.group, self._wanted.topic, what, self._wanted.topic,
        )  # fmt: skip

    async def next(self, done: Turn | None = None) -> Turn | None:
        """Takes a finished turn back; returns the next one, when there is a message. The caller settles each message.

        Returns None after `stop`, or when no message has come for `idle_seconds`.
        """
        self.callers.add(asyncio.current_task())
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
        """Acknowledges a message that is still worked on, now. Raises what the broker answers; then it is told later.

        Raises UsageError when the group was left.
        """
        if self._leaving is not None and (not delivery.is_settled or delivery is self._abandoned):
            raise UsageError(f"message {delivery.id} cannot be acknowledged: the loop that it came from has ended")
        if isinstance(delivery, LeasedDelivery):
            await self._leases.acknowledge(delivery)
        else:
            assert isinstance(delivery, PulledDelivery), delivery
            delivery.settle()
            await self._acknowledge_pulled(delivery)

    async def retry(self, delivery: Delivery, delay: Delay | None) -> None:
        """Has a message come again. It then counts as acknowledged. Raises what the broker answers."""
        await self._returns.retry(delivery, self._delay_ms(delivery) if delay is None else delay_ms(delay), "retried")

    def _delay_ms(self, delivery: Delivery) -> int:
        """The delay after this attempt, as the caller of `listen` wants it; -1 leaves it to the group's settings."""
        delays_ms = self._wanted.retry_ms
        return delays_ms[min(delivery.record.reconsume_times, len(delays_ms) - 1)] if delays_ms else -1

    async def give_back(self, delivery: Delivery, error: BaseException) -> bool:
        """Its handler failed: the message comes again, and is never dropped, unless the handler has settled it itself.

        Tries until the broker has taken it, or until the group is left; then it is False, and stays unacknowledged.
        """
        if delivery.is_settled:
            self._log_failure(logging.WARNING, delivery, error, "it had settled the message before")
            return True
        pause = Pause()
        while self._leaving is None:
            try:
                outcome = await self._returns.give_back(delivery, self._delay_ms(delivery), _reason(error))
            except PostdateError as problem:
                if pause.is_fresh:
                    self._log_failure(logging.WARNING, delivery, error, f"it cannot be sent back yet: {problem}")
                if self._stopped.is_set():
                    break  # it comes again all the same, because nobody acknowledges it
                await set_within(self._stopped, pause.next())
            else:
                if outcome.is_dead:
                    where = DLQ_TOPIC_PREFIX + self._wanted.group
                    sentence = f"this was its last attempt: it is now a dead letter in {where}"
                    self._log_failure(logging.ERROR, delivery, error, sentence)
                else:
                    when = "later" if outcome.delay_ms is None else f"in {outcome.delay_ms / 1_000:g} s"
                    self._log_failure(logging.WARNING, delivery, error, f"it comes again {when}")
                return True
        return False

    def _log_failure(self, level: int, delivery: Delivery, error: BaseException, what: str) -> None:
        record = delivery.record
        log.log(
            level, "the handler failed on message %s of %s (queue %d, offset %d, attempt %d), %s: %s: %s",
            delivery.id, delivery.topic, record.queue_id, record.queue_offset, record.reconsume_times + 1, what,
            type(error).__name__, error, exc_info=error,
        )  # fmt: skip

    def stop(self, failure: BaseException | None = None) -> None:
        """Hands out nothing more; `next` raises the failure. Until `leave`, messages may still be acknowledged."""
        if not self._stopped.is_set():
            log.info("group %s: takes no more messages of %s, and leaves", self._wanted.group, self._wanted.topic)
        self._backlog.end(failure)
        self._stopped.set()
        self._arrived.set()
        self._room.set()

    def forbid_taking(self) -> None:
        """The first step of `stop`, for handlers of signals: it takes no lock, and wakes nobody."""
        self._backlog.has_ended = True

    async def leave(self, seconds: float = LEAVE_SECONDS, at_hand: Delivery | None = None) -> None:
        """Tells the broker what is acknowledged and says goodbye; takes at most this long. May be repeated.

        A message at hand was handed out, and nobody says that it is done: it comes again at once, as another attempt.
        """
        self.stop()
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._leave(seconds, at_hand))
        await asyncio.shield(self._leaving)

    async def _leave(self, seconds: float, at_hand: Delivery | None) -> None:
        await cancel(*self._tasks)
        try:
            async with asyncio.timeout(seconds):
                if at_hand is not None and not at_hand.is_settled:
                    self._abandoned = at_hand
                    await self._returns.abandon(at_hand)
                await self._finish()
                await self._leases.abandon_all()
                await self._membership.say_goodbye()
                if self._popping:
                    await asyncio.wait(self._popping.values())  # the broker answers the pops of a member that leaves
        except TimeoutError:
            log.warning("group %s: the broker did not hear in time what is acknowledged", self._wanted.group)
        except PostdateError as error:
            log.warning("group %s: the broker did not hear what is acknowledged: %s", self._wanted.group, error)
        finally:
            await cancel(*self._popping.values())
            await self._membership.close()

    # -- popping

    async def _begin_popping(self) -> list[Coroutine[None, None, None]]:
        seconds = await self._find_sources()
        return [
            self._find_sources_forever(seconds), self._acknowledge_forever(),
            self._repeat("renewing leases", self._leases.renew, TICK_SECONDS),
        ]  # fmt: skip

    async def _find_sources_forever(self, seconds: float) -> None:
        pause = Pause()
        while True:
            await asyncio.sleep(seconds)
            try:
                seconds = await self._find_sources()
                self._recover("looking for brokers", pause)
            except PostdateError as error:
                seconds = self._complain("looking for brokers", error, pause)

    async def _find_sources(self) -> float:
        """Pops at every broker that has one of our topics; returns in how many seconds to look again."""
        seconds, sources = LOOK_SECONDS, set[Source]()
        for topic in self._subscriptions:
            try:
                route = await self._routes.of(topic, self._timeout)
            except TopicNotFound:
                seconds = LOOK_SOON_SECONDS
                continue
            addresses = addresses_of(route)
            names = {queue.broker_name for queue in readable_queues(topic, route)} & set(addresses)
            sources |= {Source(topic, name, addresses[name]) for name in names}
        for address in {source.address for source in sources}:
            await self._membership.connection(address)  # a broker that refuses us says so now
        await cancel(*[self._popping.pop(source) for source in set(self._popping) - sources])
        for source in sources - set(self._popping):
            if not self._stopped.is_set():
                self._popping[source] = self._spawn(self._pop_forever(source))
        return seconds

    async def _pop_forever(self, source: Source) -> None:
        pause = Pause()
        while not self._stopped.is_set():
            try:
                if await self._pop_messages(source):
                    pause.reset()
                else:
                    await set_within(self._stopped, pause.next())
            except PostdateError as error:
                await set_within(self._stopped, self._complain(f"pop of {source.topic}", error, pause))

    async def _pop(self, source: Source, count: int, *, is_ready_only: bool) -> Popped:
        """One pop; returns the messages that are for us."""
        expression = self._subscriptions[source.topic].expression
        popped = await self._leases.pop(source, count, expression, self._timeout, is_ready_only=is_ready_only)
        if self._stopped.is_set():
            await self._leases.give_back(popped.deliveries)
            return popped._replace(deliveries=[])
        self._has_received |= bool(popped.deliveries)
        return popped._replace(deliveries=await self._sort_out(source.topic, popped.deliveries))

    async def _sort_out(self, topic: str, found: list[LeasedDelivery]) -> list[LeasedDelivery]:
        """Returns the messages that are for us. A broker filters by the hash of a tag, and two tags may share one."""
        tags, wanted = self._subscriptions[topic].tags, list[LeasedDelivery]()
        for delivery in found:
            if tags and delivery.properties.get(PROPERTY_TAGS) not in tags:
                delivery.settle()
            elif self._is_foreign(topic, delivery.properties):
                self._warn_of_foreign(delivery)
                await self._leases.give_back([delivery], FOREIGN_MS)
            else:
                wanted.append(delivery)
        return wanted

    def _is_foreign(self, topic: str, properties: Mapping[str, str]) -> bool:
        """Whether a message of the group's retry topic belongs to another of its topics, which we do not read."""
        is_retried = topic == self._wanted.retry_topic != self._wanted.topic
        return is_retried and properties.get(PROPERTY_RETRY_TOPIC, self._wanted.topic) != self._wanted.topic

    def _warn_of_foreign(self, delivery: Delivery) -> None:
        level = logging.DEBUG if delivery.topic in self._foreign_topics else logging.WARNING
        self._foreign_topics.add(delivery.topic)
        log.log(
            level, "group %s: message %s belongs to topic %s, which this member does not read: it is passed on",
            self._wanted.group, delivery.id, delivery.topic,
        )  # fmt: skip

    def _room_was_made(self) -> None:
        """Called by the thread that takes messages, which may be any."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all popping
            self._loop.call_soon_threadsafe(self._room.set)

    async def _acknowledge_forever(self) -> None:
        pause = Pause()
        while True:
            await self._leases.wait_for_settled()
            while True:
                try:
                    await self._leases.flush()
                except PASSING as error:
                    await asyncio.sleep(self._complain("acknowledging", error, pause))
                else:
                    self._recover("acknowledging", pause)
                    break

    # -- in the background

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        task.add_done_callback(self._stop_if_failed)
        return task

    def _stop_if_failed(self, task: "asyncio.Task[None]") -> None:
        """Background work ends by being cancelled. If it fails, that is a mistake of ours, and `next` raises it."""
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
                self._recover(name, pause)
                seconds = every_seconds

    def _complain(self, name: str, error: PostdateError, pause: Pause) -> float:
        """One line when trouble begins; the tries that follow are for the curious. Returns how long to wait."""
        level = logging.WARNING if pause.is_fresh else logging.DEBUG
        log.log(level, "group %s: %s failed and is tried again: %s", self._wanted.group, name, error)
        return pause.next()

    def _recover(self, name: str, pause: Pause) -> None:
        """One line when trouble has ended."""
        if not pause.is_fresh:
            log.info("group %s: %s works again", self._wanted.group, name)
            pause.reset()


def _reason(error: BaseException) -> str:
    """Why a handler failed, as it is kept with the message."""
    return f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]


async def set_within(event: asyncio.Event, seconds: float) -> None:
    """Waits until an event is set, but not longer than that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

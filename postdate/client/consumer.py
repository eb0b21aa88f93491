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
from collections.abc import Awaitable, Callable, Coroutine

from postdate.client.backlog import Backlog, Delivery, Turn
from postdate.client.errors import Pause, TimedOut, Unavailable, Unreachable
from postdate.client.membership import Membership
from postdate.client.options import Wanted
from postdate.client.producer import Producer
from postdate.client.returns import Returns
from postdate.client.routes import Routes
from postdate.errors import FlowControl, PostdateError, UsageError
from postdate.spans import Delay

log = logging.getLogger("postdate.client")

HEARTBEAT_SECONDS = 30.0  # RocketMQ's: brokers forget a silent member after 120 s
LEAVE_SECONDS = 0.8  # what is not committed by then is delivered again; leaving must not hang on a dead broker
MISSING_SECONDS = 60.0  # when to warn a second time of a topic that did not exist

# What a member that has time waits for to pass. Everything else that a broker answers is for the caller to mend.
_PASSING = (Unreachable, TimedOut, Unavailable, FlowControl)


class Consumer(ABC):
    """One member of one group, for one topic and the group's retry topic. Joins once, leaves once."""

    def __init__(self, wanted: Wanted, routes: Routes, producer: Producer, timeout: float) -> None:
        self._wanted, self._subscriptions, self.idle_seconds = wanted, wanted.subscriptions(), wanted.idle_seconds
        self._routes, self._timeout = routes, timeout
        self._membership = Membership(wanted, timeout)
        self._returns = Returns(wanted, self._membership, producer)
        self._loop = asyncio.get_running_loop()
        self._backlog = self._make_backlog()
        self._arrived = asyncio.Event()  # something for `next` to look at
        self._has_received = False  # anything at all
        self._stopped = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._leaving: asyncio.Task[None] | None = None
        # Threads or tasks that take messages: one of them must not wait until it has left.
        self.callers: set[object] = set()

    # -- what differs

    @abstractmethod
    def _make_backlog(self) -> Backlog: ...

    @abstractmethod
    async def _begin(self) -> list[Coroutine[None, None, None]]:
        """Becomes a member; returns the background work that brings messages. May be repeated after a failure."""

    @abstractmethod
    async def _finish(self) -> None:
        """Tells the broker what is not told yet, before the member says goodbye."""

    @abstractmethod
    async def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledges a message that is still worked on, now. Raises what the broker answers.

        Raises UsageError when the group was left.
        """

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
            except _PASSING as error:
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

    async def retry(self, delivery: Delivery, delay: Delay | None) -> None:
        """Sends a message back. It then counts as acknowledged. Raises what the broker answers."""
        await self._returns.retry(delivery, delay)
        delivery.settle()

    async def give_back(self, delivery: Delivery, error: BaseException) -> bool:
        """Its handler failed: the message is sent back, and never dropped, unless the handler has settled it itself.

        Tries until the broker has taken it, or until the group is left; then it is False, and stays unacknowledged.
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
        while self._leaving is None:
            try:
                await self._returns.give_back(delivery)
                return True
            except PostdateError as problem:
                seconds = pause.next()
                log.warning("message %s cannot be sent back, again in %.1f s: %s", delivery.id, seconds, problem)
                if self._stopped.is_set():
                    break  # it comes again all the same, because nobody acknowledges it
                await set_within(self._stopped, seconds)
        return False

    def stop(self, failure: BaseException | None = None) -> None:
        """Hands out nothing more; `next` raises the failure. Until `leave`, messages may still be acknowledged."""
        if not self._stopped.is_set():
            log.info("group %s: takes no more messages of %s, and leaves", self._wanted.group, self._wanted.topic)
        self._backlog.end(failure)
        self._stopped.set()
        self._arrived.set()

    def forbid_taking(self) -> None:
        """The first step of `stop`, for handlers of signals: it takes no lock, and wakes nobody."""
        self._backlog.has_ended = True

    async def leave(self, seconds: float = LEAVE_SECONDS) -> None:
        """Tells the broker what is acknowledged and says goodbye; takes at most this long. May be repeated."""
        self.stop()
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._leave(seconds))
        await asyncio.shield(self._leaving)

    async def _leave(self, seconds: float) -> None:
        await cancel(*self._tasks)
        try:
            async with asyncio.timeout(seconds):
                await self._finish()
                await self._membership.say_goodbye()
        except TimeoutError:
            log.warning("group %s: the broker did not hear in time what is acknowledged", self._wanted.group)
        finally:
            await self._membership.close()

    def _check_acknowledgeable(self, delivery: Delivery) -> None:
        if self._leaving is not None and not delivery.is_settled:
            raise UsageError(f"message {delivery.id} cannot be acknowledged: the loop that it came from has ended")

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


async def set_within(event: asyncio.Event, seconds: float) -> None:
    """Waits until an event is set, but not longer than that."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def cancel(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

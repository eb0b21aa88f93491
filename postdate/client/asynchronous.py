"""The asyncio client."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from inspect import unwrap
from typing import overload

from postdate.client.address import route_addresses
from postdate.client.admin import Changed, FoundMessage, Jobs
from postdate.client.backlog import Delivery, Turn
from postdate.client.connection import Connections
from postdate.client.consumer import LEAVE_SECONDS, Consumer
from postdate.client.dead_letters import LIMIT_DEFAULT, DeadLetter, DeadLetters
from postdate.client.dead_letters import Wanted as WantedLetters
from postdate.client.keys import FIND_LIMIT_DEFAULT, CancelledMessage, Keys, MovedMessage, wish_of
from postdate.client.options import (
    BATCH_DEFAULT,
    PREFETCH_DEFAULT,
    From,
    Wanted,
    is_coroutine_function,
    wanted_by_listener,
)
from postdate.client.outgoing import Key, Outgoing, Receipt, Text, key_text
from postdate.client.popping import CannotPop, PopConsumer
from postdate.client.producer import Producer
from postdate.client.pulling import PullConsumer
from postdate.client.received import AsyncReceivedMessage
from postdate.client.resets import QueueReset, Resets, ResetTo
from postdate.client.routes import Routes
from postdate.client.security import find_login
from postdate.client.signals import stop_on_signals
from postdate.errors import UsageError
from postdate.message import Cancelled
from postdate.spans import Delay, delay_ms

TIMEOUT_SECONDS_DEFAULT = 10.0  # long enough for a broker to restart

AsyncHandler = Callable[[AsyncReceivedMessage], Awaitable[object]]


class AsyncClient:
    """Talks to a broker from one event loop. Made by `postdate.connect_async`; close it, or use `async with`.

    Connections are made when they are first needed, and made anew when they are lost. Whatever asks a broker takes at
    most about `timeout` seconds and may raise TimedOut, Unreachable (Disconnected if the connection was lost while it
    waited) and, with the broker's own sentence, FlowControl, Unavailable, NoPermission, TopicNotFound, IllegalMessage
    or BrokerError. Catch `PostdateError` to catch all of them. `Client` describes the same methods in full.
    """

    def __init__(
        self, address: str | None = None, *, timeout: float = TIMEOUT_SECONDS_DEFAULT, access_key: str | None = None,
        secret_key: str | None = None, security_token: str | None = None, tls: bool | None = None,
        ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None,
    ) -> None:  # fmt: skip
        if not timeout > 0:
            raise UsageError(f"timeout is {timeout}, expected seconds above 0")
        self._timeout = timeout
        login = find_login(
            access_key=access_key, secret_key=secret_key, security_token=security_token, tls=tls, ca_file=ca_file,
            cert_file=cert_file, key_file=key_file,
        )  # fmt: skip
        self._security = login.open()
        self._connections = Connections(security=self._security)
        addresses = route_addresses(address)
        self._routes = Routes(self._connections, addresses)
        self._jobs = Jobs(self._connections, addresses, timeout)
        self._producer = Producer(self._connections, self._routes, timeout)
        self.keys = Keys(self._connections, self._routes, self._producer, timeout)  # the blocking client shares it
        self._dead_letters = DeadLetters(self._connections, addresses, self._producer, timeout)
        self._resets = Resets(self._connections, addresses, timeout)
        self._consumers: set[Consumer] = set()
        self._is_closed = False
        self._left = asyncio.Event()  # one of them has left

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves all groups at once, as `Client.close`; takes at most about a second. May be repeated."""
        self._is_closed = True
        try:
            self._connections.check_owner()
        except UsageError:
            return  # in another loop or process there is nothing of ours to close
        try:
            await asyncio.gather(*[consumer.leave() for consumer in self._consumers])
        finally:
            await self._connections.close()

    async def stop(self, timeout: float | None = None) -> bool:
        """Ends all loops over `consume` and calls of `listen` in peace, as `Client.stop`; returns whether all ended in
        time.
        """
        return await self.stop_for(asyncio.current_task(), timeout)

    # -- sending

    async def send(
        self, topic: str, body: bytes | str, *, delay: Delay | None = None, at: datetime | None = None,
        level: int | None = None, key: Key | None = None, tag: str | None = None,
        properties: Mapping[str, Text] | None = None, queue: int | None = None, once: Text | None = None,
    ) -> Receipt:  # fmt: skip
        """Sends one message, as `Client.send`; when this returns, the broker has stored it. Any number of sends may be
        under way at once.
        """
        message = Outgoing(body, delay=delay, at=at, level=level, key=key, tag=tag, properties=properties, once=once)
        return await self._producer.send(topic, message, queue)

    async def send_batch(self, topic: str, messages: Iterable[Outgoing]) -> list[Receipt]:
        """Sends many messages, as `Client.send_batch`; returns their receipts in the same order."""
        return await self._producer.send_batch(topic, list(messages))

    # -- one message, or all of a key

    async def find(self, topic: str, key: Text, *, limit: int = FIND_LIMIT_DEFAULT) -> list[FoundMessage]:
        """Finds the messages of a topic by one of their keys or by their id, as `Client.find`."""
        return await self.keys.find(topic, key, limit)

    @overload
    async def cancel(self, receipt: Receipt | str) -> Cancelled: ...

    @overload
    async def cancel(self, *, topic: str, key: Text, only: bool = False) -> list[CancelledMessage]: ...

    async def cancel(
        self, receipt: Receipt | str | None = None, *, topic: str | None = None, key: Text | None = None,
        only: bool = False,
    ) -> Cancelled | list[CancelledMessage]:  # fmt: skip
        """Cancels a delayed message by its receipt or the text of it, or all that wait of a key, as `Client.cancel`."""
        return await self.keys.cancel(receipt, topic, key, only=only)

    async def cancel_key(self, topic: str, key: Text, due: datetime | int) -> Cancelled:
        """Cancels by the first of the message's keys and the instant it is due (a datetime or epoch milliseconds)."""
        return await self.keys.cancel_key(topic, key, due)

    @overload
    async def postpone(
        self, receipt: Receipt | str, *, at: datetime | None = None, delay: Delay | None = None, by: Delay | None = None
    ) -> MovedMessage: ...

    @overload
    async def postpone(
        self, *, topic: str, key: Text, at: datetime | None = None, delay: Delay | None = None,
        by: Delay | None = None, only: bool = False,
    ) -> list[MovedMessage]: ...  # fmt: skip

    async def postpone(
        self, receipt: Receipt | str | None = None, *, topic: str | None = None, key: Text | None = None,
        at: datetime | None = None, delay: Delay | None = None, by: Delay | None = None, only: bool = False,
    ) -> MovedMessage | list[MovedMessage]:  # fmt: skip
        """Gives a message that waits another due, later or earlier, or all that wait of a key, as `Client.postpone`."""
        return await self.keys.move("postpone", receipt, topic, key, wish_of(at, delay, by), only=only)

    @overload
    async def deliver_now(self, receipt: Receipt | str) -> MovedMessage: ...

    @overload
    async def deliver_now(self, *, topic: str, key: Text, only: bool = False) -> list[MovedMessage]: ...

    async def deliver_now(
        self, receipt: Receipt | str | None = None, *, topic: str | None = None, key: Text | None = None,
        only: bool = False,
    ) -> MovedMessage | list[MovedMessage]:  # fmt: skip
        """Delivers a message that waits at once, or all that wait of a key, as `Client.deliver_now`."""
        return await self.keys.move("deliver_now", receipt, topic, key, wish_of(None, 0, None), only=only)

    # -- by predicate

    async def cancel_where(self, where: str, *, id: str | None = None) -> Changed:
        """Cancels every message that waits and that a predicate of Spark SQL selects, as `Client.cancel_where`."""
        return await self._jobs.change("cancel", where, 0, id)

    async def postpone_where(self, where: str, by: Delay, *, id: str | None = None) -> Changed:
        """Postpones, as `cancel_where` cancels: `postpone_where("topic = 'sms'", by="2h")`."""
        return await self._jobs.change("postpone", where, delay_ms(by), id)

    # -- groups

    async def dead_letters(
        self, group: str, *, topic: str | None = None, key: Text | None = None, since: datetime | None = None,
        until: datetime | None = None, reason: str | None = None, limit: int | None = LIMIT_DEFAULT,
    ) -> list[DeadLetter]:  # fmt: skip
        """The messages that a group gave up on and that nobody has resent or deleted, as `Client.dead_letters`."""
        wanted = WantedLetters(topic, None if key is None else key_text(key), since, until, reason)
        return await self._dead_letters.find(group, wanted, limit)

    async def resend_dead_letters(self, letters: Iterable[DeadLetter]) -> list[Receipt]:
        """Sends dead letters to their topics again, as `Client.resend_dead_letters`."""
        return await self._dead_letters.resend(letters)

    async def delete_dead_letters(self, letters: Iterable[DeadLetter]) -> int:
        """Deletes dead letters, as `Client.delete_dead_letters`."""
        return await self._dead_letters.delete(letters)

    async def reset_group(
        self, group: str, to: ResetTo, *, topic: str | None = None, dry_run: bool = False
    ) -> list[QueueReset]:
        """Moves a group to another place, as `Client.reset_group`."""
        return await self._resets.reset(group, to, topic, dry_run=dry_run)

    # -- receiving

    def consume(
        self, topic: str, group: str, *, tag: str = "*", from_: From = "first", batch: int = BATCH_DEFAULT,
        prefetch: int = PREFETCH_DEFAULT, idle: Delay | None = None,
    ) -> AsyncGenerator[AsyncReceivedMessage, None]:  # fmt: skip
        """Receives as a member of a group: `async for message in client.consume("orders", "billing")`.

        As `Client.consume`: asking for the next message acknowledges the current one, and leaving the loop leaves the
        current one unacknowledged. asyncio closes a loop that was left a moment later; use `contextlib.aclosing` where
        that must be over.
        """
        wanted = Wanted(topic, group, tag, from_, batch, prefetch, idle_ms=None if idle is None else delay_ms(idle))
        wanted.check()
        return self._received(wanted)

    async def _received(self, wanted: Wanted) -> AsyncGenerator[AsyncReceivedMessage, None]:
        consumer = await self.join(wanted)
        turn: Turn | None = None
        at_hand: Delivery | None = None
        try:
            while (turn := await consumer.next(turn)) is not None:
                for at_hand in turn:
                    yield AsyncReceivedMessage(at_hand, consumer)
                    at_hand.settle()
            await self.leave(consumer, self._timeout)
        finally:
            await self.leave(consumer, at_hand=at_hand)

    async def listen(
        self, topic: str, group: str, handler: AsyncHandler, *, tag: str = "*", tasks: int = 1, ordered: bool = False,
        retry: Sequence[Delay] | None = None, attempts: int | None = None,
    ) -> None:  # fmt: skip
        """Awaits `handler(message)` for every message, until `stop`, a signal, or until it is cancelled.

        As `Client.listen`, with any number of `tasks` instead of threads: a handler that returns acknowledges its
        message; if it raises, the message comes again. It is a coroutine function; a plain one is refused. If `listen`
        is cancelled, handlers at work end first; cancelled a second time, they are cancelled, too.
        """
        if tasks < 1:
            raise UsageError(f"tasks is {tasks}, expected 1 or more")
        if not (is_coroutine_function(handler) or is_coroutine_function(unwrap(handler))):
            raise UsageError("the handler is a plain function, expected one that is defined with: async def")
        wanted = wanted_by_listener(topic, group, tag, tasks, ordered, retry, attempts)
        with stop_on_signals(self._stop_by_signal(asyncio.get_running_loop())):
            consumer = await self.join(wanted, is_patient=True)
            try:
                await _handle_in_tasks(consumer, handler, tasks)
                await self.leave(consumer, self._timeout)
            finally:
                await self.leave(consumer)

    # -- what the blocking client shares

    async def join(self, wanted: Wanted, *, is_patient: bool = False) -> Consumer:
        """A member of the group, until `leave` or `close`; one that has ended, if it was stopped while it joined."""
        if self._is_closed:
            raise UsageError("the client is closed")
        self._connections.check_owner()
        what = self._routes, self._producer, self._timeout, self._security
        if wanted.is_shared_by_message:
            with suppress(CannotPop):
                return await self._join(PopConsumer(wanted, *what), is_patient)
        return await self._join(PullConsumer(wanted, *what), is_patient)

    async def _join(self, consumer: Consumer, is_patient: bool) -> Consumer:
        self._consumers.add(consumer)
        try:
            await consumer.join(is_patient=is_patient)
        except BaseException:
            self._consumers.discard(consumer)
            raise
        return consumer

    async def leave(self, consumer: Consumer, seconds: float = LEAVE_SECONDS, at_hand: Delivery | None = None) -> None:
        """Leaves the group; a message that its loop has at hand comes again."""
        try:
            await consumer.leave(seconds, at_hand)
        finally:  # and not before: `close` waits for those that are leaving
            self._consumers.discard(consumer)
            self._left.set()

    def stop_taking(self) -> None:
        """Has nothing more handed out. Loops and handlers end with what they have at hand, and then leave."""
        for consumer in self._consumers:
            consumer.stop()

    def forbid_taking(self) -> None:
        """The first step of `stop_taking`, for handlers of signals."""
        for consumer in list(self._consumers):  # a copy: another thread may have the loop
            consumer.forbid_taking()

    def _stop_by_signal(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        def stop() -> None:
            self.forbid_taking()
            loop.call_soon_threadsafe(self.stop_taking)

        return stop

    async def stop_for(self, caller: object, timeout: float | None) -> bool:
        """Stops for a thread or task; returns whether everything has ended in time. What the caller itself has at hand
        ends later.
        """
        self.stop_taking()
        stopped = set(self._consumers)
        if any(caller in consumer.callers for consumer in stopped):
            return False
        try:
            async with asyncio.timeout(timeout):
                while stopped & self._consumers:
                    self._left.clear()
                    await self._left.wait()
        except TimeoutError:
            return False
        return True


async def _handle_in_tasks(consumer: Consumer, handler: AsyncHandler, count: int) -> None:
    workers = [asyncio.create_task(_handle_all(consumer, handler)) for _ in range(count)]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
    finally:  # the first ended because it was stopped or has failed, or we are cancelled: all end with what they have
        consumer.stop()
        try:
            await asyncio.wait(workers)
        finally:  # cancelled again
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    for worker in workers:
        worker.result()


async def _handle_all(consumer: Consumer, handler: AsyncHandler) -> None:
    turn: Turn | None = None
    while (turn := await consumer.next(turn)) is not None:
        for delivery in turn:
            try:
                await handler(AsyncReceivedMessage(delivery, consumer))
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled_by_us(error):
                    raise
                if not await consumer.give_back(delivery, error):
                    continue
            delivery.settle()


def _is_cancelled_by_us(error: BaseException) -> bool:
    """Whether a handler ended because its worker was cancelled; it may also have awaited something that was."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def connect_async(
    address: str | None = None, *, timeout: float = TIMEOUT_SECONDS_DEFAULT, access_key: str | None = None,
    secret_key: str | None = None, security_token: str | None = None, tls: bool | None = None,
    ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None,
) -> AsyncClient:  # fmt: skip
    """An asyncio client of the broker whose route address this is; "a:9876;b:9876" names several.

    Without an address, of POSTDATE_ADDR, else of 127.0.0.1:9876. Nothing is connected before it is needed. The other
    arguments are those of `connect`.
    """
    return AsyncClient(
        address, timeout=timeout, access_key=access_key, secret_key=secret_key, security_token=security_token, tls=tls,
        ca_file=ca_file, cert_file=cert_file, key_file=key_file,
    )  # fmt: skip

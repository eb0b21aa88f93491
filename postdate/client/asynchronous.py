"""The asyncio client."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from datetime import datetime

from postdate.client.address import route_addresses
from postdate.client.admin import Changed, Jobs
from postdate.client.backlog import Turn
from postdate.client.connection import Connections
from postdate.client.consumer import Consumer
from postdate.client.dead_letters import LIMIT_DEFAULT, DeadLetter, DeadLetters
from postdate.client.dead_letters import Wanted as WantedLetters
from postdate.client.options import BATCH_DEFAULT, PREFETCH_DEFAULT, From, Wanted
from postdate.client.outgoing import Key, Outgoing, Receipt, Text, key_text
from postdate.client.producer import Producer
from postdate.client.received import AsyncReceivedMessage
from postdate.client.resets import QueueReset, Resets, ResetTo
from postdate.client.routes import Routes
from postdate.errors import PostdateError, UsageError
from postdate.message import Cancelled
from postdate.spans import Delay, delay_ms

TIMEOUT_SECONDS_DEFAULT = 10.0  # long enough for a broker to restart
ATTEMPTS_MAX_DEFAULT = 16

AsyncHandler = Callable[[AsyncReceivedMessage], Awaitable[object]]


class AsyncClient:
    """Talks to a broker from one event loop. Made by `postdate.connect_async`; close it, or use `async with`.

    Connections are made when they are first needed, and made anew when they are lost. Whatever asks a broker takes at
    most about `timeout` seconds and may raise TimedOut, Unreachable (Disconnected if the connection was lost while it
    waited) and, with the broker's own sentence, FlowControl, Unavailable, NoPermission, TopicNotFound, IllegalMessage
    or BrokerError. Catch `PostdateError` to catch all of them. `Client` describes the same methods in full.
    """

    def __init__(self, address: str | None = None, *, timeout: float = TIMEOUT_SECONDS_DEFAULT) -> None:
        if not timeout > 0:
            raise UsageError(f"timeout is {timeout}, expected seconds above 0")
        self._timeout = timeout
        self._connections = Connections()
        addresses = route_addresses(address)
        self._routes = Routes(self._connections, addresses)
        self._jobs = Jobs(self._connections, addresses, timeout)
        self._producer = Producer(self._connections, self._routes, timeout)
        self._dead_letters = DeadLetters(self._connections, addresses, self._producer, timeout)
        self._resets = Resets(self._connections, addresses, timeout)
        self._consumers: set[Consumer] = set()
        self._is_closed = False

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves all groups, committing what is acknowledged, and drops the connections; takes at most about a second.

        May be repeated. Loops over `consume` and calls of `listen` end.
        """
        self._is_closed = True
        try:
            await asyncio.gather(*[consumer.leave() for consumer in self._consumers])
        finally:
            await self._connections.close()

    # -- sending

    async def send(
        self, topic: str, body: bytes | str, *, delay: Delay | None = None, at: datetime | None = None,
        level: int | None = None, key: Key | None = None, tag: str | None = None,
        properties: Mapping[str, Text] | None = None, queue: int | None = None,
    ) -> Receipt:  # fmt: skip
        """Sends one message, as `Client.send`; when this returns, the broker has stored it. Any number of sends may be
        under way at once.
        """
        message = Outgoing(body, delay=delay, at=at, level=level, key=key, tag=tag, properties=properties)
        return await self._producer.send(topic, message, queue)

    async def send_batch(self, topic: str, messages: Iterable[Outgoing]) -> list[Receipt]:
        """Sends many messages, as `Client.send_batch`; returns their receipts in the same order."""
        return await self._producer.send_batch(topic, list(messages))

    async def cancel(self, receipt: Receipt | str) -> Cancelled:
        """Cancels a delayed message by its receipt, or by the text of its receipt, as `Client.cancel`."""
        return await self._producer.cancel(receipt)

    async def cancel_key(self, topic: str, key: Text, due: datetime | int) -> Cancelled:
        """Cancels by the first of the message's keys and the instant it is due (a datetime or epoch milliseconds)."""
        return await self._producer.cancel_key(topic, key, due)

    async def cancel_where(self, where: str, *, id: str | None = None) -> Changed:
        """Cancels every message that waits and that a predicate of Spark SQL selects, as `Client.cancel_where`."""
        return await self._jobs.change("cancel", where, 0, id)

    async def postpone(self, where: str, by: Delay, *, id: str | None = None) -> Changed:
        """Postpones, as `cancel_where` cancels: `postpone("topic = 'sms'", by="2h")`."""
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
        try:
            while (turn := await consumer.next(turn)) is not None:
                for delivery in turn:
                    yield AsyncReceivedMessage(delivery, consumer)
                    delivery.settle()
        finally:
            await self.leave(consumer)

    async def listen(
        self, topic: str, group: str, handler: AsyncHandler, *, tag: str = "*", tasks: int = 1,
        max_attempts: int = ATTEMPTS_MAX_DEFAULT,
    ) -> None:  # fmt: skip
        """Awaits `handler(message)` for every message, until `close` or until it is cancelled.

        As `Client.listen`: a handler that returns acknowledges its message, one that raises sends it back. With more
        `tasks`, messages of several queues are handled at once, those of one queue always in order.
        """
        if tasks < 1:
            raise UsageError(f"tasks is {tasks}, expected 1 or more")
        wanted = Wanted(topic, group, tag, attempts_max=max_attempts)
        wanted.check()
        consumer = await self.join(wanted)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(tasks):
                    workers.create_task(_handle_all(consumer, handler))
        finally:
            await self.leave(consumer)

    # -- what the blocking client shares

    async def join(self, wanted: Wanted) -> Consumer:
        """A member of the group, until `leave` or `close`; one that has ended, if `close` comes while it joins."""
        if self._is_closed:
            raise UsageError("the client is closed")
        consumer = Consumer(wanted, self._routes, self._producer, self._timeout)
        self._consumers.add(consumer)
        try:
            await consumer.join()
        except PostdateError:
            self._consumers.discard(consumer)
            if not self._is_closed:
                raise
        except BaseException:
            self._consumers.discard(consumer)
            raise
        return consumer

    async def leave(self, consumer: Consumer) -> None:
        try:
            await consumer.leave()
        finally:  # and not before: `close` waits for those that are leaving
            self._consumers.discard(consumer)


async def _handle_all(consumer: Consumer, handler: AsyncHandler) -> None:
    turn: Turn | None = None
    while (turn := await consumer.next(turn)) is not None:
        for delivery in turn:
            try:
                await handler(AsyncReceivedMessage(delivery, consumer))
            except Exception as error:
                if not await consumer.give_back(delivery, error):
                    continue
            delivery.settle()


def connect_async(address: str | None = None, *, timeout: float = TIMEOUT_SECONDS_DEFAULT) -> AsyncClient:
    """An asyncio client of the broker whose route address this is; "a:9876;b:9876" names several.

    Without an address, of POSTDATE_ADDR, else of 127.0.0.1:9876. Nothing is connected before it is needed.
    """
    return AsyncClient(address, timeout=timeout)

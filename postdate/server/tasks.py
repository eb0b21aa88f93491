"""Answers that take long to compute: in small steps, between which everything else goes on."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TypeVar

from postdate.broker.broker import Broker
from postdate.errors import FlowControl, PostdateError
from postdate.server.answers import refusal
from postdate.server.connection import Connection
from postdate.wire.frame import Command

Item = TypeVar("Item")


class Tasks:
    """The answers under way, bounded by a setting."""

    def __init__(self, broker: Broker, limit: str) -> None:
        self._broker, self._limit = broker, limit
        self._running: set[asyncio.Task[None]] = set()  # the loop itself holds a task weakly
        self._count = 0  # of those without an answer yet

    def answer(self, connection: Connection, command: Command, work: Coroutine[None, None, bytes]) -> None:
        """Writes the answer, or the refusal, when the work is done. Raises FlowControl where too many are under way."""
        if command.is_oneway:
            work.close()
            return
        if self._count >= getattr(self._broker.limits, self._limit):
            work.close()
            raise FlowControl(f"{self._limit}: {self._count} long answers are under way, the limit; try later")
        self._count += 1
        task = asyncio.get_running_loop().create_task(self._finish(connection, command, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _finish(self, connection: Connection, command: Command, work: Coroutine[None, None, bytes]) -> None:
        try:
            answer = await work
        except (PostdateError, OSError) as error:
            answer = refusal(command, error)
        finally:
            self._count -= 1  # before the answer: its client may ask again at once
        connection.write(answer)


async def paced(items: Sequence[Item], step: int) -> AsyncIterator[Item]:
    """Yields the items; after every `step` of them the event loop goes round."""
    for index, item in enumerate(items, 1):
        yield item
        if not index % step:
            await asyncio.sleep(0)

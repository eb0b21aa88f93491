"""Answers that take long to work out: in small steps, between which everything else goes on."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TypeVar

from postdate.errors import PostdateError
from postdate.server.answers import refusal
from postdate.server.connection import Connection
from postdate.wire.frame import Command

Item = TypeVar("Item")


class Tasks:
    """The answers that are being worked out."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def answer(self, connection: Connection, command: Command, work: Coroutine[None, None, bytes]) -> None:
        """Writes the answer, or the refusal, when the work is done."""
        task = asyncio.get_running_loop().create_task(_answered(connection, command, work))
        self._running.add(task)  # the loop itself holds a task weakly
        task.add_done_callback(self._running.discard)


async def _answered(connection: Connection, command: Command, work: Coroutine[None, None, bytes]) -> None:
    try:
        answer = await work
    except (PostdateError, OSError) as error:
        answer = refusal(command, error)
    if not command.is_oneway:
        connection.write(answer)


async def paced(items: Sequence[Item], step: int) -> AsyncIterator[Item]:
    """The items; after so many of them, whoever waits for the loop gets it."""
    for index, item in enumerate(items, 1):
        yield item
        if not index % step:
            await asyncio.sleep(0)

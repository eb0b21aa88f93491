"""Questions that the broker asks its clients, and their answers.

A client that does not answer in time, or goes, is answered for by a sentence. How many may be on their way is bounded
by whoever asks.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from postdate.message import INT32_MAX
from postdate.server.connection import Connection
from postdate.wire.frame import Command, encode
from postdate.wire.ids import host_text

Tell = Callable[[Command | str], None]  # is told the answer, or in a sentence why there is none


class _Asked(NamedTuple):
    tell: Tell
    timer: asyncio.TimerHandle


class Questions:
    """Of one service. A question is known by the connection that it went to and by the opaque that it went with."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Connection, dict[int, _Asked]] = {}
        self._opaque = 0

    def ask(
        self, client: Connection, code: int, fields: Mapping[str, Any], body: bytes, wait_s: float, tell: Tell
    ) -> None:
        self._opaque = self._opaque % INT32_MAX + 1
        late = f"has not answered within {wait_s:g} s"
        timer = self._loop.call_later(wait_s, self._fail, client, self._opaque, late)
        self._waiting.setdefault(client, {})[self._opaque] = _Asked(tell, timer)
        client.write(encode(Command(code, dict(fields), body, self._opaque)))

    def answered(self, client: Connection, answer: Command) -> None:
        """A client has answered something: perhaps one of these."""
        asked = self._taken(client, answer.opaque)
        if asked is not None:
            asked.tell(answer)

    def drop(self, client: Connection) -> None:
        """The client is gone."""
        self._fail_all(client, "is gone")

    def release_all(self) -> None:
        """The server stops: nobody waits for an answer any more."""
        for client in list(self._waiting):
            self._fail_all(client, "has not answered before the broker stopped")

    def _fail_all(self, client: Connection, what: str) -> None:
        for opaque in list(self._waiting.get(client, ())):
            self._fail(client, opaque, what)

    def _fail(self, client: Connection, opaque: int, what: str) -> None:
        asked = self._taken(client, opaque)
        assert asked is not None, f"nobody waits for an answer to {opaque}"
        asked.tell(f"the client at {host_text(client.host)} {what}")

    def _taken(self, client: Connection, opaque: int) -> _Asked | None:
        waiting = self._waiting.get(client)
        asked = waiting.pop(opaque, None) if waiting else None
        if asked is None:
            return None
        if not waiting:
            del self._waiting[client]
        asked.timer.cancel()
        return asked

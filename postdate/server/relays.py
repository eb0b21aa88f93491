"""Questions that the broker hands on to a client, and the client's answers on their way back.

    operator --307--> broker --307--> client
    operator <------- broker <------- client

A client that does not answer in time, or goes, is answered for by a refusal. How many may be on their way is bounded.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from postdate.broker import Broker
from postdate.errors import FlowControl
from postdate.message import INT32_MAX
from postdate.server.connection import Connection
from postdate.wire import codes
from postdate.wire.frame import Command, encode, reply
from postdate.wire.ids import host_text

_WAIT_S = 10.0  # RocketMQ's; its tools wait 15 s


class _Relayed(NamedTuple):
    asker: Connection
    question: Command
    timer: asyncio.TimerHandle


class Relays:
    """Of one service. A question is known by the connection that it went to and by the opaque that it went with."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Connection, dict[int, _Relayed]] = {}
        self._count = 0
        self._opaque = 0

    def ask(
        self, asker: Connection, question: Command, client: Connection, fields: Mapping[str, Any], body: bytes = b""
    ) -> None:
        """Hands a question on, with these fields and this body. Raises FlowControl."""
        limit = self._broker.settings.relays_max
        if self._count >= limit:
            raise FlowControl(f"relays_max: {limit} questions wait for their clients, the limit; try later")
        self._opaque = self._opaque % INT32_MAX + 1
        timer = self._loop.call_later(_WAIT_S, self._give_up, client, self._opaque)
        relayed = _Relayed(asker, question.without_content(), timer)
        self._waiting.setdefault(client, {})[self._opaque] = relayed
        self._count += 1
        client.write(encode(Command(question.code, dict(fields), body, self._opaque)))

    def answered(self, client: Connection, answer: Command) -> None:
        """A client has answered something: perhaps a question that was handed on."""
        relayed = self._taken(client, answer.opaque)
        if relayed is not None:
            self._tell(relayed, answer.code, answer.remark, answer.body)

    def drop(self, client: Connection) -> None:
        """The client is gone. Whoever asked and is gone itself is answered into the void."""
        for opaque in list(self._waiting.get(client, ())):
            self._fail(client, opaque, "is gone")

    def _give_up(self, client: Connection, opaque: int) -> None:
        self._fail(client, opaque, f"has not answered within {_WAIT_S:.0f} s")

    def _fail(self, client: Connection, opaque: int, what: str) -> None:
        relayed = self._taken(client, opaque)
        assert relayed is not None, f"nobody waits for an answer to {opaque}"
        self._tell(relayed, codes.SYSTEM_ERROR, f"the client at {host_text(client.host)} {what}", b"")

    def _taken(self, client: Connection, opaque: int) -> _Relayed | None:
        waiting = self._waiting.get(client)
        relayed = waiting.pop(opaque, None) if waiting else None
        if relayed is None:
            return None
        if not waiting:
            del self._waiting[client]
        self._count -= 1
        relayed.timer.cancel()
        return relayed

    def _tell(self, relayed: _Relayed, code: int, remark: str | None, body: bytes) -> None:
        if not relayed.question.is_oneway:
            relayed.asker.write(reply(relayed.question, code, remark=remark, body=body))

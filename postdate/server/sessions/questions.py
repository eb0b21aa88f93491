"""Questions that the broker asks its clients, and their answers.

A question that a client does not answer in time, or whose client is gone, gets a sentence as its answer. The callers
bound how many are under way. Some questions come from operators, and the broker hands them on:

operator --307--> broker --307--> client
operator <------- broker <------- client
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from postdate.broker.broker import Broker
from postdate.errors import FlowControl
from postdate.message import INT32_MAX
from postdate.server.connection import Connection
from postdate.wire import codes
from postdate.wire.frame import Command, encode, reply
from postdate.wire.ids import host_text

Tell = Callable[[Command | str], None]  # gets the answer, or a sentence that says why there is none

_RELAY_S = 10.0  # how long a relayed question waits, as RocketMQ's do; its tools wait 15 s


class _Asked(NamedTuple):
    tell: Tell
    timer: asyncio.TimerHandle


class Questions:
    """The questions under way. A question is known by its connection and its opaque."""

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

    def take_answer(self, client: Connection, answer: Command) -> None:
        """Passes an answer of a client on, if it answers a question that is under way."""
        asked = self._remove(client, answer.opaque)
        if asked is not None:
            asked.tell(answer)

    def drop(self, client: Connection, reason: str = "is gone") -> None:
        """Ends the questions to a client, for a reason."""
        for opaque in list(self._waiting.get(client, ())):
            self._fail(client, opaque, reason)

    def release_all(self) -> None:
        """Ends all questions, because the server stops."""
        for client in list(self._waiting):
            self.drop(client, "has not answered before the broker stopped")

    def _fail(self, client: Connection, opaque: int, reason: str) -> None:
        asked = self._remove(client, opaque)
        assert asked is not None, f"nobody waits for an answer to {opaque}"
        asked.tell(f"the client at {host_text(client.host)} {reason}")

    def _remove(self, client: Connection, opaque: int) -> _Asked | None:
        waiting = self._waiting.get(client)
        asked = waiting.pop(opaque, None) if waiting else None
        if asked is None:
            return None
        if not waiting:
            del self._waiting[client]
        asked.timer.cancel()
        return asked


class Relays:
    """The questions of operators that the broker hands on to a client, and the answers on their way back."""

    def __init__(self, broker: Broker, questions: Questions) -> None:
        self._broker, self._questions = broker, questions
        self._count = 0  # under way

    def ask(
        self, asker: Connection, question: Command, client: Connection, fields: Mapping[str, Any], body: bytes = b""
    ) -> None:
        """Hands a question on with these fields and this body. Raises FlowControl."""
        limit = self._broker.limits.relays_max
        if self._count >= limit:
            raise FlowControl(f"relays_max: {limit} questions wait for their clients, the limit; try later")
        self._count += 1
        tell = partial(self._tell, asker, question.without_content())
        self._questions.ask(client, question.code, fields, body, _RELAY_S, tell)

    def _tell(self, asker: Connection, question: Command, answer: Command | str) -> None:
        """Answers the operator. Where the operator is gone, writing does nothing."""
        self._count -= 1
        if question.is_oneway:
            return
        if isinstance(answer, str):
            asker.write(reply(question, codes.SYSTEM_ERROR, remark=answer))
        else:
            asker.write(reply(question, answer.code, remark=answer.remark, body=answer.body))

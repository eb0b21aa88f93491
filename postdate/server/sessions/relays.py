"""Questions of operators that the broker hands on to a client, and the client's answers on their way back.

operator --307--> broker --307--> client
operator <------- broker <------- client
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from postdate.broker.broker import Broker
from postdate.errors import FlowControl
from postdate.server.connection import Connection
from postdate.server.sessions.questions import Questions
from postdate.wire import codes
from postdate.wire.frame import Command, reply

_WAIT_S = 10.0  # RocketMQ's; its tools wait 15 s


class Relays:
    """Of one service."""

    def __init__(self, broker: Broker, questions: Questions) -> None:
        self._broker = broker
        self._questions = questions
        self._count = 0  # on their way

    def ask(
        self, asker: Connection, question: Command, client: Connection, fields: Mapping[str, Any], body: bytes = b""
    ) -> None:
        """Hands a question on, with these fields and this body. Raises FlowControl."""
        limit = self._broker.limits.relays_max
        if self._count >= limit:
            raise FlowControl(f"relays_max: {limit} questions wait for their clients, the limit; try later")
        self._count += 1
        tell = partial(self._tell, asker, question.without_content())
        self._questions.ask(client, question.code, fields, body, _WAIT_S, tell)

    def _tell(self, asker: Connection, question: Command, answer: Command | str) -> None:
        """Whoever asked and is gone itself is answered into the void."""
        self._count -= 1
        if question.is_oneway:
            return
        if isinstance(answer, str):
            asker.write(reply(question, codes.SYSTEM_ERROR, remark=answer))
        else:
            asker.write(reply(question, answer.code, remark=answer.remark, body=answer.body))

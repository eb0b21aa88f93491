"""Gives messages that wait another due: one by its handle, or all of a key.

    due     to an instant, in epoch milliseconds
    delay   to so many milliseconds from now; 0 delivers it at once
    by      later, or earlier, than the due that it has

A message is looked up, in the log and in the table, and moved from where it was found. If it has gone on meanwhile,
into the wheel or because somebody else has moved it, it is looked up again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from postdate.broker.broker import Broker
from postdate.broker.lookup import Found, State
from postdate.broker.moving import Source
from postdate.clock import Clock
from postdate.errors import UsageError
from postdate.message import Moved, MovedFrom
from postdate.server.connection import Connection
from postdate.server.requests.jobs import Settled
from postdate.server.sessions.keys import Keys, Located, id_of, read_named, refuse_several
from postdate.server.tasks import Tasks
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.ids import encode_recall_handle

_TRIES = 3  # of a message that goes on while it is moved
_BATCH_MESSAGES, _BATCH_BYTES = 64, 1 << 19  # written at once

Answer = dict[str, Any]


class _Wish(NamedTuple):
    """Where to; one of them is set."""

    due_at_ms: int | None
    delay_ms: int | None
    by_ms: int | None

    def due_of(self, found: Found, now_ms: int) -> int:
        """Returns the new due of a message; one that has passed means at once."""
        if self.due_at_ms is not None:
            return self.due_at_ms
        return now_ms + self.delay_ms if self.delay_ms is not None else found.due_at_ms + (self.by_ms or 0)


class Moves:
    """Answers MOVE_MESSAGE. `settled` returns when a ticket is durable and has its answer."""

    def __init__(self, broker: Broker, clock: Clock, keys: Keys, settled: Settled) -> None:
        self._broker, self._clock, self._keys, self._settled = broker, clock, keys, settled
        self._tasks = Tasks(broker, "key_acts_max")

    def move(self, connection: Connection, command: Command, asked: Mapping[str, Any]) -> None:
        wish = _Wish(asked["due"], asked["delay"], asked["by"])
        if sum(each is not None for each in wish) != 1:
            raise UsageError("a move needs one of due, delay and by")
        named = read_named(self._broker, asked)
        request = command.without_content()

        async def work() -> bytes:
            located = await self._keys.find_named(named)
            refuse_several(located, asked["only"])
            answers = await self._move(connection, located, wish, lambda: self._keys.find_named(named))
            return reply(request, codes.SUCCESS, body=orjson.dumps({"messages": list(answers.values())}))

        self._tasks.answer(connection, request, work())

    async def _move(
        self, connection: Connection, located: Located, wish: _Wish, find_again: Callable[[], Awaitable[Located]]
    ) -> dict[str, Answer]:
        """Moves what waits; returns an answer for each message by its id."""
        answers: dict[str, Answer] = {}
        await self._check(located.waiting, wish)
        left = {id_of(found) for found in located.waiting}
        for _ in range(_TRIES):
            waiting = [found for found in located.waiting if id_of(found) in left]
            for piece in _pieces(waiting):
                await self._move_piece(connection, piece, wish, answers)
            left -= answers.keys()
            if not left:
                break
            located = await find_again()
        for found in located.messages:
            if found.state is State.VISIBLE:
                answers.setdefault(id_of(found), _answer(id_of(found), Moved.DELIVERED, found.due_at_ms))
        for message_id in left:
            answers.setdefault(message_id, _answer(message_id, Moved.UNKNOWN, 0))
        return answers

    async def _check(self, waiting: Sequence[Found], wish: _Wish) -> None:
        """Raises UsageError where one of several batches would be refused, before the first one is written."""
        pieces = _pieces(waiting)
        for piece in pieces if len(pieces) > 1 else ():
            now_ms = self._clock.now_ms()
            self._broker.moves.check(_sources_of(piece, wish, now_ms), now_ms)
            await asyncio.sleep(0)

    async def _move_piece(
        self, connection: Connection, piece: list[Found], wish: _Wish, answers: dict[str, Answer]
    ) -> None:
        """Moves some messages, in one batch; adds the answers of those that were moved."""
        now_ms = self._clock.now_ms()
        ticket = self._broker.moves.move(_sources_of(piece, wish, now_ms), now_ms)
        await self._settled(connection, ticket)
        assert ticket.answers is not None, "a ticket that is settled has its answers"
        for found, entry, is_moved in zip(piece, ticket.prepared, ticket.answers, strict=True):
            if is_moved:
                answer = _answer(id_of(found), Moved.MOVED, entry.due_at_ms or now_ms) | {"was": found.due_at_ms}
                if entry.due_at_ms:
                    answer["recallHandle"] = encode_recall_handle(
                        entry.message.topic, self._broker.settings.broker_name, entry.due_at_ms, id_of(found)
                    ).decode()
                answers[id_of(found)] = answer


def _answer(message_id: str, outcome: Moved, due_at_ms: int) -> Answer:
    return {"id": message_id, "outcome": outcome.value, "due": due_at_ms}


def _sources_of(piece: Sequence[Found], wish: _Wish, now_ms: int) -> list[Source]:
    """Returns where messages wait, and their new dues."""
    return [
        Source(found.record, MovedFrom(found.due_at_ms, found.arrival, found.is_near), wish.due_of(found, now_ms))
        for found in piece
    ]


def _pieces(messages: Sequence[Found]) -> list[list[Found]]:
    """Cuts messages into batches."""
    pieces: list[list[Found]] = []
    size = 0
    for found in messages:
        size += len(found.record)
        if not pieces or len(pieces[-1]) == _BATCH_MESSAGES or size > _BATCH_BYTES:
            pieces.append([])
            size = len(found.record)
        pieces[-1].append(found)
    return pieces

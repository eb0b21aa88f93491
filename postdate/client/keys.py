"""Finds messages by key, cancels them, and gives them another due: one by its handle, or all of a key.

A request goes to the broker of a handle, or to all brokers of a topic. It is tried again as a send is, as far as that
is safe: moving a message by a span twice would move it twice.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from postdate.client.admin import FoundMessage, read_found
from postdate.client.connection import Connections
from postdate.client.errors import BrokerError, Disconnected, TimedOut, Unavailable, Unreachable, expect_success
from postdate.client.outgoing import Receipt, Text, check_topic_name, key_text
from postdate.client.producer import PASSING, PRODUCER_GROUP, Producer
from postdate.client.routes import Routes, addresses_of
from postdate.errors import PostdateError, ProtocolError, TopicNotFound, UsageError
from postdate.message import Cancelled, Moved
from postdate.spans import Delay, delay_ms, instant_ms, shift_ms
from postdate.wire import bodies, codes
from postdate.wire.frame import Command
from postdate.wire.ids import RecallHandle, parse_recall_handle
from postdate.wire.requests import Request

FIND_LIMIT_DEFAULT = 32

_FOUND_OR_NOT = frozenset({codes.SUCCESS, codes.QUERY_NOT_FOUND})

Result = TypeVar("Result")

logger = logging.getLogger("postdate.client")


class CancelledMessage(NamedTuple):
    """A message of a key that was to be cancelled: what became of it, and when it is or was due (None: at once)."""

    id: str
    outcome: Cancelled
    due_at_ms: int | None


class MovedMessage(NamedTuple):
    """A message that was to be moved: what became of it.

    `due_at_ms` is when it is due now, `was_due_at_ms` when it was due before (None unless it was moved). `handle` is
    what a cancel needs, None unless it waits; the handles that it had before stay good.
    """

    id: str
    outcome: Moved
    due_at_ms: int | None
    was_due_at_ms: int | None
    handle: str | None


class _AnswerLost(PostdateError):
    """A request that must not be tried again got no answer."""

    def __init__(self, cause: Unreachable | TimedOut) -> None:
        super().__init__(str(cause))
        self.cause = cause


def wish_of(at: datetime | None, delay: Delay | None, by: Delay | None) -> dict[str, int]:
    """Returns where to move messages, as fields of the request. Raises UsageError."""
    if sum(each is not None for each in (at, delay, by)) != 1:
        raise UsageError(f"at={at!r}, delay={delay!r}, by={by!r}: expected exactly one of them")
    if at is not None:
        return {"due": instant_ms(at)}
    return {"delay": delay_ms(delay)} if delay is not None else {"by": shift_ms(by or 0)}


class Keys:
    """The messages of a client that have been sent; on one event loop."""

    def __init__(self, connections: Connections, routes: Routes, producer: Producer, timeout: float) -> None:
        self._connections, self._routes, self._producer, self._timeout = connections, routes, producer, timeout

    async def find(self, topic: str, key: Text, limit: int) -> list[FoundMessage]:
        check_topic_name(topic)
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise UsageError(f"limit is {limit!r}, expected a whole number from 1 on")
        fields = {"key": key_text(key), "maxNum": limit}
        found: list[FoundMessage] = []
        unread = ""
        for answer in await self._ask(Request.QUERY_MESSAGE, topic, None, fields):
            _expect_known(answer, Request.QUERY_MESSAGE)
            part = read_found(answer)
            found += part.messages
            unread = unread or part.unread
        if unread:
            sentence = (
                f"the table cannot be asked for messages of topic {topic!r} with the key {fields['key']!r}: {unread}"
            )
            if not found:
                raise Unavailable(f"the log has none, and {sentence}")
            logger.warning("%s; find returns what the log has", sentence)
        return found[:limit]

    # -- cancelling

    async def cancel(
        self, receipt: Receipt | str | None, topic: str | None, key: Text | None, *, only: bool
    ) -> Cancelled | list[CancelledMessage]:
        named = _read_key("cancel", receipt, topic, key, only=only)
        if named is not None:
            return await self._change(Request.CANCEL_KEY, *named, {}, _read_cancelled, only=only)
        if isinstance(receipt, Receipt) and receipt.handle is None:
            return Cancelled.DELIVERED if _was_visible(receipt) else Cancelled.UNKNOWN
        text, handle = _read_handle("cancel", receipt)
        return await self._recall(handle.topic, handle.broker_name, {"recallHandle": text})

    async def cancel_key(self, topic: str, key: Text, due: datetime | int) -> Cancelled:
        check_topic_name(topic)
        due_at_ms = due if isinstance(due, int) else instant_ms(due)
        return await self._recall(topic, "", {"key": key_text(key), "due": due_at_ms})

    async def _recall(self, topic: str, broker_name: str, fields: Mapping[str, Any]) -> Cancelled:
        # The broker answers a repeated cancel as the first one, so trying again is safe.
        (answer,) = await self._ask(Request.RECALL_MESSAGE, topic, broker_name, fields)
        outcome = answer.fields.get("outcome")
        if outcome is None:  # RocketMQ itself gives none: its success means only that the request was taken
            expect_success(answer)
            return Cancelled.UNKNOWN
        try:
            return Cancelled(outcome)
        except ValueError as error:
            raise ProtocolError(f"the outcome of a cancel is {outcome!r}, which is not known") from error

    # -- moving

    async def move(
        self, call: str, receipt: Receipt | str | None, topic: str | None, key: Text | None, wish: Mapping[str, int],
        *, only: bool,
    ) -> MovedMessage | list[MovedMessage]:  # fmt: skip
        """Moves one message or all of a key; `call` is what the caller has called, for errors."""
        named = _read_key(call, receipt, topic, key, only=only)
        if named is not None:
            return await self._change(Request.MOVE_MESSAGE, *named, wish, _read_moved, only=only)
        if isinstance(receipt, Receipt) and receipt.handle is None:
            outcome = Moved.DELIVERED if _was_visible(receipt) else Moved.UNKNOWN
            return MovedMessage(receipt.id, outcome, None, None, None)
        text, handle = _read_handle(call, receipt)
        fields = {"recallHandle": text, **wish}
        answers = await self._ask(
            Request.MOVE_MESSAGE, handle.topic, handle.broker_name, fields, is_repeatable="by" not in wish
        )
        messages = _read_messages(answers, Request.MOVE_MESSAGE, _read_moved)
        return messages[0] if messages else MovedMessage(handle.unique_key, Moved.UNKNOWN, None, None, None)

    # -- both

    async def _change(
        self, request: Request, topic: str, key: str, wish: Mapping[str, int], read: Callable[[Any], Result],
        *, only: bool,
    ) -> list[Result]:  # fmt: skip
        """Changes all messages of a key that wait."""
        fields = {"key": key, "only": "true" if only else "false", **wish}
        answers = await self._ask(request, topic, None, fields, is_repeatable="by" not in wish, only=only)
        return _read_messages(answers, request, read)

    async def _ask(
        self, request: Request, topic: str, broker_name: str | None, fields: Mapping[str, Any],
        *, is_repeatable: bool = True, only: bool = False,
    ) -> list[Command]:  # fmt: skip
        """Asks the broker of that name, the first one if it is empty, or all brokers of the topic if it is None.

        Returns their answers, up to the first refusal. With `only` the topic has to have one broker: none knows what
        others have.
        """
        answers: dict[str, Command] = {}
        last = asyncio.get_running_loop().time() + self._timeout

        async def ask(end: float) -> Command:
            addresses = addresses_of(await self._routes.of(topic, _seconds_until(end)))
            names = list(addresses) if broker_name is None else [broker_name or next(iter(addresses), "")]
            if not names or names[0] not in addresses:
                name = names[0] if names else ""
                raise TopicNotFound(f"topic {topic} has no broker {name!r}: it may have moved, or the broker is down")
            if only and len(names) > 1:
                raise UsageError(f"topic {topic} has {len(names)} brokers, and only= needs one that knows all messages")
            for name in names:
                if name in answers:
                    continue
                connection = await self._connections.to(addresses[name], _seconds_until(end))
                asked = {"topic": topic, "producerGroup": PRODUCER_GROUP, "bname": name, **fields}
                try:
                    answer = await connection.request(
                        request, asked, timeout=_seconds_until(end if is_repeatable else last)
                    )
                except (Unreachable, TimedOut) as error:
                    if is_repeatable:
                        raise
                    raise _AnswerLost(error) from error
                if answer.code in PASSING and is_repeatable:
                    return answer
                answers[name] = answer
                if answer.code not in _FOUND_OR_NOT:
                    break
            return answer

        try:
            await self._producer.repeat(ask, topic, PASSING if is_repeatable else frozenset())
        except _AnswerLost as lost:
            kind = TimedOut if isinstance(lost.cause, TimedOut) else Disconnected
            sentence = "it may have been moved, and is not moved by a span twice; find says when it is due"
            raise kind(f"{lost}; {sentence}") from lost.cause
        return list(answers.values())


def _read_key(call: str, receipt: object, topic: str | None, key: Text | None, *, only: bool) -> tuple[str, str] | None:
    """Returns the topic and key of a call; None for one that is about a receipt. Raises UsageError, IllegalMessage."""
    if topic is None and key is None and not only:
        return None
    if receipt is not None:
        raise UsageError(f"{call} takes either a receipt, or topic=, key= and only=")
    if topic is None or key is None:
        raise UsageError(f"{call} by key needs both topic= and key=")
    check_topic_name(topic)
    return topic, key_text(key)


def _read_handle(call: str, what: object) -> tuple[str, RecallHandle]:
    if isinstance(what, Receipt):
        what = what.handle
    if not isinstance(what, str):
        raise UsageError(
            f"{call} got {what!r:.64} of type {type(what).__name__}, expected the receipt of a send, or its text, or "
            "topic= and key="
        )
    try:
        return what, parse_recall_handle(what)
    except ProtocolError as error:
        advice = "; to postpone by a predicate, call postpone_where" if call == "postpone" else ""
        raise UsageError(f"{what[:64]!r} is neither a receipt nor a recall handle: {error}{advice}") from error


def _was_visible(receipt: Receipt) -> bool:
    """Whether a message without a handle was visible when its receipt was written, as it has no delay. With a delay, a
    broker that gives no handle leaves it open whether the message waited.
    """
    return receipt.queue_offset is not None


def _expect_known(answer: Command, request: Request) -> None:
    """Raises what an answer means that the broker gives only where it cannot understand the request."""
    if answer.code == codes.REQUEST_CODE_NOT_SUPPORTED:
        raise BrokerError(
            answer.code, f"the broker does not know {request.name} ({request.code}); a Postdate of this version does"
        )
    if answer.code == codes.INVALID_PARAMETER:
        raise UsageError(answer.remark or "the broker gave no reason")


def _read_messages(answers: list[Command], request: Request, read: Callable[[Any], Result]) -> list[Result]:
    found: list[Result] = []
    for answer in answers:
        _expect_known(answer, request)
        body = bodies.load(expect_success(answer).body, f"the answer to {request.name}")
        try:
            found += [read(row) for row in body["messages"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"the answer to {request.name} cannot be read: {type(error).__name__} {error}"
            ) from error
    return found


def _read_cancelled(row: Any) -> CancelledMessage:
    return CancelledMessage(row["id"], Cancelled(row["outcome"]), row["due"] or None)


def _read_moved(row: Any) -> MovedMessage:
    extra = {"was": None, "recallHandle": None} | row
    return MovedMessage(row["id"], Moved(row["outcome"]), row["due"] or None, extra["was"], extra["recallHandle"])


def _seconds_until(end: float) -> float:
    return end - asyncio.get_running_loop().time()

"""Sending, and asking again while no broker answers."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from postdate.client.connection import Connections
from postdate.client.errors import Disconnected, Pause, TimedOut, Unreachable, refusal
from postdate.client.identity import new_unique_keys
from postdate.client.outgoing import (
    Outgoing,
    Receipt,
    Sealed,
    check_topic_name,
    frames_of,
    inner,
    receipt,
    receipts,
    seal,
)
from postdate.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES_MAX, Routes
from postdate.clock import SystemClock
from postdate.errors import PostdateError, UsageError
from postdate.message import PROPERTY_UNIQ_KEY, encode_properties
from postdate.wire import codes
from postdate.wire.bodies import encode_batch
from postdate.wire.frame import Command
from postdate.wire.requests import Request

PRODUCER_GROUP = "postdate"  # brokers want a name; they use it for transactions, which we do not send

# A call makes at least this many tries, unless each would have less than the seconds below. So a broker that is gone
# without a word is noticed, and a slow network has a third of the time that its caller allows.
TRIES_MIN, TRY_SECONDS = 3, 3.0
# A broker that is back is noticed this late at most.
PAUSE_SECONDS_MAX = 1.0
LAST_TRY_SECONDS_MIN = 0.1  # a shorter one would only hide why the tries before it have failed
REFUSALS_MAX = 2  # repetitions after an answer that may pass, RocketMQ's
# Stored, though not as safely as the broker wished: on its disk (10) or on its replica (11, 12) a little later.
_SENT = frozenset({codes.SUCCESS, 10, 11, 12})
# What passes when the broker is itself again: not available, shutting down (1500).
_AWAY = frozenset({codes.SERVICE_NOT_AVAILABLE, 1500})
# What may pass at another try, as RocketMQ's clients see it: an error of the broker, busy. A mistake of the caller is
# raised at once.
PASSING = _AWAY | {codes.SYSTEM_ERROR, codes.SYSTEM_BUSY}
_PASSING_FOR_SENDS = PASSING | {codes.TOPIC_NOT_EXIST}  # a topic that has moved

logger = logging.getLogger("postdate.client")

# One try of a request; everything, connecting included, is done when the loop's clock says so.
Try = Callable[[float], Awaitable[Command]]


class Producer:
    """The sending half of a client; on one event loop."""

    def __init__(self, connections: Connections, routes: Routes, timeout: float) -> None:
        self._connections, self._routes, self._timeout = connections, routes, timeout
        self._clock = SystemClock()
        self._keys = new_unique_keys()
        self._is_away = False  # whether the last try of any call got no answer

    # -- sending

    async def send(self, topic: str, message: Outgoing, queue_id: int | None) -> Receipt:
        check_topic_name(topic)
        if queue_id is not None and (isinstance(queue_id, bool) or not isinstance(queue_id, int)):
            raise UsageError(f"queue is {queue_id!r} of type {type(queue_id).__name__}, expected int")
        sealed = self._seal(message)
        fields = {"i": sealed.properties.decode()}
        answer = await self._post(Request.SEND_MESSAGE_V2, topic, fields, sealed.body, queue_id, is_once=sealed.is_once)
        return receipt(topic, sealed, answer.fields)

    async def send_batch(self, topic: str, messages: Sequence[Outgoing]) -> list[Receipt]:
        check_topic_name(topic)
        sealed = [self._seal(message) for message in messages]
        if any(message.is_once for message in sealed):
            raise UsageError("a batch cannot send a message once: send those with an id by themselves")
        found: list[Receipt] = []
        for frame in frames_of(sealed):
            # A frame has a unique key of its own, as RocketMQ's clients give it.
            properties = encode_properties({PROPERTY_UNIQ_KEY: self._keys.next(self._clock.now_ms())})
            fields, body = {"i": properties.decode(), "m": "true"}, encode_batch(map(inner, frame))
            answer = await self._post(Request.SEND_BATCH_MESSAGE, topic, fields, body, None)
            found += receipts(topic, frame, answer.fields)
        return found

    async def send_on(
        self, topic: str, body: bytes, properties: Mapping[str, str], sys_flag: int, reconsume_times: int,
        reconsume_times_max: int | None,
    ) -> None:  # fmt: skip
        """Sends a message that a consumer has received to its group's retry topic, body and flags as they are."""
        fields = {"i": encode_properties(properties).decode(), "f": sys_flag, "j": reconsume_times}
        if reconsume_times_max is not None:
            fields["l"] = reconsume_times_max
        await self._post(Request.SEND_MESSAGE_V2, topic, fields, body, None)

    async def send_letter(
        self, topic: str, body: bytes, properties: Mapping[str, str], sys_flag: int, dead_at_ms: int
    ) -> Receipt:
        """Sends a dead letter to its topic again. It counts as born when it died, and is marked as a resend from the
        first try on: whoever sends this letter once more, the broker stores it once.
        """
        encoded = encode_properties(properties)
        fields = {"i": encoded.decode(), "f": sys_flag, "g": dead_at_ms, "resend": "true"}
        answer = await self._post(Request.SEND_MESSAGE_V2, topic, fields, body, None)
        sealed = Sealed(properties[PROPERTY_UNIQ_KEY], body, encoded, is_delayed=False)
        return receipt(topic, sealed, answer.fields)

    def _seal(self, message: Outgoing) -> Sealed:
        return seal(message, self._keys.next(self._clock.now_ms()))

    async def _post(
        self, code: int, topic: str, fields: Mapping[str, Any], body: bytes, queue_id: int | None, *,
        is_once: bool = False,
    ) -> Command:  # fmt: skip
        """Sends until a broker has taken it. A try that a broker may have stored without our learning of it ties the
        others to that broker, and marks them as resends, which it stores once.
        """
        fields = {
            "a": PRODUCER_GROUP, "b": topic, "c": DEFAULT_TOPIC, "d": DEFAULT_TOPIC_QUEUES_MAX, "f": 0,
            "g": self._clock.now_ms(), "h": 0, "j": 0, "k": "false", "m": "false", **fields,
        }  # fmt: skip
        tried_at: str | None = None  # the name of that broker

        async def send(end: float) -> Command:
            nonlocal tried_at
            target = await self._routes.target(topic, queue_id, _seconds_until(end), tried_at)
            if is_once and not self._routes.is_postdate:
                raise UsageError("only Postdate stores a message once, this broker would store it with every send")
            sent = {**fields, "e": target.queue_id, "n": target.broker_name}
            if tried_at is not None:
                sent["resend"] = "true"
            connection = await self._connections.to(target.address, _seconds_until(end))
            tried_at = target.broker_name
            return await connection.request(code, sent, body, timeout=_seconds_until(end))

        try:
            answer = await self.repeat(send, topic, _PASSING_FOR_SENDS)
        except Unreachable as error:
            if tried_at is None or isinstance(error, Disconnected):
                raise
            raise Disconnected(f"{error}; an earlier try may have been stored") from error
        if answer.code not in _SENT:
            raise refusal(answer)
        return answer

    async def repeat(self, ask: Try, topic: str, passing: AbstractSet[int]) -> Command:
        """Tries until there is an answer that does not pass, with growing pauses, within the timeout in all."""
        loop = asyncio.get_running_loop()
        end, try_seconds = loop.time() + self._timeout, max(TRY_SECONDS, self._timeout / TRIES_MIN)
        pause, refusals_left, is_in_doubt = Pause(PAUSE_SECONDS_MAX), REFUSALS_MAX, False
        while True:
            failure: PostdateError
            try:
                answer = await ask(min(end, loop.time() + try_seconds))
                if answer.code not in passing:
                    self._note_answer()
                    return answer
                failure = refusal(answer)
                if answer.code not in _AWAY and not is_in_doubt:
                    if not refusals_left:
                        raise failure
                    refusals_left -= 1
            except (Unreachable, TimedOut) as error:
                failure, is_in_doubt = error, True
            self._routes.forget(topic)
            seconds = pause.next()
            if loop.time() + seconds + LAST_TRY_SECONDS_MIN >= end:
                raise _in_all(failure, self._timeout)
            self._note_failure(failure)
            await asyncio.sleep(seconds)

    def _note_failure(self, failure: PostdateError) -> None:
        if not self._is_away:
            self._is_away = True
            logger.warning("%s; sends and cancels are tried again for up to %g s", failure, self._timeout)

    def _note_answer(self) -> None:
        if self._is_away:
            self._is_away = False
            logger.info("sends and cancels are answered again")


def _seconds_until(end: float) -> float:
    return end - asyncio.get_running_loop().time()


def _in_all(failure: PostdateError, timeout: float) -> PostdateError:
    """The failure of a call, whose last try had less time than the call."""
    return (
        TimedOut(f"no answer within {timeout:g} s; the last try: {failure}")
        if isinstance(failure, TimedOut)
        else failure
    )

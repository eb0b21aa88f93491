"""Sending and cancelling."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from postdate.client.connection import Address, Connections
from postdate.client.errors import Pause, Unreachable, expect_success, refusal
from postdate.client.identity import new_unique_keys
from postdate.client.outgoing import Outgoing, Receipt, Sealed, frames_of, inner, receipt, receipts, seal
from postdate.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES_MAX, Routes, addresses_of
from postdate.clock import SystemClock
from postdate.errors import PostdateError, ProtocolError, TopicNotFound, UsageError
from postdate.message import PROPERTY_UNIQ_KEY, Cancelled, check_topic, encode_properties
from postdate.wire import codes
from postdate.wire.bodies import encode_batch
from postdate.wire.frame import Command
from postdate.wire.ids import parse_recall_handle
from postdate.wire.requests import Request

PRODUCER_GROUP = "postdate"  # brokers want a name; they use it for transactions, which we do not send

RESENDS_MAX = 2  # RocketMQ's
# Stored, though not as safely as the broker wished: on its disk (10) or on its replica (11, 12) a little later.
_SENT = frozenset({codes.SUCCESS, 10, 11, 12})
# What may pass at another try, as RocketMQ's clients see it: an error of the broker, busy, not available, a topic that
# has moved, a broker that shuts down (1500). A mistake of the caller is raised at once.
_SENT_AGAIN = frozenset(
    {codes.SYSTEM_ERROR, codes.SYSTEM_BUSY, codes.SERVICE_NOT_AVAILABLE, codes.TOPIC_NOT_EXIST, 1500}
)


class Producer:
    """The sending half of a client; on one event loop."""

    def __init__(self, connections: Connections, routes: Routes, timeout: float) -> None:
        self._connections, self._routes, self._timeout = connections, routes, timeout
        self._clock = SystemClock()
        self._keys = new_unique_keys()

    # -- sending

    async def send(self, topic: str, message: Outgoing, queue_id: int | None) -> Receipt:
        check_topic(topic)
        sealed = self._seal(message)
        fields = {"i": sealed.properties.decode()}
        answer = await self._post(Request.SEND_MESSAGE_V2, topic, fields, sealed.body, queue_id)
        return receipt(topic, sealed, answer.fields)

    async def send_batch(self, topic: str, messages: Sequence[Outgoing]) -> list[Receipt]:
        check_topic(topic)
        sealed = [self._seal(message) for message in messages]
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

    def _seal(self, message: Outgoing) -> Sealed:
        return seal(message, self._keys.next(self._clock.now_ms()))

    async def _post(
        self, code: int, topic: str, fields: Mapping[str, Any], body: bytes, queue_id: int | None
    ) -> Command:
        """Sends until a broker has taken it, at most `RESENDS_MAX` times more, within the timeout in all."""
        loop = asyncio.get_running_loop()
        end, pause = loop.time() + self._timeout, Pause()
        fields = {
            "a": PRODUCER_GROUP, "b": topic, "c": DEFAULT_TOPIC, "d": DEFAULT_TOPIC_QUEUES_MAX, "f": 0,
            "g": self._clock.now_ms(), "h": 0, "j": 0, "k": "false", "m": "false", **fields,
        }  # fmt: skip
        for resends_left in range(RESENDS_MAX, -1, -1):
            failure: PostdateError
            try:
                target = await self._routes.target(topic, queue_id, end - loop.time())
                sent = {**fields, "e": target.queue_id, "n": target.broker_name}
                answer = await self._ask(target.address, code, sent, body, end)
                if answer.code in _SENT:
                    return answer
                failure = refusal(answer)
                if answer.code not in _SENT_AGAIN:
                    raise failure
            except Unreachable as error:
                failure = error
            self._routes.forget(topic)
            seconds = pause.next()
            if not resends_left or loop.time() + seconds >= end:
                raise failure
            await asyncio.sleep(seconds)
        raise AssertionError("the last try either returns or raises")

    async def _ask(self, address: Address, code: int, fields: Mapping[str, Any], body: bytes, end: float) -> Command:
        """Asks a broker; everything, connecting included, must be done when the loop's clock says `end`."""
        loop = asyncio.get_running_loop()
        connection = await self._connections.to(address, end - loop.time())
        return await connection.request(code, fields, body, timeout=end - loop.time())

    # -- cancelling

    async def cancel(self, what: Receipt | str) -> Cancelled:
        if isinstance(what, Receipt):
            if what.handle is None:
                # Without a delay it was visible when its receipt was written. With one, a broker that gives no handle
                # leaves it open whether the message waited.
                return Cancelled.DELIVERED if what.queue_offset is not None else Cancelled.UNKNOWN
            what = what.handle
        try:
            handle = parse_recall_handle(what)
        except ProtocolError as error:
            raise UsageError(f"{what[:64]!r} is neither a receipt nor a recall handle: {error}") from error
        return await self._recall(handle.topic, handle.broker_name, {"recallHandle": what})

    async def cancel_key(self, topic: str, key: str, due_at_ms: int) -> Cancelled:
        return await self._recall(topic, None, {"key": key, "due": due_at_ms})

    async def _recall(self, topic: str, broker_name: str | None, fields: Mapping[str, Any]) -> Cancelled:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout
        addresses = addresses_of(await self._routes.of(topic, self._timeout))
        name = broker_name if broker_name is not None else next(iter(addresses), "")
        if name not in addresses:
            raise TopicNotFound(f"topic {topic} has no broker {name!r}: it may have moved, or the broker is down")
        fields = {"topic": topic, "producerGroup": PRODUCER_GROUP, "bname": name, **fields}
        answer = await self._ask(addresses[name], Request.RECALL_MESSAGE, fields, b"", end)
        outcome = answer.fields.get("outcome")
        if outcome is None:  # RocketMQ itself gives none: its success means only that the request was taken
            expect_success(answer)
            return Cancelled.UNKNOWN
        try:
            return Cancelled(outcome)
        except ValueError as error:
            raise ProtocolError(f"the outcome of a cancel is {outcome!r}, which is not known") from error

"""Messages that a broker has lent us: renewed while they are worked on, then acknowledged, retried or given back.

```
  pop --> lent for 30 s --> a handler works (renewed every 10 s) --> settled --> acknowledged, many in one request
                 |                                              +--> failed --> comes again later, or is a dead letter
                 +--> nobody has begun --> given back, and does not count as an attempt
```

Callers settle messages in threads of their own; everything else runs on the event loop.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from postdate.client.backlog import Delivery
from postdate.client.connection import Address
from postdate.client.errors import PASSING, expect_success, refusal
from postdate.client.membership import Membership
from postdate.client.options import Wanted
from postdate.clock import SystemClock
from postdate.errors import PostdateError, ProtocolError
from postdate.message import REASON_CHARACTERS_MAX
from postdate.wire import codes
from postdate.wire.bodies import Ack, encode_batch_ack
from postdate.wire.records import Pieces, split_records
from postdate.wire.requests import Request

log = logging.getLogger("postdate.client")

LEASE_MS = 30_000
RENEW_SECONDS = 10.0  # a lease that is older than this is renewed
HOLD_SECONDS = 15.0  # how long a broker may hold a pop that finds nothing
TICK_SECONDS = 5.0  # how often we look for such
ACKS_MAX = 1_000  # of one request


class Outcome(NamedTuple):
    """What becomes of a message whose handler has failed."""

    delay_ms: int | None = None  # when it comes again, if that is known
    is_dead: bool = False  # it was its last attempt, and is a dead letter now


def outcome_of(answer: Mapping[str, Any], delay_name: str) -> Outcome:
    """Reads the answer to a request that has a message come again."""
    try:
        return Outcome(int(answer[delay_name]), answer.get("outcome") == "dead")
    except (KeyError, ValueError, TypeError) as error:
        raise ProtocolError(f"an answer has {delay_name} = {answer.get(delay_name)!r}, expected a number") from error


class Source(NamedTuple):
    """Where messages are popped."""

    topic: str
    broker_name: str
    address: Address


class LeasedDelivery(Delivery):
    """A message that is ours until its lease ends. Known by its identity."""

    __slots__ = ("_is_settled", "_leases", "leased_at", "popped_at_ms", "queue_id", "renewal", "source")

    def __init__(
        self, leases: "Leases", source: Source, queue_id: int, popped_at_ms: int, leased_at: float, pieces: Pieces
    ) -> None:
        super().__init__(pieces)
        self._leases, self.source, self.queue_id = leases, source, queue_id
        self.popped_at_ms = popped_at_ms  # by the broker's clock: it names this lease
        self.leased_at = leased_at  # by the loop's clock
        self.renewal: asyncio.Task[None] | None = None  # a request on its way, which gives the lease another name
        self._is_settled = False

    def settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._leases.note_settled(self)

    def settle_silently(self) -> None:
        """The broker knows it already."""
        self._is_settled = True

    @property
    def is_settled(self) -> bool:
        return self._is_settled


class Popped(NamedTuple):
    """What a pop has brought."""

    deliveries: list[LeasedDelivery]
    size: int  # in bytes
    was_held: bool  # whether the broker waited for messages; asking again at once is fine then


class Leases:
    """The leases of one consumer."""

    def __init__(self, wanted: Wanted, membership: Membership) -> None:
        self._wanted, self._membership = wanted, membership
        self._loop = asyncio.get_running_loop()
        self._clock = SystemClock()
        self._open: set[LeasedDelivery] = set()
        self._settled: deque[LeasedDelivery] = deque()  # to be acknowledged; filled by any thread
        self._is_awake = False  # whether the loop knows that something was settled
        self._wake = asyncio.Event()

    # -- popping

    async def pop(self, source: Source, count: int, expression: str, timeout: float, *, is_ready_only: bool) -> Popped:
        """Asks for messages; the broker holds that for a while if there are none. Raises what it answers."""
        connection = await self._membership.connection(source.address)
        fields = {
            "consumerGroup": self._wanted.group, "topic": source.topic, "queueId": -1, "maxMsgNums": count,
            "invisibleTime": LEASE_MS, "pollTime": int(HOLD_SECONDS * 1_000), "bornTime": self._clock.now_ms(),
            "initMode": codes.POP_FROM_END if self._wanted.from_ == "last" else 0, "expType": "TAG",
            "exp": expression, "order": "false", "readyOnly": "true" if is_ready_only else "false",
            "bname": source.broker_name,
        }  # fmt: skip
        if self._wanted.reconsume_times_max is not None:
            fields["maxReconsumeTimes"] = self._wanted.reconsume_times_max
        answer = await connection.request(Request.POP_MESSAGE, fields, timeout=HOLD_SECONDS + timeout)
        if answer.code in (codes.PULL_NOT_FOUND, codes.POLLING_TIMEOUT):
            return Popped([], 0, was_held=answer.code == codes.POLLING_TIMEOUT)
        expect_success(answer)
        try:
            popped_at_ms = int(answer.fields["popTime"])
        except (KeyError, ValueError, TypeError) as error:
            raise ProtocolError(f"the answer to a pop has popTime = {answer.fields.get('popTime')!r}") from error
        records, now = zip(*split_records(answer.body), strict=True), self._loop.time()
        found = [LeasedDelivery(self, source, _queue_id(pieces), popped_at_ms, now, pieces) for pieces in records]
        self._open.update(found)
        return Popped(found, len(answer.body), was_held=False)

    # -- acknowledging

    def note_settled(self, delivery: LeasedDelivery) -> None:
        """Has a message acknowledged soon; called by any thread."""
        self._settled.append(delivery)
        if not self._is_awake:
            self._is_awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and everybody has left
                self._loop.call_soon_threadsafe(self._wake.set)

    async def wait_for_settled(self) -> None:
        await self._wake.wait()

    async def flush(self) -> None:
        """Acknowledges everything that is settled. While one request is on its way, the next ones gather."""
        self._wake.clear()
        self._is_awake = False  # before we look: what is settled from here on wakes us again
        while self._settled:
            batch = [self._settled.popleft() for _ in range(min(len(self._settled), ACKS_MAX))]
            try:
                await self._acknowledge(batch)
            except BaseException:
                self._settled.extendleft(reversed(batch))
                raise

    async def _acknowledge(self, batch: list[LeasedDelivery]) -> None:
        for delivery in batch:
            await _wait_for_renewal(delivery)
        by_address: dict[Address, list[LeasedDelivery]] = {}
        for delivery in batch:
            by_address.setdefault(delivery.source.address, []).append(delivery)
        for address, deliveries in by_address.items():
            by_pop: dict[tuple[str, int, int], list[int]] = {}
            for each in deliveries:
                by_pop.setdefault((each.source.topic, each.queue_id, each.popped_at_ms), []).append(each.queue_offset)
            acks = [Ack(self._wanted.group, *place, offsets) for place, offsets in by_pop.items()]
            body = encode_batch_ack(deliveries[0].source.broker_name, acks)
            try:
                expect_success(await self._membership.ask(address, Request.BATCH_ACK_MESSAGE, {}, body))
            except PASSING:
                raise
            except PostdateError as error:
                # One that the broker refuses, of a topic that is gone, must not hold the rest.
                log.debug("a batch of %d acknowledgements is refused: %s", len(deliveries), error)
                await self._acknowledge_one_by_one(deliveries)
            self._open.difference_update(deliveries)

    async def _acknowledge_one_by_one(self, deliveries: Iterable[LeasedDelivery]) -> None:
        for delivery in deliveries:
            try:
                await self._ask(delivery, Request.ACK_MESSAGE, {})
            except PASSING:
                raise
            except PostdateError as error:
                log.warning("message %s is not acknowledged: %s", delivery.id, error)

    async def acknowledge(self, delivery: LeasedDelivery) -> None:
        """Acknowledges one message at once. Raises what the broker answers; then it is told later."""
        if delivery.is_settled:
            return
        delivery.settle_silently()
        try:
            await _wait_for_renewal(delivery)
            answer = await self._ask(delivery, Request.ACK_MESSAGE, {})
            if answer is None:
                log.warning("message %s was acknowledged after its lease had ended: it comes again", delivery.id)
        except BaseException:
            self.note_settled(delivery)
            raise
        self._open.discard(delivery)

    # -- renewing

    async def renew(self) -> None:
        """Renews the leases of messages that are worked on or wait, where it is time."""
        before = self._loop.time() - RENEW_SECONDS
        due = [each for each in self._open if each.leased_at <= before and not each.is_settled and each.renewal is None]
        for delivery in due:
            delivery.renewal = self._loop.create_task(self._renew(delivery))
        await asyncio.gather(*[each.renewal for each in due if each.renewal is not None])

    async def _renew(self, delivery: LeasedDelivery) -> None:
        now = self._loop.time()
        try:
            fields = {"invisibleTime": LEASE_MS}
            answer = await self._ask(delivery, Request.CHANGE_MESSAGE_INVISIBLETIME, fields)
            if answer is None:
                self._open.discard(delivery)
                log.warning("the lease of message %s has ended while it is worked on: it comes again", delivery.id)
            else:
                delivery.popped_at_ms, delivery.leased_at = int(answer["popTime"]), now
        except PostdateError as error:
            log.warning("the lease of message %s was not renewed: %s", delivery.id, error)
        finally:
            delivery.renewal = None

    # -- giving back

    async def fail(self, delivery: LeasedDelivery, delay_ms: int, reason: str) -> Outcome:
        """Its handler has failed: it comes again after a delay, -1 for the broker's, or is a dead letter."""
        await _wait_for_renewal(delivery)
        fields = {"invisibleTime": delay_ms, "reason": reason[:REASON_CHARACTERS_MAX]}
        answer = await self._ask(delivery, Request.CHANGE_MESSAGE_INVISIBLETIME, fields)
        self._open.discard(delivery)
        delivery.settle_silently()
        if answer is None:
            log.warning("message %s failed after its lease had ended: it comes again", delivery.id)
            return Outcome()
        return outcome_of(answer, "invisibleTime")

    async def give_back(self, deliveries: Iterable[LeasedDelivery], delay_ms: int = 0) -> None:
        """Gives back what nobody has begun with: it does not count as an attempt."""
        await asyncio.gather(*[self._give_back(delivery, delay_ms) for delivery in deliveries])

    async def _give_back(self, delivery: LeasedDelivery, delay_ms: int) -> None:
        delivery.settle_silently()
        await _wait_for_renewal(delivery)
        self._open.discard(delivery)
        try:
            fields = {"invisibleTime": delay_ms, "notBegun": "true"}
            await self._ask(delivery, Request.CHANGE_MESSAGE_INVISIBLETIME, fields)
        except PostdateError as error:  # it comes again when its lease ends
            log.debug("message %s could not be given back: %s", delivery.id, error)

    async def abandon_all(self) -> None:
        """Has everything come again at once that is still worked on when we leave, as another attempt: nobody will
        acknowledge it.
        """
        open_still = [delivery for delivery in self._open if not delivery.is_settled]
        await asyncio.gather(*[self.fail(delivery, 0, "its consumer has left") for delivery in open_still])

    async def _ask(self, delivery: LeasedDelivery, code: int, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Asks about one lease; returns the fields of the answer, or None where the lease has ended."""
        source, offset = delivery.source, delivery.queue_offset
        # RocketMQ's handle: first offset, popped at, lent for, revive queue, retry, broker, queue, offset.
        words = (offset, delivery.popped_at_ms, LEASE_MS, 0, 0, source.broker_name, delivery.queue_id, offset)
        fields = {
            "consumerGroup": self._wanted.group, "topic": source.topic, "queueId": delivery.queue_id, "offset": offset,
            "extraInfo": " ".join(map(str, words)), "bname": source.broker_name, **fields,
        }  # fmt: skip
        answer = await self._membership.ask(source.address, code, fields)
        if answer.code == codes.NO_MESSAGE:
            return None
        if answer.code != codes.SUCCESS:
            raise refusal(answer)
        return dict(answer.fields)


async def _wait_for_renewal(delivery: LeasedDelivery) -> None:
    """A renewal gives the lease another name: until its answer comes, nobody knows which."""
    if delivery.renewal is not None:
        await asyncio.wait([delivery.renewal])


def _queue_id(pieces: Pieces) -> int:
    return int.from_bytes(pieces[3][12:16], "big")

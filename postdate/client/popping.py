"""A member of a consumer group that pops: any number of workers and members share a topic message by message.

```
  join --> a pop per broker and topic, held until there is something --> stock --> next() --> turn: work on each
               ^ asks for as many as the workers handle in 100 ms,         |
               | and at least one for each free worker                     +--> what nobody begins within 1 s goes back
```

The broker lends each message for a while (leases.py). No queue belongs to anybody, and none has an order.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence

from postdate.client.backlog import BYTES_MAX, TURN_NS, Delivery, HandOut, PulledDelivery, Turn
from postdate.client.consumer import Consumer
from postdate.client.leases import LeasedDelivery, Source
from postdate.client.options import Wanted
from postdate.client.producer import Producer
from postdate.client.routes import Routes
from postdate.client.security import Security
from postdate.clock import elapsed_ns
from postdate.errors import PostdateError

STOCK_SECONDS = 0.1  # as many messages as the workers handle in this time may wait
STALE_SECONDS = 1.0  # a message that no worker has begun with by then goes back, for other members
_ESTIMATE_WEIGHT = 0.3  # of the last turn, in the estimate of how long a message takes


class CannotPop(PostdateError):
    """The broker does not lend messages as we need it: RocketMQ's. We pull there."""


class StockTurn(Turn):
    """A worker's turn: messages one by one, as long as it is fast."""

    __slots__ = ("_stock", "began_ns", "count")

    def __init__(self, stock: "Stock") -> None:
        self._stock, self.began_ns, self.count = stock, elapsed_ns(), 0

    def __iter__(self) -> Iterator[Delivery]:
        stock, end_ns = self._stock, self.began_ns + TURN_NS
        while not stock.has_ended and (delivery := stock.next_delivery()) is not None:
            self.count += 1
            yield delivery
            if elapsed_ns() >= end_ns:
                return


class Stock(HandOut):
    """Messages that were popped and that no worker has begun with."""

    def __init__(self, worker_count: int, prefetch: int, on_room: Callable[[], None]) -> None:
        """`on_room` is called, by the thread that takes, when there was no room and is some again."""
        super().__init__()
        self._worker_count, self._prefetch, self._on_room = worker_count, prefetch, on_room
        self._waiting: deque[LeasedDelivery] = deque()
        self._waiting_bytes = 0  # about: of those that were put in since it was last empty
        self._busy_count = 0  # workers that have a turn
        self._seconds_each: float | None = None  # how long a message keeps a worker
        self._begun_at_ns = 0  # when a worker last began with a message
        self._is_full = False  # nothing is popped until a worker comes back

    # -- what the loop calls

    def count_to_pop(self) -> int:
        """How many to ask for; 0 says that `on_room` will be called."""
        with self._lock:
            waiting_count = len(self._waiting)
            count = self._worker_count - self._busy_count - waiting_count  # one for each free worker
            if self._is_fast and waiting_count <= self._fast_count // 2:
                count = max(count, self._fast_count - waiting_count)
            if self._waiting_bytes > BYTES_MAX:
                count = 0
            self._is_full = count <= 0
            return max(count, 0)

    @property
    def _is_fast(self) -> bool:
        """Whether workers come back soon. One that has been at work for longer shows it before it is back."""
        return self._seconds_each is not None and elapsed_ns() - self._begun_at_ns < STOCK_SECONDS * 1e9

    @property
    def _fast_count(self) -> int:
        """How many messages the workers handle in STOCK_SECONDS."""
        assert self._seconds_each is not None
        return min(int(self._worker_count * STOCK_SECONDS / max(self._seconds_each, 1e-6)), self._prefetch)

    def put(self, deliveries: Sequence[LeasedDelivery], size: int) -> None:
        with self._lock:
            self._waiting_bytes = size + (self._waiting_bytes if self._waiting else 0)
            self._waiting.extend(deliveries)
            self._wake_one()

    def take_stale(self, before: float) -> list[LeasedDelivery]:
        """Takes out what was popped before an instant of the loop's clock."""
        found: list[LeasedDelivery] = []
        with self._lock, contextlib.suppress(IndexError):  # a worker may take the last one meanwhile
            while self._waiting[0].leased_at <= before:
                found.append(self._waiting.popleft())
        return found

    # -- what workers call

    @property
    def is_ready(self) -> bool:
        return bool(self._waiting)

    def next_delivery(self) -> LeasedDelivery | None:
        try:
            delivery = self._waiting.popleft()  # one step, so it needs no lock
        except IndexError:
            return None
        self._begun_at_ns = elapsed_ns()
        return delivery

    def _take_ready(self) -> Turn:
        self._busy_count += 1
        return StockTurn(self)

    def _put_back(self, done: Turn) -> None:
        assert isinstance(done, StockTurn), done
        self._busy_count -= 1
        if done.count:
            seconds = (elapsed_ns() - done.began_ns) / 1e9 / done.count
            before = seconds if self._seconds_each is None else self._seconds_each
            self._seconds_each = before + _ESTIMATE_WEIGHT * (seconds - before)
        if self._is_full:
            self._is_full = False
            self._on_room()


class PopConsumer(Consumer):
    """A member that takes messages of any queue, as many at a time as its workers can handle."""

    def __init__(self, wanted: Wanted, routes: Routes, producer: Producer, timeout: float, security: Security) -> None:
        self._stock = Stock(wanted.workers, wanted.prefetch, self._room_was_made)
        super().__init__(wanted, routes, producer, timeout, security, self._stock, "CONSUME_POP")

    async def _begin(self) -> list[Coroutine[None, None, None]]:
        if not self._routes.is_postdate:
            raise CannotPop("the broker is no Postdate")
        return [*await self._begin_popping(), self._repeat("giving back", self._give_back_stale, STALE_SECONDS)]

    async def _finish(self) -> None:
        await self._leases.give_back(self._stock.take_stale(self._loop.time()))
        await self._leases.flush()

    async def _acknowledge_pulled(self, delivery: PulledDelivery) -> None:
        raise AssertionError(f"{delivery} was pulled by a member that pops")

    async def _pop_messages(self, source: Source) -> bool:
        count = self._stock.count_to_pop()
        if not count:
            self._room.clear()
            if not self._stock.count_to_pop():  # and no worker came back before the event was cleared
                await self._room.wait()
            return True
        popped = await self._pop(source, count, is_ready_only=False)
        if popped.deliveries:
            self._stock.put(popped.deliveries, popped.size)
            self._arrived.set()
        return popped.was_held or bool(popped.size)

    async def _give_back_stale(self) -> None:
        await self._leases.give_back(self._stock.take_stale(self._loop.time() - STALE_SECONDS))

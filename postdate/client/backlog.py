"""Messages that were pulled and wait to be handed out."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from postdate.client.connection import Address
from postdate.client.progress import Progress
from postdate.message import PROPERTY_RETRY_TOPIC, PROPERTY_UNIQ_KEY
from postdate.wire.bodies import QueueName
from postdate.wire.ids import message_id
from postdate.wire.records import Record


@dataclass(eq=False, slots=True)
class OwnedQueue:
    """A queue that this member reads, from the rebalance that gave it to the one that takes it away."""

    name: QueueName
    address: Address
    progress: Progress
    committed: int | None  # the offset that the broker knows; None before the first commit
    waiting: deque["Delivery"] = field(default_factory=deque)
    waiting_bytes: int = 0
    is_busy: bool = False  # one of its messages is handed out and not released
    room: asyncio.Event = field(default_factory=asyncio.Event)  # whether to pull more
    pulling: "asyncio.Task[None] | None" = None


@dataclass(eq=False, slots=True)
class Delivery:
    """A message and where it came from."""

    queue: OwnedQueue
    record: Record
    properties: dict[str, str]
    is_settled: bool = False  # acknowledged, by the end of its work or by a retry

    @property
    def id(self) -> str:
        """The unique key of its producer, which is the id of its receipt."""
        return self.properties.get(PROPERTY_UNIQ_KEY) or self.offset_id

    @property
    def offset_id(self) -> str:
        return message_id(self.record.store_host, self.record.offset)

    @property
    def topic(self) -> str:
        """The topic that it was sent to at first."""
        return self.properties.get(PROPERTY_RETRY_TOPIC, self.record.topic)

    def settle(self) -> None:
        self.is_settled = True
        self.queue.progress.acknowledge(self.record.queue_offset)


class Backlog:
    """Hands out messages of all queues in turn, of one queue one at a time and in order.

    A queue is ready while it has a message and none of its messages is being worked on.
    """

    def __init__(self) -> None:
        self._ready: deque[OwnedQueue] = deque()

    def put(self, queue: OwnedQueue, deliveries: Sequence[Delivery]) -> None:
        was_empty = not queue.waiting
        queue.waiting.extend(deliveries)
        queue.waiting_bytes += sum(len(delivery.record.body) for delivery in deliveries)
        if was_empty and queue.waiting and not queue.is_busy:
            self._ready.append(queue)

    def take(self) -> Delivery | None:
        """The next message. Its queue gives no other until `release`."""
        if not self._ready:
            return None
        queue = self._ready.popleft()
        queue.is_busy = True
        delivery = queue.waiting.popleft()
        queue.waiting_bytes -= len(delivery.record.body)
        return delivery

    def release(self, queue: OwnedQueue) -> None:
        """The message that was handed out is done with."""
        queue.is_busy = False
        if queue.waiting:
            self._ready.append(queue)

    def drop(self, queue: OwnedQueue) -> None:
        """Forgets what waits of a queue; what is handed out stays so."""
        queue.waiting.clear()
        queue.waiting_bytes = 0
        if queue in self._ready:
            self._ready.remove(queue)

"""Messages that were pulled and wait to be handed out.

This is where threads meet: the event loop puts in what it pulled, and callers take it out, the blocking client's in
threads of their own. So one message costs no hop between threads. Whatever both sides change is changed here, under one
lock, and nothing waits while it has the lock.
"""

import asyncio
import queue as standard
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from postdate.client.connection import Address
from postdate.client.progress import Progress
from postdate.errors import IllegalMessage
from postdate.message import PROPERTY_RETRY_TOPIC, PROPERTY_UNIQ_KEY, decode_properties
from postdate.wire.bodies import QueueName
from postdate.wire.ids import message_id
from postdate.wire.records import Record

BYTES_MAX = 64 * 1024 * 1024  # of bodies that wait, of all queues


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
    is_full: bool = False  # nothing is pulled until some of what waits is gone
    room: asyncio.Event = field(default_factory=asyncio.Event)  # tells the loop that it is not full any more
    pulling: "asyncio.Task[None] | None" = None


@dataclass(eq=False, slots=True)
class Delivery:
    """A message and where it came from."""

    queue: OwnedQueue
    progress: Progress  # that of its queue when it was pulled; a queue that begins anew has another
    record: Record
    is_settled: bool = False  # acknowledged, by the end of its work, by its user's word or by a retry
    _properties: dict[str, str] | None = None  # read when they are first wanted: many look at the body alone

    @property
    def properties(self) -> dict[str, str]:
        if self._properties is None:
            self._properties = readable_properties(self.record.properties)
        return self._properties

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


def readable_properties(data: bytes) -> dict[str, str]:
    """The properties of a stored message. What is not UTF-8 must not stop its queue: it is read as well as can be."""
    try:
        return decode_properties(data)
    except IllegalMessage:
        return decode_properties(data.decode(errors="replace").encode())


class Backlog:
    """Hands out messages of all queues in turn, of one queue one at a time and in order.

    A queue is ready while it has a message and none of its messages is being worked on. Every queue may keep its share
    of what may wait in all, so that none waits for another. When a rebalance adds queues, the shares of the others
    shrink; what they have beyond it is handed out before they pull again.
    """

    def __init__(self, prefetch: int, on_room: Callable[[OwnedQueue], None]) -> None:
        """`on_room` is called, by the thread that takes, when a queue that was full is to be pulled again."""
        self.has_ended = False
        self._failure: BaseException | None = None
        self._prefetch = prefetch
        self._on_room = on_room
        self._ready: deque[OwnedQueue] = deque()
        self._lock = threading.Lock()
        # How many threads sleep, and a token for each that is woken. A condition would do the same, but is written
        # in Python: an interrupt in the middle of it could leave the lock locked.
        self._sleeper_count = 0
        self._alarms: standard.SimpleQueue[None] = standard.SimpleQueue()
        self.share_among(1)

    # -- what the loop calls

    def share_among(self, queue_count: int) -> None:
        """So many queues share what may wait from now on."""
        self._count_max = max(1, self._prefetch // max(1, queue_count))
        self._bytes_max = BYTES_MAX // max(1, queue_count)

    def count_to_pull(self, queue: OwnedQueue, batch: int) -> int:
        return max(1, min(batch, self._count_max - len(queue.waiting)))

    def put(self, queue: OwnedQueue, deliveries: Sequence[Delivery], position: int) -> None:
        """What a pull brought, and where the next one begins."""
        with self._lock:
            queue.progress.pulled([delivery.record.queue_offset for delivery in deliveries], position)
            was_empty = not queue.waiting
            queue.waiting.extend(deliveries)
            queue.waiting_bytes += sum([len(delivery.record.body) for delivery in deliveries])
            queue.is_full = len(queue.waiting) >= self._count_max or queue.waiting_bytes > self._bytes_max
            if was_empty and queue.waiting and not queue.is_busy:
                self._ready.append(queue)
                self._wake_one()

    def move(self, queue: OwnedQueue, position: int) -> bool:
        """The broker says where to go on; False if that is a step back, to a queue that begins anew."""
        with self._lock:
            if position >= queue.progress.position:
                queue.progress.position = position
                return True
            # What is worked on belongs to a queue that is no more: to acknowledge it must not count for this one.
            queue.progress = Progress(position)
            self._forget(queue)
            return False

    def drop(self, queue: OwnedQueue) -> None:
        """Forgets what waits of a queue; what is handed out stays so."""
        with self._lock:
            self._forget(queue)

    def commit_offset(self, queue: OwnedQueue) -> int:
        with self._lock:
            return queue.progress.commit_offset

    def end(self, failure: BaseException | None = None) -> None:
        """Hands out nothing more; those who ask get None, or the failure."""
        with self._lock:
            self.has_ended = True
            self._failure = self._failure or failure
            while self._sleeper_count:
                self._wake_one()

    # -- what anybody calls

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ready)

    def take(self, done: Delivery | None = None) -> Delivery | None:
        """Acknowledges and releases the message that is done with; then the next one, if there is one.

        The queue of that gives no other until it is released. Raises the failure that ended the backlog.
        """
        with self._lock:
            return self._take(done)

    def take_within(self, seconds: float, done: Delivery | None = None) -> Delivery | None:
        """As `take`, in a thread that can wait. None may come earlier than that, and does when the backlog ends."""
        with self._lock:
            delivery = self._take(done)
            if delivery is not None or self.has_ended:
                return delivery
            self._sleeper_count += 1
        try:
            self._alarms.get(timeout=seconds)
        except standard.Empty:
            self._wake_by_itself()
        return self.take()

    def _wake_by_itself(self) -> None:
        """The time of a sleeper was over. If there is a token by now, the sleeper was counted as woken."""
        with self._lock:
            try:
                self._alarms.get_nowait()
            except standard.Empty:
                self._sleeper_count -= 1

    def settle(self, delivery: Delivery) -> None:
        """It is acknowledged, though its work may go on: its queue is not released. May be repeated."""
        with self._lock:
            self._settle(delivery)

    def release(self, delivery: Delivery) -> None:
        """It is acknowledged and done with."""
        with self._lock:
            self._release(delivery)
            self._wake_for_the_rest()

    # -- under the lock

    def _take(self, done: Delivery | None) -> Delivery | None:
        if done is not None:
            self._release(done)
        if self._failure is not None:
            raise self._failure
        if self.has_ended or not self._ready:
            return None
        queue = self._ready.popleft()
        self._wake_for_the_rest()
        queue.is_busy = True
        delivery = queue.waiting.popleft()
        queue.waiting_bytes -= len(delivery.record.body)
        if queue.is_full:
            self._make_room(queue)
        return delivery

    def _make_room(self, queue: OwnedQueue) -> None:
        """Pulls again when half of what may wait is gone: a pull for one message costs as much as one for many."""
        if len(queue.waiting) <= self._count_max // 2 and queue.waiting_bytes <= self._bytes_max:
            queue.is_full = False
            self._on_room(queue)

    def _settle(self, delivery: Delivery) -> None:
        delivery.is_settled = True
        delivery.progress.acknowledge(delivery.record.queue_offset)

    def _release(self, delivery: Delivery) -> None:
        self._settle(delivery)
        queue = delivery.queue
        queue.is_busy = False
        if queue.waiting:
            self._ready.append(queue)

    def _wake_for_the_rest(self) -> None:
        """Who takes a message and leaves others wakes the next sleeper, not one for every message that is ready: the
        one who made it ready mostly takes it himself.
        """
        if self._ready:
            self._wake_one()

    def _wake_one(self) -> None:
        if self._sleeper_count:
            self._sleeper_count -= 1
            self._alarms.put(None)

    def _forget(self, queue: OwnedQueue) -> None:
        queue.waiting.clear()
        queue.waiting_bytes = 0
        if queue in self._ready:
            self._ready.remove(queue)

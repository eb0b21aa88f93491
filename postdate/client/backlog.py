"""Messages that were pulled and wait to be handed out, and how far a group has come in each queue.

This is where threads meet: the event loop puts in what it pulled, and callers take it out, the blocking client's in
threads of their own. A caller takes a queue, not a message: for a turn it owns the queue, and takes its messages
without a lock. So one message costs no hop between threads, and of many each costs next to nothing. All other shared
state changes here, under one lock, and nothing waits while it has the lock.
"""

import asyncio
import queue as standard
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import NamedTuple

from postdate.client.connection import Address
from postdate.clock import elapsed_ns
from postdate.errors import IllegalMessage
from postdate.message import PROPERTY_RETRY_TOPIC, PROPERTY_UNIQ_KEY, decode_properties
from postdate.wire.bodies import QueueName
from postdate.wire.ids import message_id
from postdate.wire.records import Columns, Pieces, Record, join_pieces

BYTES_MAX = 64 * 1024 * 1024  # of records that wait, of all queues
# How long one queue gives its messages before others have their turn. A caller that works longer on a message changes
# the queue after each; a fast loop pays for the change once in a thousand messages.
TURN_NS = 1_000_000


class Progress:
    """Which messages of a queue were pulled and are not yet acknowledged.

    ```
      acknowledged        open            not pulled
      0 1 2 3 4 5 6 |  7  8  .  .  11  |  12 ...
                       ^ commit_offset    ^ position
    ```

    A group that starts again starts at the offset committed, so that is the smallest one not yet acknowledged: a
    message may come twice, none is left out. Messages of one queue are handed out one at a time, so that they are
    acknowledged in order, and two numbers tell it all. The loop's thread calls `pulled`, the caller's
    `acknowledge`; each step is one assignment, so they need no lock.
    """

    __slots__ = ("_first_open", "_last", "position")

    def __init__(self, start: int) -> None:
        self.position = start  # where to pull next
        self._first_open = start
        self._last = start - 1  # of those that were pulled and are wanted

    def pulled(self, offsets: Sequence[int], position: int) -> None:
        """Notes messages that want to be acknowledged, and where to pull next. `offsets` leaves unwanted ones out."""
        if offsets:
            if self._first_open > self._last:
                self._first_open = offsets[0]
            self._last = offsets[-1]
        self.position = position

    def acknowledge(self, offset: int) -> None:
        """With all before it. May be repeated."""
        if offset >= self._first_open:
            self._first_open = offset + 1

    def is_acknowledged(self, offset: int) -> bool:
        return offset < self._first_open

    @property
    def commit_offset(self) -> int:
        first_open = self._first_open
        return self.position if first_open > self._last else first_open


@dataclass(eq=False, slots=True)
class OwnedQueue:
    """A queue that this member reads, from the rebalance that gave it to the one that takes it away."""

    name: QueueName
    address: Address
    progress: Progress
    committed: int | None  # the offset that the broker knows; None before the first commit
    waiting: deque["Pull"] = field(default_factory=deque)  # what came; the first may be handed out in part
    pulled_count: int = 0  # of the messages of those pulls
    pulled_bytes: int = 0
    is_busy: bool = False  # a caller has its turn
    is_full: bool = False  # nothing is pulled until some of what waits is gone
    room: asyncio.Event = field(default_factory=asyncio.Event)  # tells the loop that it is not full any more
    pulling: "asyncio.Task[None] | None" = None

    @property
    def waiting_count(self) -> int:
        if not self.waiting:
            return 0
        first = self.waiting[0]
        return self.pulled_count - first.count + first.left_count


class Origin(NamedTuple):
    """Where the messages of one answer came from: a user who keeps one message must not keep the whole answer."""

    queue: OwnedQueue
    progress: Progress  # that of its queue when it was pulled; a queue that begins anew has another


class Pull:
    """The messages of one answer: columns of what every consumer wants of them.

    An object for each message that waits would have Python's collector of garbage walk over all of them again and
    again, at a fifth of the price of a message. So they are made one by one when they are handed out.
    """

    __slots__ = ("_columns", "_offsets_left", "count", "origin", "rest", "size")

    def __init__(self, queue: OwnedQueue, columns: Columns, size: int) -> None:
        self.origin = Origin(queue, queue.progress)
        self.count = len(columns.queue_offsets)
        self.size = size  # in bytes
        self._columns = columns
        self._offsets_left = iter(columns.queue_offsets)
        # What is not handed out: the caller that has the queue's turn takes from it.
        self.rest: Iterator[Pieces] = zip(self._offsets_left, *columns[1:], strict=False)

    @property
    def queue_offsets(self) -> Sequence[int]:
        return self._columns.queue_offsets

    @property
    def left_count(self) -> int:
        return length_hint(self._offsets_left)

    def forget(self) -> None:
        """Hands out nothing more, even where a caller takes from it at this moment."""
        for column in self._columns:
            column.clear()


class Delivery(ABC):
    """A message at hand."""

    __slots__ = ("_properties", "_record", "pieces")

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        # Read when they are first wanted: many look at the body alone.
        self._record: Record | None = None
        self._properties: dict[str, str] | None = None

    @abstractmethod
    def settle(self) -> None:
        """It is acknowledged: by the end of its work, by its user's word or by a retry. May be repeated."""

    @property
    @abstractmethod
    def is_settled(self) -> bool: ...

    @property
    def queue_offset(self) -> int:
        return self.pieces[0]

    @property
    def record(self) -> Record:
        if self._record is None:
            self._record = join_pieces(self.pieces)
        return self._record

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


class PulledDelivery(Delivery):
    """A message of a queue that we own."""

    __slots__ = ("origin",)

    def __init__(self, origin: Origin, pieces: Pieces) -> None:
        self.origin, self.pieces = origin, pieces
        self._record = self._properties = None  # here and not by a second call, which would cost as much as all this

    def settle(self) -> None:
        self.origin.progress.acknowledge(self.pieces[0])

    @property
    def is_settled(self) -> bool:
        return self.origin.progress.is_acknowledged(self.queue_offset)


def readable_properties(data: bytes) -> dict[str, str]:
    """The properties of a stored message. What is not UTF-8 must not stop its queue: it is read as well as can be."""
    try:
        return decode_properties(data)
    except IllegalMessage:
        return decode_properties(data.decode(errors="replace").encode())


class Turn(ABC):
    """What one caller may work on now: iterate once, settle each message, give it back with the next `take`."""

    __slots__ = ()

    @abstractmethod
    def __iter__(self) -> Iterator[Delivery]: ...


class QueueTurn(Turn):
    """A queue in the hands of one caller."""

    __slots__ = ("_backlog", "queue")

    def __init__(self, backlog: "Backlog", queue: OwnedQueue) -> None:
        self._backlog, self.queue = backlog, queue

    def __iter__(self) -> Iterator[Delivery]:
        """Messages, until none waits, the time is over or the backlog has ended."""
        backlog, end_ns = self._backlog, elapsed_ns() + TURN_NS
        while (pull := backlog.first_pull(self.queue)) is not None:
            for pieces in pull.rest:
                yield PulledDelivery(pull.origin, pieces)
                if backlog.has_ended or elapsed_ns() >= end_ns:
                    return


class OneTurn(Turn):
    """One message of no queue of ours: one that came back."""

    __slots__ = ("_delivery",)

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    def __iter__(self) -> Iterator[Delivery]:
        yield self._delivery


class HandOut(ABC):
    """Where callers take turns from, in threads of their own or on the loop; they sleep while there is nothing."""

    def __init__(self) -> None:
        self.has_ended = False
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        # How many threads sleep, and a token for each that is woken. A condition would do the same, but is written
        # in Python: an interrupt in the middle of it could leave the lock locked.
        self._sleeper_count = 0
        self._alarms: standard.SimpleQueue[None] = standard.SimpleQueue()

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether there is something to take."""

    @abstractmethod
    def _put_back(self, done: Turn) -> None:
        """Takes a finished turn back. Called under the lock."""

    @abstractmethod
    def _take_ready(self) -> Turn:
        """Returns a turn; there is one. Called under the lock."""

    def end(self, failure: BaseException | None = None) -> None:
        """Hands out nothing more; those who ask get None, or the failure."""
        with self._lock:
            self.has_ended = True
            self._failure = self._failure or failure
            while self._sleeper_count:
                self._wake_one()

    def take(self, done: Turn | None = None) -> Turn | None:
        """Takes a finished turn back; returns another, if one is ready. Raises the failure that ended it all."""
        with self._lock:
            return self._take(done)

    def take_within(self, seconds: float, done: Turn | None = None) -> Turn | None:
        """As `take`, in a thread that can wait. None may come earlier than that, and does when it has ended."""
        with self._lock:
            turn = self._take(done)
            if turn is not None or self.has_ended:
                return turn
            self._sleeper_count += 1
        try:
            self._alarms.get(timeout=seconds)
        except standard.Empty:
            with self._lock:
                try:
                    self._alarms.get_nowait()  # there is a token by now: the sleeper was counted as woken
                except standard.Empty:
                    self._sleeper_count -= 1
        return self.take()

    # -- under the lock

    def _take(self, done: Turn | None) -> Turn | None:
        if done is not None:
            self._put_back(done)
        if self._failure is not None:
            raise self._failure
        if self.has_ended or not self.is_ready:
            return None
        turn = self._take_ready()
        if self.is_ready:  # Who leaves others wakes the next sleeper, not one for each: he may be back before them.
            self._wake_one()
        return turn

    def _wake_one(self) -> None:
        if self._sleeper_count:
            self._sleeper_count -= 1
            self._alarms.put(None)


class Backlog(HandOut):
    """Hands out messages of all queues in turn, of one queue one at a time and in order.

    A queue is ready while it has a message and no caller has its turn. Every queue may keep its share of what may
    wait in all, so that none waits for another. When a rebalance adds queues, the shares of the others shrink; what
    they have beyond it is handed out before they pull again.
    """

    def __init__(
        self, prefetch: int, on_room: Callable[[OwnedQueue], None], on_all_returned: Callable[[], None] = lambda: None
    ) -> None:
        """`on_room` is called, by the thread that takes, when a queue that was full is to be pulled again, and
        `on_all_returned` when no message that came back is left.
        """
        super().__init__()
        self._prefetch, self._on_room, self._on_all_returned = prefetch, on_room, on_all_returned
        self._ready: deque[OwnedQueue] = deque()
        self._returned: deque[Delivery] = deque()  # messages that came back: they go first
        self.share_among(1)

    # -- what the loop calls

    def share_among(self, queue_count: int) -> None:
        """Shares what may wait out among this many queues."""
        self._count_max = max(1, self._prefetch // max(1, queue_count))
        self._bytes_max = BYTES_MAX // max(1, queue_count)

    def count_to_pull(self, queue: OwnedQueue, batch: int) -> int:
        with self._lock:
            return max(1, min(batch, self._count_max - queue.waiting_count))

    def put(self, pull: Pull, position: int) -> None:
        """What a pull brought, and where the next one begins."""
        queue = pull.origin.queue
        with self._lock:
            queue.progress.pulled(pull.queue_offsets, position)
            if not pull.count:
                return
            queue.waiting.append(pull)
            queue.pulled_count += pull.count
            queue.pulled_bytes += pull.size
            queue.is_full = queue.waiting_count >= self._count_max or queue.pulled_bytes > self._bytes_max
            if len(queue.waiting) == 1 and not queue.is_busy:
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

    @property
    def has_returned(self) -> bool:
        return bool(self._returned)

    def put_returned(self, deliveries: Sequence[Delivery]) -> None:
        with self._lock:
            self._returned.extend(deliveries)
            self._wake_one()

    def take_returned(self) -> list[Delivery]:
        """Takes out what came back and nobody has begun with."""
        with self._lock:
            found = list(self._returned)
            self._returned.clear()
            return found

    # -- what anybody calls

    @property
    def is_ready(self) -> bool:
        return bool(self._ready or self._returned)

    def first_pull(self, queue: OwnedQueue) -> Pull | None:
        """Returns the first pull of a queue of which something waits, to the caller that has its turn."""
        with self._lock:
            self._drop_empty(queue)
            return queue.waiting[0] if queue.waiting and not self.has_ended else None

    # -- under the lock

    def _put_back(self, done: Turn) -> None:
        if isinstance(done, OneTurn):
            return
        assert isinstance(done, QueueTurn), done
        queue = done.queue
        queue.is_busy = False
        self._drop_empty(queue)
        if queue.waiting:
            self._ready.append(queue)
        self._make_room(queue, queue.waiting_count)

    def _take_ready(self) -> Turn:
        if self._returned:
            delivery = self._returned.popleft()
            if not self._returned:
                self._on_all_returned()
            return OneTurn(delivery)
        queue = self._ready.popleft()
        queue.is_busy = True
        self._make_room(queue, queue.waiting_count - 1)  # the first one is as good as taken
        return QueueTurn(self, queue)

    def _drop_empty(self, queue: OwnedQueue) -> None:
        while queue.waiting and not queue.waiting[0].left_count:
            empty = queue.waiting.popleft()
            queue.pulled_count -= empty.count
            queue.pulled_bytes -= empty.size

    def _make_room(self, queue: OwnedQueue, count: int) -> None:
        """Pulls again when half of what may wait is gone: a pull for one message costs as much as one for many."""
        if queue.is_full and count <= self._count_max // 2 and queue.pulled_bytes <= self._bytes_max:
            queue.is_full = False
            self._on_room(queue)

    def _forget(self, queue: OwnedQueue) -> None:
        for pull in queue.waiting:
            pull.forget()
        queue.waiting.clear()
        queue.pulled_count = queue.pulled_bytes = 0
        if queue in self._ready:
            self._ready.remove(queue)

"""What the suite needs of a broker: clients of it, and power over its processes.

Workload, history and checker know these names only, so that the suite can be pointed at another system: write a Driver
for its clients and a Machine for its processes. verify.faults.remoting is the driver of Postdate, over RocketMQ's
remoting protocol; verify.faults.machine its machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class Sent(StrEnum):
    """What a send was answered. IN_DOUBT: the connection ended before the answer, so that either may be true."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    IN_DOUBT = "in doubt"


class Cancel(StrEnum):
    """What a cancel was answered."""

    CANCELLED = "cancelled"
    DELIVERED = "delivered"
    UNKNOWN = "unknown"
    REFUSED = "refused"  # nothing was done: a delete marker for an instant that has passed
    IN_DOUBT = "in doubt"


class Form(StrEnum):
    """The ways to ask for a delay. A driver maps those that its system has not to one that it has."""

    NONE = "none"
    LEVEL = "level"  # value: the number of a delay level
    SECONDS = "seconds"
    SPAN = "span"  # milliseconds
    INSTANT = "instant"  # epoch milliseconds, by the broker's clock


class Wish(NamedTuple):
    """A message that a producer wants sent. Keys are never used twice; the body follows from the key."""

    key: str
    form: Form
    value: int = 0
    span_ms: int = 0  # what the form means as a delay; 0 for an instant

    @property
    def body(self) -> bytes:
        return body_of(self.key)


def body_of(key: str) -> bytes:
    """Of a size that varies, and such that a byte which changed is noticed."""
    return (key + ":").encode() * (1 + len(key) % 5 * 3 + (sum(key.encode()) % 40))


class Answer(NamedTuple):
    outcome: Sent
    handle: str = ""  # what a cancel needs
    due_at_ms: int = 0  # where the broker told it


class Delivery(NamedTuple):
    """A message in a consumer's hands."""

    key: str
    body: bytes
    place: str  # of the entry, "topic/queue"; "" where the client does not tell
    offset: int
    visible_at_ms: int  # by the broker's clock; 0 where it is not told
    attempt: int  # from 0 on
    token: Any = None  # what the driver needs to acknowledge it


class Entry(NamedTuple):
    """A message in its queue, as it is read at the end."""

    place: str
    offset: int
    key: str
    body: bytes
    visible_at_ms: int


class Lost(Exception):
    """The connection ended, or no answer came in time."""


class Producer(Protocol):
    """One connection. After IN_DOUBT it is of no use any more."""

    def send(self, wishes: Sequence[Wish]) -> list[Answer]:
        """All at once, each sent once only."""

    def send_batch(self, wishes: Sequence[Wish]) -> list[Answer]:
        """As one: all are stored or none."""

    def cancel(self, wish: Wish, answer: Answer, way: int) -> Cancel:
        """By one of the ways there are; `way` is any number."""

    def drop(self) -> None:
        """Cuts the connection, from any thread."""

    def close(self) -> None: ...


class Consumer(Protocol):
    """A member of a group."""

    def receive(self) -> list[Delivery]:
        """Waits a moment for messages. Raises Lost."""

    def done(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledges; True where the broker said that it is so. Raises Lost."""

    def again(self, delivery: Delivery) -> bool:
        """Asks for it once more, a second later. Raises Lost."""

    def drop(self) -> None: ...

    def close(self) -> None: ...


class Driver(Protocol):
    """A broker as clients see it."""

    consumer_kinds: Sequence[str]
    levels_ms: Mapping[int, int]  # delay levels that the workload may use, and their delays

    def prepare(self) -> None:
        """Makes what the workload needs: a topic with several queues."""

    def producer(self) -> Producer:
        """Raises Lost."""

    def consumer(self, kind: str) -> Consumer:
        """Of the group that has the kind's name. Raises Lost."""

    def entries(self, places: dict[str, int]) -> Iterator[Entry]:
        """All that is visible from these offsets on, which are moved. Raises Lost."""

    def returned(self) -> Iterator[tuple[str, str]]:
        """(group, key) of every message that was sent back, once for each time. Raises Lost."""

    def cancel_where(self, prefix: str) -> int:
        """Cancels all that waits and whose key begins so; returns how many. Raises Lost, NotImplementedError."""

    def bring(self, wishes: Sequence[Wish]) -> bool:
        """Imports messages with instants from a file; whether that was confirmed. Raises NotImplementedError."""

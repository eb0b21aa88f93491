"""What the suite needs of a broker: its clients, and control over its processes.

Workload, history and checker know only these names, so that the suite can test another system: write a Driver for its
clients and a Machine for its processes. verify.faults.remoting is the driver of Postdate, over RocketMQ's
remoting protocol; verify.faults.machine its machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class Sent(StrEnum):
    """The answer to a send. IN_DOUBT: the connection ended before the answer, so it may be stored or not."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    IN_DOUBT = "in doubt"


class Cancel(StrEnum):
    """The answer to a cancel."""

    CANCELLED = "cancelled"
    DELIVERED = "delivered"
    UNKNOWN = "unknown"
    REFUSED = "refused"  # nothing was done: a delete marker for an instant that has passed
    IN_DOUBT = "in doubt"


class Moved(StrEnum):
    """The answer to a move, which gives a message that waits another due time."""

    MOVED = "moved"
    DELIVERED = "delivered"
    UNKNOWN = "unknown"
    REFUSED = "refused"  # nothing was done: the table cannot be asked, or the broker is busy
    IN_DOUBT = "in doubt"


class Form(StrEnum):
    """The ways to ask for a delay. A driver replaces a form that its system does not have by another one."""

    NONE = "none"
    LEVEL = "level"  # value: the number of a delay level
    SECONDS = "seconds"
    SPAN = "span"  # milliseconds
    INSTANT = "instant"  # epoch milliseconds, by the broker's clock


class Wish(NamedTuple):
    """A message that a producer wants to send. A key is used once; the body is derived from it."""

    key: str
    form: Form
    value: int = 0
    span_ms: int = 0  # what the form means as a delay; 0 for an instant

    @property
    def body(self) -> bytes:
        return body_of(self.key)


def body_of(key: str) -> bytes:
    """The body of a key. Its size varies, and a changed byte is noticed."""
    return (key + ":").encode() * (1 + len(key) % 5 * 3 + (sum(key.encode()) % 40))


class Answer(NamedTuple):
    outcome: Sent
    handle: str = ""  # what a cancel needs
    due_at_ms: int = 0  # 0 if the broker does not say


class Move(NamedTuple):
    outcome: Moved
    due_at_ms: int = 0  # the new due time; 0 if it was not moved
    was_due_at_ms: int = 0


class Delivery(NamedTuple):
    """A message in a consumer's hands."""

    key: str
    body: bytes
    place: str  # of the entry, "topic/queue"; "" if the client does not say
    offset: int
    visible_at_ms: int  # by the broker's clock; 0 if unknown
    attempt: int  # from 0 on
    token: Any = None  # what the driver needs to acknowledge it


class Entry(NamedTuple):
    """A message in its queue, as the suite reads it at the end."""

    place: str
    offset: int
    key: str
    body: bytes
    visible_at_ms: int


class Lost(Exception):
    """The connection ended, or no answer came in time."""


class Hung(Exception):
    """A client does not end: it waits for the broker, and nothing moves there."""


class Producer(Protocol):
    """One connection. After IN_DOUBT it cannot be used any more."""

    def send(self, wishes: Sequence[Wish]) -> list[Answer]:
        """Sends all at once, each message once only."""

    def send_batch(self, wishes: Sequence[Wish]) -> list[Answer]:
        """Sends them as one batch: all are stored or none."""

    def send_once(self, wish: Wish, attempt: int) -> Answer:
        """Sends a message that the broker is to store once, however often it is sent: each attempt is a message of its
        own to the client, with the same id for the broker.
        """

    def cancel(self, wish: Wish, answer: Answer, way: int) -> Cancel:
        """Cancels in one of the ways that the system has; `way` is any number."""

    def cancel_moved(self, wish: Wish, answer: Answer, way: int) -> Cancel:
        """Cancels a message that may have been moved, in one of the ways that find it then: by the handle of its send,
        and by its key alone. The answer to a send has no handle where the message was imported.
        """

    def move(self, wish: Wish, answer: Answer, due_at_ms: int, way: int) -> Move:
        """Gives a message another due time; 0 delivers it now. `answer` is that to its send, and `way` any number: by
        the handle, or by its key.
        """

    def drop(self) -> None:
        """Cuts the connection, from any thread."""

    def close(self) -> None: ...


class Consumer(Protocol):
    """A member of a group."""

    def receive(self) -> list[Delivery]:
        """Waits a moment for messages. Raises Lost."""

    def acknowledge(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Acknowledges; True for each that the broker confirmed. Raises Lost."""

    def send_back(self, delivery: Delivery) -> bool:
        """Asks for it again a second later; True if the broker confirmed. Raises Lost."""

    def drop(self) -> None: ...

    def close(self) -> None: ...


class Driver(Protocol):
    """A broker as clients see it."""

    consumer_kinds: Sequence[str]
    levels_ms: Mapping[int, int]  # delay levels that the workload may use, and their delays

    def prepare(self) -> None:
        """Creates what the workload needs: a topic with several queues."""

    def producer(self) -> Producer:
        """Raises Lost."""

    def consumer(self, kind: str) -> Consumer:
        """A member of the group that has the kind's name. Raises Lost."""

    def entries(self, places: dict[str, int]) -> Iterator[Entry]:
        """Everything visible from these offsets on; moves the offsets. Raises Lost."""

    def returned_messages(self) -> Iterator[tuple[str, str]]:
        """(group, key) of every message that was sent back, once for each time it was. Raises Lost."""

    def cancel_where(self, prefix: str) -> int:
        """Cancels all waiting messages with this prefix of keys; returns how many. Raises Lost, NotImplementedError."""

    def postpone_where(self, prefix: str, by_ms: int) -> int:
        """Postpones all waiting messages with this prefix of keys; returns how many. Raises as `cancel_where` does."""

    def run_long_job(self, name: str, withdraw_after_s: float | None) -> None:
        """Runs a job that takes minutes and changes nothing; withdraws it after a while, or waits for its end. Raises
        Lost, NotImplementedError.
        """

    def import_messages(self, wishes: Sequence[Wish]) -> bool:
        """Imports messages with instants from a file; True if that was confirmed. Raises NotImplementedError."""

    def progress(self) -> str:
        """What jobs and imports wait for, for people. While it changes, clients that wait for them may go on waiting.
        Raises Lost.
        """

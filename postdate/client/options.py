"""The options of a consumer, checked."""

from collections.abc import Sequence
from inspect import iscoroutinefunction
from typing import Literal, NamedTuple

from postdate.errors import UsageError
from postdate.message import RETRY_TOPIC_PREFIX, check_group, check_topic
from postdate.spans import Delay, delay_ms
from postdate.wire.bodies import SUBSCRIPTION_ALL, Subscription, parse_subscription

From = Literal["first", "last"]

BATCH_DEFAULT = 1_024  # as many as our broker gives, by default, or 256 KB; RocketMQ's gives 32
PREFETCH_DEFAULT = 16_000


def is_coroutine_function(handler: object) -> bool:
    """Whether calling it makes a coroutine, as far as one can tell before: a function, a partial one, an object."""
    return iscoroutinefunction(handler) or iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


class Wanted(NamedTuple):
    """The options of a consumer, by the names of its call."""

    topic: str
    group: str
    tag: str = "*"
    from_: From = "first"
    batch: int = BATCH_DEFAULT
    prefetch: int = PREFETCH_DEFAULT
    attempts_max: int | None = None  # None leaves it to the group's settings at the broker
    idle_ms: int | None = None  # how long to wait for a message; None for ever
    retry_ms: tuple[int, ...] = ()  # delays after the first attempt, the second, ...; without, the group's
    workers: int = 1
    is_shared_by_message: bool = False  # else the members share queues

    def check(self) -> None:
        """Raises UsageError or IllegalMessage, naming what is wrong."""
        check_topic(self.topic)
        check_group(self.group)
        if self.from_ not in ("first", "last"):
            raise UsageError(f"from_ is {self.from_!r}, expected 'first' or 'last'")
        numbers = {
            "batch": self.batch, "prefetch": self.prefetch, "attempts": self.attempts_max,
            "idle, in milliseconds,": self.idle_ms,
        }  # fmt: skip
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise UsageError(f"{name} is {number}, expected 1 or more")

    @property
    def idle_seconds(self) -> float | None:
        return None if self.idle_ms is None else self.idle_ms / 1_000

    @property
    def reconsume_times_max(self) -> int | None:
        return None if self.attempts_max is None else self.attempts_max - 1

    @property
    def retry_topic(self) -> str:
        """The topic of messages that the group has sent back."""
        return RETRY_TOPIC_PREFIX + self.group

    def subscriptions(self) -> dict[str, Subscription]:
        """Subscriptions by topic. The group takes back all that it has sent back, without a filter."""
        return {
            self.topic: parse_subscription(self.topic, self.tag),
            self.retry_topic: parse_subscription(self.retry_topic, SUBSCRIPTION_ALL),
        }


def wanted_by_listener(
    topic: str, group: str, tag: str, workers: int, ordered: bool, retry: Sequence[Delay] | None, attempts: int | None
) -> Wanted:
    """The options of a call of `listen`. Raises UsageError or IllegalMessage, naming what is wrong."""
    if retry is not None and (isinstance(retry, str) or not retry):
        raise UsageError(f"retry is {retry!r}, expected a list of delays, such as ['1s', '10s', '1m']")
    wanted = Wanted(
        topic, group, tag, attempts_max=attempts, retry_ms=tuple(map(delay_ms, retry or ())), workers=workers,
        is_shared_by_message=not ordered,
    )  # fmt: skip
    wanted.check()
    return wanted

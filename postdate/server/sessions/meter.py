"""How many messages came and went: by topic and by group, in the last minute, hour and day.

Nothing is counted for each message. A pull adds the number of its records once. What a topic got is the growth of its
queues, measured from time to time, and only for those that grew. Counts start at 0 with the process.
"""

from collections import deque
from collections.abc import Collection, Hashable
from enum import Enum
from typing import NamedTuple

from postdate.broker.broker import Broker

TICK_MS = 10_000
_SECOND_NS = 1_000_000_000
# A pair of topic and group costs some 100 bytes in each of 38 buckets; pairs beyond this have no rates.
_KEYS_MAX = 100_000

Counts = dict[Hashable, int]


class Span(Enum):
    """The time that a rate covers: a number of buckets, and their seconds."""

    MINUTE = (6, 10)
    HOUR = (6, 600)
    DAY = (24, 3_600)


class Rate(NamedTuple):
    sum: int
    per_second: float


class _Window:
    """The buckets of one span, the newest last, and one more than it has: the newest is still being filled."""

    def __init__(self, span: Span, now_ns: int) -> None:
        count, seconds = span.value
        self._bucket_ns = seconds * _SECOND_NS
        self._buckets: deque[tuple[int, Counts]] = deque([(now_ns, {})], count + 1)  # with its start

    def add(self, counts: Counts, now_ns: int) -> None:
        began_ns, bucket = self._buckets[-1]
        if now_ns - began_ns >= self._bucket_ns:
            bucket = {}
            self._buckets.append((now_ns, bucket))
        for key, count in counts.items():
            if key in bucket or len(bucket) < _KEYS_MAX:
                bucket[key] = bucket.get(key, 0) + count

    def rate(self, key: Hashable, now_ns: int) -> Rate:
        total = sum(bucket.get(key, 0) for _, bucket in self._buckets)
        return Rate(total, total / max(1.0, (now_ns - self._buckets[0][0]) / _SECOND_NS))


class Came(NamedTuple):
    """The key of what became visible in a topic."""

    topic: str


class Went(NamedTuple):
    """The key of what a group pulled of a topic."""

    topic: str
    group: str


class Whole(Enum):
    """The keys of what is counted for the broker as a whole."""

    ACCEPTED = "accepted"  # messages that producers and consumers sent
    TIMED = "timed"  # of those, the ones that had to wait
    FIRED = "fired"  # messages that became visible after they had waited
    PULLED = "pulled"


class Meter:
    """Counts for one broker. Requests call `pulled` and `grew`; the rest runs from time to time."""

    def __init__(self, broker: Broker, now_ns: int) -> None:
        self._broker = broker
        self._windows = {span: _Window(span, now_ns) for span in Span}
        self._fresh: Counts = {}  # not in the windows yet
        self._grown: set[int] = set()  # numbers of queues that grew since the last tick
        self._lengths = broker.view.queue_lengths()  # as last seen; by number
        self._sent = (broker.accepted_count, broker.timed_count)  # as last seen
        self.pulled_total = 0

    def pulled(self, topic: str, group: str, count: int) -> None:
        key = Went(topic, group)
        fresh = self._fresh
        if key in fresh or len(fresh) < _KEYS_MAX:
            fresh[key] = fresh.get(key, 0) + count
        self.pulled_total += count

    def grew(self, numbers: Collection[int]) -> None:
        self._grown.update(numbers)

    def tick(self, now_ns: int) -> None:
        """Brings the windows up to date."""
        accepted, timed = self._broker.accepted_count, self._broker.timed_count
        counts = self._fresh
        counts[Whole.PULLED] = sum(count for key, count in counts.items() if isinstance(key, Went))
        self._fresh = {}
        visible, (grown, self._grown) = 0, (self._grown, set())
        view, lengths = self._broker.view, self._lengths
        lengths += [0] * (view.queue_count - len(lengths))
        for number in grown:
            topic, length = view.topic_of_queue(number), view.queue_length(number)
            growth, lengths[number] = length - lengths[number], length
            counts[Came(topic)] = counts.get(Came(topic), 0) + growth
            visible += growth
        counts[Whole.ACCEPTED], counts[Whole.TIMED] = accepted - self._sent[0], timed - self._sent[1]
        # A message without a delay is visible one flush after it was accepted, so a single count may be off by that;
        # the sum is not.
        counts[Whole.FIRED] = visible - (counts[Whole.ACCEPTED] - counts[Whole.TIMED])
        self._sent = (accepted, timed)
        for window in self._windows.values():
            window.add(counts, now_ns)

    def rate(self, key: Hashable, span: Span, now_ns: int) -> Rate:
        """Returns the count of a key and its rate per second, as of the last tick."""
        return self._windows[span].rate(key, now_ns)

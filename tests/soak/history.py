"""What clients were told, and whether the broker has kept its word.

A send, a cancel or a send-back is *in doubt* when its connection ended before the answer: either may be true. What was
answered binds. The verdict compares that with every entry of every queue, read at the end, and with what consumers saw
on the way.
"""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

ACKNOWLEDGED, REFUSED, IN_DOUBT = "acknowledged", "refused", "in doubt"
CANCELLED, DELIVERED, UNKNOWN = "cancelled", "delivered", "unknown"


@dataclass
class Told:
    """What is known of one message. Instants are those of the one clock that clients and broker share here."""

    due_at_ms: int  # it may not be visible before
    sent: str = IN_DOUBT
    cancel: str = ""  # what a cancel was answered; IN_DOUBT; "" where nobody has asked
    cancelled_at_ms: int = 0


class Entry(NamedTuple):
    """A message in its queue."""

    topic: str
    queue_id: int
    offset: int
    key: str
    visible_at_ms: int


class Seen(NamedTuple):
    """A message in the hands of a consumer."""

    group: str
    key: str
    at_ms: int


@dataclass
class History:
    """Filled by many threads while the broker is killed under them."""

    told: dict[str, Told] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    backs: Counter[tuple[str, str]] = field(default_factory=Counter)  # acknowledged send-backs by (group, key)
    done: set[tuple[str, str]] = field(default_factory=set)  # (group, key) whose acknowledgement was answered
    done_again: list[str] = field(default_factory=list)
    doubtful_backs: Counter[tuple[str, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sending(self, key: str, due_at_ms: int) -> None:
        with self.lock:
            assert key not in self.told, f"{key} is sent twice"
            self.told[key] = Told(due_at_ms)

    def answered(self, keys: Iterable[str], sent: str) -> None:
        with self.lock:
            for key in keys:
                self.told[key].sent = sent

    def cancelled(self, key: str, outcome: str, at_ms: int = 0) -> None:
        with self.lock:
            self.told[key].cancel, self.told[key].cancelled_at_ms = outcome, at_ms

    def saw(self, group: str, key: str, at_ms: int) -> None:
        with self.lock:
            self.seen.append(Seen(group, key, at_ms))
            if (group, key) in self.done:
                self.done_again.append(f"again: group {group} was given {key}, which it had acknowledged")

    def acknowledged(self, group: str, key: str) -> None:
        with self.lock:
            self.done.add((group, key))

    def sending_back(self, group: str, key: str) -> None:
        with self.lock:
            self.doubtful_backs[group, key] += 1

    def sent_back(self, group: str, key: str) -> None:
        with self.lock:
            self.doubtful_backs[group, key] -= 1
            self.backs[group, key] += 1

    @property
    def acknowledged_count(self) -> int:
        with self.lock:
            return sum(told.sent == ACKNOWLEDGED for told in self.told.values())

    def must_come(self) -> set[str]:
        """What was acknowledged, and no cancel may have stopped."""
        stopped = (CANCELLED, IN_DOUBT)
        return {key for key, told in self.told.items() if told.sent == ACKNOWLEDGED and told.cancel not in stopped}


def verdict(history: History, entries: Iterable[Entry], reading_groups: Iterable[str] = ()) -> list[str]:
    """Everything that is not as clients were told. `reading_groups` are those that have read to the end."""
    entries = list(entries)
    faults = [
        *_places(entries),
        *_contents(history, entries),
        *_sights(history),
        *_cancels(history),
        *history.done_again,
    ]
    for group in reading_groups:
        seen = {each.key for each in history.seen if each.group == group}
        faults += [f"lost: {key} was acknowledged and group {group} never saw it" for key in history.must_come() - seen]
    return sorted(faults)


def _places(entries: list[Entry]) -> Iterable[str]:
    """Offsets of a queue have no gap and no two entries."""
    offsets: dict[tuple[str, int], list[int]] = {}
    for entry in entries:
        offsets.setdefault((entry.topic, entry.queue_id), []).append(entry.offset)
    for (topic, queue_id), found in offsets.items():
        if sorted(found) != list(range(len(found))):
            yield f"gap: queue {queue_id} of {topic} has {len(found)} entries and offsets up to {max(found)}"


def _contents(history: History, entries: list[Entry]) -> Iterable[str]:
    """Every message that must be there is there once, and none else, and none before its time."""
    counts = Counter(entry.key for entry in entries)
    for key in history.must_come() - counts.keys():
        yield f"lost: {key} was acknowledged and is in no queue"
    for key, count in counts.items():
        told = history.told.get(key)
        if count > 1:
            yield f"doubled: {key} is {count} times in its queue"
        if told is None:
            yield f"foreign: {key} is in a queue and was never sent"
        elif told.sent == REFUSED:
            yield f"refused: {key} is in a queue although its send was refused"
        elif told.cancel == CANCELLED:
            yield f"cancelled: {key} is in a queue although its cancel was answered with cancelled"
    for entry in entries:
        told = history.told.get(entry.key)
        if told is not None and entry.visible_at_ms < told.due_at_ms:
            yield f"early: {entry.key} was visible {told.due_at_ms - entry.visible_at_ms} ms before its time"


def _sights(history: History) -> Iterable[str]:
    """What consumers saw, they were allowed to see. That they saw it twice is no fault."""
    for group, key, at_ms in history.seen:
        told = history.told.get(key)
        if told is None:
            yield f"foreign: group {group} saw {key}, which was never sent"
        elif told.cancel == CANCELLED:
            yield f"cancelled: group {group} saw {key}, whose cancel was answered with cancelled"
        elif at_ms < told.due_at_ms:
            yield f"early: group {group} saw {key} {told.due_at_ms - at_ms} ms before its time"


def _cancels(history: History) -> Iterable[str]:
    """A cancel of a message that waits finds it."""
    for key, told in history.told.items():
        is_waiting = told.sent == ACKNOWLEDGED and 0 < told.cancelled_at_ms < told.due_at_ms
        if is_waiting and told.cancel in (DELIVERED, UNKNOWN):
            yield f"untrue: {key} was to wait and its cancel was answered with {told.cancel}"


def retried(history: History, group: str, keys: Iterable[str]) -> list[str]:
    """The entries of a group's retry topic against the send-backs that were acknowledged."""
    counts, faults = Counter(keys), []
    for key in counts.keys() | {key for name, key in history.backs if name == group}:
        low = history.backs[group, key]
        high = low + history.doubtful_backs[group, key]
        if not low <= counts[key] <= high:
            faults.append(f"retry: {key} of group {group} came back {counts[key]} times, expected {low} to {high}")
    return sorted(faults)

"""What each client was told, kept outside the broker: one event a line, in the order in which they were noted.

Instants (`at`) are milliseconds of this machine's clock, which stands still for nobody. The broker's clock is that plus
an offset, which the suite changes and notes. The checker reads a history and nothing else: it can be judged again.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verify.faults.driver import Answer, Cancel, Delivery, Entry, Wish, body_of

Event = dict[str, Any]


def now_ms() -> float:
    return time.time_ns() / 1e6


class History:
    """Filled by many threads while the broker is killed under them."""

    def __init__(self, path: Path | None = None) -> None:
        self.events: list[Event] = []
        self._file = path.open("w", encoding="utf-8") if path else None
        self._lock = threading.Lock()
        self.offset_ms = 0

    def note(self, kind: str, **fields: Any) -> Event:
        event = {"at": now_ms(), "kind": kind, **fields}
        with self._lock:
            self.events.append(event)
            if self._file:
                self._file.write(json.dumps(event) + "\n")
        return event

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def broker_ms(self) -> int:
        """The broker's clock, as far as it is known here."""
        return int(now_ms()) + self.offset_ms

    # -- clients ------------------------------------------------------------------------------------------------------

    def sending(self, wishes: Sequence[Wish], client: str, topic: str = "") -> None:
        for wish in wishes:
            self.note(
                "send", key=wish.key, client=client, form=wish.form, value=wish.value, span=wish.span_ms, group=topic
            )

    def sent(self, wishes: Sequence[Wish], answers: Sequence[Answer]) -> None:
        for wish, answer in zip(wishes, answers, strict=True):
            self.note("sent", key=wish.key, outcome=answer.outcome, due=answer.due_at_ms)

    def cancelling(self, key: str, client: str) -> float:
        return float(self.note("cancel", key=key, client=client)["at"])

    def cancelled(self, key: str, began: float, outcome: Cancel) -> None:
        self.note("cancelled", key=key, began=began, outcome=outcome)

    def saw(self, group: str, deliveries: Sequence[Delivery], asked_at: float) -> None:
        for each in deliveries:
            self.note(
                "saw", key=each.key, group=group, place=each.place, offset=each.offset, visible=each.visible_at_ms,
                attempt=each.attempt, whole=each.body == body_of(each.key), asked=asked_at,
            )  # fmt: skip

    def found(self, entries: Sequence[Entry]) -> None:
        """Read from a queue."""
        for each in entries:
            self.note(
                "entry", key=each.key, place=each.place, offset=each.offset, visible=each.visible_at_ms,
                whole=each.body == body_of(each.key),
            )  # fmt: skip

    # -- the world ----------------------------------------------------------------------------------------------------

    def clock(self, offset_ms: int) -> None:
        """The broker's clock is this far from ours from now on. Called before a step ahead, and after a step back, so
        that the highest that the clock may have been is known.
        """
        self.offset_ms = offset_ms
        self.note("clock", offset=offset_ms)

    def find(self, invariant: str, sentence: str) -> None:
        """Something that was seen to be wrong on the way."""
        self.note("finding", invariant=invariant, sentence=sentence)

    @contextmanager
    def trouble(self, name: str) -> Iterator[Event]:
        """A fault from beginning to end: what falls into it is excused from being on time."""
        event = self.note("trouble", name=name)
        try:
            yield event
        finally:
            self.note("over", name=name, began=event["at"])


def load(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

"""Records what each client was told, outside the broker: one event a line, in the order in which they happened.

Instants (`at`) are milliseconds of this machine's clock. The broker's clock is that plus an offset, which the suite
changes and records. The checker reads nothing but the history, so a history can be judged again.
"""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verify.faults.driver import Answer, Cancel, Delivery, Entry, Move, Wish, body_of

Event = dict[str, Any]


def now_ms() -> float:
    return time.time_ns() / 1e6


class History:
    """Takes events from many threads, and writes them to a file if there is one."""

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
        """The time that the broker's clock shows, by the offset that was recorded last."""
        return int(now_ms()) + self.offset_ms

    # -- clients ------------------------------------------------------------------------------------------------------

    def note_sending(self, wishes: Sequence[Wish], client: str, topic: str = "") -> None:
        for wish in wishes:
            self.note(
                "send", key=wish.key, client=client, form=wish.form, value=wish.value, span=wish.span_ms, group=topic
            )

    def note_sent(self, wishes: Sequence[Wish], answers: Sequence[Answer]) -> None:
        for wish, answer in zip(wishes, answers, strict=True):
            self.note("sent", key=wish.key, outcome=answer.outcome, due=answer.due_at_ms)

    def note_once(self, wish: Wish, answer: Answer, is_first: bool) -> None:
        """One of several sends of an id was answered with a receipt; `is_first`: no other one was before."""
        if is_first:
            self.note_sent([wish], [answer])
        self.note("receipt", key=wish.key, handle=answer.handle, due=answer.due_at_ms)

    def note_cancelling(self, key: str, client: str) -> float:
        return float(self.note("cancel", key=key, client=client)["at"])

    def note_cancelled(self, key: str, began: float, outcome: Cancel) -> None:
        self.note("cancelled", key=key, began=began, outcome=outcome)

    def note_moving(self, key: str, due_at_ms: int, client: str) -> float:
        """A client asks for another due time of a message; 0 is now."""
        return float(self.note("move", key=key, to=due_at_ms, client=client)["at"])

    def note_moved(self, key: str, began: float, due_at_ms: int, move: Move) -> None:
        """`due_at_ms` was asked for; `move` is the answer."""
        self.note(
            "moved", key=key, began=began, to=due_at_ms, outcome=move.outcome, due=move.due_at_ms,
            was=move.was_due_at_ms,
        )  # fmt: skip

    def note_deliveries(self, group: str, deliveries: Sequence[Delivery], asked_at: float) -> None:
        for each in deliveries:
            self.note(
                "saw", key=each.key, group=group, place=each.place, offset=each.offset, visible=each.visible_at_ms,
                attempt=each.attempt, whole=each.body == body_of(each.key), asked=asked_at,
            )  # fmt: skip

    def note_entries(self, entries: Sequence[Entry]) -> None:
        """Entries were read from a queue."""
        for each in entries:
            self.note(
                "entry", key=each.key, place=each.place, offset=each.offset, visible=each.visible_at_ms,
                whole=each.body == body_of(each.key),
            )  # fmt: skip

    def note_postponing(self, prefix: str, by_ms: int) -> None:
        """A job is asked to postpone the messages with this prefix of keys: each may be due then or later."""
        self.note("postpone", prefix=prefix, by=by_ms)

    def note_postponed(self, prefix: str, by_ms: int, changed: int) -> None:
        """A job has postponed this many of them."""
        self.note("postponed", prefix=prefix, by=by_ms, changed=changed)

    # -- the world ----------------------------------------------------------------------------------------------------

    def note_clock(self, offset_ms: int) -> None:
        """The broker's clock is this far from ours from now on. Call it before a step ahead and after a step back: the
        history must know the highest time that the clock may have shown.
        """
        self.offset_ms = offset_ms
        self.note("clock", offset=offset_ms)

    def note_finding(self, invariant: str, sentence: str) -> None:
        """The run itself has noticed a mistake."""
        self.note("finding", invariant=invariant, sentence=sentence)

    @contextmanager
    def trouble(self, name: str, is_excuse: bool = True) -> Iterator[Event]:
        """A fault from beginning to end: messages that are due meanwhile may be late, if it is an excuse for that."""
        event = self.note("trouble", name=name, is_excuse=is_excuse)
        try:
            yield event
        finally:
            self.note("over", name=name, began=event["at"])


def load(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

"""What the command shows while it runs: which system, round and work, since when, and how long it may still take."""

import time
from collections.abc import Callable, Sequence
from typing import TextIO

CLEAR = "\r\x1b[K"


class Progress:
    """One line that changes, on a terminal; elsewhere a line for each step."""

    def __init__(self, output: TextIO, slugs: Sequence[str], rounds: int, clock: Callable[[], float] = time.monotonic):
        self._output, self._slugs, self._rounds, self._clock = output, slugs, rounds, clock
        self._began = self._turn_began = self._step_began = clock()
        self._turn = 0
        self._slug, self._title = "", ""
        self._took_s: dict[str, float] = {}

    def begin(self, slug: str) -> None:
        self._turn += 1
        self._slug = slug
        self._turn_began = self._clock()
        self.step("starts")

    def step(self, title: str) -> None:
        self._title, self._step_began = title, self._clock()
        if not self._output.isatty():
            self._print(f"{self.line()}\n")

    def tick(self) -> None:
        if self._output.isatty():
            self._print(f"{CLEAR}{self.line()}")

    def end(self, outcome: str) -> None:
        self._took_s[self._slug] = self._clock() - self._turn_began
        start = CLEAR if self._output.isatty() else ""
        self._print(f"{start}{self._place()} {outcome}  [{_span(self._took_s[self._slug])}]\n")

    def line(self) -> str:
        step_s = self._clock() - self._step_began
        passed = f"{_span(self._clock() - self._began)} in all"
        left_s = self.left_s()
        left = "" if left_s is None else f", about {_span(left_s)} left"
        return f"{self._place()} {self._title}  [{_span(step_s)}; {passed}{left}]"

    def left_s(self) -> float | None:
        """By what each system took in an earlier round, or by what others took; None as long as nobody knows."""
        if not self._took_s:
            return None
        mean_s = sum(self._took_s.values()) / len(self._took_s)
        every = [self._took_s.get(slug, mean_s) for _ in range(self._rounds) for slug in self._slugs]
        this_s = max(every[self._turn - 1] - (self._clock() - self._turn_began), 0)
        return this_s + sum(every[self._turn :])

    def _place(self) -> str:
        count = len(self._slugs)
        number, place = divmod(self._turn - 1, count)
        return f"round {number + 1} of {self._rounds}, {place + 1} of {count}, {self._slug}:"

    def _print(self, text: str) -> None:
        self._output.write(text)
        self._output.flush()


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"

"""Every figure that is measured, and the values that all systems had in all rounds."""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LESS, MORE = "less", "more"


class Figure(NamedTuple):
    key: str
    step: str  # in which it is measured; the name of works.py
    work: str
    title: str
    unit: str = ""
    better: str = ""  # LESS or MORE; without, it is only shown


FIGURES = (
    Figure("a_p50", "spread", "a", "late, p50", "ms", LESS),
    Figure("a_p99", "spread", "a", "late, p99", "ms", LESS),
    Figure("a_max", "spread", "a", "late, worst", "ms", LESS),
    Figure("a_early", "spread", "a", "early", "", LESS),
    Figure("a_inversions", "spread", "a", "out of order", "", LESS),
    Figure("a_missing", "spread", "a", "missing", "", LESS),
    Figure("b_first", "burst", "b", "{burst_count:,}: first received", "s", LESS),
    Figure("b_last", "burst", "b", "{burst_count:,}: last received", "s", LESS),
    Figure("b_visible", "million", "b", "{million:,}: all visible", "s", LESS),
    Figure("b_million_last", "million", "b", "{million:,}: last received", "s", LESS),
    Figure("c_durable", "load", "c", "durable", "msg/s", MORE),
    Figure("c_volatile", "volatile", "c", "not durable", "msg/s", MORE),
    Figure("d_count", "load", "d", "waiting"),
    Figure("d_total", "load", "d", "RAM of the server with them", "MB", LESS),
    Figure("d_ram", "load", "d", "RAM per message, due in an hour", "B", LESS),
    Figure("d_mapped", "load", "d", "with mapped files", "B", LESS),
    Figure("d_disk", "load", "d", "disk per message", "B", LESS),
    Figure("d_near_ram", "million", "d", "RAM per message, due within a minute", "B", LESS),
    Figure("e_send", "restart", "e", "first send acknowledged", "s", LESS),
    Figure("e_delivery", "restart", "e", "first due message received", "s", LESS),
    Figure("f_rate", "cancel", "f", "cancels", "/s", MORE),
    Figure("f_refused", "cancel", "f", "waiting, not cancelled", "", LESS),
    Figure("f_leaked", "cancel", "f", "cancelled, yet received", "", LESS),
    Figure("f_delivered", "cancel", "f", 'delivered, yet "cancelled"', "", LESS),
    Figure("f_strangers", "cancel", "f", 'never sent, yet "cancelled"', "", LESS),
    Figure("g_burst_server", "burst", "g", "burst: server", "us", LESS),
    Figure("g_burst_client", "burst", "g", "burst: client", "us", LESS),
    Figure("g_spread_server", "spread", "g", "spread: server", "us", LESS),
    Figure("g_spread_client", "spread", "g", "spread: client", "us", LESS),
)
BY_KEY = {figure.key: figure for figure in FIGURES}


@dataclass
class Measured:
    """What is known of one system."""

    name: str
    settings: str = ""
    durable: str = ""
    volatile: str = ""
    works: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)  # by key of the figure, one for each round
    notes: dict[str, list[str]] = field(default_factory=dict)  # by step: why it has no figure, or not of all
    not_run: str = ""  # why nothing of it was measured

    @property
    def round_count(self) -> int:
        """Of those in which something of it was measured."""
        return max(map(len, self.values.values()), default=0)

    def median(self, key: str) -> float | None:
        values = self.values.get(key)
        return statistics.median(values) if values else None

    def add(self, key: str, value: float) -> None:
        self.values.setdefault(key, []).append(value)

    def note(self, step: str, sentence: str) -> None:
        """One that differs from an earlier round's by its numbers alone takes its place."""
        kept = [known for known in self.notes.get(step, ()) if _without_numbers(known) != _without_numbers(sentence)]
        self.notes[step] = [*kept, sentence]


@dataclass
class Results:
    about: dict[str, Any]
    systems: dict[str, Measured] = field(default_factory=dict)  # by slug, in the order of the report

    def ran(self) -> dict[str, Measured]:
        return {slug: measured for slug, measured in self.systems.items() if not measured.not_run}

    def as_json(self) -> dict[str, Any]:
        return {"about": self.about, "systems": {slug: vars(each) for slug, each in self.systems.items()}}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Results":
        return cls(content["about"], {slug: Measured(**each) for slug, each in content["systems"].items()})


def _without_numbers(sentence: str) -> str:
    return re.sub(r"[\d,.]+", "", sentence)


def of_work(work: str, measured: Iterable[Measured]) -> Sequence[Figure]:
    """The figures of a work that anybody has."""
    every = list(measured)
    return [figure for figure in FIGURES if figure.work == work and any(each.values.get(figure.key) for each in every)]


def is_better(figure: Figure, one: float, other: float) -> bool:
    return one < other if figure.better == LESS else one > other

"""What was measured of both systems, what is to be reached, and the table of it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.report import shown

COLUMNS = ("measure", "Postdate", "RocketMQ", "ratio", "to reach", "met")


@dataclass(frozen=True)
class Goal:
    """A bound for Postdate's figure: a number, or so many times RocketMQ's."""

    bound: float
    at_most: bool = False
    is_ratio: bool = True

    def is_met(self, ours: float, theirs: float | None) -> bool:
        bound = self.bound
        if self.is_ratio:
            assert theirs is not None, f"a ratio of {self.bound} to nothing"
            bound *= theirs
        return ours <= bound if self.at_most else ours >= bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {shown(self.bound)}{'x' if self.is_ratio else ''}"


@dataclass(frozen=True)
class Comparison:
    """One quantity, once per round and system. Medians are compared; without a goal they are only shown. `theirs` is
    empty where only Postdate was measured.
    """

    name: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    goal: Goal | None = None

    @property
    def medians(self) -> tuple[float, float | None]:
        return statistics.median(self.ours), statistics.median(self.theirs) if self.theirs else None

    @property
    def ratio(self) -> float | None:
        ours, theirs = self.medians
        return ours / theirs if theirs else None

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        return "yes" if self.goal.is_met(*self.medians) else "no"

    def cells(self) -> tuple[str, ...]:
        ratio = "" if self.ratio is None else f"{shown(self.ratio)}x"
        goal = "" if self.goal is None else str(self.goal)
        return self.name, self._cell(self.ours), self._cell(self.theirs), ratio, goal, self.verdict

    def _cell(self, values: Sequence[float]) -> str:
        """The median, and the smallest and largest."""
        if not values:
            return ""
        text = f"{shown(statistics.median(values))} {self.unit}".rstrip()
        return text if len(values) == 1 else f"{text} ({shown(min(values))} - {shown(max(values))})"

    def as_json(self) -> dict[str, Any]:
        ours, theirs = self.medians
        return {
            "name": self.name, "unit": self.unit, "postdate": list(self.ours), "rocketmq": list(self.theirs),
            "postdate_median": ours, "rocketmq_median": theirs, "ratio": self.ratio,
            "to_reach": None if self.goal is None else str(self.goal), "met": self.verdict,
        }  # fmt: skip


def markdown(comparisons: Sequence[Comparison]) -> str:
    return report.markdown([COLUMNS, *(comparison.cells() for comparison in comparisons)])

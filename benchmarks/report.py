"""A figure, the table of them, and the machine on which they were measured."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("measure", "median", "min - max", "goal", "", "compared with")


@dataclass(frozen=True)
class Figure:
    """One measured quantity, once per repeat. A goal of None means that it is only shown."""

    name: str
    unit: str
    values: Sequence[float]
    goal: float | None
    at_most: bool = False  # whether less is better
    floor: str = ""  # what the bare machine does, or a caveat

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return "-"
        return "ok" if (self.median <= self.goal if self.at_most else self.median >= self.goal) else "short"

    def cells(self) -> tuple[str, ...]:
        sign = "<=" if self.at_most else ">="
        goal = f"{sign} {shown(self.goal)}" if self.goal is not None else ""
        span = f"{shown(min(self.values))} - {shown(max(self.values))}"
        return self.name, f"{shown(self.median)} {self.unit}", span, goal, self.verdict, self.floor

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "unit": self.unit, "median": self.median, "values": list(self.values), "goal": self.goal,
            "at_most": self.at_most, "verdict": self.verdict, "compared_with": self.floor,
        }  # fmt: skip


def shown(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


Lines = Sequence[Sequence[str]]  # cells of a table, its heads first


def lines(figures: Sequence[Figure]) -> Lines:
    return [COLUMNS, *(figure.cells() for figure in figures)]


def aligned(table: Lines) -> str:
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)


def markdown(table: Lines) -> str:
    rows = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def write_json(path: Path, figures: Sequence[Figure], about: dict[str, Any]) -> None:
    write_record(path, {"machine": machine(), **about, "figures": [figure.as_json() for figure in figures]})


def write_record(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

"""A virtual year of the table: python -m benchmarks.year [--days N] [--json FILE]

1,000 messages a second, their delays spread evenly from two minutes to a year: the hardest for a table by due time.
The files are described, not written: rows spread evenly inside a file, and the real planner (postdate.table.merging)
decides hour by hour what is merged, at full size. Told are writes per row, files that a minute opens, files in all, and
the Delta log of that many files, which is written for real. Some minutes.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.report import Figure
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import Window, WrittenFile, touches
from postdate.table.format import File
from postdate.table.merging import DAY_MS, HOUR_MS

RATE, MINUTE_MS = 1_000, 60_000
YEAR_MS = 365 * DAY_MS
ROW_BYTES = 160  # in a file
START_MS = int(datetime(2030, 1, 1, tzinfo=UTC).timestamp() * 1_000)
MINUTE_ROWS = RATE * MINUTE_MS // 1_000


class Year:
    """The files of the table, as the clock moves on by an hour at a time."""

    def __init__(self) -> None:
        self.now_ms = START_MS
        self.files: dict[str, File] = {}  # but for hours, which the planner leaves alone
        self.hours: dict[int, list[File]] = {}  # by hour since the epoch
        self.rows_in = self.rows_written = 0.0
        self.opened: list[int] = []
        self.merged_rows: list[float] = []
        self._number = 0
        self._last_cut_ms = 0

    def _add(self, tier: str, rows: float, low: int, high: int) -> None:
        if rows <= 0:
            return
        self._number += 1
        name = f"{tier}-{self._number:09d}.parquet"
        file = File(name, int(rows * ROW_BYTES), max(int(rows), 1), low, high, self._number, self._number)
        if tier == "hour":
            self.hours.setdefault(low // HOUR_MS, []).append(file)
        else:
            self.files[name] = file
        self.rows_written += rows

    def waiting(self) -> list[File]:
        return [*self.files.values(), *(file for held in self.hours.values() for file in held)]

    def hour(self) -> None:
        for minute in range(60):
            self._ingest(self.now_ms + minute * MINUTE_MS)
        self.now_ms += HOUR_MS
        horizon = self.now_ms + 2 * MINUTE_MS
        window = Window(horizon - MINUTE_MS, horizon)
        # Before anything is merged: the most that a minute of this hour opens.
        held = [*self.files.values(), *self.hours.get(horizon // HOUR_MS, ())]
        self.opened.append(sum(touches(file, window) for file in held))
        self.files = {name: file for name, file in self.files.items() if file.due_high > horizon - MINUTE_MS}
        self.hours.pop(horizon // HOUR_MS - 1, None)
        while (merge := merging.plan_merge(self.files.values(), self.now_ms, horizon, self._last_cut_ms)) is not None:
            self._merge(merge)

    def _ingest(self, at_ms: int) -> None:
        low, high, edge = at_ms + 2 * MINUTE_MS, at_ms + YEAR_MS, merging.edge_ms(at_ms)
        share = (edge - low) / (high - low)
        self.rows_in += MINUTE_ROWS
        self._add("soon", MINUTE_ROWS * share, low, edge - 1)
        self._add("later", MINUTE_ROWS * (1 - share), edge, high)

    def _merge(self, merge: merging.Merge) -> None:
        rows, low, high = (np.array([file[field] for file in merge.files], np.float64) for field in (2, 3, 4))
        self.merged_rows.append(0.0)
        for file in merge.files:
            del self.files[file.path]
        for tier, start, stop in merge.buckets:
            inside = np.clip(np.minimum(high, stop) - np.maximum(low, start + 1) + 1, 0, None)
            held = float(rows @ (inside / (high - low + 1)))
            self._add(tier, held, start + 1, stop)
            self.merged_rows[-1] += held
        if merge.ends_split:
            self._last_cut_ms = self.now_ms


def log_bytes(files: Sequence[File]) -> int:
    """The Delta log of a table with these files, a hundred commits behind its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        table = Table(f"{folder}/messages")
        for start in range(0, len(files), 2_000):
            table.commit([WrittenFile(file, []) for file in files[start : start + 2_000]], far=start, rows=start)
        for number in range(200):
            table.commit(far=len(files) + number)
            table.tidy()
        newest = sorted(Path(folder, "messages", "_delta_log").glob("*.checkpoint.parquet"))[-1]
        version = int(newest.name[:20])
        kept = [newest, *(path for path in newest.parent.glob("*.json") if int(path.name[:20]) > version)]
        return sum(path.stat().st_size for path in kept)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.year", description="Measures a virtual year.")
    parser.add_argument("--days", type=int, default=365, metavar="N", help="default 365")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine there")
    options = parser.parse_args(arguments)
    year = Year()
    for day in range(options.days):
        for _ in range(24):
            year.hour()
        if day % 30 == 29:
            print(
                f"day {day + 1}: {len(year.files) + sum(map(len, year.hours.values())):,} files",
                file=sys.stderr,
                flush=True,
            )
    figures = _figures(year)
    print(report.aligned(report.lines(figures)))
    if options.json:
        report.write_json(options.json, figures, {"days": options.days})
    return int(any(figure.verdict == "short" for figure in figures))


def _figures(year: Year) -> list[Figure]:
    waiting = year.waiting()
    return [
        Figure("writes of a row in the table", "", [year.rows_written / year.rows_in], 3.0, at_most=True),
        Figure("files opened for a minute, p50", "", [float(np.percentile(year.opened, 50))], None),
        Figure("files opened for a minute, most", "", [float(max(year.opened))], 500, at_most=True),
        Figure("files of the table at the end", "", [len(waiting)], None),
        Figure("rows that wait at the end", "million", [sum(file.rows for file in waiting) / 1e6], None),
        Figure("rows of the largest merge", "million", [max(year.merged_rows) / 1e6], None),
        Figure("Delta log at the end", "MB", [log_bytes(waiting) / 1e6], None),
    ]


if __name__ == "__main__":
    sys.exit(main())

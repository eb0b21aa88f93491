"""Postdate and RocketMQ side by side: python -m benchmarks.rocketmq [--quick] [--rounds N] [--only NAME ...] ...

Both servers run on this machine, each in processes of its own; one Java program of ours, with RocketMQ's official
client, measures them in turn: A B, A B, A B. Figures are medians of the rounds. The one that is not measured is paused.
Needs a JDK and Maven; RocketMQ is fetched on first use, into a cache outside this tree.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import process, report
from benchmarks.bench import Bench, say
from benchmarks.rocketmq import libraries
from benchmarks.rocketmq.comparison import Comparison, markdown
from benchmarks.rocketmq.measures import ASYNC, SYNC, Measure, Row, at_most, measures, names, warming
from benchmarks.rocketmq.program import JVM, Failed, Program
from benchmarks.rocketmq.systems import (
    BROKER_JVM,
    BROKER_SETTINGS,
    NotStarted,
    System,
    awake,
    postdate,
    rocketmq,
)

RESULTS = Path(__file__).parent.parent / "results"
CACHE_NAME = "POSTDATE_ROCKETMQ_CACHE"
QUICK = 0.02
WARM_RUNS = 2
MEMORY_ROWS = (
    Row("broker memory (VmRSS) after start", "start_mb", "MB", at_most(0.05)),
    Row("broker memory (VmRSS) after all measures of sync flush", "end_mb", "MB", at_most(0.05)),
    Row("broker memory, peak (VmHWM)", "peak_mb", "MB", at_most(0.05)),
)


class Duel:
    """Both systems, measured in turn; remembers every figure of every round."""

    def __init__(self, bench: Bench, class_paths: libraries.ClassPaths) -> None:
        self._bench, self._class_paths = bench, class_paths
        self._values: dict[tuple[str, Row], list[float]] = defaultdict(list)  # by name of the system
        self._rows: list[Row] = []

    def run(self, flush: str, chosen: Sequence[Measure]) -> None:
        """All measures of a flush mode, with servers started for it."""
        with self._systems(flush) as (pair, program):
            for system in pair:
                self._warm(system, program)
            for measure in chosen:
                for number in self._bench.repeats(f"{measure.name}, {flush} flush"):
                    for system in pair:
                        self._measure(system, program, measure, number)
            if flush == SYNC:
                for system in pair:
                    self._note(MEMORY_ROWS[1], system, process.memory_mb(system.pid))
                    self._note(MEMORY_ROWS[2], system, process.memory_mb(system.pid, "VmHWM"))

    @contextmanager
    def _systems(self, flush: str) -> Iterator[tuple[list[System], Program]]:
        with ExitStack() as stack:
            folders = [stack.enter_context(self._bench.folder()) for _ in range(3)]
            say(f"starting both, {flush} flush ...")
            pair = [
                stack.enter_context(postdate(folders[0], flush)),
                stack.enter_context(rocketmq(folders[1], flush, self._class_paths.servers)),
            ]
            for system in pair:
                if flush == SYNC:
                    self._note(MEMORY_ROWS[0], system, process.memory_mb(system.pid))
                system.signal(signal.SIGSTOP)
            yield pair, Program(self._class_paths.program, folders[2])

    def _warm(self, system: System, program: Program) -> None:
        with awake(system):
            for number in range(WARM_RUNS):
                say(f"  warming {system.name}: {number + 1} of {WARM_RUNS}")
                for measure in warming(self._bench.scale):
                    program.figures(system, measure.arguments)

    def _measure(self, system: System, program: Program, measure: Measure, number: int) -> None:
        start = time.monotonic()
        os.sync()  # what the one before has left to be written must not be this one's lateness
        with awake(system):
            figures = program.figures(system, measure.arguments)
        figures["cpu_us"] = figures.pop("cpu_s") / measure.messages * 1e6
        for row in measure.rows:
            self._note(row, system, figures[row.figure])
        told = ", ".join(f"{name} {report.shown(value)}" for name, value in figures.items())
        say(f"    {system.name:<9} round {number + 1}: {told}  [{time.monotonic() - start:.0f} s]")

    def _note(self, row: Row, system: System, value: float) -> None:
        if row not in self._rows:
            self._rows.append(row)
        self._values[system.name, row].append(value)

    def comparisons(self) -> list[Comparison]:
        """Of what both systems were measured in; the memory stands at the end."""
        rows = sorted(self._rows, key=MEMORY_ROWS.__contains__)
        pairs = [(row, self._values["Postdate", row], self._values["RocketMQ", row]) for row in rows]
        return [
            Comparison(row.name, row.unit, ours, theirs, row.goal) for row, ours, theirs in pairs if ours and theirs
        ]


def about(options: argparse.Namespace) -> dict[str, Any]:
    """The machine, the versions and the settings: what one must know to read the figures."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        **report.machine(),
        "memory_gb": round(memory_bytes / 1e9, 1),
        "rocketmq": libraries.version(),
        "rounds": options.rounds,
        "quick": options.quick,
        "client_jvm": " ".join(JVM),
        "broker_jvm": " ".join(BROKER_JVM),
        "broker_settings": {name: str(value) for name, value in BROKER_SETTINGS.items()},
        "postdate_settings": "the defaults of postdate up, but for ports and flush mode",
    }


def write(options: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    """The table to standard output, everything to a file."""
    facts = about(options)
    print(markdown(comparisons))
    print()
    for name, value in facts.items():
        print(f"{name}: {value}")
    path = options.json or RESULTS / f"rocketmq-{facts['date'].replace(':', '')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report.write_record(path, {"about": facts, "comparisons": [found.as_json() for found in comparisons]})
    say(f"written to {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every goal was reached, 1 otherwise, 2 when it could not be measured, 130 when interrupted."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: _raise(KeyboardInterrupt()))
    bench = Bench(options.folder or Path(tempfile.gettempdir()), options.rounds, QUICK if options.quick else 1.0)
    try:
        return _run(bench, options)
    except (libraries.Unusable, NotStarted, Failed) as error:
        say(f"benchmarks.rocketmq: {error}")
        return 2
    except KeyboardInterrupt:
        say("benchmarks.rocketmq: interrupted")
        return 130


def _raise(error: BaseException) -> None:
    raise error


def _run(bench: Bench, options: argparse.Namespace) -> int:
    chosen = [
        measure
        for measure in measures(bench.scale)
        if (measure.name in options.only if options.only else measure.is_usual)
    ]
    with bench.folder() as classes:
        duel = Duel(bench, libraries.class_paths(options.cache, classes))
        try:
            for flush in (SYNC, ASYNC):
                of_flush = [measure for measure in chosen if measure.flush == flush and flush in options.flush]
                if of_flush:
                    duel.run(flush, of_flush)
        finally:
            comparisons = duel.comparisons()  # an hour's figures are not thrown away for the last one's sake
            if comparisons:
                write(options, comparisons)
    return int(any(found.verdict == "no" for found in comparisons))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    cache = Path(os.environ.get(CACHE_NAME) or Path.home() / ".cache" / "postdate" / f"rocketmq-{libraries.version()}")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rocketmq", description="Measures Postdate and RocketMQ side by side."
    )
    parser.add_argument("--quick", action="store_true", help="small counts, to see that all works; goals stay")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--only", nargs="+", choices=names(), metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--flush", nargs="+", choices=(SYNC, ASYNC), default=(SYNC, ASYNC), help="default both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default a new file in benchmarks/results")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for temporary data; default the system's")
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help=f"{CACHE_NAME}, or {cache}")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Both systems measured in turn, A B, A B, A B, and what the commands that do so have in common."""

import argparse
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.bench import Bench, say
from benchmarks.rocketmq import libraries
from benchmarks.rocketmq.comparison import Comparison, markdown
from benchmarks.rocketmq.measures import Measure, Row
from benchmarks.rocketmq.program import JVM, Failed, Program
from benchmarks.rocketmq.systems import BROKER_JVM, BROKER_SETTINGS, NotStarted, System, awake

RESULTS = Path(__file__).parent.parent / "results"
WARM_RUNS = 2


class Duel:
    """Remembers every figure of every round."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._values: dict[tuple[str, Row], list[float]] = defaultdict(list)  # by name of the system
        self._rows: list[Row] = []

    def run(
        self, pair: Sequence[System], program: Program, warming: Sequence[Measure], chosen: Sequence[Measure]
    ) -> None:
        """Warms and measures systems that have just started. All of them are paused at the end."""
        for system in pair:
            system.signal(signal.SIGSTOP)
        for system in pair:
            with awake(system):
                for number in range(WARM_RUNS):
                    say(f"  warming {system.name}: {number + 1} of {WARM_RUNS}")
                    for measure in warming:
                        program.figures(system, measure.arguments)
        for measure in chosen:
            for number in self._bench.repeats(f"{measure.name}, {measure.flush} flush"):
                for system in pair:
                    self._measure(system, program, measure, number)

    def _measure(self, system: System, program: Program, measure: Measure, number: int) -> None:
        start = time.monotonic()
        os.sync()  # what the one before has left to be written must not be this one's lateness
        with awake(system):
            figures = program.figures(system, measure.arguments)
        figures["cpu_us"] = figures.pop("cpu_s") / measure.messages * 1e6
        for row in measure.rows:
            self.note(row, system, figures[row.figure])
        told = ", ".join(f"{name} {report.shown(value)}" for name, value in figures.items())
        say(f"    {system.name:<9} round {number + 1}: {told}  [{time.monotonic() - start:.0f} s]")

    def note(self, row: Row, system: System, value: float) -> None:
        if row not in self._rows:
            self._rows.append(row)
        self._values[system.name, row].append(value)

    def comparisons(self, last: Collection[Row] = ()) -> list[Comparison]:
        """Of what both systems were measured in; the rows of `last` stand at the end."""
        rows = sorted(self._rows, key=last.__contains__)
        pairs = [(row, self._values["Postdate", row], self._values["RocketMQ", row]) for row in rows]
        return [
            Comparison(row.name, row.unit, ours, theirs, row.goal) for row, ours, theirs in pairs if ours and theirs
        ]


# -- the commands -----------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    cache = libraries.usual_cache()
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default a new file in benchmarks/results")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for temporary data; default the system's")
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help=f"{libraries.CACHE_NAME}, or {cache}")


def parse_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def run_command(name: str, work: Callable[[], list[Comparison]]) -> int:
    """Returns 0 when every goal was reached, 1 otherwise, 2 when it could not be measured, 130 when interrupted."""
    signal.signal(signal.SIGTERM, lambda *_: _raise(KeyboardInterrupt()))
    try:
        return int(any(found.verdict == "no" for found in work()))
    except (libraries.Unusable, NotStarted, Failed) as error:
        say(f"benchmarks.{name}: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"benchmarks.{name}: interrupted")
        return 130


def _raise(error: BaseException) -> None:
    raise error


def write(name: str, options: argparse.Namespace, comparisons: Sequence[Comparison], **more: Any) -> None:
    """The table to standard output; everything, with what one must know to read it, to a file."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        **report.machine(),
        "memory_gb": round(memory_bytes / 1e9, 1),
        "rocketmq": libraries.version(),
        "rounds": options.rounds,
        **more,
        "client_jvm": " ".join(JVM),
        "broker_jvm": " ".join(BROKER_JVM),
        "broker_settings": {name: str(value) for name, value in BROKER_SETTINGS.items()},
        "postdate_settings": "the defaults of postdate up, but for ports and flush mode",
    }
    print(markdown(comparisons))
    print()
    for fact, value in facts.items():
        print(f"{fact}: {value}")
    path = options.json or RESULTS / f"{name}-{facts['date'].replace(':', '')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report.write_record(path, {"about": facts, "comparisons": [found.as_json() for found in comparisons]})
    say(f"written to {path}")

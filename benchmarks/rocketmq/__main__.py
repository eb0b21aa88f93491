"""Postdate and RocketMQ side by side: python -m benchmarks.rocketmq [--quick] [--rounds N] [--only NAME ...] ...

Both servers run on this machine, each in processes of its own; one Java program of ours, with RocketMQ's official
client, measures them in turn: A B, A B, A B. Figures are medians of the rounds. The one that is not measured is paused.
Needs a JDK and Maven; RocketMQ is fetched on first use, into a cache outside this tree.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import process
from benchmarks.bench import Bench, say
from benchmarks.rocketmq import duel, libraries
from benchmarks.rocketmq.comparison import Comparison
from benchmarks.rocketmq.duel import Duel
from benchmarks.rocketmq.measures import ASYNC, SYNC, Measure, Row, at_most, measures, names, warming
from benchmarks.rocketmq.program import Program
from benchmarks.rocketmq.systems import System, postdate, rocketmq

QUICK = 0.02
MEMORY_ROWS = (
    Row("broker memory (VmRSS) after start", "start_mb", "MB", at_most(0.05)),
    Row("broker memory (VmRSS) after all measures of sync flush", "end_mb", "MB", at_most(0.05)),
    Row("broker memory, peak (VmHWM)", "peak_mb", "MB", at_most(0.05)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every goal was reached, 1 otherwise, 2 when it could not be measured, 130 when interrupted."""
    options = _options(arguments)
    return duel.run_command("rocketmq", partial(_run, options))


def _run(options: argparse.Namespace) -> list[Comparison]:
    bench = Bench(options.folder or Path(tempfile.gettempdir()), options.rounds, QUICK if options.quick else 1.0)
    chosen = [
        measure
        for measure in measures(bench.scale)
        if (measure.name in options.only if options.only else measure.is_usual)
    ]
    both = Duel(bench)
    with bench.folder() as classes:
        class_paths = libraries.class_paths(options.cache, classes)
        try:
            for flush in (SYNC, ASYNC):
                of_flush = [measure for measure in chosen if measure.flush == flush and flush in options.flush]
                if of_flush:
                    _run_flush(bench, both, class_paths, flush, of_flush)
        finally:
            comparisons = both.comparisons(MEMORY_ROWS)  # an hour's figures are not thrown away for the last one's sake
            if comparisons:
                duel.write("rocketmq", options, comparisons, quick=options.quick)
    return comparisons


def _run_flush(
    bench: Bench, both: Duel, class_paths: libraries.ClassPaths, flush: str, chosen: Sequence[Measure]
) -> None:
    """All measures of a flush mode, with servers started for it."""
    with ExitStack() as stack:
        folders = [stack.enter_context(bench.folder()) for _ in range(3)]
        say(f"starting both, {flush} flush ...")
        pair: list[System] = [
            stack.enter_context(postdate(folders[0], flush)),
            stack.enter_context(rocketmq(folders[1], flush, class_paths.servers)),
        ]
        if flush == SYNC:
            for system in pair:
                both.note(MEMORY_ROWS[0], system, process.memory_mb(system.pid))
        both.run(pair, Program(class_paths.program, folders[2]), warming(bench.scale), chosen)
        if flush == SYNC:
            for system in pair:
                both.note(MEMORY_ROWS[1], system, process.memory_mb(system.pid))
                both.note(MEMORY_ROWS[2], system, process.memory_mb(system.pid, "VmHWM"))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rocketmq", description="Measures Postdate and RocketMQ side by side."
    )
    parser.add_argument("--quick", action="store_true", help="small counts, to see that all works; goals stay")
    parser.add_argument("--only", nargs="+", choices=names(), metavar="NAME", help=f"of {', '.join(names())}")
    parser.add_argument("--flush", nargs="+", choices=(SYNC, ASYNC), default=(SYNC, ASYNC), help="default both")
    duel.add_options(parser)
    return duel.parse_options(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())

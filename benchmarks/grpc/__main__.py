"""Postdate's gRPC port and RocketMQ's proxy side by side: python -m benchmarks.grpc [--scale S] [--measure NAME ...]

Both servers run on this machine, RocketMQ's proxy in local mode, in one process with its broker. One Java program of
ours, with RocketMQ's official client for gRPC, measures them in turn; the one that is not measured is paused. What
needs no client library is measured of Postdate alone. Needs a JDK and Maven, and fetches RocketMQ on first use, as
`python -m benchmarks.rocketmq` does.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, say
from benchmarks.grpc import raw
from benchmarks.grpc.measures import (
    IDLE,
    RAW,
    RAW_COUNT,
    idle_rows,
    idle_size,
    measures,
    names,
    raw_rows,
    warming,
)
from benchmarks.grpc.topics import make_topic_and_group
from benchmarks.report import shown
from benchmarks.rocketmq import duel, libraries
from benchmarks.rocketmq.comparison import Comparison
from benchmarks.rocketmq.duel import Duel
from benchmarks.rocketmq.measures import SYNC, Measure, Row, scaled
from benchmarks.rocketmq.program import Program
from benchmarks.rocketmq.proxy import rocketmq_proxy
from benchmarks.rocketmq.systems import Postdate, System, postdate

TOPIC = "bench"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every goal was reached, 1 otherwise, 2 when it could not be measured, 130 when interrupted."""
    return duel.run_command("grpc", partial(_run, _options(arguments)))


def _run(options: argparse.Namespace) -> list[Comparison]:
    bench = Bench(options.folder or Path(tempfile.gettempdir()), options.rounds, options.scale)
    chosen = [measure for measure in measures(bench.scale) if measure.name in options.measure]
    comparisons: list[Comparison] = []
    try:
        if chosen:
            comparisons += _run_both(bench, options.cache, chosen)
        if RAW in options.measure:
            comparisons += _run_raw(bench)
        if IDLE in options.measure:
            comparisons += _run_idle(bench)
    finally:
        if comparisons:
            facts = {"scale": options.scale, "grpc_client": libraries.version(libraries.GRPC_POM)}
            duel.write("grpc", options, comparisons, **facts)
    return comparisons


def _run_both(bench: Bench, cache: Path, chosen: Sequence[Measure]) -> list[Comparison]:
    both = Duel(bench)
    with ExitStack() as stack:
        folders = [stack.enter_context(bench.folder()) for _ in range(4)]
        class_paths = libraries.grpc_class_paths(cache, folders[0])
        say("starting both, sync flush ...")
        pair: list[System] = [
            stack.enter_context(postdate(folders[1], SYNC)),
            stack.enter_context(rocketmq_proxy(folders[2], SYNC, class_paths.servers)),
        ]
        program = Program(class_paths.program, folders[3], "Grpc", make_topic_and_group)
        both.run(pair, program, warming(bench.scale), chosen)
    return both.comparisons()


def _run_raw(bench: Bench) -> list[Comparison]:
    count = scaled(RAW_COUNT, bench.scale)
    return _run_alone(bench, RAW, raw_rows(), lambda server: raw.send(server, TOPIC, count))


def _run_idle(bench: Bench) -> list[Comparison]:
    count, polling_s = idle_size(bench.scale)
    return _run_alone(
        bench, IDLE, idle_rows(count, polling_s), lambda server: raw.idle(server, TOPIC, count, polling_s)
    )


def _run_alone(
    bench: Bench, name: str, rows: Sequence[Row], measure: Callable[[Postdate], Sequence[float]]
) -> list[Comparison]:
    """Of Postdate alone: a figure for each row, with a new server in each round."""
    found = list(_rounds(bench, name, measure))
    return [
        Comparison(row.name, row.unit, values, [], row.goal)
        for row, values in zip(rows, zip(*found, strict=True), strict=True)
    ]


def _rounds(bench: Bench, name: str, measure: Callable[[Postdate], Sequence[float]]) -> Iterator[Sequence[float]]:
    for _ in bench.repeats(name):
        with bench.folder() as folder, postdate(folder, SYNC) as server:
            make_topic_and_group(server, TOPIC)
            figures = measure(server)
        say(f"    {', '.join(map(shown, figures))}")
        yield figures


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.grpc", description="Measures Postdate and RocketMQ over gRPC side by side."
    )
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="of all counts; goals stay")
    parser.add_argument(
        "--measure", nargs="+", choices=names(), default=names(), metavar="NAME", help=f"of {', '.join(names())}"
    )
    duel.add_options(parser)
    options = duel.parse_options(parser, arguments)
    if not 0 < options.scale <= 1:
        parser.error("--scale must be above 0 and at most 1")
    return options


if __name__ == "__main__":
    sys.exit(main())

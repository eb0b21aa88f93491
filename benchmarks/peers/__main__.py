"""Postdate beside what people would pick instead: python -m benchmarks.peers [--quick] [--rounds N] [--only SYSTEM ...]

Every system does the same works on this machine, one after the other, round by round; medians of the rounds are shown.
While one is measured, no other runs. What is not installed is shown as not run: scripts/peers installs it before. The
whole takes a good hour. --quick takes small counts, to see that all works. Results go to a JSON file, a page with
tables and its plots; --report makes the page again from the file. Ctrl-C ends all processes, and what was measured is
kept.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report as machine
from benchmarks.bench import Bench, say
from benchmarks.peers import process, registry, report
from benchmarks.peers.figures import Measured, Results
from benchmarks.peers.plan import FULL, QUICK, WORKS, Plan
from benchmarks.peers.progress import Progress

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
NAME = "peers.json"


class Comparison:
    """All turns, and what has come of them so far."""

    def __init__(self, options: argparse.Namespace, plan: Plan, bench: Bench, progress: Progress) -> None:
        self._options, self._plan, self._bench, self._progress = options, plan, bench, progress
        self.results = Results(about(options, plan), {slug: Measured(slug) for slug in options.only})

    def run(self) -> None:
        for number in range(self._options.rounds):
            for slug in self._options.only:
                self._progress.begin(slug)
                self._progress.end(self._turn(self.results.systems[slug], slug, number == 0))
                write_json(self._options.json, self.results)

    def _turn(self, measured: Measured, slug: str, is_first: bool) -> str:
        """One system in one round; what is to be said of it."""
        if measured.not_run:
            return report.in_short(measured)
        with self._bench.folder() as folder:
            folder.chmod(0o755)  # some servers want to be another user
            flags = ["--quick"] * self._options.quick + ["--patient"] * is_first
            arguments = [slug, str(folder), self._options.works, *flags]
            try:
                process.follow(
                    arguments, self._plan.turn_limit_s, folder / "turn.err", lambda line: self._heard(measured, line),
                    self._progress.tick,
                )  # fmt: skip
            except process.NotEnded as error:
                measured.note("turn", str(error))
                return str(error)
        return report.in_short(measured)

    def _heard(self, measured: Measured, line: list[Any]) -> None:
        kind, *content = line
        if kind == "about":
            for name, value in content[0].items():
                setattr(measured, name, value)
        elif kind == "step":
            self._progress.step(content[1])
        elif kind == "figure":
            measured.add(*content)
        elif kind == "note":
            measured.note(*content)
        else:
            assert kind == "not run", line
            measured.not_run = content[0]


def about(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        **machine.machine(), "memory_gb": round(memory_bytes / 1e9, 1), "rounds": options.rounds,
        "quick": options.quick, "works": options.works, "plan": plan._asdict(),
    }  # fmt: skip


def write_json(path: Path, results: Results) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    machine.write_record(path, results.as_json())


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 130 when it was interrupted."""
    options = _options(arguments)
    if options.report:
        report.write(Results.from_json(json.loads(options.json.read_text())), options.page)
        return 0
    plan = QUICK if options.quick else FULL
    bench = Bench(options.folder or Path(tempfile.gettempdir()), options.rounds, 1.0)
    progress = Progress(sys.stderr, options.only, options.rounds)
    comparison = Comparison(options, plan, bench, progress)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    process.adopt_orphans()
    try:
        comparison.run()
    except KeyboardInterrupt:
        say("benchmarks.peers: interrupted")
        return 130
    report.write(comparison.results, options.page)
    say(f"written to {options.page} and {options.json}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Measures Postdate beside other systems.",
        epilog="works: " + "; ".join(f"{letter}: {title}" for letter, title in WORKS.items()),
    )
    parser.add_argument("--quick", action="store_true", help="small counts, to see that all works")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default 3")
    slugs = ", ".join(registry.SLUGS)
    parser.add_argument("--only", nargs="+", choices=registry.SLUGS, metavar="SYSTEM", help=f"of {slugs}")
    parser.add_argument("--works", default="".join(WORKS), metavar="LETTERS", help="default all, abcdefg")
    whole = (
        "default docs/peers.md and benchmarks/results/peers.json for a whole run, else the folder peers of the results"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"for the page, its plots and the JSON; {whole}")
    parser.add_argument("--report", action="store_true", help="measure nothing: write the page again from the JSON")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for temporary data; default the system's")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if unknown := set(options.works) - set(WORKS):
        parser.error(f"--works: {''.join(sorted(unknown))} is none of {''.join(WORKS)}")
    _place(options)
    options.only = options.only or list(registry.SLUGS)
    return options


def _place(options: argparse.Namespace) -> None:
    """A part, or a quick run, must not take the place of a whole one."""
    is_whole = not (options.quick or options.only) and set(options.works) == set(WORKS)
    if options.output is None and is_whole:
        options.json, options.page = RESULTS / NAME, ROOT / "docs" / "peers.md"
    else:
        folder = options.output or RESULTS / "peers"
        options.json, options.page = folder / NAME, folder / "peers.md"


if __name__ == "__main__":
    sys.exit(main())

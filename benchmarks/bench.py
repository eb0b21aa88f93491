"""What every benchmark has: where it works, how often and how much; its flags, its table, its exit code."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import report
from benchmarks.report import Figure


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Bench:
    """Where, how often and how much."""

    def __init__(self, parent: Path, repeat: int, scale: float) -> None:
        self.parent, self.repeat, self.scale = parent, repeat, scale

    def scaled(self, count: int) -> int:
        return int(count * self.scale)

    def repeats(self, name: str) -> Iterator[int]:
        for number in range(self.repeat):
            say(f"  {name}: {number + 1} of {self.repeat}")
            yield number

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A new data folder, removed at the end."""
        self.parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix="postdate-bench-", dir=self.parent))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def about(self) -> dict[str, Any]:
        """What else is worth telling when all is measured."""
        return {}


Kind = TypeVar("Kind", bound=Bench)
Measures = Mapping[str, Callable[[Kind], list[Figure]]]


def run(
    name: str,
    what: str,
    make: Callable[[Path, int, float], Kind],
    measures: "Measures[Kind]",
    arguments: Sequence[str] | None,
    shape: Callable[[Sequence[Figure]], report.Lines] = report.lines,
) -> int:
    """Measures what the flags ask for; `shape` makes a table of the figures. Returns 0 when every goal was reached, 1
    otherwise.
    """
    options = _options(name, what, measures, arguments)
    bench = make(options.folder or Path(tempfile.gettempdir()), max(options.repeat, 1), 0.1 if options.quick else 1.0)
    figures: list[Figure] = []
    for measure in options.only or measures:
        say(f"{measure} ...")
        figures += measures[measure](bench)
    print((report.markdown if options.markdown else report.aligned)(shape(figures)))
    print({**bench.about(), **report.machine()})
    if options.json:
        report.write_json(options.json, figures, {"quick": options.quick, **bench.about()})
    return int(any(figure.verdict == "short" for figure in figures))


def _options(name: str, what: str, measures: "Measures[Any]", arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=f"Measures {what}.")
    parser.add_argument("--quick", action="store_true", help="a tenth of every size; goals in seconds shrink with it")
    parser.add_argument("--only", nargs="+", choices=measures, metavar="NAME", help=f"of {', '.join(measures)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine there")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="default 3")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for temporary data; default the system's")
    return parser.parse_args(arguments)

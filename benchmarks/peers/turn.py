"""One system in one round, as a process: python -m benchmarks.peers.turn SLUG FOLDER WORKS [--quick] [--patient]

Started by the command, so that no system has to do with what another left in memory, and one that hangs can be ended.
What it finds goes to standard output, a line of JSON each; what drivers print goes to standard error.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from benchmarks.peers import registry
from benchmarks.peers.plan import FULL, QUICK
from benchmarks.peers.system import NotRun
from benchmarks.peers.works import Works


class Lines:
    """Tells by lines."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def line(self, kind: str, *content: object) -> None:
        print(json.dumps([kind, *content]), file=self._output, flush=True)

    def step(self, name: str, title: str) -> None:
        self.line("step", name, title)

    def figure(self, key: str, value: float) -> None:
        self.line("figure", key, float(value))

    def note(self, step: str, sentence: str) -> None:
        self.line("note", step, sentence)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.turn")
    parser.add_argument("slug", choices=registry.SLUGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("works")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--patient", action="store_true", help="this is the round in which slow sends are waited for")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    lines = Lines(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        kind = registry.found(options.slug)
        about = {"settings": kind.settings, "durable": kind.durable, "volatile": kind.volatile}
        works = "".join(sorted(kind.works))
        lines.line("about", {"name": kind.name, **about, "works": works})
        lines.line("about", {"versions": kind.versions()})
        plan, letters = QUICK if options.quick else FULL, frozenset(options.works)
        Works(kind, plan, letters, options.folder, lines, is_patient=options.patient).run()
    except NotRun as reason:
        lines.line("not run", str(reason))
    except KeyboardInterrupt:
        return 130
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())

"""`python -m verify.faults`: runs episodes, shows progress, prints each violation with seed, history and invariant.

Exit codes: 0 every promise was kept, 1 one was broken, 2 usage, 130 interrupted.
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from verify.faults import checker
from verify.faults.checker import INVARIANTS
from verify.faults.history import load
from verify.faults.points import Point, Turns
from verify.faults.run import Episode, Plan, Result, history_of
from verify.faults.troubles import AT_POINTS
from verify.faults.workload import Load

EPISODE_S = 240.0
EPISODE_S_MIN = 20.0
SHOWN, EVENTS_SHOWN = 10, 40


def say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    logging.getLogger("postdate").setLevel(logging.CRITICAL)  # lost connections are expected here
    try:
        return _judge(options.judge) if options.judge else _run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/faults",
        description="Disturbs a broker, its Spark pipeline and their clients with kills, pauses, lost power, full "
        "disks, flipped bits and jumping clocks, and judges the broker by what its clients were told.",
        epilog="examples:\n  scripts/faults --minutes 10\n"
        "  scripts/faults --minutes 5 --seed 4711     the same faults again\n"
        "  scripts/faults --minutes 60 --points       at each fault point of the source, one after the other\n"
        "  scripts/faults --minutes 60 --table        messages in the table alone, without a pipeline for minutes\n"
        "  scripts/faults --judge history.jsonl       judge a recorded history again\n\n"
        "exit codes: 0 every promise was kept, 1 one was broken, 2 wrong usage, 130 interrupted at once",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="default 10; Ctrl-C ends it earlier, with a verdict"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20), help="default: by chance")
    parser.add_argument("--no-pipeline", action="store_true", help="without bulk and Spark: the broker alone")
    parser.add_argument("--points", action="store_true", help="only kills at fault points, and steps of the clock")
    parser.add_argument(
        "--table", action="store_true",
        help="messages that lie in the table alone (imports, postponements), jobs that take minutes, and a pipeline "
        "that is away for minutes, which is no excuse for late messages",
    )  # fmt: skip
    parser.add_argument("--keep", metavar="FOLDER", default="", help="keep the folders of episodes with violations")
    parser.add_argument("--judge", metavar="FILE", default="", help="judge a recorded history, and run nothing")
    return parser


def _run(options: argparse.Namespace) -> int:
    end = time.monotonic() + options.minutes * 60
    with_pipeline = not options.no_pipeline
    load = Load(with_jobs=with_pipeline, with_imports=with_pipeline, with_table=options.table)
    if options.table:
        load = replace(load, producers=1)
    plan = Plan(
        EPISODE_S * (2 if options.table else 1),
        load,
        with_pipeline=with_pipeline,
        troubles=AT_POINTS if options.points else (),
    )
    seed, found, episodes, is_over = options.seed, 0, 0, False
    turns = plan.turns()
    say(f"faults for {options.minutes:g} minutes, from seed {seed}")
    while not is_over and (not episodes or end - time.monotonic() > EPISODE_S_MIN):
        shortened = plan.shortened(max(end - time.monotonic(), EPISODE_S_MIN))
        result, is_over = _run_episode(seed, shortened, turns, options.keep)
        episodes, seed, found = episodes + 1, seed + 1, found + len(result.violations)
        _report(result)
    say(f"killed at {len(turns.hit)} of {len(turns.all)} fault points; not at: {_list_points(turns.all - turns.hit)}")
    say(f"{episodes} episodes, {found} violations (seeds {options.seed} to {seed - 1})")
    return int(bool(found))


def _list_points(points: set[Point]) -> str:
    return ", ".join(f"{name} ({process})" for name, process in sorted(points)) or "none"


def _run_episode(seed: int, plan: Plan, turns: Turns, keep: str) -> tuple[Result, bool]:
    """Returns its result, and whether Ctrl-C ended it."""
    folder = Path(tempfile.mkdtemp(prefix=f"postdate-faults-{seed}-"))
    interrupted = []
    try:
        episode = Episode(folder, seed, plan, lambda text: say(f"  seed {seed}: {text}"), turns)

        def stop(_number: int, _frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one ends it at once
            interrupted.append(True)
            episode.stop()

        signal.signal(signal.SIGINT, stop)
        is_worth_keeping = True  # also where the run itself ends with an error: a client that hangs may show a bug
        try:
            result = episode.run()
            is_worth_keeping = bool(result.violations)
        finally:
            if keep and is_worth_keeping:
                shutil.copytree(folder, Path(keep) / f"seed-{seed}", dirs_exist_ok=True)
        return result, bool(interrupted)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(result: Result) -> None:
    say(f"seed {result.seed}: {len(result.violations)} violations; {result.summary}")
    for violation in result.violations[:SHOWN]:
        say(f"VIOLATION of {violation.invariant} ({INVARIANTS.get(violation.invariant, 'a healthy folder and log')}), "
            f"seed {result.seed}: {violation.sentence}")  # fmt: skip
        for event in history_of(result.events, violation.key)[-EVENTS_SHOWN:] if violation.key else ():
            say(f"    {json.dumps(event)}")
    if len(result.violations) > SHOWN:
        say(f"... and {len(result.violations) - SHOWN} more")


def _judge(path: str) -> int:
    events = load(Path(path))
    result = Result(-1, checker.judge(events), events, f"{len(events):,} events of {os.path.basename(path)}")
    _report(result)
    return int(bool(result.violations))


if __name__ == "__main__":
    sys.exit(main())

"""`postdate status`: how broker and pipeline are, once or again and again."""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from postdate.cli.command import OK, add_broker, print_json
from postdate.cli.overview import overview
from postdate.cli.values import positive
from postdate.client import admin
from postdate.errors import PostdateError

HELP = """\
Shows how broker and pipeline are: what waits and where, how far ahead the pipeline is, its table and last batches.

examples:
  postdate status
  postdate status --watch                            again every 2 s, until Ctrl-C
  postdate status --watch 10 --batches 20
  postdate status --json                             all that the broker tells, for a program

Near messages are due within the lead (60 s unless set otherwise) and lie in memory. Far ones lie in the log until the
pipeline has taken them into its table; it promotes them to memory before they are due. What it does not promote in time
the broker rescues from the log.

exit codes: 0 shown, 2 wrong usage, 3 no broker was reached or it refused, 130 interrupted
"""

_WATCH_S = 2
_HOME, _CLEAR, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch", metavar="SECONDS", type=positive, nargs="?", const=_WATCH_S,
        help=f"show it again every so many seconds (without a number: {_WATCH_S})",
    )  # fmt: skip
    parser.add_argument(
        "--batches", metavar="N", type=positive, default=8, help="show at most so many batches (default: 8)"
    )
    add_broker(parser, _status)


def _status(arguments: argparse.Namespace) -> int:
    told = admin.status(arguments.addr)
    if arguments.watch is None:
        _print(told, arguments)
        return OK
    try:
        _watch(told, arguments)
    except KeyboardInterrupt:
        return OK  # its usual end
    raise AssertionError("watching has no other end")


def _print(told: dict[str, Any], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(told)
    else:
        print(*overview(told, arguments.batches), sep="\n")


def _watch(told: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Never returns: it is interrupted."""
    in_place = sys.stdout.isatty() and not arguments.json
    if in_place:
        sys.stdout.write(_CLEAR)
    problem = ""
    while True:
        if in_place:
            _draw([*overview(told, arguments.batches), *(["", problem] if problem else [])])
        elif problem:
            print(f"postdate: {problem}", file=sys.stderr, flush=True)
        else:
            _print(told, arguments)
            print("", end="" if arguments.json else "\n", flush=True)
        time.sleep(arguments.watch)
        try:
            told, problem = admin.status(arguments.addr), ""
        except PostdateError as error:
            problem = str(error)  # and what was last known: it may be back at the next look


def _draw(lines: Sequence[str]) -> None:
    """Writes over what is there. What does not fit is left out: a screen that scrolls cannot be written over."""
    columns, rows = shutil.get_terminal_size()
    shown = [f"{line[:columns]}{_CLEAR_LINE}\n" for line in lines[: rows - 1]]
    sys.stdout.write(f"{_HOME}{''.join(shown)}{_CLEAR_BELOW}")
    sys.stdout.flush()

"""What commands share: exit codes, flags, verbs of a command, and the question before a deletion."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from postdate.cli.values import span
from postdate.errors import UsageError

OK, NEGATIVE, USAGE, REFUSED = 0, 1, 2, 3
UNCOUNTED = "what waits in the table is not counted"
TIMEOUT_MS_DEFAULT = 10_000  # the client's
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

Run = Callable[[argparse.Namespace], int]


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps each command on the line of its summary: argparse forgets that commands stand further to the right."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


def describe(parser: argparse.ArgumentParser, text: str) -> None:
    """Sets the help of a parser: a description, then examples and exit codes as they stand in the text."""
    parser.description, _, parser.epilog = text.partition("\n\n")
    parser.formatter_class = _HelpFormatter


def set_run(parser: argparse.ArgumentParser, run: Run, failed: int = REFUSED) -> None:
    """Sets what a command runs, and its exit code where the broker, the network or the disk is at fault."""
    parser.set_defaults(run=run, failed=failed)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--addr", metavar="HOST:PORT", help="route address of the broker (default: POSTDATE_ADDR, else 127.0.0.1:9876)"
    )


def add_broker(parser: argparse.ArgumentParser, run: Run) -> None:
    """The flags of a command that talks to a broker."""
    add_address(parser)
    add_json(parser)
    set_run(parser, run)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of commands that try again while no broker answers."""
    parser.add_argument(
        "--timeout", metavar="SPAN", type=span, default=TIMEOUT_MS_DEFAULT,
        help="give up when no broker has answered for this long (default: 10s)",
    )  # fmt: skip


def add_bulk(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of commands that read and write by the million, past the broker's own port."""
    parser.add_argument(
        "--bulk", metavar="HOST:PORT", default="", help="address of bulk (default: the broker names it)"
    )


def add_parent(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of commands that `up` starts: they end when it ends. Nobody types it, so no help shows it."""
    parser.add_argument("--parent-pid", dest="_parent_pid", type=int, default=0, help=argparse.SUPPRESS)


class Verbs:
    """The verbs of a command such as `topic`. Their help ends as the command's does."""

    def __init__(self, parser: argparse.ArgumentParser, noun: str, text: str) -> None:
        self._verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
        self._noun = noun
        self._epilog = text.partition("\n\n")[2]

    def add(self, name: str, run: Run, summary: str, *, named: bool = True) -> argparse.ArgumentParser:
        verb = self._verbs.add_parser(name, help=summary, allow_abbrev=False)
        describe(verb, f"{summary[0].upper()}{summary[1:]}.\n\n{self._epilog}")
        if named:
            verb.add_argument("name", metavar="NAME", help=f"the {self._noun}")
        add_broker(verb, run)
        return verb

    def add_local(self, name: str, run: Run, summary: str) -> argparse.ArgumentParser:
        """Adds a verb that works on files of this machine and asks no broker."""
        verb = self._verbs.add_parser(name, help=summary, allow_abbrev=False)
        describe(verb, f"{summary[0].upper()}{summary[1:]}.\n\n{self._epilog}")
        add_json(verb)
        set_run(verb, run, failed=USAGE)
        return verb

    def add_delete(self, run: Run, summary: str) -> argparse.ArgumentParser:
        verb = self.add("delete", run, summary)
        verb.add_argument("--yes", action="store_true", help="do not ask")
        return verb


def is_meant(question: str, otherwise: str = "a deletion cannot be undone: give --yes if you mean it") -> bool:
    """Asks on the terminal whether a deletion is meant. Raises UsageError with a sentence where nobody can answer."""
    if not sys.stdin.isatty():
        raise UsageError(otherwise)
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def say_no(sentence: str) -> int:
    """Prints why nothing was done; returns the exit code for that."""
    print(f"postdate: {sentence}", file=sys.stderr)
    return NEGATIVE


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))

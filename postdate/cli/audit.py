"""`postdate audit`: shows who changed what on a broker, and who was refused."""

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from postdate.cli.command import OK, USAGE, add_json, print_json, set_run
from postdate.cli.render import print_table
from postdate.cli.values import positive, span
from postdate.clock import SystemClock
from postdate.errors import UsageError
from postdate.server.audit import AUDIT_FOLDER, read_audit

HELP = """\
Shows the audit log of a data folder, the oldest line first: who changed what, and who was refused. The broker may run.

examples:
  postdate audit                                   of ./postdate-data
  postdate audit --data /var/lib/postdate --since 1d
  postdate audit --user billing --refused
  postdate audit --json                            a line of JSON each, for a program

exit codes: 0 done, 2 wrong usage or the folder cannot be read, 130 interrupted
"""

_COLUMNS = ("at", "user", "address", "request", "resource", "result")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="DIR", type=Path, default=Path("postdate-data"), help="the data folder")
    parser.add_argument("--since", metavar="SPAN", type=span, help="not older than this: 30m, 7d")
    parser.add_argument("--user", metavar="NAME", help="of this user")
    parser.add_argument("--refused", action="store_true", help="only what was refused")
    parser.add_argument("--last", metavar="N", type=positive, help="the last N lines")
    add_json(parser)
    set_run(parser, _show, failed=USAGE)


def _show(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.data
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name the broker's data folder with --data")
    since = ""
    if arguments.since is not None:
        instant = datetime.fromtimestamp((SystemClock().now_ms() - arguments.since) / 1_000, UTC)
        since = instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    found = [
        line
        for line in read_audit(folder / AUDIT_FOLDER)
        if str(line.get("at", "")) >= since
        and arguments.user in (None, line.get("user"))
        and (not arguments.refused or line.get("result") == "refused")
    ]
    found = found[-arguments.last :] if arguments.last else found
    if arguments.json:
        for line in found:
            print_json(line)
    elif found:
        print_table([*_COLUMNS, "why"], [_row(line) for line in found])
    else:
        print("there is nothing in the audit log, or nothing like that")
    return OK


def _row(line: dict[str, Any]) -> list[str]:
    why = "; ".join(str(line[name]) for name in ("detail", "reason") if line.get(name))
    if line.get("more"):
        why = f"{line['more']:,} more within the second" + (f": {why}" if why else "")
    return [str(line.get(name, "")) for name in _COLUMNS] + [why]

"""`postdate pending`: counts what waits, by topic and by time."""

import argparse
import sys
from typing import Any

from postdate.cli.command import OK, REFUSED, UNCOUNTED, add_broker, print_json
from postdate.cli.render import count, moment, print_table, size
from postdate.cli.values import positive
from postdate.client import admin

HELP = """\
Shows how many messages wait, for which topics, and when they are due (in UTC).

examples:
  postdate pending                                   all topics, by minute of due time
  postdate pending --topic orders --by day           one topic, by day
  postdate pending --limit 1000 --json               more rows, for a program

Near messages are due within a minute or two and lie in memory; far ones lie in the log until the pipeline takes them
into its table. Together they are all waiting messages.

exit codes: 0 shown, 1 there is no such topic, 2 wrong usage, 3 no broker was reached, it refused, or the table could
not be counted (what is known is shown), 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topic", metavar="T", default="", help="only this topic")
    parser.add_argument("--by", choices=("minute", "hour", "day"), default="minute", help="rows by (default: minute)")
    parser.add_argument("--limit", metavar="N", type=positive, default=20, help="at most this many rows (default: 20)")
    add_broker(parser, _pending)


def _pending(arguments: argparse.Namespace) -> int:
    found = admin.pending(arguments.addr, arguments.topic, arguments.by, arguments.limit)
    if arguments.json:
        print_json(found)
    else:
        if found["total"]:
            _print_pending(found, arguments.by)
        else:
            place = " in memory and in the log" if found["unread"] else ""
            print(f"nothing waits for {arguments.topic}{place}" if arguments.topic else f"nothing waits{place}")
        if found["unread"]:
            print(f"postdate: {UNCOUNTED}: {found['unread']}", file=sys.stderr)
    return REFUSED if found["unread"] else OK


def _print_pending(found: dict[str, Any], unit: str) -> None:
    verb = "waits" if found["total"] == 1 else "wait"
    least = "at least " if found["unread"] else ""
    print(f"{least}{count(found['total'], 'message')} {verb}, {size(found['bytes'])}")
    rows = [[each["topic"], each["near"], each["far"], each["table"], size(each["bytes"])] for each in found["topics"]]
    _print_table(["topic", "near", "far", "table", "bytes"], rows)
    # The moment as far as the unit needs it: 2027-01-01T07:00Z, 2027-01-01T07Z, 2027-01-01.
    width, end = {"minute": (16, "Z"), "hour": (13, "Z"), "day": (10, "")}[unit]
    times: list[list[str | int]] = []
    for each in found["times"]:
        due = moment(each["from_ms"])
        due = f"{due[:width]}{end}" if due.endswith("Z") else due
        times.append([due, each["topic"], each["count"], size(each["bytes"])])
    _print_table([f"due in the {unit}", "topic", "messages", "bytes"], times)
    if found["truncated"]:
        print("... and more: see --limit and --by")


def _print_table(heads: list[str], rows: list[list[str | int]]) -> None:
    if rows:
        print()
        print_table(heads, rows)

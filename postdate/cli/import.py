"""`postdate import`: schedules the rows of files as messages."""  # noqa: N999 - a command's module has its name

import argparse
import os
import sys
import uuid
from typing import TYPE_CHECKING

from postdate.cli.command import INTERRUPTED, NEGATIVE, OK, add_address, add_bulk, add_json, print_json, set_run
from postdate.cli.render import Working, count
from postdate.cli.values import named_value
from postdate.client.address import route_addresses
from postdate.clock import SystemClock
from postdate.extras import require_extra
from postdate.process import keep_files_private

if TYPE_CHECKING:
    from postdate.spark.imports.inputs import Outcome, Request

HELP = """\
Schedules each row of Parquet, CSV or JSON lines files as a message, millions of them, through Spark. All rows or none.

examples:
  postdate import reminders.parquet --topic reminders --due send_at --body text --key customer
  postdate import 'orders-*.csv' --topic orders --due due_ms --due-unit ms --property region=area
  postdate import calls.jsonl --topic calls --due at --zone Europe/Berlin --skip-bad bad.jsonl
  postdate import reminders.parquet --topic reminders --due send_at --id campaign-7

Due times are timestamps with a zone, text in ISO 8601 with a zone, or numbers in the unit --due-unit. Messages of
the past are delivered at once. Bodies are text or bytes. The same --id again schedules nothing twice: it reports the
outcome of the first import, or continues an interrupted one. The command starts a Spark of its own, which takes some
seconds and needs Java 17; the broker must have a pipeline.

exit codes: 0 scheduled, 1 there are bad rows and nothing is scheduled, 2 wrong usage, or a file that cannot be read,
3 no broker was reached, it refused (there is no such topic), or there is no Java, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_flag = parser.add_argument
    add_flag("files", metavar="FILE", nargs="+", help="files, folders or patterns, all of one kind")
    add_flag("--topic", metavar="T", required=True, help="topic of the messages")
    add_flag("--due", metavar="COLUMN", required=True, help="the column of due times")
    add_flag(
        "--due-unit", choices=("timestamp", "ms", "s"), default="timestamp",
        help="its values: timestamps, or epoch milliseconds or seconds (default: timestamp)",
    )  # fmt: skip
    add_flag("--zone", metavar="NAME", default="", help="zone of times that have none, such as Europe/Berlin")
    add_flag("--body", metavar="COLUMN", default="", help="the column of bodies (default: body)")
    add_flag("--key", metavar="COLUMN", default="", help="the column of keys")
    add_flag("--tag", metavar="COLUMN", default="", help="the column of tags")
    add_flag("--properties", metavar="COLUMN", default="", help="a column of maps, or of JSON objects")
    add_flag(
        "--property", metavar="NAME=COLUMN", type=named_value, action="append", default=[],
        help="a property and the column of its values; may be repeated",
    )  # fmt: skip
    add_flag(
        "--queue", choices=("round-robin", "key"), default="round-robin",
        help="one queue after the other, or one for each key (default: round-robin)",
    )  # fmt: skip
    add_flag("--id", metavar="ID", default="", help="names this import (default: a new one, which is printed)")
    add_flag("--skip-bad", metavar="FILE", default="", help="write bad rows there and schedule the others")
    add_flag("--no-wait", action="store_true", help="do not wait until the pipeline has taken them")
    add_address(parser)
    add_bulk(parser)
    add_flag("--memory", metavar="SIZE", default="1g", help="heap of Spark (default: 1g)")
    add_json(parser)
    set_run(parser, _import)


def _import(arguments: argparse.Namespace) -> int:
    route_addresses(arguments.addr)
    require_extra("spark", "postdate import")
    from postdate.spark.imports import inputs  # Spark takes a second to load, and no other command needs it

    keep_files_private()
    request = _request(arguments)
    clock = SystemClock()
    started_ns = clock.elapsed_ns()
    with Working() as working:

        def show(step: str, rows: int) -> None:
            working.show(f"{step}, rows" if rows else step, rows)

        if not arguments.id:
            working.say(f"import {request.id}: repeat with --id {request.id} if this is interrupted")
        try:
            outcome = inputs.run(request, os.environ, show)
        except inputs.Interrupted as interrupted:
            working.say(f"postdate: {interrupted}")
            return INTERRUPTED
    return _answer(arguments, outcome, (clock.elapsed_ns() - started_ns) / 1e9)


def _request(arguments: argparse.Namespace) -> "Request":
    from postdate.spark.imports.inputs import Request
    from postdate.spark.imports.options import checked_topic, wanted_of

    columns = {name: getattr(arguments, name) for name in ("due", "body", "key", "tag", "properties", "zone", "queue")}
    wanted = wanted_of({**columns, "unit": arguments.due_unit, "named": tuple(arguments.property)})
    return Request(
        arguments.files, checked_topic(arguments.topic), wanted, arguments.id or uuid.uuid4().hex, arguments.skip_bad,
        not arguments.no_wait, arguments.addr, arguments.memory,
    )  # fmt: skip


# -- what became of it ------------------------------------------------------------------------------------------


def _answer(arguments: argparse.Namespace, outcome: "Outcome", seconds: float) -> int:
    from postdate.spark.imports.imports import bad_lines

    job = outcome.job
    if arguments.json:
        fields = {
            "id": job.id, "state": "failed" if outcome.is_given_up else job.state,
            "rows": 0 if outcome.is_given_up else job.rows, "bad": outcome.bad_count or job.bad,
            "bad_rows": [each._asdict() for each in outcome.bad[:20]], "seconds": round(seconds, 3),
        }  # fmt: skip
        print_json(fields)
    elif outcome.is_given_up:
        print(*bad_lines(outcome.bad, outcome.bad_count), sep="\n", file=sys.stderr)
    else:
        rows = count(job.rows, "row")
        if job.state == "done":
            print(f"{rows} scheduled, {job.bad:,} bad, in {seconds:.0f} s")
        else:
            print(f"import {job.id} is {job.state}: {rows}, {job.bad:,} bad; see postdate jobs")
        if len(outcome.bad) < outcome.bad_count:
            print(f"{arguments.skip_bad} has the first {len(outcome.bad):,} bad rows")
    return NEGATIVE if outcome.is_given_up else OK

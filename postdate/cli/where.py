"""What `cancel --where` and `postpone` share: they ask for a job by predicate, wait for it and print the outcome."""

import argparse
import os
import uuid

from postdate.cli.command import INTERRUPTED, NEGATIVE, OK, add_bulk, print_json
from postdate.cli.render import Working, body, count, moment, print_table
from postdate.client import admin
from postdate.contract import JobStatus
from postdate.errors import UsageError
from postdate.extras import require_extra

_AWAY_S = 60.0  # how long the broker may be away while we wait for a job
_DONE = {"cancel": "cancelled", "postpone": "postponed"}
_SAMPLE = ("due", "topic", "tag", "key", "size", "body")


def add(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Adds the flags. Without --where nothing is ever changed."""
    parser.add_argument(
        "--where",
        metavar="PREDICATE",
        required=required,
        help="Spark SQL over the columns of pending: see postdate sql",
    )
    parser.add_argument("--dry-run", action="store_true", help="change nothing: count the messages and show ten")
    parser.add_argument(
        "--id", metavar="ID", help="name of the job (default: a new one); the same name again returns the same result"
    )
    parser.add_argument("--no-wait", action="store_true", help="return before the job is done")
    add_bulk(parser)
    parser.add_argument("--memory", metavar="SIZE", default="1g", help="heap of Spark for --dry-run (default: 1g)")


def refuse_flags(arguments: argparse.Namespace) -> None:
    """Raises UsageError for flags of a job where there is none."""
    if arguments.dry_run or arguments.id or arguments.no_wait:
        raise UsageError("--dry-run is for --where and --keys, --id and --no-wait for --where")


def run(arguments: argparse.Namespace, op: str, by_ms: int) -> int:
    if not arguments.where.strip():
        raise UsageError("--where is empty; --where true selects all that waits")
    if arguments.dry_run:
        return _try(arguments, op)
    job_id = arguments.id or uuid.uuid4().hex
    job = admin.ask_job(arguments.addr, op, arguments.where, by_ms, job_id)
    if not (arguments.no_wait or job.is_over):
        with Working() as working:

            def show(at: JobStatus) -> None:
                working.show(f"job {at.id}: {at.state}{', ' + at.step if at.step else ''}", at.done, at.total)

            try:
                job = admin.follow_job(arguments.addr, job.id, show, _AWAY_S)
            except KeyboardInterrupt:
                working.say(f"postdate: the job goes on; postdate jobs {job_id} shows how it is")
                return INTERRUPTED
    if arguments.json:
        print_json(job._asdict())
    elif job.state == "failed":
        print(f"nothing was changed: {job.reason}")
    elif job.state == "done":
        late = f", {job.late:,} came too late" if job.late else ""
        print(f"{count(job.changed, 'message')} {_DONE[job.op]}{late}")
    else:
        print(f"job {job.id} is {job.state}; postdate jobs {job.id} shows how it is")
    return NEGATIVE if job.state == "failed" else OK


def _try(arguments: argparse.Namespace, op: str) -> int:
    require_extra("spark", f"postdate {op} --dry-run")
    from postdate.spark.executor.broker_client import BrokerClient
    from postdate.spark.pending import query  # Spark takes a second to load

    broker = BrokerClient(arguments.addr, arguments.bulk)
    found = query.try_predicate(arguments.where, broker, arguments.memory, os.environ)
    rows = [row | {"due": moment(row["due"]), "body": body(row["body"], whole=False)} for row in found.sample]
    if arguments.json:
        print_json({"count": found.total, "sample": rows})
        return OK
    print(f"{count(found.total, 'message')} would be {_DONE[op]}")
    if rows:
        print()
        print_table(_SAMPLE, [["" if row[name] is None else row[name] for name in _SAMPLE] for row in rows])
    return OK

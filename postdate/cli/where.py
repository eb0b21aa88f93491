"""What `cancel --where` and `postpone` share: they ask for a job by predicate, wait for it and print the outcome."""

import argparse
import os
import uuid
from typing import Any

from postdate.cli.command import INTERRUPTED, NEGATIVE, OK, add_bulk, print_json
from postdate.cli.render import Working, body, count, moment, print_table
from postdate.client import admin
from postdate.contract import ENDED, JobStatus
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


def run(arguments: argparse.Namespace, op: str, by_ms: int) -> int:
    if not arguments.where.strip():
        raise UsageError("--where is empty; --where true selects all that waits")
    if arguments.dry_run:
        return _try(arguments, op)
    job_id = arguments.id or uuid.uuid4().hex
    job = admin.ask_job(arguments.addr, op, arguments.where, by_ms, job_id)._asdict()
    if not arguments.no_wait:
        try:
            job = _wait_for(arguments.addr, job)
        except KeyboardInterrupt:
            with Working() as working:
                working.say(f"postdate: the job goes on; postdate jobs {job_id} shows how it is")
            return INTERRUPTED
    if arguments.json:
        print_json(job)
    else:
        print(_sentence(job))
    return NEGATIVE if job["state"] == "failed" else OK


def _wait_for(address: str | None, job: dict[str, Any]) -> dict[str, Any]:
    if job["state"] in ENDED:
        return job
    with Working() as working:
        return admin.follow_job(
            address, job["id"], lambda at: working.show(_step(at), at.done, at.total), _AWAY_S
        )._asdict()


def _step(job: JobStatus) -> str:
    return f"job {job.id}: {job.state}{', ' + job.step if job.step else ''}"


def _sentence(job: dict[str, Any]) -> str:
    if job["state"] == "failed":
        return f"nothing was changed: {job['reason']}"
    if job["state"] == "done":
        late = f", {job['late']:,} came too late" if job["late"] else ""
        return f"{count(job['changed'], 'message')} {_DONE[job['op']]}{late}"
    return f"job {job['id']} is {job['state']}; postdate jobs {job['id']} shows how it is"


def _try(arguments: argparse.Namespace, op: str) -> int:
    require_extra("spark", f"postdate {op} --dry-run")
    from postdate.spark.executor.broker_client import BrokerClient
    from postdate.spark.pending import query  # Spark takes a second to load

    broker = BrokerClient(arguments.addr, arguments.bulk)
    found = query.try_predicate(arguments.where, broker, arguments.memory, os.environ)
    if arguments.json:
        rows = [row | {"due": moment(row["due"]), "body": body(row["body"], whole=False)} for row in found.sample]
        print_json({"count": found.total, "sample": rows})
        return OK
    print(f"{count(found.total, 'message')} would be {_DONE[op]}")
    if found.sample:
        shown = [[_cell(name, row[name]) for name in _SAMPLE] for row in found.sample]
        print()
        print_table(list(_SAMPLE), shown)
    return OK


def _cell(name: str, value: Any) -> str | int:
    if name == "due":
        return moment(value)
    if name == "body":
        return body(value, whole=False)
    return "" if value is None else value

"""`postdate jobs`: lists work in bulk and how far it is."""

import argparse
from typing import Any

from postdate.cli.command import OK, add_broker, print_json, say_no
from postdate.cli.render import bar, is_terminal, moment, print_facts, print_table, rough
from postdate.cli.values import positive
from postdate.client import admin

HELP = """\
Shows imports, cancels and postponements by predicate: those that wait or run, and the outcome of the last ones.

examples:
  postdate jobs                          the last twenty
  postdate jobs 4f2c77                   one of them, with all details
  postdate jobs 4f2c77 --withdraw        end one that has changed nothing yet

States: loading (an import writes its files), waiting (the pipeline selects its messages, one job after the other),
running (the broker has decided its changes, the table follows), done, failed (it changed nothing, and why).

A job that fails three times before it is decided has failed. Where the table cannot follow a decided job, that is set
aside: messages go on, those that it changed stay changed, and the next start of the pipeline tries again.

exit codes: 0 shown, 1 there is no such job, or it cannot be withdrawn any more, 2 wrong usage, 3 no broker was reached
or it refused, 130 interrupted
"""


_BAR_WIDTH = 10


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", nargs="?", help="one job")
    parser.add_argument("--withdraw", action="store_true", help="end it, if it has changed nothing yet")
    parser.add_argument("--limit", metavar="N", type=positive, default=20, help="at most this many (default: 20)")
    add_broker(parser, _jobs)


def _jobs(arguments: argparse.Namespace) -> int:
    now_ms, listed = admin.list_jobs(arguments.addr)
    jobs = [job._asdict() for job in listed if arguments.id in (None, job.id)]
    if arguments.id is None:
        return _show_all(arguments, jobs[-arguments.limit :], now_ms)
    if not jobs:
        return say_no(f"there is no job {arguments.id}, or it is forgotten: the last thousand are known")
    job = jobs[0]
    if arguments.withdraw:
        job = admin.withdraw_job(arguments.addr, arguments.id)._asdict()
        if job["state"] != "failed":
            return say_no(f"job {arguments.id} is {job['state']}: it cannot be withdrawn any more")
    return _show_one(arguments, job)


def _show_all(arguments: argparse.Namespace, jobs: list[dict[str, Any]], now_ms: int) -> int:
    if arguments.json:
        print_json(jobs)
    elif not jobs:
        print("no jobs")
    else:
        heads = ["job", "what", "state", "rows", "changed", "too late", "asked", "how"]
        rows: list[list[str | int]] = [
            [job["id"], _what(job), job["state"], job["rows"], job["changed"], job["late"],
             f"{rough(max(now_ms - job['at_ms'], 0))} ago", _how(job)]
            for job in jobs
        ]  # fmt: skip
        print_table(heads, rows)
    return OK


def _show_one(arguments: argparse.Namespace, job: dict[str, Any]) -> int:
    if arguments.json:
        print_json(job)
        return OK
    facts = {
        "job": job["id"], "what": _what(job), "state": job["state"], "how": _how(job), "rows": f"{job['rows']:,}",
        "changed": f"{job['changed']:,}", "too late": f"{job['late']:,}", "bad": f"{job['bad']:,}",
        "asked": moment(job["at_ms"]), "ended": moment(job["ended_at_ms"]) if job["ended_at_ms"] else "",
    }  # fmt: skip
    print_facts((name, value) for name, value in facts.items() if value)
    return OK


def _what(job: dict[str, Any]) -> str:
    if job["op"] == "import":
        return f"import into {job['topic']}"
    by = f" by {rough(job['by_ms'])}" if job["by_ms"] else ""
    return f"{job['op']}{by} where {job['where']}"


def _how(job: dict[str, Any]) -> str:
    """Why it failed, or how far it is; on a terminal with a bar."""
    if job["aside"]:
        return f"set aside, the table cannot follow: {job['reason']}; repair that, then start the pipeline again"
    if job["state"] == "failed" or not job["step"]:
        return str(job["reason"])
    done = f" {job['done']:,}" if job["done"] else ""
    if not job["total"]:
        return f"{job['step']}{done}"
    drawn = f"{bar(job['done'], job['total'], _BAR_WIDTH):░<{_BAR_WIDTH}} " if is_terminal() else ""
    return f"{drawn}{job['step']}{done} of {job['total']:,}"

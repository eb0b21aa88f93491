"""`postdate transaction`: list, show, commit and roll back transactions that are open."""

import argparse
from collections.abc import Mapping
from typing import Any

from postdate.cli.command import NEGATIVE, OK, Verbs, is_meant, print_json, say_no
from postdate.cli.render import body, body_fields, count, instant, print_facts, print_table
from postdate.cli.values import positive
from postdate.client import admin

HELP = """\
Lists, shows, commits and rolls back transactions that are open: their producers have sent a half message and not
said yet what becomes of it. The broker asks them; a transaction that it has asked about too often is given up, and
stays until somebody ends it here.

examples:
  postdate transaction list                        the oldest first
  postdate transaction list --given-up --json      those that nobody is asked about any more, for a program
  postdate transaction show 00000000000004D20000000000000005
  postdate transaction commit 00000000000004D20000000000000005 --yes
  postdate transaction rollback 00000000000004D20000000000000005 --yes

A commit delivers the message, or has it wait for its due; a rollback takes care that nobody ever sees it. Neither can
be taken back. Look into the producer's own records first: only they say which is right.

exit codes: 0 done, 1 there is no such transaction, or it has ended otherwise, or nothing was meant, 2 wrong usage, 3 no
broker was reached or it refused, 130 interrupted
"""

_CANNOT_ASK = "the end of a transaction cannot be taken back: give --yes if you mean it"
_ENDED = {
    "committed": "was committed",
    "rolled_back": "was rolled back",
    "already_committed": "was committed before",
    "already_rolled_back": "was rolled back before",
    "unknown": "is not known, or not any more",
}


def add(parser: argparse.ArgumentParser) -> None:
    verbs = Verbs(parser, "id of a transaction", HELP)
    listed = verbs.add("list", _list, "transactions that are open", named=False)
    listed.add_argument("--topic", metavar="T", default="", help="those whose message is for this topic")
    listed.add_argument("--given-up", action="store_true", help="those that nobody is asked about any more")
    listed.add_argument("--limit", metavar="N", type=positive, default=100, help="at most this many (default: 100)")
    verbs.add("show", _show, "one of them, with its message")
    for name, run, summary in (
        ("commit", _commit, "deliver the message of one"),
        ("rollback", _roll_back, "take care that nobody sees it"),
    ):
        verbs.add(name, run, summary).add_argument("--yes", action="store_true", help="do not ask")


def _list(arguments: argparse.Namespace) -> int:
    found = admin.open_transactions(
        arguments.addr, arguments.topic, given_up=arguments.given_up, limit=arguments.limit + 1
    )
    shown = found[: arguments.limit]
    if arguments.json:
        for each in shown:
            print_json(each)
    elif not shown:
        print("no transactions are open" if not arguments.given_up else "no transactions are given up")
    else:
        rows: list[list[str | int]] = [
            [each["id"], each["topic"], each["group"], each["messageId"], instant(each["storedAt"]), each["checks"],
             _next(each)]
            for each in shown
        ]  # fmt: skip
        print_table(["id", "topic", "group", "message", "since", "checks", "next check"], rows)
        if len(found) > len(shown):
            print(f"and more: --limit {2 * arguments.limit} shows them")
    return OK


def _next(each: Mapping[str, Any]) -> str:
    return f"given up {instant(each['givenUp'])}" if each["givenUp"] else instant(each["nextCheck"])


def _show(arguments: argparse.Namespace) -> int:
    found = admin.open_transaction(arguments.addr, arguments.name)
    if isinstance(found, str):
        return say_no(f"the transaction {_ENDED[found]}")
    content = found.pop("body")
    if arguments.json:
        print_json(found | body_fields(content))
        return OK
    print_facts(
        {
            "id": found["id"], "topic": f"{found['topic']}, queue {found['queueId']}", "group": found["group"],
            "message": found["messageId"], "keys": found["keys"] or "none", "since": instant(found["storedAt"]),
            "checks": count(found["checks"], "check"), "next check": _next(found),
            "properties": "  ".join(f"{name}={value}" for name, value in found["properties"].items()),
            "body": body(content, whole=True),
        }
    )  # fmt: skip
    return OK


def _commit(arguments: argparse.Namespace) -> int:
    return _end(arguments, is_commit=True)


def _roll_back(arguments: argparse.Namespace) -> int:
    return _end(arguments, is_commit=False)


def _end(arguments: argparse.Namespace, *, is_commit: bool) -> int:
    found = admin.open_transaction(arguments.addr, arguments.name)
    if not isinstance(found, str):
        verb = "Commit" if is_commit else "Roll back"
        question = f"{verb} the message {found['messageId']} of topic {found['topic']}?"
        if not (arguments.yes or is_meant(question, _CANNOT_ASK)):
            return say_no("nothing was ended")
    outcome = admin.end_transaction(arguments.addr, arguments.name, is_commit=is_commit)
    if arguments.json:
        print_json({"id": arguments.name, "outcome": outcome})
    else:
        print(f"the transaction {_ENDED[outcome]}")
    wanted = ("committed", "already_committed") if is_commit else ("rolled_back", "already_rolled_back")
    return OK if outcome in wanted else NEGATIVE

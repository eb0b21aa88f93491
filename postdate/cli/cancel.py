"""`postdate cancel`: cancels one message, or by predicate a job; answers with a sentence and an exit code."""

import argparse

from postdate.cli import where
from postdate.cli.command import NEGATIVE, OK, add_broker, add_timeout, print_json
from postdate.cli.values import instant
from postdate.client import connect
from postdate.errors import UsageError
from postdate.message import Cancelled

HELP = """\
Cancels a waiting message, by the handle that `postdate send` printed, or by topic, key and due time; or all that a
predicate selects.

examples:
  postdate cancel djEgb3JkZXJzIHBvc3RkYXRlIDE3OTg3OTA0MDAwMDAgN0YwMDAwMDE=
  postdate cancel --topic orders --key order-17 --due 2027-01-01T08:00:00+01:00
  postdate cancel --topic orders --key order-17 --due 1798790400000
  postdate cancel --where "topic = 'sms' and due < timestamp '2027-01-01 08:00:00'" --dry-run
  postdate cancel --where "key = 'order-17' and date(due) = date '2027-01-01'"

The answer is one of: cancelled (it will never be delivered), delivered (the cancel came too late), unknown (no such
message was found; should one still come up, it is cancelled). A cancel by predicate is a job of the pipeline, over all
waiting messages, in the order of all sends; the answer says how many it cancelled and how many came too late. Times in
a predicate are in UTC; columns are those of postdate sql.

exit codes: 0 cancelled, 1 delivered or unknown, or there is no such topic, or the predicate was refused, 2 wrong usage,
3 no broker was reached or it refused, 130 interrupted (a job goes on: see postdate jobs)
"""

_SENTENCES = {
    Cancelled.CANCELLED: "cancelled: the message will never be delivered",
    Cancelled.DELIVERED: "delivered: the message was out before the cancel came",
    Cancelled.UNKNOWN: "unknown: no such message was found; should one still come up, it is cancelled",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("handle", metavar="HANDLE", nargs="?", help="the handle that send printed")
    parser.add_argument("--topic", metavar="T", help="the topic, without a handle")
    parser.add_argument("--key", metavar="K", help="the first key of the message")
    parser.add_argument("--due", metavar="TIME", type=instant, help="when it is due: ISO 8601 or epoch milliseconds")
    where.add(parser, required=False)
    add_timeout(parser)
    add_broker(parser, _cancel)


def _cancel(arguments: argparse.Namespace) -> int:
    by_key = [arguments.topic, arguments.key, arguments.due]
    if arguments.where is not None:
        if arguments.handle is not None or by_key != [None] * 3:
            raise UsageError("give either --where, or a handle, or all of --topic, --key and --due")
        return where.run(arguments, "cancel", 0)
    if arguments.dry_run or arguments.id or arguments.no_wait:
        raise UsageError("--dry-run, --id and --no-wait are for --where")
    if (None in by_key) if arguments.handle is None else (by_key != [None] * 3):
        raise UsageError("give either a handle, or all of --topic, --key and --due, or --where")
    with connect(arguments.addr, timeout=arguments.timeout / 1_000) as client:
        answer = client.cancel_key(*by_key) if arguments.handle is None else client.cancel(arguments.handle)
    if arguments.json:
        print_json({"outcome": answer.value})
    else:
        print(_SENTENCES[answer])
    return OK if answer is Cancelled.CANCELLED else NEGATIVE

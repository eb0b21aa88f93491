"""`postdate cancel`: cancels one message, or by predicate a job; answers with a sentence and an exit code."""

import argparse

from postdate.cli import key_files, named, where
from postdate.cli.command import NEGATIVE, OK, add_broker, add_timeout, print_json
from postdate.cli.render import instant as show_instant
from postdate.cli.values import instant
from postdate.client import AsyncClient, CancelledMessage, connect
from postdate.errors import UsageError
from postdate.message import Cancelled

HELP = """\
Cancels a waiting message, by the handle that `postdate send` printed, or by topic, key and due time; or all messages of
a topic and key that wait; or all of the keys of a file; or all that a predicate selects.

examples:
  postdate cancel djEgb3JkZXJzIHBvc3RkYXRlIDE3OTg3OTA0MDAwMDAgN0YwMDAwMDE=
  postdate cancel --topic orders --key order-17                     all of that key that wait
  postdate cancel --topic orders --key order-17 --only              if there is just one
  postdate cancel --topic orders --key order-17 --due 2027-01-01T08:00:00+01:00
  postdate cancel --topic orders --key order-17 --due 1798790400000
  postdate cancel --topic orders --keys paid.csv --column order_id --dry-run
  postdate cancel --topic orders --keys paid.txt --output answers.csv        goes on where answers.csv ends
  postdate cancel --where "topic = 'sms' and due < timestamp '2027-01-01 08:00:00'" --dry-run
  postdate cancel --where "key = 'order-17' and date(due) = date '2027-01-01'"

The answer is one of: cancelled (it will never be delivered), delivered (the cancel came too late), unknown (no such
message was found; should one still come up, it is cancelled). By topic and key it has a line for each message of the
key, also for those that are not cancelled; with --only, nothing is changed where several wait.

With --keys FILE it does so for each key of a file of this machine: text with a key in each line (or - for stdin), CSV
with a header, or Parquet. It prints how many messages were cancelled or delivered, and how many keys are unknown.

A cancel by predicate is a job of the pipeline, over all waiting messages, in the order of all sends; the answer says
how many it cancelled and how many came too late. Times in a predicate are in UTC; columns are those of postdate sql.

exit codes: 0 cancelled, of a key at least one message; 1 delivered or unknown, or there is no such message or topic, or
the predicate was refused, 2 wrong usage, 3 no broker was reached or it refused, 130 interrupted (a job goes on: see
postdate jobs)
"""

_SENTENCES = {
    Cancelled.CANCELLED: "cancelled: the message will never be delivered",
    Cancelled.DELIVERED: "delivered: the message was out before the cancel came",
    Cancelled.UNKNOWN: "unknown: no such message was found; should one still come up, it is cancelled",
}


def add(parser: argparse.ArgumentParser) -> None:
    named.add(parser)
    parser.add_argument(
        "--due", metavar="TIME", type=instant,
        help="only what is due then: ISO 8601 or epoch milliseconds; --key is then the first key",
    )  # fmt: skip
    key_files.add(parser)
    where.add(parser, required=False)
    add_timeout(parser)
    add_broker(parser, _cancel)


def _cancel(arguments: argparse.Namespace) -> int:
    if arguments.keys is not None:
        if arguments.due is not None:
            raise UsageError("--due names one message, by --topic and --key")
        return key_files.run(arguments, _order(arguments))
    key_files.refuse_flags(arguments)
    if arguments.where is not None:
        if arguments.handle or arguments.topic or arguments.key or arguments.due or arguments.only:
            raise UsageError("give either --where, or a handle, or --topic and --key")
        return where.run(arguments, "cancel", 0)
    where.refuse_flags(arguments)
    messages = named.read(arguments, ", or --where")
    if arguments.due is not None and (arguments.handle or arguments.only):
        raise UsageError("--due names one message, by --topic and --key")
    with connect(arguments.addr, timeout=arguments.timeout / 1_000) as client:
        if arguments.handle:
            answer = client.cancel(arguments.handle)
        elif arguments.due is not None:
            answer = client.cancel_key(arguments.topic, arguments.key, arguments.due)
        else:
            return _print_all(arguments, client.cancel(**messages))
    if arguments.json:
        print_json({"outcome": answer.value})
    else:
        print(_SENTENCES[answer])
    return OK if answer is Cancelled.CANCELLED else NEGATIVE


def _order(arguments: argparse.Namespace) -> key_files.Order:
    async def change(client: AsyncClient, key: str) -> list[CancelledMessage]:
        return await client.cancel(topic=arguments.topic, key=key, only=arguments.only)

    return key_files.Order("cancelling", Cancelled.CANCELLED.value, change)


def _print_all(arguments: argparse.Namespace, messages: list[CancelledMessage]) -> int:
    if not messages:
        return named.say_none(arguments)
    for message in messages:
        if arguments.json:
            print_json(message._asdict() | {"outcome": message.outcome.value})
        else:
            due = f", it was due {show_instant(message.due_at_ms)}" if message.due_at_ms else ""
            print(f"{message.id}  {message.outcome.value}{due}")
    return OK if any(message.outcome is Cancelled.CANCELLED for message in messages) else NEGATIVE

"""`postdate find`: finds messages by key and says where they are."""

import argparse

from postdate.cli import named
from postdate.cli.command import OK, REFUSED, add_broker, print_json, say_no
from postdate.cli.render import body, body_fields, instant, is_terminal, print_facts
from postdate.cli.values import positive
from postdate.client import admin
from postdate.client.admin import FoundMessage

HELP = """\
Finds the messages of a topic by one of their keys, waiting or not, and says where they are (times in UTC).

examples:
  postdate find orders order-17                      by one of its keys, or by its id
  postdate find orders order-17 --limit 3 --json     the newest three, for a program

A message waits in the wheel (it is due soon), in the log, or in the table of the pipeline alone. The broker finds it
as long as it waits, and for the time of retention (72 h by default) after it became visible. Where the table cannot be
asked, stderr says why. The newest stand first.

exit codes: 0 found, 1 there is no such message or no such topic, 2 wrong usage, 3 no broker was reached or it refused,
or the table could not be asked, 130 interrupted
"""

_WORDS = {
    "waiting": "waiting until {due}{place}",
    "visible": "visible in queue {queue_id} at offset {queue_offset} since {at}",
    "cancelled": "cancelled",
    "deleted": "deleted with its topic",
    "half": "the half of a transaction that is open",
    "unknown": "delivered or cancelled long ago",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", metavar="TOPIC", help="the topic that it was sent to")
    parser.add_argument("key", metavar="KEY", help="one of its keys, or its id")
    parser.add_argument("--limit", metavar="N", type=positive, default=32, help="at most this many (default: 32)")
    add_broker(parser, _find)


def _find(arguments: argparse.Namespace) -> int:
    found, unread = admin.find(arguments.addr, arguments.topic, arguments.key, arguments.limit)
    if unread:
        say_no(f"the table cannot be asked, and may have more: {unread}")
    elif not found:
        return named.say_none(arguments)
    for number, message in enumerate(found):
        if arguments.json:
            fields = message._asdict()
            print_json(fields | body_fields(fields.pop("body")))
        elif is_terminal():  # a line would be longer than most terminals are wide
            print("\n" if number else "", end="")
            print_facts({"id": message.id, "where": _where(message), "body": body(message.body, whole=False)})
        else:
            print(f"{message.id}  {_where(message)}  {body(message.body, whole=False)}")
    return REFUSED if unread else OK


def _where(message: FoundMessage) -> str:
    words = _WORDS.get(message.state, message.state)
    place = f" in the {message.place}" if message.place else ""
    fields = message._asdict() | {"place": place}
    return words.format(**fields, due=instant(message.due_at_ms or 0), at=instant(message.at_ms))

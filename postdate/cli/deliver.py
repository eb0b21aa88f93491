"""`postdate deliver`: delivers messages that wait at once."""

import argparse

from postdate.cli import named
from postdate.cli.command import add_broker, add_timeout
from postdate.client import connect

HELP = """\
Delivers a waiting message now, by the handle that `postdate send` printed; or all messages of a topic and key that
wait.

examples:
  postdate deliver djEgb3JkZXJzIHBvc3RkYXRlIDE3OTg3OTA0MDAwMDAgN0YwMDAwMDE=
  postdate deliver --topic orders --key order-17
  postdate deliver --topic orders --key order-17 --only --json

For each message the answer is one of: moved (it waited, and is out now), delivered (it was out before), unknown (no
such message waits). With --only, nothing is changed where several messages of the key wait.

exit codes: 0 at least one was delivered by this, 1 none was, or there is no such message or topic, 2 wrong usage, 3 no
broker was reached or it refused, 130 interrupted
"""


def add(parser: argparse.ArgumentParser) -> None:
    named.add(parser)
    add_timeout(parser)
    add_broker(parser, _deliver)


def _deliver(arguments: argparse.Namespace) -> int:
    messages = named.read(arguments, "")
    with connect(arguments.addr, timeout=arguments.timeout / 1_000) as client:
        return named.print_moved(arguments, client.deliver_now(**messages))

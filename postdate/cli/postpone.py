"""`postdate postpone`: gives messages that wait another due, one by one or by predicate a job."""

import argparse
from datetime import timedelta

from postdate.cli import key_files, named, where
from postdate.cli.command import add_broker, add_timeout
from postdate.cli.values import instant as instant_ms
from postdate.cli.values import shift, span
from postdate.client import AsyncClient, MovedMessage, connect
from postdate.errors import UsageError
from postdate.message import Moved
from postdate.spans import instant

HELP = """\
Delivers a waiting message later or earlier, by the handle that `postdate send` printed; or all messages of a topic and
key that wait; or all of the keys of a file; or all that a predicate selects.

examples:
  postdate postpone djEgb3JkZXJzIHBvc3RkYXRlIDE3OTg3OTA0MDAwMDAgN0YwMDAwMDE= --delay 30m      30 minutes from now
  postdate postpone --topic orders --key order-17 --at 2027-01-01T08:00:00+01:00
  postdate postpone --topic orders --key order-17 --by 2h                                     2 hours later
  postdate postpone --topic orders --key order-17 --by=-10m --only                            10 minutes earlier
  postdate postpone --topic orders --keys late.csv --column order_id --by 2h --output answers.csv
  postdate postpone --where "topic = 'sms' and due < timestamp '2027-01-01 08:00:00'" --by 2h
  postdate postpone --where "properties['campaign'] = 'autumn'" --by 1d --dry-run
  postdate postpone --where "key = 'order-17'" --by 30m --id postpone-17

For each message the answer is one of: moved (it waited, and has its new due), delivered (it was out before), unknown
(no such message waits). A time that has passed delivers it at once. The handle of a message stays good. With --only,
nothing is changed where several messages of the key wait.

With --keys FILE it does so for each key of a file of this machine: text with a key in each line (or - for stdin), CSV
with a header, or Parquet. With --output, a command that was interrupted goes on where it ended: no key is moved twice.

With --where it is a job of the pipeline, over all waiting messages, in the order of all sends; the answer says how many
it postponed and how many came too late. Times in a predicate are in UTC. Columns: due, topic, tag, key, size,
properties, body, queue, level, arrival; see postdate sql.

exit codes: 0 done: at least one message was moved, 1 none was, or there is no such message or topic, or the predicate
was refused, 2 wrong usage, 3 no broker was reached or it refused, 130 interrupted (a job goes on: see postdate jobs)
"""


def add(parser: argparse.ArgumentParser) -> None:
    named.add(parser)
    wish = parser.add_mutually_exclusive_group(required=True)
    wish.add_argument("--at", metavar="TIME", type=instant_ms, help="deliver it then: ISO 8601 or epoch milliseconds")
    wish.add_argument("--delay", metavar="SPAN", type=span, help="deliver it this long from now")
    wish.add_argument("--by", metavar="SPAN", type=shift, help="how much later: 30s, 10m, 2h, 7d; earlier: --by=-10m")
    key_files.add(parser)
    where.add(parser, required=False)
    add_timeout(parser)
    add_broker(parser, _postpone)


def _postpone(arguments: argparse.Namespace) -> int:
    if arguments.by == 0:
        raise UsageError("--by 0 changes nothing")
    at = None if arguments.at is None else instant(arguments.at)
    delay, by = (None if ms is None else timedelta(milliseconds=ms) for ms in (arguments.delay, arguments.by))
    if arguments.keys is not None:

        async def change(client: AsyncClient, key: str) -> list[MovedMessage]:
            return await client.postpone(topic=arguments.topic, key=key, at=at, delay=delay, by=by, only=arguments.only)

        return key_files.run(
            arguments, key_files.Order("postponing", Moved.MOVED.value, change, is_repeatable=by is None)
        )
    key_files.refuse_flags(arguments)
    if arguments.where is not None:
        if arguments.handle or arguments.topic or arguments.key or arguments.only:
            raise UsageError("give either --where, or a handle, or --topic and --key")
        if arguments.by is None or arguments.by < 0:
            raise UsageError("--where goes with --by, and a span to later")
        return where.run(arguments, "postpone", arguments.by)
    where.refuse_flags(arguments)
    messages = named.read(arguments, ", or --where")
    with connect(arguments.addr, timeout=arguments.timeout / 1_000) as client:
        return named.print_moved(arguments, client.postpone(at=at, delay=delay, by=by, **messages))

"""`postdate postpone`: messages that wait are delivered later than they were to be."""

import argparse

from postdate.cli import where
from postdate.cli.command import add_broker
from postdate.cli.values import span
from postdate.errors import UsageError

HELP = """\
Postpones every waiting message that a predicate selects, wherever it waits: one job, in the order of all sends.

examples:
  postdate postpone --where "topic = 'sms' and due < timestamp '2027-01-01 08:00:00'" --by 2h
  postdate postpone --where "properties['campaign'] = 'autumn'" --by 1d --dry-run
  postdate postpone --where "key = 'order-17'" --by 30m --id postpone-17

Times in a predicate are in UTC. The answer says how many it postponed and how many came too late: were delivered, or
cancelled otherwise, before the pipeline came to the job. The handle of a message stays good: it cancels it at its new
time. Columns: due, topic, tag, key, size, properties, body, queue, level, arrival; see postdate sql.

exit codes: 0 done, 1 the predicate was refused, 2 wrong usage, 3 no broker was reached or it refused, 130 interrupted
(the job goes on: see postdate jobs)
"""


def add(parser: argparse.ArgumentParser) -> None:
    where.add(parser, required=True)
    parser.add_argument("--by", metavar="SPAN", type=span, required=True, help="how much later: 30s, 10m, 2h, 7d")
    add_broker(parser, _postpone)


def _postpone(arguments: argparse.Namespace) -> int:
    if arguments.by == 0:
        raise UsageError("--by 0 changes nothing")
    return where.run(arguments, "postpone", arguments.by)

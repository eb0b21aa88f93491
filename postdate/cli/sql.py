"""`postdate sql`: prints what a query of Spark SQL finds in everything that waits."""

import argparse
import csv
import os
import sys
from collections.abc import Sequence
from typing import Any

import orjson

from postdate.cli.command import OK, add_address, add_bulk, set_run
from postdate.cli.render import print_table
from postdate.cli.values import positive
from postdate.errors import UsageError
from postdate.extras import require_extra

HELP = """\
Answers a query of Spark SQL over the view pending: all waiting messages, near, far and in the pipeline's table.

examples:
  postdate sql "select topic, count(*), min(due) from pending group by topic"
  postdate sql "select due, key, properties['customer'] from pending where topic = 'orders' order by due limit 10"
  postdate sql "select * from pending where tag = 'sms'" --format csv --limit 100000 > sms.csv
  postdate sql "select p.key from pending p join parquet.`paid.parquet` q on p.key = q.id" --files

Columns: due (timestamp, in UTC), topic, tag, key, size (bytes of the record), properties (map), body (binary), queue
(its number), level, arrival. Neither broker nor pipeline waits for it. It starts a Spark of its own, which
takes some seconds and needs Java 17. With --files a query may also read files of this machine, as parquet.`path`,
csv.`path` or json.`path`, to join them with what waits. No query writes, runs a script or calls methods of Java.

exit codes: 0 answered, 2 wrong usage, or a query that Spark does not understand, 3 no broker was reached, or no Java
"""

_QUERIES = ("select", "with", "values", "from", "table", "describe", "desc", "explain", "show")


def add(parser: argparse.ArgumentParser) -> None:
    add_flag = parser.add_argument
    add_flag("query", metavar="QUERY", help="select ... from pending ...")
    add_flag("--format", choices=("table", "csv", "json"), default="table", help="format of the rows (default: table)")
    add_flag("--limit", metavar="N", type=positive, default=1_000, help="at most this many rows (default: 1000)")
    add_flag("--files", action="store_true", help="let the query read files of this machine: parquet.`path`")
    add_address(parser)
    add_bulk(parser)
    add_flag("--memory", metavar="SIZE", default="1g", help="heap of Spark (default: 1g)")
    set_run(parser, _sql)


def _sql(arguments: argparse.Namespace) -> int:
    if not arguments.query.lstrip("( \n\t").lower().startswith(_QUERIES):
        raise UsageError("only queries are answered here: select ... from pending ...")
    require_extra("spark", "postdate sql")
    from postdate.spark.executor.broker_client import BrokerClient
    from postdate.spark.pending import query  # Spark takes a second to load, and no other command needs it

    broker = BrokerClient(arguments.addr, arguments.bulk)
    found = query.answer(
        arguments.query, broker, arguments.limit, arguments.memory, os.environ, reads_files=arguments.files
    )
    _print(found.names, found.rows, arguments.format)
    if found.is_cut:
        print(f"... and more than {arguments.limit:,} rows: see --limit", file=sys.stderr)
    return OK


def _print(names: Sequence[str], rows: Sequence[Sequence[Any]], how: str) -> None:
    if how == "json":
        for row in rows:
            print(orjson.dumps(dict(zip(names, row, strict=True)), default=_as_text).decode())
    elif how == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows([_text(cell) for cell in row] for row in rows)
    else:
        shown = [[cell if isinstance(cell, int) else _text(cell) for cell in row] for row in rows]
        print_table(list(names), shown)


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    if isinstance(cell, bytes):
        return _as_text(cell)
    return cell.isoformat() if hasattr(cell, "isoformat") else str(cell)


def _as_text(cell: Any) -> str:
    """What JSON does not have: bytes as text, where they are some."""
    if isinstance(cell, bytes):
        try:
            return cell.decode()
        except UnicodeDecodeError:
            return cell.hex()
    return str(cell)

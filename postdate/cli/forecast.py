"""`postdate forecast`: shows what is due in the time ahead, as bars."""

import argparse
import shutil
import sys
from typing import Any, NamedTuple

from postdate.cli.command import OK, REFUSED, UNCOUNTED, add_broker, print_json
from postdate.cli.render import bar, is_terminal, moment, print_table
from postdate.client import admin

HELP = """\
Shows how many messages are due in the time ahead: the next hour by minute, the next day by hour, the next month by day
(in UTC), each with its busiest second.

examples:
  postdate forecast                                  all topics
  postdate forecast --topic orders --span hour       one topic, the next hour
  postdate forecast --json                           for a program

The first bar is the present minute, hour or day; messages due earlier in it are out already.

exit codes: 0 shown, 1 there is no such topic, 2 wrong usage, 3 no broker was reached, it refused, or the table could
not be counted (what is known is shown), 130 interrupted
"""

_WIDTH = 40  # of bars in a file
_OTHER_COLUMNS = 46  # of a terminal: all but the bars
_WIDTH_MIN, _WIDTH_MAX = 10, 70


class _Span(NamedTuple):
    title: str
    unit: str
    bars: int
    shown: slice  # of a moment such as 2027-01-01T08:15:00.000Z


_SPANS = {
    "hour": _Span("the next hour, by minute", "minute", 60, slice(11, 16)),
    "day": _Span("the next day, by hour", "hour", 24, slice(5, 13)),
    "month": _Span("the next month, by day", "day", 31, slice(0, 10)),
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topic", metavar="T", default="", help="only this topic")
    parser.add_argument("--span", choices=tuple(_SPANS), help="only this span (default: all three)")
    add_broker(parser, _forecast)


def _forecast(arguments: argparse.Namespace) -> int:
    spans = {name: _SPANS[name] for name in ([arguments.span] if arguments.span else _SPANS)}
    found = {
        name: admin.forecast(arguments.addr, arguments.topic, span.unit, span.bars) for name, span in spans.items()
    }
    unread = next((forecast["unread"] for forecast in found.values() if forecast["unread"]), "")
    if arguments.json:
        print_json(found)
        return REFUSED if unread else OK
    for number, (name, forecast) in enumerate(found.items()):
        if number:
            print()
        _print_span(_SPANS[name], forecast)
    if unread:
        print(f"postdate: {UNCOUNTED}: {unread}", file=sys.stderr)
    return REFUSED if unread else OK


def _print_span(span: _Span, forecast: dict[str, Any]) -> None:
    bars, of_topic = forecast["bars"], f" for {forecast['topic']}" if forecast["topic"] else ""
    total, most = sum(each["rows"] for each in bars), max(each["rows"] for each in bars)
    least = "at least " if forecast["unread"] else ""
    print(f"{span.title}{of_topic}: {least}{total:,} due")
    if total:
        width = _WIDTH
        if is_terminal():
            width = max(_WIDTH_MIN, min(_WIDTH_MAX, shutil.get_terminal_size().columns - _OTHER_COLUMNS))
        rows = [
            [moment(each["from_ms"])[span.shown].replace("T", " "), each["rows"], bar(each["rows"], most, width),
             f"{each['busiest_rows']:,} at {moment(each['busiest_ms'])[11:19]}" if each["rows"] else ""]
            for each in bars
        ]  # fmt: skip
        print()
        print_table([f"{span.unit}", "due", "", "busiest second"], rows)

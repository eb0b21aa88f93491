"""`postdate status`: the state of broker and pipeline, once or again and again."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from postdate.cli.command import OK, add_broker, print_json
from postdate.cli.render import (
    Cell,
    console,
    count,
    draw_facts,
    draw_table,
    fact_lines,
    is_terminal,
    moment,
    rough,
    size,
    table,
)
from postdate.cli.values import positive
from postdate.client import admin
from postdate.contract import BULK
from postdate.errors import PostdateError

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = """\
Shows the state of broker and pipeline: what is late and why, waiting messages, the pipeline's horizon, its table and
its last batches.

examples:
  postdate status
  postdate status --watch                            again every 2 s, until Ctrl-C
  postdate status --watch 10 --batches 20
  postdate status --json                             the broker's whole answer, for a program

Near messages are due within the lead (60 s by default) and lie in memory. Far ones lie in the log until the
pipeline has taken them into its table; it promotes them to memory before they are due. The broker
rescues messages from the log that the pipeline does not promote in time.

exit codes: 0 shown, 2 wrong usage, 3 no broker was reached or it refused, 130 interrupted
"""

Status = Mapping[str, Any]
Facts = list[tuple[str, str]]

_WATCH_S = 2
_WIDE_COLUMNS = 110  # from here on two sections stand side by side

# Columns of the last batches: head, field of a report, and how it is shown.
_BATCH_COLUMNS: tuple[tuple[str, str, Callable[[Any], Cell]], ...] = (
    ("rows in", "rows_in", int), ("promoted", "promoted", int), ("cancelled", "cancelled", int), ("late", "late", int),
    ("merged", "merged_rows", int), ("files", "files", int), ("MB", "bytes", lambda number: number / 1e6),
    ("seconds", "total_s", float),
)  # fmt: skip
_STEPS = (("ingest", "ingest_s"), ("promote", "promote_s"), ("stage", "stage_s"), ("merge", "merge_s"))


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch", metavar="SECONDS", type=positive, nargs="?", const=_WATCH_S,
        help=f"show it again after this many seconds (without a number: {_WATCH_S})",
    )  # fmt: skip
    parser.add_argument(
        "--batches", metavar="N", type=positive, default=8, help="show at most this many batches (default: 8)"
    )
    add_broker(parser, _status)


def _status(arguments: argparse.Namespace) -> int:
    status = admin.status(arguments.addr)
    if arguments.watch is None:
        _print(status, arguments)
        return OK
    try:
        if is_terminal() and not arguments.json:
            _watch_on_terminal(status, arguments)
        else:
            _watch_in_lines(status, arguments)
    except KeyboardInterrupt:
        return OK  # the usual end of watching
    raise AssertionError("watching has no other end")


def _print(status: Status, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(status)
    elif is_terminal():
        terminal = console()
        terminal.print(draw(status, arguments.batches, terminal.width))
    else:
        print(*overview(status, arguments.batches), sep="\n")


def _watch_in_lines(status: Status, arguments: argparse.Namespace) -> None:
    """Prints one status after the other. Never returns: Ctrl-C ends it."""
    while True:
        _print(status, arguments)
        print("", end="" if arguments.json else "\n", flush=True)
        while True:
            time.sleep(arguments.watch)
            try:
                status = admin.status(arguments.addr)
                break
            except PostdateError as error:  # the broker may be back at the next look
                print(f"postdate: {error}", file=sys.stderr, flush=True)


def _watch_on_terminal(status: Status, arguments: argparse.Namespace) -> None:
    """Draws each status over the one before. Never returns: Ctrl-C ends it."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    terminal, problem = console(), ""
    with Live(console=terminal, screen=True, auto_refresh=False) as live:
        while True:
            notice = [Text(f"\n{problem}", style="bold red")] if problem else []
            live.update(Group(draw(status, arguments.batches, terminal.width), *notice), refresh=True)
            time.sleep(arguments.watch)
            try:
                status, problem = admin.status(arguments.addr), ""
            except PostdateError as error:
                problem = str(error)  # beside the last known status: the broker may be back at the next look


# -- two ways to show it ----------------------------------------------------------------------------------------


class _Batches(NamedTuple):
    heads: list[str]
    rows: list[list[Cell]]
    last: str  # the steps of the last one


def overview(status: Status, batch_count: int) -> list[str]:
    """The status as plain lines, with the newest batches first."""
    lines = [_title(status)]
    for head, facts in _sections(status).items():
        lines += ["", head, *(f"  {line}" for line in fact_lines(facts))]
    batches = _batches(_reports(status)[:batch_count])
    if batches.rows:
        lines += ["", "last batches", *(f"  {line}" for line in table(batches.heads, batches.rows))]
        lines += [f"  {batches.last}"] if batches.last else []
    return lines


def draw(status: Status, batch_count: int, columns: int) -> "RenderableType":
    """The same as `rich` draws it: a panel for each section, side by side where the terminal is wide."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    panels: list[RenderableType] = [
        Panel(draw_facts(facts), title=head, title_align="left", border_style="dim")
        for head, facts in _sections(status).items()
    ]
    across = 2 if columns >= _WIDE_COLUMNS else 1
    grid = Table.grid(expand=True)
    for _ in range(across):
        grid.add_column(ratio=1)
    for start in range(0, len(panels), across):
        grid.add_row(*panels[start : start + across])
    parts: list[RenderableType] = [Text(_title(status), style="bold"), grid]
    batches = _batches(_reports(status)[:batch_count])
    if batches.rows:
        content = Group(draw_table(batches.heads, batches.rows), Text(batches.last, style="dim"))
        parts.append(Panel(content, title="last batches", title_align="left", border_style="dim"))
    return Group(*parts)


# -- what it says -----------------------------------------------------------------------------------------------


def _title(status: Status) -> str:
    return f"postdate {status['broker']['version']}, {moment(status['broker']['now_ms'])}"


def _sections(status: Status) -> dict[str, Facts]:
    """Facts by section, without sections that have none."""
    broker, far = status["broker"], status["far"]
    sections = {
        "late": [fact for late in status["late"] for fact in _late_facts(late)],
        "warnings": [(each["group"], each["warning"]) for each in status["warnings"]],
        "broker": list(_broker_facts(broker)),
        "waiting": list(_waiting_facts(broker, far)),
        "pipeline": list(_pipeline_facts(status)),
        "parts": list(status["parts"].items()),
    }
    return {head: facts for head, facts in sections.items() if facts}


def _late_facts(late: Status) -> Iterator[tuple[str, str]]:
    yield "what", late["what"]
    yield "since", f"{moment(late['since_ms'])}, now by {rough(late['late_ms'])} at most"
    yield "why", late["why"]
    yield "to do", late["to_do"]


def _broker_facts(broker: Status) -> Iterator[tuple[str, str]]:
    yield "data", f"{broker['data']}, flush {broker['flush']}"
    yield "log", size(broker["log_bytes"])
    yield "disk", f"{size(broker['disk_free_bytes'])} of {size(broker['disk_bytes'])} are free"
    if broker["log_problem"]:
        yield "problem", broker["log_problem"]


def _waiting_facts(broker: Status, far: Status) -> Iterator[tuple[str, str]]:
    in_table = max(0, far["rows_in"] - far["rows_out"])
    numbers = {"near": broker["waiting_near"], "far": broker["waiting_far"], "table": in_table}
    meanings = {
        "near": "due soon, in memory",
        "far": "in the log alone",
        "table": "rows of the table: messages, and cancels",
        "beside": "rows of imports and postponements that no batch has taken in",
    }
    if far.get("beside_rows"):
        numbers["beside"] = far["beside_rows"]
    width = max(len(f"{number:,}") for number in numbers.values())
    for name, number in numbers.items():
        yield name, f"{number:>{width},}  {meanings[name]}"
    if broker["tombstones"]:
        yield "cancels", f"{broker['tombstones']:>{width},}  wait for the messages that they are about"


def _pipeline_facts(status: Status) -> Iterator[tuple[str, str]]:
    far, now_ms = status["far"], status["broker"]["now_ms"]
    if status["pipeline"]["note"]:
        yield "note", f"it {status['pipeline']['note']}"
    if not far["epoch"]:
        yield "state", "none has registered yet: far messages stay in the log and are on time"
        return
    if far["horizon"] <= 0:
        yield "state", "has promoted nothing yet: what is due meanwhile comes from the log"
    elif far["bulk_since_ms"]:
        yield "state", f"late or away: bulk promotes in its place since {moment(far['bulk_since_ms'])}"
    elif not far["is_served"]:
        yield "state", "late or away: what is due meanwhile comes from the log, or from the table through bulk"
    if far["horizon"] > 0:
        ahead_ms = far["horizon"] - now_ms
        # 71 s, not 1 min 11 s: one to two minutes are usual.
        span = f"{abs(ahead_ms) // 1_000} s" if abs(ahead_ms) < 600_000 else rough(abs(ahead_ms))
        # The time of day; with its day where that is not the broker's.
        at, now = moment(far["horizon"]), moment(now_ms)
        at = at[11:19] if at[:10] == now[:10] else f"{at[:19]}Z"
        yield "horizon", f"promoted up to {at}, {span} {'ahead' if ahead_ms >= 0 else 'behind'}"
    yield "backlog", f"{count(far['backlog'], 'far row')} that it has not taken yet"
    yield "rescued", f"{count(far['rescued'], 'message')} since the broker was started"
    yield "by bulk", f"{count(far['bulk_promoted'], 'message')} promoted in its place since then"
    place = status["table"] or "in a place that no pipeline has told"
    report = next((each for each in reversed(status["reports"]) if "table_files" in each), None)
    files = f": {count(report['table_files'], 'file')}, {size(report.get('table_bytes', 0))}" if report else ""
    yield "table", f"{place}{files}"


def _reports(status: Status) -> list[Status]:
    """Reports, the newest first: of batches, and of the times for which bulk stands in."""
    newest = [status["stand_in"]] if status.get("stand_in") else []
    return [*newest, *reversed(status["reports"])]


def _batches(reports: Sequence[Status]) -> _Batches:
    columns = [column for column in _BATCH_COLUMNS if any(column[1] in report for report in reports)]
    rows: list[list[Cell]] = []
    for report in reports:
        at = moment(report["at_ms"])[11:19] if "at_ms" in report else ""
        at += " by bulk" if report.get("master") == BULK else ""
        rows.append([at, *(shown(report[field]) if field in report else "" for _, field, shown in columns)])
    steps = [f"{name} {reports[0][field]:.2f} s" for name, field in _STEPS if reports and field in reports[0]]
    last = f"the last one: {', '.join(steps)}" if steps else ""
    return _Batches(["time", *(head for head, _, _ in columns)], rows, last)

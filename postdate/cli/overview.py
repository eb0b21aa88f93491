"""What `postdate status` shows: a broker's answer in people's words. Nothing here prints, asks or reads a clock."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from postdate.cli.show import Cell, count, moment, rough, size, table

Told = Mapping[str, Any]

# Columns of the last batches: head, field of a report, and how it is shown.
_BATCH_COLUMNS: tuple[tuple[str, str, Callable[[Any], Cell]], ...] = (
    ("rows in", "rows_in", int), ("promoted", "promoted", int), ("cancelled", "cancelled", int), ("late", "late", int),
    ("merged", "merged_rows", int), ("files", "files", int), ("MB", "bytes", lambda number: number / 1e6),
    ("seconds", "total_s", float),
)  # fmt: skip
_STEPS = (("ingest", "ingest_s"), ("promote", "promote_s"), ("stage", "stage_s"), ("merge", "merge_s"))
_LATE_MS = 100  # less than this is a disk that syncs


def overview(told: Told, batch_count: int) -> list[str]:
    """The lines, with the newest batches first."""
    broker, far, reports = told["broker"], told["far"], told["reports"]
    return [
        f"postdate {broker['version']}, {moment(broker['now_ms'])}",
        *_section("broker", _of_broker(broker)),
        *_section("waiting", _of_waiting(broker, far)),
        *_section("pipeline", _of_pipeline(told)),
        *_section("parts", told["parts"].items()),
        *_batches(reports[::-1][:batch_count]),
    ]


def _section(head: str, rows: Any) -> Iterator[str]:
    rows = list(rows)
    if rows:
        width = max(len(name) for name, _ in rows)
        yield from ("", head, *(f"  {name:<{width}}  {text}" for name, text in rows))


def _of_broker(broker: Told) -> Iterator[tuple[str, str]]:
    yield "data", f"{broker['data']}, flush {broker['flush']}"
    yield "log", size(broker["log_bytes"])
    yield "disk", f"{size(broker['disk_free_bytes'])} of {size(broker['disk_bytes'])} are free"
    if broker["late_ms"] >= _LATE_MS:
        yield "late", f"the earliest message that waits is late by {rough(broker['late_ms'])}"
    if broker["log_problem"]:
        yield "problem", broker["log_problem"]


def _of_waiting(broker: Told, far: Told) -> Iterator[tuple[str, str]]:
    in_table = max(0, far["rows_in"] - far["rows_out"])
    numbers = {"near": broker["waiting_near"], "far": broker["waiting_far"], "table": in_table}
    width = max(len(f"{number:,}") for number in numbers.values())
    meanings = {"near": "due soon, in memory", "far": "in the log alone", "table": "rows of the pipeline's table"}
    for name, number in numbers.items():
        yield name, f"{number:>{width},}  {meanings[name]}"
    if broker["tombstones"]:
        yield "cancels", f"{broker['tombstones']:>{width},}  wait for the messages that they are about"


# -- the pipeline -----------------------------------------------------------------------------------------------


def _of_pipeline(told: Told) -> Iterator[tuple[str, str]]:
    far, now_ms = told["far"], told["broker"]["now_ms"]
    if not far["epoch"]:
        yield "state", "none has registered yet: far messages stay in the log and are on time"
        return
    if far["horizon"] <= 0:
        yield "state", "has promoted nothing yet: what is due meanwhile comes from the log"
    elif not far["is_served"]:
        yield "state", "late or away: what is due meanwhile comes from the log"
    if far["horizon"] > 0:
        yield "horizon", _horizon(far["horizon"], now_ms)
    yield "backlog", f"{count(far['backlog'], 'far row')} that it has not taken yet"
    yield "rescued", f"{count(far['rescued'], 'message')} since the broker was started"
    yield "table", _table(told)


def _horizon(horizon_at_ms: int, now_ms: int) -> str:
    ahead_ms = horizon_at_ms - now_ms
    where = f"{_seconds(abs(ahead_ms))} {'ahead' if ahead_ms >= 0 else 'behind'}"
    return f"promoted up to {_time(horizon_at_ms, now_ms)}, {where}"


def _seconds(span_ms: int) -> str:
    """71 s, not 1 min 11 s: what is usual is one to two minutes."""
    return f"{span_ms // 1_000} s" if span_ms < 600_000 else rough(span_ms)


def _time(at_ms: int, now_ms: int) -> str:
    """The time of day; with its day where that is not the broker's."""
    text, now = moment(at_ms), moment(now_ms)
    return text[11:19] if text[:10] == now[:10] else f"{text[:19]}Z"


def _table(told: Told) -> str:
    report = next((each for each in reversed(told["reports"]) if "table_files" in each), None)
    place = told["table"] or "in a place that no pipeline has told"
    if report is None:
        return place
    return f"{place}: {count(report['table_files'], 'file')}, {size(report.get('table_bytes', 0))}"


# -- batches ----------------------------------------------------------------------------------------------------


def _batches(reports: Sequence[Told]) -> list[str]:
    if not reports:
        return []
    columns = [column for column in _BATCH_COLUMNS if any(column[1] in report for report in reports)]
    rows = [
        [_batch_time(report), *(shown(report[field]) if field in report else "" for _, field, shown in columns)]
        for report in reports
    ]
    lines = table(["time", *(head for head, _, _ in columns)], rows)
    return ["", "last batches", *(f"  {line}" for line in lines), *_last_steps(reports[0])]


def _batch_time(report: Told) -> str:
    return moment(report["at_ms"])[11:19] if "at_ms" in report else ""


def _last_steps(report: Told) -> list[str]:
    steps = [f"{name} {report[field]:.2f} s" for name, field in _STEPS if field in report]
    return [f"  the last one: {', '.join(steps)}"] if steps else []

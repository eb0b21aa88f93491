"""What commands print: values as people read them, tables, facts, progress.

On a terminal `rich` draws tables and progress; it is imported when something is drawn and not before, because `send`
must not wait for it. Into a file or a pipe go plain lines that do not depend on the width of anything. What a program
reads is `--json` and passes none of this. Times are in UTC, as ISO 8601 with milliseconds.
"""

import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

Cell = str | int | float

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PREVIEW_CHARACTERS = 60
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))
_SIZES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
_GAP = "  "
_EIGHTHS = " ▏▎▍▌▋▊▉"
_AMOUNT = re.compile(r"[0-9.,]+ (bytes?|[KMGT]B)")  # as `size` writes it
_FOLDED_CHARACTERS = 36  # longer texts of a table may fold

# What a word of state looks like on a terminal, wherever it stands in a table.
_STYLES = {
    "done": "green", "visible": "green", "failed": "red", "running": "cyan", "loading": "cyan", "waiting": "yellow",
    "cancelled": "magenta", "default": "dim",
}  # fmt: skip


# -- values -----------------------------------------------------------------------------------------------------


def moment(at_ms: int) -> str:
    """ISO 8601 in UTC: 2027-01-01T07:00:00.000Z."""
    try:
        at = _EPOCH + timedelta(milliseconds=at_ms)
    except OverflowError:
        return f"{at_ms} ms"  # beyond the year 9999
    return f"{at.strftime('%Y-%m-%dT%H:%M:%S')}.{at_ms % 1_000:03d}Z"


def instant(at_ms: int) -> str:
    """A moment and its epoch milliseconds, which is what an error or another command names."""
    text = moment(at_ms)
    return f"{text} ({at_ms})" if text.endswith("Z") else text


def span(span_ms: int) -> str:
    """A span in its two largest units: 1 h 30 min."""
    parts = []
    for name, unit_ms in _UNITS:
        count, span_ms = divmod(span_ms, unit_ms)
        if count:
            parts.append(f"{count} {name}")
    return " ".join(parts[:2]) or "0 ms"


def rough(span_ms: int) -> str:
    """As `span`, but from ten seconds on rounded to seconds: the rest of a delay of 30 min is not 29 min 59 s."""
    return span(span_ms if abs(span_ms) < 10_000 else (span_ms + 500) // 1_000 * 1_000)


def count(number: int, noun: str) -> str:
    """1 message, 1,000 messages."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(byte_count: int) -> str:
    """999 bytes, 1.5 MB: in thousands, as disks are sold."""
    for name, unit in _SIZES:
        if byte_count >= unit:
            return f"{byte_count / unit:,.1f} {name}"
    return count(byte_count, "byte")


def body(content: bytes, *, whole: bool) -> str:
    """A body in one line: as text where it is text, else as Python writes bytes."""
    try:
        text = json.dumps(content.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        text = repr(content)
    return text if whole or len(text) <= _PREVIEW_CHARACTERS else f"{text[:_PREVIEW_CHARACTERS]}..."


def body_fields(content: bytes) -> dict[str, str]:
    """A body in JSON: as text where it is text."""
    try:
        return {"body": content.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(content).decode()}


def bar(number: int, most: int, width: int) -> str:
    """A bar in eighths of a character, as wide as `width` for the highest number. Every number above 0 is visible."""
    eighths = -(-number * width * 8 // most) if number else 0
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


# -- tables and facts -------------------------------------------------------------------------------------------


def is_terminal() -> bool:
    """Whether a person reads stdout."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def console() -> "Console":
    """The terminal behind stdout, for `rich`."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Prints columns: numbers to the right with thousands marked, texts to the left."""
    if is_terminal():
        console().print(draw_table(heads, rows))
    else:
        print(*table(heads, rows), sep="\n")


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """A table as plain lines."""
    numeric = _numeric_columns(heads, rows)
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(heads), *cells]
    ]


def draw_table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> "Table":
    """A table as `rich` draws it, without columns that are empty. Only columns of long texts fold."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    columns = [[_cell(row[index]) for row in rows] for index in range(len(heads))]
    kept = [index for index, column in enumerate(columns) if not rows or any(column)]
    numeric = _numeric_columns(heads, rows)
    for index in kept:
        is_number = numeric[index] or all(map(_AMOUNT.fullmatch, columns[index]))
        is_long = max(map(len, columns[index]), default=0) > _FOLDED_CHARACTERS
        drawn.add_column(
            heads[index], justify="right" if is_number else "left", no_wrap=not is_long, overflow="fold"
        )  # fmt: skip
    for row in zip(*(columns[index] for index in kept), strict=True):
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return drawn


def print_facts(facts: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
    """Prints one line for each name and value, with the values below each other."""
    pairs = list(facts.items() if isinstance(facts, Mapping) else facts)
    if is_terminal():
        console().print(draw_facts(pairs))
        return
    for line in fact_lines(pairs):
        print(line)


def fact_lines(facts: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in facts), default=0)
    return [f"{name:<{width}}  {value}" for name, value in facts]


def draw_facts(facts: Sequence[tuple[str, str]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    drawn = Table.grid(padding=(0, 2))
    drawn.add_column(no_wrap=True, style="bold")
    drawn.add_column(overflow="fold")
    for name, value in facts:
        drawn.add_row(name, Text(value, style=_STYLES.get(value, "")))
    return drawn


def _numeric_columns(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Which columns hold numbers; some of a column may be missing, but not all."""
    columns = [[row[index] for row in rows if row[index] != ""] for index in range(len(heads))]
    return [bool(column) and not any(isinstance(cell, str) for cell in column) for column in columns]


def _cell(cell: Cell) -> str:
    return cell if isinstance(cell, str) else f"{cell:,.2f}" if isinstance(cell, float) else f"{cell:,}"


# -- progress ---------------------------------------------------------------------------------------------------


class Working:
    """Progress of long work, on stderr and only on a terminal: a spinner, what happens, a bar where the end is known.

    It has a descriptor of its own: while Spark runs, the usual stderr is set aside.
    """

    def __init__(self, what: str = "") -> None:
        self._what = what
        self._progress: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Self:
        sys.stderr.flush()
        self._out = os.fdopen(os.dup(2), "w", encoding="utf-8")
        if self._what:
            self.show(self._what)
        return self

    def __exit__(self, *_: object) -> None:
        self._wipe()
        self._out.close()

    def say(self, sentence: str) -> None:
        """Prints a sentence that stays, also in a file."""
        self._wipe()
        print(sentence, file=self._out, flush=True)

    def show(self, what: str, done: int = 0, total: int = 0) -> None:
        """Shows how far the work is. Without a total it counts."""
        if not self._out.isatty() or os.environ.get("TERM") == "dumb":
            return
        if self._progress is None:
            self._start()
        assert self._progress is not None
        counted = f"{done:,} of {total:,}" if total else f"{done:,}" if done else ""
        self._progress.update(
            self._task, description=what, completed=done, total=total or None, counted=counted, refresh=True
        )

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
            TextColumn("{task.fields[counted]}", markup=False), TimeElapsedColumn(),
            console=Console(file=self._out), transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=None, counted="")
        self._progress.start()

    def _wipe(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

"""Values as people read them: instants, spans, bodies, tables.

Times are shown in UTC, as ISO 8601 with milliseconds. Nothing here prints or reads a clock.
"""

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PREVIEW_CHARACTERS = 60
_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))
_SIZES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3))
_GAP = "  "


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
    """As `span`, rounded to seconds from ten seconds on: what is left of a round delay is not 29 min 59 s."""
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


Cell = str | int | float


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Lines of columns: numbers to the right with thousands marked, texts to the left. Head lines align with them."""
    numeric = [_is_numeric([row[index] for row in rows]) for index in range(len(heads))]
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    return [
        _GAP.join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [list(heads), *cells]
    ]


def _is_numeric(column: Sequence[Cell]) -> bool:
    """A number may be missing, but not all of them."""
    are_numbers = [not isinstance(cell, str) for cell in column]
    return any(are_numbers) and all(
        is_number or cell == "" for is_number, cell in zip(are_numbers, column, strict=True)
    )


def _cell(cell: Cell) -> str:
    return cell if isinstance(cell, str) else f"{cell:,.2f}" if isinstance(cell, float) else f"{cell:,}"

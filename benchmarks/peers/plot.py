"""Bars on a logarithmic scale, as SVG: a card with its own background, readable on white and on dark pages."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from benchmarks.report import shown

WIDTH, MARGIN = 760, 20
NAME_WIDTH, VALUE_WIDTH = 190, 92
BAR_HEIGHT, BAR_GAP, ROW_GAP = 13, 2, 11
HEAD_HEIGHT, FOOT_HEIGHT = 76, 30
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, SOFT, GRID, CARD, EDGE = "#212529", "#5c636a", "#e9ecef", "#ffffff", "#ced4da"
OURS, THEIRS = ("#1864ab", "#74b0e4"), ("#868e96", "#c4cad0")  # for each series


class Row(NamedTuple):
    name: str
    values: Sequence[float | None]  # one for each series
    is_ours: bool = False


def bars(title: str, unit: str, series: Sequence[str], rows: Sequence[Row]) -> str:
    """A system without any value has no row; one that lacks some says so in their place."""
    rows = [row for row in rows if any(value is not None for value in row.values)]
    scale = Scale([value for row in rows for value in row.values if value is not None])
    row_height = len(series) * (BAR_HEIGHT + BAR_GAP) + ROW_GAP
    bottom = HEAD_HEIGHT + len(rows) * row_height
    parts = [*_head(title, unit, series), *_grid(scale, bottom)]
    for number, row in enumerate(rows):
        parts += _row(row, scale, HEAD_HEIGHT + number * row_height, row_height)
    height = bottom + FOOT_HEIGHT
    card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{CARD}" stroke="{EDGE}"/>'
    frame = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} font-family="{FONT}" font-size="12">',
            f"<title>{escape(title)}</title>",
            card,
            *parts,
            "</svg>\n",
        ]
    )


class Scale:
    """Whole decades around all values. What is not above 0 has no place on it, and no length."""

    def __init__(self, values: Sequence[float]) -> None:
        logs = [math.log10(value) for value in values if value > 0] or [0.0]
        self.low = math.floor(min(logs) - 0.1)  # the shortest bar has a length, too
        self.high = max(math.ceil(max(logs)), self.low + 1)
        self.left, self.right = MARGIN + NAME_WIDTH, WIDTH - MARGIN - VALUE_WIDTH

    def x(self, value: float) -> float:
        if value <= 0:
            return self.left
        return self.left + (math.log10(value) - self.low) / (self.high - self.low) * (self.right - self.left)

    def decades(self) -> list[float]:
        step = max((self.high - self.low) // 7, 1)
        return [10.0**power for power in range(self.low, self.high + 1, step)]


def _head(title: str, unit: str, series: Sequence[str]) -> list[str]:
    parts = [
        f'<text x="{MARGIN}" y="30" font-size="15" font-weight="600" fill="{INK}">{escape(title)}</text>',
        f'<text x="{WIDTH - MARGIN}" y="52" text-anchor="end" fill="{SOFT}">{escape(unit)}, logarithmic scale</text>',
    ]
    x = MARGIN
    for number, name in enumerate(series if len(series) > 1 else ()):
        parts += [
            _box(x, 42, 10, OURS[number]),
            _box(x + 12, 42, 10, THEIRS[number]),
            f'<text x="{x + 28}" y="52" fill="{SOFT}">{escape(name)}</text>',
        ]
        x += 52 + 7 * len(name)
    return parts


def _box(x: float, y: float, width: float, colour: str, height: float = 11) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}" rx="1.5" fill="{colour}"/>'


def _grid(scale: Scale, bottom: float) -> list[str]:
    parts = []
    for value in scale.decades():
        x = scale.x(value)
        parts.append(f'<path d="M{x:.1f} {HEAD_HEIGHT - 8}V{bottom}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="{SOFT}">{tick(value)}</text>')
    return parts


def tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _row(row: Row, scale: Scale, top: float, height: float) -> list[str]:
    weight = ' font-weight="600"' if row.is_ours else ""
    middle = top + (height - ROW_GAP) / 2 + 4
    parts = [
        f'<text x="{scale.left - 10}" y="{middle:.1f}" text-anchor="end" fill="{INK}"{weight}>{escape(row.name)}</text>'
    ]
    for number, value in enumerate(row.values):
        y = top + number * (BAR_HEIGHT + BAR_GAP)
        colour = (OURS if row.is_ours else THEIRS)[number]
        end = scale.left if value is None else scale.x(value)
        if value is not None:
            parts.append(_box(scale.left, y, end - scale.left, colour, BAR_HEIGHT))
        text = "no figure" if value is None else shown(max(value, 0))
        parts.append(f'<text x="{end + 6:.1f}" y="{y + BAR_HEIGHT - 2:.1f}" font-size="11" fill="{SOFT}">{text}</text>')
    return parts

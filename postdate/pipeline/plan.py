"""How work is cut into tasks: windows of due, each small enough for one task's memory.

What a window holds is estimated from the statistics of row groups, as if rows were spread evenly inside one. Windows
are halved until they are small enough; a burst at one instant is halved by arrival instead.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from postdate.pipeline.files import Group, Window

TASK_ROWS, TASK_BYTES = 250_000, 128 << 20


class Limits(NamedTuple):
    """Of one task."""

    rows: int = TASK_ROWS
    bytes: int = TASK_BYTES


DEFAULT = Limits()


class _Spread:
    """Row groups as columns."""

    def __init__(self, groups: Iterable[Group]) -> None:
        table = np.array([group[:6] for group in groups], np.float64).reshape(-1, 6)
        self.rows, self.bytes, self.due_low, self.due_high, self.arrival_low, self.arrival_high = table.T

    def load(self, window: Window, limits: Limits) -> float:
        """How full a task of this window would be: 1 is just right."""
        share = _share(self.due_low, self.due_high, window.due_low + 1, window.due_high)
        if window.arrival_low or window.arrival_high < 1 << 62:
            share = share * _share(self.arrival_low, self.arrival_high, window.arrival_low, window.arrival_high - 1)
        return max(float(self.rows @ share) / limits.rows, float(self.bytes @ share) / limits.bytes)


def _share(low: np.ndarray, high: np.ndarray, start: int, stop: int) -> np.ndarray:
    """How much of each range low..high lies in start..stop, both inclusive."""
    inside = np.minimum(high, float(stop)) - np.maximum(low, float(start)) + 1
    share: np.ndarray = np.clip(inside, 0, None) / (high - low + 1)
    return share


def slices(groups: list[Group], window: Window, limits: Limits = DEFAULT) -> list[Window]:
    """Cuts a window into such that fit one task each, in order."""
    spread = _Spread(groups)
    if not len(spread.rows):
        return []
    low = max(window.due_low, int(spread.due_low.min()) - 1)
    high = min(window.due_high, int(spread.due_high.max()))
    return list(_packed(_halved(spread, window._replace(due_low=low, due_high=high), limits), spread, limits))


def _halved(spread: _Spread, window: Window, limits: Limits) -> Iterator[Window]:
    if spread.load(window, limits) <= 1:
        yield window
    elif window.due_high - window.due_low > 1:
        middle = (window.due_low + window.due_high) // 2
        yield from _halved(spread, window._replace(due_high=middle), limits)
        yield from _halved(spread, window._replace(due_low=middle), limits)
    else:
        yield from _halved_by_arrival(spread, window, limits)


def _halved_by_arrival(spread: _Spread, window: Window, limits: Limits) -> Iterator[Window]:
    low = max(window.arrival_low, int(spread.arrival_low.min()))
    high = min(window.arrival_high, int(spread.arrival_high.max()) + 1)
    if spread.load(window, limits) <= 1 or high - low <= 1:
        yield window
        return
    middle = (low + high) // 2
    yield from _halved_by_arrival(spread, window._replace(arrival_high=middle), limits)
    yield from _halved_by_arrival(spread, window._replace(arrival_low=middle), limits)


def _packed(windows: Iterable[Window], spread: _Spread, limits: Limits) -> Iterator[Window]:
    """Brings neighbours together that fit one task."""
    held: Window | None = None
    for window in windows:
        joined = _joined(held, window)
        if joined is not None and spread.load(joined, limits) <= 1:
            held = joined
        else:
            if held is not None:
                yield held
            held = window
    if held is not None:
        yield held


def _joined(left: Window | None, right: Window) -> Window | None:
    if left is None or (left.arrival_low, left.arrival_high) != (right.arrival_low, right.arrival_high):
        return None
    return left._replace(due_high=right.due_high) if left.due_high == right.due_low else None

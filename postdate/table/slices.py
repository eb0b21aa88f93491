"""Slices of a window: which files hold the rows that fall due, and how they are split to fit one task's memory.

Estimates what a window holds from the statistics of row groups, as if rows were spread evenly inside each. Slices are
of equal size, so that no core waits for another. A burst at one instant is halved by arrival instead.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from postdate.table.files import RowGroup, Slice, Window, touches
from postdate.table.format import File

TASK_ROWS, TASK_BYTES = 250_000, 128 << 20


class Limits(NamedTuple):
    """The rows and bytes of one task, and how many tasks run at once."""

    rows: int = TASK_ROWS
    bytes: int = TASK_BYTES
    slots: int = 1


DEFAULT = Limits()
_TOLERANCE = 0.1  # a task may be fuller by this share: estimates are no better

# -- planning -------------------------------------------------------------------------------------------------

RowGroups = Callable[[str], list[RowGroup]]  # the row groups of a file


def plan_promotion(
    files: Collection[File], row_groups: RowGroups, window: Window, taken: int, limits: Limits = DEFAULT
) -> list[Slice]:
    """Plans to promote a window. Nothing of files after the far row `taken` was promoted: all that is due counts."""
    untaken = {file.path for file in files if file.is_untaken(taken)}
    touched = [file for file in files if touches(file, _window_of(file, window, untaken))]
    return split_files(touched, row_groups, window, limits, untaken)


def split_files(
    files: Collection[File],
    row_groups: RowGroups,
    window: Window,
    limits: Limits = DEFAULT,
    untaken: Collection[str] = (),
) -> list[Slice]:
    """Splits a window of some files into slices, each with the files that it touches."""
    groups = {
        file.path: [group for group in row_groups(file.path) if touches(group, _window_of(file, window, untaken))]
        for file in files
    }
    slices = []
    for piece in split_window([group for found in groups.values() for group in found], window, limits):
        touched = [
            file.path
            for file in files
            if any(touches(group, _window_of(file, piece, untaken)) for group in groups[file.path])
        ]
        slices.append(Slice(piece, touched, [path for path in touched if path in untaken]))
    return slices


def _window_of(file: File, window: Window, untaken: Collection[str]) -> Window:
    """The window for a file. Nothing of a file that was just made has been promoted before."""
    return window.whole if file.path in untaken else window


# -- splitting ------------------------------------------------------------------------------------------------


class _Spread:
    """Row groups as columns, to estimate what a window holds."""

    def __init__(self, groups: Iterable[RowGroup]) -> None:
        table = np.array([group[:6] for group in groups], np.float64).reshape(-1, 6)
        self.rows, self.bytes, self.due_low, self.due_high, self.arrival_low, self.arrival_high = table.T

    def load(self, window: Window, limits: Limits) -> float:
        """Returns how full a task of this window is; 1 is full."""
        share = _share(self.due_low, self.due_high, window.due_low + 1, window.due_high)
        if window.arrival_low or window.arrival_high < 1 << 62:
            share = share * _share(self.arrival_low, self.arrival_high, window.arrival_low, window.arrival_high - 1)
        return max(float(self.rows @ share) / limits.rows, float(self.bytes @ share) / limits.bytes)


def _share(low: np.ndarray, high: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Returns how much of each range low..high lies in start..stop, both inclusive."""
    inside = np.minimum(high, float(stop)) - np.maximum(low, float(start)) + 1
    share: np.ndarray = np.clip(inside, 0, None) / (high - low + 1)
    return share


def split_window(groups: list[RowGroup], window: Window, limits: Limits = DEFAULT) -> list[Window]:
    """Splits a window into slices that one task can hold, in order."""
    spread = _Spread(groups)
    if not len(spread.rows):
        return []
    low = max(window.due_low, int(spread.due_low.min()) - 1)
    high = min(window.due_high, int(spread.due_high.max()))
    return list(_split_evenly(spread, window._replace(due_low=low, due_high=high), limits))


def _split_evenly(spread: _Spread, window: Window, limits: Limits) -> Iterator[Window]:
    load = spread.load(window, limits)
    share = load / _task_count(load, limits.slots)
    while window.due_low < window.due_high:
        left = max(round(load / share), math.ceil(load - _TOLERANCE), 1)
        first = _first_slice(spread, window, limits, load / left) if left > 1 else window
        if spread.load(first, limits) > 1 + _TOLERANCE:
            yield from _halve_by_arrival(spread, first, limits)
        else:
            yield first
        window = window._replace(due_low=first.due_high)
        load = spread.load(window, limits)


def _task_count(load: float, slots: int) -> int:
    """Returns the fewest tasks that hold a load; where not all run at once, a multiple of the slots."""
    count = max(math.ceil(load - _TOLERANCE), 1)
    return count if count <= slots else -(-count // slots) * slots


def _first_slice(spread: _Spread, window: Window, limits: Limits, share: float) -> Window:
    """Returns the longest beginning of a window that holds no more than a share; one instant at least."""
    low, high = window.due_low + 1, window.due_high
    while low < high:
        middle = (low + high + 1) // 2
        if spread.load(window._replace(due_high=middle), limits) <= share:
            low = middle
        else:
            high = middle - 1
    return window._replace(due_high=low)


def _halve_by_arrival(spread: _Spread, window: Window, limits: Limits) -> Iterator[Window]:
    low = max(window.arrival_low, int(spread.arrival_low.min()))
    high = min(window.arrival_high, int(spread.arrival_high.max()) + 1)
    if spread.load(window, limits) <= 1 or high - low <= 1:
        yield window
        return
    middle = (low + high) // 2
    yield from _halve_by_arrival(spread, window._replace(arrival_high=middle), limits)
    yield from _halve_by_arrival(spread, window._replace(arrival_low=middle), limits)

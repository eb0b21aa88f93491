"""Counting and finding in columns of numbers, where numpy's own way would sort or copy too much."""

import numpy as np


def counts(values: np.ndarray) -> list[tuple[int, int]]:
    """How often each value occurs; values are small or close together."""
    if not len(values):
        return []
    low = int(values.min())
    counted = np.bincount(values - low)
    hits = np.flatnonzero(counted)
    return list(zip((hits + low).tolist(), counted[hits].tolist(), strict=True))


def add(counters: list[int], numbers: np.ndarray) -> None:
    """Counts every number in its counter."""
    for number, count in counts(numbers):
        counters[number] += count


def subtract(counters: list[int], numbers: np.ndarray) -> None:
    for number, count in counts(numbers):
        counters[number] -= count


def places_of(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Where values that ascend are among those wanted, which ascend too."""
    starts, stops = (np.searchsorted(values, wanted, side) for side in ("left", "right"))
    found = stops - starts
    places: np.ndarray = np.arange(found.sum()) + np.repeat(starts - (np.cumsum(found) - found), found)
    return places


def among(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which values are among those wanted, which ascend. numpy.isin would sort all values, and they are many."""
    if not len(wanted):
        return np.zeros(len(values), np.bool_)
    places = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
    found: np.ndarray = wanted[places] == values
    return found

"""Who stands behind whom: the (due, arrival) order of a queue, by columns."""

import numpy as np


def overtaken(rank: np.ndarray, low: np.ndarray) -> np.ndarray:
    """For each place b: whether some a with low[b] <= a < b has a larger rank.

    A maximum over ranges: windows of 1, 2, 4, ... places; a range is answered at the width where two windows cover it.
    """
    places = np.arange(len(rank))
    lengths = places - low
    found = np.zeros(len(rank), np.bool_)
    windows, width = rank, 1
    while width <= len(rank):
        chosen = places[(lengths >= width) & (lengths < 2 * width)]
        if len(chosen):
            largest = np.maximum(windows[low[chosen]], windows[chosen - width])
            found[chosen] = largest > rank[chosen]
        windows = np.maximum(windows[:-width], windows[width:])
        width *= 2
    return found


def ranks(due_at_ms: np.ndarray, arrival: np.ndarray) -> np.ndarray:
    """The place of each in (due, arrival) order."""
    ranks = np.empty(len(due_at_ms), np.int64)
    ranks[np.lexsort((arrival, due_at_ms))] = np.arange(len(due_at_ms))
    return ranks

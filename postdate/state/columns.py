"""Work on many rows at once, by columns.

The first half turns rows of a batch into the rows that queues, the wheel, the far queue and the index keep, without a
loop over them. The second half counts and finds in columns of numbers where numpy's own way would sort or copy too
much.
"""

import numpy as np

from postdate.state.topics import GONE
from postdate.storage.batch import MORE_KEYS
from postdate.storage.layout import ENTRY, FAR, SINGLE


class Grouped:
    """A column of queue numbers, sorted into groups of one number; each group keeps its order."""

    def __init__(self, target: np.ndarray) -> None:
        counted = counts(target)
        self.order: np.ndarray | None = None
        if len(counted) > 1:
            # numpy sorts 16-bit integers by radix; GONE becomes the largest there, so that group comes last.
            narrow = counted[-1][0] < 65_535
            self.order = np.argsort(target.astype(np.uint16) if narrow else target, kind="stable")
            if narrow and counted[0][0] == GONE:
                counted = [*counted[1:], counted[0]]
        self.groups: list[tuple[int, int, int]] = []  # (number, start, stop) in the new order
        self.first: dict[int, int] = {}  # by number: where its group stands in its queue
        stop = 0
        for number, count in counted:
            self.groups.append((number, stop, stop + count))
            stop += count

    def places(self, nowhere: int) -> np.ndarray:
        """The queue offset of each message, in the old order; `nowhere` for those whose topic is gone."""
        parts = [
            np.arange(stop - start) + self.first[number] if number != GONE else np.full(stop - start, nowhere)
            for number, start, stop in self.groups
        ]
        places = np.concatenate(parts)
        if self.order is None:
            return places
        scattered = np.empty_like(places)
        scattered[self.order] = places
        return scattered


def entries_of(offset: np.ndarray, size: np.ndarray, tag: np.ndarray) -> np.ndarray:
    entries = np.empty(len(offset), ENTRY)
    entries["offset"], entries["size"], entries["tag"] = offset, size, tag
    return entries


def singles_of(rows: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Makes entries of the wheel from rows of a batch or of the far queue."""
    singles = np.empty(len(rows), SINGLE)
    singles["offset"] = offset
    for name in ("size", "queue", "tag_hash", "unique_hash", "key_hash"):
        singles[name] = rows[name]
    return singles


def far_rows_of(rows: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Makes rows of the far queue from rows of a batch."""
    far = np.zeros(len(rows), FAR)
    far["arrival"] = offset
    for name in ("due", "unique_hash", "key_hash", "size", "queue", "tag_hash", "kind", "level"):
        far[name] = rows[name]
    return far


def key_rows_of(rows: np.ndarray, offset: np.ndarray, others: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes and offsets for the index of keys, message by message. `others` has, for each row with MORE_KEYS, the
    hashes of the user keys that the row has no room for.
    """
    hashes = np.stack([rows["unique_hash"], rows["key_hash"]], axis=1).ravel()
    offsets = np.repeat(offset, 2)
    if others:
        more = np.flatnonzero(rows["flags"] & MORE_KEYS)
        lengths = [len(each) for each in others]
        after = np.repeat(2 * more + 2, lengths)
        hashes = np.insert(hashes, after, np.array([each for part in others for each in part], np.uint64))
        offsets = np.insert(offsets, after, np.repeat(offset[more], lengths))
    is_key = hashes != 0
    return hashes[is_key], offsets[is_key]


# -- counting and finding ---------------------------------------------------------------------------------------


def counts(values: np.ndarray) -> list[tuple[int, int]]:
    """How often each value occurs, ascending by value. Values are small or close together."""
    if not len(values):
        return []
    low = int(values.min())
    counted = np.bincount(values - low)
    hits = np.flatnonzero(counted)
    return list(zip((hits + low).tolist(), counted[hits].tolist(), strict=True))


def add(counters: list[int], numbers: np.ndarray) -> None:
    for number, count in counts(numbers):
        counters[number] += count


def subtract(counters: list[int], numbers: np.ndarray) -> None:
    for number, count in counts(numbers):
        counters[number] -= count


def places_of(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The places of the ascending values that are among those wanted, which ascend too."""
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

"""Rows of a batch as the queues, the wheel and the far queue keep them, by columns.

Many messages go from one fixed-width form into another here, without a loop over them; what becomes of them is decided
by whoever calls.
"""

from collections.abc import Callable

import numpy as np

from postdate.state.arrays import counts
from postdate.state.far import FAR
from postdate.state.topics import GONE
from postdate.state.wheel import SINGLE
from postdate.storage.batch import MORE_KEYS
from postdate.storage.queue import ENTRY


class Grouped:
    """A column of queue numbers brought together by number, each group in its old order."""

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
        """The queue offset of each, in the old order; `nowhere` for those that went nowhere."""
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
    """Entries of a queue."""
    entries = np.empty(len(offset), ENTRY)
    entries["offset"], entries["size"], entries["tag"] = offset, size, tag
    return entries


def singles_of(rows: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Entries of the wheel, of rows of a batch or of the far queue."""
    singles = np.empty(len(rows), SINGLE)
    singles["offset"] = offset
    for name in ("size", "queue", "tag_hash", "unique_hash", "key_hash"):
        singles[name] = rows[name]
    return singles


def far_rows_of(rows: np.ndarray, offset: np.ndarray) -> np.ndarray:
    far = np.zeros(len(rows), FAR)
    far["arrival"] = offset
    for name in ("due", "unique_hash", "key_hash", "size", "queue", "tag_hash", "kind", "level"):
        far[name] = rows[name]
    return far


def key_rows_of(
    rows: np.ndarray, offset: np.ndarray, others_of: Callable[[int, int], list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Hashes and offsets for the index of keys, message by message. `others_of` gives the hashes of the user keys that
    a row has no room for, by the record's offset and size.
    """
    hashes = np.stack([rows["unique_hash"], rows["key_hash"]], axis=1).ravel()
    offsets = np.repeat(offset, 2)
    more = np.flatnonzero(rows["flags"] & MORE_KEYS)
    if len(more):
        others = [others_of(int(offset[hit]), int(rows["size"][hit])) for hit in more]
        lengths = [len(each) for each in others]
        behind = np.repeat(2 * more + 2, lengths)
        hashes = np.insert(hashes, behind, np.array([each for part in others for each in part], np.uint64))
        offsets = np.insert(offsets, behind, np.repeat(offset[more], lengths))
    is_key = hashes != 0
    return hashes[is_key], offsets[is_key]

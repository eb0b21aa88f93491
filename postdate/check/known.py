"""What is known of the records that a queue entry may point at: from rows of the log, from indexes of chunks."""

import numpy as np

from postdate.state.wheel import NEVER
from postdate.storage.batch import MESSAGE, ROW, Batch
from postdate.storage.chunk import FLAG_OWN_ARRIVAL

# One row per record, ascending by offset.
KNOWN = np.dtype(
    [
        ("offset", "<i8"),
        ("due", "<i8"),  # 0 = at once
        ("arrival", "<i8"),
        ("came_at", "<i8"),  # when it came into the wheel; NEVER where that is not known
        ("identity", "<i8"),  # equal for two copies of one message
        ("size", "<i8"),
        ("queue", "<i4"),
        ("tag_hash", "<i4"),
        ("unique_hash", "<u8"),
        ("key_hash", "<u8"),
        ("kind", "u1"),
        ("level", "u1"),
    ]
)


class Collected:
    """The rows of all batches of the log, with what their batch says, put together once at the end."""

    def __init__(self) -> None:
        self._rows = bytearray()
        self._batches: list[tuple[int, int, int, int]] = []  # row count, offset, at_ms, latest due that came at once

    def add(self, batch: Batch, near_until: int) -> None:
        if batch.row_count:
            self._rows += batch.rows
            self._batches.append((batch.row_count, batch.offset, batch.at_ms, near_until))

    def known(self) -> np.ndarray:
        rows = np.frombuffer(self._rows, ROW)
        counts, offsets, at_ms, near_until = np.array(self._batches, np.int64).reshape(-1, 4).T
        known = np.empty(len(rows), KNOWN)
        known["offset"] = np.repeat(offsets, counts) + rows["position"]
        known["arrival"] = known["identity"] = known["offset"]
        near = rows["due"] <= np.repeat(near_until, counts)
        known["came_at"] = np.where(near, np.repeat(at_ms, counts), NEVER)
        for name in ("due", "size", "queue", "tag_hash", "unique_hash", "key_hash", "kind", "level"):
            known[name] = rows[name]
        return known


def known_of_chunk(base: int, index: np.ndarray, came_at: int) -> np.ndarray:
    known = np.zeros(len(index), KNOWN)
    known["offset"] = index["position"] + base
    own = index["flags"] & FLAG_OWN_ARRIVAL != 0
    known["identity"] = np.where(own, known["offset"], index["arrival"])
    known["came_at"], known["kind"] = came_at, MESSAGE
    for name in ("due", "arrival", "size", "queue", "tag_hash"):
        known[name] = index[name]
    return known


class Index:
    """Finds what is known of a record by its offset."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        known = np.concatenate(parts)
        self.known = known[np.argsort(known["offset"], kind="stable")]
        self._offsets = np.ascontiguousarray(self.known["offset"])

    def find(self, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(found, rows): whether there is a record at each offset, and what is known of it (anything where none is)."""
        if not len(self.known):
            return np.zeros(len(offsets), np.bool_), np.zeros(len(offsets), KNOWN)
        places = np.minimum(np.searchsorted(self._offsets, offsets), len(self._offsets) - 1)
        return self._offsets[places] == offsets, self.known[places]

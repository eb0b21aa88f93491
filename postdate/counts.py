"""What waits, counted: rows and bytes by topic and unit of due time (Counts), or rows by second (Seconds).

The broker counts what it holds, bulk what the table holds (table/count.py), and the broker merges both. This module
stands outside of table/ because the server imports it and must not load pyarrow: it needs numpy only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from postdate.arrival import NEVER

UNITS_MS = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


class Amount(NamedTuple):
    """Messages, and the bytes of their records."""

    rows: int = 0
    bytes: int = 0

    def plus(self, other: "Amount") -> "Amount":
        return Amount(self.rows + other.rows, self.bytes + other.bytes)


NOTHING = Amount()


class Counts:
    """Amounts by topic, and by time for the earliest `limit` units. It forgets later ones on the way: ten million due
    times cost no more than the limit.
    """

    def __init__(self, unit_ms: int, limit: int) -> None:
        self._unit_ms, self._limit = unit_ms, limit
        self.topics: dict[str, Amount] = {}
        self._times: dict[tuple[int, str], Amount] = {}  # by start of the unit and topic
        self._last_ms = NEVER  # later units are forgotten
        self.is_truncated = False

    @property
    def total(self) -> Amount:
        total = NOTHING
        for amount in self.topics.values():
            total = total.plus(amount)
        return total

    def add(self, due: np.ndarray, topic: np.ndarray, size: np.ndarray, names: Sequence[str]) -> None:
        """Adds messages by columns: due, which of the names is the topic, bytes of the record."""
        if not len(due):
            return
        unit = due // self._unit_ms
        first = int(unit.min())
        group, place = np.unique((unit - first) * len(names) + topic, return_inverse=True)
        rows = np.bincount(place).tolist()
        sizes = np.bincount(place, size).astype(np.int64).tolist()
        for each, row_count, byte_count in zip(group.tolist(), rows, sizes, strict=True):
            at_ms, name = (each // len(names) + first) * self._unit_ms, names[each % len(names)]
            amount = Amount(row_count, byte_count)
            self.topics[name] = self.topics.get(name, NOTHING).plus(amount)
            self._add_time((at_ms, name), amount)

    def _add_time(self, row: tuple[int, str], amount: Amount) -> None:
        if row[0] > self._last_ms:
            self.is_truncated = True
            return
        self._times[row] = self._times.get(row, NOTHING).plus(amount)
        if len(self._times) > 2 * self._limit:
            self._last_ms = sorted(self._times)[self._limit - 1][0]
            self._times = {row: amount for row, amount in self._times.items() if row[0] <= self._last_ms}
            self.is_truncated = True

    def earliest(self) -> list[tuple[tuple[int, str], Amount]]:
        """Returns ((start of the unit, topic), amount), at most `limit` of them."""
        self.is_truncated |= len(self._times) > self._limit
        return sorted(self._times.items())[: self._limit]

    def merge(self, other: "Counts") -> None:
        """Adds what another counter of the same unit and limit has counted."""
        for name, amount in other.topics.items():
            self.topics[name] = self.topics.get(name, NOTHING).plus(amount)
        for row, amount in other.earliest():
            self._add_time(row, amount)
        self.is_truncated |= other.is_truncated

    # -- between processes --------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Returns the counts as JSON can hold them."""
        return {
            "topics": [[name, *amount] for name, amount in sorted(self.topics.items())],
            "times": [[at_ms, name, *amount] for (at_ms, name), amount in self.earliest()],
            "truncated": self.is_truncated,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any], unit_ms: int, limit: int) -> "Counts":
        """Reads what `plain` returned. Raises KeyError, TypeError, ValueError for anything else."""
        counts = cls(unit_ms, limit)
        counts.topics = {str(name): Amount(int(rows), int(size)) for name, rows, size in plain["topics"]}
        for at_ms, name, rows, size in plain["times"]:
            counts._add_time((int(at_ms), str(name)), Amount(int(rows), int(size)))
        counts.is_truncated |= bool(plain["truncated"])
        return counts


class Bar(NamedTuple):
    """How many messages are due in a unit of time, and in its busiest second."""

    from_ms: int
    rows: int
    busiest_ms: int
    busiest_rows: int


class Seconds:
    """How many messages are due in each second of a span."""

    def __init__(self, from_ms: int, count: int) -> None:
        self._first = from_ms // 1_000
        self.rows = np.zeros(count, np.int32)

    def add(self, due: np.ndarray, _topic: np.ndarray, _size: np.ndarray, _names: Sequence[str]) -> None:
        second = due // 1_000 - self._first
        np.add.at(self.rows, second[(second >= 0) & (second < len(self.rows))], 1)

    def merge(self, packed: bytes) -> None:
        """Adds what another counter has packed. Raises ValueError where its span is of another length."""
        other = np.frombuffer(packed, np.int32)
        if len(other) != len(self.rows):
            raise ValueError(f"{len(other)} seconds, expected {len(self.rows)}")
        self.rows += other

    def packed(self) -> bytes:
        return self.rows.tobytes()

    def bars(self, unit_s: int) -> list[Bar]:
        units = self.rows.reshape(-1, unit_s)
        busiest = units.argmax(axis=1)
        return [
            Bar((self._first + number * unit_s) * 1_000, int(unit.sum()), (self._first + number * unit_s + at) * 1_000,
                int(unit[at]))
            for number, (unit, at) in enumerate(zip(units, busiest.tolist(), strict=True))
        ]  # fmt: skip

"""How much waits in the table, by topic and by time: for `postdate pending` and `postdate forecast`.

The broker says which rows count: those that it has had taken, due behind its horizon, for queues that are there. Only
narrow columns are read; cancels, the table's own and those that the broker still holds, are few.
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from postdate.counts import Counts, Seconds
from postdate.table.format import CANCEL, DROP, MESSAGE, OWN, came_before, job_of

_COLUMNS = ["due", "arrival", "kind", "queue", "size"]
_HASHES = ["unique_hash", "key_hash"]
_CANCEL_COLUMNS = ["due", "arrival", "queue", *_HASHES, "tag_hash"]

# Due, arrival, code of the topic, hash of the unique key, of the first key, how many jobs there were before it.
Cancel = tuple[int, int, int, int, int, int]


class Asked(NamedTuple):
    """Which rows are to be counted."""

    horizon: int  # those due behind it
    before: int  # that arrived before
    names: list[str]
    codes: np.ndarray  # by queue number: which of the names is its topic; -1 does not count
    cancels: list[Cancel]
    untaken_jobs: frozenset[int]  # what these have brought does not count yet


class Wish(NamedTuple):
    """A question of the broker's: what to count, and into what."""

    asked: Asked
    counts: Counts | Seconds

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Wish":
        """Raises KeyError, TypeError, ValueError where it is none."""
        cancels = [(int(d), int(a), int(c), int(u), int(k), int(j)) for d, a, c, u, k, j in plain["cancels"]]
        untaken = frozenset(int(number) for number in plain["untaken_jobs"])
        names, codes = [str(name) for name in plain["names"]], np.array(plain["codes"], np.int64)
        asked = Asked(int(plain["horizon"]), int(plain["before"]), names, codes, cancels, untaken)
        if "seconds" in plain:
            return cls(asked, Seconds(int(plain["from_ms"]), int(plain["seconds"])))
        return cls(asked, Counts(int(plain["unit_ms"]), int(plain["limit"])))


def count(files: pa.Table, folder: pafs.FileSystem, wish: Wish) -> None:
    """Raises FileNotFoundError where the table changes meanwhile, OSError, pyarrow's errors."""
    asked, counts = wish
    chosen = files.filter(pc.greater(files["max.due"], asked.horizon)) if files.num_rows else files
    paths = chosen["path"].to_pylist() if chosen.num_rows else []
    gone = [_gone(path, folder, asked) for path in paths]
    cancels = _Cancels([*asked.cancels, *(each for found in gone for each in found.cancels)])
    # Sorted once: a set for each file would be made anew as often as there are files.
    drops = np.sort(np.concatenate([np.empty(0, np.int64), *(found.drops for found in gone)]))
    for path in paths:
        with pq.ParquetFile(path, filesystem=folder) as file:
            rows = file.read(_COLUMNS + (_HASHES if cancels else []))
        _count(rows, cancels, drops, asked, counts)


def _count(rows: pa.Table, cancels: "_Cancels", drops: np.ndarray, asked: Asked, counts: Counts | Seconds) -> None:
    column = {name: rows[name].to_numpy() for name in rows.column_names}
    code = _codes(asked, column["queue"])
    counts_here = (column["due"] > asked.horizon) & _is_taken(column["arrival"], asked)
    counts_here &= (column["kind"] == MESSAGE) & (code >= 0)
    if len(drops):
        counts_here &= ~_among(column["arrival"], drops)
    if cancels:
        counts_here &= ~cancels.hit(column, code)
    counts.add(column["due"][counts_here], code[counts_here], column["size"][counts_here], asked.names)


def _is_taken(arrival: np.ndarray, asked: Asked) -> np.ndarray:
    taken: np.ndarray = arrival < min(asked.before, OWN)
    is_own = arrival >= OWN
    if is_own.any():
        taken |= is_own & ~np.isin(job_of(arrival), list(asked.untaken_jobs))
    return taken


def _among(values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which values are among those wanted, which ascend. Values in ascending order are found three times as fast: a
    search begins where the one before has ended.
    """
    order = np.argsort(values)
    ascending = values[order]
    found = np.empty(len(values), np.bool_)
    found[order] = wanted[np.minimum(np.searchsorted(wanted, ascending), len(wanted) - 1)] == ascending
    return found


def _codes(asked: Asked, queue: np.ndarray) -> np.ndarray:
    """A queue that came after the question does not count."""
    known = queue < len(asked.codes)
    return np.where(known, asked.codes[np.where(known, queue, 0)], -1) if len(asked.codes) else np.full(len(queue), -1)


class _Gone(NamedTuple):
    """What the rows of a file take away."""

    cancels: list[Cancel]
    drops: np.ndarray  # arrivals of messages that jobs have taken away


def _gone(path: str, folder: pafs.FileSystem, asked: Asked) -> _Gone:
    """Read only where the statistics of the file tell of some."""
    cancels: list[Cancel] = []
    drops = [np.empty(0, np.int64)]
    with pq.ParquetFile(path, filesystem=folder) as file:
        kind = file.schema_arrow.get_field_index("kind")
        for number in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(number).column(kind).statistics
            if statistics is not None and statistics.has_min_max and statistics.max == MESSAGE:
                continue
            rows = file.read_row_group(number, ["kind", *_CANCEL_COLUMNS])
            drops.append(rows.filter(pc.equal(rows["kind"], DROP))["arrival"].to_numpy())
            rows = rows.filter(pc.equal(rows["kind"], CANCEL)).select(_CANCEL_COLUMNS)
            code = _codes(asked, rows["queue"].to_numpy()).tolist()
            due, arrival, _, unique, key, jobs = (rows[name].to_pylist() for name in _CANCEL_COLUMNS)
            cancels += zip(due, arrival, code, unique, key, jobs, strict=True)
    return _Gone(cancels, np.concatenate(drops))


class _Cancels:
    """A message is cancelled by one of the same topic, key and due that came after it."""

    def __init__(self, cancels: list[Cancel]) -> None:
        self._dues = np.unique(np.array([cancel[0] for cancel in cancels], np.int64))
        self._by_due: dict[int, list[Cancel]] = {}
        for cancel in cancels:
            self._by_due.setdefault(cancel[0], []).append(cancel)

    def __bool__(self) -> bool:
        return bool(self._by_due)

    def hit(self, column: dict[str, np.ndarray], code: np.ndarray) -> np.ndarray:
        hit = np.zeros(len(code), np.bool_)
        for place in np.flatnonzero(np.isin(column["due"], self._dues)).tolist():
            row = tuple(int(column[name][place]) for name in ("arrival", *_HASHES))
            hit[place] = any(
                _is_for(cancel, row, int(code[place])) for cancel in self._by_due[int(column["due"][place])]
            )
        return hit


def _is_for(cancel: Cancel, row: tuple[int, ...], code: int) -> bool:
    _, arrival, own_code, unique, key, jobs = cancel
    same_key = (unique != 0 and unique == row[1]) or (key != 0 and key == row[2])
    return code == own_code and same_key and came_before(row[0], arrival, jobs)

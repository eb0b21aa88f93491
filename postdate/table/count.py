"""How much waits in the table, by topic and by time: for `postdate pending` and `postdate forecast`.

The broker says which rows count: those that it has had taken, due after its horizon, for queues that exist. Counting
reads narrow columns only. Cancels, those of the table and those that the broker still holds, are few. What jobs have
changed and the table has not followed yet counts as if it had.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from postdate.counts import Counts, Seconds
from postdate.table.format import CANCEL, MESSAGE
from postdate.table.living import CANCEL_COLUMNS, DROP_COLUMNS, Removals, drops_of, has_arrived

_COLUMNS = ["due", "arrival", "kind", "queue", "size"]
# Topics are numbers here: which of the request's names.
_CANCELS = pa.schema([(name, pa.int64()) for name in CANCEL_COLUMNS])
_DROPS = pa.schema([(name, pa.int64()) for name in DROP_COLUMNS])


class CountRequest(NamedTuple):
    """Which rows the broker wants counted."""

    horizon: int  # those due after it
    before: int  # that arrived before
    names: list[str]
    codes: np.ndarray  # by queue number: which of the names is its topic; -1 does not count
    cancels: pa.Table  # that the table does not have yet
    drops: pa.Table  # likewise: due and arrival of messages that were moved
    untaken_jobs: frozenset[int]  # what these brought does not count yet

    def topics(self, queue: np.ndarray) -> np.ndarray:
        """Returns which of the names is the topic of each queue; -1 for a queue that does not count, or that is newer
        than the request.
        """
        if not len(self.codes):
            return np.full(len(queue), -1)
        is_known = queue < len(self.codes)
        return np.where(is_known, self.codes[np.where(is_known, queue, 0)], -1)


class Unfollowed(NamedTuple):
    """What jobs have changed that the table has not followed."""

    drops: pa.Table  # due and arrival of what they have taken away
    files: list[tuple[str, int]]  # of what they bring: names, and the due up to which the wheel has it


_NOTHING = Unfollowed(_DROPS.empty_table(), [])


def parse_request(fields: dict[str, Any]) -> tuple[CountRequest, Counts | Seconds]:
    """Returns what to count, and into what. Raises KeyError, TypeError, ValueError where the fields are no request."""
    cancels = _parse_rows(fields["cancels"], _CANCELS)
    drops = _parse_rows(fields.get("drops", ()), _DROPS)  # a broker of an earlier version sends none
    untaken = frozenset(int(number) for number in fields["untaken_jobs"])
    names, codes = [str(name) for name in fields["names"]], np.array(fields["codes"], np.int64)
    request = CountRequest(int(fields["horizon"]), int(fields["before"]), names, codes, cancels, drops, untaken)
    if "seconds" in fields:
        return request, Seconds(int(fields["from_ms"]), int(fields["seconds"]))
    return request, Counts(int(fields["unit_ms"]), int(fields["limit"]))


def _parse_rows(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Reads rows that are lists of numbers."""
    named = [dict(zip(schema.names, map(int, row), strict=True)) for row in rows]
    return pa.Table.from_pylist(named, schema)


def count(
    files: pa.Table, folder: pafs.FileSystem, request: CountRequest, counts: Counts | Seconds,
    unfollowed: Unfollowed = _NOTHING,
) -> None:  # fmt: skip
    """Adds what waits in these files to `counts`. Raises FileNotFoundError where the table changes meanwhile, OSError,
    pyarrow's errors.
    """
    chosen = files.filter(pc.greater(files["max.due"], request.horizon)) if files.num_rows else files
    paths = chosen["path"].to_pylist() if chosen.num_rows else []
    found = [_read_removals(path, folder, request) for path in paths]
    cancels = pa.concat_tables([request.cancels, *(cancels for cancels, _ in found)])
    drops = pa.concat_tables([request.drops, unfollowed.drops, *(drops for _, drops in found)])
    removals = Removals(cancels, drops)
    columns = list(dict.fromkeys([*_COLUMNS, *(name for name in removals.columns if name != "topic")]))
    for path in paths:
        with pq.ParquetFile(path, filesystem=folder) as file:
            rows = file.read(columns)
        is_taken = has_arrived(rows["arrival"], request.before, request.untaken_jobs)
        _count_rows(rows.filter(is_taken), request.horizon, removals, request, counts)
    for path, after_ms in unfollowed.files:
        with pq.ParquetFile(path, filesystem=folder) as file:
            _count_rows(file.read(columns), after_ms, removals, request, counts)


def _count_rows(
    rows: pa.Table, after_ms: int, removals: Removals, request: CountRequest, counts: Counts | Seconds
) -> None:
    topic = request.topics(rows["queue"].to_numpy())
    waits = pc.and_(pc.equal(rows["kind"], MESSAGE), pc.greater(rows["due"], after_ms))
    waits = pc.and_(waits, removals.living(rows.append_column("topic", pa.array(topic))))
    counted = waits.to_numpy() & (topic >= 0)
    due, size = (rows[name].to_numpy()[counted] for name in ("due", "size"))
    counts.add(due, topic[counted], size, request.names)


def _read_removals(path: str, folder: pafs.FileSystem, request: CountRequest) -> tuple[pa.Table, pa.Table]:
    """Returns the cancels and drops of a file. Reads only row groups whose statistics tell of some."""
    cancels, drops = [_CANCELS.empty_table()], [_DROPS.empty_table()]
    with pq.ParquetFile(path, filesystem=folder) as file:
        kind = file.schema_arrow.get_field_index("kind")
        for number in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(number).column(kind).statistics
            if statistics is not None and statistics.has_min_max and statistics.max == MESSAGE:
                continue
            names = [name for name in CANCEL_COLUMNS if name != "topic"]
            rows = file.read_row_group(number, ["kind", "queue", *names])
            topic = pa.array(request.topics(rows["queue"].to_numpy()), pa.int64())
            rows = rows.append_column("topic", topic)
            cancels.append(rows.filter(pc.equal(rows["kind"], CANCEL)).select(_CANCELS.names).cast(_CANCELS))
            drops.append(drops_of(rows).cast(_DROPS))
    return pa.concat_tables(cancels), pa.concat_tables(drops)

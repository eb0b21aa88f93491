"""A survey of a table that is to be adopted: what it knows of its lost broker, and what of it would be delivered.

It reads narrow columns of all rows and changes nothing.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from postdate.arrival import NEVER, OWN, job_of
from postdate.contract import NamedQueues
from postdate.counts import Counts
from postdate.errors import CorruptTable, Refused
from postdate.table.count import count, parse_request
from postdate.table.files import TableFolder, read_row_groups
from postdate.table.format import BESIDE, CANCEL, MESSAGE, MESSAGES, MOVE, ROWS_TRANSACTION
from postdate.table.identity import Seen, read_marks, read_queues, read_seen

_COLUMNS = ["due", "arrival", "kind", "topic", "queue", "tag_hash"]
_UNIT_MS = 86_400_000


class Survey(NamedTuple):
    """What was found. Counts of messages are by topic."""

    identity: str
    queues: NamedQueues
    far: int
    rows: int  # that ever came into the table
    seen: Seen  # by the table when it is adopted: everything due up to this horizon was delivered, as far as it knows
    waiting_rows: int  # of every kind, due after the horizon
    arrival_high: int  # of the rows that stand for a record of the log, and of the log itself
    next_job: int
    deliverable: dict[str, int]  # messages that wait and that nothing takes away
    past: dict[str, int]  # messages due at or before the horizon
    ownerless: dict[str, int]  # messages of deleted topics
    cancels: int  # that wait for their messages
    beside: int  # rows of imports and jobs that no batch has taken in: only the lost log knew whether they count
    written_at_ms: int  # when the table was last written


def survey(root: str, again_ms: int, owner: str = "") -> Survey:
    """Reads a table. Its horizon is taken back by `again_ms`: what was promoted at the end may never have been
    delivered; and its epoch is the next one. Both are done already where the table is the owner's, whose adoption was
    cut short. Raises Refused where the table does not say enough, CorruptTable where it cannot be read.
    """
    try:
        delta = DeltaTable(f"{root.rstrip('/')}/{MESSAGES}")
        marks, seen, queues = read_marks(delta), read_seen(delta), read_queues(delta)
        if seen is None or queues is None or not marks.identity:
            raise Refused(
                f"the table {root} was written by an earlier version and does not say which queue is which: start its "
                "own broker and pipeline once with this version"
            )
        numbers = [number for topic in queues.topics for number in topic.numbers]
        if sorted([*numbers, *(queue.number for queue in queues.deleted)]) != list(range(queues.given)):
            raise Refused(f"the table {root} names queue numbers twice, or leaves some out: it cannot be adopted")
        if marks.identity != owner:
            seen = seen._replace(horizon=max(0, seen.horizon - again_ms), epoch=seen.epoch + 1)
        found = _Rows(queues, seen.horizon, seen.position)
        files = pa.table(delta.get_add_actions(flatten=True))
        folder = pafs.PyFileSystem(DeltaStorageHandler(delta.table_uri))
        for path in files["path"].to_pylist() if files.num_rows else []:
            with pq.ParquetFile(path, filesystem=folder) as file:
                for group in range(file.num_row_groups):
                    found.add(file.read_row_group(group, _COLUMNS))
        deliverable = _count_deliverable(files, folder, queues, seen.horizon)
        beside = _count_beside(TableFolder(f"{root.rstrip('/')}/{MESSAGES}"))
        written_at_ms = int(delta.history(1)[0]["timestamp"])
    except TableNotFoundError as error:
        raise Refused(f"there is no table at {root}") from error
    except (DeltaError, pa.ArrowException, OSError) as error:
        raise CorruptTable(f"the table {root} cannot be read: {error}") from error
    return Survey(
        marks.identity, queues, marks.far, delta.transaction_version(ROWS_TRANSACTION) or 0, seen,
        found.waiting_rows, found.arrival_high, found.next_job, deliverable, dict(found.past), dict(found.ownerless),
        found.cancels, beside, written_at_ms,
    )  # fmt: skip


def _count_beside(folder: TableFolder) -> int:
    names = [name for name in folder.sizes() if name.startswith(BESIDE)]
    return sum(group.rows for name in names for group in read_row_groups(folder, name))


class _Rows:
    """Adds up the rows of a table, row group by row group."""

    def __init__(self, queues: NamedQueues, horizon: int, position: int) -> None:
        self._is_named = np.zeros(queues.given, np.bool_)
        for topic in queues.topics:
            self._is_named[topic.numbers] = True
        self._horizon = horizon
        self.arrival_high, self.next_job = position, 0
        self.waiting_rows = self.cancels = 0
        self.past, self.ownerless = Counter[str](), Counter[str]()

    def add(self, rows: pa.Table) -> None:
        due, arrival, kind, queue, tag_hash = (
            rows[name].to_numpy() for name in ("due", "arrival", "kind", "queue", "tag_hash")
        )
        is_message, is_past = kind == MESSAGE, due <= self._horizon
        unknown = queue[is_message & ~is_past & (queue >= len(self._is_named))]
        if len(unknown):
            raise Refused(f"a message of the table is for queue number {unknown[0]}, which the table does not name")
        is_named = self._is_named[np.minimum(queue, len(self._is_named) - 1)]
        self.waiting_rows += int((~is_past).sum())
        self.cancels += int(((kind == CANCEL) & ~is_past).sum())
        for counts, mask in ((self.past, is_past), (self.ownerless, ~is_past & ~is_named)):
            counts.update(rows["topic"].filter(pa.array(is_message & mask)).to_pylist())
        own, logged = arrival[arrival >= OWN], arrival[arrival < OWN]
        jobs = [*tag_hash[(kind == CANCEL) | (kind == MOVE)].tolist(), *(job_of(own) + 1).tolist()]
        self.next_job = max([self.next_job, *jobs])
        self.arrival_high = max(self.arrival_high, int(logged.max()) if len(logged) else 0)


def _count_deliverable(
    files: pa.Table, folder: pafs.FileSystem, queues: NamedQueues, horizon: int
) -> dict[str, int]:  # fmt: skip
    names = [topic.name for topic in queues.topics]
    codes = np.full(queues.given, -1)
    for code, topic in enumerate(queues.topics):
        codes[topic.numbers] = code
    request, counts = parse_request(
        {
            "horizon": horizon, "before": NEVER, "names": names, "codes": codes.tolist(), "cancels": [],
            "untaken_jobs": [], "unit_ms": _UNIT_MS, "limit": 1,
        }
    )  # fmt: skip
    assert isinstance(counts, Counts)
    count(files, folder, request, counts)
    return {name: amount.rows for name, amount in sorted(counts.topics.items())}

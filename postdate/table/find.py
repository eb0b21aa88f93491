"""The table for readers without Spark: which messages of one topic, key and due does it hold, and how much waits?

The broker asks when a cancel finds its message nowhere else. The statistics in the Delta log choose the files, those of
row groups the row groups, due and hash of the key the rows; the record of each row that is left decides.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

from postdate.contract import TableFile
from postdate.counts import Counts, Seconds
from postdate.errors import PostdateError
from postdate.storage import record as records
from postdate.table.count import Unfollowed, count, parse_request
from postdate.table.files import TableFolder, find_beside
from postdate.table.format import DROP, FAR_TRANSACTION, MESSAGE, MESSAGES, File, list_files
from postdate.table.identity import Seen, read_seen, refuse_foreign
from postdate.table.living import DROP_COLUMNS, Removals, has_arrived

T = TypeVar("T")

_TRIES = 3
_DROPS = pa.schema([(name, pa.int64()) for name in DROP_COLUMNS])
_HASH_OF = {"unique": "unique_hash", "key": "key_hash"}


class TableUnreadable(PostdateError):
    """The table is damaged, away or not announced: what it holds is unknown."""


class Question(NamedTuple):
    """Which messages a cancel may be for."""

    topic: str
    key: str
    by: str  # "unique" or "key"
    key_hash: int
    due: int
    before: int  # only messages that arrived before this

    @property
    def column(self) -> str:
        return _HASH_OF[self.by]


class UnfollowedJob(NamedTuple):
    """A job whose changes are accepted, and that the table has not followed."""

    far: int  # its row in the far queue
    files: tuple[TableFile, ...]  # beside the table: what it brings
    brought_until_ms: int  # of that, the wheel has what is due until then
    drops: pa.Table  # due and arrival of what it has taken away


class TableVersion(NamedTuple):
    """A version of the table: its files, up to which row it holds the far queue, and what it has seen."""

    folder: TableFolder
    files: list[File]
    far: int
    seen: Seen | None  # of the broker's log


class TableReader:
    """Reads the newest version of the table. It stays open between questions, which may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uri = ""
        self._delta: DeltaTable | None = None
        self._version = -1
        self._files = pa.table({})

    def find(self, uri: str, question: Question, identity: str = "") -> list[int]:
        """Returns the arrivals of the messages that a question of the broker of this identity means, ascending. Raises
        TableUnreadable, ForeignTable.
        """

        def read() -> list[int]:
            files, folder = self._list_files(uri, identity)
            return _find(_choose_files(files, question.due), folder, question)

        return self._read(uri, read)

    def count(
        self, uri: str, fields: dict[str, Any], identity: str = "", jobs: Collection[UnfollowedJob] = ()
    ) -> Counts | Seconds:
        """Counts what waits. Raises TableUnreadable, ForeignTable, and what `parse_request` raises."""

        def read() -> Counts | Seconds:
            request, counts = parse_request(fields)  # empty counts for each try
            folder = TableFolder(f"{uri.rstrip('/')}/{MESSAGES}")
            drops = [_DROPS.empty_table(), *(job.drops for job in jobs)]
            files = [
                (find_beside(folder, file.path, job.far), job.brought_until_ms) for job in jobs for file in job.files
            ]
            count(*self._list_files(uri, identity), request, counts, Unfollowed(pa.concat_tables(drops), files))
            return counts

        return self._read(uri, read)

    def newest(self, uri: str, identity: str = "") -> TableVersion:
        """Returns the files of the newest version, and how far it goes. Raises TableUnreadable, ForeignTable."""

        def read() -> TableVersion:
            self._list_files(uri, identity)
            with self._lock:
                assert self._delta is not None, "the table was opened to list its files"
                far = self._delta.transaction_version(FAR_TRANSACTION) or 0
                files, seen = list_files(self._delta), read_seen(self._delta)
            for file in files:
                if None in file:
                    raise TableUnreadable(f"{file.path} of the table {uri} has no statistics of due and arrival")
            return TableVersion(TableFolder(f"{uri.rstrip('/')}/{MESSAGES}"), files, far, seen)

        return self._read(uri, read)

    def close(self) -> None:
        """Forgets the table: the next question opens it again, which may be another one in the same place."""
        self._delta = None

    def _read(self, uri: str, read: Callable[[], T]) -> T:
        if not uri:
            raise TableUnreadable("no pipeline has said where its table is")
        for _ in range(_TRIES):
            try:
                return read()
            except FileNotFoundError as error:
                # A merge or a promotion has removed it since it was listed: the next version has its rows elsewhere.
                gone = error
            except (DeltaError, pa.ArrowException, OSError) as error:
                self._delta = None  # the next question opens the table again
                first_line, *_ = f"{error}\n".splitlines()
                raise TableUnreadable(f"the table {uri} cannot be read: {first_line}") from error
        raise TableUnreadable(f"the table {uri} changes faster than it can be read: {gone}")

    def _list_files(self, uri: str, identity: str) -> tuple[pa.Table, pafs.FileSystem]:
        """Returns the files of the newest version with their statistics."""
        with self._lock:
            if self._delta is None or uri != self._uri:
                self._uri, self._version = uri, -1
                self._delta = DeltaTable(f"{uri.rstrip('/')}/{MESSAGES}")
            self._delta.update_incremental()
            refuse_foreign(self._delta, uri, identity)
            if self._delta.version() != self._version:
                self._files = pa.table(self._delta.get_add_actions(flatten=True))
                self._version = self._delta.version()
            return self._files, pafs.PyFileSystem(DeltaStorageHandler(self._delta.table_uri))


def _find(paths: list[str], folder: pafs.FileSystem, question: Question) -> list[int]:
    """A message and the drop that takes it away may be in different files."""
    schema = pa.schema([(name, pa.int64()) for name in DROP_COLUMNS])
    messages, drops = [schema.empty_table()], [schema.empty_table()]
    for path in paths:
        with pq.ParquetFile(path, filesystem=folder) as file:
            for group in _choose_groups(file, question.due):
                rows = file.read_row_group(group, ["due", "arrival", "kind", question.column])
                rows = rows.append_column("row", pa.array(np.arange(rows.num_rows)))
                rows = rows.filter(pc.equal(rows["due"], question.due))
                messages.append(_find_messages(file, group, rows, question).select(schema.names).cast(schema))
                drops.append(rows.filter(pc.equal(rows["kind"], DROP)).select(schema.names).cast(schema))
    found = pa.concat_tables(messages)
    living = found.filter(Removals(drops=pa.concat_tables(drops)).living(found))
    return sorted(set(living["arrival"].to_pylist()))


def _choose_files(files: pa.Table, due: int) -> list[str]:
    """Returns the paths of files that may hold rows of a due; one without statistics may hold anything."""
    if not {"min.due", "max.due"} <= set(files.column_names):
        return list(files["path"].to_pylist())
    is_out = pc.or_kleene(pc.greater(files["min.due"], due), pc.less(files["max.due"], due))
    return list(files.filter(pc.invert(pc.fill_null(is_out, False)))["path"].to_pylist())


def _choose_groups(file: Any, due: int) -> Iterator[int]:
    """Yields the row groups that may hold rows of a due."""
    column = file.schema_arrow.get_field_index("due")
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(column).statistics
        if statistics is None or not statistics.has_min_max or statistics.min <= due <= statistics.max:
            yield number


def _find_messages(file: Any, group: int, rows: pa.Table, question: Question) -> pa.Table:
    """Returns the rows that a question means, whose due is right already. Reads records only where a row looks like
    one of them.
    """
    signed_hash = int(np.uint64(question.key_hash).view(np.int64))
    is_alike = pc.and_(pc.equal(rows["kind"], MESSAGE), pc.equal(rows[question.column], signed_hash))
    # The broker knows which jobs came before its cancel; it gets the rows of all of them.
    alike = rows.filter(pc.and_(is_alike, has_arrived(rows["arrival"], question.before)))
    if not alike.num_rows:
        return alike
    candidates = file.read_row_group(group, ["record"])["record"].take(alike["row"]).to_pylist()
    topic, key, by = question.topic, question.key, question.by
    return alike.filter(pa.array([records.is_of_key(record, topic, key, by) for record in candidates]))

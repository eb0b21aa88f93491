"""The table's point read: which messages of one topic, key and due does it hold? And how much waits in it?

The broker asks when a cancel finds its message nowhere else. Files are chosen by the statistics in the Delta log, row
groups by their own, rows by due and hash of the key; what is left is verified in the record. No Spark is needed.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

from postdate.counts import Counts, Seconds
from postdate.errors import PostdateError
from postdate.message import PROPERTY_KEYS, PROPERTY_UNIQ_KEY, first_key
from postdate.storage import record as records
from postdate.storage.batch import MESSAGE
from postdate.table.count import Wish, count
from postdate.table.format import DROP, MESSAGES, OWN

T = TypeVar("T")

_TRIES = 3
_HASH_OF = {"unique": "unique_hash", "key": "key_hash"}


class TableUnreadable(PostdateError):
    """The table's or the pipeline's fault: nothing can be said about what the table holds."""


class Question(NamedTuple):
    topic: str
    key: str
    by: str  # "unique" or "key"
    key_hash: int
    due: int
    before: int  # only messages that arrived before this

    @property
    def column(self) -> str:
        return _HASH_OF[self.by]


class Table:
    """The table that the pipeline said it keeps. Stays open between questions, which may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uri = ""
        self._opened: DeltaTable | None = None
        self._version = -1
        self._files = pa.table({})

    def find(self, uri: str, question: Question) -> list[int]:
        """The arrivals of the messages that a question means, ascending. Raises TableUnreadable."""
        return self._read(uri, lambda: sorted(self._found(uri, question)))

    def count(self, uri: str, plain: dict[str, Any]) -> Counts | Seconds:
        """How much waits. Raises TableUnreadable; KeyError, TypeError, ValueError where that is no question."""

        def read() -> Counts | Seconds:
            wish = Wish.of(plain)  # anew for each try
            count(*self._listed(uri), wish)
            return wish.counts

        return self._read(uri, read)

    def _read(self, uri: str, read: Callable[[], T]) -> T:
        if not uri:
            raise TableUnreadable("no pipeline has said where its table is")
        for _ in range(_TRIES):
            try:
                return read()
            except FileNotFoundError as error:
                gone = (
                    error  # merged or forgotten since it was listed: the rows are in another file by now, or promoted
                )
            except (DeltaError, pa.ArrowException, OSError) as error:
                self._opened = None  # the next question finds whatever is there then
                raise TableUnreadable(f"the table {uri} cannot be read: {_first_line(error)}") from error
        raise TableUnreadable(f"the table {uri} changes faster than it can be read: {gone}")

    def _found(self, uri: str, question: Question) -> set[int]:
        files, folder = self._listed(uri)
        found, gone = set[int](), set[int]()
        for path in _chosen(files, question):
            with pq.ParquetFile(path, filesystem=folder) as file:
                for group in _groups(file, question.due):
                    found.update(_arrivals(file, group, question))
                    gone.update(_dropped(file, group, question.due))
        return found - gone

    def _listed(self, uri: str) -> tuple[pa.Table, pafs.FileSystem]:
        """The files of the newest version and their statistics."""
        with self._lock:
            if self._opened is None or uri != self._uri:
                self._uri, self._version = uri, -1
                self._opened = DeltaTable(f"{uri.rstrip('/')}/{MESSAGES}")
            self._opened.update_incremental()
            if self._opened.version() != self._version:
                self._files = pa.table(self._opened.get_add_actions(flatten=True))
                self._version = self._opened.version()
            return self._files, pafs.PyFileSystem(DeltaStorageHandler(self._opened.table_uri))


def _chosen(files: pa.Table, question: Question) -> list[str]:
    """Paths of the files that may hold the message; one without statistics may hold anything."""
    if not {"min.due", "max.due"} <= set(files.column_names):
        return list(files["path"].to_pylist())
    is_out = pc.or_kleene(pc.greater(files["min.due"], question.due), pc.less(files["max.due"], question.due))
    return list(files.filter(pc.invert(pc.fill_null(is_out, False)))["path"].to_pylist())


def _groups(file: Any, due: int) -> Iterator[int]:
    """Row groups that may hold a row of this due."""
    column = file.schema_arrow.get_field_index("due")
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(column).statistics
        if statistics is None or not statistics.has_min_max or statistics.min <= due <= statistics.max:
            yield number


def _arrivals(file: Any, group: int, question: Question) -> Iterator[int]:
    """Arrivals of a row group's messages that are meant. Records are read only where a row looks like one."""
    rows = file.read_row_group(group, ["due", "arrival", "kind", question.column])
    column = {name: rows[name].to_numpy() for name in rows.column_names}
    is_before = (column["arrival"] < question.before) | (
        column["arrival"] >= OWN
    )  # of the latter the broker knows more
    alike = (column["due"] == question.due) & (column["kind"] == MESSAGE) & is_before
    alike &= column[question.column].view(np.uint64) == np.uint64(question.key_hash)
    found = np.flatnonzero(alike)
    if len(found):
        candidates = file.read_row_group(group, ["record"])["record"].take(pa.array(found)).to_pylist()
        for place, record in zip(found.tolist(), candidates, strict=True):
            if _is_meant(record, question):
                yield int(column["arrival"][place])


def _dropped(file: Any, group: int, due: int) -> list[int]:
    """Arrivals of a row group's messages of a due that jobs have taken away."""
    column = file.schema_arrow.get_field_index("kind")
    statistics = file.metadata.row_group(group).column(column).statistics
    if statistics is not None and statistics.has_min_max and statistics.max < DROP:
        return []
    rows = file.read_row_group(group, ["due", "arrival", "kind"])
    rows = rows.filter(pc.and_(pc.equal(rows["due"], due), pc.equal(rows["kind"], DROP)))
    return list(rows["arrival"].to_pylist())


def _is_meant(record: bytes, question: Question) -> bool:
    properties = records.properties_of(record)
    unique, keys = properties.get(PROPERTY_UNIQ_KEY, ""), properties.get(PROPERTY_KEYS, "")
    key = unique if question.by == "unique" else first_key(keys)
    return key == question.key and records.topic_of(record) == question.topic


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

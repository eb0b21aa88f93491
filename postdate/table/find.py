"""The table for readers without Spark: which messages of a topic have a key, and how much waits?

The broker asks for one due when a cancel finds its message nowhere else, and for all of a key's messages when somebody
looks them up. The statistics in the Delta log choose the files, the index of keys beside each file its rows, and what
the rows hold decides. Cancels, drops and moves that take a message away are found the same way, from the message's
hashes and its arrival.
"""

import os
import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

from postdate.arrival import NEVER
from postdate.contract import TableFile
from postdate.counts import Counts, Seconds
from postdate.errors import IllegalMessage, PostdateError
from postdate.keys import key_hash
from postdate.storage import record as records
from postdate.table.count import Unfollowed, count, parse_request
from postdate.table.files import TableFolder, find_beside
from postdate.table.format import FAR_TRANSACTION, MESSAGES, File, entry_path, list_files
from postdate.table.identity import Seen, read_seen, refuse_foreign
from postdate.table.keys import further, upper
from postdate.table.living import DROP_COLUMNS, has_arrived
from postdate.table.search import Indexes, Place, Search

T = TypeVar("T")

_TRIES = 3
_ROW_GROUPS_MAX = 1_000  # that one search for a key reads: some seconds
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
    queues: tuple[int, ...]  # numbers of the topic's queues: rows of a deleted topic of that name have others

    @property
    def column(self) -> str:
        return _HASH_OF[self.by]


class KeyQuestion(NamedTuple):
    """Which messages somebody looks up."""

    topic: str
    key: str
    by: str  # "any", "unique", or "key": any of KEYS
    queues: tuple[int, ...]  # numbers of the topic's queues
    limit: int = 64  # at most this many messages
    after: tuple[int, int] = (-1, -1)  # only those after this due and arrival

    @property
    def hashes(self) -> set[int]:
        """Where its messages stand in the index of a file."""
        return {upper(key_hash(self.key))} | (set() if self.by == "unique" else {further(self.key)})

    def is_for(self, record: bytes) -> bool:
        """Whether a message of this record is meant."""
        if records.topic_of(record) != self.topic:
            return False
        try:
            return records.has_key(records.properties_of(record), self.key, self.by)
        except IllegalMessage:
            return False  # a producer's bytes that are no text: they have no key either


class TableMessage(NamedTuple):
    """A message that was found."""

    due: int
    arrival: int
    queue: int  # number
    record: bytes
    is_cancelled: bool = False


class KeyFound(NamedTuple):
    """The messages of a key, those that are due first; cut where there are, or may be, more than were asked for.
    Cancelled ones do not count.
    """

    messages: list[TableMessage]
    is_cut: bool


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
        self._entry: tuple[int, int] | None = None  # of the version at hand
        self._files = pa.table({})
        self._indexes = Indexes()

    def find(self, uri: str, question: Question, identity: str = "") -> list[int]:
        """Returns the arrivals of the messages that a question of the broker of this identity means, ascending. Raises
        TableUnreadable, ForeignTable.
        """

        def read() -> list[int]:
            files, _ = self._list_files(uri, identity)
            places = [Place(path) for path in _choose_files(files, question.due)]
            search = Search(_folder(uri), places, self._indexes)
            signed_hash = int(np.uint64(question.key_hash).view(np.int64))
            queues = pa.array(question.queues, pa.int32())

            def is_meant(rows: pa.Table) -> Any:
                # The broker knows which jobs came before its cancel; it gets the rows of all of them.
                has_come = has_arrived(rows["arrival"], question.before)
                is_alike = pc.and_(pc.equal(rows[question.column], signed_hash), pc.is_in(rows["queue"], queues))
                return pc.and_(is_alike, has_come)

            def has_key(record: bytes) -> bool:
                return records.is_of_key(record, question.topic, question.key, question.by)

            arrivals: set[int] = set()
            for found in search.messages({upper(question.key_hash)}, {question.due}, is_meant, has_key):
                arrivals.update(search.undropped(found, _DROPS.empty_table())["arrival"].to_pylist())
            return sorted(arrivals)

        return self._read(uri, read)

    def find_key(
        self, uri: str, question: KeyQuestion, identity: str = "", jobs: Collection[UnfollowedJob] = ()
    ) -> KeyFound:
        """Finds the messages of a key that the table and the files of jobs beside it hold and that no drop or move
        there takes away, whatever their due: also those that were brought into the wheel, and some of those that were
        cancelled. Raises TableUnreadable, ForeignTable.
        """

        def read() -> KeyFound:
            files, _ = self._list_files(uri, identity)
            folder, places = _folder(uri), _places_of(files)
            for job in jobs:
                for file in job.files:
                    name = find_beside(folder, file.path, job.far)
                    places.append(Place(name, file.due_low, file.due_high))
            search = Search(folder, sorted(places, key=lambda place: place.due_low), self._indexes)
            drops = pa.concat_tables([_DROPS.empty_table(), *(job.drops for job in jobs)])
            queues = pa.array(question.queues, pa.int32())
            messages: list[TableMessage] = []
            cancelled: list[TableMessage] = []
            pieces = search.messages(
                question.hashes, None, lambda rows: pc.is_in(rows["queue"], queues), question.is_for
            )
            for number, found in enumerate(pieces, 1):
                living, gone = search.living(found, drops)
                messages += _messages_of(living, question.after, is_cancelled=False)
                cancelled = sorted(cancelled + _messages_of(gone, question.after, is_cancelled=True))[: question.limit]
                if len(messages) > question.limit or number == _ROW_GROUPS_MAX:
                    return KeyFound(sorted(messages)[: question.limit], True)
            return KeyFound(sorted(messages + cancelled), False)

        return self._read(uri, read)

    def count(
        self, uri: str, fields: dict[str, Any], identity: str = "", jobs: Collection[UnfollowedJob] = ()
    ) -> Counts | Seconds:
        """Counts what waits. Raises TableUnreadable, ForeignTable, and what `parse_request` raises."""

        def read() -> Counts | Seconds:
            request, counts = parse_request(fields)  # empty counts for each try
            folder = _folder(uri)
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
            return TableVersion(_folder(uri), files, far, seen)

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
                self._uri, self._version, self._entry = uri, -1, None
                self._delta = DeltaTable(f"{uri.rstrip('/')}/{MESSAGES}")
            if not self._is_newest(uri):
                self._delta.update_incremental()
                self._entry = _entry_of(uri, self._delta.version())
            refuse_foreign(self._delta, uri, identity)
            if self._delta.version() != self._version:
                self._files = pa.table(self._delta.get_add_actions(flatten=True))
                self._version = self._delta.version()
                self._indexes.close_others(_folder(uri), set(_paths_of(self._files)))
            return self._files, pafs.PyFileSystem(DeltaStorageHandler(self._delta.table_uri))

    def _is_newest(self, uri: str) -> bool:
        """Whether the version at hand is the newest one of a local table: its entry of the Delta log is the one that
        was read, and there is none after it. Reading the log takes some milliseconds, looking takes none.
        """
        assert self._delta is not None, "the table was opened"
        version = self._delta.version()
        is_same = self._entry is not None and _entry_of(uri, version) == self._entry
        return is_same and _entry_of(uri, version + 1) is None


def _entry_of(uri: str, version: int) -> tuple[int, int] | None:
    """Identifies the entry of a version; None where there is none, or the table is not local."""
    folder = _folder(uri)
    if not folder.is_local:
        return None
    try:
        found = os.stat(folder.path(entry_path(version)))
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _folder(uri: str) -> TableFolder:
    return TableFolder(f"{uri.rstrip('/')}/{MESSAGES}")


def _paths_of(files: pa.Table) -> list[str]:
    return list(files["path"].to_pylist()) if files.num_rows else []


def _messages_of(rows: pa.Table, after: tuple[int, int], *, is_cancelled: bool) -> list[TableMessage]:
    """Returns the messages of some rows that come after a due and arrival."""
    found = rows.select(TableMessage._fields[:-1]).to_pylist()
    return [TableMessage(**row, is_cancelled=is_cancelled) for row in found if (row["due"], row["arrival"]) > after]


def _places_of(files: pa.Table) -> list[Place]:
    """Returns where to look; a file without statistics may hold anything."""
    if not files.num_rows or not {"min.due", "max.due"} <= set(files.column_names):
        return [Place(path) for path in _paths_of(files)]
    low, high = (pc.fill_null(files[f"{end}.due"], default) for end, default in (("min", -1), ("max", NEVER)))
    return list(map(Place, files["path"].to_pylist(), low.to_pylist(), high.to_pylist()))


def _choose_files(files: pa.Table, due: int) -> list[str]:
    """Returns the paths of files that may hold rows of a due; one without statistics may hold anything."""
    if not {"min.due", "max.due"} <= set(files.column_names):
        return _paths_of(files)
    is_out = pc.or_kleene(pc.greater(files["min.due"], due), pc.less(files["max.due"], due))
    return list(files.filter(pc.invert(pc.fill_null(is_out, False)))["path"].to_pylist())

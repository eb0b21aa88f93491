"""Checks a local table: its files against the Delta log, every row against its record, the far queue and the log.

A file is checked by itself first: its order, its statistics, its rows. Then all files together: nothing twice, nothing
missing, as many rows as the log says.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from postdate.arrival import OWN
from postdate.broker.ownership import refuse_foreign
from postdate.check.folder import Folder, named
from postdate.check.records import Index, due_problem, keys_problem
from postdate.check.refold import Refold
from postdate.check.rows import Tables
from postdate.errors import CorruptLog, CorruptQueue, ForeignTable, IllegalMessage
from postdate.keys import key_hash
from postdate.message import PROPERTY_KEYS, PROPERTY_MOVED, PROPERTY_TAGS, MovedFrom, decode_properties
from postdate.state.far import Far
from postdate.storage import record as records
from postdate.storage.batch import JOB
from postdate.storage.folder import read_identity
from postdate.storage.layout import FAR as FAR_ROW
from postdate.storage.log import Log
from postdate.table import keys
from postdate.table.delta import is_readable
from postdate.table.format import (
    CANCEL,
    DROP,
    FAR_TRANSACTION,
    LOG,
    MESSAGE,
    MESSAGES,
    MOVE,
    SCHEMA,
    STATISTICS,
    File,
    count_sound,
    entry_path,
    is_untaken,
    list_files,
    parse_versions,
)
from postdate.table.identity import read_marks

# What a row shares with its far row, and how the far row's number is read as the table's.
_SHARED = {
    "due": np.int64, "kind": np.int8, "queue": np.int32, "level": np.int8, "tag_hash": np.int32,
    "unique_hash": np.int64, "key_hash": np.int64,
}  # fmt: skip
_WORDS = {"due_low": "smallest due", "due_high": "largest due", "arrival_low": "smallest arrival"}
_WORDS |= {"arrival_high": "largest arrival", "rows": "count of rows"}


class Sources(NamedTuple):
    """What the rows of the table were made from."""

    folder: Folder
    known: Index
    far: np.ndarray  # the far rows that are there; none where they cannot be trusted


class Seen(NamedTuple):
    """The rows of a file, as far as all files together are of interest."""

    due: np.ndarray
    arrival: np.ndarray
    is_drop: np.ndarray


class Group:
    """The rows of one row group, as columns."""

    def __init__(self, rows: pa.Table, start: int, path: str) -> None:
        self._rows = rows
        self._start, self._path = start, path
        self.count = rows.num_rows

    def select(self, names: Sequence[str]) -> pa.Table:
        return self._rows.select(list(names))

    def place(self, hit: int) -> str:
        return f"{self._path}, row {self._start + hit}"

    def numbers(self, name: str) -> np.ndarray:
        column: np.ndarray = self._rows.column(name).to_numpy()
        return column

    @cached_property
    def due(self) -> np.ndarray:
        return self.numbers("due")

    @cached_property
    def arrival(self) -> np.ndarray:
        return self.numbers("arrival")

    @cached_property
    def is_drop(self) -> np.ndarray:
        drops: np.ndarray = self.numbers("kind") == DROP
        return drops

    @cached_property
    def is_logged(self) -> np.ndarray:
        """Which rows stand for a record of the log: those that no job has brought or written."""
        logged: np.ndarray = ~self.is_drop & (self.arrival < OWN)
        return logged

    @cached_property
    def sizes(self) -> np.ndarray:
        sizes: np.ndarray = pc.binary_length(self._rows.column("record")).to_numpy()
        return sizes

    def records(self) -> list[bytes]:
        found: list[bytes] = self._rows.column("record").to_pylist()
        return found

    def plain(self) -> Iterator[dict[str, Any]]:
        """Row by row."""
        for batch in self._rows.to_batches(max_chunksize=1_024):
            yield from batch.to_pylist()


def check_file(base: Path, file: File, sources: Sources) -> Seen | None:
    """Checks one file and returns its rows; None if the file cannot be read, which is a finding."""
    return _FileCheck(base, file, sources).run()


class _FileCheck:
    def __init__(self, base: Path, file: File, sources: Sources) -> None:
        self._file, self._sources = file, sources
        self._path = base / file.path
        self._name = f"{base.name}/{file.path}"
        self._report = sources.folder.report

    def run(self) -> Seen | None:
        size = self._path.stat().st_size if self._path.is_file() else -1
        if size != self._file.bytes:
            found = f"it has {size} bytes" if size >= 0 else "it is missing"
            self._report.find(f"{self._name}: {found}, the Delta log says {self._file.bytes} bytes")
            return None
        try:
            with pq.ParquetFile(self._path, page_checksum_verification=True) as parquet:
                return self._read(parquet)
        except (OSError, ValueError, pa.ArrowException) as error:
            self._report.find(f"{self._name} cannot be read: {str(error).partition(chr(10))[0]}")
            return None

    def _read(self, parquet: Any) -> Seen | None:
        columns = [(field.name, field.type) for field in parquet.schema_arrow]
        if columns != [(field.name, field.type) for field in SCHEMA]:
            self._report.find(
                f"{self._name} has the columns {', '.join(name for name, _ in columns)}: others belong there"
            )
            return None
        dues, arrivals, drops = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
        indexed = []
        start = 0
        for number in range(parquet.num_row_groups):
            group = Group(parquet.read_row_group(number, use_threads=False), start, self._name)
            self._check_group(group, parquet.metadata.row_group(number), number)
            dues.append(group.due)
            arrivals.append(group.arrival)
            drops.append(group.is_drop)
            indexed.append(group.select(keys.COLUMNS))
            start += group.count
        if indexed:
            self._check_index(pa.concat_tables(indexed))
        seen = Seen(*(np.concatenate(columns) for columns in (dues, arrivals, drops)))
        self._check_order(seen)
        self._check_statistics(seen)
        return seen

    # -- the file as a whole ------------------------------------------------------------------------------------

    def _check_order(self, seen: Seen) -> None:
        due, arrival, is_drop = seen
        behind = (due[1:] > due[:-1]) | ((due[1:] == due[:-1]) & (arrival[1:] > arrival[:-1]))
        # A drop has the place of its message.
        behind |= (due[1:] == due[:-1]) & (arrival[1:] == arrival[:-1]) & (is_drop[1:] != is_drop[:-1])
        self._report.find_each(
            np.concatenate([[False], ~behind]),
            lambda hit: (
                f"{self._name}, row {hit}: due {due[hit]}, arrival {arrival[hit]} does not stand behind "
                f"due {due[hit - 1]}, arrival {arrival[hit - 1]}"
            ),
        )

    def _check_statistics(self, seen: Seen) -> None:
        """Rows that the Delta log's numbers hide would not be promoted in time."""
        if not len(seen.due):
            self._report.find(f"{self._name}: it has no rows")
            return
        true = {"rows": len(seen.due)}
        for name, column in (("due", seen.due), ("arrival", seen.arrival)):
            true |= {f"{name}_low": int(column.min()), f"{name}_high": int(column.max())}
        for name, value in true.items():
            said = getattr(self._file, name)
            if said != value:
                self._report.find(f"{self._name}: its {_WORDS[name]} is {value}, the Delta log says {said}")

    def _check_index(self, rows: pa.Table) -> None:
        """Checks the index of keys beside it; an earlier version has written none."""
        path = self._path.with_name(keys.name_index(self._file.path))
        if path.is_file():
            self._report.count("indexes of keys", 1)
            if path.read_bytes() != keys.encode_index(rows):
                self._report.find(f"{self._name}: the index of keys beside it is not that of its rows")

    # -- a row group --------------------------------------------------------------------------------------------

    def _check_group(self, group: Group, metadata: Any, number: int) -> None:
        for name in STATISTICS:
            column = group.numbers(name)
            statistics = metadata.column(SCHEMA.get_field_index(name)).statistics
            said = (statistics.min, statistics.max) if statistics and statistics.has_min_max else None
            if len(column) and said != (column.min(), column.max()):
                self._report.find(
                    f"{self._name}, row group {number}: {name} goes from {column.min()} to {column.max()}, "
                    f"its statistics say {said}"
                )
        problems = {hit: problem for hit, row in enumerate(group.plain()) if (problem := _row_problem(row))}
        self._find(group, problems)
        self._check_sources(group)

    def _find(self, group: Group, problems: dict[int, str]) -> None:
        mask = np.zeros(group.count, np.bool_)
        mask[list(problems)] = True
        self._report.find_each(mask, lambda hit: f"{group.place(hit)}: {problems[hit]}")

    # -- where it came from -------------------------------------------------------------------------------------

    def _check_sources(self, group: Group) -> None:
        """Against the far row of that arrival and the record in the log, as far as they are still there."""
        far = self._sources.far
        if not len(far):
            return
        places = np.minimum(np.searchsorted(far["arrival"], group.arrival), len(far) - 1)
        rows = far[places]
        found = rows["arrival"] == group.arrival
        self._report.find_each(
            ~found & group.is_logged & (group.arrival >= far["arrival"][0]),
            lambda hit: f"{group.place(hit)}: no far row has its arrival {group.arrival[hit]}",
        )
        found &= group.is_logged
        same = rows["size"] == group.sizes
        for name, kind in _SHARED.items():
            same &= np.ascontiguousarray(rows[name]).view(kind) == group.numbers(name)
        self._report.find_each(
            found & ~same, lambda hit: f"{group.place(hit)}: it does not fit its far row, {named(rows[hit])}"
        )
        self._check_bytes(group, found & same)

    def _check_bytes(self, group: Group, wanted: np.ndarray) -> None:
        at = group.arrival - (group.numbers("kind") == MOVE)  # a move's row comes after that of its message
        logged, _ = self._sources.known.find(at)
        segments = self._sources.folder.segments
        differs: dict[int, str] = {}
        held = group.records()
        for hit in np.flatnonzero(wanted & logged).tolist():
            offset = int(at[hit])
            view = segments.view(offset & -segments.segment_bytes)
            position = offset & (segments.segment_bytes - 1)
            if view is not None and view[position : position + len(held[hit])] != held[hit]:
                differs[hit] = f"its record is not the one that the log has at {offset}"
        self._report.count("rows of the table equal to the log", int((wanted & logged).sum()) - len(differs))
        self._find(group, differs)


# -- one row ----------------------------------------------------------------------------------------------------


def _row_problem(row: dict[str, Any]) -> str:
    if row["size"] != len(row["record"]):
        return f"its record has {len(row['record'])} bytes, its size says {row['size']}"
    if row["kind"] == DROP:
        return "it takes a message away and has a record of its own" if row["record"] else ""
    try:
        record = records.decode(row["record"])
        if row["kind"] == MESSAGE:
            return _message_problem(record, row)
        if row["kind"] == CANCEL:
            return _cancel_problem(record, row)
        if row["kind"] == MOVE:
            return _move_problem(record, row)
    except (CorruptLog, IllegalMessage) as error:
        return str(error)
    return f"it is of kind {row['kind']}, which this program does not know"


def _message_problem(record: records.Record, row: dict[str, Any]) -> str:
    properties = decode_properties(record.properties)
    said = (record.topic, properties.get(PROPERTY_KEYS) or None, properties.get(PROPERTY_TAGS) or None)
    if said != (row["topic"], row["key"], row["tag"]):
        return f"its topic, key and tag are {row['topic']!r}, {row['key']!r}, {row['tag']!r}, its record's {said}"
    unsigned = [row[name] % (1 << 64) for name in ("unique_hash", "key_hash")]
    problem = keys_problem(properties, unsigned[0], unsigned[1], row["tag_hash"])
    if row["arrival"] >= OWN:
        return problem  # it may have been postponed, of which its record says nothing
    return problem or due_problem(properties, row["due"], row["level"], record.stored_at_ms)


def _move_problem(record: records.Record, row: dict[str, Any]) -> str:
    source = MovedFrom.parse(decode_properties(record.properties).get(PROPERTY_MOVED, ""))
    if source is None:
        return "its record does not say which message it moves"
    if (source.due_at_ms, source.arrival) != (row["due"], row["unique_hash"]):
        return (
            f"it takes away the message of due {row['due']}, arrival {row['unique_hash']}, its record says "
            f"due {source.due_at_ms}, arrival {source.arrival}"
        )
    return ""


def _cancel_problem(record: records.Record, row: dict[str, Any]) -> str:
    try:
        body = json.loads(record.body)
        said = (body["topic"], body["key"], body["due"])
        column = "unique_hash" if body["by"] == "unique" else "key_hash"
    except (ValueError, KeyError, TypeError) as error:
        return f"its record is no cancel: {error!r}"
    if said != (row["topic"], row["key"], row["due"]):
        return f"it cancels {row['key']!r} of {row['topic']!r} due at {row['due']}, its record says {said}"
    if row[column] % (1 << 64) != key_hash(body["key"]):
        return "the row's hash is not that of the key that it cancels"
    return ""


_UNREADABLE = (DeltaError, TableNotFoundError, OSError, ValueError)


class _Taken(NamedTuple):
    """What the log says that the table has: nothing of it is known where the log could not be applied to its end."""

    far: Far
    position: int  # where the log ends
    first: int  # the number of the first far row that is there
    rows: np.ndarray


def check_table(folder: Folder, path: Path, tables: Tables, refold: Refold, index: Index) -> None:
    """Checks the table at a path of this machine."""
    taken = _taken(tables, refold)
    sources = Sources(folder, index, taken.rows if taken else np.empty(0, FAR_ROW))
    _TableCheck(path / MESSAGES, sources, taken).run()


def _taken(tables: Tables, refold: Refold) -> _Taken | None:
    if refold.fold is None or refold.is_stopped:
        return None
    try:
        return _Taken(refold.fold.far, refold.fold.position, *tables.rows("far"))
    except CorruptQueue:
        return None  # the check of the far queue has reported it


class _TableCheck:
    def __init__(self, path: Path, sources: Sources, taken: _Taken | None) -> None:
        self._path, self._sources, self._taken = path, sources, taken
        self._report = sources.folder.report
        self._seen: dict[str, Seen] = {}

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="postdate-check-") as scratch:
            delta = self._opened(Path(scratch))
            if delta is not None:
                self._check(delta)

    def _check(self, delta: DeltaTable) -> None:
        files = [file for file in list_files(delta) if self._has_statistics(file)]
        self._report.count("files of the table", len(files))
        for file in files:
            seen = check_file(self._path, file, self._sources)
            if seen is not None:
                self._seen[file.path] = seen
        arrivals, drops = self._arrivals(drops=False), self._arrivals(drops=True)
        self._report.count("rows of the table", len(arrivals) + len(drops))
        self._check_once(arrivals)
        self._check_once(drops)
        if self._taken is not None:
            self._check_owner(self._taken, delta)
            self._check_taken(self._taken, arrivals, delta.transaction_version(FAR_TRANSACTION) or 0)

    # -- opening ------------------------------------------------------------------------------------------------

    def _opened(self, scratch: Path) -> DeltaTable | None:
        names = [path.name for path in (self._path / LOG).iterdir()] if (self._path / LOG).is_dir() else []
        known = parse_versions(names)
        if not names:
            # A pipeline that has only just registered has no table yet, and needs none.
            if self._taken is None:
                self._report.find(f"the table {self._path} is missing; what waits in it is not known")
            elif self._taken.far.taken:
                waiting = self._taken.far.rows_in - self._taken.far.rows_out
                self._report.find(f"the table {self._path} is missing; {waiting} rows wait in it")
            return None
        try:
            count = count_sound(known, lambda version: (self._path / entry_path(version)).read_bytes())
            if count < len(known):
                self._report.count("entries of the Delta log that a crash has cut", len(known) - count)
                return DeltaTable(str(self._path), version=known[count] - 1)
            return DeltaTable(str(self._path))
        except _UNREADABLE as error:
            found = self._without_cut_checkpoints(scratch)
            if found is None:
                self._report.find(f"the table {self._path} cannot be read: {str(error).partition(chr(10))[0]}")
            return found

    def _without_cut_checkpoints(self, scratch: Path) -> DeltaTable | None:
        """Without checkpoints of the Delta log that a crash has cut: entries go only when one is durable, so that the
        rest tells all. Nothing is changed, so it is read from a copy. None where that is of no help.
        """
        paths = [path for path in (self._path / LOG).iterdir() if path.name != "_last_checkpoint"]
        whole = [path for path in paths if path.suffix != ".parquet" or is_readable(path)]
        (scratch / LOG).mkdir()
        for path in whole:
            shutil.copyfile(path, scratch / LOG / path.name)
        try:
            delta = DeltaTable(str(scratch))
        except _UNREADABLE:
            return None
        self._report.count("checkpoints of the Delta log that a crash has cut", len(paths) - len(whole))
        return delta

    def _has_statistics(self, file: File) -> bool:
        if None not in file:
            return True
        self._report.find(f"{self._path.name}/{file.path}: the Delta log does not say which due and arrival it holds")
        return False

    # -- all files together -------------------------------------------------------------------------------------

    def _arrivals(self, *, drops: bool) -> np.ndarray:
        """Returns the arrivals of all rows, ascending: of rows that take messages away, or of the others."""
        found = [seen.arrival[seen.is_drop == drops] for seen in self._seen.values()]
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    def _check_once(self, arrivals: np.ndarray) -> None:
        again = np.unique(arrivals[1:][arrivals[1:] == arrivals[:-1]])
        self._report.find_each(
            np.ones(len(again), np.bool_),
            lambda hit: f"the row of arrival {again[hit]} is in the table more than once: {self._owners(again[hit])}",
        )

    def _owners(self, arrival: int) -> str:
        return ", ".join(sorted(name for name, seen in self._seen.items() if (seen.arrival == arrival).any()))

    def _check_owner(self, taken: _Taken, delta: DeltaTable) -> None:
        """Checks that it is the table of this folder, and knows no more than the log."""
        folder = self._sources.folder
        log = Log(folder.disk, folder.segments, 1)
        log.end = taken.position
        marks = read_marks(delta)._replace(far=0)  # that is compared below
        try:
            refuse_foreign(str(self._path), marks, read_identity(folder.disk), taken.far, log)
        except ForeignTable as error:
            self._report.find(str(error))

    def _check_taken(self, taken: _Taken, arrivals: np.ndarray, place: int) -> None:
        far = taken.far
        if not far.taken <= place <= far.length:
            self._report.find(
                f"the table {self._path} says that it has taken {place} far rows, the log that {far.taken} were taken "
                f"of {far.length}"
            )
        self._check_waiting(taken)
        self._check_missing(taken, arrivals, min(max(place, far.taken), far.length))

    def _check_waiting(self, taken: _Taken) -> None:
        far, first_untaken = taken.far, taken.far.arrival_of(taken.far.taken)
        waiting = 0
        for name, (due, arrival, _) in self._seen.items():
            if not is_untaken(name, far.taken):
                is_taken = (arrival < first_untaken) | (arrival >= OWN)
                waiting += int((is_taken & (due > far.horizon_at_ms)).sum())
        self._report.count("rows of the table that wait", waiting)
        expected = far.rows_in - far.rows_out
        if waiting != expected:
            self._report.find(
                f"in the table {self._path} {waiting} rows wait that were taken and are due behind the horizon "
                f"{far.horizon_at_ms}, by the log it must be {expected}"
            )

    def _check_missing(self, taken: _Taken, arrivals: np.ndarray, stop: int) -> None:
        """Reports far rows before `stop` that the table lacks, except promoted ones and those in the wheel."""
        rows = taken.rows[: max(stop - taken.first, 0)]
        wanted = taken.far.waits(rows, taken.first) & (rows["kind"] != JOB)
        places = np.searchsorted(arrivals, rows["arrival"])
        there = np.append(arrivals, -1)[places] == rows["arrival"]
        self._report.find_each(
            wanted & ~there,
            lambda hit: f"far row {taken.first + hit} was taken and waits, but is not in the table: {named(rows[hit])}",
        )

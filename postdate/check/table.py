"""The table of far messages, where it is a local one: does it hold what the log says it took, each row once and true?

What a crash leaves by right is no damage: an entry or a checkpoint of the Delta log that was cut before it counted,
rows that the next batch stages, files that no entry names.
"""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from postdate.check.folder import Folder, named
from postdate.check.known import Index
from postdate.check.refold import Refold
from postdate.check.table_file import Seen, Sources, check_file
from postdate.check.tables import Tables
from postdate.errors import CorruptQueue
from postdate.state.far import FAR as FAR_ROW
from postdate.state.far import Far
from postdate.storage.batch import JOB
from postdate.storage.disk import RealDisk
from postdate.table.format import FAR, LOG, MESSAGES, OWN, File, entry, files_of, is_untaken, sound_count, versions

_DEFAULT = "table"  # its name in the data folder
_UNREADABLE = (DeltaError, TableNotFoundError, OSError, ValueError)


class _Taken(NamedTuple):
    """What the log says that the table has: nothing of it is known where the log could not be applied to its end."""

    far: Far
    first: int  # the number of the first far row that is there
    rows: np.ndarray


def check_table(folder: Folder, tables: Tables, refold: Refold, index: Index) -> None:
    """Passes over a table that is none of this machine's, and a folder that never had a pipeline which named one."""
    path = _path(folder, _told(folder, refold))
    if path is None:
        return
    taken = _taken(tables, refold)
    sources = Sources(folder, index, taken.rows if taken else np.empty(0, FAR_ROW))
    _TableCheck(path, sources, taken).run()


def _told(folder: Folder, refold: Refold) -> str:
    """Where the pipeline that registered last keeps its table."""
    if refold.fold is not None and refold.fold.far.table:
        return refold.fold.far.table
    return str(folder.newest.state["far"].get("table", "")) if folder.newest else ""


def _path(folder: Folder, told: str) -> Path | None:
    """The table's messages. A data folder that was copied has a copy of its own table in it: that one is meant."""
    if not told or not isinstance(folder.disk, RealDisk):
        return None
    parts = urlsplit(told)
    if "://" in told and parts.scheme != "file":
        return None
    path = Path(unquote(parts.path) if "://" in told else told)
    own = folder.disk.root / _DEFAULT
    return (own if path.name == _DEFAULT and own.is_dir() else path) / MESSAGES


def _taken(tables: Tables, refold: Refold) -> _Taken | None:
    if refold.fold is None or refold.is_stopped:
        return None
    try:
        return _Taken(refold.fold.far, *tables.rows("far"))
    except CorruptQueue:
        return None  # the look at the far queue has told it


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
        files = [file for file in files_of(delta) if self._has_statistics(file)]
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
            self._check_taken(self._taken, arrivals, delta.transaction_version(FAR) or 0)

    # -- opening ------------------------------------------------------------------------------------------------

    def _opened(self, scratch: Path) -> DeltaTable | None:
        names = [path.name for path in (self._path / LOG).iterdir()] if (self._path / LOG).is_dir() else []
        known = versions(names)
        if not names:
            self._tell_missing()
            return None
        try:
            count = sound_count(known, lambda version: (self._path / entry(version)).read_bytes())
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
        whole = [path for path in paths if path.suffix != ".parquet" or _is_readable(path)]
        (scratch / LOG).mkdir()
        for path in whole:
            shutil.copyfile(path, scratch / LOG / path.name)
        try:
            delta = DeltaTable(str(scratch))
        except _UNREADABLE:
            return None
        self._report.count("checkpoints of the Delta log that a crash has cut", len(paths) - len(whole))
        return delta

    def _tell_missing(self) -> None:
        """A pipeline that has only just registered has no table yet, and needs none."""
        if self._taken is None or self._taken.far.taken:
            self._report.find(f"the table {self._path} is missing; {self._told_waiting()}")

    def _told_waiting(self) -> str:
        if self._taken is None:
            return "what waits in it is not known"
        return f"{self._taken.far.rows_in - self._taken.far.rows_out} rows wait in it"

    def _has_statistics(self, file: File) -> bool:
        if None not in file:
            return True
        self._report.find(f"{self._path.name}/{file.path}: the Delta log does not say which due and arrival it holds")
        return False

    # -- all files together -------------------------------------------------------------------------------------

    def _arrivals(self, *, drops: bool) -> np.ndarray:
        """Of all rows, ascending: of those that take messages away, or of the others."""
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
        """Far rows before `stop` are in the table, but for those that were promoted or brought into the wheel."""
        rows = taken.rows[: max(stop - taken.first, 0)]
        wanted = taken.far.waits(rows, taken.first) & (rows["kind"] != JOB)
        places = np.searchsorted(arrivals, rows["arrival"])
        there = np.append(arrivals, -1)[places] == rows["arrival"]
        self._report.find_each(
            wanted & ~there,
            lambda hit: f"far row {taken.first + hit} was taken and waits, but is not in the table: {named(rows[hit])}",
        )


def _is_readable(path: Path) -> bool:
    try:
        pq.read_table(path)
    except _UNREADABLE:
        return False
    return True

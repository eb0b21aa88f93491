"""Copies a data folder while its broker runs: the copy is the folder as a crash at one instant would have left it.

A plain copy is not that. It reads a part of the log before the broker writes it and the next part after: a gap, which
the broker takes for damage. Retention removes files in between. And a table that is copied after the log knows more
than the log. So the copy begins by fixing three things that fit together:

    snapshot    the newest one. While it is one of the two that the broker keeps, nothing that it needs is removed
    table       its newest version. No later one comes before the next mark is taken, or we look again
    end         where the log ends now. Not a byte after it is copied

Everything before the end stands still but for files that grow, and what they have more is cut off when the copy is
opened. If the broker has let go of the snapshot meanwhile, a second pass copies what has changed since the first. The
file FORMAT, without which no broker opens a folder, is written last.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from postdate.access.users import AUTH_FILE, FILE_BYTES_MAX, OWNER_ONLY
from postdate.errors import CorruptSnapshot, ForeignFolder, Refused
from postdate.storage import batch as batches
from postdate.storage import record as records
from postdate.storage import segment, snapshot
from postdate.storage.batch import PIPELINE
from postdate.storage.disk import Disk, RealDisk
from postdate.storage.folder import IDENTITY_FILE, read_format, read_identity, write_format
from postdate.storage.segment import Segments

TABLE_FOLDER = "table"
PASSES_MAX = 10
_PIECE_BYTES = 1 << 20
_MARKS_MAX = 1_000  # looks for a moment in which the table stands still: it gets a version each minute or so
_DELTA_LOG = "_delta_log"
_TABLES = ("messages", "history")  # Spark's checkpoint is worth nothing elsewhere

Show = Callable[[int], None]  # is told how many bytes were copied


class Backup(NamedTuple):
    """What was copied."""

    end: int  # of the log
    at_ms: int  # of its last batch: everything that the broker answered until then is in the copy
    file_count: int
    size_bytes: int
    pass_count: int
    table: str  # where the table was; empty if there is none


class _Mark(NamedTuple):
    """The instant that a pass copies."""

    snapshot: int | None
    end: int
    at_ms: int
    table: Path | None
    versions: dict[str, int]  # by table: the newest version


def back_up(source: Disk, target: RealDisk, *, with_table: bool = True, show: Show = lambda _: None) -> Backup:
    """Copies a data folder, whether its broker runs or not, into an empty folder; durable on return.

    Raises ForeignFolder for a source that is no data folder or a target that is not empty, Refused where the table is
    not on this machine (unless `with_table` is off) or no pass came to its end in time, OSError.
    """
    fixed = read_format(source)
    if target.list(""):
        raise ForeignFolder(f"{target.root} is not empty: give a new folder for the copy")
    copy = _Copy(source, target, fixed["segment_bytes"], with_table, show)
    pass_count, mark = 0, None
    while mark is None:
        if pass_count == PASSES_MAX:
            raise Refused(f"in each of {PASSES_MAX} passes the broker took two snapshots: copy it when it is less busy")
        pass_count, mark = pass_count + 1, copy.run()
    copy.sync()
    write_format(target, fixed)
    return Backup(mark.end, mark.at_ms, len(copy.sizes), sum(copy.sizes.values()), pass_count, str(mark.table or ""))


class _Copy:
    """A copy under way, over several passes."""

    def __init__(self, source: Disk, target: RealDisk, segment_bytes: int, with_table: bool, show: Show) -> None:
        self._source, self._target, self._segment_bytes = source, target, segment_bytes
        self._with_table, self._show = with_table, show
        self.sizes: dict[str, int] = {}  # by path: the files in the copy
        self._firm = 0  # what the log had before this was copied by an earlier pass

    def run(self) -> _Mark | None:
        """Makes one pass; returns its mark, or None where the broker has let go of something meanwhile."""
        mark = self._find_mark()
        wanted = set(self._copy_folder(mark))
        is_whole = True
        if mark.table is not None:
            wanted |= (found := self._copy_table(mark.table, mark.versions)) or set()
            is_whole = found is not None
        for path in self.sizes.keys() - wanted:  # of an earlier pass
            self._target.remove(path)
            del self.sizes[path]
        self._firm = mark.end
        kept = snapshot.positions(self._source)
        return mark if is_whole and (mark.snapshot in kept if mark.snapshot is not None else not kept) else None

    # -- the mark -----------------------------------------------------------------------------------------------

    def _find_mark(self) -> _Mark:
        for _ in range(_MARKS_MAX):
            newest = next(iter(snapshot.positions(self._source)), None)
            try:
                address, saved_at_ms = self._read_snapshot(newest)
            except (FileNotFoundError, CorruptSnapshot):
                if newest in snapshot.positions(self._source):
                    raise
                continue  # it is gone: there are newer ones
            table = self._local(address)
            versions = _versions(table)
            end, at_ms, registered = self._walk_log(newest or 0)
            if registered is not None and registered != address:
                table = self._local(registered)  # a pipeline came with another table after the snapshot
                versions = _versions(table)
                end, at_ms, _ = self._walk_log(newest or 0)
            if _versions(table) == versions:
                return _Mark(newest, end, at_ms or saved_at_ms, table, versions)
        raise Refused("the table changes all the time: copy it when the pipeline is less busy")

    def _read_snapshot(self, position: int | None) -> tuple[str, int]:
        """Returns where the pipeline's table is, as the snapshot knows it, empty without one; and the instant of
        the last batch that the snapshot has.
        """
        state: dict[str, Any] = {"far": {}, "at_ms": 0}
        for section in snapshot.read(self._source, position) if position is not None else ():
            if section.kind == snapshot.STATE:
                state |= section.json()  # lists come in slices, but neither of these two is one
        return str(state["far"].get("table", "")), int(state["at_ms"])

    def _local(self, address: str) -> Path | None:
        """Returns the folder of a table. Raises Refused where the table must be copied and is not on this machine."""
        if not address or not self._with_table:
            return None
        parts = urlsplit(address)
        if "://" in address and parts.scheme != "file":
            raise Refused(
                f"the table {address} is not on this machine and cannot be copied with the folder: stop the pipeline, "
                "copy the table by the means of its store, then the folder with --no-table, and start the pipeline"
            )
        path = Path(unquote(parts.path) if "://" in address else address)
        return path if path.is_dir() else None

    def _walk_log(self, start: int) -> tuple[int, int, str | None]:
        """Returns where the log ends now, the instant of its last batch, and the table of the last pipeline that has
        registered since `start`, None without one.
        """
        segments, at_ms, table = Segments(self._source, self._segment_bytes), 0, None
        while True:
            base = start & -self._segment_bytes
            view = segments.view(base)
            batch = None if view is None else batches.parse(view, start - base, start).batch
            if view is None or batch is None:
                return start, at_ms, table
            rows = batch.array()
            for row in rows[rows["kind"] == PIPELINE]:
                at = batch.offset - base + int(row["position"])
                table = json.loads(records.decode(view[at : at + int(row["size"])]).body).get("table", "")
            start, at_ms = batch.end, batch.at_ms

    # -- the folder ---------------------------------------------------------------------------------------------

    def _copy_folder(self, mark: _Mark) -> Iterator[str]:
        """Copies everything but the table; yields the paths that belong to the copy.

        Rows come before the records that they speak of: retention removes a segment first and its rows after that, so a
        segment that is still there now had its rows when those were copied.
        """
        if read_identity(self._source):
            yield self._copy(IDENTITY_FILE)
        if self._source.size(AUTH_FILE) >= 0:
            yield self._copy_users()
        queues = [f"queues/{number}/{kind}" for number in self._source.list("queues") for kind in ("entries", "times")]
        for folder in (*queues, "far", "index", "once"):
            for name in self._source.list(folder):
                path = f"{folder}/{name}"
                yield path if self._source.size(path) == self.sizes.get(path) else self._copy(path)
        for folder in ("chunks", "selections"):
            for name in self._source.list(folder):
                yield self._copy(f"{folder}/{name}")
        for name in self._source.list(segment.FOLDER):
            if name.isdecimal() and int(name) < mark.end:
                yield self._copy_segment(int(name), mark.end)
        if mark.snapshot is not None:
            yield self._copy(snapshot.path_of(mark.snapshot))

    def _copy_users(self) -> str:
        """Copies the users: without them a restored broker would ask nobody who they are. They are read at once, as
        another file takes their place when they change. The token stays: the restored folder gets one of its own.
        """
        data = self._source.read(AUTH_FILE, 0, FILE_BYTES_MAX)
        path = self._target.root / AUTH_FILE
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY), "wb") as file:
            file.write(data)
        self.sizes[AUTH_FILE] = len(data)
        self._show(len(data))
        return AUTH_FILE

    def _copy_segment(self, base: int, end: int) -> str:
        """Copies a segment up to the end of the log, and zeros after that."""
        path, after = segment.path_of(base), base + self._segment_bytes
        if after <= self._firm and path in self.sizes:
            return path
        used = min(after, end) - base
        self._copy(path, used)
        if path not in self.sizes:
            return path
        for position in range(used, self._segment_bytes, _PIECE_BYTES):
            self._target.write(path, position, bytes(min(_PIECE_BYTES, self._segment_bytes - position)))
        self.sizes[path] = self._segment_bytes
        return path

    def _copy(self, path: str, size: int | None = None) -> str:
        """Copies a file, or its first `size` bytes. A file that is gone meanwhile is not needed, unless the snapshot is
        gone too.
        """
        left = self._source.size(path) if size is None else size
        if path in self.sizes:
            self._target.truncate(path, 0)
        self.sizes[path] = 0
        self._target.write(path, 0, b"")
        try:
            while self.sizes[path] < left:
                data = self._source.read(path, self.sizes[path], min(_PIECE_BYTES, left - self.sizes[path]))
                if not data:
                    break
                self._target.write(path, self.sizes[path], data)
                self.sizes[path] += len(data)
                self._show(len(data))
            if left >= 0:
                return path
        except FileNotFoundError:
            pass
        self._target.remove(path)
        del self.sizes[path]
        return path

    # -- the table ----------------------------------------------------------------------------------------------

    def _copy_table(self, root: Path, versions: dict[str, int]) -> set[str] | None:
        """Copies the files of a table, up to its version; None where one has vanished. Files of a table never change,
        and stay for an hour after it has let them go.
        """
        table, wanted = RealDisk(root), set()
        for name in _TABLES:
            for path in _files_of(root, name):
                if Path(path).parent.name == _DELTA_LOG and not 0 <= _version_of(Path(path).name) <= versions[name]:
                    continue  # of a later version, or a hint that may name one
                copied = f"{TABLE_FOLDER}/{path}"
                wanted.add(copied)
                try:
                    size = table.size(path)
                    if self.sizes.get(copied) == size and _DELTA_LOG not in path:
                        continue
                    self._copy_from(table, path, copied, size)
                except FileNotFoundError:
                    return None
        return wanted

    def _copy_from(self, table: RealDisk, path: str, copied: str, size: int) -> None:
        for position in range(0, size, _PIECE_BYTES):
            data = table.read(path, position, min(_PIECE_BYTES, size - position))
            self._target.write(copied, position, data)
            self._show(len(data))
        self.sizes[copied] = size

    # -- the end ------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        for path in self.sizes:
            self._target.sync(path)
        for folder in {os.path.dirname(path) for path in self.sizes}:
            self._target.sync_folder(folder)


def _versions(table: Path | None) -> dict[str, int]:
    """Returns the newest version of each table."""
    if table is None:
        return {}
    names = {name: RealDisk(table).list(f"{name}/{_DELTA_LOG}") for name in _TABLES}
    return {name: max(map(_version_of, found), default=-1) for name, found in names.items()}


def _version_of(name: str) -> int:
    """The version that a file of a Delta log belongs to; -1 for files of none, such as _last_checkpoint."""
    digits = name.partition(".")[0]
    return int(digits) if digits.isdecimal() else -1


def _files_of(root: Path, name: str) -> list[str]:
    """The files of a table, its log first, so that every file that the copied log names is there."""
    found = [Path(folder) / file for folder, _, files in os.walk(root / name) for file in files]
    paths = [str(path.relative_to(root)) for path in found]
    return sorted(paths, key=lambda path: (_DELTA_LOG not in path, path))

"""Files of the table: writes sorted Parquet, reads windows of due. On a local disk it syncs a file before it counts."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from postdate.arrival import NEVER
from postdate.errors import CorruptTable
from postdate.faultpoint import reach
from postdate.process import PRIVATE_FILE, Pacer
from postdate.table.format import (
    CANCEL,
    MESSAGE,
    MOVE,
    ORDER,
    ROW_GROUP_ROWS,
    SCHEMA,
    File,
    name_taken_in,
    writer_options,
)
from postdate.table.keys import PREFIX, encode_index, name_file, name_index
from postdate.table.living import has_arrived, is_unpromoted

_WINDOW_COLUMNS = ("due", "arrival", "kind")  # they tell whether a row is in a window
_WHOLE = pa.array([CANCEL, MOVE], pa.int8())  # kinds that are for rows of other arrivals, so that each window has all
PIECE_ROWS, PIECE_BYTES = 32_768, 16 << 20  # sorted at once, or a little more
SYNC_TRACE = "POSTDATE_SYNC_TRACE"  # a file that gets one line per sync, for tests of a power loss


class RowGroup(NamedTuple):
    """The statistics of a row group."""

    rows: int
    bytes: int
    due_low: int
    due_high: int
    arrival_low: int
    arrival_high: int
    has_cancels: bool  # or drops, or moves


class WrittenFile(NamedTuple):
    """A new file of the table and its row groups."""

    file: File
    groups: list[RowGroup]


class Window(NamedTuple):
    """The rows that a task reads: due_low < due <= due_high and arrival_low <= arrival < arrival_high.

    Rows due at or before `after` are promoted already. Of them only the late ones count: those that arrived at or after
    `late_from`. Rows that arrived in the log at or after `before` do not count.
    """

    due_low: int
    due_high: int
    arrival_low: int = 0
    arrival_high: int = NEVER
    after: int = -1
    late_from: int = NEVER
    before: int = NEVER

    @property
    def whole(self) -> "Window":
        """The same window for files of which nothing is promoted yet."""
        return self._replace(after=-1)


class Slice(NamedTuple):
    """A part of a window that one task can hold, and the files that it touches."""

    window: Window
    files: list[str]
    untaken: list[str]  # those of them of which nothing is promoted yet


# -- the folder -------------------------------------------------------------------------------------------------


class TableFolder:
    """The folder of a table, on the file system that its URI names."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        if "://" in uri:
            self.files, self.base = fs.FileSystem.from_uri(uri)
        else:
            self.files, self.base = fs.LocalFileSystem(), str(Path(uri).resolve())
        self.is_local = isinstance(self.files, fs.LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.base}/{name}"

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the sizes of the files of the folder, or of one inside it, by name."""
        selector = fs.FileSelector(self.path(folder) if folder else self.base)
        found = self.files.get_file_info(selector)
        return {info.base_name: info.size for info in found if info.type is fs.FileType.File}

    def open_output(self, name: str) -> Any:
        """Opens a new file for writing."""
        path = self.path(name)
        return pa.PythonFile(_PacedFile(path), "w") if self.is_local else self.files.open_output_stream(path)

    def sync(self, names: Iterable[str]) -> None:
        """Makes files and the folders that name them durable. An object store does so by itself."""
        if not self.is_local:
            return
        folders = set()
        for name in names:
            sync_path(self.path(name))
            folders.add(os.path.dirname(self.path(name)))
        for folder in sorted(folders):
            sync_path(folder)

    def drop_from_cache(self, name: str) -> None:
        """Drops a file from the page cache: nothing reads it soon, and it would displace others."""
        if self.is_local:
            handle = os.open(self.path(name), os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)

    def rename(self, source: str, target: str) -> None:
        """Renames a file, durable on return; does nothing where that is done. Raises FileNotFoundError where neither
        exists.
        """
        kinds = [info.type for info in self.files.get_file_info([self.path(source), self.path(target)])]
        if fs.FileType.File not in kinds:
            raise FileNotFoundError(f"{source} of the table {self.uri} is missing")
        if kinds[1] is not fs.FileType.File:
            self.files.move(self.path(source), self.path(target))
            self.sync([target])

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        return bool(self.files.get_file_info(self.path(name)).type is fs.FileType.File)

    def remove(self, name: str) -> None:
        """Removes a file. It may be gone: an aborted import and a pipeline that cleans up remove the same files."""
        with suppress(FileNotFoundError):
            self.files.delete_file(self.path(name))

    def sync_folders(self) -> None:
        """Makes the folder of a new table and the two folders above it durable."""
        if self.is_local:
            for folder in (self.base, os.path.dirname(self.base), os.path.dirname(os.path.dirname(self.base))):
                sync_path(folder)


class _PacedFile:
    """A local file whose bytes go to the disk while it is written, so that its last sync is short."""

    def __init__(self, path: str) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_FILE)
        self._file = open(handle, "wb", buffering=0)  # noqa: SIM115 - pyarrow closes it
        self._pacer = Pacer(lambda: os.fdatasync(self._file.fileno()))

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._pacer.wrote(size)
        return size

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        try:
            self._pacer.close()
        finally:
            self._file.close()


def sync_path(path: str) -> None:
    """Syncs a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        size = os.fstat(handle).st_size
    finally:
        os.close(handle)
    trace = os.environ.get(SYNC_TRACE)
    if trace:
        with open(trace, "a", encoding="utf-8") as lines:
            names = sorted(os.listdir(path)) if os.path.isdir(path) else None
            lines.write(json.dumps({"path": path, "size": size, "names": names}) + "\n")


# -- writing ----------------------------------------------------------------------------------------------------


def write_file(folder: TableFolder, name: str, rows: pa.Table) -> WrittenFile:
    """Writes sorted rows as one file and its index of keys beside it, durable on return."""
    rows = rows.select(SCHEMA.names).cast(SCHEMA)
    with folder.open_output(name) as out:
        writer = pq.ParquetWriter(out, SCHEMA, **writer_options(name))
        writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
        writer.close()
    with folder.open_output(name_index(name)) as out:
        out.write(encode_index(rows))
    reach("file.written")
    folder.sync([name, name_index(name)])
    reach("file.synced")
    if name.startswith(("later", "month")):
        folder.drop_from_cache(name)
    return describe_file(folder, name)


def describe_file(folder: TableFolder, name: str) -> WrittenFile:
    """Describes an existing file by its own statistics."""
    groups = read_row_groups(folder, name)
    file = File(
        name,
        folder.files.get_file_info(folder.path(name)).size,
        sum(group.rows for group in groups),
        min(group.due_low for group in groups),
        max(group.due_high for group in groups),
        min(group.arrival_low for group in groups),
        max(group.arrival_high for group in groups),
    )
    return WrittenFile(file, groups)


def rename_file(folder: TableFolder, source: str, target: str) -> None:
    """Renames a file and its index, durable on return; does nothing where that is done. Raises FileNotFoundError where
    no file of either name exists.
    """
    with suppress(FileNotFoundError):  # an earlier version has written it without one
        folder.rename(name_index(source), name_index(target))
    folder.rename(source, target)


def remove_file(folder: TableFolder, name: str) -> None:
    """Removes a file and its index; either may be gone."""
    for each in (name, name_index(name)):
        folder.remove(each)


def remove_idle_indexes(folder: TableFolder) -> None:
    """Removes the indexes of files that are gone. A task writes the index after its file, so none is taken that a file
    is about to get.
    """
    names = folder.sizes()
    for name in names:
        if name.startswith(PREFIX) and name_file(name) not in names:
            folder.remove(name)


def read_row_groups(folder: TableFolder, name: str) -> list[RowGroup]:
    return parse_row_groups(pq.read_metadata(folder.path(name), filesystem=folder.files))


def parse_row_groups(metadata: Any) -> list[RowGroup]:
    names = [metadata.schema.column(index).name for index in range(metadata.num_columns)]
    due, arrival, kind = (names.index(name) for name in ("due", "arrival", "kind"))
    groups = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        dues, arrivals, kinds = (group.column(column).statistics for column in (due, arrival, kind))
        ranges = (dues.min, dues.max, arrivals.min, arrivals.max)
        groups.append(RowGroup(group.num_rows, group.total_byte_size, *ranges, kinds.max != MESSAGE))
    return groups


def find_beside(folder: TableFolder, path: str, far: int) -> str:
    """Returns the name that a file of a job has now: its own, beside the table, or that of a batch that was about to
    take it in, at this far row or at an earlier one. Raises FileNotFoundError.
    """
    for name in (path, name_taken_in(path, far)):
        if folder.has(name):
            return name
    other = name_taken_in(path, far).rpartition("-")[2]
    for name in folder.sizes():
        if name.endswith(f"-{other}"):
            return name
    raise FileNotFoundError(f"{path} of the table {folder.uri} is missing")


# -- reading ----------------------------------------------------------------------------------------------------


def touches(group: RowGroup | File, window: Window) -> bool:
    """Whether a file or row group may hold rows of a window, by its statistics."""
    if group.due_low > window.due_high or group.due_high <= window.due_low:
        return False
    if group.due_high <= window.after and group.arrival_high < window.late_from:
        return False
    within = group.arrival_low < window.arrival_high and group.arrival_high >= window.arrival_low
    return within or (isinstance(group, RowGroup) and group.has_cancels)


class _Source:
    """An open file of the table and those of its row groups that a window touches. Raises CorruptTable."""

    def __init__(self, folder: TableFolder, name: str, window: Window) -> None:
        self._folder = folder
        self._name = name
        self._window = window
        with self._naming():
            self._handle = folder.files.open_input_file(folder.path(name))
            self._file = pq.ParquetFile(self._handle, page_checksum_verification=True)
            groups = enumerate(parse_row_groups(self._file.metadata))
            self.groups = {index: group for index, group in groups if touches(group, window)}

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    def read(self, indexes: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Reads the rows of the window in some row groups."""
        wanted = pa.schema([SCHEMA.field(name) for name in columns])
        if not indexes:
            return wanted.empty_table()
        needed = dict.fromkeys([*columns, *_WINDOW_COLUMNS])
        with self._naming():
            rows = self._file.read_row_groups(list(indexes), columns=list(needed), use_threads=False)
        mask = _in_window(rows, self._window)
        rows = rows if pc.all(mask).as_py() else rows.filter(mask)
        return rows.select(wanted.names).cast(wanted)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turns an error of reading into one that names the file."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise unreadable_error(self._folder, self._name, error) from error


def read_window(
    folder: TableFolder, names: Sequence[str], window: Window, columns: Sequence[str] = tuple(SCHEMA.names)
) -> pa.Table:
    """Reads the messages of a window and all cancels and moves due in it, whenever they arrived, in no order. Raises
    CorruptTable.
    """
    pieces = []
    for name in names:
        with _Source(folder, name, window) as source:
            pieces.append(source.read(list(source.groups), columns))
    return pa.concat_tables(pieces) if pieces else pa.schema([SCHEMA.field(name) for name in columns]).empty_table()


class SortedRows:
    """Reads the rows of a window in (due, arrival) order, piece by piece. Files are sorted and row groups have
    statistics, so few row groups are in memory at a time: allocating memory costs more than reading. `untaken` are the
    files of which nothing is promoted yet. Raises CorruptTable.
    """

    def __init__(
        self,
        folder: TableFolder,
        names: Sequence[str],
        window: Window,
        untaken: Sequence[str] = (),
        piece: tuple[int, int] = (PIECE_ROWS, PIECE_BYTES),
    ) -> None:
        self._piece_rows, self._piece_bytes = piece
        self._open = ExitStack()
        try:
            windows = [(name, window.whole if name in untaken else window) for name in names]
            self._sources = [self._open.enter_context(_Source(folder, name, own)) for name, own in windows]
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> "SortedRows":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def has_cancels(self) -> bool:
        """Whether there may be rows that take messages away."""
        return any(group.has_cancels for source in self._sources for group in source.groups.values())

    def count(self) -> int:
        """Returns how many rows the window holds."""
        return sum(source.read(list(source.groups), _WINDOW_COLUMNS).num_rows for source in self._sources)

    def pieces(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields rows in order. Rows due at one instant are in one piece."""
        groups = sorted(
            (group.due_low, number, index)
            for number, source in enumerate(self._sources)
            for index, group in source.groups.items()
        )
        edges = [low for low, _, _ in groups[1:]] + [NEVER + 1]
        held: list[pa.Table] = []
        tried = -1
        for (_, number, index), edge in zip(groups, edges, strict=True):
            held.append(self._sources[number].read([index], columns))
            if edge > NEVER or (edge > tried and self._is_enough(held)):
                rows, tried = sort_rows(pa.concat_tables(held)), edge
                count = rows.num_rows if edge > NEVER else pc.sum(pc.less(rows.column("due"), edge)).as_py() or 0
                held = [rows.slice(count)]
                if count:
                    yield rows.slice(0, count)

    def _is_enough(self, held: list[pa.Table]) -> bool:
        rows, size = (sum(getattr(table, name) for table in held) for name in ("num_rows", "nbytes"))
        return bool(rows >= self._piece_rows or size >= self._piece_bytes)


def has_arrived_within(rows: pa.Table, window: Window) -> pa.ChunkedArray:
    """Returns which rows arrived in a window's range of arrivals, and not too late for it."""
    arrival = rows.column("arrival")
    within = pc.and_(pc.greater_equal(arrival, window.arrival_low), pc.less(arrival, window.arrival_high))
    return within if window.before == NEVER else pc.and_(within, has_arrived(arrival, window.before))


def arrived_within(rows: pa.Table, window: Window) -> int:
    """Returns how many rows did."""
    return int(pc.sum(has_arrived_within(rows, window)).as_py() or 0)


def constant_column(value: object, kind: pa.DataType, count: int) -> pa.Array:
    """Returns a column that repeats one value."""
    return pa.array([value], kind).take(pa.repeat(0, count))


def sort_rows(rows: pa.Table) -> pa.Table:
    """Sorts rows by (due, arrival)."""
    return rows.take(pc.sort_indices(rows, sort_keys=ORDER))


def unreadable_error(folder: TableFolder, name: str, error: Exception) -> CorruptTable:
    """Names the file, for people and for the pipeline that sets it aside."""
    found = CorruptTable(
        f"{name} of the table {folder.uri} cannot be read: {error}. A pipeline that runs sets it aside if it is "
        "damaged, and restores what the log still has of it."
    )
    found.path = name
    return found


class Salvaged(NamedTuple):
    """What can be read of a damaged file, as another file; None where that is nothing."""

    left: WrittenFile | None


def salvage_file(folder: TableFolder, name: str, target: str) -> Salvaged | None:
    """Writes the row groups of a damaged file that can be read as another one, durable on return. Returns None where
    the file is whole, or its bytes cannot be had: then its storage is away, and another try may find it.

    All of it is in memory meanwhile, so that no error of the storage is taken for damage.
    """
    try:
        with folder.files.open_input_stream(folder.path(name)) as stream:
            data = stream.read_buffer()
    except OSError:
        return None
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    except (OSError, ValueError):
        return Salvaged(None)
    groups = [_read_group(file, number) for number in range(file.metadata.num_row_groups)]
    found = [group for group in groups if group is not None]
    if len(found) == len(groups):
        return None
    return Salvaged(write_file(folder, target, pa.concat_tables(found)) if found else None)


def _read_group(file: Any, number: int) -> pa.Table | None:
    """Reads a row group; None where it is damaged."""
    try:
        return file.read_row_group(number, use_threads=False)
    except (OSError, ValueError):
        return None


def _in_window(rows: pa.Table, window: Window) -> pa.ChunkedArray:
    due, arrival = rows.column("due"), rows.column("arrival")
    mask = pc.and_(pc.greater(due, window.due_low), pc.less_equal(due, window.due_high))
    if window.after > window.due_low:
        mask = pc.and_(mask, is_unpromoted(due, arrival, window.after, window.late_from))
    if window.arrival_low or min(window.arrival_high, window.before) != NEVER:
        mask = pc.and_(mask, pc.or_(has_arrived_within(rows, window), pc.is_in(rows.column("kind"), _WHOLE)))
    return mask

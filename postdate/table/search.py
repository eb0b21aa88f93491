"""Searching rows of the table by their keys: with the index beside each file (keys.py), or without, by its columns.

messages    those that stand under some hashes, as far as their records have the key
undropped   those of them that no drop or move takes away; these are found by the message's own hashes
living      those of them that no cancel takes away either, and those that one does
"""

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postdate.arrival import NEVER
from postdate.table import keys
from postdate.table.files import TableFolder
from postdate.table.format import CANCEL, MESSAGE, SCHEMA
from postdate.table.keys import KeyIndex, entries_of, mix, name_index, open_index
from postdate.table.living import Removals, drops_of, names_key

_INDEXES_MAX = 800  # that are open at once: each has a file descriptor, of which a process may have 1,024
_NARROW = ["due", "arrival", "kind", "topic", "queue", "unique_hash", "key_hash", "tag_hash"]
_ROWS = pa.schema([SCHEMA.field(name) for name in (*_NARROW, "record")])

Dues = Collection[int] | None  # None: any
IsMeant = Callable[[pa.Table], Any]  # which rows, by their columns
HasKey = Callable[[bytes], bool]  # whether a record has it


class Place(NamedTuple):
    """A file in which a question looks, and the range of its dues."""

    path: str
    due_low: int = -1
    due_high: int = NEVER


class Indexes:
    """The indexes that were used last, by their paths; None where a file has none. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, KeyIndex | None] = OrderedDict()

    def get(self, folder: TableFolder, name: str) -> KeyIndex | None:
        """Returns the index of a file."""
        path = folder.path(name_index(name))
        with self._lock:
            if path in self._known:
                self._known.move_to_end(path)
                return self._known[path]
        found = open_index(folder.files, path)
        with self._lock:
            self._known[path] = found
            while len(self._known) > _INDEXES_MAX:
                self._known.popitem(last=False)
        return found

    def close_others(self, folder: TableFolder, names: Collection[str]) -> None:
        """Closes the indexes of files other than these. A search that uses one of them ends with it."""
        wanted = {folder.path(name_index(name)) for name in names}
        with self._lock:
            for path in [path for path in self._known if path not in wanted]:
                del self._known[path]


class Search:
    """Searches some files of one version of the table. Raises FileNotFoundError where the table changes meanwhile,
    OSError, pyarrow's errors.
    """

    def __init__(self, folder: TableFolder, places: Sequence[Place], indexes: Indexes) -> None:
        self._folder, self._places, self._indexes = folder, places, indexes

    def messages(
        self, hashes: Collection[int], dues: Dues, is_meant: IsMeant, has_key: HasKey
    ) -> Iterator[pa.Table]:  # fmt: skip
        """Yields the messages that stand under one of these hashes, are meant and have the key; one table for each row
        group that is read.
        """
        for place in self._places:
            for file, group, rows in self._rows(place, hashes, dues):
                is_message = pc.equal(rows["kind"], MESSAGE)
                alike = _with_records(file, group, rows.filter(pc.and_(is_message, is_meant(rows))))
                yield alike.filter(pa.array(map(has_key, alike["record"].to_pylist()), pa.bool_()))

    def undropped(self, messages: pa.Table, drops: pa.Table) -> pa.Table:
        """Returns those of some messages that no drop or move takes away: no row of the table, and none of these drops.
        Cancelled ones are among them.
        """
        return messages.filter(_drop(drops_of(self._removing(messages, ("arrival",))), drops).living(messages))

    def living(self, messages: pa.Table, drops: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Returns those of some messages that nothing takes away, and those that nothing but a cancel does."""
        rows = self._removing(messages, ("arrival", "unique_hash", "key_hash"))
        messages = messages.filter(_drop(drops_of(rows), drops).living(messages))
        cancels = rows.filter(pc.equal(rows["kind"], CANCEL))
        record, cancel = messages["record"], cancels["record"]
        is_living = Removals(cancels).living(messages, lambda at, by: names_key(cancel[by].as_py(), record[at].as_py()))
        return messages.filter(is_living), messages.filter(pc.invert(is_living))

    def _removing(self, messages: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Returns the cancels, drops and moves that these columns of some messages lead to."""
        dues = set(messages["due"].to_pylist())
        hashes = {mix(value) for name in columns for value in messages[name].to_pylist()}
        found = [_ROWS.empty_table()]
        for place in self._places:
            for file, group, rows in self._rows(place, hashes, dues):
                found.append(_with_records(file, group, rows.filter(pc.not_equal(rows["kind"], MESSAGE))))
        return pa.concat_tables(found)

    def _rows(self, place: Place, hashes: Collection[int], dues: Dues) -> Iterator[tuple[Any, int, pa.Table]]:
        """Yields the rows of a file that stand under one of these hashes and have one of these dues, row group by row
        group, with what it takes to read their records.
        """
        if dues is not None and not any(place.due_low <= due <= place.due_high for due in dues):
            return
        index = self._indexes.get(self._folder, place.path)
        numbers = None if index is None else index.find(hashes)
        if numbers == []:
            return
        with pq.ParquetFile(self._folder.path(place.path), filesystem=self._folder.files) as file:
            by_group = None if numbers is None else _split(file, numbers)
            for group in _choose_groups(file, dues) if by_group is None else by_group:
                chosen = _scan(file, group, hashes) if by_group is None else by_group[group]
                if chosen:
                    rows = file.read_row_group(group, _NARROW).take(chosen)
                    rows = rows.append_column("row", pa.array(chosen, pa.int64()))
                    if dues is not None:
                        rows = rows.filter(pc.is_in(rows["due"], pa.array(dues, pa.int64())))
                    if rows.num_rows:
                        yield file, group, rows


def _drop(gone: pa.Table, drops: pa.Table) -> Removals:
    return Removals(drops=pa.concat_tables([gone, drops.select(gone.column_names).cast(gone.schema)]))


def _split(file: Any, numbers: Sequence[int]) -> dict[int, list[int]] | None:
    """Splits ascending row numbers by row group, where they count from 0; None where the file has not as many rows."""
    found: dict[int, list[int]] = {}
    start = at = 0
    for group in range(file.metadata.num_row_groups):
        stop = start + file.metadata.row_group(group).num_rows
        end = bisect_left(numbers, stop, at)
        if end > at:
            found[group] = [number - start for number in numbers[at:end]]
        start, at = stop, end
    return found if at == len(numbers) else None


def _choose_groups(file: Any, dues: Dues) -> Iterator[int]:
    """Yields the row groups that may hold rows of one of these dues."""
    column = file.schema_arrow.get_field_index("due")
    for number in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(number).column(column).statistics
        is_unknown = dues is None or statistics is None or not statistics.has_min_max
        if is_unknown or any(statistics.min <= due <= statistics.max for due in dues or ()):
            yield number


def _scan(file: Any, group: int, hashes: Collection[int]) -> list[int]:
    """Returns the rows of a row group that stand under one of these hashes, as an index would tell it."""
    places, rows = entries_of(file.read_row_group(group, list(keys.COLUMNS)))
    hits = rows.filter(pc.is_in(places, pa.array(hashes, pa.uint32())))
    return sorted(set(hits.to_pylist()))


def _with_records(file: Any, group: int, rows: pa.Table) -> pa.Table:
    """Returns the rows with their records. Reads those only where there are rows."""
    if not rows.num_rows:
        return _ROWS.empty_table()
    record = file.read_row_group(group, ["record"])["record"].take(rows["row"])
    return rows.append_column("record", record).select(_ROWS.names).cast(_ROWS)

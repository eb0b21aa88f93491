"""What executors do: turn ranges of the far queue into files, and windows of due into chunks or merged files.

A task gets a plain dict and answers with one. It can run again: an earlier attempt leaves at most a file that nothing
names.
"""

import json
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import flight

from postdate.arrival import NEVER
from postdate.client.errors import Unreachable
from postdate.errors import CorruptTable
from postdate.faultpoint import reach
from postdate.process import keep_freed_memory
from postdate.spark.executor.bulk_client import BulkClient
from postdate.table.files import (
    RowGroup,
    Slice,
    TableFolder,
    Window,
    WrittenFile,
    arrived_within,
    constant_column,
    has_arrived_within,
    read_window,
    sort_rows,
    write_file,
)
from postdate.table.format import BATCH_TIERS, DROP, SCHEMA, File, batch_file_name, writer_options
from postdate.table.promoting import DueRows, name_chunk

Task = dict[str, Any]
Result = dict[str, Any]
Batches = Iterator[pa.RecordBatch]

RESULT = pa.schema([pa.field("result", pa.string())])
_SAID_MAX = 300  # characters of a Flight error that the driver gets
_PIECE_BYTES = 128 << 20  # of records that a task holds in memory before it writes a file


class BulkAway(Unreachable):
    """The operator's fault, mostly: bulk does not answer an executor, or the broker does not answer bulk."""


def over_numbers(work: Callable[[Task], Result], common: Task, tasks: list[Task]) -> Callable[[Batches], Batches]:
    """The function for mapInArrow over rows that are numbers of tasks."""
    return lambda batches: _answers(work, (common | tasks[number] for number in _values(batches)))


def _values(batches: Batches) -> Iterator[Any]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _answers(work: Callable[[Task], Result], tasks: Iterator[Task]) -> Batches:
    """One row per task, with the executor that ran it: all workers of an executor have one parent."""
    keep_freed_memory()
    worker = {"worker": f"{socket.gethostname()}:{os.getppid()}"}
    for task in tasks:
        yield pa.RecordBatch.from_pydict({"result": [json.dumps(_answer(work, task) | worker)]}, schema=RESULT)


def _answer(work: Callable[[Task], Result], task: Task) -> Result:
    """Runs a task. What the driver must know by name becomes part of the answer: Spark would make a text of it. That is
    a damaged table, which a second try would not mend, and a bulk that is away.
    """
    try:
        return work(task)
    except CorruptTable as error:
        return {"damage": str(error), "damaged": error.path}
    except (flight.FlightUnavailableError, flight.FlightTimedOutError) as error:
        return {"away": str(error).partition("\n")[0][:_SAID_MAX]}


def read_results(lines: Iterable[str]) -> list[Result]:
    """Reads the answers of tasks. Raises CorruptTable where one of them met damage, BulkAway where it had no bulk."""
    found: list[Result] = [json.loads(line) for line in lines]
    for result in found:
        if "damage" in result:
            error = CorruptTable(result["damage"])
            error.path = result["damaged"]
            raise error
        if "away" in result:
            raise BulkAway(f"bulk does not answer an executor: {result['away']}")
    return found


def written_files(found: Iterable[Result]) -> list[WrittenFile]:
    """The files that tasks have written."""
    return [
        WrittenFile(File(*file), [RowGroup(*group) for group in groups])
        for result in found
        for file, groups in result["files"]
    ]


def warm_up(task: Task) -> Result:
    """Loads everything, and sorts and writes a little, so that the first real task of a worker need not wait."""
    rows = SCHEMA.empty_table()
    sink = pa.BufferOutputStream()
    pq.write_table(sort_rows(rows), sink, **writer_options("soon"))
    return {"rows": task["rows"] + pq.read_table(pa.BufferReader(sink.getvalue())).num_rows}


# -- ingest -----------------------------------------------------------------------------------------------------


def ingest(task: Task) -> Result:
    """Far rows start..stop-1 into files: rows due before `edge` apart from the others."""
    place, files = TableFolder(task["table"]), []
    with BulkClient(task["bulk"]) as bulk:
        # By map, so that no name here holds a piece that is sorted already.
        for rows in map(sort_rows, map(_as_rows, pieces(bulk.far(task["start"], task["stop"])))):
            files += write_tiers(place, rows, task["edge"], task["start"])
    return {"files": plain(files)}


def pieces(batches: Batches) -> Iterator[pa.Table]:
    """Joins batches into tables of about 128 MB."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= _PIECE_BYTES:
            yield _emptied(held)
            size = 0
    if held:
        yield _emptied(held)


def _emptied(held: list[pa.RecordBatch]) -> pa.Table:
    """Joins the batches and empties the list: a piece is large, and its reader must be able to free it."""
    table = pa.Table.from_batches(held)
    held.clear()
    return table


def _as_rows(far: pa.Table) -> pa.Table:
    flags = constant_column(0, pa.int32(), far.num_rows)
    far = far.append_column("flags", flags).append_column("size", pc.binary_length(far.column("record")))
    return far.select(SCHEMA.names).cast(SCHEMA)


def write_tiers(place: TableFolder, rows: pa.Table, edge: int, far: int) -> list[WrittenFile]:
    """Writes sorted rows as files of a batch that begins at a far row: rows due before `edge` apart from the others."""
    return [write_file(place, batch_file_name(tier, far, _fresh()), part) for tier, part in in_tiers(rows, edge)]


def in_tiers(rows: pa.Table, edge: int) -> list[tuple[str, pa.Table]]:
    soon = pc.sum(pc.less(rows.column("due"), edge)).as_py() or 0
    parts = zip(BATCH_TIERS, (rows.slice(0, soon), rows.slice(soon)), strict=True)
    return [(tier, part) for tier, part in parts if part.num_rows]


def plain(files: list[WrittenFile]) -> list[Any]:
    """Files as JSON lists."""
    return [[list(file), [list(group) for group in groups]] for file, groups in files]


def _fresh() -> str:
    return uuid.uuid4().hex[:12]


# -- promote ----------------------------------------------------------------------------------------------------


def promote(task: Task) -> Result:
    """Uploads a slice of the table as one chunk, without what is cancelled."""
    part = Slice(Window(*task["window"]), task["files"], task["untaken"])
    uploaded = None
    with DueRows(TableFolder(task["table"]), part) as rows:
        if rows.count:
            reach("chunk.upload")
            with BulkClient(task["bulk"]) as bulk:
                uploaded = bulk.upload(name_chunk(task["epoch"]), rows.count, rows.pieces())
            reach("chunk.uploaded")
    counts: Result = {"read": rows.read, "cancelled": rows.cancelled, "rows": rows.rows, "chunk": None}
    return counts if uploaded is None else counts | {"chunk": uploaded.name, "bytes": uploaded.bytes}


# -- merge ------------------------------------------------------------------------------------------------------


def merge(task: Task) -> Result:
    """Writes a window of the table as new files, one for each bucket of due."""
    place, window = TableFolder(task["table"]), Window(*task["window"])
    rows = read_window(place, task["files"], window)
    rows = sort_rows(rows.filter(has_arrived_within(rows, window)))  # cancels come whole; here each part keeps its own
    files = []
    for tier, low, high in task["buckets"]:
        due = rows.column("due")
        part = rows.filter(pc.and_(pc.greater(due, low), pc.less_equal(due, high)))
        if part.num_rows:
            files.append(write_file(place, f"{tier}-{low + 1:020d}-{_fresh()}.parquet", part))
    return {"read": rows.num_rows, "files": plain(files)}


# -- proving and restoring --------------------------------------------------------------------------------------


def count(task: Task) -> Result:
    """Counts the rows of its files that lie in some windows, which do not overlap."""
    place, found = TableFolder(task["table"]), 0
    for window in (Window(*each) for each in task["windows"]):
        found += arrived_within(read_window(place, task["files"], window, ["due", "arrival", "kind"]), window)
    return {"rows": found}


def restore(task: Task) -> Result:
    """Writes far rows start..stop-1 that none of the files holds as new files: those due after an instant, and all
    that arrived at or after a place.
    """
    place, files = TableFolder(task["table"]), []
    with BulkClient(task["bulk"]) as bulk:
        for piece in pieces(bulk.far(task["start"], task["stop"])):
            rows = _as_rows(piece)
            is_due = pc.greater(rows.column("due"), task["due_after"])
            rows = rows.filter(pc.or_(is_due, pc.greater_equal(rows.column("arrival"), task["late_from"])))
            arrival = rows.column("arrival")
            if rows.num_rows:
                low, high = arrival[0].as_py(), arrival[-1].as_py()
                window = Window(-1, NEVER, low, high + 1)
                known = read_window(place, task["files"], window, ["due", "arrival", "kind"])
                known = known.filter(pc.not_equal(known.column("kind"), DROP))  # it has the arrival of its message
                rows = rows.filter(pc.invert(pc.is_in(arrival, known.column("arrival").combine_chunks())))
            if rows.num_rows:
                files += write_tiers(place, sort_rows(rows), task["edge"], task["start"])
    return {"files": plain(files)}

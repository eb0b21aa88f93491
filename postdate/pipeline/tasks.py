"""What executors do: ranges of the far queue into files, windows of due into chunks or into merged files.

A task is told what to do by a plain dict and answers with one. It can be run again: what an earlier attempt has left
is a file that nothing names.
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

from postdate.errors import CorruptTable
from postdate.log import record as records
from postdate.manners import keep_freed_memory
from postdate.message import PROPERTY_KEYS, PROPERTY_UNIQ_KEY, first_key
from postdate.pipeline.files import NEVER, Place, Sorted, Window, Written, in_order, read_window, write
from postdate.pipeline.gate import Gate
from postdate.pipeline.steps import reach
from postdate.table_format import CANCEL, CHUNK_COLUMNS, MESSAGE, SCHEMA, writer_options

Task = dict[str, Any]
Result = dict[str, Any]
Batches = Iterator[pa.RecordBatch]

RESULT = pa.schema([pa.field("result", pa.string())])
_PIECE_BYTES = 128 << 20  # of records: what a task holds in memory before it writes a file


def over_numbers(work: Callable[[Task], Result], common: Task, tasks: list[Task]) -> Callable[[Batches], Batches]:
    """For mapInArrow over rows that are numbers of tasks."""
    return lambda batches: _answers(work, (common | tasks[number] for number in _values(batches)))


def _values(batches: Batches) -> Iterator[Any]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _answers(work: Callable[[Task], Result], tasks: Iterator[Task]) -> Batches:
    """One row per task, with the executor that did it: all workers of an executor have one parent."""
    keep_freed_memory()
    worker = {"worker": f"{socket.gethostname()}:{os.getppid()}"}
    for task in tasks:
        yield pa.RecordBatch.from_pydict({"result": [json.dumps(_answer(work, task) | worker)]}, schema=RESULT)


def _answer(work: Callable[[Task], Result], task: Task) -> Result:
    """What a task has done. A damaged table is told as a sentence: trying again would not mend it."""
    try:
        return work(task)
    except CorruptTable as error:
        return {"damage": str(error)}


def results(lines: Iterable[str]) -> list[Result]:
    """The answers of tasks. Raises CorruptTable where one of them met damage."""
    found: list[Result] = [json.loads(line) for line in lines]
    for result in found:
        if "damage" in result:
            raise CorruptTable(result["damage"])
    return found


def warm(task: Task) -> Result:
    """What the first task of a worker would have to wait for: everything is loaded, a little is sorted and written."""
    rows = SCHEMA.empty_table()
    sink = pa.BufferOutputStream()
    pq.write_table(in_order(rows), sink, **writer_options("soon"))
    return {"rows": task["rows"] + pq.read_table(pa.BufferReader(sink.getvalue())).num_rows}


# -- ingest -----------------------------------------------------------------------------------------------------


def ingest(task: Task) -> Result:
    """Far rows start..stop-1 into files: rows due before `edge` apart from the others."""
    place, files = Place(task["table"]), []
    with Gate(task["bulk"]) as gate:
        # By map: no name here holds on to a piece that is sorted by now.
        for rows in map(in_order, map(_as_rows, _pieces(gate.far(task["start"], task["stop"])))):
            files += _write_tiers(place, rows, task["edge"], f"{task['start']:020d}")
    return {"files": _plain(files)}


def _pieces(batches: Batches) -> Iterator[pa.Table]:
    """Batches brought together, so many bytes at a time."""
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
    """All that is held, and held no more: a piece is large, and whoever has it wants to let it go."""
    table = pa.Table.from_batches(held)
    held.clear()
    return table


def _as_rows(far: pa.Table) -> pa.Table:
    flags = pa.array([0], pa.int32()).take(pa.repeat(0, far.num_rows))
    far = far.append_column("flags", flags).append_column("size", pc.binary_length(far.column("record")))
    return far.select(SCHEMA.names).cast(SCHEMA)


def _write_tiers(place: Place, rows: pa.Table, edge: int, name: str) -> list[Written]:
    soon = pc.sum(pc.less(rows.column("due"), edge)).as_py() or 0
    parts = (("soon", rows.slice(0, soon)), ("later", rows.slice(soon)))
    return [write(place, _new_name(tier, name), part) for tier, part in parts if part.num_rows]


def _plain(files: list[Written]) -> list[Any]:
    """As JSON takes them."""
    return [[list(file), [list(group) for group in groups]] for file, groups in files]


def _new_name(tier: str, name: str) -> str:
    return f"{tier}-{name}-{uuid.uuid4().hex[:12]}.parquet"


# -- promote ----------------------------------------------------------------------------------------------------


def promote(task: Task) -> Result:
    """A window of the table into one chunk, without what is cancelled."""
    told: Result = {"read": 0, "cancelled": 0, "rows": 0, "chunk": None}
    window = Window(*task["window"])
    with Sorted(Place(task["table"]), task["files"], window) as rows:
        columns = [*CHUNK_COLUMNS, "kind", "topic"] if rows.has_cancels else [*CHUNK_COLUMNS, "kind"]
        pieces: Iterable[pa.Table] = (_living(piece, window, told) for piece in rows.pieces(columns))
        if rows.has_cancels:
            pieces = list(pieces)  # a chunk is announced with its rows, and only now it is known which are left
            count = told["rows"]
        else:
            count = rows.count()
        if count:
            reach("chunk.upload")
            with Gate(task["bulk"]) as gate:
                uploaded = gate.upload(_chunk_name(task["epoch"]), count, (p.select(CHUNK_COLUMNS) for p in pieces))
            reach("chunk.uploaded")
            told |= {"chunk": uploaded.name, "bytes": uploaded.bytes}
    return told


def _living(rows: pa.Table, window: Window, told: Result) -> pa.Table:
    """The messages among sorted rows that no cancel is for. What was met is added to what is told."""
    kind = rows.column("kind")
    if pc.all(pc.equal(kind, MESSAGE)).as_py():
        messages, cancelled = rows, 0
        told["read"] += rows.num_rows
    else:
        messages, cancels = rows.filter(pc.equal(kind, MESSAGE)), rows.filter(pc.equal(kind, CANCEL))
        # Of the cancels of one instant every task of it is told; each counts those that arrived in its own part.
        told["read"] += messages.num_rows + _arrived_within(cancels, window)
        dead = _cancelled(messages, cancels)
        cancelled = len(dead)
        if dead:
            messages = messages.take(pa.array(sorted(set(range(messages.num_rows)) - dead), pa.int64()))
    told["cancelled"] += cancelled
    told["rows"] += messages.num_rows
    return messages


def _chunk_name(epoch: int) -> str:
    return f"{epoch:06d}-{uuid.uuid4().hex}"


def _arrived(rows: pa.Table, window: Window) -> pa.ChunkedArray:
    arrival = rows.column("arrival")
    return pc.and_(pc.greater_equal(arrival, window.arrival_low), pc.less(arrival, window.arrival_high))


def _arrived_within(rows: pa.Table, window: Window) -> int:
    return int(pc.sum(_arrived(rows, window)).as_py() or 0)


def _cancelled(messages: pa.Table, cancels: pa.Table) -> set[int]:
    """Which messages a cancel is for: the same topic, key and due, and the message arrived before it."""
    dead: set[int] = set()
    for column in ("unique_hash", "key_hash"):
        own = cancels.filter(pc.not_equal(cancels.column(column), 0))
        if not own.num_rows:
            continue
        wanted: dict[tuple[int, int], list[tuple[int, str, bytes]]] = {}
        names = ("due", column, "arrival", "topic", "record")
        for due, hashed, *rest in zip(*(own.column(name).to_pylist() for name in names), strict=True):
            wanted.setdefault((due, hashed), []).append(tuple(rest))
        hits = pc.indices_nonzero(pc.is_in(messages.column(column), own.column(column).combine_chunks()))
        found = messages.take(hits)
        for hit, *message in zip(hits.to_pylist(), *(found.column(name).to_pylist() for name in names), strict=True):
            due, hashed, arrival, topic, record = message
            for cancel in wanted.get((due, hashed), ()):
                if arrival < cancel[0] and topic == cancel[1] and _is_of_key(record, cancel[2]):
                    dead.add(hit)
    return dead


def _is_of_key(message: bytes, cancel: bytes) -> bool:
    """Whether the message has the key that is cancelled: equal hashes are only a hint."""
    asked = json.loads(records.decode(cancel).body)
    properties = records.properties_of(message)
    if asked["by"] == "unique":
        return bool(properties.get(PROPERTY_UNIQ_KEY) == asked["key"])
    return bool(first_key(properties.get(PROPERTY_KEYS, "")) == asked["key"])


# -- merge ------------------------------------------------------------------------------------------------------


def merge(task: Task) -> Result:
    """A window of the table into new files, one for each bucket of due."""
    place, window = Place(task["table"]), Window(*task["window"])
    rows = read_window(place, task["files"], window)
    rows = in_order(rows.filter(_arrived(rows, window)))  # cancels come whole; here each part keeps its own
    files = []
    for tier, low, high in task["buckets"]:
        due = rows.column("due")
        part = rows.filter(pc.and_(pc.greater(due, low), pc.less_equal(due, high)))
        if part.num_rows:
            files.append(write(place, _new_name(tier, f"{low + 1:020d}"), part))
    return {"read": rows.num_rows, "files": _plain(files)}


# -- proving and restoring --------------------------------------------------------------------------------------


def count(task: Task) -> Result:
    """How many rows of its files lie in a window."""
    window = Window(*task["window"])
    rows = read_window(Place(task["table"]), task["files"], window, ["due", "arrival", "kind"])
    return {"rows": _arrived_within(rows, window)}


def restore(task: Task) -> Result:
    """Far rows start..stop-1 that none of the files holds, into new files: those due after an instant, and all that
    arrived at or after a place.
    """
    place, files = Place(task["table"]), []
    with Gate(task["bulk"]) as gate:
        for piece in _pieces(gate.far(task["start"], task["stop"])):
            rows = _as_rows(piece)
            is_due = pc.greater(rows.column("due"), task["due_after"])
            rows = rows.filter(pc.or_(is_due, pc.greater_equal(rows.column("arrival"), task["late_from"])))
            arrival = rows.column("arrival")
            if rows.num_rows:
                low, high = arrival[0].as_py(), arrival[-1].as_py()
                window = Window(-1, NEVER, low, high + 1)
                known = read_window(place, task["files"], window, ["due", "arrival", "kind"]).column("arrival")
                rows = rows.filter(pc.invert(pc.is_in(arrival, known.combine_chunks())))
            if rows.num_rows:
                files += _write_tiers(place, in_order(rows), task["edge"], f"{task['start']:020d}")
    return {"files": _plain(files)}

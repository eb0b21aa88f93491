"""What executors do for a job: upload the rows that its predicate selects, for the broker to decide about them, and
write the decision into the table.

Executors import this: the standard library, pyarrow and pyspark are all it may need.
"""

import json
import uuid
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from postdate.arrival import NEAR, OWN_ARRIVAL, own_arrival
from postdate.faultpoint import reach
from postdate.message import PROPERTIES_BYTES_MAX
from postdate.process import keep_freed_memory
from postdate.spark.executor.bulk_client import BulkClient
from postdate.spark.executor.tasks import RESULT, Batches, Result, Task, in_tiers, pieces, plain, write_tiers
from postdate.spark.executor.waiting import IS_NEAR
from postdate.storage.record import with_due
from postdate.table.files import TableFolder, constant_column, sort_rows, write_file
from postdate.table.format import DROP, MESSAGE, SCHEMA, SELECTED

HIDDEN = "__"  # begins the names of columns that a predicate does not see
_NARROW = ("due", "arrival", "unique_hash", "key_hash", "queue")


def columns(by_ms: int) -> list[str]:
    """The columns that `select` needs: all, where the job brings the rows again."""
    names = [name for name in SCHEMA.names if name != "flags"] if by_ms else list(_NARROW)
    return [*(f"{HIDDEN}{name}" for name in names), f"{HIDDEN}{IS_NEAR}"]


# -- selecting --------------------------------------------------------------------------------------------------


def select(task: Task) -> Callable[[Batches], Batches]:
    """The function for mapInArrow over selected rows: one answer for each part that it uploads."""
    return lambda batches: _answers(task, batches)


def _answers(task: Task, batches: Batches) -> Batches:
    keep_freed_memory()
    context = TaskContext.get()
    part = task["first_part"] + (context.partitionId() if context is not None else 0)
    done = 0
    for rows in pieces(batches):
        own = own_arrival(task["number"], part, done)
        named = rows.rename_columns([name.removeprefix(HIDDEN) for name in rows.column_names])
        answer = _select_piece(task, sort_rows(named), own)
        done += rows.num_rows
        yield pa.RecordBatch.from_pydict({"result": [json.dumps(answer)]}, schema=RESULT)


def _select_piece(task: Task, rows: pa.Table, own: int) -> Result:
    """Uploads sorted rows and, where the job postpones, writes them beside the table with their new due."""
    name = f"{task['number']:08d}-{uuid.uuid4().hex}"
    flags = pc.if_else(rows.column(IS_NEAR), pa.scalar(NEAR, pa.int32()), pa.scalar(0, pa.int32()))
    with BulkClient(task["bulk"]) as bulk:
        bulk.select(name, rows.select(list(_NARROW)).append_column("flags", flags).cast(SELECTED))
    reach("selection.uploaded")
    files = _write_moved(task, rows, own) if task["by_ms"] else []
    return {"name": name, "own": own, "rows": rows.num_rows, "files": files, "due_high": rows.column("due")[-1].as_py()}


def _write_moved(task: Task, rows: pa.Table, own: int) -> list[list[object]]:
    """Writes rows beside the table with their new due, which their records say, too: consumers see it."""
    place, count = TableFolder(task["table"]), rows.num_rows
    due = pc.add(rows.column("due"), task["by_ms"])
    pairs = zip(rows.column("record").to_pylist(), due.to_pylist(), strict=True)
    record = pa.array([with_due(each, at_ms, PROPERTIES_BYTES_MAX) for each, at_ms in pairs], pa.binary())
    moved = {
        "due": due,
        "arrival": pa.array(range(own, own + count), pa.int64()),
        "kind": constant_column(MESSAGE, pa.int8(), count),
        "level": constant_column(0, pa.int8(), count),
        "flags": constant_column(OWN_ARRIVAL, pa.int32(), count),
        "size": pc.binary_length(record),
        "record": record,
    }
    columns = [moved[name] if name in moved else rows.column(name) for name in SCHEMA.names]
    table = pa.Table.from_arrays(columns, names=SCHEMA.names)
    files = [
        write_file(place, f"_job-{task['number']:08d}-{tier}-{uuid.uuid4().hex[:12]}.parquet", part)
        for tier, part in in_tiers(table, task["edge"])
    ]
    return [list(file) for file, _ in files]


# -- following --------------------------------------------------------------------------------------------------


def drop(task: Task) -> Result:
    """Takes what a part has changed out of the table: writes a drop for each row, of the same due and arrival. Rows
    that came too late stay; where the job postpones, the drop is for their new row.
    """
    with BulkClient(task["bulk"]) as bulk:
        rows = bulk.selection(task["name"])
    is_late = pc.is_in(pa.array(range(rows.num_rows), pa.int64()), pa.array(task["late"], pa.int64()))
    gone = [_drops(rows.filter(pc.invert(is_late)))]
    if task["by_ms"] and task["late"]:
        late = rows.append_column("own", pa.array(range(task["own"], task["own"] + rows.num_rows), pa.int64()))
        late = late.filter(is_late)
        due = pc.add(late.column("due"), task["by_ms"])
        gone.append(_drops(late.set_column(0, "due", due).set_column(1, "arrival", late.column("own"))))
    drops = sort_rows(pa.concat_tables(gone))
    files = write_tiers(TableFolder(task["table"]), drops, task["edge"], task["far"]) if drops.num_rows else []
    return {"files": plain(files)}


def _drops(rows: pa.Table) -> pa.Table:
    count = rows.num_rows
    own = {name: rows.column(name) for name in _NARROW}
    fixed = {"kind": DROP, "topic": "", "level": 0, "tag_hash": 0, "flags": 0, "size": 0, "record": b""}
    arrays = [
        own[field.name] if field.name in own else constant_column(fixed.get(field.name), field.type, count)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)

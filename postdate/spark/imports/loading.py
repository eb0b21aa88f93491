"""Loading: an executor writes one part of a frame as files beside the table.

The files' names begin with an underscore: no reader takes them for the table's until a batch of the pipeline adopts
them. A part can be loaded again; an earlier attempt leaves at most a file that nothing names.
"""

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from postdate.errors import PipelineFailed
from postdate.process import keep_freed_memory
from postdate.spark.executor.tasks import in_tiers
from postdate.spark.imports.columns import PROPERTIES, TIMESTAMP, Converter, Faults, Job, Wanted, properties_of
from postdate.table.files import TableFolder, sort_rows, write_file
from postdate.table.format import File

# Columns that a reader of files adds: the file of a row and the part of it, a line to parse, and a line that could not
# be read.
FILE, BLOCK, LINE, BROKEN = "_postdate_file", "_postdate_block", "_postdate_line", "_postdate_broken"

_FILE_ROWS, _FILE_BYTES = 250_000, 128 << 20  # that a part holds in memory before it writes files
BAD_KEPT = 10_000  # bad rows of a part that are named; the others are counted


Row = TypeVar("Row", bound=NamedTuple)


class Plan(NamedTuple):
    """What every part needs to know."""

    wanted: Wanted
    job: Job
    folder: str  # of the table's files
    stem: str  # that the names of all files begin with
    edge_ms: int  # rows due before it are in files of their own


class Bad(NamedTuple):
    """A row that cannot be scheduled."""

    file: str
    block: int
    row: int  # from 0, in its block
    reason: str


class Loaded(NamedTuple):
    """What became of a part. Its blocks are parts of files, or the part itself, each with its count of rows."""

    files: list[File]
    bad_count: int
    bad: list[Bad]
    blocks: list[tuple[str, int, int]]


def dump_loaded(loaded: Loaded) -> str:
    """What a task answers: JSON, which makes nothing but values when it is read."""
    return json.dumps(loaded)


def read_loaded(text: str) -> Loaded:
    """Reads what a task has answered. Raises PipelineFailed for anything else."""
    try:
        files, bad_count, bad, blocks = json.loads(text)
        if type(bad_count) is not int or not all(type(part) is list for part in (files, bad, blocks)):
            raise ValueError("a part of it is of another type")
        found = Loaded(
            [_typed(File, row) for row in files], bad_count, [_typed(Bad, row) for row in bad],
            [(str(file), int(block), int(count)) for file, block, count in blocks],
        )  # fmt: skip
    except (ValueError, TypeError, RecursionError) as error:
        raise PipelineFailed(f"a task of the import has answered what no task of ours does: {error}") from error
    return found


def _typed(kind: type[Row], row: list[Any]) -> Row:
    """A row with the types of its fields. Raises ValueError, TypeError."""
    made = kind(*row)
    for name, expected in kind.__annotations__.items():
        if type(getattr(made, name)) is not expected:
            raise ValueError(f"{kind.__name__}.{name} is {getattr(made, name)!r:.64}")
    return made


def load(plan: Plan, part: int, batches: Iterable[pa.RecordBatch]) -> Loaded:
    """Loads one part. Raises UsageError where it is too large, OSError where a file cannot be written."""
    keep_freed_memory()
    place, converter, tally = TableFolder(plan.folder), Converter(plan.wanted, plan.job, part), _Tally(part)

    def good_rows() -> Iterator[pa.Table]:
        for batch in batches:
            faults: Faults = {}
            rows = converter.rows(_parse_text(batch, plan.wanted, faults), faults)
            tally.add(batch, faults)
            yield rows

    files = [
        write_file(place, f"{plan.stem}{tier}-{uuid.uuid4().hex}.parquet", part).file
        for rows in map(sort_rows, _pieces(good_rows()))
        for tier, part in in_tiers(rows, plan.edge_ms)
    ]
    return Loaded(files, tally.bad_count, tally.bad, tally.blocks)


def _pieces(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Joins tables until they have enough rows or bytes for a file."""
    held: list[pa.Table] = []
    count = size = 0
    for table in tables:
        held.append(table)
        count, size = count + table.num_rows, size + table.nbytes
        if count >= _FILE_ROWS or size >= _FILE_BYTES:
            piece = pa.concat_tables(held)
            held, count, size = [], 0, 0
            yield piece
    if count:
        yield pa.concat_tables(held)


class _Tally:
    """Where the rows of a part came from, and which of them are bad."""

    def __init__(self, part: int) -> None:
        self._part = f"part {part}"
        self.blocks: list[tuple[str, int, int]] = []
        self.bad_count = 0
        self.bad: list[Bad] = []

    def add(self, batch: pa.RecordBatch, faults: Faults) -> None:
        start = 0
        self.bad_count += len(faults)
        rows = sorted(faults)
        for file, block, count in self._runs(batch):
            if not self.blocks or self.blocks[-1][:2] != (file, block):
                self.blocks.append((file, block, 0))
            before = self.blocks[-1][2]
            room = BAD_KEPT - len(self.bad)
            mine = [row for row in rows if start <= row < start + count][: max(room, 0)]
            self.bad += [Bad(file, block, before + row - start, faults[row]) for row in mine]
            self.blocks[-1] = (file, block, before + count)
            start += count

    def _runs(self, batch: pa.RecordBatch) -> Iterator[tuple[str, int, int]]:
        """The blocks of a batch, whose rows stand together: file, block and count of rows."""
        if FILE not in batch.schema.names:
            yield self._part, 0, batch.num_rows
            return
        places = [pc.run_end_encode(batch.column(name)) for name in (FILE, BLOCK)]
        ends = sorted({end for each in places for end in each.run_ends.to_pylist()})
        start = 0
        for end in ends:
            yield batch.column(FILE)[start].as_py(), batch.column(BLOCK)[start].as_py(), end - start
            start = end


# -- rows of text files -----------------------------------------------------------------------------------------


def _parse_text(batch: pa.RecordBatch, wanted: Wanted, faults: Faults) -> pa.RecordBatch:
    """A batch with the columns of the import, from any kind of file."""
    if BROKEN in batch.schema.names:
        for row in pc.indices_nonzero(pc.is_valid(batch.column(BROKEN))).to_pylist():
            faults[row] = "the row has not as many fields as the header"
    if LINE not in batch.schema.names:
        return batch
    lines = batch.column(LINE).cast(pa.binary()).to_pylist()
    objects = [_object(line, row, faults) for row, line in enumerate(lines)]
    return pa.RecordBatch.from_pydict({name: _values(objects, name, wanted, faults) for name in wanted.columns})


def _object(line: bytes, row: int, faults: Faults) -> dict[str, Any]:
    try:
        found = orjson.loads(line)
    except ValueError as error:
        faults[row] = f"the line is no JSON: {error}"
        return {}
    if not isinstance(found, dict):
        faults[row] = f"the line is a JSON {JSON_NAMES[type(found)]}, expected an object"
        return {}
    return found


JSON_NAMES: dict[type, str] = {
    dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number", type(None): "null",
}  # fmt: skip


def kinds_of(name: str, wanted: Wanted) -> tuple[type, ...]:
    """The types that a column of JSON may hold, besides null."""
    if name == wanted.due:
        return (str,) if wanted.unit == TIMESTAMP else (str, int)
    return (dict, str) if name == wanted.properties else (str,)


def _values(objects: list[dict[str, Any]], name: str, wanted: Wanted, faults: Faults) -> pa.Array:
    kinds = kinds_of(name, wanted)
    values = [found.get(name) for found in objects]
    for row, value in enumerate(values):
        if value is not None and type(value) not in kinds:
            expected = " or ".join(JSON_NAMES[kind] for kind in kinds)
            faults.setdefault(row, f"column {name} is a {JSON_NAMES[type(value)]}, expected {expected}")
            values[row] = None
    if name == wanted.properties:
        return pa.array([properties_of(value, name, row, faults) for row, value in enumerate(values)], PROPERTIES)
    return pa.array([None if value is None else str(value) for value in values], pa.string())

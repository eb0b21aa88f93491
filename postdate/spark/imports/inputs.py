"""Inputs: files as an import, read by a Spark of its own.

    parquet   cut into parts of row groups; local files are read by the tasks themselves
    csv       with a header; each file is one part, since a body may hold line ends
    jsonl     an object in each line; cut into parts by Spark, read by us

A row knows its file and its part of the file, so that a bad one can be named by its number.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema

from postdate.contract import JobStatus
from postdate.errors import PipelineFailed, PostdateError, UsageError
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.imports import imports, parquet
from postdate.spark.imports.columns import Wanted
from postdate.spark.imports.loading import (
    BLOCK,
    BROKEN,
    FILE,
    JSON_NAMES,
    LINE,
    Loaded,
    Plan,
    dump_loaded,
    kinds_of,
    load,
    read_loaded,
)
from postdate.spark.imports.options import check_names, fitted, roles_of, with_body
from postdate.spark.pending.query import embedded_spark, spark_errors
from postdate.table.files import TableFolder

KINDS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_SAMPLE_LINES = 1_000
_LOOK_S = 1.0
_ARROW_BYTES = 16 << 20  # in one batch, however large its rows are

Look = Callable[[str, int], None]  # a step, and how many rows it has done


class Request(NamedTuple):
    paths: Sequence[str]
    topic: str
    wanted: Wanted
    id: str
    skip_bad: str  # a file for bad rows; "" where a bad row keeps all from being scheduled
    is_waiting: bool
    address: str | None  # of the broker
    memory: str


class Outcome(NamedTuple):
    job: JobStatus
    bad_count: int
    bad: list[imports.BadRow]
    is_given_up: bool = False


class Interrupted(KeyboardInterrupt):
    """The user has pressed Ctrl-C; the sentence says what became of the import."""


# -- running ----------------------------------------------------------------------------------------------------


def run(request: Request, environ: Mapping[str, str], look: Look, part_rows: int = parquet.PART_ROWS) -> Outcome:
    """Imports files; a task reads about `part_rows` rows of Parquet.

    Raises UsageError, Refused, Unreachable, PipelineFailed, and Interrupted with a sentence.
    """
    kind = kind_of(request.paths)
    broker = BrokerClient(request.address)
    broker.state()  # a broker that is away is noticed before Spark takes its seconds
    # What Spark raises is read while its Java lives: after that nobody knows what it said.
    with _give_up_on_error(broker, request) as plans, embedded_spark(request.memory, environ) as spark, spark_errors():
        spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", _ARROW_BYTES)
        frame, wanted = frame_of(spark, kind, request.paths, request.wanted)
        parts = None
        if kind == "parquet" and not any("://" in path for path in request.paths):
            local = [Path(file).absolute() for path in request.paths for file in sorted(_local_files(path))]
            parts = parquet.parts_of([str(file) for file in local], wanted.columns, part_rows)
        known = imports.begin(broker, request.id, request.topic, wanted)
        loaded: list[Loaded] = []
        if known.plan is not None:
            plans.append(known.plan)
            with _watched(broker, known.plan, look):
                loaded = load_frame(frame, known.plan) if parts is None else load_groups(frame, known.plan, parts)
    return _finish(broker, request, known, loaded, look)


def _finish(
    broker: BrokerClient, request: Request, import_: imports.Import, loaded: list[Loaded], look: Look
) -> Outcome:
    """Adopts what is loaded and waits for it. Spark is not needed any more."""
    job, bad, bad_count = import_.job, imports.bad_rows(loaded), sum(part.bad_count for part in loaded)
    if import_.plan is not None:
        if bad_count and not request.skip_bad:
            imports.give_up(broker, import_.plan, imports.counted(bad_count))
            return Outcome(job, bad_count, bad, is_given_up=True)
        if bad_count:
            imports.write_bad(request.skip_bad, bad)
        job = imports.adopt(broker, import_.plan, [file for part in loaded for file in part.files], bad_count)
    if request.is_waiting:
        try:
            job = imports.wait(broker, request.id, lambda at: look(at.step or at.state, at.done))
        except KeyboardInterrupt:
            raise Interrupted(f"import {request.id} goes on without us: see postdate jobs") from None
        except PipelineFailed:
            if import_.plan is not None:
                imports.give_up(broker, import_.plan, "")
            raise
    return Outcome(job, bad_count, bad)


@contextmanager
def _give_up_on_error(broker: BrokerClient, request: Request) -> Iterator[list[Plan]]:
    """Gives an import up when its loading fails. Spark runs inside the block, so that no task writes after it. The
    block appends the plan of an import that has begun to the list.
    """
    plans: list[Plan] = []
    try:
        yield plans
    except BaseException as error:
        is_ours = isinstance(error, KeyboardInterrupt)
        for plan in plans:
            imports.give_up(broker, plan, "interrupted" if is_ours else str(error))
        if is_ours:
            raise Interrupted(f"import {request.id} is given up: nothing is scheduled") from None
        raise


@contextmanager
def _watched(broker: BrokerClient, plan: Plan, look: Look) -> Iterator[None]:
    """Reports now and then, here and to the broker, how many rows are loaded."""
    ending = threading.Event()
    watcher = threading.Thread(target=_watch, args=(broker, plan, look, ending), name="import", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ending.set()
        watcher.join()


def _watch(broker: BrokerClient, plan: Plan, look: Look, ending: threading.Event) -> None:
    place, known = TableFolder(plan.folder), dict[str, int]()
    while not ending.wait(_LOOK_S):
        for name in set(imports.files_of(plan)) - set(known):
            try:
                known[name] = pq.read_metadata(place.path(name), filesystem=place.files).num_rows
            except (OSError, pa.ArrowInvalid):
                continue  # it is not whole yet
        rows = sum(known.values())
        look("loading", rows)
        try:
            broker.note_progress(plan.job.id, "loading", rows, 0)
        except PostdateError:
            continue  # progress is for people; the import itself notices a broker that is away


def load_frame(frame: DataFrame, plan: Plan) -> list[Loaded]:
    """Loads a frame by tasks, one for each of its partitions."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None, "Spark runs tasks in a context"
        yield pa.RecordBatch.from_pydict({"loaded": [dump_loaded(load(plan, context.partitionId(), batches))]})

    function: Any = work  # Spark's types expect another kind of function
    return [read_loaded(row.loaded) for row in frame.mapInArrow(function, "loaded string").collect()]


def load_groups(frame: DataFrame, plan: Plan, parts: list[parquet.Part]) -> list[Loaded]:
    """Loads local files of Parquet, whose rows the tasks read without Spark."""
    schema = to_arrow_schema(frame.select(*plan.wanted.columns).schema, timezone="UTC")

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number in (number for batch in batches for number in batch.column(0).to_pylist()):
            loaded = load(plan, number, parquet.batches_of(parts[number], schema))
            yield pa.RecordBatch.from_pydict({"loaded": [dump_loaded(loaded)]})

    function: Any = work
    numbers = frame.sparkSession.range(0, len(parts), 1, max(len(parts), 1))
    return [read_loaded(row.loaded) for row in numbers.mapInArrow(function, "loaded string").collect()]


# -- files as a frame -------------------------------------------------------------------------------------------


def kind_of(paths: Sequence[str]) -> str:
    """The kind of all the files. Raises UsageError where they differ."""
    found: dict[str, str] = {}
    for path in paths:
        names = [path] if "://" in path else _local_files(path)
        known = (KINDS.get(Path(name.removesuffix(".gz")).suffix) for name in names)
        kind = next(filter(None, known), None)
        if kind is None:
            raise UsageError(f"{path}: expected files whose names end in {', '.join(KINDS)}")
        found[path] = kind
    kinds = set(found.values())
    if len(kinds) > 1:
        raise UsageError(
            f"files of one kind at a time: {', '.join(f'{path} is {kind}' for path, kind in found.items())}"
        )
    return kinds.pop()


def _local_files(path: str) -> list[str]:
    """A file, all files of a folder, or those that match a pattern. Raises UsageError where there are none."""
    here = Path(path)
    if here.is_dir():
        files = [each for each in here.rglob("*") if each.is_file() and not each.name.startswith(("_", "."))]
    elif here.exists():
        return [path]
    else:
        whole = here.absolute()
        files = list(Path(whole.anchor).glob(str(whole.relative_to(whole.anchor))))
    if not files:
        raise UsageError(f"{path}: there is no such file")
    return [str(each) for each in files]


def frame_of(spark: SparkSession, kind: str, paths: Sequence[str], wanted: Wanted) -> tuple[DataFrame, Wanted]:
    """A frame of the columns that are needed, and of where each row is from. Raises UsageError."""
    whole = [path if "://" in path else str(Path(path).absolute()) for path in paths]
    if kind == "csv":
        return _csv_frame(spark, whole, wanted)
    if kind == "parquet":
        frame = spark.read.parquet(*whole)
        wanted = fitted(wanted, {field.name: field.dataType.simpleString() for field in frame.schema.fields})
        return _with_places(frame, wanted.columns), wanted
    lines = spark.read.text(whole).withColumnRenamed("value", LINE).filter(f.trim(LINE) != "")
    wanted = _fit_to_sample(wanted, [row[LINE] for row in lines.limit(_SAMPLE_LINES).collect()])
    return _with_places(lines, [LINE]), wanted


def _with_places(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    return frame.select(
        *(f.col(f"`{name}`") for name in columns), f.col("_metadata.file_path").alias(FILE),
        f.col("_metadata.file_block_start").alias(BLOCK),
    )  # fmt: skip


def _csv_frame(spark: SparkSession, paths: list[str], wanted: Wanted) -> tuple[DataFrame, Wanted]:
    # A quote within quotes is doubled, as in RFC 4180 and every spreadsheet; Spark's own way is a backslash.
    reader = spark.read.options(header=True, multiLine=True, quote='"', escape='"', columnPruning=False)
    names = reader.csv(paths).columns
    wanted = fitted(wanted, dict.fromkeys(names, "string"))
    columns = ", ".join(f"`{name}` string" for name in [*names, BROKEN])
    reader = reader.schema(columns).options(enforceSchema=False, columnNameOfCorruptRecord=BROKEN)
    return _with_places(reader.csv(paths), [*wanted.columns, BROKEN]), wanted


def _fit_to_sample(wanted: Wanted, lines: list[str]) -> Wanted:
    """Checks the columns against the first lines: an object may lack some, all together may not. Raises UsageError."""
    objects: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError):  # loading reports a line that is no JSON, with its number
            found = orjson.loads(line)
            objects += [found] if isinstance(found, dict) else []
    names = list(dict.fromkeys(name for found in objects for name in found))
    wanted = with_body(wanted, names)
    check_names(wanted, names)
    for role, name in roles_of(wanted):
        kinds = kinds_of(name, wanted)
        met = {type(found[name]) for found in objects if found.get(name) is not None}
        if met and met.isdisjoint(kinds):
            expected = " or ".join(JSON_NAMES[kind] for kind in kinds)
            raise UsageError(f"{role}: column {name} is {JSON_NAMES[met.pop()]}, expected {expected}")
    return wanted

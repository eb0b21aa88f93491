"""What runs beside the batches, on a thread of its own: selecting for jobs.

A selection may take an hour, and promotion never waits for it. It looks at one moment of the table, between two
batches, and at the wheel right after; the broker checks each row when it decides. It has fewer tasks than Spark has
slots, in a pool that comes second, and goes in steps of some rows each. While a step runs, a watcher looks whether the
job was withdrawn, its time is up, or the pipeline stops, and cancels Spark's work then.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    ParseException,
    SparkRuntimeException,
)
from pyspark.sql import DataFrame, SparkSession

from postdate.arrival import NEVER
from postdate.contract import ENDED, JobOrder, Selection, State, TableFile
from postdate.errors import PipelineFailed, PostdateError, Refused
from postdate.faultpoint import reach
from postdate.spark.executor import selecting
from postdate.spark.executor.broker_client import AWAY, BrokerClient
from postdate.spark.executor.tasks import Result, read_results
from postdate.spark.pending import view
from postdate.spark.pending.predicate import NotAllowed, check_predicate
from postdate.spark.pipeline.jobs import JAVA_ENDED, why_failed
from postdate.spark.session.session import BESIDE, TASK_END_S, choose_pool, has_java_ended
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import RowGroup, Window, read_row_groups
from postdate.table.format import File
from postdate.table.slices import Limits, split_window

logger = logging.getLogger("postdate.pipeline")

# Errors of a predicate: another try would end in the same way.
_OF_PREDICATE = (
    ParseException, AnalysisException, ArithmeticException, ArrayIndexOutOfBoundsException, DateTimeException,
    IllegalArgumentException, NumberFormatException, SparkRuntimeException, NotAllowed,
)  # fmt: skip
JOB_ROWS_MAX = 20_000_000  # rows that a job may select: 0.8 GB of selections, which the broker reads to decide
_PAUSE_S = 0.5  # between two looks for work
_WATCH_S = 0.3
_JOB_MS_MAX = 3_600_000  # where the broker does not say
_GROUP = "postdate-job"
# A task looks whether it should stop before each batch of rows that it reads.
_SESSION = {"spark.sql.session.timeZone": "UTC", "spark.sql.parquet.columnarReaderBatchSize": "64"}


Item = TypeVar("Item")


class Ended(Exception):
    """A try ends without a result, and does not count."""


class Unfit(Exception):
    """The job can never pass as it is."""


class Moment(NamedTuple):
    """The broker and the table between two batches."""

    state: State
    files: list[File]


class Beside:
    """Selects for one job after the other. `lock` is held while a batch runs."""

    def __init__(
        self, spark: SparkSession, broker: BrokerClient, table: Table, lock: threading.Lock, limits: Limits
    ) -> None:
        self._spark = spark
        self._broker = broker
        self._table = table
        self._lock = lock
        self._limits = limits
        self._tasks = max(1, limits.slots - 1)
        self.job_rows_max = JOB_ROWS_MAX
        self.task_end_s = 2 * TASK_END_S  # on a cluster the executor is killed before
        self.epoch = 0
        self._tried: int | None = None  # the number of the job that it selects for
        self.failure: BaseException | None = None  # what ended the thread
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Stops in order, or leaves the thread to the process's end. A try that is under way does not count."""
        self._stopping.set()
        tried = self._tried
        if tried is not None:
            with suppress(PostdateError):  # then it counts
                self._broker.leave_job(self.epoch, tried)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def blame(self) -> None:
        """Notes that the try under way has failed, if Java has ended during it. The driver calls it before `stop` where
        it fails: it may notice that first, and a try that nobody blames would be repeated for ever.
        """
        tried = self._tried
        if tried is not None and has_java_ended(self._spark):
            self._tried = None  # it counts: nobody leaves it
            with suppress(PostdateError):
                self._broker.stumble(self.epoch, tried, JAVA_ENDED)

    def _run(self) -> None:
        try:
            choose_pool(self._spark, BESIDE)
            while not self._stopping.wait(_PAUSE_S):
                with suppress(*AWAY):
                    self.work()
        except BaseException as error:  # the driver's own thread tells
            self.failure = error

    def work(self) -> bool:
        """Selects for the job whose turn it is; returns whether there was one. Raises Refused where another pipeline
        has registered.
        """
        state = self._broker.state()
        if state.select is None:
            return False
        job = self._broker.try_job(self.epoch, state.select)
        if not job.refusal:
            self._tried = job.number
            try:
                self._select(job, state)
            finally:
                self._tried = None
        return True

    @property
    def is_selecting(self) -> bool:
        """Files that leave the table meanwhile must stay on disk."""
        return self._tried is not None

    # -- one try ------------------------------------------------------------------------------------------------

    def _select(self, job: JobOrder, state: State) -> None:
        """Selects for a job and has the broker decide. Whatever goes wrong is this job's alone."""
        watch = Watch(self._spark, self._broker, job, state.job_ms_max or _JOB_MS_MAX, self._stopping)
        selection = self._attempt(job, watch, lambda: self._upload(job, watch))
        if selection is not None:
            reach("job.decide")
            self._attempt(job, watch, lambda: self._broker.decide(selection))
            reach("job.decided")
        if watch.ended is not None:
            self._wait_for_tasks()

    def _wait_for_tasks(self) -> None:
        """Waits until no task of a cancelled selection runs. Raises PipelineFailed where one does not end: it looks at
        nothing inside a `like`, and would hold a slot that promotion needs. A new process of Spark ends it.
        """
        until = time.monotonic() + self.task_end_s
        while running_tasks(self._spark) and not self._stopping.wait(_WATCH_S):
            if time.monotonic() > until:
                raise PipelineFailed("a predicate does not stop, so Spark has to start anew")

    def _attempt(self, job: JobOrder, watch: "Watch", call: Callable[[], Item]) -> Item | None:
        """Does a part of a try. Where that fails, notes it in the log and returns None. Raises PipelineFailed where
        Java has ended: there are no more tries with it.
        """
        try:
            return call()
        except (*AWAY, Refused):
            # The broker was away, another pipeline has registered, or the job was withdrawn: no fault of the job.
            failure: BaseException = Ended()
        except Exception as error:
            failure = watch.ended or error  # Spark's complaint about a cancelled query says nothing
        said = why_failed(self._spark, failure)
        try:
            if isinstance(failure, (*_OF_PREDICATE, Unfit)) and said != JAVA_ENDED:
                self._broker.fail_job(job.id, said)
            elif isinstance(failure, Ended):
                if not self._stopping.is_set():  # else it is noted already
                    self._broker.leave_job(self.epoch, job.number)
            else:
                logger.warning("a try to select for job %s has failed: %s", job.id, said)
                self._tried = None  # it counts: nobody leaves it
                self._broker.stumble(self.epoch, job.number, said)
        except PostdateError as error:
            logger.warning("the end of a try of job %s was not noted: %s", job.id, error)
        if said == JAVA_ENDED:
            raise PipelineFailed("Spark's Java process has ended")
        return None

    # -- selecting ----------------------------------------------------------------------------------------------

    def _upload(self, job: JobOrder, watch: "Watch") -> Selection:
        """Uploads what the predicate selects, step by step."""
        check_predicate(self._spark, job.where)
        with self._lock:
            moment = Moment(self._broker.state(), list(self._table.files.values()))
        for name, value in _SESSION.items():
            self._spark.conf.set(name, value)
        bulk, found = self._broker.bulk_of(moment.state), list[Result]()
        steps = self._plan(moment)
        with watch, view.read_wheel(self._spark, bulk) as near:
            for step, window in enumerate(steps):
                watch.check()
                self._broker.note_progress(job.id, "selecting", step + 1, len(steps))
                task = {
                    "bulk": bulk, "table": self._table.folder.uri, "number": job.number, "by_ms": job.by_ms,
                    "edge": merging.edge_ms(moment.state.now_ms), "first_part": step * self._tasks,
                }  # fmt: skip
                found += self._select_window(near, moment, job, window, task)
                rows = sum(part["rows"] for part in found)
                if rows > self.job_rows_max:
                    raise Unfit(f"it selects more than {self.job_rows_max} messages, the most; narrow its predicate")
        limit = moment.state.now_ms + moment.state.delay_ms_max
        if any(part["due_high"] + job.by_ms > limit for part in found) and job.by_ms:
            raise Unfit("a message would be due later than delay_ms_max from now")
        parts = tuple((part["name"], part["own"]) for part in found)
        files = tuple(TableFile(*file) for part in found for file in part["files"])
        return Selection(self.epoch, job.number, parts, files)

    def _select_window(
        self, near: DataFrame, moment: Moment, job: JobOrder, window: Window, task: dict[str, Any]
    ) -> list[Result]:
        """Runs the tasks of one step, fewer than Spark has slots; returns what each has uploaded."""
        base = self._table.folder.uri
        rows = view.selectable(self._spark, near, moment.state, base, moment.files, job, window)
        # Neither the predicate nor what Spark says of it may speak of hidden columns.
        view.matching(rows.select(*view.SHOWN), job.where)
        selected = rows.where(job.where).select(*selecting.columns(job.by_ms)).coalesce(self._tasks)
        answers = selected.mapInArrow(selecting.select(task), "result string").collect()
        return read_results(row.result for row in answers)

    def _plan(self, moment: Moment) -> list[Window]:
        """Splits all dues into windows that hold some rows for each task, by the statistics of files."""
        rows, size = self._limits.rows * self._tasks, self._limits.bytes * self._tasks
        waiting = [file for file in moment.files if file.due_high > moment.state.horizon]
        groups = [group for file in waiting for group in self._groups(file, rows)]
        ends = {piece.due_high for piece in split_window(groups, Window(-1, NEVER), Limits(rows, size))}
        edges = [-1, *sorted(ends)[:-1], NEVER]
        return [Window(low, high) for low, high in pairwise(edges)]

    def _groups(self, file: File, rows: int) -> list[RowGroup]:
        if file.rows > rows:
            return read_row_groups(self._table.folder, file.path)
        return [RowGroup(file.rows, file.bytes, *file[3:7], has_cancels=True)]


def running_tasks(spark: SparkSession) -> int:
    """How many tasks of selections run."""
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(_GROUP)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


class Watch:
    """Looks, while a selection runs, whether it should go on, and cancels Spark's work if not."""

    def __init__(
        self, spark: SparkSession, broker: BrokerClient, job: JobOrder, ms_max: int, stopping: threading.Event
    ) -> None:
        self._spark = spark
        self._broker = broker
        self._job = job
        self._ms_max = ms_max
        self._until = time.monotonic() + ms_max / 1_000
        self._stopping = stopping
        self._done = threading.Event()
        self.ended: Ended | Unfit | None = None  # why it should not go on
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        context = self._spark.sparkContext
        context.setJobGroup(_GROUP, f"job {self._job.id}", interruptOnCancel=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def check(self) -> None:
        """Raises Ended or Unfit where the selection should not go on."""
        if self.ended is not None:
            raise self.ended

    def _run(self) -> None:
        while not self._done.wait(_WATCH_S):
            self.ended = self.ended or self._find_end()
            if self.ended is not None:
                self._spark.sparkContext.cancelJobGroup(_GROUP)

    def _find_end(self) -> Ended | Unfit | None:
        if self._stopping.is_set():
            return Ended("the pipeline stops")
        if time.monotonic() > self._until:
            span = f"{self._ms_max / 1_000:g} s"
            return Unfit(f"it ran for longer than job_ms_max ({span}); narrow its predicate, or raise that setting")
        with suppress(PostdateError):  # a broker that is away has withdrawn nothing
            if self._broker.find_job(self._job.id).state in ENDED:
                return Ended("it was withdrawn")
        return None

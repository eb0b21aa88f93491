"""A batch: promote what falls due and stage it, ingest, promote and stage what of that is late, forget and merge.

What is due soon comes first, whatever else there is to do: taking in and merging go in steps, between which the batch
looks whether the next minute has turned. Spark's checkpoint only wakes a batch. The broker (taken,
horizon) and the table (its own place in the far queue) decide what it does, so that a batch can be repeated, or begun
anew with a lost or older checkpoint, without gap or duplicate. Everything is durable before a stage is called.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from postdate.arrival import NEVER, OWN
from postdate.contract import BULK, Report, Stage, State, horizon_of
from postdate.errors import CorruptTable, ForeignTable, PostdateError, Refused
from postdate.faultpoint import reach
from postdate.spark.executor import tasks
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.executor.tasks import written_files
from postdate.spark.pipeline.beside import Beside
from postdate.spark.pipeline.history import History
from postdate.spark.pipeline.jobs import Jobs
from postdate.spark.session.session import PROMOTION, choose_pool
from postdate.table import merging
from postdate.table.delta import Table
from postdate.table.files import Window, salvage_file, touches
from postdate.table.format import File
from postdate.table.slices import DEFAULT, Limits, plan_promotion, split_files

logger = logging.getLogger("postdate.pipeline")

_DAMAGED = "_damaged-"  # begins the names of files that were set aside
KEEP_MS = 60_000  # a file stays this long after its last row was due: a cancel may still look into it
_REPORTS = 20  # of earlier pipelines, reported again to a broker that may have been restarted


class Promoted(NamedTuple):
    """What left the table as chunks."""

    chunks: list[str]
    rows: int
    cancelled: int
    read: int
    files: int

    def plus(self, other: "Promoted") -> "Promoted":
        return Promoted(
            self.chunks + other.chunks, self.rows + other.rows, self.cancelled + other.cancelled,
            self.read + other.read, self.files + other.files,
        )  # fmt: skip


_NOTHING = Promoted([], 0, 0, 0, 0)


class Pipeline:
    """Runs batches on one Spark session for one broker. Raises Refused where another pipeline has registered."""

    def __init__(
        self, spark: SparkSession, broker: BrokerClient, table: Table, history: History, limits: Limits = DEFAULT
    ) -> None:
        self._spark = spark
        self._broker = broker
        self._bulk = ""  # where the tasks reach bulk; the broker tells with its state
        self.table = table
        self._history = history
        self._limits = limits
        self.merge_limits = merging.DEFAULT
        self.epoch = 0
        self.batch_count = 0
        self._lock = threading.Lock()  # held while the table changes, and while it and the broker may not agree
        self._jobs = Jobs(spark, broker, table, self._run)
        self.beside = Beside(spark, broker, table, self._lock, limits)
        self._queues: tuple[int | None, tuple[int, ...]] = (None, ())  # how many the table names, and which are gone
        self._lost_rows = 0
        self._last_cut_ms = 0
        self._stood_in: set[int] = set()  # when bulk began to stand in, of what the history knows
        # Of the batch that runs: its executors, its time, and what it has promoted.
        self._workers: set[str] = set()
        self._clock, self._promoted = _Stopwatch(), _NOTHING

    # -- starting -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Has Spark start its workers and compile what every batch needs, before anything depends on it."""
        self._run(tasks.warm_up, [{"rows": 0}] * self._spark.sparkContext.defaultParallelism)

    def register(self, table: str, master: str) -> State:
        """Becomes the one pipeline that may stage, and proves that the table holds what was taken. `table` is the
        folder of the table, which the broker tells to others who look for it.
        """
        state = self._broker.register(table, master, self.table.marks)
        self.epoch = self.beside.epoch = state.epoch
        self._bulk = self._broker.bulk_of(state)
        self.table.refresh()  # the pipeline before this one may have lived until now
        self.table.see(state)
        for name in self.table.torn:
            logger.warning("entry %s of the Delta log was cut by a crash before it counted; it was set aside", name)
        self._prove(state)
        self._stamp(state)
        self._name_queues(state)
        self._jobs.place_again(state, self.epoch)
        self._jobs.remove_strangers()
        for report in self._history.last(_REPORTS):
            self._broker.report(report)
            if report["master"] == BULK:
                self._stood_in.add(report["at_ms"])
        return state

    def _prove(self, state: State) -> None:
        """Restores from the log what the table lacks of the rows that were taken and are not promoted."""
        missing = self.table.missing_files()
        if missing:
            logger.error(
                "%d files of the table are missing or cut (the first: %s): their rows are read again from the log",
                len(missing), missing[0].path,
            )  # fmt: skip
        if self.table.far < state.taken:
            logger.error(
                "the table ends at far row %d, but %d were taken: the rest is read again from the log",
                self.table.far, state.taken,
            )  # fmt: skip
        expected = state.rows_in - state.rows_out
        if missing or self.table.far < state.taken or self._waiting_rows(state) < expected:
            self._restore(state, missing)
        found = self._waiting_rows(state)
        if found != expected:
            self._lost_rows = expected - found
            logger.error(
                "the table holds %d rows that wait, %d were taken: %d rows cannot be found, neither there nor in the "
                "log. What the log has stays on time.",
                found, expected, expected - found,
            )  # fmt: skip

    def _stamp(self, state: State) -> None:
        """Makes a table without an identity, a new one or one of an earlier version, the broker's. Raises ForeignTable
        where it holds rows that the log never gave it.
        """
        if self.table.marks.identity or not state.identity:
            return
        if self._lost_rows < 0:
            raise ForeignTable(
                f"the table {self.table.folder.uri} holds {-self._lost_rows} rows that wait and that this broker never "
                "had taken: it is another broker's; give the pipeline another table with --table"
            )
        self.table.stamp(state.identity)

    def _name_queues(self, state: State) -> None:
        """Has the table say what queue numbers mean, where there are other queues than before."""
        queues = (state.queues, state.gone)
        if state.queues is not None and queues != self._queues:
            self.table.name_queues(self._broker.named_queues())
            self._queues = queues

    def _waiting_rows(self, state: State) -> int:
        """Counts the rows of the table that were taken and are due after the horizon."""
        logged = Window(state.horizon, NEVER, 0, state.arrival_of_taken)
        own = logged._replace(arrival_low=OWN, arrival_high=NEVER)
        windows = [logged] if logged.arrival_high == NEVER else [logged, own]
        whole, part = 0, []
        for file in self.table.files.values():
            if file.is_untaken(state.taken):
                continue
            if file.due_low > logged.due_low and file.arrival_high < logged.arrival_high:
                whole += file.rows
            elif any(touches(file, window) for window in windows):
                part.append(file)
        plain = [list(window) for window in windows]
        counts = self._run(tasks.count, [{"files": [file.path], "windows": plain} for file in part])
        return whole + int(sum(result["rows"] for result in counts))

    def _restore(self, state: State, missing: list[File]) -> None:
        """Reads again from the log what the table should have and lacks: what is due after the horizon, and what was
        committed for a stage that never came.
        """
        stop = max(state.taken, self.table.far)
        kept = [file for file in self.table.files.values() if file not in missing]
        common = {
            "due_after": state.horizon, "late_from": state.arrival_of_taken,
            "files": [file.path for file in kept],
        }  # fmt: skip
        edge = {"edge": merging.edge_ms(state.now_ms)}
        results = self._run(tasks.restore, [common | each | edge for each in self._ranges(state.far_first, stop)])
        files = written_files(results)
        self.table.commit(files, missing, far=stop, rows=max(state.rows_in, self.table.rows))
        logger.warning("%d rows were restored from the log", sum(file.rows for file, _ in files))

    # -- one batch ----------------------------------------------------------------------------------------------

    def run(self, plan: DataFrame) -> None:
        """Runs one batch, and reports it. Raises CorruptTable where a file of the table cannot be read and may be
        whole: its storage may be away.
        """
        with self._lock:
            while True:
                try:
                    self._run_batch(plan)
                    return
                except CorruptTable as error:
                    if not self._set_damage_aside(error):
                        raise
                except (PySparkException, Py4JError):
                    self._state()  # a task fails, too, where another pipeline has registered: then that is the reason
                    raise

    def _set_damage_aside(self, error: CorruptTable) -> bool:
        """Takes a damaged file out of the table, but for what can be read of it, and has the log bring the rest, as far
        as it can. Returns whether there was such a file. The file stays beside the table, for people.
        """
        file, folder = self.table.files.get(error.path), self.table.folder
        if file is None:
            return False
        # Tier and far row, with which its name begins, count for what is left of it, too.
        salvaged = salvage_file(folder, file.path, f"{file.path.removesuffix('.parquet')}-left.parquet")
        if salvaged is None:
            return False
        logger.error("%s", error)
        left = salvaged.left
        self.table.commit([] if left is None else [left], [file])
        folder.rename(file.path, f"{_DAMAGED}{file.path}")
        logger.error(
            "%s is set aside as %s%s; %d of its %d rows can be read and stay",
            file.path, _DAMAGED, file.path, left.file.rows if left else 0, file.rows,
        )  # fmt: skip
        self._prove(self._state())
        return True

    def _run_batch(self, plan: DataFrame) -> None:
        reach("batch.begun")
        choose_pool(self._spark, PROMOTION)
        clock = self._clock = _Stopwatch()
        self._promoted = _NOTHING
        self._workers.clear()
        (planned,) = plan.collect()
        began = state = self._state()
        # The clock may have stepped back since the batch was planned: the broker believes no horizon beyond its reach.
        planned_horizon = min(planned.horizon, horizon_of(state.now_ms, state.lead_ms))
        if planned_horizon > state.horizon:
            self._promote(state, state.taken, planned_horizon)
            state = self._state()
        self._name_queues(state)
        far_to = self._ingest(planned.far, state)
        clock.stop("ingest_s")
        state = self._state()  # the horizon may have moved meanwhile
        if far_to > state.taken or state.horizon == began.horizon:
            self._promote(state, far_to, state.horizon)
        # What the table took for this batch, also in an earlier try that died before its stage.
        rows_in = self.table.rows - began.rows_in
        files = [file for file in self.table.files.values() if file.is_untaken(began.taken)]
        horizon = max(planned_horizon, state.horizon)
        promoted_ms = min(horizon, state.now_ms) - KEEP_MS
        forgotten = self._forget(promoted_ms)
        merged = self._merge(state.now_ms, promoted_ms)
        promoted = self._promoted
        if not self.beside.is_selecting and self.table.tidy():
            self._jobs.remove_strangers()
        clock.stop("merge_s")
        horizon = max(horizon, self._state().horizon)
        self.batch_count += 1
        self._report(
            Report(
                at_ms=began.now_ms, batch=self.batch_count, epoch=self.epoch, far_from=began.taken, far_to=far_to,
                horizon=horizon, rows_in=rows_in, promoted=promoted.rows, cancelled=promoted.cancelled,
                chunks=len(promoted.chunks), opened_files=promoted.files, files=len(files),
                bytes=sum(file.bytes for file in files),
                forgotten_files=forgotten, merged_rows=merged, table_files=len(self.table.files),
                table_bytes=self.table.bytes, rescued=state.rescued, backlog=max(state.far_length - far_to, 0),
                workers=len(self._workers), **clock.spans, total_s=clock.total(),
                master=str(self._spark.sparkContext.master),
            )
        )  # fmt: skip
        reach("batch.done")

    def _state(self) -> State:
        """Where the broker is. Raises Refused where another pipeline has registered: the table is that one's now."""
        state = self._broker.state()
        if state.epoch != self.epoch:
            raise Refused(f"another pipeline has registered: its epoch is {state.epoch}, ours was {self.epoch}")
        self._bulk = self._broker.bulk_of(state)
        self.table.see(state)
        return state

    def _report(self, report: Report) -> None:
        """Reports for people. The batch is done, and does not depend on it."""
        figures = report.plain()
        try:
            for stand_in in self._broker.stand_ins():
                if stand_in["at_ms"] not in self._stood_in:
                    self._history.append(stand_in)
                    self._stood_in.add(stand_in["at_ms"])
            self._history.append(figures)
            self._broker.report(figures)
        except (DeltaError, OSError, PostdateError) as error:
            logger.warning("the report of the batch was lost: %s", error)

    # -- ingest -------------------------------------------------------------------------------------------------

    def _ingest(self, far_to: int, state: State) -> int:
        """Takes far rows into the table, from where the table ends: the checkpoint may be ahead of it or behind. Ends
        before a job that the table cannot follow yet. Returns where.
        """
        for job in sorted(state.commands, key=lambda job: job.far):
            if self.table.far <= job.far < far_to:
                self._take(job.far, state)
                if not self._jobs.carry_out(job.number, job.far, state, self.epoch):
                    far_to = job.far
        self._take(far_to, state)
        return self.table.far

    def _take(self, stop: int, state: State) -> None:
        """Takes the far rows before `stop`."""
        start = max(self.table.far, state.far_first)  # rows that are gone before that were rescued long ago
        edge = {"edge": merging.edge_ms(state.now_ms)}
        ranges = [each | edge for each in self._ranges(start, stop)]
        files = written_files(self._run_in_steps(tasks.ingest, ranges, "ingest_s"))
        if stop > self.table.far:
            reach("ingest.written")
            self.table.take(files, stop)

    # -- promote ------------------------------------------------------------------------------------------------

    def _promote(self, state: State, far_to: int, horizon_to: int) -> None:
        """Promotes what is due up to a horizon and stages it, with the far rows taken by then. Where somebody else has
        promoted meanwhile, it begins again from there.
        """
        while True:
            horizon = (state.horizon, max(horizon_to, state.horizon))
            promoted = self._upload(state, far_to, horizon)
            self._clock.stop("promote_s")
            try:
                self._stage(state, far_to, horizon, promoted)
            except Refused:
                before, state = state, self._state()
                if (before.taken, before.horizon) == (state.taken, state.horizon):
                    raise
                if far_to == state.taken and horizon_to <= state.horizon:
                    return
                continue
            finally:
                self._clock.stop("stage_s")
            self._promoted = self._promoted.plus(promoted)
            return

    def _keep_up(self, step: str) -> None:
        """Promotes the next minute if it has turned during a long step, whose time this is."""
        self._clock.stop(step)
        state = self._state()
        horizon = horizon_of(state.now_ms, state.lead_ms)
        if horizon > state.horizon:
            self._promote(state, state.taken, horizon)

    def _upload(self, state: State, far_to: int, horizon: tuple[int, int]) -> Promoted:
        """Uploads as chunks what is due up to the new horizon, of what was taken before, or what is late, of what was
        not: it arrived at or after the first untaken row, and is due at or before the horizon.
        """
        files, late_from = self.table.files.values(), state.arrival_of_taken
        if far_to == state.taken:
            known = [file for file in files if horizon[0] < horizon[1] and not file.is_untaken(state.taken)]
            window = Window(-1, horizon[1], after=horizon[0], before=late_from)
        else:
            known = [file for file in files if file.is_untaken(state.taken) or late_from <= file.arrival_high < OWN]
            window = Window(-1, horizon[1], after=horizon[0], late_from=late_from)
        work = plan_promotion(known, self.table.row_groups, window, state.taken, self._limits)
        results = self._run(tasks.promote, [part._asdict() | {"epoch": self.epoch} for part in work])
        return Promoted(
            [result["chunk"] for result in results if result["chunk"]],
            sum(result["rows"] for result in results),
            sum(result["cancelled"] for result in results),
            sum(result["read"] for result in results),
            len({path for part in work for path in part.files}),
        )

    def _stage(self, state: State, far_to: int, horizon: tuple[int, int], promoted: Promoted) -> None:
        reach("stage.call")
        rows_in = state.rows_in if far_to == state.taken else self.table.rows  # what is not taken does not count yet
        rows_out = promoted.read + self._lost_rows
        chunks = tuple(promoted.chunks)
        self._broker.stage(Stage(self.epoch, (state.taken, far_to), horizon, chunks, rows_in, rows_out))
        self._lost_rows = 0
        reach("stage.called")

    # -- forget and merge ---------------------------------------------------------------------------------------

    def _forget(self, promoted_ms: int) -> int:
        """Removes files from the table whose last row was promoted a while ago; returns how many. The table also learns
        of a stage that promoted rows: a log that lacks it is older.
        """
        gone = [file for file in self.table.files.values() if file.due_high <= promoted_ms]
        if gone or self._promoted.read:
            self.table.see(self._broker.state())
            self.table.commit(removed=gone)
        return len(gone)

    def _merge(self, now_ms: int, promoted_ms: int) -> int:
        """Rewrites files that hold the order of arrival as files of one hour or month each; returns how many rows."""
        files = self.table.files.values()
        merge = merging.plan_merge(files, now_ms, promoted_ms, self._last_cut_ms, self.merge_limits)
        if merge is None:
            return 0
        work = split_files(merge.files, self.table.row_groups, Window(-1, NEVER), self._limits)
        tasks_of = [part._asdict() | {"buckets": _clipped(merge.buckets, part.window)} for part in work]
        results = self._run_in_steps(tasks.merge, tasks_of, "merge_s")
        read, held = sum(result["read"] for result in results), sum(file.rows for file in merge.files)
        if read != held:
            raise CorruptTable(f"a merge of {len(merge.files)} files has read {read} rows, the table says {held}")
        merged = written_files(results)
        reach("merge.written")
        self.table.commit(merged, merge.files)
        reach("merge.committed")
        if merge.ends_split:
            self._last_cut_ms = now_ms
        return sum(file.rows for file, _ in merged)

    # -- tasks --------------------------------------------------------------------------------------------------

    def _common(self) -> dict[str, Any]:
        return {"bulk": self._bulk, "table": self.table.folder.uri}

    def _ranges(self, start: int, stop: int) -> list[dict[str, int]]:
        """Splits far rows into ranges, one for each task."""
        rows = self._limits.rows
        return [{"start": at, "stop": min(at + rows, stop)} for at in range(start, stop, rows)]

    def _run_in_steps(
        self, work: Callable[[tasks.Task], tasks.Result], specs: list[dict[str, Any]], step: str
    ) -> list[tasks.Result]:
        """Runs tasks, as many at a time as Spark has slots; what falls due goes between. `step` names their time."""
        results, slots = list[tasks.Result](), max(1, self._limits.slots)
        for start in range(0, len(specs), slots):
            if start:
                self._keep_up(step)
            results += self._run(work, specs[start : start + slots])
        return results

    def _run(self, work: Callable[[tasks.Task], tasks.Result], specs: list[dict[str, Any]]) -> list[tasks.Result]:
        """Runs tasks on the executors."""
        if not specs:
            return []
        numbers = self._spark.range(0, len(specs), 1, len(specs))
        answers = numbers.mapInArrow(tasks.over_numbers(work, self._common(), specs), "result string")
        results = tasks.read_results(row.result for row in answers.collect())
        self._workers.update(result["worker"] for result in results)
        return results


def _clipped(buckets: list[merging.Bucket], window: Window) -> list[merging.Bucket]:
    """Clips the buckets to a task's window."""
    low, high = window[:2]
    return [(tier, max(start, low), min(stop, high)) for tier, start, stop in buckets if start < high and stop > low]


class _Stopwatch:
    """Measures the steps of a batch in seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self.spans = dict.fromkeys(("ingest_s", "promote_s", "stage_s", "merge_s"), 0.0)

    def stop(self, name: str) -> None:
        now = time.monotonic()
        self.spans[name] = round(self.spans[name] + now - self._last, 3)
        self._last = now

    def total(self) -> float:
        return round(time.monotonic() - self._began, 3)

"""The driver: one process that registers with a broker, runs the one query, and ends when it is told to."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyarrow import flight
from pyspark.errors import PySparkException

from postdate.errors import PipelineFailed, PostdateError, UsageError
from postdate.process import let_others_go_first
from postdate.spark.executor.bulk_client import Gate
from postdate.spark.pipeline.batch import Pipeline
from postdate.spark.pipeline.history import History
from postdate.spark.pipeline.source import NAME, PlanSource
from postdate.spark.session import java
from postdate.spark.session.session import scratch, session
from postdate.spark.session.stderr import aside
from postdate.table.delta import Table
from postdate.table.format import CHECKPOINT, HISTORY, MESSAGES
from postdate.table.slices import TASK_ROWS, Limits

logger = logging.getLogger("postdate.pipeline")

_BATCH_S = 3.0  # a batch under way may take so long to end; then it is broken off, and done again by the next start
_STOP_S = 1.0
_WATCH_S = 0.2
_TRACEBACK, _OURS = "Traceback (most recent call last):\n", "postdate.errors."
_NICENESS = 10  # beside a broker, which fires on the same cores
_AWAY = (flight.FlightUnavailableError, flight.FlightTimedOutError)
_OF_SPARK = (PySparkException, Py4JError)


@dataclass(frozen=True)
class Options:
    """What a pipeline needs to know. An empty table means the broker's own folder, which only works beside it."""

    bulk: str = "127.0.0.1:9878"
    table: str = ""
    master: str = "local[*]"
    memory: str = "1g"
    checkpoint: str = ""  # empty: beside the table, where that is a local folder
    parent_pid: int = 0  # ends when this process is gone; 0 = does not look
    batch_rows: int = 2_000_000
    batch_bytes: int = 1 << 30
    task_rows: int = TASK_ROWS
    soon_rows: int = TASK_ROWS  # so many that wait are worth a batch before the minute turns
    pause_s: float = 0.5  # between two looks for news

    @property
    def root(self) -> str:
        """The table's folder or URI, such that it means the same to a process that runs elsewhere."""
        return self.table.rstrip("/") if "://" in self.table else str(Path(self.table).resolve())

    @property
    def messages(self) -> str:
        return f"{self.root}/{MESSAGES}"

    @property
    def history(self) -> str:
        return f"{self.root}/{HISTORY}"

    @property
    def checkpoint_folder(self) -> str:
        if self.checkpoint:
            return self.checkpoint
        if "://" in self.table:
            raise UsageError(f"the table is {self.table}: name a folder for Spark's checkpoint with --checkpoint")
        return f"{self.root}/{CHECKPOINT}"


class Driver:
    """Runs the query until `stop` is called or it ends by itself."""

    def __init__(self, options: Options, spark: Any, gate: Gate) -> None:
        self._options = options
        self._spark = spark
        self._gate = gate
        self._batch = threading.Lock()  # held while a batch runs: a query is not stopped inside one
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._query: Any = None
        self._anew_at = -1  # how many batches had passed when the checkpoint was begun anew
        self._is_waiting = False
        limits = Limits(options.task_rows, slots=spark.sparkContext.defaultParallelism)
        self.pipeline = Pipeline(spark, gate, options.bulk, Table(options.messages), History(options.history), limits)

    def start(self) -> None:
        """Registers and begins. Raises Refused, CorruptTable, PipelineFailed."""
        self.pipeline.warm()
        self.pipeline.register(self._options.root, self._options.master)
        self._spark.dataSource.register(PlanSource)
        try:
            self._query = self._begun()
        except (PySparkException, Py4JError) as error:
            if not self._may_begin_anew():
                raise PipelineFailed(f"the query does not start: {first_line(error)}") from error
            self._query = self._begun_anew(error)

    def _may_begin_anew(self) -> bool:
        """Whether the checkpoint is to blame, for all we know: no batch has failed, and one has passed since it was
        begun anew. Parts of it may be lost; Spark notices that when it writes them.
        """
        is_theirs = self._failure is None and self.pipeline.batch_count != self._anew_at
        return is_theirs and os.path.isdir(self._options.checkpoint_folder)

    def _begun_anew(self, failure: object) -> Any:
        """Without the checkpoint that is there: the broker and the table know where they are."""
        logger.warning("Spark's checkpoint cannot be used and is begun anew: %s", first_line(failure))
        shutil.rmtree(self._options.checkpoint_folder)
        self._anew_at = self.pipeline.batch_count
        return self._begun()

    def _begun(self) -> Any:
        options = self._options
        rows = (
            self._spark.readStream.format(NAME)
            .option("bulk", options.bulk).option("rows", options.batch_rows).option("bytes", options.batch_bytes)
            .option("soon", options.soon_rows).option("pause", options.pause_s)
            .load()
        )  # fmt: skip
        return (
            rows.writeStream.queryName(f"postdate-{self.pipeline.epoch}").foreachBatch(self._run)
            .option("checkpointLocation", options.checkpoint_folder).start()
        )  # fmt: skip

    def _run(self, plan: Any, _batch_id: int) -> None:
        with self._batch:
            if self._is_stopping:
                return
            try:
                self.pipeline.run(plan)
            except Exception as error:
                self._failure = error  # Spark would tell it in a page of its own words
                raise

    def watch(self) -> None:
        """Looks whether the query still runs. Raises what ended it."""
        if self._query.isActive or self._is_stopping or self._is_away():
            return
        failure = self._failure or self._query.exception()
        if self._may_begin_anew():
            self._query = self._begun_anew(failure)
            return
        raise (
            failure
            if isinstance(failure, PostdateError)
            else PipelineFailed(f"the query has ended: {first_line(failure)}")
        )

    def _is_away(self) -> bool:
        """Whether the broker is away, or was until now: then the query begins again where it ended."""
        is_told = isinstance(self._failure, _AWAY)
        try:
            self._gate.state()
        except _AWAY as error:
            if not self._is_waiting:
                logger.warning("the broker is away, waiting: %s", first_line(error))
            self._is_waiting = True
            return True
        if not (is_told or self._is_waiting):
            return False
        logger.info("the broker is back")
        self._is_waiting, self._failure = False, None
        self._query = self._begun()
        return True

    def stop(self) -> None:
        """Ends the query between two batches, or, where one takes too long, inside it."""
        self._is_stopping = True
        is_between = self._batch.acquire(timeout=_BATCH_S)
        stopper = threading.Thread(target=self._stop_query, daemon=True)
        stopper.start()
        stopper.join(_STOP_S)
        if is_between:
            self._batch.release()

    def _stop_query(self) -> None:
        try:
            if self._query is not None:
                self._query.stop()
        except Exception as error:  # whatever it is: the process ends now
            logger.debug("the query did not stop: %s", error)


def first_line(error: object) -> str:
    """An exception of Spark's without its page of Java; of one that a task raised, what it said itself."""
    text = str(getattr(error, "desc", None) or error).strip()
    raised = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text else text
    told = next((line for line in raised.splitlines() if not line.startswith(" ")), text)
    return told.removeprefix(_OURS)[:300]


def run(options: Options) -> None:
    """Runs a pipeline until SIGINT or SIGTERM, or until the process that started it is gone."""
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    found = java.find(os.environ)
    if isinstance(found, java.Missing):
        raise PipelineFailed(f"{found.sentence}; {java.INSTALL}")
    gate = _waited_for(options, ending)
    if gate is None:
        return
    options = _completed(options, gate)
    if options.master.startswith("local"):
        let_others_go_first(_NICENESS)  # before Spark starts: its processes inherit it
    with scratch() as folder, aside() as said:
        spark = begun(options.master, options.memory, found.home, Path(folder), said)
        driver = None
        try:
            with _in_our_words(_java_of(spark)):
                driver = Driver(options, spark, gate)
                driver.start()
                print(f"pipeline runs on Spark {spark.version}, {options.master}, table {options.table}", flush=True)
                while not ending.wait(_WATCH_S) and not _is_orphan(options):
                    driver.watch()
        finally:
            if driver is not None:
                driver.stop()
            ended(spark)
    logging.shutdown()


def _waited_for(options: Options, ending: threading.Event) -> Gate | None:
    """The gate, when the broker is there; None where we are to end before."""
    pause_s, said = 0.25, False
    while not ending.is_set() and not _is_orphan(options):
        gate = Gate(options.bulk)
        try:
            gate.state()
            return gate
        except flight.FlightError as error:
            gate.close()
            if not said:
                logger.warning("no broker answers at %s, waiting: %s", options.bulk, first_line(error))
                said = True
            ending.wait(pause_s)
            pause_s = min(2 * pause_s, 10.0)
    return None


def _completed(options: Options, gate: Gate) -> Options:
    """With the table where the broker says, if nothing else was said."""
    table = options.table or gate.state()["table"]
    if not table:
        raise UsageError("the broker does not say where the table is: name a folder with --table")
    return replace(options, table=table)


def _is_orphan(options: Options) -> bool:
    return options.parent_pid > 0 and os.getppid() != options.parent_pid


# -- Spark itself -----------------------------------------------------------------------------------------------


def begun(master: str, memory: str, home: str, folder: Path, said: Sequence[str]) -> Any:
    """A session. Where Java does not even begin, the last that it has said tells why; later it is an exception."""
    try:
        return session(master, memory, home, folder)
    except Py4JJavaError as error:
        why = first_line(str(error.java_exception))
        raise PipelineFailed(f"Spark does not start on {master}: {why}") from error
    except _OF_SPARK as error:
        raise PipelineFailed(f"Spark does not start: {'; '.join(said) or first_line(error)}") from error


@contextmanager
def _in_our_words(java_process: "subprocess.Popen[bytes] | None") -> Iterator[None]:
    """Where Java ends, any call fails in any way; why it does is told by how Java ended."""
    try:
        yield
    except Exception as error:
        ending = _ending(java_process) if java_process else ""
        if ending:
            raise PipelineFailed(f"Spark's Java process {ending}") from error
        if isinstance(error, (*_OF_SPARK, flight.FlightError)):
            raise PipelineFailed(first_line(error)) from error
        raise


def _ending(process: "subprocess.Popen[bytes]") -> str:
    """How a process has ended; empty where it runs."""
    try:
        code = process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        return ""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _java_of(spark: Any) -> "subprocess.Popen[bytes] | None":
    """None where somebody else has started it."""
    process: subprocess.Popen[bytes] | None = getattr(spark.sparkContext._gateway, "proc", None)
    return process


def ended(spark: Any) -> None:
    """Stops Spark; where it does not follow in time, its process is ended."""
    process = _java_of(spark)
    stopper = threading.Thread(target=_stop, args=(spark,), daemon=True)
    stopper.start()
    stopper.join(_STOP_S)
    if process is not None:
        process.kill()
        process.wait()
    sys.stdout.flush()


def _stop(spark: Any) -> None:
    try:
        spark.stop()
    except Exception as error:  # whatever it is: the process ends now
        logger.debug("Spark did not stop: %s", first_line(error))

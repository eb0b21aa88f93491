"""The driver: one process that registers with a broker, runs the one query, and ends on a signal."""

import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JError
from pyarrow import flight
from pyspark.errors import PySparkException

from postdate.access.token import ENVIRONMENT_TOKEN
from postdate.contract import State
from postdate.errors import PipelineFailed, PostdateError, UsageError
from postdate.process import keep_files_private, let_others_go_first, run_on_thread
from postdate.spark.executor import broker_client
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.executor.bulk_client import BulkClient
from postdate.spark.executor.tasks import BulkAway
from postdate.spark.pipeline.batch import Pipeline
from postdate.spark.pipeline.history import History
from postdate.spark.pipeline.source import NAME, PlanSource
from postdate.spark.session import java
from postdate.spark.session.session import STOP_S, Gateway, first_line, scratch_folder, try_to_stop
from postdate.spark.session.stderr import divert_stderr
from postdate.table.delta import Table
from postdate.table.format import CHECKPOINT, HISTORY, MESSAGES
from postdate.table.identity import open_table
from postdate.table.slices import TASK_ROWS, Limits

logger = logging.getLogger("postdate.pipeline")

_BATCH_S = 3.0  # a batch under way gets this long to end; then it is broken off, and the next start repeats it
_WATCH_S = 0.2
_CORES_S = 5.0  # between two looks at the executors of a cluster
_EXECUTOR_S = 20.0  # an executor that a busy cluster has granted takes this long to start: until then cores may be free
_NICENESS = 10  # beside a broker, which fires on the same cores
_AWAY = (*broker_client.AWAY, flight.FlightUnavailableError, flight.FlightTimedOutError)
_OF_SPARK = (PySparkException, Py4JError)


@dataclass(frozen=True)
class Options:
    """What a pipeline needs to know."""

    address: str | None = None  # of the broker; None: POSTDATE_ADDR, else 127.0.0.1:9876
    bulk: str = ""  # of bulk; empty: the broker tells
    table: str = ""  # empty: where the last pipeline kept it, as the broker tells
    master: str = "local[*]"
    memory: str = "1g"
    token: str = ""  # of the broker's data folder; empty: the broker will refuse us
    checkpoint: str = ""  # empty: beside the table, where that is a local folder
    parent_pid: int = 0  # the pipeline ends when this process is gone; 0: it does not look
    batch_rows: int = 2_000_000
    batch_bytes: int = 1 << 30
    task_rows: int = TASK_ROWS
    soon_rows: int = TASK_ROWS  # this many that wait are worth a batch before the minute turns
    pause_s: float = 0.5  # between two looks at the broker
    cluster_secret: str = ""  # of a standalone cluster; empty: it has none

    @property
    def root(self) -> str:
        """The table's folder or URI, in a form that a process in another folder understands."""
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

    def __init__(self, options: Options, spark: Any, broker: BrokerClient) -> None:
        self._options = options
        self._spark = spark
        self._broker = broker
        self._batch = threading.Lock()  # held while a batch runs: a query is not stopped inside one
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._query: Any = None
        self._anew_at = -1  # how many batches had run when the checkpoint was begun anew
        self._is_waiting = False
        self._away_at = -1  # how many batches had run when executors last had no bulk, and we had
        limits = Limits(options.task_rows, slots=spark.sparkContext.defaultParallelism)
        self.pipeline = Pipeline(spark, broker, Table(options.messages), History(options.history), limits)

    def start(self) -> None:
        """Registers, and starts the query. Raises Refused, CorruptTable, PipelineFailed."""
        self.pipeline.warm_up()
        self.pipeline.register(self._options.root, self._options.master)
        self._spark.dataSource.register(PlanSource)
        try:
            self._query = self._start_query()
        except (PySparkException, Py4JError) as error:
            if not self._may_begin_anew():
                raise PipelineFailed(f"the query does not start: {first_line(error)}") from error
            self._query = self._begin_anew(error)
        self.pipeline.beside.start()

    def _may_begin_anew(self) -> bool:
        """Whether the checkpoint may be to blame: no batch of ours has failed, and one has run since the checkpoint was
        begun anew. Parts of it may be lost; Spark notices that when it writes them.
        """
        is_of_spark = self._failure is None and self.pipeline.batch_count != self._anew_at
        return is_of_spark and os.path.isdir(self._options.checkpoint_folder)

    def _begin_anew(self, failure: object) -> Any:
        """Starts the query without its checkpoint: the broker and the table know where they are."""
        logger.warning("Spark's checkpoint cannot be used and is begun anew: %s", first_line(failure))
        shutil.rmtree(self._options.checkpoint_folder)
        self._anew_at = self.pipeline.batch_count
        return self._start_query()

    def _start_query(self) -> Any:
        options = self._options
        rows = (
            self._spark.readStream.format(NAME)
            .option("addr", self._broker.addresses)
            .option("rows", options.batch_rows).option("bytes", options.batch_bytes)
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
                self._failure = error  # Spark would report it in a page of its own words
                raise

    def watch(self) -> None:
        """Checks that the query still runs, and what runs beside it. Raises what ended it."""
        failure = self.pipeline.beside.failure
        if (failure is None and self._query.isActive) or self._is_stopping or self._is_away():
            return
        failure = failure or self._failure or self._query.exception()
        if self.pipeline.beside.failure is None and self._may_begin_anew():
            self._query = self._begin_anew(failure)
            return
        raise (
            failure
            if isinstance(failure, PostdateError)
            else PipelineFailed(f"the query has ended: {first_line(failure)}")
        )

    def _is_away(self) -> bool:
        """Whether the broker or bulk is away, or was until now: then the query starts again where it ended. A bulk that
        we reach and executors do not, twice without a batch in between, is not away: they have no way to it.
        """
        is_out_of_reach = isinstance(self._failure, BulkAway) and self.pipeline.batch_count == self._away_at
        has_said = isinstance(self._failure, _AWAY) and not is_out_of_reach
        try:
            with BulkClient(self._broker.bulk()) as bulk:
                bulk.probe()
        except _AWAY as error:
            if not self._is_waiting:
                logger.warning("the broker is away, waiting: %s", first_line(error))
            self._is_waiting = True
            return True
        if not (has_said or self._is_waiting):
            return False
        if isinstance(self._failure, BulkAway) and not self._is_waiting:
            logger.warning("a batch is run again: %s", first_line(self._failure))
            self._away_at = self.pipeline.batch_count
        logger.info("the broker is back")
        self._is_waiting, self._failure = False, None
        self._query = self._start_query()
        return True

    def stop(self) -> None:
        """Ends the query between two batches, or inside one that takes too long."""
        self._is_stopping = True
        self.pipeline.beside.stop(STOP_S)
        is_between = self._batch.acquire(timeout=_BATCH_S)
        if self._query is not None:
            try_to_stop(self._query, "the query")
        if is_between:
            self._batch.release()


def run(options: Options) -> None:
    """Runs a pipeline until SIGINT or SIGTERM, or until the process that started it is gone."""
    keep_files_private()  # Spark's processes inherit it
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    found = java.find(os.environ)
    if isinstance(found, java.Missing):
        raise PipelineFailed(f"{found.sentence}; {java.INSTALL}")
    if options.token:
        os.environ[ENVIRONMENT_TOKEN] = options.token  # Spark plans batches in a process of its own
    broker = BrokerClient(options.address, options.bulk, token=options.token)
    state = _wait_for_state(broker, options, ending)
    if state is None:
        return
    options = replace(options, table=options.table or state.table)
    if not options.table:
        raise UsageError("the broker does not say where the table is: name a folder with --table")
    with suppress(DeltaError, OSError):  # one that is not there yet, or damaged, is the pipeline's to make or mend
        open_table(options.root, state.identity)  # before Spark, which takes seconds to start
    if options.master.startswith("local"):
        let_others_go_first(_NICENESS)  # before Spark starts: its processes inherit it
    with (
        scratch_folder() as folder, divert_stderr() as lines,
        Gateway(options.master, options.memory, found.home, Path(folder), options.cluster_secret) as gateway,
    ):  # fmt: skip
        # On another thread, whatever it waits for: a signal and the broker's death are noticed here all the time.
        starting = run_on_thread(lambda: _start(options, gateway, broker, lines))
        cores = _Cores(options, gateway, broker)
        while not starting.done() and not ending.wait(_WATCH_S) and not _is_orphan(options):
            with _in_our_words(gateway.process):
                cores.look()
        if starting.done():
            driver = starting.result()
            spark = f"Spark {gateway.session.version}, {options.master}"
            print(f"pipeline runs on {spark}, table {options.table}", flush=True)
            try:
                with _in_our_words(gateway.process):
                    while not ending.wait(_WATCH_S) and not _is_orphan(options):
                        driver.watch()
                        cores.look()
            except Exception:
                driver.pipeline.beside.blame()
                raise
            finally:
                driver.stop()
    logging.shutdown()


def _wait_for_state(broker: BrokerClient, options: Options, ending: threading.Event) -> State | None:
    """Waits until broker and bulk answer; returns the broker's state, or None where we end before that."""
    pause_s, has_said = 0.25, False
    while not ending.is_set() and not _is_orphan(options):
        try:
            state = broker.state()
            with BulkClient(broker.bulk_of(state)) as bulk:
                bulk.probe()
            return state
        except _AWAY as error:
            if not has_said:
                logger.warning("no broker answers at %s, waiting: %s", broker.addresses, first_line(error))
                has_said = True
            ending.wait(pause_s)
            pause_s = min(2 * pause_s, 10.0)
    return None


def _is_orphan(options: Options) -> bool:
    return options.parent_pid > 0 and os.getppid() != options.parent_pid


# -- Spark itself -----------------------------------------------------------------------------------------------


def _start(options: Options, gateway: Gateway, broker: BrokerClient, lines: Sequence[str]) -> Driver:
    """Starts Spark and the query. Raises PipelineFailed, and what `Driver.start` raises."""
    spark = gateway.connect(lines)
    with _in_our_words(gateway.process):
        driver = Driver(options, spark, broker)
        driver.start()
        return driver


class _Cores:
    """Says when a cluster has no executor for us: Spark itself waits for one in silence, for ever."""

    def __init__(self, options: Options, gateway: Gateway, broker: BrokerClient) -> None:
        self._master, self._gateway, self._broker = options.master, gateway, broker
        self._is_missing = False
        self._missing_since: float | None = None
        self._looks_at = time.monotonic() + _CORES_S

    def look(self) -> None:
        """Looks now and then. Raises Py4JError where Java has ended."""
        spark = self._gateway.session
        now = time.monotonic()
        if self._master.startswith("local") or spark is None or now < self._looks_at:
            return
        self._looks_at = now + _CORES_S
        has_some = int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) > 1  # one is the driver itself
        self._missing_since = None if has_some else self._missing_since or now
        is_missing = self._missing_since is not None and now - self._missing_since >= _EXECUTOR_S
        if is_missing:
            self._note(f"waits for cores of {self._master}: it has none free")
        if is_missing and not self._is_missing:
            logger.warning("it waits for cores of %s: it has none free", self._master)
        if self._is_missing and not is_missing:
            self._note("")
            logger.info("it has cores of %s", self._master)
        self._is_missing = is_missing

    def _note(self, sentence: str) -> None:
        """Tells the broker, for people who look at its status."""
        with suppress(*_AWAY):
            self._broker.note(sentence)


@contextmanager
def _in_our_words(java_process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Raises errors of Spark as PipelineFailed. Where Java has ended any call may fail in any way, so the error says
    how it ended.
    """
    try:
        yield
    except Exception as error:
        with suppress(subprocess.TimeoutExpired):  # it still runs
            code = java_process.wait(STOP_S)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise PipelineFailed(f"Spark's Java process {how}") from error
        if isinstance(error, (*_OF_SPARK, flight.FlightError)):
            raise PipelineFailed(first_line(error)) from error
        raise

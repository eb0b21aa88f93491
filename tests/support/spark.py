"""A broker, its bulk and a pipeline on real Spark, all on one manual clock, and a judge at the end.

One Spark session serves all tests of a run: starting one takes seconds. A pipeline is a Driver on that session; it can
be stopped, failed and started again with the same, another or no checkpoint. Time passes as a server would live it:
from one instant that the broker asks for to the next, and the pipeline is waited for wherever a minute turns that
matters to a message.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from postdate import faultpoint
from postdate.bulk.process import Bulk
from postdate.check import check_folder
from postdate.client.address import parse_address
from postdate.clock import ManualClock
from postdate.contract import horizon_of
from postdate.errors import PostdateError
from postdate.message import Message, encode_properties
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.pipeline.driver import Driver, Options
from postdate.spark.session import java
from postdate.spark.session.session import Gateway
from postdate.storage.disk import Disk, RealDisk
from postdate.table import merging
from postdate.table.files import SYNC_TRACE
from postdate.wire.requests import Request
from tests.support.handles import recall_handle
from tests.support.peer import Peer
from tests.support.server import SERVED, Served, configured
from verify.faults.process import ROOT, free_port

NOW = 1_900_000_000_000 // 60_000 * 60_000 + 5_000
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
TOPIC = "orders"
WAIT_S = 180.0
MASTER = "local[2]"
_PAUSE_S = 0.02
_MARK = "TESTED_IN"  # in the environment of a process, and of all that it starts


@contextmanager
def spark_session() -> Iterator[Any]:
    """Spark for a whole run of tests."""
    found = java.find(os.environ)
    assert not isinstance(found, java.Missing), found.sentence
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="postdate-tests-", ignore_cleanup_errors=True) as folder:
        os.environ[SYNC_TRACE] = str(_trace_in(folder))  # for its workers; a test that looks at it sets its own
        os.environ["PYTHONPATH"] = str(ROOT)  # what is tested is what stands here, wherever a test works
        with Gateway(MASTER, "1g", found.home, Path(folder)) as gateway:
            spark = gateway.connect()
            os.environ.clear()
            os.environ.update(before)  # what Spark needs to start is nothing for other tests
            try:
                yield spark
            finally:
                spark.stop()
                spark.sparkContext._gateway.shutdown()


def _trace_in(folder: str) -> Path:
    return Path(folder) / "syncs"


def sync_trace(spark: Any) -> Path:
    """Where the workers of a session write what they have synced."""
    return _trace_in(spark.sparkContext.getConf().get("spark.local.dir"))


class Sent(NamedTuple):
    """A message as the judge knows it."""

    body: str
    topic: str
    queue_id: int
    due: int
    unique: str
    key: str


class Shown(NamedTuple):
    """A message in its queue."""

    body: str
    visible_at: int


class Crashed(Exception):
    """The driver dies at a step, as far as a test in its own process can have it die."""


# Fault points by the part that reaches them, as the beginnings of their names: driver, bulk and broker share a process.
OF_DRIVER = ("batch.", "ingest.", "stage.", "merge.", "table.", "job.")
OF_BULK = ("chunk.writ", "chunk.add", "chunk.synced", "selection.writ", "selection.synced")


class Steps:
    """What happens when the driver reaches a fault point; nothing by itself."""

    heard: tuple[str, ...] = OF_DRIVER

    def __call__(self, name: str) -> None:
        raise NotImplementedError

    @contextmanager
    def planted(self) -> Iterator[Self]:
        def hear(name: str) -> None:
            if name.startswith(self.heard):
                self(name)

        with faultpoint.listening(hear):
            yield self


class Crash(Steps):
    """Makes the n-th passing of a step of the driver fail, and every step after it: a dead process does nothing."""

    def __init__(self, step: str, times: int = 1) -> None:
        self._step, self._left = step, times
        self.is_over = False

    def __call__(self, name: str) -> None:
        if name == self._step:
            self._left -= 1
        self.is_over = self.is_over or (name == self._step and self._left == 0)
        if self.is_over:
            raise Crashed(name)


class Held(Steps):
    """Holds the driver or bulk at a step, until it is let go."""

    heard = (*OF_DRIVER, *OF_BULK)

    def __init__(self, step: str) -> None:
        self._step = step
        self.reached, self._free = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if name == self._step and not self._free.is_set():
            self.reached.set()
            assert self._free.wait(WAIT_S), "the test has forgotten to let it go"

    def wait(self) -> None:
        assert self.reached.wait(WAIT_S), f"{self._step} is not reached"

    def let_go(self) -> None:
        self._free.set()


class Piped:
    """See the module. `settings` go to the broker, `options` to the pipeline."""

    def __init__(
        self, folder: Path, spark: Any, options: dict[str, Any], settings: dict[str, Any], now_ms: int = NOW
    ) -> None:
        self.folder, self.data, self.table = folder, folder / "data", folder / "table"
        is_new = not self.data.exists()
        self.data.mkdir(parents=True, exist_ok=True)
        self.spark = spark
        self.clock = ManualClock(now_ms)
        self._options = options
        ports = {"broker_port": free_port(), "bulk_port": free_port()}
        self._settings = {**SERVED, "segment_bytes": 1 << 20, **ports, **settings}
        self.sent: list[Sent] = []
        self.never: set[str] = set()  # bodies that must not be shown
        self.maybe: set[str] = set()  # and those that need not: nobody knew whether their cancel would find them
        self.merge_limits = merging.DEFAULT
        self.may_rescue = False
        self.is_exact = True  # everything is shown on its millisecond
        self.rescued_before = 0  # by brokers that were killed
        self._reports: dict[tuple[int, int], dict[str, Any]] = {}
        self.served: Served | None = None
        self.bulk: Bulk | None = None
        self.driver: Driver | None = None
        self._drivers: list[Driver] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.start_broker()
        if is_new:
            self.make_topic(TOPIC, 4)
        self.start_bulk()

    # -- parts --------------------------------------------------------------------------------------------------

    def start_broker(self, disk: Disk | None = None) -> None:
        self.served = Served(disk or RealDisk(self.data), configured(self._settings), self.clock)

    def kill_broker(self) -> None:
        assert self.served is not None
        self.rescued_before += self.broker.rescuer.rescued_count
        self.served.kill()
        self.served = None

    def start_bulk(self, disk: Disk | None = None) -> None:
        self.bulk = Bulk(self.data, parse_address(self.address), "127.0.0.1", self._settings["bulk_port"], disk)

    def kill_bulk(self) -> None:
        assert self.bulk is not None
        self.bulk.close()
        self.bulk = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._settings['broker_port']}"

    @property
    def control(self) -> BrokerClient:
        return BrokerClient(self.address, self.bulk_address)

    @property
    def bulk_address(self) -> str:
        return f"127.0.0.1:{self._settings['bulk_port']}"

    def options(self, **changed: Any) -> Options:
        named = {"table": str(self.table), "master": MASTER, "pause_s": 0.02, **self._options, **changed}
        return Options(address=self.address, bulk=self.bulk_address, **named)

    def driver_of(self, **changed: Any) -> Driver:
        """A pipeline that is not started yet."""
        driver = Driver(self.options(**changed), self.spark, self.control)
        driver.pipeline.merge_limits = self.merge_limits
        self._drivers.append(driver)
        return driver

    def start_driver(self, **changed: Any) -> Driver:
        self.driver = self.driver_of(**changed)
        self.driver.start()
        return self.driver

    def restart_driver(self) -> Driver:
        """After it has failed, or was stopped: what is done by now is done, the rest is done again."""
        self.stop_driver()
        driver = self.start_driver()
        self.follow()
        return driver

    def failure(self) -> PostdateError:
        """Waits until the pipeline fails by itself; returns why."""
        with pytest.raises(PostdateError) as caught:
            self.wait(lambda: False)
        self.stop_driver()
        return caught.value

    def stop_driver(self) -> None:
        if self.driver is not None:
            self.driver.stop()
            self.driver = None

    def crash_driver(self, step: str, times: int, act: Callable[[], object]) -> None:
        """Does something during which the driver reaches a step and dies there; it is gone after that."""
        with Crash(step, times).planted() as crash:
            act()
            self.wait(lambda: crash.is_over, watch=False)
            self.stop_driver()  # it does nothing more: each step fails

    # -- a pipeline as a process of its own ---------------------------------------------------------------------

    def start_process(self, kill_at: str = "") -> None:
        """`postdate pipeline`. With a step it is killed there: the driver itself, or the worker that reaches it."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
        named = {faultpoint.KILL_AT: kill_at} if kill_at else {}
        with self._process_log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "postdate", "pipeline", "--addr", self.address, "--table", str(self.table),
                 "--master", MASTER],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                env={**own, **named, "PYTHONPATH": str(ROOT), _MARK: str(self.folder)},
            )  # fmt: skip

    def killed_process(self, step: str) -> int:
        """Starts a process, waits until it has died of a step, and until all of its own have gone; returns its code."""
        self.start_process(step)
        process = self.process
        assert process is not None
        code = process.wait(WAIT_S)
        self.process = None
        self.wait(lambda: not self._own_processes())
        return code

    def stop_process(self) -> None:
        process = self.process
        if process is None:
            return
        self.process = None
        process.terminate()
        assert process.wait(WAIT_S) == 0, self._process_log.read_text()
        self.wait(lambda: not self._own_processes())

    @property
    def _process_log(self) -> Path:
        return self.folder / "pipeline.log"

    def _own_processes(self) -> list[str]:
        """What a process has started and is still there: Java, its workers."""
        mark = f"{_MARK}={self.folder}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes() + b"\0":
                    found.append(path.parent.name)
            except OSError:
                continue  # it has just ended, or is somebody else's
        return found

    @property
    def broker(self) -> Any:
        assert self.served is not None
        return self.served.broker

    @property
    def far(self) -> Any:
        return self.broker.fold.far

    @property
    def running(self) -> Driver:
        assert self.driver is not None
        return self.driver

    @property
    def checkpoint(self) -> Path:
        return self.table / "checkpoint"

    def reports(self) -> list[dict[str, Any]]:
        """What the batches of the pipeline said of themselves; a broker keeps the last hundred, and `follow` asks."""
        assert self.served is not None
        for report in self.served.dispatcher.pipelines.last_reports(100):
            self._reports[report["epoch"], report["batch"]] = report
        return list(self._reports.values())

    # -- time ---------------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        return self.clock.now_ms()

    def wait(self, is_so: Callable[[], bool], *, watch: bool = True) -> None:
        """Waits until something is so, while the pipeline runs."""
        until = time.monotonic() + WAIT_S
        while not is_so():
            if watch and self.driver is not None and self.bulk is not None and self.served is not None:
                self.driver.watch()
            if self.process is not None:
                assert self.process.poll() is None, self._process_log.read_text()
            assert time.monotonic() < until, f"waited in vain; {self._where()}"
            time.sleep(_PAUSE_S)

    def _where(self) -> str:
        far = self.far
        return f"now {self.now}, horizon {far.horizon_at_ms}, taken {far.taken} of {far.length}, epoch {far.epoch}"

    @property
    def horizon_wanted(self) -> int:
        return horizon_of(self.now, int(self.broker.settings.lead_ms))

    def follow(self) -> None:
        """Waits until the horizon is where it should be, and a batch that came as far is over: it takes far rows in
        after it has moved the horizon.
        """
        if self.driver is None and self.process is None:
            return
        self.wait(lambda: self.far.horizon_at_ms >= self.horizon_wanted)
        self.wait(lambda: any(report["horizon"] >= self.horizon_wanted for report in self.reports()))
        if self.driver is not None:
            self.rest()

    def rest(self) -> None:
        """Waits until no batch runs."""
        with self.running._batch:
            pass

    @contextmanager
    def lagging(self) -> Iterator[None]:
        """The pipeline hangs between two batches."""
        with self.running._batch:
            yield

    def move(self, to: int) -> None:
        """Time passes, the pipeline is not waited for."""
        served = self.served
        assert served is not None
        served.settle()
        while self.now < to:
            at = min(max(self.broker.wake_at_ms, self.now), to)
            served.pass_ms(at - self.now)
            served.settle()

    def pass_ms(self, span_ms: int) -> None:
        self.move(self.now + span_ms)
        self.follow()

    def travel(self, to: int) -> None:
        """Time passes and the pipeline follows: it sees every minute that something is due in, and the one before."""
        while (self.driver or self.process) and (due := self._next_due(to)) is not None:
            minute = -(-due // MINUTE_MS) * MINUTE_MS
            for step in (minute - 3 * MINUTE_MS + 1, minute - 2 * MINUTE_MS + 1):
                if self.now < step <= to:
                    self.move(step)
                    self.follow()
            self.follow()
        self.move(max(to, self.now))
        self.follow()

    def _next_due(self, to: int) -> int | None:
        """What is due next behind the horizon, of what will have been promoted by an instant."""
        low, high = max(self.far.horizon_at_ms, self.now), horizon_of(to, int(self.broker.settings.lead_ms))
        return min((sent.due for sent in self.sent if low < sent.due <= high), default=None)

    def finish(self) -> None:
        """Travels until everything is due, and so far behind it that the table is left empty."""
        self.travel(max([self.now, *(sent.due for sent in self.sent)]) + 3 * MINUTE_MS)

    # -- messages -----------------------------------------------------------------------------------------------

    def make_topic(self, name: str, queue_count: int) -> None:
        served = self.served
        assert served is not None
        served.call(
            lambda: served.broker.put_topic(name, self.now, read_queue_count=queue_count, write_queue_count=queue_count)
        )

    def send(
        self, *dues: int, topic: str = TOPIC, queue_id: int | None = None, key: str = "", unique: str = "",
        body: str = "", **properties: str,
    ) -> list[Sent]:  # fmt: skip
        """Sends a message for each due as one batch. `properties` take the place of TIMER_DELIVER_MS, if there are
        any. A body that is given was sent before: it is a producer's second try.
        """
        served = self.served
        assert served is not None
        found: list[Sent] = []
        for due in dues:
            number = len(self.sent) + len(found)
            where = number % 4 if queue_id is None else queue_id
            found.append(Sent(body or f"m{number:06d}", topic, where, due, unique or f"U{number:06d}", key))
        messages = [_message(sent, properties) for sent in found]

        def write() -> None:
            served.broker.send(messages, self.now)
            served.broker.log.flush()
            served.dispatcher.pulse._settle()

        served.call(write)
        self.sent += found
        return found

    def cancel(self, sent: Sent, *, by: str = "unique") -> str:
        """Cancels over the wire; returns the outcome, and holds the broker to it."""
        assert self.served is not None
        asked: dict[str, Any] = {"topic": sent.topic}
        if by == "unique":
            asked["recallHandle"] = recall_handle(sent.topic, "postdate", sent.due, sent.unique)
        else:
            asked |= {"key": sent.key, "due": sent.due}
        peer = Peer(self.served.port)
        try:
            outcome = str(peer.ask(Request.RECALL_MESSAGE, producerGroup="p", **asked).fields["outcome"])
        finally:
            peer.close()
        alike = sent.unique if by == "unique" else sent.key
        meant = {
            each.body
            for each in self.sent
            if (each.topic, each.due, each.unique if by == "unique" else each.key) == (sent.topic, sent.due, alike)
        }
        if outcome == "cancelled":
            self.never |= meant
        elif outcome == "unknown":
            self.maybe |= meant
        return outcome

    def shown(self, topic: str = TOPIC) -> dict[int, list[Shown]]:
        """What is visible, by queue."""
        served = self.served
        assert served is not None

        def read() -> dict[int, list[Shown]]:
            if topic not in served.broker.fold.topics.by_name:
                return {}
            count = len(served.broker.fold.topics.get(topic).numbers)
            return {queue_id: list(self._queue(topic, queue_id)) for queue_id in range(count)}

        return served.call(read)

    def _queue(self, topic: str, queue_id: int) -> Iterator[Shown]:
        from postdate.storage import record as records

        at, end = self.broker.offsets(topic, queue_id)
        while at < end:
            pulled = self.broker.pull(topic, queue_id, at, count_max=1)
            for record in pulled.records:
                yield Shown(records.decode(record).body.decode(), self.broker.view.visible_at_ms(topic, queue_id, at))
            at = pulled.next_offset

    # -- the judge ----------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Every message exactly once in its queue, none early, none lost, cancelled ones never, in order, on time."""
        everything = {topic: self.shown(topic) for topic in {sent.topic for sent in self.sent}}
        counts = Counter(each.body for queues in everything.values() for queue in queues.values() for each in queue)
        wanted = Counter(sent.body for sent in self.sent if sent.due <= self.now and sent.body not in self.never)
        wanted = Counter({body: n for body, n in wanted.items() if counts[body] or body not in self.maybe})
        assert counts == wanted, f"lost or not due: {_some(wanted - counts)}; too many: {_some(counts - wanted)}"
        for topic, queues in everything.items():
            for queue_id, queue in queues.items():
                self._judge_queue(topic, queue_id, queue)
        rescued = self.rescued_before + self.broker.rescuer.rescued_count
        assert self.may_rescue or rescued == 0, f"{rescued} were rescued"

    def _judge_queue(self, topic: str, queue_id: int, queue: list[Shown]) -> None:
        known = {sent.body: (number, sent) for number, sent in enumerate(self.sent) if sent.topic == topic}
        topics = self.broker.fold.topics
        numbers, in_time = topics.get(topic).numbers, []
        for each in queue:
            number, sent = known[each.body]
            assert topics.target[numbers[sent.queue_id]] == numbers[queue_id], f"{sent} is in queue {queue_id}"
            assert each.visible_at >= sent.due, f"{sent} is early: {each.visible_at}"
            assert not self.is_exact or each.visible_at == sent.due, f"{sent} is late: {each.visible_at}"
            if each.visible_at == sent.due:
                in_time.append((sent.due, number))
        assert in_time == sorted(in_time), f"queue {queue_id} of {topic} is not in order"

    def close(self) -> None:
        """Ends every part that runs."""
        for driver in self._drivers:
            driver.stop()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.bulk is not None:
            self.kill_bulk()
        if self.served is not None:
            self.served.stop()
            self.served = None


def _message(sent: Sent, properties: dict[str, str]) -> Message:
    named = properties or {"TIMER_DELIVER_MS": str(sent.due)}
    named = {"UNIQ_KEY": sent.unique, **({"KEYS": sent.key} if sent.key else {}), **named}
    return Message(sent.topic, sent.body.encode(), encode_properties(named), queue_id=sent.queue_id)


def _some(counts: Counter[str]) -> list[str]:
    return sorted(counts)[:10] + ([f"and {len(counts) - 10} more"] if len(counts) > 10 else [])


@contextmanager
def piping(
    folder: Path, spark: Any, *, settings: dict[str, Any] | None = None, now_ms: int = NOW, **options: Any
) -> Iterator[Piped]:
    """A broker with a pipeline that is not started yet, on a new folder or on what is there. Judged at the end, and the
    folder is checked.
    """
    piped = Piped(folder, spark, options, settings or {}, now_ms)
    try:
        yield piped
        piped.judge()
    finally:
        piped.close()
    report = check_folder(RealDisk(piped.data))
    assert report.ok, report.findings


def copied(source: Path, target: Path) -> None:
    """A folder, as it is now, in another place; what was there is gone."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)

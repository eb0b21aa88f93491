"""Measures the pipeline: python -m benchmarks.pipeline [--quick] [--json FILE] [--folder DIR] ...

One story on one machine, in real time, everything synced: a folder with 10 million far messages (and a million more
that are due in one minute), `postdate up` with its embedded Spark on all cores, and this process, which sends, consumes
and looks on. Bodies have 200 bytes, messages a UNIQ_KEY, KEYS and TAGS. It takes about 11 minutes.
"""

import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import postdate
from benchmarks import bench as common
from benchmarks import load, server
from benchmarks.bench import say
from benchmarks.process import Running, cpu_s, shared_mb, tree
from benchmarks.report import Figure
from postdate.broker.broker import Broker
from postdate.config import Settings
from postdate.message import Message
from postdate.process import let_others_go_first
from postdate.storage.disk import RealDisk
from postdate.wire.requests import Request

FAR_COUNT, BURST_COUNT, SMALL_COUNT = 10_000_000, 1_000_000, 5_000
SOON_COUNT, SOON_DELAY_S = 2_000, 90
NEAR_COUNT, NEAR_SPAN_MS, WINDOWS = 16_000, 16_000, 4
BATCH = 1_000
MINUTE_MS, DAY_MS = 60_000, 86_400_000
BURST_AFTER_MS = 7 * MINUTE_MS  # from the end of the filling: time to start, to take in everything and to idle
IDLE_S = 120
RESTARTS = 3
WAIT_S = 900.0
WITHOUT = ("--pipeline", "none", "--bulk-port", "-1")
WITH = ("--pipeline", "embedded", "--bulk-port", "0")


# -- the folder -------------------------------------------------------------------------------------------------


def fill(folder: Path, far_count: int, burst_count: int) -> int:
    """Far messages due in one hour to 30 days, then a burst; returns from when on, for a minute, it is due."""
    broker = Broker(RealDisk(folder), Settings())
    broker.put_topic(server.TOPIC, server.now_ms(), read_queue_count=8, write_queue_count=8)
    broker.start_keeper()
    dice = random.Random(7)
    bodies = [dice.randbytes(100).hex().encode() for _ in range(997)]
    started_ms = server.now_ms()
    _send(broker, bodies, (started_ms + dice.randrange(DAY_MS // 24, 30 * DAY_MS) for _ in range(far_count)))
    burst_ms = (server.now_ms() + BURST_AFTER_MS) // MINUTE_MS * MINUTE_MS + 1
    _send(broker, bodies, (burst_ms + dice.randrange(MINUTE_MS) for _ in range(burst_count)))
    broker.close()
    return burst_ms


def _send(broker: Broker, bodies: Sequence[bytes], dues: Iterator[int]) -> None:
    properties = b"UNIQ_KEY\x017F0000010BDD%020X\x02KEYS\x01order-%09d\x02TAGS\x01red\x02TIMER_DELIVER_MS\x01%d\x02"
    number = broker.fold.far.length
    while True:
        messages = []
        for due_at_ms in dues:
            text = properties % (number, number, due_at_ms)
            messages.append(Message(server.TOPIC, bodies[number % len(bodies)], text, number % 8))
            number += 1
            if len(messages) == BATCH:
                break
        if not messages:
            return
        broker.send(messages, server.now_ms())
        if number // BATCH % load.FLUSH_EVERY == 0:
            broker.flush()


# -- looking on -------------------------------------------------------------------------------------------------


class Watched(Running):
    """A running `postdate up`, with what its status says and what its processes take."""

    def status(self) -> dict[str, Any]:
        with server.Peer(self.broker_address) as peer:
            found: dict[str, Any] = orjson.loads(peer.ask(Request.GET_STATUS, {}).body)
        return found

    def until(self, is_so: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        say(f"  until {what}")
        deadline = time.monotonic() + WAIT_S
        while not is_so(status := self.status()):
            assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:.0f} s"
            time.sleep(0.2)
        return status

    def cpu_s_of_all(self) -> dict[int, float]:
        """By process. One that has just ended is left out."""
        found = {}
        for pid in tree(self.pid):
            with suppress(OSError):
                found[pid] = cpu_s(pid)
        return found


def spark_mb(pid: int) -> float:
    """The JVM and all Python processes of the pipeline. Of a page that forked workers share each has its part."""
    return sum(shared_mb(pid) for pid in tree(pid) if _is_of_spark(pid))


def watch_memory(pid: int, ending: Any, peak: Any) -> None:
    """Notes the most that Spark has had. In a process of its own, that lets others go first: it takes a while."""
    let_others_go_first(19)
    while not ending.wait(1.0):
        peak.value = max(peak.value, spark_mb(pid))


def _is_of_spark(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False
    return "java" in command[0] or "pipeline" in command or any("pyspark" in word for word in command)


@contextmanager
def watched(folder: Path, flags: Sequence[str]) -> Iterator[Watched]:
    running = Watched(folder, flags)
    try:
        yield running
    finally:
        running.stop()


class Reports:
    """Gathers the reports of all batches, and the most memory, while a block runs."""

    def __init__(self, running: Watched) -> None:
        self._running = running
        self._found: dict[tuple[int, int], dict[str, Any]] = {}
        self.is_paused = False
        context = multiprocessing.get_context("spawn")
        self._ending = context.Event()
        self._peak = context.Value("d", 0.0)
        self._memory = context.Process(target=watch_memory, args=(running.pid, self._ending, self._peak))
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Reports":
        self._memory.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._memory.join()

    @property
    def peak_mb(self) -> float:
        return float(self._peak.value)

    def _look(self) -> None:
        while not self._ending.wait(0.5):
            if not self.is_paused:
                for report in self._running.status()["reports"]:
                    self._found[report["epoch"], report["batch"]] = report

    def all(self) -> list[dict[str, Any]]:
        return [self._found[key] for key in sorted(self._found)]


# -- the measures -----------------------------------------------------------------------------------------------


class Soon:
    """Messages with a delay of 90 s, sent behind the backlog: how late each is in the hand of a consumer."""

    TOPIC = "soon"

    def __init__(self, running: Watched, count: int) -> None:
        self._client = postdate.connect(running.route_address)
        self._count = count
        self.late_ms: list[float] = []
        for _ in range(count):
            due_at = datetime.now(UTC) + timedelta(seconds=SOON_DELAY_S)
            self._client.send(self.TOPIC, f"{due_at.timestamp() * 1_000:.0f}".ljust(200), at=due_at)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        for message in self._client.consume(self.TOPIC, group="soon"):
            received_ms = time.time_ns() / 1e6
            self.late_ms.append(received_ms - int(message.body))
            if len(self.late_ms) == self._count:
                return

    def wait(self) -> list[float]:
        self._thread.join(WAIT_S)
        self._client.close()
        assert len(self.late_ms) == self._count, f"{len(self.late_ms)} of {self._count} came"
        return self.late_ms


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _sustained(name: str, reports: "Reports", goal: int) -> Figure:
    big = [report for report in reports.all() if report["rows_in"] >= 100_000]
    span_s = (big[-1]["at_ms"] - big[0]["at_ms"]) / 1_000 + big[-1]["total_s"]
    return Figure(
        name, "msg/s", [sum(report["rows_in"] for report in big) / span_s], goal or None,
        floor=f"{len(big)} batches in {span_s:.1f} s, the first of a fresh JVM among them",
    )  # fmt: skip


def _filled(folder: Path, far_count: int, burst_count: int) -> int:
    (folder / "data").mkdir()
    burst_ms: int = load.in_process(fill, folder / "data", far_count, burst_count)
    os.sync()
    return burst_ms


def start_s(folder: Path) -> float:
    """How long a start takes until it serves, pipeline and bulk apart."""
    spans = []
    for _ in range(RESTARTS):
        began = time.perf_counter()
        with watched(folder, WITHOUT):
            spans.append(time.perf_counter() - began)
    return statistics.median(spans)


class Story(common.Bench):
    """All figures come from one run."""

    def figures(self) -> list[Figure]:
        """Folders stay until the end: a disk that removes gigabytes is busy with that."""
        far_count, burst_count = self.scaled(FAR_COUNT), self.scaled(BURST_COUNT)
        with self.folder() as empty, self.folder() as alone, self.folder() as full:
            say("a broker with nothing that waits")
            os.sync()  # what was done before is not its matter
            with watched(empty, WITHOUT) as running:
                late_without = self._late(running)
                resident_mb = running.resident_mb
            empty_start_s = start_s(empty)
            say("filling: a backlog that is taken in with nothing beside it")
            _filled(alone, far_count, 0)
            with watched(alone, WITH) as running:
                found = [self._taken_in(running, far_count)]
            say("filling: one that is taken in while near messages come and go")
            burst_ms = _filled(full, far_count, burst_count)
            with watched(full, WITHOUT) as running:
                late_without += self._late(running)
            with watched(full, WITH) as running:
                found += self._carried(running, far_count + burst_count, burst_ms, late_without, resident_mb)
            found.append(
                Figure("restart with all of it waiting, beside one with nothing", "x", [start_s(full) / empty_start_s],
                       1.5, at_most=True, floor=f"nothing: {empty_start_s:.2f} s")
            )  # fmt: skip
        return found

    def _late(self, running: Watched) -> list[float]:
        """The p99 of each of a few windows: one hiccup of the disk is in one of them."""
        count, span_ms = self.scaled(NEAR_COUNT) // WINDOWS, self.scaled(NEAR_SPAN_MS) // WINDOWS
        late_ms = server.late_ms_of(running, count * WINDOWS, span_ms * WINDOWS)
        return [p99(late_ms[start : start + count]) for start in range(0, count * WINDOWS, count)]

    def _taken_in(self, running: Watched, count: int) -> Figure:
        with Reports(running) as reports:
            running.until(lambda status: status["far"]["taken"] >= count, "all is in the table")
            time.sleep(1)
        return _sustained("log to table, sustained", reports, 500_000)

    def _carried(
        self, running: Watched, count: int, burst_ms: int, late_without: list[float], resident_mb: float
    ) -> list[Figure]:
        soon = Soon(running, self.scaled(SOON_COUNT))
        with Reports(running) as reports:
            running.until(lambda status: status["far"]["taken"] > 0, "the first batch is staged")
            late_with = self._late(running)
            running.until(lambda status: status["far"]["taken"] >= count, "all is in the table")
            soon_late = p99(soon.wait())
            reports.is_paused = True  # looking on costs, too
            idle = self._idle(running, resident_mb)
            reports.is_paused = False
            running.until(lambda status: status["far"]["horizon"] > burst_ms, "the burst is promoted")
            with server.Peer(running.broker_address) as peer:
                server.sent(peer, [server.now_ms() + DAY_MS] * self.scaled(SMALL_COUNT))
            taken = running.status()["far"]["length"]
            rescued = running.until(lambda status: status["far"]["taken"] >= taken, "5,000 more are")["far"]["rescued"]
            time.sleep(2)
        return self._told(reports, late_without, late_with, soon_late, rescued) + idle

    def _told(
        self, reports: Reports, late_without: list[float], late_with: list[float], soon_late: float, rescued: int
    ) -> list[Figure]:
        batches = reports.all()
        for report in batches:
            say(f"  {report}")
        without_ms, with_ms = statistics.median(late_without), statistics.median(late_with)
        burst = max(batches, key=lambda report: int(report["promoted"]))
        small = [report["total_s"] for report in batches if report["rows_in"] == self.scaled(SMALL_COUNT)]
        return [
            _sustained("the same while near messages come and go", reports, 0),
            Figure("promotion, table to staged chunks", "msg/s",
                   [burst["promoted"] / (burst["promote_s"] + burst["stage_s"])], 500_000,
                   floor=f"{burst['promoted']:,} rows in {burst['promote_s']} s, staged in {burst['stage_s']} s"),
            Figure("a batch of 5,000 rows", "s", small, 0.5, at_most=True),
            Figure("p99 lateness of near messages while it is taken in, beside without", "x",
                   [with_ms / without_ms], 2.0, at_most=True,
                   floor=f"{with_ms:.2f} ({_listed(late_with)}) and {without_ms:.2f} ({_listed(late_without)}) ms"),
            Figure("p99 lateness of messages with a delay of 90 s behind the backlog", "ms", [soon_late], 20.0,
                   at_most=True, floor=f"{rescued:,} of them rescued"),
            Figure("memory of JVM and Python workers at full load", "MB", [reports.peak_mb], 3_000, at_most=True),
        ]  # fmt: skip

    def _idle(self, running: Watched, resident_mb: float) -> list[Figure]:
        span_s = self.scaled(IDLE_S) if self.scale == 1 else MINUTE_MS / 1_000
        say(f"  idle for {span_s} s")
        began = running.cpu_s_of_all()
        time.sleep(span_s)
        shares = {pid: (s - began.get(pid, 0.0)) / span_s * 100 for pid, s in running.cpu_s_of_all().items()}
        for pid, share in shares.items():
            if share >= 0.05:
                say(f"  {share:.2f} % {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')[:120]}")
        grown = running.resident_mb - resident_mb
        return [
            Figure("idle, all processes together", "% of a core", [sum(shares.values())], 3.0, at_most=True),
            Figure("memory of the broker, beside one with nothing that waits", "MB more", [grown], 10.0, at_most=True,
                   floor=f"{running.resident_mb:.0f} and {resident_mb:.0f} MB"),
        ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return common.run("pipeline", "the Spark pipeline", Story, {"story": Story.figures}, arguments)


if __name__ == "__main__":
    sys.exit(main())

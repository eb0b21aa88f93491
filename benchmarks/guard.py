"""Guards against getting slower: python -m benchmarks.guard [--quick] [--only NAME ...] [--limit 1.15] [--renew]

Measures the CPU that a message costs on its way through a broker, and what a start takes, and compares both with
guard.json. Every round is divided by a calibration loop that runs right before and after it on the same core, so that a
slower or busier machine does not count; only CPU time counts, never the time on the clock. A measure beyond the limit
is taken again, and its better figure counts. Ends with 1 where one stays beyond the limit.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import postdate
from benchmarks import bulk as bulks
from benchmarks import calibration, load, pipeline, report, server
from benchmarks.bench import say
from benchmarks.process import Running, cpu_s, memory_mb
from benchmarks.report import Lines, shown
from benchmarks.server import CHUNK, HOUR_MS, PULL_BATCH, QUEUE_COUNT, TOPIC, WINDOW, Peer, now_ms
from postdate.arrival import NEVER
from postdate.config import Settings
from postdate.process import keep_freed_memory
from postdate.spark.executor import tasks
from postdate.storage import chunk
from postdate.table.files import Window
from postdate.wire import codes
from postdate.wire.frame import decode

BASELINE = Path(__file__).with_suffix(".json")
LIMIT = 1.15
ROUNDS, QUICK_ROUNDS, TRIES = 9, 3, 3
SEND_COUNT = 20_000  # of a round
PULL_COUNT = 40_960
LONG_ANSWER = 512  # fits the bytes of an answer
FIRE_COUNT = 150_000
RECEIVE_COUNT, RECEIVE_DELAY_MS = 50_000, 4_000
TASK_COUNT = 200_000
SPARK_COUNT, SPARK_ROUNDS = 300_000, 3
SETTLE_S = 0.7  # after a start, in which the first segments are zeroed


class Round(NamedTuple):
    """What one round cost, and the CPU seconds of a calibration loop beside it; 1 where no time was measured."""

    cost: float
    loop_s: float


@dataclass(frozen=True)
class Cost:
    """One measure with all its rounds."""

    name: str
    unit: str
    rounds: Sequence[Round]

    @property
    def value(self) -> float:
        """As it was measured here."""
        return low([each.cost for each in self.rounds])

    @property
    def relative(self) -> float:
        """In calibration loops: what may be compared with another hour, or another machine."""
        return self.value / low([each.loop_s for each in self.rounds])


def low(values: Sequence[float]) -> float:
    """The lower quartile. Noise only adds, so that the lower half tells most; the least may have had luck."""
    return sorted(values)[len(values) // 4]


# -- comparing --------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A measure as the baseline has it. Its value is for people, what counts is the relative one."""

    value: float
    unit: str
    relative: float


Baseline = dict[str, Known]


def read_baseline(path: Path) -> Baseline:
    if not path.exists():
        return {}
    return {name: Known(**known) for name, known in json.loads(path.read_text())["measures"].items()}


def renew_baseline(path: Path, costs: Sequence[Cost]) -> None:
    """Replaces what was measured now; measures that were left out stay as they are."""
    known = read_baseline(path) | {cost.name: _as_known(cost) for cost in costs}
    measures = {name: each._asdict() for name, each in known.items()}
    report.write_record(path, {"machine": report.machine(), "measures": measures})


def _as_known(cost: Cost) -> Known:
    return Known(_rounded(cost.value), cost.unit, _rounded(cost.relative))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def ratio(cost: Cost, baseline: Baseline) -> float | None:
    """How much more it costs than the baseline; None where that does not know it."""
    known = baseline.get(cost.name)
    return None if known is None else cost.relative / known.relative


def verdict(found: float | None, limit: float) -> str:
    if found is None:
        return "new"
    if found > limit:
        return "slower"
    return "better" if found < 1 / limit else "ok"


def better(first: Cost, second: Cost) -> Cost:
    return min(first, second, key=lambda cost: cost.relative)


def lines(costs: Sequence[Cost], baseline: Baseline, limit: float) -> Lines:
    """`here` is what this machine took, `now` what the machine of the baseline would take."""
    rows = []
    for cost in costs:
        known, found = baseline.get(cost.name), ratio(cost, baseline)
        rows.append(
            (
                cost.name,
                f"{shown(cost.value)} {cost.unit}",
                f"{shown(found * known.value)} {known.unit}" if known and found else "",
                f"{shown(known.value)} {known.unit}" if known else "",
                f"{found:.2f}" if found else "",
                verdict(found, limit),
            )
        )
    return [("measure", "here", "now", "baseline", "ratio", "verdict"), *rows]


# -- rounds -----------------------------------------------------------------------------------------------------


class Guard(server.Bench):
    """Servers on one core, the load on another; loops of calibration between the rounds, on the server's."""

    def rounds(self, work: Callable[[], float], unit_s: float = 1e-6) -> list[Round]:
        """`work` returns the CPU seconds that it cost. Its first call does not count: buffers and caches have their
        size after it.
        """
        work()
        return self.cold_rounds(work, unit_s, self.repeat)

    def cold_rounds(self, work: Callable[[], float], unit_s: float, count: int) -> list[Round]:
        found: list[Round] = []
        before_s = calibration.loop_s(self.server_core)
        for _ in range(count):
            cost_s = work()
            after_s = calibration.loop_s(self.server_core)
            found.append(Round(cost_s / unit_s, (before_s + after_s) / 2))
            before_s = after_s
        return found

    @contextmanager
    def on_server_core(self) -> Iterator[None]:
        """For what runs in this process, and for what it starts."""
        with self._on({self.server_core}):
            yield

    @contextmanager
    def on_all_cores(self) -> Iterator[None]:
        with self._on({self.server_core, self.client_core}):
            yield

    @contextmanager
    def _on(self, cores: set[int]) -> Iterator[None]:
        os.sched_setaffinity(0, cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, {self.client_core})


def _pump(running: Running, peer: Peer, frames: Sequence[bytes], window: int, chunk: int, messages: int) -> float:
    """CPU seconds of the server for each message."""
    before_s = running.cpu_s
    answers = peer.pump(frames, window, chunk)
    cost_s = (running.cpu_s - before_s) / messages
    assert decode(answers[-1]).code == codes.SUCCESS, decode(answers[-1])
    return cost_s


# -- measures ---------------------------------------------------------------------------------------------------


def send(guard: Guard) -> list[Cost]:
    """Timed sends as the Java client writes them, due within the minute and in an hour."""
    costs = []
    for name, delay_ms in (("near", 50_000), ("far", HOUR_MS)):
        with guard.server("--pipeline", "none") as running, Peer(running.broker_address) as peer:
            server.make_topic(peer)

            def once() -> float:
                due_at_ms = now_ms() + delay_ms  # noqa: B023
                frames = [server.send_frame(number, due_at_ms + number % 5_000) for number in range(SEND_COUNT)]
                return _pump(running, peer, frames, WINDOW, CHUNK, SEND_COUNT)

            costs.append(Cost(f"send, {name}", "us", guard.rounds(once)))
    return costs


def pull(guard: Guard) -> list[Cost]:
    """Everything that is visible, in answers of 32 messages and in the longest ones."""
    costs = []
    with guard.server("--pipeline", "none") as running, Peer(running.broker_address) as peer:
        server.make_topic(peer)
        server.sent(peer, [1] * PULL_COUNT)
        for name, batch, window, passes in (("in 32s", PULL_BATCH, 16, 2), ("in long answers", LONG_ANSWER, 4, 6)):
            frames = passes * [
                server.pull_frame(queue_id, offset, batch)
                for offset in range(0, PULL_COUNT // QUEUE_COUNT, batch)
                for queue_id in range(QUEUE_COUNT)
            ]
            count = passes * PULL_COUNT
            rounds = guard.rounds(lambda: _pump(running, peer, frames, window, window // 4, count))  # noqa: B023
            costs.append(Cost(f"pull, {name}", "us", rounds))
    return costs


def fire(guard: Guard) -> list[Cost]:
    """Messages of one instant in the core: from due to visible and durable."""
    with guard.on_server_core(), guard.folder() as folder:
        broker = load.opened(folder, Settings())
        at_ms = load.START_AT_MS

        def once() -> float:
            nonlocal at_ms
            load.fill(broker, load.burst(FIRE_COUNT), at_ms)
            at_ms += 2 * load.NEAR_MS
            visible = load.visible_count(broker)
            began_s = time.thread_time()
            broker.advance(at_ms - load.NEAR_MS)
            broker.flush()
            cost_s = (time.thread_time() - began_s) / FIRE_COUNT
            fired = load.visible_count(broker) - visible
            assert fired == FIRE_COUNT, f"{fired} of {FIRE_COUNT} messages became visible"
            return cost_s

        try:
            return [Cost("fire", "us", guard.rounds(once))]
        finally:
            broker.abandon()


def receive(guard: Guard) -> list[Cost]:
    """From due to the hand of our client, which waits: what the server and what the client does for it."""
    client_us: list[float] = []
    delay_ms = RECEIVE_DELAY_MS
    with guard.server("--pipeline", "none") as running, Peer(running.broker_address) as peer:
        server.make_topic(peer)
        with postdate.connect(running.route_address) as client:
            messages = client.consume(TOPIC, group="guard")

            def once() -> float:
                nonlocal delay_ms
                while True:
                    due_at_ms = now_ms() + delay_ms
                    server.sent(peer, [due_at_ms] * RECEIVE_COUNT)
                    is_in_time = now_ms() < due_at_ms
                    before_s, client_before_s = running.cpu_s, time.process_time()
                    for _ in range(RECEIVE_COUNT):
                        assert next(messages).body == server.BODY
                    if is_in_time:
                        client_us.append((time.process_time() - client_before_s) / RECEIVE_COUNT * 1e6)
                        return (running.cpu_s - before_s) / RECEIVE_COUNT
                    delay_ms *= 2  # the machine is busy: sending took longer than the delay

            rounds = guard.rounds(once)
    own = [Round(us, each.loop_s) for us, each in zip(client_us[1:], rounds, strict=True)]
    return [Cost("receive, server", "us", rounds), Cost("receive, client", "us", own)]


def table(guard: Guard) -> list[Cost]:
    """What an executor and bulk do for a message: ingest writes far rows to a file of the table, promote makes a chunk
    of them. No message passes through Spark itself, which hands out these tasks.
    """
    keep_freed_memory()  # as an executor's worker does
    with guard.on_server_core(), guard.folder() as folder, bulks.filled(guard, TASK_COUNT) as (running, bulk):
        common: dict[str, Any] = {"bulk": bulk.place, "table": str(folder), "epoch": bulk.register()}
        rows = {"start": 0, "stop": TASK_COUNT, "edge": 0}

        def cost_s(work: Callable[[dict[str, Any]], dict[str, Any]], task: dict[str, Any]) -> float:
            before_s = cpu_s(bulk.pid) + time.process_time()
            work(common | task)
            return (cpu_s(bulk.pid) + time.process_time() - before_s) / TASK_COUNT

        def ingest() -> float:
            _remove_files(folder)
            return cost_s(tasks.ingest, rows)

        def promote() -> float:
            _remove_files(running.data / chunk.FOLDER)
            return cost_s(tasks.promote, window)

        ingest_rounds = guard.rounds(ingest)
        window = {
            "window": list(Window(-1, NEVER)),
            "untaken": [],
            "files": [file.name for file in folder.glob("*.parquet")],
        }
        promote_rounds = guard.rounds(promote)
    return [Cost("ingest", "us", ingest_rounds), Cost("promote", "us", promote_rounds)]


def _remove_files(folder: Path) -> None:
    """Gives their memory back to the system: a file that finds none free costs half as much again."""
    for file in folder.glob("*"):
        file.unlink()


def spark(guard: Guard) -> list[Cost]:
    """The embedded pipeline from its start until a first batch is in the table: Spark, its workers and bulk."""

    def once() -> float:
        with guard.folder() as folder:
            (folder / "data").mkdir()
            load.in_process(pipeline.fill, folder / "data", SPARK_COUNT, 0)
            with pipeline.watched(folder, pipeline.WITH) as running:
                running.until(lambda status: status["far"]["taken"] >= SPARK_COUNT, "all is in the table")
                return sum(spent_s for pid, spent_s in running.cpu_s_of_all().items() if pid != running.pid)

    with guard.on_all_cores():
        rounds = guard.cold_rounds(once, 1.0, min(SPARK_ROUNDS, guard.repeat))
    return [Cost("Spark, start and first batch", "s", rounds)]


def start(guard: Guard) -> list[Cost]:
    """CPU until a broker on a new folder listens and has zeroed its first segments; its memory then."""
    resident_mb, own_mb = [], []

    def once() -> float:
        with guard.server("--pipeline", "none") as running:
            time.sleep(SETTLE_S)
            resident_mb.append(running.resident_mb)
            own_mb.append(memory_mb(running.pid, "RssAnon"))
            return running.cpu_s

    rounds = guard.rounds(once, unit_s=1e-3)
    return [
        Cost("start", "ms", rounds),
        Cost("memory after start, RSS", "MB", [Round(mb, 1.0) for mb in resident_mb]),
        Cost("memory after start, its own", "MB", [Round(mb, 1.0) for mb in own_mb]),
    ]


MEASURES: dict[str, Callable[[Guard], list[Cost]]] = {
    "send": send,
    "pull": pull,
    "fire": fire,
    "receive": receive,
    "start": start,
    "table": table,
    "spark": spark,
}


# -- the command ------------------------------------------------------------------------------------------------


def measured(guard: Guard, names: Sequence[str], baseline: Baseline, limit: float) -> list[Cost]:
    """All costs of some measures. What seems slower is measured again, a few times at most: noise only adds."""
    found: list[Cost] = []
    for name in names:
        say(f"{name} ...")
        costs = MEASURES[name](guard)
        for _ in range(TRIES - 1):
            if all(verdict(ratio(cost, baseline), limit) != "slower" for cost in costs):
                break
            say(f"  {name} once more")
            costs = [better(*pair) for pair in zip(costs, MEASURES[name](guard), strict=True)]
        found += costs
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of each instead of {ROUNDS}")
    parser.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME", help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="X", help="the largest ratio that passes")
    parser.add_argument("--renew", action="store_true", help="make what is measured now the baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="default guard.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round and the machine there")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for temporary data; default the system's")
    options = parser.parse_args(arguments)
    guard = Guard(options.folder or Path(tempfile.gettempdir()), QUICK_ROUNDS if options.quick else ROUNDS, 1.0)
    baseline = {} if options.renew else read_baseline(options.baseline)
    costs = measured(guard, options.only or list(MEASURES), baseline, options.limit)
    if options.renew:
        renew_baseline(options.baseline, costs)
        baseline = read_baseline(options.baseline)
    print(report.aligned(lines(costs, baseline, options.limit)))
    print(report.machine())
    if options.json:
        rounds = {cost.name: [each._asdict() for each in cost.rounds] for cost in costs}
        report.write_record(options.json, {"machine": report.machine(), "rounds": rounds})
    return int(any(verdict(ratio(cost, baseline), options.limit) == "slower" for cost in costs))


if __name__ == "__main__":
    sys.exit(main())

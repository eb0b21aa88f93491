"""Measures the core: python -m benchmarks.core [--quick] [--only NAME ...] [--json FILE] [--repeat N] [--folder DIR]

One process, no server: the calls a server makes, with the clock moved by hand. Data folders are temporary and always
removed; the largest needs about 5 GB (1 GB with --quick). Every figure is the median of its repeats.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import bench as common
from benchmarks import load
from benchmarks.load import START_AT_MS, TOPIC
from benchmarks.report import Figure, shown
from postdate.broker.broker import Broker
from postdate.config import MIB, Settings
from postdate.contract import Stage
from postdate.message import LOOPBACK, Message
from postdate.storage import chunk
from postdate.storage import record as records
from postdate.storage.layout import CHUNK_ROW

BATCH = 100
GROUP = 256  # appends that wait for one flush
CHUNK_ROWS = 250_000
PULL_BATCH = 32
ASYNC_FLUSH_S = 0.2
DUE_AT_MS = START_AT_MS + load.NEAR_MS


class Bench(common.Bench):
    """Measures on brokers in this process, and remembers the largest folder."""

    def __init__(self, parent: Path, repeat: int, scale: float) -> None:
        super().__init__(parent, repeat, scale)
        self.disk_bytes_max = 0

    @contextmanager
    def folder(self) -> Iterator[Path]:
        with super().folder() as path:
            yield path
            self.disk_bytes_max = max(self.disk_bytes_max, _folder_bytes(path))

    def about(self) -> dict[str, Any]:
        return {"disk_bytes_max": self.disk_bytes_max}

    @contextmanager
    def broker(self, flush: str = "sync") -> Iterator[Broker]:
        with self.folder() as path:
            broker = load.opened(path, Settings(flush=flush))
            try:
                yield broker
            finally:
                broker.abandon()


def _folder_bytes(path: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


# -- 1 and 2: appending -----------------------------------------------------------------------------------------


def append(bench: Bench) -> list[Figure]:
    return [
        _append(bench, 1, bench.scaled(300_000), 60_000),
        _append(bench, BATCH, bench.scaled(600_000), 150_000),
    ]


def _append(bench: Bench, batch_size: int, count: int, goal: float) -> Figure:
    batches = _batches(count, batch_size)
    rates = []
    for _ in bench.repeats(f"append, batches of {batch_size}"):
        with bench.broker("async") as broker, _flushing(broker):
            rates.append(count / seconds(lambda: _send_all(broker, batches)))
            batch_bytes = broker.log.end * batch_size // count
    floor = f"bare pwrite {_pwrite_rate(bench, batch_bytes) * batch_size:,.0f}/s, "
    floor += f"memcpy {_memcpy_rate(batch_bytes) * batch_size:,.0f}/s"
    return Figure(f"append async, batches of {batch_size}", "msg/s", rates, goal, floor=floor)


def _batches(count: int, batch_size: int) -> list[list[Message]]:
    """All messages, made before the clock runs; due in 5 to 55 s, so that none fires meanwhile."""
    messages = [load.message(number, 5_000 + number % 50_000) for number in range(count)]
    batches = [messages[start : start + batch_size] for start in range(0, count, batch_size)]
    gc.collect()
    gc.freeze()  # no server holds so many: walking over them again and again would be measured as its work
    return batches


def _send_all(broker: Broker, batches: Sequence[list[Message]]) -> None:
    send = broker.send
    for number, batch in enumerate(batches):
        send(batch, START_AT_MS + (number >> 6))


@contextmanager
def _flushing(broker: Broker) -> Iterator[None]:
    """Flushes on another thread now and then, as a server does in mode async."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(ASYNC_FLUSH_S):
            broker.log.flush()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def sync_append(bench: Bench) -> list[Figure]:
    return [
        *_sync_append(bench, 1, GROUP * bench.scaled(1_000)),
        *_sync_append(bench, BATCH, GROUP * BATCH * bench.scaled(20)),
    ]


def _sync_append(bench: Bench, batch_size: int, count: int) -> list[Figure]:
    batches = _batches(count, batch_size)
    rates, ratios, shares, syncs = [], [], [], []
    for _ in bench.repeats(f"group commit, batches of {batch_size}"):
        with bench.broker("async") as broker, _flushing(broker):
            free = count / seconds(lambda: _send_all(broker, batches))
        with bench.broker("sync") as broker:
            rates.append(count / seconds(lambda: _send_groups(broker, batches)))
            group_bytes = broker.log.end * batch_size * GROUP // count
        ratios.append(rates[-1] / free)
        group = GROUP * batch_size
        syncs.append(_sync_rate(bench, group_bytes))
        shares.append(rates[-1] / (group / (group / free + 1 / syncs[-1])))
    name = f"append sync, {GROUP} batches of {batch_size} a flush"
    small = _sync_rate(bench, 512)
    bound = f"fdatasync of 512 bytes {small:,.0f}/s, of a group ({shown(group_bytes / MIB)} MiB) {shown(min(syncs))}"
    bound += f" - {shown(max(syncs))}/s"
    return [
        Figure(name, "msg/s", rates, None, floor=bound),
        Figure("  of the async rate", "x", ratios, 0.8, floor="the flush does not run beside the appends here"),
        Figure(
            "  of async appends plus the disk's own sync", "x", shares, 0.8, floor="bounded by the disk where short"
        ),
    ]


def _send_groups(broker: Broker, batches: Sequence[list[Message]]) -> None:
    for start in range(0, len(batches), GROUP):
        for batch in batches[start : start + GROUP]:
            broker.send(batch, START_AT_MS + (start >> 6))
        broker.flush()


# -- floors -----------------------------------------------------------------------------------------------------


@contextmanager
def _zeroed_file(bench: Bench) -> Iterator[tuple[int, int]]:
    """A descriptor of a zeroed, synced file and its size."""
    size = 64 * MIB
    with bench.folder() as folder:
        descriptor = os.open(folder / "floor", os.O_RDWR | os.O_CREAT)
        try:
            os.pwrite(descriptor, bytes(size), 0)
            os.fsync(descriptor)
            yield descriptor, size
        finally:
            os.close(descriptor)


def _pwrite_rate(bench: Bench, write_bytes: int) -> float:
    with _zeroed_file(bench) as (descriptor, size):
        data = bytes(range(256)) * (write_bytes // 256 + 1)
        positions = range(0, size - write_bytes, write_bytes)
        return len(positions) / seconds(lambda: [os.pwrite(descriptor, data[:write_bytes], at) for at in positions])


def _memcpy_rate(copy_bytes: int) -> float:
    source, target = bytes(copy_bytes), bytearray(64 * MIB)
    positions = range(0, len(target) - copy_bytes, copy_bytes)

    def copy() -> None:
        for at in positions:
            target[at : at + copy_bytes] = source

    return len(positions) / seconds(copy)


def _sync_rate(bench: Bench, write_bytes: int) -> float:
    """How often a second the disk takes so many new bytes for good."""
    with _zeroed_file(bench) as (descriptor, size):
        data, count = b"x" * write_bytes, max(5, min(200, size // write_bytes - 1))

        def write() -> None:
            for number in range(count):
                os.pwrite(descriptor, data, number * write_bytes % (size - write_bytes))
                os.fdatasync(descriptor)

        return count / seconds(write)


# -- 3 and 4: firing --------------------------------------------------------------------------------------------


def fire_singles(bench: Bench) -> list[Figure]:
    count = bench.scaled(1_000_000)
    spans = []
    with bench.broker() as broker:
        for number in bench.repeats("fire singles"):
            at_ms = START_AT_MS + number * 2 * load.NEAR_MS
            load.fill(broker, load.burst(count), at_ms)
            spans.append(_fired_seconds(broker, at_ms + load.NEAR_MS, count))
    entries = np.zeros(count, "V20")
    floor = f"sorting {count:,} queue numbers and copying the entries {_sort_seconds(entries):.3f} s"
    return [Figure(f"fire {count:,} singles of one instant", "s", spans, 0.2 * bench.scale, at_most=True, floor=floor)]


def _fired_seconds(broker: Broker, at_ms: int, count: int) -> float:
    """From the due instant until everything is visible and durable."""
    before = load.visible_count(broker)
    assert broker.fold.wheel.next_due_at_ms == at_ms, "all are due at this instant"
    started = time.perf_counter()
    broker.advance(at_ms)
    broker.flush()
    spent = time.perf_counter() - started
    shown_count = load.visible_count(broker) - before
    assert shown_count == count, f"{shown_count} of {count} messages became visible"
    return spent


def _sort_seconds(entries: np.ndarray) -> float:
    queues = np.random.default_rng(1).integers(0, load.QUEUE_COUNT, len(entries)).astype(np.uint16)
    return seconds(lambda: entries[np.argsort(queues, kind="stable")])


def fire_staged(bench: Bench) -> list[Figure]:
    chunk_count = bench.scaled(40)
    count = chunk_count * CHUNK_ROWS
    spans, stages = [], []
    with bench.broker() as broker:
        ticket = broker.register_pipeline(START_AT_MS)
        broker.flush()
        for number in bench.repeats("fire staged"):
            at_ms = DUE_AT_MS + number * load.NEAR_MS
            names = [_write_chunk(broker, f"{number}-{part}", part, at_ms) for part in range(chunk_count)]
            horizon = broker.fold.far.horizon_at_ms, at_ms
            stage = Stage(ticket.answer, (0, 0), horizon, tuple(names), 0, 0)
            stages.append(seconds(lambda: broker.stage(stage, START_AT_MS)))  # noqa: B023
            spans.append(_fired_seconds(broker, at_ms, count))
    floor = f"staging took {shown(min(stages))} - {shown(max(stages))} s; one shared record a chunk"
    goal = 1.0 * bench.scale
    return [Figure(f"fire {count:,} staged rows of one instant", "s", spans, goal, at_most=True, floor=floor)]


def _write_chunk(broker: Broker, name: str, part: int, due_at_ms: int) -> str:
    """A chunk as Spark cuts a burst, by arrival. All its rows share one record: only the index matters for firing."""
    message = load.message(part, 0)
    record = records.encode(message, TOPIC.encode(), 0, START_AT_MS, LOOPBACK)
    random = np.random.default_rng(part)
    rows = np.zeros(CHUNK_ROWS, CHUNK_ROW)
    rows["due"], rows["size"], rows["flags"] = due_at_ms, len(record), chunk.FLAG_OWN_ARRIVAL
    rows["arrival"] = np.arange(part * CHUNK_ROWS, (part + 1) * CHUNK_ROWS)
    rows["queue"] = random.choice(broker.fold.topics.get(TOPIC).numbers, CHUNK_ROWS)
    rows["unique_hash"] = random.integers(1, 1 << 63, CHUNK_ROWS)
    disk = broker._disk
    chunk.write(disk, name, rows, record)
    return name


# -- 5: memory --------------------------------------------------------------------------------------------------


def memory(bench: Bench) -> list[Figure]:
    count = 1_000_000  # with --quick too: the 60,000 slots are part of the price
    per_near, per_far = [], []
    for _ in bench.repeats("memory"):
        with bench.folder() as folder:
            per_near.append(load.in_process(load.bytes_per_message, folder, load.near(count)))
        with bench.folder() as folder:
            per_far.append(load.in_process(load.bytes_per_message, folder, load.far(count)))
    return [
        Figure("RAM per near message", "bytes", per_near, 72, at_most=True, floor="36 bytes an entry"),
        Figure("RAM per far message", "bytes", per_far, 1, at_most=True, floor="nothing; its row is in a file"),
    ]


# -- 6: recovery ------------------------------------------------------------------------------------------------


def recovery(bench: Bench) -> list[Figure]:
    few, many = bench.scaled(1_000_000), bench.scaled(10_000_000)
    base = [
        load.at_once(bench.scaled(270_000), load.LARGE_BODY),
        load.far(few, load.SMALL_BODY),
        load.near(bench.scaled(1_000_000)),
    ]
    with bench.folder() as folder:
        first, first_floor = _recoveries(bench, folder, base, load.FILL_BATCH, f"{few:,} far")
        rest = [load.far(many - few, load.SMALL_BODY)]
        second, second_floor = _recoveries(bench, folder, rest, load.FILL_BATCH, f"{many:,} far")
        singles, singles_floor = _recoveries(bench, folder, [], 1, "single sends")
    ratio = [b / a for a, b in zip(first, second, strict=True)]
    name = f"recovery, {bench.scaled(1_000_000):,} near"
    bodies = "bodies of 4 KB at once, 1 byte far"
    return [
        Figure(f"{name}, {few:,} far", "s", first, 1.5, at_most=True, floor=f"{first_floor}; {bodies}"),
        Figure(f"{name}, {many:,} far", "s", second, 1.5, at_most=True, floor=second_floor),
        Figure("  ratio", "x", ratio, 1.2, at_most=True),
        Figure(f"{name}, {many:,} far, single sends", "s", singles, 1.5, at_most=True, floor=singles_floor),
    ]


def _recoveries(
    bench: Bench, folder: Path, parts: list[load.Part], tail_batch: int, name: str
) -> tuple[list[float], str]:
    """Fills on, kills, opens as often as repeats are wanted; also says how much there was to read."""
    common.say(f"  recovery, {name}: filling")
    load.killed(load.fill_and_die, folder, parts, tail_batch)
    spans = []
    for _ in bench.repeats(f"recovery, {name}"):
        opening = load.in_process(load.opening, folder)
        assert opening.wheel_count == bench.scaled(1_000_000), f"{opening.wheel_count} messages wait in the wheel"
        spans.append(opening.seconds)
    replayed = f"{opening.replay_bytes / MIB:.0f} MiB in {opening.batch_count:,} batches to replay"
    return spans, f"log of {opening.log_bytes / 1e9:.1f} GB, {replayed}"


# -- 7: snapshots -----------------------------------------------------------------------------------------------


def snapshot(bench: Bench) -> list[Figure]:
    count = bench.scaled(1_000_000)
    longest, late, work, beside, idle = [], [], [], [], []
    for _ in bench.repeats("snapshot"):
        with bench.broker() as broker:
            load.fill(broker, load.at_once(count // 10))
            load.fill(broker, load.near(count))
            steps, ticks = _snapshot_spans(broker)
            quiet = _idle_spans(broker, steps[:, 0].sum() + ticks[:, 0].sum())
        longest.append(float(steps[:, 0].max()))
        late.append(float(np.percentile(steps[:, 0], 99)))
        work.append(float(steps[:, 1].max()))
        beside.append(float(ticks[:, 0].max()))
        idle.append(float(quiet[:, 0].max()))
    noise = f"a loop of 0.2 ms ticks without a snapshot: {shown(min(idle))} - {shown(max(idle))} ms"
    return [
        Figure(f"snapshot of {count:,} near, longest step", "ms", longest, 1.0, at_most=True, floor=noise),
        Figure("  its processor time", "ms", work, 1.0, at_most=True, floor="leaves out waiting for a processor"),
        Figure("  99th percentile", "ms", late, 1.0, at_most=True, floor=f"{len(steps)} steps"),
        Figure("  longest tick beside a blocking step", "ms", beside, None, floor=noise),
    ]


def _snapshot_spans(broker: Broker) -> tuple[np.ndarray, np.ndarray]:
    """How long each step, and each tick while a blocking step runs elsewhere, kept the main thread from firing.

    Each with two columns, in ms: elapsed and processor time.
    """
    spans: list[tuple[float, float]] = []
    ticks: list[tuple[float, float]] = []
    with ThreadPoolExecutor(1) as helper:
        steps = broker.snapshot()
        for step in iter(lambda: _timed(spans, lambda: next(steps, StopIteration)), StopIteration):
            if step is not None:
                blocking = helper.submit(step)
                while not blocking.done():
                    _timed(ticks, lambda: _tick(broker))
                blocking.result()
    return np.array(spans), np.array(ticks)


def _timed(spans: list[tuple[float, float]], function: Callable[[], Any]) -> Any:
    started, worked = time.perf_counter(), time.thread_time()
    answer = function()
    spans.append(((time.perf_counter() - started) * 1_000, (time.thread_time() - worked) * 1_000))
    return answer


def _tick(broker: Broker) -> None:
    """A hundred looks at the clock's question: about 0.2 ms, as a step is meant to take."""
    for _ in range(100):
        broker.advance(START_AT_MS)


def _idle_spans(broker: Broker, total_ms: float) -> np.ndarray:
    """The same loop without a snapshot, for as long: what the machine alone does to it."""
    spans: list[tuple[float, float]] = []
    until = time.perf_counter() + total_ms / 1_000
    while time.perf_counter() < until:
        _timed(spans, lambda: _tick(broker))
    return np.array(spans)


# -- 8: pulling -------------------------------------------------------------------------------------------------


def pull(bench: Bench) -> list[Figure]:
    count = bench.scaled(100_000)
    with bench.broker() as broker:
        for batch in _batches(count, PULL_BATCH):
            broker.send(batch, START_AT_MS)
        broker.flush()
        at_ms = broker.fold.wheel.next_due_at_ms
        while broker.fold.wheel.count:  # in steps, so that the queues have many instants, as a live one has
            broker.advance(at_ms)
            broker.flush()
            at_ms += 10
        rates = [count / seconds(lambda: _pull_all(broker, count)) for _ in bench.repeats("pull")]
        floor = f"bare reads {count / seconds(lambda: _read_all(broker)):,.0f}/s"
    return [Figure(f"pull, batches of {PULL_BATCH}", "msg/s", rates, 300_000, floor=floor)]


def _pull_all(broker: Broker, count: int) -> None:
    found = 0
    for queue_id in range(load.QUEUE_COUNT):
        offset, end = broker.offsets(TOPIC, queue_id)
        while offset < end:
            pulled = broker.pull(TOPIC, queue_id, offset, count_max=PULL_BATCH)
            offset = pulled.next_offset
            found += len(pulled.records)
    assert found == count, f"{found} of {count} messages were pulled"


def _read_all(broker: Broker) -> None:
    for number in broker.fold.topics.get(TOPIC).numbers:
        queue = broker.fold.queues[number]
        for offset, size, _ in queue.entries.read(0, queue.length).tolist():
            broker.fold.read(offset, size)


# -- the command ------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "append": append,
    "sync": sync_append,
    "fire": fire_singles,
    "staged": fire_staged,
    "memory": memory,
    "recovery": recovery,
    "snapshot": snapshot,
    "pull": pull,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every goal was reached, 1 otherwise."""
    return common.run("core", "the core of Postdate", Bench, MEASURES, arguments)


if __name__ == "__main__":
    sys.exit(main())

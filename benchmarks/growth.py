"""Measures how cost grows with what waits: python -m benchmarks.growth [--quick] [--sizes N ...] [--json FILE] ...

A real `postdate up` without a pipeline, bound to one core, on loopback; the load comes from this process, bound to
another. One folder is filled with 10 thousand far messages (due in 1 to 31 days), then 100 thousand, 1 million and 10
million; at each size everything is measured. Bodies have 200 bytes. What 100 million would cost is a projection: a
straight line through what was measured. It needs 8 GB of disk and about 10 minutes; --quick stops at 100 thousand.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks import report, server
from benchmarks.bench import say
from benchmarks.process import Running, memory_mb, shared_mb
from benchmarks.server import HOUR_MS, TOPIC, Peer, make_topic, now_ms, send_frame
from postdate.config import Settings
from postdate.wire import codes
from postdate.wire.frame import Command, decode, encode
from postdate.wire.ids import encode_recall_handle
from postdate.wire.requests import Request

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
QUICK_SIZES = (10_000, 100_000)
PROJECTED, PROJECTED_TIMES_MAX = 100_000_000, 10
DAY_MS = 24 * HOUR_MS
SPAN_MS = 30 * DAY_MS
STRIDE = 2_654_435_761  # neighbours in the log are due on different days
PIECE = 100_000  # frames made at once
PROBE = 50_000  # sends of which the CPU is taken; also what a restart replays
CANCELS, CANCELS_AT_ONCE = 500, 64
ASKS, PENDING_ASKS, RESTARTS = 20, 3, 3
LATE_COUNT, LATE_SPAN_MS, LATE_AFTER_MS = 2_000, 4_000, 5_000
FLAT_SHARE = 0.25  # what changes less than this over all sizes is noise
FLAGS = ("--pipeline", "none")


@dataclass(frozen=True)
class Point:
    """What a broker costs with so many far messages waiting."""

    waiting: int
    send_us: float
    resident_mb: float
    shared_mb: float
    anonymous_mb: float
    disk_mb: float
    restart_s: float
    restart_cpu_s: float
    cancel_us: float
    cancels_per_s: float
    status_ms: float
    pending_ms: float
    late_p50_ms: float
    late_p99_ms: float


# By field of a Point: its name, and whether a straight line says what it will be with more.
ROWS: dict[str, tuple[str, bool]] = {
    "send_us": ("CPU of a timed send, us", True),
    "resident_mb": ("memory (RSS), MB", True),
    "shared_mb": ("memory (PSS), MB", True),
    "anonymous_mb": ("of it not pages of files, MB", True),
    "disk_mb": ("disk, MB", True),
    "restart_s": ("restart after kill -9, s", True),
    "restart_cpu_s": ("CPU of that restart, s", True),
    "cancel_us": ("CPU of a cancel by handle, us", True),
    "cancels_per_s": ("cancels a second", False),
    "status_ms": ("status, ms", True),
    "pending_ms": ("pending by day, ms", True),
    "late_p50_ms": ("lateness of near messages, p50, ms", False),
    "late_p99_ms": ("lateness of near messages, p99, ms", False),
}


# -- what more would cost ---------------------------------------------------------------------------------------


def is_flat(values: Sequence[float]) -> bool:
    """Whether the largest size costs no more than the smallest does, as far as can be told."""
    return values[-1] - values[0] <= FLAT_SHARE * values[-1]


def projected(waiting: Sequence[int], values: Sequence[float], at: int) -> float:
    """The value that a straight line through all points has at another size; their median where they are flat.

    The sizes are ten times one another, so that the line is that of the largest ones: small ones decide where it
    begins.
    """
    if is_flat(values):
        return statistics.median(values)
    start = statistics.mean(values) - per_message(waiting, values) * statistics.mean(waiting)
    return start + per_message(waiting, values) * at


def per_message(waiting: Sequence[int], values: Sequence[float]) -> float:
    """What one more message adds; of one size alone, all of it is put down to what waits."""
    if len(values) == 1:
        return values[0] / waiting[0]
    return float(np.polyfit(np.array(waiting, float), np.array(values, float), 1)[0])


def is_far_enough(points: Sequence[Point]) -> bool:
    """Whether the largest size is large enough to say something about what was not measured."""
    return points[-1].waiting * PROJECTED_TIMES_MAX >= PROJECTED


def lines(points: Sequence[Point]) -> report.Lines:
    """The table: a row for each measure, a column for each size, the projection last, where there can be one."""
    waiting = [point.waiting for point in points]
    heads = ["measure", *(f"{count:,}" for count in waiting), f"{PROJECTED:,} (projected)"]
    table: list[list[str]] = [heads]
    for field, (name, is_linear) in ROWS.items():
        values = [float(getattr(point, field)) for point in points]
        is_known = is_linear and is_far_enough(points)
        more = report.shown(projected(waiting, values, PROJECTED)) if is_known else "-"
        table.append([name, *map(report.shown, values), more])
    return table


def told(points: Sequence[Point]) -> str:
    """What a waiting message adds, in words."""
    waiting = [point.waiting for point in points]
    disk = per_message(waiting, [point.disk_mb for point in points]) * 1e6
    memory = per_message(waiting, [point.anonymous_mb for point in points]) * 1e6
    return f"a waiting message takes {disk:,.0f} bytes of disk and {max(memory, 0):.2f} bytes of memory"


# -- the story --------------------------------------------------------------------------------------------------


class Story:
    """One folder that grows."""

    def __init__(self, folder: Path, cores: tuple[int, int]) -> None:
        self._folder = folder
        self._server_core = cores[0]
        self._due_from_ms = now_ms() + DAY_MS
        self._sent = 0
        self._dice = random.Random(7)
        self._left: list[int] = []  # numbers of messages that nobody has cancelled, in the order of cancelling
        self._empty_bytes = 0

    def points(self, sizes: Sequence[int]) -> list[Point]:
        with self._started() as running, Peer(running.broker_address) as peer:
            make_topic(peer)
            self._await_spares()
            self._empty_bytes = self._folder_bytes()
        return [self._point(size) for size in sizes]

    def _point(self, size: int) -> Point:
        say(f"{size:,} waiting: filling")
        probe = min(PROBE, size // 2)
        with self._started() as running, Peer(running.broker_address) as peer:
            self._send(peer, size - probe)
        say("  measuring")
        running = Running(self._folder, FLAGS, {self._server_core})
        try:
            with Peer(running.broker_address) as peer:
                began_s = running.cpu_s
                self._send(peer, size)
                send_us = (running.cpu_s - began_s) / probe * 1e6
            self._await_spares()
            memory = running.resident_mb, shared_mb(running.pid), memory_mb(running.pid, "RssAnon")
            disk_mb = (self._folder_bytes() - self._empty_bytes) / 1e6
            restarts = []
            for _ in range(RESTARTS):
                running.kill()
                began = time.perf_counter()
                running = Running(self._folder, FLAGS, {self._server_core})
                restarts.append((time.perf_counter() - began, running.cpu_s))
            restart_s, restart_cpu_s = (statistics.median(spans) for spans in zip(*restarts, strict=True))
            with Peer(running.broker_address) as peer:
                cancel_us, cancels_per_s = self._cancels(running, peer, min(CANCELS, size // 20))
                status_ms = _answer_ms(ASKS, lambda: peer.ask(Request.GET_STATUS, {}))
                pending_ms = _answer_ms(PENDING_ASKS, lambda: peer.ask(Request.GET_PENDING, {"unit": "day"}))
            late_ms = server.late_ms_of(running, LATE_COUNT, LATE_SPAN_MS, LATE_AFTER_MS)
        finally:
            running.stop()
        p50, p99 = (float(np.percentile(late_ms, share)) for share in (50, 99))
        return Point(
            size, send_us, *memory, disk_mb, restart_s, restart_cpu_s, cancel_us, cancels_per_s, status_ms, pending_ms,
            p50, p99,
        )  # fmt: skip

    def _started(self) -> "_Stopping":
        return _Stopping(Running(self._folder, FLAGS, {self._server_core}))

    def _due_at_ms(self, number: int) -> int:
        return self._due_from_ms + number * STRIDE % SPAN_MS

    def _send(self, peer: Peer, until: int) -> None:
        """Sends on until so many have been sent in all."""
        while self._sent < until:
            numbers = range(self._sent, min(self._sent + PIECE, until))
            answers = peer.pump(
                [send_frame(number, self._due_at_ms(number)) for number in numbers], server.WINDOW, server.CHUNK
            )
            assert decode(answers[-1]).code == codes.SUCCESS, decode(answers[-1])
            self._sent = numbers.stop

    def _cancels(self, running: Running, peer: Peer, count: int) -> tuple[float, float]:
        """CPU of a cancel and how many a second, by the handles of messages from all over the log."""
        name = Settings().broker_name
        frames = []
        for number in self._chosen(count):
            handle = encode_recall_handle(TOPIC, name, self._due_at_ms(number), f"{number:032X}").decode()
            frames.append(encode(Command(Request.RECALL_MESSAGE, {"topic": TOPIC, "recallHandle": handle})))
        began_s, began = running.cpu_s, time.perf_counter()
        answers = peer.pump(frames, CANCELS_AT_ONCE, CANCELS_AT_ONCE // 4)
        spent_s, span_s = running.cpu_s - began_s, time.perf_counter() - began
        refused = [answer for answer in map(decode, answers) if answer.code != codes.SUCCESS]
        assert not refused, f"{len(refused)} of {count} cancels were refused: {refused[0].remark}"
        return spent_s / count * 1e6, count / span_s

    def _chosen(self, count: int) -> list[int]:
        """Numbers of messages that wait: each is cancelled once."""
        chosen = [number for number in self._dice.sample(range(self._sent), 2 * count) if number not in self._left]
        self._left += chosen[:count]
        return chosen[:count]

    def _await_spares(self) -> None:
        """Until nothing is zeroed ahead any more: two sizes of the folder can then be compared."""
        before = -1
        while before != (before := self._folder_bytes()):
            time.sleep(0.5)

    def _folder_bytes(self) -> int:
        total = 0
        for file in self._folder.rglob("*"):
            with suppress(FileNotFoundError):  # a snapshot that was replaced meanwhile
                total += file.stat().st_blocks * 512 if file.is_file() else 0
        return total


class _Stopping:
    """A server that is stopped, with a snapshot, at the end of a block."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def __enter__(self) -> Running:
        return self._running

    def __exit__(self, *_: object) -> None:
        self._running.stop()


def _answer_ms(count: int, ask: Callable[[], Command]) -> float:
    """The median of the answers, in milliseconds."""
    spans = []
    for _ in range(count):
        began = time.perf_counter()
        answer = ask()
        spans.append((time.perf_counter() - began) * 1_000)
        assert answer.code == codes.SUCCESS, answer
    return statistics.median(spans)


# -- the command ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    bench = server.Bench(options.folder or Path(tempfile.gettempdir()), 1, 1.0)
    with bench.folder() as folder:
        points = Story(folder, (bench.server_core, bench.client_core)).points(sorted(options.sizes))
    print((report.markdown if options.markdown else report.aligned)(lines(points)))
    if is_far_enough(points):
        print(told(points))
    print(report.machine())
    if options.json:
        content = {"machine": report.machine(), "points": [asdict(point) for point in points], "table": lines(points)}
        report.write_record(options.json, content)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description="Measures how the broker's cost grows with what waits."
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="N", help="how many wait, in steps")
    parser.add_argument("--quick", dest="sizes", action="store_const", const=QUICK_SIZES, help="up to 100,000 only")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine there")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for temporary data; default the system's")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

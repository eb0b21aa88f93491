"""Measures the future as a table: python -m benchmarks.future [--quick] [--json FILE] [--folder DIR] ...

One story on one machine, in real time, everything synced: ten million rows go from a Parquet file into the table of a
`postdate up` with its embedded Spark, a million of them due at one instant more; they are counted, a tenth of them is
cancelled, then one by its key and day; meanwhile near messages come and go. Commands are run as a user runs them, each
a process of its own. Bodies have 200 bytes, messages a key and a tag. It takes about six minutes.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import postdate
from benchmarks import bench as common
from benchmarks import server
from benchmarks.bench import say
from benchmarks.pipeline import WAIT_S, Watched, p99, watched
from benchmarks.report import Figure

ROW_COUNT, BURST_COUNT = 10_000_000, 1_000_000
FILE_ROWS = 1_000_000
NEAR_AHEAD_MS, NEAR_STEP_MS, NEAR_WINDOW_MS = 3_000, 100, 4_000
ALONE_S = 24
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
BURST_AFTER_MS = 150_000  # from the moment when its file is written: time for Spark to start and for the pipeline
TOPIC, BURST = "campaign", "burst"


# -- the files --------------------------------------------------------------------------------------------------


def write_file(path: Path, count: int, dues: Callable[[int], np.ndarray]) -> None:
    """Rows with a due, a key, a tag of ten and a body."""
    dice = np.random.default_rng(7)
    bodies = pa.array([dice.bytes(100).hex() for _ in range(997)])
    with pq.ParquetWriter(path, _row_of(bodies, 0, dues(0)[:0]).schema) as writer:
        for start in range(0, count, FILE_ROWS):
            writer.write_table(_row_of(bodies, start, dues(min(FILE_ROWS, count - start))))


def _row_of(bodies: pa.Array, start: int, dues: np.ndarray) -> pa.Table:
    numbers = np.arange(start, start + len(dues))
    return pa.table(
        {
            "send_at": pa.array(dues, pa.timestamp("ms", tz="UTC")),
            "customer": pa.array([f"c-{number:09d}" for number in numbers.tolist()], pa.string()),
            "kind": pa.array([f"t{number % 10}" for number in numbers.tolist()], pa.string()),
            "text": bodies.take(pa.array(numbers % len(bodies))),
        }
    )


# -- commands ---------------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    seconds: float
    told: Any


def run(*words: str) -> Ran:
    """A command as a user would run it, with what it says as JSON."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "postdate", *words, "--json"], capture_output=True, text=True, check=False
    )
    spent = time.perf_counter() - began
    assert done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-2_000:]}"
    return Ran(spent, json.loads(done.stdout))


class Near:
    """A thousand near messages a second, all the while: sent three seconds ahead, received by a blocking client."""

    def __init__(self, running: Watched) -> None:
        self._running = running
        self._ending = threading.Event()
        self._late: list[tuple[int, float]] = []  # due, and how late it was in hand
        self._client = postdate.connect(running.route_address)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]

    def __enter__(self) -> "Near":
        with server.Peer(self._running.broker_address) as peer:
            server.make_topic(peer)
        for thread in self._threads:
            thread.start()
        time.sleep(NEAR_AHEAD_MS / 1_000 + 2)  # until they come
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._threads[0].join()
        self._client.close()
        self._threads[1].join()

    def _send(self) -> None:
        with server.Peer(self._running.broker_address) as peer:
            due_at_ms = server.now_ms() + NEAR_AHEAD_MS
            while not self._ending.is_set():
                server.sent(peer, range(due_at_ms, due_at_ms + NEAR_STEP_MS))
                due_at_ms += NEAR_STEP_MS
                time.sleep(max(due_at_ms - NEAR_AHEAD_MS - server.now_ms(), 0) / 1_000)

    def _receive(self) -> None:
        for message in self._client.consume(server.TOPIC, group="near"):  # until it is closed
            received_at_ms, due_at_ms = time.time_ns() / 1e6, int(message.properties["TIMER_DELIVER_MS"])
            self._late.append((due_at_ms, received_at_ms - due_at_ms))

    def p99s(self, from_ms: int, until_ms: int) -> list[float]:
        """The p99 of every four seconds between two instants: one hiccup of the disk is in one of them."""
        windows: dict[int, list[float]] = {}
        for due_at_ms, late_ms in list(self._late):
            if from_ms <= due_at_ms < until_ms:
                windows.setdefault(due_at_ms // NEAR_WINDOW_MS, []).append(late_ms)
        return [p99(window) for window in windows.values() if len(window) >= NEAR_WINDOW_MS // 2]


# -- the story --------------------------------------------------------------------------------------------------


class Story(common.Bench):
    """All figures come from one run."""

    def figures(self) -> list[Figure]:
        count = self.scaled(ROW_COUNT)
        with self.folder() as folder:
            (folder / "data").mkdir()
            say("writing the file")
            began_ms, dice = server.now_ms(), np.random.default_rng(8)
            file = folder / "campaign.parquet"
            write_file(file, count, lambda n: began_ms + dice.integers(HOUR_MS, 30 * DAY_MS, n))
            os.sync()
            with watched(folder, ("--pipeline", "embedded", "--bulk-port", "0")) as running:
                return self._measured(running, file, count)

    def _measured(self, running: Watched, file: Path, count: int) -> list[Figure]:
        with server.Peer(running.broker_address) as peer:
            server.make_topic(peer, TOPIC)
            server.make_topic(peer, BURST)
        running.until(lambda status: status["far"]["horizon"] > server.now_ms(), "the pipeline is at work")
        with Near(running) as near:
            say("near messages without anything beside them")
            alone_ms = server.now_ms()
            time.sleep(ALONE_S)
            beside_ms = server.now_ms()
            found = self._imported(running, file, count, running.resident_mb)
            found += self._changed(running, count)
            due_at_ms = self._imported_burst(running, file)
            late = near.p99s(beside_ms, server.now_ms())
            without = near.p99s(alone_ms, beside_ms)
        found.append(self._at_one_instant(running, due_at_ms))
        late_ms, without_ms = float(np.median(late)), float(np.median(without))
        floor = f"{late_ms:.1f} and {without_ms:.1f} ms, medians of {len(late)} and {len(without)} windows"
        name = "p99 lateness of near messages during all of it, beside without"
        return [*found, Figure(name, "x", [late_ms / without_ms], 2.0, at_most=True, floor=floor)]

    def _imported(self, running: Watched, file: Path, count: int, resident_mb: float) -> list[Figure]:
        say("importing")
        safe = self._import(running, file, TOPIC, "campaign")
        taken = self._until_done(running, "campaign")
        assert taken["rows"] == count, taken
        grown = running.resident_mb - resident_mb
        say("counting")
        counted = [self._counted(running, count) for _ in range(self.repeat)]
        return [
            Figure(f"import of {count:,} rows from Parquet, until they are safe", "s", [safe.seconds],
                   60 * self.scale, at_most=True,
                   floor=f"in the table {(taken['ended_at_ms'] - taken['at_ms']) / 1_000:.0f} s after it began"),
            Figure("memory of the broker, more than before", "MB", [grown], 20.0, at_most=True),
            Figure(f"pending by day over {count:,} rows, from the command to its answer", "s", counted, 3.0,
                   at_most=True),
        ]  # fmt: skip

    def _import(self, running: Watched, file: Path, topic: str, job_id: str) -> Ran:
        columns = ("--due", "send_at", "--key", "customer", "--tag", "kind", "--body", "text")
        words = ("--addr", running.broker_address, "--id", job_id, "--no-wait")
        return run("import", str(file), "--topic", topic, *columns, *words)

    def _until_done(self, running: Watched, job_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        while True:
            job: dict[str, Any] = run("jobs", job_id, "--addr", running.route_address).told
            assert job["state"] != "failed", job
            if job["state"] == "done":
                return job
            assert time.monotonic() < deadline, job
            time.sleep(0.5)

    def _counted(self, running: Watched, count: int) -> float:
        ran = run("pending", "--by", "day", "--topic", TOPIC, "--addr", running.route_address)
        assert ran.told["total"] == count, ran.told["total"]
        return ran.seconds

    def _changed(self, running: Watched, count: int) -> list[Figure]:
        say("cancelling a tenth")
        address = ("--addr", running.route_address)
        tenth = run("cancel", "--where", f"topic = '{TOPIC}' and tag = 't3'", *address)
        assert (tenth.told["changed"], tenth.told["late"]) == (count // 10, 0), tenth.told
        say("cancelling one")
        one = run("cancel", "--where", "key = 'c-000000005' and due > current_timestamp()", *address)
        assert one.told["changed"] == 1, one.told
        say("postponing a tenth")
        later = run("postpone", "--where", f"topic = '{TOPIC}' and tag = 't4'", "--by", "2h", *address)
        assert later.told["changed"] == count // 10, later.told
        left = count - count // 10 - 1
        counted = [self._counted(running, left) for _ in range(self.repeat)]
        return [
            Figure(f"cancel --where, 1 in 10 of {count:,} rows", "s", [tenth.seconds], 30 * self.scale, at_most=True),
            Figure("cancel --where, 1 row by key and day", "s", [one.seconds], 10.0, at_most=True),
            Figure(f"postpone --where, 1 in 10 of {count:,} rows", "s", [later.seconds], None),
            Figure("pending by day behind these", "s", counted, 3.0, at_most=True),
        ]

    def _imported_burst(self, running: Watched, file: Path) -> int:
        count = self.scaled(BURST_COUNT)
        say(f"importing {count:,} rows that are due at one instant")
        due_at_ms = server.now_ms() + BURST_AFTER_MS
        burst = file.with_name("burst.parquet")
        write_file(burst, count, lambda n: np.full(n, due_at_ms))
        self._import(running, burst, BURST, "burst")
        self._until_done(running, "burst")
        assert server.now_ms() < due_at_ms - 10_000, "the import took longer than the delay"
        return due_at_ms

    def _at_one_instant(self, running: Watched, due_at_ms: int) -> Figure:
        count = self.scaled(BURST_COUNT)
        # Not earlier: a connection that is silent for long is dropped.
        time.sleep(max(due_at_ms - 2_000 - server.now_ms(), 0) / 1_000)
        with server.Peer(running.broker_address) as peer:
            after_s = server.visible_after_s(peer, count, due_at_ms, BURST)
        name = f"{count:,} imported rows due at one instant, all visible"
        return Figure(name, "s", [after_s], 0.2 * max(self.scale, 0.25), at_most=True)


def main(arguments: Sequence[str] | None = None) -> int:
    return common.run("future", "the future as a table", Story, {"story": Story.figures}, arguments)


if __name__ == "__main__":
    sys.exit(main())

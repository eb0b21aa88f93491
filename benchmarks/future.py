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

from benchmarks import bench as common
from benchmarks import load, server
from benchmarks.bench import say
from benchmarks.pipeline import WAIT_S, Watched, p99, watched
from benchmarks.report import Figure

ROW_COUNT, BURST_COUNT = 10_000_000, 1_000_000
FILE_ROWS = 1_000_000
NEAR_COUNT, NEAR_SPAN_MS = 4_000, 4_000
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
    """Near messages, window after window, until it is told to end: the p99 of each."""

    def __init__(self, running: Watched, count: int, span_ms: int) -> None:
        self._running, self._count, self._span_ms = running, count, span_ms
        self._ending = threading.Event()
        self.late_ms: list[float] = []
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> "Near":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(WAIT_S)

    def _go(self) -> None:
        while not self._ending.is_set():
            self.late_ms.append(p99(server.late_ms_of(self._running, self._count, self._span_ms)))


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
            port = load.free_port()
            with watched(folder, ("--pipeline", "embedded", "--bulk-port", str(port))) as running:
                return self._measured(running, f"127.0.0.1:{port}", file, count)

    def _measured(self, running: Watched, bulk: str, file: Path, count: int) -> list[Figure]:
        with server.Peer(running.broker_address) as peer:
            server.make_topic(peer, TOPIC)
            server.make_topic(peer, BURST)
        running.until(lambda status: status["far"]["horizon"] > server.now_ms(), "the pipeline is at work")
        say("near messages without anything beside them")
        alone = Near(running, self.scaled(NEAR_COUNT), self.scaled(NEAR_SPAN_MS))
        with alone:
            time.sleep(20)
        resident_mb = running.resident_mb
        with Near(running, self.scaled(NEAR_COUNT), self.scaled(NEAR_SPAN_MS)) as beside:
            found = self._imported(running, bulk, file, count, resident_mb)
            found += self._changed(running, count)
            found += self._at_one_instant(running, bulk, file)
        late, without = np.median(beside.late_ms), np.median(alone.late_ms)
        return [
            *found,
            Figure("p99 lateness of near messages during all of it, beside without", "x", [float(late / without)], 2.0,
                   at_most=True,
                   floor=f"{late:.1f} and {without:.1f} ms, medians of {len(beside.late_ms)} and {len(alone.late_ms)}"),
        ]  # fmt: skip

    def _imported(self, running: Watched, bulk: str, file: Path, count: int, resident_mb: float) -> list[Figure]:
        say("importing")
        safe = self._import(bulk, file, TOPIC, "campaign")
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

    def _import(self, bulk: str, file: Path, topic: str, job_id: str) -> Ran:
        columns = ("--due", "send_at", "--key", "customer", "--tag", "kind", "--body", "text")
        return run("import", str(file), "--topic", topic, *columns, "--bulk", bulk, "--id", job_id, "--no-wait")

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
        self._counted(running, count - count // 10 - 1)
        return [
            Figure(f"cancel --where, 1 in 10 of {count:,} rows", "s", [tenth.seconds], 30 * self.scale, at_most=True),
            Figure("cancel --where, 1 row by key and day", "s", [one.seconds], 10.0, at_most=True),
            Figure(f"postpone --where, 1 in 10 of {count:,} rows", "s", [later.seconds], None),
        ]

    def _at_one_instant(self, running: Watched, bulk: str, file: Path) -> list[Figure]:
        count = self.scaled(BURST_COUNT)
        say(f"importing {count:,} rows that are due at one instant")
        due_at_ms = server.now_ms() + BURST_AFTER_MS
        burst = file.with_name("burst.parquet")
        write_file(burst, count, lambda n: np.full(n, due_at_ms))
        self._import(bulk, burst, BURST, "burst")
        self._until_done(running, "burst")
        assert server.now_ms() < due_at_ms - 1_000, "the import took longer than the delay"
        time.sleep(
            max(due_at_ms - 2_000 - server.now_ms(), 0) / 1_000
        )  # a connection that is silent for long is dropped
        with server.Peer(running.broker_address) as peer:
            after_s = server.visible_after_s(peer, count, due_at_ms, BURST)
        name = f"{count:,} imported rows due at one instant, all visible"
        return [Figure(name, "s", [after_s], 0.2 * max(self.scale, 0.25), at_most=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    return common.run("future", "the future as a table", Story, {"story": Story.figures}, arguments)


if __name__ == "__main__":
    sys.exit(main())

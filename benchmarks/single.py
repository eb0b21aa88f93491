"""Measures what is asked of one message, over the network: python -m benchmarks.single [--rows 1000000 10000000]

A broker with a pipeline gets an import of many messages, due over 30 days, whose rows only the table has. Then a
blocking client finds, cancels, postpones and delivers messages: some that it has sent, near and far, and some of the
table. Every message is asked for once; the median of the calls counts.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import postdate
from benchmarks import future, server
from benchmarks.bench import say
from benchmarks.pipeline import Watched, watched
from benchmarks.report import aligned, machine, shown
from postdate.message import Cancelled, Moved

ROWS = (10_000, 1_000_000)
CALLS, WARM_CALLS = 200, 20
NEAR, FAR, TABLE = "near", "far", "table"
DELAYS = {NEAR: "50s", FAR: "2h"}
LOG_GOAL_MS, TABLE_GOAL_MS = 5.0, 20.0


class Asked(NamedTuple):
    """What the calls of one kind took, in milliseconds."""

    name: str
    rows: int
    spans_ms: list[float]
    goal_ms: float

    def cells(self) -> list[str]:
        p99 = sorted(self.spans_ms)[int(len(self.spans_ms) * 0.99)]
        p50 = statistics.median(self.spans_ms)
        verdict = "ok" if p50 <= self.goal_ms else "short"
        return [self.name, f"{self.rows:,}", f"{shown(p50)} ms", f"{shown(p99)} ms", f"<= {self.goal_ms:g} ms", verdict]


class Story:
    """The calls against one broker."""

    def __init__(self, client: postdate.Client, row_count: int, call_count: int) -> None:
        self._client, self._row_count, self._call_count = client, row_count, call_count
        self._dice = random.Random(7)
        self._asked: set[int] = set()
        self._sent = 0

    def _key(self, place: str) -> tuple[str, str]:
        """Topic and key of a message that nobody has asked for yet; one that is sent now, unless it is in the table."""
        if place == TABLE:
            number = self._dice.randrange(self._row_count)
            while number in self._asked:
                number = self._dice.randrange(self._row_count)
            self._asked.add(number)
            return future.TOPIC, f"c-{number:09d}"
        self._sent += 1
        key = f"k-{self._sent:09d}"
        self._client.send(future.TOPIC, "hello", delay=DELAYS[place], key=key)
        return future.TOPIC, key

    def ask(self, name: str, place: str, call: Callable[[str, str], bool]) -> Asked:
        say(f"  {name}, {place}")
        spans_ms = []
        for _ in range(self._call_count + WARM_CALLS):
            topic, key = self._key(place)
            began_s = time.perf_counter()
            is_done = call(topic, key)
            spans_ms.append((time.perf_counter() - began_s) * 1_000)
            assert is_done, f"{name} of {key} has not worked"
        goal_ms = TABLE_GOAL_MS if place == TABLE else LOG_GOAL_MS
        return Asked(f"{name}, {place}", self._row_count, spans_ms[WARM_CALLS:], goal_ms)

    def find(self, topic: str, key: str) -> bool:
        return [found.state for found in self._client.find(topic, key)] == ["waiting"]

    def cancel(self, topic: str, key: str) -> bool:
        return [each.outcome for each in self._client.cancel(topic=topic, key=key)] == [Cancelled.CANCELLED]

    def postpone(self, topic: str, key: str) -> bool:
        return [each.outcome for each in self._client.postpone(topic=topic, key=key, by="1h")] == [Moved.MOVED]

    def deliver_now(self, topic: str, key: str) -> bool:
        return [each.outcome for each in self._client.deliver_now(topic=topic, key=key)] == [Moved.MOVED]

    def run(self) -> list[Asked]:
        calls = {
            "find": self.find, "cancel by key": self.cancel, "postpone": self.postpone, "deliver now": self.deliver_now,
        }  # fmt: skip
        return [self.ask(name, place, call) for name, call in calls.items() for place in (NEAR, FAR, TABLE)]


def fill(running: Watched, folder: Path, row_count: int) -> None:
    """Imports messages, and waits until only the table has them."""
    say(f"importing {row_count:,} messages")
    file, now_ms, dice = folder / "rows.parquet", server.now_ms(), np.random.default_rng(8)
    future.write_file(file, row_count, lambda count: now_ms + dice.integers(future.HOUR_MS, 30 * future.DAY_MS, count))
    columns = ("--due", "send_at", "--key", "customer", "--tag", "kind", "--body", "text")
    told = future.run("import", str(file), "--topic", future.TOPIC, "--addr", running.broker_address, *columns).told
    assert told["rows"] == row_count, told


def measure(parent: Path, row_count: int, call_count: int) -> list[Asked]:
    with tempfile.TemporaryDirectory(prefix="postdate-bench-", dir=parent) as name:
        folder = Path(name)
        (folder / "data").mkdir()
        with watched(folder, ("--pipeline", "embedded", "--bulk-port", "0")) as running:
            with server.Peer(running.broker_address) as peer:
                server.make_topic(peer, future.TOPIC)
            running.until(lambda status: status["far"]["horizon"] > server.now_ms(), "the pipeline is at work")
            fill(running, folder, row_count)
            with postdate.connect(running.route_address) as client:
                return Story(client, row_count, call_count).run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.single", description="Measures what is asked of one message, over the network."
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="how many messages only the table has")
    parser.add_argument("--calls", type=int, default=CALLS, help=f"of each kind (default: {CALLS})")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the folders are made")
    options = parser.parse_args(arguments)
    asked = [each for rows in options.rows for each in measure(options.folder, rows, options.calls)]
    columns = ["call", "rows in the table", "p50", "p99", "goal", ""]
    print(aligned([columns, *(each.cells() for each in asked)]))
    print(machine())
    return int(any(statistics.median(each.spans_ms) > each.goal_ms for each in asked))


if __name__ == "__main__":
    sys.exit(main())

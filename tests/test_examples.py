"""The examples, as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.flight as flight
from bulking import wait_until
from process import ROOT, Broker, free_port

import postdate
from postdate.pipeline import java
from postdate.pipeline.gate import Gate


def test_lateness_is_a_row_for_each_minute(tmp_path: Path) -> None:
    """Two runs: the second one goes on where the first one ended."""
    bulk = f"127.0.0.1:{free_port()}"
    broker = Broker(tmp_path, bulk_port=int(bulk.rpartition(":")[2]), pipeline="none")
    broker.start()
    try:
        wait_until(lambda: is_there(bulk))
        counts = []
        for count in (3, 5):
            send_delayed(broker.route_address, bulk, count)
            counts.append(messages_shown(run_lateness(tmp_path, bulk)))
        assert counts == [3, 8]
    finally:
        broker.stop()


def send_delayed(route: str, bulk: str, count: int) -> None:
    """Returns when all are visible."""
    with postdate.connect(route) as client, Gate(bulk) as gate:
        client.send("orders", "not delayed")  # makes the topic
        until = visible(gate) + count
        for _ in range(count):
            client.send("orders", "hello", delay="50ms")
        wait_until(lambda: visible(gate) >= until)


def visible(gate: Gate) -> int:
    return sum(queue[3] for queue in gate.topic("orders"))


def is_there(bulk: str) -> bool:
    """Bulk comes up a moment after its broker."""
    with Gate(bulk) as gate:
        try:
            gate.state()
        except flight.FlightUnavailableError:
            return False
    return True


def run_lateness(folder: Path, bulk: str) -> list[str]:
    found = java.find(os.environ)
    assert not isinstance(found, java.Missing), found.sentence
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "lateness.py", "orders", "--table", folder / "late", "--bulk", bulk],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAVA_HOME": found.home}, cwd=folder,
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout.splitlines()


def messages_shown(lines: list[str]) -> int:
    assert lines[0].split() == ["minute,", "UTC", "messages", "mean", "ms", "max", "ms"]
    return sum(int(line.split()[2]) for line in lines[1:])

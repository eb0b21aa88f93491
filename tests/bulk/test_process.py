"""`postdate bulk` as a process of its own: how it starts, what it needs, when it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from postdate.clock import ManualClock
from tests.support.bulk import Client, wait_until
from tests.support.core import DAY_MS, T0, TOPIC, message
from tests.support.server import serving
from verify.faults.process import ROOT

END_S = 10.0  # it should be 2 s; a busy machine gets more


class Process:
    """A bulk process that runs."""

    def __init__(self, data: Path, broker_port: int) -> None:
        self._command = [
            sys.executable, "-m", "postdate", "bulk", "--data", str(data), "--broker", f"127.0.0.1:{broker_port}",
            "--port", "0", "--host", "127.0.0.1",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=data.parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        assert self.ready.startswith("bulk listens on 127.0.0.1:"), self._failure()
        self.client = Client(int(self.ready.rpartition(":")[2]), broker_port)

    def _failure(self) -> str:
        self.process.kill()
        return self.process.communicate()[1]

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Its exit code, and what it said since it was ready."""
        self.client.close()
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=END_S)
        return self.process.returncode, out, err

    def peak_bytes(self) -> int:
        """The most memory that it ever had, maps of files included."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1_024


@contextmanager
def bulk_process(data: Path, broker_port: int) -> Iterator[Process]:
    running = Process(data, broker_port)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_without_a_trace(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served, bulk_process(tmp_path / "data", served.port) as bulk:
        assert bulk.client.read().num_rows == 0
        assert bulk.end(number) == (0, "", "")


def test_it_ends_while_a_client_reads(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        served.call(lambda: served.broker.put_topic(TOPIC, T0))
        for _ in range(40):
            served.call(lambda: served.broker.send([message(b"x" * 900_000, due=T0 + DAY_MS)], T0))
        served.settle()
        with bulk_process(tmp_path / "data", served.port) as bulk:
            reader = bulk.client.reader("far", 0, 1_000)
            assert reader.read_chunk().data.num_rows
            bulk.process.send_signal(signal.SIGTERM)
            bulk.process.wait(END_S)
            assert bulk.process.returncode == 0
            reader.cancel()


def test_it_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        command = [
            sys.executable, "-m", "postdate", "bulk", "--data", str(tmp_path / "data"),
            "--broker", f"127.0.0.1:{served.port}", "--port", "0",
        ]  # fmt: skip
        starter = (
            f"import subprocess; p = subprocess.Popen({command!r}, stdout=subprocess.PIPE, text=True); "
            "print(p.pid, p.stdout.readline(), flush=True); input()"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        parent.kill()
        parent.communicate()
        wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_runs_without_a_broker_and_finds_it_when_it_comes(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        port = served.port
    with bulk_process(tmp_path / "data", port) as bulk:
        with pytest.raises(pa.flight.FlightUnavailableError, match="no broker at"):
            bulk.client.read()
        with serving(tmp_path / "data", ManualClock(T0), broker_port=port):
            assert bulk.client.read().num_rows == 0
        assert bulk.end(signal.SIGTERM)[0] == 0


def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "postdate", "bulk", "--data", str(tmp_path), "--broker", "127.0.0.1:1", "--port", "0"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    assert "FORMAT" in ended.stderr


MEMORY_BYTES_MAX = 120 << 20  # beyond what it has when nothing is asked: some batches, some maps, Flight's own buffers


def test_a_slow_reader_of_a_long_range_costs_little_memory(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        served.call(lambda: served.broker.put_topic(TOPIC, T0))
        batch = [message(b"x" * 9_000, due=T0 + DAY_MS) for _ in range(100)]
        for _ in range(230):
            served.call(lambda: served.broker.send(batch, T0))
        served.settle()
        with bulk_process(tmp_path / "data", served.port) as bulk:
            assert bulk.client.read(stop=100).num_rows == 100
            before = bulk.peak_bytes()
            rows = size = 0
            for piece in bulk.client.reader("far", 0, 1 << 40):
                rows += piece.data.num_rows
                size += piece.data.nbytes
                for _ in range(3):
                    bulk.client.read(stop=0)
            assert (rows, size > 200 << 20) == (23_000, True)
            assert bulk.peak_bytes() - before < MEMORY_BYTES_MAX

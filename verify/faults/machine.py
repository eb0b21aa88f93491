"""The processes of one broker under the layer: starts, kills, disturbs and examines them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from postdate.access.token import TOKEN_FILE
from postdate.check import check_folder
from postdate.errors import PostdateError
from postdate.storage.disk import RealDisk
from postdate.table.format import MESSAGES
from verify.faults.driver import Lost
from verify.faults.history import History
from verify.faults.layer import Layer, flip_bit
from verify.faults.process import Broker, free_port
from verify.faults.remoting import Remoting

LEAD_MS = 10_000  # short, so that many messages are far
GONE_S = 30.0
UP_S = 300.0  # for Spark: two cores may be very busy
REFUSED_S = 60.0  # for a broker that must not start
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SETTINGS: dict[str, Any] = {
    "lead_ms": LEAD_MS, "rescue_step_ms": 500, "snapshot_batches": 500, "pipeline_pause_ms_min": 500,
    "pipeline_pause_ms_max": 3_000, "table_read_ms_max": 3_000, "spark_memory_bytes": 512 << 20,
    # Small files end often. All are kept: the checker reads them at the end, when clocks have stepped by days.
    "segment_bytes": 1 << 18, "batch_bytes_max": 1 << 18, "queue_file_rows": 512, "queue_tail_rows": 128,
    "retention_ms": 3_650 * 86_400_000,
    # An id is never free again, however far clocks step: clients count the messages of each.
    "once_window_ms": 3_650 * 86_400_000,
}  # fmt: skip
# How a process is recognized by its command; the first match counts.
PARTS = {
    "bulk": "-m postdate bulk", "pipeline": "-m postdate pipeline", "java": "java ", "worker": "pyspark",
    "broker": "postdate up",
}  # fmt: skip


class Stuck(Exception):
    """The broker does not do what it has to, and the episode cannot continue."""


class Machine:
    """One broker with bulk and pipeline. It keeps its ports, so that clients find it again."""

    def __init__(
        self, folder: Path, history: History, with_pipeline: bool, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.folder, self.history, self.with_pipeline = folder, history, with_pipeline
        self.layer = Layer(folder / "layer", [folder / "data"])
        bulk_port = free_port() if with_pipeline else -1
        parts = {"bulk_port": bulk_port, "pipeline": "embedded" if with_pipeline else "none"}
        self.broker = Broker(folder, self.layer.environment(), **SETTINGS, **parts, **(settings or {}))
        environ = self.broker.environment_of_clients()
        self.driver = Remoting(self.broker.port, self.broker.route_address, folder, environ)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises Stuck."""
        try:
            self.broker.start()
        except AssertionError as error:
            raise Stuck(str(error)) from error
        pid = self.broker.pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        spent_s = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        resident = self.broker.resident_bytes
        self.history.note("start", cpu_s=spent_s, waiting=self.broker.ready["waiting"], resident=resident)

    def stop(self) -> None:
        """Asks the broker to stop. Raises Stuck if it does not."""
        try:
            self.broker.stop()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise Stuck(str(error)) from error
        self._await(lambda: not self.broker.processes(), GONE_S, "its parts are still there after its stop")

    def revive(self) -> None:
        """Starts the broker again if it has ended."""
        if not self.broker.is_running:
            self.broker.reap()
            self.start()

    def kill(self) -> None:
        os.kill(self.broker.pid, signal.SIGKILL)
        self.broker.reap()

    def kill_all(self) -> None:
        """Kills the broker, everything that it started, and the commands of clients."""
        self.end()
        self._await(lambda: not self._all_processes(), GONE_S, "processes that were killed are still there")

    def cut_power(self, dice: Random) -> None:
        """Kills all processes, loses any part of what was not synced, and starts again."""
        with self.driver.starting:  # no command begins meanwhile: it would go on with the journal of before
            self.kill_all()
            lost = self.layer.lose_power(dice)
        self.history.note("power", lost=lost[:20], count=len(lost))
        self.start()

    def end(self) -> None:
        """Kills what still runs, also at the end of an episode that went wrong."""
        for pid in self._all_processes():
            signal_to(pid, signal.SIGKILL)
        self.broker.reap()

    def _all_processes(self) -> list[int]:
        return [*self.broker.processes(), *self.broker.processes_of_clients()]

    def _await(self, is_so: Callable[[], bool], seconds: float, otherwise: str) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                raise Stuck(otherwise)
            time.sleep(0.05)

    # -- its parts ----------------------------------------------------------------------------------------------------

    def pids(self, part: str) -> list[int]:
        return [pid for pid, command in self.broker.processes().items() if part_of(command) == part]

    def signal_part(self, part: str, number: signal.Signals) -> int:
        """Sends a signal to one process of a part; returns its id, or 0 if there is none."""
        pids = sorted(self.pids(part))
        if not pids:
            return 0
        signal_to(pids[0], number)
        return pids[0]

    def await_pipeline(self) -> None:
        """Waits until Spark is ahead of the messages that are due. Raises Stuck if it takes too long."""
        if self.with_pipeline:
            self._await(self._is_served, UP_S, f"no pipeline has come up within {UP_S:.0f} s")

    def _is_served(self) -> bool:
        try:
            status = self.driver.status()
        except Lost:
            return False
        return bool(status["far"]["is_served"]) and str(status["parts"]["pipeline"]).startswith("runs")

    # -- time ---------------------------------------------------------------------------------------------------------

    def step_clock(self, span_ms: int) -> None:
        """Steps the clock. The history must know the highest time that the clock may have shown, so it hears of a step
        ahead before the step.
        """
        if span_ms > 0:
            self.history.note_clock(self.layer.offset_ms + span_ms)
        self.layer.step_clock(span_ms)
        if span_ms < 0:
            self.history.note_clock(self.layer.offset_ms)

    # -- others -------------------------------------------------------------------------------------------------------

    def second_broker(self) -> None:
        """Starts a second broker on the same folder, which must refuse with a sentence."""
        ports = [
            "--route-port",
            "0",
            "--broker-port",
            "0",
            "--vip-port",
            "-1",
            "--grpc-port",
            "-1",
            "--bulk-port",
            "-1",
        ]
        try:
            ended = self._run(["up", "--data", str(self.broker.data), *ports])
        except subprocess.TimeoutExpired:
            self.history.note_finding("I8", "a second broker runs on the folder of the first")
            return
        if ended.returncode != 2 or "in use" not in ended.stderr:
            self.history.note_finding(
                "I8", f"a second broker on the folder ended with {ended.returncode}: {ended.stderr[-200:]}"
            )

    def _run(self, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Runs one of our commands, not under the layer."""
        return subprocess.run(
            [sys.executable, "-m", "postdate", *arguments], capture_output=True, text=True, timeout=REFUSED_S,
            check=False, stdin=subprocess.DEVNULL, cwd=self.folder,
        )  # fmt: skip

    def second_pipeline(self, seconds: float) -> None:
        """Starts a second pipeline. It fences the first, which restarts and fences it; the older one stages nothing."""
        table = str(self.broker.data / "table")
        process = self.broker.spawn(
            "pipeline", "--addr", self.broker.route_address, "--table", table,
            "--token-file", str(self.broker.data / TOKEN_FILE),
        )  # fmt: skip
        try:
            time.sleep(seconds)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # -- damage -------------------------------------------------------------------------------------------------------

    def flip_a_bit(self, dice: Random) -> str:
        """Flips a bit in a copy of a killed broker's folder: `check` must name it, or it must do no harm."""
        copy = self.folder / "flipped"
        shutil.copytree(self.broker.data, copy / "data")
        try:
            flip = flip_bit(copy / "data", dice)
            self._judge_copy(copy, str(flip))
            return str(flip)
        finally:
            shutil.rmtree(copy)

    def _judge_copy(self, copy: Path, what: str) -> None:
        is_named = bool(check_folder(RealDisk(copy / "data")).findings)
        broker = Broker(copy, **SETTINGS)
        try:
            broker.start()
        except AssertionError as error:
            if "Traceback" in str(error) or not is_named:
                self.history.note_finding(
                    "I1", f"{what}: check named it: {is_named}, and the broker said: {str(error)[-300:]}"
                )
            return
        try:
            self._judge_reading(broker, what, is_named)
        finally:
            broker.kill()

    def _judge_reading(self, broker: Broker, what: str, is_named: bool) -> None:
        """Messages must not be missing or changed, unless `check` has named the damage."""
        driver = Remoting(broker.port, broker.route_address, self.folder)
        try:
            entries = {(each.place, each.offset): each for each in driver.entries({})}
        except (Lost, PostdateError) as error:
            if not is_named:
                self.history.note_finding(
                    "I1", f"{what}: check did not name it, and the queues cannot be read: {error}"
                )
            return
        seen = [each for each in list(self.history.events) if each["kind"] == "saw" and each["offset"] >= 0]
        for each in seen:
            found = entries.get((each["place"], each["offset"]))
            if found is None and not is_named and each["place"].startswith("faults/"):
                self.history.note_finding("I1", f"{what}: check did not name it, and {each['key']} is gone")
            if found is not None and found.key != each["key"] and not is_named:
                self.history.note_finding("I8", f"{what}: check did not name it, and {each['key']} is {found.key} now")

    # -- what it leaves -----------------------------------------------------------------------------------------------

    def sample(self) -> None:
        if self.broker.is_running:
            try:
                resident, files = self.broker.resident_bytes, self.broker.file_count
            except (OSError, StopIteration):  # it has ended meanwhile
                return
            self.history.note("sample", resident=resident, files=files)

    def count_writes(self) -> None:
        """Notes how many rows came into the table, and how often rows were written. Raises Lost."""
        writes = writes_in(self.broker.data / "table" / MESSAGES)
        self.history.note("written", rows=self.driver.status()["far"]["rows_in"], writes=writes)

    def examine(self) -> None:
        """After the stop: notes what `check` finds, and tracebacks in the log."""
        for finding in check_folder(RealDisk(self.broker.data)).findings:
            self.history.note_finding("check", str(finding))
        for line in self.broker.log_lines():
            if line.startswith(("Traceback", "AssertionError")):
                self.history.note_finding("log", line)


def writes_in(table: Path) -> int:
    """The number of rows in all files that the table's log ever added."""
    lines = [line for path in table.glob("_delta_log/*.json") for line in path.read_text().splitlines()]
    added = [action["add"] for action in map(json.loads, lines) if "add" in action]
    return sum(json.loads(each["stats"])["numRecords"] for each in added if each.get("stats"))


def part_of(command: str) -> str:
    return next((part for part, mark in PARTS.items() if mark in command), "")


def signal_to(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it has ended meanwhile

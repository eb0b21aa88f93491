"""A `postdate up` in a process of its own, and what the system knows about a process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STOP_S = 30.0
_CPUCLOCK_SCHED = 2  # with the inverted pid above it: what clock_getcpuclockid(3) gives for a process


def cpu_s(pid: int) -> float:
    """What a process has had of all cores since it began, its kernel time included; to the nanosecond, where /proc
    counts in ticks of 10 ms. Raises OSError where it has ended.
    """
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def memory_mb(pid: int, field: str = "VmRSS") -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1_000


def shared_mb(pid: int) -> float:
    """The memory of a process, with its part of what it shares with others; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1_000


def tree(pid: int) -> list[int]:
    """A process and all that it, or what it started, has started."""
    found = [pid]
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += tree(int(child))
    except OSError:  # it has ended meanwhile
        pass
    return found


def end(process: "subprocess.Popen[Any]") -> None:
    """Ends a process that we started, even one that is paused; one that does not end by itself is killed."""
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Running:
    """A server on free ports; on these cores only, where given. Returns from making it when it listens."""

    def __init__(self, folder: Path, flags: Sequence[str], cores: set[int] | None = None) -> None:
        self.data = folder / "data"
        command = [
            sys.executable, "-m", "postdate", "up", "--json", "--data", str(self.data), "--route-port", "0",
            "--broker-port", "0", "--vip-port", "-1", "--grpc-port", "0", "--bulk-port", "-1", *flags,
        ]  # fmt: skip
        allowed = cores or os.sched_getaffinity(0)
        # A group of its own: Ctrl-C reaches only the command, which then ends what it started. One session: what is
        # nice to the broker is so to the client that measures it, too.
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )
        assert self._process.stdout is not None
        try:
            ready = json.loads(self._process.stdout.readline())
        except BaseException:  # Ctrl-C among others: nobody else knows of it yet
            self.stop()
            raise
        self.route_address: str = ready["route"]
        self.broker_address: str = ready["broker"]
        self.grpc_address: str = ready["grpc"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        end(self._process)
        self._close()

    def kill(self) -> None:
        """As by kill -9."""
        self._process.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    @property
    def resident_mb(self) -> float:
        return memory_mb(self.pid)

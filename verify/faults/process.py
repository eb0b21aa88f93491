"""Runs `postdate up` as a process: starts, kills and restarts it on the same folder and ports, and asks the system
about it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from postdate.check import check_folder
from postdate.config import LIMITS
from postdate.storage.disk import RealDisk
from verify.faults.peer import Peer

ROOT = Path(__file__).parent.parent.parent  # of the repository: brokers run from this source
START_S, STOP_S = 60.0, 60.0
_MARK = "BROKER_OF_A_TEST"  # an environment variable that all processes of a broker inherit

# Small files, so that snapshots and new segments are made within seconds.
SMALL_FILES: dict[str, Any] = {"segment_bytes": 1 << 20, "batch_bytes_max": 1 << 20, "queue_file_rows": 4_096}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Broker:
    """A broker process on a folder. It keeps its ports, so that clients find it again after a restart."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None, **settings: Any) -> None:
        # Settings become flags, limits an argument: see verify/faults/postdate.py.
        self._environ = environ or {}
        self.data = folder / "data"
        self.log = folder / "broker.log"
        self._folder = folder
        # No bulk, hence no Spark: tests of those ask for them.
        ports = {
            "route_port": free_port(),
            "broker_port": free_port(),
            "vip_port": -1,
            "grpc_port": -1,
            "bulk_port": -1,
        }
        self._settings = {**SMALL_FILES, **ports, "data": self.data, **settings}
        self.port = int(self._settings["broker_port"])
        self.route_address = f"127.0.0.1:{self._settings['route_port']}"
        self._process: subprocess.Popen[str] | None = None
        self.ready: dict[str, Any] = {}  # the line that it printed when it began to serve
        self.start_count = 0

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        settings = {name: value for name, value in self._settings.items() if name not in LIMITS}
        limits = {name: value for name, value in self._settings.items() if name in LIMITS}
        flags = [text for name, value in settings.items() for text in (_flag(name), str(value))]
        words = ["up", "--json", *flags, "--limits", json.dumps(limits)]
        self._process = self.spawn(*words, module="verify.faults.postdate")
        assert self._process.stdout is not None
        is_heard = select.select([self._process.stdout], [], [], START_S)[0]
        line = self._process.stdout.readline() if is_heard else ""
        if not line:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None
            raise AssertionError(f"the broker does not start: {self.log.read_text()[-2_000:]}")
        self.ready = json.loads(line)
        self.start_count += 1

    def spawn(self, *arguments: str, module: str = "postdate") -> "subprocess.Popen[str]":
        """Starts one of our commands in its own process group, with this broker's environment and log."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, text=True, cwd=self._folder,
                env=self._environment(str(self._folder)), start_new_session=True,
            )  # fmt: skip

    def environment_of_clients(self) -> dict[str, str]:
        """The environment for commands of clients: they write to the same disk, and are none of its own processes."""
        return self._environment(self._mark_of_clients)

    def _environment(self, mark: str) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
        return {**own, "PYTHONPATH": str(ROOT), **self._environ, _MARK: mark}

    @property
    def _mark_of_clients(self) -> str:
        return f"{self._folder}/clients"

    def kill(self) -> None:
        """Ends the process at once; its writes stay."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Asks it to stop, and waits. Does nothing if it does not run."""
        if self._process is not None:
            self._end(number)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        process.send_signal(number)
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()
            self._process = None
        expected = -number if number == signal.SIGKILL else 0
        assert code == expected, f"the broker ended with {code}, expected {expected}: {self.log.read_text()[-2_000:]}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def reap(self) -> None:
        """Waits for a process that was killed, and forgets it. Does nothing if there is none."""
        if self._process is None:
            return
        assert self._process.stdout is not None
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def peer(self) -> Peer:
        return Peer(self.port)

    # -- what is known about it -----------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def processes(self) -> dict[int, str]:
        """Every process of this broker with its command: itself, what it or its parts started, and what is left when it
        is gone.
        """
        return self._processes_with(str(self._folder))

    def processes_of_clients(self) -> dict[int, str]:
        """Every process that has the environment for commands of clients, or was started by one that has it."""
        return self._processes_with(self._mark_of_clients)

    def _processes_with(self, value: str) -> dict[int, str]:
        mark = f"{_MARK}={value}".encode()
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it has ended meanwhile, or is another user's
                continue
        return found

    @property
    def resident_bytes(self) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1_024

    @property
    def file_count(self) -> int:
        """The number of open files without segments of the log, whose number depends on the log's size."""
        folder = Path(f"/proc/{self.pid}/fd")
        return sum(_target_of(link).parent != self.data / "log" for link in folder.iterdir())

    def log_lines(self, *levels: str) -> list[str]:
        """Lines of its log with one of these levels; without levels all lines, also those of a traceback."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if not levels or line.split()[1:2] in [[level] for level in levels]]

    def check(self) -> list[str]:
        """What `postdate check` finds in its folder. The broker must not run."""
        assert self._process is None
        return [str(finding) for finding in check_folder(RealDisk(self.data)).findings]


def _target_of(link: Path) -> Path:
    try:
        return link.readlink()
    except FileNotFoundError:
        return Path()  # closed since the folder was listed


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

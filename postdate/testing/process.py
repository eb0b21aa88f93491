"""A real broker for tests: `postdate up` in a process of its own, on free ports and a folder of the test."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from postdate.errors import UsageError

_START_SECONDS = 60.0  # for the first line that it prints: a machine that tests run on may be busy
_STOP_SECONDS = 60.0
_LAST_CHARACTERS = 2_000  # of its log, for the error of a broker that does not start


class BrokerProcess:
    """A broker with the machine's clock and a data folder, in a process of its own. Close it, or use `with`.

        with BrokerProcess(tmp_path) as broker, postdate.connect(broker.address) as client:
            client.send("reminders", "stand up", delay="200ms")

    It has free ports, which it keeps when it starts again, its data in `folder/data`, its log in `folder/broker.log`.
    `settings` are the broker's, by name (docs/settings.md). Bulk and the pipeline are off, unless `bulk_port=0` is
    given.
    """

    def __init__(self, folder: str | os.PathLike[str], **settings: Any) -> None:
        """Raises UsageError, with the end of its log, if the broker does not start."""
        self.folder = Path(folder)
        self.data, self.log = self.folder / "data", self.folder / "broker.log"
        with _free_port() as route, _free_port() as port:
            ports = {
                "route_port": route.getsockname()[1],
                "broker_port": port.getsockname()[1],
                "vip_port": -1,
                "grpc_port": -1,
            }
        self._settings = {**ports, "vip_port": -1, "grpc_port": -1, "bulk_port": -1, "data": self.data, **settings}
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def __enter__(self) -> "BrokerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address for `postdate.connect` and for RocketMQ clients, as "127.0.0.1:port"."""
        return f"127.0.0.1:{self._settings['route_port']}"

    def start(self) -> None:
        """Starts it again, after `kill` or `close`, on the same folder and ports. Raises UsageError."""
        if self._process is not None:
            raise UsageError("the broker runs already")
        flags = [text for name, value in self._settings.items() for text in (_flag(name), str(value))]
        own = {name: value for name, value in os.environ.items() if not name.startswith("POSTDATE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "postdate", "up", "--json", *flags], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, text=True, env=own,
            )  # fmt: skip
        assert self._process.stdout is not None
        # A broker that hangs is killed, which ends the wait for its line.
        alarm = threading.Timer(_START_SECONDS, self._process.kill)
        alarm.start()
        line = self._process.stdout.readline()
        alarm.cancel()
        alarm.join()
        if not line:
            self.kill()
            end = self.log.read_text(encoding="utf-8", errors="replace")[-_LAST_CHARACTERS:].strip()
            raise UsageError(f"the broker does not start: {end}")
        assert json.loads(line)["route"] == self.address, line

    def kill(self) -> None:
        """Ends it at once, like a crash. What it has answered is on disk. Does nothing if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def close(self) -> None:
        """Stops it, as SIGTERM does, and waits for its end; what waits stays in the folder. May be called again."""
        if self._process is not None:
            self._process.terminate()
            self._reap()

    def _reap(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()


def _free_port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

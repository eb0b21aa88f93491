"""A server in a process of its own: on a free port of loopback, in a folder, from its first answer to its end."""

import importlib.metadata
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers.system import NotRun
from benchmarks.process import tree

HOST = "127.0.0.1"
# Below those of outgoing connections: asking one of these for a server that does not listen yet could, by chance,
# connect a socket with itself.
PORTS = range(20_000, 32_000)
START_S = 120.0
END_S = 15.0
PAUSE_S = 0.01


class Server:
    """Starts a program; its output goes to a file of its folder."""

    def __init__(self, command: Sequence[str | Path], folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._name = Path(command[0]).name
        self._output = folder / f"{self._name}.out"
        with self._output.open("ab") as output:
            # A group of its own: Ctrl-C reaches only the command, which then ends what it started.
            self._process = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env={**os.environ, **(settings or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def pids(self) -> list[int]:
        """It and all that it started."""
        return tree(self._process.pid) if self._process.poll() is None else []

    def await_answer(self, ask: Callable[[], object], refusals: tuple[type[Exception], ...] = (OSError,)) -> None:
        """Asks until no refusal comes. Raises NotRun, with what the server said last, where it ends instead."""
        until = time.monotonic() + START_S
        while True:
            try:
                ask()
            except refusals as refusal:
                if self._process.poll() is not None or time.monotonic() > until:
                    said = self._output.read_text(errors="replace")[-2_000:]
                    raise NotRun(f"{self._name} did not start: {said or refusal}") from refusal
                time.sleep(PAUSE_S)
            else:
                return

    def kill(self) -> None:
        """kill -9 to it and all that it started. Returns when none of them holds anything any more: PostgreSQL does not
        start again while one still has its memory."""
        self._process.send_signal(signal.SIGSTOP)  # it starts no more that we would not know of
        pids = self.pids
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it went with its parent
                continue
        self._process.wait()
        while any(map(is_alive, pids)):
            time.sleep(PAUSE_S)

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Asks it to end, and kills it where it does not. May be called twice."""
        self._process.send_signal(by)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()


def is_alive(pid: int) -> bool:
    """Not where it has ended and only its parent does not know yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def free_port() -> int:
    """Somewhere in PORTS by chance, so that two who ask at the same time are not given the same."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was left a moment ago is free
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise NotRun(f"no port from {PORTS.start:,} to {PORTS.stop:,} is free")


def program(name: str, package: str, *folders: str | Path) -> Path:
    """Where a program is, in one of these folders or else on the path. Raises NotRun, naming the package that brings
    it."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        raise NotRun(f"{name} is not installed here; {package} brings it")
    return Path(found)


def said_version(command: Sequence[str | Path]) -> str:
    """What a program answers when it is asked for its version: the first word of it with a digit and a point."""
    asked = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True, timeout=30)
    return version_in(asked.stdout + asked.stderr)


def version_in(said: str) -> str:
    """Of "Redis server v=7.0.15 sha=00000000:0", 7.0.15."""
    numbers = (word.rpartition("=")[2].strip("v(),") for word in said.split())
    return next(word for word in numbers if word[:1].isdigit() and "." in word)


def library_version(name: str) -> str:
    """Of a library from PyPI. Raises NotRun where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError as missing:
        raise NotRun(f"the Python library {name} is not installed here") from missing

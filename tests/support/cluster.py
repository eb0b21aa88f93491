"""A real Spark cluster on loopback, for tests: a master and workers of the standalone kind, as the package has them.

The workers' Python knows nothing of ours and of little else: it runs without the folder of installed packages, beside
one that has only what executors are said to need. What else is imported there has travelled with the job.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pyspark

from postdate.spark.session import java

WAIT_S = 120.0
_MASTER, _WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
_EXECUTOR = "CoarseGrainedExecutorBackend"
_ADDRESS = re.compile(r"Starting Spark master at (spark://\S+)")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, f"{what}: not within {WAIT_S:.0f} s"
        time.sleep(0.02)


def bare_python(folder: Path) -> Path:
    """An interpreter with pyarrow and nothing else beside the standard library."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    installed = Path(pyarrow.__file__).parent
    (packages / "pyarrow").symlink_to(installed)
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys._base_executable} -S "$@"\n')  # type: ignore[attr-defined]
    program.chmod(0o755)
    return program


SECRET = "b7f1e6a2c94d4f0f9a51"
_PROTECTED = """\
spark.authenticate true
spark.authenticate.secret {secret}
spark.network.crypto.enabled true
spark.network.crypto.authEngineVersion 2
spark.io.encryption.enabled true
"""


class Process:
    """A part of the cluster, with its output in a file."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [str(Path(pyspark.__file__).parent / "bin" / "spark-class"), *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment(folder), cwd=folder,
                start_new_session=True,
            )  # fmt: skip

    def said(self, pattern: re.Pattern[str]) -> str | None:
        assert self.process.poll() is None, self.log.read_text()
        match = pattern.search(self.log.read_text())
        return match and match[match.re.groups and 1]

    def executors(self) -> list[int]:
        """The processes of the executors that a worker has started."""
        return [pid for pid, parent, command in _processes() if parent == self.process.pid and _EXECUTOR in command]

    def end(self) -> None:
        for pid in self.executors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def _environment(folder: Path) -> dict[str, str]:
    found = java.find(os.environ)
    assert isinstance(found, java.Java), found
    # No PYTHONPATH of ours, no settings of another Spark: all that an executor gets is told by the job.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return kept | {"JAVA_HOME": found.home, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(folder / "scratch")}


def _processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent's number and command of every process."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                yield int(entry.name), parent, (entry / "cmdline").read_text().replace("\0", " ")


class Cluster:
    """A master and some workers with a core and a gigabyte each. With a secret its processes take nobody without it."""

    def __init__(self, folder: Path, worker_count: int, secret: str = "") -> None:
        (folder / "scratch").mkdir(parents=True)
        self.folder = folder
        self._settings = folder / "cluster.conf"
        self._settings.write_text(_PROTECTED.format(secret=secret) if secret else "")
        self._parts: list[Process] = []
        self.workers: list[Process] = []
        try:
            self.master = self._begun_master(folder)
            for number in range(worker_count):
                self.workers.append(self._begun_worker(folder, number))
        except BaseException:
            self.end()
            raise

    def _begun_master(self, folder: Path) -> str:
        part = Process(folder, "master", *self._words(_MASTER))
        self._parts.append(part)
        wait_for(lambda: part.said(_ADDRESS) is not None, "a master")
        return str(part.said(_ADDRESS))

    def _begun_worker(self, folder: Path, number: int) -> Process:
        work = folder / f"work{number}"
        part = Process(
            folder, f"worker{number}", *self._words(_WORKER), "--cores", "1", "--memory", "1G",
            "--work-dir", str(work), self.master,
        )  # fmt: skip
        self._parts.append(part)
        wait_for(lambda: part.said(re.compile("Successfully registered with master")) is not None, "a worker")
        return part

    def _words(self, part: str) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        return [part, *place, "--properties-file", str(self._settings)]

    def executors(self) -> list[int]:
        return [pid for worker in self.workers for pid in worker.executors()]

    def end(self) -> None:
        for part in reversed(self._parts):
            part.end()


class Driver:
    """The pipeline's own process; executors get the Python that is given."""

    def __init__(
        self, broker: str, master: str, python: Path, folder: Path, secret: str = "", token: Path | None = None
    ) -> None:
        """`secret` is the cluster's, `token` the file of the broker's."""
        folder.mkdir(exist_ok=True)
        self.table = folder / "table"
        self.log = folder / "driver.log"
        words = ["--addr", broker, "--master", master, "--table", str(self.table)]
        if token is not None:
            words += ["--token-file", str(token)]
        if secret:
            file = folder / "cluster-secret"
            file.write_text(secret + "\n")
            words += ["--cluster-secret", str(file)]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "postdate", "pipeline", *words], stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, env=os.environ | {"PYSPARK_PYTHON": str(python)}, start_new_session=True,
            )  # fmt: skip

    def check_alive(self) -> None:
        assert self.process.poll() is None, self.log.read_text()

    def stop(self) -> int:
        """Politely; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def end(self) -> None:
        """Whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

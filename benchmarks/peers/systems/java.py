"""RocketMQ's official Java client as a process that takes commands by lines (its side is Commands.java)."""

import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks import process
from benchmarks.peers.system import BODY_BYTES, CANCELLED, INDEX_DIGITS, TOO_LATE, UNKNOWN, NotRun, Received, System
from benchmarks.peers.systems.handle import other_key
from benchmarks.rocketmq import libraries
from benchmarks.rocketmq.program import JVM

SETTINGS = (
    "RocketMQ's Java client: 256 sends in flight, 64 threads for cancels, a push consumer whose listener takes 32"
)


class Failed(Exception):
    """The client could not do what it was told; the sentence is its own."""


@cache
def class_paths(classes: Path) -> libraries.ClassPaths:
    """Fetches and compiles what is missing. Raises NotRun."""
    try:
        return libraries.class_paths(libraries.usual_cache(), classes)
    except libraries.Unusable as error:
        raise NotRun(str(error)) from error


def versions() -> dict[str, str]:
    """Of Java and of the client. Raises NotRun."""
    try:
        libraries.check_tools()
    except libraries.Unusable as error:
        raise NotRun(str(error)) from error
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=True).stderr
    return {"RocketMQ's Java client": libraries.version(), "Java": said.splitlines()[0].split('"')[1]}


class JavaClient:
    """From the start of its JVM, which takes a second, to its end. It is connected later."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.class_paths = class_paths(folder)
        command = ["java", *JVM, f"-Duser.home={folder}", "-cp", self.class_paths.program, "Commands"]
        with (folder / "client.out").open("ab") as errors:
            self._process = subprocess.Popen(
                [*command, str(BODY_BYTES), str(INDEX_DIGITS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True, process_group=0,
            )  # fmt: skip
        self._answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, *words: object) -> str:
        """What the client answers. Raises Failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, rest = line.strip().partition(" ")
            if kind == "ok":
                return rest
            if kind == "failed":
                raise Failed(rest)
        raise Failed("the client has ended")

    def stop(self) -> None:
        process.end(self._process)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def schedule(self, dues_ms: Sequence[int], first_index: int) -> list[bytes | str]:
        dues, handles = self._folder / "dues", self._folder / "handles"
        np.asarray(dues_ms, "<i8").tofile(dues)
        self.tell("schedule", first_index, dues, handles)
        return [*handles.read_text().splitlines()]

    def receive(self, count: int, limit_s: float) -> Received:
        file = self._folder / "received"
        self.tell("receive", count, int(limit_s * 1_000), file)
        pairs = np.fromfile(file, "<i8").reshape(-1, 2)
        return Received(pairs[:, 0], pairs[:, 1] / 1_000)

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        """What was answered to each: "cancelled", or a sentence."""
        asked, answered = self._folder / "asked", self._folder / "answered"
        asked.write_text("".join(f"{handle!s}\n" for handle in handles))
        self.tell("cancel", asked, answered)
        return answered.read_text().splitlines()

    def visible(self) -> int:
        return int(self.tell("visible"))


class JavaSystem(System):
    """A server with this client. Its JVM is there before the server is started: a restart of the one must not count the
    start of the other."""

    topic = "peers"

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._java: JavaClient | None = None

    @abstractmethod
    def start_server(self) -> str:
        """Its route address."""

    @abstractmethod
    def kill_server(self) -> None: ...

    @abstractmethod
    def stop_server(self) -> None: ...

    @property
    def _client(self) -> JavaClient:
        assert self._java is not None, "it is not started"
        return self._java

    def _started(self) -> JavaClient:
        """Its folder is beside the server's: what a client writes is not the server's disk."""
        return JavaClient(self.folder.with_name(f"{self.folder.name}-client"))

    def start(self) -> None:
        self._java = self._java or self._started()
        self._java.tell("connect", self.start_server(), self.topic)

    def kill(self) -> None:
        self.kill_server()
        self._stop_client()
        self._java = self._started()

    def stop(self) -> None:
        self._stop_client()
        self.stop_server()

    def _stop_client(self) -> None:
        if self._java is not None:
            self._java.stop()
            self._java = None

    def client_pids(self) -> list[int]:
        return [self._java.pid] if self._java is not None else []

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        return self._client.schedule(dues_ms, first_index)

    def receive(self, count: int, limit_s: float) -> Received:
        return self._client.receive(count, limit_s)

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        return [_verdict(answer) for answer in self._client.cancel(handles)]

    def visible(self) -> int:
        return self._client.visible()

    def stranger(self, handle: bytes | str) -> str:
        return other_key(str(handle))


def _verdict(answer: str) -> str:
    """The client tells success, or the broker's sentence."""
    if answer == CANCELLED:
        return CANCELLED
    return TOO_LATE if "delivered already" in answer else UNKNOWN

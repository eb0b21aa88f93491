"""RocketMQ's official Java client against a real broker: builds the programs in java/src, runs them, prints a table.

Each program has a broker of its own, a `postdate up` process on free ports, whose folder is checked afterwards. Several
run at the same time. What is fetched and built is kept in java/target and in Maven's own cache only.

exit codes: 0 all is well, or the registry cannot be reached (said as SKIPPED), 1 a program failed, 2 Java or Maven is
missing or the programs do not build
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

JAVA = Path(__file__).parent / "java"
LIBRARIES, CLASSES, STAMP = JAVA / "target" / "lib", JAVA / "target" / "classes", JAVA / "target" / "stamp"

COPY = "org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies"  # in full: a short name is looked up online
AT_ONCE = 3  # programs at a time: they mostly wait
FETCH_S = 180.0
PROGRAM_S = 150.0
START_S = STOP_S = 20.0
PORTS = range(20_000, 30_000)  # below those of outgoing connections: a broker comes back to its port after a kill
RESTART = "restart please"

# A JVM that starts fast and stays small. Its client logs into our folder, and keeps the offsets of broadcasting there.
JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Drocketmq.log.level=warn")
BINARY = "-Drocketmq.serialize.type=ROCKETMQ"

# Small files. With a lead of 1 s most delays are far ones, and without fresh queues a group begins where it says.
PLAIN = {"segment_bytes": "16MiB"}
FAR = PLAIN | {"lead_ms": "1s", "fresh_queue_bytes": "0", "message_delay_level": "1s 2s 1s 2s 3s 4s"}

# What Maven says when it is the registry's fault, or that of the way there.
UNREACHABLE = (
    "Unknown host", "Temporary failure in name resolution", "Connect to ", "Connection refused", "Connection reset",
    "Connection timed out", "connect timed out", "Read timed out", "No route to host", "Network is unreachable",
    "Could not transfer", "failed to transfer", "Remote host terminated", "Service Unavailable",
)  # fmt: skip


class Program(NamedTuple):
    """A class in java/src, and what it needs."""

    title: str
    main: str
    settings: dict[str, str]
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()  # made beforehand, as an operator would


# Long ones first.
PROGRAMS = (
    Program("retries and dead letters", "Retries", FAR),
    Program("killed and restarted", "Restart", PLAIN),
    Program("popping", "Pops", PLAIN | {"retry_times_max": "1"}),
    Program("the documentation's pair", "Classic", PLAIN),
    Program("groups: share, order, broadcast, tags", "Groups", PLAIN),
    Program("where a group begins", "Begin", FAR),
    Program("delays, near", "Delays", PLAIN, ("5000",)),
    Program("delays, far, binary headers", "Delays", FAR, ("2000",), (BINARY,)),
    Program("recall and delete marker, near", "Recall", PLAIN),
    Program("recall and delete marker, far", "Recall", FAR),
    Program("lite pull", "LitePull", PLAIN),
    Program("lite pull, binary headers", "LitePull", PLAIN, (), (BINARY,)),
    Program("sends", "Sends", PLAIN, ("json",)),
    Program("sends, binary headers", "Sends", PLAIN, ("binary",), (BINARY,)),
    Program("the README's quick start", "QuickStart", PLAIN),
    Program("refusals", "Refusals", PLAIN | {"auto_create_topics": "false"}, (), (), ("known",)),
)


class Unusable(Exception):
    """The programs cannot be run here; the sentence says why."""


class Unreachable(Exception):
    """The registry cannot be reached; the sentence says what Maven said."""


class Failed(Exception):
    """A program could not even begin; the sentence says why."""


class Result(NamedTuple):
    program: Program
    seconds: float
    lines: list[str]
    problem: str  # empty where all is well


# -- building -------------------------------------------------------------------------------------------------------


def build() -> None:
    """Fetches the client and compiles the programs. Raises Unusable and Unreachable."""
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            raise Unusable(f"{tool} is not on the PATH: a JDK of version 11 or later and Maven are needed")
    fetch()
    sources = [str(file) for file in sorted((JAVA / "src").glob("*.java"))]
    shutil.rmtree(CLASSES, ignore_errors=True)
    command = ["javac", "--release", "11", "-encoding", "UTF-8", "-proc:none", "-nowarn", "-d", str(CLASSES)]
    compiled = finished([*command, "-cp", f"{LIBRARIES}/*", *sources], FETCH_S)
    if compiled.returncode:
        raise Unusable(f"the programs do not compile:\n{compiled.stdout}")


def fetch() -> None:
    """The client and what it needs, into LIBRARIES; not again while pom.xml stays the same."""
    stamp = hashlib.sha256((JAVA / "pom.xml").read_bytes()).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == stamp:
        return
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    goal = [COPY, f"-DoutputDirectory={LIBRARIES}", "-DincludeScope=runtime"]
    try:
        fetched = finished(["mvn", "-q", "-B", "-Dstyle.color=never", "-f", str(JAVA / "pom.xml"), *goal], FETCH_S)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"Maven was not ready after {FETCH_S:.0f} s") from error
    if fetched.returncode:
        lines = [line for line in fetched.stdout.splitlines() if any(sign in line for sign in UNREACHABLE)]
        raise Unreachable(lines[0]) if lines else Unusable(f"Maven failed:\n{fetched.stdout}")
    STAMP.write_text(stamp)


def finished(command: Sequence[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s
    )


# -- the broker -----------------------------------------------------------------------------------------------------


class Server:
    """A broker process on a folder, always on the same ports."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._data = folder / "data"
        self._output = folder / "server.log"
        ports = free_ports()
        self.route = f"127.0.0.1:{ports[0]}"
        named = settings | {"route_port": str(ports[0]), "broker_port": str(ports[1]), "vip_port": "-1"}
        flags = itertools.chain(*((f"--{name.replace('_', '-')}", value) for name, value in named.items()))
        self._command = [*POSTDATE, "up", "--json", "--data", str(self._data), *flags]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        with self._output.open("a") as output:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output, text=True
            )
        self._process = process
        with limited(process, START_S):
            assert process.stdout is not None
            line = process.stdout.readline()
        if not line:
            self._end()
            raise Failed(f"the broker did not start:\n{self.said()}")
        assert json.loads(line)["route"] == self.route

    def kill(self) -> None:
        """As a crash would."""
        assert self._process is not None
        self._process.kill()
        self._end()

    def stop(self) -> str:
        """Ends it as an operator would, and says what is wrong with how it ended, with its log or with its folder."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        with limited(self._process, STOP_S):
            code = self._end()
        if code:
            return f"the broker ended with exit code {code}:\n{self.said()}"
        if " error " in self.said() or "Traceback" in self.said():
            return f"the broker told of errors:\n{self.said()}"
        checked = finished([*POSTDATE, "check", str(self._data)], START_S)
        return f"postdate check ended with {checked.returncode}:\n{checked.stdout}" if checked.returncode else ""

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        code = process.wait()
        process.stdout.close()
        return code

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def said(self) -> str:
        return self._output.read_text()


POSTDATE = (sys.executable, "-m", "postdate")


def free_ports() -> tuple[int, int]:
    """Two ports that nobody listens on."""
    found: list[int] = []
    while len(found) < 2:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found[0], found[1]


@contextmanager
def limited(process: "subprocess.Popen[str]", limit_s: float) -> Iterator[None]:
    """Kills a process that takes longer."""
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- the programs ---------------------------------------------------------------------------------------------------


def run(program: Program) -> Result:
    """Runs a program against a broker of its own."""
    begin = time.monotonic()
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="postdate-interop-") as folder:
        try:
            problem = problem_of(program, Path(folder), lines)
        except Failed as error:
            problem = str(error)
    return Result(program, time.monotonic() - begin, lines, problem)


def problem_of(program: Program, folder: Path, lines: list[str]) -> str:
    """Runs a program and returns what went wrong, empty where nothing did. Raises Failed."""
    server = Server(folder, program.settings)
    try:
        server.start()
        for topic in program.topics:
            create(topic, server)
        code = told(program, server, folder, lines)
        problem = server.stop()
    finally:
        if server.is_running:
            server.kill()
    return f"{what_failed(lines, code)}\n{problem or server.said()}{client_log(folder)}" if code else problem


def create(topic: str, server: Server) -> None:
    made = finished([*POSTDATE, "topic", "create", topic, "--addr", server.route], START_S)
    if made.returncode:
        raise Failed(f"topic {topic} cannot be made:\n{made.stdout}")


def told(program: Program, server: Server, folder: Path, lines: list[str]) -> int:
    """Runs the JVM, collects what it prints, restarts its broker when it asks for that; returns its exit code."""
    places = (f"-Drocketmq.log.root={folder}/client", f"-Drocketmq.client.localOffsetStoreDir={folder}/offsets")
    path = os.pathsep.join((str(CLASSES), f"{LIBRARIES}/*"))
    command = ["java", *JVM, *program.flags, *places, "-cp", path, program.main, server.route, *program.arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        with limited(process, PROGRAM_S):
            assert process.stdin is not None
            assert process.stdout is not None
            follow(process.stdout, process.stdin, server, lines)
            return process.wait()
    finally:
        process.kill()
        process.communicate()


def follow(output: IO[str], answers: IO[str], server: Server, lines: list[str]) -> None:
    for line in output:
        if line.strip() == RESTART:
            server.kill()
            server.start()
            answers.write("restarted\n")
            answers.flush()
        else:
            lines.append(line.rstrip())


def what_failed(lines: list[str], code: int) -> str:
    if code == -signal.SIGKILL:
        return f"it was not ready after {PROGRAM_S:.0f} s"
    return next((line for line in lines if line.startswith("FAILED")), f"it ended with exit code {code}")


def client_log(folder: Path) -> str:
    file = folder / "client" / "rocketmq_client.log"
    return "\nthe end of the client's log:\n" + file.read_text(errors="replace")[-4_000:] if file.is_file() else ""


# -- what is told ---------------------------------------------------------------------------------------------------


def tell(result: Result) -> None:
    print(f"\n== {result.program.title}")
    for line in result.lines:
        print(f"   {line}")
    if result.problem:
        print(f"   {result.problem}")
    sys.stdout.flush()


def tell_table(results: Sequence[Result]) -> None:
    width = max(len(result.program.title) for result in results)
    print()
    for result in results:
        checks = sum(line.startswith("ok: ") for line in result.lines)
        verdict = "FAILED" if result.problem else "ok"
        print(f"{result.program.title:<{width}}  {verdict:<6}  {checks:>3} checks  {result.seconds:6.1f} s")


def main(names: Sequence[str]) -> int:
    """Runs the programs of these classes, or all."""
    begin = time.monotonic()
    try:
        build()
    except Unreachable as error:
        print(f"SKIPPED: the registry of the Java client cannot be reached: {error}")
        return 0
    except Unusable as error:
        print(f"NOT RUN: {error}")
        return 2
    built = time.monotonic()
    programs = [program for program in PROGRAMS if not names or program.main in names]
    results = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for result in pool.map(run, programs):
            tell(result)
            results.append(result)
    tell_table(results)
    print(f"built in {built - begin:.0f} s, run in {time.monotonic() - built:.0f} s")
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

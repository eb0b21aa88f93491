"""Our Java programs: one process per measure and system, and what it and the server's process tell."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from benchmarks import process
from benchmarks.bench import say
from benchmarks.rocketmq.systems import System

JVM = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC")  # the same for both systems
PROGRAM_S = 1_800.0
PAUSES = ("ready", "measured")
SLACKS = (1.25, 2.0, 4.0)  # how much longer than expected sending may take before the first is due
TOO_SOON = 3  # the exit code of a program that was slower than that


class Failed(Exception):
    """A measure failed; the sentence says which, and what the program said."""


class TooSoon(Failed):
    """Messages were due before all were sent: a busy machine. Nothing was measured yet."""


def route_of(system: System, _: str) -> str:
    """Where a remoting client begins: it makes its topic itself."""
    return system.route_address


class Program:
    """Runs measures with one class path, in one folder. `begin` makes ready for a run on a topic, and returns the
    address that the program, of which `main` is the class, is given.
    """

    def __init__(
        self, class_path: str, folder: Path, main: str = "Remoting", begin: Callable[[System, str], str] = route_of
    ) -> None:
        self._class_path, self._folder, self._main, self._begin = class_path, folder, main, begin
        self._topic_count = 0

    def figures(self, system: System, arguments: Sequence[str]) -> dict[str, float]:
        """Runs one measure, again with more slack where messages were due too soon. Raises Failed."""
        for slack in SLACKS[:-1]:
            try:
                return self._figures(system, [*arguments, str(slack)])
            except TooSoon as error:
                say(f"    again, with more time to send: {error}")
        return self._figures(system, [*arguments, str(SLACKS[-1])])

    def _figures(self, system: System, arguments: Sequence[str]) -> dict[str, float]:
        """Runs one measure on a topic of its own; `cpu_s` of its figures is the server's CPU. Raises Failed."""
        self._topic_count += 1
        home = f"-Duser.home={self._folder}"  # where the client would keep things
        topic = f"bench-{self._topic_count}"
        address = self._begin(system, topic)
        command = ["java", *JVM, home, "-cp", self._class_path, self._main, address, topic, *arguments]
        with (self._folder / "client.out").open("w+") as errors, _running(command, errors) as started:
            assert started.stdin is not None
            assert started.stdout is not None
            lines, spent_s = followed(started.stdin, started.stdout, system.pid)
            if code := started.wait():
                errors.seek(0)
                what = f"{system.name}, {' '.join(arguments)}: exit code {code}\n{errors.read()}"
                raise TooSoon(what) if code == TOO_SOON else Failed(what)
        return figures_in(lines) | {"cpu_s": spent_s[1] - spent_s[0]}


@contextmanager
def _running(command: Sequence[str], errors: IO[str]) -> Iterator["subprocess.Popen[str]"]:
    """A process that is killed when it takes too long, and at the end in any case."""
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
    )
    timer = threading.Timer(PROGRAM_S, started.kill)
    timer.start()
    try:
        yield started
    finally:
        timer.cancel()
        started.kill()
        started.communicate()


def followed(answers: IO[str], output: IO[str], pid: int) -> tuple[list[str], list[float]]:
    """The program's lines, and the CPU that the server had spent at each pause."""
    lines, spent_s = [], []
    for line in output:
        lines.append(line.strip())
        if lines[-1] in PAUSES:
            spent_s.append(process.cpu_s(pid))
            answers.write("\n")
            answers.flush()
    return lines, spent_s


def figures_in(lines: Sequence[str]) -> dict[str, float]:
    """What the lines `figure NAME VALUE` say; other lines are not ours."""
    found = [line.split() for line in lines if line.startswith("figure ")]
    return {name: float(value) for _, name, value in found}

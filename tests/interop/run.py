"""Other people's clients against a real broker: builds the programs of each language, runs them, prints a table.

Arguments are names of languages, of programs, and of ways to reach the broker: `go`, `Delays`, `go Delays`, `signed`,
`tls java`. The ways are plain, signed (every request, by a user) and tls; by default every program is run plain, one of
each language also signed, and h2spec also over TLS. Each program has a broker of its own, a `postdate up` process on
free ports, whose folder is checked afterwards. Several run at the same time. What is fetched and built is kept beside
the programs and in the cache of each language's tools only.

exit codes: 0 all is well, or a registry cannot be reached (said as SKIPPED), 1 a program failed, 2 a name is unknown,
or programs of a language could not be run because a tool is missing or they do not build (said as NOT RUN)
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import go
import grpc_go
import grpc_java
import grpc_node
import grpc_python
import grpc_rust
import h2spec
import java
import mqadmin
import node
import python
from program import RESTART, Access, Failed, Language, Program, Unreachable, Unusable, provide
from server import CERTIFICATE, Server, limited

REMOTING = (java.LANGUAGE, go.LANGUAGE, node.LANGUAGE, python.LANGUAGE, mqadmin.LANGUAGE)
GRPC = (grpc_java.LANGUAGE, grpc_go.LANGUAGE, grpc_node.LANGUAGE, grpc_python.LANGUAGE, grpc_rust.LANGUAGE)
LANGUAGES = (*GRPC, *REMOTING, h2spec.LANGUAGE)
AT_ONCE = 4  # programs at a time: they mostly wait
PLAIN, SIGNED, TLS = WAYS = ("plain", "signed", "tls")
PROGRAM_S = 600.0  # every command of mqadmin is a JVM of its own


class Task(NamedTuple):
    language: Language
    program: Program
    way: str

    @property
    def title(self) -> str:
        way = "" if self.way == PLAIN else f", {self.way}"
        return f"{self.language.name}: {self.program.title}{way}"

    @property
    def is_usual(self) -> bool:
        """Whether it is run where nobody asks for a way."""
        return {PLAIN: True, SIGNED: self.program.is_always_signed, TLS: self.program.is_always_tls}[self.way]

    @property
    def skipped(self) -> str:
        """Why it cannot be run, empty where it can."""
        return self.language.no_tls if self.way == TLS else ""


class Result(NamedTuple):
    task: Task
    seconds: float
    lines: list[str]
    problem: str  # empty where all is well


# -- what to run ----------------------------------------------------------------------------------------------------


def chosen(names: Sequence[str]) -> list[Task]:
    """The programs of these names in the languages of these names, by the ways of these names; without a name of a
    kind, all of that kind, or the usual ways. Raises Unusable.
    """
    tasks = [
        Task(language, program, way)
        for language in LANGUAGES
        for program in language.programs
        for way in WAYS
        if way == PLAIN or (language.is_signing and not program.is_plain_only)
    ]
    languages = {language.name for language in LANGUAGES}
    programs = {task.program.name for task in tasks}
    ways = set(WAYS).intersection(names)
    for name in set(names) - languages - programs - ways:
        raise Unusable(f"{name} is no language ({', '.join(sorted(languages))}) and no program of one")
    languages, programs = languages.intersection(names) or languages, programs.intersection(names) or programs
    tasks = [task for task in tasks if task.language.name in languages and task.program.name in programs]
    if ways:
        return [task for task in tasks if task.way in ways]
    return [task for task in tasks if task.is_usual]


def long_first(tasks: Sequence[Task]) -> list[Task]:
    """Each language lists its long ones first: the first of all, then the second of all, and so on."""
    return sorted(tasks, key=lambda task: task.language.programs.index(task.program))


def obstacle(language: Language) -> str:
    """Builds the programs of a language; returns what keeps them from being run, empty where nothing does."""
    try:
        provide(language.tools)
        language.build()
    except Unreachable as error:
        return f"SKIPPED {language.name}: the registry of {language.client} cannot be reached: {error}"
    except (Unusable, subprocess.TimeoutExpired) as error:
        return f"NOT RUN {language.name}: {error}"
    return ""


# -- the programs ---------------------------------------------------------------------------------------------------


def run(task: Task) -> Result:
    """Runs a program against a broker of its own."""
    begin = time.monotonic()
    lines: list[str] = []
    with tempfile.TemporaryDirectory(prefix="postdate-interop-") as folder:
        try:
            problem = problem_of(task, Path(folder), lines)
        except Failed as error:
            problem = str(error)
    return Result(task, time.monotonic() - begin, lines, problem)


def problem_of(task: Task, folder: Path, lines: list[str]) -> str:
    """Runs a program and returns what went wrong, empty where nothing did. Raises Failed."""
    user = ("interop", "the-secret-of-interop") if task.way != PLAIN else ("", "")
    access = Access(*user, str(folder / CERTIFICATE) if task.way == TLS else "")
    server = Server(folder, task.program.settings, access)
    own = folder / "client"
    own.mkdir()
    try:
        server.start()
        for topic in task.program.topics:
            server.create("topic", topic)
        for group in task.program.groups:
            server.create("group", *group)
        address = server.grpc if task.language.is_grpc else server.route
        command = task.language.command(task.program, address, own, access)
        code = told(command, server, own, lines, access)
        problem = server.stop()
    finally:
        if server.is_running:
            server.kill()
    return f"{what_failed(lines, code)}\n{problem or server.said()}{client_log(own)}" if code else problem


def told(command: list[str], server: Server, own: Path, lines: list[str], access: Access) -> int:
    """Runs it, collects what it prints, restarts its broker when it asks for that; returns its exit code. Some clients
    write into the home folder: it is `own`.
    """
    environment = {**os.environ, **access.environment(), "HOME": str(own)}
    process = subprocess.Popen(
        command, cwd=own, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
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


def client_log(own: Path) -> str:
    files = [file for file in sorted(own.rglob("*.log")) if file.is_file() and file.stat().st_size]
    return "".join(f"\nthe end of {file.name}:\n{file.read_text(errors='replace')[-4_000:]}" for file in files)


# -- what is told ---------------------------------------------------------------------------------------------------


def tell(result: Result) -> None:
    print(f"\n== {result.task.title}")
    for line in result.lines:
        print(f"   {line}")
    if result.problem:
        print(f"   {result.problem}")
    sys.stdout.flush()


def tell_table(results: Sequence[Result]) -> None:
    width = max((len(result.task.title) for result in results), default=0)
    print()
    for result in results:
        checks = sum(line.startswith("ok: ") for line in result.lines)
        verdict = "FAILED" if result.problem else "ok"
        print(f"{result.task.title:<{width}}  {verdict:<6}  {checks:>3} checks  {result.seconds:6.1f} s")
    for result in results:  # once more, where a long run is looked at first: at its end
        if result.problem:
            print(f"{result.task.title} FAILED: {result.problem[:1_000]}")


def main(names: Sequence[str]) -> int:
    begin = time.monotonic()
    try:
        tasks = chosen(names)
    except Unusable as error:
        print(f"NOT RUN: {error}")
        return 2
    languages = list({task.language.name: task.language for task in tasks}.values())
    with ThreadPoolExecutor() as pool:
        obstacles = dict(zip([language.name for language in languages], pool.map(obstacle, languages), strict=True))
    built = time.monotonic()
    results = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runnable = [task for task in long_first(tasks) if not (obstacles[task.language.name] or task.skipped)]
        for result in pool.map(run, runnable):
            tell(result)
            results.append(result)
    tell_table(sorted(results, key=lambda result: tasks.index(result.task)))
    sentences = [sentence for sentence in obstacles.values() if sentence]
    for sentence in sentences:
        print(sentence)
    for name, reason in {task.language.name: task.skipped for task in tasks if task.skipped}.items():
        print(f"SKIPPED {name}, tls: {reason}; docs/rocketmq.md has a recipe for a tunnel")
    print(f"built in {built - begin:.0f} s, run in {time.monotonic() - built:.0f} s")
    if any(result.problem for result in results):
        return 1
    return 2 if any(sentence.startswith("NOT RUN") for sentence in sentences) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

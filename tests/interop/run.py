"""Other people's clients against a real broker: builds the programs of each language, runs them, prints a table.

Arguments are names of languages and of programs: `go`, `Delays`, or `go Delays`; by default everything is run. Each
program has a broker of its own, a `postdate up` process on free ports, whose folder is checked afterwards. Several run
at the same time. What is fetched and built is kept beside the programs and in the cache of each language's tools only.

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
import java
import mqadmin
import node
import python
from program import RESTART, Failed, Language, Program, Unreachable, Unusable, provide
from server import Server, limited

LANGUAGES = (java.LANGUAGE, go.LANGUAGE, node.LANGUAGE, python.LANGUAGE, mqadmin.LANGUAGE)
AT_ONCE = 4  # programs at a time: they mostly wait
PROGRAM_S = 600.0  # every command of mqadmin is a JVM of its own


class Task(NamedTuple):
    language: Language
    program: Program

    @property
    def title(self) -> str:
        return f"{self.language.name}: {self.program.title}"


class Result(NamedTuple):
    task: Task
    seconds: float
    lines: list[str]
    problem: str  # empty where all is well


# -- what to run ----------------------------------------------------------------------------------------------------


def chosen(names: Sequence[str]) -> list[Task]:
    """The programs of these names in the languages of these names; without a name of either kind, all of that kind.
    Raises Unusable.
    """
    tasks = [Task(language, program) for language in LANGUAGES for program in language.programs]
    languages = {language.name for language in LANGUAGES}
    programs = {task.program.name for task in tasks}
    for name in set(names) - languages - programs:
        raise Unusable(f"{name} is no language ({', '.join(sorted(languages))}) and no program of one")
    languages, programs = languages.intersection(names) or languages, programs.intersection(names) or programs
    return [task for task in tasks if task.language.name in languages and task.program.name in programs]


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
    server = Server(folder, task.program.settings)
    own = folder / "client"
    own.mkdir()
    try:
        server.start()
        for topic in task.program.topics:
            server.create(topic)
        code = told(task.language.command(task.program, server.route, own), server, own, lines)
        problem = server.stop()
    finally:
        if server.is_running:
            server.kill()
    return f"{what_failed(lines, code)}\n{problem or server.said()}{client_log(own)}" if code else problem


def told(command: list[str], server: Server, own: Path, lines: list[str]) -> int:
    """Runs it, collects what it prints, restarts its broker when it asks for that; returns its exit code. Some clients
    write into the home folder: it is `own`.
    """
    process = subprocess.Popen(
        command, cwd=own, env={**os.environ, "HOME": str(own)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
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
        for result in pool.map(run, [task for task in long_first(tasks) if not obstacles[task.language.name]]):
            tell(result)
            results.append(result)
    tell_table(sorted(results, key=lambda result: tasks.index(result.task)))
    sentences = [sentence for sentence in obstacles.values() if sentence]
    for sentence in sentences:
        print(sentence)
    print(f"built in {built - begin:.0f} s, run in {time.monotonic() - built:.0f} s")
    if any(result.problem for result in results):
        return 1
    return 2 if any(sentence.startswith("NOT RUN") for sentence in sentences) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

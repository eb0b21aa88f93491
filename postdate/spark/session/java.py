"""Java for Spark: where it is, and which version, or why none was found.

Commands that start Spark look here first: without Java, PySpark fails with a stack trace that does not say what to do.
The module needs the standard library alone, so that `postdate up` can look before it loads anything of Spark. It
believes a Java that prints its version: folders are named in many ways, and a file may belong to another machine.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

VERSION_MIN = 17  # of Spark 4
ANSWER_S = 10.0  # a cold disk and a busy machine take less
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
# Patterns of folders, in the order of their names: of two that are new enough Spark knows the older one better.
USUAL_PLACES = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java*",
    "/opt/java/*",
    "/opt/jdk*",
    "~/.sdkman/candidates/java/*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
)
_MAC_FINDER = "/usr/libexec/java_home"
INSTALL = "install one with: sudo apt-get install openjdk-17-jre-headless"


class Java(NamedTuple):
    """A Java that runs."""

    home: str
    version: int


class Missing(NamedTuple):
    """No Java is new enough: what was found in each place."""

    reasons: tuple[str, ...]

    @property
    def sentence(self) -> str:
        found = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"no Java {VERSION_MIN} or newer was found{found}"


def find(
    environ: Mapping[str, str], home: str = "", places: Sequence[str] = USUAL_PLACES, answer_s: float = ANSWER_S
) -> Java | Missing:
    """Finds the first Java that is new enough: in `home` alone where that is not empty, else in JAVA_HOME, on the PATH,
    in the usual places. Runs every candidate until one fits, each for `answer_s` seconds at most.
    """
    reasons = []
    for label, candidate in [("java_home", home)] if home else _candidates(environ, places):
        found = _ask_version(Path(candidate).expanduser(), answer_s)
        if isinstance(found, Java):
            return found
        reasons.append(f"{label} {candidate}: {found}")
    return Missing(tuple(reasons))


def _candidates(environ: Mapping[str, str], places: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Where each candidate comes from, and its folder; no folder twice."""
    seen: set[str] = set()
    for label, candidate in _named(environ, places):
        real = os.path.realpath(os.path.expanduser(candidate))
        if real not in seen:
            seen.add(real)
            yield label, candidate


def _named(environ: Mapping[str, str], places: Sequence[str]) -> Iterator[tuple[str, str]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", environ["JAVA_HOME"]
    program = shutil.which("java", path=environ.get("PATH", ""))
    if program:
        yield "PATH", str(Path(os.path.realpath(program)).parent.parent)
    if os.access(_MAC_FINDER, os.X_OK):  # on macOS /usr/bin/java is there even without a Java
        done = _run([_MAC_FINDER, "-v", f"{VERSION_MIN}+"])
        if isinstance(done, subprocess.CompletedProcess) and done.returncode == 0:
            yield "found", done.stdout.strip()
    for place in places:
        # Written as in a shell; most of them are not there.
        pattern = Path(place).expanduser()
        homes = sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
        yield from (("found", str(home)) for home in homes if (home / "bin" / "java").exists())


def _ask_version(home: Path, answer_s: float) -> Java | str:
    """The Java of a home, or what is wrong with it."""
    done = _run([str(home / "bin" / "java"), "-version"], answer_s)
    if isinstance(done, str):
        return done
    match = _VERSION.search(done.stderr + done.stdout)
    if done.returncode:
        return f"java -version ended with code {done.returncode}"
    if match is None:
        return "java -version told no version"
    version = int(match[2] or 0) if match[1] == "1" else int(match[1])  # "1.8.0" is Java 8
    return Java(str(home), version) if version >= VERSION_MIN else f"version {version}"


def _run(command: list[str], answer_s: float = ANSWER_S) -> "subprocess.CompletedProcess[str] | str":
    """Runs a program; returns what it printed, or why it could not be run."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=answer_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {answer_s:.0f} s"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"


def main() -> int:
    """Prints the home of the Java that Spark would get, for scripts; 1 and the reasons where there is none."""
    found = find(os.environ)
    if isinstance(found, Missing):
        print(found.sentence, file=sys.stderr)
        return 1
    print(found.home)
    return 0


if __name__ == "__main__":
    sys.exit(main())

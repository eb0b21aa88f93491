"""Java for Spark: where it is, and which version, or why none was found.

Whoever starts Spark looks here first: without Java, PySpark fails with a stack trace that tells nobody what to do. Only
the standard library is used, so that `postdate up` can look before anything of Spark is loaded. A Java is believed when
it has said its version itself: folders are named in many ways, and a file may belong to another machine.
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
_ANSWER_S = 10.0  # a cold disk, a busy machine: a Java that says nothing for longer is none
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
# Patterns of folders, in the order of their names: of two that are new enough the older one is better known to Spark.
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
    """No Java that is new enough: what was found at each place that was looked at."""

    reasons: tuple[str, ...]

    @property
    def sentence(self) -> str:
        found = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"no Java {VERSION_MIN} or newer was found{found}"


def find(environ: Mapping[str, str], home: str = "", places: Sequence[str] = USUAL_PLACES) -> Java | Missing:
    """The first Java that is new enough: in `home` alone where that is given, else in JAVA_HOME, on the PATH, in the
    usual places. Runs every candidate until one will do, each for some seconds at most.
    """
    reasons = []
    for label, candidate in [("java_home", home)] if home else _candidates(environ, places):
        found = _asked(Path(candidate).expanduser())
        if isinstance(found, Java):
            return found
        reasons.append(f"{label} {candidate}: {found}")
    return Missing(tuple(reasons))


def _candidates(environ: Mapping[str, str], places: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Where it came from, and the folder; no folder twice."""
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
        yield "PATH", _home_of(program)
    yield from (("found", home) for home in _told_by_mac())
    for place in places:
        # As a user of the shell would write it; one that is not there is no news.
        pattern = Path(place).expanduser()
        homes = sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
        yield from (("found", str(home)) for home in homes if (home / "bin" / "java").exists())


def _home_of(program: str) -> str:
    """On the PATH stands a chain of links; the home is above the folder where it ends."""
    return str(Path(os.path.realpath(program)).parent.parent)


def _told_by_mac() -> Iterator[str]:
    """On macOS /usr/bin/java is there without any Java behind it, and this program knows where one is."""
    if not os.access(_MAC_FINDER, os.X_OK):
        return
    told = _run([_MAC_FINDER, "-v", f"{VERSION_MIN}+"])
    if isinstance(told, subprocess.CompletedProcess) and told.returncode == 0:
        yield told.stdout.strip()


def _asked(home: Path) -> Java | str:
    """The Java of a home, or what is wrong with it."""
    told = _run([str(home / "bin" / "java"), "-version"])
    if isinstance(told, str):
        return told
    match = _VERSION.search(told.stderr + told.stdout)
    if told.returncode:
        return f"java -version ended with code {told.returncode}"
    if match is None:
        return "java -version told no version"
    version = int(match[2] or 0) if match[1] == "1" else int(match[1])  # "1.8.0" is Java 8
    return Java(str(home), version) if version >= VERSION_MIN else f"version {version}"


def _run(command: list[str]) -> "subprocess.CompletedProcess[str] | str":
    """What a program said, or why it could not be asked."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_ANSWER_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_ANSWER_S:.0f} s"
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

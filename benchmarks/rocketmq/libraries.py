"""RocketMQ's jars, fetched by Maven into a cache outside the tree, and our Java programs, compiled beside them."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks.bench import say

HERE = Path(__file__).parent
POM, SOURCES = HERE / "pom.xml", HERE / "java"
GRPC_POM, GRPC_SOURCES = HERE / "grpc" / "pom.xml", HERE / "grpc" / "java"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:copy-dependencies"  # in full: a short name is looked up online
LOG_SETTINGS = "rmq.logback.xml"  # RocketMQ looks for this name first
FETCH_S = 600.0
TOOLS = ("java", "javac", "mvn")
CACHE_NAME = "POSTDATE_ROCKETMQ_CACHE"


class Unusable(Exception):
    """The comparison cannot be made here; the sentence says why."""


def version(pom: Path = POM) -> str:
    """Which RocketMQ, or which client."""
    found = ElementTree.parse(pom).find(".//{*}rocketmq.version")
    assert found is not None
    assert found.text is not None
    return found.text


def usual_cache() -> Path:
    """Where the jars are kept unless a command is told otherwise."""
    return Path(os.environ.get(CACHE_NAME) or Path.home() / ".cache" / "postdate" / f"rocketmq-{version()}")


class ClassPaths(NamedTuple):
    """Of RocketMQ's servers, as they are published, and of our program."""

    servers: str
    program: str


def class_paths(cache: Path, classes: Path) -> ClassPaths:
    """Fetches and compiles what is missing; our classes go to the folder `classes`. Raises Unusable."""
    check_tools()
    jars = fetched(cache)
    _compile(SOURCES, jars, classes)
    shutil.copy(SOURCES / LOG_SETTINGS, classes)
    return ClassPaths(f"{jars}/*", f"{classes}:{jars}/*")


def grpc_class_paths(cache: Path, classes: Path) -> ClassPaths:
    """The same with our program for gRPC, which meets none of the servers' jars. Raises Unusable."""
    check_tools()
    servers, client = fetched(cache), fetched(cache / "grpc", GRPC_POM)
    _compile(GRPC_SOURCES, client, classes)
    return ClassPaths(f"{servers}/*", f"{classes}:{client}/*")


def check_tools() -> None:
    """Raises Unusable."""
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise Unusable(f"{tool} is not on the PATH: a JDK of version 11 or later and Maven are needed")


def fetched(cache: Path, pom: Path = POM) -> Path:
    """The folder of the jars; nothing is fetched again while pom.xml stays the same."""
    jars, stamp = cache / "lib", cache / "stamp"
    wanted = hashlib.sha256(pom.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        say(f"fetching RocketMQ {version(pom)} into {cache} ...")
        shutil.rmtree(jars, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        goal = [COPY, f"-DoutputDirectory={jars}", "-DincludeScope=runtime"]
        _run(["mvn", "-q", "-B", "-Dstyle.color=never", "-f", str(pom), *goal], "Maven could not fetch RocketMQ")
        stamp.write_text(wanted)
    return jars


def _compile(sources: Path, jars: Path, classes: Path) -> None:
    """A folder of sources, and of those that all programs share what it needs."""
    files = [str(file) for file in sorted(sources.glob("*.java"))]
    command = ["javac", "--release", "11", "-encoding", "UTF-8", "-proc:none", "-nowarn", "-d", str(classes)]
    _run([*command, "-sourcepath", str(SOURCES), "-cp", f"{jars}/*", *files], "our program does not compile")


def _run(command: Sequence[str], problem: str) -> None:
    """Runs a tool to its end. Raises Unusable, with what it said."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=FETCH_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unusable(f"{problem}: not ready after {FETCH_S:.0f} s") from error
    if done.returncode:
        raise Unusable(f"{problem} (exit code {done.returncode}):\n{done.stdout.strip()}")

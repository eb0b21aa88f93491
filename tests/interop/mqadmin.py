"""RocketMQ's own tool for operators, mqadmin, from Maven's registry."""

import os
import sys
from pathlib import Path

from java import JVM, compile_sources, fetch_libraries
from program import HERE, PLAIN, Access, Language, Program

FOLDER = HERE / "mqadmin"
LIBRARIES, CLASSES = FOLDER / "target" / "lib", FOLDER / "target" / "classes"

PROGRAMS = (
    Program("what an operator sees", "Looks", PLAIN),
    Program("what an operator changes", "Changes", PLAIN),
    Program("users and rules", "Access", PLAIN),
)


def build() -> None:
    fetch_libraries(FOLDER)
    compile_sources(FOLDER)


def command(program: Program, route: str, _: Path, __: Access) -> list[str]:
    path = os.pathsep.join((str(CLASSES), f"{LIBRARIES}/*"))
    return [sys.executable, str(FOLDER / f"{program.name.lower()}.py"), route, "java", *JVM, "-cp", path]


LANGUAGE = Language(
    "mqadmin",
    "org.apache.rocketmq:rocketmq-tools 5.5.0",
    {"java": "default-jdk-headless", "javac": "default-jdk-headless", "mvn": "maven"},
    build,
    command,
    PROGRAMS,
    is_signing=False,
)

"""RocketMQ 5's Java client, which speaks gRPC, from Maven's registry."""

import os
from pathlib import Path

from java import JVM, compile_sources, fetch_libraries
from program import HERE, PLAIN, Access, Language, Program, grpc_program

FOLDER = HERE / "grpc" / "java"

PROGRAMS = (
    grpc_program("messages, delays, order, transactions, retries, killed and restarted"),
    Program("the documentation's quick start", "QuickStart", PLAIN, is_plain_only=True),
)


def build() -> None:
    fetch_libraries(FOLDER)
    compile_sources(FOLDER)


def command(program: Program, address: str, folder: Path, __: Access) -> list[str]:
    path = os.pathsep.join((str(FOLDER / "target" / "classes"), f"{FOLDER / 'target' / 'lib'}/*"))
    return ["java", *JVM, f"-Drocketmq.log.root={folder}", "-cp", path, program.name, address]


LANGUAGE = Language(
    "grpc-java",
    "org.apache.rocketmq:rocketmq-client-java 5.2.0",
    {"java": "default-jdk-headless", "javac": "default-jdk-headless", "mvn": "maven"},
    build,
    command,
    PROGRAMS,
    is_grpc=True,
)

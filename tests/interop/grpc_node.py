"""RocketMQ 5's Node client, which speaks gRPC, from npm's registry."""

from pathlib import Path

from node import fetch_packages
from program import HERE, Access, Language, Program, grpc_program

FOLDER = HERE / "grpc" / "node"

PROGRAMS = (grpc_program("messages, delays, order, transactions, retries, killed and restarted"),)


def build() -> None:
    fetch_packages(FOLDER)


def command(_: Program, address: str, __: Path, ___: Access) -> list[str]:
    return ["node", str(FOLDER / "main.js"), address]


LANGUAGE = Language(
    "grpc-node",
    "rocketmq-client-nodejs 1.0.8",
    {"node": "nodejs", "npm": "npm"},
    build,
    command,
    PROGRAMS,
    is_grpc=True,
)

"""RocketMQ 5's Python client, which speaks gRPC, from PyPI."""

import hashlib
import sys
from pathlib import Path

from program import HERE, PLAIN, Access, Language, Program, fetch, grpc_program

FOLDER = HERE / "grpc" / "python"
ENVIRONMENT = FOLDER / "target"

PROGRAMS = (
    grpc_program("messages, delays, order, transactions, retries, killed and restarted"),
    Program("the documentation's quick start", "QuickStart", PLAIN, is_plain_only=True),
)
_FILES = {"Grpc": "grpc_checks.py", "QuickStart": "quick_start.py"}  # by the name of a program


def build() -> None:
    """An environment of its own: another client's package, which we require, has the same name. It is not made again
    while what it holds stays the same.
    """
    python, stamped = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "stamp"
    requirements = (FOLDER / "requirements.txt").read_bytes()
    stamp = hashlib.sha256(requirements + sys.version.encode()).hexdigest()
    if stamped.is_file() and stamped.read_text() == stamp:
        return
    fetch([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], FOLDER)
    fetch([str(python), "-m", "pip", "install", "--quiet", "--requirement", "requirements.txt"], FOLDER)
    stamped.write_text(stamp)


def command(program: Program, address: str, __: Path, ___: Access) -> list[str]:
    return [str(ENVIRONMENT / "bin" / "python"), str(FOLDER / _FILES[program.name]), address]


LANGUAGE = Language(
    "grpc-python",
    "rocketmq-python-client 5.1.2",
    {},
    build,
    command,
    PROGRAMS,
    is_grpc=True,
)

"""The package rocketmq for Python, which bundles RocketMQ's C++ core. Nothing to fetch: we require it."""

import sys
from pathlib import Path

from program import HERE, PLAIN, SHORT, Access, Language, Program

FOLDER = HERE / "python"

# Long ones first.
PROGRAMS = (
    Program("killed and restarted", "Restart", PLAIN),
    Program("retries and dead letters", "Retries", SHORT | {"retry_times_max": "2"}),
    Program("messages: keys, tags, batch, order, pull", "Messages", PLAIN, is_always_signed=True),
    Program("delays", "Delays", SHORT),
)


def build() -> None:
    """scripts/setup did it."""


def command(program: Program, route: str, _: Path, __: Access) -> list[str]:
    return [sys.executable, str(FOLDER / f"{program.name.lower()}.py"), route]


LANGUAGE = Language("python", "rocketmq 0.4.4", {}, build, command, PROGRAMS, "its C++ core has no TLS")

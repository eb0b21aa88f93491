"""RocketMQ's official Go client, as a module from the Go proxy."""

from pathlib import Path

from program import HERE, PLAIN, SHORT, Access, Language, Program, compile_programs, fetch

FOLDER = HERE / "go"
BINARY = FOLDER / "target" / "interop"

# Long ones first.
PROGRAMS = (
    Program("killed and restarted", "Restart", PLAIN),
    Program("retries and dead letters", "Retries", SHORT),
    Program("messages: keys, tags, batch, order, broadcast", "Messages", PLAIN, is_always_signed=True),
    Program("delays", "Delays", SHORT),
)


def build() -> None:
    """Everything fetched and compiled stays in Go's own cache, but for the one program."""
    fetch(["go", "mod", "download"], FOLDER)
    compile_programs(["go", "build", "-o", str(BINARY), "."], FOLDER)


def command(program: Program, route: str, _: Path, __: Access) -> list[str]:
    return [str(BINARY), program.name, route]


LANGUAGE = Language(
    "go",
    "github.com/apache/rocketmq-client-go v2.1.2",
    {"go": "golang-go"},
    build,
    command,
    PROGRAMS,
    "WithTls came after v2.1.2, the newest release",
)

"""RocketMQ 5's Go client, which speaks gRPC, as a module from the Go proxy."""

from pathlib import Path

from program import HERE, Access, Language, Program, compile_programs, fetch, grpc_program

FOLDER = HERE / "grpc" / "go"
BINARY = FOLDER / "target" / "interop"

PROGRAMS = (grpc_program("messages, delays, order, transactions, retries, killed and restarted"),)


def build() -> None:
    """Everything fetched and compiled stays in Go's own cache, but for the one program."""
    fetch(["go", "mod", "download"], FOLDER)
    compile_programs(["go", "build", "-o", str(BINARY), "."], FOLDER)


def command(_: Program, address: str, folder: Path, __: Access) -> list[str]:
    return ["env", "rocketmq.client.logLevel=warn", f"rocketmq.client.logRoot={folder}", str(BINARY), address]


LANGUAGE = Language(
    "grpc-go",
    "github.com/apache/rocketmq-clients/golang/v5 v5.1.4",
    {"go": "golang-go"},
    build,
    command,
    PROGRAMS,
    is_grpc=True,
)

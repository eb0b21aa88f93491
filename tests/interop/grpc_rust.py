"""RocketMQ 5's Rust client, which speaks gRPC, from crates.io. It needs no protoc."""

from pathlib import Path

from program import HERE, Access, Language, Program, compile_programs, fetch, grpc_program

FOLDER = HERE / "grpc" / "rust"
COMPILE_S = 900.0  # 250 crates, once

PROGRAMS = (grpc_program("messages, delays, order, transactions, killed and restarted"),)


def build() -> None:
    """What is fetched stays in Cargo's own cache."""
    fetch(["cargo", "fetch", "--quiet", "--locked"], FOLDER)
    compile_programs(["cargo", "build", "--quiet", "--locked", "--offline"], FOLDER, COMPILE_S)


def command(_: Program, address: str, __: Path, ___: Access) -> list[str]:
    return [str(FOLDER / "target" / "debug" / "interop-grpc"), address]


LANGUAGE = Language(
    "grpc-rust",
    "rocketmq 5.0.0",
    {"cargo": "cargo-web or cargo"},  # Debian 12's cargo is too old, its cargo-web is not
    build,
    command,
    PROGRAMS,
    "it has a switch for TLS, and nothing behind it",
    is_grpc=True,
)

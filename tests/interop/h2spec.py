"""h2spec, which tests servers of HTTP/2, as a module from the Go proxy: what it finds about a broker's gRPC port."""

import sys
from pathlib import Path

from program import HERE, PLAIN, Access, Language, Program, compile_programs, fetch

FOLDER = HERE / "h2spec"
BINARY = FOLDER / "target" / "h2spec"

PROGRAMS = (
    Program("every case of HTTP/2 and HPACK", "Conformance", PLAIN, is_always_tls=True),
)  # fmt: skip


def build() -> None:
    """Everything fetched and compiled stays in Go's own cache, but for the one program."""
    fetch(["go", "mod", "download"], FOLDER)
    compile_programs(["go", "build", "-o", str(BINARY), "github.com/summerwind/h2spec/cmd/h2spec"], FOLDER)


def command(program: Program, address: str, _: Path, access: Access) -> list[str]:
    flags = ["--tls"] if access.ca_file else []
    return [sys.executable, str(FOLDER / f"{program.name.lower()}.py"), address, str(BINARY), *flags]


LANGUAGE = Language(
    "h2spec", "github.com/summerwind/h2spec v2.2.1", {"go": "golang-go"}, build, command, PROGRAMS, is_grpc=True
)

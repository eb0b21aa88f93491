"""What a language and its programs are to the runner, and how a client of one is fetched.

A language is a folder beside this file with programs of ours, and a module of the same name that has its LANGUAGE. A
program gets the address of a broker, prints "ok: ..." for each check that holds, and ends with 0; or it prints
"FAILED: ..." and ends with another code. It may print RESTART: then its broker is killed and started again, and it
reads a line.
"""

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
FETCH_S = 180.0
RESTART = "restart please"
INSTALLING = threading.Lock()  # languages are built at the same time, and apt-get runs once at a time

# Small files, and delays that a test can wait for. Most of those are far ones, with a lead of 1 s.
PLAIN = {"segment_bytes": "16MiB"}
SHORT = PLAIN | {"lead_ms": "1s", "message_delay_level": "1s 2s 1s 2s 3s 4s"}

# Of programs for gRPC, which do all that their client can, one part after the other.
GRPC_SETTINGS = PLAIN | {"transaction_timeout_ms": "1s", "transaction_check_interval_ms": "2s"}
GRPC_TOPICS = ("messages", "delays", "order", "transactions", "retries", "restart")
GRPC_GROUPS = (
    ("order-push", "--in-order", "yes", "--retry", "1s,2s", "--attempts", "3"),
    ("retries-push", "--retry", "1s,2s", "--attempts", "3"),
)

# What tools of all languages say when it is the registry's fault, or that of the way there.
UNREACHABLE = (
    "Unknown host", "Temporary failure in name resolution", "Connect to ", "Connection refused", "Connection reset",
    "Connection timed out", "connect timed out", "Read timed out", "No route to host", "Network is unreachable",
    "Could not transfer", "failed to transfer", "Remote host terminated", "Service Unavailable",
    "dial tcp", "no such host", "i/o timeout", "TLS handshake timeout", "502 Bad Gateway",
    "Could not resolve host",
    "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "socket hang up",
)  # fmt: skip


NO_ENVIRONMENT: Mapping[str, str] = {}


class Program(NamedTuple):
    """A program, and what it needs."""

    title: str
    name: str  # the same in all languages that have such a program
    settings: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of what runs it, before its name
    topics: tuple[str, ...] = ()  # made beforehand, as an operator would
    groups: tuple[tuple[str, ...], ...] = ()  # too: the name, and flags of postdate group create
    is_always_signed: bool = False  # whether it is also run signed where nobody asks for it
    is_always_tls: bool = False  # whether it is also run over TLS where nobody asks for it
    is_plain_only: bool = False  # its text stands in the documentation, where nobody signs


class Access(NamedTuple):
    """How a program reaches its broker: as whom, and with TLS where a file says whom to trust."""

    user: str = ""
    secret: str = ""
    ca_file: str = ""

    def environment(self) -> dict[str, str]:
        """What programs look for; and what our own client looks for, which some of them start."""
        found: dict[str, str] = {}
        if self.user:
            found |= {"INTEROP_ACCESS_KEY": self.user, "INTEROP_SECRET_KEY": self.secret}
            found |= {"POSTDATE_ACCESS_KEY": self.user, "POSTDATE_SECRET_KEY": self.secret}
        if self.ca_file:
            found |= {"INTEROP_CA_FILE": self.ca_file, "POSTDATE_CA_FILE": self.ca_file}
            found["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = (
                self.ca_file
            )  # clients on gRPC's libraries have no other setting
        return found


class Language(NamedTuple):
    """A client in a language."""

    name: str
    client: str
    tools: Mapping[str, str]  # what must be on the PATH, and the Debian package that has it, or several: "a or b"
    build: Callable[[], None]  # fetches the client, compiles the programs; raises Unusable and Unreachable
    # By program, address of the broker, a folder for its files, and how it reaches the broker.
    command: Callable[[Program, str, Path, Access], list[str]]
    programs: tuple[Program, ...]
    no_tls: str = ""  # why its client cannot speak TLS
    is_signing: bool = True
    is_grpc: bool = False  # its programs get the address of the broker's gRPC port


def grpc_program(title: str) -> Program:
    return Program(title, "Grpc", GRPC_SETTINGS, topics=GRPC_TOPICS, groups=GRPC_GROUPS)


class Unusable(Exception):
    """The programs cannot be run here; the sentence says why."""


class Unreachable(Exception):
    """The registry cannot be reached; the sentence says what the tool said."""


class Failed(Exception):
    """A program could not even begin; the sentence says why."""


def finished(
    command: Sequence[str], limit_s: float, folder: Path | None = None, environment: Mapping[str, str] = NO_ENVIRONMENT
) -> "subprocess.CompletedProcess[str]":
    """Runs a command to its end, with all that it prints in stdout."""
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=limit_s, env={**os.environ, **environment},
    )  # fmt: skip


def fetch(command: Sequence[str], folder: Path) -> None:
    """Runs a command that asks a registry. Raises Unreachable and Unusable."""
    try:
        fetched = finished(command, FETCH_S, folder)
    except subprocess.TimeoutExpired as error:
        raise Unreachable(f"{command[0]} was not ready after {FETCH_S:.0f} s") from error
    if fetched.returncode:
        lines = [line for line in fetched.stdout.splitlines() if any(sign in line for sign in UNREACHABLE)]
        raise Unreachable(lines[0]) if lines else Unusable(f"{command[0]} failed:\n{fetched.stdout}")


def compile_programs(command: Sequence[str], folder: Path, limit_s: float = FETCH_S) -> None:
    """Runs a compiler. Raises Unusable."""
    compiled = finished(command, limit_s, folder)
    if compiled.returncode:
        raise Unusable(f"the programs do not compile:\n{compiled.stdout}")


def provide(tools: Mapping[str, str]) -> None:
    """Sees to it that the tools are there: on a machine of our own it installs them. Raises Unusable."""
    with INSTALLING:
        for tool, packages in tools.items():
            for package in packages.split(" or "):
                if shutil.which(tool) is None and os.getuid() == 0 and shutil.which("apt-get"):
                    install(package)
    for tool, package in tools.items():
        if shutil.which(tool) is None:
            raise Unusable(f"{tool} is not on the PATH; Debian has it in {package}")


def install(package: str) -> None:
    """As far as it goes: whoever asked looks for the tool itself."""
    print(f"installing {package}", flush=True)
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    finished([*apt, "update"], FETCH_S)
    finished([*apt, "install", "-y", package], 2 * FETCH_S)

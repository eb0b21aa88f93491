"""What every system can be asked to do. The work and the figures are the same for all; only this differs.

A system lives in a temporary folder and on free ports of loopback. Its servers are processes of their own; its client
is this process (or, for a Java client, a process that it starts). A message is a body of BODY_BYTES whose first
INDEX_DIGITS bytes are its number, so that whoever receives one knows which it was.

Order of calls: start, schedule (any number of times), receive, cancel, kill, start, ..., stop. `stop` ends every
process, by its id, also after a failure.
"""

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

BODY_BYTES = 224
INDEX_DIGITS = 12

CANCELLED, TOO_LATE, UNKNOWN = "cancelled", "too late", "unknown"

STRANGER = 10**12  # more than any number that was given out
OTHER_DIGITS = str.maketrans("0123456789", "9876543210")
BLOCK_BYTES = 512  # what stat counts in


class NotRun(Exception):
    """A system cannot be had here, or cannot do this work; the sentence says why and stands in the report."""


class Received(NamedTuple):
    """In the order in which they came."""

    indexes: np.ndarray  # int64
    at_ms: np.ndarray  # float64, epoch milliseconds when the client had it in hand


class System(ABC):
    name: ClassVar[str]  # as the report shows it: "Redis, sorted set"
    slug: ClassVar[str]  # in commands and files: "redis"
    works: ClassVar[frozenset[str]] = frozenset("abcdefg")
    settings: ClassVar[str]  # what was set for it, and why, in one sentence
    durable: ClassVar[str]  # what an acknowledged send has survived with is_durable, in some words
    volatile: ClassVar[str]  # and without

    def __init__(self, folder: Path, is_durable: bool) -> None:
        self.folder, self.is_durable = folder, is_durable

    @classmethod
    @abstractmethod
    def versions(cls) -> dict[str, str]:
        """Of server and client. Raises NotRun where something is missing."""

    @abstractmethod
    def start(self) -> None:
        """Starts the servers on the folder, empty or with what an earlier life left, and connects. Returns as soon as
        a send would be answered."""

    @abstractmethod
    def kill(self) -> None:
        """kill -9 to every server process."""

    @abstractmethod
    def stop(self) -> None:
        """Ends whatever still runs of it. May be called at any time, and twice."""

    @abstractmethod
    def pids(self) -> list[int]:
        """Server processes, whose CPU and memory count."""

    @abstractmethod
    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        """Sends one message for each due time, as quickly as this system's best way allows (pipelined, in batches where
        they are as safe), and returns when all are acknowledged: what a cancel needs to know of each."""

    @abstractmethod
    def receive(self, count: int, limit_s: float) -> Received:
        """Takes messages as they become due, acknowledging each as its consumer would, until there are `count` of them
        or the time is over."""

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        """Cancels waiting messages; what the system answered to each: CANCELLED, TOO_LATE or UNKNOWN."""
        raise NotRun(f"{self.name} has no cancel: it cannot take back any of {len(handles):,}")

    def client_pids(self) -> list[int]:
        """Processes of its client besides this one, whose CPU counts as the client's."""
        return []

    def visible(self) -> int:
        """How many messages a consumer could have by now, had there been one: for a system that can tell it without
        receiving them."""
        raise NotRun(f"{self.name} does not tell how many messages are due")

    def stranger(self, handle: bytes | str) -> bytes | str:
        """What the handle of a message that was never sent would look like, made from a real one."""
        if isinstance(handle, bytes):
            return str(self.stranger(handle.decode())).encode()
        return str(int(handle) + STRANGER) if handle.isdigit() else handle.translate(OTHER_DIGITS)

    def disk_bytes(self) -> int:
        """What its folder holds on disk, in whole blocks."""
        # Not by rglob, which fails where a server removes a folder under it.
        files = (Path(folder, name) for folder, _, names in os.walk(self.folder) for name in names)
        return sum(map(_blocks, files)) * BLOCK_BYTES


def _blocks(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:  # removed by the system meanwhile
        return 0
    return found.st_blocks if stat.S_ISREG(found.st_mode) else 0


def body(index: int) -> bytes:
    return b"%0*d" % (INDEX_DIGITS, index) + b"x" * (BODY_BYTES - INDEX_DIGITS)


def index_of(received: bytes) -> int:
    return int(received[:INDEX_DIGITS])

"""A snapshot that can be read, as the check asks for it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from postdate.state import saved
from postdate.storage import snapshot
from postdate.storage.disk import Disk


@dataclass(frozen=True)
class Saved:
    position: int
    sections: list[snapshot.Section]
    state: dict[str, Any]

    @property
    def path(self) -> str:
        return snapshot.path_of(self.position)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """How many rows each folder of rows must have."""
        lengths = {name: self.state[name]["length"] for name in ("far", "index")}
        for number, (length, times_length, _) in enumerate(self.state["queues"]):
            lengths[entries_folder(number)], lengths[times_folder(number)] = length, times_length
        return lengths

    @cached_property
    def firsts(self) -> dict[str, int]:
        """Which rows retention had let go, by folder: those before this one. Of times it is not written down."""
        firsts = {name: self.state[name]["first"] for name in ("far", "index")}
        for number, (_, _, first) in enumerate(self.state["queues"]):
            firsts[entries_folder(number)] = first
        return firsts

    def sums(self) -> dict[str, list[int]]:
        """The checksums of the blocks of rows, by folder."""
        return dict(saved.read_sums(section) for section in self.sections if section.kind == snapshot.SUMS)

    def slots(self) -> list[bytes]:
        return [section.data for section in self.sections if section.kind == snapshot.SLOTS]

    def chunk_names(self) -> dict[int, str]:
        return dict(self.state["chunks"])


def read(disk: Disk, position: int) -> Saved:
    """Raises CorruptSnapshot."""
    sections = snapshot.read(disk, position)
    return Saved(position, sections, saved.read_state(sections))


def entries_folder(number: int) -> str:
    return f"queues/{number}/entries"


def times_folder(number: int) -> str:
    return f"queues/{number}/times"

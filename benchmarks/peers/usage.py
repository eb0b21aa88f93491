"""What processes have had of the machine: CPU and memory."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
OWN, WAITED = (11, 12), (13, 14)  # fields of /proc/PID/stat behind the name: user and system time


class Memory(NamedTuple):
    """In bytes. Mapped files can be dropped by the kernel and read again; the rest cannot."""

    held: int
    mapped: int

    @property
    def total(self) -> int:
        return self.held + self.mapped


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time, with that of children that have ended: a server may take a process for each client."""
    return sum(_ticks(pid) for pid in set(pids)) / CLOCK_TICKS


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended; its time is with who waited for it
        return 0
    return sum(int(fields[place]) for place in OWN + WAITED)


def memory(pids: Iterable[int]) -> Memory:
    """Proportional: what processes share counts once among them."""
    found = [_rollup(pid) for pid in set(pids)]
    return Memory(
        sum(each.get("Pss_Anon", 0) + each.get("Pss_Shmem", 0) for each in found),
        sum(each.get("Pss_File", 0) for each in found),
    )


def _rollup(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1_024 for line in lines if line.startswith("Pss_")}

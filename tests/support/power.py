"""Takes from a copy of a test's folders what a power loss may take, by the rules of postdate.testing.power.

Syncs are traced, one line each: the pipeline's own by POSTDATE_SYNC_TRACE, those of bulk by TracedDisk. The trace says
which names and which bytes are on disk. verify.faults takes from running processes instead, and knows their writes.

Of the broker's own files only chunks are touched: the simulation of the core has its own power losses.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from postdate.storage.disk import RealDisk
from postdate.testing.power import keeps_name, surviving_bytes

LOSABLE = ("table", "data/chunks")  # below a test's folder


class TracedDisk(RealDisk):
    """A disk that appends its syncs to a trace, as the pipeline does."""

    def __init__(self, folder: Path, trace: Path) -> None:
        super().__init__(folder)
        self._trace = trace

    def sync(self, path: str) -> None:
        super().sync(path)
        self._note(self.root / path)

    def sync_folder(self, folder: str) -> None:
        super().sync_folder(folder)
        parts = Path(folder).parts
        for depth in range(len(parts) + 1):
            self._note(self.root.joinpath(*parts[:depth]))

    def rename(self, source: str, target: str) -> None:
        """Traces the new name: what was synced under the old one is synced under it."""
        super().rename(source, target)
        size = self.size(target)
        self._write({"path": str(self.root / target), "size": size, "names": None})

    def _note(self, path: Path) -> None:
        names = sorted(os.listdir(path)) if path.is_dir() else None
        self._write({"path": str(path), "size": path.stat().st_size, "names": names})

    def _write(self, line: dict[str, object]) -> None:
        with self._trace.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line) + "\n")


class Synced(NamedTuple):
    """What is on disk for certain."""

    sizes: dict[str, int]  # of files, by path
    names: dict[str, set[str]]  # in folders, by path

    @classmethod
    def of(cls, trace: str) -> "Synced":
        synced = cls({}, {})
        for line in map(json.loads, trace.splitlines()):
            if line["names"] is None:
                synced.sizes[line["path"]] = line["size"]
            else:
                synced.names[line["path"]] = set(line["names"])
        return synced

    def has_name(self, path: Path) -> bool:
        return path.name in self.names.get(str(path.parent), ())


def lose_power(folder: Path, live: Path, trace: str, dice: random.Random) -> list[str]:
    """Takes from `folder`, a copy of `live`, what the trace does not show on disk. Returns what it did."""
    synced = Synced.of(trace)
    losses = []
    for path in sorted(_files(folder)):
        original = live / path.relative_to(folder)
        losses += [f"{original.name}: {did}" for did in _lose(path, original, live, synced, dice)]
    return losses


def _files(folder: Path) -> Iterator[Path]:
    for part in LOSABLE:
        yield from (path for path in (folder / part).rglob("*") if path.is_file())


def _lose(path: Path, original: Path, live: Path, synced: Synced, dice: random.Random) -> Iterator[str]:
    """Takes from one file. The names of the test's own folders stay: an operator made them."""
    steps = [original, *(parent for parent in original.parents if live / "table" in parent.parents)]
    if not all(synced.has_name(step) for step in steps) and not keeps_name(dice):
        path.unlink()
        yield "its name is lost"
        return
    data, synced_size = path.read_bytes(), synced.sizes.get(str(original), 0)
    if synced_size != len(data):
        left, sentence = surviving_bytes(dice, data, min(synced_size, len(data)))
        path.write_bytes(left)
        yield sentence

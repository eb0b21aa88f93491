"""What a power loss may leave of the files that a pipeline and bulk write: all that was synced, and of the rest
whatever the dice say.

Syncs are traced, one line each: the pipeline's own by POSTDATE_SYNC_TRACE, those of bulk by TracedDisk. `lose_power`
takes from a copy of the folders what was not on disk: a file whose name no sync of its folder had seen may vanish, one
that was not synced may be cut behind what was, or hold zeros there. verify.faults does it to running processes.

The broker's own files are left alone but for the chunks: the simulation of the core has its own power losses.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from postdate.storage.disk import RealDisk
from verify.faults.power import lose_unknown

LOSABLE = ("table", "data/chunks")  # below a test's folder


class TracedDisk(RealDisk):
    """A disk that writes its syncs into a trace, as the pipeline does."""

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
        """What was synced under the old name is synced under the new one."""
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
    """Takes from a copy of the folder `live` what was not on disk, by a trace of syncs. Returns what it did."""
    synced = Synced.of(trace)
    told = []
    for path in sorted(_files(folder)):
        original = live / path.relative_to(folder)
        told += [f"{original.name}: {did}" for did in _lose(path, original, live, synced, dice)]
    return told


def _files(folder: Path) -> Iterator[Path]:
    for part in LOSABLE:
        yield from (path for path in (folder / part).rglob("*") if path.is_file())


def _lose(path: Path, original: Path, live: Path, synced: Synced, dice: random.Random) -> Iterator[str]:
    """The names of the test's own folders are there: an operator made them."""
    steps = [original, *(parent for parent in original.parents if live / "table" in parent.parents)]
    if not all(synced.has_name(step) for step in steps) and dice.random() < 0.5:
        path.unlink()
        yield "its name is lost"
        return
    size, synced_size = path.stat().st_size, synced.sizes.get(str(original), 0)
    if synced_size != size:
        yield lose_unknown(path, min(synced_size, size), dice)

"""The layer between real processes and their files, as the suite sees it.

    layer = Layer(folder / "layer", [data, table])
    subprocess.Popen(command, env={**os.environ, **layer.environment()})
    layer.kill_at("log.flushed", times=3)
    ...                                  # all of its processes are dead
    layer.lose_power(random.Random(7))   # what was not synced may be gone

Processes are started unchanged. Their environment puts them, and the processes that they start, under the layer
(verify.faults.inside).
"""

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import postdate
from postdate.errors import UsageError
from verify.faults import power
from verify.faults.control import Control
from verify.faults.inside import CONTROL, JOURNAL, LAYER, PINNED, WATCHED
from verify.faults.journal import Journal
from verify.faults.points import Point, fault_points

__all__ = ["Flip", "Layer", "Point", "fault_points", "flip_bit"]

_HOOK = "hook"
_SITECUSTOMIZE = '''\
"""Puts processes under the layer; written by verify.faults."""

from verify.faults import inside

inside.begin()
'''


class Layer:
    """Watches the files of some folders, which need not exist yet. Raises UsageError if its own folder is on another
    file system: it keeps hard links to their files.
    """

    def __init__(self, folder: Path, watched: Sequence[Path]) -> None:
        self._folder = folder.resolve()
        self._watched = [path.resolve() for path in watched]
        for path in self._watched:
            if _device_of(path) != _device_of(self._folder):
                raise UsageError(f"{self._folder} is on another file system than {path}")
        for name in (PINNED, _HOOK):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / _HOOK / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        (self._folder / WATCHED).write_text("".join(f"{path}\n" for path in self._watched), encoding="utf-8")
        self._control = Control(self._folder / CONTROL)
        self.renew()

    def environment(self) -> dict[str, str]:
        """The environment of a process under the layer."""
        own = [str(self._folder / _HOOK), str(Path(postdate.__file__).parent.parent)]
        known = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in own]
        return {"PYTHONPATH": os.pathsep.join([*own, *known]), LAYER: str(self._folder)}

    # -- the clock --------------------------------------------------------------------------------------------------

    @property
    def offset_ms(self) -> int:
        """How far the clock of its processes is from the machine's."""
        return self._control.offset_ms

    @offset_ms.setter
    def offset_ms(self, value: int) -> None:
        self._control.offset_ms = value

    def step_clock(self, span_ms: int) -> None:
        self.offset_ms += span_ms

    # -- fault points -----------------------------------------------------------------------------------------------

    def kill_at(self, *points: Point | str, times: int = 1) -> None:
        """Ends the process that reaches one of these points as the n-th from now, as by kill -9. A name alone means any
        process.
        """
        assert times >= 1, f"a point is reached once or more often, not {times} times"
        self._control.arm([each if isinstance(each, Point) else (each, "") for each in points], times)

    @property
    def hit(self) -> Point | None:
        """The point that ended a process since `kill_at`."""
        found = self._control.hit
        return None if found is None else Point(*found)

    def disarm(self) -> None:
        """No process ends any more; `hit` stays."""
        self._control.disarm()

    # -- the disk ---------------------------------------------------------------------------------------------------

    def fail_syncs(self, count: int) -> None:
        """Makes this many of the next syncs of watched files fail. What they should have written may never reach the
        disk.
        """
        self._control.failing_syncs = count

    @property
    def failing_syncs(self) -> int:
        """How many are still to fail."""
        return self._control.failing_syncs

    def limit_space(self, size: int | None) -> None:
        """Limits the bytes that Python may add to watched files; removals make room. None removes the limit."""
        self._control.space_left = size

    @property
    def space_left(self) -> int | None:
        return self._control.space_left

    def lose_power(self, dice: random.Random, mode: str = "") -> list[str]:
        """Takes what was not on disk; what is left counts as synced. No process may run. Returns what it did."""
        losses = power.lose(self._watched, self._folder / JOURNAL, self._folder / PINNED, dice, mode)
        self.renew()
        return losses

    @property
    def journal_bytes(self) -> int:
        return (self._folder / JOURNAL).stat().st_size

    def renew(self) -> None:
        """Counts everything as synced and starts a new journal. No process may run."""
        pinned = self._folder / PINNED
        shutil.rmtree(pinned)
        pinned.mkdir()
        names, sizes, paths = power.list_folders(self._watched)
        for inode, path in paths.items():
            os.link(path, pinned / str(inode))
        (self._folder / JOURNAL).unlink(missing_ok=True)
        journal = Journal(self._folder / JOURNAL)
        journal.begin(names, sizes)
        journal.close()


def _device_of(path: Path) -> int:
    """The device of a path, which need not exist yet."""
    return path.stat().st_dev if path.exists() else _device_of(path.parent)


# -- bits that flip ---------------------------------------------------------------------------------------------


class Flip(NamedTuple):
    """A bit of a file that was inverted."""

    path: Path
    position: int  # of its byte
    bit: int

    def undo(self) -> None:
        _flip(self)


def flip_bit(folder: Path, dice: random.Random) -> Flip:
    """Inverts one bit of one file under a folder; half of the time large files are likelier. Raises IndexError if all
    files are empty.
    """
    sizes = {path: size for path in sorted(folder.rglob("*")) if path.is_file() and (size := path.stat().st_size)}
    weights = list(sizes.values()) if dice.random() < 0.5 else [1] * len(sizes)
    path = dice.choices(list(sizes), weights)[0]
    flip = Flip(path, dice.randrange(sizes[path]), dice.randrange(8))
    _flip(flip)
    return flip


def _flip(flip: Flip) -> None:
    with flip.path.open("r+b") as file:
        file.seek(flip.position)
        byte = file.read(1)[0]
        file.seek(flip.position)
        file.write(bytes([byte ^ 1 << flip.bit]))

"""Takes from the watched folders what a power loss may take, by the journal and the rules of postdate.testing.power.

The journal knows every write of our processes; of files that others write (Parquet, Delta's log, Spark's checkpoint) it
knows the syncs. A sync that failed has lost what it should have written: a later one does not bring it back, only
writing it again does. Removed folders do not come back.

There are three kinds of loss: ALL, everything that was not synced is lost; SOME, each change has its own fate; LAST,
only the last few changes have one.
"""

import os
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from postdate.testing import power as rules
from postdate.testing.power import Fate
from verify.faults.journal import Begun, Cut, Failed, Listed, Made, Record, Removed, Renamed, Synced, Void, Write, read

ALL, SOME, LAST = "all", "some", "last"
MODES = (ALL, SOME, LAST)
SECTOR_BYTES = 512
_LAST_MAX = 8  # changes that LAST may lose

Event = Made | Renamed | Removed
Names = dict[str, int]  # inodes by name


def lose(folders: Sequence[Path], journal: Path, pinned: Path, dice: random.Random, mode: str = "") -> list[str]:
    """Takes from the folders what was not on disk; no process may use them. Returns what it did. `pinned` holds every
    file that the journal knows, named by its inode. The dice choose an empty mode.
    """
    state = State(read(journal))
    thrown = Dice(dice, mode or dice.choice(MODES), state)
    losses = []
    for folder in folders:
        if folder.is_dir():
            losses += _Names(folder, state, thrown, pinned).lose()
    for folder in folders:
        for path in _files(folder):
            losses += [f"{path.relative_to(folder.parent)}: {did}" for did in _lose_content(path, state, thrown)]
    return losses


def list_folders(folders: Iterable[Path]) -> tuple[dict[str, Names], dict[int, int], dict[int, Path]]:
    """Lists the names in every folder, the sizes of files, and a path of each file."""
    names: dict[str, Names] = {}
    sizes: dict[int, int] = {}
    paths: dict[int, Path] = {}
    for root in folders:
        for place, _, _ in os.walk(root):
            names[place] = _names_in(place)
        for path in _files(root):
            found = path.stat()
            sizes[found.st_ino], paths[found.st_ino] = found.st_size, path
    return names, sizes, paths


def _names_in(folder: str | Path) -> Names:
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries}


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


# -- what the journal knows -------------------------------------------------------------------------------------


class Changed(NamedTuple):
    """A change of a file's bytes."""

    change: Write | Cut
    is_durable: bool = False
    is_doomed: bool = False  # a sync of it has failed

    @property
    def is_open(self) -> bool:
        return not self.is_durable


class Content:
    """A file's changes from the first one that is not on disk, and its synced size."""

    def __init__(self) -> None:
        self.changes: list[Changed] = []
        self.is_ours = False  # whether its changes are known
        self.synced_size = 0

    def add(self, change: Write | Cut) -> None:
        self.is_ours = True
        self.changes.append(Changed(change))

    def sync(self, synced: Synced) -> None:
        self.synced_size = synced.size
        self.changes = [
            each._replace(is_durable=True) if each.change.at < synced.began and not each.is_doomed else each
            for each in self.changes
        ]
        while self.changes and self.changes[0].is_durable:
            self.changes.pop(0)

    def fail(self, failed: Failed) -> None:
        self.changes = [
            each._replace(is_doomed=True) if each.change.at < failed.began and each.is_open else each
            for each in self.changes
        ]


class Folder:
    """The names of a folder that are on disk, and their changes since."""

    def __init__(self) -> None:
        self.names: Names = {}
        self.events: list[Event] = []

    def sync(self, listed: Listed) -> None:
        self.names = dict(listed.names)
        self.events = [event for event in self.events if event.at >= listed.began]

    def after(self, count: int) -> Names:
        """The names after the first changes."""
        names = dict(self.names)
        for event in self.events[:count]:
            if isinstance(event, Made):
                names[event.name] = event.inode
                continue
            if names.get(event.name) == event.inode:
                del names[event.name]
            if isinstance(event, Renamed):
                names[event.target] = event.inode
        return names


class State:
    """What the journal knows of all files and folders."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.contents: dict[int, Content] = {}
        self.folders: dict[str, Folder] = {}
        self._last: dict[str, Event] = {}  # of each thread
        for record in records:
            self._take(record)
        for event in self._last.values():
            if _has_not_happened(event):
                self._forget(event)

    def _take(self, record: Record) -> None:
        if isinstance(record, Write | Cut):
            self._content(record.inode).add(record)
        elif isinstance(record, Synced):
            self._content(record.inode).sync(record)
        elif isinstance(record, Failed):
            self._content(record.inode).fail(record)
        elif isinstance(record, Listed):
            self._folder(record.folder).sync(record)
        elif isinstance(record, Void):
            self._forget(self._last.pop(record.by))
        elif isinstance(record, Begun):
            self._begin(record)
        else:
            self._folder(record.folder).events.append(record)
            self._last[record.by] = record

    def _begin(self, start: Begun) -> None:
        for folder, names in start.names.items():
            self._folder(folder).names = dict(names)
        for inode, size in start.sizes.items():
            self._content(inode).synced_size = size

    def _content(self, inode: int) -> Content:
        return self.contents.setdefault(inode, Content())

    def _folder(self, path: str) -> Folder:
        return self.folders.setdefault(path, Folder())

    def _forget(self, event: Event) -> None:
        events = self._folder(event.folder).events
        if event in events:
            events.remove(event)

    def open_changes(self) -> list[int]:
        """The journal positions of all changes that are not on disk."""
        changes = (each.change.at for content in self.contents.values() for each in content.changes if each.is_open)
        events = (event.at for folder in self.folders.values() for event in folder.events)
        return sorted([*changes, *events])


def _has_not_happened(event: Event) -> bool:
    """Whether its thread was killed between the record and the call."""
    if isinstance(event, Made):
        return False
    try:
        return os.lstat(f"{event.folder}/{event.name}").st_ino == event.inode
    except (FileNotFoundError, NotADirectoryError):
        return False


# -- the dice ---------------------------------------------------------------------------------------------------


class Dice:
    """Decides what becomes of each change, in one of the three kinds of loss."""

    def __init__(self, dice: random.Random, mode: str, state: State) -> None:
        self.dice = dice
        self.mode = mode
        changes = state.open_changes()[-dice.randint(1, _LAST_MAX) :]
        self._from = changes[0] if mode == LAST and changes else 0

    def of_write(self, at: int) -> Fate:
        if self.mode == ALL:
            return Fate.LOST
        return Fate.KEPT if at < self._from else rules.choose_fate(self.dice)

    def of_events(self, events: Sequence[Event]) -> int:
        """How many of these changes of names stay."""
        if self.mode == ALL:
            return 0
        safe_count = sum(event.at < self._from for event in events)
        return rules.surviving_names(self.dice, len(events), safe_count)

    def keeps_unknown(self) -> bool:
        """Whether a change of names by others stays; the order of those is unknown."""
        return self.mode == LAST or (self.mode == SOME and rules.keeps_name(self.dice))

    def of_unknown(self, data: bytes, synced_size: int) -> tuple[bytes, str]:
        """What is left of a file that others wrote, and a sentence about it."""
        if self.mode == ALL:
            return data[:synced_size], f"it has {synced_size} bytes left"
        return rules.surviving_bytes(self.dice, data, synced_size)


# -- names ------------------------------------------------------------------------------------------------------


class _Names:
    """Takes names from one folder."""

    def __init__(self, path: Path, state: State, dice: Dice, pinned: Path) -> None:
        self._path, self._state, self._dice, self._pinned = path, state, dice, pinned
        self._folder = state.folders.get(str(path)) or Folder()

    def lose(self) -> list[str]:
        """Takes names from this folder, then from the folders in it that are left."""
        losses = self._apply(_names_in(self._path))
        for path in sorted(self._path.iterdir()):
            if path.is_dir() and not path.is_symlink():
                losses += _Names(path, self._state, self._dice, self._pinned).lose()
        return losses

    def _choose_names(self, actual: Names) -> Names:
        """The names on disk, with the first changes since, and some changes that others made."""
        events = self._folder.events
        names = self._folder.after(self._dice.of_events(events))
        known = self._folder.after(len(events))
        for group in _groups(known, actual):
            if self._dice.keeps_unknown():
                for name in group:
                    names.pop(name, None)
                    if name in actual:
                        names[name] = actual[name]
        return names

    def _apply(self, actual: Names) -> list[str]:
        wanted = self._choose_names(actual)
        losses = [f"{self._name_of(name)}: {did}" for name, did in self._move_folders(actual, wanted)]
        for name in sorted(actual.keys() - wanted.keys()):
            _remove(self._path / name)
            losses.append(f"{self._name_of(name)}: its name is lost")
        for name in sorted(wanted):
            source = self._pinned / str(wanted[name])
            # A folder that was removed does not come back, and its number may be that of a file by now.
            is_folder = (self._path / name).is_dir()
            if actual.get(name) != wanted[name] and source.exists() and not is_folder:
                (self._path / name).unlink(missing_ok=True)
                os.link(source, self._path / name)
                losses.append(f"{self._name_of(name)}: it is {'the old one' if name in actual else 'there'} again")
        return losses

    def _move_folders(self, actual: Names, wanted: Names) -> Iterator[tuple[str, str]]:
        """Gives renamed folders their old name back."""
        places = {inode: name for name, inode in actual.items() if (self._path / name).is_dir()}
        for name, inode in wanted.items():
            place = places.get(inode)
            if place is not None and wanted.get(place) != inode and name not in actual:
                os.rename(self._path / place, self._path / name)
                actual[name] = actual.pop(place)
                yield place, f"it is {name} again"

    def _name_of(self, name: str) -> str:
        return f"{self._path.name}/{name}"


def _groups(known: Names, actual: Names) -> list[list[str]]:
    """The names that others changed; names of one file, as after a rename, form a group."""
    groups: dict[int, list[str]] = {}
    for name in sorted(known.keys() | actual.keys()):
        if known.get(name) != actual.get(name):
            groups.setdefault(actual.get(name) or known[name], []).append(name)
    return list(groups.values())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# -- bytes ------------------------------------------------------------------------------------------------------


def _lose_content(path: Path, state: State, dice: Dice) -> Iterator[str]:
    content = state.contents.get(path.stat().st_ino) or Content()
    if content.is_ours:
        if content.changes:
            yield _lose_changes(path, content.changes, dice)
    elif path.stat().st_size > content.synced_size:
        left, sentence = dice.of_unknown(path.read_bytes(), content.synced_size)
        path.write_bytes(left)
        yield sentence


def _lose_changes(path: Path, changes: list[Changed], dice: Dice) -> str:
    counts = dict.fromkeys(Fate, 0)
    with open(path, "r+b", buffering=0) as file:
        for each in reversed(changes):
            _undo(file.fileno(), each.change)
        for each in changes:
            fate = Fate.KEPT if each.is_durable else dice.of_write(each.change.at)
            if fate is Fate.TORN and isinstance(each.change, Cut):
                fate = Fate.KEPT
            counts[fate] += each.is_open
            _redo(file.fileno(), each.change, fate, dice.dice)
    return ", ".join(f"{count} changes {fate.value}" for fate, count in counts.items() if count)


def _undo(file: int, change: Write | Cut) -> None:
    if isinstance(change, Write):
        os.pwrite(file, change.old, change.position)
        os.ftruncate(file, min(change.size_before, os.fstat(file).st_size))
    else:
        os.ftruncate(file, change.size_before)
        os.pwrite(file, change.tail, change.size)


def _redo(file: int, change: Write | Cut, fate: Fate, dice: random.Random) -> None:
    if fate is Fate.LOST:
        return
    if isinstance(change, Cut):
        os.ftruncate(file, change.size)
    elif fate is Fate.KEPT:
        os.pwrite(file, change.new, change.position)
    else:
        first_bytes = SECTOR_BYTES - change.position % SECTOR_BYTES
        for start, sector in rules.surviving_sectors(dice, change.new, SECTOR_BYTES, first_bytes):
            os.pwrite(file, sector, change.position + start)

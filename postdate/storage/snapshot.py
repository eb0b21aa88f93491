"""Snapshots: the state of the fold at one position of the log, so that a start replays little.

    snapshots/00000000000000123456        named by the log position it stands for

    +-------+------+-----------+   then sections:  +------+----------+----------+------+
    | magic | ver. | position  |                   | kind | length   | checksum | data |
    +-------+------+-----------+                   +------+----------+----------+------+
    4       4      8                               4      8          8

The last section is END and holds the number of sections before it. A file without it, or with a checksum that does
not match, does not count. A snapshot is written beside its name and renamed when all of it, and the log and queues up
to its position, are on disk. The newest two are kept.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from postdate.errors import CorruptSnapshot
from postdate.faultpoint import reach
from postdate.storage.disk import Disk
from postdate.storage.layout import SECTION, SECTION_COUNT, SNAPSHOT_HEAD

FOLDER = "snapshots"
KEPT = 2
MAGIC = 0x31534450  # "PDS1"
VERSION = 1
END, STATE, SLOTS, SUMS = range(4)

_NEW = ".new"


class Section(NamedTuple):
    """A part of a snapshot, under its own checksum."""

    kind: int
    data: bytes

    def json(self) -> Any:
        return json.loads(self.data)


class Writer:
    """Writes one snapshot, section by section; it counts only after `finish`."""

    def __init__(self, disk: Disk, position: int) -> None:
        self._disk = disk
        self._path = path_of(position)
        self._at = SNAPSHOT_HEAD.size
        self._count = 0
        reach("snapshot.begin")
        self.discard()  # of an earlier try
        disk.write(self._path + _NEW, 0, SNAPSHOT_HEAD.pack(MAGIC, VERSION, position))

    def write(self, kind: int, data: bytes) -> None:
        reach("snapshot.section")
        self._disk.write(self._path + _NEW, self._at, SECTION.pack(kind, len(data), _sum(kind, data)), data)
        self._at += SECTION.size + len(data)
        self._count += 1

    def write_json(self, value: object) -> None:
        self.write(STATE, json.dumps(value, separators=(",", ":")).encode())

    def finish(self) -> None:
        """Makes it count. The caller has synced everything that the snapshot speaks of."""
        self.write(END, SECTION_COUNT.pack(self._count))
        self._disk.sync(self._path + _NEW)
        reach("snapshot.synced")
        self._disk.rename(self._path + _NEW, self._path)
        self._disk.sync_folder(FOLDER)
        reach("snapshot.done")

    def discard(self) -> None:
        """Removes the unfinished file."""
        if self._disk.size(self._path + _NEW) >= 0:
            self._disk.remove(self._path + _NEW)


def _sum(kind: int, data: bytes) -> int:
    return xxh3_64_intdigest(data, kind)


def path_of(position: int) -> str:
    return f"{FOLDER}/{position:020d}"


def positions(disk: Disk) -> list[int]:
    """The positions of the snapshots in a folder, newest first."""
    return sorted((int(name) for name in disk.list(FOLDER) if name.isdecimal()), reverse=True)


def remove_unfinished(disk: Disk) -> None:
    for name in disk.list(FOLDER):
        if name.endswith(_NEW):
            disk.remove(f"{FOLDER}/{name}")


def remove(disk: Disk, unwanted: list[int]) -> None:
    """Removes snapshots for good: one that came back after a power loss would speak of rows that are gone."""
    for position in unwanted:
        disk.remove(path_of(position))
    if unwanted:
        disk.sync_folder(FOLDER)


def remove_old(disk: Disk) -> None:
    """Keeps the newest two."""
    remove(disk, positions(disk)[KEPT:])


def read(disk: Disk, position: int) -> list[Section]:
    """All sections of a snapshot. Raises CorruptSnapshot, naming the place."""
    path = path_of(position)
    data = memoryview(disk.read(path, 0, max(disk.size(path), 0)))
    if len(data) < SNAPSHOT_HEAD.size:
        raise CorruptSnapshot(f"{path}: cut short ({len(data)} bytes)")
    magic, version, own_position = SNAPSHOT_HEAD.unpack_from(data)
    if magic != MAGIC or own_position != position:
        raise CorruptSnapshot(f"{path}: the header is damaged")
    if version != VERSION:
        raise CorruptSnapshot(f"{path}: version {version}, this program knows {VERSION}")
    sections = list(_sections(path, data))
    if not sections or sections[-1].kind != END or SECTION_COUNT.unpack(sections[-1].data)[0] != len(sections) - 1:
        raise CorruptSnapshot(f"{path}: the end is missing")
    return sections[:-1]


def _sections(path: str, data: memoryview) -> Iterator[Section]:
    at = SNAPSHOT_HEAD.size
    while at < len(data):
        if at + SECTION.size > len(data):
            raise CorruptSnapshot(f"{path}, byte {at}: cut short")
        kind, length, checksum = SECTION.unpack_from(data, at)
        body = bytes(data[at + SECTION.size : at + SECTION.size + length]) if length >= 0 else b""
        if len(body) != length or _sum(kind, body) != checksum:
            raise CorruptSnapshot(f"{path}, byte {at}: the section is damaged")
        yield Section(kind, body)
        at += SECTION.size + length

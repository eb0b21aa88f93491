"""The journal: what the processes under the layer did to the watched files, and what they synced.

It is one file. Every process appends a record, with one system call, before it does the thing itself. The journal
survives a killed process, as the page cache does. A record is

    magic (8 bytes), size of the rest, its CRC-32, kind (1 byte), fields

A process that is killed while it appends leaves a torn record, and others may append after it: a reader looks for the
next magic. Files are identified by their inode, which no rename changes. Spark's executors import this module, so it
may need the standard library only.
"""

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"\xf0\x9f\x9c\x83fau\n"
_HEAD = struct.Struct("<8sIIc")
_WRITE = struct.Struct("<QQQII??")  # inode, position, size before, sizes of old and new, whether each is all zeros
_CUT = struct.Struct("<QQQI?")  # inode, size before, size, size of the tail, whether it is all zeros

# Saved before verify.faults.inside patches them.
_open, _writev, _fstat = os.open, os.writev, os.fstat


class Write(NamedTuple):
    """Bytes of a file are about to be written."""

    at: int  # the position of the record in the journal, as in every class below
    inode: int
    position: int
    size_before: int
    old: bytes  # the bytes that are overwritten
    new: bytes


class Cut(NamedTuple):
    """A file is about to get another size."""

    at: int
    inode: int
    size_before: int
    size: int
    tail: bytes  # the bytes that are cut off


class Synced(NamedTuple):
    """A file was synced: its changes before the journal position `began` are on disk."""

    at: int
    inode: int
    began: int
    size: int


class Failed(NamedTuple):
    """A sync failed: no later sync writes what it should have written, as in Linux."""

    at: int
    inode: int
    began: int


class Made(NamedTuple):
    """A name was made."""

    at: int
    by: str  # the process and its thread
    folder: str
    name: str
    inode: int


class Renamed(NamedTuple):
    """A file is about to get another name in its folder."""

    at: int
    by: str
    folder: str
    name: str
    target: str
    inode: int


class Removed(NamedTuple):
    """A name is about to be removed."""

    at: int
    by: str
    folder: str
    name: str
    inode: int


class Void(NamedTuple):
    """A thread's last change of a name has failed."""

    at: int
    by: str


class Listed(NamedTuple):
    """A folder was synced: the names that it had when the sync began are on disk."""

    at: int
    folder: str
    began: int
    names: dict[str, int]  # their inodes


class Begun(NamedTuple):
    """The journal begins: all of this is on disk."""

    at: int
    names: dict[str, dict[str, int]]  # inodes by folder and name
    sizes: dict[int, int]  # of files, by inode


Record = Write | Cut | Synced | Failed | Made | Renamed | Removed | Void | Listed | Begun
_KINDS: dict[bytes, Any] = {
    b"S": Synced, b"F": Failed, b"M": Made, b"N": Renamed, b"R": Removed, b"V": Void, b"L": Listed,
}  # fmt: skip
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}


class Journal:
    """Appends records."""

    def __init__(self, path: Path) -> None:
        self._descriptor = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def size(self) -> int:
        return _fstat(self._descriptor).st_size

    def write(self, inode: int, position: int, size_before: int, old: bytes, new: bytes) -> None:
        zero = (_is_zero(old), _is_zero(new))
        fields = _WRITE.pack(inode, position, size_before, len(old), len(new), *zero)
        self._append(b"W", fields, *(part for part, is_zero in zip((old, new), zero, strict=True) if not is_zero))

    def cut(self, inode: int, size_before: int, size: int, tail: bytes) -> None:
        is_zero = _is_zero(tail)
        fields = _CUT.pack(inode, size_before, size, len(tail), is_zero)
        self._append(b"C", fields, b"" if is_zero else tail)

    def begin(self, names: dict[str, dict[str, int]], sizes: dict[int, int]) -> None:
        self._append(b"B", json.dumps([names, sizes]).encode())

    def add(self, kind: type[Record], *fields: object) -> None:
        """Appends any other record; `fields` are those after `at`."""
        self._append(_LETTERS[kind], json.dumps(fields).encode())

    def _append(self, letter: bytes, *parts: bytes) -> None:
        checksum = zlib.crc32(letter)
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        size = sum(map(len, parts))
        written = _writev(self._descriptor, [_HEAD.pack(_MAGIC, size, checksum, letter), *parts])
        assert written == _HEAD.size + size, f"the journal took {written} of {_HEAD.size + size} bytes"

    def close(self) -> None:
        os.close(self._descriptor)


def thread() -> str:
    """Names the process and thread that write a record."""
    return f"{os.getpid()}.{threading.get_ident()}"


def _is_zero(data: bytes) -> bool:
    return bool(data) and not data[0] and data == bytes(len(data))


# -- reading ----------------------------------------------------------------------------------------------------


def read(path: Path) -> Iterator[Record]:
    """Yields every whole record, in order."""
    data = path.read_bytes()
    at = data.find(_MAGIC)
    while at >= 0:
        end = at + _HEAD.size
        if end <= len(data):
            _, size, checksum, letter = _HEAD.unpack_from(data, at)
            body = data[end : end + size]
            if len(body) == size and zlib.crc32(body, zlib.crc32(letter)) == checksum:
                yield _record(letter, at, body)
                at = data.find(_MAGIC, end + size)
                continue
        at = data.find(_MAGIC, at + 1)


def _record(letter: bytes, at: int, body: bytes) -> Record:
    if letter == b"W":
        inode, position, size_before, old_size, new_size, old_zero, new_zero = _WRITE.unpack_from(body)
        old, rest = _split(body[_WRITE.size :], old_size, old_zero)
        return Write(at, inode, position, size_before, old, _split(rest, new_size, new_zero)[0])
    if letter == b"C":
        inode, size_before, size, tail_size, is_zero = _CUT.unpack_from(body)
        return Cut(at, inode, size_before, size, _split(body[_CUT.size :], tail_size, is_zero)[0])
    fields = json.loads(body)
    if letter == b"B":
        names, sizes = fields
        return Begun(at, names, {int(inode): size for inode, size in sizes.items()})
    found: Record = _KINDS[letter](at, *fields)
    return found


def _split(data: bytes, size: int, is_zero: bool) -> tuple[bytes, bytes]:
    return (bytes(size), data) if is_zero else (data[:size], data[size:])

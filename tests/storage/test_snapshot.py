"""Snapshots: there wholly or not at all, the newest two kept."""

import struct
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from postdate.errors import CorruptSnapshot
from postdate.storage import snapshot
from postdate.storage.snapshot import SLOTS, STATE, Section, Writer, path_of
from postdate.testing import FaultPoints
from tests.support.core import FaultyDisk


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(tmp_path)


def written(disk: FaultyDisk, position: int) -> None:
    writer = Writer(disk, position)
    writer.write_json({"name": "schlüssel", "n": 1})
    writer.write(SLOTS, b"slots")
    writer.finish()


def test_a_snapshot_comes_back_section_by_section(disk: FaultyDisk) -> None:
    written(disk, 4_096)
    sections = snapshot.read(disk, 4_096)
    assert [section.kind for section in sections] == [STATE, SLOTS]
    assert sections[0].json() == {"name": "schlüssel", "n": 1}
    assert sections[1] == Section(SLOTS, b"slots")
    assert snapshot.positions(disk) == [4_096]


def test_a_snapshot_is_spelled_byte_by_byte(disk: FaultyDisk) -> None:
    writer = Writer(disk, 258)
    writer.write(SLOTS, b"slots")
    writer.finish()
    data = disk.read(path_of(258), 0, 1_000)
    assert data[:16] == b"PDS1" + bytes.fromhex("01000000 0201000000000000")
    assert data[16:36] == struct.pack("<IqQ", 2, 5, xxh3_64_intdigest(b"slots", seed=2)), "the seed is the kind"
    assert data[36:41] == b"slots"
    count = bytes.fromhex("0100000000000000")
    assert data[41:] == struct.pack("<IqQ", 0, 8, xxh3_64_intdigest(count, seed=0)) + count


def test_a_snapshot_has_its_name_only_when_all_of_it_is_on_disk(disk: FaultyDisk) -> None:
    writer = Writer(disk, 1)
    writer.write(SLOTS, b"slots")
    assert snapshot.positions(disk) == []
    disk.calls.clear()
    with FaultPoints() as points:
        writer.finish()
    assert [call for call, _ in disk.calls] == ["write", "sync", "rename"]
    assert snapshot.positions(disk) == [1]
    assert points.reached[-2:] == ["snapshot.synced", "snapshot.done"]


def test_every_change_of_a_byte_and_every_cut_is_noticed(disk: FaultyDisk) -> None:
    written(disk, 77)
    path = disk.root / path_of(77)
    data = path.read_bytes()
    for position in range(len(data)):
        hurt = bytearray(data)
        hurt[position] ^= 0x01
        path.write_bytes(hurt)
        with pytest.raises(CorruptSnapshot, match=path_of(77)):
            snapshot.read(disk, 77)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptSnapshot, match=path_of(77)):
            snapshot.read(disk, 77)


def test_a_snapshot_under_another_name_does_not_count(disk: FaultyDisk) -> None:
    written(disk, 77)
    disk.rename(path_of(77), path_of(78))
    with pytest.raises(CorruptSnapshot, match="the header is damaged"):
        snapshot.read(disk, 78)


def test_the_newest_two_are_kept(disk: FaultyDisk) -> None:
    for position in (5, 100, 20, 3_000):
        written(disk, position)
    assert snapshot.positions(disk) == [3_000, 100, 20, 5]
    snapshot.remove_old(disk)
    assert snapshot.positions(disk) == [3_000, 100]


def test_unfinished_ones_are_removed_and_never_read(disk: FaultyDisk) -> None:
    written(disk, 5)
    Writer(disk, 9)
    assert snapshot.positions(disk) == [5]
    snapshot.remove_unfinished(disk)
    assert disk.list("snapshots") == [f"{5:020d}"]

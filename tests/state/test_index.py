"""The index of keys: every row is found again, whatever the hashes, through restarts, retention and full disks."""

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import CorruptQueue
from postdate.state import index as indexes
from postdate.state.index import Index, block_rows, index_file_rows
from postdate.storage.disk import RealDisk
from postdate.storage.layout import INDEX
from postdate.testing.disk import VirtualDisk
from tests.support.core import FaultyDisk

BLOCK = 4
FILE_ROWS = 14  # three blocks a file
EDGES = [1, 2, (1 << 32) - 1, 1 << 32, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1]
HASHES = st.one_of(st.sampled_from(EDGES), st.integers(1, (1 << 64) - 1), st.integers(1, 5))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "BLOCK_ROWS_MAX", BLOCK)


def offsets_of(index: Index, hashed: int) -> list[int]:
    return [offset for step in index.find(hashed) for offset in step.tolist()]


def filled(index: Index, hashes: list[int], start: int = 0) -> Index:
    for offset, hashed in enumerate(hashes, start):
        index.add(hashed, 0, offset)
    return index


def copied(index: Index, disk: VirtualDisk) -> Index:
    """As a snapshot saves it and a start loads it."""
    state, tail = index.state(), index.tail()
    loaded = Index(disk, FILE_ROWS, state["length"])
    loaded.load(state, tail)
    return loaded


def test_files_hold_whole_blocks() -> None:
    assert (block_rows(FILE_ROWS), index_file_rows(FILE_ROWS)) == (4, 12)
    assert (block_rows(3), index_file_rows(3)) == (3, 3)


@settings(deadline=None)
@given(st.lists(HASHES, max_size=70), HASHES)
def test_every_hash_is_found_newest_first(hashes: list[int], other: int) -> None:
    disk = VirtualDisk()
    index = filled(Index(disk, FILE_ROWS), hashes)
    assert index.rows.length == len(hashes) // BLOCK * BLOCK
    for tested in (index, copied(index, disk)):
        for hashed in {*hashes, other}:
            expected = [offset for offset, each in enumerate(hashes) if each == hashed][::-1]
            assert offsets_of(tested, hashed) == expected


@settings(deadline=None)
@given(st.lists(HASHES, max_size=40), st.lists(HASHES, max_size=6))
def test_many_hashes_are_found_as_one_by_one(hashes: list[int], others: list[int]) -> None:
    index = filled(Index(VirtualDisk(), FILE_ROWS), hashes)
    wanted = [*hashes[::2], *others]
    found = index.find_many(wanted)
    assert {hashed: sorted(offsets) for hashed, offsets in found.items()} == {
        hashed: sorted(offsets_of(index, hashed)) for hashed in wanted
    }


@settings(deadline=None)
@given(st.lists(st.tuples(HASHES | st.just(0), HASHES | st.just(0), st.lists(HASHES, max_size=6)), max_size=30))
def test_adding_one_by_one_and_by_columns_gives_the_same_bytes(messages: list[tuple[int, int, list[int]]]) -> None:
    one, many = Index(VirtualDisk(), FILE_ROWS), Index(VirtualDisk(), FILE_ROWS)
    rows: list[tuple[int, int]] = []
    for offset, (unique, first, others) in enumerate(messages):
        if unique or first:
            one.add(unique, first, offset)
            one.add_others(others, offset)
            rows += [(hashed, offset) for hashed in (unique, first, *others) if hashed]
    array = np.array(rows, INDEX)
    many.extend(array["hash"], array["offset"])
    assert one.rows.read(0, one.rows.length).tobytes() == many.rows.read(0, many.rows.length).tobytes()
    assert one.tail() == many.tail()


@pytest.mark.parametrize("skew", ["uniform", "low", "high", "same upper half"])
def test_a_block_of_the_real_size_is_sorted_and_searched(monkeypatch: pytest.MonkeyPatch, skew: str) -> None:
    """Hashes that are not uniform cost a longer search, nothing else."""
    monkeypatch.setattr(indexes, "BLOCK_ROWS_MAX", 16_384)
    random = np.random.default_rng(7)
    low, high = {
        "uniform": (1, 1 << 64), "low": (1, 1 << 20), "high": ((1 << 64) - (1 << 20), 1 << 64),
        "same upper half": (1 << 40, (1 << 40) + (1 << 32)),
    }[skew]  # fmt: skip
    hashes = random.integers(low, high, 3 * 16_384 + 100, np.uint64)
    index = Index(VirtualDisk(), 1 << 20)
    index.extend(hashes, np.arange(len(hashes)))
    assert index.rows.length == 3 * 16_384
    for start in range(0, index.rows.length, 16_384):
        block = index.rows.read(start, start + 16_384)["hash"]
        assert (block[1:] >= block[:-1]).all()
    for hashed in hashes[::997].tolist():
        assert offsets_of(index, hashed) == np.flatnonzero(hashes == np.uint64(hashed))[::-1].tolist()


def test_rows_that_come_during_a_search_do_not_disturb_it() -> None:
    index = filled(Index(VirtualDisk(), FILE_ROWS), [9] * 30)
    steps = index.find(9)
    found = next(steps).tolist()
    filled(index, [9] * 30, start=30)
    assert found + [offset for step in steps for offset in step.tolist()] == list(range(30))[::-1]


def test_retention_forgets_whole_blocks_and_says_where_it_begins() -> None:
    disk = VirtualDisk()
    index = filled(Index(disk, FILE_ROWS), list(range(1, 31)))
    assert index.begin == 0
    index.forget(before=14)
    assert index.rows.first == 12
    assert index.begin == 13, "the message at the edge may have had a key in the block before"
    assert offsets_of(index, 12) == []
    assert offsets_of(index, 13) == [12]
    assert copied(index, disk).begin == 13
    index.rows.remove_files(30)
    assert disk.list("index") == [f"{12:020d}", f"{24:020d}"]
    assert offsets_of(index, 30) == [29]
    index.forget(before=1_000)
    assert index.begin == 29, "what is in memory stays"
    assert offsets_of(index, 30) == [29]


def test_retention_between_two_steps_is_no_damage() -> None:
    disk = VirtualDisk()
    index = filled(Index(disk, FILE_ROWS), [9] * 36)
    steps = index.find(9)
    next(steps)
    index.forget(before=30)
    index.rows.remove_files(36)
    assert [offset for step in steps for offset in step.tolist()] == list(range(28, 36))[::-1]


def test_a_block_that_the_disk_does_not_take_is_found_in_memory(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    index = filled(Index(disk, FILE_ROWS), [7] * 6)
    disk.fault = lambda call, _path: OSError(errno.ENOSPC, "No space left on device") if call == "write" else None
    filled(index, [7] * 20, start=6)
    assert (index.rows.stored, index.rows.length) == (4, 24)
    assert offsets_of(index, 7) == list(range(26))[::-1]
    disk.fault = lambda _call, _path: None
    index.rows.spill()
    assert offsets_of(index, 7) == list(range(26))[::-1]


@pytest.mark.parametrize("hurt", ["missing", "short"])
def test_a_file_that_misses_rows_is_named(tmp_path: Path, hurt: str) -> None:
    index = filled(Index(RealDisk(tmp_path), FILE_ROWS), [7] * 14)
    path = tmp_path / "index" / f"{0:020d}"
    if hurt == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptQueue, match=f"index/{0:020d}"):
        offsets_of(index, 7)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=70), st.integers(0, 80))
def test_a_search_from_an_offset_on_finds_all_from_there(hashes: list[int], begin: int) -> None:
    """It may find older ones of the same blocks, too."""
    index = filled(Index(VirtualDisk(), FILE_ROWS), hashes)
    for hashed in range(1, 6):
        every = offsets_of(index, hashed)
        found = [offset for step in index.find(hashed, begin) for offset in step.tolist()]
        assert [offset for offset in found if offset >= begin] == [offset for offset in every if offset >= begin]
        assert set(found) <= set(every)
        assert all(offset >= min(begin, len(hashes) - BLOCK) - 2 * BLOCK for offset in found)

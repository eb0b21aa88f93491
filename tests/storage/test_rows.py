"""Rows in files: where files begin, what stays in memory, what a failing disk leaves."""

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import CorruptQueue
from postdate.storage import rows as rows_module
from postdate.storage.rows import Rows
from tests.support.core import FaultyDisk

DTYPE = np.dtype([("key", "<i8"), ("value", "<i4")])
FILE_ROWS, TAIL_ROWS = 8, 3
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(tmp_path)


def make(disk: FaultyDisk, length: int = 0) -> Rows:
    return Rows(disk, "rows", DTYPE, FILE_ROWS, TAIL_ROWS, length)


def row(n: int) -> bytes:
    return np.array([(n * 10, n)], DTYPE).tobytes()


def many(start: int, stop: int) -> np.ndarray:
    return np.array([(n * 10, n) for n in range(start, stop)], DTYPE)


def push(rows: Rows, start: int, stop: int) -> None:
    for n in range(start, stop):
        rows.push(row(n))


def values(rows: Rows, start: int, stop: int) -> list[int]:
    found: list[int] = rows.read(start, stop)["value"].tolist()
    return found


def sizes(disk: FaultyDisk) -> dict[int, int]:
    """By first row of each file: how many rows it holds."""
    return {int(name): disk.size(f"rows/{name}") // DTYPE.itemsize for name in disk.list("rows")}


def test_few_rows_stay_in_memory_and_are_read_from_there(disk: FaultyDisk) -> None:
    rows = make(disk)
    push(rows, 0, 2)
    assert (rows.length, rows.stored, sizes(disk)) == (2, 0, {})
    assert values(rows, 0, 10) == [0, 1]
    rows.push(row(2))
    assert (rows.length, rows.stored, sizes(disk)) == (3, 3, {0: 3})


def test_a_file_holds_so_many_rows_and_the_next_one_goes_on(disk: FaultyDisk) -> None:
    rows = make(disk)
    push(rows, 0, 20)
    rows.spill()
    assert sizes(disk) == {0: 8, 8: 8, 16: 4}
    assert values(rows, 0, 20) == list(range(20))
    assert values(rows, 7, 9) == [7, 8]
    assert values(rows, 15, 17) == [15, 16]
    assert values(rows, 20, 30) == []
    assert values(rows, 18, 30) == [18, 19]


def test_many_rows_go_over_several_files_at_once(disk: FaultyDisk) -> None:
    rows = make(disk)
    rows.push(row(0))
    rows.extend(many(1, 30))
    assert (rows.length, rows.stored) == (30, 30)
    assert sizes(disk) == {0: 8, 8: 8, 16: 8, 24: 6}
    rows.extend(many(30, 32))
    assert (rows.length, rows.stored) == (32, 30)
    assert values(rows, 0, 99) == list(range(32))
    rows.extend(many(32, 32))
    assert rows.length == 32


def test_rows_that_the_disk_does_not_take_stay_in_memory_and_are_written_later_in_order(disk: FaultyDisk) -> None:
    rows = make(disk)
    push(rows, 0, 3)
    disk.fault = lambda call, _: FULL if call == "write" else None
    push(rows, 3, 6)
    rows.extend(many(6, 20))
    rows.push(row(20))
    assert str(rows.write_error) == str(FULL)
    assert (rows.length, rows.stored) == (21, 3)
    assert values(rows, 0, 21) == list(range(21))
    assert values(rows, 2, 5) == [2, 3, 4]
    disk.fault = lambda _call, _path: None
    rows.extend(many(21, 40))
    assert rows.write_error is None
    rows.spill()
    assert rows.stored == 40
    assert values(make(disk, 40), 0, 40) == list(range(40))


def test_a_write_that_fails_half_way_is_done_again_wholly(disk: FaultyDisk) -> None:
    rows = make(disk)
    disk.fault = lambda call, path: FULL if call == "write" and path.endswith("8") else None
    rows.extend(many(0, 12))
    assert rows.stored == 0
    assert values(rows, 0, 12) == list(range(12))
    disk.fault = lambda _call, _path: None
    rows.spill()
    assert values(make(disk, 12), 0, 12) == list(range(12))


def test_a_failing_disk_is_tried_again_at_twice_as_many_rows(disk: FaultyDisk) -> None:
    rows = make(disk)
    disk.fault = lambda call, _: FULL if call == "write" else None
    push(rows, 0, 24)
    assert len([call for call in disk.calls if call[0] == "write"]) == 4, "at 3, 6, 12 and 24 rows"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("read_rows", [2, 512])
def test_search_gives_what_numpy_gives(
    disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch, side: str, read_rows: int
) -> None:
    monkeypatch.setattr(rows_module, "_READ_ROWS", read_rows)
    keys = [0, 0, 5, 5, 5, 9, 9, 12, 20, 20, 21, 30, 30, 30]
    for in_memory in (0, 2):
        rows = Rows(disk, f"rows{in_memory}", DTYPE, FILE_ROWS, 99)
        rows.extend(np.array([(key, 0) for key in keys[: len(keys) - in_memory]], DTYPE))
        rows.spill()
        rows.extend(np.array([(key, 0) for key in keys[len(keys) - in_memory :]], DTYPE))
        for value in range(-1, 32):
            expected = int(np.searchsorted(keys, value, "left" if side == "left" else "right"))
            assert rows.search("key", value, "left" if side == "left" else "right") == expected


def test_search_begins_at_the_first_row_that_is_there(disk: FaultyDisk) -> None:
    rows = make(disk)
    rows.extend(many(0, 24))
    rows.forget(17)
    rows.remove_files(24)
    assert rows.search("key", 0, "left") == 17
    assert rows.search("key", 200, "left") == 20
    rows.forget(24)
    assert rows.search("key", 0, "left") == 24


def test_forgotten_rows_keep_their_files_until_these_are_removed(disk: FaultyDisk) -> None:
    rows = make(disk)
    rows.extend(many(0, 24))
    rows.forget(17)
    assert (rows.first, sizes(disk)) == (17, {0: 8, 8: 8, 16: 8})
    rows.remove_files(24)
    assert sizes(disk) == {16: 8}
    rows.check_files()
    assert values(rows, 17, 24) == list(range(17, 24))


def test_whole_files_of_forgotten_rows_are_removed_and_no_others(disk: FaultyDisk) -> None:
    rows = make(disk)
    rows.extend(many(0, 24))
    rows.forget(7)
    rows.remove_files(24)
    assert (rows.first, sizes(disk)) == (7, {0: 8, 8: 8, 16: 8})
    rows.forget(8)
    rows.remove_files(24)
    assert (rows.first, sizes(disk)) == (8, {8: 8, 16: 8})
    rows.forget(3)
    assert rows.first == 8, "what is gone stays gone"
    rows.check_files()
    assert values(rows, 8, 24) == list(range(8, 24))


@pytest.mark.parametrize(("kept_length", "left"), [(0, 0), (1, 0), (8, 0), (9, 8), (16, 8), (17, 16), (24, 16)])
def test_a_file_stays_while_a_snapshot_ends_in_it(disk: FaultyDisk, kept_length: int, left: int) -> None:
    rows = make(disk)
    rows.extend(many(0, 24))
    rows.forget(24)
    rows.remove_files(kept_length)
    assert min(sizes(disk)) == left
    if kept_length:
        again = make(disk, kept_length)
        again.find_first()
        again.check_files()


def test_the_last_file_stays_however_much_is_forgotten(disk: FaultyDisk) -> None:
    rows = make(disk)
    rows.extend(many(0, 24))
    rows.forget(24)
    rows.remove_files(24)
    assert (rows.first, sizes(disk)) == (24, {16: 8})
    push(rows, 24, 30)
    assert values(rows, 24, 30) == list(range(24, 30))


def test_the_first_row_is_found_by_the_files_that_are_left(disk: FaultyDisk) -> None:
    """Retention removes files after a snapshot was taken; the snapshot does not know."""
    rows = make(disk)
    rows.extend(many(0, 24))
    again = make(disk, 24)
    again.find_first()
    assert again.first == 0
    disk.remove("rows/00000000000000000000")
    again.find_first()
    assert again.first == 8
    again.first = 11
    again.find_first()
    assert again.first == 11, "the snapshot may know more than the files do"
    again.check_files()
    shorter = make(disk, 5)
    shorter.find_first()
    assert shorter.first == 4, "the snapshot ends before the first file that is left"
    empty = make(disk, 0)
    empty.find_first()
    assert empty.first == 0


def test_without_files_the_first_row_stays(disk: FaultyDisk) -> None:
    rows = make(disk, 3)
    rows.find_first()
    assert rows.first == 0


@pytest.mark.parametrize("length", [0, 5, 8, 9, 16, 24])
def test_cutting_removes_what_a_replay_makes_again(disk: FaultyDisk, length: int) -> None:
    rows = make(disk)
    rows.extend(many(0, 24))
    rows = make(disk, length)
    rows.cut()
    assert sum(sizes(disk).values()) == length
    rows.check_files()
    rows.extend(many(100, 130))
    assert values(rows, 0, 999) == [*range(length), *range(100, 130)]


def test_missing_files_and_rows_are_named(disk: FaultyDisk) -> None:
    rows = make(disk)
    rows.extend(many(0, 24))
    disk.truncate("rows/00000000000000000008", 40)
    fresh = make(disk, 24)
    with pytest.raises(CorruptQueue, match="rows/00000000000000000008 has 40 bytes, 96 are needed"):
        fresh.check_files()
    with pytest.raises(
        CorruptQueue, match="rows/00000000000000000008 ends early: rows 8 to 15 need 96 bytes, it has 40"
    ):
        fresh.read(0, 24)
    disk.remove("rows/00000000000000000008")
    with pytest.raises(CorruptQueue, match="has 0 bytes"):
        fresh.check_files()
    with pytest.raises(CorruptQueue, match="rows/00000000000000000008 is missing, it should hold rows 8 to 15"):
        fresh.read(0, 24)


def test_checksums_cover_blocks_and_notice_a_change(disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "BLOCK_ROWS", 4)
    rows = make(disk)
    rows.extend(many(0, 10))
    assert len(list(rows.sum_blocks(10))) == 2
    assert rows.sums == [rows.block_sum(0, 10), rows.block_sum(1, 10)]
    assert len(set(rows.sums)) == 2
    assert list(rows.sum_blocks(10)) == [], "what is summed is not summed again"
    part = rows.block_sum(2, 10)
    rows.extend(many(10, 12))
    assert rows.block_sum(2, 10) == part, "rows that came later do not count"
    assert rows.block_sum(2, 12) != part
    rows.spill()
    disk.write("rows/00000000000000000000", 13, b"\xff")
    fresh = make(disk, 12)
    assert fresh.block_sum(0, 12) != rows.sums[0] or fresh.block_sum(1, 12) != rows.sums[1]
    rows.forget(8)
    assert rows.block_sum(0, 12) == 0


def test_paths_are_the_files_that_hold_rows(disk: FaultyDisk) -> None:
    rows = make(disk)
    names = [f"rows/{n:020d}" for n in (0, 8, 16)]
    assert rows.paths(0, 1) == names[:1]
    assert rows.paths(7, 9) == names[:2]
    assert rows.paths(8, 17) == names[1:]
    assert rows.paths(8, 8) == []


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["push", "extend", "spill", "break", "mend", "read"]), st.integers(0, 20))))
def test_any_story_reads_back_what_was_appended(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    disk = FaultyDisk(tmp_path_factory.mktemp("rows"))
    rows = make(disk)
    for verb, n in steps:
        if verb == "push":
            push(rows, rows.length, rows.length + n)
        elif verb == "extend":
            rows.extend(many(rows.length, rows.length + n))
        elif verb == "spill":
            rows.spill()
        elif verb in ("break", "mend"):
            broken = verb == "break"
            disk.fault = lambda call, _, broken=broken: FULL if broken and call == "write" else None  # type: ignore[misc]
        else:
            assert values(rows, n, n + 5) == list(range(n, min(n + 5, rows.length)))
    assert values(rows, 0, rows.length) == list(range(rows.length))
    disk.fault = lambda _call, _path: None
    rows.spill()
    assert values(make(disk, rows.length), 0, rows.length) == list(range(rows.length))

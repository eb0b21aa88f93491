"""The table of ids: every id is found until its window is over, whatever the hashes, through restarts and retention."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.arrival import NEVER
from postdate.state import once as ids
from postdate.state.once import Once, StoredOnce
from postdate.storage.layout import ONCE_ROW_STRUCT
from postdate.testing.disk import VirtualDisk

FILE_ROWS = 8
# Of some the search begins at the same place, and at the end of the table.
EDGES = [1, 2, 1 << 10, (1 << 10) + 1, 1023, 2047, (1 << 20) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
HASHES = st.one_of(st.sampled_from(EDGES), st.integers(1, (1 << 32) - 1))


def add(once: Once, *row: int) -> None:
    """Adds a row: hash, window, offset, due, queue offset."""
    hashed, until_ms, *place = row
    once.add(hashed, until_ms, ONCE_ROW_STRUCT.pack(hashed, 100, until_ms, *place))


def filled(hashes: list[int], windows: list[int] | None = None, disk: VirtualDisk | None = None) -> Once:
    once = Once(disk or VirtualDisk(), FILE_ROWS, 4, 1)
    for offset, hashed in enumerate(hashes):
        add(once, hashed, windows[offset] if windows else 100, offset, 0, offset)
    return once


def copied(once: Once, disk: VirtualDisk) -> Once:
    """As a snapshot saves it and a start loads it."""
    once.rows.spill()
    loaded = Once(disk, FILE_ROWS, 4, 1)
    loaded.load(once.state())
    loaded.rows.find_first()
    loaded.index()
    return loaded


def found(once: Once, hashed: int) -> list[int]:
    return sorted(row.offset for row in once.find(hashed))


@settings(deadline=None)
@given(st.lists(HASHES, max_size=60), st.integers(0, 60), HASHES)
def test_every_hash_is_found_while_its_row_is_kept(hashes: list[int], gone: int, other: int) -> None:
    disk = VirtualDisk()
    once = filled(hashes, [1] * min(gone, len(hashes)) + [9] * (len(hashes) - gone), disk)
    before = found(once, other)
    assert before == [offset for offset, each in enumerate(hashes) if each == other]
    left = once.forget_passed(5, 60)
    assert left == list(range(min(gone, len(hashes))))
    for tested in (once, copied(once, disk)):
        assert tested.count == len(hashes) - len(left)
        for hashed in {*hashes, other}:
            kept = [offset for offset, each in enumerate(hashes) if each == hashed and offset >= gone]
            assert found(tested, hashed) == kept


@settings(deadline=None)
@given(st.lists(HASHES, max_size=40), st.integers(0, 40))
def test_many_rows_are_added_as_one_by_one(hashes: list[int], cut: int) -> None:
    one_by_one, many = filled(hashes), filled(hashes[:cut])
    rest = one_by_one.rows.read(cut, len(hashes))
    if len(rest):
        many.extend(rest)
    assert many.rows.read(0, many.rows.length).tolist() == one_by_one.rows.read(0, len(hashes)).tolist()
    assert (many.count, many.next_until_ms) == (one_by_one.count, one_by_one.next_until_ms)
    assert [found(many, hashed) for hashed in hashes] == [found(one_by_one, hashed) for hashed in hashes]


def hash_of(number: int) -> int:
    return number * 0x9E3779B9 % (1 << 32) or 1


def test_rows_that_come_and_go_for_long_find_their_place() -> None:
    once = Once(VirtualDisk(), 64, 4, 8)
    for number in range(5_000):
        add(once, hash_of(number), number + 10, number, 0, 0)
        once.forget_passed(number, 1)
        assert once.count <= 11
    assert [found(once, hash_of(number)) for number in (4_989, 4_990, 4_999)] == [
        [], [4_990], [4_999],
    ]  # fmt: skip


def test_the_number_of_a_row_may_need_more_than_32_bits() -> None:
    once = Once(VirtualDisk(), FILE_ROWS, 100, 1)
    once.load({"length": (1 << 32) - 2, "first": (1 << 32) - 2, "gone": (1 << 32) - 2})
    for offset in range(4):
        add(once, 7 << 20 | offset, 10 + offset, offset, 0, 0)
    assert [found(once, 7 << 20 | offset) for offset in range(4)] == [[0], [1], [2], [3]]
    assert once.forget_passed(11, 1) == [0, 1]
    assert [found(once, 7 << 20 | offset) for offset in range(4)] == [[], [], [2], [3]]


def test_a_row_says_what_the_first_send_was_answered() -> None:
    once = filled([])
    add(once, 5, 200, 4_096, 77, -1)
    assert once.find(5) == [StoredOnce(5, 100, 200, 4_096, 77, -1)]
    assert once.find(6) == []


def test_few_rows_leave_with_a_batch_and_a_longer_window_keeps_those_behind_it() -> None:
    count = ids.FORGOTTEN_PER_BATCH
    once = filled(list(range(1, 2 * count + 5)), [10] * (2 * count) + [30, 10, 30, 20])
    assert (once.next_until_ms, len(once.forget_passed(9, 0))) == (10, 0)
    assert len(once.forget_passed(10, 0)) == count
    assert len(once.forget_passed(10, 10)) == count
    assert (once.count, once.next_until_ms) == (4, 30), "the first of those left has a longer window"
    assert len(once.forget_passed(10, 10)) == 0
    assert len(once.forget_passed(30, 10)) == 4
    assert (once.count, once.next_until_ms) == (0, NEVER)
    add(once, 5, 50, 0, 0, 0)
    assert once.next_until_ms == 50


@pytest.mark.parametrize(("count", "passed"), [(1, True), (2, True), (3, False), (4, False)])
def test_whether_the_first_rows_are_over(count: int, passed: bool) -> None:
    assert filled([1, 2, 3], [10, 10, 20]).is_passed(count, 10) is passed

"""How a window is split into tasks: a pure function of statistics."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.arrival import NEVER
from postdate.table.files import RowGroup, Window
from postdate.table.slices import Limits, split_window


def group(rows: int, due: tuple[int, int], arrival: tuple[int, int] = (0, 1_000)) -> RowGroup:
    return RowGroup(rows, rows * 300, *due, *arrival, False)


def test_a_window_that_fits_is_one_task() -> None:
    assert split_window([group(100, (10, 20))], Window(-1, NEVER)) == [Window(9, 20)]


def test_nothing_makes_no_task() -> None:
    assert split_window([], Window(-1, NEVER)) == []


def test_a_full_window_is_cut_into_neighbours() -> None:
    found = split_window([group(1_000, (0, 59_999))], Window(-1, 60_000), Limits(rows=250))
    assert len(found) == 4
    assert found[0].due_low == -1
    assert found[-1].due_high == 59_999
    assert all(left.due_high == right.due_low for left, right in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("rows", "slots", "tasks"),
    [(251, 2, 1), (280, 2, 2), (500, 2, 2), (600, 2, 4), (600, 4, 3), (1_001, 4, 4), (1_100, 4, 8)],
)
def test_tasks_are_of_one_size_and_leave_no_slot_over(rows: int, slots: int, tasks: int) -> None:
    found = split_window([group(rows, (1, 60_000))], Window(-1, 60_000), Limits(rows=250, slots=slots))
    spans = [piece.due_high - piece.due_low for piece in found]
    assert len(found) == tasks
    assert max(spans) - min(spans) <= tasks


def test_a_burst_at_one_instant_is_cut_by_arrival() -> None:
    found = split_window([group(1_000, (7, 7), (0, 9_999))], Window(-1, 60_000), Limits(rows=250))
    assert {(piece.due_low, piece.due_high) for piece in found} == {(6, 7)}
    assert len(found) >= 4
    edges = sorted((piece.arrival_low, piece.arrival_high) for piece in found)
    assert edges[0][0] == 0
    assert edges[-1][1] == NEVER
    assert all(left[1] == right[0] for left, right in itertools.pairwise(edges))


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 5_000), st.integers(0, 5_000), st.integers(0, 10_000)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 400),
)
@settings(max_examples=200, deadline=None)
def test_every_row_is_in_exactly_one_slice(shapes: list[tuple[int, int, int, int]], rows_max: int) -> None:
    groups = [group(rows, (low, low + span), (first, first + 1_000)) for rows, low, span, first in shapes]
    window = Window(-1, NEVER)
    found = split_window(groups, window, Limits(rows=rows_max))
    for due in {edge for each in groups for edge in (each.due_low, each.due_high)}:
        for arrival in (0, 500, 5_000, 11_000):
            holders = [
                piece
                for piece in found
                if piece.due_low < due <= piece.due_high and piece.arrival_low <= arrival < piece.arrival_high
            ]
            assert len(holders) == 1, (due, arrival, found)


def test_what_is_late_stays_with_its_window() -> None:
    found = split_window([group(1_000, (0, 59_999))], Window(-1, 60_000, after=30_000, late_from=77), Limits(rows=250))
    assert {(piece.after, piece.late_from) for piece in found} == {(30_000, 77)}

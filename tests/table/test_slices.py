"""How work is cut into tasks, and which files are merged: pure functions, no Spark."""

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.spark.pipeline.source import horizon_of
from postdate.table import merging
from postdate.table.files import NEVER, Group, Window
from postdate.table.format import File
from postdate.table.merging import DAY_MS, HOUR_MS, NO_MONTHS, buckets, planned
from postdate.table.slices import Limits, slices

NOW = int(datetime(2030, 1, 15, 12, 30, tzinfo=UTC).timestamp() * 1_000)


def group(rows: int, due: tuple[int, int], arrival: tuple[int, int] = (0, 1_000)) -> Group:
    return Group(rows, rows * 300, *due, *arrival, False)


# -- slices


def test_a_window_that_fits_is_one_task() -> None:
    assert slices([group(100, (10, 20))], Window(-1, NEVER)) == [Window(9, 20)]


def test_nothing_makes_no_task() -> None:
    assert slices([], Window(-1, NEVER)) == []


def test_a_full_window_is_cut_into_neighbours() -> None:
    found = slices([group(1_000, (0, 59_999))], Window(-1, 60_000), Limits(rows=250))
    assert len(found) == 4
    assert found[0].due_low == -1
    assert found[-1].due_high == 59_999
    assert all(left.due_high == right.due_low for left, right in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("rows", "slots", "tasks"),
    [(251, 2, 1), (280, 2, 2), (500, 2, 2), (600, 2, 4), (600, 4, 3), (1_001, 4, 4), (1_100, 4, 8)],
)
def test_tasks_are_of_one_size_and_leave_no_slot_over(rows: int, slots: int, tasks: int) -> None:
    found = slices([group(rows, (1, 60_000))], Window(-1, 60_000), Limits(rows=250, slots=slots))
    spans = [piece.due_high - piece.due_low for piece in found]
    assert len(found) == tasks
    assert max(spans) - min(spans) <= tasks


def test_a_burst_at_one_instant_is_cut_by_arrival() -> None:
    found = slices([group(1_000, (7, 7), (0, 9_999))], Window(-1, 60_000), Limits(rows=250))
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
    found = slices(groups, window, Limits(rows=rows_max))
    for due in {edge for each in groups for edge in (each.due_low, each.due_high)}:
        for arrival in (0, 500, 5_000, 11_000):
            holders = [
                piece
                for piece in found
                if piece.due_low < due <= piece.due_high and piece.arrival_low <= arrival < piece.arrival_high
            ]
            assert len(holders) == 1, (due, arrival, found)


def test_what_is_late_stays_with_its_window() -> None:
    found = slices([group(1_000, (0, 59_999))], Window(-1, 60_000, after=30_000, late_from=77), Limits(rows=250))
    assert {(piece.after, piece.late_from) for piece in found} == {(30_000, 77)}


# -- the horizon


@pytest.mark.parametrize(
    ("now_ms", "horizon_ms"), [(0, 60_000), (1, 120_000), (59_999, 120_000), (60_000, 120_000), (60_001, 180_000)]
)
def test_the_horizon_is_a_whole_minute_one_to_two_ahead(now_ms: int, horizon_ms: int) -> None:
    assert horizon_of(now_ms, 60_000) == horizon_ms


# -- tiers


def file(tier: str, low: int, high: int, *, rows: int = 1_000, number: int = 0) -> File:
    return File(f"{tier}-{number:06d}.parquet", rows * 100, rows, low, high, number, number + 1)


def test_few_files_are_left_alone() -> None:
    files = [file("soon", NOW, NOW + DAY_MS, number=n) for n in range(59)]
    assert planned(files, NOW, NOW, 0) is None


def test_many_soon_files_become_hours() -> None:
    files = [file("soon", NOW + 60_000, NOW + DAY_MS, number=n) for n in range(60)]
    merge = planned(files, NOW, NOW, 0)
    assert merge is not None
    assert len(merge.files) == 60
    assert {tier for tier, _, _ in merge.buckets} == {"hour"}
    assert merge.buckets[0][1] == NOW + 59_999
    assert merge.buckets[-1][2] == NOW + DAY_MS


def test_later_files_become_hours_and_months() -> None:
    files = [file("later", NOW + 2 * DAY_MS, NOW + 90 * DAY_MS, number=n) for n in range(500)]
    merge = planned(files, NOW, NOW, 0)
    assert merge is not None
    tiers_found = [tier for tier, _, _ in merge.buckets]
    assert tiers_found.count("month") == 4
    assert tiers_found.count("hour") == 25
    assert tiers_found == sorted(tiers_found)


def test_a_later_file_whose_rows_come_near_is_merged_in_time() -> None:
    files = [file("later", NOW + DAY_MS - 1, NOW + 90 * DAY_MS)]
    assert planned(files, NOW, NOW, 0) is not None


def test_a_month_is_cut_into_hours_when_it_comes_near_once_a_day() -> None:
    month = file("month", NOW + 3 * DAY_MS - 1, NOW + 16 * DAY_MS)
    merge = planned([month], NOW, NOW, 0)
    assert merge is not None
    assert {tier for tier, _, _ in merge.buckets} == {"hour"}
    assert merge.ends_cut
    assert planned([month], NOW, NOW, NOW - HOUR_MS) is None
    assert planned([month._replace(due_low=NOW + DAY_MS - 1)], NOW, NOW, NOW - HOUR_MS) is not None
    assert planned([month._replace(due_low=NOW + 3 * DAY_MS)], NOW, NOW, 0) is None


def test_a_merge_is_bounded() -> None:
    files = [file("soon", NOW, NOW + DAY_MS, rows=1_000_000, number=n) for n in range(60)]
    merge = planned(files, NOW, NOW, 0)
    assert merge is not None
    assert sum(each.rows for each in merge.files) == 8_000_000


def test_hours_are_final() -> None:
    assert planned([file("hour", NOW, NOW + HOUR_MS, number=n) for n in range(5_000)], NOW, NOW, 0) is None


@given(st.integers(0, 400 * DAY_MS), st.integers(1, 400 * DAY_MS), st.integers(-10, 400))
@settings(max_examples=100, deadline=None)
def test_buckets_cover_a_window_without_gap_or_overlap(start: int, span: int, months_after_days: int) -> None:
    low, high = NOW + start, NOW + start + min(span, 40 * DAY_MS)
    found = buckets(low, high, NOW + months_after_days * DAY_MS)
    assert found[0][1] == low
    assert found[-1][2] == high
    assert all(left[2] == right[1] for left, right in itertools.pairwise(found))
    for tier, first, last in found:
        if tier == "hour":
            assert (first + 1) // HOUR_MS == last // HOUR_MS
        else:
            months = {datetime.fromtimestamp(at / 1_000, UTC).strftime("%Y-%m") for at in (first + 1, last)}
            assert len(months) == 1


def test_hours_only_where_no_months_are_wanted() -> None:
    assert {tier for tier, _, _ in buckets(NOW, NOW + 40 * DAY_MS, NO_MONTHS)} == {"hour"}


def test_the_edge_is_a_whole_hour_two_days_ahead() -> None:
    assert merging.edge_ms(NOW) == NOW - NOW % HOUR_MS + 2 * DAY_MS

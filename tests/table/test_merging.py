"""Which files are merged, and into what: pure functions of files and time."""

import itertools
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.table import merging
from postdate.table.format import File
from postdate.table.merging import DAY_MS, HOUR_MS, NO_MONTHS, plan_merge, split_buckets

NOW = int(datetime(2030, 1, 15, 12, 30, tzinfo=UTC).timestamp() * 1_000)


def file(tier: str, low: int, high: int, *, rows: int = 1_000, number: int = 0) -> File:
    return File(f"{tier}-{number:06d}.parquet", rows * 100, rows, low, high, number, number + 1)


def test_few_files_are_left_alone() -> None:
    files = [file("soon", NOW, NOW + DAY_MS, number=n) for n in range(59)]
    assert plan_merge(files, NOW, NOW, 0) is None


def test_many_soon_files_become_hours() -> None:
    files = [file("soon", NOW + 60_000, NOW + DAY_MS, number=n) for n in range(60)]
    merge = plan_merge(files, NOW, NOW, 0)
    assert merge is not None
    assert len(merge.files) == 60
    assert {tier for tier, _, _ in merge.buckets} == {"hour"}
    assert merge.buckets[0][1] == NOW + 59_999
    assert merge.buckets[-1][2] == NOW + DAY_MS


def test_later_files_become_hours_and_months() -> None:
    files = [file("later", NOW + 2 * DAY_MS, NOW + 90 * DAY_MS, number=n) for n in range(500)]
    merge = plan_merge(files, NOW, NOW, 0)
    assert merge is not None
    tiers_found = [tier for tier, _, _ in merge.buckets]
    assert tiers_found.count("month") == 4
    assert tiers_found.count("hour") == 25
    assert tiers_found == sorted(tiers_found)


def test_a_later_file_whose_rows_come_near_is_merged_in_time() -> None:
    files = [file("later", NOW + DAY_MS - 1, NOW + 90 * DAY_MS)]
    assert plan_merge(files, NOW, NOW, 0) is not None


def test_a_month_is_cut_into_hours_when_it_comes_near_once_a_day() -> None:
    month = file("month", NOW + 3 * DAY_MS - 1, NOW + 16 * DAY_MS)
    merge = plan_merge([month], NOW, NOW, 0)
    assert merge is not None
    assert {tier for tier, _, _ in merge.buckets} == {"hour"}
    assert merge.ends_split
    assert plan_merge([month], NOW, NOW, NOW - HOUR_MS) is None
    assert plan_merge([month._replace(due_low=NOW + DAY_MS - 1)], NOW, NOW, NOW - HOUR_MS) is not None
    assert plan_merge([month._replace(due_low=NOW + 3 * DAY_MS)], NOW, NOW, 0) is None


def test_a_merge_is_bounded() -> None:
    files = [file("soon", NOW, NOW + DAY_MS, rows=1_000_000, number=n) for n in range(60)]
    merge = plan_merge(files, NOW, NOW, 0)
    assert merge is not None
    assert sum(each.rows for each in merge.files) == 8_000_000


def test_hours_are_final() -> None:
    assert plan_merge([file("hour", NOW, NOW + HOUR_MS, number=n) for n in range(5_000)], NOW, NOW, 0) is None


@given(st.integers(0, 400 * DAY_MS), st.integers(1, 400 * DAY_MS), st.integers(-10, 400))
@settings(max_examples=100, deadline=None)
def test_buckets_cover_a_window_without_gap_or_overlap(start: int, span: int, months_after_days: int) -> None:
    low, high = NOW + start, NOW + start + min(span, 40 * DAY_MS)
    found = split_buckets(low, high, NOW + months_after_days * DAY_MS)
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
    assert {tier for tier, _, _ in split_buckets(NOW, NOW + 40 * DAY_MS, NO_MONTHS)} == {"hour"}


def test_the_edge_is_a_whole_hour_two_days_ahead() -> None:
    assert merging.edge_ms(NOW) == NOW - NOW % HOUR_MS + 2 * DAY_MS

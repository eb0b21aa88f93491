"""Arrivals: which row a job brings, which job brought a row, and which message came before a cancel."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postdate.arrival import NEVER, OWN, PART_ROWS_MAX, PARTS_MAX, came_before, job_of, own_arrival

JOBS = st.integers(0, 100_000)
PARTS = st.integers(0, PARTS_MAX - 1)
ROWS = st.integers(0, PART_ROWS_MAX - 1)


@given(JOBS, PARTS, ROWS)
def test_an_arrival_of_its_own_tells_its_job(job: int, part: int, row: int) -> None:
    arrival = own_arrival(job, part, row)
    assert OWN <= arrival < NEVER
    assert job_of(arrival) == job


@given(st.tuples(JOBS, PARTS, ROWS), st.tuples(JOBS, PARTS, ROWS))
def test_own_arrivals_are_in_the_order_of_job_part_and_row(
    first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    assert (own_arrival(*first) < own_arrival(*second)) == (first < second)


def test_jobs_can_be_read_off_a_column() -> None:
    column = np.array([own_arrival(3), own_arrival(7, 2, 9)])
    assert job_of(column).tolist() == [3, 7]


def test_a_message_of_the_log_came_before_a_cancel_where_its_place_is_lower() -> None:
    assert came_before(99, cancel=100, jobs=0)
    assert not came_before(101, cancel=100, jobs=5)


def test_a_message_of_a_job_came_before_a_cancel_where_the_job_was_there_by_then() -> None:
    assert came_before(own_arrival(2), cancel=100, jobs=3)
    assert not came_before(own_arrival(3), cancel=100, jobs=3)

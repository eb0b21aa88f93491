"""Counting and finding in columns, against the plain way."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postdate.state.arrays import add, among, counts, places_of, subtract

numbers = st.lists(st.integers(-1, 30), max_size=40)


@given(numbers)
def test_every_value_is_counted(values: list[int]) -> None:
    assert counts(np.array(values, np.int64)) == sorted(Counter(values).items())


@given(st.lists(st.integers(0, 9), max_size=40))
def test_what_is_added_can_be_subtracted(values: list[int]) -> None:
    counters = [5] * 10
    add(counters, np.array(values, np.int64))
    assert counters == [5 + values.count(number) for number in range(10)]
    subtract(counters, np.array(values, np.int64))
    assert counters == [5] * 10


@given(numbers, st.sets(st.integers(-1, 30)))
def test_what_is_wanted_is_found(values: list[int], wanted: set[int]) -> None:
    ascending = np.array(sorted(wanted), np.int64)
    assert among(np.array(values, np.int64), ascending).tolist() == [value in wanted for value in values]
    values.sort()
    places = [place for place, value in enumerate(values) if value in wanted]
    assert places_of(np.array(values, np.int64), ascending).tolist() == places

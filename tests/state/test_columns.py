"""Many rows at once: columns against the plain way."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.state.columns import Grouped, add, among, counts, key_rows_of, places_of, subtract
from postdate.state.topics import GONE
from postdate.storage.batch import MORE_KEYS
from postdate.storage.layout import ROW

NOWHERE = -7
numbers = st.lists(st.integers(-1, 30), max_size=40)


@given(st.lists(st.integers(GONE, 4), min_size=1, max_size=40), st.sampled_from([0, 70_000]))
def test_groups_keep_their_order_and_tell_everybody_its_place(target: list[int], above: int) -> None:
    """Numbers above 65,535 are sorted another way."""
    target = [number + above if number != GONE else GONE for number in target]
    grouped, queues = Grouped(np.array(target, np.int32)), dict[int, list[int]]()
    order = range(len(target)) if grouped.order is None else grouped.order.tolist()
    for number, start, stop in grouped.groups:
        if number != GONE:
            grouped.first[number] = 10
            queues[number] = list(order)[start:stop]
    assert queues == {
        number: [place for place, each in enumerate(target) if each == number] for number in set(target) - {GONE}
    }
    shown = [NOWHERE if each == GONE else 10 + queues[each].index(place) for place, each in enumerate(target)]
    assert grouped.places(NOWHERE).tolist() == shown


@pytest.mark.parametrize("more", [0, MORE_KEYS])
def test_keys_stand_message_by_message_and_a_missing_one_is_left_out(more: int) -> None:
    rows = np.zeros(3, ROW)
    rows["unique_hash"], rows["key_hash"], rows["size"] = [1, 0, 3], [11, 0, 0], [5, 6, 7]
    rows["flags"][0] = more
    others = [105, 8] if more else []
    hashes, offsets = key_rows_of(rows, np.array([100, 200, 300]), [others] if more else [])
    assert hashes.tolist() == [1, 11, *others, 3]
    assert offsets.tolist() == [100, 100, *[100 for _ in others], 300]


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

"""Rows of a batch as others keep them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.state.columns import Grouped, key_rows_of
from postdate.state.topics import GONE
from postdate.storage.batch import MORE_KEYS, ROW

NOWHERE = -7


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
    hashes, offsets = key_rows_of(rows, np.array([100, 200, 300]), lambda offset, size: [offset + size, 8])
    others = [105, 8] if more else []
    assert hashes.tolist() == [1, 11, *others, 3]
    assert offsets.tolist() == [100, 100, *[100 for _ in others], 300]

"""What waits, counted by topic and by time."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from postdate.counts import Counts

NAMES = ["a", "b", "c"]
rows = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.integers(0, 1 << 32)), max_size=60)


def counted(pieces: list[list[tuple[int, int, int]]], limit: int) -> Counts:
    counts = Counts(10, limit)
    for piece in pieces:
        due, topic, size = (np.array([row[n] for row in piece], np.int64) for n in range(3))
        counts.add(due, topic, size, NAMES)
    return counts


@given(st.lists(rows, max_size=4), st.lists(rows, max_size=4), st.integers(1, 8))
def test_counts_are_those_of_one_by_one_in_one_place_or_two(
    here: list[list[tuple[int, int, int]]], there: list[list[tuple[int, int, int]]], limit: int
) -> None:
    number, size = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for due, topic, byte_count in (row for piece in here + there for row in piece):
        number[due // 10 * 10, NAMES[topic]] += 1
        size[due // 10 * 10, NAMES[topic]] += byte_count
    counts = counted(here, limit)
    counts.merge(Counts.of(counted(there, limit).plain(), 10, limit))
    assert counts.earliest() == [(row, (number[row], size[row])) for row in sorted(number)[:limit]]
    assert counts.is_truncated == (len(number) > limit)
    assert counts.total == (number.total(), size.total())
    assert {name: amount.rows for name, amount in counts.topics.items()} == {
        name: sum(count for (_, own), count in number.items() if own == name) for name in {name for _, name in number}
    }

"""What waits, counted by topic and by time."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.counts import Counts, Seconds

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


@given(st.lists(st.integers(0, 70_000), max_size=80), st.lists(st.integers(0, 70_000), max_size=80))
def test_bars_and_their_busiest_seconds_are_those_of_one_by_one(here: list[int], there: list[int]) -> None:
    """Of a span from 5 s to 65 s, counted in two places."""
    seconds, other = Seconds(5_000, 60), Seconds(5_000, 60)
    for counts, dues in ((seconds, here), (other, there)):
        due = np.array(dues, np.int64)
        counts.add(due, due, due, [])
    seconds.merge(other.packed())
    number = Counter(due // 1_000 for due in here + there)
    for n, bar in enumerate(seconds.bars(20)):
        own = [number[5 + n * 20 + second] for second in range(20)]
        assert (bar.from_ms, bar.rows) == (5_000 + n * 20_000, sum(own))
        assert (bar.busiest_ms, bar.busiest_rows) == (bar.from_ms + own.index(max(own)) * 1_000, max(own))


def test_seconds_of_another_span_are_not_added() -> None:
    with pytest.raises(ValueError, match="2 seconds, expected 3"):
        Seconds(0, 3).merge(Seconds(0, 2).packed())

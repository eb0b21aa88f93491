"""Cancels that wait for their message."""

import heapq
import json

import pytest

from postdate.state.cancels import Tombstone, Tombstones


def tombstone(due: int, arrival: int, far_offset: int = -1, far_before: int = 0, key: str = "k") -> Tombstone:
    return Tombstone("t", key, "unique", due, arrival, 99, far_offset, far_before)


def never_asked(entry: Tombstone) -> bool:
    raise AssertionError(f"nobody may ask about {entry}")


def test_tombstones_are_found_by_due() -> None:
    tombstones = Tombstones()
    a, b, c = tombstone(5, 1), tombstone(5, 2), tombstone(9, 3)
    for entry in (a, b, c):
        tombstones.add(entry)
    assert (tombstones.at(5), tombstones.at(9), tombstones.at(7)) == ([a, b], [c], [])
    assert list(tombstones.between(5, 8)) == [a, b]
    assert set(tombstones.between(5, 9)) == {a, b, c}
    assert tombstones.count == 3
    assert (a.column, a._replace(by="key").column) == ("unique_hash", "key_hash")


def test_only_fired_ones_that_are_not_needed_are_swept() -> None:
    tombstones = Tombstones()
    needed, not_needed, later = tombstone(5, 1), tombstone(5, 2), tombstone(9, 3)
    for entry in (needed, not_needed, later):
        tombstones.add(entry)
    tombstones.fire(4, never_asked)
    tombstones.sweep(never_asked)
    assert tombstones.count == 3, "none has been fired"
    tombstones.fire(5, lambda entry: entry is needed)
    assert (tombstones.at(5), tombstones.count) == ([needed], 2)
    tombstones.fire(5, never_asked)
    assert tombstones.at(5) == [needed], "firing looks at a due once"
    tombstones.sweep(lambda entry: entry is needed)
    assert (tombstones.at(5), tombstones.count) == ([needed], 2)
    tombstones.sweep(lambda _: False)
    assert (tombstones.at(5), tombstones.count) == ([], 1)
    assert tombstones.at(9) == [later]


def test_a_due_that_comes_again_after_it_was_swept_is_swept_again() -> None:
    tombstones = Tombstones()
    for _ in range(2):
        tombstones.add(tombstone(5, 1))
        tombstones.fire(5, lambda _: True)
        assert tombstones.count == 1
        tombstones.sweep(lambda _: False)
        assert tombstones.count == 0


def test_one_that_joins_a_fired_due_is_swept_with_it() -> None:
    tombstones = Tombstones()
    tombstones.add(tombstone(5, 1))
    tombstones.fire(5, lambda _: True)
    tombstones.add(tombstone(5, 2))
    tombstones.sweep(lambda entry: entry.arrival == 1)
    assert tombstones.count == 1
    tombstones.sweep(lambda _: False)
    assert tombstones.count == 0


def test_those_that_the_table_carries_are_forgotten() -> None:
    tombstones = Tombstones()
    before, taken, behind, none = tombstone(5, 1, 0), tombstone(20, 2, 1), tombstone(20, 3, 2), tombstone(20, 4, -1)
    for entry in (before, taken, behind, none):
        tombstones.add(entry)
    tombstones.forget_taken(2, 10)
    assert tombstones.at(5) == [before], "its due is not beyond the horizon: its message may be in a chunk on its way"
    assert tombstones.at(20) == [behind, none]
    assert tombstones.count == 3
    tombstones.forget_taken(9, 10)
    assert tombstones.at(20) == [none]


def test_a_due_that_was_forgotten_is_not_fired() -> None:
    tombstones = Tombstones()
    tombstones.add(tombstone(20, 1, 0))
    tombstones.add(tombstone(30, 2, 5))
    tombstones.forget_taken(1, 10)
    tombstones.fire(20, never_asked)
    asked: list[Tombstone] = []
    tombstones.fire(30, lambda entry: bool(asked.append(entry)))  # type: ignore[func-returns-value]
    assert [entry.due for entry in asked] == [30]
    assert tombstones.count == 0


def test_many_are_forgotten_without_looking_at_all_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may take a hundred thousand cancels along; a quadratic walk would hold the broker for minutes."""
    tombstones, count = Tombstones(), 2_000
    looks = 0

    def heapify(heap: list[int]) -> None:
        nonlocal looks
        looks += len(heap)
        heap.sort()

    monkeypatch.setattr(heapq, "heapify", heapify)
    for n in range(count):
        tombstones.add(tombstone(1_000_000 + n, n, n))
    tombstones.forget_taken(count, 10)
    assert tombstones.count == 0
    assert looks <= 20 * count


def test_the_state_comes_back() -> None:
    tombstones = Tombstones()
    for due, arrival in ((9, 1), (5, 2), (9, 3), (7, 4)):
        tombstones.add(tombstone(due, arrival, arrival, 2))
    tombstones.fire(7, lambda _: True)
    again = Tombstones()
    again.load(json.loads(json.dumps(tombstones.state())), 7)
    assert again.state() == tombstones.state()
    assert again.count == 4
    again.sweep(lambda _: False)
    assert sorted(entry.due for entry in again.state()) == [9, 9], "what was fired before is known to be"


def test_dues_whose_tombstones_the_table_carries_cost_nothing_any_more() -> None:
    tombstones = Tombstones()
    for n in range(5_000):
        tombstones.add(tombstone(10_000 + n, n, far_offset=n))
    tombstones.forget_taken(5_000, 0)
    assert tombstones.count == 0
    assert len(tombstones._dues) <= 1_000, "places of forgotten ones are passed over, but not hoarded"
    tombstones.add(tombstone(7, 1))
    tombstones.fire(7, lambda _: False)
    assert tombstones.count == 0

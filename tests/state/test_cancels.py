"""Cancels: which rows they take, and how long they are remembered."""

import heapq
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from postdate.keys import key_hash
from postdate.message import LOOPBACK, PROPERTY_UNIQ_KEY, Message, encode_properties
from postdate.state.cancels import Cancels, Tombstone
from postdate.state.far import Far
from postdate.state.jobs import Jobs
from postdate.state.references import References
from postdate.state.topics import Topics
from postdate.state.wheel import Wheel
from postdate.storage import record as records
from postdate.storage.batch import CANCEL, MESSAGE
from postdate.storage.chunk import Chunks, Records
from postdate.storage.disk import RealDisk
from postdate.storage.layout import CHUNK_ROW, FAR, FAR_STRUCT, SELECTED
from postdate.storage.selection import Selections

DUE, BASE = 5_000, 1 << 62
HASH = key_hash("k")


class Stored(Records):
    """Records in a dictionary."""

    def __init__(self, disk: RealDisk) -> None:
        super().__init__(lambda _offset, _size: b"", Chunks(disk))
        self.by_offset: dict[int, bytes] = {}

    def read(self, offset: int, size: int) -> bytes:
        return self.by_offset.get(offset, b"")[: max(size, 1_000)]


class World:
    """Topics a (queue 0) and b (queue 1), and the tables that cancels work on."""

    def __init__(self, folder: Path) -> None:
        disk = RealDisk(folder)
        self.stored, self.far, self.topics, self.wheel = Stored(disk), Far(disk, 64, 4, 8), Topics(), Wheel()
        for name in ("a", "b"):
            self.topics.put(name, 1, 1, 6, {})
        self.references, self.near = References(Chunks(disk), 16), [0, 0]
        self.jobs = Jobs(self.wheel, self.far, self.topics, Selections(disk), self.references, self.near)
        self.cancels = self.table()

    def table(self) -> "Judged":
        return Judged(self.wheel, self.far, self.topics, self.jobs, self.references, self.stored, self.near)

    def cancel(self, arrival: int, far_offset: int = -1) -> Tombstone:
        tombstone = Tombstone("a", "k", "unique", DUE, arrival, HASH, far_offset, self.far.length)
        self.cancels.add(tombstone)
        return tombstone


class Judged(Cancels):
    """Cancels of which a test says which are needed; by itself it judges as it always does."""

    judge: Callable[[Tombstone], bool] | None = None

    def is_needed(self, tombstone: Tombstone) -> bool:
        return super().is_needed(tombstone) if self.judge is None else self.judge(tombstone)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def cancels(world: World) -> Judged:
    return world.cancels


def record(topic: str, key: str) -> bytes:
    properties = encode_properties({PROPERTY_UNIQ_KEY: key})
    return records.encode(Message(topic, b"", properties), topic.encode(), 0, 0, LOOPBACK)


def far_row(arrival: int, due: int = DUE, hashed: int = HASH, queue: int = 0, kind: int = MESSAGE) -> bytes:
    return FAR_STRUCT.pack(arrival, due, hashed, 0, 100, queue, 0, kind, 0, 0)


# ------------------------------------------------------------------------------------------ which rows are cancelled


def test_a_far_row_is_cancelled_by_its_record_not_by_its_hash_alone(world: World) -> None:
    world.cancel(500)
    world.stored.by_offset = {
        100: record("a", "k"),
        200: record("b", "k"),
        300: record("a", "other"),
        600: record("a", "k"),
    }
    places = [(100, DUE), (100, DUE + 1), (200, DUE), (300, DUE), (400, DUE), (600, DUE)]
    rows = np.frombuffer(b"".join(far_row(arrival, due) for arrival, due in places), FAR)
    assert world.cancels.find_untaken(rows).tolist() == [True, False, False, False, False, False]
    assert world.cancels.find_untaken(rows[:0]).tolist() == []


def test_a_cancel_that_was_taken_counts_for_rows_that_were_taken(world: World) -> None:
    for row in (far_row(100), far_row(200, queue=1), far_row(300, kind=CANCEL), far_row(400)):
        push = world.far.push_cancel if row[44] == CANCEL else world.far.push
        push(row, DUE)
    rows = world.far.rows.read(0, 4)
    assert not world.cancels.find_far(rows).any(), "nothing is taken"
    world.far.take(4, 0)
    assert world.cancels.find_far(rows).tolist() == [True, False, False, False]


def test_a_selected_row_is_cancelled_by_hash_due_and_topic(world: World) -> None:
    world.cancel(500)
    rows = np.zeros(3, SELECTED)
    rows["due"], rows["unique_hash"], rows["arrival"], rows["queue"] = DUE, HASH, [1, 2, 600], [0, 1, 0]
    assert world.cancels.find_selected(rows).tolist() == [True, False, False]


def test_a_staged_row_is_cancelled_by_its_record_in_the_chunk(world: World) -> None:
    world.cancel(500)
    world.stored.by_offset = {BASE + 8: record("a", "k"), BASE + 16: record("b", "k")}
    index = np.zeros(3, CHUNK_ROW)
    index["due"], index["unique_hash"], index["arrival"] = [DUE - 1, DUE, DUE], HASH, [1, 2, 3]
    index["position"], index["size"] = [8, 8, 16], 100
    keys = world.cancels.keys_between(0, DUE)
    assert world.cancels.find_staged(index, BASE, keys).tolist() == [False, True, False]
    assert not len(world.cancels.keys_between(0, DUE - 1).dues)


def test_a_tombstone_is_needed_while_its_message_may_come(world: World) -> None:
    assert not world.cancels.is_needed(world.cancel(500)), "no far row is older"
    world.far.push(far_row(100), DUE)
    tombstone = world.cancel(500)
    assert world.cancels.is_needed(tombstone)
    world.far.take(1, DUE)
    assert not world.cancels.is_needed(tombstone)


# -------------------------------------------------------------------------------------- how long they are remembered


def tombstone(due: int, arrival: int, far_offset: int = -1, far_before: int = 0, key: str = "k") -> Tombstone:
    return Tombstone("t", key, "unique", due, arrival, 99, far_offset, far_before)


def never_asked(entry: Tombstone) -> bool:
    raise AssertionError(f"nobody may ask about {entry}")


def test_tombstones_are_found_by_due(cancels: Judged) -> None:
    a, b, c = tombstone(5, 1), tombstone(5, 2), tombstone(9, 3)
    for entry in (a, b, c):
        cancels.add(entry)
    assert (cancels.at(5), cancels.at(9), cancels.at(7)) == ([a, b], [c], [])
    assert list(cancels.between(5, 8)) == [a, b]
    assert set(cancels.between(5, 9)) == {a, b, c}
    assert cancels.count == 3
    assert (a.column, a._replace(by="key").column) == ("unique_hash", "key_hash")


def test_only_fired_ones_that_are_not_needed_are_swept(cancels: Judged) -> None:
    needed, not_needed, later = tombstone(5, 1), tombstone(5, 2), tombstone(9, 3)
    for entry in (needed, not_needed, later):
        cancels.add(entry)
    cancels.judge = never_asked
    cancels.forget_fired(4)
    cancels.judge = never_asked
    cancels.sweep()
    assert cancels.count == 3, "none has been fired"
    cancels.judge = lambda entry: entry is needed
    cancels.forget_fired(5)
    assert (cancels.at(5), cancels.count) == ([needed], 2)
    cancels.judge = never_asked
    cancels.forget_fired(5)
    assert cancels.at(5) == [needed], "firing looks at a due once"
    cancels.judge = lambda entry: entry is needed
    cancels.sweep()
    assert (cancels.at(5), cancels.count) == ([needed], 2)
    cancels.judge = lambda _: False
    cancels.sweep()
    assert (cancels.at(5), cancels.count) == ([], 1)
    assert cancels.at(9) == [later]


def test_a_due_that_comes_again_after_it_was_swept_is_swept_again(cancels: Judged) -> None:
    for _ in range(2):
        cancels.add(tombstone(5, 1))
        cancels.judge = lambda _: True
        cancels.forget_fired(5)
        assert cancels.count == 1
        cancels.judge = lambda _: False
        cancels.sweep()
        assert cancels.count == 0


def test_one_that_joins_a_fired_due_is_swept_with_it(cancels: Judged) -> None:
    cancels.add(tombstone(5, 1))
    cancels.judge = lambda _: True
    cancels.forget_fired(5)
    cancels.add(tombstone(5, 2))
    cancels.judge = lambda entry: entry.arrival == 1
    cancels.sweep()
    assert cancels.count == 1
    cancels.judge = lambda _: False
    cancels.sweep()
    assert cancels.count == 0


def test_those_that_the_table_carries_are_forgotten(cancels: Judged) -> None:
    before, taken, behind, none = tombstone(5, 1, 0), tombstone(20, 2, 1), tombstone(20, 3, 2), tombstone(20, 4, -1)
    for entry in (before, taken, behind, none):
        cancels.add(entry)
    cancels.forget_taken(2, 10)
    assert cancels.at(5) == [before], "its due is not beyond the horizon: its message may be in a chunk on its way"
    assert cancels.at(20) == [behind, none]
    assert cancels.count == 3
    cancels.forget_taken(9, 10)
    assert cancels.at(20) == [none]


def test_a_due_that_was_forgotten_is_not_fired(cancels: Judged) -> None:
    cancels.add(tombstone(20, 1, 0))
    cancels.add(tombstone(30, 2, 5))
    cancels.forget_taken(1, 10)
    cancels.judge = never_asked
    cancels.forget_fired(20)
    asked: list[Tombstone] = []
    cancels.judge = lambda entry: bool(asked.append(entry))  # type: ignore[func-returns-value]
    cancels.forget_fired(30)
    assert [entry.due for entry in asked] == [30]
    assert cancels.count == 0


def test_many_are_forgotten_without_looking_at_all_for_each(cancels: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may take a hundred thousand cancels along; a quadratic walk would hold the broker for minutes."""
    count = 2_000
    looks = 0

    def heapify(heap: list[int]) -> None:
        nonlocal looks
        looks += len(heap)
        heap.sort()

    monkeypatch.setattr(heapq, "heapify", heapify)
    for n in range(count):
        cancels.add(tombstone(1_000_000 + n, n, n))
    cancels.forget_taken(count, 10)
    assert cancels.count == 0
    assert looks <= 20 * count


def test_the_state_comes_back(world: World, cancels: Judged) -> None:
    for due, arrival in ((9, 1), (5, 2), (9, 3), (7, 4)):
        cancels.add(tombstone(due, arrival, arrival, 2))
    cancels.judge = lambda _: True
    cancels.forget_fired(7)
    again = world.table()
    again.load(json.loads(json.dumps(cancels.state())), 7)
    assert again.state() == cancels.state()
    assert again.count == 4
    again.judge = lambda _: False
    again.sweep()
    assert sorted(entry.due for entry in again.state()) == [9, 9], "what was fired before is known to be"


def test_dues_whose_tombstones_the_table_carries_cost_nothing_any_more(cancels: Judged) -> None:
    for n in range(5_000):
        cancels.add(tombstone(10_000 + n, n, far_offset=n))
    cancels.forget_taken(5_000, 0)
    assert cancels.count == 0
    assert len(cancels._dues) <= 1_000, "places of forgotten ones are passed over, but not hoarded"
    cancels.add(tombstone(7, 1))
    cancels.judge = lambda _: False
    cancels.forget_fired(7)
    assert cancels.count == 0

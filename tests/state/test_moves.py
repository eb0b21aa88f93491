"""Moves: from where a message is taken, and what keeps it from coming there again."""

from pathlib import Path

import pytest

from postdate.keys import key_hash
from postdate.message import MovedFrom
from postdate.state.cancels import TABLE_KEEP_MS
from postdate.state.moves import Moves
from postdate.state.wheel import MOVED
from postdate.storage.batch import MESSAGE, MOVE
from postdate.storage.layout import FAR_STRUCT, SINGLE_STRUCT
from tests.state.test_cancels import World

HASH, DUE, SIZE = key_hash("k"), 5_000, 100
AGAIN = 9_000  # the place of the move's record


class Moving(World):
    """A message of due 5,000 and arrival 8 in the wheel, one of arrival 16 in the far queue."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.moves = Moves(self.wheel, self.jobs, self.cancels)
        self.wheel.add(DUE, SINGLE_STRUCT.pack(8, SIZE, 0, 0, HASH, 0))
        self.near[0] = 1
        self.far.push(FAR_STRUCT.pack(16, DUE, HASH, 0, SIZE, 0, 0, MESSAGE, 0, 0), DUE)
        for place in (8, 16):
            self.references.hold(place)

    def take(self, arrival: int, *, is_near: bool = False, due: int = DUE) -> bool:
        source = MovedFrom(due, arrival, is_near)
        is_taken = self.moves.take(source, 0, HASH, 0, 1_000)
        assert is_taken or not self.moves.waits(source, 0, HASH, 0)
        if is_taken:
            self.moves.remember(source, "a", "k", AGAIN, SIZE)
        return is_taken


@pytest.fixture
def world(tmp_path: Path) -> Moving:
    return Moving(tmp_path)


def test_a_message_in_the_wheel_is_taken_once(world: Moving) -> None:
    assert world.take(8, is_near=True)
    assert (world.wheel.count, world.near[0], world.moves.count) == (0, 0, 1)
    assert world.wheel.singles(DUE, 0, 1)["queue"][0] == MOVED
    assert not world.take(8, is_near=True)
    assert not world.take(8), "nor is it anywhere else"
    assert world.wheel.take_few(DUE, 9) == []


def test_a_message_that_has_come_into_the_wheel_since_is_taken_there(world: Moving) -> None:
    assert world.take(8, is_near=False)
    assert world.wheel.count == 0


def test_what_was_in_the_wheel_is_sought_nowhere_else(world: Moving) -> None:
    assert not world.take(16, is_near=True)
    assert world.take(16)


def test_a_far_message_is_met_by_its_own_tombstone_alone(world: Moving) -> None:
    world.far.push(FAR_STRUCT.pack(24, DUE, HASH, 0, SIZE, 0, 0, MESSAGE, 0, 0), DUE)
    assert world.take(16)
    (tombstone,) = world.cancels.at(DUE)
    assert [tombstone.has_hashes(arrival, HASH, 0) for arrival in (16, 24)] == [True, False]
    assert [world.cancels.has_moved(DUE, arrival) for arrival in (16, 24)] == [True, False]
    assert not world.take(16)
    assert world.take(24), "a message of the same key and due is another one"


def test_a_move_beyond_the_horizon_has_a_row_for_the_table(world: Moving) -> None:
    assert world.take(16)
    row = world.far.rows.read(1, 2)[0]
    assert (row["kind"], row["arrival"], row["due"], row["unique_hash"]) == (MOVE, AGAIN + 1, DUE, 16)


def test_up_to_the_horizon_a_tombstone_is_enough(world: Moving) -> None:
    world.far.take(0, DUE)
    assert world.take(8)
    assert world.far.length == 1
    assert world.cancels.count == 1


def test_a_message_that_only_the_table_has_is_taken_until_the_horizon_passes_it(world: Moving) -> None:
    world.far.push(FAR_STRUCT.pack(500, 99_999, 1, 0, SIZE, 0, 0, MESSAGE, 0, 0), 99_999)
    world.far.take(1, 1_000)
    assert world.take(16)
    world.far.take(1, 50_000)
    assert not world.take(4, due=40_000), "it has been staged"


def test_a_move_is_remembered_while_the_table_may_have_its_message(world: Moving) -> None:
    world.far.take(1, DUE)
    assert world.take(8)
    (tombstone,) = world.cancels.at(DUE)
    world.cancels.forget_fired(DUE + TABLE_KEEP_MS - 1)
    assert world.cancels.is_needed(tombstone)
    world.cancels.forget_fired(DUE + TABLE_KEEP_MS)
    assert not world.cancels.is_needed(tombstone)

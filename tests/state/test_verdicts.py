"""Which rows are cancelled, wherever a cancel meets them."""

from pathlib import Path

import numpy as np
import pytest

from postdate.keys import key_hash
from postdate.message import LOOPBACK, PROPERTY_UNIQ_KEY, Message, encode_properties
from postdate.state.far import FAR, FAR_STRUCT, Far
from postdate.state.jobs import Jobs
from postdate.state.cancels import Tombstone, Tombstones
from postdate.state.topics import Topics
from postdate.state.verdicts import Verdicts
from postdate.storage import record as records
from postdate.storage.batch import CANCEL, MESSAGE
from postdate.storage.chunk import CHUNK_ROW
from postdate.storage.disk import RealDisk
from postdate.storage.selection import SELECTED

DUE, BASE = 5_000, 1 << 62
HASH = key_hash("k")


def record(topic: str, key: str) -> bytes:
    properties = encode_properties({PROPERTY_UNIQ_KEY: key})
    return records.encode(Message(topic, b"", properties), topic.encode(), 0, 0, LOOPBACK)


class World:
    """Topics a (queue 0) and b (queue 1), and records in a dictionary."""

    def __init__(self, folder: Path) -> None:
        self.records: dict[int, bytes] = {}
        self.tombstones, self.far, self.topics = Tombstones(), Far(RealDisk(folder), 64, 4, 8), Topics()
        for name in ("a", "b"):
            self.topics.put(name, 1, 1, 6, {})
        self.verdicts = Verdicts(
            self.tombstones, self.far, Jobs(), self.topics, lambda at, _: self.records.get(at, b"")
        )

    def cancel(self, arrival: int, far_offset: int = -1) -> Tombstone:
        tombstone = Tombstone("a", "k", "unique", DUE, arrival, HASH, far_offset, self.far.length)
        self.tombstones.add(tombstone)
        return tombstone


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def far_row(arrival: int, due: int = DUE, hashed: int = HASH, queue: int = 0, kind: int = MESSAGE) -> bytes:
    return FAR_STRUCT.pack(arrival, due, hashed, 0, 100, queue, 0, kind, 0, 0)


def test_a_far_row_is_cancelled_by_its_record_not_by_its_hash_alone(world: World) -> None:
    world.cancel(500)
    world.records = {100: record("a", "k"), 200: record("b", "k"), 300: record("a", "other"), 600: record("a", "k")}
    places = [(100, DUE), (100, DUE + 1), (200, DUE), (300, DUE), (400, DUE), (600, DUE)]
    rows = np.frombuffer(b"".join(far_row(arrival, due) for arrival, due in places), FAR)
    assert world.verdicts.dead_untaken(rows).tolist() == [True, False, False, False, False, False]
    assert world.verdicts.dead_untaken(rows[:0]).tolist() == []


def test_a_cancel_that_was_taken_counts_for_rows_that_were_taken(world: World) -> None:
    for row in (far_row(100), far_row(200, queue=1), far_row(300, kind=CANCEL), far_row(400)):
        push = world.far.push_cancel if row[44] == CANCEL else world.far.push
        push(row, DUE)
    rows = world.far.rows.read(0, 4)
    assert not world.verdicts.dead_far(rows).any(), "nothing is taken"
    world.far.take(4, 0)
    assert world.verdicts.dead_far(rows).tolist() == [True, False, False, False]


def test_a_selected_row_is_cancelled_by_hash_due_and_topic(world: World) -> None:
    world.cancel(500)
    rows = np.zeros(3, SELECTED)
    rows["due"], rows["unique_hash"], rows["arrival"], rows["queue"] = DUE, HASH, [1, 2, 600], [0, 1, 0]
    assert world.verdicts.dead_selected(rows).tolist() == [True, False, False]


def test_a_staged_row_is_cancelled_by_its_record_in_the_chunk(world: World) -> None:
    world.cancel(500)
    world.records = {BASE + 8: record("a", "k"), BASE + 16: record("b", "k")}
    index = np.zeros(3, CHUNK_ROW)
    index["due"], index["unique_hash"], index["arrival"] = [DUE - 1, DUE, DUE], HASH, [1, 2, 3]
    index["position"], index["size"] = [8, 8, 16], 100
    wanted = world.verdicts.wanted(0, DUE)
    assert world.verdicts.dead_staged(index, BASE, wanted).tolist() == [False, True, False]
    assert not len(world.verdicts.wanted(0, DUE - 1).dues)


def test_a_tombstone_is_needed_while_its_message_may_come(world: World) -> None:
    assert not world.verdicts.is_needed(world.cancel(500)), "no far row is older"
    world.far.push(far_row(100), DUE)
    tombstone = world.cancel(500)
    assert world.verdicts.is_needed(tombstone)
    world.far.take(1, DUE)
    assert not world.verdicts.is_needed(tombstone)

"""The table of halves: what is open, how the last ones ended, and what the log must keep for them."""

import json
from pathlib import Path

import pytest

from postdate.arrival import NEVER
from postdate.message import Ended
from postdate.state import transactions
from postdate.state.references import References
from postdate.state.transactions import Half, Transactions
from postdate.storage.chunk import Chunks
from postdate.storage.disk import RealDisk

SHIFT = 10


def half(offset: int, *, queue: int = 0, unique_hash: int = 7) -> Half:
    return Half(offset, 100, queue, 0, unique_hash, 1_000, 7_000)


@pytest.fixture
def references(tmp_path: Path) -> References:
    return References(Chunks(RealDisk(tmp_path)), SHIFT)


@pytest.fixture
def table(references: References) -> Transactions:
    return Transactions(references)


def test_a_half_is_open_until_it_is_ended_once(table: Transactions, references: References) -> None:
    table.open(half(8))
    table.open(half(16))
    assert (table.opened_count, table.bytes, references.held) == (2, 200, {0: 2})
    assert table.end(8, is_committed=True) is Ended.COMMITTED
    assert table.end(16, is_committed=False) is Ended.ROLLED_BACK
    assert (table.opened_count, table.bytes, references.held, table.halves) == (2, 0, {}, {})
    for is_committed in (True, False):
        assert table.end(8, is_committed=is_committed) is Ended.ALREADY_COMMITTED
        assert table.end(16, is_committed=is_committed) is Ended.ALREADY_ROLLED_BACK
        assert table.end(24, is_committed=is_committed) is Ended.UNKNOWN


def test_checks_are_counted_until_the_half_is_given_up_and_it_stays_open(table: Transactions) -> None:
    table.open(half(8))
    table.note_checked([8, 99], 37_000)
    table.note_checked([8], 67_000)
    assert (table.halves[8].check_count, table.halves[8].check_at_ms) == (2, 67_000)
    table.give_up([8, 99], 70_000)
    table.give_up([8], 71_000)
    assert (table.halves[8].check_at_ms, table.given_up_count) == (NEVER, 1)
    assert table.end(8, is_committed=True) is Ended.COMMITTED
    assert table.given_up_count == 0


def test_halves_are_found_by_their_hash(table: Transactions) -> None:
    for offset, hashed in ((8, 1), (16, 2), (24, 1)):
        table.open(half(offset, unique_hash=hashed))
    assert [each.offset for each in table.find(1)] == [8, 24]
    table.end(8, is_committed=False)
    assert [each.offset for each in table.find(1)] == [24]
    table.end(24, is_committed=False)
    assert (table.find(1), table.find(3)) == ([], [])


def test_a_deleted_topic_takes_its_halves_along(table: Transactions, references: References) -> None:
    for offset, queue in ((8, 1), (16, 2), (24, 3)):
        table.open(half(offset, queue=queue))
    table.forget_queues([1, 3])
    assert list(table.halves) == [16]
    assert references.held == {0: 1}
    assert table.end(8, is_committed=True) is Ended.UNKNOWN


def test_the_last_ends_are_remembered(table: Transactions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "ENDED_REMEMBERED_MAX", 2)
    for offset in (8, 16, 24):
        table.open(half(offset))
        table.end(offset, is_committed=True)
    assert [table.how_ended(offset) for offset in (8, 16, 24)] == [
        Ended.UNKNOWN, Ended.ALREADY_COMMITTED, Ended.ALREADY_COMMITTED,
    ]  # fmt: skip


def test_a_snapshot_has_all_of_it(table: Transactions, references: References) -> None:
    for offset in (8, 16, 24, 32):
        table.open(half(offset))
    table.end(8, is_committed=True)
    table.end(16, is_committed=False)
    table.note_checked([24], 37_000)
    table.give_up([32], 50_000)
    state = json.loads(json.dumps(table.state()))
    loaded = Transactions(references)
    loaded.load(state["halves"], state["halves_opened"], state["halves_ended"])
    assert loaded.state() == table.state()
    assert (loaded.bytes, loaded.given_up_count) == (200, 1)
    assert [each.offset for each in loaded.find(7)] == [24, 32]
    assert (loaded.how_ended(8), loaded.how_ended(16)) == (Ended.ALREADY_COMMITTED, Ended.ALREADY_ROLLED_BACK)

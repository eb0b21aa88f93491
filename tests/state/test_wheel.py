"""The wheel: order, cancelling, and what a snapshot sees while it turns."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.arrival import NEVER
from postdate.state import wheel as wheel_module
from postdate.state.wheel import DEAD, Found, Run, Wheel
from postdate.storage.layout import CHUNK_ROW, SINGLE, SINGLE_STRUCT


def single(offset: int, queue: int = 0, unique: int = 0, key: int = 0, tag: int = 0) -> bytes:
    return SINGLE_STRUCT.pack(offset, 100, queue, tag, unique, key)


def run(base: int, *rows: tuple[int, int], dead: list[int] | None = None, unique: int = 0) -> Run:
    """A run of (due, arrival) rows; the record of row n stands at base + n."""
    index = np.zeros(len(rows), CHUNK_ROW)
    for number, (due, arrival) in enumerate(rows):
        index[number] = (due, arrival, number, 10, 1, 0, 0, unique, 0)
    mask = np.isin(np.arange(len(rows)), dead) if dead else None
    return Run(base, index, 0, mask)


def taken(wheel: Wheel, at_ms: int) -> list[tuple[int, int]]:
    """(due, arrival) of everything that comes out, in its order."""
    out: list[tuple[int, int]] = []
    for piece in wheel.take(at_ms):
        out += zip(piece.due.tolist(), piece.arrival.tolist(), strict=True)
    return out


def waiting_count(wheel: Wheel) -> int:
    return sum(len(piece.due) for piece in wheel.waiting())


# -------------------------------------------------------------------------------------------------------- the order


def test_an_empty_wheel_has_nothing_due() -> None:
    wheel = Wheel()
    assert (wheel.next_due_at_ms, wheel.count, wheel.take(NEVER - 1)) == (NEVER, 0, [])
    assert wheel.take_few(NEVER - 1, 10) is None


def test_entries_of_one_due_come_in_order_of_arrival() -> None:
    wheel = Wheel()
    for offset in (10, 20, 30):
        wheel.add(5, single(offset))
    assert taken(wheel, 4) == []
    assert taken(wheel, 5) == [(5, 10), (5, 20), (5, 30)]
    assert taken(wheel, 5) == []


def test_an_entry_that_comes_late_is_taken_next_time() -> None:
    wheel = Wheel()
    wheel.add(5, single(10))
    assert taken(wheel, 9) == [(5, 10)]
    wheel.add(5, single(20))
    assert wheel.next_due_at_ms == 5
    assert taken(wheel, 9) == [(5, 20)]


def test_an_entry_that_is_there_twice_comes_twice() -> None:
    wheel = Wheel()
    wheel.add(5, single(10))
    wheel.add(5, single(10))
    assert wheel.count == 2
    assert taken(wheel, 5) == [(5, 10), (5, 10)]


def test_several_slots_come_by_due() -> None:
    wheel = Wheel()
    for due, offset in ((7, 10), (5, 20), (6, 30), (5, 40)):
        wheel.add(due, single(offset))
    assert wheel.next_due_at_ms == 5
    assert taken(wheel, 6) == [(5, 20), (5, 40), (6, 30)]
    assert wheel.next_due_at_ms == 7
    assert wheel.count == 1


def test_a_rescued_entry_comes_before_younger_ones_that_were_there_first() -> None:
    for few in (False, True):
        wheel = Wheel()
        wheel.add(5, single(30))
        wheel.add(5, single(40))
        wheel.add_many(np.array([5]), np.frombuffer(single(10), SINGLE))
        if few:
            assert [entry[2] for entry in wheel.take_few(5, 3) or []] == [10, 30, 40]
        else:
            assert taken(wheel, 5) == [(5, 10), (5, 30), (5, 40)]


def test_many_are_added_as_one_by_one() -> None:
    entries = np.frombuffer(b"".join(single(n * 10) for n in range(6)), SINGLE)
    wheel = Wheel()
    wheel.add_many(np.array([3, 1, 2, 1, 3, 1]), entries)
    assert wheel.count == 6
    assert taken(wheel, 9) == [(1, 10), (1, 30), (1, 50), (2, 20), (3, 0), (3, 40)]


def test_none_may_be_added() -> None:
    wheel = Wheel()
    wheel.add_many(np.empty(0, np.int64), np.empty(0, SINGLE))
    assert (wheel.count, wheel.next_due_at_ms) == (0, NEVER)


def test_runs_are_merged_with_singles() -> None:
    wheel = Wheel()
    wheel.stage(run(1_000, (5, 10), (5, 30), (7, 5)))
    wheel.add(5, single(20))
    wheel.add(6, single(40))
    assert wheel.next_due_at_ms == 5
    assert taken(wheel, 6) == [(5, 10), (5, 20), (5, 30), (6, 40)]
    assert wheel.next_due_at_ms == 7
    assert taken(wheel, 7) == [(7, 5)]
    assert wheel.runs == []


def test_a_burst_in_chunks_split_by_arrival_comes_in_order() -> None:
    wheel = Wheel()
    wheel.stage(run(2_000, *[(5, n) for n in range(100, 200)]))
    wheel.stage(run(1_000, *[(5, n) for n in range(100)]))
    assert taken(wheel, 5) == [(5, n) for n in range(200)]


def test_what_is_taken_carries_its_place_queue_and_tag() -> None:
    wheel = Wheel()
    wheel.add(5, single(10, queue=3, tag=-7))
    wheel.stage(run(1_000, (5, 20), (5, 30)))
    pieces = wheel.take(5)
    columns = [np.concatenate([getattr(piece, name) for piece in pieces]).tolist() for name in pieces[0]._fields]
    assert columns == [[5, 5, 5], [10, 20, 30], [3, 1, 1], [10, 1_000, 1_001], [100, 10, 10], [-7, 0, 0]]


def test_a_few_are_taken_slot_by_slot_and_more_are_left_to_take() -> None:
    wheel = Wheel()
    for offset in (30, 10, 20):
        wheel.add(5, single(offset, queue=offset, tag=offset + 1))
    wheel.add(6, single(40))
    assert wheel.take_few(4, 10) is None
    assert wheel.take_few(9, 2) is None, "the slot holds more"
    assert wheel.count == 4
    assert wheel.take_few(9, 3) == [(5, 10, 10, 100, 11), (5, 20, 20, 100, 21), (5, 30, 30, 100, 31)]
    assert wheel.count == 1
    wheel.stage(run(1_000, (7, 5)))
    assert wheel.take_few(7, 10) is None, "staged rows are due too"
    assert wheel.take_few(6, 10) == [(6, 0, 40, 100, 0)]


def test_a_run_without_waiting_rows_is_not_kept() -> None:
    wheel = Wheel()
    wheel.stage(run(1_000))
    assert wheel.runs == []


# ------------------------------------------------------------------------------------------------------- cancelling


def only(found: list[Found]) -> Found:
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("column", ["unique_hash", "key_hash"])
def test_a_killed_entry_is_found_dead_and_left_out(column: str) -> None:
    wheel = Wheel()
    for offset, hashed in ((10, 1), (20, 2**64 - 1), (30, 3)):
        wheel.add(5, single(offset, 4, *((hashed, 0) if column == "unique_hash" else (0, hashed))))
    assert wheel.find(6, column, 2**64 - 1) == []
    assert wheel.find(5, column, 7) == []
    found = only(wheel.find(5, column, 2**64 - 1))
    assert (found.due, found.arrival, found.queue, found.offset, found.size) == (5, 20, 4, 20, 100)
    wheel.kill(found)
    assert wheel.count == 2
    assert only(wheel.find(5, column, 2**64 - 1)).queue == DEAD
    assert taken(wheel, 5) == [(5, 10), (5, 30)]
    assert wheel.count == 0


def test_an_entry_is_not_killed_twice() -> None:
    wheel = Wheel()
    wheel.add(5, single(10, unique=1))
    wheel.kill(only(wheel.find(5, "unique_hash", 1)))
    with pytest.raises(AssertionError, match="entry 10 is cancelled already"):
        wheel.kill(only(wheel.find(5, "unique_hash", 1)))


@pytest.mark.parametrize("few", [True, False])
def test_a_slot_of_dead_entries_gives_nothing_and_goes(few: bool) -> None:
    wheel = Wheel()
    wheel.add(5, single(10, unique=1))
    wheel.kill(only(wheel.find(5, "unique_hash", 1)))
    assert (wheel.count, wheel.next_due_at_ms, waiting_count(wheel)) == (0, 5, 0)
    assert (wheel.take_few(5, 10) if few else wheel.take(5)) == []
    assert (wheel.count, wheel.next_due_at_ms) == (0, NEVER)


def test_a_row_of_a_run_is_killed_and_found_dead() -> None:
    wheel = Wheel()
    wheel.stage(run(1_000, (5, 10), (5, 20), (6, 30), unique=9))
    found = wheel.find(5, "unique_hash", 9)
    assert [(entry.arrival, entry.offset, entry.queue) for entry in found] == [(10, 1_000, 1), (20, 1_001, 1)]
    wheel.kill(found[1])
    assert [entry.queue for entry in wheel.find(5, "unique_hash", 9)] == [1, DEAD]
    assert waiting_count(wheel) == 2
    assert wheel.runs[0].waiting_count == 2
    assert taken(wheel, 9) == [(5, 10), (6, 30)]


def test_rows_that_came_dead_are_left_out() -> None:
    wheel = Wheel()
    wheel.stage(run(1_000, (5, 10), (5, 20), dead=[0]))
    assert wheel.runs[0].waiting_count == 1
    assert taken(wheel, 5) == [(5, 20)]


def test_rows_behind_the_cursor_are_not_found() -> None:
    wheel = Wheel()
    wheel.stage(run(1_000, (5, 10), (6, 20), unique=9))
    taken(wheel, 5)
    assert wheel.find(5, "unique_hash", 9) == []
    assert len(wheel.find(6, "unique_hash", 9)) == 1


def test_the_staged_index_itself_is_never_changed() -> None:
    wheel = Wheel()
    staged = run(1_000, (5, 10), unique=9)
    staged.index.flags.writeable = False
    wheel.stage(staged)
    wheel.kill(only(wheel.find(5, "unique_hash", 9)))
    assert taken(wheel, 5) == []


# -------------------------------------------------------------------------------------------------------- snapshots


def loaded(pieces: list[bytes]) -> Wheel:
    wheel = Wheel()
    for piece in pieces:
        wheel.load(piece)
    return wheel


def contents(wheel: Wheel) -> list[tuple[int, tuple[int, ...]]]:
    """Every single, dead ones too, slot by slot in its order."""
    return [(due, entry) for due in sorted(wheel._slots) for entry in SINGLE_STRUCT.iter_unpack(wheel._slots[due])]


@pytest.fixture(params=[(400, 1 << 18), (1, 72), (3, 100)], ids=["one piece", "tiny pieces", "odd pieces"])
def pieces_cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, size = request.param
    monkeypatch.setattr(wheel_module, "_SLOTS_PER_PIECE", slots)
    monkeypatch.setattr(wheel_module, "_BYTES_PER_PIECE", size)


@pytest.mark.usefixtures("pieces_cut")
def test_a_frozen_wheel_is_loaded_as_it_was() -> None:
    wheel = Wheel()
    for n in range(20):
        wheel.add(n % 4, single(n, unique=n + 1))
    wheel.kill(only(wheel.find(1, "unique_hash", 6)))
    again = loaded(list(wheel.freeze().pieces()))
    assert contents(again) == contents(wheel)
    assert (again.count, again.next_due_at_ms) == (19, 0)
    assert taken(again, 9) == taken(wheel, 9)


@pytest.mark.usefixtures("pieces_cut")
def test_pieces_show_the_moment_of_the_freeze_whatever_happens_between() -> None:
    wheel = Wheel()
    for n in range(20):
        wheel.add(n % 4, single(n, unique=n + 1))
    before, count = contents(wheel), wheel.count
    pieces: Iterator[bytes] = wheel.freeze().pieces()
    first = [next(pieces)]
    wheel.add(3, single(100))
    wheel.add(9, single(101))
    wheel.add_many(np.array([2, 8]), np.frombuffer(single(102) + single(103), SINGLE))
    wheel.kill(only(wheel.find(3, "unique_hash", 20)))
    wheel.take(1)
    wheel.add(0, single(104))
    wheel.add(1, single(105))
    wheel.take_few(0, 64)
    wheel.kill(only(wheel.find(2, "unique_hash", 3)))
    wheel.take(2)
    again = loaded([*first, *pieces])
    assert contents(again) == before
    assert again.count == count
    wheel.thaw()
    wheel.freeze()


def test_only_one_freeze_at_a_time() -> None:
    wheel = Wheel()
    wheel.freeze()
    with pytest.raises(AssertionError, match="under way"):
        wheel.freeze()


# --------------------------------------------------------------------------------------------------- random stories

DUES = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), DUES),
        st.tuples(st.just("many"), st.lists(DUES, max_size=8)),
        st.tuples(st.just("stage"), st.lists(DUES, max_size=8)),
        st.tuples(st.just("kill"), st.integers(0, 100)),
        st.tuples(st.just("take"), DUES),
        st.tuples(st.just("few"), DUES),
        st.tuples(st.just("freeze"), st.just(0)),
    ),
    max_size=40,
)


class Model:
    """A wheel as a sorted list: (due, arrival), and what is cancelled."""

    def __init__(self) -> None:
        self.living: list[tuple[int, int]] = []
        self.dead: list[tuple[int, int]] = []
        self.staged: set[int] = set()

    def take(self, at_ms: int) -> list[tuple[int, int]]:
        out = sorted(entry for entry in self.living if entry[0] <= at_ms)
        self.living = [entry for entry in self.living if entry[0] > at_ms]
        self.dead = [entry for entry in self.dead if entry[0] > at_ms]
        return out

    @property
    def single_count(self) -> int:
        return sum(1 for _, arrival in self.living if arrival not in self.staged)


@settings(deadline=None, max_examples=300)
@given(STEPS)
def test_any_story_gives_what_a_sorted_list_gives(steps: list[tuple[str, int | list[int]]]) -> None:
    wheel, model, arrival = Wheel(), Model(), 0
    frozen: tuple[list[tuple[int, tuple[int, ...]]], list[bytes], Iterator[bytes]] | None = None
    for verb, value in steps:
        if verb == "add":
            assert isinstance(value, int)
            arrival += 1
            wheel.add(value, single(arrival, unique=arrival))
            model.living.append((value, arrival))
        elif verb in ("many", "stage"):
            assert isinstance(value, list)
            dues = sorted(value) if verb == "stage" else value
            numbers = list(range(arrival + 1, arrival + 1 + len(dues)))
            arrival += len(dues)
            if verb == "many":
                packed = b"".join(single(number, unique=number) for number in numbers)
                wheel.add_many(np.array(dues, np.int64), np.frombuffer(packed, SINGLE))
            else:
                staged = run(1_000_000 * arrival, *zip(dues, numbers, strict=True))
                staged.index["unique_hash"] = numbers
                wheel.stage(staged)
                model.staged |= set(numbers)
            model.living += zip(dues, numbers, strict=True)
        elif verb == "kill" and model.living:
            assert isinstance(value, int)
            due, number = model.living.pop(value % len(model.living))
            model.dead.append((due, number))
            wheel.kill(only(wheel.find(due, "unique_hash", number)))
        elif verb == "take":
            assert isinstance(value, int)
            assert taken(wheel, value) == model.take(value)
        elif verb == "few":
            assert isinstance(value, int)
            few = wheel.take_few(value, 4)
            if few is not None:
                due = min(entry[0] for entry in model.living + model.dead)
                assert [(entry[0], entry[2]) for entry in few] == model.take(due)
        elif verb == "freeze":
            if frozen is not None:
                assert contents(loaded([*frozen[1], *frozen[2]])) == frozen[0]
                wheel.thaw()
            pieces = wheel.freeze().pieces()
            frozen = (contents(wheel), [], pieces)
        assert wheel.count == model.single_count
        assert wheel.next_due_at_ms == min((entry[0] for entry in model.living + model.dead), default=NEVER)
        assert waiting_count(wheel) == len(model.living)
    if frozen is not None:
        assert contents(loaded([*frozen[1], *frozen[2]])) == frozen[0]
    assert taken(wheel, NEVER - 1) == model.take(NEVER - 1)


# ------------------------------------------------------------------------------------------------------ page by page


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=30),
    st.lists(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12), max_size=3),
    st.integers(1, 7),
    st.integers(0, 6),
)
def test_pages_are_what_waits_in_order(
    singles: list[tuple[int, bool]], runs: list[list[tuple[int, bool]]], limit: int, fired: int
) -> None:
    """Singles in any order of arrival, as rescues leave them; runs with dead rows; the beginning is fired."""
    wheel = Wheel()
    wanted, arrival = [], 0
    for n, (due, is_dead) in enumerate(singles):
        arrival = n * 7 % 31 * 100
        wheel.add(due, single(arrival, DEAD if is_dead else 1))
        wanted += [] if is_dead else [(due, arrival, arrival)]
    for number, shape in enumerate(runs):
        rows = sorted((due, 10_000 * (number + 1) + n, is_dead) for n, (due, is_dead) in enumerate(shape))
        dead = [n for n, row in enumerate(rows) if row[2]]
        base = 1 << 40 + number
        wheel.stage(run(base, *[row[:2] for row in rows], dead=dead))
        wanted += [(due, arrival, base + n) for n, (due, arrival, is_dead) in enumerate(rows) if not is_dead]
    wheel.take(fired)
    found: list[tuple[int, int, int]] = []
    place: tuple[int, int] | None = (-1, -1)
    while place is not None:
        before = place
        page, place = wheel.page(place, limit)
        assert len(page) <= limit * (1 + len(runs))
        assert place is None or place > before
        found += zip(*(page[name].tolist() for name in ("due", "arrival", "offset")), strict=True)
    assert found == sorted(row for row in wanted if row[0] > fired)

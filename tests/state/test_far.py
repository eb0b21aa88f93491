"""The far queue: what waits in it, what a rescue takes, what the pipeline has."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.arrival import NEVER
from postdate.state.far import CANCEL_GRACE_MS, Far, Range, Rescue, _overlaid
from postdate.storage.batch import CANCEL, MESSAGE
from postdate.storage.disk import RealDisk
from postdate.storage.layout import FAR, FAR_STRUCT

BLOCK = 4
ALL = [Range(0, NEVER)]


def make(folder: Path) -> Far:
    return Far(RealDisk(folder), 64, 4, BLOCK)


@pytest.fixture
def far(tmp_path: Path) -> Far:
    return make(tmp_path)


def row(arrival: int, due: int, kind: int = MESSAGE, key: int = 0) -> bytes:
    return FAR_STRUCT.pack(arrival, due, key, 0, 100, 0 if kind == MESSAGE else -1, 0, kind, 0, 0)


def fill(far: Far, *dues: int) -> None:
    """Messages that arrive at 0, 100, 200 ... and are due then."""
    for due in dues:
        far.push(row(far.length * 100, due), due)


def arrivals(rows: np.ndarray) -> list[int]:
    found: list[int] = rows["arrival"].tolist()
    return found


def rescued(far: Far, plans: list[Rescue]) -> list[int]:
    return [arrival for plan in plans for arrival in arrivals(far.rescue(plan, 0))]


# ---------------------------------------------------------------------------------------------------------- minima


def test_the_smallest_due_is_known_without_a_search(far: Far) -> None:
    assert far.earliest(untaken_only=False) == far.earliest(untaken_only=True) == NEVER
    fill(far, 50, 40, 60)
    assert far.earliest(untaken_only=False) == far.earliest(untaken_only=True) == 40
    fill(far, 70, 30, 90)
    assert far.earliest(untaken_only=False) == far.earliest(untaken_only=True) == 30


def test_taken_rows_count_only_when_all_are_asked_for(far: Far) -> None:
    fill(far, 10, 20, 50, 40, 30, 60)
    far.take(3, 0)
    assert (far.earliest(untaken_only=False), far.earliest(untaken_only=True)) == (10, 30)
    far.take(5, 0)
    assert far.earliest(untaken_only=True) == 60
    far.take(6, 0)
    assert far.earliest(untaken_only=True) == NEVER
    fill(far, 80)
    assert far.earliest(untaken_only=True) == 80


@pytest.mark.parametrize("taken", [4, 8])
def test_the_taken_edge_may_lie_on_a_block(far: Far, taken: int) -> None:
    fill(far, *range(10, 90, 10))
    far.take(taken, 0)
    assert far.earliest(untaken_only=True) == (50 if taken == 4 else NEVER)
    fill(far, 5)
    assert far.earliest(untaken_only=True) == 5


def test_a_cancel_is_waited_for_after_its_grace(far: Far) -> None:
    far.push_cancel(row(0, 50, CANCEL), 50)
    assert far.earliest(untaken_only=True) == 50 + CANCEL_GRACE_MS


def test_many_rows_are_noted_as_one_by_one(tmp_path: Path) -> None:
    dues = [50, 40, 70, 60, 30, 90, 20, 80, 10, 15, 95]
    single, bulk = make(tmp_path / "single"), make(tmp_path / "bulk")
    fill(single, *dues)
    rows = np.frombuffer(b"".join(row(n * 100, due) for n, due in enumerate(dues)), FAR)
    bulk.extend(rows[:3])
    bulk.extend(rows[3:])
    assert bulk.state() == single.state()
    assert bulk.rows.read(0, 99).tolist() == single.rows.read(0, 99).tolist()


# --------------------------------------------------------------------------------------------------------- rescuing


def test_a_rescue_takes_what_is_due_and_once(far: Far) -> None:
    fill(far, 50, 10, 60, 20, 30, 70)
    assert far.plan_rescue(ALL, 9, 9, 9, untaken_only=False) == []
    assert rescued(far, far.plan_rescue(ALL, 30, 9, 9, untaken_only=False)) == [100, 300, 400]
    assert far.earliest(untaken_only=False) == 50
    assert far.plan_rescue(ALL, 30, 9, 9, untaken_only=False) == []
    assert rescued(far, [Rescue(0, 10_000, 55)]) == [0], "what was rescued before is not rescued again"


def test_a_rescue_looks_at_so_many_blocks_at_most(far: Far) -> None:
    fill(far, *range(10, 30))
    plans = far.plan_rescue(ALL, 100, 2, 99, untaken_only=False)
    assert rescued(far, plans) == [n * 100 for n in range(8)]
    assert rescued(far, far.plan_rescue(ALL, 100, 2, 99, untaken_only=False)) == [n * 100 for n in range(8, 16)]


@pytest.mark.parametrize("room", range(1, 13))
def test_a_rescue_fits_its_room_earliest_first(far: Far, room: int) -> None:
    dues = [50, 10, 50, 20, 50, 10, 30, 50, 20, 10, 50, 60]
    fill(far, *dues)
    plans = far.plan_rescue(ALL, 100, 9, room, untaken_only=False)
    order = sorted(range(12), key=lambda n: (dues[n], n))
    assert sorted(rescued(far, plans)) == sorted(n * 100 for n in order[:room])
    waits = far.waits(far.rows.read(0, 12), 0)
    assert [n for n in range(12) if waits[n]] == sorted(order[room:]), "what did not fit is not remembered as rescued"


def test_without_room_nothing_is_rescued(far: Far) -> None:
    fill(far, 10)
    assert far.plan_rescue(ALL, 100, 9, 0, untaken_only=False) == []
    assert far.plan_rescue(ALL, 100, 9, -5, untaken_only=False) == []


def test_rows_without_a_record_are_left_to_the_pipeline(far: Far) -> None:
    fill(far, *[10] * 10)
    present = [Range(100, 300), Range(500, 700), Range(900, NEVER)]
    assert rescued(far, far.plan_rescue(present, 100, 9, 99, untaken_only=False)) == [100, 200, 500, 600, 900]
    waits = far.waits(far.rows.read(0, 10), 0)
    assert np.flatnonzero(waits).tolist() == [0, 3, 4, 7, 8]
    assert far.plan_rescue(present, 100, 9, 99, untaken_only=False) == []
    assert far.earliest(untaken_only=False) == NEVER, "nothing is left that a rescue would find"


def test_blocks_before_everything_that_is_present_are_not_asked_for_again(far: Far) -> None:
    fill(far, *[10] * 10)
    present = [Range(900, NEVER)]
    assert rescued(far, far.plan_rescue(present, 100, 9, 99, untaken_only=False)) == [900]
    assert far.plan_rescue(present, 100, 9, 99, untaken_only=False) == []
    assert far.earliest(untaken_only=False) == NEVER


def test_while_the_pipeline_lives_what_it_has_taken_is_not_wanted(far: Far) -> None:
    fill(far, *[10] * 6)
    far.take(3, 0)
    assert rescued(far, far.plan_rescue(ALL, 100, 9, 99, untaken_only=True)) == [300, 400, 500]
    assert far.plan_rescue(ALL, 100, 9, 99, untaken_only=True) == []
    assert rescued(far, far.plan_rescue(ALL, 100, 9, 99, untaken_only=False)) == [0, 100, 200]


def test_a_pipeline_that_has_taken_everything_leaves_nothing_to_plan(far: Far) -> None:
    fill(far, *[10] * 6)
    far.take(6, 0)
    assert far.plan_rescue(ALL, 100, 9, 99, untaken_only=True) == []
    assert far.earliest(untaken_only=True) == NEVER


def test_staged_rows_are_not_rescued_and_taken_ones_that_wait_are(far: Far) -> None:
    fill(far, 10, 60, 20, 70, 30)
    far.take(4, 50)
    assert rescued(far, far.plan_rescue(ALL, 100, 9, 99, untaken_only=False)) == [100, 300, 400]


def test_a_cancel_that_a_rescue_covers_is_given_with_it(far: Far) -> None:
    """It holds its segment until a rescue or the pipeline takes it: one that is covered must not be passed over."""
    fill(far, 10, 20, 30, 40)
    for n in range(BLOCK):
        far.push_cancel(row(far.length * 100, 15 + n, CANCEL), 15 + n)
    fill(far, 50)
    found = rescued(far, [Rescue(0, 10_000, 100)])
    waits = far.waits(far.rows.read(0, far.length), 0)
    assert found == [n * 100 for n in range(9)]
    assert not waits.any()


def test_a_rescue_gives_the_same_whatever_was_planned_before(tmp_path: Path) -> None:
    """Planning is not in the log; a replay that never planned must take the same rows."""
    planned, replayed = make(tmp_path / "planned"), make(tmp_path / "replayed")
    for far in (planned, replayed):
        fill(far, 10)
        far.push_cancel(row(100, 60, CANCEL), 60)
        fill(far, 12, 13, 90)
        far.take(1, 20)
    assert rescued(planned, planned.plan_rescue(ALL, 11, 9, 99, untaken_only=False)) == []
    rescue = Rescue(0, 10_000, 90)
    assert arrivals(planned.rescue(rescue, 0)) == arrivals(replayed.rescue(rescue, 0))
    assert planned.rescues == replayed.rescues


# --------------------------------------------------------------------------------------------------- remembering


def test_a_rescue_is_remembered_until_no_stage_can_bring_its_rows(far: Far) -> None:
    fill(far, 10, 20, 30, 40)
    far.epoch = 1
    rescued(far, [Rescue(0, 201, 30)])
    far.take(1, 35)
    assert far.rescues == [Rescue(0, 201, 30)], "the pipeline has not taken all its rows"
    far.take(3, 35)
    assert far.rescues == []
    rescued(far, [Rescue(0, 301, 50)])
    far.take(4, 49)
    assert far.rescues == [Rescue(0, 301, 50)], "the horizon has not passed its last due"
    far.take(4, 50)
    assert far.rescues == []


def test_a_rescue_that_another_covers_is_forgotten(far: Far) -> None:
    fill(far, *range(10, 50, 10))
    far.epoch = 1
    for rescue in (Rescue(0, 201, 20), Rescue(100, 301, 10), Rescue(0, 301, 20)):
        far.rescue(rescue, 0)
    assert far.rescues == [Rescue(0, 301, 20)]


def test_without_a_pipeline_ever_the_rescues_of_what_left_the_log_become_one(far: Far) -> None:
    """Nothing was taken, so a segment that is gone was not held: all that lay in it had been rescued."""
    fill(far, *range(10, 50, 10))
    for rescue in (Rescue(0, 101, 10), Rescue(0, 201, 20)):
        far.rescue(rescue, 0)
    far.rescue(Rescue(200, 301, 40), 200)
    assert far.rescues == [Rescue(0, 200, NEVER), Rescue(200, 301, 40)]
    far.rescue(Rescue(300, 401, 40), 300)
    assert far.rescues == [Rescue(0, 300, NEVER), Rescue(300, 401, 40)]


def test_with_a_pipeline_what_left_the_log_may_be_in_its_table_and_is_no_rescue(far: Far) -> None:
    fill(far, *range(10, 50, 10))
    far.epoch = 1
    far.rescue(Rescue(200, 301, 40), 200)
    assert far.rescues == [Rescue(200, 301, 40)]


def test_coverage_is_arrival_and_due(far: Far) -> None:
    far.rescues = [Rescue(100, 300, 50), Rescue(400, 500, 60)]
    arrival = np.array([99, 100, 299, 300, 200, 399, 400, 499, 500])
    due = np.array([50, 50, 50, 50, 51, 1, 60, 61, 1])
    assert far.rescued(arrival, due).tolist() == [False, True, True, False, False, False, True, False, False]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(0, 9)), max_size=8))
@settings(deadline=None)
def test_rescues_are_remembered_exactly_and_without_overlap(asked: list[tuple[int, int, int]]) -> None:
    rescues: list[Rescue] = []
    for low, span, until in asked:
        rescues = _overlaid(rescues, Rescue(low, low + span, until))
    assert all(a.high <= b.low for a, b in pairwise(rescues)), "they do not overlap"
    for arrival in range(32):
        wanted = max((until for low, span, until in asked if low <= arrival < low + span), default=-1)
        found = [r.until for r in rescues if r.low <= arrival < r.high]
        assert found == ([wanted] if wanted >= 0 else [])


def test_find_untaken_sees_rows_that_wait_alone(far: Far) -> None:
    for n, key in enumerate((7, 8, 7, 7, 7, 7)):
        far.push(row(n * 100, 50, key=key), 50)
    far.push(row(600, 51, key=7), 51)
    assert arrivals(far.find_untaken(50, "unique_hash", 7, 5)) == [0, 200, 300, 400]
    far.take(1, 0)
    far.rescue(Rescue(250, 350, 50), 0)
    assert arrivals(far.find_untaken(50, "unique_hash", 7, 7)) == [200, 400, 500]
    assert arrivals(far.find_untaken(51, "unique_hash", 7, 7)) == [600]
    assert arrivals(far.find_untaken(50, "key_hash", 7, 7)) == []


def test_the_state_comes_back(tmp_path: Path, far: Far) -> None:
    fill(far, 50, 10, 60, 20, 30, 70)
    far.push_cancel(row(600, 90, CANCEL), 90)
    far.epoch = 3
    far.rescue(Rescue(0, 301, 20), 0)
    far.take(7, 15)
    fill(far, 80)
    far.rows.spill()
    again = Far(RealDisk(tmp_path), 64, 4, BLOCK)
    again.rows.resume(far.length)
    again.load(far.state())
    assert again.state() == far.state()
    assert again.rescues == far.rescues
    assert (
        arrivals(again.find_cancels(0, NEVER, again.taken)) == arrivals(far.find_cancels(0, NEVER, far.taken)) == [600]
    )
    assert again.earliest(untaken_only=True) == far.earliest(untaken_only=True)


def test_cancels_among_the_taken_rows_are_found_by_due(far: Far) -> None:
    for n, due in enumerate((50, 20, 70, 50, 60, 50)):
        if n % 2:
            far.push_cancel(row(n * 100, due, CANCEL), due)
        else:
            fill(far, due)
    assert len(far.find_cancels(0, NEVER, far.taken)) == 0, "none is taken"
    far.take(5, 0)
    assert arrivals(far.find_cancels(0, NEVER, far.taken)) == [100, 300]
    assert arrivals(far.find_cancels(21, 50, far.taken)) == [300]
    assert arrivals(far.find_cancels(51, 90, far.taken)) == []
    far.take(6, 0)
    assert arrivals(far.find_cancels(50, 50, far.taken)) == [300, 500]
    assert far.state()["cancels"] == [[0, 20, 50], [1, 50, 50]], "block, smallest and largest due"


def test_forgetting_rows_forgets_the_cancels_of_whole_blocks(far: Far) -> None:
    for n in range(3 * BLOCK):
        far.push_cancel(row(n * 100, 50 + n, CANCEL), 50 + n)
    far.take(3 * BLOCK, 0)
    far.forget(BLOCK + 1)
    assert far.rows.first == BLOCK + 1
    assert arrivals(far.find_cancels(0, NEVER, far.taken)) == [n * 100 for n in range(BLOCK + 1, 3 * BLOCK)]
    assert [block for block, _, _ in far.state()["cancels"]] == [1, 2]


@pytest.mark.parametrize("before", [1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_forgotten_rows_are_not_waited_for(far: Far, before: int) -> None:
    fill(far, *range(10, 10 + 2 * BLOCK), 90)
    far.take(2 * BLOCK, 0)
    far.forget(before)
    for _ in range(5):
        if far.earliest(untaken_only=False) == NEVER:
            break
        rescued(far, far.plan_rescue(ALL, 100, 9, 99, untaken_only=False))
    assert far.earliest(untaken_only=False) == NEVER


def test_the_minima_are_kept_block_by_block(far: Far) -> None:
    fill(far, 50, 40, 70, 60, 30)
    far.push_cancel(row(500, 20, CANCEL), 20)
    state = far.state()
    assert state["lows"] == [40, 20]
    assert state["wakes"] == [40, 30], "a cancel is waited for after its grace"
    far.take(2, 0)
    assert far.state()["edge"] == 60
    far.take(5, 0)
    assert far.state()["edge"] == 20 + CANCEL_GRACE_MS


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(1, 60)),
            st.tuples(st.just("rescue"), st.integers(1, 60)),
            st.tuples(st.just("take"), st.integers(0, 5)),
            st.tuples(st.just("horizon"), st.integers(0, 20)),
        ),
        max_size=40,
    ),
    st.integers(1, 6),
)
def test_any_story_rescues_everything_that_waits_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], room: int
) -> None:
    far = make(tmp_path_factory.mktemp("far"))
    far.epoch = 1
    waiting: dict[int, int] = {}  # arrival -> due
    for verb, n in steps:
        if verb == "push":
            waiting[far.length * 100] = n
            fill(far, n)
        elif verb == "rescue":
            while True:
                before = sorted((due, arrival) for arrival, due in waiting.items() if due <= n)
                assert not before or far.earliest(untaken_only=False) <= before[0][0]
                plans = far.plan_rescue(ALL, n, 2, room, untaken_only=False)
                found = rescued(far, plans)
                assert len(found) == len(set(found)) <= room
                assert all(waiting.pop(arrival) <= n for arrival in found)
                if not found and far.earliest(untaken_only=False) > n:
                    assert not before
                    break
        else:
            taken = min(far.taken + n, far.length) if verb == "take" else far.taken
            far.take(taken, far.horizon_at_ms + (n if verb == "horizon" else 0))
            for number in range(far.taken):
                if waiting.get(number * 100, NEVER) <= far.horizon_at_ms:
                    del waiting[number * 100]
        rows = far.rows.read(0, far.length)
        assert {int(arrival) for arrival in rows["arrival"][far.waits(rows, 0)]} == set(waiting)
        untaken = [due for arrival, due in waiting.items() if arrival >= far.taken * 100]
        assert far.earliest(untaken_only=True) <= min(untaken, default=NEVER)

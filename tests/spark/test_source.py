"""The source of batches: when one runs, and how far ahead it promotes."""

import pytest

from postdate.contract import State, horizon_of
from postdate.spark.pipeline.source import AGAIN_S, PlanReader

BETWEEN_MINUTES = State(
    now_ms=60_000, lead_ms=60_000, delay_ms_max=1, epoch=1, taken=5, horizon=120_000, far_first=0, far_length=5,
    arrival_of_taken=0, rows_in=0, rows_out=0, rescued=0, table="t", bulk="", commands=(), gone=(), wanted=5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("now_ms", "horizon_ms"), [(0, 60_000), (1, 120_000), (59_999, 120_000), (60_000, 120_000), (60_001, 180_000)]
)
def test_the_horizon_is_a_whole_minute_one_to_two_ahead(now_ms: int, horizon_ms: int) -> None:
    assert horizon_of(now_ms, 60_000) == horizon_ms


def test_a_batch_that_did_not_take_what_somebody_waits_for_runs_again_after_a_minute() -> None:
    reader = PlanReader({"addr": "127.0.0.1:1", "rows": "9", "bytes": "9", "soon": "100", "pause": "0"})
    plan, later = {"far": 5, "horizon": 120_000}, BETWEEN_MINUTES._replace(wanted=6, far_length=6)
    assert reader._next(plan, BETWEEN_MINUTES) == plan, "there is nothing to do"
    left = BETWEEN_MINUTES._replace(taken=3)
    assert reader._next(plan, left) == (again := plan | {"again": 1})
    assert reader._next(again, left) == again, "not at once"
    reader._planned_at -= AGAIN_S
    assert reader._next(again, left) == plan | {"again": 2}
    assert reader._next(again, later) == plan | {"far": 6}, "something new runs at once"


def test_a_batch_that_reached_less_than_it_had_planned_runs_again_when_the_next_minute_turns() -> None:
    """The clock had stepped back for days between plan and batch: the broker believes no horizon beyond its reach."""
    reader = PlanReader({"addr": "127.0.0.1:1", "rows": "9", "bytes": "9", "soon": "100", "pause": "0"})
    plan = {"far": 5, "horizon": 120_000 + 86_400_000}
    assert reader._next(plan, BETWEEN_MINUTES) == plan, "this minute is promoted"
    assert reader._next(plan, BETWEEN_MINUTES._replace(now_ms=60_001)) == plan | {"again": 1}

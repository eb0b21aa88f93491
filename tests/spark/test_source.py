"""The source of batches: how far ahead one promotes."""

import pytest

from postdate.contract import horizon_of


@pytest.mark.parametrize(
    ("now_ms", "horizon_ms"), [(0, 60_000), (1, 120_000), (59_999, 120_000), (60_000, 120_000), (60_001, 180_000)]
)
def test_the_horizon_is_a_whole_minute_one_to_two_ahead(now_ms: int, horizon_ms: int) -> None:
    assert horizon_of(now_ms, 60_000) == horizon_ms

"""Spans, delays and instants: one grammar, rounded up to milliseconds."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from postdate.errors import UsageError
from postdate.spans import Delay, delay_ms, instant, instant_ms, shift_ms, span_ms


@pytest.mark.parametrize(
    ("text", "expected_ms"), [("500ms", 500), ("10min", 600_000), ("1.5h", 5_400_000), ("1h30m", 5_400_000), ("0s", 0)]
)
def test_a_span_is_read(text: str, expected_ms: int) -> None:
    assert span_ms(text) == expected_ms


@pytest.mark.parametrize("text", ["", "5", "5x", "m5", "-5s", "1h,5s", "1,5h", "1 h"])
def test_what_is_no_span_is_none(text: str) -> None:
    assert span_ms(text) is None


@pytest.mark.parametrize(
    ("delay", "expected_ms"),
    [
        ("30m", 1_800_000),
        ("1h30m", 5_400_000),
        ("500ms", 500),
        ("2d", 172_800_000),
        ("1d 2h 3m 4s 5ms", 93_784_005),
        ("1.5h", 5_400_000),
        ("0.1ms", 1),
        ("0s", 0),
        (0, 0),
        (2, 2_000),
        (0.001, 1),
        (0.0001, 1),
        (1e-9, 1),
        (timedelta(minutes=1), 60_000),
        (timedelta(microseconds=1), 1),
    ],
)
def test_a_delay_is_read_and_rounded_up(delay: Delay, expected_ms: int) -> None:
    assert delay_ms(delay) == expected_ms


@pytest.mark.parametrize(
    "delay", ["", " ", "30", "m", "30x", "-1s", "1h-30m", "1h30", "1 h", "٣s", True, None, float("nan"), float("inf"),
              -1, -0.001, timedelta(seconds=-1), [1]]
)  # fmt: skip
def test_what_is_no_delay_is_refused(delay: Delay) -> None:
    with pytest.raises(UsageError, match="delay is"):
        delay_ms(delay)


@pytest.mark.parametrize(
    ("by", "expected_ms"),
    [
        ("2h", 7_200_000),
        ("-1h30m", -5_400_000),
        (-600, -600_000),
        (timedelta(minutes=-10), -600_000),
        ("-1.5ms", -1),
        (-0.0015, -1),
        (timedelta(microseconds=-1_500), -1),
    ],
)
def test_a_shift_may_be_negative_and_is_rounded_up(by: Delay, expected_ms: int) -> None:
    assert shift_ms(by) == expected_ms


@pytest.mark.parametrize("by", ["", "-", "--5s", "30", "-30", "1h-30m", "+5s", None, True, float("nan")])
def test_what_is_no_shift_is_refused(by: Delay) -> None:
    with pytest.raises(UsageError, match="by is"):
        shift_ms(by)


def test_an_instant_needs_a_time_zone() -> None:
    with pytest.raises(UsageError, match="without a time zone"):
        instant_ms(datetime(2027, 1, 15, 8))
    with pytest.raises(UsageError, match="expected a datetime"):
        instant_ms(1_800_000_000)  # type: ignore[arg-type]


def test_an_instant_is_rounded_up_to_milliseconds() -> None:
    eight = datetime(2027, 1, 15, 8, tzinfo=UTC)
    assert instant_ms(eight) == 1_800_000_000_000
    assert instant_ms(eight + timedelta(microseconds=1)) == 1_800_000_000_001
    assert instant_ms(eight.astimezone(timezone(timedelta(hours=9)))) == 1_800_000_000_000
    assert instant(1_800_000_000_001) == eight + timedelta(milliseconds=1)

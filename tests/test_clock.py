"""The two kinds of time."""

import pytest

from postdate.clock import Clock, ManualClock, SystemClock


def test_a_manual_clock_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(1_000)
    assert (clock.now_ms(), clock.elapsed_ns()) == (1_000, 0)
    assert clock.pass_ms(250) == 1_250
    assert (clock.now_ms(), clock.elapsed_ns()) == (1_250, 250_000_000)


def test_a_step_moves_the_calendar_alone() -> None:
    clock = ManualClock(1_000)
    clock.pass_ms(5)
    assert clock.step_ms(-500) == 505
    assert (clock.now_ms(), clock.elapsed_ns()) == (505, 5_000_000)
    clock.step_ms(1_000)
    assert (clock.now_ms(), clock.elapsed_ns()) == (1_505, 5_000_000)


def test_time_does_not_pass_backwards() -> None:
    with pytest.raises(AssertionError, match="-1 ms"):
        ManualClock().pass_ms(-1)


def test_the_system_clock_counts_milliseconds_since_the_epoch() -> None:
    clock: Clock = SystemClock()
    assert 1_700_000_000_000 < clock.now_ms() < 10_000_000_000_000
    first = clock.elapsed_ns()
    assert clock.elapsed_ns() >= first

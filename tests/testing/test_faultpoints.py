"""Kills at fault points."""

import pytest

from postdate.faultpoint import listening, reach
from postdate.testing import FaultPoints, Killed


def test_kill_at_kills_once_at_the_nth_time_of_one_point() -> None:
    with FaultPoints() as points:
        points.kill_at = ("here", 2)
        for point in ("here", "there", "here", "there"):
            reach(point)
        with pytest.raises(Killed, match="here"):
            reach("here")
        reach("here")
    assert points.reached == ["here", "there", "here", "there", "here", "here"]


def test_kill_after_kills_once_at_the_nth_point_of_any_name() -> None:
    with FaultPoints() as points:
        points.kill_after = 2
        reach("one")
        reach("two")
        with pytest.raises(Killed, match="three"):
            reach("three")
        reach("four")


def test_a_disarmed_kill_does_not_happen() -> None:
    with FaultPoints() as points:
        points.kill_at, points.kill_after = ("here", 0), 0
        points.disarm()
        reach("here")
    assert points.reached == ["here"]


def test_points_outside_the_block_are_not_heard() -> None:
    points = FaultPoints()
    reach("before")
    with points:
        reach("first")
        with listening(None):
            reach("inside a quiet block")
        with points:
            reach("second")
        reach("third")
    reach("after")
    assert points.reached == ["first", "second", "third"]


def test_code_that_handles_errors_does_not_handle_a_kill() -> None:
    assert not issubclass(Killed, Exception)

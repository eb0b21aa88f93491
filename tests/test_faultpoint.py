"""The one hook for named fault points."""

import os
import subprocess
import sys

import pytest

from postdate.faultpoint import KILL_AT, listen, listening, reach

SCRIPT = """
from postdate.faultpoint import reach
for name in ("one", "two", "one", "two"):
    print(name, flush=True)
    reach(name)
"""


def test_a_point_without_a_listener_does_nothing() -> None:
    reach("anything")


def test_a_listener_hears_the_points_of_its_block() -> None:
    heard: list[str] = []
    with listening(heard.append):
        reach("one")
        reach("two")
    reach("three")
    assert heard == ["one", "two"]


def test_the_listener_before_is_back_after_a_block_that_raises() -> None:
    heard: list[str] = []

    def fail(name: str) -> None:
        raise ValueError(name)

    before = listen(heard.append)
    try:
        with pytest.raises(ValueError, match="one"), listening(fail):
            reach("one")
        reach("two")
    finally:
        listen(before)
    assert heard == ["two"]


@pytest.mark.parametrize(
    ("wanted", "printed"), [("two", ["one", "two"]), ("one:2", ["one", "two", "one"]), ("three", ["one", "two"] * 2)]
)
def test_the_environment_names_the_point_that_ends_a_process(wanted: str, printed: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, KILL_AT: wanted}, capture_output=True, text=True, check=False
    )
    assert ended.stdout.split() == printed
    assert ended.returncode == (0 if wanted == "three" else -9)

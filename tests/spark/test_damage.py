"""A table that is damaged while Spark works on it: what is said, and what the broker does meanwhile."""

from pathlib import Path
from typing import Any

import pytest

from postdate.errors import CorruptTable
from postdate.spark.session.session import first_line
from tests.support.spark import MINUTE_MS, NOW, piping


def test_a_file_that_cannot_be_read_ends_the_pipeline_and_is_named(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.send(*[NOW + 4 * MINUTE_MS + n for n in range(200)])
        piped.start_driver()
        piped.follow()
        (damaged,) = (piped.table / "messages").glob("*.parquet")
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:])
        with pytest.raises(CorruptTable, match=damaged.name):
            piped.travel(NOW + 5 * MINUTE_MS)
        damaged.unlink()
        piped.start_driver()
        piped.travel(NOW + 5 * MINUTE_MS)


TASK_FAILED = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "tasks.py", line 50, in _answers
    for result in results:
postdate.errors.CorruptLog: no record of 5 bytes stands at byte 7
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TASK_FAILED, "CorruptLog: no record of 5 bytes stands at byte 7"),
        ("the query is broken\n\tat org.apache.spark", "the query is broken"),
        ("", ""),
    ],
)
def test_what_is_told_of_a_failure_is_one_sentence(text: str, told: str) -> None:
    assert first_line(RuntimeError(text)) == told

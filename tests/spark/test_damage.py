"""A table that is damaged while Spark works on it: what is said, and what the broker does meanwhile."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from postdate.check import check_folder
from postdate.errors import CorruptTable
from postdate.spark.session.session import first_line
from postdate.storage.disk import RealDisk
from postdate.table import files
from tests.support.pipeline import BEGIN, World
from tests.support.spark import MINUTE_MS, NOW, piping


def flip(path: Path, place: int) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])


def place_in_group(path: Path, number: int) -> int:
    """A byte in the middle of the records of a row group."""
    metadata = pq.ParquetFile(path).metadata
    column = metadata.row_group(number).column(metadata.num_columns - 1)
    return int(column.data_page_offset + column.total_compressed_size // 2)


def test_a_file_that_cannot_be_read_is_set_aside_and_read_again_from_the_log(
    tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with piping(tmp_path, spark) as piped:
        piped.send(*[NOW + 4 * MINUTE_MS + n for n in range(200)])
        piped.start_driver()
        piped.follow()
        (damaged,) = (piped.table / "messages").glob("*.parquet")
        flip(damaged, 300)
        piped.travel(NOW + 5 * MINUTE_MS)
        assert f"{damaged.name} of the table" in caplog.text
        assert (piped.table / "messages" / f"_damaged-{damaged.name}").exists()


def test_what_can_be_read_of_a_damaged_file_is_delivered_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Imported messages are in the table alone."""
    monkeypatch.setattr(files, "ROW_GROUP_ROWS", 10)
    world = World(tmp_path)
    try:
        dues = [BEGIN + 4 * MINUTE_MS + n for n in range(40)]
        world.import_messages("nightly", dues)
        world.send("sent", [BEGIN + 4 * MINUTE_MS])
        world.batch()
        (damaged,) = (file for file in world.pipeline.table.files.values() if file.rows == 40)
        path = Path(world.pipeline.table.folder.path(damaged.path))
        flip(path, place_in_group(path, 1))
        world.pass_minutes(6)
        assert sorted(world.shown()) == sorted(["sent 0", *(f"nightly {n}" for n in range(40) if not 10 <= n < 20)])
        assert "10 rows cannot be found" in caplog.text
        state = world.control.state()
        assert state.rows_in == state.rows_out
        world.pipeline = world.registered()
        world.pass_minutes(1)
    finally:
        world.close()
    report = check_folder(RealDisk(tmp_path))
    assert report.ok, report.findings


def test_a_file_whose_bytes_cannot_be_had_ends_the_batch_and_stays(tmp_path: Path) -> None:
    """The storage is away: another try may find it."""
    world = World(tmp_path)
    try:
        world.import_messages("nightly", [BEGIN + 4 * MINUTE_MS])
        world.batch()
        (file,) = world.pipeline.table.files
        path = Path(world.pipeline.table.folder.path(file))
        path.rename(path.with_suffix(".away"))
        with pytest.raises(CorruptTable, match=path.name):
            world.pass_minutes(4)
        path.with_suffix(".away").rename(path)
        world.pass_minutes(5)
        assert list(world.shown()) == ["nightly 0"]
    finally:
        world.close()


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

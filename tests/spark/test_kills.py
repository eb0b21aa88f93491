"""`postdate pipeline` as a process, killed by SIGKILL at named steps: in its driver, or in a worker of Spark's. The
next one goes on, nothing is lost, nothing comes twice, nothing is left running.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.spark import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, Piped, piping

KILLED, FAILED = -9, 3
WORKERS = ("file.written", "file.synced", "chunk.upload", "chunk.uploaded")
DRIVER = (
    "batch.begun", "ingest.written", "table.commit", "table.committed", "table.synced", "stage.call", "stage.called",
    "batch.done",
)  # fmt: skip


def send_some(piped: Piped) -> None:
    """Some must be promoted by the next batch, some wait."""
    piped.send(*(piped.now + 65 * SECOND_MS + n * 5_003 for n in range(30)))
    piped.send(*(piped.now + HOUR_MS + n for n in range(5)), piped.now + 2 * DAY_MS + HOUR_MS)


def kill_at_each(piped: Piped, steps: Sequence[str]) -> None:
    """In one of its first batches each: one may repeat what the one before had begun. Then one lives."""
    piped.may_rescue = True
    for step in steps:
        piped.move(piped.now + MINUTE_MS)
        send_some(piped)
        code = piped.killed_process(step)
        assert code == (FAILED if step in WORKERS else KILLED), f"{step}: {piped._process_log.read_text()}"
    piped.start_process()
    piped.follow()
    piped.travel(piped.now + 3 * MINUTE_MS)
    piped.stop_process()
    piped.travel(piped.now + 2 * HOUR_MS)
    assert "Traceback" not in piped._process_log.read_text()


@pytest.mark.full
def test_a_pipeline_that_is_killed_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    with piping(tmp_path, None) as piped:
        kill_at_each(piped, ["stage.call"])


@pytest.mark.full
@pytest.mark.parametrize("steps", [WORKERS, DRIVER], ids=["workers", "driver"])
def test_a_pipeline_is_killed_at_every_step(tmp_path: Path, steps: Sequence[str]) -> None:
    with piping(tmp_path, None) as piped:
        kill_at_each(piped, steps)


@pytest.mark.full
@pytest.mark.parametrize("step", ["merge.written", "merge.committed", "batch.begun:2", "batch.done:2"])
def test_a_pipeline_is_killed_in_a_later_batch(tmp_path: Path, step: str) -> None:
    """Behind a checkpoint that Spark has committed; and in a merge, which comes when what is far comes near."""
    with piping(tmp_path, None) as piped:
        send_some(piped)
        piped.start_process(step)
        piped.follow()
        process, piped.process = piped.process, None
        assert process is not None
        piped.may_rescue = True  # for it jumps
        piped.move(piped.now + 2 * DAY_MS - HOUR_MS)
        assert process.wait(120) == KILLED
        kill_at_each(piped, [])


@pytest.mark.full
def test_a_pipeline_is_killed_again_and_again(tmp_path: Path) -> None:
    with piping(tmp_path, None) as piped:
        kill_at_each(piped, ["table.committed", "table.committed", "stage.call", "stage.called", "batch.begun"] * 2)

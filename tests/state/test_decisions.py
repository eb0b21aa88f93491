"""What the records of jobs change."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postdate.state.decisions import Command, Decisions
from postdate.state.far import NEVER, Far
from postdate.state.jobs import CANCEL, FAILED, IMPORT, LOADING, RUNNING, WAITING, Jobs
from postdate.storage import selection
from postdate.storage.batch import JOB
from postdate.storage.disk import RealDisk
from postdate.table.format import NEAR

HORIZON = 100
NAME = "00000000-0"


class World:
    """Rows of arrival 7 are cancelled, those of arrival 8 live in the wheel."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.jobs, self.held = RealDisk(folder), Jobs(), list[int]()
        self.far = Far(self.disk, 64, 4, 8)
        self.far.epoch = 1
        self.decisions = Decisions(
            self.jobs, self.far, selection.Selections(self.disk),
            is_cancelled=lambda rows: rows["arrival"] == 7, kill=lambda rows: rows["arrival"] == 8,
            hold=self.held.append,
        )  # fmt: skip
        self.end = 0

    def call(self, call: str, **body: Any) -> str:
        """Where the job is then, or why not."""
        self.end += 64
        answer = self.decisions.apply({"call": call, **body}, Command(self.end - 48, 40, self.end, 1_000 + self.end))
        return answer.job.state if answer.job else answer.reason

    def begin(self, call: str, op: str) -> str:
        return self.call(call, id="j", op=op, topic="", where="true", by_ms=0)

    def decide(self, *names: str, epoch: int = 1) -> str:
        parts = [
            {"name": name, "rows": 5, "due_low": 0, "due_high": NEVER, "arrival_high": 9, "own": 0} for name in names
        ]
        return self.call("decide", number=0, epoch=epoch, parts=parts, files=[])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_command_gets_its_place_in_the_far_queue_and_is_never_due(world: World) -> None:
    assert world.begin("ask", CANCEL) == WAITING
    row = world.far.rows.read(0, 1)[0]
    assert (row["arrival"], row["due"], row["kind"], world.held) == (16, NEVER, JOB, [16])
    assert world.begin("ask", CANCEL) == WAITING, "asked again, it is the same job"
    assert (world.far.length, world.jobs.next_number) == (1, 1)


def test_an_import_gets_its_place_when_its_files_are_written(world: World) -> None:
    assert world.call("adopt", id="j", files=[], rows=0, bad=0) == "there is no job 'j'"
    assert (world.begin("begin", IMPORT), world.far.length) == (LOADING, 0)
    assert world.call("adopt", id="j", files=[], rows=3, bad=1) == WAITING
    assert world.call("adopt", id="j", files=[], rows=9, bad=9) == WAITING
    assert (world.far.length, world.jobs.all()[0].rows) == (1, 3)
    assert world.decide(NAME).endswith("it has its files, and selects nothing")
    assert world.decide() == RUNNING
    assert world.call("fail", id="j", reason="late") == RUNNING, "it cannot be withdrawn any more"


def test_a_job_that_has_failed_may_be_asked_for_again(world: World) -> None:
    world.begin("ask", CANCEL)
    assert world.call("fail", id="j", reason="no") == FAILED
    assert world.decide() == "job 0 does not wait for a decision: it is failed"
    assert world.begin("ask", CANCEL) == WAITING
    assert world.jobs.all()[0].number == 1


def test_a_decision_takes_what_waits_and_tells_what_came_too_late(world: World) -> None:
    world.begin("ask", CANCEL)
    world.far.horizon_at_ms, world.far.taken = HORIZON, 1
    rows = np.zeros(5, selection.SELECTED)
    # Staged and fired; in the wheel; in the table; cancelled; found in the wheel, and fired since.
    rows["due"], rows["arrival"] = [50, 60, 200, 200, 200], [5, 8, 6, 7, 9]
    rows["flags"][4] = NEAR
    selection.write(world.disk, NAME, rows)
    assert world.decide(NAME, epoch=2).startswith("epoch 2 is not the current one (1)")
    assert world.decide(NAME) == RUNNING
    (job,) = world.jobs.decided()
    assert job.parts[0].late == [0, 3, 4]
    assert (job.rows, job.late, job.changed, job.decided_at) == (5, 3, 2, world.end)

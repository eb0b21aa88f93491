"""What jobs have taken, and where they have moved it to."""

from pathlib import Path

import numpy as np
import pytest

from postdate.keys import key_hash
from postdate.state.far import FAR
from postdate.state.jobs import CANCEL, DONE, POSTPONE, WAITING, Job, Jobs, Part
from postdate.state.takings import Takings
from postdate.state.topics import Topics
from postdate.storage import selection
from postdate.storage.disk import RealDisk

BY_MS = 100


class World:
    """One topic, and jobs that select rows by hand."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.jobs, topics = RealDisk(folder), Jobs(), Topics()
        topics.put("a", 1, 1, 6, {})
        self.takings = Takings(self.jobs, selection.Selections(self.disk), topics)

    def job(self, op: str, rows: list[tuple[int, int]], late: tuple[int, ...] = ()) -> Job:
        """A job that has taken these (due, arrival), but for those that came too late."""
        job = self.jobs.begin(op, f"j{self.jobs.next_number}", 0, WAITING)
        job.by_ms = BY_MS if op == POSTPONE else 0
        self.jobs.enqueue(job, job.number, 0)
        selected = np.zeros(len(rows), selection.SELECTED)
        selected["due"], selected["arrival"] = np.array(rows).T
        selected["unique_hash"] = key_hash("k")
        name = f"{job.number:08}-0"
        selection.write(self.disk, name, selected)
        self.jobs.decide(job, 1, [Part(name, len(rows), rows[0][0], rows[-1][0], 0, 0, list(late))])
        return job


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def far_rows(*places: tuple[int, int]) -> np.ndarray:
    rows = np.zeros(len(places), FAR)
    rows["due"], rows["arrival"] = np.array(places).T
    return rows


def test_what_was_taken_is_dead_unless_it_came_too_late(world: World) -> None:
    job = world.job(CANCEL, [(10, 1), (10, 2), (20, 3)], late=(1,))
    rows = far_rows((10, 1), (10, 2), (20, 3), (20, 4))
    assert world.takings.dead(rows).tolist() == [True, False, True, False]
    assert world.takings.dead(rows[:0]).tolist() == []
    assert world.takings.ahead_of(0) == [job]
    assert world.takings.ahead_of(1) == [], "the table has followed"
    assert not world.takings.dead_by(rows, []).any()


def test_a_selection_that_retention_has_let_go_takes_nothing_more(tmp_path: Path, world: World) -> None:
    world.job(CANCEL, [(10, 1)])
    (tmp_path / selection.FOLDER / "00000000-0").unlink()
    assert not world.takings.dead(far_rows((10, 1))).any()


def test_a_message_is_followed_through_every_job_that_moved_it(world: World) -> None:
    world.job(POSTPONE, [(10, 1), (20, 2)], late=(1,))
    world.job(POSTPONE, [(110, 1)])
    assert world.takings.moved_dues("a", "k", 10) == [110, 210]
    assert world.takings.moved_dues("a", "k", 20) == []
    assert world.takings.moved_dues("b", "k", 10) == []
    assert world.takings.moved_dues("a", "other", 10) == []
    assert [world.takings.is_moved(*place) for place in ((10, 1), (20, 2), (10, 9))] == [True, False, False]


def test_what_a_job_has_moved_is_remembered_until_all_that_became_of_it_has_passed(world: World) -> None:
    first, second = world.job(POSTPONE, [(10, 1)]), world.job(POSTPONE, [(110, 1)])
    for job in (first, second):
        world.jobs.end(job, DONE, 0)
    world.takings.forget(209)
    assert world.jobs.decided() == [first, second], "the second has moved what the first has moved"
    world.takings.forget(210)
    assert world.jobs.decided() == []


def test_what_was_only_taken_away_is_forgotten_when_it_has_passed_and_the_table_has_followed(world: World) -> None:
    job = world.job(CANCEL, [(10, 1)])
    world.takings.forget(10)
    assert world.jobs.decided() == [job]
    world.jobs.end(job, DONE, 0)
    world.takings.forget(9)
    assert world.jobs.decided() == [job]
    world.takings.forget(10)
    assert world.jobs.decided() == []

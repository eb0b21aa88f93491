"""Jobs: what their records change, what they have taken, and where they have moved it to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postdate.arrival import NEAR, NEVER, own_arrival
from postdate.keys import key_hash
from postdate.state.far import Far
from postdate.state.jobs import (
    CANCEL,
    DONE,
    FAILED,
    IMPORT,
    LOADING,
    POSTPONE,
    RUNNING,
    TRIES_MAX,
    WAITING,
    Job,
    Jobs,
    Part,
)
from postdate.state.references import References
from postdate.state.topics import Topics
from postdate.state.wheel import Wheel
from postdate.storage import selection
from postdate.storage.batch import JOB
from postdate.storage.chunk import Chunks
from postdate.storage.disk import RealDisk
from postdate.storage.layout import FAR, SELECTED, SINGLE_STRUCT

BY_MS = 100
HORIZON = 100
NAME = "00000000-0"


class World:
    """One topic, a message of due 60 and arrival 8 in the wheel, and jobs that select rows by hand."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.far, self.wheel, topics = RealDisk(folder), Far(RealDisk(folder), 64, 4, 8), Wheel(), Topics()
        topics.put("a", 1, 1, 6, {})
        self.far.epoch = 1
        self.references, self.near = References(Chunks(self.disk), 4), [1]
        self.wheel.add(60, SINGLE_STRUCT.pack(8, 100, 0, 0, 0, 0))
        self.references.hold(8)
        self.selections = selection.Selections(self.disk)
        self.jobs = Jobs(self.wheel, self.far, topics, self.selections, self.references, self.near)
        self.end = 0

    def call(self, call: str, **body: Any) -> str:
        """Where the job is then, or why not."""
        self.end += 64
        answer = self.jobs.apply({"call": call, **body}, self.end - 48, 40, 1_000 + self.end)
        return answer.job.state if answer.job else answer.reason

    def begin(self, call: str, op: str, **more: bool) -> str:
        return self.call(call, id="j", op=op, topic="", where="true", by_ms=0, **more)

    def ask(self, job_id: str = "j", op: str = CANCEL) -> Job:
        self.call("ask", id=job_id, op=op, topic="", where="true", by_ms=BY_MS, place=False)
        return self.jobs.all()[-1]

    def attempt(self, call: str, number: int = 0, epoch: int = 1) -> str:
        """Where the job is then, or why there is nothing to try."""
        self.end += 64
        body = {"call": call, "epoch": epoch, "number": number, "reason": "no file system"}
        answer = self.jobs.attempt(body, self.end - 48, 40, 1_000 + self.end)
        assert answer.job is None or answer.job.number == number
        return answer.reason or (answer.job.state if answer.job else "")

    def decide(self, *names: str, epoch: int = 1, place: bool = True) -> str:
        """As the fold does; rows of arrival 7 are cancelled."""
        self.end += 64
        parts = [
            {"name": name, "rows": 5, "due_low": 0, "due_high": NEVER, "arrival_high": 9, "own": 0} for name in names
        ]
        body = {"number": 0, "epoch": epoch, "parts": parts, "files": [], "place": place}
        answer = self.jobs.decide(body, self.end - 48, 40, self.end)
        if answer.job is None:
            return answer.reason
        for part in answer.job.parts:
            is_cancelled = self.selections.rows(part.name)["arrival"] == 7
            self.jobs.take_selected(answer.job, part, is_cancelled, 1_000 + self.end)
        return answer.job.state

    def job(self, op: str, rows: list[tuple[int, int]], late: tuple[int, ...] = ()) -> Job:
        """A job that has taken these (due, arrival), but for those that came too late."""
        job = self.jobs.begin(op, f"j{self.jobs.next_number}", 0, WAITING)
        job.by_ms = BY_MS if op == POSTPONE else 0
        self.jobs.enqueue(job, job.number)
        selected = np.zeros(len(rows), SELECTED)
        selected["due"], selected["arrival"] = np.array(rows).T
        selected["unique_hash"] = key_hash("k")
        name = f"{job.number:08}-0"
        selection.write(self.disk, name, selected)
        self.jobs.run(job, 1, [Part(name, len(rows), rows[0][0], rows[-1][0], 0, 0, list(late))])
        return job


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def selected(*places: tuple[int, int]) -> np.ndarray:
    rows = np.zeros(len(places), SELECTED)
    rows["due"], rows["arrival"] = np.array(places).T
    return rows


def far_rows(*places: tuple[int, int]) -> np.ndarray:
    rows = np.zeros(len(places), FAR)
    rows["due"], rows["arrival"] = np.array(places).T
    return rows


# -------------------------------------------------------------------------------------------- what their records change


def test_a_decision_gets_its_place_in_the_far_queue_and_is_never_due(world: World) -> None:
    assert world.begin("ask", CANCEL, place=False) == WAITING
    assert (world.far.length, world.jobs.all()[0].arrival) == (0, 16), "nothing waits for its selection"
    assert world.begin("ask", CANCEL, place=False) == WAITING, "asked again, it is the same job"
    assert world.decide() == RUNNING
    row = world.far.rows.read(0, 1)[0]
    assert (row["arrival"], row["due"], row["kind"]) == (144, NEVER, JOB)
    assert world.references.held == {0: 1, 9: 1}, "its record must stay in the log"
    assert (world.far.length, world.jobs.all()[0].far, world.jobs.all()[0].arrival) == (1, 0, 16)
    world.jobs.follow_table(1, 2_000)
    assert world.jobs.all()[0].state == DONE


def test_records_of_an_earlier_version_have_their_place_where_they_were_asked_for(world: World) -> None:
    assert world.begin("ask", CANCEL) == WAITING
    row = world.far.rows.read(0, 1)[0]
    assert (row["arrival"], row["due"], row["kind"]) == (16, NEVER, JOB)
    assert world.references.held == {0: 1, 1: 1}
    assert world.decide(place=False) == RUNNING
    assert (world.far.length, world.jobs.all()[0].far) == (1, 0)


def test_a_job_of_an_earlier_version_that_waits_is_passed_and_gets_a_row_when_it_is_decided(world: World) -> None:
    world.begin("ask", CANCEL)
    world.far.take(1, HORIZON)
    world.jobs.follow_table(1, 2_000)
    (job,) = world.jobs.all()
    assert (job.state, world.jobs.next_to_select()) == (WAITING, job)
    assert (world.decide(), job.far) == (RUNNING, 1)


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
    world.begin("ask", CANCEL, place=False)
    world.far.horizon_at_ms, world.far.taken = HORIZON, 1
    rows = np.zeros(5, SELECTED)
    # Staged and fired; in the wheel; in the table; cancelled; found in the wheel, and fired since.
    rows["due"], rows["arrival"] = [50, 60, 200, 200, 200], [5, 8, 6, 7, 9]
    rows["flags"][4] = NEAR
    selection.write(world.disk, NAME, rows)
    assert world.decide(NAME, epoch=2).startswith("epoch 2 is not the current one (1)")
    assert world.decide(NAME) == RUNNING
    (job,) = world.jobs.decided()
    assert job.parts[0].late == [0, 3, 4]
    assert (job.rows, job.late, job.changed, job.decided_at) == (5, 3, 2, world.end)
    assert (world.wheel.count, world.near, world.references.held) == (0, [0], {9: 1}), "what was in the wheel is dead"


# -------------------------------------------------------------------------------------------- when they are selected


def test_jobs_are_selected_one_after_the_other_when_the_table_has_all_that_came_before(world: World) -> None:
    world.far.push(far_rows((NEVER - 1, 3)).tobytes(), NEVER - 1)
    first, second = world.ask("a"), world.ask("b")
    assert world.jobs.next_to_select() is None, "a message that came before is not taken yet"
    world.far.take(1, HORIZON)
    assert world.jobs.next_to_select() is first
    assert world.decide() == RUNNING
    assert world.jobs.next_to_select() is None, "the table has not followed the first"
    world.far.take(2, HORIZON)
    world.jobs.follow_table(2, 2_000)
    assert world.jobs.next_to_select() is second


def test_a_job_is_not_for_imports_that_come_later(world: World) -> None:
    world.call("begin", id="import", op=IMPORT, topic="", where="", by_ms=0)
    assert world.ask().loading == [0]


# -------------------------------------------------------------------------------------------- tries


def test_a_job_that_has_used_its_tries_has_failed_with_the_last_reason(world: World) -> None:
    job = world.ask()
    for _ in range(TRIES_MAX - 1):
        assert (world.attempt("try"), world.attempt("stumble")) == (WAITING, WAITING)
    assert world.attempt("try") == WAITING
    assert (world.attempt("stumble"), job.reason) == (FAILED, "given up after 3 tries: no file system")
    assert world.attempt("try") == "job 0 is failed"


def test_a_try_that_kills_its_pipeline_counts(world: World) -> None:
    job = world.ask()
    assert [world.attempt("try") for _ in range(TRIES_MAX)] == [WAITING] * TRIES_MAX
    assert world.attempt("try") == "job 0 has used its 3 tries"
    assert (job.state, job.reason) == (FAILED, "the pipeline ended during each of its 3 tries")


def test_a_pipeline_that_stops_in_order_uses_no_try(world: World) -> None:
    job = world.ask()
    for _ in range(2 * TRIES_MAX):
        assert (world.attempt("try"), world.attempt("leave")) == (WAITING, WAITING)
    assert (job.tries, job.tried_at) == (0, -1)


def test_tries_of_a_pipeline_that_was_overtaken_are_refused(world: World) -> None:
    job = world.ask()
    assert world.attempt("try", epoch=2).startswith("epoch 2 is not the current one (1)")
    assert world.attempt("try", number=7) == "job 7 is unknown"
    assert job.tries == 0


def test_a_decided_job_that_the_table_cannot_follow_is_set_aside_and_tried_again(world: World) -> None:
    job = world.ask(op=POSTPONE)
    world.attempt("try")
    selection.write(world.disk, NAME, selected((200, 6)))
    assert (world.decide(NAME), job.tries) == (RUNNING, 0), "tries count anew"
    for _ in range(TRIES_MAX):
        assert (world.attempt("try"), world.attempt("stumble")) == (RUNNING, RUNNING)
    assert (job.aside, job.reason) == (True, "given up after 3 tries: no file system")
    world.far.take(1, HORIZON)
    world.jobs.follow_table(1, 2_000)
    assert (job.state, world.jobs.ahead_of(1)) == (RUNNING, [job]), (
        "promotion passes it, and leaves out what it has taken"
    )
    assert world.jobs.find_taken(far_rows((200, 6))).all()
    assert world.jobs.remembered_from == job.arrival, "a cancel may be for what it brings"
    second = world.ask("next")
    assert world.jobs.next_to_select() is second, "others go on without it"
    assert world.attempt("again") == RUNNING
    assert (job.aside, job.tries, job.far) == (False, 0, 1)
    world.jobs.follow_table(2, 3_000)
    assert job.state == DONE


def test_what_a_job_set_aside_has_taken_is_not_taken_twice(world: World) -> None:
    first = world.ask("first")
    world.attempt("try")
    selection.write(world.disk, NAME, selected((200, 6)))
    world.decide(NAME)
    first.aside = True
    second = world.ask("second")
    selection.write(world.disk, "00000001-0", selected((200, 6), (200, 9)))
    part = Part("00000001-0", 2, 200, 200, 9, 0)
    world.jobs.run(second, 1, [part])
    world.jobs.take_selected(second, part, np.zeros(2, np.bool_), 0)
    assert (second.changed, part.late) == (1, [0])


# -------------------------------------------------------------------------------------------- what they have taken


def test_what_was_taken_is_dead_unless_it_came_too_late(world: World) -> None:
    job = world.job(CANCEL, [(10, 1), (10, 2), (20, 3)], late=(1,))
    rows = far_rows((10, 1), (10, 2), (20, 3), (20, 4))
    assert world.jobs.find_taken(rows).tolist() == [True, False, True, False]
    assert world.jobs.find_taken(rows[:0]).tolist() == []
    assert world.jobs.ahead_of(0) == [job]
    assert world.jobs.ahead_of(1) == [], "the table has followed"
    assert not world.jobs.find_taken_by(rows, []).any()


def test_a_selection_that_retention_has_let_go_takes_nothing_more(tmp_path: Path, world: World) -> None:
    world.job(CANCEL, [(10, 1)])
    (tmp_path / selection.FOLDER / "00000000-0").unlink()
    assert not world.jobs.find_taken(far_rows((10, 1))).any()


def test_a_message_is_followed_through_every_job_that_moved_it(world: World) -> None:
    world.job(POSTPONE, [(10, 1), (20, 2)], late=(1,))
    world.job(POSTPONE, [(110, 1)])
    assert world.jobs.moved_dues("a", "k", 10) == [110, 210]
    assert world.jobs.moved_dues("a", "k", 20) == []
    assert world.jobs.moved_dues("b", "k", 10) == []
    assert world.jobs.moved_dues("a", "other", 10) == []
    assert [world.jobs.has_moved(*place) for place in ((10, 1), (20, 2), (10, 9))] == [True, False, False]


def test_what_a_job_has_moved_is_remembered_until_all_that_became_of_it_has_passed(world: World) -> None:
    first, second = world.job(POSTPONE, [(10, 1)]), world.job(POSTPONE, [(110, 1)])
    for job in (first, second):
        world.jobs.end(job, DONE, 0)
    world.jobs.forget_passed(209)
    assert world.jobs.decided() == [first, second], "the second has moved what the first has moved"
    world.jobs.forget_passed(210)
    assert world.jobs.decided() == []


def test_what_was_only_taken_away_is_forgotten_when_it_has_passed_and_the_table_has_followed(world: World) -> None:
    job = world.job(CANCEL, [(10, 1)])
    world.jobs.forget_passed(10)
    assert world.jobs.decided() == [job]
    world.jobs.end(job, DONE, 0)
    world.jobs.forget_passed(9)
    assert world.jobs.decided() == [job]
    world.jobs.forget_passed(10)
    assert world.jobs.decided() == []


# ----------------------------------------------------------------------------- rows that come before the table has them


def test_rows_of_an_import_are_brought_step_by_step_and_it_cannot_be_withdrawn_then(world: World) -> None:
    world.begin("begin", IMPORT)
    assert "is loading" in world.jobs.bring_problem(0, -1, 50, HORIZON)
    world.call("adopt", id="j", files=[], rows=3, bad=0)
    assert world.jobs.bring_problem(0, -1, 50, HORIZON) == ""
    world.jobs.bring(0, 50, 64)
    assert world.call("fail", id="j", reason="late") == RUNNING
    assert "brought up to 50" in world.jobs.bring_problem(0, -1, 60, HORIZON), "it was brought before"
    assert "the horizon is 100" in world.jobs.bring_problem(0, 50, 101, HORIZON)
    assert "brought up to 50" in world.jobs.bring_problem(0, 50, 49, HORIZON)
    assert world.jobs.bring_problem(0, 50, 60, HORIZON) == ""
    rows = far_rows((50, own_arrival(0)), (51, own_arrival(0)), (50, own_arrival(1)), (50, 8))
    assert world.jobs.find_brought(rows).tolist() == [True, False, False, False]


def test_jobs_that_bring_nothing_are_refused(world: World) -> None:
    assert world.jobs.bring_problem(0, -1, 50, HORIZON) == "job 0 brings no messages"
    world.begin("ask", POSTPONE)
    assert "is waiting" in world.jobs.bring_problem(0, -1, 50, HORIZON), "nothing is decided"
    world.job(CANCEL, [(1, 1)])
    assert "is running" in world.jobs.bring_problem(1, -1, 50, HORIZON)
    world.job(POSTPONE, [(1, 1)])
    assert world.jobs.bring_problem(2, -1, 50, HORIZON) == ""


def test_what_was_brought_is_forgotten_with_its_job_and_survives_a_snapshot(world: World) -> None:
    job, rows = world.job(POSTPONE, [(1, 1)]), far_rows((50, own_arrival(0)))
    world.jobs.bring(0, 50, 64)
    saved = world.jobs.state()
    world.jobs.load(1, saved)
    assert world.jobs.find_brought(rows).tolist() == [True]
    for each in saved:
        del each["brought_until_ms"]  # as an earlier version has written it
    world.jobs.load(1, saved)
    assert world.jobs.find_brought(rows).tolist() == [False]
    world.jobs.bring(0, 50, 64)
    job = world.jobs.all()[0]
    world.jobs.end(job, DONE, 1_000)
    assert world.jobs.find_brought(rows).tolist() == [False]


def test_a_decision_comes_too_late_for_what_was_brought_and_fired(world: World) -> None:
    world.begin("begin", IMPORT)
    world.call("adopt", id="j", files=[], rows=3, bad=0)
    world.jobs.bring(0, HORIZON, 64)
    rows = np.zeros(2, SELECTED)
    rows["due"], rows["arrival"] = [50, 150], [own_arrival(0), own_arrival(0, 0, 1)]
    assert world.jobs.waits_in_table(rows).tolist() == [False, True]

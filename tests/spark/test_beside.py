"""What runs beside the batches, on real Spark: selections that take long, that fail, and that are withdrawn."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from postdate.check import check_folder
from postdate.contract import JobStatus
from postdate.spark.pipeline.jobs import spark_sentence
from postdate.storage.disk import RealDisk
from tests.spark.test_jobs import HOUR, ask, done, seen, waiting
from tests.spark.test_jobs_faults import CAMPAIGN, schedule
from tests.support.core import MINUTE_MS
from tests.support.pipeline import BEGIN, World
from tests.support.spark import HOUR_MS, SECOND_MS, Piped, Sent, piping

# Some 20 ms for each message, which Spark cannot compute once and for all: minutes for all of them.
SLOW = "exists(sequence(1, 400), x -> exists(sequence(1, 400), y -> x * y + size < 0))"
MANY = 5_000


@pytest.fixture
def world(tmp_path: Path, spark: Any) -> Iterator[World]:
    world = World(tmp_path, spark=spark)
    yield world
    world.close()
    report = check_folder(RealDisk(tmp_path))
    assert not report.findings, report.findings


def job_of(piped: Piped, job_id: str) -> JobStatus:
    return piped.control.find_job(job_id)


def running_tasks(spark: Any) -> int:
    """How many tasks of selections Spark runs."""
    tracker = spark.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup("postdate-job")]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)


def ask_slow(piped: Piped, job_id: str) -> None:
    """Asks for a job of minutes, and waits until its predicate runs."""
    piped.control._job("ask", {"id": job_id, "op": "cancel", "where": SLOW, "by_ms": 0})
    piped.wait(lambda: job_of(piped, job_id).step == "selecting")


def test_messages_and_imports_are_on_time_while_a_predicate_runs_and_withdrawing_stops_it(
    tmp_path: Path, spark: Any
) -> None:
    with piping(tmp_path, spark) as piped:
        piped.make_topic(CAMPAIGN, 1)
        piped.send(*(piped.now + HOUR_MS + number for number in range(MANY)))
        piped.start_driver()
        piped.follow()
        ask_slow(piped, "slow")
        first = piped.now + 2 * MINUTE_MS
        rows = [Sent(f"c{n}", CAMPAIGN, 0, first + n * 20 * SECOND_MS, "", f"k{n}") for n in range(6)]
        schedule(piped, rows)
        piped.wait(lambda: job_of(piped, "campaign").state == "done")
        piped.sent += rows
        piped.send(*(piped.now + number * 30 * SECOND_MS for number in range(3, 6)))
        piped.travel(first + 3 * MINUTE_MS)
        assert (job_of(piped, "slow").state, piped.running.pipeline.beside.is_selecting) == ("waiting", True)
        piped.control.fail_job("slow", "withdrawn")
        piped.wait(lambda: not piped.running.pipeline.beside.is_selecting)
        piped.wait(lambda: not running_tasks(spark))
        assert job_of(piped, "slow").reason == "withdrawn"
        piped.travel(piped.now + 2 * MINUTE_MS)


def test_a_pipeline_that_comes_back_promotes_what_is_overdue_before_a_job(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.is_exact, piped.may_rescue = False, True
        piped.send(*(piped.now + HOUR_MS + number for number in range(MANY)))
        late = piped.send(piped.now + 4 * MINUTE_MS)
        piped.start_driver()
        piped.follow()
        ask_slow(piped, "slow")
        piped.stop_driver()
        assert job_of(piped, "slow").tries == 0, "a pipeline that stops in order uses no try"
        piped.move(late[0].due + MINUTE_MS)
        piped.start_driver()
        piped.follow()
        assert job_of(piped, "slow").state == "waiting"
        piped.control.fail_job("slow", "withdrawn")


def test_a_predicate_that_runs_too_long_has_failed(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark, settings={"job_ms_max": 1_000}) as piped:
        piped.send(*(piped.now + HOUR_MS + number for number in range(MANY)))
        piped.start_driver()
        piped.follow()
        piped.control._job("ask", {"id": "slow", "op": "cancel", "where": SLOW, "by_ms": 0})
        piped.wait(lambda: job_of(piped, "slow").state == "failed")
        assert job_of(piped, "slow").reason.startswith("it ran for longer than job_ms_max (1 s); narrow its predicate")
        piped.travel(piped.now + 2 * MINUTE_MS)


def test_a_job_of_many_steps_selects_each_message_once(world: World) -> None:
    world.pipeline.beside._limits = world.pipeline.beside._limits._replace(rows=4)
    world.send("a", [HOUR + number // 2 for number in range(20)])
    world.batch()
    world.cancel("a-k0", HOUR, "key")
    world.batch()
    ask(world, "half", "key like '%1 %' or key like '%2 %'", by_ms=MINUTE_MS)
    world.batch()
    assert done(world, "half") == ("done", 4, 0)
    assert len(waiting(world)) == 19


def test_a_job_that_selects_too_many_has_failed(world: World) -> None:
    world.pipeline.beside.job_rows_max = 2
    world.send("a", [HOUR, HOUR + 1, HOUR + 2])
    ask(world, "all", "true")
    world.batch()
    assert world.control.find_job("all").reason.startswith("it selects more than 2 messages, the most")


def test_a_selection_that_cannot_read_the_table_fails_alone(world: World) -> None:
    """Whatever Spark says, after three tries the job has failed, and the pipeline lives."""
    world.send("a", [HOUR])
    world.batch()
    (path,) = (Path(world.pipeline.table.folder.path(file)) for file in world.pipeline.table.files)
    held = path.read_bytes()
    path.write_bytes(b"no Parquet at all" * 100)
    ask(world, "broken", "true")
    assert [world.pipeline.beside.work() for _ in range(4)] == [True, True, True, False]
    job = world.control.find_job("broken")
    assert job.state == "failed"
    assert job.reason.startswith("given up after 3 tries: "), job.reason
    path.write_bytes(held)
    ask(world, "whole", "true")
    world.batch()
    assert done(world, "whole") == ("done", 1, 0)


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), Py4JNetworkError("no answer")])
def test_a_try_during_which_java_has_ended_is_told_in_words(error: Exception) -> None:
    assert spark_sentence(error) == "Spark's Java process ended during it"


def test_a_decided_job_that_the_table_cannot_follow_is_set_aside_and_followed_later(world: World) -> None:
    due = BEGIN + 5 * MINUTE_MS
    world.send("a", [due, due + 1, HOUR])
    world.batch()
    ask(world, "later", "key like 'a-k0 %' or key like 'a-k2 %'", by_ms=MINUTE_MS)
    assert world.pipeline.beside.work()
    folder = Path(world.pipeline.table.folder.base)
    (lost,) = folder.glob("_job-*")
    lost.rename(folder / "lost")
    for _ in range(4):
        world.pass_minutes(1)
    job = world.control.find_job("later")
    assert (job.state, job.aside, job.changed) == ("running", True, 2)
    assert job.reason.startswith("given up after 3 tries: "), job.reason
    ask(world, "next", "key like 'a-k1 %'")
    world.batch()
    assert done(world, "next") == ("done", 1, 0), "others go on, and promotion too"
    assert world.control.state().horizon >= due
    (folder / "lost").rename(lost)
    world.pipeline = world.registered()
    world.batch()
    assert done(world, "later") == ("done", 2, 0)
    world.pass_minutes(4)
    assert seen(world) == ["a 0"]
    world.pass_minutes(60)
    assert seen(world) == ["a 0", "a 2"]

"""What runs beside the batches, on real Spark: selections that take long, that fail, and that are withdrawn."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from postdate.check import check_folder
from postdate.contract import JobStatus
from postdate.errors import PipelineFailed
from postdate.spark.pipeline import beside
from postdate.spark.pipeline.beside import running_tasks
from postdate.spark.pipeline.jobs import JAVA_ENDED, why_failed
from postdate.storage.disk import RealDisk
from tests.spark.test_jobs import HOUR, ask, done, seen, waiting
from tests.spark.test_jobs_faults import CAMPAIGN, schedule
from tests.support.bulk import wait_until
from tests.support.core import MINUTE_MS
from tests.support.pipeline import BEGIN, World
from tests.support.spark import HOUR_MS, SECOND_MS, Piped, Sent, piping

# Some 40 ms for each message, which Spark cannot compute once and for all: minutes for all of them.
SLOW = f"concat(topic, '{'a' * 200}') like '%a%a%b'"
ENDLESS = f"concat(key, '{'a' * 1_700}') like '%a%a%b'"  # half a minute, in which the task looks at nothing else
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


def cpu_of_tasks(spark: Any) -> dict[int, int]:
    """The processor time of each thread that runs tasks, in nanoseconds. No stack is asked for: Java would stop all
    threads for that, and one inside a `like` does not stop.
    """
    threads = spark.sparkContext._jvm.java.lang.management.ManagementFactory.getThreadMXBean()
    found = {int(number): threads.getThreadInfo(number) for number in threads.getAllThreadIds()}
    named = [number for number, info in found.items() if info and info.getThreadName().startswith("Executor task")]
    return {number: int(threads.getThreadCpuTime(number)) for number in named}


def is_matching(spark: Any, before: dict[int, int]) -> bool:
    """Whether a task of Spark is inside a `like`: nothing else here takes two seconds of a processor."""
    return any(spent - before.get(number, 0) > 2e9 for number, spent in cpu_of_tasks(spark).items())


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


def test_a_predicate_that_does_not_stop_ends_the_pipeline(tmp_path: Path, spark: Any) -> None:
    world, before = World(tmp_path, spark=spark), cpu_of_tasks(spark)

    def withdraw() -> None:
        wait_until(lambda: is_matching(spark, before))
        world.control.fail_job("endless", "withdrawn")

    try:
        world.send("a", [HOUR])
        world.pipeline.beside.task_end_s = 1.0
        ask(world, "endless", ENDLESS)
        with ThreadPoolExecutor(1) as pool:
            withdrawing = pool.submit(withdraw)
            with pytest.raises(PipelineFailed, match="a predicate does not stop, so Spark has to start anew"):
                world.batch()
            withdrawing.result()
        assert world.control.find_job("endless").reason == "withdrawn"
        wait_until(lambda: not running_tasks(spark))  # the session is for other tests, too
        assert waiting(world) == [("a 0", HOUR - BEGIN)]
    finally:
        world.close()


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


ANSWERED = Py4JError("An error occurred while calling o348.collectToPython.\n: Job 3 was cancelled")
REFUSED = ConnectionRefusedError(111, "Connection refused")


def session_of(is_stopped: Any) -> Any:
    """A session whose Java answers whether it has stopped Spark, or fails to answer."""
    return Mock(**{"sparkContext._jsc.sc.return_value.isStopped": Mock(side_effect=[is_stopped])})


@pytest.mark.parametrize("error", [REFUSED, Py4JNetworkError("no answer"), ANSWERED])
@pytest.mark.parametrize("is_stopped", [True, REFUSED, Py4JNetworkError("Answer from Java side is empty")])
def test_a_try_during_which_java_has_ended_is_told_in_words(error: Exception, is_stopped: Any) -> None:
    """Whether the first call to notice it comes before or after the end of Java's process."""
    assert why_failed(session_of(is_stopped), error) == "Spark's Java process ended during it"


def test_a_try_that_fails_while_java_lives_is_told_in_its_own_words() -> None:
    assert why_failed(session_of(False), ANSWERED) == "An error occurred while calling o348.collectToPython."


def test_a_try_of_which_java_dies_counts_also_when_the_driver_notices_it_first(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with piping(tmp_path, spark) as piped:
        piped.send(*(piped.now + HOUR_MS + number for number in range(MANY)))
        piped.start_driver()
        piped.follow()
        ask_slow(piped, "slow")
        monkeypatch.setattr(beside, "has_java_ended", lambda _spark: True)
        piped.running.pipeline.beside.blame()
        piped.stop_driver()
        assert (job_of(piped, "slow").tries, job_of(piped, "slow").reason) == (1, JAVA_ENDED)
        piped.control.fail_job("slow", "withdrawn")


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

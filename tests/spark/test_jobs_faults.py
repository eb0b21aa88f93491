"""Jobs while the driver or the broker dies at any step: each is done wholly or will be, and its counts are true."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.contract import JobStatus
from postdate.spark import register
from postdate.wire.requests import Request
from tests.support.peer import Peer
from tests.support.spark import HOUR_MS, MINUTE_MS, SECOND_MS, Held, Piped, Sent, piping

CAMPAIGN = "reminders"
STEPS = [
    ("job.decide", 1), ("job.decided", 1), ("job.written", 1), ("table.committed", 2), ("job.followed", 1),
    ("stage.call", 1), ("stage.called", 1),
]  # fmt: skip


class Story:
    """Groups of messages, each of which a job is for, and what the jobs have said."""

    def __init__(self, piped: Piped) -> None:
        self.piped = piped
        self.groups: dict[str, list[Sent]] = {}

    def send(self, name: str) -> None:
        """In the wheel, soon in a chunk, in the table for long."""
        now = self.piped.now
        dues = [now + 40 * SECOND_MS, now + 100 * SECOND_MS, now + 5 * MINUTE_MS, now + HOUR_MS, now + 90 * MINUTE_MS]
        self.groups[name] = self.piped.send(*(due + len(self.piped.sent) for due in dues), key=name)

    def ask(self, name: str, by_ms: int = 0) -> None:
        job = {"call": "ask", "id": name, "op": "postpone" if by_ms else "cancel", "by_ms": by_ms}
        self.piped.control._job("ask", job | {"where": f"key = '{name}'"})

    def job(self, name: str) -> JobStatus:
        return self.piped.control.find_job(name)

    def wait_for(self, name: str) -> None:
        """Until a job is over, and holds the broker to what it has said: nothing of its group was due meanwhile."""
        self.piped.wait(lambda: self.job(name).state in ("done", "failed"))
        job, group = self.job(name), self.groups[name]
        assert (job.state, job.changed, job.late) == ("done", len(group), 0), job
        if job.op == "cancel":
            self.piped.never |= {sent.body for sent in group}
        else:
            self.piped.sent = [
                sent._replace(due=sent.due + job.by_ms) if sent in group else sent for sent in self.piped.sent
            ]


@pytest.mark.full
def test_the_driver_dies_before_and_behind_a_decision(tmp_path: Path, spark: Any) -> None:
    die_at(tmp_path, spark, [("job.decide", 1), ("job.decided", 1)])


@pytest.mark.full
def test_the_driver_dies_at_each_step_of_a_job(tmp_path: Path, spark: Any) -> None:
    die_at(tmp_path, spark, STEPS)


def die_at(folder: Path, spark: Any, steps: list[tuple[str, int]]) -> None:
    with piping(folder, spark) as piped:
        story = Story(piped)
        for number, (step, times) in enumerate(steps):
            piped.restart_driver()
            name, by_ms = f"g{number}", (number % 2) * 7 * MINUTE_MS
            story.send(name)
            piped.crash_driver(step, times, lambda name=name, by_ms=by_ms: story.ask(name, by_ms))  # type: ignore[misc]
            piped.restart_driver()
            story.wait_for(name)
            story.send(f"{name}-kept")
        piped.travel(piped.now + 3 * HOUR_MS)


@pytest.mark.full
def test_the_broker_dies_while_a_job_is_carried_out(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.is_exact, piped.may_rescue = False, True
        story = Story(piped)
        piped.restart_driver()
        for number, step in enumerate(["job.decide", "job.decided", "job.written", "stage.call"]):
            name = f"b{number}"
            story.send(name)
            with Held(step).planted() as held:
                story.ask(name, (number % 2) * 7 * MINUTE_MS)
                held.wait()
                piped.kill_broker()
                held.let_go()
                piped.start_broker()
                story.wait_for(name)
        piped.travel(piped.now + 3 * HOUR_MS)


def test_a_driver_that_was_overtaken_decides_nothing(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        story = Story(piped)
        piped.restart_driver()
        story.send("a")
        with Held("job.decide").planted() as held:
            story.ask("a")
            held.wait()
            piped.control.register(str(piped.table), "another")
            held.let_go()
            assert "another pipeline has registered" in str(piped.failure())
        assert story.job("a").state == "waiting"
        piped.restart_driver()
        story.wait_for("a")
        piped.travel(piped.now + 3 * HOUR_MS)


def test_what_came_too_late_is_said_and_stays(tmp_path: Path, spark: Any) -> None:
    """Messages that were fired, or cancelled by their handles, between the selection and the decision."""
    with piping(tmp_path, spark) as piped:
        story = Story(piped)
        for by_ms in (0, 7 * MINUTE_MS):
            piped.restart_driver()
            name = f"late-{by_ms}"
            story.send(name)
            fired, _, cancelled, *rest = group = story.groups[name]
            with Held("job.decide").planted() as held:
                story.ask(name, by_ms)
                held.wait()
                piped.move(fired.due)
                assert piped.cancel(cancelled) == "cancelled"
                held.let_go()
                piped.wait(lambda name=name: story.job(name).state == "done")  # type: ignore[misc]
            job = story.job(name)
            assert (job.rows, job.changed, job.late) == (len(group), len(group) - 2, 2)
            changed = [group[1], *rest]
            if by_ms:
                piped.sent = [each._replace(due=each.due + by_ms) if each in changed else each for each in piped.sent]
            else:
                piped.never |= {each.body for each in changed}
            piped.follow()
        piped.travel(piped.now + 3 * HOUR_MS)


def test_a_job_waits_for_a_pipeline_and_can_be_withdrawn(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        story = Story(piped)
        story.send("a")
        for name in ("a", "b"):
            story.groups[name] = story.groups["a"]
            story.ask(name)
        assert piped.control.fail_job("b", "withdrawn").state == "failed"
        piped.restart_driver()
        story.wait_for("a")
        assert piped.control.fail_job("a", "too late").state == "done"
        assert piped.control.find_job("b").reason == "withdrawn"


@pytest.mark.full
def test_a_campaign_is_imported_cancelled_and_postponed_while_everything_dies(tmp_path: Path, spark: Any) -> None:
    """The whole way, and all counts add up at each step."""
    with piping(tmp_path, spark) as piped:
        piped.make_topic(CAMPAIGN, 1)
        story, count = Story(piped), 300
        piped.restart_driver()
        first = piped.now + 2 * MINUTE_MS
        rows = [Sent(f"c{n}", CAMPAIGN, 0, first + n * 20 * SECOND_MS, "", f"k{n % 10}") for n in range(count)]
        piped.crash_driver("job.adopted", 1, lambda: schedule(piped, rows))
        piped.kill_broker()
        piped.start_broker()
        piped.restart_driver()
        piped.wait(lambda: story.job("campaign").state == "done")
        piped.sent += rows
        assert (story.job("campaign").rows, waiting_count(piped)) == (count, count)
        left = count
        for name, step, by_ms in [
            ("k3", "job.decided", 0),
            ("k4", "job.written", 2 * HOUR_MS),
            ("k5", "stage.call", 0),
        ]:
            story.groups[name] = [sent for sent in rows if sent.key == name]
            piped.crash_driver(step, 1, lambda name=name, by_ms=by_ms: story.ask(name, by_ms))  # type: ignore[misc]
            piped.kill_broker()
            piped.start_broker()
            piped.restart_driver()
            story.wait_for(name)
            piped.rest()
            left -= 0 if by_ms else count // 10
            assert waiting_count(piped) == left
        schedule(piped, rows)  # asked again with the same id, nothing comes twice
        assert waiting_count(piped) == left
        piped.travel(first + count * 20 * SECOND_MS + 3 * HOUR_MS)
        assert sum(len(queue) for queue in piped.shown(CAMPAIGN).values()) == left


def schedule(piped: Piped, rows: list[Sent]) -> None:
    """By the sink; safe when it returns."""
    register(piped.spark)
    frame = piped.spark.createDataFrame(
        [(row.due, row.key, row.body) for row in rows], "due long, key string, body string"
    )
    (
        frame.coalesce(1).write.format("postdate").mode("append").option("addr", piped.address)
        .option("topic", CAMPAIGN).option("due", "due").option("due_unit", "ms").option("key", "key")
        .option("id", "campaign").option("wait", "false").save()
    )  # fmt: skip


def waiting_count(piped: Piped) -> int:
    """How many messages of the campaign wait, as soon as the broker can say that of the table, too: bulk may not have
    come back yet to a broker that was started anew.
    """
    assert piped.served is not None
    peer = Peer(piped.served.port)
    found: dict[str, Any] = {}

    def is_whole() -> bool:
        found.update(orjson.loads(peer.ask(Request.GET_PENDING, topic=CAMPAIGN).body))
        return not found["unread"]

    try:
        piped.wait(is_whole)
        return int(found["total"])
    finally:
        peer.close()

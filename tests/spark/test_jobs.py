"""Jobs on real Spark: cancel and postpone by predicate, wherever messages wait, and files that are taken in."""

from pathlib import Path
from typing import Any

import pytest

from postdate.check import check_folder
from postdate.contract import JobStatus
from postdate.errors import Refused
from postdate.message import PROPERTY_TIMER_DELIVER_MS, Cancelled, decode_properties
from postdate.spark.pending.view import pending
from postdate.storage import record as records
from postdate.storage.disk import RealDisk
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC
from tests.support.pipeline import BEGIN, World

FIVE, HOUR = BEGIN + 5 * MINUTE_MS, BEGIN + HOUR_MS


def ask(world: World, job_id: str, where: str, by_ms: int = 0) -> JobStatus:
    op = {"op": "postpone", "by_ms": by_ms} if by_ms else {"op": "cancel"}
    job = JobStatus.read(world.control._job("ask", {"id": job_id, "where": where, **op}))
    world.served.settle()
    return job


def cancelled(world: World, unique: str, due: int) -> Any:
    ticket = world.served.call(lambda: world.broker.cancel(TOPIC, unique, due, world.clock.now_ms()))
    world.served.settle()
    return ticket


def done(world: World, job_id: str) -> tuple[str, int, int]:
    job = world.control.find_job(job_id)
    return job.state, job.changed, job.late


def waiting(world: World) -> list[tuple[str, int]]:
    rows = pending(world.spark, world.control).orderBy("due", "arrival").collect()
    return [(row.body.decode(), int(row.due.timestamp() * 1_000) - BEGIN) for row in rows]


def delivered(world: World) -> list[records.Record]:
    found = []
    for queue_id in range(2):
        low, high = world.broker.offsets(TOPIC, queue_id)
        if high > low:
            found += world.broker.pull(TOPIC, queue_id, low, count_max=1_000).records
    return [records.decode(record) for record in found]


def seen(world: World) -> list[str]:
    return sorted(record.body.decode() for record in delivered(world))


@pytest.fixture
def world(tmp_path: Path, spark: Any) -> Any:
    world = World(tmp_path, spark=spark)
    yield world
    world.close()
    report = check_folder(RealDisk(tmp_path))
    assert not report.findings, report.findings


def test_a_cancel_by_predicate_reaches_messages_wherever_they_wait(world: World) -> None:
    world.send("table", [HOUR, HOUR + 1, HOUR + 2])
    world.send("chunk", [BEGIN + 100_000, BEGIN + 100_001])
    world.pass_minutes(1)
    world.send("wheel", [world.clock.now_ms() + 5_000, world.clock.now_ms() + 5_001])
    world.send("far", [HOUR, HOUR + 1])
    ask(world, "half", "key like '%-k1 %'")
    world.send("after", [HOUR, HOUR + 1])
    assert done(world, "half") == ("waiting", 0, 0)
    world.batch()
    assert done(world, "half") == ("done", 4, 0)
    assert [name for name, _ in waiting(world)] == [
        "wheel 0", "chunk 0", "table 0", "far 0", "after 0", "after 1", "table 2",
    ]  # fmt: skip
    world.pass_minutes(65)
    assert seen(world) == sorted(["chunk 0", "wheel 0", "table 0", "far 0", "after 0", "after 1", "table 2"])


def test_what_is_postponed_is_delivered_later_and_once(world: World) -> None:
    world.send("table", [HOUR, HOUR + 1])
    world.pass_minutes(1)
    world.send("wheel", [world.clock.now_ms() + 5_000, world.clock.now_ms() + 20_000])
    first = world.clock.now_ms()
    ask(world, "later", "key like '%-k0 %'", by_ms=10 * MINUTE_MS)
    ask(world, "soon", "key like 'wheel-k1 %'", by_ms=1_000)
    world.batch()
    assert done(world, "later") == ("done", 2, 0)
    assert done(world, "soon") == ("done", 1, 0)
    assert waiting(world) == [
        ("wheel 1", first + 21_000 - BEGIN), ("wheel 0", first + 605_000 - BEGIN), ("table 1", HOUR_MS + 1),
        ("table 0", HOUR_MS + 10 * MINUTE_MS),
    ]  # fmt: skip
    world.served.pass_ms(20_500)
    world.served.settle()
    assert seen(world) == []
    world.served.pass_ms(500)
    world.served.settle()
    assert seen(world) == ["wheel 1"]
    world.served.pass_ms(39_000)
    world.pass_minutes(60)
    assert seen(world) == ["table 1", "wheel 0", "wheel 1"]
    world.pass_minutes(10)
    assert seen(world) == ["table 0", "table 1", "wheel 0", "wheel 1"]
    told = {record.body: decode_properties(record.properties)[PROPERTY_TIMER_DELIVER_MS] for record in delivered(world)}
    assert told[b"table 0"] == str(HOUR + 10 * MINUTE_MS), "its consumer sees the new due"
    assert (told[b"table 1"], told[b"wheel 0"]) == (str(HOUR + 1), str(first + 605_000))


def test_a_handle_finds_what_was_postponed(world: World) -> None:
    world.send("a", [HOUR, HOUR + 1])
    world.batch()
    ask(world, "first", "true", by_ms=HOUR_MS)
    world.batch()
    ask(world, "second", "key like 'a-k0 %'", by_ms=HOUR_MS)
    world.batch()
    for number in range(2):
        ticket = cancelled(world, f"a-u{number}", HOUR + number)
        assert ticket.answer.tombstone.due == HOUR + number + (2 - number) * HOUR_MS
        assert ticket.answer.outcome is Cancelled.UNKNOWN
        assert ticket.answer.may_be_in_table
    assert waiting(world) == []
    world.pass_minutes(1)
    assert waiting(world) == []


def test_a_predicate_that_spark_does_not_understand_changes_nothing(world: World) -> None:
    world.send("a", [HOUR])
    for number, (where, said) in enumerate(
        [
            ("colour = 'red'", "A column, variable, or function parameter with name `colour` cannot be"),
            ("key = ", "Syntax error at or near end of input"),
            ("size + 1", 'Cannot resolve "(size + 1)" due to data type mismatch: Filter expression'),
            ("cast(key as int) = 1", "The value 'a-k0 other' of the type \"STRING\" cannot be cast"),
            ("__due > 0", "A column, variable, or function parameter with name `__due` cannot be resolved"),
        ]
    ):
        ask(world, f"wrong-{number}", where)
        world.batch()
        job = world.control.find_job(f"wrong-{number}")
        assert job.state == "failed"
        assert job.reason.startswith(said), job.reason
        assert "SQLSTATE" not in job.reason
        assert "[`__" not in job.reason, "hidden columns are not proposed"
    assert waiting(world) == [("a 0", HOUR_MS)]


def test_the_same_id_answers_with_the_first_result(world: World) -> None:
    world.send("a", [HOUR])
    ask(world, "once", "true")
    world.batch()
    world.send("b", [HOUR])
    assert ask(world, "once", "true").changed == 1
    world.batch()
    assert done(world, "once") == ("done", 1, 0)
    assert waiting(world) == [("b 0", HOUR_MS)]
    with pytest.raises(Refused, match="another kind of job"):
        ask(world, "once", "true", by_ms=5)

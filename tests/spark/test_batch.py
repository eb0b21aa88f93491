"""A batch, with tasks in this process: what falls due goes first, and others may promote meanwhile."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postdate import faultpoint
from postdate.check import check_folder
from postdate.contract import Stage
from postdate.spark.executor import tasks
from postdate.storage import record as records
from postdate.storage.disk import RealDisk
from postdate.table import merging
from tests.support.core import HOUR_MS, MINUTE_MS, SECOND_MS, TOPIC
from tests.support.pipeline import BEGIN, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()
    report = check_folder(RealDisk(tmp_path))
    assert not report.findings, report.findings


def seen(world: World) -> list[str]:
    found = []
    for queue_id in range(2):
        low, high = world.broker.offsets(TOPIC, queue_id)
        if high > low:
            found += world.broker.pull(TOPIC, queue_id, low, count_max=1_000).records
    return sorted(records.decode(record).body.decode() for record in found)


def at_step(step: str, times: int, act: Callable[[], None]) -> Callable[[str], None]:
    """Does something when a step is reached, at most so often."""
    left = [times]

    def hear(name: str) -> None:
        if name == step and left[0]:
            left[0] -= 1
            act()

    return hear


def test_what_falls_due_is_staged_before_anything_is_taken_in(world: World) -> None:
    world.send("old", [BEGIN + 3 * MINUTE_MS])
    world.batch()
    world.send("new", [BEGIN + HOUR_MS])
    world.served.pass_ms(MINUTE_MS)
    steps: list[str] = []
    with faultpoint.listening(steps.append):
        world.batch()
    own = [step for step in steps if step in ("stage.called", "ingest.written")]
    assert own == ["stage.called", "ingest.written", "stage.called"]


def test_an_idle_minute_is_one_stage_and_no_task(world: World) -> None:
    world.send("old", [BEGIN + HOUR_MS])
    world.batch()
    world.served.pass_ms(MINUTE_MS)
    steps: list[str] = []
    with faultpoint.listening(steps.append):
        world.batch()
    assert steps.count("stage.called") == 1
    assert not [step for step in steps if step.startswith(("chunk", "file", "table"))]


def test_a_batch_goes_on_from_where_somebody_else_has_promoted(world: World) -> None:
    """Bulk may move the horizon under the same epoch; it brings what is due until there."""
    world.send("a", [BEGIN + 3 * MINUTE_MS, BEGIN + 3 * MINUTE_MS + 30_000])
    world.batch()
    world.served.pass_ms(MINUTE_MS)

    def promote() -> None:
        state = world.control.state()
        horizon = (state.horizon, state.horizon + MINUTE_MS // 2)  # nothing is due until then
        world.control.stage(Stage(state.epoch, (state.taken,) * 2, horizon, (), state.rows_in, 0))

    with faultpoint.listening(at_step("stage.call", 2, promote)):
        world.batch()
    world.pass_minutes(4)
    assert seen(world) == ["a 0", "a 1"]
    state = world.control.state()
    assert state.rows_in == state.rows_out


def test_what_a_batch_took_and_did_not_stage_is_promoted_once(world: World) -> None:
    """The table is ahead of the broker when the next batch begins: what falls due of that comes with its own stage."""
    world.send("a", [BEGIN + 90_000, BEGIN + HOUR_MS])

    def die() -> None:
        raise RuntimeError("the driver dies")

    with faultpoint.listening(at_step("table.synced", 1, die)), pytest.raises(RuntimeError):
        world.batch()
    world.pipeline = world.registered()
    world.send("b", [world.clock.now_ms() + 150_000])
    world.pass_minutes(3)
    assert seen(world) == ["a 0", "b 0"]
    state = world.control.state()
    assert (state.rows_in, state.rows_out) == (3, 2)


def pass_a_minute(world: World) -> None:
    for _ in range(MINUTE_MS // SECOND_MS):
        world.served.pass_ms(SECOND_MS)


def pass_minutes_during(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A minute passes with each task of this name; tasks are small, and Spark has one slot."""
    world.pipeline._limits = world.pipeline._limits._replace(rows=4, slots=1)
    work = getattr(tasks, name)

    def work_long(task: tasks.Task) -> tasks.Result:
        pass_a_minute(world)
        result: tasks.Result = work(task)
        return result

    monkeypatch.setattr(tasks, name, work_long)


@pytest.mark.parametrize("name", ["ingest", "merge"])
def test_promotion_goes_on_during_a_long_step(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    dues = [BEGIN + minute * MINUTE_MS + 30_000 for minute in range(3, 7)]
    world.import_messages("nightly", dues)  # the log does not have them: nobody rescues them
    world.send("a", [BEGIN + HOUR_MS + n for n in range(10)])
    world.batch()
    world.send("b", [BEGIN + HOUR_MS + n for n in range(20)])
    if name == "merge":
        world.batch()
        world.pipeline.merge_limits = merging.Limits(soon_files=1)
    pass_minutes_during(world, monkeypatch, name)
    world.batch()
    assert world.clock.now_ms() >= BEGIN + 4 * MINUTE_MS, "the step has taken minutes"
    monkeypatch.undo()
    for _ in range(4):
        pass_a_minute(world)
        world.batch()
    shown = {body: at_ms for body, at_ms in world.shown().items() if body.startswith("nightly")}
    assert shown == {f"nightly {n}": due for n, due in enumerate(dues)}
    world.pass_minutes(60)
    state = world.control.state()
    assert (len(seen(world)), state.rows_in, state.rows_out) == (34, 34, 34)

"""A batch, with tasks in this process: what falls due goes first, and others may promote meanwhile."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postdate import faultpoint
from postdate.check import check_folder
from postdate.contract import Stage
from postdate.storage import record as records
from postdate.storage.disk import RealDisk
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC
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

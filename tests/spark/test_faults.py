"""The driver dies at any step, its checkpoint is lost, two of them live, the broker dies, the table is damaged: nothing
is lost, nothing comes twice, nothing comes early.
"""

import logging
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from postdate.errors import CorruptTable, Refused
from postdate.spark.executor.tasks import BulkAway
from postdate.table import merging
from tests.support.core import snapshot
from tests.support.spark import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    NOW,
    SECOND_MS,
    Crash,
    Held,
    Piped,
    copied,
    piping,
)

DUE = NOW + 10 * MINUTE_MS
EVERY_BATCH = merging.Limits(soon_files=1, later_files=1)


def send_some(piped: Piped) -> None:
    """Due in the minutes to come, late for the next batch, and far away."""
    piped.send(*(piped.now + 65 * SECOND_MS + n * 7_001 for n in range(30)))
    piped.send(*(piped.now + HOUR_MS + n for n in range(5)), DAY_MS + piped.now, NOW + 60 * DAY_MS)


# -- the driver dies --------------------------------------------------------------------------------------------

STEPS = [
    ("batch.begun", 1), ("ingest.written", 1), ("table.commit", 1), ("table.committed", 1), ("table.synced", 1),
    ("stage.call", 1), ("stage.called", 1), ("table.committed", 2), ("merge.written", 1), ("merge.committed", 1),
    ("batch.done", 1),
]  # fmt: skip


@pytest.mark.full
def test_the_driver_dies_at_each_step_and_the_next_one_goes_on(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.merge_limits = EVERY_BATCH
        for step, times in STEPS:
            piped.restart_driver()
            send_some(piped)
            piped.crash_driver(step, times, lambda: piped.move(piped.now + MINUTE_MS))
        piped.restart_driver()
        piped.travel(piped.now + 2 * HOUR_MS)


# -- the checkpoint ---------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garble(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 0x55 for byte in path.read_bytes()))


def files_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]


def test_a_checkpoint_that_is_lost_torn_or_older_is_no_loss(tmp_path: Path, spark: Any) -> None:
    spoil_each(tmp_path, spark, (_lose, _put_back, _cut_all))


@pytest.mark.full
def test_a_checkpoint_that_is_damaged_is_no_loss(tmp_path: Path, spark: Any) -> None:
    spoil_each(tmp_path, spark, (_garble_all, _cut_newest, _lose_offsets, _lose_commits, _put_back))


def spoil_each(folder: Path, spark: Any, ways: Sequence[Callable[[Path, Path], None]]) -> None:
    with piping(folder, spark) as piped:
        piped.restart_driver()
        copied(piped.checkpoint, folder / "older")
        for spoil in ways:
            send_some(piped)
            piped.pass_ms(MINUTE_MS)
            send_some(piped)
            piped.stop_driver()
            spoil(piped.checkpoint, folder / "older")
            piped.start_driver()
            piped.pass_ms(MINUTE_MS)
        piped.travel(piped.now + 2 * HOUR_MS)


def _lose(checkpoint: Path, _older: Path) -> None:
    shutil.rmtree(checkpoint)


def _put_back(checkpoint: Path, older: Path) -> None:
    copied(older, checkpoint)


def _cut_all(checkpoint: Path, _older: Path) -> None:
    for path in files_in(checkpoint):
        cut(path)


def _garble_all(checkpoint: Path, _older: Path) -> None:
    for path in files_in(checkpoint):
        garble(path)


def _lose_offsets(checkpoint: Path, _older: Path) -> None:
    shutil.rmtree(checkpoint / "offsets")


def _lose_commits(checkpoint: Path, _older: Path) -> None:
    shutil.rmtree(checkpoint / "commits")


def _cut_newest(checkpoint: Path, _older: Path) -> None:
    cut(max((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name)))


# -- late, away, doubled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "is_away", [pytest.param(True, id="away"), pytest.param(False, id="lagging", marks=pytest.mark.full)]
)
def test_an_hour_without_a_pipeline_is_noticed_by_nobody(tmp_path: Path, spark: Any, is_away: bool) -> None:
    with piping(tmp_path, spark) as piped:
        piped.may_rescue = True
        piped.restart_driver()
        piped.send(*(NOW + 5 * MINUTE_MS + n * 61_003 for n in range(60)))  # some in the table, due before and after
        piped.send(NOW + 30 * MINUTE_MS, key="before")
        piped.send(NOW + 30 * MINUTE_MS, key="meanwhile")
        piped.pass_ms(MINUTE_MS)
        before, meanwhile = piped.sent[-2:]
        assert piped.cancel(before, by="key") == "cancelled"

        def without() -> None:
            for _ in range(6):
                piped.move(piped.now + 10 * MINUTE_MS)
                piped.send(*(piped.now + n * 50_021 for n in range(2, 12, 2)))
                if piped.now < meanwhile.due:
                    assert piped.cancel(meanwhile, by="key") == "cancelled"

        if is_away:
            piped.stop_driver()
            without()
            assert piped.broker.rescuer.rescued_count > 50
            piped.start_driver()
        else:
            with piped.lagging():
                without()
            assert piped.broker.rescuer.rescued_count > 50
        piped.follow()
        rescued = piped.broker.rescuer.rescued_count
        piped.send(*(piped.now + n * 50_021 for n in range(3, 6)))
        piped.finish()
        assert piped.broker.rescuer.rescued_count == rescued, "once it is back, it serves"


def test_of_two_pipelines_the_older_one_is_fenced(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        old = piped.restart_driver()
        send_some(piped)
        piped.pass_ms(MINUTE_MS)
        piped.driver = new = piped.driver_of(checkpoint=str(tmp_path / "other"))
        new.start()
        send_some(piped)
        piped.pass_ms(MINUTE_MS)
        piped.wait(lambda: not old._query.isActive)
        with pytest.raises(Refused, match=r"another pipeline has registered|another writer is at work"):
            old.watch()
        piped.travel(piped.now + 2 * HOUR_MS)


@pytest.mark.parametrize("step", ["ingest.written", pytest.param("stage.call", marks=pytest.mark.full)])
def test_a_pipeline_that_wakes_up_behind_a_newer_one_is_refused(tmp_path: Path, spark: Any, step: str) -> None:
    """It hangs in the middle of a batch, before it commits to the table or before it stages; another one takes over."""
    with piping(tmp_path, spark) as piped:
        old = piped.restart_driver()
        send_some(piped)
        with Held(step).planted() as held:
            piped.move(piped.now + MINUTE_MS)
            held.wait()
        piped.driver = new = piped.driver_of(checkpoint=str(tmp_path / "other"))
        new.start()
        piped.follow()
        held.let_go()
        piped.wait(lambda: not old._query.isActive)
        with pytest.raises(Refused, match=r"another pipeline has registered|another writer is at work"):
            old.watch()
        piped.travel(piped.now + 2 * HOUR_MS)


# -- the broker and bulk die ------------------------------------------------------------------------------------


def test_the_broker_dies_while_a_chunk_is_uploaded(tmp_path: Path, spark: Any) -> None:
    with piping(tmp_path, spark) as piped:
        piped.restart_driver()
        send_some(piped)
        with Held("chunk.synced").planted() as held:
            piped.move(piped.now + MINUTE_MS)
            held.wait()
        piped.kill_broker()
        piped.start_broker()
        held.let_go()
        piped.restart_driver()
        piped.travel(piped.now + 2 * HOUR_MS)


@pytest.mark.parametrize("part", ["broker", pytest.param("bulk", marks=pytest.mark.full)])
def test_a_part_that_dies_between_two_steps_is_waited_for(tmp_path: Path, spark: Any, part: str) -> None:
    with piping(tmp_path, spark) as piped:
        driver = piped.restart_driver()
        for step in ("batch.begun", "stage.call", "stage.called"):
            send_some(piped)
            with Held(step).planted() as held:
                piped.move(piped.now + MINUTE_MS)
                held.wait()
                if part == "broker":
                    piped.kill_broker()
                else:
                    piped.kill_bulk()
                held.let_go()
                piped.rest()
            driver.watch()  # it says so, and waits
            if part == "broker":
                piped.start_broker()
            else:
                piped.start_bulk()
            piped.follow()
        piped.travel(piped.now + 2 * HOUR_MS)


@pytest.mark.parametrize("part", [pytest.param("broker", marks=pytest.mark.full), "bulk"])
def test_a_part_that_is_back_before_the_driver_has_looked_was_away_all_the_same(
    tmp_path: Path, spark: Any, part: str
) -> None:
    with piping(tmp_path, spark) as piped:
        driver = piped.restart_driver()
        send_some(piped)
        with Held("batch.begun").planted() as held:
            piped.move(piped.now + MINUTE_MS)
            held.wait()
            if part == "broker":
                piped.kill_broker()
            else:
                piped.kill_bulk()
            held.let_go()
            piped.wait(lambda: not driver._query.isActive, watch=False)
        if part == "broker":
            piped.start_broker()
        else:
            piped.start_bulk()
        piped.follow()
        piped.travel(piped.now + 2 * HOUR_MS)


def test_a_bulk_that_executors_never_reach_ends_the_pipeline(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_far_to: int, _state: object) -> int:
        raise BulkAway("bulk does not answer an executor: no route to host")

    with piping(tmp_path, spark) as piped:
        driver = piped.restart_driver()
        send_some(piped)
        with monkeypatch.context() as patched:
            patched.setattr(driver.pipeline, "_ingest", fail)
            piped.move(piped.now + MINUTE_MS)
            assert str(piped.failure()) == "bulk does not answer an executor: no route to host"
        piped.restart_driver()


# -- the table is damaged ---------------------------------------------------------------------------------------


def filled(piped: Piped) -> list[Path]:
    """Sends and takes two files of rows; returns their paths, the driver is stopped."""
    piped.restart_driver()
    for number in range(2):
        piped.send(*(DUE + number + n * 1_003 for n in range(50)), key=f"k{number}")
        piped.pass_ms(MINUTE_MS)
    files = piped.running.pipeline.table.files
    piped.stop_driver()
    return [piped.table / "messages" / name for name in files]


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("spoil", [lose, pytest.param(cut, marks=pytest.mark.full)])
def test_rows_of_a_file_that_is_missing_are_restored_from_the_log(
    tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    with piping(tmp_path, spark) as piped:
        paths = filled(piped)
        assert piped.cancel(piped.sent[3]) == "cancelled"  # its row comes back, and its cancel is on its way
        spoil(paths[0])
        with caplog.at_level(logging.WARNING, "postdate.pipeline"):
            piped.start_driver()
        assert "1 files of the table are missing or cut" in caplog.text
        assert "50 rows were restored from the log" in caplog.text
        assert "cannot be found" not in caplog.text
        piped.finish()


def test_a_newest_entry_of_the_delta_log_that_is_damaged_is_made_good_from_the_log(
    tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with piping(tmp_path, spark) as piped:
        filled(piped)
        newest = max((piped.table / "messages" / "_delta_log").glob("*.json"))
        garble(newest)
        with caplog.at_level(logging.WARNING, "postdate.pipeline"):
            piped.start_driver()
        assert "the rest is read again from the log" in caplog.text
        assert "50 rows were restored from the log" in caplog.text
        piped.finish()


def test_an_older_entry_of_the_delta_log_that_is_damaged_is_told_and_everything_stays_on_time(
    tmp_path: Path, spark: Any
) -> None:
    with piping(tmp_path, spark) as piped:
        piped.may_rescue = True
        filled(piped)
        log = piped.table / "messages" / "_delta_log"
        entry = sorted(log.glob("*.json"))[1]
        whole = entry.read_bytes()
        garble(entry)
        with pytest.raises(CorruptTable, match="cannot be opened"):
            piped.driver_of()
        piped.move(DUE + 20 * SECOND_MS)
        entry.write_bytes(whole)
        piped.start_driver()
        piped.finish()


def test_a_table_that_was_restored_from_an_older_copy_is_made_good_from_the_log(
    tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with piping(tmp_path, spark) as piped:
        filled(piped)
        copied(piped.table, tmp_path / "older")
        piped.start_driver()
        piped.merge_limits = EVERY_BATCH
        send_some(piped)
        piped.pass_ms(MINUTE_MS)
        send_some(piped)
        piped.pass_ms(MINUTE_MS)
        piped.stop_driver()
        copied(tmp_path / "older", piped.table)
        with caplog.at_level(logging.WARNING, "postdate.pipeline"):
            piped.start_driver()
        assert "the rest is read again from the log" in caplog.text
        assert "cannot be found" not in caplog.text
        piped.travel(piped.now + 2 * HOUR_MS)


def test_rows_that_neither_table_nor_log_have_are_counted_and_named(
    tmp_path: Path, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with piping(tmp_path, spark, settings={"segment_bytes": 1 << 16, "batch_bytes_max": 1 << 14}) as piped:
        lost = piped.send(*(NOW + 2 * DAY_MS + n for n in range(50)))
        piped.restart_driver()
        while piped.broker.log.end < 4 << 16:
            piped.send(*[NOW + 2 * DAY_MS] * 50)
        piped.pass_ms(MINUTE_MS)
        _forget_log(piped)
        (first, *_) = sorted(piped.running.pipeline.table.files.values(), key=lambda file: file.arrival_low)
        assert first.rows == len(lost)
        piped.stop_driver()
        (piped.table / "messages" / first.path).unlink()
        with caplog.at_level(logging.WARNING, "postdate.pipeline"):
            piped.start_driver()
        assert "50 rows cannot be found, neither there nor in the log" in caplog.text
        piped.never |= {sent.body for sent in lost}
        caplog.clear()
        piped.pass_ms(MINUTE_MS)
        piped.restart_driver()
        assert "cannot be found" not in caplog.text, "it is told once"
        piped.finish()


def _forget_log(piped: Piped) -> None:
    """Retention removes what was taken: the first segments."""
    served = piped.served
    assert served is not None
    for _ in range(3):
        piped.send(piped.now + DAY_MS)
        piped.pass_ms(MINUTE_MS)
        served.call(lambda: snapshot(served.broker))
    piped.pass_ms(4 * MINUTE_MS)
    served.call(lambda: served.broker.retain(piped.now + 4 * DAY_MS))
    assert piped.broker.log.start > 0


# -- everything at once -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_in_whatever_order(tmp_path: Path, spark: Any, seed: int) -> None:
    dice = random.Random(seed)
    with piping(tmp_path, spark) as piped:
        piped.merge_limits = merging.Limits(soon_files=2, later_files=2)
        piped.may_rescue = True
        piped.restart_driver()
        for _ in range(15):
            piped.send(*(piped.now + dice.choice((70, 130, 200, 4_000, 200_000)) * SECOND_MS + n for n in range(10)))
            for sent in dice.sample(piped.sent, 3):
                if sent.due > piped.now:
                    piped.cancel(sent)
            dice.choice((_live, _live, _crash, _crash, _kill_broker, _kill_bulk, _lose_checkpoint, _stay_away))(
                piped, dice
            )
        piped.restart_driver()
        piped.travel(piped.now + 2 * HOUR_MS)


def _live(piped: Piped, dice: random.Random) -> None:
    piped.pass_ms(dice.choice((1, 2)) * MINUTE_MS)


def _crash(piped: Piped, dice: random.Random) -> None:
    """At a step of the next batch, if that comes to it."""
    with Crash(*dice.choice(STEPS)).planted() as crash:
        piped.move(piped.now + MINUTE_MS)
        driver = piped.running
        until = piped.horizon_wanted
        piped.wait(lambda: crash.is_over or piped.far.horizon_at_ms >= until, watch=False)
        piped.rest()
        if crash.is_over:
            piped.wait(lambda: not driver._query.isActive, watch=False)
    piped.restart_driver()


def _kill_broker(piped: Piped, _dice: random.Random) -> None:
    piped.kill_broker()
    piped.start_broker()
    piped.pass_ms(MINUTE_MS)


def _kill_bulk(piped: Piped, _dice: random.Random) -> None:
    piped.kill_bulk()
    piped.start_bulk()
    piped.pass_ms(MINUTE_MS)


def _lose_checkpoint(piped: Piped, _dice: random.Random) -> None:
    piped.stop_driver()
    shutil.rmtree(piped.checkpoint)
    piped.restart_driver()


def _stay_away(piped: Piped, dice: random.Random) -> None:
    piped.stop_driver()
    piped.move(piped.now + dice.choice((1, 5, 90)) * MINUTE_MS)
    piped.restart_driver()


EVENTS = (_live, _live, _crash, _crash, _kill_broker, _kill_bulk, _lose_checkpoint, _stay_away)

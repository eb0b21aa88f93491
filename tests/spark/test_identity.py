"""The table belongs to one broker: another one's is refused by everybody, and so is a log that is older than it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from postdate.check import check_folder
from postdate.errors import ForeignTable, Refused
from postdate.keys import key_hash
from postdate.spark.imports import imports
from postdate.spark.imports.options import wanted_of
from postdate.spark.pending.view import pending
from postdate.spark.pipeline.batch import Pipeline
from postdate.spark.pipeline.history import History
from postdate.storage.disk import RealDisk
from postdate.table.delta import Table
from postdate.table.files import WrittenFile
from postdate.table.find import Question, TableReader
from postdate.table.identity import read_identity, read_seen
from tests.support.core import HOUR_MS, MINUTE_MS, TOPIC
from tests.support.pipeline import BEGIN, World

FAR = [BEGIN + HOUR_MS + n for n in range(20)]


def lived(folder: Path) -> None:
    world = World(folder)
    world.send("other", FAR)
    world.batch()
    world.close()


def messages_of(folder: Path) -> str:
    return str(folder / "table" / "messages")


def bring_table(source: Path, folder: Path) -> None:
    shutil.rmtree(folder / "table")
    shutil.copytree(source / "table", folder / "table")


def make_older(folder: Path) -> None:
    """Makes the table one of an earlier version, without identity and marks."""
    path = Path(messages_of(folder))
    table = Table(str(path))
    older = Table(f"{path}.older")
    for file in table.files:
        shutil.copyfile(path / file, Path(f"{path}.older") / file)
    older.commit([WrittenFile(file, []) for file in table.files.values()], far=table.far, rows=table.rows)
    shutil.rmtree(path)
    Path(f"{path}.older").rename(path)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    found = World(tmp_path / "own")
    yield found
    found.close()


@pytest.fixture
def foreign(world: World, tmp_path: Path) -> World:
    """A broker with far messages whose table was replaced by that of another one."""
    lived(tmp_path / "other")
    world.send("own", FAR)
    bring_table(tmp_path / "other", world.folder)
    return world


# -- whose it is ------------------------------------------------------------------------------------------------


def test_a_new_table_gets_the_identity_of_its_broker(world: World) -> None:
    assert read_identity(DeltaTable(messages_of(world.folder))) == world.broker.identity
    assert (world.folder / "IDENTITY").read_text() == world.broker.identity


def test_a_pipeline_with_another_brokers_table_is_refused_and_nothing_is_taken(foreign: World) -> None:
    before = foreign.control.state()
    with pytest.raises(Refused, match=r"belongs to another broker: its identity is .*postdate table adopt"):
        foreign.registered()
    after = foreign.control.state()
    assert (after.taken, after.epoch) == (before.taken, before.epoch) == (0, 1)


def test_bulk_answers_no_question_about_another_brokers_table(foreign: World) -> None:
    state, reader = foreign.control.state(), TableReader()
    question = Question(TOPIC, "other-u3", "unique", key_hash("other-u3"), FAR[3], 1 << 60, queues=tuple(range(100)))
    assert reader.find(state.table, question)  # a broker that does not say who it is
    with pytest.raises(ForeignTable, match="belongs to another broker"):
        reader.find(state.table, question, state.identity)
    counted = {"cancels": [], "untaken_jobs": [], "names": [], "codes": [], "horizon": 0, "before": 0}
    with pytest.raises(ForeignTable, match="belongs to another broker"):
        reader.count(state.table, counted | {"unit_ms": 1_000, "limit": 1}, state.identity)


def test_an_import_writes_nothing_beside_another_brokers_table(foreign: World) -> None:
    before = sorted(Path(messages_of(foreign.folder)).iterdir())
    with pytest.raises(ForeignTable, match="belongs to another broker"):
        imports.begin(foreign.control, "first", TOPIC, wanted_of({"due": "due"}))
    assert sorted(Path(messages_of(foreign.folder)).iterdir()) == before


def test_the_view_of_what_waits_does_not_read_another_brokers_table(foreign: World) -> None:
    with pytest.raises(ForeignTable, match="belongs to another broker"):
        pending(foreign.spark, foreign.control)


# -- a table of an earlier version ------------------------------------------------------------------------------


def test_a_table_of_an_earlier_version_that_agrees_with_the_log_gets_its_identity(world: World) -> None:
    world.send("own", FAR)
    world.batch()
    make_older(world.folder)
    assert not read_identity(DeltaTable(messages_of(world.folder)))
    world.pipeline = world.registered()
    assert read_identity(DeltaTable(messages_of(world.folder))) == world.broker.identity
    world.pass_minutes(1)
    assert world.control.state().rows_in == len(FAR)


def test_another_brokers_table_of_an_earlier_version_is_refused_by_the_far_rows_it_has_taken(tmp_path: Path) -> None:
    lived(tmp_path / "other")
    make_older(tmp_path / "other")
    world = World(tmp_path / "own")
    bring_table(tmp_path / "other", world.folder)
    with pytest.raises(Refused, match="it has taken 20 far rows, the log has 0"):
        world.registered()
    world.close()


def test_a_table_of_an_earlier_version_with_rows_that_the_log_never_gave_is_refused(world: World) -> None:
    world.send("own", FAR)
    world.pass_minutes(1)
    make_older(world.folder)
    table = Table(messages_of(world.folder))
    (file,) = table.files.values()
    shutil.copyfile(table.folder.path(file.path), table.folder.path("month-stranger.parquet"))
    table.commit([WrittenFile(file._replace(path="month-stranger.parquet"), [])])
    with pytest.raises(ForeignTable, match="holds 20 rows that wait and that this broker never had taken"):
        world.registered()


# -- a log that is older than the table -------------------------------------------------------------------------


def restored(folder: Path, backup: Path) -> World:
    """A broker on a folder that was restored from a backup; the table lies elsewhere and is newer."""
    for path in folder.iterdir():
        if path.name != "table":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(backup, folder, dirs_exist_ok=True)
    return World(folder, registers=False)


def backed_up(world: World, backup: Path) -> World:
    """Closes a broker, copies its folder without the table, and starts it again."""
    at_ms = world.clock.now_ms()
    world.close()
    shutil.copytree(world.folder, backup, ignore=shutil.ignore_patterns("table"))
    return World(world.folder, at_ms)


def test_a_folder_restored_from_a_backup_is_refused_also_after_new_sends(tmp_path: Path) -> None:
    world = World(tmp_path / "own")
    world.send("first", FAR)
    world.batch()
    world = backed_up(world, tmp_path / "backup")
    world.send("later", FAR)
    world.batch()
    world.close()
    older = restored(world.folder, tmp_path / "backup")
    with pytest.raises(Refused, match=r"knows more than the log.*restored from an older copy\?.*postdate table adopt"):
        older.registered()
    older.send("more", [*FAR, *FAR, *FAR])  # now its log is longer, and has other batches where the table has seen one
    with pytest.raises(Refused, match=r"knows more than the log: it has seen the batch at \d+, the log has another"):
        older.registered()
    assert older.control.state().taken == len(FAR)
    older.close()


def test_a_folder_restored_from_before_a_promotion_is_refused(tmp_path: Path) -> None:
    """No far row came since, but messages left the table."""
    world = World(tmp_path / "own")
    world.send("first", [BEGIN + 5 * MINUTE_MS, *FAR])
    world.batch()
    world = backed_up(world, tmp_path / "backup")
    world.pass_minutes(4)
    world.close()
    older = restored(world.folder, tmp_path / "backup")
    with pytest.raises(Refused, match="knows more than the log"):
        older.registered()
    older.close()


def test_the_table_has_seen_the_last_batch_before_its_commit(world: World) -> None:
    world.send("own", FAR)
    world.batch()
    seen = read_seen(DeltaTable(messages_of(world.folder)))
    assert seen is not None
    assert world.broker.log.mark_at(seen.position) == seen.mark == world.pipeline.table.marks.mark
    assert seen.epoch == 1


def test_the_broker_goes_on_with_its_table_after_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.send("own", FAR)
    world.batch()
    world.close()
    again = World(world.folder, world.clock.now_ms())
    again.send("more", FAR)
    again.batch()
    assert again.control.state().taken == 2 * len(FAR)
    again.close()


# -- a table that was moved -------------------------------------------------------------------------------------


def test_a_table_that_was_moved_goes_on_and_an_incomplete_copy_is_completed(tmp_path: Path) -> None:
    world = World(tmp_path / "own")
    world.send("sent", FAR)
    world.import_messages("nightly", [FAR[0], FAR[1]])
    world.batch()
    moved = tmp_path / "moved"
    shutil.copytree(world.folder / "table", moved)
    shutil.rmtree(world.folder / "table")
    sent = next(file for file in world.pipeline.table.files.values() if file.rows == len(FAR))
    (moved / "messages" / sent.path).unlink()  # the log has its rows
    history = History(str(moved / "history"))
    world.pipeline = Pipeline(world.spark, world.control, Table(str(moved / "messages")), history)
    world.pipeline.register(str(moved), "here")
    assert world.control.state().table == str(moved)
    world.send("more", FAR)
    world.batch()
    world.pass_minutes(61)
    assert len(world.shown()) == 2 * len(FAR) + 2
    world.close()
    report = check_folder(RealDisk(world.folder))
    assert report.ok, report.findings

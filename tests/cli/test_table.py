"""`postdate table adopt`, from a lost folder to a broker that has the table."""

import json
import shutil
from pathlib import Path

import pytest

from postdate.check import check_folder
from postdate.cli import app
from postdate.cli.render import moment
from postdate.errors import Refused
from postdate.storage.disk import RealDisk
from tests.support.core import HOUR_MS, TOPIC
from tests.support.pipeline import BEGIN, World

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def table(tmp_path: Path) -> str:
    """The table of a broker whose data folder is lost."""
    world = World(tmp_path / "lost")
    world.send("far", [BEGIN + HOUR_MS] * 5)
    world.batch()
    world.close()
    shutil.move(tmp_path / "lost" / "table", tmp_path / "table")
    return str(tmp_path / "table")


def test_a_dry_run_says_what_would_be_delivered_and_makes_no_folder(table: str, tmp_path: Path, capsys: Capsys) -> None:
    data = tmp_path / "new"
    assert app.main(["table", "adopt", "--table", table, "--data", str(data), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["adopted"], found["deliverable"], found["past"]) == (False, {TOPIC: 5}, {})
    assert app.main(["table", "adopt", "--table", table, "--data", str(data), "--dry-run"]) == 0
    assert f"will be delivered, {TOPIC}  5 messages" in capsys.readouterr().out
    assert not data.exists()


def test_what_will_not_be_delivered_is_said(tmp_path: Path, capsys: Capsys) -> None:
    """An import that no batch had taken in lies beside the table, and only the lost log knows that it was accepted."""
    world = World(tmp_path / "lost")
    world.import_messages("taken", [BEGIN + HOUR_MS] * 2)
    world.batch()
    world.import_messages("nightly", [BEGIN + HOUR_MS] * 7)
    world.close()
    table = str(tmp_path / "lost" / "table")
    command = ["table", "adopt", "--table", table, "--data", str(tmp_path / "new"), "--dry-run"]
    assert app.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["deliverable"], found["beside"]) == ({TOPIC: 2}, 7)
    assert app.main(command) == 0
    said = capsys.readouterr().out
    assert "7 rows of imports and jobs that no batch had taken in: repeat these imports and jobs" in said
    written = moment(found["written_at_ms"])
    assert f"messages and cancels that no pipeline had taken by {written}, queues, groups and offsets" in said


def test_a_table_is_adopted_into_a_new_folder_after_an_older_copy_was_restored(tmp_path: Path, capsys: Capsys) -> None:
    world = World(tmp_path / "own")
    world.send("first", [BEGIN + HOUR_MS] * 3)
    world.batch()
    world.close()
    shutil.copytree(tmp_path / "own", tmp_path / "older", ignore=shutil.ignore_patterns("table"))
    world = World(tmp_path / "own", world.clock.now_ms())
    world.send("second", [BEGIN + HOUR_MS] * 2)
    world.batch()
    world.close()
    shutil.move(tmp_path / "own" / "table", tmp_path / "older" / "table")
    shutil.rmtree(tmp_path / "own")
    older, table = World(tmp_path / "older", registers=False), str(tmp_path / "older" / "table")
    with pytest.raises(Refused, match="knows more than the log"):
        older.registered()
    older.close()
    adopt = ["table", "adopt", "--table", table, "--data"]
    assert app.main([*adopt, str(tmp_path / "older")]) == 3, "its far rows and the table's are two orders"
    assert app.main([*adopt, str(tmp_path / "new"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deliverable"] == {TOPIC: 5}
    assert app.main([*adopt, str(tmp_path / "new")]) == 0
    shutil.move(table, tmp_path / "new" / "table")
    adopted = World(tmp_path / "new", world.clock.now_ms())
    adopted.pass_minutes(61)
    assert sorted(adopted.shown()) == [f"first {n}" for n in range(3)] + [f"second {n}" for n in range(2)]
    adopted.close()
    report = check_folder(RealDisk(tmp_path / "new"))
    assert report.ok, report.findings


def test_an_adopted_folder_is_whole(table: str, tmp_path: Path, capsys: Capsys) -> None:
    data = tmp_path / "new"
    assert app.main(["table", "adopt", "--table", table, "--data", str(data)]) == 0
    assert f"adopted; start it with: postdate up --data {data} --table {table}" in capsys.readouterr().out
    report = check_folder(RealDisk(data))
    assert report.ok, report.findings
    assert report.numbers["rows of the table that wait"] == 5


def test_a_folder_with_a_log_is_refused(table: str, tmp_path: Path, capsys: Capsys) -> None:
    assert app.main(["table", "adopt", "--table", table, "--data", str(tmp_path / "lost"), "--dry-run"]) == 3
    assert "the folder has a log of its own" in capsys.readouterr().err

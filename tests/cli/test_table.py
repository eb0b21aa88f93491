"""`postdate table adopt`, from a lost folder to a broker that has the table."""

import json
import shutil
from pathlib import Path

import pytest

from postdate.check import check_folder
from postdate.cli import app
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

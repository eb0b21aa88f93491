"""The history of batches, a Delta table of its own."""

from pathlib import Path

import pytest

from postdate import faultpoint
from postdate.client import admin
from postdate.spark.pipeline.history import History
from tests.support.core import HOUR_MS, MINUTE_MS
from tests.support.pipeline import BEGIN, World


def test_a_history_that_a_power_loss_has_spoilt_is_begun_anew(tmp_path: Path) -> None:
    folder = tmp_path / "history"
    history = History(str(folder))
    for number in range(3):
        history.append({"at_ms": number, "batch": number})
    assert [row["batch"] for row in History(str(folder)).last(2)] == [1, 2]
    newest = sorted((folder / "_delta_log").glob("*.json"))[-1]
    newest.write_bytes(b'{"add"')
    assert History(str(folder)).last(2) == []
    history = History(str(folder))
    history.append({"at_ms": 7, "batch": 7})
    assert [row["batch"] for row in history.last(5)] == [7]


def test_a_batch_that_is_repeated_reports_what_the_table_took_for_it(tmp_path: Path) -> None:
    """It died after the table had taken its rows, and before the broker knew."""
    world = World(tmp_path)

    def die(name: str) -> None:
        if name == "stage.call":
            raise RuntimeError(name)

    try:
        world.send("m", [BEGIN + HOUR_MS + n for n in range(7)])
        with faultpoint.listening(die), pytest.raises(RuntimeError, match=r"stage\.call"):
            world.batch()
        world.batch()
        world.batch()
        reports = sorted(History(str(tmp_path / "table" / "history")).last(5), key=lambda report: report["batch"])
        assert [report["rows_in"] for report in reports] == [7, 0]
        assert [report["files"] > 0 for report in reports] == [True, False]
        assert reports[0]["bytes"] > 0
    finally:
        world.close()


def test_the_time_without_a_pipeline_has_a_row(tmp_path: Path) -> None:
    """Bulk promotes meanwhile. Status shows the row at once, the history when a pipeline is back."""
    world = World(tmp_path)
    history = History(str(tmp_path / "table" / "history"))
    try:
        world.import_messages("nightly", [BEGIN + 3 * MINUTE_MS + n * MINUTE_MS for n in range(4)])
        world.batch()
        assert admin.status(world.address)["stand_in"] is None
        world.pass_without_pipeline(8 * MINUTE_MS)
        stand_in = admin.status(world.address)["stand_in"]
        assert (stand_in["master"], stand_in["promoted"], stand_in["horizon"]) == (
            "bulk",
            4,
            world.control.state().horizon,
        )
        assert BEGIN + MINUTE_MS <= stand_in["at_ms"] <= BEGIN + 2 * MINUTE_MS
        assert [row["master"] for row in history.last(9)] == ["here"]
        world.pipeline = world.registered()
        world.pass_minutes(3)
        assert [row["master"] for row in history.last(9)] == ["here", "bulk", "here", "here", "here"]
        assert history.last(9)[1] == stand_in
        assert admin.status(world.address)["stand_in"] is None
        world.pipeline = world.registered()
        world.pass_minutes(1)
        assert [row["master"] for row in history.last(9)].count("bulk") == 1, "it is written once"
    finally:
        world.close()

"""The history of batches, a Delta table of its own."""

from pathlib import Path

from postdate.spark.pipeline.history import History


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

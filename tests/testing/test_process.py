"""A real broker for tests: it starts on free ports, is killed, starts again, and leaves nothing behind."""

from pathlib import Path

import pytest

import postdate
from postdate.check import check_folder
from postdate.storage.disk import RealDisk
from postdate.testing import BrokerProcess


def test_it_sends_receives_and_survives_a_kill(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker, postdate.connect(broker.address) as client:
        client.send("reminders", "before")
        broker.kill()
        broker.start()
        client.send("reminders", "after")
        messages = client.consume("reminders", "mail")
        assert {next(messages).body, next(messages).body} == {b"before", b"after"}
        messages.close()
        with pytest.raises(postdate.UsageError, match="runs already"):
            broker.start()
    broker.close()
    assert check_folder(RealDisk(broker.data)).findings == []


def test_two_run_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    with BrokerProcess(tmp_path / "one") as one, BrokerProcess(tmp_path / "other") as other:
        assert one.address != other.address


def test_a_broker_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(postdate.UsageError, match=r"does not start: postdate: --lead-ms is -1"):
        BrokerProcess(tmp_path, lead_ms=-1)

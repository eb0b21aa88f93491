"""Fixtures for pytest. A test suite asks for them in its conftest.py: pytest_plugins = ["postdate.testing.fixtures"].

They are no plugin that pytest loads by itself: who does not ask for them pays nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

import postdate
from postdate.testing.broker import InProcessBroker
from postdate.testing.process import BrokerProcess

_VARIABLE = "POSTDATE_ADDR"


@pytest.fixture
def postdate_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessBroker]:
    """A broker of this test's own, on a disk in memory and a clock that the test moves.

    `postdate.connect()` without an address leads to it, also in the code under test.
    """
    with InProcessBroker() as broker:
        monkeypatch.setenv(_VARIABLE, broker.address)
        yield broker


@pytest.fixture
def postdate_client(postdate_broker: InProcessBroker) -> Iterator[postdate.Client]:
    """A client of `postdate_broker`."""
    with postdate.connect(postdate_broker.address) as client:
        yield client


@pytest.fixture
def postdate_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    """A real broker of this test's own: a process, free ports, a folder below `tmp_path`, the machine's clock.

    `postdate.connect()` without an address leads to it, also in the code under test.
    """
    folder = tmp_path / "postdate"
    folder.mkdir()
    with BrokerProcess(folder) as broker:
        monkeypatch.setenv(_VARIABLE, broker.address)
        yield broker

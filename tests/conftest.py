"""What many tests share: a folder that is checked when the test is over, certificates, and one Spark session."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postdate.check import check_folder
from postdate.storage.disk import RealDisk
from tests.support.certificates import Authority, Pair
from tests.support.core import Data

# A shell that starts us in the background has us ignore Ctrl-C, and our children too: the tests that press it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Data]:
    """A helper that opens brokers on one folder. At the end it closes what is open, and the folder must check clean."""
    folder = Data(tmp_path / "data")
    yield folder
    folder.close_all()
    if folder.damaged or not (folder.folder / "FORMAT").exists():
        return
    findings = check_folder(RealDisk(folder.folder)).findings
    assert not findings, "\n".join(map(str, findings))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    """A certificate for this machine."""
    return authority.sign("server")


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Made when the first test asks for it: that takes some seconds."""
    from tests.support.spark import spark_session

    with spark_session() as session:
        yield session

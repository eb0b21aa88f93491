"""The pipeline on a real cluster: a master, two workers, the driver in a process of its own.

The broker's clock is moved by hand, so that minutes pass in seconds.
"""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postdate.bulk import flight as bulk_flight
from postdate.bulk.process import Bulk
from postdate.bulk.streams import far_batches
from postdate.check import check_folder
from postdate.client.address import parse_address
from postdate.clock import ManualClock
from postdate.config import MIB
from postdate.contract import horizon_of
from postdate.spark.pipeline.history import History
from postdate.storage.disk import RealDisk
from tests.support.cluster import SECRET, Cluster, Driver, bare_python, wait_for
from tests.support.core import HOUR_MS, MINUTE_MS, SECOND_MS, T0, TOPIC, message, pulled
from tests.support.server import SERVED, Served, configured

pytestmark = pytest.mark.full

BEGIN = T0 // HOUR_MS * HOUR_MS + 5 * SECOND_MS
LEAD_MS = 60_000
QUEUES = 2
SECOND_MESSAGES = 1_000
MANY = 260_000  # more than one task takes in


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("spark") / "cluster", 2, SECRET)
    yield started
    started.end()


class Broker:
    """A broker with bulk in this process, on a clock that is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock(BEGIN)
        settings = SERVED | {"segment_bytes": 16 * MIB, "batch_bytes_max": MIB, "queue_file_rows": 65_536}
        self.served = Served(RealDisk(folder), configured(settings), self.clock)
        self.core = self.served.broker
        self.served.call(lambda: self.core.put_topic(TOPIC, BEGIN, read_queue_count=QUEUES, write_queue_count=QUEUES))
        self.bulk = Bulk(folder, parse_address(self.served.server.broker_address), "127.0.0.1", 0)

    def send(self, dues: list[int]) -> None:
        def go() -> None:
            for start in range(0, len(dues), 500):
                part = enumerate(dues[start : start + 500], start)
                self.core.send(
                    [message(str(due), due=due, queue_id=n % QUEUES, unique=f"u{n}") for n, due in part],
                    self.clock.now_ms(),
                )

        self.served.call(go)
        self.served.settle()

    @property
    def is_served(self) -> bool:
        far = self.core.fold.far
        return far.taken == far.length and far.horizon_at_ms >= horizon_of(self.clock.now_ms(), LEAD_MS)

    def shown(self) -> list[tuple[int, int]]:
        """Due, and the instant at which it became visible, of every message in the queues."""

        def go() -> list[tuple[int, int]]:
            records = [record for queue_id in range(QUEUES) for record in pulled(self.core, TOPIC, queue_id)]
            return sorted((int(record.body), record.stored_at_ms) for record in records)

        return self.served.call(go)

    def close(self) -> None:
        self.bulk.close()
        self.served.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    started = Broker(tmp_path / "data")
    yield started
    started.close()
    assert check_folder(RealDisk(started.folder)).findings == []


@pytest.fixture
def driver(broker: Broker, cluster: Cluster, tmp_path: Path) -> Iterator[Driver]:
    address, python = broker.served.server.broker_address, bare_python(tmp_path / "bare")
    started = Driver(address, cluster.master, python, tmp_path, SECRET)
    yield started
    started.end()


def served(broker: Broker, driver: Driver) -> None:
    def done() -> bool:
        driver.check_alive()
        return broker.is_served

    wait_for(done, "a batch")


def dues_from(at_ms: int) -> list[int]:
    """Of many messages, a thousand at each whole second, at which the clock stands still for a moment."""
    return [at_ms + n // SECOND_MESSAGES * SECOND_MS for n in range(MANY)]


def pass_minutes(broker: Broker, driver: Driver, count: int) -> None:
    for _ in range(count * 60):
        broker.served.pass_ms(SECOND_MS)
        broker.served.settle()
        served(broker, driver)  # each minute it is the pipeline's turn, and the clock waits for it


def test_executors_have_none_of_our_modules(tmp_path: Path) -> None:
    """What the tests below prove by working, they prove only if this holds."""
    python = bare_python(tmp_path / "bare")
    for module in ("postdate", "numpy", "pandas", "xxhash", "orjson", "deltalake"):
        done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, cwd=tmp_path, check=False)
        assert b"ModuleNotFoundError" in done.stderr, module
    subprocess.run([python, "-c", "import pyarrow.flight, pyarrow.parquet"], check=True)


def test_messages_are_carried_by_several_executors(broker: Broker, driver: Driver) -> None:
    dues = dues_from(BEGIN + 3 * MINUTE_MS)
    broker.send(dues)
    served(broker, driver)
    pass_minutes(broker, driver, 9)
    assert broker.core.rescuer.rescued_count == 0
    assert broker.shown() == [(due, due) for due in dues]
    reports = History(str(driver.table / "history")).last(20)
    assert max(report["workers"] for report in reports) == 2
    assert sum(report["rows_in"] for report in reports) == sum(report["promoted"] for report in reports) == MANY
    assert driver.stop() == 0, driver.log.read_text()


def test_an_executor_that_dies_in_a_batch_costs_nothing(
    broker: Broker, driver: Driver, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.send([BEGIN + HOUR_MS])
    served(broker, driver)
    reading, go_on = threading.Semaphore(0), threading.Event()

    def held(*arguments: Any) -> Iterator[Any]:
        reading.release()
        assert go_on.wait(60)
        yield from far_batches(*arguments)

    monkeypatch.setattr(bulk_flight, "far_batches", held)
    dues = dues_from(BEGIN + 4 * MINUTE_MS)
    broker.send(dues)
    for _ in range(2):
        assert reading.acquire(timeout=60)  # both executors are in the middle of reading
    before = cluster.executors()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    go_on.set()
    assert reading.acquire(timeout=60)  # what the dead one read, another reads again
    served(broker, driver)
    pass_minutes(broker, driver, 9)
    assert broker.core.rescuer.rescued_count == 0
    assert broker.shown() == [(due, due) for due in dues]
    assert driver.stop() == 0, driver.log.read_text()


def test_a_cluster_takes_nobody_without_its_secret_and_shows_it_to_nobody(
    broker: Broker, driver: Driver, cluster: Cluster, tmp_path: Path
) -> None:
    broker.send([BEGIN + HOUR_MS])
    served(broker, driver)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            assert SECRET not in path.read_text(errors="replace"), "a command shows the secret"
    for wrong in ("", "another-secret-of-16"):
        stranger = Driver(
            broker.served.server.broker_address, cluster.master, bare_python(tmp_path / f"bare-{wrong}"),
            tmp_path / f"s{wrong}", wrong,
        )  # fmt: skip
        try:
            assert stranger.process.wait(120) == 3
            assert "the master does not answer, or wants another secret" in stranger.log.read_text()
        finally:
            stranger.end()
    assert driver.stop() == 0, driver.log.read_text()
    logs = [driver.log, *cluster.folder.rglob("*.log"), *cluster.folder.rglob("std*")]
    assert len(logs) > 4
    assert not [path for path in logs if SECRET in path.read_text(errors="replace")], "a log shows the secret"

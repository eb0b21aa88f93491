"""The driver as a process, beside a broker: on a cluster that has no cores for it, and with a job that kills it."""

import logging
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from postdate.cli.app import main
from postdate.client import admin
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.pipeline import driver
from postdate.spark.pipeline.driver import Options
from tests.spark.test_beside import ENDLESS
from tests.support.cluster import Cluster, wait_for
from verify.faults.process import Broker


def test_a_pipeline_without_cores_says_so_and_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", 0)
    on_cluster: dict[str, Any] = {"pipeline": "embedded", "spark_master": cluster.master}
    broker = Broker(tmp_path, bulk_port=0, parts_stop_ms=60_000, **on_cluster)
    try:
        broker.start()
        wait_for(lambda: bool(admin.status(broker.route_address)["pipeline"]["note"]), "a pipeline that waits")
        told = f"waits for cores of {cluster.master}: it has none free"
        assert admin.status(broker.route_address)["pipeline"]["note"] == told
        broker.stop()
        wait_for(lambda: not broker.processes(), "its end")
        (line,) = broker.log_lines()  # not that the broker had to kill it
        assert line.endswith(f"pipeline: it {told}")
    finally:
        broker.stop()
        cluster.end()
    assert broker.check() == []


def is_selecting(control: BrokerClient, tries: int) -> bool:
    job = control.find_job("killer")
    return (job.tries, job.step) == (tries, "selecting")


def kill_java(broker: Broker) -> None:
    """As a job would that needs more memory than there is."""
    for pid, command in broker.processes().items():
        if command.split(" ")[0].endswith("/bin/java"):
            os.kill(pid, signal.SIGKILL)


def test_cores_are_missing_only_when_no_executor_has_come_for_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An executor that was granted takes seconds to start; nobody is to look for free cores meanwhile."""
    caplog.set_level(logging.INFO)
    now_s, size, notes = [1_000.0], [1], list[str]()
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    statuses = SimpleNamespace(size=lambda: size[0])
    context = SimpleNamespace(sc=lambda: SimpleNamespace(getExecutorMemoryStatus=lambda: statuses))
    gateway: Any = SimpleNamespace(session=SimpleNamespace(sparkContext=SimpleNamespace(_jsc=context)))
    broker: Any = SimpleNamespace(note=notes.append)
    cores = driver._Cores(Options(master="spark://s:7077"), gateway, broker)

    def look_for(seconds: int) -> list[str]:
        for _ in range(seconds):
            now_s[0] += 1
            cores.look()
        return [record.getMessage() for record in caplog.records]

    assert look_for(22) == []
    size[0] = 2  # the driver itself and an executor
    assert look_for(60) == []
    size[0] = 1
    assert look_for(20) == []
    said = "it waits for cores of spark://s:7077: it has none free"
    assert look_for(60) == [said]
    assert set(notes) == {said.removeprefix("it ")}
    size[0] = 2
    assert look_for(6) == [said, "it has cores of spark://s:7077"]
    assert notes[-1] == ""


@pytest.mark.full
def test_a_job_that_kills_java_has_failed_after_three_tries_and_the_pipeline_lives(tmp_path: Path) -> None:
    broker = Broker(tmp_path, bulk_port=0, parts_stop_ms=60_000, pipeline="embedded")
    try:
        broker.start()
        control = BrokerClient(broker.route_address)
        assert main(["send", "orders", "hello", "--delay", "2h", "--key", "k", "--addr", broker.route_address]) == 0
        control._job("ask", {"id": "killer", "op": "cancel", "where": ENDLESS, "by_ms": 0})
        for tries in range(1, 4):
            wait_for(partial(is_selecting, control, tries), f"try {tries}")
            kill_java(broker)
        wait_for(lambda: control.find_job("killer").state == "failed", "the end of the job")
        assert control.find_job("killer").reason == "given up after 3 tries: Spark's Java process ended during it"
        control._job("ask", {"id": "next", "op": "cancel", "where": "key = 'k'", "by_ms": 0})
        wait_for(lambda: control.find_job("next").state == "done", "the next job")
        assert control.find_job("next").changed == 1
    finally:
        broker.stop()
    assert broker.check() == []

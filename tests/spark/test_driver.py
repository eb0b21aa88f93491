"""The driver as a process, beside a broker: on a cluster that has no cores for it, and with a job that kills it."""

from pathlib import Path
from typing import Any

import pytest

from postdate.cli.app import main
from postdate.client import admin
from postdate.spark.executor.broker_client import BrokerClient
from tests.support.cluster import Cluster, wait_for
from verify.faults.process import Broker

KILLS_JAVA = "reflect('java.lang.System', 'exit', 3) = key"


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


@pytest.mark.full
def test_a_job_that_kills_java_has_failed_after_three_tries_and_the_pipeline_lives(tmp_path: Path) -> None:
    broker = Broker(tmp_path, bulk_port=0, parts_stop_ms=60_000, pipeline="embedded")
    try:
        broker.start()
        control = BrokerClient(broker.route_address)
        assert main(["send", "orders", "hello", "--delay", "2h", "--key", "k", "--addr", broker.route_address]) == 0
        control._job("ask", {"id": "killer", "op": "cancel", "where": KILLS_JAVA, "by_ms": 0})
        wait_for(lambda: control.find_job("killer").state == "failed", "the end of the job")
        assert control.find_job("killer").reason == "given up after 3 tries: Spark's Java process ended during it"
        control._job("ask", {"id": "next", "op": "cancel", "where": "key = 'k'", "by_ms": 0})
        wait_for(lambda: control.find_job("next").state == "done", "the next job")
        assert control.find_job("next").changed == 1
    finally:
        broker.stop()
    assert broker.check() == []

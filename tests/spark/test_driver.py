"""The driver as a process, beside a broker, on a cluster that has no cores for it."""

from pathlib import Path
from typing import Any

from postdate.client import admin
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

"""A real broker and a real bulk on the real clock, and a pipeline that has registered and is gone: messages that lie in
the table alone, or in the files of an import, come nevertheless.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from postdate.access.token import TOKEN_FILE, read_token
from postdate.cli.app import main
from postdate.clock import SystemClock
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.executor.bulk_client import BulkClient
from postdate.spark.pipeline.batch import Pipeline
from postdate.spark.pipeline.history import History
from postdate.table.delta import Table
from tests.support.bulk import wait_until
from tests.support.core import SECOND_MS, TOPIC
from tests.support.pipeline import Frame, Here, write_import
from verify.faults.process import Broker

LIMIT_S = 240.0


@pytest.fixture
def control(tmp_path: Path) -> Iterator[BrokerClient]:
    """The way to a broker with bulk; its folder is checked at the end."""
    broker = Broker(tmp_path, None, bulk_port=0, pipeline="none", table=tmp_path / "table", lead_ms=4 * SECOND_MS)
    broker.start()
    try:
        control = BrokerClient(broker.route_address, token=read_token(broker.data / TOKEN_FILE))
        wait_until(lambda: bool(control.state().bulk), LIMIT_S)
        assert main(["topic", "create", TOPIC, "--queues", "2", "--addr", broker.route_address]) == 0
        yield control
    finally:
        broker.stop()
    assert broker.check() == []


def begin_pipeline(control: BrokerClient, folder: Path) -> Pipeline:
    """A pipeline whose tasks run in this process. It is away as soon as nobody calls it."""
    root, spark = folder / "table", cast(Any, Here())
    pipeline = Pipeline(spark, control, Table(str(root / "messages")), History(str(root / "history")))
    pipeline.register(str(root), "here")
    return pipeline


def shown(control: BrokerClient) -> dict[str, int]:
    """The bodies of visible messages, and when they became visible."""
    found: list[tuple[str, int]] = []
    with BulkClient(control.bulk()) as bulk:
        for queue in control.topic(TOPIC):
            where = {"topic": TOPIC, "id": queue.id, "number": queue.number}
            for batch in bulk.queue(where, 0, queue.next, ["body", "visible"]):
                found += [(row["body"].decode(), row["visible"]) for row in batch.to_pylist()]
    assert len(dict(found)) == len(found), "a message is shown twice"
    return dict(found)


def expect(control: BrokerClient, name: str, dues: list[int]) -> None:
    wait_until(lambda: len(shown(control)) == len(dues), LIMIT_S)
    visible = shown(control)
    assert all(visible[f"{name} {n}"] >= due for n, due in enumerate(dues)), "none is early"


def test_an_import_that_no_batch_takes_in_comes(control: BrokerClient, tmp_path: Path) -> None:
    begin_pipeline(control, tmp_path)
    now_ms = SystemClock().now_ms()
    dues = [now_ms + n * 200 for n in range(30)]
    control.adopt("nightly", write_import(control, "nightly", dues), 0)
    expect(control, "nightly", dues)


@pytest.mark.full
def test_an_import_that_was_taken_in_comes(control: BrokerClient, tmp_path: Path) -> None:
    pipeline = begin_pipeline(control, tmp_path)
    horizon_ms = SystemClock().now_ms() + 4 * SECOND_MS  # bulk moves it by more, to the end of a minute
    dues = [horizon_ms + n * 1_500 for n in range(1, 60)]
    control.adopt("nightly", write_import(control, "nightly", dues), 0)
    plan = {"far": [control.state().far_length], "horizon": [horizon_ms]}
    pipeline.run(Frame(pa.RecordBatch.from_pydict(plan)))  # type: ignore[arg-type]
    expect(control, "nightly", dues)

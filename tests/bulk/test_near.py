"""What waits in the wheel, over Flight: singles in the log, rows of staged chunks, in the order of their due."""

from pathlib import Path

import pyarrow as pa
import pytest

from postdate.server.requests import pipeline
from postdate.spark.executor.bulk_client import BulkClient
from postdate.storage import record as records
from tests.support.carrying import BEGIN, World
from tests.support.helpers import MINUTE_MS, TOPIC


@pytest.mark.parametrize("page_rows", [1, 3, 32_768])
def test_what_waits_in_the_wheel_is_given_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_rows: int
) -> None:
    monkeypatch.setattr(pipeline, "NEAR_ROWS", page_rows)
    world = World(tmp_path)
    bulk = BulkClient(str(world.bulk.address))
    try:
        assert list(bulk.near()) == []
        soon = BEGIN + 3 * MINUTE_MS
        world.send("far", [soon, soon + 5, soon + 5, soon + 9])
        world.batch()
        world.pass_minutes(2)  # promoted: in a chunk
        world.send("near", [soon + 5, soon + 1])
        world.cancel("far-u3", soon + 9, "unique")
        rows = pa.Table.from_batches(list(bulk.near()))
        bodies = [records.decode(record).body.decode() for record in rows["record"].to_pylist()]
        assert bodies == ["far 0", "near 1", "far 1", "far 2", "near 0"]
        assert rows["due"].to_pylist() == [soon, soon + 1, soon + 5, soon + 5, soon + 5]
        assert set(rows["topic"].to_pylist()) == {TOPIC}
        assert rows["key"].to_pylist()[0] == "far-k0 other"
        assert rows["tag"].to_pylist() == ["a"] * 5
        world.served.call(lambda: world.broker.delete_topic(TOPIC, world.clock.now_ms()))
        assert list(bulk.near()) == []
    finally:
        bulk.close()
        world.close()

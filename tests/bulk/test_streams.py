"""Queues as record batches, over Flight: a topic's queue by columns, and the messages that wait in the wheel."""

from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from postdate.clock import ManualClock
from postdate.errors import TopicNotFound
from postdate.message import decode_properties
from postdate.spark.executor.bulk_client import BulkClient
from postdate.storage import record as records
from tests.support.bulk import Client, bulking
from tests.support.core import MINUTE_MS, T0, TOPIC, message, pulled
from tests.support.pipeline import BEGIN, World
from tests.support.server import Served, serving

# -- a topic's queue --------------------------------------------------------------------------------------------


def read(client: Client, columns: list[str], **where: object) -> pa.Table:
    return client.read({"topic": TOPIC, "id": 0, **where}, 0, 1 << 40, columns=columns)  # type: ignore[arg-type]


def test_visible_properties_and_body_are_those_of_a_pull(tmp_path: Path) -> None:
    """Of messages in the log and in chunks, fired at many instants, in files of few rows."""
    world = World(tmp_path, queue_file_rows=64)
    try:
        world.send("far", [BEGIN + 3 * MINUTE_MS + n % 50 for n in range(100)])
        world.batch()
        for n in range(150):
            world.send(f"near{n}", [BEGIN + 3 * MINUTE_MS + n % 45])
            if n % 10 == 0:
                world.send(f"now{n}", [0])
                world.served.pass_ms(7)
        world.pass_minutes(4)
        client = Client(world.bulk.address.port, world.served.port)
        rows = read(client, ["visible", "properties", "body", "offset"]).to_pylist()
        some_rows = client.read({"topic": TOPIC, "id": 0}, 37, 45, columns=["offset", "visible"]).to_pylist()  # type: ignore[arg-type]
        client.close()
        wanted = world.served.call(lambda: pulled(world.broker, TOPIC, 0))
    finally:
        world.close()
    assert len(rows) > 200
    assert [(row["offset"], row["visible"], row["body"]) for row in rows] == [
        (each.queue_offset, each.stored_at_ms, each.body) for each in wanted
    ]
    assert [dict(row["properties"]) for row in rows] == [decode_properties(each.properties) for each in wanted]
    assert some_rows == [{"offset": row["offset"], "visible": row["visible"]} for row in rows[37:45]]


def sent(served: Served, *names: str) -> None:
    served.call(lambda: served.broker.send([message(name) for name in names], served.clock.now_ms()))
    served.settle()


def test_a_queue_of_an_earlier_topic_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        served.call(lambda: served.broker.put_topic(TOPIC, T0))
        sent(served, "a", "b")
        with bulking(served, tmp_path / "data") as client:
            (first, *_) = client.broker.topic(TOPIC, T0 + 1)
            assert (first.id, first.first, first.next, first.since) == (0, 0, 2, 2)
            assert read(client, ["body"], number=first.number)["body"].to_pylist() == [b"a", b"b"]
            served.call(lambda: served.broker.delete_topic(TOPIC, T0))
            served.call(lambda: served.broker.put_topic(TOPIC, T0))
            sent(served, "c")
            with pytest.raises(flight.FlightServerError, match="is another one now: the topic was deleted and made"):
                read(client, ["body"], number=first.number)
            assert read(client, ["body"])["body"].to_pylist() == [b"c"]


@pytest.mark.parametrize("columns", [["offset", "colour"], [], "offset", 7])
def test_columns_that_are_not_there_are_named(tmp_path: Path, columns: list[str]) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        served.call(lambda: served.broker.put_topic(TOPIC, T0))
        with (
            bulking(served, tmp_path / "data") as client,
            pytest.raises(flight.FlightServerError, match="expected"),
        ):
            read(client, columns)


@pytest.mark.parametrize("name", ["nobody", ""])
def test_a_topic_is_asked_for_by_name(tmp_path: Path, name: str) -> None:
    with (
        serving(tmp_path / "data", ManualClock(T0)) as served,
        bulking(served, tmp_path / "data") as client,
        pytest.raises(TopicNotFound, match=f"topic '{name}' does not exist"),
    ):
        client.broker.topic(name)


# -- the wheel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_rows", [1, 3, 32_768])
def test_what_waits_in_the_wheel_is_given_wherever_it_lies(tmp_path: Path, page_rows: int) -> None:
    world = World(tmp_path, near_rows_max=page_rows)
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

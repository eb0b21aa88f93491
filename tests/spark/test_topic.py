"""Topics in Spark, by the format "postdate": once and as a stream, against what a consumer pulls."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException

import postdate.spark
from postdate.bulk.process import Bulk
from postdate.client.address import parse_address
from postdate.errors import PipelineFailed, UsageError
from postdate.message import decode_properties
from postdate.spark.formats import topic
from postdate.spark.formats.topic import asked_of, bounded
from tests.support.bulk import wait_until
from tests.support.core import MINUTE_MS, TOPIC, message, pulled
from tests.support.pipeline import BEGIN, World

Row = tuple[int, int, str]  # queue, offset, body
WAIT_S = 120.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.close()


def options(world: World, **more: object) -> dict[str, str]:
    named = {"addr": world.address, "topic": TOPIC, **more}
    return {name: str(value) for name, value in named.items()}


def load(spark: Any, world: World, **more: object) -> Any:
    postdate.spark.register(spark)
    return spark.read.format("postdate").options(**options(world, **more)).load()


def consumed(world: World, queue_count: int = 2) -> list[Row]:
    """What consumers pull, by queue."""
    return [
        (queue, each.queue_offset, each.body.decode())
        for queue in range(queue_count)
        for each in world.served.call(partial(pulled, world.broker, TOPIC, queue))
    ]


def shown(rows: list[Any]) -> list[Row]:
    return sorted((row["queue"], row["offset"], bytes(row["body"]).decode()) for row in rows)


def instant(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1_000, UTC).isoformat()


# -- once -------------------------------------------------------------------------------------------------------


def test_a_batch_read_is_what_consumers_pull(world: World, spark: Any) -> None:
    """Sent at once, near, and far: promoted through chunks; what is cancelled or not due yet is in neither."""
    due = BEGIN + 3 * MINUTE_MS
    world.send("now", [0, 0, 0])
    world.send("far", [due + n for n in range(20)])
    world.batch()
    world.cancel("far-u7", due + 7, "unique")
    world.pass_minutes(2)
    world.send("near", [due + 5, due + 3, due + 3])
    world.served.pass_ms(MINUTE_MS + 10)
    world.batch()
    rows = load(spark, world).collect()
    assert shown(rows) == consumed(world)
    bodies = {bytes(row["body"]).decode() for row in rows}
    assert {"now 0", "near 1", "far 3"} < bodies
    assert {"far 7", "far 19"}.isdisjoint(bodies)

    wanted = {
        (queue, each.queue_offset): each
        for queue in range(2)
        for each in world.served.call(partial(pulled, world.broker, TOPIC, queue))
    }
    for row in rows:
        record = wanted[row["queue"], row["offset"]]
        properties = decode_properties(record.properties)
        assert row["topic"] == TOPIC
        assert row["properties"] == properties
        assert (row["key"], row["tag"]) == (properties["KEYS"], properties["TAGS"])
        assert row["visible"].timestamp() * 1_000 == record.stored_at_ms
        deliver_ms = int(properties["TIMER_DELIVER_MS"])
        assert row["due"] is None if deliver_ms == 0 else row["due"].timestamp() * 1_000 == deliver_ms
    assert list(rows[0].asDict()) == list(topic.COLUMNS)


def test_edges_and_columns_are_those_asked_for(world: World, spark: Any) -> None:
    for n in range(4):
        world.send(f"m{n}", [0, 0])
        world.served.pass_ms(1_000)
    between = {"start": instant(BEGIN + 1_000), "stop": instant(BEGIN + 3_000)}
    rows = load(spark, world, **between, columns="body, offset,queue").collect()
    assert list(rows[0].asDict()) == ["body", "offset", "queue"]
    assert shown(rows) == [(0, 1, "m1 0"), (0, 2, "m2 0"), (1, 1, "m1 1"), (1, 2, "m2 1")]
    assert load(spark, world, start="latest").count() == 0
    assert load(spark, world, stop="earliest").count() == 0
    assert load(spark, world, columns="topic").distinct().collect() == [(TOPIC,)]


def test_a_queue_is_cut_into_ranges_that_leave_nothing_out() -> None:
    low, high = {"0": [7, 100]}, {"0": [7, 600_123], "1": [9, 3]}
    found = [partition.value for partition in topic.ranges("b:1", low, high)]
    assert [each[2:] for each in found] == [
        (7, 100, 250_100), (7, 250_100, 500_100), (7, 500_100, 600_123), (9, 0, 3),
    ]  # fmt: skip


# -- options ----------------------------------------------------------------------------------------------------

WRONG = [
    ({}, "the option 'topic' is missing"),
    ({"topic": "t", "colour": "red"}, "there is no option 'colour', but addr, bulk, topic, start, stop, rows, columns"),
    (
        {"topic": "t", "start": "yesterday"},
        "the option 'start' is 'yesterday', expected earliest, latest or an instant",
    ),
    ({"topic": "t", "stop": "2030-01-31T08:00:00"}, "the option 'stop' is '2030-01-31T08:00:00', expected"),
    ({"topic": "t", "rows": "0"}, "the option 'rows' is '0', expected a whole number above 0"),
    ({"topic": "t", "rows": "many"}, "the option 'rows' is 'many'"),
    ({"topic": "t", "columns": "body,colour"}, "the option 'columns' is 'body,colour', expected some of topic, queue"),
    ({"topic": "t", "columns": "body,body"}, "each once"),
]


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_a_wrong_option_is_told_in_a_sentence(wrong: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        asked_of(wrong)


def test_an_instant_is_read_with_its_zone_and_never_rounded_down() -> None:
    asked = asked_of({"topic": "t", "start": "1970-01-01T01:00:00.0001+01:00", "stop": "1970-01-01T00:00:02Z"})
    assert (asked.start, asked.stop) == (1, 2_000)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"start": "soon"}, "the option 'start' is 'soon'"),
        ({"topic": "nobody"}, "topic 'nobody' does not exist"),
        ({"addr": "127.0.0.1:1"}, "no broker at 127.0.0.1:1: connection refused"),
    ],
)
def test_spark_shows_the_sentence_and_no_java(world: World, spark: Any, more: dict[str, str], sentence: str) -> None:
    with pytest.raises(AnalysisException) as caught:
        load(spark, world, **more).collect()
    assert sentence in str(caught.value)
    assert "org.apache" not in str(caught.value)


# -- as a stream ------------------------------------------------------------------------------------------------


class Stream:
    """A query that notes what each of its batches had."""

    def __init__(self, spark: Any, world: World, checkpoint: Path, **more: object) -> None:
        postdate.spark.register(spark)
        self._source = spark.readStream.format("postdate").options(**options(world, **more)).load()
        self._checkpoint = checkpoint
        self.batches: dict[int, list[Row]] = {}
        self.query: Any = None

    def _note(self, frame: Any, batch: int) -> None:
        self.batches[batch] = shown(frame.collect())

    def start(self, **trigger: Any) -> None:
        writer = self._source.writeStream.foreachBatch(self._note).option("checkpointLocation", str(self._checkpoint))
        self.query = (writer.trigger(**trigger) if trigger else writer).start()

    def run(self) -> dict[int, list[Row]]:
        """Takes what is there."""
        self.start(availableNow=True)
        assert self.query.awaitTermination(WAIT_S)
        return self.batches

    @property
    def rows(self) -> list[Row]:
        return sorted(row for batch in self.batches.values() for row in batch)


def test_a_stream_that_is_started_again_loses_and_doubles_nothing(world: World, spark: Any, tmp_path: Path) -> None:
    """While the topic gets more queues, too."""
    checkpoint = tmp_path / "checkpoint"
    world.send("a", [0] * 9)
    first = Stream(spark, world, checkpoint, rows=4).run()
    assert [len(batch) for batch in first.values()] == [4, 4, 1]
    world.send("b", [0] * 3)
    served = world.served
    served.call(lambda: world.broker.put_topic(TOPIC, BEGIN, read_queue_count=4, write_queue_count=4))
    served.call(lambda: world.broker.send([message("c", queue_id=queue) for queue in range(4)], BEGIN))
    served.settle()
    second = Stream(spark, world, checkpoint).run()
    seen = [row for batch in (*first.values(), *second.values()) for row in batch]
    assert sorted(seen) == consumed(world, 4)
    assert len(seen) == 16
    assert Stream(spark, world, checkpoint).run() == {}


def test_a_batch_that_is_run_again_has_the_same_rows(world: World, spark: Any, tmp_path: Path) -> None:
    """Its commit is lost, as by a crash; what came since is not in it."""
    checkpoint = tmp_path / "checkpoint"
    world.send("a", [0] * 5)
    first = Stream(spark, world, checkpoint).run()
    (last,) = first
    for path in (checkpoint / "commits").glob(f"*{last}*"):
        path.unlink()
    world.send("b", [0] * 2)
    again = Stream(spark, world, checkpoint).run()
    assert again[last] == first[last]
    assert sorted([*again[last], *again[last + 1]]) == consumed(world)


def test_a_stream_waits_for_a_broker_that_is_away(world: World, spark: Any, tmp_path: Path) -> None:
    """From its start, and later on."""
    world.send("a", [0] * 3)
    stream = Stream(spark, world, tmp_path / "checkpoint")
    away(world)
    stream.start()
    try:
        back(world)
        until(stream, lambda: stream.rows == consumed(world))
        away(world)
        world.send("b", [0] * 3)
        assert stream.query.isActive
        back(world)
        until(stream, lambda: stream.rows == consumed(world))
    finally:
        stream.query.stop()


def away(world: World) -> None:
    world.bulk.close()


def back(world: World) -> None:
    broker = parse_address(world.served.server.broker_address)
    world.bulk = Bulk(world.folder, broker, "127.0.0.1", world.bulk.address.port)


class Failing:
    """A client whose bulk goes away after each batch of two rows, and now and then before the first."""

    asked: ClassVar[list[int]] = []

    def __init__(self, _: str) -> None:
        pass

    def __enter__(self) -> "Failing":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def queue(self, _where: Any, start: int, stop: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        assert columns == ["offset"]
        self.asked.append(start)
        if len(self.asked) % 2 == 0:
            raise flight.FlightUnavailableError("away")
        yield pa.RecordBatch.from_pydict({"offset": list(range(start, min(start + 2, stop)))})
        if start + 2 < stop:
            raise flight.FlightInternalError("the connection broke")


def test_a_read_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic, "BulkClient", Failing)
    monkeypatch.setattr(Failing, "asked", [])
    asked, wanted = asked_of({"topic": "t", "columns": "offset"}), topic.Range("127.0.0.1:9878", 0, 7, 3, 10)
    found = [
        offset for batch in topic.rows(asked, wanted, WAIT_S, pause_s=0.0) for offset in batch.column(0).to_pylist()
    ]
    assert found == list(range(3, 10))
    assert Failing.asked == [3, 5, 5, 7, 7, 9, 9]
    monkeypatch.setattr(Failing, "asked", [])
    with pytest.raises(PipelineFailed, match=r"bulk does not answer at 127\.0\.0\.1:9878: the connection"):
        list(topic.rows(asked, wanted, -1.0, pause_s=0.0))


def until(stream: Stream, is_so: Any) -> None:
    def watched() -> bool:
        assert stream.query.exception() is None
        return bool(is_so())

    wait_until(watched)


def test_a_stream_ends_when_its_topic_is_deleted(world: World, spark: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    world.send("a", [0] * 3)
    assert len(Stream(spark, world, checkpoint).run()) == 1
    stream = Stream(spark, world, checkpoint)
    stream.start()
    world.served.call(lambda: world.broker.delete_topic(TOPIC, BEGIN))
    world.served.settle()
    with pytest.raises(StreamingQueryException, match=f"topic '{TOPIC}' does not exist"):
        stream.query.awaitTermination(WAIT_S)
    world.served.call(lambda: world.broker.put_topic(TOPIC, BEGIN, read_queue_count=2, write_queue_count=2))
    world.send("b", [0] * 3)
    with pytest.raises(StreamingQueryException, match="was deleted and made again since this checkpoint was written"):
        Stream(spark, world, checkpoint).run()
    assert Stream(spark, world, tmp_path / "new").run() == {0: consumed(world)}


def test_the_checkpoint_holds_an_offset_for_each_queue(world: World, spark: Any, tmp_path: Path) -> None:
    world.send("a", [0] * 3)
    Stream(spark, world, tmp_path / "checkpoint", start="latest").run()
    world.send("b", [0] * 3)
    assert len(Stream(spark, world, tmp_path / "checkpoint").run()) == 1
    last = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    numbers = world.broker.fold.topics.get(TOPIC).numbers
    assert json.loads(last.read_text().splitlines()[-1]) == {"0": [numbers[0], 4], "1": [numbers[1], 2]}


@pytest.mark.parametrize(
    ("waiting", "rows_max", "taken"),
    [([5, 5], 4, [2, 2]), ([1, 9], 6, [1, 5]), ([9, 0, 1], 100, [9, 0, 1]), ([3, 3, 3], 1, [1, 0, 0])],
)
def test_queues_share_a_batch(waiting: list[int], rows_max: int, taken: list[int]) -> None:
    start = {str(n): [n, 10] for n in range(len(waiting))}
    high = {str(n): [n, 10 + count] for n, count in enumerate(waiting)}
    found = bounded(start, high, rows_max)
    assert sorted(place[1] - 10 for place in found.values()) == sorted(taken)
    assert sum(place[1] - 10 for place in found.values()) <= rows_max

"""A topic's queue by columns: what each record says by itself, whatever stands in it; and what may be asked for."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from postdate.bulk import properties as bulk_properties
from postdate.bulk.dues import dues
from postdate.bulk.properties import Properties
from postdate.clock import ManualClock
from postdate.errors import IllegalMessage, TopicNotFound
from postdate.message import INT64_MAX, DelayLevels, decode_properties, due_and_level
from tests.bulk.test_columns import PROPERTIES
from tests.support.bulking import Client, bulking
from tests.support.carrying import BEGIN, World
from tests.support.helpers import MINUTE_MS, T0, TOPIC, message, pulled
from tests.support.serving import Served, serving

LEVELS = DelayLevels.parse("1s 5s 2h")
NUMBERS = some.one_of(
    some.integers(-3, 12).map(str),
    some.integers(T0 - 5, T0 + 5).map(str),
    some.sampled_from(["+7", "007", "-0", "-9223372036854775807", "-9223372036854775808", "9007199254740993", "x"]),
)
NAMES = some.sampled_from(
    ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME", "XDELAY", "KEYS"]
)
TIMED = some.lists(some.tuples(NAMES, NUMBERS), max_size=5).map(
    lambda named: b"".join(f"{name}\x01{value}\x02".encode() for name, value in named)
)


@settings(max_examples=400, deadline=None)
@given(some.lists(PROPERTIES, max_size=12), some.sampled_from([0, 1 << 22]))
def test_maps_hold_what_each_message_has(encoded: list[bytes], table_max: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bulk_properties, "_TABLE_MAX", table_max)
        found = Properties(pa.array(encoded, pa.binary())).maps()
    assert [dict(row) for row in found.to_pylist()] == [decode_properties(each) for each in encoded]
    assert all(len(dict(row)) == len(row) for row in found.to_pylist())


def test_what_is_no_text_is_left_out_of_a_map() -> None:
    encoded = [b"a\x01\xff\x02b\x01c\x02", b"\xff\x01d\x02b\x01e\x02"]
    found = Properties(pa.array(encoded, pa.binary())).maps()
    assert found.to_pylist() == [[("b", "c")], [("b", "e")]]


@settings(max_examples=400, deadline=None)
@given(some.lists(TIMED, max_size=8))
def test_dues_are_those_of_each_message(encoded: list[bytes]) -> None:
    stored_at = np.full(len(encoded), T0)
    try:
        wanted = [due_and_level(decode_properties(each), T0, LEVELS, INT64_MAX) for each in encoded]
    except IllegalMessage:
        with pytest.raises(IllegalMessage):  # nobody can have sent it
            dues(Properties(pa.array(encoded, pa.binary())), stored_at, LEVELS)
        return
    found = dues(Properties(pa.array(encoded, pa.binary())), stored_at, LEVELS)
    assert list(zip(found.due.tolist(), found.level.tolist(), strict=True)) == wanted


# -- over Flight ------------------------------------------------------------------------------------------------


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

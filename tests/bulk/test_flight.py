"""Bulk over Arrow Flight, beside a real server: what it reads, what it takes in, what it hands on to the broker."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from postdate.access.permits import make_permit
from postdate.access.token import TOKEN_USER
from postdate.bulk.process import Bulk
from postdate.bulk.schema import OUT
from postdate.bulk.streams import BatchBounds
from postdate.bulk.upload import Selections
from postdate.client.address import parse_address
from postdate.client.errors import Unreachable
from postdate.client.security import Login
from postdate.clock import ManualClock, SystemClock
from postdate.config import MIB
from postdate.contract import Stage
from postdate.errors import FlowControl, Refused, UsageError
from postdate.keys import key_hash
from postdate.message import Host, Message, encode_properties, first_key, tag_hash
from postdate.server.connection import Connection
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.executor.bulk_client import BulkClient
from postdate.storage import record as records
from postdate.storage.disk import RealDisk
from postdate.table.format import SELECTED
from postdate.wire import codes
from postdate.wire.frame import Command, decode, reply
from postdate.wire.requests import Request
from postdate.wire.signature import is_signed
from tests.support.bulk import Client, bulking, chunk_batch, wait_until
from tests.support.certificates import Authority
from tests.support.core import DAY_MS, HOUR_MS, MINUTE_MS, T0, TOPIC, message
from tests.support.peer import connected
from tests.support.server import Served, serving

LONG_TOPIC = "long-" + "t" * 122
RETRY_TOPIC = "%RETRY%" + "g" * 150


def make_topics(served: Served, *names: str) -> None:
    for name in names:
        served.call(partial(served.broker.put_topic, name, served.clock.now_ms()))
    served.settle()


def sent(served: Served, *messages: Message) -> list[int]:
    """Sends messages, each in a batch of its own, durably; gives their arrivals."""
    tickets = served.call(lambda: [served.broker.send([each], served.clock.now_ms()) for each in messages])
    served.settle()
    return [ticket.offsets[0] for ticket in tickets]


def far(number: int = 0, **how: Any) -> Message:
    return message(f"body {number}", due=T0 + DAY_MS + number, unique=f"U{number}", **how)


# -- out --------------------------------------------------------------------------------------------------------


def random_message(dice: random.Random, number: int) -> Message:
    properties = {"UNIQ_KEY": f"U{number}", "TIMER_DELIVER_MS": str(T0 + DAY_MS + dice.randrange(10_000))}
    if dice.random() < 0.7:
        properties["KEYS"] = dice.choice(["k", "first second", " spaced ", "Schlüssel", "KEYS"])
    if dice.random() < 0.7:
        properties["TAGS"] = dice.choice(["red", "rot-grün", "TAGS"])
    named = list(properties.items())
    dice.shuffle(named)
    body = dice.choice([b"", b"KEYS\x01no\x02TAGS\x01no\x02", dice.randbytes(dice.randrange(400))])
    host = Host(dice.choice([b"\x7f\x00\x00\x01", bytes(range(16))]), 4_711)
    topic = dice.choice([TOPIC, LONG_TOPIC, RETRY_TOPIC])
    return Message(topic, body, encode_properties(dict(named)), queue_id=dice.randrange(4), born_host=host)


def test_far_rows_come_as_the_broker_has_them(tmp_path: Path) -> None:
    dice = random.Random(6)
    with serving(tmp_path / "data", ManualClock(T0), queue_tail_rows=64) as served:
        make_topics(served, TOPIC, LONG_TOPIC, RETRY_TOPIC)
        messages = [random_message(dice, number) for number in range(1_500)]
        arrivals = sent(served, *messages)
        with bulking(served, tmp_path / "data") as client:
            found = client.read()
            part = client.read(start=100, stop=1_400)
        rows = served.call(lambda: served.broker.view.read_far(0, 2_000))
        numbers = {name: topic.numbers for name, topic in served.broker.fold.topics.by_name.items()}
    assert found.schema == OUT
    assert part.equals(found.slice(100, 1_300))
    assert found["arrival"].to_pylist() == arrivals
    properties = [records.properties_of(record) for record in found["record"].to_pylist()]
    expected = {
        "offset": list(range(1_500)),
        "kind": [1] * 1_500,
        "topic": [each.topic for each in messages],
        "queue": [numbers[each.topic][each.queue_id] for each in messages],
        "level": [0] * 1_500,
        "due": [int(each["TIMER_DELIVER_MS"]) for each in properties],
        "tag_hash": [tag_hash(each.get("TAGS", "")) for each in properties],
        "unique_hash": [signed(key_hash(each["UNIQ_KEY"])) for each in properties],
        "key_hash": [signed(key_hash(first_key(each.get("KEYS", "")))) for each in properties],
        "key": [each.get("KEYS") for each in properties],
        "tag": [each.get("TAGS") for each in properties],
    }
    for name, values in expected.items():
        assert found[name].to_pylist() == values, name
    for name in ("due", "arrival", "queue", "tag_hash", "kind", "level"):
        assert found[name].to_pylist() == rows[name].tolist(), name
    assert [records.decode(record).body for record in found["record"].to_pylist()] == [each.body for each in messages]


def signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def test_a_range_of_dues_is_cut_out_of_the_far_rows(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, *map(far, range(10)))
        with bulking(served, tmp_path / "data") as client:
            found = client.read(due_min=T0 + DAY_MS + 2, due_max=T0 + DAY_MS + 5)
            assert found["offset"].to_pylist() == [3, 4, 5]
            assert client.read(due_max=T0).num_rows == 0
            assert client.read(start=10, stop=20).num_rows == 0
            assert client.read(start=4, stop=4).num_rows == 0


def test_a_cancel_comes_with_the_topic_and_key_that_it_names(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, far(1), far(2, keys="k2"))
        served.call(lambda: served.broker.cancel(TOPIC, "U1", T0 + DAY_MS + 1, T0))
        served.call(lambda: served.broker.cancel(TOPIC, "k2", T0 + DAY_MS + 2, T0, by="key"))
        sent(served, far(3, keys="k3"))
        with bulking(served, tmp_path / "data") as client:
            rows = client.read().to_pylist()
    assert [(row["kind"], row["topic"], row["key"]) for row in rows] == [
        (1, TOPIC, None), (1, TOPIC, "k2"), (2, TOPIC, "U1"), (2, TOPIC, "k2"), (1, TOPIC, "k3"),
    ]  # fmt: skip
    assert rows[2]["due"] == T0 + DAY_MS + 1
    assert rows[2]["unique_hash"] == signed(key_hash("U1"))
    assert records.topic_of(rows[2]["record"]) == "postdate_sys_cancel"


def test_batches_are_bounded_by_rows_and_by_bytes(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, *map(far, range(250)), *[message(b"x" * 10_000, due=T0 + DAY_MS) for _ in range(9)])
        sent(served, message(b"y" * 90_000, due=T0 + DAY_MS), far(251))
        with bulking(served, tmp_path / "data", bounds=BatchBounds(100, 40_000)) as client:
            batches = [piece.data for piece in client.reader("far", 0, 1_000)]
    assert sum(batch.num_rows for batch in batches) == 261
    assert max(batch.num_rows for batch in batches) == 100
    sizes = [sum(map(len, batch.column("record").to_pylist())) for batch in batches]
    assert sorted(sizes)[-1] > 90_000, "one that is larger than a batch has one to itself"
    assert batches[sizes.index(max(sizes))].num_rows == 1
    assert sorted(sizes)[-2] <= 40_000


def test_rows_that_are_in_memory_alone_come_too_and_no_more_than_one_answer_has(tmp_path: Path) -> None:
    """Far rows stay in the broker's memory until a file is worth it; here all of them do."""
    with serving(tmp_path / "data", ManualClock(T0), queue_tail_rows=100_000, segment_bytes=64 * MIB) as served:
        make_topics(served, TOPIC)
        count = 70_000  # more than one answer of the broker has
        batch = [Message(TOPIC, b"", far(n).properties) for n in range(500)]
        for _ in range(count // 500):
            served.call(lambda: served.broker.send(batch, T0))
        served.settle()
        with bulking(served, tmp_path / "data") as client:
            assert client.read()["offset"].to_pylist() == list(range(count))
            assert client.read(start=count - 5)["offset"].to_pylist() == list(range(count - 5, count))


def test_only_durable_rows_are_read(tmp_path: Path) -> None:
    """Flush mode async shows messages before they are on disk; a pipeline must not stage what a crash takes."""
    with serving(tmp_path / "data", ManualClock(T0), flush="async", flush_interval_ms=60_000) as served:
        make_topics(served, TOPIC)
        served.call(served.broker.flush)
        with bulking(served, tmp_path / "data") as client:
            for number in range(20):
                served.call(partial(served.broker.send, [far(number)], T0))
                found = client.read()
                durable = served.call(lambda: served.broker.log.durable)
                ends = [
                    a + len(r) for a, r in zip(found["arrival"].to_pylist(), found["record"].to_pylist(), strict=True)
                ]
                assert all(end <= durable for end in ends)


def test_rows_whose_record_is_gone_are_left_out(tmp_path: Path) -> None:
    """As retention does: first the record's segment goes, the row stays a while."""
    with serving(tmp_path / "data", ManualClock(T0), retention_ms=HOUR_MS) as served:
        make_topics(served, TOPIC)
        sent(served, far(1))
        sent(served, *[message(b"x" * 100_000) for _ in range(30)], far(2))
        with bulking(served, tmp_path / "data") as client:
            first = client.read()
            assert first["key"].null_count == 2
            segment = tmp_path / "data" / "log" / f"{0:020d}"
            segment.rename(tmp_path / "aside")
            assert client.read()["offset"].to_pylist() == [1]
            (tmp_path / "aside").rename(segment)
            assert client.read().equals(first)


# -- topics -----------------------------------------------------------------------------------------------------


def test_a_topic_is_read_as_its_consumers_see_it(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC, LONG_TOPIC)
        arrivals = sent(
            served,
            message("later", due=T0 + 2_000, keys="a b", tag="red"),
            message("sooner", due=T0 + 1_000, unique="U1"),
            message("now", topic=TOPIC),
            message("level", DELAY="1", topic=TOPIC),
            message("elsewhere", topic=LONG_TOPIC, queue_id=2),
        )
        served.pass_ms(2_000)
        served.settle()
        with bulking(served, tmp_path / "data") as client:
            rows = client.read_topic(TOPIC).to_pylist()
            other = client.read_topic(LONG_TOPIC, 2)
            assert client.read_topic(TOPIC, 0, 1, 3)["offset"].to_pylist() == [1, 2]
            assert client.read_topic(TOPIC, 5).num_rows == 0
        number = served.broker.fold.topics.get(TOPIC).numbers[0]
    assert [records.decode(row["record"]).body for row in rows] == [b"now", b"sooner", b"level", b"later"]
    assert [row["offset"] for row in rows] == [0, 1, 2, 3]
    assert [row["due"] for row in rows] == [0, T0 + 1_000, T0 + 1_000, T0 + 2_000]
    assert [row["level"] for row in rows] == [0, 0, 1, 0]
    assert [row["arrival"] for row in rows] == [arrivals[2], arrivals[1], arrivals[3], arrivals[0]]
    assert {(row["kind"], row["topic"], row["queue"]) for row in rows} == {(1, TOPIC, number)}
    last = rows[3]
    assert (last["key"], last["tag"], last["tag_hash"]) == ("a b", "red", tag_hash("red"))
    assert (last["key_hash"], last["unique_hash"]) == (signed(key_hash("a")), 0)
    assert rows[1]["unique_hash"] == signed(key_hash("U1"))
    assert other["topic"].to_pylist() == [LONG_TOPIC]


def test_a_topic_is_read_out_of_staged_chunks_too(tmp_path: Path) -> None:
    """In the order of due; a chunk says itself when its messages were due and when they arrived."""
    due = T0 + DAY_MS
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, message("b", due=due + 2), message("a", due=due + 1), message("c", due=due + 3))
        with bulking(served, tmp_path / "data") as client:
            rows = client.read()
            epoch = client.broker.register("", "local").epoch
            served.pass_ms(DAY_MS - MINUTE_MS)
            name = f"{epoch:06d}-1"
            client.put(name, [chunk_batch(rows)])
            client.broker.stage(Stage(epoch, (0, 3), (0, due + MINUTE_MS), (name,), 3, 3))
            sent(served, message("near", due=due + 2))
            served.pass_ms(2 * MINUTE_MS)
            served.settle()
            found = client.read_topic(TOPIC).to_pylist()
    assert [records.decode(row["record"]).body for row in found] == [b"a", b"b", b"near", b"c"]
    assert [row["due"] for row in found] == [due + 1, due + 2, due + 2, due + 3]
    arrivals = rows["arrival"].to_pylist()
    assert [found[n]["arrival"] for n in (0, 1, 3)] == [arrivals[1], arrivals[0], arrivals[2]]


# -- control, which is the broker's -----------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["state", "register", "stage", "report", "job", "topic", "dance"])
def test_an_old_pipeline_is_refused_in_one_sentence(tmp_path: Path, action: str) -> None:
    with (
        serving(tmp_path / "data", ManualClock(T0)) as served,
        bulking(served, tmp_path / "data") as client,
        pytest.raises(flight.FlightServerError, match="a pipeline asks the broker itself; run one of the"),
    ):
        list(client.flight.do_action(flight.Action(action, b"{}")))


def test_the_broker_tells_where_bulk_listens(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        broker = BrokerClient(served.address)
        assert broker.state().bulk == ""
        with pytest.raises(Unreachable, match=f"the broker at {served.address} has no bulk process at the moment"):
            broker.bulk()
        with bulking(served, tmp_path / "data") as client:
            wait_until(lambda: bool(broker.state().bulk))
            assert broker.bulk() == f"127.0.0.1:{client.port}"
            assert BrokerClient(served.address, "10.0.0.1:7").bulk() == "10.0.0.1:7"
        wait_until(lambda: not broker.state().bulk)


def test_a_bulk_that_listens_everywhere_is_reached_where_its_broker_is(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        broker = BrokerClient(served.address)
        bulk = Bulk(tmp_path / "data", parse_address(served.address), "0.0.0.0", 0)
        try:
            wait_until(lambda: bool(broker.state().bulk))
            assert broker.state().bulk == f"0.0.0.0:{bulk.address.port}"
            assert broker.bulk() == f"127.0.0.1:{bulk.address.port}"
        finally:
            bulk.close()


def test_the_first_chunk_of_a_pipeline_removes_those_that_no_stage_will_name(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0), stage_ahead_ms_max=3 * DAY_MS) as served:
        make_topics(served, TOPIC)
        sent(served, far(1), far(2))
        folder = tmp_path / "data" / "chunks"
        with bulking(served, tmp_path / "data") as client:
            rows = client.read()
            client.broker.register("", "")
            for name in ("000001-staged", "000001-lost"):
                client.put(name, [chunk_batch(rows)])
            client.broker.stage(Stage(1, (0, 2), (0, T0 + 2 * DAY_MS), ("000001-staged",), 2, 2))
            (folder / "note").write_text("not ours")
            again = client.broker.register("", "")
            assert (again.epoch, again.staged) == (2, ("000001-staged",))
            with pytest.raises(flight.FlightServerError, match="is not of epoch 2: another pipeline has registered"):
                client.put("000001-late", [chunk_batch(rows)])
            client.put("000002-first", [chunk_batch(rows)])
            assert sorted(path.name for path in folder.iterdir()) == ["000001-staged", "000002-first", "note"]
            (folder / "note").unlink()


# -- bounds -----------------------------------------------------------------------------------------------------


def test_only_so_many_streams_run_and_one_that_is_left_makes_room(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, *[message(b"x" * 900_000, due=T0 + DAY_MS) for _ in range(40)])
        with bulking(served, tmp_path / "data", streams_max=1) as client:
            reader = client.reader("far", 0, 40)
            assert reader.read_chunk().data.num_rows
            with pytest.raises(flight.FlightUnavailableError, match="1 reads and uploads run, the limit"):
                client.read()
            reader.cancel()
            del reader
            wait_until(lambda: is_read(client))


def is_read(client: Client) -> bool:
    try:
        return bool(client.read(stop=1).num_rows)
    except flight.FlightUnavailableError:
        return False


# -- faults -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ticket",
    [
        b"", b"{}", b"[]", b'{"queue": "far"}', b'{"queue": "wheel", "start": 0, "stop": 1}',
        b'{"queue": "far", "start": -1, "stop": 1}', b'{"queue": {"topic": "", "id": 0}, "start": 0, "stop": 1}',
        b'{"queue": "far", "start": 0, "stop": 1, "due_max": null}',
    ],
)  # fmt: skip
def test_a_ticket_that_is_none_is_refused(tmp_path: Path, ticket: bytes) -> None:
    with (
        serving(tmp_path / "data", ManualClock(T0)) as served,
        bulking(served, tmp_path / "data") as client,
        pytest.raises(flight.FlightServerError, match="the ticket"),
    ):
        client.flight.do_get(flight.Ticket(ticket)).read_all()


def test_a_topic_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data", ManualClock(T0)) as served,
        bulking(served, tmp_path / "data") as client,
        pytest.raises(flight.FlightServerError, match="topic 'nobody' does not exist"),
    ):
        client.read_topic("nobody")


def test_a_damaged_record_is_named_and_not_passed_over(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        (arrival,) = sent(served, far(1))
        path = tmp_path / "data" / "log" / f"{0:020d}"
        good = path.read_bytes()
        with bulking(served, tmp_path / "data") as client:
            with path.open("r+b") as file:
                file.seek(arrival)
                file.write(b"\xff\xff")
            with pytest.raises(flight.FlightServerError, match=f"no record of .* bytes stands at byte {arrival}"):
                client.read()
            with path.open("r+b") as file:
                file.write(good)


def test_bulk_outlives_its_broker(tmp_path: Path) -> None:
    """While the broker is away everything is refused as unavailable; when it is back, all goes on."""
    folder = tmp_path / "data"
    with serving(folder, ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, far(1), far(2))
        port = served.port
        with bulking(served, folder) as client:
            found = client.read()
            served.kill()
            with pytest.raises(flight.FlightUnavailableError, match=r"no broker at|lost"):
                client.read()
            with pytest.raises(flight.FlightUnavailableError, match="no broker at"):
                client.read()
            with serving(folder, ManualClock(T0), broker_port=port) as again:
                assert client.read().equals(found)
                sent(again, far(3))
                assert client.read().num_rows == 3


# -- who may ask ------------------------------------------------------------------------------------------------

TOKEN = "ab" * 32
FAR, NEAR = {"queue": "far", "start": 0, "stop": 9}, {"queue": "near"}
OF_TOPIC = {"queue": {"topic": TOPIC, "id": 0}, "start": 0, "stop": 9}


@contextmanager
def guarded(folder: Path) -> Iterator[tuple[Served, Bulk]]:
    """Bulk on the folder of a broker with a token, and far messages in one of two topics."""
    with serving(folder / "data", SystemClock(), token=TOKEN) as served:
        make_topics(served, TOPIC, "second")
        sent(served, message("secret", due=served.clock.now_ms() + DAY_MS), message("visible"))
        bulk = Bulk(folder / "data", parse_address(served.server.broker_address), "127.0.0.1", 0, token=TOKEN)
        try:
            wait_until(lambda: bool(BrokerClient(served.address).state().bulk))
            yield served, bulk
        finally:
            bulk.close()


def get(bulk: Bulk, ticket: Any, permit: str | None) -> list[bytes]:
    options = flight.FlightCallOptions(headers=[] if permit is None else [(b"authorization", permit.encode())])
    with flight.connect(f"grpc://{bulk.address}") as client:
        rows = client.do_get(flight.Ticket(json.dumps(ticket).encode()), options).read_all()
    return [records.decode(record).body for record in rows["record"].to_pylist()]


def test_who_only_reaches_the_port_reads_and_writes_nothing(tmp_path: Path) -> None:
    with guarded(tmp_path) as (served, bulk):
        forged = make_permit("cd" * 32, "pipeline", served.clock.now_ms())
        for permit in (None, "", "Bearer", "Bearer ", "Basic cGlwZWxpbmU6eA==", f"Bearer {forged}", f"Bearer {TOKEN}"):
            for ticket in (FAR, NEAR, OF_TOPIC, {"selection": "00000001-0"}):
                with pytest.raises(flight.FlightUnauthenticatedError):
                    get(bulk, ticket, permit)
        for place in (str(bulk.address), f"{bulk.address} {forged}"):
            with BulkClient(place) as client, pytest.raises(flight.FlightUnauthenticatedError):
                client.select("00000001-0", SELECTED.empty_table())
            with BulkClient(place) as client, pytest.raises(flight.FlightUnauthenticatedError):
                client.upload("000001-x", 0, [])
        assert not list((tmp_path / "data").glob("chunks/*"))


def test_the_broker_gives_a_permit_for_what_its_asker_may_read(tmp_path: Path) -> None:
    with guarded(tmp_path) as (served, bulk):
        broker = BrokerClient(served.address)
        places = (broker.bulk(), broker.bulk_for(TOPIC), broker.bulk_for("second"))
        everything, one, other = (f"Bearer {place.partition(' ')[2]}" for place in places)
        assert get(bulk, FAR, everything) == [b"secret"]
        assert get(bulk, OF_TOPIC, everything) == get(bulk, OF_TOPIC, one) == [b"visible"]
        assert get(bulk, NEAR, everything) == []
        for ticket, permit in ((OF_TOPIC, other), (FAR, one), (NEAR, one), ({"selection": "00000001-0"}, one)):
            with pytest.raises(flight.FlightUnauthorizedError, match="is not good for"):
                get(bulk, ticket, permit)


def test_a_reader_writes_nothing_and_a_pipeline_does(tmp_path: Path) -> None:
    with guarded(tmp_path) as (served, _):
        with (
            BulkClient(BrokerClient(served.address).bulk()) as client,
            pytest.raises(flight.FlightUnauthorizedError, match="only a pipeline writes"),
        ):
            client.upload("000001-x", 0, [])
        broker = BrokerClient(served.address, token=TOKEN)
        epoch = broker.register("", "").epoch
        with BulkClient(broker.bulk()) as client:
            assert client.upload(f"{epoch:06d}-x", 0, []).rows == 0


def test_bulk_and_pipeline_sign_what_they_ask(tmp_path: Path) -> None:
    """Whatever the broker makes of it; what it tells everybody is asked without."""
    asked: list[tuple[Command, bool]] = []

    with serving(tmp_path / "data", SystemClock(), token=TOKEN) as served:
        handle = served.dispatcher.handle

        def note(connection: Connection, frames: list[bytes]) -> int:
            commands = map(decode, frames)
            asked.extend((each, is_signed(each.fields, each.body, TOKEN)) for each in commands)
            return handle(connection, frames)

        served.call(lambda: setattr(served.dispatcher, "handle", note))
        bulk = Bulk(tmp_path / "data", parse_address(served.server.broker_address), "127.0.0.1", 0, token=TOKEN)
        try:
            wait_until(lambda: bool(BrokerClient(served.address).state().bulk))
            asked.clear()
            broker = BrokerClient(served.address, token=TOKEN)
            epoch = broker.register("", "").epoch
            broker.note("waits")
            broker.report({"batch": 1})
            broker.stage(Stage(epoch, (0, 0), (0, 1), (), 0, 0))
            broker.jobs()
            with BulkClient(broker.bulk()) as client:
                client.upload(f"{epoch:06d}-x", 0, [])
                assert list(client.near()) == []
        finally:
            bulk.close()
    codes_of = {True: set[int](), False: set[int]()}
    for command, is_ours in asked:
        codes_of[is_ours and command.fields["AccessKey"] == TOKEN_USER].add(command.code)
    assert codes_of[False] == {Request.GET_BROKER_CLUSTER_INFO}
    assert codes_of[True] >= {
        Request.REGISTER_PIPELINE, Request.STAGE, Request.REPORT_BATCH, Request.JOB, Request.GET_BULK_STATE,
        Request.GET_CHUNKS, Request.GET_NEAR,
    }  # fmt: skip


def test_a_pipeline_without_the_token_is_told_how_to_give_it(tmp_path: Path) -> None:
    with serving(tmp_path / "data", SystemClock()) as served:
        served.call(lambda: setattr(served.dispatcher, "handle", refuse_all))
        with pytest.raises(Refused, match=r"you may not; a pipeline needs the token .* --token-file FILE"):
            BrokerClient(served.address, token="").state()


def refuse_all(connection: Connection, frames: list[bytes]) -> int:
    for frame in frames:
        connection.write(reply(decode(frame), codes.NO_PERMISSION, remark="you may not"))
    return len(frames)


# -- exhaustion -------------------------------------------------------------------------------------------------


def selected(count: int) -> pa.Table:
    return pa.table({field.name: pa.array(range(count), field.type) for field in SELECTED}, SELECTED)


def test_a_selection_is_counted_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it was collected without a bound, and then refused."""
    monkeypatch.setattr("postdate.bulk.upload.SELECTION_ROWS_MAX", 20)
    read: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in selected(1_000).to_batches(max_chunksize=10):
            read.append(batch.num_rows)
            yield batch

    selections = Selections(RealDisk(tmp_path))
    with pytest.raises(UsageError, match="has 30 rows or more, the limit is 20"):
        selections.write("00000001-0", batches())
    assert read == [10, 10, 10]
    assert selections.write("00000001-0", selected(20).to_batches()) == 20


def test_chunks_that_are_never_staged_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.bulk.flight.UNSTAGED_MAX", 2)
    with serving(tmp_path / "data", ManualClock(T0), stage_ahead_ms_max=3 * DAY_MS) as served:
        make_topics(served, TOPIC)
        sent(served, far(1))
        with bulking(served, tmp_path / "data") as client:
            rows = client.read()
            client.broker.register("", "")
            client.put("000001-1", [chunk_batch(rows)])
            client.put("000001-2", [chunk_batch(rows)])
            with pytest.raises(flight.FlightServerError, match="2 chunks of this epoch are not staged, the limit"):
                client.put("000001-3", [chunk_batch(rows)])
            client.broker.stage(Stage(1, (0, 1), (0, T0 + 2 * DAY_MS), ("000001-1",), 1, 1))
            client.put("000001-3", [chunk_batch(rows)])
            client.broker.register("", "")
            client.put("000002-1", [chunk_batch(rows)])
            names = sorted(path.name for path in (tmp_path / "data" / "chunks").iterdir())
            assert names == ["000001-1", "000002-1"]


class FullDisk(RealDisk):
    def space(self) -> tuple[int, int]:
        return 1 << 40, 1 << 16


def test_chunks_leave_room_for_the_log(tmp_path: Path) -> None:
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, far(1))
        with bulking(served, tmp_path / "data", FullDisk(tmp_path / "data")) as client:
            rows = client.read()
            client.broker.register("", "")
            with pytest.raises(flight.FlightServerError, match="65536 bytes are free, and the log needs 2 segments"):
                client.put("000001-1", [chunk_batch(rows)])
        assert not list((tmp_path / "data").glob("chunks/*"))


def test_a_batch_of_a_chunk_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postdate.bulk.upload.BATCH_BYTES_MAX", 100)
    with serving(tmp_path / "data", ManualClock(T0)) as served:
        make_topics(served, TOPIC)
        sent(served, far(1))
        with bulking(served, tmp_path / "data") as client:
            rows = client.read()
            client.broker.register("", "")
            with pytest.raises(flight.FlightServerError, match=r"a batch has .* bytes, the limit is 100"):
                client.put("000001-1", [chunk_batch(rows)])
        assert not list((tmp_path / "data").glob("chunks/*"))


def test_one_address_cannot_take_all_jobs(tmp_path: Path) -> None:
    """Before, a hundred open jobs of one client shut all others out."""
    with serving(tmp_path / "data", ManualClock(T0), jobs_per_user_max=3) as served:
        broker = BrokerClient(served.address)

        def ask(name: str) -> None:
            broker._job("ask", {"id": name, "op": "cancel", "where": "true", "by_ms": 0})

        for name in "abc":
            ask(name)
        ask("a")
        with pytest.raises(FlowControl, match="jobs_per_user_max: 3 jobs of 127"):
            ask("d")
        with connected(served) as peer:  # many at once, too
            asked = [orjson.dumps({"call": "ask", "id": f"e{n}", "op": "cancel", "where": "true"}) for n in range(9)]
            broker.fail_job("a", "not wanted any more")
            opaques = [peer.say(Request.JOB, body) for body in asked]
            answers = [peer.answer_to(opaque).code for opaque in opaques]
        assert answers.count(codes.SUCCESS) == 1


# -- on the wire ------------------------------------------------------------------------------------------------


def test_rows_travel_over_tls_and_nobody_without_the_authority_gets_any(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "ca").sign("bulk")
    certificate = (Path(pair.certificate).read_bytes(), Path(pair.key).read_bytes())
    with serving(tmp_path / "data", SystemClock(), token=TOKEN) as served:
        make_topics(served, TOPIC)
        sent(served, message("secret", due=served.clock.now_ms() + DAY_MS))
        broker = parse_address(served.server.broker_address)
        bulk = Bulk(tmp_path / "data", broker, "127.0.0.1", 0, token=TOKEN, certificate=certificate)
        try:
            client = BrokerClient(served.address, token=TOKEN)
            wait_until(lambda: bool(client.state().bulk))
            assert client.state().bulk == f"tls:127.0.0.1:{bulk.address.port}"
            permit = client.bulk().partition(" ")[2]
            for place in (client.bulk(), f"{bulk.address} {permit}"):  # an authority of the system's, or no TLS at all
                with BulkClient(place) as reader, pytest.raises(flight.FlightUnavailableError):
                    reader.probe()
            trusting = BrokerClient(served.address, token=TOKEN, login=Login(ca_file=pair.ca))
            with BulkClient(trusting.bulk()) as reader:
                assert [batch.num_rows for batch in reader.far(0, 9)] == [1]
        finally:
            bulk.close()


def test_bulk_on_a_socket_has_no_port(tmp_path: Path) -> None:
    with serving(tmp_path / "data", SystemClock(), token=TOKEN) as served:
        make_topics(served, TOPIC)
        sent(served, message("secret", due=served.clock.now_ms() + DAY_MS))
        socket, broker = tmp_path / "data" / "bulk.sock", parse_address(served.server.broker_address)
        bulk = Bulk(tmp_path / "data", broker, "127.0.0.1", 0, token=TOKEN, socket=socket)
        try:
            client = BrokerClient(served.address, token=TOKEN)
            wait_until(lambda: bool(client.state().bulk))
            assert client.state().bulk == f"unix:{socket}"
            assert bulk.address.port <= 0
            with BulkClient(client.bulk()) as reader:
                assert [batch.num_rows for batch in reader.far(0, 9)] == [1]
        finally:
            bulk.close()

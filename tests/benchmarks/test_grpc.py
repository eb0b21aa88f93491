"""The benchmark over gRPC, as far as it needs no RocketMQ and no Java: what is measured, and raw connections."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.grpc import raw
from benchmarks.grpc.caller import SENDS, Caller
from benchmarks.grpc.measures import IDLE_COUNT, POLLING_S, idle_rows, idle_size, measures, names, raw_rows, warming
from benchmarks.grpc.topics import make_topic_and_group
from benchmarks.rocketmq.program import Failed
from benchmarks.rocketmq.systems import Postdate, postdate
from benchmarks.server import Peer
from postdate.wire.http2 import END_HEADERS, END_STREAM, GOAWAY, HEADERS, RST_STREAM, WINDOW_UPDATE, encode_frame
from postdate.wire.requests import Request

TOPIC = "bench"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Postdate]:
    with postdate(tmp_path, "sync") as running:
        yield running


def nobody(caller: Caller) -> None:
    raise AssertionError(caller)


class Wire(asyncio.Transport):
    """What a caller writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        pass


# -- what is measured -------------------------------------------------------------------------------------------


def test_no_two_measures_share_a_line_of_the_table_or_a_name() -> None:
    rows = [row.name for measure in measures(1.0) for row in measure.rows]
    rows += [row.name for row in (*raw_rows(), *idle_rows(IDLE_COUNT, POLLING_S))]
    assert len(rows) == len(set(rows))
    assert len(names()) == len(set(names()))


def test_goals_stay_where_counts_are_smaller() -> None:
    full, small = measures(1.0), measures(0.01)
    for one, other in zip(full, small, strict=True):
        assert [row.goal for row in one.rows] == [row.goal for row in other.rows]
        assert one.messages > other.messages


def test_warming_takes_every_way_that_is_measured() -> None:
    assert [measure.name for measure in warming(1.0)] == [measure.name for measure in measures(1.0)]


def test_idle_connections_ask_as_often_in_a_small_run() -> None:
    count, polling_s = idle_size(0.1)
    assert count / polling_s == IDLE_COUNT / POLLING_S


# -- raw connections --------------------------------------------------------------------------------------------


def test_a_topic_is_made_for_delays_and_its_group_with_it(server: Postdate) -> None:
    assert make_topic_and_group(server, TOPIC) == server.grpc_address
    with Peer(server.broker_address) as broker:
        topic = broker.ask(Request.GET_TOPIC_CONFIG, {"topic": TOPIC})
        groups = broker.ask(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})
    assert b"DELAY" in topic.body
    assert b"group-bench" in groups.body


def test_raw_sends_are_stored_and_cost_something(server: Postdate) -> None:
    make_topic_and_group(server, TOPIC)
    sending = raw.send(server, TOPIC, 200)
    assert sending.rate > 0
    assert sending.cpu_us > 0


def test_idle_connections_are_answered_that_there_is_nothing_and_ask_again(server: Postdate) -> None:
    make_topic_and_group(server, TOPIC)
    assert raw.idle(server, TOPIC, 3, 0.1).cpu_percent > 0


def test_another_answer_than_expected_fails_the_measure(server: Postdate) -> None:
    with pytest.raises(Failed, match="code 40002"):
        raw.send(server, "no topic's name", 1)


@pytest.mark.parametrize("kind", [RST_STREAM, GOAWAY])
def test_a_server_that_ends_a_call_otherwise_fails_the_measure(kind: int) -> None:
    async def tell() -> None:
        problem = asyncio.get_running_loop().create_future()
        caller = Caller(SENDS, "raw", [], nobody, problem)
        caller.connection_made(Wire())
        caller.data_received(encode_frame(kind, 0, 1, bytes(8)))
        await problem

    with pytest.raises(Failed, match=f"frame of kind {kind}"):
        asyncio.run(tell())


def test_an_end_without_an_answer_fails_the_measure() -> None:
    async def tell() -> None:
        problem = asyncio.get_running_loop().create_future()
        caller = Caller(SENDS, "raw", [], nobody, problem)
        caller.data_received(encode_frame(HEADERS, END_HEADERS | END_STREAM, 1, b"\x88"))
        await problem

    with pytest.raises(Failed, match="code 0"):
        asyncio.run(tell())


def test_a_connection_that_the_server_closes_fails_the_measure_and_one_that_we_close_does_not() -> None:
    async def tell() -> None:
        problem = asyncio.get_running_loop().create_future()
        ours, theirs = (Caller(SENDS, "raw", [], nobody, problem) for _ in range(2))
        for caller in (ours, theirs):
            caller.connection_made(Wire())
        ours.close()
        ours.connection_lost(None)
        assert not problem.done()
        theirs.connection_lost(None)
        await problem

    with pytest.raises(Failed, match="was closed"):
        asyncio.run(tell())


def test_a_caller_stays_within_the_window_of_its_server() -> None:
    async def tell() -> None:
        problem = asyncio.get_running_loop().create_future()
        caller = Caller(SENDS, "raw", [bytes(60_000)] * 3, nobody, problem)
        caller.connection_made(Wire())
        caller.call()
        caller.data_received(encode_frame(WINDOW_UPDATE, 0, 0, (60_000).to_bytes(4, "big")))
        caller.call()
        with pytest.raises(AssertionError, match="beyond the server's window"):
            caller.call()

    asyncio.run(tell())

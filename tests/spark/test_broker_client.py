"""The pipeline's client of the broker, against a real server and against peers that misbehave."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from postdate.client.errors import BrokerError, Disconnected, TimedOut, Unreachable
from postdate.clock import ManualClock
from postdate.contract import BatchSize, Selection, Stage
from postdate.errors import ProtocolError, Refused, TopicNotFound, UsageError
from postdate.spark.executor import broker_client
from postdate.spark.executor.broker_client import BrokerClient
from tests.support.core import HOUR_MS, T0, TOPIC
from tests.support.server import serving


def test_a_pipeline_registers_stages_and_reports(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), stage_ahead_ms_max=HOUR_MS) as served:
        broker = BrokerClient(served.address)
        state = broker.state()
        assert (state.epoch, state.taken, state.now_ms, state.stop) == (0, 0, T0, None)
        assert broker.state(BatchSize(0, 10, 1 << 20)).stop == 0
        registered = broker.register("s3://elsewhere/table", "local[*]")
        assert (registered.epoch, registered.staged, registered.table) == (1, (), "s3://elsewhere/table")
        stage = Stage(1, (0, 0), (0, T0 + HOUR_MS), (), 0, 0)
        broker.stage(stage)
        with pytest.raises(Refused, match="the stage is refused"):
            broker.stage(stage)
        broker.report({"batch": 1, "rows": 2, "total_s": 0.5, "master": "local[*]"})
        assert broker.state().horizon == T0 + HOUR_MS


def test_jobs_are_begun_found_decided_and_ended(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served:
        broker = BrokerClient(served.address)
        with pytest.raises(Refused, match="there is no table to import into"):
            broker.begin_import("one", TOPIC)
        broker.register("/table", "local")
        with pytest.raises(TopicNotFound):
            broker.begin_import("one", TOPIC)
        served.call(lambda: served.broker.put_topic(TOPIC, T0, read_queue_count=2, write_queue_count=2))
        order = broker.begin_import("one", TOPIC)
        assert (order.is_new, order.table, order.job.state, len(order.queues)) == (True, "/table", "loading", 2)
        broker.note_progress("one", "loading", 7, 0)
        assert (broker.find_job("one").step, broker.find_job("one").done) == ("loading", 7)
        file = ("_import-one-soon-0.parquet", 10, 1, T0 + HOUR_MS, T0 + HOUR_MS, 1 << 61, 1 << 61)
        assert broker.adopt("one", [file], 0).state == "waiting"
        assert broker.find_job("one").step == "", "it loads no more, and nobody has begun to take it in"
        carried = broker.order(order.job.number)
        assert [tuple(each) for each in carried.files] == [file]
        assert broker.decide(Selection(1, carried.number, ())).state == "running"
        assert [job.id for job in broker.jobs()] == ["one"]
        broker.begin_import("two", TOPIC)
        assert broker.fail_job("two", "interrupted").reason == "interrupted"
        with pytest.raises(BrokerError, match="there is no job 'three'"):
            broker.find_job("three")


def test_the_first_address_that_answers_serves(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served:
        broker = BrokerClient(f"127.0.0.1:1;{served.address}")
        assert broker.state().now_ms == T0
        assert (broker.address, broker.addresses) == (served.address, f"127.0.0.1:1;{served.address}")
    with pytest.raises(Unreachable, match=r"none of 127.0.0.1:1, .* answers; the last one: no broker at"):
        broker.state()


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(UsageError, match="expected host:port"):
        BrokerClient("nowhere")
    with pytest.raises(UsageError, match="expected host:port"):
        BrokerClient(bulk="nowhere")


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """A peer that reads once, then writes an answer and closes, or says nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                if answer is None:
                    ended.wait(10)
                else:
                    peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def frame(header: bytes) -> bytes:
    return (4 + len(header)).to_bytes(4) + len(header).to_bytes(4) + header


@pytest.mark.parametrize(
    ("answer", "error", "sentence"),
    [
        (b"", Disconnected, "the connection was lost: the broker has closed it"),
        (frame(b'{"code":0}')[:-3], Disconnected, "the connection was lost"),
        (frame(b"[]"), ProtocolError, "does not speak the protocol"),
        (frame(b'{"remark":"x"}'), ProtocolError, "does not speak the protocol"),
        (frame(b'{"code":0}') + b"", ProtocolError, "the answer of .* cannot be read"),
        (frame(b'{"code":604,"remark":"no"}'), Refused, "no"),
        (frame(b'{"code":3,"remark":"never heard of it"}'), BrokerError, "never heard of it"),
        (None, TimedOut, "no answer from .* within 0.2 s"),
    ],
)
def test_a_peer_that_misbehaves_is_named(answer: bytes | None, error: Any, sentence: str) -> None:
    with answering(answer) as address, pytest.raises(error, match=sentence):
        BrokerClient(address, ask_s=0.2 if answer is None else 5.0).state()


def test_away_means_that_a_later_try_may_pass() -> None:
    assert issubclass(Disconnected, broker_client.AWAY)
    assert not issubclass(Refused, broker_client.AWAY)

"""Our client and two brokers: by a list of their addresses, and by one route that names both.

Postdate has no such route; RocketMQ's name server is one. The one here asks both brokers and joins their answers.
"""

import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

import postdate
from benchmarks.server import Peer
from postdate import Cancelled, Moved
from postdate.wire import codes
from postdate.wire.frame import Command, Frames, decode, reply
from postdate.wire.requests import Request
from tests.support.server import WAIT_S, Served, serving

TOPIC, GROUP, QUEUES = "orders", "billing", 4
Pair = tuple[Served, Served]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with (
        serving(tmp_path / "a", broker_name="alpha") as alpha,
        serving(tmp_path / "b", broker_name="beta") as beta,
    ):
        for served in (alpha, beta):
            put_topic(served)
        yield alpha, beta


def put_topic(served: Served) -> None:
    fields = {"topic": TOPIC, "readQueueNums": QUEUES, "writeQueueNums": QUEUES, "perm": 6}
    with Peer(served.server.broker_address) as peer:
        assert peer.ask(Request.UPDATE_AND_CREATE_TOPIC, fields).code == codes.SUCCESS


def accepted(served: Served) -> int:
    return served.call(lambda: served.broker.accepted_count)


def tombstones(served: Served) -> int:
    return served.call(lambda: served.broker.fold.cancels.count)


@contextmanager
def joined_route(pair: Pair) -> Iterator[str]:
    """The address of a route that names both brokers."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            frames = Frames()
            while data := self.request.recv(65_536):
                for frame in frames.feed(data):
                    self.request.sendall(joined(decode(frame), pair))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()


def joined(command: Command, pair: Pair) -> bytes:
    if command.code != Request.GET_ROUTEINFO_BY_TOPIC:
        return reply(command, codes.REQUEST_CODE_NOT_SUPPORTED)
    found: list[dict[str, Any]] = []
    for served in pair:
        with Peer(served.address) as peer:
            answer = peer.ask(command.code, dict(command.fields))
        if answer.code == codes.SUCCESS:
            found.append(orjson.loads(answer.body))
    if not found:
        return reply(command, codes.TOPIC_NOT_EXIST)
    lists = {name: [each for route in found for each in route[name]] for name in ("brokerDatas", "queueDatas")}
    return reply(command, codes.SUCCESS, body=orjson.dumps(found[0] | lists))


def test_a_client_with_a_list_of_two_brokers_uses_the_first_alone(pair: Pair) -> None:
    alpha, beta = pair
    with postdate.connect(f"{alpha.address};{beta.address}") as client:
        for number in range(8):
            client.send(TOPIC, str(number))
    assert (accepted(alpha), accepted(beta)) == (8, 0)


def test_a_client_takes_the_next_of_its_list_where_the_first_does_not_answer(pair: Pair) -> None:
    alpha, beta = pair
    alpha.stop()
    with postdate.connect(f"{alpha.address};{beta.address}") as client:
        client.send(TOPIC, "x")
    assert accepted(beta) == 1


def test_sends_go_to_all_brokers_of_a_route_and_cancels_to_the_one_that_has_the_message(pair: Pair) -> None:
    with joined_route(pair) as route, postdate.connect(route) as client:
        receipts = [client.send(TOPIC, str(number), delay="1h") for number in range(4 * QUEUES)]
        assert [accepted(served) for served in pair] == [2 * QUEUES, 2 * QUEUES]
        assert [client.cancel(receipt) for receipt in receipts] == [Cancelled.CANCELLED] * len(receipts)
    assert [tombstones(served) for served in pair] == [2 * QUEUES, 2 * QUEUES]


def test_a_key_is_found_cancelled_and_moved_at_all_brokers_of_a_route(pair: Pair) -> None:
    with joined_route(pair) as route, postdate.connect(route) as client:
        ids = {client.send(TOPIC, str(number), delay="1h", key="k").id for number in range(2 * QUEUES)}
        assert [accepted(served) for served in pair] == [QUEUES, QUEUES]
        assert {message.id for message in client.find(TOPIC, "k")} == ids
        with pytest.raises(postdate.UsageError, match="has 2 brokers, and only= needs one"):
            client.cancel(topic=TOPIC, key="k", only=True)
        moved = client.postpone(topic=TOPIC, key="k", by="1h")
        assert {message.id for message in moved if message.outcome is Moved.MOVED} == ids
        cancelled = client.cancel(topic=TOPIC, key="k")
        assert {message.id for message in cancelled if message.outcome is Cancelled.CANCELLED} == ids


def test_a_group_shares_the_queues_of_all_brokers_of_a_route(pair: Pair) -> None:
    """Two members, each with its share of both brokers: every message comes."""
    count, found, done = 8 * QUEUES, Counter[bytes](), threading.Event()
    lock = threading.Lock()

    def consume(client: postdate.Client) -> None:
        for message in client.consume(TOPIC, GROUP):
            with lock:
                found[message.body] += 1
                if len(found) == count:
                    done.set()

    with joined_route(pair) as route:
        with postdate.connect(route) as first, postdate.connect(route) as second, postdate.connect(route) as producer:
            threads = [threading.Thread(target=consume, args=(client,), daemon=True) for client in (first, second)]
            for thread in threads:
                thread.start()
            for number in range(count):
                producer.send(TOPIC, str(number), delay="500ms")
            assert done.wait(WAIT_S), f"{len(found)} of {count} came"
        for thread in threads:
            thread.join(WAIT_S)
    assert set(found) == {str(number).encode() for number in range(count)}
    assert [accepted(served) for served in pair] == [count // 2, count // 2]

"""A client we did not write: the PyPI package `rocketmq`, which bundles RocketMQ's C++ core.

It runs native threads and writes logs to the home folder, so each scenario is a process of its own: this file, started
as a program, with the address of the broker and the name of a function below. It prints one JSON line per event.
"""

import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dialogue import connected, properties_of, read_all
from serving import Served, serving

from postdate.wire import codes

PROCESS_S = 60.0
RECEIVE_S = 30.0
TOPIC = "orders"

# -------------------------------------------------------------------------------------- what the other process does


class Client:
    """A producer, and consumers that put what they get into `received`."""

    def __init__(self, address: str) -> None:
        from rocketmq.client import Producer

        self._address = address
        self.received: queue.Queue[dict[str, Any]] = queue.Queue()
        self._consumers: list[Any] = []
        self.producer = Producer("producers")
        self.producer.set_namesrv_addr(address)
        self.producer.start()

    def message(self, body: str, *, tag: str = "", key: str = "", level: int = 0, **properties: str) -> Any:
        from rocketmq.client import Message

        made = Message(TOPIC)
        made.set_body(body)
        if tag:
            made.set_tags(tag)
        if key:
            made.set_keys(key)
        if level:
            made.set_delay_time_level(level)
        for name, value in properties.items():
            made.set_property(name, value)
        return made

    def send(self, body: str, **how: Any) -> None:
        result = self.producer.send_sync(self.message(body, **how))
        tell(event="sent", body=body, status=int(result.status), id=result.msg_id, offset=result.offset)

    def consume(
        self, group: str, expression: str = "*", *, orderly: bool = False, is_done: Callable[[Any], bool] | None = None
    ) -> None:
        """Starts a consumer. A message that is not done by the first try comes again later."""
        from rocketmq.client import PushConsumer, RecvMessage
        from rocketmq.ffi import _CConsumeStatus, dll

        def on_message(_consumer: Any, handle: Any) -> int:
            got = RecvMessage(handle)
            self.received.put(
                {
                    "body": got.body.decode(), "tag": got.tags.decode(), "key": got.keys.decode(), "topic": got.topic,
                    "queue": got.queue_id, "times": got.reconsume_times, "at_ms": time.time_ns() // 1_000_000,
                }
            )  # fmt: skip
            status = _CConsumeStatus.CONSUME_SUCCESS
            if is_done is not None and not is_done(got):
                status = _CConsumeStatus.RECONSUME_LATER
            return int(status.value)

        consumer = PushConsumer(group, orderly=orderly)
        consumer.set_namesrv_addr(self._address)
        dll.Subscribe(consumer._handle, TOPIC.encode(), expression.encode())
        consumer._register_callback(on_message)
        consumer.start()
        self._consumers.append(consumer)

    def receive(self) -> dict[str, Any]:
        """Tells the next message."""
        got = self.received.get(timeout=RECEIVE_S)
        tell(event="got", **got)
        return got


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def plain(client: Client) -> None:
    client.send("hello", tag="paid", key="order-7")
    client.send("x" * 20_000)  # compressed by the client
    client.consume("workers")
    for _ in range(2):
        client.receive()
    client.send("while it waits")
    client.receive()


def tags(client: Client) -> None:
    for tag in ("a", "b", "c"):
        client.send(f"tagged {tag}", tag=tag)
    client.consume("workers", "a || c")
    for _ in range(2):
        client.receive()
    client.send("tagged b again", tag="b")
    client.send("the end", tag="c")
    client.receive()


def oneway(client: Client) -> None:
    client.producer.send_oneway(client.message("nobody waits"))
    client.consume("workers")
    client.receive()


def batch(client: Client) -> None:
    result = client.producer.send_batch([client.message(f"inner {n}") for n in range(3)])
    tell(event="sent", status=int(result.status), id=result.msg_id)
    client.consume("workers")
    for _ in range(3):
        client.receive()


def in_order(client: Client) -> None:
    for n in range(6):
        result = client.producer.send_orderly(client.message(f"{n % 2}:{n}"), n % 2)
        tell(event="sent", status=int(result.status))
    client.consume("workers", orderly=True)
    for _ in range(6):
        client.receive()


def by_level(client: Client) -> None:
    client.send("first, so that the topic is there")
    client.consume("workers")
    client.receive()
    tell(event="sending", at_ms=time.time_ns() // 1_000_000)
    client.send("level 1", level=1)
    client.receive()


def by_property(client: Client) -> None:
    client.send("first, so that the topic is there")
    client.consume("workers")
    client.receive()
    tell(event="sending", at_ms=time.time_ns() // 1_000_000)
    client.send("timed", TIMER_DELAY_MS="700")
    client.receive()


def again(client: Client) -> None:
    client.send("hard work")
    client.consume("workers", is_done=lambda got: got.reconsume_times == 2)
    for _ in range(3):
        client.receive()


def by_pull(client: Client) -> None:
    from rocketmq.client import PullConsumer

    for n in range(5):
        client.send(f"pulled {n}")
    consumer = PullConsumer("pullers")
    consumer.set_namesrv_addr(client._address)
    consumer.start()
    for got in consumer.pull(TOPIC):
        tell(event="got", body=got.body.decode())


def refused(client: Client) -> None:
    try:
        client.send("bad", TIMER_DELAY_MS="soon")
    except Exception as error:
        tell(event="refused", error=type(error).__name__)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (plain, tags, oneway, batch, in_order, by_level, by_property, again, by_pull, refused)
}


def main(address: str, name: str) -> None:
    SCENARIOS[name](Client(address))
    tell(event="end")
    os._exit(0)  # without the destructors of the library, which may wait for long


# ------------------------------------------------------------------------------------------------------ the tests


def run(served: Served, folder: Path, scenario: Callable[[Client], None]) -> list[dict[str, Any]]:
    """The events of a scenario, without the last one, which says that it came to its end."""
    command = [sys.executable, __file__, served.address, scenario.__name__]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, env=environment, check=False)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, (done.returncode, events, done.stderr[-2_000:])
    assert events.pop() == {"event": "end"}
    return events


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


def test_messages_arrive_as_they_were_sent(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "data") as served:
        events = run(served, home, plain)
        assert [event["status"] for event in of_kind(events, "sent")] == [0, 0, 0]
        assert all(event["id"] for event in of_kind(events, "sent"))
        bodies = {event["body"]: event for event in of_kind(events, "got")}
        assert bodies.keys() == {"hello", "x" * 20_000, "while it waits"}
        assert (bodies["hello"]["tag"], bodies["hello"]["key"]) == ("paid", "order-7")
        assert {event["topic"] for event in bodies.values()} == {TOPIC}
        stored = served.call(lambda: [served.broker.offsets(TOPIC, n)[1] for n in range(4)])
        assert sum(stored) == 3, "the topic has the four queues that the client asks for"


def test_a_consumer_gets_the_tags_that_it_wants(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "data") as served:
        bodies = [event["body"] for event in of_kind(run(served, home, tags), "got")]
        assert sorted(bodies) == ["tagged a", "tagged c", "the end"]


def test_a_oneway_message_arrives(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "data") as served:
        assert [event["body"] for event in of_kind(run(served, home, oneway), "got")] == ["nobody waits"]


def test_a_batch_arrives_message_by_message(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "data") as served:
        events = run(served, home, batch)
        assert [event["status"] for event in of_kind(events, "sent")] == [0]
        assert sorted(event["body"] for event in of_kind(events, "got")) == ["inner 0", "inner 1", "inner 2"]


def test_messages_of_one_queue_arrive_in_order(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "data") as served:
        got = of_kind(run(served, home, in_order), "got")
        for part in ("0", "1"):
            mine = [event for event in got if event["body"].startswith(part)]
            assert [event["body"] for event in mine] == [f"{part}:{n}" for n in range(int(part), 6, 2)]
            assert {event["queue"] for event in mine} == {int(part)}


@pytest.mark.parametrize(("scenario", "delay_ms"), [(by_level, 1_000), (by_property, 700)])
def test_a_delayed_message_does_not_arrive_before_it_is_due(
    tmp_path: Path, home: Path, scenario: Callable[[Client], None], delay_ms: int
) -> None:
    with serving(tmp_path / "data") as served:
        events = run(served, home, scenario)
        (begin,) = of_kind(events, "sending")
        late = of_kind(events, "got")[-1]
        assert late["body"] in ("level 1", "timed")
        assert late["at_ms"] - begin["at_ms"] >= delay_ms


def test_what_a_consumer_could_not_do_comes_again(tmp_path: Path, home: Path) -> None:
    # The client sends back to the address that stands in the message, so the broker must know its port beforehand.
    with serving(tmp_path / "data", message_delay_level="1s 1s 1s", broker_port=free_port()) as served:
        got = of_kind(run(served, home, again), "got")
        assert [(event["body"], event["times"]) for event in got] == [("hard work", n) for n in range(3)]
        for earlier, later in itertools.pairwise(got):
            assert later["at_ms"] - earlier["at_ms"] >= 1_000
        with connected(served) as peer:
            records = read_all(peer, "%RETRY%workers")
            assert [properties_of(record)["RETRY_TOPIC"] for record in records] == [TOPIC, TOPIC]


def test_a_consumer_may_pull_by_itself(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "data") as served:
        got = of_kind(run(served, home, by_pull), "got")
        assert sorted(event["body"] for event in got) == [f"pulled {n}" for n in range(5)]


def test_a_refusal_reaches_the_caller_and_nothing_is_stored(tmp_path: Path, home: Path) -> None:
    with serving(tmp_path / "data") as served:
        assert len(of_kind(run(served, home, refused), "refused")) == 1
        with connected(served) as peer:
            answer = peer.ask(codes.GET_TOPIC_STATS_INFO, topic=TOPIC)
            assert b'"maxOffset":1' not in answer.body


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

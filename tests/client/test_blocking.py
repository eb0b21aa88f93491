"""The blocking client against a real server. Waiting is for events, with generous limits; delays are short."""

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import uvloop

import postdate
from postdate import Cancelled, Client, Outgoing, ReceivedMessage
from postdate.spans import instant, instant_ms
from postdate.wire.ids import parse_recall_handle
from tests.support.handles import recall_handle
from tests.support.server import WAIT_S, Served, serving

TOPIC, GROUP = "orders", "billing"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    # Levels of a second, so that a retry, which has level 3 at first, comes soon.
    with serving(tmp_path / "data", message_delay_level="1s 1s 1s 1s") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with postdate.connect(served.address, timeout=WAIT_S) as connected:
        yield connected


@contextmanager
def limited(client: Client) -> Iterator[None]:
    """Ends loops over messages that would wait for ever: a test then fails instead."""
    timer = threading.Timer(WAIT_S, client.close)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def receive(client: Client, count: int, topic: str = TOPIC, group: str = GROUP) -> list[ReceivedMessage]:
    """The next messages of a group; all but the last are acknowledged."""
    found: list[ReceivedMessage] = []
    with limited(client):
        for message in client.consume(topic, group):
            found.append(message)
            if len(found) == count:
                break
    assert len(found) == count
    return found


def bodies(messages: list[ReceivedMessage]) -> list[bytes]:
    return sorted(message.body for message in messages)


def run(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], object]) -> None:
    """Waits for something that another thread does."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- sending and receiving


def test_a_message_arrives_as_it_was_sent(client: Client) -> None:
    receipt = client.send(TOPIC, b"timeout 42", key=[42, "43"], tag="late", properties={"colour": "rot ä"})
    (message,) = receive(client, 1)
    assert (message.topic, message.body, message.tag, message.key) == (TOPIC, b"timeout 42", "late", "42")
    assert (message.id, message.offset_id, message.attempt) == (receipt.id, receipt.offset_id, 1)
    assert (message.queue_id, message.queue_offset) == (receipt.queue_id, receipt.queue_offset)
    assert message.properties["colour"] == "rot ä"
    assert message.due_at is None
    assert message.born_at <= message.stored_at
    assert (receipt.handle, receipt.due_at_ms, str(receipt)) == (None, None, receipt.id)


def test_queues_take_turns_unless_one_is_named(client: Client) -> None:
    assert {client.send(TOPIC, "x").queue_id for _ in range(8)} == {0, 1, 2, 3}
    assert {client.send(TOPIC, "x", queue=2).queue_id for _ in range(3)} == {2}
    with pytest.raises(postdate.UsageError, match="no queue 99"):
        client.send(TOPIC, "x", queue=99)


def test_nothing_comes_before_it_is_due(client: Client) -> None:
    at = datetime.now(UTC) + timedelta(milliseconds=300)
    by_delay = client.send(TOPIC, "delay", delay="200ms")
    by_at = client.send(TOPIC, "at", at=at)
    by_level = client.send(TOPIC, "level", level=1)
    found = {message.body: message for message in receive(client, 3)}
    assert by_at.due_at_ms == instant_ms(at)
    assert found[b"at"].due_at == instant(instant_ms(at))
    for body, receipt in ((b"delay", by_delay), (b"at", by_at), (b"level", by_level)):
        assert receipt.due_at_ms is not None
        assert found[body].stored_at >= instant(receipt.due_at_ms)
        assert datetime.now(UTC) >= instant(receipt.due_at_ms)


def test_many_threads_share_one_client(client: Client, served: Served) -> None:
    ids: list[str] = []

    def send() -> None:
        ids.extend(client.send(TOPIC, "x").id for _ in range(50))

    for thread in [run(send) for _ in range(8)]:
        thread.join(WAIT_S)
    assert len(set(ids)) == 400
    assert served.call(lambda: sum(served.broker.offsets(TOPIC, queue)[1] for queue in range(4))) == 400


def test_a_batch_arrives_whole_and_its_delays_count(client: Client) -> None:
    messages = [Outgoing(f"{n:04}", key=str(n)) for n in range(1_500)]
    messages += [Outgoing("later", delay="200ms"), Outgoing("never", delay="1h")]
    receipts = client.send_batch(TOPIC, messages)
    assert client.cancel(receipts[-1]) is Cancelled.CANCELLED
    found = receive(client, 1_501)
    assert bodies(found) == [*(f"{n:04}".encode() for n in range(1_500)), b"later"]
    places = {message.id: (message.offset_id, message.queue_id, message.queue_offset) for message in found}
    for receipt in receipts[:1_500]:
        assert places[receipt.id] == (receipt.offset_id, receipt.queue_id, receipt.queue_offset)
    assert receipts[1_500].queue_offset is None
    assert client.send_batch(TOPIC, []) == []


def test_what_a_broker_refuses_has_a_name_and_its_sentence(client: Client) -> None:
    with pytest.raises(postdate.IllegalMessage, match="TIMER_DELAY_MS"):
        client.send(TOPIC, "x", delay="9999d")
    with pytest.raises(postdate.IllegalMessage, match="limit"):
        client.send(TOPIC, bytes(5_000_000))
    with pytest.raises(postdate.IllegalMessage, match="expected one or more"):
        client.send("no topic", "x")
    with pytest.raises(postdate.UsageError, match="at most one"):
        client.send(TOPIC, "x", delay="1s", level=1)


def test_a_topic_that_may_not_be_created_is_not_found(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data", auto_create_topics=False) as served,
        postdate.connect(served.address) as client,
        pytest.raises(postdate.TopicNotFound, match="does not create topics"),
    ):
        client.send(TOPIC, "x")


# -- cancelling


def test_a_cancelled_message_never_comes(client: Client) -> None:
    receipt = client.send(TOPIC, "never", delay="300ms")
    assert client.cancel(receipt) is Cancelled.CANCELLED
    client.send(TOPIC, "after", delay="600ms")
    assert bodies(receive(client, 1)) == [b"after"]


def test_a_cancel_tells_the_truth(client: Client) -> None:
    receipt = client.send(TOPIC, "x", delay="100ms")
    receive(client, 1)
    assert client.cancel(receipt) is Cancelled.DELIVERED
    assert client.cancel(client.send(TOPIC, "at once")) is Cancelled.DELIVERED
    waiting = client.send(TOPIC, "x", delay="1h")
    assert waiting.handle is not None
    topic, broker_name, due_at_ms, _ = parse_recall_handle(waiting.handle)
    assert client.cancel(recall_handle(topic, broker_name, due_at_ms, "nobody")) is Cancelled.UNKNOWN
    assert client.cancel(str(waiting)) is Cancelled.CANCELLED


def test_a_message_is_cancelled_by_key_and_due(client: Client) -> None:
    due = datetime.now(UTC) + timedelta(hours=1)
    client.send(TOPIC, "x", at=due, key="42")
    client.send(TOPIC, "x", at=due, key="43")
    assert client.cancel_key(TOPIC, "44", due) is Cancelled.UNKNOWN
    assert client.cancel_key(TOPIC, "42", due) is Cancelled.CANCELLED
    assert client.cancel_key(TOPIC, "43", instant_ms(due)) is Cancelled.CANCELLED


def test_what_is_no_handle_is_refused(client: Client) -> None:
    receipt = client.send(TOPIC, "x")
    with pytest.raises(postdate.UsageError, match="neither a receipt nor a recall handle"):
        client.cancel(str(receipt))
    with pytest.raises(postdate.TopicNotFound, match="no broker 'elsewhere'"):
        client.cancel(recall_handle(TOPIC, "elsewhere", 5_000, "U1"))
    with pytest.raises(postdate.TopicNotFound):
        client.cancel(recall_handle("nowhere", "elsewhere", 5_000, "U1"))


# -- acknowledging


def test_asking_for_the_next_message_acknowledges_and_leaving_does_not(client: Client) -> None:
    for body in ("a", "b", "c"):
        client.send(TOPIC, body, queue=0)
    assert bodies(receive(client, 2)) == [b"a", b"b"]
    second = receive(client, 2)
    assert bodies(second) == [b"b", b"c"]
    assert sorted((message.body, message.attempt) for message in second) == [(b"b", 2), (b"c", 1)]
    (third,) = receive(client, 1)
    assert (third.body, third.attempt) == (second[-1].body, second[-1].attempt + 1)


def test_an_acknowledged_message_does_not_come_again_when_the_loop_is_left(client: Client, served: Served) -> None:
    client.send(TOPIC, "a", queue=0)
    client.send(TOPIC, "b", queue=0)
    with limited(client):
        for message in client.consume(TOPIC, GROUP):
            message.acknowledge()
            message.acknowledge()
            assert served.call(lambda: served.broker.fold.groups.offset(GROUP, TOPIC, 0)) == 1
            break
    message.acknowledge()  # it is already, so there is nothing to say
    (second,) = receive(client, 1)
    assert second.body == b"b"
    with pytest.raises(postdate.UsageError, match=f"{second.id} cannot be acknowledged: the loop .* has ended"):
        second.acknowledge()


def test_a_loop_ends_when_nothing_has_come_for_a_while(client: Client) -> None:
    client.send(TOPIC, "a", queue=0)
    with limited(client):
        assert [message.body for message in client.consume(TOPIC, GROUP, idle="1s")] == [b"a"]
        client.send(TOPIC, "b", queue=0)
        assert [message.body for message in client.consume(TOPIC, GROUP, idle=1)] == [b"b"]
    with pytest.raises(postdate.UsageError, match="idle"):
        client.consume(TOPIC, GROUP, idle=0)


def test_a_forgotten_loop_that_is_cleared_away_in_the_clients_thread_does_not_stop_it(client: Client) -> None:
    class Forgotten:
        """A circle, so that only the collector finds it."""

        def __init__(self) -> None:
            self.itself = self
            self.messages = client.consume(TOPIC, GROUP)
            next(self.messages)

    client.send(TOPIC, "a", queue=0)
    gc.disable()
    try:
        Forgotten()
        client._loop._loop.call_soon_threadsafe(gc.collect)
        assert client.send(TOPIC, "b", queue=0).id
    finally:
        gc.enable()
    assert bodies(receive(client, 2)) == [b"a", b"b"]


def test_an_exception_in_the_loop_leaves_the_message_and_counts_as_an_attempt(client: Client) -> None:
    client.send(TOPIC, "a", queue=0)
    client.send(TOPIC, "b", queue=0)
    attempts: list[int] = []

    def fail_on_b() -> None:
        with limited(client):
            for message in client.consume(TOPIC, GROUP):
                if message.body == b"b":
                    attempts.append(message.attempt)
                    raise RuntimeError("the handler's own trouble")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            fail_on_b()
    (message,) = receive(client, 1)
    assert (attempts, message.body, message.attempt) == ([1, 2, 3], b"b", 4)


def test_groups_do_not_share_what_they_have_read(client: Client) -> None:
    client.send(TOPIC, "a")
    assert bodies(receive(client, 1, group="first")) == bodies(receive(client, 1, group="second")) == [b"a"]


def test_a_new_group_begins_where_it_says(client: Client) -> None:
    client.send(TOPIC, "old", queue=0)
    found: list[bytes] = []

    def listen() -> None:
        found.extend(message.body for message in client.consume(TOPIC, GROUP, from_="last"))

    listener = run(listen)
    # Until the consumer has found its place, what is sent may lie before it: send until something comes.
    until(lambda: client.send(TOPIC, "new", queue=0) and found)
    client.close()
    listener.join(WAIT_S)
    assert set(found) == {b"new"}


def test_tags_are_filtered(client: Client) -> None:
    for tag in ("paid", "open", "refunded", None, "paid"):
        client.send(TOPIC, tag or "none", tag=tag, queue=0)
    client.send(TOPIC, "end", tag="paid", delay="300ms")
    found = []
    with limited(client):
        for message in client.consume(TOPIC, GROUP, tag="paid || refunded"):
            found.append(message.body)
            if message.body == b"end":
                break
    assert found == [b"paid", b"refunded", b"paid", b"end"]


def test_a_consumer_waits_for_a_topic_that_is_not_there_yet(client: Client, served: Served) -> None:
    found: list[ReceivedMessage] = []
    consumer = run(lambda: found.extend(receive(client, 1)))
    until(lambda: served.call(lambda: GROUP in served.broker.fold.groups))  # it has joined
    client.send(TOPIC, "first")
    consumer.join(WAIT_S)
    assert bodies(found) == [b"first"]


# -- groups


def test_two_members_share_the_queues_and_one_takes_over(client: Client, served: Served) -> None:
    by_member: dict[str, set[int]] = {"a": set(), "b": set()}

    def listen(member: str, own: Client) -> None:
        for message in own.consume(TOPIC, GROUP):
            by_member[member].add(message.queue_id)

    def send_everywhere() -> bool:
        return all(client.send(TOPIC, "x", queue=queue) for queue in range(4))

    send_everywhere()
    with postdate.connect(served.address) as first, postdate.connect(served.address) as second:
        threads = [run(lambda: listen("a", first)), run(lambda: listen("b", second))]
        until(lambda: send_everywhere() and by_member["a"] and by_member["b"])

        def split() -> bool:
            by_member["a"].clear()
            by_member["b"].clear()
            send_everywhere()
            until(lambda: by_member["a"] | by_member["b"] == {0, 1, 2, 3})
            return not by_member["a"] & by_member["b"] and len(by_member["a"]) == len(by_member["b"]) == 2

        until(split)
        first.close()
        by_member["b"].clear()
        until(lambda: send_everywhere() and by_member["b"] == {0, 1, 2, 3})
    for thread in threads:
        thread.join(WAIT_S)


# -- retries


@pytest.mark.parametrize("delay", [None, "200ms"])
def test_a_retried_message_comes_again(client: Client, delay: str | None) -> None:
    receipt = client.send(TOPIC, "x", key="42", tag="paid", properties={"colour": "red"}, delay="50ms")
    attempts = []
    with limited(client):
        for message in client.consume(TOPIC, GROUP, tag="paid"):
            attempts.append(message.attempt)
            assert (message.topic, message.body, message.id) == (TOPIC, b"x", receipt.id)
            assert (message.key, message.tag, message.properties["colour"]) == ("42", "paid", "red")
            if message.attempt == 3:
                break
            message.retry(delay=delay)
    assert attempts == [1, 2, 3]


def test_a_retried_message_is_acknowledged_even_if_the_loop_is_left(client: Client) -> None:
    client.send(TOPIC, "a", queue=0)
    with limited(client):
        for message in client.consume(TOPIC, GROUP):
            message.retry(delay="1h")
            break
    client.send(TOPIC, "b", queue=0)
    assert bodies(receive(client, 1)) == [b"b"]


# -- listening


def test_a_handler_that_raises_gets_the_message_again(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[bytes, int]] = []

    def charge(message: ReceivedMessage) -> None:
        seen.append((message.body, message.attempt))
        if message.attempt == 1:
            raise RuntimeError("no money")

    client.send(TOPIC, "x")
    with caplog.at_level(logging.WARNING, "postdate.client"):
        listener = run(lambda: client.listen(TOPIC, GROUP, charge))
        until(lambda: (b"x", 2) in seen)
    client.close()
    listener.join(WAIT_S)
    assert not listener.is_alive()
    assert seen == [(b"x", 1), (b"x", 2)]
    (line,) = [record.getMessage() for record in caplog.records if "handler failed" in record.getMessage()]
    assert "RuntimeError: no money" in line
    assert "attempt 1" in line


@pytest.mark.parametrize("how", ["acknowledge", "retry"])
def test_a_handler_that_settles_its_message_and_then_raises_sends_nothing_back(
    client: Client, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    seen: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if message.body == b"x":
            message.acknowledge() if how == "acknowledge" else message.retry(delay="1h")
            raise RuntimeError("too late")

    client.send(TOPIC, "x", queue=0)
    client.send(TOPIC, "y", queue=0)
    with caplog.at_level(logging.WARNING, "postdate.client"):
        listener = run(lambda: client.listen(TOPIC, GROUP, handle))
        until(lambda: b"y" in seen)
    client.close()
    listener.join(WAIT_S)
    (line,) = [record.getMessage() for record in caplog.records if "handler failed" in record.getMessage()]
    assert "it had settled the message before: RuntimeError: too late" in line
    assert seen == [b"x", b"y"]


def test_past_its_attempts_a_message_is_a_dead_letter(client: Client, served: Served) -> None:
    def refuse(_message: ReceivedMessage) -> None:
        raise RuntimeError("never")

    client.send(TOPIC, "x", key="42")
    with postdate.connect(served.address) as other:
        listener = run(lambda: other.listen(TOPIC, GROUP, refuse, attempts=2))
        (letter,) = receive(client, 1, topic=f"%DLQ%{GROUP}", group="undertaker")
    listener.join(WAIT_S)
    assert (letter.body, letter.key, letter.topic) == (b"x", "42", TOPIC)


def test_threads_work_on_several_queues_at_once_and_keep_the_order_of_each(client: Client) -> None:
    together = threading.Barrier(2)
    by_queue: dict[int, list[bytes]] = {0: [], 1: []}

    def handle(message: ReceivedMessage) -> None:
        if message.body == b"0":
            together.wait(WAIT_S)  # passes only if the other queue's first message is being handled too
        by_queue[message.queue_id].append(message.body)

    for n in range(20):
        client.send(TOPIC, str(n), queue=0)
        client.send(TOPIC, str(n), queue=1)
    listener = run(lambda: client.listen(TOPIC, GROUP, handle, threads=3, ordered=True))
    until(lambda: all(len(seen) == 20 for seen in by_queue.values()))
    client.close()
    listener.join(WAIT_S)
    assert not listener.is_alive()
    assert by_queue == {0: [b"%d" % n for n in range(20)], 1: [b"%d" % n for n in range(20)]}


def test_an_interrupt_ends_waiting_for_a_message(client: Client) -> None:
    client.send(TOPIC, "x")
    receive(client, 1)
    interrupt = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    with limited(client), pytest.raises(KeyboardInterrupt):
        for _ in client.consume("nothing", GROUP):
            pass
    interrupt.join()
    assert client.send(TOPIC, "the client still works").id


# -- lost connections and closing


def test_a_consumer_goes_on_when_the_server_is_back(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"route_port": free_port(), "broker_port": free_port(), "vip_port": -1, "grpc_port": -1}
    found: list[bytes] = []
    with postdate.connect(f"127.0.0.1:{settings['route_port']}", timeout=1.0) as client:

        def listen() -> None:
            found.extend(message.body for message in client.consume(TOPIC, GROUP))

        with serving(tmp_path / "data", **settings):
            client.send(TOPIC, "before")
            client.send(TOPIC, "while it was away", delay="1s")
            listener = run(listen)
            until(lambda: b"before" in found)
        with pytest.raises(postdate.Unreachable, match=r"no broker at 127\.0\.0\.1:\d+: connection refused"):
            client.send(TOPIC, "lost")
        with serving(tmp_path / "data", **settings):
            until(lambda: b"while it was away" in found)
            client.send(TOPIC, "after")
            until(lambda: b"after" in found)
            client.close()
            listener.join(WAIT_S)
    assert b"lost" not in found


def test_a_connection_that_was_dropped_is_made_anew(client: Client, served: Served) -> None:
    service = served.server._dispatcher
    assert service is not None

    def cut() -> None:
        for connection in list(service.connections):
            connection.abort()

    client.send(TOPIC, "x")
    for _ in range(3):
        served.call(cut)
        client.send(TOPIC, "x")


def test_closing_is_prompt_while_pulls_are_held(client: Client) -> None:
    client.send(TOPIC, "x")
    arrived = threading.Event()

    def listen() -> None:
        for _ in client.consume(TOPIC, GROUP):
            arrived.set()

    listener = run(listen)
    assert arrived.wait(WAIT_S)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 5  # a held pull would take 15 s
    listener.join(WAIT_S)
    assert not listener.is_alive()


def test_a_closed_client_says_so(served: Served) -> None:
    client = postdate.connect(served.address)
    messages = client.consume(TOPIC, GROUP)
    client.close()
    client.close()
    with pytest.raises(postdate.UsageError, match="closed"):
        client.send(TOPIC, "x")
    with pytest.raises(postdate.UsageError, match="closed"):
        next(messages)


def test_a_call_in_the_clients_own_thread_is_refused_instead_of_waiting_for_ever(client: Client) -> None:
    caught: Future[BaseException] = Future()

    def call() -> None:
        try:
            client.send(TOPIC, "x")
        except BaseException as error:
            caught.set_result(error)

    client._loop._loop.call_soon_threadsafe(call)
    assert "in its own thread" in str(caught.result(WAIT_S))


def test_a_client_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(uvloop, "new_event_loop", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        postdate.connect()


def test_a_client_leaves_no_thread_behind(served: Served) -> None:
    before = threading.active_count()
    with postdate.connect(served.address) as client:
        client.send(TOPIC, "x")
        receive(client, 1)
    assert threading.active_count() == before


def test_the_address_comes_from_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTDATE_ADDR", served.address)
    with postdate.connect() as client:
        assert client.send(TOPIC, "x").topic == TOPIC


def test_the_next_address_is_asked_when_one_does_not_answer(served: Served) -> None:
    with postdate.connect(f"127.0.0.1:{free_port()};{served.address}") as client:
        assert client.send(TOPIC, "x").topic == TOPIC


def test_arguments_are_checked_before_anything_is_asked() -> None:
    with pytest.raises(postdate.UsageError, match="the address is"):
        postdate.connect("nowhere")
    with pytest.raises(postdate.UsageError, match="timeout"):
        postdate.connect(timeout=0)
    with postdate.connect(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(postdate.UsageError, match="from_"):
            client.consume(TOPIC, GROUP, from_="middle")  # type: ignore[arg-type]
        with pytest.raises(postdate.UsageError, match="threads"):
            client.listen(TOPIC, GROUP, print, threads=0)
        with pytest.raises(postdate.Unreachable):
            next(client.consume(TOPIC, GROUP))

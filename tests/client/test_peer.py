"""The blocking client against a peer by script: a broker that refuses, is silent, hangs up, or is RocketMQ's."""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from struct import pack_into
from typing import Any

import pytest

import postdate
from postdate import Cancelled, Outgoing, Receipt
from postdate.client import producer
from postdate.errors import ProtocolError
from postdate.message import LOOPBACK, Message, decode_properties
from postdate.storage import record as records
from postdate.wire import bodies, codes
from postdate.wire.frame import Command, Frames, decode, encode, reply
from postdate.wire.requests import Request
from tests.client.test_blocking import limited, run, until
from tests.support.handles import recall_handle

WAIT_S = 30.0
TOPIC, GROUP = "orders", "billing"
SENT = {"msgId": "7F00000100002A9F0000000000000063", "queueId": "1", "queueOffset": "7"}
HANDLE = recall_handle(TOPIC, "broker-a", 1_800_000_000_000, "U1")


class HangUp(Exception):
    """The peer closes the connection instead of answering."""


Answer = bytes | None  # None is silence
Script = Callable[[Command], Answer]


class Peer:
    """A route address and broker in one; `script` answers what the defaults do not."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.asked: list[Command] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        frames = Frames()
        with closing(connection):
            try:
                while data := connection.recv(65_536):
                    for frame in frames.feed(data):
                        command = decode(frame)
                        self.asked.append(command)
                        answer = self._answer(command)
                        if answer is not None:
                            connection.sendall(in_java(answer))
            except (HangUp, OSError):
                return

    def _answer(self, command: Command) -> Answer:
        if command.code == Request.GET_ROUTEINFO_BY_TOPIC and command.fields["topic"] == TOPIC:
            broker = bodies.Broker("broker-a", "cluster", self.address)
            return reply(command, codes.SUCCESS, body=bodies.encode_route(broker, 2, 2, 6))
        return self._script(command)

    def count(self, code: int) -> int:
        return Counter(command.code for command in self.asked)[code]

    @property
    def connection_count(self) -> int:
        return len(self._open)

    def stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def close(self) -> None:
        self.stop_listening()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join(WAIT_S)


def in_java(answer: bytes) -> bytes:
    """The same as a broker of RocketMQ's says it, by which clients know what to expect."""
    try:
        return b"".join(encode(decode(frame)._replace(language="JAVA")) for frame in Frames().feed(answer)) or answer
    except ProtocolError:
        return answer  # not what a broker says at all


@contextmanager
def peer(script: Script, port: int = 0) -> Iterator[Peer]:
    playing = Peer(script, port)
    try:
        yield playing
    finally:
        playing.close()


def silent(_command: Command) -> Answer:
    return None


class Steps:
    """Gives one answer after the other; the last one stays."""

    def __init__(self, *steps: Callable[[Command], Answer]) -> None:
        self._steps = list(steps)

    def __call__(self, command: Command) -> Answer:
        step = self._steps.pop(0) if len(self._steps) > 1 else self._steps[0]
        return step(command)


def code(number: int, remark: str | None = None, **fields: Any) -> Callable[[Command], Answer]:
    return lambda command: reply(command, number, fields, remark=remark)


def hang_up(_command: Command) -> Answer:
    raise HangUp


def unique_keys(playing: Peer) -> list[str]:
    sends = [command for command in playing.asked if command.code == Request.SEND_MESSAGE_V2]
    return [decode_properties(command.fields["i"].encode())["UNIQ_KEY"] for command in sends]


# -- sending


def test_a_send_has_the_fields_that_rocketmq_expects() -> None:
    with peer(code(0, **SENT)) as playing, postdate.connect(playing.address) as client:
        receipt = client.send(TOPIC, b"body", key="42")
        (command,) = [command for command in playing.asked if command.code == Request.SEND_MESSAGE_V2]
    assert abs(int(command.fields.pop("g")) - time.time() * 1_000) < 60_000
    assert command.fields.pop("e") in ("0", "1")
    assert command.fields == {
        "a": "postdate", "b": TOPIC, "c": "TBW102", "d": "4", "f": "0", "h": "0", "j": "0", "k": "false",
        "m": "false", "n": "broker-a", "i": f"UNIQ_KEY\x01{receipt.id}\x02WAIT\x01true\x02KEYS\x0142\x02",
    }  # fmt: skip
    assert command.body == b"body"
    assert receipt == Receipt(TOPIC, receipt.id, SENT["msgId"], 1, 7, None, None)


@pytest.mark.parametrize("answer", [10, 11, 12])
def test_stored_but_not_everywhere_counts_as_sent(answer: int) -> None:
    with peer(code(answer, **SENT)) as playing, postdate.connect(playing.address) as client:
        assert client.send(TOPIC, "x").queue_offset == 7


@pytest.mark.parametrize("trouble", [code(2, "busy"), code(14, "starting"), code(1, "oops"), hang_up])
def test_what_may_pass_is_sent_again_with_the_same_id(trouble: Callable[[Command], Answer]) -> None:
    with peer(Steps(trouble, trouble, code(0, **SENT))) as playing, postdate.connect(playing.address) as client:
        receipt = client.send(TOPIC, "x")
        assert unique_keys(playing) == [receipt.id] * 3


@pytest.mark.parametrize(
    ("trouble", "error", "sends"),
    [
        (code(2, "busy"), postdate.FlowControl, 3),
        (code(17, "gone"), postdate.TopicNotFound, 3),
        (code(13, "bad"), postdate.IllegalMessage, 1),
        (code(16, "forbidden"), postdate.NoPermission, 1),
        (code(29, "what"), postdate.BrokerError, 1),
    ],
)
def test_what_does_not_pass_has_a_name(trouble: Script, error: type[Exception], sends: int) -> None:
    with peer(trouble) as playing, postdate.connect(playing.address) as client:
        with pytest.raises(error):
            client.send(TOPIC, "x")
        assert playing.count(Request.SEND_MESSAGE_V2) == sends


@pytest.mark.parametrize(
    ("trouble", "error"), [(code(14, "starting"), postdate.Unavailable), (hang_up, postdate.Disconnected)]
)
def test_while_a_broker_is_away_a_send_is_repeated_until_its_timeout(trouble: Script, error: type[Exception]) -> None:
    with peer(trouble) as playing, postdate.connect(playing.address, timeout=2.5) as client:
        with pytest.raises(error):
            client.send(TOPIC, "x")
        assert playing.count(Request.SEND_MESSAGE_V2) > 1 + producer.REFUSALS_MAX


def sends_of(playing: Peer, code: int = Request.SEND_MESSAGE_V2) -> list[Command]:
    return [command for command in playing.asked if command.code == code]


def test_only_what_may_be_stored_is_marked_as_a_resend() -> None:
    """The connection is lost between the write and the answer: the same message comes again, marked."""
    with peer(Steps(hang_up, hang_up, code(0, **SENT))) as playing, postdate.connect(playing.address) as client:
        receipt = client.send(TOPIC, "x", delay="1h")
        assert client.send(TOPIC, "y").id != receipt.id
        first, *resends, other = sends_of(playing)
    assert [command.fields.get("resend") for command in (first, *resends, other)] == [None, "true", "true", None]
    for resend in resends:
        fields = {**resend.fields, "e": first.fields["e"]}
        assert fields == {**first.fields, "resend": "true"}, "only the queue may be another one"
        assert resend.body == first.body


def test_a_batch_that_may_be_stored_is_marked_as_a_resend() -> None:
    with peer(Steps(hang_up, code(0, **SENT))) as playing, postdate.connect(playing.address) as client:
        client.send_batch(TOPIC, [Outgoing("a"), Outgoing("b")])
        first, resend = sends_of(playing, Request.SEND_BATCH_MESSAGE)
    assert (first.fields.get("resend"), resend.fields.get("resend")) == (None, "true")
    assert (resend.body, resend.fields["g"]) == (first.body, first.fields["g"])


class Heard(logging.Handler):
    """Notes what a client logs, and that it has logged anything."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.is_heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.is_heard.set()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("postdate.client")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_send_waits_for_a_broker_that_starts_and_is_no_resend(heard: Heard) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    receipts: list[Receipt] = []
    with postdate.connect(f"127.0.0.1:{port}", timeout=WAIT_S) as client:
        sender = run(lambda: receipts.append(client.send(TOPIC, "x")))
        assert heard.is_heard.wait(WAIT_S)
        with peer(code(0, **SENT), port) as playing:
            sender.join(WAIT_S)
            (command,) = sends_of(playing)
    assert "resend" not in command.fields
    assert len(receipts) == 1
    assert heard.lines == [
        f"no broker at 127.0.0.1:{port}: connection refused; is it running? start it with: postdate up; sends and "
        "cancels are tried again for up to 30 s",
        "sends and cancels are answered again",
    ]


def test_a_broker_that_says_nothing_is_asked_again_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "TRY_SECONDS", 0.05)
    monkeypatch.setattr(producer, "TRIES_MIN", 600)
    with peer(Steps(silent, code(0, **SENT))) as playing, postdate.connect(playing.address, timeout=WAIT_S) as client:
        assert client.send(TOPIC, "x").queue_offset == 7
        assert [command.fields.get("resend") for command in sends_of(playing)] == [None, "true"]


def test_a_send_that_may_be_stored_says_so_when_the_broker_does_not_come_back() -> None:
    def vanish(_command: Command) -> Answer:
        playing.stop_listening()
        raise HangUp

    with (
        peer(vanish) as playing,
        postdate.connect(playing.address, timeout=0.8) as client,
        pytest.raises(postdate.Disconnected, match=r"connection refused.*; an earlier try may have been stored"),
    ):
        client.send(TOPIC, "x")


@pytest.mark.parametrize("trouble", [hang_up, code(14, "starting"), code(2, "busy"), code(1, "oops")])
def test_a_cancel_is_repeated_while_the_broker_is_away(trouble: Script) -> None:
    steps = Steps(trouble, trouble, code(0, outcome="cancelled"))
    with peer(steps) as playing, postdate.connect(playing.address) as client:
        assert client.cancel(HANDLE) is Cancelled.CANCELLED
        assert playing.count(Request.RECALL_MESSAGE) == 3


def test_a_silent_broker_is_given_up_in_time_and_then_connected_anew() -> None:
    with peer(Steps(silent, code(0, **SENT))) as playing, postdate.connect(playing.address, timeout=1.2) as client:
        with pytest.raises(postdate.TimedOut, match=r"no answer from .* within 1\.2 s"):
            client.send(TOPIC, "x")
        assert client.send(TOPIC, "x").queue_offset == 7
        assert playing.count(Request.SEND_MESSAGE_V2) == 2
        assert playing.connection_count == 2


def test_a_socket_that_never_answers_times_out() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with postdate.connect(address, timeout=0.2) as client:
            for call in (
                lambda: client.send(TOPIC, "x"),
                lambda: client.cancel(HANDLE),
                lambda: next(client.consume(TOPIC, GROUP)),
            ):
                with pytest.raises(postdate.TimedOut):
                    call()


def test_many_who_wait_for_one_silent_address_wait_no_longer_than_one() -> None:
    failures: list[BaseException] = []

    def send() -> None:
        try:
            client.send(TOPIC, "x")
        except postdate.TimedOut as error:
            failures.append(error)

    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        with postdate.connect(address, timeout=1.0) as client:
            began = time.monotonic()
            for thread in [run(send) for _ in range(20)]:
                thread.join(WAIT_S)
    assert len(failures) == 20
    assert time.monotonic() - began < 10  # one after the other would take 20 s


def test_a_peer_that_speaks_something_else_is_named() -> None:
    with (
        peer(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as playing,
        postdate.connect(playing.address, timeout=0.5) as client,
        pytest.raises(postdate.Disconnected, match=r"^127\.0\.0\.1:\d+: it does not speak the protocol"),
    ):
        client.send(TOPIC, "x")


def test_an_unreachable_address_is_told_with_what_to_do() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with postdate.connect(f"127.0.0.1:{port}", timeout=0.5) as client, pytest.raises(postdate.Unreachable) as caught:
        client.send(TOPIC, "x")
    sentence = f"no broker at 127.0.0.1:{port}: connection refused; is it running? start it with: postdate up"
    assert str(caught.value) == sentence


def test_of_several_addresses_all_are_named_when_none_answers() -> None:
    with (
        postdate.connect("127.0.0.1:1;127.0.0.1:2", timeout=0.5) as client,
        pytest.raises(postdate.Unreachable, match=r"none of 127\.0\.0\.1:1, 127\.0\.0\.1:2 answers"),
    ):
        client.send(TOPIC, "x")


def test_a_topic_that_is_created_gets_at_most_four_queues() -> None:
    def script(command: Command) -> Answer:
        if command.code != Request.GET_ROUTEINFO_BY_TOPIC:
            return reply(command, 0, SENT)
        if command.fields["topic"] == "TBW102":
            broker = bodies.Broker("broker-a", "cluster", playing.address)
            return reply(command, 0, body=bodies.encode_route(broker, 8, 8, 7))
        return reply(command, 17, remark="no route")

    with peer(script) as playing, postdate.connect(playing.address) as client:
        for _ in range(6):
            client.send("new", "x")
        queues = [int(command.fields["e"]) for command in playing.asked if command.code == Request.SEND_MESSAGE_V2]
    assert queues == [(queues[0] + n) % 4 for n in range(6)]


def test_a_batch_to_rocketmq_has_its_form() -> None:
    answer = SENT | {"msgId": "A,B"}
    with peer(code(0, **answer)) as playing, postdate.connect(playing.address) as client:
        first, second = client.send_batch(TOPIC, [Outgoing("a", key="1"), Outgoing("b", delay="1h")])
        (command,) = [command for command in playing.asked if command.code == Request.SEND_BATCH_MESSAGE]
    inner = bodies.decode_batch(command.body)
    assert [each.body for each in inner] == [b"a", b"b"]
    assert [decode_properties(each.properties)["UNIQ_KEY"] for each in inner] == [first.id, second.id]
    assert command.fields["m"] == "true"
    assert (first.offset_id, first.queue_offset, second.offset_id, second.handle) == ("A", 7, "B", None)


# -- cancelling


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (code(0, outcome="cancelled"), Cancelled.CANCELLED),
        (code(604, "late", outcome="delivered"), Cancelled.DELIVERED),
        (code(604, "no", outcome="unknown"), Cancelled.UNKNOWN),
        (code(0, msgId="U1"), Cancelled.UNKNOWN),  # RocketMQ tells no outcome
    ],
)
def test_the_outcome_of_a_cancel_is_what_the_broker_tells(answer: Script, outcome: Cancelled) -> None:
    with peer(answer) as playing, postdate.connect(playing.address) as client:
        assert client.cancel(HANDLE) is outcome
        (command,) = [command for command in playing.asked if command.code == Request.RECALL_MESSAGE]
    assert command.fields == {
        "topic": TOPIC, "producerGroup": "postdate", "bname": "broker-a", "recallHandle": HANDLE,
    }  # fmt: skip


def test_a_cancel_that_is_not_accepted_is_refused_with_the_sentence() -> None:
    with peer(code(604, "recall handle is invalid")) as playing, postdate.connect(playing.address) as client:
        with pytest.raises(postdate.Refused, match="recall handle is invalid"):
            client.cancel(HANDLE)
        with pytest.raises(postdate.Refused):
            client.cancel_key(TOPIC, "42", 5)
    with (
        peer(code(16, "operation is forbidden")) as playing,
        postdate.connect(playing.address) as client,
        pytest.raises(postdate.NoPermission, match="forbidden"),
    ):
        client.cancel(HANDLE)


def test_a_delayed_message_without_a_handle_is_unknown() -> None:
    with peer(code(0, **SENT)) as playing, postdate.connect(playing.address) as client:
        assert client.cancel(client.send(TOPIC, "x", level=3)) is Cancelled.UNKNOWN
        assert client.cancel(client.send(TOPIC, "x")) is Cancelled.DELIVERED
        assert playing.count(Request.RECALL_MESSAGE) == 0


# -- consuming

QUEUE_OFFSET_POSITION = 20  # in a record


def placed(queue_offset: int) -> bytes:
    """A record at its place in a queue."""
    record = bytearray(records.encode(Message(TOPIC, b"body"), TOPIC.encode(), 0, 0, LOOPBACK))
    pack_into(">q", record, QUEUE_OFFSET_POSITION, queue_offset)
    return bytes(record)


class Broker:
    """Enough of a broker for one consumer: queue 0 has `count` messages, everything else is empty."""

    def __init__(self, count: int, *, holds: bool = True) -> None:
        self.count = count
        self.holds = holds
        self.client_id = ""
        self.pulled = 0

    def __call__(self, command: Command) -> Answer:
        if command.code == Request.HEART_BEAT:
            self.client_id = bodies.decode_heartbeat(command.body).client_id
        if command.code == Request.GET_CONSUMER_LIST_BY_GROUP:
            return reply(command, 0, body=bodies.encode_consumer_ids([self.client_id]))
        if command.code == Request.PULL_MESSAGE:
            return self._pull(command)
        if command.code == Request.GET_ROUTEINFO_BY_TOPIC:
            return reply(command, 17, remark="no route")
        return None if command.is_oneway else reply(command, 0, {"offset": "0"})

    def _pull(self, command: Command) -> Answer:
        offset, queue_id = int(command.fields["queueOffset"]), int(command.fields["queueId"])
        stop = min(offset + int(command.fields["maxMsgNums"]), self.count if queue_id == 0 else 0)
        if offset >= stop:
            return None if self.holds else reply(command, 19, {"nextBeginOffset": offset})
        self.pulled += stop - offset
        found = b"".join(placed(n) for n in range(offset, stop))
        return reply(command, 0, {"nextBeginOffset": stop}, body=found)


def test_no_more_waits_than_was_asked_for() -> None:
    broker = Broker(1_000)
    with peer(broker) as playing, postdate.connect(playing.address) as client, limited(client):
        messages = client.consume(TOPIC, GROUP, batch=8, prefetch=20)
        for taken in range(1, 101):
            next(messages)
            # Two queues share the room: ten may wait for this one. What was taken is not waiting any more.
            assert broker.pulled <= taken + 10
        messages.close()


def test_a_broker_that_does_not_hold_pulls_is_not_asked_without_end() -> None:
    broker = Broker(1, holds=False)
    with peer(broker) as playing, postdate.connect(playing.address) as client, limited(client):
        messages = client.consume(TOPIC, GROUP)
        next(messages)
        time.sleep(1.0)  # how often it asks in a second is the question
        assert playing.count(Request.PULL_MESSAGE) < 20
        messages.close()


@pytest.mark.parametrize(
    "silent_at", [Request.GET_ROUTEINFO_BY_TOPIC, Request.HEART_BEAT, Request.QUERY_CONSUMER_OFFSET]
)
def test_closing_ends_a_loop_that_has_not_begun(silent_at: int) -> None:
    broker, ended = Broker(1), threading.Event()

    def script(command: Command) -> Answer:
        return None if command.code == silent_at else broker(command)

    def listen() -> None:
        client.listen(TOPIC, GROUP, lambda _message: None)
        ended.set()  # and not by an exception

    with peer(script) as playing, postdate.connect(playing.address, timeout=WAIT_S) as client:
        listener = run(listen)
        until(lambda: playing.count(silent_at))
        client.close()
        listener.join(WAIT_S)
    assert ended.is_set()


def test_leaving_commits_and_says_goodbye() -> None:
    with peer(Broker(3)) as playing, postdate.connect(playing.address) as client, limited(client):
        messages = client.consume(TOPIC, GROUP)
        next(messages)
        next(messages)
        messages.close()
        goodbye = playing.asked[-1]
        commits = [each for each in playing.asked if each.code == Request.UPDATE_CONSUMER_OFFSET and not each.is_oneway]
    assert goodbye.code == Request.UNREGISTER_CLIENT
    assert goodbye.fields["consumerGroup"] == GROUP
    assert {(each.fields["queueId"], each.fields["commitOffset"]) for each in commits} == {("0", "1"), ("1", "0")}


def test_acknowledging_tells_the_broker_before_it_returns() -> None:
    with peer(Broker(3)) as playing, postdate.connect(playing.address) as client, limited(client):
        messages = client.consume(TOPIC, GROUP)
        message = next(messages)
        message.acknowledge()
        (commit,) = [each for each in playing.asked if each.code == Request.UPDATE_CONSUMER_OFFSET]
        assert (commit.fields["queueId"], commit.fields["commitOffset"]) == ("0", "1")
        messages.close()


def test_an_acknowledgement_that_is_not_heard_is_told_and_repeated_on_leaving() -> None:
    broker, answers = Broker(1), Steps(code(2, "busy"), code(0), code(0))

    def script(command: Command) -> Answer:
        return answers(command) if command.code == Request.UPDATE_CONSUMER_OFFSET else broker(command)

    with peer(script) as playing, postdate.connect(playing.address) as client, limited(client):
        messages = client.consume(TOPIC, GROUP)
        with pytest.raises(postdate.FlowControl, match="busy"):
            next(messages).acknowledge()
        messages.close()
        commits = [each for each in playing.asked if each.code == Request.UPDATE_CONSUMER_OFFSET]
    assert ("0", "1") in {(each.fields["queueId"], each.fields["commitOffset"]) for each in commits[1:]}


def test_leaving_does_not_wait_for_a_broker_that_is_silent() -> None:
    broker = Broker(1)

    def script(command: Command) -> Answer:
        return None if command.code == Request.UPDATE_CONSUMER_OFFSET else broker(command)

    with peer(script) as playing, postdate.connect(playing.address, timeout=WAIT_S) as client, limited(client):
        messages = client.consume(TOPIC, GROUP)
        next(messages)
        began = time.monotonic()
        messages.close()
        assert time.monotonic() - began < 10


def test_a_broker_that_asks_gets_an_answer() -> None:
    """A running broker asks its consumers things that we do not know; it must not wait for ever."""
    answered = threading.Event()
    broker = Broker(1)

    def script(command: Command) -> Answer:
        if command.is_response:
            assert (command.code, command.opaque) == (3, 77)
            answered.set()
            return None
        question = encode(Command(307, {}, opaque=77)) if command.code == Request.HEART_BEAT else b""
        answer = broker(command)
        return None if answer is None else question + answer

    with peer(script) as playing, postdate.connect(playing.address) as client, limited(client):
        next(client.consume(TOPIC, GROUP))
        assert answered.wait(WAIT_S)


def test_a_message_that_cannot_be_sent_back_is_sent_on() -> None:
    broker = Broker(1)

    def script(command: Command) -> Answer:
        if command.code == Request.CONSUMER_SEND_MSG_BACK:
            return reply(command, 1, remark="there is no message at offset 0")
        if command.code == Request.GET_ROUTEINFO_BY_TOPIC:
            known = bodies.Broker("broker-a", "cluster", playing.address)
            return reply(command, 0, body=bodies.encode_route(known, 1, 1, 6))
        return reply(command, 0, SENT) if command.code == Request.SEND_MESSAGE_V2 else broker(command)

    def refuse(_message: postdate.ReceivedMessage) -> None:
        raise RuntimeError("no money")

    with peer(script) as playing, postdate.connect(playing.address) as client:
        listener = run(lambda: client.listen(TOPIC, GROUP, refuse, attempts=16))
        until(lambda: playing.count(Request.SEND_MESSAGE_V2))
        client.close()
        listener.join(WAIT_S)
    sent = next(command for command in playing.asked if command.code == Request.SEND_MESSAGE_V2)
    assert (sent.fields["b"], sent.fields["j"], sent.fields["l"], sent.body) == (f"%RETRY%{GROUP}", "1", "15", b"body")
    properties = decode_properties(sent.fields["i"].encode())
    assert (properties["RETRY_TOPIC"], properties["DELAY"]) == (TOPIC, "3")

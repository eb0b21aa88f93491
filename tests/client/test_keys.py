"""Single messages through both clients: found, cancelled, moved and delivered at once, by receipt and by key."""

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

import postdate
from postdate import Cancelled, CancelledMessage, Client, Moved, MovedMessage, Receipt
from postdate.clock import ManualClock
from postdate.spans import instant
from postdate.testing import InProcessBroker
from postdate.wire import codes
from postdate.wire.frame import Command, reply
from postdate.wire.requests import Request
from tests.client.test_blocking import run, until
from tests.client.test_peer import WAIT_S, Answer, Peer, Script, Steps, code, hang_up, peer, placed, silent
from tests.support.handles import recall_handle

TOPIC, GROUP = "orders", "billing"
START_MS, MINUTE_MS, HOUR_MS = 1_800_000_000_000, 60_000, 3_600_000
HANDLE = recall_handle(TOPIC, "broker-a", START_MS, "U1")


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker(clock=ManualClock(START_MS)) as running:
        yield running


class _Waiting:
    """The asyncio client with the face of the blocking one, for tests that run with both."""

    def __init__(self, address: str) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._connect(address))

    async def _connect(self, address: str) -> postdate.AsyncClient:
        return postdate.connect_async(address)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*words: Any, **named: Any) -> Any:
            return await getattr(self._client, name)(*words, **named)

        return lambda *words, **named: self._runner.run(call(*words, **named))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


@pytest.fixture(params=["blocking", "asyncio"])
def client(broker: InProcessBroker, request: pytest.FixtureRequest) -> Iterator[Any]:
    made: Any = postdate.connect(broker.address) if request.param == "blocking" else _Waiting(broker.address)
    yield made
    made.close()


def received(broker: InProcessBroker) -> list[str]:
    """The bodies of all messages that are visible and that nobody has received before."""
    with postdate.connect(broker.address) as reader:
        return sorted(message.body.decode() for message in reader.consume(TOPIC, GROUP, idle="200ms"))


def test_both_clients_have_the_same_signatures() -> None:
    for name in ("find", "cancel", "cancel_key", "postpone", "deliver_now", "cancel_where", "postpone_where"):
        blocking, waiting = (getattr(kind, name) for kind in (Client, postdate.AsyncClient))
        assert inspect.signature(blocking) == inspect.signature(waiting), name


# -- find ---------------------------------------------------------------------------------------------------------


def test_find_says_what_waits_and_where_and_what_was(client: Any) -> None:
    client.send(TOPIC, "out", key="order-17")
    client.send(TOPIC, "soon", delay="10s", key=["order-17", "customer-4"])
    far = client.send(TOPIC, "far", delay="10d", key="order-17", tag="paid")
    gone = client.send(TOPIC, "gone", delay="10d", key="order-17")
    client.send(TOPIC, "other", delay="10s", key="order-18")
    client.cancel(gone)
    found = {message.body: (message.state, message.place) for message in client.find(TOPIC, "order-17")}
    assert found == {
        b"out": ("visible", ""), b"soon": ("waiting", "wheel"), b"far": ("waiting", "log"), b"gone": ("cancelled", ""),
    }  # fmt: skip
    (message,) = client.find(TOPIC, far.id)
    assert (message.id, message.keys, message.tag) == (far.id, "order-17", "paid")
    assert message.due_at_ms == START_MS + 240 * HOUR_MS
    assert [each.body for each in client.find(TOPIC, "customer-4")] == [b"soon"]
    assert [each.body for each in client.find(TOPIC, "order-17", limit=2)] == [b"gone", b"far"]
    assert client.find(TOPIC, "nobody") == []


# -- cancel -------------------------------------------------------------------------------------------------------


def test_a_key_cancels_what_waits_and_tells_of_the_rest(broker: InProcessBroker, client: Any) -> None:
    out = client.send(TOPIC, "out", key="order-17")
    near = client.send(TOPIC, "near", delay="10s", key="order-17")
    far = client.send(TOPIC, "far", delay="10d", key=["customer-4", "order-17"])
    client.send(TOPIC, "stays", delay="10s", key="order-18")
    expected = [
        CancelledMessage(out.id, Cancelled.DELIVERED, None),
        CancelledMessage(near.id, Cancelled.CANCELLED, near.due_at_ms),
        CancelledMessage(far.id, Cancelled.CANCELLED, far.due_at_ms),
    ]
    for _ in range(2):
        assert client.cancel(topic=TOPIC, key="order-17") == expected
    assert client.cancel(topic=TOPIC, key="nobody") == []
    broker.advance("11d")
    assert received(broker) == ["out", "stays"]


def test_only_refuses_several_messages_and_changes_nothing(client: Any) -> None:
    first, second = (client.send(TOPIC, body, delay="10s", key=17) for body in ("a", "b"))
    for call in (client.cancel, client.deliver_now):
        with pytest.raises(postdate.Refused, match="2 messages with this key wait, and only one was expected"):
            call(topic=TOPIC, key=17, only=True)
    with pytest.raises(postdate.Refused, match="2 messages with this key wait"):
        client.postpone(topic=TOPIC, key=17, by="1h", only=True)
    assert [message.due_at_ms for message in client.find(TOPIC, 17)] == [second.due_at_ms, first.due_at_ms]
    assert client.cancel(first) is Cancelled.CANCELLED
    assert [message.outcome for message in client.postpone(topic=TOPIC, key=17, by="1h", only=True)] == [Moved.MOVED]


# -- postpone -----------------------------------------------------------------------------------------------------

WISHES: list[tuple[dict[str, Any], int]] = [
    ({"at": datetime(2027, 1, 15, 12, tzinfo=UTC)}, 1_800_014_400_000),
    ({"at": instant(START_MS + MINUTE_MS)}, START_MS + MINUTE_MS),
    ({"delay": "30m"}, START_MS + 30 * MINUTE_MS),
    ({"delay": 1.5}, START_MS + 1_500),
    ({"by": "1h"}, START_MS + 3 * HOUR_MS),
    ({"by": timedelta(minutes=-10)}, START_MS + 110 * MINUTE_MS),
    ({"by": -600}, START_MS + 110 * MINUTE_MS),
    ({"by": "-10m"}, START_MS + 110 * MINUTE_MS),
]


@pytest.mark.parametrize(("wish", "due_at_ms"), WISHES, ids=str)
def test_a_message_comes_at_its_new_due_and_not_before(
    broker: InProcessBroker, client: Any, wish: dict[str, Any], due_at_ms: int
) -> None:
    receipt = client.send(TOPIC, "moved", delay="2h", key="order-17")
    moved = client.postpone(receipt, **wish)
    assert moved == MovedMessage(receipt.id, Moved.MOVED, due_at_ms, receipt.due_at_ms, moved.handle)
    broker.advance(timedelta(milliseconds=due_at_ms - START_MS - 1))
    assert received(broker) == []
    broker.advance("1ms")
    assert received(broker) == ["moved"]
    broker.advance("1d")
    assert received(broker) == []
    assert client.postpone(receipt, delay="1h") == MovedMessage(receipt.id, Moved.DELIVERED, due_at_ms, None, None)


@pytest.mark.parametrize("wish", [{"at": instant(START_MS - HOUR_MS)}, {"by": "-3h"}, {"delay": 0}], ids=str)
def test_a_due_that_has_passed_delivers_at_once(broker: InProcessBroker, client: Any, wish: dict[str, Any]) -> None:
    receipt = client.send(TOPIC, "moved", delay="2h")
    assert client.postpone(receipt, **wish) == MovedMessage(receipt.id, Moved.MOVED, START_MS, receipt.due_at_ms, None)
    assert received(broker) == ["moved"]


def test_every_handle_of_a_moved_message_stays_good(broker: InProcessBroker, client: Any) -> None:
    for number in range(3):
        receipt = client.send(TOPIC, "moved", delay="2h")
        handles = [str(receipt)]
        for wish in ({"by": "1h"}, {"delay": "10s"}):
            handles.append(client.postpone(handles[number % len(handles)], **wish).handle)
        assert client.cancel(handles[number]) is Cancelled.CANCELLED
    broker.advance("1d")
    assert received(broker) == []


def test_a_key_moves_all_that_wait(broker: InProcessBroker, client: Any) -> None:
    out = client.send(TOPIC, "out", key="order-17")
    near = client.send(TOPIC, "near", delay="10s", key="order-17")
    far = client.send(TOPIC, "far", delay="10d", key="order-17")
    moved = {message.id: message for message in client.postpone(topic=TOPIC, key="order-17", delay="1h")}
    assert {name: message.outcome for name, message in moved.items()} == {
        out.id: Moved.DELIVERED, near.id: Moved.MOVED, far.id: Moved.MOVED,
    }  # fmt: skip
    assert {moved[each.id].due_at_ms for each in (near, far)} == {START_MS + HOUR_MS}
    assert moved[far.id].was_due_at_ms == far.due_at_ms
    assert client.postpone(topic=TOPIC, key="nobody", delay="1h") == []
    broker.advance("59m")
    assert received(broker) == ["out"]
    broker.advance("1m")
    assert received(broker) == ["far", "near"]


def test_a_message_is_delivered_now(broker: InProcessBroker, client: Any) -> None:
    receipt = client.send(TOPIC, "by receipt", delay="10d")
    client.send(TOPIC, "by key", delay="10d", key="order-17")
    assert client.deliver_now(receipt).outcome is Moved.MOVED
    assert client.deliver_now(str(receipt)).outcome is Moved.DELIVERED
    assert [message.outcome for message in client.deliver_now(topic=TOPIC, key="order-17")] == [Moved.MOVED]
    assert received(broker) == ["by key", "by receipt"]


def test_what_does_not_wait_is_not_moved(client: Any) -> None:
    at_once = client.send(TOPIC, "at once")
    assert client.postpone(at_once, delay="1h") == MovedMessage(at_once.id, Moved.DELIVERED, None, None, None)
    cancelled = client.send(TOPIC, "cancelled", delay="1h")
    client.cancel(cancelled)
    assert client.deliver_now(cancelled) == MovedMessage(cancelled.id, Moved.UNKNOWN, None, None, None)


def test_a_due_beyond_the_longest_delay_is_a_mistake_of_the_caller(client: Any) -> None:
    receipt = client.send(TOPIC, "stays", delay="1h")
    for wish in ({"delay": "9999d"}, {"by": "9999d"}, {"at": datetime(2400, 1, 1, tzinfo=UTC)}):
        with pytest.raises(postdate.UsageError, match="the message cannot be moved"):
            client.postpone(receipt, **wish)
    assert client.find(TOPIC, receipt.id)[0].due_at_ms == receipt.due_at_ms


def test_a_topic_that_is_not_there_is_named(client: Any) -> None:
    for call in (client.cancel, client.deliver_now):
        with pytest.raises(postdate.TopicNotFound, match="nowhere"):
            call(topic="nowhere", key="k")
    with pytest.raises(postdate.TopicNotFound, match="nowhere"):
        client.find("nowhere", "k")


def test_a_key_of_too_many_messages_is_refused() -> None:
    with InProcessBroker(clock=ManualClock(START_MS)) as broker, postdate.connect(broker.address) as client:
        client.send_batch(TOPIC, [postdate.Outgoing("x", delay="1h", key="k")] * 1_001)
        with pytest.raises(postdate.Refused, match="key_messages_max: more than 1000 messages"):
            client.cancel(topic=TOPIC, key="k")
        with pytest.raises(postdate.Refused, match="key_messages_max"):
            client.deliver_now(topic=TOPIC, key="k")


# -- mistakes -----------------------------------------------------------------------------------------------------

RECEIPT = Receipt(TOPIC, "U1", "", 0, None, START_MS, HANDLE)

MISTAKES: list[tuple[str, Callable[[Any], Any]]] = [
    ("cancel got None of type NoneType", lambda client: client.cancel()),
    ("cancel takes either a receipt, or topic=, key=", lambda client: client.cancel(RECEIPT, topic=TOPIC, key="k")),
    ("cancel takes either a receipt, or topic=, key=", lambda client: client.cancel(RECEIPT, only=True)),
    ("cancel by key needs both topic= and key=", lambda client: client.cancel(topic=TOPIC)),
    ("cancel by key needs both topic= and key=", lambda client: client.cancel(key="k")),
    ("the key 'a b' has a space", lambda client: client.cancel(topic=TOPIC, key="a b")),
    ("'text' is neither a receipt nor a recall handle", lambda client: client.cancel("text")),
    ("postpone got 17 of type int", lambda client: client.postpone(17, by="1h")),
    ("expected exactly one of them", lambda client: client.postpone(RECEIPT)),
    ("expected exactly one of them", lambda client: client.postpone(RECEIPT, by="1h", delay="1h")),
    ("delay is '-1h', expected text", lambda client: client.postpone(RECEIPT, delay="-1h")),
    ("by is '1 hour', expected text", lambda client: client.postpone(RECEIPT, by="1 hour")),
    ("without a time zone", lambda client: client.postpone(RECEIPT, at=datetime(2033, 1, 1))),
    ("call postpone_where", lambda client: client.postpone("topic = 'sms'", by="2h")),
    ("deliver_now got None of type NoneType", lambda client: client.deliver_now()),
    ("limit is 0, expected a whole number from 1 on", lambda client: client.find(TOPIC, "k", limit=0)),
    ("the key is None of type NoneType", lambda client: client.find(TOPIC, None)),
]


@pytest.mark.parametrize(("sentence", "call"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_refused_before_anybody_is_asked(sentence: str, call: Callable[[Any], Any]) -> None:
    with postdate.connect("127.0.0.1:1") as client, pytest.raises(postdate.UsageError, match=re.escape(sentence)):
        call(client)


# -- brokers that refuse, are silent, hang up, or are RocketMQ's ----------------------------------------------------


def moved(**fields: Any) -> Script:
    row = {"id": "U1", "outcome": "moved", "due": START_MS + 1, "was": START_MS, "recallHandle": HANDLE, **fields}
    return lambda command: reply(command, codes.SUCCESS, body=orjson.dumps({"messages": [row]}))


def asked(playing: Peer, request: Request = Request.MOVE_MESSAGE) -> list[Command]:
    return [command for command in playing.asked if command.code == request]


def test_a_move_has_the_fields_of_the_protocol() -> None:
    with peer(moved()) as playing, postdate.connect(playing.address) as client:
        assert client.postpone(HANDLE, delay="1s") == MovedMessage("U1", Moved.MOVED, START_MS + 1, START_MS, HANDLE)
        client.postpone(topic=TOPIC, key=17, at=instant(START_MS), only=True)
        first, second = asked(playing)
    common = {"topic": TOPIC, "producerGroup": "postdate", "bname": "broker-a"}
    assert first.fields == {**common, "recallHandle": HANDLE, "delay": "1000"}
    assert second.fields == {**common, "key": "17", "due": str(START_MS), "only": "true"}


@pytest.mark.parametrize("trouble", [hang_up, code(14, "starting"), code(2, "busy"), code(1, "oops")])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.postpone(HANDLE, at=instant(START_MS)),
        lambda client: client.postpone(HANDLE, delay="1h"),
        lambda client: client.deliver_now(HANDLE),
    ],
    ids=["at", "delay", "now"],
)
def test_what_may_be_repeated_is_while_the_broker_is_away(trouble: Script, call: Callable[[Client], Any]) -> None:
    with peer(Steps(trouble, trouble, moved())) as playing, postdate.connect(playing.address) as client:
        assert call(client).outcome is Moved.MOVED
        assert len(asked(playing)) == 3


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (hang_up, postdate.Disconnected),
        (code(14, "full"), postdate.Unavailable),
        (code(2, "busy"), postdate.FlowControl),
    ],
)
def test_a_move_by_a_span_is_sent_once(trouble: Script, error: type[Exception]) -> None:
    with peer(Steps(trouble, moved())) as playing, postdate.connect(playing.address) as client:
        with pytest.raises(error):
            client.postpone(HANDLE, by="1h")
        assert len(asked(playing)) == 1


def test_a_move_by_a_span_that_nobody_answers_says_that_it_may_have_happened() -> None:
    sentence = "it may have been moved, and is not moved by a span twice; find says when it is due"
    with peer(silent) as playing, postdate.connect(playing.address, timeout=0.3) as client:
        with pytest.raises(postdate.TimedOut, match=sentence):
            client.postpone(topic=TOPIC, key="k", by="1h")
        assert len(asked(playing)) == 1


def test_a_move_by_a_span_waits_for_a_broker_that_is_not_there_yet(caplog: pytest.LogCaptureFixture) -> None:
    with peer(silent) as playing:
        port = playing.port
    outcomes: list[Moved] = []
    with postdate.connect(f"127.0.0.1:{port}", timeout=WAIT_S) as client:
        mover = run(lambda: outcomes.append(client.postpone(HANDLE, by="1h").outcome))
        until(lambda: "are tried again" in caplog.text)
        with peer(moved(), port) as playing:
            mover.join(WAIT_S)
    assert (outcomes, len(asked(playing))) == ([Moved.MOVED], 1)


def test_a_broker_that_does_not_know_the_requests_is_named() -> None:
    rocketmq = code(3, " request type 9825 not supported")
    with peer(rocketmq) as playing, postdate.connect(playing.address) as client:
        with pytest.raises(postdate.BrokerError, match=r"does not know MOVE_MESSAGE \(9825\).*\(code 3\)"):
            client.postpone(HANDLE, delay="1h")
        with pytest.raises(postdate.BrokerError, match=r"does not know CANCEL_KEY \(9824\).*\(code 3\)"):
            client.cancel(topic=TOPIC, key="k")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"messages": 5}', b'{"messages": [5]}', b'{"messages": [{"id": "U1"}]}',
             b'{"messages": [{"id": "U1", "outcome": "eaten", "due": 5}]}']
)  # fmt: skip
def test_an_answer_that_cannot_be_read_is_the_peers_fault(body: bytes) -> None:
    def answer(command: Command) -> Answer:
        return reply(command, codes.SUCCESS, body=body)

    with peer(answer) as playing, postdate.connect(playing.address) as client:
        with pytest.raises(postdate.ProtocolError):
            client.postpone(HANDLE, delay="1h")
        with pytest.raises(postdate.ProtocolError):
            client.cancel(topic=TOPIC, key="k")


def test_a_table_that_cannot_be_asked_is_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    nothing = code(codes.QUERY_NOT_FOUND, "nothing", unread="bulk is away")
    with (
        peer(nothing) as playing,
        postdate.connect(playing.address) as client,
        pytest.raises(postdate.Unavailable, match=r"the log has none, and the table cannot be asked .*: bulk is away"),
    ):
        client.find(TOPIC, "k")

    def answer(command: Command) -> Answer:
        return reply(command, codes.SUCCESS, {"unread": "bulk is away"}, body=placed(0))

    with (
        caplog.at_level(logging.WARNING, "postdate.client"),
        peer(answer) as playing,
        postdate.connect(playing.address) as client,
    ):
        assert [message.body for message in client.find(TOPIC, "k")] == [b"body"]
    assert "bulk is away; find returns what the log has" in caplog.text
    with (
        peer(code(14, "nothing was changed")) as playing,
        postdate.connect(playing.address, timeout=0.3) as client,
        pytest.raises(postdate.Unavailable, match="nothing was changed"),
    ):
        client.cancel(topic=TOPIC, key="k")


def test_a_receipt_without_a_handle_is_not_asked_about() -> None:
    with peer(code(1, "never")) as playing, postdate.connect(playing.address) as client:
        waiting, visible = (Receipt(TOPIC, "U1", "", 0, offset, None, None) for offset in (None, 7))
        assert client.postpone(waiting, by="1h") == MovedMessage("U1", Moved.UNKNOWN, None, None, None)
        assert client.deliver_now(visible) == MovedMessage("U1", Moved.DELIVERED, None, None, None)
        assert playing.asked == []

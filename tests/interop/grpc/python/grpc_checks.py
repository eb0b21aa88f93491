"""RocketMQ's Python client for gRPC against a broker: one part after the other. The argument is the broker's address.

It prints a line for each check; the first that fails ends it with a sentence and exit code 1. The client sends delivery
times in whole seconds. It runs in an environment of its own: the C++ core's package has the same name.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

# To wait for something that must happen; nothing is asserted about how soon it does. A message that was on its way to a
# push consumer when the broker was killed comes again after a minute.
LIMIT_S = 100.0
INVISIBLE_S = 60  # longer than any check takes
YEAR_S = 365 * 24 * 3_600
CA_FILE = os.environ.get("INTEROP_CA_FILE", "")  # whom gRPC's library trusts stands in a variable of its own
USER = os.environ.get("INTEROP_ACCESS_KEY", "")
SECRET = os.environ.get("INTEROP_SECRET_KEY", "")


# -- checks -----------------------------------------------------------------------------------------------------------


class Check(Exception):
    """Something is not as it should be; the sentence says what."""


def ok(sentence: str) -> None:
    print("ok: " + sentence.split("\n")[0], flush=True)


def check(holds: object, sentence: str) -> None:
    if not holds:
        raise Check(sentence)


def same(expected: object, found: object, what: str) -> None:
    check(expected == found, f"{what}: expected {expected!r}, found {found!r}")


def until(what: str, holds: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        check(time.monotonic() < end, f"waited {LIMIT_S:.0f} s in vain: {what}")
        time.sleep(0.005)


def refused(code: int, what: str, attempt: Callable[[], object]) -> None:
    """The client's exceptions have the broker's code."""
    try:
        attempt()
    except Exception as error:
        found = str(getattr(error, "code", ""))
        check(found.startswith(str(code)), f"{what} was refused otherwise: {error!r}")
        ok(f"{what} is refused: {found} {error}")
    else:
        raise Check(f"{what} was not refused")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# -- clients ----------------------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """A message as a push consumer got it."""

    text: str
    message: Any
    at_ms: int


class Inbox(MessageListener):  # type: ignore[misc]
    """Everything that arrived, in order; a message that is not done comes again."""

    def __init__(self, is_done: Callable[[Arrival], bool] = lambda _: True) -> None:
        self._is_done = is_done
        self._arrivals: list[Arrival] = []
        self._lock = threading.Lock()

    def consume(self, message: Any) -> Any:
        arrival = Arrival(message.body.decode(), message, now_ms())
        with self._lock:
            self._arrivals.append(arrival)
        return ConsumeResult.SUCCESS if self._is_done(arrival) else ConsumeResult.FAILURE

    @property
    def all(self) -> list[Arrival]:
        with self._lock:
            return list(self._arrivals)

    def of(self, text: str) -> list[Arrival]:
        return [arrival for arrival in self.all if arrival.text == text]

    def wait(self, count: int, what: str) -> list[Arrival]:
        """Waits for that many, and makes sure that there is not one more."""
        until(f"{count} of {what}", lambda: len(self.all) >= count)
        same(count, len(self.all), what)
        return self.all


def configured(secret: str = SECRET) -> Any:
    return ClientConfiguration(sys.argv[1], Credentials(USER, secret))


def produce(topic: str, checker: Any = None, secret: str = SECRET) -> Any:
    producer = Producer(configured(secret), [topic], checker, tls_enable=bool(CA_FILE))
    producer.startup()
    return producer


def push(group: str, topic: str, inbox: Inbox, tags: str = "*") -> Any:
    consumer = PushConsumer(configured(), group, inbox, {topic: FilterExpression(tags)}, tls_enable=bool(CA_FILE))
    consumer.startup()
    return consumer


def simple(group: str, topic: str) -> Any:
    subscription = {topic: FilterExpression("*")}
    consumer = SimpleConsumer(configured(), group, subscription, await_duration=5, tls_enable=bool(CA_FILE))
    consumer.startup()
    return consumer


def receive(consumer: Any, count: int) -> list[Any]:
    """Receives until there are that many; acknowledges nothing."""
    received: list[Any] = []

    def has_enough() -> bool:
        try:
            received.extend(consumer.receive(32, INVISIBLE_S))
        except Exception as error:  # the client has no class for it
            check("route" in str(error), f"a receive: {error!r}")  # no topic of dead letters before the first one
        return len(received) >= count

    until(f"{count} messages of {consumer}", has_enough)
    same(count, len(received), f"messages of {consumer}")
    return received


def dead_letter(group: str) -> Any:
    """The one of a group, acknowledged."""
    reader = simple(f"{group}-letters", f"%DLQ%{group}")
    (letter,) = receive(reader, 1)
    reader.ack(letter)
    reader.shutdown()
    return letter


def message(
    topic: str, text: str, *, tag: str = "", keys: Sequence[str] = (), message_group: str = "", due_s: int = 0
) -> Any:
    made = Message()
    made.topic, made.body = topic, text.encode()
    if tag:
        made.tag = tag
    for key in keys:
        made.keys = key  # adds one
    if message_group:
        made.message_group = message_group
    if due_s:
        made.delivery_timestamp = due_s
    return made


def end(*clients: Any) -> None:
    for client in clients:
        client.shutdown()


# -- parts ------------------------------------------------------------------------------------------------------------


def messages() -> None:
    """Sends without delay; a push consumer of some tags, and a simple consumer of all."""
    inbox = Inbox()
    producer = produce("messages")
    filtered, reader = push("messages-push", "messages", inbox, "a || c"), simple("messages-simple", "messages")
    ids = {f"sync-{n}": producer.send(tagged(f"sync-{n}", n)).message_id for n in range(20)}
    answers = {f"async-{n}": producer.send_async(tagged(f"async-{n}", n)) for n in range(20)}
    ids |= {text: answer.result().message_id for text, answer in answers.items()}

    found = set()
    for got in receive(reader, 40):
        text = got.body.decode()
        number = int(text.split("-")[1])
        expected = (ids[text], "messages", "abcd"[number % 4], {f"key-{text}", "grün"}, {"colour": "rötlich"}, 1)
        same(expected, (got.message_id, got.topic, got.tag, set(got.keys), got.properties, got.delivery_attempt), text)
        reader.ack(got)
        found.add(text)
    same(ids.keys(), found, "messages received")
    ok(
        "40 messages, half of them sent asynchronously, arrived once each, with id, body, tag, keys and property, and "
        "were acknowledged"
    )
    tags = {arrival.message.tag for arrival in inbox.wait(20, "messages of two tags")}
    same({"a", "c"}, tags, "tags that arrived")
    ok("a push consumer of a || c gets those tags and no others")
    again(producer, reader)
    end(filtered, reader, producer)
    if USER:
        wrong = produce("messages", secret="another")  # to send it would need a route, and not say why it gets none
        refused(40100, "a wrong secret", lambda: wrong.recall_message("messages", "never"))


def tagged(text: str, number: int) -> Any:
    made = message("messages", text, tag="abcd"[number % 4], keys=(f"key-{text}", "grün"))
    made.add_property("colour", "rötlich")
    return made


def again(producer: Any, reader: Any) -> None:
    producer.send(message("messages", "again"))
    (first,) = receive(reader, 1)
    reader.change_invisible_duration(first, 1)
    (second,) = receive(reader, 1)
    same((first.message_id, 2), (second.message_id, second.delivery_attempt), "the message that came again")
    refused(40013, "an expired handle", lambda: reader.ack(first))
    reader.ack(second)
    ok("a message comes again after the invisible time that its consumer asked for")


def delays() -> None:
    """Messages for later, one of which is recalled."""
    inbox = Inbox()
    producer = produce("delays")
    consumer = push("delays-push", "delays", inbox)
    begin_s = int(time.time())
    doomed = producer.send(message("delays", "recalled", due_s=begin_s + 3))
    seconds = (-5, 1, 2, 4)
    for after_s in seconds:
        producer.send(message("delays", str(after_s), due_s=begin_s + after_s))
    same(doomed.message_id, producer.recall_message("delays", doomed.recall_handle), "the id of the recalled message")
    far = message("delays", "never", due_s=begin_s + 20 * YEAR_S)
    refused(40012, "a delay of twenty years", lambda: producer.send(far))

    inbox.wait(len(seconds), "delayed messages")
    for after_s in seconds:
        arrivals = inbox.of(str(after_s))
        check(arrivals, f"the message for second {after_s} did not arrive")
        late_ms = arrivals[0].at_ms - 1_000 * (begin_s + after_s)
        check(late_ms >= 0, f"the message for second {after_s} arrived {-late_ms} ms early")
        ok(f"due at second {after_s}: arrived {late_ms} ms later")
    ok("a message that was recalled stayed away")
    end(consumer, producer)


def order() -> None:
    """Message groups: each comes in order, past a message that fails once, and past one that always fails."""
    producer = produce("order")
    for n in range(10):
        for customer in ("anna", "bert", "carl"):
            producer.send(message("order", f"{customer}-{n}", message_group=customer))

    def is_done(arrival: Arrival) -> bool:
        if arrival.text == "bert-4":
            return len(inbox.of("bert-4")) > 1
        return arrival.text != "carl-4"

    inbox = Inbox(is_done)
    consumer = push("order-push", "order", inbox)
    arrivals = inbox.wait(30 + 1 + 2, "ordered messages")
    end(consumer, producer)
    for customer in ("anna", "bert", "carl"):
        mine = [arrival for arrival in arrivals if arrival.message.message_group == customer]
        times = {"bert-4": 2, "carl-4": 3}
        expected = [text for n in range(10) for text in [f"{customer}-{n}"] * times.get(f"{customer}-{n}", 1)]
        same(expected, [arrival.text for arrival in mine], f"messages of {customer}")
    ok("three message groups came in order, one of their messages again before its followers")
    same(b"carl-4", dead_letter("order-push").body, "the dead letter")
    ok("a message that always fails is a dead letter after three attempts, then its followers come")


class Checker(TransactionChecker):  # type: ignore[misc]
    """Answers when the broker asks; an exception leaves the transaction open."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, message: Any) -> Any:
        text = message.body.decode()
        self.asked.append(text)
        if text == "asked twice" and self.asked.count(text) == 1:
            return TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED
        return TransactionResolution.COMMIT if text.startswith("asked") else TransactionResolution.ROLLBACK


def transactions() -> None:
    """Transactions that end, and others about which the broker has to ask."""
    inbox, checker = Inbox(), Checker()
    producer = produce("transactions", checker)
    consumer = push("transactions-push", "transactions", inbox)
    half(producer, "forgotten")
    half(producer, "asked once")
    half(producer, "asked twice")
    half(producer, "rolled back").rollback()
    half(producer, "committed").commit()
    until("the committed message", lambda: inbox.of("committed"))
    ok("a committed message arrived")
    open_ones = {"forgotten", "asked once", "asked twice"}
    until("the broker asks about all", lambda: open_ones <= set(checker.asked))
    arrived = {arrival.text for arrival in inbox.wait(3, "messages of transactions")}
    same({"committed", "asked once", "asked twice"}, arrived, "messages that arrived")
    same(open_ones, set(checker.asked), "messages that the broker asked about")
    ok("the broker asked about open transactions, one of them twice; those rolled back stayed away")
    end(consumer, producer)


def half(producer: Any, text: str) -> Any:
    transaction = producer.begin_transaction()
    producer.send(message("transactions", text), transaction)
    return transaction


def retries() -> None:
    """A listener that fails: the group says when a message comes again (after 1 s, after 2 s) and how often."""
    inbox = Inbox(lambda arrival: arrival.text == "hard work" and arrival.message.delivery_attempt == 3)
    producer, consumer = produce("retries"), push("retries-push", "retries", inbox)
    producer.send(message("retries", "hard work", keys=("order-7",)))
    hopeless = producer.send(message("retries", "hopeless", keys=("order-8",)))
    for text in ("hard work", "hopeless"):
        until(f"three attempts of {text}", partial(lambda text: len(inbox.of(text)) == 3, text))
        attempts = [arrival.message.delivery_attempt for arrival in inbox.of(text)]
        same([1, 2, 3], attempts, f"attempts of {text}")
    first, second, third = (arrival.at_ms for arrival in inbox.of("hard work"))
    check(second - first >= 1_000 and third - second >= 2_000, f"it came at {first}, {second} and {third} ms")
    ok(f"a message that failed twice came again after {second - first} and {third - second} ms")
    letter = dead_letter("retries-push")
    expected = (b"hopeless", ["order-8"], hopeless.message_id)
    same(expected, (letter.body, list(letter.keys), letter.message_id), "the dead letter")
    same(6, len(inbox.all), "attempts of two messages")
    ok("after three attempts a message is a dead letter, received from %DLQ%retries-push")
    end(consumer, producer)


class Sending(threading.Thread):
    """Sends one after the other until it is ended: at once, or in whole seconds, so that some are due while the broker
    is down.
    """

    def __init__(self, producer: Any) -> None:
        super().__init__()
        self._producer = producer
        self.due_ms: dict[str, int] = {}  # of acknowledged messages, by text
        self.failures = 0
        self.ended = threading.Event()

    def run(self) -> None:
        number = 0
        while not self.ended.wait(0.005):
            number += 1
            due_s = int(time.time()) + number % 3 if number % 2 else 0
            try:
                self._producer.send(message("restart", f"kept-{number}", due_s=due_s))
            except Exception:
                self.failures += 1
            else:
                self.due_ms[f"kept-{number}"] = 1_000 * due_s


def restart() -> None:
    """The broker is killed and started again under a producer and a consumer, by the process that reads our output."""
    inbox = Inbox()
    producer = produce("restart")
    consumer = push("restart-push", "restart", inbox)
    sending = Sending(producer)
    sending.start()
    until("messages before the restart", lambda: len(sending.due_ms) >= 100 and inbox.all)
    print("restart please", flush=True)
    check(sys.stdin.readline(), "nobody restarts the broker")
    up_at, before = time.monotonic(), len(inbox.all)
    until("the consumer reads again", lambda: len(inbox.all) > before + 10)
    ok(f"the consumer reads again {time.monotonic() - up_at:.1f} s after the broker is up")
    sending.ended.set()
    sending.join()
    texts = {arrival.text for arrival in inbox.all}
    until(
        f"all {len(sending.due_ms)} acknowledged messages",
        lambda: sending.due_ms.keys() <= {arrival.text for arrival in inbox.all},
    )
    for arrival in inbox.all:
        due_ms = sending.due_ms.get(arrival.text, 0)
        check(arrival.at_ms >= due_ms, f"{arrival.text} arrived before it was due, after a restart")
    texts = {arrival.text for arrival in inbox.all}
    ok(
        f"{len(sending.due_ms)} acknowledged messages arrived, none early, none lost; "
        f"{len(inbox.all) - len(texts)} came twice, {sending.failures} sends failed while the broker was down"
    )
    end(consumer, producer)


def main() -> None:
    """Ends the process without the client's threads, which may wait for long."""
    try:
        for part in (messages, delays, order, transactions, retries, restart):
            part()
    except Exception as error:
        print(f"FAILED: {error}", flush=True)
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)


main()

"""What every program here needs: checks that print, waiting with a limit, clients, an inbox.

A program hands its story to `run`. It prints a line for each check; the first that fails ends it with a sentence and
exit code 1.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rocketmq.client import Message, Producer, PullConsumer, PushConsumer, RecvMessage
from rocketmq.exceptions import RocketMQException
from rocketmq.ffi import _CConsumeStatus, dll

LIMIT_S = 60.0  # to wait for something that must happen; nothing is asserted about how soon it does


NONE: Mapping[str, str] = MappingProxyType({})


class Check(Exception):
    """Something is not as it should be; the sentence says what."""


def run(story: Callable[[str], None]) -> None:
    """Ends the process without the destructors of the library, which may wait for long."""
    try:
        story(sys.argv[1])
    except Exception as error:
        print(f"FAILED: {error}", flush=True)
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)


def ok(sentence: str) -> None:
    print(f"ok: {sentence}", flush=True)


def check(holds: object, sentence: str) -> None:
    if not holds:
        raise Check(sentence)


def until(what: str, holds: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        check(time.monotonic() < end, f"waited {LIMIT_S:.0f} s in vain: {what}")
        time.sleep(0.005)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Arrival(NamedTuple):
    """A message as it was when it came."""

    text: str
    topic: str
    tag: str
    key: str
    queue: int
    times: int
    unique_key: str
    at_ms: int


class Inbox:
    """Everything that arrived, in order. Filled by the library's threads."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._lock = threading.Lock()

    def add(self, got: Any) -> Arrival:
        unique_key = (got.get_property("UNIQ_KEY") or b"").decode()
        arrival = Arrival(
            got.body.decode(), got.topic, got.tags.decode(), got.keys.decode(), got.queue_id, got.reconsume_times,
            unique_key, now_ms(),
        )  # fmt: skip
        with self._lock:
            self._arrivals.append(arrival)
        return arrival

    @property
    def all(self) -> list[Arrival]:
        with self._lock:
            return list(self._arrivals)

    @property
    def by_text(self) -> dict[str, Arrival]:
        """The first of each."""
        return {arrival.text: arrival for arrival in reversed(self.all)}

    def wait(self, count: int, what: str) -> list[Arrival]:
        """Waits for so many, and makes sure that there is not one more."""
        until(f"{count} of {what}", lambda: len(self.all) >= count)
        check(len(self.all) == count, f"{what}: {len(self.all)} arrived, expected {count}")
        return self.all


def sign(client: Any) -> None:
    """Has a client sign every request, where somebody has said as whom."""
    user = os.environ.get("INTEROP_ACCESS_KEY")
    if user:
        client.set_session_credentials(user, os.environ["INTEROP_SECRET_KEY"], "postdate")


class Clients:
    """A producer, and consumers as they are needed."""

    def __init__(self, route: str) -> None:
        self._route = route
        self._consumers: list[Any] = []  # kept: the library uses what they own
        self.producer = Producer("python-producer")
        self.producer.set_namesrv_addr(route)
        sign(self.producer)
        self.producer.start()

    def send(self, message: Any) -> str:
        """Returns the message's id. Raises RocketMQException where it is refused."""
        result = self.producer.send_sync(message)
        check(int(result.status) == 0, f"a send was answered with {result}")
        check(result.msg_id, f"a send was answered without an id: {result}")
        return str(result.msg_id)

    def refused(self, message: Any) -> str:
        """The refusal."""
        try:
            result = self.producer.send_sync(message)
        except RocketMQException as error:
            return str(error)
        raise Check(f"a send was not refused: {result}")

    def consume(
        self, group: str, topic: str, inbox: Inbox, expression: str = "*", *, orderly: bool = False,
        is_done: Callable[[Arrival], bool] = lambda _: True,
    ) -> None:  # fmt: skip
        """Starts a consumer. A message that is not done comes again later. Not by `subscribe` of the package: it takes
        an exception of the listener for success.
        """

        def on_message(_consumer: Any, handle: Any) -> int:
            done = is_done(inbox.add(RecvMessage(handle)))
            status = _CConsumeStatus.CONSUME_SUCCESS if done else _CConsumeStatus.RECONSUME_LATER
            return int(status.value)

        consumer = PushConsumer(group, orderly=orderly)
        # Those of one process share a client by default, which looks for the work of a new one every 10 s.
        consumer.set_instance_name(f"{os.getpid()}-{len(self._consumers)}")
        consumer.set_namesrv_addr(self._route)
        sign(consumer)
        dll.Subscribe(consumer._handle, topic.encode(), expression.encode())
        consumer._register_callback(on_message)
        consumer.start()
        self._consumers.append(consumer)

    def pull(self, group: str, topic: str, inbox: Inbox) -> None:
        """Reads what is there. Raises RocketMQException where the topic has no route."""
        consumer = PullConsumer(group)
        consumer.set_namesrv_addr(self._route)
        sign(consumer)
        consumer.start()
        self._consumers.append(consumer)
        for got in consumer.pull(topic):
            inbox.add(got)


def message(
    topic: str, text: str, *, tag: str = "", key: str = "", level: int = 0, properties: Mapping[str, str] = NONE
) -> Any:
    made = Message(topic)
    made.set_body(text)
    if tag:
        made.set_tags(tag)
    if key:
        made.set_keys(key)
    if level:
        made.set_delay_time_level(level)
    for name, value in properties.items():
        made.set_property(name, value)
    return made

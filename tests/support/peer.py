"""A blocking client of the wire for tests: it says what it is told to say and gives back what the broker answers.

Nothing here sleeps. A test that wants to see that something is not answered asks something else behind it:
`Peer.expect_no_more` fails where the answer to that was not the only one.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from postdate.access.rules import Rule, User
from postdate.access.users import Users, with_user
from postdate.wire import bodies, codes
from postdate.wire.frame import Command
from postdate.wire.requests import Request
from postdate.wire.signature import Credentials, sign
from tests.support.core import FaultyDisk, snapshot
from tests.support.server import WAIT_S, Served
from verify.faults.peer import (
    GROUP,
    UNKNOWN_CODE,
    Closed,
    Got,
    Peer,
    got,
    heartbeat,
    make_topic,
    properties_of,
    properties_text,
    pull,
    pull_command,
    read_all,
    send_command,
)

# What tests know by this module's name, wherever it is written.
__all__ = [
    "GROUP",
    "LONG_POLL_MS",
    "TINY",
    "UNKNOWN_CODE",
    "Closed",
    "Gate",
    "Got",
    "Peer",
    "SignedPeer",
    "add_user",
    "begun_later",
    "connected",
    "got",
    "heartbeat",
    "make_topic",
    "notice_users",
    "properties_of",
    "properties_text",
    "pull",
    "pull_command",
    "raw_frame",
    "read_all",
    "read_bodies",
    "secret_of",
    "send",
    "send_batch",
    "send_command",
    "sent",
    "signed_in",
    "texts",
]  # fmt: skip

LONG_POLL_MS = 25_000  # longer than a test is willing to wait in vain


@contextmanager
def connected(served: Served, **how: Any) -> Iterator[Peer]:
    """A peer of the broker port."""
    peer = Peer(how.pop("port", served.port), **how)
    try:
        yield peer
    finally:
        peer.close()


def texts(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in fields.items()}


def raw_frame(code: int, opaque: int, fields: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A request in JSON whose fields are written as they are: numbers bare, and whatever else a peer may do."""
    header = orjson.dumps({"code": code, "opaque": opaque, "flag": 0, "remark": "", "extFields": fields})
    return (4 + len(header) + len(body)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header + body


# -- producers --------------------------------------------------------------------------------------------------


def send(peer: Peer, topic: str, body: bytes | str = b"hello", **how: Any) -> Command:
    """Sends one message; returns the answer."""
    command = send_command(peer, topic, body, **how)
    peer.write(command)
    return peer.answer_to(command.opaque)


def sent(peer: Peer, topic: str, body: bytes | str = b"hello", **how: Any) -> Command:
    """Sends one message, which must succeed."""
    answer = send(peer, topic, body, **how)
    assert answer.code == codes.SUCCESS, answer
    return answer


def send_batch(peer: Peer, topic: str, messages: Sequence[tuple[str, Mapping[str, Any]]], **fields: Any) -> Command:
    """Sends (body, properties) as one batch; returns the answer."""
    inner = [bodies.Inner(0, body.encode(), properties_text(named).encode()) for body, named in messages]
    command = send_command(peer, topic, bodies.encode_batch(inner), fields={"m": True, **fields})
    peer.write(command._replace(code=Request.SEND_BATCH_MESSAGE))
    return peer.answer_to(command.opaque)


# -- consumers --------------------------------------------------------------------------------------------------


def read_bodies(peer: Peer, topic: str, queue_id: int = 0) -> list[str]:
    return [record.body.decode() for record in read_all(peer, topic, queue_id)]


# -- the broker's disk ------------------------------------------------------------------------------------------


class Gate:
    """Lets the flushes of a disk through, or holds them, or has them fail."""

    def __init__(self, folder: Path) -> None:
        self.disk = FaultyDisk(folder)
        self.disk.fault = self._pass
        self.flush_count = 0
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_reached = threading.Event()
        self.error: OSError | None = None

    def _pass(self, call: str, path: str) -> OSError | None:
        if call != "file.sync" or not path.startswith("log/"):
            return None
        self.flush_count += 1
        self._is_reached.set()
        assert self._is_open.wait(WAIT_S), "the test has forgotten to open the gate"
        return self.error

    def hold(self) -> None:
        self._is_reached.clear()
        self._is_open.clear()
        self.flush_count = 0

    def wait_for_flush(self) -> None:
        """Returns when a flush stands before the gate."""
        assert self._is_reached.wait(WAIT_S)

    def open(self) -> None:
        self._is_open.set()


# Small files, so that a few messages fill several of them.
TINY: dict[str, Any] = {"segment_bytes": 1 << 16, "batch_bytes_max": 1 << 14, "queue_file_rows": 64}


def fill_segments(served: Served, peer: Peer, topic: str) -> None:
    """Fills some segments with visible messages, and has snapshots need none of them. For settings TINY and a manual
    clock.
    """
    for _ in range(3):
        for _ in range(20):
            sent(peer, topic, bytes(8_000))
        served.pass_ms(1_000)
        served.call(lambda: snapshot(served.broker))


def begun_later(served: Served, peer: Peer, topic: str) -> int:
    """A queue whose first messages retention has taken; returns where it begins. For settings TINY, a manual clock and
    no retention.
    """
    fill_segments(served, peer, topic)
    served.call(lambda: served.broker.retain(served.clock.now_ms()))
    low, high = served.call(lambda: served.broker.offsets(topic, 0))
    assert 0 < low < high, f"the queue has offsets {low} to {high}"
    return low


def ask_json(peer: Peer, code: int, **fields: Any) -> Any:
    """Returns the body of an answer that must be a success."""
    answer = peer.ask(code, **fields)
    assert answer.code == codes.SUCCESS, answer
    return orjson.loads(answer.body)


# -- users ------------------------------------------------------------------------------------------------------


class SignedPeer(Peer):
    """A peer that signs its requests, until its `credentials` are None."""

    def __init__(self, port: int, credentials: Credentials | None, **how: Any) -> None:
        super().__init__(port, **how)
        self.credentials = credentials

    def write(self, *commands: Command) -> None:
        if self.credentials is not None:
            fields = [{name: _text(value) for name, value in command.fields.items()} for command in commands]
            commands = tuple(
                command._replace(fields=sign(texts, command.body, self.credentials))
                for command, texts in zip(commands, fields, strict=True)
            )
        super().write(*commands)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def signed_in(served: Served, name: str, secret: str = "", **how: Any) -> Iterator[SignedPeer]:
    """A peer of the broker port that signs as a user. By default the secret is that of `add_user`."""
    peer = SignedPeer(how.pop("port", served.port), Credentials(name, secret or secret_of(name)), **how)
    try:
        yield peer
    finally:
        peer.close()


def secret_of(name: str) -> str:
    return f"secret-of-{name}"


def add_user(folder: Path, name: str, *rules: Rule, is_super: bool = False) -> None:
    """Adds a user to a data folder, as a command does beside a running broker."""
    Users(folder).change(with_user(User(name, secret_of(name), is_super, rules=rules)))


def notice_users(served: Served) -> None:
    """Makes the server look for changed users now."""
    served.begin(served.dispatcher.refresh_access()).result(WAIT_S)

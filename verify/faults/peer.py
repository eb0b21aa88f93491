"""One blocking connection to a broker that speaks the bare remoting protocol: it sends exactly the requests that it is
given, repeats nothing and returns the broker's answers.
"""

import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from postdate.message import decode_properties, encode_properties
from postdate.storage.record import Record
from postdate.wire import codes
from postdate.wire.frame import JSON, Command, Frames, decode, encode
from postdate.wire.records import decode_records
from postdate.wire.requests import Request

GROUP = "workers"
WAIT_S = 60.0  # for an answer: long, because machines may be busy
UNKNOWN_CODE = 7_777
_READ_BYTES = 1 << 16


class Closed(Exception):
    """The broker has closed the connection."""


class Peer:
    """One connection. Collects the broker's own requests (notices) apart from its answers."""

    def __init__(self, port: int, host: str = "127.0.0.1", serialization: int = JSON) -> None:
        self.socket = socket.create_connection((host, port), WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.serialization = serialization
        self.answers: deque[Command] = deque()
        self.notices: deque[Command] = deque()
        self._frames = Frames()
        self._opaque = 0

    def close(self) -> None:
        self.socket.close()

    # -- speaking -----------------------------------------------------------------------------------------------

    def command(self, code: int, body: bytes = b"", *, oneway: bool = False, **fields: Any) -> Command:
        """A request that is not sent yet."""
        self._opaque += 1
        flag = codes.FLAG_ONEWAY if oneway else 0
        return Command(code, fields, body, self._opaque, flag, serialization=self.serialization)

    def write(self, *commands: Command) -> None:
        """Sends requests in one write, without waiting for answers."""
        self.socket.sendall(b"".join(map(encode, commands)))

    def say(self, code: int, body: bytes = b"", *, oneway: bool = False, **fields: Any) -> int:
        """Sends a request without waiting; returns the number of its answer."""
        command = self.command(code, body, oneway=oneway, **fields)
        self.write(command)
        return command.opaque

    def ask(self, code: int, body: bytes = b"", **fields: Any) -> Command:
        """Sends a request and waits for its answer; other answers stay in `answers`."""
        return self.answer_to(self.say(code, body, **fields))

    # -- listening ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise Closed
        for frame in self._frames.feed(data):
            command = decode(frame)
            (self.answers if command.is_response else self.notices).append(command)
        assert self._frames.error is None, f"the broker sent a bad frame: {self._frames.error}"

    def next_answer(self) -> Command:
        while not self.answers:
            self._read()
        return self.answers.popleft()

    def next_notice(self) -> Command:
        while not self.notices:
            self._read()
        return self.notices.popleft()

    def answer_to(self, opaque: int) -> Command:
        while True:
            for answer in self.answers:
                if answer.opaque == opaque:
                    self.answers.remove(answer)
                    return answer
            self._read()

    def round_trip(self) -> None:
        """Returns when the broker has handled everything that was sent before."""
        assert self.ask(UNKNOWN_CODE).code == codes.REQUEST_CODE_NOT_SUPPORTED

    def expect_no_more(self) -> None:
        """Asserts that the broker has handled all requests and has nothing more to answer for now."""
        self.round_trip()
        assert not self.answers, f"unexpected answers: {self.answers}"

    def expect_closed(self) -> None:
        """Returns when the broker has closed the connection; collects what it still says."""
        try:
            while True:
                self._read()
        except (Closed, ConnectionResetError):
            return


# -- producers --------------------------------------------------------------------------------------------------


def properties_text(properties: Mapping[str, Any]) -> str:
    return encode_properties({name: str(value) for name, value in properties.items()}).decode()


def send_command(
    peer: Peer,
    topic: str,
    body: bytes | str = b"hello",
    *,
    queue_id: int = 0,
    sys_flag: int = 0,
    oneway: bool = False,
    fields: Mapping[str, Any] | None = None,
    **properties: Any,
) -> Command:
    """A send as a Java client writes it. `fields` replaces or adds letters of the request."""
    letters = {
        "a": "producers", "b": topic, "c": "TBW102", "d": 4, "e": queue_id, "f": sys_flag, "g": 1_700_000_000_000,
        "h": 0, "i": properties_text(properties), "j": 0, "k": False, "m": False, **(fields or {}),
    }  # fmt: skip
    data = body.encode() if isinstance(body, str) else body
    letters = {name: value for name, value in letters.items() if value is not None}
    return peer.command(Request.SEND_MESSAGE_V2, data, oneway=oneway, **letters)


# -- consumers --------------------------------------------------------------------------------------------------


class Got(NamedTuple):
    """An answer to a pull."""

    code: int
    next_offset: int
    min_offset: int
    max_offset: int
    records: list[Record]
    remark: str | None

    @property
    def bodies(self) -> list[str]:
        return [record.body.decode() for record in self.records]


def got(answer: Command) -> Got:
    fields = answer.fields
    low, high = int(fields.get("minOffset", -1)), int(fields.get("maxOffset", -1))
    found = decode_records(answer.body)
    return Got(answer.code, int(fields.get("nextBeginOffset", -1)), low, high, found, answer.remark)


def pull_command(
    peer: Peer,
    topic: str,
    offset: int = 0,
    *,
    queue_id: int = 0,
    group: str = GROUP,
    tags: str | None = "*",
    wait_ms: int = 0,
    commit: int | None = None,
    code: int = Request.PULL_MESSAGE,
    **fields: Any,
) -> Command:
    """A pull. `tags` is written into the request; None leaves the subscription to the heartbeat."""
    flag = codes.PULL_SUBSCRIPTION * (tags is not None) | codes.PULL_SUSPEND * (wait_ms > 0)
    flag |= codes.PULL_COMMIT_OFFSET * (commit is not None)
    asked = {
        "consumerGroup": group, "topic": topic, "queueId": queue_id, "queueOffset": offset, "maxMsgNums": 32,
        "sysFlag": flag, "commitOffset": commit or 0, "suspendTimeoutMillis": wait_ms, "subscription": tags,
        "subVersion": 0, "expressionType": "TAG", **fields,
    }  # fmt: skip
    return peer.command(code, **asked)


def pull(peer: Peer, topic: str, offset: int = 0, **how: Any) -> Got:
    command = pull_command(peer, topic, offset, **how)
    peer.write(command)
    return got(peer.answer_to(command.opaque))


def read_all(peer: Peer, topic: str, queue_id: int = 0) -> list[Record]:
    """Everything visible in a queue."""
    found: list[Record] = []
    offset = 0
    while (answer := pull(peer, topic, offset, queue_id=queue_id)).code == codes.SUCCESS:
        found += answer.records
        offset = answer.next_offset
    assert answer.code == codes.PULL_NOT_FOUND, answer
    return found


def properties_of(record: Record) -> dict[str, str]:
    return decode_properties(record.properties)


def heartbeat(
    peer: Peer, client_id: str, subscriptions: Mapping[str, str], *, group: str = GROUP, model: str = "CLUSTERING",
    **more: Any,
) -> Command:  # fmt: skip
    """A heartbeat of one consumer: expressions by topic, and more fields of its entry."""
    wanted = [
        {"topic": topic, "subString": expression, "expressionType": "TAG"}
        for topic, expression in subscriptions.items()
    ]
    consumer = {
        "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": model,
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": wanted, **more,
    }  # fmt: skip
    body = {"clientID": client_id, "producerDataSet": [], "consumerDataSet": [consumer]}
    return peer.ask(Request.HEART_BEAT, orjson.dumps(body))


def make_topic(peer: Peer, name: str, queue_count: int = 1, **fields: Any) -> None:
    asked = {"topic": name, "readQueueNums": queue_count, "writeQueueNums": queue_count, "perm": 6, **fields}
    answer = peer.ask(Request.UPDATE_AND_CREATE_TOPIC, **asked)
    assert answer.code == codes.SUCCESS, answer

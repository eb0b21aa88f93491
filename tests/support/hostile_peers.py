"""Hostile peers against a live broker, and a well-behaved client beside them that must notice nothing.

    python -m tests.support.hostile_peers --seconds 60 [--seed S] [--tls] [--users]        (scripts/full)

A hostile peer takes real requests of every code, in both serializations, and breaks them in one of many ways: a field
of another kind, a number beyond its bounds, flipped bits, a wrong length, half a frame, JSON a thousand deep, bytes
that are nothing at all. It reads its answers or does not, and goes politely or with a reset. With --tls every second
one speaks TLS, and others begin handshakes and break them off, drag them out, and renegotiate. With --users the broker
listens everywhere and has users; the hostile peers sign wrongly, and must have changed nothing at the end. Others show
certificates of an authority of their own, flood open connections with wrong signatures, of huge bodies too, and pull
for a user who is removed meanwhile. The same seed gives the same frames; who comes first is up to the system.
"""

import argparse
import contextlib
import random
import select
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from postdate.access.rules import User
from postdate.access.token import TOKEN_USER
from postdate.access.users import Users, make_rule, with_user
from postdate.broker.broker import Broker as OpenedBroker
from postdate.config import Settings
from postdate.server.audit import read_audit
from postdate.state.topics import SCHEDULE_TOPIC
from postdate.storage.disk import RealDisk
from postdate.tls import client_context
from postdate.wire import bodies, codes
from postdate.wire.frame import BINARY, JSON, Command, Frames, decode, encode
from postdate.wire.requests import REQUESTS, Field, Kind, Request
from postdate.wire.signature import SIGNATURE, Credentials, sign
from tests.support.certificates import Authority
from tests.support.peer import Peer, SignedPeer, make_topic, properties_text, pull, pull_command, send_command, sent
from verify.faults.process import Broker, now_ms

PEERS = 3
FRAMES_PER_CONNECTION = 40
FLOOD_FRAMES = 100  # of wrong signatures at a time: their answers fit into the broker's buffer
# So that what is kept for good does not grow for as long as it is fuzzed.
BOUNDS: dict[str, Any] = {
    "topics_max": 300, "groups_max": 200, "queues_max": 3_000, "offsets_max": 5_000, "idle_ms_max": 20_000,
    "stalled_ms_max": 2_000, "write_buffer_bytes_max": 65_536, "buffered_bytes_max": 64 << 20, "in_flight_max": 256,
    "held_pulls_max": 2_000, "held_pulls_per_connection_max": 50, "tombstones_max": 2_000, "body_bytes_max": 1 << 16,
    "connections_per_address_max": 300,
}  # fmt: skip

NUMBERS: list[Any] = [
    0, 1, -1, 2, 255, 65_536, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, "", " ", "1", "-1",
    "+5", "1.5", "1e9", "0x10", "٣", "9" * 400, 1.5, float(10**300), True, False, None, [], {}, [1], {"a": 1}, "NaN",
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "a b", "%", "%RETRY%", "%RETRY%fuzz", "%DLQ%fuzz", "%RETRY%%RETRY%x", "TBW102", "SCHEDULE_TOPIC_XXXX",
    "fuzz", "fuzz2", "\x00", "\x01\x02", "x" * 127, "x" * 128, "x" * 40_000, "é", "\U0001f4a9", "a" + "́" * 50, "../x",
    "a/b", "*", "a||b", "||", " || ", "|" * 999, 7, -1, 1.5, True, None, [], {}, ["fuzz"], {"topic": "fuzz"},
]  # fmt: skip
FLAGS: list[Any] = [True, False, "true", "false", "1", "0", "yes", 2, "", None, [], {}]
PROPERTIES: list[dict[str, Any]] = [
    {}, {"TAGS": "t"}, {"KEYS": "k1 k2"}, {"UNIQ_KEY": "U1"}, {"UNIQ_KEY": 'quo"te\\'}, {"DELAY": 3}, {"DELAY": -1},
    {"DELAY": 99}, {"TIMER_DELAY_SEC": 1}, {"TIMER_DELAY_MS": 5}, {"TIMER_DELIVER_MS": 0}, {"TIMER_DELIVER_MS": 2**62},
    {"TIMER_DELAY_SEC": "x"}, {"TIMER_DELAY_SEC": 9 * 10**18}, {"TIMER_DEL_UNIQKEY": "U1", "TIMER_DELAY_SEC": 60},
    {"TIMER_DEL_UNIQKEY": "fuzz+U1", "DELAY": 5}, {"DELAY": 1, "UNIQ_KEY": "U2"}, {"__STARTDELIVERTIME": 2**60},
    {"REAL_TOPIC": "x", "REAL_QID": "9"}, {"RETRY_TOPIC": "fuzz"}, {"x" * 40_000: "y"}, {"TAGS": "é" * 5_000},
]  # fmt: skip

# Requests whose body is JSON.
_JSON_CODES = [
    Request.HEART_BEAT, Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ, Request.CHECK_CLIENT_CONFIG,
    Request.BATCH_ACK_MESSAGE, Request.QUERY_ASSIGNMENT, Request.SET_MESSAGE_REQUEST_MODE,
    Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
]  # fmt: skip


class Fuzz:
    """Makes hostile bytes. Two of the same seed make the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._opaque = 0
        self._ways: list[Callable[[], bytes]] = [
            self.valid, self.valid, self.odd_field, self.odd_field, self.odd_field, self.flipped, self.flipped,
            self.cut, self.longer, self.length_lie, self.header_lie, self.doubled, self.merged, self.deep,
            self.not_utf8, self.noise, self.odd_command, self.huge_header, self.odd_body,
        ]  # fmt: skip

    def thrown(self) -> bytes:
        return self.random.choice(self._ways)()

    # -- a real request -------------------------------------------------------------------------------------------

    def command(self) -> Command:
        random, row = self.random, REQUESTS[self.random.choice(list(REQUESTS))]
        self._opaque += 1
        fields = {
            self._name(field): self._usual(field) for field in row.fields if field.required or random.random() < 0.5
        }
        flag = random.choice([0, 0, 0, 0, codes.FLAG_ONEWAY])
        serialization = BINARY if row.code < 32_768 and random.random() < 0.4 else JSON
        return Command(row.code, fields, self._body(row.code), self._opaque, flag, serialization=serialization)

    def _name(self, field: Field) -> str:
        return field.letter if field.letter and self.random.random() < 0.7 else field.name

    def _usual(self, field: Field) -> Any:
        random = self.random
        if field.name == "properties":
            return properties_text(random.choice(PROPERTIES))
        if field.kind is Kind.NUMBER:
            soon = now_ms() + random.randrange(2_000)
            return random.choice([0, 0, 1, 2, 5, 100, 1_000, soon, random.randrange(1 << 20)])
        if field.kind is Kind.FLAG:
            return random.choice([True, False])
        if field.name == "extraInfo":
            return f"0 {now_ms()} 1000 0 0 postdate 0 {random.randrange(5)}"
        return random.choice(["fuzz", "fuzz", f"fuzz{random.randrange(20)}", "TAG", "minute"])

    def _body(self, code: int) -> bytes:
        random, name = self.random, f"fuzz{self.random.randrange(20)}"
        if code == Request.HEART_BEAT:
            wanted = [{"topic": random.choice(["fuzz", name]), "subString": random.choice(["*", "a||b", ""])}]
            consumer = {"groupName": name, "subscriptionDataSet": wanted * random.randrange(4)}
            return orjson.dumps({"clientID": f"c{random.randrange(50)}", "consumerDataSet": [consumer]})
        if code in (Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ):
            queues = [{"topic": "fuzz", "brokerName": "postdate", "queueId": n} for n in range(random.randrange(5))]
            return orjson.dumps({"consumerGroup": name, "clientId": "c1", "mqSet": queues})
        if code == Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP:
            return orjson.dumps({"groupName": name, "retryMaxTimes": random.choice([3, "x", -1, None])})
        if code == Request.SEND_BATCH_MESSAGE:
            inner = [bodies.Inner(0, b"b", properties_text(random.choice(PROPERTIES)).encode()[:30_000])]
            return bodies.encode_batch(inner * random.randrange(1, 4))
        if code == Request.BATCH_ACK_MESSAGE:
            ack = {
                "c": name,
                "t": "fuzz",
                "q": random.choice([0, 1, 99]),
                "pt": now_ms(),
                "so": random.choice([0, 5, -1]),
            }
            bits = random.choice(["AQ==", "/w==", "", "#", "A" * 4_000])
            return orjson.dumps({"brokerName": "postdate", "acks": [{**ack, "b": bits}] * random.randrange(4)})
        if code in (Request.QUERY_ASSIGNMENT, Request.SET_MESSAGE_REQUEST_MODE):
            asked = {"topic": "fuzz", "consumerGroup": name, "clientId": "c1", "strategyName": "AVG"}
            return orjson.dumps({**asked, "mode": random.choice(["POP", "PULL", "x", 5]), "messageModel": "CLUSTERING"})
        if code == Request.CHECK_CLIENT_CONFIG:
            return orjson.dumps({"subscriptionData": {"expressionType": random.choice(["TAG", "SQL92", 5])}})
        return random.randbytes(random.choice([0, 10, 200]))

    # -- and what is done to it -----------------------------------------------------------------------------------

    def valid(self) -> bytes:
        return encode(self.command())

    def odd_field(self) -> bytes:
        """Some fields have values that nobody expects; JSON carries them as they are."""
        command = self.command()
        row = REQUESTS[command.code]
        fields = {name: value if isinstance(value, bool) else str(value) for name, value in command.fields.items()}
        for field in self.random.sample(row.fields, min(len(row.fields), self.random.randrange(1, 4))):
            values = {Kind.NUMBER: NUMBERS, Kind.FLAG: FLAGS, Kind.TEXT: TEXTS}[field.kind]
            fields[self._name(field)] = self.random.choice(values)
        return self._json(command, extFields=fields)

    def odd_command(self) -> bytes:
        """The header itself has odd values."""
        names = ["code", "opaque", "flag", "version", "language", "remark", "extFields"]
        return self._json(self.command(), **{self.random.choice(names): self.random.choice(NUMBERS + TEXTS)})

    def _json(self, command: Command, **changed: Any) -> bytes:
        header = {
            "code": command.code, "opaque": command.opaque, "flag": command.flag, "extFields": command.fields,
            **changed,
        }  # fmt: skip
        return _frame(_dumps(header), command.body)

    def odd_body(self) -> bytes:
        """A body of JSON whose parts are of another kind."""
        command = self.command()
        names = (
            "clientID",
            "consumerDataSet",
            "consumerGroup",
            "clientId",
            "mqSet",
            "groupName",
            "producerDataSet",
            "acks",
            "topic",
            "strategyName",
            "mode",
        )
        body = {name: self.random.choice(NUMBERS + TEXTS) for name in names}
        if self.random.random() < 0.5:
            body["consumerDataSet"] = [
                {"groupName": "fuzz", "subscriptionDataSet": self.random.choice(NUMBERS + TEXTS)}
            ]
            body["clientID"] = "c1"
        asked = self.random.choice(_JSON_CODES)
        return encode(command._replace(code=asked, body=_dumps(body), fields={}, serialization=JSON))

    def flipped(self) -> bytes:
        data = bytearray(self.valid())
        for _ in range(self.random.randrange(1, 9)):
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def cut(self) -> bytes:
        data = self.valid()
        return data[: self.random.randrange(len(data))]

    def longer(self) -> bytes:
        data, at = self.valid(), self.random.randrange(8)
        return data[:at] + self.random.randbytes(self.random.randrange(1, 20)) + data[at:]

    def length_lie(self) -> bytes:
        said = self.random.choice([-1, 0, 1, 3, 4, 5, 7, 8, 100, 2**31 - 1, -(2**31), 1 << 24, (1 << 24) + 1])
        return struct.pack(">i", said) + self.valid()[4:]

    def header_lie(self) -> bytes:
        data = self.valid()
        said = self.random.choice([0, 1, 7, len(data), 0xFFFFFF])
        return data[:5] + said.to_bytes(3, "big") + data[8:]

    def doubled(self) -> bytes:
        return self.valid() * self.random.randrange(2, 30)

    def merged(self) -> bytes:
        return b"".join(self.valid() for _ in range(self.random.randrange(2, 60)))

    def deep(self) -> bytes:
        levels = self.random.choice([100, 1_000, 20_000])
        nested = (
            b"[" * levels + b"]" * levels if self.random.random() < 0.5 else b'{"a":' * levels + b"1" + b"}" * levels
        )
        command = self.command()
        if self.random.random() < 0.5:
            return _frame(b'{"code":%d,"opaque":1,"extFields":{"topic":%b}}' % (command.code, nested), command.body)
        return encode(command._replace(body=nested))

    def not_utf8(self) -> bytes:
        bad = self.random.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\\ud800"])
        return _frame(b'{"code":%d,"opaque":1,"extFields":{"topic":"%b","b":"%b"}}' % (self.command().code, bad, bad))

    def huge_header(self) -> bytes:
        fields = {f"f{n}": "v" for n in range(self.random.choice([1_000, 5_000]))}
        return self._json(self.command(), extFields=fields)

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.choice([1, 3, 4, 8, 100, 5_000]))


def _dumps(values: Any) -> bytes:
    """JSON with whatever a peer may write: numbers of any length, too."""
    if isinstance(values, dict):
        return b"{" + b",".join(orjson.dumps(name) + b":" + _dumps(value) for name, value in values.items()) + b"}"
    if isinstance(values, list):
        return b"[" + b",".join(map(_dumps, values)) + b"]"
    if isinstance(values, int) and not isinstance(values, bool):
        return str(values).encode()
    return orjson.dumps(values)


def _frame(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">ii", 4 + len(header) + len(body), len(header)) + header + body


class Impostor(Fuzz):
    """One whose requests claim to be signed by a user or by the pipeline: by a wrong secret, or by nothing at all."""

    def command(self) -> Command:
        command, random = super().command(), self.random
        name = random.choice([GOOD_USER.access_key, "admin", TOKEN_USER, "fuzz", ""])
        secret = random.choice([name, "wrong-secret", GOOD_USER.secret_key[:-1]])
        fields = {field: str(value) for field, value in command.fields.items()}
        signed = sign(fields, command.body, Credentials(name, secret))
        if random.random() < 0.3:
            signed[SIGNATURE] = random.choice(["", "AAAA", "x" * 28, signed[SIGNATURE][::-1]])
        return command if random.random() < 0.2 else command._replace(fields=signed)


# -- who throws it ----------------------------------------------------------------------------------------------------


class Hostile(threading.Thread):
    """One hostile peer after another, until it is told to stop or has thrown its share."""

    def __init__(
        self, port: int, seed: int, is_over: Callable[[int], bool], tls: ssl.SSLContext | None = None,
        fuzz: type[Fuzz] = Fuzz,
    ) -> None:  # fmt: skip
        super().__init__(name=f"hostile-{seed}", daemon=True)
        self._port, self._tls = port, tls
        self._fuzz = fuzz(seed)
        self._is_over = is_over
        self.frame_count = self.connection_count = 0
        self.mistake: BaseException | None = None

    def run(self) -> None:
        kept: list[socket.socket] = []
        try:
            while not self._is_over(self.frame_count):
                kept += self._visit()
                if len(kept) > 20:  # some stay for a while, without reading
                    self._leave(kept.pop(self._fuzz.random.randrange(len(kept))))
        except BaseException as mistake:
            self.mistake = mistake
        finally:
            for each in kept:
                each.close()

    def _visit(self) -> list[socket.socket]:
        """Connects, throws some frames, and returns the connections that may stay for a while."""
        connection = self._connect()
        reads = self._fuzz.random.random() < 0.8
        with contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError, ssl.SSLError):
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            for _ in range(self._fuzz.random.randrange(1, FRAMES_PER_CONNECTION)):
                self._throw(connection, self._fuzz.thrown())
                if reads:
                    _read_away(connection)
        return [connection]

    def _connect(self) -> socket.socket:
        """Every second connection is to speak TLS, if any may."""
        self.connection_count += 1
        connection = socket.create_connection(("127.0.0.1", self._port), 30)
        if self._tls is None or self._fuzz.random.random() < 0.5:
            return connection
        # The handshake comes later: where it fails, the plain socket has no descriptor any more.
        return self._tls.wrap_socket(connection, server_hostname="localhost", do_handshake_on_connect=False)

    def _throw(self, connection: socket.socket, data: bytes) -> None:
        """In one piece, or cut anywhere. A broker that does not read from us for long is left alone."""
        self.frame_count += 1
        connection.settimeout(1)
        random = self._fuzz.random
        cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice([0, 0, 1, 3])))
        for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
            connection.sendall(data[start:stop])

    def _leave(self, connection: socket.socket) -> None:
        if self._fuzz.random.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
        connection.close()


class HalfHandshakes(Hostile):
    """Begins handshakes, and breaks them off, or goes on with something else."""

    def _visit(self) -> list[socket.socket]:
        self.connection_count += 1
        connection = socket.create_connection(("127.0.0.1", self._port), 30)
        random, hello = self._fuzz.random, self._hello()
        cut = random.randrange(1, len(hello))
        flipped = bytearray(hello)
        flipped[random.randrange(len(hello))] ^= 1 << random.randrange(8)
        thrown = random.choice([
            hello, hello[:cut], bytes(flipped), hello * 2, hello[:5] + random.randbytes(len(hello) - 5),
            hello + random.randbytes(100), b"\x16\x03\x01\xff\xff", b"\x16\x03\x01\x00\x00",
            hello[:cut] + b"\x15\x03\x01",
        ])  # fmt: skip
        with contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError):
            self._throw(connection, thrown)
            _read_away(connection)
        return [connection]

    def _hello(self) -> bytes:
        """What a client begins with."""
        assert self._tls is not None
        outgoing = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
        return outgoing.read()


class SlowHandshakes(HalfHandshakes):
    """Says its hello byte by byte, until it is said, or the broker has had enough of that."""

    def _visit(self) -> list[socket.socket]:
        self.connection_count += 1
        connection = socket.create_connection(("127.0.0.1", self._port), 30)
        pause_s = self._fuzz.random.choice([0, 0.005, 0.05])
        with contextlib.suppress(ConnectionError, TimeoutError):
            for byte in self._hello():
                self._throw(connection, bytes([byte]))
                if select.select([connection], [], [], pause_s)[0] or self._is_over(self.frame_count):
                    break
        return [connection]


class Renegotiating(Hostile):
    """Wants another handshake over an open connection, as old versions of TLS allow it."""

    def _visit(self) -> list[socket.socket]:
        self.connection_count += 1
        self.frame_count += 100
        done = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{self._port}", "-tls1_2"],
            input="R\n" * 3, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if "RENEGOTIATING" in done.stderr:  # else it was not let in
            assert "no renegotiation" in done.stderr, f"{done.stdout[-500:]} {done.stderr[-500:]}"
        return []


class WrongSignatures(Hostile):
    """Floods open connections with requests of strangers who claim to be users, and reads the answers: refusals all."""

    def _visit(self) -> list[socket.socket]:
        connection = self._connect()
        connection.settimeout(30)
        with contextlib.suppress(ConnectionError, TimeoutError, ssl.SSLError):
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            for _ in range(20):
                if self._is_over(self.frame_count):
                    break
                self._flood(connection)
        connection.close()
        return []

    def _flood(self, connection: socket.socket) -> None:
        requests = [self._request() for _ in range(FLOOD_FRAMES)]
        connection.sendall(b"".join(encode(request) for request in requests))
        self.frame_count += FLOOD_FRAMES
        frames, answers = Frames(), list[Command]()
        while len(answers) < FLOOD_FRAMES:
            if not (data := connection.recv(1 << 16)):
                raise ConnectionResetError
            answers += map(decode, frames.feed(data))
        taken = [answer for answer in answers if answer.code == codes.SUCCESS]
        assert not taken, f"a wrong signature was taken for a right one: {taken[:3]}"

    def _request(self) -> Command:
        random = self._fuzz.random
        body = random.randbytes(random.choice([0, 100, 100, 100, 4_000]) if random.random() < 0.99 else 300_000)
        code = random.choice([Request.SEND_MESSAGE_V2, Request.PULL_MESSAGE, Request.GET_STATUS, Request.STAGE])
        fields = {"b": Good.TOPIC, "topic": Good.TOPIC, "consumerGroup": "good", "queueId": "0"}
        name = random.choice([GOOD_USER.access_key, "admin", TOKEN_USER])
        signed = sign(fields, body, Credentials(name, f"wrong-{random.random()}"))
        return Command(code, signed, body, opaque=random.randrange(1 << 31))


class Leaving(Hostile):
    """Pulls for a user who is removed while the pull waits: it ends, and nothing comes any more. Its connections are
    there before the others': those of one address are bounded.
    """

    TOPIC, NAME = "Leaving_Topic", "leaving"

    def __init__(self, port: int, *how: Any) -> None:
        super().__init__(port, *how)
        self.connection_count = 2
        self._keeper, self._peer = SignedPeer(port, KEEPER), SignedPeer(port, None)
        make_topic(self._keeper, self.TOPIC)
        self._peer.say(Request.GET_ROUTEINFO_BY_TOPIC, topic=self.TOPIC)
        self._peer.next_answer()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._keeper.close()
            self._peer.close()

    def _visit(self) -> list[socket.socket]:
        keeper, peer, name = self._keeper, self._peer, self.NAME
        self.frame_count += 200
        peer.credentials = Credentials(name, f"secret-{self._fuzz.random.random()}")
        offset = int(keeper.ask(Request.GET_MAX_OFFSET, topic=self.TOPIC, queueId=0).fields["offset"])
        entries = [{"resource": each, "actions": ["Sub"], "decision": "Allow"} for each in ("Topic:*", "Group:*")]
        rules = orjson.dumps({"policies": [{"policyType": "Custom", "entries": entries}]})
        password = orjson.dumps({"password": peer.credentials.secret_key})
        assert keeper.ask(Request.AUTH_CREATE_USER, password, username=name).code == codes.SUCCESS
        assert keeper.ask(Request.AUTH_CREATE_ACL, rules, subject=f"User:{name}").code == codes.SUCCESS
        peer.write(*[pull_command(peer, self.TOPIC, offset, group=name, wait_ms=15_000) for _ in range(3)])
        assert keeper.ask(Request.AUTH_DELETE_USER, username=name).code == codes.SUCCESS
        sent(keeper, self.TOPIC, "not for those who have left")
        peer.write(pull_command(peer, self.TOPIC, offset, group=name, wait_ms=0))
        answers = [peer.next_answer() for _ in range(4)]
        assert {answer.code for answer in answers} == {codes.NO_PERMISSION}, answers
        return []


def _read_away(connection: socket.socket) -> None:
    while select.select([connection], [], [], 0)[0]:
        if not connection.recv(1 << 16):
            raise ConnectionResetError


# -- who must notice nothing ------------------------------------------------------------------------------------------


class Good:
    """A client that sends, cancels and reads, and remembers what it was told."""

    TOPIC = "Good_Client_Topic"
    DELAYS_MS = (0, 50, 300, 1_500, 2_500)

    def __init__(self, port: int, is_over: Callable[[], bool], user: Credentials | None = None) -> None:
        self._port, self._user = port, user
        self._is_over = is_over
        self.due_of: dict[str, int] = {}  # of all that was acknowledged
        self.cancelled: set[str] = set()
        self.seen: dict[str, int] = {}
        self.troubles: list[str] = []
        self.answer_ms_max = self.late_ms_max = 0
        self._producer = threading.Thread(target=self._guarded, args=(self._produce,), daemon=True)
        self._consumer = threading.Thread(target=self._guarded, args=(self._consume,), daemon=True)
        self._has_sent_all = threading.Event()

    def start(self) -> None:
        peer = SignedPeer(self._port, self._user)
        make_topic(peer, self.TOPIC)
        peer.close()
        self._producer.start()
        self._consumer.start()

    def join(self, seconds: float) -> None:
        for thread in (self._producer, self._consumer):
            thread.join(seconds)
            if thread.is_alive():
                self.troubles.append(f"{thread.name} hangs")

    def _guarded(self, work: Callable[[Peer], None]) -> None:
        peer = SignedPeer(self._port, self._user)
        try:
            work(peer)
        except BaseException as error:
            self.troubles.append(f"{work.__name__}: {type(error).__name__} {error}")
        finally:
            self._has_sent_all.set()
            peer.close()

    def _produce(self, peer: Peer) -> None:
        number = 0
        while not self._is_over():
            number += 1
            delay_ms = self.DELAYS_MS[number % len(self.DELAYS_MS)]
            handle = self._send(peer, f"good{number}", delay_ms)
            if delay_ms >= 1_500 and number % 3 == 0:
                self._cancel(peer, f"good{number}", handle)
            time.sleep(0.002)  # it is there to notice, not to compete

    def _send(self, peer: Peer, key: str, delay_ms: int) -> str:
        due = now_ms() + delay_ms
        timed: dict[str, Any] = {"TIMER_DELIVER_MS": due} if delay_ms else {}
        answer = self._asked(peer, send_command(peer, self.TOPIC, key, UNIQ_KEY=key, **timed))
        if answer.code != codes.SUCCESS:
            self.troubles.append(f"{key} was refused: {answer.code} {answer.remark}")
            return ""
        self.due_of[key] = due if delay_ms else 0
        return str(answer.fields.get("recallHandle", ""))

    def _asked(self, peer: Peer, command: Command) -> Command:
        started = time.monotonic()
        peer.write(command)
        answer = peer.answer_to(command.opaque)
        self.answer_ms_max = max(self.answer_ms_max, int((time.monotonic() - started) * 1_000))
        return answer

    def _cancel(self, peer: Peer, key: str, handle: str) -> None:
        answer = self._asked(peer, peer.command(Request.RECALL_MESSAGE, topic=self.TOPIC, recallHandle=handle))
        if answer.code == codes.SUCCESS:
            self.cancelled.add(key)
        elif now_ms() < self.due_of[key]:
            self.troubles.append(f"{key} waits and was not cancelled: {answer.code} {answer.remark}")

    def _consume(self, peer: Peer) -> None:
        offset, wanted_until = 0, None
        while wanted_until is None or time.monotonic() < wanted_until:
            if self._has_sent_all.is_set() and wanted_until is None:
                wanted_until = time.monotonic() + 30
            if self._has_sent_all.is_set() and len(self.seen) == len(self.due_of) - len(self.cancelled):
                break
            found = pull(peer, self.TOPIC, offset, group="good", wait_ms=300)
            if found.next_offset != offset + len(found.records):
                self.troubles.append(f"offset {offset} goes on at {found.next_offset} after {len(found.records)}")
            for record in found.records:
                self._note(record.body.decode(), now_ms())
            offset = found.next_offset
        # Whatever comes twice comes behind what came first.
        peer.write(pull_command(peer, self.TOPIC, offset, group="good", wait_ms=0))
        if (last := peer.next_answer()).code != codes.PULL_NOT_FOUND:
            self.troubles.append(f"there is more than was sent: {last.code} {last.remark}")

    def _note(self, key: str, at_ms: int) -> None:
        if key in self.seen:
            self.troubles.append(f"{key} came twice")
        self.seen[key] = at_ms

    def verdict(self) -> list[str]:
        """Everything that went wrong; call it when it has ended."""
        troubles = list(self.troubles)
        for key, due in self.due_of.items():
            at_ms = self.seen.get(key)
            if key in self.cancelled:
                troubles += [f"{key} was cancelled and came"] * (at_ms is not None)
            elif at_ms is None:
                troubles.append(f"{key} was acknowledged and never came")
            elif at_ms < due:
                troubles.append(f"{key} came {due - at_ms} ms early")
            elif due:
                self.late_ms_max = max(self.late_ms_max, at_ms - due)
        return troubles + [f"{key} came and was never sent" for key in self.seen if key not in self.due_of]


# -- a run ------------------------------------------------------------------------------------------------------------


class Result:
    def __init__(self, troubles: list[str], summary: str) -> None:
        self.troubles = troubles
        self.summary = summary


# What a broker may write about hostile peers; a line of another kind is a mistake of ours.
EXPECTED = (
    "closing the connection of", "is turned away", "ending the connection of", "complaints_max:", "idle_ms_max:",
    "is refused:", "topic ", "group ",
)  # fmt: skip
GOOD_USER = Credentials("good", "the-secret-of-good")
KEEPER = Credentials("keeper", "the-secret-of-keeper")  # a super user; nobody claims to be that one
GROWTH_BYTES = 96 << 20
FILES_MORE = 64


def run(
    folder: Path, seed: int, *, seconds: float = 0.0, frames: int = 0, is_tls: bool = False, has_users: bool = False
) -> Result:
    """Fuzzes for some seconds, or until so many frames were thrown. With users the broker listens everywhere, and the
    hostile peers are strangers to it: they may get nothing.
    """
    settings: dict[str, Any] = {}
    tls = foreign = None
    if has_users:
        assert is_tls, "a broker that listens everywhere needs TLS, too"
        settings = {"host": "0.0.0.0"}
        (folder / "data").mkdir()
        rules = (make_rule("Topic:*", ["All"]), make_rule("Group:*", ["All"]))
        supers = [User(name, secret, is_super=True) for name, secret in (("admin", "its-secret"), KEEPER[:2])]
        for user in (*supers, User(*GOOD_USER[:2], rules=rules)):
            Users(folder / "data").change(with_user(user))
    if is_tls:
        pair = Authority(folder / "certificates").sign("server")
        settings |= {"tls": "permissive", "tls_cert": pair.certificate, "tls_key": pair.key, "handshake_ms_max": 6_000}
        tls = client_context(ca_file=pair.ca)
    if has_users:
        settings |= {"tls_client_ca": pair.ca, "tls_client_cert": "optional"}
        stranger = Authority(folder / "foreign").sign("stranger", common_name="admin")
        foreign = client_context(ca_file=pair.ca, cert_file=stranger.certificate, key_file=stranger.key)
    broker = Broker(folder, **BOUNDS, **settings)
    broker.start()
    try:
        return _run(broker, seed, seconds, frames, tls, foreign, GOOD_USER if has_users else None)
    finally:
        broker.stop()


def _run(
    broker: Broker, seed: int, seconds: float, frames: int, tls: ssl.SSLContext | None, foreign: ssl.SSLContext | None,
    user: Credentials | None,
) -> Result:  # fmt: skip
    """`foreign`: for those who show a certificate of an authority that the broker does not know."""
    fuzz = Fuzz if user is None else Impostor
    _warm_up(broker, seed, fuzz)
    files_before, bytes_before = broker.file_count, broker.resident_bytes
    end = time.monotonic() + seconds

    def is_over(thrown: int) -> bool:
        return thrown >= frames / PEERS if frames else time.monotonic() > end

    hostile = [Hostile(broker.port, seed * PEERS + n, is_over, tls, fuzz) for n in range(PEERS)]
    if tls is not None:
        hostile += [kind(broker.port, seed, is_over, tls) for kind in (HalfHandshakes, SlowHandshakes, Renegotiating)]
    if user is not None:
        hostile += [kind(broker.port, seed, is_over, tls) for kind in (WrongSignatures, Leaving)]
        hostile.append(Hostile(broker.port, seed, is_over, foreign, fuzz))
    good = Good(broker.port, lambda: not any(each.is_alive() for each in hostile), user)
    for each in hostile:
        each.start()
    good.start()
    for each in hostile:
        each.join()
    good.join(60)
    mistakes = [f"{type(each).__name__} {each.name}: {each.mistake!r}" for each in hostile if each.mistake]
    troubles = good.verdict() + mistakes
    files = _settled(lambda: broker.file_count, files_before + FILES_MORE)
    if files > files_before + FILES_MORE:
        troubles.append(f"{files} open files after {files_before}")
    grown = broker.resident_bytes - bytes_before
    if grown > GROWTH_BYTES:
        troubles.append(f"the broker has grown by {grown >> 20} MiB")
    broker.stop()
    troubles += [line for line in broker.log_lines() if not any(text in line for text in EXPECTED)]
    troubles += broker.check()
    if user is not None:
        troubles += _let_in(broker.data)
    thrown, visits = sum(each.frame_count for each in hostile), sum(each.connection_count for each in hostile)
    return Result(
        troubles,
        f"{thrown} hostile frames over {visits} connections; beside them {len(good.due_of)} sends and "
        f"{len(good.cancelled)} cancels: slowest answer {good.answer_ms_max} ms, latest {good.late_ms_max} ms; "
        f"{files_before} to {files} open files, {grown / (1 << 20):+.1f} MiB",
    )


def _let_in(data: Path) -> list[str]:
    """What a stranger has changed, by the audit log and by the topics and users that there are."""
    known = (GOOD_USER.access_key, KEEPER.access_key)
    done = [line for line in read_audit(data) if line["result"] == "done" and line["user"] not in known]
    troubles = [f"a stranger was let in: {line}" for line in done]
    names = set(Users(data).all)
    if names != {"admin", *known}:
        troubles.append(f"there are other users now: {names}")
    broker = OpenedBroker(RealDisk(data), Settings(data=str(data)))
    try:
        others = set(broker.fold.topics.by_name) - {Good.TOPIC, Leaving.TOPIC, SCHEDULE_TOPIC, "%RETRY%good"}
    finally:
        broker.close()
    return troubles + [f"a stranger has made topic {name}" for name in sorted(others)]


def _warm_up(broker: Broker, seed: int, fuzz: type[Fuzz]) -> None:
    """So that buffers and tables have their size."""
    first = Hostile(broker.port, -seed - 1, lambda thrown: thrown >= 300, fuzz=fuzz)
    first.start()
    first.join()
    assert first.mistake is None, first.mistake


def _settled(measure: Callable[[], int], goal: int) -> int:
    """A count that should fall; peers that are gone take a moment to be noticed."""
    for _ in range(100):
        if (count := measure()) <= goal:
            break
        time.sleep(0.05)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.hostile_peers", description="Hostile peers against a live broker."
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--tls", action="store_true", help="half of them over TLS")
    parser.add_argument("--users", action="store_true", help="the broker has users, listens everywhere, and knows none")
    options = parser.parse_args()
    print(f"fuzzing for {options.seconds:.0f} s with seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="postdate-fuzz-") as folder:
        how = {"is_tls": options.tls or options.users, "has_users": options.users}
        result = run(Path(folder), options.seed, seconds=options.seconds, **how)
    for trouble in result.troubles[:50]:
        print(trouble)
    print(f"{result.summary}; {len(result.troubles)} troubles (seed {options.seed})")
    return int(bool(result.troubles))


if __name__ == "__main__":
    sys.exit(main())

"""RabbitMQ: messages that expire in a queue for each second, and go to the consumer's queue from there.

A queue drops what has expired only at its head: one queue for all delays would hold a message back until all that were
sent before it are due, whatever their due times. Queues for each second bound that to a second.
"""

import socket
import struct
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.system import BODY_BYTES, Received, System, body
from benchmarks.peers.systems.inbox import Inbox, now_ms
from benchmarks.peers.systems.server import HOST, Server, free_port, library_version, program
from benchmarks.peers.systems.wire import Wire

SEND_COUNT = 100  # are written together
# How many wait for their confirms. A message's time to live counts from when it is read: the more are on their way, the
# later they are. Syncs, on the other hand, are dear: of many messages, more may wait for one.
UNCONFIRMED_COUNT_MAX, UNCONFIRMED_COUNT_MAX_OF_MANY = 1_000, 4_000
MANY = 20_000
PREFETCH_COUNT = 2_000
MEMORY_LIMIT = "4GB"
DUE = "due"
BUCKET_MS = 1_000
REMOVED_AFTER_MS = 60_000  # so long after its second, a queue goes

LIBRARY = Path("/usr/lib/rabbitmq/lib")
PROGRAMS = Path("/usr/lib/rabbitmq/bin")
NODE = "peers@localhost"
USER = PASSWORD = "guest"

CHANNEL = 1
BODY, FRAME_END = 3, b"\xce"
FRAME = struct.Struct(">BHI")  # type, channel, size
BODY_START = FRAME.pack(BODY, CHANNEL, BODY_BYTES)
ACK = struct.pack(">HH", 60, 80)
TAG = struct.Struct(">QB")  # and whether all before it are meant, too


class Frame(NamedTuple):
    type: int
    payload: bytes


class Unconfirmed:
    """Publishes without an answer yet, by the numbers that the channel gives them. Answers come in any order."""

    def __init__(self) -> None:
        self._tags: deque[int] = deque()
        self._single: set[int] = set()
        self._last = 0

    def __len__(self) -> int:
        return len(self._tags)

    def add(self, count: int) -> None:
        self._tags.extend(range(self._last + 1, self._last + count + 1))
        self._last += count

    def confirm(self, tag: int, is_multiple: bool) -> None:
        if not is_multiple:
            self._single.add(tag)
        while self._tags and ((is_multiple and self._tags[0] <= tag) or self._tags[0] in self._single):
            self._single.discard(self._tags.popleft())


class RabbitMQ(System):
    name = "RabbitMQ, expiring queues"
    slug = "rabbitmq"
    settings = (
        "A classic queue for each second of due times, in which each message lives until it is due and from which it "
        "is dead-lettered to the consumer's queue (the plugin for delays is archived and no part of Debian); publisher "
        f"confirms, up to {UNCONFIRMED_COUNT_MAX:,} awaited ({UNCONFIRMED_COUNT_MAX_OF_MANY:,} of more than {MANY:,} "
        f"messages); prefetch {PREFETCH_COUNT:,}, acknowledged together; over raw connections."
    )
    durable = "persistent in durable classic queues, synced before its confirm"
    volatile = "in memory: transient, in transient queues"

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._servers: list[Server] = []
        self._wires: list[Wire[Frame]] = []
        self._buckets: set[int] = set()
        self._unconfirmed = Unconfirmed()
        self._received_count = 0
        self._suffix = ""

    @classmethod
    def versions(cls) -> dict[str, str]:
        _program()
        # Asked for it, rabbitmqctl would start a daemon that stays.
        found = ", ".join(path.name.partition("-")[2] for path in LIBRARY.glob("rabbitmq_server-*"))
        return {"rabbitmq-server": found, "pika, for its encoding": library_version("pika")}

    def start(self) -> None:
        self.stop()
        port, epmd_port = free_port(), free_port()
        self._write_settings()
        # Erlang would start this one as a daemon, which stays; where one listens, it does not.
        self._servers.append(Server([program("epmd", "Debian's erlang-base"), "-port", str(epmd_port)], self.folder))
        self._servers[-1].await_answer(lambda: socket.create_connection((HOST, epmd_port)).close())
        environment = self._environment(port, epmd_port)
        self._servers.append(Server([_program()], self.folder, environment))
        self._servers[-1].await_answer(lambda: connected(port).close())
        self._wires = [connected(port), connected(port)]
        self._prepare()

    def _write_settings(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "rabbitmq.conf").write_text(f"vm_memory_high_watermark.absolute = {MEMORY_LIMIT}\n")
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "environment").touch()

    def _environment(self, port: int, epmd_port: int) -> dict[str, str]:
        """Nothing of it is shared with a RabbitMQ or an Erlang that runs here besides."""
        return {
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": HOST,
            "RABBITMQ_NODENAME": NODE,
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "environment"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
        }

    def _prepare(self) -> None:
        from pika import spec

        self._buckets, self._unconfirmed, self._received_count = set(), Unconfirmed(), 0
        # Two clients, or two lives, that name one queue would have to agree on its settings, too.
        self._suffix = str(int(now_ms()))
        sending, receiving = self._wires
        ask(sending, spec.Confirm.Select(), spec.Confirm.SelectOk)
        ask(receiving, spec.Queue.Declare(queue=DUE, durable=self.is_durable), spec.Queue.DeclareOk)
        ask(receiving, spec.Basic.Qos(prefetch_count=PREFETCH_COUNT), spec.Basic.QosOk)
        ask(receiving, spec.Basic.Consume(queue=DUE), spec.Basic.ConsumeOk)

    def kill(self) -> None:
        for server in self._servers:
            server.kill()

    def stop(self) -> None:
        for wire in self._wires:
            wire.close()
        for server in reversed(self._servers):
            server.end()
        self._wires, self._servers = [], []

    def pids(self) -> list[int]:
        return [pid for server in self._servers for pid in server.pids]

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        sending = self._wires[0]
        window = UNCONFIRMED_COUNT_MAX_OF_MANY if len(dues_ms) > MANY else UNCONFIRMED_COUNT_MAX
        for start in range(0, len(dues_ms), SEND_COUNT):
            dues = dues_ms[start : start + SEND_COUNT]
            sending.send(b"".join(self._declares(dues) + self._publishes(dues, first_index + start)))
            self._unconfirmed.add(len(dues))
            self._await_confirms(window - SEND_COUNT)
        self._await_confirms(0)
        return [""] * len(dues_ms)

    def _declares(self, dues_ms: Sequence[int]) -> list[bytes]:
        from pika import spec

        new = {due_ms // BUCKET_MS for due_ms in dues_ms} - self._buckets
        self._buckets |= new
        return [
            method(
                spec.Queue.Declare(
                    queue=self._queue(bucket),
                    durable=self.is_durable,
                    nowait=True,
                    arguments={
                        "x-dead-letter-exchange": "",
                        "x-dead-letter-routing-key": DUE,
                        "x-expires": max(int((bucket + 1) * BUCKET_MS - now_ms()), 0) + REMOVED_AFTER_MS,
                    },
                )
            )
            for bucket in sorted(new)
        ]

    def _publishes(self, dues_ms: Sequence[int], first_index: int) -> list[bytes]:
        at_ms = int(now_ms())
        return [
            part
            for index, due_ms in enumerate(dues_ms, first_index)
            for part in (
                publish_to(self._queue(due_ms // BUCKET_MS)),
                lives(max(due_ms - at_ms, 0), self.is_durable),
                BODY_START,
                body(index),
                FRAME_END,
            )
        ]

    def _queue(self, bucket: int) -> str:
        return f"second.{bucket}.{self._suffix}"

    def _await_confirms(self, count_max: int) -> None:
        while len(self._unconfirmed) > count_max:
            for frame in self._wires[0].read_some(count_max=SEND_COUNT):
                self._unconfirmed.confirm(*confirmed(frame))

    def receive(self, count: int, limit_s: float) -> Received:
        from pika import spec

        inbox, receiving = Inbox(count, limit_s), self._wires[1]
        while inbox.is_open:
            bodies = [frame.payload for frame in receiving.read(inbox.left_s) if frame.type == BODY]
            inbox.take(bodies)
            self._received_count += len(bodies)
            if bodies:  # a delivery's tag is its number on the channel
                receiving.send(method(spec.Basic.Ack(delivery_tag=self._received_count, multiple=True)))
        return inbox.received


def connected(port: int) -> Wire[Frame]:
    """With an open channel. Raises OSError where the server does not listen, or not yet to clients."""
    wire: Wire[Frame] = Wire(port, frames)
    try:
        _open(wire)
    except BaseException:
        wire.close()
        raise
    return wire


def _open(wire: Wire[Frame]) -> None:
    from pika import spec

    wire.send(b"AMQP\x00\x00\x09\x01")
    expect(wire, spec.Connection.Start)
    login = spec.Connection.StartOk({}, "PLAIN", f"\0{USER}\0{PASSWORD}", "en_US")
    ask(wire, login, spec.Connection.Tune, channel=0)
    wire.send(method(spec.Connection.TuneOk(channel_max=1, frame_max=131_072, heartbeat=0), channel=0))
    ask(wire, spec.Connection.Open("/"), spec.Connection.OpenOk, channel=0)
    ask(wire, spec.Channel.Open(), spec.Channel.OpenOk)


def ask(wire: Wire[Frame], asked: Any, answer: Any, channel: int = CHANNEL) -> None:
    wire.send(method(asked, channel))
    expect(wire, answer)


def expect(wire: Wire[Frame], answer: Any) -> None:
    """Raises ConnectionError where another answer comes, such as the end of the connection with its reason."""
    frame = wire.read_exactly(1)[0]
    if frame.payload[:4] != struct.pack(">I", answer.INDEX):
        raise ConnectionError(f"RabbitMQ answered {frame.payload!r} instead of {answer.NAME}")


def method(asked: Any, channel: int = CHANNEL) -> bytes:
    from pika.frame import Method

    return bytes(Method(channel, asked).marshal())


@lru_cache(maxsize=10_000)
def publish_to(queue: str) -> bytes:
    from pika import spec

    return method(spec.Basic.Publish(exchange="", routing_key=queue))


@lru_cache(maxsize=100_000)
def lives(ttl_ms: int, is_durable: bool) -> bytes:
    """The header of a message that expires after so long."""
    from pika import spec
    from pika.frame import Header

    properties = spec.BasicProperties(delivery_mode=2 if is_durable else 1, expiration=str(ttl_ms))
    return bytes(Header(CHANNEL, BODY_BYTES, properties).marshal())


def confirmed(frame: Frame) -> tuple[int, bool]:
    """Which publish is, and whether all before it are, too."""
    if frame.payload[:4] != ACK:
        raise ConnectionError(f"RabbitMQ answered {frame.payload!r} to a publish")
    tag, is_multiple = TAG.unpack_from(frame.payload, 4)
    return tag, bool(is_multiple)


def frames(data: bytes) -> tuple[list[Frame], bytes]:
    """Those that are complete in front of the data, and the rest."""
    found: list[Frame] = []
    start = 0
    while start + FRAME.size <= len(data):
        kind, _, size = FRAME.unpack_from(data, start)
        end = start + FRAME.size + size
        if end >= len(data):
            break
        found.append(Frame(kind, data[start + FRAME.size : end]))
        start = end + len(FRAME_END)
    return found, data[start:]


def _program() -> Path:
    """Not the one on the path, which changes to a user of its own."""
    return program("rabbitmq-server", "Debian's rabbitmq-server", PROGRAMS)


SYSTEM = RabbitMQ

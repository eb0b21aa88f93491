"""Measures the server: python -m benchmarks.server [--quick] [--only NAME ...] [--json FILE] [--repeat N] ...

A real `postdate up` in a process of its own, bound to one core, on loopback; the load comes from this process, bound to
another. Every message has a body of 200 bytes, a UNIQ_KEY of 32 characters, and the properties and header fields of the
Java client. Data folders are temporary and always removed. Every figure is the median of its repeats.
"""

import asyncio
import os
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import postdate
from benchmarks import bench as common
from benchmarks.process import Running
from benchmarks.report import Figure
from postdate.access.rules import User
from postdate.access.users import Users, with_user
from postdate.client.security import signed_fields
from postdate.tls import CERTIFICATE_FILE, KEY_FILE, client_context
from postdate.wire import codes
from postdate.wire.frame import Command, Frames, decode, encode
from postdate.wire.requests import Request
from postdate.wire.signature import Credentials

TOPIC = "bench"
QUEUE_COUNT = 8
BODY = bytes(range(200))
PULL_BATCH = 32
WINDOW = 2_000  # sends in flight
CHUNK = 250  # sends written at once
PULL_WINDOW = 16
SOCKET_BYTES = 1 << 20
LATE_COUNT, LATE_SPAN_MS, LATE_AFTER_MS = 10_000, 20_000, 5_000
DUE_AT_ONCE_COUNT = 100_000
SENDS_AT_ONCE = 256
ONCE_PIECES = 8
HOUR_MS = 3_600_000
USER = Credentials("bench", "the-secret-of-bench")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Bench(common.Bench):
    """Measures on servers in processes of their own, each bound to one core, and this one to another."""

    def __init__(self, parent: Path, repeat: int, scale: float) -> None:
        super().__init__(parent, repeat, scale)
        cores = sorted(os.sched_getaffinity(0))
        self.server_core, self.client_core = cores[0], cores[-1]
        os.sched_setaffinity(0, {self.client_core})

    @contextmanager
    def server(self, *flags: str) -> Iterator[Running]:
        """`postdate up` on a new folder, stopped and removed at the end."""
        with self.folder() as folder:
            running = Running(folder, flags, {self.server_core})
            try:
                yield running
            finally:
                running.stop()

    @contextmanager
    def secured_server(
        self, *, is_tls: bool, user: Credentials | None = None
    ) -> Iterator[tuple[Running, ssl.SSLContext | None]]:
        """The same with TLS, and the context of a client that trusts it; or without, and None. With a super user, if
        one is given.
        """
        with self.folder() as folder:
            data = folder / "data"
            data.mkdir()
            if user is not None:
                Users(data).change(with_user(User(user.access_key, user.secret_key, is_super=True)))
            if is_tls:
                make_certificate(data)
            running = Running(folder, ("--tls", "enforcing") if is_tls else (), {self.server_core})
            try:
                yield running, client_context(ca_file=str(certificate_of(data))) if is_tls else None
            finally:
                running.stop()


def certificate_of(data: Path) -> Path:
    return data / CERTIFICATE_FILE


def make_certificate(data: Path) -> None:
    """One that signs itself, where the broker looks for it."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(data / KEY_FILE),
         "-out", str(certificate_of(data))],
        check=True, capture_output=True,
    )  # fmt: skip


class Peer:
    """A raw connection to the broker that keeps many requests in flight."""

    def __init__(self, address: str, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname=host)
        self._frames = Frames(256 << 20)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        self._socket.sendall(encode(Command(code, fields, body)))
        while True:
            data = self._socket.recv(SOCKET_BYTES)
            assert data, "the broker has closed the connection"
            for frame in self._frames.feed(data):
                return decode(frame)

    def pump(self, requests: Sequence[bytes], window: int, chunk: int) -> list[bytes]:
        """Sends all requests, `chunk` at a time and at most `window` unanswered; returns the answers."""
        self._socket.setblocking(False)
        answers: list[bytes] = []
        sent, rest = 0, b""
        while len(answers) < len(requests):
            wants = bool(rest) or (sent < len(requests) and sent - len(answers) <= window - chunk)
            readable, writable, _ = select.select([self._socket], [self._socket] if wants else [], [])
            if readable:
                answers += self._frames.feed(self._receive())
            if writable:
                if not rest:
                    rest = b"".join(requests[sent : sent + chunk])
                    sent = min(sent + chunk, len(requests))
                rest = rest[self._send(rest) :]
        self._socket.setblocking(True)
        return answers

    def _receive(self) -> bytes:
        """What is there: with TLS all records of it, for which the socket would not become readable again."""
        received = []
        try:
            received.append(self._socket.recv(SOCKET_BYTES))
            while isinstance(self._socket, ssl.SSLSocket):
                received.append(self._socket.recv(SOCKET_BYTES))
        except (ssl.SSLWantReadError, BlockingIOError):
            return b"".join(received)
        return received[0]

    def _send(self, data: bytes) -> int:
        try:
            return self._socket.send(data)
        except (ssl.SSLWantWriteError, BlockingIOError):
            return 0


def make_topic(peer: Peer, topic: str = TOPIC, who: Credentials | None = None, **more: str) -> None:
    fields = {
        "topic": topic,
        "readQueueNums": str(QUEUE_COUNT),
        "writeQueueNums": str(QUEUE_COUNT),
        "perm": "6",
        **more,
    }
    answer = peer.ask(Request.UPDATE_AND_CREATE_TOPIC, signed_fields(fields, b"", who))
    assert answer.code == codes.SUCCESS, answer


def send_frame(index: int, due_at_ms: int, once: str = "", who: Credentials | None = None) -> bytes:
    """A timed send as the Java client writes it, with an id or without, signed or not."""
    properties = f"UNIQ_KEY\x01{index:032X}\x02WAIT\x01true\x02TIMER_DELIVER_MS\x01{due_at_ms}\x02"
    if once:
        properties += f"POSTDATE_ONCE\x01{once}\x02"
    fields = {
        "a": "producers", "b": TOPIC, "c": "TBW102", "d": "4", "e": str(index % QUEUE_COUNT), "f": "0",
        "g": str(due_at_ms), "h": "0", "i": properties, "j": "0", "k": "false", "m": "false", "n": "postdate",
    }  # fmt: skip
    fields = signed_fields(fields, BODY, who)
    return encode(Command(Request.SEND_MESSAGE_V2, fields, BODY, index, language="JAVA"))


def sent(peer: Peer, dues: Sequence[int], who: Credentials | None = None) -> None:
    """Sends a message for each due time, in pieces, so that their frames do not fill the memory."""
    for start in range(0, len(dues), 100_000):
        frames = [send_frame(start + index, due, who=who) for index, due in enumerate(dues[start : start + 100_000])]
        answers = peer.pump(frames, WINDOW, CHUNK)
        assert decode(answers[-1]).code == codes.SUCCESS, decode(answers[-1])


# -- measures ---------------------------------------------------------------------------------------------------


def send(bench: Bench) -> list[Figure]:
    """Timed sends over one raw connection, due within the minute or in an hour."""
    count = bench.scaled(200_000)
    figures = []
    for name, flush, delay_ms in (
        ("near, sync", "sync", 50_000), ("far, sync", "sync", HOUR_MS), ("near, async", "async", 50_000),
    ):  # fmt: skip
        rates, costs = [], []
        for _ in bench.repeats(f"send {name}"):
            with bench.server("--flush", flush) as server, Peer(server.broker_address) as peer:
                make_topic(peer)
                sent(peer, [now_ms() + HOUR_MS] * CHUNK)
                due_from_ms = now_ms() + delay_ms
                frames = [send_frame(index, due_from_ms + index % 5_000) for index in range(count)]
                before_s, start = server.cpu_s, time.perf_counter()
                peer.pump(frames, WINDOW, CHUNK)
                rates.append(count / (time.perf_counter() - start))
                costs.append((server.cpu_s - before_s) / count * 1e6)
        goal = 80_000 if name == "near, sync" else None
        floor = f"{np.median(costs):.1f} us of CPU a message"
        figures.append(Figure(f"timed sends, raw, {name}", "msg/s", rates, goal, floor=floor))
    return figures


def once(bench: Bench) -> list[Figure]:
    """Near sends with an id and without one, in turn on one server; then those with an id once more, which are answered
    as the first ones.
    """
    count = bench.scaled(25_000) // CHUNK * CHUNK
    rounds = [(piece, kind) for piece in range(ONCE_PIECES) for kind in ("without", "with")]
    rounds += [(piece, "again") for piece in range(ONCE_PIECES)]
    ratios, again_ratios, costs = [], [], []
    for _ in bench.repeats("once"):
        seconds = dict.fromkeys(("without", "with", "again"), 0.0)
        cpu_s = dict(seconds)
        with bench.server() as server, Peer(server.broker_address) as peer:
            make_topic(peer)
            sent(peer, [now_ms() + HOUR_MS] * CHUNK)
            for piece, kind in rounds:
                numbers = range(piece * count, (piece + 1) * count)
                due_from_ms = now_ms() + 50_000
                frames = [
                    send_frame(number, due_from_ms + number % 5_000, "" if kind == "without" else f"order-{number}")
                    for number in numbers
                ]
                before_s, start = server.cpu_s, time.perf_counter()
                answers = peer.pump(frames, WINDOW, CHUNK)
                seconds[kind] += time.perf_counter() - start
                cpu_s[kind] += server.cpu_s - before_s
                assert decode(answers[-1]).code == codes.SUCCESS, decode(answers[-1])
        ratios.append(seconds["without"] / seconds["with"])
        again_ratios.append(seconds["without"] / seconds["again"])
        costs.append([each / (count * ONCE_PIECES) * 1e6 for each in cpu_s.values()])
    without_us, with_us, again_us = np.median(np.array(costs), axis=0)
    floor = f"{with_us:.1f} us of CPU a message, {without_us:.1f} without"
    return [
        Figure("sends with an id, of the rate without", "x", ratios, 0.7, floor=floor),
        Figure("  second sends of an id", "x", again_ratios, None, floor=f"{again_us:.1f} us of CPU a message"),
    ]


def secured(bench: Bench) -> list[Figure]:
    """Near sends over one raw connection: plain, signed to a broker with a user, over TLS, and both, in turn. Of the
    plain ones' rate.
    """
    count = bench.scaled(100_000)
    kinds = {"plain": (False, False), "signed": (True, False), "over TLS": (False, True), "both": (True, True)}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    costs: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in bench.repeats("secured"):
        for kind, (is_signed, is_tls) in kinds.items():
            who = USER if is_signed else None
            with (
                bench.secured_server(is_tls=is_tls, user=who) as (server, tls),
                Peer(server.broker_address, tls) as peer,
            ):
                make_topic(peer, who=who)
                sent(peer, [now_ms() + HOUR_MS] * CHUNK, who)
                due_from_ms = now_ms() + 50_000
                frames = [send_frame(index, due_from_ms + index % 5_000, who=who) for index in range(count)]
                before_s, start = server.cpu_s, time.perf_counter()
                answers = peer.pump(frames, WINDOW, CHUNK)
                rates[kind].append(count / (time.perf_counter() - start))
                costs[kind].append((server.cpu_s - before_s) / count * 1e6)
                assert decode(answers[-1]).code == codes.SUCCESS, decode(answers[-1])
    goals = {"signed": 0.6, "over TLS": 0.5, "both": None}
    floors = {kind: f"{np.median(each):.1f} us of CPU a message" for kind, each in costs.items()}
    figures = [Figure("timed sends, raw, plain beside secured", "msg/s", rates["plain"], None, floor=floors["plain"])]
    for kind, goal in goals.items():
        ratios = [rate / plain for rate, plain in zip(rates[kind], rates["plain"], strict=True)]
        figures.append(Figure(f"  {kind}, of the rate of plain ones", "x", ratios, goal, floor=floors[kind]))
    return figures


def secured_lateness(bench: Bench) -> list[Figure]:
    """How late messages are in hand with TLS and without, in turn."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in bench.repeats("lateness with TLS"):
        for is_tls, p99 in found.items():
            with bench.secured_server(is_tls=is_tls) as (server, tls):
                late_ms = late_ms_of(server, bench.scaled(LATE_COUNT), bench.scaled(LATE_SPAN_MS), tls=tls)
                p99.append(float(np.percentile(late_ms, 99)))
    plain_ms = float(np.median(found[False]))
    goal_ms = max(1.5 * plain_ms, plain_ms + 1)
    return [
        Figure("lateness at the Python client, p99, plain", "ms", found[False], 5.0, at_most=True),
        Figure("lateness at the Python client, p99, over TLS", "ms", found[True], goal_ms, at_most=True),
    ]


def pull(bench: Bench) -> list[Figure]:
    """Pulls of 32 over one raw connection, all queues in turn."""
    count = bench.scaled(400_000) // (QUEUE_COUNT * PULL_BATCH) * QUEUE_COUNT * PULL_BATCH
    with bench.server() as server, Peer(server.broker_address) as peer:
        make_topic(peer)
        sent(peer, [1] * count)
        frames = [
            pull_frame(queue_id, offset)
            for offset in range(0, count // QUEUE_COUNT, PULL_BATCH)
            for queue_id in range(QUEUE_COUNT)
        ]
        rates, costs = [], []
        for _ in bench.repeats("pull"):
            before_s, start = server.cpu_s, time.perf_counter()
            answers = peer.pump(frames, PULL_WINDOW, PULL_WINDOW // 4)
            rates.append(count / (time.perf_counter() - start))
            costs.append((server.cpu_s - before_s) / count * 1e6)
            assert decode(answers[-1]).code == codes.SUCCESS, decode(answers[-1])
    floor = f"{np.median(costs):.2f} us of CPU a message"
    return [Figure(f"pulled, batches of {PULL_BATCH}", "msg/s", rates, 500_000, floor=floor)]


def pull_frame(queue_id: int, offset: int, count_max: int = PULL_BATCH) -> bytes:
    fields = {
        "consumerGroup": "consumers", "topic": TOPIC, "queueId": str(queue_id), "queueOffset": str(offset),
        "maxMsgNums": str(count_max), "sysFlag": "6", "commitOffset": "0", "suspendTimeoutMillis": "15000",
        "subscription": "*", "subVersion": "0", "expressionType": "TAG", "maxMsgBytes": "2147483647",
    }  # fmt: skip
    return encode(Command(Request.PULL_MESSAGE, fields, opaque=1, language="JAVA"))


def lateness(bench: Bench) -> list[Figure]:
    """How long after its due time the consumer has a message in hand: 10,000 over 20 s."""
    p50, p99, worst, early = [], [], [], 0
    for _ in bench.repeats("lateness"):
        with bench.server() as server:
            late_ms = np.array(late_ms_of(server, bench.scaled(LATE_COUNT), bench.scaled(LATE_SPAN_MS)))
        p50.append(float(np.percentile(late_ms, 50)))
        p99.append(float(np.percentile(late_ms, 99)))
        worst.append(float(late_ms.max()))
        early += int((late_ms < 0).sum())
    assert not early, f"{early} messages came before they were due"
    return [
        Figure("lateness at the Python client, p50", "ms", p50, 1.0, at_most=True),
        Figure("lateness at the Python client, p99", "ms", p99, 5.0, at_most=True),
        Figure("lateness at the Python client, worst", "ms", worst, None, at_most=True),
    ]


def late_ms_of(
    server: Running, count: int, span_ms: int, after_ms: int = LATE_AFTER_MS, tls: ssl.SSLContext | None = None
) -> list[float]:
    """How late each of so many messages is in hand, due evenly over a span that begins a while after now."""
    with Peer(server.broker_address, tls) as peer:
        make_topic(peer)
        due_from_ms = now_ms() + after_ms
        dues = [due_from_ms + index * span_ms // count for index in range(count)]
        sent(peer, dues)
    late_ms: list[float] = []
    ca_file = None if tls is None else str(certificate_of(server.data))
    with postdate.connect(server.route_address, tls=tls is not None, ca_file=ca_file) as client:
        for message in client.consume(TOPIC, group="late"):
            received_at_ms, due_at_ms = time.time_ns() / 1e6, int(message.properties["TIMER_DELIVER_MS"])
            if due_at_ms >= due_from_ms:  # not one of an earlier call, which did not commit its last ones
                late_ms.append(received_at_ms - due_at_ms)
            if len(late_ms) == count:
                break
    return late_ms


class Landing(NamedTuple):
    """What it took until a client had the last of many messages."""

    span_s: float  # from the due time on
    client_us: float  # of CPU a message
    server_us: float


def received(bench: Bench) -> list[Figure]:
    """Messages due at one instant, and a client that waits for them: until it has the last, and what that costs."""
    figures = []
    for manner, consume_all, count, goal_s in (
        ("blocking", _consume, DUE_AT_ONCE_COUNT, 0.3), ("asyncio", _consume_async, DUE_AT_ONCE_COUNT, 0.3),
        ("blocking", _consume, 10 * DUE_AT_ONCE_COUNT, None),
    ):  # fmt: skip
        count = bench.scaled(count)
        name = f"{count:,} due at one instant, {manner}"
        landings = [_landing(bench, consume_all, count) for _ in bench.repeats(name)]
        goal = None if goal_s is None else goal_s * bench.scale
        figures += [
            Figure(f"{name}: last in hand", "s", [each.span_s for each in landings], goal, at_most=True),
            Figure(f"{name}: CPU of the client", "us", [each.client_us for each in landings], 2.5, at_most=True),
            Figure(f"{name}: CPU of the server", "us", [each.server_us for each in landings], 1.0, at_most=True),
        ]
    return figures


def _landing(bench: Bench, consume_all: Callable[[str, int], float], count: int) -> Landing:
    """The server's share counts the firing, both count what comes right before: joining the group."""
    with bench.server() as server:
        with Peer(server.broker_address) as peer:
            make_topic(peer)
            due_at_ms = now_ms() + min(10_000 + count // 20, 55_000)
            sent(peer, [due_at_ms] * count)
        assert now_ms() < due_at_ms - 1_000, "sending took longer than the delay"
        before_s, server_before_s = time.process_time(), server.cpu_s
        span_s = (consume_all(server.route_address, count) - due_at_ms) / 1_000
        client_s, server_s = time.process_time() - before_s, server.cpu_s - server_before_s
        return Landing(span_s, client_s / count * 1e6, server_s / count * 1e6)


def burst(bench: Bench) -> list[Figure]:
    """1,000,000 messages due at one instant: until all are visible, asked over the network; and what they cost."""
    count = bench.scaled(1_000_000)
    spans, started_mb, waiting_mb = [], [], []
    for _ in bench.repeats("burst"):
        with bench.server() as server, Peer(server.broker_address) as peer:
            started_mb.append(server.resident_mb)
            make_topic(peer)
            due_at_ms = now_ms() + max(int(55_000 * bench.scale), 10_000)
            sent(peer, [due_at_ms] * count)
            assert now_ms() < due_at_ms, "sending took longer than the delay"
            waiting_mb.append(server.resident_mb)
            spans.append(visible_after_s(peer, count, due_at_ms))
    return [
        Figure(f"{count:,} due at one instant, all visible", "s", spans, 0.2 * bench.scale, at_most=True),
        Figure("memory after start", "MB", started_mb, 120, at_most=True),
        Figure(f"memory with {count:,} near messages", "MB", waiting_mb, 220, at_most=True),
    ]


def visible_after_s(peer: Peer, count: int, due_at_ms: int, topic: str = TOPIC) -> float:
    time.sleep(max(due_at_ms - now_ms() - 5, 0) / 1_000)
    while True:
        visible = 0
        for queue_id in range(QUEUE_COUNT):
            answer = peer.ask(Request.GET_MAX_OFFSET, {"topic": topic, "queueId": queue_id})
            visible += int(answer.fields["offset"])
        if visible == count:
            return (time.time_ns() / 1e6 - due_at_ms) / 1_000


def idle(bench: Bench) -> list[Figure]:
    """CPU of a server that waits, with a consumer connected and messages due in an hour."""
    shares, span_s = [], max(10.0 * bench.scale, 3.0)
    for _ in bench.repeats("idle"):
        with bench.server() as server, Peer(server.broker_address) as peer:
            make_topic(peer)
            sent(peer, [now_ms() + HOUR_MS] * 1_000)
            peer.ask(Request.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": 0})
            time.sleep(1)
            before_s = server.cpu_s
            time.sleep(span_s)
            shares.append((server.cpu_s - before_s) / span_s * 100)
    return [Figure("CPU while idle", "% of a core", shares, 1.0, at_most=True)]


def client(bench: Bench) -> list[Figure]:
    """The Python client: one send after the other, in batches, many at once, and consuming in both manners."""
    single, batched, piped, consumed, consumed_async = [], [], [], [], []
    singles, piped_count, count = bench.scaled(5_000), bench.scaled(20_000), bench.scaled(50_000)
    for _ in bench.repeats("client"):
        with bench.server() as server, postdate.connect(server.route_address) as connected:
            single.append(_rate(singles, lambda: [connected.send(TOPIC, BODY, delay="1h") for _ in range(singles)]))
            piped.append(asyncio.run(_piped_rate(server.route_address, piped_count)))
            messages = [postdate.Outgoing(BODY) for _ in range(count)]
            batched.append(_rate(count, partial(connected.send_batch, TOPIC, messages)))
            consumed.append(_rate(count, partial(_consume, server.route_address, count)))
            consumed_async.append(_rate(count, partial(_consume_async, server.route_address, count)))
    return [
        Figure("Python client, one timed send after the other, sync", "msg/s", single, None),
        Figure(f"Python client, asyncio, {SENDS_AT_ONCE} timed sends at once", "msg/s", piped, 15_000),
        Figure("Python client, batches", "msg/s", batched, 60_000),
        Figure("Python client, consumed", "msg/s", consumed, 50_000),
        Figure("Python client, asyncio, consumed", "msg/s", consumed_async, 50_000),
    ]


class Listening(NamedTuple):
    """What a run of `listen` cost: messages in a second, and CPU of both sides for each message."""

    rate: float
    server_us: float
    client_us: float


def listen(bench: Bench) -> list[Figure]:
    """The Python client's `listen` by pop and by pull (ordered), side by side, with a handler that does nothing."""
    count, figures = bench.scaled(50_000), list[Figure]()
    for manner, listen_to_all, workers in (
        ("blocking, 1 thread", _listen, 1),
        ("asyncio, 50 tasks", _listen_async, 50),
    ):
        runs: dict[bool, list[Listening]] = {False: [], True: []}
        for _ in bench.repeats(f"listen, {manner}"):
            for is_ordered, found in runs.items():  # in turn, so that noise meets both
                found.append(_listening(bench, count, partial(listen_to_all, is_ordered=is_ordered, workers=workers)))
        for is_ordered, found in runs.items():
            name = f"listen, {manner}, by {'pull' if is_ordered else 'pop'}"
            figures += [
                Figure(name, "msg/s", [run.rate for run in found], None),
                Figure(f"{name}: CPU of the server", "us a message", [run.server_us for run in found], None),
                Figure(f"{name}: CPU of the client", "us a message", [run.client_us for run in found], None),
            ]
    return figures


def _listening(bench: Bench, count: int, listen_to_all: Callable[[str, int], None]) -> Listening:
    with bench.server() as server, postdate.connect(server.route_address) as connected:
        with Peer(server.broker_address) as peer:
            make_topic(peer)
        connected.send_batch(TOPIC, [postdate.Outgoing(BODY) for _ in range(count)])
        before_s, own_before_s = server.cpu_s, time.process_time()
        rate = _rate(count, partial(listen_to_all, server.route_address, count))
        server_s, client_s = server.cpu_s - before_s, time.process_time() - own_before_s
        return Listening(rate, server_s / count * 1e6, client_s / count * 1e6)


def _listen(address: str, count: int, *, is_ordered: bool, workers: int) -> None:
    left = iter(range(count - 1, -1, -1))
    with postdate.connect(address) as connected:

        def handle(message: postdate.ReceivedMessage) -> None:
            assert len(message.body) == len(BODY)
            if next(left) == 0:
                connected.stop()

        connected.listen(TOPIC, "listeners", handle, threads=workers, ordered=is_ordered)


def _listen_async(address: str, count: int, *, is_ordered: bool, workers: int) -> None:
    async def listen_to_all() -> None:
        left = iter(range(count - 1, -1, -1))
        async with postdate.connect_async(address) as connected:

            async def handle(message: postdate.AsyncReceivedMessage) -> None:
                assert len(message.body) == len(BODY)
                if next(left) == 0:
                    await connected.stop()

            await connected.listen(TOPIC, "listeners", handle, tasks=workers, ordered=is_ordered)

    asyncio.run(listen_to_all())


def _rate(count: int, work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


async def _piped_rate(address: str, count: int) -> float:
    """Sends of which a bounded number is under way at any time. The first ones, which connect, are not counted.

    A fixed number of tasks is the bound: a semaphore around each send would cost nearly as much as the send.
    """

    async def send_many() -> None:
        for _ in range(count // SENDS_AT_ONCE):
            await connected.send(TOPIC, BODY, delay="1h")

    async with postdate.connect_async(address) as connected:
        await send_many()
        start = time.perf_counter()
        await asyncio.gather(*[send_many() for _ in range(SENDS_AT_ONCE)])
        return count // SENDS_AT_ONCE * SENDS_AT_ONCE / (time.perf_counter() - start)


def _consume(address: str, count: int) -> float:
    """Returns when the last of so many messages was there, in epoch milliseconds."""
    with postdate.connect(address) as connected:
        for number, message in enumerate(connected.consume(TOPIC, group="consumers"), 1):
            assert len(message.body) == len(BODY)
            if number == count:
                return time.time_ns() / 1e6
    raise AssertionError("the loop has ended")


def _consume_async(address: str, count: int) -> float:
    async def consume_all() -> float:
        number = 0
        async with postdate.connect_async(address) as connected:
            async for message in connected.consume(TOPIC, group="consumers-async"):
                assert len(message.body) == len(BODY)
                number += 1
                if number == count:
                    return time.time_ns() / 1e6
        raise AssertionError("the loop has ended")

    return asyncio.run(consume_all())


# -- the command ------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "send": send,
    "once": once,
    "secured": secured,
    "secured-lateness": secured_lateness,
    "pull": pull,
    "lateness": lateness,
    "received": received,
    "burst": burst,
    "idle": idle,
    "client": client,
    "listen": listen,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every goal was reached, 1 otherwise."""
    return common.run("server", "Postdate's server", Bench, MEASURES, arguments)


if __name__ == "__main__":
    sys.exit(main())

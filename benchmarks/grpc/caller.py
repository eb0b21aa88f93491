"""A raw plaintext connection to a gRPC port, that makes one kind of call again and again: no client library, no Java.

Header fields are bytes made once, but for the id of a request, which is another in each as with every client: what a
server knows by its bytes it would know of a real client, too.
"""

import asyncio
from collections.abc import Callable, Iterable
from struct import Struct
from typing import NamedTuple

from benchmarks.rocketmq.program import Failed
from postdate.wire import messaging
from postdate.wire.fields import encode_fields
from postdate.wire.http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_BYTES_DEFAULT,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
    encode_frame,
)

_PREFIX = Struct(">BI")  # of a message of gRPC
_REQUEST_ID_BYTES = 36
# All answers of a run fit into the connection's window, so that nothing of it is about windows.
_GREETING = PREFACE + encode_frame(SETTINGS, 0, 0)
_GREETING += encode_frame(WINDOW_UPDATE, 0, 0, (WINDOW_BYTES_MAX - WINDOW_BYTES_DEFAULT).to_bytes(4, "big"))


class Kind(NamedTuple):
    """A method, the code with which each of its answers has to begin, and a call's deadline."""

    method: str
    code: int
    timeout_s: float


SENDS = Kind("SendMessage", messaging.OK, 30)


def receives(polling_s: float) -> Kind:
    """Of consumers for whom there is nothing."""
    return Kind("ReceiveMessage", messaging.NO_MESSAGE, polling_s + 3)


class Caller(asyncio.Protocol):
    """One connection. Calls `ended` when a call was answered as it has to be. What was not, and a connection that the
    server closes, is the exception of `problem`, which all connections of a run share.
    """

    def __init__(
        self,
        kind: Kind,
        client_id: str,
        contents: Iterable[bytes],
        ended: Callable[["Caller"], None],
        problem: "asyncio.Future[None]",
    ) -> None:
        self._kind, self._contents, self._ended, self._problem = kind, iter(contents), ended, problem
        self._head = _header_block(kind, client_id)
        _, self._answer_class = messaging.requests_of(kind.method)
        self._stream_id = 1
        self._window = WINDOW_BYTES_DEFAULT  # of the server, for us
        self._rest = b""
        self._answers: dict[int, bytes] = {}
        self._transport: asyncio.Transport | None = None
        self._is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(_GREETING)

    def close(self) -> None:
        assert self._transport is not None
        self._is_closed = True
        self._transport.close()

    def call(self, count: int = 1) -> None:
        """Makes that many calls, less if there are no more contents."""
        frames = []
        for _, content in zip(range(count), self._contents, strict=False):
            request_id = b"%0*x" % (_REQUEST_ID_BYTES, self._stream_id)
            data = _PREFIX.pack(0, len(content)) + content
            frames.append(encode_frame(HEADERS, END_HEADERS, self._stream_id, self._head + request_id))
            frames.append(encode_frame(DATA, END_STREAM, self._stream_id, data))
            self._window -= len(data)
            self._stream_id += 2
        assert self._window >= 0, f"{-self._window} bytes beyond the server's window: fewer calls at once are needed"
        assert self._transport is not None
        self._transport.write(b"".join(frames))

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        start = 0
        while start + FRAME_HEADER_BYTES <= len(data):
            end = start + FRAME_HEADER_BYTES + int.from_bytes(data[start : start + 3], "big")
            if end > len(data):
                break
            kind, flags = data[start + 3], data[start + 4]
            stream_id = int.from_bytes(data[start + 5 : start + 9], "big")
            self._take(kind, flags, stream_id, data[start + FRAME_HEADER_BYTES : end])
            start = end
        self._rest = data[start:]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == DATA:
            self._answers[stream_id] = self._answers.get(stream_id, b"") + payload
        elif kind in (SETTINGS, PING) and not flags & ACK:
            assert self._transport is not None
            self._transport.write(encode_frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == WINDOW_UPDATE and stream_id == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind in (RST_STREAM, GOAWAY):
            self._fail(f"frame of kind {kind}: {payload!r}")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            self._end(self._answers.pop(stream_id, b""))

    def _end(self, answer: bytes) -> None:
        length = _PREFIX.unpack_from(answer)[1] if answer else 0
        status = self._answer_class.FromString(answer[_PREFIX.size : _PREFIX.size + length]).status
        if status.code != self._kind.code:
            self._fail(f"code {status.code} ({status.message!r}), expected {self._kind.code}")
        else:
            self._ended(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._fail(f"the connection was closed: {error}")

    def _fail(self, problem: str) -> None:
        if not self._problem.done():
            self._problem.set_exception(Failed(f"{self._kind.method} over a raw connection: {problem}"))


def _header_block(kind: Kind, client_id: str) -> bytes:
    """All but the value of the last field, the id of the request."""
    fields = (
        (":method", "POST"), (":scheme", "http"), (":path", f"{messaging.SERVICE_PATH}{kind.method}"),
        (":authority", "127.0.0.1:8081"), ("content-type", "application/grpc"), ("te", "trailers"),
        ("user-agent", "grpc-java-netty/1.50.0"), ("grpc-timeout", f"{kind.timeout_s * 1_000:.0f}m"),
        ("x-mq-client-id", client_id), ("x-mq-language", "JAVA"), ("x-mq-client-version", "5.2.0"),
        ("x-mq-protocol", "v2"), ("x-mq-date-time", "20261115T120000Z"), ("x-mq-namespace", ""),
        ("x-mq-request-id", "0" * _REQUEST_ID_BYTES),
    )  # fmt: skip
    block = encode_fields([(name.encode(), value.encode()) for name, value in fields])
    return block[:-_REQUEST_ID_BYTES]

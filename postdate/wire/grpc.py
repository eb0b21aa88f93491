"""gRPC over HTTP/2, the server's end of one connection: bytes in, calls and messages out, answers back.

```
  0        1             5
  +--------+-------------+---- - -
  | packed | length      | message        as often as there are messages, cut into DATA frames anywhere
  +--------+-------------+---- - -
```

A call is a stream. Its path names the method, and its status comes last, in trailers. What is no call of gRPC is
answered with an HTTP status, so that a browser or a probe is told what it has found; nobody else hears of it.
"""

import re
import zlib
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple
from urllib.parse import quote

from postdate.wire.fields import Pair, encode_fields
from postdate.wire.http2 import (
    BOUNDS,
    NO_ERROR,
    Bounds,
    DataReceived,
    Http2,
    StreamHalfClosed,
    StreamOpened,
)

# Status of a call.
(
    OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED,
    RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS,
    UNAUTHENTICATED,
) = range(17)  # fmt: skip

_PREFIX = Struct(">BI")
_PREFIX_BYTES = _PREFIX.size
_STATUS_TEXT_MAX = 1_024  # clients take trailers of 8 KiB, and each character may become 12 bytes at worst
_PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if code != ord("%"))  # what a status text has as it is
_GZIP_BITS = 31  # of zlib: gzip, with its header and checksum
_TIMEOUT = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNITS = {"H": (3_600_000, 1), "M": (60_000, 1), "S": (1_000, 1), "m": (1, 1), "u": (1, 1_000), "n": (1, 1_000_000)}

_FIELDS = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_HEAD = encode_fields(_FIELDS)
_TAIL = encode_fields(((b"grpc-status", b"0"),))
_ACCEPTS = ((b"grpc-accept-encoding", b"identity,gzip"),)  # said to those who used another


class CallStarted(NamedTuple):
    """A call: its path as it came, and its fields without the pseudo-header ones. Values of -bin fields are base64."""

    stream_id: int
    path: str
    headers: dict[str, str]
    timeout_ms: int | None


class MessageReceived(NamedTuple):
    stream_id: int
    message: bytes


class CallHalfClosed(NamedTuple):
    """The client sends nothing more. How many messages there were is the method's to judge."""

    stream_id: int


class CallCancelled(NamedTuple):
    """The client has reset the call, or broken its protocol: whatever it is answered from now on goes nowhere. It may
    come after `answer` and `end`, where a part of the answer still waited for the client's window.
    """

    stream_id: int


GrpcEvent = CallStarted | MessageReceived | CallHalfClosed | CallCancelled


class _Call:
    """One that is not answered to its end."""

    __slots__ = ("encoding", "has_begun", "rest")

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self.has_begun = False  # whether its initial HEADERS were sent
        self.rest = bytearray()  # an incomplete message


class _Broken(Exception):
    """A call that cannot go on; the status and the reason that its client is given."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Refusal(NamedTuple):
    """The whole answer to a request that is no call."""

    head: bytes
    body: bytes


def _refusal(status: bytes, body: bytes, *fields: Pair) -> _Refusal:
    length = str(len(body)).encode()
    head = ((b":status", status), (b"content-type", b"text/plain"), (b"content-length", length), *fields)
    return _Refusal(encode_fields(head), body)


_NO_POST = _refusal(b"405", b"This port speaks gRPC: send a POST.\n", (b"allow", b"POST"))
_NO_GRPC = _refusal(b"415", b"This port speaks gRPC: the content-type must be application/grpc.\n")
_NO_TRAILERS = _refusal(b"400", b"The field 'te: trailers' is missing: does a proxy pass no trailers on?\n")


class Grpc:
    """One connection. Calls for a stream that has gone are ignored: the client may cancel at any time."""

    def __init__(self, message_bytes_max: int, bounds: Bounds = BOUNDS) -> None:
        self._http2 = Http2(bounds)
        self._message_bytes_max = message_bytes_max
        self._unfinished_bytes_max = bounds.unfinished_bytes_max
        self._unfinished_bytes = 0  # in the rests of all calls
        self._calls: dict[int, _Call] = {}
        self._refused: dict[int, _Refusal] = {}  # requests that are no calls, until they have come wholly

    @property
    def waiting_bytes(self) -> int:
        """Held because the peer's windows are closed."""
        return self._http2.waiting_bytes

    @property
    def is_over(self) -> bool:
        """Close the socket after writing the output."""
        return self._http2.is_over

    @property
    def error(self) -> str:
        """Why it is over, for the log; empty where nobody made a mistake."""
        return self._http2.error

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[GrpcEvent]:
        """Takes bytes in; returns what they mean, also what came before a mistake."""
        found: list[GrpcEvent] = []
        for event in self._http2.receive(data):
            stream_id = event.stream_id
            try:
                if type(event) is StreamOpened:
                    self._open(stream_id, event.headers, found)
                elif type(event) is DataReceived:
                    self._take(stream_id, event.data, found)
                elif type(event) is StreamHalfClosed:
                    self._end_request(stream_id, found)
                elif self._refused.pop(stream_id, None) is None:
                    self._forget(stream_id)
                    found.append(CallCancelled(stream_id))
            except _Broken as error:
                self.end(stream_id, error.status, str(error))
                self._http2.reset(stream_id, NO_ERROR)  # where its answers before that still wait
                found.append(CallCancelled(stream_id))
        return found

    def _open(self, stream_id: int, pairs: Sequence[Pair], found: list[GrpcEvent]) -> None:
        # The last one of a name holds, as for RocketMQ: its Go client signs a call that it tries again once more, and
        # sends the older signatures before the new one.
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}
        refusal = _refusal_of(fields)
        if refusal is not None:
            self._refused[stream_id] = refusal
            return
        path = fields.pop(":path")
        del fields[":method"], fields[":scheme"]
        fields.pop(":authority", None)
        timeout = fields.get("grpc-timeout")
        timeout_ms = None if timeout is None else parse_timeout(timeout)
        self._calls[stream_id] = _Call(fields.get("grpc-encoding", "identity"))
        if timeout_ms is None and timeout is not None:
            self.end(stream_id, INTERNAL, f"grpc-timeout {timeout!r}, expected up to 8 digits and one of H M S m u n")
            return
        found.append(CallStarted(stream_id, path, fields, timeout_ms))

    def _take(self, stream_id: int, data: bytes, found: list[GrpcEvent]) -> None:
        call = self._calls.get(stream_id)
        if call is None:
            return  # refused, or answered already
        rest = call.rest
        if not rest and len(data) >= _PREFIX_BYTES:
            flag, length = _PREFIX.unpack_from(data)
            # The usual case: one message in one frame.
            if not flag and length == len(data) - _PREFIX_BYTES <= self._message_bytes_max:
                found.append(MessageReceived(stream_id, data[_PREFIX_BYTES:]))
                return
        rest += data
        self._unfinished_bytes += len(data)
        position, end = 0, len(rest)
        while end - position >= _PREFIX_BYTES:
            flag, length = _PREFIX.unpack_from(rest, position)
            if flag > 1:
                raise _Broken(INTERNAL, f"a message with flag {flag}, expected 0 or 1")
            if length > self._message_bytes_max:
                raise _Broken(RESOURCE_EXHAUSTED, f"a message of {length} bytes, at most {self._message_bytes_max}")
            start = position + _PREFIX_BYTES
            if start + length > end:
                break
            position = start + length
            message = bytes(rest[start:position])
            found.append(MessageReceived(stream_id, self._unpack(message, call.encoding) if flag else message))
        if position:
            del rest[:position]
            self._unfinished_bytes -= position
        if self._unfinished_bytes > self._unfinished_bytes_max:
            raise _Broken(RESOURCE_EXHAUSTED, f"more than {self._unfinished_bytes_max} bytes of unfinished messages")

    def _unpack(self, packed: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            raise _Broken(INTERNAL, "a compressed message of a call without grpc-encoding")
        if encoding != "gzip":
            raise _Broken(UNIMPLEMENTED, f"grpc-encoding {encoding!r}, expected gzip or identity")
        unzip = zlib.decompressobj(_GZIP_BITS)
        try:
            message = unzip.decompress(packed, self._message_bytes_max + 1)
        except zlib.error as error:
            raise _Broken(INTERNAL, f"a message that is no gzip: {error}") from error
        if len(message) > self._message_bytes_max:
            raise _Broken(RESOURCE_EXHAUSTED, f"a message of more than {self._message_bytes_max} bytes, unpacked")
        if not unzip.eof or unzip.unused_data:
            raise _Broken(INTERNAL, "a compressed message that does not end where its gzip does")
        return message

    def _end_request(self, stream_id: int, found: list[GrpcEvent]) -> None:
        refusal = self._refused.pop(stream_id, None)
        if refusal is not None:
            self._http2.start_encoded(stream_id, refusal.head)
            self._http2.send(stream_id, refusal.body)
            self._http2.finish(stream_id, ())
            return
        call = self._calls.get(stream_id)
        if call is None:
            return
        if call.rest:
            raise _Broken(INTERNAL, f"a call that ends within a message, after {len(call.rest)} bytes of it")
        found.append(CallHalfClosed(stream_id))

    # -- answering ----------------------------------------------------------------------------------------------

    def answer(self, stream_id: int, message: bytes) -> None:
        """Answers a unary call that has half-closed, with status OK."""
        if self._forget(stream_id):
            self._http2.answer(stream_id, _HEAD, _PREFIX.pack(0, len(message)) + message, _TAIL)

    def begin(self, stream_id: int) -> None:
        """Sends the initial HEADERS of a stream at once: some clients wait for them before they send more."""
        call = self._calls.get(stream_id)
        if call is not None and not call.has_begun:
            call.has_begun = True
            self._http2.start_encoded(stream_id, _HEAD)

    def send(self, stream_id: int, message: bytes) -> None:
        """Sends one message of a stream, and begins it where nobody has."""
        if stream_id in self._calls:
            self.begin(stream_id)
            self._http2.send(stream_id, _PREFIX.pack(0, len(message)) + message)

    def end(self, stream_id: int, status: int = OK, text: str = "") -> None:
        """Ends a call by its status, after all that was sent on it; where nothing was, that is the whole answer."""
        call = self._forget(stream_id)
        if call is None:
            return
        if call.has_begun and not (status or text):
            self._http2.finish_encoded(stream_id, _TAIL)
            return
        trailers: list[Pair] = [(b"grpc-status", str(status).encode())]
        if text:
            trailers.append((b"grpc-message", _encode_text(text)))
        if status == UNIMPLEMENTED and call.encoding not in {"identity", "gzip"}:
            trailers += _ACCEPTS
        if call.has_begun:
            self._http2.finish(stream_id, trailers)
        else:
            self._http2.start(stream_id, (*_FIELDS, *trailers), end=True)

    def shut_down(self) -> None:
        """Takes no new calls; the connection is over when those that are open have ended."""
        self._http2.shut_down()

    def take_output(self) -> bytes:
        """Returns what is to be written to the socket now."""
        return self._http2.take_output()

    def _forget(self, stream_id: int) -> _Call | None:
        call = self._calls.pop(stream_id, None)
        if call is not None and call.rest:
            self._unfinished_bytes -= len(call.rest)
        return call


# -- fields -----------------------------------------------------------------------------------------------------


def _refusal_of(fields: dict[str, str]) -> _Refusal | None:
    """Returns the answer to what is no call of gRPC, None for a call."""
    if fields[":method"] != "POST":
        return _NO_POST
    if not fields.get("content-type", "").startswith("application/grpc"):
        return _NO_GRPC
    return None if "te" in fields else _NO_TRAILERS


def parse_timeout(text: str) -> int | None:
    """Returns the milliseconds of a grpc-timeout, rounded up; None where it is none."""
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        return None
    factor, divisor = _UNITS[found[2]]
    return -(-int(found[1]) * factor // divisor)


def _encode_text(text: str) -> bytes:
    return quote(text[:_STATUS_TEXT_MAX].strip(), safe=_PLAIN).encode()

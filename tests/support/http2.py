"""A client of `Http2` for tests, frame by frame: it may say what is wrong, and hears by code that is not ours."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from postdate.wire.fields import Pair
from postdate.wire.http2 import (
    ACK,
    BOUNDS,
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER_BYTES,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Bounds,
    Event,
    Http2,
    encode_frame,
)

REQUEST: tuple[Pair, ...] = (
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/service/Method"), (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)  # fmt: skip


class Heard(NamedTuple):
    """A frame of the server: its kind, its stream, what it says, whether it ends its stream."""

    kind: str
    stream_id: int
    content: Any = None
    ends: bool = False


def block_of(pairs: Sequence[Pair], *, huffman: bool = False) -> bytes:
    """A header block that leaves no table behind."""
    encoder = Encoder()
    encoder.header_table_size = 0
    return encoder.encode(pairs, huffman=huffman)


def headers(stream_id: int, pairs: Sequence[Pair] = REQUEST, *, end: bool = True, flags: int = END_HEADERS) -> bytes:
    return encode_frame(HEADERS, flags | (END_STREAM if end else 0), stream_id, block_of(pairs))


def number(kind: int, stream_id: int, value: int) -> bytes:
    return encode_frame(kind, 0, stream_id, value.to_bytes(4, "big"))


def rst(stream_id: int, code: int = 8) -> bytes:
    return number(RST_STREAM, stream_id, code)


def window_update(stream_id: int, growth: int) -> bytes:
    return number(WINDOW_UPDATE, stream_id, growth)


def settings(*wanted: tuple[int, int]) -> bytes:
    payload = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in wanted)
    return encode_frame(SETTINGS, 0, 0, payload)


def frames_of(data: bytes) -> list[Frame]:
    """Cuts what a server writes into frames."""
    found = []
    view = memoryview(data)
    while view:
        frame, length = Frame.parse_frame_header(view[:FRAME_HEADER_BYTES])
        frame.parse_body(view[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + length])
        found.append(frame)
        view = view[FRAME_HEADER_BYTES + length :]
    return found


class Ears:
    """Reads what a server writes on one connection."""

    def __init__(self) -> None:
        self._decoder = Decoder()
        self._block = b""

    def hear(self, data: bytes) -> list[Heard]:
        """What it wrote; a block and its CONTINUATIONs are one."""
        found = []
        ends = False
        for frame in frames_of(data):
            kind, stream_id = type(frame).__name__.removesuffix("Frame"), frame.stream_id
            match frame:
                case HeadersFrame() | ContinuationFrame():
                    self._block += frame.data
                    ends = ends or "END_STREAM" in frame.flags
                    if "END_HEADERS" in frame.flags:
                        pairs = [(bytes(name), bytes(value)) for name, value in self._decoder.decode(self._block, True)]
                        found.append(Heard("Headers", stream_id, pairs, ends))
                        self._block, ends = b"", False
                case DataFrame():
                    found.append(Heard(kind, stream_id, frame.data, "END_STREAM" in frame.flags))
                case RstStreamFrame() | GoAwayFrame():
                    found.append(Heard(kind, stream_id, frame.error_code))
                case WindowUpdateFrame():
                    found.append(Heard(kind, stream_id, frame.window_increment))
                case SettingsFrame():
                    found.append(Heard(kind, stream_id, "ACK" if "ACK" in frame.flags else dict(frame.settings)))
                case PingFrame():
                    found.append(Heard(kind, stream_id, frame.opaque_data))
                case _:
                    raise AssertionError(f"a server sent {frame}")
        return found


class Client:
    """One connection to a server that it owns, past the greetings unless told otherwise."""

    def __init__(self, bounds: Bounds = BOUNDS, *wanted: tuple[int, int], is_greeting: bool = True) -> None:
        self.server = Http2(bounds)
        self._ears = Ears()
        self.last_id = -1  # of the streams that we were told of
        if is_greeting:
            self.say(PREFACE + settings(*wanted) + encode_frame(SETTINGS, ACK, 0))
            self.hear()

    def say(self, data: bytes) -> list[Event]:
        events = self.server.receive(data)
        self.last_id = max([self.last_id, *(event.stream_id for event in events)])
        return events

    def hear(self) -> list[Heard]:
        return self._ears.hear(self.server.take_output())

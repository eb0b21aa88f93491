"""HTTP/2, the server's end of one connection: bytes in, events and bytes out (RFC 9113, and RFC 7541 for headers).

```
  0                 3      4       5               9
  +-----------------+------+-------+---------------+---- - -
  | length          | kind | flags | stream        | payload
  +-----------------+------+-------+---------------+---- - -
```

There is no socket, clock or loop here. `receive` takes what the socket gave and returns what it means; `start`, `send`
and `finish` answer a stream; `take_output` returns what is to be written. A peer may cancel at any time, so every call
for a stream that has gone is ignored.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from postdate.errors import ProtocolError
from postdate.wire.fields import (
    NO_TABLE,
    Field,
    FieldReader,
    Pair,
    TooManyFields,
    are_trailers,
    content_length,
    encode_fields,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

# Kinds of frames.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
# Flags. Those of SETTINGS and PING are named ACK, and have the bit of END_STREAM.
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20
# Error codes.
(
    NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR,
    REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM,
) = range(12)  # fmt: skip
# Settings.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = (
    range(1, 7)
)

FRAME_HEADER_BYTES = 9
WINDOW_BYTES_DEFAULT = 65_535  # of every window before anything is said about it
WINDOW_BYTES_MAX = 2**31 - 1
FRAME_BYTES_DEFAULT = 16_384  # the largest payload before anything is said about it, and the largest that we take
_FRAME_BYTES_MAX = 2**24 - 1
_STREAM_ID_MAX = 2**31 - 1

_HEADER = Struct(">HBBBI")  # the length's upper 16 bits and lower 8, kind, flags, stream
_SETTING = Struct(">HI")
_INT32 = Struct(">I")
_NUMBER = Struct(">HBBBII")  # a whole WINDOW_UPDATE, or a whole RST_STREAM
_GOAWAY = Struct(">II")  # the last stream, the code


class Bounds(NamedTuple):
    """What one peer may make us hold or do. Counts are those since the last answer that was sent to its end: a peer
    that lets us answer its requests reaches none of them.
    """

    # More than any client of RocketMQ has in flight: one with thousands of held receives gets them all held.
    streams_max: int = 10_000
    # What may be on its way to us: DATA is handed on as it comes, and a window opened again when half of it is used. A
    # message of 4 MiB takes four round trips. Both are above 65,535, which a peer uses before it hears of ours.
    stream_window_bytes: int = 1 << 20
    connection_window_bytes: int = 16 << 20
    # CONTINUATION flood: our fields take 1 KiB, a long token a few more.
    header_block_bytes_max: int = 32 << 10
    header_block_frames_max: int = 16
    # Header bombs: the decoded list as RFC 9113 counts it, 32 bytes more for each field. Announced to the peer.
    header_list_bytes_max: int = 32 << 10
    # Rapid reset: streams that ended before we had answered, be it by RST_STREAM or by a mistake that made us reset
    # them, less those that we have answered. A client's calls that run into their deadlines all end so.
    resets_max: int = 1_000
    # Streams beyond streams_max, each of which costs us its header block.
    refused_max: int = 1_000
    # A SETTINGS frame may change the windows of all streams, so it is the dearest to us.
    settings_max: int = 100
    # Java pings each 5 minutes, and gRPC's core once per read to measure the way.
    pings_max: int = 1_000
    # DATA without content that does not end its stream.
    empty_data_max: int = 1_000
    priorities_max: int = 1_000
    # WINDOW_UPDATE frames for less than tiny_update_bytes: each may make us send a frame of almost nothing.
    tiny_updates_max: int = 1_000
    tiny_update_bytes: int = 1 << 10
    # Frames of unknown kinds, and those that come late for streams that have ended.
    ignored_max: int = 1_000
    # Streams that we reset and whose frames are still on their way. One forgotten costs its peer the connection.
    late_streams_max: int = 10_000
    # What waits for a peer that opens no window. Callers stop long before, by `waiting_bytes`.
    waiting_bytes_max: int = 64 << 20
    # Answers to frames, kept while the caller cannot write.
    output_bytes_max: int = 8 << 20
    # gRPC: messages of which only a part has come, on all streams of a connection.
    unfinished_bytes_max: int = 64 << 20


BOUNDS = Bounds()


class StreamOpened(NamedTuple):
    """A request: its fields in the order of the wire, pseudo-header fields first."""

    stream_id: int
    headers: list[Pair]


class DataReceived(NamedTuple):
    stream_id: int
    data: bytes


class StreamHalfClosed(NamedTuple):
    """The peer sends nothing more on this stream; it can be answered still."""

    stream_id: int


class StreamReset(NamedTuple):
    """A stream ended before it was answered: its peer has reset it, or made a mistake and we did."""

    stream_id: int
    code: int


Event = StreamOpened | DataReceived | StreamHalfClosed | StreamReset


# -- states of a stream -----------------------------------------------------------------------------------------

# RFC 9113, 5.1. Ours are fewer: where we end a stream whose peer has not, we reset it, so that no stream is closed on
# our side alone. LATE is such a stream: what its peer sent before it heard of that is dropped.
IDLE, OPEN, HALF_CLOSED, CLOSED, LATE, SKIPPED = range(6)
# What the peer does to it. Trailers are a block that comes second.
_OPENS, _OPENS_AND_ENDS, _SENDS, _SENDS_AND_ENDS, _RESETS, _UPDATES = range(6)


class _Mistake(NamedTuple):
    code: int
    text: str
    is_fatal: bool = True  # ends the connection, not the stream alone


_UNKNOWN = _Mistake(PROTOCOL_ERROR, "a frame for a stream that was never opened")
_GONE = _Mistake(STREAM_CLOSED, "a frame for a stream that was closed")
_ENDED = _Mistake(STREAM_CLOSED, "a frame for a stream that the peer had ended", is_fatal=False)
_BACK = _Mistake(PROTOCOL_ERROR, "the number of a new stream is below that of one before it")

_NEXT: dict[tuple[int, int], int | _Mistake] = {
    (IDLE, _OPENS): OPEN,
    (IDLE, _OPENS_AND_ENDS): HALF_CLOSED,
    (IDLE, _SENDS): _UNKNOWN,
    (IDLE, _SENDS_AND_ENDS): _UNKNOWN,
    (IDLE, _RESETS): _UNKNOWN,
    (IDLE, _UPDATES): _UNKNOWN,
    (OPEN, _OPENS): _Mistake(PROTOCOL_ERROR, "trailers that do not end their stream", is_fatal=False),
    (OPEN, _OPENS_AND_ENDS): HALF_CLOSED,
    (OPEN, _SENDS): OPEN,
    (OPEN, _SENDS_AND_ENDS): HALF_CLOSED,
    (OPEN, _RESETS): CLOSED,
    (OPEN, _UPDATES): OPEN,
    (HALF_CLOSED, _OPENS): _ENDED,
    (HALF_CLOSED, _OPENS_AND_ENDS): _ENDED,
    (HALF_CLOSED, _SENDS): _ENDED,
    (HALF_CLOSED, _SENDS_AND_ENDS): _ENDED,
    (HALF_CLOSED, _RESETS): CLOSED,
    (HALF_CLOSED, _UPDATES): HALF_CLOSED,
    (CLOSED, _OPENS): _GONE,
    (CLOSED, _OPENS_AND_ENDS): _GONE,
    (CLOSED, _SENDS): _GONE,
    (CLOSED, _SENDS_AND_ENDS): _GONE,
    (CLOSED, _RESETS): CLOSED,
    (CLOSED, _UPDATES): CLOSED,
    (LATE, _OPENS): LATE,
    (LATE, _OPENS_AND_ENDS): CLOSED,
    (LATE, _SENDS): LATE,
    (LATE, _SENDS_AND_ENDS): CLOSED,
    (LATE, _RESETS): CLOSED,
    (LATE, _UPDATES): LATE,
    (SKIPPED, _OPENS): _BACK,
    (SKIPPED, _OPENS_AND_ENDS): _BACK,
    (SKIPPED, _SENDS): _GONE,
    (SKIPPED, _SENDS_AND_ENDS): _GONE,
    (SKIPPED, _RESETS): CLOSED,
    (SKIPPED, _UPDATES): CLOSED,
}


class _Stream:
    """One that can still be answered: OPEN or HALF_CLOSED."""

    __slots__ = ("credit", "ending", "length", "pieces", "state", "stream_id", "window")

    def __init__(self, stream_id: int, state: int, window: int, credit: int) -> None:
        self.stream_id, self.state = stream_id, state
        self.window = window  # bytes that we may send; below 0 where the peer has made it smaller
        self.credit = credit  # bytes that the peer may send
        self.length = -1  # bytes of content still to come, as content-length said; -1 where it did not
        self.pieces: deque[memoryview] | None = None  # what waits for a window
        self.ending: bytes | None = None  # the frame that ends it, after all that waits


class _ConnectionError(Exception):
    """The peer's mistake that ends the connection."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _StreamError(Exception):
    """The peer's mistake that ends one stream."""

    def __init__(self, stream_id: int, code: int) -> None:
        super().__init__(stream_id, code)
        self.stream_id, self.code = stream_id, code


# -- frames -----------------------------------------------------------------------------------------------------


def encode_frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    length = len(payload)
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id) + payload


def _encode_settings(bounds: Bounds) -> bytes:
    """Returns our SETTINGS, and the WINDOW_UPDATE that makes the connection's window what it is to be."""
    settings = {
        MAX_CONCURRENT_STREAMS: bounds.streams_max,
        INITIAL_WINDOW_SIZE: bounds.stream_window_bytes,
        MAX_HEADER_LIST_SIZE: bounds.header_list_bytes_max,
    }
    payload = b"".join([_SETTING.pack(name, value) for name, value in settings.items()])
    update = bounds.connection_window_bytes - WINDOW_BYTES_DEFAULT
    return encode_frame(SETTINGS, 0, 0, payload) + _encode_number(WINDOW_UPDATE, 0, update)


_SETTINGS_ACK = encode_frame(SETTINGS, ACK, 0)


def _encode_number(kind: int, stream_id: int, number: int) -> bytes:
    return _NUMBER.pack(0, 4, kind, 0, stream_id, number)


def _without_padding(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise _ConnectionError(PROTOCOL_ERROR, "a frame with more padding than it has room for")
    return payload[1 : len(payload) - payload[0]]


class Http2:
    """One connection. `receive` never raises for a mistake of the peer: it queues the GOAWAY and sets `is_over`."""

    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        assert bounds.stream_window_bytes >= WINDOW_BYTES_DEFAULT < bounds.connection_window_bytes, bounds
        self.is_over = False  # close the socket after writing the output
        self.error = ""  # why it is over, for the log; empty where nobody made a mistake
        self.waiting_bytes = 0  # held because the peer's windows are closed
        self._bounds = bounds
        self._rest = bytearray()  # an incomplete frame
        self._wanted = len(PREFACE)  # bytes that the rest must have before it can hold a whole frame
        self._has_preface = False
        # The kind and stream of the next frame where nothing else may come: SETTINGS first, then CONTINUATION.
        self._expected: tuple[int, int] | None = (SETTINGS, 0)
        self._streams: dict[int, _Stream] = {}
        self._last_id = 0
        self._late: OrderedDict[int, None] = OrderedDict()
        self._skipped: deque[range] = deque(maxlen=100)  # only the code of an error depends on it
        self._is_shutting_down = False
        self._events: list[Event] = []
        self._out: list[bytes] = [_encode_settings(bounds)]
        self._chores: dict[str, int] = {}  # by the bound of that name
        self._resets = 0
        # What the peer sends, and how.
        self._credit = bounds.connection_window_bytes
        self._reader = FieldReader(bounds.header_list_bytes_max)
        self._block = bytearray()  # of a HEADERS frame whose CONTINUATIONs are coming
        self._block_frames = 0
        self._block_ends_stream = self._block_depends_on_itself = False
        # What the peer lets us send, and how.
        self._window = self._stream_window = WINDOW_BYTES_DEFAULT
        self._frame_bytes_max = FRAME_BYTES_DEFAULT
        self._ready: OrderedDict[int, _Stream] = OrderedDict()  # those that wait for the connection's window alone
        self._has_sent_headers = False

    # -- receiving ----------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """Takes bytes in; returns what they mean, also what came before a mistake."""
        if self.is_over:
            return []
        try:
            if self._out and sum(map(len, self._out)) > self._bounds.output_bytes_max:
                raise _ConnectionError(ENHANCE_YOUR_CALM, "the peer does not read our answers")
            self._read(data)
        except _ConnectionError as error:
            self._fail(error.code, str(error))
        events, self._events = self._events, []
        return events

    def _read(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted and self._has_preface:
                return
            data = bytes(self._rest)
            self._rest = bytearray()
        position, end = 0, len(data)
        if not self._has_preface:
            if data[: len(PREFACE)] != PREFACE[:end]:
                raise _ConnectionError(PROTOCOL_ERROR, "the connection does not begin as HTTP/2 does")
            if end < len(PREFACE):
                self._rest += data
                return
            self._has_preface, position = True, len(PREFACE)
        handlers = self._HANDLERS
        wanted = FRAME_HEADER_BYTES
        while end - position >= FRAME_HEADER_BYTES:
            high, low, kind, flags, stream_id = _HEADER.unpack_from(data, position)
            length = high << 8 | low
            if length > FRAME_BYTES_DEFAULT:
                raise _ConnectionError(FRAME_SIZE_ERROR, f"a frame of {length} bytes, at most {FRAME_BYTES_DEFAULT}")
            start = position + FRAME_HEADER_BYTES
            stop = start + length
            if stop > end:
                wanted += length
                break
            stream_id &= _STREAM_ID_MAX
            if self._expected is not None and self._expected != (kind, stream_id):
                raise _ConnectionError(PROTOCOL_ERROR, f"a frame of kind {kind}, expected one of {self._expected[0]}")
            position = stop
            if kind > CONTINUATION:
                self._count("ignored_max")
                continue
            try:
                handlers[kind](self, flags, stream_id, data[start:stop])
            except _StreamError as error:
                self._refuse(error.stream_id, error.code)
        if position < end:
            self._rest += data[position:]
            self._wanted = wanted

    def _count(self, bound: str) -> None:
        """Counts what a peer makes us do for nothing. Raises _ConnectionError."""
        count = self._chores[bound] = self._chores.get(bound, 0) + 1
        if count > getattr(self._bounds, bound):
            raise _ConnectionError(ENHANCE_YOUR_CALM, f"more than {bound} = {count - 1} without an answer between them")

    def _count_reset(self) -> None:
        self._resets += 1
        if self._resets > self._bounds.resets_max:
            raise _ConnectionError(ENHANCE_YOUR_CALM, f"more than resets_max = {self._bounds.resets_max}")

    def _state_of(self, stream_id: int) -> int:
        stream = self._streams.get(stream_id)
        if stream is not None:
            return stream.state
        if stream_id > self._last_id or not stream_id & 1:  # we open no streams, so those with even numbers are idle
            return IDLE
        if stream_id in self._late:
            return LATE
        return SKIPPED if any(stream_id in skipped for skipped in self._skipped) else CLOSED

    def _move(self, stream_id: int, event: int) -> int:
        """Returns the next state of a stream; it is the caller's to keep. Raises _ConnectionError and _StreamError."""
        found = _NEXT[self._state_of(stream_id), event]
        if isinstance(found, _Mistake):
            if found.is_fatal:
                raise _ConnectionError(found.code, found.text)
            raise _StreamError(stream_id, found.code)
        if found == CLOSED:
            self._late.pop(stream_id, None)
        return found

    # -- receiving: headers -------------------------------------------------------------------------------------

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id & 1:
            raise _ConnectionError(PROTOCOL_ERROR, f"HEADERS for stream {stream_id}, which no client may open")
        block = _without_padding(flags, payload)
        depends_on_itself = False
        if flags & WITH_PRIORITY:
            if len(block) < 5:
                raise _ConnectionError(FRAME_SIZE_ERROR, "HEADERS that are too short for their priority")
            depends_on_itself = _INT32.unpack_from(block)[0] & _STREAM_ID_MAX == stream_id
            block = block[5:]
        if flags & END_HEADERS:
            self._take_block(stream_id, block, ends=bool(flags & END_STREAM), depends_on_itself=depends_on_itself)
            return
        self._block = bytearray(block)
        self._block_frames = 1
        self._block_ends_stream, self._block_depends_on_itself = bool(flags & END_STREAM), depends_on_itself
        self._expected = (CONTINUATION, stream_id)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._expected is None:
            raise _ConnectionError(PROTOCOL_ERROR, "CONTINUATION without HEADERS before it")
        self._block += payload
        self._block_frames += 1
        if len(self._block) > self._bounds.header_block_bytes_max:
            raise _ConnectionError(ENHANCE_YOUR_CALM, "a header block longer than header_block_bytes_max")
        if self._block_frames > self._bounds.header_block_frames_max:
            raise _ConnectionError(ENHANCE_YOUR_CALM, "a header block in more than header_block_frames_max frames")
        if flags & END_HEADERS:
            block, self._block = bytes(self._block), bytearray()
            self._expected = None
            self._take_block(
                stream_id, block, ends=self._block_ends_stream, depends_on_itself=self._block_depends_on_itself
            )

    def _take_block(self, stream_id: int, block: bytes, *, ends: bool, depends_on_itself: bool) -> None:
        if len(block) > self._bounds.header_block_bytes_max:
            raise _ConnectionError(ENHANCE_YOUR_CALM, "a header block longer than header_block_bytes_max")
        fields = self._read_fields(block)  # whatever becomes of the stream, or our table would differ from the peer's
        if stream_id > self._last_id:
            self._open(stream_id, fields, ends=ends, depends_on_itself=depends_on_itself)
            return
        state = self._move(stream_id, _OPENS_AND_ENDS if ends else _OPENS)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._count("ignored_max")
            return
        if depends_on_itself or not are_trailers(fields):
            raise _StreamError(stream_id, PROTOCOL_ERROR)
        self._end_request(stream, state)

    def _read_fields(self, block: bytes) -> list[Field]:
        try:
            return self._reader.read(block)
        except TooManyFields as error:
            raise _ConnectionError(ENHANCE_YOUR_CALM, str(error)) from error
        except ProtocolError as error:
            raise _ConnectionError(COMPRESSION_ERROR, str(error)) from error

    def _open(self, stream_id: int, fields: list[Field], *, ends: bool, depends_on_itself: bool) -> None:
        first_id = self._last_id + 1 | 1
        if stream_id > first_id:
            self._skipped.append(range(first_id, stream_id, 2))
        self._last_id = stream_id
        if self._is_shutting_down:  # above the number in our GOAWAY: the peer knows that nothing came of it
            self._remember_late(stream_id)
            return
        bounds = self._bounds
        if len(self._streams) >= bounds.streams_max:
            self._count("refused_max")
            self._reset_now(stream_id, REFUSED_STREAM)
            return
        length = content_length(fields)
        if length is None or depends_on_itself or (ends and length > 0):
            raise _StreamError(stream_id, PROTOCOL_ERROR)
        state = HALF_CLOSED if ends else OPEN
        stream = _Stream(stream_id, state, self._stream_window, bounds.stream_window_bytes)
        stream.length = length
        self._streams[stream_id] = stream
        self._events.append(StreamOpened(stream_id, [pair for pair, _, _ in fields]))
        if ends:
            self._events.append(StreamHalfClosed(stream_id))

    def _end_request(self, stream: _Stream, state: int) -> None:
        if stream.length > 0:
            raise _StreamError(stream.stream_id, PROTOCOL_ERROR)
        stream.state = state
        self._events.append(StreamHalfClosed(stream.stream_id))

    # -- receiving: all else ------------------------------------------------------------------------------------

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        length, bounds = len(payload), self._bounds
        self._credit -= length  # never overdrawn, nor is the stream's: their halves are more than a frame
        if self._credit * 2 < bounds.connection_window_bytes:
            self._out.append(_encode_number(WINDOW_UPDATE, 0, bounds.connection_window_bytes - self._credit))
            self._credit = bounds.connection_window_bytes
        data = _without_padding(flags, payload) if flags & PADDED else payload
        ends = flags & END_STREAM
        if not data and not ends:
            self._count("empty_data_max")
        state = self._move(stream_id, _SENDS_AND_ENDS if ends else _SENDS)
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        stream.credit -= length
        if stream.length >= 0:
            stream.length -= len(data)
            if stream.length < 0:
                raise _StreamError(stream_id, PROTOCOL_ERROR)
        if data:
            self._events.append(DataReceived(stream_id, data))
        if ends:
            self._end_request(stream, state)
        elif stream.credit * 2 < bounds.stream_window_bytes:
            self._out.append(_encode_number(WINDOW_UPDATE, stream_id, bounds.stream_window_bytes - stream.credit))
            stream.credit = bounds.stream_window_bytes

    def _on_priority(self, _: int, stream_id: int, payload: bytes) -> None:
        """Priorities are obsolete; only their form is looked at."""
        if not stream_id:
            raise _ConnectionError(PROTOCOL_ERROR, "PRIORITY of no stream")
        if len(payload) != 5:
            raise _StreamError(stream_id, FRAME_SIZE_ERROR)
        if _INT32.unpack_from(payload)[0] & _STREAM_ID_MAX == stream_id:
            raise _StreamError(stream_id, PROTOCOL_ERROR)
        self._count("priorities_max")

    def _on_rst_stream(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _ConnectionError(FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes, expected 4")
        self._move(stream_id, _RESETS)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._count("ignored_max")
            return
        self._events.append(StreamReset(stream_id, _INT32.unpack(payload)[0]))
        self._drop(stream)
        self._count_reset()

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _ConnectionError(PROTOCOL_ERROR, "SETTINGS of a stream")
        if len(payload) % _SETTING.size or (flags & ACK and payload):
            raise _ConnectionError(FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        self._count("settings_max")
        if flags & ACK:
            if self._expected is not None:
                raise _ConnectionError(PROTOCOL_ERROR, "an acknowledgement where SETTINGS were expected")
            return
        self._expected = None
        wanted: dict[int, int] = {}  # the last one counts, and changing the windows of all streams is dear
        for name, value in _SETTING.iter_unpack(payload):
            _check_setting(name, value)
            wanted[name] = value
        self._frame_bytes_max = wanted.get(MAX_FRAME_SIZE, self._frame_bytes_max)
        self._out.append(_SETTINGS_ACK)
        self._change_windows(wanted.get(INITIAL_WINDOW_SIZE, self._stream_window))

    def _change_windows(self, stream_window: int) -> None:
        growth = stream_window - self._stream_window
        self._stream_window = stream_window
        if not growth:
            return
        for stream in list(self._streams.values()):
            stream.window += growth
            if stream.window > WINDOW_BYTES_MAX:
                raise _ConnectionError(FLOW_CONTROL_ERROR, "SETTINGS that make a stream's window too large")
            if stream.pieces:
                self._flush(stream)

    def _on_push_promise(self, _: int, __: int, ___: bytes) -> None:
        raise _ConnectionError(PROTOCOL_ERROR, "PUSH_PROMISE of a client")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _ConnectionError(PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise _ConnectionError(FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes, expected 8")
        self._count("pings_max")
        if not flags & ACK:
            self._out.append(encode_frame(PING, ACK, 0, payload))

    def _on_goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        """The peer opens no more streams, and may wait for the answers to those it has."""
        if stream_id:
            raise _ConnectionError(PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise _ConnectionError(FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes, expected 8 or more")
        self._count("ignored_max")

    def _on_window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _ConnectionError(FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes, expected 4")
        growth = _INT32.unpack(payload)[0] & WINDOW_BYTES_MAX
        if growth < self._bounds.tiny_update_bytes:
            self._count("tiny_updates_max")
        if not stream_id:
            self._window += growth
            if not growth:
                raise _ConnectionError(PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            if self._window > WINDOW_BYTES_MAX:
                raise _ConnectionError(FLOW_CONTROL_ERROR, "WINDOW_UPDATE that makes the connection's window too large")
            self._flush_ready()
            return
        self._move(stream_id, _UPDATES)
        stream = self._streams.get(stream_id)
        if stream is None:
            self._count("ignored_max")
            return
        stream.window += growth
        if not growth:
            raise _StreamError(stream_id, PROTOCOL_ERROR)
        if stream.window > WINDOW_BYTES_MAX:
            raise _StreamError(stream_id, FLOW_CONTROL_ERROR)
        if stream.pieces:
            self._flush(stream)

    _HANDLERS = (
        _on_data, _on_headers, _on_priority, _on_rst_stream, _on_settings, _on_push_promise, _on_ping, _on_goaway,
        _on_window_update, _on_continuation,
    )  # fmt: skip

    # -- answering ----------------------------------------------------------------------------------------------

    def start(self, stream_id: int, headers: Sequence[Pair], *, end: bool = False) -> None:
        """Sends the fields of a response, whose :status comes first; with `end` they are all of it."""
        self.start_encoded(stream_id, encode_fields(headers), end=end)

    def start_encoded(self, stream_id: int, block: bytes, *, end: bool = False) -> None:
        """Does what `start` does, with what `encode_fields` gave."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.ending is not None:
            return
        self._write_block(stream_id, block, END_STREAM if end else 0)
        if end:
            self._close(stream)

    def send(self, stream_id: int, data: bytes) -> None:
        """Sends content, as soon as the peer's windows allow. Drops the connection where too much waits already."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.ending is not None or not data:
            return
        if self.waiting_bytes + len(data) > self._bounds.waiting_bytes_max:
            self._fail(ENHANCE_YOUR_CALM, "the peer opens no window for our answers")
            return
        if stream.pieces is None:
            stream.pieces = deque()
        stream.pieces.append(memoryview(data))
        self.waiting_bytes += len(data)
        if len(stream.pieces) == 1:
            self._flush(stream)

    def finish(self, stream_id: int, trailers: Sequence[Pair]) -> None:
        """Ends a response after all that waits, by its trailers if it has any."""
        self.finish_encoded(stream_id, encode_fields(trailers) if trailers else b"")

    def finish_encoded(self, stream_id: int, block: bytes) -> None:
        """Does what `finish` does, with what `encode_fields` gave."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.ending is not None:
            return
        stream.ending = block
        if not stream.pieces:
            self._write_ending(stream, block)

    def answer(self, stream_id: int, head: bytes, data: bytes, tail: bytes) -> None:
        """Does what `start`, `send` and `finish` do, with what `encode_fields` gave: at once, where windows allow."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        length = len(data)
        room = min(stream.window, self._window, self._frame_bytes_max)
        if length > room or not self._has_sent_headers or len(head) + len(tail) > FRAME_BYTES_DEFAULT:
            self.start_encoded(stream_id, head)
            self.send(stream_id, data)
            self.finish_encoded(stream_id, tail)
            return
        self._window -= length
        pack = _HEADER.pack
        self._out += (
            pack(len(head) >> 8, len(head) & 0xFF, HEADERS, END_HEADERS, stream_id), head,
            pack(length >> 8, length & 0xFF, DATA, 0, stream_id), data,
            pack(len(tail) >> 8, len(tail) & 0xFF, HEADERS, END_HEADERS | END_STREAM, stream_id), tail,
        )  # fmt: skip
        self._close(stream)

    def reset(self, stream_id: int, code: int) -> None:
        """Ends a stream at once; what waits for it is dropped."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
            self._reset_now(stream_id, code)

    def shut_down(self) -> None:
        """Takes no new streams; the connection is over when those that are open have ended."""
        if self.is_over or self._is_shutting_down:
            return
        self._is_shutting_down = True
        self._out.append(encode_frame(GOAWAY, 0, 0, _GOAWAY.pack(self._last_id, NO_ERROR)))
        self.is_over = not self._streams

    def take_output(self) -> bytes:
        """Returns what is to be written to the socket now."""
        output = b"".join(self._out)
        self._out.clear()
        return output

    # -- sending ------------------------------------------------------------------------------------------------

    def _write_block(self, stream_id: int, block: bytes, flags: int) -> None:
        if not self._has_sent_headers:
            self._has_sent_headers = True
            block = NO_TABLE + block
        kind, size = HEADERS, self._frame_bytes_max
        while len(block) > size:
            self._out.append(encode_frame(kind, flags, stream_id, block[:size]))
            kind, flags, block = CONTINUATION, 0, block[size:]
        self._out.append(encode_frame(kind, flags | END_HEADERS, stream_id, block))

    def _write_ending(self, stream: _Stream, block: bytes) -> None:
        if block:
            self._write_block(stream.stream_id, block, END_STREAM)
        else:
            self._out.append(encode_frame(DATA, END_STREAM, stream.stream_id))
        self._close(stream)

    def _flush(self, stream: _Stream) -> None:
        """Sends what waits on a stream, as far as the windows allow."""
        while self._write_piece(stream):
            pass

    def _flush_ready(self) -> None:
        """Sends what waits for the connection's window: a frame of each stream in turn."""
        while self._window > 0 and self._ready:
            _, stream = self._ready.popitem(last=False)
            if self._write_piece(stream):
                self._ready[stream.stream_id] = stream

    def _write_piece(self, stream: _Stream) -> bool:
        """Sends one frame of what waits on a stream; returns whether more waits, and may be sent as far as is known."""
        pieces = stream.pieces
        assert pieces
        room = min(stream.window, self._window, self._frame_bytes_max)
        if room <= 0:
            if stream.window > 0:
                self._ready[stream.stream_id] = stream
            return False
        piece = pieces.popleft()
        if len(piece) > room:
            pieces.appendleft(piece[room:])
            piece = piece[:room]
        length = len(piece)
        stream.window -= length
        self._window -= length
        self.waiting_bytes -= length
        self._out += _HEADER.pack(length >> 8, length & 0xFF, DATA, 0, stream.stream_id), bytes(piece)
        if pieces:
            return True
        if stream.ending is not None:
            self._write_ending(stream, stream.ending)
        return False

    def _close(self, stream: _Stream) -> None:
        """Forgets a stream whose answer has been sent to its end."""
        if stream.state == OPEN:  # so that its peer sends no more
            self._reset_now(stream.stream_id, NO_ERROR)
        if self._resets:
            self._resets -= 1
        self._chores.clear()
        self._drop(stream)

    def _drop(self, stream: _Stream) -> None:
        del self._streams[stream.stream_id]
        if stream.pieces:
            self.waiting_bytes -= sum(map(len, stream.pieces))
            self._ready.pop(stream.stream_id, None)
        if self._is_shutting_down and not self._streams:
            self.is_over = True

    def _refuse(self, stream_id: int, code: int) -> None:
        """Resets a stream for its peer's mistake. Raises _ConnectionError."""
        if self._state_of(stream_id) == IDLE:
            raise _ConnectionError(code, "a mistake on a stream that was never opened")
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._drop(stream)
            self._events.append(StreamReset(stream_id, code))
        self._reset_now(stream_id, code)
        self._count_reset()

    def _reset_now(self, stream_id: int, code: int) -> None:
        self._out.append(_encode_number(RST_STREAM, stream_id, code))
        self._remember_late(stream_id)

    def _remember_late(self, stream_id: int) -> None:
        self._late[stream_id] = None
        if len(self._late) > self._bounds.late_streams_max:
            self._late.popitem(last=False)

    def _fail(self, code: int, text: str) -> None:
        """Ends the connection: tells the peer why, and forgets all streams."""
        self.is_over, self.error = True, text
        self._out.append(encode_frame(GOAWAY, 0, 0, _GOAWAY.pack(self._last_id, code) + text.encode()))
        self._streams.clear()
        self._ready.clear()
        self.waiting_bytes = 0


def _check_setting(name: int, value: int) -> None:
    if name == ENABLE_PUSH and value > 1:
        raise _ConnectionError(PROTOCOL_ERROR, f"ENABLE_PUSH {value}, expected 0 or 1")
    if name == INITIAL_WINDOW_SIZE and value > WINDOW_BYTES_MAX:
        raise _ConnectionError(FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}, at most {WINDOW_BYTES_MAX}")
    if name == MAX_FRAME_SIZE and not FRAME_BYTES_DEFAULT <= value <= _FRAME_BYTES_MAX:
        raise _ConnectionError(PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}, expected 16384 to {_FRAME_BYTES_MAX}")

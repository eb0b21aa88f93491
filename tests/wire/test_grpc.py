"""gRPC on one connection: messages however they are cut, what a call may not be, and gRPC's own client on a socket."""

import asyncio
import gzip
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.wire.fields import Pair
from postdate.wire.grpc import (
    FAILED_PRECONDITION,
    INTERNAL,
    OK,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
    CallCancelled,
    CallHalfClosed,
    CallStarted,
    Grpc,
    GrpcEvent,
    MessageReceived,
    parse_timeout,
)
from postdate.wire.http2 import (
    ACK,
    BOUNDS,
    DATA,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    NO_ERROR,
    PREFACE,
    PROTOCOL_ERROR,
    SETTINGS,
    Bounds,
    encode_frame,
)
from tests.support.certificates import Authority
from tests.support.grpc_echo import FAILURE, MESSAGE_BYTES_MAX, Echo, server_context
from tests.support.http2 import REQUEST, Ears, Heard, headers, rst, window_update
from tests.support.http2 import settings as settings_frame

HEAD = [(b":status", b"200"), (b"content-type", b"application/grpc")]
STARTED = CallStarted(1, "/service/Method", {"te": "trailers", "content-type": "application/grpc"}, None)
MESSAGE_MAX = 1_000


class Client:
    """One connection to a `Grpc` that it owns, past the greetings."""

    def __init__(self, bounds: Bounds = BOUNDS, *wanted: tuple[int, int]) -> None:
        self.server = Grpc(MESSAGE_MAX, bounds)
        self._ears = Ears()
        self.say(PREFACE + settings_frame(*wanted) + encode_frame(SETTINGS, ACK, 0))
        self.hear()

    def say(self, data: bytes) -> list[GrpcEvent]:
        return self.server.receive(data)

    def hear(self) -> list[Heard]:
        return self._ears.hear(self.server.take_output())


def packed(message: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(message).to_bytes(4, "big") + message


def data_frame(stream_id: int, content: bytes = b"", *, end: bool = False) -> bytes:
    return encode_frame(DATA, END_STREAM if end else 0, stream_id, content)


def call(stream_id: int, *messages: bytes, more: tuple[Pair, ...] = ()) -> bytes:
    """A whole call."""
    content = b"".join(map(packed, messages))
    return headers(stream_id, (*REQUEST, *more), end=False) + data_frame(stream_id, content, end=True)


def ended(stream_id: int, status: int, text: bytes = b"") -> Heard:
    """An answer that is nothing but trailers."""
    message = [(b"grpc-message", text)] if text else []
    return Heard("Headers", stream_id, [*HEAD, (b"grpc-status", b"%d" % status), *message], ends=True)


# -- calls --------------------------------------------------------------------------------------------------------


def test_a_unary_call_is_answered_by_three_frames() -> None:
    client = Client()
    assert client.say(call(1, b"question")) == [STARTED, MessageReceived(1, b"question"), CallHalfClosed(1)]
    client.server.answer(1, b"answer")
    assert client.hear() == [
        Heard("Headers", 1, HEAD),
        Heard("Data", 1, packed(b"answer")),
        Heard("Headers", 1, [(b"grpc-status", b"0")], ends=True),
    ]


def test_fields_are_given_as_text_and_the_last_of_repeated_ones() -> None:
    more = ((b"x-raw-bin", b"AAEC"), (b"x-twice", b"a"), (b"x-twice", b"b"), (b"x-latin", b"\xe9"), (b"x-twice", b"c"))
    started, *_ = Client().say(call(1, more=(*more, (b"grpc-timeout", b"3S"))))
    assert started == STARTED._replace(
        headers={**STARTED.headers, "x-raw-bin": "AAEC", "x-twice": "c", "x-latin": "é", "grpc-timeout": "3S"},
        timeout_ms=3_000,
    )


def test_the_authority_is_no_field() -> None:
    started, *_ = Client().say(headers(1, ((b":authority", b"here:8081"), *REQUEST)))
    assert started == STARTED


@settings(deadline=None)
@given(st.data())
def test_messages_are_found_however_they_are_cut(data: st.DataObject) -> None:
    """Into frames, the network's pieces, and between the frames of other calls; packed by gzip or not."""
    calls: dict[int, list[bytes]] = {
        1 + 2 * number: messages
        for number, messages in enumerate(data.draw(st.lists(st.lists(st.binary(max_size=60), max_size=4), max_size=3)))
    }
    frames: list[list[bytes]] = []
    for stream_id, messages in calls.items():
        packs = [packed(gzip.compress(text), 1) if data.draw(st.booleans()) else packed(text) for text in messages]
        content = b"".join(packs)
        cuts = data.draw(st.lists(st.integers(0, len(content)), max_size=6).map(sorted))
        pieces = [content[start:stop] for start, stop in pairwise([0, *cuts, len(content)])]
        frames.append([data_frame(stream_id, piece) for piece in pieces] + [data_frame(stream_id, end=True)])
    stream = b"".join(headers(key, (*REQUEST, (b"grpc-encoding", b"gzip")), end=False) for key in calls)
    while frames:
        chosen = data.draw(st.integers(0, len(frames) - 1))
        stream += frames[chosen].pop(0)
        frames = [left for left in frames if left]
    client, found, closed = Client(), {key: list[bytes]() for key in calls}, []
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    for start, stop in pairwise([0, *cuts, len(stream)]):
        for event in client.say(stream[start:stop]):
            match event:
                case MessageReceived():
                    found[event.stream_id].append(event.message)
                case CallHalfClosed():
                    closed.append(event.stream_id)
                case _:
                    assert isinstance(event, CallStarted)
    assert found == calls
    assert sorted(closed) == list(calls)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=12), max_size=5), st.booleans())
def test_no_content_at_all_makes_it_raise(pieces: list[bytes], is_gzip: bool) -> None:
    """A call ends by its own end or is cancelled, once."""
    client = Client()
    more = ((b"grpc-encoding", b"gzip"),) if is_gzip else ()
    events = client.say(headers(1, (*REQUEST, *more), end=False))
    for piece in pieces:
        events += client.say(data_frame(1, piece))
    events += client.say(data_frame(1, end=True))
    assert sum(isinstance(event, CallHalfClosed | CallCancelled) for event in events) == 1
    assert isinstance(events[-1], CallHalfClosed | CallCancelled)
    assert not client.server.is_over


def test_a_stream_is_answered_while_it_goes_on() -> None:
    client = Client()
    client.say(headers(1, end=False))
    client.server.begin(1)
    client.server.begin(1)
    assert client.hear() == [Heard("Headers", 1, HEAD)]
    assert client.say(data_frame(1, packed(b"one"))) == [MessageReceived(1, b"one")]
    client.server.send(1, b"1")
    client.server.send(1, b"")
    assert client.hear() == [Heard("Data", 1, packed(b"1")), Heard("Data", 1, packed(b""))]
    client.say(data_frame(1, end=True))
    client.server.end(1)
    assert client.hear() == [Heard("Headers", 1, [(b"grpc-status", b"0")], ends=True)]


def test_a_stream_that_nobody_began_begins_with_its_first_message() -> None:
    client = Client()
    client.say(call(1))
    client.server.send(1, b"x")
    client.server.end(1, UNAVAILABLE, "later")
    assert client.hear() == [
        Heard("Headers", 1, HEAD),
        Heard("Data", 1, packed(b"x")),
        Heard("Headers", 1, [(b"grpc-status", b"14"), (b"grpc-message", b"later")], ends=True),
    ]


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("plain text, and ~ \" & = / ? #", b"plain text, and ~ \" & = / ? #"),
        ("100 %", b"100 %25"), ("späť", b"sp%C3%A4%C5%A5"), ("a\r\nb\tc\0", b"a%0D%0Ab%09c%00"),
        (" around ", b"around"), ("x" * 5_000, b"x" * 1_024), ("\U0001f4a9" * 1_024, b"%F0%9F%92%A9" * 1_024),
    ],
)  # fmt: skip
def test_a_status_text_is_encoded(text: str, encoded: bytes) -> None:
    client = Client()
    client.say(call(1))
    client.server.end(1, FAILED_PRECONDITION, text)
    assert client.hear() == [ended(1, FAILED_PRECONDITION, encoded)]


def test_a_call_without_messages_may_end_well() -> None:
    client = Client()
    assert client.say(headers(1)) == [STARTED, CallHalfClosed(1)]
    client.server.end(1)
    assert client.hear() == [ended(1, OK)]


def test_a_call_that_is_cancelled_is_answered_no_more() -> None:
    client = Client()
    client.say(call(1, b"x"))
    assert client.say(rst(1)) == [CallCancelled(1)]
    server = client.server
    server.begin(1)
    server.send(1, b"x")
    server.answer(1, b"x")
    server.end(1)
    assert client.hear() == []


def test_a_call_that_is_answered_is_answered_once() -> None:
    client = Client()
    client.say(call(1, b"x"))
    client.server.answer(1, b"1")
    client.hear()
    client.server.answer(1, b"2")
    client.server.send(1, b"2")
    client.server.end(1)
    assert client.hear() == []


def test_an_answer_that_still_waits_may_be_cancelled() -> None:
    """So that what it carries can be given to somebody else."""
    client = Client(BOUNDS, (INITIAL_WINDOW_SIZE, 7))
    client.say(call(1) + call(3))
    client.server.answer(1, b"abc")
    client.server.send(3, b"abc")
    client.server.end(3)
    assert client.server.waiting_bytes == 2
    # That of call 1 is under way before it is cancelled.
    assert client.say(rst(3) + window_update(1, 1) + rst(1)) == [CallCancelled(3)]


def test_a_mistake_of_http2_cancels_its_call() -> None:
    client = Client()
    assert client.say(headers(1, end=False) + window_update(1, 0)) == [STARTED, CallCancelled(1)]
    assert client.hear() == [Heard("RstStream", 1, PROTOCOL_ERROR)]


def test_the_end_of_a_connection_is_passed_on() -> None:
    client = Client()
    client.say(call(1))
    client.server.shut_down()
    assert not client.server.is_over
    client.server.answer(1, b"x")
    assert (client.server.is_over, client.server.error) == (True, "")
    broken = Client()
    broken.say(bytes(9))
    assert broken.server.is_over
    assert broken.server.error


# -- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "timeout_ms"),
    [
        ("1H", 3_600_000), ("2M", 120_000), ("3S", 3_000), ("4m", 4), ("5000u", 5), ("5001u", 6), ("1u", 1),
        ("6000000n", 6), ("6000001n", 7), ("1n", 1), ("0n", 0), ("0S", 0), ("99999999H", 99_999_999 * 3_600_000),
        ("00000003S", 3_000),
    ],
)  # fmt: skip
def test_a_deadline_in_every_unit_is_in_milliseconds_and_never_early(text: str, timeout_ms: int) -> None:
    assert parse_timeout(text) == timeout_ms
    started, *_ = Client().say(call(1, more=((b"grpc-timeout", text.encode()),)))
    assert isinstance(started, CallStarted)
    assert started.timeout_ms == timeout_ms


@pytest.mark.parametrize("text", ["", "S", "3", "3s", "3h", "-1S", "+1S", "1.5S", "123456789S", "3 S", "3SS", "٣S"])
def test_a_deadline_that_is_none_ends_its_call(text: str) -> None:
    assert parse_timeout(text) is None
    client = Client()
    assert client.say(call(1, b"x", more=((b"grpc-timeout", text.encode()),))) == []
    [heard] = [found for found in client.hear() if found.kind == "Headers"]
    assert (b"grpc-status", b"13") in heard.content
    assert heard.ends


# -- calls that are none ------------------------------------------------------------------------------------------

METHOD, SCHEME, PATH, TE, TYPE = REQUEST


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (((b":method", b"GET"), SCHEME, PATH), b"405"),
        (((b":method", b"CONNECT"), (b":authority", b"a:1")), b"405"),
        (((b":method", b"OPTIONS"), SCHEME, (b":path", b"*")), b"405"),
        ((METHOD, SCHEME, PATH, TE), b"415"),
        ((METHOD, SCHEME, PATH, TE, (b"content-type", b"application/json")), b"415"),
        ((METHOD, SCHEME, PATH, TYPE), b"400"),
    ],
)
def test_what_is_no_call_has_a_status_of_http_when_it_has_come(fields: tuple[Pair, ...], status: bytes) -> None:
    client = Client()
    assert client.say(headers(1, fields, end=False) + data_frame(1, b"whatever")) == []
    assert client.hear() == []
    assert client.say(data_frame(1, end=True)) == []
    head, body, last = client.hear()
    assert head.content[0] == (b":status", status)
    assert (b"content-length", str(len(body.content)).encode()) in head.content
    assert ((b"allow", b"POST") in head.content) == (status == b"405")
    assert last == Heard("Data", 1, b"", ends=True)
    assert client.say(rst(1)) == []


def test_what_is_no_call_may_be_cancelled_unnoticed() -> None:
    client = Client()
    assert client.say(headers(1, REQUEST[:4], end=False) + rst(1) + data_frame(3)[:0]) == []
    assert client.hear() == []


@pytest.mark.parametrize("content_type", [b"application/grpc", b"application/grpc+proto", b"application/grpc;a=b"])
def test_every_kind_of_grpc_is_one(content_type: bytes) -> None:
    [started] = Client().say(headers(1, (METHOD, SCHEME, PATH, TE, (b"content-type", content_type)), end=False))
    assert isinstance(started, CallStarted)


# -- messages that are none ---------------------------------------------------------------------------------------

_GZIP: tuple[Pair, ...] = ((b"grpc-encoding", b"gzip"),)
_SNAPPY: tuple[Pair, ...] = ((b"grpc-encoding", b"snappy"),)
_BOMB = gzip.compress(bytes(10 * MESSAGE_MAX))
_BROKEN: dict[str, tuple[bytes, tuple[Pair, ...], int]] = {
    "too large": (packed(bytes(MESSAGE_MAX + 1)), (), RESOURCE_EXHAUSTED),
    "too large, of which only the length has come": (packed(bytes(2**24))[:5], (), RESOURCE_EXHAUSTED),
    "of an unknown flag": (packed(b"x", 2), (), INTERNAL),
    "compressed by an unknown algorithm": (packed(b"x", 1), _SNAPPY, UNIMPLEMENTED),
    "compressed by none": (packed(b"x", 1), (), INTERNAL),
    "compressed, and too large": (packed(_BOMB, 1), _GZIP, RESOURCE_EXHAUSTED),
    "no gzip": (packed(b"x" * 20, 1), _GZIP, INTERNAL),
    "a gzip cut short": (packed(gzip.compress(b"x")[:-1], 1), _GZIP, INTERNAL),
    "a gzip and more": (packed(gzip.compress(b"x") + b"x", 1), _GZIP, INTERNAL),
}


@pytest.mark.parametrize("name", _BROKEN)
def test_a_broken_message_ends_its_call_alone(name: str) -> None:
    content, more, status = _BROKEN[name]
    client = Client()
    events = client.say(headers(1, (*REQUEST, *more), end=False) + data_frame(1, packed(b"good") + content))
    assert events[1:] == [MessageReceived(1, b"good"), CallCancelled(1)]
    answer, reset = client.hear()
    assert (b"grpc-status", b"%d" % status) in answer.content
    assert ((b"grpc-accept-encoding", b"identity,gzip") in answer.content) == (status == UNIMPLEMENTED)
    assert (answer.ends, reset) == (True, Heard("RstStream", 1, NO_ERROR))
    assert client.say(data_frame(1, packed(b"late"), end=True)) == []
    assert len(client.say(call(3, b"x"))) == 3


def test_the_largest_message_is_taken_packed_or_not() -> None:
    largest = bytes(MESSAGE_MAX)
    client = Client()
    assert client.say(call(1, largest))[1] == MessageReceived(1, largest)
    content = packed(gzip.compress(largest), 1)
    events = client.say(headers(3, (*REQUEST, *_GZIP), end=False) + data_frame(3, content))
    assert events[1] == MessageReceived(3, largest)


def test_one_byte_more_than_the_largest_message_is_refused() -> None:
    client = Client()
    assert client.say(call(1, bytes(MESSAGE_MAX + 1)))[1:] == [CallCancelled(1)]
    assert client.hear() == [ended(1, RESOURCE_EXHAUSTED, b"a message of 1001 bytes, at most 1000")]


def test_a_bomb_of_gzip_is_not_unpacked_to_its_end() -> None:
    bomb = gzip.compress(bytes(32 << 20))
    client = Client()
    client.server = Grpc(len(bomb))
    client.say(PREFACE + settings_frame() + headers(1, (*REQUEST, *_GZIP), end=False))
    content = packed(bomb, 1)
    tracemalloc.start()
    events = [
        event
        for start in range(0, len(content), 16_384)
        for event in client.say(data_frame(1, content[start : start + 16_384]))
    ]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert events == [CallCancelled(1)]
    assert peak < 1 << 20


@pytest.mark.parametrize("rest", [b"\0", b"\0\0\0\0", packed(b"half")[:-1]])
def test_a_call_that_ends_within_a_message_is_broken(rest: bytes) -> None:
    client = Client()
    assert client.say(headers(1, end=False) + data_frame(1, packed(b"x") + rest, end=True))[1:] == [
        MessageReceived(1, b"x"),
        CallCancelled(1),
    ]
    text = b"a call that ends within a message, after %d bytes of it" % len(rest)
    assert client.hear() == [ended(1, INTERNAL, text)]


def test_a_broken_call_drops_what_waits_for_it() -> None:
    client = Client(BOUNDS, (INITIAL_WINDOW_SIZE, 0))
    client.say(headers(1, end=False))
    client.server.send(1, b"x")
    assert client.say(data_frame(1, packed(b"", 7))) == [CallCancelled(1)]
    assert client.server.waiting_bytes == 0
    assert client.hear() == [Heard("Headers", 1, HEAD), Heard("RstStream", 1, NO_ERROR)]


def test_unfinished_messages_are_bounded_together() -> None:
    client = Client(BOUNDS._replace(unfinished_bytes_max=300))
    half = packed(bytes(100))[:100]
    for stream_id in (1, 3, 5):
        assert len(client.say(headers(stream_id, end=False) + data_frame(stream_id, half))) == 1
    assert client.say(headers(7, end=False) + data_frame(7, half))[1:] == [CallCancelled(7)]
    assert client.hear()[0] == ended(7, RESOURCE_EXHAUSTED, b"more than 300 bytes of unfinished messages")
    # One ends, one is cancelled, one is answered early: there is room again.
    assert client.say(data_frame(1, bytes(5)) + rst(3)) == [MessageReceived(1, bytes(100)), CallCancelled(3)]
    client.server.end(5)
    for stream_id in (9, 11, 13):
        assert len(client.say(headers(stream_id, end=False) + data_frame(stream_id, half))) == 1
    assert not client.server.is_over


# -- gRPC's own client --------------------------------------------------------------------------------------------


TOO_LARGE = f"a message of {MESSAGE_BYTES_MAX + 1} bytes, at most {MESSAGE_BYTES_MAX}"


@asynccontextmanager
async def served(context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    connections: set[Echo] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(connections), "127.0.0.1", 0, ssl=context)
    try:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in list(connections):
            await connection.abort()


async def talk(channel: grpc.aio.Channel, *, too_large: str) -> None:
    """What a client does, and what it may expect of the server that echoes; also the text for what is too large."""
    echo: Callable[..., Awaitable[Any]] = channel.unary_unary("/echo/Unary")
    metadata = [(f"x-field-{number}", "v" * number) for number in range(8)]
    sizes = [*range(0, 400, 7), 20_000, 70_000, MESSAGE_BYTES_MAX - 1]
    bodies = [bytes([size % 256]) * size for size in sizes]
    answers = await asyncio.gather(*(echo(body, metadata=metadata, timeout=60) for body in bodies))
    assert answers == bodies
    stream: Any = channel.stream_stream("/echo/Stream")()
    for body in bodies[:20]:
        await stream.write(body)
        assert await stream.read() == body
    await stream.done_writing()
    assert await stream.read() == grpc.aio.EOF
    assert await stream.code() == grpc.StatusCode.OK
    cancelled: Any = channel.stream_stream("/echo/Stream")()
    await cancelled.write(b"x")
    cancelled.cancel()
    for path, body, code, text in (
        ("/echo/Fail", b"", grpc.StatusCode.FAILED_PRECONDITION, FAILURE.strip()),
        ("/echo/Other", b"", grpc.StatusCode.UNIMPLEMENTED, "there is no /echo/Other"),
        ("/echo/Unary", bytes(MESSAGE_BYTES_MAX + 1), grpc.StatusCode.RESOURCE_EXHAUSTED, too_large),
    ):
        method: Callable[..., Awaitable[Any]] = channel.unary_unary(path)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(body, timeout=60)
        assert (caught.value.code(), caught.value.details()) == (code, text)


def test_a_real_client_is_served() -> None:
    async def main() -> None:
        async with served() as address, grpc.aio.insecure_channel(address) as channel:
            await talk(channel, too_large=TOO_LARGE)

    asyncio.run(main())


def test_a_real_client_that_compresses_is_served() -> None:
    compression = grpc.Compression.Gzip

    async def main() -> None:
        async with served() as address, grpc.aio.insecure_channel(address, compression=compression) as channel:
            await talk(channel, too_large=f"a message of more than {MESSAGE_BYTES_MAX} bytes, unpacked")

    asyncio.run(main())


def test_a_real_client_is_served_over_tls(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    credentials = grpc.ssl_channel_credentials(Path(pair.ca).read_bytes())

    async def main() -> None:
        context = server_context(pair.certificate, pair.key)
        async with served(context) as address, grpc.aio.secure_channel(address, credentials) as channel:
            await talk(channel, too_large=TOO_LARGE)

    asyncio.run(main())

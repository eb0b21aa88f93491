"""One connection of HTTP/2: against another library's client, and dialogues for every mistake and every bound."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

import h2.events
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hpack import Decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.wire.fields import Pair
from postdate.wire.http2 import (
    ACK,
    BOUNDS,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES_DEFAULT,
    FRAME_HEADER_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
    NO_ERROR,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_BYTES_DEFAULT,
    WINDOW_BYTES_MAX,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Bounds,
    DataReceived,
    Http2,
    StreamHalfClosed,
    StreamOpened,
    StreamReset,
    encode_frame,
)
from tests.support.http2 import (
    REQUEST,
    Client,
    Ears,
    Heard,
    block_of,
    headers,
    rst,
    window_update,
)
from tests.support.http2 import settings as settings_frame

OK: tuple[Pair, ...] = ((b":status", b"200"), (b"content-type", b"text/plain"))
TRAILERS: tuple[Pair, ...] = ((b"grpc-status", b"0"),)
OPENED = StreamOpened(1, list(REQUEST))
FINE = "fine"


def data_frame(stream_id: int, content: bytes = b"", *, end: bool = False) -> bytes:
    return encode_frame(DATA, END_STREAM if end else 0, stream_id, content)


def said_to(client: Client, data: bytes) -> list[Heard]:
    client.say(data)
    return client.hear()


# -- another library's client -------------------------------------------------------------------------------------


def asked(stream_id: int) -> list[Pair]:
    """A request that differs from others in one field."""
    return [*REQUEST, (b"host", b"here"), (b"x-number", b"%d" % stream_id)]


class Echo:
    """Answers each request with what it had, by pieces as they come or at its end, and knows what it was asked."""

    def __init__(self, bounds: Bounds = BOUNDS, *, is_prompt: bool) -> None:
        self.http2 = Http2(bounds)
        self._is_prompt = is_prompt
        self._bodies: dict[int, bytes] = {}
        self.asked: dict[int, list[Pair]] = {}

    def receive(self, data: bytes) -> None:
        for event in self.http2.receive(data):
            stream_id = event.stream_id
            match event:
                case StreamOpened():
                    self.asked[stream_id] = event.headers
                    self._bodies[stream_id] = b""
                    if self._is_prompt:
                        self.http2.start(stream_id, OK)
                case DataReceived() if self._is_prompt:
                    self.http2.send(stream_id, event.data)
                case DataReceived():
                    self._bodies[stream_id] += event.data
                case StreamHalfClosed():
                    if not self._is_prompt:
                        self.http2.start(stream_id, OK)
                        self.http2.send(stream_id, self._bodies[stream_id])
                    self.http2.finish(stream_id, TRAILERS)
                case StreamReset():
                    raise AssertionError("nobody has reset a stream")


class Asker:
    """The client of the library h2: sends as much as it may, opens its windows by pieces that are drawn."""

    def __init__(self, bodies: Sequence[bytes], initial_window: int, frame_bytes_max: int) -> None:
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.h2.initiate_connection()
        self.h2.update_settings({INITIAL_WINDOW_SIZE: initial_window, MAX_FRAME_SIZE: frame_bytes_max})
        self._unsent = {1 + 2 * number: body for number, body in enumerate(bodies)}
        self.unacknowledged: deque[tuple[int, int]] = deque()  # bytes by stream
        self.answers: dict[int, bytes] = {}
        self.ended: dict[int, list[Pair]] = {}
        for stream_id in self._unsent:
            self.h2.send_headers(stream_id, asked(stream_id))

    def send(self) -> None:
        for stream_id, body in list(self._unsent.items()):
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            self.h2.send_data(stream_id, body[:room], end_stream=len(body) <= room)
            self._unsent[stream_id] = body[room:]
            if len(body) <= room:
                del self._unsent[stream_id]

    def receive(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            match event:
                case h2.events.ResponseReceived():
                    self.answers[event.stream_id] = b""
                case h2.events.DataReceived():
                    self.answers[event.stream_id] += event.data
                    self.unacknowledged.append((event.stream_id, event.flow_controlled_length))
                case h2.events.TrailersReceived():
                    self.ended[event.stream_id] = [(bytes(name), bytes(value)) for name, value in event.headers]
                case h2.events.StreamReset() | h2.events.ConnectionTerminated():
                    raise AssertionError(event)

    def acknowledge(self) -> None:
        """The stream may have ended by now: then only the connection's window is opened."""
        stream_id, length = self.unacknowledged.popleft()
        if length:
            self.h2.acknowledge_received_data(length, stream_id)


def split(random: Random, stream: bytes) -> list[bytes]:
    """Mostly whole, else in up to five pieces."""
    cuts = sorted(random.randint(0, len(stream)) for _ in range(random.choice([0, 0, 1, 4])))
    return [stream[start:stop] for start, stop in pairwise([0, *cuts, len(stream)])]


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_requests_are_answered_however_windows_and_the_network_split_them(data: st.DataObject) -> None:
    sizes = st.sampled_from([0, 1, 200, 16_384, 16_385, 70_000, 150_000]) | st.integers(0, 100_000)
    bodies = [bytes([number]) * size for number, size in enumerate(data.draw(st.lists(sizes, min_size=1, max_size=6)))]
    bounds = BOUNDS._replace(
        stream_window_bytes=data.draw(st.integers(WINDOW_BYTES_DEFAULT, 100_000)),
        connection_window_bytes=data.draw(st.integers(WINDOW_BYTES_DEFAULT + 1, 200_000)),
        tiny_update_bytes=0,
    )
    random = Random(data.draw(st.integers(0, 2**32)))
    server = Echo(bounds, is_prompt=data.draw(st.booleans()))
    smallest = 1 + sum(map(len, bodies)) // 50
    client = Asker(bodies, data.draw(st.integers(smallest, 70_000)), data.draw(st.sampled_from([16_384, 20_000])))
    for _ in range(100_000):
        client.send()
        asked_now = client.h2.data_to_send()
        for piece in split(random, asked_now):
            server.receive(piece)
        output = server.http2.take_output()
        for piece in split(random, output):
            client.receive(piece)
        if not (asked_now or output or client.unacknowledged):
            break
        for _ in range(random.randint(0, 8) if output else len(client.unacknowledged)):
            if client.unacknowledged:
                client.acknowledge()
    assert client.answers == {1 + 2 * number: body for number, body in enumerate(bodies)}
    assert client.ended == {stream_id: list(TRAILERS) for stream_id in client.answers}
    assert server.asked == {stream_id: asked(stream_id) for stream_id in client.answers}
    assert (server.http2.waiting_bytes, server.http2.is_over, server.http2.error) == (0, False, "")


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_bytes_at_all_make_it_raise(data: st.DataObject) -> None:
    """Frames of every kind, with any flags, for few streams, right or wrong, cut anywhere."""
    client = Client()
    ids = st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1])
    usual = st.sampled_from([block_of(REQUEST), bytes(4), bytes(5), bytes(8), b"\0\4\x7f\xff\xff\xff"])
    flags = st.integers(0, 255) | st.sampled_from([0, 1, 4, 5])
    frames = st.builds(encode_frame, st.integers(0, 11), flags, ids, usual | st.binary(max_size=20))
    stream = b"".join(data.draw(st.lists(frames | st.just(headers(1)), max_size=8)))
    opened: set[int] = set()
    for piece in split(Random(data.draw(st.integers(0, 2**32))), stream):
        for event in client.say(piece):
            if isinstance(event, StreamOpened):
                opened.add(event.stream_id)
                client.server.start(event.stream_id, OK)
                client.server.send(event.stream_id, b"x" * 100)
            assert event.stream_id in opened
        heard = client.hear()
        assert client.server.is_over == bool(client.server.error) == any(found.kind == "GoAway" for found in heard)
        if client.server.is_over:
            assert client.say(headers(101)) == []
            break


def test_bytes_that_come_one_by_one_are_as_good() -> None:
    stream = PREFACE + settings_frame() + headers(1, end=False) + data_frame(1, b"body", end=True)
    server = Http2()
    events = [event for position in range(len(stream)) for event in server.receive(stream[position : position + 1])]
    assert events == [OPENED, DataReceived(1, b"body"), StreamHalfClosed(1)]


# -- greetings ----------------------------------------------------------------------------------------------------


def test_the_greeting_says_what_we_take() -> None:
    greeting = Client(is_greeting=False).hear()
    assert greeting == [
        Heard("Settings", 0, {
            MAX_CONCURRENT_STREAMS: 10_000, INITIAL_WINDOW_SIZE: 1 << 20, MAX_HEADER_LIST_SIZE: 32 << 10,
        }),
        Heard("WindowUpdate", 0, (16 << 20) - WINDOW_BYTES_DEFAULT),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n", b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX", b"\0" * 40,
        PREFACE + encode_frame(SETTINGS, ACK, 0), PREFACE + encode_frame(PING, 0, 0, bytes(8)), PREFACE + headers(1),
        PREFACE + encode_frame(11, 0, 0),
    ],
)  # fmt: skip
def test_a_connection_that_begins_otherwise_is_over(greeting: bytes) -> None:
    client = Client(is_greeting=False)
    client.hear()
    heard = said_to(client, greeting)
    if greeting == b"P":  # so far it may be one of ours
        assert (heard, client.server.is_over) == ([], False)
        heard = said_to(client, b"OST / HTTP/1.1\r\n")
    assert heard == [Heard("GoAway", 0, PROTOCOL_ERROR)]
    assert client.server.is_over
    assert client.server.error


def test_settings_and_pings_are_acknowledged() -> None:
    client = Client()
    assert said_to(client, settings_frame((MAX_FRAME_SIZE, 20_000), (99, 7))) == [Heard("Settings", 0, "ACK")]
    assert said_to(client, encode_frame(PING, 0, 0, b"12345678")) == [Heard("Ping", 0, b"12345678")]
    assert said_to(client, encode_frame(PING, ACK, 0, b"12345678")) == []
    assert said_to(client, encode_frame(SETTINGS, ACK, 0)) == []


# -- requests -----------------------------------------------------------------------------------------------------


def test_a_request_may_be_padded_prioritized_and_cut_into_many_frames() -> None:
    client = Client()
    block = block_of(REQUEST)
    cut = [block[:1], block[1:20], block[20:]]
    first = b"\x02" + bytes([0, 0, 0, 7, 200]) + cut[0] + b"\0\0"
    events = client.say(
        encode_frame(HEADERS, PADDED | WITH_PRIORITY, 1, first)
        + encode_frame(CONTINUATION, 0, 1, cut[1])
        + encode_frame(CONTINUATION, END_HEADERS, 1, cut[2])
        + encode_frame(DATA, PADDED, 1, b"\x05body\0\0\0\0\0")
        + encode_frame(PRIORITY, 0, 1, bytes([0, 0, 0, 3, 1]))
        + encode_frame(99, 255, 1, b"unknown")
        + headers(1, ((b"x-trailer", b"1"),))
    )
    assert events == [OPENED, DataReceived(1, b"body"), StreamHalfClosed(1)]
    assert client.hear() == []


def test_content_of_the_announced_length_is_taken() -> None:
    request = (*REQUEST, (b"content-length", b"8"))
    events = Client().say(headers(1, request, end=False) + data_frame(1, b"body") + data_frame(1, b"body", end=True))
    assert events[1:] == [DataReceived(1, b"body"), DataReceived(1, b"body"), StreamHalfClosed(1)]


def test_windows_are_opened_again_as_content_comes() -> None:
    client = Client(BOUNDS._replace(stream_window_bytes=70_000, connection_window_bytes=100_000))
    piece = b"x" * 12_000
    assert said_to(client, headers(1, end=False) + 2 * data_frame(1, piece)) == []
    assert said_to(client, data_frame(1, piece)) == [Heard("WindowUpdate", 1, 36_000)]
    assert said_to(client, data_frame(1, piece) + data_frame(1, end=True)) == []
    heard = said_to(client, headers(3, end=False) + encode_frame(DATA, PADDED, 3, b"\xff" * 12_000))
    assert heard == [Heard("WindowUpdate", 0, 60_000)]  # padding counts
    assert said_to(client, data_frame(3, piece) + data_frame(3, piece, end=True)) == []  # it needs no window any more


def test_a_peer_that_cancels_is_heard_and_calls_for_its_stream_are_ignored() -> None:
    client = Client()
    assert client.say(headers(1) + rst(1, 8)) == [OPENED, StreamHalfClosed(1), StreamReset(1, 8)]
    server = client.server
    server.start(1, OK)
    server.send(1, b"x")
    server.finish(1, TRAILERS)
    server.answer(1, b"", b"", b"")
    server.reset(1, 8)
    server.start(7, OK)  # nor was there ever such a stream
    assert client.hear() == []


# -- answers ------------------------------------------------------------------------------------------------------


def test_an_answer_comes_as_it_was_given() -> None:
    client = Client()
    client.say(headers(1) + headers(3) + headers(5))
    server = client.server
    server.start(3, OK, end=True)
    server.start(1, OK)
    server.send(1, b"one")
    server.send(1, b"")
    server.send(1, b"two")
    server.finish(1, TRAILERS)
    server.start(5, OK)
    server.finish(5, ())
    assert client.hear() == [
        Heard("Headers", 3, list(OK), ends=True),
        Heard("Headers", 1, list(OK)),
        Heard("Data", 1, b"one"),
        Heard("Data", 1, b"two"),
        Heard("Headers", 1, list(TRAILERS), ends=True),
        Heard("Headers", 5, list(OK)),
        Heard("Data", 5, b"", ends=True),
    ]


def test_a_whole_answer_waits_for_windows_only_where_it_must() -> None:
    client = Client(BOUNDS, (INITIAL_WINDOW_SIZE, 10))
    client.say(headers(1) + headers(3))
    for stream_id in (1, 3):
        client.server.answer(stream_id, block_of(OK)[1:], b"x" * (13 - stream_id), block_of(TRAILERS)[1:])
    assert client.server.waiting_bytes == 2
    assert client.hear() == [
        Heard("Headers", 1, list(OK)),
        Heard("Data", 1, b"x" * 10),
        Heard("Headers", 3, list(OK)),
        Heard("Data", 3, b"x" * 10),
        Heard("Headers", 3, list(TRAILERS), ends=True),
    ]
    assert said_to(client, window_update(1, 5)) == [
        Heard("Data", 1, b"xx"),
        Heard("Headers", 1, list(TRAILERS), ends=True),
    ]
    assert client.server.waiting_bytes == 0


def test_whole_answers_use_up_the_connections_window() -> None:
    client = Client()
    client.say(b"".join(map(headers, (1, 3, 5, 7))))
    for stream_id in (1, 3, 5, 7):
        client.server.answer(stream_id, block_of(OK)[1:], b"x" * 16_384, block_of(TRAILERS)[1:])
    assert sent(client.hear())[-1] == (7, 16_383)
    assert sent(said_to(client, window_update(0, 2_000))) == [(7, 1)]


def test_the_first_block_says_that_it_needs_no_table() -> None:
    """A peer that allows none wants to hear that, and the others do not mind."""
    client = Client(BOUNDS, (HEADER_TABLE_SIZE, 0))
    client.say(headers(1) + headers(3))
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    for stream_id, start in ((1, b"\x20\x88"), (3, b"\x88")):
        client.server.start(stream_id, OK, end=True)
        block = client.server.take_output()[FRAME_HEADER_BYTES:]
        assert block.startswith(start)
        assert tuple(decoder.decode(block, raw=True)) == OK


def test_blocks_longer_than_a_frame_go_on_in_further_frames() -> None:
    client = Client()
    client.say(headers(1))
    long = (b"x-long", b"v" * 40_000)
    client.server.start(1, (*OK, long), end=True)
    output = client.server.take_output()
    assert Ears().hear(output) == [Heard("Headers", 1, [*OK, long], ends=True)]
    assert output.count(b"v" * 100 + b"\0\x40\0\x09\0\0\0\0\1") == 1  # one that does not end the block


def test_an_answer_that_ends_before_its_request_makes_the_peer_stop() -> None:
    client = Client()
    client.say(headers(1, end=False))
    client.server.start(1, OK, end=True)
    assert client.hear() == [Heard("Headers", 1, list(OK), ends=True), Heard("RstStream", 1, NO_ERROR)]
    assert client.say(data_frame(1, b"late") + data_frame(1, end=True)) == []
    assert not client.server.is_over


def test_nothing_can_be_added_to_an_answer_that_was_finished() -> None:
    client = Client(BOUNDS, (INITIAL_WINDOW_SIZE, 0))
    client.say(headers(1))
    server = client.server
    server.start(1, OK)
    server.send(1, b"x")
    server.finish(1, TRAILERS)
    server.start(1, OK)
    server.send(1, b"y")
    server.finish(1, ())
    assert client.hear() == [Heard("Headers", 1, list(OK))]
    assert said_to(client, window_update(1, 10)) == [
        Heard("Data", 1, b"x"),
        Heard("Headers", 1, list(TRAILERS), ends=True),
    ]


def test_a_reset_drops_what_waits() -> None:
    client = Client(BOUNDS, (INITIAL_WINDOW_SIZE, 1))
    client.say(headers(1))
    client.server.start(1, OK)
    client.server.send(1, b"abc")
    assert client.server.waiting_bytes == 2
    client.hear()
    client.server.reset(1, 8)
    assert client.server.waiting_bytes == 0
    assert client.hear() == [Heard("RstStream", 1, 8)]
    assert said_to(client, window_update(1, 100) + rst(1)) == []


# -- the peer's windows -------------------------------------------------------------------------------------------


def waiting_client(*sizes: int, window: int = WINDOW_BYTES_DEFAULT) -> Client:
    """Streams 1, 3 ... with answers of these sizes, of which as much was sent as may be; the greeting is heard."""
    client = Client(BOUNDS, (INITIAL_WINDOW_SIZE, window))
    for number, size in enumerate(sizes):
        client.say(headers(1 + 2 * number))
        client.server.start(1 + 2 * number, OK)
        client.server.send(1 + 2 * number, b"x" * size)
    return client


def sent(heard: list[Heard]) -> list[tuple[int, int]]:
    return [(found.stream_id, len(found.content)) for found in heard if found.kind == "Data"]


def test_frames_are_as_large_as_the_peer_takes() -> None:
    client = waiting_client(40_000)
    assert sent(client.hear()) == [(1, 16_384), (1, 16_384), (1, 7_232)]
    client.say(settings_frame((MAX_FRAME_SIZE, 20_000)) + headers(3))
    client.server.start(3, OK)
    client.server.send(3, b"x" * 25_000)
    assert sent(client.hear()) == [(3, 20_000), (3, 5_000)]


def test_streams_that_wait_for_the_connection_take_turns() -> None:
    client = waiting_client(60_000, 40_000, 40_000)
    assert [found for found in sent(client.hear()) if found[0] > 1] == [(3, 5_535)]
    assert client.server.waiting_bytes == 140_000 - WINDOW_BYTES_DEFAULT
    assert sent(said_to(client, window_update(0, 50_000))) == [(3, 16_384), (5, 16_384), (3, 16_384), (5, 848)]
    assert sent(said_to(client, window_update(0, 1_000_000))) == [(3, 1_697), (5, 16_384), (5, 6_384)]
    assert client.server.waiting_bytes == 0


def test_a_changed_window_changes_those_of_open_streams() -> None:
    client = waiting_client(100, 100, window=30)
    assert sent(client.hear()) == [(1, 30), (3, 30)]
    assert sent(said_to(client, settings_frame((INITIAL_WINDOW_SIZE, 10)))) == []  # now 20 below 0
    assert sent(said_to(client, window_update(1, 20))) == []
    assert sent(said_to(client, window_update(1, 1))) == [(1, 1)]
    assert sent(said_to(client, settings_frame((INITIAL_WINDOW_SIZE, 50)))) == [(1, 40), (3, 20)]
    heard = said_to(client, settings_frame((INITIAL_WINDOW_SIZE, 7), (INITIAL_WINDOW_SIZE, 60)))
    assert sent(heard) == [(1, 10), (3, 10)]


def test_a_stream_made_small_while_it_waits_for_the_connection_waits_on() -> None:
    client = waiting_client(WINDOW_BYTES_DEFAULT, 100)
    client.hear()
    assert sent(said_to(client, settings_frame((INITIAL_WINDOW_SIZE, 0)) + window_update(0, 1_000))) == []
    assert sent(said_to(client, window_update(3, 60))) == [(3, 60)]


def test_a_stream_that_is_reset_while_it_waits_for_the_connection_sends_nothing_more() -> None:
    client = waiting_client(WINDOW_BYTES_DEFAULT, 100)
    client.hear()
    assert said_to(client, rst(3) + window_update(0, 1_000)) == []


def test_an_acknowledgement_comes_before_what_the_settings_allow() -> None:
    client = waiting_client(10, window=0)
    client.hear()
    heard = said_to(client, settings_frame((INITIAL_WINDOW_SIZE, 5)))
    assert heard == [Heard("Settings", 0, "ACK"), Heard("Data", 1, b"x" * 5)]


# -- the end of a connection --------------------------------------------------------------------------------------


def test_a_shutdown_lets_open_streams_end_and_takes_no_new_ones() -> None:
    client = Client()
    client.say(headers(1) + headers(3, end=False))
    client.server.shut_down()
    client.server.shut_down()
    assert client.hear() == [Heard("GoAway", 0, NO_ERROR)]
    assert client.say(headers(5, end=False) + data_frame(5, b"x") + data_frame(3, b"y", end=True)) == [
        DataReceived(3, b"y"),
        StreamHalfClosed(3),
    ]
    client.server.start(1, OK, end=True)
    assert not client.server.is_over
    client.say(rst(3))
    assert (client.server.is_over, client.server.error) == (True, "")
    assert client.hear() == [Heard("Headers", 1, list(OK), ends=True)]


def test_a_shutdown_without_streams_is_over_at_once() -> None:
    client = Client()
    client.server.shut_down()
    assert client.server.is_over
    assert client.say(headers(1)) == []


def test_what_came_before_a_mistake_is_given_and_what_was_sent_is_written() -> None:
    client = waiting_client(100, window=0)
    events = client.say(headers(3) + encode_frame(PING, 0, 1, bytes(8)) + headers(5))
    assert [event.stream_id for event in events] == [3, 3]
    assert client.hear()[-1] == Heard("GoAway", 0, PROTOCOL_ERROR)
    server = client.server
    assert (server.is_over, server.error, server.waiting_bytes) == (True, "PING of a stream", 0)
    server.start(3, OK)
    server.shut_down()
    assert client.say(headers(7)) == []
    assert client.hear() == []


def test_a_peer_that_goes_may_wait_for_its_answers() -> None:
    client = Client()
    client.say(headers(1) + encode_frame(GOAWAY, 0, 0, bytes(8) + b"bye"))
    client.server.start(1, OK, end=True)
    assert client.hear() == [Heard("Headers", 1, list(OK), ends=True)]


# -- mistakes, by the state of a stream (RFC 9113, 5.1) -----------------------------------------------------------

WAYS = {
    "idle": b"",
    "open": headers(5, end=False),
    "half-closed": headers(5),
    "answered": headers(5),
    "cancelled": headers(5, end=False) + rst(5),
    "reset by us": headers(5, end=False),
    "skipped": headers(7),
}
SAID = {
    "HEADERS": headers(5, ((b"x", b"y"),), end=False),
    "HEADERS that end": headers(5, ((b"x", b"y"),)),
    "DATA": data_frame(5, b"x"),
    "DATA that end": data_frame(5, b"x", end=True),
    "RST_STREAM": rst(5),
    "WINDOW_UPDATE": window_update(5, 2_000),
    "PRIORITY": encode_frame(PRIORITY, 0, 5, bytes(5)),
}
_BAD_REQUEST = ("RstStream", PROTOCOL_ERROR)
_UNKNOWN, _GONE = ("GoAway", PROTOCOL_ERROR), ("GoAway", STREAM_CLOSED)
_ENDED = ("RstStream", STREAM_CLOSED)
VERDICTS: dict[str, list[object]] = {
    "idle": [_BAD_REQUEST, _BAD_REQUEST, _UNKNOWN, _UNKNOWN, _UNKNOWN, _UNKNOWN, FINE],
    "open": [_BAD_REQUEST, FINE, FINE, FINE, FINE, FINE, FINE],
    "half-closed": [_ENDED, _ENDED, _ENDED, _ENDED, FINE, FINE, FINE],
    "answered": [_GONE, _GONE, _GONE, _GONE, FINE, FINE, FINE],
    "cancelled": [_GONE, _GONE, _GONE, _GONE, FINE, FINE, FINE],
    "reset by us": [FINE] * 7,
    "skipped": [_UNKNOWN, _UNKNOWN, _GONE, _GONE, FINE, FINE, FINE],
}


@pytest.mark.parametrize(
    ("state", "said", "expected"),
    [
        (state, said, expected)
        for state, verdicts in VERDICTS.items()
        for said, expected in zip(SAID, verdicts, strict=True)
    ],
)
def test_what_may_be_said_in_a_state(state: str, said: str, expected: object) -> None:
    client = Client()
    client.say(WAYS[state])
    if state == "answered":
        client.server.start(5, OK, end=True)
    if state == "reset by us":
        client.server.reset(5, 8)
    client.hear()
    heard = said_to(client, SAID[said])
    assert [(found.kind, found.content) for found in heard] == ([] if expected == FINE else [expected])


def test_frames_that_come_late_after_our_reset_end_as_if_they_were_in_time() -> None:
    """After its own end a peer has nothing more to say on that stream, whatever we have dropped."""
    client = Client()
    client.say(headers(1, end=False))
    client.server.reset(1, 8)
    assert said_to(client, data_frame(1, b"x") + data_frame(1, end=True))[1:] == []
    assert said_to(client, data_frame(1, b"x")) == [Heard("GoAway", 0, STREAM_CLOSED)]


# -- mistakes of all other kinds ----------------------------------------------------------------------------------

_OF_CONNECTION: dict[str, tuple[bytes, int]] = {
    "a stream with an even number": (headers(2), PROTOCOL_ERROR),
    "HEADERS of no stream": (headers(0), PROTOCOL_ERROR),
    "DATA of no stream": (data_frame(0, b"x"), PROTOCOL_ERROR),
    "RST_STREAM of no stream": (rst(0), PROTOCOL_ERROR),
    "PRIORITY of no stream": (encode_frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL_ERROR),
    "CONTINUATION of no stream": (encode_frame(CONTINUATION, END_HEADERS, 0), PROTOCOL_ERROR),
    "CONTINUATION after a whole block": (headers(1) + encode_frame(CONTINUATION, END_HEADERS, 1), PROTOCOL_ERROR),
    "CONTINUATION of another stream": (
        headers(1, flags=0) + encode_frame(CONTINUATION, END_HEADERS, 3), PROTOCOL_ERROR,
    ),
    "another frame within a block": (headers(1, flags=0) + encode_frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
    "an unknown frame within a block": (headers(1, flags=0) + encode_frame(99, 0, 0), PROTOCOL_ERROR),
    "PUSH_PROMISE": (encode_frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4)), PROTOCOL_ERROR),
    "padding without a length": (headers(1, end=False) + encode_frame(DATA, PADDED, 1), PROTOCOL_ERROR),
    "padding as long as its frame": (headers(1, end=False) + encode_frame(DATA, PADDED, 1, b"\x01"), PROTOCOL_ERROR),
    "HEADERS with too much padding": (encode_frame(HEADERS, PADDED | END_HEADERS, 1, b"\x05\x82"), PROTOCOL_ERROR),
    "HEADERS too short for a priority": (
        encode_frame(HEADERS, WITH_PRIORITY | END_HEADERS, 1, bytes(4)), FRAME_SIZE_ERROR,
    ),
    "a block that cannot be decoded": (encode_frame(HEADERS, END_HEADERS, 1, b"\xbe"), COMPRESSION_ERROR),
    "a frame too large": (encode_frame(DATA, 0, 1, bytes(FRAME_BYTES_DEFAULT + 1)), FRAME_SIZE_ERROR),
    "a frame too large, of which only the head has come": (
        encode_frame(99, 0, 1, bytes(FRAME_BYTES_DEFAULT + 1))[:9], FRAME_SIZE_ERROR,
    ),
    "SETTINGS of a stream": (encode_frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
    "SETTINGS of a broken length": (encode_frame(SETTINGS, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "an acknowledgement with content": (encode_frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
    "ENABLE_PUSH 2": (settings_frame((2, 2)), PROTOCOL_ERROR),
    "a window too large": (settings_frame((INITIAL_WINDOW_SIZE, 2**31)), FLOW_CONTROL_ERROR),
    "frames too small": (settings_frame((MAX_FRAME_SIZE, 16_383)), PROTOCOL_ERROR),
    "frames too large": (settings_frame((MAX_FRAME_SIZE, 2**24)), PROTOCOL_ERROR),
    "PING of a stream": (encode_frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "PING of a broken length": (encode_frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "RST_STREAM of a broken length": (headers(1) + encode_frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
    "GOAWAY of a stream": (encode_frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL_ERROR),
    "GOAWAY of a broken length": (encode_frame(GOAWAY, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
    "WINDOW_UPDATE of a broken length": (encode_frame(WINDOW_UPDATE, 0, 0, bytes(5)), FRAME_SIZE_ERROR),
    "WINDOW_UPDATE by 0": (window_update(0, 0), PROTOCOL_ERROR),
    "a connection's window too large": (window_update(0, WINDOW_BYTES_MAX), FLOW_CONTROL_ERROR),
    "a stream's window too large by SETTINGS": (
        headers(1) + window_update(1, 2**31 - 1 - WINDOW_BYTES_DEFAULT)
        + settings_frame((INITIAL_WINDOW_SIZE, WINDOW_BYTES_DEFAULT + 1)), FLOW_CONTROL_ERROR,
    ),
    "PRIORITY of a broken length on a stream that is idle": (encode_frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
}  # fmt: skip
_OF_STREAM: dict[str, tuple[bytes, int]] = {
    "WINDOW_UPDATE by 0": (headers(1) + window_update(1, 0), PROTOCOL_ERROR),
    "a stream's window too large": (headers(1) + window_update(1, WINDOW_BYTES_MAX), FLOW_CONTROL_ERROR),
    "PRIORITY of a broken length": (headers(1) + encode_frame(PRIORITY, 0, 1, bytes(4)), FRAME_SIZE_ERROR),
    "a stream that depends on itself": (
        encode_frame(HEADERS, WITH_PRIORITY | END_HEADERS, 1, bytes([0, 0, 0, 1, 0]) + block_of(REQUEST)),
        PROTOCOL_ERROR,
    ),
    "PRIORITY of a stream that depends on itself": (
        headers(1) + encode_frame(PRIORITY, 0, 1, bytes([128, 0, 0, 1, 0])), PROTOCOL_ERROR,
    ),
    "a malformed request": (headers(1, REQUEST[1:]), PROTOCOL_ERROR),
    "malformed trailers": (headers(1, end=False) + headers(1, REQUEST), PROTOCOL_ERROR),
    "less content than announced": (
        headers(1, (*REQUEST, (b"content-length", b"5")), end=False) + data_frame(1, b"four", end=True), PROTOCOL_ERROR,
    ),
    "more content than announced": (
        headers(1, (*REQUEST, (b"content-length", b"3")), end=False) + data_frame(1, b"four"), PROTOCOL_ERROR,
    ),
    "no content but announced": (headers(1, (*REQUEST, (b"content-length", b"1"))), PROTOCOL_ERROR),
    "trailers in place of announced content": (
        headers(1, (*REQUEST, (b"content-length", b"1")), end=False) + headers(1, TRAILERS), PROTOCOL_ERROR,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", _OF_CONNECTION)
def test_a_mistake_that_ends_the_connection(mistake: str) -> None:
    said, code = _OF_CONNECTION[mistake]
    client = Client()
    heard = said_to(client, said)
    assert heard[-1] == Heard("GoAway", 0, code)
    assert client.server.is_over
    assert client.server.error


@pytest.mark.parametrize("mistake", _OF_STREAM)
def test_a_mistake_that_ends_its_stream_alone(mistake: str) -> None:
    said, code = _OF_STREAM[mistake]
    client = Client()
    events = client.say(said)
    assert client.hear()[-1:] == [Heard("RstStream", 1, code)]
    # A request that was never given is not taken back.
    resets = [event for event in events if isinstance(event, StreamReset)]
    assert resets == ([StreamReset(1, code)] if len(events) > 1 else [])
    assert not client.server.is_over
    assert client.say(headers(3)) == [StreamOpened(3, list(REQUEST)), StreamHalfClosed(3)]


# -- bounds -------------------------------------------------------------------------------------------------------


class Trip(NamedTuple):
    """How a peer trips over a bound: what it may say as often as that, and what one time more brings."""

    value: int
    times: int
    say: Callable[[int], bytes]  # by the number of the time
    verdict: tuple[str, int] = ("GoAway", ENHANCE_YOUR_CALM)
    before: bytes = b""
    others: Mapping[str, int] = {}


def id_of(number: int) -> int:
    return 11 + 2 * number


def longer(number: int) -> tuple[Pair, ...]:
    return (*REQUEST, (b"x", b"v" * number))


def cut_block(stream_id: int, continuations: int) -> bytes:
    middle = encode_frame(CONTINUATION, 0, stream_id) * (continuations - 1)
    return headers(stream_id, flags=0) + middle + encode_frame(CONTINUATION, END_HEADERS, stream_id)


TRIPS = {
    "streams_max": Trip(3, 3, lambda number: headers(id_of(number)), ("RstStream", REFUSED_STREAM)),
    "header_block_bytes_max": Trip(
        len(block_of(longer(100))), 1, lambda number: headers(id_of(number), longer(100 + number)),
    ),
    "header_block_frames_max": Trip(3, 1, lambda number: cut_block(id_of(number), 2 + number)),
    "header_list_bytes_max": Trip(
        sum(len(name) + len(value) + 32 for name, value in longer(100)), 1,
        lambda number: headers(id_of(number), longer(100 + number)),
    ),
    "resets_max": Trip(3, 3, lambda number: headers(id_of(number)) + rst(id_of(number))),
    "refused_max": Trip(2, 2, lambda number: headers(id_of(number)), before=headers(1), others={"streams_max": 1}),
    "settings_max": Trip(5, 3, lambda _: settings_frame()),  # the greeting has two
    "pings_max": Trip(3, 3, lambda _: encode_frame(PING, 0, 0, bytes(8))),
    "empty_data_max": Trip(3, 3, lambda _: data_frame(1), before=headers(1, end=False)),
    "priorities_max": Trip(3, 3, lambda _: encode_frame(PRIORITY, 0, 9, bytes(5))),
    "tiny_updates_max": Trip(3, 3, lambda _: window_update(0, 1_023)),
    "tiny_update_bytes": Trip(
        2_000, 1, lambda number: window_update(0, 2_000 - number), others={"tiny_updates_max": 0}
    ),
    "ignored_max": Trip(3, 3, lambda _: encode_frame(99, 0, 0)),
}  # fmt: skip
ELSEWHERE = {
    "stream_window_bytes", "connection_window_bytes",  # test_windows_are_opened_again_as_content_comes
    "late_streams_max", "waiting_bytes_max", "output_bytes_max",  # below
    "unfinished_bytes_max",  # in test_grpc.py
}  # fmt: skip
FORGIVEN = ("settings_max", "pings_max", "empty_data_max", "priorities_max", "tiny_updates_max", "ignored_max")


def client_of(name: str) -> tuple[Client, Trip]:
    trip = TRIPS[name]
    client = Client(BOUNDS._replace(**{name: trip.value, **trip.others}))
    client.say(trip.before)
    client.hear()
    return client, trip


def test_every_bound_has_a_test() -> None:
    assert set(TRIPS) | ELSEWHERE == set(Bounds._fields)


@pytest.mark.parametrize("name", TRIPS)
def test_a_peer_comes_up_to_a_bound_and_no_further(name: str) -> None:
    client, trip = client_of(name)
    for number in range(trip.times):
        assert trip.verdict not in [(found.kind, found.content) for found in said_to(client, trip.say(number))]
    heard = said_to(client, trip.say(trip.times))
    assert [(found.kind, found.content) for found in heard][-1] == trip.verdict
    assert client.server.is_over == (trip.verdict[0] == "GoAway")


@pytest.mark.parametrize("name", FORGIVEN)
def test_an_answer_makes_room_for_as_much_again(name: str) -> None:
    client, trip = client_of(name)
    for _ in range(3):
        for number in range(trip.times):
            client.say(trip.say(number))
        client.say(headers(client.last_id + 2))
        client.server.start(client.last_id, OK, end=True)
    assert not client.server.is_over
    for number in range(trip.value + 1):
        client.say(trip.say(number))
    assert client.server.error == f"more than {name} = {trip.value} without an answer between them"


def test_an_answer_makes_room_for_one_reset() -> None:
    client, trip = client_of("resets_max")
    for number in range(100):
        client.say(trip.say(2 * number))
        client.say(headers(id_of(2 * number + 1)))
        client.server.start(id_of(2 * number + 1), OK, end=True)
    assert not client.server.is_over
    for number in range(200, 200 + trip.times):
        assert client.say(trip.say(number))
    client.say(trip.say(300))
    assert client.server.is_over


def test_streams_that_a_peer_makes_us_reset_count_as_its_resets() -> None:
    client = Client(BOUNDS._replace(resets_max=3))
    for number in range(3):
        client.say(headers(id_of(number)) + window_update(id_of(number), 0))
    assert not client.server.is_over
    client.say(headers(id_of(3)) + window_update(id_of(3), 0))
    assert client.server.error == "more than resets_max = 3"


def test_frames_with_nothing_but_padding_are_empty() -> None:
    client, trip = client_of("empty_data_max")
    for _ in range(trip.times + 1):
        client.say(encode_frame(DATA, PADDED, 1, b"\x02\0\0"))
    assert client.server.is_over


def test_a_block_is_bounded_while_it_comes() -> None:
    client = Client(BOUNDS._replace(header_block_bytes_max=100))
    assert said_to(client, headers(1, flags=0) + encode_frame(CONTINUATION, 0, 1, bytes(100))) == [
        Heard("GoAway", 0, ENHANCE_YOUR_CALM)
    ]


def test_the_oldest_of_too_many_late_streams_is_forgotten() -> None:
    client = Client(BOUNDS._replace(late_streams_max=2))
    for stream_id in (1, 3, 5):
        client.say(headers(stream_id, end=False))
        client.server.reset(stream_id, 8)
    client.hear()
    assert said_to(client, data_frame(3, b"x") + data_frame(5, b"x")) == []
    assert said_to(client, data_frame(1, b"x")) == [Heard("GoAway", 0, STREAM_CLOSED)]


def test_a_peer_that_opens_no_window_is_dropped() -> None:
    client = Client(BOUNDS._replace(waiting_bytes_max=100), (INITIAL_WINDOW_SIZE, 0))
    client.say(headers(1) + headers(3))
    for stream_id in (1, 3):
        client.server.start(stream_id, OK)
        client.server.send(stream_id, b"x" * 50)
    assert (client.server.waiting_bytes, client.server.is_over) == (100, False)
    client.server.send(1, b"x")
    assert client.hear()[-1] == Heard("GoAway", 0, ENHANCE_YOUR_CALM)
    assert (client.server.waiting_bytes, client.server.is_over) == (0, True)


def test_a_peer_that_does_not_read_is_dropped() -> None:
    client = Client(BOUNDS._replace(output_bytes_max=17 * 3))
    ping = encode_frame(PING, 0, 0, bytes(8))
    assert [client.say(ping) for _ in range(4)] == [[], [], [], []]
    assert client.server.error == ""
    client.say(ping)
    assert (client.server.is_over, client.server.error) == (True, "the peer does not read our answers")
    assert len(client.hear()) == 5

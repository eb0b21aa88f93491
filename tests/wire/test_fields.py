"""Header fields: what the decoder of hpack makes of the same bytes, and what a request may not have."""

from typing import Any

import pytest
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.errors import ProtocolError
from postdate.wire.fields import (
    NO_TABLE,
    TABLE_BYTES,
    Field,
    FieldReader,
    Pair,
    TooManyFields,
    are_trailers,
    content_length,
    encode_fields,
)
from tests.support.http2 import REQUEST, block_of

LIST_BYTES = 4_000

usual_names = [b":path", b":method", b"te", b"x", b"authorization", b"x-mq-date-time", b"n" * 130]
names = st.sampled_from(usual_names) | st.binary(min_size=1, max_size=40)
values = st.sampled_from([b"", b"POST", b"/", b"trailers", b"v" * 126, b"v" * 127, b"v" * 300]) | st.binary(max_size=60)
odd_pieces = [
    b"\x82", b"\x80", b"\xbe", b"\xff\x00", b"\x3f\xe1\x1f", b"\x20", b"\x40\x01a\x01b", b"\x7e\x01c",
    b"\x0f\x2f\x00", b"\x3f\xe2\x1f", b"\x7f\xff\xff\xff\xff\xff\x00",
]  # fmt: skip
pairs = st.lists(st.tuples(names, values), max_size=8)


def read(reader: FieldReader, block: bytes) -> list[Pair]:
    return [pair for pair, _, _ in reader.read(block)]


def examine(*found: Pair) -> list[Field]:
    return FieldReader(1 << 20).read(block_of(found))


@settings(deadline=None)
@given(st.data())
def test_what_an_encoder_writes_is_read_block_after_block(data: st.DataObject) -> None:
    """With a table that it fills, empties and resizes, packed by Huffman's code or not, some fields never indexed."""
    encoder, reader = Encoder(), FieldReader(1 << 20)
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            encoder.header_table_size = data.draw(st.integers(0, TABLE_BYTES))
        block = data.draw(pairs)
        sensitive = data.draw(st.booleans())
        fields: list[Any] = [NeverIndexedHeaderTuple(*pair) if sensitive else pair for pair in block]
        assert read(reader, encoder.encode(fields, huffman=data.draw(st.booleans()))) == block


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_any_bytes_mean_what_they_mean_to_others(data: st.DataObject) -> None:
    """The decoder of hpack and ours read the same, or both refuse, also after blocks that filled their tables."""
    theirs, ours = Decoder(LIST_BYTES), FieldReader(LIST_BYTES)
    filling = Encoder().encode(data.draw(pairs))
    pieces = st.sampled_from(odd_pieces) | st.binary(max_size=12)
    for block in (filling, *data.draw(st.lists(st.lists(pieces, max_size=5).map(b"".join), max_size=4))):
        try:
            expected = [(bytes(name), bytes(value)) for name, value in theirs.decode(block, raw=True)]
        except HPACKError:
            with pytest.raises(ProtocolError):
                ours.read(block)
            return
        assert read(ours, block) == expected


def test_entries_leave_the_table_oldest_first() -> None:
    reader = FieldReader(1 << 20)
    entry = 32 + 2_000
    for name in (b"a", b"b", b"c"):  # of which two have room
        reader.read(b"\x40\x01" + name + b"\x7f" + _rest_of(entry - 33) + b"v" * (entry - 33))
    assert [name for name, _ in read(reader, b"\xbe\xbf")] == [b"c", b"b"]
    with pytest.raises(ProtocolError):
        reader.read(b"\xc0")


def test_an_entry_too_large_for_the_table_empties_it() -> None:
    reader = FieldReader(1 << 20)
    reader.read(b"\x40\x01a\x01b")
    assert read(reader, b"\xbe") == [(b"a", b"b")]
    reader.read(b"\x40\x01a\x7f" + _rest_of(5_000) + b"v" * 5_000)
    with pytest.raises(ProtocolError):
        reader.read(b"\xbe")


def _rest_of(length: int) -> bytes:
    number = length - 0x7F
    return bytes([number & 0x7F | 0x80, number >> 7]) if number >= 0x80 else bytes([number])


@pytest.mark.parametrize(
    "block",
    [
        b"\x80", b"\xbe", b"\xc6", b"\x40", b"\x40\x05ab", b"\x41\x05ab", b"\x00\x01a\x02b", b"\x7e\x01a",
        b"\x82\x20", b"\x3f\xe2\x1f", b"\xff\x80\x80\x80\x80\x80\x00", b"\x0f", b"\x41\x82\xff\xff", b"\x41\x81\x00",
        b"\x41\x84\xff\xff\xff\xff",
    ],
)  # fmt: skip
def test_a_block_that_is_broken_is_refused(block: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        FieldReader(1 << 20).read(block)
    assert not isinstance(caught.value, TooManyFields)


def test_a_table_may_be_resized_twice_before_the_first_field() -> None:
    assert read(FieldReader(1 << 20), b"\x20\x3f\xe1\x1f\x82") == [(b":method", b"GET")]


def test_fields_are_bounded_as_they_are_counted_by_everybody() -> None:
    """A reference of one byte to a large entry counts as all of it."""
    large = 32 + 1 + 1_000
    bomb = b"\x40\x01a\x7f" + _rest_of(1_000) + b"v" * 1_000 + b"\xbe" * 3
    assert len(FieldReader(4 * large).read(bomb)) == 4
    with pytest.raises(TooManyFields, match=f"header fields of more than {4 * large - 1} bytes"):
        FieldReader(4 * large - 1).read(bomb)


def test_long_literals_are_read_as_often_as_they_come_and_remembered_by_nobody() -> None:
    for length in (200, 256, 5_000):
        pair = (b"x-long", b"v" * length)
        assert [pair_ for pair_, _, _ in examine(pair, pair)] == [pair, pair]


# -- requests ---------------------------------------------------------------------------------------------------

METHOD, SCHEME, PATH, *_ = REQUEST


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (REQUEST, -1),
        ((PATH, SCHEME, METHOD), -1),
        ((*REQUEST, (b"content-length", b"12")), 12),
        ((METHOD, SCHEME, (b":path", b"*")), -1),
        ((METHOD, SCHEME, PATH, (b":authority", b"a:1")), -1),
        (((b":method", b"CONNECT"), (b":authority", b"a:1")), -1),
        ((*REQUEST, (b"x", b"")), -1),
        ((*REQUEST, (b"x", b"a b\tc\xff")), -1),
    ],
)
def test_a_request_is_well_formed(fields: tuple[Pair, ...], expected: int) -> None:
    assert content_length(examine(*fields)) == expected


@pytest.mark.parametrize(
    "fields",
    [
        (), (SCHEME, PATH), (METHOD, PATH), (METHOD, SCHEME),
        (METHOD, METHOD, SCHEME, PATH), (METHOD, SCHEME, PATH, PATH), (METHOD, SCHEME, SCHEME, PATH),
        (METHOD, SCHEME, (b":path", b"")), (METHOD, SCHEME, (b":path", b"service")),
        (METHOD, (b"x", b"y"), SCHEME, PATH), (METHOD, (b"content-length", b"0"), SCHEME, PATH),
        (*REQUEST, (b":status", b"200")), (*REQUEST, (b":other", b"200")),
        (*REQUEST, (b"X", b"y")), (*REQUEST, (b"x y", b"z")), (*REQUEST, (b"", b"z")), (*REQUEST, (b"x:", b"z")),
        (*REQUEST, (b"x\x80", b"z")),
        (*REQUEST, (b"x", b" y")), (*REQUEST, (b"x", b"y ")), (*REQUEST, (b"x", b"\ty")), (*REQUEST, (b"x", b"y\t")),
        (*REQUEST, (b"x", b"a\0b")), (*REQUEST, (b"x", b"a\rb")), (*REQUEST, (b"x", b"a\nb")), (*REQUEST, (b"x", b" ")),
        (*REQUEST, (b"connection", b"close")), (*REQUEST, (b"keep-alive", b"1")), (*REQUEST, (b"upgrade", b"h2c")),
        (*REQUEST, (b"proxy-connection", b"x")), (*REQUEST, (b"transfer-encoding", b"chunked")),
        (METHOD, SCHEME, PATH, (b"te", b"gzip")),
        (*REQUEST, (b"content-length", b"")), (*REQUEST, (b"content-length", b"-1")),
        (*REQUEST, (b"content-length", b"1" * 20)),
        (*REQUEST, (b"content-length", b"1"), (b"content-length", b"1")),
        ((b":method", b"CONNECT"), SCHEME, PATH), ((b":method", b"CONNECT"), METHOD, SCHEME, PATH),
    ],
)  # fmt: skip
def test_a_request_is_malformed(fields: tuple[Pair, ...]) -> None:
    assert content_length(examine(*fields)) is None


def test_trailers_have_no_pseudo_fields() -> None:
    assert are_trailers(examine((b"x", b"y"), (b"content-length", b"0")))
    assert not are_trailers(examine(METHOD))
    assert not are_trailers(examine((b"X", b"y")))


# -- writing ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(pairs, max_size=3))
def test_blocks_are_good_for_every_connection_at_any_time(blocks: list[list[Pair]]) -> None:
    encoded = [encode_fields(block) for block in blocks]
    for order in (encoded, list(reversed(encoded))):
        decoder = Decoder(1 << 20)
        decoder.decode(NO_TABLE)
        for block in order:
            found = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
            assert found == blocks[encoded.index(block)]

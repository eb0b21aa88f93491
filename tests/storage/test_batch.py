"""The bytes of a batch, and that no change of them goes unnoticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postdate.storage import batch as batches
from postdate.storage.batch import KIND_BATCH, KIND_FILLER, parse
from postdate.storage.layout import BATCH_HEADER_BYTES as HEADER_BYTES
from postdate.storage.layout import ROW, ROW_BYTES, ROW_STRUCT

AT_MS = 1_700_000_000_000  # 0x018BCFE56800

# One row and a record of 5 bytes, written at offset 4,096 when everything before 4,000 was durable.
ROW_BYTES_BY_HAND = b"".join(
    [
        bytes.fromhex("01"),  # kind: message
        bytes.fromhex("03"),  # level
        bytes.fromhex("0000"),
        bytes.fromhex("07000000"),  # queue
        bytes.fromhex("E86BE5CF8B010000"),  # due: at_ms + 1000
        bytes.fromhex("1100000000000000"),  # unique hash
        bytes.fromhex("2200000000000080"),  # key hash, the highest bit set
        bytes.fromhex("FEFFFFFF"),  # tag hash: -2
        bytes.fromhex("05000000"),  # size
        bytes.fromhex("60000000"),  # position: 48 + 48 = 96
        bytes.fromhex("00000000"),
    ]
)
BODY = ROW_BYTES_BY_HAND + b"bytes" + bytes(3)
HEAD_BY_HAND = b"".join(
    [
        b"PDB1",
        bytes.fromhex("01"),  # kind: batch
        bytes.fromhex("01"),  # version
        bytes.fromhex("0000"),
        bytes.fromhex("68000000"),  # length: 48 + 48 + 8 = 104
        bytes.fromhex("01000000"),  # count
        bytes.fromhex("0010000000000000"),  # offset: 4096
        bytes.fromhex("0068E5CF8B010000"),  # at_ms
        bytes.fromhex("A00F000000000000"),  # durable: 4000
    ]
)
CHECKSUM = bytes.fromhex("F829A48E5C61DB3C")


def whole(kind: int = KIND_BATCH, offset: int = 4_096, count: int = 1, body: bytes = BODY) -> bytes:
    return batches.header(kind, offset, AT_MS, 4_000, count, body) + body


def test_a_batch_is_spelled_byte_by_byte() -> None:
    assert whole()[:HEADER_BYTES] == HEAD_BY_HAND + CHECKSUM
    assert HEADER_BYTES == 48
    assert ROW_STRUCT.pack(1, 3, 0, 7, AT_MS + 1_000, 0x11, 0x8000000000000022, -2, 5, 96, 0) == ROW_BYTES_BY_HAND


def test_a_batch_comes_back_as_it_was() -> None:
    found = parse(bytes(16) + whole() + bytes(100), 16, 4_096)
    assert found.problem == ""
    assert found.batch is not None
    assert found.batch == batches.Batch(4_096, 4_200, AT_MS, 4_000, 1, ROW_BYTES_BY_HAND, KIND_BATCH)
    assert found.batch.end == 4_200
    row = found.batch.array()[0]
    assert (row["kind"], row["queue"], row["due"], row["tag_hash"]) == (1, 7, AT_MS + 1_000, -2)
    assert (row["unique_hash"], row["key_hash"], row["size"], row["position"]) == (0x11, 0x8000000000000022, 5, 96)


def test_every_change_of_a_single_byte_is_noticed() -> None:
    data = whole()
    for position in range(len(data)):
        for change in (1, 0x80, 0xFF):
            hurt = bytearray(data)
            hurt[position] ^= change
            found = parse(bytes(hurt), 0, 4_096)
            assert found.batch is None, f"byte {position} changed by {change:#x}"
            assert found.problem


def test_every_cut_is_noticed() -> None:
    data = whole()
    for size in range(len(data)):
        assert parse(data[:size], 0, 4_096).batch is None
        assert parse(data[:size] + bytes(len(data) - size + 64), 0, 4_096).batch is None or size >= len(data) - 3


def test_a_batch_at_another_place_is_none() -> None:
    assert parse(whole(), 0, 8_192) == (None, "the batch says it stands at 4096")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes(100), "nothing is written here"),
        (bytes(47), "only 47 bytes are left, a batch header has 48"),
        (b"XXXX" + whole()[4:], "the magic is 0x58585858, expected 0x31424450"),
        (whole()[:5] + b"\x02" + whole()[6:], "version 2, this program knows 1"),
        (whole(kind=3), "kind 3, length 104 and count 1 do not fit"),
        (whole(count=2), "kind 1, length 104 and count 2 do not fit"),
        (whole(body=BODY[:-1]), "length 103"),
        (whole()[:-1], "the batch has 104 bytes, only 103 are left in its segment"),
        (whole()[:-1] + b"\x01", "the checksum of the batch of 104 bytes does not match"),
    ],
)
def test_what_is_no_batch_says_why(data: bytes, said: str) -> None:
    found = parse(data, 0, 4_096)
    assert found.batch is None
    assert said in found.problem


def test_a_filler_has_no_rows() -> None:
    found = parse(whole(KIND_FILLER, 4_096, 0, bytes(64)), 0, 4_096)
    assert found.batch is not None
    assert (found.batch.kind, found.batch.length, found.batch.row_count) == (KIND_FILLER, 112, 0)


def test_lengths_are_planned_as_they_are_written() -> None:
    assert batches.batch_bytes(0, 0) == HEADER_BYTES
    assert batches.batch_bytes(1, 5) == len(whole())
    assert batches.batch_bytes(2, 8) == HEADER_BYTES + 2 * ROW_BYTES + 8
    assert batches.records_position(3) == HEADER_BYTES + 3 * ROW_BYTES


UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
INT32, INT63 = st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**63 - 1)
ZERO = st.just(0)
ROWS = st.tuples(
    st.integers(1, 9), st.integers(0, 255), ZERO, INT32, INT63, UINT64, UINT64, INT32, UINT32, UINT32, ZERO
)


@given(st.lists(ROWS, max_size=20), st.integers(0, 2**62), st.integers(0, 2**62))
def test_rows_come_back_as_they_were(rows: list[tuple[int, ...]], offset: int, at_ms: int) -> None:
    body = b"".join(ROW_STRUCT.pack(*row) for row in rows)
    data = batches.header(KIND_BATCH, offset, at_ms, 0, len(rows), body) + body
    found = parse(data, 0, offset).batch
    assert found is not None
    assert (found.offset, found.at_ms, found.row_count) == (offset, at_ms, len(rows))
    assert found.array().tolist() == rows
    assert np.array(rows, ROW).tobytes() == body

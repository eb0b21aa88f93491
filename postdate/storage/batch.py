"""A batch: the unit of the log, there wholly or not at all.

    0        4     5     6        8         12       16        24       32         40          48
    +--------+-----+-----+--------+---------+--------+---------+--------+----------+-----------+
    | magic  |kind |ver. | 0      | length  | count  | offset  | at_ms  | durable  | checksum  |
    +--------+-----+-----+--------+---------+--------+---------+--------+----------+-----------+
    | count rows of 48 bytes (ROW)                                                             |
    | the records, one behind the other, in RocketMQ's layout (record.py)                      |
    | zeros up to a multiple of 8                                                              |
    +------------------------------------------------------------------------------------------+

All little-endian (the records inside are big-endian, as RocketMQ wants them). `length` counts the whole batch,
`offset` is its own place in the log, so that bytes left by an earlier life of the file are never taken for a batch;
`durable` is the position that was known to be on disk when the batch was written: an open that finds damage below it
knows that an acknowledged message is hurt. The checksum (xxh3, 64 bits) covers everything but itself.

A filler (kind 2) has no rows, takes the rest of its segment and is zeros behind its header.

The rows say all that the fold needs, so that neither the live path nor a replay parses a property twice.
"""

from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from postdate.storage.disk import View
from postdate.storage.layout import BATCH_HEAD, BATCH_HEADER_BYTES, CHECKSUM, ROW, ROW_BYTES

MAGIC = 0x31424450  # "PDB1"
VERSION = 1
KIND_BATCH, KIND_FILLER = 1, 2

ALIGNMENT = 8

# What a record is (column `kind` of ROW).
MESSAGE, CANCEL, STAGE, RESCUE, TOPIC, GROUP, OFFSETS, SETTINGS, PIPELINE, POP, ACK, INVISIBLE, JOB = range(1, 14)
KIND_NAMES = {
    MESSAGE: "message",
    CANCEL: "cancel",
    STAGE: "stage",
    RESCUE: "rescue",
    TOPIC: "topic",
    GROUP: "group",
    OFFSETS: "offsets",
    SETTINGS: "settings",
    PIPELINE: "pipeline",
    POP: "pop",
    ACK: "ack",
    INVISIBLE: "invisible",
    JOB: "job",
}

MORE_KEYS = 1  # a bit of `flags`: KEYS has keys behind the first one; they stand in the record only


class Batch(NamedTuple):
    """One batch as it stands in the log; `rows` are the raw bytes of its ROW array."""

    offset: int
    end: int  # where the next one begins
    at_ms: int
    durable: int
    row_count: int
    rows: bytes
    kind: int = KIND_BATCH

    @property
    def length(self) -> int:
        return self.end - self.offset

    def array(self) -> np.ndarray:
        return np.frombuffer(self.rows, ROW)


def batch_bytes(count: int, records_bytes: int) -> int:
    """The length of a batch of so many rows and record bytes."""
    return (BATCH_HEADER_BYTES + count * ROW_BYTES + records_bytes + ALIGNMENT - 1) & -ALIGNMENT


def records_position(count: int) -> int:
    """Where the first record stands, from the start of the batch."""
    return BATCH_HEADER_BYTES + count * ROW_BYTES


def header(kind: int, offset: int, at_ms: int, durable: int, count: int, body: bytes) -> bytes:
    """The header in front of `body`, which is everything behind it."""
    head = BATCH_HEAD.pack(MAGIC, kind, VERSION, 0, BATCH_HEADER_BYTES + len(body), count, offset, at_ms, durable)
    return head + CHECKSUM.pack(_checksum(head, body))


def written_at_ms(head: bytes) -> int:
    """The instant in a header that was found to be one before."""
    return int(BATCH_HEAD.unpack_from(head)[7])


def _checksum(head: bytes, body: bytes) -> int:
    return xxh3_64_intdigest(body, xxh3_64_intdigest(head))


class Found(NamedTuple):
    """What stands at a place where a batch should begin: a batch, or the reason why it is none."""

    batch: Batch | None
    problem: str


def parse(view: View, position: int, offset: int) -> Found:
    """Reads the batch at a position of a segment's view, which should be the one at this offset of the log.

    Never raises for what the bytes say: damage and the end of the log look alike from here, and the log tells them
    apart.
    """
    data = view[position : position + BATCH_HEADER_BYTES]
    if len(data) < BATCH_HEADER_BYTES:
        return Found(None, f"only {len(data)} bytes are left, a batch header has {BATCH_HEADER_BYTES}")
    magic, kind, version, _, length, count, own_offset, at_ms, durable = BATCH_HEAD.unpack_from(data)
    problem = _header_problem(magic, kind, version, length, count, own_offset, offset)
    if problem:
        return Found(None, problem)
    body = view[position + BATCH_HEADER_BYTES : position + length]
    if len(body) != length - BATCH_HEADER_BYTES:
        return Found(
            None, f"the batch has {length} bytes, only {BATCH_HEADER_BYTES + len(body)} are left in its segment"
        )
    (checksum,) = CHECKSUM.unpack_from(data, BATCH_HEAD.size)
    if checksum != _checksum(data[: BATCH_HEAD.size], body):
        return Found(None, f"the checksum of the batch of {length} bytes does not match")
    return Found(Batch(offset, offset + length, at_ms, durable, count, body[: count * ROW_BYTES], kind), "")


def _header_problem(magic: int, kind: int, version: int, length: int, count: int, own_offset: int, offset: int) -> str:
    if magic == 0 and kind == 0 and length == 0:
        return "nothing is written here"
    if magic != MAGIC:
        return f"the magic is {magic:#010x}, expected {MAGIC:#010x}"
    if version != VERSION:
        return f"the batch has version {version}, this program knows {VERSION}"
    if own_offset != offset:
        return f"the batch says it stands at {own_offset}"
    if kind not in (KIND_BATCH, KIND_FILLER) or length % ALIGNMENT or length < records_position(count):
        return f"kind {kind}, length {length} and count {count} do not fit"
    return ""

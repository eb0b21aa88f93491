"""A batch: the unit of the log, there wholly or not at all.

    0        4     5     6        8         12       16        24       32         40          48
    +--------+-----+-----+--------+---------+--------+---------+--------+----------+-----------+
    | magic  |kind |ver. | 0      | length  | count  | offset  | at_ms  | durable  | checksum  |
    +--------+-----+-----+--------+---------+--------+---------+--------+----------+-----------+
    | count rows of 48 bytes (ROW)                                                             |
    | the records, one after the other, in RocketMQ's layout (record.py)                       |
    | zeros up to a multiple of 8                                                              |
    +------------------------------------------------------------------------------------------+

All little-endian (the records inside are big-endian, as RocketMQ wants them). `length` counts the whole batch,
`offset` is its own place in the log, so that bytes left by an earlier life of the file are never taken for a batch;
`durable` is the position that was known to be on disk when the batch was written: an open that finds damage below it
knows that an acknowledged message is hurt. The checksum (xxh3, 64 bits) covers everything but itself.

A filler (kind 2) has no rows, takes the rest of its segment and is zeros after its header.

The rows say all that the fold needs, so that neither the live path nor a replay parses a property twice.

A batch is made here from prepared messages and read here from the bytes of a segment. Making it is the hot path of
sending.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from postdate.errors import UsageError
from postdate.message import Host, Message, check_message
from postdate.storage import record as records
from postdate.storage.disk import View
from postdate.storage.layout import BATCH_HEAD, BATCH_HEADER_BYTES, CHECKSUM, ROW, ROW_BYTES, ROW_STRUCT

MAGIC = 0x31424450  # "PDB1"
VERSION = 1
KIND_BATCH, KIND_FILLER = 1, 2

ALIGNMENT = 8

# What a record is (column `kind` of ROW).
MESSAGE, CANCEL, STAGE, RESCUE, TOPIC, GROUP, OFFSETS, SETTINGS, PIPELINE, POP, ACK, INVISIBLE, JOB, MOVE = range(1, 15)
HALF, COMMIT, TRANSACTION = range(15, 18)
VALUE = 18
KIND_NAMES = {
    MESSAGE: "message", CANCEL: "cancel", STAGE: "stage", RESCUE: "rescue", TOPIC: "topic", GROUP: "group",
    OFFSETS: "offsets", SETTINGS: "settings", PIPELINE: "pipeline", POP: "pop", ACK: "ack", INVISIBLE: "invisible",
    JOB: "job", MOVE: "move", HALF: "half", COMMIT: "commit", TRANSACTION: "transaction",
    VALUE: "value",
}  # fmt: skip

# Kinds whose record is a message that may come into a queue. A move's counts only if its message waited, a commit's
# only if its half was open.
MESSAGES = (MESSAGE, MOVE, COMMIT)
PRODUCED = (*MESSAGES, HALF)  # kinds whose record is what a producer sent

MORE_KEYS = 1  # a bit of `flags`: KEYS has more keys than the first; those stand in the record only


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
    """The length of a batch of `count` rows and this many bytes of records."""
    return (BATCH_HEADER_BYTES + count * ROW_BYTES + records_bytes + ALIGNMENT - 1) & -ALIGNMENT


def records_position(count: int) -> int:
    """Where the first record stands, from the start of the batch."""
    return BATCH_HEADER_BYTES + count * ROW_BYTES


def header(kind: int, offset: int, at_ms: int, durable: int, count: int, body: bytes) -> bytes:
    """The header of a batch; `body` is everything after it."""
    head = BATCH_HEAD.pack(MAGIC, kind, VERSION, 0, BATCH_HEADER_BYTES + len(body), count, offset, at_ms, durable)
    return head + CHECKSUM.pack(_checksum(head, body))


def written_at_ms(head: bytes) -> int:
    """The instant in a header that was checked before."""
    return int(BATCH_HEAD.unpack_from(head)[7])


def checksum_at(head: bytes, offset: int) -> int | None:
    """The checksum in a header; None where this is not the header of a batch at that offset of the log."""
    if len(head) < BATCH_HEADER_BYTES:
        return None
    magic, _, _, _, _, _, own_offset, _, _ = BATCH_HEAD.unpack_from(head)
    return int(CHECKSUM.unpack_from(head, BATCH_HEAD.size)[0]) if (magic, own_offset) == (MAGIC, offset) else None


def _checksum(head: bytes, body: bytes) -> int:
    return xxh3_64_intdigest(body, xxh3_64_intdigest(head))


class Found(NamedTuple):
    """The batch at a place, or the reason why none begins there."""

    batch: Batch | None
    problem: str


def parse(view: View, position: int, offset: int) -> Found:
    """Reads the batch at a position of a segment's view, which should be the one at this offset of the log.

    Never raises because of the bytes: damage and the end of the log look alike here, and the log tells them apart.
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


# -- making a batch ---------------------------------------------------------------------------------------------

SYSTEM_TOPIC_PREFIX = "postdate_sys_"


class Prepared(NamedTuple):
    """A message that may be written, with all that its row and its record need. A named tuple, because packing unpacks
    it whole: reading thirteen attributes costs four times as much.
    """

    message: Message
    shape: records.Shape
    size: int  # of the record
    level: int
    queue: int  # number
    due_at_ms: int  # 0 = at once
    unique_hash: int
    first_hash: int  # of the first of its user keys
    tag_hash: int
    unique_key: str | None
    flags: int
    once: str  # topic and id of a message that is stored once (keys.once_name), else empty
    once_hash: int


class Packed(NamedTuple):
    """The body of a batch, and the offset of each record in the log."""

    body: bytes
    offsets: list[int]


class _Parts(NamedTuple):
    """The messages of a batch, not put together yet."""

    rows: list[bytes]
    records: list[bytes]
    offsets: list[int]
    end: int  # position after the last record


class Packer:
    """Makes the bodies of batches: the length first, the bytes when the place in the log is known.

    A batch holds messages, one record of a system topic, or messages and a system record after them.
    """

    def __init__(self, batch_bytes_max: int, store_host: Host) -> None:
        self._batch_bytes_max, self._store_host = batch_bytes_max, store_host

    def length_of(self, prepared: list[Prepared]) -> int:
        """The length of a batch of messages. Raises UsageError where it is too long."""
        return self._check_length(batch_bytes(len(prepared), sum([entry.size for entry in prepared])))

    def _check_length(self, length: int) -> int:
        if length > self._batch_bytes_max:
            raise UsageError(f"the batch would have {length} bytes, batch_bytes_max is {self._batch_bytes_max}")
        return length

    def pack(self, prepared: list[Prepared], start: int, at_ms: int, kind: int = MESSAGE) -> Packed:
        """The body of a batch of messages that stands at `start`. Raises IllegalMessage for a number that does not fit
        its field: packing finds that without a check of its own.
        """
        position = records_position(len(prepared))
        try:
            rows, bodies, offsets, end = self._rows_and_records(prepared, start, position, at_ms, kind)
        except struct.error:
            for entry in prepared:
                check_message(entry.message, len(entry.message.body))  # its size was checked when it was prepared
            raise
        rows += bodies
        if end % ALIGNMENT:
            rows.append(bytes(-end % ALIGNMENT))
        return Packed(b"".join(rows), offsets)

    def _rows_and_records(
        self, prepared: list[Prepared], start: int, position: int, at_ms: int, kind: int = MESSAGE
    ) -> _Parts:
        rows, bodies, offsets = [], [], []
        pack_row, encode, store_host = ROW_STRUCT.pack, records.encode_shaped, self._store_host
        for message, shape, size, level, queue, due_at_ms, unique_hash, first_hash, tag, _, flags, _, once in prepared:
            rows.append(
                pack_row(kind, level, flags, queue, due_at_ms, unique_hash, first_hash, tag, size, position, once)
            )
            offset = start + position
            bodies.append(encode(message, shape, offset, at_ms, store_host))
            offsets.append(offset)
            position += size
        return _Parts(rows, bodies, offsets, position)

    def system_length_of(self, kind: int, body: bytes) -> int:
        """The length of a batch with one record of a system topic. Raises UsageError where it is too long."""
        return self._check_length(batch_bytes(1, self._system_size(kind, body)))

    def pack_system(self, kind: int, body: bytes, start: int, at_ms: int) -> Packed:
        """The body of a batch with one record of a system topic."""
        position = records_position(1)
        row, record = self._system_parts(kind, body, start, position, at_ms)
        return Packed(row + record + bytes(-(position + len(record)) % ALIGNMENT), [start + position])

    def mixed_length_of(self, prepared: list[Prepared], kind: int, body: bytes) -> int:
        """The length of a batch of messages and a system record. Raises UsageError where it is too long."""
        size = sum([entry.size for entry in prepared]) + self._system_size(kind, body)
        return self._check_length(batch_bytes(len(prepared) + 1, size))

    def pack_mixed(self, prepared: list[Prepared], kind: int, body: bytes, start: int, at_ms: int) -> Packed:
        """The body of a batch of messages and a system record, which count together or not at all."""
        messages = self._rows_and_records(prepared, start, records_position(len(prepared) + 1), at_ms)
        row, record = self._system_parts(kind, body, start, messages.end, at_ms)
        padding = bytes(-(messages.end + len(record)) % ALIGNMENT)
        return Packed(b"".join([*messages.rows, row, *messages.records, record, padding]), messages.offsets)

    def _system_size(self, kind: int, body: bytes) -> int:
        return records.record_bytes(Message("", body), _system_topic(kind), self._store_host)

    def _system_parts(self, kind: int, body: bytes, start: int, position: int, at_ms: int) -> tuple[bytes, bytes]:
        """Row and record of a system topic."""
        message = Message("", body, born_at_ms=at_ms)
        record = records.encode(message, _system_topic(kind), start + position, at_ms, self._store_host)
        return ROW_STRUCT.pack(kind, 0, 0, -1, 0, 0, 0, 0, len(record), position, 0), record


def system_body(values: Mapping[str, Any]) -> bytes:
    """The body of a system record: JSON without spaces."""
    return json.dumps(values, separators=(",", ":")).encode()


def _system_topic(kind: int) -> bytes:
    return (SYSTEM_TOPIC_PREFIX + KIND_NAMES[kind]).encode()

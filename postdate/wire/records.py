"""Records as the answer to a pull carries them: one after the other, as they are in the log.

This is the consumer's side. It trusts nothing: the bytes come from a peer.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from postdate.errors import CorruptLog, ProtocolError
from postdate.message import PROPERTIES_BYTES_MAX
from postdate.storage.record import (
    CRC_MASK,
    HEAD_BYTES,
    HOSTS_V6,
    MAGIC_V1,
    RECORD_BYTES_MIN,
    Record,
    decode,
    head_bytes_of,
)

# Those who read answers need not know the log.
__all__ = ["Columns", "Pieces", "Record", "decode_records", "join_pieces", "split_records"]

# A record of which only what every consumer needs is read: queue offset, sys flag, body, and the bytes before and after
# the body. A plain tuple, because there is one for every message.
Pieces = tuple[int, int, bytes, bytes, bytes]


class Columns(NamedTuple):
    """The pieces of many records, by columns: lists of plain values, which cost less to keep than a tuple for each."""

    queue_offsets: list[int]
    sys_flags: list[int]
    bodies: list[bytes]
    heads: list[bytes]
    tails: list[bytes]

    @classmethod
    def of(cls, records: Iterable[Pieces]) -> "Columns":
        columns = cls([], [], [], [], [])
        for queue_offset, sys_flag, body, head, tail in records:
            columns.queue_offsets.append(queue_offset)
            columns.sys_flags.append(sys_flag)
            columns.bodies.append(body)
            columns.heads.append(head)
            columns.tails.append(tail)
        return columns


_SIZE = Struct(">i")
# Of the head of a record with two IPv4 hosts: size, magic, crc, queue offset, sys flag, bytes of the body.
_HEAD = Struct(">iII8xq8xi44xi")
assert _HEAD.size == HEAD_BYTES


def split_records(data: bytes) -> Columns:
    """Returns the records of an answer, checked as `decode_records` checks them and read no further, at half its price.

    Raises ProtocolError that says where reading failed.
    """
    found = Columns([], [], [], [], [])
    add_offset, add_flag, add_body = found.queue_offsets.append, found.sys_flags.append, found.bodies.append
    add_head, add_tail = found.heads.append, found.tails.append
    known_topic = b""  # the last one checked, with its length: mostly they are all the same
    position, end = 0, len(data)
    unpack, head_bytes = _HEAD.unpack_from, HEAD_BYTES
    while end - position >= RECORD_BYTES_MIN:
        size, magic, crc, queue_offset, sys_flag, body_bytes = unpack(data, position)
        start, stop = position + head_bytes, position + size
        body_end = start + body_bytes
        # Here and below: an unusual record is left to `decode`, which reads all kinds and says what is wrong.
        if magic != MAGIC_V1 or sys_flag & HOSTS_V6 or not start <= body_end < stop - 2 or stop > end:
            break
        topic_end = body_end + 1 + data[body_end]
        properties_bytes = stop - topic_end - 2
        if not 0 <= properties_bytes <= PROPERTIES_BYTES_MAX:
            break
        body, topic = data[start:body_end], data[body_end:topic_end]
        if data[topic_end] << 8 | data[topic_end + 1] != properties_bytes or crc32(body) & CRC_MASK != crc:
            break
        if topic != known_topic:
            if not topic.isascii():
                break
            known_topic = topic
        add_offset(queue_offset)
        add_flag(sys_flag)
        add_body(body)
        add_head(data[position:start])
        add_tail(data[body_end:stop])
        position = stop
    if position == end:
        return found
    return Columns.of(
        (record.queue_offset, record.sys_flag, record.body, each[:start], each[start + len(record.body) :])
        for each, record in _decode_each(data)
        for start in (head_bytes_of(each),)
    )


def join_pieces(pieces: Pieces) -> Record:
    _, _, body, head, tail = pieces
    return decode(head + body + tail)


def decode_records(data: bytes) -> list[Record]:
    """Returns the records of an answer. Raises ProtocolError that says where reading failed."""
    return [record for _, record in _decode_each(data)]


def _decode_each(data: bytes) -> Iterator[tuple[bytes, Record]]:
    position = 0
    while position < len(data):
        left = len(data) - position
        size = _SIZE.unpack_from(data, position)[0] if left >= _SIZE.size else 0
        if not RECORD_BYTES_MIN <= size <= left:
            raise ProtocolError(f"a record at byte {position} has a size of {size} bytes, {left} are left")
        record = data[position : position + size]
        try:
            yield record, decode(record)
        except CorruptLog as error:
            raise ProtocolError(f"a record at byte {position} cannot be read: {error}") from error
        position += size

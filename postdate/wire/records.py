"""Records as an answer to a pull carries them: one behind the other, each in the layout of `postdate/log/record.py`.

This is the consumer's side. It reads the fields that a consumer needs and trusts nothing: the bytes come from a peer.
"""

from struct import Struct
from struct import error as StructError  # noqa: N812  it is a class
from typing import NamedTuple
from zlib import crc32

from postdate.errors import ProtocolError
from postdate.message import Host

_MAGIC_V1, _MAGIC_V2 = 0xDAA320A7, 0xDAA320AB
_BORN_HOST_V6, _STORE_HOST_V6 = 16, 32
_CRC_MASK = 0x7FFFFFFF

# size, magic, crc, queue id, flag, queue offset, offset, sys flag, born at
_UP_TO_BORN_AT = Struct(">iIIiiqqiq")
_INT8, _INT16, _INT32 = Struct(">b"), Struct(">h"), Struct(">i")
# stored at, store host, times reconsumed, prepared offset; by the bytes of the store host's address
_FROM_STORED_AT = {size: Struct(f">q{size}siiq") for size in (4, 16)}


class Record(NamedTuple):
    """What a consumer needs of a record."""

    queue_id: int
    queue_offset: int
    offset: int
    sys_flag: int
    born_at_ms: int
    stored_at_ms: int
    store_host: Host
    reconsume_times: int
    body: bytes
    topic: str
    properties: bytes


def decode_records(data: bytes) -> list[Record]:
    """The records of an answer. Raises ProtocolError that says where reading failed."""
    records: list[Record] = []
    position = 0
    while position < len(data):
        try:
            record, end = _record(data, position)
        except (StructError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a record at byte {position} of {len(data)} that cannot be read: {error}") from error
        records.append(record)
        position = end
    return records


def _record(data: bytes, start: int) -> tuple[Record, int]:
    size, magic, crc, queue_id, _, queue_offset, offset, sys_flag, born_at_ms = _UP_TO_BORN_AT.unpack_from(data, start)
    if magic not in (_MAGIC_V1, _MAGIC_V2):
        raise ProtocolError(f"a record at byte {start} has magic 0x{magic:08X}, expected 0x{_MAGIC_V1:08X}")
    born_host_bytes = (16 if sys_flag & _BORN_HOST_V6 else 4) + _INT32.size
    rest = _FROM_STORED_AT[16 if sys_flag & _STORE_HOST_V6 else 4]
    position = start + _UP_TO_BORN_AT.size + born_host_bytes
    stored_at_ms, address, port, reconsume_times, _ = rest.unpack_from(data, position)
    body, position = _part(data, position + rest.size, _INT32)
    topic, position = _part(data, position, _INT8 if magic == _MAGIC_V1 else _INT16)
    properties, end = _part(data, position, _INT16)
    if end - start != size:
        raise ProtocolError(f"a record at byte {start} says that it has {size} bytes, its parts have {end - start}")
    if crc32(body) & _CRC_MASK != crc:
        raise ProtocolError(f"a record at byte {start} has a body of {len(body)} bytes that its crc does not match")
    record = Record(
        queue_id, queue_offset, offset, sys_flag, born_at_ms, stored_at_ms, Host(address, port), reconsume_times, body,
        topic.decode(), properties,
    )  # fmt: skip
    return record, end


def _part(data: bytes, position: int, length: Struct) -> tuple[bytes, int]:
    """The bytes behind their length, and where they end."""
    (part_bytes,) = length.unpack_from(data, position)
    start = position + length.size
    end = start + part_bytes
    if part_bytes < 0 or end > len(data):
        raise ProtocolError(f"a part of a record has {part_bytes} bytes at {start}, {len(data) - start} are left")
    return data[start:end], end

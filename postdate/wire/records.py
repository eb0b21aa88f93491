"""Records as an answer to a pull carries them: one behind the other, as the log has them.

This is the consumer's side. It trusts nothing: the bytes come from a peer.
"""

from struct import Struct

from postdate.errors import CorruptLog, ProtocolError
from postdate.log.record import RECORD_BYTES_MIN, Record, decode

__all__ = ["Record", "decode_records"]  # whoever reads answers need not know the log

_SIZE = Struct(">i")


def decode_records(data: bytes) -> list[Record]:
    """The records of an answer. Raises ProtocolError that says where reading failed."""
    records: list[Record] = []
    position = 0
    while position < len(data):
        left = len(data) - position
        size = _SIZE.unpack_from(data, position)[0] if left >= _SIZE.size else 0
        if not RECORD_BYTES_MIN <= size <= left:
            raise ProtocolError(f"a record at byte {position} says that it has {size} bytes, {left} are left")
        try:
            records.append(decode(data[position : position + size]))
        except CorruptLog as error:
            raise ProtocolError(f"a record at byte {position} cannot be read: {error}") from error
        position += size
    return records

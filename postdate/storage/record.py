"""A record: the bytes of one message as RocketMQ stores them and as its clients read them.

```
  0        4        8        12       16       20               28               36       40               48
  +--------+--------+--------+--------+--------+----------------+----------------+--------+----------------+
  | size   | magic  | body   | queue  | flag   | queue offset   | offset         | sys    | born at ms     |
  |        |        | crc    | id     |        |                |                | flag   |                |
  +--------+--------+--------+--------+--------+----------------+----------------+--------+----------------+
  48               56               64               72       76               84       88
  +----------------+----------------+----------------+--------+----------------+--------+------ - - ------+
  | born host      | stored at ms   | store host     | recon- | prepared       | body   | body            |
  | address, port  |                | address, port  | sumed  | offset         | bytes  |                 |
  +----------------+----------------+----------------+--------+----------------+--------+------ - - ------+
  +--------+------ - - ------+--------+------ - - ------+
  | topic  | topic           | prop.  | properties      |
  | bytes  |                 | bytes  |                 |
  +--------+------ - - ------+--------+------ - - ------+
```

Numbers are big-endian and signed, magic and crc apart. The positions hold for two IPv4 hosts; a host with an IPv6
address has 12 bytes more and its bit in the sys flag. Topic bytes is an int8 in version 1 and an int16 in version 2,
which is for topics above 127 bytes; the magic tells the version. Prop. bytes is an int16. The smallest record has 91
bytes.

The crc covers the body alone; the checksum of its batch covers the whole record. Queue offset and stored at, and for
chunks the offset, are known for good only when the message becomes visible: `deliver` fills them in for the consumer.
This module computes; it reads and writes no file.
"""

import re
from collections.abc import Iterable, Mapping
from struct import Struct, calcsize
from typing import NamedTuple
from zlib import crc32

from postdate.errors import CorruptLog, IllegalMessage, UsageError
from postdate.message import (
    DELAY_PROPERTIES,
    PROPERTY_KEYS,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_UNIQ_KEY,
    SYS_HALF,
    TRIES_MAX,
    Host,
    Message,
    decode_properties,
    first_key,
)

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB

TOPIC_BYTES_MAX_V1 = 127

BORN_HOST_V6 = 16
STORE_HOST_V6 = 32
HOSTS_V6 = BORN_HOST_V6 | STORE_HOST_V6
# RocketMQ keeps a crc in a signed int32 and drops the bit that would make it negative.
CRC_MASK = 0x7FFFFFFF

_INT8 = Struct(">b")
_PROPERTY_END = b"\x02"
_DELIVER_MS = PROPERTY_TIMER_DELIVER_MS.encode() + b"\x01"
_OTHER_DELAYS = [name.encode() + b"\x01" for name in sorted(DELAY_PROPERTIES - {PROPERTY_TIMER_DELIVER_MS})]
_DELAY_ENTRY = re.compile(  # an entry that names a delay, with its end
    rb"(?:^|(?<=\x02))(?:" + b"|".join(sorted(name.encode() for name in DELAY_PROPERTIES)) + rb")\x01[^\x02]*(?:\x02|$)"
)
_INT16 = Struct(">h")
_INT32 = Struct(">i")
_INT64 = Struct(">q")
_OFFSETS_STRUCT = Struct(">qq")
_SIZE_AND_MAGIC = Struct(">iI")
_NEW = tuple.__new__

# size, magic, crc, queue id, flag | queue offset, offset | sys flag, born at, born host | stored at | the rest
_UP_TO_QUEUE_OFFSET = "iIIii"
_OFFSETS = "qq"
_SYS_FLAG_TO_BORN_HOST = "iq{born}si"
_STORED_AT = "q"
_FROM_STORE_HOST = "{store}siiqi"

MAGIC_POSITION = calcsize(">i")
QUEUE_ID = slice(calcsize(">iII"), calcsize(">iIIi"))
QUEUE_OFFSET_POSITION = calcsize(">" + _UP_TO_QUEUE_OFFSET)
_SYS_FLAG_POSITION = calcsize(">" + _UP_TO_QUEUE_OFFSET + _OFFSETS)
# The bits that tell the hosts' kinds are in the last byte of the big-endian sys flag; the version's
# in that of the magic.
HOST_BITS_POSITION = _SYS_FLAG_POSITION + 3
_VERSION_POSITION = MAGIC_POSITION + 3
_VERSION_2 = MAGIC_V2 & 0xFF


class _Layout(NamedTuple):
    """The places that depend on the hosts' kinds; one for each of the four values of the two bits."""

    host_bits: int
    head: Struct  # everything before the body
    stored_at_position: int
    stored: Struct  # stored at, store host
    reconsume_times_position: int
    store_address_bytes: int


def _layout(born: int, store: int) -> _Layout:
    before_stored_at = _UP_TO_QUEUE_OFFSET + _OFFSETS + _SYS_FLAG_TO_BORN_HOST.format(born=born)
    return _Layout(
        host_bits=(BORN_HOST_V6 if born == 16 else 0) | (STORE_HOST_V6 if store == 16 else 0),
        head=Struct(">" + before_stored_at + _STORED_AT + _FROM_STORE_HOST.format(store=store)),
        stored_at_position=calcsize(">" + before_stored_at),
        stored=Struct(f">{_STORED_AT}{store}si"),
        reconsume_times_position=calcsize(f">{before_stored_at}{_STORED_AT}{store}si"),
        store_address_bytes=store,
    )


_BY_ADDRESS_BYTES = {(born, store): _layout(born, store) for born in (4, 16) for store in (4, 16)}
_BY_HOST_BITS = {layout.host_bits: layout for layout in _BY_ADDRESS_BYTES.values()}

HEAD_BYTES = _BY_HOST_BITS[0].head.size  # everything before the body, with two IPv4 hosts; its length comes last
HOST_V6_MORE_BYTES = _BY_HOST_BITS[BORN_HOST_V6].head.size - HEAD_BYTES
STORED_AT_POSITION = _BY_HOST_BITS[0].stored_at_position  # likewise
RECORD_BYTES_MIN = HEAD_BYTES + _INT8.size + _INT16.size


class Record(NamedTuple):
    """Every field of a record, in the order of the bytes. The magic only tells how the topic's length is written."""

    size: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    offset: int
    sys_flag: int
    born_at_ms: int
    born_host: Host
    stored_at_ms: int
    store_host: Host
    reconsume_times: int
    prepared_offset: int
    body: bytes
    topic: str
    properties: bytes


def record_bytes(message: Message, topic: bytes, store_host: Host) -> int:
    """Return how many bytes `encode` would give. Raises UsageError for a host whose address has not 4 or 16 bytes."""
    return shape(message.born_host, store_host, topic).fixed_bytes + len(message.body) + len(message.properties)


def encode(message: Message, topic: bytes, offset: int, stored_at_ms: int, store_host: Host) -> bytes:
    """Return the record of a message that has passed `check_message`; once per send.

    `topic` is the message's topic in UTF-8: the caller keeps it, so that it is not encoded for every message. The host
    bits of the sys flag tell the hosts as they are, not as the producer said. The queue offset is 0 until delivery.

    Raises UsageError for a host whose address has not 4 or 16 bytes.
    """
    return encode_shaped(message, shape(message.born_host, store_host, topic), offset, stored_at_ms, store_host)


class Shape(NamedTuple):
    """What the records of one topic have in common while the kinds of the hosts stay the same."""

    layout: _Layout
    magic: int
    topic: bytes  # with its length in front
    fixed_bytes: int  # the size of a record without body and properties


def shape(born_host: Host, store_host: Host, topic: bytes) -> Shape:
    """Raises UsageError for a host whose address has not 4 or 16 bytes."""
    try:
        layout = _BY_ADDRESS_BYTES[len(born_host.address), len(store_host.address)]
    except KeyError:
        raise UsageError(f"addresses of {born_host} and {store_host}, expected 4 or 16 bytes each") from None
    magic, length = (MAGIC_V1, _INT8) if len(topic) <= TOPIC_BYTES_MAX_V1 else (MAGIC_V2, _INT16)
    fixed_bytes = layout.head.size + length.size + len(topic) + _INT16.size
    return Shape(layout, magic, length.pack(len(topic)) + topic, fixed_bytes)


def encode_shaped(message: Message, known: Shape, offset: int, stored_at_ms: int, store_host: Host) -> bytes:
    """As `encode`, for a caller who keeps the shape: the hot path of sending."""
    # Unpacked once: reading ten attributes costs as much as packing them.
    _, body, properties, queue_id, flag, sys_flag, born_at_ms, born_host, reconsume_times, prepared_offset = message
    layout, magic, topic, fixed_bytes = known
    born_address, born_port = born_host
    store_address, store_port = store_host
    head = layout.head.pack(
        fixed_bytes + len(body) + len(properties), magic, crc32(body) & CRC_MASK, queue_id, flag, 0, offset,
        sys_flag & ~HOSTS_V6 | layout.host_bits, born_at_ms, born_address, born_port, stored_at_ms, store_address,
        store_port, reconsume_times, prepared_offset, len(body),
    )  # fmt: skip
    return b"".join((head, body, topic, _INT16.pack(len(properties)), properties))


def decode(data: bytes) -> Record:
    """Read one whole record and check it; for every message of a pull. Raises CorruptLog, and nothing else, naming what
    is wrong with the bytes.

    Properties are left encoded, as in `Message`: they are the producer's, and judged by `decode_properties`.
    """
    magic = _check_frame(data)
    head = _BY_HOST_BITS[data[HOST_BITS_POSITION] & HOSTS_V6].head
    topic_length = _INT8 if magic == MAGIC_V1 else _INT16
    body_end, topic_end = _ends(data, head.size, topic_length)
    (
        size, _, body_crc, queue_id, flag, queue_offset, offset, sys_flag, born_at_ms, born_address, born_port,
        stored_at_ms, store_address, store_port, reconsume_times, prepared_offset, _,
    ) = head.unpack_from(data)  # fmt: skip
    body = data[head.size : body_end]
    if crc32(body) & CRC_MASK != body_crc:
        raise CorruptLog(f"body has crc 0x{crc32(body) & CRC_MASK:08X}, the record says 0x{body_crc:08X}")
    # In the order of the fields, and past the constructors, which cost as much as all that is above.
    return _NEW(
        Record,
        (
            size, body_crc, queue_id, flag, queue_offset, offset, sys_flag, born_at_ms,
            _NEW(Host, (born_address, born_port)), stored_at_ms, _NEW(Host, (store_address, store_port)),
            reconsume_times, prepared_offset, body, _checked_topic(data[body_end + topic_length.size : topic_end]),
            data[topic_end + _INT16.size :],
        ),
    )  # fmt: skip


def _ends(data: bytes, head_bytes: int, topic_length: Struct) -> tuple[int, int]:
    """Where body and topic end, if all parts together are exactly the record."""
    if len(data) >= head_bytes:
        body_end: int = head_bytes + _INT32.unpack_from(data, head_bytes - _INT32.size)[0]
        if head_bytes <= body_end <= len(data) - topic_length.size:
            topic_start = body_end + topic_length.size
            topic_end: int = topic_start + topic_length.unpack_from(data, body_end)[0]
            if topic_start <= topic_end <= len(data) - _INT16.size:
                properties_bytes = _INT16.unpack_from(data, topic_end)[0]
                if topic_end + _INT16.size + properties_bytes == len(data):
                    return body_end, topic_end
    raise CorruptLog(_wrong_part(data, head_bytes, topic_length))


def _wrong_part(data: bytes, head_bytes: int, topic_length: Struct) -> str:
    """Which of the parts does not fit; part by part, for a record of which one does not."""
    position = head_bytes - _INT32.size
    for name, length in (("body", _INT32), ("topic", topic_length), ("properties", _INT16)):
        start = position + length.size
        if start > len(data):
            return f"record of {len(data)} bytes ends before the length of {name} at {position}"
        (part_bytes,) = length.unpack_from(data, position)
        if not 0 <= part_bytes <= len(data) - start:
            return f"record says {part_bytes} bytes of {name}, {len(data) - start} are left"
        position = start + part_bytes
    return f"record of {len(data)} bytes, but its parts end at {position}"


def _check_frame(data: bytes) -> int:
    """Check what is the same in every record, the length and the magic, and return the magic."""
    if len(data) < RECORD_BYTES_MIN:
        raise CorruptLog(f"record of {len(data)} bytes, the smallest has {RECORD_BYTES_MIN}")
    size, magic = _SIZE_AND_MAGIC.unpack_from(data)
    if size != len(data):
        raise CorruptLog(f"record of {len(data)} bytes says that its size is {size}")
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise CorruptLog(f"record has magic 0x{magic:08X}, expected 0x{MAGIC_V1:08X} or 0x{MAGIC_V2:08X}")
    return int(magic)


def _checked_topic(topic: bytes) -> str:
    try:
        return topic.decode()
    except UnicodeDecodeError as cause:
        raise CorruptLog(f"topic is not UTF-8: {cause.reason} at byte {cause.start}") from cause


# Those below trust the record: its batch has passed the checksum. Of other bytes they promise nothing.


def deliver(body: bytearray, places: Iterable[tuple[int, int, int, int]], store_host: Host | None = None) -> None:
    """Fill in what is known only when messages are delivered, in the records of `body`; for every message of a pull.

    For each: its position in the body, its place in the queue, the offset where the consumer may ask for it again, and
    when it became visible. `store_host` is where the broker is now; a record that has no room for it keeps its own.
    """
    # Nearly all have one layout, an IPv4 producer's: it is looked up once.
    usual = _BY_ADDRESS_BYTES[4, len(store_host.address)] if store_host else None
    address, port = store_host or Host(b"", 0)
    pack_offsets, offsets_at, bits_at = _OFFSETS_STRUCT.pack_into, QUEUE_OFFSET_POSITION, HOST_BITS_POSITION
    usual_bits, pack_usual, usual_at = (
        (usual.host_bits, usual.stored.pack_into, usual.stored_at_position) if usual else (-1, _INT64.pack_into, 0)
    )
    for position, queue_offset, offset, stored_at_ms in places:
        pack_offsets(body, position + offsets_at, queue_offset, offset)
        bits = body[position + bits_at] & HOSTS_V6
        if bits == usual_bits:
            pack_usual(body, position + usual_at, stored_at_ms, address, port)
        else:
            layout = _BY_HOST_BITS[bits]
            at = position + layout.stored_at_position
            if store_host is not None and len(store_host.address) == layout.store_address_bytes:
                layout.stored.pack_into(body, at, stored_at_ms, *store_host)
            else:
                _INT64.pack_into(body, at, stored_at_ms)


def moved(record: bytes, queue_id: int) -> bytes:
    """Return a record as it shows in another queue than it was sent to, because that one is gone."""
    return record[: QUEUE_ID.start] + _INT32.pack(queue_id) + record[QUEUE_ID.stop :]


def reconsume_times_of(record: bytes) -> int:
    """Return how often a message was tried before it was stored, as a record says."""
    at = _BY_HOST_BITS[record[HOST_BITS_POSITION] & HOSTS_V6].reconsume_times_position
    return _sane_tries(_INT32.unpack_from(record, at)[0])


def prepared_offset_of(record: bytes) -> int:
    """Return where the half of a committed message stands in the log, as its record says."""
    at = _BY_HOST_BITS[record[HOST_BITS_POSITION] & HOSTS_V6].reconsume_times_position + _INT32.size
    return int(_INT64.unpack_from(record, at)[0])


def is_half(record: bytes) -> bool:
    """Whether a record is the half of a transaction, which no consumer may see."""
    return bool(record[HOST_BITS_POSITION] & SYS_HALF)


def _sane_tries(times: int) -> int:
    """Return a number of tries as a record may hold it: earlier versions stored any that a client sent."""
    return times if 0 <= times <= TRIES_MAX else min(max(times, 0), TRIES_MAX)


def given_again(body: bytearray, position: int, times: int) -> None:
    """Add the number of earlier deliveries to the one that the record has."""
    at = position + _BY_HOST_BITS[body[position + HOST_BITS_POSITION] & HOSTS_V6].reconsume_times_position
    _INT32.pack_into(body, at, _sane_tries(_sane_tries(_INT32.unpack_from(body, at)[0]) + times))


def extended(record: bytes, properties: bytes, bytes_max: int) -> bytes:
    """Return a record with more encoded properties after its own, so that they win over properties of the same name;
    the record as it is where all of them would be longer than `bytes_max`.
    """
    _, topic_end = _topic_bounds(record)
    own = record[topic_end + _INT16.size :]
    if own and not own.endswith(_PROPERTY_END):
        own += _PROPERTY_END
    if len(own) + len(properties) > bytes_max:
        return record
    data = record[_INT32.size : topic_end] + _INT16.pack(len(own) + len(properties)) + own + properties
    return _INT32.pack(_INT32.size + len(data)) + data


def with_due(record: bytes, due_at_ms: int, bytes_max: int) -> bytes:
    """Return a record whose properties say this due, and nothing else of a delay: as if it had been sent for then; the
    record as it is where its properties would be longer than `bytes_max`. Other properties keep their bytes.
    """
    _, topic_end = _topic_bounds(record)
    start = topic_end + _INT16.size
    at = record.find(_DELIVER_MS, start) + len(_DELIVER_MS)
    value = b"%d" % due_at_ms
    if at >= start + len(_DELIVER_MS) and _is_only_delay(record, start, at, len(value)):
        return record[:at] + value + record[at + len(value) :]
    own = _DELAY_ENTRY.sub(b"", record[start:])
    if own and not own.endswith(_PROPERTY_END):
        own += _PROPERTY_END
    own += _DELIVER_MS + value + _PROPERTY_END
    if len(own) > bytes_max:
        return record
    data = record[_INT32.size : topic_end] + _INT16.pack(len(own)) + own
    return _INT32.pack(_INT32.size + len(data)) + data


def _is_only_delay(record: bytes, start: int, at: int, digits: int) -> bool:
    """Whether the value at a place, which stands behind TIMER_DELIVER_MS, has this many digits, and the properties,
    which begin at `start`, name no other delay: a quick look, which may miss such a record.
    """
    name_at, end = at - len(_DELIVER_MS), at + digits
    is_entry = (name_at == start or record[name_at - 1 : name_at] == _PROPERTY_END) and (
        record[end : end + 1] in (b"", _PROPERTY_END) and record[at:end].isdigit()
    )
    return is_entry and all(record.find(name, start) < 0 for name in _OTHER_DELAYS) and record.find(_DELIVER_MS, at) < 0


def split(body: bytes) -> list[bytes]:
    found, position = [], 0
    while position < len(body):
        (size,) = _INT32.unpack_from(body, position)
        found.append(body[position : position + size])
        position += size
    return found


def topic_of(record: bytes) -> str:
    start, end = _topic_bounds(record)
    return record[start:end].decode()


def properties_of(record: bytes) -> dict[str, str]:
    """Return a record's properties. Raises IllegalMessage if the producer's bytes are not UTF-8."""
    _, topic_end = _topic_bounds(record)
    return decode_properties(record[topic_end + _INT16.size :])


# Which messages a key names. Equal hashes are only a hint: of a record that was found by its hash, these two decide.


def is_of_key(record: bytes, topic: str, key: str, by: str) -> bool:
    """Whether a cancel of this topic and key means the record's message. `by` says which key is compared: "unique" is
    UNIQ_KEY, "key" the first of KEYS, the one that rows have a hash of.
    """
    if topic_of(record) != topic:
        return False
    try:
        properties = properties_of(record)
    except IllegalMessage:
        return False  # a producer's bytes that are no text: they have no key either
    if by == "unique":
        return properties.get(PROPERTY_UNIQ_KEY) == key
    return first_key(properties.get(PROPERTY_KEYS, "")) == key


def has_key(properties: Mapping[str, str], key: str, by: str) -> bool:
    """Whether a lookup by this key finds a message of these properties: by "unique" in UNIQ_KEY, by "key" among all of
    KEYS, by "any" in either.
    """
    is_unique = by != "key" and properties.get(PROPERTY_UNIQ_KEY) == key
    return is_unique or (by != "unique" and key in properties.get(PROPERTY_KEYS, "").split(" "))


def head_bytes_of(record: bytes) -> int:
    """Return how many bytes of a record stand before its body."""
    return _BY_HOST_BITS[record[HOST_BITS_POSITION] & HOSTS_V6].head.size


def _topic_bounds(record: bytes) -> tuple[int, int]:
    head_bytes = head_bytes_of(record)
    (body_bytes,) = _INT32.unpack_from(record, head_bytes - _INT32.size)
    length = _INT16 if record[_VERSION_POSITION] == _VERSION_2 else _INT8
    (topic_bytes,) = length.unpack_from(record, head_bytes + body_bytes)
    start = head_bytes + body_bytes + length.size
    return start, start + topic_bytes

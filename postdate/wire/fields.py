"""Header fields of HTTP/2: read with a table (HPACK, RFC 7541), judged, and written without one.

A field is one of these, by its first bits. A number that does not fit into its bits goes on in further bytes; a text is
a bit (whether it is packed by Huffman's code), its length in 7 bits, its bytes.

```
  1 index                            name and value of that entry, here and below of the static table or the peer's
  01 index, value                    name of that entry; the field becomes the newest entry
  01 000000, name, value             and so does this one
  0000 or 0001 index, value          name of that entry, or 0 and a name; no entry is made
  001 size                           no field: the peer makes its table smaller or larger; first in its block
```

Most fields of a client are the same in every request, so short literals are remembered by their bytes. The decoder of
`hpack` does not, and takes more time than all else about a request; what it does is compared with this in the tests.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from hpack import Encoder, HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from postdate.errors import ProtocolError

TABLE_BYTES = 4_096  # of the peer's table: what RFC 7541 gives to those who say nothing
_FIELD_BYTES = 32  # what RFC 7541 and RFC 9113 add to the bytes of each field
_NUMBER_BYTES_MAX = 5  # beyond the first: more than any length or index that we take needs
_REMEMBERED_BYTES_MAX = 256  # of one literal: long ones are few, and would fill the memory that is for all connections

# What a field is to the block that has it.
REGULAR = 1
METHOD, SCHEME, PATH, AUTHORITY = 2, 4, 8, 16
CONNECT = 32  # with METHOD: such a request has no scheme and no path
LENGTH = 64
MALFORMED = 128
ANY_PSEUDO = METHOD | SCHEME | PATH | AUTHORITY
_REQUEST = METHOD | SCHEME | PATH
_PSEUDO = {b":method": METHOD, b":scheme": SCHEME, b":path": PATH, b":authority": AUTHORITY}
_OF_CONNECTION = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?![ \t])[^\0\r\n]*(?<![ \t])")

Pair = tuple[bytes, bytes]
Field = tuple[Pair, int, int]  # name and value, what it is, its size


class TooManyFields(ProtocolError):
    """The peer's fault: a block whose fields take more than was announced."""


# -- reading ----------------------------------------------------------------------------------------------------


def _examine(name: bytes, value: bytes) -> Field:
    return (name, value), _kind_of(name, value), len(name) + len(value) + _FIELD_BYTES


def _kind_of(name: bytes, value: bytes) -> int:
    if not _VALUE.fullmatch(value):
        return MALFORMED
    if name[:1] == b":":
        kind = _PSEUDO.get(name, MALFORMED)
        if kind == PATH and value[:1] != b"/" and value != b"*":
            return MALFORMED
        return kind | CONNECT if kind == METHOD and value == b"CONNECT" else kind
    if not _NAME.fullmatch(name) or name in _OF_CONNECTION or (name == b"te" and value != b"trailers"):
        return MALFORMED
    if name == b"content-length":
        return LENGTH if value.isdigit() and len(value) < 20 else MALFORMED
    return REGULAR


_STATIC = tuple(_examine(*pair) for pair in HeaderTable.STATIC_TABLE)
_STATIC_COUNT = len(_STATIC)


class FieldReader:
    """The fields of one connection's blocks, which must be read all and in their order."""

    def __init__(self, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._table: list[Field] = []  # the newest last
        self._table_bytes = 0
        self._table_bytes_max = TABLE_BYTES  # as the peer wants it

    def read(self, block: bytes) -> list[Field]:
        """Returns the fields of a whole block. Raises ProtocolError; the next block cannot be read then."""
        try:
            return self._read(block)
        except (HPACKError, IndexError) as error:
            raise ProtocolError("a header block that cannot be decoded") from error

    def _read(self, block: bytes) -> list[Field]:
        fields: list[Field] = []
        position, end, room = 0, len(block), self._list_bytes_max
        while position < end:
            start = position
            first = block[position]
            position += 1
            if first >= 0x80:
                index = first & 0x7F
                if index == 0x7F:
                    index, position = _read_number(block, position, index)
                field = self._entry(index)
            elif 0x20 <= first < 0x40:
                if fields:
                    raise ProtocolError("a table's size changed between fields")
                size = first & 0x1F
                if size == 0x1F:
                    size, position = _read_number(block, position, size)
                self._resize(size)
                continue
            else:
                mask = 0x3F if first >= 0x40 else 0x0F
                index = first & mask
                if index == mask:
                    index, position = _read_number(block, position, index)
                text = position if index else _skip_text(block, position)
                position = _skip_text(block, text)
                if position > end:
                    raise ProtocolError("a header block that ends within a field")
                if index > _STATIC_COUNT:
                    field = _examine(self._entry(index)[0][0], _read_text(block, text)[0])
                else:
                    raw = block[start:position]
                    field = _recall_literal(raw) if len(raw) <= _REMEMBERED_BYTES_MAX else _read_literal(raw)
                if first >= 0x40:
                    self._keep(field)
            fields.append(field)
            room -= field[2]
            if room < 0:
                raise TooManyFields(f"header fields of more than {self._list_bytes_max} bytes")
        return fields

    def _entry(self, index: int) -> Field:
        if not index:
            raise ProtocolError("a header field with index 0")
        return _STATIC[index - 1] if index <= _STATIC_COUNT else self._table[_STATIC_COUNT - index]

    def _keep(self, field: Field) -> None:
        self._table.append(field)
        self._table_bytes += field[2]
        if self._table_bytes > self._table_bytes_max:
            self._evict()

    def _resize(self, size: int) -> None:
        if size > TABLE_BYTES:
            raise ProtocolError(f"a table of {size} bytes, at most {TABLE_BYTES}")
        self._table_bytes_max = size
        self._evict()

    def _evict(self) -> None:
        """Drops the oldest entries, all of them where even the newest is too large."""
        count = 0
        while self._table_bytes > self._table_bytes_max:
            self._table_bytes -= self._table[count][2]
            count += 1
        del self._table[:count]


def _read_literal(raw: bytes) -> Field:
    """Returns the field in a whole literal whose name, if it is an entry's, is one of the static table."""
    mask = 0x3F if raw[0] >= 0x40 else 0x0F
    index, position = raw[0] & mask, 1
    if index == mask:
        index, position = _read_number(raw, position, index)
    if index:
        name = _STATIC[index - 1][0][0]
    else:
        name, position = _read_text(raw, position)
    return _examine(name, _read_text(raw, position)[0])


# The fields of a few hundred clients; ids that never come again push each other out.
_recall_literal = lru_cache(maxsize=2_048)(_read_literal)


def _read_number(data: bytes, position: int, number: int) -> tuple[int, int]:
    """Returns a number that did not fit into the bits before, and where it ends."""
    for shift in range(0, 7 * _NUMBER_BYTES_MAX, 7):
        byte = data[position]
        position += 1
        number += (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ProtocolError("a number of too many bytes in a header block")


def _skip_text(data: bytes, position: int) -> int:
    length = data[position] & 0x7F
    if length == 0x7F:
        length, position = _read_number(data, position + 1, length)
        return position + length
    return position + 1 + length


def _read_text(data: bytes, position: int) -> tuple[bytes, int]:
    is_packed = data[position] & 0x80
    length = data[position] & 0x7F
    position += 1
    if length == 0x7F:
        length, position = _read_number(data, position, length)
    stop = position + length
    text = data[position:stop]
    return decode_huffman(text) if is_packed else text, stop


def content_length(fields: Sequence[Field]) -> int | None:
    """Returns how much content the fields of a request announce, -1 where they do not; None if they are malformed."""
    seen, length = 0, -1
    for pair, kind, _ in fields:
        if kind != REGULAR:
            if kind & ANY_PSEUDO:
                if seen & (kind & ANY_PSEUDO | REGULAR | LENGTH):  # twice, or after one that is none
                    return None
            elif kind == MALFORMED or seen & LENGTH:
                return None
            else:
                length = int(pair[1])
        seen |= kind
    wanted = METHOD if seen & CONNECT else _REQUEST
    return length if seen & _REQUEST == wanted else None


def are_trailers(fields: Sequence[Field]) -> bool:
    return not any(kind & (ANY_PSEUDO | MALFORMED) for _, kind, _ in fields)


# -- writing ----------------------------------------------------------------------------------------------------

_ENCODER = Encoder()
_ENCODER.header_table_size = 0  # so it never refers to an earlier block, and one block is good for every connection
_ENCODER.encode([])  # it says so once; a connection says it to its peer by NO_TABLE
NO_TABLE = b"\x20"  # before the first block


def encode_fields(pairs: Sequence[Pair]) -> bytes:
    """Returns a header block that is good for every connection, at any time."""
    return _ENCODER.encode(pairs, huffman=False)

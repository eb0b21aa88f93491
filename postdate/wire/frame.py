"""Frames and headers.

```
  0           4           8              8 + header
  +-----------+-----------+------ - - ---+------ - - ---+
  | length    | mark      | header       | body         |
  +-----------+-----------+------ - - ---+------ - - ---+
```

Length counts all bytes after itself. The mark's first byte says how the header is written (0 JSON, 1 binary), its other
three bytes how long it is. An answer is written as its request was, and carries the request's opaque. The binary
header:

```
  code int16 | language int8 | version int16 | opaque int32 | flag int32 | remark int32 + bytes
  | fields int32 + bytes: repeated (name int16 + bytes, value int32 + bytes)
```

Its code has 16 bits, so it cannot carry requests above 32,767.
"""

import re
from collections.abc import Mapping
from struct import Struct
from struct import error as StructError  # noqa: N812  it is a class
from typing import Any, NamedTuple

import orjson

from postdate.errors import ProtocolError
from postdate.message import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN
from postdate.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, LANGUAGE, PROTOCOL_VERSION

JSON, BINARY = 0, 1
FRAME_BYTES_MAX_DEFAULT = 16 * 1024 * 1024
LANGUAGES = ("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST",
             "NODE_JS")  # fmt: skip
LANGUAGE_OTHER = "OTHER"

Fields = dict[str, Any]
NO_FIELDS: Mapping[str, Any] = {}

_LENGTH = Struct(">i")
_LENGTH_BYTES = _LENGTH.size
HEADER_AT = 4  # in a frame without its length
_MARK = Struct(">I")  # the serialization in its first byte, the header's length in the others
MARKS = Struct(">ii")  # length and mark
_HEADER_BYTES_MAX = 0xFFFFFF
_BINARY_HEAD = Struct(">hBhiii")  # code, language, version, opaque, flag, bytes of the remark
_INT16, _INT32 = Struct(">h"), Struct(">i")
# Narrower than int(), which also takes spaces, underscores, other alphabets' digits and any length.
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")


class Command(NamedTuple):
    """A request or an answer. A field's value is text, or a bare number or flag where the peer wrote one."""

    code: int
    fields: Fields
    body: bytes = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    serialization: int = JSON
    language: str = LANGUAGE
    version: int = PROTOCOL_VERSION

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)

    def without_content(self) -> "Command":
        """Returns what is needed to answer it later, without fields, body and texts, which may be large."""
        return self._replace(fields={}, body=b"", remark=None, language=LANGUAGE)


class Frames:
    """Cuts the stream of bytes of one connection into frames, wherever the network has split it.

    `error` is set when the stream cannot go on; the frames before that point are returned all the same.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX_DEFAULT) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._rest = bytearray()  # an incomplete frame; grows in place, so that a long one is copied once
        self._wanted = 0  # bytes that the rest must have before it can hold a whole frame
        self.error: ProtocolError | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Takes bytes in; returns the frames that are complete now, each without its length."""
        if self.error is not None:
            return []
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest = bytearray()
        frames: list[bytes] = []
        position, end, frame_bytes_max = 0, len(data), self._frame_bytes_max
        while end - position >= _LENGTH_BYTES:
            (length,) = _LENGTH.unpack_from(data, position)
            start = position + _LENGTH_BYTES
            stop = start + length
            if not _LENGTH_BYTES <= length <= frame_bytes_max:
                self.error = ProtocolError(f"a frame of {length} bytes, expected 4 to {frame_bytes_max}")
                return frames
            if stop > end:
                break
            frames.append(data[start:stop])
            position = stop
        if position < end:
            self._rest += data[position:]
            self._wanted = _LENGTH_BYTES
            if end - position >= _LENGTH_BYTES:
                self._wanted += _LENGTH.unpack_from(data, position)[0]
        return frames

    @property
    def rest_bytes(self) -> int:
        """The bytes of an incomplete frame; 0 where the stream stands between two frames."""
        return len(self._rest)


# -- reading ----------------------------------------------------------------------------------------------------


def decode(frame: bytes) -> Command:
    """Returns the request or the answer in a frame without its length. Raises ProtocolError."""
    if len(frame) < HEADER_AT:
        raise ProtocolError(f"a frame of {len(frame)} bytes, expected 4 or more")
    serialization, stop = frame[0], header_end(frame)
    if stop > len(frame):
        raise ProtocolError(f"a header of {stop - HEADER_AT} bytes in a frame of {len(frame)}")
    header, body = frame[HEADER_AT:stop], frame[stop:]
    if serialization == JSON:
        return _decode_json(header, body)
    if serialization == BINARY:
        return _decode_binary(header, body)
    raise ProtocolError(f"serialization {serialization}, expected 0 (JSON) or 1 (binary)")


def header_end(frame: bytes) -> int:
    """Returns where the header of a frame ends, as its mark says."""
    mark: int = _MARK.unpack_from(frame)[0]
    return HEADER_AT + (mark & _HEADER_BYTES_MAX)


def _decode_json(header: bytes, body: bytes) -> Command:
    try:
        values = orjson.loads(header)
        get = values.get
        fields = get("extFields") or {}
        if type(fields) is not dict:
            raise ValueError(f"extFields of type {type(fields).__name__}, expected an object")
        return Command(
            _int32(values["code"]), fields, body, _int32(get("opaque") or 0), _int32(get("flag") or 0),
            plain_text(get("remark") or "") or None, JSON, plain_text(get("language") or LANGUAGE_OTHER),
            _int32(get("version") or 0),
        )  # fmt: skip
    except (ValueError, KeyError, AttributeError) as error:
        raise ProtocolError(f"a header that cannot be read: {type(error).__name__} {error}") from error


def whole_number(found: Any) -> int:
    """Returns a number of at most 64 bits, bare or as text. Raises ValueError for all else, also for true and 1.0."""
    number = found
    if type(found) is str:
        if len(found) < 19 and found.isascii() and found.isdigit():
            return int(found)  # the usual case, at a third of the pattern's price
        if _WHOLE_NUMBER.fullmatch(found):
            number = int(found)
    if type(number) is not int or not INT64_MIN <= number <= INT64_MAX:
        raise ValueError(f"{show_value(found)} is no whole number of 64 bits")
    return number


def plain_text(found: Any) -> str:
    """Returns a text, or the digits of a bare number. Raises ValueError for all else."""
    if type(found) is str:
        return found
    if type(found) is not int:
        raise ValueError(f"{show_value(found)} is no text")
    return str(found)


def show_value(found: Any) -> str:
    """Returns a peer's value as our errors show it: short, and without its content, which may be nested very deep."""
    if isinstance(found, str):
        return repr(found[:64])
    return repr(found) if isinstance(found, (int, float)) else f"a {type(found).__name__}"


def _int32(found: Any) -> int:
    number = found if type(found) is int else whole_number(found)
    if not INT32_MIN <= number <= INT32_MAX:
        raise ValueError(f"{number} does not fit 32 bits")
    return number


def _decode_binary(header: bytes, body: bytes) -> Command:
    try:
        code, language, version, opaque, flag, remark_bytes = _BINARY_HEAD.unpack_from(header)
        position = _BINARY_HEAD.size
        remark, position = _read_text(header, position, remark_bytes)
        (fields_bytes,) = _INT32.unpack_from(header, position)
        fields = _read_binary_fields(header, position + _INT32.size, fields_bytes)
    except (StructError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a binary header that cannot be read: {error}") from error
    name = LANGUAGES[language] if language < len(LANGUAGES) else LANGUAGE_OTHER
    return Command(code, fields, body, opaque, flag, remark or None, BINARY, name, version)


def _read_binary_fields(header: bytes, position: int, fields_bytes: int) -> Fields:
    end = position + fields_bytes
    if fields_bytes < 0 or end > len(header):
        raise ProtocolError(f"fields of {fields_bytes} bytes in a header of {len(header)}")
    fields: Fields = {}
    while position < end:
        name, position = _read_text(header, position + _INT16.size, _INT16.unpack_from(header, position)[0])
        fields[name], position = _read_text(header, position + _INT32.size, _INT32.unpack_from(header, position)[0])
    if position != end:
        raise ProtocolError(f"the last field ends at {position}, the fields at {end}")
    return fields


def _read_text(header: bytes, position: int, length: int) -> tuple[str, int]:
    stop = position + length
    if length < 0 or stop > len(header):
        raise ProtocolError(f"a text of {length} bytes at {position} in a header of {len(header)}")
    return header[position:stop].decode(), stop


# -- writing ----------------------------------------------------------------------------------------------------


def encode(command: Command) -> bytes:
    """Returns the whole frame of a request or an answer."""
    header = _encode_json(command) if command.serialization == JSON else _encode_binary(command)
    return encode_frame(header, command.body, command.serialization)


def encode_frame(header: bytes, body: bytes = b"", serialization: int = JSON) -> bytes:
    if len(header) > _HEADER_BYTES_MAX:
        raise ProtocolError(f"a header of {len(header)} bytes, at most {_HEADER_BYTES_MAX} can be written")
    length = _LENGTH_BYTES + len(header) + len(body)
    return MARKS.pack(length, serialization << 24 | len(header)) + header + body


def reply(request: Command, code: int, fields: Mapping[str, Any] = NO_FIELDS, *, remark: str | None = None,
          body: bytes = b"") -> bytes:  # fmt: skip
    """Returns the frame of an answer. It always has fields: clients read them without checking that they exist."""
    answer = Command(code, dict(fields), body, request.opaque, FLAG_RESPONSE, remark, request.serialization)
    return encode(answer)


def _encode_json(command: Command) -> bytes:
    header: dict[str, Any] = {
        "code": command.code, "extFields": _text_fields(command.fields), "flag": command.flag,
        "language": command.language, "opaque": command.opaque,
    }  # fmt: skip
    if command.remark is not None:
        header["remark"] = command.remark
    header["serializeTypeCurrentRPC"] = "JSON"
    header["version"] = command.version
    try:
        return orjson.dumps(header)
    except TypeError as error:  # a text that UTF-8 cannot carry
        raise ProtocolError(f"a header that cannot be written: {error}") from error


def _encode_binary(command: Command) -> bytes:
    language = LANGUAGES.index(command.language if command.language in LANGUAGES else LANGUAGE_OTHER)
    texts = _text_fields(command.fields)
    try:
        remark = (command.remark or "").encode()
        fields = b"".join([_encode_binary_field(name.encode(), value.encode()) for name, value in texts.items()])
        head = _BINARY_HEAD.pack(command.code, language, command.version, command.opaque, command.flag, len(remark))
    except StructError as error:
        raise ProtocolError(f"code {command.code} or another number does not fit a binary header") from error
    except UnicodeEncodeError as error:
        raise ProtocolError(f"a header that cannot be written: {error}") from error
    return b"".join((head, remark, _INT32.pack(len(fields)), fields))


def _text_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns fields as Java writes them: without those that are None, and flags in lower case."""
    return {
        name: str(value).lower() if type(value) is bool else str(value)
        for name, value in fields.items()
        if value is not None
    }


def _encode_binary_field(name: bytes, value: bytes) -> bytes:
    return b"".join((_INT16.pack(len(name)), name, _INT32.pack(len(value)), value))

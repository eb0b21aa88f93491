"""Messages as a consumer sees them."""

import importlib
import zlib
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import cached_property
from typing import Any

from postdate.client.backlog import Delivery
from postdate.client.spans import Delay, instant
from postdate.errors import IllegalMessage, ProtocolError
from postdate.message import (
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    decode_properties,
    first_key,
)
from postdate.wire import codes

# Where the sys flag says how a body is compressed. 0 is what old producers write for zlib.
_COMPRESSION_SHIFT, _COMPRESSION_MASK = 8, 7
_LZ4, _ZSTD = 1, 2
_ZLIB = (0, 3)
# A few kilobytes can unfold to gigabytes; this is sixteen times the largest body that a broker takes by default.
BODY_BYTES_MAX = 64 * 1024 * 1024


def readable_properties(data: bytes) -> dict[str, str]:
    """The properties of a stored message. What is not UTF-8 must not stop its queue: it is read as well as can be."""
    try:
        return decode_properties(data)
    except IllegalMessage:
        return decode_properties(data.decode(errors="replace").encode())


def decompress(body: bytes, sys_flag: int) -> bytes:
    """The body as its producer gave it. Raises ProtocolError if it cannot be read, or its module is not installed."""
    if not sys_flag & codes.SYS_COMPRESSED:
        return body
    kind = sys_flag >> _COMPRESSION_SHIFT & _COMPRESSION_MASK
    if kind in _ZLIB:
        return _unzipped(body)
    if kind == _LZ4:
        return bytes(_module("lz4.frame", "LZ4").decompress(body))
    if kind == _ZSTD:
        return bytes(_module("zstandard", "Zstandard").ZstdDecompressor().decompressobj().decompress(body))
    raise ProtocolError(f"the body is compressed in a way that is not known: {kind}")


def _unzipped(body: bytes) -> bytes:
    unzip = zlib.decompressobj()
    try:
        plain = unzip.decompress(body, BODY_BYTES_MAX)
    except zlib.error as error:
        raise ProtocolError(f"the body says that it is compressed by zlib, but cannot be read: {error}") from error
    if not unzip.eof:
        raise ProtocolError(f"the body is cut off, or has more than {BODY_BYTES_MAX} bytes when unfolded")
    return plain


def _module(name: str, compression: str) -> Any:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ProtocolError(
            f"the body is compressed by {compression}, which needs the module {package}: pip install {package}"
        ) from error


class Received:
    """What blocking and asyncio messages have in common. Made by a consumer; the fields are read only."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._record = delivery.record

    @property
    def properties(self) -> dict[str, str]:
        return self._delivery.properties

    @cached_property
    def body(self) -> bytes:
        """As its producer gave it. Raises ProtocolError if it is compressed and cannot be read."""
        return decompress(self._record.body, self._record.sys_flag)

    @property
    def topic(self) -> str:
        """The topic that it was sent to, also when it comes again."""
        return self._delivery.topic

    @property
    def id(self) -> str:
        """The unique key of its producer, which is the id of its receipt."""
        return self._delivery.id

    @property
    def offset_id(self) -> str:
        """Where the broker keeps it."""
        return self._delivery.offset_id

    @property
    def key(self) -> str | None:
        """The first of its keys."""
        return first_key(self.properties.get(PROPERTY_KEYS, "")) or None

    @property
    def keys(self) -> list[str]:
        return self.properties.get(PROPERTY_KEYS, "").split()

    @property
    def tag(self) -> str | None:
        return self.properties.get(PROPERTY_TAGS)

    @property
    def queue_id(self) -> int:
        return self._record.queue_id

    @property
    def queue_offset(self) -> int:
        return self._record.queue_offset

    @property
    def born_at(self) -> datetime:
        """When it was sent, by the producer's clock."""
        return instant(self._record.born_at_ms)

    @property
    def stored_at(self) -> datetime:
        """When it became visible, by the broker's clock."""
        return instant(self._record.stored_at_ms)

    @property
    def due_at(self) -> datetime | None:
        """When it was due, where the message itself says so: it was sent with `at`. A message that was sent with a
        delay or a level does not say when the broker began to count.
        """
        text = self.properties.get(PROPERTY_TIMER_DELIVER_MS, "")
        try:
            return instant(int(text)) if text else None
        except (ValueError, OverflowError):
            return None

    @property
    def attempt(self) -> int:
        """1 the first time, one more each time that it comes again after a retry."""
        return 1 + self._record.reconsume_times

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.topic}, queue {self.queue_id} offset {self.queue_offset}>"


class ReceivedMessage(Received):
    """A message of the blocking client."""

    def __init__(self, delivery: Delivery, retry: Callable[[Delay | None], None]) -> None:
        super().__init__(delivery)
        self._retry = retry

    def retry(self, delay: Delay | None = None) -> None:
        """Sends the message back: it comes again to this group after `delay`, or after the broker's growing delays.

        Past the group's limit of attempts it becomes a dead letter instead. The message then counts as acknowledged.
        Raises what `send` raises; then nothing has changed.
        """
        self._retry(delay)


class AsyncReceivedMessage(Received):
    """A message of the asyncio client."""

    def __init__(self, delivery: Delivery, retry: Callable[[Delay | None], Awaitable[None]]) -> None:
        super().__init__(delivery)
        self._retry = retry

    async def retry(self, delay: Delay | None = None) -> None:
        """As `ReceivedMessage.retry`."""
        await self._retry(delay)

"""Messages as a consumer sees them."""

import importlib
import zlib
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from postdate.client.backlog import Delivery
from postdate.errors import ProtocolError
from postdate.message import (
    PROPERTY_KEYS,
    PROPERTY_START_DELIVER_TIME,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DELIVER_MS,
    first_key,
)
from postdate.spans import Delay, instant
from postdate.wire import codes

# Where the sys flag says how a body is compressed.
_COMPRESSION_SHIFT, _COMPRESSION_MASK = 8, 7
# A few kilobytes can unfold to gigabytes; this is sixteen times the largest body that a broker takes by default.
BODY_BYTES_MAX = 64 * 1024 * 1024
_ZSTD_PIECE_BYTES = 1_024  # unfolds to 32 MiB at most: a block of 128 KiB takes four bytes or more


def decompress(body: bytes, sys_flag: int, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The body as its producer gave it. Raises ProtocolError if it cannot be read, or its module is not installed."""
    if not sys_flag & codes.SYS_COMPRESSED:
        return body
    kind = sys_flag >> _COMPRESSION_SHIFT & _COMPRESSION_MASK
    if kind not in _KINDS:
        raise ProtocolError(f"the body is compressed in a way that is not known: {kind}")
    name, unfold = _KINDS[kind]
    try:
        plain, is_whole = unfold(body, bytes_max)
    except ProtocolError:
        raise
    except Exception as error:  # every library has errors of its own
        raise ProtocolError(f"the body says that it is compressed by {name}, but cannot be read: {error}") from error
    if not is_whole or len(plain) > bytes_max:
        raise ProtocolError(f"the body is cut off, or has more than {bytes_max} bytes when unfolded")
    return plain


# Each of these gives what it could unfold, little more than the limit at most, and whether that is all.


def _unfold_zlib(body: bytes, bytes_max: int) -> tuple[bytes, bool]:
    unfolding = zlib.decompressobj()
    return unfolding.decompress(body, max(bytes_max, 1)), unfolding.eof


def _unfold_lz4(body: bytes, bytes_max: int) -> tuple[bytes, bool]:
    unfolding = _module("lz4.frame", "LZ4").LZ4FrameDecompressor()
    return bytes(unfolding.decompress(body, max(bytes_max, 1))), bool(unfolding.eof)


def _unfold_zstd(body: bytes, bytes_max: int) -> tuple[bytes, bool]:
    """Piece by piece, because this library knows no limit."""
    unfolding = _module("zstandard", "Zstandard").ZstdDecompressor().decompressobj()
    plain = bytearray()
    for start in range(0, len(body), _ZSTD_PIECE_BYTES):
        plain += unfolding.decompress(body[start : start + _ZSTD_PIECE_BYTES])
        if unfolding.eof or len(plain) > bytes_max:
            break
    return bytes(plain), bool(unfolding.eof)


# By the bits of the sys flag. 0 is what old producers write for zlib.
_KINDS: dict[int, tuple[str, Callable[[bytes, int], tuple[bytes, bool]]]] = {
    0: ("zlib", _unfold_zlib), 1: ("LZ4", _unfold_lz4), 2: ("Zstandard", _unfold_zstd), 3: ("zlib", _unfold_zlib),
}  # fmt: skip


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

    __slots__ = ("_delivery", "_unfolded")

    # Set by those below themselves: a second call for every message would be a tenth of its price.
    _delivery: Delivery
    _unfolded: bytes | None  # the body of a message that came compressed, when it is first wanted

    @property
    def properties(self) -> dict[str, str]:
        return self._delivery.properties

    @property
    def body(self) -> bytes:
        """As its producer gave it. Raises ProtocolError if it is compressed and cannot be read."""
        _, sys_flag, body, _, _ = self._delivery.pieces
        if not sys_flag & codes.SYS_COMPRESSED:
            return body
        if self._unfolded is None:
            self._unfolded = decompress(body, sys_flag)
        return self._unfolded

    @property
    def raw_body(self) -> bytes:
        """As it came: still compressed, if its producer compressed it."""
        return self._delivery.pieces[2]

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
        return self._delivery.record.queue_id

    @property
    def queue_offset(self) -> int:
        return self._delivery.queue_offset

    @property
    def born_at(self) -> datetime:
        """When it was sent, by the producer's clock."""
        return instant(self._delivery.record.born_at_ms)

    @property
    def stored_at(self) -> datetime:
        """When it became visible, by the broker's clock."""
        return instant(self._delivery.record.stored_at_ms)

    @property
    def due_at(self) -> datetime | None:
        """When it was due, where the message itself says so: it was sent with `at`, or another client's word for that.
        A message that was sent with a delay or a level does not say when the broker began to count.
        """
        get = self.properties.get
        text = get(PROPERTY_TIMER_DELIVER_MS) or get(PROPERTY_START_DELIVER_TIME, "")
        try:
            return instant(int(text)) if text else None
        except (ValueError, OverflowError):
            return None

    @property
    def attempt(self) -> int:
        """1 the first time, one more each time that it comes again after a retry."""
        return 1 + self._delivery.record.reconsume_times

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.topic}, queue {self.queue_id} offset {self.queue_offset}>"


class Owner(Protocol):
    """Where a blocking message came from."""

    def acknowledge(self, delivery: Delivery) -> None: ...
    def retry(self, delivery: Delivery, delay: Delay | None) -> None: ...


class ReceivedMessage(Received):
    """A message of the blocking client."""

    __slots__ = ("_owner",)

    def __init__(self, delivery: Delivery, owner: Owner) -> None:
        self._delivery, self._owner, self._unfolded = delivery, owner, None

    def acknowledge(self) -> None:
        """Acknowledges the message now, not when the next one is asked for; when this returns, the broker knows.

        It then does not come again, whatever happens to it here: leaving the loop, a handler that raises. The next
        message of its queue waits all the same until this one is done with. Costs a request, so it is for messages
        after which the loop is left, or whose work must not be done twice. May be repeated.

        Raises UsageError if the loop was left already, and what `send` raises; then the message counts as acknowledged
        here, and the broker is told with the next commit. A queue that went to another member is left to that one.
        """
        self._owner.acknowledge(self._delivery)

    def retry(self, delay: Delay | None = None) -> None:
        """Sends the message back: it comes again to this group after `delay`, or after the broker's growing delays.

        Past the group's limit of attempts it becomes a dead letter instead. The message then counts as acknowledged.
        Raises what `send` raises; then nothing has changed.
        """
        self._owner.retry(self._delivery, delay)


class AsyncOwner(Protocol):
    """Where an asyncio message came from."""

    async def acknowledge(self, delivery: Delivery) -> None: ...
    async def retry(self, delivery: Delivery, delay: Delay | None) -> None: ...


class AsyncReceivedMessage(Received):
    """A message of the asyncio client."""

    __slots__ = ("_owner",)

    def __init__(self, delivery: Delivery, owner: AsyncOwner) -> None:
        self._delivery, self._owner, self._unfolded = delivery, owner, None

    async def acknowledge(self) -> None:
        """As `ReceivedMessage.acknowledge`."""
        await self._owner.acknowledge(self._delivery)

    async def retry(self, delay: Delay | None = None) -> None:
        """As `ReceivedMessage.retry`."""
        await self._owner.retry(self._delivery, delay)

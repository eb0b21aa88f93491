"""One connection of a client: bytes to frames, frames to the service, answers back.

A read is handled in one go and answered in one write. A client that reads its answers slower than it asks is not read
from until it has caught up, and what it had asked already waits here.
"""

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

from postdate.errors import ProtocolError
from postdate.message import LOOPBACK, Host
from postdate.server.address import Address
from postdate.wire.frame import Frames
from postdate.wire.ids import host_of, host_text, id_prefix

if TYPE_CHECKING:
    from postdate.server.service import Service

logger = logging.getLogger("postdate.server")


class Connection(asyncio.Protocol):
    """Made by the listening socket for each client. Belongs to one service."""

    def __init__(self, service: "Service", frame_bytes_max: int, write_buffer_bytes_max: int) -> None:
        self._service = service
        self._frames = Frames(frame_bytes_max)
        self._write_buffer_bytes_max = write_buffer_bytes_max
        self._transport: asyncio.Transport | None = None
        self._backlog: deque[bytes] = deque()  # frames that wait until the client has read its answers
        self._is_paused = False
        self._is_lost = False
        self._is_stopped = False
        self.host: Host = LOOPBACK
        self._is_reached_at(service.address, "")

    # -- called by the loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport, they only look like one.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(self._write_buffer_bytes_max)
        peer, local = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if peer and local:  # a client may be gone before it was taken
            self.host = host_of(*peer[:2])
            self._is_reached_at(self._service.address, local[0])
        if not self._service.welcome(self):
            self.close()

    def _is_reached_at(self, address: Address, local_address: str) -> None:
        """Notes how this client reaches the broker, for all that it will be told."""
        self.broker_address = address.text(local_address)
        self.broker_host = address.host(local_address)
        self.id_prefix = id_prefix(self.broker_host).encode()

    def data_received(self, data: bytes) -> None:
        self._take(self._frames.feed(data))
        if self._frames.error is not None:
            self.fail(self._frames.error)

    def eof_received(self) -> bool:
        if not self._frames.is_empty:
            self.fail(ProtocolError("the connection ended within a frame"))
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._backlog.clear()
        self._service.farewell(self)

    def pause_writing(self) -> None:
        self._is_paused = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._is_stopped:
            return
        backlog, self._backlog = self._backlog, deque()
        self._take(list(backlog))
        if not self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # -- called by the service ----------------------------------------------------------------------------------

    def _take(self, frames: list[bytes]) -> None:
        if self._is_paused:
            self._backlog.extend(frames)
        elif frames:
            handled = self._service.handle(self, frames)
            self._backlog.extend(frames[handled:])

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def is_paused(self) -> bool:
        """Whether the client is so far behind with reading that it gets no more answers for now."""
        return self._is_paused

    def fail(self, error: ProtocolError) -> None:
        """The peer does not speak our protocol: this connection ends, with one line in the log."""
        self._backlog.clear()
        if self._transport is not None and not self._transport.is_closing():
            logger.warning("closing the connection of %s: %s", host_text(self.host), error)
            self.close()

    def stop_reading(self) -> None:
        """Takes no more requests; those that were taken are still answered."""
        self._is_stopped = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

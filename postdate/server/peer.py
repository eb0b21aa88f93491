"""What the server knows of every connection, whatever its client speaks: the sweep and the stop of the server look at
this alone.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from postdate.message import LOOPBACK, Host
from postdate.tls import name_in
from postdate.wire.ids import host_of, host_text


class Peer(asyncio.Protocol):
    """A connection that was accepted. The protocols of our ports are its subclasses."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self.host: Host = LOOPBACK
        self.address = ""  # the client's as a text, once somebody has asked for it
        self.local_address = ""  # of ours, where the client has connected
        self.has_place = False  # whether it was counted when it was accepted, before its handshake
        self.certificate_name = ""  # whom the client's certificate names, where it shows one that we trust
        self.is_paused = False  # whether the client reads so slowly that it gets no more answers for now
        # For the sweep: whether a request came since the last one, when it came, and since when no answer is read.
        self.is_heard = False
        self.heard_at_ns = 0
        self.paused_at_ns: int | None = None
        self.in_flight = 0  # requests whose answers wait for the disk
        self.held_count = 0  # requests that wait for messages

    def __str__(self) -> str:
        return host_text(self.host)

    def note_transport(self, transport: asyncio.BaseTransport, write_buffer_bytes_max: int) -> asyncio.Transport:
        """Takes in the transport of a new connection, and whom it connects."""
        # uvloop's transports are no asyncio.Transport, they only look like one.
        self._transport = found = cast(asyncio.Transport, transport)
        found.set_write_buffer_limits(write_buffer_bytes_max)
        peer, local = found.get_extra_info("peername"), found.get_extra_info("sockname")
        if peer and local:  # the client may be gone before its connection is accepted
            self.host = host_of(*peer[:2])
            self.local_address = local[0]
        self.certificate_name = name_in(found.get_extra_info("peercert"))
        return found

    @property
    def is_tls(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def buffered_bytes(self) -> int:
        """Memory for this client: what it has sent and what it has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def stop_reading(self) -> None:
        """Takes no more requests; earlier ones are still answered."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the connection when the client has read what is written."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


MakePeer = Callable[[], Peer]

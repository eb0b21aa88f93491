"""A listening port of a broker with TLS: the first byte of a connection says whether it speaks TLS.

A TLS connection begins with the byte 0x16, a frame never does. We look at that byte before anything is read: handing a
connection over to TLS later would lose what was read already. Until it is known who speaks how, a connection has no
`Peer`; it counts as one all the same, and has handshake_ms_max for its first byte and its handshake together.

A handshake costs a millisecond of this thread, a hundred sends' worth. So it begins when the client's whole first
record is there, and only one begins in each turn of the event loop: firing and other clients never wait for many.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Iterable
from typing import Protocol

from postdate.config import Limits
from postdate.errors import ProtocolError
from postdate.message import Host
from postdate.server.connections import Connections
from postdate.server.peer import MakePeer, Peer
from postdate.tls import reason_of
from postdate.wire.ids import host_of, host_text

logger = logging.getLogger("postdate.server")

_HANDSHAKE = 0x16  # the type of the first record of TLS
_RECORD_HEADER_BYTES, _RECORD_BYTES_MAX = 5, 1 << 14
_ACCEPTS = 64  # connections accepted in one turn of the loop
_FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_FULL_SECONDS = 1.0  # how long nobody is accepted where the process can open no more files
_GOODBYE_SECONDS = 2.0  # how long the end of a connection waits for the peer's own


class Handshakes:
    """Which handshakes may begin: so many at once, so many of one address, one in each turn of the loop. One serves
    all ports of a broker.
    """

    def __init__(self, limits: Limits) -> None:
        self._places = asyncio.Semaphore(limits.handshakes_max)
        self._per_address_max = limits.handshakes_per_address_max
        self._queues: dict[bytes, tuple[int, asyncio.Semaphore]] = {}  # by address: how many use it
        self._turn = asyncio.Lock()

    async def hold(self, address: bytes, end: float, handshake: Callable[[], "asyncio.Task[None]"]) -> None:
        """Waits for a place until an instant of the loop's clock, then runs a handshake in it. Raises TimeoutError, and
        what the handshake raises.
        """
        count, own = self._queues.get(address, (0, asyncio.Semaphore(self._per_address_max)))
        self._queues[address] = count + 1, own
        try:
            async with asyncio.timeout_at(end):
                await own.acquire()
            try:
                await self._hold_one(end, handshake)
            finally:
                own.release()
        finally:
            count, _ = self._queues.pop(address)
            if count > 1:
                self._queues[address] = count - 1, own

    async def _hold_one(self, end: float, handshake: Callable[[], "asyncio.Task[None]"]) -> None:
        async with asyncio.timeout_at(end):
            await self._places.acquire()
        try:
            async with asyncio.timeout_at(end):
                await self._turn.acquire()
            running = handshake()
            try:
                await asyncio.sleep(0)
            except BaseException:
                running.cancel()
                raise
            finally:
                self._turn.release()
            await running
        finally:
            self._places.release()


class Certificate(Protocol):
    """What a port shows, which may have to be made first."""

    async def find_context(self) -> ssl.SSLContext: ...


class TlsPort:
    """One listening socket. Made and used on the event loop."""

    def __init__(
        self, listener: socket.socket, make: MakePeer, connections: Connections, certificate: Certificate,
        handshakes: Handshakes, limits: Limits, *, takes_plain: bool,
    ) -> None:  # fmt: skip
        self.sockets = (listener,)
        self._listener, self._make, self._connections = listener, make, connections
        self._certificate, self._handshakes = certificate, handshakes
        self._takes_plain = takes_plain
        self._handshake_seconds = limits.handshake_ms_max / 1_000
        self._arriving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listener, self._accept)

    def is_serving(self) -> bool:
        return self._listener.fileno() >= 0

    def close(self) -> None:
        """Accepts nobody more, and drops those whose handshakes are not done."""
        if self._listener.fileno() < 0:
            return
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in self._arriving:
            task.cancel()

    # -- accepting ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                peer, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                logger.error("no connection is accepted for %g s: %s", _FULL_SECONDS, error.strerror)
                self._loop.remove_reader(self._listener)
                self._resuming = self._loop.call_later(_FULL_SECONDS, self._resume)
                return
            peer.setblocking(False)
            host = host_of(*address[:2])
            if not self._connections.reserve(host):
                peer.close()
                continue
            task = self._loop.create_task(self._receive(peer, host))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    async def _receive(self, peer: socket.socket, host: Host) -> None:
        """Makes a connection of an accepted socket, or closes it."""
        end = self._loop.time() + self._handshake_seconds
        is_received, complain = False, self._connections.complain
        try:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout_at(end):
                first = await self._peek(peer, 1)
            if not first:
                return  # a health check, perhaps, that has seen what it wanted
            if first[0] == _HANDSHAKE:
                async with asyncio.timeout_at(end):
                    await self._wait_for_hello(peer)
                await self._handshakes.hold(host.address, end, lambda: self._shake_hands(peer, end))
            elif self._takes_plain:
                await self._loop.connect_accepted_socket(self._make_one, peer)
            else:
                complain(
                    "closing the connection of %s: it does not speak TLS, and this port takes nothing else",
                    host_text(host),
                )
                return
            is_received = True
        except TimeoutError:
            seconds = self._handshake_seconds
            complain("closing the connection of %s: handshake_ms_max: nothing within %g s", host_text(host), seconds)
        except ProtocolError as error:
            complain("closing the connection of %s: no TLS handshake: %s", host_text(host), error)
        except ssl.SSLError as error:
            reason = reason_of(error)
            complain("closing the connection of %s: its TLS handshake failed: %s", host_text(host), reason)
        except OSError as error:  # a reset, or the deadline of the handshake itself
            reason = str(error) or "the peer has closed it"
            complain("closing the connection of %s: its TLS handshake ended: %s", host_text(host), reason)
        finally:
            self._connections.release(host)
            if not is_received:
                peer.close()

    def _make_one(self) -> Peer:
        connection = self._make()
        connection.has_place = True
        return connection

    # -- handshakes ---------------------------------------------------------------------------------------------

    def _shake_hands(self, peer: socket.socket, end: float) -> "asyncio.Task[None]":
        async def shake_hands() -> None:
            await self._loop.connect_accepted_socket(
                self._make_one, peer, ssl=await self._certificate.find_context(),
                ssl_handshake_timeout=max(end - self._loop.time(), 0.001), ssl_shutdown_timeout=_GOODBYE_SECONDS,
            )  # fmt: skip

        return self._loop.create_task(shake_hands())

    async def _wait_for_hello(self, peer: socket.socket) -> None:
        """Waits for the whole first record: what comes then costs CPU at once, not at an instant of the peer's choice.
        Raises ProtocolError for what is no record.
        """
        header = await self._peek(peer, _RECORD_HEADER_BYTES)
        size = int.from_bytes(header[3:5], "big")
        if len(header) < _RECORD_HEADER_BYTES or header[1] != 3 or not 0 < size <= _RECORD_BYTES_MAX:
            raise ProtocolError("it begins like TLS and goes on like something else")
        await self._peek(peer, _RECORD_HEADER_BYTES + size)

    async def _peek(self, peer: socket.socket, count: int) -> bytes:
        """Looks at the first bytes, and leaves them there. There are fewer where the peer has ended."""
        while True:
            try:
                found = peer.recv(count, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                found = None
            if found is not None and len(found) in (0, count):
                return found
            # The kernel wakes us when they are there, or never will be: a peer that sends byte by byte wakes nobody.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            try:
                await self._wait_until_readable(peer)
                found = peer.recv(count, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                continue
            finally:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return found

    async def _wait_until_readable(self, peer: socket.socket) -> None:
        readable = self._loop.create_future()

        def wake() -> None:
            if not readable.done():
                readable.set_result(None)

        self._loop.add_reader(peer, wake)
        try:
            await readable
        finally:
            self._loop.remove_reader(peer)


async def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listens on every address of a host, as the event loop does for plain ports. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )  # fmt: skip
    addresses = {(family, address[:2]): None for family, _, _, _, address in found}
    listeners: list[socket.socket] = []
    try:
        for family, address in addresses:
            listeners.append(socket.create_server(address, family=family, backlog=backlog))
    except BaseException:
        close_all(listeners)
        raise
    return listeners


def close_all(listeners: Iterable[socket.socket]) -> None:
    for listener in listeners:
        listener.close()

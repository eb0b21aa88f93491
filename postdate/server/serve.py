"""The server: listening sockets around one broker, from start to stop."""

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from postdate.access.certificates import LocalCertificate
from postdate.access.token import open_token
from postdate.access.users import Users
from postdate.broker.broker import Broker
from postdate.clock import Clock, SystemClock
from postdate.config import Limits, Settings
from postdate.errors import ProtocolError, UsageError
from postdate.extras import has_extra, install
from postdate.process import (
    give_freed_memory_back,
    keep_files_private,
    make_private_folder,
    new_event_loop,
    take_from_others,
)
from postdate.server.address import Address
from postdate.server.children import Parts
from postdate.server.connection import Connection
from postdate.server.connections import SWEEP_MS
from postdate.server.dispatch import Dispatcher
from postdate.server.masking import hide_credentials
from postdate.server.peer import MakePeer
from postdate.server.requests import transactions
from postdate.server.sessions.meter import TICK_MS
from postdate.server.table_place import find_place, is_allowed
from postdate.server.tls_port import Certificate, Handshakes, TlsPort, bind
from postdate.storage.disk import RealDisk
from postdate.storage.folder import FORMAT_FILE, refuse_foreign
from postdate.tls import CERTIFICATE_FILE, RENEW_MS, Renewed, server_files
from postdate.wire.ids import address_text

logger = logging.getLogger("postdate.server")

_EXPIRE_EVERY_MS = 5_000  # how often silent clients and expired locks are removed
_FILES_BESIDE = 512  # open files beside the connections: segments, chunks, snapshots, ports
_DRAIN_MS_MIN = 500  # clients have at least this long to read their answers, however long the parts took to stop
OWN_SOCKET = "broker.sock"  # in the data folder
_SOCKET_PATH_BYTES_MAX = 107  # Linux's
ACCESS_MS = 1_000  # how often the server looks for users that another process has changed
_BACKLOG = 1_024  # connections that wait to be accepted
_SWITCH_S = 0.0005  # how long a thread that checks chunks or counts rows may delay the thread that fires


Listeners = list[asyncio.Server] | list[TlsPort]


class Server:
    """Serves one broker, which it neither opens nor closes. `start` and `stop` are called on one event loop.

    The clock is the machine's, by which the alarm rings, or a ManualClock, whose owner calls `ring`.
    """

    def __init__(self, broker: Broker, clock: Clock, token: str = "", folder: Path | None = None) -> None:
        """The token is that of the data folder: without it, what is internal is open to all. The folder holds users,
        the audit log, and the socket by which the broker's own processes reach it where its ports want TLS; without it
        there are none, and anybody may say where the table is.
        """
        self.broker, self._clock, self._token, self._folder = broker, clock, token, folder
        self._own_socket = folder and folder.resolve() / OWN_SOCKET
        self._listeners: list[asyncio.Server | TlsPort] = []
        self._certificate: Renewed | None = None  # None where tls is off
        self._handshakes: Handshakes | None = None
        self._timers: list[asyncio.Task[None]] = []
        self._dispatcher: Dispatcher | None = None
        self.route_address = self.broker_address = ""
        self.vip_address: str | None = None
        self.grpc_address: str | None = None
        self.parts_address = ""  # where bulk and pipeline beside the broker connect

    async def start(self) -> None:
        """Starts to listen. Raises UsageError where a port is in use, the host is not ours, or a certificate cannot be
        used.
        """
        settings = self.broker.settings
        if settings.tls != "off":
            files = server_files(
                Path(settings.data), settings.tls_cert, settings.tls_key, settings.tls_client_ca,
                settings.tls_client_cert,
            )  # fmt: skip
            self._certificate, self._handshakes = Renewed(files), Handshakes(self.broker.limits)
        address = Address(settings)
        await address.resolve()
        self._dispatcher = dispatcher = Dispatcher(self.broker, self._clock, address, self._token, self._folder)
        self._look_at_table()
        dispatcher.pulse.start()
        try:
            self.broker_address = await self._listen("broker_port", settings.broker_port)
            address.broker_port = int(self.broker_address.rpartition(":")[2])
            self.parts_address = await self._listen_to_parts()
            if settings.vip_port >= 0:
                self.vip_address = await self._listen("vip_port", settings.vip_port)
            if settings.grpc_port >= 0:
                self.grpc_address = await self._listen_to_grpc()
            # Last: a client that finds the route finds the broker.
            self.route_address = await self._listen("route_port", settings.route_port)
            address.route_port = int(self.route_address.rpartition(":")[2])
        except BaseException:
            await self.stop()
            raise
        for work in (self._sweep(dispatcher), self._refresh_access(dispatcher)):
            self._timers.append(asyncio.get_running_loop().create_task(work))
        if self._certificate is not None:
            self._every(RENEW_MS, self._certificate.look)
        self._every(_EXPIRE_EVERY_MS, dispatcher.groups.expire)
        self._every(_EXPIRE_EVERY_MS, dispatcher.pops.tick)
        self._every(TICK_MS, dispatcher.status.tick)
        self._every(transactions.TICK_MS, dispatcher.transactions.tick)
        self._every(self.broker.limits.offsets_interval_ms, dispatcher.groups.write_offsets)

    def _look_at_table(self) -> None:
        """Has nobody read a table that the settings do not name: an earlier version let pipelines name any."""
        told, setting = self.broker.view.far.table, self.broker.settings.table
        if told and self._folder is not None and not is_allowed(told, setting, self._folder):
            self.broker.view.trusts_table = False
            logger.error(
                "the last pipeline kept its table at %s, but by the settings it is %s: nothing is read there until a "
                "pipeline registers with that; if the first is right, start the broker with --table",
                hide_credentials(told), hide_credentials(find_place(setting, self._folder)),
            )  # fmt: skip

    async def _listen(self, name: str, port: int) -> str:
        settings = self.broker.settings
        make = partial(Connection, self.dispatcher, is_broker_port=name == "broker_port")
        opening = self._open(make, port, self._certificate, takes_plain=settings.tls != "enforcing")
        return await self._bind(name, port, opening)

    async def _listen_to_grpc(self) -> str:
        """Listens for RocketMQ 5's clients, which speak TLS unless told otherwise: on this machine alone they get a
        certificate that was made for it, where the broker has none. Their signatures can be used again by whoever reads
        one, so on a network they are not taken without TLS, unless its operator has decided that.
        """
        from postdate.server.grpc.connection import GrpcConnection  # here: a broker without this port needs none of it
        from postdate.server.grpc.service import GrpcService

        settings, is_local = self.broker.settings, _is_loopback(self.broker.settings.host)
        service = GrpcService(self.dispatcher, self.broker, self._clock)
        certificate: Certificate | None = self._certificate
        if certificate is None and is_local and self._folder is not None:
            certificate, self._handshakes = LocalCertificate(self._folder), Handshakes(self.broker.limits)
            self._timers.append(asyncio.get_running_loop().create_task(self._make_certificate(certificate)))
        takes_plain = settings.tls != "enforcing" and (is_local or settings.insecure)
        opening = self._open(partial(GrpcConnection, service), settings.grpc_port, certificate, takes_plain=takes_plain)
        address = await self._bind("grpc_port", settings.grpc_port, opening)
        self._every(_EXPIRE_EVERY_MS, service.tick)
        return address

    async def _make_certificate(self, certificate: LocalCertificate) -> None:
        """Has the certificate made before the first client wants it: some clients must be given it."""
        try:
            await certificate.find_context()
        except (ProtocolError, OSError) as error:
            logger.info("the gRPC port takes clients without TLS alone: %s", error)

    async def _bind(self, name: str, port: int, opening: Coroutine[Any, Any, Listeners]) -> str:
        """Opens a port; returns its address. Raises UsageError."""
        settings = self.broker.settings
        try:
            listeners = await opening
        except OSError as error:
            problem = f"cannot listen on port {port} of {settings.host} ({name}): {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                flag = f"--{name.replace('_', '-')}"
                problem = (
                    f"port {port} of {settings.host} is in use by another program: choose another with {flag} ({name})"
                )
            raise UsageError(problem) from error
        self._listeners += listeners
        host, bound = listeners[0].sockets[0].getsockname()[:2]
        return address_text(host, bound)

    async def _open(
        self, make: MakePeer, port: int, certificate: Certificate | None, *, takes_plain: bool
    ) -> Listeners:  # fmt: skip
        settings, limits = self.broker.settings, self.broker.limits
        if certificate is None:
            return [await asyncio.get_running_loop().create_server(make, settings.host, port, backlog=_BACKLOG)]
        assert self._handshakes is not None
        return [
            TlsPort(
                listener, make, self.dispatcher.connections, certificate, self._handshakes, limits,
                takes_plain=takes_plain,
            )
            for listener in await bind(settings.host, port, _BACKLOG)
        ]  # fmt: skip

    async def _listen_to_parts(self) -> str:
        """Listens where the broker's own processes connect: a broker with TLS has a socket for them in its data folder,
        so that they need no certificate.
        """
        path = self._own_socket
        if self._certificate is None or path is None:
            return self.broker_address
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
            raise UsageError(
                f"the path {path} is too long for a socket, at most {_SOCKET_PATH_BYTES_MAX} bytes: choose a shorter "
                "data folder, or one that a short link leads to"
            )
        make = partial(Connection, self.dispatcher, is_broker_port=True)
        listener = await asyncio.get_running_loop().create_unix_server(make, str(path), backlog=_BACKLOG)
        path.chmod(0o600)
        self._listeners.append(listener)
        return f"unix:{path}"

    async def _sweep(self, dispatcher: Dispatcher) -> None:
        while True:
            await asyncio.sleep(SWEEP_MS / 1_000)
            for _ in dispatcher.connections.sweep():
                await asyncio.sleep(0)

    async def _refresh_access(self, dispatcher: Dispatcher) -> None:
        while True:
            await asyncio.sleep(ACCESS_MS / 1_000)
            await dispatcher.refresh_access()

    def _every(self, interval_ms: int, work: Callable[[], object]) -> None:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(interval_ms / 1_000)
                try:
                    work()
                except Exception:  # our mistake; log it and go on with the next round
                    logger.exception("%s failed", work.__qualname__)

        self._timers.append(asyncio.get_running_loop().create_task(repeat()))

    @property
    def dispatcher(self) -> Dispatcher:
        """What answers the requests, from `start` on."""
        assert self._dispatcher is not None, "the server has not started"
        return self._dispatcher

    def show_parts(self, parts: Mapping[str, str]) -> None:
        """Shows operators the state of the parts: by name a sentence, read whenever an operator asks."""
        self.dispatcher.status.parts = parts

    def ring(self) -> None:
        """Fires what is due, for a clock that is moved by hand."""
        self.dispatcher.pulse.ring()

    def catch_up(self) -> None:
        """Fires what is due, for a clock that is moved by hand. When it returns, consumers see all of it."""
        self.dispatcher.pulse.catch_up()

    async def stop(self, spent_ms: int = 0) -> None:
        """Stops listening, answers all writes, and ends the connections. The time that stopping has taken before,
        `spent_ms`, counts towards the time that clients have to read their answers.
        """
        for listener in self._listeners:
            listener.close()
        if self._own_socket is not None:
            self._own_socket.unlink(missing_ok=True)
        for timer in self._timers:
            timer.cancel()
        if self._dispatcher is None:
            return
        dispatcher = self._dispatcher
        for connection in dispatcher.connections:
            connection.stop_reading()
        dispatcher.pulls.release_all()
        dispatcher.pops.release_all()
        dispatcher.groups.write_offsets()
        await dispatcher.pulse.stop()
        dispatcher.sessions.questions.release_all()
        for connection in list(dispatcher.connections):
            connection.close()  # its pending answers are still sent
        limit_ms = self.broker.settings.shutdown_ms
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(limit_ms - spent_ms, min(limit_ms, _DRAIN_MS_MIN)) / 1_000):
                while dispatcher.connections:
                    await asyncio.sleep(0.005)
        for connection in list(dispatcher.connections):
            connection.abort()
        if dispatcher.audit is not None:
            await dispatcher.audit.close()


def run(
    settings: Settings, ready: Callable[[Server], None], parts: Parts | None = None, *, limits: Limits | None = None
) -> None:
    """Opens the data folder and serves it until SIGINT or SIGTERM, with the parts beside it. Calls `ready` when it
    listens.

    Raises what opening the folder raises, and UsageError where it cannot listen.
    """
    if sys.platform != "linux":
        raise UsageError(f"a broker needs Linux, and this is {sys.platform}; the client and its commands work here too")
    refuse_open_network(settings)
    keep_files_private()
    make_private_folder(settings.data)
    disk = RealDisk(Path(settings.data))
    _close_to_others(disk)
    broker = Broker(disk, settings, limits=limits)
    try:
        _refuse_stranded_rows(broker)
        token = open_token(disk.root)  # now: a folder that holds something, but no FORMAT, is not ours
        broker.start_keeper()
        allow_files(settings.connections_max)
        # The collector runs rarely, and never over the objects that exist by now, which stay. Requests make no cycles,
        # and the default thresholds cost a tenth of a send.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 50, 100)
        sys.setswitchinterval(_SWITCH_S)
        give_freed_memory_back()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            server = Server(broker, SystemClock(), token, disk.root)
            runner.run(serve(server, SystemClock(), ready, parts))
    finally:
        broker.close()


def refuse_open_network(settings: Settings) -> None:
    """Raises UsageError for a broker that other machines reach and that lacks users or TLS, unless its operator has
    decided that.
    """
    if settings.insecure or _is_loopback(settings.host):
        return
    has_tls, has_users = settings.tls != "off", bool(Users(Path(settings.data)).all)
    if has_tls and has_users:
        return
    missing = "no users" if has_tls else "no TLS" if has_users else "neither users nor TLS"
    has_certificate = bool(settings.tls_cert) or (Path(settings.data) / CERTIFICATE_FILE).exists()
    words = "" if has_certificate else "--self-signed "
    first = "" if has_users and has_certificate else f"postdate user init {words}--data {settings.data} and then "
    raise UsageError(
        f"other machines reach {settings.host}, and this broker has {missing}: run {first}postdate up --host "
        f"{settings.host} --tls enforcing --data {settings.data}, or give --insecure true if nobody else reaches that "
        "network"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _close_to_others(disk: RealDisk) -> None:
    """Closes a data folder that others can read: a restored copy, or one that an earlier version has made."""
    refuse_foreign(disk)
    is_new = disk.size(FORMAT_FILE) < 0
    closed, left = take_from_others(disk.root)
    if closed and not is_new:
        logger.warning("other users of this machine could read %d files and folders of %s: closed", closed, disk.root)
    if left:
        logger.warning(
            "%d files and folders of %s belong to another user and stay open to others: chown them to our user",
            left, disk.root,
        )  # fmt: skip


def _refuse_stranded_rows(broker: Broker) -> None:
    """Raises UsageError where messages wait in the table and the extra that would bring them back is not installed.
    An operator who starts the broker without bulk, or without a pipeline of its own, has decided that.
    """
    settings, count = broker.settings, broker.view.far.in_table
    if not count or settings.bulk_port < 0:
        return
    waiting = f"{count:,} messages wait in the table of {settings.data}: to deliver them, a broker"
    if not has_extra("table"):
        otherwise = "or give --bulk-port -1 to leave them there"
        raise UsageError(f"{waiting} needs postdate[table] ({install('table')}), {otherwise}")
    if settings.pipeline == "embedded" and not has_extra("spark"):
        otherwise = "or give --pipeline none and run postdate pipeline elsewhere"
        raise UsageError(f"{waiting} needs postdate[spark] ({install('spark')}), {otherwise}")


def allow_files(connections_max: int) -> None:
    """Raises the limit of open files as far as needed and allowed; logs a warning where that is not enough."""
    import resource  # here, as Windows has none and this module is imported there for postdate.testing

    wanted = connections_max + _FILES_BESIDE
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if soft < min(wanted, hard):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), limits[1]))
    if hard < wanted:
        logger.warning(
            "connections_max is %d, but this process may open %d files, which is enough for about %d connections: "
            "raise the system's limit (ulimit -Hn), or lower connections_max",
            connections_max, hard, max(hard - _FILES_BESIDE, 0),
        )  # fmt: skip


async def serve(server: Server, clock: Clock, ready: Callable[[Server], None], parts: Parts | None = None) -> None:
    """Serves until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    await server.start()
    try:
        if parts is not None:
            server.show_parts(parts)
            await parts.start(server.parts_address)
        ready(server)
        await stopping.wait()
    finally:
        with contextlib.suppress(NotImplementedError):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        began_ns = clock.elapsed_ns()
        if parts is not None:
            await parts.stop()
        await server.stop((clock.elapsed_ns() - began_ns) // 1_000_000)

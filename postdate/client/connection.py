"""Connections: requests out, answers back by their opaque, many in flight at once.

One event loop owns a connection; nothing here is for several threads. A request ends in exactly one of three ways: its
answer, TimedOut or Disconnected.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from postdate.client.address import Address as Address
from postdate.client.address import parse_address as parse_address
from postdate.client.address import parse_addresses as parse_addresses
from postdate.client.errors import Disconnected, TimedOut, no_broker_at
from postdate.client.security import NO_SECURITY, Security, signed_fields
from postdate.errors import PostdateError, ProtocolError, UsageError
from postdate.tls import reason_of
from postdate.wire import codes
from postdate.wire.frame import NO_FIELDS, Command, Frames, decode, encode, reply

log = logging.getLogger("postdate.client")

# What a broker asks of its client; the answer, where one is wanted, is the connection's own.
OnRequest = Callable[[Command], None]


class Answered(NamedTuple):
    """The answer to a request of the broker's."""

    body: bytes
    fields: Mapping[str, Any] = NO_FIELDS


Answer = Callable[[Command], Awaitable[Answered]]  # what it raises of ours becomes a refusal
Answers = Mapping[int, Answer]
NO_ANSWERS: Answers = {}
OnLost = Callable[[], None]
Result = TypeVar("Result")

# A shorter silence proves nothing: a request may have had only the rest of a caller's timeout.
SILENCE_SECONDS_MIN = 1.0

_OPAQUE_MAX = 2**31 - 1


async def within(timeout: float, work: Awaitable[Result], failure: str) -> Result:
    """The result of something, if it comes in time. Raises TimedOut."""
    timeout = max(timeout, 0.0)
    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimedOut:
        raise
    except TimeoutError:
        raise TimedOut(f"{failure} within {timeout:.1f} s") from None


class Connection(asyncio.Protocol):
    """One connection to a route or broker address. Made by `Connections`."""

    def __init__(
        self, address: Address, on_request: OnRequest | None, on_lost: OnLost | None, answers: Answers = NO_ANSWERS,
        security: Security = NO_SECURITY,
    ) -> None:  # fmt: skip
        self.address, self._on_request, self._answers = address, on_request, answers
        self._credentials = security.credentials
        self._answering: set[asyncio.Task[None]] = set()
        self._on_lost = on_lost
        self._frames = Frames()
        self._waiting: dict[int, asyncio.Future[Command]] = {}
        self._opaque = 0
        self._silent_since: float | None = None  # the first request since the peer was last heard
        self._is_heard = self._is_ended = False  # whether the broker has ever said something; whether we have ended it
        self._outbox: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._lost = asyncio.Event()
        self._reason = "the connection was lost"

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    # -- asking

    async def request(
        self, code: int, fields: Mapping[str, Any] = NO_FIELDS, body: bytes = b"", *, timeout: float
    ) -> Command:
        """Asks, and returns the answer whatever its code. Raises TimedOut after `timeout` seconds, or Disconnected."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        if not self._writable.is_set():
            await within(timeout, self._writable.wait(), f"{self.address} takes nothing")
        opaque = self._opaque = self._opaque % _OPAQUE_MAX + 1
        self._write(encode(Command(code, signed_fields(fields, body, self._credentials), body, opaque)))
        if self._silent_since is None:
            self._silent_since = loop.time()
        future: asyncio.Future[Command] = loop.create_future()
        self._waiting[opaque] = future
        # A timer of our own: a request is the unit of all work here, and asyncio.timeout would be a third of its price.
        timer = loop.call_at(end, self._give_up, future, timeout)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(opaque, None)

    def _give_up(self, future: "asyncio.Future[Command]", timeout: float) -> None:
        if future.done():
            return
        future.set_exception(TimedOut(f"no answer from {self.address} within {max(timeout, 0.0):.1f} s"))
        if self._silent_since is not None:
            # A peer that says nothing at all may be gone without a word. The next request then connects anew.
            seconds = asyncio.get_running_loop().time() - self._silent_since
            if seconds >= SILENCE_SECONDS_MIN:
                self._abort(f"it was silent for {seconds:.1f} s")

    def tell(self, code: int, fields: Mapping[str, Any]) -> None:
        """Says something that wants no answer. It may get lost with the connection."""
        if not self.is_lost:
            signed = signed_fields(fields, b"", self._credentials)
            self._write(encode(Command(code, signed, flag=codes.FLAG_ONEWAY)))

    def _write(self, frame: bytes) -> None:
        """Frames of one turn of the loop leave in one system call."""
        if self.is_lost:
            raise Disconnected(f"{self.address}: {self._reason}")
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(frame)

    def _flush(self) -> None:
        frames, self._outbox = self._outbox, []
        if self._transport is not None and not self.is_lost:
            self._transport.write(b"".join(frames))

    # -- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no asyncio.Transport, they only look like one.
        self._transport = cast(asyncio.Transport, transport)
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._take(decode(frame))
            if self._frames.error is not None:
                raise self._frames.error
        except ProtocolError as error:
            self._abort(f"it does not speak the protocol: {error}")

    def _take(self, command: Command) -> None:
        self._silent_since, self._is_heard = None, True
        if command.is_response:
            future = self._waiting.get(command.opaque)
            if future is not None and not future.done():
                future.set_result(command)
            return
        if self._on_request is not None:
            self._on_request(command)
        answer = self._answers.get(command.code)
        if answer is not None:
            task = asyncio.get_running_loop().create_task(self._answer(command, answer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif not command.is_oneway:
            sentence = f"this client does not answer request {command.code}"
            self._write(reply(command, codes.REQUEST_CODE_NOT_SUPPORTED, remark=sentence))

    async def _answer(self, command: Command, answer: Answer) -> None:
        try:
            answered = await answer(command)
            frame = reply(command, codes.SUCCESS, answered.fields, body=answered.body)
        except PostdateError as error:
            frame = reply(command, codes.SYSTEM_ERROR, remark=str(error))
        if not (command.is_oneway or self.is_lost):
            self._write(frame)

    def connection_lost(self, error: Exception | None) -> None:
        if isinstance(error, ssl.SSLError):
            self._reason = f"the connection was lost: {reason_of(error)}"
        elif error is not None:
            self._reason = f"the connection was lost: {error}"
        if not (self._is_heard or self._is_ended):
            self._reason += (
                ", before the broker said anything; does that port want TLS, or a certificate of the client?"
            )
        self._lost.set()
        for task in self._answering:
            task.cancel()
        self._writable.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Disconnected(f"{self.address}: {self._reason}"))
        if self._on_lost is not None:
            self._on_lost()

    # -- ending

    def _abort(self, reason: str) -> None:
        self._reason, self._is_ended = reason, True
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Drops the connection; requests in flight end in Disconnected."""
        self._abort("the client was closed")
        await self._lost.wait()


Greet = Callable[[Connection], Awaitable[None]]


class Connections:
    """One connection per address, made when it is first needed and made anew when it was lost.

    `greet` is awaited on every new connection before anybody else gets it. `security` signs what they send, and
    encrypts them.
    """

    def __init__(
        self, *, on_request: OnRequest | None = None, on_lost: OnLost | None = None, greet: Greet | None = None,
        answers: Answers = NO_ANSWERS, security: Security = NO_SECURITY,
    ) -> None:  # fmt: skip
        self._on_request, self._answers, self._on_lost, self._security = on_request, answers, on_lost, security
        self._greet = greet
        self._by_address: dict[Address, Connection] = {}
        self._locks: dict[Address, asyncio.Lock] = {}
        self._closed = False
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None  # the process and the loop that first used it

    def check_owner(self) -> None:
        """Raises UsageError in another event loop, or in a child of the process: nothing here would work there."""
        pid, loop = os.getpid(), asyncio.get_running_loop()
        if self._owner is None:
            self._owner = pid, loop
        elif self._owner[0] != pid:
            raise UsageError(
                f"process {self._owner[0]} made the client, and this is process {pid}, which was forked from it; "
                "make a client in each process"
            )
        elif self._owner[1] is not loop:
            raise UsageError("the client belongs to another event loop; make one for each loop")

    @property
    def alive(self) -> list[Connection]:
        return [connection for connection in self._by_address.values() if not connection.is_lost]

    async def to(self, address: Address, timeout: float) -> Connection:
        """The connection to an address. Raises Unreachable, TimedOut, or what `greet` raises."""
        self.check_owner()
        connection = self._by_address.get(address)
        if connection is not None and not connection.is_lost:
            return connection
        return await within(timeout, self._reach(address), f"no connection to {address}")

    async def _reach(self, address: Address) -> Connection:
        async with self._locks.setdefault(address, asyncio.Lock()):
            connection = self._by_address.get(address)
            if connection is None or connection.is_lost:
                self._by_address[address] = await self._connect(address)
                if connection is not None:
                    log.info("connected to %s again", address)
                connection = self._by_address[address]
            return connection

    async def _connect(self, address: Address) -> Connection:
        if self._closed:
            raise UsageError("the client is closed")
        loop, tls = asyncio.get_running_loop(), self._security.tls

        def make() -> Connection:
            return Connection(address, self._on_request, self._on_lost, self._answers, self._security)

        try:
            if address.is_local:
                _, connection = await loop.create_unix_connection(make, address.host)  # nobody else can read it
            else:
                _, connection = await loop.create_connection(make, address.host, address.port, ssl=tls)
        except (OSError, UnicodeError) as error:
            raise no_broker_at(address, error, is_tls=tls is not None) from error
        try:
            if self._greet is not None:
                await self._greet(connection)
            if self._closed:
                raise UsageError("the client is closed")
        except BaseException:
            await connection.close()
            raise
        return connection

    async def close(self) -> None:
        self._closed = True
        for connection in list(self._by_address.values()):
            await connection.close()

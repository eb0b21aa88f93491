"""One connection of a client: bytes to frames, frames to the dispatcher, answers back.

A read is handled in one go and answered in one write. The server reads nothing from a client that is:

    paused      it reads its answers more slowly than it asks
    full        too many of its requests wait for the disk
    backlog     requests that were read wait for either of these, or for the turn of other clients
    stopped     the server stops
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

from postdate.config import Limits, Settings
from postdate.errors import ProtocolError
from postdate.server.address import Address
from postdate.server.asker import ANYBODY, Asker
from postdate.server.peer import Peer
from postdate.wire.frame import Command, Frames, decode
from postdate.wire.ids import host_text, id_prefix

OnAnswer = Callable[[Command | None], None]


class Handler(Protocol):
    """What a connection needs of the server. The dispatcher provides it, and says what each call does."""

    @property
    def settings(self) -> Settings: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def address(self) -> Address: ...
    def welcome(self, connection: "Connection") -> bool: ...
    def farewell(self, connection: "Connection") -> None: ...
    def handle(self, connection: "Connection", frames: list[bytes]) -> int: ...
    def note_unfinished(self, size: int) -> None: ...
    def complain(self, text: str, *details: object) -> None: ...


class Connection(Peer):
    """One client. The listening socket makes one for each client that connects."""

    takes_questions = True  # whether it can be sent requests of ours

    def __init__(self, handler: Handler, is_broker_port: bool = False) -> None:
        super().__init__()
        self._handler = handler
        self.is_broker_port = is_broker_port  # what is internal comes on this port alone
        self.asker: Asker = ANYBODY  # who sent the request that is being handled
        self.proven: Asker | None = None  # who has signed the call that the request is part of, where calls are signed
        self.admitted: dict[
            Hashable, int
        ] = {}  # what this client may do, by the version of the users it was decided for
        self._watched: dict[int, OnAnswer] = {}  # by opaque
        limits = handler.limits
        self._write_buffer_bytes_max = limits.write_buffer_bytes_max
        self._frames = Frames(handler.settings.frame_bytes_max)
        self._in_flight_max = limits.in_flight_max
        self._backlog: deque[bytes] = deque()  # frames that wait
        self._is_full = False
        self._is_lost = False
        self._is_stopped = False
        self._is_reading = True
        self._is_tls = self._is_turn_over = self._is_stuck = False  # for writing with TLS, as _count_written describes
        self._turn_bytes = 0
        self._note_address(handler.address, "")

    # -- called by the loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.note_transport(transport, self._write_buffer_bytes_max)
        if self.local_address:
            self._note_address(self._handler.address, self.local_address)
        self._is_tls = self.is_tls
        if not self._handler.welcome(self):
            self.close()

    def _note_address(self, address: Address, local_address: str) -> None:
        """Notes how this client reaches the broker: routes, ids and records carry it."""
        self.broker_address = address.text(local_address)
        self.broker_host = address.host(local_address)
        self.id_prefix = id_prefix(self.broker_host).encode()

    def data_received(self, data: bytes) -> None:
        frames = self._frames.feed(data)
        if frames:
            self.is_heard = True
            self._take(frames)
        else:
            self._handler.note_unfinished(len(data))
        if self._frames.error is not None:
            self._fail_if_done(self._frames.error)

    def eof_received(self) -> bool:
        if self._frames.rest_bytes:
            self.fail(ProtocolError("the connection ended within a frame"))
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._backlog.clear()
        watched, self._watched = self._watched, {}
        for end in watched.values():
            end(None)
        self._handler.farewell(self)

    def pause_writing(self) -> None:
        self.is_paused = self._is_stuck = True
        self.paused_at_ns = None
        self._read_or_not()

    def resume_writing(self) -> None:
        self._is_stuck = False
        if not self._is_turn_over:
            self.is_paused = False
            self._go_on()

    # -- requests -----------------------------------------------------------------------------------------------

    def _take(self, frames: list[bytes]) -> None:
        """Handles frames; those that must wait go into the backlog."""
        if self.is_paused or self._backlog:
            self._backlog.extend(frames)
            return
        handled = self._handler.handle(self, frames)
        if handled < len(frames) and self.is_open:
            self._backlog.extend(frames[handled:])
            self._read_or_not()
            if not self.is_paused:  # it goes on after the turn of others
                asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Handles the backlog, when the client reads again or others have had their turn."""
        if self._is_stopped or self.is_paused:
            return
        backlog, self._backlog = self._backlog, deque()
        if backlog and self.is_open:
            self._take(list(backlog))
        if self._frames.error is not None:
            self._fail_if_done(self._frames.error)
        self._read_or_not()

    def _fail_if_done(self, error: ProtocolError) -> None:
        """Ends the connection when all frames before the unreadable bytes are handled."""
        if not self._backlog:
            self.fail(error)

    def _read_or_not(self) -> None:
        reads = not (self.is_paused or self._is_full or self._is_stopped or self._backlog)
        if reads != self._is_reading and self._transport is not None and self.is_open:
            self._is_reading = reads
            (self._transport.resume_reading if reads else self._transport.pause_reading)()

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # -- called by the server -----------------------------------------------------------------------------------

    def expect(self, count: int) -> None:
        """Counts requests whose answers wait for the disk."""
        self.in_flight += count
        if self.in_flight >= self._in_flight_max:
            self._is_full = True
            self._read_or_not()

    def count_answered(self, count: int) -> None:
        """Counts answers to such requests."""
        self.in_flight -= count
        if self._is_full and self.in_flight * 2 <= self._in_flight_max:
            self._is_full = False
            self._read_or_not()

    def write(self, data: bytes) -> None:
        if self._watched:
            self._look_for_answers(data)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
            if self._is_tls:
                self._count_written(len(data))

    def _count_written(self, size: int) -> None:
        """With TLS the event loop notices only after this turn that the client does not read: until then it would take
        any number of answers. So a turn is over when it has written what we hold for a client.
        """
        if not self._turn_bytes:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._turn_bytes += size
        if self._turn_bytes > self._write_buffer_bytes_max and not self.is_paused:
            self.is_paused = self._is_turn_over = True
            self._read_or_not()

    def _begin_turn(self) -> None:
        self._turn_bytes = 0
        if self._is_turn_over:
            self._is_turn_over = False
            if not self._is_stuck:
                self.is_paused = False
                self._go_on()

    def watch(self, opaque: int, end: OnAnswer) -> None:
        """Calls `end` with the answer to a request when it is written; with None if the connection ends before."""
        before = self._watched.pop(opaque, None)
        if before is not None:
            before(None)
        self._watched[opaque] = end

    def _look_for_answers(self, data: bytes) -> None:
        for frame in Frames(len(data)).feed(data):
            answer = decode(frame)
            if answer.is_response and answer.opaque in self._watched:
                self._watched.pop(answer.opaque)(answer)

    def notify(self, notice: bytes) -> None:
        """Writes a notice, unless the client does not read: notices must not pile up, and clients also ask."""
        if not self.is_paused:
            self.write(notice)

    @property
    def buffered_bytes(self) -> int:
        """Memory for this client: an unfinished frame, frames that wait, answers that it has not read."""
        waiting = sum(map(len, self._backlog)) if self._backlog else 0
        return self._frames.rest_bytes + waiting + super().buffered_bytes

    def fail(self, error: ProtocolError) -> None:
        """Ends the connection of a peer that does not speak our protocol, with one line in the log."""
        self._backlog.clear()
        if self.is_open:
            self._handler.complain("closing the connection of %s: %s", host_text(self.host), error)
            self.close()

    def stop_reading(self) -> None:
        """Takes no more requests; earlier ones are still answered."""
        self._is_stopped = True
        self._read_or_not()

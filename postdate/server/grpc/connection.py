"""One connection of the gRPC port: bytes to calls, calls to the service, answers back.

The calls of a read are handled together, and so become one batch of the log. Answers of one turn of the event loop are
one write.
"""

import asyncio
from typing import Protocol

from postdate.config import Limits, Settings
from postdate.server.grpc.call import Call, Method
from postdate.server.peer import Peer
from postdate.wire.grpc import (
    UNAVAILABLE,
    UNIMPLEMENTED,
    CallCancelled,
    CallHalfClosed,
    CallStarted,
    Grpc,
    MessageReceived,
)


class CallHandler(Protocol):
    """What a connection needs of the service."""

    @property
    def settings(self) -> Settings: ...
    @property
    def limits(self) -> Limits: ...
    def welcome(self, connection: Peer) -> bool: ...
    def farewell(self, connection: Peer) -> None: ...
    def complain(self, text: str, *details: object) -> None: ...
    def find_method(self, path: str) -> Method | None: ...
    def begin(self, connection: Peer, call: Call) -> None: ...
    def take(self, call: Call, message: bytes) -> None: ...
    def handle_collected(self) -> None: ...
    def pause(self, connection: Peer) -> None: ...
    def resume(self, connection: Peer) -> None: ...


class GrpcConnection(Peer):
    """One HTTP/2 connection with its calls."""

    def __init__(self, handler: CallHandler) -> None:
        super().__init__()
        self._handler = handler
        self._grpc = Grpc(handler.settings.frame_bytes_max)
        self.read_count = 0
        self._calls: dict[int, Call] = {}  # that are not over, by the number of their stream
        self._waiting_bytes_max = handler.limits.write_buffer_bytes_max
        self._is_stuck = False  # whether the transport takes no more
        self._loop = asyncio.get_running_loop()
        self._is_write_due = False
        self._is_stopped = False
        self._is_lost = False

    # -- called by the loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.note_transport(transport, self._handler.limits.write_buffer_bytes_max)
        if not self._handler.welcome(self):
            self.close()

    def data_received(self, data: bytes) -> None:
        self.read_count += 1
        for event in self._grpc.receive(data):
            self.is_heard = True
            if isinstance(event, MessageReceived):
                self._take(event.stream_id, event.message)
            elif isinstance(event, CallStarted):
                self._begin(event)
            elif isinstance(event, CallHalfClosed):
                self._take_half_close(event.stream_id)
            else:
                assert isinstance(event, CallCancelled), event
                self._drop(event.stream_id)
        self._handler.handle_collected()
        self._write_out()

    def _begin(self, started: CallStarted) -> None:
        method = self._handler.find_method(started.path)
        if method is None:
            self._grpc.end(started.stream_id, UNIMPLEMENTED, f"there is no method {started.path[:200]}")
            return
        if self._is_stopped:
            self._grpc.end(started.stream_id, UNAVAILABLE, "the broker stops")
            return
        call = Call(self, started.stream_id, method, started.headers, started.timeout_ms)
        self._calls[started.stream_id] = call
        self.held_count += not method.is_open_ended  # for the sweep: those wait for ever, and keep nobody alive
        self._handler.begin(self, call)

    def _take(self, stream_id: int, message: bytes) -> None:
        call = self._calls.get(stream_id)
        if call is None:
            return
        if call.is_asked and not call.method.is_open_ended:
            self._end(call, UNIMPLEMENTED, f"{call.method.name} takes one message, and a second one has come")
            return
        call.is_asked = True
        self._handler.take(call, message)

    def _take_half_close(self, stream_id: int) -> None:
        """A client says no more: an open-ended call is over with that."""
        call = self._calls.get(stream_id)
        if call is None:
            return
        if call.method.is_open_ended:
            self._end(call)
        elif not call.is_asked:
            self._end(call, UNIMPLEMENTED, f"{call.method.name} takes one message, and none has come")

    def connection_lost(self, _error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        for stream_id in list(self._calls):
            self._drop(stream_id)
        self._handler.farewell(self)

    def pause_writing(self) -> None:
        self._is_stuck = True
        self._read_or_not()
        self._pause_or_resume()

    def resume_writing(self) -> None:
        self._is_stuck = False
        self._read_or_not()
        self._pause_or_resume()

    def _read_or_not(self) -> None:
        """Reads nothing while the transport is stuck. A client that keeps its windows closed is read on: it opens them
        by what it sends.
        """
        if self._transport is not None and self.is_open:
            (self._transport.pause_reading if self._is_stuck else self._transport.resume_reading)()

    def _pause_or_resume(self) -> None:
        is_paused = self._is_stuck or self._grpc.waiting_bytes > self._waiting_bytes_max
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        if is_paused:
            self.paused_at_ns = None
            self._handler.pause(self)
        else:
            self._handler.resume(self)

    # -- answers ------------------------------------------------------------------------------------------------

    def answer(self, stream_id: int, message: bytes) -> None:
        self._forget(stream_id)
        self._grpc.answer(stream_id, message)
        self._write_soon()

    def begin(self, stream_id: int) -> None:
        self._grpc.begin(stream_id)
        self._write_soon()

    def send(self, stream_id: int, message: bytes) -> None:
        self._grpc.send(stream_id, message)
        self._write_soon()

    def end(self, stream_id: int, status: int = 0, text: str = "") -> None:
        self._forget(stream_id)
        self._grpc.end(stream_id, status, text)
        self._write_soon()

    def _write_soon(self) -> None:
        if not self._is_write_due:
            self._is_write_due = True
            self._loop.call_soon(self._write_out)

    def _write_out(self) -> None:
        self._is_write_due = False
        output = self._grpc.take_output()
        if output and self._transport is not None and self.is_open:
            self._transport.write(output)
        self._pause_or_resume()
        if self._grpc.is_over and self.is_open:
            if self._grpc.error:
                self._handler.complain("closing the connection of %s: %s", self, self._grpc.error)
            self.close()

    # -- the end of calls ---------------------------------------------------------------------------------------

    def _drop(self, stream_id: int) -> None:
        """The client has given a call up."""
        call = self._calls.get(stream_id)
        if call is None:
            return
        call.is_over = True
        self._forget(stream_id)
        if call.on_end is not None:
            call.on_end()

    def _end(self, call: Call, status: int = 0, text: str = "") -> None:
        """Ends a call that nobody has answered."""
        call.end(status, text)
        if call.on_end is not None:
            call.on_end()

    def _forget(self, stream_id: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is not None:
            self.held_count -= not call.method.is_open_ended

    @property
    def buffered_bytes(self) -> int:
        return self._grpc.waiting_bytes + super().buffered_bytes

    # -- the end ------------------------------------------------------------------------------------------------

    def stop_reading(self) -> None:
        """Takes no more calls; earlier ones are still answered."""
        self._is_stopped = True
        self._grpc.shut_down()
        self._write_soon()

    def close(self) -> None:
        for call in list(self._calls.values()):
            self._end(call, UNAVAILABLE, "the broker stops" if self._is_stopped else "the connection ends")
        output = self._grpc.take_output()
        if output and self._transport is not None and self.is_open:
            self._transport.write(output)
        super().close()

"""One call over gRPC: what is asked, by whom, and how it is answered."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from postdate.server.asker import ANYBODY, Asker
from postdate.server.grpc.client import GrpcClient


class Stream(Protocol):
    """How a call's connection takes its answers. Those to a call that is over are dropped."""

    read_count: int  # how often something of the client has come

    def answer(self, stream_id: int, message: bytes) -> None: ...
    def begin(self, stream_id: int) -> None: ...
    def send(self, stream_id: int, message: bytes) -> None: ...
    def end(self, stream_id: int, status: int = 0, text: str = "") -> None: ...


class Call:
    """A call from its first bytes to its end."""

    __slots__ = (
        "asker", "client", "headers", "is_asked", "is_over", "method", "on_end", "stream", "stream_id", "timeout_ms",
    )  # fmt: skip

    client: GrpcClient  # from when it is known who calls

    def __init__(
        self, stream: Stream, stream_id: int, method: "Method", headers: Mapping[str, str], timeout_ms: int | None
    ) -> None:
        self.stream, self.stream_id, self.method = stream, stream_id, method
        self.headers, self.timeout_ms = headers, timeout_ms
        self.asker: Asker = ANYBODY
        self.is_asked = False  # whether a message of it has come
        self.is_over = False
        self.on_end: Callable[[], None] | None = None  # the client has given up, or is gone

    def answer(self, **fields: Any) -> None:
        """Answers the call with the one message that it has."""
        if not self.is_over:
            self.is_over = True
            self.stream.answer(self.stream_id, self.method.answer(**fields).SerializeToString())

    def begin(self) -> None:
        """Sends the headers of the answer, for which some clients wait before they say anything."""
        if not self.is_over:
            self.stream.begin(self.stream_id)

    def send(self, **fields: Any) -> None:
        """Sends one message of an answer that has many."""
        if not self.is_over:
            self.stream.send(self.stream_id, self.method.answer(**fields).SerializeToString())

    def end(self, status: int = 0, text: str = "") -> None:
        """Ends a stream, with a status of gRPC."""
        if not self.is_over:
            self.is_over = True
            self.stream.end(self.stream_id, status, text)


class Method:
    """A method of the service: its messages, and who handles it."""

    __slots__ = ("answer", "handle", "is_open_ended", "name", "request")

    def __init__(
        self, name: str, request: Any, answer: Any, handle: Callable[[Call, Any], None], *, is_open_ended: bool = False
    ) -> None:
        self.name, self.request, self.answer, self.handle = name, request, answer, handle
        self.is_open_ended = is_open_ended  # whether a client sends many messages, as long as it lives

"""A server of gRPC that echoes, on `postdate.wire.grpc` alone: for its tests, and to be probed by h2spec.

    python -m tests.support.grpc_echo [--cert FILE --key FILE]

It prints its port and serves until its input ends. Paths:

- /echo/Unary    one message, answered by itself
- /echo/Stream   each message is answered at once, the end by status 0
- /echo/Fail     status 9 with a text that needs encoding
- everything else has status 12
"""

import argparse
import asyncio
import ssl
import sys

from postdate.wire.grpc import (
    FAILED_PRECONDITION,
    UNIMPLEMENTED,
    CallCancelled,
    CallHalfClosed,
    CallStarted,
    Grpc,
    GrpcEvent,
    MessageReceived,
)
from postdate.wire.http2 import BOUNDS, Bounds

MESSAGE_BYTES_MAX = 4 << 20
FAILURE = "nothing doing: 100 % späť\n"


class Echo(asyncio.Protocol):
    """One connection. It is among those of its server until it is lost."""

    def __init__(self, others: "set[Echo] | None" = None, bounds: Bounds = BOUNDS) -> None:
        self._others: set[Echo] = set() if others is None else others
        self._is_lost = asyncio.get_running_loop().create_future()
        self._grpc = Grpc(MESSAGE_BYTES_MAX, bounds)
        self._paths: dict[int, str] = {}
        self._messages: dict[int, bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._others.add(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._others.discard(self)
        self._is_lost.set_result(None)

    async def abort(self) -> None:
        self._transport.abort()
        await self._is_lost

    def data_received(self, data: bytes) -> None:
        for event in self._grpc.receive(data):
            self._serve(event)
        self._transport.write(self._grpc.take_output())
        if self._grpc.is_over:
            self._transport.close()

    def _serve(self, event: GrpcEvent) -> None:
        grpc, stream_id = self._grpc, event.stream_id
        match event:
            case CallStarted():
                self._paths[stream_id] = event.path
                if event.path == "/echo/Stream":
                    grpc.begin(stream_id)
            case MessageReceived():
                if self._paths[stream_id] == "/echo/Stream":
                    grpc.send(stream_id, event.message)
                self._messages[stream_id] = event.message
            case CallHalfClosed():
                path, message = self._paths.pop(stream_id), self._messages.pop(stream_id, b"")
                if path == "/echo/Unary":
                    grpc.answer(stream_id, message)
                elif path == "/echo/Stream":
                    grpc.end(stream_id)
                elif path == "/echo/Fail":
                    grpc.end(stream_id, FAILED_PRECONDITION, FAILURE)
                else:
                    grpc.end(stream_id, UNIMPLEMENTED, f"there is no {path}")
            case CallCancelled():
                self._paths.pop(stream_id, None)
                self._messages.pop(stream_id, None)


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    return context


async def _serve_until_input_ends(context: ssl.SSLContext | None) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cert")
    parser.add_argument("--key")
    options = parser.parse_args()
    asyncio.run(_serve_until_input_ends(server_context(options.cert, options.key) if options.cert else None))


if __name__ == "__main__":
    main()

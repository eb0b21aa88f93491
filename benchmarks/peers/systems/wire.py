"""A connection on which many requests are under way at once, for servers whose clients in Python do not have that.

What a protocol looks like is a function from bytes to the complete pieces in front, and the rest.
"""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from benchmarks.peers.systems.server import HOST

ANSWER_S = 600.0  # for what must come; a durable send of many may take long
RECEIVE_BYTES = 1 << 18

Piece = TypeVar("Piece")
Split = Callable[[bytes], tuple[list[Piece], bytes]]


class Wire(Generic[Piece]):
    def __init__(self, port: int, split: Split[Piece]) -> None:
        self._socket = socket.create_connection((HOST, port), ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._split = split
        self._rest = b""
        self._pieces: list[Piece] = []

    def send(self, data: bytes) -> None:
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(data)

    def read(self, limit_s: float) -> list[Piece]:
        """What is complete, after waiting for some of it; nothing where the time is over."""
        until = time.monotonic() + limit_s
        while not self._pieces:
            self._socket.settimeout(max(until - time.monotonic(), 1e-4))
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                break
            if not data:
                raise ConnectionError("the server closed the connection")
            self._pieces, self._rest = self._split(self._rest + data)
        pieces, self._pieces = self._pieces, []
        return pieces

    def read_some(self, count_max: int) -> list[Piece]:
        """One at least: something must come."""
        pieces = self.read(ANSWER_S)
        if not pieces:
            raise TimeoutError(f"no answer within {ANSWER_S:.0f} s")
        self._pieces = pieces[count_max:]
        return pieces[:count_max]

    def read_exactly(self, count: int) -> list[Piece]:
        found: list[Piece] = []
        while len(found) < count:
            found += self.read_some(count - len(found))
        return found

    def ask(self, batches: Iterable[Sequence[bytes]]) -> list[Piece]:
        """One answer for each request. The next batch is on its way while the answers to one are read; not more, or
        both sides could stand, each with full buffers that the other does not read."""
        answers: list[Piece] = []
        waiting = 0
        for batch in batches:
            self.send(b"".join(batch))
            answers += self.read_exactly(waiting)
            waiting = len(batch)
        return answers + self.read_exactly(waiting)

    def close(self) -> None:
        self._socket.close()

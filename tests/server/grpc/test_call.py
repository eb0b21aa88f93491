"""One call: what goes out, and that nothing does after its end."""

from typing import Any

from postdate.server.grpc.call import Call, Method
from postdate.wire.messaging import MESSAGES, requests_of


class Written:
    """Keeps what a call says."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.read_count = 0

    def answer(self, stream_id: int, message: bytes) -> None:
        self.said.append(("answer", stream_id, message))

    def begin(self, stream_id: int) -> None:
        self.said.append(("begin", stream_id))

    def send(self, stream_id: int, message: bytes) -> None:
        self.said.append(("send", stream_id, message))

    def end(self, stream_id: int, status: int = 0, text: str = "") -> None:
        self.said.append(("end", stream_id, status, text))


def call_of(name: str) -> tuple[Call, Written]:
    written = Written()
    method = Method(name, *requests_of(name), lambda *_: None)
    return Call(written, 7, method, {}, None), written


def test_a_call_is_answered_once() -> None:
    call, written = call_of("Heartbeat")
    call.answer(status={"code": 20_000})
    call.answer(status={"code": 50_001})
    call.end(14, "too late")
    message = MESSAGES["HeartbeatResponse"](status={"code": 20_000}).SerializeToString()
    assert written.said == [("answer", 7, message)]


def test_a_stream_says_many_things_and_nothing_after_its_end() -> None:
    call, written = call_of("ReceiveMessage")
    call.begin()
    call.send(status={"code": 20_000})
    call.end(0)
    call.send(status={"code": 20_000})
    call.begin()
    call.end(14, "again")
    assert [each[0] for each in written.said] == ["begin", "send", "end"]
    assert written.said[-1] == ("end", 7, 0, "")

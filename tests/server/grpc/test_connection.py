"""Connections of the gRPC port: TLS and plaintext, calls that break the rules, peers that do not read, stops.

Where a client of the usual kind cannot misbehave, the test speaks HTTP/2 itself, by the library h2.
"""

import logging
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from postdate.access.certificates import LOCAL_FOLDER
from postdate.server import Server
from postdate.server.grpc.connection import GrpcConnection
from postdate.tls import CERTIFICATE_FILE
from postdate.wire import messaging
from postdate.wire.messaging import MESSAGES, SERVICE_PATH
from postdate.wire.translation import of_ms
from tests.support.bulk import wait_until
from tests.support.certificates import Pair
from tests.support.core import T0
from tests.support.grpc_client import GROUP, calling, read, serving_grpc
from tests.support.peer import Closed, Gate, connected, make_topic, sent
from tests.support.server import WAIT_S, Served, secured, serving

UNAVAILABLE, UNIMPLEMENTED = "14", "12"


def grpc_connections(served: Served) -> list[GrpcConnection]:
    return served.call(lambda: [each for each in served.dispatcher.connections if isinstance(each, GrpcConnection)])


class RawPeer:
    """A client that says each frame when a test wants it to."""

    def __init__(self, served: Served, window_bytes: int | None = None) -> None:
        address = served.server.grpc_address
        assert address is not None
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)  # what it does not read fills soon
        self.socket.settimeout(WAIT_S)
        self.socket.connect(("127.0.0.1", int(address.rpartition(":")[2])))
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        if window_bytes is not None:
            window = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window_bytes}
            self.h2.local_settings = h2.settings.Settings(client=True, initial_values=window)
        self.ends: dict[int, dict[str, str]] = {}  # the last fields of streams, as far as they have come
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.socket.sendall(self.h2.data_to_send())

    def begin(self, method: str, client_id: str = "raw") -> int:
        stream_id = self.h2.get_next_available_stream_id()
        headers = [
            (":method", "POST"), (":scheme", "http"), (":path", SERVICE_PATH + method), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"), ("x-mq-client-id", client_id),
        ]  # fmt: skip
        self.h2.send_headers(stream_id, headers)
        return stream_id

    def say(self, stream_id: int, message: Any, *, end: bool = False) -> None:
        data = message.SerializeToString()
        self.h2.send_data(stream_id, b"\0" + len(data).to_bytes(4, "big") + data, end_stream=end)

    def read_end(self, stream_id: int) -> dict[str, str]:
        """Reads up to the end of a stream; returns its last fields."""
        while stream_id not in self.ends:
            data = self.socket.recv(65_536)
            if not data:
                raise Closed
            for event in self.h2.receive_data(data):
                if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                    fields: dict[Any, Any] = dict(event.headers)
                    if "grpc-status" in fields and event.stream_id is not None:
                        self.ends[event.stream_id] = fields  # several may come at once
            self.flush()
        return self.ends[stream_id]


@contextmanager
def raw(served: Served, window_bytes: int | None = None) -> Iterator[RawPeer]:
    peer = RawPeer(served, window_bytes)
    try:
        yield peer
    finally:
        peer.socket.close()


def receive_request(**more: Any) -> Any:
    return MESSAGES["ReceiveMessageRequest"](
        group={"name": GROUP}, message_queue={"topic": {"name": "orders"}}, batch_size=32, auto_renew=True,
        long_polling_timeout=of_ms(20_000), **more,
    )  # fmt: skip


# -- TLS ------------------------------------------------------------------------------------------------------------


def local_certificate(served: Served, folder: Path) -> Path:
    """The certificate for this machine, which is made while the broker serves already: a handshake waits for it."""
    assert served.server.grpc_address is not None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = int(served.server.grpc_address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as plain, context.wrap_socket(plain):
        return folder / LOCAL_FOLDER / CERTIFICATE_FILE


def test_one_port_takes_tls_and_plaintext(tmp_path: Path) -> None:
    with (
        serving(tmp_path, has_access=True, grpc_port=0) as served, calling(served, "plain") as plain,
        calling(served, "tls", ca=local_certificate(served, tmp_path).read_bytes()) as secure,
    ):  # fmt: skip
        plain.sent("orders", "work")
        assert secure.receive().bodies == ["work"]
        wait_until(lambda: len(grpc_connections(served)) == 2)
        assert sorted(each.is_tls for each in grpc_connections(served)) == [False, True]


def test_the_certificate_of_this_machine_is_made_once(tmp_path: Path) -> None:
    with serving(tmp_path, has_access=True, grpc_port=0) as served:
        path = local_certificate(served, tmp_path)
        made = path.read_bytes()
    with serving(tmp_path, has_access=True, grpc_port=0) as served, calling(served, ca=made) as client:
        client.round_trip()
    assert path.read_bytes() == made
    assert path.parent.stat().st_mode & 0o77 == 0, "nobody else reads its key"


def test_a_client_of_tls_is_offered_http2(tmp_path: Path) -> None:
    with serving(tmp_path, has_access=True, grpc_port=0) as served:
        assert served.server.grpc_address is not None
        context = ssl.create_default_context(cafile=local_certificate(served, tmp_path))
        context.set_alpn_protocols(["http/1.1", "h2"])
        port = int(served.server.grpc_address.rpartition(":")[2])
        with (
            socket.create_connection(("127.0.0.1", port), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            assert secure.selected_alpn_protocol() == "h2"


def test_the_certificate_of_the_broker_is_that_of_this_port_too(tmp_path: Path, pair: Pair) -> None:
    with secured(tmp_path, pair, grpc_port=0, has_access=True) as served:
        ca = Path(pair.ca).read_bytes()
        with calling(served, ca=ca) as client:
            client.sent("orders")
        assert not (tmp_path / LOCAL_FOLDER).exists()
        with calling(served) as plain, pytest.raises(grpc.RpcError) as caught:
            plain.round_trip()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_broker_that_takes_both_takes_both_here(tmp_path: Path, pair: Pair) -> None:
    with (
        secured(tmp_path, pair, "permissive", grpc_port=0) as served, calling(served) as plain,
        calling(served, ca=Path(pair.ca).read_bytes()) as secure,
    ):  # fmt: skip
        plain.round_trip()
        secure.round_trip()


@pytest.mark.parametrize(("insecure", "takes_plain"), [(False, False), (True, True)])
def test_a_network_gets_no_plaintext_unless_its_operator_says_so(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch, insecure: bool, takes_plain: bool
) -> None:
    monkeypatch.setattr(sys.modules[Server.__module__], "_is_loopback", lambda _: False)
    with secured(tmp_path, pair, "permissive", insecure=insecure, grpc_port=0) as served:
        with calling(served, ca=Path(pair.ca).read_bytes()) as secure:
            secure.round_trip()
        with calling(served) as plain:
            if takes_plain:
                plain.round_trip()
            else:
                with pytest.raises(grpc.RpcError):
                    plain.round_trip()


# -- calls that break the rules -------------------------------------------------------------------------------------


def test_a_second_message_ends_a_call_that_takes_one(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, raw(served) as peer:
        stream_id = peer.begin("ReceiveMessage")
        peer.say(stream_id, receive_request())
        peer.say(stream_id, receive_request())
        peer.flush()
        found = peer.read_end(stream_id)
        assert found["grpc-status"] == UNIMPLEMENTED
        assert served.call(lambda: served.dispatcher.pulls.held_count) == 0


def test_a_call_without_a_message_is_ended(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, raw(served) as peer:
        stream_id = peer.begin("QueryRoute")
        peer.h2.end_stream(stream_id)
        peer.flush()
        assert peer.read_end(stream_id)["grpc-status"] == UNIMPLEMENTED


def test_a_connection_that_breaks_the_protocol_is_ended_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving_grpc(tmp_path) as served, raw(served) as peer:
        waiting = peer.begin("ReceiveMessage")
        peer.say(waiting, receive_request(), end=True)
        peer.flush()
        wait_until(lambda: served.call(lambda: served.dispatcher.pulls.held_count) == 1)
        with caplog.at_level(logging.WARNING, "postdate.server"):
            peer.socket.sendall(b"\x00\x00\x08\x06\x00\x00\x00\x00\x07" + bytes(8))  # a PING of a stream
            wait_until(lambda: not grpc_connections(served))
        assert len([each for each in caplog.messages if "closing the connection" in each]) == 1
        assert served.call(lambda: served.dispatcher.pulls.held_count) == 0


def test_bytes_that_are_no_http2_end_a_connection(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served:
        assert served.server.grpc_address is not None
        with socket.create_connection(
            ("127.0.0.1", int(served.server.grpc_address.rpartition(":")[2])), WAIT_S
        ) as peer:
            peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while peer.recv(4_096):
                pass


# -- calls that wait ------------------------------------------------------------------------------------------------


def test_calls_that_wait_are_counted_for_the_sweep_and_open_streams_are_not(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        waiting = [client.begin_receive() for _ in range(3)]
        telemetry = client.telemetry()
        telemetry.say(client_type=messaging.PRODUCER, publishing={"topics": [{"name": "orders"}]})
        client.round_trip()
        (connection,) = grpc_connections(served)
        assert (connection.held_count, len(connection._calls)) == (3, 4)
        for stream in waiting:
            stream.cancel()
        telemetry.end()
        wait_until(lambda: not connection._calls)
        assert connection.held_count == 0


def test_a_silent_connection_ends_though_its_stream_is_open(tmp_path: Path) -> None:
    with serving_grpc(tmp_path, idle_ms_max=60_000) as served, calling(served) as client:
        telemetry = client.telemetry()
        telemetry.say(client_type=messaging.PRODUCER, publishing={"topics": [{"name": "orders"}]})

        def sweep() -> None:
            list(served.dispatcher.connections.sweep())

        served.call(sweep)
        served.pass_ms(59_999)
        served.call(sweep)
        assert len(grpc_connections(served)) == 1
        served.pass_ms(60_001)
        served.call(sweep)
        assert telemetry.read_end()[0] is grpc.StatusCode.UNAVAILABLE


# -- peers that do not read -----------------------------------------------------------------------------------------


def test_a_peer_that_opens_no_window_is_given_nothing_more_and_cut_off(tmp_path: Path) -> None:
    with (
        serving_grpc(tmp_path, write_buffer_bytes_max=100_000, stalled_ms_max=5_000) as served,
        connected(served) as old, raw(served, window_bytes=0) as peer,
    ):  # fmt: skip
        make_topic(old, "orders", 1)
        for number in range(20):
            sent(old, "orders", bytes([number]) * 60_000)
        for _ in range(10):
            stream_id = peer.begin("ReceiveMessage")
            peer.say(stream_id, receive_request(), end=True)
        peer.flush()
        (connection,) = grpc_connections(served)
        wait_until(lambda: connection.is_paused)
        for _ in range(50):
            sent(old, "orders", bytes(60_000))
        served.settle()
        assert served.call(lambda: len(served.broker.fold.leases.by_key)) == 20, "what came since is for others"

        def sweep() -> None:
            list(served.dispatcher.connections.sweep())

        served.call(sweep)
        served.pass_ms(5_000)
        served.call(sweep)
        wait_until(lambda: not grpc_connections(served))


def test_a_peer_whose_window_was_closed_is_given_more_when_it_opens_it(tmp_path: Path) -> None:
    with (
        serving_grpc(tmp_path, write_buffer_bytes_max=10_000) as served, connected(served) as old,
        raw(served, window_bytes=0) as peer, calling(served, "other") as other,
    ):  # fmt: skip
        make_topic(old, "orders", 1)
        sent(old, "orders", bytes(20_000))
        first = peer.begin("ReceiveMessage")
        peer.say(first, receive_request(), end=True)
        peer.flush()
        port = peer.socket.getsockname()[1]
        connection = next(each for each in grpc_connections(served) if each.host.port == port)
        wait_until(lambda: connection.is_paused)
        second = peer.begin("ReceiveMessage")
        peer.say(second, receive_request(), end=True)
        peer.flush()
        wait_until(lambda: served.call(lambda: served.dispatcher.pulls.held_count) == 1)
        other.sent("orders", "more")
        served.settle()
        assert served.call(lambda: served.dispatcher.pulls.held_count) == 1, "it waits, though there is something"
        peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        peer.flush()
        assert peer.read_end(first)["grpc-status"] == "0"
        assert peer.read_end(second)["grpc-status"] == "0"


def test_a_client_that_does_not_take_its_bytes_is_not_read_from(tmp_path: Path) -> None:
    with (
        serving_grpc(tmp_path, write_buffer_bytes_max=10_000) as served, connected(served) as old,
        raw(served) as peer,
    ):  # fmt: skip
        make_topic(old, "orders", 1)
        peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        peer.h2.increment_flow_control_window(1 << 30)
        body = bytes(200_000)
        for _ in range(50):
            sent(old, "orders", body)
            stream_id = peer.begin("ReceiveMessage")
            peer.say(stream_id, receive_request(), end=True)
            peer.flush()
        (connection,) = grpc_connections(served)
        wait_until(lambda: connection.is_paused)
        assert peer.read_end(stream_id)["grpc-status"] == "0", "it goes on when the client reads"
        wait_until(lambda: not connection.is_paused)


# -- stops ----------------------------------------------------------------------------------------------------------


def test_a_stop_ends_streams_and_answers_what_is_under_way(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving_grpc(tmp_path, disk=gate.disk) as served, calling(served) as client:
        client.sent("orders")
        client.receive()
        telemetry = client.telemetry()
        telemetry.say(client_type=messaging.PRODUCER, publishing={"topics": [{"name": "orders"}]})
        waiting = client.begin_receive()
        client.round_trip()
        gate.hold()
        future = client.begin("SendMessage", messages=[MESSAGES["Message"](
            topic={"name": "orders"}, body=b"last", system_properties={"message_id": "01", "born_timestamp": of_ms(T0)},
        )])  # fmt: skip
        gate.wait_for_flush()
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        gate.open()
        assert future.result().status.code == messaging.OK
        assert read(waiting).code in (messaging.NO_MESSAGE, messaging.OK)
        code, text = telemetry.read_end()
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the broker stops")
        stopping.join(WAIT_S)


def test_a_broker_that_was_killed_is_found_again_by_its_clients(tmp_path: Path) -> None:
    with serving_grpc(tmp_path) as served, calling(served) as client:
        client.sent("orders", "kept")
        port = int(str(served.server.grpc_address).rpartition(":")[2])
        waiting = client.begin_receive("bills")
        client.round_trip()
        served.kill()
        with pytest.raises(grpc.RpcError) as caught:
            read(waiting)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with serving(tmp_path, grpc_port=port) as again, calling(again) as found:
            assert found.receive().bodies == ["kept"]

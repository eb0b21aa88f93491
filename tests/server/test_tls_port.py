"""TLS on the broker's ports: who speaks how, certificates and their renewal, and peers that begin and do not go on."""

import logging
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from postdate.server.serve import Server
from postdate.tls import Renewed, client_context
from postdate.wire.requests import Request
from tests.support.certificates import Authority, Pair
from tests.support.peer import Closed, Peer, connected, make_topic, pull_command, read_bodies, sent
from tests.support.server import WAIT_S, Served, secured

HELLO = b"\x16\x03\x01"  # how every TLS connection begins
permissive = partial(secured, tls="permissive")


@contextmanager
def speaking(served: Served, pair: Pair, **how: Any) -> Iterator[Peer]:
    """A peer of the broker port that speaks TLS."""
    context = client_context(ca_file=pair.ca, **how)
    with connected(served) as peer:
        peer.socket = context.wrap_socket(peer.socket, server_hostname="localhost")
        yield peer


def port_of(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


def raw(served: Served) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", served.port), WAIT_S)
    found.settimeout(WAIT_S)
    return found


def serial(peer: Peer) -> Any:
    assert isinstance(peer.socket, ssl.SSLSocket)
    certificate = peer.socket.getpeercert()
    assert certificate is not None
    return certificate["serialNumber"]


def certificate_of(server: Server) -> Renewed:
    assert server._certificate is not None
    return server._certificate


def arriving_count(served: Served) -> int:
    return served.call(lambda: served.dispatcher.connections._reserved_count)


# -- who speaks how


@pytest.mark.parametrize("tls", ["permissive", "enforcing"])
def test_a_client_speaks_tls_on_every_port(tmp_path: Path, pair: Pair, tls: str) -> None:
    with secured(tmp_path, pair, tls) as served:
        server = served.server
        for port in map(port_of, (server.route_address, server.broker_address, server.vip_address)):
            with connected(served, port=port) as peer:
                peer.socket = client_context(ca_file=pair.ca).wrap_socket(peer.socket, server_hostname="localhost")
                sent(peer, "orders", "x" * 100_000)
        with speaking(served, pair) as peer:
            assert read_bodies(peer, "orders") == ["x" * 100_000] * 3


def test_plain_clients_are_served_beside_others_where_tls_is_permissive(tmp_path: Path, pair: Pair) -> None:
    with permissive(tmp_path, pair) as served, connected(served) as plain, speaking(served, pair) as peer:
        sent(plain, "orders", "plain")
        sent(peer, "orders", "encrypted")
        assert sorted(read_bodies(plain, "orders")) == ["encrypted", "plain"]


def test_a_plain_client_is_closed_with_a_line_where_tls_is_enforcing(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with secured(tmp_path, pair, "enforcing") as served:
        with connected(served) as plain:
            plain.say(Request.GET_BROKER_CONFIG)
            plain.expect_closed()
        with speaking(served, pair) as peer:
            sent(peer, "orders", "all is well")
    assert "it does not speak TLS, and this port takes nothing else" in caplog.text


def test_old_versions_of_tls_are_refused(tmp_path: Path, pair: Pair) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(pair.ca)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with permissive(tmp_path, pair) as served, raw(served) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname="localhost")


def test_what_renegotiates_is_ended_and_others_are_served(tmp_path: Path, pair: Pair) -> None:
    with permissive(tmp_path, pair) as served:
        done = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{served.port}", "-tls1_2", "-CAfile", pair.ca],
            input="R\n" * 3, capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert "Verify return code: 0 (ok)" in done.stdout
        assert "no renegotiation" in done.stderr
        with speaking(served, pair) as peer:
            sent(peer, "orders", "all is well")


def test_a_stop_lets_tls_clients_read_their_answers(tmp_path: Path, pair: Pair) -> None:
    with permissive(tmp_path, pair) as served, speaking(served, pair) as peer, raw(served) as half:
        half.sendall(HELLO)
        sent(peer, "orders", "the last")
        served.stop()
        peer.expect_closed()


def test_a_tls_client_that_does_not_read_its_answers_is_not_read_from_further(tmp_path: Path, pair: Pair) -> None:
    with permissive(tmp_path, pair, write_buffer_bytes_max=1 << 20) as served, connected(served) as other:
        make_topic(other, "orders")
        sent(other, "orders", bytes(900_000))
        with speaking(served, pair) as slow:
            pulls = [pull_command(slow, "orders") for _ in range(64)]
            slow.write(*pulls)
            while not served.call(lambda: any(each.is_paused for each in served.dispatcher.connections)):
                pass
            connection = served.call(lambda: next(each for each in served.connections() if each.is_paused))
            # The first ones fill what the system and we hold for a client; the rest waits, and takes no memory: all
            # answers together have 58 MB.
            assert served.call(lambda: len(connection._backlog)) > 0
            assert served.call(lambda: connection.buffered_bytes) < 4 << 20
            assert served.call(lambda: connection.buffered_bytes) < 4 << 20
            sent(other, "orders", "others are served meanwhile")
            answers = [slow.next_answer() for _ in pulls]
            assert [answer.opaque for answer in answers] == [each.opaque for each in pulls]
            slow.expect_no_more()


# -- certificates


def test_a_renewed_certificate_is_shown_to_new_connections(tmp_path: Path, authority: Authority) -> None:
    files = authority.sign("renewed")
    with permissive(tmp_path, files) as served, speaking(served, files) as old:
        before = serial(old)
        authority.sign("renewed")
        assert served.call(certificate_of(served.server).look)
        assert not served.call(certificate_of(served.server).look)
        with speaking(served, files) as new:
            assert serial(new) != before
            sent(new, "orders", "new")
        sent(old, "orders", "old")
        assert sorted(read_bodies(old, "orders")) == ["new", "old"]


def test_files_that_do_not_belong_together_leave_the_old_certificate_in_place(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files, other = authority.sign("torn"), authority.sign("other")
    with permissive(tmp_path, files) as served:
        shutil.copy(other.certificate, files.certificate)
        for _ in range(3):
            served.call(certificate_of(served.server).look)
        with speaking(served, files) as peer:
            sent(peer, "orders", "all is well")
        assert caplog.text.count("the certificate stays as it was") == 1
        assert "key values mismatch" in caplog.text
        shutil.copy(other.key, files.key)
        assert served.call(certificate_of(served.server).look)


def test_a_client_is_named_by_its_certificate(tmp_path: Path, authority: Authority, pair: Pair) -> None:
    alice = authority.sign("alice", "alice")
    how = {"tls_client_ca": authority.certificate, "tls_client_cert": "optional"}
    with (
        permissive(tmp_path, pair, **how) as served,
        speaking(served, pair, cert_file=alice.certificate, key_file=alice.key) as named,
        speaking(served, pair) as nameless,
    ):
        named.ask(Request.GET_BROKER_CONFIG)
        nameless.ask(Request.GET_BROKER_CONFIG)
        names = served.call(lambda: sorted(each.certificate_name for each in served.dispatcher.connections))
        assert names == ["", "alice"]


def test_a_client_without_a_certificate_is_refused_where_one_is_required(
    tmp_path: Path, authority: Authority, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Authority(tmp_path / "strangers", "strangers").sign("mallory", "alice")
    how = {"tls_client_ca": authority.certificate, "tls_client_cert": "required"}
    with permissive(tmp_path / "data", pair, **how) as served:
        for shown in ({}, {"cert_file": stranger.certificate, "key_file": stranger.key}):
            with pytest.raises((ssl.SSLError, ConnectionError, Closed)), speaking(served, pair, **shown) as peer:
                peer.ask(Request.GET_BROKER_CONFIG)
        alice = authority.sign("alice", "alice")
        with speaking(served, pair, cert_file=alice.certificate, key_file=alice.key) as peer:
            sent(peer, "orders", "all is well")
    assert "its TLS handshake failed" in caplog.text


# -- peers that begin and do not go on


@pytest.mark.parametrize("said", [b"", b"\x16", HELLO, HELLO + b"\x02\x00\x01" + bytes(80)])
def test_who_does_not_finish_is_closed_in_time_and_disturbs_nobody(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    with permissive(tmp_path, pair, handshake_ms_max=300) as served:
        slow = [raw(served) for _ in range(20)]
        for peer in slow:
            peer.sendall(said)
        with speaking(served, pair) as other, connected(served) as plain:
            sent(other, "orders", "encrypted")
            sent(plain, "orders", "plain")
        for peer in slow:
            assert receive(peer) == b""
            peer.close()
        assert arriving_count(served) == 0
        assert served.call(lambda: served.dispatcher.connections._count_of).total() <= 2
    assert "handshake_ms_max: nothing within 0.3 s" in caplog.text


def test_a_hello_that_comes_byte_by_byte_is_no_slower_than_it_is(tmp_path: Path, pair: Pair) -> None:
    """Through a relay that passes on one byte after the other; nothing is polled meanwhile."""
    context = client_context(ca_file=pair.ca)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with permissive(tmp_path, pair) as served, raw(served) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                for byte in outgoing.read():
                    peer.sendall(bytes([byte]))
                incoming.write(peer.recv(65_536))
        assert tls.version() == "TLSv1.3"


@pytest.mark.parametrize(
    "said",
    [
        b"\x16GET / HTTP/1.1\r\n\r\n",
        HELLO + b"\x00\x00" + bytes(50),
        HELLO + b"\xff\xff" + bytes(50),
        HELLO + b"\x00\x28" + bytes(40),
        HELLO + b"\x00\x05" + b"\x01\x00\x00\x01\x03" + bytes(50),
    ],
)
def test_what_only_begins_like_tls_is_closed_with_a_line(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    with permissive(tmp_path, pair) as served:
        with raw(served) as peer:
            peer.sendall(said)
            heard = b""
            while data := receive(peer):
                heard += data
            assert heard[:1] in (b"", b"\x15")  # nothing, or an alert of TLS
        with speaking(served, pair) as other:
            sent(other, "orders", "all is well")
        assert arriving_count(served) == 0
    assert "TLS handshake" in caplog.text
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def receive(peer: socket.socket) -> bytes:
    try:
        return peer.recv(65_536)
    except ConnectionResetError:
        return b""


def test_silent_peers_count_as_connections(tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with permissive(tmp_path, pair, connections_per_address_max=5) as served:
        silent = [raw(served) for _ in range(3)]
        with connected(served) as plain, speaking(served, pair) as peer:
            sent(plain, "orders", "plain")
            sent(peer, "orders", "encrypted")
            with raw(served) as sixth:
                assert receive(sixth) == b""
        for each in silent:
            each.close()
    assert "connections_per_address_max: 127.0.0.1" in caplog.text


def test_many_clients_shake_hands_at_once_and_all_are_served(tmp_path: Path, pair: Pair) -> None:
    count = 60
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with speaking(served, pair) as peer:
                sent(peer, "orders")
        except BaseException as error:
            failed.append(error)

    with permissive(tmp_path, pair, handshakes_max=4, handshakes_per_address_max=2) as served:
        with connected(served) as plain:
            make_topic(plain, "orders")
            threads = [threading.Thread(target=run) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert failed == []
            assert len(read_bodies(plain, "orders")) == count
        assert arriving_count(served) == 0


def test_a_peer_that_looks_and_leaves_causes_no_line(
    tmp_path: Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with permissive(tmp_path, pair) as served:
        raw(served).close()
        with connected(served) as peer:
            sent(peer, "orders")
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []

"""The life of a server: stopping, crashing, starting again, and doing nothing while there is nothing to do."""

import errno
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from postdate.arrival import NEVER
from postdate.clock import ManualClock
from postdate.errors import UsageError
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.core import DAY_MS, FAR_MS, HOUR_MS, T0, FaultyDisk
from tests.support.grpc_client import calling
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    Closed,
    Gate,
    Peer,
    connected,
    got,
    heartbeat,
    make_topic,
    pull,
    pull_command,
    read_bodies,
    send_command,
    sent,
)
from tests.support.server import WAIT_S, Served, serving


def alarm_at_ms(served: Served) -> int:
    return served.call(lambda: served.dispatcher.pulse._alarm.at_ms)


# --------------------------------------------------------------------------------------------------------- stops


def test_a_stop_answers_held_pulls_and_lets_the_clients_go(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        held = [pull_command(peer, "orders", queue_id=n, wait_ms=LONG_POLL_MS) for n in (0, 1)]
        peer.write(*held)
        peer.round_trip()
        served.stop()
        peer.expect_closed()
        assert [got(answer)[:2] for answer in peer.answers] == [(codes.PULL_NOT_FOUND, 0)] * 2


def test_a_stop_answers_the_sends_that_are_on_their_way_to_disk(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as peer:
        make_topic(peer, "orders")
        gate.hold()
        commands = [send_command(peer, "orders", str(n)) for n in range(5)]
        peer.write(*commands)
        gate.wait_for_flush()
        peer.round_trip()
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        gate.open()
        stopping.join(WAIT_S)
        peer.expect_closed()
        assert [(answer.opaque, answer.code) for answer in peer.answers] == [(each.opaque, 0) for each in commands]
    with serving(tmp_path) as served, connected(served) as peer:
        assert read_bodies(peer, "orders") == [str(n) for n in range(5)]


def test_a_server_that_stops_takes_no_more_requests(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as peer:
        make_topic(peer, "orders")
        gate.hold()
        command = send_command(peer, "orders", "the last")
        peer.write(command)
        gate.wait_for_flush()
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        while served.call(lambda: served.server._listeners[0].is_serving()):
            pass
        peer.write(send_command(peer, "orders", "too late"), peer.command(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        served.call(lambda: None)
        gate.open()
        stopping.join(WAIT_S)
        peer.expect_closed()
        assert [(answer.opaque, answer.code) for answer in peer.answers] == [(command.opaque, codes.SUCCESS)]
    with serving(tmp_path) as served, connected(served) as peer:
        assert read_bodies(peer, "orders") == ["the last"]


def test_a_stop_ends_however_busy_the_producers_are(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answered = threading.Semaphore(0)
        stored: list[str] = []

        def produce(name: str) -> None:
            """Sends one after the other, and always some ahead, until the broker has gone."""
            busy = Peer(served.port)
            try:
                for n in range(10):
                    busy.write(send_command(busy, "orders", f"{name}{n}"))
                for n in range(10, 1_000_000):
                    assert busy.next_answer().code == codes.SUCCESS
                    stored.append(f"{name}{n - 10}")
                    answered.release()
                    busy.write(send_command(busy, "orders", f"{name}{n}"))
            except (Closed, OSError):
                stored.extend(f"{name}{answer.opaque - 1}" for answer in busy.answers)
            finally:
                busy.close()

        threads = [threading.Thread(target=produce, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for _ in range(300):
            assert answered.acquire(timeout=WAIT_S)
        served.stop()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
    with serving(tmp_path) as served, connected(served) as peer:
        visible = read_bodies(peer, "orders")
        assert len(visible) == len(set(visible))
        assert set(stored) <= set(visible), "what was answered is there"


def test_a_stop_does_not_wait_for_ever_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock, shutdown_ms=50) as served, connected(served) as peer, connected(served) as slow:
        make_topic(peer, "orders")
        sent(peer, "orders", bytes(200_000))
        slow.write(*[pull_command(slow, "orders") for _ in range(200)])
        peer.round_trip()
        served.stop()
        peer.expect_closed()


def test_a_server_that_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    delays = {"near": 5_000, "far": FAR_MS, "very far": 400 * DAY_MS}
    with serving(tmp_path, clock) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders", "seen")
        for body, delay_ms in delays.items():
            sent(peer, "orders", body, TIMER_DELAY_MS=delay_ms)
        heartbeat(peer, "c1", {"orders": "*"})
        pull(peer, "orders", 1, commit=1)
    clock.pass_ms(1_000)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        asked = {"consumerGroup": GROUP, "topic": "orders", "queueId": "0"}
        assert peer.ask(Request.QUERY_CONSUMER_OFFSET, b"", **asked).fields == {"offset": "1"}
        offset, passed_ms = 1, 1_000
        for body, delay_ms in delays.items():
            held = pull_command(peer, "orders", offset, wait_ms=LONG_POLL_MS)
            peer.write(held)
            served.pass_ms(delay_ms - passed_ms - 1)
            served.settle()
            peer.expect_no_more()
            served.pass_ms(1)
            assert got(peer.answer_to(held.opaque)).bodies == [body]
            offset, passed_ms = offset + 1, delay_ms


def test_what_became_due_while_the_server_was_down_fires_when_it_starts(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        for n, delay_ms in enumerate((3_000, 1_000, FAR_MS, 2_000)):
            sent(peer, "orders", str(n), TIMER_DELAY_MS=delay_ms)
        served.kill()
    clock.pass_ms(2_500)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        held = pull_command(peer, "orders", wait_ms=LONG_POLL_MS)
        peer.write(held)
        assert got(peer.answer_to(held.opaque)).bodies == ["1", "3"]


# ------------------------------------------------------------------------------------------------------- crashes


def test_a_crash_answers_nothing_that_is_not_on_disk_and_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders", "answered")
        gate.hold()
        peer.write(send_command(peer, "orders", "in flight"))
        gate.wait_for_flush()
        dying = threading.Thread(target=served.kill)
        dying.start()
        peer.expect_closed()
        assert not peer.answers
        gate.open()
        dying.join(WAIT_S)
    with serving(tmp_path) as served, connected(served) as peer:
        assert read_bodies(peer, "orders") in (["answered"], ["answered", "in flight"])


def test_what_waits_survives_a_crash_and_comes_once(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        handles = [
            sent(peer, "orders", str(n), UNIQ_KEY=f"K{n}", TIMER_DELAY_MS=1_000 + n).fields["recallHandle"]
            for n in range(10)
        ]
        assert peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=handles[4]).code == codes.SUCCESS
        served.pass_ms(1_003)
        served.settle()
        assert read_bodies(peer, "orders") == ["0", "1", "2", "3"]
        served.kill()
    for _ in range(2):
        with serving(tmp_path, clock) as served, connected(served) as peer:
            served.pass_ms(3)
            served.settle()
            visible = read_bodies(peer, "orders")
            served.kill()
    assert visible == [str(n) for n in range(10) if n != 4]


# ------------------------------------------------------------------------------------------------------ idle times


def test_the_alarm_is_set_to_the_next_due_instant_and_to_no_other(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), lead_ms=60_000) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert alarm_at_ms(served) == NEVER
        sent(peer, "orders", "not delayed")
        assert alarm_at_ms(served) == NEVER
        sent(peer, "orders", TIMER_DELAY_MS=5_000)
        assert alarm_at_ms(served) == T0 + 5_000
        sent(peer, "orders", TIMER_DELAY_MS=3_000)
        assert alarm_at_ms(served) == T0 + 3_000
        sent(peer, "orders", TIMER_DELAY_MS=7_000)
        assert alarm_at_ms(served) == T0 + 3_000
        for span_ms, next_at_ms in ((3_000, T0 + 5_000), (2_000, T0 + 7_000), (2_000, NEVER)):
            served.pass_ms(span_ms)
            served.settle()
            assert alarm_at_ms(served) == next_at_ms
        sent(peer, "orders", TIMER_DELAY_MS=HOUR_MS)
        assert alarm_at_ms(served) == T0 + 7_000 + HOUR_MS - 60_000, "a far one is looked for when the lead begins"


def test_a_server_rings_once_for_a_due_instant_and_is_silent_otherwise(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        rings = []
        alarm = served.dispatcher.pulse._alarm
        ring = served.dispatcher.pulse.ring

        def counted() -> None:
            rings.append(served.clock.now_ms())
            ring()

        served.call(lambda: setattr(alarm, "_ring", counted))
        sent(peer, "orders", "due", TIMER_DELAY_MS=200)
        due = alarm_at_ms(served)
        assert pull(peer, "orders", wait_ms=LONG_POLL_MS).bodies == ["due"]
        served.settle()
        assert len(rings) == 1
        assert rings[0] >= due
        assert alarm_at_ms(served) == NEVER
        assert pull(peer, "orders", 1, wait_ms=200).code == codes.PULL_NOT_FOUND
        assert len(rings) == 1, "nothing waits, so nothing rings"


def test_a_server_takes_snapshots_while_it_serves(tmp_path: Path) -> None:
    with serving(tmp_path, snapshot_batches=20) as served, connected(served) as peer:
        for n in range(100):
            sent(peer, "orders", str(n))
        while not list((tmp_path / "snapshots").glob("*")):
            peer.round_trip()
        sent(peer, "orders", "100")
        served.kill()
    with serving(tmp_path) as served, connected(served) as peer:
        assert read_bodies(peer, "orders") == [str(n) for n in range(101)]


def test_a_snapshot_that_fails_is_said_and_nobody_is_disturbed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FaultyDisk(tmp_path)
    with serving(tmp_path, disk=disk, snapshot_batches=20, fire_pause_ms_max=10) as served, connected(served) as peer:
        make_topic(peer, "orders")
        full = OSError(errno.ENOSPC, "No space left on device")
        disk.fault = lambda _, path: full if path.startswith("snapshots") else None
        for n in range(50):
            sent(peer, "orders", str(n))
        while not caplog.records:
            peer.round_trip()
        assert "the snapshot failed" in caplog.records[0].getMessage()
        assert caplog.records[0].levelno == logging.ERROR
        disk.fault = lambda _call, _path: None
        assert len(read_bodies(peer, "orders")) == 50


def test_a_signal_ends_the_process_in_order(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from postdate.config import Settings\n"
        "from postdate.server import run\n"
        "settings = Settings(data=sys.argv[1], route_port=0, broker_port=0, vip_port=-1, grpc_port=-1)\n"
        "run(settings, lambda server: print(server.broker_address, flush=True))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        host, _, port = process.stdout.readline().strip().rpartition(":")
        peer = Peer(int(port), host)
        sent(peer, "orders", "kept")
        peer.write(pull_command(peer, "orders", 1, wait_ms=LONG_POLL_MS))
        peer.round_trip()
        process.send_signal(signal.SIGTERM)
        peer.expect_closed()
        assert [answer.code for answer in peer.answers] == [codes.PULL_NOT_FOUND]
        assert process.wait(WAIT_S) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), WAIT_S)
        peer.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with serving(tmp_path, segment_bytes=64 << 20) as served, connected(served) as peer:
        assert read_bodies(peer, "orders") == ["kept"]


# ------------------------------------------------------------------------------------------------- the gRPC port


def test_without_its_port_nobody_speaks_grpc(tmp_path: Path) -> None:
    with serving(tmp_path, grpc_port=-1) as served:
        assert served.server.grpc_address is None


def test_a_grpc_port_that_is_in_use_is_named_with_the_flag_that_chooses_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UsageError, match=rf"port {port} of 127.0.0.1 is in use .* choose another with --grpc-port"),
            serving(tmp_path, grpc_port=port),
        ):
            pass


def test_without_the_package_for_certificates_the_grpc_port_takes_plaintext_and_says_why_not_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "missing"
    missing.mkdir()
    (missing / "cryptography.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(missing), prepend=os.pathsep)
    with (
        caplog.at_level(logging.WARNING, "postdate.server"),
        serving(tmp_path / "data", has_access=True, grpc_port=0) as served,
        calling(served) as client,
    ):
        host, _, port = (served.server.grpc_address or "").rpartition(":")
        context = ssl.create_default_context()
        with socket.create_connection((host, int(port)), 30) as plain, pytest.raises(OSError):  # noqa: PT011
            context.wrap_socket(plain, server_hostname=host)
        client.round_trip()
    assert (
        "no TLS handshake: there is no certificate for this machine: --self-signed needs postdate[tls]" in caplog.text
    )

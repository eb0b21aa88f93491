"""The systems that benchmarks/peers compares with: what can be said without them, and 200 messages where they are."""

import socket
import sys
from pathlib import Path

import pytest

from benchmarks.peers.system import BODY_BYTES, CANCELLED, UNKNOWN, NotRun, System, body, index_of
from benchmarks.peers.systems import beanstalkd, celery, nats, postgresql, rabbitmq, redis
from benchmarks.peers.systems.inbox import POLL_S, Inbox, now_ms, pause_s
from benchmarks.peers.systems.server import (
    HOST,
    PORTS,
    Server,
    free_port,
    is_alive,
    library_version,
    program,
    version_in,
)

SYSTEMS: list[type[System]] = [
    beanstalkd.SYSTEM, celery.SYSTEM, nats.SYSTEM, postgresql.SYSTEM, rabbitmq.SYSTEM, redis.SYSTEM,
]  # fmt: skip
SOON_MS, COUNT, LIMIT_S = 2_000, 200, 30.0


@pytest.mark.parametrize("index", [0, 1, 999_999_999_999])
def test_a_body_tells_its_number(index: int) -> None:
    assert index_of(body(index)) == index
    assert len(body(index)) == BODY_BYTES


# -- servers ------------------------------------------------------------------------------------------------------


def test_a_free_port_can_be_listened_to_and_is_not_given_while_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    assert port in PORTS
    with socket.create_server((HOST, port)):
        monkeypatch.setattr("benchmarks.peers.systems.server.PORTS", range(port, port + 1))
        with pytest.raises(NotRun, match="is free"):
            free_port()


def test_a_missing_program_is_told_with_the_package_that_brings_it() -> None:
    with pytest.raises(NotRun, match=r"no-such-server is not installed here; Debian's no-such brings it"):
        program("no-such-server", "Debian's no-such")


def test_a_missing_library_is_told_by_its_name() -> None:
    with pytest.raises(NotRun, match="no-such-library"):
        library_version("no-such-library")


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.slug)
def test_a_system_whose_server_is_missing_cannot_tell_its_version(
    system: type[System], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(NotRun, match="is not installed here"):
        system.versions()


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64", "7.0.15"),
        ("beanstalkd 1.12", "1.12"),
        ("nats-server: v2.15.1", "2.15.1"),
        ("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", "15.18"),
    ],
)
def test_a_version_is_found_in_what_a_program_says(said: str, version: str) -> None:
    assert version_in(said) == version


def test_a_server_that_ends_instead_of_answering_is_not_run_and_its_last_words_are_told(tmp_path: Path) -> None:
    server = Server([sys.executable, "-c", "raise SystemExit('no room for me')"], tmp_path)
    port = free_port()
    with pytest.raises(NotRun, match="no room for me"):
        server.await_answer(lambda: socket.create_connection((HOST, port)).close())
    server.end()
    assert server.pids == []


def test_a_killed_server_takes_with_it_what_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = "import pathlib, subprocess, time; "
    child += f"subprocess.Popen(['sleep', '60']); pathlib.Path({str(started)!r}).touch(); time.sleep(60)"
    server = Server([sys.executable, "-c", child], tmp_path)
    server.await_answer(started.read_bytes)
    pids = server.pids
    assert len(pids) == 2
    server.kill()
    server.end()
    assert server.pids == []
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.slug)
def test_a_system_that_never_started_can_be_stopped_twice(system: type[System], tmp_path: Path) -> None:
    stopped = system(tmp_path, is_durable=True)
    stopped.stop()
    stopped.stop()
    assert stopped.pids() == []


# -- what a consumer has in hand ------------------------------------------------------------------------------------


def test_an_inbox_closes_when_it_is_full() -> None:
    inbox = Inbox(count=2, limit_s=60)
    inbox.take([body(7)])
    assert (inbox.is_open, inbox.missing) == (True, 1)
    inbox.take([body(3)])
    assert (inbox.is_open, inbox.missing) == (False, 0)
    assert inbox.received.indexes.tolist() == [7, 3]
    assert inbox.received.at_ms[0] <= inbox.received.at_ms[1] <= now_ms()


def test_an_inbox_closes_when_its_time_is_over() -> None:
    inbox = Inbox(count=1, limit_s=0)
    assert not inbox.is_open
    assert inbox.received.indexes.tolist() == []


def test_who_must_ask_waits_for_the_next_due_time_but_not_longer_than_a_poll() -> None:
    assert pause_s(None) == POLL_S
    assert pause_s(now_ms() + 3_600_000) == POLL_S
    assert pause_s(now_ms() - 1) == 0
    assert 0 < pause_s(now_ms() + POLL_S * 500) < POLL_S


# -- beanstalkd -----------------------------------------------------------------------------------------------------


def test_replies_of_beanstalkd_are_read_up_to_the_first_that_is_not_complete() -> None:
    data = b"INSERTED 12\r\nRESERVED 7 5\r\na\r\nbc\r\nTIMED_OUT\r\nRESERVED 8 5\r\nab"
    found, rest = beanstalkd.replies(data)
    assert found == [
        beanstalkd.Reply(b"INSERTED", b"12"),
        beanstalkd.Reply(b"RESERVED", b"7", b"a\r\nbc"),
        beanstalkd.Reply(b"TIMED_OUT"),
    ]
    assert rest == b"RESERVED 8 5\r\nab"


def test_a_reply_of_beanstalkd_is_read_wherever_it_was_torn() -> None:
    data = b"RESERVED 7 3\r\nabc\r\nDELETED\r\n"
    for place in range(len(data)):
        first, rest = beanstalkd.replies(data[:place])
        second, rest = beanstalkd.replies(rest + data[place:])
        assert first + second == [beanstalkd.Reply(b"RESERVED", b"7", b"abc"), beanstalkd.Reply(b"DELETED")]
        assert rest == b""


@pytest.mark.parametrize(("left_ms", "delay_s"), [(-5, 0), (0, 0), (1, 1), (1_000, 1), (1_001, 2)])
def test_a_delay_of_beanstalkd_is_whole_seconds_and_never_early(left_ms: int, delay_s: int) -> None:
    assert beanstalkd.delay_s(due_ms=5_000 + left_ms, at_ms=5_000) == delay_s


def test_a_put_of_beanstalkd_tells_its_delay_and_its_size() -> None:
    assert beanstalkd.put(3, b"abc") == b"put 0 3 3600 3\r\nabc\r\n"
    assert beanstalkd.reserves(2, 9.5).count(b"reserve-with-timeout 0\r\n") == 2


# -- NATS -----------------------------------------------------------------------------------------------------------


def test_messages_of_nats_are_read_wherever_they_were_torn() -> None:
    data = b"PING\r\nMSG answers.sent 1 2\r\n{}\r\nHMSG due 1 $JS.ACK.7 12 15\r\nNATS/1.0\r\n\r\nabc\r\n"
    for place in range(len(data)):
        first, rest = nats.messages(data[:place])
        second, rest = nats.messages(rest + data[place:])
        assert first + second == [
            nats.Message(b"answers.sent", b"", b"", b"{}"),
            nats.Message(b"due", b"$JS.ACK.7", b"NATS/1.0\r\n\r\n", b"abc"),
        ]
        assert rest == b""


def test_an_error_of_nats_is_raised_with_its_words() -> None:
    with pytest.raises(ConnectionError, match="Unknown Protocol"):
        nats.messages(b"-ERR 'Unknown Protocol Operation'\r\n")


def test_a_schedule_of_nats_has_its_own_subject_and_its_due_time_to_the_millisecond() -> None:
    first, *lines = nats.publish(4, 1_700_000_000_123, b"abc").split(b"\r\n")
    headers = b"\r\n".join(lines[:4]) + b"\r\n"
    assert first == b"HPUB waiting.4 answers.sent %d %d" % (len(headers), len(headers) + 3)
    assert b"Nats-Schedule: @at 2023-11-14T22:13:20.123+00:00" in lines


# -- RabbitMQ -------------------------------------------------------------------------------------------------------


def test_frames_of_rabbitmq_are_read_wherever_they_were_torn() -> None:
    data = rabbitmq.FRAME.pack(1, 1, 4) + b"abcd\xce" + rabbitmq.FRAME.pack(3, 1, 0) + b"\xce"
    for place in range(len(data)):
        first, rest = rabbitmq.frames(data[:place])
        second, rest = rabbitmq.frames(rest + data[place:])
        assert first + second == [rabbitmq.Frame(1, b"abcd"), rabbitmq.Frame(3, b"")]
        assert rest == b""


def test_confirms_of_rabbitmq_count_in_any_order() -> None:
    waiting = rabbitmq.Unconfirmed()
    waiting.add(5)
    waiting.confirm(2, is_multiple=False)
    assert len(waiting) == 5  # the first is still missing
    waiting.confirm(1, is_multiple=False)
    assert len(waiting) == 3
    waiting.confirm(5, is_multiple=False)
    waiting.confirm(4, is_multiple=True)
    assert len(waiting) == 0
    waiting.add(1)
    waiting.confirm(6, is_multiple=True)
    assert len(waiting) == 0


def test_a_refused_publish_of_rabbitmq_is_raised() -> None:
    acknowledged = rabbitmq.ACK + rabbitmq.TAG.pack(7, 1)
    assert rabbitmq.confirmed(rabbitmq.Frame(1, acknowledged)) == (7, True)
    with pytest.raises(ConnectionError, match="to a publish"):
        rabbitmq.confirmed(rabbitmq.Frame(1, b"\x00\x3c\x00\x78" + rabbitmq.TAG.pack(7, 0)))


# -- with the servers -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.slug)
@pytest.mark.filterwarnings("default")  # libraries that we did not write
def test_a_system_that_is_here_delivers_every_message_once_and_none_early(system: type[System], tmp_path: Path) -> None:
    if not _is_here(system):
        with pytest.raises(NotRun, match="is not installed here"):
            system.versions()
        return
    running = system(tmp_path / system.slug, is_durable=True)
    try:
        running.start()
        dues_ms = [int(now_ms()) + SOON_MS + 5 * number for number in range(COUNT)]
        handles = running.schedule(dues_ms)
        received = running.receive(COUNT, LIMIT_S)
        assert sorted(received.indexes.tolist()) == list(range(COUNT))
        assert all(received.at_ms[n] >= dues_ms[index] for n, index in enumerate(received.indexes.tolist()))
        assert len(handles) == COUNT
        assert running.pids()
        assert running.disk_bytes() > 0
    finally:
        running.stop()
    assert running.pids() == []


@pytest.mark.full
@pytest.mark.parametrize("system", [each for each in SYSTEMS if "e" in each.works], ids=lambda system: system.slug)
@pytest.mark.filterwarnings("default")
def test_a_system_that_was_killed_has_what_it_acknowledged_but_for_what_was_cancelled(
    system: type[System], tmp_path: Path
) -> None:
    if not _is_here(system):
        with pytest.raises(NotRun, match="is not installed here"):
            system.versions()
        return
    running = system(tmp_path / system.slug, is_durable=True)
    try:
        running.start()
        due_ms = int(now_ms()) + 2 * SOON_MS
        handles = running.schedule([due_ms] * COUNT, first_index=1_000)
        cancelled = _cancelled(running, handles[: COUNT // 2])
        running.kill()
        assert running.pids() == []
        running.start()
        received = running.receive(COUNT - cancelled, LIMIT_S)
        assert sorted(received.indexes.tolist()) == list(range(1_000 + cancelled, 1_000 + COUNT))
        assert received.at_ms.min() >= due_ms
    finally:
        running.stop()


def _is_here(system: type[System]) -> bool:
    try:
        return bool(system.versions())
    except NotRun:
        return False


def _cancelled(running: System, handles: list[bytes | str]) -> int:
    """How many, with what a second cancel of each answers; 0 of a system that has no cancel."""
    try:
        answers = running.cancel(handles)
    except NotRun:
        return 0
    assert answers == [CANCELLED] * len(handles)
    assert running.cancel(handles) == [UNKNOWN] * len(handles)
    return len(handles)

"""The server and its disk: what waits for a flush, what one flush answers, and disks that are full or broken."""

import errno
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.core import T0, FaultyDisk
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    Gate,
    Peer,
    connected,
    got,
    heartbeat,
    make_topic,
    pull,
    pull_command,
    read_bodies,
    send,
    send_command,
    sent,
)
from tests.support.server import serving


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.open()


# ------------------------------------------------------------------------------------------------- held flushes


def test_a_message_is_neither_answered_nor_visible_before_it_is_on_disk(tmp_path: Path, gate: Gate) -> None:
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders")
        assert pull(reader, "orders").code == codes.PULL_NOT_FOUND
        held = pull_command(reader, "orders", wait_ms=LONG_POLL_MS)
        reader.write(held)
        reader.round_trip()
        gate.hold()
        command = send_command(peer, "orders", "durable")
        peer.write(command)
        gate.wait_for_flush()
        peer.expect_no_more()
        reader.expect_no_more()
        assert pull(peer, "orders").code == codes.PULL_NOT_FOUND
        gate.open()
        assert peer.answer_to(command.opaque).code == codes.SUCCESS
        assert got(reader.answer_to(held.opaque)).bodies == ["durable"]


def test_a_fired_message_is_not_visible_before_its_fire_is_on_disk(tmp_path: Path, gate: Gate) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock, gate.disk) as served, connected(served) as peer, connected(served) as reader:
        sent(peer, "orders", "due", TIMER_DELAY_MS=1_000)
        assert pull(reader, "orders").code == codes.PULL_NOT_FOUND
        held = pull_command(reader, "orders", wait_ms=LONG_POLL_MS)
        reader.write(held)
        reader.round_trip()
        gate.hold()
        served.pass_ms(1_000)
        gate.wait_for_flush()
        reader.expect_no_more()
        assert pull(peer, "orders").code == codes.PULL_NOT_FOUND
        gate.open()
        assert got(reader.answer_to(held.opaque)).bodies == ["due"]


def test_cancels_offsets_and_send_backs_are_answered_when_they_are_on_disk(tmp_path: Path, gate: Gate) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock, gate.disk) as served, connected(served) as peer:
        handle = sent(peer, "orders", UNIQ_KEY="K1", TIMER_DELAY_MS=1_000).fields["recallHandle"]
        sent(peer, "orders", "to be sent back")
        heartbeat(peer, "c1", {"orders": "*"})
        offset = pull(peer, "orders").records[0].offset
        gate.hold()
        asked = [
            peer.say(Request.RECALL_MESSAGE, topic="orders", recallHandle=handle),
            peer.say(Request.UPDATE_CONSUMER_OFFSET, consumerGroup=GROUP, topic="orders", queueId=0, commitOffset=1),
            peer.say(Request.CONSUMER_SEND_MSG_BACK, group=GROUP, offset=offset, delayLevel=1),
        ]
        gate.wait_for_flush()
        peer.expect_no_more()
        gate.open()
        assert [peer.answer_to(opaque).code for opaque in asked] == [codes.SUCCESS] * 3


def test_all_that_came_during_a_flush_is_answered_by_the_next_one(tmp_path: Path, gate: Gate) -> None:
    with serving(tmp_path, disk=gate.disk, offsets_interval_ms=60_000) as served, connected(served) as peer:
        make_topic(peer, "orders")
        peers = [Peer(served.port) for _ in range(10)]
        gate.hold()
        first = send_command(peer, "orders", "first")
        peer.write(first)
        gate.wait_for_flush()
        commands = [(each, send_command(each, "orders", str(n))) for each in peers for n in range(5)]
        for each, command in commands:
            each.write(command)
        for each in peers:
            each.expect_no_more()
        assert gate.flush_count == 1
        gate.open()
        assert {each.answer_to(command.opaque).code for each, command in commands} == {codes.SUCCESS}
        assert peer.answer_to(first.opaque).code == codes.SUCCESS
        assert gate.flush_count == 2, "one for the first, one for the fifty that came meanwhile"
        for each in peers:
            each.close()


def test_in_flush_mode_async_nobody_waits_for_the_disk(tmp_path: Path, gate: Gate) -> None:
    clock = ManualClock(T0)
    with (
        serving(tmp_path, clock, gate.disk, flush="async", flush_interval_ms=1) as served,
        connected(served) as peer,
        connected(served) as reader,
    ):
        make_topic(peer, "orders")
        assert pull(reader, "orders").code == codes.PULL_NOT_FOUND
        held = pull_command(reader, "orders", wait_ms=LONG_POLL_MS)
        reader.write(held)
        reader.round_trip()
        gate.hold()
        sent(peer, "orders", "answered")
        assert got(reader.answer_to(held.opaque)).bodies == ["answered"]
        gate.wait_for_flush()  # it is flushed all the same, from time to time
        sent(peer, "orders", "again", TIMER_DELAY_MS=5)
        served.pass_ms(5)
        assert read_bodies(peer, "orders") == ["answered", "again"]
        gate.open()


# ------------------------------------------------------------------------------------------------- full and broken


def test_a_full_disk_refuses_sends_while_consumers_read_on_and_recovers_by_itself(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    clock = ManualClock(T0)
    with serving(tmp_path, clock, disk) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders")
        sent(peer, "orders", "early")
        sent(peer, "orders", "due", TIMER_DELAY_MS=1_000)
        heartbeat(reader, "c1", {"orders": "*"})
        full = OSError(errno.ENOSPC, "No space left on device")
        disk.fault = lambda call, path: full if call == "write" and path.startswith("log/") else None
        make_topic(peer, "ballast")
        stored = 0
        while (answer := send(peer, "ballast", bytes(100_000))).code == codes.SUCCESS:
            stored += 1
            assert stored < 1_000
        assert answer.code == codes.SERVICE_NOT_AVAILABLE
        assert "No space left" in (answer.remark or "")
        assert pull(reader, "orders", tags=None).bodies == ["early"]
        asked: dict[str, Any] = {"consumerGroup": GROUP, "topic": "orders", "queueId": 0, "commitOffset": 1}
        assert reader.ask(Request.UPDATE_CONSUMER_OFFSET, **asked).code == codes.SUCCESS
        held = pull_command(reader, "orders", 1, wait_ms=LONG_POLL_MS)
        reader.write(held)
        served.pass_ms(1_000)
        assert got(reader.answer_to(held.opaque)).bodies == ["due"], "what is due has room in the reserve"
        assert send(peer, "ballast", bytes(100_000)).code == codes.SERVICE_NOT_AVAILABLE

        disk.fault = lambda _call, _path: None
        sent(peer, "ballast", bytes(100_000))
        sent(peer, "orders", "there is room again")
        assert read_bodies(reader, "orders") == ["early", "due", "there is room again"]


def test_after_a_failed_fsync_sends_are_refused_and_consumers_read_on(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders")
        sent(peer, "orders", "durable")
        assert pull(reader, "orders").bodies == ["durable"]
        gate.hold()
        first = send_command(peer, "orders", "in flight")
        peer.write(first)
        gate.wait_for_flush()
        second = send_command(peer, "orders", "behind it")
        peer.write(second)
        peer.round_trip()
        gate.error = OSError(errno.EIO, "Input/output error")
        gate.open()
        for command in (first, second):
            answer = peer.answer_to(command.opaque)
            assert answer.code == codes.SERVICE_NOT_AVAILABLE
            assert "restart the broker" in (answer.remark or "")
        for _ in range(50):
            assert send(peer, "orders", "later").code == codes.SERVICE_NOT_AVAILABLE
            assert pull(reader, "orders").bodies == ["durable"]
            recalled = peer.ask(Request.RECALL_MESSAGE, topic="orders", key="k", due=T0 * 2)
            assert recalled.code in (codes.SERVICE_NOT_AVAILABLE, codes.ILLEGAL_OPERATION)
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert 1 <= len(errors) <= 2, "it is said once, not once per request"
        gate.error = None
    with serving(tmp_path) as served, connected(served) as peer:
        assert read_bodies(peer, "orders")[0] == "durable"
        sent(peer, "orders", "goes on after a restart")


def test_a_server_whose_log_has_failed_can_be_stopped(tmp_path: Path, gate: Gate) -> None:
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as peer:
        make_topic(peer, "orders")
        gate.error = OSError(errno.EIO, "Input/output error")
        assert send(peer, "orders").code == codes.SERVICE_NOT_AVAILABLE
        served.stop()
        peer.expect_closed()

"""Limits: whatever a client can make grow has a bound, and what lies beyond it is refused, slowed down or ended."""

import contextlib
import logging
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.server.connection import Connection
from postdate.wire import codes
from postdate.wire.frame import encode
from postdate.wire.requests import ClientRequest, Request
from tests.support.core import HOUR_MS, T0
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    Gate,
    Peer,
    connected,
    heartbeat,
    make_topic,
    pull_command,
    read_bodies,
    send_batch,
    send_command,
    sent,
)
from tests.support.server import WAIT_S, Served, serving

IDLE_MS = 10_000
STALLED_MS = 5_000
LEVELS = 18  # each has a queue of SCHEDULE_TOPIC_XXXX


def messages_of(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def connections(served: Served) -> int:
    return served.call(lambda: len(served.dispatcher.connections))


def sweep(served: Served, span_ms: int = 0) -> None:
    """Lets time pass, then does what the server does every second."""
    if span_ms:
        served.pass_ms(span_ms)
    served.call(lambda: list(served.dispatcher.connections.sweep()))


def until(served: Served, holds: Callable[[], bool]) -> None:
    """Waits until something holds on the server's loop."""
    waiting = threading.Event()
    for _ in range(int(WAIT_S * 200)):
        if served.call(holds):
            return
        waiting.wait(0.005)
    raise AssertionError("it never came to be")


def connection_of(served: Served, peer: Peer) -> Connection:
    """The broker's end of a connection, as soon as it has taken it."""
    port = peer.socket.getsockname()[1]

    def found() -> list[Connection]:
        return [each for each in served.connections() if each.host.port == port]

    until(served, lambda: bool(found()))
    return served.call(found)[0]


def refused(answer: Any, limit: str, code: int = codes.SYSTEM_BUSY) -> None:
    assert (answer.code, (answer.remark or "").partition(":")[0]) == (code, limit), answer


# --------------------------------------------------------------------------------------------------- connections


def test_one_address_cannot_take_all_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, host="0.0.0.0", connections_per_address_max=2) as served:
        with connected(served) as first, connected(served) as second, connected(served) as third:
            first.round_trip()
            second.round_trip()
            third.expect_closed()
            assert "connections_per_address_max: 127.0.0.1" in messages_of(caplog)[0]
            with connected(served, host="127.0.0.2") as elsewhere:
                other = socket.socket()
                other.bind(("127.0.0.3", 0))
                other.connect(("127.0.0.1", served.port))
                until(served, lambda: len(served.dispatcher.connections) == 3)
                other.close()
                elsewhere.expect_closed()  # it comes from 127.0.0.1 too, wherever it went
        until(served, lambda: not len(served.dispatcher.connections))
        assert not served.call(lambda: served.dispatcher.connections._count_of), "an address that is gone is forgotten"
        with connected(served) as again:
            again.round_trip()


def test_lines_about_bad_peers_do_not_fill_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, ManualClock(T0), complaints_max=3) as served:
        for _ in range(10):
            with connected(served) as bad:
                bad.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
                bad.expect_closed()
        served.call(lambda: None)
        assert sum("closing the connection" in line for line in messages_of(caplog)) <= 2 * 3
        sweep(served)
        assert any("complaints_max: " in line and "left out" in line for line in messages_of(caplog))


def test_a_process_may_open_as_many_files_as_it_has_connections(tmp_path: Path) -> None:
    program = (
        "import logging, resource, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1])))\n"
        "from postdate.server.serve import allow_files\n"
        "allow_files(1000)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )

    def told(hard: int) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", program, str(hard)], capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert told(4_096) == ["(1512, 4096)"]
    warning, limits = told(700)
    assert limits == "(700, 700)"
    assert warning.startswith("connections_max is 1000, but this process may open 700 files")
    assert "about 188 connections" in warning
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 700, "the test's own limit is as it was"


# ------------------------------------------------------------------------------------------------------- silence


def test_a_silent_connection_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with (
        serving(tmp_path, ManualClock(T0), idle_ms_max=IDLE_MS) as served,
        connected(served) as silent,
        connected(served) as talking,
    ):
        sweep(served, IDLE_MS - 1)
        talking.round_trip()
        silent.round_trip()
        sweep(served, IDLE_MS - 1)
        talking.round_trip()
        sweep(served, 1)
        assert connections(served) == 2, "the silent one was heard at the last sweep but one"
        sweep(served, IDLE_MS - 1)
        silent.expect_closed()
        assert [line for line in messages_of(caplog, logging.INFO) if "idle_ms_max" in line]
        talking.round_trip()


def test_a_frame_that_comes_byte_by_byte_is_silence(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), idle_ms_max=IDLE_MS) as served, connected(served) as slow:
        slow.round_trip()
        sweep(served)
        frame = encode(send_command(slow, "orders"))
        for byte in frame[:10]:
            slow.socket.send(bytes([byte]))
            sweep(served, IDLE_MS // 10)
        slow.expect_closed()


def test_whoever_waits_for_messages_or_for_the_disk_is_not_silent(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with (
        serving(tmp_path, ManualClock(T0), disk=gate.disk, idle_ms_max=IDLE_MS) as served,
        connected(served) as holding,
        connected(served) as sending,
    ):
        make_topic(holding, "orders")
        held = pull_command(holding, "orders", wait_ms=LONG_POLL_MS)
        holding.write(held)
        holding.round_trip()
        gate.hold()
        command = send_command(sending, "orders")
        sending.write(command)
        gate.wait_for_flush()
        for _ in range(5):
            sweep(served, IDLE_MS)
        gate.open()
        assert sending.answer_to(command.opaque).code == codes.SUCCESS
        assert holding.answer_to(held.opaque).code == codes.SUCCESS


# -------------------------------------------------------------------------------------- answers that nobody reads

BIG = 200_000
PULLS = 400


def deaf(served: Served, peer: Peer) -> Connection:
    """Has a peer ask for far more than it reads."""
    connection = connection_of(served, peer)
    asked = b"".join(encode(pull_command(peer, "orders")) for _ in range(PULLS))
    peer.socket.setblocking(False)
    try:
        peer.socket.send(asked)
    finally:
        peer.socket.setblocking(True)
    until(served, lambda: connection.is_paused)
    return connection


def test_a_client_that_does_not_read_for_long_is_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(tmp_path, ManualClock(T0), write_buffer_bytes_max=1 << 18, stalled_ms_max=STALLED_MS) as served,
        connected(served) as other,
        connected(served) as slow,
    ):
        make_topic(other, "orders")
        sent(other, "orders", bytes(BIG))
        deaf(served, slow)
        sweep(served)
        sweep(served, STALLED_MS - 1)
        assert connections(served) == 2
        sweep(served, 1)
        until(served, lambda: len(served.dispatcher.connections) == 1)
        assert "stalled_ms_max" in messages_of(caplog)[0]
        other.round_trip()


def test_a_client_that_reads_again_in_time_is_served_on(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), write_buffer_bytes_max=1 << 18, stalled_ms_max=STALLED_MS) as served,
        connected(served) as other,
        connected(served) as slow,
    ):
        make_topic(other, "orders")
        sent(other, "orders", bytes(BIG))
        for _ in range(3):
            connection = deaf(served, slow)
            sweep(served)
            sweep(served, STALLED_MS - 1)
            count = sum(1 for _ in range(PULLS) if slow.next_answer())
            assert count == PULLS
            until(served, lambda connection=connection: not connection.is_paused)  # type: ignore[misc]
        slow.expect_no_more()


def test_notices_do_not_pile_up_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    with serving(tmp_path, write_buffer_bytes_max=1 << 18) as served, connected(served) as other:
        make_topic(other, "orders")
        sent(other, "orders", bytes(BIG))
        with connected(served) as slow:
            heartbeat(slow, "slow", {"orders": "*"})
            connection = deaf(served, slow)
            before = served.call(lambda: connection.buffered_bytes)
            for n in range(200):
                heartbeat(other, "other", {"orders": f"tag{n}"})
                assert other.next_notice().code == ClientRequest.NOTIFY_CONSUMER_IDS_CHANGED
            assert served.call(lambda: connection.buffered_bytes) <= before


def test_all_connections_together_hold_only_so_much(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        serving(tmp_path, buffered_bytes_max=4 << 20) as served,
        connected(served) as good,
        connected(served) as modest,
        connected(served) as greedy,
    ):
        served.call(lambda: [timer.cancel() for timer in served.server._timers])  # it is seen between two sweeps
        modest.socket.sendall((1 << 24).to_bytes(4, "big") + bytes(1 << 20))
        connection = connection_of(served, modest)
        until(served, lambda: connection.buffered_bytes > 1 << 20)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            greedy.socket.sendall((1 << 24).to_bytes(4, "big") + bytes(15 << 20))
        greedy.expect_closed()
        assert any("buffered_bytes_max" in line for line in messages_of(caplog))
        assert served.call(lambda: connection.buffered_bytes) > 1 << 20, "the modest one may go on"
        assert served.call(lambda: sum(each.buffered_bytes for each in served.dispatcher.connections)) <= 4 << 20
        good.round_trip()


def test_unread_answers_are_counted_with_what_all_connections_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, ManualClock(T0), buffered_bytes_max=1 << 20) as served, connected(served) as other:
        make_topic(other, "orders")
        sent(other, "orders", bytes(BIG))
        with connected(served) as slow:
            deaf(served, slow)  # at 4 MiB, after what the system's own buffers take
            sweep(served)
            until(served, lambda: len(served.dispatcher.connections) == 1)
            assert any("buffered_bytes_max" in line for line in messages_of(caplog))
            other.round_trip()


# ------------------------------------------------------------------------------------------------------ in flight


def test_a_client_with_too_many_sends_in_flight_is_not_read_from_until_they_are_answered(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with (
        serving(tmp_path, disk=gate.disk, in_flight_max=10) as served,
        connected(served) as eager,
        connected(served) as other,
    ):
        make_topic(eager, "orders")
        connection = connection_of(served, eager)
        transport = connection._transport
        assert transport is not None
        gate.hold()
        commands = [send_command(eager, "orders", str(n)) for n in range(100)]
        for command in commands[:10]:
            eager.write(command)
        gate.wait_for_flush()
        until(served, lambda: connection.in_flight == 10)
        assert not served.call(transport.is_reading)
        eager.write(*commands[10:])
        for _ in range(3):
            other.round_trip()
        assert served.call(lambda: connection.in_flight) == 10, "nothing more was taken"
        gate.open()
        assert [eager.next_answer().opaque for _ in commands] == [command.opaque for command in commands]
        assert served.call(transport.is_reading)
        assert served.call(lambda: connection.in_flight) == 0


def test_what_waits_for_the_disk_is_counted_whatever_it_is(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as peer, connected(served) as other:
        make_topic(peer, "orders")
        sent(peer, "orders")
        place = served.call(lambda: served.broker.view.place("orders", 0, 0))
        back: dict[str, Any] = {"group": GROUP, "offset": place}
        assert peer.ask(Request.CONSUMER_SEND_MSG_BACK, **back).code == codes.SUCCESS
        connection = connection_of(served, peer)
        gate.hold()
        offset: dict[str, Any] = {"consumerGroup": GROUP, "topic": "orders", "queueId": 0, "commitOffset": 1}
        handle: dict[str, Any] = {"topic": "orders", "key": "K", "due": served.clock.now_ms() + HOUR_MS}
        marker = send_command(peer, "orders", TIMER_DELAY_SEC=60, TIMER_DEL_UNIQKEY="K")
        batch = send_command(peer, "orders", b"", fields={"m": True})
        commands = [
            send_command(peer, "orders"),
            peer.command(Request.UPDATE_CONSUMER_OFFSET, **offset),
            peer.command(Request.RECALL_MESSAGE, **handle),
            peer.command(Request.CONSUMER_SEND_MSG_BACK, **back),
            marker,
        ]
        peer.write(*commands, batch)
        gate.wait_for_flush()
        other.round_trip()
        assert peer.answer_to(batch.opaque).code == codes.MESSAGE_ILLEGAL, "what is refused at once does not wait"
        assert served.call(lambda: connection.in_flight) == len(commands)
        gate.open()
        for command in commands:
            peer.answer_to(command.opaque)
        assert served.call(lambda: connection.in_flight) == 0


def test_requests_that_wait_for_the_disk_one_by_one_leave_others_their_turn(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with (
        serving(tmp_path, disk=gate.disk, turn_ms_max=1) as served,
        connected(served) as maker,
        connected(served) as other,
    ):
        other.round_trip()
        gate.hold()
        commands = [maker.command(Request.UPDATE_AND_CREATE_TOPIC, topic=f"topic{n}") for n in range(100)]
        maker.write(*commands)
        gate.wait_for_flush()  # the loop waits with it
        asked = other.say(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        threading.Event().wait(0.01)  # longer than a turn
        gate.open()
        known = orjson.loads(other.answer_to(asked).body)["topicList"]
        assert len([name for name in known if name.startswith("topic")]) < len(commands)
        assert [maker.next_answer().opaque for _ in commands] == [command.opaque for command in commands]


def test_what_waits_for_its_turn_before_garbage_counts(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with (
        serving(tmp_path, disk=gate.disk, turn_ms_max=1) as served,
        connected(served) as bad,
        connected(served) as good,
    ):
        good.round_trip()
        gate.hold()
        commands = [bad.command(Request.UPDATE_AND_CREATE_TOPIC, topic=f"topic{n}") for n in range(20)]
        bad.socket.sendall(b"".join(map(encode, commands)) + b"GET / HTTP/1.1\r\n\r\n")
        gate.wait_for_flush()
        threading.Event().wait(0.01)  # longer than a turn
        gate.open()
        bad.expect_closed()
        assert [answer.opaque for answer in bad.answers] == [command.opaque for command in commands]


def test_only_so_many_count_what_waits_at_a_time(tmp_path: Path) -> None:
    with serving(tmp_path, counts_max=2) as served, connected(served) as peer:
        asked = [peer.command(Request.GET_PENDING) for _ in range(5)]
        peer.write(*asked)
        answers = {answer.opaque: answer for answer in (peer.next_answer() for _ in asked)}
        assert [answers[command.opaque].code for command in asked[:2]] == [codes.SUCCESS] * 2
        for command in asked[2:]:
            refused(answers[command.opaque], "counts_max")
        assert peer.ask(Request.GET_PENDING).code == codes.SUCCESS


# ---------------------------------------------------------------------------------------------------------- sizes


def test_a_header_or_a_json_body_that_is_too_long_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, json_bytes_max=256 << 10) as served, connected(served) as peer, connected(served) as bad:
        answer = peer.ask(Request.HEART_BEAT, b"[" * (256 << 10) + b"]")
        refused(answer, "json_bytes_max", codes.INVALID_PARAMETER)
        peer.round_trip()
        bad.write(bad.command(Request.GET_ROUTEINFO_BY_TOPIC, topic="x" * (256 << 10)))
        bad.expect_closed()
        assert "json_bytes_max" in messages_of(caplog)[0]


def test_a_frame_that_is_too_long_ends_its_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, frame_bytes_max=10_000) as served, connected(served) as bad, connected(served) as good:
        sent(bad, "orders", bytes(9_000))
        bad.write(send_command(bad, "orders", bytes(10_000)))
        bad.expect_closed()
        assert "expected 4 to 10000" in messages_of(caplog)[0]
        good.round_trip()


def test_a_batch_has_only_so_many_messages(tmp_path: Path) -> None:
    with serving(tmp_path, batch_messages_max=3) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert send_batch(peer, "orders", [("m", {})] * 3).code == codes.SUCCESS
        refused(send_batch(peer, "orders", [("m", {})] * 4), "batch_messages_max", codes.MESSAGE_ILLEGAL)
        assert len(read_bodies(peer, "orders")) == 3, "all of it or nothing"


def test_one_request_acknowledges_only_so_many_messages(tmp_path: Path) -> None:
    with serving(tmp_path, batch_messages_max=8) as served, connected(served) as peer:
        make_topic(peer, "orders")
        ack = {"c": GROUP, "t": "orders", "q": 0, "pt": served.clock.now_ms(), "so": 0}
        for bits, code in (("/w==", codes.SUCCESS), ("/wE=", codes.INVALID_PARAMETER)):  # 8 bits, 9 bits
            body = orjson.dumps({"brokerName": "postdate", "acks": [{**ack, "b": bits}]})
            assert peer.ask(Request.BATCH_ACK_MESSAGE, body).code == code


@pytest.mark.parametrize("limit", ["held_pulls_max", "held_pulls_per_connection_max"])
def test_a_pop_that_waits_counts_as_a_pull_that_waits(tmp_path: Path, limit: str) -> None:
    settings: dict[str, Any] = {limit: 2}
    with serving(tmp_path, **settings) as served, connected(served) as peer:
        make_topic(peer, "orders")
        asked: dict[str, Any] = {
            "consumerGroup": GROUP, "topic": "orders", "queueId": -1, "maxMsgNums": 1, "invisibleTime": 1_000,
            "pollTime": LONG_POLL_MS, "bornTime": 0, "initMode": 0, "expType": "TAG", "exp": "*",
        }  # fmt: skip
        peer.say(Request.POP_MESSAGE, **asked)
        peer.write(pull_command(peer, "orders", wait_ms=LONG_POLL_MS))
        refused(peer.ask(Request.POP_MESSAGE, **asked), limit, codes.POLLING_FULL)
        connection = connection_of(served, peer)
        assert served.call(lambda: connection.held_count) == 2
        refused(peer.ask(Request.POP_MESSAGE, **{**asked, "exp": "t" * 16_385}), "expression_characters_max",
                codes.INVALID_PARAMETER)  # fmt: skip


def test_what_a_held_request_said_besides_is_not_kept(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        held = pull_command(peer, "orders", wait_ms=LONG_POLL_MS)
        peer.write(held._replace(remark="r" * 10_000, language="l" * 10_000, body=b"b" * 10_000))
        peer.round_trip()
        kept = served.call(lambda: next(iter(next(iter(served.dispatcher.pulls._held.values())))).command)
        assert len(encode(kept)) < 300


def test_a_subscription_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, expression_characters_max=256) as served, connected(served) as peer:
        make_topic(peer, "orders")
        peer.write(pull_command(peer, "orders", tags="t" * 257))
        refused(peer.next_answer(), "expression_characters_max", codes.INVALID_PARAMETER)
        refused(
            heartbeat(peer, "c1", {"orders": "t" * 257}), "expression_characters_max", codes.INVALID_PARAMETER
        )  # fmt: skip
        assert heartbeat(peer, "c1", {"orders": "t" * 256}).code == codes.SUCCESS


@pytest.mark.parametrize("limit", [255, 256])
def test_a_client_id_has_at_most_255_characters(tmp_path: Path, limit: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        expected = codes.SUCCESS if limit == 255 else codes.INVALID_PARAMETER
        assert heartbeat(peer, "c" * limit, {}).code == expected
        assert lock(peer, "c" * limit, ["orders"]).code == expected


def test_definitions_are_small(tmp_path: Path) -> None:
    with serving(tmp_path, definition_bytes_max=1 << 10) as served, connected(served) as peer:
        fields: dict[str, Any] = {"topic": "orders", "attributes": f"+note={'x' * 1_024}"}
        answer = peer.ask(Request.UPDATE_AND_CREATE_TOPIC, **fields)
        refused(answer, "definition_bytes_max", codes.INVALID_PARAMETER)
        body = orjson.dumps({"groupName": GROUP, "note": "x" * 1_024})
        answer = peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
        refused(answer, "definition_bytes_max", codes.INVALID_PARAMETER)


def test_key_value_settings_are_few(tmp_path: Path) -> None:
    def put(peer: Peer, key: str, value: str = "x") -> Any:
        return peer.ask(Request.PUT_KV_CONFIG, namespace="n", key=key, value=value)

    with serving(tmp_path, values_max=2, definition_bytes_max=1 << 10) as served, connected(served) as peer:
        assert [put(peer, key).code for key in ("a", "b", "a")] == [codes.SUCCESS] * 3
        refused(put(peer, "c"), "values_max")
        refused(put(peer, "a", "x" * 1_024), "definition_bytes_max", codes.INVALID_PARAMETER)
        assert peer.ask(Request.DELETE_KV_CONFIG, namespace="n", key="b").code == codes.SUCCESS
        assert put(peer, "c").code == codes.SUCCESS


def test_the_key_of_a_cancel_is_short(tmp_path: Path) -> None:
    with serving(tmp_path, key_characters_max=32) as served, connected(served) as peer:
        make_topic(peer, "orders")
        due = served.clock.now_ms() + HOUR_MS
        answer = peer.ask(Request.RECALL_MESSAGE, topic="orders", key="k" * 33, due=due)
        refused(answer, "key_characters_max", codes.ILLEGAL_OPERATION)
        sent(peer, "orders", KEYS="k" * 32, TIMER_DELIVER_MS=due)
        assert peer.ask(Request.RECALL_MESSAGE, topic="orders", key="k" * 32, due=due).code == codes.SUCCESS


def test_a_handle_that_is_given_is_one_that_a_cancel_may_have(tmp_path: Path) -> None:
    with serving(tmp_path, key_characters_max=32) as served, connected(served) as peer:
        due = served.clock.now_ms() + HOUR_MS
        kept = sent(peer, "orders", UNIQ_KEY="k" * 32, TIMER_DELIVER_MS=due).fields["recallHandle"]
        assert "recallHandle" not in sent(peer, "orders", UNIQ_KEY="k" * 33, TIMER_DELIVER_MS=due).fields
        inner = [(name, {"UNIQ_KEY": "u" * length, "TIMER_DELIVER_MS": due}) for name, length in (("a", 32), ("b", 33))]
        assert send_batch(peer, "orders", inner).fields["recallHandles"].split(" ")[1] == "-"
        assert peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=kept).code == codes.SUCCESS


# --------------------------------------------------------------------------------------------- topics and groups


def test_a_topic_has_only_so_many_queues(tmp_path: Path) -> None:
    with serving(tmp_path, topic_queues_max=4) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        fields: dict[str, Any] = {"topic": "orders", "readQueueNums": 5, "writeQueueNums": 5}
        answer = peer.ask(Request.UPDATE_AND_CREATE_TOPIC, **fields)
        assert (answer.code, "expected 1 to 4" in (answer.remark or "")) == (codes.INVALID_PARAMETER, True)


def test_queues_are_counted_over_all_topics_that_ever_were(tmp_path: Path) -> None:
    with serving(tmp_path, queues_max=LEVELS + 6) as served, connected(served) as peer:
        make_topic(peer, "first", 4)
        fields: dict[str, Any] = {"topic": "second", "readQueueNums": 3, "writeQueueNums": 3}
        refused(peer.ask(Request.UPDATE_AND_CREATE_TOPIC, **fields), "queues_max")
        make_topic(peer, "second", 2)
        make_topic(peer, "first", 2)
        make_topic(peer, "first", 4)
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="second").code == codes.SUCCESS
        refused(peer.ask(Request.UPDATE_AND_CREATE_TOPIC, **fields), "queues_max")


def test_topics_and_groups_made_by_using_them_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, topics_max=3, groups_max=2) as served, connected(served) as peer:
        sent(peer, "first")
        assert heartbeat(peer, "c1", {"second": "*"}, group="a").code == codes.SUCCESS
        command = send_command(peer, "fourth")
        peer.write(command)
        refused(peer.next_answer(), "topics_max")
        pulls = [pull_command(peer, "first", group=name) for name in ("b", "c")]
        peer.write(*pulls)
        assert peer.next_answer().code == codes.SUCCESS
        refused(peer.next_answer(), "groups_max")


def test_offsets_are_bounded_over_all_groups(tmp_path: Path) -> None:
    def commit(peer: Peer, group: str, queue_id: int) -> Any:
        fields: dict[str, Any] = {"consumerGroup": group, "topic": "orders", "queueId": queue_id, "commitOffset": 0}
        return peer.ask(Request.UPDATE_CONSUMER_OFFSET, **fields)

    with serving(tmp_path, offsets_max=3) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        assert commit(peer, "a", 0).code == codes.SUCCESS
        assert commit(peer, "a", 0).code == codes.SUCCESS, "the same again is none more"
        peer.write(pull_command(peer, "orders", queue_id=1, group="a", commit=0))
        assert peer.next_answer().code == codes.PULL_NOT_FOUND
        assert commit(peer, "b", 0).code == codes.SUCCESS
        refused(commit(peer, "b", 1), "offsets_max")
        peer.write(pull_command(peer, "orders", queue_id=2, group="a", commit=0))
        refused(peer.next_answer(), "offsets_max")
    with serving(tmp_path, offsets_max=3) as served, connected(served) as peer:
        refused(commit(peer, "b", 1), "offsets_max")
        assert peer.ask(Request.DELETE_SUBSCRIPTIONGROUP, groupName="a").code == codes.SUCCESS
        assert [commit(peer, "b", n).code for n in (1, 2)] == [codes.SUCCESS] * 2
        refused(commit(peer, "b", 3), "offsets_max")
        sent(peer, "orders")
        asked: dict[str, Any] = {
            "consumerGroup": "new", "topic": "orders", "queueId": 0, "maxMsgNums": 1, "invisibleTime": 1_000,
            "pollTime": 0, "bornTime": 0, "initMode": 0, "expType": "TAG", "exp": "*",
        }  # fmt: skip
        refused(peer.ask(Request.POP_MESSAGE, **asked), "offsets_max")


# ---------------------------------------------------------------------------------------------- members and locks


def beat(peer: Peer, client_id: str, *consumers: tuple[str, list[str]]) -> Any:
    """A heartbeat of several groups: name, topics."""
    data = [
        {"groupName": group, "subscriptionDataSet": [{"topic": topic, "subString": "*"} for topic in topics]}
        for group, topics in consumers
    ]
    return peer.ask(Request.HEART_BEAT, orjson.dumps({"clientID": client_id, "consumerDataSet": data}))


def member_ids(served: Served, group: str) -> set[str]:
    return served.call(lambda: {member.client_id for member in served.dispatcher.groups._members.of(group)})


def test_a_connection_stands_for_a_few_members(tmp_path: Path) -> None:
    with serving(tmp_path, connection_members_max=3) as served, connected(served) as peer, connected(served) as other:
        for _ in range(2):
            assert beat(peer, "c1", ("a", []), ("b", [])).code == codes.SUCCESS
        refused(beat(peer, "c2", ("a", []), ("b", [])), "connection_members_max")
        assert "c2" not in member_ids(served, "a")
        assert beat(peer, "c2", ("a", [])).code == codes.SUCCESS
        refused(beat(peer, "c3", ("new", [])), "connection_members_max")
        assert "new" not in served.call(lambda: served.broker.fold.groups), "what is refused makes nothing"
        assert beat(other, "c3", ("a", [])).code == codes.SUCCESS
        # Leaving makes room, and leaves nothing behind.
        assert peer.ask(Request.UNREGISTER_CLIENT, clientID="c2", consumerGroup="a").code == codes.SUCCESS
        assert beat(peer, "c4", ("a", [])).code == codes.SUCCESS
        assert member_ids(served, "a") == {"c1", "c3", "c4"}


def test_a_member_that_comes_by_another_connection_is_counted_there(tmp_path: Path) -> None:
    with serving(tmp_path, connection_members_max=1) as served, connected(served) as peer:
        with connected(served) as old:
            assert beat(old, "c1", ("a", [])).code == codes.SUCCESS
            assert beat(peer, "c1", ("a", [])).code == codes.SUCCESS
            assert beat(old, "c2", ("a", [])).code == codes.SUCCESS
        until(served, lambda: len(served.dispatcher.connections) == 1)
        assert member_ids(served, "a") == {"c1"}
    members = served.dispatcher.groups._members
    assert (members._groups, members._places_of, members._size_bytes) == ({}, {}, 0)


def test_all_members_together_take_only_so_much(tmp_path: Path) -> None:
    with serving(tmp_path, members_bytes_max=64 << 10) as served, connected(served) as peer:
        for n in range(1_000):
            answer = heartbeat(peer, f"c{n}", {"orders": "t" * 10_000})
            if answer.code != codes.SUCCESS:
                break
        refused(answer, "members_bytes_max")
        assert 1 < n < 6
        assert member_ids(served, GROUP) == {f"c{index}" for index in range(n)}
        assert heartbeat(peer, "c0", {"orders": "*"}).code == codes.SUCCESS, "one that wants less is taken"
        assert heartbeat(peer, f"c{n}", {"orders": "t" * 10_000}).code == codes.SUCCESS


def test_one_heartbeat_makes_only_so_many_topics_and_groups(tmp_path: Path) -> None:
    with serving(tmp_path, heartbeat_topics_max=5) as served, connected(served) as peer:
        wanted = [f"topic{n}" for n in range(10)]

        def made() -> int:
            return served.call(lambda: sum(name in served.broker.fold.topics.by_name for name in wanted))

        assert beat(peer, "c1", ("a", wanted)).code == codes.SUCCESS
        assert made() == 4, "and the retry topic of the group"
        assert beat(peer, "c1", ("a", wanted)).code == codes.SUCCESS
        assert made() == 9
        assert beat(peer, "c1", ("a", wanted)).code == codes.SUCCESS
        assert made() == 10
        groups: list[tuple[str, list[str]]] = [(f"group{n}", []) for n in range(8)]
        refused(beat(peer, "c1", *groups), "heartbeat_topics_max")
        assert member_ids(served, "group0") == set(), "it is no member before all of it is taken"
        assert beat(peer, "c1", *groups).code == codes.SUCCESS


def lock(peer: Peer, client_id: str, topics: list[str]) -> Any:
    queues = [{"topic": topic, "brokerName": "postdate", "queueId": 0} for topic in topics]
    return peer.ask(
        Request.LOCK_BATCH_MQ, orjson.dumps({"consumerGroup": GROUP, "clientId": client_id, "mqSet": queues})
    )


def locked(answer: Any) -> list[str]:
    assert answer.code == codes.SUCCESS, answer
    return [queue["topic"] for queue in orjson.loads(answer.body)["lockOKMQSet"]]


def test_locks_are_bounded_and_those_that_are_held_are_renewed(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), locks_max=3, lock_expiry_ms=1_000) as served, connected(served) as peer:
        assert locked(lock(peer, "c1", ["a", "b"])) == ["a", "b"]
        refused(lock(peer, "c2", ["c", "d"]), "locks_max")
        assert locked(lock(peer, "c2", ["a", "c"])) == ["c"]
        assert locked(lock(peer, "c1", ["a", "b"])) == ["a", "b"]
        assert locked(lock(peer, "c1", ["x" * 256])) == [], "no topic has such a name"
        refused(lock(peer, "c1", ["e"]), "locks_max")
        served.pass_ms(1_001)
        served.call(served.dispatcher.groups.expire)
        assert locked(lock(peer, "c2", ["a", "b", "e"])) == ["a", "b", "e"]

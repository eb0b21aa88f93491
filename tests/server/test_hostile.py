"""The server against what it was not made for: nested values, answers that do not fit, clients that do not read, a fold
that broke, clocks that are set back while the disk is full.
"""

import errno
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.arrival import NEVER
from postdate.clock import ManualClock
from postdate.errors import DiskFull
from postdate.message import Message
from postdate.storage.batch import Prepared
from postdate.wire import codes
from postdate.wire.requests import REQUESTS, Request
from tests.support.core import T0, FaultyDisk
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    TINY,
    Peer,
    connected,
    got,
    make_topic,
    pull,
    pull_command,
    raw_frame,
    read_bodies,
    send,
    send_batch,
    send_command,
    sent,
)
from tests.support.server import WAIT_S, Served, serving

DEEP = b"[" * 1_000 + b"]" * 1_000
FULL = OSError(errno.ENOSPC, "No space left on device")


def raw_with(code: int, opaque: int, fields: dict[str, Any], name: str, value: bytes) -> bytes:
    """A request with one field that is the given JSON."""
    frame = raw_frame(code, opaque, {**fields, name: "@"})
    header = frame[8:].replace(b'"@"', value)
    return (4 + len(header)).to_bytes(4, "big") + len(header).to_bytes(4, "big") + header


# --------------------------------------------------------------------------------------------------- nested values


@pytest.mark.parametrize("levels", [40, 975, 980, 985, 1_020])
def test_settings_of_a_group_that_are_nested_too_deep_are_refused_and_harm_nobody(tmp_path: Path, levels: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        body = b'{"groupName":"g","x":' + b"[" * levels + b"]" * levels + b"}"
        answer = peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
        assert (answer.code, "nested" in (answer.remark or "")) == (codes.INVALID_PARAMETER, True)
        sent(peer, "orders", "all is well")
    with serving(tmp_path) as served, connected(served) as peer:
        assert read_bodies(peer, "orders") == ["all is well"]


def test_settings_of_a_group_may_be_nested_as_those_of_rocketmq_are(tmp_path: Path) -> None:
    settings = {"groupName": "g", "groupRetryPolicy": {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1]}}}
    with serving(tmp_path) as served, connected(served) as peer:
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, orjson.dumps(settings)).code == codes.SUCCESS


@pytest.mark.parametrize("name", ["subscription", "expressionType"])
def test_a_pull_with_a_nested_value_is_refused(tmp_path: Path, name: str) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        fields = {"consumerGroup": GROUP, "topic": "orders", "queueId": 0, "queueOffset": 0, "maxMsgNums": 1,
                  "sysFlag": codes.PULL_SUBSCRIPTION}  # fmt: skip
        peer.socket.sendall(raw_with(Request.PULL_MESSAGE, 7, fields, name, DEEP))
        assert peer.answer_to(7).code == codes.INVALID_PARAMETER


def test_a_check_of_a_nested_subscription_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        body = b'{"subscriptionData":{"expressionType":' + DEEP + b"}}"
        assert peer.ask(Request.CHECK_CLIENT_CONFIG, body).code == codes.INVALID_PARAMETER


NAMES = ("table", "master", "chunks", "far", "horizon", "epoch", "rows_in", "at_ms", "clientID", "subscriptionData")


@pytest.mark.parametrize("code", sorted(set(REQUESTS) - {Request.PULL_MESSAGE, Request.LITE_PULL_MESSAGE}))
def test_no_request_falls_over_nested_values(tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture) -> None:
    """In any field, and in a body: refused, and the next one is served, if need be on a new connection."""
    inside = b", ".join(b'"%b": %b' % (name.encode(), DEEP) for name in NAMES)
    names = [field.name for field in REQUESTS[code].fields]
    with serving(tmp_path) as served:
        for body, fields in [(b"{%b}" % inside, names[:0]), (DEEP, names[:0]), (b"{}", names)]:
            for name in fields or [""]:
                with connected(served) as peer:
                    header = {"code": code, "opaque": 7, "extFields": dict.fromkeys(names, "1")}
                    text = orjson.dumps(header)
                    if name:
                        text = text.replace(b'"%b":"1"' % name.encode(), b'"%b":%b' % (name.encode(), DEEP))
                    size = (4 + len(text) + len(body)).to_bytes(4, "big") + len(text).to_bytes(4, "big")
                    peer.socket.sendall(size + text + body)
                    peer.socket.shutdown(socket.SHUT_WR)
                    while peer.socket.recv(65_536):
                        pass
        with connected(served) as peer:
            sent(peer, "orders", "all is well")
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


# ----------------------------------------------------------------------------------------------------- oneway, held


def test_a_oneway_request_is_never_answered_later(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        peer.write(pull_command(peer, "orders", wait_ms=LONG_POLL_MS)._replace(flag=codes.FLAG_ONEWAY))
        peer.say(Request.GET_PENDING, oneway=True)
        sent(peer, "orders")
        peer.ask(Request.GET_PENDING)
        peer.expect_no_more()


def test_a_held_pull_does_not_hold_what_came_with_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        command = pull_command(peer, "orders", wait_ms=LONG_POLL_MS)
        peer.write(command._replace(body=bytes(1 << 20)))
        peer.round_trip()
        ((held,),) = served.call(lambda: list(served.dispatcher.pulls._held.values()))
        assert (held.command.body, held.command.fields) == (b"", {})
        sent(peer, "orders", "woken")
        assert got(peer.answer_to(command.opaque)).bodies == ["woken"]


def test_held_pulls_of_a_client_that_does_not_read_do_not_pile_up_what_they_would_read(tmp_path: Path) -> None:
    count, limit = 400, 1 << 16
    with (
        serving(tmp_path, write_buffer_bytes_max=limit) as served,
        connected(served) as peer,
        connected(served) as slow,
    ):
        make_topic(peer, "orders")
        commands = [pull_command(slow, "orders", wait_ms=LONG_POLL_MS) for _ in range(count)]
        slow.write(*commands)
        slow.round_trip()
        sent(peer, "orders", bytes(200_000))
        served.call(lambda: None)  # all of them are answered before the first answer is read
        answers = [got(slow.answer_to(command.opaque)) for command in commands]
        found = sum(answer.code == codes.SUCCESS for answer in answers)
        assert 0 < found < 60, "the network takes some megabytes, the rest is told to ask again"
        others = {(answer.code, answer.next_offset) for answer in answers} - {(codes.SUCCESS, 1)}
        assert others == {(codes.PULL_RETRY_IMMEDIATELY, 0)}
        assert len(pull(slow, "orders").records) == 1


# ---------------------------------------------------------------------------------------------------- large answers


def test_a_batch_whose_ids_and_handles_do_not_fit_a_header_is_answered_with_those_of_the_first(tmp_path: Path) -> None:
    size: dict[str, Any] = {"segment_bytes": 1 << 22, "batch_bytes_max": 1 << 22, "broker_name": "b" * 2_000}
    count = 7_000
    with serving(tmp_path, ManualClock(T0), **size) as served, connected(served) as peer:
        messages = [(f"{n}", {"UNIQ_KEY": f"K{n}", "TIMER_DELAY_MS": 1_000}) for n in range(count)]
        answer = send_batch(peer, "orders", messages)
        assert answer.code == codes.SUCCESS
        assert (answer.fields["transactionId"], "," in answer.fields["msgId"]) == ("K0", False)
        recall = {"topic": "orders", "recallHandle": answer.fields["recallHandle"]}
        assert peer.ask(Request.RECALL_MESSAGE, **recall).code == codes.SUCCESS
        served.pass_ms(1_000)
        served.settle()
        assert served.call(lambda: served.broker.offsets("orders", 0)[1]) == count - 1


# ------------------------------------------------------------------------------------------------ mistakes of ours


def test_an_answer_that_cannot_be_given_keeps_nobody_else_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")

        def answer(_ticket: object) -> None:
            raise RuntimeError("a mistake")

        def commit() -> None:
            ticket = served.broker.commit_offsets(GROUP, [("orders", 0, 1)], served.clock.now_ms())
            served.dispatcher.pulse.expect(served.connections()[0], ticket, answer)

        served.call(commit)
        sent(peer, "orders", TIMER_DELAY_MS=5)
        assert got(_waited(peer, "orders")).code == codes.SUCCESS
        assert [record.exc_info is not None for record in caplog.records if record.levelno >= logging.ERROR] == [True]


def _waited(peer: Peer, topic: str) -> Any:
    command = pull_command(peer, topic, wait_ms=LONG_POLL_MS)
    peer.write(command)
    return peer.answer_to(command.opaque)


def test_after_a_mistake_of_ours_no_connection_gets_the_answers_of_another(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer, connected(served) as other:
        make_topic(peer, "orders")
        prepare = served.broker.prepare

        def mistaken(message: Message, at_ms: int) -> Prepared:
            if message.body == b"second":
                raise RuntimeError("a mistake")
            return prepare(message, at_ms)

        served.broker.prepare = mistaken
        peer.write(send_command(peer, "orders", "first"), send_command(peer, "orders", "second"))
        peer.expect_closed()
        sent(other, "orders", "third")
        other.expect_no_more()
        assert read_bodies(other, "orders") == ["first", "third"]


# -------------------------------------------------------------------------------------------------- a failing disk


def test_when_the_fold_breaks_everybody_who_waits_is_told_and_the_alarm_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders", "soon", TIMER_DELAY_MS=1_000)
        served.call(lambda: _break(served))
        first = send_command(peer, "orders", "waits for the disk")
        making = peer.command(Request.UPDATE_AND_CREATE_TOPIC, topic="second")
        peer.write(first, making)
        for opaque in (first.opaque, making.opaque):
            assert peer.answer_to(opaque).code == codes.SERVICE_NOT_AVAILABLE
        for _ in range(3):
            served.pass_ms(1_000)
        assert served.call(lambda: served.dispatcher.pulse._alarm.at_ms) == NEVER, "it would ring without end"
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1, errors


def _break(served: Served) -> None:
    def apply(_batch: object) -> list[Any]:
        raise OSError(errno.EIO, "Input/output error")

    served.broker.fold.apply = apply  # type: ignore[assignment, method-assign]


def test_a_clock_that_is_set_back_does_not_prolong_the_pause_after_a_failed_fire(tmp_path: Path) -> None:
    clock, disk = ManualClock(T0), FaultyDisk(tmp_path)
    with serving(tmp_path, clock, disk=disk) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders", "first", TIMER_DELAY_MS=1_000)
        served.call(lambda: _fail_next_fire(served))
        served.pass_ms(1_000)
        pulse = served.dispatcher.pulse
        assert served.call(lambda: pulse._alarm.at_ms) == served.broker.retry_at_ms > T0 + 1_000
        clock.step_ms(-500_000)
        sent(peer, "orders", "second", TIMER_DELAY_MS=2_000)
        assert served.call(lambda: pulse._alarm.at_ms) == T0 + 1_000 - 500_000 + 2_000
        served.pass_ms(2_000)
        served.settle()
        assert read_bodies(peer, "orders") == ["second"]


def _fail_next_fire(served: Served) -> None:
    fire = served.broker._fire_if_due

    def failing(_at_ms: int) -> None:
        served.broker._fire_if_due = fire  # type: ignore[method-assign]
        raise DiskFull("no room")

    served.broker._fire_if_due = failing  # type: ignore[assignment, method-assign]


def test_a_stop_does_not_wait_for_the_pause_after_a_failed_snapshot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, failed = FaultyDisk(tmp_path), threading.Event()

    def fault(call: str, path: str) -> OSError | None:
        if not path.startswith("snapshots/") or call == "read":
            return None
        failed.set()
        return FULL

    how: dict[str, Any] = {"snapshot_batches": 1, "fire_pause_ms_max": 60_000, "disk": disk}
    with serving(tmp_path, **how) as served, connected(served) as peer:
        disk.fault = fault
        sent(peer, "orders")
        assert failed.wait(WAIT_S)
        for _ in range(20):
            sent(peer, "orders")
        served._run(served.server.stop())
        disk.fault = lambda _call, _path: None
        served.server.stop = _nothing  # type: ignore[method-assign]
    said = [record.getMessage() for record in caplog.records if "snapshot" in record.getMessage()]
    assert len(said) == 1, said


async def _nothing(spent_ms: int = 0) -> None:
    """It has stopped already."""


# ---------------------------------------------------------------------------------------------------- odd requests


def test_offsets_of_many_queues_are_written_in_records_that_fit(tmp_path: Path) -> None:
    topic, count = "t" * 127, 300
    with serving(tmp_path, **TINY) as served, connected(served) as peer:
        make_topic(peer, topic, count)
        for queue_id in range(count):
            asked: dict[str, Any] = {
                "consumerGroup": GROUP,
                "topic": topic,
                "queueId": queue_id,
                "commitOffset": queue_id,
            }
            peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **asked)
        peer.round_trip()
    with serving(tmp_path, **TINY) as served, connected(served) as peer:
        for queue_id in (0, 1, count - 1):
            asked = {"consumerGroup": GROUP, "topic": topic, "queueId": queue_id}
            assert peer.ask(Request.QUERY_CONSUMER_OFFSET, **asked).fields["offset"] == str(queue_id)


def test_a_delete_marker_for_a_topic_that_does_not_exist_makes_none(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = send(peer, "orders", TIMER_DEL_UNIQKEY="K", TIMER_DELAY_MS=1_000)
        assert answer.code == codes.TOPIC_NOT_EXIST
        assert "orders" not in served.broker.fold.topics.by_name


def test_a_recall_by_a_key_that_no_message_can_have_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = peer.ask(Request.RECALL_MESSAGE, topic="orders", key="k" * 40_000, due=T0 + 1)
        assert (answer.code, "outcome" in answer.fields) == (codes.ILLEGAL_OPERATION, False)


def test_pending_counts_what_is_more_than_it_counts_in_one_go(tmp_path: Path) -> None:
    count = 5_000
    size: dict[str, Any] = {"segment_bytes": 1 << 22, "batch_bytes_max": 1 << 22}
    with serving(tmp_path, ManualClock(T0), **size) as served, connected(served) as peer:
        for delay_ms in (1_000, 3_600_000):
            messages = [("", {"TIMER_DELAY_MS": delay_ms}) for _ in range(count)]
            assert send_batch(peer, "orders", messages).code == codes.SUCCESS
        body = orjson.loads(peer.ask(Request.GET_PENDING).body)
        assert not body["truncated"]
        assert (body["near"], body["far"], [row["count"] for row in body["times"]]) == (count, count, [count, count])


def test_pending_shows_the_earliest_of_many_due_times_and_counts_all(tmp_path: Path) -> None:
    count, limit = 5_000, 7
    size: dict[str, Any] = {"segment_bytes": 1 << 22, "batch_bytes_max": 1 << 22}
    with serving(tmp_path, ManualClock(T0), **size) as served, connected(served) as peer:
        dues = [T0 + (n * 7_919 % count + 1) * 1_000 for n in range(count)]
        for name in ("orders", "others"):
            assert send_batch(peer, name, [("", {"TIMER_DELIVER_MS": due}) for due in dues]).code == codes.SUCCESS
        body = orjson.loads(peer.ask(Request.GET_PENDING, unit="second", limit=limit, topic="orders").body)
        assert (body["total"], body["truncated"], [row["topic"] for row in body["topics"]]) == (count, True, ["orders"])
        assert [(row["from_ms"], row["count"]) for row in body["times"]] == [
            (T0 + n * 1_000, 1) for n in range(1, limit + 1)
        ]
        body = orjson.loads(peer.ask(Request.GET_PENDING, unit="second", limit=limit).body)
        assert [(row["from_ms"], row["topic"]) for row in body["times"]] == [
            (T0 + (n // 2 + 1) * 1_000, ("orders", "others")[n % 2]) for n in range(limit)
        ]

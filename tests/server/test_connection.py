"""Frames on real sockets: both serializations, any splitting, several in one write, and what cannot be read."""

import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from postdate.wire import codes
from postdate.wire.frame import BINARY, JSON, encode
from postdate.wire.requests import Request
from tests.support.bulk import wait_until
from tests.support.peer import (
    LONG_POLL_MS,
    UNKNOWN_CODE,
    Peer,
    connected,
    make_topic,
    pull_command,
    raw_frame,
    read_bodies,
    send_command,
    sent,
    texts,
)
from tests.support.server import Served, serving

SERIALIZATIONS = pytest.mark.parametrize("serialization", [JSON, BINARY], ids=["json", "binary"])


# ------------------------------------------------------------------------------------------------- what is answered


@SERIALIZATIONS
def test_an_answer_is_written_as_its_request_and_carries_its_opaque(tmp_path: Path, serialization: int) -> None:
    with serving(tmp_path) as served, connected(served, serialization=serialization) as peer:
        make_topic(peer, "orders")
        questions = [
            send_command(peer, "orders", "first", UNIQ_KEY="K1"),
            send_command(peer, "orders", "later", TIMER_DELAY_SEC=60, UNIQ_KEY="K2"),
            send_command(peer, "orders", "refused", TIMER_DELAY_SEC="soon"),
            peer.command(Request.GET_MAX_OFFSET, topic="orders", queueId=0),
            peer.command(UNKNOWN_CODE),
        ]
        for question in questions:
            peer.write(question._replace(opaque=question.opaque + 1_000_000))
            answer = peer.next_answer()
            assert answer.opaque == question.opaque + 1_000_000
            assert answer.serialization == serialization
            assert answer.flag == codes.FLAG_RESPONSE
            assert answer.version >= 401, "clients decide by the version what they may ask for"
        peer.write(pull_command(peer, "orders"))
        pulled = peer.next_answer()
        assert (pulled.code, pulled.serialization) == (codes.SUCCESS, serialization)
        assert pulled.fields == {
            "suggestWhichBrokerId": "0", "nextBeginOffset": "1", "minOffset": "0", "maxOffset": "1",
        }  # fmt: skip


def test_both_serializations_may_share_a_connection(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for serialization in (JSON, BINARY, JSON):
            question = peer.command(Request.GET_ROUTEINFO_BY_TOPIC, topic="TBW102")
            peer.write(question._replace(serialization=serialization))
            assert peer.next_answer().serialization == serialization


def test_both_serializations_give_the_same_fields_of_a_delayed_send(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as one, connected(served, serialization=BINARY) as other:
        make_topic(one, "orders")
        fields = [sent(peer, "orders", TIMER_DELAY_SEC=60, UNIQ_KEY="K").fields for peer in (one, other)]
        for each in fields:
            assert each.pop("msgId")
            assert each.pop("recallHandle")
        assert fields[0] == fields[1]


def test_a_frame_may_arrive_in_any_pieces(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        frames = encode(send_command(peer, "orders", "split")) + encode(pull_command(peer, "orders"))
        for size in (1, 2, 3, 5, 7, 64, len(frames) - 1):
            for start in range(0, len(frames), size):
                peer.socket.send(frames[start : start + size])
            for _ in range(2):
                assert peer.next_answer().code in (codes.SUCCESS, codes.PULL_NOT_FOUND)
        assert read_bodies(peer, "orders") == ["split"] * 7


def test_frames_of_one_write_are_answered_each(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sends = [send_command(peer, "orders", str(n)) for n in range(50)]
        peer.write(*sends)
        answers = [peer.next_answer() for _ in sends]
        assert [answer.opaque for answer in answers] == [command.opaque for command in sends]
        assert [answer.fields["queueOffset"] for answer in answers] == [str(n) for n in range(50)]
        assert read_bodies(peer, "orders") == [str(n) for n in range(50)]


def test_what_can_be_answered_at_once_does_not_wait_for_what_cannot(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        held = pull_command(peer, "orders", wait_ms=LONG_POLL_MS)
        stored = send_command(peer, "orders", "arrives")
        asked = [peer.command(Request.GET_MIN_OFFSET, topic="orders", queueId=0), peer.command(UNKNOWN_CODE)]
        peer.write(held, stored, *asked)
        answers = [peer.next_answer().opaque for _ in range(4)]
        assert answers[:2] == [command.opaque for command in asked], "they wait for nothing, and keep their order"
        assert sorted(answers[2:]) == sorted([held.opaque, stored.opaque])


@pytest.mark.parametrize(
    "behind", [Request.HEART_BEAT, Request.UPDATE_AND_CREATE_TOPIC, Request.UPDATE_CONSUMER_OFFSET]
)
def test_a_send_is_answered_whatever_is_asked_behind_it_in_one_write(tmp_path: Path, behind: int) -> None:
    # Making a group or a topic waits for the disk itself, and so makes the send before it durable, too.
    body = b'{"clientID":"c1","consumerDataSet":[{"groupName":"new"}]}' if behind == Request.HEART_BEAT else b""
    with serving(tmp_path) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders")
        held = pull_command(reader, "orders", wait_ms=LONG_POLL_MS)
        reader.write(held)
        reader.round_trip()
        fields: dict[str, Any] = (
            {"topic": "second"} if behind == Request.UPDATE_AND_CREATE_TOPIC else {"topic": "orders"}
        )
        more: dict[str, Any] = {"consumerGroup": "new", "queueId": 0, "commitOffset": 0, **fields}
        commands = [send_command(peer, "orders", "first"), peer.command(behind, body, **more)]
        peer.write(*commands)
        for command in commands:
            assert peer.answer_to(command.opaque).code == codes.SUCCESS
        assert reader.answer_to(held.opaque).code == codes.SUCCESS, "and whoever waited for it has it"


def test_a_client_that_answers_a_notice_is_not_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        reply = peer.command(codes.SUCCESS)._replace(flag=codes.FLAG_RESPONSE)
        peer.write(reply)
        peer.expect_no_more()


# ----------------------------------------------------------------------------------------------- what cannot be read


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


BAD_STREAMS = {
    "http": b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
    "negative length": b"\xff\xff\xff\xff" + bytes(100),
    "length below 4": b"\x00\x00\x00\x03abc",
    "oversized": (1 << 24 | 1).to_bytes(4, "big"),
    "header longer than its frame": b"\x00\x00\x00\x08\x00\x00\x01\x00abcd",
    "unknown serialization": b"\x00\x00\x00\x06\x07\x00\x00\x02{}",
    "no json": b"\x00\x00\x00\x08\x00\x00\x00\x04oops",
    "json without code": b"\x00\x00\x00\x06\x00\x00\x00\x02{}",
    "json list": b"\x00\x00\x00\x06\x00\x00\x00\x02[]",
    "a send that is no utf-8": raw_frame(Request.SEND_MESSAGE_V2, 1, {"b": "@", "e": "0"}).replace(b"@", b"\xff"),
    "binary cut short": b"\x00\x00\x00\x08\x01\x00\x00\x04\x00\x01\x02\x03",
}


@pytest.mark.parametrize("stream", BAD_STREAMS.values(), ids=BAD_STREAMS.keys())
def test_a_stream_that_is_not_ours_ends_its_connection_with_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bytes
) -> None:
    with serving(tmp_path) as served, connected(served) as good, connected(served) as bad:
        make_topic(good, "orders")
        bad.socket.sendall(stream)
        bad.expect_closed()
        assert len(warnings_of(caplog)) == 1
        assert f"closing the connection of 127.0.0.1:{bad_port(bad)}" in warnings_of(caplog)[0]
        sent(good, "orders", "others live on")
        assert connections(served) == 1


def bad_port(peer: Peer) -> int:
    return int(peer.socket.getsockname()[1])


def connections(served: Served) -> int:
    return served.call(lambda: len(served.dispatcher.connections))


def test_a_connection_that_ends_within_a_frame_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path) as served, connected(served) as bad, connected(served) as good:
        bad.socket.sendall(encode(send_command(bad, "orders"))[:-1])
        bad.socket.shutdown(socket.SHUT_WR)
        bad.expect_closed()
        assert len(warnings_of(caplog)) == 1
        assert "ended within a frame" in warnings_of(caplog)[0]
        good.round_trip()


def test_a_connection_that_ends_between_frames_is_not_worth_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        peer.round_trip()
        peer.socket.shutdown(socket.SHUT_WR)
        peer.expect_closed()
        assert warnings_of(caplog) == []
        assert connections(served) == 0


def test_what_came_before_garbage_counts(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as bad, connected(served) as good:
        make_topic(good, "orders")
        bad.socket.sendall(encode(send_command(bad, "orders", "before")) + BAD_STREAMS["http"])
        bad.expect_closed()
        served.settle()
        assert read_bodies(good, "orders") == ["before"]


FIELDS: list[dict[str, Any]] = [
    {"b": 5}, {"b": ["orders"]}, {"b": {}}, {"b": True}, {"e": []}, {"e": "x"}, {"e": 1.5}, {"e": "9" * 5_000},
    {"f": {}}, {"g": "yesterday"}, {"h": "9" * 30}, {"i": 7}, {"i": ["x"]}, {"j": "often"}, {"j": {}},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_send_with_a_field_of_another_kind_is_answered_and_the_connection_lives_on(
    tmp_path: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        # As no Java client would: the field's value is written as it is, not as text.
        command = send_command(peer, "orders")
        peer.socket.sendall(raw_frame(command.code, command.opaque, {**texts(command.fields), **fields}))
        assert peer.answer_to(command.opaque).code in (
            codes.SUCCESS, codes.INVALID_PARAMETER, codes.MESSAGE_ILLEGAL, codes.TOPIC_NOT_EXIST,
        )  # fmt: skip
        sent(peer, "orders", "goes on")
        assert [line for line in warnings_of(caplog) if "is refused:" not in line] == []


PULL_FIELDS: list[dict[str, Any]] = [
    {"topic": 5}, {"topic": []}, {"consumerGroup": 5}, {"consumerGroup": {}}, {"consumerGroup": "a b"},
    {"queueId": -1}, {"queueId": 7}, {"queueId": []}, {"queueId": "9" * 40}, {"queueOffset": -5},
    {"queueOffset": "9" * 40},
    {"maxMsgNums": 0}, {"maxMsgNums": -1}, {"maxMsgNums": "9" * 40}, {"maxMsgBytes": -1}, {"maxMsgBytes": "9" * 40},
    {"commitOffset": "9" * 40}, {"suspendTimeoutMillis": -1}, {"subscription": 7}, {"expressionType": []},
]  # fmt: skip


@pytest.mark.parametrize("fields", PULL_FIELDS, ids=str)
def test_a_pull_with_an_odd_field_is_answered_and_the_server_lives_on(
    tmp_path: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders")
        command = pull_command(peer, "orders", commit=0)
        peer.socket.sendall(raw_frame(command.code, command.opaque, {**texts(command.fields), **fields}))
        peer.answer_to(command.opaque)
        # Offsets that came with it are written as usual, with those of others.
        served.call(served.dispatcher.groups.write_offsets)
        assert read_bodies(peer, "orders") == ["hello"]
        assert warnings_of(caplog) == []


def test_an_unknown_code_is_refused_by_number_and_the_connection_lives_on(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for _ in range(2):
            answer = peer.ask(31_000)
            assert answer.code == codes.REQUEST_CODE_NOT_SUPPORTED
            assert answer.remark == "request code 31000 is not supported"


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    rows: list[tuple[int, dict[str, Any], str]] = [
        (Request.SEND_MESSAGE_V2, {"b": "orders"}, "SEND_MESSAGE_V2 lacks the field queueId"),
        (Request.SEND_MESSAGE, {"queueId": "0"}, "SEND_MESSAGE lacks the field topic"),
        (Request.PULL_MESSAGE, {"topic": "orders"}, "PULL_MESSAGE lacks the field consumerGroup"),
        (Request.UPDATE_CONSUMER_OFFSET, {"topic": "orders"}, "lacks the field consumerGroup"),
        (Request.RECALL_MESSAGE, {}, "RECALL_MESSAGE lacks the field topic"),
    ]
    with serving(tmp_path) as served, connected(served) as peer:
        for code, fields, named in rows:
            answer = peer.ask(code, **fields)
            assert answer.code == codes.INVALID_PARAMETER
            assert named in (answer.remark or "")


def test_a_body_that_is_not_what_it_should_be_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for code in (Request.HEART_BEAT, Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ, Request.CHECK_CLIENT_CONFIG,
                     Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP):  # fmt: skip
            for body in (b"", b"{", b"[]"):
                assert peer.ask(code, body).code == codes.INVALID_PARAMETER, (code, body)


# ------------------------------------------------------------------------------------------------------- limits


def test_one_connection_too_many_is_turned_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, connections_max=2) as served, connected(served) as first:
        with connected(served) as second, connected(served) as third:
            for peer in (first, second):
                peer.round_trip()
            third.expect_closed()
            assert len(warnings_of(caplog)) == 1
            assert "connections_max" in warnings_of(caplog)[0]
            for peer in (first, second):
                peer.round_trip()
            second.socket.shutdown(socket.SHUT_WR)
            second.expect_closed()
        with connected(served) as again:
            again.round_trip()


BIG = 200_000  # bytes of a message
PULLS = 400  # of it: 80 MB of answers


def test_a_client_that_does_not_read_its_answers_is_not_read_from_further(tmp_path: Path) -> None:
    with serving(tmp_path, write_buffer_bytes_max=1 << 20) as served, connected(served) as other:
        make_topic(other, "orders")
        sent(other, "orders", bytes(BIG))
        with connected(served) as slow:
            pulls = [pull_command(slow, "orders") for _ in range(PULLS)]
            slow.write(*pulls)
            wait_until(lambda: served.call(lambda: any(each.is_paused for each in served.dispatcher.connections)))
            connection = served.call(lambda: next(each for each in served.connections() if each.is_paused))
            # What is written and what waits to be handled, together far less than what was asked for.
            transport = connection._transport
            assert transport is not None
            assert served.call(transport.get_write_buffer_size) < 4 << 20
            assert not served.call(transport.is_reading)
            assert 0 < served.call(lambda: len(connection._backlog)) < PULLS
            sent(other, "orders", "others are served meanwhile")
            answers = [slow.next_answer() for _ in pulls]
            assert [answer.opaque for answer in answers] == [pull.opaque for pull in pulls]
            assert all(len(answer.body) > BIG for answer in answers)
            assert served.call(transport.is_reading)
            slow.expect_no_more()

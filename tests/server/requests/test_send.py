"""Sending over the wire: what a producer is told, what it may ask for, what is refused."""

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from postdate.clock import ManualClock
from postdate.state.topics import RESERVED_TOPICS
from postdate.wire import codes
from postdate.wire.bodies import Inner, encode_batch
from postdate.wire.frame import Command
from postdate.wire.ids import parse_message_id, parse_recall_handle
from postdate.wire.requests import Request
from tests.support.core import DAY_MS, HOUR_MS, MINUTE_MS, T0
from tests.support.peer import (
    LONG_POLL_MS,
    Gate,
    connected,
    got,
    make_topic,
    properties_of,
    properties_text,
    pull,
    pull_command,
    raw_frame,
    read_all,
    read_bodies,
    send,
    send_batch,
    send_command,
    sent,
)
from tests.support.server import serving

# -------------------------------------------------------------------------------------------------------- answers


def test_the_answer_to_a_send_has_what_clients_look_for(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        fields = sent(peer, "orders", queue_id=3, UNIQ_KEY="7F00000100000001").fields
        assert re.fullmatch(r"[0-9A-F]{32}", fields.pop("msgId"))
        assert fields == {
            "queueId": "3", "queueOffset": "0", "transactionId": "7F00000100000001", "MSG_REGION": "DefaultRegion",
            "TRACE_ON": "true",
        }  # fmt: skip
        assert sent(peer, "orders", queue_id=3).fields["queueOffset"] == "1"


def test_a_message_without_a_unique_key_is_answered_too(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        rows: list[dict[str, Any]] = [{}, {"TIMER_DELAY_SEC": 60}]
        for properties in rows:
            fields = sent(peer, "orders", **properties).fields
            assert fields["transactionId"] == ""
            assert "recallHandle" not in fields, "nothing could be recalled by it"


def test_a_unique_key_of_any_characters_comes_back_as_it_was(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for key in ('say "hi"', "back\\slash", "Schlüssel", "tab\there", "%d%b"):
            fields = sent(peer, "orders", UNIQ_KEY=key, TIMER_DELAY_SEC=60).fields
            assert fields["transactionId"] == key
            assert parse_recall_handle(fields["recallHandle"]).unique_key == key


@pytest.mark.parametrize(
    ("delay", "due"),
    [
        ({"DELAY": 1}, T0 + 1_000),
        ({"TIMER_DELAY_SEC": 5}, T0 + 5_000),
        ({"TIMER_DELIVER_MS": T0 + 77_000}, T0 + 77_000),
        ({"__STARTDELIVERTIME": T0 + 77_000}, T0 + 77_000),
    ],
    ids=str,
)
def test_a_delayed_message_is_answered_with_its_recall_handle(tmp_path: Path, delay: dict[str, Any], due: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        fields = sent(peer, "orders", UNIQ_KEY="K1", **delay).fields
        handle = parse_recall_handle(fields["recallHandle"])
        assert handle == ("orders", "postdate", due, "K1")
        assert "recallHandle" not in sent(peer, "orders", UNIQ_KEY="K2").fields
        late = sent(peer, "orders", UNIQ_KEY="K3", TIMER_DELIVER_MS=T0).fields
        assert "recallHandle" not in late, "a due time that has come is no delay"


def test_the_message_id_leads_to_the_message(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        _, offset = parse_message_id(sent(peer, "orders", "look at me").fields["msgId"])
        assert [record.offset for record in read_all(peer, "orders")] == [offset]


def test_a_send_with_long_names_and_bare_numbers_is_understood(tmp_path: Path) -> None:
    # As the C++ client writes it.
    fields = {
        "producerGroup": "p", "topic": "orders", "defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "queueId": 2,
        "sysFlag": 0, "bornTimestamp": 1_700_000_000_123, "flag": 9, "properties": properties_text({"TAGS": "a"}),
        "reconsumeTimes": 0, "unitMode": "0", "batch": 0, "AccessKey": "", "OnsChannel": "ALIYUN", "Signature": "x",
    }  # fmt: skip
    with serving(tmp_path) as served, connected(served) as peer:
        for opaque, code in enumerate((Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2), 5_000):
            peer.socket.sendall(raw_frame(code, opaque, fields, b"from C++"))
            answer = peer.next_answer()
            assert (answer.code, answer.opaque, answer.fields["queueId"]) == (codes.SUCCESS, opaque, "2")
        records = read_all(peer, "orders", 2)
        assert [record.body for record in records] == [b"from C++"] * 2
        assert {(record.born_at_ms, record.sys_flag) for record in records} == {(1_700_000_000_123, 0)}
        assert properties_of(records[0]) == {"TAGS": "a"}


def test_without_a_queue_the_broker_picks_one_after_the_other(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", 3)
        queues = [int(sent(peer, "orders", queue_id=-1).fields["queueId"]) for _ in range(6)]
        assert sorted(queues[:3]) == [0, 1, 2]
        assert queues[3:] == queues[:3]
        assert sent(peer, "fresh", queue_id=-1).code == codes.SUCCESS, "of a topic that does not exist yet, too"


def test_an_answer_is_not_taken_for_a_send(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        peer.write(send_command(peer, "orders", "an answer")._replace(flag=codes.FLAG_RESPONSE))
        sent(peer, "orders", "a send")
        assert read_bodies(peer, "orders") == ["a send"]


def test_a_oneway_send_is_stored_and_not_answered(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        peer.write(
            send_command(peer, "orders", "silent", oneway=True),
            send_command(peer, "orders", "refused silently", oneway=True, DELAY="x"),
        )
        sent(peer, "orders", "said")
        peer.expect_no_more()
        assert read_bodies(peer, "orders") == ["silent", "said"]


def test_a_compressed_body_is_left_as_it_is(tmp_path: Path) -> None:
    compressed = bytes(range(256)) * 20
    with serving(tmp_path) as served, connected(served) as peer:
        sys_flag = codes.SYS_COMPRESSED | 3 << 8  # zlib
        sent(peer, "orders", compressed, sys_flag=sys_flag)
        (record,) = read_all(peer, "orders")
        assert (record.body, record.sys_flag) == (compressed, sys_flag)


# ------------------------------------------------------------------------------------------------------- batches


def test_a_batch_is_stored_message_by_message(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        answer = send_batch(peer, "orders", [(f"m{n}", {"UNIQ_KEY": f"K{n}", "TAGS": f"t{n}"}) for n in range(3)], e=1)
        assert answer.code == codes.SUCCESS
        offsets = [parse_message_id(each)[1] for each in answer.fields["msgId"].split(",")]
        records = read_all(peer, "orders", 1)
        assert [record.offset for record in records] == offsets
        assert [record.body for record in records] == [b"m0", b"m1", b"m2"]
        assert [properties_of(record)["TAGS"] for record in records] == ["t0", "t1", "t2"]
        assert (answer.fields["queueId"], answer.fields["queueOffset"]) == ("1", "0")
        assert answer.fields["recallHandles"] == "- - -"


def test_each_message_of_a_batch_may_have_its_own_delay(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        answer = send_batch(
            peer,
            "orders",
            [
                ("two", {"UNIQ_KEY": "K2", "TIMER_DELAY_SEC": 2}),
                ("now", {"UNIQ_KEY": "K0"}),
                ("one", {"UNIQ_KEY": "K1", "TIMER_DELIVER_MS": T0 + 1_000}),
                ("nameless", {"TIMER_DELAY_SEC": 3}),
            ],
        )
        two, now, one, nameless = answer.fields["recallHandles"].split(" ")
        assert (now, nameless) == ("-", "-")
        assert parse_recall_handle(two) == ("orders", "postdate", T0 + 2_000, "K2")
        assert parse_recall_handle(one) == ("orders", "postdate", T0 + 1_000, "K1")
        for seen in (["now"], ["now", "one"], ["now", "one", "two"], ["now", "one", "two", "nameless"]):
            assert read_bodies(peer, "orders") == seen
            served.pass_ms(1_000)
            served.settle()


def test_a_batch_of_one_is_answered_like_a_message(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        fields = send_batch(peer, "orders", [("x", {"UNIQ_KEY": "K", "DELAY": 1})]).fields
        assert parse_recall_handle(fields["recallHandle"]).unique_key == "K"
        assert re.fullmatch(r"[0-9A-F]{32}", fields["msgId"])


@pytest.mark.parametrize("flag", ["1", 1, "true", True], ids=repr)
@pytest.mark.parametrize("code", [Request.SEND_MESSAGE, Request.SEND_MESSAGE_V2])
def test_a_batch_may_be_told_by_a_flag_alone(tmp_path: Path, code: int, flag: object) -> None:
    # As the C++ client tells it: by the code of a plain send.
    body = encode_batch([Inner(0, b"one", b""), Inner(0, b"two", b"")])
    named = {"topic": "orders", "queueId": 0, "batch": flag}
    fields = named if code == Request.SEND_MESSAGE else {"b": "orders", "e": 0, "m": flag}
    with serving(tmp_path) as served, connected(served) as peer:
        peer.socket.sendall(raw_frame(code, 77, fields, body))
        answer = peer.next_answer()
        assert answer.code == codes.SUCCESS
        assert len(answer.fields["msgId"].split(",")) == 2
        assert read_bodies(peer, "orders") == ["one", "two"]


def test_a_batch_with_one_bad_message_is_refused_as_a_whole(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = send_batch(peer, "orders", [("good", {}), ("bad", {"TIMER_DELAY_MS": "?"})])
        assert answer.code == codes.MESSAGE_ILLEGAL
        assert "TIMER_DELAY_MS" in (answer.remark or "")
        assert read_bodies(peer, "orders") == []


@pytest.mark.parametrize("body", [b"", b"\x00\x00", b"\xff" * 40, bytes(40)], ids=repr)
def test_a_batch_that_cannot_be_read_is_refused(tmp_path: Path, body: bytes) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        command = send_command(peer, "orders", body)._replace(code=Request.SEND_BATCH_MESSAGE)
        peer.write(command)
        assert peer.answer_to(command.opaque).code in (codes.MESSAGE_ILLEGAL, codes.INVALID_PARAMETER)
        assert read_bodies(peer, "orders") == []


# ----------------------------------------------------------------------------------------------- topics on first use


@pytest.mark.parametrize(("asked", "queue_count"), [(4, 4), (100, 8), (1, 1), (0, 1), (-3, 1), (None, 4)])
def test_a_send_makes_its_topic_with_as_many_queues_as_asked_but_no_more_than_eight(
    tmp_path: Path, asked: int | None, queue_count: int
) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "fresh", fields={"d": asked})
        topic = served.call(lambda: served.broker.fold.topics.get("fresh"))
        assert (topic.read_queue_count, topic.write_queue_count, topic.perm) == (queue_count, queue_count, 6)


def test_without_automatic_topics_a_send_to_an_unknown_one_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, auto_create_topics=False) as served, connected(served) as peer:
        answer = send(peer, "fresh")
        assert answer.code == codes.TOPIC_NOT_EXIST
        assert "'fresh' does not exist, and auto_create_topics is off" in (answer.remark or "")
        make_topic(peer, "fresh")
        sent(peer, "fresh")


def test_many_sends_of_one_write_to_a_new_topic_are_all_stored(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        commands = [send_command(peer, "fresh", str(n)) for n in range(10)]
        peer.write(*commands)
        assert {peer.answer_to(command.opaque).code for command in commands} == {codes.SUCCESS}
        assert read_bodies(peer, "fresh") == [str(n) for n in range(10)]


# --------------------------------------------------------------------------------------------------------- delays

DELAYS: list[tuple[dict[str, Any], int]] = [
    ({"DELAY": 1}, 1_000),
    ({"DELAY": 2}, 5_000),
    ({"DELAY": 18}, 2 * HOUR_MS),
    ({"DELAY": 99}, 2 * HOUR_MS),
    ({"TIMER_DELAY_SEC": 7}, 7_000),
    ({"TIMER_DELAY_MS": 1_234}, 1_234),
    ({"TIMER_DELIVER_MS": T0 + 4_321}, 4_321),
    ({"TIMER_DELIVER_MS": T0 + 400 * DAY_MS + 1}, 400 * DAY_MS + 1),
    ({"DELAY": 2, "TIMER_DELAY_SEC": 7, "TIMER_DELAY_MS": 9, "TIMER_DELIVER_MS": T0 + 1}, 5_000),
    ({"DELAY": 0, "TIMER_DELAY_SEC": 7, "TIMER_DELAY_MS": 9, "TIMER_DELIVER_MS": T0 + 1}, 7_000),
    ({"TIMER_DELAY_MS": 9, "TIMER_DELIVER_MS": T0 + 1}, 9),
    ({"__STARTDELIVERTIME": T0 + 4_321}, 4_321),
    ({"__STARTDELIVERTIME": T0 + 400 * DAY_MS + 1}, 400 * DAY_MS + 1),
    ({"TIMER_DELIVER_MS": T0 + 8, "__STARTDELIVERTIME": T0 + 1}, 8),
]


@pytest.mark.parametrize(("properties", "delay_ms"), DELAYS, ids=str)
def test_a_delayed_message_arrives_at_its_instant_and_not_a_millisecond_before(
    tmp_path: Path, properties: dict[str, Any], delay_ms: int
) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer, connected(served) as reader:
        make_topic(peer, "orders", 4)
        answer = sent(peer, "orders", "later", queue_id=3, **properties)
        assert answer.fields["queueId"] == "3", "of a level, too, its own queue and not the level's"
        held = pull_command(reader, "orders", queue_id=3, wait_ms=LONG_POLL_MS)
        reader.write(held)
        served.pass_ms(delay_ms - 1)
        served.settle()
        reader.expect_no_more()
        assert pull(peer, "orders", queue_id=3).code == codes.PULL_NOT_FOUND
        served.pass_ms(1)
        (record,) = got(reader.answer_to(held.opaque)).records
        assert (record.body, record.queue_id, record.stored_at_ms) == (b"later", 3, T0 + delay_ms)
        kept = {name: str(value) for name, value in properties.items()}
        assert properties_of(record) == kept, "the producer's properties are left as they are"


@pytest.mark.parametrize(
    "properties",
    [
        {"DELAY": 0},
        {"DELAY": -1},
        {"TIMER_DELAY_SEC": 0},
        {"TIMER_DELAY_MS": -5},
        {"TIMER_DELIVER_MS": T0},
        {"__STARTDELIVERTIME": T0 - 1},
    ],
    ids=str,
)
def test_a_delay_that_is_none_is_delivered_at_once(tmp_path: Path, properties: dict[str, Any]) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "now", **properties)
        assert read_bodies(peer, "orders") == ["now"]


def test_the_levels_are_those_of_the_settings(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), message_delay_level="3s 2m") as served, connected(served) as peer:
        for level, due in ((1, T0 + 3_000), (2, T0 + 2 * MINUTE_MS), (3, T0 + 2 * MINUTE_MS)):
            fields = sent(peer, "orders", UNIQ_KEY="K", DELAY=level).fields
            assert parse_recall_handle(fields["recallHandle"]).due_at_ms == due


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("sys_flag", [4, 8, 12])
def test_a_sys_flag_that_marks_a_transaction_without_its_property_is_refused(tmp_path: Path, sys_flag: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        end = served.call(lambda: served.broker.log.end)
        answer = send(peer, "orders", sys_flag=sys_flag)
        assert answer.code == codes.MESSAGE_ILLEGAL
        assert "TRAN_MSG=true" in (answer.remark or "")
        assert served.call(lambda: served.broker.log.end) == end


def test_a_batch_holds_no_halves(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        half = {"TRAN_MSG": "true", "PGROUP": "g", "UNIQ_KEY": "k"}
        for how in ({}, {"f": 4}):
            answer = send_batch(peer, "orders", [("plain", {"UNIQ_KEY": "a"}), ("half", half)], **how)
            assert answer.code == codes.MESSAGE_ILLEGAL
        assert read_bodies(peer, "orders") == []


def test_a_message_that_says_it_is_no_transaction_is_stored(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders", "whole", TRAN_MSG="false")
        assert read_bodies(peer, "orders") == ["whole"]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ({"topic": "bad topic"}, 13, "topic 'bad topic': expected one or more of the characters"),
        ({"topic": "x" * 128}, 13, "has 128 characters, the limit is 127"),
        ({"topic": ""}, 13, "topic ''"),
        ({"body": bytes(1_001)}, 13, "body has 1001 bytes, the limit is 1000"),
        ({"KEYS": "k" * 2_000}, 13, "properties have 2006 bytes, the limit is 2000"),
        ({"DELAY": "soon"}, 13, "property DELAY = 'soon', expected a whole number"),
        ({"TIMER_DELAY_SEC": "1.5"}, 13, "property TIMER_DELAY_SEC = '1.5'"),
        ({"TIMER_DELAY_MS": "9" * 30}, 13, "property TIMER_DELAY_MS = '9999"),
        ({"TIMER_DELIVER_MS": "tomorrow"}, 13, "property TIMER_DELIVER_MS = 'tomorrow'"),
        ({"__STARTDELIVERTIME": "tomorrow"}, 13, "property __STARTDELIVERTIME = 'tomorrow'"),
        ({"__STARTDELIVERTIME": 10**18}, 13, "__STARTDELIVERTIME = .* the limit is 315576000000 ms"),
        ({"TIMER_DELAY_SEC": 11 * 366 * 86_400}, 13, "TIMER_DELAY_SEC = .* the limit is 315576000000 ms"),
        ({"TIMER_OUT_MS": "1"}, 13, "property TIMER_OUT_MS = '1' is internal"),
        ({"REAL_TOPIC": "x"}, 13, "property REAL_TOPIC"),
        ({"queue_id": 4}, 13, "queue 4 of topic 'orders' does not exist: it has 4"),
        *[({"topic": name}, 16, "belongs to the broker") for name in sorted(RESERVED_TOPICS)],
        ({"topic": "postdate_sys_cancel"}, 16, "belongs to the broker"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_message_is_refused_with_a_code_and_a_sentence(
    tmp_path: Path, how: dict[str, Any], code: int, said: str
) -> None:
    with serving(tmp_path, body_bytes_max=1_000, properties_bytes_max=2_000) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        answer = send(peer, **{"topic": "orders", "body": "x", **how})
        assert answer.code == code
        assert re.search(said, answer.remark or ""), answer.remark
        assert read_bodies(peer, "orders") == []
        sent(peer, "orders", "the connection lives on")


def test_one_bad_message_among_good_ones_of_a_write_fails_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        commands = [
            send_command(peer, "orders", "first"),
            send_command(peer, "orders", "bad", DELAY="x"),
            send_command(peer, "orders", "second"),
            send_command(peer, "TBW102", "forbidden"),
            send_command(peer, "orders", "half", sys_flag=4),
            send_command(peer, "orders", "third"),
        ]
        peer.write(*commands)
        answers = [peer.answer_to(command.opaque).code for command in commands]
        assert answers == [0, 13, 0, 16, 13, 0]
        assert read_bodies(peer, "orders") == ["first", "second", "third"]


def test_a_topic_that_may_not_be_written_refuses_sends(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders")
        make_topic(peer, "orders", perm=4)
        answer = send(peer, "orders")
        assert answer.code == codes.NO_PERMISSION
        assert answer.remark == "topic 'orders' may not be written: its perm is 4"
        assert read_bodies(peer, "orders") == ["hello"]


def test_a_full_wheel_refuses_timed_sends_and_names_the_limit(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), wheel_entries_max=3) as served, connected(served) as peer:
        for _ in range(3):
            sent(peer, "orders", TIMER_DELAY_SEC=5)
        answer = send(peer, "orders", TIMER_DELAY_SEC=5)
        assert answer.code == codes.SYSTEM_BUSY
        assert "wheel_entries_max: 3 messages are due soon, the limit is 3" in (answer.remark or "")
        sent(peer, "orders", "not delayed")
        served.pass_ms(5_000)
        served.settle()
        sent(peer, "orders", TIMER_DELAY_SEC=5)


def test_a_full_second_refuses_sends_due_in_it_and_names_the_limit(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), due_second_messages_max=2) as served, connected(served) as peer:
        for _ in range(2):
            sent(peer, "orders", TIMER_DELIVER_MS=T0 + 5_000)
        answer = send(peer, "orders", TIMER_DELIVER_MS=T0 + 5_999)
        assert answer.code == codes.SYSTEM_BUSY
        assert "due_second_messages_max" in (answer.remark or "")
        sent(peer, "orders", TIMER_DELIVER_MS=T0 + 6_000)
        sent(peer, "other", TIMER_DELIVER_MS=T0 + 5_000)


# -------------------------------------------------------------------------------------------------------- resends

RESEND = {"resend": "true"}


def wire_fields(answer: Command) -> dict[str, str]:
    assert answer.code == codes.SUCCESS, answer
    return dict(answer.fields)


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"TIMER_DELAY_MS": 60_000},
        {"TIMER_DELAY_SEC": 3 * 24 * 3_600},
        {"DELAY": 3},
        {"TIMER_DELIVER_MS": T0 + 60_000},
        {"TIMER_DELIVER_MS": T0 - 60_000},
    ],
)
def test_a_resend_of_a_stored_message_is_answered_as_the_first_and_stored_once(
    tmp_path: Path, properties: dict[str, Any]
) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        sent(peer, "orders", "other", queue_id=1)
        first = wire_fields(sent(peer, "orders", "x", queue_id=1, UNIQ_KEY="K1", **properties))
        served.pass_ms(1_000)
        again = wire_fields(sent(peer, "orders", "x", queue_id=0, UNIQ_KEY="K1", fields=RESEND, **properties))
        assert again == first
        assert served.call(lambda: served.broker.accepted_count) == 2


def test_a_resend_after_a_restart_is_answered_as_the_first(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        first = wire_fields(sent(peer, "orders", "x", UNIQ_KEY="K1", TIMER_DELAY_MS=60_000))
        served.kill()
    with serving(tmp_path, ManualClock(T0 + 5_000)) as served, connected(served) as peer:
        again = wire_fields(sent(peer, "orders", "x", UNIQ_KEY="K1", TIMER_DELAY_MS=60_000, fields=RESEND))
        assert again.keys() == first.keys()
        assert again["recallHandle"] == first["recallHandle"]
        assert again["msgId"][16:] == first["msgId"][16:], "the same place in the log; the port is another one"
        assert served.call(lambda: served.broker.accepted_count) == 0


def test_a_resend_that_is_not_stored_is_stored(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders", "x", UNIQ_KEY="K1", fields=RESEND)
        sent(peer, "orders", "y", fields=RESEND)  # without a unique key nobody can tell
        sent(peer, "new", "z", UNIQ_KEY="K2", fields=RESEND)  # its topic is not there yet
        assert read_bodies(peer, "orders") == ["x", "y"]
        assert read_bodies(peer, "new") == ["z"]


def test_another_message_with_the_same_unique_key_is_no_resend(tmp_path: Path) -> None:
    """A consumer that sends a message on keeps its key: in another topic, at another instant, or once more tried."""
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        make_topic(peer, "others")
        sent(peer, "orders", "first", UNIQ_KEY="K1")
        sent(peer, "others", "elsewhere", UNIQ_KEY="K1", fields=RESEND)
        sent(peer, "orders", "later", UNIQ_KEY="K1", fields=RESEND | {"g": 1_700_000_000_001})
        sent(peer, "orders", "tried", UNIQ_KEY="K1", fields=RESEND | {"j": 1})
        assert read_bodies(peer, "orders") == ["first", "later", "tried"]
        assert read_bodies(peer, "others") == ["elsewhere"]


def test_a_resend_waits_for_its_first_send_that_is_not_durable_yet(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as first, connected(served) as second:
        make_topic(first, "orders")
        gate.hold()
        try:
            original = send_command(first, "orders", "x", UNIQ_KEY="K1")
            first.write(original)
            gate.wait_for_flush()
            resend = send_command(second, "orders", "x", UNIQ_KEY="K1", fields=RESEND)
            batch = Inner(0, b"y", properties_text({"UNIQ_KEY": "K2"}).encode())
            whole = send_command(second, "orders", encode_batch([batch]), fields={"m": True})
            again = send_command(second, "orders", encode_batch([batch]), fields={"m": True, **RESEND})
            second.write(resend, whole, again)
            second.expect_no_more()
        finally:
            gate.open()
        assert wire_fields(second.answer_to(resend.opaque)) == wire_fields(first.answer_to(original.opaque))
        assert wire_fields(second.answer_to(again.opaque)) == wire_fields(second.answer_to(whole.opaque))
        assert read_bodies(first, "orders") == ["x", "y"]


def test_a_first_send_that_comes_after_its_resend_is_stored_once(tmp_path: Path) -> None:
    """The broker may read an old connection after the one on which its client has sent again."""
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        resend, again, late = (
            send_command(peer, "orders", "x", UNIQ_KEY="K1", fields=fields) for fields in (RESEND, RESEND, {})
        )
        peer.write(resend, again, late)
        answers = [wire_fields(peer.answer_to(command.opaque)) for command in (resend, again, late)]
        assert answers[0] == answers[1] == answers[2]
        assert read_bodies(peer, "orders") == ["x"]


@pytest.mark.parametrize("delay_ms", [None, 60_000])
@pytest.mark.parametrize("killed", [False, True])
def test_a_batch_that_is_sent_again_is_stored_once_and_has_all_receipts(
    tmp_path: Path, delay_ms: int | None, killed: bool
) -> None:
    delay = {} if delay_ms is None else {"TIMER_DELAY_MS": delay_ms}
    messages = [(f"body {n}", {"UNIQ_KEY": f"K{n}", **delay}) for n in range(120)]
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        first = wire_fields(send_batch(peer, "orders", messages))
        if not killed:
            assert wire_fields(send_batch(peer, "orders", messages, **RESEND)) == first
            assert served.call(lambda: served.broker.accepted_count) == 120
            return
        served.kill()
    with serving(tmp_path, ManualClock(T0 + 1)) as served, connected(served) as peer:
        again = wire_fields(send_batch(peer, "orders", messages, **RESEND))
        assert again.get("recallHandles") == first.get("recallHandles")
        assert len(again["msgId"].split(",")) == 120
        assert served.call(lambda: served.broker.accepted_count) == 0


def test_a_resend_to_a_retry_topic_past_its_attempts_is_one_dead_letter(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "%RETRY%billing")
        spent = {"j": 4, "l": 3}
        sent(peer, "%RETRY%billing", "x", UNIQ_KEY="K1", fields=spent)
        sent(peer, "%RETRY%billing", "x", UNIQ_KEY="K1", fields=spent | RESEND)
        assert read_bodies(peer, "%DLQ%billing") == ["x"]


def test_resends_that_wait_are_bounded(tmp_path: Path) -> None:
    with serving(tmp_path, resends_bytes_max=100) as served, connected(served) as peer:
        make_topic(peer, "orders")
        commands = [send_command(peer, "orders", b"x" * 80, UNIQ_KEY=f"K{n}", fields=RESEND) for n in range(3)]
        peer.write(*commands)
        answers = [peer.answer_to(command.opaque) for command in commands]
        assert [answer.code for answer in answers] == [0, codes.SYSTEM_BUSY, codes.SYSTEM_BUSY]
        assert "resends_bytes_max" in (answers[1].remark or "")
        sent(peer, "orders", b"x" * 80, UNIQ_KEY="K1", fields=RESEND)
        assert len(read_all(peer, "orders")) == 2


def test_a_resend_finds_what_was_sent_some_time_ago_and_no_more(tmp_path: Path) -> None:
    """By time, and then by segments of the log: what is older costs nothing."""
    small: dict[str, Any] = {"segment_bytes": 1 << 16, "batch_bytes_max": 1 << 14}
    with serving(tmp_path, ManualClock(T0), **small) as served, connected(served) as peer:
        make_topic(peer, "orders")
        sent(peer, "orders", "x", UNIQ_KEY="K1")
        for _ in range(30):
            sent(peer, "orders", b"x" * 8_000)  # fills segments
        served.pass_ms(14 * MINUTE_MS)
        sent(peer, "orders", "x", UNIQ_KEY="K1", fields=RESEND)
        assert served.call(lambda: served.broker.accepted_count) == 31
        served.pass_ms(2 * MINUTE_MS)
        sent(peer, "orders", "x", UNIQ_KEY="K1", fields=RESEND)
        assert served.call(lambda: served.broker.accepted_count) == 32


# ------------------------------------------------------------------------------------------------------- sent once


@pytest.mark.parametrize("properties", [{}, {"TIMER_DELAY_MS": 60_000}, {"TIMER_DELAY_SEC": 86_400}, {"DELAY": 3}])
@pytest.mark.parametrize("killed", [False, True])
def test_a_second_send_of_an_id_is_answered_as_the_first(
    tmp_path: Path, properties: dict[str, Any], killed: bool
) -> None:
    def send_one(unique_key: str, queue_id: int, **more: Any) -> dict[str, str]:
        return wire_fields(sent(peer, "orders", "x", queue_id=queue_id, UNIQ_KEY=unique_key, POSTDATE_ONCE="a", **more))

    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        sent(peer, "orders", "other", queue_id=1)
        first = send_one("K1", 1, **properties)
        served.pass_ms(DAY_MS)
        served.settle()
        assert send_one("K2", 0) == first, "its own delay and queue do not count"
        assert served.call(lambda: served.broker.accepted_count) == 2
        if killed:
            served.kill()
    if killed:
        with serving(tmp_path, clock) as served, connected(served) as peer:
            again = send_one("K3", 0, **properties)
            assert again.pop("msgId")[16:] == first.pop("msgId")[16:], "the port is another one"
            assert again == first


def test_sends_of_one_read_with_one_id_are_one(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        bodies = ("x", "other", "x", "y", "x")
        ids: list[dict[str, Any]] = [{"POSTDATE_ONCE": id} if id else {} for id in ("a", "", "a", "a", "b")]
        commands = [
            send_command(peer, "orders", body, UNIQ_KEY=f"K{n}", **named)
            for n, (body, named) in enumerate(zip(bodies, ids, strict=True))
        ]
        peer.write(*commands)
        first, _, second, refused, _ = [peer.answer_to(command.opaque) for command in commands]
        assert wire_fields(second) == wire_fields(first)
        assert refused.code == codes.MESSAGE_ILLEGAL
        assert "has another body under this id since" in (refused.remark or "")
        assert read_bodies(peer, "orders") == ["x", "other", "x"]


def test_a_second_send_waits_for_the_first_that_is_not_durable_yet(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as first, connected(served) as second:
        make_topic(first, "orders")
        gate.hold()
        try:
            original, again = (
                send_command(peer, "orders", "x", UNIQ_KEY=key, POSTDATE_ONCE="a")
                for peer, key in ((first, "K1"), (second, "K2"))
            )
            first.write(original)
            gate.wait_for_flush()
            second.write(again)
            second.expect_no_more()
        finally:
            gate.open()
        assert wire_fields(second.answer_to(again.opaque)) == wire_fields(first.answer_to(original.opaque))
        assert read_bodies(first, "orders") == ["x"]


def test_neither_send_of_an_id_is_stored_for_sure_where_the_disk_fails(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with serving(tmp_path, disk=gate.disk) as served, connected(served) as first, connected(served) as second:
        make_topic(first, "orders")
        gate.hold()
        gate.error = OSError(errno.EIO, "Input/output error")
        original, again = (send_command(peer, "orders", "x", POSTDATE_ONCE="a") for peer in (first, second))
        first.write(original)
        gate.wait_for_flush()
        second.write(again)
        second.expect_no_more()
        gate.open()
        answers = [first.answer_to(original.opaque), second.answer_to(again.opaque)]
        assert {answer.code for answer in answers} == {codes.SERVICE_NOT_AVAILABLE}


def test_a_resend_of_a_send_with_an_id_is_one_with_it(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        once: dict[str, Any] = {"UNIQ_KEY": "K1", "POSTDATE_ONCE": "a"}
        resend, again = (send_command(peer, "orders", "x", fields=RESEND, **once) for _ in range(2))
        late = send_command(peer, "orders", "x", **once)
        other = send_command(peer, "orders", "x", fields=RESEND, UNIQ_KEY="K2", POSTDATE_ONCE="a")
        commands = (resend, again, late, other)
        peer.write(*commands)
        answers = [wire_fields(peer.answer_to(command.opaque)) for command in commands]
        assert answers == [answers[0]] * 4
        assert read_bodies(peer, "orders") == ["x"]


def test_a_send_with_an_id_creates_its_topic_and_finds_a_queue_that_was_promised(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        first = wire_fields(sent(peer, "new", "x", queue_id=1, UNIQ_KEY="K1", POSTDATE_ONCE="a", fields={"d": 2}))
        assert wire_fields(sent(peer, "new", "x", queue_id=3, UNIQ_KEY="K2", POSTDATE_ONCE="a")) == first


def test_a_batch_with_an_id_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = send_batch(peer, "orders", [("x", {}), ("y", {"POSTDATE_ONCE": "a"})])
        assert (answer.code, answer.remark) == (
            codes.MESSAGE_ILLEGAL, "a message of the batch has POSTDATE_ONCE: send it by itself",
        )  # fmt: skip
        assert read_bodies(peer, "orders") == []


def test_a_copy_that_a_consumer_sends_to_a_retry_topic_takes_no_id(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        make_topic(peer, "%RETRY%billing")
        sent(peer, "orders", "x", UNIQ_KEY="K1", POSTDATE_ONCE="a")
        (record,) = read_all(peer, "orders")
        properties = properties_of(record)
        assert properties["POSTDATE_ONCE_MS"] == str(3 * DAY_MS)
        for times in (1, 2, 17):
            sent(peer, "%RETRY%billing", "x", fields={"j": times}, **properties)
        copies = [*read_all(peer, "%RETRY%billing"), *read_all(peer, "%DLQ%billing")]
        assert [properties_of(copy) for copy in copies] == [{"UNIQ_KEY": "K1"}] * 3


def test_a_send_that_is_oneway_takes_an_id(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for _ in range(2):
            peer.write(send_command(peer, "orders", "x", POSTDATE_ONCE="a")._replace(flag=codes.FLAG_ONEWAY))
        assert sent(peer, "orders", "x", POSTDATE_ONCE="a").fields["queueOffset"] == "0"

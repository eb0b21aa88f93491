"""Send-backs: what a consumer could not do comes again later, and past the limit is a dead letter."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.message import DELAY_PROPERTIES
from postdate.storage.record import Record
from postdate.wire import codes
from postdate.wire.ids import message_id, parse_message_id
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import (
    GROUP,
    Peer,
    connected,
    properties_of,
    pull,
    read_all,
    read_bodies,
    send_command,
    sent,
)
from tests.support.server import Served, serving

RETRY, DEAD = f"%RETRY%{GROUP}", f"%DLQ%{GROUP}"
LEVELS_MS = [1_000, 5_000, 10_000, 30_000, 60_000, 120_000]


def send_back(peer: Peer, record: Record, level: int = 0, **fields: Any) -> None:
    """As a Java client does it."""
    asked = {
        "group": GROUP, "offset": record.offset, "delayLevel": level, "originMsgId": "ORIGIN",
        "originTopic": record.topic, "unitMode": False, "maxReconsumeTimes": 16, **fields,
    }  # fmt: skip
    answer = peer.ask(Request.CONSUMER_SEND_MSG_BACK, **asked)
    assert answer.code == codes.SUCCESS, answer


def retried(served: Served, peer: Peer, after_ms: int, count: int = 1) -> Record:
    """The last retry; it comes after this time, and not before."""
    assert len(read_all(peer, RETRY)) == count - 1
    served.pass_ms(after_ms - 1)
    served.settle()
    assert len(read_all(peer, RETRY)) == count - 1, "too early"
    served.pass_ms(1)
    served.settle()
    records = read_all(peer, RETRY)
    assert len(records) == count
    return records[-1]


def first(peer: Peer, body: str = "work", **properties: Any) -> Record:
    """A message as its consumer reads it."""
    sent(peer, "orders", body, **properties)
    (record,) = pull(peer, "orders").records
    return record


# -------------------------------------------------------------------------------------------------------- delays


def test_without_a_level_each_retry_waits_one_level_longer(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        record = first(peer)
        for times in range(3):
            send_back(peer, record)
            record = retried(served, peer, LEVELS_MS[2 + times], times + 1)
            assert record.reconsume_times == times + 1
            assert (record.topic, record.body) == (RETRY, b"work")


def test_a_message_that_is_not_due_cannot_be_sent_back(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        answer = sent(peer, "orders", "later", TIMER_DELAY_MS=1_000)
        offset = parse_message_id(answer.fields["msgId"])[1]
        fields: dict[str, Any] = {"group": GROUP, "offset": offset, "delayLevel": -1}
        refused = peer.ask(Request.CONSUMER_SEND_MSG_BACK, **fields)
        assert (refused.code, refused.remark) == (
            codes.SYSTEM_ERROR,
            f"the message at offset {offset} is not due yet",
        )
        served.pass_ms(1_000)
        served.settle()
        assert peer.ask(Request.CONSUMER_SEND_MSG_BACK, **fields).code == codes.SUCCESS
        assert read_bodies(peer, DEAD) == ["later"]


@pytest.mark.parametrize("level", [1, 2, 5])
def test_a_consumer_may_ask_for_a_level(tmp_path: Path, level: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        send_back(peer, first(peer), level)
        assert retried(served, peer, LEVELS_MS[level - 1]).reconsume_times == 1


def test_the_old_form_has_group_offset_and_level_alone(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        record = first(peer)
        answer = peer.ask(Request.CONSUMER_SEND_MSG_BACK, group=GROUP, offset=record.offset, delayLevel=1)
        assert answer.code == codes.SUCCESS
        again = retried(served, peer, LEVELS_MS[0])
        assert properties_of(again)["RETRY_TOPIC"] == "orders"
        assert properties_of(again)["ORIGIN_MESSAGE_ID"] == message_id(record.store_host, record.offset)


def test_origin_and_first_topic_are_kept_from_the_first_retry_on(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        record = first(peer, UNIQ_KEY="K1", TAGS="a", KEYS="k", mine="yes")
        send_back(peer, record, 1, originMsgId="FIRST")
        record = retried(served, peer, LEVELS_MS[0])
        send_back(peer, record, 1, originMsgId="SECOND")
        record = retried(served, peer, LEVELS_MS[0], 2)
        assert properties_of(record) == {
            "UNIQ_KEY": "K1", "TAGS": "a", "KEYS": "k", "mine": "yes", "RETRY_TOPIC": "orders",
            "ORIGIN_MESSAGE_ID": "FIRST", "DELAY": "1",
        }  # fmt: skip


@pytest.mark.parametrize(
    "delay",
    [{"TIMER_DELAY_SEC": 5}, {"TIMER_DELIVER_MS": T0 + 5_000}, {"__STARTDELIVERTIME": T0 + 5_000}, {"DELAY": 2}],
    ids=str,
)
def test_a_message_that_was_delayed_does_not_wait_for_that_a_second_time(tmp_path: Path, delay: dict[str, Any]) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "work", **delay)
        served.pass_ms(5_000)
        served.settle()
        (record,) = pull(peer, "orders").records
        send_back(peer, record, 1)
        record = retried(served, peer, LEVELS_MS[0])
        assert properties_of(record).keys() & DELAY_PROPERTIES == {"DELAY"}
        send_back(peer, record, -1)
        (dead,) = read_all(peer, DEAD)
        assert not properties_of(dead).keys() & DELAY_PROPERTIES, "a dead letter waits for nothing"


def test_a_compressed_body_and_its_flags_come_again_as_they_were(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", b"\x78\x9c", sys_flag=codes.SYS_COMPRESSED)
        (record,) = pull(peer, "orders").records
        send_back(peer, record, 1)
        again = retried(served, peer, LEVELS_MS[0])
        assert (again.body, again.sys_flag, again.born_at_ms) == (record.body, record.sys_flag, record.born_at_ms)


# --------------------------------------------------------------------------------------------------- dead letters


def test_a_negative_level_makes_a_dead_letter_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        send_back(peer, first(peer), -1)
        (dead,) = read_all(peer, DEAD)
        assert (dead.topic, dead.body) == (DEAD, b"work")
        assert properties_of(dead) == {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "ORIGIN"}
        topic = served.call(lambda: served.broker.fold.topics.get(DEAD))
        assert (topic.write_queue_count, topic.perm) == (1, 6)


def test_a_message_that_was_tried_as_often_as_it_may_is_a_dead_letter(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        record = first(peer)
        for times in range(2):
            send_back(peer, record, 1, maxReconsumeTimes=2)
            record = retried(served, peer, LEVELS_MS[0], times + 1)
        send_back(peer, record, 1, maxReconsumeTimes=2)
        assert read_bodies(peer, DEAD) == ["work"]
        served.pass_ms(LEVELS_MS[0])
        served.settle()
        assert len(read_all(peer, RETRY)) == 2


@pytest.mark.parametrize(
    ("settings", "group_settings", "asked"),
    [({"retry_times_max": 0}, {}, None), ({"retry_times_max": 0}, {}, -1), ({}, {"retryMaxTimes": 0}, None),
     ({"retry_times_max": 9}, {"retryMaxTimes": 0}, -1), ({"retry_times_max": 9}, {"retryMaxTimes": 9}, 0)],
    ids=str,
)  # fmt: skip
def test_the_limit_is_the_consumers_else_the_groups_else_the_brokers(
    tmp_path: Path, settings: dict[str, Any], group_settings: dict[str, Any], asked: int | None
) -> None:
    with serving(tmp_path, **settings) as served, connected(served) as peer:
        body = orjson.dumps({"groupName": GROUP, **group_settings})
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body).code == codes.SUCCESS
        send_back(peer, first(peer), 1, maxReconsumeTimes=asked)
        assert read_bodies(peer, DEAD) == ["work"]


@pytest.mark.parametrize(
    ("times", "limit", "is_dead"), [(2, 2, False), (3, 2, True), (16, None, False), (17, None, True)]
)
def test_a_retry_that_is_sent_as_a_plain_message_is_a_dead_letter_past_the_limit(
    tmp_path: Path, times: int, limit: int | None, is_dead: bool
) -> None:
    # What a client does where its send-back failed. The times are counted up already.
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        command = send_command(peer, RETRY, "work", fields={"j": times, "l": limit}, DELAY=3, RETRY_TOPIC="orders")
        peer.write(command)
        assert peer.answer_to(command.opaque).code == codes.SUCCESS
        if is_dead:
            (dead,) = read_all(peer, DEAD)
            assert properties_of(dead) == {"RETRY_TOPIC": "orders"}
            assert dead.reconsume_times == times
        else:
            assert retried(served, peer, LEVELS_MS[2]).reconsume_times == times


# ------------------------------------------------------------------------------------------------------- refusals


def test_a_send_back_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        record = first(peer)
        for offset in (record.offset + 1, -1, 2**63 - 1, 1 << 62, 10**12):
            answer = peer.ask(Request.CONSUMER_SEND_MSG_BACK, group=GROUP, offset=offset, delayLevel=1)
            assert answer.code == codes.SYSTEM_ERROR
            assert answer.remark == f"there is no message at offset {offset}"


def test_a_send_back_of_a_bad_group_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        record = first(peer)
        answer = peer.ask(Request.CONSUMER_SEND_MSG_BACK, group="two words", offset=record.offset, delayLevel=1)
        assert answer.code == codes.MESSAGE_ILLEGAL


def test_a_retry_survives_a_crash(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        send_back(peer, first(peer), 1)
        served.kill()
    with serving(tmp_path, clock) as served, connected(served) as peer:
        assert retried(served, peer, LEVELS_MS[0]).body == b"work"


# ----------------------------------------------------------------------------------------- delays of a group's own


def put_group(peer: Peer, **settings: Any) -> int:
    body = orjson.dumps({"groupName": GROUP, **settings})
    return peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body).code


def test_a_group_has_delays_and_a_limit_of_its_own(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        assert put_group(peer, retryDelaysMs=[2_000, 60_000], retryMaxTimes=3) == codes.SUCCESS
        record = first(peer)
        for count, after_ms in enumerate([2_000, 60_000, 60_000], 1):
            send_back(peer, record, maxReconsumeTimes=-1)
            record = retried(served, peer, after_ms, count)
        send_back(peer, record, maxReconsumeTimes=-1)
        served.settle()
        assert len(read_all(peer, DEAD)) == 1


def test_a_level_that_a_consumer_asks_for_comes_before_the_delays_of_its_group(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        assert put_group(peer, retryDelaysMs=[2_000]) == codes.SUCCESS
        send_back(peer, first(peer), level=2)
        retried(served, peer, LEVELS_MS[1])


def test_settings_that_are_not_named_stay_and_null_removes_one(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        assert put_group(peer, retryDelaysMs=[0, 5], retryMaxTimes=7) == codes.SUCCESS
        assert put_group(peer, retryMaxTimes=8) == codes.SUCCESS
        assert served.broker.view.group_settings(GROUP) == {"retryDelaysMs": [0, 5], "retryMaxTimes": 8}
        assert put_group(peer, retryDelaysMs=None) == codes.SUCCESS
        assert served.broker.view.group_settings(GROUP) == {"retryMaxTimes": 8}


@pytest.mark.parametrize("delays", [[], "10s", [-1], [1.5], [True], [10**12], [1] * 101])
def test_delays_that_are_none_are_refused(tmp_path: Path, delays: Any) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        assert put_group(peer, retryDelaysMs=delays) == codes.INVALID_PARAMETER
        assert not served.broker.view.has_group(GROUP)

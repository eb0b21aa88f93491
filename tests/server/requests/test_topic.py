"""What operators ask for: topics, groups, how far consumers are, what waits."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.state.topics import Topic
from postdate.wire import codes
from postdate.wire.bodies import QueueName, decode_by_queue
from postdate.wire.requests import Request
from tests.support.dialogue import GROUP, Peer, connected, heartbeat, make_topic, pull, read_bodies, send, sent
from tests.support.helpers import DAY_MS, FAR_MS, HOUR_MS, MINUTE_MS, T0
from tests.support.serving import Served, serving


def topic_of(served: Served, name: str = "orders") -> Topic:
    return served.call(lambda: served.broker.fold.topics.get(name))


# -------------------------------------------------------------------------------------------------------- topics


def test_a_topic_is_made_and_changed(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        made: dict[str, Any] = {"readQueueNums": 3, "writeQueueNums": 2, "perm": 6}
        make_topic(peer, "orders", **made, attributes="+message.type=DELAY,+owner=me")
        topic = topic_of(served)
        assert (topic.read_queue_count, topic.write_queue_count, topic.perm) == (3, 2, 6)
        assert topic.attributes == {"message.type": "DELAY", "owner": "me"}
        make_topic(peer, "orders", 5, perm=4, attributes="-owner,+message.type=FIFO")
        topic = topic_of(served)
        assert (topic.read_queue_count, topic.write_queue_count, topic.perm) == (5, 5, 4)
        assert topic.attributes == {"message.type": "FIFO"}
    with serving(tmp_path) as served:
        assert topic_of(served) == topic


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"topic": "two words"}, codes.MESSAGE_ILLEGAL),
        ({"topic": "TBW102"}, codes.NO_PERMISSION),
        ({"writeQueueNums": 0}, codes.INVALID_PARAMETER),
        ({"readQueueNums": 1_025}, codes.INVALID_PARAMETER),
        ({"perm": 8}, codes.INVALID_PARAMETER),
        ({"perm": "rw"}, codes.INVALID_PARAMETER),
    ],
    ids=str,
)
def test_a_topic_that_cannot_be_is_refused(tmp_path: Path, fields: dict[str, Any], code: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        end = served.call(lambda: served.broker.log.end)
        assert peer.ask(Request.UPDATE_AND_CREATE_TOPIC, **{"topic": "orders", **fields}).code == code
        assert served.call(lambda: served.broker.log.end) == end


def test_one_topic_too_many_is_refused_with_the_name_of_the_limit(tmp_path: Path) -> None:
    with serving(tmp_path, topics_max=2) as served, connected(served) as peer:
        for name in ("one", "two"):
            make_topic(peer, name)
        answer = send(peer, "three")
        assert answer.code == codes.SYSTEM_BUSY
        assert "topics_max" in (answer.remark or "")


def test_deleting_a_topic_cancels_what_waits_for_it_and_says_how_many(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", "visible")
        near = [sent(peer, "orders", UNIQ_KEY=f"N{n}", TIMER_DELAY_SEC=5) for n in range(3)]
        far = [sent(peer, "orders", UNIQ_KEY=f"F{n}", TIMER_DELAY_MS=FAR_MS) for n in range(4)]
        for answer in (near[0], far[0]):
            handle = answer.fields["recallHandle"]
            assert peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=handle).code == codes.SUCCESS
        answer = peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"cancelled": "5"})
        assert pull(peer, "orders").code == codes.TOPIC_NOT_EXIST
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders").code == codes.TOPIC_NOT_EXIST
        make_topic(peer, "orders")
        served.pass_ms(FAR_MS)
        served.settle()
        assert read_bodies(peer, "orders") == [], "a new topic of that name is another one"


def test_topics_are_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for name in ("orders", "bills"):
            make_topic(peer, name)
        heartbeat(peer, "c1", {})
        answer = peer.ask(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        assert orjson.loads(answer.body)["topicList"] == [f"%RETRY%{GROUP}", "bills", "orders"]


def test_the_queues_of_a_topic_are_told_by_number_and_time(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        sent(peer, "orders")
        sent(peer, "orders", TIMER_DELAY_SEC=5)
        served.pass_ms(5_000)
        served.settle()
        answer = peer.ask(Request.GET_TOPIC_STATS_INFO, topic="orders")
        assert decode_by_queue(answer.body, "offsetTable") == {
            QueueName("orders", "postdate", 0): {"minOffset": 0, "maxOffset": 2, "lastUpdateTimestamp": T0 + 5_000},
            QueueName("orders", "postdate", 1): {"minOffset": 0, "maxOffset": 0, "lastUpdateTimestamp": 0},
        }
        assert peer.ask(Request.GET_TOPIC_STATS_INFO, topic="nowhere").code == codes.TOPIC_NOT_EXIST


# -------------------------------------------------------------------------------------------------------- groups


def test_groups_are_made_listed_and_deleted(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders")
        body = orjson.dumps({"groupName": GROUP, "retryMaxTimes": 3, "consumeEnable": True})
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body).code == codes.SUCCESS
        heartbeat(peer, "c1", {"orders": "*"}, group="others")
        asked = {"consumerGroup": GROUP, "topic": "orders", "queueId": "0", "commitOffset": "1"}
        assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, b"", **asked).code == codes.SUCCESS
        sent(peer, f"%RETRY%{GROUP}", TIMER_DELAY_SEC=60)

        listed = orjson.loads(peer.ask(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)["subscriptionGroupTable"]
        assert listed == {
            GROUP: {"groupName": GROUP, "retryMaxTimes": 3, "retryQueueNums": 1, "consumeEnable": True},
            "others": {"groupName": "others", "retryMaxTimes": 16, "retryQueueNums": 1},
        }
        assert peer.ask(Request.DELETE_SUBSCRIPTIONGROUP, groupName=GROUP).code == codes.SUCCESS
        assert peer.ask(Request.DELETE_SUBSCRIPTIONGROUP, groupName=GROUP).code == codes.SUBSCRIPTION_GROUP_NOT_EXIST
        listed = orjson.loads(peer.ask(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)["subscriptionGroupTable"]
        assert listed.keys() == {"others"}
        topics = orjson.loads(peer.ask(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)["topicList"]
        assert topics == ["%RETRY%others", "orders"], "its retry topic is gone with it"
        query = {"consumerGroup": GROUP, "topic": "orders", "queueId": "0", "setZeroIfNotFound": "false"}
        assert peer.ask(Request.QUERY_CONSUMER_OFFSET, b"", **query).code == codes.QUERY_NOT_FOUND


@pytest.mark.parametrize(("body", "code"), [({}, 29), ({"groupName": 5}, 29), ({"groupName": "two words"}, 13)])
def test_a_group_that_cannot_be_is_refused(tmp_path: Path, body: dict[str, Any], code: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, orjson.dumps(body)).code == code


def test_how_far_a_group_is_behind_is_told_by_queue(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=60_000) as served, connected(served) as peer:
        for topic in ("orders", "bills"):
            make_topic(peer, topic)
            for _ in range(5):
                sent(peer, topic)
        pull(peer, "orders", 2, commit=2)
        commit = {"consumerGroup": GROUP, "topic": "bills", "queueId": "0", "commitOffset": "4"}
        assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, b"", **commit).code == codes.SUCCESS
        rows = decode_by_queue(peer.ask(Request.GET_CONSUME_STATS, consumerGroup=GROUP).body, "offsetTable")
        behind = {queue.topic: (row["brokerOffset"], row["consumerOffset"]) for queue, row in rows.items()}
        assert behind == {"orders": (5, 2), "bills": (5, 4)}
        one = peer.ask(Request.GET_CONSUME_STATS, consumerGroup=GROUP, topic="bills")
        assert [queue.topic for queue in decode_by_queue(one.body, "offsetTable")] == ["bills"]
        unknown = peer.ask(Request.GET_CONSUME_STATS, consumerGroup="strangers")
        assert unknown.code == codes.SUBSCRIPTION_GROUP_NOT_EXIST


# ---------------------------------------------------------------------------------------------------- what waits


def pending(peer: Peer, **fields: Any) -> dict[str, Any]:
    answer = peer.ask(Request.GET_PENDING, **fields)
    assert answer.code == codes.SUCCESS, answer
    body = orjson.loads(answer.body)
    assert isinstance(body, dict)
    return body


def test_what_waits_is_told_by_topic_and_time(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        for n, delay_ms in enumerate((5_000, 5_500, 20_000, HOUR_MS, HOUR_MS + 1, 3 * DAY_MS)):
            sent(peer, "orders", queue_id=n % 2, TIMER_DELAY_MS=delay_ms)
        sent(peer, "bills", TIMER_DELAY_MS=5_000)
        sent(peer, "bills", "not delayed")
        body = pending(peer, unit="second")
        assert (body["total"], body["near"], body["far"], body["truncated"]) == (7, 4, 3, False)
        assert [{name: row[name] for name in ("topic", "near", "far", "table")} for row in body["topics"]] == [
            {"topic": "bills", "near": 1, "far": 0, "table": 0},
            {"topic": "orders", "near": 3, "far": 3, "table": 0},
        ]
        sizes = [sum(row["bytes"] for row in body[part]) for part in ("topics", "times")]
        assert sizes == [body["bytes"]] * 2
        assert body["bytes"] > 7 * 91
        second = T0 // 1_000 * 1_000
        assert [(row["from_ms"] - second, row["topic"], row["count"]) for row in body["times"]] == [
            (5_000, "bills", 1), (5_000, "orders", 2), (20_000, "orders", 1), (HOUR_MS, "orders", 2),
            (3 * DAY_MS, "orders", 1),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("unit", "unit_ms"), [("second", 1_000), ("minute", MINUTE_MS), ("hour", HOUR_MS), ("day", DAY_MS)]
)
def test_what_waits_is_counted_by_the_unit_that_is_asked_for(tmp_path: Path, unit: str, unit_ms: int) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        start = (T0 // unit_ms + 1) * unit_ms
        for due in (start, start + unit_ms - 1, start + unit_ms):
            sent(peer, "orders", TIMER_DELIVER_MS=due)
        body = pending(peer, unit=unit)
        assert body["unit"] == unit
        assert [(row["from_ms"], row["count"]) for row in body["times"]] == [(start, 2), (start + unit_ms, 1)]


def test_what_waits_is_told_for_one_topic_and_cut_where_asked(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for n in range(5):
            sent(peer, "orders", TIMER_DELAY_SEC=n + 1)
            sent(peer, "bills", TIMER_DELAY_SEC=n + 1)
        body = pending(peer, unit="second", topic="orders", limit=3)
        assert (body["total"], body["truncated"]) == (5, True)
        assert [row["topic"] for row in body["times"]] == ["orders"] * 3
        assert [row["topic"] for row in body["topics"]] == ["orders"]
        assert peer.ask(Request.GET_PENDING, topic="nowhere").code == codes.TOPIC_NOT_EXIST
        wrong = peer.ask(Request.GET_PENDING, unit="fortnight")
        assert wrong.code == codes.INVALID_PARAMETER
        assert "expected one of second, minute, hour, day" in (wrong.remark or "")


def test_what_is_cancelled_fired_or_of_a_deleted_topic_does_not_wait(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for n, delay_ms in enumerate((5_000, 6_000, FAR_MS, FAR_MS + 1)):
            fields = sent(peer, "orders", UNIQ_KEY=f"K{n}", TIMER_DELAY_MS=delay_ms).fields
            if n % 2:
                handle = fields["recallHandle"]
                assert peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=handle).code == codes.SUCCESS
        sent(peer, "bills", TIMER_DELAY_MS=5_000)
        sent(peer, "bills", TIMER_DELAY_MS=FAR_MS)
        assert (pending(peer)["near"], pending(peer)["far"]) == (2, 2)
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="bills")
        assert (pending(peer)["near"], pending(peer)["far"]) == (1, 1)
        served.pass_ms(5_000)
        served.settle()
        assert (pending(peer)["near"], pending(peer)["far"]) == (0, 1)


# ------------------------------------------------------------------------------------------------ what is ahead


def forecast(peer: Peer, **fields: Any) -> list[dict[str, int]]:
    answer = peer.ask(Request.GET_FORECAST, **fields)
    assert answer.code == codes.SUCCESS, answer
    found = orjson.loads(answer.body)
    assert found["unread"] == ""
    bars: list[dict[str, int]] = found["bars"]
    return bars


def test_what_is_ahead_is_told_by_time_with_its_busiest_second(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        minute = T0 // MINUTE_MS * MINUTE_MS
        for due in (T0 + 1_000, T0 + 5_000, T0 + 5_400, minute + 5 * MINUTE_MS, minute + 60 * MINUTE_MS):
            sent(peer, "orders", TIMER_DELIVER_MS=due)
        sent(peer, "bills", TIMER_DELIVER_MS=T0 + 5_000)
        bars = forecast(peer, unit="minute", bars=60)
        assert [bar["from_ms"] for bar in bars] == [minute + n * MINUTE_MS for n in range(60)]
        assert {n: bar["rows"] for n, bar in enumerate(bars) if bar["rows"]} == {0: 4, 5: 1}
        assert (bars[0]["busiest_ms"], bars[0]["busiest_rows"]) == ((T0 + 5_000) // 1_000 * 1_000, 3)
        assert [bar["rows"] for bar in forecast(peer, unit="hour", bars=2)] == [5, 1]
        assert [bar["rows"] for bar in forecast(peer, unit="day", bars=31)][:2] == [6, 0]
        assert sum(bar["rows"] for bar in forecast(peer, unit="minute", bars=60, topic="bills")) == 1
        for unit, count in (("fortnight", 1), ("day", 32), ("minute", 0)):
            assert peer.ask(Request.GET_FORECAST, unit=unit, bars=count).code == codes.INVALID_PARAMETER
        assert peer.ask(Request.GET_FORECAST, topic="nowhere").code == codes.TOPIC_NOT_EXIST

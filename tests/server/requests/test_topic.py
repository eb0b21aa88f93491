"""Topics as operators define them: creation, deletion, settings, and how far their queues go."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.state.topics import Topic
from postdate.wire import codes
from postdate.wire.bodies import QueueName, decode_by_queue
from postdate.wire.requests import Request
from tests.support.core import FAR_MS, T0
from tests.support.peer import (
    GROUP,
    ask_json,
    connected,
    heartbeat,
    make_topic,
    pull,
    read_bodies,
    send,
    sent,
)
from tests.support.server import Served, serving


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


def test_the_topics_of_a_group_may_be_deleted_when_they_are_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for topic in ("%RETRY%workers", "%DLQ%workers"):
            answer = peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic=topic)
            assert (answer.code, answer.fields) == (codes.SUCCESS, {"cancelled": "0"})
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders").code == codes.TOPIC_NOT_EXIST


def test_a_topic_is_told_as_it_was_made(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", 3, perm=4, attributes="+message.type=DELAY")
        told = ask_json(peer, Request.GET_TOPIC_CONFIG, topic="orders")
        assert told == {
            "topicName": "orders", "readQueueNums": 3, "writeQueueNums": 3, "perm": 4, "topicSysFlag": 0,
            "topicFilterType": "SINGLE_TAG", "order": False, "attributes": {"message.type": "DELAY"},
        }  # fmt: skip
        assert peer.ask(Request.GET_TOPIC_CONFIG, topic="nowhere").code == codes.TOPIC_NOT_EXIST

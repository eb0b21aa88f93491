"""Consumer groups over the wire: who is a member, who is told of it, and which queues orderly consumers hold."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.bodies import decode_consumer_ids
from postdate.wire.requests import ClientRequest, Request
from tests.support.core import T0
from tests.support.peer import GROUP, Peer, connected, heartbeat, make_topic, pull, send, sent
from tests.support.server import Served, serving

EXPIRY_MS = 120_000


def members(peer: Peer, group: str = GROUP) -> list[str]:
    answer = peer.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup=group)
    assert answer.code == codes.SUCCESS, answer
    return sorted(decode_consumer_ids(answer.body))


def expect_notice(*peers: Peer, group: str = GROUP) -> None:
    """Each of them is told once, and no more, that the group has changed."""
    for peer in peers:
        notice = peer.next_notice()
        assert (notice.code, notice.fields) == (ClientRequest.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": group})
        assert notice.is_oneway
        peer.round_trip()
        assert not peer.notices


def joined(peer: Peer, client_id: str, *others: Peer) -> None:
    """A consumer joins, and everybody has heard of it."""
    assert heartbeat(peer, client_id, {"orders": "*"}).code == codes.SUCCESS
    expect_notice(peer, *others)


# ------------------------------------------------------------------------------------------------------- members


def test_a_heartbeat_makes_the_group_and_its_retry_topic(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = heartbeat(peer, "c1", {"orders": "*"})
        assert answer.code == codes.SUCCESS
        assert answer.fields.keys() == {"IS_SUPPORT_HEART_BEAT_V2", "IS_SUB_CHANGE"}
        assert served.call(lambda: GROUP in served.broker.fold.groups)
        topic = served.call(lambda: served.broker.fold.topics.get(f"%RETRY%{GROUP}"))
        assert (topic.read_queue_count, topic.write_queue_count, topic.perm) == (1, 1, 6)


def test_a_heartbeat_of_a_producer_makes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        end = served.call(lambda: served.broker.log.end)
        body = b'{"clientID":"p1","producerDataSet":[{"groupName":"producers"}],"consumerDataSet":[]}'
        assert peer.ask(Request.HEART_BEAT, body).code == codes.SUCCESS
        assert served.call(lambda: served.broker.log.end) == end


def test_a_heartbeat_with_numbers_for_names_is_understood(tmp_path: Path) -> None:
    # As the C++ client writes it.
    consumer = {
        "groupName": GROUP, "consumeType": 1, "messageModel": 1, "consumeFromWhere": 0, "unitMode": False,
        "subscriptionDataSet": [{"topic": "orders", "subString": "a || b", "subVersion": "1700000000000"}],
    }  # fmt: skip
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders", "other")
        sent(peer, "orders", "wanted", TAGS="b")
        body = orjson.dumps({"clientID": "c1", "consumerDataSet": [consumer]})
        assert peer.ask(Request.HEART_BEAT, body).code == codes.SUCCESS
        assert members(peer) == ["c1"]
        assert pull(peer, "orders", tags=None).bodies == ["wanted"]


def test_the_members_of_a_group_are_listed(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as first, connected(served) as second:
        joined(first, "c1")
        joined(second, "c2", first)
        heartbeat(second, "c3", {}, group="others")
        assert members(first) == ["c1", "c2"]
        assert members(first, "others") == ["c3"]


def test_a_group_that_nobody_is_in_is_answered_with_code_1(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = peer.ask(Request.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="strangers")
        assert answer.code == codes.SYSTEM_ERROR
        assert answer.remark == "no consumer of group 'strangers' is connected"


def test_everybody_in_a_group_is_told_when_one_joins_and_when_one_leaves(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as first, connected(served) as second:
        joined(first, "c1")
        joined(second, "c2", first)
        assert second.ask(Request.UNREGISTER_CLIENT, clientID="c2", consumerGroup=GROUP).code == codes.SUCCESS
        expect_notice(first)
        second.round_trip()
        assert not second.notices, "whoever has left is not told"
        assert members(first) == ["c1"]


def test_everybody_is_told_when_a_connection_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as first:
        joined(first, "c1")
        with connected(served) as second:
            joined(second, "c2", first)
        expect_notice(first)
        assert members(first) == ["c1"]


def test_a_client_that_has_come_back_by_another_connection_stays_when_the_old_one_ends(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as new:
        with connected(served) as old:
            joined(old, "c1")
            heartbeat(new, "c1", {"orders": "*"})
        while served.call(lambda: len(served.dispatcher.connections)) > 1:
            new.round_trip()
        assert members(new) == ["c1"]


def test_a_member_that_is_silent_for_too_long_is_gone_and_the_others_are_told(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as first, connected(served) as second:
        joined(first, "c1")
        joined(second, "c2", first)
        served.pass_ms(EXPIRY_MS)
        heartbeat(first, "c1", {"orders": "*"})
        served.call(served.dispatcher.groups.expire)
        assert members(first) == ["c1", "c2"], "it has just been silent for as long as it may"
        served.pass_ms(1)
        served.call(served.dispatcher.groups.expire)
        assert members(first) == ["c1"]
        expect_notice(first)


def test_a_clock_that_is_set_forward_makes_nobody_silent(tmp_path: Path) -> None:
    clock = ManualClock(T0)
    with serving(tmp_path, clock) as served, connected(served) as peer:
        joined(peer, "c1")
        clock.step_ms(10 * EXPIRY_MS)
        served.call(served.dispatcher.groups.expire)
        assert members(peer) == ["c1"]


def test_everybody_is_told_of_another_subscription_but_not_of_the_same(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as first, connected(served) as second:
        joined(first, "c1")
        joined(second, "c2", first)
        heartbeat(second, "c2", {"orders": "*"})
        for peer in (first, second):
            peer.round_trip()
            assert not peer.notices
        heartbeat(second, "c2", {"orders": "paid"})
        expect_notice(first, second)


def test_without_automatic_groups_an_unknown_one_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, auto_create_groups=False) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answers = [
            heartbeat(peer, "c1", {"orders": "*"}),
            peer.ask(Request.UPDATE_CONSUMER_OFFSET, consumerGroup=GROUP, topic="orders", queueId=0, commitOffset=0),
        ]
        for answer in answers:
            assert answer.code == codes.SUBSCRIPTION_GROUP_NOT_EXIST
            assert "auto_create_groups is off" in (answer.remark or "")
        assert pull(peer, "orders").code == codes.SUBSCRIPTION_GROUP_NOT_EXIST
        assert send(peer, f"%RETRY%{GROUP}").code == codes.SUBSCRIPTION_GROUP_NOT_EXIST
        peer.ask(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, orjson.dumps({"groupName": GROUP}))
        assert heartbeat(peer, "c1", {"orders": "*"}).code == codes.SUCCESS


def test_a_group_with_a_bad_name_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for name in ("two words", "", "x" * 121):
            assert heartbeat(peer, "c1", {}, group=name).code == codes.MESSAGE_ILLEGAL


def test_broadcasting_consumers_each_read_everything(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as first, connected(served) as second:
        sent(first, "orders", "to all")
        for peer, client_id in ((first, "c1"), (second, "c2")):
            assert heartbeat(peer, client_id, {"orders": "*"}, model="BROADCASTING").code == codes.SUCCESS
            assert pull(peer, "orders", tags=None).bodies == ["to all"]


@pytest.mark.parametrize(("kind", "code"), [("TAG", codes.SUCCESS), ("SQL92", codes.INVALID_PARAMETER)])
def test_a_subscription_is_checked_before_it_is_used(tmp_path: Path, kind: str, code: int) -> None:
    body = orjson.dumps({"clientId": "c1", "group": GROUP, "subscriptionData": {"expressionType": kind}})
    with serving(tmp_path) as served, connected(served) as peer:
        answer = peer.ask(Request.CHECK_CLIENT_CONFIG, body)
        assert answer.code == code
        assert answer.remark == (None if code == codes.SUCCESS else "the broker filters by tag, not by SQL92")


# --------------------------------------------------------------------------------------------------------- locks


def queues(*queue_ids: int) -> list[dict[str, object]]:
    return [{"topic": "orders", "brokerName": "postdate", "queueId": queue_id} for queue_id in queue_ids]


def lock(peer: Peer, client_id: str, *queue_ids: int, group: str = GROUP) -> list[int]:
    """Asks for queues; returns those that it holds now."""
    body = {"consumerGroup": group, "clientId": client_id, "onlyThisBroker": False, "mqSet": queues(*queue_ids)}
    answer = peer.ask(Request.LOCK_BATCH_MQ, orjson.dumps(body))
    assert answer.code == codes.SUCCESS
    taken = orjson.loads(answer.body)["lockOKMQSet"]
    assert all(queue in queues(*queue_ids) for queue in taken)
    return [queue["queueId"] for queue in taken]


def unlock(peer: Peer, client_id: str, *queue_ids: int) -> None:
    body = {"consumerGroup": GROUP, "clientId": client_id, "mqSet": queues(*queue_ids)}
    assert peer.ask(Request.UNLOCK_BATCH_MQ, orjson.dumps(body)).code == codes.SUCCESS


def test_a_locked_queue_is_one_consumers_own(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert lock(peer, "c1", 0, 1) == [0, 1]
        assert lock(peer, "c2", 1, 2) == [2]
        assert lock(peer, "c1", 0, 1, 2) == [0, 1]


def test_a_lock_of_one_group_is_none_of_another(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert lock(peer, "c1", 0) == [0]
        assert lock(peer, "c2", 0, group="others") == [0]


def test_a_lock_is_released_by_its_holder_alone(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert lock(peer, "c1", 0) == [0]
        unlock(peer, "c2", 0)
        assert lock(peer, "c2", 0) == []
        unlock(peer, "c1", 0)
        assert lock(peer, "c2", 0) == [0]


LOCK_MS = 60_000


@pytest.mark.parametrize("swept", [False, True])
def test_a_lock_that_is_not_renewed_expires(tmp_path: Path, swept: bool) -> None:
    clock = ManualClock(T0)

    def passes(served: Served, span_ms: int) -> None:
        served.pass_ms(span_ms)
        if swept:
            served.call(served.dispatcher.groups.expire)

    with serving(tmp_path, clock) as served, connected(served) as peer:
        assert lock(peer, "c1", 0, 1) == [0, 1]
        passes(served, LOCK_MS - 1)
        assert lock(peer, "c1", 1) == [1], "renewed"
        assert lock(peer, "c2", 0, 1) == []
        passes(served, 1)
        assert lock(peer, "c2", 0, 1) == [0]
        clock.step_ms(10 * LOCK_MS)
        assert lock(peer, "c2", 1) == [], "elapsed time counts, not the calendar"


# ---------------------------------------------------------------------------------------------------- definitions


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

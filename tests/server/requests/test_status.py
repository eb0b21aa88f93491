"""What RocketMQ's tools ask a name server and a broker for: clusters, routes, figures, rates and settings."""

import gc
import weakref
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate import __version__
from postdate.clock import ManualClock
from postdate.config import FIELDS, LIVE
from postdate.wire import codes
from postdate.wire.records import decode_records
from postdate.wire.reports import decode_properties_text, encode_properties_text
from postdate.wire.requests import Request
from tests.support.dialogue import (
    GROUP,
    LONG_POLL_MS,
    Peer,
    connected,
    heartbeat,
    make_topic,
    properties_of,
    pull,
    pull_command,
    send,
    sent,
)
from tests.support.helpers import DAY_MS, FAR_MS, MINUTE_MS, T0
from tests.support.serving import serving


def json_of(peer: Peer, code: int, **fields: Any) -> Any:
    answer = peer.ask(code, **fields)
    assert answer.code == codes.SUCCESS, answer
    return orjson.loads(answer.body)


def perm_of(peer: Peer, topic: str) -> int:
    (queues,) = json_of(peer, Request.GET_ROUTEINFO_BY_TOPIC, topic=topic)["queueDatas"]
    return int(queues["perm"])


# -- the name server ------------------------------------------------------------------------------------------------


def test_there_is_one_cluster_with_one_broker(tmp_path: Path) -> None:
    with serving(tmp_path, broker_name="here", cluster_name="all") as served, connected(served) as peer:
        told = json_of(peer, Request.GET_BROKER_CLUSTER_INFO)
        assert told["clusterAddrTable"] == {"all": ["here"]}
        assert told["brokerAddrTable"]["here"]["brokerAddrs"] == {"0": served.server.broker_address}
        assert told["brokerAddrTable"]["here"]["cluster"] == "all"


def test_routes_lose_and_regain_the_permission_to_write(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        make_topic(peer, "archive", perm=4)
        answer = peer.ask(Request.WIPE_WRITE_PERM_OF_BROKER, brokerName="postdate")
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"wipeTopicCount": "1"}), "the archive had none"
        assert (perm_of(peer, "orders"), perm_of(peer, "archive"), perm_of(peer, "TBW102")) == (4, 4, 5)
        sent(peer, "orders", "who knows the way gets through")
        answer = peer.ask(Request.WIPE_WRITE_PERM_OF_BROKER, brokerName="postdate")
        assert answer.fields == {"wipeTopicCount": "0"}
        answer = peer.ask(Request.ADD_WRITE_PERM_OF_BROKER, brokerName="postdate")
        assert (answer.code, answer.fields) == (codes.SUCCESS, {"addTopicCount": "1"})
        assert (perm_of(peer, "orders"), perm_of(peer, "archive"), perm_of(peer, "TBW102")) == (6, 4, 7)
        peer.ask(Request.WIPE_WRITE_PERM_OF_BROKER, brokerName="postdate")
    with serving(tmp_path) as served, connected(served) as peer:
        assert perm_of(peer, "orders") == 6, "it was taken until the broker stops"


@pytest.mark.parametrize("code", [Request.WIPE_WRITE_PERM_OF_BROKER, Request.ADD_WRITE_PERM_OF_BROKER])
def test_only_this_broker_has_permissions_to_change(tmp_path: Path, code: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = peer.ask(code, brokerName="another")
        assert answer.code == codes.INVALID_PARAMETER
        assert answer.remark == "there is no broker 'another', this is 'postdate'"
        assert peer.ask(code).code == codes.INVALID_PARAMETER


def test_a_route_is_forgotten_with_its_topic_and_not_before(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        answer = peer.ask(Request.DELETE_TOPIC_IN_NAMESRV, topic="orders")
        assert answer.code == codes.ILLEGAL_OPERATION
        assert "delete it from the broker" in (answer.remark or "")
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        assert peer.ask(Request.DELETE_TOPIC_IN_NAMESRV, topic="orders").code == codes.SUCCESS


def test_no_key_value_settings_are_kept(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        asked: dict[str, Any] = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders"}
        answer = peer.ask(Request.GET_KV_CONFIG, **asked)
        assert (answer.code, answer.remark) == (
            codes.QUERY_NOT_FOUND,
            "nothing is stored under 'orders': there are no key-value settings",
        )
        assert peer.ask(Request.DELETE_KV_CONFIG, **asked).code == codes.SUCCESS
        assert peer.ask(Request.DELETE_KV_CONFIG, namespace="x").code == codes.INVALID_PARAMETER


def test_the_topics_of_a_group_may_be_deleted_when_they_are_gone(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        for topic in ("%RETRY%workers", "%DLQ%workers"):
            answer = peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic=topic)
            assert (answer.code, answer.fields) == (codes.SUCCESS, {"cancelled": "0"})
        assert peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders").code == codes.TOPIC_NOT_EXIST


def test_a_topic_is_told_as_it_was_made(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders", 3, perm=4, attributes="+message.type=DELAY")
        told = json_of(peer, Request.GET_TOPIC_CONFIG, topic="orders")
        assert told == {
            "topicName": "orders", "readQueueNums": 3, "writeQueueNums": 3, "perm": 4, "topicSysFlag": 0,
            "topicFilterType": "SINGLE_TAG", "order": False, "attributes": {"message.type": "DELAY"},
        }  # fmt: skip
        assert peer.ask(Request.GET_TOPIC_CONFIG, topic="nowhere").code == codes.TOPIC_NOT_EXIST


# -- figures --------------------------------------------------------------------------------------------------------


def figures(peer: Peer) -> dict[str, str]:
    table: dict[str, str] = json_of(peer, Request.GET_BROKER_RUNTIME_INFO)["table"]
    assert all(isinstance(value, str) for value in table.values()), "Java reads texts"
    return table


def test_figures_tell_what_waits_what_came_and_what_went(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        empty = figures(peer)
        assert "earliestMessageTimeStamp" not in empty
        assert (empty["putMessageTimesTotal"], empty["timerCongestNum"]) == ("0", "0")
        sent(peer, "orders")
        sent(peer, "orders", TIMER_DELAY_SEC=5)
        for _ in range(2):
            sent(peer, "orders", TIMER_DELAY_MS=FAR_MS)
        served.pass_ms(2_000)
        pull(peer, "orders")
        told = figures(peer)
        assert (told["postdate_waiting_near"], told["postdate_waiting_far"]) == ("1", "2")
        assert told["timerCongestNum"] == "3"
        assert (told["putMessageTimesTotal"], told["postdate_timed_total"]) == ("4", "3")
        assert told["putTps"].split() == ["2.00"] * 3, "four messages in two seconds"
        assert told["getTransferredTps"].split() == ["0.50"] * 3
        assert (told["timerEnqueueTps"], told["timerDequeueTps"]) == ("1.50", "0.00")
        assert (told["postdate_topics"], told["postdate_groups"], told["postdate_connections"]) == ("1", "1", "1")
        assert told["earliestMessageTimeStamp"] == str(T0)
        assert told["brokerVersionDesc"] == f"postdate {__version__}"
        assert told["runtime"] == "0 days, 0 hours, 0 minutes, 2 seconds"
        assert 0 < float(told["commitLogDiskRatio"]) <= 1
        assert told["postdate_log_problem"] == "none"
        served.pass_ms(3_000)
        served.settle()
        told = figures(peer)
        assert (told["postdate_waiting_near"], told["timerDequeueTps"]) == ("0", "0.20")
        sent(peer, "orders", TIMER_DELAY_SEC=5)
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        told = figures(peer)
        assert (told["postdate_waiting_near"], told["postdate_waiting_far"]) == ("0", "0"), "it is cancelled"


def test_totals_of_a_day_begin_at_midnight(tmp_path: Path) -> None:
    morning = T0 // DAY_MS * DAY_MS
    with serving(tmp_path, ManualClock(morning + DAY_MS - MINUTE_MS)) as served, connected(served) as peer:
        for _ in range(3):
            sent(peer, "orders")
        pull(peer, "orders")
        served.pass_ms(2 * MINUTE_MS)
        served.call(served.dispatcher.status.tick)
        sent(peer, "orders")
        told = figures(peer)
        names = ("msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning", "msgPutTotalTodayNow")
        assert [told[name] for name in names] == ["0", "3", "4"]
        assert (told["msgGetTotalTodayMorning"], told["msgGetTotalTodayNow"]) == ("3", "3")
        served.pass_ms(2 * DAY_MS)
        told = figures(peer)
        assert [told[name] for name in names] == ["4", "4", "4"], "nothing came yesterday"


def test_held_pulls_are_counted(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer, connected(served) as other:
        make_topic(peer, "orders")
        other.write(pull_command(other, "orders", wait_ms=LONG_POLL_MS))
        other.round_trip()
        told = figures(peer)
        assert (told["postdate_held_pulls"], told["postdate_connections"]) == ("1", "2")


# -- rates ----------------------------------------------------------------------------------------------------------


def rates(peer: Peer, name: str, key: str) -> dict[str, Any]:
    told: dict[str, Any] = json_of(peer, Request.VIEW_BROKER_STATS_DATA, statsName=name, statsKey=key)
    return told


def test_rates_are_kept_by_topic_and_by_group_for_a_minute_an_hour_and_a_day(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for _ in range(6):
            sent(peer, "orders")
        sent(peer, "orders", TIMER_DELAY_SEC=3_000)
        pull(peer, "orders", maxMsgNums=4)
        served.pass_ms(2_000)
        came = rates(peer, "TOPIC_PUT_NUMS", "orders")
        assert came["statsMinute"] == {"sum": 6, "tps": 3.0, "avgpt": 0.0}, "what waits has not come yet"
        went = rates(peer, "GROUP_GET_NUMS", f"orders@{GROUP}")
        assert went["statsMinute"] == {"sum": 4, "tps": 2.0, "avgpt": 0.0}
        for _ in range(30):
            served.pass_ms(10_000)
            served.call(served.dispatcher.status.tick)
        came = rates(peer, "TOPIC_PUT_NUMS", "orders")
        assert [came[span]["sum"] for span in ("statsMinute", "statsHour", "statsDay")] == [0, 6, 6]
        assert rates(peer, "GROUP_GET_NUMS", "orders@nobody")["statsDay"]["sum"] == 0
        assert rates(peer, "TOPIC_PUT_NUMS", "nowhere")["statsDay"]["sum"] == 0


def test_rates_that_nobody_counts_are_refused_by_name(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        answer = peer.ask(Request.VIEW_BROKER_STATS_DATA, statsName="BROKER_PUT_NUMS", statsKey="x")
        assert answer.code == codes.INVALID_PARAMETER
        assert "there are no statistics 'BROKER_PUT_NUMS'" in (answer.remark or "")


# -- settings -------------------------------------------------------------------------------------------------------


def settings_of(peer: Peer, code: int = Request.GET_BROKER_CONFIG) -> dict[str, str]:
    answer = peer.ask(code)
    assert answer.code == codes.SUCCESS
    assert answer.fields == {"version": f"postdate {__version__}"}
    return decode_properties_text(answer.body)


def change(peer: Peer, **texts: str) -> tuple[int, str | None]:
    answer = peer.ask(Request.UPDATE_BROKER_CONFIG, encode_properties_text(texts))
    return answer.code, answer.remark


def test_all_settings_are_told_and_which_of_them_may_change(tmp_path: Path) -> None:
    with serving(tmp_path, data="a\\folder of ü") as served, connected(served) as peer:
        told = settings_of(peer)
        assert told.keys() == FIELDS.keys() | {"live_settings"}
        assert (told["auto_create_topics"], told["shutdown_ms"]) == ("true", "500")
        assert told["data"] == "a\\folder of ü"
        assert told["live_settings"].split() == sorted(LIVE)
        assert settings_of(peer, Request.GET_NAMESRV_CONFIG) == told


def test_a_change_counts_at_once_and_until_the_broker_stops(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert change(peer, auto_create_topics="false", body_bytes_max="10") == (codes.SUCCESS, None)
        assert send(peer, "orders").code == codes.TOPIC_NOT_EXIST
        make_topic(peer, "orders")
        assert send(peer, "orders", "0123456789").code == codes.SUCCESS
        assert send(peer, "orders", "0123456789a").code == codes.MESSAGE_ILLEGAL
        assert settings_of(peer)["body_bytes_max"] == "10"
        assert change(peer, pull_count_max="1") == (codes.SUCCESS, None)
        sent(peer, "orders")
        assert len(pull(peer, "orders").records) == 1
    with serving(tmp_path) as served, connected(served) as peer:
        assert send(peer, "others", "0123456789a").code == codes.SUCCESS


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({"topics_max": "7", "lead_ms": "1s"}, "lead_ms cannot change while the broker runs"),
        ({"topics_max": "7", "groups_max": "0"}, "groups_max is 0, expected 1 to"),
        ({"topics_max": "7", "colour": "red"}, "'colour' is no setting"),
        ({"topics_max": "7", "locks_max": "5"}, "locks_max is fixed at 100,000 and cannot change"),
    ],
)
def test_one_refusal_refuses_the_whole_change(tmp_path: Path, texts: dict[str, str], sentence: str) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        before = settings_of(peer)
        code, remark = change(peer, **texts)
        assert code == codes.INVALID_PARAMETER
        assert (remark or "").startswith(sentence)
        assert settings_of(peer) == before


@pytest.mark.parametrize("body", [b"\xff=1", b"topics_max", b"= 5"])
def test_what_is_no_list_of_settings_is_refused(tmp_path: Path, body: bytes) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert peer.ask(Request.UPDATE_BROKER_CONFIG, body).code == codes.INVALID_PARAMETER


def test_nobody_keeps_the_settings_from_before_a_change(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders", TIMER_DELAY_SEC=1)
        pull(peer, "orders")
        heartbeat(peer, "c1", {"orders": "*"})
        before = served.call(lambda: weakref.ref(served.broker.settings))
        assert change(peer, topics_max="77") == (codes.SUCCESS, None)
        served.call(gc.collect)
        assert before() is None, [type(each) for each in gc.get_referrers(before())]


def test_the_limit_of_connections_may_change(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert change(peer, connections_max="1") == (codes.SUCCESS, None)
        with connected(served) as one_too_many:
            one_too_many.expect_closed()
        assert change(peer, connections_max="2") == (codes.SUCCESS, None)
        with connected(served) as welcome:
            welcome.round_trip()


# -- queues ---------------------------------------------------------------------------------------------------------


def test_entries_of_a_queue_are_shown(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for tag in ("a", "b", "c"):
            sent(peer, "orders", TAGS=tag)
        asked: dict[str, Any] = {"topic": "orders", "queueId": 0}
        told = json_of(peer, Request.QUERY_CONSUME_QUEUE, index=1, count=10, **asked)
        assert (told["minQueueIndex"], told["maxQueueIndex"]) == (0, 3)
        assert [entry["tagsCode"] for entry in told["queueData"]] == [ord("b"), ord("c")]
        (record,) = decode_records(
            peer.ask(Request.VIEW_MESSAGE_BY_ID, offset=told["queueData"][0]["physicOffset"]).body
        )
        assert properties_of(record)["TAGS"] == "b"
        assert told["queueData"][0]["physicSize"] > 0
        assert json_of(peer, Request.QUERY_CONSUME_QUEUE, index=9, count=1, **asked)["queueData"] == []
        for index, count in ((-1, 1), (0, 0), (0, 1_025)):
            answer = peer.ask(Request.QUERY_CONSUME_QUEUE, index=index, count=count, **asked)
            assert answer.code == codes.INVALID_PARAMETER
        assert peer.ask(Request.QUERY_CONSUME_QUEUE, index=0, count=1, topic="x", queueId=0).code == 17

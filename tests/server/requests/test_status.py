"""What the broker reports about itself: figures, rates and settings."""

import errno
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate import __version__
from postdate.arrival import OWN
from postdate.clock import ManualClock
from postdate.config import FIELDS, LIVE, ROCKETMQ_NAMES
from postdate.errors import DiskFull
from postdate.message import Host
from postdate.wire import codes
from postdate.wire.reports import decode_properties_text, encode_properties_text
from postdate.wire.requests import Request
from tests.support.core import DAY_MS, FAR_MS, HOUR_MS, MINUTE_MS, T0, FaultyDisk
from tests.support.peer import (
    GROUP,
    LONG_POLL_MS,
    TINY,
    Peer,
    ask_json,
    connected,
    fill_segments,
    heartbeat,
    make_topic,
    pull,
    pull_command,
    send,
    sent,
)
from tests.support.server import Served, serving

# -- figures --------------------------------------------------------------------------------------------------------


def figures(peer: Peer) -> dict[str, str]:
    table: dict[str, str] = ask_json(peer, Request.GET_BROKER_RUNTIME_INFO)["table"]
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


# -- what is late ---------------------------------------------------------------------------------------------------


def status(peer: Peer) -> dict[str, Any]:
    found: dict[str, Any] = ask_json(peer, Request.GET_STATUS)
    return found


def register(peer: Peer) -> None:
    said = orjson.dumps({"table": "s3://bucket/t", "master": "local"})
    assert peer.ask(Request.REGISTER_PIPELINE, said).code == codes.SUCCESS


def stage(peer: Peer, far: tuple[int, int], horizon: tuple[int, int], rows_in: int) -> None:
    body = {"epoch": 1, "far": far, "horizon": horizon, "chunks": [], "rows_in": rows_in, "rows_out": 0}
    assert peer.ask(Request.STAGE, orjson.dumps(body)).code == codes.SUCCESS


@contextmanager
def late_pipeline(folder: Path) -> Iterator[tuple[Served, Peer]]:
    """Two messages are in the table, and the pipeline has promoted up to two minutes ago."""
    with serving(folder, ManualClock(T0)) as served, connected(served) as peer:
        for _ in range(2):
            sent(peer, "orders", TIMER_DELAY_MS=DAY_MS)
        register(peer)
        stage(peer, (0, 2), (0, T0 + 2 * MINUTE_MS), 2)
        assert status(peer)["late"] == []
        served.pass_ms(4 * MINUTE_MS)
        yield served, peer


def test_a_pipeline_that_is_away_is_told_since_when_and_what_is_late(tmp_path: Path) -> None:
    with late_pipeline(tmp_path) as (_, peer):
        assert status(peer)["late"] == [
            {
                "what": "messages that only the table has, as far as they are due",
                "since_ms": T0 + 90_001,
                "late_ms": 2 * MINUTE_MS,
                "why": "no pipeline was heard of for 240 s, and bulk is not there either",
                "to_do": "start one: postdate pipeline --addr HOST:PORT",
            }
        ]


def explain(peer: Peer) -> tuple[str, str]:
    (late,) = status(peer)["late"]
    return late["why"], late["to_do"]


def test_why_nobody_promotes_is_told_in_the_words_of_what_failed(tmp_path: Path) -> None:
    with late_pipeline(tmp_path) as (served, peer), connected(served) as bulk:
        assert bulk.ask(Request.ATTACH_TABLE).code == codes.SUCCESS
        parts = {"pipeline": "starts again in 5 s: it ended with code 3 (the table cannot be read)"}
        served.call(lambda: served.server.show_parts(parts))
        assert explain(peer) == (f"the pipeline {parts['pipeline']}", "do as it says, or look at the broker's log")
        parts["pipeline"] = "runs on Spark (process 1)"
        assert explain(peer) == ("no pipeline was heard of for 240 s", "look at its log")
        job = {"call": "ask", "id": "j1", "op": "cancel", "where": "true", "by_ms": 0}
        assert peer.ask(Request.JOB, orjson.dumps(job)).code == codes.SUCCESS
        assert explain(peer) == ("no pipeline was heard of for 240 s", "look at its log"), "a job keeps nobody waiting"
        peer.ask(Request.GET_BULK_STATE, note="waits for cores of spark://s:7077: it has none free")
        assert explain(peer) == (
            "the pipeline waits for cores of spark://s:7077: it has none free",
            "give it cores, or end what uses them",
        )
        peer.ask(Request.GET_BULK_STATE, rowsMax=1, bytesMax=1)
        assert explain(peer) == ("the pipeline works, and is behind", "look at its last batches, below")


def test_a_broker_that_was_restarted_has_heard_of_no_pipeline(tmp_path: Path) -> None:
    with late_pipeline(tmp_path):
        pass
    with serving(tmp_path, ManualClock(T0 + 4 * MINUTE_MS)) as served, connected(served) as peer:
        why = "no pipeline was heard of since the broker was started, and bulk is not there either"
        assert explain(peer)[0] == why
        served.call(lambda: served.server.show_parts({"pipeline": "none here: start one"}))
        assert status(peer)["parts"] == {"pipeline": "none here: start one"}


def test_a_pipeline_elsewhere_is_told_instead_of_advice_to_start_one(tmp_path: Path) -> None:
    with late_pipeline(tmp_path) as (served, peer):
        served.call(lambda: served.server.show_parts({"pipeline": "none here: start one"}))
        assert status(peer)["parts"] == {"pipeline": "none here; one elsewhere was heard of 240 s ago"}


def test_a_stage_of_bulk_is_no_sign_of_a_pipeline(tmp_path: Path) -> None:
    with late_pipeline(tmp_path) as (served, peer), connected(served) as bulk:
        served.call(lambda: served.server.show_parts({"pipeline": "none here: start one"}))
        assert bulk.ask(Request.ATTACH_TABLE).code == codes.SUCCESS
        stage(bulk, (2, 2), (T0 + 2 * MINUTE_MS, T0 + 6 * MINUTE_MS), 2)
        assert status(peer)["parts"] == {"pipeline": "none here; one elsewhere was heard of 240 s ago"}
        assert status(peer)["far"]["bulk_since_ms"] == T0 + 4 * MINUTE_MS


def test_bulk_that_ended_is_told_beside_the_pipeline(tmp_path: Path) -> None:
    with late_pipeline(tmp_path) as (served, peer):
        served.call(lambda: served.server.show_parts({"bulk": "starts again in 5 s: it was killed by SIGKILL"}))
        why = "no pipeline was heard of for 240 s, and bulk starts again in 5 s: it was killed by SIGKILL"
        assert explain(peer)[0] == why


def test_what_an_import_has_brought_and_nobody_takes_in_is_told_when_it_is_late(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        register(peer)
        for call in (
            {"call": "begin", "id": "nightly", "topic": "orders"},
            {
                "call": "adopt", "id": "nightly", "bad": 0,
                "files": [["_import-nightly-1.parquet", 9, 2, T0 + MINUTE_MS, T0 + HOUR_MS, OWN, OWN + 1]],
            },
        ):  # fmt: skip
            assert peer.ask(Request.JOB, orjson.dumps(call)).code == codes.SUCCESS
        assert status(peer)["late"] == []
        assert status(peer)["far"]["beside_rows"] == 2
        served.pass_ms(2 * MINUTE_MS)
        (late,) = status(peer)["late"]
        assert (
            late["what"] == "messages of imports and postponements that no batch has taken in, as far as they are due"
        )
        assert (late["since_ms"], late["late_ms"]) == (T0 + MINUTE_MS, MINUTE_MS)
        assert late["why"] == "no pipeline was heard of for 120 s, and bulk is not there either"


def test_a_problem_of_bulk_is_told_as_it_is(tmp_path: Path) -> None:
    with late_pipeline(tmp_path) as (served, peer), connected(served) as bulk:
        assert bulk.ask(Request.ATTACH_TABLE, problem="the table t belongs to another broker").code == codes.SUCCESS
        to_do = "do as it says, or repair the table: docs/pipeline.md, A damaged table"
        assert explain(peer) == ("the table t belongs to another broker", to_do)


def test_a_wheel_without_room_is_told_when_it_makes_messages_late(tmp_path: Path) -> None:
    with (
        serving(tmp_path, ManualClock(T0), wheel_entries_max=2, stage_ahead_ms_max=DAY_MS) as served,
        connected(served) as peer,
    ):
        sent(peer, "orders", TIMER_DELAY_MS=5 * MINUTE_MS)
        register(peer)
        stage(peer, (0, 0), (0, T0 + 10 * MINUTE_MS), 0)
        for _ in range(2):  # near, as the pipeline has promoted so far
            sent(peer, "orders", TIMER_DELAY_MS=9 * MINUTE_MS)
        served.pass_ms(5 * MINUTE_MS - 1)
        assert status(peer)["late"] == []
        served.pass_ms(3_001)
        (late,) = status(peer)["late"]
        assert (late["since_ms"], late["late_ms"]) == (T0 + 5 * MINUTE_MS, 3_000)
        assert late["why"] == "wheel_entries_max: 2 messages are due soon and in memory, the limit"
        assert late["to_do"] == "raise wheel_entries_max"


def test_a_broken_disk_that_keeps_what_is_due_is_told(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    with serving(tmp_path, ManualClock(T0), disk) as served, connected(served) as peer:
        sent(peer, "orders", TIMER_DELAY_MS=1_000)
        disk.fault = lambda call, _path: OSError(errno.EIO, "no luck") if call == "file.sync" else None
        served.pass_ms(5_000)
        while served.broker.log.failure is None:  # its thread syncs
            peer.round_trip()
        (late,) = status(peer)["late"]
        assert (late["since_ms"], late["late_ms"]) == (T0 + 1_000, 4_000)
        assert late["what"] == "messages that are due and in memory"
        assert "no luck" in late["why"]
        assert late["to_do"] == "restart it when its disk works"
        disk.fault = lambda _call, _path: None


def test_a_full_disk_that_keeps_what_is_due_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_at_ms: int) -> None:
        raise DiskFull("no room")

    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", TIMER_DELAY_MS=1_000)
        with monkeypatch.context() as patched:  # fires have a reserve, which takes long to use up
            patched.setattr(served.broker, "_fire_if_due", fail)
            served.pass_ms(5_000)
        (late,) = status(peer)["late"]
        assert (late["since_ms"], late["late_ms"], late["why"]) == (T0 + 1_000, 4_000, "no room")
        assert late["to_do"] == f"make room on the disk of {served.broker.settings.data}"


# -- rates ----------------------------------------------------------------------------------------------------------


def rates(peer: Peer, name: str, key: str) -> dict[str, Any]:
    told: dict[str, Any] = ask_json(peer, Request.VIEW_BROKER_STATS_DATA, statsName=name, statsKey=key)
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


SHOWN = {"brokerIP1", "namesrvAddr", "brokerId", "brokerRole", "slaveReadEnable", "traceTopicEnable"}


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
        assert told.keys() == FIELDS.keys() | ROCKETMQ_NAMES.keys() | SHOWN | {"live_settings"}
        assert (told["auto_create_topics"], told["shutdown_ms"]) == ("true", "500")
        assert told["data"] == "a\\folder of ü"
        assert told["live_settings"].split() == sorted(LIVE)
        named = settings_of(peer, Request.GET_NAMESRV_CONFIG)
        assert named == told | {"listenPort": served.server.route_address.rpartition(":")[2]}


def test_settings_are_told_by_the_names_of_rocketmq_too(tmp_path: Path) -> None:
    with serving(tmp_path, broker_name="here", cluster_name="all", retention_ms=DAY_MS) as served:
        with connected(served) as peer:
            told = settings_of(peer)
        assert (told["brokerName"], told["brokerClusterName"], told["brokerId"]) == ("here", "all", "0")
        assert f"{told['brokerIP1']}:{told['listenPort']}" == served.server.broker_address
        assert told["namesrvAddr"] == served.server.route_address
        assert (told["brokerRole"], told["flushDiskType"]) == ("ASYNC_MASTER", "SYNC_FLUSH")
        assert (told["fileReservedTime"], told["autoCreateTopicEnable"]) == ("24", "true")
    with serving(tmp_path, advertise="broker.example.org:1234") as served, connected(served) as peer:
        told = settings_of(peer)
        assert (told["brokerIP1"], told["listenPort"]) == ("broker.example.org", "1234")
        assert told["namesrvAddr"] == f"broker.example.org:{served.server.route_address.rpartition(':')[2]}"


@pytest.mark.parametrize("code", [Request.UPDATE_BROKER_CONFIG, Request.UPDATE_NAMESRV_CONFIG])
def test_a_setting_changes_by_the_name_of_rocketmq(tmp_path: Path, code: int) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        assert peer.ask(code, b"fileReservedTime=48\nmaxMessageSize=10\n").code == codes.SUCCESS
        told = settings_of(peer)
        assert (told["retention_ms"], told["fileReservedTime"], told["maxMessageSize"]) == ("172800000", "48", "10")
        answer = peer.ask(code, b"brokerName=other")
        assert answer.code == codes.INVALID_PARAMETER
        assert (answer.remark or "").startswith("brokerName (broker_name) cannot change while the broker runs")


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


def test_places_are_shown_to_this_machine_and_masked_over_the_network(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with (
        serving(data, ManualClock(T0), data=str(data), table="s3://key:secret@bucket/t") as served,
        connected(served) as peer,
    ):
        said = orjson.dumps({"table": "s3://key:secret@bucket/t", "master": "local"})
        assert peer.ask(Request.REGISTER_PIPELINE, said).code == codes.SUCCESS
        served.call(lambda: served.server.show_parts({"pipeline": f"cannot read {data}/table"}))

        def shown() -> list[str]:
            overview = status(peer)
            settings = decode_properties_text(peer.ask(Request.GET_BROKER_CONFIG).body)
            return [
                overview["broker"]["data"],
                overview["table"],
                overview["parts"]["pipeline"],
                settings["data"],
                settings["table"],
            ]

        assert shown() == [str(data), "s3://...@bucket/t", f"cannot read {data}/table", str(data), "s3://...@bucket/t"]
        far = Host(bytes([10, 0, 0, 7]), 1)

        def move_away() -> None:
            for each in served.dispatcher.connections:
                each.host = far

        served.call(move_away)
        assert shown() == [".../data", "s3://.../t", "cannot read .../table", ".../data", "s3://.../t"]


# -- replicas and cleaning ------------------------------------------------------------------------------------------


def test_a_broker_without_replicas_says_so_as_a_master(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        sent(peer, "orders")
        told = ask_json(peer, Request.GET_BROKER_HA_STATUS)
        assert told["masterCommitLogMaxOffset"] == served.call(lambda: served.broker.log.end) > 0
        assert (told["master"], told["inSyncSlaveNums"], told["haConnectionInfo"]) == (True, 0, [])
        assert told["haClientRuntimeInfo"]["masterAddr"] is None


@pytest.mark.parametrize(
    "request_",
    [Request.CLEAN_EXPIRED_CONSUMEQUEUE, Request.CLEAN_UNUSED_TOPIC, Request.DELETE_EXPIRED_COMMITLOG],
    ids=lambda request: request.name,
)
def test_cleaning_removes_what_retention_would_and_no_topic(tmp_path: Path, request_: Request) -> None:
    with serving(tmp_path, ManualClock(T0), retention_ms=DAY_MS, **TINY) as served, connected(served) as peer:
        make_topic(peer, "unused")
        fill_segments(served, peer, "orders")
        waits = sent(peer, "orders", UNIQ_KEY="u1", TIMER_DELAY_MS=30 * DAY_MS)
        assert peer.ask(request_).fields == {"removed": "0"}, "their time is not over"
        served.pass_ms(DAY_MS)
        assert int(peer.ask(request_).fields["removed"]) > 0
        assert peer.ask(request_).fields == {"removed": "0"}
        names = ask_json(peer, Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)["topicList"]
        assert {"orders", "unused"} <= set(names)
        low = peer.ask(Request.GET_MIN_OFFSET, topic="orders", queueId=0).fields["offset"]
        assert int(low) > 0
        recalled = peer.ask(Request.RECALL_MESSAGE, topic="orders", recallHandle=waits.fields["recallHandle"])
        assert recalled.code == codes.SUCCESS, "what waits stays"

"""Offsets over the wire: commits, what a new group begins with, search by time, looking at one message."""

from pathlib import Path
from typing import Any

import pytest

from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.ids import parse_message_id
from postdate.wire.records import decode_records
from postdate.wire.requests import Request
from tests.support.core import T0
from tests.support.peer import GROUP, TINY, Peer, begun_later, connected, make_topic, pull, sent
from tests.support.server import serving

NONE = -1
FAR_BETWEEN_MS = 60_000  # between two writings of offsets: not within a test


def committed(peer: Peer, topic: str = "orders", *, group: str = GROUP, queue_id: int = 0, **fields: Any) -> int:
    """What a group has committed; NONE where the broker knows of nothing."""
    answer = peer.ask(Request.QUERY_CONSUMER_OFFSET, consumerGroup=group, topic=topic, queueId=queue_id, **fields)
    if answer.code == codes.QUERY_NOT_FOUND:
        assert "has committed no offset" in (answer.remark or "")
        return NONE
    assert answer.code == codes.SUCCESS, answer
    return int(answer.fields["offset"])


def commit_fields(offset: int, *, queue_id: int = 0) -> dict[str, Any]:
    return {"consumerGroup": GROUP, "topic": "orders", "queueId": queue_id, "commitOffset": offset}


def number(peer: Peer, code: int, name: str = "offset", **fields: Any) -> int:
    """A number that the broker tells about queue 0 of orders."""
    answer = peer.ask(code, **{"topic": "orders", "queueId": 0, **fields})
    assert answer.code == codes.SUCCESS, answer
    return int(answer.fields[name])


# ------------------------------------------------------------------------------------------------------- commits


def test_an_offset_that_comes_with_a_pull_counts_at_once_and_survives_a_stop(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=FAR_BETWEEN_MS) as served, connected(served) as peer:
        for _ in range(3):
            sent(peer, "orders")
        pull(peer, "orders", 2, commit=2)
        assert committed(peer) == 2
        pull(peer, "orders", 2)
        assert committed(peer) == 2, "a pull without the flag commits nothing"
    with serving(tmp_path) as served, connected(served) as peer:
        assert committed(peer) == 2


def test_an_offset_that_was_answered_survives_a_crash(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=FAR_BETWEEN_MS) as served, connected(served) as peer:
        for _ in range(3):
            sent(peer, "orders")
        assert peer.ask(Request.UPDATE_CONSUMER_OFFSET, **commit_fields(3)).code == codes.SUCCESS
        served.kill()
    with serving(tmp_path) as served, connected(served) as peer:
        assert committed(peer) == 3


def test_an_offset_that_nobody_waits_for_counts_at_once_is_not_answered_and_survives_a_stop(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=FAR_BETWEEN_MS) as served, connected(served) as peer:
        for _ in range(3):
            sent(peer, "orders")
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(1))
        peer.expect_no_more()
        assert committed(peer) == 1
    with serving(tmp_path) as served, connected(served) as peer:
        assert committed(peer) == 1


def test_offsets_that_nobody_waits_for_are_written_from_time_to_time(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=10) as served, connected(served) as peer:
        for _ in range(3):
            sent(peer, "orders")
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(2))
        while served.call(lambda: served.broker.fold.groups.offset(GROUP, "orders", 0)) != 2:
            peer.round_trip()
        served.kill()
    with serving(tmp_path) as served, connected(served) as peer:
        assert committed(peer) == 2


def test_the_last_offset_counts_however_it_was_committed(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=FAR_BETWEEN_MS) as served, connected(served) as peer:
        for _ in range(5):
            sent(peer, "orders")
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(4))
        peer.ask(Request.UPDATE_CONSUMER_OFFSET, **commit_fields(2))
        assert committed(peer) == 2, "an older one is a commit like any other: somebody reads again"
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(3))
        assert committed(peer) == 3
        served.call(served.dispatcher.groups.write_offsets)
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(2))
        assert committed(peer) == 2
    with serving(tmp_path) as served, connected(served) as peer:
        assert committed(peer) == 2


def test_an_offset_noted_for_a_queue_that_is_gone_hinders_no_other(tmp_path: Path) -> None:
    with serving(tmp_path, offsets_interval_ms=FAR_BETWEEN_MS) as served, connected(served) as peer:
        make_topic(peer, "orders", 4)
        sent(peer, "others")
        sent(peer, "orders")
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(0, queue_id=3))
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(1))
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **{**commit_fields(1), "topic": "others"})
        peer.ask(Request.DELETE_TOPIC_IN_BROKER, topic="orders")
        make_topic(peer, "orders", 1)
        assert committed(peer, setZeroIfNotFound="false") == NONE, "the topic is another one"
        served.call(served.dispatcher.groups.write_offsets)
        served.settle()
        assert served.call(lambda: served.broker.fold.groups.offsets(GROUP)) == {("others", 0): 1}


@pytest.mark.parametrize(
    "fields", [{"queueId": 9}, {"topic": "nowhere"}, {"commitOffset": -5}, {"queueId": -1}], ids=str
)
@pytest.mark.parametrize("oneway", [False, True])
def test_a_commit_of_what_is_not_there_is_refused_and_nothing_else_suffers(
    tmp_path: Path, fields: dict[str, Any], oneway: bool
) -> None:
    with serving(tmp_path, offsets_interval_ms=FAR_BETWEEN_MS) as served, connected(served) as peer:
        make_topic(peer, "orders")
        opaque = peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=oneway, **{**commit_fields(0), **fields})
        if not oneway:
            assert peer.answer_to(opaque).code in (codes.INVALID_PARAMETER, codes.TOPIC_NOT_EXIST)
        served.call(served.dispatcher.groups.write_offsets)
        sent(peer, "orders")
        peer.say(Request.UPDATE_CONSUMER_OFFSET, oneway=True, **commit_fields(1))
        peer.expect_no_more()
        served.call(served.dispatcher.groups.write_offsets)
        served.settle()
        assert served.call(lambda: served.broker.fold.groups.offset(GROUP, "orders", 0)) == 1


# ------------------------------------------------------------------------------------------- where a group begins


def test_a_new_group_begins_a_fresh_queue_at_its_first_message(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert committed(peer) == 0
        sent(peer, "orders")
        assert committed(peer) == 0
        assert committed(peer, setZeroIfNotFound="true") == 0
        assert committed(peer, setZeroIfNotFound="false") == NONE
        assert committed(peer, f"%RETRY%{GROUP}") == 0


def test_a_new_group_decides_for_itself_where_to_begin_a_queue_with_history(tmp_path: Path) -> None:
    with serving(tmp_path, fresh_queue_bytes=0) as served, connected(served) as peer:
        make_topic(peer, "orders", 2)
        sent(peer, "orders")
        assert committed(peer) == NONE
        assert committed(peer, queue_id=1) == 0, "an empty one has no history"


def test_a_queue_that_has_lost_its_beginning_is_not_fresh(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0), retention_ms=0, **TINY) as served, connected(served) as peer:
        low = begun_later(served, peer, "orders")
        assert committed(peer) == NONE
        assert number(peer, Request.GET_MIN_OFFSET) == low


def test_an_offset_of_an_unknown_topic_or_queue_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        asked: dict[str, Any] = {"consumerGroup": GROUP, "topic": "orders", "queueId": 0}
        assert peer.ask(Request.QUERY_CONSUMER_OFFSET, **asked | {"topic": "nowhere"}).code == codes.TOPIC_NOT_EXIST
        assert peer.ask(Request.QUERY_CONSUMER_OFFSET, **asked | {"queueId": 5}).code == codes.INVALID_PARAMETER


# ------------------------------------------------------------------------------------------------- about a queue


def test_a_queue_tells_its_bounds_and_the_time_of_its_first_message(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        make_topic(peer, "orders")
        assert number(peer, Request.GET_MAX_OFFSET, committed="true") == 0
        assert number(peer, Request.GET_MIN_OFFSET) == 0
        assert number(peer, Request.GET_EARLIEST_MSG_STORETIME, "timestamp") == -1
        sent(peer, "orders", TIMER_DELAY_SEC=5)
        assert number(peer, Request.GET_MAX_OFFSET) == 0, "what waits is not there yet"
        served.pass_ms(5_000)
        served.settle()
        assert number(peer, Request.GET_MAX_OFFSET) == 1
        assert number(peer, Request.GET_MIN_OFFSET) == 0
        assert number(peer, Request.GET_EARLIEST_MSG_STORETIME, "timestamp") == T0 + 5_000


@pytest.mark.parametrize(
    ("at_ms", "lower", "upper"),
    [(-1, 0, 0), (0, 0, 1), (1, 2, 1), (999, 2, 1), (1_000, 2, 2), (1_001, 3, 2), (2_000, 3, 3), (2_001, 4, 3),
     (9_000, 4, 3)],
)  # fmt: skip
def test_offsets_are_searched_by_time(tmp_path: Path, at_ms: int, lower: int, upper: int) -> None:
    # Offsets 0 and 1 became visible at T0, 2 at T0 + 1 s, 3 at T0 + 2 s.
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders")
        sent(peer, "orders")
        for _ in range(2):
            served.pass_ms(1_000)
            sent(peer, "orders")
        search = Request.SEARCH_OFFSET_BY_TIMESTAMP
        assert number(peer, search, timestamp=T0 + at_ms) == lower
        assert number(peer, search, timestamp=T0 + at_ms, boundaryType="LOWER") == lower
        assert number(peer, search, timestamp=T0 + at_ms, boundaryType="UPPER") == upper


def test_an_empty_queue_is_searched_too(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for boundary in ("LOWER", "UPPER"):
            assert number(peer, Request.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=T0, boundaryType=boundary) == 0


def test_a_message_is_looked_at_by_its_offset_in_the_log(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        answers = [sent(peer, "orders", "now"), sent(peer, "orders", "later", TIMER_DELAY_SEC=3_600)]
        for answer, body in zip(answers, (b"now", b"later"), strict=True):
            _, offset = parse_message_id(answer.fields["msgId"])
            viewed = peer.ask(Request.VIEW_MESSAGE_BY_ID, topic="orders", offset=offset)
            assert viewed.code == codes.SUCCESS
            (record,) = decode_records(viewed.body)
            assert (record.offset, record.body) == (offset, body)


def test_an_offset_at_which_no_message_lies_is_answered_so(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        _, there = parse_message_id(sent(peer, "orders", "x" * 100).fields["msgId"])
        end = served.call(lambda: served.broker.log.end)
        odd = [-1, -(2**63), 2**63 - 1, 1 << 62, (1 << 62) + 5, end, end + 1, 1 << 40, *range(end + 16)]
        for offset in odd:
            if offset == there:
                continue
            answer = peer.ask(Request.VIEW_MESSAGE_BY_ID, offset=offset)
            assert answer.code == codes.SYSTEM_ERROR, (offset, answer)
            assert answer.remark == f"there is no message at offset {offset}"

"""Counts of what waits, by topic and by time, and of what is due in the time ahead."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.core import DAY_MS, FAR_MS, HOUR_MS, MINUTE_MS, T0
from tests.support.peer import Peer, connected, make_topic, sent
from tests.support.server import serving


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

"""How many messages came and went: rates that are counted by the way."""

from pathlib import Path

import pytest

from postdate.clock import ManualClock
from postdate.server.sessions import meter
from postdate.server.sessions.meter import Came, Meter, Rate, Span, Went, Whole
from tests.support.core import T0
from tests.support.peer import connected, make_topic, pull, sent
from tests.support.server import Served, serving


def rate_of(served: Served, key: object, span: Span = Span.MINUTE) -> Rate:
    def look() -> Rate:
        counted: Meter = served.dispatcher.sessions.meter
        now_ns = served.clock.elapsed_ns()
        counted.tick(now_ns)
        return counted.rate(key, span, now_ns)

    return served.call(look)


def test_what_was_there_before_the_start_did_not_come(tmp_path: Path) -> None:
    with serving(tmp_path) as served, connected(served) as peer:
        make_topic(peer, "orders")
        for _ in range(3):
            sent(peer, "orders")
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders")
        assert rate_of(served, Came("orders")).sum == 1
        assert rate_of(served, Whole.ACCEPTED).sum == 1
        sent(peer, "new")
        assert rate_of(served, Came("new")).sum == 1, "a queue that was made since"


def test_a_delayed_message_comes_when_it_is_fired_and_a_level_counts_once(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders", DELAY=1)
        assert (rate_of(served, Came("orders")).sum, rate_of(served, Whole.TIMED).sum) == (0, 1)
        assert rate_of(served, Whole.FIRED).sum == 0
        served.pass_ms(1_000)
        served.settle()
        assert (rate_of(served, Came("orders")).sum, rate_of(served, Whole.FIRED).sum) == (1, 1)
        assert rate_of(served, Came("SCHEDULE_TOPIC_XXXX")).sum == 0


def test_a_count_leaves_the_minute_then_the_hour_then_the_day(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders")
        found = []
        for steps, step_ms in ((1, 0), (8, 10_000), (8, 600_000), (26, 3_600_000)):
            for _ in range(steps):
                served.pass_ms(step_ms)
                rate_of(served, Came("orders"))
            found.append([rate_of(served, Came("orders"), span).sum for span in Span])
        assert found == [[1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]]


def test_a_rate_is_taken_over_the_time_that_was_watched(tmp_path: Path) -> None:
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        for _ in range(10):
            sent(peer, "orders")
        assert rate_of(served, Came("orders")).per_second == pytest.approx(10), "less than a second is a second"
        served.pass_ms(20_000)
        assert rate_of(served, Came("orders")).per_second == pytest.approx(0.5)


def test_pairs_of_topic_and_group_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_KEYS_MAX", 3)
    with serving(tmp_path, ManualClock(T0)) as served, connected(served) as peer:
        sent(peer, "orders")
        for number in range(5):
            pull(peer, "orders", group=f"g{number}")
        sums = [rate_of(served, Went("orders", f"g{number}")).sum for number in range(5)]
        assert sums == [1, 1, 1, 0, 0]
        assert served.call(lambda: served.dispatcher.sessions.meter.pulled_total) == 5, "the total counts them all"

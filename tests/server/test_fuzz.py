"""Hostile peers against a live broker: nobody else notices. scripts/full does the same for a minute."""

from pathlib import Path

import pytest

from postdate.config import Limits, Settings
from postdate.errors import ProtocolError
from postdate.wire.frame import Frames, decode
from postdate.wire.requests import REQUESTS
from tests.support.hostile_peers import BOUNDS, Fuzz, Good, run
from tests.support.server import configured

SEED = 5
FRAMES = 10_000


def test_hostile_peers_are_not_noticed_by_others(tmp_path: Path) -> None:
    result = run(tmp_path, SEED, frames=FRAMES)
    print(f"seed {SEED}: {result.summary}")
    assert result.troubles == []


def test_hostile_peers_with_tls_are_not_noticed_by_others(tmp_path: Path) -> None:
    result = run(tmp_path, SEED, frames=FRAMES // 5, is_tls=True)
    print(f"seed {SEED}: {result.summary}")
    assert result.troubles == []


def test_hostile_peers_get_nothing_of_a_broker_with_users(tmp_path: Path) -> None:
    result = run(tmp_path, SEED, frames=FRAMES // 5, is_tls=True, has_users=True)
    print(f"seed {SEED}: {result.summary}")
    assert result.troubles == []


# -- is it worth anything? --------------------------------------------------------------------------------------------


def test_the_same_seed_throws_the_same() -> None:
    ones, others = Fuzz(1), Fuzz(1)
    # Due times are counted from now; everything else is drawn.
    same = sum(ones.noise() == others.noise() for _ in range(100))
    assert same == 100
    assert Fuzz(1).noise() != Fuzz(2).noise()


def test_what_is_thrown_has_every_request_and_is_often_but_not_always_wrong() -> None:
    fuzz, seen, unreadable = Fuzz(SEED), set(), 0
    for _ in range(3_000):
        frames = Frames()
        for frame in frames.feed(fuzz.thrown()):
            try:
                seen.add(decode(frame).code)
            except ProtocolError:
                unreadable += 1
        unreadable += frames.error is not None
    assert set(REQUESTS) <= seen
    assert 300 < unreadable < 3_000


def test_what_hostile_peers_make_for_good_is_bounded() -> None:
    (settings, limits), usual = configured(BOUNDS), vars(Settings()) | vars(Limits())
    assert all((vars(settings) | vars(limits))[name] < usual[name] for name in BOUNDS)


def good_client() -> Good:
    """That has sent two and cancelled one, and has seen what it should."""
    good = Good(0, lambda: True)
    good.due_of = {"first": 0, "second": 1_000, "third": 2_000}
    good.cancelled = {"third"}
    good.seen = {"first": 500, "second": 1_007}
    return good


def test_a_client_that_noticed_nothing_has_no_complaint() -> None:
    good = good_client()
    assert (good.verdict(), good.late_ms_max) == ([], 7)


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"first": 500}, "second was acknowledged and never came"),
        ({"first": 500, "second": 999}, "second came 1 ms early"),
        ({"first": 500, "second": 1_000, "third": 2_000}, "third was cancelled and came"),
        ({"first": 500, "second": 1_000, "fourth": 1}, "fourth came and was never sent"),
    ],
)
def test_whatever_a_client_notices_is_said(seen: dict[str, int], said: str) -> None:
    good = good_client()
    good.seen = seen
    assert good.verdict() == [said]


def test_a_client_that_sees_something_twice_says_so() -> None:
    good = good_client()
    good._note("second", 1_008)
    assert good.verdict() == ["second came twice"]

"""Leases, and the records that they hold."""

from collections import Counter
from pathlib import Path

import pytest

from postdate.state.leases import Key, Leases
from postdate.state.references import References
from postdate.storage.chunk import Chunks
from postdate.storage.disk import RealDisk

KEY: Key = ("g", 0, 7)
PLACE, SIZE = 640, 100


class Held(References):
    """Counts what is held by place; knows when it was released last."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Chunks(RealDisk(folder)), 16)
        self.places = Counter[int]()
        self.released_at_ms = -1

    def hold(self, place: int) -> None:
        self.places[place] += 1

    def release(self, place: int, at_ms: int) -> None:
        self.places[place] -= 1
        self.released_at_ms = at_ms


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


@pytest.fixture
def leases(held: Held) -> Leases:
    leases = Leases(held)
    leases.give(KEY, 10, 50, 16, PLACE, SIZE)
    return leases


def test_a_record_is_held_until_it_is_acknowledged(leases: Leases, held: Held) -> None:
    assert held.places[PLACE] == 1
    assert not leases.acknowledge(KEY, 11, 20), "another handle"
    assert held.places[PLACE] == 1
    assert leases.acknowledge(KEY, 10, 20)
    assert (held.places[PLACE], held.released_at_ms, leases.by_key) == (0, 20, {})


def test_a_record_is_not_held_while_its_message_waits_for_the_next_consumer(leases: Leases, held: Held) -> None:
    leases.end_due(60)
    assert (held.places[PLACE], held.released_at_ms) == (0, 60)
    assert leases.change(KEY, 10, 70, 90), "a late consumer asks for more time"
    assert held.places[PLACE] == 1
    assert leases.change(KEY, 70, 80, 95)
    assert held.places[PLACE] == 1
    leases.end_due(95)
    assert leases.give(KEY, 100, 150, 16, PLACE, SIZE).times == 1
    assert held.places[PLACE] == 1


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("way", ["end", "lose", "queue", "group"])
def test_whatever_forgets_a_message_releases_its_record_once(
    leases: Leases, held: Held, way: str, is_over: bool
) -> None:
    if is_over:
        leases.end_due(60)
    if way == "end":
        leases.acknowledge(KEY, 10, 70)
    elif way == "lose":
        leases.lose(KEY, 70)
    elif way == "queue":
        leases.forget_queues([0], 70)
    else:
        leases.forget_group("g", 70)
    assert (held.places[PLACE], leases.by_key, leases.ready) == (0, {}, {})
    assert held.released_at_ms == (60 if is_over else 70)


def test_the_last_reason_is_kept(leases: Leases) -> None:
    assert leases.change(KEY, 10, 20, 30, reason="first")
    assert leases.change(KEY, 20, 25, 40)
    assert leases.by_key[KEY].reason == "first"
    assert leases.change(KEY, 25, 26, 40, reason="second")
    leases.end_due(40)
    assert leases.give(KEY, 50, 60, 16, PLACE, SIZE).reason == "second"


def test_a_message_that_was_not_begun_does_not_count_and_has_no_handle(leases: Leases) -> None:
    assert leases.change(KEY, 10, 20, 20, is_begun=False)
    assert not leases.change(KEY, 20, 20, 20, is_begun=False)
    assert not leases.acknowledge(KEY, 20, 20)
    assert leases.end_due(20) == {KEY[:2]}
    assert leases.give(KEY, 30, 40, 16, PLACE, SIZE).times == 0


def test_a_renewed_lease_ends_later_and_its_handle_stays_good(leases: Leases) -> None:
    assert leases.renew(KEY, 10, 90)
    assert leases.end_due(89) == set()
    assert not leases.renew(KEY, 11, 200), "a handle of somebody else"
    assert leases.end_due(90) == {KEY[:2]}
    assert not leases.renew(KEY, 10, 200), "its lease is over"
    assert leases.acknowledge(KEY, 10, 95), "nobody was given it since"


def test_a_pulled_message_has_the_tries_before_it(leases: Leases) -> None:
    other = ("g", 0, 8)
    assert leases.give(other, 10, 20, 3, PLACE, SIZE, times=2, reason="why").times == 2
    assert leases.end_due(20) == {other[:2]}
    assert leases.give(other, 30, 40, 3, PLACE, SIZE).times == 3
    assert leases.end_due(40) == set()
    assert list(leases.spent) == [other]


def test_leases_of_an_earlier_version_have_no_reason(held: Held) -> None:
    loaded = Leases(held)
    loaded.load([[list(KEY), [10, 50, 0, 16, PLACE, SIZE]]], [], [])
    assert loaded.by_key[KEY].reason == ""

"""Leases, and the records that they hold."""

from collections import Counter

import pytest

from postdate.state.leases import Key, Pops

KEY: Key = ("g", 0, 7)
PLACE, SIZE = 640, 100


class Held:
    """Counts what is held; knows when it was released last."""

    def __init__(self) -> None:
        self.places = Counter[int]()
        self.released_at_ms = -1

    def hold(self, place: int) -> None:
        self.places[place] += 1

    def release(self, place: int, at_ms: int) -> None:
        self.places[place] -= 1
        self.released_at_ms = at_ms


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def pops(held: Held) -> Pops:
    pops = Pops(held.hold, held.release)
    pops.give(KEY, 10, 50, 16, PLACE, SIZE)
    return pops


def test_a_record_is_held_until_it_is_acknowledged(pops: Pops, held: Held) -> None:
    assert held.places[PLACE] == 1
    assert not pops.end(KEY, 11, 20), "another handle"
    assert held.places[PLACE] == 1
    assert pops.end(KEY, 10, 20)
    assert (held.places[PLACE], held.released_at_ms, pops.leases) == (0, 20, {})


def test_a_record_is_not_held_while_its_message_waits_for_the_next_consumer(pops: Pops, held: Held) -> None:
    pops.fire(60)
    assert (held.places[PLACE], held.released_at_ms) == (0, 60)
    assert pops.change(KEY, 10, 70, 90), "a late consumer asks for more time"
    assert held.places[PLACE] == 1
    assert pops.change(KEY, 70, 80, 95)
    assert held.places[PLACE] == 1
    pops.fire(95)
    assert pops.give(KEY, 100, 150, 16, PLACE, SIZE).times == 1
    assert held.places[PLACE] == 1


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("way", ["end", "lose", "queue", "group"])
def test_whatever_forgets_a_message_releases_its_record_once(pops: Pops, held: Held, way: str, is_over: bool) -> None:
    if is_over:
        pops.fire(60)
    if way == "end":
        pops.end(KEY, 10, 70)
    elif way == "lose":
        pops.lose(KEY, 70)
    elif way == "queue":
        pops.forget_queues([0], 70)
    else:
        pops.forget_group("g", 70)
    assert (held.places[PLACE], pops.leases, pops.ready) == (0, {}, {})
    assert held.released_at_ms == (60 if is_over else 70)

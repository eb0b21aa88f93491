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

"""The rules of a power loss."""

import random
from collections import Counter

from postdate.testing.power import Fate, choose_fate, keeps_name, surviving_bytes, surviving_names, surviving_sectors

ROLLS = 300


def test_a_write_is_lost_or_kept_or_torn() -> None:
    fates = Counter(choose_fate(random.Random(seed)) for seed in range(ROLLS))
    assert set(fates) == set(Fate)
    assert fates[Fate.TORN] == min(fates.values()), "a torn write is the rarest"


def test_sectors_of_a_torn_write_survive_whole_and_in_any_combination() -> None:
    found = set()
    for seed in range(ROLLS):
        sectors = dict(surviving_sectors(random.Random(seed), b"aabbbbcccc", sector_bytes=4, first_bytes=2))
        assert sectors.items() <= {0: b"aa", 2: b"bbbb", 6: b"cccc"}.items()
        found.add(tuple(sectors))
    assert len(found) == 8


def test_the_first_changes_of_names_survive() -> None:
    assert {surviving_names(random.Random(seed), 3) for seed in range(ROLLS)} == {0, 1, 2, 3}
    assert {surviving_names(random.Random(seed), 3, safe_count=2) for seed in range(ROLLS)} == {2, 3}
    assert surviving_names(random.Random(0), 0) == 0


def test_a_name_of_unknown_order_stays_or_is_lost() -> None:
    assert {keeps_name(random.Random(seed)) for seed in range(ROLLS)} == {True, False}


def test_a_file_of_unknown_writes_keeps_what_was_synced_and_no_more_for_certain() -> None:
    data, synced = b"one\ntwo\nthree\n", b"one\n"
    found = {surviving_bytes(random.Random(seed), data, len(synced))[0] for seed in range(ROLLS)}
    zeros = synced + bytes(len(data) - len(synced))
    assert all(left == zeros or (data.startswith(left) and left.startswith(synced)) for left in found)
    assert {data, synced, zeros, b"one\ntwo", b"one\nt"} <= found, "whole, cut, zeroed, at a line, anywhere"
    assert surviving_bytes(random.Random(0), b"", 0)[0] == b""


def test_the_same_dice_give_the_same_loss() -> None:
    for seed in range(20):
        assert surviving_bytes(random.Random(seed), b"a\nb\n", 1) == surviving_bytes(random.Random(seed), b"a\nb\n", 1)

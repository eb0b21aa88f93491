"""What a power loss may take from a disk. The virtual disk, the fault suite and tests of files all follow these rules.

    a write    that was not synced is lost, or stays, or stays in part: a sector is written whole or not at all
    a name     made, renamed or removed since its folder was synced: of these changes the first ones stay, as in a file
               system that keeps a journal; where their order is unknown, each stays or is lost
    a file     that grew by writes nobody has seen (of Parquet, Delta, Java): its synced bytes stay; after them it is
               whole, or cut, or holds zeros

What was synced stays. Everything here is a function of the dice, so that a seed gives the same loss again.
"""

import random
from collections.abc import Iterator
from enum import Enum

_LOST_BELOW, _KEPT_BELOW = 0.4, 0.8  # shares of unsynced writes; the rest is torn


class Fate(Enum):
    """What becomes of an unsynced write."""

    LOST = "lost"
    KEPT = "kept"
    TORN = "torn"


def choose_fate(dice: random.Random) -> Fate:
    drawn = dice.random()
    if drawn < _LOST_BELOW:
        return Fate.LOST
    return Fate.KEPT if drawn < _KEPT_BELOW else Fate.TORN


def surviving_sectors(
    dice: random.Random, data: bytes, sector_bytes: int, first_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """The sectors of a torn write that are on disk: where each begins in `data`, and its bytes. The first sector ends
    after `first_bytes`.
    """
    start, end = 0, first_bytes
    while start < len(data):
        if dice.random() < 0.5:
            yield start, data[start:end]
        start, end = end, end + sector_bytes


def surviving_names(dice: random.Random, count: int, safe_count: int = 0) -> int:
    """How many of `count` unsynced changes of one folder's names stay; the first `safe_count` do in any case."""
    return dice.randint(safe_count, count)


def keeps_name(dice: random.Random) -> bool:
    """Whether an unsynced change of a name stays, where the order of the folder's changes is unknown."""
    return dice.random() < 0.5


def surviving_bytes(dice: random.Random, data: bytes, synced_bytes: int) -> tuple[bytes, str]:
    """What is left of a file that grew by unknown writes since its last sync, and a sentence about it."""
    lost = dice.choice(("nothing", "all", "the end", "the last lines", "the content"))
    if lost == "nothing":
        return data, "it was not synced, and is whole"
    if lost == "the content":
        zeros = len(data) - synced_bytes
        return data[:synced_bytes] + bytes(zeros), f"it holds zeros after {synced_bytes} bytes"
    size = synced_bytes
    if lost == "the end":
        size = dice.randint(synced_bytes, len(data))
    elif lost == "the last lines":  # where a cut is hardest to see
        ends = [at for at in range(synced_bytes, len(data)) if data[at] == ord("\n")]
        size = dice.choice(ends) if ends else dice.randint(synced_bytes, len(data))
    return data[:size], f"it has {size} bytes left"

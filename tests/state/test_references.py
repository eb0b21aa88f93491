"""What keeps segments and chunks on the disk."""

from pathlib import Path

import numpy as np
import pytest

from postdate.state.references import Holds
from postdate.storage.chunk import CHUNK_BIT, Chunks
from postdate.storage.disk import RealDisk

SHIFT = 4


@pytest.fixture
def holds(tmp_path: Path) -> Holds:
    return Holds(Chunks(RealDisk(tmp_path)), SHIFT)


def test_a_segment_is_held_until_its_last_record_is_released(holds: Holds) -> None:
    holds.hold_many(np.array([1, 3, 17]))
    holds.hold(18)
    assert holds.held == {0: 2, 1: 2}
    holds.batch_end = 64
    holds.release_many(np.array([1, 17]), 500)
    holds.release(18, 400)
    assert holds.held == {0: 1}
    assert holds.seen == {0: 500, 1: 500}, "a clock that steps back takes nothing back"
    assert holds.touched == {0: 64, 1: 64}


def test_reading_touches_and_releases_nothing(holds: Holds) -> None:
    holds.hold(1)
    holds.batch_end = 32
    holds.touch_many(np.array([1, 2, 40]))
    assert (holds.held, holds.touched, holds.seen) == ({0: 1}, {0: 32, 2: 32}, {})


def test_a_record_of_a_chunk_that_is_gone_can_be_released(holds: Holds) -> None:
    place = CHUNK_BIT + 5
    holds.hold(place)
    holds.hold(place)
    holds.release(place, 100)
    assert (holds.held, holds.chunk_held, holds.held_chunks()) == ({}, {place: 1}, set())
    holds.release(place, 100)
    assert (holds.chunk_held, holds.chunk_seen) == ({}, {})

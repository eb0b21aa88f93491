"""What keeps segments and chunks on the disk."""

from pathlib import Path

import numpy as np
import pytest

from postdate.state.references import References
from postdate.storage.chunk import CHUNK_BIT, Chunks
from postdate.storage.disk import RealDisk

SHIFT = 4


@pytest.fixture
def references(tmp_path: Path) -> References:
    return References(Chunks(RealDisk(tmp_path)), SHIFT)


def test_a_segment_is_held_until_its_last_record_is_released(references: References) -> None:
    references.hold_many(np.array([1, 3, 17]))
    references.hold(18)
    assert references.held == {0: 2, 1: 2}
    references.batch_end = 64
    references.release_many(np.array([1, 17]), 500)
    references.release(18, 400)
    assert references.held == {0: 1}
    assert references.seen == {0: 500, 1: 500}, "a clock that steps back takes nothing back"
    assert references.touched == {0: 64, 1: 64}


def test_reading_touches_and_releases_nothing(references: References) -> None:
    references.hold(1)
    references.batch_end = 32
    references.touch_many(np.array([1, 2, 40]))
    assert (references.held, references.touched, references.seen) == ({0: 1}, {0: 32, 2: 32}, {})


def test_a_record_of_a_chunk_that_is_gone_can_be_released(references: References) -> None:
    place = CHUNK_BIT + 5
    references.hold(place)
    references.hold(place)
    references.release(place, 100)
    assert (references.held, references.chunk_held, references.held_chunks()) == ({}, {place: 1}, set())
    references.release(place, 100)
    assert (references.chunk_held, references.chunk_seen) == ({}, {})


def test_what_was_written_since_an_instant_begins_with_a_segment(references: References) -> None:
    references.seen = {0: 900, 1: 100, 2: 200, 3: 300, 4: 400}  # a message of segment 0 became visible late
    assert references.first_since(4 << SHIFT, 1_000) == 4 << SHIFT
    assert references.first_since((4 << SHIFT) + 5, 250) == 3 << SHIFT
    assert references.first_since(4 << SHIFT, 200) == 2 << SHIFT
    assert references.first_since(4 << SHIFT, 50) == 0
    assert references.first_since(0, 50) == 0

"""A queue: its entries and when they became visible."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.storage.disk import RealDisk
from postdate.storage.layout import ENTRY, ENTRY_STRUCT
from postdate.storage.queue import Queue


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    return Queue(RealDisk(tmp_path), 7, 64, 4)


def push(queue: Queue, count: int, at_ms: int) -> None:
    for _ in range(count):
        queue.push(ENTRY_STRUCT.pack(queue.length * 100, 10, -5), at_ms)


def extend(queue: Queue, count: int, at_ms: int) -> None:
    entries = np.array([(n * 100, 10, -5) for n in range(queue.length, queue.length + count)], ENTRY)
    queue.extend(entries, at_ms)


def test_an_entry_is_twenty_bytes_as_rocketmq_writes_them() -> None:
    assert ENTRY_STRUCT.pack(0x0102030405060708, 9, -2) == bytes.fromhex("0807060504030201 09000000 FEFFFFFFFFFFFFFF")
    assert np.frombuffer(ENTRY_STRUCT.pack(5, 6, -7), ENTRY)[0].tolist() == (5, 6, -7)


def test_entries_know_when_they_became_visible(queue: Queue) -> None:
    push(queue, 2, 100)
    extend(queue, 3, 200)
    push(queue, 1, 200)
    push(queue, 1, 300)
    assert queue.length == 7
    assert queue.visible_at_ms(0, 7).tolist() == [100, 100, 200, 200, 200, 200, 300]
    assert queue.visible_at_ms(1, 3).tolist() == [100, 200]
    assert queue.visible_at_ms(6, 7).tolist() == [300]
    assert queue.visible_at_ms(3, 3).tolist() == []
    assert queue.times.length == 3, "one row per instant"


def test_ranges_over_many_instants_are_complete(queue: Queue) -> None:
    for n in range(300):
        push(queue, 1 + n % 2, 1_000 + n)
    expected = [1_000 + n for n in range(300) for _ in range(1 + n % 2)]
    assert queue.visible_at_ms(0, queue.length).tolist() == expected
    assert queue.visible_at_ms(0, 200).tolist() == expected[:200]
    for start in range(0, 450, 7):
        stop = min(start + 64, 450)
        assert queue.visible_at_ms(start, stop).tolist() == expected[start:stop]


def test_search_finds_the_first_that_became_visible_then_or_later(queue: Queue) -> None:
    assert queue.search(0) == 0
    push(queue, 2, 100)
    push(queue, 3, 200)
    assert [queue.search(at_ms) for at_ms in (0, 99, 100, 101, 200, 201)] == [0, 0, 0, 2, 2, 5]


def test_instants_do_not_go_back_with_the_clock(queue: Queue) -> None:
    push(queue, 1, 200)
    push(queue, 1, 100)
    extend(queue, 1, 150)
    push(queue, 1, 201)
    assert queue.visible_at_ms(0, 4).tolist() == [200, 200, 200, 201]
    assert (queue.search(100), queue.search(200), queue.search(201)) == (0, 0, 3)


def test_a_queue_opened_again_goes_on_where_it_was(tmp_path: Path, queue: Queue) -> None:
    push(queue, 5, 100)
    push(queue, 5, 200)
    for rows in queue.rows():
        rows.spill()
    again = Queue(RealDisk(tmp_path), 7, 64, 4, 10, 2)
    assert again.grown_at_ms == 200
    push(again, 1, 150)
    push(again, 1, 250)
    assert again.visible_at_ms(0, 12).tolist() == [100] * 5 + [200] * 6 + [250]
    assert (tmp_path / "queues" / "7" / "entries" / f"{0:020d}").exists()


def test_forgetting_keeps_the_times_of_what_is_left(tmp_path: Path, queue: Queue) -> None:
    for n in range(200):
        push(queue, 2, 1_000 + n)
    for rows in queue.rows():
        rows.spill()
    queue.forget(301)
    queue.entries.remove_files(400)
    queue.times.remove_files(200)
    assert (queue.first, queue.length) == (301, 400)
    assert queue.visible_at_ms(301, 400).tolist() == [1_000 + n // 2 for n in range(301, 400)]
    assert queue.search(0) <= 301, "where the search begins is the caller's to bound"
    assert [queue.search(1_150 + n) for n in range(1, 4)] == [302, 304, 306]
    files = {
        name: sorted(path.name for path in (tmp_path / "queues/7" / name).iterdir()) for name in ("entries", "times")
    }
    assert files["entries"][0] == f"{256:020d}"
    assert files["times"][0] == f"{128:020d}", "row 150 says when entry 301 became visible"
    queue.forget(200)
    assert queue.first == 301, "what is gone stays gone"


def test_a_queue_of_which_all_is_forgotten_goes_on(queue: Queue) -> None:
    push(queue, 130, 100)
    queue.forget(130)
    for rows in queue.rows():
        rows.remove_files(rows.length)
    assert (queue.first, queue.length) == (130, 130)
    push(queue, 3, 100)
    push(queue, 1, 200)
    assert queue.visible_at_ms(130, 134).tolist() == [100, 100, 100, 200]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(-3, 10), st.booleans()), max_size=60))
def test_any_story_gives_what_a_list_gives(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, bool]]
) -> None:
    queue = Queue(RealDisk(tmp_path_factory.mktemp("queue")), 1, 64, 4)
    visible: list[int] = []
    now = 100
    for count, step_ms, at_once in steps:
        now += step_ms
        (extend if at_once else push)(queue, count, now)
        visible += [max([now, *visible[-1:]])] * count
    assert queue.visible_at_ms(0, queue.length).tolist() == visible if visible else queue.length == 0
    for at_ms in {0, 1_000, *visible}:
        assert queue.search(at_ms) == next((n for n, at in enumerate(visible) if at >= at_ms), len(visible))

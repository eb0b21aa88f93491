"""The fold: rows and columns give the same, and every message goes where it belongs."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postdate.message import LOOPBACK, Message
from postdate.state import saved
from postdate.state.fold import WAITS, Fold
from postdate.state.topics import SCHEDULE_TOPIC
from postdate.storage import record as records
from postdate.storage.batch import MESSAGE, TOPIC, Batch
from postdate.storage.disk import RealDisk
from postdate.storage.layout import BATCH_HEADER_BYTES as HEADER_BYTES
from postdate.storage.layout import ROW_BYTES, ROW_STRUCT
from tests.support.core import T0

Row = tuple[int, int, int]  # queue number, due, level
SHIFT = 16


class Story:
    """A fold over batches that are made by hand; system records are kept in a dictionary instead of a log."""

    def __init__(self, folder: Path, rows_by_column: int) -> None:
        self.records: dict[int, bytes] = {}
        self.fold = Fold(
            RealDisk(folder),
            self._read,
            SHIFT,
            64,
            4,
            far_block_rows=8,
            rows_by_column=rows_by_column,
            count_seconds=True,
        )
        self.end = 0

    def _read(self, offset: int, size: int) -> bytes:
        return self.records.get(offset, b"")[:size]

    def messages(self, at_ms: int, rows: list[Row]) -> list[int]:
        packed = b"".join(
            ROW_STRUCT.pack(MESSAGE, level, 0, queue, due, n, n + 1, n - 5, 100, HEADER_BYTES + n * 100, 0)
            for n, (queue, due, level) in enumerate(rows)
        )
        return self._apply(at_ms, len(rows), packed)

    def topic(self, at_ms: int, **body: object) -> int:
        data = records.encode(Message("s", json.dumps(body).encode()), b"s", 0, at_ms, LOOPBACK)
        self.records[self.end + HEADER_BYTES + ROW_BYTES] = data
        row = ROW_STRUCT.pack(TOPIC, 0, 0, -1, 0, 0, 0, 0, len(data), HEADER_BYTES + ROW_BYTES, 0)
        answer: int = self._apply(at_ms, 1, row)[0]
        return answer

    def put(self, at_ms: int, name: str, count: int) -> list[int]:
        self.topic(at_ms, op="put", name=name, read=count, write=count, perm=6, attributes={})
        return self.fold.topics.get(name).numbers

    def fire(self, at_ms: int) -> None:
        self._apply(at_ms, 0, b"")

    def _apply(self, at_ms: int, count: int, rows: bytes) -> list[int]:
        length = (HEADER_BYTES + len(rows) + 100 * count + 7) & -8
        batch = Batch(self.end, self.end + length, at_ms, 0, count, rows)
        self.end += length
        return self.fold.apply(batch)[0]

    def queues(self) -> list[tuple[list[tuple[int, int, int]], list[int]]]:
        """Of every queue: its entries, and when each became visible."""
        return [
            (
                queue.entries.read(0, queue.length).tolist(),
                queue.visible_at_ms(0, queue.length).tolist() if queue.length else [],
            )
            for queue in self.fold.queues
        ]


def test_a_message_goes_to_its_queue_the_wheel_or_the_far_queue(tmp_path: Path) -> None:
    story = Story(tmp_path, 64)
    (number,) = story.put(T0, "t", 1)
    lead = story.fold.lead_ms
    answers = story.messages(T0, [(number, 0, 0), (number, T0, 0), (number, T0 + lead, 0), (number, T0 + lead + 1, 0)])
    assert answers == [0, 1, WAITS, WAITS]
    assert (story.fold.queues[number].length, story.fold.wheel.count, story.fold.far.length) == (2, 1, 1)
    assert (story.fold.near[number], story.fold.untaken[number]) == (1, 1)
    assert story.fold.references.held == {0: 2}
    story.fire(T0 + lead)
    assert (story.fold.queues[number].length, story.fold.wheel.count) == (3, 0)
    assert story.fold.references.held == {0: 1}


def test_what_is_due_before_the_horizon_is_near_however_late(tmp_path: Path) -> None:
    story = Story(tmp_path, 64)
    (number,) = story.put(T0, "t", 1)
    story.fold.far.horizon_at_ms = T0 + 1_000_000
    story.messages(T0, [(number, T0 + 1_000_000, 0), (number, T0 + 1_000_001, 0)])
    assert (story.fold.wheel.count, story.fold.far.length) == (1, 1)


@pytest.mark.parametrize("rows_by_column", [2, 1_000])
def test_a_level_message_stands_in_the_schedule_topic_at_once(tmp_path: Path, rows_by_column: int) -> None:
    story = Story(tmp_path, rows_by_column)
    (number,) = story.put(T0, "t", 1)
    start = story.end + HEADER_BYTES
    story.messages(T0, [(number, T0 + 5_000, 2), (number, T0 + 1_000, 1), (number, T0 + 5_000, 2), (number, 0, 0)])
    schedule = story.fold.topics.get(SCHEDULE_TOPIC)
    queues = story.queues()
    assert queues[schedule.numbers[0]] == ([(start + 100, 100, T0 + 1_000)], [T0])
    assert queues[schedule.numbers[1]][0] == [(start, 100, T0 + 5_000), (start + 200, 100, T0 + 5_000)]
    assert len(schedule.numbers) == 18
    story.messages(T0, [(number, T0 + 9, 21), (number, T0 + 9, 19)])
    assert len(story.fold.topics.get(SCHEDULE_TOPIC).numbers) == 21
    assert [len(story.queues()[n][0]) for n in story.fold.topics.get(SCHEDULE_TOPIC).numbers[18:]] == [1, 0, 1]


@pytest.mark.parametrize("rows_by_column", [2, 1_000])
def test_a_shrunk_topic_gets_messages_by_id_mod_count(tmp_path: Path, rows_by_column: int) -> None:
    story = Story(tmp_path, rows_by_column)
    numbers = story.put(T0, "t", 5)
    story.messages(T0, [(number, T0 + 10, 0) for number in numbers])
    story.put(T0 + 1, "t", 2)
    story.fire(T0 + 10)
    assert [story.fold.queues[number].length for number in numbers] == [3, 2, 0, 0, 0]
    assert sum(story.fold.near) == 0
    assert story.messages(T0 + 11, [(number, 0, 0) for number in numbers]) == [3, 2, 4, 3, 5]


@pytest.mark.parametrize("rows_by_column", [2, 1_000])
def test_a_deleted_topics_messages_go_nowhere(tmp_path: Path, rows_by_column: int) -> None:
    story = Story(tmp_path, rows_by_column)
    deleted, kept = story.put(T0, "t", 2), story.put(T0, "u", 1)
    story.messages(T0, [(number, T0 + 10, 0) for number in (*deleted, *kept, *deleted)])
    assert story.topic(T0 + 1, op="delete", name="t") == 4
    story.fire(T0 + 10)
    assert [story.fold.queues[number].length for number in (*deleted, *kept)] == [0, 0, 1]
    assert (story.fold.near, story.fold.references.held) == ([0] * len(story.fold.near), {})
    assert story.messages(T0 + 11, [(deleted[0], 0, 0), (kept[0], 0, 0), (deleted[1], 0, 0)]) == [WAITS, 1, WAITS]


def test_a_batch_is_applied_once(tmp_path: Path) -> None:
    story = Story(tmp_path, 64)
    batch = Batch(0, HEADER_BYTES, T0, 0, 0, b"")
    story.fold.apply(batch)
    with pytest.raises(AssertionError, match="batch 0 is applied already, the fold is at 48"):
        story.fold.apply(batch)


def test_firing_does_not_go_back_with_the_clock(tmp_path: Path) -> None:
    story = Story(tmp_path, 64)
    (number,) = story.put(T0, "t", 1)
    story.fire(T0 + 100)
    story.messages(T0 + 50, [(number, T0 + 60, 0)])
    assert story.fold.fired_at_ms == T0 + 100
    assert story.fold.queues[number].length == 0
    story.fire(T0 + 59)
    assert story.fold.queues[number].length == 0
    story.fire(T0 + 60)
    assert story.fold.queues[number].length == 1


def told(story: Story, seed: int) -> list[object]:
    """A random story: topics that come, shrink and go, batches of every size, a clock that mostly goes on."""
    chance = random.Random(seed)
    at_ms = T0
    answers: list[object] = [story.put(at_ms, f"t{n}", 1 + n) for n in range(3)]
    for _ in range(chance.randint(1, 12)):
        at_ms += chance.choice([0, 1, 5, 500, 20_000, -3])
        verb = chance.random()
        if verb < 0.1:
            answers.append(story.put(at_ms, f"t{chance.randrange(4)}", chance.randint(1, 4)))
        elif verb < 0.15:
            answers.append(story.topic(at_ms, op="delete", name=f"t{chance.randrange(4)}"))
        elif verb < 0.3:
            story.fire(at_ms)
        else:
            numbers = [n for n, (name, _) in enumerate(story.fold.topics.places) if name != SCHEDULE_TOPIC]
            dues = [0, at_ms - 1, at_ms, at_ms + 1, at_ms + 7, at_ms + 60_000, at_ms + 60_001, at_ms + 500_000]
            answers.append(
                story.messages(
                    at_ms,
                    [
                        (chance.choice(numbers), chance.choice(dues), chance.choice([0, 0, 0, 1, 5, 18, 20, 19]))
                        for _ in range(chance.choice([1, 2, 5, 40, 90]))
                    ],
                )
            )
    story.fire(at_ms + 61_000)
    return answers


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_rows_one_by_one_and_by_column_give_the_same(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    by_row, by_column, mixed = (
        Story(tmp_path_factory.mktemp("fold"), rows_by_column) for rows_by_column in (1 << 20, 2, 32)
    )
    answers = told(by_row, seed)
    for other in (by_column, mixed):
        assert told(other, seed) == answers
        assert other.queues() == by_row.queues()
        assert json.loads(saved.state_json(other.fold)) == json.loads(saved.state_json(by_row.fold))
        far = by_row.fold.far
        assert other.fold.far.state() == far.state()
        assert other.fold.far.rows.read(0, far.length).tolist() == far.rows.read(0, far.length).tolist()
        assert other.fold.wheel.count == by_row.fold.wheel.count

"""The log: appending, making durable, opening again after every kind of end."""

import errno
import threading
from pathlib import Path

import pytest

from postdate.errors import CorruptLog, DiskFull, LogFailed, UsageError
from postdate.faultpoint import listening
from postdate.storage.batch import Batch, header
from postdate.storage.disk import RealDisk
from postdate.storage.layout import BATCH_HEADER_BYTES as HEADER_BYTES
from postdate.storage.log import OFFSET_MAX, Log
from postdate.storage.segment import SegmentKeeper, Segments, path_of
from postdate.testing import FaultPoints
from tests.support.core import FaultyDisk, contents

SEGMENT = 4_096
FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(tmp_path)


def opened(disk: RealDisk, known_durable: int = 0, unflushed_bytes_max: int = 1 << 20) -> tuple[Log, list[Batch]]:
    log = Log(disk, Segments(disk, SEGMENT), unflushed_bytes_max)
    return log, list(log.recover(0, known_durable))


def append(log: Log, body: bytes, *, at_ms: int = 1, urgent: bool = False) -> Batch:
    start = log.place(HEADER_BYTES + len(body), at_ms, urgent=urgent)
    return log.append(start, at_ms, 0, body)


def filled(log: Log, until: int) -> None:
    """Appends batches up to exactly this offset, which leaves room for no filler in its segment only at its end."""
    while log.end < until:
        append(log, bytes(min(until - log.end, 512) - HEADER_BYTES))
    log.flush()


def body_of(log: Log, batch: Batch) -> bytes:
    return log.read(batch.offset + HEADER_BYTES, batch.length - HEADER_BYTES)


def no_room(disk: FaultyDisk) -> None:
    """From now on no new file can be written; what is there may be written over."""
    disk.fault = lambda call, path: FULL if call == "write" and path.endswith(".new") else None


# ---------------------------------------------------------------------------------------------- appending and reading


def test_what_was_appended_is_read_back_after_opening_again(disk: FaultyDisk) -> None:
    log, found = opened(disk)
    assert found == []
    written = [append(log, bytes([n]) * 16, at_ms=n) for n in range(1, 6)]
    log.flush()
    log.close()

    log, found = opened(disk)
    assert found == written
    assert [body_of(log, batch) for batch in found] == [bytes([n]) * 16 for n in range(1, 6)]
    assert log.end == log.durable == written[-1].end
    log.close()


def test_a_batch_that_was_not_flushed_is_read_at_once_but_is_not_durable(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    batch = append(log, b"12345678")
    assert body_of(log, batch) == b"12345678"
    assert (log.durable, log.end) == (0, batch.end)
    assert log.flush() == log.durable == batch.end
    log.close()


def test_a_batch_says_what_was_durable_when_it_was_written(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, bytes(8))
    second = append(log, bytes(8))
    log.flush()
    third = append(log, bytes(8))
    assert [batch.durable for batch in (first, second, third)] == [0, 0, second.end]
    log.close()
    _, found = opened(disk)
    assert [batch.durable for batch in found] == [0, 0, second.end]


def test_one_flush_makes_every_batch_before_it_durable(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    batches = [append(log, bytes(8)) for _ in range(10)]
    disk.calls.clear()
    log.flush()
    assert [call for call in disk.calls if call[0] == "file.sync"] == [("file.sync", path_of(0))]
    assert log.durable == batches[-1].end
    disk.calls.clear()
    log.flush()
    assert disk.calls == [], "a second flush has nothing to do"
    log.close()


def test_a_batch_that_does_not_fit_leaves_a_filler_and_opens_the_next_segment(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, bytes(3_000))
    second = append(log, bytes(2_000))
    assert (first.end, second.offset) == (3_048, SEGMENT)
    log.flush()
    log.close()
    log, found = opened(disk)
    assert found == [first, second], "the filler is passed over"
    assert log.end == second.end
    log.close()


def test_a_batch_may_end_its_segment_exactly(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, bytes(SEGMENT - HEADER_BYTES))
    assert first.end == SEGMENT
    log.flush()
    log.close()
    log, found = opened(disk)
    assert (found, log.end) == ([first], SEGMENT)
    second = append(log, b"12345678")
    assert second.offset == SEGMENT
    log.flush()
    log.close()
    log, found = opened(disk)
    assert found == [first, second]
    log.close()


@pytest.mark.parametrize("rest", [8, 40, HEADER_BYTES - 8, HEADER_BYTES, HEADER_BYTES + 8])
def test_no_batch_leaves_less_room_than_a_filler_needs(disk: FaultyDisk, rest: int) -> None:
    log, _ = opened(disk)
    first = append(log, bytes(1_000))
    second = append(log, bytes(SEGMENT - first.end - HEADER_BYTES - rest))
    third = append(log, bytes(HEADER_BYTES))
    log.flush()
    assert (second.offset == SEGMENT) == (rest < HEADER_BYTES)
    log.close()
    log, found = opened(disk)
    assert found == [first, second, third]
    log.close()


def test_a_batch_larger_than_a_segment_is_refused_and_nothing_is_written(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    with pytest.raises(UsageError, match="4104 bytes does not fit into a segment of 4096"):
        log.place(SEGMENT + 8, 1, urgent=True)
    assert log.end == 0
    assert disk.list("log") == []


def test_too_much_that_is_not_flushed_is_flushed_by_the_append(disk: FaultyDisk) -> None:
    log, _ = opened(disk, unflushed_bytes_max=600)
    append(log, bytes(200))
    append(log, bytes(200))
    assert log.durable == 0
    append(log, bytes(200))
    assert log.durable == 496, "the first two became durable before the third was written"
    log.close()


def test_read_of_a_segment_that_is_gone_is_empty(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!" * 400)
    append(log, b"second!!" * 400)
    log.flush()
    log.remove_segment(0)
    assert body_of(log, first) == b""
    assert log.start == SEGMENT
    assert log.segment_numbers() == [1]
    log.close()


def test_ranges_are_what_retention_has_left(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    assert log.ranges() == [(0, OFFSET_MAX)], "nothing is gone from an empty log"
    filled(log, 6 * SEGMENT)
    append(log, bytes(8))
    log.flush()
    assert log.ranges() == [(0, OFFSET_MAX)]
    for removed, ranges in [
        (1, [(0, SEGMENT), (2 * SEGMENT, OFFSET_MAX)]),
        (4, [(0, SEGMENT), (2 * SEGMENT, 4 * SEGMENT), (5 * SEGMENT, OFFSET_MAX)]),
        (0, [(2 * SEGMENT, 4 * SEGMENT), (5 * SEGMENT, OFFSET_MAX)]),
        (5, [(2 * SEGMENT, 4 * SEGMENT), (6 * SEGMENT, OFFSET_MAX)]),
    ]:
        log.remove_segment(removed)
        assert log.ranges() == ranges
    log.close()
    log = Log(disk, Segments(disk, SEGMENT), 1 << 20)
    assert log.ranges() == [(2 * SEGMENT, 4 * SEGMENT), (6 * SEGMENT, OFFSET_MAX)]


# ------------------------------------------------------------------------------------------------------ the reserve


def test_a_full_disk_refuses_sends_first_and_recovers_by_itself(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    filled(log, SEGMENT)
    no_room(disk)

    with pytest.raises(DiskFull, match="no room for another log segment of 4096 bytes: No space left"):
        append(log, bytes(8))
    assert log.end == SEGMENT, "a refused append has written nothing"
    urgent = append(log, b"urgent!!", urgent=True)
    assert urgent.offset == SEGMENT

    disk.fault = lambda _call, _path: None
    sent = append(log, b"sent now")
    log.flush()
    log.close()
    log, found = opened(disk)
    assert found[-2:] == [urgent, sent]
    log.close()


def test_sends_do_not_use_up_the_reserve_that_an_urgent_append_has_opened(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    filled(log, SEGMENT)
    no_room(disk)
    append(log, bytes(8), urgent=True)

    refused = False
    for _ in range(100):
        try:
            append(log, bytes(464))
        except DiskFull:
            refused = True
            break
    assert refused
    append(log, bytes(464), urgent=True)
    log.close()


def test_when_the_reserve_is_full_too_urgent_appends_are_refused(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    filled(log, SEGMENT)
    no_room(disk)
    append(log, bytes(SEGMENT - HEADER_BYTES), urgent=True)
    with pytest.raises(DiskFull):
        append(log, bytes(8), urgent=True)
    assert log.end == 2 * SEGMENT
    log.close()
    _, found = opened(disk)
    assert found[-1].end == 2 * SEGMENT


def test_a_broken_disk_that_cannot_make_a_segment_is_the_logs_failure_and_may_be_tried_again(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    filled(log, SEGMENT)
    disk.fault = lambda call, path: BROKEN if call == "write" and path.endswith(".new") else None
    with pytest.raises(LogFailed, match="no room for another log segment of 4096 bytes: Input/output error"):
        append(log, bytes(8))
    disk.fault = lambda _call, _path: None
    assert append(log, bytes(8)).offset == SEGMENT
    log.close()


@pytest.mark.parametrize("call", ["open", "map"])
def test_a_segment_that_cannot_be_opened_for_once_leaves_no_gap(disk: FaultyDisk, call: str) -> None:
    log, _ = opened(disk)
    first = append(log, bytes(3_000))
    log.flush()
    disk.fault = lambda name, _: OSError(errno.EMFILE, "Too many open files") if name == call else None
    with pytest.raises(LogFailed, match=f"segment {path_of(SEGMENT)} cannot be opened: Too many open files"):
        append(log, bytes(3_000))
    disk.fault = lambda _call, _path: None
    second = append(log, bytes(3_000))
    log.flush()
    log.close()

    log, found = opened(disk, known_durable=second.end)
    assert second.offset == SEGMENT
    assert found == [first, second]
    log.close()


# -------------------------------------------------------------------------------------------------------- failures


def test_after_a_failed_flush_nothing_is_written_until_the_log_is_opened_again(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    log.flush()
    second = append(log, b"second!!")
    disk.fault = lambda call, _: BROKEN if call == "file.sync" else None
    with pytest.raises(LogFailed, match=r"Input/output error.*restart the broker"):
        log.flush()
    disk.fault = lambda _call, _path: None

    disk.calls.clear()
    with pytest.raises(LogFailed):
        log.flush()
    with pytest.raises(LogFailed):
        append(log, b"third!!!", urgent=True)
    assert disk.calls == [], "a failed sync is never tried again"
    assert log.durable == first.end
    log.close()

    log, found = opened(disk)
    assert found == [first, second]
    append(log, b"third!!!")
    assert log.flush() == log.end
    log.close()


def test_after_a_failed_write_nothing_is_written_until_the_log_is_opened_again(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    log.flush()
    disk.fault = lambda call, _: BROKEN if call == "file.write" else None
    with pytest.raises(LogFailed, match="Input/output error"):
        append(log, b"second!!")
    disk.fault = lambda _call, _path: None
    with pytest.raises(LogFailed):
        append(log, b"third!!!")
    log.close()
    log, found = opened(disk)
    assert found == [first]
    log.close()


def test_opening_writes_the_tail_once_more_before_it_counts(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    log.flush()
    append(log, b"second!!")
    third = append(log, b"third!!!")
    log.close()

    disk.calls.clear()
    with FaultPoints() as points:
        log, _ = opened(disk, known_durable=first.end)
    assert "log.confirm" in points.reached
    assert disk.calls.index(("write", path_of(0))) < disk.calls.index(("sync", path_of(0)))
    assert log.durable == third.end
    log.close()

    with FaultPoints() as points:
        log, _ = opened(disk, known_durable=third.end)
    assert "log.confirm" not in points.reached, "what a snapshot knows to be on disk needs no second write"
    log.close()


# ------------------------------------------------------------------------------------------------------- torn tails


def damage(disk: RealDisk, offset: int, replacement: bytes = b"\xff") -> None:
    disk.write(path_of(offset & -SEGMENT), offset & (SEGMENT - 1), replacement)


def test_a_torn_tail_is_cut_and_zeroed(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    torn = append(log, b"torn!!!!" * 20)
    log.close()
    damage(disk, torn.offset + 100)

    log, found = opened(disk)
    assert found == [first]
    assert log.end == first.end
    assert disk.read(path_of(0), first.end, SEGMENT) == bytes(SEGMENT - first.end)
    again = append(log, b"again!!!")
    log.flush()
    log.close()
    log, found = opened(disk)
    assert found == [first, again]
    log.close()


def test_a_whole_batch_behind_a_torn_one_is_dropped_too(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    torn = append(log, bytes(3_000))
    behind = append(log, b"behind!!" * 200)
    assert behind.offset == SEGMENT, "it lies in the next segment"
    log.close()
    damage(disk, torn.offset + 60)

    log, found = opened(disk)
    assert found == [first]
    for base in (0, SEGMENT):
        low = max(first.end - base, 0)
        assert disk.read(path_of(base), low, SEGMENT) == bytes(SEGMENT - low)
    later = append(log, bytes(3_000))
    assert later.offset == first.end
    log.flush()
    log.close()
    log, found = opened(disk)
    assert found == [first, later]
    log.close()


def test_a_header_without_its_body_is_a_torn_tail(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    body = b"never written..."
    damage(disk, first.end, header(1, first.end, 1, 0, 0, body))
    log.close()
    log, found = opened(disk)
    assert found == [first]
    assert log.end == first.end
    log.close()


def test_damage_below_what_a_later_batch_knew_to_be_durable_is_named_and_nothing_changes(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    append(log, bytes(3_000))
    hurt = append(log, bytes(3_000))
    log.flush()
    append(log, b"witness!")
    log.close()
    damage(disk, hurt.offset + 1_000)
    before = contents(disk.root)

    with pytest.raises(CorruptLog) as caught:
        opened(disk)
    assert path_of(SEGMENT) in str(caught.value)
    assert f"offset {hurt.offset} (byte 0 of the file)" in str(caught.value)
    assert "the checksum of the batch of 3048 bytes does not match" in str(caught.value)
    assert contents(disk.root) == before


def test_damage_below_what_a_snapshot_knew_to_be_durable_is_named(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    second = append(log, b"second!!")
    log.flush()
    log.close()
    damage(disk, second.offset, bytes(second.length))
    before = contents(disk.root)
    with pytest.raises(CorruptLog, match=f"offset {first.end} .*nothing is written here.* before {second.end} "):
        opened(disk, known_durable=second.end)
    assert contents(disk.root) == before


def test_a_missing_segment_is_named(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    append(log, bytes(3_000))
    append(log, bytes(3_000))
    log.flush()
    end = log.end
    log.close()
    disk.remove(path_of(SEGMENT))
    with pytest.raises(CorruptLog, match="its segment is missing"):
        opened(disk, known_durable=end)


@pytest.mark.parametrize("size", [0, 1_001, 1_024])
def test_a_segment_cut_short_is_named(disk: FaultyDisk, size: int) -> None:
    log, _ = opened(disk)
    append(log, bytes(2_000))
    append(log, bytes(3_000))
    log.flush()
    end = log.end
    log.close()
    disk.truncate(path_of(0), size)
    with pytest.raises(CorruptLog, match=path_of(0)):
        opened(disk, known_durable=end)


def test_the_last_segment_cut_short_is_not_written_to_as_it_is(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    log.flush()
    log.close()
    disk.truncate(path_of(0), 1_024)
    with pytest.raises(CorruptLog, match=f"segment {path_of(0)} has 1024 bytes, expected 4096"):
        opened(disk, known_durable=first.end)
    assert disk.size(path_of(0)) == 1_024


def test_bytes_of_an_earlier_life_of_a_file_are_no_batch(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    whole = disk.read(path_of(0), 0, first.length)
    log.close()
    damage(disk, first.end, whole)
    log, found = opened(disk)
    assert found == [first], "a batch knows its own place"
    log.close()


def test_scanning_yields_the_same_and_changes_nothing(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    append(log, b"torn!!!!")
    log.close()
    damage(disk, first.end + 50)
    before = contents(disk.root)
    log = Log(disk, Segments(disk, SEGMENT), 1 << 20)
    assert list(log.scan(0, 0)) == [first]
    assert log.end == first.end
    assert contents(disk.root) == before


# ---------------------------------------------------------------------------------------------------------- threads


class StoppedSync:
    """Holds the first sync of a file until it is let go, so that two threads meet where a test wants them."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._used = False

    def __call__(self, call: str, _path: str) -> None:
        if call == "file.sync" and not self._used:
            self._used = True
            self.reached.set()
            assert self.go_on.wait(10)


def test_a_flush_on_another_thread_does_not_claim_what_was_appended_meanwhile(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    first = append(log, b"first!!!")
    disk.fault = stopped = StoppedSync()
    flusher = threading.Thread(target=log.flush)
    flusher.start()
    assert stopped.reached.wait(10)
    append(log, bytes(3_000))
    second = append(log, bytes(3_000))
    assert second.offset == SEGMENT, "the append went on in the next segment"
    stopped.go_on.set()
    flusher.join()

    assert log.durable == first.end
    disk.calls.clear()
    log.flush()
    assert {path for call, path in disk.calls if call == "file.sync"} == {path_of(0), path_of(SEGMENT)}
    assert log.durable == second.end
    log.close()


def test_an_append_that_must_flush_and_a_flush_on_another_thread_do_not_harm_each_other(disk: FaultyDisk) -> None:
    log, _ = opened(disk, unflushed_bytes_max=7_000)
    append(log, bytes(3_000))
    append(log, bytes(3_000))
    disk.fault = stopped = StoppedSync()
    errors: list[BaseException] = []

    def flush() -> None:
        try:
            log.flush()
        except BaseException as error:
            errors.append(error)

    flusher = threading.Thread(target=flush)
    flusher.start()
    assert stopped.reached.wait(10)
    # The append thread has too much unflushed and flushes by itself, or waits for the other one.
    threading.Timer(0.05, stopped.go_on.set).start()
    ends = [append(log, bytes(3_000)).end for _ in range(3)]
    stopped.go_on.set()
    flusher.join()

    assert errors == []
    disk.calls.clear()
    log.flush()
    assert log.durable == ends[-1]
    log.close()
    log, found = opened(disk)
    assert [batch.end for batch in found][-3:] == ends
    log.close()


def test_durable_never_goes_back_when_two_threads_flush(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    append(log, b"first!!!")
    disk.fault = stopped = StoppedSync()
    flusher = threading.Thread(target=log.flush)
    flusher.start()
    assert stopped.reached.wait(10)
    second = append(log, b"second!!")
    threading.Timer(0.05, stopped.go_on.set).start()
    log.flush()
    stopped.go_on.set()
    flusher.join()
    assert log.durable == second.end
    log.close()


def test_appending_and_flushing_on_two_threads_loses_nothing(disk: FaultyDisk) -> None:
    log, _ = opened(disk)
    done = threading.Event()
    claimed: list[int] = []

    def flush_all() -> None:
        while not done.is_set():
            claimed.append(log.flush())

    flusher = threading.Thread(target=flush_all)
    flusher.start()
    written = [append(log, bytes([n % 256]) * 504) for n in range(400)]
    done.set()
    flusher.join()
    log.flush()
    log.close()
    assert claimed == sorted(claimed)
    log, found = opened(disk)
    assert [(batch.offset, batch.length) for batch in found] == [(batch.offset, batch.length) for batch in written]
    assert all(body_of(log, batch) == bytes([n % 256]) * 504 for n, batch in enumerate(found))
    log.close()


def test_the_keeper_zeroes_segments_ahead_of_use(disk: FaultyDisk) -> None:
    ready = threading.Semaphore(0)
    segments = Segments(disk, SEGMENT)
    log = Log(disk, segments, 1 << 20)
    assert list(log.recover(0, 0)) == []
    with listening(lambda point: ready.release() if point == "segment.ready" else None):
        log.keeper = SegmentKeeper(segments)
        for _ in range(2):
            assert ready.acquire(timeout=10)
        append(log, bytes(8))
        assert ready.acquire(timeout=10), "a spare was used, so another is made"
        log.close()
    assert segments.spare_count == 2
    assert disk.list("log") == [f"{n * SEGMENT:020d}" for n in range(3)]
    assert disk.read(path_of(2 * SEGMENT), 0, SEGMENT) == bytes(SEGMENT)

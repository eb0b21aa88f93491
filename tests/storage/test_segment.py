"""The log's files: zeroed ahead, a reserve, no gaps."""

import errno
import threading
from pathlib import Path

import pytest

from postdate.errors import CorruptLog, DiskFull, LogFailed
from postdate.storage.segment import SegmentKeeper, Segments, full_or, path_of
from postdate.testing import FaultPoints
from tests.support.core import FaultyDisk

SIZE = 4_096


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(tmp_path)


def test_a_segment_is_zeroed_and_synced_before_it_gets_its_name(disk: FaultyDisk) -> None:
    segments = Segments(disk, SIZE)
    with FaultPoints() as points:
        segments.prepare()
    assert disk.list("log") == [f"{0:020d}"]
    assert disk.read(path_of(0), 0, 2 * SIZE) == bytes(SIZE)
    unfinished = path_of(0) + ".new"
    assert disk.calls == [("write", unfinished), ("sync", unfinished), ("rename", unfinished)]
    assert points.reached == ["segment.zero", "segment.zeroed", "segment.ready"]


def test_two_are_kept_ahead_and_no_more(disk: FaultyDisk) -> None:
    segments = Segments(disk, SIZE)
    for _ in range(5):
        segments.prepare()
    assert segments.spare_count == 2
    assert [segments.open_next(urgent=False).base for _ in range(3)] == [0, SIZE, 2 * SIZE]
    assert segments.bases == [0, SIZE, 2 * SIZE]
    assert segments.spare_count == 1, "the reserve is there behind every send"


def test_only_urgent_work_may_open_the_reserve(disk: FaultyDisk) -> None:
    segments = Segments(disk, SIZE)
    segments.prepare()
    disk.fault = lambda call, _: OSError(errno.ENOSPC, "No space left on device") if call == "write" else None
    with pytest.raises(DiskFull, match="no room for another log segment of 4096 bytes: No space left on device"):
        segments.open_next(urgent=False)
    assert segments.open_next(urgent=True).base == 0
    with pytest.raises(DiskFull):
        segments.open_next(urgent=True)


def test_a_preparation_that_fails_leaves_nothing(disk: FaultyDisk) -> None:
    segments = Segments(disk, SIZE)
    for failing in ("write", "sync", "rename"):
        disk.fault = lambda call, _, failing=failing: (  # type: ignore[misc]
            OSError(errno.EDQUOT, "Quota exceeded") if call == failing else None
        )
        with pytest.raises(DiskFull, match="Quota exceeded"):
            segments.prepare()
        assert disk.list("log") == []
        assert segments.spare_count == 0
    disk.fault = lambda _call, _path: None
    segments.prepare()
    assert segments.spare_count == 1


def test_an_error_that_is_no_full_disk_is_the_logs_failure_and_says_what_happened() -> None:
    for number in (errno.EIO, errno.EMFILE, errno.EROFS):
        failed = full_or(OSError(number, "what happened"), "a sentence")
        assert type(failed) is LogFailed
        assert str(failed) == "a sentence: what happened"
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        full = full_or(OSError(number, "full"), "a sentence")
        assert type(full) is DiskFull
        assert str(full) == "a sentence: full"


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_preparation_on_a_broken_disk_has_a_name_and_keeps_its_cause(disk: FaultyDisk, call: str) -> None:
    segments, broken = Segments(disk, SIZE), OSError(errno.EIO, "Input/output error")
    disk.fault = lambda name, _: broken if name == call else None
    with pytest.raises(LogFailed, match="no room for another log segment of 4096 bytes: Input/output error") as raised:
        segments.prepare()
    assert raised.value.__cause__ is broken
    assert disk.list("log") == []


def test_the_reserve_is_made_again_where_none_is_left(disk: FaultyDisk) -> None:
    segments = Segments(disk, SIZE)
    segments.prepare()
    disk.calls.clear()
    segments.keep_reserve()
    assert disk.calls == [], "one is there"
    segments.open_next(urgent=True).close()
    disk.fault = lambda call, _: OSError(errno.ENOSPC, "No space left on device") if call == "write" else None
    with pytest.raises(DiskFull):
        segments.keep_reserve()
    disk.fault = lambda _call, _path: None
    segments.keep_reserve()
    assert (segments.spare_count, disk.list("log")) == (1, [f"{0:020d}", f"{SIZE:020d}"])


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_segment_of_another_size_is_named(disk: FaultyDisk, size: int) -> None:
    for base in (0, SIZE, 2 * SIZE):
        disk.write(path_of(base), 0, bytes(SIZE))
    Segments(disk, SIZE).check_sizes()
    disk.write(path_of(SIZE), SIZE, b"x")
    disk.truncate(path_of(SIZE), size)
    with pytest.raises(CorruptLog, match=f"segment {path_of(SIZE)} has {size} bytes, expected {SIZE}"):
        Segments(disk, SIZE).check_sizes()


def test_readers_leave_alone_what_is_half_made(disk: FaultyDisk) -> None:
    disk.write(path_of(0) + ".new", 0, bytes(100))
    assert Segments(disk, SIZE).bases == []
    assert disk.list("log") == [f"{0:020d}.new"]


def test_what_a_crash_left_half_made_goes_when_a_broker_opens(disk: FaultyDisk) -> None:
    disk.write(path_of(0), 0, bytes(SIZE))
    disk.write(path_of(SIZE) + ".new", 0, bytes(100))
    segments = Segments(disk, SIZE)
    assert segments.bases == [0]
    segments.remove_unfinished()
    assert disk.list("log") == [f"{0:020d}"]


def test_a_segment_is_mapped_when_it_is_first_read_and_not_after_it_is_gone(disk: FaultyDisk) -> None:
    disk.write(path_of(0), 0, b"x" * SIZE)
    segments = Segments(disk, SIZE)
    assert segments.views == {}
    view = segments.view(0)
    assert view is not None
    assert view[:2] == b"xx"
    assert segments.view(0) is view
    assert segments.view(SIZE) is None
    segments.remove(0)
    assert segments.view(0) is None
    assert disk.list("log") == []


def test_a_preparation_while_the_last_spare_is_opened_does_not_make_it_again(disk: FaultyDisk) -> None:
    """The helper thread may run at any moment: here it runs while the one spare that is left is being opened."""
    segments = Segments(disk, SIZE)
    segments.prepare()
    helpers: list[threading.Thread] = []

    def meanwhile(call: str, _path: str) -> None:
        if call == "open" and not helpers:
            helpers.append(threading.Thread(target=segments.prepare))
            helpers[0].start()
            helpers[0].join(0.1)  # it may also wait until the opening is over

    disk.fault = meanwhile
    segment = segments.open_next(urgent=True)
    helpers[0].join()
    segment.file.write(0, b"written")
    assert disk.read(path_of(segment.base), 0, 7) == b"written"
    following = segments.open_next(urgent=True)
    assert following.base == segment.base + SIZE
    segment.close()
    following.close()


def test_the_keeper_tries_again_when_the_disk_was_full(disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SegmentKeeper, "_RETRY_S", 0.001)
    failures, ready = threading.Semaphore(0), threading.Semaphore(0)
    full = threading.Event()
    full.set()

    def fault(call: str, _path: str) -> OSError | None:
        if call == "write" and full.is_set():
            failures.release()
            return OSError(errno.ENOSPC, "No space left on device")
        if call == "rename":
            ready.release()
        return None

    disk.fault = fault
    segments = Segments(disk, SIZE)
    keeper = SegmentKeeper(segments)
    for _ in range(3):
        assert failures.acquire(timeout=10)
    assert segments.spare_count == 0
    full.clear()
    for _ in range(2):
        assert ready.acquire(timeout=10)
    keeper.stop()
    assert segments.spare_count == 2

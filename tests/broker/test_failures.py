"""Files that cannot be read, synced, opened or removed: the broker says so by name, and nothing is lost."""

import dataclasses
import errno
import gc
import os
import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from postdate.broker.broker import Broker
from postdate.config import Settings
from postdate.errors import LogFailed
from postdate.message import Cancelled
from postdate.storage.disk import RealDisk
from postdate.storage.segment import Segments
from tests.support.core import (
    FAR_MS,
    KEEP_DAY,
    LEAD_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    FaultyDisk,
    advance,
    advance_to,
    bodies,
    broken_once,
    cancel,
    message,
    registered,
    segment_of_messages,
    send,
    snapshot,
    stage,
    upload,
)
from verify.simulation import VirtualDisk

FAR_COUNT = 1_024  # more rows than are remembered from the last read, in one block: a rescue has to read their file
ON_DISK = dataclasses.replace(SMALL, segment_bytes=1 << 20, batch_bytes_max=1 << 20)
ON_DISK_LIMITS = dataclasses.replace(SMALL_LIMITS, far_block_rows=FAR_COUNT, queue_file_rows=1 << 16)


# ------------------------------------------------------------------------------------- a batch that is half applied


def half_applied(data: Data, nth: int) -> Broker:
    """A broker whose nth read of the far queue failed while a rescue was applied."""
    broker = data.open(ON_DISK, ON_DISK_LIMITS)
    send(broker, T0, *[message(str(n), due=T0 + FAR_MS) for n in range(FAR_COUNT)])
    snapshot(broker)
    broker.advance(T0 + FAR_MS - LEAD_MS)
    broker.log.flush()
    broken_once(data.disk, "read", "far", nth)
    with pytest.raises(LogFailed, match="Input/output error"):
        broker.settle()
    data.disk.fault = lambda _call, _path: None
    return broker


@pytest.mark.parametrize("nth", range(1, 7))
def test_a_broker_that_could_not_apply_a_batch_delivers_all_of_it_when_it_is_opened_again(data: Data, nth: int) -> None:
    broker = half_applied(data, nth)
    data.close(broker)
    broker = data.open(ON_DISK, ON_DISK_LIMITS)
    advance_to(broker, T0 + FAR_MS - LEAD_MS, T0 + FAR_MS)
    assert bodies(broker) == [str(n) for n in range(FAR_COUNT)]


@pytest.mark.parametrize(
    "call",
    [
        lambda broker: broker.settle(),
        lambda broker: broker.flush(),
        lambda broker: broker.send([message()], T0 + FAR_MS),
        lambda broker: broker.cancel(TOPIC, "k", T0 + FAR_MS, T0),
        lambda broker: broker.advance(T0 + FAR_MS),
        lambda broker: broker.commit_offsets("g", [(TOPIC, 0, 0)], T0 + FAR_MS),
        lambda broker: broker.put_topic("second", T0 + FAR_MS),
        lambda broker: broker.delete_topic(TOPIC, T0 + FAR_MS),
        lambda broker: broker.register_pipeline(T0 + FAR_MS),
        lambda broker: stage(broker, 0, 0, T0, [], T0 + FAR_MS),
        snapshot,
    ],
    ids=[
        "settle", "flush", "send", "cancel", "advance", "commit_offsets", "put_topic", "delete_topic",
        "register_pipeline", "stage", "snapshot",
    ],
)  # fmt: skip
def test_a_broker_that_could_not_apply_a_batch_does_nothing_more(data: Data, call: Callable[[Broker], object]) -> None:
    broker = half_applied(data, 1)
    end, files = broker.log.end, data.disk.list("snapshots")
    for _ in range(2):
        with pytest.raises(LogFailed, match=r"Input/output error.*restart the broker"):
            call(broker)
    assert bodies(broker) == [], "what comes behind the batch is not applied before it"
    assert (broker.log.end, data.disk.list("snapshots")) == (end, files)


def test_a_cancel_whose_answer_cannot_be_found_out_says_so_and_holds(data: Data) -> None:
    broker = data.open(ON_DISK, ON_DISK_LIMITS)
    due = T0 + FAR_MS
    send(broker, T0, *[message(str(n), unique=f"k{n}", due=due) for n in range(FAR_COUNT)])
    send(broker, T0, message("last", due=due))
    broken_once(data.disk, "read", "far")
    ticket = broker.cancel(TOPIC, "k5", due, T0 + 1)
    broker.flush()
    with pytest.raises(OSError, match="Input/output error"):
        _ = ticket.answer
    assert cancel(broker, "k5", due, T0 + 2) == Cancelled.CANCELLED, "the broker goes on"
    advance_to(broker, T0 + 2, due)
    assert bodies(broker) == [*(str(n) for n in range(FAR_COUNT) if n != 5), "last"]


def test_an_advance_that_cannot_read_what_is_due_says_so_pauses_and_recovers(data: Data) -> None:
    broker = data.open(ON_DISK, ON_DISK_LIMITS)
    send(broker, T0, *[message(str(n), due=T0 + FAR_MS) for n in range(FAR_COUNT)])
    at_ms = T0 + FAR_MS - LEAD_MS
    broken_once(data.disk, "read", "far")
    with pytest.raises(LogFailed, match=r"what is due cannot be read: .*Input/output error"):
        broker.advance(at_ms)
    assert (broker.fire_failures, isinstance(broker.fire_error, LogFailed)) == (1, True)
    broker.advance(at_ms)
    assert broker.paused_until_ms(at_ms) == at_ms + broker.limits.fire_pause_ms_min
    advance_to(broker, at_ms + broker.limits.fire_pause_ms_min, T0 + FAR_MS)
    assert (broker.fire_failures, broker.fire_error) == (0, None)
    assert bodies(broker) == [str(n) for n in range(FAR_COUNT)]


def test_a_broker_is_closed_while_a_snapshot_is_being_taken(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("kept", due=T0 + 100))
    steps = broker.snapshot()
    next(steps)
    data.close(broker)
    steps.close()  # type: ignore[attr-defined]
    broker = data.open()
    advance(broker, T0 + 100)
    assert bodies(broker) == ["kept"]


# ------------------------------------------------------------------------------------------------------ descriptors

DESCRIPTORS_MAX = 256
MANY = 300  # segments and chunks
TINY = Settings(segment_bytes=16_384, batch_bytes_max=16_384)


def live_with_few_descriptors(folder: Path) -> None:
    """The story of the test below, in a process of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MAX, DESCRIPTORS_MAX))
    data = Data(folder)
    broker = data.open(TINY)
    for n in range(MANY):
        send(broker, T0, message(f"now{n}".ljust(12_000)))
    far = [message(f"far{n}", due=T0 + FAR_MS + n) for n in range(MANY)]
    for n in range(0, MANY, 50):
        send(broker, T0, *far[n : n + 50])
    epoch = registered(broker)
    for n in range(MANY):
        upload(broker, data, f"c{n}", [far[n]], [n])
        stage(broker, epoch, n + 1, T0 + FAR_MS + n, [f"c{n}"], T0 + FAR_MS + n - 1)
        advance(broker, T0 + FAR_MS + n)
    expected = [f"now{n}" for n in range(MANY)] + [f"far{n}" for n in range(MANY)]
    for reopen in (data.crash, data.close, data.crash):
        assert len(broker.log.segment_numbers()) > MANY
        assert [body.rstrip() for body in bodies(broker)] == expected
        reopen(broker)
        del broker
        gc.collect()  # it is gone, as it would be with its process
        broker = data.open(TINY)
    send(broker, T0 + 2 * FAR_MS, message("goes on"))
    assert bodies(broker)[-1] == "goes on"
    data.close(broker)


def test_many_small_segments_and_chunks_need_few_descriptors(data: Data) -> None:
    root = Path(__file__).parents[2]
    story = (
        "import pathlib; from tests.broker.test_failures import live_with_few_descriptors; "
        f"live_with_few_descriptors(pathlib.Path({str(data.folder)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", story],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def open_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor_behind(data: Data) -> None:
    broker = data.open()
    segment_of_messages(broker, T0, "x")
    while broker.log.end & 0xFFFF < 0xC000:
        send(broker, T0, message(bytes(4_000)))
    before = open_count()
    data.disk.fault = lambda call, _: OSError(errno.ENOMEM, "Cannot allocate memory") if call == "map" else None
    for _ in range(20):
        with pytest.raises(LogFailed, match="cannot be opened: Cannot allocate memory"):
            broker.send([message(bytes(16_000))], T0)
    assert open_count() == before
    data.disk.fault = lambda _call, _path: None
    send(broker, T0, message("goes on"))
    assert bodies(broker)[-1] == "goes on"


# ---------------------------------------------------------------------------------- row files that cannot be synced


@pytest.mark.parametrize("folder", ["queues", "far"])
def test_rows_whose_sync_failed_are_written_again_before_a_snapshot_speaks_of_them(folder: str) -> None:
    """A failed sync drops what it should have written, and the next one has nothing to do and succeeds."""
    disk = VirtualDisk()
    broker = Broker(disk, ON_DISK, limits=ON_DISK_LIMITS)
    broker.put_topic(TOPIC, T0, read_queue_count=1, write_queue_count=1)
    delay_ms = FAR_MS if folder == "far" else 0
    send_many(broker, delay_ms, 0)
    with pytest.raises(OSError, match="Input/output error"):
        snapshot_with_failing_sync(broker, disk, folder)
    for n in (1, 2):
        send_many(broker, delay_ms, n)
        snapshot(broker)
    disk.lose_power(random.Random(1))

    broker = Broker(disk, ON_DISK, limits=ON_DISK_LIMITS)
    advance_to(broker, T0, T0 + delay_ms)
    assert bodies(broker) == [f"{n}.{m}" for n in range(3) for m in range(SENT_COUNT)]
    broker.close()


SENT_COUNT = 5_000  # more than the rows of one checksum


def send_many(broker: Broker, delay_ms: int, label: int) -> None:
    for start in range(0, SENT_COUNT, 1_000):
        send(broker, T0, *[message(f"{label}.{start + n}", due=T0 + delay_ms) for n in range(1_000)])


def snapshot_with_failing_sync(broker: Broker, disk: VirtualDisk, folder: str) -> None:
    """Takes a snapshot in which the first sync of a file under that folder fails."""
    sync = disk.sync

    def sync_or_fail(path: str) -> None:
        disk.failing_syncs = int(path.startswith(folder + "/"))
        sync(path)

    disk.sync = sync_or_fail  # type: ignore[method-assign]
    try:
        snapshot(broker)
    finally:
        disk.sync = sync  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------- the keeper


def test_the_keeper_survives_a_segment_that_it_can_neither_finish_nor_remove(data: Data) -> None:
    broker = data.open()
    refused, made = threading.Event(), threading.Event()

    def fault(call: str, path: str) -> OSError | None:
        if path.endswith(".new") and call in ("sync", "remove"):
            if call == "remove":
                refused.set()
            return OSError(errno.EIO, "Input/output error")
        return None

    def watch(call: str, path: str) -> None:
        if call == "rename" and path.startswith("log/"):
            made.set()

    while broker.log.spare_count > 1:
        broker._segments._spares.pop()  # as if it had not been made yet
    data.disk.fault = fault
    broker.start_keeper()
    assert refused.wait(10)
    data.disk.fault = watch
    assert broker.log.keeper is not None
    broker.log.keeper.wake()
    assert made.wait(10), "it goes on when the disk does"


class TakenWhileLookedAt(deque[int]):
    """Spares of which the appending thread takes the last one as soon as somebody has looked at them."""

    def __init__(self, spares: deque[int], take: Callable[[], object]) -> None:
        super().__init__(spares)
        self._take: Callable[[], object] | None = take

    def _taken(self) -> None:
        take, self._take = self._take, None
        if take is not None:
            take()

    def __bool__(self) -> bool:
        found = len(self) > 0
        self._taken()
        return found

    def __iter__(self) -> Iterator[int]:
        found = [self[index] for index in range(len(self))]
        self._taken()
        return iter(found)


def test_a_spare_that_is_taken_while_the_next_one_is_prepared_is_no_trouble(tmp_path: Path) -> None:
    segments = Segments(RealDisk(tmp_path), 1 << 14)
    segments.prepare()
    opened = []
    segments._spares = TakenWhileLookedAt(segments._spares, lambda: opened.append(segments.open_next(urgent=True)))
    segments.prepare()
    assert (segments.bases, list(segments._spares)) == ([0], [1 << 14])
    for segment in opened:
        segment.close()


# ---------------------------------------------------------------------------------------------- files that will not go


def test_a_segment_that_could_not_be_removed_is_removed_by_the_next_retention(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    for n in range(4):
        segment_of_messages(broker, T0 + n, f"{n}.")
    for _ in range(2):
        send(broker, T0 + 10, message("x"))
        snapshot(broker)
    later = T0 + 10 + KEEP_DAY.retention_ms
    broken_once(data.disk, "remove", "log", 2)
    with pytest.raises(OSError, match="Input/output error"):
        broker.retain(later)
    assert broker.log.segment_numbers() == [1, 2, 3, 4]
    assert broker.retain(later) == 3
    assert on_disk(data.disk) == broker.log.segment_numbers() == [4]
    assert bodies(broker)[-1] == "x"


def on_disk(disk: FaultyDisk) -> list[int]:
    """The segments that hold something: numbers of the files without the zeroed ones ahead."""
    names = [name for name in disk.list("log") if any(disk.read(f"log/{name}", 0, 64))]
    return [int(name) >> 16 for name in names]


def test_a_chunk_that_could_not_be_removed_is_removed_by_the_next_retention(data: Data) -> None:
    broker = data.open(KEEP_DAY)
    due = T0 + FAR_MS
    far = message("far", due=due)
    send(broker, T0, far)
    epoch = registered(broker)
    upload(broker, data, "c1", [far], [0])
    stage(broker, epoch, 1, due, ["c1"])
    advance(broker, due)
    for _ in range(2):
        send(broker, due, message("x"))
        snapshot(broker)
    broken_once(data.disk, "remove", "chunks")
    with pytest.raises(OSError, match="Input/output error"):
        broker.retain(due + KEEP_DAY.retention_ms)
    assert bodies(broker) == ["far", "x", "x"]
    assert broker.retain(due + KEEP_DAY.retention_ms) == 1
    assert (data.disk.list("chunks"), bodies(broker)) == ([], ["x", "x"])

"""The broker and its folder: firing, failing disks, odd folders, writing without waiting."""

import dataclasses
import errno
import json
import threading
from contextlib import suppress

import pytest

from postdate.broker.broker import Broker
from postdate.errors import CorruptLog, DiskFull, FolderInUse, ForeignFolder, LogFailed
from postdate.storage.disk import RealDisk
from postdate.testing import FaultPoints
from tests.support.core import (
    FAR_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    bodies,
    contents,
    message,
    no_new_segments,
    registered,
    segment_of_messages,
    send,
    send_each,
    snapshot,
    stage,
)


def fill_all(broker: Broker, at_ms: int = T0) -> None:
    """Sends, and then commits offsets, until the disk has no more room."""
    with suppress(DiskFull):
        while True:
            send(broker, at_ms, message(bytes(4_000)))
    with suppress(DiskFull):
        while True:
            broker.commit_offsets("g", [(TOPIC, 0, 1)], at_ms)
            broker.flush()


# ---------------------------------------------------------------------------------------------------- failing disks


def test_a_fire_that_fails_pauses_longer_each_time_and_recovers(data: Data) -> None:
    broker = data.open()
    for n in range(50):
        send(broker, T0, message(f"due{n}", due=T0 + 1 + n))
    no_new_segments(data)
    fill_all(broker)
    at_ms = T0
    with suppress(DiskFull):
        while at_ms < T0 + 50:
            at_ms += 1
            broker.advance(at_ms)  # a fire is smaller than any other batch
            broker.flush()
    assert broker.fire_failures == 1
    visible = len(bodies(broker))
    pauses = [broker.paused_until_ms(at_ms) - at_ms]
    for _ in range(11):
        at_ms += pauses[-1]
        broker.advance(at_ms - 1)
        assert broker.retry_at_ms == at_ms, "until then a call does nothing"
        with pytest.raises(DiskFull):
            broker.advance(at_ms)
        assert isinstance(broker.fire_error, DiskFull)
        pauses.append(broker.paused_until_ms(at_ms) - at_ms)
    assert pauses == [10, 20, 40, 80, 160, 320, 640, 1_280, 2_560, 5_000, 5_000, 5_000]
    assert broker.fire_failures == 12
    assert len(bodies(broker)) == visible < broker.offsets(TOPIC, 0)[1] + 50
    at_ms += pauses[-1]

    data.disk.fault = lambda _call, _path: None
    advance(broker, at_ms)
    assert (broker.fire_failures, broker.fire_error) == (0, None)
    assert [body for body in bodies(broker) if body.startswith("due")] == [f"due{n}" for n in range(50)]


def test_after_a_failed_fsync_the_broker_takes_nothing_until_it_is_opened_again(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("acknowledged"))
    ticket = broker.send([message("lost or found")], T0)
    data.disk.fault = lambda call, _: OSError(errno.EIO, "Input/output error") if call == "file.sync" else None
    with pytest.raises(LogFailed):
        broker.flush()
    data.disk.fault = lambda _call, _path: None
    for _ in range(2):
        with pytest.raises(LogFailed):
            broker.send([message()], T0)
        with pytest.raises(LogFailed):
            broker.flush()
    assert ticket.answers is None
    assert bodies(broker) == ["acknowledged"], "what was not durable was never visible"
    data.crash(broker)
    broker = data.open()
    assert bodies(broker) == ["acknowledged", "lost or found"]
    send(broker, T0, message("goes on"))


def test_queues_that_cannot_be_written_lose_nothing(data: Data) -> None:
    broker = data.open()
    full = OSError(errno.ENOSPC, "No space left on device")
    data.disk.fault = lambda call, path: full if call == "write" and path.startswith(("queues/", "far/")) else None
    send_each(broker, T0, [message(str(n), due=T0 + FAR_MS if n % 2 else None) for n in range(100)])
    assert bodies(broker) == [str(n) for n in range(0, 100, 2)]
    with pytest.raises(OSError, match="No space left"):
        snapshot(broker)
    data.disk.fault = lambda _call, _path: None
    snapshot(broker)
    advance_to(broker, T0, T0 + FAR_MS)
    expected = [str(n) for n in range(0, 100, 2)] + [str(n) for n in range(1, 100, 2)]
    assert bodies(broker) == expected
    data.crash(broker)
    assert bodies(data.open()) == expected


# ---------------------------------------------------------------------------------------------------- odd folders


def test_a_folder_that_is_not_ours_is_refused_and_left_alone(data: Data) -> None:
    data.folder.mkdir()
    (data.folder / "thesis.txt").write_text("mine")
    with pytest.raises(ForeignFolder, match=r"holds 'thesis.txt' but no file FORMAT.*give the broker an empty one"):
        data.open()
    assert [path.name for path in data.folder.iterdir()] == ["thesis.txt"], "not even a lock is left in it"
    assert (data.folder / "thesis.txt").read_text() == "mine"


def test_a_folder_of_a_future_version_is_refused(data: Data) -> None:
    data.close(data.open())
    fixed = json.loads((data.folder / "FORMAT").read_text())
    (data.folder / "FORMAT").write_text(json.dumps({**fixed, "format": 2}))
    data.damaged = True
    with pytest.raises(ForeignFolder, match=r"format 2, this program knows up to 1.*newer Postdate"):
        data.open()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "x"}'])
def test_a_damaged_format_file_is_named(data: Data, text: str) -> None:
    data.folder.mkdir()
    (data.folder / "FORMAT").write_text(text)
    data.damaged = True
    with pytest.raises(ForeignFolder, match="FORMAT is not readable"):
        data.open()


def test_a_folder_keeps_the_identity_that_it_got_when_it_was_made(data: Data) -> None:
    first = data.open()
    data.close(first)
    again = data.open()
    assert again.identity == first.identity == (data.folder / "IDENTITY").read_text()
    assert len(bytes.fromhex(again.identity)) == 16


def test_a_folder_of_an_earlier_version_gets_an_identity_when_it_is_opened(data: Data) -> None:
    data.close(data.open())
    (data.folder / "IDENTITY").unlink()
    broker = data.open()
    assert (data.folder / "IDENTITY").read_text() == broker.identity


def test_a_damaged_identity_is_refused(data: Data) -> None:
    data.close(data.open())
    (data.folder / "IDENTITY").write_text("5" * 31)
    data.damaged = True
    with pytest.raises(ForeignFolder, match=r"the file IDENTITY holds .*, no identity: restore it from a copy"):
        data.open()


def test_a_folder_in_use_is_refused_and_free_after_closing(data: Data) -> None:
    broker = data.open()
    with pytest.raises(FolderInUse, match="is in use by process"):
        Broker(RealDisk(data.folder), SMALL, limits=SMALL_LIMITS)
    data.close(broker)
    data.open()


def test_a_broker_that_could_not_open_lets_the_folder_go(data: Data) -> None:
    data.folder.mkdir()
    (data.folder / "thesis.txt").write_text("mine")
    with pytest.raises(ForeignFolder):
        data.open()
    (data.folder / "thesis.txt").unlink()
    data.open()


def test_a_corrupt_log_is_named_and_the_log_is_left_as_it_is(data: Data) -> None:
    broker = data.open()
    ticket = send(broker, T0, message("hurt"))
    send(broker, T0, message("witness"))
    data.crash(broker)
    segment = data.folder / "log" / f"{0:020d}"
    damaged = bytearray(segment.read_bytes())
    damaged[ticket.offsets[0] + 88] ^= 1
    segment.write_bytes(damaged)
    before = contents(data.folder, "log")
    data.damaged = True
    with pytest.raises(CorruptLog, match=r"segment log/00000000000000000000, offset .*checksum"):
        data.open()
    assert contents(data.folder, "log") == before


def test_a_folder_keeps_its_fixed_sizes_whatever_the_settings_say(data: Data) -> None:
    data.close(data.open())
    broker = data.open(
        dataclasses.replace(SMALL, segment_bytes=1 << 20), dataclasses.replace(SMALL_LIMITS, queue_file_rows=128)
    )
    assert broker.log.segment_end(0) == 1 << 16
    send_each(broker, T0, [message(str(n)) for n in range(100)])
    number = broker.fold.topics.get(TOPIC).numbers[0]
    assert data.disk.list(f"queues/{number}/entries") == [f"{0:020d}", f"{64:020d}"]


def test_a_changed_lead_is_written_to_the_log_and_counts(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, lead_ms=1_000))
    send(broker, T0, message("near", due=T0 + 1_000), message("far", due=T0 + 1_001))
    assert (broker.fold.wheel.count, broker.fold.far.length) == (1, 1)
    data.crash(broker)
    broker = data.open(dataclasses.replace(SMALL, lead_ms=2_000))
    assert (broker.fold.wheel.count, broker.fold.far.length) == (1, 1), "what was decided stays so"
    send(broker, T0, message("near", due=T0 + 2_000))
    assert broker.fold.wheel.count == 2
    advance_to(broker, T0, T0 + 2_000)
    assert len(bodies(broker)) == 3


def test_a_keeper_zeroes_segments_ahead_until_the_broker_is_closed(data: Data) -> None:
    broker = data.open()
    zeroed = threading.Semaphore(0)

    def fault(call: str, path: str) -> None:
        if call == "rename" and path.startswith("log/"):
            zeroed.release()

    data.disk.fault = fault
    missing = 2 - broker.log.spare_count
    broker.start_keeper()
    for _ in range(missing):
        assert zeroed.acquire(timeout=10)
    before = threading.active_count()
    assert before >= 2
    segment_of_messages(broker, T0, "x")
    assert zeroed.acquire(timeout=10), "a spare was used, so the next one is made"
    data.close(broker)
    assert threading.active_count() == before - 1
    assert data.disk.list("log") == [f"{n << 16:020d}" for n in range(4)], "two with messages, two ahead"
    assert data.disk.read(f"log/{3 << 16:020d}", 0, 1 << 17) == bytes(1 << 16)
    assert bodies(data.open())[0].startswith("x0")


# ------------------------------------------------------------------------------------------------------------ async


def test_in_async_mode_a_message_is_visible_before_it_is_durable(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    ticket = broker.send([message("fast")], T0)
    assert ticket.answer == 0
    assert bodies(broker) == ["fast"]
    assert broker.log.durable < broker.log.end
    broker.send([message("later", due=T0 + 10)], T0)
    broker.advance(T0 + 10)
    assert bodies(broker) == ["fast", "later"]


def test_in_async_mode_a_stage_is_durable_when_it_is_answered(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    broker.send([message(due=T0 + FAR_MS)], T0)
    epoch = registered(broker)
    broker.send([message()], T0)
    stage(broker, epoch, 1, T0 + 1)
    assert broker.log.durable == broker.log.end


def test_in_async_mode_a_snapshot_makes_the_log_durable_first(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, flush="async"))
    broker.send([message("fast")], T0)
    position = broker.fold.position
    with FaultPoints() as points:
        snapshot(broker)
    assert broker.log.durable >= position
    assert points.reached.index("log.flushed") < points.reached.index("snapshot.synced")


def test_a_batch_is_synced_before_it_is_answered(data: Data) -> None:
    broker = data.open()
    broker.log.prepare_segment()
    with FaultPoints() as points:
        send(broker, T0, message())
    assert points.reached[:4] == ["log.append", "log.append.written", "log.flush", "log.flushed"]


def test_a_fire_does_not_wait_for_a_batch_whose_instant_the_clock_has_left(data: Data) -> None:
    broker = data.open()
    broker.send([message("ahead")], T0 + 10_000)
    broker.log.flush()
    broker.send([message("due", due=T0 + 100)], T0)  # the clock stepped back
    broker.settle()
    broker.log.flush()
    broker.send([message("pending")], T0 + 50)
    broker.settle()
    broker.advance(T0 + 100)
    broker.flush()
    assert bodies(broker) == ["ahead", "pending", "due"]

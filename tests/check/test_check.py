"""The check: clean folders are ok, whatever they have been through; each damage is found and its place named."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postdate.broker.broker import Broker
from postdate.check import Report, check_folder
from postdate.check.queues import overtaken
from postdate.check.records import message_problem
from postdate.config import Limits, Settings
from postdate.errors import FolderInUse, ForeignFolder
from postdate.keys import key_hash
from postdate.message import LOOPBACK, Message, encode_properties
from postdate.state import saved
from postdate.state.fold import Fold
from postdate.storage import record as records
from postdate.storage import snapshot as snapshots
from postdate.storage.batch import MESSAGE, MORE_KEYS
from postdate.storage.disk import RealDisk
from postdate.storage.layout import ENTRY, SINGLE, TIME
from tests.support.core import (
    FAR_MS,
    HOUR_MS,
    MINUTE_MS,
    SECOND_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    advance,
    advance_to,
    cancel,
    message,
    registered,
    send,
    snapshot,
    stage,
    write_chunk,
)

FIRST_FILE = "00000000000000000000"
QUEUE = "queues/18"  # the first queue behind the eighteen of SCHEDULE_TOPIC_XXXX
ENTRIES, TIMES = f"{QUEUE}/entries/{FIRST_FILE}", f"{QUEUE}/times/{FIRST_FILE}"
CHUNK_DUE = T0 + 2 * MINUTE_MS


def opened(folder: Path, settings: Settings = SMALL, limits: Limits = SMALL_LIMITS) -> Broker:
    return Broker(RealDisk(folder), settings, limits=limits)


def check(folder: Path) -> Report:
    return check_folder(RealDisk(folder))


def lived(folder: Path) -> None:
    """Everything that may happen to a folder, in four minutes of its life, then a clean close."""
    broker = opened(folder)
    broker.put_topic(TOPIC, T0, read_queue_count=2, write_queue_count=2)
    broker.put_topic("brief", T0, read_queue_count=1, write_queue_count=1)
    # Every form of delay.
    send(broker, T0, message("at once", unique="u0", tag="red"), message("the body to be hurt", keys="k1 k2"))
    send(broker, T0, message("level", DELAY="2", unique="u1"), message("in seconds", TIMER_DELAY_SEC="3"))
    send(broker, T0, message("in ms", TIMER_DELAY_MS="700", tag="blue"), message("at", due=T0 + 700, queue_id=1))
    send(broker, T0, *[message(f"many {i}", due=T0 + 500 + i % 7 * 100, queue_id=i % 2) for i in range(80)])
    far = send(broker, T0, *[message(f"far {i}", due=CHUNK_DUE + i, unique=f"f{i}") for i in range(4)])
    send(broker, T0, message("alone", topic="brief", due=T0 + HOUR_MS), message("also", topic="brief"))
    # Cancels, near and far, and what is fired between them.
    broker.cancel(TOPIC, "u1", T0 + 5 * SECOND_MS, T0 + 1)
    broker.cancel(TOPIC, "f3", CHUNK_DUE + 3, T0 + 1)
    broker.commit_offsets("group", [(TOPIC, 0, 1)], T0 + 1)
    broker.flush()
    advance_to(broker, T0 + 2, T0 + 4 * SECOND_MS)
    snapshot(broker)
    # A pipeline takes what is far and brings it back.
    epoch = registered(broker, T0 + 5 * SECOND_MS)
    number = broker.fold.topics.get(TOPIC).numbers[0]
    rows = [(CHUNK_DUE + i, far.offsets[i], number, message(f"far {i}", unique=f"f{i}")) for i in range(3)]
    write_chunk(RealDisk(folder), "window-1", rows)
    stage(broker, epoch, broker.fold.far.length, CHUNK_DUE + MINUTE_MS, ["window-1"], T0 + MINUTE_MS)
    broker.delete_topic("brief", T0 + MINUTE_MS)
    advance_to(broker, T0 + MINUTE_MS, CHUNK_DUE + 1)
    snapshot(broker)
    # A crash; then the clock steps back, and the last ones wait while the broker is closed.
    send(broker, CHUNK_DUE + 10, message("before the crash", due=CHUNK_DUE + 20))
    broker.abandon()
    broker = opened(folder)
    advance(broker, CHUNK_DUE + 30)
    send(broker, CHUNK_DUE - 500, message("the clock is back", due=CHUNK_DUE - 400))
    advance(broker, CHUNK_DUE + 40)
    send(broker, CHUNK_DUE + 50, message("waits", due=CHUNK_DUE + 20 * SECOND_MS, unique="w"))
    send(broker, CHUNK_DUE + 50, message("far away", due=CHUNK_DUE + HOUR_MS))
    broker.close()


FORGETFUL = dataclasses.replace(SMALL, retention_ms=1_000)
FORGETFUL_LIMITS = dataclasses.replace(SMALL_LIMITS, far_block_rows=64)


def retained(folder: Path) -> None:
    """A folder whose first segments and queue files retention has let go."""
    broker = opened(folder, FORGETFUL, FORGETFUL_LIMITS)
    broker.put_topic(TOPIC, T0, read_queue_count=1, write_queue_count=1)
    for i in range(40):
        send(broker, T0 + i, *[message(b"x" * 1_000, due=T0 + 200 + i) for _ in range(10)])
    advance(broker, T0 + SECOND_MS)
    for i in range(2):
        send(broker, T0 + 2 * SECOND_MS + i, message("between"))
        snapshot(broker)
    assert broker.retain(T0 + MINUTE_MS) > 3
    for i in range(20):
        send(broker, T0 + MINUTE_MS + i, *[message(b"y" * 1_000, due=T0 + MINUTE_MS + 100) for _ in range(10)])
    advance(broker, T0 + 2 * MINUTE_MS)
    broker.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    lived(folder / "lived")
    retained(folder / "retained")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may hurt."""
    return Path(shutil.copytree(made / "lived", tmp_path / "lived"))


@pytest.fixture
def old_folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "retained", tmp_path / "retained"))


def flip(path: Path, position: int) -> None:
    """Changes one bit."""
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def change(path: Path, dtype: np.dtype, edit: Callable[[np.ndarray], None]) -> None:
    """Changes rows of a file."""
    rows = np.fromfile(path, dtype)
    edit(rows)
    path.write_bytes(rows.tobytes())


def position_of(path: Path, text: bytes) -> int:
    position = path.read_bytes().find(text)
    assert position >= 0, f"{text!r} is not in {path}"
    return position


def assert_found(report: Report, *sentences: str) -> None:
    """One finding has all of these."""
    assert not report.ok
    assert any(all(sentence in finding for sentence in sentences) for finding in report.findings), report.findings


# -- clean folders ----------------------------------------------------------------------------------------------


def test_a_folder_that_has_seen_everything_is_ok(folder: Path) -> None:
    report = check(folder)
    assert report.findings == []
    assert report.ok
    assert report.numbers["messages in the log"] == 96
    assert report.numbers["messages in chunks"] == 3
    assert report.numbers["snapshots equal to the log"] == 2
    assert report.numbers["bytes of torn tail"] == 0
    assert report.numbers["rows that the next start makes again"] == 0


def test_a_folder_that_retention_has_shortened_is_ok_and_folded_from_the_older_snapshot(old_folder: Path) -> None:
    assert not (old_folder / ENTRIES).exists()
    report = check(old_folder)
    assert report.findings == []
    assert report.numbers["snapshots equal to the log"] == 1
    assert 0 < report.numbers["batches applied anew"] < report.numbers["batches"]


def long_queue(folder: Path) -> Broker:
    """A queue of several files, of entries and of times, and two snapshots."""
    broker = opened(folder, FORGETFUL, FORGETFUL_LIMITS)
    broker.put_topic(TOPIC, T0, read_queue_count=1, write_queue_count=1)
    for i in range(150):
        send(broker, T0 + i, message(b"x" * 1_000), message(b"x" * 1_000))
    for i in range(2):
        send(broker, T0 + SECOND_MS + i, message(b"x" * 1_000))
        snapshot(broker)
    return broker


def test_what_retention_took_after_the_newest_snapshot_is_no_damage(tmp_path: Path) -> None:
    broker = long_queue(tmp_path)
    assert broker.retain(T0 + MINUTE_MS) > 0
    broker.abandon()
    assert not (tmp_path / ENTRIES).exists()
    assert not (tmp_path / TIMES).exists()
    report = check(tmp_path)
    assert report.findings == []
    assert report.numbers["rows whose record is gone"] > 0


def test_segments_that_are_back_after_retention_and_a_power_loss_are_no_damage(tmp_path: Path) -> None:
    broker = long_queue(tmp_path / "data")
    shutil.copytree(tmp_path / "data/log", tmp_path / "log")
    assert broker.retain(T0 + MINUTE_MS) > 0
    send(broker, T0 + MINUTE_MS, message("after"))
    broker.close()  # its snapshot syncs the queues' folders, not the log's
    for path in (tmp_path / "log").iterdir():
        if not (tmp_path / "data/log" / path.name).exists():
            shutil.copy(path, tmp_path / "data/log" / path.name)
    assert check(tmp_path / "data").findings == []


def test_a_snapshot_of_a_version_without_moves_and_ids_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved._state

    def earlier(fold: Fold) -> dict[str, Any]:
        found = {name: value for name, value in state(fold).items() if name not in ("moved", "once")}
        return found | {"tombstones": [entry[:9] for entry in found["tombstones"]]}

    monkeypatch.setattr(saved, "_state", earlier)
    broker = opened(tmp_path)
    broker.put_topic(TOPIC, T0)
    send(broker, T0, message(unique="k", due=T0 + FAR_MS))
    cancel(broker, "k", T0 + FAR_MS, T0)
    broker.close()
    monkeypatch.undo()
    assert check(tmp_path).findings == []
    broker = opened(tmp_path)
    assert (broker.fold.moves.count, broker.fold.cancels.at(T0 + FAR_MS)[0].only) == (0, -1)
    broker.close()
    assert check(tmp_path).findings == []


def test_an_empty_folder_of_ours_is_ok(tmp_path: Path) -> None:
    opened(tmp_path).close()
    assert check(tmp_path).ok


def test_a_crash_leaves_nothing_to_find(folder: Path) -> None:
    broker = opened(folder)
    for i in range(30):
        send(broker, CHUNK_DUE + 60 + i, message(f"unsaved {i}"))
    broker.abandon()  # the last rows are in memory only

    report = check(folder)
    assert report.findings == []
    assert report.numbers["rows that the next start makes again"] > 0


def test_rows_that_a_crash_left_behind_the_snapshot_are_no_damage(folder: Path) -> None:
    broker = opened(folder)
    send(broker, CHUNK_DUE + 60, *[message(f"unsaved {i}") for i in range(30)])
    broker.abandon()
    change(folder / ENTRIES, ENTRY, lambda rows: rows["offset"].__setitem__(-1, 7))

    report = check(folder)
    assert report.findings == []
    assert report.numbers["rows that the next start makes again"] >= 1


def test_a_torn_tail_is_counted(folder: Path) -> None:
    broker = opened(folder)
    ticket = send(broker, CHUNK_DUE + 60, message("torn"))
    broker.abandon()
    flip(folder / "log" / FIRST_FILE, ticket.end - 30)

    report = check(folder)
    assert report.findings == []
    assert report.numbers["bytes of torn tail"] > 90


def test_a_message_that_came_when_the_clock_was_back_may_stand_behind_a_later_one(tmp_path: Path) -> None:
    broker = opened(tmp_path)
    broker.put_topic(TOPIC, T0, read_queue_count=1, write_queue_count=1)
    send(broker, T0, message("first", due=T0 + 1_000))
    advance(broker, T0 + 1_000)
    send(broker, T0 + 500, message("second", due=T0 + 600))
    advance(broker, T0 + 2_000)
    broker.close()
    assert check(tmp_path).findings == []


@pytest.mark.parametrize("made_by", [lived, retained])
def test_check_changes_no_byte_and_no_time(tmp_path: Path, made_by: Callable[[Path], None]) -> None:
    made_by(tmp_path)
    (tmp_path / "log" / f"{1 << 30:020d}.new").write_bytes(b"a preparation that a crash cut short")
    before = {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in tmp_path.rglob("*")}
    assert check(tmp_path).ok
    after = {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in tmp_path.rglob("*")}
    before.pop(tmp_path / "LOCK")
    after.pop(tmp_path / "LOCK")
    assert after == before


def test_a_running_broker_is_not_checked(folder: Path) -> None:
    broker = opened(folder)
    with pytest.raises(FolderInUse):
        check(folder)
    broker.abandon()


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ForeignFolder):
        check(tmp_path)
    with pytest.raises(ForeignFolder):
        check(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_newer_version_is_refused(folder: Path) -> None:
    text = (folder / "FORMAT").read_text()
    (folder / "FORMAT").write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(ForeignFolder, match="newer"):
        check(folder)


# -- damage to the log ------------------------------------------------------------------------------------------


@pytest.fixture
def hurt_body(folder: Path) -> tuple[Path, int]:
    """The segment and the position in it of a body."""
    segment = folder / "log" / FIRST_FILE
    return segment, position_of(segment, b"the body to be hurt")


def test_a_flipped_bit_in_a_body_is_found_and_the_rest_is_still_checked(
    folder: Path, hurt_body: tuple[Path, int]
) -> None:
    batches = check(folder).numbers["batches"]
    flip(*hurt_body)
    report = check(folder)
    assert_found(report, f"log/{FIRST_FILE}, offset", "checksum", "was on disk")
    assert report.numbers["batches"] == batches - 1


@pytest.mark.parametrize("field", [0, 8, 16, 24, 40])
def test_a_flipped_bit_in_a_batch_header_is_found(folder: Path, hurt_body: tuple[Path, int], field: int) -> None:
    segment, body = hurt_body
    header = segment.read_bytes().rfind(b"PDB1", 0, body)
    flip(segment, header + field)
    assert_found(check(folder), f"log/{FIRST_FILE}, offset {header} (byte {header} of the file)")


def test_a_flipped_bit_in_a_row_is_found(folder: Path, hurt_body: tuple[Path, int]) -> None:
    segment, body = hurt_body
    header = segment.read_bytes().rfind(b"PDB1", 0, body)
    flip(segment, header + 48 + 8)
    assert_found(check(folder), f"log/{FIRST_FILE}, offset {header}", "checksum")


def test_a_segment_that_lost_its_end_is_found(folder: Path) -> None:
    segment = folder / "log" / FIRST_FILE
    segment.write_bytes(segment.read_bytes()[:3_001])
    report = check(folder)
    assert_found(report, f"log/{FIRST_FILE} has 3001 bytes")
    assert_found(report, "though everything before")


def test_an_emptied_segment_is_found(folder: Path) -> None:
    (folder / "log" / FIRST_FILE).write_bytes(b"")
    assert_found(check(folder), f"log/{FIRST_FILE} has 0 bytes")


def test_a_missing_segment_that_is_needed_is_found(old_folder: Path) -> None:
    segments = sorted((old_folder / "log").iterdir())
    segments[1].unlink()
    assert_found(check(old_folder), f"log/{segments[1].name}", "missing")


def test_a_format_that_no_broker_would_write_is_found(folder: Path) -> None:
    text = (folder / "FORMAT").read_text()
    (folder / "FORMAT").write_text(text.replace("65536", "65537", 1))
    assert_found(check(folder), "FORMAT: segment_bytes is 65537, expected a power of two")


# -- damage to queues, times, far rows --------------------------------------------------------------------------


def test_a_flipped_bit_in_a_queue_entry_is_found(folder: Path) -> None:
    flip(folder / ENTRIES, 3 * ENTRY.itemsize)
    report = check(folder)
    assert_found(report, f"{ENTRIES}, row 3 (byte 60 of the file)", "the log gives")
    assert_found(report, f"{TOPIC}, queue 0, entry 3 ({ENTRIES}, byte 60)", "where no record begins")


def test_a_flipped_size_is_found(folder: Path) -> None:
    flip(folder / ENTRIES, 3 * ENTRY.itemsize + 8)
    assert_found(check(folder), f"{TOPIC}, queue 0, entry 3", "bytes, at")


def test_a_flipped_tag_is_found(folder: Path) -> None:
    flip(folder / ENTRIES, 3 * ENTRY.itemsize + 12)
    assert_found(check(folder), f"{TOPIC}, queue 0, entry 3", "tag hash")


def test_a_flipped_bit_in_the_times_is_found(folder: Path) -> None:
    flip(folder / TIMES, TIME.itemsize)
    assert_found(check(folder), f"{TIMES}, row 1 (byte 16 of the file)", "the log gives")


def test_times_that_do_not_ascend_are_found(folder: Path) -> None:
    change(folder / TIMES, TIME, lambda rows: rows["at_ms"].__setitem__(2, 5))
    assert_found(check(folder), f"{QUEUE}/times, row 2", "instant 5 is not behind")


def test_times_that_do_not_cover_the_queue_are_found(folder: Path) -> None:
    change(folder / TIMES, TIME, lambda rows: rows["offset"].__setitem__(0, 1))
    assert_found(check(folder), f"{QUEUE}/times", "do not cover")


def test_a_flipped_bit_in_a_far_row_is_found(folder: Path) -> None:
    flip(folder / "far" / FIRST_FILE, 8)
    report = check(folder)
    assert_found(report, f"far/{FIRST_FILE}, row 0", "the log gives")
    assert_found(report, "far row 0", "does not fit the record")


def test_a_block_of_rows_before_the_snapshots_is_compared_with_its_checksum(old_folder: Path) -> None:
    file = sorted((old_folder / QUEUE / "times").iterdir())[0]
    flip(file, 8)
    assert_found(check(old_folder), file.name, "checksum")


def with_keys(folder: Path) -> Path:
    """A folder with some blocks of the index."""
    broker = opened(folder)
    broker.put_topic(TOPIC, T0, read_queue_count=1, write_queue_count=1)
    send(broker, T0, *[message("x", unique=f"u{i}", keys=f"k{i} l{i}") for i in range(50)])
    broker.close()
    assert check(folder).ok
    return folder


def test_a_flipped_bit_in_a_row_of_the_index_is_found(tmp_path: Path) -> None:
    folder = with_keys(tmp_path)
    flip(folder / "index" / FIRST_FILE, 3)
    report = check(folder)
    assert_found(report, f"index/{FIRST_FILE}, row 0 (byte 0 of the file)", "the log gives")
    assert_found(report, f"index/{FIRST_FILE}", "checksum")


def test_a_removed_file_of_the_index_is_found(tmp_path: Path) -> None:
    folder = with_keys(tmp_path)
    (folder / "index" / FIRST_FILE).unlink()
    assert_found(check(folder), f"index/{FIRST_FILE} has 0 bytes, 1024 are needed")


def test_a_row_that_says_other_keys_than_its_record_is_found() -> None:
    def message_row(flags: int, keys: str) -> str:
        properties = encode_properties({"KEYS": keys})
        record = records.decode(records.encode(Message("t", b"", properties), b"t", 0, T0, LOOPBACK))
        row = (MESSAGE, 0, flags, 0, 0, 0, key_hash("a"), 0, 0, 0, 0)
        return message_problem(record, row, T0)

    assert message_row(0, "a") == message_row(MORE_KEYS, "a b") == ""
    assert "no more keys" in message_row(0, "a b")
    assert "more keys than the first" in message_row(MORE_KEYS, "a ")


def test_a_queue_file_cut_short_is_found(folder: Path) -> None:
    data = (folder / ENTRIES).read_bytes()
    (folder / ENTRIES).write_bytes(data[:-30])
    assert_found(check(folder), f"{ENTRIES} has {len(data) - 30} bytes, {len(data)} are needed")


def test_a_removed_queue_file_is_found(folder: Path) -> None:
    (folder / TIMES).unlink()
    assert_found(check(folder), f"{TIMES} has 0 bytes")


@pytest.mark.parametrize("lost", [ENTRIES, TIMES])
def test_a_removed_first_file_is_found_where_retention_has_taken_nothing(tmp_path: Path, lost: str) -> None:
    long_queue(tmp_path).close()
    (tmp_path / lost).unlink()
    assert_found(check(tmp_path), f"{lost} has 0 bytes")


def test_two_swapped_entries_are_found_to_be_out_of_order(folder: Path) -> None:
    def swap(rows: np.ndarray) -> None:
        rows[[4, 30]] = rows[[30, 4]]

    change(folder / ENTRIES, ENTRY, swap)
    report = check(folder)
    assert_found(report, f"{ENTRIES}, row 4", "the log gives")
    assert_found(report, f"{TOPIC}, queue 0, entry 5", "stands behind a message that is due later")


def test_a_duplicated_entry_is_found(folder: Path) -> None:
    change(folder / ENTRIES, ENTRY, lambda rows: rows.__setitem__(9, rows[8]))
    assert_found(check(folder), f"{TOPIC}, queue 0, entry 9", "stands at", "entry 8", "too")


def test_a_message_shown_too_early_is_found(folder: Path) -> None:
    def show_early(rows: np.ndarray) -> None:
        rows["at_ms"][1] -= 1

    change(folder / TIMES, TIME, show_early)
    assert_found(check(folder), f"{TOPIC}, queue 0, entry 2", "it became visible at", "before its due")


def test_an_entry_of_another_topic_is_found(folder: Path) -> None:
    brief = np.fromfile(folder / "queues/20/entries" / FIRST_FILE, ENTRY)
    change(folder / ENTRIES, ENTRY, lambda rows: rows.__setitem__(0, brief[0]))
    assert_found(check(folder), f"{TOPIC}, queue 0, entry 0", "is of another topic")


def test_a_level_entry_with_another_due_is_found(folder: Path) -> None:
    flip(folder / "queues/1/entries" / FIRST_FILE, 12)
    assert_found(check(folder), "SCHEDULE_TOPIC_XXXX, queue 1, entry 0", "does not fit the message")


# -- damage to chunks and snapshots -----------------------------------------------------------------------------


def test_a_flipped_bit_in_a_chunks_index_is_found(folder: Path) -> None:
    flip(folder / "chunks/window-1", 64)
    assert_found(check(folder), "chunks/window-1", "index")


def test_a_flipped_bit_in_a_chunks_record_is_found(folder: Path) -> None:
    flip(folder / "chunks/window-1", position_of(folder / "chunks/window-1", b"far 1"))
    assert_found(check(folder), "chunks/window-1", "records")


def test_a_missing_chunk_is_found(folder: Path) -> None:
    (folder / "chunks/window-1").unlink()
    # All of it is fired, so to the snapshots it looks like a chunk that retention has let go. The log alone needs it.
    for path in (folder / "snapshots").iterdir():
        path.unlink()
    assert_found(check(folder), "the batch cannot be applied: CorruptChunk", "chunks/window-1 is missing")


def newest_snapshot(folder: Path) -> int:
    return snapshots.positions(RealDisk(folder))[0]


def test_a_flipped_bit_in_a_snapshot_is_found(folder: Path) -> None:
    path = folder / snapshots.path_of(newest_snapshot(folder))
    flip(path, position_of(path, b'"lead_ms"'))
    assert_found(check(folder), f"snapshots/{path.name}, byte", "damaged")


def test_a_flipped_bit_in_a_snapshots_slots_is_found(folder: Path) -> None:
    path = folder / snapshots.path_of(newest_snapshot(folder))
    (slots,) = slots_of(folder)
    flip(path, position_of(path, slots) + 30)
    assert_found(check(folder), f"snapshots/{path.name}, byte", "damaged")


def slots_of(folder: Path) -> list[bytes]:
    sections = snapshots.read(RealDisk(folder), newest_snapshot(folder))
    return [section.data for section in sections if section.kind == snapshots.SLOTS]


def rewrite(folder: Path, edit: Callable[[snapshots.Section], bytes]) -> None:
    """Writes the newest snapshot anew, whole and with good checksums, but with other content."""
    position = newest_snapshot(folder)
    sections = snapshots.read(RealDisk(folder), position)
    writer = snapshots.Writer(RealDisk(folder), position)
    for section in sections:
        writer.write(section.kind, edit(section))
    writer.finish()


def test_slots_that_are_not_what_the_log_gives_are_found(folder: Path) -> None:
    def lose_one(section: snapshots.Section) -> bytes:
        if section.kind != snapshots.SLOTS:
            return section.data
        return section.data[: -SINGLE.itemsize] + bytes(SINGLE.itemsize)

    rewrite(folder, lose_one)
    assert_found(check(folder), "snapshots/", f"the slot due at {CHUNK_DUE + 20 * SECOND_MS}")


def test_a_state_that_is_not_what_the_log_gives_is_found(folder: Path) -> None:
    rewrite(folder, lambda section: section.data.replace(b'"lead_ms":60000', b'"lead_ms":60001'))
    assert_found(check(folder), "snapshots/", "lead_ms is 60001, the log gives 60000")


def test_totals_of_the_table_that_are_not_what_the_log_gives_are_found(folder: Path) -> None:
    rewrite(folder, lambda section: section.data.replace(b'"rows_in":0,', b'"rows_in":9,'))
    assert_found(check(folder), "snapshots/", "far rows_in is 9, the log gives 0")


def test_a_batch_that_was_wiped_before_the_newest_snapshot_is_found(folder: Path) -> None:
    newest = newest_snapshot(folder)
    log = folder / "log" / FIRST_FILE
    data = bytearray(log.read_bytes())
    last = data.rfind(b"PDB1", 0, newest)
    data[last:newest] = bytes(newest - last)
    log.write_bytes(data)
    assert_found(check(folder), f"log/{FIRST_FILE}, offset {last}", "nothing is written here")


def test_without_any_usable_snapshot_a_shortened_log_is_found(old_folder: Path) -> None:
    for path in (old_folder / "snapshots").iterdir():
        flip(path, 0)
    assert_found(check(old_folder), "no snapshot can be used and the log begins at")


def test_many_findings_of_one_kind_are_counted(folder: Path) -> None:
    change(folder / ENTRIES, ENTRY, lambda rows: rows["size"].__setitem__(slice(None), 1))
    report = check(folder)
    assert_found(report, "more behind it")
    assert len(report.findings) < 20


# -- the order, against a plain loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(50))
def test_overtaken_is_what_a_loop_over_all_pairs_says(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randrange(0, 40)
    rank = np.array(dice.sample(range(count), count), np.int64)
    low = np.array([dice.randrange(0, place + 1) for place in range(count)], np.int64)
    expected = [any(rank[a] > rank[b] for a in range(low[b], b)) for b in range(count)]
    assert overtaken(rank, low).tolist() == expected

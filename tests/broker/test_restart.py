"""Snapshots and restarts: the state after them is the state before them."""

import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest

from postdate.broker.broker import Broker
from postdate.broker.writing import Writer
from postdate.errors import UsageError
from postdate.message import Cancelled
from postdate.state import saved
from postdate.storage import snapshot as snapshots
from postdate.storage.disk import RealDisk
from tests.support.core import (
    FAR_MS,
    HOUR_MS,
    LEAD_MS,
    SMALL,
    SMALL_LIMITS,
    T0,
    TOPIC,
    Data,
    advance,
    advance_to,
    bodies,
    cancel,
    message,
    registered,
    send,
    send_each,
    snapshot,
    stage,
    upload,
)


def busy(data: Data, broker: Broker) -> None:
    """Something of every kind: visible, near, far, cancelled, levels, staged, rescued, tables."""
    broker.put_topic("second", T0, read_queue_count=3, write_queue_count=3)
    broker.put_group("g", {"a": 1}, T0)
    broker.put_group("brief", {}, T0)
    broker.delete_group("brief", T0)
    broker.commit_offsets("g", [(TOPIC, 0, 1)], T0)
    broker.values.put("n", "kept", "x", T0)
    broker.values.put("n", "brief", "x", T0)
    broker.values.delete("n", "brief", T0)
    due = T0 + FAR_MS
    send(broker, T0, *[message(f"now{n}", tag="t") for n in range(10)])
    send(broker, T0, *[message(f"near{n}", unique=f"n{n}", due=T0 + 1_000 + n % 3) for n in range(10)])
    far = [message(f"far{n}", unique=f"f{n}", due=due + n % 3) for n in range(10)]
    send(broker, T0, *far)
    send(broker, T0, *[message(f"level{n}", topic="second", queue_id=n, DELAY=str(n + 1)) for n in range(3)])
    cancel(broker, "n4", T0 + 1_001, T0 + 1)
    cancel(broker, "f4", due + 1, T0 + 2)
    epoch = registered(broker, T0 + 3)
    upload(broker, data, "c1", far[:6], list(range(6)))
    stage(broker, epoch, 6, due + 2, ["c1"], T0 + 4)
    cancel(broker, "f3", due, T0 + 5)
    advance(broker, T0 + 1_001)
    advance(broker, due - LEAD_MS)


@pytest.mark.parametrize("ending", ["crash", "close", "snapshot and crash"])
def test_a_restart_finds_the_same_state(data: Data, ending: str) -> None:
    broker = data.open()
    busy(data, broker)
    if ending == "snapshot and crash":
        snapshot(broker)
        send(broker, T0 + FAR_MS - LEAD_MS, message("after", due=T0 + FAR_MS + 7))
    state = saved.state_json(broker.fold)
    (data.close if ending == "close" else data.crash)(broker)

    broker = data.open()
    assert saved.state_json(broker.fold) == state
    advance_to(broker, T0 + FAR_MS - LEAD_MS, T0 + FAR_MS + 10)
    expected = {f"now{n}" for n in range(10)} | {f"near{n}" for n in range(10) if n != 4}
    expected |= {f"far{n}" for n in range(10) if n not in (3, 4)}
    found = [body for body in bodies(broker) if body != "after"]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_a_restart_after_every_flush_finds_the_same_state(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = data.open()
    copies: list[tuple[Path, str]] = []
    flush = Writer.flush

    def flush_and_copy(self: Writer) -> None:
        flush(self)
        folder = tmp_path / f"copy{len(copies)}"
        shutil.copytree(data.folder, folder)
        copies.append((folder, saved.state_json(broker.fold)))

    monkeypatch.setattr(Writer, "flush", flush_and_copy)
    busy(data, broker)
    monkeypatch.undo()
    assert len(copies) >= 15
    for folder, state in copies:
        again = Broker(RealDisk(folder), SMALL, limits=SMALL_LIMITS)
        assert saved.state_json(again.fold) == state, "from the log alone"
        snapshot(again)
        again.abandon()
        again = Broker(RealDisk(folder), SMALL, limits=SMALL_LIMITS)
        assert saved.state_json(again.fold) == state, "from a snapshot"
        again.abandon()


def test_a_snapshot_in_steps_holds_the_state_of_its_first_step(data: Data) -> None:
    broker = data.open(dataclasses.replace(SMALL, due_second_messages_max=1_000))
    due = T0 + 5_000
    for n in range(20):
        send(broker, T0, message(f"near{n}", unique=f"k{n}", due=due + n))
    send(broker, T0, message("far", unique="far", due=T0 + FAR_MS))

    steps = broker.snapshot()
    at_ms = T0 + 1
    for number, step in enumerate(steps):
        if step is not None:
            step()
        if number == 0:
            broker.put_topic("new", at_ms, read_queue_count=2, write_queue_count=2)
            send(broker, at_ms, message("new", topic="new", queue_id=1, due=due + 3))
            assert cancel(broker, "k5", due + 5, at_ms) == Cancelled.CANCELLED
            assert cancel(broker, "far", T0 + FAR_MS, at_ms) == Cancelled.CANCELLED
            broker.put_group("g", {}, at_ms)
            broker.commit_offsets("g", [(TOPIC, 0, 3)], at_ms)
            advance(broker, due + 2)
        send(broker, due + 2, message(f"step{number}", due=due + 7))
    state = saved.state_json(broker.fold)
    data.crash(broker)

    broker = data.open(dataclasses.replace(SMALL, due_second_messages_max=1_000))
    assert json.loads(saved.state_json(broker.fold)) == json.loads(state)
    assert broker.fold.wheel.count > 0
    advance_to(broker, due + 2, T0 + HOUR_MS)
    assert bodies(broker, "new", 1) == ["new"]
    assert "near5" not in bodies(broker)
    assert "far" not in bodies(broker)


def test_a_long_list_lies_in_several_sections_and_survives_a_restart(data: Data) -> None:
    broker = data.open()
    count = 2 * saved.ITEMS_PER_SECTION + 1
    for n in range(count):
        broker.cancel(TOPIC, f"k{n}", T0 + FAR_MS + n, T0)
    broker.flush()
    state = saved.state_json(broker.fold)
    snapshot(broker)
    sections = snapshots.read(data.disk, broker.fold.position)
    parts = [section.json() for section in sections if section.kind == snapshots.STATE]
    lengths = [len(part["tombstones"]) for part in parts if "tombstones" in part]
    assert lengths == [saved.ITEMS_PER_SECTION, saved.ITEMS_PER_SECTION, 1]
    data.crash(broker)
    broker = data.open()
    assert saved.state_json(broker.fold) == state
    assert broker.fold.cancels.count == count


def test_only_one_snapshot_is_taken_at_a_time_and_none_for_nothing(data: Data) -> None:
    broker = data.open()
    steps = broker.snapshot()
    next(steps)
    with pytest.raises(UsageError, match="being taken already"):
        next(broker.snapshot())
    steps.close()  # type: ignore[attr-defined]
    snapshot(broker)
    assert len(data.disk.list("snapshots")) == 1
    snapshot(broker)
    assert len(data.disk.list("snapshots")) == 1, "nothing has happened since"
    for n in range(3):
        send(broker, T0, message(str(n)))
        snapshot(broker)
    assert len(data.disk.list("snapshots")) == 2


def test_a_snapshot_is_due_by_bytes_or_by_batches(data: Data) -> None:
    broker = data.open(
        dataclasses.replace(SMALL, snapshot_bytes=4_096), dataclasses.replace(SMALL_LIMITS, snapshot_batches=5)
    )
    snapshot(broker)
    due = []
    for _ in range(5):
        send(broker, T0, message())
        due.append(broker.snapshot_is_due)
    assert due == [False, False, False, False, True]
    snapshot(broker)
    due = [broker.snapshot_is_due]
    send(broker, T0, message(bytes(4_000)))
    due.append(broker.snapshot_is_due)
    assert due == [False, True]


def test_a_snapshot_that_fails_leaves_nothing_behind_and_the_next_one_works(data: Data) -> None:
    broker = data.open()
    send(broker, T0, message("kept", due=T0 + 100))
    for call in ("write", "sync", "rename"):
        data.disk.fault = lambda name, path, call=call: (  # type: ignore[misc]
            OSError(errno.ENOSPC, "No space left") if name == call and path.startswith("snapshots/") else None
        )
        with pytest.raises(OSError, match="No space left"):
            snapshot(broker)
        data.disk.fault = lambda _call, _path: None
        assert data.disk.list("snapshots") == [], f"a failed {call} costs no room"
    snapshot(broker)
    assert len(data.disk.list("snapshots")) == 1
    advance(broker, T0 + 100)
    assert bodies(broker) == ["kept"]


def test_a_damaged_snapshot_is_replaced_by_the_older_one_and_the_log(data: Data) -> None:
    broker = data.open()
    for n in range(3):
        send(broker, T0 + n, message(str(n)))
        snapshot(broker)
    send(broker, T0 + 9, message("last"))
    state = saved.state_json(broker.fold)
    data.crash(broker)
    newest = data.folder / "snapshots" / data.disk.list("snapshots")[-1]
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)

    broker = data.open()
    assert saved.state_json(broker.fold) == state
    good = data.disk.list("snapshots")[0]
    send(broker, T0 + 10, message("more"))
    snapshot(broker)
    assert good in data.disk.list("snapshots"), "a damaged one is not one of the two that are kept"
    newest.unlink(missing_ok=True)


def test_without_any_snapshot_the_log_alone_is_enough(data: Data) -> None:
    broker = data.open()
    busy(data, broker)
    snapshot(broker)
    state = saved.state_json(broker.fold)
    data.crash(broker)
    for name in data.disk.list("snapshots"):
        data.disk.remove(f"snapshots/{name}")
    assert saved.state_json(data.open().fold) == state


def test_a_damaged_queue_file_is_made_again_from_the_log(data: Data) -> None:
    broker = data.open()
    snapshot(broker)
    send_each(broker, T0, [message(str(n)) for n in range(100)])
    snapshot(broker)
    number = broker.fold.topics.get(TOPIC).numbers[0]
    data.crash(broker)
    path = data.folder / "queues" / str(number) / "entries" / f"{64:020d}"
    path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    broker = data.open()
    assert bodies(broker) == [str(n) for n in range(100)]

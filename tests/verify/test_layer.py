"""The layer between real processes and their files: what a power loss takes, and the faults that it causes.

Child processes write in a folder as our processes do, and end by kill -9. Synced changes must always be there; of
unsynced changes some dice lose all, some keep all, and some keep a part.
"""

import ast
import errno
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postdate.clock import SystemClock
from postdate.errors import UsageError
from postdate.wire import codes
from tests.support.peer import LONG_POLL_MS, Closed, make_topic, pull, read_bodies, send_command, sent
from verify.faults import power
from verify.faults.control import BROKER, BULK, PIPELINE
from verify.faults.inside import OTHER, role_of
from verify.faults.layer import Layer, Point, fault_points, flip_bit
from verify.faults.points import WRITTEN_BY_BULK, Turns, points_of
from verify.faults.process import Broker

ROOT = Path(__file__).parents[2]
CHILD_S = 60.0
BEGIN = """
import os, signal, sys
from pathlib import Path
from verify.faults import inside

inside.install(Path(os.environ[inside.LAYER]), os.environ["ROLE"])

def opened(name):
    return os.open(name, os.O_RDWR | os.O_CREAT, 0o644)

def write(name, data, position=0):
    file = opened(name)
    os.pwrite(file, data, position)
    os.close(file)

def sync(name):
    file = os.open(name, os.O_RDONLY)
    os.fsync(file)
    os.close(file)

"""
END = "\nos.kill(os.getpid(), signal.SIGKILL)\n"


class Watched:
    """A folder that a layer watches."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.data.mkdir(parents=True)
        self.own = folder / "layer"
        self.layer = Layer(self.own, [self.data])

    def begin(self, script: str, role: str = PIPELINE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", BEGIN + script], cwd=self.data, text=True, stdout=subprocess.PIPE,
            env={**os.environ, **self.layer.environment(), "ROLE": role},
        )  # fmt: skip

    def run(self, script: str, role: str = PIPELINE) -> str:
        """Runs a script in a process that kills itself at the end; returns its output."""
        with self.begin(script + END, role) as child:
            said, _ = child.communicate(timeout=CHILD_S)
        assert child.returncode == -signal.SIGKILL, said
        return said

    def lose(self, seed: int = 0, mode: str = "") -> dict[str, bytes]:
        """Loses power; returns the files that are left."""
        self.layer.lose_power(random.Random(seed), mode)
        return self.files()

    def files(self) -> dict[str, bytes]:
        paths = (path for path in self.data.rglob("*") if path.is_file())
        return {str(path.relative_to(self.data)): path.read_bytes() for path in paths}


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def worlds(folder: Path, script: str, count: int) -> Iterator[dict[str, bytes]]:
    """The files that different dice leave after the same script."""
    for seed in range(count):
        watched = Watched(folder / str(seed))
        watched.run(script)
        yield watched.lose(seed)


# -- what a power loss takes ------------------------------------------------------------------------------------


def test_only_synced_changes_are_left_if_everything_else_is_lost(watched: Watched) -> None:
    watched.run("""
write("grown", b"synced")
sync("grown")
write("grown", b"more", 6)
write("changed", bytes(4096))
sync("changed")
write("changed", b"x" * 100, 1000)
write("cut", b"0123456789")
sync("cut")
os.truncate("cut", 3)
write("renamed", b"old")
write("renamed.new", b"new")
write("removed", b"is back")
sync("renamed"), sync("renamed.new"), sync("removed")
sync(".")
write("nameless", b"synced, but not its name")
sync("nameless")
os.replace("renamed.new", "renamed")
os.remove("removed")
""")
    assert watched.files()["renamed"] == b"new"
    assert watched.lose(mode=power.ALL) == {
        "grown": b"synced", "changed": bytes(4096), "cut": b"0123456789", "renamed": b"old", "renamed.new": b"new",
        "removed": b"is back",
    }  # fmt: skip


def test_files_from_before_the_journal_are_on_disk(watched: Watched) -> None:
    watched.run('write("file", b"12"); os.mkdir("folder"); write("folder/file", b"34")')
    watched.layer.renew()
    watched.run('write("file", b"xx"); os.remove("folder/file")')
    assert watched.lose(mode=power.ALL) == {"file": b"12", "folder/file": b"34"}


def test_what_one_power_loss_leaves_the_next_one_leaves_too(watched: Watched) -> None:
    watched.run('write("file", b"synced"); sync("file"); sync("."); write("file", b"SYNCED"); write("lost", b"1")')
    left = watched.lose(3, power.SOME)
    watched.run('write("file", b"x")')
    assert watched.lose(mode=power.ALL) == left


def test_each_write_has_its_own_fate_and_may_be_torn_by_sectors(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    script = """
write("file", b"s" * 8192); sync("file"); sync(".")
write("file", b"a" * 2000, 100); write("file", b"b" * 100, 4000)
"""
    for left in worlds(tmp_path, script, 40):
        data = left["file"]
        first, second = data[100:2100], data[4000:4100]
        assert data[:100] + data[2100:4000] + data[4100:] == b"s" * (8192 - 2100)
        sectors = [data[max(100, at) : min(2100, at + 512)] for at in range(0, 2100, 512)]
        assert all(set(sector) in ({ord("a")}, {ord("s")}) for sector in sectors), "a sector is whole"
        whole = {b"a" * 2000: "kept", b"s" * 2000: "lost"}.get(first, "torn")
        outcomes[f"{whole}, then {'kept' if second == b'b' * 100 else 'lost'}"] += 1
    assert set(outcomes) == {f"{one}, then {two}" for one in ("kept", "lost", "torn") for two in ("kept", "lost")}


def test_the_first_changes_of_names_stay(tmp_path: Path) -> None:
    script = """
write("a", b"1"); write("b", b"2"); write("c", b"3"); [sync(name) for name in "abc"]; sync(".")
os.rename("a", "b"); os.remove("c"); write("d", b"")
"""
    found = {tuple(sorted(left.items())) for left in worlds(tmp_path, script, 20)}
    states = [
        {"a": b"1", "b": b"2", "c": b"3"}, {"b": b"1", "c": b"3"}, {"b": b"1"}, {"b": b"1", "d": b""},
    ]  # fmt: skip
    assert found == {tuple(sorted(state.items())) for state in states}


def test_some_losses_take_only_the_last_changes(watched: Watched) -> None:
    watched.run('write("file", bytes(30)); sync("file"); sync(".")\nfor at in range(30): write("file", b"x", at)')
    data = watched.lose(5, power.LAST)["file"]
    assert data[:22] == b"x" * 22
    assert 0 < data.count(0) <= 8


def test_a_write_during_a_sync_is_not_synced_by_it(watched: Watched) -> None:
    watched.run("""
file = opened("file")
real = inside._real["fsync"]
def slow(descriptor):
    os.pwrite(file, b"late", 8)
    real(descriptor)
inside._real["fsync"] = slow
os.pwrite(file, b"in time ", 0)
sync("file")
inside._real["fsync"] = real
sync(".")
""")
    assert watched.lose(mode=power.ALL) == {"file": b"in time "}


def test_two_syncs_of_a_folder_at_once_keep_what_the_later_one_has_synced(watched: Watched) -> None:
    """While the first one is in the kernel, another thread makes a file and syncs the folder, too."""
    watched.run("""
import threading

def make_and_sync():
    write("made", b"meanwhile")
    sync("made")
    sync(".")

fsync = inside._real["fsync"]

def slow(descriptor):
    inside._real["fsync"] = fsync
    other = threading.Thread(target=make_and_sync, daemon=True)
    other.start()
    other.join(0.5)  # it ends at once, unless it waits for us
    fsync(descriptor)
    after.append(other)

after = []
write("first", b"before")
inside._real["fsync"] = slow
sync(os.getcwd())
after[0].join()
""")
    assert watched.lose(mode=power.ALL) == {"first": b"", "made": b"meanwhile"}


def test_an_unsynced_folder_is_lost_with_its_files(watched: Watched) -> None:
    watched.run('os.mkdir("folder"); write("folder/file", b"1"); sync("folder/file"); sync("folder")')
    assert watched.lose(mode=power.ALL) == {}
    assert not (watched.data / "folder").exists()


def test_only_a_new_write_brings_back_what_a_failed_sync_has_lost(watched: Watched) -> None:
    script = """
write("file", b"12345678"); sync("file"); sync(".")
write("file", b"abcd"); write("file", b"efgh", 4)
control.failing_syncs = 1
try: sync("file")
except OSError as error: print(error.errno)
{again}
sync("file")
"""
    control = "control = inside.Control(Path(os.environ[inside.LAYER]) / inside.CONTROL)"
    assert watched.run(control + script.format(again="")) == f"{errno.EIO}\n"
    assert watched.lose(mode=power.ALL) == {"file": b"12345678"}
    watched.run(control + script.format(again='write("file", b"abcd")'))
    assert watched.lose(mode=power.ALL) == {"file": b"abcd5678"}


def test_two_processes_share_a_journal(watched: Watched) -> None:
    script = """
for number in range(200):
    write("own" + str(os.getpid()), b"%04d" % number, 4 * number)
    sync("own" + str(os.getpid()))
sync(".")
write("own" + str(os.getpid()), b"lost")
"""
    children = [watched.begin(script + END) for _ in range(2)]
    for child in children:
        with child:
            child.wait(CHILD_S)
    left = watched.lose(mode=power.ALL)
    whole = b"".join(b"%04d" % number for number in range(200))
    assert [data for name, data in left.items() if name.startswith("own")] == [whole] * 2


def test_a_torn_record_of_the_journal_is_skipped(watched: Watched) -> None:
    """A process may be killed while it appends: then the recorded change has not happened."""
    watched.run("""
write("file", b"synced"); sync("file"); sync(".")
from verify.faults import journal

def torn(descriptor, parts):
    os.write(descriptor, b"".join(parts)[:-5])
    os.kill(os.getpid(), signal.SIGKILL)

journal._writev = torn
write("file", b"never!")
""")
    assert watched.files() == {"file": b"synced"}
    watched.run('write("file", b"SYNC"); sync("file"); write("file", b"x"); os.remove("file")')
    assert watched.lose(mode=power.ALL) == {"file": b"SYNCed"}


def test_a_rename_whose_process_died_before_it_has_not_happened(tmp_path: Path) -> None:
    script = """
write("file.new", b"1"); sync("file.new"); sync(".")
inside._real["rename"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
os.rename("file.new", "file")
"""
    assert all(left == {"file.new": b"1"} for left in worlds(tmp_path, script, 5))


def test_files_that_others_write_are_judged_by_their_last_sync(tmp_path: Path) -> None:
    """Python's `open` stands for other writers here: the layer does not see the bytes that it writes."""
    script = """
file = open("file", "wb", buffering=0)
file.write(b"synced.\\n" * 100)
os.fdatasync(file.fileno())
sync(".")
file.write(b"not yet\\n" * 100)
open("nameless", "w").close()
"""
    synced, whole = b"synced.\n" * 100, b"synced.\n" * 100 + b"not yet\n" * 100
    outcomes = Counter[str]()
    for left in worlds(tmp_path, script, 24):
        data = left["file"]
        assert data.startswith(synced)
        outcomes["nameless" if "nameless" in left else "no name"] += 1
        if len(data) == len(whole):
            outcomes["whole" if data == whole else "zeros"] += 1
            assert data in (whole, synced.ljust(len(whole), b"\0"))
        else:
            outcomes["synced" if data == synced else "cut"] += 1
            assert whole.startswith(data)
    assert set(outcomes) == {"nameless", "no name", "whole", "zeros", "synced", "cut"}


def test_a_rename_by_other_writers_is_kept_whole_or_lost(tmp_path: Path) -> None:
    script = """
write("one", b"1"); sync("one"); os.mkdir("three"); sync(".")
inside._real["rename"]("one", "two"); inside._real["rename"]("three", "four")
"""
    found = {
        (*sorted(left), *(name for name in ("three", "four") if (tmp_path / str(seed) / "data" / name).exists()))
        for seed, left in enumerate(worlds(tmp_path, script, 30))
    }
    assert found == {(file, folder) for file in ("one", "two") for folder in ("three", "four")}


def test_a_layer_on_another_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another file system"):
        Layer(tmp_path / "layer", [Path("/proc")])


# -- faults -----------------------------------------------------------------------------------------------------


def test_a_process_ends_at_a_named_point(watched: Watched) -> None:
    script = """
from postdate.faultpoint import reach
for number in range(5):
    print(number, flush=True)
    reach("batch.begun")
"""
    watched.layer.kill_at(Point("batch.begun", PIPELINE), times=3)
    assert watched.run(script).split() == ["0", "1", "2"]
    assert watched.layer.hit == Point("batch.begun", PIPELINE)
    assert len(watched.run(script).split()) == 5, "once is enough"
    for point in ("batch.done", Point("batch.begun", BULK)):
        watched.layer.kill_at(point)
        assert len(watched.run(script).split()) == 5
        assert watched.layer.hit is None
    watched.layer.kill_at("batch.begun")
    watched.layer.disarm()
    assert len(watched.run(script).split()) == 5


def test_the_first_of_several_points_that_is_reached_counts(watched: Watched) -> None:
    script = """
from postdate.faultpoint import reach
for name in ("batch.begun", "stage.call", "stage.called", "batch.done"):
    print(name, flush=True)
    reach(name)
"""
    points = [Point("batch.done", PIPELINE), Point("stage.call", PIPELINE), Point("stage.called", BULK)]
    watched.layer.kill_at(*points)
    assert watched.run(script).split() == ["batch.begun", "stage.call"]
    assert watched.layer.hit == Point("stage.call", PIPELINE)
    watched.layer.kill_at(*points, times=2)
    watched.run(script)
    assert watched.layer.hit == Point("batch.done", PIPELINE), "a longer name, or another process, is another point"
    watched.layer.kill_at(*fault_points())
    assert watched.run(script).split() == ["batch.begun"], "there is room for all of them"


def test_every_point_gets_its_turn() -> None:
    dice, turns = random.Random(3), Turns()
    never = Point("segment.remove", BROKER)
    for _ in range(300):
        points = turns.next(dice)
        reached = [point for point in points if point != never]
        if reached:
            turns.note_hit(dice.choice(reached))
        else:
            turns.note_missed(points)
    assert turns.all - turns.hit == {never}
    assert all(never in turns.next(dice) for _ in range(10)), "what had no turn is always among them"
    assert len(turns.next(dice)) > 1, "beside others, which come again"
    turns.note_hit(never)
    assert turns.hit == turns.all


def test_a_turn_is_for_one_process() -> None:
    dice, turns = random.Random(3), Turns()
    chosen = [{point.process for point in turns.next(dice)} for _ in range(30)]
    assert all(len(each) == 1 for each in chosen)
    assert set.union(*chosen) == {BROKER, BULK, PIPELINE}, "what comes seldom has as many turns as what comes often"
    assert {point.process for point in Turns([BROKER]).all} == {BROKER}


def test_a_broker_ends_at_a_point_of_its_log(watched: Watched) -> None:
    watched.layer.kill_at("log.flush")
    script = 'from postdate.faultpoint import reach; reach("log.flush"); print("not reached")'
    assert watched.run(script, BROKER) == ""
    assert watched.layer.hit == Point("log.flush", BROKER)


def test_as_many_syncs_fail_as_asked_for(watched: Watched) -> None:
    watched.layer.fail_syncs(2)
    said = watched.run("""
write("file", b"1")
for _ in range(3):
    try: print(sync("file"))
    except OSError as error: print(error.errno)
""")
    assert said.split() == [str(errno.EIO), str(errno.EIO), "None"]
    assert watched.layer.failing_syncs == 0


def test_a_full_disk_accepts_writes_that_need_no_room(watched: Watched) -> None:
    watched.layer.limit_space(10_000)
    said = watched.run("""
def tried(call, *arguments):
    try: call(*arguments); print("taken")
    except OSError as error: print(error.errno)

found = os.statvfs(".")
print(found.f_bavail * found.f_frsize <= 10_000)
write("file", bytes(8_000))
tried(write, "file", bytes(2_001), 8_000)
tried(write, "file", b"x" * 8_000)
tried(write, "file", bytes(2_000), 8_000)
tried(open("other", "wb", buffering=0).write, b"1")
tried(write, "other", b"1")
os.remove("file")
tried(write, "other", bytes(10_000))
""")
    assert said.split() == ["True", "28", "taken", "taken", "28", "28", "taken"]
    assert watched.layer.space_left == 0
    watched.layer.limit_space(None)
    assert watched.run('write("file", bytes(20_000)); print(os.statvfs(".").f_bavail > 5)') == "True\n"


def test_a_step_of_the_clock_leaves_elapsed_time_alone(watched: Watched) -> None:
    watched.layer.offset_ms = 3_600_000
    watched.layer.step_clock(-600_000)
    clock = SystemClock()
    begun_ms, begun_ns = clock.now_ms(), clock.elapsed_ns()
    said = watched.run(
        "from postdate.clock import SystemClock; print(SystemClock().now_ms(), SystemClock().elapsed_ns())"
    )
    now_ms, elapsed_ns = map(int, said.split())
    assert begun_ms + 3_000_000 <= now_ms <= clock.now_ms() + 3_000_000
    assert begun_ns <= elapsed_ns <= clock.elapsed_ns()


def test_a_bit_flips_and_flips_back(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(1_000))
    (tmp_path / "small").write_bytes(bytes(1))
    (tmp_path / "empty").touch()
    counts = Counter[str]()
    for seed in range(100):
        flip = flip_bit(tmp_path, random.Random(seed))
        counts[flip.path.name] += 1
        assert flip.path.read_bytes()[flip.position] == 1 << flip.bit
        flip.undo()
        assert not any(flip.path.read_bytes())
    assert 5 < counts["small"] < 50 < counts["large"]


# -- which processes, which points ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m postdate up --data x", BROKER), ("python -X dev -m postdate bulk", BULK),
        ("python -m postdate pipeline", PIPELINE), ("python /usr/bin/postdate up", BROKER),
        ("python -m postdate check", OTHER), ("python -m pyspark.daemon pyspark.worker", PIPELINE),
        ("python -m pyspark.sql.streaming.python_streaming_source_runner", PIPELINE),
        ("python -m postdate.spark.pending.extract", PIPELINE), ("python -c postdate", None), ("python", None),
        ("python -m pip install postdate", None), ("python script.py -m postdate up", None),
    ],
)  # fmt: skip
def test_the_role_of_a_process_follows_from_its_command(command: str, role: str | None) -> None:
    assert role_of(command.split()) == role


def test_a_point_names_the_process_that_reaches_it() -> None:
    points = fault_points()
    assert points == sorted(points)
    assert {
        Point("log.flushed", BROKER), Point("log.append.written", BROKER), Point("snapshot.done", BROKER),
        Point("chunk.written", BULK), Point("chunk.remove", BULK), Point("chunk.remove", BROKER),
        Point("selection.synced", BULK), Point("table.committed", PIPELINE), Point("chunk.upload", PIPELINE),
    } <= set(points)  # fmt: skip
    assert {point.process for point in points} == {BROKER, BULK, PIPELINE}
    assert {point.name for point in points if point.process == BULK} >= WRITTEN_BY_BULK, "one of them is gone"
    files = [path for folder in ("spark", "table") for path in (ROOT / "postdate" / folder).rglob("*.py")]
    names = {name for path in files for name in points_of(ast.parse(path.read_text(encoding="utf-8")))}
    assert names == {point.name for point in points if point.process == PIPELINE}


# -- a broker ---------------------------------------------------------------------------------------------------

BUSY = {
    "segment_bytes": 1 << 16, "batch_bytes_max": 1 << 14, "queue_file_rows": 64, "queue_tail_rows": 16,
    "snapshot_bytes": 1 << 18,
}  # fmt: skip
POINTS = [point for point in fault_points() if point.process == BROKER]
SEEDS, SENDS, UNDER_WAY = range(10), 600, 24


def test_a_power_loss_takes_no_acknowledged_message(tmp_path: Path) -> None:
    """The broker is killed at a fault point or anywhere else, with sends in flight."""
    layer = Layer(tmp_path / "layer", [tmp_path / "data"])
    broker = Broker(tmp_path, layer.environment(), **BUSY)
    broker.start()
    peer = broker.peer()
    make_topic(peer, "orders")
    peer.close()
    acknowledged: set[str] = set()
    losses: list[str] = []
    for seed in SEEDS:
        dice = random.Random(seed)
        # First with something written and not yet synced, for certain.
        layer.kill_at(dice.choice(POINTS) if seed else Point("log.flush", BROKER), times=dice.randint(1, 20))
        acknowledged |= send_until_killed(broker, str(seed), dice)
        layer.disarm()
        broker.kill()
        losses += layer.lose_power(dice, "" if seed else power.ALL)
        assert broker.check() == [], f"seed {seed}: {losses}"
        broker.start()
        found = seen(broker)
        assert len(found) == len(set(found)), f"seed {seed}: {losses}"
        assert acknowledged <= set(found), f"seed {seed}: {losses}"
    broker.stop()
    assert broker.check() == []
    assert len(acknowledged) > 500
    assert any("/log/" in line and "lost" in line for line in losses), "the tail of the log was lost at times"


def test_an_async_broker_may_lose_what_it_acknowledged(tmp_path: Path) -> None:
    """The counterexample: if the log is not synced, the same test notices the loss."""
    layer = Layer(tmp_path / "layer", [tmp_path / "data"])
    broker = Broker(tmp_path, layer.environment(), flush="async", flush_interval_ms=60_000)
    broker.start()
    peer = broker.peer()
    make_topic(peer, "orders")
    sent(peer, "orders")
    peer.close()
    broker.kill()
    layer.lose_power(random.Random(0), power.ALL)
    assert broker.check() == []
    broker.start()
    assert seen(broker) == []
    broker.stop()


def send_until_killed(broker: Broker, name: str, dice: random.Random) -> set[str]:
    """Sends until the broker ends by itself or has taken enough; returns the acknowledged messages."""
    peer, acknowledged = broker.peer(), set()
    waiting: dict[int, str] = {}
    try:
        for number in range(SENDS):
            body = f"{name}-{number} ".ljust(dice.choice((20, 700, 3_000)), "x")
            delay: dict[str, Any] = {"TIMER_DELAY_MS": dice.choice((1, 100))} if dice.random() < 0.3 else {}
            command = send_command(peer, "orders", body, **delay)
            waiting[command.opaque] = body
            peer.write(command)
            if number == SENDS - 1:
                os.kill(broker.pid, signal.SIGKILL)
            while len(waiting) > (UNDER_WAY if number < SENDS - 1 else 0):
                answer = peer.next_answer()
                body = waiting.pop(answer.opaque)
                if answer.code == codes.SUCCESS:
                    acknowledged.add(body)
    except (Closed, ConnectionError):
        pass  # it is dead: what it has not answered it has not promised
    peer.close()
    return acknowledged


def seen(broker: Broker) -> list[str]:
    """All messages in the queues, after all delays are over."""
    peer = broker.peer()
    make_topic(peer, "last")
    sent(peer, "last", TIMER_DELAY_MS=200)
    while not read_bodies(peer, "last"):
        pull(peer, "last", wait_ms=LONG_POLL_MS)
    make_topic(peer, "orders")  # where that is lost, too
    found = read_bodies(peer, "orders")
    peer.close()
    return found

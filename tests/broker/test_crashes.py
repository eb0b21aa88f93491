"""Crashes at every named fault point, power lost under an async broker, bits that flip in the log.

A fault point is a name given to `reach`. The story below comes to every point of storage and state; the tests kill it
there, start the broker again and go on with the story, and the model of the simulation judges the end.
"""

import ast
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from postdate.broker.broker import Broker
from postdate.check import check_folder
from postdate.errors import CorruptLog
from postdate.message import Message, encode_properties
from postdate.storage import snapshot as snapshots
from postdate.storage.log import Log
from postdate.storage.segment import Segments
from verify.faults.points import points_of, points_of_the_core
from verify.simulation import FaultPoints, Killed, Op, VirtualDisk, World
from verify.simulation.site import LIMITS, SETTINGS, START_MS, with_settings

# Of the times that a story comes to a point, spread evenly, the first and the last among them; more in scripts/full.
KILLS_PER_POINT, KILLS_PER_POINT_FULL = 5, 20
POWER_SEEDS = range(3)
FLIPS = 200

NOW, NEAR, FAR = Op("send", (0, 0, 1, 0, 8)), Op("send", (3, 1_000, 1, 1, 8)), Op("send", (3, 8_000, 1, 2, 8))
ONCE = Op("send_once", (0, 0, 0, 0, 0))
FLUSH = Op("flush")
STORY = (
    # Messages of every kind, and cancels of a near and of a far one.
    NOW, NEAR, FAR, FLUSH, Op("cancel", (9, 0)), Op("cancel", (17, 0)), FLUSH,
    # A pipeline takes some of them and brings them back.
    Op("register"), Op("read", (4,)), Op("snapshot", (1,)), Op("stage", (20_000,)),
    # A job cancels what waits of a key: selected, decided, followed.
    FAR, FLUSH, Op("job", (0, 3, 0)), FLUSH, *[Op("work", (100,)), FLUSH] * 3, Op("stage", (0,)), Op("select", (4,)),
    Op("work", (100,)), FLUSH, Op("stage", (20_000,)),
    # Enough for several segments, then time passes, and the pipeline is away.
    *[NOW, NEAR, FLUSH] * 4, FAR, Op("commit", (0, 3)), Op("pass", (10_000,)), Op("snapshot", (2,)),
    Op("send", (3, 8_000, 2, 3, 3)), FLUSH, Op("kill"), Op("pass", (40_000,)),
    # Retention removes a chunk and segments.
    *[NOW] * 4, FLUSH, Op("snapshot", (3,)), NEAR, Op("pass", (40_000,)), Op("snapshot", (4,)), Op("retain"),
    # Bulk stands in for the pipeline, also for what no batch has taken in.
    Op("import", (0, 8_000, 1, 0, 3)), Op("adopt", (0,)), FLUSH, Op("bulk", (20_000,)),
    # A torn tail, a clean stop.
    *[Op("send", (0, 0, 1, 0, count)) for count in (3, 2, 2)], ONCE, Op("power", (2,)), NEAR, ONCE, FLUSH, Op("close"),
    # An id is known after all that.
    ONCE,
    Op("pass", (2_000,)),
)  # fmt: skip


class DeadlyWorld(World):
    """A world that dies at the n-th passing of a point, counted over all its lives."""

    def __init__(self, point: str = "", times: int = 0, power_seed: int | None = None) -> None:
        self._deadly, self._power_seed = (point, times), power_seed
        self._armed = False
        self.deaths = 0
        super().__init__()

    def _start(self) -> None:
        point, times = self._deadly
        while True:
            left = times - self.points.reached.count(point)
            self._armed = left >= 0
            self.points.kill_at = (point, left) if self._armed else None
            try:
                super()._start()
            except Killed:  # behind the opening, where topics are made
                self._note_death()
                self.site.stop()
                self.points.disarm()
                self.disk.kill()
            else:
                self._note_death()  # the opening itself may have been killed and done again
                return

    def _crash(self, power_seed: int | None, then: Callable[[], None] | None = None) -> None:
        self._note_death()
        super()._crash(self._power_seed if power_seed is None else power_seed, then)

    def _note_death(self) -> None:
        if self._armed and self.points.kill_at is None:
            self._armed = False
            self.deaths += 1


def told(world: World) -> World:
    for op in STORY:
        world.run(op)
    return world


# ------------------------------------------------------------------------------------------- the points of the source


POINTS = sorted(points_of_the_core())


def test_points_are_found_in_a_source() -> None:
    source = """
class A:
    def f(self, point, data):
        reach(point)
        reach(point + ".written")
    def g(self):
        self.f("one", 1)
        reach("two")
"""
    assert sorted(points_of(ast.parse(source))) == ["one", "one.written", "two"]
    for unknown in ('reach(f"{x}")', "reach(x)", "self.f(x, 1)"):
        with pytest.raises(AssertionError):
            list(points_of(ast.parse(source.replace('reach("two")', unknown))))


# ----------------------------------------------------------------------------------------------- killed at every point


@pytest.fixture(scope="module")
def reached() -> dict[str, int]:
    """How often the story, undisturbed, comes to each point."""
    world = told(World())
    counts = Counter(world.points.reached)
    world.finish()
    return counts


def test_the_story_comes_to_every_point_of_the_source(reached: dict[str, int]) -> None:
    assert len(POINTS) >= 21
    assert set(reached) == set(POINTS)


def occasions(count: int, kills: int) -> list[int]:
    """Which of `count` passings to die at."""
    return sorted({index * (count - 1) // max(kills - 1, 1) for index in range(kills)})


@pytest.mark.parametrize("ending", ["the process is killed", "power is lost"])
@pytest.mark.parametrize("point", POINTS)
def test_no_promise_is_broken_when_it_ends_at(point: str, ending: str, reached: dict[str, int]) -> None:
    die(point, ending, occasions(reached[point], KILLS_PER_POINT))


@pytest.mark.full
@pytest.mark.parametrize("ending", ["the process is killed", "power is lost"])
@pytest.mark.parametrize("point", POINTS)
def test_no_promise_is_broken_however_often_it_ends_at(point: str, ending: str, reached: dict[str, int]) -> None:
    die(point, ending, occasions(reached[point], KILLS_PER_POINT_FULL))


def die(point: str, ending: str, passings: list[int]) -> None:
    for times in passings:
        world = DeadlyWorld(point, times, power_seed=times if ending == "power is lost" else None)
        try:
            told(world).finish()
        except Exception as error:
            raise AssertionError(f"{point}, passing {times}: {error}") from error
        assert world.deaths == 1, f"{point}, passing {times}: it did not die there"


# -------------------------------------------------------------------------- power lost under an async broker's snapshot


def message(number: int, delay_ms: int) -> Message:
    properties = {"UNIQ_KEY": f"U{number}"} | ({"TIMER_DELAY_MS": str(delay_ms)} if delay_ms else {})
    return Message("orders", f"m{number}".encode(), encode_properties(properties), 0)


def async_steps(disk: VirtualDisk) -> Iterator[None]:
    """An async broker that flushes nothing by itself, sends all the time, and takes two snapshots in the meantime."""
    broker = Broker(disk, with_settings(flush="async"), limits=replace(LIMITS, unflushed_bytes_max=1 << 20))
    broker.put_topic("orders", START_MS, read_queue_count=2, write_queue_count=2)
    numbers = itertools.count()

    def work(at_ms: int) -> None:
        broker.send([message(next(numbers), delay_ms) for delay_ms in (0, 100, 8_000)], at_ms)
        broker.advance(at_ms)

    for round_number in range(2):
        now = START_MS + round_number * 10_000
        for step in range(12):
            work(now + step * 50)
            yield
        for step, blocking in enumerate(broker.snapshot()):
            if blocking is not None:
                blocking()
                yield
            if step % 10 == 0:
                work(now + 1_000 + step)
            yield
        broker.cancel("orders", "U2", START_MS + 8_000, now + 5_000)
        yield


def opens_clean(disk: VirtualDisk) -> None:
    """The folder opens, takes a message and checks clean: no snapshot is ahead of the log that is on disk."""
    broker = Broker(disk, with_settings(flush="async"), limits=LIMITS)
    for position in snapshots.positions(disk):
        assert position <= broker.log.end
    if "orders" in broker.fold.topics.by_name:
        broker.send([message(1_000_000, 0)], START_MS + 100_000)
    broker.close()
    findings = check_folder(disk).findings
    assert not findings, "\n".join(map(str, findings))


def test_power_lost_at_any_fault_point_of_an_async_broker_leaves_a_folder_that_opens() -> None:
    with FaultPoints() as points:
        for _ in async_steps(VirtualDisk()):
            pass
    assert points.reached.count("snapshot.done") == 2
    for killed_after in range(len(points.reached)):
        disk = VirtualDisk()
        with FaultPoints(kill_after=killed_after), pytest.raises(Killed):
            for _ in async_steps(disk):
                pass
        disk.lose_power(random.Random(killed_after))
        opens_clean(disk)


@pytest.mark.parametrize("power_seed", POWER_SEEDS)
def test_power_lost_between_any_two_steps_of_an_async_broker_leaves_a_folder_that_opens(power_seed: int) -> None:
    count = sum(1 for _ in async_steps(VirtualDisk()))
    for stop in range(0, count, 2):
        disk = VirtualDisk()
        for _ in itertools.islice(async_steps(disk), stop + 1):
            pass
        disk.lose_power(random.Random(power_seed * 10_000 + stop))
        opens_clean(disk)


# ------------------------------------------------------------------------------------------------- bits flip in the log


def folder(ending: str) -> VirtualDisk:
    """A folder that has been through the story."""
    world = told(World())
    broker = world.broker
    assert broker is not None
    if ending == "closed":
        broker.close()
    world.disk.kill()
    return world.disk.copy()


def known_durable(disk: VirtualDisk) -> int:
    """Up to where the files themselves say that everything was on disk: snapshots do, and batches of those before."""
    log = Log(disk, Segments(disk, SETTINGS.segment_bytes), 1 << 20)
    known = max(snapshots.positions(disk))
    return max(known, *(batch.durable for batch in log.scan(log.start, 0)))


def test_a_batch_knows_what_was_durable_before_it_whatever_the_snapshots_know() -> None:
    disk = folder("crashed")
    assert known_durable(disk) > max(snapshots.positions(disk))


@pytest.mark.parametrize("ending", ["closed", "crashed"])
def test_a_bit_that_flips_in_the_durable_log_is_never_silently_accepted(ending: str) -> None:
    disk = folder(ending)
    assert not check_folder(disk.copy()).findings
    durable = known_durable(disk)
    dice = random.Random(f"flips of a {ending} folder")
    segments = [name for name in disk.list("log") if int(name) < durable]
    assert len(segments) >= 2
    replayed = 0
    for _ in range(FLIPS):
        name = dice.choice(segments)
        bit = dice.randrange(min(durable - int(name), SETTINGS.segment_bytes) * 8)
        path, flipped = f"log/{name}", int(name) + bit // 8
        hurt = disk.copy()
        hurt.flip(path, bit)
        findings = [str(finding) for finding in check_folder(hurt.copy()).findings]
        assert any(path in finding for finding in findings), f"{path}, bit {bit}: check says {findings[:3]}"
        before = hurt.read(path, 0, SETTINGS.segment_bytes)
        if flipped < max(snapshots.positions(disk)):
            Broker(
                hurt, SETTINGS, limits=LIMITS
            ).abandon()  # what lies before the newest snapshot is read by check alone
        else:
            replayed += 1
            with pytest.raises(CorruptLog, match=rf"segment {path}, offset \d+ ") as raised:
                Broker(hurt, SETTINGS, limits=LIMITS)
            (offset,) = re.findall(r"offset (\d+) ", str(raised.value))
            assert int(offset) <= flipped, f"{path}, bit {bit}: {raised.value}"
        assert hurt.read(path, 0, SETTINGS.segment_bytes) == before, "nothing is repaired in silence"
    assert bool(replayed) == (ending == "crashed")

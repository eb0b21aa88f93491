"""The faults: each is done to a machine that serves, and ends with a machine that serves again.

A fault is a function of the scene. `TROUBLES` says how often each comes; by a seed they come in the same order, though
not at the same instants of the work.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from verify.faults.control import BROKER
from verify.faults.driver import Form, Lost, Sent, Wish
from verify.faults.history import History
from verify.faults.machine import Machine, Stuck, signal_to
from verify.faults.points import Turns
from verify.faults.remoting import Remoting
from verify.faults.workload import Crew

SERVES_S = 60.0
REACHED_S = 6.0  # for a step that comes by itself
BATCH_S = 25.0  # for one of a batch or a job
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


@dataclass
class Scene:
    machine: Machine
    crew: Crew
    history: History
    dice: Random
    pause_s_max: float  # of a process that is stopped
    turns: Turns
    probes: int = 0

    def wait(self, low_s: float, high_s: float) -> None:
        time.sleep(self.dice.uniform(low_s, high_s))

    def await_service(self) -> None:
        """The broker takes a message again, soon."""
        end = time.monotonic() + SERVES_S
        while time.monotonic() < end:
            self.machine.revive()
            if self._is_serving(self.machine.driver):
                return
            time.sleep(0.2)
        self.history.find("I1", f"after the fault no send was acknowledged for {SERVES_S:.0f} s")

    def _is_serving(self, driver: Remoting) -> bool:
        self.probes += 1
        wish = Wish(f"probe-{self.probes}", Form.NONE)
        try:
            producer = driver.producer()
        except Lost:
            return False
        try:
            self.history.sending([wish], "probe")
            answers = producer.send([wish])
            self.history.sent([wish], answers)
        finally:
            producer.close()
        return answers[0].outcome is Sent.ACKNOWLEDGED


# -- processes --------------------------------------------------------------------------------------------------------


def kill_broker(scene: Scene) -> None:
    scene.machine.kill()
    scene.wait(0, 2)
    scene.machine.start()


def kill_part(scene: Scene) -> None:
    """Of those beside the broker, which starts them again."""
    scene.machine.signal_part(scene.dice.choice(("bulk", "pipeline", "java", "worker")), signal.SIGKILL)
    scene.wait(0.5, 3)


def kill_at_a_point(scene: Scene) -> None:
    """At a named step; half of the time the power goes as well. Some steps come only where they are provoked: those of
    a batch when a minute has turned, those of a recovery when the broker is started.
    """
    points, layer = scene.turns.next(scene.dice), scene.machine.layer
    if any(point.process != BROKER for point in points):
        scene.machine.await_pipeline()  # one that was killed before is on its way, and would be waited for in vain
    layer.kill_at(*points, times=scene.dice.choice((1, 1, 2)))
    _await_hit(scene, REACHED_S)
    if layer.hit is None and scene.machine.with_pipeline:
        scene.machine.step_clock(MINUTE)
        _await_hit(scene, BATCH_S)
    if layer.hit is None:
        scene.machine.kill()
        _start_where_it_may_die(scene)
        _await_hit(scene, REACHED_S)
    layer.disarm()
    hit = layer.hit
    scene.history.note("point", armed=len(points), hit=hit)
    if hit is None:
        scene.turns.missed(points)
        return
    scene.turns.took(hit)
    if scene.dice.random() < 0.5:
        scene.machine.cut_power(scene.dice)


def _await_hit(scene: Scene, seconds: float) -> None:
    end = time.monotonic() + seconds
    while scene.machine.layer.hit is None and time.monotonic() < end:
        time.sleep(0.02)


def _start_where_it_may_die(scene: Scene) -> None:
    """A point may lie on the way to serving: then the second start passes it."""
    try:
        scene.machine.start()
    except Stuck:
        if scene.machine.layer.hit is None:
            raise
        scene.machine.start()


def pause(scene: Scene) -> None:
    part = scene.dice.choice(("broker", "broker", "bulk", "pipeline", "java"))
    pid = scene.machine.signal_part(part, signal.SIGSTOP)
    try:
        scene.wait(0.5, scene.pause_s_max * scene.dice.choice((0.1, 0.1, 0.3, 1.0)))
    finally:
        if pid:
            signal_to(pid, signal.SIGCONT)


def two_brokers(scene: Scene) -> None:
    scene.machine.second_broker()


def two_pipelines(scene: Scene) -> None:
    scene.machine.second_pipeline(scene.dice.uniform(10, 30))


# -- the disk ---------------------------------------------------------------------------------------------------------


def cut_power(scene: Scene) -> None:
    scene.machine.cut_power(scene.dice)


def fail_a_sync(scene: Scene) -> None:
    """A broker whose fsync failed takes nothing more until it is started again; the kernel has dropped the pages."""
    scene.machine.layer.fail_syncs(scene.dice.choice((1, 1, 3)))
    scene.wait(2, 5)
    scene.machine.layer.fail_syncs(0)
    if scene.dice.random() < 0.5:
        scene.machine.cut_power(scene.dice)
    else:
        scene.machine.kill()
        scene.machine.start()


def fill_the_disk(scene: Scene) -> None:
    scene.machine.layer.limit_space(scene.dice.choice((0, 0, 10_000, 1_000_000)))
    scene.wait(2, 8)
    scene.machine.layer.limit_space(None)


def flip_a_bit(scene: Scene) -> None:
    scene.machine.kill_all()
    what = [scene.machine.flip_a_bit(scene.dice) for _ in range(3)]
    scene.history.note("flips", what=what)
    scene.machine.start()


# -- time -------------------------------------------------------------------------------------------------------------


def jump_ahead(scene: Scene) -> None:
    """Now and then by about a day: what waits for days is merged in the table then."""
    is_day = scene.dice.random() < 0.25
    scene.machine.step_clock(int(scene.dice.uniform(0.5, 2) * DAY) if is_day else _span(scene.dice))


def jump_back(scene: Scene) -> None:
    """And some time later ahead again, a little further: else nothing would be due for as long."""
    span_ms = _span(scene.dice)
    scene.machine.step_clock(-span_ms)
    scene.wait(1, 6)
    scene.machine.step_clock(span_ms + scene.dice.randrange(3 * SECOND))


def _span(dice: Random) -> int:
    unit = dice.choice((SECOND, SECOND, MINUTE, HOUR))
    return int(unit * dice.uniform(0.5, 5))


# -- the network ------------------------------------------------------------------------------------------------------


def drop_connections(scene: Scene) -> None:
    for _ in range(scene.dice.randrange(1, 4)):
        scene.crew.drop(scene.dice)
        scene.wait(0.1, 1)


def read_slowly(scene: Scene) -> None:
    """Somebody asks for much and reads nothing of it."""
    with scene.machine.driver.slow_reader(count=200):
        scene.wait(2, 6)


class Trouble(NamedTuple):
    run: Callable[[Scene], None]
    weight: int
    needs_pipeline: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", " ")


TROUBLES = (
    Trouble(kill_broker, 4),
    Trouble(kill_part, 4, needs_pipeline=True),
    Trouble(kill_at_a_point, 12),
    Trouble(pause, 3),
    Trouble(cut_power, 4),
    Trouble(fail_a_sync, 2),
    Trouble(fill_the_disk, 2),
    Trouble(flip_a_bit, 1),
    Trouble(jump_ahead, 2),
    Trouble(jump_back, 2),
    Trouble(drop_connections, 2),
    Trouble(read_slowly, 1),
    Trouble(two_brokers, 1),
    Trouble(two_pipelines, 1, needs_pipeline=True),
)
# Again and again: steps of jobs and batches come by themselves, those of merges when days have passed.
AT_POINTS = tuple(Trouble(run, 1) for run in (kill_at_a_point, kill_at_a_point, kill_at_a_point, jump_ahead))


def chosen(dice: Random, with_pipeline: bool) -> Trouble:
    possible = [each for each in TROUBLES if with_pipeline or not each.needs_pipeline]
    return dice.choices(possible, [each.weight for each in possible])[0]

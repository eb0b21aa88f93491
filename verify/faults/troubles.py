"""The faults: each one disturbs a machine that serves, and ends with a machine that serves again.

A fault is a function of the scene. `TROUBLES` says how often each one happens. The same seed gives the same order of
faults, though not at the same instants of the work.
"""

import signal
import time
from collections.abc import Callable, Sequence
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
REACHED_S = 6.0  # for a point that is reached without further action
BATCH_S = 25.0  # for a point of a batch or a job
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


@dataclass
class Scene:
    """What a fault works with."""

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
        """Waits until the broker acknowledges a message again; records a violation if it does not in time."""
        end = time.monotonic() + SERVES_S
        while time.monotonic() < end:
            self.machine.revive()
            if self._is_serving(self.machine.driver):
                return
            time.sleep(0.2)
        self.history.note_finding("I1", f"after the fault no send was acknowledged for {SERVES_S:.0f} s")

    def _is_serving(self, driver: Remoting) -> bool:
        self.probes += 1
        wish = Wish(f"probe-{self.probes}", Form.NONE)
        try:
            producer = driver.producer()
        except Lost:
            return False
        try:
            self.history.note_sending([wish], "probe")
            answers = producer.send([wish])
            self.history.note_sent([wish], answers)
        finally:
            producer.close()
        return answers[0].outcome is Sent.ACKNOWLEDGED


# -- processes --------------------------------------------------------------------------------------------------------


def kill_broker(scene: Scene) -> None:
    scene.machine.kill()
    scene.wait(0, 2)
    scene.machine.start()


def kill_part(scene: Scene) -> None:
    """Kills bulk or a process of the pipeline; the broker starts them again."""
    scene.machine.signal_part(scene.dice.choice(("bulk", "pipeline", "java", "worker")), signal.SIGKILL)
    scene.wait(0.5, 3)


def kill_at_a_point(scene: Scene) -> None:
    """Kills at a fault point; half of the time power is lost as well. Some points need help to be reached: those of a
    batch need a new minute, those of a recovery a start of the broker.
    """
    points, layer = scene.turns.next(scene.dice), scene.machine.layer
    if any(point.process != BROKER for point in points):
        scene.machine.await_pipeline()  # one that was killed is still starting, and reaches no point
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
        scene.turns.note_missed(points)
        return
    scene.turns.note_hit(hit)
    if scene.dice.random() < 0.5:
        scene.machine.cut_power(scene.dice)


def _await_hit(scene: Scene, seconds: float) -> None:
    end = time.monotonic() + seconds
    while scene.machine.layer.hit is None and time.monotonic() < end:
        time.sleep(0.02)


def _start_where_it_may_die(scene: Scene) -> None:
    """The start itself may reach the point and die; the second start passes it."""
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


def keep_pipeline_away(scene: Scene) -> None:
    """Kills the pipeline as soon as the broker has started it again, for some minutes."""
    end = time.monotonic() + scene.dice.uniform(0.3, 1.5) * scene.pause_s_max
    while time.monotonic() < end:
        for part in ("pipeline", "java"):
            scene.machine.signal_part(part, signal.SIGKILL)
        time.sleep(0.5)


def stop_pipeline(scene: Scene) -> None:
    """Stops driver, Java and workers for some minutes: they neither work nor end."""
    pids = [pid for part in ("pipeline", "java", "worker") for pid in scene.machine.pids(part)]
    for pid in pids:
        signal_to(pid, signal.SIGSTOP)
    scene.wait(0.3 * scene.pause_s_max, 1.5 * scene.pause_s_max)
    for pid in pids:
        signal_to(pid, signal.SIGCONT)


def two_brokers(scene: Scene) -> None:
    scene.machine.second_broker()


def two_pipelines(scene: Scene) -> None:
    scene.machine.second_pipeline(scene.dice.uniform(10, 30))


# -- the disk ---------------------------------------------------------------------------------------------------------


def cut_power(scene: Scene) -> None:
    scene.machine.cut_power(scene.dice)


def fail_a_sync(scene: Scene) -> None:
    """Fails some syncs. The broker then accepts nothing until it is restarted; the kernel has dropped the pages."""
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
    """Now and then by about a day: then messages that wait for days are merged in the table."""
    is_day = scene.dice.random() < 0.25
    scene.machine.step_clock(int(scene.dice.uniform(0.5, 2) * DAY) if is_day else _span(scene.dice))


def jump_back(scene: Scene) -> None:
    """Steps back, and a little later ahead again: otherwise nothing would be due for that long."""
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
    """A client asks for a lot and reads none of it."""
    with scene.machine.driver.slow_reader(count=200):
        scene.wait(2, 6)


class Trouble(NamedTuple):
    """A fault, and how often it is chosen in comparison with others."""

    run: Callable[[Scene], None]
    weight: int
    needs_pipeline: bool = False
    is_excuse: bool = True  # for messages that are late

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
# In a loop: points of jobs and batches are reached all the time, those of merges after days.
AT_POINTS = tuple(Trouble(run, 1) for run in (kill_at_a_point, kill_at_a_point, kill_at_a_point, jump_ahead))


# For a world whose messages lie in the table alone: nobody may notice that the pipeline is away.
AWAY = (
    Trouble(keep_pipeline_away, 4, needs_pipeline=True, is_excuse=False),
    Trouble(stop_pipeline, 4, needs_pipeline=True, is_excuse=False),
    Trouble(kill_part, 1, needs_pipeline=True),
    Trouble(kill_broker, 1),
    Trouble(cut_power, 1),
    Trouble(kill_at_a_point, 2),
    Trouble(jump_ahead, 1),
)


def choose_trouble(troubles: Sequence[Trouble], dice: Random, with_pipeline: bool) -> Trouble:
    possible = [each for each in troubles if with_pipeline or not each.needs_pipeline]
    return dice.choices(possible, [each.weight for each in possible])[0]

"""Runs one history: a broker on a virtual disk and a manual clock, its clients, and a model that checks what they see.

A history is a list of Ops: a verb and whole numbers. Every verb may stand anywhere in a history, so that a failing one
can be shortened by leaving ops out. Everything random inside an op is derived from its numbers.

The world runs ops, lets the broker crash and start again, and reads the queues. The verbs are methods of those who use
the broker: producers, oncers, transactors, cancellers, movers, jobs, poppers, operators, pipelines, their stand-in, and
the timekeeper.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from postdate import faultpoint
from postdate.broker.broker import Broker
from postdate.broker.view import PullStatus
from postdate.check import check_folder
from postdate.config import Limits, Settings
from postdate.errors import DiskFull, LogFailed
from postdate.storage import record as records
from postdate.storage.segment import SPARE_COUNT
from postdate.testing import Killed
from verify.simulation.cancellers import Cancellers
from verify.simulation.jobs import Jobs
from verify.simulation.model import Broken
from verify.simulation.movers import Movers
from verify.simulation.oncers import Oncers
from verify.simulation.operators import Operators
from verify.simulation.pipelines import Pipelines
from verify.simulation.poppers import DEAD_LETTERS, Poppers
from verify.simulation.producers import Producers
from verify.simulation.site import LIMITS, SETTINGS, TOPICS, Site
from verify.simulation.stand_in import StandIn
from verify.simulation.timekeeper import Timekeeper
from verify.simulation.transactors import Transactors

_QUEUE_COUNTS = {**dict.fromkeys(TOPICS, 2), DEAD_LETTERS: 1}


class Op(NamedTuple):
    verb: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.verb}({', '.join(map(str, self.numbers))})"


class World:
    """Runs ops one after another; raises model.Broken where a promise is broken."""

    def __init__(self, settings: Settings = SETTINGS, limits: Limits = LIMITS) -> None:
        self.site = Site(settings, limits)
        self.disk, self.clock, self.model = self.site.disk, self.site.clock, self.site.model
        self.points = self.site.points
        self._producers = Producers(self.site)
        self._oncers = Oncers(self.site, self._producers)
        self._transactors = Transactors(self.site, self._producers)
        self._jobs = Jobs(self.site, self, self._producers)
        self._cancellers = Cancellers(self.site, self, self._producers, self._jobs)
        self._movers = Movers(self.site, self)
        self._poppers = Poppers(self.site, self)
        self._operators = Operators(self.site, self, self._poppers)
        self._timekeeper = Timekeeper(self.site, self, self._jobs)
        self._pipelines = Pipelines(self.site, self, self._timekeeper)
        self._stand_in = StandIn(self.site, self, self._timekeeper)
        self._spoilt: set[str] = set()  # damaged snapshots: the check may name them
        self._position_before = 0
        self.verbs: dict[str, Callable[..., None]] = {
            "send": self._producers.send,
            "resend": self._producers.resend,
            "send_once": self._oncers.send,
            "half": self._transactors.send_half,
            "end": self._transactors.end,
            "checks": self._transactors.take_checks,
            "cancel": self._cancellers.cancel,
            "ask_table": self._cancellers.ask_table,
            "move": self._movers.move,
            "begin_move": self._movers.begin,
            "end_move": self._movers.end,
            "find": self._operators.find,
            "commit": self._operators.commit,
            "resize": self._operators.resize,
            "delete": self._operators.delete,
            "job": self._jobs.ask,
            "import": self._jobs.load,
            "adopt": self._jobs.adopt,
            "fail": self._jobs.fail,
            "pop": self._poppers.pop,
            "ack": self._poppers.acknowledge,
            "change": self._poppers.change,
            "bury": self._poppers.bury,
            "fail_message": self._poppers.fail,
            "give_back": self._poppers.give_back,
            "pull": self._poppers.pull,
            "leave_queue": self._poppers.leave,
            "register": self._pipelines.register,
            "register_foreign": self._pipelines.register_foreign,
            "read": self._pipelines.read,
            "work": self._pipelines.work,
            "select": self._pipelines.select,
            "fail_tries": self._pipelines.fail_tries,
            "leave": self._pipelines.leave,
            "stage": self._pipelines.stage,
            "stage_again": self._pipelines.stage_again,
            "begin_stage": self._pipelines.begin_stage,
            "end_stage": self._pipelines.end_stage,
            "upload": self._pipelines.upload,
            "die": self._pipelines.die,
            "serve": self._pipelines.serve,
            "bulk": self._stand_in.promote,
            "begin_bulk": self._stand_in.begin,
            "end_bulk": self._stand_in.end,
            "away": self._stand_in.serve,
            "pass": self._timekeeper.let_pass,
            "advance": self._timekeeper.advance,
            "step": self._timekeeper.step,
            "flush": self.flush,
            "snapshot": self._take_snapshot,
            "retain": self._retain,
            "close": self._close,
            "kill": self._kill,
            "power": self._lose_power,
            "spoil": self._spoil_snapshot,
            "kill_soon": self._kill_soon,
            "fail_sync": self._fail_sync,
            "full": self._fill_disk,
            "room": self._make_room,
        }
        with self.points:
            self._start()

    @property
    def broker(self) -> Broker:
        return self.site.broker

    # -- running ------------------------------------------------------------------------------------------------

    def run(self, op: Op) -> None:
        with self.points:
            try:
                self.verbs[op.verb](*op.numbers)
                self._keep_spares()
            except Killed:
                self._crash(power_seed=None)
            except LogFailed as error:  # an operator restarts a broker that takes no more writes
                self.site.digest.note_error(error)
                self._crash(power_seed=None)
            self.look()

    def _keep_spares(self) -> None:
        """Prepares spare segments, as the helper thread of a running broker does."""
        with self.site.digest.suppress(DiskFull, OSError):
            while self.broker.log.spare_count < SPARE_COUNT:
                self.broker.log.prepare_segment()

    def finish(self) -> None:
        """Lets everything come due, reads all queues once more, and checks the folder."""
        self.points.disarm()
        self.disk.failing_syncs = 0
        self._make_room()
        self._transactors.end_all(self.flush)
        self._cancellers.ask_table()
        self._pipelines.hand_over()
        self._timekeeper.let_all_come_due()
        self.look(everything=True)
        self._operators.find_all()
        self._poppers.pop_the_rest()
        self.broker.close()
        self.site.stop()
        self.site.digest.note_disk(self.disk)
        self._check_folder()

    # -- looking ------------------------------------------------------------------------------------------------

    def look(self, *, everything: bool = False) -> None:
        """Takes in what clients see: answers, and every queue as a consumer reads it."""
        broker = self.broker
        self._producers.collect()
        self._oncers.collect()
        self._transactors.collect()
        self._movers.collect()
        self._poppers.collect()
        self._jobs.collect()
        self._check_table()
        for number, (topic, queue_id) in enumerate(broker.fold.topics.places):
            if topic in TOPICS and broker.fold.topics.by_name.get(topic) is not None:
                topic_numbers = broker.fold.topics.by_name[topic].numbers
                if queue_id < len(topic_numbers) and topic_numbers[queue_id] == number:
                    self._look_at(topic, queue_id, number, everything)
        self._jobs.judge()
        if self._cancellers.has_heard_all:  # else one flush may have answered a cancel, and the move that it foiled
            self._movers.judge()
        self._position_before = broker.fold.position

    def _look_at(self, topic: str, queue_id: int, number: int, everything: bool) -> None:
        broker = self.broker
        low, high = broker.offsets(topic, queue_id)
        self.site.digest.note("offsets", number, low, high)
        self.model.check_length(number, high)
        offset = low if everything else max(low, len(self.model.shown.get(number, [])))
        if offset > len(self.model.shown.get(number, [])):
            raise Broken(
                f"queue {number} begins at {offset}, a consumer has read only up to {len(self.model.shown[number])}"
            )
        while offset < high:
            pulled = broker.pull(topic, queue_id, offset, count_max=7)
            self.site.digest.note("pull", pulled.status, pulled.next_offset, pulled.body)
            if pulled.status is not PullStatus.FOUND:
                if pulled.next_offset <= offset:
                    raise Broken(f"a pull of queue {number} at {offset} gives {pulled.status} and does not move on")
                offset = pulled.next_offset
                continue
            for data in pulled.records:
                record = records.decode(data)
                self.model.look(number, record.queue_offset, [record.body.decode()], self._position_before)
            offset = pulled.next_offset

    def _check_table(self) -> None:
        """The fold knows how many rows the table must hold: so a pipeline can prove that it lost none."""
        far = self.broker.fold.far
        expected, held = far.rows_in - far.rows_out, len(self.site.table.waiting(self.broker))
        if expected != held:
            raise Broken(f"the table holds {held} rows that wait, the broker says {expected}")

    def hear(self) -> None:
        self.look()
        self._cancellers.collect()

    def flush(self) -> None:
        # One batch at a time, so that each cancel is judged against what was visible at its own place in the order.
        self.broker.log.flush()
        self.broker.settle()
        self.hear()
        self._transactors.judge()

    # -- crashes and restarts -----------------------------------------------------------------------------------

    def _start(self) -> None:
        self.site.start()
        for topic, count in _QUEUE_COUNTS.items():
            if not self.site.has_topic(topic):
                self.broker.put_topic(topic, self.clock.now_ms(), read_queue_count=count, write_queue_count=count)

    def _crash(self, power_seed: int | None, then: Callable[[], None] | None = None) -> None:
        """Ends the broker, checks its folder, calls `then` and starts the broker again."""
        self.site.stop()
        self._poppers.doubt()
        self._jobs.doubt()
        self._pipelines.doubt()
        self.points.disarm()
        if power_seed is None:
            self.disk.kill()
        else:
            self.disk.lose_power(random.Random(power_seed))
        self.site.digest.note_disk(self.disk)
        self._check_folder()
        if then is not None:
            then()
        self._start()
        self._producers.settle_doubts()
        self._oncers.settle_doubts()
        self._transactors.settle_doubts()
        self._movers.settle_doubts()
        self._cancellers.settle_doubts()
        self.look(everything=True)

    def _check_folder(self) -> None:
        """Checks the folder, after a crash or a clean end."""
        with faultpoint.listening(None):  # points of a check are not points of the broker
            found = check_folder(self.disk.copy()).findings
        self.site.digest.note("check", len(found))
        findings = [finding for finding in found if not finding.startswith(tuple(self._spoilt))]
        if findings:
            raise Broken("check: " + "; ".join(findings[:3]))

    def _close(self) -> None:
        """Stops the broker cleanly and starts it again."""
        self.flush()
        with self.site.digest.suppress(OSError):  # no room for the last snapshot: the next start replays more
            self.broker.close()
        self.site.stop()
        self.site.digest.note_disk(self.disk)
        self._start()
        self.look(everything=True)

    def _kill(self) -> None:
        self._crash(power_seed=None)

    def _lose_power(self, seed: int) -> None:
        """An async broker promises nothing after a power loss, so it is only killed."""
        self._crash(power_seed=None if self.site.settings.flush == "async" else seed)

    def _spoil_snapshot(self, bit: int) -> None:
        """Kills the process and damages the newest snapshot: the start uses the older one, or the whole log."""
        paths = [path for path in self.disk.paths() if path.startswith("snapshots/") and path[-1].isdecimal()]
        # With the last snapshot gone too, a start needs the whole log and every chunk.
        is_whole = self.broker.log.is_whole and self.site.staged_chunks <= set(self.disk.list("chunks"))
        spoilt = paths[-1] if len(paths) > 1 or (paths and is_whole) else None
        if spoilt is None:
            self._crash(power_seed=None)
        else:
            self._spoilt.add(spoilt)
            place = bit % (8 * self.disk.size(spoilt))
            self._crash(power_seed=None, then=lambda: self.disk.flip(spoilt, place))

    def _kill_soon(self, points: int) -> None:
        """Kills the process at the n-th fault point from here."""
        self.points.kill_after = points

    def _fail_sync(self) -> None:
        self.disk.failing_syncs = 1

    def _fill_disk(self, room_bytes: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes() + room_bytes

    def _make_room(self) -> None:
        self.disk.capacity_bytes = 1 << 40

    # -- snapshots and retention --------------------------------------------------------------------------------

    def _take_snapshot(self, other: int) -> None:
        """Takes a snapshot step by step; between steps the broker does other work, drawn from `other`."""
        dice = random.Random(other)
        with self.site.digest.suppress(OSError):
            for step in self.broker.snapshot():
                if step is not None:
                    step()
                if dice.random() < 0.3:
                    self._meanwhile(dice)

    def _meanwhile(self, dice: random.Random) -> None:
        choice = dice.randrange(4)
        if choice == 0:
            self._producers.send(
                dice.randrange(1, 5), dice.randrange(12_000), dice.randrange(4), dice.randrange(4), dice.choice((1, 8))
            )
        elif choice == 1:
            self._cancellers.cancel(dice.randrange(100), dice.randrange(2))
        elif choice == 2:
            self._timekeeper.move_to(self.clock.now_ms() + dice.randrange(3_000))
            self._timekeeper.advance()
        self.flush()

    def _retain(self) -> None:
        self.site.digest.note("retain", self.broker.retain(self.clock.now_ms()))
        self._poppers.note_gone()

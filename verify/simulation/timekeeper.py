"""Time: it passes as in normal life, the broker called whenever it has asked for it, or the clock jumps.

When time has passed and nothing is in the way, all that was due must have been seen.
"""

from postdate.arrival import NEVER
from postdate.errors import DiskFull
from verify.simulation.jobs import Jobs
from verify.simulation.model import Broken
from verify.simulation.site import Site, Watch


class Timekeeper:
    def __init__(self, site: Site, watch: Watch, jobs: Jobs) -> None:
        self._site = site
        self._watch = watch
        self._jobs = jobs

    def let_pass(self, span_ms: int) -> None:
        """Time passes in normal life: the server comes back whenever it was asked to."""
        until = self._site.now_ms() + span_ms
        while True:
            self._settle_down()
            wake = self._site.broker.wake_at_ms
            if wake > until:
                break
            self._move_towards(wake)
        self._end_at(until)

    def let_all_come_due(self) -> None:
        """Time passes until nothing waits any more."""
        for _ in range(10_000):
            self._settle_down()
            wake = self._site.broker.wake_at_ms
            if wake == NEVER:
                break
            self._move_towards(wake)
        self._end_at(max([self._site.now_ms(), *(m.due for m in self._site.model.messages.values())]))

    def _end_at(self, at_ms: int) -> None:
        self.move_to(at_ms)
        self._settle_down()
        self._check_complete()

    def _move_towards(self, wake: int) -> None:
        # A failed fire is tried again after its pause; in between the broker has nothing to do.
        self.move_to(max(wake, self._site.now_ms() + (1_000 if self._site.broker.fire_error else 1)))

    def move_to(self, at_ms: int) -> None:
        """Time passes, and the broker is not called."""
        if at_ms > self._site.now_ms():
            self._site.clock.pass_ms(at_ms - self._site.now_ms())
            self._note_clock()

    def _note_clock(self) -> None:
        self._site.model.clock_max = max(self._site.model.clock_max, self._site.now_ms())

    def _settle_down(self) -> None:
        """Advance and flush until there is nothing to do at this instant."""
        broker, now = self._site.broker, self._site.now_ms()
        for _ in range(100):
            self.advance()
            self._watch.flush()
            self._site.digest.note("wake", broker.wake_at_ms)
            if broker.wake_at_ms > now or broker.fire_error is not None:
                return
        raise Broken(f"after 100 rounds at {now} the broker still wants to be called at {broker.wake_at_ms}")

    def advance(self) -> None:
        """Fires what is due now, without a flush behind it."""
        broker, now_ms = self._site.broker, self._site.now_ms()
        try:
            broker.advance(now_ms)
            self._site.digest.note("advance", broker.paused_until_ms(now_ms) or broker.wake_at_ms)
        except DiskFull as error:
            self._site.digest.note_error(error)
            assert broker.fire_error is not None, "a failed fire can be seen"

    def step(self, span_ms: int) -> None:
        """The clock jumps."""
        self._site.clock.step_ms(span_ms)
        self._note_clock()

    def _check_complete(self) -> None:
        broker = self._site.broker
        if broker.fire_error is None:
            self._site.model.complete(min(broker.fold.fired_at_ms, self._site.now_ms()), self._excused())

    def _excused(self) -> frozenset[str]:
        """What only the pipeline can bring: it holds it, and the log has it no more, or a job has brought it. While it
        is in time it has staged all that is due; when it is not, the rest is rescued.
        """
        broker = self._site.broker
        held = [self._site.model.messages[name] for name in self._site.table.held_names(broker)]
        theirs = frozenset(m.name for m in held if m.own >= 0 or not broker.log.read(m.arrival, 4))
        return theirs | self._jobs.on_way()

"""Time: it passes as in normal life, with a call of the broker whenever the broker asked for one, or the clock jumps.

After time has passed, every message that was due must have been seen.
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

    def let_pass(self, span_ms: int, *, excuses: bool = True) -> None:
        """Lets time pass as in normal life: calls the broker whenever it asked to be called. `excuses`: messages that
        only the table has may be late, because nobody promotes them.
        """
        until = self._site.now_ms() + span_ms
        while True:
            self._settle_down()
            wake = self._site.broker.wake_at_ms
            if wake > until:
                break
            self._move_towards(wake)
        self._end_at(until, excuses)

    def let_all_come_due(self) -> None:
        """Lets time pass until no message waits any more."""
        for _ in range(10_000):
            self._settle_down()
            wake = self._site.broker.wake_at_ms
            if wake == NEVER:
                break
            self._move_towards(wake)
        self._end_at(max([self._site.now_ms(), *(m.due for m in self._site.model.messages.values())]))

    def _end_at(self, at_ms: int, excuses: bool = True) -> None:
        self.move_to(at_ms)
        self._settle_down()
        broker = self._site.broker
        if broker.fire_error is None:
            excused = self._excused() if excuses else frozenset[str]()
            self._site.model.check_complete(min(broker.fold.fired_at_ms, self._site.now_ms()), excused)

    def _move_towards(self, wake: int) -> None:
        # The broker repeats a failed fire after a pause, and has nothing to do until then.
        self.move_to(max(wake, self._site.now_ms() + (1_000 if self._site.broker.fire_error else 1)))

    def move_to(self, at_ms: int) -> None:
        """Lets time pass without a call of the broker."""
        if at_ms > self._site.now_ms():
            self._site.clock.pass_ms(at_ms - self._site.now_ms())
            self._note_clock()

    def _note_clock(self) -> None:
        self._site.model.clock_max = max(self._site.model.clock_max, self._site.now_ms())

    def _settle_down(self) -> None:
        """Advances and flushes until there is nothing to do at this instant."""
        broker, now = self._site.broker, self._site.now_ms()
        for _ in range(100):
            self.advance()
            self._watch.flush()
            self._site.digest.note("wake", broker.wake_at_ms)
            if broker.wake_at_ms > now or broker.fire_error is not None:
                return
        raise Broken(f"after 100 rounds at {now} the broker still wants to be called at {broker.wake_at_ms}")

    def advance(self) -> None:
        """Fires what is due now, without a flush after it."""
        broker, now_ms = self._site.broker, self._site.now_ms()
        try:
            broker.advance(now_ms)
            self._site.digest.note("advance", broker.paused_until_ms(now_ms) or broker.wake_at_ms)
        except DiskFull as error:
            self._site.digest.note_error(error)
            assert broker.fire_error is not None, "a failed fire can be seen"

    def step(self, span_ms: int) -> None:
        """Lets the clock jump."""
        self._site.clock.step_ms(span_ms)
        self._note_clock()

    def _excused(self) -> frozenset[str]:
        """The messages that only a promotion can deliver: they are in the table and not in the log, or a job has put
        them there.
        """
        broker = self._site.broker
        held = [self._site.model.messages[name] for name in self._site.table.held_names(broker)]
        theirs = frozenset(m.name for m in held if m.own >= 0 or not broker.log.read(m.arrival, 4))
        return theirs | self._jobs.messages_on_the_way()

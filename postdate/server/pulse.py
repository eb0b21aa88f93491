"""The pulse: what makes a broker live. It flushes, settles, fires, takes snapshots and removes what is old.

    nudge     after something was written: a flush begins, or follows the one under way (group commit)
    settled   after a flush: what is durable is applied, its tickets are answered, consumers are woken
    ring      at the next due instant: fire

Flushes run on one thread of their own, the blocking steps of a snapshot on another; everything else happens on the
event loop. There is no tick: the alarm is set to the next instant at which the broker has something to do.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from postdate.broker.broker import Broker
from postdate.broker.view import NEVER
from postdate.broker.writing import Changes, Ticket
from postdate.clock import Clock, ManualClock
from postdate.errors import DiskFull, LogFailed, PostdateError
from postdate.server.alarm import Alarm, SilentAlarm
from postdate.server.connection import Connection

logger = logging.getLogger("postdate.server")

Answer = Callable[[Ticket], None]
Tell = Callable[[LogFailed | None], None]

_CATCH_UP_STEPS_MAX = 100_000  # each fires or rescues up to a batch; more means that the broker makes no progress

# What may go wrong again and again.
_LOG_FAILED = "nothing is stored or fired any more"
_NOT_FIRED = "what is due cannot be fired, trying again"
_NO_SNAPSHOT = "the snapshot failed, a restart will take longer"
_NOT_REMOVED = "old files cannot be removed"


class Pulse:
    """Drives one broker. Everything but the flush itself is called on the loop's thread."""

    def __init__(self, broker: Broker, clock: Clock, on_settled: Callable[[Changes], None]) -> None:
        self.broker = broker
        self.clock = clock
        self._on_settled = on_settled
        self._loop = asyncio.get_running_loop()
        self._alarm: Alarm | SilentAlarm = (
            SilentAlarm() if isinstance(clock, ManualClock) else Alarm(self._loop, self.ring)
        )
        self._expected: deque[tuple[Ticket, Answer, Connection, int]] = deque()
        self._undurable: deque[tuple[int, Tell, Connection]] = deque()  # by position; empty in flush mode sync
        self._is_async = broker.settings.flush == "async"
        self._flush_asked = False
        self._flushes: SimpleQueue[bool] = SimpleQueue()  # True: flush; False: end
        self._flusher = threading.Thread(target=self._flush_when_asked, name="postdate-flush", daemon=True)
        self._snapshot: asyncio.Task[None] | None = None
        self._retain_timer: asyncio.TimerHandle | None = None
        self._is_stopped = False
        self._is_snapshot_paused = False
        self._said: dict[str, str] = {}  # by trouble: what was logged last about it, so that it is said once

    def start(self) -> None:
        self._flusher.start()
        self._retain_later()
        self.ring()

    # -- writing ------------------------------------------------------------------------------------------------

    def expect(self, connection: Connection, ticket: Ticket, answer: Answer, count: int = 1) -> None:
        """Calls `answer` when the ticket's batch is durable and applied; it answers so many requests of a connection.
        Call `nudge` when all is written.
        """
        self._expected.append((ticket, answer, connection, count))
        connection.expect(count)

    def when_durable(self, connection: Connection, position: int, tell: Tell) -> None:
        """Calls `tell` when the log is durable up to a position that is applied, with the error where it never will
        be. At once in flush mode sync, where nothing else is applied; in flush mode async a flush is made for it.
        """
        if position <= self.broker.log.durable:
            tell(None)
            return
        connection.expect(1)
        self._undurable.append((position, tell, connection))
        self._flushes.put(True)

    def _tell_durable(self, error: LogFailed | None = None) -> None:
        waiting, self._undurable = self._undurable, deque()
        for position, tell, connection in waiting:
            if error is None and position > self.broker.log.durable:
                self._undurable.append((position, tell, connection))
                continue
            self._safely(partial(tell, error))
            connection.answered(1)

    def nudge(self) -> None:
        """Something was written: makes it durable, answers what can be answered."""
        if self._is_async or self._is_settled_already():
            self._settle()
        if not self._flush_asked and self._wants_flush():
            self._flush_asked = True
            if self._is_async:
                self._loop.call_later(self.broker.settings.flush_interval_ms / 1_000, self._flushes.put, True)
            else:
                self._flushes.put(True)

    def _is_settled_already(self) -> bool:
        """Whether a call that waits for the disk itself, as making a topic does, has settled what others wait for."""
        expected = self._expected
        return self.broker.has_changes or (bool(expected) and expected[0][0].answers is not None)

    def _wants_flush(self) -> bool:
        """Also where the log has failed and somebody waits: the flush then finds the error, and all are told."""
        log = self.broker.log
        return log.end > log.durable or (log.failure is not None and bool(self._expected))

    def _flush_when_asked(self) -> None:
        while self._flushes.get():
            error: LogFailed | None = None
            try:
                self.broker.log.flush()
            except LogFailed as failure:
                error = failure
            try:
                self._loop.call_soon_threadsafe(self._flushed, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits for an answer any more

    def _flushed(self, error: LogFailed | None) -> None:
        self._flush_asked = False
        if self._is_stopped:
            return
        if error is not None:
            self._fail(error)
            return
        self._tell_durable()
        self._settle()
        self.nudge()

    def _settle(self) -> None:
        """Applies what is durable, and deals with what that has changed."""
        try:
            changes = self.broker.settle()
        except LogFailed as error:
            self._fail(error)
            return
        self._deal_with(changes)

    def _deal_with(self, changes: Changes) -> None:
        """Answers, wakes, and sets the alarm."""
        self._answer_settled()
        self._on_settled(changes)
        if self._is_async:
            self._answer_settled()  # a pop that was woken has written, and what is written is settled
        self._set_alarm()
        self._snapshot_if_due()

    def _answer_settled(self) -> None:
        expected = self._expected
        while expected and expected[0][0].answers is not None:
            ticket, answer, connection, count = expected.popleft()
            self._safely(partial(answer, ticket))
            connection.answered(count)

    def _safely(self, answer: Callable[[], None]) -> None:
        try:
            answer()
        except Exception:  # our mistake; nobody else may wait for it, neither clients nor what is due
            logger.exception("an answer could not be given")

    def _fail(self, error: LogFailed) -> None:
        """The log takes no more writes. Nobody knows whether what was not durable is on disk: say so."""
        self._log_once(_LOG_FAILED, error)
        doubt = LogFailed(f"whether it is stored is not known: {error}")
        for ticket, *_ in self._expected:
            if ticket.answers is None:
                ticket.answers, ticket.error = [], doubt
        self._answer_settled()
        self._tell_durable(error)

    # -- time ---------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Fires what is due by now."""
        now_ms = self.clock.now_ms()
        try:
            changes = self.broker.advance(now_ms)
            if self.broker.fire_error is None:
                self._said.pop(_NOT_FIRED, None)
            self._deal_with(changes)
        except (DiskFull, LogFailed) as error:
            self._log_once(_NOT_FIRED if self.broker.log.failure is None else _LOG_FAILED, error)
        self.nudge()
        self._set_alarm()

    def catch_up(self) -> None:
        """Fires, makes durable and shows everything that is due by now, and returns when nothing more is."""
        for _ in range(_CATCH_UP_STEPS_MAX):
            self.ring()
            self.broker.log.flush()
            self._settle()
            # Waking consumers may have written something itself.
            is_durable = self.broker.log.durable == self.broker.log.end
            if is_durable and self.broker.wake_at_ms > self.clock.now_ms():
                return
        raise AssertionError(f"the broker asks to be called again and again at {self.clock.now_ms()}")

    def _log_once(self, trouble: str, error: PostdateError | OSError) -> None:
        """One line, not one for each try: a full disk stays full for a while."""
        if self._said.get(trouble) != str(error):
            self._said[trouble] = str(error)
            logger.error("%s: %s", trouble, error)

    def _set_alarm(self) -> None:
        now_ms = self.clock.now_ms()
        at_ms = self.broker.wake_at_ms if self.broker.log.failure is None else NEVER
        at_ms = max(at_ms, self.broker.paused_until_ms(now_ms))
        if at_ms <= now_ms and self._flush_asked and not self._is_async:
            at_ms = NEVER  # it is written already, and shows when the flush that is under way has ended
        self._alarm.set(at_ms)

    # -- from time to time --------------------------------------------------------------------------------------

    def _snapshot_if_due(self) -> None:
        may_be_taken = self._snapshot is None and not self._is_snapshot_paused and not self._is_stopped
        if may_be_taken and self.broker.snapshot_is_due:
            self._snapshot = self._loop.create_task(self._take_snapshot())

    async def _take_snapshot(self) -> None:
        try:
            for step in self.broker.snapshot():
                await (asyncio.sleep(0) if step is None else asyncio.to_thread(step))
            self._said.pop(_NO_SNAPSHOT, None)
        except (PostdateError, OSError) as error:
            self._log_once(_NO_SNAPSHOT, error)
            self._is_snapshot_paused = True  # not at once again
            self._loop.call_later(self.broker.limits.fire_pause_ms_max / 1_000, self._resume_snapshots)
        finally:
            self._snapshot = None

    def _resume_snapshots(self) -> None:
        self._is_snapshot_paused = False
        self._snapshot_if_due()

    def _retain_later(self) -> None:
        self._retain_timer = self._loop.call_later(self.broker.limits.retain_interval_ms / 1_000, self._retain)

    def _retain(self) -> None:
        try:
            removed = self.broker.retain(self.clock.now_ms())
            if removed:
                logger.info("removed %d files that nobody needs any more", removed)
            self._said.pop(_NOT_REMOVED, None)
        except (PostdateError, OSError) as error:
            self._log_once(_NOT_REMOVED, error)
        self._retain_later()

    # -- the end ------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Makes durable and answers everything that was written, then lets go. The broker stays open."""
        while (self._expected or self._undurable) and self.broker.log.failure is None:
            await asyncio.sleep(0.001)
        self._is_stopped = True
        self._alarm.close()
        if self._retain_timer is not None:
            self._retain_timer.cancel()
        snapshot: asyncio.Task[Any] | None = self._snapshot
        if snapshot is not None:
            await asyncio.wait([snapshot])
        self._flushes.put(False)
        await asyncio.to_thread(self._flusher.join)

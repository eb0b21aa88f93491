"""The pulse drives the broker: it flushes, settles, fires, takes snapshots and removes old files.

    nudge     after a write: starts a flush, or lets one follow the flush under way (group commit)
    settle    after a flush: applies durable batches, answers their tickets, wakes consumers
    ring      at the next due instant: fires

Flushes run on a thread of their own, the blocking steps of a snapshot on another; everything else runs on the event
loop. There is no tick: the alarm is set to the next instant at which the broker has something to do.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from postdate.arrival import NEVER
from postdate.broker.broker import Broker
from postdate.broker.writing import Changes, Ticket
from postdate.clock import Clock, ManualClock
from postdate.errors import DiskFull, LogFailed, PostdateError
from postdate.server.alarm import Alarm, SilentAlarm
from postdate.server.connection import Connection

logger = logging.getLogger("postdate.server")

Answer = Callable[[Ticket], None]
Tell = Callable[[LogFailed | None], None]

_CATCH_UP_STEPS_MAX = 100_000  # each fires or rescues up to a batch; more means that the broker makes no progress

# Troubles that may come again and again.
_LOG_FAILED = "the log has failed, nothing more is stored or fired"
_NOT_FIRED = "due messages cannot be fired, trying again"
_NO_SNAPSHOT = "the snapshot failed, a restart will take longer"
_NOT_REMOVED = "old files cannot be removed"


class Pulse:
    """Drives one broker. All but the flush itself runs on the loop's thread."""

    def __init__(self, broker: Broker, clock: Clock, on_settled: Callable[[Changes], None]) -> None:
        self.broker, self.clock, self._on_settled = broker, clock, on_settled
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
        self._logged: dict[str, str] = {}  # by trouble: the error logged last, so that it is logged once

    def start(self) -> None:
        self._flusher.start()
        self._retain_later()
        self.ring()

    # -- writing ------------------------------------------------------------------------------------------------

    def expect(self, connection: Connection, ticket: Ticket, answer: Answer, count: int = 1) -> None:
        """Calls `answer` when the ticket's batch is durable and applied; it answers `count` requests of a connection.
        Call `nudge` when all is written.
        """
        self._expected.append((ticket, answer, connection, count))
        connection.expect(count)

    def when_durable(self, connection: Connection, position: int, tell: Tell) -> None:
        """Calls `tell` when the log is durable up to an applied position, with an error where it never will be. In
        flush mode sync that is at once, as only durable batches are applied; in flush mode async a flush follows.
        """
        if position <= self.broker.log.durable:
            tell(None)
            return
        connection.expect(1)
        self._undurable.append((position, tell, connection))
        self._flushes.put(True)

    def _report_durable(self, error: LogFailed | None = None) -> None:
        waiting, self._undurable = self._undurable, deque()
        for position, tell, connection in waiting:
            if error is None and position > self.broker.log.durable:
                self._undurable.append((position, tell, connection))
                continue
            self._safely(partial(tell, error))
            connection.count_answered(1)

    def nudge(self) -> None:
        """Makes new writes durable, and answers what can be answered already."""
        log, expected = self.broker.log, self._expected
        # A call that waits for the disk itself, as creating a topic does, may have settled batches.
        if self._is_async or self.broker.has_changes or (expected and expected[0][0].answers is not None):
            self._settle()
        # A log that has failed is flushed for those who wait: the flush raises the error, which answers them all.
        if not self._flush_asked and (log.end > log.durable or (log.failure is not None and expected)):
            self._flush_asked = True
            if self._is_async:
                self._loop.call_later(self.broker.settings.flush_interval_ms / 1_000, self._flushes.put, True)
            else:
                self._flushes.put(True)

    def _flush_when_asked(self) -> None:
        while self._flushes.get():
            error: LogFailed | None = None
            try:
                self.broker.log.flush()
            except LogFailed as failure:
                error = failure
            try:
                self._loop.call_soon_threadsafe(self._finish_flush, error)
            except RuntimeError:
                return  # the loop is closed, and nobody waits for an answer

    def _finish_flush(self, error: LogFailed | None) -> None:
        self._flush_asked = False
        if self._is_stopped:
            return
        if error is not None:
            self._fail(error)
            return
        self._report_durable()
        self._settle()
        self.nudge()

    def _settle(self) -> None:
        """Applies durable batches, and handles what they have changed."""
        try:
            changes = self.broker.settle()
        except LogFailed as error:
            self._fail(error)
            return
        self._handle_changes(changes)

    def _handle_changes(self, changes: Changes) -> None:
        """Answers tickets, wakes consumers, and sets the alarm."""
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
            connection.count_answered(count)

    def _safely(self, answer: Callable[[], None]) -> None:
        try:
            answer()
        except Exception:  # our mistake; other clients and due messages must not wait for it
            logger.exception("an answer failed")

    def _fail(self, error: LogFailed) -> None:
        """Answers all who wait that the log takes no more writes, and that nobody knows whether theirs are on disk."""
        self._log_once(_LOG_FAILED, error)
        doubt = LogFailed(f"it is not known whether this is stored: {error}")
        for ticket, *_ in self._expected:
            if ticket.answers is None:
                ticket.answers, ticket.error = [], doubt
        self._answer_settled()
        self._report_durable(error)

    # -- time ---------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Fires what is due now."""
        now_ms = self.clock.now_ms()
        try:
            changes = self.broker.advance(now_ms)
            if self.broker.fire_error is None:
                self._logged.pop(_NOT_FIRED, None)
            self._handle_changes(changes)
        except (DiskFull, LogFailed) as error:
            self._log_once(_NOT_FIRED if self.broker.log.failure is None else _LOG_FAILED, error)
        self.nudge()
        self._set_alarm()

    def catch_up(self) -> None:
        """Fires everything due now and makes it durable and visible; returns when nothing more is due."""
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
        """Logs one line, not one for each try: a full disk stays full for a while."""
        if self._logged.get(trouble) != str(error):
            self._logged[trouble] = str(error)
            logger.error("%s: %s", trouble, error)

    def _set_alarm(self) -> None:
        now_ms = self.clock.now_ms()
        at_ms = self.broker.wake_at_ms if self.broker.log.failure is None else NEVER
        at_ms = max(at_ms, self.broker.paused_until_ms(now_ms))
        if at_ms <= now_ms and self._flush_asked and not self._is_async:
            at_ms = NEVER  # it is written already, and becomes visible after the flush under way
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
            self._logged.pop(_NO_SNAPSHOT, None)
        except (PostdateError, OSError) as error:
            self._log_once(_NO_SNAPSHOT, error)
            self._is_snapshot_paused = True
            self._loop.call_later(self.broker.limits.fire_pause_ms_max / 1_000, self._resume_snapshots)
        finally:
            self._snapshot = None

    def _resume_snapshots(self) -> None:
        self._is_snapshot_paused = False
        self._snapshot_if_due()

    def _retain_later(self) -> None:
        self._retain_timer = self._loop.call_later(self.broker.limits.retain_interval_ms / 1_000, self._retain)

    def remove_old_files(self) -> int:
        """Removes what is kept no longer; returns how many files. Raises LogFailed, OSError."""
        removed = self.broker.retain(self.clock.now_ms())
        if removed:
            logger.info("removed %d old files", removed)
        return removed

    def _retain(self) -> None:
        try:
            self.remove_old_files()
            self._logged.pop(_NOT_REMOVED, None)
        except (PostdateError, OSError) as error:
            self._log_once(_NOT_REMOVED, error)
        self._retain_later()

    # -- the end ------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Makes all writes durable, answers them, and stops. The broker stays open."""
        while (self._expected or self._undurable) and self.broker.log.failure is None:
            await asyncio.sleep(0.001)
        self._is_stopped = True
        self._alarm.close()
        if self._retain_timer is not None:
            self._retain_timer.cancel()
        if self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        self._flushes.put(False)
        await asyncio.to_thread(self._flusher.join)

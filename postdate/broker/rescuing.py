"""Rescues: the broker itself brings far messages into the wheel where the pipeline does not bring them in time.

    next_at_ms      when the next rescue is to be written
    write_if_due    plans and writes it; the fold moves the rows when it is applied

Which rows may be rescued, and what is remembered of a rescue, is in state/far.py.
"""

from postdate.arrival import NEVER
from postdate.broker.settings import CurrentSettings
from postdate.broker.writing import Writer
from postdate.errors import UsageError
from postdate.state.far import Range, Rescue
from postdate.state.fold import Fold
from postdate.storage.batch import RESCUE
from postdate.storage.log import Log

_BLOCKS_PER_STEP = 16  # looked through in rescue_step_ms: a million rows, some 50 ms of work
_STEP_LEADS_MAX = 5  # leads that a step may reach ahead: what is rescued early lies in memory


class Rescuer:
    """Watches how far ahead the pipeline is, and writes rescues."""

    def __init__(self, log: Log, fold: Fold, writer: Writer, settings: CurrentSettings) -> None:
        self._log, self._fold, self._writer, self._settings = log, fold, writer, settings
        rescue_lead_ms, lead_ms = settings.limits.rescue_lead_ms, settings.now.lead_ms
        if rescue_lead_ms >= lead_ms:
            raise UsageError(
                f"rescue_lead_ms is {rescue_lead_ms}, not less than lead_ms ({lead_ms}): "
                "a pipeline that is in time is one lead ahead"
            )
        self._end = 0  # of the last rescue that was written
        self._count_before = fold.rescued_count

    @property
    def rescued_count(self) -> int:
        """Messages that were rescued since the folder was opened."""
        return self._fold.rescued_count - self._count_before

    @property
    def is_under_way(self) -> bool:
        """Whether a rescue is written and not applied yet. Until then no file that it was planned with may go."""
        return self._fold.position < self._end

    # -- is the pipeline in time? -------------------------------------------------------------------------------

    def is_served(self, at_ms: int) -> bool:
        """Whether the pipeline is as far ahead as it must be. Only what it has done counts: a dead one, a hanging one
        and a slow one are the same.
        """
        return at_ms < self._unserved_at_ms

    @property
    def _unserved_at_ms(self) -> int:
        """The first instant at which the pipeline is late, if it does nothing more."""
        far = self._fold.far
        return far.horizon_at_ms - self.rescue_lead_ms + 1 if far.epoch else 0

    @property
    def rescue_lead_ms(self) -> int:
        return self._settings.limits.rescue_lead_ms or self._settings.now.lead_ms // 2

    # -- rescuing -----------------------------------------------------------------------------------------------

    @property
    def next_at_ms(self) -> int:
        """When the next rescue is to be written; NEVER where none is."""
        far = self._fold.far
        all_rows = far.earliest(untaken_only=False)
        if all_rows == NEVER:
            return NEVER
        if self._fold.wheel.count >= self._settings.now.wheel_entries_max:
            return NEVER  # no room before something has been fired
        untaken = far.earliest(untaken_only=True)
        return min(untaken - self.rescue_lead_ms, max(all_rows - self._settings.now.lead_ms, self._unserved_at_ms))

    def blocked_from_ms(self, at_ms: int) -> int:
        """The due of the first far message that finds no room in the wheel; NEVER where there is room."""
        if self._fold.wheel.count < self._settings.now.wheel_entries_max:
            return NEVER
        return self._fold.far.earliest(untaken_only=self.is_served(at_ms))

    def write_if_due(self, at_ms: int) -> None:
        """Rescues far messages that the pipeline does not bring in time: of those that it has not taken the ones due
        within rescue_lead_ms, and all that are due within the lead where it is late; and what is due a little later, so
        that rescues are few. Raises DiskFull, LogFailed.
        """
        if self.next_at_ms > at_ms or self.is_under_way:
            return
        # Plans until something is found: a plan looks at a bounded number of blocks, and may find nothing there.
        for _ in range(self._settings.limits.rescue_blocks_max):
            rescues = self._plan(at_ms)
            for rescue in rescues:
                body = {**rescue._asdict(), "start": self._log.start}
                self._end = self._writer.write_system(RESCUE, body, at_ms).end
            if rescues or self.next_at_ms > at_ms:
                return

    def _plan(self, at_ms: int) -> list[Rescue]:
        settings, limits, is_served = self._settings.now, self._settings.limits, self.is_served(at_ms)
        step_ms = limits.rescue_step_ms if is_served else self._long_step_ms()
        until = at_ms + (self.rescue_lead_ms if is_served else settings.lead_ms) + step_ms
        room = settings.wheel_entries_max - self._fold.wheel.count
        present = [Range(start, stop) for start, stop in self._log.ranges()]
        return self._fold.far.plan_rescue(present, until, limits.rescue_blocks_max, room, untaken_only=is_served)

    def _long_step_ms(self) -> int:
        """How far ahead rescues look where no pipeline serves. What is due soon may lie in every block, and each block
        is looked through once a step: with more blocks steps are longer, so that they take the same share of the time.
        """
        step_ms, lead_ms = self._settings.limits.rescue_step_ms, self._settings.now.lead_ms
        longer_ms = step_ms * (self._fold.far.block_count // _BLOCKS_PER_STEP)
        return max(step_ms, min(longer_ms, _STEP_LEADS_MAX * lead_ms))

"""What all participants of a run share: disk, clock, running broker, table, model and digest."""

from dataclasses import replace
from typing import Protocol

from postdate.broker.broker import Broker
from postdate.clock import ManualClock
from postdate.config import Limits, Settings
from postdate.errors import LogFailed
from postdate.testing import FaultPoints, Killed, VirtualDisk
from verify.simulation.digest import Digest
from verify.simulation.model import Model, Sent
from verify.simulation.pipeline import SimulatedTable

START_MS = 1_700_000_000_000
TOPICS = ("orders", "mails")
IDENTITY = "5".zfill(32)  # the same in each run: the digest covers every file
SETTINGS = Settings(
    segment_bytes=16 * 1024,
    batch_bytes_max=16 * 1024,
    lead_ms=5_000,
    retention_ms=30_000,
    once_window_ms=45_000,  # longer than the log is kept
    once_ids_max=5,
    message_delay_level="1s 3s 10s 1m",
    transaction_check_interval_ms=5_000,
    transaction_check_times_max=3,
)
LIMITS = Limits(
    stage_ahead_ms_max=1 << 60,  # horizons of a simulation are not tied to its lead
    unflushed_bytes_max=16 * 1024,
    rescue_step_ms=1_000,
    queue_file_rows=64,
    queue_tail_rows=4,
    far_block_rows=8,
    rows_by_column=6,
)


class Watch(Protocol):
    """What the world does for the participants."""

    def look(self) -> None:
        """Takes in all answers except those to cancels, and reads every queue."""

    def hear(self) -> None:
        """Looks, then checks the answers to cancels."""

    def flush(self) -> None:
        """Makes everything durable, so that it is answered, and hears."""


class Site:
    """The shared parts. There is a `broker` at any time except during a crash."""

    def __init__(self, settings: Settings, limits: Limits) -> None:
        self.settings = settings
        self.limits = limits
        self.disk = VirtualDisk()
        self.points = FaultPoints()
        self.clock = ManualClock(START_MS)
        self.model = Model(clock_max=START_MS)
        self.table = SimulatedTable()
        self.digest = Digest()
        self.staged_chunks: set[str] = set()  # all that the broker ever accepted
        self._broker: Broker | None = None

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "between ops there is always a running broker"
        return self._broker

    def start(self) -> None:
        """Opens the broker; tries again if it is killed while it opens."""
        while self._broker is None:
            try:
                self._broker = Broker(self.disk, self.settings, limits=self.limits, identity=IDENTITY)
            except (Killed, LogFailed):
                self.points.disarm()
                self.disk.kill()
                self.digest.note_disk(self.disk)

    def stop(self) -> None:
        """Forgets the broker, whether it was closed or killed."""
        self._broker = None

    def now_ms(self) -> int:
        return self.clock.now_ms()

    def has_topic(self, topic: str) -> bool:
        return topic in self.broker.fold.topics.by_name

    def pick_message(self, pick: int) -> Sent | None:
        """Returns one of the messages that were ever sent; None if there is none."""
        messages = list(self.model.messages.values())
        return messages[pick % len(messages)] if messages else None


def topic_at(place: int) -> str:
    return TOPICS[place % len(TOPICS)]


def with_settings(**changes: int | str) -> Settings:
    """The simulation's settings with some of them changed."""
    return replace(SETTINGS, **changes)  # type: ignore[arg-type]

"""Every setting: its default, its unit, its bounds and why, in one place.

Settings are one frozen value. Strings from a file, the environment or a flag become values once, at the edge;
nothing below this module parses text. A value out of bounds is refused with a sentence, never clamped.
"""

import dataclasses
from typing import Any

from postdate.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
DAY_MS = 24 * HOUR_MS

FLUSH_MODES = ("sync", "async")


def setting(default: Any, low: int | None = None, high: int | None = None, *, why: str) -> Any:
    """A dataclass field with its bounds and the reason for its default beside it."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "why": why})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of the core. Raises UsageError for a value outside its bounds."""

    flush: str = setting("sync", why="an acknowledged message is on disk; 'async' trades that for speed")
    segment_bytes: int = setting(64 * MIB, 16 * KIB, GIB, why="small enough to zero ahead in 0.1 s, a power of two")
    batch_bytes_max: int = setting(16 * MIB, 4 * KIB, 256 * MIB, why="four bodies of the largest size")
    unflushed_bytes_max: int = setting(32 * MIB, 4 * KIB, GIB, why="bounds what one flush has to write")
    body_bytes_max: int = setting(4 * MIB, 1, 64 * MIB, why="RocketMQ's limit")
    properties_bytes_max: int = setting(32_767, 1, 32_767, why="RocketMQ stores their length in an int16")
    message_delay_level: str = setting(
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h", why="RocketMQ's eighteen levels"
    )
    delay_ms_max: int = setting(87_660 * HOUR_MS, SECOND_MS, 876_600 * HOUR_MS, why="ten years of 365.25 days")
    lead_ms: int = setting(60 * SECOND_MS, 100, HOUR_MS, why="what is due later than this is far and costs no RAM")
    rescue_step_ms: int = setting(5 * SECOND_MS, 1, HOUR_MS, why="rescues look this much further, so that they are few")
    rescue_blocks_max: int = setting(8, 2, 4_096, why="far blocks of one rescue: some ms that a fire may have to wait")
    wheel_entries_max: int = setting(8_000_000, 1, 1_000_000_000, why="about 0.4 GB of RAM for single messages")
    due_second_messages_max: int = setting(0, 0, 1_000_000_000, why="per topic and second of due time; 0 is no limit")
    tombstones_max: int = setting(1_000_000, 1, 100_000_000, why="cancels that wait for Spark cost RAM: about 0.3 GB")
    topics_max: int = setting(10_000, 1, 1_000_000, why="a topic costs RAM and route bytes")
    groups_max: int = setting(100_000, 1, 10_000_000, why="a group costs RAM for its offsets")
    topic_queues_max: int = setting(1_024, 1, 65_535, why="a queue costs two files")
    retention_ms: int = setting(72 * HOUR_MS, 0, 36_525 * DAY_MS, why="RocketMQ's fileReservedTime")
    queue_file_rows: int = setting(1 << 20, 64, 1 << 28, why="20 MB a file: retention removes whole files")
    far_block_rows: int = setting(65_536, 2, 1 << 24, why="3 MB of far rows are looked through at once")
    rows_by_column: int = setting(64, 2, 1 << 20, why="where numpy beats a loop over the rows of a batch")
    queue_tail_rows: int = setting(1_024, 1, 1 << 20, why="20 KB of RAM per queue between two writes")
    snapshot_bytes: int = setting(128 * MIB, 4 * KIB, 64 * GIB, why="log to replay after a crash, at most")
    snapshot_batches: int = setting(100_000, 1, 100_000_000, why="batches to replay after a crash: about 0.5 s")
    fire_pause_ms_min: int = setting(10, 1, SECOND_MS, why="first pause after a failed fire; it doubles")
    fire_pause_ms_max: int = setting(5 * SECOND_MS, 1, MINUTE_MS, why="longest pause between tries of a failed fire")
    delivered_search_entries: int = setting(
        4_096, 0, 1 << 20, why="a cancel looks at most at this many delivered records"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_bounds(field, getattr(self, field.name))
        if self.flush not in FLUSH_MODES:
            raise UsageError(f"flush is {self.flush!r}, expected one of {', '.join(FLUSH_MODES)}")
        if self.segment_bytes & (self.segment_bytes - 1):
            raise UsageError(f"segment_bytes is {self.segment_bytes}, expected a power of two")
        if self.batch_bytes_max > self.segment_bytes:
            raise UsageError(
                f"batch_bytes_max is {self.batch_bytes_max}, more than segment_bytes ({self.segment_bytes}): "
                "a batch lies in one segment"
            )


def _check_bounds(field: "dataclasses.Field[Any]", value: object) -> None:
    low, high = field.metadata["low"], field.metadata["high"]
    if low is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{field.name} is {value!r}, expected a whole number")
    if not low <= value <= high:
        raise UsageError(f"{field.name} is {value}, expected {low} to {high}")

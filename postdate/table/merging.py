"""Merging: which files become which, so that a promotion opens few files and no row is written more than three times.

    soon   rows of a batch due within two days       merged into hours, when there are many
    later  rows of a batch due after that            merged into hours and months, when there are many
    hour   rows of one hour                          final
    month  rows of one month                         split into hours once, when its first rows are two days away

A row is written to `soon` or `later`, then perhaps to `hour` or `month`, and from `month` to `hour`: three times at
most. Rows that are promoted before their file is merged are written once. The plan is a function of files and time.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from postdate.table.format import File

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
EDGE_MS = 2 * DAY_MS  # rows due within it are kept by the hour
_SPLIT_MS = EDGE_MS + DAY_MS  # months are split a day ahead of that, so that it happens once a day

Bucket = tuple[str, int, int]  # tier, and its rows are due after the first and at or before the second

NO_MONTHS = 1 << 62


class Limits(NamedTuple):
    """How many files of a tier cause a merge, and what one merge may rewrite: some 15 s, in steps between which the
    next minute is promoted.
    """

    soon_files: int = 60
    later_files: int = 500
    rows: int = 8_000_000
    bytes: int = 4 << 30


DEFAULT = Limits()


class Merge(NamedTuple):
    """Rewrites the rows of some files into one new file for each bucket."""

    files: list[File]
    buckets: list[Bucket]
    ends_split: bool = False  # it splits the last month that has to be split


def edge_ms(now_ms: int) -> int:
    """Returns the instant that parts `soon` from `later`: a whole hour, so that no hour is split."""
    return (now_ms + EDGE_MS) // HOUR_MS * HOUR_MS


def plan_merge(
    files: Iterable[File], now_ms: int, promoted_ms: int, last_split_ms: int, limits: Limits = DEFAULT
) -> Merge | None:
    """Returns the merge that is due, if one is. It may leave out rows due at or before `promoted_ms`.

    Months were split last at `last_split_ms`: once a day is enough.
    """
    by_tier: dict[str, list[File]] = {}
    for file in files:
        by_tier.setdefault(file.tier, []).append(file)
    month = sorted(by_tier.get("month", ()), key=lambda file: file.due_low)
    urgent = [file for file in month if file.due_low < now_ms + _SPLIT_MS]
    if urgent and (now_ms - last_split_ms >= DAY_MS or urgent[0].due_low < now_ms + DAY_MS):
        merge = _merge(urgent, promoted_ms, NO_MONTHS, limits)
        return merge._replace(ends_split=len(merge.files) == len(urgent))
    later = sorted(by_tier.get("later", ()), key=lambda file: file.arrival_low)
    if len(later) >= limits.later_files or any(file.due_low < now_ms + DAY_MS for file in later):
        return _merge(later, promoted_ms, now_ms + _SPLIT_MS, limits)
    soon = sorted(by_tier.get("soon", ()), key=lambda file: file.arrival_low)
    if len(soon) >= limits.soon_files:
        return _merge(soon, promoted_ms, NO_MONTHS, limits)
    return None


def _merge(files: list[File], promoted_ms: int, months_from_ms: int, limits: Limits) -> Merge:
    """Merges the first files, as many as one merge may rewrite, into hours before an instant and months from it on."""
    chosen: list[File] = []
    rows = size = 0
    for file in files:
        rows, size = rows + file.rows, size + file.bytes
        if chosen and (rows > limits.rows or size > limits.bytes):
            break
        chosen.append(file)
    low = max(promoted_ms, min(file.due_low for file in chosen) - 1)
    high = max(file.due_high for file in chosen)
    return Merge(chosen, split_buckets(low, high, months_from_ms))


def split_buckets(low: int, high: int, months_from_ms: int) -> list[Bucket]:
    """Splits low < due <= high into hours and months. Each ends with the last millisecond of its hour or month."""
    found: list[Bucket] = []
    while low < high:
        tier = "hour" if low + 1 < months_from_ms else "month"
        end = ((low + 1) // HOUR_MS + 1) * HOUR_MS - 1 if tier == "hour" else _month_end(low + 1)
        found.append((tier, low, min(end, high)))
        low = end
    return found


def _month_end(at_ms: int) -> int:
    moment = datetime.fromtimestamp(at_ms / 1_000, UTC)
    following = datetime(moment.year + moment.month // 12, moment.month % 12 + 1, 1, tzinfo=UTC)
    return int(following.timestamp() * 1_000) - 1

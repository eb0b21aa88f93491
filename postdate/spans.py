"""Spans, delays and instants as users write them, in whole milliseconds.

`span_ms` is the one parser of texts such as "1h30m"; settings, delay levels, the client and the command line use it.
Everything rounds up: a message may come a fraction of a millisecond late, never early.
"""

import math
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import lru_cache

from postdate.errors import UsageError

Delay = str | int | float | timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_PART = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|s|min|m|h|d)\s*")
_EXPECTED = 'expected text such as "30m", "1h30m" or "500ms", a number of seconds or a timedelta'


@lru_cache(1_024)  # a program asks for the same few delays again and again
def span_ms(text: str) -> int | None:
    """The milliseconds of "500ms", "30s", "10m", "1.5h", "7d" or a sum such as "1h30m"; None for anything else."""
    exact = _exact_ms(text)
    return None if exact is None else math.ceil(exact)


def _exact_ms(text: str) -> Fraction | None:
    total, position = Fraction(0), 0
    while part := _PART.match(text, position):
        total += Fraction(part[1]) * _UNIT_MS[part[2]]
        position = part.end()
    return total if 0 < position == len(text) else None


def delay_ms(delay: Delay) -> int:
    """The milliseconds of a delay. Raises UsageError for what is none: a bare number as text, a negative one."""
    if isinstance(delay, str):
        found_ms = span_ms(delay)
        if found_ms is None:
            raise UsageError(f"delay is {delay[:64]!r}, {_EXPECTED}")
        return found_ms
    rounded_ms = _rounded_ms("delay", delay)
    if rounded_ms < 0:
        raise UsageError(f"delay is {delay!r}, which is negative")
    return rounded_ms


def shift_ms(by: Delay) -> int:
    """The milliseconds of a span that may be negative: "2h", "-10m", -600, timedelta(minutes=-10). Raises
    UsageError.
    """
    if not isinstance(by, str):
        return _rounded_ms("by", by)
    exact = _exact_ms(by.removeprefix("-"))
    if exact is None:
        raise UsageError(f"by is {by[:64]!r}, {_EXPECTED}")
    return math.ceil(-exact if by.startswith("-") else exact)


def _rounded_ms(name: str, span: float | timedelta) -> int:
    if isinstance(span, timedelta):
        return -(-span // _MILLISECOND)
    if isinstance(span, bool) or not isinstance(span, (int, float)) or not math.isfinite(span):
        raise UsageError(f"{name} is {span!r}, {_EXPECTED}")
    return math.ceil(Fraction(str(span)) * 1_000)  # by its digits: 0.001 s is 1 ms, not a little more


def instant_ms(at: datetime) -> int:
    """The epoch milliseconds of an instant. Raises UsageError for a datetime without a time zone."""
    if not isinstance(at, datetime):
        raise UsageError(f"the time is {at!r}, expected a datetime with a time zone")
    if at.utcoffset() is None:
        raise UsageError(
            f"the time is {at.isoformat()} without a time zone, so it is no instant; "
            "use for example datetime.now(UTC) + timedelta(hours=1), or .astimezone() for local time"
        )
    return -(-(at - EPOCH) // _MILLISECOND)


def instant(at_ms: int) -> datetime:
    """The datetime of epoch milliseconds, in UTC."""
    return EPOCH + timedelta(milliseconds=at_ms)

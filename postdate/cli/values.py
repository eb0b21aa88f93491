"""Turns arguments into values. argparse refuses the others with usage and a sentence."""

import argparse
from datetime import UTC, datetime

from postdate.spans import span_ms

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# From 1973, so that seconds are not taken for milliseconds, to the end of the year 9999, where Python's dates end.
_INSTANT_MS_MIN, _INSTANT_MS_MAX = 100_000_000_000, 253_402_300_799_999
_SPAN_DAYS_MAX = 36_525  # no broker can be set to take a longer delay


def whole_number(text: str) -> int:
    """0 or more."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    number = whole_number(text)
    if number == 0:
        raise argparse.ArgumentTypeError("0, expected a whole number of 1 or more")
    return number


def span(text: str) -> int:
    """Milliseconds of 500ms, 30s, 10m, 72h, 7d or 1h30m."""
    found = span_ms(text)
    if found is not None and found > _SPAN_DAYS_MAX * 86_400_000:
        raise argparse.ArgumentTypeError(f"{text!r}, expected at most {_SPAN_DAYS_MAX}d")
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a span such as 500ms, 30s, 10m, 72h, 7d or 1h30m")
    return found


def shift(text: str) -> int:
    """Milliseconds of a span; with a sign before it, of one to earlier: -10m."""
    return -span(text[1:]) if text.startswith("-") else span(text)


def instant(text: str) -> int:
    """Epoch milliseconds of a time in ISO 8601, or of epoch milliseconds. A time without a zone is a local one."""
    try:
        if text.isascii() and text.isdigit():
            at_ms = int(text)
            if not _INSTANT_MS_MIN <= at_ms <= _INSTANT_MS_MAX:
                raise ValueError
            return at_ms
        # A time without a zone is what stands on the user's watch, so it is read as local time.
        return round((datetime.fromisoformat(text).astimezone() - _EPOCH).total_seconds() * 1_000)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}, expected a time such as 2027-01-01T08:00:00+01:00 or epoch milliseconds"
        ) from error


def named_value(text: str) -> tuple[str, str]:
    """The two sides of NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r}, expected NAME=VALUE")
    return name, value

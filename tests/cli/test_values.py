"""Arguments as values: instants, spans, numbers, names with values."""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from postdate.cli import values
from postdate.config import FIELDS
from tests.support.core import MINUTE_MS, SECOND_MS, T0


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's time zone, for times that name none."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "text",
    [
        "2023-11-14T22:13:20Z",
        "2023-11-14T23:13:20+01:00",
        "2023-11-14 22:13:20.000+00:00",
        "2023-11-14T23:13:20",
        str(T0),
    ],
)
@pytest.mark.usefixtures("in_berlin")
def test_an_instant_is_iso_8601_or_epoch_milliseconds(text: str) -> None:
    assert values.instant(text) == T0


def test_an_instant_has_milliseconds() -> None:
    assert values.instant("2023-11-14T22:13:20.007Z") == T0 + 7


def test_a_shift_may_be_to_earlier() -> None:
    assert (values.shift("10m"), values.shift("-1m30s")) == (10 * MINUTE_MS, -90 * SECOND_MS)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (values.shift, "-"),
        (values.shift, "--1m"),
        (values.shift, "-5"),
        (values.instant, "tomorrow"),
        (values.instant, "2023-13-01"),
        (values.instant, "-5"),
        (values.instant, "9" * 19),
        (values.instant, "9" * 5_000),
        (values.instant, "1798790400"),
        (values.instant, "9999-12-31T23:59:59-12:00"),
        (values.span, "5"),
        (values.span, "soon"),
        (values.span, "-5s"),
        (values.span, "36526d"),
        (values.span, "999999999999999d"),
        (values.whole_number, "-1"),
        (values.whole_number, "1.5"),
        (values.whole_number, "²"),
        (values.positive, "0"),
        (values.named_value, "name"),
        (values.named_value, "=value"),
        (values.named_value, "name="),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_was_expected(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        read(text)


def test_a_span_is_in_milliseconds() -> None:
    assert [values.span(text) for text in ("500ms", "30s", "1h30m")] == [500, 30 * SECOND_MS, 90 * MINUTE_MS]


def test_the_longest_span_is_the_longest_delay_of_any_broker() -> None:
    longest_ms = FIELDS["delay_ms_max"].metadata["high"]
    assert values.span(f"{longest_ms}ms") == longest_ms
    with pytest.raises(argparse.ArgumentTypeError, match="expected at most 36525d"):
        values.span(f"{longest_ms + 1}ms")


def test_a_value_may_contain_the_sign() -> None:
    assert values.named_value("name=a=b") == ("name", "a=b")

"""Text in and out of the command line: arguments that become values, values that are shown."""

import argparse
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from postdate.cli import logs, render, values
from postdate.config import FIELDS, GROUPS, Settings
from tests.support.helpers import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, T0

# -- in ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("read", "text"),
    [
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


# -- out --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("span_ms", "text"),
    [
        (0, "0 ms"),
        (7, "7 ms"),
        (2_500, "2 s 500 ms"),
        (90 * MINUTE_MS, "1 h 30 min"),
        (2 * DAY_MS + 5, "2 d 5 ms"),
        (DAY_MS + HOUR_MS + MINUTE_MS, "1 d 1 h"),
    ],
)
def test_a_span_has_its_two_largest_units(span_ms: int, text: str) -> None:
    assert render.span(span_ms) == text


@pytest.mark.parametrize(
    ("span_ms", "text"), [(4_998, "4 s 998 ms"), (30 * MINUTE_MS - 2, "30 min"), (DAY_MS - 499, "1 d")]
)
def test_what_is_left_of_a_round_delay_is_shown_round(span_ms: int, text: str) -> None:
    assert render.rough(span_ms) == text


def test_an_instant_is_shown_in_utc() -> None:
    assert render.instant(T0 + 7) == f"2023-11-14T22:13:20.007Z ({T0 + 7})"
    assert render.instant(10**18) == f"{10**18} ms"


def test_a_table_has_numbers_to_the_right() -> None:
    lines = render.table(["topic", "near"], [["orders", 1_000], ["a", 5]])
    assert lines == ["topic    near", "orders  1,000", "a           5"]


def test_a_column_of_numbers_may_have_gaps_and_decimals() -> None:
    lines = render.table(["n", "s"], [[0, 1.5], ["", ""], [10, 0.25]])
    assert lines == [" n     s", " 0  1.50", "", "10  0.25"]


@pytest.mark.parametrize(
    ("byte_count", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1_500, "1.5 KB"), (2_345_678, "2.3 MB"), (10**13, "10.0 TB")],
)
def test_a_size_has_one_decimal_and_its_unit(byte_count: int, text: str) -> None:
    assert render.size(byte_count) == text


def test_a_table_without_rows_is_its_heads() -> None:
    assert render.table(["topic", "near"], []) == ["topic  near"]


def test_an_event_of_the_log_is_one_line_without_a_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.WARNING, "", 0, "it %s", ("failed",), sys.exc_info())
    record.created = T0 / 1_000
    assert logs.Lines().format(record) == "2023-11-14T22:13:20.000Z warning  it failed: ValueError: two lines"


# -- settings as flags ------------------------------------------------------------------------------------------


def test_every_setting_has_a_flag_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(field.name for field in dataclasses.fields(Settings))

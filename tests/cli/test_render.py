"""What commands print: values, tables, facts and progress; plain in a file, drawn on a terminal."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from postdate.cli import render
from tests.support.core import DAY_MS, HOUR_MS, MINUTE_MS, T0
from tests.support.server import serving
from tests.support.terminal import Terminal, plain

Capsys = pytest.CaptureFixture[str]


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


def test_a_bar_shows_every_number_above_0() -> None:
    assert [render.bar(number, 1_000, 10) for number in (0, 1, 500, 1_000)] == ["", "▏", "█████", "██████████"]


def test_facts_stand_below_each_other(capsys: Capsys) -> None:
    render.print_facts({"topic": "orders", "in": "3"})
    assert capsys.readouterr().out == "topic  orders\nin     3\n"


def test_nothing_of_rich_is_loaded_for_a_file(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    render.print_table(["topic", "near"], [["orders", 1]])
    with render.Working("working") as working:
        working.show("working", 1, 2)
        working.say("it goes on")
    assert "rich" not in sys.modules
    assert capsys.readouterr().out == "topic   near\norders     1\n"


# -- on a terminal ----------------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path) as served:
        yield served.address


@pytest.mark.parametrize("columns", [80, 120])
def test_every_table_fits_the_terminal(address: str, columns: int) -> None:
    shown = ""
    for words in (
        ("send", "orders", "a long body " * 20, "--count", "3", "--delay", "30m", "--key", "order-17"),
        ("send", "orders", "soon"),
        ("cancel", "--where", "topic = 'sms' and key like 'order-%' and size > 100", "--id", "no-sms", "--no-wait"),
        ("topic", "list"), ("topic", "show", "orders"), ("pending",), ("forecast",), ("find", "orders", "order-17"),
        ("jobs",), ("jobs", "no-sms"), ("status",),
    ):  # fmt: skip
        with Terminal(*words, "--addr", address, columns=columns) as terminal:
            text = terminal.read_all()
            assert terminal.wait() == 0, text
        if words[0] != "send":  # its sentences wrap where the terminal wraps them
            assert [line for line in plain(text).splitlines() if len(line) > columns] == []
        shown += text
    for word in ("waiting", "a long body", "due in the minute", "busiest second", "no-sms", "broker"):
        assert word in plain(shown)


def test_a_terminal_that_can_do_nothing_gets_plain_lines(address: str) -> None:
    with Terminal("topic", "list", "--addr", address, term="dumb") as terminal:
        assert "\x1b" not in terminal.read_all()

"""The benchmarks of growth and of steps: their arithmetic, their tables, and a small run of each."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import growth, report, steps
from benchmarks.growth import Point, lines, per_message, projected, told
from benchmarks.report import Figure
from postdate.config import MIB, Settings

SIZES = [10_000, 100_000, 1_000_000, 10_000_000]


@pytest.fixture
def all_cores() -> Iterator[None]:
    """A benchmark binds this process to one core; the tests behind it want all."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def point(waiting: int, **given: float) -> Point:
    flat = {field.name: 5.0 for field in dataclasses.fields(Point)[1:]}
    return Point(waiting, **{**flat, **given})


# -- the projection ---------------------------------------------------------------------------------------------


def test_what_grows_is_projected_by_what_a_message_adds() -> None:
    values = [40.0 + 0.0005 * size for size in SIZES]
    assert projected(SIZES, values, 100_000_000) == pytest.approx(40.0 + 50_000.0)
    assert per_message(SIZES, values) == pytest.approx(0.0005)


def test_noise_is_not_projected() -> None:
    assert projected(SIZES, [11.0, 10.8, 11.4, 12.1], 100_000_000) == pytest.approx(11.2)


def test_what_falls_is_noise_and_never_projected_below_nothing() -> None:
    assert projected(SIZES, [4.7, 1.2, 2.9, 0.4], 100_000_000) == pytest.approx(2.05)


def test_one_point_says_what_it_has_measured() -> None:
    assert projected([10_000], [7.0], 100_000_000) == 7.0
    assert per_message([10_000], [7.0]) == 0.0007


def test_the_largest_size_decides_how_steep_the_line_is() -> None:
    """A segment that is zeroed ahead is a step at the small sizes, and must not be taken for the price of a message."""
    values = [0.7, 141.0, 530.0, 5_300.0]
    assert projected(SIZES, values, 100_000_000) == pytest.approx(53_000.0, rel=0.02)


# -- the tables -------------------------------------------------------------------------------------------------


def test_the_table_has_a_column_for_each_size_and_names_the_projection() -> None:
    table = lines([point(size, disk_mb=size / 1_000) for size in SIZES])
    assert table[0] == [
        "measure", "10,000", "100,000", "1,000,000", "10,000,000", "100,000,000 (projected)",
    ]  # fmt: skip
    rows = {line[0]: line[1:] for line in table[1:]}
    assert len(rows) == len(growth.ROWS) == len(dataclasses.fields(Point)) - 1, "each measure stands in it once"
    assert rows["disk, MB"] == ["10", "100", "1,000", "10,000", "100,000"]
    assert rows["memory (RSS), MB"] == ["5", "5", "5", "5", "5"]
    assert rows["lateness of near messages, p99, ms"][-1] == "-", "nobody can know"


def test_small_sizes_say_nothing_about_a_hundred_million() -> None:
    table = lines([point(size, disk_mb=size / 1_000) for size in SIZES[:2]])
    assert {line[-1] for line in table[1:]} == {"-"}


def test_the_price_of_a_message_is_told_in_bytes() -> None:
    points = [point(size, disk_mb=size * 530 / 1e6, anonymous_mb=40 + size * 0.5 / 1e6) for size in SIZES]
    assert told(points) == "a waiting message takes 530 bytes of disk and 0.50 bytes of memory"


def test_a_table_is_shown_aligned_or_as_markdown() -> None:
    table = [["measure", "1"], ["wire", "0.3"]]
    assert report.aligned(table).splitlines() == ["measure  1  ", "wire     0.3"]
    assert report.markdown(table).splitlines() == ["| measure | 1 |", "| --- | --- |", "| wire | 0.3 |"]


def test_the_steps_of_a_message_are_added_up_without_waiting_and_without_what_is_far() -> None:
    figures = [
        Figure(f"{step}, {size}", "us", [value, value], None)
        for size in steps.SIZES
        for step, value in ((steps.WIRE, 1.0), (steps.FLUSH, 2.0), (steps.WAITED, 100.0), (steps.FAR, 7.0))
    ]
    table = steps.shape(figures)
    assert table[0] == ["us a message, in reads of", "1", "32", "250"]
    assert table[1] == [steps.WIRE, "1", "1", "1"]
    assert table[-1] == ["all of a near message", "3", "3", "3"]


# -- small runs -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("all_cores")
def test_growth_measures_a_real_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("LATE_COUNT", 50), ("LATE_SPAN_MS", 100), ("LATE_AFTER_MS", 500), ("RESTARTS", 1)):
        monkeypatch.setattr(growth, name, value)
    where = tmp_path / "figures.json"
    arguments = ["--sizes", "400", "--markdown", "--json", str(where), "--folder", str(tmp_path / "data")]
    assert growth.main(arguments) == 0
    found = json.loads(where.read_text())
    points = [Point(**each) for each in found["points"]]
    (only,) = points
    assert only.waiting == 400
    assert only.resident_mb > 10
    assert only.cancels_per_s > 0
    assert only.late_p99_ms >= only.late_p50_ms >= 0, "none came early"
    assert report.markdown(lines(points)) in capsys.readouterr().out
    assert not any((tmp_path / "data").iterdir()), "its folder is removed"


def test_the_steps_are_measured_on_the_real_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "COUNT", 1_500)
    monkeypatch.setattr(steps, "SETTINGS", Settings(segment_bytes=MIB, batch_bytes_max=MIB))
    where = tmp_path / "figures.json"
    assert steps.main(["--repeat", "1", "--json", str(where), "--folder", str(tmp_path / "data")]) == 0
    medians = {each["name"]: each["median"] for each in json.loads(where.read_text())["figures"]}
    assert len(medians) == 3 * 12, "every step in every size"
    assert all(math.isfinite(value) for value in medians.values())
    assert medians[f"{steps.APPEND}, 250"] < medians[f"{steps.APPEND}, 1"], "a batch shares its system call"

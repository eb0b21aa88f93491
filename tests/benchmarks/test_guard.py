"""The guard against getting slower: its arithmetic, its verdicts, its baseline. No test looks at a time."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import calibration, guard
from benchmarks.guard import Cost, Guard, Known, Round, lines, measured, ratio, read_baseline, renew_baseline, verdict

pytestmark = pytest.mark.usefixtures("all_cores")

BASELINE = {"send": Known(10.0, "us", 1_000.0)}


@pytest.fixture
def all_cores() -> Iterator[None]:
    """A benchmark binds this process to one core; later tests want all."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


def cost(*costs: float, name: str = "send", loop_s: float = 0.01) -> Cost:
    return Cost(name, "us", [Round(each, loop_s) for each in costs])


# -- arithmetic -------------------------------------------------------------------------------------------------


def test_noise_in_some_rounds_does_not_count() -> None:
    assert cost(10.0, 30.0, 10.5, 99.0, 10.1, 10.2, 10.3, 10.4).value == 10.2


def test_a_machine_that_is_half_as_fast_gives_the_same_ratio() -> None:
    fast, slow = cost(11.0, loop_s=0.01), cost(22.0, loop_s=0.02)
    assert ratio(fast, BASELINE) == ratio(slow, BASELINE) == pytest.approx(1.1)


def test_one_slow_calibration_loop_does_not_make_a_cost_look_cheap() -> None:
    rounds = [Round(10.0, 0.01)] * 5 + [Round(10.0, 0.03)] * 3
    assert ratio(Cost("send", "us", rounds), BASELINE) == pytest.approx(1.0)


def test_a_measure_that_the_baseline_does_not_know_has_no_ratio() -> None:
    assert ratio(cost(10.0, name="fire"), BASELINE) is None


@pytest.mark.parametrize(
    ("found", "expected"), [(None, "new"), (1.0, "ok"), (1.15, "ok"), (1.16, "slower"), (0.87, "ok"), (0.8, "better")]
)
def test_verdicts(found: float | None, expected: str) -> None:
    assert verdict(found, 1.15) == expected


# -- the table and the baseline ---------------------------------------------------------------------------------


def test_the_table_tells_now_as_the_machine_of_the_baseline_would_take() -> None:
    table = lines([cost(24.0, loop_s=0.02), cost(5.0, name="fire")], BASELINE, 1.15)
    assert table[1:] == [("send", "24 us", "12 us", "10 us", "1.20", "slower"), ("fire", "5 us", "", "", "", "new")]


def test_renewing_replaces_what_was_measured_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    renew_baseline(path, [cost(10.0), cost(2.0, name="pull")])
    renew_baseline(path, [cost(8.0)])
    assert read_baseline(path) == {"send": Known(8.0, "us", 800.0), "pull": Known(2.0, "us", 200.0)}


def test_without_a_baseline_everything_is_new(tmp_path: Path) -> None:
    assert read_baseline(tmp_path / "none.json") == {}


def test_the_baseline_in_the_tree_knows_every_measure_with_its_unit() -> None:
    known = read_baseline(guard.BASELINE)
    assert {each.unit for each in known.values()} == {"us", "ms", "s", "MB"}
    assert all(each.value > 0 and each.relative > 0 for each in known.values())


# -- the command ------------------------------------------------------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, *answers: Cost) -> Callable[[], int]:
    """Makes one measure of canned costs; returns a function that counts how often it was taken."""
    left = list(answers)
    monkeypatch.setattr(guard, "MEASURES", {"send": lambda _: [left.pop(0)]})
    return lambda: len(answers) - len(left)


def test_what_seems_slower_is_measured_again_and_the_better_figure_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = answering(monkeypatch, cost(15.0), cost(10.5), cost(99.0))
    (found,) = measured(Guard(tmp_path, 1, 1.0), ["send"], BASELINE, 1.15)
    assert (found.value, taken()) == (10.5, 2)


def test_the_command_ends_with_1_where_a_measure_stays_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "guard.json"
    answering(monkeypatch, cost(10.0))
    assert guard.main(["--renew", "--baseline", str(path)]) == 0
    answering(monkeypatch, *[cost(12.0)] * guard.TRIES)
    assert guard.main(["--baseline", str(path)]) == 1
    assert "slower" in capsys.readouterr().out
    answering(monkeypatch, *[cost(12.0)] * guard.TRIES)
    assert guard.main(["--baseline", str(path), "--limit", "1.3"]) == 0


def test_rounds_can_be_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, cost(10.0, 11.0))
    path = tmp_path / "rounds.json"
    guard.main(["--baseline", str(tmp_path / "none.json"), "--json", str(path)])
    assert [each["cost"] for each in json.loads(path.read_text())["rounds"]["send"]] == [10.0, 11.0]


# -- rounds -----------------------------------------------------------------------------------------------------


def test_a_round_has_the_loops_before_and_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = iter([0.01, 0.03, 0.05])
    monkeypatch.setattr(calibration, "loop_s", lambda _: next(loops))
    costs = iter([9.0, 1e-6, 2e-6])  # the first warms up
    found = Guard(tmp_path, 2, 1.0).rounds(lambda: next(costs))
    assert [each.cost for each in found] == pytest.approx([1.0, 2.0])
    assert [each.loop_s for each in found] == pytest.approx([0.02, 0.04])


def test_a_calibration_takes_time_and_leaves_the_cores_as_they_were() -> None:
    before = os.sched_getaffinity(0)
    assert calibration.loop_s(min(before)) > 0
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("name", ["fire", "start"])
def test_a_measure_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "FIRE_COUNT", 1_000)
    monkeypatch.setattr(guard, "SETTLE_S", 0.0)
    for found in guard.MEASURES[name](Guard(tmp_path, 1, 1.0)):
        assert found.value > 0

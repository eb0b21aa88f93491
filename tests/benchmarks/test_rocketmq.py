"""The side by side benchmark, as far as it needs no RocketMQ: what a program says, what is to be reached, the table."""

import io
import os
from pathlib import Path

import pytest

from benchmarks.bench import Bench
from benchmarks.rocketmq.comparison import Comparison, Goal, markdown
from benchmarks.rocketmq.duel import Duel, run_command
from benchmarks.rocketmq.libraries import Unusable
from benchmarks.rocketmq.measures import Row, measures, within
from benchmarks.rocketmq.program import Failed, figures_in, followed
from benchmarks.rocketmq.systems import NotStarted


class Named:
    """A system that nobody starts."""

    route_address = broker_address = grpc_address = ""
    pid = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def signal(self, number: int) -> None:
        raise AssertionError(number)


def test_figures_are_read_from_their_lines_only() -> None:
    assert figures_in(["ready", "figure p50_ms 0.7310", "a log line", "figure early 0.0000"]) == {
        "p50_ms": 0.731,
        "early": 0.0,
    }


def test_a_program_is_answered_at_each_pause_and_the_server_looked_at() -> None:
    answers = io.StringIO()
    lines, spent_s = followed(answers, io.StringIO("ready\nmeasured\nfigure rate 5.0\n"), os.getpid())
    assert lines == ["ready", "measured", "figure rate 5.0"]
    assert answers.getvalue() == "\n\n"
    assert len(spent_s) == 2
    assert 0 < spent_s[0] <= spent_s[1]


@pytest.mark.parametrize(
    ("goal", "ours", "theirs", "is_met"),
    [
        (Goal(1.3), 130.0, 100.0, True),
        (Goal(1.3), 129.0, 100.0, False),
        (Goal(0.4, at_most=True), 40.0, 100.0, True),
        (Goal(0.4, at_most=True), 41.0, 100.0, False),
        (within(5.0), 5.0, 1.0, True),
        (within(5.0), 5.1, 100.0, False),
        (within(0.0), 0.0, 0.0, True),
    ],
)
def test_a_goal_is_a_number_or_so_many_times_the_others(goal: Goal, ours: float, theirs: float, is_met: bool) -> None:
    assert goal.is_met(ours, theirs) == is_met


def test_medians_are_compared() -> None:
    comparison = Comparison("sends", "msg/s", [100.0, 900.0, 260.0], [200.0, 100.0, 1.0], Goal(1.3))
    assert comparison.medians == (260.0, 100.0)
    assert comparison.ratio == pytest.approx(2.6)
    assert comparison.verdict == "yes"


def test_the_table_shows_both_their_ratio_and_what_is_to_be_reached() -> None:
    found = [
        Comparison("sends", "msg/s", [260.0, 100.0, 900.0], [100.0, 200.0, 150.0], Goal(2.0)),
        Comparison("early", "", [0.0], [0.0], within(0.0)),
        Comparison("worst", "ms", [3.0], [6.0]),
    ]
    assert markdown(found).splitlines() == [
        "| measure | Postdate | RocketMQ | ratio | to reach | met |",
        "| --- | --- | --- | --- | --- | --- |",
        "| sends | 260 msg/s (100 - 900) | 150 msg/s (100 - 200) | 1.73x | >= 2x | no |",
        "| early | 0 | 0 |  | <= 0 | yes |",
        "| worst | 3 ms | 6 ms | 0.5x |  |  |",
    ]


def test_what_only_postdate_was_measured_in_has_no_ratio() -> None:
    found = Comparison("idle", "MB", [12.0, 10.0], [], within(11.5))
    assert found.cells() == ("idle", "11 MB (10 - 12)", "", "", "<= 11.5", "yes")
    assert found.as_json()["rocketmq_median"] is None
    with pytest.raises(AssertionError, match="to nothing"):
        Goal(1.5).is_met(1.0, None)


def test_a_row_of_one_system_alone_is_no_comparison(tmp_path: Path) -> None:
    """As when a run is interrupted."""
    memory, rate, lost = (Row(name, name, "") for name in ("memory", "rate", "lost"))
    duel = Duel(Bench(tmp_path, 1, 1.0))
    for row, name, value in [
        (memory, "Postdate", 1.0), (memory, "RocketMQ", 2.0), (rate, "RocketMQ", 3.0), (rate, "Postdate", 4.0),
        (rate, "RocketMQ", 5.0), (lost, "Postdate", 6.0),
    ]:  # fmt: skip
        duel.note(row, Named(name), value)
    assert duel.comparisons([memory]) == [
        Comparison("rate", "", [4.0], [3.0, 5.0]),
        Comparison("memory", "", [1.0], [2.0]),
    ]


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([], 0),
        ([Comparison("sends", "", [2.0], [1.0], Goal(1.5))], 0),
        ([Comparison("sends", "", [1.0], [1.0], Goal(1.5)), Comparison("more", "", [1.0], [1.0])], 1),
        (Failed("no answer"), 2),
        (NotStarted("no broker"), 2),
        (Unusable("no Java"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_command_tells_by_its_exit_code(
    found: list[Comparison] | BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def work() -> list[Comparison]:
        if isinstance(found, BaseException):
            raise found
        return found

    assert run_command("some", work) == code
    assert ("benchmarks.some: " in capsys.readouterr().err) == (code > 1)


def test_no_two_measures_share_a_line_of_the_table() -> None:
    rows = [row.name for measure in measures(1.0) for row in measure.rows]
    assert len(rows) == len(set(rows))

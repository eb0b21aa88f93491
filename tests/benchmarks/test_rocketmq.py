"""The side by side benchmark, as far as it needs no RocketMQ: what a program says, what is to be reached, the table."""

import io
import os

import pytest

from benchmarks.rocketmq.comparison import Comparison, Goal, markdown
from benchmarks.rocketmq.measures import measures, within
from benchmarks.rocketmq.program import figures_in, followed


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


def test_no_two_measures_share_a_line_of_the_table() -> None:
    rows = [row.name for measure in measures(1.0) for row in measure.rows]
    assert len(rows) == len(set(rows))

"""The comparison with other systems: what is made of received messages, the page, plots, the display, a quick run."""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.peers import __main__ as command
from benchmarks.peers import observed, plot, process, registry, report, usage, works
from benchmarks.peers.figures import FIGURES, Measured, Results
from benchmarks.peers.plan import FULL, QUICK, WORKS, Plan
from benchmarks.peers.progress import CLEAR, Progress
from benchmarks.peers.system import CANCELLED, UNKNOWN, NotRun, Received, System, body, index_of

PLAN = QUICK._replace(
    warm_count=2, spread_count=10, spread_ms=20, burst_count=10, million=100, volatile_count=10, cancel_count=10,
    truth_count=4, receive_limit_s=0.5, restart_limit_s=2.0, ahead_s=0.05, quiet_s=0.0, warm_due_s=0.01, settle_s=0.0,
    truth_due_s=0.3, leak_wait_s=0.02,
)  # fmt: skip


def received(*pairs: tuple[int, float]) -> Received:
    return Received(np.array([index for index, _ in pairs]), np.array([at_ms for _, at_ms in pairs]))


# -- what was received --------------------------------------------------------------------------------------------


def test_lateness_is_counted_from_each_messages_own_due_time() -> None:
    seen = observed.spread(received((0, 11.0), (1, 22.0), (2, 30.0)), np.array([10, 20, 31]))
    assert seen.p50_ms == 1.0
    assert seen.max_ms == 2.0
    assert seen.early == 1


@pytest.mark.parametrize(
    ("dues_ms", "count"),
    [([1, 2, 3], 0), ([1, 1, 1], 0), ([2, 1, 3], 1), ([3, 1, 2], 2), ([], 0)],
)
def test_an_inversion_is_a_message_that_came_after_one_due_later(dues_ms: list[int], count: int) -> None:
    assert observed.inversions(np.array(dues_ms)) == count


def test_of_messages_that_came_twice_the_first_counts_and_strangers_do_not() -> None:
    found = observed.of_range(received((7, 1.0), (5, 2.0), (7, 3.0), (4, 4.0), (6, 5.0)), 5, 3)
    assert found.indexes.tolist() == [7, 5, 6]
    assert found.at_ms.tolist() == [1.0, 2.0, 5.0]


def test_cpu_and_memory_of_processes_that_have_ended_are_nothing() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert usage.cpu_s([ended.pid]) == 0
    assert usage.memory([ended.pid]).total == 0
    assert usage.memory([os.getpid()]).held > 1 << 20


# -- the works, with a system of this process ---------------------------------------------------------------------


class Double(System):
    """Keeps messages in a dictionary."""

    name = "Double"
    slug = "double"
    settings = durable = volatile = ""
    lies: ClassVar[bool] = False  # says that everything is cancelled
    loses: ClassVar[int] = 0  # so many of the messages with the highest numbers are never handed out

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._waiting: dict[int, int] = {}
        self.events: list[str] = []

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"Double": "1"}

    def start(self) -> None:
        self.events.append("start")

    def kill(self) -> None:
        self.events.append("kill")

    def stop(self) -> None:
        self.events.append("stop")

    def pids(self) -> list[int]:
        return [os.getpid()]

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        kept = len(dues_ms) - (self.loses if len(dues_ms) > PLAN.warm_count else 0)
        self._waiting |= dict(enumerate(dues_ms[:kept], first_index))
        return [str(first_index + place) for place in range(len(dues_ms))]

    def receive(self, count: int, limit_s: float) -> Received:
        got: list[tuple[int, float]] = []
        until = time.monotonic() + limit_s
        while len(got) < count and time.monotonic() < until:
            now = time.time_ns() / 1e6
            due = sorted((due, index) for index, due in self._waiting.items() if due <= now)[: count - len(got)]
            for _, index in due:
                del self._waiting[index]
                got.append((index_of(body(index)), now))
            time.sleep(0.001)
        return received(*got)

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        if self.lies:
            return [CANCELLED] * len(handles)
        return [CANCELLED if self._waiting.pop(int(handle), None) else UNKNOWN for handle in handles]


class Liar(Double):
    lies = True


class Loser(Double):
    loses = 3


class Slow(Double):
    """Syncs for every message."""

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        if self.is_durable:
            time.sleep(0.05 * len(dues_ms))
        return super().schedule(dues_ms, first_index)


class Clumsy(Double):
    """Cannot cancel, and fails when it is killed."""

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        return System.cancel(self, handles)

    def kill(self) -> None:
        raise OSError("it does not die")


class Notes:
    def __init__(self) -> None:
        self.steps: list[str] = []
        self.figures: dict[str, float] = {}
        self.notes: dict[str, str] = {}

    def step(self, name: str, title: str) -> None:
        assert title
        self.steps.append(name)

    def figure(self, key: str, value: float) -> None:
        assert key not in self.figures, f"{key} is told twice"
        self.figures[key] = value

    def note(self, step: str, sentence: str) -> None:
        self.notes[step] = sentence


def worked(kind: type[System], folder: Path, letters: str = "abcdefg", plan: Plan = PLAN) -> Notes:
    notes = Notes()
    works.Works(kind, plan, frozenset(letters), folder, notes).run()
    return notes


def test_a_system_that_does_everything_has_every_figure_but_what_it_cannot_tell(tmp_path: Path) -> None:
    notes = worked(Double, tmp_path)
    assert notes.notes == {}
    assert {figure.key for figure in FIGURES} - set(notes.figures) == {"b_visible"}
    assert notes.figures["a_missing"] == notes.figures["a_early"] == notes.figures["a_inversions"] == 0
    assert 0 <= notes.figures["a_p50"] <= notes.figures["a_p99"] <= notes.figures["a_max"]
    assert notes.figures["f_refused"] == notes.figures["f_leaked"] == 0
    assert notes.figures["f_delivered"] == notes.figures["f_strangers"] == 0


def test_a_system_that_calls_everything_cancelled_is_found_out(tmp_path: Path) -> None:
    figures = worked(Liar, tmp_path, "f").figures
    assert figures["f_refused"] == 0
    assert figures["f_leaked"] == figures["f_strangers"] == PLAN.truth_count
    assert figures["f_delivered"] > 0


def test_what_does_not_come_is_told_and_is_no_figure(tmp_path: Path) -> None:
    notes = worked(Loser, tmp_path, "ab")
    assert notes.figures["a_missing"] == 3
    assert "b_last" not in notes.figures
    assert notes.notes["burst"] == "not finished within 0.5 s: 7 of 10 were received"


def test_a_work_that_cannot_be_done_leaves_the_others_and_a_failure_ends_only_its_life(tmp_path: Path) -> None:
    notes = worked(Clumsy, tmp_path, "abcef")
    assert notes.notes["cancel"] == "Double has no cancel: it cannot take back any of 10"
    assert notes.notes["restart"] == "failed: OSError: it does not die"
    assert {"a_p50", "b_last", "b_million_last", "c_durable", "c_volatile"} <= set(notes.figures)


def test_where_durable_sends_take_too_long_the_works_are_done_without_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(works, "SLOW_S", 0.1)
    notes = worked(Slow, tmp_path, "abc", PLAN._replace(burst_count=30, send_limit_s=1.0))
    assert notes.figures["c_durable"] <= 20 < notes.figures["c_volatile"]
    assert {"a_p50", "b_last"} <= set(notes.figures)
    assert notes.notes["spread"].startswith("with sends that are not durable; durable ones take too long, at ")


def test_the_largest_burst_is_left_out_where_its_sends_take_too_long(tmp_path: Path) -> None:
    notes = worked(Double, tmp_path, "b", PLAN._replace(million=10**9, send_limit_s=0.1, patient_limit_s=0.2))
    assert re.fullmatch(
        "1,000,000,000 at one instant: not at all, since sending them takes [0-9,]+ s", notes.notes["million"]
    )
    assert "b_million_last" not in notes.figures


def test_only_the_wanted_works_are_done(tmp_path: Path) -> None:
    assert worked(Double, tmp_path, "e").steps == ["start", "start", "load", "restart"]


@pytest.mark.parametrize("handle", ["17", b"17", "7c9e6679-7425-40de", b"000000000017xxx"])
def test_a_stranger_looks_like_a_handle_and_is_none(handle: bytes | str, tmp_path: Path) -> None:
    stranger = Double(tmp_path, True).stranger(handle)
    assert type(stranger) is type(handle)
    assert stranger != handle


# -- the registry -------------------------------------------------------------------------------------------------


def test_a_system_whose_driver_is_missing_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.MODULES, "redis", "no_such")
    with pytest.raises(NotRun, match="no_such"):
        registry.found("redis")


@pytest.mark.parametrize("slug", ["postdate", "postdate-java", "rocketmq", "rocketmq-100ms"])
def test_a_driver_is_found_by_its_name_and_says_what_it_does(slug: str) -> None:
    kind = registry.found(slug)
    assert kind.slug == slug
    assert kind.name
    assert kind.settings
    assert kind.durable
    assert kind.works <= set(WORKS)


# -- the page -----------------------------------------------------------------------------------------------------


def made_up() -> Results:
    """Postdate, one that is sooner and slower, one that did not finish, one that is not here."""
    about = {
        "cpu": "a processor", "cores": 2, "memory_gb": 25.0, "system": "Linux", "python": "3.11", "rounds": 3,
        "date": "2026-11-16T00:00:00", "quick": False, "works": "abcdefg", "plan": FULL._asdict(),
    }  # fmt: skip
    ours = Measured(
        "Postdate, Python client", "as it comes", "synced", "written", "abcdefg", {"Postdate": "1"},
        {"a_p50": [0.6, 0.5, 0.9], "a_p99": [2.0, 1.0, 6.0], "b_last": [0.7, 0.6, 0.9], "c_durable": [50_000.0] * 3,
         "d_ram": [0.0, -0.1, 0.2], "e_send": [0.4, 0.5, 0.6], "f_strangers": [0.0] * 3},
    )  # fmt: skip
    sooner = Measured(
        "Sooner", "as fast as it gets", "synced | really", "lost", "abcdefg", {"Sooner": "2"},
        {"a_p50": [0.1, 0.2, 0.1], "a_p99": [3.0, 1.5, 1.8], "b_last": [7.0, 6.0, 9.0], "c_durable": [5_000.0] * 3,
         "d_ram": [300.0] * 3, "f_strangers": [200.0] * 3},
        {"restart": ["not finished within 60 s"]},
    )  # fmt: skip
    few = Measured("Few", "", "", "", "ad", {}, {"a_p50": [9.0], "d_ram": [400.0]})
    absent = Measured("absent", not_run="there is no such\nprogram")
    return Results(about, {"postdate": ours, "sooner": sooner, "few": few, "absent": absent})


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    command.write_json(tmp_path / "new" / "peers.json", made_up())
    assert Results.from_json(json.loads((tmp_path / "new" / "peers.json").read_text())) == made_up()


def test_a_note_that_differs_by_its_numbers_alone_is_kept_once() -> None:
    measured = Measured("it")
    for sentence in ("1,000 came within 5 s", "it failed", "2,000 came within 5 s"):
        measured.note("load", sentence)
    assert measured.notes == {"load": ["it failed", "2,000 came within 5 s"]}


def test_the_page_says_where_rounds_are_missing() -> None:
    results = made_up()
    said = "**Not every system was measured in every round: of 3 they had 1 to 3.**"
    assert said in report.markdown(results, set()).splitlines()
    del results.systems["few"]
    assert "Not every system" not in report.markdown(results, set())


def test_the_page_says_where_a_peer_is_better() -> None:
    page = report.markdown(made_up(), set()).splitlines()
    assert "- a, late, p50: Sooner: 0.1 ms. Postdate, Python client: 0.6 ms" in page
    assert "- a, late, p99: Sooner: 1.8 ms, their ranges overlap. Postdate, Python client: 2 ms" in page
    assert "| a, late, p50 | Postdate, Python client: 0.6 ms | Sooner: 0.1 ms | **Sooner**, 6x |" in page
    assert "| b, 100,000: last received | Postdate, Python client: 0.7 s | Sooner: 7 s | Postdate, 10x |" in page
    assert not any("last received: Sooner" in line for line in page)


def test_the_page_shows_medians_ranges_the_best_and_what_is_missing() -> None:
    page = report.markdown(made_up(), set())
    assert "| Sooner | **0.1** (0.1 - 0.2) | **1.8** (1.5 - 3) |" in page
    assert "| Few | 9 | - |" in page
    assert "| Sooner\\* | - |" in page
    assert "- Sooner: not finished within 60 s" in page
    assert "- Not measured: Few" in page
    assert "Not run: absent: there is no such program" in page
    assert "synced / really" in page
    assert "| 100,000: last received | <= 0.3 s | 0.7 s | no |" in page
    assert "![" not in page


def test_a_quick_run_says_so_and_has_no_goals() -> None:
    results = made_up()
    results.about["quick"] = True
    page = report.markdown(results, set())
    assert "its figures say nothing" in page
    assert "Goals of" not in page


def test_every_table_has_cells_of_one_number(tmp_path: Path) -> None:
    report.write(made_up(), tmp_path / "peers.md")
    for table in re.findall(r"(?:^\|.*\n)+", (tmp_path / "peers.md").read_text(), flags=re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_every_plot_of_the_page_is_beside_it_and_is_svg(tmp_path: Path) -> None:
    report.write(made_up(), tmp_path / "peers.md")
    named = re.findall(r"\]\((images/[^)]+)\)", (tmp_path / "peers.md").read_text())
    assert sorted(named) == sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("images/*"))
    assert "images/peers-lateness.svg" in named
    for name in named:
        assert ElementTree.parse(tmp_path / name).getroot().tag == "{http://www.w3.org/2000/svg}svg"


# -- plots --------------------------------------------------------------------------------------------------------


def widths(svg: str, colour: str) -> list[float]:
    bars = ElementTree.fromstring(svg).findall(f".//{{*}}rect[@fill='{colour}']")
    return [float(bar.attrib["width"]) for bar in bars]


def test_bars_grow_by_equal_steps_with_every_factor_of_ten() -> None:
    rows = [plot.Row(str(value), [value]) for value in (1.0, 10.0, 100.0)]
    one, ten, hundred = widths(plot.bars("title", "ms", ["only"], rows), plot.THEIRS[0])
    assert ten - one == pytest.approx(hundred - ten, abs=0.2)
    assert one > 0


def test_nothing_has_no_length_a_missing_value_no_bar_and_a_system_without_any_no_row() -> None:
    rows = [plot.Row("ours <b>", [0.0, None], True), plot.Row("theirs", [10.0, 20.0]), plot.Row("gone", [None, None])]
    svg = plot.bars("title & more", "B", ["one", "two"], rows)
    assert widths(svg, plot.OURS[0]) == [10.0, 1.0]  # of the legend, and a line to see that it is there
    assert "no figure" in svg
    assert "gone" not in svg
    assert "ours &lt;b&gt;" in svg


def test_no_bar_leaves_its_place() -> None:
    svg = plot.bars("t", "s", ["x"], [plot.Row("a", [value]) for value in (0.0003, 1.0, 9.99, 99_999.0)])
    right = plot.WIDTH - plot.MARGIN - plot.VALUE_WIDTH
    assert all(plot.MARGIN + plot.NAME_WIDTH + width <= right + 0.1 for width in widths(svg, plot.THEIRS[0]))


# -- the display --------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_display_tells_system_round_work_and_time() -> None:
    now = [0.0]
    output = io.StringIO()
    progress = Progress(output, ["one", "two"], 2, lambda: now[0])
    for seconds, slug in ((60.0, "one"), (30.0, "two")):
        progress.begin(slug)
        progress.step("cancels")
        now[0] += seconds
        progress.end("done")
    progress.begin("one")
    now[0] += 15
    assert progress.line() == "round 2 of 2, 1 of 2, one: starts  [0:15; 1:45 in all, about 1:15 left]"
    assert "round 1 of 2, 2 of 2, two: cancels  [0:00; 1:00 in all, about 3:00 left]\n" in output.getvalue()
    assert "round 1 of 2, 2 of 2, two: done  [0:30]\n" in output.getvalue()


def test_on_a_terminal_one_line_changes() -> None:
    output = Terminal()
    progress = Progress(output, ["one"], 1, lambda: 0.0)
    progress.begin("one")
    progress.tick()
    assert output.getvalue() == f"{CLEAR}round 1 of 1, 1 of 1, one: starts  [0:00; 0:00 in all]"


# -- the command --------------------------------------------------------------------------------------------------


def test_a_part_of_a_run_does_not_take_the_place_of_the_whole() -> None:
    assert command._options([]).page == command.ROOT / "docs" / "peers.md"
    for flags in (["--quick"], ["--only", "redis"], ["--works", "a"]):
        assert command._options(flags).page.parent == command.RESULTS / "peers"


def test_a_turn_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    heard: list[list[object]] = []
    with pytest.raises(process.NotEnded, match="not finished within 2 s"):
        process.follow(["postdate", str(tmp_path), "a"], 2.0, tmp_path / "errors", heard.append, lambda: None)
    assert heard[0][0] == "about"
    data = str(tmp_path / "first")
    commands = (path / "cmdline" for path in Path("/proc").iterdir() if path.name.isdigit())
    assert not any(data in path.read_text() for path in commands if path.exists())


def test_a_quick_run_measures_postdate_and_writes_all(tmp_path: Path) -> None:
    flags = ["--quick", "--rounds", "1", "--only", "postdate", "--works", "adef", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", *flags],
        cwd=command.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    measured = Results.from_json(json.loads((tmp_path / "peers.json").read_text())).systems["postdate"]
    assert measured.notes == {}
    assert measured.values["a_missing"] == measured.values["a_early"] == [0.0]
    assert measured.values["f_refused"] == measured.values["f_leaked"] == [0.0]
    assert measured.values["f_delivered"] == measured.values["f_strangers"] == [0.0]
    assert len(measured.values["e_delivery"]) == 1
    assert "## e. Restart after kill -9" in (tmp_path / "peers.md").read_text()
    assert (tmp_path / "images" / "peers-lateness.svg").is_file()
    assert "round 1 of 1, 1 of 1, postdate: kill -9 and restart" in done.stderr

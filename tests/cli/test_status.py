"""`postdate status`: what it says of a broker, once and again."""

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postdate import cli
from postdate.cli.status import overview
from postdate.clock import ManualClock
from postdate.wire import codes
from postdate.wire.requests import Request
from tests.support.core import HOUR_MS, MINUTE_MS, SECOND_MS, T0
from tests.support.peer import connected
from tests.support.server import WAIT_S, Served, serving
from tests.support.terminal import Terminal, plain

Capsys = pytest.CaptureFixture[str]
REPORT: dict[str, Any] = {
    "at_ms": T0, "batch": 7, "rows_in": 5_000, "promoted": 1_200, "cancelled": 3, "late": 0, "merged_rows": 0,
    "files": 2, "bytes": 1_234_567, "table_files": 312, "table_bytes": 1_500_000_000, "ingest_s": 0.1,
    "promote_s": 0.08, "stage_s": 0.02, "merge_s": 0.0, "total_s": 0.25, "master": "local[*]",
}  # fmt: skip
TOLD: dict[str, Any] = {
    "late": [],
    "warnings": [],
    "broker": {
        "version": "1.0", "data": "/data", "flush": "sync", "now_ms": T0, "waiting_near": 12_345, "waiting_far": 17,
        "late_ms": 0, "tombstones": 3, "disk_bytes": 98_400_000_000, "disk_free_bytes": 63_200_000_000,
        "log_bytes": 1_234_567_890, "log_problem": "",
    },
    "far": {
        "taken": 5, "length": 22, "backlog": 17, "horizon": T0 + 71 * SECOND_MS, "epoch": 3, "is_served": True,
        "rescued": 0, "rows_in": 1_222_210, "rows_out": 5, "beside_rows": 0, "bulk_attached": True,
        "bulk_promoted": 0, "bulk_since_ms": 0, "bulk_problem": "", "bulk_problem_since_ms": 0,
    },
    "table": "/data/table",
    "pipeline": {"at_ms": T0, "note": ""},
    "reports": [{**REPORT, "at_ms": T0 - MINUTE_MS}, REPORT],
    "stand_in": None,
    "parts": {"bulk": "listens on 127.0.0.1:9878 (process 123)", "pipeline": "runs on Spark (process 124)"},
}  # fmt: skip


def shown(batches: int = 8, **changes: dict[str, Any] | Any) -> list[str]:
    """The lines for TOLD with some of it changed."""
    told = copy.deepcopy(TOLD)
    for part, change in changes.items():
        told[part] = {**told[part], **change} if isinstance(told[part], dict) and change else change
    return overview(told, batches)


# -- in people's words ------------------------------------------------------------------------------------------


def test_everything_at_a_glance() -> None:
    assert (
        shown()
        == """\
postdate 1.0, 2023-11-14T22:13:20.000Z

broker
  data  /data, flush sync
  log   1.2 GB
  disk  63.2 GB of 98.4 GB are free

waiting
  near        12,345  due soon, in memory
  far             17  in the log alone
  table    1,222,205  rows of the table: messages, and cancels
  cancels          3  wait for the messages that they are about

pipeline
  horizon  promoted up to 22:14:31, 71 s ahead
  backlog  17 far rows that it has not taken yet
  rescued  0 messages since the broker was started
  by bulk  0 messages promoted in its place since then
  table    /data/table: 312 files, 1.5 GB

parts
  bulk      listens on 127.0.0.1:9878 (process 123)
  pipeline  runs on Spark (process 124)

last batches
  time      rows in  promoted  cancelled  late  merged  files    MB  seconds
  22:13:20    5,000     1,200          3     0       0      2  1.23     0.25
  22:12:20    5,000     1,200          3     0       0      2  1.23     0.25
  the last one: ingest 0.10 s, promote 0.08 s, stage 0.02 s, merge 0.00 s""".splitlines()
    )


@pytest.mark.parametrize(
    ("far", "line"),
    [
        ({"epoch": 0}, "state  none has registered yet: far messages stay in the log and are on time"),
        (
            {"is_served": False},
            "state    late or away: what is due meanwhile comes from the log, or from the table through bulk",
        ),
        (
            {"bulk_since_ms": T0 - SECOND_MS},
            "state    late or away: bulk promotes in its place since 2023-11-14T22:13:19.000Z",
        ),
        ({"horizon": 0}, "state    has promoted nothing yet: what is due meanwhile comes from the log"),
        ({"horizon": T0 - 5 * SECOND_MS}, "horizon  promoted up to 22:13:15, 5 s behind"),
        ({"horizon": T0 - 2 * HOUR_MS}, "horizon  promoted up to 20:13:20, 2 h behind"),
        ({"horizon": T0 + 3 * HOUR_MS}, "horizon  promoted up to 2023-11-15T01:13:20Z, 3 h ahead"),
        ({"rescued": 1_001}, "rescued  1,001 messages since the broker was started"),
        ({"bulk_promoted": 3}, "by bulk  3 messages promoted in its place since then"),
        ({"backlog": 1}, "backlog  1 far row that it has not taken yet"),
    ],
)
def test_how_the_pipeline_is(far: dict[str, Any], line: str) -> None:
    assert f"  {line}" in shown(far=far)


def test_what_lies_beside_the_table_is_told_and_only_then() -> None:
    assert not any("beside" in line for line in shown())
    line = "  beside         200  rows of imports and postponements that no batch has taken in"
    assert line in shown(far={"beside_rows": 200})


def test_nothing_is_said_of_a_pipeline_that_never_was_but_that() -> None:
    lines = shown(far={"epoch": 0}, reports=[], parts={})
    assert lines[-2:] == ["pipeline", "  state  none has registered yet: far messages stay in the log and are on time"]


def test_trouble_of_the_broker_is_told_and_only_then() -> None:
    assert not any("problem" in line for line in shown())
    assert "  problem  the disk is full" in shown(broker={"log_problem": "the disk is full"})


def test_what_is_late_stands_first_with_its_reason_and_what_to_do() -> None:
    late = {
        "what": "messages",
        "since_ms": T0 - 90 * SECOND_MS,
        "late_ms": 61_000,
        "why": "no disk",
        "to_do": "buy one",
    }
    assert shown(late=[late])[1:7] == [
        "",
        "late",
        "  what   messages",
        "  since  2023-11-14T22:11:50.000Z, now by 1 min 1 s at most",
        "  why    no disk",
        "  to do  buy one",
    ]


def test_what_the_pipeline_waits_for_is_told() -> None:
    assert "  note     it waits for cores" in shown(pipeline={"note": "waits for cores"})


def test_a_table_that_no_batch_has_told_of_is_named() -> None:
    assert "  table    /data/table" in shown(reports=[])
    assert "  table    in a place that no pipeline has told" in shown(reports=[], table="")


def test_figures_that_a_report_lacks_are_left_out() -> None:
    reports = [{"at_ms": T0, "rows_in": 0}, {"at_ms": T0 + 1_000, "rows_in": 10_000, "total_s": 1.5}]
    assert shown(reports=reports)[-4:] == [
        "last batches",
        "  time      rows in  seconds",
        "  22:13:21   10,000     1.50",
        "  22:13:20        0",
    ]


def test_what_bulk_promotes_in_place_of_a_pipeline_is_a_line_of_its_own() -> None:
    stand_in = {**REPORT, "at_ms": T0 - 30 * SECOND_MS, "master": "bulk", "promoted": 4}
    lines = shown(stand_in=stand_in)
    first = next(line for line in lines[lines.index("last batches") + 2 :])
    assert first.split()[:3] == ["22:12:50", "by", "bulk"]


def test_the_newest_batches_are_shown_as_many_as_asked_for() -> None:
    reports = [{"at_ms": T0 + index * 1_000, "rows_in": index} for index in range(20)]
    assert [line.split()[1] for line in shown(3, reports=reports)[-3:]] == ["19", "18", "17"]


# -- on a broker ------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A broker whose clock stands at T0, with a part and a report."""
    with serving(tmp_path / "data", ManualClock(T0)) as found:
        monkeypatch.setenv("POSTDATE_ADDR", found.address)
        found.call(lambda: found.server.show_parts({"bulk": "is resting"}))
        with connected(found) as peer:
            assert peer.ask(Request.REPORT_BATCH, json.dumps(REPORT).encode()).code == codes.SUCCESS
        yield found


@pytest.mark.usefixtures("served")
def test_a_broker_tells_what_waits_and_how_its_parts_are(capsys: Capsys) -> None:
    for delay in ("10s", "1h", "2h"):
        assert cli.main(["send", "orders", "hello", "--delay", delay]) == 0
    capsys.readouterr()
    assert cli.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2023-11-14T22:13:20.000Z")
    for line in ("  near   1  due soon, in memory", "  far    2  in the log alone", "  bulk  is resting"):
        assert line in lines
    assert "  22:13:20    5,000     1,200          3     0       0      2  1.23     0.25" in lines


@pytest.mark.usefixtures("served")
def test_all_of_it_as_json(capsys: Capsys) -> None:
    assert cli.main(["send", "orders", "hello"]) == 0
    capsys.readouterr()
    assert cli.main(["status", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["parts"], told["reports"]) == ({"bulk": "is resting"}, [REPORT])
    assert set(TOLD["far"]) <= set(told["far"])
    assert set(TOLD["broker"]) <= set(told["broker"])
    assert 0 < told["broker"]["log_bytes"] < 10_000


def test_no_broker_is_a_3(capsys: Capsys) -> None:
    assert cli.main(["status", "--addr", "127.0.0.1:1"]) == 3
    assert "no broker at 127.0.0.1:1" in capsys.readouterr().err


# -- again and again --------------------------------------------------------------------------------------------


def watch(*flags: str) -> "subprocess.Popen[str]":
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "postdate", "status", "--watch", "1", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def interrupted(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Its exit code, and what it says on stderr."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    return process.returncode, err


@pytest.mark.usefixtures("served")
def test_where_nobody_looks_each_is_printed_after_the_one_before() -> None:
    with watch() as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while sum(line.startswith("postdate ") for line in lines) < 2:
            lines.append(process.stdout.readline())
        assert interrupted(process) == (0, "")
    assert lines[-2] == "\n"
    assert "\x1b" not in "".join(lines)


@pytest.mark.usefixtures("served")
def test_json_is_a_line_each_time() -> None:
    with watch("--json") as process:
        assert process.stdout is not None
        told = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert interrupted(process) == (0, "")
    assert [each["parts"] for each in told] == [{"bulk": "is resting"}] * 2


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_on_a_terminal_it_is_drawn_in_place_and_fits(columns: int) -> None:
    with Terminal("status", "--watch", "1", columns=columns) as terminal:
        terminal.read_until("\x1b[?1049h")  # the other screen, which leaves the scrollback alone
        for _ in range(2):
            terminal.read_until("\x1b[H")
            screen = terminal.read_until("last batches")
            assert "postdate " in screen
            assert [line for line in plain(screen).splitlines() if len(line) > columns] == []
        terminal.interrupt()
        terminal.read_until("\x1b[?1049l")
        assert terminal.wait() == 0


def test_a_broker_that_goes_is_told_and_looked_for_again(served: Served) -> None:
    with watch() as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("postdate ")
        served.stop()
        assert "no broker at" in process.stderr.readline()
        assert "no broker at" in process.stderr.readline()  # it does not give up
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0

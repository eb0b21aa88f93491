"""The command line on a data folder, and what all commands share: help, mistakes, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from postdate import __version__, cli
from postdate.broker.broker import Broker
from postdate.cli import app
from postdate.storage.disk import RealDisk
from tests.support.core import HOUR_MS, MINUTE_MS, SMALL, SMALL_LIMITS, T0, TOPIC, advance, message, send

FIRST_SEGMENT = "log/00000000000000000000"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Messages with and without delay in two topics, a cancel, a fire."""
    broker = Broker(RealDisk(tmp_path), SMALL, limits=SMALL_LIMITS)
    for topic in (TOPIC, "letters"):
        broker.put_topic(topic, T0, read_queue_count=1, write_queue_count=1)
    send(broker, T0, message("at once", unique="u1", keys="k1", tag="red"), message(b"\xff\x00", topic="letters"))
    send(broker, T0, message("a" * 500, due=T0 + 90 * MINUTE_MS), message("soon", due=T0 + 5))
    broker.cancel(TOPIC, "u9", T0 + HOUR_MS, T0 + 1)
    broker.flush()
    advance(broker, T0 + 5)
    broker.close()
    return tmp_path


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def hurt(folder: Path) -> None:
    path = folder / FIRST_SEGMENT
    path.write_bytes(path.read_bytes().replace(b"at once", b"at onCe"))


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# -- check ------------------------------------------------------------------------------------------------------


def test_check_prints_what_it_verified_in_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", folder) == 0
    *numbers, last = printed(capsys)
    assert last == "ok"
    assert " 4  messages in the log" in numbers
    assert len({line.index("  ", 2) for line in numbers}) == 1


def test_check_prints_each_finding_and_answers_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hurt(folder)
    assert run("check", folder) == 1
    *findings, last = printed(capsys)
    assert f"{FIRST_SEGMENT}, offset" in findings[0]
    assert last == "1 finding"


def test_check_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", folder, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["findings"], answer["numbers"]["messages in the log"]) == (True, [], 4)
    hurt(folder)
    assert run("check", folder, "--json") == 1
    assert not json.loads(capsys.readouterr().out)["ok"]


def assert_refused(capsys: pytest.CaptureFixture[str], *sentences: str) -> None:
    """One sentence on stderr, nothing else."""
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    for sentence in ("postdate: ", *sentences):
        assert sentence in output.err


@pytest.mark.parametrize("command", ["check", "log"])
def test_a_folder_that_is_not_there_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(command, tmp_path / "nowhere") == 2
    assert_refused(capsys, "nowhere is not a folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["check", "log"])
def test_a_foreign_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert run(command, tmp_path) == 2
    assert_refused(capsys, "FORMAT")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_check_of_a_running_brokers_folder_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broker = Broker(RealDisk(folder), SMALL, limits=SMALL_LIMITS)
    assert run("check", folder) == 2
    assert_refused(capsys, "in use")
    broker.abandon()


# -- log --------------------------------------------------------------------------------------------------------


def test_log_prints_batches_and_their_records(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("log", folder) == 0
    lines = printed(capsys)
    assert lines[0].startswith(f"batch 0  at 2023-11-14T22:13:20.000Z ({T0})")
    assert '  96  topic  181 bytes  {"op":"put","name":"orders"' in lines[1]
    assert any('message  orders/0  unique u1  keys k1  tag red  133 bytes  "at once"' in line for line in lines)
    assert any("letters/0" in line and r"b'\xff\x00'" in line for line in lines)
    assert any("due 2023-11-14T23:43:20.000Z" in line and "1 h 30 min after storing" in line for line in lines)
    assert any("cancel  " in line and '"key":"u9"' in line for line in lines)
    assert any(line.endswith("fires what is due") for line in lines)


def test_a_long_body_is_cut_unless_it_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("log", folder)
    assert "a" * 61 not in capsys.readouterr().out
    run("log", folder, "--body")
    assert "a" * 500 in capsys.readouterr().out


def records_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, object]]:
    assert run("log", *arguments, "--json") == 0
    return [json.loads(line) for line in printed(capsys)]


def test_log_as_json_has_a_record_a_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = records_of(capsys, folder)
    assert [record["kind"] for record in records] == ["topic"] * 2 + ["message"] * 4 + ["cancel"]
    first = records[2]
    assert (first["topic"], first["unique_key"], first["tag"], first["at_ms"]) == (TOPIC, "u1", "red", T0)
    assert first["due_at_ms"] is None
    assert records[5]["due_at_ms"] == T0 + 5
    assert records[6]["content"] == {"topic": TOPIC, "key": "u9", "by": "unique", "due": T0 + HOUR_MS}
    assert "body_base64" not in first
    assert records_of(capsys, folder, "--body", "--topic", "letters")[0]["body_base64"] == "/wA="


def test_log_shows_only_what_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = [int(str(record["offset"])) for record in records_of(capsys, folder)]
    chosen = records_of(capsys, folder, "--from", offsets[1], "--to", offsets[3])
    assert [record["offset"] for record in chosen] == offsets[1:3]
    assert len(records_of(capsys, folder, "--topic", TOPIC)) == 3
    assert len(records_of(capsys, folder, "--kind", "cancel")) == 1
    assert len(records_of(capsys, folder, "--limit", 3)) == 3
    assert records_of(capsys, folder, "--limit", 0) == []


def test_log_reads_a_running_brokers_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broker = Broker(RealDisk(folder), SMALL, limits=SMALL_LIMITS)
    send(broker, T0 + 10, message("while it runs"))
    assert run("log", folder) == 0
    assert '"while it runs"' in capsys.readouterr().out
    broker.abandon()


def test_log_tells_on_stderr_what_it_cannot_read_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hurt(folder)
    assert run("log", folder) == 0
    output = capsys.readouterr()
    assert f"{FIRST_SEGMENT}, offset" in output.err
    assert '"soon"' in output.out


# -- the program ------------------------------------------------------------------------------------------------


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run("--version")
    assert capsys.readouterr().out == f"postdate {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [(), ("fly",), ("check",), ("log", ".", "--from", "-1"), ("log", ".", "--kind", "x")]
)
def test_wrong_usage_answers_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert "usage: postdate" in capsys.readouterr().err


HELPS = [(), *((name,) for name in app.COMMANDS)]
HELPS += [("topic", verb) for verb in ("list", "show", "create", "update", "delete")]
HELPS += [("group", verb) for verb in ("list", "show", "create", "update", "delete")]


@pytest.mark.parametrize("arguments", HELPS, ids=" ".join)
def test_help_ends_with_examples_and_exit_codes(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(*arguments, "--help")
    text = capsys.readouterr().out
    assert text.index("examples:\n  ") < text.index("exit codes: 0")


def test_an_interrupt_is_quiet(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("postdate.cli.log.walk", interrupted)
    assert run("log", folder) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    command = [sys.executable, "-m", "postdate", "log", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait() == 0

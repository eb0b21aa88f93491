"""The fault suite on a real broker: a short run breaks no promise, and brokers that break one are caught."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from postdate.message import LOOPBACK, Message
from postdate.storage.record import decode, encode
from verify.faults import troubles
from verify.faults.__main__ import main
from verify.faults.checker import Bounds
from verify.faults.driver import Answer, Move, Moved, Wish
from verify.faults.machine import part_of
from verify.faults.process import ROOT
from verify.faults.remoting import RemotingProducer, key_of
from verify.faults.run import Episode, Plan, Result, history_of
from verify.faults.troubles import TROUBLES, Scene, Trouble
from verify.faults.workload import Load

SEED = 11
WAIT_S = 180
# Generous: other programs may use this machine. scripts/faults has the declared bounds.
PATIENT = Bounds(lateness_ms_p99=30_000, lateness_ms_max=60_000, restart_cpu_s_max=60)
LOAD = Load(producers=2, consumers=1, delay_ms_max=60_000, with_jobs=False, with_imports=False)
ALONE = Plan(8, LOAD, PATIENT, with_pipeline=False, gap_s=(0.5, 1.5), quiet_share=0, pause_s_max=2)
CUT = Trouble(troubles.cut_power, 1)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "postdate")  # lost connections are expected here


def run(folder: Path, plan: Plan, seed: int = SEED) -> Result:
    result = Episode(folder, seed, plan, print).run()
    print(f"seed {seed}: {result.summary}")
    for violation in result.violations[:5]:
        print(violation, *history_of(result.events, violation.key)[-20:], sep="\n  ")
    return result


@pytest.mark.full
def test_a_short_run_with_spark_breaks_no_promise(tmp_path: Path) -> None:
    chosen = (CUT, Trouble(troubles.kill_part, 1), Trouble(troubles.jump_ahead, 1), Trouble(troubles.kill_broker, 1))
    result = run(tmp_path, replace(ALONE, seconds=15, with_pipeline=True, troubles=chosen))
    assert result.violations == []
    kinds = [event["kind"] for event in result.events]
    assert kinds.count("power") >= 1
    assert kinds.count("sent") > 200
    assert {event["group"] for event in result.events if event["kind"] == "saw"} == {"pull", "pop", "client"}
    assert [event["rows"] for event in result.events if event["kind"] == "written"] > [0], "some went through Spark"


def test_a_record_with_a_flipped_bit_has_no_key_and_ends_no_run() -> None:
    record = decode(encode(Message("orders", b"", properties=b"KEYS\x01p1-7k\x02"), b"orders", 0, 0, LOOPBACK))
    assert key_of(record) == "p1-7"
    assert key_of(record._replace(properties=record.properties.replace(b"KEYS", b"KEYQ"))) == ""


def test_a_broker_that_does_not_sync_is_caught(tmp_path: Path) -> None:
    """In flush mode async an answer does not mean that the message is on disk."""
    plan = replace(ALONE, drain_s=2, troubles=(CUT,), settings={"flush": "async", "flush_interval_ms": 60_000})
    found = {violation.invariant for violation in run(tmp_path, plan).violations}
    assert "I1" in found, "what was acknowledged is lost"


def test_a_broker_whose_clock_is_ahead_is_caught(tmp_path: Path) -> None:
    def hasten(scene: Scene) -> None:
        if scene.machine.layer.offset_ms == 0:
            scene.machine.layer.step_clock(5_000)  # and the history does not know

    result = run(tmp_path, replace(ALONE, seconds=4, troubles=(Trouble(hasten, 1),)))
    assert "I2" in {violation.invariant for violation in result.violations}


def test_a_broker_that_forgets_its_moves_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(_: RemotingProducer, wish: Wish, answer: Answer, due_at_ms: int, way: int) -> Move:  # noqa: ARG001
        return Move(Moved.MOVED, due_at_ms or answer.due_at_ms)

    monkeypatch.setattr(RemotingProducer, "move", pretend)
    plan = replace(ALONE, seconds=4, troubles=(Trouble(troubles.drop_connections, 1),))
    assert "I2" in {violation.invariant for violation in run(tmp_path, plan).violations}


@pytest.mark.full
@pytest.mark.parametrize("trouble", [each for each in TROUBLES if not each.needs_pipeline], ids=lambda each: each.name)
def test_each_fault_alone_breaks_no_promise(tmp_path: Path, trouble: Trouble) -> None:
    result = run(tmp_path, replace(ALONE, seconds=15, troubles=(trouble,)))
    assert result.violations == []
    assert any(event["kind"] == "trouble" and event["name"] == trouble.name for event in result.events)


@pytest.mark.full
def test_a_run_with_kills_at_fault_points_alone_breaks_no_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "1", "--seed", "5", "--no-pipeline", "--points"]) == 0
    (summary,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("killed at")]
    assert int(summary.split()[2]) >= 3, summary


def test_ctrl_c_ends_a_run_with_a_verdict() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "verify.faults", "--minutes", "5", "--seed", "1", "--no-pipeline"],
        cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "faults for 5 minutes, from seed 1\n"
        assert process.stdout.readline() == "  seed 1: producers and consumers are at work\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out
    assert out.splitlines()[-1] == "1 episodes, 0 violations (seeds 1 to 1)"


def test_a_recorded_history_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = tmp_path / "history.jsonl"
    events = [
        {"at": 1.0, "kind": "send", "key": "a", "client": "p", "form": "none", "value": 0, "span": 0, "group": ""},
        {"at": 2.0, "kind": "sent", "key": "a", "outcome": "acknowledged", "due": 0},
    ]
    history.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["--judge", str(history)]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION of I1" in out
    assert "a was acknowledged and is in no queue" in out
    assert '"kind": "sent"' in out, "the history of the message is shown"


def test_a_process_is_recognized_by_its_command() -> None:
    commands = {
        "python -m postdate up --json": "broker",
        "python -m postdate bulk --host 127.0.0.1": "bulk",
        "python -m postdate pipeline --bulk 127.0.0.1:1": "pipeline",
        "/usr/bin/java -cp x org.apache.spark.deploy.SparkSubmit": "java",
        "python -m pyspark.daemon": "worker",
        "sleep 1": "",
    }
    assert {command: part_of(command) for command in commands} == commands

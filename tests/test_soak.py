"""The soak: its judge catches every kind of broken promise, and half a minute of it is clean."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process import ROOT
from soak import history, run
from soak.crew import Worker
from soak.history import ACKNOWLEDGED, CANCELLED, DELIVERED, IN_DOUBT, REFUSED, UNKNOWN, Entry, History
from soak.run import Sample, Soak

SEED = 5
SECONDS, KILL_EVERY_S = 20.0, 7.0
WAIT_S = 120


def test_half_a_minute_of_mixed_work_and_kills_breaks_no_promise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "postdate")
    soak = Soak(tmp_path, SEED, SECONDS, KILL_EVERY_S, print)
    result = soak.run()
    print(f"seed {SEED}: {result.summary}")
    assert result.faults == []
    assert soak._broker.start_count >= 3, "it was killed twice"
    told = soak._history.told.values()
    assert sum(each.sent == ACKNOWLEDGED for each in told) > 500
    assert {each.cancel for each in told} >= {"", CANCELLED}
    assert soak._history.backs, "something was sent back"
    assert {each.group for each in soak._history.seen} == {"raw", "client", "pop"}


def test_ctrl_c_ends_it_with_a_verdict() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "soak", "--minutes", "0.25", "--seed", "1"],
        cwd=ROOT, env={"PYTHONPATH": "tests"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "soak of 0.25 minutes, a kill every 30 s, seed 1\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out
    assert "0 faults (seed 1)" in out.splitlines()[-1]


# -- the judge, on histories that never were --------------------------------------------------------------------------


def one_of_each() -> tuple[History, list[Entry]]:
    """Five messages as they may end, and the queue that is right for them."""
    told = History()
    for key, due, sent in (
        ("plain", 0, ACKNOWLEDGED),
        ("timed", 1_000, ACKNOWLEDGED),
        ("stopped", 2_000, ACKNOWLEDGED),
        ("refused", 0, REFUSED),
        ("doubtful", 3_000, IN_DOUBT),
    ):
        told.sending(key, due)
        told.answered([key], sent)
    told.cancelled("stopped", CANCELLED, 1_500)
    told.saw("g", "plain", 10)
    told.saw("g", "timed", 1_000)
    return told, [Entry("t", 0, 0, "plain", 5), Entry("t", 0, 1, "timed", 1_000)]


def test_a_history_in_which_all_promises_were_kept_has_no_fault() -> None:
    told, entries = one_of_each()
    assert history.verdict(told, entries, ["g"]) == []
    assert history.verdict(told, [*entries, Entry("t", 1, 0, "doubtful", 3_001)]) == [], "it may be there, too"
    told.saw("g", "timed", 1_500)
    assert history.verdict(told, entries, ["g"]) == [], "to come again to a consumer is allowed"


def faults_with(*entries: Entry) -> list[str]:
    told, right = one_of_each()
    return history.verdict(told, [*right, *entries])


def test_a_lost_message_is_a_fault() -> None:
    told, entries = one_of_each()
    assert history.verdict(told, entries[:1]) == ["lost: timed was acknowledged and is in no queue"]
    told.seen.clear()
    assert history.verdict(told, entries, ["g"]) == [
        "lost: plain was acknowledged and group g never saw it",
        "lost: timed was acknowledged and group g never saw it",
    ]


def test_a_doubled_message_is_a_fault() -> None:
    assert faults_with(Entry("t", 0, 2, "timed", 1_001)) == ["doubled: timed is 2 times in its queue"]
    twice = [Entry("t", 1, offset, "doubtful", 3_000) for offset in (0, 1)]
    assert faults_with(*twice) == ["doubled: doubtful is 2 times in its queue"]


def test_an_early_message_is_a_fault() -> None:
    assert faults_with(Entry("t", 1, 0, "doubtful", 2_999)) == ["early: doubtful was visible 1 ms before its time"]
    told, entries = one_of_each()
    told.saw("g", "timed", 999)
    assert history.verdict(told, entries) == ["early: group g saw timed 1 ms before its time"]


def test_a_cancelled_message_that_comes_is_a_fault() -> None:
    said = "stopped is in a queue although its cancel was answered with cancelled"
    assert faults_with(Entry("t", 0, 2, "stopped", 2_000)) == [f"cancelled: {said}"]
    told, entries = one_of_each()
    told.saw("g", "stopped", 2_000)
    assert history.verdict(told, entries)[0].startswith("cancelled: group g saw stopped")


def test_a_refused_message_that_comes_is_a_fault() -> None:
    assert faults_with(Entry("t", 0, 2, "refused", 1)) == [
        "refused: refused is in a queue although its send was refused"
    ]


def test_a_message_that_nobody_sent_is_a_fault() -> None:
    assert faults_with(Entry("t", 0, 2, "stray", 1)) == ["foreign: stray is in a queue and was never sent"]
    told, entries = one_of_each()
    told.saw("g", "stray", 1)
    assert history.verdict(told, entries) == ["foreign: group g saw stray, which was never sent"]


def test_a_gap_in_a_queue_is_a_fault() -> None:
    assert faults_with(Entry("t", 1, 1, "doubtful", 3_000)) == ["gap: queue 1 of t has 1 entries and offsets up to 1"]


@pytest.mark.parametrize("outcome", [DELIVERED, UNKNOWN])
def test_a_cancel_that_does_not_find_what_waits_is_a_fault(outcome: str) -> None:
    told, entries = one_of_each()
    told.cancelled("timed", outcome, 999)
    assert history.verdict(told, entries) == [f"untrue: timed was to wait and its cancel was answered with {outcome}"]
    told.cancelled("timed", outcome, 1_000)
    assert history.verdict(told, entries) == [], "at its due time, either may be true"


def test_what_a_group_has_acknowledged_and_is_given_again_is_a_fault() -> None:
    told, entries = one_of_each()
    told.acknowledged("g", "plain")
    assert history.verdict(told, entries) == [], "it saw it before it acknowledged it"
    told.saw("other", "plain", 20)
    told.saw("g", "plain", 20)
    assert history.verdict(told, entries) == ["again: group g was given plain, which it had acknowledged"]


def test_send_backs_are_counted() -> None:
    told, _ = one_of_each()
    told.sending_back("g", "plain")
    assert history.retried(told, "g", []) == history.retried(told, "g", ["plain"]) == []
    told.sent_back("g", "plain")
    assert history.retried(told, "g", ["plain"]) == []
    assert history.retried(told, "g", []) == ["retry: plain of group g came back 0 times, expected 1 to 1"]
    assert history.retried(told, "g", ["plain"] * 2) == ["retry: plain of group g came back 2 times, expected 1 to 1"]
    assert history.retried(told, "g", ["plain", "timed"]) == [
        "retry: timed of group g came back 1 times, expected 0 to 0"
    ]


def test_memory_and_files_that_grow_are_faults(tmp_path: Path) -> None:
    soak = Soak(tmp_path, SEED, SECONDS, KILL_EVERY_S, print)
    soak._samples = [Sample(5.0, 50 << 20, 30 + n % 3) for n in range(30)]
    assert soak._flatness() == []
    soak._samples = [Sample(5.0, (50 + 5 * n) << 20, 30 + 5 * n) for n in range(30)]
    assert [fault.partition(":")[0] for fault in soak._flatness()] == ["files", "memory"]


def test_a_broker_that_complains_is_a_fault(tmp_path: Path) -> None:
    soak = Soak(tmp_path, SEED, SECONDS, KILL_EVERY_S, print)
    soak._broker.log.write_text("2027-01-01T00:00:00.000Z info     fine\n2027-01-01T00:00:00.000Z error    not fine\n")
    assert [line.split()[0] for line in soak._log_faults()] == ["log:"]


def test_a_worker_that_fails_is_a_fault() -> None:
    class Clumsy(Worker):
        def _visit(self) -> None:
            raise ValueError("a mistake")

    worker = Clumsy("clumsy", 1, 0, History())
    worker.start()
    worker.join(WAIT_S)
    assert run._ended([worker]) == ["crew: clumsy: ValueError('a mistake')"]

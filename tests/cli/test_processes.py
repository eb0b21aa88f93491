"""`postdate up` and what it starts beside the broker, as real processes: they come, die, come again, and go with it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from postdate import cli
from postdate.client import admin
from postdate.spark.session import java
from tests.support.core import HOUR_MS
from tests.support.files import open_to_others
from tests.support.pipeline import BEGIN, World
from verify.faults.process import ROOT, Broker, free_port

WAIT_S = 180.0  # Spark takes some ten seconds to start where nobody else works
STOP_S = 15.0  # 5 s are promised; a machine that is busy with other tests gets more
FAST = {"bulk_port": 0, "pipeline_pause_ms_min": 100, "pipeline_pause_ms_max": 400}
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Starts a broker with bulk; at the end it is stopped where it runs, and its folder checked."""
    brokers: list[Broker] = []

    def start_broker(environ: Mapping[str, str] | None = None, **settings: Any) -> Broker:
        broker = Broker(tmp_path, environ, **{**FAST, "pipeline": "none", **settings})
        brokers.append(broker)
        broker.start()
        return broker

    yield start_broker
    for broker in brokers:
        broker.stop()
        assert broker.check() == []


def awaited(found: Callable[[], Any]) -> Any:
    """What is found, when it is."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come")


def part(broker: Broker, name: str) -> str:
    return str(admin.status(broker.route_address)["parts"][name])


def pid_of_bulk(broker: Broker) -> int:
    """When it listens."""
    found = awaited(lambda: re.fullmatch(r"listens on \S+ \(process (\d+)\)", part(broker, "bulk")))
    return int(found[1])


def assert_stops(broker: Broker, number: signal.Signals) -> None:
    """In time, and nothing is left of it."""
    began = time.monotonic()
    broker.stop(number)
    awaited(lambda: not broker.processes())  # Spark's workers notice a moment later that Spark is gone
    assert time.monotonic() - began < STOP_S


# -- bulk -------------------------------------------------------------------------------------------------------


def test_bulk_is_started_and_comes_again_when_it_is_killed(start: Callable[..., Broker]) -> None:
    broker = start()
    first = pid_of_bulk(broker)
    os.kill(first, signal.SIGKILL)
    assert awaited(lambda: part(broker, "bulk").startswith("starts again in"))
    assert pid_of_bulk(broker) != first
    assert any("bulk was killed by SIGKILL; it starts again in 0.1 s" in line for line in broker.log_lines("warning"))
    assert part(broker, "pipeline").startswith("none here: start one with postdate pipeline --addr")


def test_bulk_keeps_the_port_that_the_pipeline_was_told(start: Callable[..., Broker]) -> None:
    broker = start()
    before = part(broker, "bulk").split()[2] if pid_of_bulk(broker) else ""
    os.kill(pid_of_bulk(broker), signal.SIGKILL)
    awaited(lambda: part(broker, "bulk").startswith("starts"))
    pid_of_bulk(broker)
    assert part(broker, "bulk").split()[2] == before


def test_bulk_goes_with_a_broker_that_is_killed(start: Callable[..., Broker]) -> None:
    broker = start()
    pid_of_bulk(broker)
    broker.kill()
    awaited(lambda: not broker.processes())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_everything_in_time_and_says_nothing(start: Callable[..., Broker], number: signal.Signals) -> None:
    broker = start()
    pid_of_bulk(broker)
    assert_stops(broker, number)
    assert broker.log.read_text() == ""


def test_a_port_that_is_taken_is_told_and_the_broker_serves(start: Callable[..., Broker]) -> None:
    first = start()
    pid_of_bulk(first)
    port = int(part(first, "bulk").split()[2].rpartition(":")[2])
    second = Broker(first.data.parent / "second", None, **FAST | {"bulk_port": port, "pipeline": "none"})
    (first.data.parent / "second").mkdir()
    second.start()
    try:
        said = awaited(lambda: (text := part(second, "bulk")).startswith("starts again") and text)
        assert "ended with code 2" in said
        assert str(port) in said
    finally:
        second.stop()


# -- the pipeline -----------------------------------------------------------------------------------------------


def pid_of_pipeline(broker: Broker) -> int:
    """When Spark runs."""
    found = awaited(lambda: re.fullmatch(r"runs on Spark .* \(process (\d+)\)", part(broker, "pipeline")))
    return int(found[1])


def java_of(broker: Broker) -> list[int]:
    """Every Java of a broker; one that is only asked for its version is none yet."""
    commands = {pid: command.split(" ") for pid, command in broker.processes().items()}
    return [pid for pid, words in commands.items() if words[0].endswith("/bin/java") and words[1:] != ["-version"]]


def test_a_pipeline_comes_again_when_it_is_killed_and_ends_in_time(start: Callable[..., Broker]) -> None:
    broker = start(pipeline="embedded")
    first = pid_of_pipeline(broker)
    before = java_of(broker)  # Java, and for a moment the copies of it that become workers
    assert before
    os.kill(first, signal.SIGKILL)
    assert awaited(lambda: part(broker, "pipeline").startswith("starts again"))
    assert pid_of_pipeline(broker) != first
    assert not set(before) & set(broker.processes())
    assert_stops(broker, signal.SIGINT)
    killed, again = broker.log_lines()
    assert killed.endswith("pipeline was killed by SIGKILL; it starts again in 0.1 s")
    assert again.endswith("pipeline runs again")


def test_nothing_that_broker_bulk_and_pipeline_write_is_open_to_others(
    start: Callable[..., Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After sends, stages, a job, and the snapshot of a stop. Spark's scratch files lie in TMPDIR."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    broker = start(pipeline="embedded")
    for number in range(3):
        words = ["send", "orders", "hello", "--delay", "2h", "--key", f"k{number}", "--addr", broker.route_address]
        assert cli.main(words) == 0
    where = ["cancel", "--where", "key = 'k1'", "--addr", broker.route_address]
    assert cli.main(where) == 0
    assert list(broker.data.glob("table/messages/*.parquet"))
    assert list(broker.data.glob("selections/*"))
    (session,) = scratch.glob("postdate-spark-*")
    assert open_to_others(session) == []
    broker.stop()
    assert list(broker.data.glob("snapshots/*"))
    assert open_to_others(broker.data) == []


def test_a_pipeline_goes_with_a_broker_that_is_killed(start: Callable[..., Broker]) -> None:
    broker = start(pipeline="embedded")
    awaited(lambda: java_of(broker))
    broker.kill()
    awaited(lambda: not broker.processes())


# -- while Spark starts -----------------------------------------------------------------------------------------


@pytest.fixture
def silent_java(tmp_path: Path) -> Path:
    """The home of a Java that never gets any further when it becomes Spark's process: Spark starts for ever."""
    found = java.find(os.environ)
    assert isinstance(found, java.Java), found
    program = tmp_path / "silent" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"""#!/bin/sh
case "$*" in
  -version|*org.apache.spark.launcher.Main*) exec {found.home}/bin/java "$@" ;;
  *) exec sleep 100000 ;;
esac
""")
    program.chmod(0o755)
    return tmp_path / "silent"


def is_starting_spark(processes: Callable[[], dict[int, str]]) -> bool:
    return any(command == "sleep 100000" for command in processes().values())


def test_a_pipeline_that_starts_spark_ends_with_every_broker_that_is_killed(
    start: Callable[..., Broker], silent_java: Path
) -> None:
    broker = start(pipeline="embedded", java_home=silent_java)
    for _ in range(3):
        awaited(lambda: is_starting_spark(broker.processes))
        broker.kill()
        awaited(lambda: not broker.processes())
        broker.start()
    assert broker.log_lines() == []


def test_a_pipeline_that_starts_spark_ends_when_it_is_asked_to(start: Callable[..., Broker], silent_java: Path) -> None:
    """By itself: the broker would say that it had to kill it."""
    broker = start(pipeline="embedded", java_home=silent_java, parts_stop_ms=60_000)
    awaited(lambda: is_starting_spark(broker.processes))
    broker.stop()
    awaited(lambda: not broker.processes())
    assert broker.log_lines() == []


def test_java_ends_with_a_pipeline_that_is_killed_while_spark_starts(
    start: Callable[..., Broker], silent_java: Path
) -> None:
    broker = start(
        pipeline="embedded", java_home=silent_java, pipeline_pause_ms_min=60_000, pipeline_pause_ms_max=60_000
    )
    awaited(lambda: is_starting_spark(broker.processes))
    driver = int(part(broker, "pipeline").rpartition("(process ")[2].rstrip(")"))
    os.kill(driver, signal.SIGKILL)
    awaited(lambda: not is_starting_spark(broker.processes))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_query_that_is_interrupted_while_spark_starts_leaves_nothing_behind(
    start: Callable[..., Broker], silent_java: Path, number: signal.Signals
) -> None:
    broker = start(pipeline="none", environ={"JAVA_HOME": str(silent_java)})
    pid_of_bulk(broker)
    with broker.spawn("sql", "select 1", "--addr", broker.route_address) as process:
        awaited(lambda: is_starting_spark(broker.processes))
        process.send_signal(number)
        assert process.wait(WAIT_S) == (130 if number == signal.SIGINT else -signal.SIGTERM)
    awaited(lambda: not is_starting_spark(broker.processes))


# -- the pipeline without Java ----------------------------------------------------------------------------------


def test_without_java_it_serves_and_says_so(start: Callable[..., Broker], tmp_path: Path, capsys: Capsys) -> None:
    broker = start(pipeline="embedded", java_home=tmp_path / "nowhere")
    sentence = part(broker, "pipeline")
    assert sentence.startswith(f"no Java 17 or newer was found (java_home {tmp_path}/nowhere: ")
    assert ": far messages stay in the log and are still on time; install one with: " in sentence
    assert broker.ready["parts"]["pipeline"] == sentence
    assert [line.partition("pipeline: ")[2] for line in broker.log_lines("warning")] == [sentence]
    assert cli.main(["send", "orders", "hello", "--delay", "2s", "--addr", broker.route_address]) == 0
    words = ["consume", "orders", "--group", "g", "--count", "1", "--timeout", "30s", "--addr", broker.route_address]
    assert cli.main(words) == 0
    assert '"hello"' in capsys.readouterr().out


def test_a_java_that_is_too_old_is_named(start: Callable[..., Broker], tmp_path: Path) -> None:
    program = tmp_path / "jdk-11" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'openjdk version \"11.0.1\"' >&2\n")
    program.chmod(0o755)
    broker = start(pipeline="embedded", java_home=tmp_path / "jdk-11")
    assert f"(java_home {tmp_path}/jdk-11: version 11)" in part(broker, "pipeline")


def test_a_java_that_does_not_start_is_told_in_its_own_words(start: Callable[..., Broker], tmp_path: Path) -> None:
    program = tmp_path / "jdk" / "bin" / "java"
    program.parent.mkdir(parents=True)
    version = "echo 'openjdk version \"17.0.1\"' >&2"
    program.write_text(f'#!/bin/sh\n[ "$1" = -version ] && {version} && exit\necho "out of luck" >&2\nexit 1\n')
    program.chmod(0o755)
    broker = start(pipeline="embedded", java_home=tmp_path / "jdk")
    said = awaited(lambda: (text := part(broker, "pipeline")).startswith("starts again") and text)
    assert "it ended with code 3 (postdate: Spark does not start: out of luck" in said
    broker.stop()
    told = [line.partition(" warning  ")[2] for line in broker.log_lines()]
    assert all(text.startswith(("pipeline ended with code 3; ", "pipeline wrote: postdate: Spark")) for text in told)


def test_without_bulk_there_is_no_pipeline(start: Callable[..., Broker]) -> None:
    broker = start(bulk_port=-1, pipeline="embedded")
    assert admin.status(broker.route_address)["parts"] == {
        "bulk": "off: bulk_port is -1",
        "pipeline": "off, as bulk is: far messages stay in the log and are still on time",
    }


# -- postdate pipeline ------------------------------------------------------------------------------------------


def pipeline(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "postdate", "pipeline", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, env=environ)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--java-home", "/no/where"), "no Java 17 or newer was found (java_home /no/where: "),
        (("--bulk", "nonsense"), "the address is 'nonsense', expected host:port"),
        (("--addr", "nonsense"), "the address is 'nonsense', expected host:port"),
        (
            ("--master", "sparc://host"),
            "--master is 'sparc://host', expected local, local[4], local[*], spark://host:port",
        ),
        (("--memory", "64MiB"), "--memory is 67108864, expected 536870912 to 1099511627776"),
        (("--memory", "much"), "--memory is 'much', expected a whole number of bytes or a size such as 16KiB"),
    ],
)
def test_a_pipeline_that_cannot_run_is_refused_with_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = pipeline(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("postdate: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert sentence in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_pipeline_without_a_broker_says_so_once_and_waits_until_it_is_told(number: signal.Signals) -> None:
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "postdate", "pipeline", "--addr", address]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        assert f"warning  no broker answers at {address}, waiting: " in process.stderr.readline()
        process.send_signal(number)
        assert process.communicate(timeout=WAIT_S) == ("", "")
        assert process.returncode == 0


def test_a_pipeline_ends_with_the_process_that_started_it() -> None:
    done = pipeline("--addr", f"127.0.0.1:{free_port()}", "--parent-pid", "1")  # which is not the one that did
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_tells_of_the_parts(start: Callable[..., Broker]) -> None:
    broker = start()
    assert broker.ready["parts"]["pipeline"].startswith("none here")


def test_another_brokers_table_is_refused_before_spark_starts_and_status_says_so(
    start: Callable[..., Broker], tmp_path: Path
) -> None:
    world = World(tmp_path / "other")
    world.send("other", [BEGIN + HOUR_MS])
    world.batch()
    world.close()
    broker = start(pipeline="embedded", table=tmp_path / "other" / "table")
    said = awaited(lambda: "belongs to another broker" in (text := part(broker, "pipeline")) and text)
    assert "ended with code 3" in said
    assert not java_of(broker)
    assert admin.status(broker.route_address)["far"]["taken"] == 0
    assert "belongs to another broker" in broker.log.read_text()

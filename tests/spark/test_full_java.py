"""Real time, real processes: RocketMQ's Java client sends messages that are due in three minutes, Spark carries them.

Three lives of a broker, all at the same time, for they mostly wait: with the pipeline that `postdate up` starts, with
one that is killed while it holds the messages, and with one on a cluster. How late the latest message was is printed
and not judged: the machine may be busy.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import java  # of tests/interop
import pytest
from program import Access, Program, provide

from postdate.access.token import TOKEN_FILE
from postdate.client import admin
from tests.support.cluster import Cluster, Driver, bare_python, wait_for
from verify.faults.process import Broker

pytestmark = pytest.mark.full

DELAY_S = 180
COUNT = 50
TOPIC = "through-spark"
PROGRAM = Program("through Spark", "ThroughSpark", {}, (str(DELAY_S), str(COUNT)))
PROGRAM_S = DELAY_S + 120.0  # it has a limit of its own, which is shorter
# What the broker says of the client, with what differs from run to run by its name.
SAID_OF_CLIENT = [
    "info topic through-spark is made by ADDRESS: 4 queues",
    "info topic %RETRY%spark-consumer is made, on its first use: 1 queues",
    "info group spark-consumer: CLIENT joins, from ADDRESS",
    "info group spark-consumer: CLIENT at ADDRESS says goodbye",
]
UP = {"bulk_port": 0, "segment_bytes": 16 << 20}
P50_MS_MAX = 1_000  # of a busy machine; docs/performance.md has figures of one that is not

Capsys = pytest.CaptureFixture[str]


# -- a broker and what is known about it --------------------------------------------------------------------------


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Broker]:
    """A broker with what it starts beside itself. At the end nothing is left of it, and its folder is clean."""
    folder.mkdir()
    broker = Broker(folder, **UP | settings)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
    wait_for(lambda: not broker.processes(), "the end of all processes")
    assert broker.check() == []


def status(broker: Broker) -> dict[str, Any]:
    return admin.status(broker.route_address)


def sentence(broker: Broker, part: str) -> str:
    return str(status(broker)["parts"][part])


def pid_of_pipeline(broker: Broker) -> int:
    """0 where it does not run."""
    found = re.fullmatch(r"runs on Spark .* \(process (\d+)\)", sentence(broker, "pipeline"))
    return int(found[1]) if found else 0


def pids_of_java(broker: Broker) -> list[int]:
    return [pid for pid, command in broker.processes().items() if command.split(" ")[0].endswith("/bin/java")]


def pid_of_java(broker: Broker) -> int:
    """Waits until that of a pipeline that was killed before is gone."""
    wait_for(lambda: len(pids_of_java(broker)) == 1, "the end of an earlier Java")
    return pids_of_java(broker)[0]


def wait_for_a_batch(broker: Broker, epoch: int) -> None:
    """A batch that a pipeline of this epoch has done."""
    wait_for(lambda: any(report["epoch"] == epoch for report in status(broker)["reports"]), "a batch")


# -- the client ---------------------------------------------------------------------------------------------------


@contextmanager
def sending(broker: Broker, folder: Path) -> "Iterator[subprocess.Popen[str]]":
    """The program, which sends, and waits for what it has sent."""
    own = folder / "client"
    own.mkdir()
    with (own / "errors").open("wb") as errors:
        process = subprocess.Popen(
            java.command(PROGRAM, broker.route_address, own, Access()), cwd=own, env={**os.environ, "HOME": str(own)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What the program says at its end."""
    output, _ = process.communicate(timeout=PROGRAM_S)
    assert process.returncode == 0, output
    said: dict[str, Any] = json.loads(output.splitlines()[-1])
    return said


class Life:
    """What was seen of a broker: by the client, in its status before and after, in its queues and in its log."""

    def __init__(self, broker: Broker, folder: Path, meanwhile: Callable[[int], None] = lambda _: None) -> None:
        self.before = status(broker)
        with sending(broker, folder) as process:
            meanwhile(self.before["far"]["taken"] + COUNT)
            self.client = told(process)
        wait_for(self._is_promoted(broker), "a horizon behind the last message: whatever is twice would show now")
        self.after = status(broker)
        self.shown = sum(queue.max_offset for queue in admin.queue_ranges(broker.route_address, TOPIC))
        self.log = broker.log

    def _is_promoted(self, broker: Broker) -> Callable[[], bool]:
        return lambda: status(broker)["far"]["horizon"] > self.client["last_due"]

    def judge(self) -> None:
        """Everything arrived once, none early, and by way of Spark."""
        assert (self.client["sent"], self.client["received"], self.shown) == (COUNT, COUNT, COUNT)
        assert self.client["shown_ms"]["earliest"] >= 0
        assert self.client["received_ms"]["earliest"] >= 0
        assert self.client["received_ms"]["p50"] < P50_MS_MAX
        assert self._grown("taken") == self._grown("rows_in") == COUNT
        assert self.after["far"]["backlog"] == 0
        assert self.after["broker"]["waiting_near"] == self.after["broker"]["waiting_far"] == 0
        batches = [(report["epoch"], report["batch"]) for report in self.after["reports"]]
        assert batches == sorted(set(batches))

    def judge_promoted(self) -> None:
        """Spark brought back every message, and nobody else did."""
        assert self.after["far"]["rescued"] == 0
        reports = self.after["reports"]
        assert sum(report["promoted"] for report in reports) == COUNT, reports

    def said_of_client(self) -> list[str]:
        """The lines of the log about topics and groups."""
        return [line for line in self._lines() if _is_of_client(line)]

    def said_of_others(self) -> list[str]:
        return [line for line in self._lines() if not _is_of_client(line)]

    def _lines(self) -> list[str]:
        """The lines of the log without their times, and with names for what differs from run to run."""
        lines = [" ".join(line.split()[1:]) for line in self.log.read_text().splitlines()]
        return [_CLIENT.sub("CLIENT", _ADDRESS.sub("ADDRESS", line)) for line in lines]

    def _grown(self, name: str) -> int:
        return int(self.after["far"][name] - self.before["far"][name])

    def tell(self, capsys: Capsys, title: str) -> None:
        with capsys.disabled():
            rescued = self.after["far"]["rescued"]
            print(f"\n{title}: shown {_text(self.client['shown_ms'])}, received {_text(self.client['received_ms'])}")
            print(f"{title}: {rescued} rescued; the broker said:\n{self.log.read_text()}", end="")


_CORES = re.compile(r"\S+ (warning  it waits for cores of \S+: it has none free|info     it has cores of \S+)")
_ADDRESS, _CLIENT = re.compile(r"127\.0\.0\.1:\d+"), re.compile(r"\S+@\S+")


def _is_of_client(line: str) -> bool:
    return line.startswith(("info topic ", "info group "))


def _text(lateness_ms: dict[str, int]) -> str:
    return " ".join(f"{name} {value} ms" for name, value in lateness_ms.items())


# -- three lives --------------------------------------------------------------------------------------------------


def embedded(folder: Path) -> Life:
    with running(folder) as broker:
        wait_for_a_batch(broker, 1)
        assert pid_of_pipeline(broker)
        return Life(broker, folder)


def killed(folder: Path) -> Life:
    with running(folder) as broker:
        wait_for_a_batch(broker, 1)

        def kill(taken: int) -> None:
            """When the messages are in the table, and nowhere else on their way: first the driver, then Java."""
            wait_for(lambda: status(broker)["far"]["taken"] == taken, "the messages to be taken")
            kill_and_wait(broker, pid_of_pipeline(broker))
            wait_for_a_batch(broker, 2)
            kill_and_wait(broker, pid_of_java(broker))

        return Life(broker, folder, kill)


def kill_and_wait(broker: Broker, pid: int) -> None:
    """Returns when another pipeline runs."""
    before = pid_of_pipeline(broker)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: sentence(broker, "pipeline").startswith("starts again"), "a word about the restart")
    wait_for(lambda: pid_of_pipeline(broker) not in (0, before), "another pipeline")


def clustered(folder: Path) -> Life:
    with ExitStack() as stack:
        cluster = Cluster(folder.parent / "cluster", 2)
        stack.callback(cluster.end)
        broker = stack.enter_context(running(folder, pipeline="none", table=folder / "table"))
        wait_for(lambda: sentence(broker, "bulk").startswith("listens on "), "bulk")
        python, token = bare_python(folder / "bare"), broker.data / TOKEN_FILE
        driver = Driver(broker.route_address, cluster.master, python, folder, token=token)
        stack.callback(driver.end)
        wait_for_a_batch(broker, 1)
        life = Life(broker, folder)
        assert driver.stop() == 0, driver.log.read_text()
        # On a busy machine an executor may take long to start, which the driver says.
        said = [line for line in driver.log.read_text().splitlines() if not _CORES.fullmatch(line)]
        assert len(said) == 1, said
        assert re.fullmatch(rf"pipeline runs on Spark \S+, {cluster.master}, table {driver.table}", said[0])
        return life


Lives = dict[Callable[[Path], Life], Future[Life]]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    provide(java.LANGUAGE.tools)
    java.build()
    folder = tmp_path_factory.mktemp("lives")
    with ThreadPoolExecutor(3) as pool:
        yield {live: pool.submit(live, folder / live.__name__) for live in (embedded, killed, clustered)}


def test_messages_of_the_java_client_pass_through_spark_on_time(lives: Lives, capsys: Capsys) -> None:
    life = lives[embedded].result()
    life.tell(capsys, "embedded")
    life.judge()
    life.judge_promoted()
    assert (life.said_of_client(), life.said_of_others()) == (SAID_OF_CLIENT, [])


def test_a_pipeline_that_is_killed_is_noticed_by_nobody_but_status(lives: Lives, capsys: Capsys) -> None:
    life = lives[killed].result()
    life.tell(capsys, "killed")
    life.judge()
    assert life.after["far"]["epoch"] == life.before["far"]["epoch"] + 2
    assert life.said_of_client() == SAID_OF_CLIENT
    assert life.said_of_others() == [
        "warning pipeline was killed by SIGKILL; it starts again in 1 s",
        "info pipeline runs again",
        "warning pipeline ended with code 3; it starts again in 2 s",
        "warning pipeline wrote: postdate: Spark's Java process was killed by SIGKILL",
        "info pipeline runs again",
    ]


def test_messages_of_the_java_client_pass_through_a_cluster_on_time(lives: Lives, capsys: Capsys) -> None:
    life = lives[clustered].result()
    life.tell(capsys, "cluster")
    life.judge()
    life.judge_promoted()
    assert (life.said_of_client(), life.said_of_others()) == (SAID_OF_CLIENT, [])

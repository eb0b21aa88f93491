"""An operator of mqadmin, and somebody for it to look at.

A program beside this file is a story of commands that are typed as one would, and of what they must say. Its arguments
are the address of the route port, then the words that start a JVM. Commands that only look run at the same time.
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

MAIN = "org.apache.rocketmq.tools.command.MQAdminStartup"
AT_ONCE = 8  # a command takes a second of work and then waits three for its own threads
COMMAND_S = 60.0
TRIES, TIMED_OUT = 5, "RemotingTimeoutException"
WAIT_S = 60.0
CLUSTER, BROKER = "DefaultCluster", "postdate"


class Wrong(Exception):
    """A command did not say what it must; the sentence says what."""


class Sent(NamedTuple):
    """A message, as its producer was told."""

    unique_key: str
    message_id: str
    queue_id: str
    offset: str


class Look(NamedTuple):
    """A command that only looks, what it must show, and what that means."""

    meaning: str
    words: tuple[str, ...]
    patterns: tuple[str, ...]


# -- commands -------------------------------------------------------------------------------------------------------


class Operator:
    """Types commands against one broker."""

    def __init__(self, route: str, jvm: Sequence[str]) -> None:
        self.route = route
        self._jvm = [*jvm[:1], f"-Drocketmq.log.root={Path.cwd()}", f"-Duser.home={Path.cwd()}", *jvm[1:]]
        self._jvm[1:1] = [f"-Drocketmq.home.dir={Path.cwd()}"]  # whose conf/tools.yml says as whom it signs
        self.broker = ""

    def types(self, *words: str) -> str:
        """Returns all that the command prints. It gives a broker three seconds; a machine that is busy may need more,
        so it gets another try.
        """
        for _ in range(TRIES):
            said = self._printed(words)
            if TIMED_OUT not in said:
                break
        return said

    def _printed(self, words: Sequence[str]) -> str:
        done = subprocess.run(
            [*self._jvm, MAIN, *words, "-n", self.route],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S,
            check=False,
        )  # fmt: skip
        return done.stdout

    def expects(self, meaning: str, words: Sequence[str], *patterns: str) -> str:
        """Types a command that must show these patterns; returns what it printed. Raises Wrong."""
        said = self.types(*words)
        for pattern in patterns:
            if not re.search(pattern, said, re.MULTILINE):
                raise Wrong(f"{' '.join(words)} does not show {pattern!r}:\n{said}")
        ok(f"{words[0]}: {meaning}")
        return said

    def looks(self, looks: Sequence[Look]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda look: self.expects(look.meaning, look.words, *look.patterns), looks))

    @contextmanager
    def worker(self) -> Iterator["Worker"]:
        worker = Worker([*self._jvm, "Worker", self.route])
        try:
            yield worker
        finally:
            worker.end()


class Worker:
    """A JVM with a consumer and a producer."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._said:
                self.lines.append(line.strip())
                self._said.notify_all()

    def wait(self, what: str, holds: Callable[[list[str]], bool]) -> None:
        """Returns when that holds of its lines. Raises Wrong."""
        with self._said:
            if not self._said.wait_for(lambda: holds(self.lines), WAIT_S):
                raise Wrong(f"the worker has not {what}; it said:\n" + "\n".join(self.lines))

    def got(self, text: str, times: int) -> None:
        self.wait(f"got {text} {times} times", lambda lines: lines.count(f"got {text}") >= times)

    def sent(self, text: str) -> Sent:
        (line,) = (line for line in self.lines if line.startswith(f"sent {text} "))
        return Sent(*line.split()[2:])

    def end(self) -> None:
        """Has it go. May be repeated."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()


def ok(sentence: str) -> None:
    print(f"ok: {sentence}", flush=True)


def find_broker(operator: Operator) -> str:
    """Returns the broker's address."""
    said = operator.expects(
        "the broker, its version and its load", ["clusterList"], rf"^{CLUSTER} +{BROKER} +0 +\S+:\d+"
    )
    found = re.search(rf"{BROKER} +0 +(\S+)", said)
    assert found is not None
    operator.broker = found[1]
    return found[1]


def prepare(operator: Operator) -> None:
    """Finds the broker, makes a topic and two groups."""
    broker = find_broker(operator)
    operator.looks([
        Look("a topic is made", ("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "2", "-w", "2", "-a",
             "+message.type=DELAY"), (rf"create topic to {broker} success",)),
        Look("by the address of a broker too", ("updateTopic", "-b", broker, "-t", "spare"), (r"success",)),
        Look("a group is made", ("updateSubGroup", "-c", CLUSTER, "-g", "workers", "-r", "3"),
             (r"success", r"retryMaxTimes=3")),
        Look("by the address of a broker too", ("updateSubGroup", "-b", broker, "-g", "others"), (r"success",)),
    ])  # fmt: skip


def wait_for_progress(operator: Operator) -> None:
    """A Java consumer commits every five seconds."""
    deadline = time.monotonic() + WAIT_S
    while "Consume Diff Total: 0" not in operator.types("consumerProgress", "-g", "workers", "-t", "orders"):
        if time.monotonic() > deadline:
            raise Wrong("the worker has not committed what it got")


def run(story: Callable[[Operator, Worker], None]) -> int:
    """Tells a story to an operator and to a worker that has sent three messages and got two."""
    operator = Operator(sys.argv[1], sys.argv[2:])
    try:
        prepare(operator)
        with operator.worker() as worker:
            worker.wait("sent its messages", lambda lines: "ready" in lines)
            worker.got("first", 1)
            worker.got("second", 1)
            story(operator, worker)
    except Wrong as error:
        print(f"FAILED: {error}")
        return 1
    return 0

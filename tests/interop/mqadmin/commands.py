"""An operator's day: every command of mqadmin that we promise, typed as one would, and what it must say.

Arguments: the address of the route port, then the words that start a JVM. Commands that only look run at the same time.
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

from postdate.wire import codes

MAIN = "org.apache.rocketmq.tools.command.MQAdminStartup"
AT_ONCE = 4
COMMAND_S = 60.0
TRIES, TIMED_OUT = 5, "RemotingTimeoutException"
WAIT_S = 60.0
BODIES = Path("/tmp/rocketmq/msgbodys")  # where mqadmin leaves the bodies of messages that it was asked for
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
        self._route = route
        self._jvm = [*jvm[:1], f"-Drocketmq.log.root={Path.cwd()}", f"-Duser.home={Path.cwd()}", *jvm[1:]]
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
            [*self._jvm, MAIN, *words, "-n", self._route],
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
        worker = Worker([*self._jvm, "Worker", self._route])
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


# -- the story ------------------------------------------------------------------------------------------------------


def story(operator: Operator) -> None:
    prepare(operator)
    with operator.worker() as worker:
        worker.wait("sent its messages", lambda lines: "ready" in lines)
        worker.got("first", 1)
        worker.got("second", 1)
        try:
            look_at_the_broker(operator)
            look_at_clients(operator)
            look_at_messages(operator, worker)
            change_settings(operator)
            change_routes(operator)
            move_the_group(operator, worker)
        finally:
            forget_bodies(worker)
    clean_up(operator)


def prepare(operator: Operator) -> None:
    said = operator.expects(
        "the broker, its version and its load", ["clusterList"], rf"^{CLUSTER} +{BROKER} +0 +\S+:\d+"
    )
    found = re.search(rf"{BROKER} +0 +(\S+)", said)
    assert found is not None
    operator.broker = broker = found[1]
    operator.looks([
        Look("a topic is made", ("updateTopic", "-c", CLUSTER, "-t", "orders", "-r", "2", "-w", "2", "-a",
             "+message.type=DELAY"), (rf"create topic to {broker} success",)),
        Look("by the address of a broker too", ("updateTopic", "-b", broker, "-t", "spare"), (r"success",)),
        Look("a group is made", ("updateSubGroup", "-c", CLUSTER, "-g", "workers", "-r", "3"),
             (r"success", r"retryMaxTimes=3")),
        Look("by the address of a broker too", ("updateSubGroup", "-b", broker, "-g", "others"), (r"success",)),
    ])  # fmt: skip


def look_at_the_broker(operator: Operator) -> None:
    broker = operator.broker
    wait_for_progress(operator)
    operator.looks([
        Look("what came and went today", ("clusterList", "-m"), (rf"^{CLUSTER} +{BROKER} +0 +0 +3 +[2-9]",)),
        Look("figures, of what waits too", ("brokerStatus", "-b", broker),
             (r"^putMessageTimesTotal +: 3$", r"^timerCongestNum +: 1$", r"^postdate_waiting_far +: 1$",
              r"^postdate_waiting_near +: 0$", r"^postdate_log_problem +: none$", r"^commitLogDiskRatio +: 0\.\d+$",
              r"^msgGetTotalTodayNow +: [2-9]", r"^postdate_connections +: [1-9]", r"^postdate_held_pulls +: [1-9]")),
        Look("settings, and which may change", ("getBrokerConfig", "-b", broker),
             (r"^lead_ms += +60000$", r"^retention_ms += +259200000$", r"^live_settings += .*\bretention_ms\b")),
        Look("settings of a name server: the same", ("getNamesrvConfig",), (r"^lead_ms += +60000$",)),
        Look("all topics", ("topicList",), (r"^orders$", r"^spare$", r"^%RETRY%workers$")),
        Look("with their groups", ("topicList", "-c"), (rf"^{CLUSTER} +orders +workers",)),
        Look("where a topic is", ("topicRoute", "-t", "orders"), (rf'0:"{re.escape(broker)}"', r'"writeQueueNums":2')),
        Look("its offsets and how fast it grows", ("topicStatus", "-t", "orders"),
             (rf"^{BROKER} +0 +0 +\d", rf"^{BROKER} +1 +0 +\d", r"^Topic Put TPS: \d")),
        Look("its cluster", ("topicClusterList", "-t", "orders"), (rf"^{CLUSTER}$",)),
        Look("how it would be shared out", ("allocateMQ", "-t", "orders", "-i", "10.0.0.1,10.0.0.2"),
             (r'"10\.0\.0\.1":\[\{[^}]*"queueId":[01]', r'"10\.0\.0\.2":\[\{[^}]*"queueId":[01]')),
        Look("rates by topic and group", ("statsAll", "-t", "orders"),
             (r"^orders +workers +0 +\d+\.\d+ +\d+\.\d+ +2 +[2-9]",)),
        Look("how far all groups are", ("brokerConsumeStats", "-b", broker),
             (r"^orders +workers +postdate +0 +1 +1 +0", r"^Diff Total: 0$")),
        Look("the entries of a queue", ("queryCq", "-t", "orders", "-q", "0", "-i", "0", "-c", "1", "-b", broker),
             (r"physicOffset=[1-9]",)),
    ])  # fmt: skip


def wait_for_progress(operator: Operator) -> None:
    """A Java consumer commits every five seconds."""
    deadline = time.monotonic() + WAIT_S
    while "Consume Diff Total: 0" not in operator.types("consumerProgress", "-g", "workers", "-t", "orders"):
        if time.monotonic() > deadline:
            raise Wrong("the worker has not committed what it got")


def look_at_clients(operator: Operator) -> None:
    operator.looks([
        Look("how far a group is", ("consumerProgress", "-g", "workers"),
             (r"^orders +postdate +0 +1 +1 +0 +0 +2", r"^orders +postdate +1 +1 +1 +0 +0 +2")),
        Look("with the addresses of its members", ("consumerProgress", "-g", "workers", "-s", "true"),
             (r"^orders +postdate +0 +1 +1 +\d+\.\d+\.\d+\.\d+ +0",)),
        Look("of all groups", ("consumerProgress",), (r"^workers +1 +V5_5_0 +PUSH +CLUSTERING +\d+ +0",)),
        Look("what a consumer is doing, as it says itself", ("consumerStatus", "-g", "workers"),
             (r"^1 +\S+@\S+ +V5_5_0", r"Same subscription", r"Rebalance OK")),
        Look("a consumer that is not there", ("consumerStatus", "-g", "workers", "-i", "nobody"),
             (r"no consumer 'nobody' of group 'workers' is connected",)),
        Look("who is connected", ("consumerConnection", "-g", "workers"),
             (r"^\S+@\S+ +127\.0\.0\.1:\d+ +JAVA +V5_5_0", r"^orders +paid \|\| late",
              r"ConsumeType: CONSUME_PASSIVELY", r"ConsumeFromWhere: CONSUME_FROM_FIRST_OFFSET")),
        Look("a group that nobody is of", ("consumerConnection", "-g", "others"), (r"no consumer of group 'others'",)),
        Look("who sends", ("producerConnection", "-g", "senders", "-t", "orders"),
             (r"^0001 +\S+@\S+ +127\.0\.0\.1:\d+ +JAVA +V5_5_0",)),
        Look("all who send", ("producer", "-b", operator.broker),
             (r"producer group \(senders\) instance : clientId=\S+@",)),
        Look("the settings of a group", ("getConsumerConfig", "-g", "workers"), (r"^retryMaxTimes += +3$",)),
    ])  # fmt: skip
    files = [file for file in Path.cwd().rglob("*@*") if file.is_file()]
    if not any("orders" in file.read_text() for file in files):
        raise Wrong(f"consumerStatus has left no file about orders in {files}")
    ok("consumerStatus: its file names the consumer's queues")


def look_at_messages(operator: Operator, worker: Worker) -> None:
    first, waits = worker.sent("first"), worker.sent("tomorrow")
    looks = [
        Look("a message and who consumed it", ("queryMsgById", "-t", "orders", "-i", first.message_id),
             (r"^Keys: +\[key-first\]", r"^Tags: +\[paid\]", r"consumerGroup=workers, trackType=CONSUMED,")),
        Look("one that waits", ("queryMsgById", "-t", "orders", "-i", waits.message_id),
             (r"^Keys: +\[key-tomorrow\]", r"TIMER_DELAY_MS=86400000")),
        Look("a message that is not there", ("queryMsgById", "-t", "orders", "-i", first.message_id[:-4] + "0001"),
             (r"no message",)),
        Look("a message by its place", ("queryMsgByOffset", "-t", "orders", "-b", BROKER, "-i", first.queue_id, "-o",
             first.offset), (r"^Keys: +\[key-first\]", rf"^OffsetID: +{first.message_id}")),
        Look("all that is visible", ("printMsg", "-t", "orders", "-d", "true"), (r"BODY: first", r"BODY: second")),
        Look("by tag", ("printMsg", "-t", "orders", "-s", "paid"), (r"^MSGID: ",)),
        Look("of one queue", ("printMsgByQueue", "-t", "orders", "-a", BROKER, "-i", first.queue_id, "-p", "true", "-d",
             "true"), (r"BODY: first",)),
        Look("consumed once", ("consumeMessage", "-t", "orders", "-g", "lookers", "-c", "4"),
             (r"^Consume ok", rf"^MSGID: {first.unique_key}")),
    ]  # fmt: skip
    looks += looks_by_key(worker) if hasattr(codes, "QUERY_MESSAGE") else []
    operator.looks(looks)
    if "tomorrow" in operator.types("printMsg", "-t", "orders", "-d", "true"):
        raise Wrong("printMsg shows a message before it is due")
    ok("printMsg: not what waits")


def looks_by_key(worker: Worker) -> list[Look]:
    first, waits = worker.sent("first"), worker.sent("tomorrow")
    return [
        Look("a message by its key", ("queryMsgByKey", "-t", "orders", "-k", "key-first"),
             (rf"^{first.unique_key} +{first.queue_id} +{first.offset}",)),
        Look("one that waits", ("queryMsgByKey", "-t", "orders", "-k", "key-tomorrow"), (rf"^{waits.unique_key} +",)),
        Look("a key that nobody has", ("queryMsgByKey", "-t", "orders", "-k", "key-never"), (r"CODE: 208",)),
        Look("a message by its unique key", ("queryMsgByUniqueKey", "-t", "orders", "-i", first.unique_key),
             (r"^Keys: +\[key-first\]", r"POSTDATE_STATE=visible", r"consumerGroup=workers, trackType=CONSUMED,")),
        Look("one that waits, and that it does", ("queryMsgByUniqueKey", "-t", "orders", "-i", waits.unique_key),
             (r"^Keys: +\[key-tomorrow\]", r"POSTDATE_STATE=waiting")),
    ]  # fmt: skip


def change_settings(operator: Operator) -> None:
    broker = operator.broker
    operator.expects(
        "a setting is changed",
        ["updateBrokerConfig", "-b", broker, "-k", "retention_ms", "-v", "7d"],
        rf"update broker config success, {broker}",
    )
    operator.looks([
        Look("the change is shown", ("getBrokerConfig", "-c", CLUSTER), (r"^retention_ms += +604800000$",)),
        Look("a setting that may not change is refused by name",
             ("updateBrokerConfig", "-c", CLUSTER, "-k", "messageDelayLevel", "-v", "1s"),
             (r"messageDelayLevel \(message_delay_level\) cannot change while the broker runs",)),
        Look("a value out of bounds too", ("updateBrokerConfig", "-b", broker, "-k", "topics_max", "-v", "0"),
             (r"topics_max is 0, expected 1 to 1000000",)),
        Look("and what is no setting", ("updateBrokerConfig", "-b", broker, "-k", "retention", "-v", "7d"),
             (r"'retention' is no setting; did you mean retention_ms",)),
    ])  # fmt: skip


def change_routes(operator: Operator) -> None:
    operator.expects(
        "write permission is taken from the routes",
        ["wipeWritePerm", "-b", BROKER],
        rf"wipe write perm of broker\[{BROKER}\] in name server\[\S+\] OK, [2-9]",
    )
    operator.expects("and is missing there", ["topicRoute", "-t", "orders"], r'"perm":4')
    operator.expects("and is given back", ["addWritePerm", "-b", BROKER], r"OK, [2-9]")
    operator.expects(
        "a topic is closed for writing",
        ["updateTopicPerm", "-t", "orders", "-b", operator.broker, "-p", "4"],
        r"update topic perm from 6 to 4",
    )
    operator.expects(
        "a message to it is refused",
        ["sendMessage", "-t", "orders", "-p", "no", "-b", BROKER, "-i", "0"],
        r"may not be written|not exist|No route",
    )
    operator.expects("and opened again", ["updateTopicPerm", "-t", "orders", "-c", CLUSTER, "-p", "6"], r"from 4 to 6")


def move_the_group(operator: Operator, worker: Worker) -> None:
    operator.expects(
        "a message is sent",
        ["sendMessage", "-t", "orders", "-p", "third", "-k", "key-third", "-c", "paid", "-b", BROKER, "-i", "1"],
        rf"^{BROKER} +1 +SEND_OK +[0-9A-F]+",
    )
    worker.got("third", 1)
    operator.expects(
        "a group is moved back",
        ["resetOffsetByTime", "-g", "workers", "-t", "orders", "-s", "0"],
        rf"^{BROKER} +0 +0 *$",
        rf"^{BROKER} +1 +0 *$",
    )
    for text in ("first", "second", "third"):
        worker.got(text, 2)
    ok("resetOffsetByTime: a consumer that runs reads all again")
    operator.expects(
        "one queue to an offset",
        ["resetOffsetByTime", "-g", "workers", "-t", "orders", "-s", "0", "-b", operator.broker, "-q", "1", "-o", "1"],
        r"reset|success|1",
    )
    worker.got("third", 3)
    ok("resetOffsetByTime: and one queue from there on")
    operator.expects(
        "a group skips what it has not read",
        ["skipAccumulatedMessage", "-g", "workers", "-t", "orders"],
        rf"^{BROKER} +0 +1 *$",
        rf"^{BROKER} +1 +2 *$",
    )
    operator.expects(
        "another group goes on where this one is",
        ["cloneGroupOffset", "-s", "workers", "-d", "others", "-t", "orders"],
        r"clone group offset success",
    )
    operator.expects(
        "and is there",
        ["consumerProgress", "-g", "others"],
        r"^orders +postdate +0 +1 +1 +0",
        r"^orders +postdate +1 +2 +2 +0",
    )


def forget_bodies(worker: Worker) -> None:
    for line in worker.lines:
        if line.startswith("sent "):
            (BODIES / line.split()[2]).unlink(missing_ok=True)


def clean_up(operator: Operator) -> None:
    operator.looks([
        Look("a group is deleted", ("deleteSubGroup", "-c", CLUSTER, "-g", "workers"),
             (r"delete subscription group \[workers\] from broker .* success",
              r"delete topic \[%RETRY%workers\] .* success", r"delete topic \[%DLQ%workers\] .* success")),
        Look("a topic is deleted", ("deleteTopic", "-c", CLUSTER, "-t", "orders"),
             (r"delete topic \[orders\] from cluster \[DefaultCluster\] success",
              r"delete topic \[orders\] from NameServer success")),
    ])  # fmt: skip
    left = operator.types("topicList").split()
    if "orders" in left or "%RETRY%workers" in left:
        raise Wrong(f"topics that were deleted are there: {left}")
    operator.expects(
        "what waited for the topic is cancelled", ["brokerStatus", "-c", CLUSTER], r"postdate_waiting_far +: 0$"
    )


def main(route: str, jvm: Sequence[str]) -> int:
    try:
        story(Operator(route, jvm))
    except Wrong as error:
        print(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

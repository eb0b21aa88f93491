"""What an operator changes: settings, routes, how far a group is; and how it cleans up."""

import sys
from concurrent.futures import ThreadPoolExecutor

from operating import BROKER, CLUSTER, Look, Operator, Worker, Wrong, ok, run


def story(operator: Operator, worker: Worker) -> None:
    send(operator, worker)
    with ThreadPoolExecutor() as pool:
        stories = (change_settings, change_routes, change_values)
        chains = [pool.submit(chain, operator) for chain in stories]
        chains.append(pool.submit(move_the_group, operator, worker))
        for chain in chains:
            chain.result()
    worker.end()
    clean_up(operator)


def send(operator: Operator, worker: Worker) -> None:
    operator.expects(
        "a message is sent",
        ["sendMessage", "-t", "orders", "-p", "third", "-k", "key-third", "-c", "paid", "-b", BROKER, "-i", "1"],
        rf"^{BROKER} +1 +SEND_OK +[0-9A-F]+",
    )
    worker.got("third", 1)


def change_settings(operator: Operator) -> None:
    broker = operator.broker
    operator.expects(
        "a setting is changed",
        ["updateBrokerConfig", "-b", broker, "-k", "retention_ms", "-v", "7d"],
        rf"update broker config success, {broker}",
    )
    operator.expects(
        "a setting by the name that RocketMQ has for it",
        ["updateNamesrvConfig", "-k", "timerMaxDelaySec", "-v", "864000"],
        r"update name server config success",
    )
    operator.looks([
        Look("the change is shown", ("getBrokerConfig", "-c", CLUSTER),
             (r"^retention_ms += +604800000$", r"^fileReservedTime += +168$", r"^delay_ms_max += +864000000$")),
        Look("and where a tool asks a name server", ("getNamesrvConfig",), (r"^timerMaxDelaySec += +864000$",)),
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
        ["updateTopicPerm", "-t", "spare", "-b", operator.broker, "-p", "4"],
        r"update topic perm from 6 to 4",
    )
    operator.expects(
        "a message to it is refused",
        ["sendMessage", "-t", "spare", "-p", "no"],
        r"No route info of this topic|may not be written",
    )
    operator.expects("and opened again", ["updateTopicPerm", "-t", "spare", "-c", CLUSTER, "-p", "6"], r"from 4 to 6")


def change_values(operator: Operator) -> None:
    stored, deleted = "create or update kv config to namespace success", "delete kv config from namespace success"
    operator.expects("a value is stored", ["updateKvConfig", "-s", "mine", "-k", "colour", "-v", "red"], stored)
    operator.expects("and changed", ["updateKvConfig", "-s", "mine", "-k", "colour", "-v", "blue"], stored)
    operator.expects("and deleted", ["deleteKvConfig", "-s", "mine", "-k", "colour"], deleted)
    order = ["updateOrderConf", "-t", "spare"]
    said = r"orderConf success\. topic=\[spare\]"
    operator.expects("the order of a topic", [*order, "-m", "put", "-v", f"{BROKER}:4"], f"update {said}")
    operator.expects("is shown", [*order, "-m", "get"], rf"get {said}, orderConf=\[{BROKER}:4\]")
    operator.expects("and deleted", [*order, "-m", "delete"], f"delete {said}")
    operator.expects("and is gone", [*order, "-m", "get"], r"'ORDER_TOPIC_CONFIG' has no value under 'spare'")


def move_the_group(operator: Operator, worker: Worker) -> None:
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
        r"^reset consumer offset to 1$",
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


def clean_up(operator: Operator) -> None:
    operator.looks([
        Look("a group is deleted", ("deleteSubGroup", "-c", CLUSTER, "-g", "workers"),
             (r"delete subscription group \[workers\] from broker .* success",)),
        Look("a topic is deleted", ("deleteTopic", "-c", CLUSTER, "-t", "orders"),
             (r"delete topic \[orders\] from cluster \[DefaultCluster\] success",
              r"delete topic \[orders\] from NameServer success")),
    ])  # fmt: skip
    broker = operator.broker
    operator.looks([
        Look("old files of queues go", ("cleanExpiredCQ", "-b", broker), (r"^success",)),
        Look("what is left of deleted topics too", ("cleanUnusedTopic", "-c", CLUSTER), (r"^success",)),
        Look("and old files of the log", ("deleteExpiredCommitLog", "-b", broker), (r"^success",)),
    ])  # fmt: skip
    left = operator.types("topicList").split()
    if "spare" not in left:
        raise Wrong(f"a topic that nobody uses is gone: {left}")
    if "orders" in left or "%RETRY%workers" in left:
        raise Wrong(f"topics that were deleted are there: {left}")
    operator.expects(
        "what waited for the topic is cancelled", ["brokerStatus", "-c", CLUSTER], r"postdate_waiting_far +: 0$"
    )


if __name__ == "__main__":
    sys.exit(run(story))

"""What an operator sees: the broker, clients, messages, also one that waits."""

import re
import sys
from pathlib import Path

from operating import BROKER, CLUSTER, Look, Operator, Worker, Wrong, ok, run, wait_for_progress

BODIES = Path("/tmp/rocketmq/msgbodys")  # where mqadmin leaves the bodies of messages that it was asked for


def story(operator: Operator, worker: Worker) -> None:
    wait_for_progress(operator)
    look_at_the_broker(operator)
    look_at_exported_settings()
    look_at_clients(operator)
    try:
        look_at_messages(operator, worker)
    finally:
        forget_bodies(worker)


def look_at_the_broker(operator: Operator) -> None:
    broker = operator.broker
    operator.looks([
        Look("what came and went today", ("clusterList", "-m"), (rf"^{CLUSTER} +{BROKER} +0 +0 +3 +[2-9]",)),
        Look("figures, of what waits too", ("brokerStatus", "-b", broker),
             (r"^putMessageTimesTotal +: 3$", r"^timerCongestNum +: 1$", r"^postdate_waiting_far +: 1$",
              r"^postdate_waiting_near +: 0$", r"^postdate_log_problem +: none$", r"^commitLogDiskRatio +: 0\.\d+$",
              r"^msgGetTotalTodayNow +: [2-9]", r"^postdate_connections +: [1-9]", r"^postdate_held_pulls +: [1-9]")),
        Look("settings, and which may change", ("getBrokerConfig", "-b", broker),
             (r"^lead_ms += +60000$", r"^retention_ms += +259200000$", r"^live_settings += .*\bretention_ms\b",
              r"^fileReservedTime += +72$", rf"^brokerClusterName += +{CLUSTER}$", rf"^brokerName += +{BROKER}$",
              rf"^listenPort += +{broker.rpartition(':')[2]}$", rf"^namesrvAddr += +{re.escape(operator.route)}$")),
        Look("settings of a name server: the same", ("getNamesrvConfig",),
             (r"^lead_ms += +60000$", rf"^listenPort += +{operator.route.rpartition(':')[2]}$")),
        Look("settings as a file", ("exportConfigs", "-c", CLUSTER, "-f", str(Path.cwd())),
             (rf"export {re.escape(str(Path.cwd()))}/configs.json success",)),
        Look("that there are no replicas", ("haStatus", "-b", broker),
             (rf"^#MasterAddr\t{re.escape(broker)}$", r"^#MasterCommitLogMaxOffset\t[1-9]\d+$", r"^#SlaveNum\t0$",
              r"^#InSyncSlaveNum\t0$", r"^#SlaveAddr .*\n*\Z")),
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


def look_at_exported_settings() -> None:
    exported = Path("configs.json").read_text()
    for pattern in (r'"masterBrokerSize": ?1\b', r'"brokerRole": ?"ASYNC_MASTER"', r'"fileReservedTime": ?"72"'):
        if not re.search(pattern, exported):
            raise Wrong(f"exportConfigs has written no {pattern!r}:\n{exported}")
    ok("exportConfigs: its file has the settings that RocketMQ exports")


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
    operator.looks(looks + looks_by_key(worker))
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


def forget_bodies(worker: Worker) -> None:
    for line in worker.lines:
        if line.startswith("sent "):
            (BODIES / line.split()[2]).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(run(story))

"""Every setting of a broker and every fixed limit, each with its default and the reason for it.

A *setting* is what an operator changes: `Settings`, one frozen value. A *limit* is a bound that nobody needs to change:
`Limits`, another frozen value, which is no setting but an argument of the classes that need it, so that a test can make
it smaller.

`load` turns text from a file, the environment and flags into settings; nothing below this module parses text. It
refuses a value out of bounds with a sentence that says where the value stands, and never clamps:

    postdate.toml                 lead_ms in postdate.toml is 5, expected 100 to 3600000
    POSTDATE_LEAD_MS=5            environment POSTDATE_LEAD_MS is 5, expected 100 to 3600000
    --lead-ms 5                   --lead-ms is 5, expected 100 to 3600000
"""

import dataclasses
import difflib
import ipaddress
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from postdate.errors import UsageError
from postdate.spans import span_ms

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
DAY_MS = 24 * HOUR_MS

FLUSH_MODES = ("sync", "async")
PIPELINES = ("embedded", "none")
TLS_MODES = ("off", "permissive", "enforcing")
CLIENT_CERTIFICATES = ("none", "optional", "required")
PORT_MAX = 65_535

FILE_DEFAULT = "postdate.toml"
ENVIRONMENT_PREFIX = "POSTDATE_"
ENVIRONMENT_FILE = "POSTDATE_CONFIG"


def setting(default: Any, low: int | None = None, high: int | None = None, *, why: str) -> Any:
    """A dataclass field that carries its bounds and the reason for its default."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "why": why})


def limit(value: int, low: int = 0, high: int | None = None, *, why: str) -> Any:
    """A dataclass field for a fixed limit, with its reason and the smallest value that works."""
    return dataclasses.field(default=value, metadata={"low": low, "high": high, "why": why})


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an operator may change. Raises UsageError for a value outside its bounds."""

    # where it is
    data: str = setting("postdate-data", why="the data folder; a relative one begins at the broker's current folder")
    host: str = setting(
        "127.0.0.1", why="only this machine; on a network a broker needs users and TLS; 0.0.0.0 is all of IPv4"
    )
    route_port: int = setting(9_876, 0, PORT_MAX, why="RocketMQ's name server; 0 takes a free port")
    broker_port: int = setting(10_911, 0, PORT_MAX, why="RocketMQ's broker; 0 takes a free port")
    vip_port: int = setting(10_909, -1, PORT_MAX, why="old clients send to the broker's port - 2; -1 is off")
    grpc_port: int = setting(8_081, -1, PORT_MAX, why="RocketMQ 5's clients; 0 takes a free port, -1 is off")
    advertise: str = setting("", why="host[:port] at which clients reach the broker; empty is the address they used")
    broker_name: str = setting("postdate", why="clients name queues by it, and recall handles hold it")
    cluster_name: str = setting("DefaultCluster", why="RocketMQ's; its tools ask for it")

    # who gets in
    tls: str = setting(
        "off", why="this machine alone needs none; 'permissive' also takes plain clients, 'enforcing' none"
    )
    tls_cert: str = setting(
        "",
        why="PEM file: the certificate of all ports, with those up to its root; empty is tls.crt in the data folder",
    )
    tls_key: str = setting(
        "", why="PEM file: its key; empty is tls.key in the data folder; both are read again when they change"
    )
    tls_client_ca: str = setting("", why="PEM file: the authorities that sign the certificates of clients")
    tls_client_cert: str = setting("none", why="signatures say who clients are; else 'optional' or 'required'")
    insecure: bool = setting(False, why="on a network a broker needs users and TLS; true says that you know better")

    # topics and groups
    auto_create_topics: bool = setting(True, why="as in RocketMQ, the first send to a topic creates it")
    auto_create_groups: bool = setting(True, why="as in RocketMQ, the first heartbeat of a group creates it")
    default_queue_count: int = setting(8, 1, 1_024, why="queues of TBW102, hence the most an automatic topic gets")
    topics_max: int = setting(10_000, 1, 1_000_000, why="a topic costs RAM and route bytes")
    groups_max: int = setting(100_000, 1, 10_000_000, why="a group costs RAM for its offsets")
    group_popped_max: int = setting(
        100_000, 1, 10_000_000, why="messages a group has popped and not acknowledged; each costs about 0.5 KB of RAM"
    )
    invisible_ms_max: int = setting(72 * HOUR_MS, SECOND_MS, 36_525 * DAY_MS, why="as long as the log is kept")
    retry_times_max: int = setting(16, 0, 1_000, why="RocketMQ's; then a message goes to the dead letter queue")
    fresh_queue_bytes: int = setting(
        GIB, 0, TIB, why="a new group starts a queue at its first message if that is this close to the end of the log"
    )

    # delays
    message_delay_level: str = setting(
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h", why="RocketMQ's eighteen levels"
    )
    delay_ms_max: int = setting(87_660 * HOUR_MS, SECOND_MS, 876_600 * HOUR_MS, why="ten years of 365.25 days")
    lead_ms: int = setting(60 * SECOND_MS, 100, HOUR_MS, why="a message due later than this is far and costs no RAM")
    wheel_entries_max: int = setting(8_000_000, 1, 1_000_000_000, why="about 0.4 GB of RAM for single messages")
    due_second_messages_max: int = setting(0, 0, 1_000_000_000, why="per topic and second of due time; 0 is no limit")
    tombstones_max: int = setting(1_000_000, 1, 100_000_000, why="cancels that wait for Spark cost RAM: about 0.3 GB")

    # transactions
    transaction_timeout_ms: int = setting(
        6 * SECOND_MS, 0, DAY_MS, why="RocketMQ's: how long a producer may take before it is asked"
    )
    transaction_check_interval_ms: int = setting(
        30 * SECOND_MS, SECOND_MS, DAY_MS, why="RocketMQ's: then it is asked again"
    )
    transaction_check_times_max: int = setting(15, 0, 10_000, why="RocketMQ's; then nobody is asked any more")

    # disk
    flush: str = setting("sync", why="an acknowledged message is on disk; 'async' trades that for speed")
    flush_interval_ms: int = setting(200, 1, MINUTE_MS, why="how often the log is flushed in flush mode async")
    retention_ms: int = setting(72 * HOUR_MS, 0, 36_525 * DAY_MS, why="RocketMQ's fileReservedTime")
    once_window_ms: int = setting(
        72 * HOUR_MS, SECOND_MS, 36_525 * DAY_MS, why="as long as the log is kept; it is, for messages with an id"
    )
    once_ids_max: int = setting(
        1_000_000, 1, 100_000_000, why="ids within their window; each costs 16 bytes of RAM and 40 on disk"
    )
    segment_bytes: int = setting(64 * MIB, 16 * KIB, GIB, why="small enough to zero ahead in 0.1 s, a power of two")
    batch_bytes_max: int = setting(16 * MIB, 4 * KIB, 256 * MIB, why="four bodies of the largest size")
    snapshot_bytes: int = setting(128 * MIB, 4 * KIB, 64 * GIB, why="log to replay after a crash, at most")

    # clients
    body_bytes_max: int = setting(4 * MIB, 1, 64 * MIB, why="RocketMQ's limit")
    frame_bytes_max: int = setting(16 * MIB, KIB, 256 * MIB, why="RocketMQ's: what its clients send and accept")
    pull_count_max: int = setting(1_024, 1, 65_536, why="messages in an answer: how long others wait for a pull")
    pull_bytes_max: int = setting(256 * KIB, 4 * KIB, 64 * MIB, why="RocketMQ's maxTransferBytesOnMessageInMemory")
    connections_max: int = setting(10_000, 1, 1_000_000, why="a connection costs a file descriptor and buffers")
    connections_per_address_max: int = setting(
        8_000, 1, 1_000_000, why="clients behind one NAT share an address; one address must not take all"
    )
    idle_ms_max: int = setting(
        120 * SECOND_MS, SECOND_MS, DAY_MS, why="RocketMQ's: clients ask for something every 30 s; also for one frame"
    )
    buffered_bytes_max: int = setting(
        GIB, MIB, TIB, why="of all connections together: unfinished frames and unread answers"
    )
    shutdown_ms: int = setting(3 * SECOND_MS, 0, MINUTE_MS, why="how long a stop waits for connections to drain")

    # pipeline
    pipeline: str = setting("embedded", why="the broker starts Spark; 'none' where Spark runs elsewhere, or not at all")
    bulk_port: int = setting(
        9_878, -1, PORT_MAX, why="Arrow Flight, for the pipeline; 0 takes a free port, -1 is off, and the pipeline too"
    )
    spark_master: str = setting("local[*]", why="all cores of this machine; spark://host:port is a cluster")
    spark_memory_bytes: int = setting(
        GIB, 512 * MIB, TIB, why="heap of Spark's driver; no message passes through it, so it needs no more"
    )
    table: str = setting("", why="folder or URI where far messages wait; empty is the folder table in the data folder")
    job_ms_max: int = setting(
        HOUR_MS, SECOND_MS, 7 * DAY_MS, why="a predicate that runs longer has failed: others wait for it"
    )
    java_home: str = setting("", why="Java 17 or newer, for Spark; empty looks in JAVA_HOME, PATH and the usual places")

    def __post_init__(self) -> None:
        _refuse_faults(self)
        if self.batch_bytes_max > self.segment_bytes:
            raise UsageError(
                f"batch_bytes_max is {self.batch_bytes_max}, more than segment_bytes ({self.segment_bytes}): "
                "a batch lies in one segment"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise UsageError("tls_cert and tls_key belong together: one of them is named and the other is not")
        if self.tls_client_cert != "none" and not self.tls_client_ca:
            raise UsageError(
                f"tls_client_cert is {self.tls_client_cert}, and tls_client_ca names no file of authorities"
            )


# By the first setting of each group, which goes as far as the next one.
_GROUP_TITLES = {
    "data": "where it is", "tls": "who gets in", "auto_create_topics": "topics and groups",
    "message_delay_level": "delays", "transaction_timeout_ms": "transactions", "flush": "disk",
    "body_bytes_max": "clients", "pipeline": "pipeline",
}  # fmt: skip
GROUPS: dict[str, list[str]] = {}
for _field in dataclasses.fields(Settings):
    if _field.name in _GROUP_TITLES:
        GROUPS[_GROUP_TITLES[_field.name]] = _names = []
    _names.append(_field.name)


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds that are the same for every broker. They are an argument, so that tests can make them smaller.

    Most were settings once: `load` warns about the names of all, and ignores the values. Raises UsageError for a value
    that cannot work.
    """

    # storage
    unflushed_bytes_max: int = limit(32 * MIB, 4 * KIB, why="bounds what one flush has to write")
    queue_file_rows: int = limit(1 << 20, 64, 1 << 28, why="20 MB a file; retention removes whole files")
    queue_tail_rows: int = limit(1_024, 1, why="20 KB of RAM per queue between two writes")
    far_block_rows: int = limit(65_536, 2, 1 << 24, why="a far query looks through 3 MB of rows at once")
    rows_by_column: int = limit(64, 2, why="from here on numpy beats a loop over the rows of a batch")
    snapshot_batches: int = limit(100_000, 1, why="batches to replay after a crash, at most: about 0.5 s")
    retain_interval_ms: int = limit(60 * SECOND_MS, 1, why="how often retention looks for old files")

    # state in RAM
    queues_max: int = limit(200_000, 1, why="of all topics ever made; a queue costs RAM and two files")
    topic_queues_max: int = limit(1_024, 1, PORT_MAX, why="a queue costs two files")
    offsets_max: int = limit(1_000_000, 1, why="of all groups; an offset costs about 0.4 KB of RAM")
    definition_bytes_max: int = limit(
        8 * KIB, KIB, why="a topic's attributes, a group's settings, a value: in RAM and in every snapshot"
    )
    values_max: int = limit(1_000, 1, why="key-value settings: 8 MiB of RAM and of each snapshot at most")
    key_characters_max: int = limit(
        1_024, 32, why="the key of a cancel stays in RAM until no message can meet it any more"
    )

    halves_max: int = limit(100_000, 1, why="transactions that are open: about 0.5 KB of RAM each")
    halves_bytes_max: int = limit(GIB, KIB, why="of their messages: the log keeps what is open, however old it is")

    # firing and rescuing
    fire_pause_ms_min: int = limit(10, 1, why="first pause after a failed fire; it doubles")
    fire_pause_ms_max: int = limit(5 * SECOND_MS, 1, why="longest pause between tries of a failed fire")
    rescue_lead_ms: int = limit(0, why="Spark is late where its horizon is not this far ahead; 0 is half of the lead")
    rescue_step_ms: int = limit(5 * SECOND_MS, 1, why="a rescue looks this much further, so that rescues are few")
    rescue_blocks_max: int = limit(8, 2, why="far blocks of one rescue: some ms that a fire may have to wait")
    delivered_search_steps: int = limit(64, why="steps of a cancel's search for a message that was delivered already")
    stage_ahead_ms_max: int = limit(
        5 * 60 * SECOND_MS, 1, why="a horizon may be this much beyond the lead from now: a clock may step back"
    )
    stage_chunks_max: int = limit(256, 1, why="each chunk of a stage is an open file while its messages wait")

    # requests
    properties_bytes_max: int = limit(32_767, 1, 32_767, why="RocketMQ stores their length in an int16")
    batch_messages_max: int = limit(16_384, 1, why="a batch of a client keeps others waiting for some 0.1 s")
    json_bytes_max: int = limit(512 * KIB, KIB, why="reading 0.5 MiB of header or JSON body keeps others waiting 5 ms")
    expression_characters_max: int = limit(16_384, 256, why="tags of a subscription are in RAM; every pull compares")
    lookups_max: int = limit(64, 1, why="lookups by key at the same time: each costs CPU beside the clients'")
    lookup_count_max: int = limit(64, 1, why="messages in the answer to a lookup by key; RocketMQ's")
    key_acts_max: int = limit(1_000, 1, why="cancels and moves by key at the same time: each holds what it has found")
    key_messages_max: int = limit(1_000, 1, why="messages of one key that a cancel or a move by key changes")
    counts_max: int = limit(16, 1, why="long answers at a time: counts of waiting messages cost RAM and CPU")
    table_reads_max: int = limit(1_000, 1, why="cancels that wait for an answer from the table")
    table_read_ms_max: int = limit(3 * SECOND_MS, 1, why="a cancel waits this long for the table, then says unknown")
    range_rows_max: int = limit(65_536, 1, why="rows of a queue in one answer to bulk: 3 MB of far rows")
    near_rows_max: int = limit(32_768, 1, why="rows of the wheel in one answer to bulk: 1.7 MB, some milliseconds")
    jobs_per_user_max: int = limit(
        25, 1, why="jobs of one user that are not over, or of one address where there are none: all may have 100"
    )
    relays_max: int = limit(1_000, 1, why="questions of operators that wait for the answer of a client")

    # connections
    stalled_ms_max: int = limit(60 * SECOND_MS, 1, why="a peer that leaves its answers unread for longer is cut off")
    in_flight_max: int = limit(4_096, 1, why="requests of a connection that wait for the disk; then it is not read")
    resend_ms_max: int = limit(15 * 60 * SECOND_MS, 1, why="a resend finds a first send that is not much older")
    resends_bytes_max: int = limit(64 * MIB, 1, why="messages of resends that wait to be looked up")
    handshake_ms_max: int = limit(
        10 * SECOND_MS, 1, why="from the connection to the end of its TLS handshake, where there is TLS"
    )
    handshakes_max: int = limit(256, 1, why="TLS handshakes at the same time; each costs a millisecond of CPU")
    handshakes_per_address_max: int = limit(64, 1, why="of one address: others must not wait for its handshakes")
    turn_ms_max: int = limit(10, 1, why="how long the requests of one read may keep others waiting")
    complaints_max: int = limit(20, why="log lines a second that peers cause: they must not fill the disk")
    write_buffer_bytes_max: int = limit(4 * MIB, KIB, why="a peer that reads slower is read no further")
    held_pulls_max: int = limit(100_000, 1, why="a pull that waits for messages costs RAM")
    held_pulls_per_connection_max: int = limit(
        10_000, 1, why="a client holds one pull per queue that it reads; one client must not take all"
    )

    # groups
    client_expiry_ms: int = limit(120 * SECOND_MS, 1, why="RocketMQ's: four heartbeats are missing")
    lock_expiry_ms: int = limit(60 * SECOND_MS, 1, why="RocketMQ's: three renewals are missing")
    locks_max: int = limit(100_000, 1, why="queues locked by orderly consumers: about 0.3 KB of RAM each")
    connection_members_max: int = limit(256, 1, why="groups times clients of a connection; a process has few groups")
    members_bytes_max: int = limit(256 * MIB, 1, why="RAM for the members of all groups: some 300,000 usual ones")
    heartbeat_topics_max: int = limit(32, 1, why="topics one heartbeat may create: each waits for the disk")
    offsets_interval_ms: int = limit(SECOND_MS, 1, why="how often offsets are written that no client waits for")

    # access
    users_max: int = limit(1_000, 1, why="all users are read again when one has changed, and written together")
    rules_max: int = limit(
        10_000, 1, why="of all users: 2 MB to write after each change, and to read after those of others"
    )
    admitted_max: int = limit(256, 1, why="decisions that a connection remembers: a client has a few topics and groups")
    audit_bytes_max: int = limit(16 * MIB, KIB, why="of one audit file: some 60,000 lines; then the next one begins")
    audit_files_max: int = limit(8, 2, why="audit files of changes, and of refusals: 256 MiB of disk in all")
    audit_lines_max: int = limit(
        10_000, 1, why="audit lines that wait for the disk, some 3 MB of RAM; others are counted"
    )
    audit_keys_max: int = limit(100, 1, why="who was refused what in this second; the others share one line")

    # child processes
    pipeline_pause_ms_min: int = limit(SECOND_MS, 1, why="first pause before bulk or pipeline starts again; it doubles")
    pipeline_pause_ms_max: int = limit(
        MINUTE_MS, 1, why="longest pause: starting Spark costs some 10 s of CPU, and it may fail every time"
    )
    pipeline_steady_ms: int = limit(5 * MINUTE_MS, 1, why="after running this long the next pause is short again")
    parts_stop_ms: int = limit(3_500, why="bulk and pipeline may take this long to stop before they are killed")

    def __post_init__(self) -> None:
        _refuse_faults(self)


# -- rules of one setting ---------------------------------------------------------------------------------------


def _refuse_faults(values: "Settings | Limits") -> None:
    for field in dataclasses.fields(values):
        fault = _fault(field, getattr(values, field.name))
        if fault:
            raise UsageError(f"{field.name} is {fault}")


def _fault(field: "dataclasses.Field[Any]", value: Any) -> str | None:
    """What is wrong with a value, as the end of a sentence: "5, expected 100 to 3600000". None if nothing is."""
    expected = _TYPES[field.type]  # type: ignore[index]  # no annotation of Settings is a text
    if type(value) is not field.type:
        return f"{value!r}, expected {expected}"
    low, high = field.metadata["low"], field.metadata["high"]
    if low is not None and (value < low or (high is not None and value > high)):
        return f"{value}, expected {low} to {high}" if high is not None else f"{value}, expected at least {low}"
    is_right, expected = _RULES.get(field.name, (None, ""))
    return None if is_right is None or is_right(value) else f"{value!r}, expected {expected}"


_TYPES = {int: "a whole number", bool: "true or false", str: "a text"}

_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_MASTER = re.compile(r"local(\[(\*|[0-9]+)(,[0-9]+)?\])?|spark://[^\s/,]+:[0-9]+(,[^\s/,]+:[0-9]+)*|yarn|k8s://\S+")
_ADVERTISED = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^\s:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


def parse_advertised(text: str) -> tuple[str, int] | None:
    """Host and port (0 where it has none) of host, host:port or [IPv6]:port; None for anything else."""
    match = _ADVERTISED.fullmatch(text)
    if match is None or not 1 <= int(match["port"] or 1) <= PORT_MAX:
        return None
    try:
        ipaddress.IPv6Address(match["ipv6"] or "::")
    except ValueError:
        return None
    return match["ipv6"] or match["name"], int(match["port"] or 0)


# Which values are right, and what is expected instead of others.
_Rule = tuple[Callable[[Any], object], str]
_SOME_TEXT: _Rule = (str.strip, "a text that is not empty")
# A recall handle is words with spaces between them, and the broker's name is one of them.
_WORD: _Rule = (_NAME.fullmatch, "one or more of the characters % | a-z A-Z 0-9 _ -")
_RULES: dict[str, _Rule] = {
    "flush": (FLUSH_MODES.__contains__, f"one of {', '.join(FLUSH_MODES)}"),
    "segment_bytes": (lambda number: not number & (number - 1), "a power of two"),
    "data": _SOME_TEXT,
    "host": _SOME_TEXT,
    "advertise": (
        lambda text: not text or parse_advertised(text),
        f"host, host:port or [IPv6]:port with a port of 1 to {PORT_MAX}",
    ),
    "broker_name": _WORD,
    "cluster_name": _WORD,
    "tls": (TLS_MODES.__contains__, f"one of {', '.join(TLS_MODES)}"),
    "tls_client_cert": (CLIENT_CERTIFICATES.__contains__, f"one of {', '.join(CLIENT_CERTIFICATES)}"),
    "pipeline": (PIPELINES.__contains__, f"one of {', '.join(PIPELINES)}"),
    # Spark would say so itself only after some seconds, and in a page of Java.
    "spark_master": (
        _MASTER.fullmatch,
        "local, local[4], local[*], spark://host:port, yarn or k8s://https://host:port",
    ),
}


# -- from text --------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:_?[0-9]{1,3}){0,6}")
_SIZE = re.compile(r"([0-9]{1,15}) ?(KiB|MiB|GiB|TiB)")
_SIZE_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


# -- while the broker runs --------------------------------------------------------------------------------------

# These may change: their users read them from the broker each time (see `Broker.change_settings`). The others are fixed
# with the folder, say how to read the log, or were handed on when the broker opened.
LIVE = frozenset(
    {"auto_create_topics", "auto_create_groups", "default_queue_count", "topics_max", "groups_max",
     "group_popped_max", "invisible_ms_max", "retry_times_max", "fresh_queue_bytes", "delay_ms_max",
     "wheel_entries_max", "tombstones_max", "flush_interval_ms", "retention_ms", "once_window_ms", "snapshot_bytes",
     "body_bytes_max", "pull_count_max", "pull_bytes_max", "connections_max", "connections_per_address_max",
     "buffered_bytes_max", "shutdown_ms", "transaction_timeout_ms", "transaction_check_interval_ms",
     "transaction_check_times_max"}
)  # fmt: skip

# RocketMQ's names of what is the same here: its tools look for them, and are given them by habit.
ROCKETMQ_NAMES = {
    "autoCreateTopicEnable": "auto_create_topics", "autoCreateSubscriptionGroup": "auto_create_groups",
    "defaultTopicQueueNums": "default_queue_count", "maxMessageSize": "body_bytes_max",
    "messageDelayLevel": "message_delay_level", "flushDiskType": "flush", "brokerName": "broker_name",
    "transactionTimeOut": "transaction_timeout_ms", "transactionCheckInterval": "transaction_check_interval_ms",
    "transactionCheckMax": "transaction_check_times_max",
    "brokerClusterName": "cluster_name", "listenPort": "broker_port", "storePathRootDir": "data",
    "fileReservedTime": "retention_ms", "timerMaxDelaySec": "delay_ms_max",
    "serverChannelMaxIdleTimeSeconds": "idle_ms_max", "flushIntervalCommitLog": "flush_interval_ms",
    "mappedFileSizeCommitLog": "segment_bytes", "maxTransferCountOnMessageInMemory": "pull_count_max",
    "maxTransferBytesOnMessageInMemory": "pull_bytes_max",
}  # fmt: skip
# Those that RocketMQ counts in another unit than milliseconds, and in whole ones: the unit and its word.
_ROCKETMQ_UNITS = {
    "fileReservedTime": (HOUR_MS, "hours"), "timerMaxDelaySec": (SECOND_MS, "seconds"),
    "serverChannelMaxIdleTimeSeconds": (SECOND_MS, "seconds"),
}  # fmt: skip
_ROCKETMQ_FLUSHES = {"sync": "SYNC_FLUSH", "async": "ASYNC_FLUSH"}


def rocketmq_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by RocketMQ's names, as it writes them, given settings by ours. What is no whole number of its unit is
    rounded down.
    """
    found = {asked_name: values[name] for asked_name, name in ROCKETMQ_NAMES.items()}
    found |= {asked_name: found[asked_name] // unit_ms for asked_name, (unit_ms, _) in _ROCKETMQ_UNITS.items()}
    return found | {"flushDiskType": _ROCKETMQ_FLUSHES[values["flush"]]}


def apply_changes(settings: Settings, texts: Mapping[str, str]) -> Settings:
    """Settings after changes given as text, by name. Raises UsageError for the first that is no setting, may not
    change, or has a value out of bounds.
    """
    return dataclasses.replace(settings, **dict(_change(name, text) for name, text in texts.items()))


def _change(asked_name: str, text: str) -> tuple[str, Any]:
    name = ROCKETMQ_NAMES.get(asked_name, asked_name)
    label = asked_name if asked_name == name else f"{asked_name} ({name})"
    if name in LIMITS:
        raise UsageError(f"{label} is fixed at {limit_text(name)} and cannot change")
    if name not in FIELDS:
        raise UsageError(f"{asked_name!r} is no setting{_suggestion(name)}")
    if name not in LIVE:
        raise UsageError(f"{label} cannot change while the broker runs: change it where it is set, and restart")
    if asked_name in _ROCKETMQ_UNITS:
        unit_ms, word = _ROCKETMQ_UNITS[asked_name]
        if not _NUMBER.fullmatch(text.strip()):
            raise UsageError(f"{label} is {text!r}, expected a whole number of {word}")
        text = str(int(text) * unit_ms)
    return name, check_value(label, name, text)


# -- from a file, the environment and flags ---------------------------------------------------------------------

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
LIMITS = {field.name: field for field in dataclasses.fields(Limits)}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Settings, the source of each that is not a default, and warnings about names that are settings no more."""

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def find_file(flag: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file of settings: the one of --config, else of POSTDATE_CONFIG, else ./postdate.toml if it exists."""
    named = flag or environ.get(ENVIRONMENT_FILE)
    if named:
        return Path(named)
    default = Path(FILE_DEFAULT)
    return default if default.is_file() else None


def load(*, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Loaded:
    """Settings from a TOML file, over them the environment, over that flags (by setting); defaults for the rest.

    A name that was a setting and is a fixed limit now is ignored with a warning. An unknown name in the file is
    refused. An empty environment variable counts as not set, and one that names no setting is left alone: Kubernetes
    injects such names. Raises UsageError naming the source of what is wrong.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    warnings: list[str] = []
    for label, source, name, value in _values_given(file, environ, flags):
        if name in LIMITS:
            warnings.append(f"{label} is fixed at {limit_text(name)} now and is ignored")
        else:
            values[name], sources[name] = check_value(label, name, value), source
    return Loaded(Settings(**values), sources, tuple(warnings))


def _values_given(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> Iterable[tuple[str, str, str, Any]]:
    """What each source gives, the weakest first: how a sentence calls it, the source, the name, the value."""
    if file is not None:
        for name, value in _read_file(file).items():
            yield f"{name} in {file}", str(file), name, value
    for name in (*FIELDS, *LIMITS):
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environ.get(variable):
            yield f"environment {variable}", f"environment {variable}", name, environ[variable]
    for name, text in flags.items():
        yield flag_of(name), flag_of(name), name, text


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the settings file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise UsageError(f"the settings file {file} is not TOML: {error}") from error
    for name in values:
        if name not in FIELDS and name not in LIMITS:
            raise UsageError(f"{file} has {name!r}, which is no setting{_suggestion(name)}")
    return values


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, FIELDS, 1)
    return f"; did you mean {close[0]}?" if close else ""


def check_value(label: str, name: str, value: Any) -> Any:
    """The value of one setting, from text too. Raises UsageError, which calls it by its label."""
    field = FIELDS[name]
    if isinstance(value, str):
        words, stripped = field.name.split("_"), value.strip()
        found: Any = None
        if field.type is bool:
            found = _SWITCHES.get(stripped.lower())
        elif name == "tls" and stripped.lower() in _SWITCHES:  # POSTDATE_TLS=1 is also how clients are told
            found = "enforcing" if _SWITCHES[stripped.lower()] else "off"
        elif field.type is int and _NUMBER.fullmatch(stripped):
            found = int(stripped)
        elif field.type is int and "ms" in words:
            found = span_ms(stripped.replace(" ", ""))  # "10 min", as sizes may be written
        elif field.type is int and "bytes" in words and (match := _SIZE.fullmatch(stripped)):
            found = int(match[1]) * _SIZE_UNITS[match[2]]
        value = value if found is None else found
    fault = _fault(field, value)
    if fault:
        raise UsageError(f"{label} is {fault}{_hint(field, value)}")
    return value


def _hint(field: "dataclasses.Field[Any]", value: Any) -> str:
    """How a span or a size can be written, for a text that is neither."""
    words = field.name.split("_")
    if isinstance(value, str) and field.type is int and "ms" in words:
        return " of milliseconds or a span such as 500ms, 30s, 10m, 72h or 7d"
    if isinstance(value, str) and field.type is int and "bytes" in words:
        return " of bytes or a size such as 16KiB, 64MiB or 1GiB"
    return ""


# -- as text ----------------------------------------------------------------------------------------------------

_SIZES = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_SPANS = (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS))


def text_of(name: str, value: Any) -> str:
    """A value as one would type it: 64MiB, 3d, true."""
    words = name.split("_")
    units = _SIZES if "bytes" in words else _SPANS if "ms" in words else ()
    for unit, factor in units:
        if value and value % factor == 0:
            return f"{value // factor}{unit}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def limit_text(name: str) -> str:
    """The fixed value of a limit for people to read: 32MiB, 5s, 100,000."""
    text = text_of(name, LIMITS[name].default)
    return f"{int(text):,}" if text.isdecimal() else text

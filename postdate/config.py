"""Every setting: its default, its unit, its bounds and why, in one place.

Settings are one frozen value. Strings from a file, the environment or a flag become values once, in `load`; nothing
below this module parses text. A value out of bounds is refused with a sentence, never clamped. The sentence of `load`
also says where the value stands:

    postdate.toml                 lead_ms in postdate.toml is 5, expected 100 to 3600000
    POSTDATE_LEAD_MS=5            environment POSTDATE_LEAD_MS is 5, expected 100 to 3600000
    --lead-ms 5                   --lead-ms is 5, expected 100 to 3600000
"""

import dataclasses
import difflib
import ipaddress
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from postdate.errors import UsageError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
SECOND_MS, MINUTE_MS, HOUR_MS = 1_000, 60_000, 3_600_000
DAY_MS = 24 * HOUR_MS

FLUSH_MODES = ("sync", "async")
PIPELINES = ("embedded", "none")
PORT_MAX = 65_535

FILE_DEFAULT = "postdate.toml"
ENVIRONMENT_PREFIX = "POSTDATE_"
ENVIRONMENT_FILE = "POSTDATE_CONFIG"


def setting(default: Any, low: int | None = None, high: int | None = None, *, why: str) -> Any:
    """A dataclass field with its bounds and the reason for its default beside it."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "why": why})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a broker. Raises UsageError for a value outside its bounds."""

    flush: str = setting("sync", why="an acknowledged message is on disk; 'async' trades that for speed")
    segment_bytes: int = setting(64 * MIB, 16 * KIB, GIB, why="small enough to zero ahead in 0.1 s, a power of two")
    batch_bytes_max: int = setting(16 * MIB, 4 * KIB, 256 * MIB, why="four bodies of the largest size")
    batch_messages_max: int = setting(
        16_384, 1, 1_000_000, why="that a client sends as one: they keep others waiting for some 0.1 s"
    )
    unflushed_bytes_max: int = setting(32 * MIB, 4 * KIB, GIB, why="bounds what one flush has to write")
    body_bytes_max: int = setting(4 * MIB, 1, 64 * MIB, why="RocketMQ's limit")
    properties_bytes_max: int = setting(32_767, 1, 32_767, why="RocketMQ stores their length in an int16")
    message_delay_level: str = setting(
        "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h", why="RocketMQ's eighteen levels"
    )
    delay_ms_max: int = setting(87_660 * HOUR_MS, SECOND_MS, 876_600 * HOUR_MS, why="ten years of 365.25 days")
    lead_ms: int = setting(60 * SECOND_MS, 100, HOUR_MS, why="what is due later than this is far and costs no RAM")
    rescue_lead_ms: int = setting(
        0, 0, HOUR_MS, why="Spark is late where it is not this far ahead; 0 is half of the lead, which it never exceeds"
    )
    rescue_step_ms: int = setting(5 * SECOND_MS, 1, HOUR_MS, why="rescues look this much further, so that they are few")
    rescue_blocks_max: int = setting(8, 2, 4_096, why="far blocks of one rescue: some ms that a fire may have to wait")
    wheel_entries_max: int = setting(8_000_000, 1, 1_000_000_000, why="about 0.4 GB of RAM for single messages")
    due_second_messages_max: int = setting(0, 0, 1_000_000_000, why="per topic and second of due time; 0 is no limit")
    tombstones_max: int = setting(1_000_000, 1, 100_000_000, why="cancels that wait for Spark cost RAM: about 0.3 GB")
    topics_max: int = setting(10_000, 1, 1_000_000, why="a topic costs RAM and route bytes")
    groups_max: int = setting(100_000, 1, 10_000_000, why="a group costs RAM for its offsets")
    group_popped_max: int = setting(
        100_000, 1, 10_000_000, why="messages that a group has popped and not acknowledged cost RAM: about 0.5 KB each"
    )
    invisible_ms_max: int = setting(72 * HOUR_MS, SECOND_MS, 36_525 * DAY_MS, why="as long as the log is kept")
    queues_max: int = setting(200_000, 1, 10_000_000, why="of all topics ever made: a queue costs RAM and two files")
    offsets_max: int = setting(1_000_000, 1, 100_000_000, why="of all groups: an offset costs about 0.4 KB of RAM")
    definition_bytes_max: int = setting(
        8 * KIB, KIB, MIB, why="a topic's attributes or a group's settings: they are in RAM and in every snapshot"
    )
    key_characters_max: int = setting(
        1_024, 32, 32_767, why="of a cancel: it is kept in RAM until no message can meet it"
    )
    topic_queues_max: int = setting(1_024, 1, 65_535, why="a queue costs two files")
    retention_ms: int = setting(72 * HOUR_MS, 0, 36_525 * DAY_MS, why="RocketMQ's fileReservedTime")
    queue_file_rows: int = setting(1 << 20, 64, 1 << 28, why="20 MB a file: retention removes whole files")
    far_block_rows: int = setting(65_536, 2, 1 << 24, why="3 MB of far rows are looked through at once")
    rows_by_column: int = setting(64, 2, 1 << 20, why="where numpy beats a loop over the rows of a batch")
    queue_tail_rows: int = setting(1_024, 1, 1 << 20, why="20 KB of RAM per queue between two writes")
    snapshot_bytes: int = setting(128 * MIB, 4 * KIB, 64 * GIB, why="log to replay after a crash, at most")
    snapshot_batches: int = setting(100_000, 1, 100_000_000, why="batches to replay after a crash: about 0.5 s")
    fire_pause_ms_min: int = setting(10, 1, SECOND_MS, why="first pause after a failed fire; it doubles")
    fire_pause_ms_max: int = setting(5 * SECOND_MS, 1, MINUTE_MS, why="longest pause between tries of a failed fire")
    delivered_search_steps: int = setting(
        64,
        0,
        1 << 16,
        why="a cancel looks up in at most so many steps whether its message was delivered",
    )
    lookups_max: int = setting(64, 1, 65_536, why="lookups by key at the same time: each costs CPU beside the clients'")
    lookup_count_max: int = setting(64, 1, 4_096, why="messages in the answer of a lookup by key; RocketMQ's")

    data: str = setting("postdate-data", why="the data folder; made in the folder where the broker is started")
    host: str = setting("127.0.0.1", why="only this machine, because there is no password yet; 0.0.0.0 is all of IPv4")
    route_port: int = setting(9_876, 0, PORT_MAX, why="RocketMQ's name server; 0 takes a free port")
    broker_port: int = setting(10_911, 0, PORT_MAX, why="RocketMQ's broker; 0 takes a free port")
    vip_port: int = setting(10_909, -1, PORT_MAX, why="old clients send to the broker's port - 2; -1 is off")
    advertise: str = setting("", why="host[:port] as clients reach it; empty is the address that they came to")
    broker_name: str = setting("postdate", why="clients name queues by it, and handles hold it")
    cluster_name: str = setting("DefaultCluster", why="RocketMQ's; its tools ask for it")
    auto_create_topics: bool = setting(True, why="RocketMQ's: the first send to a topic makes it")
    auto_create_groups: bool = setting(True, why="RocketMQ's: the first heartbeat of a group makes it")
    default_queue_count: int = setting(8, 1, 1_024, why="queues of TBW102, hence the most an automatic topic gets")
    frame_bytes_max: int = setting(16 * MIB, KIB, 256 * MIB, why="RocketMQ's: what its clients send and accept")
    connections_max: int = setting(10_000, 1, 1_000_000, why="a connection costs a file descriptor and buffers")
    connections_per_address_max: int = setting(
        8_000, 1, 1_000_000, why="clients behind one NAT share an address; one address must not take all"
    )
    idle_ms_max: int = setting(
        120 * SECOND_MS, SECOND_MS, DAY_MS, why="RocketMQ's: clients ask for something every 30 s; also for one frame"
    )
    stalled_ms_max: int = setting(
        60 * SECOND_MS, SECOND_MS, DAY_MS, why="how long a peer may leave its answers unread before it is let go"
    )
    buffered_bytes_max: int = setting(
        GIB, MIB, TIB, why="of all connections together: unfinished frames, and answers that are not read"
    )
    json_bytes_max: int = setting(
        512 * KIB, 256 * KIB, 16 * MIB, why="a header or a JSON body: reading 0.5 MiB keeps others waiting for 5 ms"
    )
    in_flight_max: int = setting(
        4_096, 1, 1_000_000, why="requests of a connection that wait for the disk; then it is not read from"
    )
    turn_ms_max: int = setting(10, 1, SECOND_MS, why="how long the requests of one read may keep others waiting")
    complaints_max: int = setting(20, 0, 10_000, why="lines a second about bad peers: they must not fill the disk")
    write_buffer_bytes_max: int = setting(4 * MIB, 64 * KIB, GIB, why="a peer that reads slower is read no further")
    held_pulls_max: int = setting(100_000, 1, 10_000_000, why="a pull that waits for messages costs RAM")
    held_pulls_per_connection_max: int = setting(
        10_000, 1, 10_000_000, why="a client holds one pull per queue that it reads; one must not take all"
    )
    expression_characters_max: int = setting(
        16_384, 256, 1_000_000, why="tags of a subscription: they are kept in RAM and compared by every pull"
    )
    pull_count_max: int = setting(1_024, 1, 65_536, why="messages in an answer: how long others wait for a pull")
    pull_bytes_max: int = setting(256 * KIB, 4 * KIB, 64 * MIB, why="RocketMQ's maxTransferBytesOnMessageInMemory")
    client_expiry_ms: int = setting(120 * SECOND_MS, SECOND_MS, HOUR_MS, why="RocketMQ's: four heartbeats are missing")
    lock_expiry_ms: int = setting(60 * SECOND_MS, SECOND_MS, HOUR_MS, why="RocketMQ's: three renewals are missing")
    connection_members_max: int = setting(
        256, 1, 65_536, why="groups times clients behind a connection: a process seldom has more than some groups"
    )
    members_bytes_max: int = setting(
        256 * MIB, 64 * KIB, 64 * GIB, why="RAM for the members of all groups: some 300,000 usual ones"
    )
    heartbeat_topics_max: int = setting(
        32, 1, 10_000, why="topics that one heartbeat may make: each waits for the disk, and everybody with it"
    )
    locks_max: int = setting(100_000, 1, 10_000_000, why="queues locked by orderly consumers: about 0.3 KB of RAM each")
    counts_max: int = setting(16, 1, 1_000, why="long answers in the making, such as what waits: RAM and CPU")
    offsets_interval_ms: int = setting(
        SECOND_MS, 10, MINUTE_MS, why="offsets committed without asking for an answer are written this often"
    )
    retry_times_max: int = setting(16, 0, 1_000, why="RocketMQ's: then a message goes to the dead letter queue")
    fresh_queue_bytes: int = setting(
        GIB, 0, TIB, why="a new group begins a queue at its first message while that lies this close to the log's end"
    )
    flush_interval_ms: int = setting(200, 1, MINUTE_MS, why="how often the log is flushed in flush mode async")
    retain_interval_ms: int = setting(60 * SECOND_MS, SECOND_MS, DAY_MS, why="how often old files are looked for")
    stage_chunks_max: int = setting(
        256,
        1,
        4_096,
        why="chunks of one stage: each is an open file while its messages wait",
    )
    table_read_ms_max: int = setting(
        3 * SECOND_MS, 10, MINUTE_MS, why="how long a cancel waits for what the table has; then the answer is unknown"
    )
    table_reads_max: int = setting(1_000, 1, 100_000, why="cancels that wait for what the table has")
    relays_max: int = setting(1_000, 1, 100_000, why="questions of operators that wait for the answer of a client")
    shutdown_ms: int = setting(3 * SECOND_MS, 0, MINUTE_MS, why="how long a stop waits for connections to drain")

    bulk_port: int = setting(
        9_878,
        -1,
        PORT_MAX,
        why="Arrow Flight, for the pipeline; 0 takes a free port, -1 is off: then no pipeline either",
    )
    pipeline: str = setting("embedded", why="Spark is started with the broker; 'none' where it runs elsewhere, or not")
    spark_master: str = setting("local[*]", why="all cores of this machine; spark://host:port is a cluster")
    spark_memory_bytes: int = setting(
        GIB, 512 * MIB, TIB, why="heap of Spark's driver; no message passes through it, so that it needs no more"
    )
    table: str = setting("", why="where far messages wait: a folder or URI; empty is table in the data folder")
    java_home: str = setting("", why="Java 17 or newer, for Spark; empty looks in JAVA_HOME, PATH and the usual places")
    pipeline_pause_ms_min: int = setting(
        SECOND_MS, 10, MINUTE_MS, why="first pause before bulk or pipeline is started again; it doubles"
    )
    pipeline_pause_ms_max: int = setting(
        MINUTE_MS, 10, HOUR_MS, why="longest pause: starting Spark costs some 10 s of CPU, and it may fail every time"
    )
    pipeline_steady_ms: int = setting(
        5 * MINUTE_MS, 100, DAY_MS, why="after running for so long, the next pause is the first one again"
    )
    parts_stop_ms: int = setting(
        3 * SECOND_MS, 0, MINUTE_MS, why="how long bulk and pipeline may take to stop before they are killed"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            fault = _fault(field, getattr(self, field.name))
            if fault:
                raise UsageError(f"{field.name} is {fault}")
        if self.batch_bytes_max > self.segment_bytes:
            raise UsageError(
                f"batch_bytes_max is {self.batch_bytes_max}, more than segment_bytes ({self.segment_bytes}): "
                "a batch lies in one segment"
            )
        if self.rescue_lead_ms >= self.lead_ms:
            raise UsageError(
                f"rescue_lead_ms is {self.rescue_lead_ms}, not less than lead_ms ({self.lead_ms}): "
                "a pipeline that is in time is one lead ahead"
            )


# -- rules of one setting ---------------------------------------------------------------------------------------


def _fault(field: "dataclasses.Field[Any]", value: Any) -> str | None:
    """What is wrong with a value, as the end of a sentence: "5, expected 100 to 3600000". None if nothing is."""
    expected = _TYPES[field.type]  # type: ignore[index]  # no annotation of Settings is a text
    if type(value) is not field.type:
        return f"{value!r}, expected {expected}"
    low, high = field.metadata["low"], field.metadata["high"]
    if low is not None and not low <= value <= high:
        return f"{value}, expected {low} to {high}"
    expected = _RULES[field.name](value) if field.name in _RULES else ""
    return f"{value!r}, expected {expected}" if expected else None


_TYPES = {int: "a whole number", bool: "true or false", str: "a text"}

# A rule says what it expects instead of a value, or nothing.
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")
_ADVERTISED = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^\s:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")


def _some_text(text: str) -> str:
    return "" if text.strip() else "a text that is not empty"


def _name(text: str) -> str:
    """A recall handle is words with spaces between them, and the broker's name is one of them."""
    return "" if _NAME.fullmatch(text) else "one or more of the characters % | a-z A-Z 0-9 _ -"


def _flush_mode(text: str) -> str:
    return "" if text in FLUSH_MODES else f"one of {', '.join(FLUSH_MODES)}"


def _pipeline(text: str) -> str:
    return "" if text in PIPELINES else f"one of {', '.join(PIPELINES)}"


def _power_of_two(number: int) -> str:
    return "a power of two" if number & (number - 1) else ""


def advertised(text: str) -> tuple[str, int] | None:
    """Host and port (0 where it has none) of host, host:port or [IPv6]:port; None for anything else."""
    match = _ADVERTISED.fullmatch(text)
    if match is None or not _is_ipv6(match["ipv6"]) or not 1 <= int(match["port"] or 1) <= PORT_MAX:
        return None
    return match["ipv6"] or match["name"], int(match["port"] or 0)


def _advertised_or_nothing(text: str) -> str:
    return "" if not text or advertised(text) else f"host, host:port or [IPv6]:port with a port of 1 to {PORT_MAX}"


def _is_ipv6(text: str | None) -> bool:
    try:
        return text is None or bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


_RULES: dict[str, Callable[[Any], str]] = {
    "flush": _flush_mode, "segment_bytes": _power_of_two, "data": _some_text, "host": _some_text,
    "advertise": _advertised_or_nothing, "broker_name": _name, "cluster_name": _name,
    "pipeline": _pipeline, "spark_master": _some_text,
}  # fmt: skip


# -- from text --------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"[+-]?[0-9]{1,3}(?:_?[0-9]{1,3}){0,6}")
_SPAN_PART = re.compile(r"([0-9]{1,15}) ?(ms|s|min|m|h|d)")
_SPAN = re.compile(rf"{_SPAN_PART.pattern}(?: ?{_SPAN_PART.pattern})*")
_SPAN_UNITS = {"ms": 1, "s": SECOND_MS, "m": MINUTE_MS, "min": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}
_SIZE = re.compile(r"([0-9]{1,15}) ?(KiB|MiB|GiB|TiB)")
_SIZE_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def span_ms(text: str) -> int | None:
    """The milliseconds of "500ms", "30s", "10m", "72h", "7d" or a sum such as "1h30m"; None for anything else."""
    if not _SPAN.fullmatch(text):
        return None
    return sum(int(count) * _SPAN_UNITS[unit] for count, unit in _SPAN_PART.findall(text))


def _size_bytes(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    return int(match[1]) * _SIZE_UNITS[match[2]] if match else None


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _switch(text: str) -> bool | None:
    return _SWITCHES.get(text.lower())


def _parsed(field: "dataclasses.Field[Any]", text: str) -> Any:
    """The value that a text means for a setting; the text itself where it means none, which `_fault` then refuses."""
    words = field.name.split("_")
    readers: list[Callable[[str], Any]] = []
    if field.type is bool:
        readers = [_switch]
    elif field.type is int:
        readers = [_number, *([span_ms] if "ms" in words else []), *([_size_bytes] if "bytes" in words else [])]
    values = (reader(text.strip()) for reader in readers)
    return next((value for value in values if value is not None), text)


# -- while the broker runs --------------------------------------------------------------------------------------

# These may change: whoever needs one reads it from the broker each time (see `Broker.change_settings`). The others are
# fixed with the folder, say how the log is to be read, or were handed to what was made from them.
LIVE = frozenset(
    {"body_bytes_max", "properties_bytes_max", "delay_ms_max", "rescue_lead_ms", "rescue_step_ms", "rescue_blocks_max",
     "wheel_entries_max", "tombstones_max", "topics_max", "groups_max", "topic_queues_max", "retention_ms",
     "group_popped_max", "invisible_ms_max",
     "snapshot_bytes", "snapshot_batches", "fire_pause_ms_min", "fire_pause_ms_max",
     "auto_create_topics", "auto_create_groups", "default_queue_count", "connections_max", "held_pulls_max",
     "pull_count_max", "pull_bytes_max", "client_expiry_ms", "retry_times_max", "fresh_queue_bytes",
     "flush_interval_ms", "retain_interval_ms", "relays_max", "stage_chunks_max", "table_read_ms_max",
     "table_reads_max", "shutdown_ms", "json_bytes_max",
     "connections_per_address_max", "buffered_bytes_max", "complaints_max", "held_pulls_per_connection_max",
     "expression_characters_max", "lookups_max", "lookup_count_max", "connection_members_max", "members_bytes_max",
     "heartbeat_topics_max", "counts_max"}
)  # fmt: skip

# RocketMQ's names of what is the same here, in the same unit: its tools are given them by habit.
ROCKETMQ_NAMES = {
    "autoCreateTopicEnable": "auto_create_topics", "autoCreateSubscriptionGroup": "auto_create_groups",
    "defaultTopicQueueNums": "default_queue_count", "maxMessageSize": "body_bytes_max",
    "messageDelayLevel": "message_delay_level", "flushDiskType": "flush", "brokerName": "broker_name",
    "brokerClusterName": "cluster_name", "listenPort": "broker_port", "storePathRootDir": "data",
}  # fmt: skip


def changed(settings: Settings, texts: Mapping[str, str]) -> Settings:
    """Settings after changes that somebody wrote as text, by name. Raises UsageError naming the first that is no
    setting, may not change, or has a value that would be refused at the start as well.
    """
    return dataclasses.replace(settings, **dict(_change(said, text) for said, text in texts.items()))


def _change(said: str, text: str) -> tuple[str, Any]:
    name = ROCKETMQ_NAMES.get(said, said)
    label = said if said == name else f"{said} ({name})"
    if name not in FIELDS:
        raise UsageError(f"{said!r} is no setting{_suggestion(name)}")
    if name not in LIVE:
        raise UsageError(f"{label} cannot change while the broker runs: change it where it is set, and restart")
    return name, _checked(label, name, text)


# -- from a file, the environment and flags ---------------------------------------------------------------------

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def find_file(flag: str | None, environ: Mapping[str, str]) -> Path | None:
    """The file of settings: the one of --config, else of POSTDATE_CONFIG, else ./postdate.toml if it is there."""
    named = flag or environ.get(ENVIRONMENT_FILE)
    if named:
        return Path(named)
    default = Path(FILE_DEFAULT)
    return default if default.is_file() else None


def load(*, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Settings:
    """Settings from a TOML file, over them the environment, over that flags (by setting); defaults for the rest.

    An environment variable that is empty counts as not set, and one that names no setting is left alone: Kubernetes
    injects such names. Raises UsageError naming the source of what is wrong.
    """
    values: dict[str, Any] = {}
    if file is not None:
        for name, value in _read_file(file).items():
            values[name] = _checked(f"{name} in {file}", name, value)
    for name in FIELDS:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if environ.get(variable):
            values[name] = _checked(f"environment {variable}", name, environ[variable])
    for name, text in flags.items():
        values[name] = _checked(flag_of(name), name, text)
    return Settings(**values)


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
        if name not in FIELDS:
            raise UsageError(f"{file} has {name!r}, which is no setting{_suggestion(name)}")
    return values


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, FIELDS, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _checked(label: str, name: str, value: Any) -> Any:
    field = FIELDS[name]
    if isinstance(value, str):
        value = _parsed(field, value)
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

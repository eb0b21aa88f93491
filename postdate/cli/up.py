"""`postdate up`: a broker in the foreground, until it is told to stop; beside it bulk and the pipeline."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from postdate import __version__, config
from postdate.cli.children import BULK, PIPELINE, beside, is_embedded
from postdate.cli.command import OK, USAGE, add_json, print_json, runs
from postdate.cli.logs import add_log_level, start_logging
from postdate.cli.show import count
from postdate.config import DAY_MS, FIELDS, GIB, HOUR_MS, KIB, MIB, MINUTE_MS, SECOND_MS, TIB, Settings
from postdate.errors import ForeignFolder
from postdate.server import Parts, Server, run
from postdate.wire.ids import address_text

HELP = """\
Starts a broker, and beside it the Spark pipeline, and serves RocketMQ clients until Ctrl-C or SIGTERM.

examples:
  postdate up                                     on 127.0.0.1:9876, data in ./postdate-data
  postdate up --data /var/lib/postdate --host 0.0.0.0 --advertise broker.example.org
  postdate up --route-port 19876 --broker-port 20911 --vip-port -1
  postdate up --config postdate.toml --retention-ms 7d
  postdate up --pipeline none                     for a pipeline that runs elsewhere: see postdate pipeline --help
  POSTDATE_FLUSH=async postdate up                every setting is also an environment variable

A setting is taken from its flag, else from the environment (POSTDATE_ and its name in capitals), else from the file,
else it has its default. Sizes may be written as 64MiB, spans as 500ms, 30s, 10m, 72h or 7d.

exit codes: 0 stopped by Ctrl-C or SIGTERM, 2 wrong usage, or a file, folder or port that cannot be used, 130
interrupted while it was starting or closing
"""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "where it is": (
        "data", "host", "route_port", "broker_port", "vip_port", "advertise", "broker_name", "cluster_name",
    ),
    "topics and groups": (
        "auto_create_topics", "auto_create_groups", "default_queue_count", "topics_max", "groups_max",
        "queues_max", "offsets_max", "definition_bytes_max", "topic_queues_max", "retry_times_max", "group_popped_max",
        "invisible_ms_max", "fresh_queue_bytes",
    ),
    "delays": (
        "message_delay_level", "delay_ms_max", "lead_ms", "rescue_lead_ms", "rescue_step_ms", "rescue_blocks_max",
        "wheel_entries_max", "due_second_messages_max", "tombstones_max", "key_characters_max",
        "delivered_search_steps", "fire_pause_ms_min", "fire_pause_ms_max",
    ),
    "disk": (
        "flush", "flush_interval_ms", "retention_ms", "retain_interval_ms", "segment_bytes", "queue_file_rows",
        "far_block_rows", "queue_tail_rows", "rows_by_column", "snapshot_bytes", "snapshot_batches",
        "unflushed_bytes_max", "batch_bytes_max", "batch_messages_max",
    ),
    "clients": (
        "body_bytes_max", "properties_bytes_max", "frame_bytes_max", "json_bytes_max", "connections_max",
        "connections_per_address_max", "idle_ms_max", "stalled_ms_max", "buffered_bytes_max", "write_buffer_bytes_max",
        "in_flight_max", "turn_ms_max", "complaints_max", "held_pulls_max", "held_pulls_per_connection_max",
        "expression_characters_max", "pull_count_max", "pull_bytes_max", "lookups_max", "lookup_count_max",
        "client_expiry_ms", "connection_members_max",
        "members_bytes_max", "heartbeat_topics_max", "lock_expiry_ms", "locks_max", "counts_max",
        "offsets_interval_ms", "relays_max", "shutdown_ms",
    ),
    "pipeline": (
        "pipeline", "bulk_port", "spark_master", "spark_memory_bytes", "table", "java_home", "pipeline_pause_ms_min",
        "pipeline_pause_ms_max", "pipeline_steady_ms", "parts_stop_ms", "stage_chunks_max", "table_read_ms_max",
        "table_reads_max",
    ),
}  # fmt: skip

_SIZES = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_SPANS = (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS))


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "postdate up [-h] [--config FILE] [--log-level LEVEL] [--json] [--SETTING VALUE]..."
    parser.add_argument("--config", metavar="FILE", help="settings in TOML (default: ./postdate.toml if it is there)")
    add_log_level(parser)
    add_json(parser)
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_setting(group, FIELDS[name])
    runs(parser, _up, failed=USAGE)


def _add_setting(group: Any, field: "dataclasses.Field[Any]") -> None:
    why = field.metadata["why"].replace("%", "%%")
    default = _typed(field, field.default)
    metavar = "true|false" if field.type is bool else "TEXT" if field.type is str else "N"
    help_text = f"{why} (default: {default})" if default else why
    group.add_argument(config.flag_of(field.name), dest=field.name, metavar=metavar, help=help_text)


def _typed(field: "dataclasses.Field[Any]", value: Any) -> str:
    """A value as one would type it: 64MiB, 72h, true."""
    words = field.name.split("_")
    units = _SIZES if "bytes" in words else _SPANS if "ms" in words else ()
    for name, unit in units:
        if value and value % unit == 0:
            return f"{value // unit}{name}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _up(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    start_logging(arguments.log_level)
    try:
        parts = beside(settings)
        run(settings, partial(_print_ready_json if arguments.json else _print_ready, parts), parts)
    except ForeignFolder as error:
        raise ForeignFolder(f"{settings.data}: {error}") from error
    if arguments.json:
        print_json({"stopped": True})
    else:
        print("stopped; what waits is on disk")
    return OK


def _settings(arguments: argparse.Namespace) -> Settings:
    flags = {name: value for name in FIELDS if (value := getattr(arguments, name)) is not None}
    return config.load(file=config.find_file(arguments.config, os.environ), environ=os.environ, flags=flags)


# -- what is told -----------------------------------------------------------------------------------------------


def _print_ready(parts: Parts, server: Server) -> None:
    settings = server.broker.settings
    waiting, is_exact = _waiting(server)
    broker = f"{server.broker_address}, {server.vip_address}" if server.vip_address else server.broker_address
    print(f"postdate {__version__}")
    print(f"  route     {server.route_address}  (the name server address of RocketMQ clients)")
    print(f"  broker    {broker}")
    print(f"  bulk      {_bulk_text(settings, parts)}")
    print(f"  pipeline  {_pipeline_text(settings, parts)}")
    print(f"  data      {Path(settings.data).resolve()}, flush {settings.flush}")
    print(f"  waiting   {'' if is_exact else 'about '}{count(waiting, 'message')}")
    print("send a first message from another terminal:")
    print(f'  postdate send orders "hello" --delay 5s{_address_flag(server)}')
    print("Ctrl-C stops the broker.", flush=True)


def _bulk_text(settings: Settings, parts: Parts) -> str:
    if settings.bulk_port < 0:
        return "off"
    if parts[BULK].startswith("off"):
        return parts[BULK]
    return f"{address_text(settings.host, settings.bulk_port)}, starting" if settings.bulk_port else "a free port"


def _pipeline_text(settings: Settings, parts: Parts) -> str:
    """What it will be: it comes up some seconds later."""
    if is_embedded(settings) and not parts[PIPELINE].startswith(("no Java", "off")):
        return f"Spark {settings.spark_master}, starting"
    return parts[PIPELINE]


def _print_ready_json(parts: Parts, server: Server) -> None:
    settings = server.broker.settings
    waiting, is_exact = _waiting(server)
    ready = {
        "version": __version__, "route": server.route_address, "broker": server.broker_address,
        "vip": server.vip_address, "data": str(Path(settings.data).resolve()), "flush": settings.flush,
        "waiting": waiting, "waiting_is_exact": is_exact, "parts": dict(parts),
    }  # fmt: skip
    print_json(ready)
    sys.stdout.flush()


def _waiting(server: Server) -> tuple[int, bool]:
    """How many messages wait, by counters: looking at each would delay the start. Far ones that were cancelled are in
    the counters until they are due, and so are cancels in the table: while there are tombstones or a table the number
    may be a little too high.
    """
    fold = server.broker.fold
    numbers = [number for topic in fold.topics.by_name.values() for number in topic.numbers]
    waiting = sum(fold.near[number] + fold.untaken[number] for number in numbers) + fold.far.in_table
    return waiting, not (fold.cancels.count or fold.far.in_table)


def _address_flag(server: Server) -> str:
    """Empty where the client's default address leads to this broker."""
    host, _, port = server.route_address.rpartition(":")
    if host in ("127.0.0.1", "0.0.0.0") and int(port) == Settings().route_port:
        return ""
    return f" --addr {'127.0.0.1' if host == '0.0.0.0' else host}:{port}"

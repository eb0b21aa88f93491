"""`postdate up`: runs a broker in the foreground until Ctrl-C or SIGTERM, beside it bulk and the pipeline."""

import argparse
import logging
import sys
from functools import partial
from pathlib import Path

from postdate import __version__
from postdate.cli.children import BULK, PIPELINE, is_embedded, plan_children, uses_socket
from postdate.cli.command import OK, USAGE, add_json, print_json, set_run
from postdate.cli.logs import add_log_level, start_logging
from postdate.cli.render import count
from postdate.cli.settings import add_settings, load_settings
from postdate.config import Limits, Settings
from postdate.errors import ForeignFolder
from postdate.server import Parts, Server, run
from postdate.tls import CERTIFICATE_FILE
from postdate.wire.ids import address_text

logger = logging.getLogger("postdate.settings")

HELP = """\
Starts a broker, and beside it the Spark pipeline, and serves RocketMQ clients until Ctrl-C or SIGTERM.

examples:
  postdate up                                     on 127.0.0.1:9876, data in ./postdate-data
  postdate up --host 0.0.0.0 --tls enforcing      for other machines: first make users, postdate user init --self-signed
  postdate up --route-port 19876 --broker-port 20911 --vip-port -1
  postdate up --config postdate.toml --retention-ms 7d
  postdate up --pipeline none                     for a pipeline that runs elsewhere: see postdate pipeline --help
  POSTDATE_FLUSH=async postdate up                every setting is also an environment variable
  postdate settings --toml > postdate.toml        a file of settings to start from

A setting is taken from its flag, else from the environment (POSTDATE_ and its name in capitals), else from the file,
else it has its default. Sizes may be written as 64MiB, spans as 500ms, 30s, 10m, 72h or 7d.

exit codes: 0 stopped by Ctrl-C or SIGTERM, 2 wrong usage, or a file, folder or port that cannot be used, 130
interrupted while it was starting or closing
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "postdate up [-h] [--config FILE] [--log-level LEVEL] [--json] [--SETTING VALUE]..."
    add_log_level(parser)
    add_json(parser)
    add_settings(parser)
    set_run(parser, _up, failed=USAGE)


def _up(arguments: argparse.Namespace) -> int:
    start_logging(arguments.log_level)
    loaded = load_settings(arguments)
    for warning in loaded.warnings:
        logger.warning("%s", warning)
    settings, limits = loaded.settings, arguments.limits or Limits()
    try:
        parts = plan_children(settings, limits)
        ready = partial(_print_ready_json if arguments.json else _print_ready, parts)
        run(settings, ready, parts, limits=limits)
    except ForeignFolder as error:
        raise ForeignFolder(f"{settings.data}: {error}") from error
    if arguments.json:
        print_json({"stopped": True})
    else:
        print("stopped; what waits is on disk")
    return OK


# -- what it prints ---------------------------------------------------------------------------------------------


def _print_ready(parts: Parts, server: Server) -> None:
    settings = server.broker.settings
    waiting, is_exact = _waiting(server)
    broker = f"{server.broker_address}, {server.vip_address}" if server.vip_address else server.broker_address
    bulk, pipeline = parts[BULK], parts[PIPELINE]
    if settings.bulk_port < 0:
        bulk = "off"
    elif uses_socket(settings) and not bulk.startswith("off"):
        bulk = "a socket in the data folder, starting"
    elif not bulk.startswith("off"):
        bulk = f"{address_text(settings.host, settings.bulk_port)}, starting" if settings.bulk_port else "a free port"
    if is_embedded(settings) and not pipeline.startswith(("no Java", "off")):
        pipeline = f"Spark {settings.spark_master}, starting"  # it starts some seconds later
    host, _, port = server.route_address.rpartition(":")
    addr = f" --addr {'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    if host in ("127.0.0.1", "0.0.0.0") and int(port) == Settings().route_port:
        addr = ""  # the client's default address leads to this broker
    print(f"postdate {__version__}")
    print(f"  route     {server.route_address}  (the name server address of RocketMQ clients)")
    print(f"  broker    {broker}")
    if server.grpc_address:
        print(f"  grpc      {server.grpc_address}  (RocketMQ 5 clients)")
    if settings.tls != "off":
        print(f"  tls       {settings.tls}, {settings.tls_cert or Path(settings.data).resolve() / CERTIFICATE_FILE}")
    print(f"  bulk      {bulk}")
    print(f"  pipeline  {pipeline}")
    print(f"  data      {Path(settings.data).resolve()}, flush {settings.flush}")
    print(f"  waiting   {'' if is_exact else 'about '}{count(waiting, 'message')}")
    print("send a first message from another terminal:")
    print(f'  postdate send orders "hello" --delay 5s{addr}')
    print("Ctrl-C stops the broker.", flush=True)


def _print_ready_json(parts: Parts, server: Server) -> None:
    settings = server.broker.settings
    waiting, is_exact = _waiting(server)
    ready = {
        "version": __version__, "route": server.route_address, "broker": server.broker_address,
        "vip": server.vip_address, "grpc": server.grpc_address, "data": str(Path(settings.data).resolve()),
        "flush": settings.flush,
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

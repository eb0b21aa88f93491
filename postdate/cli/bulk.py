"""`postdate bulk`: the Arrow Flight process beside a broker."""

import argparse
import os
import sys
from pathlib import Path

from postdate.cli.command import OK, USAGE, add_parent, set_run
from postdate.client.connection import parse_address
from postdate.config import Settings
from postdate.errors import UsageError
from postdate.extras import require_extra

HELP = """\
Serves far messages, queues and chunks over Arrow Flight, for the pipeline and for programs that move millions of rows.
`postdate up` starts it; start it by hand only if a broker runs without it.

examples:
  postdate bulk --data ./postdate-data --broker 127.0.0.1:10911
  postdate bulk --data /var/lib/postdate --broker 127.0.0.1:10911 --host 0.0.0.0 --port 9878

It reads the broker's data folder and asks the broker which parts are durable, so it runs on the same machine. It ends
on Ctrl-C or SIGTERM, and with the process that started it.

exit codes: 0 stopped, 2 wrong usage, or a folder or port that cannot be used
"""


def add(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    parser.add_argument("--data", metavar="DIR", default=defaults.data, help=f"data folder (default: {defaults.data})")
    parser.add_argument(
        "--broker", metavar="HOST:PORT", default=f"127.0.0.1:{defaults.broker_port}",
        help=f"the broker's own address (default: 127.0.0.1:{defaults.broker_port})",
    )  # fmt: skip
    host, port = defaults.host, defaults.bulk_port
    parser.add_argument("--host", metavar="H", default=host, help=f"address to listen on (default: {host})")
    parser.add_argument("--port", metavar="N", type=int, default=port, help=f"port, 0 for a free one (default: {port})")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate, PEM; bulk then speaks TLS alone")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, PEM (default: in the file of the certificate)")
    parser.add_argument("--socket", metavar="PATH", type=Path, help="listen on a Unix socket, and on no port")
    add_parent(parser)
    set_run(parser, _bulk, failed=USAGE)


def _bulk(arguments: argparse.Namespace) -> int:
    broker = parse_address(arguments.broker)
    require_extra("table", "postdate bulk")
    from postdate.bulk.process import run  # pyarrow takes half a second to load

    def print_ready(place: str) -> None:
        print(f"bulk listens on {place}", flush=True)

    run(
        Path(arguments.data), broker, arguments.host, arguments.port, print_ready, arguments._parent_pid,
        _read_certificate(arguments), arguments.socket,
    )  # fmt: skip
    sys.stdout.flush()
    # Flight's threads may still write to a peer that does not read; nothing of theirs is worth waiting for.
    os._exit(OK)


def _read_certificate(arguments: argparse.Namespace) -> tuple[bytes, bytes] | None:
    if not arguments.tls_cert:
        return None
    certificate, key = Path(arguments.tls_cert), Path(arguments.tls_key or arguments.tls_cert)
    try:
        return certificate.read_bytes(), key.read_bytes()
    except OSError as error:
        raise UsageError(f"the certificate or its key cannot be read: {error.filename}: {error.strerror}") from error

"""The processes that `postdate up` starts beside the broker: bulk, and the embedded pipeline."""

import logging
import os
import sys
from pathlib import Path

from postdate.access.token import ENVIRONMENT_TOKEN, TOKEN_FILE, read_token
from postdate.access.users import AUTH_FILE
from postdate.clock import SystemClock
from postdate.config import Limits, Settings
from postdate.extras import has_extra, install
from postdate.server import Addresses, Part, Parts
from postdate.spark.session import java
from postdate.tls import server_files

BULK, PIPELINE = "bulk", "pipeline"
_STAY = "far messages stay in the log and are still on time"
_SOCKET = "bulk.sock"  # in the data folder
_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def plan_children(settings: Settings, limits: Limits) -> Parts:
    """The processes that the settings ask for, and a sentence about each other one."""
    if settings.bulk_port < 0:
        others = {BULK: "off: bulk_port is -1", PIPELINE: f"off, as bulk is: {_STAY}"}
        return Parts(limits, SystemClock(), [], others)
    if not has_extra("table"):
        others = {BULK: f"off: it needs postdate[table], {install('table')}", PIPELINE: f"off, as bulk is: {_STAY}"}
        return Parts(limits, SystemClock(), [], others)
    bulk = Part(BULK, lambda addresses: _bulk(settings, addresses))
    if not is_embedded(settings):
        others = {PIPELINE: "none here: start one with postdate pipeline --addr HOST:PORT"}
        return Parts(limits, SystemClock(), [bulk], others)
    if not has_extra("spark"):
        others = {PIPELINE: f"off: it needs postdate[spark], {install('spark')}; {_STAY}"}
        return Parts(limits, SystemClock(), [bulk], others)
    pipeline = Part(
        PIPELINE,
        lambda addresses: _pipeline(settings, addresses),
        needs=lambda: _environment(settings),
        after=bulk,
    )
    return Parts(limits, SystemClock(), [bulk, pipeline], {})


def is_embedded(settings: Settings) -> bool:
    return settings.bulk_port >= 0 and settings.pipeline == "embedded"


def uses_socket(settings: Settings) -> bool:
    """Whether bulk listens on a socket in the data folder, which nobody else can enter: with users or TLS, as only the
    embedded pipeline needs it, unless an operator has chosen a port for readers.
    """
    is_secured = settings.tls != "off" or Path(settings.data, AUTH_FILE).exists()
    return is_secured and is_embedded(settings) and settings.bulk_port == Settings().bulk_port


def _bulk(settings: Settings, addresses: Addresses) -> list[str]:
    """Keeps a free port when it starts again: the pipeline knows that port."""
    port = addresses[BULK].rpartition(":")[2] if BULK in addresses else str(settings.bulk_port)
    listens = ["--port", port]
    if uses_socket(settings):
        listens = ["--socket", str(Path(settings.data, _SOCKET).resolve())]
    elif settings.tls != "off":
        files = server_files(Path(settings.data), settings.tls_cert, settings.tls_key)
        listens += ["--tls-cert", files.certificate, "--tls-key", files.key or files.certificate]
    return [
        sys.executable, "-m", "postdate", "bulk", "--data", str(Path(settings.data).resolve()), "--host", settings.host,
        *listens, "--broker", _from_here(addresses["broker"]), "--parent-pid", str(os.getpid()),
    ]  # fmt: skip


def _pipeline(settings: Settings, addresses: Addresses) -> list[str]:
    table = settings.table
    if "://" not in table:  # a folder by its whole path: bulk and other readers may work in another folder
        table = str(Path(table or f"{settings.data}/table").resolve())
    # The level of this process: a record below it would end here in any case.
    level = "debug" if logging.getLogger("postdate").isEnabledFor(logging.DEBUG) else "info"
    return [
        sys.executable, "-m", "postdate", "pipeline", "--addr", _from_here(addresses["broker"]), "--table", table,
        "--master", settings.spark_master, "--memory", str(settings.spark_memory_bytes),
        "--parent-pid", str(os.getpid()), "--log-level", level,
    ]  # fmt: skip


def _environment(settings: Settings) -> dict[str, str] | str:
    """Java, and the token of the data folder: in the environment, as everybody can read arguments."""
    java_home = _java(settings.java_home)
    if isinstance(java_home, str):
        return java_home
    token = Path(settings.data, TOKEN_FILE)
    return java_home | ({ENVIRONMENT_TOKEN: read_token(token)} if token.exists() else {})


def _java(home: str) -> dict[str, str] | str:
    found = java.find(os.environ, home)
    if isinstance(found, java.Java):
        return {"JAVA_HOME": found.home}
    return f"{found.sentence}: {_STAY}; {java.INSTALL}"


def _from_here(address: str) -> str:
    """An address of this machine for one that stands for all of them."""
    host, _, port = address.rpartition(":")
    return f"{_THIS_MACHINE.get(host, host)}:{port}"

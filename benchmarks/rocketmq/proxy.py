"""RocketMQ with its proxy for gRPC clients: python -m benchmarks.rocketmq.proxy [--folder DIR] [--cache DIR]

A name server, and one process that is broker and proxy (RocketMQ's local mode), on free ports of loopback. As a command
it prints both addresses, stays small in memory, and runs until Ctrl-C or SIGTERM.
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.bench import say
from benchmarks.rocketmq import libraries
from benchmarks.rocketmq.systems import (
    BROKER_JVM,
    BROKER_SETTINGS,
    FLUSH_DISK_TYPE,
    NAME_SERVER_SETTINGS,
    NotStarted,
    RocketMQ,
    free_ports,
    start_java,
    start_name_server,
    write_settings,
)

STARTED = b"startup successfully"  # what it says, and not what brokers and name servers say
SMALL_JVM = ("-Xms64m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", "-XX:+UseSerialGC")
SMALL_SETTINGS = {
    "mappedFileSizeCommitLog": 64 << 20,
    "transactionCheckInterval": 5_000,  # not below 3 s: it would ask about what has just ended
    "transactionTimeOut": 1_000,
    "popConsumerKVServiceEnable": "false",  # its RocksDB keeps 300 MB
}


@contextmanager
def rocketmq_proxy(
    folder: Path,
    flush: str,
    class_path: str,
    settings: Mapping[str, object] | None = None,
    jvm: Sequence[str] = BROKER_JVM,
    ports: Sequence[int] = (),
) -> Iterator[RocketMQ]:
    """With other settings of the broker, another JVM, or four ports that are known beforehand. Raises NotStarted."""
    route, broker, remoting, grpc, *_ = ports or free_ports()
    address = f"127.0.0.1:{route}"
    of_name_server = NAME_SERVER_SETTINGS | {"listenPort": route}
    of_broker = BROKER_SETTINGS | {
        "namesrvAddr": address, "listenPort": broker, "haListenPort": broker + 1,
        "storePathRootDir": folder / "store", "storePathCommitLog": folder / "store" / "commitlog",
        "flushDiskType": FLUSH_DISK_TYPE[flush], **(settings or {}),
    }  # fmt: skip
    of_proxy = {
        "rocketMQClusterName": BROKER_SETTINGS["brokerClusterName"], "proxyMode": "local", "namesrvAddr": address,
        "grpcServerPort": grpc, "remotingListenPort": remoting,
    }  # fmt: skip
    with ExitStack() as stack:
        names = stack.enter_context(start_name_server(folder, of_name_server, class_path))
        broker_file = write_settings(folder / "broker.conf", of_broker)
        proxy_file = folder / "proxy.json"
        proxy_file.write_text(json.dumps(of_proxy))
        arguments = ("-pm", "local", "-n", address, "-bc", str(broker_file), "-pc", str(proxy_file))
        both = stack.enter_context(start_java(folder, "proxy.ProxyStartup", jvm, class_path, arguments, STARTED))
        yield RocketMQ(address, f"127.0.0.1:{broker}", names, both, f"127.0.0.1:{grpc}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when it was told to end, 2 when it could not be started."""
    cache = libraries.usual_cache()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rocketmq.proxy", description="Runs RocketMQ with its proxy for gRPC clients."
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="for its data; default one that is deleted at the end"
    )
    parser.add_argument("--cache", type=Path, default=cache, metavar="DIR", help=f"of the jars; default {cache}")
    options = parser.parse_args(arguments)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        with tempfile.TemporaryDirectory(prefix="rocketmq-proxy-") as temporary:
            folder = options.folder or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            libraries.check_tools()
            jars = libraries.fetched(options.cache)
            with rocketmq_proxy(folder, "async", f"{jars}/*", SMALL_SETTINGS, SMALL_JVM) as proxy:
                print(f"gRPC clients: {proxy.grpc_address}, name server: {proxy.route_address}", flush=True)
                ended.wait()
    except (libraries.Unusable, NotStarted) as error:
        say(f"benchmarks.rocketmq.proxy: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The two systems: each on free ports of loopback, in a temporary folder, paused while the other is measured.

A system that only waits is not idle: RocketMQ's broker was seen to take about a tenth of a core. On two cores that
would be measured as the other's lateness. So the one that is not measured is stopped (SIGSTOP) and goes on (SIGCONT)
some time before its turn. That RocketMQ's parts do not take each other for dead meanwhile needs four settings, which
cost nothing while it runs.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.process import Running, end

SETTLE_S = 2.0  # after going on: timers that missed their turns run them now
START_S, START_POLL_S = 60.0, 0.02
PORTS = range(20_000, 30_000, 10)  # below those of outgoing connections
DAY_S = 86_400

# The collector's flags of RocketMQ's start script, with a heap of 4 GB instead of 8: enough for this load.
BROKER_JVM = (
    "-Xms4g", "-Xmx4g", "-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25",
    "-XX:InitiatingHeapOccupancyPercent=30", "-XX:+AlwaysPreTouch", "-XX:MaxDirectMemorySize=4g",
    "-XX:-UseBiasedLocking", "-XX:+IgnoreUnrecognizedVMOptions",
)  # fmt: skip
NAME_SERVER_JVM = ("-Xms512m", "-Xmx512m")
NAME_SERVER_SETTINGS = {
    "scanNotActiveBrokerInterval": DAY_S * 1_000,
    "serverChannelMaxIdleTimeSeconds": DAY_S,
}
BROKER_SETTINGS = {
    "brokerClusterName": "DefaultCluster",
    "brokerName": "rocketmq",
    "brokerId": 0,
    "brokerIP1": "127.0.0.1",
    "autoCreateTopicEnable": "true",
    "recallMessageEnable": "true",
    "timerWheelEnable": "true",
    "timerPrecisionMs": 100,  # the finest it takes; 1,000 is its default
    "brokerFastFailureEnable": "false",  # a slow disk makes it slow, and does not make it refuse
    "clientChannelMaxIdleTimeSeconds": DAY_S,
    "serverChannelMaxIdleTimeSeconds": DAY_S,
}
BOOTED = b"boot success"
FLUSH_DISK_TYPE = {"sync": "SYNC_FLUSH", "async": "ASYNC_FLUSH"}


class NotStarted(Exception):
    """A system did not start; the sentence says which, and what it said."""


class System(Protocol):
    """What a measure needs to know of a system that runs."""

    name: str
    route_address: str
    broker_address: str
    grpc_address: str  # empty where it takes no gRPC clients

    @property
    def pid(self) -> int:
        """The process whose CPU and memory count."""

    def signal(self, number: int) -> None:
        """To all its processes."""


class Postdate:
    """As `postdate up` starts it, but for free ports and the flush mode."""

    name = "Postdate"

    def __init__(self, running: Running) -> None:
        self.route_address = running.route_address
        self.broker_address = running.broker_address
        self.grpc_address = running.grpc_address
        self.pid = running.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


class RocketMQ:
    """A name server and a broker, with a proxy for gRPC clients in the broker's process where it has an address."""

    name = "RocketMQ"

    def __init__(
        self,
        route_address: str,
        broker_address: str,
        name_server: "subprocess.Popen[bytes]",
        broker: "subprocess.Popen[bytes]",
        grpc_address: str = "",
    ) -> None:
        self.route_address, self.broker_address, self.grpc_address = route_address, broker_address, grpc_address
        self.pid = broker.pid
        self._processes = (name_server, broker)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


@contextmanager
def postdate(folder: Path, flush: str) -> Iterator[Postdate]:
    running = Running(folder, ("--flush", flush))
    try:
        yield Postdate(running)
    finally:
        running.stop()


@contextmanager
def rocketmq(
    folder: Path, flush: str, class_path: str, settings: Mapping[str, object] | None = None
) -> Iterator[RocketMQ]:
    """A name server and a broker, with other settings of the broker where given."""
    route, broker, *_ = free_ports()
    address = f"127.0.0.1:{route}"
    of_name_server = NAME_SERVER_SETTINGS | {"listenPort": route}
    of_broker = BROKER_SETTINGS | {
        "namesrvAddr": address, "listenPort": broker, "haListenPort": broker + 1,
        "storePathRootDir": folder / "store", "storePathCommitLog": folder / "store" / "commitlog",
        "flushDiskType": FLUSH_DISK_TYPE[flush], **(settings or {}),
    }  # fmt: skip
    with ExitStack() as stack:
        names = stack.enter_context(start_name_server(folder, of_name_server, class_path))
        file = write_settings(folder / "broker.conf", of_broker)
        store = stack.enter_context(
            start_java(folder, "broker.BrokerStartup", BROKER_JVM, class_path, ("-c", str(file)))
        )
        yield RocketMQ(address, f"127.0.0.1:{broker}", names, store)


def write_settings(file: Path, settings: Mapping[str, object]) -> Path:
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return file


def start_name_server(
    folder: Path, settings: Mapping[str, object], class_path: str
) -> AbstractContextManager["subprocess.Popen[bytes]"]:
    file = write_settings(folder / "namesrv.conf", settings)
    return start_java(folder, "namesrv.NamesrvStartup", NAME_SERVER_JVM, class_path, ("-c", str(file)))


@contextmanager
def start_java(
    folder: Path, main: str, jvm: Sequence[str], class_path: str, arguments: Sequence[str], sign: bytes = BOOTED
) -> Iterator["subprocess.Popen[bytes]"]:
    """One of RocketMQ's processes, from when it says that it has started, by the words of `sign`."""
    output = folder / f"{main}.out"
    # Its logs go to the user's home.
    command = ["java", *jvm, f"-Duser.home={folder}", "-cp", class_path, f"org.apache.rocketmq.{main}", *arguments]
    homes = {"ROCKETMQ_HOME": str(folder), "ROCKETMQ_PROXY_HOME": str(folder)}
    with output.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **homes},
        )  # fmt: skip
    try:
        _await_start(process, output, main, sign)
        yield process
    finally:
        end(process)


def _await_start(process: "subprocess.Popen[bytes]", output: Path, main: str, sign: bytes) -> None:
    until = time.monotonic() + START_S
    while sign not in output.read_bytes():
        if process.poll() is not None or time.monotonic() > until:
            raise NotStarted(f"{main} did not start:\n{output.read_text(errors='replace')[-4_000:]}")
        time.sleep(START_POLL_S)


def free_ports() -> list[int]:
    """Of each, the second one below and the one above are free, too: a broker takes all three."""
    return [port for port in PORTS if not any(_is_taken(port + near) for near in (-2, 0, 1))]


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def awake(system: System) -> Iterator[None]:
    """The system goes on inside, and is stopped afterwards."""
    system.signal(signal.SIGCONT)
    time.sleep(SETTLE_S)
    try:
        yield
    finally:
        system.signal(signal.SIGSTOP)

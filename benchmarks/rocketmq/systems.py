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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
FLUSH_DISK_TYPE = {"sync": "SYNC_FLUSH", "async": "ASYNC_FLUSH"}


class NotStarted(Exception):
    """A system did not start; the sentence says which, and what it said."""


class System(Protocol):
    """What a measure needs to know of a system that runs."""

    name: str
    route_address: str

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
        self.pid = running.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


class RocketMQ:
    """A name server and a broker."""

    name = "RocketMQ"

    def __init__(self, route_address: str, name_server: "subprocess.Popen[bytes]", broker: "subprocess.Popen[bytes]"):
        self.route_address = route_address
        self.pid = broker.pid
        self._processes = (name_server, broker)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)


@contextmanager
def postdate(folder: Path, flush: str) -> Iterator[System]:
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
    route, broker = free_ports()
    address = f"127.0.0.1:{route}"
    of_name_server = NAME_SERVER_SETTINGS | {"listenPort": route}
    of_broker = BROKER_SETTINGS | {
        "namesrvAddr": address, "listenPort": broker, "haListenPort": broker + 1,
        "storePathRootDir": folder / "store", "storePathCommitLog": folder / "store" / "commitlog",
        "flushDiskType": FLUSH_DISK_TYPE[flush], **(settings or {}),
    }  # fmt: skip
    with ExitStack() as stack:
        names = stack.enter_context(
            _java(folder, "namesrv.NamesrvStartup", NAME_SERVER_JVM, of_name_server, class_path)
        )
        store = stack.enter_context(_java(folder, "broker.BrokerStartup", BROKER_JVM, of_broker, class_path))
        yield RocketMQ(address, names, store)


@contextmanager
def _java(
    folder: Path, main: str, jvm: tuple[str, ...], settings: Mapping[str, object], class_path: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """One of RocketMQ's processes, from when it says that it has started."""
    file, output = folder / f"{main}.conf", folder / f"{main}.out"
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    # Its logs go to the user's home.
    command = ["java", *jvm, f"-Duser.home={folder}", "-cp", class_path, f"org.apache.rocketmq.{main}", "-c", str(file)]
    with output.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "ROCKETMQ_HOME": str(folder)},
        )  # fmt: skip
    try:
        _await_start(process, output, main)
        yield process
    finally:
        end(process)


def _await_start(process: "subprocess.Popen[bytes]", output: Path, main: str) -> None:
    until = time.monotonic() + START_S
    while b"boot success" not in output.read_bytes():
        if process.poll() is not None or time.monotonic() > until:
            raise NotStarted(f"{main} did not start:\n{output.read_text(errors='replace')[-4_000:]}")
        time.sleep(START_POLL_S)


def free_ports() -> tuple[int, int]:
    """One for the name server and one for the broker, which also takes the second one below it and the one above."""
    found = [port for port in PORTS if not any(_is_taken(port + near) for near in (-2, 0, 1))]
    return found[0], found[1]


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

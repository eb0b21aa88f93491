"""Postdate with RocketMQ's official Java client."""

from pathlib import Path

import postdate
from benchmarks.peers.systems import java
from benchmarks.peers.systems.java import JavaSystem
from benchmarks.peers.systems.postdate_server import DURABLE, SETTINGS, TOPIC, VOLATILE, Server


class PostdateJava(JavaSystem):
    name = "Postdate, Java client"
    slug = "postdate-java"
    topic = TOPIC
    settings = f"{SETTINGS}; {java.SETTINGS}"
    durable = DURABLE
    volatile = VOLATILE

    def __init__(self, folder: Path, is_durable: bool) -> None:
        super().__init__(folder, is_durable)
        self._server = Server(folder, is_durable)

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"Postdate": postdate.__version__, **java.versions()}

    def start_server(self) -> str:
        self._server.start()
        return self._server.route_address

    def kill_server(self) -> None:
        self._server.kill()

    def stop_server(self) -> None:
        self._server.stop()

    def pids(self) -> list[int]:
        return self._server.pids()

"""`postdate up` as both of our clients are measured with it."""

import os
import signal
from pathlib import Path

from benchmarks import process
from benchmarks.process import Running
from benchmarks.server import QUEUE_COUNT, Peer, make_topic
from postdate.wire.requests import Request

TOPIC = "peers"
SETTINGS = (
    f"postdate up with its defaults but for ports, a topic of {QUEUE_COUNT} queues, without the Spark pipeline (far "
    "messages stay in the log)"
)
DURABLE = "written and synced by fdatasync (group commit), flush = sync"
VOLATILE = "written, not synced: a power loss may take it, a killed process not (flush = async)"


class Server:
    """One folder, any number of lives."""

    def __init__(self, folder: Path, is_durable: bool) -> None:
        self._folder, self._flush = folder, "sync" if is_durable else "async"
        self._running: Running | None = None
        self._address = ""
        self.route_address = ""

    def start(self) -> None:
        is_new = not (self._folder / "data").exists()
        self._running = Running(self._folder, ("--flush", self._flush))
        self._address, self.route_address = self._running.broker_address, self._running.route_address
        if is_new:
            with Peer(self._address) as peer:
                make_topic(peer, TOPIC)

    def kill(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None

    def pids(self) -> list[int]:
        return process.tree(self._running.pid) if self._running is not None else []

    def visible(self) -> int:
        """What the queues' ends add up to."""
        with Peer(self._address) as peer:
            answers = [
                peer.ask(Request.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": queue_id})
                for queue_id in range(QUEUE_COUNT)
            ]
        return sum(int(answer.fields["offset"]) for answer in answers)

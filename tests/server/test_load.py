"""Many connections: 5,000 that are idle and 500 that are busy, on a broker process of its own."""

import asyncio
import resource
import select
import socket
from pathlib import Path
from typing import Any

import orjson

from postdate.client.connection import Address, Connection, Connections
from postdate.wire import codes
from postdate.wire.frame import Command, encode
from postdate.wire.requests import Request
from tests.support.peer import LONG_POLL_MS, connected, make_topic
from tests.support.server import serving
from verify.faults.process import Broker

IDLE, BUSY, ROUNDS = 5_000, 500, 4
QUEUES = 8
GROUPS = 50
TOPIC = "load"
FILES_BESIDE = 500
WAIT_S = 60.0
IDLE_BYTES_MAX = 16 << 10  # of the broker's memory, for each


def allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= count, f"this test needs {count} open files, the system has {hard}"
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def connect_idle(port: int) -> list[socket.socket]:
    """Connections as a client leaves them: one request was answered, then nothing."""
    idle = []
    question = encode(Command(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": TOPIC}, opaque=1))
    for _ in range(IDLE):
        connection = socket.create_connection(("127.0.0.1", port), WAIT_S)
        connection.sendall(question)
        idle.append(connection)
    for connection in idle:
        assert connection.recv(1 << 16)
    return idle


class Busy:
    """A client that beats, sends and pulls."""

    def __init__(self, number: int, connection: Connection) -> None:
        self._number = number
        self._connection = connection
        self._queue_id = number % QUEUES
        self._group = f"group{number % GROUPS}"
        self.answered = 0

    async def work(self) -> None:
        for round_number in range(ROUNDS):
            await self._ask(Request.HEART_BEAT, {}, self._heartbeat())
            await self._ask(Request.SEND_MESSAGE_V2, self._send(round_number), b"x" * 200)
            offset = await self._ask(Request.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": self._queue_id})
            # Only what others send now answers it, or its own timed message when it is due.
            await self._ask(Request.PULL_MESSAGE, self._pull(int(offset.fields["offset"])))

    async def _ask(self, code: int, fields: dict[str, Any], body: bytes = b"") -> Command:
        answer = await self._connection.request(code, fields, body, timeout=WAIT_S)
        assert answer.code in (codes.SUCCESS, codes.PULL_NOT_FOUND), answer
        self.answered += 1
        return answer

    def _heartbeat(self) -> bytes:
        consumer = {"groupName": self._group, "subscriptionDataSet": [{"topic": TOPIC, "subString": "*"}]}
        return orjson.dumps({"clientID": f"c{self._number}", "consumerDataSet": [consumer]})

    def _send(self, round_number: int) -> dict[str, Any]:
        key = f"{self._number}.{round_number}"
        return {
            "a": "load", "b": TOPIC, "c": "TBW102", "d": "4", "e": str(self._queue_id), "f": "0", "g": "0", "h": "0",
            "i": f"UNIQ_KEY\x01{key}\x02TIMER_DELAY_MS\x01300\x02", "j": "0", "k": "false", "m": "false",
        }  # fmt: skip

    def _pull(self, offset: int) -> dict[str, Any]:
        return {
            "consumerGroup": self._group, "topic": TOPIC, "queueId": self._queue_id, "queueOffset": offset,
            "maxMsgNums": 32, "sysFlag": codes.PULL_SUSPEND, "suspendTimeoutMillis": LONG_POLL_MS, "commitOffset": 0,
        }  # fmt: skip


async def work_all(port: int) -> int:
    """The number of answers that all busy clients got; raises what went wrong for one."""
    links = [Connections() for _ in range(BUSY)]
    try:
        address = Address("127.0.0.1", port)
        busy = [Busy(number, await link.to(address, WAIT_S)) for number, link in enumerate(links)]
        await asyncio.gather(*(each.work() for each in busy))
    finally:
        await asyncio.gather(*(link.close() for link in links))
    return sum(each.answered for each in busy)


def test_thousands_of_idle_and_hundreds_of_busy_clients_are_held(tmp_path: Path) -> None:
    allow_files(IDLE + BUSY + FILES_BESIDE)
    broker = Broker(tmp_path)
    broker.start()
    peer, idle = broker.peer(), []
    try:
        make_topic(peer, TOPIC, QUEUES)
        bytes_before = broker.resident_bytes
        idle = connect_idle(broker.port)
        idle_bytes = (broker.resident_bytes - bytes_before) / IDLE
        print(f"{idle_bytes:,.0f} bytes of the broker's memory for an idle connection")
        assert broker.file_count > IDLE
        assert idle_bytes < IDLE_BYTES_MAX
        assert asyncio.run(work_all(broker.port)) == BUSY * ROUNDS * 4
        poll = select.poll()
        for connection in idle:
            poll.register(connection, select.POLLIN | select.POLLHUP | select.POLLERR)
        assert poll.poll(0) == [], "an idle client was sent something, or let go"
        peer.round_trip()
    finally:
        peer.close()
        for connection in idle:
            connection.close()
        broker.stop()
    assert broker.log_lines("warning", "error") == []
    assert broker.check() == []


def test_a_sweep_gives_others_their_turn(tmp_path: Path) -> None:
    count = 600
    with serving(tmp_path) as served, connected(served) as peer:
        peer.round_trip()
        many = [socket.create_connection(("127.0.0.1", served.port), WAIT_S) for _ in range(count)]
        try:
            while served.call(lambda: len(served.dispatcher.connections)) <= count:
                peer.round_trip()
            assert served.call(lambda: len(list(served.dispatcher.connections.sweep()))) == 1 + count // 128
        finally:
            for connection in many:
                connection.close()

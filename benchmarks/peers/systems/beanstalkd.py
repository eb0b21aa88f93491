"""beanstalkd: its own delayed jobs, spoken to over one connection with many requests under way."""

import heapq
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.system import CANCELLED, UNKNOWN, Received, body
from benchmarks.peers.systems.inbox import Inbox, now_ms
from benchmarks.peers.systems.served import Served
from benchmarks.peers.systems.server import HOST, Server, free_port, program, said_version
from benchmarks.peers.systems.wire import Wire

UNIT_MS = 1_000
SLIP_MS = 1.0
PACED_MS = 60_000
PACED_COUNT_MAX = 20_000
PUT_COUNT = 500  # on their way together
RESERVE_COUNT = 256  # asked for together while many are due
SYNC_MS = 1_000
LEASE_S = 3_600
PRIORITY = 0


class Reply(NamedTuple):
    word: bytes
    id: bytes = b""
    body: bytes = b""


class Beanstalkd(Served[Wire[Reply]]):
    name = "beanstalkd"
    slug = "beanstalkd"
    settings = (
        f"Delays are whole seconds from the put on: up to {PACED_COUNT_MAX:,} messages of different due times are each "
        "put whole seconds before they are due, all others at once, rounded up to a second; over one raw connection, "
        f"with {PUT_COUNT} puts or up to {RESERVE_COUNT} pairs of reserve and delete under way."
    )
    durable = "synced before the answer (-f 0)"
    volatile = f"written, synced every second (-f {SYNC_MS})"

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {"beanstalkd": said_version([_program(), "-v"])}

    def start(self) -> None:
        self.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        sync = ["-f", "0"] if self.is_durable else ["-f", str(SYNC_MS)]
        self._server = Server([_program(), "-l", HOST, "-p", str(port), "-b", self.folder, *sync], self.folder)
        self._server.await_answer(lambda: Wire(port, replies).close())
        self._client = Wire(port, replies)

    def schedule(self, dues_ms: Sequence[int], first_index: int = 0) -> list[bytes | str]:
        is_soon = max(dues_ms) < now_ms() + PACED_MS
        if is_soon and len(dues_ms) <= PACED_COUNT_MAX and min(dues_ms) < max(dues_ms):
            return self._paced(dues_ms, first_index)
        starts = range(0, len(dues_ms), PUT_COUNT)
        batches = (puts(dues_ms[start : start + PUT_COUNT], first_index + start, now_ms()) for start in starts)
        return [_id(reply) for reply in self._connected.ask(batches)]

    def _paced(self, dues_ms: Sequence[int], first_index: int) -> list[bytes | str]:
        """Each at an instant that is whole seconds before it is due; one whose instant has slipped by waits for that of
        the next second, while there is one."""
        start_ms, handles = int(now_ms()), dict[int, bytes | str]()
        queue = [(start_ms + (due_ms - start_ms) % UNIT_MS, place) for place, due_ms in enumerate(dues_ms)]
        heapq.heapify(queue)
        while queue:
            time.sleep(max(queue[0][0] - now_ms(), 0) / 1e3)
            places, batch = list[int](), list[bytes]()
            for at_ms, place in _popped(queue, now_ms()):
                if at_ms < now_ms() - SLIP_MS and at_ms + UNIT_MS <= dues_ms[place]:
                    heapq.heappush(queue, (at_ms + UNIT_MS, place))
                else:
                    places.append(place)
                    batch.append(put(delay_s(dues_ms[place], at_ms), body(first_index + place)))
            handles.update(zip(places, map(_id, self._connected.ask([batch])), strict=True))
        return [handles[place] for place in range(len(dues_ms))]

    def receive(self, count: int, limit_s: float) -> Received:
        """Rounds of requests: delete what the last one brought, wait for one, and ask for more that are due with it:
        twice as many as there were."""
        inbox, wire = Inbox(count, limit_s), self._connected
        ids: list[bytes] = []
        while inbox.is_open:
            more_count = min(2 * len(ids), RESERVE_COUNT, inbox.missing) - 1
            wire.send(deletes(ids) + reserves(more_count, inbox.left_s))
            deleted = wire.read_exactly(len(ids))
            assert all(reply.word == b"DELETED" for reply in deleted), deleted
            ids = self._reserved(1 + max(more_count, 0), inbox)
        wire.send(deletes(ids))
        wire.read_exactly(len(ids))
        return inbox.received

    def _reserved(self, asked_count: int, inbox: Inbox) -> list[bytes]:
        """One answer to each request. Bodies are in hand as they come, not when the last answer is there."""
        ids: list[bytes] = []
        while asked_count:
            answers = self._connected.read_some(asked_count)
            inbox.take([reply.body for reply in answers if reply.word == b"RESERVED"])
            ids += [reply.id for reply in answers if reply.word == b"RESERVED"]
            asked_count -= len(answers)
        return ids

    def cancel(self, handles: Sequence[bytes | str]) -> list[str]:
        ids = [each if isinstance(each, bytes) else each.encode() for each in handles]
        starts = range(0, len(ids), PUT_COUNT)
        batches = ([deletes([each]) for each in ids[start : start + PUT_COUNT]] for start in starts)
        return [CANCELLED if reply.word == b"DELETED" else UNKNOWN for reply in self._connected.ask(batches)]


def delay_s(due_ms: int, at_ms: float) -> int:
    """Rounded up: never early."""
    return max(-int((at_ms - due_ms) // UNIT_MS), 0)


def puts(dues_ms: Sequence[int], first_index: int, at_ms: float) -> list[bytes]:
    return [put(delay_s(due_ms, at_ms), body(index)) for index, due_ms in enumerate(dues_ms, first_index)]


def put(after_s: int, data: bytes) -> bytes:
    return b"put %d %d %d %d\r\n%b\r\n" % (PRIORITY, after_s, LEASE_S, len(data), data)


def deletes(ids: Sequence[bytes]) -> bytes:
    return b"".join(b"delete %b\r\n" % each for each in ids)


def reserves(more_count: int, limit_s: float) -> bytes:
    """One that waits, and more that do not."""
    return b"reserve-with-timeout %d\r\n" % int(limit_s) + b"reserve-with-timeout 0\r\n" * more_count


def replies(data: bytes) -> tuple[list[Reply], bytes]:
    """Those that are complete in front of the data, and the rest."""
    found: list[Reply] = []
    start = 0
    while (end := data.find(b"\r\n", start)) >= 0:
        word, *fields = data[start:end].split(b" ")
        start_next = end + 2
        if word == b"RESERVED":
            start_next += int(fields[1]) + 2
            if start_next > len(data):
                break
            found.append(Reply(word, fields[0], data[end + 2 : start_next - 2]))
        else:
            found.append(Reply(word, *fields[:1]))
        start = start_next
    return found, data[start:]


def _popped(queue: list[tuple[int, int]], at_ms: float) -> list[tuple[int, int]]:
    """All whose instant has come."""
    popped = []
    while queue and queue[0][0] <= at_ms:
        popped.append(heapq.heappop(queue))
    return popped


def _id(reply: Reply) -> bytes:
    if reply.word != b"INSERTED":
        raise ConnectionError(f"beanstalkd answered {reply.word.decode()} to a put")
    return reply.id


def _program() -> Path:
    return program("beanstalkd", "Debian's beanstalkd")


SYSTEM = Beanstalkd

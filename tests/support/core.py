"""What the tests of the core share: making messages, driving a broker by hand, a disk that fails when told.

Instants are counted from T0, so that numbers in the tests stay short. Nothing here waits: time is an argument.
"""

import dataclasses
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from postdate.broker.broker import Broker
from postdate.broker.cancelling import CancelResult
from postdate.broker.writing import Ticket
from postdate.config import Limits, Settings
from postdate.contract import Stage
from postdate.keys import key_hash
from postdate.message import LOOPBACK, Cancelled, Message, encode_properties, first_key, tag_hash
from postdate.storage import chunk as chunks
from postdate.storage import record as records
from postdate.storage.disk import Data as Bytes
from postdate.storage.disk import RealDisk, RealFile, View
from postdate.storage.layout import CHUNK_ROW

T0 = 1_700_000_000_000
SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
TOPIC = "orders"
SMALL = Settings(segment_bytes=1 << 16, batch_bytes_max=1 << 14)
SMALL_LIMITS = Limits(queue_tail_rows=4, queue_file_rows=64)
KEEP_DAY = dataclasses.replace(SMALL, retention_ms=DAY_MS)
LEAD_MS = 60_000
FAR_MS = 10 * MINUTE_MS  # beyond the lead
STEPS_MAX = 200  # of driving a broker to one instant; more means that it spins


def message(
    body: bytes | str = b"hello",
    *,
    topic: str = TOPIC,
    queue_id: int = 0,
    due: int | None = None,
    unique: str = "",
    keys: str = "",
    tag: str = "",
    **properties: str,
) -> Message:
    """A message; `due` is an instant, written as TIMER_DELIVER_MS."""
    named = {"UNIQ_KEY": unique, "KEYS": keys, "TAGS": tag, **properties}
    if due is not None:
        named["TIMER_DELIVER_MS"] = str(due)
    data = body.encode() if isinstance(body, str) else body
    return Message(
        topic, data, encode_properties({name: value for name, value in named.items() if value}), queue_id=queue_id
    )


def send(broker: Broker, at_ms: int, *messages: Message) -> Ticket:
    """Sends one durable and applied batch."""
    ticket = broker.send(messages, at_ms)
    broker.flush()
    return ticket


def send_each(broker: Broker, at_ms: int, messages: Sequence[Message]) -> None:
    """Sends every message as a batch of its own."""
    for entry in messages:
        broker.send([entry], at_ms)
    broker.flush()


def segment_of_messages(broker: Broker, at_ms: int, label: str) -> None:
    """Fills the rest of a segment with visible messages."""
    first = broker.log.end >> 16
    count = 0
    while broker.log.end >> 16 == first:
        send(broker, at_ms, *[message(f"{label}{count + n}".ljust(500)) for n in range(16)])
        count += 16


def cancel(broker: Broker, key: str, due: int, at_ms: int, by: str = "unique") -> Cancelled:
    """Cancels durably; returns the truth about it."""
    ticket = broker.cancel(TOPIC, key, due, at_ms, by=by)
    broker.flush()
    answer = ticket.answer
    assert isinstance(answer, CancelResult)
    return answer.outcome


def waiting_count(broker: Broker) -> int:
    """Messages in the wheel and, untaken, in the far queue."""
    return sum(broker.fold.near) + sum(broker.fold.untaken)


def advance(broker: Broker, at_ms: int) -> int:
    """Drives a broker until it has nothing to do at this instant; returns when it wants to be called again."""
    for _ in range(STEPS_MAX):
        broker.advance(at_ms)
        broker.flush()
        wake_at_ms = broker.wake_at_ms
        if wake_at_ms > at_ms:
            return wake_at_ms
    raise AssertionError(f"the broker wants to be called at {wake_at_ms} again and again, it is {at_ms}")


def advance_to(broker: Broker, start: int, stop: int) -> None:
    """Lets time pass as a server does: from one instant the broker asks for to the next."""
    at_ms = start
    for _ in range(100_000):
        wake_at_ms = advance(broker, at_ms)
        if wake_at_ms > stop:
            advance(broker, stop)
            return
        at_ms = wake_at_ms
    raise AssertionError(f"the broker came only to {at_ms} of {stop}")


def pulled(broker: Broker, topic: str = TOPIC, queue_id: int = 0, offset: int | None = None) -> list[records.Record]:
    """Everything visible in a queue, as its consumer reads it."""
    at, max_offset = broker.offsets(topic, queue_id)
    at = at if offset is None else offset
    found: list[records.Record] = []
    while at < max_offset:
        answer = broker.pull(topic, queue_id, at)
        assert answer.next_offset > at, f"a pull at {at} goes on at {answer.next_offset}"
        found += [records.decode(data) for data in answer.records]
        at = answer.next_offset
    return found


def bodies(broker: Broker, topic: str = TOPIC, queue_id: int = 0) -> list[str]:
    return [record.body.decode() for record in pulled(broker, topic, queue_id)]


def snapshot(broker: Broker) -> None:
    for step in broker.snapshot():
        if step is not None:
            step()


def write_chunk(disk: RealDisk, name: str, rows: Sequence[tuple[int, int, int, Message]], flags: int = 0) -> None:
    """Uploads a chunk of (due, arrival, queue number, message), as the pipeline would after sorting."""
    index = np.zeros(len(rows), CHUNK_ROW)
    data = b""
    for number, (due, arrival, queue, entry) in enumerate(sorted(rows, key=lambda row: row[:2])):
        record = records.encode(entry, entry.topic.encode(), arrival, T0, LOOPBACK)
        properties = records.properties_of(record)
        index[number] = (
            due, arrival, len(data), len(record), queue, tag_hash(properties.get("TAGS", "")), flags,
            key_hash(properties.get("UNIQ_KEY", "")), key_hash(first_key(properties.get("KEYS", ""))),
        )  # fmt: skip
        data += record
    chunks.write(disk, name, index, data)


def stage(broker: Broker, epoch: int, far_to: int, horizon_to: int, names: Sequence[str] = (), at_ms: int = T0) -> None:
    """Stages from wherever the broker is."""
    far = broker.fold.far
    horizon = (far.horizon_at_ms, horizon_to)
    broker.stage(Stage(epoch, (far.taken, far_to), horizon, tuple(names), far.rows_in, 0), at_ms)


def settled(broker: Broker, ticket: Ticket | None) -> Any:
    """The answer of a ticket, made durable and applied."""
    assert ticket is not None
    broker.flush()
    return ticket.answer


def registered(broker: Broker, at_ms: int = T0) -> int:
    """Registers a pipeline; returns its epoch."""
    return int(settled(broker, broker.register_pipeline(at_ms)))


def contents(folder: Path, under: str = "") -> dict[str, bytes]:
    """Every file under a folder, for saying that nothing has changed."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in (folder / under).rglob("*") if path.is_file()}


Fault = Callable[[str, str], OSError | None]


class FaultyFile(RealFile):
    def __init__(self, disk: "FaultyDisk", path: str, real_path: str) -> None:
        super().__init__(real_path)
        self._disk, self._path = disk, path

    def write(self, position: int, *parts: Bytes) -> None:
        self._disk.call("file.write", self._path)
        super().write(position, *parts)

    def sync(self) -> None:
        self._disk.call("file.sync", self._path)
        super().sync()

    def close(self) -> None:
        self._disk.call("file.close", self._path)
        super().close()


class FaultyDisk(RealDisk):
    """A real folder whose calls fail when `fault(call, path)` gives an error; it remembers fault points
    and calls, but for reads.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.calls: list[tuple[str, str]] = []
        self.fault: Fault = lambda _call, _path: None

    def call(self, name: str, path: str) -> None:
        if name != "read":
            self.calls.append((name, path))
        error = self.fault(name, path)
        if error is not None:
            raise error

    def open(self, path: str) -> FaultyFile:
        self.call("open", path)
        return FaultyFile(self, path, self._prepare_path(path))

    def map(self, path: str) -> View:
        self.call("map", path)
        return super().map(path)

    def array(self, path: str) -> np.ndarray:
        self.call("read", path)
        return super().array(path)

    def read(self, path: str, position: int, size: int) -> bytes:
        self.call("read", path)
        return super().read(path, position, size)

    def write(self, path: str, position: int, *parts: Bytes) -> None:
        self.call("write", path)
        super().write(path, position, *parts)

    def sync(self, path: str) -> None:
        self.call("sync", path)
        super().sync(path)

    def rename(self, source: str, target: str) -> None:
        self.call("rename", source)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self.call("remove", path)
        super().remove(path)


def broken_once(disk: FaultyDisk, call: str, folder: str, nth: int = 1) -> None:
    """The nth call of that name on a file of that folder fails; the others work."""
    left = nth

    def fault(name: str, path: str) -> OSError | None:
        nonlocal left
        left -= name == call and path.startswith(folder + "/")
        if left or name != call or not path.startswith(folder + "/"):
            return None
        left = -1
        return OSError(errno.EIO, "Input/output error")

    disk.fault = fault


class Data:
    """A data folder of a test, and the brokers that it opened there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = FaultyDisk(folder)
        self.damaged = False  # set by a test that hurts the folder on purpose: then it is not checked at the end
        self._open: list[Broker] = []

    def open(
        self,
        settings: Settings = SMALL,
        limits: Limits = SMALL_LIMITS,
        *,
        topic: str | None = TOPIC,
        queue_count: int = 1,
    ) -> Broker:
        """Opens a broker; makes the topic where it is not there."""
        broker = Broker(self.disk, settings, limits=limits)
        self._open.append(broker)
        if topic is not None and topic not in broker.fold.topics.by_name:
            broker.put_topic(topic, T0, read_queue_count=queue_count, write_queue_count=queue_count)
        return broker

    def crash(self, broker: Broker) -> None:
        """Lets the folder go without a word, as a killed process does (the disk itself loses nothing here)."""
        self._open.remove(broker)
        broker.abandon()

    def close(self, broker: Broker) -> None:
        self._open.remove(broker)
        broker.close()

    def close_all(self) -> None:
        self.disk.fault = lambda _call, _path: None
        while self._open:
            broker = self._open.pop()
            if broker.log.failure is None:
                broker.close()
            else:
                broker.abandon()


def no_new_segments(data: Data) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    data.disk.fault = lambda call, path: full if call == "write" and path.startswith("log/") else None


def upload(broker: Broker, data: Data, name: str, messages: list[Message], numbers: list[int]) -> None:
    """A chunk of far messages by their row numbers in the far queue."""
    rows = broker.view.read_far(0, broker.fold.far.length)
    write_chunk(
        data.disk,
        name,
        [
            (int(rows[n]["due"]), int(rows[n]["arrival"]), int(rows[n]["queue"]), entry)
            for n, entry in zip(numbers, messages, strict=True)
        ],
    )

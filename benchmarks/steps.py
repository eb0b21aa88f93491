"""Measures a message step by step: python -m benchmarks.steps [--quick] [--only NAME ...] [--json FILE] ...

From the bytes of a timed send on the wire to a message in the hand of our Python client, in one process on the real
modules, in reads of 1, 32 and 250 sends. Figures are processor time per message (of this thread, its system calls
included), so that a busy machine disturbs little; what waiting for the disk takes is told beside it. What the kernel
does for sockets is not in it: see benchmarks.server for the whole. Every figure is the median of its repeats.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from benchmarks import bench as common
from benchmarks import load, server
from benchmarks.bench import Bench
from benchmarks.load import START_AT_MS
from benchmarks.report import Figure, Lines, shown
from benchmarks.server import PULL_BATCH, QUEUE_COUNT, TOPIC
from postdate.broker.broker import Broker
from postdate.client.backlog import Backlog, Delivery, OwnedQueue, Progress, Pull
from postdate.client.connection import Address as PeerAddress
from postdate.client.received import ReceivedMessage
from postdate.clock import ManualClock
from postdate.config import Settings
from postdate.server.address import Address
from postdate.server.connection import Connection
from postdate.server.dispatch import Dispatcher
from postdate.wire.bodies import QueueName
from postdate.wire.frame import Frames, decode
from postdate.wire.records import split_records
from postdate.wire.requests import decode_send

SETTINGS = Settings()
SIZES = (1, 32, 250)  # sends in one read
COUNT = 50_000  # messages of a repeat; of reads of one send a fifth, because each has a sync of its own
EMPTY_COUNT = 1_000
NEAR_MS, FAR_MS = 30_000, 3_600_000
WIRE, DECODE, PREPARE, APPEND = "wire: frames", "decode: header", "prepare", "append: pack and write"
FLUSH, WAITED = "flush: one fdatasync", "flush: waiting for the disk"
WHEEL, FAR, ANSWER, FIRE = "apply: into the wheel", "apply: into the far queue", "answer", "fire"
PULL, CLIENT = "pull", "client"


class Spans(dict[str, float]):
    """By step: seconds, without what taking the time takes itself."""

    def __init__(self, found: dict[str, float] | None = None) -> None:
        super().__init__(found or {})
        self._empty_s = 0.0
        for _ in range(EMPTY_COUNT):
            with self.of("empty"):
                pass
        self._empty_s = self.pop("empty") / EMPTY_COUNT

    @contextmanager
    def of(self, step: str, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
        began = clock()
        yield
        self[step] = self.get(step, 0.0) + clock() - began - self._empty_s


class _Transport(asyncio.Transport):
    """Takes what is written, and sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Served(NamedTuple):
    """A service without sockets. Its clock stands still and it never flushes by itself: the steps do."""

    broker: Broker
    dispatcher: Dispatcher
    connection: Connection
    transport: _Transport


@contextmanager
def served(bench: Bench) -> Iterator[Served]:
    """Called on a running loop."""
    with bench.folder() as folder:
        broker = load.opened(folder, SETTINGS)
        dispatcher = Dispatcher(broker, ManualClock(START_AT_MS), Address(SETTINGS))
        connection, transport = Connection(dispatcher), _Transport()
        connection.connection_made(transport)
        try:
            yield Served(broker, dispatcher, connection, transport)
        finally:
            broker.abandon()


# -- sends ------------------------------------------------------------------------------------------------------


def _reads(count: int, size: int, delay_ms: int) -> list[bytes]:
    """What a socket would give: `size` sends a read, all of a read due at one instant, reads 1 ms apart."""
    return [
        b"".join(
            server.send_frame(number, START_AT_MS + delay_ms + start // size) for number in range(start, start + size)
        )
        for start in range(0, count // size * size, size)
    ]


def _sent(world: Served, reads: Sequence[bytes], apply: str, spans: Spans) -> None:
    """Every read goes through all steps before the next one comes, as in a server."""
    broker, pulse, producers = world.broker, world.dispatcher.pulse, world.dispatcher.sends
    frames_of = Frames().feed
    for data in reads:
        with spans.of(WIRE):
            frames = frames_of(data)
        with spans.of(DECODE):
            for frame in frames:
                decode_send(frame)
        with spans.of(PREPARE):  # and the header once more, which is taken off again
            for frame in frames:
                producers.collect_usual(world.connection, frame, START_AT_MS)
        with spans.of(APPEND):
            producers.write(world.connection, START_AT_MS)
        with spans.of(WAITED, time.perf_counter), spans.of(FLUSH):
            broker.log.flush()
        with spans.of(apply):
            broker.settle()
        with spans.of(ANSWER):
            pulse._answer_settled()
        world.transport.written.clear()
    spans[PREPARE] -= spans[DECODE]


def _fired(world: Served, instants: int, spans: Spans) -> None:
    """Fires one instant after the other, each as a batch of its own."""
    broker = world.broker
    for at_ms in range(START_AT_MS + NEAR_MS, START_AT_MS + NEAR_MS + instants):
        with spans.of(FIRE):
            broker.advance(at_ms)
        broker.log.flush()
        with spans.of(FIRE):
            broker.settle()
    assert not broker.fold.wheel.count, f"{broker.fold.wheel.count} messages still wait"


# -- pulls ------------------------------------------------------------------------------------------------------


def _pulled(world: Served, spans: Spans) -> list[bytes]:
    """Pulls everything, 32 at a time; gives the answers."""
    requests = [
        server.pull_frame(queue_id, offset)
        for queue_id in range(QUEUE_COUNT)
        for offset in range(0, world.broker.offsets(TOPIC, queue_id)[1], PULL_BATCH)
    ]
    with spans.of(PULL):
        for request in requests:
            world.connection.data_received(request)
    answers = list(world.transport.written)
    world.transport.written.clear()
    return answers


class _Nobody:
    """The owner of messages that are neither acknowledged by hand nor sent back."""

    def acknowledge(self, delivery: Delivery) -> None:
        raise NotImplementedError

    def retry(self, delivery: Delivery, delay: object) -> None:
        raise NotImplementedError


def _received(answers: Sequence[bytes], spans: Spans) -> int:
    """What a consumer does with the answers, its loop apart; returns how many messages it had in hand."""
    queue = OwnedQueue(QueueName(TOPIC, "postdate", 0), PeerAddress("127.0.0.1", 0), Progress(0), None)
    backlog, frames_of, owner, count = Backlog(PULL_BATCH, lambda _: None), Frames().feed, _Nobody(), 0
    for answer in answers:
        with spans.of(CLIENT):
            for frame in frames_of(answer):
                command = decode(frame)
                pull = Pull(queue, split_records(command.body), len(command.body))
                backlog.put(pull, int(command.fields["nextBeginOffset"]))
            turn = backlog.take()
            while turn is not None:
                for delivery in turn:
                    count += len(ReceivedMessage(delivery, owner).body) > 0
                    delivery.settle()
                turn = backlog.take(turn)
    return count


# -- measures ---------------------------------------------------------------------------------------------------


def near(bench: Bench) -> list[Figure]:
    """A near message through all steps."""
    return [figure for size in SIZES for figure in _near(bench, size)]


def _near(bench: Bench, size: int) -> list[Figure]:
    count = bench.scaled(COUNT if size > 1 else COUNT // 5) // size * size
    reads = _reads(count, size, NEAR_MS)

    async def once() -> Spans:
        spans = Spans()
        with served(bench) as world:
            _sent(world, reads, WHEEL, spans)
            _fired(world, count // size, spans)
            received = _received(_pulled(world, spans), spans)
        assert received == count, f"{received} of {count} messages came"
        return spans

    return _figures(bench, f"near, reads of {size}", size, count, once)


def far(bench: Bench) -> list[Figure]:
    """The steps of a far message that differ: all up to its row in the far queue."""
    return [figure for size in SIZES for figure in _far(bench, size)]


def _far(bench: Bench, size: int) -> list[Figure]:
    count = bench.scaled(COUNT if size > 1 else COUNT // 5) // size * size
    reads = _reads(count, size, FAR_MS)

    async def once() -> Spans:
        spans = Spans()
        with served(bench) as world:
            _sent(world, reads, FAR, spans)
            assert world.broker.fold.far.length == count, "all are far"
        return Spans({FAR: spans[FAR]})

    return _figures(bench, f"far, reads of {size}", size, count, once)


def _figures(bench: Bench, name: str, size: int, count: int, once: Callable[[], Any]) -> list[Figure]:
    runs = [cast(Spans, asyncio.run(once())) for _ in bench.repeats(name)]
    return [
        Figure(f"{step}, {size}", "us", [spans[step] / count * 1e6 for spans in runs], None, at_most=True)
        for step in runs[0]
    ]


def shape(figures: Sequence[Figure]) -> Lines:
    """A row for each step, a column for each size of a read; the sum of what is processor time."""
    cells = {figure.name: figure.median for figure in figures}
    steps = dict.fromkeys(figure.name.rpartition(", ")[0] for figure in figures)
    rows = [[step, *(_cell(cells.get(f"{step}, {size}")) for size in SIZES)] for step in steps]
    summed = [step for step in steps if step not in (WAITED, FAR)]
    total = [
        "all of a near message",
        *(_cell(sum(cells.get(f"{step}, {size}", 0.0) for step in summed)) for size in SIZES),
    ]
    return [["us a message, in reads of", *map(str, SIZES)], *rows, total]


def _cell(value: float | None) -> str:
    return "" if value is None else shown(value)


# -- the command ------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {"near": near, "far": far}


def main(arguments: Sequence[str] | None = None) -> int:
    return common.run("steps", "a message step by step", Bench, MEASURES, arguments, shape)


if __name__ == "__main__":
    sys.exit(main())

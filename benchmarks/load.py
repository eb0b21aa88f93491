"""What the benchmarks send, and the processes that fill a folder.

Every message has a body of 200 bytes (unless said otherwise), a UNIQ_KEY of 32 characters and a TIMER_DELAY_MS. The
clock stands still or is moved by hand: nothing here waits for a due time.
"""

import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from postdate.broker.broker import Broker
from postdate.config import Settings
from postdate.message import Message
from postdate.storage.disk import RealDisk

TOPIC = "bench"
QUEUE_COUNT = 8
START_AT_MS = 1_800_000_000_000
BODY = bytes(range(200))
SMALL_BODY = b"x"
LARGE_BODY = bytes(4_096)
FILL_BATCH = 500
FLUSH_EVERY = 20  # batches
NEAR_MS = 60_000
FAR_MS = 86_400_000
# So much of what a snapshot would cut off waits to be replayed at the kill: close to the worst moment.
TAIL_SHARE = 0.95


def message(index: int, delay_ms: int, body: bytes = BODY) -> Message:
    properties = b"UNIQ_KEY\x01%032d\x02TIMER_DELAY_MS\x01%d\x02" % (index, delay_ms)
    return Message(TOPIC, body, properties, index % QUEUE_COUNT, born_at_ms=START_AT_MS)


def opened(folder: Path, settings: Settings | None = None) -> Broker:
    """A broker with the topic of the benchmarks, zeroing its segments ahead as a server does."""
    broker = Broker(RealDisk(folder), settings or Settings())
    if TOPIC not in broker.fold.topics.by_name:
        broker.put_topic(TOPIC, START_AT_MS, read_queue_count=QUEUE_COUNT, write_queue_count=QUEUE_COUNT)
    broker.start_keeper()
    while broker.log.spare_count < 2:
        time.sleep(0.001)
    return broker


def visible_count(broker: Broker) -> int:
    return sum(broker.offsets(TOPIC, queue_id)[1] for queue_id in range(QUEUE_COUNT))


def take_snapshot(broker: Broker) -> None:
    for step in broker.snapshot():
        if step is not None:
            step()


class Part(NamedTuple):
    """A number of like messages, delays spread evenly over (low, high]; 0 and 0 is at once."""

    message_count: int
    delay_low_ms: int
    delay_high_ms: int
    body: bytes = BODY

    def batches(self) -> Iterator[list[Message]]:
        span = max(self.delay_high_ms - self.delay_low_ms, 1)
        for start in range(0, self.message_count, FILL_BATCH):
            numbers = range(start, min(start + FILL_BATCH, self.message_count))
            yield [message(number, self.delay_high_ms - number % span, self.body) for number in numbers]


def near(count: int) -> Part:
    return Part(count, 0, NEAR_MS)


def far(count: int, body: bytes = BODY) -> Part:
    return Part(count, FAR_MS, 2 * FAR_MS, body)


def burst(count: int) -> Part:
    return Part(count, NEAR_MS - 1, NEAR_MS)


def at_once(count: int, body: bytes = BODY) -> Part:
    return Part(count, 0, 0, body)


def fill(broker: Broker, part: Part, at_ms: int = START_AT_MS, *, snapshots: bool = False) -> None:
    """Sends a part in batches, durable on return; takes snapshots when they are due, as a server would."""
    for number, batch in enumerate(part.batches()):
        broker.send(batch, at_ms)
        if number % FLUSH_EVERY == FLUSH_EVERY - 1:
            broker.flush()
            if snapshots and broker.snapshot_is_due:
                take_snapshot(broker)
    broker.flush()


def replay_bytes(broker: Broker) -> int:
    """What a crash now would have to replay."""
    return broker.bytes_since_snapshot


def fill_tail(broker: Broker, batch_size: int) -> None:
    """Sends on, at once visible, until a snapshot is almost due."""
    settings, limits, batch = broker.settings, broker.limits, [message(number, 0) for number in range(batch_size)]
    batches_max = int(TAIL_SHARE * limits.snapshot_batches)
    while replay_bytes(broker) < TAIL_SHARE * settings.snapshot_bytes and broker.batches_since_snapshot < batches_max:
        for _ in range(FLUSH_EVERY):
            broker.send(batch, START_AT_MS)
        broker.flush()


# -- other processes --------------------------------------------------------------------------------------------


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in a fresh process and gives its answer."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    sender.send(function(*arguments))


def killed(function: Callable[..., None], *arguments: Any) -> None:
    """Runs a function that ends its fresh process by SIGKILL."""
    process = get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"the filling process ended with {process.exitcode}"


def fill_and_die(folder: Path, parts: list[Part], tail_batch: int) -> None:
    """Fills a folder, then dies as by kill -9 when a snapshot was almost due."""
    broker = opened(folder)
    for part in parts:
        fill(broker, part, snapshots=True)
    take_snapshot(broker)
    fill_tail(broker, tail_batch)
    os.kill(os.getpid(), signal.SIGKILL)


class Opening(NamedTuple):
    """What opening a folder took, and what there was to do."""

    seconds: float
    wheel_count: int
    replay_bytes: int
    batch_count: int
    log_bytes: int


def opening(folder: Path) -> Opening:
    """Opens a folder that a crash left, and leaves it as it was."""
    started = time.perf_counter()
    broker = Broker(RealDisk(folder), Settings())
    seconds = time.perf_counter() - started
    fold, batch_count = broker.fold, broker.batches_since_snapshot
    answer = Opening(seconds, fold.wheel.count, replay_bytes(broker), batch_count, broker.log.end)
    broker.abandon()
    return answer


def bytes_per_message(folder: Path, part: Part) -> float:
    """How much the process grew by sending a part, per message."""
    broker = opened(folder)
    fill(broker, at_once(20_000))  # every buffer has its size by then
    gc.collect()
    before = resident_bytes()
    fill(broker, part)
    gc.collect()
    grown = resident_bytes() - before
    broker.abandon()
    return grown / part.message_count


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])

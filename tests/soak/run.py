"""A soak from start to verdict: the broker, its crew, and who kills it."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dialogue import Peer, make_topic, read_all
from process import Broker, now_ms

from soak import history
from soak.crew import (
    CLIENT_GROUP,
    LOST,
    POP_GROUP,
    POP_INVISIBLE_MS,
    QUEUES,
    RAW_GROUP,
    TOPIC,
    ClientConsumer,
    PopConsumer,
    Producer,
    RawConsumer,
    Worker,
    consume,
    key_of,
)
from soak.history import Entry, History

PRODUCERS, CLIENT_CONSUMERS, POP_CONSUMERS = 2, 2, 2
LEAD_MS = 2_000  # short, so that many messages are far and must be rescued
DELAY_MS_MAX = 40_000
SAMPLE_S = 1.0
JOIN_S = 60.0
FILES_MORE = 64
GROWTH_BYTES = 64 << 20


class Sample(NamedTuple):
    """What the broker takes from the system."""

    age_s: float  # since it was started
    resident_bytes: int
    file_count: int


class Result(NamedTuple):
    faults: list[str]
    summary: str


class Soak:
    """One run. `stop` ends its mixed part early; the verdict comes all the same."""

    def __init__(
        self, folder: Path, seed: int, seconds: float, kill_every_s: float, say: Callable[[str], None]
    ) -> None:
        self._seconds, self._kill_every_s, self._say = seconds, kill_every_s, say
        self._delay_ms_max = int(min(DELAY_MS_MAX, max(seconds * 250, LEAD_MS + 2_000)))
        self._random = random.Random(seed)
        self._history = History()
        # Snapshots every some seconds, so that a restart finds one, and the log's tail behind it.
        self._broker = Broker(folder, lead_ms=LEAD_MS, rescue_step_ms=500, snapshot_batches=500)
        self._stopping = threading.Event()
        self._samples: list[Sample] = []
        self._seed = seed

    def stop(self) -> None:
        self._stopping.set()

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        self._broker.start()
        try:
            peer = self._broker.peer()
            make_topic(peer, TOPIC, QUEUES)
            peer.close()
            started = time.monotonic()
            faults = self._work()
            seconds = time.monotonic() - started
            try:
                faults += self._verdict()
            except (AssertionError, *LOST) as error:  # a broker that cannot be read any more
                faults.append(f"verdict: {type(error).__name__} {error}")
        finally:
            self._broker.stop()
        faults += self._log_faults() + self._flatness() + [f"check: {finding}" for finding in self._broker.check()]
        return Result(faults, self._summary(seconds))

    def _work(self) -> list[str]:
        """Everybody at once, with kills in between; returns what went wrong with the crew itself."""
        producers, consumers = self._crew()
        for worker in (*producers, *consumers):
            worker.start()
        self._watch()
        self._say("producers stop; waiting for what is due")
        mistakes = _ended(producers)
        due = max((told.due_at_ms for told in self._history.told.values()), default=0)
        while now_ms() < due + 500:
            time.sleep(0.1)
        return mistakes + _ended(consumers)

    def _crew(self) -> tuple[list[Worker], list[Worker | ClientConsumer]]:
        port, told, seeds = self._broker.port, self._history, iter(range(self._seed * 100, self._seed * 100 + 100))
        producers: list[Worker] = [
            Producer(number, next(seeds), port, told, self._delay_ms_max, 0.02) for number in range(PRODUCERS)
        ]
        consumers: list[Worker | ClientConsumer] = [RawConsumer(next(seeds), port, told)]
        consumers += [PopConsumer(number, next(seeds), port, told) for number in range(POP_CONSUMERS)]
        consumers += [
            ClientConsumer(number, next(seeds), self._broker.route_address, told) for number in range(CLIENT_CONSUMERS)
        ]
        return producers, consumers

    def _watch(self) -> None:
        """Samples, progress, and a kill every now and then, until the time is over."""
        end = time.monotonic() + self._seconds
        alive_since = time.monotonic()
        self._sample(0.0)
        while not self._stopping.wait(SAMPLE_S) and time.monotonic() < end:
            age_s = time.monotonic() - alive_since
            self._sample(age_s)
            if len(self._samples) % 10 == 0:
                self._say(self._progress(end - time.monotonic()))
            if self._kill_every_s and age_s >= self._kill_every_s * self._random.uniform(0.8, 1.2):
                self._broker.kill()
                self._broker.start()
                alive_since = time.monotonic()

    def _sample(self, age_s: float) -> None:
        self._samples.append(Sample(age_s, self._broker.resident_bytes, self._broker.file_count))

    def _progress(self, left_s: float) -> str:
        sample = self._samples[-1]
        return (
            f"{left_s:5.0f} s left, {self._history.acknowledged_count} acknowledged, {len(self._history.seen)} seen, "
            f"{self._broker.start_count - 1} kills, {sample.resident_bytes >> 20} MiB, {sample.file_count} files"
        )

    # -- the verdict ----------------------------------------------------------------------------------------------

    def _verdict(self) -> list[str]:
        """Reads everything, as a member of the group and queue by queue, and compares."""
        consume(self._broker.route_address, self._history, lambda: False, lambda: False)
        peer = self._broker.peer()
        try:
            self._pop_all(peer)
            records = [record for queue_id in range(QUEUES) for record in read_all(peer, TOPIC, queue_id)]
            again = [key_of(record) for record in read_all(peer, f"%RETRY%{RAW_GROUP}")]
        finally:
            peer.close()
        entries = [
            Entry(TOPIC, record.queue_id, record.queue_offset, key_of(record), record.stored_at_ms)
            for record in records
        ]
        faults = history.verdict(self._history, entries, [CLIENT_GROUP, POP_GROUP])
        return faults + history.retried(self._history, RAW_GROUP, again)

    def _pop_all(self, peer: Peer) -> None:
        """Until nothing has come for as long as a message may be away."""
        last = PopConsumer(POP_CONSUMERS, self._seed, self._broker.port, self._history)
        end = time.monotonic() + 2 * POP_INVISIBLE_MS / 1_000
        while time.monotonic() < end:
            if last.pop(peer, 1.0):
                end = time.monotonic() + 2 * POP_INVISIBLE_MS / 1_000

    def _log_faults(self) -> list[str]:
        return [f"log: {line}" for line in self._broker.log_lines() if line.split()[1:2] != ["info"]]

    def _flatness(self) -> list[str]:
        """The last third of the samples against the first, of brokers that were up for a while."""
        settled = [sample for sample in self._samples if sample.age_s >= 2] or self._samples
        third = max(len(settled) // 3, 1)
        head, tail = settled[:third], settled[-third:]
        faults = []
        files = median(each.file_count for each in tail) - median(each.file_count for each in head)
        if files > FILES_MORE:
            faults.append(f"files: {files} more open files at the end than at the beginning")
        grown = median(each.resident_bytes for each in tail) - median(each.resident_bytes for each in head)
        if grown > GROWTH_BYTES:
            faults.append(f"memory: {int(grown) >> 20} MiB more at the end than at the beginning")
        return faults

    def _summary(self, seconds: float) -> str:
        told = list(self._history.told.values())
        cancelled = sum(each.cancel == history.CANCELLED for each in told)
        doubtful = sum(each.sent == history.IN_DOUBT for each in told)
        head, tail = self._samples[0], self._samples[-1]
        return (
            f"{self._history.acknowledged_count} of {len(told)} sends acknowledged in {seconds:.0f} s "
            f"({self._history.acknowledged_count / seconds:.0f}/s), {doubtful} in doubt, {cancelled} cancelled, "
            f"{sum(self._history.backs.values())} sent back, {len(self._history.seen)} seen, "
            f"{self._broker.start_count - 1} kills; {head.resident_bytes >> 20} to {tail.resident_bytes >> 20} MiB, "
            f"{head.file_count} to {tail.file_count} files"
        )


def _ended(workers: Sequence[Worker | ClientConsumer]) -> list[str]:
    """Tells workers to stop and waits for them; returns what went wrong with them."""
    for worker in workers:
        worker.stopping.set()
    faults = []
    for worker in workers:
        worker.join(JOIN_S)
        if worker.is_alive():
            faults.append(f"crew: {worker.name} hangs")
        elif worker.mistake is not None:
            faults.append(f"crew: {worker.name}: {worker.mistake!r}")
    return faults

"""Measures bulk: python -m benchmarks.bulk [--quick] [--only NAME ...] [--json FILE] [--repeat N] ...

A real `postdate up`, a real `postdate bulk` beside it, each a process of its own; the reader is this process. Records
have 300 bytes, a UNIQ_KEY of 32 characters, KEYS and TAGS. Everything is read once before it counts: the figures are of
the processor, not of the disk. Nothing is bound to a core, and there are two: server, bulk and reader share them.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from benchmarks import bench as common
from benchmarks import load, server
from benchmarks.process import Running, cpu_s, end, memory_mb
from benchmarks.report import Figure
from postdate.access.permits import make_permit
from postdate.access.token import TOKEN_FILE, TOKEN_USER, read_token
from postdate.broker.broker import Broker
from postdate.clock import SystemClock
from postdate.config import Settings
from postdate.message import Message
from postdate.spark.executor.broker_client import BrokerClient
from postdate.storage.disk import RealDisk

ROW_COUNT = 1_000_000
BATCH = 500
BODY = bytes(104)  # makes records of 300 bytes
DAY_MS = 86_400_000
CHUNK_COLUMNS = ("due", "arrival", "queue", "tag_hash", "flags", "unique_hash", "key_hash", "record")


def fill(folder: Path, count: int) -> None:
    """Far messages, durable; in a process of its own."""
    broker = Broker(RealDisk(folder), Settings())
    now_ms = server.now_ms()
    broker.put_topic(server.TOPIC, now_ms, read_queue_count=8, write_queue_count=8)
    broker.start_keeper()
    for start in range(0, count, BATCH):
        broker.send([_message(number, now_ms + DAY_MS) for number in range(start, start + BATCH)], now_ms)
        if start // BATCH % load.FLUSH_EVERY == 0:
            broker.flush()
    broker.close()


def _message(number: int, due_at_ms: int) -> Message:
    properties = b"UNIQ_KEY\x01%032d\x02KEYS\x01order-%08d\x02TAGS\x01red\x02TIMER_DELIVER_MS\x01%d\x02"
    return Message(server.TOPIC, BODY, properties % (number, number, due_at_ms + number % 100_000), number % 8)


class Bulk:
    """`postdate bulk` beside a server, and a client of it."""

    def __init__(self, folder: Path, beside: Running) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "postdate", "bulk", "--data", str(folder / "data"), "--broker",
             beside.broker_address, "--port", "0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]
        token = read_token(folder / "data" / TOKEN_FILE)
        own = make_permit(token, TOKEN_USER, SystemClock().now_ms())
        self.place, permit = f"{self.address} {own}", f"Bearer {own}"  # as tasks take it, and as Flight does
        self.options = flight.FlightCallOptions(headers=[(b"authorization", permit.encode())])
        self.permit = permit
        self._client = flight.connect(f"grpc://{self.address}")
        self.broker_address = beside.broker_address
        self._broker = BrokerClient(beside.broker_address, token=token)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._client.close()
        end(self._process)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def read(self) -> Iterator[pa.RecordBatch]:
        ticket = json.dumps({"queue": "far", "start": 0, "stop": 1 << 40}).encode()
        for piece in self._client.do_get(flight.Ticket(ticket), self.options):
            yield piece.data

    def register(self) -> int:
        return self._broker.register("", "").epoch

    def put(self, name: str, rows: pa.Table) -> None:
        record_bytes = int(pc.sum(pc.binary_length(rows["record"])).as_py())
        command = json.dumps({"name": name, "rows": rows.num_rows, "bytes": record_bytes}).encode()
        writer, answers = self._client.do_put(flight.FlightDescriptor.for_command(command), rows.schema, self.options)
        with writer:
            writer.write_table(rows, max_chunksize=16_384)
            writer.done_writing()
            assert json.loads(answers.read().to_pybytes())["rows"] == rows.num_rows


@contextmanager
def filled(bench: common.Bench, count: int) -> Iterator[tuple[Running, Bulk]]:
    with bench.folder() as folder:
        load.in_process(fill, folder / "data", count)
        running = Running(folder, [])
        try:
            bulk = Bulk(folder, running)
            try:
                yield running, bulk
            finally:
                bulk.stop()
        finally:
            running.stop()


# -- out and in -------------------------------------------------------------------------------------------------


def out(bench: common.Bench) -> list[Figure]:
    count = bench.scaled(ROW_COUNT)
    rates, per_core, peaks = [], [], []
    with filled(bench, count) as (_, bulk):
        assert sum(batch.num_rows for batch in bulk.read()) == count
        for _ in bench.repeats("out"):
            began, cpu_began = time.perf_counter(), cpu_s(bulk.pid)
            rows = sum(batch.num_rows for batch in bulk.read())
            rates.append(rows / (time.perf_counter() - began))
            per_core.append(rows / (cpu_s(bulk.pid) - cpu_began))
            peaks.append(memory_mb(bulk.pid, "RssAnon"))
    return [
        Figure(f"bulk out, {count:,} far rows, one reader", "rows/s", rates, None),
        Figure("bulk out, rows per second of its processor time", "rows/s", per_core, 1_500_000),
        Figure("bulk, its own memory after that", "MB", peaks, None, at_most=True, floor="without mapped files"),
    ]


def in_(bench: common.Bench) -> list[Figure]:
    """Chunks of 250,000 rows, one after the other, each on disk before it is answered."""
    count = bench.scaled(ROW_COUNT)
    rates = []
    with filled(bench, count) as (_, bulk):
        rows = pa.Table.from_batches(list(bulk.read()))
        rows = rows.append_column("flags", pa.array(np.zeros(count, np.int32))).select(CHUNK_COLUMNS)
        rows = rows.sort_by([("due", "ascending"), ("arrival", "ascending")])
        epoch, step = bulk.register(), min(count, 250_000)
        for repeat in bench.repeats("in"):
            began = time.perf_counter()
            for start in range(0, count, step):
                bulk.put(f"{epoch:06d}-{repeat}-{start}", rows.slice(start, step))
            rates.append(count / (time.perf_counter() - began))
    return [Figure(f"bulk in, {count:,} rows as chunks", "rows/s", rates, None, floor="fsync included")]


# -- beside firing ----------------------------------------------------------------------------------------------


def lateness(bench: common.Bench) -> list[Figure]:
    """Near messages, 500 a second, at the Python client: alone, and while one reader takes all that bulk gives."""
    alone, beside = [], []
    with filled(bench, bench.scaled(ROW_COUNT)) as (running, bulk):
        for _ in bench.repeats("lateness"):
            alone.append(_p99_ms(bench, running))
            with _reading(bulk):
                beside.append(_p99_ms(bench, running))
    return [
        Figure("lateness at the Python client, p99, bulk idle", "ms", alone, None, at_most=True),
        Figure("lateness at the Python client, p99, bulk reads at full speed", "ms", beside, None, at_most=True),
    ]


def _p99_ms(bench: common.Bench, running: Running) -> float:
    late_ms = np.array(server.late_ms_of(running, bench.scaled(5_000), bench.scaled(10_000)))
    assert late_ms.min() >= 0, "a message came before it was due"
    return float(np.percentile(late_ms, 99))


@contextmanager
def _reading(bulk: Bulk) -> Iterator[None]:
    """A reader in a process of its own, as nice as bulk is."""
    script = (
        "import json, os, sys, pyarrow.flight as flight; os.nice(5); client = flight.connect('grpc://' + sys.argv[1])\n"
        "headers = [(b'authorization', sys.argv[2].encode())]\n"
        "while True:\n"
        "    ticket = flight.Ticket(json.dumps({'queue': 'far', 'start': 0, 'stop': 1 << 40}))\n"
        "    for piece in client.do_get(ticket, flight.FlightCallOptions(headers=headers)): pass\n"
    )
    reader = subprocess.Popen([sys.executable, "-c", script, bulk.address, bulk.permit])
    try:
        yield
    finally:
        end(reader)


# -- the command ------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[common.Bench], list[Figure]]] = {"out": out, "in": in_, "lateness": lateness}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every goal was reached, 1 otherwise."""
    return common.run("bulk", "Postdate's bulk process", common.Bench, MEASURES, arguments)


if __name__ == "__main__":
    sys.exit(main())

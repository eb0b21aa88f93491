"""Measures a topic in Spark: python -m benchmarks.topic_source [--quick] [--only NAME ...] ...

A real `postdate up`, a real `postdate bulk` beside it, and a plain Spark session on all cores, which reads a topic by
`spark.read.format("postdate")` and writes it to nowhere. Bodies have 200 bytes, messages a UNIQ_KEY of 32 characters,
KEYS, TAGS and TIMER_DELIVER_MS. In order: they were due when they came, and stand in the log as in their queue. Mixed:
they were due at random within ten seconds, and a batch comes from all over the log. Everything is read once before it
counts: the figures are of the processors, which all of them share.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

import postdate.spark
from benchmarks import bench as common
from benchmarks import load, server
from benchmarks.bulk import Bulk
from benchmarks.process import Running, cpu_s, tree
from benchmarks.report import Figure
from postdate.broker.broker import Broker
from postdate.config import Settings
from postdate.message import Message
from postdate.spark.formats.topic import COLUMNS
from postdate.storage.disk import RealDisk

ROW_COUNT = 3_000_000
BATCH = 500
QUEUE_COUNT = 4
ORDERS = {"in order": 1, "mixed": 10_000}  # and the span of their dues in milliseconds
FEW = "offset,due,visible"
SOME = "offset,due,visible,key,body"
ALL = ",".join(COLUMNS)


def fill(folder: Path, count: int, span_ms: int) -> None:
    """Messages that were due within a span and are visible; in a process of its own."""
    broker = Broker(RealDisk(folder), Settings())
    now_ms = server.now_ms() - 60_000
    broker.put_topic(server.TOPIC, now_ms, read_queue_count=QUEUE_COUNT, write_queue_count=QUEUE_COUNT)
    broker.start_keeper()
    dice = random.Random(7)
    for start in range(0, count, BATCH):
        messages = [_message(number, now_ms + dice.randrange(span_ms)) for number in range(start, start + BATCH)]
        broker.send(messages, now_ms)
        if start // BATCH % load.FLUSH_EVERY == 0:
            broker.flush()
    broker.flush()
    for at_ms in range(now_ms, now_ms + span_ms + 1, 10):
        broker.advance(at_ms)
        broker.flush()
    broker.close()


def _message(number: int, due_at_ms: int) -> Message:
    properties = b"UNIQ_KEY\x01%032d\x02KEYS\x01order-%08d\x02TAGS\x01red\x02TIMER_DELIVER_MS\x01%d\x02"
    return Message(server.TOPIC, load.BODY, properties % (number, number, due_at_ms), number % QUEUE_COUNT)


@contextmanager
def filled(bench: common.Bench, count: int, order: str) -> Iterator[Bulk]:
    with bench.folder() as folder:
        load.in_process(fill, folder / "data", count, ORDERS[order])
        running = Running(folder, [])
        try:
            bulk = Bulk(folder, running)
            try:
                yield bulk
            finally:
                bulk.stop()
        finally:
            running.stop()


# -- bulk alone -------------------------------------------------------------------------------------------------


def queue(bench: common.Bench) -> list[Figure]:
    """One reader, one queue after the other, without Spark."""
    return [figure for order in ORDERS for figure in _queue(bench, order)]


def _queue(bench: common.Bench, order: str) -> list[Figure]:
    count = bench.scaled(ROW_COUNT)
    rates: dict[str, list[float]] = {ALL: [], SOME: [], FEW: []}
    with filled(bench, count, order) as bulk:
        assert _read(bulk, ALL) == count
        for _ in bench.repeats(f"queue, {order}"):
            for columns, found in rates.items():
                began = cpu_s(bulk.pid)
                rows = _read(bulk, columns)
                found.append(rows / (cpu_s(bulk.pid) - began))
    return [
        Figure(f"bulk, {order}, {_shown(columns)}, per second of its processor time", "rows/s", found, None)
        for columns, found in rates.items()
    ]


def _read(bulk: Bulk, columns: str) -> int:
    names = [name for name in columns.split(",") if name not in ("topic", "queue")]
    rows = 0
    with flight.connect(f"grpc://{bulk.address}") as client:
        for queue_id in range(QUEUE_COUNT):
            where = {"topic": server.TOPIC, "id": queue_id}
            ticket = json.dumps({"queue": where, "start": 0, "stop": 1 << 40, "columns": names}).encode()
            rows += sum(piece.data.num_rows for piece in client.do_get(flight.Ticket(ticket), bulk.options))
    return rows


# -- Spark ------------------------------------------------------------------------------------------------------


def spark(bench: common.Bench) -> list[Figure]:
    """Messages a second from the call to its return; and what each process had of the cores meanwhile."""
    with _session() as session:
        return [figure for order in ORDERS for figure in _spark(bench, session, order)]


def _spark(bench: common.Bench, session: Any, order: str) -> list[Figure]:
    count = bench.scaled(ROW_COUNT)
    found: dict[str, list[float]] = {ALL: [], SOME: [], FEW: []}
    figures = []
    with filled(bench, count, order) as bulk:
        for columns, rates in found.items():
            frame = _frame(session, bulk, columns)
            assert frame.count() == count
            _write(frame)
            before = _cpu(bulk)
            for _ in bench.repeats(f"spark, {order}, {_shown(columns)}"):
                began = time.perf_counter()
                _write(frame)
                rates.append(count / (time.perf_counter() - began))
            spent = {name: value - before[name] for name, value in _cpu(bulk).items()}
            told = ", ".join(f"{name} {value / bench.repeat / count * 1e6:.2f} us" for name, value in spent.items())
            goal = 1_000_000.0 if columns in (ALL, SOME) else None
            figures.append(Figure(f"Spark, {order}, {_shown(columns)}", "msg/s", rates, goal, floor=told))
    return figures


def _shown(columns: str) -> str:
    return "all columns" if columns == ALL else columns.replace(",", ", ")


def _frame(session: Any, bulk: Bulk, columns: str) -> Any:
    options = {"addr": bulk.broker_address, "bulk": bulk.address, "topic": server.TOPIC, "columns": columns}
    return session.read.format("postdate").options(**options).load()


def _write(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _cpu(bulk: Bulk) -> dict[str, float]:
    """Processor time so far: of bulk, of Java, of its Python workers."""
    java = next(pid for pid in tree(os.getpid()) if "java" in Path(f"/proc/{pid}/comm").read_text())
    workers = sum(cpu_s(pid) for pid in tree(java) if pid != java)
    return {"bulk": cpu_s(bulk.pid), "Java": cpu_s(java), "its workers": workers}


@contextmanager
def _session() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings: dict[str, Any] = {
        "spark.driver.memory": "2g",
        "spark.log.level": "ERROR",
        "spark.ui.showConsoleProgress": "false",
    }
    session = SparkSession.builder.master("local[*]").config(map=settings).getOrCreate()
    postdate.spark.register(session)
    try:
        yield session
    finally:
        session.stop()


MEASURES: dict[str, Callable[[common.Bench], list[Figure]]] = {"queue": queue, "spark": spark}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when every goal was reached, 1 otherwise."""
    return common.run("topic_source", "a topic that Spark reads", common.Bench, MEASURES, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Measures lookups of a key in the table: python -m benchmarks.keys [--rows 10000 1000000] [--files 200] [--quick]

Fills a table with small messages that have two keys each, without Spark, and asks for single messages by their unique
key or their user key. Dues are spread over 30 days in every file, so that all files may hold what takes a message away:
the worst case. Then it writes rows once more, to tell what their indexes cost. Times on the clock and CPU times are
shown; on a machine that others use, too, the latter count.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.bench import say
from benchmarks.report import Lines, aligned, shown
from postdate.keys import key_hash
from postdate.message import LOOPBACK, Message, encode_properties
from postdate.storage import record as records
from postdate.table.delta import Table
from postdate.table.files import write_file
from postdate.table.find import KeyQuestion, TableReader
from postdate.table.format import MESSAGE, SCHEMA
from postdate.table.keys import encode_index, name_index

TOPIC, QUEUE = "orders", 1
NOW_MS, SPAN_MS = 1_800_000_000_000, 30 * 86_400_000
ASKED_EVERY = 97  # each row with such a number can be asked for: making all hashes would take longer than the rest
DIGITS = 12
COMMIT_FILES = 50
QUERIES, WARM_QUERIES = 400, 100


class Answered(NamedTuple):
    """What lookups took, in milliseconds."""

    clock_ms: list[float]
    cpu_ms: list[float]


class Point(NamedTuple):
    """What was measured with this many rows."""

    rows: int
    answered: Answered
    index_bytes: float  # for one message
    write_us: float  # CPU of writing a message, with its index
    index_us: float  # of that, making the index


def unique_key(number: int) -> str:
    return f"U{number:0{DIGITS}d}"


def user_key(number: int) -> str:
    return f"order-{number:0{DIGITS}d}"


def make_rows(start: int, count: int, dice: np.random.Generator) -> pa.Table:
    """Makes sorted rows of messages with these numbers. Their records are one record with other digits."""
    message = Message(TOPIC, b"x" * 64, encode_properties({"UNIQ_KEY": unique_key(0), "KEYS": user_key(0)}))
    record = records.encode(message, TOPIC.encode(), 0, NOW_MS, LOOPBACK)
    numbers = np.arange(start, start + count)
    digits = np.stack([numbers // 10**place % 10 for place in reversed(range(DIGITS))], axis=1).astype(np.uint8) + 48
    data = np.tile(np.frombuffer(record, np.uint8), (count, 1))
    for key in (unique_key(0), user_key(0)):
        at = record.index(key.encode()) + len(key) - DIGITS
        data[:, at : at + DIGITS] = digits
    offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * len(record))
    hashes = dice.integers(-(1 << 63), 1 << 63, (2, count), np.int64)
    for row in range(-start % ASKED_EVERY, count, ASKED_EVERY):
        for column, key_of in enumerate((unique_key, user_key)):
            hashes[column, row] = np.uint64(key_hash(key_of(start + row))).view(np.int64)
    columns = {
        "due": np.sort(dice.integers(NOW_MS, NOW_MS + SPAN_MS, count)), "arrival": numbers * 512,
        "unique_hash": hashes[0], "key_hash": hashes[1],
        "key": pa.array([user_key(number) for number in numbers.tolist()]),
        "record": pa.Array.from_buffers(pa.binary(), count, [None, offsets, pa.py_buffer(data)]),
    }  # fmt: skip
    same = {"kind": MESSAGE, "topic": TOPIC, "queue": QUEUE, "size": len(record), "tag": None}
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.array([same.get(field.name, 0)], field.type).take(pa.array(np.zeros(count, np.int8)))
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def fill(folder: Path, row_count: int, file_count: int, dice: np.random.Generator) -> None:
    """Fills a table. Each file has its part of the rows."""
    table = Table(str(folder / "messages"))
    edges = np.linspace(0, row_count, file_count + 1).astype(int).tolist()
    written = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        rows = make_rows(start, stop - start, dice)
        written.append(write_file(table.folder, f"hour-{number:020d}-{start:012d}.parquet", rows))
        if len(written) == COMMIT_FILES or stop == row_count:
            table.commit(written)
            written = []


def ask(folder: Path, row_count: int, query_count: int) -> Answered:
    """Asks for messages by one of their keys, after some that warm up."""
    reader, clock_ms, cpu_ms = TableReader(), list[float](), list[float]()
    for query, number in enumerate(_numbers(row_count, query_count + min(query_count, WARM_QUERIES))):
        key, by = (unique_key(number), "unique") if query % 2 else (user_key(number), "any")
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        (found,) = reader.find_key(str(folder), KeyQuestion(TOPIC, key, by, (QUEUE,))).messages
        clock_ms.append((time.perf_counter() - began_s) * 1_000)
        cpu_ms.append((time.process_time() - cpu_began_s) * 1_000)
        assert found.arrival == number * 512, f"{key} was found at {found.arrival}"
    return Answered(clock_ms[-query_count:], cpu_ms[-query_count:])


def _numbers(row_count: int, count: int) -> Iterator[int]:
    dice = np.random.default_rng(2)
    for row in dice.integers(0, (row_count + ASKED_EVERY - 1) // ASKED_EVERY, count).tolist():
        yield row * ASKED_EVERY


def write_costs(folder: Path, row_count: int, dice: np.random.Generator) -> tuple[float, float]:
    """Returns the CPU microseconds that a message costs to write with its index, and those of the index."""
    table, rows = Table(str(folder / "written")), make_rows(0, row_count, dice)
    began_s = time.process_time()
    write_file(table.folder, "soon-1.parquet", rows)
    written_s = time.process_time()
    encode_index(rows)
    indexed_s = time.process_time()
    return (written_s - began_s) / row_count * 1e6, (indexed_s - written_s) / row_count * 1e6


def measure(folder: Path, row_count: int, file_count: int, query_count: int, written_count: int) -> Point:
    dice = np.random.default_rng(1)
    say(f"{row_count:,} rows in {file_count} files")
    fill(folder, row_count, file_count, dice)
    sizes = Table(str(folder / "messages")).folder.sizes()
    index_bytes = sum(size for name, size in sizes.items() if name.startswith(name_index(""))) / row_count
    answered = ask(folder, row_count, query_count)
    costs = [write_costs(folder / str(number), written_count, dice) for number in range(3)]
    return Point(row_count, answered, index_bytes, *(min(each) for each in zip(*costs, strict=True)))


def lines(points: Sequence[Point]) -> Lines:
    heads = ("rows", "p50", "p99", "CPU p50", "CPU p99", "index per message", "CPU to write one", "its index")
    found: list[tuple[str, ...]] = [heads]
    for rows, answered, index_bytes, write_us, index_us in points:
        times = [value for each in answered for value in (statistics.median(each), float(np.percentile(each, 99)))]
        found.append(
            (
                f"{rows:,}", *(f"{shown(value)} ms" for value in times), f"{shown(index_bytes)} bytes",
                f"{shown(write_us)} us", f"{shown(index_us)} us",
            )
        )  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Lookups of a key in the table.")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="a small run, to see that it works")
    parser.add_argument("--dir", type=Path, help="where the tables are made")
    asked = parser.parse_args(arguments)
    sizes, files, queries, written = (asked.rows, asked.files, QUERIES, 250_000)
    if asked.quick:
        sizes, files, queries, written = [2_000], 4, 10, 2_000
    points = []
    for row_count in sizes:
        with tempfile.TemporaryDirectory(prefix="postdate-bench-", dir=asked.dir) as folder:
            points.append(measure(Path(folder), row_count, files, queries, written))
    print(aligned(lines(points)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

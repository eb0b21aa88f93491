"""Chunks that come in over Flight: whole and durable, or not there at all."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from postdate.bulk.schema import IN
from postdate.bulk.upload import Announced, Uploads
from postdate.clock import ManualClock
from postdate.message import LOOPBACK, Message
from postdate.storage import chunk as chunks
from postdate.storage import record as records
from postdate.storage.chunk import Chunk
from postdate.storage.disk import RealDisk
from postdate.storage.layout import CHUNK_ROW
from postdate.testing import FaultPoints, Killed
from tests.support.bulk import Client, bulking, wait_until
from tests.support.core import T0
from tests.support.server import serving

NAME = "000001-a"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    """Of a pipeline that has registered."""
    with serving(folder, ManualClock(T0)) as served, bulking(served, folder) as client:
        client.broker.register("", "")
        yield client


def record(number: int) -> bytes:
    return records.encode(Message("orders", b"x" * (number % 50)), b"orders", number, T0, LOOPBACK)


def batch(*rows: tuple[int, int], size_of: int = 0) -> pa.RecordBatch:
    """Rows of (due, arrival); everything else follows from the arrival."""
    arrivals = [arrival for _, arrival in rows]
    columns = {
        "due": [due for due, _ in rows], "arrival": arrivals, "queue": [number % 8 for number in arrivals],
        "tag_hash": [-number for number in arrivals], "flags": [number % 2 for number in arrivals],
        "unique_hash": [-(1 << 62) - number for number in arrivals], "key_hash": arrivals,
        "record": [record(number) + b"x" * size_of for number in arrivals],
    }  # fmt: skip
    return pa.RecordBatch.from_pydict(columns, IN)


def names(folder: Path) -> list[str]:
    return RealDisk(folder).list("chunks")


def test_a_chunk_comes_in_batch_by_batch_and_is_whole(client: Client, folder: Path) -> None:
    batches = [batch(*[(n // 3, n) for n in range(start, start + 500)]) for start in (0, 500, 1_000)]
    size = sum(len(record(n)) for n in range(1_500))
    assert client.put(NAME, [batches[0], batch(), batches[1].slice(0, 1), batches[1].slice(1), batches[2]]) == {
        "name": NAME, "rows": 1_500, "bytes": size,
    }  # fmt: skip
    chunk = Chunk(RealDisk(folder), NAME)
    chunk.verify()
    assert names(folder) == [NAME]
    assert (chunk.head.row_count, chunk.head.due_low_ms, chunk.head.due_high_ms) == (1_500, 0, 499)
    index = chunk.index
    assert index["arrival"].tolist() == list(range(1_500))
    assert index["queue"].tolist() == [n % 8 for n in range(1_500)]
    assert index["flags"].tolist() == [n % 2 for n in range(1_500)]
    assert index["tag_hash"].tolist() == [-n for n in range(1_500)]
    assert index["unique_hash"].tolist() == [(1 << 64) - (1 << 62) - n for n in range(1_500)]
    assert [chunk.read(int(row["position"]), int(row["size"])) for row in index] == [record(n) for n in range(1_500)]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_the_bytes_of_a_chunk_need_not_be_known_before(client: Client, folder: Path, rows: int) -> None:
    writer, answers = client.writer(NAME, rows, None)
    writer.write_batch(batch((5, 1), (5, 2)))
    writer.done_writing()
    if rows == 2:
        assert json.loads(answers.read().to_pybytes()) == {"name": NAME, "rows": 2, "bytes": 197}
        writer.close()
        Chunk(RealDisk(folder), NAME).verify()
    else:
        with pytest.raises(flight.FlightServerError, match=f"2 rows and 197 bytes .*, {rows} and 197 were announced"):
            writer.close()
        assert names(folder) == []


def test_an_empty_chunk_is_a_chunk(client: Client, folder: Path) -> None:
    assert client.put(NAME, []) == {"name": NAME, "rows": 0, "bytes": 0}
    Chunk(RealDisk(folder), NAME).verify()


def test_a_chunk_is_the_same_whether_it_comes_whole_or_in_pieces(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path)
    index = np.zeros(100, CHUNK_ROW)
    index["due"] = index["arrival"] = np.arange(100)
    index["size"], index["position"] = 3, np.arange(100) * 3
    data = bytes(range(150)) * 2
    chunks.write(disk, "whole", index, data)
    writer = chunks.Writer(disk, "pieces", 100)
    for start in range(0, 100, 7):
        writer.add(index[start : start + 7], data[start * 3 : (start + 7) * 3])
    writer.finish()
    assert (tmp_path / "chunks" / "whole").read_bytes() == (tmp_path / "chunks" / "pieces").read_bytes()


NULL_RECORD = pa.RecordBatch.from_pylist([batch((1, 1)).to_pylist()[0] | {"record": None}], IN)


@pytest.mark.parametrize(
    ("batches", "rows", "size", "said"),
    [
        ([batch((5, 2), (5, 1))], -1, -1, r"row 1 is not in \(due, arrival\) order"),
        ([batch((5, 1), (6, 1)), batch((5, 3))], -1, -1, r"row 2 is not in \(due, arrival\) order"),
        ([batch((5, 3)), batch((5, 2))], -1, -1, r"row 1 is not in \(due, arrival\) order"),
        ([batch((5, 1), (5, 2))], 3, -1, "2 rows and .* bytes came, 3 and"),
        ([batch((5, 1), (5, 2))], 1, -1, "2 rows and .* bytes came, 1 and"),
        ([batch((5, 1))], -1, 200, "1 rows and 98 bytes came, 1 and 200 were announced"),
        ([batch((5, 1))], -1, 10, "1 rows and 98 bytes came, 1 and 10 were announced"),
        ([batch((5, 1), size_of=1)], -1, -1, "chunk 000001-a, after row 0: no record of 99 bytes stands at byte 0"),
        ([NULL_RECORD], 1, 0, "column record has a null"),
        ([batch((5, 1)).drop_columns(["flags"])], -1, -1, "the columns are due int64, .* expected due int64"),
    ],
)  # fmt: skip
def test_nonsense_leaves_no_file(
    client: Client, folder: Path, batches: list[pa.RecordBatch], rows: int, size: int, said: str
) -> None:
    with pytest.raises(flight.FlightServerError, match=said):
        client.put(NAME, batches, rows, size)
    assert names(folder) == []
    client.put(NAME, [batch((1, 1))])
    assert names(folder) == [NAME]


@pytest.mark.parametrize(
    "name", ["a", "000001", "000001-", "00001-a", "000001-a/b", "000001-../x", "000001-a.new", "000001-" + "x" * 200]
)
def test_a_name_that_is_none_is_refused(client: Client, name: str) -> None:
    with pytest.raises(flight.FlightServerError, match=r"chunk name .* expected six digits of the epoch"):
        client.put(name, [batch((1, 1))])


@pytest.mark.parametrize(
    "descriptor",
    [flight.FlightDescriptor.for_command(b"x"), flight.FlightDescriptor.for_command(b"[]"),
     flight.FlightDescriptor.for_command(b'{"name": "000001-a", "bytes": 1}'),
     flight.FlightDescriptor.for_path("chunk")],
)  # fmt: skip
def test_a_chunk_that_is_not_announced_is_refused(client: Client, descriptor: flight.FlightDescriptor) -> None:
    writer, _ = client.flight.do_put(descriptor, IN)
    with pytest.raises(flight.FlightServerError, match="expected JSON with name and rows"):
        writer.close()


def test_a_name_is_used_once(client: Client, folder: Path) -> None:
    client.put(NAME, [batch((1, 1))])
    before = (folder / "chunks" / NAME).read_bytes()
    with pytest.raises(flight.FlightServerError, match="exists already"):
        client.put(NAME, [batch((2, 2))])
    assert (folder / "chunks" / NAME).read_bytes() == before


def test_two_uploads_of_one_name_do_not_meet(client: Client, folder: Path) -> None:
    writer, answers = client.writer(NAME, 1, 98)
    writer.write_batch(batch((5, 1)))
    wait_until(lambda: names(folder) == [NAME + ".new"])
    with pytest.raises(flight.FlightServerError, match="exists already"):
        client.put(NAME, [batch((2, 2))])
    writer.done_writing()
    answers.read()
    writer.close()
    assert Chunk(RealDisk(folder), NAME).index["due"].tolist() == [5]


DYING = """
import json, os, sys, pyarrow as pa, pyarrow.flight as flight
client = flight.connect(f"grpc://127.0.0.1:{sys.argv[1]}")
batch = pa.ipc.open_stream(sys.stdin.buffer.read()).read_all().to_batches()[0]
said = json.dumps({"name": "000001-dead", "rows": 1_000_000, "bytes": 1 << 40})
writer, _ = client.do_put(flight.FlightDescriptor.for_command(said), batch.schema)
for _ in range(200):
    writer.write_batch(batch)
os.write(1, b"written")
os.kill(os.getpid(), 9)
"""


def test_a_peer_that_dies_leaves_no_file(folder: Path) -> None:
    with serving(folder, ManualClock(T0)) as served, bulking(served, folder) as client:
        client.broker.register("", "")
        rows = batch(*[(5, 7)] * 2_000)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_batch(rows)
        ended = subprocess.run(
            [sys.executable, "-c", DYING, str(client.port)], input=sink.getvalue().to_pybytes(), capture_output=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stdout) == (-9, b"written"), ended.stderr
        wait_until(lambda: names(folder) == [])


@pytest.mark.parametrize("point", ["chunk.write", "chunk.add", "chunk.synced"])
def test_what_a_crash_leaves_is_removed_at_the_next_start(tmp_path: Path, point: str) -> None:
    disk = RealDisk(tmp_path)
    Uploads(disk)
    index = np.zeros(1, CHUNK_ROW)
    index["size"] = 3
    with FaultPoints(kill_at=(point, 0)), pytest.raises(Killed):
        chunks.write(disk, NAME, index, b"abc")
    assert disk.list("chunks") in ([], [NAME + ".new"])
    Uploads(RealDisk(tmp_path))
    assert disk.list("chunks") == []


def test_a_chunk_has_its_name_only_when_it_is_synced(tmp_path: Path) -> None:
    calls: list[str] = []

    class Watched(RealDisk):
        def sync(self, path: str) -> None:
            calls.append(f"sync {path}")
            super().sync(path)

        def rename(self, source: str, target: str) -> None:
            calls.append(f"rename {source}")
            super().rename(source, target)

        def sync_folder(self, folder: str) -> None:
            calls.append(f"sync folder {folder}")
            super().sync_folder(folder)

    with Uploads(Watched(tmp_path)).receive(Announced(NAME, 1, len(record(1)))) as upload:
        upload.add(batch((1, 1)))
        assert calls == []
        upload.finish()
    assert calls == [f"sync chunks/{NAME}.new", f"rename chunks/{NAME}.new", "sync folder chunks"]


def test_a_full_disk_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    class Full(RealDisk):
        def sync(self, path: str) -> None:
            raise OSError(28, os.strerror(28), path)

    with serving(tmp_path / "data", ManualClock(T0)) as served:
        with bulking(served, tmp_path / "data", Full(tmp_path / "data")) as client:
            client.broker.register("", "")
            with pytest.raises(flight.FlightServerError, match="No space left on device"):
                client.put(NAME, [batch((1, 1))])
        assert names(tmp_path / "data") == []

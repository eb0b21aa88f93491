"""Bulk beside a real server, in this process, and a client that speaks to both."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from postdate.bulk.process import Bulk
from postdate.bulk.schema import IN
from postdate.client.address import Address
from postdate.spark.executor.broker_client import BrokerClient
from postdate.storage.disk import Disk
from tests.support.server import WAIT_S, Served


class Client:
    """What a pipeline does: it speaks Flight to bulk, and remoting to the broker."""

    def __init__(self, port: int, broker_port: int) -> None:
        self.port = port
        self.flight = flight.connect(f"grpc://127.0.0.1:{port}")
        self.broker = BrokerClient(f"127.0.0.1:{broker_port}", f"127.0.0.1:{port}")

    def reader(self, queue: Any, start: int, stop: int, **more: int) -> flight.FlightStreamReader:
        ticket = {"queue": queue, "start": start, "stop": stop, **more}
        return self.flight.do_get(flight.Ticket(json.dumps(ticket).encode()))

    def read(self, queue: Any = "far", start: int = 0, stop: int = 1 << 40, **more: int) -> pa.Table:
        return self.reader(queue, start, stop, **more).read_all()

    def read_topic(self, topic: str, queue_id: int = 0, start: int = 0, stop: int = 1 << 40) -> pa.Table:
        return self.read({"topic": topic, "id": queue_id}, start, stop)

    def writer(self, name: str, rows: int, size: int | None, schema: pa.Schema = IN) -> tuple[Any, Any]:
        said = json.dumps({"name": name, "rows": rows, "bytes": size})
        writer, answers = self.flight.do_put(flight.FlightDescriptor.for_command(said), schema)
        return writer, answers

    def put(self, name: str, batches: Sequence[pa.RecordBatch], rows: int = -1, size: int = -1) -> dict[str, Any]:
        """Uploads a chunk; rows and bytes are announced as they are, or as told."""
        records = [record or b"" for batch in batches for record in batch.column("record").to_pylist()]
        schema = batches[0].schema if batches else IN
        writer, answers = self.writer(
            name, len(records) if rows < 0 else rows, sum(map(len, records)) if size < 0 else size, schema
        )
        with writer:
            for batch in batches:
                writer.write_batch(batch)
            writer.done_writing()
            answer: dict[str, Any] = json.loads(answers.read().to_pybytes())
        return answer

    def close(self) -> None:
        self.flight.close()


@contextmanager
def bulking(served: Served, folder: Path, disk: Disk | None = None, **bounds: Any) -> Iterator[Client]:
    """Bulk on a server's folder."""
    bulk = Bulk(folder, Address("127.0.0.1", served.port), "127.0.0.1", 0, disk, **bounds)
    client = Client(bulk.address.port, served.port)
    try:
        yield client
    finally:
        client.close()
        bulk.close()


def chunk_batch(far: pa.Table) -> pa.RecordBatch:
    """Far rows as the sorted batch of a chunk."""
    flags = pa.array([0] * far.num_rows, pa.int32())
    rows = far.append_column("flags", flags).select(IN.names).sort_by([("due", "ascending"), ("arrival", "ascending")])
    return rows.combine_chunks().to_batches()[0].cast(IN)


def wait_until(is_so: Callable[[], bool], limit_s: float = WAIT_S) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.01)

"""The way to bulk: rows out, chunks and selections in, over Arrow Flight. Control goes through broker_client.py."""

import contextlib
import json
from base64 import b64decode
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import flight

from postdate.errors import PostdateError
from postdate.table.format import CHUNK_SCHEMA, SELECTED

_PROBE_S = 30.0
_MOVE_S = 300.0  # a range or a chunk


class Uploaded(NamedTuple):
    name: str
    rows: int
    bytes: int


class BulkClient:
    """A connection to bulk. Raises pyarrow's FlightError where it is away."""

    def __init__(self, place: str) -> None:
        """`place` is where bulk listens and, after spaces, the permit for it and the certificates of the authorities
        that its own must come from, as BrokerClient tells.
        """
        address, permit, authorities, *_ = [*place.split(" "), "", ""]
        self._headers = [(b"authorization", f"Bearer {permit}".encode())] if permit else []
        kind, _, rest = address.partition(":")
        location = {"unix": f"grpc+unix://{rest}", "tls": f"grpc+tls://{rest}"}.get(kind, f"grpc://{address}")
        trusted = b64decode(authorities) if authorities else None
        self._client = flight.connect(location, tls_root_certs=trusted)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "BulkClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _options(self, timeout: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout, headers=self._headers)

    def probe(self) -> None:
        """Asks for no row at all. Raises FlightError where bulk or its broker does not answer."""
        ticket = {"queue": "far", "start": 0, "stop": 0}
        for _ in self._get(ticket, _PROBE_S):
            pass

    # -- rows ---------------------------------------------------------------------------------------------------

    def far(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The far rows start..stop-1 with their records; without those whose record is gone."""
        return self._get({"queue": "far", "start": start, "stop": stop})

    def near(self) -> Iterator[pa.RecordBatch]:
        """What waits in the wheel."""
        return self._get({"queue": "near"})

    def queue(self, where: dict[str, Any], start: int, stop: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """What is visible in a topic's queue, by topic, id and number, from one offset to before another."""
        return self._get({"queue": where, "start": start, "stop": stop, "columns": columns})

    def _get(self, ticket: dict[str, Any], timeout: float = _MOVE_S) -> Iterator[pa.RecordBatch]:
        asked = flight.Ticket(json.dumps(ticket).encode())
        for piece in self._client.do_get(asked, self._options(timeout)):
            yield piece.data

    def selection(self, name: str) -> pa.Table:
        """Rows that a job has selected."""
        return pa.Table.from_batches(self._get({"selection": name}), SELECTED)

    def select(self, name: str, rows: pa.Table) -> None:
        """Writes sorted rows that a job has selected; on disk when it returns."""
        descriptor = flight.FlightDescriptor.for_command(json.dumps({"selection": name}).encode())
        writer, reader = self._client.do_put(descriptor, SELECTED, self._options(_MOVE_S))
        with writer:
            writer.write_table(rows, max_chunksize=65_536)
            writer.done_writing()
            reader.read()

    def upload(self, name: str, row_count: int, pieces: Iterable[pa.Table]) -> Uploaded:
        """Writes sorted rows, this many, as a chunk; on disk when it returns. Raises what making a piece raises."""
        command = json.dumps({"name": name, "rows": row_count}).encode()
        writer, reader = self._client.do_put(
            flight.FlightDescriptor.for_command(command), CHUNK_SCHEMA, self._options(_MOVE_S)
        )
        with contextlib.ExitStack() as closing:
            closing.enter_context(writer)
            try:
                for piece in pieces:
                    writer.write_table(piece, max_chunksize=16_384)
            except PostdateError:
                closing.pop_all()  # what the broker says of a chunk that ends early would take its place
                with contextlib.suppress(flight.FlightError):
                    writer.close()
                raise
            writer.done_writing()
            answer = json.loads(reader.read().to_pybytes())
        return Uploaded(answer["name"], answer["rows"], answer["bytes"])

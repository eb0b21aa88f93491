"""The way to the broker: its bulk port, spoken to by driver and executors over Arrow Flight."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import flight

from postdate.errors import PostdateError, Refused
from postdate.table.format import CHUNK_SCHEMA, SELECTED

_CALL_S = 30.0  # a state, a registration, a stage
_MOVE_S = 300.0  # a range or a chunk


class Uploaded(NamedTuple):
    name: str
    rows: int
    bytes: int


class Gate:
    """A connection to bulk. Raises pyarrow's FlightError where it is away."""

    def __init__(self, address: str) -> None:
        self._client = flight.connect(f"grpc://{address}")

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- calls --------------------------------------------------------------------------------------------------

    def _call(self, name: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        action = flight.Action(name, json.dumps(body or {}).encode())
        (result,) = self._client.do_action(action, flight.FlightCallOptions(timeout=_CALL_S))
        answer: dict[str, Any] = json.loads(result.body.to_pybytes())
        return answer

    def state(self, *, start: int = 0, rows_max: int = 0, bytes_max: int = 0) -> dict[str, Any]:
        """Where the broker is. With a start, `stop` says how far a batch of so many rows and bytes would go."""
        return self._call("state", {"start": start, "rows_max": rows_max, "bytes_max": bytes_max} if rows_max else None)

    def register(self, table: str, master: str) -> dict[str, Any]:
        return self._call("register", {"table": table, "master": master})

    def stage(self, body: dict[str, Any]) -> None:
        """Raises Refused where the broker is elsewhere, or another pipeline has registered."""
        answer = self._call("stage", body)
        if not answer.get("accepted"):
            raise Refused(answer.get("refused", "the stage is refused"))

    def report(self, body: dict[str, Any]) -> None:
        self._call("report", body)

    def topic(self, name: str, at_ms: int = -1) -> list[list[int]]:
        """How far each queue goes: [id, number, first offset, next offset, first one visible since an instant]."""
        queues: list[list[int]] = self._call("topic", {"topic": name, "at": at_ms})["queues"]
        return queues

    # -- jobs ---------------------------------------------------------------------------------------------------

    def begin(self, job: dict[str, Any]) -> dict[str, Any]:
        """Begins a job, or finds it by its id. Raises Refused."""
        return self._job("begin", job)

    def adopt(self, job_id: str, files: list[list[Any]], bad: int) -> dict[str, Any]:
        """Has the pipeline take files that lie beside the table into it. Raises Refused."""
        return self._job("adopt", {"id": job_id, "files": files, "bad": bad})

    def fail(self, job_id: str, reason: str) -> dict[str, Any]:
        """Ends a job that changes nothing. Raises Refused."""
        return self._job("fail", {"id": job_id, "reason": reason})

    def progress(self, job_id: str, step: str, done: int, total: int) -> None:
        """For people who look."""
        self._job("progress", {"id": job_id, "step": step, "done": done, "total": total})

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs that are known."""
        return list(self._job("list", {})["jobs"])

    def command(self, number: int) -> dict[str, Any]:
        """All that is known of a job, for whoever carries it out."""
        return self._job("command", {"number": number})

    def decide(self, epoch: int, number: int, parts: list[tuple[str, int]], files: list[list[Any]]) -> dict[str, Any]:
        """Tells what a job has selected; the answer says what of it still waited. Raises Refused."""
        return self._job("decide", {"epoch": epoch, "number": number, "parts": parts, "files": files})

    def job(self, job_id: str) -> dict[str, Any]:
        """Where a job is. Raises Refused for an id that nobody knows."""
        return self._job("find", {"id": job_id})

    def _job(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._call("job", {"call": call, **body})
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

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

    def _get(self, ticket: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        asked = flight.Ticket(json.dumps(ticket).encode())
        for piece in self._client.do_get(asked, flight.FlightCallOptions(timeout=_MOVE_S)):
            yield piece.data

    def selection(self, name: str) -> pa.Table:
        """Rows that a job has selected."""
        return pa.Table.from_batches(self._get({"selection": name}), SELECTED)

    def select(self, name: str, rows: pa.Table) -> None:
        """Writes sorted rows that a job has selected; on disk when it returns."""
        descriptor = flight.FlightDescriptor.for_command(json.dumps({"selection": name}).encode())
        writer, reader = self._client.do_put(descriptor, SELECTED, flight.FlightCallOptions(timeout=_MOVE_S))
        with writer:
            writer.write_table(rows, max_chunksize=65_536)
            writer.done_writing()
            reader.read()

    def upload(self, name: str, row_count: int, pieces: Iterable[pa.Table]) -> Uploaded:
        """Writes so many sorted rows as a chunk; on disk when it returns. Raises what making a piece raises."""
        command = json.dumps({"name": name, "rows": row_count}).encode()
        writer, reader = self._client.do_put(
            flight.FlightDescriptor.for_command(command), CHUNK_SCHEMA, flight.FlightCallOptions(timeout=_MOVE_S)
        )
        with writer:
            try:
                for piece in pieces:
                    writer.write_table(piece, max_chunksize=16_384)
            except PostdateError:
                with contextlib.suppress(flight.FlightError):
                    writer.close()  # here, or what the broker says of a chunk that ends early would take its place
                raise
            writer.done_writing()
            answer = json.loads(reader.read().to_pybytes())
        return Uploaded(answer["name"], answer["rows"], answer["bytes"])

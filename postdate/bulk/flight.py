"""The doors of bulk: Arrow Flight's actions, do_get and do_put. docs/bulk.md is the contract.

    action state | register | stage | report | job      JSON in, JSON out
    action topic  {"topic", "at"}, how far each of its queues goes
    do_get   {"queue": "near"}, what waits in the wheel
    do_get   {"queue": "far", "start", "stop", "due_min", "due_max"}
    do_get   {"queue": {"topic", "id", "number"}, "start", "stop", "columns"}
    do_get   {"selection": name}, rows that a job has selected
    do_put   the command {"name", "rows"}, then sorted batches of a chunk
    do_put   the command {"selection": name}, then sorted rows that a job has selected

Flight calls from threads of its own, one per call. Each error becomes a sentence: FlightUnavailableError where a later
try may pass, FlightServerError where it will not.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.flight as flight

from postdate.bulk.broker_link import Link
from postdate.bulk.maps import Maps
from postdate.bulk.rows import Queue, QueueRows, RowsMissing
from postdate.bulk.schema import OF_TOPIC, OUT
from postdate.bulk.streams import DueRange, far_batches, near_batches, topic_batches
from postdate.bulk.upload import Selections, Uploads, epoch_of, parse_announcement, selection_name
from postdate.client.errors import TimedOut, Unavailable, Unreachable
from postdate.errors import FlowControl, PostdateError, Refused, UsageError
from postdate.storage.disk import Disk
from postdate.storage.folder import read_format
from postdate.table.format import SELECTED

STREAMS_MAX = 64  # reads and uploads at once; each may hold three batches of 8 MB
_AWAY = (Unreachable, TimedOut, Unavailable, FlowControl, RowsMissing)


class Wanted(NamedTuple):
    """What a ticket asks for."""

    queue: Queue
    start: int
    stop: int
    due: DueRange
    number: int | None = None  # of the queue, where only that one will do
    columns: tuple[str, ...] = tuple(OUT.names)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([OF_TOPIC.field(name) for name in self.columns])


def wanted(ticket: bytes) -> Wanted | None:
    """None stands for what waits in the wheel. Raises UsageError."""
    try:
        said: dict[str, Any] = orjson.loads(ticket)
        named = said["queue"]
        if named == "near":
            return None
        queue = Queue() if named == "far" else Queue(_topic(named["topic"]), int(named["id"]))
        low, high = (said.get(name, default) for name, default in zip(("due_min", "due_max"), DueRange(), strict=True))
        found = Wanted(queue, int(said["start"]), int(said["stop"]), DueRange(int(low), int(high)))
        if queue.topic:
            number, columns = named.get("number"), said.get("columns", OUT.names)
            found = found._replace(number=None if number is None else int(number), columns=_columns(columns))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the ticket is {ticket[:200]!r}, expected JSON with queue, start and stop") from error
    if found.start < 0:
        raise UsageError(f"the ticket asks for rows from {found.start} on, expected 0 or more")
    return found


class BatchSize(NamedTuple):
    """How large a batch of far rows should be: from a row on, so many rows and bytes of the log at most."""

    start: int
    rows_max: int
    bytes_max: int


def batch_size(wish: bytes) -> BatchSize | None:
    """What is asked about beside the state, if anything is. Raises UsageError."""
    try:
        said: dict[str, Any] = orjson.loads(wish or b"null") or {}
        return BatchSize(*(int(said[name]) for name in BatchSize._fields)) if said else None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"state is asked with {wish[:200]!r}, expected start, rows_max and bytes_max") from error


def _columns(names: Any) -> tuple[str, ...]:
    """Raises UsageError for one that is not there."""
    unknown = [name for name in names if name not in OF_TOPIC.names]
    if unknown or not names:
        raise UsageError(f"the ticket asks for columns {names!r:.200}, expected some of {', '.join(OF_TOPIC.names)}")
    return tuple(names)


def _topic(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError("a topic's name is text that is not empty")
    return name


class BulkServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Serves from its construction on."""

    def __init__(self, host: str, port: int, disk: Disk, folder: Path, link: Link) -> None:
        self._folder = folder
        self._link = link
        self._segment_bytes = read_format(disk)["segment_bytes"]
        self._maps = Maps(folder)
        self._uploads = Uploads(disk)
        self._selections = Selections(disk)
        self._streams = threading.Semaphore(STREAMS_MAX)
        self._actions: dict[str, Callable[[bytes], dict[str, Any]]] = {
            "state": self._state, "register": self._register, "stage": self._stage, "report": self._report,
            "job": self._job,
            "topic": self._topic,
        }  # fmt: skip
        super().__init__(f"grpc://{f'[{host}]' if ':' in host else host}:{port}")

    # -- actions ------------------------------------------------------------------------------------------------

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:  # noqa: ARG002
        return [
            ("state", "where broker and pipeline are, as JSON; how far a batch of start, rows_max and bytes_max goes"),
            ("register", "JSON table and master: a pipeline begins and gets an epoch"),
            ("stage", "JSON epoch, far, horizon, chunks, rows_in, rows_out: takes chunks into the wheel"),
            ("report", "JSON, free fields: what a batch has done"),
            ("job", "JSON call, and what it needs: begins, finds, decides or ends work in bulk"),
            ("topic", "JSON topic and at, an instant: how far each of its queues goes"),
        ]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[bytes]:  # noqa: ARG002
        with _told():
            act = self._actions.get(action.type)
            if act is None:
                raise UsageError(f"there is no action {action.type[:64]!r}, but {', '.join(self._actions)}")
            yield orjson.dumps(act(action.body.to_pybytes()))

    def _state(self, wish: bytes) -> dict[str, Any]:
        """Where the broker is; where a batch is asked about, `stop` says how far it would go."""
        state, size = self._link.state(), batch_size(wish)
        if size is not None:
            start = max(size.start, state["taken"], state["far_first"])
            state["stop"] = self._stop(start, min(state["far_length"], start + size.rows_max), size.bytes_max)
        return state

    def _stop(self, start: int, stop: int, bytes_max: int) -> int:
        """At most `stop`, and such that the far rows from `start` on take some bytes of the log and not many more."""
        if stop - start <= 1:
            return max(start, stop)
        first = self._arrival(start)
        while stop - start > 1 and self._arrival(stop - 1) - first > bytes_max:
            stop = start + (stop - start) // 2
        return stop

    def _arrival(self, number: int) -> int:
        for block in QueueRows(self._folder, self._link, Queue(), number, number + 1).blocks():
            return int(block.rows["arrival"][0])
        raise RowsMissing(f"far row {number} has just been removed: try again")

    def _register(self, wish: bytes) -> dict[str, Any]:
        answer = self._link.register(wish)
        self._uploads.remove_older(int(answer["epoch"]), set(answer["staged"]))
        return answer

    def _stage(self, wish: bytes) -> dict[str, Any]:
        try:
            self._link.stage(wish)
        except _AWAY:
            raise
        except PostdateError as error:
            return {"refused": str(error)}
        return {"accepted": True}

    def _report(self, report: bytes) -> dict[str, Any]:
        self._link.report(report)
        return {}

    def _job(self, wish: bytes) -> dict[str, Any]:
        try:
            return self._link.job(wish)
        except _AWAY:
            raise
        except PostdateError as error:
            return {"refused": str(error)}

    def _topic(self, wish: bytes) -> dict[str, Any]:
        try:
            said: dict[str, Any] = orjson.loads(wish)
            name, at_ms = _topic(said["topic"]), int(said.get("at", -1))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"a topic is asked for with {wish[:200]!r}, expected JSON with topic and at") from error
        return {"queues": self._link.topic(name, at_ms)}

    # -- out ----------------------------------------------------------------------------------------------------

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:  # noqa: ARG002
        with _told():
            name = selection_name(ticket.ticket)
            if name:
                return flight.GeneratorStream(SELECTED, self._selections.read(name))
            asked = wanted(ticket.ticket)
            if asked is None:
                return flight.GeneratorStream(OUT, self._near())
            rows = QueueRows(self._folder, self._link, asked.queue, asked.start, asked.stop)
            if asked.number not in (None, rows.number):
                raise Refused(f"{asked.queue} is another one now: the topic was deleted and made again")
        return flight.GeneratorStream(asked.schema, self._stream(asked, rows))

    def _near(self) -> Iterator[pa.RecordBatch]:
        with _told(), self._slot():
            yield from near_batches(self._link, self._maps, self._segment_bytes)

    def _stream(self, asked: Wanted, rows: QueueRows) -> Iterator[pa.RecordBatch]:
        with _told(), self._slot():
            if asked.queue.topic:
                yield from topic_batches(rows, self._maps, self._segment_bytes, self._link, asked.columns)
            else:
                yield from far_batches(rows, self._maps, self._segment_bytes, asked.due)

    # -- in -----------------------------------------------------------------------------------------------------

    def do_put(
        self,
        context: flight.ServerCallContext,  # noqa: ARG002
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with _told(), self._slot():
            name = selection_name(descriptor.command or b"")
            if name:
                rows = self._selections.write(name, [piece.data for piece in reader])
                writer.write(pa.py_buffer(orjson.dumps({"rows": rows})))
                return
            chunk = parse_announcement(descriptor.command or b"")
            self._refuse_old(chunk.name)
            with self._uploads.receive(chunk) as upload:
                for piece in reader:
                    upload.add(piece.data)
                whole = upload.finish()
            writer.write(pa.py_buffer(orjson.dumps(whole._asdict())))

    def _refuse_old(self, name: str) -> None:
        """A pipeline that was overtaken is told now, not when it stages."""
        epoch = int(self._link.state()["epoch"])
        if epoch_of(name) != epoch:
            raise Refused(f"chunk {name} is not of epoch {epoch}: another pipeline has registered")

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._streams.acquire(blocking=False):
            raise FlowControl(f"{STREAMS_MAX} reads and uploads run, the limit; try later")
        try:
            yield
        finally:
            self._streams.release()


@contextmanager
def _told() -> Iterator[None]:
    """Turns our errors into Flight's."""
    try:
        yield
    except _AWAY as error:
        raise flight.FlightUnavailableError(str(error)) from error
    except (PostdateError, OSError) as error:
        raise flight.FlightServerError(str(error)) from error

"""The Flight server of bulk: rows out, chunks and selections in. docs/bulk.md is the contract.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import orjson
import pyarrow as pa
import pyarrow.flight as flight

from postdate.access.permits import Permit, read_permit
from postdate.bulk.broker_link import Link
from postdate.bulk.maps import Maps
from postdate.bulk.rows import Queue, QueueRows, RowsMissing
from postdate.bulk.schema import OF_TOPIC, OUT
from postdate.bulk.streams import BatchBounds, DueRange, far_batches, near_batches, topic_batches
from postdate.bulk.upload import Selections, Uploads, parse_announcement, selection_name
from postdate.client.errors import TimedOut, Unavailable, Unreachable
from postdate.clock import SystemClock
from postdate.errors import DiskFull, FlowControl, PostdateError, Refused, UsageError
from postdate.storage.chunk import epoch_of
from postdate.storage.disk import Disk
from postdate.storage.folder import read_format
from postdate.table.format import SELECTED

STREAMS_MAX = 64  # reads and uploads at once; each may hold three batches of 8 MB
UNSTAGED_MAX = 4_096  # chunks of one epoch; a stage names 256 at most
RESERVED_SEGMENTS = 2  # of the log, which chunks leave free on the disk
NO_ACTIONS = (
    "bulk has no actions: a pipeline asks the broker itself; run one of the broker's own version, with: "
    "postdate pipeline --addr HOST:PORT"
)
_PERMIT, _BEARER = "permit", "Bearer "
_AWAY = (Unreachable, TimedOut, Unavailable, FlowControl, RowsMissing)


class RowsAsked(NamedTuple):
    """Rows that a ticket asks for."""

    queue: Queue
    start: int
    stop: int
    due: DueRange
    number: int | None = None  # of the queue, where only that one will do
    columns: tuple[str, ...] = tuple(OUT.names)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([OF_TOPIC.field(name) for name in self.columns])


def read_ticket(ticket: bytes) -> RowsAsked | None:
    """Reads a ticket; None stands for what waits in the wheel. Raises UsageError."""
    try:
        asked: dict[str, Any] = orjson.loads(ticket)
        named = asked["queue"]
        if named == "near":
            return None
        queue = Queue()
        if named != "far":
            queue = Queue(named["topic"], int(named["id"]))
            if not isinstance(queue.topic, str) or not queue.topic:
                raise ValueError("a topic's name is text that is not empty")
        low, high = (asked.get(name, default) for name, default in zip(("due_min", "due_max"), DueRange(), strict=True))
        found = RowsAsked(queue, int(asked["start"]), int(asked["stop"]), DueRange(int(low), int(high)))
        if queue.topic:
            number, columns = named.get("number"), asked.get("columns", OUT.names)
            if any(name not in OF_TOPIC.names for name in columns) or not columns:
                known = ", ".join(OF_TOPIC.names)
                raise UsageError(f"the ticket asks for columns {columns!r:.200}, expected some of {known}")
            found = found._replace(number=None if number is None else int(number), columns=tuple(columns))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the ticket is {ticket[:200]!r}, expected JSON with queue, start and stop") from error
    if found.start < 0:
        raise UsageError(f"the ticket asks for rows from {found.start} on, expected 0 or more")
    return found


class BulkServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Serves rows, and takes chunks and selections, from its construction on."""

    def __init__(
        self, host: str, port: int, disk: Disk, folder: Path, link: Link, bounds: BatchBounds, streams_max: int,
        token: str = "", certificate: tuple[bytes, bytes] | None = None, socket: Path | None = None,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._disk = disk
        self._link = link
        self._segment_bytes = read_format(disk)["segment_bytes"]
        self._maps = Maps(folder)
        self.uploads = Uploads(disk)
        self._selections = Selections(disk)
        self._bounds = bounds
        self._streams_max = streams_max
        self._streams = threading.Semaphore(streams_max)
        self._epoch = 0  # the last one whose pipeline has uploaded a chunk
        self._epoch_lock = threading.Lock()
        # Without the token of a folder, as in a broker of a test's own, nobody can make a permit, and nobody needs one.
        self._asks_permit = bool(token)
        middleware = {_PERMIT: _Permits(token)} if token else None
        place = f"{f'[{host}]' if ':' in host else host}:{port}"
        location = f"grpc+unix://{socket}" if socket else f"grpc+tls://{place}" if certificate else f"grpc://{place}"
        certificates = [certificate] if certificate else None
        super().__init__(location, middleware=middleware, tls_certificates=certificates)

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:  # noqa: ARG002
        return []

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> NoReturn:  # noqa: ARG002
        """Refuses a pipeline of an older version, which asked here for what the broker now answers itself."""
        raise flight.FlightServerError(NO_ACTIONS)

    def _require(self, context: flight.ServerCallContext, topic: str = "") -> None:
        """Raises FlightUnauthorizedError for a permit that is not good for a topic, or for everything."""
        if self._asks_permit and not _permit_of(context).may_read(topic):
            what = f"topic {topic}" if topic else "what waits"
            raise flight.FlightUnauthorizedError(f"the permit is not good for {what}, but for another topic alone")

    # -- out ----------------------------------------------------------------------------------------------------

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> flight.GeneratorStream:
        with _flight_errors():
            name = selection_name(ticket.ticket)
            if name:
                self._require(context)
                return flight.GeneratorStream(SELECTED, self._selections.read(name))
            asked = read_ticket(ticket.ticket)
            self._require(context, asked.queue.topic if asked else "")
            if asked is None:
                return flight.GeneratorStream(OUT, self._stream(None, None))
            rows = QueueRows(self._folder, self._link, asked.queue, asked.start, asked.stop)
            if asked.number not in (None, rows.number):
                raise Refused(f"{asked.queue} is another one now: the topic was deleted and made again")
        return flight.GeneratorStream(asked.schema, self._stream(asked, rows))

    def _stream(self, asked: RowsAsked | None, rows: QueueRows | None) -> Iterator[pa.RecordBatch]:
        """The rows of a queue, or what waits in the wheel."""
        with _flight_errors(), self._slot():
            if asked is None or rows is None:
                yield from near_batches(self._link, self._maps, self._segment_bytes, self._bounds)
            elif asked.queue.topic:
                yield from topic_batches(rows, self._maps, self._segment_bytes, self._bounds, self._link, asked.columns)
            else:
                yield from far_batches(rows, self._maps, self._segment_bytes, self._bounds, asked.due)

    # -- in -----------------------------------------------------------------------------------------------------

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        with _flight_errors(), self._slot():
            if self._asks_permit and not _permit_of(context).may_write:
                raise flight.FlightUnauthorizedError("the permit is good for reading alone: only a pipeline writes")
            name = selection_name(descriptor.command or b"")
            if name:
                rows = self._selections.write(name, (piece.data for piece in reader))
                writer.write(pa.py_buffer(orjson.dumps({"rows": rows})))
                return
            chunk = parse_announcement(descriptor.command or b"")
            self._refuse_old(chunk.name)
            self._refuse_many(chunk.name)
            self._refuse_full_disk(chunk.name)
            with self.uploads.receive(chunk) as upload:
                for piece in reader:
                    upload.add(piece.data)
                    self._refuse_full_disk(chunk.name)
                whole = upload.finish()
            writer.write(pa.py_buffer(orjson.dumps(whole._asdict())))

    def _refuse_old(self, name: str) -> None:
        """Refuses a chunk of a pipeline that another one has replaced. With the first chunk of a new pipeline, removes
        the chunks that those before it have uploaded and not staged.
        """
        epoch = self._link.state().epoch
        if epoch_of(name) != epoch:
            raise Refused(f"chunk {name} is not of epoch {epoch}: another pipeline has registered")
        with self._epoch_lock:
            if epoch > self._epoch:
                self.uploads.remove_older(epoch, {chunk.name for chunk in self._link.chunks()})
                self._epoch = epoch

    def _refuse_many(self, name: str) -> None:
        """Raises Refused for a chunk of a pipeline that uploads and does not stage: its next epoch removes them."""
        if self.uploads.count(self._epoch) >= UNSTAGED_MAX:
            staged = {chunk.name for chunk in self._link.chunks()}
            if self.uploads.count(self._epoch, without=staged) >= UNSTAGED_MAX:
                raise Refused(f"chunk {name}: {UNSTAGED_MAX} chunks of this epoch are not staged, the limit")

    def _refuse_full_disk(self, name: str) -> None:
        """Raises DiskFull before a chunk takes the room that the log needs: messages must be taken, and fired."""
        free = self._disk.space()[1]
        if free < RESERVED_SEGMENTS * self._segment_bytes:
            raise DiskFull(
                f"chunk {name}: {free} bytes are free, and the log needs {RESERVED_SEGMENTS} segments of them"
            )

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._streams.acquire(blocking=False):
            raise FlowControl(f"{self._streams_max} reads and uploads run, the limit; try later")
        try:
            yield
        finally:
            self._streams.release()


# -- who asks ---------------------------------------------------------------------------------------------------


class _Bearer(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """The permit of a call."""

    def __init__(self, permit: Permit) -> None:
        self.permit = permit


class _Permits(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Reads the permit of each call before anything else is looked at."""

    def __init__(self, token: str) -> None:
        self._token, self._clock = token, SystemClock()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str]]) -> _Bearer:  # noqa: ARG002
        found = [value for name, values in headers.items() if name.lower() == "authorization" for value in values]
        if not found or not found[0].startswith(_BEARER):
            raise flight.FlightUnauthenticatedError(
                "bulk needs a permit, which the broker gives with its state and with a topic's queues (docs/bulk.md)"
            )
        try:
            return _Bearer(read_permit(self._token, found[0].removeprefix(_BEARER), self._clock.now_ms()))
        except UsageError as error:
            raise flight.FlightUnauthenticatedError(str(error)) from error


def _permit_of(context: flight.ServerCallContext) -> Permit:
    permit: Permit = context.get_middleware(_PERMIT).permit
    return permit


@contextmanager
def _flight_errors() -> Iterator[None]:
    """Turns our errors into Flight's: unavailable where a later try may pass."""
    try:
        yield
    except _AWAY as error:
        raise flight.FlightUnavailableError(str(error)) from error
    except (PostdateError, OSError) as error:
        raise flight.FlightServerError(str(error)) from error

"""The format "postdate": a topic as rows for Spark, once or as a stream; its sink is in sink.py.

    place of a stream      {"0": [17, 120], "1": [18, 80]}        by queue id: number of the queue, next offset

Spark keeps the place of a stream in its checkpoint. Only visible and durable messages are read, so that a range of
offsets has the same rows whenever it is read, but for those whose records retention has taken meanwhile. No two queues
have the same number: it tells a topic from a later one of the same name.

The driver asks the broker how far queues go and where bulk is; tasks read from bulk. Spark makes these objects in
processes of its own, on the driver and on executors: the standard library, pyarrow and pyspark are all this module may
need. docs/streams.md is the contract.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import flight
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from postdate.errors import PipelineFailed, PostdateError, Refused, UsageError
from postdate.spark.executor.broker_client import AWAY, BrokerClient
from postdate.spark.executor.bulk_client import BulkClient

if TYPE_CHECKING:
    from postdate.spark.formats import sink

NAME = "postdate"

COLUMNS = {
    "topic": "string", "queue": "int", "offset": "bigint", "due": "timestamp", "visible": "timestamp", "tag": "string",
    "key": "string", "properties": "map<string,string>", "body": "binary",
}  # fmt: skip
EARLIEST, LATEST = "earliest", "latest"
ROWS_DEFAULT = 1_000_000  # of a stream's batch: some seconds of work
OPTIONS = ("addr", "bulk", "topic", "start", "stop", "rows", "columns")

_RANGE_ROWS = 250_000  # of one task
_NEWS_S = 0.1  # how long a stream waits for messages before Spark hears that there are none
_PAUSE_S = 0.5  # between two tries to reach a broker that is away
_PATIENCE_S = 30.0  # a broker may be away this long in the middle of a read that is no stream
_TIMESTAMP = pa.timestamp("us", "UTC")
_EPOCH, _MS = datetime.fromtimestamp(0, UTC), timedelta(milliseconds=1)

Place = dict[str, list[int]]


# -- options ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the options ask for. `start` and `stop` are words, or instants in epoch milliseconds."""

    address: str | None  # of the broker; None: POSTDATE_ADDR, else this machine's
    bulk: str  # "" where the broker tells
    topic: str
    start: str | int
    stop: str | int
    rows: int
    columns: tuple[str, ...]


def asked_of(options: Mapping[str, str]) -> Asked:
    """Reads the options. Raises UsageError that says what is wrong."""
    unknown = [name for name in options if name.lower() not in OPTIONS]
    if unknown:
        raise UsageError(f"there is no option {unknown[0]!r}, but {', '.join(OPTIONS)}")
    if not options.get("topic"):
        raise UsageError("the option 'topic' is missing: which topic is to be read?")
    row_count = options.get("rows", str(ROWS_DEFAULT))
    if not row_count.isdecimal() or int(row_count) < 1:
        raise UsageError(f"the option 'rows' is {row_count!r}, expected a whole number above 0")
    listed = options.get("columns", ",".join(COLUMNS))
    columns = tuple(name.strip() for name in listed.split(","))
    if not set(columns) <= set(COLUMNS) or len(set(columns)) < len(columns):
        raise UsageError(f"the option 'columns' is {listed!r}, expected some of {', '.join(COLUMNS)}, each once")
    return Asked(
        options.get("addr"), options.get("bulk", ""), options["topic"],
        _edge("start", options.get("start", EARLIEST)), _edge("stop", options.get("stop", LATEST)), int(row_count),
        columns,
    )  # fmt: skip


def _edge(name: str, text: str) -> str | int:
    if text in (EARLIEST, LATEST):
        return text
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise UsageError(
            f"the option {name!r} is {text!r}, expected earliest, latest or an instant with its zone, "
            "such as 2030-01-31T08:00:00+01:00"
        )
    return -((_EPOCH - instant) // _MS)  # rounded up: messages that became visible before the instant are left out


# -- ranges of queues -------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The offsets start..stop-1 of a queue, for one task, and where bulk is."""

    bulk: str
    queue: int
    number: int
    start: int
    stop: int


def ranges(bulk: str, low: Place, high: Place) -> list[InputPartition]:
    """Splits what lies between two places of a topic. A queue that is not in the first place has been added since."""
    return [
        InputPartition(Range(bulk, int(queue), number, at, min(at + _RANGE_ROWS, stop)))
        for queue, (number, stop) in high.items()
        for at in range(_begin(low, queue), stop, _RANGE_ROWS)
    ]


def _begin(low: Place, queue: str) -> int:
    return low[queue][1] if queue in low else 0


def places(broker: BrokerClient, topic: str, *edges: str | int) -> list[Place]:
    """Where these edges lie in each queue. Raises what the broker's client raises."""
    instants = {-1 if isinstance(edge, str) else edge for edge in edges}
    queues = {at_ms: broker.topic(topic, at_ms) for at_ms in sorted(instants, reverse=True)}
    found = []
    for edge in edges:
        name = {EARLIEST: "first", LATEST: "next"}.get(str(edge), "since")
        spans = queues[-1 if isinstance(edge, str) else edge]
        found.append({str(span.id): [span.number, getattr(span, name)] for span in spans})
    return found


def rows(asked: Asked, wanted: Range, patience_s: float, pause_s: float = _PAUSE_S) -> Iterator[pa.RecordBatch]:
    """The messages of a range. Where bulk goes away, waits for it and asks for the rest."""
    where = {"topic": asked.topic, "id": wanted.queue, "number": wanted.number}
    columns = ["offset", *(name for name in asked.columns if name not in ("topic", "queue", "offset"))]
    at, until = wanted.start, time.monotonic() + patience_s
    while True:
        try:
            with BulkClient(wanted.bulk) as bulk:
                for batch in bulk.queue(where, at, wanted.stop, columns):
                    yield _columns_of(batch, asked, wanted.queue)
                    at, until = batch.column(0)[-1].as_py() + 1, time.monotonic() + patience_s
            return
        except flight.FlightError as error:
            if not _is_away(error) or time.monotonic() > until:
                raise _bulk_error(wanted.bulk.partition(" ")[0], error) from None
            time.sleep(pause_s)


def _columns_of(batch: pa.RecordBatch, asked: Asked, queue: int) -> pa.RecordBatch:
    count = batch.num_rows

    def instants(name: str) -> pa.Array:
        return pc.multiply(batch.column(name), 1_000).view(_TIMESTAMP)

    # A message that was not delayed has no due.
    made = {
        "topic": lambda: pa.repeat(asked.topic, count),
        "queue": lambda: pa.repeat(pa.scalar(queue, pa.int32()), count),
        "due": lambda: pc.if_else(pc.equal(batch.column("due"), 0), pa.scalar(None, _TIMESTAMP), instants("due")),
        "visible": lambda: instants("visible"),
    }
    arrays = [made[name]() if name in made else batch.column(name) for name in asked.columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(asked.columns))


# -- once -------------------------------------------------------------------------------------------------------


class TopicReader(DataSourceReader):
    """Reads what is visible when a query is planned."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def partitions(self) -> Sequence[InputPartition]:
        asked = self._asked
        broker = BrokerClient(asked.address, asked.bulk)
        try:
            low, high = places(broker, asked.topic, asked.start, asked.stop)
            return ranges(broker.bulk_for(asked.topic), low, high) or [InputPartition(None)]
        except AWAY as error:
            raise PipelineFailed(str(error)) from None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a range; none where the topic is empty, for which Spark asks all the same."""
        return iter(()) if partition.value is None else rows(self._asked, partition.value, _PATIENCE_S)


# -- as a stream ------------------------------------------------------------------------------------------------


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Asks for places on the driver, one batch after the other. Waits for a broker that is away; a topic that is gone
    ends the query.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._broker = BrokerClient(asked.address, asked.bulk)
        self._last: Place | None = None  # where a query ends that takes what is there now and no more

    def initialOffset(self) -> Place:  # noqa: N802 - Spark's names
        return self._wait_for(self._asked.start)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = self._wait_for(LATEST)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._asked.rows)

    def latestOffset(self, start: Place, limit: ReadLimit) -> Place:  # noqa: N802
        high = self._last or self._wait_for_news(start)
        if any(queue not in high or high[queue][0] != number for queue, (number, _) in start.items()):
            raise Refused(
                f"topic {self._asked.topic!r} was deleted and made again since this checkpoint was written: "
                "read the new one with a new checkpoint"
            )
        return dict(high) if isinstance(limit, ReadAllAvailable) else bounded(start, high, self._asked.rows)

    def partitions(self, start: Place, end: Place) -> Sequence[InputPartition]:
        while True:
            try:
                return ranges(self._broker.bulk_for(self._asked.topic), start, end)
            except AWAY:
                time.sleep(_PAUSE_S)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows(self._asked, partition.value, float("inf"))

    def _wait_for(self, edge: str | int) -> Place:
        while True:
            place = self._find(edge)
            if place is not None:
                return place
            time.sleep(_PAUSE_S)

    def _wait_for_news(self, start: Place) -> Place:
        """The end of the topic; `start` where for a moment nothing has come, or nobody answers."""
        place = self._find(LATEST)
        if place is None or place == start:
            time.sleep(_NEWS_S)
            place = self._find(LATEST)
        return start if place is None else place

    def _find(self, edge: str | int) -> Place | None:
        """Where an edge lies; None where the broker is away."""
        try:
            return places(self._broker, self._asked.topic, edge)[0]
        except AWAY:
            return None


def bounded(start: Place, high: Place, rows_max: int) -> Place:
    """A place at most this many rows after `start`, and no further than `high`. Each queue gets its share, and what
    others leave.
    """
    begin = {queue: _begin(start, queue) for queue in high}
    waiting = {queue: stop - begin[queue] for queue, (_, stop) in high.items()}
    place, left = dict(high), rows_max
    for index, queue in enumerate(sorted(waiting, key=lambda queue: waiting[queue])):
        share = -(-left // (len(waiting) - index))
        taken = max(min(waiting[queue], share), 0)
        place[queue] = [high[queue][0], begin[queue] + taken]
        left -= taken
    return place


# -- errors -----------------------------------------------------------------------------------------------------


def _is_away(error: flight.FlightError) -> bool:
    """Whether a later try may pass."""
    return not isinstance(error, flight.FlightServerError)


def _bulk_error(bulk: str, error: flight.FlightError) -> PostdateError:
    """Our error for one of Flight, without what gRPC adds to its sentence. Raise it without its cause: Spark would show
    all of that.
    """
    sentence = str(error).partition(". Detail:")[0].partition(". gRPC client debug")[0].rpartition("with message: ")[2]
    if not _is_away(error):
        return Refused(sentence)
    reason = "" if sentence.startswith("failed to connect") else f": {sentence}"
    return PipelineFailed(f"bulk does not answer at {bulk}{reason}")


# -- the format -------------------------------------------------------------------------------------------------


class PostdateSource(DataSource):
    """A topic as a table and as a stream, and frames as messages. Options are checked when it is loaded; the broker is
    asked when it is read.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        """The columns of a read. Raises UsageError."""
        return ", ".join(f"{name} {COLUMNS[name]}" for name in asked_of(self.options).columns)

    def reader(self, schema: Any) -> TopicReader:  # noqa: ARG002 - Spark's names
        return TopicReader(asked_of(self.options))

    def streamReader(self, schema: Any) -> TopicStreamReader:  # noqa: ARG002, N802
        return TopicStreamReader(asked_of(self.options))

    def writer(self, schema: Any, overwrite: bool) -> "sink.Writer":
        from postdate.spark.formats import sink  # needs more than readers, which travel to executors

        return sink.writer(self.options, schema, overwrite=overwrite)

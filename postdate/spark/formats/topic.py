"""A topic as rows for Spark: once, or as a stream whose place is kept in Spark's checkpoint.

    place of a stream      {"0": [17, 120], "1": [18, 80]}        by queue id: number of the queue, next offset

Only what is visible and durable is read, so that a range of offsets has the same rows whenever it is read, but for
those whose records retention has taken meanwhile. The number of a queue is never given twice: it tells a topic from a
later one of the same name.

Executors import this: the standard library, pyarrow and pyspark are all it may need.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import flight
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from postdate.errors import PipelineFailed, PostdateError, Refused, UsageError
from postdate.spark.executor.bulk_client import Gate

COLUMNS = {
    "topic": "string", "queue": "int", "offset": "bigint", "due": "timestamp", "visible": "timestamp", "tag": "string",
    "key": "string", "properties": "map<string,string>", "body": "binary",
}  # fmt: skip
EARLIEST, LATEST = "earliest", "latest"
BULK_DEFAULT = "127.0.0.1:9878"
ROWS_DEFAULT = 1_000_000  # of a stream's batch: some seconds of work
OPTIONS = ("bulk", "topic", "start", "stop", "rows", "columns")

_RANGE_ROWS = 250_000  # of one task
_NEWS_S = 0.1  # how long news are waited for, before Spark is told that there are none
_PAUSE_S = 0.5  # between two tries to reach a broker that is away
_PATIENCE_S = 30.0  # of a read that is no stream: so long a broker may be away in the middle of it
_TIMESTAMP = pa.timestamp("us", "UTC")
_EPOCH, _MS = datetime.fromtimestamp(0, UTC), timedelta(milliseconds=1)

Place = dict[str, list[int]]


# -- options ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the options ask for. `start` and `stop` are words, or instants in epoch milliseconds."""

    bulk: str
    topic: str
    start: str | int
    stop: str | int
    rows: int
    columns: tuple[str, ...]


def asked_of(options: Mapping[str, str]) -> Asked:
    """Raises UsageError that says what is wrong."""
    unknown = [name for name in options if name.lower() not in OPTIONS]
    if unknown:
        raise UsageError(f"there is no option {unknown[0]!r}, but {', '.join(OPTIONS)}")
    if not options.get("topic"):
        raise UsageError("the option 'topic' is missing: which topic is to be read?")
    return Asked(
        options.get("bulk", BULK_DEFAULT),
        options["topic"],
        _edge("start", options.get("start", EARLIEST)),
        _edge("stop", options.get("stop", LATEST)),
        _rows(options.get("rows", str(ROWS_DEFAULT))),
        _columns(options.get("columns", ",".join(COLUMNS))),
    )


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
    return -((_EPOCH - instant) // _MS)  # rounded up: what became visible before it is not meant


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"the option 'rows' is {text!r}, expected a whole number above 0")
    return int(text)


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or len(set(names)) < len(names):
        raise UsageError(f"the option 'columns' is {text!r}, expected some of {', '.join(COLUMNS)}, each once")
    return names


# -- ranges of queues -------------------------------------------------------------------------------------------


class Range(NamedTuple):
    """The offsets start..stop-1 of a queue; what a task reads."""

    queue: int
    number: int
    start: int
    stop: int


def ranges(low: Place, high: Place) -> list[InputPartition]:
    """Between two places of one topic. A queue that is not in the first one has been added since."""
    return [
        InputPartition(Range(int(queue), number, at, min(at + _RANGE_ROWS, stop)))
        for queue, (number, stop) in high.items()
        for at in range(_begin(low, queue), stop, _RANGE_ROWS)
    ]


def _begin(low: Place, queue: str) -> int:
    return low[queue][1] if queue in low else 0


def places(gate: Gate, topic: str, *edges: str | int) -> list[Place]:
    """Where these edges lie in each queue. Raises pyarrow's FlightError."""
    instants = {-1 if isinstance(edge, str) else edge for edge in edges}
    queues = {at_ms: gate.topic(topic, at_ms) for at_ms in sorted(instants, reverse=True)}
    return [_place(queues[-1 if isinstance(edge, str) else edge], edge) for edge in edges]


def _place(queues: list[list[int]], edge: str | int) -> Place:
    which = {EARLIEST: 2, LATEST: 3}.get(str(edge), 4)
    return {str(queue[0]): [queue[1], queue[which]] for queue in queues}


def rows(asked: Asked, wanted: Range, patience_s: float) -> Iterator[pa.RecordBatch]:
    """The messages of a range. Where the broker goes away it is waited for, and asked for the rest."""
    where = {"topic": asked.topic, "id": wanted.queue, "number": wanted.number}
    told = ["offset", *(name for name in asked.columns if name not in ("topic", "queue", "offset"))]
    at, until = wanted.start, time.monotonic() + patience_s
    while True:
        try:
            with Gate(asked.bulk) as gate:
                for batch in gate.queue(where, at, wanted.stop, told):
                    yield _columns_of(batch, asked, wanted.queue)
                    at, until = batch.column(0)[-1].as_py() + 1, time.monotonic() + patience_s
            return
        except flight.FlightError as error:
            if not _is_away(error) or time.monotonic() > until:
                raise _told(asked.bulk, error) from None
            time.sleep(_PAUSE_S)


def _columns_of(batch: pa.RecordBatch, asked: Asked, queue: int) -> pa.RecordBatch:
    count = batch.num_rows
    made = {
        "topic": lambda: pa.repeat(asked.topic, count),
        "queue": lambda: pa.repeat(pa.scalar(queue, pa.int32()), count),
        "due": lambda: _due(batch.column("due")),
        "visible": lambda: _instants(batch.column("visible")),
    }
    arrays = [made[name]() if name in made else batch.column(name) for name in asked.columns]
    return pa.RecordBatch.from_arrays(arrays, names=list(asked.columns))


def _instants(at_ms: pa.Array) -> pa.Array:
    return pc.multiply(at_ms, 1_000).view(_TIMESTAMP)


def _due(at_ms: pa.Array) -> pa.Array:
    """Null where a message was not delayed."""
    return pc.if_else(pc.equal(at_ms, 0), pa.scalar(None, _TIMESTAMP), _instants(at_ms))


# -- once -------------------------------------------------------------------------------------------------------


class TopicReader(DataSourceReader):
    """Reads what is visible when a query is planned."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def partitions(self) -> Sequence[InputPartition]:
        asked = self._asked
        try:
            with Gate(asked.bulk) as gate:
                low, high = places(gate, asked.topic, asked.start, asked.stop)
        except flight.FlightError as error:
            raise _told(asked.bulk, error) from None
        return ranges(low, high) or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Nothing where there is no range: Spark asks all the same."""
        return iter(()) if partition.value is None else rows(self._asked, partition.value, _PATIENCE_S)


# -- as a stream ------------------------------------------------------------------------------------------------


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Places are asked for on the driver, one batch after the other. A broker that is away is waited for; a topic that
    is gone ends the query.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._gate: Gate | None = None
        self._last: Place | None = None  # where a query ends that takes what is there and no more

    def initialOffset(self) -> Place:  # noqa: N802 - Spark's names
        return self._waited_for(self._asked.start)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._last = self._waited_for(LATEST)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._asked.rows)

    def latestOffset(self, start: Place, limit: ReadLimit) -> Place:  # noqa: N802
        high = self._last or self._news(start)
        self._refuse_another(start, high)
        return dict(high) if isinstance(limit, ReadAllAvailable) else bounded(start, high, self._asked.rows)

    def partitions(self, start: Place, end: Place) -> Sequence[InputPartition]:
        return ranges(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return rows(self._asked, partition.value, float("inf"))

    def stop(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def _waited_for(self, edge: str | int) -> Place:
        while True:
            place = self._found(edge)
            if place is not None:
                return place
            time.sleep(_PAUSE_S)

    def _news(self, start: Place) -> Place:
        """The end of the topic; `start` where nothing has come, or nobody answers, for a moment."""
        place = self._found(LATEST)
        if place is None or place == start:
            time.sleep(_NEWS_S)
            place = self._found(LATEST)
        return start if place is None else place

    def _found(self, edge: str | int) -> Place | None:
        """None where the broker is away."""
        try:
            if self._gate is None:
                self._gate = Gate(self._asked.bulk)
            return places(self._gate, self._asked.topic, edge)[0]
        except flight.FlightError as error:
            self.stop()
            if not _is_away(error):
                raise _told(self._asked.bulk, error) from None
            return None

    def _refuse_another(self, start: Place, high: Place) -> None:
        """Raises Refused where the checkpoint is of an earlier topic of this name."""
        if any(queue not in high or high[queue][0] != number for queue, (number, _) in start.items()):
            raise Refused(
                f"topic {self._asked.topic!r} was deleted and made again since this checkpoint was written: "
                "what it has now is read with a new checkpoint"
            )


def bounded(start: Place, high: Place, rows_max: int) -> Place:
    """As far as `high`, and so many rows at most. Each queue gets its share, and what others leave."""
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


def _told(bulk: str, error: flight.FlightError) -> PostdateError:
    """As a sentence, without what gRPC adds to it. To be raised without its cause: Spark would show all of that."""
    sentence = str(error).partition(". Detail:")[0].partition(". gRPC client debug")[0].rpartition("with message: ")[2]
    if not _is_away(error):
        return Refused(sentence)
    reason = "" if sentence.startswith("failed to connect") else f": {sentence}"
    return PipelineFailed(f"no broker answers at {bulk}, its bulk address{reason}")

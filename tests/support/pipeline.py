"""A broker on a clock that is moved by hand, bulk, and a pipeline whose tasks run in this process instead of on Spark,
or on a real session where a test brings one.

For tests of what a pipeline leaves behind: the batch, the tasks and the table are the real ones.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from postdate.arrival import NEVER, OWN_ARRIVAL, own_arrival
from postdate.broker.lookup import State
from postdate.broker.moving import Source
from postdate.broker.writing import Ticket
from postdate.bulk.process import Bulk
from postdate.client.address import parse_address
from postdate.clock import ManualClock
from postdate.contract import POSTPONE, Selection, TableFile, horizon_of
from postdate.keys import key_hash
from postdate.message import LOOPBACK, Message, MovedFrom, encode_properties, first_key
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.executor.bulk_client import BulkClient
from postdate.spark.pipeline.batch import Pipeline
from postdate.spark.pipeline.history import History
from postdate.storage import record as records
from postdate.storage.disk import RealDisk
from postdate.table.delta import Table
from postdate.table.files import TableFolder, Window, read_window, sort_rows, write_file
from postdate.table.format import MESSAGE, SELECTED
from tests.support.bulk import wait_until
from tests.support.core import HOUR_MS, MINUTE_MS, SECOND_MS, T0, TOPIC, message
from tests.support.server import SERVED, Served, configured
from tests.support.table_rows import row, signed, table_of

BEGIN = T0 // HOUR_MS * HOUR_MS + SECOND_MS
LEAD_MS = 60_000


class Frame:
    """What a batch needs of Spark's DataFrame: rows, and a function over them."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows

    def mapInArrow(self, function: Callable[[Iterator[Any]], Iterator[Any]], _schema: str) -> "Frame":  # noqa: N802
        return Frame(pa.concat_batches(list(function(iter([self._rows])))))

    def collect(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(**row) for row in self._rows.to_pylist()]


class Here:
    """What a batch needs of a Spark session, in this process."""

    class sparkContext:  # noqa: N801
        master = "here"

        @staticmethod
        def setLocalProperty(_name: str, _value: str) -> None:  # noqa: N802
            pass

    def range(self, start: int, stop: int, _step: int, _parts: int) -> Frame:
        return Frame(pa.RecordBatch.from_pydict({"id": list(range(start, stop))}))


def imported_row(
    name: str, due: int, arrival: int, queue_id: int, queue: int, keys: str = "", padding: int = 0
) -> dict[str, Any]:
    """A message of an import as a row of the table."""
    unique = f"{name.replace(' ', '-u')}"
    named = {"UNIQ_KEY": unique} | ({"KEYS": keys} if keys else {})
    sent = Message(TOPIC, name.encode().ljust(padding), encode_properties(named))
    record = records.encode(sent._replace(queue_id=queue_id), TOPIC.encode(), 0, 1, LOOPBACK)
    hashes = {"unique_hash": signed(key_hash(unique)), "key_hash": signed(key_hash(first_key(keys)))}
    return row(due, arrival, queue=queue, flags=OWN_ARRIVAL, key=keys or None, record=record, **hashes)


def write_import(
    control: BrokerClient, job_id: str, dues: Sequence[int], keys: str = "", padding: int = 0
) -> list[TableFile]:
    """Begins an import and writes its file beside the table, as its tasks do. Message n has the body "id n", and the
    unique key "id-u n"; all have the same keys, and bodies of at least `padding` bytes.
    """
    order = control.begin_import(job_id, TOPIC)
    rows = [
        imported_row(f"{job_id} {n}", due, own_arrival(order.job.number, 0, n), *order.queues[n % 2], keys, padding)
        for n, due in enumerate(dues)
    ]
    written = write_file(TableFolder(f"{order.table}/messages"), f"_import-{job_id}-soon-1.parquet", table_of(*rows))
    return [TableFile(*written.file)]


class World:
    """See the module. `settings` go to the broker. One that does not register has no `pipeline` yet."""

    def __init__(
        self, folder: Path, at_ms: int = BEGIN, spark: Any = None, *, registers: bool = True, **settings: Any
    ) -> None:
        self.folder = folder
        self.spark: Any = spark or Here()
        self.clock = ManualClock(at_ms)
        self.served = Served(RealDisk(folder), configured(SERVED | settings), self.clock)
        self.broker = self.served.broker
        self.served.call(lambda: self.broker.put_topic(TOPIC, at_ms, read_queue_count=2, write_queue_count=2))
        self.bulk = Bulk(folder, parse_address(self.served.server.broker_address), "127.0.0.1", 0)
        self.address = self.served.server.broker_address
        self.moves: list[Ticket] = []
        self.control = BrokerClient(self.address, str(self.bulk.address))
        wait_until(lambda: bool(self.control.state().bulk))
        if registers:
            self.pipeline = self.registered()

    def registered(self) -> Pipeline:
        root = self.folder / "table"
        history = History(str(root / "history"))
        pipeline = Pipeline(self.spark, self.control, Table(str(root / "messages")), history)
        pipeline.register(str(root), "here")
        return pipeline

    def send(self, name: str, dues: Sequence[int], keys: Sequence[str] = ()) -> None:
        def go() -> None:
            own = keys or [f"{name}-k{n} other" for n in range(len(dues))]
            messages = [
                message(f"{name} {n}", due=due, queue_id=n % 2, unique=f"{name}-u{n}", keys=own[n], tag="a")
                for n, due in enumerate(dues)
            ]
            for start in range(0, len(messages), 50):
                self.broker.send(messages[start : start + 50], self.clock.now_ms())

        self.served.call(go)
        self.served.settle()

    def cancel(self, key: str, due: int, by: str) -> None:
        self.served.call(lambda: self.broker.cancel(TOPIC, key, due, self.clock.now_ms(), by=by))
        self.served.settle()

    def move(self, unique: str, due: int) -> None:
        """Gives the message of a unique key that waits another due."""

        def go() -> None:
            everything = [found for found in self.broker.find(TOPIC, unique, by="unique") if found is not None]
            (found,) = [each for each in everything if each.state is State.WAITING]
            place = MovedFrom(found.due_at_ms, found.arrival, found.is_near)
            self.moves.append(self.broker.moves.move([Source(found.record, place, due)], self.clock.now_ms()))

        self.served.call(go)
        self.served.settle()
        assert self.moves[-1].answers == [True], f"{unique} was not moved"

    def write_import(self, job_id: str, dues: Sequence[int]) -> list[TableFile]:
        return write_import(self.control, job_id, dues)

    def import_messages(self, job_id: str, dues: Sequence[int], keys: str = "", padding: int = 0) -> None:
        """Imports messages; the next batch takes them in."""
        self.control.adopt(job_id, write_import(self.control, job_id, dues, keys, padding), 0)

    def decide_postponement(self, job_id: str, by_ms: int) -> None:
        """Asks for a job that postpones everything in the table, and decides it, as a pipeline without Spark would: the
        selection is uploaded, and the moved rows lie beside the table. The table has not followed.
        """
        self.served.call(lambda: self.broker.jobs.ask(job_id, POSTPONE, "true", by_ms, self.clock.now_ms()))
        self.served.settle()
        number, table = self.control.find_job(job_id).number, self.pipeline.table
        rows = sort_rows(read_window(table.folder, list(table.files), Window(-1, NEVER)))
        rows = rows.filter(pc.equal(rows["kind"], MESSAGE))
        own, name = own_arrival(number), f"{number:08d}-0"
        with BulkClient(str(self.bulk.address)) as bulk:
            bulk.select(name, rows.select(SELECTED.names).cast(SELECTED))
        moved = [
            each | {"due": each["due"] + by_ms, "arrival": own + n, "flags": OWN_ARRIVAL}
            for n, each in enumerate(rows.to_pylist())
        ]
        written = write_file(table.folder, f"_job-{number:08d}-soon-1.parquet", table_of(*moved))
        self.control.decide(Selection(self.pipeline.epoch, number, ((name, own),), (TableFile(*written.file),)))

    def find_states(self, unique: str) -> list[str]:
        """What a lookup says of the messages of a unique key."""
        return self.served.call(
            lambda: [found.state.value for found in self.broker.find(TOPIC, unique, by="unique") if found is not None]
        )

    def shown(self) -> dict[str, int]:
        """The bodies of all visible messages, and when they became visible. None is shown twice."""
        found: list[tuple[str, int]] = []
        for queue_id in range(2):
            bodies = [records.decode(data).body.decode() for data in self._pull(queue_id)]
            found += [(body, self.broker.view.visible_at_ms(TOPIC, queue_id, n)) for n, body in enumerate(bodies)]
        assert len(dict(found)) == len(found), "a message is shown twice"
        return dict(found)

    def _pull(self, queue_id: int) -> list[bytes]:
        view = self.broker.view
        return view.pull(TOPIC, queue_id, 0, count_max=10_000).records if view.offsets(TOPIC, queue_id)[1] else []

    def pass_without_pipeline(self, span_ms: int, step_ms: int = SECOND_MS) -> None:
        """Time passes, the pipeline is away, and bulk looks once a step."""
        for _ in range(span_ms // step_ms):
            self.served.pass_ms(step_ms)
            self.bulk.promoter.look()
            self.served.settle()

    def batch(self) -> None:
        """A batch and, where it has made a job selectable, the selection and a batch that follows it."""
        self._run_batch()
        while self.pipeline.beside.work():
            self._run_batch()

    def _run_batch(self) -> None:
        state = self.control.state()
        horizon = horizon_of(state.now_ms, LEAD_MS)
        plan = {"far": [state.far_length], "horizon": [horizon]}
        self.pipeline.run(Frame(pa.RecordBatch.from_pydict(plan)))  # type: ignore[arg-type]
        self.served.settle()

    def pass_minutes(self, count: int) -> None:
        for _ in range(count):
            self.served.pass_ms(MINUTE_MS)
            self.batch()

    def close(self) -> None:
        self.bulk.close()
        self.served.stop()

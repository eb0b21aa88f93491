"""A broker on a clock that is moved by hand, bulk, and a pipeline whose tasks run in this process instead of on Spark,
or on a real session where a test brings one.

For tests of what a pipeline leaves behind: the batch, the tasks and the table are the real ones.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from postdate.bulk.process import Bulk
from postdate.client.address import parse_address
from postdate.clock import ManualClock
from postdate.spark.executor.broker_client import BrokerClient
from postdate.spark.pipeline.batch import Pipeline
from postdate.spark.pipeline.history import History
from postdate.spark.pipeline.source import horizon_of
from postdate.storage.disk import RealDisk
from postdate.table.delta import Table
from tests.support.bulk import wait_until
from tests.support.core import HOUR_MS, MINUTE_MS, SECOND_MS, T0, TOPIC, message
from tests.support.server import SERVED, Served, configured

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

    def range(self, start: int, stop: int, _step: int, _parts: int) -> Frame:
        return Frame(pa.RecordBatch.from_pydict({"id": list(range(start, stop))}))


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

    def batch(self) -> None:
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

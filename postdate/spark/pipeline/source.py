"""The source of the one streaming query. It yields plans instead of messages: how far to take the far queue, and which
horizon to reach.

A batch runs when a minute has turned, because the next minute must be promoted, or when many rows wait. At each turn
everything that came is taken, in several batches where it is much: a row that comes later is due a minute later at the
earliest.

Spark runs this in a process of its own, with the Python of its executors. While the broker is away it waits.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from postdate.access.token import find_token
from postdate.contract import BatchSize, State, horizon_of
from postdate.spark.executor.broker_client import AWAY, BrokerClient

NAME = "postdate-plan"
_WAIT_S = 1.0  # for something to do, before Spark hears that there is nothing
AGAIN_S = 60.0  # before a batch that has left something runs again: most troubles of a table pass by themselves

Offset = dict[str, int]


class PlanSource(DataSource):
    """Options: addr (of the broker), rows, bytes (of a batch at most), soon (rows that are worth a batch), pause
    (seconds between two looks).
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return "far long, horizon long"

    def streamReader(self, schema: Any) -> "PlanReader":  # noqa: ARG002, N802 - Spark's names
        return PlanReader(self.options)


class PlanReader(DataSourceStreamReader):
    """Plans the batches. Spark calls it on the driver's machine, one call after the other."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._broker = BrokerClient(options["addr"], token=find_token(os.environ))
        self._rows, self._bytes = int(options["rows"]), int(options["bytes"])
        self._soon = int(options["soon"])
        self._pause_s = float(options["pause"])
        # The last batch could not take everything; perhaps it died when it had moved the horizon, before this start.
        self._is_behind = True
        self._planned_at = -AGAIN_S  # by the clock of elapsed time: when the last batch was planned

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where the broker is: a new checkpoint knows nothing else."""
        while True:
            state = self._state(0)
            if state is not None:
                return {"far": state.taken, "horizon": state.horizon}
            time.sleep(self._pause_s)

    def latestOffset(self, start: Offset, limit: object) -> Offset:  # noqa: ARG002, N802
        until = time.monotonic() + _WAIT_S
        while True:
            state = self._state(start["far"])
            offset = start if state is None else self._next(start, state)
            if offset != start or time.monotonic() >= until:
                return offset
            time.sleep(self._pause_s)

    def _next(self, start: Offset, state: State) -> Offset:
        """Plans the next batch, or none. Where somebody waits for far rows that the last batch planned and did not
        take, the next one differs from it by `again`: after a clock has stepped back, no minute turns for hours.
        """
        reach = horizon_of(state.now_ms, state.lead_ms)
        horizon = max(reach, start["horizon"])
        waiting = state.far_length - max(start["far"], state.taken)
        has_job = (state.wanted or 0) > state.taken
        # A batch that ran after a step back of the clock has reached less than it had planned.
        has_turned = horizon > start["horizon"] or reach > state.horizon
        if not has_turned and not has_job and waiting < (1 if self._is_behind else self._soon):
            return start
        stop = state.far_length if state.stop is None else state.stop
        self._is_behind = stop < state.far_length
        planned = {"far": max(stop, start["far"]), "horizon": horizon}
        if planned == {name: start[name] for name in planned}:
            if time.monotonic() - self._planned_at < AGAIN_S:
                return start
            planned["again"] = start.get("again", 0) + 1
        self._planned_at = time.monotonic()
        return planned

    def _state(self, far: int) -> State | None:
        """The state of the broker, with the end of a batch from a far row on; None where the broker is away."""
        try:
            return self._broker.state(BatchSize(far, self._rows, self._bytes))
        except AWAY:
            return None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # noqa: ARG002
        """One partition that carries the plan to the batch. A task that read its own range of far rows here would need
        a second process, with its memory.
        """
        return [InputPartition((end["far"], end["horizon"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int]]:
        yield partition.value

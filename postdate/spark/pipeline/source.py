"""The source of the one streaming query. It yields plans, no messages: up to where to take the far queue, and the
horizon to reach.

A batch is worth its while when a minute has turned, so that the next one must be promoted, or when many rows wait. At
each turn everything that came is taken, in several batches where it is much: what was still untaken then is due a
minute later at the earliest.

This runs in a process of Spark's own. It knows the broker by its bulk port alone, and waits where that is away.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyarrow import flight
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from postdate.spark.executor.bulk_client import Gate

NAME = "postdate-plan"
MINUTE_MS = 60_000
_WAIT_S = 1.0  # for news, before Spark is told that there are none

Offset = dict[str, int]


def horizon_of(now_ms: int, lead_ms: int) -> int:
    """Up to when everything is promoted: the lead from now, rounded up to a whole minute."""
    return -(-(now_ms + lead_ms) // MINUTE_MS) * MINUTE_MS


class PlanSource(DataSource):
    """Options: bulk (host:port), rows, bytes (of a batch at most), soon (rows that are worth a batch), pause (seconds
    between two looks for news).
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return "far long, horizon long"

    def streamReader(self, schema: Any) -> "PlanReader":  # noqa: ARG002, N802 - Spark's names
        return PlanReader(self.options)


class PlanReader(DataSourceStreamReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._bulk = options["bulk"]
        self._rows, self._bytes = int(options["rows"]), int(options["bytes"])
        self._soon = int(options["soon"])
        self._pause_s = float(options["pause"])
        self._is_behind = False  # the last batch could not take everything
        self._gate: Gate | None = None

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where the broker is: with a new checkpoint there is nothing else to go by."""
        while True:
            state = self._state(0)
            if state is not None:
                return {"far": state["taken"], "horizon": state["horizon"]}
            time.sleep(self._pause_s)

    def latestOffset(self, start: Offset, limit: object) -> Offset:  # noqa: ARG002, N802
        until = time.monotonic() + _WAIT_S
        while True:
            state = self._state(start["far"])
            offset = start if state is None else self._next(start, state)
            if offset != start or time.monotonic() >= until:
                return offset
            time.sleep(self._pause_s)

    def _next(self, start: Offset, state: dict[str, Any]) -> Offset:
        horizon = max(horizon_of(state["now_ms"], state["lead_ms"]), start["horizon"])
        waiting = state["far_length"] - max(start["far"], state["taken"])
        is_asked = any(far >= start["far"] for _, far in state["commands"])  # somebody waits for a job
        if horizon == start["horizon"] and not is_asked and waiting < (1 if self._is_behind else self._soon):
            return start
        self._is_behind = state["stop"] < state["far_length"]
        return {"far": max(state["stop"], start["far"]), "horizon": horizon}

    def _state(self, far: int) -> dict[str, Any] | None:
        """None where the broker is away."""
        try:
            if self._gate is None:
                self._gate = Gate(self._bulk)
            return self._gate.state(start=far, rows_max=self._rows, bytes_max=self._bytes)
        except flight.FlightError:
            self.stop()
            return None

    def stop(self) -> None:
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # noqa: ARG002
        """One, that is only read to be told: a task that read its own range from here would keep two processes, with
        the memory of two.
        """
        return [InputPartition((end["far"], end["horizon"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int, int]]:
        yield partition.value

"""A pipeline without Spark: it obeys the same calls in the same order, in memory that no crash takes.

It reads far rows, keeps them in a table, and stages chunks. As in the real one, the table is durable before the stage
is called, and the table knows by itself how far it has read; a stage that fails is made anew from the broker's place.
"""

import json
from typing import NamedTuple

import numpy as np

from postdate.broker import Broker
from postdate.log import chunk
from postdate.log import record as records
from postdate.log.batch import CANCEL, MESSAGE
from postdate.log.disk import Disk
from postdate.message import PROPERTY_KEYS, PROPERTY_UNIQ_KEY, first_key
from postdate.staging import Stage


class TableRow(NamedTuple):
    number: int  # in the far queue
    row: np.void
    record: bytes


class SimulatedPipeline:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.table: list[TableRow] = []
        self.read_until = 0  # far rows before this one are in the table
        self.epoch = 0
        self.chunk_count = 0
        self.rows_in = 0  # messages that ever came into the table
        self.last_stage: Stage | None = None

    def register(self, broker: Broker, at_ms: int) -> None:
        ticket = broker.register_pipeline(at_ms)
        broker.flush()
        self.epoch = ticket.answer

    def read(self, broker: Broker, count: int) -> None:
        """Takes far rows into the table, as they are durable."""
        start = max(self.read_until, broker.fold.far.taken, broker.far_first)
        for index, row in enumerate(broker.read_far(start, count)):
            data = broker.fold.read(int(row["arrival"]), int(row["size"]))
            if data:
                self._take(TableRow(start + index, row, data))
            self.read_until = start + index + 1

    def _take(self, taken: TableRow) -> None:
        if taken.row["kind"] == MESSAGE:
            self.table.append(taken)
            self.rows_in += 1
        elif taken.row["kind"] == CANCEL:
            self.table = [row for row in self.table if not _cancels(taken, row)]

    def stage(self, broker: Broker, horizon_to: int, at_ms: int) -> None:
        far = broker.fold.far
        horizon = (far.horizon_at_ms, max(horizon_to, far.horizon_at_ms))
        taken = (far.taken, max(self.read_until, far.taken))
        rows = [row for row in self.table if _is_promoted(row, taken, horizon)]
        left = [row for row in self.table if row.row["due"] > horizon[1]]
        rows_out = self.rows_in - far.rows_out - len(left)
        self.last_stage = Stage(self.epoch, taken, horizon, tuple(self._write_chunks(rows)), self.rows_in, rows_out)
        broker.stage(self.last_stage, at_ms)
        self.table = left

    def _write_chunks(self, rows: list[TableRow]) -> list[str]:
        """Two chunks where there are enough rows, so that they are merged."""
        rows = sorted(rows, key=lambda row: (int(row.row["due"]), int(row.row["arrival"])))
        halves = [rows[::2], rows[1::2]] if len(rows) > 3 else [rows] if rows else []
        return [self._write_chunk(half) for half in halves]

    def _write_chunk(self, rows: list[TableRow]) -> str:
        index = np.zeros(len(rows), chunk.CHUNK_ROW)
        position = 0
        for place, (_, row, data) in enumerate(rows):
            for name in ("due", "arrival", "size", "queue", "tag_hash", "unique_hash", "key_hash"):
                index[name][place] = row[name]
            index["position"][place] = position
            position += len(data)
        self.chunk_count += 1
        name = f"{self.chunk_count:08d}"
        chunk.write(self._disk, name, index, b"".join(row.record for row in rows))
        return name

    def held_names(self, broker: Broker) -> frozenset[str]:
        """Bodies of the messages that only the table has: taken, and due behind the horizon."""
        far = broker.fold.far
        return frozenset(records.decode(row.record).body.decode() for row in self.table if row.number < far.taken)


def _is_promoted(row: TableRow, taken: tuple[int, int], horizon: tuple[int, int]) -> bool:
    due = int(row.row["due"])
    return due <= horizon[1] and (due > horizon[0] or row.number >= taken[0])


def _cancels(cancel: TableRow, row: TableRow) -> bool:
    body = json.loads(records.decode(cancel.record).body)
    properties = records.properties_of(row.record)
    key = properties.get(PROPERTY_UNIQ_KEY) if body["by"] == "unique" else first_key(properties.get(PROPERTY_KEYS, ""))
    return bool(
        row.row["due"] == body["due"]
        and row.row["arrival"] < cancel.row["arrival"]
        and key == body["key"]
        and records.topic_of(row.record) == body["topic"]
    )

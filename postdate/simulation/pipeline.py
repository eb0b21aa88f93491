"""Pipelines without Spark: they obey the same calls in the same order, over one table in memory that no crash takes.

As in the real ones, the table is durable before a stage is called and knows by itself how far it has read; what it
promotes is decided by where the broker is, so that a stage that failed is made anew. Two may run at once. The broker
refuses the one with the older epoch; the table refuses a commit of whoever has not seen the commit before.
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
from postdate.tombstones import Tombstone

_KEEP_MS = 60_000  # what is promoted stays so long behind the horizon: a cancel may still look for it


class TableRow(NamedTuple):
    number: int  # in the far queue
    row: np.void
    record: bytes

    @property
    def due(self) -> int:
        return int(self.row["due"])

    @property
    def name(self) -> str:
        """The body of a message."""
        return records.decode(self.record).body.decode()


class SimulatedTable:
    """Rows of far messages and cancels, in the order of arrival."""

    def __init__(self) -> None:
        self.rows: list[TableRow] = []
        self.read_until = 0  # far rows before this one are in it
        self.rows_in = 0  # that ever came
        self.commit_count = 0

    def append(self, rows: list[TableRow], read_until: int) -> None:
        self.rows += rows
        self.rows_in += len(rows)
        self.read_until = read_until
        self.commit_count += 1

    def forget(self, horizon_at_ms: int) -> None:
        self.rows = [row for row in self.rows if row.due > horizon_at_ms - _KEEP_MS]
        self.commit_count += 1

    def find(self, tombstone: Tombstone) -> list[int]:
        """Arrivals of the messages of a topic, key and due: what the server asks whoever reads the table."""
        named = {"topic": tombstone.topic, "key": tombstone.key, "by": tombstone.by, "due": tombstone.due}
        return [
            int(row.row["arrival"])
            for row in self.rows
            if row.row["kind"] == MESSAGE and row.row["arrival"] < tombstone.arrival and _is_named(row, named)
        ]

    def waiting(self, broker: Broker) -> list[TableRow]:
        """What the broker thinks that the table holds for it: taken, and due behind the horizon."""
        far = broker.fold.far
        return [row for row in self.rows if row.number < far.taken and row.due > far.horizon_at_ms]

    def held_names(self, broker: Broker) -> frozenset[str]:
        """Bodies of the messages that wait in it."""
        return frozenset(row.name for row in self.waiting(broker) if row.row["kind"] == MESSAGE)


class SimulatedPipeline:
    """One of those that share a table. `epoch` is 0 while it does not run, or has to register again."""

    def __init__(self, disk: Disk, table: SimulatedTable) -> None:
        self._disk = disk
        self._table = table
        self._seen = 0  # the table's last commit that it knows
        self._chunk_count = 0
        self.epoch = 0

    def register(self, broker: Broker, at_ms: int) -> None:
        ticket = broker.register_pipeline(at_ms, table="simulated")
        broker.flush()
        self.epoch = ticket.answer
        self._seen = self._table.commit_count
        self._remove_strangers(broker)

    def _remove_strangers(self, broker: Broker) -> None:
        """Files of older epochs that the broker does not know: somebody died before the stage."""
        for name in self._disk.list(chunk.FOLDER):
            if int(name.partition("-")[0]) < self.epoch and name not in broker.fold.chunks.names():
                self._disk.remove(chunk.path_of(name))

    def die(self) -> None:
        """Whatever it was doing: the next thing that it does is to register."""
        self.epoch = 0

    def read(self, broker: Broker, count: int) -> None:
        """Takes far rows into the table, as they are durable. If another has written to it, nothing is taken, and it
        must register again.
        """
        table = self._table
        start = max(table.read_until, broker.far_first)
        rows = broker.read_far(start, count)
        taken = [
            TableRow(start + index, row, data)
            for index, row in enumerate(rows)
            if (data := broker.fold.read(int(row["arrival"]), int(row["size"])))
        ]
        if self._may_commit():
            table.append(taken, start + len(rows))
            self._seen = table.commit_count

    def _may_commit(self) -> bool:
        if self._seen != self._table.commit_count:
            self.die()
        return self.epoch > 0

    def planned(self, broker: Broker, horizon_to: int) -> Stage:
        """A stage up to this horizon, from where the broker is; its chunks are uploaded."""
        far = broker.fold.far
        horizon = (far.horizon_at_ms, max(horizon_to, far.horizon_at_ms))
        taken = (far.taken, max(self._table.read_until, far.taken))
        leaving = [
            row
            for row in self._table.rows
            if row.due <= horizon[1] and (row.due > horizon[0] or row.number >= taken[0])
        ]
        chunks = self._write_chunks(self._living(leaving))
        return Stage(self.epoch, taken, horizon, tuple(chunks), self._table.rows_in, len(leaving))

    def forget(self, broker: Broker) -> None:
        """After a stage: what was promoted a while ago leaves the table."""
        if self._may_commit():
            self._table.forget(broker.fold.far.horizon_at_ms)
            self._seen = self._table.commit_count

    def _living(self, rows: list[TableRow]) -> list[TableRow]:
        """The messages among rows, without those that a row of the table cancels."""
        cancels = [row for row in self._table.rows if row.row["kind"] == CANCEL]
        return [row for row in rows if row.row["kind"] == MESSAGE and not any(_cancels(each, row) for each in cancels)]

    def _write_chunks(self, rows: list[TableRow]) -> list[str]:
        """Two chunks where there are enough rows, so that they are merged."""
        rows = sorted(rows, key=lambda row: (row.due, int(row.row["arrival"])))
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
        self._chunk_count += 1
        name = f"{self.epoch:06d}-{self._chunk_count:08d}"
        chunk.write(self._disk, name, index, b"".join(row.record for row in rows))
        return name


def _cancels(cancel: TableRow, row: TableRow) -> bool:
    named = json.loads(records.decode(cancel.record).body)
    return bool(row.row["arrival"] < cancel.row["arrival"]) and _is_named(row, named)


def _is_named(row: TableRow, named: dict[str, object]) -> bool:
    """Whether a message is the one that a cancel names: of this topic, key and due."""
    properties = records.properties_of(row.record)
    key = properties.get(PROPERTY_UNIQ_KEY) if named["by"] == "unique" else first_key(properties.get(PROPERTY_KEYS, ""))
    return bool(row.due == named["due"] and key == named["key"] and records.topic_of(row.record) == named["topic"])

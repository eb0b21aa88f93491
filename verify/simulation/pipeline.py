"""A pipeline without Spark: it makes the same calls in the same order, over a table in memory that survives crashes.

As in the real one, the table is durable before a stage is called, and knows how far it has read. The broker's position
decides what is promoted, so that a stage that failed is simply planned again. Two pipelines may run at once. The broker
refuses the one with the older epoch; the table refuses a commit of one that has not seen the last commit.
"""

import json
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from postdate.arrival import NEAR, OWN, came_before, job_of, own_arrival
from postdate.broker.broker import Broker
from postdate.broker.writing import Ticket
from postdate.contract import NO_MARKS, Selection, Stage, TableFile, TableMarks
from postdate.errors import Refused
from postdate.message import PROPERTY_KEYS, PROPERTY_UNIQ_KEY, first_key
from postdate.state.cancels import Tombstone
from postdate.state.jobs import IMPORT, RUNNING, WAITING, Job, JobAnswer, Part
from postdate.state.topics import GONE
from postdate.storage import chunk, selection
from postdate.storage import record as records
from postdate.storage.batch import CANCEL, JOB, MESSAGE, MOVE
from postdate.storage.disk import Disk
from postdate.storage.layout import CHUNK_ROW, FAR, SELECTED
from postdate.table.format import DROP
from verify.simulation.digest import Digest

_KEEP_MS = 60_000  # promoted rows stay this long after they were due: a cancel may still look for them


class TableRow(NamedTuple):
    number: int  # in the far queue
    row: np.void
    record: bytes

    @property
    def due(self) -> int:
        return int(self.row["due"])

    @property
    def arrival(self) -> int:
        return int(self.row["arrival"])

    @property
    def name(self) -> str:
        """The message's body."""
        return records.decode(self.record).body.decode()


class Found(NamedTuple):
    """A message that a job selects: as a row of the table, and whether it was found in the wheel."""

    row: TableRow
    is_near: bool


class SimulatedTable:
    """The table: rows of far messages and cancels, of imports and postponed messages, and drops of jobs."""

    def __init__(self) -> None:
        self.rows: list[TableRow] = []
        self.aside: dict[str, list[TableRow]] = {}  # files beside the table, which a job may add to it
        self.read_until = 0  # far rows before this one are in the table
        self.rows_in = 0  # ever added
        self.commit_count = 0
        self.marks = NO_MARKS

    def append(self, rows: list[TableRow], read_until: int, broker: Broker) -> None:
        self.rows += rows
        self.rows_in += len(rows)
        self.read_until = read_until
        self._see(broker)

    def forget(self, broker: Broker) -> None:
        promoted_at_ms = min(broker.fold.far.horizon_at_ms, broker.fold.fired_at_ms)
        self.rows = [row for row in self.rows if row.due > promoted_at_ms - _KEEP_MS]
        self._see(broker)

    def _see(self, broker: Broker) -> None:
        """Each commit says whose table it is, and which batch of the log it has seen."""
        self.commit_count += 1
        position, mark = broker.view.log_mark or (self.marks.position, self.marks.mark)
        self.marks = TableMarks(broker.identity, self.read_until, position, mark)

    def find(self, tombstone: Tombstone, queues: Collection[int]) -> list[int]:
        """The arrivals of messages with a cancel's queues, key and due: what the server asks bulk."""
        named = {"topic": tombstone.topic, "key": tombstone.key, "by": tombstone.by}
        return [
            row.arrival
            for row in without_drops([row for row in self.rows if row.due == tombstone.due])
            if row.row["kind"] == MESSAGE
            and row.row["queue"] in queues
            and (row.arrival < tombstone.arrival or row.arrival >= OWN)
            and _is_named(row, named)
        ]

    def find_key(self, topic: str, unique_key: str, queues: Collection[int]) -> list[TableRow]:
        """The messages of a unique key that nothing in the table takes away: what the server asks bulk for a move."""
        named = {"topic": topic, "key": unique_key, "by": "unique"}
        return [row for row in living(self.rows) if row.row["queue"] in queues and _is_named(row, named)]

    def waiting(self, broker: Broker) -> list[TableRow]:
        """The rows that wait in the table by the broker's count: taken, and due after the horizon."""
        far = broker.fold.far
        return [row for row in self.rows if row.number < far.taken and row.due > far.horizon_at_ms]

    def held_names(self, broker: Broker) -> frozenset[str]:
        """The bodies of the messages that wait in the table."""
        return frozenset(row.name for row in self.waiting(broker) if row.row["kind"] == MESSAGE)


class SimulatedPipeline:
    """One pipeline. `epoch` is 0 while it does not run, or has to register again."""

    def __init__(self, disk: Disk, table: SimulatedTable, digest: Digest) -> None:
        self._disk = disk
        self._table = table
        self._digest = digest
        self._seen = 0  # the last commit of the table that it knows
        self._chunk_count = 0
        self._selection_count = 0
        self._rest: tuple[int, list[TableRow]] | None = None  # a job that is tried, and what waits for it in the table
        self._selected: Selection | None = None  # uploaded for a job, not yet decided
        self._tried = -1  # the number of the job that the table follows
        self.failing = 0  # tries of jobs that fail from now on
        self._deciding: Ticket | None = None  # written, perhaps not durable
        self.epoch = 0

    def register(self, broker: Broker, at_ms: int) -> None:
        self.die()
        ticket = broker.register_pipeline(at_ms, table="simulated", marks=self._table.marks)
        broker.flush()
        self.epoch = ticket.answer
        self._digest.note("register", self.epoch)
        self._seen = self._table.commit_count
        self._remove_strangers(broker)
        for job in [job for job in broker.fold.jobs.open() if job.aside]:
            self._attempt(broker, "again", job, at_ms)

    def _remove_strangers(self, broker: Broker) -> None:
        """Removes chunks of older epochs that the broker does not know: their pipeline died before the stage."""
        for name in self._disk.list(chunk.FOLDER):
            if int(name.partition("-")[0]) < self.epoch and name not in broker.fold.chunks.names():
                self._disk.remove(chunk.path_of(name))

    def die(self) -> None:
        """Stops in the middle of its work. Next it has to register."""
        self.epoch = 0
        self._rest = self._selected = self._deciding = None
        self._tried = -1

    def doubt(self) -> None:
        """The broker has crashed: the job's state will say what was decided."""
        self._deciding = None

    def read(self, broker: Broker, count: int, at_ms: int) -> None:
        """Takes durable far rows into the table, and has it follow the jobs among them: `count` rows or steps of jobs.
        If another pipeline has written to the table, it takes nothing and has to register again.
        """
        while count > 0 and self.epoch:
            start = max(self._table.read_until, broker.view.far.first)
            followed = [job for job in broker.fold.jobs.open() if not job.aside]
            placed = [job for job in followed if job.state == RUNNING or job.op == IMPORT]
            job = min((job for job in placed if job.far >= start), key=lambda job: job.far, default=None)
            rows = broker.view.read_far(start, count if job is None else min(count, job.far - start))
            if job is not None and job.far == start and len(broker.view.read_far(start, 1)):
                count = count - 1 if self._carry_out(broker, job, at_ms) else 0
            else:
                self._take(broker, start, rows)
                count -= len(rows) if job is not None and len(rows) else count

    def _take(self, broker: Broker, start: int, rows: np.ndarray) -> None:
        taken = [
            _dropped_by_move(start + index, row) if row["kind"] == MOVE else TableRow(start + index, row, data)
            for index, row in enumerate(rows)
            if row["kind"] != JOB and (data := broker.fold.read(int(row["arrival"]), int(row["size"])))
        ]
        self._digest.note("taken", start, taken)
        self._commit(taken, start + len(rows), broker)

    def _commit(self, rows: list[TableRow], read_until: int, broker: Broker) -> None:
        if self._may_commit():
            self._table.append(rows, read_until, broker)
            self._seen = self._table.commit_count

    def _may_commit(self) -> bool:
        if self._seen != self._table.commit_count:
            self.die()
        return self.epoch > 0

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _carry_out(self, broker: Broker, job: Job, at_ms: int) -> bool:
        """Does one step of a job at its far row: try, decide (an import), wait for the decision, follow. Returns
        whether the table may go on.
        """
        if self._deciding is not None:
            self._wait_for_decision(broker)
        elif self._tried != job.number:
            answer = self._attempt(broker, "try", job, at_ms)
            if answer.reason:
                self._commit([], job.far + 1, broker)  # it is set aside now, or has failed
            elif self._fail(broker, job, at_ms):
                return False
            else:
                self._tried = job.number
        elif job.state == WAITING:
            self._decide(broker, Selection(self.epoch, job.number, ()), at_ms)
        else:
            self._commit(self._drop_rows(job) + self._adopted_rows(job), job.far + 1, broker)
            self._tried = -1
        return True

    def _attempt(self, broker: Broker, call: str, job: Job, at_ms: int) -> JobAnswer:
        """Notes a try, or what became of it."""
        ticket = broker.jobs.attempt(call, self.epoch, job.number, "it cannot be done", at_ms)
        broker.flush()
        answer: JobAnswer = ticket.answer
        self._digest.note("attempt", call, job.number, answer.reason)
        if answer.job is None:
            self.die()
        return answer

    def _fail(self, broker: Broker, job: Job, at_ms: int) -> bool:
        """Whether a try fails."""
        if self.failing:
            self.failing -= 1
            self._attempt(broker, "stumble", job, at_ms)
            return True
        return False

    def _wait_for_decision(self, broker: Broker) -> None:
        assert self._deciding is not None
        broker.flush()
        self._digest.note("decided", bool(self._deciding.answer.reason))
        self._deciding = None

    def select(self, broker: Broker, count: int, at_ms: int) -> None:
        """Does some steps of a selection, while batches go on: try and look into the table, look into the wheel and
        upload, decide, wait for the decision.
        """
        for _ in range(count):
            if self._deciding is not None and self._tried < 0:
                self._wait_for_decision(broker)
                continue
            job = broker.fold.jobs.next_to_select()
            if not self.epoch or job is None:
                return
            if self._selected is not None and self._selected.number == job.number:
                self._decide(broker, self._selected, at_ms)
            elif self._rest is not None and self._rest[0] == job.number:
                (_, rest), self._rest = self._rest, None
                self._selected = self._select(broker, job, rest)
            elif not self._attempt(broker, "try", job, at_ms).reason and not self._fail(broker, job, at_ms):
                far = broker.fold.far
                rest = [row for row in self._table.rows if row.number >= far.taken or row.due > far.horizon_at_ms]
                self._rest = job.number, living(rest)

    def leave(self, broker: Broker, at_ms: int) -> None:
        """Ends the try of a selection that is under way, because the pipeline stops."""
        number = self._rest[0] if self._rest else self._selected.number if self._selected else -1
        job = broker.fold.jobs.get(number)
        if self.epoch and job is not None:
            self._attempt(broker, "leave", job, at_ms)
        self.die()

    def _adopted_rows(self, job: Job) -> list[TableRow]:
        """The rows of the job's files, at the job's place in the far queue."""
        return [row._replace(number=job.far) for file in job.files for row in self._table.aside[file[0]]]

    def _select(self, broker: Broker, job: Job, rest: list[TableRow]) -> Selection:
        """Uploads the selected rows, and writes postponed messages to files beside the table."""
        found = sorted(self._selected_by(broker, job, rest), key=lambda each: (each.row.due, each.row.arrival))
        self._selection_count += 1
        parts, files = [], []
        for number, part in enumerate([found[::2], found[1::2]] if len(found) > 3 else [found] if found else []):
            name = f"{job.number:08d}-{self.epoch}-{self._selection_count}-{number}"
            selection.write(self._disk, name, _selected_rows(part))
            own = own_arrival(job.number, number)
            parts.append((name, own))
            if job.by_ms:
                moved = [_postponed_row(each.row, job.by_ms, own + index) for index, each in enumerate(part)]
                self._table.aside[f"_job-{name}.parquet"] = moved
                bounds = (moved[0].due, moved[-1].due, own, own)
                files.append(TableFile(f"_job-{name}.parquet", 0, len(moved), *bounds))
        return Selection(self.epoch, job.number, tuple(parts), tuple(files))

    def _selected_by(self, broker: Broker, job: Job, rest: list[TableRow]) -> list[Found]:
        """The messages that wait, in the table or in the wheel by now, came before a job and match its predicate."""
        target = broker.fold.topics.target
        near = _in_wheel(broker)
        known = {row.arrival for row in near}
        elsewhere = [row for row in rest if row.arrival not in known]
        found = [Found(row, True) for row in near] + [Found(row, False) for row in elsewhere]
        return [
            each
            for each in found
            if _came_before(each.row.arrival, job)
            and target[int(each.row.row["queue"])] != GONE
            and selects(job.where, records.topic_of(each.row.record), _first_key(each.row.record))
        ]

    def _decide(self, broker: Broker, selected: Selection, at_ms: int) -> None:
        self._selected = None
        try:
            broker.jobs.check(selected)
            self._deciding = broker.jobs.decide(selected, broker.jobs.verify(selected), at_ms)
        except Refused as error:
            self._digest.note_error(error)
            self.die()

    def _drop_rows(self, job: Job) -> list[TableRow]:
        """Rows that drop changed messages, and postponed copies of messages for which the job came too late."""
        return [
            _drop_row(job, row["due"] + job.by_ms, part.own + index)
            if index in part.late
            else _drop_row(job, row["due"], row["arrival"])
            for part in job.parts
            for index, row in enumerate(self._rows(part))
            if index not in part.late or job.by_ms
        ]

    def _rows(self, part: Part) -> np.ndarray:
        return selection.rows_of(self._disk, part.name)

    # -- stages -------------------------------------------------------------------------------------------------

    def plan_stage(self, broker: Broker, horizon_to: int) -> Stage:
        """Plans a stage from the broker's position up to this horizon, and uploads its chunks."""
        far = broker.fold.far
        horizon = (far.horizon_at_ms, max(horizon_to, far.horizon_at_ms))
        taken = (far.taken, max(self._table.read_until, far.taken))
        leaving = [
            row
            for row in self._table.rows
            if row.due <= horizon[1] and (row.due > horizon[0] or row.number >= taken[0])
        ]
        chunks = self._write_chunks(living(leaving))
        return Stage(self.epoch, taken, horizon, tuple(chunks), self._table.rows_in, len(leaving))

    def forget(self, broker: Broker) -> None:
        """After a stage: removes rows from the table that were promoted a while ago."""
        if self._may_commit():
            self._table.forget(broker)
            self._seen = self._table.commit_count

    def _write_chunks(self, rows: list[TableRow]) -> list[str]:
        self._chunk_count += 1
        return write_chunks(self._disk, f"{self.epoch:06d}-{self._chunk_count:08d}", rows)


def write_chunks(disk: Disk, name: str, rows: list[TableRow]) -> list[str]:
    """Writes two chunks if there are enough rows, so that the broker has to merge them; returns their names."""
    rows = sorted(rows, key=lambda row: (row.due, int(row.row["arrival"])))
    halves = [rows[::2], rows[1::2]] if len(rows) > 3 else [rows] if rows else []
    return [_write_chunk(disk, f"{name}-{number}", half) for number, half in enumerate(halves)]


def _write_chunk(disk: Disk, name: str, rows: list[TableRow]) -> str:
    index = np.zeros(len(rows), CHUNK_ROW)
    position = 0
    for place, (_, row, data) in enumerate(rows):
        for column in ("due", "arrival", "size", "queue", "tag_hash", "unique_hash", "key_hash"):
            index[column][place] = row[column]
        index["position"][place] = position
        index["flags"][place] = chunk.FLAG_OWN_ARRIVAL if row["arrival"] >= OWN else 0
        position += len(data)
    chunk.write(disk, name, index, b"".join(row.record for row in rows))
    return name


def _came_before(arrival: int, job: Job) -> bool:
    """Whether a message came before a job was asked for."""
    if arrival < OWN:
        return arrival < job.arrival
    return bool(job_of(arrival) < job.number) and job_of(arrival) not in job.loading


def selects(where: str, topic: str, key: str) -> bool:
    """Whether a predicate of the simulation matches: "topic=..." or "key=...", which is the first user key."""
    name, _, value = where.partition("=")
    return value == (topic if name == "topic" else key)


def _in_wheel(broker: Broker) -> list[TableRow]:
    """The messages in the wheel, read page by page."""
    rows: list[TableRow] = []
    place: tuple[int, int] | None = (-1, -1)
    while place is not None:
        page, place = broker.fold.wheel.page(place, 5)
        rows += [TableRow(-1, row, broker.fold.read(int(row["offset"]), int(row["size"]))) for row in page]
    return rows


def living(rows: list[TableRow]) -> list[TableRow]:
    """The messages among rows that none of the rows cancels or drops."""
    cancels = [row for row in rows if row.row["kind"] == CANCEL]
    messages = [row for row in without_drops(rows) if row.row["kind"] == MESSAGE]
    return [row for row in messages if not any(_cancels(each, row) for each in cancels)]


def without_drops(rows: list[TableRow]) -> list[TableRow]:
    """The rows that none of them drops."""
    gone = {(row.due, row.arrival) for row in rows if row.row["kind"] == DROP}
    return [row for row in rows if row.row["kind"] == CANCEL or (row.due, row.arrival) not in gone]


def _selected_rows(found: list[Found]) -> np.ndarray:
    rows = np.zeros(len(found), SELECTED)
    for index, each in enumerate(found):
        for name in ("due", "arrival", "unique_hash", "key_hash", "queue"):
            rows[name][index] = each.row.row[name]
        rows["flags"][index] = NEAR if each.is_near else 0
    return rows


def _postponed_row(row: TableRow, by_ms: int, own: int) -> TableRow:
    """A message with its new due."""
    moved = np.zeros(1, FAR)[0]
    for name in ("unique_hash", "key_hash", "size", "queue", "tag_hash"):
        moved[name] = row.row[name]
    moved["due"], moved["arrival"], moved["kind"] = row.due + by_ms, own, MESSAGE
    return TableRow(-1, moved, row.record)


def _drop_row(job: Job, due: int, arrival: int) -> TableRow:
    dropped = np.zeros(1, FAR)[0]
    dropped["due"], dropped["arrival"], dropped["kind"] = due, arrival, DROP
    return TableRow(job.far, dropped, b"")


def _dropped_by_move(number: int, move: np.void) -> TableRow:
    """The row of a move, as the table has it: it takes one message away."""
    dropped = np.zeros(1, FAR)[0]
    dropped["due"], dropped["arrival"], dropped["kind"] = move["due"], move["unique_hash"], DROP
    return TableRow(number, dropped, b"")


def _cancels(cancel: TableRow, row: TableRow) -> bool:
    named = json.loads(records.decode(cancel.record).body)
    is_earlier = came_before(row.arrival, cancel.arrival, int(cancel.row["tag_hash"]))
    return is_earlier and row.due == cancel.due and _is_named(row, named)


def _is_named(row: TableRow, named: Mapping[str, object]) -> bool:
    """Whether a message has the topic and key that a cancel names."""
    properties = records.properties_of(row.record)
    key = properties.get(PROPERTY_UNIQ_KEY) if named["by"] == "unique" else _first_key(row.record)
    return bool(key == named["key"] and records.topic_of(row.record) == named["topic"])


def _first_key(record: bytes) -> str:
    return first_key(records.properties_of(record).get(PROPERTY_KEYS, ""))

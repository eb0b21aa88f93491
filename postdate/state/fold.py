"""The fold: everything the broker knows, as a function of the durable log alone.

`apply` takes one batch after another: it fires everything due at or before the batch's instant, then applies the
batch's records as stored at that instant. The live path and a replay call the same function, so they cannot differ.
It reads no clock, no setting and nothing that the log does not determine; a replica would be the same fold over a
copied log.

Each table has a module of its own; those that work on several tables (cancels, jobs, leases) get them when the fold is
made, so a snapshot fills all of them in place.

Small batches go row by row, because a numpy call costs as much as a dozen rows; large ones go by columns. Nothing here
fails for reasons of the world: rows that cannot be written to their files stay in memory (rows.py).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np

from postdate.keys import key_hash
from postdate.message import (
    ONCE_WINDOW_BYTES,
    PROPERTY_KEYS,
    PROPERTY_MOVED,
    PROPERTY_UNIQ_KEY,
    Ended,
    MovedFrom,
    once_window_ms,
    other_keys,
)
from postdate.state.cancels import CancelAnswer, CancelledKeys, Cancels
from postdate.state.columns import (
    Grouped,
    add,
    counts,
    entries_of,
    far_rows_of,
    key_rows_of,
    singles_of,
    subtract,
)
from postdate.state.far import BLOCK_ROWS_DEFAULT, Far, Rescue
from postdate.state.groups import Groups
from postdate.state.index import KEYS_MAX, Index
from postdate.state.jobs import ATTEMPTS, DECIDE, Job, JobAnswer, Jobs
from postdate.state.leases import NOT_GIVEN, Leases
from postdate.state.moves import Moves
from postdate.state.once import Once
from postdate.state.quotas import Quotas
from postdate.state.references import References
from postdate.state.topics import GONE, SCHEDULE_TOPIC, Topics
from postdate.state.transactions import CHECK, GIVE_UP, Half, Transactions
from postdate.state.values import Values
from postdate.state.wheel import CANCELLED, ELSEWHERE, LIVING, Due, Run, Waiting, Wheel
from postdate.storage import record as records
from postdate.storage.batch import (
    ACK,
    CANCEL,
    COMMIT,
    GROUP,
    HALF,
    INVISIBLE,
    JOB,
    MESSAGE,
    MORE_KEYS,
    MOVE,
    OFFSETS,
    PIPELINE,
    POP,
    RESCUE,
    SETTINGS,
    STAGE,
    TOPIC,
    TRANSACTION,
    VALUE,
    Batch,
)
from postdate.storage.chunk import CHUNK_BIT, FLAG_OWN_ARRIVAL, Chunk, Chunks, Records
from postdate.storage.disk import Disk
from postdate.storage.layout import ENTRY_STRUCT, FAR_STRUCT, ONCE_ROW, ONCE_ROW_STRUCT, ROW_STRUCT, SINGLE_STRUCT
from postdate.storage.queue import Queue
from postdate.storage.rows import Rows
from postdate.storage.selection import Selections

ROWS_BY_COLUMN_DEFAULT = 64
SCHEDULE_QUEUES = 18
WAITS = -1  # answer for a message that is not in its queue yet
NOT_MOVED = -2  # answer for a move of a message that waits no more, or not there
LEAD_MS_DEFAULT = 60_000


# What applying a batch came to: one answer per row (for a message its queue offset, or WAITS), the numbers of the
# queues that got entries, and the (group, queue number) that have messages ready again, because leases ended. A plain
# tuple: making a named one would be a tenth of what applying a lone message costs.
Applied = tuple[list[Any], AbstractSet[int], AbstractSet[tuple[str, int]]]
NO_QUEUES: AbstractSet[int] = frozenset()
NO_PLACES: AbstractSet[tuple[str, int]] = frozenset()


class StageAnswer(NamedTuple):
    """Whether a stage was accepted, and the reason where it was not."""

    accepted: bool
    reason: str
    message_count: int = 0  # that it brought into the wheel


Counts = Iterable[tuple[int, int]]


class Tally(NamedTuple):
    """How many messages by queue and records by segment the far rows start..stop-1 hold."""

    start: int
    stop: int
    queues: dict[int, int]
    segments: dict[int, int]


class Fold:
    """The state of the broker. `read` gives the bytes of a record in the log by its offset, empty where it is gone."""

    def __init__(
        self,
        disk: Disk,
        read: Callable[[int, int], bytes],
        segment_shift: int,
        file_rows: int,
        tail_rows: int,
        *,
        far_block_rows: int = BLOCK_ROWS_DEFAULT,
        rows_by_column: int = ROWS_BY_COLUMN_DEFAULT,
        once_ids_max: int = 1,
        count_seconds: bool = False,
    ) -> None:
        self.disk = disk
        self._read = read
        self._shift = segment_shift
        self.file_rows, self.tail_rows = file_rows, tail_rows
        self._rows_by_column = rows_by_column
        self._count_seconds = count_seconds
        self.position = 0  # everything before it is applied
        self.last_offset = -1  # where the last batch that is applied begins
        self.at_ms = 0  # of the last batch
        self.fired_at_ms = 0  # everything due by then has been fired
        self.lead_ms = LEAD_MS_DEFAULT
        # The tables.
        self.topics = Topics()
        self.groups = Groups()
        self.values = Values()
        self.queues: list[Queue] = []  # by number
        self.near: list[int] = []  # by number: messages for that queue in the wheel
        self.untaken: list[int] = []  # by number: messages for it in the far queue, neither taken nor rescued
        self.wheel = Wheel()
        self.far = Far(disk, file_rows, tail_rows, far_block_rows)
        self.index = Index(disk, file_rows)
        self.once = Once(disk, file_rows, tail_rows, once_ids_max)
        self.chunks = Chunks(disk)
        self.chunk_end = CHUNK_BIT  # where the next chunk's offsets begin
        self.selections = Selections(disk)
        self.quotas = Quotas()
        self.references = References(self.chunks, segment_shift)
        self.leases = Leases(self.references)
        self.transactions = Transactions(self.references)
        # A record's bytes, from the log or a chunk; empty where it is gone.
        stored = Records(read, self.chunks)
        self.read = stored.read
        self.jobs = Jobs(self.wheel, self.far, self.topics, self.selections, self.references, self.near)
        self.cancels = Cancels(self.wheel, self.far, self.topics, self.jobs, self.references, stored, self.near)
        self.moves = Moves(self.wheel, self.jobs, self.cancels)
        self.rescued_count = 0
        self.tally: Tally | None = None  # of the rows that the next stage takes, counted before it comes
        self._grown: set[int] = set()  # numbers of the queues that got entries from the batch that is being applied
        self._handlers: dict[int, Callable[[Batch, tuple[int, ...]], Any]] = {
            MESSAGE: self._apply_message, CANCEL: self._apply_cancel, STAGE: self._apply_stage,
            RESCUE: self._apply_rescue, TOPIC: self._apply_topic, GROUP: self._apply_group,
            OFFSETS: self._apply_offsets, SETTINGS: self._apply_settings, PIPELINE: self._apply_pipeline,
            POP: self._apply_pop, ACK: self._apply_ack, INVISIBLE: self._apply_invisible, JOB: self._apply_job,
            MOVE: self._apply_move, HALF: self._apply_half, COMMIT: self._apply_commit,
            TRANSACTION: self._apply_transaction, VALUE: self._apply_value,
        }  # fmt: skip
        self.topics.put(SCHEDULE_TOPIC, SCHEDULE_QUEUES, SCHEDULE_QUEUES, 6, {})
        self.make_queues()

    def make_queues(self) -> None:
        """Makes a queue for every number that has none."""
        for number in range(len(self.queues), len(self.topics.places)):
            self.queues.append(Queue(self.disk, number, self.file_rows, self.tail_rows))
            self.near.append(0)
            self.untaken.append(0)

    def all_rows(self) -> Iterator[Rows]:
        for queue in self.queues:
            yield from queue.rows()
        yield self.far.rows
        yield self.index.rows
        yield self.once.rows

    # -- applying -----------------------------------------------------------------------------------------------

    def apply(self, batch: Batch) -> Applied:
        """Applies the next batch and returns what it came to."""
        assert batch.offset >= self.position, f"batch {batch.offset} is applied already, the fold is at {self.position}"
        at_ms = self.at_ms = batch.at_ms
        self.references.batch_end = batch.end
        if self.wheel.next_due_at_ms <= at_ms:
            self._fire(at_ms)
        ready = self.leases.end_due(at_ms) if self.leases.next_at_ms <= at_ms else NO_PLACES
        if at_ms > self.fired_at_ms:
            self.fired_at_ms = at_ms
            self.cancels.forget_fired(at_ms)
            self.quotas.forget_passed(at_ms)
        if self.once.next_until_ms <= at_ms:
            for offset in self.once.forget_passed(at_ms, batch.row_count):
                self.references.forget(offset)
        rows = batch.array() if batch.row_count >= self._rows_by_column else None
        if rows is not None and (rows["kind"] == MESSAGE).all():
            answers = self._apply_messages(batch, rows)
        else:
            handlers = self._handlers
            answers = [handlers[row[0]](batch, row) for row in ROW_STRUCT.iter_unpack(batch.rows)]
        if self.leases.next_at_ms <= at_ms:  # a lease of no length, made by this batch: it is given again at once
            ready = ready | self.leases.end_due(at_ms)
        seen, segment = self.references.seen, batch.offset >> self._shift
        if at_ms > seen.get(segment, 0):
            seen[segment] = at_ms
        self.position, self.last_offset = batch.end, batch.offset
        if not self._grown:
            return answers, NO_QUEUES, ready
        grown, self._grown = self._grown, set()
        return answers, grown, ready

    def _apply_message(self, batch: Batch, row: tuple[int, ...]) -> int:
        _, level, flags, queue, due, unique_hash, first_hash, tag_hash, size, position, once_hash = row
        offset = batch.offset + position
        if unique_hash or first_hash:
            self.index.add(unique_hash, first_hash, offset)
            if flags & MORE_KEYS:
                self.index.add_others(self._other_hashes(offset, size), offset)
        if level:
            self.queues[self._level_number(level)].push(ENTRY_STRUCT.pack(offset, size, due), batch.at_ms)
        if due <= batch.at_ms:
            answer = self._append_entry(queue, offset, size, tag_hash, batch.at_ms)
            if once_hash:
                self._note_once(once_hash, size, offset, 0, answer, batch.at_ms)
            return answer
        if once_hash:
            self._note_once(once_hash, size, offset, due, WAITS, batch.at_ms)
        held, segment = self.references.held, offset >> self._shift
        held[segment] = held.get(segment, 0) + 1
        if self._count_seconds:
            self.quotas.add(due, self.topics.places[queue][0])
        if due <= batch.at_ms + self.lead_ms or due <= self.far.horizon_at_ms:
            self.near[queue] += 1
            self.wheel.add(due, SINGLE_STRUCT.pack(offset, size, queue, tag_hash, unique_hash, first_hash))
        else:
            self.untaken[queue] += 1
            self.far.push(
                FAR_STRUCT.pack(offset, due, unique_hash, first_hash, size, queue, tag_hash, MESSAGE, level, 0), due
            )
        return WAITS

    def _append_entry(self, queue: int, offset: int, size: int, tag_hash: int, at_ms: int) -> int:
        """Appends one entry to the queue it goes to now."""
        target = self.topics.target[queue]
        if target == GONE:
            return WAITS
        shown = self.queues[target]
        self._grown.add(target)
        shown.push(ENTRY_STRUCT.pack(offset, size, tag_hash), at_ms)
        return shown.length - 1

    def _other_hashes(self, offset: int, size: int) -> list[int]:
        """Hashes of the user keys after the first one, which a row has no room for."""
        keys = records.properties_of(self._read(offset, size)).get(PROPERTY_KEYS, "")
        return [key_hash(key) for key in other_keys(keys)[: KEYS_MAX - 1]]

    def _note_once(self, once_hash: int, size: int, offset: int, due: int, answer: int, at_ms: int) -> None:
        """Remembers the id of a message, and what its producer is answered."""
        end = offset + size
        until_ms = at_ms + once_window_ms(self._read(end - ONCE_WINDOW_BYTES, ONCE_WINDOW_BYTES))
        self.once.add(once_hash, until_ms, ONCE_ROW_STRUCT.pack(once_hash, size, until_ms, offset, due, answer))
        self.references.hold(offset)

    def _note_many_once(self, batch: Batch, rows: np.ndarray, answers: np.ndarray) -> None:
        """Does what `_note_once` does for each row, by columns."""
        known, due = np.empty(len(rows), ONCE_ROW), rows["due"]
        known["hash"], known["size"] = rows["once_hash"], rows["size"]
        known["offset"] = rows["position"].astype(np.int64) + batch.offset
        known["due"], known["queue_offset"] = np.where(due > batch.at_ms, due, 0), answers
        # The batch is read once, and a window only where it is another one than that before it.
        data, windows, last, window_ms = self._read(batch.offset, batch.length), [], b"", 0
        for end in (rows["position"].astype(np.int64) + rows["size"]).tolist():
            text = data[end - ONCE_WINDOW_BYTES : end]
            if text != last:
                last, window_ms = text, once_window_ms(text)
            windows.append(window_ms)
        known["until_ms"] = np.array(windows) + batch.at_ms
        self.once.extend(known)
        self.references.hold_many(known["offset"])

    def _level_number(self, level: int) -> int:
        """The number of a level's queue in SCHEDULE_TOPIC_XXXX: its messages stand there, too, for RocketMQ's tools."""
        topic = self.topics.get(SCHEDULE_TOPIC)
        if level > len(topic.numbers):
            self.topics.put(SCHEDULE_TOPIC, level, level, topic.perm, topic.attributes)
            self.make_queues()
        return topic.numbers[level - 1]

    def _apply_messages(self, batch: Batch, rows: np.ndarray) -> list[Any]:
        """Does what `_apply_message` does for each row, by columns."""
        at_ms, due = batch.at_ms, rows["due"]
        offset = rows["position"].astype(np.int64) + batch.offset
        has_more = np.flatnonzero(rows["flags"] & MORE_KEYS).tolist()
        others = [self._other_hashes(int(offset[row]), int(rows["size"][row])) for row in has_more]
        self.index.extend(*key_rows_of(rows, offset, others))
        if rows["level"].any():
            self._index_levels(rows, offset, at_ms)
        now = due <= at_ms
        near = ~now & (due <= max(self.far.horizon_at_ms, at_ms + self.lead_ms))
        far = ~now & ~near
        answers = np.full(len(rows), WAITS, np.int64)
        if now.any():
            shown = self._append_entries(
                rows["queue"][now], offset[now], rows["size"][now], rows["tag_hash"][now], at_ms
            )
            answers[now] = shown.places(WAITS)
        self.references.hold_many(offset[~now])
        if self._count_seconds:
            for due_at_ms, queue in zip(due[~now].tolist(), rows["queue"][~now].tolist(), strict=True):
                self.quotas.add(due_at_ms, self.topics.places[queue][0])
        if near.any():
            add(self.near, rows["queue"][near])
            self.wheel.add_many(due[near], singles_of(rows[near], offset[near]))
        if far.any():
            add(self.untaken, rows["queue"][far])
            self.far.extend(far_rows_of(rows[far], offset[far]))
        is_once = rows["once_hash"] != 0
        if is_once.any():
            self._note_many_once(batch, rows[is_once], answers[is_once])
        return answers.tolist()

    def _index_levels(self, rows: np.ndarray, offset: np.ndarray, at_ms: int) -> None:
        for level, _ in counts(rows["level"]):
            if level:
                chosen = rows["level"] == level
                entries = entries_of(offset[chosen], rows["size"][chosen], rows["due"][chosen])
                self.queues[self._level_number(level)].extend(entries, at_ms)

    def _append_entries(
        self, queue: np.ndarray, offset: np.ndarray, size: np.ndarray, tag_hash: np.ndarray, at_ms: int
    ) -> Grouped:
        """Appends many entries, in order, to the queues they go to now."""
        grouped = Grouped(self.topics.target_array[queue])
        if grouped.order is not None:
            # Column by column: numpy takes rows of 20 bytes six times slower than three plain columns.
            offset, size, tag_hash = (
                np.ascontiguousarray(column)[grouped.order] for column in (offset, size, tag_hash)
            )
        entries = entries_of(offset, size, tag_hash)
        for number, start, stop in grouped.groups:
            if number != GONE:
                self._grown.add(number)
                grouped.first[number] = self.queues[number].length
                self.queues[number].extend(entries[start:stop], at_ms)
        return grouped

    # -- firing -------------------------------------------------------------------------------------------------

    def _fire(self, at_ms: int) -> None:
        """Appends everything due at or before `at_ms` to its queue, in (due, arrival) order."""
        for run in self.wheel.runs:
            if run.next_due <= at_ms:
                self.references.chunk_seen[run.base] = at_ms
        while self.wheel.next_due_at_ms <= at_ms:
            few = self.wheel.take_few(at_ms, self._rows_by_column)
            if few is None:
                for piece in self.wheel.take(at_ms):
                    self._fire_many(piece, at_ms)
            else:
                for _, queue, offset, size, tag_hash in few:
                    self._append_entry(queue, offset, size, tag_hash, at_ms)
                    self.near[queue] -= 1
                    self.references.release_segment(offset >> self._shift, 1, at_ms)

    def _fire_many(self, piece: Due, at_ms: int) -> None:
        self._append_entries(piece.queue, piece.offset, piece.size, piece.tag_hash, at_ms)
        subtract(self.near, piece.queue)
        in_log = piece.offset < CHUNK_BIT
        self.references.release_many(piece.offset if in_log.all() else piece.offset[in_log], at_ms)

    @property
    def next_at_ms(self) -> int:
        """When there is something to fire next: a message that is due, a lease that ends."""
        return min(self.wheel.next_due_at_ms, self.leases.next_at_ms)

    # -- moves --------------------------------------------------------------------------------------------------

    def _apply_move(self, batch: Batch, row: tuple[int, ...]) -> int:
        """Answers as for a message, or NOT_MOVED where it does not wait any more: then nothing has changed."""
        _, _, _, queue, _, unique_hash, first_hash, _, size, position, _ = row
        offset = batch.offset + position
        properties = records.properties_of(self._read(offset, size))
        source = MovedFrom.parse(properties[PROPERTY_MOVED])
        assert source is not None, f"the record at {offset} does not say where its message waited"
        topic, unique_key = self.topics.places[queue][0], properties[PROPERTY_UNIQ_KEY]
        # A message that came before its topic was created is of a deleted one of that name.
        is_there = self.topics.target[queue] != GONE and source.arrival >= self.topics.get(topic).born
        if not is_there or not self.moves.take(source, queue, unique_hash, first_hash, batch.at_ms):
            return NOT_MOVED
        answer = self._apply_message(batch, row)
        self.moves.remember(source, topic, unique_key, offset, size)
        return answer

    # -- transactions -------------------------------------------------------------------------------------------

    def _apply_half(self, batch: Batch, row: tuple[int, ...]) -> int:
        """Answers the number of the half."""
        _, _, _, queue, check_at_ms, unique_hash, _, _, size, position, _ = row
        number = self.transactions.opened_count
        half = Half(batch.offset + position, size, queue, number, unique_hash, batch.at_ms, check_at_ms)
        self.transactions.open(half)
        return number

    def _apply_commit(self, batch: Batch, row: tuple[int, ...]) -> Ended:
        """The message of a half comes, if the half is open; otherwise nothing has changed."""
        record = self._read(batch.offset + row[9], row[8])
        answer = self.transactions.end(records.prepared_offset_of(record), is_committed=True)
        if answer is Ended.COMMITTED:
            self._apply_message(batch, row)
        return answer

    def _apply_transaction(self, batch: Batch, row: tuple[int, ...]) -> Ended | None:
        """Answers how a half that is rolled back has ended."""
        body = self._body(batch, row)
        if body["call"] == CHECK:
            self.transactions.note_checked(body["halves"], body["again"])
        elif body["call"] == GIVE_UP:
            self.transactions.give_up(body["halves"], batch.at_ms)
        else:
            return self.transactions.end(body["half"], is_committed=False)
        return None

    # -- cancels ------------------------------------------------------------------------------------------------

    def _apply_cancel(self, batch: Batch, row: tuple[int, ...]) -> CancelAnswer:
        return self.cancels.apply(self._body(batch, row), batch.offset + row[9], row[8], batch.at_ms)

    def is_cancelled(self, row: np.ndarray) -> bool:
        """Whether a far message that waits, given as an array of its one far row, will never be shown."""
        return bool(self.cancels.find_far(row)[0] or self.jobs.find_taken(row)[0])

    def has_moved(self, due: int, arrival: int) -> bool:
        """Whether a move or a job has given the message of this due and arrival another due: it is there no more."""
        return self.cancels.has_moved(due, arrival) or self.jobs.has_moved(due, arrival)

    def waiting_far(self) -> Iterator[Waiting]:
        """What waits, untaken, in the far queue, without what is cancelled; of deleted topics, too. Piece by piece,
        some ms each; the fold may go on between two pieces, then the sum is of no one moment.
        """
        for rows in self.far.untaken_pieces():
            rows = rows[rows["kind"] == MESSAGE]
            rows = rows[~self.cancels.find_untaken(rows)]
            rows = rows[~self.jobs.find_taken(rows)]
            yield Waiting(rows["due"], rows["queue"], rows["size"])

    # -- far messages into the wheel ----------------------------------------------------------------------------

    def _apply_rescue(self, batch: Batch, row: tuple[int, ...]) -> int:
        """Moves far messages that wait into the wheel; answers how many."""
        body = self._body(batch, row)
        rows = self.far.rescue(Rescue(body["low"], body["high"], body["until"]), body["start"])
        # What Spark has taken is not held for it any more: it is held again while it is in the wheel.
        untaken = rows["arrival"] >= self.far.arrival_of(self.far.taken)
        is_message = rows["kind"] == MESSAGE
        subtract(self.untaken, rows["queue"][is_message & untaken])
        self.references.release_many(rows["arrival"][untaken], batch.at_ms)
        rows = rows[is_message]  # of a cancel, its tombstone does the rest
        self.references.touch_many(rows["arrival"])  # what may be cancelled is read below
        rows = rows[~self.cancels.find_far(rows) & ~self.jobs.find_taken(rows)]
        add(self.near, rows["queue"])
        self.references.hold_many(rows["arrival"])
        self.wheel.add_many(rows["due"], singles_of(rows, rows["arrival"]))
        self.rescued_count += len(rows)
        self.cancels.sweep()
        return len(rows)

    def _apply_stage(self, batch: Batch, row: tuple[int, ...]) -> StageAnswer:
        body = self._body(batch, row)
        reason = self.stage_problem(body)
        if reason:
            return StageAnswer(False, reason)
        chunks = [self.chunks.open(entry["name"]) for entry in body["chunks"]]  # may raise: before anything changes
        self._take_far(body["far"][1], batch.at_ms)
        count = 0
        if chunks:
            keys = self.cancels.keys_between(min(chunk.head.due_low_ms for chunk in chunks), body["horizon"][1])
            ahead = self.jobs.ahead_of(body["far"][1])
            for chunk in chunks:
                count += self._stage_chunk(chunk, keys, ahead, batch.at_ms)
        for number, _, until_ms in body.get("brought", ()):
            self.jobs.bring(number, until_ms, batch.end)
        self.far.take(body["far"][1], body["horizon"][1])
        self.far.rows_in = body["rows_in"]
        self.far.rows_out += body["rows_out"]
        self.jobs.follow_table(self.far.taken, batch.at_ms)
        self.cancels.forget_taken(self.far.taken, self.far.horizon_at_ms)
        self.cancels.sweep()
        self.jobs.forget_passed(min(self.far.horizon_at_ms, self.fired_at_ms))
        return StageAnswer(True, "", count)

    def stage_problem(self, body: dict[str, Any]) -> str:
        """Why a stage is refused; empty where it is accepted. Compare and set on epoch, taken and horizon, and on how
        far rows of jobs were brought.
        """
        far = self.far
        (far_from, far_to), (horizon_from, horizon_to) = body["far"], body["horizon"]
        if body["epoch"] != far.epoch:
            return f"epoch {body['epoch']} is not the current one ({far.epoch}): another pipeline has registered"
        if far_from != far.taken or horizon_from != far.horizon_at_ms:
            return (
                f"it starts at far {far_from} and horizon {horizon_from}, "
                f"the broker is at far {far.taken} and horizon {far.horizon_at_ms}"
            )
        if not far_from <= far_to <= far.length or horizon_to < horizon_from:
            return f"it ends at far {far_to} and horizon {horizon_to}; the far queue has {far.length} rows"
        if body["rows_in"] < far.rows_in or body["rows_out"] < 0:
            return (
                f"rows_in is {body['rows_in']} and rows_out {body['rows_out']}: {far.rows_in} rows came into the table "
                "before, and none comes back"
            )
        for number, from_ms, until_ms in body.get("brought", ()):
            if problem := self.jobs.bring_problem(number, from_ms, until_ms, horizon_to):
                return problem
        return ""

    def _take_far(self, until: int, at_ms: int) -> None:
        """Releases the records that Spark takes now: the log need not keep them for Spark any more."""
        start, tally = max(self.far.taken, self.far.rows.first), self.tally
        if tally is not None and tally.start == start and tally.stop <= until and not self.far.rescues:
            self._take(tally.queues.items(), tally.segments.items(), at_ms)
            start = tally.stop
        self.tally = None
        for rows in self.far.pieces(start, until):
            if self.far.rescues:
                rows = rows[~self.far.rescued(rows["arrival"], rows["due"])]
            self._take(*self._count_rows(rows), at_ms)

    def _take(self, queues: Counts, segments: Counts, at_ms: int) -> None:
        for queue, count in queues:
            self.untaken[queue] -= count
        for segment, count in segments:
            self.references.release_segment(segment, count, at_ms)

    def _count_rows(self, rows: np.ndarray) -> tuple[Counts, Counts]:
        """Counts messages by queue and records by segment."""
        queues, is_message = np.ascontiguousarray(rows["queue"]), rows["kind"] == MESSAGE
        by_queue = counts(queues if is_message.all() else queues[is_message])
        return by_queue, counts(rows["arrival"] >> self._shift)

    def count_far(self, start: int, stop: int) -> Tally:
        """Counts the far rows start..stop-1 that are not gone and in files. May run on another thread: rows do not
        change, and it looks at none of those in memory. Raises CorruptQueue, FileNotFoundError where retention removes
        some meanwhile.
        """
        start, stop = max(start, self.far.rows.first), min(stop, self.far.rows.stored)
        queues, segments = Counter[int](), Counter[int]()
        for rows in self.far.pieces(start, stop):
            by_queue, by_segment = self._count_rows(rows)
            queues.update(dict(by_queue))
            segments.update(dict(by_segment))
        return Tally(start, max(start, stop), queues, segments)

    def _stage_chunk(self, chunk: Chunk, keys: CancelledKeys, ahead: list[Job], at_ms: int) -> int:
        """Makes a chunk a run of the wheel; returns how many of its rows are to be fired."""
        index = chunk.index
        base = self.chunk_end
        self.chunk_end += (chunk.head.file_bytes + 7) & -8
        self.chunks.add(base, chunk)
        self.references.chunk_seen[base] = at_ms
        fate = np.zeros(len(index), np.uint8)
        if len(keys.dues):
            fate[self.cancels.find_staged(index, base, keys)] = CANCELLED
        if ahead:
            fate[self.jobs.find_taken_by(index, ahead)] = CANCELLED
        if self.far.rescues:
            elsewhere = self.far.rescued(index["arrival"], index["due"]) & (index["flags"] & FLAG_OWN_ARRIVAL == 0)
            fate[elsewhere] = ELSEWHERE
        if self.jobs.brought():
            fate[self.jobs.find_brought(index)] = ELSEWHERE
        # Brought together before they are counted: rows lie 56 bytes apart, and one pass over them is enough.
        queues = np.ascontiguousarray(index["queue"])
        living = queues[fate == LIVING] if fate.any() else queues
        add(self.near, living)
        self.wheel.stage(Run(base, index, 0, fate))
        return len(living)

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _apply_job(self, batch: Batch, row: tuple[int, ...]) -> JobAnswer:
        body, arrival, size = self._body(batch, row), batch.offset + row[9], row[8]
        if body["call"] in ATTEMPTS:
            return self.jobs.attempt(body, arrival, size, batch.at_ms)
        if body["call"] != DECIDE:
            return self.jobs.apply(body, arrival, size, batch.at_ms)
        answer = self.jobs.decide(body, arrival, size, batch.end)
        if answer.job is not None:
            for part in answer.job.parts:
                is_cancelled = self.cancels.find_selected(self.selections.rows(part.name))
                self.jobs.take_selected(answer.job, part, is_cancelled, batch.at_ms)
        return answer

    # -- the small tables ---------------------------------------------------------------------------------------

    def _apply_topic(self, batch: Batch, row: tuple[int, ...]) -> int:
        """Answers how many messages waited here for a topic that is deleted; the table knows of others."""
        body = self._body(batch, row)
        if body["op"] == "delete":
            topic = self.topics.delete(body["name"])
            self.groups.forget_topic(body["name"])
            self.leases.forget_queues(topic.numbers if topic else (), batch.at_ms)
            self.transactions.forget_queues(topic.numbers if topic else ())
            return sum(self.near[number] + self.untaken[number] for number in topic.numbers) if topic else 0
        self.topics.put(body["name"], body["read"], body["write"], body["perm"], body["attributes"], batch.offset)
        self.make_queues()
        return 0

    def _apply_group(self, batch: Batch, row: tuple[int, ...]) -> None:
        body = self._body(batch, row)
        if body["op"] == "delete":
            self.groups.delete(body["name"])
            self.leases.forget_group(body["name"], batch.at_ms)
        else:
            self.groups.put(body["name"], body["settings"])

    def _apply_offsets(self, batch: Batch, row: tuple[int, ...]) -> None:
        body = self._body(batch, row)
        for topic, queue_id, offset in body["offsets"]:
            self.groups.commit(body["group"], topic, queue_id, offset)

    def _apply_value(self, batch: Batch, row: tuple[int, ...]) -> None:
        body = self._body(batch, row)
        if body["op"] == "delete":
            self.values.delete(body["namespace"], body["key"])
        else:
            self.values.put(body["namespace"], body["key"], body["value"])

    # -- leases -------------------------------------------------------------------------------------------------

    def _apply_pop(self, batch: Batch, row: tuple[int, ...]) -> list[int]:
        """Answers how often each message was given before; NOT_GIVEN for those that a consumer has, or whose topic was
        deleted meanwhile.
        """
        body = self._body(batch, row)
        group, until_ms = body["group"], batch.at_ms + body["invisible_ms"]
        for number, offset in body["lost"]:
            self.leases.lose((group, number, offset), batch.at_ms)
        for topic, queue_id, offset in body["offsets"]:
            if topic in self.topics.by_name:
                self.groups.commit(group, topic, queue_id, offset)
        answers = []
        for number, offset, place, size, *tried in body["messages"]:
            key, times_max = (group, number, offset), body["times_max"] - sum(tried)
            if self.topics.target[number] == GONE or self.leases.is_leased(key):
                answers.append(NOT_GIVEN)
                continue
            lease = self.leases.give(
                key, batch.at_ms, until_ms, times_max, place, size,
                times=body.get("times", 0), reason=body.get("reason", ""),
            )  # fmt: skip
            answers.append(lease.times)
        return answers

    def _apply_ack(self, batch: Batch, row: tuple[int, ...]) -> list[bool]:
        """Answers for each message whether its handle was good."""
        body = self._body(batch, row)
        return [
            self.leases.acknowledge((body["group"], number, offset), popped_at_ms, batch.at_ms)
            for number, offset, popped_at_ms in body["messages"]
        ]

    def _apply_invisible(self, batch: Batch, row: tuple[int, ...]) -> bool:
        """Answers whether the handle was good."""
        body = self._body(batch, row)
        key = (body["group"], body["number"], body["offset"])
        if body.get("renewed"):
            return self.leases.renew(key, body["popped_at_ms"], batch.at_ms + body["invisible_ms"])
        return self.leases.change(
            key, body["popped_at_ms"], batch.at_ms, batch.at_ms + body["invisible_ms"],
            reason=body.get("reason", ""), is_begun=not body.get("not_begun"),
        )  # fmt: skip

    def _apply_settings(self, batch: Batch, row: tuple[int, ...]) -> None:
        self.lead_ms = self._body(batch, row)["lead_ms"]

    def _apply_pipeline(self, batch: Batch, row: tuple[int, ...]) -> int:
        """A pipeline registers: stages and decisions of older ones are refused from now on. Answers its epoch."""
        self.far.epoch += 1
        self.far.table = self._body(batch, row).get("table", "")  # a record of an earlier version has no table
        return self.far.epoch

    def _body(self, batch: Batch, row: tuple[int, ...]) -> Any:
        """The content of a system record."""
        return json.loads(records.decode(self._read(batch.offset + row[9], row[8])).body)

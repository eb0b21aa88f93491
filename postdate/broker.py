"""The broker: the fold on a log, as calls. Synchronous, no clock, no socket, no thread of its own.

    send, cancel, stage, ...   validate, write one batch, give a ticket
    flush                      makes all that was written durable (a server calls `log.flush` on another thread)
    settle                     applies what is durable: tickets get their answers, messages become visible
    advance                    fires what is due, rescues what Spark does not serve, says when to come back
    pull, search, ...          read what is visible

Instants come in as arguments, milliseconds of the caller's clock. A refused call has changed nothing. In flush mode "async"
a batch is applied as soon as it is written; what Spark may read and what a stage is told still waits for the disk.
"""

import enum
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from postdate import recovery
from postdate.config import Settings
from postdate.errors import (
    CorruptChunk,
    CorruptData,
    CorruptSnapshot,
    DiskFull,
    FlowControl,
    ForeignFolder,
    IllegalMessage,
    LogFailed,
    PostdateError,
    Refused,
    UsageError,
)  # fmt: skip
from postdate.far import Range, Rescue
from postdate.fold import CancelAnswer, Fold
from postdate.log import record as records
from postdate.log import snapshot
from postdate.log.batch import (
    ALIGNMENT,
    CANCEL,
    GROUP,
    KIND_NAMES,
    MESSAGE,
    OFFSETS,
    PIPELINE,
    RESCUE,
    ROW_STRUCT,
    SETTINGS,
    STAGE,
    TOPIC,
    Batch,
    batch_bytes,
    records_position,
)  # fmt: skip
from postdate.log.chunk import CHUNK_BIT, Chunk
from postdate.log.disk import Disk, LockedFolder
from postdate.log.log import Log
from postdate.log.queue import Queue
from postdate.log.segment import SegmentKeeper, Segments
from postdate.message import (
    LOOPBACK,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_UNIQ_KEY,
    DelayLevels,
    Host,
    Message,
    check_group,
    check_message,
    check_topic,
    decode_properties,
    due,
    first_key,
    key_hash,
    refuse_internal,
    tag_hash,
)  # fmt: skip
from postdate.tombstones import BY_COLUMN, Tombstone
from postdate.topics import SCHEDULE_TOPIC, Topic
from postdate.wheel import NEVER

FORMAT = 1
FORMAT_FILE = "FORMAT"
FIXED_SETTINGS = ("segment_bytes", "queue_file_rows", "far_block_rows")  # for the life of a folder
SYSTEM_TOPIC_PREFIX = "postdate_sys_"
_FILTER_ROWS = 2_048  # entries looked at by one pull that filters


class Cancelled(enum.Enum):
    """The truth about a cancel."""

    CANCELLED = "cancelled"  # it waited, and will never reach a consumer
    DELIVERED = "delivered"  # it was visible before the cancel came
    UNKNOWN = "unknown"  # no such message was found; should one arrive from the table, it is cancelled


class PullStatus(enum.Enum):
    FOUND = "found"
    NO_NEW = "no new message"
    NO_MATCH = "no message matches the filter"
    ILLEGAL_OFFSET = "offset outside the queue"


class Pulled(NamedTuple):
    """Records as a consumer reads them, and where to go on."""

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    records: list[bytes]


class Ticket:
    """The receipt of a written batch. `answers` is None until the batch is durable and applied."""

    __slots__ = ("_finish", "answers", "end", "offsets", "seconds", "timed")

    def __init__(self, end: int, offsets: list[int], finish: Callable[[Any], Any] | None = None) -> None:
        self.end = end  # durable when the log is durable up to here
        self.offsets = offsets  # of its records in the log
        self.answers: list[Any] | None = None
        self.timed = 0  # messages in it that will wait
        self.seconds: dict[tuple[int, str], int] = {}  # the same by (second of due time, topic), where that is limited
        self._finish = finish

    def settle(self, answers: list[Any]) -> None:
        self.answers = [self._finish(answer) for answer in answers] if self._finish else answers

    @property
    def answer(self) -> Any:
        """The answer of a batch of one. The broker must have settled it."""
        assert self.answers is not None, "the batch is not durable yet: flush and settle first"
        return self.answers[0]


class _Prepared(NamedTuple):
    """A validated message on its way into a batch."""

    message: Message
    topic: bytes
    size: int
    level: int
    queue: int
    due_at_ms: int
    unique_hash: int
    key_hash: int
    tag_hash: int


class Broker:
    """One open data folder. Raises FolderInUse, ForeignFolder, CorruptData on opening."""

    def __init__(self, disk: Disk, settings: Settings | None = None, store_host: Host = LOOPBACK) -> None:
        self.settings = settings or Settings()
        self._disk = disk
        self._store_host = store_host
        self._levels = DelayLevels.parse(self.settings.message_delay_level)
        self._topic_bytes: dict[str, bytes] = {}
        self._pending: deque[tuple[Batch, Ticket]] = deque()
        self._pending_at_ms = 0  # the latest instant of a pending batch
        self._pending_timed = 0
        self._pending_seconds: dict[tuple[int, str], int] = {}
        self._rescue_end = 0  # of the last rescue that was written
        self._async = self.settings.flush == "async"
        self.pipeline_alive = False
        self.fire_failures = 0
        self.fire_error: PostdateError | None = None
        self._failed_at_ms = self._retry_at_ms = 0
        self._kept: list[recovery.Kept] = []  # newest last
        self._damaged: list[int] = []  # snapshots that could not be used
        self._batches_since_snapshot = 0
        self._snapshot_running = False
        self._lock: LockedFolder = disk.lock()
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    # -- opening and closing ------------------------------------------------------------------------------------

    def _open(self) -> None:
        fixed = open_folder(self._disk, self.settings)
        self._segments = Segments(self._disk, fixed["segment_bytes"])
        self._segments.remove_unfinished()
        self.log = Log(self._disk, self._segments, self.settings.unflushed_bytes_max)
        self._batch_bytes_max = min(self.settings.batch_bytes_max, fixed["segment_bytes"])
        snapshot.remove_unfinished(self._disk)
        self.fold = self._loaded(fixed)
        recovery.cut_rows(self.fold)
        known_durable = max(snapshot.positions(self._disk), default=0)
        for batch in self.log.recovered(self.fold.position, known_durable):
            self.fold.apply(batch)
            self._batches_since_snapshot += 1
        for position in self._damaged:
            snapshot.remove(self._disk, position)  # it would count as one of the two that are kept
        self._move_first_entries()
        self._write_changed_settings()

    def start_keeper(self) -> None:
        """Has a helper thread zero the log's segments ahead of use, until the broker is closed."""
        self.log.keeper = SegmentKeeper(self._segments)

    def _loaded(self, fixed: dict[str, int]) -> Fold:
        """The fold of the newest good snapshot; a fresh one where the log goes back to its beginning."""
        problems: list[str] = []
        for position in snapshot.positions(self._disk):
            fold = self._fresh_fold(fixed)
            try:
                recovery.load(fold, snapshot.read(self._disk, position))
            except CorruptData as error:
                problems.append(str(error))
                self._damaged.append(position)
                continue
            self._kept = [recovery.kept_of(fold)]
            return fold
        if self.log.start > 0:
            raise CorruptSnapshot(
                f"no snapshot can be used ({'; '.join(problems) or 'there is none'}) and the log begins at {self.log.start}, "
                "not at 0: restore the folder 'snapshots' from a copy; nothing was changed"
            )
        return self._fresh_fold(fixed)

    def _fresh_fold(self, fixed: dict[str, int]) -> Fold:
        return Fold(
            self._disk,
            self.log.read,
            self._segments.shift,
            fixed["queue_file_rows"],
            self.settings.queue_tail_rows,
            far_block_rows=fixed["far_block_rows"],
            rows_by_column=self.settings.rows_by_column,
            count_seconds=self.settings.due_second_messages_max > 0,
        )

    def _write_changed_settings(self) -> None:
        """The lead decides what is near, so the log must know it."""
        if self.fold.lead_ms != self.settings.lead_ms:
            self._write_system(SETTINGS, {"lead_ms": self.settings.lead_ms}, self.fold.at_ms)
            self.flush()

    def close(self) -> None:
        """Takes a last snapshot, so that the next start replays nothing, and lets the folder go."""
        try:
            if self.log.failure is None:
                self.flush()
                for step in self.snapshot():
                    if step is not None:
                        step()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Lets the folder go as it is, like a crash does; the next start recovers."""
        self.log.close()
        self._lock.release()

    # -- sending ------------------------------------------------------------------------------------------------

    def send(self, messages: Sequence[Message], at_ms: int) -> Ticket:
        """Writes messages as one batch. A message's answer is its queue offset, or fold.WAITS while it waits.

        Raises IllegalMessage, TopicNotFound, FlowControl, DiskFull, LogFailed; then nothing of the batch was written.
        """
        if not messages:
            raise UsageError("a batch needs at least one message")
        prepared = [self._prepare(message, at_ms) for message in messages]
        timed = sum(1 for entry in prepared if entry.due_at_ms)
        seconds = self._admitted(prepared, timed) if timed else {}
        ticket = self._write_messages(prepared, at_ms)
        ticket.timed, ticket.seconds = timed, seconds
        self._pending_timed += timed
        for place, count in seconds.items():
            self._pending_seconds[place] = self._pending_seconds.get(place, 0) + count
        self._settle_async()
        return ticket

    def _prepare(self, message: Message, at_ms: int) -> _Prepared:
        check_message(message, self.settings.body_bytes_max, self.settings.properties_bytes_max)
        topic = self.fold.topics.get(message.topic)
        properties = decode_properties(message.properties)
        refuse_internal(properties)
        if PROPERTY_TIMER_DEL_UNIQKEY in properties:
            raise IllegalMessage(f"{PROPERTY_TIMER_DEL_UNIQKEY} marks a cancel, not a message: use cancel")
        due_at_ms, level = due(properties, at_ms, self._levels, self.settings.delay_ms_max)
        encoded = self._encoded_topic(message.topic)
        return _Prepared(
            message,
            encoded,
            records.record_bytes(message, encoded, self._store_host),
            level,
            self._queue_number(topic, message.queue_id),
            due_at_ms,
            key_hash(properties.get(PROPERTY_UNIQ_KEY, "")),
            key_hash(first_key(properties.get(PROPERTY_KEYS, ""))),
            tag_hash(properties.get(PROPERTY_TAGS, "")),
        )

    def _encoded_topic(self, name: str) -> bytes:
        encoded = self._topic_bytes.get(name)
        if encoded is None:
            if name == SCHEDULE_TOPIC or name.startswith(SYSTEM_TOPIC_PREFIX):
                raise IllegalMessage(f"topic {name!r} belongs to the broker")
            encoded = self._topic_bytes[name] = name.encode()
        return encoded

    def _queue_number(self, topic: Topic, queue_id: int) -> int:
        if not 0 <= queue_id < topic.write_queue_count:
            raise IllegalMessage(
                f"queue {queue_id} of topic {topic.name!r} does not exist: it has {topic.write_queue_count}"
            )
        return topic.numbers[queue_id]

    def _admitted(self, prepared: list[_Prepared], timed: int) -> dict[tuple[int, str], int]:
        """Flow control: the near tier lives in RAM, so it has a bound. Returns how many fall into which limited second."""
        limit = self.settings.wheel_entries_max
        if self.fold.wheel.count + self._pending_timed + timed > limit:
            raise FlowControl(
                f"wheel_entries_max: {self.fold.wheel.count} messages are due soon, the limit is {limit}; try later"
            )
        limit = self.settings.due_second_messages_max
        asked: dict[tuple[int, str], int] = {}
        for entry in prepared if limit else ():
            if entry.due_at_ms:
                place = (entry.due_at_ms // 1_000, entry.message.topic)
                asked[place] = asked.get(place, 0) + 1
        for (second, name), count in asked.items():
            waiting = self.fold.seconds.get(second, {}).get(name, 0) + self._pending_seconds.get((second, name), 0)
            if waiting + count > limit:
                raise FlowControl(
                    f"due_second_messages_max: topic {name!r} has {limit} messages due in second {second}, the limit; "
                    "choose another due time"
                )
        return asked

    def _write_messages(self, prepared: list[_Prepared], at_ms: int) -> Ticket:
        count = len(prepared)
        length = batch_bytes(count, sum(entry.size for entry in prepared))
        if length > self._batch_bytes_max:
            raise UsageError(f"the batch would have {length} bytes, batch_bytes_max is {self._batch_bytes_max}")
        start = self.log.place(length, at_ms, urgent=False)
        position = records_position(count)
        rows, bodies, offsets = [], [], []
        for message, topic, size, level, queue, due_at_ms, unique_hash, first_hash, tagged in prepared:
            offset = start + position
            rows.append(
                ROW_STRUCT.pack(MESSAGE, level, 0, queue, due_at_ms, unique_hash, first_hash, tagged, size, position, 0)
            )
            bodies.append(records.encode(message, topic, offset, at_ms, self._store_host))
            offsets.append(offset)
            position += size
        return self._append(start, at_ms, rows, bodies, length, Ticket(start + length, offsets))

    def _append(
        self, start: int, at_ms: int, rows: list[bytes], bodies: list[bytes], length: int, ticket: Ticket
    ) -> Ticket:
        body = b"".join((*rows, *bodies))
        padding = -(len(body) + start) % ALIGNMENT  # headers have a multiple of 8 bytes
        batch = self.log.append(start, at_ms, len(rows), body + bytes(padding) if padding else body)
        assert batch.length == length, f"a batch of {batch.length} bytes was planned with {length}"
        self._pending.append((batch, ticket))
        self._pending_at_ms = max(self._pending_at_ms, at_ms)
        return ticket

    def _write_system(
        self, kind: int, body: Mapping[str, Any], at_ms: int, finish: Callable[[Any], Any] | None = None
    ) -> Ticket:
        """Writes one record of a system topic. It may use the log's reserve."""
        text = json.dumps(body, separators=(",", ":")).encode()
        topic = SYSTEM_TOPIC_PREFIX + KIND_NAMES[kind]
        message = Message(topic, text, born_at_ms=at_ms)
        encoded = topic.encode()
        size = records.record_bytes(message, encoded, self._store_host)
        length = batch_bytes(1, size)
        if length > self._batch_bytes_max:
            raise UsageError(
                f"the {KIND_NAMES[kind]} record would have {length} bytes, batch_bytes_max is {self._batch_bytes_max}"
            )
        start = self.log.place(length, at_ms, urgent=True)
        position = records_position(1)
        row = ROW_STRUCT.pack(kind, 0, 0, -1, 0, 0, 0, 0, size, position, 0)
        data = records.encode(message, encoded, start + position, at_ms, self._store_host)
        ticket = Ticket(start + length, [start + position], finish)
        self._append(start, at_ms, [row], [data], length, ticket)
        self._settle_async()
        return ticket

    # -- durable and applied ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Makes everything written durable and applies it. Raises LogFailed."""
        self.log.flush()
        self.settle()

    def settle(self) -> int:
        """Applies the batches that are durable; returns how many. Called after `log.flush` ran on another thread."""
        limit = self.log.end if self._async else self.log.durable
        pending, settled = self._pending, 0
        while pending and pending[0][0].end <= limit:
            batch, ticket = pending.popleft()
            ticket.settle(self.fold.apply(batch))
            settled += 1
            if ticket.timed:
                self._forget_pending(ticket)
        if settled and not pending:
            self._pending_at_ms = 0
        self._batches_since_snapshot += settled
        return settled

    def _forget_pending(self, ticket: Ticket) -> None:
        self._pending_timed -= ticket.timed
        for place, count in ticket.seconds.items():
            left = self._pending_seconds[place] - count
            if left:
                self._pending_seconds[place] = left
            else:
                del self._pending_seconds[place]

    def _settle_async(self) -> None:
        if self._async:
            self.settle()

    # -- time ---------------------------------------------------------------------------------------------------

    def advance(self, at_ms: int) -> int:
        """Fires what is due at `at_ms` and rescues what Spark is not serving; returns when to come back.

        What it writes shows after the next flush, like everything. Raises DiskFull or LogFailed where it could not write:
        nothing is half done, `fire_error` says why, and it tries again after a growing pause (until then a call does nothing).
        """
        if self._failed_at_ms <= at_ms < self._retry_at_ms:
            return self._retry_at_ms
        self.settle()
        try:
            self._fire_if_due(at_ms)
            self._rescue_if_due(at_ms)
        except (DiskFull, LogFailed) as error:
            self._note_failure(error, at_ms)
            raise
        self.fire_failures, self.fire_error, self._retry_at_ms = 0, None, 0
        return self.wake_at_ms

    @property
    def wake_at_ms(self) -> int:
        """When `advance` has something to do next; wheel.NEVER where nothing waits."""
        return min(self.fold.wheel.next_due_at_ms, self._rescue_at_ms())

    def _rescue_at_ms(self) -> int:
        earliest = self.fold.far.earliest(untaken_only=self.pipeline_alive)
        if earliest == NEVER or self.fold.wheel.count >= self.settings.wheel_entries_max:
            return NEVER  # nothing to rescue, or no room before something has been fired
        return earliest - self.settings.lead_ms

    def _fire_if_due(self, at_ms: int) -> None:
        next_due = self.fold.wheel.next_due_at_ms
        # A pending batch of a later instant fires it when it is applied.
        if next_due <= at_ms and not (self._pending and self._pending_at_ms >= next_due):
            start = self.log.place(batch_bytes(0, 0), at_ms, urgent=True)
            length = batch_bytes(0, 0)
            self._append(start, at_ms, [], [], length, Ticket(start + length, []))
            self._settle_async()

    def _rescue_if_due(self, at_ms: int) -> None:
        """Asks for far messages that are due within the lead, or a little later, so that rescues are few."""
        if self.fold.position < self._rescue_end:
            return  # one is on its way
        for _ in range(self.settings.rescue_blocks_max):
            if self._rescue_at_ms() > at_ms:
                return
            rescues = self._planned_rescues(at_ms + self.settings.lead_ms + self.settings.rescue_step_ms)
            for rescue in rescues:
                body = {**rescue._asdict(), "start": self.log.start}
                self._rescue_end = self._write_system(RESCUE, body, at_ms).end
            if rescues:
                return

    def _planned_rescues(self, until: int) -> list[Rescue]:
        far = self.fold.far
        room = self.settings.wheel_entries_max - self.fold.wheel.count
        present = [Range(start, stop) for start, stop in self.log.ranges()]
        blocks_max = self.settings.rescue_blocks_max
        return far.plan_rescue(present, until, blocks_max, room, untaken_only=self.pipeline_alive)

    def _note_failure(self, error: PostdateError, at_ms: int) -> None:
        self.fire_failures += 1
        self.fire_error = error
        pause_ms = self.settings.fire_pause_ms_min << min(self.fire_failures - 1, 20)
        self._failed_at_ms, self._retry_at_ms = at_ms, at_ms + min(pause_ms, self.settings.fire_pause_ms_max)

    # -- cancelling ---------------------------------------------------------------------------------------------

    def cancel(self, topic: str, key: str, due_at_ms: int, at_ms: int, *, by: str = "unique") -> Ticket:
        """Cancels every message of that topic, key and due that arrived before. The answer is a Cancelled.

        `by` says which key is meant: "unique" (RocketMQ's UNIQ_KEY) or "key" (the first of KEYS).
        """
        self.fold.topics.get(topic)
        if not key or by not in BY_COLUMN:
            raise UsageError(f"a cancel needs a key and by='unique' or 'key', got key {key!r} and by={by!r}")
        if not 0 < due_at_ms < NEVER:
            raise UsageError(f"the due time of a cancel is {due_at_ms}, expected epoch milliseconds")
        if self.fold.tombstones.count >= self.settings.tombstones_max:
            raise FlowControl(
                f"tombstones_max: {self.fold.tombstones.count} cancels wait for their messages, the limit; try later"
            )
        body = {"topic": topic, "key": key, "by": by, "due": due_at_ms}
        return self._write_system(CANCEL, body, at_ms, self._cancel_truth)

    def _cancel_truth(self, answer: CancelAnswer) -> Cancelled:
        """Looks where a message may be, in the direction in which it moves."""
        tombstone = answer.tombstone
        if answer.wheel_count or self._found_far(tombstone):
            return Cancelled.CANCELLED
        if tombstone.due <= self.fold.fired_at_ms and self._found_delivered(tombstone):
            return Cancelled.DELIVERED
        return Cancelled.UNKNOWN

    def _found_far(self, tombstone: Tombstone) -> bool:
        rows = self.fold.far.find_untaken(tombstone.due, tombstone.column, tombstone.key_hash, tombstone.far_before)
        places = zip(rows["arrival"].tolist(), rows["size"].tolist(), rows["kind"].tolist(), strict=True)
        return any(kind == MESSAGE and self.fold.matches(tombstone, offset, size) for offset, size, kind in places)

    def _found_delivered(self, tombstone: Tombstone) -> bool:
        """Looks through what became visible from the due instant on; gives up (unknown) at a bound."""
        budget = self.settings.delivered_search_entries
        for number in self.fold.topics.get(tombstone.topic).numbers:
            queue = self.fold.queues[number]
            start = queue.search(tombstone.due)
            for offset, size, _ in queue.entries.read(start, start + budget).tolist():
                if self._is_delivered(tombstone, offset, size):
                    return True
                budget -= 1
        return False

    def _is_delivered(self, tombstone: Tombstone, offset: int, size: int) -> bool:
        if not self.fold.matches(tombstone, offset, size):
            return False
        record = records.decode(self.fold.read(offset, size))
        properties = decode_properties(record.properties)
        return due(properties, record.stored_at_ms, self._levels, NEVER).at_ms == tombstone.due

    # -- Spark --------------------------------------------------------------------------------------------------

    def register_pipeline(self, at_ms: int) -> Ticket:
        """A pipeline begins; the answer is its epoch. Stages of older ones are refused from then on."""
        return self._write_system(PIPELINE, {}, at_ms)

    def read_far(self, start: int, count: int) -> np.ndarray:
        """Rows of the far queue (far.FAR) that are durable, from number `start` on."""
        if start < 0 or count < 0:
            raise UsageError(f"far rows {start} and {count} of them: neither may be negative")
        rows = self.fold.far.rows.read(start, start + count)
        return rows[rows["arrival"] < self.log.durable]

    def stage(
        self,
        epoch: int,
        far: tuple[int, int],
        horizon: tuple[int, int],
        chunks: Sequence[str],
        at_ms: int,
    ) -> None:
        """Takes uploaded chunks into the wheel and moves taken and horizon, durable on return.

        Raises Refused for a stage that is stale, repeated or overtaken; CorruptChunk for a file that is not whole.
        """
        self.flush()
        staged = self.fold.chunks.names()
        repeated = [name for name in chunks if chunks.count(name) > 1 or name in staged]
        if repeated:
            raise Refused(f"the stage is refused: chunk {repeated[0]} is staged already, or named twice")
        checked = [self._checked_chunk(name, horizon[1]) for name in chunks]
        body = {"epoch": epoch, "far": far, "horizon": horizon, "chunks": checked}
        problem = self.fold.stage_problem(body)
        if problem:
            raise Refused(f"the stage is refused: {problem}")
        ticket = self._write_system(STAGE, body, at_ms)
        self.flush()
        assert ticket.answer.accepted, f"a stage that was checked is refused: {ticket.answer.reason}"

    def _checked_chunk(self, name: str, horizon_to: int) -> dict[str, Any]:
        if not name or "/" in name or name.startswith("."):
            raise UsageError(f"chunk name {name!r} is no file name")
        chunk = Chunk(self._disk, name)
        chunk.verify()
        if chunk.head.due_high_ms > horizon_to:
            raise CorruptChunk(
                f"chunk {name} has a row due at {chunk.head.due_high_ms}, behind the horizon {horizon_to}"
            )
        numbers = chunk.index["queue"]
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < len(self.fold.queues)):
            raise CorruptChunk(f"chunk {name} has a row for queue number {int(numbers.max())}, which never existed")
        return {"name": name, "count": chunk.head.row_count}

    # -- topics, groups, offsets --------------------------------------------------------------------------------

    def put_topic(
        self,
        name: str,
        at_ms: int,
        *,
        read_queue_count: int = 8,
        write_queue_count: int = 8,
        perm: int = 6,
        attributes: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a topic or changes it; durable on return."""
        check_topic(name)
        self._encoded_topic(name)
        for label, count in (("read_queue_count", read_queue_count), ("write_queue_count", write_queue_count)):
            if not 1 <= count <= self.settings.topic_queues_max:
                raise UsageError(
                    f"{label} of topic {name!r} is {count}, expected 1 to {self.settings.topic_queues_max}"
                )
        if not 0 <= perm <= 7:
            raise UsageError(f"perm of topic {name!r} is {perm}, expected 0 to 7")
        if name not in self.fold.topics.by_name and len(self.fold.topics.by_name) > self.settings.topics_max:
            raise FlowControl(f"topics_max: there are {self.settings.topics_max} topics, the limit; delete some first")
        body = {"op": "put", "name": name, "read": read_queue_count, "write": write_queue_count, "perm": perm}
        self._write_system(TOPIC, {**body, "attributes": dict(attributes or {})}, at_ms)
        self.flush()

    def delete_topic(self, name: str, at_ms: int) -> int:
        """Deletes a topic and cancels what waits for it; durable on return. Returns how many waited in wheel and far queue."""
        self.fold.topics.get(name)
        self._encoded_topic(name)
        already_cancelled = sum(1 for _ in self._cancelled_far(name))
        ticket = self._write_system(TOPIC, {"op": "delete", "name": name}, at_ms)
        self.flush()
        return int(ticket.answer) - already_cancelled

    def _cancelled_far(self, topic: str) -> Iterator[int]:
        """Messages of a topic in the far queue that a tombstone has cancelled but that nobody has met yet."""
        seen = set()
        numbers = self.fold.topics.get(topic).numbers
        for tombstone in self.fold.tombstones.between(0, NEVER):
            if tombstone.topic != topic:
                continue
            rows = self.fold.far.find_untaken(tombstone.due, tombstone.column, tombstone.key_hash, tombstone.far_before)
            rows = rows[np.isin(rows["queue"], numbers) & (rows["kind"] == MESSAGE)]
            for offset, size in zip(rows["arrival"].tolist(), rows["size"].tolist(), strict=True):
                if offset not in seen and self.fold.matches(tombstone, offset, size):
                    seen.add(offset)
                    yield offset

    def put_group(self, name: str, settings: Mapping[str, Any], at_ms: int) -> None:
        check_group(name)
        self._write_system(GROUP, {"op": "put", "name": name, "settings": dict(settings)}, at_ms)
        self.flush()

    def delete_group(self, name: str, at_ms: int) -> None:
        check_group(name)
        self._write_system(GROUP, {"op": "delete", "name": name}, at_ms)
        self.flush()

    def commit_offsets(self, group: str, offsets: Sequence[tuple[str, int, int]], at_ms: int) -> Ticket:
        """Commits (topic, queue id, offset) for a group."""
        check_group(group)
        for topic, queue_id, offset in offsets:
            self._queue(topic, queue_id)
            if offset < 0:
                raise UsageError(f"offset {offset} of group {group!r} for queue {queue_id} of {topic!r} is negative")
        return self._write_system(OFFSETS, {"group": group, "offsets": [list(entry) for entry in offsets]}, at_ms)

    # -- reading ------------------------------------------------------------------------------------------------

    def _queue(self, topic: str, queue_id: int) -> Queue:
        found = self.fold.topics.get(topic)
        if not 0 <= queue_id < len(found.numbers):
            raise UsageError(f"queue {queue_id} of topic {topic!r} does not exist: it has {len(found.numbers)}")
        return self.fold.queues[found.numbers[queue_id]]

    def offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The smallest offset that is not gone, and the next one that will be given."""
        queue = self._queue(topic, queue_id)
        return queue.first, queue.length

    def search(self, topic: str, queue_id: int, at_ms: int) -> int:
        """The first offset that became visible at or after an instant; the max offset where none did."""
        queue = self._queue(topic, queue_id)
        return max(queue.search(at_ms), queue.first)

    def pull(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        tag_hashes: frozenset[int] | None = None,
    ) -> Pulled:
        """Reads visible messages from an offset on, at least one if there is one, as their consumer reads them.

        Messages whose record is gone (retention) are passed over.
        """
        queue = self._queue(topic, queue_id)
        low, high = queue.first, queue.length
        if count_max < 1:
            raise UsageError(f"count_max is {count_max}, expected at least 1")
        if offset == high:
            return Pulled(PullStatus.NO_NEW, offset, low, high, [])
        if not low <= offset < high:
            return Pulled(PullStatus.ILLEGAL_OFFSET, low if offset < low else high, low, high, [])
        found, next_offset = self._collect(queue, queue_id, offset, count_max, bytes_max, tag_hashes)
        return Pulled(PullStatus.FOUND if found else PullStatus.NO_MATCH, next_offset, low, high, found)

    def _collect(
        self,
        queue: Queue,
        queue_id: int,
        offset: int,
        count_max: int,
        bytes_max: int,
        tag_hashes: frozenset[int] | None,
    ) -> tuple[list[bytes], int]:
        stop = min(offset + (_FILTER_ROWS if tag_hashes else count_max), queue.length)
        entries = queue.entries.read(offset, stop).tolist()
        visible_at = queue.visible_at_ms(offset, stop).tolist()
        read, total = self.fold.read, 0
        found: list[bytes] = []
        own_id = queue_id.to_bytes(4, "big")
        for index, (place, size, tag) in enumerate(entries):
            if tag_hashes and tag not in tag_hashes:
                continue
            data = read(place, size)
            if not data:
                continue
            if len(found) == count_max or (found and total + size > bytes_max):
                return found, offset + index
            if data[12:16] != own_id:
                data = data[:12] + own_id + data[16:]  # its queue is gone: it came here instead
            found.append(records.delivered(data, offset + index, place, visible_at[index]))
            total += size
        return found, stop

    # -- snapshots and retention --------------------------------------------------------------------------------

    @property
    def snapshot_is_due(self) -> bool:
        """Whether a crash now would have to replay more than the settings want."""
        base = self._kept[-1].position if self._kept else 0
        return (
            self.fold.position - base >= self.settings.snapshot_bytes
            or self._batches_since_snapshot >= self.settings.snapshot_batches
        )

    def snapshot(self) -> Iterator[recovery.Step]:
        """Takes a snapshot in small steps, see recovery.take. The caller goes on working between the steps."""
        if self._snapshot_running:
            raise UsageError("a snapshot is being taken already")
        kept = recovery.kept_of(self.fold)
        if self._kept and self._kept[-1].position == kept.position:
            return
        self._snapshot_running = True
        self._batches_since_snapshot = 0
        try:
            yield from recovery.take(self._disk, self.fold, self.log.flush)
            self._kept = [*self._kept, kept][-snapshot.KEPT :]
        finally:
            self._snapshot_running = False

    def retain(self, at_ms: int) -> int:
        """Removes segments and chunks that nobody needs any more; returns how many files.

        A replay from the older snapshot must find every record that waited when that snapshot was taken.
        """
        if len(self._kept) < snapshot.KEPT:
            return 0
        older = self._kept[0]
        segments = [number for number in self.log.segment_numbers() if self._segment_may_go(number, older, at_ms)]
        for number in segments:
            self.log.remove_segment(number)
            self.fold.seen.pop(number, None)
        chunks = [base for base in self.fold.chunks.bases() if self._chunk_may_go(base, older, at_ms)]
        for base in chunks:
            self.fold.chunks.remove(base)
            self.fold.chunk_seen.pop(base, None)
        if segments or chunks:
            self._move_first_entries()
            gone = self.fold.far.rows.search("arrival", self.log.start, "left")
            self.fold.far.drop(min(gone, older.taken))
        return len(segments) + len(chunks)

    def _segment_may_go(self, number: int, older: recovery.Kept, at_ms: int) -> bool:
        return (
            self.log.segment_end(number) <= older.position
            and number not in self.fold.held
            and number not in older.held
            and self.fold.seen.get(number, 0) + self.settings.retention_ms <= at_ms
        )

    def _chunk_may_go(self, base: int, older: recovery.Kept, at_ms: int) -> bool:
        waiting = any(run.base == base for run in self.fold.wheel.runs)
        return (
            not waiting
            and base not in older.waiting_chunks
            and base < older.chunk_end
            and self.fold.chunk_seen.get(base, 0) + self.settings.retention_ms <= at_ms
        )

    def _move_first_entries(self) -> None:
        """Moves the beginning of each queue to its first entry whose record is there."""
        present = np.array(self.log.segment_numbers(), np.int64)
        for queue in self.fold.queues:
            first = self._first_live(queue, present)
            if first > queue.first:
                queue.drop(first)

    def _first_live(self, queue: Queue, present: np.ndarray) -> int:
        first = queue.first
        while first < queue.length:
            offsets = queue.entries.read(first, first + _FILTER_ROWS)["offset"]
            live = np.isin(offsets >> self._segments.shift, present)
            live |= [offset >= CHUNK_BIT and self.fold.chunks.holds(offset) for offset in offsets.tolist()]
            if live.any():
                return first + int(live.argmax())
            first += len(offsets)
        return first


def open_folder(disk: Disk, settings: Settings) -> dict[str, int]:
    """Reads, or writes into an empty folder, what is fixed for a folder's life. Raises ForeignFolder."""
    names = [name for name in disk.list("") if name not in ("LOCK", FORMAT_FILE + ".new")]
    if FORMAT_FILE in names:
        return _read_format(disk)
    if names:
        raise ForeignFolder(
            f"the folder holds {names[0]!r} but no file {FORMAT_FILE}: it is not a Postdate folder; give the broker an empty one"
        )
    fixed = {"format": FORMAT} | {name: getattr(settings, name) for name in FIXED_SETTINGS}
    disk.write(FORMAT_FILE + ".new", 0, json.dumps(fixed).encode())
    disk.sync(FORMAT_FILE + ".new")
    disk.rename(FORMAT_FILE + ".new", FORMAT_FILE)
    disk.sync_folder("")
    return fixed


def _read_format(disk: Disk) -> dict[str, int]:
    text = disk.read(FORMAT_FILE, 0, 4_096)
    try:
        fixed = json.loads(text)
        found = {name: int(fixed[name]) for name in ("format", *FIXED_SETTINGS)}
    except (ValueError, KeyError, TypeError) as error:
        raise ForeignFolder(f"the file {FORMAT_FILE} is not readable ({error}): restore it from a copy") from error
    if found["format"] > FORMAT:
        raise ForeignFolder(
            f"the folder has format {found['format']}, this program knows up to {FORMAT}: it was written by a newer Postdate, use that"
        )
    return found

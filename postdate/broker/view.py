"""The view: every question about the state that changes nothing.

    topic, find_topic, ...      topics, groups and how far they are
    pull, offsets, search       a queue as its consumer reads it
    far, jobs, chunks, ...      what the pipeline and operators ask
    rows_of, times_of           a queue's rows as they lie in files, for a process that reads them there

The server asks the state nothing but through this class. Answers are copies, numbers and named tuples, so that nobody
can change the state by what it was given; where a copy would cost a hot path time, the method says so. Who waits for
which message is the server's business, and which messages a pop gives is decided in leasing.py. Pulling is the hot path
of reading.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from postdate.arrival import NEVER
from postdate.contract import DeletedQueue, NamedQueues, TopicQueues
from postdate.errors import UsageError
from postdate.message import Host
from postdate.state.cancels import Tombstone
from postdate.state.fold import Fold
from postdate.state.jobs import CANCEL, FAILED, IMPORT, Job
from postdate.state.leases import Key, Lease
from postdate.state.topics import GONE, PERM_INHERIT, PERM_READ, PERM_WRITE, SCHEDULE_TOPIC
from postdate.state.wheel import Waiting
from postdate.storage import delivery
from postdate.storage import record as records
from postdate.storage.log import NO_BATCH, Log
from postdate.storage.queue import FILTER_ROWS, Queue, tagged
from postdate.storage.rows import Rows
from postdate.storage.segment import Segments

# The answers are made of these constants and plain values of the state: those above import them from here.
__all__ = [
    "CANCEL", "FAILED", "PERM_INHERIT", "PERM_READ", "PERM_WRITE", "SCHEDULE_TOPIC", "FarState", "Job", "Key",
    "Lease", "PullStatus", "Pulled", "Tombstone", "TopicInfo", "View", "Waiting", "WaitingCounts",
]  # fmt: skip


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
    body: bytes = b""  # the records, one after the other
    record_count: int = 0

    @property
    def records(self) -> list[bytes]:
        return records.split(self.body)


class TopicInfo(Protocol):
    """A topic, to read and never to change. It is the state's own object: every pull asks for one, and a copy would
    cost it a microsecond.
    """

    @property
    def name(self) -> str: ...
    @property
    def read_queue_count(self) -> int: ...
    @property
    def write_queue_count(self) -> int: ...
    @property
    def perm(self) -> int: ...
    @property
    def attributes(self) -> Mapping[str, str]: ...
    @property
    def numbers(self) -> Sequence[int]:
        """The number of each queue, by its id. A number is never given twice."""
        ...


class FarState(NamedTuple):
    """How far the pipeline has come with the far queue."""

    epoch: int  # of the pipeline that registered last; 0 where none ever has
    taken: int  # the pipeline has taken every row before this one
    horizon_at_ms: int  # the table has given away everything due by then
    first: int  # the first row that is still there
    length: int
    arrival_of_taken: int  # where in the log the first row begins that is not taken
    rows_in: int  # rows that ever came into the table
    rows_out: int  # rows that left it
    in_table: int  # rows that wait there
    has_staged: bool  # messages wait in the wheel that came from it
    table: str  # where it is


class WaitingCounts(NamedTuple):
    """Messages that wait, without those of deleted topics."""

    near: int  # in the wheel
    far: int  # in the far queue, untaken; cancelled ones too, until the pipeline or a rescue comes across them


class View:
    """Answers questions about one broker's state."""

    def __init__(self, fold: Fold, log: Log, segments: Segments) -> None:
        self._fold, self._log, self._segments = fold, log, segments
        self.trusts_table = True  # False: what the log says of where the table is does not count

    # -- topics -------------------------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicInfo:
        """Raises TopicNotFound."""
        return self._fold.topics.get(name)

    def find_topic(self, name: str) -> TopicInfo | None:
        return self._fold.topics.by_name.get(name)

    def has_topic(self, name: str) -> bool:
        return name in self._fold.topics.by_name

    def topic_names(self) -> list[str]:
        """Every topic but SCHEDULE_TOPIC_XXXX, which the broker keeps for its levels."""
        return [name for name in self._fold.topics.by_name if name != SCHEDULE_TOPIC]

    def named_queues(self) -> NamedQueues:
        """Which queue number is which topic and queue."""
        topics = self._fold.topics
        named = [
            TopicQueues(
                topic.name, topic.read_queue_count, topic.write_queue_count, topic.perm,
                dict(topic.attributes), list(topic.numbers),
            )
            for topic in topics.by_name.values()
        ]  # fmt: skip
        return NamedQueues(named, [DeletedQueue(number, *topics.places[number]) for number in self.deleted_queues()])

    def queue_number(self, topic: str, queue_id: int) -> int:
        """Raises TopicNotFound, UsageError."""
        return self.queue(topic, queue_id).number

    def topic_of_queue(self, number: int) -> str:
        """The topic that a queue belongs to, or belonged to before its topic was deleted."""
        return self._fold.topics.places[number][0]

    def place_of_queue(self, number: int) -> tuple[str, int]:
        """The topic and queue id of a queue, also after its topic was deleted."""
        return self._fold.topics.places[number]

    def topics_by_queue(self) -> list[str]:
        """The same for every queue that ever existed, by number."""
        return [name for name, _ in self._fold.topics.places]

    def is_deleted(self, numbers: np.ndarray) -> np.ndarray:
        """Which of these queues, given by number, belong to deleted topics."""
        gone: np.ndarray = self._fold.topics.target_array[numbers] == GONE
        return gone

    def deleted_queues(self) -> list[int]:
        found: list[int] = np.flatnonzero(self._fold.topics.target_array == GONE).tolist()
        return found

    # -- groups -------------------------------------------------------------------------------------------------

    def has_group(self, name: str) -> bool:
        return name in self._fold.groups

    @property
    def group_count(self) -> int:
        return len(self._fold.groups)

    def group_settings(self, name: str) -> Mapping[str, Any]:
        """Empty for a group that nobody has set up."""
        return self._fold.groups.settings.get(name, {})

    def all_group_settings(self) -> dict[str, dict[str, Any]]:
        """Every group by name, in order of names."""
        return self._fold.groups.all_settings()

    def committed_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """None where the group has never committed one."""
        return self._fold.groups.offset(group, topic, queue_id)

    def committed_offsets(self, group: str) -> dict[tuple[str, int], int]:
        """By topic and queue id."""
        return self._fold.groups.offsets(group)

    @property
    def committed_offset_count(self) -> int:
        """Of all groups together."""
        return self._fold.groups.offset_count

    # -- key-value settings -------------------------------------------------------------------------------------

    def find_value(self, namespace: str, key: str) -> str | None:
        """Returns what operators keep under a key; None where there is nothing."""
        return self._fold.values.find(namespace, key)

    def values_of(self, namespace: str) -> dict[str, str]:
        """Returns those of a namespace by key."""
        return self._fold.values.of(namespace)

    # -- leases -------------------------------------------------------------------------------------------------

    def leases(self) -> list[tuple[Key, Lease]]:
        """Every message that a group has popped and not acknowledged, with its lease."""
        return list(self._fold.leases.by_key.items())

    def lease(self, key: Key) -> Lease:
        """The lease of a message that a group has popped and not acknowledged. Raises KeyError where there is none."""
        return self._fold.leases.by_key[key]

    def find_lease(self, key: Key) -> Lease | None:
        return self._fold.leases.by_key.get(key)

    def leased_count(self, group: str, number: int) -> int:
        """How many messages of a queue a group was given and has not acknowledged, also where they came back."""
        leases, place = self._fold.leases, (group, number)
        return leases.leased.get(place, 0) + len(leases.ready.get(place, ()))

    def ready_queues(self, group: str) -> list[int]:
        """Numbers of the queues of which messages came back to a group."""
        leases = self._fold.leases
        return [number for name, number in leases.ready if name == group] if group in leases.counts else []

    @property
    def has_spent_leases(self) -> bool:
        """Whether messages were given as often as they may be, and wait to become dead letters."""
        return bool(self._fold.leases.spent)

    # -- what waits ---------------------------------------------------------------------------------------------

    @property
    def next_due_at_ms(self) -> int:
        """When the earliest message in the wheel is due; NEVER where none waits."""
        return self._fold.wheel.next_due_at_ms

    def waiting_counts(self) -> WaitingCounts:
        gone = self.deleted_queues()
        near, far = (
            sum(counts) - sum(counts[number] for number in gone) for counts in (self._fold.near, self._fold.untaken)
        )
        return WaitingCounts(near, far)

    def waiting_near(self) -> Iterator[Waiting]:
        """What waits in the wheel, piece by piece. The state may go on between two pieces."""
        return self._fold.wheel.waiting()

    def waiting_far(self) -> Iterator[Waiting]:
        """What waits untaken in the far queue, piece by piece, without what is cancelled."""
        return self._fold.waiting_far()

    def wheel_page(self, after: tuple[int, int], limit: int) -> tuple[np.ndarray, tuple[int, int] | None]:
        """Returns rows (layout.NEAR) of what waits in the wheel after a place of (due, arrival), about `limit` of them,
        and the place where the next page begins; None after the last one.
        """
        rows, place = self._fold.wheel.page(after, limit)
        return rows[~self.is_deleted(rows["queue"])], place

    @property
    def tombstone_count(self) -> int:
        """Cancels that wait for their messages."""
        return self._fold.cancels.count

    def tombstones_after(self, due_at_ms: int) -> Iterator[Tombstone]:
        """Cancels of messages that are due after an instant."""
        return self._fold.cancels.between(due_at_ms + 1, NEVER)

    # -- the pipeline -------------------------------------------------------------------------------------------

    @property
    def far(self) -> FarState:
        far = self._fold.far
        return FarState(
            far.epoch, far.taken, far.horizon_at_ms, far.rows.first, far.length, far.arrival_of(far.taken),
            far.rows_in, far.rows_out, far.in_table, bool(self._fold.wheel.runs),
            far.table if self.trusts_table else "",
        )  # fmt: skip

    def far_arrival(self, number: int) -> int:
        """The arrival of a far row; NEVER where the queue ends before it."""
        return self._fold.far.arrival_of(number)

    def read_far(self, start: int, count: int) -> np.ndarray:
        """Returns rows of the far queue (layout.FAR) that are durable, from number `start` on."""
        first = self._fold.far.rows.first
        if start < first or count < 0:
            raise UsageError(f"far rows from {start} and {count} of them: the first that is there is {first}")
        rows = self._fold.far.rows.read(start, start + count)
        return rows[rows["arrival"] < self._log.durable]

    def find_job(self, job_id: str) -> Job | None:
        """A copy of the job that has this id."""
        job = self._fold.jobs.find(job_id)
        return None if job is None else replace(job)

    def job(self, number: int) -> Job | None:
        """A copy of the job that has this number."""
        job = self._fold.jobs.get(number)
        return None if job is None else replace(job)

    def jobs(self) -> list[Job]:
        """Copies of all jobs, in the order in which they were asked for."""
        return [replace(job) for job in self._fold.jobs.all()]

    def open_jobs(self) -> list[Job]:
        """Copies of the jobs that wait or run, in the order of their commands."""
        return [replace(job) for job in self._fold.jobs.open()]

    def unfollowed_jobs(self) -> list[Job]:
        """Copies of the jobs whose changes are accepted, and that the table has not followed."""
        return [job for job in self.open_jobs() if job.is_decided or job.op == IMPORT]

    def rows_beside(self) -> int:
        """How many rows of imports and postponements no batch has taken into the table."""
        jobs = self._fold.jobs.beside()
        return sum(job.rows if job.op == IMPORT else job.changed for job in jobs)

    def first_due_beside(self) -> int:
        """A lower bound of what is due among these rows and is not in the wheel; NEVER where there is none."""
        return self._fold.jobs.first_due_beside()

    def wanted_far(self) -> int:
        """The far row up to which a job waits for the table."""
        return self._fold.jobs.wanted_far()

    def next_to_select(self) -> int | None:
        """The number of the job that a pipeline may select for now."""
        job = self._fold.jobs.next_to_select()
        return None if job is None else job.number

    def chunks(self) -> list[tuple[int, str, int]]:
        """(first offset, name, bytes) of the staged chunks that are there."""
        return self._fold.chunks.all()

    def chunk_names(self) -> set[str]:
        return self._fold.chunks.names()

    # -- the log ------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Everything before this offset of the log is applied."""
        return self._fold.position

    @property
    def log_mark(self) -> tuple[int, int] | None:
        """Where the last batch that is applied begins, and its checksum without the highest bit; None where that is not
        known, as after a snapshot of an earlier version.
        """
        offset = self._fold.last_offset
        mark = self._log.mark_at(offset)
        return None if mark is None or mark == NO_BATCH else (offset, mark)

    @property
    def applied_at_ms(self) -> int:
        """The instant of the last batch that is applied."""
        return self._fold.at_ms

    # -- queues -------------------------------------------------------------------------------------------------

    def queue(self, topic: str, queue_id: int) -> Queue:
        """Returns the state's own queue, to be read only, for parts of the broker. Raises TopicNotFound, UsageError."""
        found = self._fold.topics.get(topic)
        if not 0 <= queue_id < len(found.numbers):
            raise UsageError(f"queue {queue_id} of topic {topic!r} does not exist: it has {len(found.numbers)}")
        return self._fold.queues[found.numbers[queue_id]]

    def offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Returns the smallest offset that is there, and the next one that will be given."""
        queue = self.queue(topic, queue_id)
        return queue.first, queue.length

    def queue_lengths(self) -> list[int]:
        """The next offset of every queue that ever existed, by number."""
        return [queue.length for queue in self._fold.queues]

    def queue_length(self, number: int) -> int:
        return self._fold.queues[number].length

    @property
    def queue_count(self) -> int:
        """Of all queues that ever existed."""
        return len(self._fold.queues)

    def search(self, topic: str, queue_id: int, at_ms: int) -> int:
        """Returns the first offset that became visible at or after an instant; the next one where none did."""
        queue = self.queue(topic, queue_id)
        return max(queue.search(at_ms), queue.first)

    def visible_at_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Returns when a message became visible."""
        return int(self.queue(topic, queue_id).visible_at_ms(offset, offset + 1)[0])

    def entries(self, topic: str, queue_id: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns (place in the log, size, tag hash) of the visible messages start..stop-1."""
        found: list[tuple[int, int, int]] = self.queue(topic, queue_id).entries.read(start, stop).tolist()
        return found

    def place(self, topic: str, queue_id: int, offset: int) -> int:
        """Returns where the record of a visible message lies in the log."""
        return int(self.queue(topic, queue_id).entries.read(offset, offset + 1)["offset"][0])

    # -- pulling ------------------------------------------------------------------------------------------------

    def pull(
        self, topic: str, queue_id: int, offset: int, *, count_max: int = 32, bytes_max: int = 256 * 1024,
        tag_hashes: frozenset[int] | None = None, store_host: Host | None = None,
    ) -> Pulled:  # fmt: skip
        """Reads visible messages from an offset on, at least one if there is one, as their consumer reads them.

        `store_host` is where the consumer reaches the broker; without it, the address at which they were stored.
        Messages whose records retention has removed are passed over.
        """
        queue = self.queue(topic, queue_id)
        low, high = queue.first, queue.length
        if count_max < 1:
            raise UsageError(f"count_max is {count_max}, expected at least 1")
        if offset == high:
            return Pulled(PullStatus.NO_NEW, offset, low, high)
        if not low <= offset < high:
            return Pulled(PullStatus.ILLEGAL_OFFSET, low if offset < low else high, low, high)
        body, next_offset, count = self._collect(queue, queue_id, offset, count_max, bytes_max, tag_hashes, store_host)
        return Pulled(PullStatus.FOUND if body else PullStatus.NO_MATCH, next_offset, low, high, body, count)

    def _collect(
        self, queue: Queue, queue_id: int, offset: int, count_max: int, bytes_max: int,
        tag_hashes: frozenset[int] | None, store_host: Host | None,
    ) -> tuple[bytes, int, int]:  # fmt: skip
        """Returns the records from an offset on that pass the filter, as their consumer sees them, where to go on, and
        how many they are.

        All are copied into one piece first and patched there: a pull of 32 takes some 40 us.
        """
        if min(count_max, queue.length - offset) >= delivery.MANY and not tag_hashes and store_host is not None:
            many, count = self._collect_many(queue, queue_id, offset, count_max, bytes_max, store_host)
            if count:
                return many, offset + count, count
        stop = min(offset + (FILTER_ROWS if tag_hashes else count_max), queue.length)
        # As Log.read, without the call: a segment that is mapped is where nearly all records are.
        view_of, shift, mask = self._segments.views.get, self._segments.shift, self._segments.segment_bytes - 1
        read, own_id = self._fold.read, queue_id.to_bytes(4, "big")
        found: list[bytes] = []
        chosen: list[tuple[int, int, int, int]] = []  # position in the body, queue offset, place in the log, index
        total, queue_id_in = 0, records.QUEUE_ID
        entries = queue.entries.read(offset, stop)
        for index, (place, size, _) in _filter_entries(entries, tag_hashes):
            view = view_of(place >> shift)
            data = read(place, size) if view is None else view[place & mask : (place & mask) + size]
            if not data:
                continue
            if len(found) == count_max or (found and total + size > bytes_max):
                stop = offset + index
                break
            chosen.append((total, offset + index, place, index))
            found.append(data if data[queue_id_in] == own_id else records.moved(data, queue_id))
            total += size
        if not found:
            return b"", stop, 0
        body = bytearray().join(found)
        visible_at = queue.visible_at_ms(offset, stop).tolist()
        places = ((at, place_in_queue, place, visible_at[index]) for at, place_in_queue, place, index in chosen)
        records.deliver(body, places, store_host)
        return bytes(body), stop, len(found)

    def _collect_many(
        self, queue: Queue, queue_id: int, offset: int, count_max: int, bytes_max: int, store_host: Host
    ) -> tuple[bytes, int]:
        """Returns the records from an offset on, by columns, and their number; none unless all are there and alike."""
        entries = queue.entries.read(offset, offset + count_max)
        ends = np.cumsum(entries["size"], dtype=np.int64)
        count = max(1, int(np.searchsorted(ends, bytes_max, "right")))
        entries, ends = entries[:count], ends[:count]
        body = bytearray().join(self._read_many(entries["offset"], entries["size"]))
        visible_at = queue.visible_at_ms(offset, offset + count)
        is_whole = len(body) == ends[-1]  # otherwise some are gone
        if is_whole and delivery.deliver(
            body, ends - entries["size"], queue_id, offset, entries["offset"], visible_at, store_host
        ):
            return bytes(body), count
        return b"", 0

    def _read_many(self, places: np.ndarray, sizes: np.ndarray) -> list[bytes]:
        """Reads records; mostly they are in one segment, which is looked up once."""
        shift, number = self._segments.shift, int(places[0]) >> self._segments.shift
        view = self._segments.views.get(number)
        if view is None or (places >> shift != number).any():
            return list(map(self._fold.read, places.tolist(), sizes.tolist()))
        starts = places & (self._segments.segment_bytes - 1)
        return [view[start:stop] for start, stop in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]

    # -- rows in files ------------------------------------------------------------------------------------------

    @property
    def file_rows(self) -> int:
        """Rows in each file of a queue."""
        return self._fold.file_rows

    def rows_of(self, topic: str, queue_id: int) -> Rows:
        """Returns the rows of a topic's queue or, for the topic "", of the far queue: the state's own, to be read and
        never changed, because an answer may hold megabytes of them.
        """
        return self.queue(topic, queue_id).entries if topic else self._fold.far.rows

    def times_of(self, topic: str, queue_id: int) -> Rows:
        """Returns the rows that say when the entries of a topic's queue became visible; likewise."""
        return self.queue(topic, queue_id).times

    def time_row(self, topic: str, queue_id: int, offset: int) -> int:
        """Returns the number of the one among them that holds for an offset."""
        queue = self.queue(topic, queue_id)
        return queue.time_row(max(offset, queue.first))


def _filter_entries(
    entries: np.ndarray, tag_hashes: frozenset[int] | None
) -> Iterable[tuple[int, tuple[int, int, int]]]:
    """Yields the entries that pass a filter, with their indexes."""
    if not tag_hashes:
        return enumerate(entries.tolist())
    return ((index, entries[index].item()) for index in tagged(entries, tag_hashes))

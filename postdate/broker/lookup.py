"""The lookup: finds messages by key or by place, and says of each where it is.

A lookup is an iterator of small steps: each does a fraction of a millisecond of work, so that no fire waits for it, and
yields a message or None. Between two steps the fold may go on, and retention may remove files. A message is looked for
in the direction in which messages move (far queue, staged chunk, wheel, queue), so that one that moves meanwhile is not
missed.

    the index        leads to every message in the log that is not older than the index
    the far queue    to older ones that wait, or waited long; by unique key and first user key
    the chunks       to those whose record is left in a chunk alone; likewise

This file changes nothing. It cannot know what the pipeline's table alone holds.
"""

import enum
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from postdate.arrival import NEVER, OWN
from postdate.errors import CorruptData, IllegalMessage, UsageError
from postdate.keys import key_hash
from postdate.message import (
    PROPERTY_DELAY,
    PROPERTY_MOVED,
    DelayLevels,
    Host,
    MovedFrom,
    SendIdentity,
    decode_properties,
    due,
)
from postdate.state.fold import Fold
from postdate.state.topics import GONE, SCHEDULE_TOPIC, Topic
from postdate.state.transactions import Half
from postdate.state.wheel import CANCELLED, ELSEWHERE, LIVING
from postdate.storage import record as records
from postdate.storage.batch import MESSAGE, SYSTEM_TOPIC_PREFIX
from postdate.storage.chunk import CHUNK_BIT, FLAG_OWN_ARRIVAL, Chunk

BY_ANY, BY_UNIQUE, BY_KEY = "any", "unique", "key"
NOWHERE = -1  # queue offset of a message that is in no queue
_ROWS_PER_STEP = 16_384  # entries, far rows, singles or chunk rows looked through in one step: some 0.1 ms
_SCAN_PRICE = 16  # looking through one far row costs as much as searching the index among this many rows
_ARRIVALS_MAX = 64  # messages of one key that a cancel looks up one by one: some 0.1 ms each
_Result = TypeVar("_Result")
Steps = Generator[None, None, _Result]


class State(enum.Enum):
    """Where a message is."""

    WAITING = "waiting"  # for its due
    VISIBLE = "visible"  # in its queue
    CANCELLED = "cancelled"  # it will never be seen
    DELETED = "deleted"  # with its topic
    MOVED = "moved"  # to another due: a later record of its key has it
    HALF = "half"  # of a transaction that is open: nobody sees it before it is committed
    UNKNOWN = "unknown"  # nothing that is left says: it was delivered or cancelled long ago


class Found(NamedTuple):
    """A message, as its consumer reads it where it is visible."""

    record: bytes
    state: State
    offset: int  # of its record, in the log or a chunk
    arrival: int  # where it first came in
    stored_at_ms: int  # when
    due_at_ms: int  # 0 = at once
    queue_id: int = 0
    queue_offset: int = NOWHERE
    visible_at_ms: int = 0
    is_near: bool = False  # it waits in the wheel
    is_in_table_alone: bool = False

    @property
    def until_ms(self) -> int:
        """When it became visible, or is due."""
        return max(self.stored_at_ms, self.visible_at_ms, self.due_at_ms)


class Logged(NamedTuple):
    """A message's record, raw and decoded."""

    offset: int  # in the log or a chunk
    data: bytes
    record: records.Record
    properties: dict[str, str]


class _Staged(NamedTuple):
    base: int
    row: int
    offset: int  # of its record
    arrival: int
    due_at_ms: int
    queue: int


class _Place(NamedTuple):
    """The state of a message; where there are offsets, only if no queue has an entry with one of them."""

    state: State
    offsets: tuple[int, ...] = ()
    is_near: bool = False  # it waits in the wheel


class Lookup:
    """Looks messages up in one fold. `levels` says what a delay level means where nothing else does."""

    def __init__(self, fold: Fold, levels: DelayLevels, record_bytes_max: int) -> None:
        self._fold, self._levels, self._record_bytes_max = fold, levels, record_bytes_max
        # By hash of a key that was sought: where its messages are, except in far rows from the second number on.
        self._sought: dict[int, tuple[list[int], int]] = {}

    # -- by key -------------------------------------------------------------------------------------------------

    def find(
        self, topic: str, key: str, by: str = BY_ANY, begin_ms: int = 0, end_ms: int = NEVER,
        store_host: Host | None = None,
    ) -> Iterator[Found | None]:  # fmt: skip
        """Yields the messages of a topic and key, newest first, each once; None for a step that has found none.

        `by` says which key is meant: "unique", "key" (one of KEYS), or "any" of them. Only messages count that were
        stored, waited or became visible between the two instants. Raises TopicNotFound, UsageError.
        """
        if not key or by not in (BY_ANY, BY_UNIQUE, BY_KEY):
            raise UsageError(f"a lookup needs a key and by='unique', 'key' or 'any', got key {key!r} and by={by!r}")
        self._fold.topics.get(topic)
        return self._find(topic, key, by, begin_ms, end_ms, store_host)

    def _find(
        self, topic: str, key: str, by: str, begin_ms: int, end_ms: int, store_host: Host | None
    ) -> Iterator[Found | None]:
        for half in self._fold.transactions.find(key_hash(key)) if by != BY_KEY else ():
            seen = self._half(half, store_host)
            record = records.decode(seen.record)
            is_meant = record.topic == topic and records.has_key(decode_properties(record.properties), key, BY_UNIQUE)
            yield seen if is_meant and begin_ms <= seen.stored_at_ms <= end_ms else None
        moved: set[int] = set()  # arrivals of messages that were moved: the newer record is the message
        known: set[int] = set()  # arrivals
        is_complete = True  # whether every record that the index leads to is there
        is_missed = True  # whether a message was moved on whose newer record came after its turn
        while is_missed:
            is_missed = False
            for staged, offset in self._once(key_hash(key)):
                yield None
                logged = self.logged(offset) if offset else None
                is_complete &= logged is not None or not offset
                if logged is None or logged.record.topic != topic or not records.has_key(logged.properties, key, by):
                    continue
                source = MovedFrom.parse(logged.properties.get(PROPERTY_MOVED, ""))
                if source is not None:
                    moved.add(source.arrival)
                arrival = staged.arrival if staged else offset
                if arrival in moved or arrival in known:
                    continue
                known.add(arrival)
                for found in run_steps(self._message(logged, staged, store_host)):
                    is_within = found is not None and found.stored_at_ms <= end_ms and found.until_ms >= begin_ms
                    is_missed |= found is not None and found.state is State.MOVED
                    if found is None or not is_within or found.state is State.MOVED:
                        yield None
                    elif found.state is State.CANCELLED and self._may_be_moved(found, is_complete):
                        yield found._replace(state=State.UNKNOWN)
                    else:
                        yield found

    def _may_be_moved(self, found: Found, is_complete: bool) -> bool:
        """Whether a message that is due, and in no queue, may have been moved by a record that is gone. `is_complete`
        says that every newer record is there that the index knows.
        """
        if not self._fold.moves.count or found.due_at_ms > self._fold.fired_at_ms:
            return False
        return not is_complete or found.arrival < self._fold.index.begin

    def find_send(self, sent: SendIdentity, since_ms: int) -> Iterator[Found | None]:
        """Yields the message that a send has stored in the topic of that name at an instant or later, if there is one;
        None for each step that has found none. Looks at the newest messages alone, so that its price does not grow with
        the log. Raises TopicNotFound.
        """
        begin = max(
            self._fold.references.first_since(self._fold.position, since_ms), self._fold.topics.get(sent.topic).born
        )
        for offsets in self._fold.index.find(key_hash(sent.unique_key), begin):
            yield None
            for offset in offsets[offsets >= begin].tolist():
                logged = self.logged(offset)
                if logged is None or not records.has_key(logged.properties, sent.unique_key, BY_UNIQUE):
                    continue
                record = logged.record
                if (record.topic, record.born_at_ms, record.reconsume_times) == (
                    sent.topic, sent.born_at_ms, sent.reconsume_times,
                ):  # fmt: skip
                    yield from run_steps(self._message(logged, None, None))

    def _once(self, hashed: int) -> Iterator[tuple[_Staged | None, int]]:
        """Yields (its row in a chunk if it was found there, offset) of each message that may be meant, once; offset 0
        is a step.
        """
        seen: set[int] = set()
        for offset in self._in_log(hashed):
            if offset not in seen:
                yield None, offset
                seen.add(offset)
        for staged in self._in_chunks(hashed):
            yield (staged, staged.offset) if staged else (None, 0)

    def _in_log(self, hashed: int) -> Iterator[int]:
        begin = self._fold.index.begin
        for offsets in self._fold.index.find(hashed):
            yield 0
            yield from offsets.tolist()
        yield from self._in_far(hashed, begin)

    def _in_far(self, hashed: int, before: int) -> Iterator[int]:
        """Yields offsets of messages older than the index that were far when they came."""
        rows, wanted = self._fold.far.rows, np.uint64(hashed)
        stop = rows.search("arrival", before, "left")
        while stop > rows.first:
            start = max(stop - _ROWS_PER_STEP, rows.first)
            piece = rows.read(start, stop)
            hits = (piece["unique_hash"] == wanted) | (piece["key_hash"] == wanted)
            yield 0
            yield from piece["arrival"][hits & (piece["kind"] == MESSAGE)][::-1].tolist()
            stop = start

    def _in_chunks(self, hashed: int) -> Iterator[_Staged | None]:
        """Yields rows of chunks whose record is in no other place."""
        for base in reversed(self._fold.chunks.bases()):
            chunk = self._fold.chunks.get(base)
            if chunk is not None:
                yield from self._in_chunk(base, chunk, np.uint64(hashed))

    def _in_chunk(self, base: int, chunk: Chunk, wanted: np.uint64) -> Iterator[_Staged | None]:
        for start in range(0, len(chunk.index), _ROWS_PER_STEP):
            yield None
            rows = chunk.index[start : start + _ROWS_PER_STEP]
            hits = np.flatnonzero((rows["unique_hash"] == wanted) | (rows["key_hash"] == wanted))
            for hit in hits.tolist():
                staged = _staged(base, chunk, start + hit)
                if rows["flags"][hit] & FLAG_OWN_ARRIVAL:
                    is_alone = not self._was_brought_before(staged)
                else:
                    is_alone = not self._fold.read(staged.arrival, 4)  # it is not in the log, too
                if is_alone:
                    yield staged

    def _was_brought_before(self, staged: _Staged) -> bool:
        """Whether an earlier chunk has a message that a job brings: bulk brought it there before the table had it."""
        earlier = (self._fold.chunks.get(base) for base in self._fold.chunks.bases() if base < staged.base)
        place = (staged.due_at_ms, staged.arrival)
        return staged.arrival >= OWN and any(
            chunk and _row_of(chunk, *place, own=True) is not None for chunk in earlier
        )

    # -- by place -----------------------------------------------------------------------------------------------

    def find_at(self, offset: int, store_host: Host | None) -> Iterator[Found | None]:
        """Yields None for each step, then the message at an offset of the log or of a chunk, if there is one."""
        half = self._fold.transactions.halves.get(offset)
        logged = self.logged(offset)
        if half is not None:
            yield self._half(half, store_host)
        elif logged is not None:
            yield from run_steps(self._find_logged(logged, store_host))

    def _half(self, half: Half, store_host: Host | None) -> Found:
        data = self._fold.read(half.offset, half.size)
        found = Found(data, State.HALF, half.offset, half.offset, half.stored_at_ms, 0, records.decode(data).queue_id)
        return _as_undelivered(found, store_host)

    def _find_logged(self, logged: Logged, store_host: Host | None) -> Steps[Found]:
        staged = (yield from self._staged_at(logged.offset)) if logged.offset >= CHUNK_BIT else None
        return (yield from self._message(logged, staged, store_host))

    def _staged_at(self, offset: int) -> Steps[_Staged | None]:
        base = self._fold.chunks.base_of(offset)
        chunk = self._fold.chunks.get(base) if base is not None else None
        if base is None or chunk is None:
            return None
        for start in range(0, len(chunk.index), _ROWS_PER_STEP):
            yield
            hits = np.flatnonzero(chunk.index["position"][start : start + _ROWS_PER_STEP] == offset - base)
            if len(hits):
                return _staged(base, chunk, start + int(hits[0]))
        return None

    def logged(self, offset: int) -> Logged | None:
        """Returns the message at an offset; None where it is gone, or there is none, as where a half is. The offset may
        be anything: a client names it, or a hash points at it by chance.
        """
        size = int.from_bytes(self._fold.read(offset, 4), "big")
        data = self._fold.read(offset, size) if size <= self._record_bytes_max else b""
        try:
            record = records.decode(data)
            logged = Logged(offset, data, record, decode_properties(record.properties))
        except (CorruptData, IllegalMessage):
            return None
        is_there = offset >= CHUNK_BIT or record.offset == offset
        is_message = not records.is_half(data) and not record.topic.startswith(SYSTEM_TOPIC_PREFIX)
        return logged if is_there and is_message else None

    # -- for a cancel -------------------------------------------------------------------------------------------

    def untaken(self, due_at_ms: int, column: str, hashed: int, before: int) -> np.ndarray:
        """Returns the rows of untaken far messages of that due and key hash, before row number `before`, that are not
        in the wheel.

        With a pipeline few rows are untaken, and looking through them is cheapest. Without one everything that waits is
        untaken, and a cancel that looked through ten million rows would stop everybody for a tenth of a second: the
        index leads to the rows, except to those older than it.
        """
        far, index = self._fold.far, self._fold.index
        sought = self._sought.get(hashed)
        if sought is None and (before - self._first_untaken) * _SCAN_PRICE <= index.row_count:
            return far.find_untaken(due_at_ms, column, hashed, before)
        arrivals, seen = sought or (self._arrivals(hashed), before)
        if arrivals is None or len(arrivals) > _ARRIVALS_MAX:
            return far.find_untaken(due_at_ms, column, hashed, before)
        begin = index.begin
        older = min(before, far.rows.search("arrival", begin, "left")) if begin else 0
        old = far.find_untaken(due_at_ms, column, hashed, older)
        # A message whose keys are alike is there twice.
        known = far.untaken_at(sorted({each for each in arrivals if each >= begin}), due_at_ms, column, hashed, before)
        new = far.find_untaken(due_at_ms, column, hashed, before, start=seen)
        return _join([old, known, new])

    def is_taken(self, arrival: int) -> bool:
        """Whether a message was far, and Spark has taken its row."""
        rows = self._fold.far.rows
        number = rows.search("arrival", arrival, "left")
        return number < self._fold.far.taken and bool((rows.read(number, number + 1)["arrival"] == arrival).any())

    def seek(self, hashes: Sequence[int]) -> None:
        """Looks for many keys at once, where one by one would be expensive. What is found is remembered until `unseek`;
        messages that come later are looked for among the far rows.
        """
        if (self._fold.far.length - self._first_untaken) * _SCAN_PRICE > self._fold.index.row_count:
            found, seen = self._fold.index.find_many(hashes), self._fold.far.length
            self._sought |= {hashed: (arrivals, seen) for hashed, arrivals in found.items()}

    def unseek(self, hashed: int) -> None:
        self._sought.pop(hashed, None)

    @property
    def _first_untaken(self) -> int:
        return max(self._fold.far.taken, self._fold.far.rows.first)

    def _arrivals(self, hashed: int) -> list[int] | None:
        """Returns where the index says that messages of a key are; None where looking them up one by one would take
        longer than looking through all rows.
        """
        found: set[int] = set()
        for offsets in self._fold.index.find(hashed):
            found.update(offsets.tolist())
            if len(found) > _ARRIVALS_MAX:
                return None
        return sorted(found)

    # -- where a message is -------------------------------------------------------------------------------------

    def _message(self, logged: Logged, staged: _Staged | None, store_host: Host | None) -> Steps[Found]:
        record = logged.record
        topic = self._fold.topics.by_name.get(record.topic)
        arrival = staged.arrival if staged else logged.offset
        due_at_ms = staged.due_at_ms if staged else (yield from self._due(logged))
        seen = Found(
            logged.data, State.DELETED, logged.offset, arrival, record.stored_at_ms, due_at_ms, record.queue_id
        )
        if topic is None or not self._is_of(topic, seen, staged):
            return _as_undelivered(seen, store_host)
        place = yield from self._place(seen, staged)
        if place.state is State.CANCELLED and self._fold.has_moved(due_at_ms, arrival):
            place = _Place(State.MOVED)
        if not place.offsets:
            return _as_undelivered(seen._replace(state=place.state, is_near=place.is_near), store_host)
        return (yield from self._find_in_queues(seen, topic, place, store_host))

    def _is_of(self, topic: Topic, seen: Found, staged: _Staged | None) -> bool:
        """Whether it was sent to the topic that has this name now."""
        if staged is not None:
            return self._fold.topics.target[staged.queue] != GONE
        return seen.arrival >= topic.born

    def _due(self, logged: Logged) -> Steps[int]:
        """Returns when it is due. What a level meant when it was sent is written in SCHEDULE_TOPIC_XXXX."""
        record = logged.record
        for number in self._level_numbers(int(logged.properties.get(PROPERTY_DELAY, 0))):
            yield
            entries = self._fold.queues[number].entries
            found = entries.search("offset", logged.offset, "left")
            entry = entries.read(found, found + 1)
            if len(entry) and entry["offset"][0] == logged.offset:
                return int(entry["tag"][0])
        return due(logged.properties, record.stored_at_ms, self._levels, NEVER).at_ms

    def _level_numbers(self, level: int) -> list[int]:
        """Returns the queues of levels, the likely one first: the number of levels may have been another when it was
        sent.
        """
        if level <= 0:
            return []
        numbers = self._fold.topics.get(SCHEDULE_TOPIC).numbers
        likely = min(level, self._levels.count, len(numbers)) - 1
        return [numbers[likely], *numbers[:likely], *numbers[likely + 1 :]]

    def _place(self, seen: Found, staged: _Staged | None) -> Steps[_Place]:
        if staged is not None:
            return (yield from self._staged_place(seen, staged))
        if seen.due_at_ms <= seen.stored_at_ms:
            return _Place(State.UNKNOWN, (seen.offset,))
        rows = self._fold.far.rows
        number = rows.search("arrival", seen.arrival, "left")
        row = rows.read(number, number + 1)
        row = row[(row["arrival"] == seen.arrival) & (row["kind"] == MESSAGE)]
        yield
        if len(row):
            return (yield from self._far_place(seen, number, row))
        return (yield from self._single_place(seen))

    def _far_place(self, seen: Found, number: int, row: np.ndarray) -> Steps[_Place]:
        if self._fold.far.waits(row, number)[0]:
            return _Place(State.CANCELLED if self._fold.is_cancelled(row) else State.WAITING)
        if number >= self._fold.far.taken:
            return (yield from self._single_place(seen))  # a rescue has moved it
        staged = yield from self._staged(seen)
        if staged is not None:
            return (yield from self._staged_place(seen, staged))
        place = yield from self._single_place(seen)
        # If it is not visible, the table left it out, or retention has removed its chunk.
        is_known = not place.offsets or self._fold.is_cancelled(row)
        return place if is_known else place._replace(state=State.UNKNOWN)

    def _staged_place(self, seen: Found, staged: _Staged) -> Steps[_Place]:
        for run in self._fold.wheel.runs:
            if run.base == staged.base and run.position <= staged.row:
                fate = run.fate(staged.row)
                if fate == ELSEWHERE:
                    return (yield from self._single_place(seen))
                return _Place(_STATES[fate], is_near=True)
        # It was fired: from here or, after a rescue, from the log. Nothing says which.
        return _Place(State.CANCELLED, (staged.offset, seen.arrival))

    def _staged(self, seen: Found) -> Steps[_Staged | None]:
        """Returns the row of a message in the staged chunks, which are sorted by (due, arrival)."""
        for base in reversed(self._fold.chunks.bases()):
            yield
            chunk = self._fold.chunks.get(base)
            row = _row_of(chunk, seen.due_at_ms, seen.arrival) if chunk else None
            if chunk is not None and row is not None:
                return _staged(base, chunk, row)
        return None

    def _single_place(self, seen: Found) -> Steps[_Place]:
        """Looks among the singles in the wheel; a message that is not there was fired."""
        start = 0
        while len(singles := self._fold.wheel.singles(seen.due_at_ms, start, start + _ROWS_PER_STEP)):
            hits = np.flatnonzero(singles["offset"] == seen.arrival)
            if len(hits):
                return _Place(State.CANCELLED if singles["queue"][hits[0]] < 0 else State.WAITING, is_near=True)
            start += len(singles)
            yield
        return _Place(State.CANCELLED, (seen.arrival,))

    def _find_in_queues(self, seen: Found, topic: Topic, place: _Place, store_host: Host | None) -> Steps[Found]:
        """Looks for the message's entry in a queue. A message that is due and was not cancelled has one as long as its
        record is there.
        """
        since, is_cut = max(seen.due_at_ms, seen.stored_at_ms), False
        # Where its queue was gone when it was due, its entry is in a queue with a smaller id.
        for queue_id in range(min(seen.queue_id, len(topic.numbers) - 1), -1, -1):
            queue = self._fold.queues[topic.numbers[queue_id]]
            start = max(queue.search(since), queue.first)
            is_cut |= 0 < start == queue.first
            while start < queue.length:
                offsets = queue.entries.read(start, start + _ROWS_PER_STEP)["offset"]
                hits = np.flatnonzero(np.isin(offsets, place.offsets))
                yield
                if len(hits):
                    found = int(offsets[hits[0]])
                    return self._as_delivered(seen, topic, queue_id, start + int(hits[0]), found, store_host)
                start += len(offsets)
        # A chunk may hold a copy of a message that was fired from the log and has lost its record and entry there.
        state = State.UNKNOWN if is_cut and len(place.offsets) > 1 else place.state
        return _as_undelivered(seen._replace(state=state), store_host)

    def _as_delivered(
        self, seen: Found, topic: Topic, queue_id: int, queue_offset: int, place: int, store_host: Host | None
    ) -> Found:
        queue = self._fold.queues[topic.numbers[queue_id]]
        visible_at_ms = int(queue.visible_at_ms(queue_offset, queue_offset + 1)[0])
        body = bytearray(seen.record if queue_id == seen.queue_id else records.moved(seen.record, queue_id))
        records.deliver(body, [(0, queue_offset, place, visible_at_ms)], store_host)
        return seen._replace(
            record=bytes(body), state=State.VISIBLE, queue_id=queue_id, queue_offset=queue_offset,
            visible_at_ms=visible_at_ms,
        )  # fmt: skip


_STATES = {LIVING: State.WAITING, CANCELLED: State.CANCELLED}


def run_steps(steps: Steps[_Result]) -> Iterator[_Result | None]:
    """Yields None for each step but the last, then the result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            yield stop.value
            return
        yield None


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenates arrays. numpy is slow to join rows of many fields, and mostly there is one part or none."""
    kept = [part for part in parts if len(part)]
    return np.concatenate(kept) if len(kept) > 1 else kept[0] if kept else parts[0]


def _as_undelivered(seen: Found, store_host: Host | None) -> Found:
    """Marks the record of a message that is in no queue: its queue offset says so."""
    body = bytearray(seen.record)
    records.deliver(body, [(0, NOWHERE, seen.offset, seen.stored_at_ms)], store_host)
    return seen._replace(record=bytes(body))


def found_in_table(
    data: bytes, due_at_ms: int, arrival: int, store_host: Host | None, state: State, *, is_near: bool
) -> Found:
    """Describes a message that was found in the table alone; if it waits, it may have come into the wheel."""
    record = records.decode(data)
    found = Found(
        data, state, arrival, arrival, record.stored_at_ms, due_at_ms, record.queue_id, is_near=is_near,
        is_in_table_alone=not is_near,
    )  # fmt: skip
    return _as_undelivered(found, store_host)


def _staged(base: int, chunk: Chunk, row: int) -> _Staged:
    due_at_ms, arrival, position, _, queue, *_ = chunk.index[row].tolist()
    return _Staged(base, row, base + position, arrival, due_at_ms, queue)


def _row_of(chunk: Chunk, due_at_ms: int, arrival: int, *, own: bool = False) -> int | None:
    """Returns the row of a far message in a chunk, or of one that has an arrival of its own."""
    index, wanted = chunk.index, (due_at_ms, arrival)
    if not chunk.head.due_low_ms <= due_at_ms <= chunk.head.due_high_ms:
        return None

    def place(row: int) -> tuple[int, int]:
        return int(index["due"][row]), int(index["arrival"][row])

    row = bisect_left(range(len(index)), wanted, key=place)
    while row < len(index) and place(row) == wanted:
        if bool(index["flags"][row] & FLAG_OWN_ARRIVAL) == own:
            return row
        row += 1
    return None

"""The reader: what is visible, as its consumer reads it.

    offsets, search, ...   how far a queue goes, and when its messages became visible
    pull                   records from an offset on, with what only their delivery tells filled in
    rows_of, times_of      a queue's rows as they lie in files, for whoever reads them there

It changes nothing and decides nothing: how far a group has come and who waits for what is the server's business, what a
pop gives the handout's. Pulling is the hot path of reading.
"""

import enum
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from postdate.errors import UsageError
from postdate.message import Host
from postdate.state.fold import Fold
from postdate.storage import delivery
from postdate.storage import record as records
from postdate.storage.queue import FILTER_ROWS, Queue, tagged
from postdate.storage.rows import Rows
from postdate.storage.segment import Segments


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
    body: bytes = b""  # the records, one behind the other
    record_count: int = 0

    @property
    def records(self) -> list[bytes]:
        return records.split(self.body)


class Reader:
    """Reads the queues of one fold, and their records where they lie."""

    def __init__(self, fold: Fold, segments: Segments) -> None:
        self._fold = fold
        self._segments = segments

    def queue(self, topic: str, queue_id: int) -> Queue:
        """Raises TopicNotFound, UsageError."""
        found = self._fold.topics.get(topic)
        if not 0 <= queue_id < len(found.numbers):
            raise UsageError(f"queue {queue_id} of topic {topic!r} does not exist: it has {len(found.numbers)}")
        return self._fold.queues[found.numbers[queue_id]]

    def offsets(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The smallest offset that is not gone, and the next one that will be given."""
        queue = self.queue(topic, queue_id)
        return queue.first, queue.length

    def search(self, topic: str, queue_id: int, at_ms: int) -> int:
        """The first offset that became visible at or after an instant; the max offset where none did."""
        queue = self.queue(topic, queue_id)
        return max(queue.search(at_ms), queue.first)

    def visible_at_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """When a message became visible."""
        return int(self.queue(topic, queue_id).visible_at_ms(offset, offset + 1)[0])

    def entries(self, topic: str, queue_id: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(place in the log, size, tag hash) of the visible messages start..stop-1."""
        found: list[tuple[int, int, int]] = self.queue(topic, queue_id).entries.read(start, stop).tolist()
        return found

    def place(self, topic: str, queue_id: int, offset: int) -> int:
        """Where the record of a visible message lies in the log."""
        return int(self.queue(topic, queue_id).entries.read(offset, offset + 1)["offset"][0])

    # -- pulling ------------------------------------------------------------------------------------------------

    def pull(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        *,
        count_max: int = 32,
        bytes_max: int = 256 * 1024,
        tag_hashes: frozenset[int] | None = None,
        store_host: Host | None = None,
    ) -> Pulled:
        """Reads visible messages from an offset on, at least one if there is one, as their consumer reads them.

        `store_host` is where their consumer reaches the broker, if not where that was when they were stored.

        Messages whose record is gone (retention) are passed over.
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
        self,
        queue: Queue,
        queue_id: int,
        offset: int,
        count_max: int,
        bytes_max: int,
        tag_hashes: frozenset[int] | None,
        store_host: Host | None,
    ) -> tuple[bytes, int, int]:
        """The records from an offset on that pass the filter, as their consumer sees them, where to go on, and how many
        they are.

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
        for index, (place, size, _) in _chosen(entries, tag_hashes):
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
        """The records from an offset on, by columns, and how many they are; none where not all are there and alike."""
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
        """Records; mostly they are in one segment, which is looked up once."""
        shift, number = self._segments.shift, int(places[0]) >> self._segments.shift
        view = self._segments.views.get(number)
        if view is None or (places >> shift != number).any():
            return list(map(self._fold.read, places.tolist(), sizes.tolist()))
        starts = places & (self._segments.segment_bytes - 1)
        return [view[start:stop] for start, stop in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]

    # -- rows ---------------------------------------------------------------------------------------------------

    def rows_of(self, topic: str, queue_id: int) -> Rows:
        """The rows of a topic's queue or, for the topic "", of the far queue."""
        return self.queue(topic, queue_id).entries if topic else self._fold.far.rows

    def times_of(self, topic: str, queue_id: int) -> Rows:
        """The rows that say when the entries of a topic's queue became visible."""
        return self.queue(topic, queue_id).times

    def time_row(self, topic: str, queue_id: int, offset: int) -> int:
        """Which of these rows holds for an offset."""
        queue = self.queue(topic, queue_id)
        return queue.time_row(max(offset, queue.first))


def _chosen(entries: np.ndarray, tag_hashes: frozenset[int] | None) -> Iterable[tuple[int, tuple[int, int, int]]]:
    """Entries that pass a filter, with their indexes."""
    if not tag_hashes:
        return enumerate(entries.tolist())
    return ((index, entries[index].item()) for index in tagged(entries, tag_hashes))
